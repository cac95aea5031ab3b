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
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from logitless.core.chunk_size import column_tile
from logitless.core.problem import HeadArrays, Problem
from logitless.core.pytree import register
from logitless.core.row_passes import Visit, column_ids, columns, over_columns, probabilities
from logitless.core.stats import NEG_INF, TokenStats, factor, forward, swept, times
from logitless.objectives.loss import Metric, Metrics

HARD_ROW_COST = 1.25
"""A hard row's matmuls relative to a sweep's: its group is small, and touches all of dW once more."""

ROWS_THAT_CHOOSE = 128
"""Rows of a chunk on which the thresholds are tried. The choice affects cost alone; the left-out mass is then computed
for every row."""

_MASS_COLUMNS = 32768
"""Most columns whose probabilities stand in memory while the thresholds are tried."""

_LANES = 128


def auto_tolerance(dtype: DTypeLike) -> float:
    """Mass a row may leave out under ``sparse_backward="auto"``: half an ulp of the operands' dtype, since dlogits are
    rounded to it in any case. 2^-8 for bfloat16, 2^-11 for float16, 2^-24 for float32."""
    return float(jnp.finfo(dtype).eps) / 2


def in_words(mass: float | None) -> str:
    """A tolerance as people write it."""
    if mass is None or math.isnan(mass):
        return "the given mass"
    return f"2^{round(math.log2(mass))}" if math.log2(mass).is_integer() else f"{mass:.3g}"


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


def blank_columns(rule: Rule, width: int, rows: int) -> Columns:
    """What is known of a chunk before anyone has looked: it is dense."""
    unused = width + jnp.arange(rule.most, dtype=jnp.int32)
    return Columns(unused, jnp.int32(0), jnp.asarray(True), jnp.zeros((rows,), jnp.float32))


# -- a guess at the logsumexp ------------------------------------------------------------------------------------------


# What is known of a row's logsumexp before its logits are: the guess by which a screen for columns begins.
#
#     lse_t >= z_ty                                       the target's logit, one dot product a token
#     lse_t ~= z_ty - (its log-probability before)        where the sampler or an earlier pass has given that
#
# A guess that is too low lets more columns through, one that is too high fewer. What each row then leaves out is
# computed from the logits of the columns that are kept, so a bad guess costs time, never truth.

Gather = Callable[[Array, Array], Array]
"""``(x [V, H], at [K]) -> [K, H]``."""


def target_logits(p: Problem, gather: Gather | None = None) -> Array:
    """Target logits ``z [N]``: one dot product per token. Zero for a target outside the vocabulary. ``gather``: that of
    a ``[V, H]`` head's rows, if not XLA's."""
    inside = (p.targets >= 0) & (p.targets < p.call.vocab_size)
    at = jnp.where(inside, p.targets, 0)
    if gather is not None and p.head.axis == 0:
        w = gather(p.head.weight, at)
    else:
        w = p.head.weight.at[at].get() if p.head.axis == 0 else p.head.weight.at[:, at].get().T
    x = jnp.sum(p.h.astype(jnp.float32) * w.astype(jnp.float32), axis=1)
    if p.head.bias is not None:
        x = x + p.head.bias.astype(jnp.float32).at[at].get()
    return jnp.where(inside, forward(x, p.transform), 0.0)


def expected_lse(p: Problem, before: Array | None, gather: Gather | None = None) -> Array:
    """``[N]``: what the logsumexp may be; ``before [N]`` are log-probabilities of the targets by an earlier pass, or by
    the sampler (NaN where one is missing). ``gather``: see :func:`target_logits`."""
    target = target_logits(p, gather)
    return target if before is None else target - jnp.where(jnp.isnan(before), 0.0, before)


# -- the report --------------------------------------------------------------------------------------------------------


@register
@dataclasses.dataclass(frozen=True)
class SparseReport:
    """What a sparse backward left out, and how wide it was. Zeros where no gradient was taken."""

    left_out: Array  # [N] float32: mass, or share, that each row's gradient lacks; 0 in rows that went dense
    rows: Array  # [N] bool: rows that have a gradient
    hard: Array  # [N]: rows of sparse chunks that went dense; bool, or over vocabulary shards their share, float32
    chunks: Array  # () int32
    dense_chunks: Array  # () int32
    active: Array  # () float32: active columns, summed over the sparse chunks
    width: Array  # () float32: columns that the backward matmuls took, summed over all chunks

    def metrics(self, vocab: int) -> Metrics:
        """The probability mass that the backward pass left out of each row, and how many columns it took.

        With a teacher it is the share of the row's gradient (``dx_columns.py``).

        ``left_out_mass`` (mean, ``_max``) and ``hard_rows`` are over the tokens with a gradient; ``active_columns`` is
        the share of the vocabulary that was active in the sparse chunks, ``backward_columns`` the share that the
        backward matmuls took in all chunks (whole slabs, or what a tile of tokens met; 1 in dense ones),
        ``dense_chunks`` the share of dense chunks.
        """
        r = jax.lax.stop_gradient(self)
        rows, chunks = jnp.sum(r.rows, dtype=jnp.float32), r.chunks.astype(jnp.float32)
        dense = r.dense_chunks.astype(jnp.float32)
        return {
            "left_out_mass": Metric(jnp.sum(r.left_out), rows),
            "left_out_mass_max": Metric(jnp.max(r.left_out), rows),
            "hard_rows": Metric(jnp.sum(r.hard, dtype=jnp.float32), rows),
            "active_columns": Metric(r.active / vocab, chunks - dense),
            "backward_columns": Metric(r.width / vocab, chunks),
            "dense_chunks": Metric(dense, chunks),
        }


def blank_report(tokens: int | tuple[int, ...]) -> SparseReport:
    """Nothing has happened."""
    no, zero = jnp.zeros(tokens, bool), jnp.float32(0)
    return SparseReport(jnp.zeros(tokens, jnp.float32), no, no, jnp.int32(0), jnp.int32(0), zero, zero)


def dense_report(head: HeadArrays, rows: Array) -> SparseReport:
    """The report of an exact backward pass of the tokens ``rows``: one dense chunk."""
    blank = blank_report(rows.shape)
    one, width = jnp.int32(1), jnp.float32(head.vocab)
    return dataclasses.replace(blank, rows=rows, chunks=one, dense_chunks=one, width=width)


def chunk_report(rule: Rule, head: HeadArrays, found: Columns, rows: Array, hard: Array) -> SparseReport:
    width = jnp.where(found.dense, head.vocab, rule.slabs(found.count) * rule.slab)
    return SparseReport(
        left_out=jnp.where(hard | found.dense, 0.0, found.left_out),
        rows=rows,
        hard=hard,
        chunks=jnp.int32(1),
        dense_chunks=found.dense.astype(jnp.int32),
        active=found.count.astype(jnp.float32),
        width=width.astype(jnp.float32),
    )


def noted(visit: Visit, report: SparseReport, part: SparseReport) -> SparseReport:
    """``report`` with a chunk's report added: rows at their places, counts summed."""

    def note(whole: Array, own: Array) -> Array:
        return visit.put(whole, own) if whole.ndim else whole + own

    return jax.tree.map(note, report, part)
