"""Gradients over one set of vocabulary columns for all tokens, on TPU: slab by slab of the K active columns.

    over_slabs   x, dx, dh, a slab of dW, and the mass that each row keeps           3 M K / V
    gradients    those, and of the rows that leave out more than the tolerance dH and dW by the exact kernels, 4 matmuls
                 each

How the two make one gradient: ``sparse.py``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.head import columns as columns_of
from logitless.head.columns import Rule
from logitless.head.linear import add_dhead, dhidden, raw_logits
from logitless.head.pallas_tpu import kernels
from logitless.head.pallas_tpu.backend import own_dtype
from logitless.head.pallas_tpu.operands import tiles_of
from logitless.head.pallas_tpu.sparse_columns import MASS_ERROR, Active
from logitless.head.pallas_tpu.tiles import LANES, Kernel, Tiles
from logitless.head.report import SparseReport
from logitless.head.slabs import Known, in_their_place, mean_row, misses, slab_dx, without
from logitless.problem import Gradients, HeadGrads, Problem, Wanted
from logitless.pytree import register
from logitless.rows import front, live_sweep, probabilities
from logitless.stats import StatCotangents, TokenStats

CHUNK = 2048
"""Tokens of a backward step."""

HARD_TILES = {"dhidden": 384, "dhead": 256}
"""Token tiles of the exact kernels for hard rows: a few per cent of the tokens should not be rounded up to 1024. At
H = 4096 dhead is 6 % slower per token than with a tile of 1024, dhidden no slower than with 512 (estimates)."""


@register
@dataclasses.dataclass(frozen=True)
class Slabs:
    """What the backward steps over the active columns give; tokens in the order of their sweep."""

    kept: Array  # [tokens] float32: mass of the active columns
    dh: Array | None  # [tokens, H] float32
    weight: Array | None  # [most, H]: rows of dW
    bias: Array | None  # [most] float32


@dataclasses.dataclass(frozen=True)
class Moving:
    """The tokens with a gradient, gathered to the front of whole chunks; zeros behind them."""

    p: Problem
    known: Known
    count: Array
    chunk: int

    def part(self, k: Array) -> tuple[Problem, Known]:
        """The ``k``-th chunk."""

        def cut(a: Array) -> Array:
            return lax.dynamic_slice_in_dim(a, k * self.chunk, self.chunk)

        stats, g = jax.tree.map(cut, (self.known.stats, self.known.g))
        return self.p.rows(cut), Known(stats, g)


def over_slabs(rule: Rule, want: Wanted, m: Moving, active: Active) -> Slabs:
    """Masses, and of dH and the rows of dW and dbias those that are wanted."""
    (size, width), head = m.p.h.shape, m.p.head

    def slab(i: Array, carry: Slabs) -> Slabs:
        index = lax.dynamic_slice_in_dim(active.index, i * rule.slab, rule.slab)
        columns = columns_of.head_columns(head, index)

        def chunk(k: Array, inner: tuple[Array, Array | None, HeadGrads]) -> tuple[Array, Array | None, HeadGrads]:
            kept, dh, grads = inner
            part, known = m.part(k)

            def add(whole: Array, own: Array) -> Array:
                before = lax.dynamic_slice_in_dim(whole, k * m.chunk, m.chunk)
                return lax.dynamic_update_slice_in_dim(whole, before + own, k * m.chunk, 0)

            # Kept: XLA would make the logits once for the masses and once for dx.
            x = lax.optimization_barrier(raw_logits(part.h, columns, jnp.dtype(jnp.float32)))
            kept = add(kept, jnp.sum(probabilities(x, part, known.stats, index[None, :]), axis=1))
            if want:
                dx = slab_dx(x, index, part, known)
                dh = None if dh is None else add(dh, dhidden(dx, columns))
                grads = add_dhead(grads, dx, part.h, columns)
            return kept, dh, grads

        zero = HeadGrads(
            jnp.zeros((rule.slab, width), jnp.float32) if want.weight else None,
            jnp.zeros((rule.slab,), jnp.float32) if want.bias else None,
        )
        chunks = (m.count + (m.chunk - 1)) // m.chunk
        kept, dh, grads = lax.fori_loop(0, chunks, chunk, (carry.kept, carry.dh, zero))

        def put(whole: Array | None, own: Array | None) -> Array | None:
            if whole is None or own is None:
                return None
            return lax.dynamic_update_slice_in_dim(whole, own.astype(whole.dtype), i * rule.slab, 0)

        return Slabs(kept, dh, put(carry.weight, grads.weight), put(carry.bias, grads.bias))

    start = Slabs(
        jnp.zeros((size,), jnp.float32),
        jnp.zeros((size, width), jnp.float32) if want.hidden else None,
        jnp.zeros((rule.most, width), weight_dtype(m.p)) if want.weight else None,
        jnp.zeros((rule.most,), jnp.float32) if want.bias else None,
    )
    return lax.fori_loop(0, rule.slabs(active.count), slab, start)


def gradients(
    rule: Rule, want: Wanted, p: Problem, moving: Array, stats: TokenStats, g: StatCotangents | None, active: Active
) -> tuple[Gradients, SparseReport]:
    """The gradients that are wanted of the tokens ``moving [N]`` for cotangents ``g``, and their report. Without
    cotangents, the report that they would have if all were of ``logp``."""
    assert p.tolerance is not None
    n, size = p.n, min(p.n, CHUNK)
    visit = live_sweep(moving, size).visit(0, -(-n // size) * size)
    inside, zero = visit.inside(n), jnp.zeros((n,), jnp.float32)
    known = Known(*visit.known(stats, StatCotangents(zero, zero, zero) if g is None else g, n))
    m = Moving(visit.problem(p), known, jnp.sum(moving, dtype=jnp.int32), size)
    slabs = over_slabs(rule, want, m, active)
    own_mass = jnp.where(inside, jnp.maximum(1.0 - slabs.kept, 0.0), 0.0)
    mass = visit.put(zero, own_mass)
    hard = moving & misses(p.tolerance, stats, g, p.call.vocab_size)(mass + MASS_ERROR)
    report = SparseReport(
        left_out=jnp.where(hard | ~moving, 0.0, mass),
        rows=moving,
        hard=hard & ~active.dense,
        chunks=jnp.int32(1),
        dense_chunks=active.dense.astype(jnp.int32),
        active=active.count.astype(jnp.float32),
        width=jnp.where(active.dense, p.head.vocab, rule.slabs(active.count) * rule.slab).astype(jnp.float32),
    )
    dh = dweight = dbias = None
    if g is None or not want:
        return Gradients(None, HeadGrads(None, None)), report

    f = front(hard)
    few, few_stats, few_g = f.problem(p), jax.tree.map(f.take, stats), jax.tree.map(f.take, g)
    if slabs.dh is not None:
        easy = without(known.g, jnp.where(inside, visit.take(hard), True))
        own = slabs.dh + in_their_place(mean_row(rule, p), own_mass, easy, m.p.transform)
        exact = kernels.dhidden(few, f.count, few_stats, few_g, _hard_tiles("dhidden", p))
        assert f.order is not None and f.count is not None
        dtype = jnp.float32 if p.call.partial_hidden else p.h.dtype
        at = jnp.where(jnp.arange(n) < f.count, f.order, n)
        dh = visit.put(jnp.zeros(p.h.shape, dtype), own).at[at].set(exact.astype(dtype), mode="drop")
    if want.weight or want.bias:
        dweight, dbias = kernels.dhead(few, f.count, few_stats, few_g, weight_dtype(p), _hard_tiles("dhead", p))

        def put(whole: Array | None, own: Array | None) -> Array | None:
            if whole is None or own is None:
                return None
            return whole.at[active.index].set(own, mode="drop", unique_indices=True, indices_are_sorted=True)

        dweight, dbias = put(dweight, slabs.weight), put(dbias, slabs.bias)
    return Gradients(dh, HeadGrads(dweight, own_dtype(p, dbias))), report


def weight_dtype(p: Problem) -> Any:
    """Of dW: the parameter's, but for a part of a sum over devices in float32."""
    whole = p.call.partial_head and p.call.sum_head_grad_in == "float32"
    return jnp.dtype(jnp.float32) if whole else p.head.weight.dtype


def _hard_tiles(kernel: Kernel, p: Problem) -> Tiles:
    tiles = tiles_of(kernel, p)
    return dataclasses.replace(tiles, tokens=min(tiles.tokens, HARD_TILES[kernel])) if tiles.tokens > LANES else tiles
