"""Charts as data, drawn by matplotlib: as SVG whose colours are CSS variables with a light and a dark value, or PNG.

Series differ in dash as well as in colour. matplotlib is imported where a chart is drawn: its import takes a second.
"""

from __future__ import annotations

import dataclasses
import io
import math
import re
import warnings
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TONES = ("ours", "a", "b", "c", "d", "e")
"""Names of the series' colours; ``ours`` is the accent."""
DASHES = dict(ours=(), a=(7, 4), b=(2, 4), c=(10, 4, 2, 4), d=(4, 2), e=(1, 3))
LIGHT = dict(
    ink="#1a2130", muted="#5b6473", grid="#d9dde5", paper="#ffffff", ours="#0b62c4", a="#a04a00", b="#5f6b7a",
    c="#7b3fb5", d="#1b7a3d", e="#b3123f", good="#1b7a3e", bad="#b31240", edge="#9aa4b4",
)  # fmt: skip
"""All different: in a drawing a colour is told by its value."""
DARK = dict(
    ink="#e8ecf3", muted="#a3adbd", grid="#38404e", paper="#151a22", ours="#6db3ff", a="#f2a65a", b="#a3adbd",
    c="#c79bf2", d="#6fd08c", e="#ff8098", good="#6fd08c", bad="#ff8098", edge="#5b6473",
)  # fmt: skip
STYLE: dict[str, Any] = {
    "font.size": 13, "svg.fonttype": "none", "text.parse_math": False, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "legend.handlelength": 3, "axes.axisbelow": True,
    **{k: LIGHT["ink"] for k in ("text.color", "ytick.labelcolor")},
    **{k: LIGHT["muted"] for k in ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")},
    "axes.facecolor": "none", "grid.color": LIGHT["grid"],
}  # fmt: skip
WIDE, LINE, CHARACTER = 380.0, 19.0, 8.0
"""A drawing's width, the height of a line of text and the width of a character, in points: text has 12 px on a phone of
390, which shows the full width."""


@dataclasses.dataclass(frozen=True)
class Bar:
    """A bar, stacked from parts ``(name, value)``; ``missing`` explains an absent bar."""

    label: str
    parts: tuple[tuple[str, float], ...] = ()
    tone: str = "b"
    missing: str = ""

    @property
    def total(self) -> float:
        return sum(v for _, v in self.parts)


@dataclasses.dataclass(frozen=True)
class Bars:
    """Horizontal bars, with the least that is possible as a line (``floor``)."""

    name: str
    title: str
    unit: str
    bars: tuple[Bar, ...]
    floor: float | None = None
    floor_label: str = "floor"
    note: str = ""

    @property
    def axis(self) -> str:
        return self.unit

    def numbers(self) -> list[dict[str, str]]:
        """A row for each bar, with a column for each part."""
        first = next((b.parts[0][0] for b in self.bars if b.parts), "value")
        return [
            {"": b.label, **({k: number(v) for k, v in b.parts} if b.parts else {first: b.missing})} for b in self.bars
        ]

    def summary(self) -> str:
        """The chart in words."""
        said = [f"{b.label}: {b.missing or f'{number(b.total)} {self.unit}'}" for b in self.bars]
        said += [] if self.floor is None else [f"{self.floor_label}: {number(self.floor)} {self.unit}"]
        return "; ".join(said)

    def draw(self, figure: Figure) -> None:
        legend = self.floor is not None or any(len(b.parts) > 1 for b in self.bars)
        axes = _axes(figure, left=4, rows=2.2 * len(self.bars), bottom=2.8 if legend else 0.4)
        for i, bar in enumerate(self.bars):
            start = 0.0
            for k, (_, value) in enumerate(bar.parts):
                axes.barh(i, value, 0.42, left=start, color=LIGHT[bar.tone], alpha=_shade(k, len(bar.parts)))
                start += value
            said = bar.missing or f"{number(bar.total)} {self.unit}"
            for text, x, place in ((said, start, (6, 0)), (bar.label, 0.0, (0, LINE))):
                axes.annotate(text, (x, i), place, textcoords="offset points", va="center", annotation_clip=False)
        axes.set_ylim(len(self.bars) - 0.6, -0.9)
        axes.set_xlim(0, 1.4 * max([b.total for b in self.bars] + [self.floor or 0.0]) or 1.0)
        axes.set_axis_off()
        parts = [p for p, _ in next((b.parts for b in self.bars if len(b.parts) > 1), ())]
        for k, part in enumerate(parts):
            axes.barh(0, 0, color=LIGHT["ours"], alpha=_shade(k, len(parts)), label=part)
        if self.floor is not None:
            label = f"{self.floor_label} {number(self.floor)} {self.unit}"
            for i in range(len(self.bars)):  # beside the bars, not through their labels
                named: Any = {"label": label} if i == 0 else {}
                axes.plot([self.floor] * 2, [i - 0.3, i + 0.3], color=LIGHT["ink"], ls="--", lw=1.5, **named)
        if parts or self.floor is not None:
            figure.legend(loc="lower left", ncols=2, handlelength=1.5)


@dataclasses.dataclass(frozen=True)
class Series:
    """One line."""

    label: str
    points: tuple[tuple[float, float], ...]
    tone: str


@dataclasses.dataclass(frozen=True)
class Lines:
    """Lines over a common x axis."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log: bool = False
    """Both axes, which say so; otherwise y starts at zero or below."""
    note: str = ""

    @property
    def axis(self) -> str:
        return self.y_label

    def numbers(self) -> list[dict[str, str]]:
        """A row for each x, with a column for each line."""
        values = [(s.label, dict(s.points)) for s in self.series]
        xs = sorted({x for s in self.series for x, _ in s.points})
        return [
            {self.x_label: number(x, whole=True), **{k: number(v[x]) if x in v else "" for k, v in values}} for x in xs
        ]

    def summary(self) -> str:
        """The chart in words."""
        ends = [(s.label, *s.points[0], *s.points[-1]) for s in self.series]
        return "; ".join(
            f"{k}: from {number(b)} at {number(a)} to {number(d)} at {number(c)}" for k, a, b, c, d in ends
        )

    def draw(self, figure: Figure) -> None:
        from matplotlib.ticker import LogLocator

        legend = max(len(s.label) for s in self.series)
        columns = max(1, min(len(self.series), int(WIDE / (CHARACTER * legend + 60))))
        lines = -(-len(self.series) // columns)
        axes = _axes(figure, left=66, rows=11, bottom=2.6 + 1.2 * lines, top=1.6)
        for s in sorted(self.series, key=lambda s: s.tone != "ours"):  # dashes on top, for lines that coincide
            marker = "o" if len(s.points) <= 24 else ""
            line = (0, DASHES[s.tone]) if DASHES[s.tone] else "-"
            axes.plot(*zip(*s.points, strict=True), color=LIGHT[s.tone], label=s.label, ls=line, marker=marker, ms=4)
        if self.log:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        else:
            axes.locator_params(axis="x", nbins=5)
            low, high = (end([0.0, *(y for s in self.series for _, y in s.points)]) for end in (min, max))
            axes.set_ylim(low, high + 0.06 * (high - low) or 1.0)
        where = ", logarithmic" if self.log else ""
        axes.set_xlabel(self.x_label + where)
        axes.set_title(self.y_label + where, x=-58 / (WIDE - 82), loc="left", fontsize=13, color=LIGHT["muted"])
        for side in (axes.xaxis, axes.yaxis):
            side.set_major_formatter(lambda value, _: f"{value:,.6g}")
            side.set_minor_formatter("")
        axes.grid(axis="y")
        figure.legend(loc="lower left", ncols=columns)


Chart = Bars | Lines
LARGEST = 1e30
"""Larger numbers are no measurements and cannot be drawn."""


def is_number(value: object) -> bool:
    """Whether a value is a number that can be drawn."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def number(value: float, whole: bool = False) -> str:
    """A number as a person would write it; ``whole``: without decimals where it has none."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1e6 or (whole and value == int(value)):
        return f"{value:,.0f}"
    digits = max(2 - math.floor(math.log10(abs(value))), 0) if abs(value) >= 1e-3 else -1
    return f"{value:,.{min(digits, 4)}f}" if digits >= 0 else f"{value:.2e}"


def css(selector: str = ":root") -> str:
    """The colours, light and dark."""
    light, dark = (selector + " {" + " ".join(f"--{k}: {v};" for k, v in c.items()) + "}" for c in (LIGHT, DARK))
    return f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}"


def _shade(part: int, parts: int) -> float:
    """The last part of a bar is the main part; earlier parts are fainter."""
    return round(0.25 + 0.75 * (part / (parts - 1)) ** 1.5, 2) if parts > 1 else 1.0


def _axes(figure: Figure, *, left: float, rows: float, bottom: float, top: float = 0.0) -> Axes:
    """Axes ``rows`` lines of text high, with room of ``left`` points, and of lines for titles and for a legend."""
    top += 2.0 if figure.get_suptitle() else 0.0
    high = (rows + bottom + top) * LINE
    figure.set_size_inches(WIDE / 72, high / 72)
    return figure.add_axes((left / WIDE, bottom * LINE / high, 1 - (left + 16) / WIDE, rows * LINE / high))


def _drawn(chart: Chart, form: str, titled: bool) -> bytes:
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {**STYLE, "svg.hashsalt": chart.name}
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter without a shape in matplotlib's font has one in the reader's
        figure, out = Figure(), io.BytesIO()
        if titled:
            figure.suptitle(chart.title, x=0.0, ha="left", weight="bold", size=15)
        chart.draw(figure)
        no_date = {k: None for k in ("Date", "Creator", "Format", "Type")} if form == "svg" else {}
        paper = "none" if form == "svg" else LIGHT["paper"]
        figure.savefig(out, format=form, dpi=150, metadata=no_date, facecolor=paper)
    return out.getvalue()


def to_svg(chart: Chart, *, alone: bool = False) -> str:
    """The chart as an ``<svg>``; ``alone`` makes a complete file, with the chart's title inside."""
    text = _drawn(chart, "svg", alone).decode()
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert size is not None
    wide_high = [1.4 * float(x) for x in size.groups()]
    body = re.sub(r'<defs>\s*<style type="text/css">.*?</style>\s*</defs>', "", text[text.index(">", size.end()) + 1 :])
    body = body.replace(' id="', f' id="{chart.name}-').replace('"#', f'"#{chart.name}-').replace("xlink:", "")
    body = body.replace("url(#", f"url(#{chart.name}-")
    body = re.sub(r"'DejaVu Sans'.*?sans-serif", "system-ui, sans-serif", body)
    for name, colour in LIGHT.items():
        body = body.replace(colour, f"var(--{name})")
    style = f"<style>{css('svg')} svg {{ background: var(--paper); }}</style>" if alone else ""
    xmlns = ' xmlns="http://www.w3.org/2000/svg" width="{:g}" height="{:g}"'.format(*wide_high) if alone else ""
    ids = f"{chart.name}-t", f"{chart.name}-d"
    return (
        f'<svg{xmlns} {size[0]} role="img" aria-labelledby="{ids[0]} {ids[1]}"><title id="{ids[0]}">'
        f'{escape(chart.title)}</title><desc id="{ids[1]}">{escape(chart.summary())}</desc>{style}{body.strip()}'
    )


def to_png(chart: Chart, path: Path) -> None:
    """The chart as a PNG."""
    path.write_bytes(_drawn(chart, "png", True))
