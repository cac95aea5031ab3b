"""The report page: what is on it, that it is well formed and self-contained, and that a real browser renders it."""

from __future__ import annotations

import html
import itertools
import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from logitless.lab import cli
from logitless.lab.bench import charts, report, report_charts
from logitless.lab.tools import result_files

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell"))), None
)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on this machine: install Debian's chromium package, or Chrome, to run this"
)


def bench_record(name: str, *, live: float = 1.0, tokens: int = 64, oom: bool = False) -> dict[str, Any]:
    def row(ms: float, temporaries: int) -> dict[str, Any]:
        memory = dict(arguments=1000, outputs=500, temporaries=temporaries * tokens, peak=2000)
        return {
            "median_ms": ms, "p10_ms": ms * 0.9, "p90_ms": ms * 1.1, "mem/compiler": memory, "mem/device": None,
            "tflops": 1.0, "gb_per_s": 2.0, "roofline_ms": 1.5, "roofline_ratio": ms / 1.5,
            "environment": {"device": "testchip <1>", "jax": "0"},
        }  # fmt: skip

    config = dict(name=name, level="head", tokens=tokens, vocab=32, hidden=8, dtype="float32", live=live)
    arms = {"strong": {"error": "out of memory"} if oom else row(4.0, 90_000), "kernel": row(3.0 * live, 10_000)}
    return dict(kind="bench", name=name, config=config, arms=arms, passed=True)


def ab_record() -> dict[str, Any]:
    def arm(seconds: float) -> dict[str, Any]:
        steps = [
            {"step": i, "train/reward": i / 10, "train/loss": -i / 9, "train/kl": 0.01, "time/train/step_s": seconds}
            for i in range(8)
        ]
        return dict(metrics=steps, summary={"time/train/step_avg_last10_s": seconds})

    return dict(kind="ab", arms={"reference": arm(2.0), "chunked": arm(1.0)}, agreement={"passed": True})


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
    out["ab"].write_text(json.dumps(ab_record()))
    program = dict(peak=5_000_000, arguments=1, outputs=1)
    config = dict(level="head", n=128, vocab=256)
    out["tpu"].write_text(
        json.dumps(dict(kind="tpu_compile", topology="v6e:2x4", config=config, programs={"fused": program}))
    )
    for extra in ([], ["--mesh", "fsdp=8", "--tokens", "65536"]):
        assert cli.main(["plan", "--model", "qwen2.5-7b", "--chip", "v6e", "--out", str(out["plan"]), *extra]) == 0
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
        "Predicted efficiency on meshes, nothing overlapped",
        "Reward by step: demo",
        "Step time by step: demo",
    ):
        assert title in titles, titles
    assert len(list(tree.iter("svg"))) == len(titles)
    assert "half &amp; half" in text and "testchip &lt;1&gt;" in text and "<script" not in text
    # Nothing is fetched: no address but the SVG namespace, no import, no source.
    assert not re.findall(r"https?://|@import|\bsrc=|url\(", text)
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
    assert "bad.json: a record lacks" in error and "suite.json" not in error


def test_every_result_of_the_repository_is_taken(tmp_path: Path) -> None:
    left: list[Path] = []
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    assert report.write([results], tmp_path / "page.html", left=left) > 20
    assert left == []
    text = (tmp_path / "page.html").read_text()
    assert all(f"results/{p.name}</code>" in text for p in results.iterdir())


def test_training_memory_is_no_benchmark(tmp_path: Path) -> None:
    """A peak has arms and a configuration, as a benchmark has; it is told by its kind and has a section of its own."""
    where, gib = dict(device="chip", jax="0"), 2**30

    def arm(peak: int) -> dict[str, Any]:
        return dict(peak_bytes=peak * gib, planned=dict(update=dict(temporaries=3 * gib)))

    found = {
        "peak": dict(kind="train_peak", arms=dict(dense=arm(40), fused=arm(30)), ratios=dict(dense=1.0, fused=0.75),
                     config=dict(name="run"), environment=where),
        "sizes": dict(kind="train_sizes", limit_bytes=120 * gib, environment=where, sizes={
                     "dense context": dict(points=[[1536, 48 * gib], [2560, 72 * gib]], by_plan=5400, fits=5376)}),
        "largest": dict(kind="train_largest", arm="dense", what="context", fits=5376, fails=5632, environment=where,
                        tried=[dict(size=5632, fits=False, error="out of memory"),
                               dict(size=5376, fits=True, peak_bytes=119 * gib)]),
        "last": dict(kind="train_largest", arm="fused", what="context", fits=32448, fails=0, environment=where,
                     tried=[dict(size=32448, fits=True, peak_bytes=122 * gib)]),
    }  # fmt: skip
    for name, record in found.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    assert report.write([tmp_path], tmp_path / "page.html") == 1
    text = (tmp_path / "page.html").read_text()
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", text) == ["Training memory"]
    assert "<h3>Peak of a training run: run, chip</h3>" in text
    assert "<td>fused</td><td>30.0</td><td>0.75</td><td>3.0</td>" in text
    assert "<td>dense context</td><td>5,376</td><td>5,400</td><td>1,536: 48.0 GiB, 2,560: 72.0 GiB</td>" in text
    tried = "<tr><td>5,376</td><td>yes</td><td>119.0</td><td></td></tr>"
    assert f"{tried}<tr><td>5,632</td><td>no</td><td></td><td>out of memory</td></tr>" in text
    assert "of dense that ran on chip: 5,376; 5,632 did not fit" in text
    assert "of fused that ran on chip: 32,448; the model has no room for more" in text


def test_records_of_other_scripts_are_shown_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({"environment": {"device": "d", "jax": "0"}, "shapes": {"8,4": {"ms": 4.0, "calls": 7}},
                                "curve": list(range(9)), "long": {str(i): i for i in range(300)}}))  # fmt: skip
    assert report.write([path], tmp_path / "page.html") == 0
    text = (tmp_path / "page.html").read_text()
    assert "<td>shapes: 8,4: ms</td><td>4.00</td>" in text and "<td>shapes: 8,4: calls</td><td>7</td>" in text
    assert "<td>9 values, 0 to 8</td>" in text and "and 105 more, in the file" in text


def test_axes_reach_their_data() -> None:
    assert charts.around(0, 160) == [0, 50, 100, 150, 200] and charts.around(0.25, 1, 8)[0] == pytest.approx(0.2)
    assert charts.around(3, 3) == [3, 4] and charts.decades(30, 700) == [20, 50, 100, 200, 500, 1000]
    assert charts.decades(10, 100) == [10, 20, 50, 100]
    for low, high in ((0, 9.7), (-3, 0.2), (1, 61), (0, 1e-4)):
        found = charts.around(low, high)
        assert found[0] <= low and found[-1] >= high and len(found) < 13


def test_lines_of_one_chart_have_their_own_colours() -> None:
    taken: list[charts.Series] = []
    for i, arm in enumerate(("default", "kernel", "strong", "strong/f32", "naive")):
        taken.append(charts.Series(arm, ((0.0, 0.0),), report_charts.own_tone(arm, i, taken)))
    assert len({s.tone for s in taken}) == 5


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
        ('{"kind": "plan", "config": {}}', "a record lacks what its kind must have"),
        ('{"arms": {"x": {}}, "config": {}, "name": "n"}', "a record lacks what its kind must have"),
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
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert not list(folder.glob("*.png"))
    else:
        assert len(list(folder.glob("*.png"))) == count
        assert all(p.read_bytes().startswith(b"\x89PNG") for p in folder.glob("*.png"))


def test_bars_are_as_long_as_their_numbers() -> None:
    bars = charts.Bars("x", "T", "ms", (charts.Bar("a", (("p", 10.0),)), charts.Bar("b", (("p", 5.0),))), floor=2.5)
    root = ET.fromstring(charts.to_svg(bars))
    long, short = (float(r.get("width", 0)) for r in root.iter("rect"))
    assert long == pytest.approx(2 * short, rel=1e-3)
    (floor,) = root.iter("line")
    left = float(next(root.iter("rect")).get("x", 0))
    assert float(floor.get("x1", 0)) - left == pytest.approx(long / 4, abs=0.1)


def test_lines_go_through_their_points() -> None:
    series = charts.Series("s", ((1.0, 10.0), (10.0, 100.0), (100.0, 1000.0)), "ours")
    root = ET.fromstring(charts.to_svg(charts.Lines("x", "T", "x", "y", (series,), log=True)))
    (line,) = root.iter("polyline")
    points = [tuple(map(float, p.split(","))) for p in str(line.get("points")).split()]
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(points)]
    assert steps[0] == pytest.approx(steps[1], abs=0.15)  # a power law is straight


@pytest.mark.parametrize(
    "low, high, expected", [(0, 10, [0, 2, 4, 6, 8, 10]), (0, 0.9, [0, 0.2, 0.4, 0.6, 0.8]), (3, 3, [3])]
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert charts.ticks(low, high) == pytest.approx(expected)


def test_kinds() -> None:
    assert result_files.kind_of(ab_record()) == "ab"
    assert result_files.kind_of(bench_record("x")) == "bench"
    assert result_files.kind_of({"train/loss": 1.0}) == "train"
    assert result_files.kind_of({"gates": {}, "config/name": "g"}) == "gradcheck"
    assert result_files.kind_of([]) is None and result_files.kind_of({}) is None


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
    assert int(wide) > 3 and shown == wide
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
