"""The page of benchmarks, made from a suite's file: each number in its own column, and claims as ratios."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from report_records import bench_record, gradcheck_record

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("tables")


def test_a_suite_of_arms_that_took_turns(tables: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = bench_record()
    record["arms"]["strong"]["mem/device"]["from_compile"] = True
    result = dict(kind="bench_suite", suite="gpu-head", seconds=12.3, records=[record, gradcheck_record()])
    (tmp_path / "gpu_head_suite.json").write_text(json.dumps(result))
    monkeypatch.setattr(importlib.import_module("tables_gsm8k"), "RESULTS", tmp_path)
    lines = tables.suite_tables()
    assert lines[0] == "## Every arm of the fused head on one H200" and "took turns" in lines[2]
    assert "    logitless bench --suite gpu-head --out benchmarks/results/gpu_head_suite.json" in lines
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    heads = cells[0]
    assert heads == [
        "case", "arm", "ratio", "to", "ms, device", "ms, a call", "ms, back to back", "MiB: plan", "seen", "x roofline"
    ]  # fmt: skip
    assert cells[2] == ["case", "strong", "", "", "3.21", "5.67", "6.78", "33", "44+", "2.14"]
    assert cells[3] == [
        "case",
        "default",
        "0.500 [0.450, 0.550]",
        "strong",
        "6.42",
        "11.34",
        "13.56",
        "66",
        "88",
        "4.28",
    ]
    assert cells[4][:3] == ["case", "naive", "out of memory"] and {len(row) for row in cells[:5]} == {10}
    assert cells[7:] == [
        ["case", "time / strong", "0.81 [0.8, 0.82]", "0.7", "**missed**"],
        ["case", "memory / strong", "0.3", "0.4", "met"],
        ["case", "time / naive", "0.9 [0.7, 1.1]", "1", "undecided"],
        ["check", "loss", "0.25", "0.5", "met"],
        ["check", "dhidden difference", "3", "2", "**missed**"],
    ]


def test_a_ratio_is_told_with_its_verdict(tables: ModuleType) -> None:
    assert tables.ratio_text(dict(ratio=0.98, low=0.9, high=1.07, verdict="no difference")).endswith(", none")
    assert tables.ratio_text(dict(ratio=0.98, low=0.5, high=2.0)) == "0.980 [0.500, 2.000], cannot tell"
    assert tables.ratio_text(dict(ratio=0.98, low=0.97, high=0.99)) == "0.980 [0.970, 0.990]"
    assert tables.ratio_text(dict(ratio=0.9, low=None, high=None, verdict="")) == "0.900"
