"""The sparse backward over all active columns at once: matmuls as large as the device says, one question to the host.

Where the active columns fit the memory meant for them, with the tokens first that have a gradient:

    dx      by one matmul that writes no logits (``dx.py``), with the mass that each row keeps; in the place of dW,
            which is not written yet                                                                      M K / V
    dH      one matmul, with one column more for what the easy rows leave out (its mass times a mean row of the head)
    dW_K    one matmul
    hard    now known: through all columns, by the same three. Their dW in the other columns is *written*, not added
            to zeros
    dW      dW_K in its place

Every matmul here is a kernel that takes its extents from the device (``product.py``). So none of them waits for the
host, and none is larger than it must be. What does not fit (more columns, more hard rows, or mostly rows that choose
none) goes by slabs of columns (``sparse.py``), half of the tokens at a time: whether it must is the one question,
asked when the hard rows are known. It is a loop of one turn or none, over the gradients as they stand in memory: a
conditional would copy them. After it, the extents of the matmuls above are zero where it has had its turn.

    bytes   at T = 8192, H = 4096, V = 151936: first h in order (64 MiB; the screen's bits are in dW's place); then h
            and the gathered columns of the head (64 + 68); then these and dH (68 + 64), h and dW_K (64 + 68), dW_K and
            the dx of hard rows with their dH in parts (68 + 139 + 16). h is gathered twice, on both sides of the
            question, and not kept
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from logitless.head import columns as columns_of
from logitless.head.columns import Rule
from logitless.head.linear import add_dhead, dot, zero_grads
from logitless.head.mosaic_gpu import product
from logitless.head.mosaic_gpu.dx import Live, columns_dx
from logitless.head.mosaic_gpu.limits import TILE_K
from logitless.head.mosaic_gpu.schedule import Tiles
from logitless.head.mosaic_gpu.screen import MOST_APART
from logitless.head.order import Ordered, some
from logitless.head.slabs import Known, in_their_place, mass_beside, mean_row, misses, once, without
from logitless.problem import Gradients, Head, HeadGrads, Problem, Wanted
from logitless.rows import Sweep, Visit, order_by_rank
from logitless.stats import StatCotangents, TokenStats

COLUMNS = 44
"""Quarters of a slab that the active columns may be; fewer where their part of the head would take more than
:data:`PART` bytes."""

PART = 68 << 20

HARD = 480
"""Hard rows of 8192 tokens: their dx over the vocabulary is the largest array here."""

BySlabs = Callable[[Ordered, Known, HeadGrads], tuple[Gradients, Array]]
"""``(some tokens, what is known of them, the head's gradients of others) -> (gradients, mass left out)``."""


@dataclasses.dataclass(frozen=True)
class Room:
    """How much goes at once."""

    columns: int  # one of them is the mean row's
    hard: int  # rows
    tokens: int  # in whole tiles
    in_dw: tuple[int, int]  # the shape in which dx stands in the place of dW

    def holds(self, columns: Array) -> Array:
        return columns < self.columns

    def dx(self, want: Wanted) -> tuple[int, int]:
        """The shape of dx: in the place of dW, or as small as it may be where there is none."""
        return self.in_dw if want.weight else (self.tokens, self.columns)


def room(p: Any, rule: Rule) -> Room | None:
    """None where the kernels' copies would have ragged tiles, or where dW has no room for dx."""
    width, vocab = p.h.shape[1], p.head.vocab
    if width % TILE_K or vocab % 8:
        return None
    most = min(COLUMNS * rule.slab // 4, PART // (width * jnp.dtype(p.h.dtype).itemsize), rule.most)
    most, tile = most // TILE_K * TILE_K, Tiles().tokens
    tokens = -(-p.n // tile) * tile
    shape = _as_rows(vocab * width, tokens, most)
    if shape is None:
        return None
    hard = min(HARD * -(-p.n // 8192), -(-p.n // 8) * 8)
    return Room(min(most, shape[1]), hard, tokens, shape)


def _as_rows(size: int, rows: int, columns: int) -> tuple[int, int] | None:
    """``size`` numbers as at least ``rows`` rows, in whole tiles: the shortest of at least ``columns``, or else the
    longest."""

    def fits(width: int) -> bool:
        return size % (8 * width) == 0 and size // width >= rows

    wider = range(max(columns, TILE_K), size // rows + 1, TILE_K)
    width = next(filter(fits, wider), None) or next(filter(fits, range(columns - TILE_K, 0, -TILE_K)), None)
    return None if width is None else (size // width, width)


def gradients(f: Ordered, want: Wanted, known: Known, found: Any, rule: Rule, held: Room, by_slabs: BySlabs) -> Any:
    """``(gradients, mass left out [N])``; dH in the order of the call, the mass in that of ``f``."""
    p, c = f.p, found.columns
    fits = held.holds(c.count) & ~c.dense & ~(found.apart > MOST_APART * f.count)
    live = Live(*(jnp.where(fits, count, 0) for count in (f.count, c.count)))
    index = c.index[: held.columns]
    part = columns_of.head_columns(p.head, index)
    if want.hidden:
        part = _with_mean(part, rule, p, live)
    dx, kept = _columns_dx(p, known, found, part, live, held.dx(want))
    moving = known.g.any_nonzero()
    left_out = jnp.where(moving, mass_beside(kept), 0.0)
    hard = moving & misses(p.tolerance, known.stats, known.g, p.call.vocab_size)(left_out)
    count = jnp.sum(hard, dtype=jnp.int32)
    group = Sweep(order_by_rank(hard, ~hard), 0, count, count, n=p.n, chunk=held.hard).visit(0, held.hard)
    hidden = None
    if want.hidden:
        dx = _with_stand_ins(dx, p, known, left_out, hard, live)
        hidden = _dhidden(f, dx, part, live)
    ok, rows = fits & (count <= held.hard), _group(f, group, known)
    live, count = Live(*(jnp.where(ok, x, 0) for x in (live.tokens, live.columns))), jnp.where(ok, count, 0)
    # All that is small, now: whatever follows the question waits for the host to prepare it.
    ok, *extents, count, rows = lax.optimization_barrier((ok, live.tokens, live.columns, count, rows))
    live = Live(*extents)
    weight = dx.reshape(p.head.weight.shape) if want.weight else None
    bias = jnp.zeros((p.head.vocab,), jnp.float32) if want.bias else None
    start = Gradients(hidden, HeadGrads(weight, bias)), left_out
    total, left_out = once(~ok, lambda _: _in_halves(f, want, known, by_slabs), start)
    hidden, head = total.hidden, total.head
    own = HeadGrads(None, None)
    if want.weight or want.bias:
        dx = dx if head.weight is None else head.weight.reshape(dx.shape)
        own, dx, count = _dhead(f, want, dx, live, held.columns, count)
        head = dataclasses.replace(head, weight=dx.reshape(p.head.weight.shape) if want.weight else None)
    left_out, count = lax.optimization_barrier((left_out, count))
    total = _all_columns(f, group, rows, found.active, Gradients(hidden, head), count, ok)
    index = jnp.where(ok, index, p.head.vocab + jnp.arange(held.columns, dtype=jnp.int32))
    head = columns_of.put_head_columns(total.head, index, own, p.head.layout, add=False)  # hard rows have zeros there
    return Gradients(total.hidden, head), left_out


# -- the active columns ----------------------------------------------------------------------------------------------


def _with_mean(part: Head, rule: Rule, p: Problem, live: Live) -> Head:
    """The gathered head with its mean row behind the active columns; its logits count for nothing."""
    row = mean_row(rule, p).astype(part.weight.dtype)
    row = row if p.head.axis == 0 else row.T
    weight = lax.dynamic_update_slice_in_dim(part.weight, row, live.columns, p.head.axis)
    return dataclasses.replace(part, weight=lax.optimization_barrier(weight))  # one array, not one with and one without


def _columns_dx(
    p: Problem, known: Known, found: Any, part: Head, live: Live, shape: tuple[int, int]
) -> tuple[Array, Array]:
    """``(dx, the mass that rows keep)`` of the tokens that come first, in the active columns and one more; the former
    in an array of this ``shape``."""
    place = jnp.where(found.active, jnp.cumsum(found.active, dtype=jnp.int32) - 1, -1)
    target = place.at[p.targets].get(mode="fill", fill_value=-1)
    counts = jnp.arange(part.vocab) < live.columns
    with_mean = dataclasses.replace(live, columns=live.columns + 1)
    return columns_dx(p, known, part, target, counts, with_mean, shape)


def _with_stand_ins(dx: Array, p: Problem, known: Known, left_out: Array, hard: Array, live: Live) -> Array:
    """``dx`` with what easy rows leave out in the mean row's column."""
    stands = in_their_place(jnp.ones((1, 1), jnp.float32), left_out, without(known.g, hard), p.transform)
    return lax.dynamic_update_slice(dx, stands.astype(dx.dtype), (0, live.columns))


def _dhidden(f: Ordered, dx: Array, part: Head, live: Live) -> Array:
    """dH of the active columns, in the order of the call."""
    p = f.p
    extent = live.tokens, p.h.shape[1], live.columns + 1
    deep = dict(right_deep=p.head.axis == 0, shape=p.h.shape, interpret=p.call.interpret)
    rows = product.product(dx, part.weight, extent, **deep)
    place = f.place()
    rows = rows.at[place].get(mode="promise_in_bounds", unique_indices=True)
    return jnp.where((place < live.tokens)[:, None], rows, jnp.zeros((), rows.dtype))


def _dhead(
    f: Ordered, want: Wanted, dx: Array, live: Live, columns: int, count: Array
) -> tuple[HeadGrads, Array, Array]:
    """``(the head's gradients in the active columns, dx, count)``: what the latter two are for may not begin before,
    since dW is written over dx."""
    p, weight, bias = f.p, None, None
    if want.weight:
        # Gathered again, not kept: not before the question has been answered.
        order, dx = lax.optimization_barrier((f.order, dx))
        h = dataclasses.replace(f, order=order).part(0, p.n).p.h
        weight = _dweight(p, dx, h, live, columns=columns)
    if want.bias:
        bias = _dbias(dx[: p.n, :columns], live)
    weight, bias, dx, count = lax.optimization_barrier((weight, bias, dx, count))
    return HeadGrads(weight, bias), dx, _apart(count)


def _dweight(
    p: Problem, dx: Array, h: Array, live: Live, columns: int | None = None, into: Array | None = None
) -> Array:
    """dW of so many ``columns``, or ``into`` an array that is there: of dx and the hidden states of its rows."""
    pair, extent, size = (dx, h), (live.columns, h.shape[1]), (columns or 0, h.shape[1])
    if p.head.axis == 1:
        pair, extent, size = pair[::-1], extent[::-1], size[::-1]  # type: ignore[assignment]
    shape = None if columns is None else size
    how: dict[str, Any] = dict(left_deep=True, right_deep=True, into=into, interpret=p.call.interpret)
    return product.product(*pair, (*extent, live.tokens), shape=shape, **how)


def _dbias(dx: Array, live: Live) -> Array:
    """The bias' gradient, of the rows of dx that are there."""
    there = (jnp.arange(dx.shape[0]) < live.tokens)[:, None]
    return jnp.sum(jnp.where(there, dx, jnp.zeros((), dx.dtype)), axis=0, dtype=jnp.float32)


def _apart(count: Array) -> Array:
    """``count``, which is not negative, through a loop of two turns that change nothing.

    XLA makes one CUDA graph of all that lies between two loops, and the host prepares a graph as a whole before it
    starts: 0.65 ms, for which the device would wait after a question. So the rest is two of them, and while the device
    works on the first the host prepares the second.
    """
    return lax.fori_loop(0, 2, lambda i, n: jnp.maximum(n, i - 1), count)


# -- hard rows -------------------------------------------------------------------------------------------------------


def _group(f: Ordered, visit: Visit, known: Known) -> tuple[Problem, tuple[TokenStats, StatCotangents]]:
    """A group of hard rows, and what is known of them."""
    inside = visit.inside(f.p.n)[:, None]
    h = jnp.where(inside, f.hidden_of(visit.read), jnp.zeros((), f.p.h.dtype))
    return visit.problem(f.p, h), visit.known(known.stats, known.g, f.p.n)


def _group_dx(rows: tuple[Problem, Any], active: Array, live: Live | None = None, shape: Any = None) -> Array:
    """dx ``[G, V]`` of a group of hard rows, zero in the active columns."""
    q, known = rows
    others = ~active & (jnp.arange(q.head.vocab) < q.call.vocab_size)
    target = jnp.where(others.at[q.targets].get(mode="fill", fill_value=False), q.targets, -1)
    return columns_dx(q, Known(*known), q.head, target, others, live, shape)[0]


def _all_columns(
    f: Ordered, visit: Visit, rows: tuple[Problem, Any], active: Array, total: Gradients, count: Array, ok: Array
) -> Gradients:
    """``total`` with what ``count`` hard rows have in the columns that are not active: dH added, dW written."""
    q, (size, width), head = rows[0], rows[0].h.shape, f.p.head
    vocab, interpret = head.vocab, f.p.call.interpret
    live = Live(jnp.where(ok, jnp.maximum(count, 1), 0), vocab)  # at least one: dW's zeros come from dx, too
    dx = _group_dx(rows, active, live, (size, -(-vocab // TILE_K) * TILE_K))
    hidden, weight, bias = total.hidden, total.head.weight, total.head.bias
    if hidden is not None:
        own = product.in_parts(dx, head.weight, (count, width, vocab), right_deep=head.axis == 0, interpret=interpret)
        at = f.in_call(visit)
        hidden = at.put(hidden, at.take(hidden).astype(jnp.float32) + own)
    if weight is not None:
        weight = _dweight(f.p, dx, q.h, dataclasses.replace(live, columns=jnp.where(ok, vocab, 0)), into=weight)
    if bias is not None:
        bias = bias + _dbias(dx[:, :vocab], live)
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
    buffer."""
    p = f.p
    half = p.n // 2

    def step(i: Array, carry: tuple[Gradients, Array]) -> tuple[Gradients, Array]:
        total, left_out = carry
        begin = i * half
        at = Known(*some((known.stats, known.g), begin, half))
        new, mass = by_slabs(f.part(begin, half), at, total.head)
        hidden = total.hidden
        if hidden is not None and new.hidden is not None:
            own = begin + jnp.arange(half, dtype=jnp.int32)
            hidden = f.in_call(Visit(own, own)).put(hidden, new.hidden)
        return Gradients(hidden, new.head), lax.dynamic_update_slice_in_dim(left_out, mass, begin, 0)

    hidden = jnp.zeros(f.given.h.shape, p.h.dtype) if want.hidden else None
    start = Gradients(hidden, zero_grads(p.head, want, p.head.weight.dtype)), jnp.zeros((p.n,), jnp.float32)
    return lax.fori_loop(0, (f.count + (half - 1)) // half, step, start)
