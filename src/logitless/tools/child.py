"""A job in a fresh process, and what came of it: ``python -m MODULE '{...}'`` that prints one JSON line last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

OUT_OF_MEMORY = "out of memory"


def ask(module: str, job: dict[str, Any], timeout_s: int, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """The JSON that ``module`` gives for the job; ``error`` if it was killed, ran out of memory, or took too long."""
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, json.dumps(job)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return dict(error=f"stopped after {timeout_s} s")
    lines = done.stdout.strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        # Killed by the system, most often for memory.
        tail = done.stderr.strip().splitlines()[-3:]
        killed = done.returncode in (-9, 137)
        return dict(error=f"{OUT_OF_MEMORY} (killed)" if killed else f"exit {done.returncode}: {' | '.join(tail)}")
