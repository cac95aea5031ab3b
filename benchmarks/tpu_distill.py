"""Memory of distillation losses on a v6e, by libtpu, without a TPU.

    python benchmarks/tpu_distill.py        (ten minutes on two cores)

Compiles the reverse KL (loss, dH and dW) at T=8192, H=4096 for both models and V=151936 in bfloat16: by ``chunked``,
which serves calls with a teacher on TPUs, at several chunk sizes, and by dense JAX. The record has the compiler's peak,
what it takes beside inputs and outputs, the largest array with a vocabulary in it, and the roofline's time: matmuls of
all chunks over 918 TFLOP/s, or their reads of both heads and the updates of dW over 1.64 TB/s.
"""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp

import harness
from logitless.lab.bench import arm_program
from logitless.lab.bench.case import Arm
from logitless.lab.tpu import aot

T, H, V = 8192, 4096, 151936
FLOPS, BYTES = 918e12, 1.64e12
CHUNKS = (None, 1024, 512, 256, 128)
STATES, HEAD = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, T, H), (V, H)))
REST = dict(mask=jax.ShapeDtypeStruct((1, T), bool), teacher_hidden=STATES, teacher_lm_head=HEAD)
ARRAYS = (STATES, HEAD), REST


def widest(text: str) -> int:
    """Most rows of an array in the program whose other dimension is the vocabulary, heads and dW left out."""
    shapes = (tuple(map(int, s.split(","))) for s in set(re.findall(r"(?:f32|bf16)\[([\d,]+)\]", text)))
    rows = [math.prod(s) // V for s in shapes if V in s and math.prod(s) // V != H]
    return max(rows, default=0)


def roofline_ms(chunk: int) -> float:
    """Of four matmuls a token: each chunk reads the student's head twice, the teacher's once, and updates dW."""
    chunks = T // chunk
    moved = chunks * (3 + 2) * 2 * V * H + 4 * 2 * T * H
    return 1e3 * max(8 * T * H * V / FLOPS, moved / BYTES)


def compiled(arm: Arm) -> dict[str, Any]:
    """Loss and gradients of an arm of a benchmark."""
    program = arm_program.program(dict(level="head", distillation=dict(divergence="reverse_kl")), arm)
    found = aot.compile_for("v6e:2x2", program, *ARRAYS)
    beside = found.peak_bytes - found.argument_bytes - found.output_bytes
    return found.record() | dict(beside_bytes=beside, rows_of_logits=widest(found.text))


def main() -> None:
    record: dict[str, Any] = dict(
        what="reverse KL from hidden states, loss with dH and dW, T=8192 H=4096 V=151936 bfloat16, compiled for v6e",
        command="python benchmarks/tpu_distill.py", versions=aot.versions(), programs={},
    )  # fmt: skip
    for chunk in CHUNKS:
        arm = Arm("library", options=dict(head_grad_dtype="param", chunk_size=chunk))
        record["programs"][f"chunked, {chunk or 'default'}"] = found = compiled(arm)
        tokens = chunk or found["rows_of_logits"]
        found |= dict(chunk=tokens, roofline_ms=round(roofline_ms(tokens), 1))
        harness.say(found)
    for dtype in ("bfloat16", "float32"):
        record["programs"][f"dense, {dtype}"] = compiled(Arm("baseline", "strong", logits_dtype=dtype))
    harness.write("tpu_distill.json", record)


if __name__ == "__main__":
    main()
