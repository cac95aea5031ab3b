"""The sparse backward's gradients with tokens in order, on TPU: slabs of the active columns, hard rows along with dW.

    over_slabs   x, dx, dh, a slab of dW, and the mass that each row keeps           3 M K / V
    gradients    those, and the other columns of the rows that leave out more than the tolerance, by one sweep over the
                 head (``hard_rows.py``): 3 matmuls each for up to ``GROUP`` of them, 4 for others, whose dH is by
                 further sweeps, a group at a time

Tokens stand in the order of ``head/sparse/gather.py``, those with a gradient first: no step gathers any. How the
parts make one gradient: ``sparse.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.core.problem import Gradients, HeadArrays, HeadGrads, Problem, Wanted
from logitless.core.pytree import register
from logitless.core.row_passes import in_parts, probabilities
from logitless.head.linear import add_dhead, dhidden, raw_logits
from logitless.head.pallas_tpu import kernels
from logitless.head.pallas_tpu.active_rows import Ready, blank_rows, room_for
from logitless.head.pallas_tpu.column_choice import MASS_ERROR, Active, positions
from logitless.head.pallas_tpu.hard_rows import hard_sweep, rows_beside
from logitless.head.pallas_tpu.operands import interpreter, tiles_of
from logitless.head.pallas_tpu.tiles import LANES, Tiles
from logitless.head.sparse.active_columns import Rule, SparseReport
from logitless.head.sparse.gather import Known, Ordered, in_their_place, mean_row, misses, slab_dx, without

CHUNK = 2048
"""Tokens of a backward step, at most."""

GROUP = 1024
"""Hard rows whose dH is made along with dW, at most: it stays in VMEM meanwhile. If they fit into one token tile, dW
needs no accumulator."""


HARD_TOKENS = 256
"""Token tile of the sweep for hard rows, at most: a few per cent of the tokens should not be rounded up to 1024. At
H = 4096 it is 6 % slower per token than a tile of 1024 (an estimate)."""


def chunk_of(p: Problem) -> int:
    """Tokens per backward step: all tokens, or equal parts in multiples of 128."""
    if p.n <= CHUNK:
        return p.n
    equal = -(-p.n // -(-p.n // CHUNK))
    return min(-(-equal // LANES) * LANES, CHUNK)


@register
@dataclasses.dataclass(frozen=True)
class Slabs:
    """What the backward steps over the active columns give."""

    kept: Array  # [tokens] float32: mass of the active columns
    dh: Array | None  # [tokens, H] float32; behind them, with dW, place for a group of hard rows
    weight: Array | None  # [room, H]: rows of dW, in the last slots (``active_rows.py``)
    bias: Array | None  # [most] float32


def over_slabs(rule: Rule, want: Wanted, p: Problem, known: Known, count: Array, chunk: int, active: Active) -> Slabs:
    """Left-out masses, and the wanted gradients (dH, active rows of dW and dbias), for the first ``count`` tokens, in a
    whole number of chunks."""
    (size, width), head = p.h.shape, p.head
    slots = rule.slabs(active.count) * rule.slab

    def slab(i: Array, carry: Slabs) -> Slabs:
        at = rule.most - slots + i * rule.slab
        index = lax.dynamic_slice_in_dim(active.index, at, rule.slab)
        columns = _columns(p, jnp.where(index < head.vocab, index, 0))  # unused slots come first

        def add(k: Array, inner: tuple[Array, Array | None, HeadGrads]) -> tuple[Array, Array | None, HeadGrads]:
            kept, dh, grads = inner

            def cut(a: Array) -> Array:
                return lax.dynamic_slice_in_dim(a, k * chunk, chunk)

            def put(whole: Array, own: Array) -> Array:
                return lax.dynamic_update_slice_in_dim(whole, cut(whole) + own, k * chunk, 0)

            part, own = p.rows(cut), Known(*jax.tree.map(cut, (known.stats, known.g)))
            # Kept: XLA would make the logits once for the masses and once for dx.
            x = lax.optimization_barrier(raw_logits(part.h, columns, jnp.dtype(jnp.float32)))
            kept = put(kept, jnp.sum(probabilities(x, part, own.stats, index[None, :]), axis=1))
            if want:
                dx = slab_dx(x, index, part, own, want.bias)
                dh = None if dh is None else put(dh, dhidden(dx.astype(p.h.dtype), columns))
                grads = add_dhead(grads, dx, part.h, columns)
            return kept, dh, grads

        zero = HeadGrads(
            jnp.zeros((rule.slab, width), jnp.float32) if want.weight else None,
            jnp.zeros((rule.slab,), jnp.float32) if want.bias else None,
        )
        chunks = (count + (chunk - 1)) // chunk
        kept, dh, grads = lax.fori_loop(0, chunks, add, (carry.kept, carry.dh, zero))

        def put(whole: Array | None, own: Array | None) -> Array | None:
            if whole is None or own is None:
                return None
            behind = whole.shape[0] - rule.most
            return lax.dynamic_update_slice_in_dim(whole, own.astype(whole.dtype), behind + at, 0)

        return Slabs(kept, dh, put(carry.weight, grads.weight), put(carry.bias, grads.bias))

    room, interpret = room_for(head.vocab, rule.most), interpreter(p.call.interpret)
    start = Slabs(
        jnp.zeros((size,), jnp.float32),
        jnp.zeros((size + group_of(p) * want.weight, width), jnp.float32) if want.hidden else None,
        blank_rows(room, width, p.dweight_dtype, interpret) if want.weight else None,
        jnp.zeros((rule.most,), jnp.float32) if want.bias else None,
    )
    return lax.fori_loop(0, rule.slabs(active.count), slab, start)


def _columns(p: Problem, index: Array) -> HeadArrays:
    """The part of the head that makes the logits of the columns ``index``."""
    bias = None if p.head.bias is None else p.head.bias.at[index].get(mode="promise_in_bounds")
    weight = kernels.gather(p.head.weight, index, interpreter(p.call.interpret))
    return dataclasses.replace(p.head, weight=weight, bias=bias)


def gradients(
    rule: Rule, want: Wanted, f: Ordered, known: Known, moving: Array, active: Active
) -> tuple[Gradients, SparseReport]:
    """The gradients that are wanted of the tokens ``moving``, which come first, and their report, in the order of the
    call; ``known`` and ``moving`` in that of ``f``. Without cotangents (all zero, nothing wanted) the report is the one
    that they would have if all were of ``logp``."""
    p, vocab_size = f.p, f.p.call.vocab_size
    assert p.tolerance is not None
    slabs = over_slabs(rule, want, p, known, f.count, chunk_of(p), active)
    mass = jnp.where(moving, jnp.maximum(1.0 - slabs.kept, 0.0), 0.0)
    hard = moving & misses(p.tolerance, known.stats, known.g if want else None, vocab_size)(mass + MASS_ERROR)
    report = SparseReport(
        left_out=f.put_back(jnp.where(hard | ~moving, 0.0, mass)),
        rows=f.put_back(moving),
        hard=f.put_back(hard & ~active.dense),
        chunks=jnp.int32(1),
        dense_chunks=active.dense.astype(jnp.int32),
        active=active.count.astype(jnp.float32),
        width=jnp.where(active.dense, p.head.vocab, rule.slabs(active.count) * rule.slab).astype(jnp.float32),
    )
    if not want:
        return Gradients(None, HeadGrads(None, None)), report
    scale = in_their_place(jnp.ones((1, 1), jnp.float32), mass, without(known.g, hard | ~moving), p.transform)
    mean = Mean(scale[:, 0], lambda: mean_row(rule, p))
    ready = None if slabs.weight is None else Ready(slabs.weight, active.index, active.count)
    total = _with_hard_rows(want, f, _hard_first(p, known, hard), slabs, mean, ready)
    bias = total.head.bias if want.bias else None  # the sweep makes dbias beside dW, asked for or not
    if bias is not None and slabs.bias is not None:
        bias = bias.at[active.index].set(slabs.bias, mode="drop", unique_indices=True)
    if bias is not None and p.head.bias is not None and not p.call.partial_head:
        bias = bias.astype(p.head.bias.dtype)
    return Gradients(total.hidden, HeadGrads(total.head.weight, bias)), report


@dataclasses.dataclass(frozen=True)
class Mean:
    """What stands for the columns that a row leaves out: the mean row of the head times ``scale [tokens]``."""

    scale: Array
    row: Callable[[], Array]


def _numbers_at(at: Array, p: Problem, own: Known) -> tuple[Problem, Known]:
    """Tokens ``at`` of a problem, with their known statistics."""

    def take(a: Array) -> Array:
        if a.ndim == 1:
            return a.at[at].get(mode="promise_in_bounds")
        return kernels.gather(a, at, interpreter(p.call.interpret))

    return p.rows(take), Known(*jax.tree.map(take, (own.stats, own.g)))


@dataclasses.dataclass(frozen=True)
class _Hard:
    """The hard rows of a problem's tokens, which stand first in ``p`` and ``known``."""

    rows: Array  # [tokens] bool
    count: Array
    order: Array  # [tokens]: where each comes from
    p: Problem
    known: Known
    tiles: Tiles


def _hard_first(p: Problem, known: Known, hard: Array) -> _Hard:
    """Hidden states of ``hard`` rows are moved to the front in place; none moves backwards."""
    tiles, size, count = _hard_tiles(p), p.n, jnp.sum(hard, dtype=jnp.int32)
    part = next(n for n in (tiles.tokens, LANES, size) if size % n == 0)
    order = jnp.minimum(positions(hard, size, chunk_of(p)), size - 1)

    def gathered(k: Array, h: Array) -> Array:
        rows = lax.dynamic_slice_in_dim(order, k * part, part)
        some = kernels.gather(h, rows, interpreter(p.call.interpret))
        return lax.dynamic_update_slice_in_dim(h, some, k * part, 0)

    q, own = _numbers_at(order, p.with_hidden(p.targets), known)
    q = q.with_hidden(lax.fori_loop(0, (count + (part - 1)) // part, gathered, p.h))
    return _Hard(hard, count, order, q, own, tiles)


def _with_hard_rows(want: Wanted, f: Ordered, hard: _Hard, slabs: Slabs, mean: Mean, ready: Ready | None) -> Gradients:
    """The gradients of all rows: slabs, hard rows, and ``mean`` for the others.

    Avoid ``lax.cond``: operands stay alive until the branch returns. The number of hard rows sets the grid of the first
    sweep and the trips of a loop. dH overwrites the hidden states of the hard rows.
    """
    p, count, tiles, own = hard.p, hard.count, hard.tiles, hard.known
    size, group, interpret = p.n, group_of(p), interpreter(p.call.interpret)
    dh, head, groups = slabs.dh, HeadGrads(None, None), 0
    if ready is not None:
        out = hard_sweep(p, count, own.stats, own.g, ready, tiles, hidden=0 if dh is None else group)
        head, groups = out.head, 1
        if dh is not None and out.hidden is not None:
            by_columns = kernels.gather(dh, hard.order[jnp.minimum(jnp.arange(group), size - 1)], interpret)
            dh = lax.dynamic_update_slice_in_dim(dh, by_columns + out.hidden, size, 0)
    elif want.bias:
        head = HeadGrads(None, kernels.dhead(p, count, own.stats, own.g, tiles=tiles, weight=False).bias)
    if dh is None:
        return Gradients(None, head)

    def more(k: Array, dh: Array) -> Array:
        """``dh`` with a further group of the hard rows, over all columns."""
        at = k * group + jnp.arange(group, dtype=jnp.int32)
        some, numbers = _numbers_at(jnp.minimum(at, size - 1), p, own)
        exact = hard_sweep(some, jnp.clip(count - k * group, 0, group), numbers.stats, numbers.g, None, tiles, group)
        row = jnp.where(at < count, hard.order[jnp.minimum(at, size - 1)], dh.shape[0])
        return dh.at[row].set(exact.hidden, mode="drop")

    dh = lax.fori_loop(groups, (count + (group - 1)) // group, more, dh)
    rank, ids = jnp.cumsum(hard.rows.astype(jnp.int32)) - 1, jnp.arange(size, dtype=jnp.int32)
    row = f.put_back(jnp.where(hard.rows & (rank < groups * group), size + rank, ids))
    return Gradients(_dh_in_call_order(f, dh, row, mean, p), head)


def _dh_in_call_order(f: Ordered, dh: Array, row: Array, mean: Mean, p: Problem) -> Array:
    """Row ``row [N]`` of ``dh`` and the mean row for each token of the call; written over ``p.h`` if that fits."""
    scale, c = f.put_back(mean.scale), mean.row()
    dtype = jnp.dtype(jnp.float32) if p.call.partial_hidden else p.h.dtype

    def made(first: Array | int, count: int, _: Array) -> Array:
        at, by = (lax.dynamic_slice_in_dim(a, first, count) for a in (row, scale))
        return (kernels.gather(dh, at, interpreter(p.call.interpret)) + by[:, None] * c).astype(dtype)

    n = f.given.n
    place = p.h if dtype == p.h.dtype and p.n == n else jnp.zeros((n, p.h.shape[1]), dtype)
    return in_parts(made, kernels.PART, place)


def group_of(p: Problem) -> int:
    """Number of hard rows whose dH is made along with dW: whole token tiles, or all tokens where those are fewer."""
    tokens = _hard_tiles(p).tokens
    return min(max(min(GROUP, rows_beside(p, tokens)) // tokens * tokens, tokens), p.n)


def _hard_tiles(p: Problem) -> Tiles:
    tiles = tiles_of("dhead", p)
    return dataclasses.replace(tiles, tokens=min(tiles.tokens, HARD_TOKENS)) if tiles.tokens > LANES else tiles
