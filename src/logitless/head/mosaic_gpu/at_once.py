"""The sparse backward over all active columns at once: matmuls as large as the device says, one question to the host.

Where the active columns fit the memory meant for them, with the tokens first that have a gradient:

    dx      by one matmul that writes no logits (``dx.py``), over the tiles of tokens and columns that met
            (``blocks.py``), with the mass that each row keeps; in the place of dW, which is not written yet:
            a third of M K / V
    hard    now known. Their dx in the active columns that their tile has not visited: tiles of their own, behind the
            tokens'
    dH      one matmul, with one column more for what the easy rows leave out (its mass times a mean row of the head)
    dW_K    one matmul
    hard    in the columns that are not active, by the same three. Their dW there is *written*, not added to zeros
    dW      dW_K in its place

Every matmul here is a kernel that takes its extents from the device (``product.py``). So none of them waits for the
host, and none is larger than it must be. What does not fit (more columns, more hard rows, or mostly rows that choose
none) goes by slabs of columns (``sparse.py``), half of the tokens at a time: whether it must is the one question,
asked when the hard rows are known. It is a loop of one turn or none, over the gradients as they stand in memory: a
conditional would copy them. After it, the extents of the matmuls above are zero where it has had its turn.

    bytes   at T = 8192, H = 4096, V = 151936: first h in order (64 MiB; the screen's bits are in dW's place); then h
            and the gathered columns of the head (64 + 68); then these and dH (68 + 68), h and dW_K (68 + 68), dW_K and
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
from logitless.head.linear import add_dhead, dot, zero_grads
from logitless.head.mosaic_gpu import blocks, product
from logitless.head.mosaic_gpu.blocks import TOKENS, Visits
from logitless.head.mosaic_gpu.dx import columns_dx
from logitless.head.mosaic_gpu.limits import TILE_K
from logitless.head.mosaic_gpu.screen import MOST_APART
from logitless.head.order import Ordered
from logitless.head.slabs import Known, in_their_place, mass_beside, mean_row, misses, once, without
from logitless.problem import Gradients, Head, HeadGrads, Problem, Wanted
from logitless.pytree import register
from logitless.rows import Sweep, Visit, order_by_rank
from logitless.stats import StatCotangents, TokenStats

COLUMNS = 44
"""Quarters of a slab that the active columns may be; fewer where their part of the head would take more than
:data:`PART` bytes."""

PART = 68 << 20

HARD = 480
"""Hard rows of 8192 tokens: their dx over the vocabulary is the largest array here."""

Rows = tuple[Problem, tuple[TokenStats, StatCotangents]]
"""Some tokens, and what is known of them."""

BySlabs = Callable[[Ordered, Known, HeadGrads], tuple[Gradients, Array]]
"""``(some tokens, what is known of them, the head's gradients of others) -> (gradients, mass left out)``."""


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
    """None where the kernels' copies would have ragged tiles, or where dW has no room for dx."""
    width, vocab = p.h.shape[1], p.head.vocab
    if width % TILE_K or vocab % 8:
        return None
    most = min(COLUMNS * rule.slab // 4, PART // (width * jnp.dtype(p.h.dtype).itemsize), rule.most)
    most = most // TILE_K * TILE_K
    hard = min(HARD * -(-p.n // 8192), -(-p.n // 8) * 8)
    tokens = _in_tiles(p.n)
    shape = _as_rows(vocab * width, tokens + _in_tiles(hard), most)
    return None if shape is None else Room(min(most, shape[1]), hard, tokens, shape)


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


def gradients(f: Ordered, want: Wanted, known: Known, found: Any, rule: Rule, held: Room, by_slabs: BySlabs) -> Any:
    """``(gradients, mass left out [N])``; dH in the order of the call, the mass in that of ``f``."""
    p, c = f.p, found.columns
    fits = held.holds(c.count) & ~c.dense & ~(found.apart > MOST_APART * f.count)
    live = _Live(f.count, c.count, jnp.int32(0)).where(fits)
    index = jnp.concatenate([jnp.full((1,), p.head.vocab + c.index.size, jnp.int32), c.index[: held.columns - 1]])
    part = columns_of.head_columns(p.head, index, ascending=False)
    if want.hidden:
        part = _with_mean(part, rule, p)
    visits = blocks.met(found.spans, index, live.visits(held))
    dx, kept = _columns_dx(p, known, index, part, live, visits, held.dx(want))
    moving = known.g.any_nonzero()
    left_out = jnp.where(moving, mass_beside(kept), 0.0)
    hard = moving & misses(p.tolerance, known.stats, known.g, p.call.vocab_size)(left_out)
    count = jnp.sum(hard, dtype=jnp.int32)
    group = Sweep(order_by_rank(hard, ~hard), 0, count, count, n=p.n, chunk=held.hard).visit(0, held.hard)
    ok, rows = fits & (count <= held.hard), _group(f, group, known)
    live = dataclasses.replace(live, hard=count).where(ok)
    dx = _with_hard(dx, rows, group, index, part, live, visits, held)
    hidden = more = None
    if want.hidden:
        dx = _with_stand_ins(dx, p, known, left_out, hard)
        hidden, more = _dhidden(f, dx, part, live, visits, held)
    # All that is small, now: whatever follows the question waits for the host to prepare it.
    lists = _of_columns(live, visits, held)
    ok, live, lists, rows = lax.optimization_barrier((ok, live, lists, rows))
    weight = dx.reshape(p.head.weight.shape) if want.weight else None
    bias = jnp.zeros((p.head.vocab,), jnp.float32) if want.bias else None
    start = Gradients(hidden, HeadGrads(weight, bias)), left_out
    total, left_out = once(~ok, lambda _: _in_halves(f, want, known, by_slabs), start)
    hidden, head = total.hidden, total.head
    own = HeadGrads(None, None)
    if want.weight or want.bias:
        dx = dx if head.weight is None else head.weight.reshape(dx.shape)
        own, dx, live = _dhead(f, want, dx, group, live, visits, lists, held)
        head = dataclasses.replace(head, weight=dx.reshape(p.head.weight.shape) if want.weight else None)
    left_out, live = lax.optimization_barrier((left_out, live))
    total = _all_columns(f, group, rows, found.spans.active, Gradients(hidden, head), more, live, ok)
    index = jnp.where(ok, index, p.head.vocab + jnp.arange(held.columns, dtype=jnp.int32))
    # Hard rows have zeros there.
    head = columns_of.put_head_columns(total.head, index, own, p.head.layout, add=False, ascending=False)
    return Gradients(total.hidden, head), left_out


# -- the active columns ----------------------------------------------------------------------------------------------


def _with_mean(part: Head, rule: Rule, p: Problem) -> Head:
    """The gathered head with its mean row in front of the active columns; its logits count for nothing."""
    row = mean_row(rule, p).astype(part.weight.dtype)
    row = row if p.head.axis == 0 else row.T
    weight = lax.dynamic_update_slice_in_dim(part.weight, row, 0, p.head.axis)
    return dataclasses.replace(part, weight=lax.optimization_barrier(weight))  # one array, not one with and one without


def _columns_dx(
    p: Problem, known: Known, index: Array, part: Head, live: _Live, visits: Visits, shape: tuple[int, int]
) -> tuple[Array, Array]:
    """``(dx, the mass that rows keep)`` of some tokens in the columns ``index``; the former in an array of this
    ``shape``."""
    at = jnp.arange(index.size, dtype=jnp.int32)
    place = jnp.full((p.head.vocab,), -1, jnp.int32).at[index].set(at, mode="drop", unique_indices=True)
    target = place.at[p.targets].get(mode="fill", fill_value=-1)
    return columns_dx(p, known, part, target, (at > 0) & (at <= live.columns), visits, shape)


def _with_hard(
    dx: Array, rows: Rows, group: Visit, index: Array, part: Head, live: _Live, visits: Visits, held: Room
) -> Array:
    """``dx`` with hard rows once more, behind the tokens: what they have in active columns that their tile has not
    visited."""
    # Whole tiles of columns, as far as dx has any: the last one is read to its end.
    shape = _in_tiles(held.hard), min(-(-held.columns // blocks.COLUMNS) * blocks.COLUMNS, dx.shape[1])
    q, known = rows
    own, _ = _columns_dx(q, Known(*known), index, part, live, live.visits_of_hard(held), shape)
    here = visits.tiles.at[group.read // TOKENS].get(mode="promise_in_bounds")
    here = jnp.repeat(here, blocks.COLUMNS, axis=1)[:, : shape[1]]
    here = jnp.pad(here, ((0, shape[0] - held.hard), (0, 0)))
    return lax.dynamic_update_slice(dx, jnp.where(here, jnp.zeros((), dx.dtype), own), (held.tokens, 0))


def _with_stand_ins(dx: Array, p: Problem, known: Known, left_out: Array, hard: Array) -> Array:
    """``dx`` with what easy rows leave out in the mean row's column."""
    stands = in_their_place(jnp.ones((1, 1), jnp.float32), left_out, without(known.g, hard), p.transform)
    return lax.dynamic_update_slice(dx, stands.astype(dx.dtype), (0, 0))


def _of_tokens(live: _Live, visits: Visits, held: Room) -> product.Lists:
    """What dH of each tile of tokens sums over; hard rows first, since that is most of all."""
    tokens, hard = (-(-x // TOKENS) for x in (live.tokens, live.hard))
    both = _both(live, visits, held)
    place = jnp.arange(len(both.tiles), dtype=jnp.int32)
    place = jnp.where(place < hard, held.tokens // TOKENS + place, place - hard)
    return product.Lists(both.by_tokens(place), tokens + hard, TOKENS, blocks.COLUMNS)


def _of_columns(live: _Live, visits: Visits, held: Room) -> tuple[Array, Array]:
    """What dW of each block of columns sums over, and how many blocks there are."""
    count = jnp.where(live.tokens > 0, -(-(live.columns + 1) // blocks.COLUMNS), 0)
    return _both(live, visits, held).by_columns(), count


def _both(live: _Live, visits: Visits, held: Room) -> Visits:
    """The tiles of the tokens, and those of hard rows behind them."""
    return Visits(jnp.concatenate([visits.tiles, live.visits_of_hard(held).tiles]))


def _dhidden(f: Ordered, dx: Array, part: Head, live: _Live, visits: Visits, held: Room) -> tuple[Array, Array]:
    """dH of the active columns, in the order of the call; and what hard rows have more of it, ``[hard, H]``."""
    p, width = f.p, f.p.h.shape[1]
    deep = dict(right_deep=p.head.axis == 0, shape=(held.rows, width), interpret=p.call.interpret)
    rows = product.product(
        dx, part.weight, (held.rows, width, held.columns), lists=_of_tokens(live, visits, held), **deep
    )
    place = f.place()
    hidden = rows.at[place].get(mode="promise_in_bounds", unique_indices=True)
    hidden = jnp.where((place < live.tokens)[:, None], hidden, jnp.zeros((), rows.dtype))
    return lax.optimization_barrier((hidden, rows[held.tokens : held.tokens + held.hard]))


def _dhead(
    f: Ordered, want: Wanted, dx: Array, group: Visit, live: _Live, visits: Visits, lists: Any, held: Room
) -> tuple[HeadGrads, Array, _Live]:
    """``(the head's gradients in the active columns, dx, live)``: what the latter two are for may not begin before,
    since dW is written over dx."""
    p, weight, bias = f.p, None, None
    if want.weight:
        # Gathered again, not kept: not before the question has been answered.
        at = jnp.pad(jnp.arange(p.n, dtype=jnp.int32), (0, held.tokens - p.n), constant_values=p.n)
        at = jnp.concatenate([at, jnp.where(group.inside(p.n), group.read, p.n)])
        at = jnp.pad(at, (0, held.rows - at.size), constant_values=p.n)
        at, dx = lax.optimization_barrier((at, dx))
        table, count = lists
        by = product.Lists(table, count, blocks.COLUMNS, TOKENS, by_columns=p.head.axis == 1)
        weight = _dweight(p, dx, f.hidden_of(at), (held.columns, held.rows), columns=held.columns, lists=by)
    if want.bias:
        seen = _both(live, visits, held).whole(held.columns)
        bias = _dbias(dx[: held.rows, : held.columns], seen)
    weight, bias, dx, live = lax.optimization_barrier((weight, bias, dx, live))
    return HeadGrads(weight, bias), dx, dataclasses.replace(live, hard=_apart(live.hard))


def _dweight(p: Problem, dx: Array, h: Array, live: tuple[Any, Any], columns: int | None = None, **how: Any) -> Array:
    """dW of so many ``columns``, or ``into`` an array that is there: of dx and the hidden states of its rows, of which
    these columns and rows are ``live``."""
    pair, extent, size = (dx, h), (live[0], h.shape[1]), (columns or 0, h.shape[1])
    if p.head.axis == 1:
        pair, extent, size = pair[::-1], extent[::-1], size[::-1]  # type: ignore[assignment]
    shape = None if columns is None else size
    how |= dict(left_deep=True, right_deep=True, interpret=p.call.interpret)
    return product.product(*pair, (*extent, live[1]), shape=shape, **how)


def _dbias(dx: Array, there: Array) -> Array:
    """The bias' gradient, of dx where it is ``there``."""
    return jnp.sum(jnp.where(there, dx, jnp.zeros((), dx.dtype)), axis=0, dtype=jnp.float32)


def _apart(count: Array) -> Array:
    """``count``, which is not negative, through a loop of two turns that change nothing.

    XLA makes one CUDA graph of all that lies between two loops, and the host prepares a graph as a whole before it
    starts: 0.65 ms, for which the device would wait after a question. So the rest is two of them, and while the device
    works on the first the host prepares the second.
    """
    return lax.fori_loop(0, 2, lambda i, n: jnp.maximum(n, i - 1), count)


# -- hard rows -------------------------------------------------------------------------------------------------------


def _group(f: Ordered, visit: Visit, known: Known) -> Rows:
    """A group of hard rows, and what is known of them."""
    inside = visit.inside(f.p.n)[:, None]
    h = jnp.where(inside, f.hidden_of(visit.read), jnp.zeros((), f.p.h.dtype))
    return visit.problem(f.p, h), visit.known(known.stats, known.g, f.p.n)


def _group_dx(rows: Rows, active: Array, visits: Visits | None = None, shape: Any = None) -> Array:
    """dx ``[G, V]`` of a group of hard rows, zero in the active columns."""
    q, known = rows
    others = ~active & (jnp.arange(q.head.vocab) < q.call.vocab_size)
    target = jnp.where(others.at[q.targets].get(mode="fill", fill_value=False), q.targets, -1)
    return columns_dx(q, Known(*known), q.head, target, others, visits, shape)[0]


def _all_columns(
    f: Ordered, visit: Visit, rows: Rows, active: Array, total: Gradients, more: Array | None, live: _Live, ok: Array
) -> Gradients:
    """``total`` with what hard rows have in columns that are not active: dH added, and ``more`` of it; dW written."""
    q, (size, width), head = rows[0], rows[0].h.shape, f.p.head
    vocab, interpret = head.vocab, f.p.call.interpret
    here = jnp.where(ok, jnp.maximum(live.hard, 1), 0)  # at least one: dW's zeros come from dx, too
    dx = _group_dx(rows, active, blocks.all_of(size, vocab, here, vocab), (size, -(-vocab // TILE_K) * TILE_K))
    hidden, weight, bias = total.hidden, total.head.weight, total.head.bias
    if hidden is not None and more is not None:
        extent = live.hard, width, vocab
        own = product.in_parts(dx, head.weight, extent, right_deep=head.axis == 0, interpret=interpret)
        own = own + jnp.where(jnp.arange(size)[:, None] < live.hard, more.astype(jnp.float32), 0.0)
        at = f.in_call(visit)
        hidden = at.put(hidden, at.take(hidden).astype(jnp.float32) + own)
    if weight is not None:
        weight = _dweight(f.p, dx, q.h, (jnp.where(ok, vocab, 0), here), into=weight)
    if bias is not None:
        bias = bias + _dbias(dx[:, :vocab], (jnp.arange(size) < here)[:, None])
    return Gradients(hidden, HeadGrads(weight, bias))


def add_group(f: Ordered, visit: Visit, known: Known, active: Array, total: Gradients) -> Gradients:
    """``total`` plus what the tokens of ``visit`` have in the columns that are not ``active [V]``: one matmul each for
    the logits of a group of rows over the whole head, its dH and its dW, and no copy of any part of the head."""
    head, rows = f.p.head, _group(f, visit, known)
    dx = _group_dx(rows, active)
    hidden = total.hidden
    if hidden is not None:
        hidden = visit.put(hidden, visit.take(hidden).astype(jnp.float32) + dot(dx, head.weight, (1, head.axis)))
    return Gradients(hidden, add_dhead(total.head, dx, rows[0].h, head))


# -- what does not fit -----------------------------------------------------------------------------------------------


def _in_halves(f: Ordered, want: Wanted, known: Known, by_slabs: BySlabs) -> tuple[Gradients, Array]:
    """All gradients by slabs of columns, dH in the order of the call: in float32 dH of all tokens would be the largest
    buffer. Every other token at a time, or where one half holds them all, that half: what dW has after the first turn
    is rounded, and halves of sorted tokens may be large and of opposite signs."""
    p = f.p
    half = p.n // 2
    both = f.count > half

    def step(i: Array, carry: tuple[Gradients, Array]) -> tuple[Gradients, Array]:
        total, left_out = carry
        own = jnp.arange(half, dtype=jnp.int32)
        own = jnp.where(both, 2 * own + i, own)
        at = Known(*jax.tree.map(lambda x: x.at[own].get(mode="promise_in_bounds"), (known.stats, known.g)))
        new, mass = by_slabs(f.part(own), at, total.head)
        hidden = total.hidden
        if hidden is not None and new.hidden is not None:
            hidden = f.in_call(Visit(own, own)).put(hidden, new.hidden)
        return Gradients(hidden, new.head), left_out.at[own].set(mass, unique_indices=True)

    hidden = jnp.zeros(f.given.h.shape, p.h.dtype) if want.hidden else None
    start = Gradients(hidden, zero_grads(p.head, want, p.head.weight.dtype)), jnp.zeros((p.n,), jnp.float32)
    return lax.fori_loop(0, jnp.where(both, 2, f.count > 0), step, start)
