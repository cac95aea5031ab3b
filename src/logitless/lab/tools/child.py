"""Child processes with JSON answers: a line for a whole process (:func:`last_line`), or a line per question, so several
processes can alternate.

The side that asks is :class:`Worker`; the side that answers calls :func:`serve`. A worker that is killed, runs out of
memory or takes too long gives an ``error`` like any other answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

OUT_OF_MEMORY = "out of memory"
MARK = "@answer "
"""Before every answer: libraries print to stdout, too."""
SOURCE = str(Path(__file__).parents[3])
"""The folder above this package."""


def environment(own: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, with this package on the path, overridden by ``own``."""
    path = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **(own or {})}


def last_line(command: Sequence[str], own: Mapping[str, str] | None = None, timeout_s: float = 1800) -> dict[str, Any]:
    """The JSON object in the last line that ``python *command`` prints; ``error`` where it ends in another way."""
    call = [sys.executable, *command]
    try:
        done = subprocess.run(call, env=environment(own), capture_output=True, text=True, timeout=timeout_s)
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return dict(error=f"stopped after {timeout_s:g} s")
    except (IndexError, ValueError):
        return dict(error=f"ended with exit code {done.returncode}: {done.stderr.strip()[-2000:]}")


class Worker:
    """``python *command`` with this package on its path, kept open between questions; a context manager."""

    def __init__(self, command: Sequence[str], own: Mapping[str, str] | None = None):
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the worker)
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environment(own),
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._answers.put(line.removeprefix(MARK))
        self._answers.put(None)

    def ask(self, job: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to ``job``, whose ``do`` names the handler; ``gone`` if the process ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self.close()
            return dict(error=f"stopped after {timeout_s:g} s", gone=True)
        except (BrokenPipeError, ValueError):
            answer = None
        return dict(error=self._last_words(), gone=True) if answer is None else json.loads(answer)

    def _last_words(self) -> str:
        code = self._process.wait()
        if code in (-9, 137):  # by the system, most often for memory
            return f"{OUT_OF_MEMORY} (killed)"
        self._said.seek(0)
        return f"exit {code}: {' | '.join(self._said.read().strip().splitlines()[-3:])}"

    def close(self) -> None:
        """End the process; it has nothing to save."""
        self._process.kill()
        self._process.wait()
        self._listener.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # unread questions
                    stream.close()
        self._said.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(handlers: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer questions from stdin until it ends: ``{"do": name, ...}`` is ``handlers[name](...)``."""
    for line in sys.stdin:
        job = json.loads(line)
        print(f"\n{MARK}{json.dumps(answer(handlers, job))}", flush=True)


def answer(handlers: Mapping[str, Callable[..., dict[str, Any]]], job: dict[str, Any]) -> dict[str, Any]:
    """A single answer; an exception in a handler becomes an ``error``."""
    try:
        return handlers[job.pop("do")](**job)
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        memory = "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower() or isinstance(error, MemoryError)
        return dict(error=OUT_OF_MEMORY if memory else text[:2000])
