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
def test_padded_and_packed_updates_are_timed(tmp_path: Path) -> None:
    found = run(tmp_path, "update", "--steps", "2")
    assert [len(seconds) for seconds in found["seconds"].values()] == [2, 2] and 0 < found["last"]["update_rows"] < 1
    assert abs(found["losses"]["packed"] - found["losses"]["padded"]) < 1e-5


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
def test_long_rows_are_timed_in_turns(tmp_path: Path) -> None:
    found = run(tmp_path, "long", "--repeats", "1", "--rows", "dense=3", "dense=2", "fused=4")
    assert found["rows"] == {"dense": 3, "fused": 4} and found["failed"] == {}
    assert all(len(seconds) == 1 for seconds in found["seconds"].values())
