"""The likeliest ids of each row, exactly, equal logits by the smaller id, with a single read of the logits.

Columns are ordered by value, equal values by id. They are cut into groups of 16, and each group has a first column. The
``k`` first of ``V`` columns lie in the ``k`` groups with the foremost first columns: these groups hold ``k`` columns
ahead of any other column. Group ``g`` holds the columns ``g``, ``g + G``, ``g + 2 G``, ..., so one elementwise pass
over the row finds each group's largest logit ``m_g``, its id, and ``S_g = sum exp(z - m_g)``. :func:`first_columns`
chooses ``k`` groups by the same rule, then ``k`` of their ``16 k`` columns. The exponentials of all other columns are
the sums ``S_g`` of other groups, and those of the columns that were not chosen. Let ``m`` be the row's largest logit,
``T`` that sum relative to ``m``, and ``e_j`` the exponentials of the chosen columns:

    gap = log1p(T + sum_{j > 1} e_j)      logp_j = (z_j - m) - gap      lse = m + gap      log_rest = log T - gap
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from logitless.core.row_passes import Rows
from logitless.core.stats import NEG_INF, LogitTransform, divided, factor, swept, times, where_rows

_GROUP = 16
"""Columns per group of logits."""

_LINE = 128
"""The number of groups is a multiple of this, so that slices of a row start at whole lines of memory."""

_LAST = jnp.iinfo(jnp.int32).max
"""The id of a missing column, behind all others."""


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


class Columns(NamedTuple):
    """Some columns of each row, ``[C, W]``, with distinct ids."""

    value: Array
    id: Array
    at: Array
    """The column's index in the array that it comes from."""

    def ahead(self, last: Columns) -> Array:
        """Columns ahead of ``last [C, 1]``, and ``last`` itself; never a NaN."""
        return (self.value > last.value) | ((self.value == last.value) & (self.id <= last.id))

    def last(self) -> Columns:
        """The last column of each row, ``[C, 1]``."""
        return Columns(*(a[:, -1:] for a in self))


def first_columns(c: Columns, k: int) -> Columns:
    """The ``k`` first columns of each row in order."""
    width = c.value.shape[1]
    if width < max(8 * k, _LINE):
        value, ids, at = lax.sort((-c.value, c.id, c.at), dimension=1, num_keys=2, is_stable=False)
        return Columns(-value[:, :k], ids[:, :k], at[:, :k])
    size = _GROUP if width > 4 * _GROUP * k else 4
    stride = -(-width // size)
    fills = (NEG_INF, _LAST, 0)
    padded = [
        jnp.pad(a, ((0, 0), (0, size * stride - width)), constant_values=v) for a, v in zip(c, fills, strict=True)
    ]
    members = [Columns(*(a[:, i : i + stride] for a in padded)) for i in range(0, size * stride, stride)]
    first = members[0]
    for m in members[1:]:
        instead = (m.value > first.value) | ((m.value == first.value) & (m.id < first.id))
        # A maximum, and not a select: it keeps a NaN.
        first = Columns(jnp.maximum(first.value, m.value), jnp.where(instead, m.id, first.id), first.at)
    groups = first._replace(at=jnp.broadcast_to(jnp.arange(stride, dtype=jnp.int32), first.id.shape))
    places = _columns_of(first_columns(groups, min(k, stride)).at, size, stride)
    return first_columns(Columns(*(_pick(a, places) for a in padded)), k)


def _pick(x: Array, places: Array) -> Array:
    return jnp.take_along_axis(x, places, axis=1)


def _columns_of(groups: Array, size: int, stride: int) -> Array:
    """The columns ``[C, size K]`` of ``groups [C, K]``."""
    members = stride * jnp.arange(size, dtype=jnp.int32)
    return (members[:, None] + groups[:, None, :]).reshape(groups.shape[0], -1)


class _Groups(NamedTuple):
    """Groups of a row's logits, ``[C, G]``."""

    first: Columns
    total: Array | None
    """Sum of exponentials in a group, relative to its largest logit."""


def _groups(x: Array, t: LogitTransform | None, vocab_size: int, stride: int) -> _Groups:
    """Groups of the logits: group ``g`` has the columns ``g``, ``g + stride``, ...; without ``t`` no sums."""
    parts = [x[:, i : min(i + stride, vocab_size)] for i in range(0, vocab_size, stride)]
    missing = stride * len(parts) - vocab_size
    parts[-1] = jnp.pad(parts[-1], ((0, 0), (0, missing)), constant_values=NEG_INF)
    value, member = parts[0], jnp.zeros(parts[0].shape, jnp.uint8)
    for i, part in enumerate(parts[1:], 1):  # ids ascend: of equal logits the first stays
        member = jnp.where(part > value, jnp.uint8(i), member)
        value = jnp.maximum(value, part)
    ids, total = jnp.arange(stride, dtype=jnp.int32), None
    if t is not None:
        centre = _finite(swept(value, t))
        e = [jnp.exp(times(factor(t), swept(part, t) - centre)) for part in parts]
        total = sum(e[1:-1], e[0]) + jnp.where(ids < stride - missing, e[-1], 0.0)
    # The barrier stores the sums, which XLA would make by a second read of the logits, and one byte per id.
    value, member, total = lax.optimization_barrier((value, member, total))
    return _Groups(Columns(value, ids + stride * member.astype(jnp.int32), jnp.broadcast_to(ids, value.shape)), total)


def _finite(u: Array) -> Array:
    """A peak to take differences from: 0 in the place of ``-inf``."""
    return jnp.where(u == NEG_INF, 0.0, u)


class _Rest(NamedTuple):
    """Columns that were not chosen, or groups of them, ``[C, W]``, by raw logit."""

    value: Array
    counts: Array
    total: Array | float
    """Sum of exponentials in a group, relative to its ``value``."""


def largest(x: Array, k: int) -> Array:
    """Ids ``[C, k]`` of the largest columns of ``x [C, V]`` in order, equal ones by the smaller id."""
    return _first_and_rest(x, None, x.shape[1], k)[0].id


def _first_and_rest(x: Array, t: LogitTransform | None, vocab_size: int, k: int) -> tuple[Columns, list[_Rest]]:
    """The ``k`` first columns of the rows ``x [C, V]``, and all others, but for groups without ``t``; it broadcasts
    against the rows."""
    # Raw logits: the transform keeps their order, but may round two logits to equal values.
    rest: list[_Rest] = []
    if vocab_size < max(2 * _GROUP * k, _GROUP * _LINE):
        ids = jnp.broadcast_to(jnp.arange(vocab_size, dtype=jnp.int32), (x.shape[0], vocab_size))
        candidates = Columns(x[:, :vocab_size], ids, ids)
    else:
        stride = -(-vocab_size // (_GROUP * _LINE)) * _LINE
        groups = _groups(x, t, vocab_size, stride)
        chosen = first_columns(groups.first, k)
        if groups.total is not None:
            rest.append(_Rest(groups.first.value, ~groups.first.ahead(chosen.last()), groups.total))
        ids = _columns_of(chosen.at, -(-vocab_size // stride), stride)
        value = jnp.where(ids < vocab_size, _pick(x, jnp.minimum(ids, vocab_size - 1)), jnp.asarray(NEG_INF, x.dtype))
        candidates = Columns(value, ids, ids)
    first = first_columns(candidates, k)
    rest.append(_Rest(candidates.value, ~candidates.ahead(first.last()) & (candidates.id < vocab_size), 1.0))
    return first, rest


def _log_sum(rest: list[_Rest], t: LogitTransform) -> tuple[Array, Array]:
    """``(log of the sum of exp(z - centre) [C], centre [C, 1])`` over the columns that are left."""
    u = [jnp.where(r.counts, swept(r.value, t), NEG_INF) for r in rest]
    centre = _finite(jnp.max(jnp.stack([jnp.max(a, axis=1) for a in u]), axis=0)[:, None])
    e = [jnp.exp(times(factor(t), a - centre)) * r.total for a, r in zip(u, rest, strict=True)]
    return jnp.log(jnp.sum(jnp.stack([jnp.sum(a, axis=1) for a in e]), axis=0)), centre


def top_of_rows(x: Array, p: Rows, k: int) -> TopK:
    """The likeliest ids of the rows ``x [C, V]``; every row is live."""
    t = p.transform.column()
    first, rest = _first_and_rest(x, t, p.call.vocab_size, k)
    log_others, centre = _log_sum(rest, t)
    u, scale = swept(first.value, t), factor(t)
    m = _finite(u[:, :1])
    e = jnp.exp(times(scale, u - m))
    log_others = log_others + times(scale, centre - m)[:, 0]
    gap = jnp.log1p(jnp.exp(log_others) + jnp.sum(e[:, 1:], axis=1))
    logp = times(scale, u - m) - gap[:, None]
    mass = jnp.sum(jnp.exp(logp), axis=1)
    light = mass < 0.5
    log_rest = jnp.where(light, jnp.log1p(-jnp.where(light, mass, 0.0)), log_others - gap)
    return TopK(first.id, logp, divided(m[:, 0], p.transform) + gap, log_rest)


def blank_top_k(n: int, k: int) -> TopK:
    """Result for ``n`` unvisited tokens: zeros."""
    zero, wide = jnp.zeros((n,), jnp.float32), jnp.zeros((n, k), jnp.float32)
    return TopK(wide.astype(jnp.int32), wide, zero, zero)


def masked_top_k(found: TopK, live: Array | None) -> TopK:
    """Zeros where a token is not live."""
    return found if live is None else TopK(*(where_rows(live, x) for x in found if x is not None))
