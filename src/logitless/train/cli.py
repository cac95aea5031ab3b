"""``logitless train`` and ``logitless ab``.

Exit codes: 0 done; 1 the arms of an A/B disagree; 2 bad usage, configuration or data; 3 the run could not go on (losses
not finite, disk full, no readable checkpoint); 130 and 143 stopped by SIGINT or SIGTERM, with the state saved.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

EXIT_FAILED = 3


def add_parsers(subparsers: Any) -> None:
    """Add the two commands to the command line's grammar."""
    train = subparsers.add_parser("train", help="GRPO training; without a configuration, two-number addition on a CPU")
    ab = subparsers.add_parser(
        "ab", help="the same training with two or more losses, each in its own process, compared"
    )
    for command in (train, ab):
        command.add_argument("--config", default=None, help="YAML file (configs/train/); default: the tiny run")
        command.add_argument("--resume", action="store_true", help="continue the run in run_dir")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the configuration")


def _user_errors() -> tuple[type[Exception], ...]:
    """What is wrong with a user's input, and not with the program."""
    from logitless.bench.config import ConfigError
    from logitless.train.data import DataError
    from logitless.train.fetch import FetchError
    from logitless.train.model import ModelError
    from logitless.train.reward import RewardError

    return ConfigError, DataError, FetchError, ModelError, RewardError


def _missing(command: str) -> int:
    """2 with a word about what to install, or 0."""
    import importlib.util

    needed = ("optax", "omegaconf", "orbax.checkpoint")
    for name in needed:
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            print(f"logitless {command}: needs {name.split('.')[0]}: pip install 'logitless[train]'", file=sys.stderr)
            return 2
    return 0


def run_train(args: argparse.Namespace) -> int:
    """``logitless train``."""
    if code := _missing("train"):
        return code
    from logitless.train import checkpoints, folder, loop
    from logitless.train.config import load

    try:
        config = load(args.config, args.overrides)
        summary = loop.run(config, resume=args.resume)
    except _user_errors() as error:
        print(f"logitless train: {error}", file=sys.stderr)
        return 2
    except (checkpoints.CheckpointError, loop.TrainingFailed) as error:
        print(f"logitless train: {error}", file=sys.stderr)
        return EXIT_FAILED
    except loop.Stopped as stop:
        where = "nothing is saved (checkpoint.every is 0)" if stop.saved is None else f"step {stop.saved} is saved"
        print(f"logitless train: {stop}; {where}; continue with --resume", file=sys.stderr)
        return 128 + stop.number
    print(describe(summary, folder.run_folder(config)))
    return 0


def describe(summary: dict[str, Any], folder: Any) -> str:
    """A few lines for the terminal."""

    def number(key: str, form: str = ".3f") -> str:
        return "-" if summary.get(key) is None else format(summary[key], form)

    return (
        f"{summary['name']}: {summary['steps']} steps, {number('time/train/step_avg_last10_s')} s a step\n"
        f"  sampled reward: first 10 steps {number('train/reward_first10')}, last 10 {number('train/reward_last10')}\n"
        f"  held-out reward {number('eval/first')} -> {number('eval/last')}\n"
        f"  records in {folder}"
    )


def _report_errors(command: str, run: Callable[[], int]) -> int:
    """Run an A/B and turn what can go wrong with one into a message and an exit code."""
    if code := _missing(command):
        return code
    from logitless.train import ab

    try:
        return run()
    except _user_errors() as error:
        print(f"logitless {command}: {error}", file=sys.stderr)
        return 2
    except ab.ArmFailed as error:
        print(f"logitless {command}: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:  # the arms have had it too, and save what they have
        print(f"logitless {command}: stopped; continue with --resume", file=sys.stderr)
        return 130


def run_ab(args: argparse.Namespace) -> int:
    """``logitless ab``."""

    def run() -> int:
        from logitless.train import ab
        from logitless.train.config import load

        result = ab.run(load(args.config, args.overrides), resume=args.resume)
        print(ab.table(result))
        return 1 if ab.disagreeing(result) else 0

    return _report_errors("ab", run)


def run_demo(args: argparse.Namespace) -> int:
    """``logitless demo`` without ``--quick``."""
    from logitless import demo

    return _report_errors("demo", lambda: demo.learn(out=args.out, seed=args.seed))
