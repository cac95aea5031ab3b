"""The head's backward over the vocabulary columns that carry the gradient: about 1.3 matmuls instead of three.

A trained policy's softmax is nearly empty. Per chunk of C tokens, with M one ``C x H x V`` matmul and K active columns
(``sparse_columns.py``; on real policies K is about 8 % of V):

    grad in forward   x = h W^T (M), statistics, active columns; dx, dh and dW over K columns (2 M K / V)
    by recompute      the forward sweep finds and keeps the columns; later x, dx, dh, dW over them (3 M K / V)
    hard rows         those that would leave out more than the tolerance: x, dx, dh, dW, dense, as one group (3 M each)
    dense chunks      where neither pays, x is made into dx as without all this

What the columns left out would add to a row of dH, ``-g sum p_v W_v``, is replaced by ``-g u c``, with u their mass and
c a mean row of the head: head rows have much in common, so this takes away half of the error or more, for the price of
one more vector. What is left is at most ``|g| u max_v ||W_v - c||``, and ``|g| u ||h||`` in all of dW; u is known and
reported (docs/sparse-backward.md).

The K columns are taken in slabs by a loop with a traced trip count, so nothing compiles anew when the policy sharpens.
Decisions are loops of no or one trip, too: a loop updates dW in place, where a conditional would copy it.

Bytes beside those of ``chunked.py``: a slab of the head, of x, dx and dW; ``[C, H]`` float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.head import chunked
from logitless.head import sparse_columns as columns_of
from logitless.head.chunked import SweepConfig, Wanted
from logitless.head.operator import Head, HeadGrads, dhidden, raw_logits
from logitless.head.sparse_columns import ColumnPasses, Columns
from logitless.head.sparse_report import SparseReport, blank_report, chunk_report, noted
from logitless.head.sweep import Visit, split_sweep
from logitless.logits.chunked import blank_stats, rows_stats
from logitless.logits.reference import transformed
from logitless.objectives.inputs import LossInputs
from logitless.objectives.loss import cotangents, may_have_gradient
from logitless.objectives.objective import Objective
from logitless.stats import StatCotangents, TokenStats, dz
from logitless.transform import LogitTransform, pull_back


def auto_tolerance(dtype: Any) -> float:
    """Mass a row may leave out under ``sparse_backward="auto"``: half an ulp of the operands' dtype, since dlogits are
    rounded to it in any case. 2^-8 for bfloat16, 2^-11 for float16, 2^-24 for float32."""
    return float(jnp.finfo(dtype).eps) / 2


_HARD_CHUNK = 1024
"""Most tokens of a chunk of hard rows: there are few of them, and few should not be rounded up to many."""

_PROBE = 64
"""Rows of a chunk that are looked at first, to see whether the rest is worth looking at."""


def column_passes(c: SweepConfig, head: Head) -> ColumnPasses:
    """Static sizes for a head."""
    slab = columns_of.slab_width(head.vocab)
    return ColumnPasses(c.vocab_size, c.rows.tile, slab, columns_of.most_columns(head.vocab, slab))


def misses(tolerance: Array, stats: TokenStats, g: StatCotangents | None, vocab_size: int) -> Callable[..., Array]:
    """Which rows may not leave a mass out (``misses(mass, every)``: which of each ``every``-th row); NaN may not.

    An entropy cotangent magnifies the tail: its part of dz is at most ``|g_lse - g_logp| u + |g_entropy| s`` with
    ``s = sum p |log p + H| <= u (log(N / u) + H)`` over N columns of mass u. Both count relative to the sum of the
    cotangents' magnitudes; without cotangents (``None``, not known yet) the mass itself counts.
    """
    limit = jnp.broadcast_to(tolerance, stats.logp.shape)
    if g is None:
        return lambda mass, every=1: ~(mass <= limit[::every])
    size = jnp.abs(g.logp) + jnp.abs(g.entropy) + jnp.abs(g.lse)
    share = jnp.abs(g.entropy) / jnp.where(size > 0, size, 1.0)

    def miss(mass: Array, every: int = 1) -> Array:
        part = share[::every]
        # A difference of logarithms: the quotient overflows for the tiny masses of a collapsed policy.
        log_mass = jnp.log(jnp.maximum(mass, jnp.finfo(jnp.float32).tiny))
        spread = jnp.log(jnp.float32(vocab_size)) - log_mass + stats.entropy[::every]
        weight = jnp.maximum(1.0, (1.0 - part) + part * spread)
        return ~(mass * weight <= limit[::every])

    return miss


def once(when: Array, body: Callable[[Any], Any], carry: Any) -> Any:
    """``body(carry)`` if ``when``, else ``carry``, in place."""
    return lax.fori_loop(0, when.astype(jnp.int32), lambda _, state: body(state), carry)


def for_hard_rows(c: SweepConfig) -> SweepConfig:
    return dataclasses.replace(c, chunk=min(c.chunk, _HARD_CHUNK), rest_at_once=True)


def probe_stride(size: int) -> int:
    """Stride of the probed rows of a chunk."""
    return max(size // _PROBE, min(size, 8))


def slab_dx(
    p: ColumnPasses, x: Array, index: Array, y: Array, t: LogitTransform, s: TokenStats, g: StatCotangents, dtype: Any
) -> Array:
    """dx of the gathered columns ``index``; zero in unused slots, which lie beyond the vocabulary."""
    t = t.column()
    z = transformed(x, t, p.vocab_size, index[None, :])
    d = dz(
        z,
        index[None, :] == y[:, None],
        s.logp[:, None],
        s.entropy[:, None],
        s.max_logit[:, None],
        s.max_logp[:, None],
        jax.tree.map(lambda v: v[:, None], g),
    )
    return pull_back(d, x, t).astype(dtype)


def mean_row(p: ColumnPasses, head: Head) -> Array:
    """``[1, H]`` float32: the mean of a slab's worth of head rows, evenly spaced over the vocabulary."""
    size = min(p.slab, p.vocab_size)
    index = jnp.arange(size, dtype=jnp.int32) * (p.vocab_size // size)
    return dhidden(jnp.ones((1, size), head.weight.dtype), columns_of.head_columns(head, index)) / size


def in_their_place(c: Array, mass: Array, g: StatCotangents, t: LogitTransform) -> Array:
    """``[C, H]`` float32: dH of a mass in columns whose head rows are all ``c [1, H]`` and whose logits are far from
    the softcap; without the entropy's part, which depends on how the mass is spread."""
    t = t.column()
    dz_sum = jnp.where(g.any_nonzero(), (g.lse - g.logp) * mass, 0.0)[:, None]
    return pull_back(dz_sum, jnp.zeros_like(dz_sum), t) * c


def add_slabs(
    p: ColumnPasses,
    start: Array | None,
    trips: Array,
    index: Array,
    logits: Callable[[Array, Head], Array],
    y: Array,
    t: LogitTransform,
    stats: TokenStats,
    g: StatCotangents,
    h: Array,
    head: Head,
    grads: HeadGrads,
) -> tuple[Array | None, HeadGrads]:
    """``start`` plus a chunk's dH (float32), ``grads`` plus its part, over ``trips`` slabs of the columns ``index``."""

    def slab(i: Array, carry: tuple[Array | None, HeadGrads]) -> tuple[Array | None, HeadGrads]:
        dh, grads = carry
        own = lax.dynamic_slice_in_dim(index, i * p.slab, p.slab)
        part = columns_of.head_columns(head, own)
        dx = slab_dx(p, logits(own, part), own, y, t, stats, g, h.dtype)
        if dh is not None:
            dh = dh + dhidden(dx, part)
        return dh, columns_of.add_head_columns(grads, own, dx, h, part)

    return lax.fori_loop(0, trips, slab, (start, grads))


def without(g: StatCotangents, rows: Array) -> StatCotangents:
    return jax.tree.map(lambda a: jnp.where(rows, 0.0, a), g)


def stats_and_gradients(
    c: SweepConfig,
    wanted: Wanted,
    h: Array,
    head: Head,
    targets: Array,
    transform: LogitTransform,
    objective: Objective,
    inputs: LossInputs,
    tolerance: Array,
) -> tuple[TokenStats, Array | None, HeadGrads, SparseReport]:
    """Grad in forward: :func:`logitless.head.chunked.stats_and_gradients` within ``tolerance``."""
    n = h.shape[0]
    p = column_passes(c, head)
    gradient, rest = split_sweep(inputs.mask, may_have_gradient(objective, inputs), c.chunk)
    acc = chunked.Accumulator(c, wanted)
    common = mean_row(p, head) if wanted.hidden else None

    def cotangents_of(stats: TokenStats, own: LossInputs) -> StatCotangents:
        g_logp, g_entropy = cotangents(objective, stats.logp, stats.entropy, own)
        return StatCotangents(g_logp, g_entropy, jnp.zeros_like(g_logp))

    def body(visit: Visit, carry: tuple[TokenStats, Any, SparseReport]) -> tuple[TokenStats, Any, SparseReport]:
        out, (dh, grads), report = carry
        size = visit.read.size
        h_chunk, y = chunked.chunk_hidden(visit, h), visit.take(targets)
        x = raw_logits(h_chunk, head, c.logits_dtype)
        own, t = chunked.chunk_inputs(inputs, visit, n), chunked.chunk_transform(transform, visit)

        def probe() -> Array:
            every = probe_stride(size)
            few_x, few_y, few_t, few = columns_of.every_nth((lax.optimization_barrier(x), y, t, own), every)
            stats = rows_stats(few_x, few_y, few_t, p.vocab_size, p.tile)
            rows = cotangents_of(stats, few).any_nonzero()
            return columns_of.surely_dense(p, few_x, few_t, stats, rows, tolerance)

        def look(_: Any) -> tuple[TokenStats, StatCotangents, Columns]:
            stats = c.rows.statistics(x, y, t, own.mask)
            g = cotangents_of(stats, own)
            miss = misses(tolerance, stats, g, p.vocab_size)
            return stats, g, columns_of.find(p, x, y, t, stats, g.any_nonzero(), miss, tolerance, wanted.matmuls)

        zero = jnp.zeros((size,), jnp.float32)
        unseen = (blank_stats(size), StatCotangents(zero, zero, zero), columns_of.blank_columns(p, head.vocab, size))
        stats, g, found = once(~probe(), look, unseen)
        hard = g.any_nonzero() & misses(tolerance, stats, g, p.vocab_size)(found.left_out) & ~found.dense
        trips, easy = p.slabs(found.count), without(g, hard)
        start = None if common is None else in_their_place(common, found.left_out, easy, t)
        dh_chunk, grads = add_slabs(
            p, start, trips, found.index, lambda index, _: columns_of.take_logits(x, index), y, t, stats, easy, h_chunk,
            head, grads,
        )  # fmt: skip
        if dh is not None and dh_chunk is not None:
            dh = visit.put(dh, dh_chunk)

        def dense(state: Any) -> Any:
            x, _, _, carry = state
            stats, dx = c.rows.statistics_and_dx(x, y, t, objective, own, x.dtype if c.rows.in_place else h.dtype)
            carry = acc.add(visit, carry, dx.astype(h.dtype), h_chunk, head)
            # What a loop hands on must not be overwritten: if x were, the kernel would write dx over a copy of it.
            return (dx if dx.dtype == x.dtype else x), stats, cotangents_of(stats, own), carry

        _, stats, g, carry = once(found.dense, dense, (x, stats, g, (dh, grads)))
        rows = g.any_nonzero()
        part = chunk_report(p, head, found, rows, hard)
        return jax.tree.map(visit.put, out, stats), carry, noted(visit, report, part)

    start = (blank_stats(n), acc.start(h, head), blank_report(n))
    stats, (dh, grads), report = gradient.run(body, start)
    stats = chunked.sweep_stats(c, rest, stats, h, head, targets, transform)
    g = cotangents_of(stats, inputs)
    dh, grads = chunked.add_gradients(
        for_hard_rows(c), wanted, h, head, targets, transform, report.hard, stats, g, (dh, grads)
    )
    return stats, dh, acc.finish(grads, head), report
