"""Who computes what in the Hopper head kernel: tiles, and an equal share of them for every block of the GPU.

A deterministic rule from shapes and from how many tiles are live, which is traced. A kernel's blocks walk over the
tiles in one of four ways:

    Runs        equal runs over the vocabulary, by a table
    TileByTile  all tiles of a product in turns, its depth whole or in parts
    Listed      the tiles of a list, in turns
    ByLists     all tiles of a product in turns, of its depth only the pieces that a list names
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from logitless.core.compat import Index, Ref
from logitless.core.shapes import PyTree

COMPUTE = 2
"""Computing warpgroups per block."""

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

    listed: Ref  # int32 [3 + most], a reference: how many, and the slots of the result (``dx_tiles.py``);
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
