"""Memory of distillation losses on a v6e, by libtpu, without a TPU.

    python benchmarks/tpu_distill.py        (ten minutes on two cores)

Compiles the reverse KL (loss, dH and dW) at T=8192, H=4096 for both models and V=151936 in bfloat16: by ``chunked``,
which serves calls with a teacher on TPUs, at several chunk sizes, and by dense JAX. The record has the compiler's peak,
what it takes beside inputs and outputs, the largest array with a vocabulary in it, and the roofline's time: matmuls of
all chunks over 918 TFLOP/s, or their reads of both heads and the updates of dW over 1.64 TB/s.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp

import harness
import logitless as L
from logitless.lab.tools import dense_divergence
from logitless.lab.tpu import aot

T, H, V = 8192, 4096, 151936
FLOPS, BYTES = 918e12, 1.64e12
CHUNKS = (None, 1024, 512, 256, 128)
ARRAYS = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, T, H), (V, H), (1, T, H), (V, H))]


def ours(chunk: int | None, h: Any, w: Any, th: Any, tw: Any) -> Any:
    options = L.Options(chunk_size=chunk, head_grad_dtype="param")
    head, teacher = L.Head(w, layout="vh"), L.Head(tw, layout="vh")
    return L.linear_distillation_loss(h, head, th, teacher, options=options)[0]


def dense(dtype: str, h: Any, w: Any, th: Any, tw: Any) -> Any:
    mask = jnp.ones(h.shape[:-1], bool)
    settings = L.Distillation()
    return dense_divergence.loss("strong", h, w, th, tw, mask, distillation=settings, logits_dtype=dtype)


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


def compiled(f: Any) -> dict[str, Any]:
    found = aot.compile_for("v6e:2x2", jax.value_and_grad(f, (0, 1)), *ARRAYS)
    beside = found.peak_bytes - found.argument_bytes - found.output_bytes
    return found.record() | dict(beside_bytes=beside, rows_of_logits=widest(found.text))


def main() -> None:
    record: dict[str, Any] = dict(
        what="reverse KL from hidden states, loss with dH and dW, T=8192 H=4096 V=151936 bfloat16, compiled for v6e",
        command="python benchmarks/tpu_distill.py", versions=aot.versions(), programs={},
    )  # fmt: skip
    for chunk in CHUNKS:
        record["programs"][f"chunked, {chunk or 'default'}"] = found = compiled(functools.partial(ours, chunk))
        tokens = chunk or found["rows_of_logits"]
        found |= dict(chunk=tokens, roofline_ms=round(roofline_ms(tokens), 1))
        harness.say(found)
    for dtype in ("bfloat16", "float32"):
        record["programs"][f"dense, {dtype}"] = compiled(functools.partial(dense, dtype))
    harness.write("tpu_distill.json", record)


if __name__ == "__main__":
    main()
