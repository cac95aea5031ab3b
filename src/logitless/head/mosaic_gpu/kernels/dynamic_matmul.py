"""A matmul of two arrays on a Hopper GPU whose extents only the device knows: as much of it as there is, without asking
the host.

``pipeline.py`` has the matmul; the epilogue rounds the accumulator once and writes through shared memory. It serves dH
and dW of the active columns, whose number the forward pass has found, and of the hard rows; an XLA matmul would have
the size of the most that there may be, or the host would have to choose one of several. Tiles of the result beyond the
extents are left as they are.

    out [R, C]      left [R, D] or [D, R] times right [D, C] or [C, D]; either may be dx, in slots (``schedule.Slots``)
    in parts        out [P, R, C] in float32: the depth is cut into so many parts that all blocks have a tile, for
                    products that are small and deep (dH of a few hard rows: D is the vocabulary)
    into            written over an array that is there, in its own memory
    by lists        the pieces of the depth that count are another set for each tile of rows, or of columns (dH and dW
                    of the blocks that were visited: ``schedule.Visits``)

    matmuls   one, R x D x C of the live extents
    HBM       both operands once per group of row tiles; the result once
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from logitless.core.compat import Index, Ref, gpu_load
from logitless.head.mosaic_gpu.kernels import pipeline
from logitless.head.mosaic_gpu.kernels.pipeline import Pipeline, Running
from logitless.head.mosaic_gpu.kernels.schedule import TILE_K, ByLists, Slots, TileByTile, Tiles, extents

_GROUP = 8  # row tiles: with 16 column tiles, as many as there are blocks


def tiles_of(rows: int, columns: int, parts: int = 1) -> Tiles:
    """Tiles for a product with at most so many rows and columns."""
    t = Tiles(group=_GROUP)
    most = -(-rows // t.tokens) * -(-columns // t.columns) * parts
    return Tiles(group=_GROUP, blocks=min(t.blocks, most))


@dataclasses.dataclass(frozen=True)
class Lists:
    """For each of the first ``count`` row or column groups of a product: the pieces of the depth that count. A group
    and a piece have static sizes, in whole tiles."""

    table: Array  # int32 [groups, 2 + pieces]: which group, how many pieces (at least one), and which
    count: Array
    group: int
    piece: int
    by_columns: bool = False
    behind: Index = 0  # row tiles: offset of the result


Operand = Array | Slots


def product(
    left: Operand,
    right: Operand,
    live: tuple[Index, Index, Index],
    *,
    left_deep: bool = False,
    right_deep: bool = False,
    shape: tuple[int, int] | None = None,
    into: Array | None = None,
    lists: Lists | None = None,
    add: Array | None = None,
    wide: bool = False,
    interpret: object = False,
) -> Array:
    """``left [R, D]`` times ``right [C, D]`` (each the other way round where its depth is first), in their dtype, or in
    float32 if it is to be ``wide``, over the first ``live`` rows, columns and numbers along the depth (traced). Along
    the depth the operands are used up to whole tiles of 64, and must be zero there; of no depth nothing is written.

    ``shape``: of the result, where the operands have more, or one is in slots. With ``into`` the result overwrites that
    array and keeps entries beyond the whole tiles of the live extents; without ``into`` those entries are undefined.
    With ``lists`` the lists name the pieces of the depth, and the number of rows or columns. With ``add`` (traced) the
    product is added to existing values; sizes must then be multiples of 64.
    """
    operands = [_Operand(left, left_deep), _Operand(right, right_deep)]
    size: tuple[int, ...]
    if into is not None:
        size = into.shape
    else:
        size = (operands[0].across, operands[1].across) if shape is None else shape
    t = tiles_of(*size)
    rows, columns, steps = _tiles(live if lists is None else (*live[:2], TILE_K), t)
    table, form = None, None
    if lists is not None:
        tile = t.columns if lists.by_columns else t.tokens
        form = lists.by_columns, lists.group // tile, lists.piece // TILE_K
        count, table = lists.count * form[1], lists.table
        rows, columns = (rows, count) if lists.by_columns else (count, columns)
    behind = 0 if lists is None else lists.behind
    all_of_it = extents(rows, columns, steps, add=0 if add is None else add, slots=_slots(operands), behind=behind)
    return _product(*_given(operands), all_of_it, table, into, add is not None, wide, size, t, form, interpret)


def in_parts(
    left: Operand,
    right: Array,
    rows: int,
    live: tuple[Index, Index, Index],
    *,
    right_deep: bool = False,
    more: int = 0,
    interpret: object = False,
) -> Array:
    """:func:`product` of at most so many ``rows`` in float32, its depth cut into parts that are added up; zero beyond
    the live rows, and anything beyond the live columns. The result has space for ``more`` row tiles of parts."""
    operands = [_Operand(left, False), _Operand(right, right_deep)]
    c, deep = operands[1].across, -(-operands[1].depth // TILE_K)
    t = tiles_of(rows, c, deep)
    row_tiles, column_tiles = -(-rows // t.tokens), -(-c // t.columns)
    most = min(max(t.blocks // column_tiles, 1), deep)  # parts of one row tile
    room = max(most, row_tiles + more)
    live_rows, columns, steps = _tiles(live, t)
    parts = _best_parts(live_rows, columns, most, room, t.blocks)
    shape = (room, t.tokens, c)
    some = extents(live_rows, columns, steps, parts, slots=_slots(operands))
    out = _product(*_given(operands), some, None, None, False, True, shape, t, None, interpret)
    tile, part = jnp.arange(row_tiles, dtype=jnp.int32), jnp.arange(most, dtype=jnp.int32)[:, None]
    there = (tile < live_rows) & (part < parts)
    own = out.at[jnp.where(there, tile * parts + part, 0)].get(mode="promise_in_bounds")
    return jnp.sum(jnp.where(there[:, :, None, None], own, 0.0), axis=0).reshape(-1, c)[:rows]


def _best_parts(rows: Array, columns: Index, most: int, room: int, blocks: int) -> Array:
    """The number of parts, at most ``most`` and within ``room``, that keeps all blocks busy longest."""
    parts = jnp.arange(1, most + 1, dtype=jnp.int32)
    rounds = (rows * columns * parts + (blocks - 1)) // blocks
    cost = rounds / parts + 0.01 * parts  # in tiles of the whole depth; a part is written and added
    return parts[jnp.argmin(jnp.where((parts == 1) | (rows * parts <= room), cost, jnp.inf))]


@dataclasses.dataclass(frozen=True)
class _Operand:
    """An array or slots, and whether its depth is first."""

    x: Operand
    deep: bool

    @property
    def across(self) -> int:
        return self.x.shape[1 if self.deep else 0]  # type: ignore[union-attr]

    @property
    def depth(self) -> int:
        return self.x.shape[0 if self.deep else 1]  # type: ignore[union-attr]


def _slots(operands: list[_Operand]) -> tuple[Index, Index]:
    """The numbers of the operand that lies in slots."""
    return next((o.x.numbers() for o in operands if isinstance(o.x, Slots)), (0, 1))


def _given(operands: list[_Operand]) -> tuple[Any, ...]:
    """Arguments for :func:`_product`: arrays, then flags for depth-first operands and for operands in slots."""
    arrays = (o.x.array if isinstance(o.x, Slots) else o.x for o in operands)
    return (*arrays, tuple(o.deep for o in operands), tuple(isinstance(o.x, Slots) for o in operands))


def _tiles(live: tuple[Index, Index, Index], t: Tiles) -> tuple[Array, Index, Index]:
    """Of rows, columns and depth; no rows without a depth, which the pipeline would wait for without end."""
    sizes = t.tokens, t.columns, TILE_K
    rows, columns, steps = ((x + (size - 1)) // size for x, size in zip(live, sizes, strict=True))
    return jnp.where(steps > 0, rows, 0), columns, steps


def _compute(m: Running, out: Ref, pieces: Ref, adds: Ref | None, behind: Index) -> None:
    """A computing warpgroup: half of the block's rows. If ``adds`` is not zero, add to existing values."""
    wg, t, width = jax.lax.axis_index("wg"), m.static.tiles, pieces.shape[-1]

    def per_tile(row: Array, column: Array, part: Array, n: Array) -> Array:
        x, n = m.product(n, part)
        if len(out.shape) == 2:
            place, rows = out, m.rows_of(row - behind)
        else:
            place, rows = out.at[row * m.walk.parts + part], pl.ds(wg * t.rows, t.rows)
        for i in range(t.columns // width):
            first = column * t.columns + i * width
            there, own = place.at[rows, pl.ds(first, width)], x[:, i * width : (i + 1) * width]
            if adds is not None:
                # Rows and columns come in whole pieces, but not in whole tiles.
                begin = row * t.tokens + wg * t.rows
                inside = jnp.logical_and(begin < place.shape[0], first < place.shape[1])
                own = _added(own, there, jnp.logical_and(adds != 0, inside))
            m.leave(pieces, own, there)
        return n

    m.walk.tiles(per_tile, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _added(x: Array, place: Any, is_there: Array) -> Array:
    """``x``, plus the values in its place if the flag is set."""

    def old() -> Array:
        return gpu_load(place, plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)

    return x + jax.lax.cond(is_there, old, lambda: jnp.zeros_like(x))


# A separate function: called for equal shapes in several places, it is lowered once.
@functools.partial(jax.jit, static_argnames=("deep", "in_slots", "adds", "wide", "shape", "t", "form", "interpret"))
def _product(
    left: Array,
    right: Array,
    deep: tuple[bool, bool],
    in_slots: tuple[bool, bool],
    live: Array,
    lists: Array | None,
    into: Array | None,
    adds: bool,
    wide: bool,
    shape: tuple[int, ...],
    t: Tiles,
    form: tuple[bool, int, int] | None,
    interpret: object,
) -> Array:
    """A result of three dimensions is in parts, tile by tile of rows: ``[row tile times parts + part, M, C]``.

    ``form``, of ``lists``: by columns or not, tiles of a group, steps of a piece.
    """
    line = Pipeline(t, left, right, *deep, interpret)
    dtype = jnp.dtype(jnp.float32) if wide else left.dtype
    pieces = pipeline.way_out(t, dtype, narrow=adds and shape[1] * dtype.itemsize % pipeline.PIECE != 0)

    def kernel(left: Any, right: Any, live: Ref, *refs: Any) -> None:
        listed, (out, pieces, *ring) = (None, refs) if form is None else (refs[0], refs[1:])
        left, right = (Slots(x, live[5], live[6]) if y else x for x, y in zip((left, right), in_slots, strict=True))
        m = line.of(left, right, TileByTile(live, t) if form is None else ByLists(live, listed, t, *form), ring)
        m.roles(lambda: _compute(m, out, pieces, live[4] if adds else None, 0 if form is None else live[7]))

    inputs, scratch = [left, right, live, *([] if lists is None else [lists])], [pieces, *line.scratch()]
    if into is None:
        return line.run(kernel, inputs, jax.ShapeDtypeStruct(shape, dtype), scratch)
    place = jax.new_ref(into)
    line.run(kernel, [*inputs, place], (), scratch)
    return jax.freeze(place)
