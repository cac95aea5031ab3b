"""The sparse backward over all active columns at once, for the sizes that policies mostly have: three matmuls, no loop.

Where the active columns and the tokens that have a gradient fit one of a few static sizes, dx of all of them stands in
memory (16 bits each, in the place of dW, which is not written yet):

    dx      by one matmul that writes no logits (``dx.py``), with the mass that each row keeps        M K / V
    dH      one matmul, with a last column for what the easy rows leave out (its mass times a mean row of the head)
    dW_K    one matmul
    hard    now known: through all columns, by the same three. Their dW in the other columns is *written*, not added
            to zeros
                few     at once
                some    at once, too; the memory that their dx takes is the largest here
                more    by slabs of the vocabulary, a group at a time; dH before dW, with logits made twice
    dW      dW_K in its place

What does not fit (more columns, or mostly rows that choose none) goes by slabs of columns (``sparse.py``), half of the
tokens at a time. The host is asked three times in a call, where a loop over slabs asks once for each of them; and never
at its end, since it then could not prepare what follows before all of this is done.

    bytes   at T = 8192, H = 4096, V = 151936: first the screen's bits and h in order (148 + 64 MiB); then h, the
            gathered columns of the head and dH (64 + 68 + 64); then dW_K and the dx of some hard rows (68 + 148). What
            a conditional is given stays to its end: so dH is none of its operands (a loop adds to it in place) and is
            in the order of the call by then, where it leaves; and h is gathered from the call's own, where it is needed
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from logitless.head import columns as columns_of
from logitless.head.columns import Columns, Rule
from logitless.head.linear import add_dhead, dot, raw_logits, zero_grads
from logitless.head.mosaic_gpu.dx import columns_dx
from logitless.head.mosaic_gpu.limits import TILE_K
from logitless.head.mosaic_gpu.screen import MOST_APART
from logitless.head.order import Ordered, some
from logitless.head.slabs import Known, in_their_place, mass_beside, mean_row, misses, once, slab_dx, without
from logitless.problem import Gradients, Head, HeadGrads, Problem, Wanted
from logitless.rows import Visit, live_sweep

FEW_TOKENS = (20,)
"""Quarters of a slab of columns that a quarter of the tokens may take at once."""

ALL_TOKENS = (26, 44)
"""And all of them; fewer where their part of the head would take more than :data:`PART` bytes."""

PART = 68 << 20

FEW, SOME = 128, 512
"""Hard rows of 8192 tokens, few of which cost no more than reading the head does."""

MOST_GROUPS = 8
"""Of more hard rows: each rounds what it adds to dW outside the active columns."""

_SLAB = 16 << 20
"""Bytes of the head, or of a group's logits, that a slab of the vocabulary has. XLA copies it, and dW's, too."""

BySlabs = Callable[[Ordered, Known, HeadGrads], tuple[Gradients, Array]]
"""``(some tokens, what is known of them, the head's gradients of others) -> (gradients, mass left out)``."""


@dataclasses.dataclass(frozen=True)
class Size:
    """Tokens and columns, of which the last one is the mean row's."""

    tokens: int
    columns: int

    def holds(self, tokens: Array, columns: Array) -> Array:
        return (tokens <= self.tokens) & (columns < self.columns)


def sizes(p: Any, rule: Rule) -> tuple[Size, ...]:
    """From the smallest on; none where a quarter of the vocabulary is no such size, or where dW has no room for dx."""
    width, quarter = p.h.shape[1], rule.slab // 4
    most = PART // (quarter * width * jnp.dtype(p.h.dtype).itemsize)

    def columns(quarters: tuple[int, ...]) -> list[int]:
        return sorted({min(min(k, most) * quarter, rule.most) // TILE_K * TILE_K for k in quarters})

    few = [] if p.n % 4 else [Size(p.n // 4, k) for k in columns(FEW_TOKENS)]
    all_of_them = [Size(p.n, k) for k in columns(ALL_TOKENS)]
    room = p.head.vocab * width
    return tuple(s for s in (*few, *all_of_them) if s.columns > 0 and s.tokens * s.columns <= room)


def groups(p: Any) -> tuple[int, int]:
    """Few and some hard rows."""
    few, some_rows = (min(rows * -(-p.n // 8192), p.n) for rows in (FEW, SOME))
    return few, some_rows


def gradients(f: Ordered, want: Wanted, known: Known, found: Any, rule: Rule, by_slabs: BySlabs) -> Any:
    """``(gradients, mass left out [N])``; dH in the order of the call, the mass in that of ``f``."""
    c, held = found.columns, sizes(f.p, rule)
    fits = jnp.stack([s.holds(f.count, c.count) for s in held])
    at_once = jnp.any(fits) & ~c.dense & ~(found.apart > MOST_APART * f.count)
    place = jnp.where(found.active, jnp.cumsum(found.active, dtype=jnp.int32) - 1, -1)
    target = place.at[f.p.targets].get(mode="fill", fill_value=-1)
    ways = [functools.partial(_at_once, f, want, known, found, rule, target, size) for size in held]
    # One question for all sizes, at the price of a program that has what follows once for each.
    which = jnp.where(at_once, jnp.argmax(fits).astype(jnp.int32), len(held))
    return lax.switch(which, [*ways, lambda: _in_halves(f, want, known, by_slabs)])


def _at_once(
    f: Ordered, want: Wanted, known: Known, found: Any, rule: Rule, target: Array, size: Size
) -> tuple[Gradients, Array]:
    """Tokens and columns that fit ``size``; ``target [N]``: the place of each token's target among the columns."""
    p, index = f.p, found.columns.index[: size.columns]
    moving = known.g.any_nonzero()
    mean = mean_row(rule, p) if want.hidden else None
    hidden, part, left_out = _columnwise(f, want, known, found.columns, size, mean, target)
    left_out = jnp.where(moving, left_out, 0.0)
    hard = moving & misses(p.tolerance, known.stats, known.g, p.call.vocab_size)(left_out)
    few, some_rows = groups(p)
    group = max(some_rows, -(-p.n // MOST_GROUPS))
    sweep = live_sweep(hard, few)
    trips = (sweep.count + (group - 1)) // group
    more = jnp.asarray(sweep.count > some_rows)

    def in_group(i: Array, head: HeadGrads | None, rows: Array | None) -> tuple[Any, Any]:
        return _by_vocabulary(f, sweep.visit(i * group, group), known, found.active, head, rows)

    def add_rows(i: Array, hidden: Array) -> Array:
        return _plus(f, hidden, sweep.visit(i * group, group), in_group(i, None, _no_rows(p, group))[1])

    if hidden is not None:
        hidden = once(more, lambda hidden: lax.fori_loop(0, trips, add_rows, hidden), hidden)
    no_rows = _no_rows(p, some_rows) if want.hidden else None

    def written(count: int) -> tuple[HeadGrads, Array | None]:
        """Of the first ones (or none of them, as zeros)."""
        head, rows = _written(f, sweep.visit(0, count), known, found.active, want)
        return head, None if rows is None else jnp.pad(rows, ((0, some_rows - count), (0, 0)))

    def of_more() -> tuple[HeadGrads, Array | None]:
        blank = zero_grads(p.head, want, p.head.weight.dtype)
        return lax.fori_loop(0, trips, lambda i, head: in_group(i, head, None)[0], blank), no_rows

    def then(rows_of: Callable[[], tuple[HeadGrads, Array | None]]) -> Callable[[], tuple[HeadGrads, Array | None]]:
        def run() -> tuple[HeadGrads, Array | None]:
            head, rows = rows_of()
            return columns_of.put_head_columns(head, index, part, p.head.layout), rows

        return run

    # A conditional's branches write its results: dW is none of its operands, so nothing is copied.
    case = jnp.asarray(sweep.count > few).astype(jnp.int32) + more.astype(jnp.int32)
    head, rows = lax.switch(case, [then(lambda: written(few)), then(lambda: written(some_rows)), then(of_more)])
    if hidden is not None:
        hidden = _plus(f, hidden, sweep.visit(0, some_rows), rows)
    return Gradients(hidden, head), left_out


def _no_rows(p: Any, rows: int) -> Array:
    return jnp.zeros((rows, p.h.shape[1]), jnp.float32)


def _plus(f: Ordered, hidden: Array, visit: Visit, rows: Array) -> Array:
    """``hidden``, in the order of the call, with float32 ``rows`` added to those of a visit in the order of ``f``."""
    visit = f.in_call(visit)
    return visit.put(hidden, visit.take(hidden).astype(jnp.float32) + rows)


# -- the active columns ----------------------------------------------------------------------------------------------


def _columnwise(
    f: Ordered, want: Wanted, known: Known, c: Columns, size: Size, mean: Array | None, target: Array
) -> tuple[Array | None, HeadGrads, Array]:
    """``(dH in the order of the call, the head's gradients for the gathered columns, mass left out [N])`` of the first
    ``size.tokens`` tokens in the first ``size.columns`` columns of ``c.index``, which has a slot to spare.
    ``target [N]``: the place of each token's target among them."""
    p, own = f.p, c.index[: size.columns]
    part = columns_of.head_columns(p.head, own)
    if mean is not None:  # in the last slot, which is no column's: its logits count for nothing
        row = (mean if p.head.axis == 0 else mean.T).astype(part.weight.dtype)
        weight = lax.dynamic_update_slice_in_dim(part.weight, row, size.columns - 1, p.head.axis)
        part = dataclasses.replace(part, weight=lax.optimization_barrier(weight))
    q, at = f.part(0, size.tokens).p, Known(*some((known.stats, known.g), 0, size.tokens))
    dx, kept = columns_dx(q, at, part, target[: size.tokens], jnp.arange(size.columns) < c.count)
    left_out = mass_beside(kept)
    hidden = None
    if mean is not None:
        hard = misses(p.tolerance, at.stats, at.g, p.call.vocab_size)(left_out)
        stands = in_their_place(jnp.ones((1, 1), jnp.float32), left_out, without(at.g, hard), q.transform)
        dx = lax.dynamic_update_slice_in_dim(dx, stands.astype(dx.dtype), size.columns - 1, 1)
        hidden = dot(dx, part.weight, (1, p.head.axis), p.h.dtype)
        hidden = f.put_back(jnp.pad(hidden, ((0, p.n - size.tokens), (0, 0))))
    blank = columns_of.no_head_columns(zero_grads(p.head, want, p.head.weight.dtype), part)
    grads = add_dhead(blank, dx, q.h, part)
    return hidden, grads, jnp.pad(left_out, (0, p.n - size.tokens))


# -- hard rows -------------------------------------------------------------------------------------------------------


def _group(f: Ordered, visit: Visit, known: Known) -> tuple[Problem, Known]:
    """A group of hard rows, and what is known of them."""
    inside = visit.inside(f.p.n)[:, None]
    h = jnp.where(inside, f.hidden_of(visit.read), jnp.zeros((), f.p.h.dtype))
    return visit.problem(f.p, h), Known(*visit.known(known.stats, known.g, f.p.n))


def _other_dx(q: Problem, known: Known, ids: Array, part: Head, zero: Array) -> Array:
    """dx of the columns ``ids`` of rows, but zero in some."""
    x = raw_logits(q.h, part, q.call.logits_dtype)
    dx = slab_dx(x, ids, q, known)
    return lax.optimization_barrier(jnp.where(zero[None, :], jnp.zeros((), dx.dtype), dx))


def _group_dx(f: Ordered, visit: Visit, known: Known, active: Array) -> tuple[Problem, Array]:
    """``(a group of hard rows, their dx [G, V])``, zero in the active columns."""
    q, at = _group(f, visit, known)
    others = ~active & (jnp.arange(f.p.head.vocab) < f.p.call.vocab_size)
    target = jnp.where(others.at[q.targets].get(mode="fill", fill_value=False), q.targets, -1)
    return q, columns_dx(q, at, f.p.head, target, others)[0]


def _written(f: Ordered, visit: Visit, known: Known, active: Array, want: Wanted) -> tuple[HeadGrads, Array | None]:
    """``(the head's gradients that a group has, its dH)``, in the columns that are not active; the latter float32."""
    head = f.p.head
    q, dx = _group_dx(f, visit, known, active)
    rows = dot(dx, head.weight, (1, head.axis)) if want.hidden else None
    weight = None
    if want.weight:
        pair = (dx, q.h) if head.axis == 0 else (q.h, dx)
        weight = dot(*pair, (0, 0), head.weight.dtype)
    return HeadGrads(weight, jnp.sum(dx, axis=0, dtype=jnp.float32) if want.bias else None), rows


def add_group(f: Ordered, visit: Visit, known: Known, active: Array, total: Gradients) -> Gradients:
    """``total`` plus what the tokens of ``visit`` have in the columns that are not ``active [V]``: one matmul each for
    the logits of a group of rows over the whole head, its dH and its dW, and no copy of any part of the head."""
    head = f.p.head
    q, dx = _group_dx(f, visit, known, active)
    hidden = total.hidden
    if hidden is not None:
        hidden = visit.put(hidden, visit.take(hidden).astype(jnp.float32) + dot(dx, head.weight, (1, head.axis)))
    return Gradients(hidden, add_dhead(total.head, dx, q.h, head))


def _by_vocabulary(
    f: Ordered,
    visit: Visit,
    known: Known,
    active: Array,
    head: HeadGrads | None,
    rows: Array | None,
) -> tuple[Any, Any]:
    """``(head, rows)`` plus what the tokens of ``visit`` have in the columns that are not ``active``: the head's
    gradients and dH ``[G, H]`` in float32, by slabs of the vocabulary."""
    p = f.p
    q, at = _group(f, visit, known)
    width = max(p.h.shape[1] * jnp.dtype(p.h.dtype).itemsize, 4 * q.n)
    size = min(max(_SLAB // width // 128, 1) * 128, p.head.vocab)
    slabs = -(-p.head.vocab // size)
    first = p.head.vocab - (slabs - 1) * size  # columns that the first slab has to itself; the next one has the others

    def step(i: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        total, rows = carry
        begin = jnp.maximum(first + (i - 1) * size, 0)
        ids = begin + jnp.arange(size, dtype=jnp.int32)
        part = _slab_of(p.head, begin, size)
        elsewhere = lax.dynamic_slice_in_dim(active, begin, size) | ((i == 0) & (ids >= first))
        dx = _other_dx(q, at, ids, part, elsewhere)
        if rows is not None:
            rows = rows + dot(dx, part.weight, (1, p.head.axis))
        if total is not None:
            own = _slab_of(total, begin, size, p.head.axis)
            own = add_dhead(own, dx, q.h, part)
            total = _with_slab(total, own, begin, p.head.axis)
        return total, rows

    return lax.fori_loop(0, slabs, step, (head, rows))


def _slab_of(head: Any, begin: Array | int, size: int, axis: int | None = None) -> Any:
    """Weight and bias of a head, or their gradients, for ``size`` columns of the vocabulary."""
    axis = head.axis if axis is None else axis
    weight, bias = (
        None if x is None else lax.dynamic_slice_in_dim(x, begin, size, at)
        for x, at in ((head.weight, axis), (head.bias, 0))
    )
    return dataclasses.replace(head, weight=weight, bias=bias)


def _with_slab(total: HeadGrads, own: Any, begin: Array | int, axis: int) -> HeadGrads:
    weight, bias = (
        None if x is None else lax.dynamic_update_slice_in_dim(x, new, begin, at)
        for x, new, at in ((total.weight, own.weight, axis), (total.bias, own.bias, 0))
    )
    return HeadGrads(weight, bias)


# -- what does not fit -----------------------------------------------------------------------------------------------


def _in_halves(f: Ordered, want: Wanted, known: Known, by_slabs: BySlabs) -> tuple[Gradients, Array]:
    """All gradients by slabs of columns: in float32 dH of all tokens would be the largest buffer."""
    p = f.p
    half = p.n // 2 if p.n % 2 == 0 else p.n

    def step(i: Array, carry: tuple[Gradients, Array]) -> tuple[Gradients, Array]:
        total, left_out = carry
        begin = i * half
        at = Known(*some((known.stats, known.g), begin, half))
        new, mass = by_slabs(f.part(begin, half), at, total.head)
        hidden = total.hidden
        if hidden is not None and new.hidden is not None:
            hidden = lax.dynamic_update_slice_in_dim(hidden, new.hidden.astype(hidden.dtype), begin, 0)
        return Gradients(hidden, new.head), lax.dynamic_update_slice_in_dim(left_out, mass, begin, 0)

    hidden = jnp.zeros(p.h.shape, p.h.dtype) if want.hidden else None
    start = Gradients(hidden, zero_grads(p.head, want, p.head.weight.dtype)), jnp.zeros((p.n,), jnp.float32)
    total, left_out = lax.fori_loop(0, (f.count + (half - 1)) // half, step, start)
    return Gradients(None if total.hidden is None else f.put_back(total.hidden), total.head), left_out
