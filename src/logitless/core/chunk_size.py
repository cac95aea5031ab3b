"""Chunk sizes: a deterministic rule from shapes and the platform, never tuned while tracing.

Every process of a multi-host run computes the same sizes from the same shapes.
"""

from __future__ import annotations

import jax

MIB = 1 << 20

_LOGITS_CHUNK_BYTES = 1 * MIB
"""Float32 logits of a chunk of rows on a CPU: they and two buffers of their size stay in a core's cache."""

_HEAD_CHUNK_BYTES = {"cpu": 32 * MIB, "gpu": 2048 * MIB, "tpu": 1280 * MIB}
"""``[chunk, V]`` logits of the head's sweep. Wide chunks keep an accelerator's matmuls large and touch the float32
accumulator of dW less often."""

_CPU_HEAD_ROWS = 256
"""Rows of a chunk on a CPU, where a third of the head's own bytes holds their logits: every chunk reads the head and
dW once more, so at H=896, V=151936 chunks of 52 rows take a fifth longer than chunks of 256."""

_HEAD_CHUNK_MAX = 2048


def platform() -> str:
    """``cpu``, ``gpu`` or ``tpu``: what a computation is compiled for.

    With an ambient mesh (``jax.set_mesh``) that is the mesh's device, possibly an absent TPU in ahead-of-time
    compilation; without a mesh, JAX's default.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    name = getattr(device, "platform", None) or jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


def round_down(value: int, multiple: int) -> int:
    """The largest multiple of ``multiple`` that is at most ``value``, and at least one multiple."""
    return max(value // multiple, 1) * multiple


def whole_chunks(n: int, chunk: int) -> int:
    """``n`` tokens in whole chunks."""
    return -(-n // chunk) * chunk


def row_chunk(n: int, vocab: int) -> int:
    """Rows per chunk of a logits-level pass in plain JAX: everything at once where XLA fuses the passes."""
    if platform() != "cpu":
        return n
    return min(n, round_down(_LOGITS_CHUNK_BYTES // (4 * vocab), 8))


def head_chunk(
    n: int, vocab: int, *, memory_budget: int | None = None, logits_bytes: int = 4, head_bytes: int = 0
) -> int:
    """Tokens per chunk of the head's sweep; ``memory_budget`` bounds the bytes of its ``[chunk, V]`` buffers. A larger
    one than the rule needs buys no larger chunks: there are better uses for it."""
    fit = min(_HEAD_CHUNK_BYTES[platform()] // (vocab * logits_bytes), _HEAD_CHUNK_MAX)
    if platform() == "cpu":
        fit = max(fit, min(_CPU_HEAD_ROWS, head_bytes // 3 // (vocab * logits_bytes)))
    if memory_budget is not None:
        # logits and rounded dlogits together
        fit = min(fit, memory_budget // (vocab * (logits_bytes + logits_bytes)))
        if memory_budget < vocab * (logits_bytes + logits_bytes):
            raise ValueError(
                f"memory_budget={memory_budget} bytes is less than one token's row of logits and dlogits "
                f"({2 * vocab * logits_bytes} bytes at a vocabulary of {vocab}); give at least that."
            )
    if platform() == "cpu":
        return equal_part(n, min(n, max(fit, 1)))
    multiple = next((m for m in (128, 8) if fit >= m), 1)
    return min(n, round_down(fit, multiple))


def equal_part(n: int, most: int) -> int:
    """The size of the fewest equal parts of at most ``most`` that ``n`` tokens are cut into.

    A padded part costs as much as a full part: 256 tokens in parts of 55 cost 275 tokens, in parts of 52 they cost 260.
    On an accelerator a chunk stays a multiple of its tiles, and the sweep cuts the rest smaller.
    """
    return -(-n // -(-n // most))


def column_tile() -> int | None:
    """Columns that plain-JAX passes over ``[chunk, V]`` take at a time.

    XLA's CPU compiler fuses neither elementwise work into reductions nor a sum into a matmul, so without tiles each
    pass would write ``[chunk, V]`` temporaries, and dW would need a second buffer of its own size. The GPU's and the
    TPU's fuse: there a pass takes all columns at once (``None``).
    """
    return 1024 if platform() == "cpu" else None
