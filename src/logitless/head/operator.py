"""The LM head as a linear map, in either layout, with bias and LoRA, forwards and backwards.

    x  = h W^T + s (h B^T) A^T + bias        W [V, H] ("vh"), A [V, r], B [r, H]
    x  = h W   + s (h A) B     + bias        W [H, V] ("hv"), A [H, r], B [r, V]

Matmuls take the operands' own dtype and accumulate in float32. ``dx`` is rounded to that dtype before the backward
matmuls: in float32 they cost two to four times as much and buy nothing that the rounding of dH and dW keeps.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

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


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    return lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=jnp.float32)


def raw_logits(h: Array, head: Head, logits_dtype: jnp.dtype) -> Array:
    """``x [C, V]`` for ``h [C, H]``, rounded to ``logits_dtype``."""
    x = _dot(h, head.weight, (1, 1 if head.layout == "vh" else 0))
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


def dhidden(dx: Array, head: Head) -> Array:
    """Cotangent of ``h``, float32 ``[C, H]``, from the rounded ``dx [C, V]``."""
    dh = _dot(dx, head.weight, (1, 0 if head.layout == "vh" else 1))
    if head.lora_a is not None:
        assert head.lora_b is not None
        if head.layout == "vh":
            low = (head.lora_scale * _dot(dx, head.lora_a, (1, 0))).astype(dx.dtype)
            dh = dh + _dot(low, head.lora_b, (1, 0))
        else:
            low = (head.lora_scale * _dot(dx, head.lora_b, (1, 1))).astype(dx.dtype)
            dh = dh + _dot(low, head.lora_a, (1, 1))
    return dh


def dhead(dx: Array, h: Array, head: Head, wanted: HeadGrads) -> HeadGrads:
    """Float32 cotangents of the head's arrays, for those that are not ``None`` in ``wanted``."""
    weight = bias = lora_a = lora_b = None
    if wanted.weight is not None:
        weight = _dot(dx, h, (0, 0)) if head.layout == "vh" else _dot(h, dx, (0, 0))
    if wanted.bias is not None:
        bias = jnp.sum(dx, axis=0, dtype=jnp.float32)
    if wanted.lora_a is not None or wanted.lora_b is not None:
        assert head.lora_a is not None and head.lora_b is not None
        scale = jnp.asarray(head.lora_scale, jnp.float32)
        if head.layout == "vh":
            low = _dot(h, head.lora_b, (1, 1)).astype(h.dtype)
            lora_a = scale * _dot(dx, low, (0, 0))
            back = (scale * _dot(dx, head.lora_a, (1, 0))).astype(dx.dtype)
            lora_b = _dot(back, h, (0, 0))
        else:
            low = _dot(h, head.lora_a, (1, 0)).astype(h.dtype)
            lora_b = scale * _dot(low, dx, (0, 0))
            back = (scale * _dot(dx, head.lora_b, (1, 1))).astype(dx.dtype)
            lora_a = _dot(h, back, (0, 0))
    return HeadGrads(weight, bias, lora_a, lora_b)
