"""What the Hopper head kernel takes, and why it does not take the rest; how many tokens a slab meets."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from logitless.core.compat import mosaic_gpu_reason

TILE_K = 64  # 128 bytes of a 16-bit row: one swizzle atom
_DTYPES = ("bfloat16", "float16")
_LANES = 128


def visit_of(p: Any) -> int:
    """Tokens that a slab meets at a time: no logits of a whole chunk stand in memory here, so it may be several. All of
    them, rounded up to multiples of 8 as tiled copies need, or equal parts in multiples of 128."""
    most = 4 * p.call.chunk
    if p.n <= most:
        return -(-int(p.n) // 8) * 8
    equal = -(-p.n // -(-p.n // most))
    return min(-(-equal // _LANES) * _LANES, most)


def check(p: Any, platform: str = "gpu") -> None:
    """Raise ``NotImplementedError`` with the reason where this kernel cannot run (arrays or shapes)."""
    (n, h), v, layout, interpret = p.h.shape, p.head.vocab, p.head.layout, p.call.interpret
    dtype, head_dtype = p.h.dtype, p.head.weight.dtype
    names = jnp.dtype(dtype).name, jnp.dtype(head_dtype).name
    why = mosaic_gpu_reason()
    if why is not None:
        raise NotImplementedError(f"mosaic_gpu: {why}")
    if platform not in ("gpu", "cuda") and not interpret:
        raise NotImplementedError(f"mosaic_gpu: it runs on a Hopper GPU, not on {platform}")
    if names[0] not in _DTYPES or names[0] != names[1]:
        raise NotImplementedError(
            f"mosaic_gpu: hidden states are {names[0]} and the head is {names[1]}; the fused matmul takes "
            f"{' or '.join(_DTYPES)}, the same for both"
        )
    if n < 1 or h < 1 or v < 1:
        raise NotImplementedError(f"mosaic_gpu: hidden [{n}, {h}] and a vocabulary of {v}: something is empty")
    if h % 8:
        raise NotImplementedError(f"mosaic_gpu: the hidden size is {h}, and copies need a multiple of 8 (16 bytes)")
    if layout == "hv" and v % TILE_K:
        raise NotImplementedError(
            f"mosaic_gpu: V = {v} is not a multiple of {TILE_K}, which a head [H, V] needs and a head [V, H] does not"
        )
