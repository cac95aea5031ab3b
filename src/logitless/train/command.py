"""``logitless train`` and ``logitless ab``.

Exit codes: 0 done (of an A/B: no arm was found to disagree); 1 arms of an A/B disagree; 2 bad usage, configuration or
data; 3 the run could not go on (losses not finite, disk full, no readable checkpoint); 130 and 143 stopped by SIGINT or
SIGTERM, with the state saved.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from logitless.lab import exits, shipped_configs


def add_parsers(subparsers: Any) -> None:
    """Add the two commands to the command line's grammar."""
    train = subparsers.add_parser("train", help="GRPO training; without a configuration, two-number addition on a CPU")
    ab = subparsers.add_parser(
        "ab", help="the same training with two or more losses, each in its own process, compared"
    )
    for command in (train, ab):
        command.add_argument(
            "--config", default=None, help="a file, or a name of `logitless configs`; default: the tiny run"
        )
        command.add_argument(
            "--resume",
            nargs="?",
            const="",
            metavar="FOLDER",
            help="continue the run in FOLDER, with its configuration; without FOLDER, that in run_dir",
        )
        command.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the configuration")


def _config(args: argparse.Namespace, saved: str) -> Any:
    """The configuration from the arguments; ``saved`` is the path of a run's own configuration."""
    from logitless.train.config import ConfigError, load

    if meant := shipped_configs.mistaken("train", args.overrides):
        raise ConfigError(meant)
    if not args.resume:
        return load(shipped_configs.find("train", args.config), args.overrides)
    folder = Path(args.resume)
    if args.config is not None:
        raise ConfigError(f"--resume {folder} takes the configuration of the run in it; leave out --config")
    if not (folder / saved).exists():
        other = {"config.yaml": ("ab.yaml", "ab"), "ab.yaml": ("config.yaml", "train")}[saved]
        holds = f"an A/B or a run of `logitless {other[1]}`" if (folder / other[0]).exists() else "no run to continue"
        raise ConfigError(f"--resume: {folder} holds {holds} (no {saved})")
    return dataclasses.replace(load(folder / saved, args.overrides), run_dir=str(folder))


def run_train(args: argparse.Namespace) -> int:
    """``logitless train``."""

    def run() -> int:
        from logitless.train import folder, loop

        config = _config(args, "config.yaml")
        print(describe(loop.run(config, resume=args.resume is not None), folder.run_folder(config)))
        return 0

    return report_errors("train", run)


def describe(summary: dict[str, Any], folder: Any) -> str:
    """A few lines for the terminal."""

    def number(key: str, form: str = ".3f") -> str:
        value = summary.get(key)
        return format(value, form) if isinstance(value, (int, float)) else "-"

    return (
        f"{summary['name']}: {summary['steps']} steps, {number('time/train/step_avg_last10_s')} s a step\n"
        f"  sampled reward: first 10 steps {number('train/reward_first10')}, last 10 {number('train/reward_last10')}\n"
        f"  held-out reward {number('eval/first')} -> {number('eval/last')}\n"
        f"  records in {folder}"
    )


def report_errors(command: str, run: Callable[[], int], again: str = "continue with --resume") -> int:
    """Run it and turn what can go wrong into a message and an exit code; ``again``: what continues it."""

    def said(text: object, code: int) -> int:
        print(f"logitless {command}: {text}", file=sys.stderr)
        return code

    for name in ("optax", "omegaconf", "safetensors"):
        if importlib.util.find_spec(name) is None:
            return said(f"needs {name}: pip install 'logitless[train]'", exits.BAD_USAGE)
    from logitless.train import ab, checkpoints, config, data, hub, loop, model, reward

    try:
        return run()
    except (config.ConfigError, data.DataError, hub.FetchError, model.ModelError, reward.RewardError) as error:
        return said(error, exits.BAD_USAGE)
    except (checkpoints.CheckpointError, loop.TrainingFailed) as error:
        return said(error, exits.FAILED)
    except loop.Stopped as stop:
        return said(f"{stop}; step {stop.saved} is saved; {again}", 128 + stop.number)
    except ab.ArmFailed as error:
        return said(f"{error}{f'; {again}' if error.stopped else ''}", error.code)


def run_ab(args: argparse.Namespace) -> int:
    """``logitless ab``."""

    def run() -> int:
        from logitless.train import ab

        result = ab.run(_config(args, "ab.yaml"), resume=args.resume is not None)
        print(ab.table(result))
        return 1 if ab.disagreeing(result) else 0

    return report_errors("ab", run)
