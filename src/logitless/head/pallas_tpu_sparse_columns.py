"""Which vocabulary columns carry the gradient, on TPU: from the forward sweep's column maxima and a look at 128 rows.

    b_t    a lower bound of lse_t: its target's logit (:func:`lse_floor`), then the sweep's running logsumexp
    m_v    max over the tokens that count of z_tv - b_t, an upper bound of the column's largest log-probability
    a column is active at threshold e if m_v > log e, or if it is the target of a token that counts
    u_tj   mass outside the columns active at threshold e_j, for the few rows, from all of their logits
    the threshold that costs least is taken: columns for all rows, and rows whose u_tj misses the tolerance

A bound that is too low makes the active set larger, never wrong; and what a set leaves out is computed for every row
(``pallas_tpu_sparse.py``). Before the sweep the few rows tell whether it is worth it at all (:func:`exact_is_cheaper`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from logitless.head import sparse
from logitless.head import sparse_columns as columns_of
from logitless.head.operator import Head, raw_logits
from logitless.head.sparse_columns import HARD_ROW_COST, ColumnPasses
from logitless.head.sweep import front
from logitless.logits.chunked import rows_stats
from logitless.logits.reference import column_ids, transformed, valid_targets
from logitless.pytree import register
from logitless.stats import StatCotangents, TokenStats
from logitless.tiles import column_tile
from logitless.transform import LogitTransform, forward

THRESHOLDS = (2.0**-1, 2.0**-2, 2.0**-3, 2.0**-4, 2.0**-5, 2.0**-6, 2.0**-8)
"""Candidate thresholds on a column's bound, relative to the tolerance. Higher than ``sparse_columns.THRESHOLDS``: one
set for all tokens has more columns, and the bounds of the forward sweep are above the probabilities."""
assert len(THRESHOLDS) == len(columns_of.THRESHOLDS)  # sparse_columns.masses has as many sums

MASS_ERROR = 2.0**-15
"""By how much the mass kept may be off: logits recomputed by another matmul differ by some 1e-5 at |z| = 30. Rows must
stay within the tolerance by that much."""

LEAST_TOLERANCE = 2.0**-12
"""Below it that would be too large a part."""

FEW = 128
"""Rows that are looked at first, and that choose the threshold."""

SLAB = 2048
"""Most columns of a backward step."""


def column_passes(vocab_size: int, head: Head) -> ColumnPasses:
    """Static sizes for a head."""
    slab = min(columns_of.slab_width(head.vocab), SLAB)
    return ColumnPasses(vocab_size, column_tile(), slab, columns_of.most_columns(head.vocab, slab))


def in_full_precision(dtype: Any) -> contextlib.AbstractContextManager[Any]:
    """XLA's TPU matmuls round float32 operands to bfloat16 unless told otherwise; the kernels do not."""
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else contextlib.nullcontext()


@register
@dataclasses.dataclass(frozen=True)
class Few:
    """Some of the rows that count, and all of their logits."""

    at: Array  # [FEW] int32: which rows
    x: Array  # [FEW, V] float32
    transform: LogitTransform
    stats: TokenStats


def few_rows(p: ColumnPasses, h: Array, head: Head, targets: Array, t: LogitTransform, counts: Array | None) -> Few:
    """Rows evenly spaced over those where ``counts [N]`` is true."""
    n = h.shape[0]
    f = front(counts)
    total = jnp.int32(n) if f.count is None else f.count
    at = (jnp.arange(FEW, dtype=jnp.int32) * jnp.minimum(total, 2**24)) // FEW  # the product stays below 2^31
    at = at if f.order is None else f.order.at[at].get(mode="promise_in_bounds").astype(jnp.int32)
    temperature = t.temperature
    if temperature is not None and jnp.ndim(temperature):
        t = dataclasses.replace(t, temperature=jnp.asarray(temperature)[at])
    with in_full_precision(h.dtype):
        x = raw_logits(h[at], head, jnp.dtype(jnp.float32))
    return Few(at, x, t, rows_stats(x, targets[at], t, p.vocab_size, p.tile))


def surely_hard(p: ColumnPasses, few: Few, tolerance: Array) -> Array:
    """``[FEW]``: rows that leave out more than the tolerance whichever columns are kept, if not more than ``p.most``.

    A row that keeps every probability from e on, and fills up with others below e, leaves out at least
    ``sum of p below e - e (columns left to fill)``, for any e.
    """
    s = few.stats
    z = transformed(few.x, few.transform.column(), p.vocab_size, column_ids(few.x.shape[1]))
    probability = jnp.exp((z - s.max_logit[:, None]) + s.max_logp[:, None])
    least = jnp.zeros_like(s.lse)
    for k in range(-2, 14):  # the p.most-th largest is at most 1 / p.most, about 4 / V
        e = 2.0**-k / p.vocab_size
        below = probability < e
        room = jnp.maximum(p.most - jnp.sum(~below, axis=1), 0)
        least = jnp.maximum(least, jnp.sum(jnp.where(below, probability, 0.0), axis=1) - e * room)
    return ~(least <= tolerance)


def exact_is_cheaper(p: ColumnPasses, few: Few, tolerance: Array, backward: int) -> Array:
    """Whether the exact kernels (``2 backward`` matmuls) cost no more than a sweep and the hard rows alone.

    ``backward``: 2, or 1 with a frozen head.
    """
    hard = jnp.mean(surely_hard(p, few, tolerance).astype(jnp.float32))
    return (1 + 2 * backward * HARD_ROW_COST * hard >= 2 * backward) | (tolerance < LEAST_TOLERANCE)


def lse_floor(h: Array, head: Head, targets: Array, t: LogitTransform, counts: Array, vocab_size: int) -> Array:
    """``[N]``: the target's logit, below which the logsumexp cannot be; infinite for tokens that do not count."""
    y = jnp.clip(targets, 0, vocab_size - 1)
    w_y = head.weight.at[y].get(mode="promise_in_bounds")
    x_y = jnp.sum(h.astype(jnp.float32) * w_y.astype(jnp.float32), axis=1)
    if head.bias is not None:
        x_y = x_y + head.bias.astype(jnp.float32)[y]
    z_y = forward(x_y, t)
    return jnp.where(counts & valid_targets(targets, vocab_size) & (z_y < jnp.inf), z_y, jnp.inf)


@register
@dataclasses.dataclass(frozen=True)
class Active:
    """The active columns of all tokens."""

    index: Array  # [most] int32, ascending; beyond the vocabulary from ``count`` on
    count: Array  # () int32; 0 if dense
    dense: Array  # () bool: too many columns, or too many rows that miss the tolerance


def no_columns(p: ColumnPasses, vocab: int) -> Active:
    """What there is where nobody has looked for columns."""
    return Active(vocab + jnp.arange(p.most, dtype=jnp.int32), jnp.int32(0), jnp.asarray(True))


def choose_columns(
    p: ColumnPasses,
    head: Head,
    maxima: Array,
    targets: Array,
    counts: Array,
    few: Few,
    g: StatCotangents | None,
    tolerance: Array,
    backward: int,
) -> Active:
    """The active columns: those whose ``maxima [vocab_size]`` are above a threshold, and the targets.

    The threshold is the one that costs least: ``1 + backward`` matmuls over the columns, ``2 backward`` a hard row.
    ``g`` are the cotangents of the few rows, ``None`` where they are not known yet.
    """
    width = max(head.vocab, p.most)
    maxima = jnp.pad(maxima, (0, width - maxima.size), constant_values=-jnp.inf)
    own = jnp.where(counts & valid_targets(targets, p.vocab_size), targets, width)
    maxima = maxima.at[own].set(jnp.inf, mode="drop")
    bounds = jnp.log(tolerance * jnp.asarray(THRESHOLDS, jnp.float32))
    level = jnp.sum(maxima[:, None] <= bounds, axis=1, dtype=jnp.int32)  # a NaN is above every threshold
    number = jnp.stack([jnp.sum(level <= j, dtype=jnp.int32) for j in range(len(THRESHOLDS))])
    miss = sparse.misses(tolerance, few.stats, g, p.vocab_size)
    moves = jnp.ones((FEW,), bool) if g is None else g.any_nonzero()
    masses = columns_of.masses(p, few.x, few.transform, few.stats, level[: head.vocab])
    hard = jnp.stack([jnp.sum(moves & miss(m + MASS_ERROR)) for m in masses]) / jnp.maximum(jnp.sum(moves), 1)
    cost = (1 + backward) * number / p.vocab_size + 2 * backward * HARD_ROW_COST * hard
    cost = jnp.where(number <= p.most, cost, jnp.inf)
    best = jnp.argmin(cost)
    dense = cost[best] >= 2 * backward
    ids = jnp.arange(width, dtype=jnp.int32)
    # Sorted, since a scatter of V numbers is slow on this chip.
    index = jnp.sort(jnp.where((level <= best) & ~dense, ids, width + ids))[: p.most]
    return Active(index, jnp.where(dense, 0, number[best]), dense)
