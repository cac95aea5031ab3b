"""Grouped-query attention over a whole row or packed rows; decode.py has that of a new token over a cache.

Both take ``q [B, T, N, hd]`` and ``k, v [B, T, KV, hd]``. cuDNN's flash attention keeps no ``[B, N, T, S]`` array; the
XLA form builds the scores of one block of queries at a time and keeps none of them for the backward pass.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.backend
import jax.numpy as jnp
from jax import Array

from logitless.core.shapes import Bool, Float

IMPLEMENTATIONS = ("auto", "cudnn", "xla")
_QUERY_BLOCK = 256


def causal_attention(
    q: Float[Array, "B T N hd"],
    k: Float[Array, "B T KV hd"],
    v: Float[Array, "B T KV hd"],
    mask: Bool[Array, "B T T"] | None = None,
    implementation: str = "auto",
) -> Float[Array, "B T N hd"]:
    """Each token over itself and the tokens before it: all, or (packed rows) those in ``mask[b, t]``.

    cuDNN takes the mask as a bias in ``q``'s dtype. Causality is declared separately, so cuDNN skips the upper half of
    the scores.
    """
    length = q.shape[1]
    if not _takes_cudnn(q, implementation):
        before = jnp.tril(jnp.ones((1, length, length), bool))
        return _blocked(q, k, v, (before if mask is None else before & mask)[:, None])
    # cuDNN's backward pass wants an even length; a token at the end is one that no other sees.
    odd = ((0, 0), (0, length % 2), (0, 0), (0, 0))
    options: dict[str, Any] = {}
    if mask is not None:
        options["mask"] = (jnp.pad(mask, (odd[0], odd[1], odd[1])) if length % 2 else mask)[:, None]
    q, k, v = (jnp.pad(x, odd) for x in (q, k, v)) if length % 2 else (q, k, v)
    attended = jax.nn.dot_product_attention(q, k, v, **options, is_causal=True, implementation="cudnn")
    return attended[:, :length]


def _takes_cudnn(q: Array, implementation: str) -> bool:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention is {implementation!r}, expected one of {', '.join(IMPLEMENTATIONS)}.")
    return implementation == "cudnn" or (implementation == "auto" and _cudnn_serves(q))


def _cudnn_serves(q: Array) -> bool:
    # What jax asks of cuDNN beyond the dtype: a head of at most 128 (256 from Hopper on), a multiple of 8.
    return (
        jax.default_backend() == "gpu"
        and "cuda" in jax.extend.backend.get_backend().platform_version
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and q.shape[-1] <= 128
        and q.shape[-1] % 8 == 0
    )


def _blocked(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Masked attention, in blocks of queries if there are many queries."""

    def attend(q_and_mask: tuple[Array, Array]) -> Any:
        return jax.nn.dot_product_attention(q_and_mask[0], k, v, mask=q_and_mask[1], implementation="xla")

    length = q.shape[1]
    block = next((n for n in range(min(_QUERY_BLOCK, length), 0, -1) if length % n == 0), 1)
    if block == length or block < _QUERY_BLOCK // 4:  # short rows; or a length that has no divisor of a useful size
        return attend((q, mask))

    def split(x: Array, axis: int) -> Array:
        blocks = x.reshape(*x.shape[:axis], length // block, block, *x.shape[axis + 1 :])
        return jnp.moveaxis(blocks, axis, 0)

    out = jax.lax.map(jax.checkpoint(attend), (split(q, 1), split(mask, 2)))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape)
