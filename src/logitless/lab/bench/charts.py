"""Charts as data, and the same data as SVG (:mod:`.charts_png` has PNG).

An SVG takes its colours from CSS variables with a light and a dark value, so it follows the reader's theme in a page
and on its own. Series differ in dash and marker as well as in colour.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from html import escape

WIDTH = 760
TONES = ("ours", "a", "b", "c", "d", "e")
"""Names of the series' colours; ``ours`` is the accent."""
DASHES = {"ours": "", "a": "7 4", "b": "2 4", "c": "10 4 2 4", "d": "4 2", "e": "1 3"}
LIGHT = dict(
    ink="#1a2130", muted="#5b6473", grid="#d9dde5", paper="#ffffff", ours="#0b62c4", a="#a04a00", b="#5f6b7a",
    c="#7b3fb5", d="#1b7a3d", e="#b3123f", floor="#1a2130", good="#1b7a3d", bad="#b3123f", edge="#9aa4b4",
)  # fmt: skip
DARK = dict(
    ink="#e8ecf3", muted="#a3adbd", grid="#38404e", paper="#151a22", ours="#6db3ff", a="#f2a65a", b="#a3adbd",
    c="#c79bf2", d="#6fd08c", e="#ff8098", floor="#e8ecf3", good="#6fd08c", bad="#ff8098", edge="#5b6473",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar, made of parts: ``(name, value)``. ``missing`` says why there is none."""

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


Chart = Bars | Lines


def axis_label(chart: Lines, label: str) -> str:
    """An axis that does not start at zero says so."""
    return f"{label}, logarithmic" if chart.log else label


def number(value: float) -> str:
    """A number as a person would write it."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1e6:
        return f"{value:,.0f}"
    digits = max(2 - math.floor(math.log10(abs(value))), 0) if abs(value) >= 1e-3 else -1
    return f"{value:,.{min(digits, 4)}f}" if digits >= 0 else f"{value:.2e}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values between ``low`` and ``high``."""
    if not high > low:
        return [low]
    step = (high - low) / count
    power = 10.0 ** math.floor(math.log10(step))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= step)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def around(low: float, high: float, count: int = 5) -> list[float]:
    """Round values of which the first and the last enclose ``low`` and ``high``: an axis that reaches its data."""
    inside = ticks(low, high, count)
    step = inside[1] - inside[0] if len(inside) > 1 else (high - low) or 1.0
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten that enclose ``low`` and ``high``."""
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    every = [m * 10.0**k for k in exponents for m in (1, 2, 5)]
    first = max(t for t in every if t <= low * (1 + 1e-9))
    return [t for t in every if first <= t <= min(t for t in every if t >= high * (1 - 1e-9))]


def css(selector: str = ":root") -> str:
    """The colours, light and dark."""

    def block(colours: dict[str, str]) -> str:
        return selector + " {" + " ".join(f"--{k}: {v};" for k, v in colours.items()) + "}"

    return (
        block(LIGHT)
        + "\n@media (prefers-color-scheme: dark) { "
        + block(DARK)
        + " }\nsvg text { font: 13px system-ui, -apple-system, 'Segoe UI', sans-serif; fill: var(--ink); }"
        "\nsvg .muted { fill: var(--muted); } svg .grid { stroke: var(--grid); }"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def _frame(chart: Chart, height: float, body: Sequence[str], alone: bool) -> str:
    style = f"<style>{css('svg')} svg {{ background: var(--paper); }}</style>" if alone else ""
    ident = f"chart-{chart.name}"
    xmlns = ' xmlns="http://www.w3.org/2000/svg"' if alone else ""
    size = f' width="{WIDTH}" height="{height:.0f}"' if alone else ""
    title = _text(0, 16, chart.title, extra=' font-weight="600"') if alone else ""
    top = -28 if alone else 0
    return (
        f'<svg{xmlns} viewBox="0 {top} {WIDTH} {height - top:.0f}"{size} role="img" '
        f'aria-labelledby="{ident}-t {ident}-d"><title id="{ident}-t">{escape(chart.title)}</title>'
        f'<desc id="{ident}-d">{escape(summary(chart))}</desc>{style}'
        + (f'<g transform="translate(0 -26)">{title}</g>' if alone else "")
        + "".join(body)
        + "</svg>"
    )


def summary(chart: Chart) -> str:
    """The chart in words."""
    if isinstance(chart, Bars):
        said = [f"{b.label}: {b.missing or number(b.total) + ' ' + chart.unit}" for b in chart.bars]
        if chart.floor is not None:
            said.append(f"{chart.floor_label}: {number(chart.floor)} {chart.unit}")
        return "; ".join(said)
    return "; ".join(
        f"{s.label}: from {number(s.points[0][1])} at {number(s.points[0][0])} to {number(s.points[-1][1])} at "
        f"{number(s.points[-1][0])}"
        for s in chart.series
        if s.points
    )


def to_svg(chart: Chart, *, alone: bool = False) -> str:
    """The chart as one ``<svg>``; ``alone`` makes it a file of its own."""
    return _bars(chart, alone) if isinstance(chart, Bars) else _lines(chart, alone)


def _bars(chart: Bars, alone: bool) -> str:
    left = min(max((len(b.label) for b in chart.bars), default=0) * 7.6 + 14, 320.0)
    right, step, thick = WIDTH - 110.0, 34.0, 20.0
    most = max([b.total for b in chart.bars] + [chart.floor or 0.0]) or 1.0
    scale = (right - left) / most
    body = []
    for i, bar in enumerate(chart.bars):
        y, x = 8 + i * step, left
        body.append(_text(left - 8, y + 15, _short(bar.label, 40), "end"))
        for k, (part, value) in enumerate(bar.parts):
            said = escape(f"{bar.label}, {part}: {number(value)} {chart.unit}")
            body.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(value * scale, 0.5):.1f}" height="{thick}" rx="2" '
                f'style="fill:var(--{bar.tone});opacity:{shade(k, len(bar.parts))}"><title>{said}</title></rect>'
            )
            x += value * scale
        body.append(_text(x + 6, y + 15, bar.missing or f"{number(bar.total)} {chart.unit}"))
    bottom = 8 + len(chart.bars) * step
    if chart.floor is not None:
        x = left + chart.floor * scale
        body.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{bottom:.1f}" '
            'style="stroke:var(--floor);stroke-width:1.5;stroke-dasharray:4 3"/>'
        )
        label = f"{chart.floor_label} {number(chart.floor)} {chart.unit}"
        body.append(_text(min(max(x, left), WIDTH - 8.0 * len(label)), bottom + 14, label, extra=' class="muted"'))
        bottom += 20
    names = [p for p, _ in next((b.parts for b in chart.bars if len(b.parts) > 1), ())]
    x = left
    for k, part in enumerate(names):
        body.append(
            f'<rect x="{x:.1f}" y="{bottom + 4:.1f}" width="12" height="12" rx="2" '
            f'style="fill:var(--ours);opacity:{shade(k, len(names))}"/>'
        )
        body.append(_text(x + 17, bottom + 15, part, extra=' class="muted"'))
        x += 40 + 7.5 * len(part)
    return _frame(chart, bottom + (24 if names else 4), body, alone)


def shade(part: int, parts: int) -> float:
    """The last part of a bar is what it is about; those before it are fainter."""
    return round(0.25 + 0.75 * (part / (parts - 1)) ** 1.5, 2) if parts > 1 else 1.0


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _lines(chart: Lines, alone: bool) -> str:
    left, right, top, bottom = 78.0, WIDTH - 36.0, 10.0, 270.0
    points = [p for s in chart.series for p in s.points]
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    low = min(ys) if chart.log else min(0.0, *ys)
    high = max(ys) if max(ys) > low else low + 1.0
    first, last = min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1.0
    if chart.log:
        y_ticks, x_ticks = decades(low, high), sorted(set(xs))
    else:
        y_ticks, x_ticks = around(low, high), around(first, last, 8)
        first, last = x_ticks[0], x_ticks[-1]
    low, high = y_ticks[0], y_ticks[-1]
    warp = math.log10 if chart.log else float

    def place(x: float, y: float) -> tuple[float, float]:
        across = (warp(x) - warp(first)) / (warp(last) - warp(first))
        up = (warp(y) - warp(low)) / (warp(high) - warp(low))
        return left + across * (right - left), bottom - up * (bottom - top)

    body = []
    for t in y_ticks:
        _, y = place(first, t)
        body.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(_text(left - 6, y + 4, f"{t:,.6g}", "end", ' class="muted"'))
    for t in x_ticks:
        x, _ = place(t, high)
        body.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        body.append(_text(x, bottom + 18, f"{t:,.6g}", "middle", ' class="muted"'))
    body.append(_text((left + right) / 2, bottom + 38, axis_label(chart, chart.x_label), "middle", ' class="muted"'))
    middle = (top + bottom) / 2
    turned = f' class="muted" transform="rotate(-90 14 {middle})"'
    body.append(_text(14, middle, axis_label(chart, chart.y_label), "middle", turned))
    x = left
    for s in sorted(chart.series, key=lambda s: s.tone != "ours"):  # dashes over it, where two lines coincide
        where = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(*p) for p in s.points))
        dash = f";stroke-dasharray:{DASHES[s.tone]}" if DASHES[s.tone] else ""
        body.append(f'<polyline points="{where}" style="fill:none;stroke:var(--{s.tone});stroke-width:2{dash}"/>')
        if len(s.points) <= 24:
            body += [
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.2" style="fill:var(--{s.tone})"><title>'
                f"{escape(s.label)}: {number(p[1])} at {number(p[0])}</title></circle>"
                for p, (a, b) in ((p, place(*p)) for p in s.points)
            ]
        y = bottom + 58
        body.append(
            f'<line x1="{x}" x2="{x + 26}" y1="{y - 4}" y2="{y - 4}" '
            f'style="stroke:var(--{s.tone});stroke-width:2.5{dash}"/>'
        )
        body.append(_text(x + 32, y, s.label))
        x += 56 + 7.2 * len(s.label)
    return _frame(chart, bottom + 68, body, alone)
