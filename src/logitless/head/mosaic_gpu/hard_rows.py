"""Hard rows on a Hopper GPU: through all columns that are not active, a group of them at a time.

    dx      of the group, over the whole head as it lies there (``kernels/dlogits_matmul.py``); zero in the active
    columns      G H V dH      one matmul in parts of the vocabulary, added to what the active columns gave
          G H V dW      one matmul, *written* by the first group, so that nobody has to write zeros; the next ones add
          G H V

All by kernels that take their extents from the device. A group with no rows costs its launches.

    bytes   dx, 2 G V in whole tiles; the head twice and dW once, twice where it is added
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from logitless.core.compat import Index
from logitless.core.problem import Gradients, HeadArrays, HeadGrads, Problem
from logitless.core.pytree import register
from logitless.core.row_passes import Visit, order_by_rank
from logitless.head.mosaic_gpu import tile_mask
from logitless.head.mosaic_gpu.dx_tiles import COLUMNS, TOKENS, Slots, tile_count
from logitless.head.mosaic_gpu.kernels import dynamic_matmul
from logitless.head.mosaic_gpu.kernels.dlogits_matmul import Rows, columns_dx
from logitless.head.mosaic_gpu.limits import TILE_K
from logitless.head.sparse.column_gather import Known, in_their_place, mass_beside, misses, without
from logitless.head.sparse.token_order import Ordered

GROUP = 384
"""Rows of 8192 tokens that go through all columns at a time, in whole tiles: their dx over the vocabulary is the
largest array of a call."""

GROUPS = 4
"""Maximum number of groups; each group rounds its addition to dW."""


def group_size(n: int) -> int:
    """Rows per group, for ``n`` tokens."""
    return min(GROUP * -(-n // 8192), -(-n // 8) * 8)


def can_add(head: HeadArrays) -> bool:
    """Whether the kernel can add a product to dW: it reads whole pieces."""
    return head.weight.shape[0] % TILE_K == 0


def most_rows(n: int, head: HeadArrays) -> int:
    """Maximum number of rows in all groups."""
    size = group_size(n)
    return size * max(min(GROUPS, n // size) if can_add(head) else 1, 1)


@register
@dataclasses.dataclass(frozen=True)
class Hard:
    """Rows that leave out too much: positions among the tokens, of which the first ``count`` are meant."""

    rows: Array  # [most] int32
    count: Array

    def visit(self, first: Index, size: int, n: int) -> Visit:
        """A visit to ``size`` hard rows, out of ``n`` tokens."""
        at = first + jnp.arange(size, dtype=jnp.int32)
        rows = lax.dynamic_slice_in_dim(self.rows, first, size)
        return Visit(rows, jnp.where(at < self.count, rows, n))


def hard_rows(hard: Array, most: int) -> Hard:
    """Rows with ``hard [N]``; callers use no more than ``most`` rows."""
    return Hard(order_by_rank(hard, ~hard)[:most], jnp.sum(hard, dtype=jnp.int32))


def judged(p: Problem, known: Known, kept: Array) -> tuple[Array, Array]:
    """``(left-out mass of each row [N], whether the row is hard [N])``, computed from the kept mass."""
    moving = known.g.any_nonzero()
    left_out = jnp.where(moving, mass_beside(kept), 0.0)
    return left_out, moving & misses(p.tolerance, known.stats, known.g, p.call.vocab_size)(left_out)


def stand_ins(p: Problem, known: Known, left_out: Array, hard: Array) -> Array:
    """``[N, 1]`` float32: what easy rows leave out, to be multiplied by a mean row of the head."""
    return in_their_place(jnp.ones((1, 1), jnp.float32), left_out, without(known.g, hard), p.transform)


def group_of(f: Ordered, visit: Visit, rows: Rows) -> tuple[Array, Rows]:
    """Hidden states of some tokens, zeros in the padding, and the per-row inputs of dx."""
    inside = visit.inside(f.p.n)[:, None]
    return jnp.where(inside, f.hidden_of(visit.read), jnp.zeros((), f.p.h.dtype)), rows.of(visit, f.p.n)


def _dx(p: Problem, h: Array, rows: Rows, active: Array, here: Array) -> Slots:
    """dx of a group over all columns, of which the first ``here`` rows are meant; zero in the ``active`` ones."""
    vocab = p.head.vocab
    others = ~active & (jnp.arange(vocab) < p.call.vocab_size)
    target = jnp.where(others.at[rows.targets].get(mode="fill", fill_value=False), rows.targets, -1)
    across = tile_count(vocab, COLUMNS)
    place = Slots(lax.empty((tile_count(len(h), TOKENS) * across * TOKENS, COLUMNS), h.dtype), 0, across)
    visits = tile_mask.all_of(len(h), vocab, here, vocab)
    return place.of(columns_dx(p, place, h, rows, target, p.head, others, visits)[0])


def dweight(
    p: Problem, dx: Slots, h: Array, live: tuple[Index, Index], columns: int | None = None, **how: Any
) -> Array:
    """dW for ``columns`` columns, new or written ``into`` an existing array: from dx and hidden states; ``live`` bounds
    columns and rows."""
    pair, extent, size = (dx, h), (live[0], h.shape[1]), (columns or 0, h.shape[1])
    if p.head.axis == 1:
        pair, extent, size = pair[::-1], extent[::-1], size[::-1]  # type: ignore[assignment]
    shape = None if columns is None else size
    how |= dict(left_deep=True, right_deep=True, interpret=p.call.interpret)
    return dynamic_matmul.product(*pair, (*extent, live[1]), shape=shape, **how)


def dbias(dx: Array, there: Array) -> Array:
    """The bias' gradient, from dx ``[row tiles, column tiles, 128, 256]`` where ``there`` is set, a flag per row."""
    sums = jnp.sum(jnp.where(there[..., None], dx, jnp.zeros((), dx.dtype)), axis=(0, 2), dtype=jnp.float32)
    return sums.reshape(-1)


def apart(count: Array) -> Array:
    """``count``, which is not negative, through a loop of two turns that change nothing.

    XLA makes one CUDA graph of all that lies between two loops, and the host prepares a graph as a whole before it
    starts: 0.65 ms, for which the device would wait after a question. The remainder is therefore split: while the
    device works on a part, the host prepares the next part.
    """
    return lax.fori_loop(0, 2, lambda i, n: jnp.maximum(n, i - 1), count)


def add_rows(f: Ordered, hard: Hard, rows: Rows, active: Array, total: Gradients, blank: Array) -> Gradients:
    """``total`` with what hard rows have in the columns that are not ``active [V]``; dH in the order of the call.

    Where ``blank``, dW holds anything so far, and is written whole. Where it is not, and nothing can be added to dW,
    there must be no rows.
    """
    size = group_size(f.p.n)
    groups = hard.rows.size // size

    def group(i: Index, total: Gradients) -> Gradients:
        visit, count = hard.visit(i * size, size, f.p.n), jnp.clip(hard.count - i * size, 0, size)
        return _add_group(f, visit, count, rows, active, total, blank & (jnp.asarray(i) == 0))

    # A loop whose length the compiler knows: it asks the host nothing, and a group is compiled once.
    return group(0, total) if groups == 1 else lax.fori_loop(0, groups, group, total)


def _add_group(
    f: Ordered, visit: Visit, count: Array, rows: Rows, active: Array, total: Gradients, blank: Array
) -> Gradients:
    size, (h, own_rows) = visit.read.size, group_of(f, visit, rows)
    head, vocab, width, interpret = f.p.head, f.p.head.vocab, h.shape[1], f.p.call.interpret
    here = jnp.where(blank, jnp.maximum(count, 1), count)  # at least one: dW's zeros come from dx, too
    dx = _dx(f.p, h, own_rows, active, here)
    hidden, weight, bias = total.hidden, total.head.weight, total.head.bias
    if hidden is not None:
        deep = dict(right_deep=head.axis == 0, interpret=interpret)
        own = dynamic_matmul.in_parts(dx, head.weight, size, (count, width, vocab), **deep)
        mine = f.in_call(visit)
        hidden = mine.put(hidden, mine.take(hidden).astype(jnp.float32) + own)
    if weight is not None:
        add = ~blank if can_add(head) else None
        weight = dweight(f.p, dx, h, (jnp.where(here > 0, vocab, 0), here), into=weight, add=add)
    if bias is not None:
        tiles = dx.tiles(tile_count(size, TOKENS), dx.across)
        live = jnp.arange(tiles.shape[0] * TOKENS).reshape(-1, 1, TOKENS) < here
        bias = bias + dbias(tiles, live)[:vocab]
    return Gradients(hidden, HeadGrads(weight, bias))
