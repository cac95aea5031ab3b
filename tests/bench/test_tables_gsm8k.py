"""benchmarks/tables_gsm8k.py: the pages and the curves of a small made-up record of the GSM8K runs."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from logitless.lab.bench import report
from logitless.train import compare
from logitless.train.config import load
from logitless.train.run_records import run_numbers

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module, with folders of its own for records and pages."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("tables_gsm8k", BENCHMARKS / "tables_gsm8k.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "PAGE", tmp_path / "training.md")
    monkeypatch.setattr(module, "PLOTS", tmp_path)
    module.PAGE.write_text(f"# Before\n\n{module.BEGIN}old\n{module.END}\nafter\n")
    return module


def run_of(final: float, update_s: float, peak_gib: float, backend: str) -> dict[str, Any]:
    """20 steps from a reward of 0.5 to ``final``."""
    metrics: list[dict[str, Any]] = [{"step": 0, "eval/reward": 0.7, "eval/answer": 0.5}]
    for step in range(1, 21):
        reward = 0.5 + (final - 0.5) * step / 20
        metrics.append({
            "step": step, "train/loss": 0.1, "train/reward": reward, "train/skipped": 0, "time/update_s": update_s,
            "time/rollout_s": 1.5, "time/train/step_s": 2.0 + update_s, "time/train/step_avg_last10_s": 2.0 + update_s,
            "rollout/tokens_crc32": step,
        })  # fmt: skip
    metrics[-1] |= {"eval/reward": 1.0, "eval/answer": 0.875}
    environment = {"device": "NVIDIA H200", "jax": "0.12.0"}
    summary = {**run_numbers(metrics), "memory/device_peak_bytes": peak_gib * 2**30, "loss_backend": backend}
    return {"metrics": metrics, "summary": {**summary, "environment": environment}}


@pytest.fixture
def record() -> dict[str, Any]:
    c = load(
        None, ["ab.control=true", "ab.replay=false", "ab.arms={dense: {backend: reference}, fused: {backend: chunked}}"]
    )
    runs = {"dense": run_of(0.9, 2.0, 51.5, "reference"), "fused": run_of(0.91, 0.75, 38.25, "mosaic_gpu")}
    control = run_of(0.89, 2.0, 51.5, "reference")
    curves = [run["metrics"] for run in (*runs.values(), control)]
    agreement = compare.agreement(c, curves[0], curves[1], control=curves[2])
    sample = {"prompt": "What?", "answer": "18", "completion": "It is 17.", "reward": 0.2, "step": 0}
    return {
        "kind": "ab", "name": "gsm8k", "config": dataclasses.asdict(c), "parallel": False, "arms": runs,
        "control": control, "ratios": {"fused": {}}, "agreement": {"fused": agreement},
        "samples": {"fused": [sample, {**sample, "completion": "#### 18", "reward": 1.2, "step": 20}]},
    }  # fmt: skip


def test_without_the_record_nothing_is_written(tables: ModuleType) -> None:
    assert tables.files() == {} and tables.benchmark_tables() == [] and tables.readme_part() == ""


def test_pages_and_curves_hold_what_the_record_says(tables: ModuleType, record: dict[str, Any]) -> None:
    (tables.PLOTS / tables.FILE).write_text(json.dumps(record))
    found = tables.files()
    assert {path.name for path in found} == {"training.md", "gsm8k-reward.svg"}
    page = found[tables.PAGE]
    assert page.startswith("# Before") and page.endswith("\nafter\n") and "old" not in page
    assert tables.filled(page, tables.section(record, "plots")) == page, "made twice, it is the same"
    rows = {line.split(" | ")[0].strip("| "): line for line in page.splitlines() if line.startswith("|")}
    for label, cells in (
        ("", "dense (reference) | fused (mosaic_gpu) | control (reference)"),
        ("sampled reward, last 10 steps", "0.810 | 0.818 | 0.802"),
        ("held-out answers right, before", "50.0 % | 50.0 % | 50.0 %"),
        ("held-out answers right, at the end", "87.5 % | 87.5 % | 87.5 %"),
        ("of it: update (s)", "2.00 | 0.75 | 2.00"),
        ("device peak (GiB)", "51.5 | 38.2 | 51.5"),
    ):
        assert cells in rows[label], (label, rows[label])
    assert "fused against dense: agrees, by control" in page
    assert "the arms agree (decided by control)" in page
    assert "    #### 18" in page and "step 0, reward 0.2" in page
    svg = found[tables.PLOTS / "gsm8k-reward.svg"]
    for arm in ("dense", "fused", "control"):
        assert f">{arm}<" in svg
    assert "prefers-color-scheme: dark" in svg
    chart = tables.curve("x", "x", "train/reward", "", record)
    assert len(chart.series[0].points) == 4 and chart.series[0].points[0] == pytest.approx((3.0, 0.56))
    assert len({s.tone for s in chart.series}) == 3


def test_times_are_those_of_the_same_completions(tables: ModuleType, record: dict[str, Any]) -> None:
    """In the README, the page and the report; times of the free runs are an appendix."""
    measured = {"mean": 0.9, "ratio": 0.9, "interval": [0.875, 0.925]}
    base = {key: {"mean": 1.0, "ratio": 1.0, "interval": [1.0, 1.0]} for key in ("update", "step")}
    peak = {"mean": 30 * 2**30, "ratio": 0.75, "interval": None}
    record["same_completions"] = {"dense": base, "fused": {"update": measured, "step": measured, "peak": peak}}
    (tables.PLOTS / tables.FILE).write_text(json.dumps(record))
    page, readme = tables.files()[tables.PAGE], tables.readme_part()
    for text in (page, readme):
        assert "| update (s) | 1.000 | 0.900 (0.900 [0.875, 0.925]) |" in text
        assert "| device peak (GiB) |  | 30.0 (0.750) |" in text
    assert "of it: update (s)" in page and "of it: update (s)" not in readme
    assert page.index("0.900 (0.900") < page.index("cannot be compared") < page.index("of it: update (s)")
    report.write([tables.PLOTS / tables.FILE], tables.PLOTS / "page.html", plots=tables.PLOTS / "plots")
    html = (tables.PLOTS / "page.html").read_text()
    assert html.index("0.900 (0.900 [0.875, 0.925])") < html.index("not to be compared") < html.index("update phase")
    assert not list((tables.PLOTS / "plots").glob("*time-by-step*"))


def test_times_may_come_from_a_record_of_their_own(tables: ModuleType, record: dict[str, Any]) -> None:
    """With the replay's verdict and its free runs; curves and learning stay those of the long run."""
    found = {key: {"mean": 0.9, "ratio": 0.9, "interval": [0.875, 0.925]} for key in ("update", "step")}
    replay = {
        f"replay_grad_norm_{key}": value for key, value in (("deviation", 2e-3), ("control", 1e-3), ("limit", 0.01))
    }
    same = {
        **record, "same_completions": {"dense": found, "fused": found}, "note": "It was cut short.",
        "arms": {name: run_of(0.6, 3.0, 42.25, "reference") for name in record["arms"]},
        "agreement": {"fused": {**record["agreement"]["fused"], **replay, "verdict": "agrees, by replay"}},
    }  # fmt: skip
    (tables.PLOTS / tables.FILE).write_text(json.dumps(record))
    (tables.PLOTS / tables.SAME).write_text(json.dumps(same))
    page = tables.files()[tables.PAGE]
    assert "| sampled reward, last 10 steps | 0.810 | 0.818 | 0.802 |" in page, "of the long run"
    assert "fused: agrees, by replay. Gradient norm, at the step nearest to its limit: 2.0e-03" in page
    assert "| of it: update (s) | 3.00 | 3.00 | 2.00 |" in page and "| device peak (GiB) | 42.2 | 42.2 | 51.5 |" in page
    commands = [line for line in tables.benchmark_tables() if line.startswith("    python")]
    assert len(commands) == 2 and any("It was cut short." in line for line in tables.benchmark_tables())


def test_long_rows_have_a_table(tables: ModuleType) -> None:
    assert tables._long() == []
    found = {
        "tokens": 16384, "asked": {"dense": "6,5", "fused": "18"}, "failed": {"dense 6": "RESOURCE_EXHAUSTED"},
        "rows": {"dense": 5, "fused": 18}, "seconds": {"dense": [4.0, 4.25, 4.5], "fused": [14.0, 13.5]},
        "tokens_per_s": {"dense": 19275.3, "fused": 21400.0}, "ratio": {"rows": 3.6, "tokens_per_s": 1.11},
    }  # fmt: skip
    (tables.PLOTS / "train_gsm8k_long.json").write_text(json.dumps(found))
    text = "\n".join(tables._long())
    assert "| dense | 5 | 81,920 | 4.25 | 19,275 |" in text and "| fused | 18 | 294,912 | 13.75 | 21,400 |" in text
    assert "dense 6 rows did not fit." in text and text.count("--rows dense=6,5 fused=18") == 1


def test_the_command_names_what_was_set_otherwise_than_shipped(tables: ModuleType, record: dict[str, Any]) -> None:
    shipped = dataclasses.asdict(load(tables.SHIPPED))
    assert tables.unlike_shipped({"config": {**shipped, "run_dir": "elsewhere"}}) == []
    train = {key: value for key, value in shipped["train"].items() if key != "microbatch_tail"} | {"microbatch": 8}
    config = {**shipped, "train": train, "ab": {**shipped["ab"], "replay": False}}
    said = ["train.microbatch=8", "train.microbatch_tail=0", "ab.replay=false"]
    assert tables.unlike_shipped({"config": config}) == said
    (tables.PLOTS / tables.FILE).write_text(json.dumps({**record, "config": config}))
    assert any(line.endswith(" --resume " + " ".join(said)) for line in tables.benchmark_tables())


def test_the_report_has_the_control_too(tables: ModuleType, record: dict[str, Any]) -> None:
    (tables.PLOTS / tables.FILE).write_text(json.dumps(record))
    report.write([tables.PLOTS / tables.FILE], tables.PLOTS / "page.html", plots=tables.PLOTS / "plots")
    (svg,) = (tables.PLOTS / "plots").glob("reward-by-step-*.svg")
    assert ">control<" in svg.read_text()
    assert ">control</th>" in (tables.PLOTS / "page.html").read_text()


def test_a_page_without_marks_stays_as_it_is(tables: ModuleType) -> None:
    assert tables.filled("nothing here\n", "content") == "nothing here\n"


def largest(arm: str, what: str) -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results" / f"train_gsm8k_largest_{arm}_{what}.json").read_text())


@pytest.mark.parametrize("what", ["context", "batch"])
@pytest.mark.parametrize("arm", ["dense", "fused"])
def test_a_recorded_bisection_is_what_its_runs_say(arm: str, what: str) -> None:
    found = largest(arm, what)
    assert (found["arm"], found["what"]) == (arm, what)
    ran = {row["size"]: row for row in found["tried"] if row["fits"]}
    too_large = [row["size"] for row in found["tried"] if not row["fits"]]
    assert found["fits"] == max(ran) and found["fails"] == min(too_large, default=0)
    for row in found["tried"]:
        assert row["ran"] == row["fits"] and ("RESOURCE_EXHAUSTED" in row.get("error", "")) != row["ran"], row
        assert (row["rows"], row["tokens"]) == ((16, row["size"]) if what == "context" else (row["size"], 512))
    unit = 8 if what == "batch" else 128
    if found["fails"]:
        assert 0 < found["fails"] - found["fits"] <= max(unit, found["fits"] // 16), "not yet halved far enough"
    else:
        assert (arm, what, found["fits"]) == ("fused", "context", 32768 - 320), "only the model's last position ends it"


def test_the_fused_loss_has_room_for_more_and_the_pages_say_how_much() -> None:
    fits = {(arm, what): largest(arm, what)["fits"] for arm in ("dense", "fused") for what in ("context", "batch")}
    assert fits["fused", "context"] >= 6 * fits["dense", "context"]
    assert fits["fused", "batch"] >= 4 * fits["dense", "batch"]
    sizes = json.loads((BENCHMARKS / "results" / "train_gsm8k_sizes.json").read_text())
    dense = largest("dense", "context")
    assert sizes["limit_bytes"] == dense["tried"][-1]["peak_bytes"], "what docs/benchmarks.md calls its peak"
    for page in ("README.md", "docs/training.md", "docs/benchmarks.md"):
        text = (ROOT / page).read_text()
        assert all(f"{size:,}" in text for size in fits.values()), page


def test_sizes_stand_beside_those_of_the_plan(tables: ModuleType) -> None:
    planned = {f"{arm} {what}": {"fits": 160, "by_plan": 161} for arm, what in tables.SIZES}
    planned["fused context"] = {"fits": 1000, "by_plan": 1500}
    found = {"limit_bytes": 2**30, "sizes": planned}
    (tables.PLOTS / "train_gsm8k_sizes.json").write_text(json.dumps(found))
    assert "| dense, rows of 512 completion tokens | 160 |  |  |  |" in tables._largest(), "no run as yet"
    for arm, what in tables.SIZES:
        fits, fails = {"dense": (152, 160), "fused": (1000, 0)}[arm]
        tried = [{"size": 160}, {"size": fits, "peak_bytes": 3 * 2**29}]
        run = {"fits": fits, "fails": fails, "tried": tried}
        (tables.PLOTS / f"train_gsm8k_largest_{arm}_{what}.json").write_text(json.dumps(run))
    text = "\n".join(tables._largest())
    assert "| dense, rows of 512 completion tokens | 160 | 152 | 1.5 | 160 |" in text
    last = "1,000, the model's last position (1,500 by memory) | 1,000 | 1.5 | the model ends there |"
    assert f"| fused, completion tokens of 16 rows | {last}" in text
    assert "160 rows of 512 completion tokens (dense) fit by plan and did not run." in text
    assert "room for 6.6 times the context and 6.6 times the batch" in text
