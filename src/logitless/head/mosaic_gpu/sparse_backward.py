"""The sparse backward over all active columns: extents of matmuls come from the device, one host synchronisation.

For active columns that fit their memory, with tokens ordered by need of a gradient:

    dx      one matmul without logits (``kernels/dlogits_matmul.py``), over the tiles in which tokens and columns met
            (``tile_mask.py``), with the kept mass per row; stored in the dW buffer, which is free: a third of M K / V
    hard    known now. Their dx in all active columns: the same kernel, in tiles behind the tokens' tiles
    dH      one matmul, with one column more for what the easy rows leave out (its mass times a mean row of the head)
    dW_K    one matmul
    hard    in the columns that are not active (``hard_rows.py``). Their dW there is *written*, not added to zeros
    dW      dW_K in its place

Every matmul here is a kernel that takes its extents from the device (``kernels/dynamic_matmul.py``). No matmul waits
for the host or computes more than necessary. What does not fit (more columns, more hard rows, a policy that is not
sparse) goes a chunk of columns at a time, by the same kernels (``column_chunks.py``). This is the only host
synchronisation; it happens when the hard rows are known. It is a zero-or-one-trip loop over the gradients in memory,
because a conditional would copy the gradients. After it, the extents of dW_K are zero where the loop has run, and the
hard rows are those that the loop has left.

    bytes   At T = 8192, H = 4096, V = 151936: first h in order (64 MiB; the screen's bits are in the dW buffer). Then h
            and the gathered columns of the head (64 + 68). Then these and dH in float32 (68 + 152), h and dW_K
            (76 + 68), dW_K and the dx of hard rows with their dH in parts (68 + 111 + 16). h is gathered twice, before
            and after the synchronisation, and not kept. dx has separate memory, 2 T K, with a frozen or [H, V] head.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from logitless.core.problem import Gradients, HeadArrays, HeadGrads, Problem, Wanted
from logitless.core.shapes import PyTree
from logitless.head.mosaic_gpu import column_chunks, dweight_buffer, tile_mask
from logitless.head.mosaic_gpu.column_screen import Screened
from logitless.head.mosaic_gpu.dweight_buffer import Live, Room
from logitless.head.mosaic_gpu.dx_tiles import TOKENS, Slots
from logitless.head.mosaic_gpu.hard_rows import Hard, add_rows, apart, group_of, hard_rows, judged, stand_ins
from logitless.head.mosaic_gpu.kernels.dlogits_matmul import Rows, columns_dx_of, rows_of
from logitless.head.mosaic_gpu.tile_mask import Visits
from logitless.head.sparse import active_columns as columns_of
from logitless.head.sparse.active_columns import Rule
from logitless.head.sparse.column_gather import Known, mean_row, once
from logitless.head.sparse.token_order import Ordered


def gradients(
    f: Ordered, want: Wanted, known: Known, found: Screened, rule: Rule, held: Room
) -> tuple[Gradients, Array, Array, Array]:
    """``(gradients, mass left out [N], columns that a token met, whether that was all)``; dH in the order of the call,
    the mass in that of ``f``."""
    p, c = f.p, found.columns
    fits = held.holds(c.count) & ~c.dense
    live = Live(f.count, c.count + 1, jnp.int32(0)).where(fits)
    index = jnp.concatenate([jnp.full((1,), p.head.vocab + c.index.size, jnp.int32), c.index])[: held.columns]
    index = jnp.concatenate([index, p.head.vocab + jnp.arange(index.size, held.columns, dtype=jnp.int32)])
    part = columns_of.head_columns(p.head, index, ascending=False)
    if want.hidden:
        part = _with_mean(part, rule, p)
    visits = tile_mask.met(found.spans, index, live.visits(held))
    place = Slots(lax.empty(held.dx(p.head, want), p.h.dtype), 0, held.across)
    rows = rows_of(p, known)
    dx, kept = _columns_dx(p, place, p.h, rows, index, part, live, visits)
    left_out, is_hard = judged(p, known, kept)
    hard = hard_rows(is_hard, held.hard)
    ok = fits & (hard.count <= held.hard)
    live = dataclasses.replace(live, hard=hard.count).where(ok)
    dx = _with_hard(place.of(dx), f, hard, rows, index, part, live, held)
    hidden = None
    both = live.with_hard(held, visits)
    if want.hidden:
        dx = _with_stand_ins(dx, held, p, known, left_out, is_hard)
        hidden = _dhidden(f, place.of(dx), hard, part, live, both, held)
    # All that is small, now: whatever follows the question waits for the host to prepare it.
    lists, places = dweight_buffer.of_columns(live, both), dweight_buffer.places_of(f, held, hard, is_hard)
    ok, live, lists, places = lax.optimization_barrier((ok, live, lists, places))
    weight = lax.empty(p.head.weight.shape, p.h.dtype) if want.weight and not held.in_place(want) else None
    bias = jnp.zeros((p.head.vocab,), jnp.float32) if want.bias else None
    # So many hard rows are too many even when every token meets all active columns.
    dense = c.dense | (fits & (hard.count > 2 * held.hard))
    start = column_chunks.State(hidden, weight, bias, dx), left_out, hard, dense

    def chunks(state: PyTree) -> PyTree:
        return column_chunks.gradients(f, want, known, rows, found, rule, held, state[0], state[3])

    total, left_out, hard, dense = once(~ok, chunks, start)
    own, weight, dx = HeadGrads(None, None), total.weight, total.dx
    if want.weight or want.bias:
        own = dweight_buffer.dhead(f, want, place.of(dx), both, lists, places, held)
        # What follows may not begin before: dW is written over dx.
        own, dx, hard = lax.optimization_barrier((own, dx, hard))
        hard = dataclasses.replace(hard, count=apart(hard.count))
    if held.in_place(want):
        weight = dx.reshape(p.head.weight.shape)
    left_out, hard = lax.optimization_barrier((left_out, hard))
    all_of_it = Gradients(total.hidden, HeadGrads(weight, total.bias))
    all_of_it = add_rows(f, hard, rows, found.spans.active, all_of_it, ok)
    index = jnp.where(ok, index, p.head.vocab + jnp.arange(held.columns, dtype=jnp.int32))
    # Hard rows have zeros there.
    head = columns_of.put_head_columns(all_of_it.head, index, own, p.head.layout, add=False, ascending=False)
    return Gradients(all_of_it.hidden, head), left_out, jnp.where(ok, visits.columns(), c.count), dense


def _with_mean(part: HeadArrays, rule: Rule, p: Problem) -> HeadArrays:
    """The gathered head with its mean row in front of the active columns; its logits count for nothing."""
    row = mean_row(rule, p).astype(part.weight.dtype)
    row = row if p.head.axis == 0 else row.T
    weight = lax.dynamic_update_slice_in_dim(part.weight, row, 0, p.head.axis)
    return dataclasses.replace(part, weight=lax.optimization_barrier(weight))  # a single array, instead of two variants


def _columns_dx(
    p: Problem, place: Slots, h: Array, rows: Rows, index: Array, part: HeadArrays, live: Live, visits: Visits
) -> tuple[Array, Array]:
    """``(dx, the mass that rows keep)`` of some tokens, whose hidden states are the first of ``h``, in the columns
    ``index`` but the first."""
    at = jnp.arange(index.size, dtype=jnp.int32)
    return columns_dx_of(p, place, h, rows, index, part, (at > 0) & (at < live.columns), visits)


def _with_hard(
    dx: Slots, f: Ordered, hard: Hard, rows: Rows, index: Array, part: HeadArrays, live: Live, held: Room
) -> Array:
    """``dx`` with hard rows once more, behind the tokens: in all active columns, whatever their tile has visited."""
    some, own = group_of(f, hard.visit(0, held.hard, f.p.n), rows)
    h = lax.dynamic_update_slice(f.p.h, some, (0, 0))  # of equal shape: the same kernel serves
    visits = tile_mask.all_of(held.tokens, held.columns, live.hard, live.columns)
    behind = dataclasses.replace(dx, first=held.token_tiles * held.across)
    return _columns_dx(f.p, behind, h, own, index, part, live, visits)[0]


def _with_stand_ins(dx: Array, held: Room, p: Problem, known: Known, left_out: Array, hard: Array) -> Array:
    """``dx`` with what easy rows leave out in the mean row's column."""
    stands = stand_ins(p, known, left_out, hard)
    at = jnp.arange(p.n, dtype=jnp.int32)
    at = at // TOKENS * (held.across * TOKENS) + at % TOKENS
    return dx.at[at, 0].set(stands[:, 0].astype(dx.dtype), mode="promise_in_bounds", unique_indices=True)


def _dhidden(f: Ordered, dx: Slots, hard: Hard, part: HeadArrays, live: Live, both: Visits, held: Room) -> Array:
    """dH of the active columns, in the order of the call; hard rows' is that of their second place."""
    second = held.tokens + jnp.arange(held.hard, dtype=jnp.int32)
    first = f.place
    place = first.at[f.in_call(hard.visit(0, held.hard, f.p.n)).write].set(second, mode="drop")

    half, hidden = dweight_buffer.dhidden(f, dx, part, live, both, held, place), jnp.zeros((), dx.array.dtype)
    for i in range(2):
        which, rows = half(i)
        hidden = jnp.where((which & (first < live.tokens))[:, None], rows.astype(hidden.dtype), hidden)
    return hidden
