"""How a Mosaic GPU row kernel cuts up its work; the kernels themselves are in ``kernels.py``.

One block of ``W`` warpgroups owns a row at a time (blocks are persistent, rows are dealt round robin). The row is cut
into tiles of ``C`` columns; warpgroup ``w`` owns tiles ``w, w + W, ...``, with its own slots of shared memory and its
own copies in flight, so that warpgroups meet only once a row, to add up the statistics.

Sweep 1 carries per-lane online sums (``row_terms.Lanes``). The columns that take no part (the target, padding) are set
to ``-inf`` in shared memory in the few tiles that hold them, so the loop has no masks; only with a softcap or a scale,
which turn ``-inf`` into something else, is every element compared with its column. Sweep 2 turns a tile into dlogits in
place and copies it out of the same slot; the target's entry is written over. A slot is refilled as soon as its copy out
has been read: with the part of this row that shared memory could not hold (a second read, served by L2), then with the
next row. Per element and sweep: one conversion, one power, 6 to 8 multiply-adds or comparisons.

16-bit dlogits for float32 logits use separate slots, ``out`` slots per warpgroup in rotation: a slot is rewritten after
its previous copy has been read, and the slot of the logits is refilled immediately.

Copies are contiguous ``cp.async.bulk`` of 16-byte words; ``layout.py`` says which ones, and what happens to
rows that do not start at one. (A block that hangs over the end of a row, as ``emit_pipeline`` makes it, would be
clamped only at the end of the *array*, and write into the next row.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from logitless.core import stats as tr
from logitless.core.compat import Ref, gpu_load
from logitless.core.stats import NEG_INF, LogitTransform
from logitless.logits.mosaic_gpu.layout import Number, row_index, select
from logitless.logits.mosaic_gpu.row_terms import LOW, Coefficients, Lanes, Power

if TYPE_CHECKING:
    from logitless.logits.mosaic_gpu.kernels import Operands, Shared


class Sweep:
    """One warpgroup's view of the tiles: copies, patches, and the two loop bodies.

    Tiles are copied from the logits in global memory into slots in shared memory, with a barrier for each; dlogits
    leave from slots of their own, or from the same ones where they are made in place.
    """

    def __init__(self, o: Operands, sm: Shared, transform: LogitTransform, row: Number | None = None):
        shape, t, x = o.shape, o.tiles, o.x
        self.shape, self.t, self.x, self.buf, self.full = shape, t, x, sm.buf, sm.full
        self.out = sm.buf if sm.out is None else sm.out
        self.row = row  # the row in the slots; ``None`` where only copies are made
        self.shift: Number = 0 if row is None else shape.shift(row)
        self.first = o.first
        self.w = lax.axis_index("wg") if t.warpgroups > 1 else jnp.int32(0)
        self.count = lax.div(shape.tiles(t) - self.w + (t.warpgroups - 1), jnp.int32(t.warpgroups))
        self.transform = transform
        self.bent = transform.softcap is not None
        itemsize = jnp.dtype(x.dtype).itemsize
        self.power = Power(exact=itemsize == 4)
        self.k = tr.times(tr.factor(transform), jnp.float32(self.power.unit))
        self.layout = plgpu.Layout.WG_STRIDED((t.lanes,), vec_size=min(t.lanes // 128, 8 // min(itemsize, 4) * 2))

    # Tiles, slots and copies.

    def tile(self, j: Array) -> Array:
        return j * self.t.warpgroups + self.w

    def index(self, slot: Array) -> Array:
        return self.w * self.t.slots + slot

    def index_out(self, slot: Array) -> Array:
        return self.w * (self.t.out or self.t.slots) + slot

    def free_out(self, slot: Array, number: Array) -> Array:
        """The slot that the dlogits of the tile in ``slot``, this warpgroup's tile ``number``, may be written to."""
        if not self.t.out:
            return slot
        plgpu.wait_smem_to_gmem(self.t.out - 1, wait_read_only=True)  # for every thread of the warpgroup
        return lax.rem(number, jnp.int32(self.t.out))

    def load(self, row: Array, j: Array, slot: Array) -> None:
        """Start copying tile ``j`` of ``row`` into ``slot``, which nobody reads any more."""
        tile, i, c, last = self.tile(j), self.index(slot), self.t.columns, self.shape.last(self.t)
        shift = self.shape.shift(row)
        start = self.shape.place(row, tile * c - shift)

        def copy(width: int) -> None:
            plgpu.copy_gmem_to_smem(
                self.x.at[row_index(start, lambda at: pl.ds(at, width))],
                self.buf.at[i, pl.ds(0, width)],
                self.full.at[i],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

        lasts = [end - last for end in self.shape.loaded_ends()]
        width = jnp.where(tile * c == last, self.shape.loaded_end(row, shift) - last, c)
        select(width, sorted({*lasts, *([c] if last else [])}, reverse=True), copy)

    def store(self, out: Ref, row: Array, j: Array, slot: Array) -> None:
        """Start copying a slot of dlogits to tile ``j`` of ``out[row]``; one bulk copy, and the entries in shared
        words."""
        tile, i, c, last = self.tile(j), self.index_out(slot), self.t.columns, self.shape.last(self.t)
        shift, unit = self.shape.shift(row), self.shape.unit
        row = row if self.first is None else row + self.first

        def copy(begin: int, end: int) -> None:
            at = self.shape.place(row, tile * c + begin - shift)
            plgpu.copy_smem_to_gmem(
                self.out.at[i, pl.ds(begin, end - begin)], out.at[row_index(at, lambda at: pl.ds(at, end - begin))]
            )

        lasts = [end - last for end in self.shape.stored_ends()]
        heads = [0, unit] if self.shape.ragged else [0]
        runs = {(0, end) for end in lasts} | {(0, c)} | {(head, c) for head in heads}
        if not last:
            runs = {(head, end) for head in heads for end in lasts}
        by_key = {begin + 2 * end: (begin, end) for begin, end in runs}
        assert len(by_key) == len(runs)
        is_first, is_last = tile == 0, tile * c == last
        stored_end = self.shape.stored_end(shift)
        key = 2 * jnp.where(is_last, stored_end - last, c)
        if self.shape.ragged:
            key = key + jnp.where(jnp.logical_and(is_first, shift > 0), unit, 0)
        select(key, sorted(by_key, key=lambda k: by_key[k] != (0, c)), lambda k: copy(*by_key[k]))
        if not self.shape.ragged:
            return

        def one_by_one(begin: Number, end: Number, first: int) -> None:
            def entry(p: Array, _: None) -> None:
                out[self.shape.place(row, p - shift)] = self.out[i, p - first]

            lax.fori_loop(begin, end, entry, None)

        pl.when(jnp.logical_and(is_first, shift > 0))(lambda: one_by_one(shift, jnp.int32(unit), 0))
        pl.when(is_last)(lambda: one_by_one(stored_end, shift + self.shape.width, last))

    def wait(self, j: Array, slot: Array) -> None:
        """Wait for tile ``j`` of this row, and fetch what the array's end keeps from bulk copies."""
        plgpu.barrier_wait(self.full.at[self.index(slot)])
        if not self.shape.remainder:
            return
        row, first = self.shape.rows - 1, self.shape.last(self.t)
        shift = row * self.shape.width % self.shape.unit
        end = shift + self.shape.width

        @pl.when(jnp.logical_and(self.row == row, self.tile(j) * self.t.columns == first))
        def _() -> None:
            for p in range(end - self.shape.remainder, end):
                self.buf[self.index(slot), p - first] = self.x[self.shape.place(row, p - shift)]
            plgpu.commit_smem()

    def piece(self, slot: Array, s: int) -> Array:
        return gpu_load(self.buf.at[self.index(slot), pl.ds(s * self.t.lanes, self.t.lanes)], self.layout)

    def pieces(self) -> range:
        return range(self.t.columns // self.t.lanes)

    # Patches, in shared memory, of the few tiles that are not like the others.

    def columns(self, j: Array, s: int) -> Array:
        """Column numbers of piece ``s`` of tile ``j``; negative ones belong to the row before."""
        iota = plgpu.broadcasted_iota(jnp.int32, (self.t.lanes,), 0, layout=self.layout)
        return iota + (self.tile(j) * self.t.columns + s * self.t.lanes - self.shift)

    def counts(self, column: Array) -> Array:
        """Whether a column belongs to the vocabulary."""
        below = column < self.shape.vocab
        return jnp.logical_and(column >= 0, below) if self.shape.ragged else below

    def hide_padding(self, j: Array, slot: Array) -> None:
        """``-inf`` in the places that hold no column of the vocabulary."""
        full = self.shape.vocab % self.t.columns == 0 and self.shape.vocab == self.shape.width
        if (full and not self.shape.ragged) or self.bent:
            return
        holds = (self.tile(j) + 1) * self.t.columns > self.shape.vocab + self.shift
        if self.shape.ragged:
            holds = jnp.logical_or(holds, jnp.logical_and(self.tile(j) == 0, self.shift > 0))

        @pl.when(holds)
        def _() -> None:
            for s in self.pieces():
                x = self.piece(slot, s)
                hidden = jnp.where(self.counts(self.columns(j, s)), x, jnp.full_like(x, NEG_INF))
                self.buf[self.index(slot), pl.ds(s * self.t.lanes, self.t.lanes)] = hidden
            plgpu.commit_smem()

    def hide_target(self, j: Array, slot: Array, column: Array) -> None:
        """``-inf`` in the target's column."""
        if not self.bent:
            self._put(self.buf, self.index(slot), j, column, jnp.float32(NEG_INF))

    def put(self, j: Array, slot: Array, column: Array, value: Array) -> None:
        """Write a column of the row's dlogits, if the column lies in this tile."""
        self._put(self.out, self.index_out(slot), j, column, value)

    def _put(self, buf: Ref, i: Array, j: Array, column: Array, value: Array) -> None:
        inside = column - (self.tile(j) * self.t.columns - self.shift)

        @pl.when(jnp.logical_and(inside >= 0, inside < self.t.columns))
        def _() -> None:
            plgpu.commit_smem()  # other threads may still write their own elements
            buf[i, inside] = value.astype(buf.dtype)
            plgpu.commit_smem()

    # Loop bodies.

    def swept(self, x: Array, j: Array, s: int, target: Array) -> Array:
        """The quantity whose maximum and sums are carried."""
        u = tr.swept(x, self.transform)
        if not self.bent:
            return u
        column = self.columns(j, s)
        return jnp.where(jnp.logical_and(self.counts(column), column != target), u, NEG_INF)

    def accumulate(self, j: Array, slot: Array, sums: Lanes, target: Array) -> Lanes:
        """Sweep 1 over a tile."""
        m = sums.m
        for s in self.pieces():
            m = jnp.maximum(m, self.swept(self.piece(slot, s), j, s, target))
        k = self.k
        sums = sums.moved(m, k, self.power)
        total, centred, squares = sums.total, sums.centred, sums.squares
        for s in self.pieces():
            t = jnp.maximum((self.swept(self.piece(slot, s), j, s, target) - m) * k, LOW)
            e = self.power(t)
            total, centred, squares = total + e, centred + e * t, squares + e * e
        return Lanes(m, total, centred, squares)

    def emit(self, j: Array, slot: Array, c: Coefficients, to: Array) -> None:
        """Sweep 2: the tile of logits in ``slot`` becomes a tile of dlogits in the slot ``to`` of those, rounded
        once."""
        for s in self.pieces():
            x = self.piece(slot, s)
            t = jnp.maximum((self.swept(x, j, s, jnp.int32(-1)) - c.centre) * self.k + c.offset, LOW)
            # Float32 keeps log p + entropy together, as stats.dz does: apart, they cancel.
            d = self.power(t) * (c.first - c.second * (t + c.shift if self.power.exact else t))
            if self.bent:
                d = tr.pull_back(d, x, self.transform)
            self.out[self.index_out(to), pl.ds(s * self.t.lanes, self.t.lanes)] = d.astype(self.out.dtype)

    def clear(self, slot: Array) -> None:
        """A tile of zeros for dlogits."""
        zero = jnp.zeros((self.t.lanes,), self.out.dtype)
        for s in self.pieces():
            self.out[self.index_out(slot), pl.ds(s * self.t.lanes, self.t.lanes)] = zero


def next_row(row: Array, live: Ref | None, rows: int, blocks: int) -> Array:
    """The block's next live row (``>= rows``: none left)."""
    if live is None:
        return row + blocks

    def dead(c: tuple[Array, Array]) -> Array:
        return c[1] == 0

    def step(c: tuple[Array, Array]) -> tuple[Array, Array]:
        r = c[0] + blocks
        inside = r < rows
        flag = live[jnp.where(inside, r, 0)]
        return r, jnp.where(inside, flag, 1)

    return lax.while_loop(dead, step, (row, jnp.int32(0)))[0]


def clear_dead_rows(sweep: Sweep, out: Ref | None, stats_out: Sequence[Ref], live: Ref | None, rows: int) -> None:
    """Zeros in the rows that were not swept. Everything this warpgroup copied before must have been read."""
    if live is None:
        return
    t = sweep.t
    if out is not None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        sweep.clear(jnp.int32(0))
        plgpu.commit_smem()

    def row(r: Array) -> Array:
        @pl.when(live[r] == 0)
        def _() -> None:
            for o in stats_out:
                o[r] = jnp.float32(0.0)
            if out is not None:

                def store(j: Array, carry: None) -> None:
                    sweep.store(out, r, j, jnp.int32(0))

                lax.fori_loop(0, sweep.count, store, None)

        return r + t.blocks

    lax.while_loop(lambda r: r < rows, row, lax.axis_index("block"))
