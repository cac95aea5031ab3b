"""The ``logitless`` command; :mod:`logitless.lab.exits` has the exit codes."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from logitless._version import __version__
from logitless.lab import exits, shipped_configs
from logitless.lab.bench import command as bench_command
from logitless.lab.plan import command as plan_command
from logitless.lab.tpu import command as tpu_command
from logitless.train import command as train_cli

_CONFIG_HELP = "a file, or a name of `logitless configs`; may be repeated"


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    p = argparse.ArgumentParser(
        prog="logitless", description="GRPO-family RL losses for JAX that never build the logits."
    )
    p.add_argument("--version", action="version", version=f"logitless {__version__}")
    commands = p.add_subparsers(dest="command", metavar="command")
    demo = commands.add_parser(
        "demo", help="learn to add with the dense and with the chunked loss; ends on a report page"
    )
    demo.add_argument("--quick", action="store_true", help="one batch instead: loss, gradients, memory, in seconds")
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the results (default runs/demo)")
    demo.add_argument("--tokens", type=int, default=1024, help="--quick: tokens in the batch (default 1024)")
    demo.add_argument("--hidden", type=int, default=256, help="--quick: hidden size (default 256)")
    demo.add_argument("--vocab", type=int, default=32000, help="--quick: vocabulary size (default 32000)")
    demo.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    check = commands.add_parser("gradcheck", help="a backend's loss and gradients against the reference and float64")
    check.add_argument("--config", action="append", default=[], help=_CONFIG_HELP)
    check.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the configuration")
    bench = commands.add_parser("bench", help="time and memory with and without the kernels, arms in alternation")
    bench_command.add_arguments(bench)
    plan_command.add_arguments(
        commands.add_parser("plan", help="memory, FLOPs and roofline time of a fused head call, before anything runs")
    )
    tpu_command.add_arguments(
        commands.add_parser("tpu", help="what the TPU compiler says of a program, on a machine without a TPU")
    )
    train_cli.add_parsers(commands)
    report = commands.add_parser("report", help="one HTML page from the results of gradcheck, bench, plan and training")
    report.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="JSON or JSON-lines files, or folders of them"
    )
    report.add_argument("--out", type=Path, default=None, help="default: report.html in the folder RUN, else in runs/")
    report.add_argument("--plots", type=Path, default=None, help="also write each chart as SVG and PNG to this folder")
    commands.add_parser("configs", help="the configurations that come with the package, by name")
    return p


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; ``key=value`` may stand before, between and after the flags."""
    p, given = parser(), list(sys.argv[1:] if argv is None else argv)
    for i, (flag, value) in enumerate(itertools.pairwise(given)):
        if flag == "--resume" and "=" in value and not Path(value).is_dir():
            given[i] = "--resume="  # the flag alone: what follows is an override, and no folder
    args, rest = p.parse_known_args(given)
    if rest and (not hasattr(args, "overrides") or any(r.startswith("-") for r in rest)):
        p.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _demo(args: argparse.Namespace) -> int:
    from logitless.lab import demo
    from logitless.lab.tools import command_config

    for name, least in (("tokens", 8), ("hidden", 8), ("vocab", 8), ("seed", 0)):
        if getattr(args, name) < least:
            print(f"logitless demo: --{name} {getattr(args, name)}, expected at least {least}", file=sys.stderr)
            return 2
    if args.seed > command_config.LARGEST_SEED:
        print(f"logitless demo: --seed {args.seed}, expected at most {command_config.LARGEST_SEED}", file=sys.stderr)
        return 2
    if args.quick:
        return demo.run(tokens=args.tokens, hidden=args.hidden, vocab=args.vocab, seed=args.seed)
    if args.out.exists() and not args.out.is_dir():
        exits.check_folder(args.out)
    exits.check_folder(args.out.parent)
    from logitless.lab.bench import report

    if lacks := report.missing():
        print(f"logitless demo: {lacks}", file=sys.stderr)
        return 2
    folder = demo.free_folder(args.out)
    again = f"`logitless ab --resume {folder}` completes its training, and `logitless demo` starts anew"
    return train_cli.report_errors("demo", lambda: demo.learn(folder=folder, seed=args.seed), again)


def _over_configs(
    command: str,
    args: argparse.Namespace,
    schema: type,
    run: Callable[..., dict],
    show: Callable[[dict], None],
    stages: Callable[[Any], int],
) -> int:
    """Load, run, record and show each configuration; 2 for a bad one, 1 if a record did not pass."""
    import dataclasses

    from logitless.lab.tools import command_config
    from logitless.lab.tools.progress import Progress
    from logitless.lab.tools.tracking import Tracker

    missed = 0
    for path in args.config or [None]:
        try:
            if meant := shipped_configs.mistaken(command, args.overrides):
                raise command_config.ConfigError(meant)
            c: Any = command_config.load(schema, shipped_configs.find(command, path), args.overrides)
            exits.check_file(Path(c.out))
            with Progress(stages(c)) as progress:
                record = run(c, progress.stage)
        except command_config.ConfigError as error:
            print(f"logitless {command}: {error}", file=sys.stderr)
            return 2
        tracker = Tracker(c.out, mode=c.wandb_mode, project=c.wandb_project, name=c.name, config=dataclasses.asdict(c))
        tracker.log(record)
        tracker.close()
        show(record)
        missed += not record["passed"]
    return 1 if missed else 0


def _gradcheck(args: argparse.Namespace) -> int:
    from logitless.lab.bench import gradcheck

    def show(record: dict[str, Any]) -> None:
        bench_command.show_gates(record, numbers=True)

    return _over_configs("gradcheck", args, gradcheck.GradcheckConfig, gradcheck.run, show, gradcheck.stages)


def _bench(args: argparse.Namespace) -> int:
    return bench_command.run(args, _over_configs)


def _report(args: argparse.Namespace) -> int:
    from logitless.lab.bench import report

    if lacks := report.missing():
        print(f"logitless report: {lacks}", file=sys.stderr)
        return 2
    out = args.out or report.default_out(args.runs)
    left: list[Path] = []
    exits.check_file(out)
    try:
        charts = report.write(args.runs, out, plots=args.plots, left=left)
    except report.ReportError as error:
        print(f"logitless report: {error}", file=sys.stderr)
        return 2
    print(f"{out}: {charts} charts" + (f"; images in {args.plots}" if args.plots else ""))
    if left:
        print(f"left out, since they are no results of these commands: {', '.join(map(str, left))}")
    return 0


def _configs(_: argparse.Namespace) -> int:
    print(shipped_configs.listing())
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command."""
    exits.open_streams()
    args = parse(argv)
    if args.command is None:
        parser().print_help()
        return 0
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "demo": _demo,
        "gradcheck": _gradcheck,
        "bench": _bench,
        "plan": plan_command.run,
        "tpu": tpu_command.run,
        "report": _report,
        "train": train_cli.run_train,
        "ab": train_cli.run_ab,
        "configs": _configs,
    }

    def run() -> int:
        if args.command in ("plan", "tpu") and args.out is not None:
            exits.check_file(args.out)
        if args.command in ("train", "gradcheck", "demo"):
            from logitless.lab.tools import compiled

            compiled.keep()
        return commands[args.command](args)

    return exits.run(args.command, run)
