"""``logitless report``: one self-contained HTML page from the results of the other commands.

Records are read, turned into sections of charts and tables (:mod:`.report_views`), and written by a Jinja2 template
that escapes all of their text. A record that no page can be made of is refused by file and reason. No network and no
scripts: charts are inline SVG, each with its numbers as a table, a description for screen readers, and colours for
light and dark.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from logitless._version import __version__
from logitless.lab.bench import charts, report_views
from logitless.lab.bench.report_views import Section, Table
from logitless.lab.tools.result_files import Record, RecordError, files_in, kind_of, read

ReportError = RecordError


def missing() -> str:
    """What the report needs and is not installed, with the command that installs it; empty if all is there."""
    lacks = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    return f"needs {' and '.join(lacks)}: pip install 'logitless[tools]'" if lacks else ""


def _where(records: Iterable[Record]) -> list[str]:
    """The devices that the measurements come from."""
    rows = [row for r in records for row in (r["arms"].values() if kind_of(r) == "bench" else [r])]
    found = [e if isinstance(e := row.get("environment") or row, dict) else {} for row in rows]
    return list(dict.fromkeys(f"{e['device']}, jax {e['jax']}" for e in found if "device" in e and "jax" in e))


def _made(records: Iterable[Record]) -> list[str]:
    """Command, date and commit of the records, where recorded."""
    found: dict[tuple[str, str], list[str]] = {}
    for m in filter(None, (r.get("made") for r in records)):
        code = f"logitless {m['version']}" + (f" ({m['commit']})" if m.get("commit") else "")
        command = m["command"].replace("__main__.py", "logitless", 1)
        found.setdefault((command, f"{code}; Python {m['python']}"), []).append(m["date"])
    return [
        f"{command}; {min(dates)}{f' to {max(dates)}' if min(dates) != max(dates) else ''}; {code}"
        for (command, code), dates in found.items()
    ]


def _clean(value: Any) -> Any:
    """A record without characters that a page cannot have: control characters and halves of surrogate pairs."""
    if isinstance(value, str):
        return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]", "\ufffd", value)
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    return [_clean(v) for v in value] if isinstance(value, list) else value


def _read(path: Path) -> list[tuple[Path, Record]]:
    try:
        return [(path, _clean(record)) for record in read(path)]
    except RecursionError:
        raise ReportError(f"{path}: its values are nested too deep") from None


def _fault(found: Sequence[tuple[Path, Record]], error: Exception) -> ReportError:
    """An error with the first file that no page can be made of; with all files if each makes a page alone."""
    for path, record in found:
        try:
            _page([(path, record)], [])
        except Exception as own:
            why = f"{own} is missing" if isinstance(own, KeyError) else f"{type(own).__name__}: {own}"
            return ReportError(f"{path}: a {kind_of(record)} record cannot be shown: {_clean(why)}")
    return ReportError(f"{', '.join(str(path) for path, _ in found)}: cannot be shown together: {_clean(str(error))}")


def _named_apart(sections: Sequence[Section]) -> list[charts.Chart]:
    """All charts; a chart's name is a file name, so repeated names get a number."""
    seen: dict[str, int] = {}
    for s in sections:
        for i, chart in enumerate(s.charts):
            count = seen[chart.name] = seen.get(chart.name, 0) + 1
            s.charts[i] = chart if count == 1 else dataclasses.replace(chart, name=f"{chart.name}-{count}")
    return [chart for s in sections for chart in s.charts]


@functools.cache
def _template() -> Any:
    import jinja2
    from markupsafe import Markup

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["slug"] = report_views.slug
    environment.filters["svg"] = lambda chart: Markup(charts.to_svg(chart))
    environment.filters["numbers"] = lambda chart: Table(f"{chart.title} ({chart.axis})", chart.numbers())
    environment.globals.update(colours=Markup(charts.css()), version=__version__)
    return environment.get_template("report.html")


def _page(found: Sequence[tuple[Path, Record]], sources: Sequence[Path]) -> tuple[str, list[charts.Chart]]:
    """The page, and its charts."""
    records, sections = [record for _, record in found], report_views.sections(found)
    every = _named_apart(sections)
    page = _template().render(
        tiles=report_views.tiles(records), where=_where(records), made=_made(records),
        sections=sections, sources=[_clean(str(p)) for p in sources],
    )  # fmt: skip
    return page, every


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
    found = [pair for path in sources for pair in _read(path)]
    try:
        page, every = _page(found, sources)
    except Exception as error:
        raise _fault(found, error) from None
    out = Path(out_html)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    if plots is not None:
        folder = Path(plots)
        folder.mkdir(parents=True, exist_ok=True)
        for chart in every:
            (folder / f"{chart.name}.svg").write_text(charts.to_svg(chart, alone=True), encoding="utf-8")
            charts.to_png(chart, folder / f"{chart.name}.png")
    return len(every)
