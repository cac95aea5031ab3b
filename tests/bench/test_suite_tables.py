"""Pages made from records: of a suite each number in its own column, and claims as ratios; of the GSM8K runs the
largest sizes, which are also on pages that no script writes."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from loading import loaded
from report_records import bench_record, gradcheck_record

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return loaded(ROOT / "benchmarks" / "tables.py")


def test_a_suite_of_arms_that_took_turns(tables: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = bench_record()
    record["arms"]["strong"]["mem/device"]["from_compile"] = True
    result = dict(kind="bench_suite", suite="gpu-head", seconds=12.3, records=[record, gradcheck_record()])
    (tmp_path / "gpu_head_suite.json").write_text(json.dumps(result))
    monkeypatch.setattr(tables.harness, "RESULTS", tmp_path)
    lines = tables.suite_tables()
    assert lines[0] == "## H200: fused head"
    assert "    logitless bench --suite gpu-head --out benchmarks/results/gpu_head_suite.json" in lines
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert cells[0] == ["case", "arm", "ratio", "to", "ms", "MiB"]
    assert cells[2] == ["case", "strong", "", "", "3.21", "33"]
    assert cells[3] == ["", "default", "0.500 [0.450, 0.550]", "strong", "6.42", "66"]
    assert cells[4][:3] == ["", "naive", "out of memory"] and {len(row) for row in cells[:5]} == {6}
    assert cells[7:] == [
        ["case", "time / strong", "0.81 [0.8, 0.82]", "0.7", "**missed**"],
        ["case", "memory / strong", "0.3", "0.4", "met"],
        ["case", "time / naive", "0.9 [0.7, 1.1]", "1", "undecided"],
    ]
    assert "2 bars, missed: **check: dhidden difference** 3 of 2." in lines[-2]
    assert (0.5, 0.45, 0.55) in tables.recorded_ratios() and (0.81, 0.8, 0.82) in tables.recorded_ratios()


def test_a_ratio_is_told_with_its_verdict(tables: ModuleType) -> None:
    assert tables.ratio_text(dict(ratio=0.98, low=0.9, high=1.07, verdict="no difference")).endswith(", none")
    assert tables.ratio_text(dict(ratio=0.98, low=0.5, high=2.0)) == "0.980 [0.500, 2.000], cannot tell"
    assert tables.ratio_text(dict(ratio=0.98, low=0.97, high=0.99)) == "0.980 [0.970, 0.990]"
    assert tables.ratio_text(dict(ratio=0.9, low=None, high=None, verdict="")) == "0.900"


def largest(arm: str, what: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"train_gsm8k_largest_{arm}_{what}.json").read_text())


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
    for page in ("README.md", "docs/training.md"):
        text = (ROOT / page).read_text()
        assert all(f"{size:,}" in text for size in fits.values()), page


def test_the_training_page_has_the_recorded_rates() -> None:
    """What docs/training.md says of packed updates and of long rows."""
    page = (ROOT / "docs" / "training.md").read_text()
    update, long = (json.loads((RESULTS / f"train_gsm8k_{name}.json").read_text()) for name in ("update", "long"))
    assert f"take {update['ratio']:.2f} of the padded update's time" in page
    for arm, rate in long["tokens_per_s"].items():
        assert f"{long['rows'][arm]} rows" in page and f"{rate:,.0f} tokens a second" in page, arm
    assert f"{long['ratio']['tokens_per_s']:.2f} times as many" in page
    decode = json.loads((RESULTS / "train_gsm8k_decode.json").read_text())
    assert f"in {decode['ms_per_token']:.2f} ms at {decode['rows']}" in page
