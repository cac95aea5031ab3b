"""Sizes of the parts of the sparse backward on a Hopper GPU, and the location of its arrays.

dx is stored in slots (``dx_tiles.py``): in the dW buffer until dW is written, or in separate memory. The matmuls over
it are the same kernels whether all active columns go at once (``sparse_backward.py``) or a chunk of columns at a time
(``column_chunks.py``): they are here.

    dH      dx [tokens and hard rows, K] times a part of the head
    dW_K    dx transposed times the hidden states of its rows
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from logitless.core.compat import Index
from logitless.core.problem import HeadArrays, HeadGrads, Linear, Problem, Wanted
from logitless.core.pytree import register
from logitless.head.mosaic_gpu import tile_mask
from logitless.head.mosaic_gpu.dx_tiles import COLUMNS, TOKENS, Slots, count, tile_count
from logitless.head.mosaic_gpu.hard_rows import Hard, dbias, dweight, most_rows
from logitless.head.mosaic_gpu.kernels import dynamic_matmul
from logitless.head.mosaic_gpu.limits import TILE_K
from logitless.head.mosaic_gpu.tile_mask import Visits
from logitless.head.sparse.active_columns import Rule
from logitless.head.sparse.token_order import Ordered

MOST_COLUMNS = 11264
"""Columns per part; fewer if their part of the head exceeds :data:`PART` bytes."""

PART = 68 << 20


@dataclasses.dataclass(frozen=True)
class Room:
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

    def in_place(self, want: Wanted) -> bool:
        return bool(want.weight and self.in_dw)

    def dx(self, head: HeadArrays, want: Wanted) -> tuple[int, int]:
        """The shape of dx: the size of dW, or as small as possible."""
        return (head.weight.size // COLUMNS if self.in_place(want) else self.rows * self.across), COLUMNS


def no_room_because(p: Problem[Linear]) -> str | None:
    """Why these kernels do not serve a problem (arrays or shapes), or ``None`` where they do."""
    width, vocab = p.h.shape[1], p.head.vocab
    if width % TILE_K or vocab % 8:
        return f"H = {width} and V = {vocab}: a backward without them needs multiples of {TILE_K} and 8"
    return None


def room(p: Problem[Linear], rule: Rule) -> Room:
    """The sizes for a supported problem."""
    width, vocab = p.h.shape[1], p.head.vocab
    most = min(MOST_COLUMNS, PART // (width * jnp.dtype(p.h.dtype).itemsize), rule.most)
    columns, tokens = max(most // COLUMNS, 1) * COLUMNS, tile_count(p.n, TOKENS) * TOKENS
    held = Room(columns, most_rows(p.n, p.head), tokens, count(vocab * width))
    # In rows of 8 by 256 for the copies; and of [H, V] no columns lie together, in whose place dx could stand.
    fits = p.head.axis == 0 and vocab * width % (8 * COLUMNS) == 0 and held.in_dw >= held.rows // TOKENS * held.across
    fits = fits and last_tiles(held, width) <= held.across
    return held if fits else dataclasses.replace(held, in_dw=0)


def last_tiles(held: Room, width: int) -> int:
    """Number of trailing column tiles without space in the dW buffer for the dx of one tile and all tokens."""
    return -(-(held.token_tiles + 2) * TOKENS // width)


@register
@dataclasses.dataclass(frozen=True)
class Live:
    """How many there are of tokens with a gradient, columns and hard rows."""

    tokens: Array
    columns: Array
    hard: Array

    def where(self, which: Array) -> Live:
        """None, unless ``which``."""
        return Live(*(jnp.where(which, x, 0) for x in (self.tokens, self.columns, self.hard)))

    def visits(self, held: Room) -> Visits:
        """All tiles of tokens and columns."""
        return tile_mask.all_of(held.tokens, held.columns, self.tokens, self.columns)

    def visits_of_hard(self, held: Room) -> Visits:
        return tile_mask.all_of(held.rows - held.tokens, held.columns, self.hard, self.columns)

    def with_hard(self, held: Room, visits: Visits) -> Visits:
        """Visits for the tokens, followed by visits for the hard rows."""
        return Visits(jnp.concatenate([visits.tiles, self.visits_of_hard(held).tiles]))


def dhidden(
    f: Ordered, dx: Slots, part: HeadArrays, live: Live, both: Visits, held: Room, place: Array
) -> Callable[[Index], tuple[Array, Array]]:
    """``of(half)`` (0 or 1, traced or not): ``(which [N], rows [N, H])``, dH in float32, in the columns of ``part`` and
    over the tiles ``both``, of the tokens that stand in that half of the rows of dx, by their places ``place [N]``.

    In halves, since in float32 that of all rows would be the largest array.
    """
    p, width = f.p, f.p.h.shape[1]
    tiles, listed = tile_count(held.rows // TOKENS, 2), both.by_tokens()
    how = dict(right_deep=p.head.axis == 0, shape=(tiles * TOKENS, width), wide=True, interpret=p.call.interpret)

    def of(half: Index) -> tuple[Array, Array]:
        begin = half * tiles
        lists = _of_tokens(listed, live, held, begin, tiles)
        rows = dynamic_matmul.product(dx, part.weight, (held.rows, width, held.columns), lists=lists, **how)
        at = place - begin * TOKENS
        return (at >= 0) & (at < tiles * TOKENS), rows.at[at].get(mode="clip")

    return of


def _of_tokens(listed: Array, live: Live, held: Room, begin: Index, tiles: int) -> dynamic_matmul.Lists:
    """Depth lists of dH for each token tile, over the given number of tiles from ``begin`` on; hard rows, all in the
    second half, come first, since they have the most work."""
    tokens, hard = (tile_count(x, TOKENS) for x in (live.tokens, live.hard))
    hard = jnp.where(jnp.asarray(begin) > 0, hard, 0)
    place = jnp.arange(tiles, dtype=jnp.int32)
    place = jnp.where(place < hard, held.token_tiles + place, begin + place - hard)
    count = hard + jnp.clip(tokens - begin, 0, tiles)
    return dynamic_matmul.Lists(listed.at[place].get(mode="clip"), count, TOKENS, COLUMNS, behind=begin)


def of_columns(live: Live, both: Visits) -> tuple[Array, Array]:
    """Depth lists of dW for each column block, and the number of blocks."""
    return both.by_columns(), jnp.where(live.tokens > 0, tile_count(live.columns, COLUMNS), 0)


def dhead(
    f: Ordered, want: Wanted, dx: Slots, both: Visits, lists: tuple[Array, Array], places: Array, held: Room
) -> HeadGrads:
    """The head's gradients in the columns of dx, over the tiles ``both`` (``lists``: :func:`of_columns`); the token of
    each row is ``places [rows of dx]``, beyond the tokens where there is none."""
    p, weight, bias = f.p, None, None
    if want.weight:
        # Gathered again, not kept: not before dx is there.
        at, array = lax.optimization_barrier((places, dx.array))
        table, blocks_of_columns = lists
        by = dynamic_matmul.Lists(table, blocks_of_columns, COLUMNS, TOKENS, by_columns=p.head.axis == 1)
        extent = held.columns, held.rows
        weight = dweight(p, dx.of(array), f.hidden_of(at), extent, columns=held.columns, lists=by)
    if want.bias:
        there = both.tiles[:, :, None] & (places < p.n).reshape(-1, 1, TOKENS)
        bias = dbias(dx.tiles(*both.tiles.shape), there)
    return HeadGrads(weight, bias)


def places_of(f: Ordered, held: Room, hard: Hard | None = None, is_hard: Array | None = None) -> Array:
    """int32 ``[rows of dx]``: the token of each row; hard rows keep only their second place. ``n`` marks an empty
    row."""
    n = f.p.n
    first = jnp.arange(n, dtype=jnp.int32)
    if is_hard is not None:
        first = jnp.where(is_hard, n, first)
    second = jnp.full((held.hard,), n, jnp.int32) if hard is None else hard.visit(0, held.hard, n).write
    pads = ((0, held.tokens - n), (0, held.rows - held.tokens - held.hard))
    return jnp.concatenate([jnp.pad(x, pad, constant_values=n) for x, pad in zip((first, second), pads, strict=True)])
