"""The ``logitless`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from logitless._version import __version__


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    p = argparse.ArgumentParser(
        prog="logitless", description="GRPO-family RL losses for JAX that never build the logits."
    )
    p.add_argument("--version", action="version", version=f"logitless {__version__}")
    commands = p.add_subparsers(dest="command", metavar="command")
    demo = commands.add_parser(
        "demo", help="one small batch, dense against chunked: loss, gradients, and the memory the compiler plans"
    )
    demo.add_argument("--tokens", type=int, default=1024, help="tokens in the batch (default 1024)")
    demo.add_argument("--hidden", type=int, default=256, help="hidden size (default 256)")
    demo.add_argument("--vocab", type=int, default=32000, help="vocabulary size (default 32000)")
    demo.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 is success, 1 a check that failed, 2 bad usage."""
    args = parser().parse_args(argv)
    if args.command is None:
        parser().print_help()
        return 0
    from logitless import demo

    for name in ("tokens", "hidden", "vocab"):
        if getattr(args, name) < 8:
            print(f"logitless demo: --{name} {getattr(args, name)}, expected at least 8", file=sys.stderr)
            return 2
    return demo.run(tokens=args.tokens, hidden=args.hidden, vocab=args.vocab, seed=args.seed)
