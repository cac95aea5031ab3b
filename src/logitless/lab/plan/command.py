"""``logitless plan``: memory, FLOPs, tiles and a roofline time of a fused head call, on one chip or on a mesh."""

from __future__ import annotations

import argparse
import difflib
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from logitless.lab.plan.chips import CHIPS, CPU, chip_of
from logitless.lab.plan.estimate import CALIBRATED
from logitless.lab.plan.mesh import AXES, parse_mesh, plan_mesh
from logitless.lab.plan.plan import Plan, longest_context
from logitless.lab.plan.program import devices_for
from logitless.lab.tools import result_files
from logitless.lab.tools.shapes import MODELS, head_sizes
from logitless.lab.tools.text import wrapped
from logitless.objectives.distillation import Distillation
from logitless.objectives.objective import Objective


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The command's grammar."""
    p.add_argument("--model", help=f"hidden size and vocabulary by name: {', '.join(MODELS)}")
    p.add_argument("--hidden", type=int, help="hidden size, in place of --model")
    p.add_argument("--vocab", type=int, help="vocabulary size, in place of --model")
    p.add_argument("--tokens", type=int, default=8192, help="tokens of the step, all chips together (default 8192)")
    p.add_argument("--live-tokens", type=int, default=None, help="how many of them are not masked (default: all)")
    p.add_argument("--chip", help=f"plan for this chip and give a roofline time: {', '.join(CHIPS)} (or cpu)")
    p.add_argument("--mesh", help="data=8,fsdp=4,tensor=2: what each chip of a mesh needs; needs --chip")
    p.add_argument("--reserve-gb", type=float, default=0.0, help="memory of weights, optimiser state and activations")
    p.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    p.add_argument("--logits-dtype", default="float32", choices=("bfloat16", "float32"))
    p.add_argument("--head-grad-dtype", default="float32", choices=("float32", "param"))
    p.add_argument("--chunk-size", type=int, default=None)
    p.add_argument("--memory-budget", type=int, default=None, help="bytes of the chunk's buffers")
    p.add_argument("--backend", default=None, help="reference, chunked, mosaic_gpu or pallas_tpu (default: the best)")
    p.add_argument("--frozen-head", action="store_true", help="no gradient of the head itself; LoRA's has one")
    p.add_argument("--lora-rank", type=int, default=None, help="the rank of LoRA on the head (default: none)")
    p.add_argument("--teacher", type=int, help="hidden size of a teacher: a distillation loss in place of GRPO's")
    p.add_argument("--divergence", help="of the distillation loss: reverse_kl (the default), forward_kl or jsd")
    p.add_argument("--sequence-level", action="store_true", help="a coupled objective such as GSPO")
    p.add_argument("--entropy-bonus", action="store_true", help="an objective with a gradient of the entropy")
    p.add_argument("--sparse-backward", default="off", help="off, auto, or the mass that a row may leave out")
    p.add_argument("--active-columns", type=float, default=None, help=_share_help("columns", CALIBRATED.active_columns))
    p.add_argument("--hard-rows", type=float, default=None, help=_share_help("rows", CALIBRATED.hard_rows))
    p.add_argument("--no-compile", action="store_true", help="the estimate alone, at once")
    p.add_argument("--out", type=Path, default=None, help="append the plan to this file as a JSON line")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="any of these options: sparse_backward=auto")


def _share_help(what: str, default: float) -> str:
    return f"share of such {what} to assume of the policy, as the metric of this name has it (default {default:g})"


def _with_overrides(args: argparse.Namespace) -> argparse.Namespace:
    """Each ``key=value`` as the option of that name."""
    parser = argparse.ArgumentParser(prog="logitless plan", exit_on_error=False)
    add_arguments(parser)
    defaults = vars(parser.parse_args([]))
    for text in args.overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{text!r} is no option; expected --name value, or key=value")
        if key not in defaults or key == "overrides":
            close = difflib.get_close_matches(key, defaults, n=1)
            raise ValueError(f"{key} is not known{f'; did you mean {close[0]}?' if close else ''}")
        switch = isinstance(defaults[key], bool)
        if switch and value not in ("true", "false"):
            raise ValueError(f"{text}, expected {key}=true or {key}=false")
        option = f"--{key.replace('_', '-')}"
        try:
            parser.parse_args([option] * (value == "true") if switch else [f"{option}={value}"], namespace=args)
        except argparse.ArgumentError as error:
            raise ValueError(f"{text}: {error.message}") from None
    return args


def _sparse_backward(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text  # off or auto; anything else is refused by name where the call would refuse it


def _here() -> str:
    """What a plan without ``--chip`` is for."""
    device = jax.devices()[0]
    kind = "CPU" if device.platform == "cpu" else device.device_kind
    return f"For this machine's {kind}, with no roofline time. --chip NAME plans for another:\n{', '.join(CHIPS)}"


def _loss(args: argparse.Namespace) -> dict[str, Any]:
    """The loss that is planned, as arguments of :func:`plan`."""
    if args.teacher is None:
        if args.divergence is not None:
            raise ValueError("--divergence is from a teacher; give --teacher, the hidden size of one")
        entropy = 0.01 if args.entropy_bonus else None
        return dict(objective=Objective(level="sequence" if args.sequence_level else "token", entropy_coef=entropy))
    if args.sequence_level or args.entropy_bonus:
        raise ValueError("--sequence-level and --entropy-bonus are GRPO's, and --teacher means a distillation loss")
    return dict(teacher=args.teacher, distillation=Distillation(divergence=args.divergence or "reverse_kl"))


def _asked(args: argparse.Namespace) -> tuple[Callable[..., Plan], dict[str, Any]]:
    """The plan for a number of tokens with these options, and labels for the output."""
    width, vocab = head_sizes(args.model, args.hidden, args.vocab, args.tokens)
    if width is None:
        raise ValueError("give --model, or --hidden and --vocab")
    if not 0 <= args.reserve_gb < float("inf"):
        raise ValueError(f"--reserve-gb {args.reserve_gb:g}, expected at least 0, and finite")
    chip = CPU if args.chip is None else chip_of(args.chip)
    if chip is CPU and (args.mesh is not None or args.reserve_gb):
        raise ValueError("--mesh and --reserve-gb need --chip, of an accelerator")
    same = ("chip", "dtype", "lora_rank", "logits_dtype", "head_grad_dtype", "chunk_size", "memory_budget", "backend",
            "active_columns", "hard_rows")  # fmt: skip
    options: dict[str, Any] = {k: getattr(args, k) for k in same} | dict(
        _loss(args),
        gradients=("hidden",) + ("lm_head",) * (not args.frozen_head) + ("lora",) * (args.lora_rank is not None),
        sparse_backward=_sparse_backward(args.sparse_backward),
    )
    left_out = ("command", "overrides", "no_compile")
    config = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in left_out}
    record: dict[str, Any] = dict(kind="plan", config=dict(config, hidden=width, vocab=vocab))
    axes = dict.fromkeys(AXES, 1) if args.mesh is None else parse_mesh(args.mesh)
    at = functools.partial(plan_mesh, width, vocab, axes=axes, **options)
    if args.mesh is None:
        plans = {n: at(tokens=n, compile=False) for n in (1 << k for k in range(12, 18))}
        record["contexts"] = [dict(tokens=n, peak=p.peak, dense_peak=p.dense_peak) for n, p in plans.items()]
        if chip is not CPU:
            fused, dense = longest_context(width, vocab, reserved=args.reserve_gb * 1e9, **options)
            record["longest_context"] = dict(fused=fused, dense=dense, reserved_gb=args.reserve_gb)
    return functools.partial(at, tokens=args.tokens, live_tokens=args.live_tokens), record


def _print(asked: Callable[..., Plan], args: argparse.Namespace, record: dict[str, Any]) -> Plan:
    """The estimate and, where that compiler is at hand, the compiled program's memory, as each is known."""
    found = asked(compile=False)
    print(found if args.chip is not None else f"{_here()}\n{found}")
    if "longest_context" in record:
        tokens = "{fused:,} tokens, dense {dense:,} (estimate)".format(**record["longest_context"])
        left = f"beside {args.reserve_gb:g} GB:" if args.reserve_gb else "if nothing else is there:"
        print(wrapped([f"  longest context that fits {left}", tokens], 4, " "))
    if args.no_compile:
        return found
    _, why = devices_for(found.chip, found.devices)
    if why:
        print(wrapped(["  not compiled:", *why.split()], 4, " "))
        return found
    sys.stdout.flush()
    print("compiling the real program (a CPU's takes seconds, a TPU's up to a minute) ...", file=sys.stderr, flush=True)
    found = asked(compile=None)
    print(found.memory_line())
    return found


def run(args: argparse.Namespace) -> int:
    """Print the plan: 0; 1 where the compiler refuses the program, 2 where the plan cannot be made."""
    try:
        planned, record = _asked(_with_overrides(args))
        found = _print(planned, args, record)
    except (ValueError, NotImplementedError) as error:
        print(f"logitless plan: {error}", file=sys.stderr)
        return 2
    except jax.errors.JaxRuntimeError as error:
        print(
            f"logitless plan: the compiler refuses the program: {str(error).strip().splitlines()[0]}", file=sys.stderr
        )
        return 1
    record["mesh" if args.mesh is not None else "plan"] = found.record()
    if args.out is not None:
        result_files.append(args.out, record)
    return 0
