"""The progress bar: on standard error, and only where somebody is looking."""

from __future__ import annotations

import sys
from typing import Any


class Progress:
    """A bar of steps by ``rich``; silent where standard error is no terminal or rich is not installed."""

    def __init__(self, total: int, done: int):
        self._bar: Any = None
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
        self._task = self._bar.add_task("compiling", total=total, completed=done)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, record: dict[str, Any]) -> None:
        """One step is done."""
        if self._bar is None:
            return
        loss = record["train/loss"]
        text = f"reward {record['train/reward']:.3f}  loss {'skipped' if loss is None else format(loss, '.4f')}"
        text += f"  {record['time/train/step_avg_last10_s']:.2f} s/step"
        self._bar.update(self._task, advance=1, description=text)
