"""LoRA on the fused head on TPU: a narrow matmul beside each wide one, and no merged head.

    x = h W^T + s low A^T + bias        low = h B^T [N, r], rounded as everywhere (``head/linear.py``)

``low`` is computed once, outside; a sweep reads ``low`` with the hidden states, and tiles of ``A`` (the *outer* factor,
next to the vocabulary) with those of the head. What a sweep adds up over the vocabulary it adds up for both:

    [dH, dlow] = dx [W, A]        one array [N, H + R]; then dH += s dlow B, and dB = s dlow^T h: narrow matmuls of XLA
    [dW, dA]   = dx^T [h, low]    dA in float32, times s outside

R is the rank in whole lanes: ``low`` and ``A`` are padded with zeros, ``2 (N + V) R`` bytes, which is what a TPU's
layout gives a narrow array in any case. A matmul costs ``1 + R / H`` times a matmul without LoRA. With the head itself
frozen dW is not made: three matmuls in the place of four.

Written for a ``[V, H]`` head, with ``A [V, r]`` and ``B [r, H]``; for ``[H, V]`` the outer factor is ``[r, V]``.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from logitless.core.problem import HeadArrays, Problem
from logitless.head.linear import dot, lora_factors, low_rank
from logitless.head.pallas_tpu.tiles import whole_lanes


def _factors(head: HeadArrays) -> tuple[Array, Array]:
    """``(inner, outer)``."""
    factors = lora_factors(head)
    assert factors is not None
    return factors


def wide_outer(head: HeadArrays) -> Array:
    """The outer factor in whole lanes, ``[V, R]`` or ``[R, V]``, zeros beyond the rank."""
    more = whole_lanes(head.rank) - head.rank
    return jnp.pad(_factors(head)[1], ((0, 0), (0, more)) if head.layout == "vh" else ((0, more), (0, 0)))


def operands(p: Problem) -> tuple[Array, Array]:
    """``(low [N, R], outer factor)`` in whole lanes."""
    more = whole_lanes(p.head.rank) - p.head.rank
    return jnp.pad(low_rank(p.h, p.head), ((0, 0), (0, more))), wide_outer(p.head)


def parts_of(p: Problem, both: Array) -> tuple[Array, Array]:
    """``(dx W [N, H], dx A [N, r])`` of a sweep's ``[N, H + R]``."""
    width = p.h.shape[1]
    return both[:, :width], both[:, width : width + p.head.rank]


def joined(p: Problem, dh: Array, low: Array) -> Array:
    """dH ``[N, H]`` float32 from ``dx W`` and ``dx A``."""
    return dh + dot(_scaled(p, low), _factors(p.head)[0], (1, p.head.axis))


def dinner(p: Problem, low: Array) -> Array:
    """Float32 cotangent of the inner factor from ``dlow [N, r]``; rows of it that are zero add zero, whatever their
    hidden states hold."""
    h = jnp.where(jnp.any(low != 0, axis=1)[:, None], p.h, jnp.zeros((), p.h.dtype))
    back = _scaled(p, low)
    return dot(back, h, (0, 0)) if p.head.layout == "vh" else dot(h, back, (0, 0))


def douter(p: Problem, swept: Array) -> Array:
    """Float32 cotangent of the outer factor from the sweep's ``[V, R]`` or ``[R, V]``."""
    rank = p.head.rank
    return scale_of(p) * (swept[:, :rank] if p.head.layout == "vh" else swept[:rank])


def scale_of(p: Problem) -> Array:
    """LoRA's scale."""
    return jnp.asarray(p.head.lora_scale, jnp.float32)


def _scaled(p: Problem, low: Array) -> Array:
    return (scale_of(p) * low).astype(p.h.dtype)
