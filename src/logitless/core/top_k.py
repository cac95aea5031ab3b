"""The likeliest ids of each row, exactly, equal logits by the smaller id.

The ``k`` largest of ``V`` columns lie in the ``k`` groups of columns with the largest maxima: such groups hold ``k``
columns at least as large as any column elsewhere, and of equal groups the first are taken, whose columns have the
smaller ids. So a row is read once for the maxima of its groups, the groups are chosen by the same rule (they are fewer,
and grouped again), and ``16 k`` columns are sorted. A second read sums the exponentials of all columns that were not
chosen, relative to the largest of them: with ``m`` the largest logit, ``T`` that sum relative to ``m`` and ``e_j`` the
exponentials of the chosen ones,

    gap = log1p(T + sum_{j > 1} e_j)      logp_j = (z_j - m) - gap      lse = m + gap      log_rest = log T - gap

Columns equal to the smallest chosen one, and not chosen, are counted.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from logitless.core.row_passes import Rows, column_ids
from logitless.core.stats import NEG_INF, divided, factor, swept, times, where_rows

_GROUP = 16
"""Columns of a group."""


class TopK(NamedTuple):
    """The ``k`` likeliest ids of each token in order, or as many ids of a teacher with its log-probabilities; -1 is
    none. Exactly 0 where a token is masked.

    >>> import jax.numpy as jnp, logitless
    >>> top = logitless.linear_top_k(jnp.ones((1, 2)), jnp.array([[0.0, 0.0], [1.0, 1.0], [0.5, 0.5]]), 2)
    >>> top.ids.tolist(), [round(float(x), 4) for x in top.logp[0]]
    ([[1, 2]], [-0.4076, -1.4076])
    """

    ids: Array
    """``[..., k]`` int32."""
    logp: Array
    """``[..., k]`` float32, log-probabilities over the whole vocabulary."""
    lse: Array | None = None
    """``[...]``, logsumexp of the transformed logits."""
    log_rest: Array | None = None
    """``[...]``, log of the mass of all other ids: ``log(1 - sum p)`` would lose it to rounding."""


def _pick(x: Array, ids: Array) -> Array:
    return jnp.take_along_axis(x, ids, axis=1)


def largest(x: Array, k: int) -> Array:
    """Ids ``[C, k]`` of the largest columns of ``x [C, V]`` in order, equal ones by the smaller id."""
    width, group = x.shape[1], _GROUP
    if width <= 2 * k * group:
        return lax.top_k(x, k)[1].astype(jnp.int32)
    whole = width // group * group
    maxima = jnp.max(x[:, :whole].reshape(x.shape[0], -1, group), axis=2)
    if whole < width:
        maxima = jnp.concatenate([maxima, jnp.max(x[:, whole:], axis=1, keepdims=True)], axis=1)
    groups = jnp.sort(largest(maxima, k), axis=1)  # sorted by column, and ties are
    columns = (groups[:, :, None] * group + jnp.arange(group, dtype=jnp.int32)).reshape(x.shape[0], -1)
    values = jnp.where(columns < width, _pick(x, jnp.minimum(columns, width - 1)), NEG_INF)
    return _pick(columns, lax.top_k(values, k)[1])


def top_of_rows(x: Array, p: Rows, k: int) -> TopK:
    """The likeliest ids of the rows ``x [C, V]``; every row is live."""
    vocab_size, t = p.call.vocab_size, p.transform.column()
    real = column_ids(x.shape[1]) < vocab_size
    raw = x if vocab_size >= x.shape[1] else jnp.where(real, x, jnp.asarray(NEG_INF, x.dtype))
    # Compare raw logits: the transform keeps their order, but may round two logits to equal values.
    # If available, take an additional id: the largest remaining logit.
    more = largest(raw, min(k + 1, vocab_size))
    ids, centre = more[:, :k], swept(_pick(x, more[:, -1:]), t)
    chosen = _pick(x, ids)
    u, last, scale = swept(chosen, t), chosen[:, -1:], factor(t)
    m, centre = (jnp.where(a > NEG_INF, a, 0.0) for a in (u[:, :1], centre))
    e = jnp.exp(times(scale, u - m))
    others = jnp.where(real & (x < last), jnp.exp(times(scale, swept(x, t) - centre)), 0.0)
    equal = jnp.sum(real & (x == last), axis=1, dtype=jnp.float32) - jnp.sum(chosen == last, axis=1, dtype=jnp.float32)
    at_last = jnp.exp(jnp.minimum(times(scale, u[:, -1:] - centre), 0.0))[:, 0]  # equal to the centre where any is left
    log_others = jnp.log(jnp.sum(others, axis=1) + equal * at_last) + times(scale, centre - m)[:, 0]
    rest = jnp.exp(log_others)
    gap = jnp.log1p(rest + jnp.sum(e[:, 1:], axis=1))
    logp = times(scale, u - m) - gap[:, None]
    mass = jnp.sum(jnp.exp(logp), axis=1)
    light = mass < 0.5
    log_rest = jnp.where(light, jnp.log1p(-jnp.where(light, mass, 0.0)), log_others - gap)
    return TopK(ids, logp, divided(m[:, 0], p.transform) + gap, log_rest)


def blank_top_k(n: int, k: int) -> TopK:
    """Result for ``n`` unvisited tokens: zeros."""
    zero, wide = jnp.zeros((n,), jnp.float32), jnp.zeros((n, k), jnp.float32)
    return TopK(wide.astype(jnp.int32), wide, zero, zero)


def masked_top_k(found: TopK, live: Array | None) -> TopK:
    """Zeros where a token is not live."""
    return found if live is None else TopK(*(where_rows(live, x) for x in found if x is not None))
