"""A process of its own for programs that libtpu compiles: it keeps its settings for a process's life. No tests here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from logitless.lab.tpu import aot

ROOT = Path(__file__).parents[2]
needs_libtpu = pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))


def lines_of(*arguments: object) -> list[str]:
    """What ``python ARGUMENTS`` prints with libtpu's settings; a failure fails the test with what it said."""
    path = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests/support"))
    environment, command = dict(os.environ, **aot.ENVIRONMENT, PYTHONPATH=path), [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def answer_of(*arguments: object) -> Any:
    """The last line of :func:`lines_of`, which is JSON."""
    return json.loads(lines_of(*arguments)[-1])
