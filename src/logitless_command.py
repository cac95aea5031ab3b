"""What ``logitless`` on the command line calls: outside of the package, whose import takes seconds (jax).

Ctrl-C in these seconds ends in one line, as anywhere later (:mod:`logitless.lab.exits`).
"""

from __future__ import annotations

import sys


def main() -> int:
    """The command; its exit code."""
    try:
        from logitless.lab.cli import main as run
    except KeyboardInterrupt:
        print("logitless: stopped by SIGINT", file=sys.stderr)
        return 130
    return run()
