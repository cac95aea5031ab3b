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
import itertools
import json
import re
from pathlib import Path
from typing import Any

import harness
from logitless.lab.plan.mesh import AXES
from logitless.lab.tools import child
from logitless.lab.tpu import aot, loss_program

HERE = Path(__file__).resolve()
RESULT = "tpu_sharded.json"
TOKENS, HIDDEN, VOCAB = 8192, 4096, 151936
FORMS: dict[str, dict[str, Any]] = {
    "fused": dict(form="fused", backend="pallas_tpu"),
    "fused, dW summed in bfloat16": dict(form="fused", backend="pallas_tpu", head_grad_dtype="param"),
    "fused, sparse": dict(form="fused", backend="pallas_tpu", sparse_backward="auto"),
    "dense, strong": dict(form="dense"),
    "dense, naive": dict(form="naive"),
}
SLICES = {"v6e:2x4": 8, "v6e:16x16": 256, "v5p:4x4x4": 64}


def layouts(chips: int) -> dict[str, dict[str, int]]:
    """Mesh axes by layout; a large slice has FSDP groups of 16 chips and vocabulary-parallel groups of 8."""
    fsdp, tensor = min(chips, 16), min(chips, 8)
    return {
        "data": {"data": chips},
        "fsdp": {"data": chips // fsdp, "fsdp": fsdp},
        "tensor": {"data": chips // tensor, "tensor": tensor},
    }


def compile_one(slice_name: str, layout: str, form: str) -> dict[str, Any]:
    """Compile one program; a device's tokens are a row of the batch."""
    axes = dict.fromkeys(AXES, 1) | layouts(SLICES[slice_name])[layout]
    mesh = aot.mesh(slice_name, tuple(axes.values()), AXES)
    tokens = TOKENS * axes["data"] * axes["fsdp"]
    f, args = loss_program.program(level="head", n=tokens, hidden=HIDDEN, vocab=VOCAB, mesh=mesh, **FORMS[form])
    compiled = aot.compile_for(mesh, f, *args)
    sent = [c for c in loss_program.collectives_of(compiled.text) if c["bytes"] > 8]
    return {**compiled.record(), "collectives": sent, "versions": aot.versions()}


def main() -> None:
    p = harness.options(str(__doc__).splitlines()[0], forms="")
    p.add_argument(
        "slices", nargs="*", help=f"some of {', '.join(SLICES)} (default: all); the rest of the record stays"
    )
    p.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.one:
        print("\n" + json.dumps(compile_one(*args.one)))
        return
    for name in args.slices or SLICES:
        # Dense losses of many chips say nothing new: a chip's share is the same.
        forms = [form for form in (FORMS if SLICES[name] == 8 else ["fused"]) if re.search(args.forms, form)]
        for form, (layout, axes) in itertools.product(forms, layouts(SLICES[name]).items()):
            found = child.last_line([str(HERE), "--one", name, layout, form], aot.ENVIRONMENT, 3000)
            harness.say(name, layout, form, found)
            record = harness.read(RESULT) | {
                "what": "HBM of a chip by the TPU compiler, ahead of time; nothing was run",
                "tokens_per_chip": TOKENS, "hidden": HIDDEN, "vocab": VOCAB,
                "command": "python benchmarks/tpu_sharded.py",
            }  # fmt: skip
            entry = record.setdefault("slices", {}).setdefault(name, {}).setdefault(layout, {})
            entry |= {"axes": axes, form: found}
            harness.write(RESULT, record)


if __name__ == "__main__":
    main()
