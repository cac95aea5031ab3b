"""``logitless plan``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from logitless.lab import cli
from logitless.lab.plan.mesh import parse_mesh

MODEL = ["plan", "--model", "qwen2.5-7b", "--no-compile"]


def test_the_estimate_comes_first_then_the_compiled_program(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "a" / "plan.jsonl"
    assert cli.main(["plan", "--hidden", "64", "--vocab", "512", "--tokens", "64", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out.index(": estimate") < said.out.index(": compiled for cpu") and "compiling" in said.err
    record = json.loads(out.read_text())
    assert record["kind"] == "plan" and record["plan"]["compiled"]
    assert [p["tokens"] for p in record["contexts"]][-1] == 131072


def test_chips_and_meshes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.jsonl"
    assert cli.main([*MODEL, "--chip", "V6E", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    for word in ("pallas_tpu", "4 matmuls", "tiles", "v6e roofline", "dense", "longest context"):
        assert word in text
    assert cli.main([*MODEL, "--chip", "v6e", "--mesh", "data=8", "--out", str(out)]) == 0
    one, many = map(json.loads, out.read_text().splitlines())
    assert one["longest_context"]["fused"] > one["longest_context"]["dense"]
    assert many["mesh"]["flops"] == one["plan"]["flops"] / 8 and many["mesh"]["chip"] == "v6e"
    capsys.readouterr()
    assert cli.main(["plan", "--model", "qwen2.5-7b", "--chip", "h200", "--lora-rank", "16", "--frozen-head"]) == 0
    said = capsys.readouterr()
    assert "2 matmuls" in said.out and "not compiled: a program for h200" in said.out and not said.err


def test_options_are_written_either_way(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    start, out = [*MODEL, "--chip", "h200", "--logits-dtype", "bfloat16"], tmp_path / "plan.jsonl"
    assert cli.main([*start, "sparse_backward=auto", "active_columns=0.08", "hard_rows=0.06", f"out={out}"]) == 0
    text = capsys.readouterr().out
    assert "1.34 matmuls" in text and "active_columns 0.08" in text
    assert cli.main([*start, "--sparse-backward", "auto", "--active-columns", "0.08", "--hard-rows", "0.06"]) == 0
    assert capsys.readouterr().out == text
    record = json.loads(out.read_text())
    assert record["config"]["active_columns"] == 0.08 and "overrides" not in record["config"]
    assert cli.main([*start, "frozen_head=true", "sparse_backward=0.01", "active_columns=1", "hard_rows=0"]) == 0
    assert "2 matmuls" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dta=8", "'dta' is not an axis"),
        ("data=0", "data=0, expected a positive number"),
        ("data", "data=, expected"),
        ("data=2,data=2", "data is given twice"),
        ("", "'' is not an axis"),
    ],
)
def test_a_mesh_that_is_none(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_mesh(text)
