"""What the Hopper head kernel takes, and why it does not take the rest; how many tokens a slab meets."""

from __future__ import annotations

import jax.numpy as jnp

from logitless.core.compat import mosaic_gpu_reason
from logitless.core.problem import Linear, Problem

TILE_K = 64  # 128 bytes per 16-bit row: a swizzle atom
_DTYPES = ("bfloat16", "float16")
_LANES = 128


def visit_of(p: Problem[Linear]) -> int:
    """Tokens per visit of a slab: about four chunks, since no full chunk of logits is in memory here.

    All tokens rounded up to a multiple of 8, which tiled copies need, or equal parts in multiples of 128: a call is
    filled up to whole visits, and a group of hard rows, in multiples of 8, is never more than these.
    """
    most = _whole(4 * p.call.chunk, _LANES)
    if p.n <= most:
        return _whole(p.n, 8)
    return _whole(-(-p.n // -(-p.n // most)), _LANES)


def _whole(count: int, unit: int) -> int:
    """``count`` rounded up to a multiple of ``unit``."""
    return -(-int(count) // unit) * unit


def check(p: Problem[Linear], platform: str = "gpu") -> None:
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
