"""The ``logitless`` command. Exit codes: 0 all gates met, 1 a gate missed, 2 bad usage or configuration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
    check = commands.add_parser("gradcheck", help="a backend's loss and gradients against the reference and float64")
    check.add_argument("--config", action="append", default=[], help="YAML file (configs/gradcheck/); may be repeated")
    check.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the configuration")
    bench = commands.add_parser(
        "bench", help="time and memory with and without the kernels, each arm in a fresh process"
    )
    bench.add_argument("--config", action="append", default=[], help="YAML file (configs/bench/); may be repeated")
    bench.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override a key; or: compare A.jsonl B.jsonl (ratios B / A)"
    )
    plan = commands.add_parser("plan", help="memory and FLOPs of a fused head call, before anything runs")
    plan.add_argument("--tokens", type=int, required=True)
    plan.add_argument("--hidden", type=int, required=True)
    plan.add_argument("--vocab", type=int, required=True)
    plan.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    plan.add_argument("--logits-dtype", default="float32", choices=("bfloat16", "float32"))
    plan.add_argument("--head-grad-dtype", default="float32", choices=("float32", "param"))
    plan.add_argument("--live-tokens", type=int, default=None)
    plan.add_argument("--chunk-size", type=int, default=None)
    plan.add_argument("--memory-budget", type=int, default=None, help="bytes of the chunk's buffers")
    plan.add_argument("--frozen-head", action="store_true")
    plan.add_argument("--sequence-level", action="store_true", help="a coupled objective such as GSPO: four matmuls")
    return p


def _demo(args: argparse.Namespace) -> int:
    from logitless import demo

    for name, least in (("tokens", 8), ("hidden", 8), ("vocab", 8), ("seed", 0)):
        if getattr(args, name) < least:
            print(f"logitless demo: --{name} {getattr(args, name)}, expected at least {least}", file=sys.stderr)
            return 2
    return demo.run(tokens=args.tokens, hidden=args.hidden, vocab=args.vocab, seed=args.seed)


def _over_configs(
    command: str, args: argparse.Namespace, schema: type, run: Callable[[Any], dict], show: Callable[[dict], None]
) -> int:
    """Load, run, record and show each configuration; 2 for a bad one, 1 if a record did not pass."""
    import dataclasses

    from logitless.bench import config
    from logitless.bench.tracking import Tracker

    missed = 0
    for path in args.config or [None]:
        try:
            c: Any = config.load(schema, path, args.overrides)
            record = run(c)
        except config.ConfigError as error:
            print(f"logitless {command}: {error}", file=sys.stderr)
            return 2
        tracker = Tracker(c.out, mode=c.wandb_mode, project=c.wandb_project, name=c.name, config=dataclasses.asdict(c))
        tracker.log(record)
        tracker.close()
        show(record)
        missed += not record["passed"]
    return 1 if missed else 0


def _gradcheck(args: argparse.Namespace) -> int:
    from logitless.bench import gradcheck

    return _over_configs("gradcheck", args, gradcheck.GradcheckConfig, gradcheck.run, _print_record)


def _print_record(record: dict[str, Any]) -> None:
    print(f"{record['config/name']}: {record['device']}, jax {record['jax']}")
    for key, value in record.items():
        if isinstance(value, float):
            print(f"  {key:32s} {value:.6g}")
    for key, gate in record["gates"].items():
        print(f"  {'PASS' if gate['ok'] else 'FAIL'} {key:36s} {gate['value']:.3g} (<= {gate['limit']:g})")


def _bench(args: argparse.Namespace) -> int:
    from logitless.bench import config, microbench

    if args.overrides[:1] == ["compare"]:
        try:
            if len(args.overrides) != 3:
                raise config.ConfigError("compare: expected two result files")
            print(microbench.compare(Path(args.overrides[1]), Path(args.overrides[2])))
        except config.ConfigError as error:
            print(f"logitless bench: {error}", file=sys.stderr)
            return 2
        return 0

    def run(c: microbench.BenchConfig) -> dict[str, Any]:
        return microbench.run(c, say=lambda text: print(f"  ... {text}", file=sys.stderr, flush=True))

    def show(record: dict[str, Any]) -> None:
        print(microbench.table(record))
        if not record["passed"]:
            print("  FAIL: the arms disagree, or the kernel did not verify; see the record")

    return _over_configs("bench", args, microbench.BenchConfig, run, show)


def _plan(args: argparse.Namespace) -> int:
    import jax

    from logitless.objectives.objective import Objective
    from logitless.planning.head import plan

    hidden = jax.ShapeDtypeStruct((1, args.tokens, args.hidden), args.dtype)
    lm_head = jax.ShapeDtypeStruct((args.vocab, args.hidden), args.dtype)
    try:
        print(
            plan(
                hidden,
                lm_head,
                objective=Objective(level="sequence" if args.sequence_level else "token"),
                gradients=("hidden",) if args.frozen_head else ("hidden", "lm_head"),
                live_tokens=args.live_tokens,
                logits_dtype=args.logits_dtype,
                head_grad_dtype=args.head_grad_dtype,
                chunk_size=args.chunk_size,
                memory_budget=args.memory_budget,
                head_layout="vh",
            )
        )
    except ValueError as error:
        print(f"logitless plan: {error}", file=sys.stderr)
        return 2
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command."""
    args = parser().parse_args(argv)
    if args.command is None:
        parser().print_help()
        return 0
    commands = {"demo": _demo, "gradcheck": _gradcheck, "bench": _bench, "plan": _plan}
    return commands[args.command](args)
