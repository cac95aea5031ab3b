"""benchmarks/startup.py at a small size: it runs, compiles side by side, and reuses what was compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import CHILD_ENVIRONMENT

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "startup.py"
SMALL = [
    "rollout.max_completion_tokens=8", "train.pack_length=400", "train.microbatch=1", "train.prompts_per_step=1",
    "train.microbatch_tail=1", "train.group_size=2", "eval.problems=2", "train.loss.backend=chunked",
    "model.compute_dtype=float32",
]  # fmt: skip


@pytest.mark.slow
def test_seconds_before_step_1_are_recorded(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf extra is not installed")
    command = [sys.executable, str(SCRIPT), "--layers", "1", "--vocab", "1024", "--out", str(tmp_path / "out"), *SMALL]
    environment = {**os.environ, **CHILD_ENVIRONMENT}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out" / "startup.json").read_text()
    found = json.loads(text)
    assert str(tmp_path) not in text, "paths of this machine are no part of the record"
    first, second = found["runs"]["first start"], found["runs"]["second start"]
    assert set(first["programs_s"]) == {"rollout", "eval", "update"}
    # Tests keep small programs, too: those of loading, which the runs before have compiled, are hits.
    assert first["compilation_cache"]["misses"] >= 3 and second["compilation_cache"]["misses"] == 0
    assert sum(first["programs_s"].values()) > 1.2 * first["compile_s"], "one after the other"
    assert found["bars"]["second start"]["value"] == second["total_s"] < first["total_s"]
