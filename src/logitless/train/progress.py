"""How far a run is, on standard error: a bar where somebody is looking, a line every so often where nobody is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

EVERY_S = 20.0
"""Seconds between two lines."""


def duration(seconds: float) -> str:
    """``"40 s"``, ``"3 min"``, ``"2.5 h"``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Progress:
    """Steps of a run: a bar by ``rich``; without a terminal or rich, lines through ``say``."""

    def __init__(self, total: int, done: int, say: Callable[[str], None]):
        self._bar: Any = None
        self._total, self._done, self._say = total, done, say
        self._last = time.monotonic()
        if not sys.stderr.isatty():
            return
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar
        except ImportError:
            return
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._bar = Bar(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def phase(self, name: str) -> None:
        """Something other than a step begins."""
        if self._bar is not None:
            self._bar.update(self._task, description=name)
        elif time.monotonic() - self._last >= EVERY_S:
            self._last = time.monotonic()
            self._say(name)

    def step(self, record: dict[str, Any]) -> None:
        """One step is done."""
        self._done += 1
        loss, seconds = record["train/loss"], record["time/train/step_avg_last10_s"]
        text = f"reward {record['train/reward']:.3f}  loss {'skipped' if loss is None else format(loss, '.4f')}"
        text += f"  {seconds:.2f} s/step"
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=text)
        elif time.monotonic() - self._last >= EVERY_S:
            self._last = time.monotonic()
            left = duration((self._total - self._done) * seconds)
            self._say(f"step {self._done}/{self._total}  {text}  about {left} left")
