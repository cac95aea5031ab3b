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
    record["name"] = "case, the form before"
    (tmp_path / "gpu_head_suite.json").write_text(json.dumps(result))
    assert not any("0.500" in line for line in tables.suite_tables()), "an earlier version is not on the page"


def test_a_case_is_named_by_its_shape(tables: ModuleType) -> None:
    assert tables.case_name("linear_bpd1_t8192_h4096_vocab151936") == "T=8192 H=4096 V=151936"
    assert tables.case_name("linear_bpd1_t8_h4_vocab15, a quarter") == "T=8 H=4 V=15, a quarter"
    assert tables.case_name("logits_bpd1_t4096_vocab151936_jaxbwd") == "logits T=4096 V=151936, jaxbwd"
    assert tables.case_name("sparse 8192x4096x151936, on-policy") == "T=8192 H=4096 V=151936, on-policy"


def test_a_ratio_is_told_with_its_verdict(tables: ModuleType) -> None:
    assert tables.ratio_text(dict(ratio=0.98, low=0.9, high=1.07, verdict="no difference")).endswith(", none")
    assert tables.ratio_text(dict(ratio=0.98, low=0.5, high=2.0)) == "0.980 [0.500, 2.000], cannot tell"
    assert tables.ratio_text(dict(ratio=0.98, low=0.97, high=0.99)) == "0.980 [0.970, 0.990]"
    assert tables.ratio_text(dict(ratio=0.9, low=None, high=None, verdict="")) == "0.900"
