"""Gradients over one set of vocabulary columns for all tokens, on TPU: slab by slab of the K active columns.

    over_slabs   x, dx, dh, a slab of dW, and the mass that each row keeps           3 M K / V
                 (with LoRA dlow and a slab of its outer factor's, lora.py)
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

from logitless.core.problem import Gradients, HeadGrads, Problem, Wanted
from logitless.core.pytree import register
from logitless.core.row_passes import Visit, live_sweep, probabilities
from logitless.core.stats import StatCotangents, TokenStats
from logitless.head.linear import add_dhead, dhidden, dot, low_rank, raw_logits
from logitless.head.pallas_tpu import kernels, lora
from logitless.head.pallas_tpu.backend import front, head_grads
from logitless.head.pallas_tpu.backward import HeadSums
from logitless.head.pallas_tpu.gathered import MASS_ERROR, gatherer, least_logits, mean_rows, put_rows, set_rows
from logitless.head.pallas_tpu.operands import tiles_of
from logitless.head.pallas_tpu.sparse_columns import Active
from logitless.head.pallas_tpu.tiles import LANES, Kernel, Tiles
from logitless.head.sparse.active_columns import Rule
from logitless.head.sparse.column_gather import Known, in_their_place, misses, slab_dx, without
from logitless.head.sparse.report import SparseReport

CHUNK = 2048
"""Tokens of a backward step."""

HARD_TILES = {"dhidden": 384, "dhead": 256}
"""Token tiles of the exact kernels for hard rows: a few per cent of the tokens should not be rounded up to 1024. At
H = 4096 dhead is 6 % slower per token than with a tile of 1024, dhidden no slower than with 512 (estimates)."""


@register
@dataclasses.dataclass(frozen=True)
class Slabs:
    """What the backward steps over the active columns give; tokens in the order of their sweep."""

    kept: Array  # [tokens] float32: mass of the active columns, or less where the logits are rounded
    dh: Array | None  # [tokens, H] float32: dx W
    weight: Array | None  # [most, H]: rows of dW, whatever the head's layout
    bias: Array | None  # [most] float32
    low: Array | None  # [tokens, r] float32: dx times LoRA's outer factor
    outer: Array | None  # [most, r] float32: rows of that factor's gradient, before LoRA's scale


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
    (size, width), rank = m.p.h.shape, m.p.head.rank
    gathered = gatherer(m.p)

    def slab(i: Array, carry: Slabs) -> Slabs:
        index = lax.dynamic_slice_in_dim(active.index, i * rule.slab, rule.slab)
        columns = gathered(index)
        alone = dataclasses.replace(columns, lora_a=None, lora_b=None)

        def chunk(k: Array, inner: Any) -> Any:
            (kept, dh, low), grads, outer = inner
            part, known = m.part(k)

            def add(whole: Array, own: Array) -> Array:
                before = lax.dynamic_slice_in_dim(whole, k * m.chunk, m.chunk)
                return lax.dynamic_update_slice_in_dim(whole, before + own, k * m.chunk, 0)

            # Kept: XLA would make the logits once for the masses and once for dx.
            x = lax.optimization_barrier(raw_logits(part.h, columns, jnp.dtype(jnp.float32)))
            at_least = probabilities(least_logits(part, x), part, known.stats, index[None, :])
            kept = add(kept, jnp.sum(at_least, axis=1))
            if want:
                dx = slab_dx(x.astype(part.call.logits_dtype), index, part, known)
                dh = None if dh is None else add(dh, dhidden(dx, alone))
                grads = add_dhead(grads, dx, part.h, alone)
                if columns.lora_a is not None:
                    low = None if low is None else add(low, dot(dx, columns.lora_a, (1, 0)))
                    outer = None if outer is None else outer + dot(dx, low_rank(part.h, columns), (0, 0))
            return (kept, dh, low), grads, outer

        zero = HeadGrads(
            jnp.zeros((rule.slab, width), jnp.float32) if want.weight else None,
            jnp.zeros((rule.slab,), jnp.float32) if want.bias else None,
        )
        rows = jnp.zeros((rule.slab, rank), jnp.float32) if want.lora else None
        chunks = (m.count + (m.chunk - 1)) // m.chunk
        start = ((carry.kept, carry.dh, carry.low), zero, rows)
        (kept, dh, low), grads, rows = lax.fori_loop(0, chunks, chunk, start)

        def put(whole: Array | None, own: Array | None) -> Array | None:
            if whole is None or own is None:
                return None
            return lax.dynamic_update_slice_in_dim(whole, own.astype(whole.dtype), i * rule.slab, 0)

        weight, bias = put(carry.weight, grads.weight), put(carry.bias, grads.bias)
        return Slabs(kept, dh, weight, bias, low, put(carry.outer, rows))

    start = Slabs(
        jnp.zeros((size,), jnp.float32),
        jnp.zeros((size, width), jnp.float32) if want.hidden else None,
        jnp.zeros((rule.most, width), weight_dtype(m.p)) if want.weight else None,
        jnp.zeros((rule.most,), jnp.float32) if want.bias else None,
        jnp.zeros((size, rank), jnp.float32) if rank and (want.hidden or want.lora) else None,
        jnp.zeros((rule.most, rank), jnp.float32) if want.lora else None,
    )
    return lax.fori_loop(0, rule.slabs(active.count), slab, start)


def gradients(
    rule: Rule, want: Wanted, p: Problem, moving: Array, stats: TokenStats, g: StatCotangents | None, active: Active
) -> tuple[Gradients, SparseReport]:
    """The gradients that are wanted of the tokens ``moving [N]`` for cotangents ``g``, and their report. Without
    cotangents, the report that they would have if all were of ``logp``."""
    assert p.tolerance is not None
    swept = sweep(rule, want, p, moving, stats, g, active)
    mass = jnp.where(moving, jnp.maximum(1.0 - swept.kept, 0.0), 0.0)
    hard = moving & misses(p.tolerance, stats, g, p.call.vocab_size)(mass + MASS_ERROR)
    report = report_of(rule, p, moving, active, jnp.where(hard, 0.0, mass), hard & ~active.dense)
    if g is None or not want:
        return Gradients(None, HeadGrads(None, None)), report
    return assembled(rule, want, p, Known(stats, g), active, swept, mass, hard), report


@dataclasses.dataclass(frozen=True)
class Swept:
    """The tokens that were swept over the active columns, and what that gave."""

    visit: Visit
    m: Moving
    slabs: Slabs
    kept: Array  # [N] float32: mass of the active columns; 0 for the other tokens


def sweep(
    rule: Rule, want: Wanted, p: Problem, moving: Array, stats: TokenStats, g: StatCotangents | None, active: Active
) -> Swept:
    """The tokens ``moving [N]`` over the active columns."""
    n, size = p.n, min(p.n, CHUNK)
    visit = live_sweep(moving, size).visit(0, -(-n // size) * size)
    zero = jnp.zeros((n,), jnp.float32)
    known = Known(*visit.known(stats, StatCotangents(zero, zero, zero) if g is None else g, n))
    m = Moving(visit.problem(p), known, jnp.sum(moving, dtype=jnp.int32), size)
    slabs = over_slabs(rule, want, m, active)
    return Swept(visit, m, slabs, visit.put(zero, jnp.where(visit.inside(n), slabs.kept, 0.0)))


def report_of(rule: Rule, p: Problem, moving: Array, active: Active, left_out: Array, hard: Array) -> SparseReport:
    """The report of the tokens ``moving [N]``."""
    return SparseReport(
        left_out=left_out,
        rows=moving,
        hard=hard,
        chunks=jnp.int32(1),
        dense_chunks=active.dense.astype(jnp.int32),
        active=active.count.astype(jnp.float32),
        width=jnp.where(active.dense, p.head.vocab, rule.slabs(active.count) * rule.slab).astype(jnp.float32),
    )


def assembled(
    rule: Rule, want: Wanted, p: Problem, known: Known, active: Active, swept: Swept, mass: Array, hard: Array
) -> Gradients:
    """The gradients of what was ``swept``, which left ``mass [N]`` out of each row, with the rows ``hard [N]`` through
    all columns in its place."""
    n, visit, m, slabs, stats, g = p.n, swept.visit, swept.m, swept.slabs, known.stats, known.g
    inside, own_mass = visit.inside(n), visit.take(mass)
    f = front(hard)
    few, few_stats, few_g = f.problem(p), jax.tree.map(f.take, stats), jax.tree.map(f.take, g)
    dh, inner, head = None, None, HeadSums(None, None)
    if want.hidden or want.lora:
        easy = without(m.known.g, jnp.where(inside, visit.take(hard), True))
        exact, exact_low = kernels.dhidden(few, f.count, few_stats, few_g, _hard_tiles("dhidden", p))
        assert f.order is not None and f.count is not None
        at = jnp.where(jnp.arange(n) < f.count, f.order, n)
        mean, mean_low = mean_rows(rule, p)

        def all_rows(own: Array, exact: Array, dtype: Any) -> Array:
            whole = visit.put(jnp.zeros((n, own.shape[1]), dtype), own)
            return whole.at[at].set(exact.astype(dtype), mode="drop")

        low = None
        if slabs.low is not None and exact_low is not None and mean_low is not None:
            low = slabs.low + in_their_place(mean_low, own_mass, easy, m.p.transform)
            inner = lora.dinner(p, all_rows(low, exact_low, jnp.float32)) if want.lora else None
        if slabs.dh is not None:
            own = slabs.dh + in_their_place(mean, own_mass, easy, m.p.transform)
            own = own if low is None else lora.joined(m.p, own, low)
            dh = all_rows(own, exact, jnp.float32 if p.call.partial_hidden else p.h.dtype)
    if want.weight or want.bias or want.lora:
        head = kernels.dhead(
            few, f.count, few_stats, few_g, weight_dtype(p), _hard_tiles("dhead", p), weight=want.weight
        )
        outer = head.outer
        if outer is not None and slabs.outer is not None:
            vh, rows = p.head.layout == "vh", lora.scale_of(p) * slabs.outer
            outer = set_rows(outer if vh else outer.T, active.index, rows)
            outer = outer if vh else outer.T
        weight, bias = (
            put_rows(p, a, active.index, b) for a, b in ((head.weight, slabs.weight), (head.bias, slabs.bias))
        )
        head = HeadSums(weight, bias, outer)
    return Gradients(dh, head_grads(p, want, head, inner))


def weight_dtype(p: Problem) -> Any:
    """Of dW: the parameter's, but for a part of a sum over devices in float32."""
    whole = p.call.partial_head and p.call.sum_head_grad_in == "float32"
    return jnp.dtype(jnp.float32) if whole else p.head.weight.dtype


def _hard_tiles(kernel: Kernel, p: Problem) -> Tiles:
    tiles = tiles_of(kernel, p)
    return dataclasses.replace(tiles, tokens=min(tiles.tokens, HARD_TILES[kernel])) if tiles.tokens > LANES else tiles
