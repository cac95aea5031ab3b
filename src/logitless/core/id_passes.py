"""Passes over the rows of a chunk for calls with ids of each token: log-probabilities at ``K`` given ids, or a softmax
over given ids. Calls without ids use ``core/row_passes.py`` instead.

With ``p`` the softmax of a row, ``S`` its ids, ``mass`` the probability of ``S`` and ``R`` that of all other columns:

    logp_k      log p at id k     d logp_k / dz_v   = 1[v = id_k] - p_v
    mass        sum_S p           d mass / dz_v     = p_v R in S,  -p_v mass outside
    log_rest    log R             d log_rest / dz_v = -p_v in S,   p_v mass / R outside

Outside ``S`` a row of dlogits is therefore a line like every other (:func:`logitless.core.stats.dz_line`), taken from
the largest logit outside ``S``; the ``K`` columns of ``S`` are written over it. The sums of a row are swept with the
columns of ``S`` at ``-inf`` and merged with the sums over ``S``: one pass, and ``R`` without the difference
``1 - mass``.

A softmax over a support is that of a row which is ``-inf`` outside: ``[C, K]`` numbers, and zeros elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from logitless.core import row_passes
from logitless.core.row_passes import Line, Rows
from logitless.core.shapes import PyTree
from logitless.core.stats import (
    NEG_INF,
    LogitTransform,
    RowSums,
    SelectedStats,
    StatCotangents,
    TokenStats,
    dz,
    dz_at_target,
    dz_line,
    empty_sums,
    factor,
    finish,
    log_probability,
    merge,
    pull_back,
    row_sums,
    swept,
    times,
    valid_targets,
)

_HALF = -0.6931472
"""``log(1/2)``: a row has at most one id above."""


SumsOf = Callable[[Array, Rows], RowSums]
"""Sums over the columns of the rows ``x [C, V]``, as :func:`logitless.core.row_passes.sums`. A valid target's column is
``-inf``."""


def statistics(x: Array, p: Rows, sums_of: SumsOf = row_passes.sums) -> TokenStats:
    """Statistics of the rows ``x [C, V]``; every row is live. With ids, ``sums_of`` sweeps the columns outside them."""
    if p.ids is not None:
        return _selected_statistics(x, p, p.ids, sums_of)
    if p.support is not None:
        return _support_statistics(x, p, p.support)
    return row_passes.statistics(x, p)


def dx(x: Array, p: Rows, stats: TokenStats, g: StatCotangents, dtype: DTypeLike, tile: int | None = None) -> Array:
    """The cotangent of the rows ``x [C, V]``; see :func:`logitless.core.row_passes.dx`."""
    if p.ids is not None:
        return _selected_dx(x, p, p.ids, stats, g, dtype, tile)
    if p.support is not None:
        return _support_dx(x, p, p.support, stats, g, dtype, tile)
    return row_passes.dx(x, p, stats, g, dtype, tile)


# -- ids of a chunk's tokens -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RowIds:
    """Ids ``[C, K]`` of a chunk's tokens, with the columns to read and write, and flags for the ids that count."""

    ids: Array
    first: Array  # [C, K], the first place at which the same id stands
    there: Array  # [C, K], ids that name a column
    once: Array  # [C, K], the same, each id at its first place only
    valid: Array  # [C], every id names a column or is -1

    def gather(self, x: Array) -> Array:
        """``x [C, V]`` at the ids, ``[C, K]``; anything where an id names no column."""
        return jnp.take_along_axis(x, jnp.where(self.there, self.ids, 0), axis=1)

    def put(self, x: Array, values: Array | float) -> Array:
        """``x [C, V]`` with ``values [C, K]`` at the ids; a repeated id has a single value."""
        rows = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
        return x.at[rows, jnp.where(self.there, self.ids, x.shape[1])].set(values, mode="drop")

    def total(self, values: Array) -> Array:
        """For each place the sum of the ``values [C, K]`` of all places with its id."""
        rows = jnp.arange(values.shape[0], dtype=jnp.int32)[:, None]
        at_first = jnp.zeros_like(values).at[rows, self.first].add(values, mode="promise_in_bounds")
        return jnp.take_along_axis(at_first, self.first, axis=1)


def row_ids(ids: Array, vocab_size: int) -> RowIds:
    """Ids ``[C, K]``, looked through: -1 is none, others outside ``[0, vocab_size)`` are invalid."""
    order = jnp.argsort(ids, axis=1, stable=True).astype(jnp.int32)
    in_order = jnp.take_along_axis(ids, order, axis=1)
    new = jnp.concatenate([jnp.ones_like(ids[:, :1], bool), in_order[:, 1:] != in_order[:, :-1]], axis=1)
    place = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]
    run = lax.cummax(jnp.where(new, place, 0), axis=1)  # first index per run of equal ids
    rows = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    first = (
        jnp.zeros_like(order)
        .at[rows, order]
        .set(jnp.take_along_axis(order, run, axis=1), mode="promise_in_bounds", unique_indices=True)
    )
    there = valid_targets(ids, vocab_size)
    valid = jnp.all(there | (ids == -1), axis=1)
    return RowIds(ids, first, there, there & (first == place), valid)


def _column(tree: PyTree) -> PyTree:
    """``[C]`` arrays as ``[C, 1]``."""
    return jax.tree.map(lambda a: a[:, None], tree)


def _uncapped(x: Array, p: Rows) -> tuple[Array, LogitTransform]:
    """Rows and a transform without softcap that give the same swept quantities and factor: at ``-inf`` a softcap has
    mass."""
    t = p.transform
    if t.softcap is None:
        return x, t
    return swept(x, t.column()), dataclasses.replace(t, softcap=None, scale=t.softcap)


# -- log-probabilities at ids ----------------------------------------------------------------------------------------


def _selected_statistics(x: Array, p: Rows, ids: Array, sums_of: SumsOf) -> TokenStats:
    """Statistics of the rows, and of the selected ids."""
    at, vocab_size = row_ids(ids, p.call.vocab_size), p.call.vocab_size
    own = p.targets[:, None]
    x, transform = _uncapped(x, p)
    k, t = factor(transform), transform.column()
    has_target = valid_targets(p.targets, vocab_size)
    x_ids, x_y = at.gather(x), jnp.take_along_axis(x, jnp.where(has_target[:, None], own, 0), axis=1)
    # Read before the columns are overwritten, so that the rows need no copy.
    x, x_ids, x_y = lax.optimization_barrier((x, x_ids, x_y))
    u_ids, u_y = swept(x_ids, t), swept(x_y, t)[:, 0]
    apart = row_ids(jnp.concatenate([ids, own], axis=1), vocab_size).put(x, NEG_INF)
    outside = sums_of(apart, dataclasses.replace(p, transform=transform))  # of neither the ids nor the target
    is_target = at.once & (ids == own)
    inside = row_sums(jnp.where(at.once, u_ids, NEG_INF), is_target, factor(t))
    whole = dataclasses.replace(merge(outside, inside, k), target=u_y)
    stats = finish(whole, has_target & at.valid, p.transform)
    alone = _sums_of_one(u_y, has_target & ~jnp.any(is_target, axis=1))
    rest = merge(outside, alone, k)
    return dataclasses.replace(stats, selected=selected(u_ids, at, stats, rest, k))


def _sums_of_one(u: Array, here: Array) -> RowSums:
    """Sums over one column ``u [C]`` of each row; over none where it is not ``here``, or has no mass."""
    empty, here = empty_sums(u.shape), here & (u != NEG_INF)
    return dataclasses.replace(empty, maximum=jnp.where(here, u, NEG_INF), total=jnp.where(here, 1.0, 0.0))


def selected(u: Array, at: RowIds, stats: TokenStats, rest: RowSums, k: Array | None) -> SelectedStats:
    """Log-probabilities at the ids from their own ``u [C, K]``, the row's statistics and the sums over all other
    columns."""
    wide, seen = _column(stats), rest.maximum != NEG_INF
    u = jnp.where(at.there, u, stats.peak[:, None])
    log_p = log_probability(u, k if k is None or not k.ndim else k[:, None], wide)
    centre = jnp.where(seen, rest.maximum, stats.peak)
    log_total = jnp.log(jnp.where(seen, rest.total, 1.0))
    log_rest = jnp.where(seen, jnp.minimum(log_probability(centre, k, stats) + log_total, 0.0), NEG_INF)
    # A column with almost all of the mass: its log-probability is known from what the others have.
    leads = at.there & (log_p > _HALF)
    p = jnp.exp(log_p)
    others = jnp.exp(log_rest) + jnp.sum(jnp.where(at.once & ~leads, p, 0.0), axis=1)
    others = jnp.where(jnp.any(leads, axis=1), others, 0.0)
    logp = jnp.where(leads, jnp.log1p(-others)[:, None], log_p)
    total = jnp.sum(jnp.where(at.once, jnp.exp(logp), 0.0), axis=1)
    light = total < 0.5
    log_rest = jnp.where(light, jnp.log1p(-jnp.where(light, total, 0.0)), log_rest)
    mass = jnp.where(light, total, -jnp.expm1(log_rest))

    def known(x: Array) -> Array:
        return jnp.where(at.valid.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.nan)

    logp, total = jnp.where(at.there, logp, 0.0), jnp.where(seen, rest.total, 1.0)
    return SelectedStats(known(logp), known(mass), known(log_rest), rest.maximum, total)


def _selected_dx(
    x: Array, p: Rows, ids: Array, stats: TokenStats, g: StatCotangents, dtype: DTypeLike, tile: int | None
) -> Array:
    """A line outside the ids, and the ids' own columns over it."""
    own, gs, at = stats.selected, g.selected, row_ids(ids, p.call.vocab_size)
    assert own is not None and gs is not None
    t = p.transform.column()
    k, moves, wide = factor(t), g.any_nonzero()[:, None], _column(stats)
    g_ids = jnp.where(at.there, gs.logp, 0.0)
    total = jnp.sum(g_ids, axis=1)
    # Outside the ids.
    outside = _column(dataclasses.replace(g, lse=g.lse - total - gs.mass * own.mass, selected=None))
    centre = jnp.where(own.rest_peak != NEG_INF, own.rest_peak, stats.peak)[:, None]
    # p_v / R, as a softmax over the other columns alone.
    weight = jnp.where(own.rest_peak != NEG_INF, gs.log_rest * own.mass / own.rest_total, 0.0)[:, None]
    a, b = dz_line(centre, wide, outside, k)
    x_y = jnp.take_along_axis(x, jnp.clip(p.targets, 0, x.shape[1] - 1)[:, None], axis=1)
    x, x_ids, x_y = lax.optimization_barrier((x, at.gather(x), x_y))  # dx is written over x
    of_target = jnp.exp(jnp.minimum(times(k, swept(x_y, t) - centre), 0.0))
    at_target = dz_at_target(wide, outside) + weight * of_target
    a, b, at_target = (jnp.where(moves, c, 0.0) for c in (a + weight, b, at_target))
    line = Line(centre, a, b, at_target, moves)
    # At the ids.
    inside, of_id = _cotangents_at_ids(at, own, g, gs, g_ids, total)
    d = dz(swept(x_ids, t), ids == p.targets[:, None], wide, inside, k) + of_id * -jnp.expm1(own.logp)
    d = pull_back(jnp.where(moves, d, 0.0), x_ids, t).astype(dtype)
    return at.put(row_passes.dx(x, p, stats, g, dtype, tile, lax.optimization_barrier(line)), d)


def _cotangents_at_ids(
    at: RowIds, own: SelectedStats, g: StatCotangents, gs: SelectedStats, g_ids: Array, total: Array
) -> tuple[StatCotangents, Array]:
    """``(those of the row's statistics in the columns of its ids, that of each id)``; ``total`` sums ``g_ids``."""
    of_id = at.total(g_ids)
    of_row = g.lse + gs.mass * jnp.exp(own.log_rest) - gs.log_rest
    # Minus the cotangents of all other ids; a sum that leaves the leading id out where a difference would cancel.
    leads = at.there & (own.logp > _HALF)
    others = jnp.sum(jnp.where(leads, 0.0, g_ids), axis=1)[:, None]
    shared = jnp.where(leads, -others, of_id - total[:, None]) + of_row[:, None]
    return dataclasses.replace(_column(dataclasses.replace(g, selected=None)), lse=shared), of_id


# -- a softmax over given ids ----------------------------------------------------------------------------------------


def restricted(u: Array, support: Array, vocab_size: int) -> tuple[Array, Array]:
    """``u [C, V]`` with ``-inf`` outside the ids of each row that has any, and which rows have no invalid one."""
    at = row_ids(support, vocab_size)
    inside = at.put(jnp.zeros(u.shape, bool), True) | jnp.all(support == -1, axis=1)[:, None]
    return jnp.where(inside, u, NEG_INF), at.valid


def in_support(targets: Array, support: Array) -> Array:
    """Which targets are among the ids of their token; all targets of tokens without ids."""
    return jnp.any(support == targets[:, None], axis=1) | jnp.all(support == -1, axis=1)


def _support_statistics(x: Array, p: Rows, support: Array) -> TokenStats:
    """Statistics of the softmax over the ids of each row; over all columns where it has none."""
    at, t = row_ids(support, p.call.vocab_size), p.transform.column()
    whole = row_passes.statistics(x, dataclasses.replace(p, support=None))
    u = jnp.where(at.once, swept(at.gather(x), t), NEG_INF)
    is_target = at.once & (support == p.targets[:, None])
    found = finish(row_sums(u, is_target, factor(t)), at.valid & jnp.any(is_target, axis=1), p.transform)
    limited = jnp.any(support != -1, axis=1)
    return jax.tree.map(lambda a, b: jnp.where(limited, a, b), found, whole)


def _support_dx(
    x: Array, p: Rows, support: Array, stats: TokenStats, g: StatCotangents, dtype: DTypeLike, tile: int | None
) -> Array:
    """Zeros in a row with a support, and its ids' own columns over them."""
    at, t = row_ids(support, p.call.vocab_size), p.transform.column()
    limited = jnp.any(support != -1, axis=1)
    x, x_ids = lax.optimization_barrier((x, at.gather(x)))  # dx is written over x
    d = dz(swept(x_ids, t), support == p.targets[:, None], _column(stats), _column(g), factor(t))
    d = pull_back(d, x_ids, t).astype(dtype)
    unlimited = jax.tree.map(lambda a: jnp.where(limited, 0.0, a), g)
    base = row_passes.dx(x, dataclasses.replace(p, support=None), stats, unlimited, dtype, tile)
    return dataclasses.replace(at, there=at.there & limited[:, None]).put(base, d)
