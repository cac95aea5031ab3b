"""How far a command is, on standard error: a bar where somebody is looking, a line every so often where nobody is."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

EVERY_S = 20.0
"""Seconds between two lines."""
Say = Callable[[str], None]


def duration(seconds: float) -> str:
    """``"40 s"``, ``"3 min"``, ``"2.5 h"``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def say_to_stderr(text: str) -> None:
    """Print to stderr, apart from results."""
    print(f"  ... {text}", file=sys.stderr, flush=True)


class Progress:
    """So many steps, and phases by name between them; a context manager.

    A bar by ``rich``; without a terminal or rich, lines through ``say``: of steps every ``EVERY_S`` seconds at most,
    of a phase whenever it has lasted so long without a word.
    """

    def __init__(self, total: int, done: int = 0, say: Say = say_to_stderr):
        self._bar: Any = None
        self.total, self.done, self._say = total, done, say
        self._last = self._began = time.monotonic()
        self._phase = ""
        self._over = threading.Event()
        if not sys.stderr.isatty():
            return
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar
            from rich.table import Column
        except ImportError:
            return
        # What gives way on a narrow terminal is the end of the text, and no number.
        whole = Column(no_wrap=True)
        left = TimeRemainingColumn(compact=True, elapsed_when_finished=True, table_column=whole)
        text = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
        columns = BarColumn(10), MofNCompleteColumn(table_column=whole), left, text
        self._bar = Bar(*columns, console=Console(stderr=True), expand=True)
        self._task = self._bar.add_task("", total=total, completed=done)

    @property
    def has_bar(self) -> bool:
        """Whether somebody is looking."""
        return self._bar is not None

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        else:
            threading.Thread(target=self._remind, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._bar is not None:
            self._bar.stop()

    def _remind(self) -> None:
        """A phase can be a single call into a compiler: only another thread can report that the phase is still
        running."""
        while not self._over.wait(EVERY_S / 4):
            now = time.monotonic()
            if self._phase and now - self._last >= EVERY_S:
                self._line(f"{self._phase}, {duration(now - self._began)} so far")

    def _line(self, text: str) -> None:
        self._last = time.monotonic()
        self._say(text)

    def at(self, done: int, text: str | None = None) -> None:
        """Set the number of finished steps, without printing a line."""
        self.done = done
        if self._bar is not None:
            known = {} if text is None else {"description": text}
            self._bar.update(self._task, completed=done, **known)

    def phase(self, name: str) -> None:
        """Something other than a step begins."""
        self._phase, self._began = name, time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, description=name, refresh=True)  # a short phase is shown, too

    def announce(self, name: str) -> None:
        """The same, with a line at once where there is no bar."""
        self.phase(name)
        if self._bar is None:
            self._line(name)

    def stage(self, name: str) -> None:
        """A command whose steps are phases: start a new phase and finish the previous phase."""
        if self._phase:
            self.at(min(self.done + 1, self.total))
        self.announce(name)

    def step(self, text: str, seconds: float) -> None:
        """Finish a step that took ``seconds``."""
        self._phase = ""
        self.at(self.done + 1, text)
        if self._bar is None and time.monotonic() - self._last >= EVERY_S:
            left = duration((self.total - self.done) * seconds)
            self._line(f"step {self.done}/{self.total}  {text}  about {left} left")


def of_step(record: dict[str, Any]) -> str:
    """A training step in a few words."""

    def number(key: str, form: str, otherwise: str = "-") -> str:
        value = record.get(key)  # null if not finite
        return format(value, form) if isinstance(value, (int, float)) else otherwise

    said = f"reward {number('train/reward', '.3f')}  loss {number('train/loss', '.4f', 'skipped')}"
    return f"{said}  {number('time/train/step_avg_last10_s', '.2f')} s/step"
