"""The sparse backward over all active columns at once: matmuls as large as the device says, one question to the host.

Where the active columns fit the memory meant for them, with the tokens first that have a gradient:

    dx      by one matmul that writes no logits (``dx.py``), over the tiles of tokens and columns that met
            (``blocks.py``), with the mass that each row keeps; in the place of dW, which is not written yet:
            a third of M K / V
    hard    now known. Their dx in all active columns: by the same kernel, as tiles of their own behind the tokens'
    dH      one matmul, with one column more for what the easy rows leave out (its mass times a mean row of the head)
    dW_K    one matmul
    hard    in the columns that are not active (``hard.py``). Their dW there is *written*, not added to zeros
    dW      dW_K in its place

Every matmul here is a kernel that takes its extents from the device (``product.py``). So none of them waits for the
host, and none is larger than it must be. What does not fit (more columns, more hard rows, a policy that is not sparse)
goes by slabs of columns (``by_slabs.py``), half of the tokens at a time: whether it must is the one question,
asked when the hard rows are known. It is a loop of one turn or none, over the gradients as they stand in memory: a
conditional would copy them. After it, the extents of dW_K are zero where it has had its turn, and hard rows are those
that it has left.

    bytes   at T = 8192, H = 4096, V = 151936: first h in order (64 MiB; the screen's bits are in dW's place); then h
            and the gathered columns of the head (64 + 68); then these and dH (68 + 76), h and dW_K (76 + 68), dW_K and
            the dx of hard rows with their dH in parts (68 + 139 + 16). h is gathered twice, on both sides of the
            question, and not kept
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.head import columns as columns_of
from logitless.head.columns import Rule
from logitless.head.mosaic_gpu import blocks, product
from logitless.head.mosaic_gpu.blocks import TOKENS, Visits
from logitless.head.mosaic_gpu.dx import columns_dx_into
from logitless.head.mosaic_gpu.hard import Hard, add_rows, apart, dbias, dweight, group_of, hard_rows, most_rows
from logitless.head.mosaic_gpu.limits import TILE_K
from logitless.head.mosaic_gpu.screen import Screened
from logitless.head.order import Ordered
from logitless.head.slabs import Known, in_their_place, mass_beside, mean_row, misses, once, without
from logitless.problem import Gradients, Head, HeadGrads, Problem, Wanted
from logitless.pytree import register
from logitless.rows import Visit

COLUMNS = 11264
"""Active columns that go at once; fewer where their part of the head would take more than :data:`PART` bytes."""

PART = 68 << 20

BySlabs = Callable[[Ordered, Known, HeadGrads], tuple[Gradients, Array, Array]]
"""``(some tokens, what is known of them, the head's gradients of others) -> (gradients, mass left out, hard rows that
have not been through all columns)``."""


@dataclasses.dataclass(frozen=True)
class Room:
    """How much goes at once."""

    columns: int  # the first of them is the mean row's
    hard: int  # rows
    tokens: int  # in whole tiles
    in_dw: tuple[int, int]  # the shape in which dx stands in the place of dW

    def holds(self, columns: Array) -> Array:
        return columns < self.columns

    @property
    def rows(self) -> int:
        """Of dx: tokens, and hard ones once more, in whole tiles."""
        return self.tokens + _in_tiles(self.hard)

    def dx(self, want: Wanted) -> tuple[int, int]:
        """The shape of dx: in the place of dW, or as small as it may be where there is none."""
        return self.in_dw if want.weight else (self.rows, self.columns)


def _in_tiles(tokens: int) -> int:
    return -(-tokens // TOKENS) * TOKENS


def room(p: Any, rule: Rule) -> Room | None:
    """None where the kernels' copies would have ragged tiles, or where dW has no room for dx. Where it is scarce, room
    for columns comes first: there may be fewer groups of hard rows."""
    width, vocab = p.h.shape[1], p.head.vocab
    if width % TILE_K or vocab % 8:
        return None
    most = min(COLUMNS, PART // (width * jnp.dtype(p.h.dtype).itemsize), rule.most)
    most = most // TILE_K * TILE_K
    tokens, found = _in_tiles(p.n), None
    for hard in most_rows(p.n, p.head):
        shape = _as_rows(vocab * width, tokens + _in_tiles(hard), most)
        if shape is not None and (found is None or shape[1] > found.in_dw[1]):
            found = Room(min(most, shape[1]), hard, tokens, shape)
        if found is not None and found.columns == most:
            break
    return found


def _as_rows(size: int, rows: int, columns: int) -> tuple[int, int] | None:
    """``size`` numbers as at least ``rows`` rows, in whole tiles: the shortest of at least ``columns``, or else the
    longest."""

    def fits(width: int) -> bool:
        return size % (8 * width) == 0 and size // width >= rows

    wider = range(max(columns, TILE_K), size // rows + 1, TILE_K)
    width = next(filter(fits, wider), None) or next(filter(fits, range(columns - TILE_K, 0, -TILE_K)), None)
    return None if width is None else (size // width, width)


@register
@dataclasses.dataclass(frozen=True)
class _Live:
    """How many there are of tokens with a gradient, active columns and hard rows; zero where all goes by slabs."""

    tokens: Array
    columns: Array
    hard: Array

    def where(self, which: Array) -> _Live:
        return _Live(*(jnp.where(which, x, 0) for x in (self.tokens, self.columns, self.hard)))

    def visits(self, held: Room) -> Visits:
        """All tiles of tokens and columns, the mean row's among them."""
        return blocks.all_of(held.tokens, held.columns, self.tokens, self.columns + 1)

    def visits_of_hard(self, held: Room) -> Visits:
        return blocks.all_of(held.hard, held.columns, self.hard, self.columns + 1)


def gradients(
    f: Ordered, want: Wanted, known: Known, found: Screened, rule: Rule, held: Room, by_slabs: BySlabs
) -> Any:
    """``(gradients, mass left out [N], columns that a token met)``; dH in the order of the call, the mass in that of
    ``f``."""
    p, c = f.p, found.columns
    fits = held.holds(c.count) & ~c.dense
    live = _Live(f.count, c.count, jnp.int32(0)).where(fits)
    index = jnp.concatenate([jnp.full((1,), p.head.vocab + c.index.size, jnp.int32), c.index[: held.columns - 1]])
    part = columns_of.head_columns(p.head, index, ascending=False)
    if want.hidden:
        part = _with_mean(part, rule, p)
    visits = blocks.met(found.spans, index, live.visits(held))
    empty = lax.empty(held.dx(want), p.h.dtype)
    dx, kept = _columns_dx(empty, 0, p.h, (p, known), index, part, live, visits)
    moving = known.g.any_nonzero()
    left_out = jnp.where(moving, mass_beside(kept), 0.0)
    is_hard = moving & misses(p.tolerance, known.stats, known.g, p.call.vocab_size)(left_out)
    hard = hard_rows(is_hard, held.hard)
    ok = fits & (hard.count <= held.hard)
    live = dataclasses.replace(live, hard=hard.count).where(ok)
    dx = _with_hard(dx, f, hard, known, index, part, live, held)
    hidden = None
    # Of the tokens, and of hard rows behind them.
    both = Visits(jnp.concatenate([visits.tiles, live.visits_of_hard(held).tiles]))
    if want.hidden:
        dx = _with_stand_ins(dx, p, known, left_out, is_hard)
        hidden = _dhidden(f, dx, hard, part, live, both, held)
    # All that is small, now: whatever follows the question waits for the host to prepare it.
    lists, places = _of_columns(live, both), _both_places(f, hard, is_hard, held)
    ok, live, lists, places = lax.optimization_barrier((ok, live, lists, places))
    weight = dx.reshape(p.head.weight.shape) if want.weight else None
    bias = jnp.zeros((p.head.vocab,), jnp.float32) if want.bias else None
    start = Gradients(hidden, HeadGrads(weight, bias)), left_out, hard

    def slabs(state: Any) -> Any:
        # In its own memory: an array of zeros would be a second dW.
        blank = jax.tree.map(lambda x: jnp.where(ok, x, jnp.zeros((), x.dtype)), state[0])
        return _in_halves(f, known, held, by_slabs, blank)

    total, left_out, hard = once(~ok, slabs, start)
    head, own = total.head, HeadGrads(None, None)
    if want.weight or want.bias:
        dx = dx if head.weight is None else head.weight.reshape(dx.shape)
        own, dx, hard = _dhead(f, want, dx, hard, both, lists, places, held)
        head = dataclasses.replace(head, weight=dx.reshape(p.head.weight.shape) if want.weight else None)
    left_out, hard = lax.optimization_barrier((left_out, hard))
    total = add_rows(f, hard, known, found.spans.active, Gradients(total.hidden, head), ok)
    index = jnp.where(ok, index, p.head.vocab + jnp.arange(held.columns, dtype=jnp.int32))
    # Hard rows have zeros there.
    head = columns_of.put_head_columns(total.head, index, own, p.head.layout, add=False, ascending=False)
    return Gradients(total.hidden, head), left_out, jnp.where(ok, visits.columns(), c.count)


# -- the active columns ----------------------------------------------------------------------------------------------


def _with_mean(part: Head, rule: Rule, p: Problem) -> Head:
    """The gathered head with its mean row in front of the active columns; its logits count for nothing."""
    row = mean_row(rule, p).astype(part.weight.dtype)
    row = row if p.head.axis == 0 else row.T
    weight = lax.dynamic_update_slice_in_dim(part.weight, row, 0, p.head.axis)
    return dataclasses.replace(part, weight=lax.optimization_barrier(weight))  # one array, not one with and one without


def _columns_dx(
    place: Array, behind: int, h: Array, some: tuple[Problem, Known], index: Array, part: Head, live: _Live, v: Visits
) -> tuple[Array, Array]:
    """``(dx, the mass that rows keep)`` of some tokens, whose hidden states are the first of ``h``, in the columns
    ``index``; the former in the array ``place``, from row ``behind`` on."""
    at = jnp.arange(index.size, dtype=jnp.int32)
    where = jnp.full((some[0].head.vocab,), -1, jnp.int32).at[index].set(at, mode="drop", unique_indices=True)
    target = where.at[some[0].targets].get(mode="fill", fill_value=-1)
    counts = (at > 0) & (at <= live.columns)
    return columns_dx_into(place, behind // TOKENS, h, (*some, target), part, counts, v)


def _with_hard(
    dx: Array, f: Ordered, hard: Hard, known: Known, index: Array, part: Head, live: _Live, held: Room
) -> Array:
    """``dx`` with hard rows once more, behind the tokens: in all active columns, whatever their tile has visited."""
    q, own = group_of(f, hard.visit(0, held.hard, f.p.n), known)
    h = lax.dynamic_update_slice(f.p.h, q.h, (0, 0))  # of the same shape: so it is the same kernel
    visits = blocks.all_of(held.tokens, held.columns, live.hard, live.columns + 1)
    return _columns_dx(dx, held.tokens, h, (q, own), index, part, live, visits)[0]


def _with_stand_ins(dx: Array, p: Problem, known: Known, left_out: Array, hard: Array) -> Array:
    """``dx`` with what easy rows leave out in the mean row's column."""
    stands = in_their_place(jnp.ones((1, 1), jnp.float32), left_out, without(known.g, hard), p.transform)
    return lax.dynamic_update_slice(dx, stands.astype(dx.dtype), (0, 0))


def _of_tokens(live: _Live, both: Visits, held: Room) -> product.Lists:
    """What dH of each tile of tokens sums over; hard rows first, since that is most of all."""
    tokens, hard = (-(-x // TOKENS) for x in (live.tokens, live.hard))
    place = jnp.arange(len(both.tiles), dtype=jnp.int32)
    place = jnp.where(place < hard, held.tokens // TOKENS + place, place - hard)
    return product.Lists(both.by_tokens(place), tokens + hard, TOKENS, blocks.COLUMNS)


def _of_columns(live: _Live, both: Visits) -> tuple[Array, Array]:
    """What dW of each block of columns sums over, and how many blocks there are."""
    return both.by_columns(), jnp.where(live.tokens > 0, -(-(live.columns + 1) // blocks.COLUMNS), 0)


def _dhidden(f: Ordered, dx: Array, hard: Hard, part: Head, live: _Live, both: Visits, held: Room) -> Array:
    """dH of the active columns, in the order of the call; hard rows' is that of their second place."""
    p, width = f.p, f.p.h.shape[1]
    how = dict(right_deep=p.head.axis == 0, shape=(held.rows, width), interpret=p.call.interpret)
    extent = held.rows, width, held.columns
    rows = product.product(dx, part.weight, extent, lists=_of_tokens(live, both, held), **how)
    first = f.place()
    second = held.tokens + jnp.arange(held.hard, dtype=jnp.int32)
    place = first.at[f.in_call(hard.visit(0, held.hard, p.n)).write].set(second, mode="drop")
    hidden = rows.at[place].get(mode="promise_in_bounds", unique_indices=True)
    return jnp.where((first < live.tokens)[:, None], hidden, jnp.zeros((), rows.dtype))


def _both_places(f: Ordered, hard: Hard, is_hard: Array, held: Room) -> Array:
    """int32 ``[rows of dx]``: the token of each; hard ones have their second place only. ``n`` where there is none."""
    n = f.p.n
    first = jnp.where(is_hard, n, jnp.arange(n, dtype=jnp.int32))
    second = hard.visit(0, held.hard, n).write
    pads = ((0, held.tokens - n), (0, held.rows - held.tokens - held.hard))
    return jnp.concatenate([jnp.pad(x, pad, constant_values=n) for x, pad in zip((first, second), pads, strict=True)])


def _dhead(
    f: Ordered, want: Wanted, dx: Array, hard: Hard, both: Visits, lists: Any, places: Array, held: Room
) -> tuple[HeadGrads, Array, Hard]:
    """``(the head's gradients in the active columns, dx, hard)``: what the latter two are for may not begin before,
    since dW is written over dx."""
    p, weight, bias = f.p, None, None
    if want.weight:
        # Gathered again, not kept: not before the question has been answered.
        at, dx = lax.optimization_barrier((places, dx))
        table, count = lists
        by = product.Lists(table, count, blocks.COLUMNS, TOKENS, by_columns=p.head.axis == 1)
        weight = dweight(p, dx, f.hidden_of(at), (held.columns, held.rows), columns=held.columns, lists=by)
    if want.bias:
        there = both.whole(held.columns) & (places < p.n)[:, None]
        bias = dbias(dx[: held.rows, : held.columns], there)
    weight, bias, dx, hard = lax.optimization_barrier((weight, bias, dx, hard))
    return HeadGrads(weight, bias), dx, dataclasses.replace(hard, count=apart(hard.count))


# -- what does not fit -----------------------------------------------------------------------------------------------


def _in_halves(
    f: Ordered, known: Known, held: Room, by_slabs: BySlabs, blank: Gradients
) -> tuple[Gradients, Array, Hard]:
    """All gradients, added to ``blank`` ones, by slabs of columns, but for hard rows that are few; dH in the order of
    the call: in float32 dH of all tokens would be the largest buffer. Every other token at a time, or where one half
    holds them all, that half: what dW has after the first turn is rounded, and halves of sorted tokens may be large and
    of opposite signs."""
    p = f.p
    half = p.n // 2
    both = f.count > half

    def step(i: Array, carry: tuple[Gradients, Array, Array]) -> tuple[Gradients, Array, Array]:
        total, left_out, left = carry
        own = jnp.arange(half, dtype=jnp.int32)
        own = jnp.where(both, 2 * own + i, own)
        at = Known(*jax.tree.map(lambda x: x.at[own].get(mode="promise_in_bounds"), (known.stats, known.g)))
        new, mass, hard = by_slabs(f.part(own), at, total.head)
        hidden = total.hidden
        if hidden is not None and new.hidden is not None:
            hidden = f.in_call(Visit(own, own)).put(hidden, new.hidden)
        return Gradients(hidden, new.head), left_out.at[own].set(mass), left.at[own].set(hard)

    start = blank, jnp.zeros((p.n,), jnp.float32), jnp.zeros((p.n,), bool)
    total, left_out, left = lax.fori_loop(0, jnp.where(both, 2, f.count > 0), step, start)
    return total, left_out, hard_rows(left, held.hard)
