"""``logitless tpu compile | cycles``: what the real TPU compiler says of a program, on a machine without a TPU."""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from logitless.lab.plan.mesh import parse_mesh
from logitless.lab.tools import child, result_files
from logitless.lab.tools.progress import Progress
from logitless.lab.tools.shapes import MODELS, head_sizes
from logitless.lab.tools.text import wrapped
from logitless.lab.tpu import aot, cycles

MIB = 2**20
MOST_CYCLES = 6e6
"""The simulator takes about 1.5 GB for a million."""


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The command's grammar."""
    ways = p.add_subparsers(dest="tpu_command", metavar="compile | cycles", required=True)
    for name, text in (
        ("compile", "peak HBM, kernels, collectives and compile time, fused and dense"),
        ("cycles", "cycles by the compiler's simulator: an ESTIMATE, for small shapes"),
    ):
        way = ways.add_parser(name, help=text)
        way.add_argument("--topology", default="v6e:2x4", help="such as v6e:2x4, v5e:2x4, v5p:2x2x1 (default v6e:2x4)")
        way.add_argument("--level", choices=("head", "logits"), default="head")
        way.add_argument("--model", help=f"hidden size and vocabulary by name: {', '.join(MODELS)}")
        way.add_argument("--hidden", type=int)
        way.add_argument("--vocab", type=int)
        way.add_argument("--tokens", type=int, default=8192 if name == "compile" else 128)
        way.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
        way.add_argument("--logits-dtype", default="float32", choices=("bfloat16", "float32"))
        way.add_argument("--frozen-head", action="store_true")
        way.add_argument("--out", type=Path, default=None, help="append the result to this file as a JSON line")
        if name == "compile":
            way.add_argument("--mesh", help="data=4,tensor=2: over so many chips of the slice (default: one chip)")
            way.add_argument("--no-dense", action="store_true", help="leave out the dense baseline")
        else:
            way.add_argument("--for-tokens", type=int, default=None, help="extrapolate to so many tokens by the slope")


def _check_slice(topology: str) -> None:
    """Refuse what the compiler would refuse half a minute later."""
    found = re.fullmatch(r"([a-z0-9]+):([1-9]\d*(?:x[1-9]\d*){1,2})", topology)
    if found is None:
        raise ValueError(f"--topology {topology!r}, expected a slice such as v6e:2x4 or v5p:2x2x1")
    if found[1] not in aot.CHIPS:
        raise ValueError(f"--topology {topology!r}: the chip {found[1]!r} is not one of {', '.join(aot.CHIPS)}")
    sides = [int(n) for n in found[2].split("x")]
    if math.prod(sides) > 2 and any(n % 2 for n in sides[:2]):
        raise ValueError(
            f"--topology {topology!r}: hosts have 2x2 chips, so that the first two sides have to be even, as in 2x4"
        )


def _arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The program's arguments."""
    _check_slice(args.topology)
    hidden, vocab = head_sizes(args.model, args.hidden, args.vocab, args.tokens)
    if hidden is None and args.level == "head":
        raise ValueError("give --model, or --hidden and --vocab (--vocab alone with --level logits)")
    if (why := aot.missing()) is not None:
        raise ValueError(why)
    same = {k: getattr(args, k) for k in ("level", "dtype", "logits_dtype", "frozen_head")}
    return dict(same, n=args.tokens, hidden=hidden or 1, vocab=vocab)


def _axes(text: str, topology: str, arguments: dict[str, Any]) -> dict[str, int]:
    """The mesh, checked against the slice and the shape."""
    axes = parse_mesh(text)
    chips, there = math.prod(axes.values()), math.prod(map(int, topology.split(":")[1].split("x")))
    if chips > there:
        raise ValueError(f"--mesh {text} needs {chips} chips, and {topology} has {there}")
    if arguments["n"] % (axes["data"] * axes["fsdp"]):
        raise ValueError(f"--tokens {arguments['n']} do not split over data x fsdp = {axes['data'] * axes['fsdp']}")
    if arguments["vocab"] % (axes["tensor"] * axes["fsdp"]):
        raise ValueError(f"--vocab {arguments['vocab']} does not split over tensor x fsdp in --mesh {text}")
    return axes


def _compile(topology: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """In a separate process: libtpu reads its settings from the environment only at load time."""
    command = ["-m", "logitless.lab.tpu.loss_program", topology, json.dumps(arguments)]
    return child.last_line(command, aot.ENVIRONMENT)


def _show(form: str, row: dict[str, Any]) -> str:
    if "error" in row:
        return f"  {form}: {row['error']}"
    sent: dict[str, list[int]] = {}
    for c in row["collectives"]:
        sent.setdefault(c["kind"], []).extend([c["bytes"]] * c["times"])
    collectives = ", ".join(f"{len(v)} {k} ({sum(v) / MIB:,.1f} MiB)" for k, v in sent.items()) or "none"
    inside = "in the program" if row["logits_in_program"] else "nowhere in the program"
    temporaries = row["peak"] - row["arguments"] - row["outputs"]
    parts = f"arguments {row['arguments'] / MIB:,.0f} + outputs {row['outputs'] / MIB:,.0f} +"
    memory = [f"  {form}: peak {row['peak'] / MIB:,.0f} MiB per chip =", parts, f"temporaries {temporaries / MIB:,.0f}"]
    found = [f"    {row['kernels']} Mosaic kernels,", f"[tokens, vocabulary] arrays {inside},"]
    found += [f"collectives {collectives};", f"compiled in {row['seconds']:.0f} s"]
    return f"{wrapped(memory, 4, ' ')}\n{wrapped(found, 4, ' ')}"


def _run_compile(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    arguments = _arguments(args)
    if args.mesh is not None:
        arguments["axes"] = _axes(args.mesh, args.topology, arguments)
    record: dict[str, Any] = dict(
        kind="tpu_compile", topology=args.topology, config=arguments, versions=aot.versions(), programs={}
    )
    shape = f"{arguments['n']} tokens, hidden {arguments['hidden']}, vocabulary {arguments['vocab']}"
    print(f"{args.topology}, {args.mesh or 'one chip'}, {shape}")
    forms = ("fused",) if args.no_dense else ("fused", "dense")
    with Progress(len(forms)) as progress:
        for form in forms:
            progress.stage(f"compiling the {form} program")
            row = _compile(args.topology, dict(arguments, form=form))
            record["programs"][form] = row
            print(_show(form, row), flush=True)
        progress.at(len(forms))
    fused = record["programs"]["fused"]
    return (1 if "error" in fused else 0), record


def _run_cycles(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    arguments = dict(_arguments(args), form="fused")
    if args.topology.split(":")[0] != cycles.TOPOLOGY.split(":")[0]:
        raise ValueError(f"--topology {args.topology}: clock and bandwidth are known for {cycles.TOPOLOGY} only")
    if args.for_tokens is not None and args.for_tokens < 1:
        raise ValueError(f"--for-tokens {args.for_tokens}, expected at least 1")
    n = arguments["n"]
    few, many = n, 2 * n
    matmuls = 0 if args.level == "logits" else 4
    guess = 2 * matmuls * many * arguments["hidden"] * arguments["vocab"] / 918e12 * cycles.CLOCK_HZ
    guess += many * arguments["vocab"] / 128 * (0.7 if args.level == "logits" else 0.0)
    if guess > MOST_CYCLES:
        raise ValueError(
            f"{many} tokens of this shape are about {guess / 1e6:.0f} million cycles, and the simulator takes 1.5 GB "
            f"for each million: at most {MOST_CYCLES / 1e6:.0f}. Give fewer --tokens or a smaller --vocab."
        )
    record: dict[str, Any] = dict(
        kind="tpu_cycles",
        what="ESTIMATE by the compiler's cycle simulator, not a measurement",
        topology=args.topology,
        config=arguments,
        versions=aot.versions(),
    )
    found = {}
    with Progress(2) as progress:
        for rows in (few, many):
            progress.stage(f"simulating {rows} tokens")
            try:
                found[rows] = cycles.simulate(
                    "logitless.lab.tpu.loss_program:program", dict(arguments, n=rows), args.topology
                )
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"logitless tpu: {error}", file=sys.stderr)
                return 1, dict(record, error=str(error))
    slope = (sum(found[many].values()) - sum(found[few].values())) / (many - few)
    tokens = args.for_tokens or many
    total = sum(found[many].values()) + slope * (tokens - many)
    item = 2 if args.dtype == "bfloat16" else 4
    moved = 2 * tokens * arguments["vocab"] * item if args.level == "logits" else 0
    estimate = cycles.seconds(total, moved)
    record.update(operations=found[many], cycles_per_token=slope, tokens=tokens, estimated_ms=estimate * 1e3)
    print(f"ESTIMATE (simulated by the compiler, not measured), {args.topology}, {many} tokens:")
    for name, count in sorted(found[many].items(), key=lambda kv: -kv[1])[:8]:
        print(f"  {count:12,d} cycles  {name}")
    print(f"  {slope:,.0f} cycles for each further token; {tokens} tokens: {estimate * 1e3:.3f} ms")
    return 0, record


def run(args: argparse.Namespace) -> int:
    """0 done, 1 the compiler refused the program, 2 bad usage or no compiler."""
    try:
        code, record = _run_compile(args) if args.tpu_command == "compile" else _run_cycles(args)
    except ValueError as error:  # for the person who asked
        print(f"logitless tpu: {error}", file=sys.stderr)
        return 2
    if args.out is not None:
        result_files.append(args.out, record)
    return code
