"""SIGINT, SIGTERM and SIGHUP, in any phase of a command.

Outside of what has to be finished a signal raises :class:`Stop` in the main thread. Python handles a signal only
between two bytecode instructions, and a compilation can delay the handler for minutes. :func:`heard` therefore starts a
thread that ends the process unless the main thread does so within ``GRACE`` seconds. Inside :func:`held` the first
signal is remembered, so that a step can be finished and saved, and a second one ends the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

GRACE = 2.0
NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Stop(BaseException):
    """A signal asked the process to end, and there is nothing to finish. Like KeyboardInterrupt, no ``Exception``."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")


@dataclasses.dataclass
class Hold:
    """Something that is to be finished before the process ends."""

    what: str
    received: int | None = None


_hold: Hold | None = None
_installed = False


def _receive(number: int, _: Any) -> None:
    if _hold is not None and _hold.received is None:
        _hold.received = number
        print(f"stopping after this {_hold.what}; again to stop now", file=sys.stderr, flush=True)
        return
    raise Stop(number)


def one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """``sys.excepthook`` while ``python -m logitless`` imports the package: Python itself then ends by the signal."""
    if issubclass(kind, KeyboardInterrupt):
        print("logitless: stopped by SIGINT", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


@contextlib.contextmanager
def _handlers() -> Iterator[bool]:
    """Our handlers, where this is the main thread and they are not in place yet."""
    global _installed
    if _installed or threading.current_thread() is not threading.main_thread():
        yield False
        return
    # What is ignored stays so: nohup does that to SIGHUP, a shell to the SIGINT of a job in the background.
    heeded = [number for number in NUMBERS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _receive) for number in heeded}
    _installed = True
    try:
        yield True
    finally:
        _installed = False
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held(what: str) -> Iterator[Hold]:
    """Remember the first signal until the block is over; its number is in ``received``."""
    global _hold
    before, hold = _hold, Hold(what)
    with _handlers():
        _hold = hold
        try:
            yield hold
        finally:
            _hold = before


@contextlib.contextmanager
def heard(name: str) -> Iterator[None]:
    """For a command: signals raise :class:`Stop`, and end the process where nobody listens."""
    done = threading.Event()
    with _handlers() as ours:
        if not ours:
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=_watch, args=(reader, name, done), daemon=True).start()
        try:
            yield
        finally:
            done.set()
            signal.set_wakeup_fd(before)
            os.close(writer)  # which ends the thread


def _watch(reader: int, name: str, done: threading.Event) -> None:
    """Python's own handler writes the number of each signal to the pipe at once, whatever the main thread is in."""
    heard_before = False
    with open(reader, "rb", buffering=0) as pipe:
        while number := pipe.read(1):
            if number[0] not in NUMBERS:
                continue
            first, heard_before = not heard_before, True
            if first and _hold is not None:
                continue
            if not done.wait(GRACE):
                shown = "\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar has hidden the cursor
                print(f"{shown}logitless {name}: {Stop(number[0])}", file=sys.stderr, flush=True)
                os._exit(128 + number[0])
