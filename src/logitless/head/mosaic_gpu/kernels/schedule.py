"""Who computes what in the Hopper head kernels: the shapes that they take, tile sizes, where the tiles of dx lie, which
of them are visited, and the walk of every block.

Rules are deterministic, from shapes and from how many tiles are live, which is traced. A kernel's blocks walk over the
tiles in one of four ways:

    Runs        equal runs over the vocabulary, by a table
    TileByTile  all tiles of a product in turns, its depth whole or in parts
    Listed      the tiles of a list, in turns
    ByLists     all tiles of a product in turns, of its depth only the pieces that a list names

dx lies in :class:`Slots`: each tile of 128 tokens and 256 columns has a slot, 128 rows of an array ``[rows, 256]``,
which may be any memory that is free, the dW buffer before dW is written. The tiles of a row are adjacent, ``across``
slots; dx with few columns needs little memory, at any offset, and a single kernel serves every size. Whoever reads or
writes dx asks for a piece that lies within a tile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from logitless.core.compat import Index, Ref, mosaic_gpu_reason
from logitless.core.problem import Linear, Problem
from logitless.core.shapes import PyTree

COMPUTE = 2
"""Computing warpgroups per block."""

TILE_K = 64
"""Depth of a tile: 128 bytes per 16-bit row, a swizzle atom."""

_DTYPES = ("bfloat16", "float16")
_BLOCKS = 132  # streaming multiprocessors of an H100 or H200
_L2_BYTES = 20 << 20  # of hidden states that a group of token tiles may keep in L2


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Static sizes. A block's tile is ``2 rows x columns``; ``group`` token tiles sweep the vocabulary together."""

    rows: int = 64  # of a warpgroup
    columns: int = 256
    stages: int = 4  # of the ring
    group: int = 16
    blocks: int = _BLOCKS
    delay: int = 1  # wgmmas in flight when the step before releases its slot
    stagger: int = 0  # steps by which the second warpgroup starts later, so that epilogues meet matmuls

    @property
    def tokens(self) -> int:
        return COMPUTE * self.rows

    def runs(self, token_tiles: int, vocab_tiles: int) -> int:
        """The most runs a row is cut into, of equal length; one shorter one may follow."""
        return min(4 * (self.blocks // min(self.group, token_tiles)), self.blocks, vocab_tiles)


TOKENS, COLUMNS = Tiles().tokens, Tiles().columns
"""Of a tile of dx."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Who computes what: int32 ``[blocks, groups]``, and ``parts [token_tiles]``, the runs of a token tile.

    In each group a block takes ``count`` token tiles from ``token`` on, over the vocabulary tiles ``[first, last)``,
    and writes their sums as part ``slot``.
    """

    token: Array
    count: Array
    first: Array
    last: Array
    slot: Array
    parts: Array


def schedule(t: Tiles, token_tiles: int, vocab_tiles: int, live: Index) -> Schedule:
    """Equal work for every block, for ``live`` token tiles (traced).

    Order: groups of about ``t.group`` token tiles. In a group of ``g``, block ``b`` takes token tile ``b % g`` and run
    ``b // g`` of ``R = blocks // g``: the ``g`` blocks that share a run read the same ``W`` tiles at the same time. The
    ``E`` blocks left over take what the runs leave of the vocabulary, a tail as long as a run when summed over the
    token tiles a left-over block has.
    """
    xp: Any = np if isinstance(live, int) else jnp  # eager jnp would compile each operation
    groups = -(-token_tiles // t.group)
    live = xp.asarray(live, xp.int32)
    used = xp.maximum((live + t.group - 1) // t.group, 1)
    j, tile = xp.arange(groups, dtype=xp.int32), xp.arange(token_tiles, dtype=xp.int32)
    begin = xp.minimum(j * live // used, live)
    size = xp.where(j < used, xp.minimum((j + 1) * live // used, live) - begin, 0)
    g = xp.maximum(size, 1)
    runs = xp.minimum(t.blocks // g, t.runs(token_tiles, vocab_tiles))
    extra = xp.minimum(t.blocks - g * runs, g)
    each = xp.where(extra > 0, (g + extra - 1) // xp.maximum(extra, 1), 0)  # token tiles of a left-over block
    tail = xp.where(extra > 0, (vocab_tiles + runs * each // 2) // (1 + runs * each), 0)
    b = xp.arange(t.blocks, dtype=xp.int32)[:, None]
    run, e, rest = b // g, b - g * runs, vocab_tiles - tail
    main = run < runs
    count = xp.where(main, 1, xp.maximum(xp.minimum(each, g - e * each), 0))
    return Schedule(
        token=begin + xp.where(main, b % g, e * each),
        count=xp.where((size > 0) & (main | (tail > 0)), count, 0),
        first=xp.where(main, run * rest // runs, rest),
        last=xp.where(main, (run + 1) * rest // runs, vocab_tiles),
        slot=xp.where(main, run, runs),
        parts=(runs + (tail > 0))[xp.sum(tile[:, None] >= (begin + size)[:-1], axis=1)],
    )


def rounds(t: Tiles, token_tiles: int, vocab_tiles: int) -> int:
    """Tiles of the busiest block: what the time is proportional to."""
    s = schedule(t, token_tiles, vocab_tiles, token_tiles)
    return int((s.count * (s.last - s.first)).sum(1).max())


def tiles_for(n: int, h: int, vocab_size: int, itemsize: int = 2) -> Tiles:
    """The rule: 128 x 256 tiles, and the largest group whose hidden states stay in L2 that keeps the blocks busy."""
    t = Tiles()
    token_tiles, vocab_tiles = -(-n // t.tokens), -(-vocab_size // t.columns)
    t = dataclasses.replace(t, blocks=min(t.blocks, token_tiles * vocab_tiles))
    most = min(max(_L2_BYTES // (t.tokens * h * itemsize), 1), token_tiles, 32)
    most = -(-token_tiles // -(-token_tiles // most))  # groups are of equal size
    choices = [dataclasses.replace(t, group=g) for g in sorted({most, *(g for g in (1, 2, 4, 8, 16, 32) if g < most)})]
    cost = {c: rounds(c, token_tiles, vocab_tiles) for c in choices}
    return max((c for c in choices if cost[c] <= 1.01 * min(cost.values())), key=lambda c: c.group)


def check(p: Problem[Linear], platform: str = "gpu") -> None:
    """Raise ``NotImplementedError`` with the reason where these kernels cannot run (arrays or shapes)."""
    (n, h), v, layout, interpret = p.h.shape, p.head.vocab, p.head.layout, p.call.interpret
    dtype, head_dtype = p.h.dtype, p.head.weight.dtype
    names = jnp.dtype(dtype).name, jnp.dtype(head_dtype).name
    why = mosaic_gpu_reason()
    if why is not None:
        raise NotImplementedError(f"mosaic_gpu: {why}")
    if platform not in ("gpu", "cuda") and not interpret:
        raise NotImplementedError(f"mosaic_gpu: it runs on a Hopper GPU, not on {platform}")
    if names[0] not in _DTYPES or names[0] != names[1]:
        raise NotImplementedError(
            f"mosaic_gpu: hidden states are {names[0]} and the head is {names[1]}; the fused matmul takes "
            f"{' or '.join(_DTYPES)}, the same for both"
        )
    if n < 1 or h < 1 or v < 1:
        raise NotImplementedError(f"mosaic_gpu: hidden [{n}, {h}] and a vocabulary of {v}: something is empty")
    if h % 8:
        raise NotImplementedError(f"mosaic_gpu: the hidden size is {h}, and copies need a multiple of 8 (16 bytes)")
    if layout == "hv" and v % TILE_K:
        raise NotImplementedError(
            f"mosaic_gpu: V = {v} is not a multiple of {TILE_K}, which a head [H, V] needs and a head [V, H] does not"
        )


# -- dx and the tiles of it that are visited ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Slots:
    """dx, or room for it."""

    array: Any  # [rows, 256], or a reference to it
    first: Index  # the slot of the first tile
    across: Any  # slots per row of tiles

    def at(self, row: Index, rows: int, column: Index, columns: int) -> Any:
        """A kernel's reference to so many rows and columns from there on."""
        slot = self.first + lax.div(row, jnp.int32(TOKENS)) * self.across + lax.div(column, jnp.int32(COLUMNS))
        inside = lax.rem(row, jnp.int32(TOKENS)), lax.rem(column, jnp.int32(COLUMNS))
        return self.array.at[pl.ds(slot * TOKENS + inside[0], rows), pl.ds(inside[1], columns)]

    def numbers(self) -> tuple[Index, Index]:
        return self.first, self.across

    def of(self, array: Array) -> Slots:
        """The same places of another array."""
        return dataclasses.replace(self, array=array)

    def tiles(self, rows: int, columns: int) -> Array:
        """``[row tiles, column tiles, 128, 256]``; undefined in missing columns."""
        row, column = jnp.arange(rows, dtype=jnp.int32)[:, None], jnp.arange(columns, dtype=jnp.int32)
        slot = self.first + row * self.across + jnp.minimum(column, self.across - 1)
        at = slot[:, :, None] * TOKENS + jnp.arange(TOKENS, dtype=jnp.int32)
        return self.array.at[at].get(mode="clip")


def count(size: int) -> int:
    """How many slots so many numbers have room for."""
    return size // (TOKENS * COLUMNS)


def tile_count(size: Any, tile: int) -> Any:
    """Number of tiles for ``size`` tokens or columns."""
    return (size + (tile - 1)) // tile


@dataclasses.dataclass(frozen=True)
class Visits:
    """What is visited: bool ``[token tiles, column tiles]``. Every row and column with a tile has an entry."""

    tiles: Array

    def columns(self) -> Array:
        """That a token's tile visits, on average over the live tiles."""
        return COLUMNS * jnp.sum(self.tiles) / jnp.maximum(jnp.sum(jnp.any(self.tiles, axis=1)), 1)

    def listed(self, group: int, slots: tuple[Index, Index]) -> Array:
        """int32 ``[3 + tiles]``, for ``schedule.Listed``: how many, and the numbers of the result's ``slots``; then
        which, ``group`` token tiles with a column tile at a time, by L2."""
        rows, columns = self.tiles.shape
        groups = -(-rows // group)
        whole = jnp.pad(self.tiles, ((0, groups * group - rows), (0, 0))).reshape(groups, group, columns)
        flags = whole.transpose(0, 2, 1).reshape(-1)
        place = jnp.arange(flags.size, dtype=jnp.int32)
        place = jnp.sort(jnp.where(flags, place, flags.size))[: rows * columns]
        row = place // (group * columns) * group + place % group
        tile = row * columns + place // group % columns
        return _with_numbers(tile, jnp.sum(flags, dtype=jnp.int32), *slots)

    def by_tokens(self) -> Array:
        """int32 ``[token tiles, 2 + column tiles]``, for ``schedule.ByLists``: per token tile its index, the number of
        visited column tiles, and their indices."""
        return _lists(self.tiles)

    def by_columns(self) -> Array:
        """int32 ``[column tiles, 2 + token tiles]``: the other way round."""
        return _lists(self.tiles.T)


def _with_numbers(tiles: Array, *numbers: Index) -> Array:
    return jnp.concatenate([jnp.stack([jnp.asarray(x, jnp.int32) for x in numbers]), tiles])


def _lists(visited: Array) -> Array:
    """int32 ``[R, 2 + C]``: row index, number of visited tiles, and their indices."""
    rows, columns = visited.shape
    which = jnp.where(visited, jnp.arange(columns, dtype=jnp.int32), columns)
    count = jnp.sum(visited, axis=1, dtype=jnp.int32)
    numbers = jnp.stack([jnp.arange(rows, dtype=jnp.int32), count], axis=1)
    return jnp.concatenate([numbers, jnp.sort(which, axis=1) % columns], axis=1)


@dataclasses.dataclass(frozen=True)
class All(Visits):
    """All tiles of the first rows and columns: their list needs no sort."""

    live: tuple[Array, Array]  # tiles

    def listed(self, group: int, slots: tuple[Index, Index]) -> Array:
        rows, columns = self.live
        at = jnp.arange(self.tiles.size, dtype=jnp.int32)
        row, column, _ = tile_at(at, jnp.maximum(rows, 1), jnp.maximum(columns, 1), group)
        tile = row * self.tiles.shape[1] + column
        return _with_numbers(tile, rows * columns, *slots)


def all_of(rows: int, columns: int, live_rows: Index, live_columns: Index) -> All:
    """All tiles for the given rows and columns; the leading rows and columns are live."""
    sizes = (rows, live_rows, TOKENS), (columns, live_columns, COLUMNS)
    row, column = (jnp.arange(tile_count(size, tile)) * tile < live for size, live, tile in sizes)
    live = tuple(tile_count(jnp.int32(live), tile) for _, live, tile in sizes)
    return All(row[:, None] & column[None, :], live)


# -- the walk of a block ----------------------------------------------------------------------------------------------


class _Walk:
    """A block's walk over tiles with whole depth."""

    def depth(self, part: Array, steps: int) -> tuple[Index, Index]:
        """Steps along the depth for a part of the matmul."""
        return 0, steps

    def at(self, part: Array, step: Array) -> Array:
        """Where along the depth a step is."""
        return step


@dataclasses.dataclass(frozen=True)
class Runs(_Walk):
    """A block's walk through the runs of :func:`schedule`."""

    tasks: Ref  # int32 [5, blocks, groups], a reference

    def runs(self, per_tile: Callable[..., PyTree], per_run: Callable[..., PyTree], carry: PyTree) -> PyTree:
        """``per_tile(row tile, column tile, 0, c)`` for all tiles of this block, and ``per_run(row tile, slot, c)``
        after each run."""
        block = lax.axis_index("block")

        def group(j: Array, c: PyTree) -> PyTree:
            token, count, first, last, slot = (self.tasks[i, block, j] for i in range(5))

            def run(i: Array, c: PyTree) -> PyTree:
                def step(v: Array, c: PyTree) -> PyTree:
                    return per_tile(token + i, v, jnp.int32(0), c)

                return per_run(token + i, slot, lax.fori_loop(first, last, step, c))

            return lax.fori_loop(0, count, run, c)

        return lax.fori_loop(0, self.tasks.shape[2], group, carry)

    def tiles(self, per_tile: Callable[..., PyTree], carry: PyTree) -> PyTree:
        return self.runs(per_tile, lambda tile, slot, c: c, carry)


def extents(
    rows: Index,
    columns: Index,
    depth: Index,
    parts: Index = 1,
    add: Index = 0,
    slots: tuple[Index, Index] = (0, 1),
    behind: Index = 0,
) -> Array:
    """int32 ``[8]``: how many tiles of rows and columns a product has, in how many parts its depth is cut, how many
    steps that has in all, whether it is added to what is there, the numbers of the operand that lies in slots, and
    which row tile is the first of the result. Sizes known only to the device, which bound the work."""
    return jnp.stack([jnp.asarray(x, jnp.int32) for x in (rows, columns, parts, depth, add, *slots, behind)])


def tile_at(i: Index, rows: Index, columns: Index, group: int) -> tuple[Array, Array, Array]:
    """``(row tile, column tile, part)`` of the ``i``-th tile: ``group`` row tiles share a column tile, by L2."""
    part, at = lax.div(i, rows * columns), lax.rem(i, rows * columns)
    first = lax.div(at, group * columns) * group
    size = jnp.minimum(group, rows - first)
    inside = at - first * columns
    return first + lax.rem(inside, size), lax.div(inside, size), part


@dataclasses.dataclass(frozen=True)
class TileByTile(_Walk):
    """The walk of a block that takes a tile a round, for products which runs would cut into unequal shares."""

    extents: Ref  # int32 [8], a reference
    t: Tiles

    @property
    def parts(self) -> Array:
        return self.extents[2]

    def depth(self, part: Array, steps: int) -> tuple[Index, Index]:
        """The steps of a part of the depth."""
        whole, parts = self.extents[3], self.parts
        return lax.div(part * whole, parts), lax.div((part + 1) * whole, parts)

    def tiles(self, per_tile: Callable[..., PyTree], carry: PyTree) -> PyTree:
        """Call ``per_tile(row tile, column tile, part, c)`` for every tile in the block's share."""
        rows, columns = self.extents[0], self.extents[1]

        def step(i: Array, c: PyTree) -> PyTree:
            return per_tile(*tile_at(i, rows, columns, self.t.group), c)

        return _in_turns(self.t, rows * columns * self.parts, step, carry)


def _in_turns(t: Tiles, count: Array, step: Callable[..., PyTree], carry: PyTree) -> PyTree:
    """Call ``step(i, c)`` for the block's share of ``count``."""
    block, blocks = lax.axis_index("block"), jnp.int32(t.blocks)
    trips = lax.div(count - block + (blocks - 1), blocks)
    return lax.fori_loop(0, trips, lambda j, c: step(block + j * blocks, c), carry)


@dataclasses.dataclass(frozen=True)
class Listed(_Walk):
    """The walk over the tiles of a list."""

    listed: Ref  # int32 [3 + most], a reference: how many, and the slots of the result (:class:`Slots`);
    # then row times columns of the tile, plus its column
    columns: int
    t: Tiles

    def slots(self) -> tuple[Array, Array]:
        return self.listed[1], self.listed[2]

    def tiles(self, per_tile: Callable[..., PyTree], carry: PyTree) -> PyTree:
        """Call ``per_tile(row tile, column tile, 0, c)`` for every tile in the block's share."""

        def step(i: Array, c: PyTree) -> PyTree:
            tile = self.listed[3 + i]
            return per_tile(lax.div(tile, self.columns), lax.rem(tile, self.columns), jnp.int32(0), c)

        return _in_turns(self.t, self.listed[0], step, carry)


@dataclasses.dataclass(frozen=True)
class ByLists(_Walk):
    """The walk over all tiles of a product in which a group of ``share`` row tiles (or column tiles) has a list of the
    pieces of the depth that count, each of ``steps`` steps."""

    extents: Ref  # int32 [8], a reference; rows (columns) in the order of the lists
    lists: Any  # int32 [groups, 2 + most], a reference: which group, how many pieces (at least one), and which
    t: Tiles
    by_columns: bool
    share: int
    steps: int

    def depth(self, part: Array, steps: int) -> tuple[Index, Index]:
        return 0, self.lists[part, 1] * self.steps

    def at(self, part: Array, step: Array) -> Array:
        size = jnp.int32(self.steps)
        return self.lists[part, 2 + lax.div(step, size)] * size + lax.rem(step, size)

    def tiles(self, per_tile: Callable[..., PyTree], carry: PyTree) -> PyTree:
        """Call ``per_tile(row tile, column tile, list, c)`` for every tile in the block's share."""
        rows, columns, share = self.extents[0], self.extents[1], jnp.int32(self.share)

        def step(i: Array, c: PyTree) -> PyTree:
            row, column, _ = tile_at(i, rows, columns, self.t.group)
            own = column if self.by_columns else row
            which = lax.div(own, share)
            place = self.lists[which, 0] * share + lax.rem(own, share)
            return per_tile(row, place, which, c) if self.by_columns else per_tile(place, column, which, c)

        return _in_turns(self.t, rows * columns, step, carry)
