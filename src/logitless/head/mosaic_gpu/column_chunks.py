"""The sparse backward on a Hopper GPU for what does not go at once: all tokens with a gradient, some columns at a time.

First over the active columns, as many turns as they take. Rows that leave out more than the tolerance are hard; if they
are few, ``hard_rows.py`` takes them through the other columns. If they are many, or if the policy is not sparse at all,
all tokens go through all columns, in the order of the vocabulary. Every turn is three matmuls, by the kernels with
which columns go at once:

    dx      of all tokens and the chunk's columns                                                       M c / V
    dH      in float32, added up in two numbers of its own dtype, the sum and what it lacks             M c / V
    dW      of these columns, over all tokens: summed in float32, and rounded once                      M c / V

A policy that is not sparse costs four matmuls, with that of the statistics, where the exact path, which keeps logits,
takes three.

If dx shares memory with dW, finished rows of dW fill the front, and dx the remaining space behind. The remaining space
shrinks, and the chunks shrink with it; for the last column tiles no space would be left. These tiles therefore come
first, while all space is free, and their dW waits in a buffer. Rows for active columns are adjacent at first and then
moved to their final places, last row first: no row moves forward, so no row is overwritten before its move.

    bytes   what dH lacks (64 MiB at T = 8192, H = 4096), and at a time the chunk's part of the head and h, or half of
            its dH, or h and its dW (68 + 76): 208 MiB. h is gathered for each matmul
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.core.problem import HeadGrads, Wanted
from logitless.core.pytree import register
from logitless.core.shapes import PyTree
from logitless.head.mosaic_gpu import dweight_buffer
from logitless.head.mosaic_gpu.column_screen import Screened
from logitless.head.mosaic_gpu.dweight_buffer import Live, Room
from logitless.head.mosaic_gpu.dx_tiles import COLUMNS, TOKENS, Slots, tile_count
from logitless.head.mosaic_gpu.hard_rows import Hard, can_add, hard_rows, judged, stand_ins
from logitless.head.mosaic_gpu.kernels.dlogits_matmul import Rows, columns_dx_of
from logitless.head.sparse import active_columns as columns_of
from logitless.head.sparse.active_columns import Rule
from logitless.head.sparse.column_gather import Known, mean_row
from logitless.head.sparse.token_order import Ordered


@register
@dataclasses.dataclass(frozen=True)
class State:
    """The gradients so far, in the order of the call. If dx shares memory with dW, ``weight`` is ``None``."""

    hidden: Array | None
    weight: Array | None
    bias: Array | None
    dx: Array


def gradients(
    f: Ordered,
    want: Wanted,
    known: Known,
    rows: Rows,
    found: Screened,
    rule: Rule,
    held: Room,
    state: State,
    dense: Array,
) -> tuple[State, Array, Hard, Array]:
    """``(gradients in the memory of state, mass left out [N], hard rows that are left to others, whether all tokens
    went through all columns)``; where ``dense``, that is known from the start."""
    p, active = f.p, found.spans.active
    leave = held.hard if can_add(p.head) else 0

    def over(carry: tuple[Array, Array, State, Array, Array]) -> tuple[Array, Array, State, Array, Array]:
        _, everything, state, _, _ = carry
        chosen = active | everything
        state, lacks, kept = _over_columns(f, want, rows, chosen, held, state)
        left_out, hard = (jnp.where(everything, jnp.zeros((), x.dtype), x) for x in judged(p, known, kept))
        many = jnp.sum(hard, dtype=jnp.int32) > leave
        if state.hidden is not None:
            rest = f.put_back(stand_ins(p, known, left_out, hard)) * mean_row(rule, p)
            hidden = state.hidden.astype(jnp.float32) + lacks.astype(jnp.float32) + rest
            state = dataclasses.replace(state, hidden=hidden.astype(state.hidden.dtype))
        return many, everything | many, state, left_out, hard

    nothing, nobody = jnp.zeros((p.n,), jnp.float32), jnp.zeros((p.n,), bool)
    start = jnp.asarray(True), dense, state, nothing, nobody
    _, everything, state, left_out, hard = lax.while_loop(lambda carry: carry[0], over, start)
    return state, left_out, hard_rows(hard, held.hard), everything


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The order of columns, in tiles of ``columns`` adjacent columns."""

    held: Room
    width: int
    in_place: bool
    columns: Array  # how many there are

    @property
    def tiles(self) -> Array:
        return tile_count(self.columns, COLUMNS)

    @property
    def last(self) -> int:
        """Tiles that have the first turn, at most."""
        return min(dweight_buffer.last_tiles(self.held, self.width), self.held.across) if self.in_place else 0

    @property
    def end(self) -> Array:
        """Number of tiles in the regular order."""
        return jnp.maximum(self.tiles - self.last, 0)

    def turn(self, begin: Array) -> tuple[Array, Array, Array]:
        """``(first tile, count, first slot of dx)`` with the tiles before ``begin`` finished; the last tiles if
        negative."""
        slots, most = self.held.in_dw, jnp.int32(self.held.across)
        if not self.in_place:
            return begin, jnp.minimum(most, self.end - begin), jnp.int32(0)
        finished = tile_count(jnp.maximum(begin, 0) * self.width, TOKENS)  # slots
        size = jnp.minimum(jnp.minimum(most, (slots - finished) // self.held.token_tiles), self.end - begin)
        first, size = jnp.where(begin < 0, self.end, begin), jnp.where(begin < 0, self.tiles - self.end, size)
        return first, size, slots - size * self.held.token_tiles


def _over_columns(
    f: Ordered, want: Wanted, rows: Rows, chosen: Array, held: Room, state: State
) -> tuple[State, PyTree, Array]:
    """``(gradients, what dH lacks, kept mass [N])`` of all tokens in the columns ``chosen [V]``; zero in others."""
    p, head, width = f.p, f.p.head, f.p.h.shape[1]
    vocab, place, count = head.vocab, f.place, jnp.sum(chosen, dtype=jnp.int32)
    plan = _Plan(held, width, held.in_place(want), count)
    whole = tile_count(vocab, COLUMNS) * COLUMNS + held.columns
    ids = jnp.arange(whole, dtype=jnp.int32)
    index = jnp.sort(jnp.where(jnp.pad(chosen, (0, whole - vocab)), ids, vocab + ids))
    at = jnp.arange(held.columns, dtype=jnp.int32)
    nowhere, places = vocab + at, dweight_buffer.places_of(f, held)

    def add(pair: tuple[Array, Array], which: Array, more: Array) -> tuple[Array, Array]:
        return _added(*pair, jnp.where((which & (place < f.count))[:, None], more, 0.0))

    def turn(carry: PyTree) -> PyTree:
        begin, state, lacks, last, kept = carry
        first, tiles, slot = plan.turn(begin)
        position = first * COLUMNS + at
        there = (at < tiles * COLUMNS) & (position < count)
        own = jnp.where(there, lax.dynamic_slice_in_dim(index, first * COLUMNS, held.columns), nowhere)
        part = columns_of.head_columns(head, own)
        # Gathered in every turn, not kept: there is no room beside dH.
        order, array = lax.optimization_barrier((jnp.arange(p.n, dtype=jnp.int32), state.dx))
        dx = Slots(array, slot, tiles if plan.in_place else held.across)
        live = Live(f.count, jnp.sum(there, dtype=jnp.int32), jnp.int32(0)).where(count > 0)
        visits = live.visits(held)
        counts = there & (own < p.call.vocab_size)
        array, mass = columns_dx_of(p, dx, f.hidden_of(order), rows, own, part, counts, visits)
        both, hidden = live.with_hard(held, visits), state.hidden
        if hidden is not None:
            half = dweight_buffer.dhidden(f, dx.of(array), part, live, both, held, place)
            pair = lax.fori_loop(0, 2, lambda i, pair: add(pair, *half(i)), (hidden, lacks))
            (hidden, lacks), array = lax.optimization_barrier((pair, array))
        grads = dweight_buffer.dhead(f, want, dx.of(array), both, dweight_buffer.of_columns(live, both), places, held)
        grads, array = lax.optimization_barrier((grads, array))
        if plan.in_place:
            finished = jnp.where(there & (begin >= 0), position, nowhere)
            array = _put(array.reshape(head.weight.shape), finished, grads.weight).reshape(array.shape)
            last = jnp.where(begin < 0, grads.weight[: len(last)], last)
        total = columns_of.put_head_columns(HeadGrads(state.weight, state.bias), own, grads, head.layout, add=False)
        begin = jnp.where(begin < 0, 0, begin + tiles)
        return begin, State(hidden, total.weight, total.bias, array), lacks, last, kept + mass

    hidden, weight, bias = jax.tree.map(jnp.zeros_like, (state.hidden, state.weight, state.bias))
    blank = State(hidden, weight, bias, state.dx)
    last = jnp.zeros((plan.last * COLUMNS, width), state.dx.dtype)
    kept = jnp.zeros((p.n,), jnp.float32)
    start = jnp.int32(-1 if plan.last else 0), blank, blank.hidden, last, kept
    _, state, lacks, last, kept = lax.while_loop(lambda carry: carry[0] < plan.end, turn, start)
    if plan.in_place:
        weight = state.dx.reshape(head.weight.shape)
        position = plan.end * COLUMNS + jnp.arange(len(last), dtype=jnp.int32)
        weight = _put(weight, jnp.where(position < count, position, vocab + position), last)
        weight = _spread(weight, index, chosen, count, held.columns)
        state = dataclasses.replace(state, dx=weight.reshape(state.dx.shape))
    return state, lacks, kept


def _added(total: Array, lacks: Array, more: Array) -> tuple[Array, Array]:
    """``total`` and ``more``, float32, in the dtype of ``total``; and what it lacks of their sum with ``lacks``."""
    whole = total.astype(jnp.float32) + lacks.astype(jnp.float32) + more
    kind = jnp.finfo(total.dtype)
    # Said so: a compiler may leave out that a number is rounded and made wide again.
    near = lax.reduce_precision(whole, kind.nexp, kind.nmant)
    return near.astype(total.dtype), (whole - near).astype(total.dtype)


def _put(whole: Array, index: Array, rows: Array) -> Array:
    """``whole`` with ``rows`` in the places ``index``, ascending; none beyond it."""
    return whole.at[index].set(rows, mode="drop", unique_indices=True, indices_are_sorted=True)


def _spread(weight: Array, index: Array, chosen: Array, count: Array, size: int) -> Array:
    """``weight [V, H]``, the first ``count`` rows of which are those of the columns ``index``, ascending, with each in
    its own place and zeros elsewhere; ``size`` rows at a time, the last ones first."""
    vocab = len(weight)
    at = jnp.arange(size, dtype=jnp.int32)
    trips = jnp.where(count < vocab, tile_count(count, size), 0)

    def move(i: Array, weight: Array) -> Array:
        begin = (trips - 1 - i) * size
        rows = weight.at[begin + at].get(mode="clip")
        rows, weight = lax.optimization_barrier((rows, weight))
        own = jnp.where(begin + at < count, lax.dynamic_slice_in_dim(index, begin, size), vocab + at)
        return _put(weight, own, rows)

    weight = lax.fori_loop(0, trips, move, weight)
    return jnp.where(chosen[:, None], weight, jnp.zeros((), weight.dtype))
