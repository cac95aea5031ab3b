"""``logitless bench`` on the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Over = Callable[..., int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--config", action="append", default=[], help="YAML file (configs/bench/); may be repeated")
    parser.add_argument("--suite", help="run the lot into one JSON file: cpu, h200 or gpu-{head,sparse,distill,logits}")
    parser.add_argument("--only", default="", help="of a suite, only cases with (one of) this in their name")
    parser.add_argument(
        "--arms", default="", help="only arms of these names, or with this in them, and their baselines"
    )
    parser.add_argument("--out", type=Path, default=None, help="a suite's file (default runs/bench_SUITE.json)")
    parser.add_argument(
        "--against",
        type=Path,
        default=None,
        metavar="PATH",
        help="another checkout, whose library takes turns with this",
    )
    parser.add_argument(
        "--peers", nargs="?", const="", default=None, metavar="DIR",
        help="PyTorch's arms, too (torch, Liger-Kernel, TRL, cut-cross-entropy; DIR: a folder of unpacked wheels)",
    )  # fmt: skip
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key")


def run(args: argparse.Namespace, over_configs: Over) -> int:
    """0 if all is well, 1 if a check, a gate or an arm failed, 2 for what cannot be run as asked."""
    from logitless.lab.tools.command_config import ConfigError

    try:
        return _run(args, over_configs)
    except ConfigError as error:
        print(f"logitless bench: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace, over_configs: Over) -> int:
    from logitless.lab import exits
    from logitless.lab.bench import case, microbench, suites
    from logitless.lab.tools.command_config import ConfigError
    from logitless.lab.tools.progress import Progress

    how = microbench.How(
        only=tuple(filter(None, args.arms.split(","))),
        against="" if args.against is None else case.source_of(args.against),
        peers=args.peers,
    )
    if args.peers and not Path(args.peers).is_dir():
        raise ConfigError(f"--peers {args.peers}: no such folder; expected one with unpacked wheels, or --peers alone")
    if args.suite is not None:
        if args.config:
            raise ConfigError("--suite takes no configuration; its cases are declared")
        out = args.out or Path(f"runs/bench_{args.suite}.json")
        exits.check_file(out)
        total = suites.stages(args.suite, args.only, args.overrides, how)
        with Progress(total) as progress:
            result = suites.run(args.suite, out, progress.stage, show, args.only, args.overrides, how)
        print(f"{out}: {len(result['records'])} cases in {result['seconds']:.0f} s")
        return 0 if result["passed"] else 1
    if args.only or args.out is not None:
        raise ConfigError("--only and --out are for --suite; a configuration has out=FILE")

    def run_case(c: Any, say: Callable[[str], None]) -> dict[str, Any]:
        return microbench.run(c, say, how)

    return over_configs("bench", args, case.BenchConfig, run_case, show, lambda c: microbench.stages(c, how))


def show(record: dict[str, Any]) -> None:
    """A record, as text on stdout."""
    from logitless.lab.bench import text_table

    if "config/name" in record:
        show_gates(record)
    else:
        print(text_table.table(record), flush=True)
        if not record["passed"]:
            print("  FAIL: an arm failed, the arms disagree, a gate is missed, or the kernel did not verify")


def show_gates(record: dict[str, Any], numbers: bool = False) -> None:
    """Print the gates of a gradcheck, with numbers if asked."""
    print(f"{record['config/name']}: {record['device']}, jax {record['jax']}")
    for key, value in record.items():
        if numbers and isinstance(value, float) and not key.startswith("config/"):
            print(f"  {key:32s} {value:.6g}")
    for key, gate in record["gates"].items():
        print(f"  {'PASS' if gate['ok'] else 'FAIL'} {key:36s} {gate['value']:.3g} (<= {gate['limit']:g})")
