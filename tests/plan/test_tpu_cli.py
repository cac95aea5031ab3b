"""``logitless tpu``: bad usage, a missing compiler, and what the real compiler says of a small program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ahead_of_time import needs_libtpu
from logitless.lab import cli
from logitless.lab.tpu import aot, command
from logitless.lab.tpu.hlo import collectives_of

SMALL = ["--hidden", "128", "--vocab", "1024", "--tokens", "512"]


@pytest.mark.long
@needs_libtpu
def test_compile_reports_peak_and_kernels_of_both_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a" / "tpu.jsonl"
    assert cli.main(["tpu", "compile", *SMALL, "--out", str(out)]) == 0
    text = capsys.readouterr()
    assert "fused: peak" in text.out and "dense: peak" in text.out and "compiling the dense program" in text.err
    record = json.loads(out.read_text())
    fused, dense = record["programs"]["fused"], record["programs"]["dense"]
    assert fused["kernels"] == 4 and dense["kernels"] == 0
    assert not fused["logits_in_program"] and dense["logits_in_program"]
    assert 0 < fused["peak"] < dense["peak"] and fused["arguments"] == dense["arguments"]
    assert set(record["versions"]) == {"jax", "jaxlib", "libtpu"}


@needs_libtpu
def test_what_the_compiler_refuses_is_exit_code_1(capsys: pytest.CaptureFixture[str], monkeypatch: object) -> None:
    # 60 GB of logits do not fit a chip; the compiler says so.
    arguments = ["--level", "logits", "--vocab", "151936", "--tokens", "100000", "--no-dense"]
    assert cli.main(["tpu", "compile", *arguments]) == 1
    assert "RESOURCE_EXHAUSTED" in capsys.readouterr().out


@pytest.mark.slow  # 11 seconds of a simulator
@needs_libtpu
def test_cycles_are_an_estimate_and_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cycles.jsonl"
    arguments = ["--level", "logits", "--vocab", "1024", "--tokens", "16", "--for-tokens", "4096", "--out", str(out)]
    assert cli.main(["tpu", "cycles", *arguments]) == 0
    assert "ESTIMATE" in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert record["what"].startswith("ESTIMATE") and record["estimated_ms"] > 0
    assert any("stats_and_dlogits" in name for name in record["operations"])


def test_without_libtpu_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    for way in ("compile", "cycles"):
        assert cli.main(["tpu", way, *SMALL]) == 2
        assert "pip install 'logitless[tpu]'" in capsys.readouterr().err


def test_a_way_is_needed() -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["tpu"])
    assert stop.value.code == 2


def test_a_compiler_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.sys, "executable", "/bin/false")
    assert "exit code 1" in command._compile("v6e:2x4", {})["error"]


def test_collectives_are_read_from_the_programs_text() -> None:
    """A gather, an asynchronous sum, and in a loop of eight a sum that is rounded as it is written and a fused
    reduce-scatter; each in what it sums, with the loop's trips."""
    hlo = """
%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%all-reduce-scatter.1 (p: f32[1024,128]) -> f32[128,128] {
  %p = f32[1024,128]{1,0} parameter(0)
  %all-reduce.2 = f32[1024,128]{1,0} all-reduce(%p), to_apply=%add
  ROOT %slice = f32[128,128]{1,0} dynamic-slice(%all-reduce.2, %i, %j), dynamic_slice_sizes={128,128}
}

%body (t: (s32[], f32[64])) -> (s32[], f32[64]) {
  %k = f32[64]{0} get-tuple-element(%t), index=1
  %psum = bf16[64]{0} all-reduce(%k), to_apply=%add
  %w = f32[1024,128]{1,0} custom-call(%psum), custom_call_target="tpu_custom_call"
  %fusion.3 = f32[128,128]{1,0} fusion(%w), kind=kCustom, calls=%all-reduce-scatter.1
}

%condition (t: (s32[], f32[64])) -> pred[] {
  %eight = s32[] constant(8)
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %lt = pred[] compare(%i, %eight), direction=LT
}

ENTRY %main (p: bf16[128,128]) -> bf16[8] {
  %p = bf16[128,128]{1,0} parameter(0)
  %ag = bf16[1024,128]{1,0:T(8,128)(2,1)} all-gather(%p), replica_groups={}
  %ars = (f32[64]{0}, f32[64]{0}) all-reduce-start(f32[64]{0} %x), to_apply=%add
  %ard = f32[64]{0} all-reduce-done(%ars)
  %loop = (s32[], f32[64]{0}) while(%start), condition=%condition, body=%body
  %f = bf16[8]{0} fusion(%ag), kind=kLoop
}
"""
    assert collectives_of(hlo) == [
        dict(kind="all-gather", bytes=1024 * 128 * 2, dtype="bf16", times=1),
        dict(kind="all-reduce", bytes=256, dtype="f32", times=1),
        dict(kind="all-reduce", bytes=256, dtype="f32", times=8),
        dict(kind="reduce-scatter", bytes=1024 * 128 * 4, dtype="f32", times=8),
    ]
