"""Sums over a row for two distributions, relative to the row's largest logit, and without it.

With ``u`` and ``k`` of ``logitless.core.stats``, ``o`` and ``k_o`` those of the other distribution, ``w`` the
column of the largest ``u``, sums over all columns but ``w`` of

    rest: e    centred: e s    squares: e^2    cross: e (s - k_o (o - o_w))      s = k (u - u_w),  e = exp(s)

One pass finds them (:func:`joined`) with one exponential an element: where a larger logit comes, all sums and the
column that led until then are scaled by ``exp(-|s|)``; elsewhere ``exp(-|s|)`` is the element's own ``e``. A row that
one column dominates loses no digits: its log-probability is ``-log1p(rest)``, and ``cross`` holds the other columns
alone. Equal rows have a ``cross`` of exactly 0 (:func:`equal_as_one`). :func:`merged` joins lanes and parts of a row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core.divergences import HALF, Divergence, PairSums, finish_pair, is_dominated
from logitless.core.problem import Problem, Source
from logitless.core.pytree import register
from logitless.core.stats import LogitTransform, TokenStats, divided, times

LOW = -1e30  # stands for -inf as the largest logit of no columns: differences stay finite


@register
@dataclasses.dataclass(frozen=True)
class PeakedSums:
    """The module's docstring has the formulas; all fields are float32 with a common shape."""

    peak: Array  # u_w
    other: Array  # o_w
    rest: Array
    centred: Array
    squares: Array
    cross: Array

    @staticmethod
    def none(zero: Array, low: Array) -> PeakedSums:
        """The sums of no columns."""
        return PeakedSums(low, zero, zero, zero, zero, zero)


def difference(a: Array, b: Array, k: Array | None, k_o: Array | None) -> Array:
    """``k a - k_o b``; exactly 0 for equal inputs under any contraction by a compiler: the only product is by 1."""
    if k is None and k_o is None:
        return a - b
    own = jnp.float32(1.0) if k is None else k
    other = jnp.float32(1.0) if k_o is None else k_o
    return own * (a - (other / own) * b)


def joined(a: PeakedSums, u: Array, o: Array, k: Array | None, k_o: Array | None) -> PeakedSums:
    """``a`` with one more column in every lane; ``u`` may be ``-inf``, and ``o`` anything there."""
    larger = u > a.peak
    s = times(k, u - a.peak)
    e = jnp.exp(-jnp.abs(s))
    seen = e > 0  # elsewhere, 0 * inf must not appear
    s = jnp.where(seen, s, 0.0)
    apart = jnp.where(seen, difference(u - a.peak, o - a.other, k, k_o), 0.0)
    scale = jnp.where(larger, e, 1.0)
    # Where the new column leads, e is the old one's, behind which all others move by -s.
    moved = jnp.where(larger, -(a.rest + 1.0), 1.0) * e
    return PeakedSums(
        peak=jnp.where(larger, u, a.peak),
        other=jnp.where(larger, o, a.other),
        rest=scale * a.rest + e,
        centred=scale * a.centred + moved * s,
        squares=scale * scale * a.squares + e * e,
        cross=scale * a.cross + moved * apart,
    )


def merged(a: PeakedSums, k: Array | None, k_o: Array | None, ids: Array) -> PeakedSums:
    """The sums of all lanes ``[..., L]`` together; ``ids [L]`` tell lanes apart, ``k`` and ``k_o`` broadcast."""

    def total(x: Array) -> Array:
        return jnp.sum(x, axis=-1)

    def beside_lanes(x: Array) -> Array:
        return x[..., None] if x.ndim else x

    top = jnp.max(a.peak, axis=-1)
    leads = a.peak == beside_lanes(top)
    first = jnp.min(jnp.where(leads, ids, 1 << 20), axis=-1)
    is_first = ids == beside_lanes(first)
    other = total(jnp.where(is_first, a.other, 0.0))
    s = times(k, a.peak - beside_lanes(top))
    e = jnp.exp(s)
    seen = e > 0
    s = jnp.where(seen, s, 0.0)
    apart = jnp.where(seen, difference(a.peak - beside_lanes(top), a.other - beside_lanes(other), k, k_o), 0.0)
    own = jnp.where(is_first, 0.0, e)  # the leading columns of the other lanes
    count = e * a.rest + own
    return PeakedSums(
        peak=top,
        other=other,
        rest=total(count),
        centred=total(e * a.centred + count * s),
        squares=total(e * e * a.squares + own * own),
        cross=total(e * a.cross + count * apart),
    )


def equal_as_one(student: PeakedSums, teacher: PeakedSums) -> PeakedSums:
    """``teacher``, or ``student`` where the rows are equal, whose sums two compiled loops may round differently.

    Both crosses are 0 then and only then: their difference is a sum of ``(e - f) (log e - log f)``, none of which is
    negative.
    """
    equal = (student.cross == 0) & (teacher.cross == 0) & (student.other == teacher.peak)
    return jax.tree.map(lambda a, b: jnp.where(equal, a, b), student, teacher)


def stats_of(a: PeakedSums, own: Array, valid: Array, transform: LogitTransform) -> TokenStats:
    """Statistics of rows ``[N]``; ``own`` is ``u`` at the target, which may not be ``valid``."""
    log_total = jnp.log1p(a.rest)
    leads, valid = own >= a.peak, valid & ~jnp.isnan(a.rest)

    def known(x: Array) -> Array:
        return jnp.where(valid, x, jnp.nan)

    return TokenStats(
        logp=known(jnp.where(leads, 0.0, divided(jnp.minimum(own - a.peak, 0.0), transform)) - log_total),
        entropy=known(log_total - a.centred / (1.0 + a.rest)),
        lse=known(divided(a.peak, transform) + log_total),
        max_logit=known(divided(a.peak, transform)),
        log_sum_p2=known(jnp.log1p(a.squares) - 2.0 * log_total),
        is_top1=leads & valid,
        max_logp=known(-log_total),
        peak=known(a.peak),
    )


def statistics_of(student: PeakedSums, teacher: PeakedSums, own: Array, valid: Array, p: Problem[Source]) -> TokenStats:
    """Statistics of rows ``[N]`` and of the pair, from the sums over all columns; ``own`` as in :func:`stats_of`."""
    assert p.teacher is not None
    teacher = equal_as_one(student, teacher)
    stats = stats_of(student, own, valid, p.transform)
    of_teacher = stats_of(teacher, teacher.peak, jnp.ones_like(valid), p.teacher.transform)
    return pair_stats(p.teacher.divergence, student, teacher, stats, of_teacher, p)


def _rest_of(a: PeakedSums) -> Array:
    return a.rest / (1.0 + a.rest)


def pair_stats(
    kind: Divergence, student: PeakedSums, teacher: PeakedSums, stats: TokenStats, of_teacher: TokenStats, p: Any
) -> TokenStats:
    """``stats`` with those of the pair, of a KL divergence: ``divergences.finish_pair`` of sums over all columns but a
    dominating one; ``p`` is the problem, whose teacher has a transform."""
    at_peak = divided(student.other - teacher.peak, p.teacher.transform) + of_teacher.max_logp  # log q
    dominated = is_dominated(stats)
    rest = jnp.where(dominated, _rest_of(student), 1.0)
    shared = dominated & (at_peak > HALF)
    outside = jnp.where(shared, _rest_of(teacher), -jnp.expm1(jnp.minimum(at_peak, 0.0)))
    teacher_rest = jnp.where(dominated, outside, 1.0)
    if kind == "reverse_kl":
        apart = stats.max_logp - at_peak  # d at the student's peak
        moved = (student.cross + apart * jnp.where(dominated, student.rest, 1.0 + student.rest)) / (1.0 + student.rest)
        value = moved + (teacher_rest - rest)
    else:
        own = divided(teacher.other - student.peak, p.transform) + stats.max_logp  # log p at the teacher's peak
        apart = of_teacher.max_logp - own
        cross = teacher.cross / (1.0 + teacher.rest)
        elsewhere = cross + apart - jnp.where(dominated, jnp.exp(at_peak) * (at_peak - stats.max_logp), 0.0)
        moved = jnp.zeros_like(cross)
        value = jnp.where(shared, cross + apart * _rest_of(teacher), elsewhere) + (rest - teacher_rest)
    sums = PairSums(value, moved, rest, teacher_rest, jnp.where(dominated, at_peak, 0.0))
    found = finish_pair(kind, stats, of_teacher, sums, None)
    assert found.divergence is not None
    # Every term of the divergence is positive: a negative remainder is rounding.
    return dataclasses.replace(found, divergence=jnp.maximum(found.divergence, 0.0))
