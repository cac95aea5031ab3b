"""How a command ends: one line and an exit code for what a user, a disk or a signal can cause.

0 done, all gates met     1 a gate missed, or arms that disagree     2 bad usage, configuration, data or place
3 the work could not go on (disk or memory full, losses not finite)  128 + n: ended by signal n; 141: a closed pipe
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

from logitless.lab import signals

BAD_USAGE, FAILED = 2, 3
_OUT_OF_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM)
_XLA_ERRORS = ("JaxRuntimeError", "XlaRuntimeError")


def run(name: str, command: Callable[[], int]) -> int:
    """Run a command; its exit code."""

    def say(text: object) -> None:
        print(f"logitless {name}: {text}", file=sys.stderr, flush=True)

    with signals.heard(name):
        try:
            code = command()
            sys.stdout.flush()
            return code
        except signals.Stop as stop:
            say(stop)
            return 128 + stop.number
        except KeyboardInterrupt:
            say("stopped by SIGINT")
            return 130
        except BrokenPipeError:
            # Whoever read the output has gone; what is still in the buffer would raise again when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except OSError as error:
            where = f"{error.filename}: " if error.filename is not None else ""
            say(f"{where}{error.strerror or error}")
            return FAILED if error.errno in _OUT_OF_ROOM else BAD_USAGE
        except Exception as error:
            if (asked := _out_of_memory(error)) is None:
                raise
            say(f"out of memory: {asked}")
            return FAILED


def open_streams() -> None:
    """Give a standard stream that was closed before Python began (``>&-``) a place: what is printed there is lost."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (as long as the process)


def _out_of_memory(error: Exception) -> str | None:
    """What did not fit, where that is what happened: to Python and NumPy, or to a device's allocator."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return text or "this process may have no more"
    return text[:300] if type(error).__name__ in _XLA_ERRORS and "RESOURCE_EXHAUSTED" in text else None


def check_file(path: Path) -> None:
    """Raise the ``OSError`` that writing ``path`` would meet, before the work whose result goes there."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder, expected the name of a file", str(path))
    _make(path.parent, path)
    there = path.exists()
    with path.open("ab"):
        pass
    if not there:
        path.unlink()


def _make(folder: Path, path: Path) -> None:
    """Make the folder of ``path``; a file in the path is reported by name."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise NotADirectoryError(errno.ENOTDIR, "cannot be written: its folder is a file", str(path)) from None


def check_folder(path: Path) -> None:
    """The same of a folder that files are to be written to; it is made."""
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is a file, expected a folder", str(path))
    _make(path, path)
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "cannot be written", str(path))
