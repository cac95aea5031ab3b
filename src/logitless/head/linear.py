"""The LM head as a linear map, in either layout, with bias and LoRA, forwards and backwards.

    x  = h W^T + s (h B^T) A^T + bias        W [V, H] ("vh"), A [V, r], B [r, H]
    x  = h W   + s (h A) B     + bias        W [H, V] ("hv"), A [H, r], B [r, V]

Matmuls take the operands' own dtype and accumulate in float32. ``dx`` is rounded to that dtype before the backward
matmuls: in float32 they cost two to four times as much and buy nothing that the rounding of dH and dW keeps. The bias'
gradient is a plain sum, of ``dx`` as it was before that rounding (:func:`dx_dtype`).

Float32 operands are multiplied in float32, on every platform and in every backend, unless the user's own
``jax_default_matmul_precision`` says otherwise (:func:`precision_of`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from logitless.core.chunk_size import platform
from logitless.core.problem import HeadArrays, HeadGrads, Wanted
from logitless.core.pytree import tree_of
from logitless.core.row_passes import over_columns

_ZERO_DEPTH = 16  # of the matmul that writes zeros: the least that a tensor core takes


def precision_of(dtype: DTypeLike) -> lax.Precision | None:
    """The precision of a matmul of ``dtype`` operands; ``None`` where the user's own setting decides.

    Products of 16-bit numbers are exact in float32 in any case. Float32 would be rounded to TF32 or bfloat16 by default
    on GPUs and TPUs; people take a float32 head to be exact.
    """
    if jnp.dtype(dtype) != jnp.float32:
        return lax.Precision.DEFAULT
    return lax.Precision.HIGHEST if jax.config.jax_default_matmul_precision is None else None


def dx_dtype(logits_dtype: DTypeLike, h_dtype: DTypeLike, bias: bool) -> jnp.dtype:
    """The dtype in which dx is made: that of the hidden states, or that of the logits where it is wider and the
    gradient of the ``bias`` is wanted. float16 keeps few digits of dlogits near 1e-6, and none below 3e-8."""
    return jnp.promote_types(logits_dtype, h_dtype) if bias else jnp.dtype(h_dtype)


def dot(a: Array, b: Array, contract: tuple[int, int], out: DTypeLike = jnp.float32) -> Array:
    """One matmul, summed in float32 and rounded once to ``out``."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision_of(a.dtype), preferred_element_type=out)


def lora_factors(head: HeadArrays) -> tuple[Array, Array] | None:
    """``(inner, outer)``: the factor that meets the hidden states and the one that meets the vocabulary."""
    if head.lora_a is None or head.lora_b is None:
        return None
    return (head.lora_b, head.lora_a) if head.layout == "vh" else (head.lora_a, head.lora_b)


def low_rank(h: Array, head: HeadArrays) -> Array:
    """``[C, r]``: the hidden states behind LoRA's inner factor."""
    lora = lora_factors(head)
    assert lora is not None
    return dot(h, lora[0], (1, 1 - head.axis)).astype(h.dtype)


def raw_logits(h: Array, head: HeadArrays, logits_dtype: DTypeLike) -> Array:
    """``x [C, V]`` for ``h [C, H]``, rounded to ``logits_dtype``."""
    lora = lora_factors(head)
    plain = lora is None and head.bias is None
    # Nothing is added afterwards: let the matmul itself write the rounded logits.
    x = dot(h, head.weight, (1, 1 - head.axis), logits_dtype if plain else jnp.float32)
    if lora is not None:
        x = x + head.lora_scale * dot(low_rank(h, head), lora[1], (1, 1 - head.axis))
    if head.bias is not None:
        x = x + head.bias.astype(jnp.float32)
    return rounded(x, logits_dtype)


def rounded(x: Array, dtype: DTypeLike) -> Array:
    """``x`` in ``dtype``, rounded even where it is made wide again at once, which compilers take for nothing: logits
    that are made twice are the same both times."""
    kind = jnp.finfo(dtype)
    return x.astype(dtype) if x.dtype == dtype else lax.reduce_precision(x, kind.nexp, kind.nmant).astype(dtype)


def _dhidden_of_weight(dx: Array, weight: Array, axis: int, tile: int | None) -> Array:
    """``dx W`` in float32, a sum over slices of ``tile`` vocabulary entries where a tile is given.

    XLA's CPU compiler takes up to twice as long for one product of few rows over the whole vocabulary.
    """

    def step(start: Array | int, size: int, total: Array) -> Array:
        part = lax.dynamic_slice_in_dim(dx, start, size, 1)
        return total + dot(part, lax.dynamic_slice_in_dim(weight, start, size, axis), (1, axis))

    if tile is None:
        return dot(dx, weight, (1, axis))
    return over_columns(dx.shape[-1], tile, step, jnp.zeros((dx.shape[0], weight.shape[1 - axis]), jnp.float32))


def dhidden(dx: Array, head: HeadArrays, tile: int | None = None) -> Array:
    """Cotangent of ``h``, float32 ``[C, H]``, from the rounded ``dx [C, V]``."""
    dh = _dhidden_of_weight(dx, head.weight, head.axis, tile)
    lora = lora_factors(head)
    if lora is not None:
        back = (head.lora_scale * dot(dx, lora[1], (1, head.axis))).astype(dx.dtype)
        dh = dh + dot(back, lora[0], (1, head.axis))
    return dh


def _outer(v: Array, h: Array, axis: int, out: DTypeLike = jnp.float32) -> Array:
    """A sum over tokens of outer products, what belongs to the vocabulary along dimension ``axis``."""
    return dot(v, h, (0, 0), out) if axis == 0 else dot(h, v, (0, 0), out)


def add_dweight(total: Array, dx: Array, h: Array, axis: int, tile: int | None) -> Array:
    """``total + dW`` in the dtype of ``total``, a slice of ``tile`` vocabulary entries at a time.

    A compiler that does not fuse the sum into the matmul needs a slice's worth of extra memory, not a second dW.
    """

    def step(start: Array | int, size: int, total: Array) -> Array:
        part = lax.dynamic_slice_in_dim(dx, start, size, 1)
        old = lax.dynamic_slice_in_dim(total, start, size, axis)
        return lax.dynamic_update_slice_in_dim(total, old + _outer(part, h, axis, total.dtype), start, axis)

    if tile is None:
        return total + _outer(dx, h, axis, total.dtype)
    return over_columns(dx.shape[-1], tile, step, total)


def add_dhead(total: HeadGrads, dx: Array, h: Array, head: HeadArrays, tile: int | None = None) -> HeadGrads:
    """``total`` plus the cotangents of the head's arrays, skipping entries that are ``None`` in ``total``. The bias'
    are summed from ``dx [C, V]`` as it is; the matmuls take it in the dtype of ``h``."""
    weight, bias, lora_a, lora_b = total.weight, total.bias, total.lora_a, total.lora_b
    unrounded, dx = dx, dx.astype(h.dtype)
    if weight is not None:
        weight = add_dweight(weight, dx, h, head.axis, tile)
    if bias is not None:
        bias = bias + jnp.sum(unrounded, axis=0, dtype=jnp.float32)
    lora = lora_factors(head)
    if lora_a is not None and lora_b is not None and lora is not None:
        scale = jnp.asarray(head.lora_scale, jnp.float32)
        d_outer = scale * _outer(dx, low_rank(h, head), head.axis)
        back = (scale * dot(dx, lora[1], (1, head.axis))).astype(dx.dtype)
        d_inner = _outer(back, h, head.axis)
        a, b = (d_outer, d_inner) if head.layout == "vh" else (d_inner, d_outer)
        lora_a, lora_b = lora_a + a, lora_b + b
    return HeadGrads(weight, bias, lora_a, lora_b)


def _each(f: Callable[..., Array], *parts: HeadGrads | HeadArrays) -> HeadGrads:
    """``f`` on the arrays of heads and gradients, name by name; ``None`` if any input is ``None``."""
    names = [x.name for x in dataclasses.fields(HeadGrads)]
    rows = ([getattr(p, n) for p in parts] for n in names)
    return HeadGrads(*(None if any(x is None for x in row) else f(*row) for row in rows))


def zero_grads(head: HeadArrays, want: Wanted, weight_dtype: DTypeLike = jnp.float32) -> HeadGrads:
    """Where the cotangents of a head's arrays are summed: float32, and ``weight_dtype`` for the weight."""
    dtypes = (weight_dtype if want.weight else None, jnp.float32 if want.bias else None)
    lora = jnp.float32 if want.lora else None
    return _each(lambda x, dtype: _zeros(x.shape, dtype), head, tree_of(HeadGrads, *dtypes, lora, lora))


def _zeros(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Zeros. XLA's GPU compiler fills 16-bit arrays at less than half of the memory's rate: 0.77 ms for the 1.2 GB of
    dW at V = 151936, H = 4096 on an H200, where a matmul of zeros writes them in 0.30."""
    if platform() != "gpu" or jnp.dtype(dtype).itemsize > 2 or len(shape) < 2:
        return jnp.zeros(shape, dtype)
    factors = jnp.zeros((shape[0], _ZERO_DEPTH), dtype), jnp.zeros((_ZERO_DEPTH, shape[1]), dtype)
    a, b = lax.optimization_barrier(factors)  # without it the compiler knows the result
    return dot(a, b, (1, 0), dtype)


def in_parameter_dtypes(grads: HeadGrads, head: HeadArrays) -> HeadGrads:
    """Summed cotangents, each rounded to its parameter's dtype."""
    return _each(lambda g, x: g.astype(x.dtype), grads, head)
