"""Which vocabulary columns carry a chunk's gradient, found from its logits ``x [C, V]`` and their statistics.

    m_v  = max over the chunk's gradient rows t of log p_tv          one pass over x            (column_maxima)
    a column is active at threshold e if m_v > log e, or if it is the target of a gradient row
    u_tj = sum of p_tv over the columns inactive at threshold e_j    a few rows of x, every j   (masses)
    j    = the threshold that costs least: columns kept for all rows, plus rows whose u_tj misses the tolerance
    u_t  = u_tj at that threshold                                     one pass over x            (left_out)
    idx  = the active columns, in order                               a prefix sum and a scatter (compacted)

The active set follows from the data and the tolerance alone. Buffers have static sizes; their unused slots hold column
numbers beyond the vocabulary, read as zeros and written nowhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from logitless.core.chunk_size import column_tile, platform
from logitless.core.problem import HeadArrays, HeadGrads, Layout, Problem
from logitless.core.pytree import register
from logitless.core.row_passes import column_ids, columns, over_columns, probabilities
from logitless.core.stats import NEG_INF, TokenStats, factor, swept, times

HARD_ROW_COST = 1.25
"""A hard row's matmuls relative to a sweep's: its group is small, and touches all of dW once more."""

ROWS_THAT_CHOOSE = 128
"""Rows of a chunk on which the thresholds are tried. The choice affects cost alone; the left-out mass is then computed
for every row."""

_MASS_COLUMNS = 32768
"""Most columns whose probabilities stand in memory while the thresholds are tried."""

_LANES = 128


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which column sets are tried, what they cost (in matmuls for each token), and the static sizes of their buffers.

    A set costs ``per_column`` times its share of the vocabulary and ``per_hard_row`` times the share of rows that miss
    the tolerance with it; ``dense`` is what all columns for all rows cost.
    """

    thresholds: tuple[float, ...]  # on a column's largest probability, relative to the tolerance; descending
    per_column: float
    per_hard_row: float
    dense: float
    slab: int  # columns that the backward matmuls take at a time
    most: int  # active columns above which a chunk is dense; a multiple of ``slab``

    def slabs(self, count: Array) -> Array:
        """How many slabs ``count`` columns take."""
        return (count + (self.slab - 1)) // self.slab

    def cost(self, columns: Array | float, hard: Array | float) -> Array | float:
        """Cost with these shares of active columns and hard rows."""
        return self.per_column * columns + self.per_hard_row * hard

    def cheapest(self, counts: Array, hard: Array, vocab_size: int) -> tuple[Array, Array]:
        """``(which threshold, whether all columns cost no more)``, from each threshold's number of columns and share of
        hard rows."""
        cost = jnp.where(counts <= self.most, self.cost(counts / vocab_size, hard), jnp.inf)
        best = jnp.argmin(cost)
        return best, cost[best] >= self.dense

    def levels(self, maxima: Array, tolerance: Array) -> tuple[Array, Array]:
        """``(level [V], counts)``: how many thresholds each column's maximum is not above (a NaN is above all), and
        the number of columns active at each threshold."""
        bounds = jnp.log(tolerance * jnp.asarray(self.thresholds, jnp.float32))
        level = sum(((maxima <= b).astype(jnp.int32) for b in bounds), jnp.zeros(maxima.shape, jnp.int32))
        return level, jnp.stack([jnp.sum(level <= j, dtype=jnp.int32) for j in range(len(self.thresholds))])


def slab_width(vocab: int) -> int:
    """Columns that the backward matmuls take at a time: wide enough for a matmul, narrow enough to waste little."""
    return min(4096, max(-(-vocab // 32 // _LANES) * _LANES, _LANES))


def most_columns(vocab: int, slab: int) -> int:
    """Active columns above which a chunk is dense: a quarter of the vocabulary, in whole slabs."""
    return max(-(-vocab // 4) // slab, 1) * slab


def chunk_rule(vocab: int, backward: int = 2, sources: int = 1) -> Rule:
    """For a chunk whose logits stand in memory; ``backward``: matmuls of a dense backward (2, or 1 with a frozen head).
    Logits of a hard row are computed again, by ``sources`` models."""
    slab = slab_width(vocab)
    return Rule(
        thresholds=(2.0**-5, 2.0**-6, 2.0**-7, 2.0**-8, 2.0**-9, 2.0**-10, 2.0**-12),
        per_column=backward,
        per_hard_row=(sources + backward) * HARD_ROW_COST,
        dense=backward,
        slab=slab,
        most=most_columns(vocab, slab),
    )


@register
@dataclasses.dataclass(frozen=True)
class Columns:
    """The active columns of a chunk."""

    index: Array  # [most] int32, ascending; beyond the vocabulary from ``count`` on
    count: Array  # () int32; 0 if dense
    dense: Array  # () bool: too many columns, or too many rows that miss the tolerance
    left_out: Array  # [C] float32: mass of each gradient row outside the active columns, NaN where it is; 0 in others


def column_maxima(x: Array, p: Problem, stats: TokenStats, rows: Array) -> Array:
    """``[V]`` float32: the largest log-probability of each column over the rows where ``rows [C]`` is true."""
    t, width = p.transform.column(), x.shape[-1]
    k = factor(t)
    top = stats.max_logp[:, None] if k is None else stats.max_logp[:, None] / k
    shift = jnp.where(rows[:, None], stats.peak[:, None] - top, jnp.inf)  # the logsumexp, as swept

    def step(start: Array | int, size: int, out: Array) -> Array:
        u = swept(columns(x, start, size), t)
        best = jnp.max(times(k, u - shift), axis=0)
        return best if size == out.size else lax.dynamic_update_slice_in_dim(out, best, start, 0)

    out = over_columns(width, column_tile(), step, jnp.full((width,), NEG_INF, jnp.float32))
    # The vocabulary's end is cut off here, of [V] numbers, and not in the pass over [C, V].
    vocab_size = p.call.vocab_size
    return out if vocab_size == width else jnp.where(jnp.arange(width) < vocab_size, out, NEG_INF)


def masses_of(rule: Rule, weights: Callable[[Array | int, int], Array], shape: tuple[int, ...], level: Array) -> Array:
    """``[J, C]``: for every threshold j and row, the sum of ``weights(first column, how many) [C, size]`` over columns
    with ``level [V] > j``, for rows with this ``shape [C, V]``."""
    last = len(rule.thresholds)

    def step(start: Array | int, size: int, sums: Array) -> Array:
        probability = weights(start, size)
        beyond = (columns(level, start, size)[:, None] > jnp.arange(last)[None, :]).astype(jnp.float32)
        return sums + jnp.matmul(probability, beyond, precision=lax.Precision.HIGHEST)

    tile = column_tile() or _MASS_COLUMNS
    return over_columns(shape[1], tile, step, jnp.zeros((shape[0], last), jnp.float32)).T


def masses(rule: Rule, x: Array, p: Problem, stats: TokenStats, level: Array) -> Array:
    """``[J, C]``: for every threshold j the mass of each row in columns of ``level [V] > j``; sums of small numbers, no
    ``1 -``."""

    def weights(start: Array | int, size: int) -> Array:
        return probabilities(columns(x, start, size), p, stats, start + column_ids(size))

    return masses_of(rule, weights, x.shape, level)


def left_out(x: Array, p: Problem, stats: TokenStats, inactive: Array) -> Array:
    """``[C]``: the mass of each row in the columns where ``inactive [V]`` is true."""

    def step(start: Array | int, size: int, sums: Array) -> Array:
        probability = probabilities(columns(x, start, size), p, stats, start + column_ids(size))
        return sums + jnp.sum(jnp.where(columns(inactive, start, size)[None, :], probability, 0.0), axis=1)

    return over_columns(x.shape[-1], column_tile(), step, jnp.zeros(x.shape[:1], jnp.float32))


def compacted(active: Array, size: int) -> Array:
    """``[size]`` int32: the positions where ``active [V]`` is true, ascending, then ``V, V + 1, ...``.

    The prefix sum is two small products with triangles of ones (exact: integers below 2^24), which costs three kernels
    where a scan costs dozens.
    """
    width = active.size
    blocks = -(-width // _LANES)
    ones = jnp.pad(active, (0, blocks * _LANES - width)).reshape(blocks, _LANES).astype(jnp.float32)
    upto = jnp.triu(jnp.ones((_LANES, _LANES), jnp.float32))
    before = jnp.tril(jnp.ones((blocks, blocks), jnp.float32), -1)
    exact = lax.Precision.HIGHEST
    rank = jnp.matmul(ones, upto, precision=exact) + jnp.matmul(before, jnp.sum(ones, 1), precision=exact)[:, None]
    rank = rank.reshape(-1)[:width].astype(jnp.int32) - 1
    ids = jnp.arange(width, dtype=jnp.int32)
    slot = jnp.where(active, rank, size + ids)  # every index its own: no slot is written twice
    unused = width + jnp.arange(size, dtype=jnp.int32)
    count = jnp.sum(active, dtype=jnp.int32)
    return (unused - jnp.minimum(count, size)).at[slot].set(ids, mode="drop", unique_indices=True)


def find(
    rule: Rule, x: Array, p: Problem, stats: TokenStats, rows: Array, misses: Callable[[Array, int], Array]
) -> Columns:
    """The active columns of a chunk.

    ``rows [C]`` are those with a gradient; ``misses(mass [C / every], every)`` says which of each ``every``-th row may
    not leave that much out.
    """
    width = x.shape[-1]
    finite = rows & jnp.isfinite(stats.max_logp)  # the others' gradient is NaN, by the dense path
    maxima = column_maxima(x, p, stats, finite)
    maxima = maxima.at[jnp.where(finite, p.targets, width)].set(jnp.inf, mode="drop")
    assert p.tolerance is not None
    level, counts = rule.levels(maxima, p.tolerance)
    # Each pass reads x anew: what two of them share would be kept in memory, as float32.
    x, level = lax.optimization_barrier((x, level))
    every = max(x.shape[0] // ROWS_THAT_CHOOSE, 1)
    few = p.rows(lambda a: a[::every])
    mass = masses(rule, x[::every], few, jax.tree.map(lambda a: a[::every], stats), level)
    hard = jnp.stack([jnp.sum(rows[::every] & misses(m, every)) for m in mass])
    best, dense = rule.cheapest(counts, hard / jnp.maximum(jnp.sum(rows[::every]), 1), p.call.vocab_size)
    active = (level <= best) & ~dense
    x, active = lax.optimization_barrier((x, active))
    return Columns(
        index=compacted(active, rule.most),
        count=jnp.where(dense, 0, counts[best]),
        dense=dense,
        left_out=jnp.where(rows, left_out(x, p, stats, ~active), 0.0),
    )


def surely_dense(rule: Rule, x: Array, p: Problem, stats: TokenStats, rows: Array) -> Array:
    """Whether these few rows of a chunk alone have too many active columns: so has the chunk, and nothing is lost by
    not looking at the rest of it."""
    finite = rows & jnp.isfinite(stats.max_logp)
    maxima = column_maxima(x, p, stats, finite)
    assert p.tolerance is not None
    return jnp.sum(maxima > jnp.log(p.tolerance * rule.thresholds[0]), dtype=jnp.int32) > rule.most


# -- gathered columns of the logits and of the head -----------------------------------------------------------------


def _by_element() -> bool:
    """XLA's GPU compiler brings the gathered dimension to the front, which would transpose the whole array; with an
    index for every dimension there is nothing to bring. Its CPU compiler loops over the indices: few is better."""
    return platform() != "cpu"


def take_logits(x: Array, index: Array) -> Array:
    """``x[:, index]``; for indices beyond the array anything finite may stand there: their dx is zero in any case."""
    index = jnp.minimum(index, x.shape[1] - 1)
    if not _by_element() or x.size >= 2**31:
        return x.at[:, index].get(mode="promise_in_bounds", indices_are_sorted=True)
    # One index for an element: with two the compiler writes out the pairs.
    at = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None] * x.shape[1] + index[None, :]
    return x.reshape(-1).at[at].get(mode="promise_in_bounds")


def _at(x: Array, index: Array, axis: int) -> Any:
    """``x`` at ``index`` along dimension ``axis``; ``x`` itself is not copied."""
    if axis == 0:
        return x.at[index]
    if not _by_element():
        return x.at[:, index]
    return x.at[jnp.arange(x.shape[0], dtype=jnp.int32)[:, None], index[None, :]]


def head_columns(head: HeadArrays, index: Array, ascending: bool = True) -> HeadArrays:
    """The part of the head that makes the logits of the columns ``index``; zeros for indices beyond it."""
    a, b = head.lora_a, head.lora_b

    def take(x: Array, axis: int = 0) -> Array:
        if axis == 1 and _by_element():  # to look whether each pair of indices is inside, XLA would write them out
            columns = _at(x, jnp.minimum(index, x.shape[1] - 1), 1).get(mode="promise_in_bounds")
            return jnp.where(index < x.shape[1], columns, jnp.zeros((), x.dtype))
        place = _at(x, index, axis)
        return place.get(mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=ascending)

    return dataclasses.replace(
        head,
        weight=take(head.weight, head.axis),
        bias=None if head.bias is None else take(head.bias),
        lora_a=take(a) if a is not None and head.axis == 0 else a,
        lora_b=take(b, 1) if b is not None and head.axis == 1 else b,
    )


def no_head_columns(total: HeadGrads, part: HeadArrays, dtype: DTypeLike | None = None) -> HeadGrads:
    """Zeros for the cotangents of the gathered head ``part``, those that ``total`` has; what is not gathered (LoRA's
    inner factor) is ``total``'s own. Zeros in ``dtype``, or in the dtype of ``total``."""
    by_row = part.layout == "vh"

    def blank(whole: Array | None, like: Array | None) -> Array | None:
        return None if whole is None or like is None else jnp.zeros(like.shape, dtype or whole.dtype)

    return HeadGrads(
        blank(total.weight, part.weight),
        blank(total.bias, part.bias),
        blank(total.lora_a, part.lora_a) if by_row else total.lora_a,
        total.lora_b if by_row else blank(total.lora_b, part.lora_b),
    )


def put_head_columns(
    total: HeadGrads, index: Array, own: HeadGrads, layout: Layout, add: bool = True, ascending: bool = True
) -> HeadGrads:
    """``total`` with the cotangents ``own`` of a gathered head, added or written at the gathered columns."""
    by_row = layout == "vh"

    def put(whole: Array | None, new: Array | None, axis: int) -> Array | None:
        if whole is None or new is None:
            return None
        new = new.astype(whole.dtype)
        if axis == 1 and not add and _by_element():
            # Every element of the whole looks for its own: pairs of indices would take four times the memory of
            # the columns, and as long.
            at = jnp.arange(index.size, dtype=jnp.int32)
            own = jnp.full((whole.shape[1],), -1, jnp.int32).at[index].set(at, mode="drop", unique_indices=True)
            return jnp.where(own >= 0, _at(new, own, 1).get(mode="clip"), whole)
        place = _at(whole, index, axis)
        return (place.add if add else place.set)(new, mode="drop", unique_indices=True, indices_are_sorted=ascending)

    return HeadGrads(
        weight=put(total.weight, own.weight, 0 if by_row else 1),
        bias=put(total.bias, own.bias, 0),
        lora_a=put(total.lora_a, own.lora_a, 0) if by_row else own.lora_a,
        lora_b=own.lora_b if by_row else put(total.lora_b, own.lora_b, 1),
    )


def blank_columns(rule: Rule, width: int, rows: int) -> Columns:
    """What is known of a chunk before anyone has looked: it is dense."""
    unused = width + jnp.arange(rule.most, dtype=jnp.int32)
    return Columns(unused, jnp.int32(0), jnp.asarray(True), jnp.zeros((rows,), jnp.float32))
