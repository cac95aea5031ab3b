"""The backward over a gathered set of vocabulary columns, slab by slab; what its rows may leave out, and the report.

    slab_dx        dx of a slab's columns, from its logits
    add_slabs      dH and the head's gradients of a chunk: dx, dh and dW over K columns (2 M K / V, and M K / V where
                   the logits are made again)
    misses         which rows may not leave a mass out
    in_their_place what stands for the columns left out: their mass times a mean row of the head

Shared by ``backend.py`` and ``pallas_tpu/sparse_backward.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.core.problem import Gradients, HeadArrays, Problem
from logitless.core.row_passes import swept_columns
from logitless.core.shapes import PyTree
from logitless.core.stats import LogitTransform, StatCotangents, TokenStats, dz, factor, pull_back
from logitless.head.linear import add_dhead, dhidden, dx_dtype
from logitless.head.sparse import active_columns as columns_of
from logitless.head.sparse.active_columns import Rule


def misses(
    tolerance: Array | None, stats: TokenStats, g: StatCotangents | None, vocab_size: int
) -> Callable[..., Array]:
    """Which rows may not leave a mass out (``misses(mass, every)``: which of each ``every``-th row); NaN may not.

    An entropy cotangent magnifies the tail: its part of dz is at most ``|g_lse - g_logp| u + |g_entropy| s`` with
    ``s = sum p |log p + H| <= u (log(N / u) + H)`` over N columns of mass u. Both count relative to the sum of the
    cotangents' magnitudes; without cotangents (``None``, not known yet) the mass itself counts.
    """
    assert tolerance is not None  # of a problem with a sparse backward
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


def without(g: StatCotangents, rows: Array) -> StatCotangents:
    """Cotangents that are zero in ``rows``."""
    return jax.tree.map(lambda a: jnp.where(rows, 0.0, a), g)


@dataclasses.dataclass(frozen=True)
class Known:
    """A chunk's statistics and cotangents."""

    stats: TokenStats
    g: StatCotangents


def mass_beside(kept: Array) -> Array:
    """``[N]``: mass of each row outside the kept columns; NaN where the row is."""
    return jnp.where(kept > 1.0, 0.0, 1.0 - kept)


def slab_dx(x: Array, index: Array, p: Problem, known: Known, bias: bool = False) -> Array:
    """dx of the gathered columns ``index``, in a dtype that is wide enough for the gradient of the ``bias`` if that is
    wanted; zero in unused slots, which lie beyond the vocabulary."""
    t = p.transform.column()
    u = swept_columns(x, t, p.call.vocab_size, index[None, :])
    stats, g = jax.tree.map(lambda v: v[:, None], (known.stats, known.g))
    d = dz(u, index[None, :] == p.targets[:, None], stats, g, factor(t))
    return pull_back(d, x, t).astype(dx_dtype(p.call.logits_dtype, p.h.dtype, bias))


def mean_row(rule: Rule, p: Problem) -> Array:
    """``[1, H]`` float32: the mean of a slab's worth of head rows, evenly spaced over the vocabulary."""
    size = min(rule.slab, p.call.vocab_size)
    index = jnp.arange(size, dtype=jnp.int32) * (p.call.vocab_size // size)
    part = columns_of.head_columns(p.head, index)
    if part.lora_a is not None:
        return dhidden(jnp.ones((1, size), p.head.weight.dtype), part) / size
    return jnp.mean(part.weight.astype(jnp.float32), axis=p.head.axis)[None, :]


def in_their_place(c: Array, mass: Array, g: StatCotangents, t: LogitTransform) -> Array:
    """``[C, H]`` float32: dH of a mass in columns whose head rows are all ``c [1, H]`` and whose logits are far from
    the softcap; without the entropy's part, which depends on how the mass is spread."""
    t = t.column()
    dz_sum = jnp.where(g.any_nonzero(), (g.lse - g.logp) * mass, 0.0)[:, None]
    return pull_back(dz_sum, jnp.zeros_like(dz_sum), t) * c


def add_slabs(
    rule: Rule,
    trips: Array,
    index: Array,
    logits: Callable[[Array, HeadArrays], Array],
    p: Problem,
    known: Known,
    start: Gradients,
) -> Gradients:
    """``start`` plus a chunk's dH (float32) and its part of the head's gradients, over ``trips`` slabs of the columns
    ``index``; ``logits(columns, their part of the head)`` are a slab's."""

    def slab(i: Array, total: Gradients) -> Gradients:
        own = lax.dynamic_slice_in_dim(index, i * rule.slab, rule.slab)
        part = columns_of.head_columns(p.head, own)
        dx = slab_dx(logits(own, part), own, p, known, total.head.bias is not None)
        dh = None if total.hidden is None else total.hidden + dhidden(dx.astype(p.h.dtype), part)
        grads = add_dhead(columns_of.no_head_columns(total.head, part), dx, p.h, part)
        return Gradients(dh, columns_of.put_head_columns(total.head, own, grads, part.layout))

    return lax.fori_loop(0, trips, slab, start)


def once(when: Array, body: Callable[[PyTree], PyTree], carry: PyTree) -> PyTree:
    """``body(carry)`` if ``when``, else ``carry``, in place."""
    return lax.fori_loop(0, when.astype(jnp.int32), lambda _, state: body(state), carry)
