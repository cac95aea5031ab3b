"""The memory of dW in the sparse backward on a Hopper GPU: sizes, what lives in it in which phase, the matmuls over the
dx that it holds, and the hard rows' that write dW.

    dH      dx [tokens and hard rows, K] times a part of the head
    dW_K    dx transposed times the hidden states of its rows

dx lies in slots (``schedule.Slots``). The matmuls over it are the same kernels whether all active columns go at once or
a chunk of columns at a time (``sparse_backward.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from logitless.core.compat import Index
from logitless.core.problem import Gradients, HeadArrays, HeadGrads, Linear, Problem, Wanted
from logitless.core.pytree import register, static
from logitless.core.row_passes import Visit, order_by_rank
from logitless.head.mosaic_gpu.kernels import dynamic_matmul
from logitless.head.mosaic_gpu.kernels.dlogits_matmul import Region, Rows, columns_dx
from logitless.head.mosaic_gpu.kernels.schedule import COLUMNS, TILE_K, TOKENS, Slots, Visits, all_of, tile_count
from logitless.head.sparse.active_columns import Rule
from logitless.head.sparse.gather import Ordered

MOST_COLUMNS = 11264
"""Columns per part; fewer if their part of the head exceeds :data:`PART` bytes."""

PART = 68 << 20

GROUP = 384
"""Rows of 8192 tokens that go through all columns at a time, in whole tiles: their dx over the vocabulary is the
largest array of a call."""

GROUPS = 4
"""Maximum number of groups; each group rounds its addition to dW."""


# -- sizes -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much goes at a time."""

    columns: int  # in whole tiles. in one part, the first row is the mean row's
    hard: int  # rows
    tokens: int  # in whole tiles
    in_dw: int  # slots of dx inside the dW buffer; 0 if dx may not use it

    def holds(self, columns: Array) -> Array:
        return columns < self.columns

    @property
    def token_tiles(self) -> int:
        return self.tokens // TOKENS

    @property
    def rows(self) -> int:
        """Rows of dx: tokens, and hard rows a second time, in whole tiles."""
        return self.tokens + tile_count(self.hard, TOKENS) * TOKENS

    @property
    def across(self) -> int:
        """Tiles of columns."""
        return self.columns // COLUMNS


def not_served_because(p: Problem[Linear]) -> str | None:
    """Why these kernels do not serve a problem (arrays or shapes), or ``None`` where they do."""
    width, vocab = p.h.shape[1], p.head.vocab
    if width % TILE_K or vocab % 8:
        return f"H = {width} and V = {vocab}: a backward without them needs multiples of {TILE_K} and 8"
    return None


def sizes_of(p: Problem[Linear], rule: Rule) -> Sizes:
    """The sizes for a supported problem."""
    width, vocab = p.h.shape[1], p.head.vocab
    most = min(MOST_COLUMNS, PART // (width * jnp.dtype(p.h.dtype).itemsize), rule.most)
    columns, tokens = max(most // COLUMNS, 1) * COLUMNS, tile_count(p.n, TOKENS) * TOKENS
    sizes = Sizes(columns, most_rows(p.n, p.head), tokens, vocab * width // (TOKENS * COLUMNS))
    # In rows of 8 by 256 for the copies; and of [H, V] no columns lie together, in whose place dx could stand.
    fits = p.head.axis == 0 and vocab * width % (8 * COLUMNS) == 0
    fits = fits and sizes.in_dw >= sizes.rows // TOKENS * sizes.across and last_tiles(sizes, width) <= sizes.across
    return sizes if fits else dataclasses.replace(sizes, in_dw=0)


def last_tiles(sizes: Sizes, width: int) -> int:
    """Number of trailing column tiles without space in the dW buffer for the dx of one tile and all tokens."""
    return -(-(sizes.token_tiles + 2) * TOKENS // width)


def group_size(n: int) -> int:
    """Hard rows per group, for ``n`` tokens."""
    return min(GROUP * -(-n // 8192), -(-n // 8) * 8)


def can_add(head: HeadArrays) -> bool:
    """Whether the kernel can add a product to dW: it reads whole pieces."""
    return head.weight.shape[0] % TILE_K == 0


def most_rows(n: int, head: HeadArrays) -> int:
    """Maximum number of hard rows in all groups."""
    size = group_size(n)
    return size * max(min(GROUPS, n // size) if can_add(head) else 1, 1)


# -- what the device knows: extents and hard rows --------------------------------------------------------------------


@register
@dataclasses.dataclass(frozen=True)
class Live:
    """Number of tokens with a gradient, of columns and of hard rows."""

    tokens: Array
    columns: Array
    hard: Array

    def where(self, which: Array) -> Live:
        """None, unless ``which``."""
        return Live(*(jnp.where(which, x, 0) for x in (self.tokens, self.columns, self.hard)))

    def visits(self, sizes: Sizes) -> Visits:
        """All tiles of tokens and columns."""
        return all_of(sizes.tokens, sizes.columns, self.tokens, self.columns)

    def with_hard(self, sizes: Sizes, visits: Visits) -> Visits:
        """Visits for the tokens, followed by visits for the hard rows: all columns."""
        hard = all_of(sizes.rows - sizes.tokens, sizes.columns, self.hard, self.columns)
        return Visits(jnp.concatenate([visits.tiles, hard.tiles]))


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


# -- the memory ------------------------------------------------------------------------------------------------------


@register
@dataclasses.dataclass(frozen=True)
class DweightBuffer:
    """The memory of dW. dx lives in it until dW is written, where dW is wanted and the sizes permit (``in_place``):

    phase           ``dx``, in place                                          ``dx`` and ``weight``, elsewhere
    dlogits         dx of the tokens: slots 0, 1, ...                         the same in memory as small as can be
                    dx of the hard rows behind them
    dhidden         read                                                      read
    column chunks   finished rows of dW in front, dx of the chunk behind,     dx of the chunk; finished rows of dW
                    the last rows of dW elsewhere
    dweight         read; dW_K is written elsewhere                           read
    hard rows       dW [V, H], which the first group writes whole             dW
    """

    weight: Array | None  # dW, where it is wanted and not in the memory of dx
    dx: Array  # [rows, 256]
    sizes: Sizes = static()
    in_place: bool = static()

    @staticmethod
    def for_dx(p: Problem[Linear], want: Wanted, sizes: Sizes) -> DweightBuffer:
        """The phase dlogits: no dW yet."""
        in_place = bool(want.weight and sizes.in_dw)
        rows = p.head.weight.size // COLUMNS if in_place else sizes.rows * sizes.across
        return DweightBuffer(None, lax.empty((rows, COLUMNS), p.h.dtype), sizes, in_place)

    def tokens(self) -> Slots:
        """The tokens' dx in the active columns."""
        return Slots(self.dx, 0, self.sizes.across)

    def hard(self) -> Slots:
        """The hard rows' dx in the active columns."""
        return Slots(self.dx, self.sizes.token_tiles * self.sizes.across, self.sizes.across)

    def chunk(self, first: Index, tiles: Index) -> Slots:
        """The tokens' dx in a chunk of ``tiles`` column tiles, from the slot ``first`` on."""
        return Slots(self.dx, first, tiles if self.in_place else self.sizes.across)

    def holding(self, dx: Array) -> DweightBuffer:
        """Another content of the memory of dx."""
        return dataclasses.replace(self, dx=dx)

    def with_dweight(self, p: Problem[Linear], want: Wanted) -> DweightBuffer:
        """The buffer with memory for dW: a new array unless dW is written in place."""
        apart = want.weight and not self.in_place
        return dataclasses.replace(self, weight=lax.empty(p.head.weight.shape, p.h.dtype) if apart else None)

    def dweight(self, p: Problem[Linear]) -> Array | None:
        """dW, once dx is not read any more."""
        return self.dx.reshape(p.head.weight.shape) if self.in_place else self.weight


# -- the matmuls over dx ---------------------------------------------------------------------------------------------


def dhidden(
    f: Ordered, dx: Slots, part: HeadArrays, live: Live, both: Visits, sizes: Sizes, place: Array
) -> Callable[[Index], tuple[Array, Array]]:
    """``of(half)`` (0 or 1, traced or not): ``(which [N], rows [N, H])``, dH in float32, in the columns of ``part`` and
    over the tiles ``both``, of the tokens that stand in that half of the rows of dx, by their places ``place [N]``.

    In halves, since in float32 that of all rows would be the largest array.
    """
    p, width = f.p, f.p.h.shape[1]
    tiles, listed = tile_count(sizes.rows // TOKENS, 2), both.by_tokens()
    how = dict(right_deep=p.head.axis == 0, shape=(tiles * TOKENS, width), wide=True, interpret=p.call.interpret)

    def of(half: Index) -> tuple[Array, Array]:
        begin = half * tiles
        lists = _of_tokens(listed, live, sizes, begin, tiles)
        rows = dynamic_matmul.product(dx, part.weight, (sizes.rows, width, sizes.columns), lists=lists, **how)
        at = place - begin * TOKENS
        return (at >= 0) & (at < tiles * TOKENS), rows.at[at].get(mode="clip")

    return of


def _of_tokens(listed: Array, live: Live, sizes: Sizes, begin: Index, tiles: int) -> dynamic_matmul.Lists:
    """Depth lists of dH for each token tile, over the given number of tiles from ``begin`` on; hard rows, all in the
    second half, come first, since they have the most work."""
    tokens, hard = (tile_count(x, TOKENS) for x in (live.tokens, live.hard))
    hard = jnp.where(jnp.asarray(begin) > 0, hard, 0)
    place = jnp.arange(tiles, dtype=jnp.int32)
    place = jnp.where(place < hard, sizes.token_tiles + place, begin + place - hard)
    count = hard + jnp.clip(tokens - begin, 0, tiles)
    return dynamic_matmul.Lists(listed.at[place].get(mode="clip"), count, TOKENS, COLUMNS, behind=begin)


def of_columns(live: Live, both: Visits) -> tuple[Array, Array]:
    """Depth lists of dW for each column block, and the number of blocks."""
    return both.by_columns(), jnp.where(live.tokens > 0, tile_count(live.columns, COLUMNS), 0)


def dhead(
    f: Ordered, want: Wanted, dx: Slots, both: Visits, lists: tuple[Array, Array], token: Array, sizes: Sizes
) -> HeadGrads:
    """The head's gradients in the columns of dx, over the tiles ``both`` (``lists``: :func:`of_columns`); ``token`` of
    each row is that of :func:`tokens_of`."""
    p, weight, bias = f.p, None, None
    if want.weight:
        # Gathered again, not kept: not before dx is there.
        at, array = lax.optimization_barrier((token, dx.array))
        by = dynamic_matmul.Lists(*lists, COLUMNS, TOKENS, by_columns=p.head.axis == 1)
        extent = sizes.columns, sizes.rows
        weight = dweight(p, dx.of(array), f.hidden_of(at), extent, columns=sizes.columns, lists=by)
    if want.bias:
        there = both.tiles[:, :, None] & (token < p.n).reshape(-1, 1, TOKENS)
        bias = dbias(dx.tiles(*both.tiles.shape), there)
    return HeadGrads(weight, bias)


def tokens_of(f: Ordered, sizes: Sizes, hard: Hard | None = None, is_hard: Array | None = None) -> Array:
    """int32 ``[rows of dx]``: the token of each row; rows that are hard (``is_hard [N]``, ``hard``) keep only their
    second place. ``n`` marks an empty row."""
    n = f.p.n
    first = jnp.arange(n, dtype=jnp.int32)
    if is_hard is not None:
        first = jnp.where(is_hard, n, first)
    second = jnp.full((sizes.hard,), n, jnp.int32) if hard is None else hard.visit(0, sizes.hard, n).write
    pads = ((0, sizes.tokens - n), (0, sizes.rows - sizes.tokens - sizes.hard))
    return jnp.concatenate([jnp.pad(x, pad, constant_values=n) for x, pad in zip((first, second), pads, strict=True)])


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


# -- hard rows -------------------------------------------------------------------------------------------------------


def group_of(f: Ordered, visit: Visit, rows: Rows) -> tuple[Array, Rows]:
    """Hidden states of some tokens, zeros in the padding, and the per-row inputs of dx."""
    inside = visit.inside(f.p.n)[:, None]
    return jnp.where(inside, f.hidden_of(visit.read), jnp.zeros((), f.p.h.dtype)), rows.of(visit, f.p.n)


def add_hard_rows(f: Ordered, hard: Hard, rows: Rows, active: Array, total: Gradients, blank: Array) -> Gradients:
    """``total`` with what hard rows have in the columns that are not ``active [V]``; dH in the order of the call.

    Where ``blank``, dW holds anything so far, and is written whole. Where it is not, and nothing can be added to dW,
    there must be no rows.
    """
    n, size = f.p.n, group_size(f.p.n)
    groups = hard.rows.size // size

    def group(i: Index, total: Gradients) -> Gradients:
        visit, count = hard.visit(i * size, size, n), jnp.clip(hard.count - i * size, 0, size)
        return _add_group(f, visit, count, rows, active, total, blank & (jnp.asarray(i) == 0))

    # A loop whose length the compiler knows: it asks the host nothing, and a group is compiled once.
    return group(0, total) if groups == 1 else lax.fori_loop(0, groups, group, total)


def _add_group(
    f: Ordered, visit: Visit, count: Array, rows: Rows, active: Array, total: Gradients, blank: Array
) -> Gradients:
    p, size, (h, own_rows) = f.p, visit.read.size, group_of(f, visit, rows)
    head, vocab, width, interpret = p.head, p.head.vocab, h.shape[1], p.call.interpret
    here = jnp.where(blank, jnp.maximum(count, 1), count)  # at least one: dW's zeros come from dx, too
    dx = _dlogits_elsewhere(p, h, own_rows, active, here)
    hidden, weight, bias = total.hidden, total.head.weight, total.head.bias
    if hidden is not None:
        deep = dict(right_deep=head.axis == 0, interpret=interpret)
        own = dynamic_matmul.in_parts(dx, head.weight, size, (count, width, vocab), **deep)
        mine = f.in_call(visit)
        hidden = mine.put(hidden, mine.take(hidden).astype(jnp.float32) + own)
    if weight is not None:
        add = ~blank if can_add(head) else None
        weight = dweight(p, dx, h, (jnp.where(here > 0, vocab, 0), here), into=weight, add=add)
    if bias is not None:
        tiles = dx.tiles(tile_count(size, TOKENS), dx.across)
        live = jnp.arange(tiles.shape[0] * TOKENS).reshape(-1, 1, TOKENS) < here
        bias = bias + dbias(tiles, live)[:vocab]
    return Gradients(hidden, HeadGrads(weight, bias))


def _dlogits_elsewhere(p: Problem, h: Array, rows: Rows, active: Array, here: Array) -> Slots:
    """dx of a group over all columns, of which the first ``here`` rows are meant; zero in the ``active`` ones."""
    vocab = p.head.vocab
    others = ~active & (jnp.arange(vocab) < p.call.vocab_size)
    target = jnp.where(others.at[rows.targets].get(mode="fill", fill_value=False), rows.targets, -1)
    across = tile_count(vocab, COLUMNS)
    place = Slots(lax.empty((tile_count(len(h), TOKENS) * across * TOKENS, COLUMNS), h.dtype), 0, across)
    visits = all_of(len(h), vocab, here, vocab)
    return place.of(columns_dx(p, place, h, rows, target, Region(p.head, others, visits))[0])
