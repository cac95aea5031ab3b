"""docs/tpu.md is what benchmarks/results/tpu_table.json says, and that is what the code does: nothing fails to compile,
and what falls back or is refused, and why, is asked anew of every call for every generation."""

from __future__ import annotations

import json

import pytest

from ahead_of_time import ROOT, answer_of, lines_of, needs_libtpu
from loading import loaded

SCRIPT = ROOT / "benchmarks" / "tpu_table.py"
STEP = ROOT / "benchmarks" / "tpu_train_step.py"


TABLE = loaded(SCRIPT)
RECORD, STEPS = (TABLE.harness.read(name) for name in (TABLE.RESULT, TABLE.STEP))


def test_the_page_is_current() -> None:
    table = TABLE.PAGE.read_text().partition(TABLE.BEGIN)[2].partition(TABLE.END)[0]
    assert table == TABLE.render(RECORD, STEPS), "run `python benchmarks/tpu_table.py --page`"


def test_every_case_was_compiled_and_none_failed() -> None:
    for name in TABLE.CASES:
        for generation in TABLE.GENERATIONS:
            found = RECORD["cases"][name][generation]
            assert found["outcome"] in ("compiles", "falls back", "refused"), (name, generation, found)
            assert (found["outcome"] == "compiles") == (found.get("kernels", 0) > 0), (name, generation, found)


@needs_libtpu
def test_routes_are_those_of_the_table() -> None:
    """Without compiling: what each call would do now, on each generation, and why."""
    for name, by_generation in answer_of(SCRIPT, "--routes").items():
        for generation, now in by_generation.items():
            then = {
                k: v
                for k, v in RECORD["cases"][name][generation].items()
                if k in ("outcome", "why", "without", "exact")
            }
            assert now == then, f"{name}, {generation}: run `python benchmarks/tpu_table.py {generation}`"


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("generation", [g for g in TABLE.GENERATIONS if g not in ("v2", "v3")])
def test_small_cases_compile(generation: str) -> None:
    names = [name for group, cases in TABLE.GROUPS.items() if group != "Real shapes" for name in cases]
    said = lines_of(SCRIPT, "--one", generation, json.dumps(names))
    found = [json.loads(line) for line in said if line.startswith("{")]
    assert [f["case"] for f in found] == names
    assert not [f for f in found if f["outcome"] == "fails"]


# -- a whole train step ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("name", ["v6e:1", "v6e:8", "v5p:1", "v5p:8"])
def test_the_kernels_leave_xla_enough_inside_a_train_step(name: str) -> None:
    got = answer_of(STEP, "--one", name, "fused")
    assert got.get("kernels", 0) >= 2, got
    recorded = STEPS["slices"][name]
    assert got["peak_bytes"] <= 1.05 * recorded["fused"]["peak_bytes"], (got, recorded)


def test_recorded_train_steps() -> None:
    """Of both chips, one and eight of them: the kernels' step needs less than the one with the dense loss."""
    slices = STEPS["slices"]
    assert set(slices) == {"v6e:1", "v6e:8", "v5p:1", "v5p:8"}
    for name, row in slices.items():
        assert row["fused"]["kernels"] >= 2, name
        assert row["fused"]["peak_bytes"] < row["dense"]["peak_bytes"], name
