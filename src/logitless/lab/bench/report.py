"""``logitless report``: one self-contained HTML page from the results of the other commands.

No network, no scripts: inline SVG and CSS. Every chart has its numbers beside it as a table, a description for screen
readers, and colours for light and dark. What the files do not have is not on the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from logitless._version import __version__
from logitless.lab.bench import charts, charts_png, report_bench, report_charts, report_tiles, report_training
from logitless.lab.bench.charts import Bars, Chart, number
from logitless.lab.bench.report_charts import Section, Table
from logitless.lab.tools.result_files import Record, RecordError, files_in, kind_of, read

ReportError = RecordError

STYLE = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5;
  font: 16px/1.5 system-ui, -apple-system, 'Segoe UI', sans-serif; }
main, header, footer { max-width: 860px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 36px; } h1 { font-size: 1.9rem; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 1.35rem; margin: 44px 0 4px; padding-top: 12px; border-top: 1px solid var(--grid); }
h3 { font-size: 1rem; margin: 28px 0 2px; } p, .note { color: var(--muted); margin: 0 0 10px; }
p, h2, h3, summary, caption { overflow-wrap: anywhere; }
.note { font-size: 0.88rem; } figure { margin: 0 0 8px; } svg { width: 100%; height: auto; display: block; }
a { color: var(--ours); } nav ul { padding: 0; display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; }
summary { cursor: pointer; color: var(--muted); font-size: 0.88rem; }
/* What scrolls has a shadow on the side where there is more of it: phones show no scroll bar. */
.scroll, figure { overflow-x: auto; background:
  linear-gradient(to right, var(--paper) 30%, transparent) left / 36px 100% no-repeat local,
  linear-gradient(to left, var(--paper) 30%, transparent) right / 36px 100% no-repeat local,
  linear-gradient(to right, var(--edge), transparent) left / 14px 100% no-repeat scroll,
  linear-gradient(to left, var(--edge), transparent) right / 14px 100% no-repeat scroll; }
table { border-collapse: collapse; font-size: 0.88rem; margin: 6px 0 14px; min-width: 50%; }
caption { text-align: left; font-weight: 600; padding: 4px 0; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--grid);
  font-variant-numeric: tabular-nums; white-space: nowrap; vertical-align: top; }
td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 120px; max-width: 260px; }
td.text { white-space: normal; overflow-wrap: anywhere; min-width: 260px; }
td.good { color: var(--good); font-weight: 600; } td.bad { color: var(--bad); font-weight: 600; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; padding: 0; margin: 18px 0; list-style: none; }
.tile { flex: 1 1 220px; border: 1px solid var(--grid); border-top: 4px solid var(--muted); border-radius: 6px;
  padding: 10px 14px; overflow-wrap: anywhere; }
.tile span { display: block; color: var(--muted); font-size: 0.85rem; } .tile strong { font-size: 1.5rem; }
.tile.good { border-top-color: var(--good); } .tile.bad { border-top-color: var(--bad); }
.made { font-size: 0.85rem; overflow-wrap: anywhere; }
@media (max-width: 700px) { figure svg { min-width: 720px; } td:first-child { max-width: 150px; } }
footer { color: var(--muted); font-size: 0.85rem; padding-bottom: 40px; margin-top: 48px; }
@media print { body { background: #fff; } details { display: none; } figure { break-inside: avoid; } }
"""


LONG_CELL = 40
"""Characters from which a cell is a text, which breaks into lines."""


def _table(table: Table) -> str:
    table = report_charts.without_empty_columns(table)

    def cell(text: str) -> str:
        mark = {"PASS": "good", "FAIL": "bad"}.get(text) or ("text" if len(text) > LONG_CELL else None)
        return f'<td class="{mark}">{escape(text)}</td>' if mark else f"<td>{escape(text)}</td>"

    head = "".join(f'<th scope="col">{escape(c)}</th>' for c in table.columns)
    rows = "".join("<tr>" + "".join(cell(c) for c in row) + "</tr>" for row in table.rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}"><table><caption>'
        f"{escape(table.title)}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _numbers(chart: Chart) -> Table:
    """A chart's data as a table."""
    if isinstance(chart, Bars):
        parts = next((tuple(p for p, _ in b.parts) for b in chart.bars if b.parts), ())
        rows = [
            (b.label, *([number(v) for _, v in b.parts] or [b.missing] + [""] * (len(parts) - 1))) for b in chart.bars
        ]
        return Table(f"{chart.title} ({chart.unit})", ("", *parts), tuple(rows))
    xs = sorted({x for s in chart.series for x, _ in s.points})
    values = [dict(s.points) for s in chart.series]
    shown = [(f"{x:,g}" if x == int(x) else number(x), *(number(v[x]) if x in v else "" for v in values)) for x in xs]
    return Table(f"{chart.title} ({chart.y_label})", (chart.x_label, *(s.label for s in chart.series)), tuple(shown))


def _figure(chart: Chart) -> str:
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    return (
        f"<h3>{escape(chart.title)}</h3>{note}<figure>{charts.to_svg(chart)}</figure>"
        f"<details><summary>The numbers</summary>{_table(_numbers(chart))}</details>"
    )


def _folded(table: Table) -> str:
    return f"<details><summary>{escape(table.title)}</summary>{_table(table)}</details>"


def _page(sections: Sequence[Section], sources: Sequence[Path], records: list[Record]) -> str:
    links = "".join(f'<li><a href="#{report_charts.slug(s.title)}">{escape(s.title)}</a></li>' for s in sections)
    body = "".join(
        f'<section aria-labelledby="{report_charts.slug(s.title)}"><h2 id="{report_charts.slug(s.title)}">'
        f"{escape(s.title)}</h2><p>{escape(s.text)}</p>"
        f"{''.join(map(_figure, s.charts))}{''.join(map(_table, s.tables))}{''.join(map(_folded, s.folded))}</section>"
        for s in sections
    )
    made = "".join(f'<p class="made">{escape(m)}</p>' for m in _made(records))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        '<link rel="icon" href="data:,"/>'
        f"<title>logitless report</title><style>{charts.css()}{STYLE}</style></head><body>"
        f"<header><h1>logitless report</h1>{report_tiles.html(report_tiles.tiles(records))}"
        f"<p>{escape(_where(records))}</p>{made}"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header><main>{body}</main>'
        f"<footer><p>Made by <code>logitless report</code> {__version__} from "
        + ", ".join(f"<code>{escape(str(p))}</code>" for p in sources)
        + ".</p></footer></body></html>\n"
    )


def _where(records: Sequence[Record]) -> str:
    """The devices that the measurements come from."""
    found: dict[str, None] = {}
    for r in records:
        rows = list(r["arms"].values()) if kind_of(r) == "bench" else [r]
        for row in rows:
            e = row.get("environment", row)
            if isinstance(e, dict) and "device" in e and "jax" in e:
                found[f"{e['device']}, jax {e['jax']}"] = None
    return "; ".join(found) if found else "Predictions and recorded runs."


def _made(records: Sequence[Record]) -> list[str]:
    """By which command, when, and from which code, of records that say so."""
    found: dict[tuple[str, str], list[str]] = {}
    for r in records:
        m = r.get("made")
        if isinstance(m, dict):
            code = f"logitless {m['version']}" + (f" ({m['commit']})" if m.get("commit") else "")
            command = m["command"].replace("__main__.py", "logitless", 1)
            found.setdefault((command, f"{code}; Python {m['python']}"), []).append(m["date"])
    return [
        f"{command}; {min(dates)}{f' to {max(dates)}' if min(dates) != max(dates) else ''}; {code}"
        for (command, code), dates in found.items()
    ]


def _sections(found: Sequence[tuple[Path, Record]]) -> list[Section]:
    """What the records make, in the page's order."""
    kinds: dict[str, list[Record]] = {}
    training: list[tuple[str, Record]] = []
    for path, record in found:
        kind = str(kind_of(record))
        if kind in ("ab", "train"):
            training.append((path.parent.name if path.stem in ("ab", "metrics") else path.stem, record))
        kinds.setdefault(kind, []).append(record)
    sections = []
    if "bench" in kinds:
        sections.append(report_bench.bench(kinds["bench"]))
    if training:
        sections.append(report_training.training(training))
    held = [r for kind in ("train_peak", "train_sizes", "train_largest") for r in kinds.get(kind, [])]
    if held:
        sections.append(report_training.memory(held))
    if "plan" in kinds:
        sections.append(report_charts.plans(kinds["plan"]))
    if "tpu_compile" in kinds or "tpu_cycles" in kinds:
        sections.append(report_charts.tpu([*kinds.get("tpu_compile", []), *kinds.get("tpu_cycles", [])]))
    if "gradcheck" in kinds:
        sections.append(report_charts.gradchecks(kinds["gradcheck"]))
    others = [(path, record) for path, record in found if kind_of(record) == "record"]
    if others:
        sections.append(report_charts.others(others))
    return sections


def _read(sources: Sequence[Path]) -> tuple[list[Section], list[Record]]:
    """The sections and the records behind them; a record that lacks what its kind must have is refused by its file."""
    found: list[tuple[Path, Record]] = []
    for path in sources:
        own = [(path, record) for record in read(path)]
        try:
            _sections(own)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ReportError(f"{path}: a record lacks what its kind must have ({why})") from None
        found += own
    return _sections(found), [record for _, record in found]


def default_out(paths: Sequence[str | Path]) -> Path:
    """Where the page goes if nobody says: into the folder that it reports on."""
    folders = [Path(p) for p in paths if Path(p).is_dir()]
    return (folders[0] if len(folders) == len(paths) == 1 else Path("runs")) / "report.html"


def write(
    paths: Sequence[str | Path],
    out_html: str | Path,
    *,
    plots: str | Path | None = None,
    left: list[Path] | None = None,
) -> int:
    """Write the page for result files (or folders of them), and with ``plots`` each chart as an image; the number of
    charts. Files of a folder that are no results are put into ``left``. Raises :class:`ReportError`, naming the file,
    for one that is missing, broken or of no known kind."""
    sources = files_in([Path(p) for p in paths], left)
    sections, records = _read(sources)
    out = Path(out_html)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(_page(sections, sources, records))
    every = [c for s in sections for c in s.charts]
    if plots is not None:
        folder = Path(plots)
        folder.mkdir(parents=True, exist_ok=True)
        for chart in every:
            (folder / f"{chart.name}.svg").write_text(charts.to_svg(chart, alone=True))
            charts_png.to_png(chart, folder / f"{chart.name}.png")
    return len(every)
