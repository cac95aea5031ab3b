"""A set of vocabulary columns of a head on TPU: taken out of it, and their gradients put into place, in either layout.

Gathered columns stand as rows ``[K, H]``, as a ``[V, H]`` head of their own: rows of a ``[V, H]`` head are gathered by
XLA, columns of an ``[H, V]`` one by a kernel (``columns_at.py``), since XLA would take them one element at a time. The
gradient's rows go back the same way, each of them set, not added: a column has one place.

    gatherer       the columns of a slab: weight, bias and LoRA's outer factor
    mean_rows      what stands for the columns left out
    put_rows       a gradient's rows into dW
    least_logits   logits made again, no larger than those of the forward sweep
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from logitless.core.problem import Head, Problem
from logitless.head.linear import dot, lora_factors
from logitless.head.pallas_tpu import lora
from logitless.head.pallas_tpu.columns_at import columns_in_order, put_columns
from logitless.head.pallas_tpu.operands import interpreter
from logitless.head.pallas_tpu.tiles import LANES
from logitless.head.sparse import active_columns as columns_of
from logitless.head.sparse.active_columns import Rule

MASS_ERROR = 2.0**-15
"""By how much a logit may be off that is made again by another matmul (some 1e-5 at |z| = 30), and with it the mass
kept: rows must stay within the tolerance by that much."""


def gatherer(p: Problem) -> Callable[[Array], Head]:
    """``index [K], ascending -> the head's columns there``, as a ``[V, H]`` head; zeros beyond the vocabulary."""
    head, interpret = p.head, interpreter(p.call.interpret)
    if head.layout == "vh":
        return lambda index: columns_of.head_columns(head, index)
    factors = lora_factors(head)
    outer = lora.wide_outer(head) if head.rank else None

    def columns(index: Array) -> Head:
        at, inside = jnp.minimum(index, head.vocab - 1), (index < head.vocab)[:, None]

        def rows(x: Array) -> Array:
            return jnp.where(inside, columns_in_order(x, at, interpret), jnp.zeros((), x.dtype))

        return Head(
            weight=rows(head.weight),
            bias=None if head.bias is None else head.bias.at[index].get(mode="fill", fill_value=0),
            lora_a=None if outer is None else rows(outer)[:, : head.rank],
            lora_b=None if factors is None else factors[0].T,
            lora_scale=head.lora_scale,
            layout="vh",
        )

    return columns


def mean_rows(rule: Rule, p: Problem) -> tuple[Array, Array | None]:
    """``[1, H]`` and, with LoRA, ``[1, r]`` float32: the mean of a slab's worth of the head's rows, and of its outer
    factor's, evenly spaced over the vocabulary; those of an ``[H, V]`` head in runs of lanes."""
    size = min(rule.slab, p.call.vocab_size)
    run = LANES if p.head.layout == "hv" and size % LANES == 0 else 1
    first = jnp.arange(size // run, dtype=jnp.int32) * (p.call.vocab_size // (size // run))
    part = gatherer(p)((first[:, None] + jnp.arange(run, dtype=jnp.int32)).reshape(-1))

    def mean(x: Array) -> Array:
        return dot(jnp.ones((1, size), x.dtype), x, (1, 0)) / size

    return mean(part.weight), None if part.lora_a is None else mean(part.lora_a)


def put_rows(p: Problem, whole: Array | None, index: Array, rows: Array | None) -> Array | None:
    """A gradient ``whole``, of the weight or a vector, with ``rows [K, ...]`` set at the columns ``index``."""
    if whole is None or rows is None:
        return None
    if p.head.layout == "vh" or whole.ndim == 1:
        return set_rows(whole, index, rows)
    if p.head.vocab % LANES:  # a vocabulary that is not of whole lanes: two transposed copies
        return set_rows(whole.T, index, rows).T
    return put_columns(whole, index, rows, interpreter(p.call.interpret))


def set_rows(whole: Array, index: Array, rows: Array) -> Array:
    """``whole`` with ``rows`` set at ``index``, ascending; nowhere beyond its end."""
    rows = rows.astype(whole.dtype)
    return whole.at[index].set(rows, mode="drop", unique_indices=True, indices_are_sorted=True)


def least_logits(p: Problem, x: Array) -> Array:
    """Logits that are no larger than those of the forward sweep, up to ``MASS_ERROR``, from ``x`` in float32, made
    again.

    Where logits are rounded, one near the middle between two neighbours may have been rounded to the other one in that
    sweep, which is a large step at a large logit. The lower of the two is taken; so the mass kept is too small there,
    and the row hard rather than wrong.
    """
    dtype = jnp.dtype(p.call.logits_dtype)
    return x if dtype == jnp.float32 else (x - MASS_ERROR).astype(dtype)
