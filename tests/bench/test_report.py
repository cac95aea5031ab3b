"""The report page: what is on it, that it is well formed and self-contained, and that a real browser renders it."""

from __future__ import annotations

import collections
import copy
import functools
import html
import importlib.util
import json
import math
import random
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

import report_records
from logitless.lab import cli
from logitless.lab.bench import charts, report, report_views
from logitless.lab.tools import result_files

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell"))), None
)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on this machine: install Debian's chromium package, or Chrome, to run this"
)


def bench_record(name: str, *, live: float = 1.0, tokens: int = 64, oom: bool = False) -> dict[str, Any]:
    """Two arms, on a device whose name has markup in it."""
    record = report_records.bench_record(name)
    arms = {"strong": report_records.bench_row(1.0), "kernel": report_records.bench_row(live)}
    for row in arms.values():
        row |= {"environment": {"device": "testchip <1>", "jax": "0"}, "mem/device": None}
        row["mem/compiler"]["temporaries"] *= tokens
    arms |= {"strong": {"error": "out of memory"}} if oom else {}
    return record | dict(config=dict(record["config"], live=live, tokens=tokens), arms=arms)


@pytest.fixture
def runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Path]:
    """One file of each kind; plan and gradcheck by their own commands."""
    out = {k: tmp_path / f"{k}.jsonl" for k in ("plan", "gradcheck", "tpu")} | {"ab": tmp_path / "demo" / "ab.json"}
    out["suite"] = tmp_path / "suite.json"
    cases = [
        bench_record("head"),
        bench_record("half & half", live=0.5),
        bench_record("long", tokens=128),
        bench_record("too long", tokens=4096, oom=True),
    ]
    out["suite"].write_text(json.dumps(dict(kind="bench_suite", suite="x", records=cases)))
    out["ab"].parent.mkdir()
    out["ab"].write_text(json.dumps(report_records.ab_record()))
    program = dict(peak=5_000_000, arguments=1, outputs=1)
    config = dict(level="head", n=128, vocab=256)
    out["tpu"].write_text(
        json.dumps(dict(kind="tpu_compile", topology="v6e:2x4", config=config, programs={"fused": program}))
    )
    for extra in ([], ["--mesh", "fsdp=8", "--tokens", "65536"]):
        start = ["plan", "--model", "qwen2.5-7b", "--chip", "v6e", "--no-compile", "--out", str(out["plan"])]
        assert cli.main([*start, *extra]) == 0
    small = ["batch=1", "tokens=4", "hidden=8", "vocab=20"]
    assert cli.main(["gradcheck", "level=logits", f"out={out['gradcheck']}", *small]) == 0
    capsys.readouterr()
    return out


def test_the_page_has_every_kind_and_is_well_formed(runs: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "out" / "page.html"
    assert cli.main(["report", *map(str, runs.values()), "--out", str(page)]) == 0
    text = page.read_text()
    tree = ET.fromstring(text.removeprefix("<!DOCTYPE html>"))  # XHTML-clean, so that any reader can parse it
    headings = ["".join(h.itertext()) for h in tree.iter("h2")]
    assert headings == ["Benchmarks", "Training", "Plans", "TPU compiler", "Gradient checks"]
    titles = ["".join(h.itertext()) for h in tree.iter("h3")]
    for title in (
        "Time: head",
        "Memory: too long",
        "Cost against live tokens: head",
        "Temporaries against tokens: head",
        "Memory against context length: qwen2.5-7b on v6e",
        "Peak memory on each chip of a mesh",
        "Reward by step: demo",
        "Step time by step: demo",
    ):
        assert title in titles, titles
    assert len(list(tree.iter("svg"))) == len(titles)
    assert "half &amp; half" in text and "testchip &lt;1&gt;" in text and "<script" not in text
    # Nothing is fetched: no address, no import, no source.
    assert not re.findall(r"https?://|@import|\bsrc=|url\((?!#)", text)
    assert "out of memory" in text and "roofline 1.50 ms" in text
    for svg in tree.iter("svg"):
        assert svg.get("role") == "img"
        named = {e.get("id") for e in svg if e.tag in ("title", "desc")}
        assert set(str(svg.get("aria-labelledby")).split()) == named
    identifiers = re.findall(r'\bid="([^"]+)"', text)
    assert len(identifiers) == len(set(identifiers))


def test_only_what_is_there_is_shown(runs: dict[str, Path], tmp_path: Path) -> None:
    report.write([runs["ab"]], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "Training" in text and "Benchmarks" not in text and "Plans" not in text


def test_a_folder_gives_its_results(runs: dict[str, Path], tmp_path: Path) -> None:
    # A run's folder holds other things, too; the metrics of an A/B's arms are in its ab.json already.
    (tmp_path / "config.json").write_text('{"model": "x"}')
    (runs["ab"].parent / "kernel").mkdir()
    (runs["ab"].parent / "kernel" / "metrics.jsonl").write_text('{"train/reward": 1.0}')
    assert report.write([tmp_path], tmp_path / "page.html") == report.write(list(runs.values()), tmp_path / "b.html")


def test_the_page_goes_into_the_folder_and_what_is_left_out_is_named(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.json").write_text('{"model": "x"}')
    assert cli.main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").exists()
    said = capsys.readouterr().out
    assert str(tmp_path / "report.html") in said and "left out" in said and "odd.json" in said
    # Of several files the one that is broken is named, and no other.
    bad = tmp_path / "demo" / "bad.json"
    bad.write_text('{"kind": "plan", "config": {}}')
    assert cli.main(["report", str(runs["suite"]), str(bad), "--out", str(tmp_path / "page.html")]) == 2
    error = capsys.readouterr().err
    assert "bad.json: a plan record cannot be shown: 'hidden' is missing" in error and "suite.json" not in error


def test_every_result_of_the_repository_is_taken(tmp_path: Path) -> None:
    left: list[Path] = []
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    assert report.write([results], tmp_path / "page.html", left=left) > 20
    assert left == []
    text = (tmp_path / "page.html").read_text()
    assert all(f"results/{p.name}</code>" in text for p in results.iterdir())


def cells(text: str) -> dict[str, str]:
    """Of tables with two columns: what stands in the second, by the first."""
    return dict(re.findall(r"<td[^>]*>([^<]*)</td><td[^>]*>([^<]*)</td></tr>", text))


def test_a_kind_of_another_script_is_no_benchmark(tmp_path: Path) -> None:
    """A training peak has arms and a configuration, as a benchmark has; it is told by its kind."""
    record = dict(kind="train_peak", arms=dict(dense=dict(peak_bytes=3 * 2**20)), config=dict(name="run"))
    (tmp_path / "peak.json").write_text(json.dumps(record | dict(environment=dict(device="chip", jax="0"))))
    assert report.write([tmp_path], tmp_path / "page.html") == 0
    text = (tmp_path / "page.html").read_text()
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", text) == ["Other records"]
    assert cells(text)["arms: dense: peak (MiB)"] == "3.00"


def test_records_of_other_scripts_are_shown_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    record = {"environment": {"device": "d", "jax": "0"}, "shapes": {"8,4": {"ms": 4.0, "calls": 7}}}
    record |= {"curve": list(range(9)), "a_step_ms": 2.5, "nothing": None, "long": {str(i): i for i in range(300)}}
    path.write_text(json.dumps(record))
    assert report.write([path], tmp_path / "page.html") == 0
    text = (tmp_path / "page.html").read_text()
    found = cells(text)
    assert found["shapes: 8,4: ms"] == "4.00" and found["shapes: 8,4: calls"] == "7"
    assert found["a step (ms)"] == "2.50" and "nothing" not in found, "units in words, and no blank rows"
    assert found["curve"] == "9 values, 0 to 8" and found["and 106 more"] == "in the file"


def test_arms_of_one_chart_have_their_own_colours() -> None:
    taken: list[str] = []
    for arm in ("default", "kernel", "strong", "strong/f32", "naive"):
        taken.append(report_views.tone_of(arm, taken))
    assert taken[0] == "ours" and len(set(taken)) == 5


def test_a_training_runs_own_metrics(tmp_path: Path) -> None:
    lines = tmp_path / "run1" / "metrics.jsonl"
    lines.parent.mkdir()
    lines.write_text("\n".join(json.dumps({"step": i, "train/reward": i, "train/kl": math.nan}) for i in range(3)))
    assert report.write([lines], tmp_path / "page.html") == 1
    assert "Reward by step: run1" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "no such file"),
        ("{not json", "line 1 is not JSON"),
        ('{"a": 1}', "not a result of gradcheck, bench"),
        ("[]", "not a result of gradcheck, bench"),
        ("", "not a result of gradcheck, bench"),
        ('{"kind": "plan", "config": {}}', "a plan record cannot be shown: 'hidden' is missing"),
        ('{"kind": "bench"}', "a bench record cannot be shown: 'arms' is missing"),
        ('{"arms": {"x": {}}, "config": {}, "name": "n"}', "a bench record cannot be shown: 'median_ms' is missing"),
        (
            '{"train/loss": 1}\n{"train/loss": 1, "step": [2]}',
            "a train record cannot be shown: TypeError",
        ),
        ('{"device": ' + "[" * 99_999 + "]" * 99_999 + "}", "nested too deep"),
        ('{"device": ' + "9" * 5_000 + "}", "line 1 is not JSON"),
        (b"\xff\xfe", "not readable"),
    ],
)
def test_broken_files_exit_2_by_name(
    content: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert cli.main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 2
    error = capsys.readouterr().err
    assert message in error and "broken.json" in error and "Traceback" not in error
    assert not (tmp_path / "page.html").exists()


def test_a_folder_without_results_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
    assert "no results of gradcheck" in capsys.readouterr().err


def test_plots_are_images_of_their_own(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "plots"
    count = report.write([runs["suite"], runs["plan"]], tmp_path / "page.html", plots=folder)
    svgs = sorted(folder.glob("*.svg"))
    assert len(svgs) == count
    for svg in svgs:
        root = ET.fromstring(svg.read_text())
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.get("width")
        assert "prefers-color-scheme: dark" in svg.read_text()
    assert len(list(folder.glob("*.png"))) == count
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in folder.glob("*.png"))


def axes_of(chart: charts.Chart) -> Any:
    figure = Figure()
    chart.draw(figure)
    return figure.axes[0]


def test_bars_are_as_long_as_their_numbers() -> None:
    bars = charts.Bars("x", "T", "ms", (charts.Bar("a", (("p", 10.0), ("q", 2.0))), charts.Bar("b")), floor=2.5)
    axes = axes_of(bars)
    assert [(r.get_x(), r.get_width()) for r in axes.patches[:2]] == [(0.0, 10.0), (10.0, 2.0)]
    assert axes.lines[0].get_xdata()[0] == 2.5 and axes.get_xlim()[0] == 0 and axes.get_xlim()[1] > 12


def test_axes_start_at_zero_or_say_that_they_do_not() -> None:
    series = (charts.Series("s", ((1.0, 90.0), (2.0, 100.0)), "ours"),)
    axes = axes_of(charts.Lines("x", "T", "tokens", "MiB", series))
    assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 100 and axes.get_xlabel() == "tokens"
    assert axes.lines[0].get_xydata().tolist() == [[1.0, 90.0], [2.0, 100.0]]
    log = axes_of(charts.Lines("x", "T", "tokens", "MiB", series, log=True))
    assert log.get_xlabel() == "tokens, logarithmic" and log.get_title(loc="left") == "MiB, logarithmic"
    assert log.get_yscale() == log.get_xscale() == "log"
    below = (charts.Series("s", ((1.0, -3.0), (2.0, 1.0)), "ours"),)
    assert axes_of(charts.Lines("x", "T", "tokens", "MiB", below)).get_ylim()[0] == -3


def test_kinds() -> None:
    assert result_files.kind_of(report_records.ab_record()) == "ab"
    assert result_files.kind_of(bench_record("x")) == "bench"
    assert result_files.kind_of({"train/loss": 1.0}) == "train"
    assert result_files.kind_of({"gates": {}, "config/name": "g"}) == "gradcheck"
    assert result_files.kind_of([]) is None and result_files.kind_of({}) is None


EVIL = "<script>alert(1)</script> & \" ' $x_{1}$ {{ 7 * 7 }} \ud800 \x07"


def renamed(value: Any) -> Any:
    """Every text of a record with markup in it, but for what tells its kind."""
    if isinstance(value, dict):
        return {k: v if k in ("kind", "level", "clock") else renamed(v) for k, v in value.items()}
    if isinstance(value, list):
        return [renamed(v) for v in value]
    return value + EVIL if isinstance(value, str) else value


def test_text_of_records_is_never_markup(tmp_path: Path) -> None:
    records_of = dict(
        bench=report_records.bench_record(), plan=report_records.plan_record(), run=report_records.ab_record()
    )
    records_of |= dict(gradcheck=report_records.gradcheck_record(), other=dict(what="x", device={EVIL: [EVIL]}))
    for name, record in records_of.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(renamed(record)))
    assert report.write([tmp_path], tmp_path / "page.html", plots=tmp_path / "plots") > 6
    for path in (tmp_path / "page.html", *(tmp_path / "plots").glob("*.svg")):
        text = path.read_text(encoding="utf-8")
        ET.fromstring(text.removeprefix("<!DOCTYPE html>"))
        assert "<script" not in text and "$ 49" not in text
        assert ("&lt;script&gt;" in text) == ("-by-step-" not in path.name)


def test_two_records_of_one_name_have_charts_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([bench_record("x"), bench_record("x", live=0.5)]))
    count = report.write([tmp_path / "a.json"], tmp_path / "page.html", plots=tmp_path / "plots")
    assert count == 5 == len(list((tmp_path / "plots").glob("*.svg")))
    identifiers = re.findall(r'\bid="([^"]+)"', (tmp_path / "page.html").read_text())
    assert len(identifiers) == len(set(identifiers))


WRONG: tuple[Any, ...] = (None, [], {}, "x", -1, 0, 1e300, 10**400, math.nan, True, [[1]], {"error": 3}, "<b>", EVIL)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value below this one."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for k, v in inner for found in ((*at, k), *places(v, (*at, k)))]


def mutated(record: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The record with one value gone, renamed or of another type."""
    record = copy.deepcopy(record)
    *way, last = draw.choice(places(record))
    owner: Any = functools.reduce(lambda v, k: v[k], way, record)
    value = owner.pop(last)
    if isinstance(owner, list):
        owner.insert(last, draw.choice(WRONG))
    elif (how := draw.random()) > 0.3:
        owner[last if how > 0.4 else f"{last}x"] = draw.choice(WRONG) if how > 0.4 else value
    return record


def test_damaged_records_end_on_a_page_or_by_file_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No seed ends in a traceback; drawing takes most of the time, so that every twentieth page is drawn."""
    whole = [report_records.bench_record(made=result_files.provenance(), busy=2.0), report_records.gradcheck_record()]
    whole += [report_records.plan_record(), report_records.ab_record()]
    config = dict(level="head", n=128, vocab=256)
    whole += [dict(kind="tpu_compile", topology="v6e:2x4", config=config, programs=dict(fused=dict(peak=5)))]
    whole += [dict(kind="tpu_cycles", topology="v6e:2x4", config=config, operations=dict(dot=5))]
    config = dict(whole[2]["config"], mesh="fsdp=8", chip="v6e")
    whole += [dict(kind="plan", config=config, mesh=dict(peak=1e9))]
    drawn, page, path = charts.to_svg, tmp_path / "page.html", tmp_path / "damaged.json"
    codes = collections.Counter[int]()
    for seed in range(350):
        page.unlink(missing_ok=True)
        monkeypatch.setattr(charts, "to_svg", drawn if seed % 20 == 0 else lambda chart: chart.summary())
        path.write_text(json.dumps(mutated(whole[seed % len(whole)], random.Random(seed))))
        code = cli.main(["report", str(path), "--out", str(page)])
        codes[code] += 1
        said = capsys.readouterr().err
        assert code in (0, 2) and page.exists() == (code == 0), f"seed {seed}: {said}"
        assert (code == 0) == (not said), f"seed {seed}: {said}"
        assert code == 0 or said.startswith(f"logitless report: {path}: "), f"seed {seed}: {said}"
    assert codes[2] > 50 < codes[0]


def test_what_is_not_installed_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for command in (["report", str(tmp_path)], ["demo", "--out", str(tmp_path / "demo")]):
        assert cli.main(command) == 2
        said = capsys.readouterr().err
        assert said == f"logitless {command[0]}: needs jinja2 and matplotlib: pip install 'logitless[tools]'\n"


def test_the_command_starts_without_what_only_the_report_needs() -> None:
    code = (
        "import sys, logitless.lab.cli, logitless.lab.bench.report; print(*{'matplotlib', 'jinja2'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def _browse(page: Path, profile: Path, *options: str, width: int = 900) -> subprocess.CompletedProcess[str]:
    """Headless Chromium on a local file; console messages come on stderr."""
    assert BROWSER is not None
    return subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--enable-logging=stderr", f"--user-data-dir={profile}", f"--window-size={width},1400", *options,
            page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@needs_browser
def test_a_real_browser_renders_it_without_a_console_error(runs: dict[str, Path], tmp_path: Path) -> None:
    page, shot = tmp_path / "page.html", tmp_path / "shot.png"
    count = report.write(list(runs.values()), page)
    # The browser itself measures the charts: appended here, since the page has no script of its own.
    probe = tmp_path / "probe.html"
    script = (
        "<script>addEventListener('load', () => { const s = [...document.querySelectorAll('svg')];"
        "document.title = [s.length, s.filter(e => e.getBoundingClientRect().height > 20).length,"
        "document.documentElement.scrollWidth <= innerWidth].join(' '); });</script></body>"
    )
    probe.write_text(page.read_text().replace("</body>", script))
    done = _browse(probe, tmp_path / "p1", "--dump-dom")
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"<title>{count} {count} true</title>" in done.stdout  # every chart has a size, nothing overflows
    shown = _browse(page, tmp_path / "p2", f"--screenshot={shot}")
    assert "CONSOLE" not in shown.stderr, shown.stderr[-2000:]
    assert shot.read_bytes().startswith(b"\x89PNG") and shot.stat().st_size > 20_000


PHONE = """<script>addEventListener('load', () => {
  document.querySelectorAll('details').forEach(d => { d.open = true; });
  const sizes = [...document.querySelectorAll('p, td, th, li, summary, h2, h3, text')].map(e => {
    const box = e.ownerSVGElement && e.ownerSVGElement.getBoundingClientRect();
    const scale = box ? box.width / e.ownerSVGElement.viewBox.baseVal.width : 1;
    return parseFloat(getComputedStyle(e).fontSize) * scale; });
  const wide = [...document.querySelectorAll('.scroll, figure')].filter(e => e.scrollWidth > e.clientWidth + 1);
  const shown = wide.filter(e => getComputedStyle(e).overflowX == 'auto' &&
    getComputedStyle(e).backgroundImage.includes('gradient') && e.getBoundingClientRect().right <= innerWidth);
  parent.document.title = ['measured', innerWidth, document.documentElement.scrollWidth, Math.min(...sizes).toFixed(1),
    wide.length, shown.length, getComputedStyle(document.body).backgroundColor].join('|'); });</script></body>"""


def _on_a_phone(page: Path, folder: Path, *options: str) -> list[str]:
    """Width of the window and of the page, the smallest text in px, how many things scroll, how many of them show that
    they do, and the background. In a frame of 390 px: Chromium's own window is never so narrow."""
    probe = folder / "phone.html"
    inside = html.escape(page.read_text().replace("</body>", PHONE))
    probe.write_text(f'<iframe srcdoc="{inside}" width="390" height="844" style="border:0"></iframe>')
    done = _browse(probe, folder / f"phone{len(options)}", "--dump-dom", *options)
    found = re.search(r"<title>measured\|(.*?)</title>", done.stdout)
    assert found is not None, done.stderr[-2000:]
    return found[1].split("|")


@needs_browser
def test_on_a_phone_text_is_readable_and_what_is_wide_scrolls_visibly(runs: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    report.write([*runs.values(), Path(__file__).parents[2] / "benchmarks" / "results" / "h200_suite.json"], page)
    window, width, smallest, wide, shown, paper = _on_a_phone(page, tmp_path)
    assert int(width) <= int(window) == 390  # nothing sticks out to the side
    assert float(smallest) >= 12
    assert shown == wide  # tables are cards, and charts as wide as the page
    dark = _on_a_phone(page, tmp_path, "--blink-settings=preferredColorScheme=0")[-1]
    assert paper == "rgb(255, 255, 255)" and dark == "rgb(21, 26, 34)"
    # And it can fail: a word that cannot be broken, and text of 9 px.
    bad = tmp_path / "bad.html"
    bad.write_text(
        page.read_text().replace("<main>", f"<main><p style='font-size:9px;overflow-wrap:normal'>{'x' * 200}")
    )
    window, width, smallest, *_ = _on_a_phone(bad, tmp_path)
    assert int(width) > int(window) and float(smallest) == 9


@needs_browser
def test_the_browser_check_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<html><body><script>throw new Error('broken page')</script></body></html>")
    done = _browse(page, tmp_path / "p", f"--screenshot={tmp_path / 'x.png'}")
    assert "CONSOLE" in done.stderr and "broken page" in done.stderr
