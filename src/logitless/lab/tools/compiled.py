"""Compiled programs, kept for the next process: JAX's compilation cache, on by default for the commands that train.

``$JAX_COMPILATION_CACHE_DIR`` says where, as anywhere with JAX; else it is ``compiled`` in :func:`user_cache`.
``LOGITLESS_COMPILE_CACHE=off`` turns it off. JAX's key is the program with its compiler, options and devices, so that
nothing in it can be stale; what has not been used for longest goes first once it holds :data:`MOST_BYTES`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import jax

MOST_BYTES = 4 << 30
LEAST_SECONDS = 0.1
"""What takes less to compile is not kept. JAX's own second would leave out dozens of small programs of a start."""


def user_cache() -> Path:
    """``$LOGITLESS_CACHE``, or ``logitless`` in the user's cache folder."""
    own = os.environ.get("LOGITLESS_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "logitless"


def folder_of_programs() -> Path | None:
    """Where compiled programs are kept unless JAX is told otherwise; ``None`` where that is turned off."""
    given = os.environ.get("LOGITLESS_COMPILE_CACHE", "on").lower()
    return None if given in ("off", "0", "false", "no") else user_cache() / "compiled"


def keep() -> None:
    """Turn the cache on, unless it is turned off or JAX has one already; a folder that cannot be had is no failure."""
    folder = folder_of_programs()
    if folder is None or jax.config.jax_compilation_cache_dir:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder}: cannot be written")
        _make_room(folder)
    except OSError as error:
        print(f"compiled programs are not kept: {error}", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)


def _make_room(folder: Path, most: int = MOST_BYTES) -> None:
    """Drop the programs that were read or written longest ago, until the rest is within ``most`` bytes."""
    files = [(path, path.stat()) for path in folder.iterdir() if path.is_file()]
    size = sum(found.st_size for _, found in files)
    for path, found in sorted(files, key=lambda item: max(item[1].st_atime, item[1].st_mtime)):
        if size <= most:
            break
        if time.time() - found.st_mtime > 3600:  # another process may be about to read what is new
            path.unlink(missing_ok=True)
            size -= found.st_size
