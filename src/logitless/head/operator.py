"""The LM head as a linear map, in either layout, with bias and LoRA, forwards and backwards.

    x  = h W^T + s (h B^T) A^T + bias        W [V, H] ("vh"), A [V, r], B [r, H]
    x  = h W   + s (h A) B     + bias        W [H, V] ("hv"), A [H, r], B [r, V]

Matmuls take the operands' own dtype and accumulate in float32. ``dx`` is rounded to that dtype before the backward
matmuls: in float32 they cost two to four times as much and buy nothing that the rounding of dH and dW keeps.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array, lax

from logitless.logits.chunked import over_columns
from logitless.pytree import register, static

Layout = Literal["vh", "hv"]


@register
@dataclasses.dataclass(frozen=True)
class Head:
    """The head's arrays. ``None`` means "not there"."""

    weight: Array
    bias: Array | None = None
    lora_a: Array | None = None
    lora_b: Array | None = None
    lora_scale: Array | float = 1.0
    layout: Layout = static("vh")

    @property
    def vocab(self) -> int:
        """Number of columns of the logits, padding included."""
        return self.weight.shape[0 if self.layout == "vh" else 1]


@register
@dataclasses.dataclass(frozen=True)
class HeadGrads:
    """Cotangents of a head's arrays; ``None`` where none is wanted."""

    weight: Array | None
    bias: Array | None
    lora_a: Array | None
    lora_b: Array | None


def _dot(a: Array, b: Array, contract: tuple[int, int], out: Any = jnp.float32) -> Array:
    """One matmul, summed in float32 and rounded once to ``out``."""
    return lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=out)


def raw_logits(h: Array, head: Head, logits_dtype: jnp.dtype) -> Array:
    """``x [C, V]`` for ``h [C, H]``, rounded to ``logits_dtype``."""
    plain = head.lora_a is None and head.bias is None
    # Nothing is added afterwards: let the matmul itself write the rounded logits.
    x = _dot(h, head.weight, (1, 1 if head.layout == "vh" else 0), logits_dtype if plain else jnp.float32)
    if head.lora_a is not None:
        assert head.lora_b is not None
        if head.layout == "vh":
            low = _dot(h, head.lora_b, (1, 1)).astype(h.dtype)
            x = x + head.lora_scale * _dot(low, head.lora_a, (1, 1))
        else:
            low = _dot(h, head.lora_a, (1, 0)).astype(h.dtype)
            x = x + head.lora_scale * _dot(low, head.lora_b, (1, 0))
    if head.bias is not None:
        x = x + head.bias.astype(jnp.float32)
    return x.astype(logits_dtype)


def _dhidden_of_weight(dx: Array, weight: Array, layout: Layout, tile: int | None) -> Array:
    """``dx W`` in float32, a sum over slices of ``tile`` vocabulary entries where a tile is given.

    XLA's CPU compiler takes up to twice as long for one product of few rows over the whole vocabulary.
    """
    axis = 0 if layout == "vh" else 1

    def step(start: Array | int, size: int, total: Array) -> Array:
        part = lax.dynamic_slice_in_dim(dx, start, size, 1)
        return total + _dot(part, lax.dynamic_slice_in_dim(weight, start, size, axis), (1, axis))

    if tile is None:
        return _dot(dx, weight, (1, axis))
    return over_columns(dx.shape[-1], tile, step, jnp.zeros((dx.shape[0], weight.shape[1 - axis]), jnp.float32))


def dhidden(dx: Array, head: Head, tile: int | None = None) -> Array:
    """Cotangent of ``h``, float32 ``[C, H]``, from the rounded ``dx [C, V]``."""
    dh = _dhidden_of_weight(dx, head.weight, head.layout, tile)
    if head.lora_a is not None:
        assert head.lora_b is not None
        if head.layout == "vh":
            low = (head.lora_scale * _dot(dx, head.lora_a, (1, 0))).astype(dx.dtype)
            dh = dh + _dot(low, head.lora_b, (1, 0))
        else:
            low = (head.lora_scale * _dot(dx, head.lora_b, (1, 1))).astype(dx.dtype)
            dh = dh + _dot(low, head.lora_a, (1, 1))
    return dh


def add_dweight(total: Array, dx: Array, h: Array, layout: Layout, tile: int | None) -> Array:
    """``total + dW`` in the dtype of ``total``, a slice of ``tile`` vocabulary entries at a time.

    A compiler that does not fuse the sum into the matmul needs a slice's worth of extra memory, not a second dW.
    """
    axis = 0 if layout == "vh" else 1

    def step(start: Array | int, size: int, total: Array) -> Array:
        part = lax.dynamic_slice_in_dim(dx, start, size, 1)
        a, b = (part, h) if layout == "vh" else (h, part)
        old = lax.dynamic_slice_in_dim(total, start, size, axis)
        return lax.dynamic_update_slice_in_dim(total, old + _dot(a, b, (0, 0), total.dtype), start, axis)

    if tile is None:
        a, b = (dx, h) if layout == "vh" else (h, dx)
        return total + _dot(a, b, (0, 0), total.dtype)
    return over_columns(dx.shape[-1], tile, step, total)


def add_dhead(total: HeadGrads, dx: Array, h: Array, head: Head, tile: int | None = None) -> HeadGrads:
    """``total`` plus the cotangents of the head's arrays, for those that are not ``None`` there."""
    weight, bias, lora_a, lora_b = total.weight, total.bias, total.lora_a, total.lora_b
    if weight is not None:
        weight = add_dweight(weight, dx, h, head.layout, tile)
    if bias is not None:
        bias = bias + jnp.sum(dx, axis=0, dtype=jnp.float32)
    if lora_a is not None:
        assert head.lora_a is not None and head.lora_b is not None and lora_b is not None
        scale = jnp.asarray(head.lora_scale, jnp.float32)
        if head.layout == "vh":
            low = _dot(h, head.lora_b, (1, 1)).astype(h.dtype)
            lora_a = lora_a + scale * _dot(dx, low, (0, 0))
            back = (scale * _dot(dx, head.lora_a, (1, 0))).astype(dx.dtype)
            lora_b = lora_b + _dot(back, h, (0, 0))
        else:
            low = _dot(h, head.lora_a, (1, 0)).astype(h.dtype)
            lora_b = lora_b + scale * _dot(low, dx, (0, 0))
            back = (scale * _dot(dx, head.lora_b, (1, 1))).astype(dx.dtype)
            lora_a = lora_a + _dot(h, back, (0, 0))
    return HeadGrads(weight, bias, lora_a, lora_b)


def zero_grads(head: Head, weight: bool, bias: bool, lora: bool, weight_dtype: Any = jnp.float32) -> HeadGrads:
    """Where the cotangents of a head's arrays are summed: float32, and ``weight_dtype`` for the weight."""

    def zeros(p: Array | None, want: bool, dtype: Any = jnp.float32) -> Array | None:
        return None if p is None or not want else jnp.zeros(p.shape, dtype)

    return HeadGrads(
        zeros(head.weight, weight, weight_dtype),
        zeros(head.bias, bias),
        zeros(head.lora_a, lora),
        zeros(head.lora_b, lora),
    )


def in_parameter_dtypes(grads: HeadGrads, head: Head) -> HeadGrads:
    """Summed cotangents, each rounded to its parameter's dtype."""

    def like(g: Array | None, p: Array | None) -> Array | None:
        return None if g is None or p is None else g.astype(p.dtype)

    return HeadGrads(
        like(grads.weight, head.weight),
        like(grads.bias, head.bias),
        like(grads.lora_a, head.lora_a),
        like(grads.lora_b, head.lora_b),
    )
