"""Divergences of two softmaxes over one vocabulary, row by row: the student's ``p``, the teacher's ``q``.

With ``b = mix`` and ``m = (1 - b) p + b q``:

    forward_kl   KL(q || p) = sum q (log q - log p)          dz = p - q
    reverse_kl   KL(p || q) = sum p d,  d = log p - log q    dz = p (d - sum p d)
    jsd          b KL(q || m) + (1 - b) KL(p || m)           dz = (1 - b) p (d - sum p d),  d = log p - log m

``dz`` is the gradient with respect to the student's transformed logits. The teacher is a constant.

Numerics. Every ``log p`` is taken relative to its row's peak (``stats.log_probability``), so it is exact at the peak.
``KL(f || t)`` is a sum of terms ``f (exp(x) - 1 - x)`` with ``x = log t - log f``. None of them is negative: equal rows
have a divergence of exactly 0, and near rows lose no digits. Where the peak holds more than half of a row's mass,
``p_v (d_v - sum p d)`` cancels at the peak: there the sum over the *other* columns is subtracted. ``p - q`` is a
difference of two ``expm1`` where both probabilities are above one half.
"""

from __future__ import annotations

import dataclasses
from typing import get_args

import jax.numpy as jnp
from jax import Array

from logitless.core.pytree import register
from logitless.core.stats import NEG_INF, PairStats, TokenStats, log_probability
from logitless.objectives.objective import Divergence

DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)
_HALF = -0.6931472
"""``log(1/2)``: a column above it holds more than half of its row's mass, and no other does."""


@register
@dataclasses.dataclass(frozen=True)
class PairSums:
    """Sums of a sweep over the columns of both distributions, per row; those of column ranges and shards add up."""

    value: Array  # the divergence
    others: Array  # sum of p d over the columns below the student's peak
    peak: Array  # p d at the student's peak


def empty_pair_sums(shape: tuple[int, ...]) -> PairSums:
    """The neutral element of :func:`merge_pairs`."""
    zero = jnp.zeros(shape, jnp.float32)
    return PairSums(zero, zero, zero)


def merge_pairs(a: PairSums, b: PairSums) -> PairSums:
    """The sums over two disjoint column ranges together."""
    return PairSums(a.value + b.value, a.others + b.others, a.peak + b.peak)


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
    down, up = jnp.minimum(x, 0.0), jnp.maximum(x, 0.0)
    of_p = jnp.log1p(mix * jnp.expm1(down))  # where p is the larger one: log(m / p)
    of_q = jnp.log1p((1.0 - mix) * jnp.expm1(-up))  # where q is: log(m / q)
    return jnp.where(x > 0, x + of_q, of_p), jnp.where(x > 0, of_q, of_p - x)


def _difference(kind: Divergence, log_p: Array, log_q: Array, mix: Array | None) -> Array:
    """``d`` where the student has mass, 0 elsewhere; unused by the forward KL."""
    x = _log_ratio(log_p, log_q)
    if kind == "jsd":
        assert mix is not None
        x, _ = _to_mixture(x, mix)
    return jnp.where(jnp.exp(log_p) > 0, -x, 0.0)


def pair_sums(kind: Divergence, log_p: Array, log_q: Array, at_peak: Array, mix: Array | None = None) -> PairSums:
    """Sums over the last axis of ``log_p, log_q [..., V]``; ``at_peak`` marks the student's largest logit."""
    p, q, x = jnp.exp(log_p), jnp.exp(log_q), _log_ratio(log_p, log_q)
    if kind == "forward_kl":
        value = jnp.sum(_kl_terms(q, p, -x), axis=-1)
        return PairSums(value, jnp.zeros_like(value), jnp.zeros_like(value))
    if kind == "reverse_kl":
        value = jnp.sum(_kl_terms(p, q, x), axis=-1)
    else:
        assert mix is not None
        m = (1.0 - mix) * p + mix * q
        of_p, of_q = _to_mixture(x, mix)
        value = jnp.sum(mix * _kl_terms(q, m, of_q) + (1.0 - mix) * _kl_terms(p, m, of_p), axis=-1)
    terms = p * _difference(kind, log_p, log_q, mix)
    others, peak = (jnp.sum(jnp.where(m, terms, 0.0), axis=-1) for m in (~at_peak, at_peak))
    return PairSums(value, others, peak)


def finish_pair(stats: TokenStats, teacher: TokenStats, sums: PairSums) -> TokenStats:
    """The student's statistics with those of the pair."""
    top = jnp.exp(stats.max_logp)
    cancelled = -jnp.expm1(stats.max_logp) * sums.peak - top * sums.others
    pair = PairStats(teacher.peak, teacher.max_logp, sums.others + sums.peak, cancelled)
    return dataclasses.replace(stats, divergence=sums.value, teacher_entropy=teacher.entropy, pair=pair)


def teacher_stats(s: TokenStats) -> TokenStats:
    """The numbers of the teacher that its log-probabilities are taken from, out of a pair's statistics."""
    assert s.pair is not None
    return dataclasses.replace(s, peak=s.pair.teacher_peak, max_logp=s.pair.teacher_max_logp)


def log_pair(
    u: Array, k: Array | None, t: Array, teacher_k: Array | None, s: TokenStats, teacher: TokenStats
) -> tuple[Array, Array]:
    """``(log p, log q)`` of swept logits ``u`` and ``t``; ``s`` and ``teacher`` broadcast against them."""
    return log_probability(u, k, s), log_probability(t, teacher_k, teacher)


def pair_dz(
    kind: Divergence, log_p: Array, log_q: Array, at_peak: Array, s: TokenStats, mix: Array | None = None
) -> Array:
    """``d divergence / d z`` of the student's transformed logits; ``s`` broadcasts against ``log_p``."""
    assert s.pair is not None
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    if kind == "forward_kl":
        return jnp.where((log_p > _HALF) & (log_q > _HALF), jnp.expm1(log_p) - jnp.expm1(log_q), p - q)
    d = _difference(kind, log_p, log_q, mix)
    dz = jnp.where(p > 0, p * (d - s.pair.mean), 0.0)
    dz = jnp.where(at_peak & (s.max_logp > _HALF), s.pair.at_peak, dz)
    return dz if kind == "reverse_kl" else (1.0 - jnp.asarray(mix, jnp.float32)) * dz
