"""Which columns carry the gradient of rows with a teacher, found from dx itself.

With a teacher the gradient of a column is no simple function of its probability: ``p - q`` is large where either
distribution has mass, ``p (d - sum p d)`` vanishes where both agree. A chunk's ``dx [C, V]`` is therefore made for all
columns (a pass over both logits, no matmul), and its entries choose the columns:

    L_t     = sum_v |dx_tv|
    scale_t = max(L_t, 4 R)                            R: root mean square of L_t over the chunk's rows with a gradient
    w_tv    = |dx_tv| / scale_t                        the share of a row's gradient that a column carries
    a column is active if w_tv is above a threshold in any row; a row may leave out at most the tolerance:

    sum of |dx_tv| over its inactive columns <= tolerance * scale_t

``4 R`` serves rows with hardly any gradient, such as rows with the same dominating column on both sides: their
remainder is small compared with rounding errors of all rows. The root mean square over rows of what is left out is at
most ``sqrt(17) tolerance R``. On rows of a trained policy's kind that is below the rounding of dx to bfloat16, for a
teacher that is near as for one that is far; a scale of 1, the probability mass of a row, is not (docs/logbook.md). Rows
that would leave out more go through all columns. What a row leaves out is replaced by its signed sum times the head's
mean row, as without a teacher (``backend.py``).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from logitless.core.chunk_size import column_tile
from logitless.core.problem import Gradients, Problem
from logitless.core.pytree import register
from logitless.core.row_passes import columns, over_columns
from logitless.head.linear import add_dhead, dhidden
from logitless.head.sparse import active_columns as columns_of
from logitless.head.sparse.active_columns import Columns, Rule
from logitless.head.sparse.gather import head_columns, no_head_columns, put_head_columns, take_logits

FLOOR = 4.0
"""Least scale of a row, in units of the chunk's root mean square."""


@register
@dataclasses.dataclass(frozen=True)
class DxColumns:
    """The active columns of a chunk's dx; in ``columns.left_out`` the share of each row's gradient outside of them."""

    columns: Columns
    residue: Array  # [C] float32: signed sum of each row's dx over the inactive columns
    hard: Array  # [C] bool: rows that may not leave that much out


def _row_sums(dx: Array, f: str, inactive: Array | None = None) -> Array:
    """``[C]`` float32: sums over the columns of ``|dx|`` (``f`` is ``abs``) or of ``dx``, of the inactive ones only."""

    def step(start: Array | int, size: int, total: Array) -> Array:
        part = columns(dx, start, size).astype(jnp.float32)
        part = jnp.abs(part) if f == "abs" else part
        if inactive is not None:
            part = jnp.where(columns(inactive, start, size)[None, :], part, 0.0)
        return total + jnp.sum(part, axis=1)

    return over_columns(dx.shape[1], column_tile(), step, jnp.zeros(dx.shape[:1], jnp.float32))


def _scale(dx: Array, rows: Array) -> Array:
    """``[C]``: what a row's left-out gradient is measured by; NaN where the row is. 1 where nobody has a gradient."""
    own = _row_sums(dx, "abs")
    counted = rows & jnp.isfinite(own)
    squares = jnp.sum(jnp.where(counted, own, 0.0) ** 2) / jnp.maximum(jnp.sum(counted, dtype=jnp.float32), 1.0)
    scale = jnp.maximum(own, FLOOR * jnp.sqrt(squares))
    return jnp.where(scale == 0, 1.0, scale)


def find(rule: Rule, dx: Array, p: Problem, rows: Array) -> DxColumns:
    """The active columns of the chunk ``dx [C, V]``; ``rows [C]`` are those with a gradient."""
    assert p.tolerance is not None
    width = dx.shape[1]
    dx = lax.optimization_barrier(dx)
    scale = _scale(dx, rows)
    finite = rows & jnp.isfinite(scale)
    share = jnp.where(finite, 1.0 / scale, 0.0)

    def weights(start: Array | int, size: int) -> Array:
        part = jnp.abs(columns(dx, start, size).astype(jnp.float32))
        return jnp.where(finite[:, None], part * share[:, None], 0.0)

    def largest(start: Array | int, size: int, out: Array) -> Array:
        best = jnp.max(weights(start, size), axis=0)
        return best if size == width else lax.dynamic_update_slice_in_dim(out, best, start, 0)

    maxima = over_columns(width, column_tile(), largest, jnp.zeros((width,), jnp.float32))
    level, counts = rule.levels(jnp.log(maxima), p.tolerance)
    dx, level = lax.optimization_barrier((dx, level))
    every = max(dx.shape[0] // columns_of.ROWS_THAT_CHOOSE, 1)
    few = dx[::every].astype(jnp.float32)
    some = columns_of.masses_of(
        rule, lambda start, size: jnp.abs(columns(few, start, size)) * share[::every, None], few.shape, level
    )
    missing = jnp.stack([jnp.sum(rows[::every] & ~(m <= p.tolerance)) for m in some])
    best, dense = rule.cheapest(counts, missing / jnp.maximum(jnp.sum(rows[::every]), 1), p.call.vocab_size)
    active = (level <= best) & ~dense
    dx, active = lax.optimization_barrier((dx, active))
    left_out = jnp.where(rows, _row_sums(dx, "abs", ~active) / scale, 0.0)
    found = Columns(
        index=columns_of.compacted(active, rule.most),
        count=jnp.where(dense, 0, counts[best]),
        dense=dense,
        left_out=left_out,
    )
    return DxColumns(found, _row_sums(dx, "sum", ~active), rows & ~(left_out <= p.tolerance) & ~dense)


def add_columns(
    rule: Rule, found: DxColumns, dx: Array, p: Problem, common: Array | None, total: Gradients
) -> Gradients:
    """A chunk's dH (float32) and ``total``'s head gradients with the chunk's own, over the active columns of its easy
    rows; ``common [1, H]`` stands for the head's rows of the others."""
    own, easy = found.columns, ~found.hard & ~found.columns.dense
    hidden = None if common is None else jnp.where(easy, found.residue, 0.0)[:, None] * common

    def slab(i: Array, state: Gradients) -> Gradients:
        index = lax.dynamic_slice_in_dim(own.index, i * rule.slab, rule.slab)
        part = head_columns(p.head, index)
        here = easy[:, None] & (index < dx.shape[1])[None, :]
        d = jnp.where(here, take_logits(dx, index), jnp.zeros((), dx.dtype))
        dh = None if state.hidden is None else state.hidden + dhidden(d.astype(p.h.dtype), part)
        grads = add_dhead(no_head_columns(state.head, part), d, p.h, part)
        return Gradients(dh, put_head_columns(state.head, index, grads, part.layout))

    return lax.fori_loop(0, rule.slabs(own.count), slab, Gradients(hidden, total.head))
