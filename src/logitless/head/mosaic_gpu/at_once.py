"""The sparse backward over all active columns at once, for the sizes that policies mostly have: three matmuls, no loop.

Where the active columns and the tokens that have a gradient fit one of a few static sizes, dx of all of them stands in
memory (16 bits each, in the place of dW, which is not written yet):

    dx      logits of the K columns again, the mass that each row keeps, dx                  M K / V
    dH      one matmul, with a last column for what the easy rows leave out (its mass times a mean row of the head)
    dW_K    one matmul
    hard    now known: the first of them, a group, through all columns. Their dW in the other columns is *written*, not
            added to zeros. Further groups are added
    dW      dW_K in its place

What does not fit (more columns, or more hard rows) goes by slabs (``sparse.py``), half of the tokens at a time. The
host is asked three times in a call, where a loop over slabs asks once for each of them.

    bytes   at T = 8192, H = 4096, V = 151936: first the screen's bits and h in order (148 + 64 MiB); then h, the
            gathered columns of the head and a block of logits (64 + 80 + 64); then dH, dW_K and a group's dx
            (64 + 80 + 74). What a conditional is given stays to its end: so dH is none of its operands, and hard rows
            are gathered from the call's own h
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
from logitless.head.linear import add_dhead, dot, raw_logits, zero_grads
from logitless.head.order import Ordered, some
from logitless.head.slabs import Known, in_their_place, mass_beside, mean_row, misses, once, slab_dx, without
from logitless.problem import Gradients, Head, HeadGrads, Problem, Wanted
from logitless.pytree import register
from logitless.rows import Visit, live_sweep, probabilities

FEW_TOKENS = (5,)
"""Slabs of columns that a quarter of the tokens may take at once."""

ALL_TOKENS = (7, 11)
"""And all of them; fewer where their part of the head would take more than :data:`PART` bytes."""

PART = 80 << 20

GROUPS = (104, 256)
"""Hard rows that go through all columns at a time: as many as cost no more than reading the head does; or, if there are
more, the first so many (their logits stand where dW will)."""

MOST_GROUPS = 8
"""That may follow, of the smaller ones: each rounds what it adds to dW outside the active columns."""

_LOGITS = 64 << 20
"""Bytes of float32 logits at a time. One buffer, the largest, may stand where dW will: that is for dx."""

_LEAST_ROWS = 128

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
    width = p.h.shape[1]
    most = PART // (rule.slab * width * jnp.dtype(p.h.dtype).itemsize)
    few = () if p.n % 4 else tuple(Size(p.n // 4, min(k, most) * rule.slab) for k in FEW_TOKENS)
    all_of_them = sorted({Size(p.n, min(k, most) * rule.slab) for k in ALL_TOKENS}, key=lambda s: s.columns)
    room = p.head.vocab * width
    return tuple(s for s in (*few, *all_of_them) if 0 < s.columns <= rule.most and s.tokens * s.columns <= room)


def groups(p: Any) -> tuple[int, int]:
    """Hard rows of a small and of a large group."""
    few, many = (min(g, p.n) for g in GROUPS)
    return few, many


@register
@dataclasses.dataclass(frozen=True)
class _Columnwise:
    """What the active columns give: gradients, those of the head for the gathered columns, and what rows leave out."""

    hidden: Array | None  # [N, H]
    part: HeadGrads  # of the largest size's columns
    left_out: Array  # [N] float32; infinite where no size holds them


def gradients(f: Ordered, want: Wanted, known: Known, found: Any, rule: Rule, by_slabs: BySlabs) -> Any:
    """``(gradients, mass left out [N])`` in the order of ``f``."""
    p, c = f.p, found.columns
    held = sizes(p, rule)
    moving = known.g.any_nonzero()
    most = held[-1].columns
    mean = mean_row(rule, p) if want.hidden else None
    fits = jnp.stack([s.holds(f.count, c.count) for s in held] + [jnp.asarray(True)])
    which = jnp.where(c.dense, len(held), jnp.argmax(fits)).astype(jnp.int32)

    def at(size: Size) -> Callable[[], _Columnwise]:
        return lambda: _columnwise(p, want, known, c.index, size, most, mean)

    def none() -> _Columnwise:
        gathered = jax.eval_shape(columns_of.head_columns, p.head, c.index[:most])
        blank = columns_of.no_head_columns(zero_grads(p.head, want, p.head.weight.dtype), gathered)
        hidden = jnp.zeros(p.h.shape, p.h.dtype) if want.hidden else None
        return _Columnwise(hidden, blank, jnp.full((p.n,), jnp.inf, jnp.float32))

    own = lax.switch(which, [*(at(s) for s in held), none])
    left_out = jnp.where(moving, own.left_out, 0.0)
    hard = moving & misses(p.tolerance, known.stats, known.g, p.call.vocab_size)(left_out)
    few, many = groups(p)
    sweep = live_sweep(hard, few)

    def first(size: int) -> Callable[[], tuple[HeadGrads, Array | None]]:
        """The first hard rows (or none of them, as zeros), and the active columns' dW in its place."""

        def run() -> tuple[HeadGrads, Array | None]:
            head, rows = _written(f, sweep.visit(0, size), known, found.active, want)
            rows = None if rows is None else jnp.pad(rows, ((0, many - size), (0, 0)))
            return columns_of.put_head_columns(head, c.index[:most], own.part, p.head.layout), rows

        return run

    # A conditional's branches write its results: dW is none of its operands, so nothing is copied.
    is_few = sweep.count <= few
    head, rows = lax.cond(is_few, first(few), first(many))
    hidden = own.hidden
    if hidden is not None:
        visit = sweep.visit(0, many)
        hidden = visit.put(hidden, visit.take(hidden).astype(jnp.float32) + rows)
    begin = jnp.where(is_few, few, many)
    more = (jnp.maximum(sweep.count - begin, 0) + (few - 1)) // few
    missed = (which == len(held)) | (more > MOST_GROUPS)

    def rest(carry: tuple[Gradients, Array]) -> tuple[Gradients, Array]:
        total, left_out = carry

        def group(i: Array, total: Gradients) -> Gradients:
            return add_group(f, sweep.visit(begin + i * few, few), known, found.active, total)

        total = lax.fori_loop(0, jnp.where(missed, 0, more), group, total)
        return once(missed, lambda c: _in_halves(f, want, known, by_slabs, c), (total, left_out))

    return once(missed | (more > 0), rest, (Gradients(hidden, head), left_out))


# -- the active columns ----------------------------------------------------------------------------------------------


def _columnwise(
    p: Problem, want: Wanted, known: Known, index: Array, size: Size, most: int, mean: Array | None
) -> _Columnwise:
    """dH, dW and what is left out, of the first ``size.tokens`` tokens in the first ``size.columns`` columns of
    ``index``, which has a slot to spare."""
    own = index[: size.columns]
    part = columns_of.head_columns(p.head, own)
    if mean is not None:  # in the last slot, which is no column's: its logits count for nothing
        row = (mean if p.head.axis == 0 else mean.T).astype(part.weight.dtype)
        weight = lax.dynamic_update_slice_in_dim(part.weight, row, size.columns - 1, p.head.axis)
        part = dataclasses.replace(part, weight=lax.optimization_barrier(weight))
    q, at = some(p, 0, size.tokens), Known(*some((known.stats, known.g), 0, size.tokens))
    dx, kept = _dx(q, at, own, part)
    left_out = mass_beside(kept)
    hidden = None
    if mean is not None:
        hard = misses(p.tolerance, at.stats, at.g, p.call.vocab_size)(left_out)
        stands = in_their_place(jnp.ones((1, 1), jnp.float32), left_out, without(at.g, hard), q.transform)
        dx = lax.dynamic_update_slice_in_dim(dx, stands.astype(dx.dtype), size.columns - 1, 1)
        hidden = _filled(dot(dx, part.weight, (1, p.head.axis), p.h.dtype), p.n, 0)
    blank = columns_of.no_head_columns(zero_grads(p.head, want, p.head.weight.dtype), part)
    grads = add_dhead(blank, dx, q.h, part)
    wide = HeadGrads(_filled(grads.weight, most, p.head.axis), _filled(grads.bias, most, 0))
    return _Columnwise(hidden, wide, jnp.pad(left_out, (0, p.n - size.tokens)))


def _filled(x: Array | None, size: int, axis: int) -> Any:
    """``x`` with zeros up to ``size`` along ``axis``."""
    if x is None or x.shape[axis] == size:
        return x
    return jnp.pad(x, [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)])


def _dx(q: Problem, known: Known, own: Array, part: Head) -> tuple[Array, Array]:
    """``(dx [N, K] in the operands' dtype, mass that each row keeps [N])``; a part of the tokens at a time, so that
    their float32 logits are few."""
    blocks = 1
    while 4 * own.size * (q.n // blocks) > _LOGITS and q.n % (2 * blocks) == 0 and q.n // blocks > _LEAST_ROWS:
        blocks *= 2
    rows = q.n // blocks

    def block(begin: Array | int) -> tuple[Array, Array]:
        r, at = some(q, begin, rows), Known(*some((known.stats, known.g), begin, rows))
        x = raw_logits(r.h, part, r.call.logits_dtype)
        return slab_dx(x, own, r, at), jnp.sum(probabilities(x, r, at.stats, own[None, :]), axis=1)

    if blocks == 1:
        return lax.optimization_barrier(block(0))

    def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        new = block(i * rows)
        return tuple(lax.dynamic_update_slice_in_dim(a, b, i * rows, 0) for a, b in zip(carry, new, strict=True))  # type: ignore[return-value]

    start = jnp.zeros((q.n, own.size), q.h.dtype), jnp.zeros((q.n,), jnp.float32)
    return lax.fori_loop(0, blocks, step, start)


# -- hard rows -------------------------------------------------------------------------------------------------------


def _group_dx(f: Ordered, visit: Visit, known: Known, active: Array) -> tuple[Problem, Array]:
    """``(a group of hard rows, their dx [G, V])``, zero in the active columns."""
    p = f.p
    inside = visit.inside(p.n)[:, None]
    q = visit.problem(p, jnp.where(inside, f.hidden_of(visit.read), jnp.zeros((), p.h.dtype)))
    x = raw_logits(q.h, p.head, p.call.logits_dtype)
    ids = jnp.arange(p.head.vocab, dtype=jnp.int32)
    dx = slab_dx(x, ids, q, Known(*visit.known(known.stats, known.g, p.n)))
    return q, lax.optimization_barrier(jnp.where(active[None, :], jnp.zeros((), dx.dtype), dx))


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


# -- what does not fit -----------------------------------------------------------------------------------------------


def _in_halves(
    f: Ordered, want: Wanted, known: Known, by_slabs: BySlabs, carry: tuple[Gradients, Array]
) -> tuple[Gradients, Array]:
    """All gradients by slabs, over what ``carry`` has: in float32 dH of all tokens would be the largest buffer."""
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

    total, left_out = carry
    hidden = None if total.hidden is None else jnp.zeros_like(total.hidden)
    start = Gradients(hidden, zero_grads(p.head, want, p.head.weight.dtype)), jnp.zeros_like(left_out)
    return lax.fori_loop(0, (f.count + (half - 1)) // half, step, start)
