"""Tiles of tokens and active columns visited by the sparse backward on a Hopper GPU: tiles in which both met.

Most active columns are rare tokens, of which only a few rows know; a few thousand common ones are active nearly
everywhere. With the columns in an order of their own (:func:`in_order`),

    common     active in tiles of tokens that lie far apart: first, those that are active longest in front
    rare       active in neighbouring tiles only: behind them, by the first of these tiles

a tile of tokens needs the front of the common columns and a short piece of the rare ones. So of ``tokens x K`` a
backward over blocks of 256 columns visits a third (:class:`Visits`; docs/sparse-backward.md). What a row leaves out is
computed from the columns that its tile visits: the choice costs time, never truth.

The first place belongs to no column: there stands the mean row of the head, which every row needs.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from logitless.core.compat import Index
from logitless.core.pytree import register
from logitless.head.mosaic_gpu.dx_tiles import COLUMNS, TOKENS, tile_count
from logitless.head.mosaic_gpu.kernels.schedule import tile_at

_NEAR = 4
"""Tiles of tokens that are neighbours: a column that is active in no others is rare."""


@register
@dataclasses.dataclass(frozen=True)
class Spans:
    """The first and the last tile of tokens in which each column is active, ``[V]`` int32; ``last`` is -1 for those
    that are not."""

    first: Array
    last: Array

    @property
    def active(self) -> Array:
        """Bool ``[V]``."""
        return self.last >= 0

    def everywhere(self) -> Spans:
        """The same columns, active in every tile."""
        return Spans(jnp.zeros_like(self.first), jnp.where(self.active, jnp.iinfo(jnp.int32).max - 1, -1))

    def only(self, which: Array | bool) -> Spans:
        """No other column is active."""
        return Spans(self.first, jnp.where(which, self.last, -1))


def in_order(s: Spans, size: int) -> Array:
    """int32 ``[size]``: the active columns, common ones first; then numbers beyond the vocabulary."""
    vocab = s.last.size
    end = jnp.max(s.last) + 1  # of the tiles
    common = s.last - s.first >= _NEAR
    key = jnp.where(common, end - s.last, end + 1 + s.first)
    order = jnp.argsort(jnp.where(s.active, key, jnp.iinfo(jnp.int32).max), stable=True)[:size].astype(jnp.int32)
    at = jnp.arange(size, dtype=jnp.int32)
    return jnp.where(at < jnp.sum(s.active, dtype=jnp.int32), order, vocab + at)


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


def met(s: Spans, index: Array, everything: Visits) -> Visits:
    """The tiles of ``everything`` with a column that is active for a token; ``index [K]`` are the columns, with no
    column first. The mean row visits all tiles, and every column has a tile."""
    tokens, across = everything.tiles.shape
    first = s.first.at[index].get(mode="fill", fill_value=tokens)
    last = s.last.at[index].get(mode="fill", fill_value=-1)
    rest = (0, across * COLUMNS - index.size)
    first, last = jnp.pad(first, rest, constant_values=tokens), jnp.pad(last, rest, constant_values=-1)
    tile = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    tiles = jnp.any(((first <= tile) & (tile <= last)).reshape(tokens, across, COLUMNS), axis=2)
    tiles = tiles.at[:, 0].set(True)
    tiles = tiles.at[0].set(tiles[0] | ~jnp.any(tiles & everything.tiles, axis=0))
    return Visits(tiles & everything.tiles)
