"""Atomic replacement of files, and the texts of errors about files, names and packages."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path to write to; at the end of the block the new file is on disk and replaces ``path``."""
    beside = path.with_name(path.name + ".new")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield beside
        _sync(beside)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # not every system can do that for a folder
        _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace(path: Path, text: str | bytes) -> None:
    """Write a file atomically: a kill leaves the old file or the new one."""
    with replaced(path) as beside:
        beside.write_bytes(text.encode() if isinstance(text, str) else text)


def in_a_line(error: Exception) -> str:
    """The error's kind and text, for a message of one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def did_you_mean(given: str, known: Iterable[str], prefix: str = "") -> str:
    """`` Did you mean ...?`` with the nearest of the known names, or nothing."""
    close = difflib.get_close_matches(given, list(known), n=1)
    return f" Did you mean {prefix + close[0]!r}?" if close else ""


def package(name: str, error: Exception) -> Any:
    """The module of an optional package. Raises ``error``, which names the extra, if the package is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise error from None
