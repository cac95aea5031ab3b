"""Which vocabulary columns carry the gradient, on TPU: from the forward sweep's column maxima and a look at 128 rows.

    b_t    a lower bound of lse_t: its target's logit (:func:`lse_floor`), then the sweep's running logsumexp
    m_v    max over the tokens that count of z_tv - b_t, an upper bound of the column's largest log-probability
    a column is active at threshold e if m_v > log e, or if it is the target of a token that counts
    u_tj   mass outside the columns active at threshold e_j, for the few rows, from all of their logits
    the threshold that costs least is taken: columns for all rows, and rows whose u_tj misses the tolerance

A bound that is too low makes the active set larger, never wrong; and what a set leaves out is computed for every row
(``sparse.py``). Before the sweep the few rows tell whether it is worth it at all (:func:`exact_is_cheaper`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.core import row_passes
from logitless.core.problem import Problem
from logitless.core.pytree import register
from logitless.core.row_passes import column_ids
from logitless.core.stats import StatCotangents, TokenStats, valid_targets
from logitless.core.transform import forward
from logitless.head.linear import raw_logits
from logitless.head.pallas_tpu import kernels, lora
from logitless.head.pallas_tpu.gathered import MASS_ERROR, least_logits
from logitless.head.pallas_tpu.tiles import LANES
from logitless.head.sparse import active_columns as columns_of
from logitless.head.sparse.active_columns import HARD_ROW_COST, Rule
from logitless.head.sparse.column_gather import misses

LEAST_TOLERANCE = 2.0**-12
"""Below it ``MASS_ERROR`` would be too large a part."""

FEW = 128
"""Rows that are looked at first, and that choose the threshold."""


def tpu_rule(vocab: int, backward: int = 2) -> Rule:
    """For one set of columns for all tokens; ``backward``: 2, or 1 with a frozen head. A column has its logits made
    again, a hard row each of the exact kernels.

    Thresholds are higher than those of ``columns.chunk_rule``: one set for all tokens has more columns, and the bounds
    of the forward sweep are above the probabilities.
    """
    slab = min(columns_of.slab_width(vocab), 2048)
    return Rule(
        thresholds=(2.0**-1, 2.0**-2, 2.0**-3, 2.0**-4, 2.0**-5, 2.0**-6, 2.0**-8),
        per_column=1 + backward,
        per_hard_row=2 * backward * HARD_ROW_COST,
        dense=2 * backward,
        slab=slab,
        most=columns_of.most_columns(vocab, slab),
    )


@dataclasses.dataclass(frozen=True)
class Few:
    """Some of the rows that count, and all of their logits."""

    at: Array  # [FEW] int32: which rows
    p: Problem  # theirs
    x: Array  # [FEW, V]
    stats: TokenStats


def evenly_spaced(n: int, counts: Array | None) -> Array:
    """``[FEW]`` int32: rows evenly spaced over those where ``counts [n]`` is true."""
    find, total = (lambda k: k, jnp.int32(n)) if counts is None else ranked(counts)
    return find((jnp.arange(FEW, dtype=jnp.int32) * jnp.minimum(total, 2**24)) // FEW)  # the product stays below 2^31


def few_rows(p: Problem, counts: Array | None, stats: TokenStats | None = None) -> Few:
    """Rows evenly spaced over those where ``counts [N]`` is true; ``stats`` are those of all tokens over the whole
    vocabulary, where ``p`` has a shard of it."""
    at = evenly_spaced(p.n, counts)
    few = p.rows(lambda a: a[at])
    x = raw_logits(few.h, few.head, p.call.logits_dtype)
    return Few(at, few, x, row_passes.statistics(x, few) if stats is None else jax.tree.map(lambda a: a[at], stats))


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


def exact_is_cheaper(rule: Rule, few: Few) -> Array:
    """As far as the few rows tell."""
    probability = row_passes.probabilities(few.x, few.p, few.stats, column_ids(few.x.shape[1]))
    return costs_no_less(rule, few.p, hard_whatever_is_kept(rule, few.p, probability))


def lse_floor(p: Problem, counts: Array) -> Array:
    """``[N]``: the target's logit, below which the logsumexp cannot be; infinite for tokens that do not count."""
    y = jnp.clip(p.targets, 0, p.call.vocab_size - 1)

    def product(h: Array, w: Array) -> Array:
        w_y = kernels.head_rows(p, w, y).astype(jnp.float32)
        return jnp.sum(h.astype(jnp.float32) * w_y, axis=1)

    x_y = product(p.h, p.head.weight)
    if p.head.rank:
        x_y = x_y + lora.scale_of(p) * product(*lora.operands(p))
    if p.head.bias is not None:
        x_y = x_y + p.head.bias.astype(jnp.float32)[y]
    z_y = forward(least_logits(p, x_y), p.transform)
    return jnp.where(counts & valid_targets(p.targets, p.call.vocab_size) & (z_y < jnp.inf), z_y, jnp.inf)


@register
@dataclasses.dataclass(frozen=True)
class Active:
    """The active columns of all tokens."""

    index: Array  # [most] int32, ascending; beyond the vocabulary from ``count`` on
    count: Array  # () int32; 0 if dense
    dense: Array  # () bool: too many columns, or too many rows that miss the tolerance


def no_columns(rule: Rule, vocab: int) -> Active:
    """What there is where nobody has looked for columns."""
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
    rule: Rule,
    p: Problem,
    maxima: Array,
    counts: Array,
    few: Few,
    g: StatCotangents | None,
    limit: Array | None = None,
) -> Active:
    """The active columns: those whose ``maxima [vocab_size]`` are above the threshold that costs least, and the
    targets of the tokens where ``counts [N]`` is true. ``g`` are the cotangents of the few rows, ``None`` where they
    are not known yet; ``limit`` what a row may leave out here, if it is not the tolerance."""
    assert p.tolerance is not None
    vocab_size, width = p.call.vocab_size, max(p.head.vocab, rule.most)
    maxima = jnp.pad(maxima, (0, width - maxima.size), constant_values=-jnp.inf)
    own = jnp.where(counts & valid_targets(p.targets, vocab_size), p.targets, width)
    level, number = rule.levels(maxima.at[own].set(jnp.inf, mode="drop"), p.tolerance)
    miss = misses(p.tolerance if limit is None else limit, few.stats, g, vocab_size)
    moves = jnp.ones(few.at.shape, bool) if g is None else g.any_nonzero()
    mass = columns_of.masses(rule, few.x, few.p, few.stats, level[: p.head.vocab])
    hard = jnp.stack([jnp.sum(moves & miss(m + MASS_ERROR)) for m in mass]) / jnp.maximum(jnp.sum(moves), 1)
    best, dense = rule.cheapest(number, hard, vocab_size)
    index = positions((level <= best) & ~dense, rule.most, rule.slab)
    return Active(index, jnp.where(dense, 0, number[best]), dense)
