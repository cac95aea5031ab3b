"""Which vocabulary columns carry the gradient, on TPU: the forward sweep's column maxima and 128 rows decide.

    b_t    lower bound for a row's logsumexp: the target's logit, or a value from the sampler or an earlier pass
           (``head/sparse/active_columns.py``); then the sweep's running logsumexp
    m_v    max of z_tv - b_t over counting tokens, an upper bound for the column's largest log-probability
    a column is active at threshold e if m_v > log e, or if a counting token has the column as target
    u_tj   mass outside the columns active at threshold e_j, for 128 rows, from logits in ``SAMPLE`` columns
    the cheapest threshold is taken: it costs columns for all rows, and rows with u_tj above the tolerance

A bound that is too low makes the active set larger, never wrong; what a set leaves out is computed for every row
(``sparse.py``). Before the sweep the 128 rows tell whether it is worth it at all (:func:`exact_is_cheaper`).

The sampled columns stand in blocks evenly spaced over the vocabulary, each for V / SAMPLE columns: all columns would be
one more pass over the head (0.8 ms of a v6e at V = 151936, H = 4096). On 8192 tokens of ``bench.realistic`` the share
of hard rows comes out within 0.8 % of all rows of what all columns say
(benchmarks/results/tpu_v6e_sparse_estimate.json).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from logitless.core import row_passes
from logitless.core.problem import HeadArrays, Problem
from logitless.core.pytree import register
from logitless.core.row_passes import in_parts, swept_columns
from logitless.core.stats import NEG_INF, StatCotangents, TokenStats, factor, times, valid_targets
from logitless.head.linear import raw_logits
from logitless.head.pallas_tpu import kernels
from logitless.head.pallas_tpu.operands import interpreter
from logitless.head.pallas_tpu.tiles import LANES
from logitless.head.sparse.active_columns import (
    HARD_ROW_COST,
    Rule,
    expected_lse,
    most_columns,
    slab_width,
    target_logits,
)
from logitless.head.sparse.gather import misses, some

MASS_ERROR = 2.0**-15
"""By how much a logit may be off that is made again by another matmul (some 1e-5 at |z| = 30), and with it the mass
kept: rows must stay within the tolerance by that much."""

LEAST_TOLERANCE = 2.0**-12
"""Below it ``MASS_ERROR`` would be too large a part."""

FEW = 128
"""Rows that are looked at first, and that choose the threshold."""

SAMPLE = 8192
"""Columns that the few rows are looked at in."""


def column_rule(vocab: int, backward: int = 2) -> Rule:
    """For one set of columns for all tokens; ``backward``: 2, or 1 with a frozen head. A column has its logits made
    again, a hard row takes three matmuls (or two).

    Thresholds are higher than those of ``columns.chunk_rule``: one set for all tokens has more columns, and the bounds
    of the forward sweep are above the probabilities.
    """
    slab = min(slab_width(vocab), 1024)
    return Rule(
        thresholds=(2.0**-1, 2.0**-2, 2.0**-3, 2.0**-4, 2.0**-5, 2.0**-6, 2.0**-8),
        per_column=1 + backward,
        per_hard_row=(1 + backward) * HARD_ROW_COST,
        dense=2 * backward,
        slab=slab,
        most=most_columns(vocab, slab),
    )


@dataclasses.dataclass(frozen=True)
class Few:
    """Some of the rows that count, and their logits in some columns."""

    at: Array  # [FEW] int32: which rows
    p: Problem  # theirs
    x: Array  # [FEW, S] float32: raw logits
    columns: Array  # [S] int32: of these columns
    lse: Array  # [FEW]: the logsumexp, as far as these columns tell

    @property
    def share(self) -> float:
        """Vocabulary columns that each sampled column represents."""
        return self.p.call.vocab_size / self.columns.size


def sampled(vocab_size: int) -> tuple[np.ndarray, int]:
    """``(where blocks of columns start, columns of a block)``: evenly spaced; one block of all columns in a small
    vocabulary."""
    if vocab_size <= SAMPLE:
        return np.zeros(1, np.int32), vocab_size
    blocks = max(SAMPLE // LANES, 1)
    return np.linspace(0, vocab_size // LANES - 1, blocks).astype(np.int32) * LANES, LANES


def _blocks(x: Array | None, vocab_size: int, axis: int) -> Array | None:
    """The sampled part of ``x``: a loop over slices, where a gather would take a row at a time."""
    if x is None:
        return None
    starts, size = sampled(vocab_size)
    if starts.size == 1:
        return lax.slice_in_dim(x, 0, size, axis=axis)
    at, shape = jnp.asarray(starts), list(x.shape)
    shape[axis] = starts.size * size

    def copy(k: Array, out: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(out, lax.dynamic_slice_in_dim(x, at[k], size, axis), k * size, axis)

    return lax.fori_loop(0, starts.size, copy, jnp.zeros(shape, x.dtype))


def _some_columns(head: HeadArrays, vocab_size: int) -> HeadArrays:
    """The part of the head that makes the sampled columns' logits."""
    weight = _blocks(head.weight, vocab_size, head.axis)
    assert weight is not None
    by_row = head.layout == "vh"
    return dataclasses.replace(
        head,
        weight=weight,
        bias=_blocks(head.bias, vocab_size, 0),
        lora_a=_blocks(head.lora_a, vocab_size, 0) if by_row else head.lora_a,
        lora_b=head.lora_b if by_row else _blocks(head.lora_b, vocab_size, 1),
    )


def evenly_spaced(n: int, counts: Array | None) -> Array:
    """``[FEW]`` int32: rows evenly spaced over those where ``counts [n]`` is true."""
    find, total = (lambda k: k, jnp.int32(n)) if counts is None else ranked(counts)
    return find((jnp.arange(FEW, dtype=jnp.int32) * jnp.minimum(total, 2**24)) // FEW)  # the product stays below 2^31


def few_rows(p: Problem, counts: Array | None, before: Array | None) -> Few:
    """Rows evenly spaced over those where ``counts [N]`` is true; ``before``: see :func:`expected_lse`."""
    at, vocab_size = evenly_spaced(p.n, counts), p.call.vocab_size
    few = p.rows(lambda a: a[at] if a.ndim == 1 else kernels.gather(a, at, interpreter(p.call.interpret)))
    rows_of = functools.partial(kernels.head_rows, p)
    starts, size = sampled(vocab_size)
    ids = jnp.asarray((starts[:, None] + np.arange(size)).reshape(-1), jnp.int32)
    x = raw_logits(few.h, _some_columns(few.head, vocab_size), jnp.dtype(jnp.float32))
    t = few.transform.column()
    z = times(factor(t), swept_columns(x, t, vocab_size, ids[None, :]))
    others = jnp.where(ids[None, :] == few.targets[:, None], NEG_INF, z)
    # The target counts once, whether it is among these columns or not.
    lse = jnp.logaddexp(jax.nn.logsumexp(others, axis=1) + np.log(vocab_size / ids.size), target_logits(few, rows_of))
    if before is not None:
        lse = jnp.maximum(lse, expected_lse(few, before[at], rows_of))
    return Few(at, few, x, ids, lse)


def hard_whatever_is_kept(rule: Rule, p: Problem, probability: Array, share: float = 1) -> Array:
    """``[rows]``: those that leave out more than the tolerance whichever columns are kept, if not more than
    ``rule.most``; each column of ``probability`` stands for ``share`` columns.

    A row that keeps every probability from e on, and fills up with others below e, leaves out at least
    ``sum of p below e - e (columns left to fill)``, for any e.
    """

    def try_one(k: Array, least: Array) -> Array:
        e = at[k]
        below = probability < e
        room = jnp.maximum(rule.most - share * jnp.sum(~below, axis=1), 0)
        mass = share * jnp.sum(jnp.where(below, probability, 0.0), axis=1)
        return jnp.maximum(least, mass - e * room)

    # The rule.most-th largest is at most 1 / rule.most, about 4 / V.
    at = jnp.asarray([2.0**-k / p.call.vocab_size for k in range(-2, 14)], jnp.float32)
    least = lax.fori_loop(0, at.size, try_one, jnp.zeros(probability.shape[:1], jnp.float32))
    assert p.tolerance is not None
    return ~(least <= p.tolerance)


def costs_no_less(rule: Rule, p: Problem, hard: Array) -> Array:
    """Whether the exact kernels cost no more than a sweep and the hard rows alone, of which ``hard`` are a sample."""
    assert p.tolerance is not None
    share = jnp.mean(hard.astype(jnp.float32))
    return (1 + rule.cost(0, share) >= rule.dense) | (p.tolerance < LEAST_TOLERANCE)


def surely_hard(rule: Rule, few: Few) -> Array:
    """``[FEW]``: see :func:`hard_whatever_is_kept`; as far as the sampled columns tell."""
    t = few.p.transform.column()
    z = times(factor(t), swept_columns(few.x, t, few.p.call.vocab_size, few.columns[None, :]))
    return hard_whatever_is_kept(rule, few.p, jnp.exp(z - few.lse[:, None]), few.share)


def exact_is_cheaper(rule: Rule, few: Few) -> Array:
    """As far as the few rows tell."""
    return costs_no_less(rule, few.p, surely_hard(rule, few))


def lse_floor(p: Problem, counts: Array, before: Array | None) -> Array:
    """``[N]``: what the sweep may take the logsumexp to be at least; infinite for tokens that do not count. The
    targets' rows of the head are gathered ``kernels.PART`` at a time."""

    def guess(first: Array | int, count: int, _: Array) -> Array:
        return expected_lse(some(p, first, count), some(before, first, count), functools.partial(kernels.head_rows, p))

    floor = in_parts(guess, kernels.PART, jnp.zeros((p.n,), jnp.float32))
    return jnp.where(counts & valid_targets(p.targets, p.call.vocab_size) & (floor < jnp.inf), floor, jnp.inf)


@register
@dataclasses.dataclass(frozen=True)
class Active:
    """The active columns of all tokens."""

    index: Array  # [most] int32, ascending; beyond the vocabulary from ``count`` on
    count: Array  # () int32; 0 if dense
    dense: Array  # () bool: too many columns, or too many rows that miss the tolerance


def no_columns(rule: Rule, vocab: int) -> Active:
    """Empty result: no columns were chosen."""
    return Active(vocab + jnp.arange(rule.most, dtype=jnp.int32), jnp.int32(0), jnp.asarray(True))


def ranked(active: Array) -> tuple[Callable[[Array], Array], Array]:
    """``(k [S] -> [S] int32: where the k-th of those stands that ``active [V]`` has true, count () int32)``; beyond the
    last of them anything inside V.

    Its block of 128 is found among the blocks' running counts, its place there by a product with ones and zeros (exact:
    ranks in a block are at most 128), ``S V`` multiplications. A sort of V numbers is 2.8 MB of code at V = 151936, and
    a scatter of them is slow.
    """
    size, lane = active.size, jnp.arange(LANES, dtype=jnp.int32)
    blocks = -(-size // LANES)
    ones = jnp.pad(active, (0, blocks * LANES - size)).reshape(blocks, LANES).astype(jnp.bfloat16)
    upto = jnp.triu(jnp.ones((LANES, LANES), jnp.bfloat16))
    rank = jnp.matmul(ones, upto, preferred_element_type=jnp.float32)
    inside = jnp.where(ones > 0, rank, 0.0).astype(jnp.bfloat16)
    ends = jnp.cumsum(rank[:, -1].astype(jnp.int32))

    def find(k: Array) -> Array:
        before = ends[None, :] <= k[:, None]
        block = jnp.sum(before, axis=1, dtype=jnp.int32)
        own = k - jnp.max(jnp.where(before, ends[None, :], 0), axis=1) + 1
        one_hot = (block[:, None] == jnp.arange(blocks, dtype=jnp.int32)).astype(jnp.bfloat16)
        ranks = jnp.matmul(one_hot, inside, preferred_element_type=jnp.float32)
        at = jnp.sum(jnp.where(ranks == own.astype(jnp.float32)[:, None], lane, 0), axis=1)
        return jnp.minimum(block * LANES + at, size - 1)

    return find, ends[-1]


def positions(active: Array, size: int, step: int, last: bool = False) -> Array:
    """``[size]`` int32: where ``active [V]`` is true, ascending, in the first slots or the ``last`` ones; beyond V in
    the others. At most ``size`` are true; ``step`` slots are filled at a time, as long as there are any to fill."""
    find, count = ranked(active)
    unused = active.size + jnp.arange(size, dtype=jnp.int32)
    empty = size - count if last else jnp.int32(0)

    def fill(k: Array, index: Array) -> Array:
        wanted = k * step + jnp.arange(step, dtype=jnp.int32) - empty
        own = lax.dynamic_slice_in_dim(unused, k * step, step)
        own = jnp.where((wanted >= 0) & (wanted < count), find(wanted), own)
        return lax.dynamic_update_slice_in_dim(index, own, k * step, 0)

    return lax.fori_loop(empty // step, (empty + count + (step - 1)) // step, fill, unused)


def choose_columns(
    rule: Rule, p: Problem, maxima: Array, counts: Array, few: Few, stats: TokenStats, g: StatCotangents | None
) -> Active:
    """The active columns: those whose ``maxima [vocab_size]`` are above the threshold that costs least, and the
    targets of the tokens where ``counts [N]`` is true. ``stats`` and ``g`` are those of the few rows; ``g`` is ``None``
    where cotangents are not known yet."""
    assert p.tolerance is not None
    vocab_size, width = p.call.vocab_size, max(p.head.vocab, rule.most)
    maxima = jnp.pad(maxima, (0, width - maxima.size), constant_values=-jnp.inf)
    own = jnp.where(counts & valid_targets(p.targets, vocab_size), p.targets, width)
    level, number = rule.levels(maxima.at[own].set(jnp.inf, mode="drop"), p.tolerance)
    miss = misses(p.tolerance, stats, g, vocab_size)
    moves = jnp.ones(few.at.shape, bool) if g is None else g.any_nonzero()
    probability = row_passes.probabilities(few.x, few.p, stats, few.columns[None, :])
    some = _blocks(level[:vocab_size], vocab_size, 0)
    assert some is not None
    beyond = (some[:, None] > jnp.arange(len(rule.thresholds))[None, :]).astype(jnp.float32)
    mass = few.share * jnp.matmul(probability, beyond, precision=lax.Precision.HIGHEST).T
    hard = jnp.stack([jnp.sum(moves & miss(m + MASS_ERROR)) for m in mass]) / jnp.maximum(jnp.sum(moves), 1)
    best, dense = rule.cheapest(number, hard, vocab_size)
    index = positions((level <= best) & ~dense, rule.most, rule.slab, last=True)
    return Active(index, jnp.where(dense, 0, number[best]), dense)
