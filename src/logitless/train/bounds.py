"""Bounds on code that came with weights, or that a user plugged in: it may loop, and it may ask for any memory."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

resource: Any = importlib.import_module("resource") if importlib.util.find_spec("resource") else None  # not on Windows


class TooLong(BaseException):
    """The time is up. No ``Exception``: the code that is being cut short must not catch it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`TooLong` in the block when ``seconds`` are over; in the main thread, the only one that can be."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def late(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """Let the process grow by ``size`` bytes at most in the block (Linux); more is a ``MemoryError``."""
    statm = Path("/proc/self/statm")
    if resource is None or not statm.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(statm.read_text().split()[0]) * resource.getpagesize()
    bound = now + size if soft == resource.RLIM_INFINITY else min(soft, now + size)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
