"""How a Mosaic GPU row kernel works on a row: its tiles, its sums, and the two sweeps over it. The kernels themselves
are in ``kernels.py``.

One block of ``W`` warpgroups owns a row at a time (blocks are persistent, rows are dealt round robin). The row is cut
into tiles of ``C`` columns; warpgroup ``w`` owns tiles ``w, w + W, ...``, with its own slots of shared memory and its
own copies in flight, so that warpgroups meet only once a row, to add up the statistics.

Sweep 1 carries per-lane online sums (:class:`Lanes`). The columns that take no part (the target, padding) are set
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

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from logitless.core import stats as st
from logitless.core.compat import Ref, gpu_load
from logitless.core.stats import NEG_INF, LogitTransform, RowSums, StatCotangents, TokenStats
from logitless.logits.mosaic_gpu import scalars as scalar
from logitless.logits.mosaic_gpu.layout import Number, row_index, select

if TYPE_CHECKING:
    from logitless.logits.mosaic_gpu.kernels import Operands, Shared

LOW = -1e30  # stands for -inf in the carries: differences stay finite


# -- sums of a row, and what sweep 2 needs of it -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Power:
    """How a sweep exponentiates.

    For 16-bit logits ``2^t`` with ``t`` in units of ln 2: a single instruction, with a relative error of 2^-22, far
    below the 2^-9 of the following rounding. Float32 dlogits keep all their digits: ``e^t``, the accurate library
    function.
    """

    exact: bool

    @property
    def unit(self) -> float:
        return 1.0 if self.exact else scalar.LOG2E

    def __call__(self, t: Array) -> Array:
        return jnp.exp(t) if self.exact else jnp.exp2(t)


@dataclasses.dataclass(frozen=True)
class Lanes:
    """Per-lane sums, ``[lanes]`` float32: maximum ``m``, and sums of ``e``, ``e t``, ``e^2`` with ``t = k (u - m)``.

    ``u`` and ``k`` are those of ``logitless.core.stats``, ``k`` times the :class:`Power`'s unit: ``e = exp(t /
    unit)``.
    """

    m: Array
    total: Array
    centred: Array
    squares: Array

    @staticmethod
    def empty(n: int, layout: Any) -> Lanes:
        """The sums of no columns, in the layout that a loop carries."""

        def of(value: float) -> Array:
            return plgpu.layout_cast(jnp.full((n,), value, jnp.float32), layout)

        return Lanes(of(LOW), of(0.0), of(0.0), of(0.0))

    def leaves(self) -> tuple[Array, ...]:
        return (self.m, self.total, self.centred, self.squares)

    def moved(self, m: Array, k: Array, power: Power) -> Lanes:
        """The same sums relative to a larger maximum."""
        step = (self.m - m) * k
        a = power(step)
        return Lanes(m, a * self.total, a * (self.centred + step * self.total), a * a * self.squares)


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """``t = k (u - centre) + offset`` is log p in the power's unit, and ``d = p (first - second (t + shift))`` but at
    the target. The shift (the entropy) is folded into ``first`` for 16-bit logits."""

    centre: Array
    offset: Array
    first: Array
    second: Array
    shift: Array
    at_target: Array
    nonzero: Array  # float: 0 where the whole row of dlogits is exactly zero

    def leaves(self) -> tuple[Array, ...]:
        return tuple(getattr(self, f.name) for f in dataclasses.fields(self))


_EVERY_WARP = plgpu.Layout.TILED(
    plgpu.Tiling(((128,), (4,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
)
"""Lanes of a row, complete in every warp: a sum needs no other warp."""


def _in_every_warp(arrays: Sequence[Array], places: Sequence[Any]) -> list[Array]:
    """The ``arrays [lanes]`` with all lanes in every warp, by way of ``places [lanes]`` in shared memory."""
    for x, place in zip(arrays, places, strict=True):
        place[...] = x
    plgpu.commit_smem()
    return [gpu_load(place, _EVERY_WARP) for place in places]


def row_sums(parts: Sequence[Lanes], k: Array, power: Power, u_y: Array, places: Sequence[Any]) -> RowSums:
    """``stats.RowSums`` of a row from all its lanes; ``places`` are four ``[lanes]`` of shared memory to work in."""
    m = parts[0].m
    for p in parts[1:]:
        m = jnp.maximum(m, p.m)
    (every,) = _in_every_warp([m], places[:1])
    top = jnp.max(every)
    moved = [p.moved(top, k, power) for p in parts]
    total, centred, squares = moved[0].total, moved[0].centred, moved[0].squares
    for p in moved[1:]:
        total, centred, squares = total + p.total, centred + p.centred, squares + p.squares
    total, centred, squares = map(jnp.sum, _in_every_warp([total, centred, squares], places[1:]))
    seen = top > LOW
    return RowSums(
        maximum=jnp.where(seen, top, NEG_INF),
        total=jnp.where(seen, total, 0.0),
        centred=jnp.where(seen, centred * (1.0 / power.unit), 0.0),
        squares=jnp.where(seen, squares, 0.0),
        target=u_y,
    )


# -- the sweep ---------------------------------------------------------------------------------------------------------


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
        self.k = st.times(st.factor(transform), jnp.float32(self.power.unit))
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
        u = st.swept(x, self.transform)
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
                d = st.pull_back(d, x, self.transform)
            self.out[self.index_out(to), pl.ds(s * self.t.lanes, self.t.lanes)] = d.astype(self.out.dtype)

    def clear(self, slot: Array) -> None:
        """A tile of zeros for dlogits."""
        zero = jnp.zeros((self.t.lanes,), self.out.dtype)
        for s in self.pieces():
            self.out[self.index_out(slot), pl.ds(s * self.t.lanes, self.t.lanes)] = zero


def coefficients(sweep: Sweep, s: TokenStats, g: StatCotangents, x_y: Array) -> Coefficients:
    """What sweep 2 needs of a row (``stats.dz`` with the per-row part taken out of the loop); ``x_y`` is the target's
    raw logit."""
    transform, power = sweep.transform, sweep.power

    def at_target(x_y: Array, s: TokenStats, g: StatCotangents, transform: LogitTransform) -> Array:
        d = st.dz(s.peak, jnp.bool_(True), s, g)
        return st.pull_back(d, x_y, transform)

    first, second = g.lse - g.logp, g.entropy * (1.0 / power.unit)
    if not power.exact:
        first = first - g.entropy * s.entropy
    if not sweep.bent:  # the slope is the same in every column
        k = st.factor(transform)
        first, second = st.times(k, first), st.times(k, second)
    nonzero = jnp.where(g.logp != 0, 1.0, jnp.where(g.entropy != 0, 1.0, jnp.where(g.lse != 0, 1.0, 0.0)))
    own = scalar.run(at_target, x_y, s, g, transform)
    return Coefficients(s.peak, s.max_logp * power.unit, first, second, s.entropy * power.unit, own, nonzero)


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
