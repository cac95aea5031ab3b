"""The sharded loss compiled for TPU slices, without a TPU: benchmarks/results/tpu_sharded.json.

    python benchmarks/tpu_sharded.py                 (about 20 minutes on two cores; needs libtpu)
    python benchmarks/tpu_sharded.py v6e:2x4         (one slice)
    python benchmarks/tpu_sharded.py --forms fused v6e:2x4   (some of its programs; the others are kept)

Loss, dH and dW of a token-level objective at 8192 tokens per chip, H = 4096, V = 151936, bfloat16, by the Pallas
kernels under ``sharding=``, and by dense losses that GSPMD partitions: the strong form (a custom_vjp that keeps the
logits) and the naive one (log_softmax and a gather). Peak HBM of a chip is the compiler's own figure. Collectives are
counted with the trips of the loops around them, in the dtype that is summed. Each program is compiled in a process of
its own, and has the versions that compiled it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from logitless import Objective, Sharding, linear_grpo_loss
from logitless.core.options import Options
from logitless.lab.tools import baselines
from logitless.lab.tpu import aot
from logitless.lab.tpu.hlo_collectives import collectives_of

HERE = Path(__file__).resolve()
RESULT = HERE.parent / "results" / "tpu_sharded.json"
TOKENS, HIDDEN, VOCAB = 8192, 4096, 151936
FORMS = ("fused", "fused, dW summed in bfloat16", "dense, strong", "dense, naive")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Mesh axes, and the specs of tokens [B, T] and lm_head [V, H]."""

    axes: dict[str, int]
    tokens: P
    head: P


def layouts(chips: int) -> dict[str, Layout]:
    """The layouts of a slice; a large one has FSDP groups of 16 chips and vocabulary-parallel groups of 8."""
    fsdp, tensor = min(chips, 16), min(chips, 8)
    return {
        "data": Layout({"data": chips}, P("data"), P()),
        "fsdp": Layout({"data": chips // fsdp, "fsdp": fsdp}, P(("data", "fsdp")), P("fsdp", None)),
        "tensor": Layout({"data": chips // tensor, "tensor": tensor}, P("data"), P("tensor", None)),
    }


SLICES = {"v6e:2x4": 8, "v6e:16x16": 256, "v5p:4x4x4": 64}


def program(form: str, layout: Layout, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """``(value_and_grad, argument shapes)``; a device's tokens are a row of the batch."""
    rows = layout.axes.get("data", 1) * layout.axes.get("fsdp", 1)
    objective = Objective(aggregation="dapo")

    def s(shape: tuple[int, ...], dtype: Any, spec: P) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def loss(h: Any, w: Any, y: Any, advantages: Any, old: Any) -> Any:
        arrays: dict[str, Any] = {"advantages": advantages, "old_logp": old, "objective": objective}
        if form.startswith("dense"):
            return baselines.head_loss(form.split()[-1], h, w, y, logits_dtype="float32", **arrays)
        sums, sparse = "param" if "bfloat16" in form else "float32", "auto" if "sparse" in form else "off"
        sharding = Sharding(mesh, tokens=layout.tokens, head=layout.head)
        return linear_grpo_loss(
            h,
            w,
            y,
            sharding=sharding,
            options=Options(head_grad_dtype=sums, sparse_backward=sparse, backend="pallas_tpu"),
            **arrays,
        )[0]

    token = functools.partial(s, (rows, TOKENS), spec=layout.tokens)
    args = (s((rows, TOKENS, HIDDEN), jnp.bfloat16, layout.tokens), s((VOCAB, HIDDEN), jnp.bfloat16, layout.head))
    return jax.value_and_grad(loss, (0, 1)), (*args, token(jnp.int32), token(jnp.float32), token(jnp.float32))


def compile_one(slice_name: str, layout_name: str, form: str) -> dict[str, Any]:
    """Compile one program and say what came out."""
    layout = layouts(SLICES[slice_name])[layout_name]
    mesh = aot.mesh(slice_name, tuple(layout.axes.values()), tuple(layout.axes))
    f, args = program(form, layout, mesh)
    compiled = aot.compile_for(mesh, f, *args)
    text = compiled.executable.as_text()
    return {
        "peak_bytes": compiled.peak_bytes,
        "argument_bytes": compiled.argument_bytes,
        "output_bytes": compiled.output_bytes,
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "collectives": [c for c in collectives_of(text) if c["bytes"] > 8],
        "seconds": round(compiled.seconds, 1),
        "versions": aot.versions(),
    }


def in_a_process(slice_name: str, layout_name: str, form: str) -> dict[str, Any]:
    environment = dict(os.environ, **aot.ENVIRONMENT)
    command = [sys.executable, str(HERE), "--one", slice_name, layout_name, form]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000, check=False)
    if done.returncode:
        return {"error": done.stderr.strip()[-800:]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    p = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    p.add_argument("slices", nargs="*", help=f"some of {', '.join(SLICES)} (default: all)")
    p.add_argument("--forms", default="", help="programs whose name matches this regular expression")
    p.add_argument("--layouts", default="", help="layouts whose name matches this regular expression")
    p.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.one:
        print("\n" + json.dumps(compile_one(*args.one)))
        return
    for slice_name in args.slices or SLICES:
        # Dense losses of many chips say nothing new: a chip's share is the same.
        forms = [f for f in (FORMS if SLICES[slice_name] == 8 else FORMS[:1]) if re.search(args.forms, f)]
        for form in forms:
            for layout_name, layout in layouts(SLICES[slice_name]).items():
                if not re.search(args.layouts, layout_name):
                    continue
                found = in_a_process(slice_name, layout_name, form)
                print(slice_name, layout_name, form, found, flush=True)
                record = json.loads(RESULT.read_text()) if RESULT.exists() else {}
                record |= {
                    "what": "HBM of a chip by the TPU compiler, ahead of time; nothing was run",
                    "tokens_per_chip": TOKENS,
                    "hidden": HIDDEN,
                    "vocab": VOCAB,
                    "command": "python benchmarks/tpu_sharded.py",
                }
                entry = record.setdefault("slices", {}).setdefault(slice_name, {}).setdefault(layout_name, {})
                entry |= {"axes": layout.axes, form: found}
                RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
