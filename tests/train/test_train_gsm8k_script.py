"""benchmarks/train_gsm8k.py at its small size: every case runs, and writes what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import CHILD_ENVIRONMENT

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "train_gsm8k.py"


def run(out: Path, *arguments: str) -> dict[str, Any]:
    environment = {**os.environ, **CHILD_ENVIRONMENT}
    command = [sys.executable, str(SCRIPT), *arguments, "--small", "--out", str(out), "--work", str(out / "work")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = out.glob("*.json")
    return json.loads(file.read_text())


@pytest.mark.slow
def test_packed_updates_have_the_gradients_of_padded_ones(tmp_path: Path) -> None:
    found = run(tmp_path, "update", "--steps", "2")
    assert found["gradient_error"]["packed"] < 1e-5 and len(found["seconds"]["packed"]) == 2
    assert 0 < found["last"]["update_rows"] < 1


@pytest.mark.slow
def test_decoding_is_timed(tmp_path: Path) -> None:
    found = run(tmp_path, "decode", "--repeats", "1")
    assert found["rows"] == 24 and found["ms_per_token"] > 0


@pytest.mark.slow
def test_the_largest_size_is_found_by_bisection(tmp_path: Path) -> None:
    found = run(tmp_path, "largest", "--what", "batch", "--arm", "dense", "--start", "8", "--memory", "22000000")
    sizes = {row["size"]: row["fits"] for row in found["tried"]}
    assert sizes[found["fits"]] and not sizes[found["fails"]] and found["fails"] - found["fits"] <= 8


@pytest.mark.slow
def test_the_largest_sizes_by_plan(tmp_path: Path) -> None:
    sizes = run(tmp_path, "sizes", "--memory", "1000000000")["sizes"]
    assert set(sizes) == {f"{arm} {what}" for arm in ("dense", "fused") for what in ("context", "batch")}
    for row in sizes.values():
        (a, planned), (b, more) = row["points"]
        at = planned + (row["by_plan"] - a) * (more - planned) / (b - a)
        assert b < row["by_plan"] and abs(at / 1e9 - 1) < 0.01 and row["fits"] <= row["by_plan"]
    assert sizes["dense context"]["fits"] == 256 - 12  # the model's last position


@pytest.mark.slow
def test_the_arms_run_and_are_compared(tmp_path: Path) -> None:
    settings = ["train.steps=3", "eval.problems=8"]
    found = run(tmp_path, "learn", *settings)
    assert list(found["arms"]) == ["dense", "fused", "sparse"] and set(found["agreement"]) == {"fused", "sparse"}
    assert [r["step"] for r in found["control"]["metrics"]] == [0, 1, 2, 3] and found["config"]["run_dir"] == "work"
    assert set(found["same_completions"]) == {*found["arms"], "control"} and "update/sparse" in found["bars"]
    (tmp_path / "train_gsm8k_learn.json").unlink()
    profile = run(tmp_path, "profile", *settings)  # on what the first arm has recorded
    assert set(profile["updates"]) == set(found["arms"]) and profile["rollout"]["wall_s"] > 0


@pytest.mark.slow
def test_long_rows_are_timed_in_turns(tmp_path: Path) -> None:
    found = run(tmp_path, "long", "--repeats", "1", "--rows", "dense=3,2", "fused=4")
    assert found["rows"] == {"dense": 3, "fused": 4} and set(found["planned"]) == {"dense 3", "dense 2", "fused 4"}
    assert all(len(seconds) == 1 for seconds in found["seconds"].values())
