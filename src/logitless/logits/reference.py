"""Dense plain JAX over logits ``[N, V]``, differentiated by JAX: the baseline that every other backend is held to.

Float32 copies of the logits may live in memory; nothing here is hand-derived but the statistics' formulas.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core import id_passes
from logitless.core.backend import Cost, PlainJax, Way
from logitless.core.divergences import dominating, finish_pair, log_probabilities, pair_dz, pair_sums
from logitless.core.problem import Given, Loss, Problem
from logitless.core.promotion import own_promotion
from logitless.core.row_passes import column_ids, swept_columns, teacher_logits, teacher_statistics
from logitless.core.stats import (
    NEG_INF,
    StatCotangents,
    TokenStats,
    dz,
    factor,
    finish,
    masked_stats,
    row_sums,
    valid_targets,
)
from logitless.objectives.objective import Divergence


def token_stats(p: Problem[Given]) -> TokenStats:
    """Statistics ``[N]`` of flattened tokens: ``logits [N, V]`` in any float dtype, ``targets [N]`` int32."""
    x, zero = p.logits, jnp.zeros((), p.logits.dtype)
    if p.live is not None:
        # A NaN in a dead row must reach neither the statistics nor, through 0 * NaN, a gradient.
        x = jnp.where(p.live[:, None], x, zero)
    ids, vocab_size = column_ids(x.shape[-1]), p.call.vocab_size
    if vocab_size < x.shape[-1]:
        # Nor a NaN in a padded column, through the slope of the softcap.
        x = jnp.where(ids < vocab_size, x, zero)
    t = p.transform.column()
    u, k, is_target = swept_columns(x, t, vocab_size, ids), factor(t), ids == p.targets[:, None]
    valid = valid_targets(p.targets, vocab_size)
    if p.support is not None:
        u, known = id_passes.restricted(u, p.support, vocab_size)
        valid &= known & id_passes.in_support(p.targets, p.support)
    at = None if p.ids is None else id_passes.row_ids(p.ids, vocab_size)
    valid = valid if at is None else valid & at.valid
    stats = finish(row_sums(u, is_target, k), valid, p.transform)
    stats = dataclasses.replace(stats, entropy=_entropy(u, k, is_target, stats))
    if at is not None:
        rest = row_sums(at.put(u, NEG_INF), jnp.zeros_like(is_target), k)
        found = id_passes.selected(at.gather(u), at, stats, rest, factor(p.transform))
        stats = dataclasses.replace(stats, selected=found)
    return masked_stats(stats if p.teacher is None else _with_teacher(p, u, k, stats), p.live)


def _with_teacher(p: Problem[Given], u: Array, k: Array | None, stats: TokenStats) -> TokenStats:
    """The statistics with the pair's statistics added."""
    teacher, t = p.teacher, jax.lax.stop_gradient(teacher_logits(p))
    assert teacher is not None
    if p.live is not None:
        t = jnp.where(p.live[:, None], t, jnp.zeros((), t.dtype))
    p = dataclasses.replace(p, teacher=dataclasses.replace(teacher, source=Given(t)))
    other, column = teacher_statistics(p), teacher.transform.column()
    v = swept_columns(t, column, p.call.vocab_size, column_ids(t.shape[-1]))
    log_q = log_probabilities(v, factor(column), jax.tree.map(lambda a: a[:, None], other))
    log_p, apart = _log_p(u, k, stats)
    sums = pair_sums(teacher.divergence, log_p, log_q, apart, teacher.mix)
    found = finish_pair(teacher.divergence, stats, other, sums, teacher.mix)
    return dataclasses.replace(found, divergence=_divergence(teacher.divergence, u, k, log_q, teacher.mix, found))


def _log_p(u: Array, k: Array | None, stats: TokenStats) -> tuple[Array, Array]:
    """``(log p, where a column dominates its row)``."""
    wide = jax.tree.map(lambda a: a[:, None], stats)
    log_p = log_probabilities(u, k, wide)
    return log_p, dominating(log_p, wide)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _divergence(
    kind: Divergence, u: Array, k: Array | None, log_q: Array, mix: Array | None, stats: TokenStats
) -> Array:
    """The divergence in ``stats``, with its closed gradient: what JAX would make of the sums cancels at a peak."""
    assert stats.divergence is not None
    return stats.divergence


@_divergence.defjvp
@own_promotion
def _divergence_jvp(kind: Divergence, primals: tuple[Any, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    """As :func:`_entropy_jvp`: the divergence depends on ``z`` alone, and the rule itself can be differentiated."""
    u, k, log_q, mix, stats = primals
    du, dk = tangents[:2]
    there = u > NEG_INF
    inside = jnp.where(there, u, jax.lax.stop_gradient(stats.peak)[:, None])
    moved = du if k is None else du * k + inside * dk
    log_p, apart = _log_p(u, k, stats)
    d = pair_dz(kind, log_p, log_q, apart, jax.tree.map(lambda a: a[:, None], stats), mix)
    return stats.divergence, jnp.sum(jnp.where(there, d, 0.0) * jnp.where(there, moved, 0.0), axis=-1)


@jax.custom_jvp
def _entropy(u: Array, k: Array | None, is_target: Array, stats: TokenStats) -> Array:
    """The entropy in ``stats`` with ``-p (log p + H)`` as its gradient with respect to ``z = k u``.

    The one gradient that JAX would lose: in a collapsed row the sum of exponentials is 1 to all its digits, and with
    what is beyond them goes the leading column's gradient.
    """
    return stats.entropy


@_entropy.defjvp
@own_promotion
def _entropy_jvp(primals: tuple[Any, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    """The entropy depends on ``z`` alone: the tangents of ``stats`` are not looked at. The rule itself can be
    differentiated, by every path through ``u``, ``k`` and ``stats``."""
    u, k, is_target, stats = primals
    du, dk = tangents[:2]
    there = u > NEG_INF  # a column that is not has no gradient of any order, and no 0 * inf
    inside = jnp.where(there, u, jax.lax.stop_gradient(stats.peak)[:, None])
    moved = du if k is None else du * k + inside * dk
    zero = jnp.zeros_like(stats.entropy)
    known = dataclasses.replace(stats, entropy=_entropy(u, k, is_target, stats))
    known, one = jax.tree.map(lambda x: x[:, None], (known, StatCotangents(zero, zero + 1.0, zero)))
    d = jnp.where(there, dz(inside, is_target & there, known, one, k), 0.0)
    return stats.entropy, jnp.sum(d * jnp.where(there, moved, 0.0), axis=-1)


@dataclasses.dataclass(frozen=True)
class Reference(PlainJax[Problem[Given]]):
    """The dense backend; JAX differentiates :meth:`statistics`, so no passes are defined here."""

    name: ClassVar[str] = "reference"
    in_forward: ClassVar[bool] = False

    def describe(self, p: Problem[Given], way: Way) -> Cost:
        """What XLA makes of it is not known; ``p`` has arrays or shapes."""
        size = p.n * p.logits.shape[-1] * p.logits.dtype.itemsize
        moved = f"up to XLA; at least {3 * size:,} B"
        return Cost("dense plain JAX, differentiated by JAX", "0", moved, counts=(0, 0, 0))

    def statistics(self, p: Problem[Given], loss: Loss | None = None) -> tuple[TokenStats, None]:
        """Statistics of flattened tokens."""
        return token_stats(p.counting(loss)), None
