"""Comparing compiled programs: what costs nothing may differ, and nothing else."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HLO = """HloModule jit_f, is_scheduled=true

%more (p.1: (s32[], f32[8], f32[8])) -> pred[] {
  %p.1 = (s32[], f32[8]{0}, f32[8]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %end = s32[] constant(4)
  ROOT %less = pred[] compare(%i.1, %end), direction=LT
}

%body (p: (s32[], f32[8], f32[8])) -> (s32[], f32[8], f32[8]) {
  %p = (s32[], f32[8]{0}, f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %w = f32[8]{0} get-tuple-element(%p), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[8]{0} custom-call(%x, %w), custom_call_target="mosaic_gpu_v2", backend_config={module = "aa"}
  ROOT %t = (s32[], f32[8]{0}, f32[8]{0}) tuple(%next, %y, %w)
}

ENTRY %main (a: f32[8], b: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]{0}, f32[8]{0}) tuple(%zero, %a, %b)
  %loop = (s32[], f32[8]{0}, f32[8]{0}) while(%start), condition=%more, body=%body
  ROOT %out = f32[8]{0} get-tuple-element(%loop), index=1
}
"""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("hlo_graph")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("same_programs")


def changed(*pairs: tuple[str, str]) -> str:
    text = HLO
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


def test_names_are_free(graphs: ModuleType) -> None:
    found = graphs.compare(HLO, changed(("%next", "%add.7"), ("%main", "%main.2"), ("jit_f", "jit_g")))
    assert found == dict(same="text", order=True, instructions=[18, 18], steps=[4, 4])


def test_so_are_places_in_a_loops_state(graphs: ModuleType) -> None:
    other = changed(
        ("%x = f32[8]{0} get-tuple-element(%p), index=1", "%x = f32[8]{0} get-tuple-element(%p), index=2"),
        ("%w = f32[8]{0} get-tuple-element(%p), index=2", "%w = f32[8]{0} get-tuple-element(%p), index=1"),
        ("tuple(%next, %y, %w)", "tuple(%next, %w, %y)"),
        ("tuple(%zero, %a, %b)", "tuple(%zero, %b, %a)"),
        ("get-tuple-element(%loop), index=1", "get-tuple-element(%loop), index=2"),
    )
    found = graphs.compare(HLO, other)
    assert found["same"] == "graph" and found["order"]


@pytest.mark.parametrize(
    "old, new",
    [
        ("tuple(%zero, %a, %b)", "tuple(%zero, %b, %a)"),  # other values into the loop
        ("get-tuple-element(%loop), index=1", "get-tuple-element(%loop), index=2"),  # another one out of it
        ("custom-call(%x, %w)", "custom-call(%w, %x)"),
        ("custom-call(%x, %w)", "custom-call(%x, %x)"),
    ],
)
def test_what_a_value_goes_into_is_not(graphs: ModuleType, old: str, new: str) -> None:
    found = graphs.compare(HLO, changed((old, new)))
    assert found["same"] == "no" and found["only_before"] == found["only_after"] == []


@pytest.mark.parametrize(
    "old, new", [('"aa"', '"bb"'), ("constant(4)", "constant(5)"), ("direction=LT", "direction=LE")]
)
def test_nor_is_a_kernel_or_a_number(graphs: ModuleType, old: str, new: str) -> None:
    found = graphs.compare(HLO, changed((old, new)))
    assert found["same"] == "no" and len(found["only_before"]) == len(found["only_after"]) == 1
    assert new in found["only_after"][0] or "constant 5" in found["only_after"][0]


def test_order_is_seen(graphs: ModuleType) -> None:
    add, call = (line for line in HLO.splitlines() if "add(" in line or "custom-call(" in line)
    other = HLO.replace(add, "?").replace(call, add).replace("?", call)
    found = graphs.compare(HLO, other)
    assert found["same"] == "graph" and not found["order"]


def test_kernels_are_told_by_what_they_do_and_lines_of_source_are_not_there(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "kernel_text", lambda raw: raw.split(b"@")[0].decode("latin-1"))
    line = (
        '  %y = f32[8]{0} custom-call(%x), metadata={op_name="a{" stack_frame_id=7}, backend_config={kernel_hash = '
        '"\\0C\\22", module = "ML\\EFR\\22@HERE", other = 1}'
    )
    texts = [f'HloModule f\n\nFileNames\n1 "{at}.py"\n\nStackFrames\n1 {{}}\n\n\n{line}' for at in ("one", "two")]
    first, second = (script.readable(t.replace("HERE", at)) for t, at in zip(texts, ("one", "two"), strict=True))
    assert first == second and "metadata" not in first and "other = 1" in first
    assert script.readable(texts[0].replace("ML", "MM")) != first


def test_cases_are_the_suites_and_each_program_is_there_once(script: ModuleType) -> None:
    found = script.cases()
    names = [name for c in found for name in c["names"]]
    assert len(names) == len(set(names)) > len(found) == len({script.key_of(c) for c in found})
    for part in ("head 8192x4096x151936: kernel, a quarter live", "head 16384x1536x151936: default, GSPO",
                 "logits 4096x151643: default", "logits 4096x151936, f32: statistics alone"):  # fmt: skip
        assert part in names
