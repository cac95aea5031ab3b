"""Seconds that the sparse program of a Hopper GPU takes to compile, each time in a process of its own.

    python benchmarks/compile_time.py [--against SRC] [--repeats N] [--out FILE]

``value_and_grad(linear_grpo_loss(..., sparse_backward="auto"))`` at T=8192 H=4096 V=151936: traced, lowered (most of
it Mosaic's lowering of the kernels, in Python) and compiled, with jax imported and the device started, and no compiled
program kept from before. ``--against`` is the ``src`` folder of another checkout, which takes turns with this one: the
same program takes a fifth longer on one machine than on the next. Needs a Hopper GPU. The exit code is 1 if the median
is above the bar.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BAR = 15.0
TOKENS, WIDTH, VOCAB, ROWS = 8192, 4096, 151936, 8
PARTS = ("trace", "lower", "compile")


def once() -> dict[str, Any]:
    """In a child: the seconds of each part."""
    import jax
    import jax.numpy as jnp

    import logitless

    shape = jax.ShapeDtypeStruct
    at = (ROWS, TOKENS // ROWS)
    x = shape((*at, WIDTH), "bfloat16"), shape((VOCAB, WIDTH), "bfloat16")
    rest = dict(targets=shape(at, "int32"), mask=shape(at, "bool"), old_logp=shape(at, "float32"))
    rest["advantages"] = shape(at[:1], "float32")

    def loss(x: Any, rest: Any) -> Any:
        how: dict[str, Any] = dict(
            objective=logitless.Objective.dapo(), options=logitless.Options(sparse_backward="auto")
        )
        return logitless.linear_grpo_loss(x[0], logitless.Head(x[1], layout="vh"), **rest, **how)[0]

    jax.block_until_ready(jnp.zeros(1))
    times = [time.monotonic()]
    traced = jax.jit(jax.value_and_grad(loss)).trace(x, rest)
    times.append(time.monotonic())
    lowered = traced.lower()
    times.append(time.monotonic())
    compiled: Any = lowered.compile()
    times.append(time.monotonic())
    seconds = {name: round(b - a, 2) for name, a, b in zip(PARTS, times, times[1:], strict=False)}
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return dict(device=jax.devices()[0].device_kind, jax=jax.__version__, temporaries=temporaries, **seconds)


def measured(source: Path) -> dict[str, Any]:
    """What a child with the library of ``source`` says."""
    path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(Path(__file__).resolve()), "--child"]
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(command, env={**env, "PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"compiling with {source} failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the parts and of their sums."""
    out = {k: round(statistics.median(r[k] for r in runs), 2) for k in PARTS}
    return out | dict(total=round(statistics.median(sum(r[k] for k in PARTS) for r in runs), 2))


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--against", type=Path, help="the src folder of another checkout")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--out", type=Path, default=Path("gpu_sparse_compile.json"))
    args = p.parse_args()
    trees = {"here": ROOT / "src"} | ({} if args.against is None else {"against": args.against.resolve()})
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for _ in range(args.repeats):
        for name, source in trees.items():
            runs[name].append(measured(source))
            print(name, runs[name][-1], flush=True)
            record = dict(
                kind="compile_time",
                what=f"sparse program, T={TOKENS} H={WIDTH} V={VOCAB}, seconds in a process of its own",
                cpus=os.cpu_count(),
                bar=BAR,
                median={k: summary(v) for k, v in runs.items() if v},
                runs=runs,
            )
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(summary(runs["here"])["total"] > BAR)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(once()))
    else:
        raise SystemExit(main())
