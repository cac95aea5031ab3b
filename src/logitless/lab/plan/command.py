"""``logitless plan``: bytes, FLOPs, tiles and a roofline time of a fused head call, on one chip or on a mesh."""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path
from typing import Any

import jax

from logitless.lab.plan.chips import CHIPS
from logitless.lab.plan.head import longest_context, plan
from logitless.lab.plan.mesh import parse_mesh, plan_mesh
from logitless.lab.plan.sparse import CALIBRATED
from logitless.lab.tools import result_files
from logitless.lab.tools.shapes import MODELS
from logitless.objectives.objective import Objective


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The command's grammar."""
    p.add_argument("--model", help=f"hidden size and vocabulary by name: {', '.join(MODELS)}")
    p.add_argument("--hidden", type=int, help="hidden size, in place of --model")
    p.add_argument("--vocab", type=int, help="vocabulary size, in place of --model")
    p.add_argument("--tokens", type=int, default=8192, help="tokens of the step, all chips together (default 8192)")
    p.add_argument("--live-tokens", type=int, default=None, help="how many of them are not masked (default: all)")
    p.add_argument("--chip", help=f"plan for this chip and give a roofline time: {', '.join(CHIPS)}")
    p.add_argument("--mesh", help="data=8,fsdp=4,tensor=2: bytes, FLOPs and collectives of each chip; needs --chip")
    p.add_argument("--reserve-gb", type=float, default=0.0, help="memory of weights, optimiser state and activations")
    p.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    p.add_argument("--logits-dtype", default="float32", choices=("bfloat16", "float32"))
    p.add_argument("--head-grad-dtype", default="float32", choices=("float32", "param"))
    p.add_argument("--chunk-size", type=int, default=None)
    p.add_argument("--memory-budget", type=int, default=None, help="bytes of the chunk's buffers")
    p.add_argument("--backend", default=None, help="reference, chunked, mosaic_gpu or pallas_tpu (default: the best)")
    p.add_argument("--frozen-head", action="store_true", help="no gradient of the head itself; LoRA's has one")
    p.add_argument("--lora-rank", type=int, default=None, help="the rank of LoRA on the head (default: none)")
    p.add_argument("--sequence-level", action="store_true", help="a coupled objective such as GSPO")
    p.add_argument("--entropy-bonus", action="store_true", help="an objective with a gradient of the entropy")
    p.add_argument("--sparse-backward", default="off", help="off, auto, or the mass that a row may leave out")
    p.add_argument("--active-columns", type=float, default=None, help=_share_help("columns", CALIBRATED.active_columns))
    p.add_argument("--hard-rows", type=float, default=None, help=_share_help("rows", CALIBRATED.hard_rows))
    p.add_argument("--out", type=Path, default=None, help="append the plan to this file as a JSON line")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="any of these options: sparse_backward=auto")


def _share_help(what: str, default: float) -> str:
    return f"share of such {what} to assume of the policy, as the metric of this name has it (default {default:g})"


def _with_overrides(args: argparse.Namespace) -> argparse.Namespace:
    """Each ``key=value`` as the option of that name."""
    options = argparse.ArgumentParser(prog="logitless plan", exit_on_error=False)
    add_arguments(options)
    known = {k: isinstance(v, bool) for k, v in vars(options.parse_args([])).items() if k != "overrides"}
    for text in args.overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{text!r} is no option; expected --name value, or key=value")
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            raise ValueError(f"{key} is not known{f'; did you mean {close[0]}?' if close else ''}")
        if known[key]:
            if value not in ("true", "false"):
                raise ValueError(f"{text}, expected {key}=true or {key}=false")
            setattr(args, key, value == "true")
            continue
        try:
            options.parse_args([f"--{key.replace('_', '-')}={value}"], namespace=args)
        except argparse.ArgumentError as error:
            raise ValueError(f"{text}: {error.message}") from None
    return args


def _sparse_backward(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text  # off or auto; anything else is refused by name where the call would refuse it


def _shape(args: argparse.Namespace) -> tuple[int, int]:
    if args.model is not None:
        if args.hidden is not None or args.vocab is not None:
            raise ValueError("give --model, or --hidden and --vocab, not both")
        if args.model not in MODELS:
            raise ValueError(f"--model {args.model!r} is not known; expected one of {', '.join(MODELS)}")
        return MODELS[args.model].hidden, MODELS[args.model].vocab
    if args.hidden is None or args.vocab is None:
        raise ValueError("give --model, or --hidden and --vocab")
    return args.hidden, args.vocab


def _here() -> str:
    """What a plan without ``--chip`` is for."""
    device = jax.devices()[0]
    kind = "CPU" if device.platform == "cpu" else device.device_kind
    return f"For this machine's {kind}, with no roofline time; --chip NAME plans for another: {', '.join(CHIPS)}"


def _record(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """``(what to print, what to write)``."""
    width, vocab = _shape(args)
    for name, value in (("--hidden", width), ("--vocab", vocab), ("--tokens", args.tokens)):
        if value < 1:
            raise ValueError(f"{name} {value}, expected at least 1")
    if not 0 <= args.reserve_gb < float("inf"):
        raise ValueError(f"--reserve-gb {args.reserve_gb:g}, expected at least 0, and finite")
    if args.chip is None and (args.mesh is not None or args.reserve_gb):
        raise ValueError("--mesh and --reserve-gb need --chip")
    options: dict[str, Any] = dict(
        objective=Objective(
            level="sequence" if args.sequence_level else "token", entropy_coef=0.01 if args.entropy_bonus else None
        ),
        gradients=("hidden",) + ("lm_head",) * (not args.frozen_head) + ("lora",) * (args.lora_rank is not None),
        lora_rank=args.lora_rank,
        logits_dtype=args.logits_dtype,
        head_grad_dtype=args.head_grad_dtype,
        chunk_size=args.chunk_size,
        memory_budget=args.memory_budget,
        backend=args.backend,
        sparse_backward=_sparse_backward(args.sparse_backward),
        active_columns=args.active_columns,
        hard_rows=args.hard_rows,
    )
    config = {
        k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in ("command", "overrides")
    }
    record: dict[str, Any] = dict(kind="plan", config=dict(config, hidden=width, vocab=vocab))
    if args.mesh is not None:
        mesh = plan_mesh(
            width, vocab, args.tokens, parse_mesh(args.mesh), chip=args.chip, dtype=args.dtype,
            live_tokens=args.live_tokens, **options,
        )  # fmt: skip
        return str(mesh), dict(record, mesh=mesh.record())
    lm_head = jax.ShapeDtypeStruct((vocab, width), args.dtype)

    def at(tokens: int, live: int | None = None) -> Any:
        hidden = jax.ShapeDtypeStruct((1, tokens, width), args.dtype)
        return plan(hidden, lm_head, live_tokens=live, head_layout="vh", chip=args.chip, **options)

    one = at(args.tokens, args.live_tokens)
    text = str(one) if args.chip is not None else f"{_here()}\n{one}"
    record["plan"] = one.record()
    if args.chip is not None:
        fused, dense = longest_context(
            width, vocab, chip=args.chip, dtype=args.dtype, reserved=args.reserve_gb * 1e9, **options
        )
        left = f" beside {args.reserve_gb:g} GB" if args.reserve_gb else " if nothing else is there"
        text += f"\n  longest context that fits{left}: {fused:,} tokens, dense {dense:,}"
        record["longest_context"] = dict(fused=fused, dense=dense, reserved_gb=args.reserve_gb)
    lengths = [1 << k for k in range(12, 18)]
    record["contexts"] = [dict(tokens=n, peak=p.peak, dense_peak=p.dense_peak) for n in lengths for p in [at(n)]]
    return text, record


def run(args: argparse.Namespace) -> int:
    """Print the plan; 2 where it cannot be made."""
    try:
        text, record = _record(_with_overrides(args))
    except (ValueError, NotImplementedError) as error:
        print(f"logitless plan: {error}", file=sys.stderr)
        return 2
    print(text)
    if args.out is not None:
        result_files.append(args.out, record)
    return 0
