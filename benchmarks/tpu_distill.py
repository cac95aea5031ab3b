"""Memory of distillation losses on a v6e, by libtpu, without a TPU.

    python benchmarks/tpu_distill.py        (ten minutes on two cores)

Compiles the reverse KL (loss, dH and dW) at T=8192, H=4096 for both models and V=151936 in bfloat16: over slabs of
columns, which serve it on TPUs, with and without a mask; over chunks of whole rows (``chunk_size=``); by dense JAX. The
record has the compiler's peak, what it takes beside inputs and outputs, the most rows of an array with a vocabulary in
it, the roofline's time of whole rows (matmuls of all chunks over 918 TFLOP/s, or their reads of both heads and the
updates of dW over 1.64 TB/s), and an estimate: the compiler's own cycles of every operation at 1.75 GHz, those in a
loop as often as it turns. Never a measurement.
"""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp

import harness
import logitless as L
from logitless.head import column_slabs
from logitless.lab.bench import arm_program
from logitless.lab.bench.case import Arm
from logitless.lab.tpu import aot

T, H, V = 8192, 4096, 151936
FLOPS, BYTES = 918e12, 1.64e12
CLOCK = 1.75e9
CHUNKS = (1024, 512, 256, 128)
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


def estimated_ms(text: str, turns: int) -> float:
    """The compiler's cycles: once those of the program's own operations, ``turns`` times those of its loops' bodies."""
    cycles, entry = {True: 0, False: 0}, False
    for line in text.splitlines():
        begun = re.match(r"(ENTRY )?%?[\w.\-]+ .*\{$", line)
        entry = begun.group(1) is not None if begun else entry
        found = re.search(r'"estimated_cycles":"(\d+)"', line)
        if found and int(found.group(1)) < 2**62:  # else not known
            cycles[entry] += int(found.group(1))
    return round(1e3 * (cycles[True] + turns * cycles[False]) / CLOCK, 1)


def compiled(program: Any, turns: int | None, arrays: tuple[Any, Any] = ARRAYS) -> dict[str, Any]:
    """Memory of a program; its time if its loops turn ``turns`` times."""
    found = aot.compile_for("v6e:2x2", program, *arrays)
    beside = found.peak_bytes - found.argument_bytes - found.output_bytes
    record = found.record() | dict(beside_bytes=beside, rows_of_logits=widest(found.text))
    return record if turns is None else record | dict(estimated_ms=estimated_ms(found.text, turns))


def of_arm(arm: Arm) -> Any:
    """Loss and gradients of an arm of a benchmark."""
    return arm_program.program(dict(level="head", distillation=dict(divergence="reverse_kl")), arm)


def all_live(chunk: int | None, turns: int) -> dict[str, Any]:
    """Ours without a mask: every loop turns ``turns`` times."""

    def ours(h: Any, w: Any, rest: Any) -> Any:
        options = L.Options(chunk_size=chunk, head_grad_dtype="param")
        heads = L.Head(w, layout="vh"), L.Head(rest["teacher_lm_head"], layout="vh")
        return L.linear_distillation_loss(h, heads[0], rest["teacher_hidden"], heads[1], options=options)[0]

    rest = {k: v for k, v in REST.items() if k != "mask"}
    return compiled(jax.value_and_grad(lambda pair, rest: ours(*pair, rest)), turns, ((STATES, HEAD), rest))


def slabs() -> dict[str, Any]:
    """All tokens at once, so that a loop turns once a slab."""
    return all_live(None, V // column_slabs.COLUMNS)


def main() -> None:
    record: dict[str, Any] = dict(
        what="reverse KL from hidden states, loss with dH and dW, T=8192 H=4096 V=151936 bfloat16, compiled for v6e",
        command="python benchmarks/tpu_distill.py", versions=aot.versions(), programs={},
    )  # fmt: skip

    def note(name: str, found: dict[str, Any]) -> None:
        record["programs"][name] = found
        harness.say(name, found)
        harness.write("tpu_distill.json", record)

    note("slabs, default", slabs())
    for chunk in CHUNKS:
        note(
            f"chunked, {chunk}",
            all_live(chunk, T // chunk) | dict(chunk=chunk, roofline_ms=round(roofline_ms(chunk), 1)),
        )
    for dtype in ("bfloat16", "float32"):
        note(f"dense, {dtype}", compiled(of_arm(Arm("baseline", "strong", logits_dtype=dtype)), 0))
    # How often loops over live tokens turn depends on the mask.
    note("slabs, with a mask", compiled(of_arm(Arm("library", options=dict(head_grad_dtype="param"))), None))


if __name__ == "__main__":
    main()
