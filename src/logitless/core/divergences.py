"""Divergences of two softmaxes over one vocabulary, row by row: the student's ``p``, the teacher's ``q``.

With ``b = mix`` and ``m = (1 - b) p + b q``:

    forward_kl   KL(q || p) = sum q (log q - log p)          dz = p - q
    reverse_kl   KL(p || q) = sum p d,  d = log p - log q    dz = p (d - sum p d)
    jsd          b KL(q || m) + (1 - b) KL(p || m)           dz = (1 - b) p (d - sum p d),  d = log p - log m

``dz`` is the gradient with respect to the student's transformed logits. The teacher is a constant.

Numerics. ``KL(f || t)`` is a sum of terms ``f (exp(x) - 1 - x)`` with ``x = log t - log f``. None of them is negative:
equal rows have a divergence of exactly 0, and near rows lose no digits. In a row whose peak holds more than 0.6 of the
student's mass, the peak is left out of the sums and added at the end, from ``1 - p`` and ``1 - q``, which are sums over
the other columns: there ``log p`` is 0 to all digits of a logsumexp, and ``p (d - sum p d)`` and ``p - q`` cancel.
"""

from __future__ import annotations

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.core.chunk_size import platform
from logitless.core.pytree import register
from logitless.core.stats import NEG_INF, PairStats, RowSums, TokenStats, times
from logitless.objectives.objective import Divergence

DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)
HALF, _DOMINATED, _DOMINATED_SHARD = -0.6931472, -0.5108256, -0.5276327
"""``log 0.5`` and ``log 0.6``. A row whose largest probability is above 0.6 is dominated, and its peak is the column
above 0.5. The gap between the two is for logits that are made again, on other shards or in another loop, with other
rounding: a row keeps exactly one peak."""


@register
@dataclasses.dataclass(frozen=True)
class PairSums:
    """Sums of a sweep over the columns of both distributions, per row; those of column ranges and shards add up.

    All but the last leave out the student's peak in a row that it dominates.
    """

    value: Array  # the divergence
    moved: Array  # sum of p d
    rest: Array  # sum of p
    teacher_rest: Array  # sum of q
    log_q_at_peak: Array  # log q at the peak; 0 in a row without a dominating column


def empty_pair_sums(shape: tuple[int, ...]) -> PairSums:
    """The neutral element of :func:`merge_pairs`."""
    zero = jnp.zeros(shape, jnp.float32)
    return PairSums(zero, zero, zero, zero, zero)


def merge_pairs(a: PairSums, b: PairSums) -> PairSums:
    """The sums over two disjoint column ranges together."""
    return jax.tree.map(jnp.add, a, b)


def _kl_terms(f: Array, t: Array, x: Array) -> Array:
    """``f (exp(x) - 1 - x)`` with ``x = log(t / f)``: terms of ``KL(f || t)``; ``t`` where ``f`` is 0."""
    near = (jnp.abs(x) < 0.5) & (f > 0)
    s = jnp.where(near, x, 0.0)
    # exp(s) - 1 - s up to s^9: the rest is below 1e-9 of the leading term.
    series = jnp.full_like(s, 1.0 / 362880)
    for factorial in (40320, 5040, 720, 120, 24, 6, 2):
        series = series * s + 1.0 / factorial
    far = jnp.where(f > 0, (t - f) - f * jnp.where(f > 0, x, 0.0), t)
    return jnp.where(near, f * s * s * series, far)


def _log_ratio(log_p: Array, log_q: Array) -> Array:
    """``log(q / p)``; 0 where neither has mass."""
    return jnp.where((log_p > NEG_INF) | (log_q > NEG_INF), log_q - log_p, 0.0)


def _to_mixture(x: Array, mix: Array) -> tuple[Array, Array]:
    """``(log(m / p), log(m / q))`` from ``x = log(q / p)``, each relative to the larger of the two."""
    teacher_leads = x > 0
    below = jnp.log1p(jnp.where(teacher_leads, 1.0 - mix, mix) * jnp.expm1(-jnp.abs(x)))  # log(m / the larger one)
    return jnp.where(teacher_leads, x + below, below), jnp.where(teacher_leads, below, below - x)


def _difference(kind: Divergence, log_p: Array, log_q: Array, mix: Array | None) -> Array:
    """``d`` where the student has mass, 0 elsewhere; unused by the forward KL."""
    x = _log_ratio(log_p, log_q)
    if kind == "jsd":
        assert mix is not None
        x, _ = _to_mixture(x, mix)
    return jnp.where(jnp.exp(log_p) > 0, -x, 0.0)


def divergence_terms(kind: Divergence, log_p: Array, log_q: Array, mix: Array | None) -> Array:
    """Terms of the divergence at each column."""
    p, q, x = jnp.exp(log_p), jnp.exp(log_q), _log_ratio(log_p, log_q)
    if kind == "forward_kl":
        return _kl_terms(q, p, -x)
    if kind == "reverse_kl":
        return _kl_terms(p, q, x)
    assert mix is not None
    m, (of_p, of_q) = (1.0 - mix) * p + mix * q, _to_mixture(x, mix)
    return mix * _kl_terms(q, m, of_q) + (1.0 - mix) * _kl_terms(p, m, of_p)


@jax.custom_jvp
def _sums(columns: tuple[Array, ...]) -> tuple[Array, ...]:
    """Sums over the last axis, for arrays with a common shape.

    On a GPU the sums are a single reduction with several operands: XLA computes what the operands share once an
    element. With a reduction for each it stores what is dear to compute, a probability of every column, and reads it
    back.
    """
    if platform() != "gpu":
        return tuple(jnp.sum(x, axis=-1) for x in columns)

    def add(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(x + y for x, y in zip(a, b, strict=True))

    zeros = tuple(jnp.zeros((), x.dtype) for x in columns)
    return tuple(lax.reduce(columns, zeros, add, (columns[0].ndim - 1,)))


@_sums.defjvp
def _sums_jvp(
    primals: tuple[tuple[Array, ...]], tangents: tuple[tuple[Array, ...]]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    return _sums(*primals), tuple(jnp.sum(t, axis=-1) for t in tangents[0])


def pair_sums(kind: Divergence, log_p: Array, log_q: Array, apart: Array, mix: Array | None = None) -> PairSums:
    """Sums over the last axis of ``log_p, log_q [..., V]``; ``apart`` marks a column that dominates the student's row
    (:func:`dominating`)."""

    p = jnp.exp(log_p)
    moved = p * _difference(kind, log_p, log_q, mix)
    outside = (divergence_terms(kind, log_p, log_q, mix), moved, p, jnp.exp(log_q))
    value, moved, p, q, at_peak = _sums((*(jnp.where(apart, 0.0, x) for x in outside), jnp.where(apart, log_q, 0.0)))
    return PairSums(value, moved, p, q, at_peak)


def is_dominated(s: TokenStats, shard: bool = False) -> Array:
    """Rows of the student that one column dominates. ``shard``: over a part of the columns (:func:`of_all_columns`),
    where the bound lies lower, so that a row which is dominated over all columns is so on its peak's shard, however
    both are rounded."""
    return s.max_logp > (_DOMINATED_SHARD if shard else _DOMINATED)


def dominating(log_p: Array, s: TokenStats, shard: bool = False) -> Array:
    """The column that dominates the student's row: exactly one of a dominated row, none of any other. ``s`` broadcasts
    against ``log_p``; ``shard`` as in :func:`is_dominated`."""
    return (log_p > HALF) & is_dominated(s, shard)


def rounded_alike(stats: TokenStats, teacher: TokenStats) -> TokenStats:
    """``teacher`` with the student's numbers in rows where the two differ by the rounding of a sum.

    Two compiled loops may round the sums of equal rows differently, and then their divergence is not exactly 0. Where
    the rows are not equal, ``log q`` moves by no more than its own rounding.
    """
    apart = jnp.abs(stats.max_logp - teacher.max_logp) > 5e-7 * jnp.minimum(jnp.abs(stats.max_logp), 1.0)
    alike = (stats.peak == teacher.peak) & ~apart
    return dataclasses.replace(teacher, max_logp=jnp.where(alike, stats.max_logp, teacher.max_logp))


def finish_pair(
    kind: Divergence, stats: TokenStats, teacher: TokenStats, sums: PairSums, mix: Array | None, shard: bool = False
) -> TokenStats:
    """The student's statistics, with the pair's statistics filled in."""
    dominated = is_dominated(stats, shard)
    rest = jnp.where(dominated, sums.rest, 0.0)
    shared = dominated & (sums.log_q_at_peak > HALF)
    log_p = jnp.log1p(-rest)
    log_q = jnp.where(shared, jnp.log1p(-jnp.where(shared, sums.teacher_rest, 0.0)), sums.log_q_at_peak)
    d = _difference(kind, log_p, log_q, mix)
    value = sums.value + jnp.where(dominated, divergence_terms(kind, log_p, log_q, mix), 0.0)
    p = jnp.exp(log_p)
    mean = sums.moved + jnp.where(dominated, p * d, 0.0)
    if kind == "forward_kl":
        at_peak = jnp.where(shared, sums.teacher_rest - rest, p - jnp.exp(log_q))
    else:
        at_peak = p * (rest * d - sums.moved)
    pair = PairStats(teacher.peak, teacher.max_logp, mean, at_peak)
    return dataclasses.replace(stats, divergence=value, teacher_entropy=teacher.entropy, pair=pair)


# -- shards of the columns: softmaxes of their own, put together -----------------------------------------------------


@register
@dataclasses.dataclass(frozen=True)
class ShardOfPair:
    """What a shard of the columns knows of both distributions after one sweep; the pair's sums are those of the
    softmaxes over the shard alone."""

    sums: RowSums
    teacher_sums: RowSums
    own: TokenStats  # over the shard alone
    teacher: TokenStats
    pair: PairSums


def log_mass(own: TokenStats, whole: TokenStats, k: Array | None) -> Array:
    """Log-probability of a shard, from its own statistics and those of all columns; relative to the largest logits, as
    all log-probabilities here."""
    found = times(k, own.peak - whole.peak) + whole.max_logp - own.max_logp
    return jnp.where(own.peak == NEG_INF, NEG_INF, found)


def of_all_columns(kind: Divergence, s: ShardOfPair, stats: TokenStats, log_p: Array, log_q: Array) -> PairSums:
    """A shard's summand of the :class:`PairSums` over all columns, for the two KLs.

    ``log_p`` and ``log_q`` are the shard's log-probabilities, ``stats`` the student's over all columns. With ``f`` the
    distribution that a KL is taken of, ``t`` the other one, ``F`` and ``T`` their masses on the shard and ``x = log(T /
    F)``, the terms of the shard sum to ``F KL_own + F (exp(x) - 1 - x)``. Where the row's peak is on this shard and is
    left out, ``KL_own`` leaves it out as well, and the terms to ``F (KL_own + (t - f) x) + t F (exp(x) - 1 - x)`` with
    ``f`` and ``t`` the rest of either beside the peak. A JSD has no such form: its mixture differs on each shard.
    """
    alone = finish_pair(kind, s.own, s.teacher, s.pair, None, shard=True)
    assert alone.divergence is not None and alone.pair is not None
    here = is_dominated(stats) & (s.own.peak == stats.peak)  # the row's peak is left out of this shard's sums
    mass, other = jnp.exp(log_p), jnp.exp(log_q)
    delta = -_log_ratio(log_p, log_q)
    if kind == "forward_kl":
        f, t, x, rest, rest_of_other = other, mass, delta, s.pair.teacher_rest, s.pair.rest
    else:
        f, t, x, rest, rest_of_other = mass, other, -delta, s.pair.rest, s.pair.teacher_rest
    between = _kl_terms(f, t, x)

    def scaled(by: Array, value: Array) -> Array:
        return jnp.where(by == 0, 0.0, by * jnp.where(by == 0, 0.0, value))

    without_peak = scaled(f, s.pair.value + (rest_of_other - rest) * x) + scaled(rest_of_other, between)
    value = jnp.where(here, without_peak, scaled(f, alone.divergence) + between)
    moved = jnp.where(here, s.pair.moved + s.pair.rest * delta, alone.pair.mean + delta)
    return PairSums(
        value=value,
        moved=scaled(mass, moved),
        rest=mass * jnp.where(here, s.pair.rest, 1.0),
        teacher_rest=other * jnp.where(here, s.pair.teacher_rest, 1.0),
        log_q_at_peak=jnp.where(here, s.pair.log_q_at_peak + log_q, 0.0),
    )


# -- gradients -------------------------------------------------------------------------------------------------------


def teacher_stats(s: TokenStats) -> TokenStats:
    """The numbers of the teacher that its log-probabilities are taken from, out of a pair's statistics."""
    assert s.pair is not None
    return dataclasses.replace(s, peak=s.pair.teacher_peak, max_logp=s.pair.teacher_max_logp)


def log_probabilities(u: Array, k: Array | None, s: TokenStats) -> Array:
    """:func:`logitless.core.stats.log_probability`, with the same bits for a student and a teacher that are equal: the
    select keeps a compiler from contracting product and sum for one of them."""
    product = times(k, u - s.peak)
    return jnp.where(jnp.isnan(u), u, product) + s.max_logp


def pair_dz(
    kind: Divergence, log_p: Array, log_q: Array, apart: Array, s: TokenStats, mix: Array | None = None
) -> Array:
    """``d divergence / d z`` of the student's transformed logits; ``s`` broadcasts against ``log_p``."""
    assert s.pair is not None
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    if kind == "forward_kl":
        return jnp.where(apart, s.pair.at_peak, p - q)
    d = _difference(kind, log_p, log_q, mix)
    dz = jnp.where(apart, s.pair.at_peak, jnp.where(p > 0, p * (d - s.pair.mean), 0.0))
    return dz if kind == "reverse_kl" else (1.0 - jnp.asarray(mix, jnp.float32)) * dz
