"""The three Mosaic GPU row kernels: statistics, dlogits, and both from one read of the logits.

``row_sweep.py`` says how a row is cut up. HBM bytes: ``statistics`` reads the logits once; ``gradient`` reads
them once and writes dlogits once; ``both`` does the same, and reads the part of a row that does not fit
into shared memory a second time, from L2. dlogits have the dtype of the logits and may be written over them, or, of
float32 logits, 2 bytes each in an array of their own: 6 bytes an element instead of 8, and no pass that converts them
(6 more). No matmuls.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from logitless.core import stats as st
from logitless.core.compat import Ref, gpu_load
from logitless.core.stats import STAT_FIELDS, LogitTransform, StatCotangents, TokenStats, swept
from logitless.logits.mosaic_gpu import scalars as scalar
from logitless.logits.mosaic_gpu.layout import Shape, Tiles
from logitless.logits.mosaic_gpu.row_sweep import (
    Coefficients,
    Lanes,
    Sweep,
    clear_dead_rows,
    coefficients,
    next_row,
    row_sums,
)

_NOWHERE = -64  # a column left of every place of a row's first tile


@dataclasses.dataclass(frozen=True)
class Target:
    """A row's target."""

    label: Array  # as given; may lie outside the vocabulary
    hide: Array  # target column; left of every tile if there is none
    x: Array  # its raw logit


@dataclasses.dataclass(frozen=True)
class Operands:
    """Global-memory references of a kernel, and their tiling.

    ``[N]`` or, for numbers, ``[1]`` arrays; ``live`` is int32.
    """

    shape: Shape
    tiles: Tiles
    x: Ref
    targets: Ref
    live: Ref | None
    transform: LogitTransform
    out: Any  # or None
    first: Array | None  # row offset into ``out``, or None for 0
    stats: tuple[Ref, ...]  # written by the kernel, or read by ``gradient``, in the order of STAT_FIELDS
    given: tuple[Ref, ...]  # whatever else it reads

    def transform_at(self, row: Array) -> LogitTransform:
        return jax.tree.map(lambda ref: ref[row if ref.shape[0] > 1 else 0], self.transform)

    def label_at(self, row: Array) -> Array:
        """The row's target as given; behind the last row, the last row's target."""
        return self.targets[jnp.minimum(row, self.shape.rows - 1)]

    def target_at(self, row: Array, label: Array) -> Target:
        """The target ``label`` of a row; one outside the vocabulary hides nothing."""
        valid = jnp.logical_and(label >= 0, label < self.shape.vocab)
        hide, read = jnp.where(valid, label, _NOWHERE), jnp.where(valid, label, 0)
        return Target(label, hide, self.x[self.shape.place(row, read)])

    def next_row(self, row: Array) -> Array:
        """The block's next live row."""
        return next_row(row, self.live, self.shape.rows, self.tiles.blocks)

    def first_row(self) -> Array:
        """The block's first live row."""
        return self.next_row(lax.axis_index("block") - self.tiles.blocks)


@dataclasses.dataclass(frozen=True)
class Shared:
    """Shared memory: tiles, other warpgroups' sums, a row's coefficients; the barriers of each; and tiles of dlogits
    where these are not made in place."""

    buf: Ref
    lanes: Ref
    row: Ref
    full: Any  # barriers
    gathered: Any
    ready: Any
    out: Ref | None = None


def scratch(t: Tiles, dtype: DTypeLike, sums: bool, out: Any) -> list[Any]:
    """Allocations behind :class:`Shared`, in its order; ``out`` is the dtype of dlogits with slots of their own."""
    others = max(t.warpgroups - 1, 1)
    lanes = t.lanes if sums else 128
    return [
        plgpu.SMEM((t.warpgroups * t.slots, t.columns), dtype),
        plgpu.SMEM((others, 4, lanes), jnp.float32),
        plgpu.SMEM((8,), jnp.float32),
        plgpu.Barrier(num_barriers=t.warpgroups * t.slots),
        plgpu.Barrier(num_arrivals=others),
        plgpu.Barrier(),
        *([plgpu.SMEM((t.warpgroups * t.out, t.columns), out)] if t.out else []),
    ]


def _rows(o: Operands, body: Callable[[Array, Array, Array, Array], None]) -> None:
    """``body(row, label, next row, rows so far)`` for this block's live rows; the next label is fetched early."""
    first = o.first_row()

    def step(c: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        row, label, n = c
        after = o.next_row(row)
        label_after = o.label_at(after)
        body(row, label, after, n)
        return after, label_after, n + 1

    lax.while_loop(lambda c: c[0] < o.shape.rows, step, (first, o.label_at(first), jnp.int32(0)))


def _loop(count: Array, body: Callable[[Array], None]) -> None:
    def step(j: Array, carry: None) -> None:
        body(j)

    lax.fori_loop(jnp.int32(0), count, step, None)


def _ring(shape: Shape, t: Tiles) -> tuple[Array, int]:
    """``(slots, lag)`` of a ring that runs on across rows: no more slots than any warpgroup has tiles."""
    slots = max(min(t.slots, shape.tiles(t) // t.warpgroups), 1)
    return jnp.int32(slots), 0 if t.out else min(t.lag, slots - 1)


def _finish_row(
    o: Operands,
    sm: Shared,
    sweep: Sweep,
    sums: Lanes,
    target: Target,
    cotangents: Callable[[TokenStats], StatCotangents] | None = None,
) -> None:
    """Warpgroup 0 adds everybody's lanes up, writes the statistics and puts the row's coefficients into ``sm.row``."""
    wgs = sweep.t.warpgroups

    def lead() -> None:
        parts = [sums]
        if wgs > 1:
            plgpu.barrier_wait(sm.gathered)
            for i in range(wgs - 1):
                parts.append(Lanes(*(gpu_load(sm.lanes.at[i, q], sweep.layout) for q in range(4))))
        u_y = scalar.run(swept, target.x, sweep.transform)
        whole = row_sums(parts, sweep.k, sweep.power, u_y, [sm.lanes.at[0, q] for q in range(4)])
        valid = jnp.logical_and(target.label >= 0, target.label < sweep.shape.vocab)
        stats = scalar.run(st.finish, whole, valid, sweep.transform)
        for ref, name in zip(o.stats, STAT_FIELDS, strict=True):
            value = getattr(stats, name)
            ref[sweep.row] = jnp.where(value, 1.0, 0.0) if value.dtype == jnp.bool_ else value
        if cotangents is not None:
            c = coefficients(sweep, stats, cotangents(stats), target.x)
            for q, value in enumerate(c.leaves()):
                sm.row[q] = value
        if wgs > 1:
            plgpu.commit_smem()
            plgpu.barrier_arrive(sm.ready)

    def follow() -> None:
        for q, v in enumerate(sums.leaves()):
            sm.lanes[sweep.w - 1, q] = v
        plgpu.commit_smem()
        plgpu.barrier_arrive(sm.gathered)
        plgpu.barrier_wait(sm.ready)

    if wgs > 1:
        lax.cond(sweep.w == 0, lead, follow)
    else:
        lead()
        plgpu.commit_smem()


def _meet(sm: Shared, sweep: Sweep) -> None:
    """Warpgroups leave the kernel together: nobody's barriers go away while another still waits on its own."""

    def lead() -> None:
        plgpu.barrier_wait(sm.gathered)
        plgpu.barrier_arrive(sm.ready)

    def follow() -> None:
        plgpu.barrier_arrive(sm.gathered)
        plgpu.barrier_wait(sm.ready)

    if sweep.t.warpgroups > 1:
        lax.cond(sweep.w == 0, lead, follow)


def _refill_behind(t: Tiles, lag: int, q: Array, refill: Callable[[Array], None]) -> None:
    """Refill the slot of the tile ``lag`` tiles before ``q`` once its copy out has been read; at once where dlogits
    have slots of their own."""
    if not t.out:
        plgpu.wait_smem_to_gmem(lag, wait_read_only=True)
    pl.when(q >= lag)(lambda: refill(q - lag))


def _drain(lag: int, last: Array, refill: Callable[[Array], None]) -> None:
    """Refill the slots of the last ``lag`` copies out."""
    for i in range(lag):
        plgpu.wait_smem_to_gmem(lag - 1 - i, wait_read_only=True)
        q = last - lag + i
        pl.when(q >= 0)(functools.partial(refill, q))


def _load_further(sweep: Sweep, row: Array, after: Array, tile: Array, slot: Array) -> None:
    """Start copying a ``tile`` of ``row`` into ``slot``; behind the row's last tile, one of the row ``after``."""
    inside = tile < sweep.count
    pl.when(inside)(lambda: sweep.load(row, tile, slot))
    another = jnp.logical_and(jnp.logical_not(inside), after < sweep.shape.rows)
    pl.when(another)(lambda: sweep.load(after, tile - sweep.count, slot))


def statistics(o: Operands, sm: Shared) -> None:
    """One sweep over a plain ring of slots that runs on across rows."""
    shape, t = o.shape, o.tiles
    copies = Sweep(o, sm, LogitTransform())
    slots, _ = _ring(shape, t)
    start = o.first_row()
    pl.when(start < shape.rows)(lambda: _loop(slots, lambda j: copies.load(start, j, j)))

    def row(r: Array, label: Array, after: Array, n: Array) -> None:
        sweep = Sweep(o, sm, o.transform_at(r), r)
        target = o.target_at(r, label)
        base = n * sweep.count

        def tile(j: Array, leaves: tuple[Array, ...]) -> tuple[Array, ...]:
            slot = lax.rem(base + j, slots)
            sweep.wait(j, slot)
            sweep.hide_padding(j, slot)
            sweep.hide_target(j, slot, target.hide)
            sums = sweep.accumulate(j, slot, Lanes(*leaves), target.hide)
            plgpu.commit_smem()  # everybody has read the slot
            _load_further(sweep, r, after, j + slots, slot)
            return sums.leaves()

        sums = lax.fori_loop(jnp.int32(0), sweep.count, tile, Lanes.empty(t.lanes, sweep.layout).leaves())
        _finish_row(o, sm, sweep, Lanes(*sums), target)

    _rows(o, row)
    pl.when(copies.w == 0)(lambda: clear_dead_rows(copies, None, o.stats, o.live, shape.rows))


def gradient(o: Operands, sm: Shared) -> None:
    """dlogits from statistics and cotangents (``o.given``: those of logp, entropy and lse, each ``[N]``)."""
    shape, t = o.shape, o.tiles
    copies = Sweep(o, sm, LogitTransform())
    slots, lag = _ring(shape, t)
    start = o.first_row()
    pl.when(start < shape.rows)(lambda: _loop(slots, lambda j: copies.load(start, j, j)))

    def row(r: Array, label: Array, after: Array, n: Array) -> None:
        sweep = Sweep(o, sm, o.transform_at(r), r)
        target = o.target_at(r, label)
        s = TokenStats(*(ref[r] for ref in o.stats))
        g = StatCotangents(*(ref[r] for ref in o.given))
        c = coefficients(sweep, s, g, target.x)
        base = n * sweep.count

        def refill(j: Array) -> None:
            slot = lax.rem(base + j, slots)
            _load_further(sweep, r, after, j + slots, slot)

        def tile(j: Array) -> None:
            slot = lax.rem(base + j, slots)
            sweep.wait(j, slot)
            sweep.hide_padding(j, slot)
            to = sweep.free_out(slot, base + j)
            sweep.emit(j, slot, c, to)
            sweep.put(j, to, target.hide, c.at_target)
            plgpu.commit_smem()
            sweep.store(o.out, r, j, to)
            _refill_behind(t, lag, j, refill)

        _loop(sweep.count, tile)
        _drain(lag, sweep.count, refill)

    _rows(o, row)
    plgpu.wait_smem_to_gmem(0)
    clear_dead_rows(copies, o.out, (), o.live, shape.rows)
    plgpu.wait_smem_to_gmem(0)
    _meet(sm, copies)


@dataclasses.dataclass(frozen=True)
class _Slots:
    """Slots of :func:`both`: ``held`` of them keep a tile from sweep 1 to sweep 2, ``ring`` are reused within sweep 1
    and hold the last tiles at its end."""

    held: int
    ring: int
    lag: int  # tiles on their way out when a slot is refilled

    @staticmethod
    def of(shape: Shape, t: Tiles) -> _Slots:
        most = -(-shape.tiles(t) // t.warpgroups)
        held, ring = (most, 0) if most <= t.slots else (t.slots - t.ring, t.ring)
        return _Slots(held, ring, 0 if t.out else max(min(t.lag, (ring or most) - 1), 0))

    def at(self, j: Array) -> Array:
        """The slot of a warpgroup's tile ``j``."""
        held, ring = self.held, self.ring
        return j if ring == 0 else jnp.where(j < held, j, held + lax.rem(jnp.maximum(j - held, 0), jnp.int32(ring)))

    def streamed(self, sweep: Sweep) -> Array:
        """Tiles that are streamed again in sweep 2."""
        return jnp.maximum(sweep.count - self.held, 0)


def both(o: Operands, sm: Shared, count: int, run: Callable[..., tuple[Array, Array]]) -> None:
    """Statistics, the objective's cotangents, and dlogits (``o.given``: ``count`` numbers, then columns ``[N]``)."""
    shape, t = o.shape, o.tiles
    copies = Sweep(o, sm, LogitTransform())
    slots = _Slots.of(shape, t)
    start = o.first_row()
    at_once = jnp.minimum(copies.count, t.slots)
    pl.when(start < shape.rows)(lambda: _loop(at_once, lambda j: copies.load(start, j, j)))
    numbers = [ref[0] for ref in o.given[:count]]

    def row(r: Array, label: Array, after: Array, n: Array) -> None:
        sweep = Sweep(o, sm, o.transform_at(r), r)
        target = o.target_at(r, label)
        own = [ref[r] for ref in o.given[count:]]
        streamed = slots.streamed(sweep)
        sums = _first_sweep(sweep, slots, r, target)

        def cotangents(s: TokenStats) -> StatCotangents:
            g_logp, g_entropy = scalar.run(run, numbers, own, s.logp, s.entropy)
            return StatCotangents(g_logp, g_entropy, jnp.float32(0.0))

        _finish_row(o, sm, sweep, sums, target, cotangents)
        c = Coefficients(*(sm.row[q] for q in range(len(Coefficients.__dataclass_fields__))))
        _second_sweep(o, sweep, slots, _Turn(r, after, n, streamed), target, c)

    _rows(o, row)
    plgpu.wait_smem_to_gmem(0)
    clear_dead_rows(copies, o.out, (), o.live, shape.rows)
    pl.when(copies.w == 0)(lambda: clear_dead_rows(copies, None, o.stats, o.live, shape.rows))
    plgpu.wait_smem_to_gmem(0)
    _meet(sm, copies)


def _first_sweep(sweep: Sweep, slots: _Slots, r: Array, target: Target) -> Lanes:
    """The row's sums."""

    def tile(j: Array, leaves: tuple[Array, ...]) -> tuple[Array, ...]:
        slot = slots.at(j)
        sweep.wait(j, slot)
        sweep.hide_padding(j, slot)
        sweep.hide_target(j, slot, target.hide)
        sums = sweep.accumulate(j, slot, Lanes(*leaves), target.hide)
        if slots.ring:

            @pl.when(jnp.logical_and(j >= slots.held, j + slots.ring < sweep.count))
            def _() -> None:
                plgpu.commit_smem()  # everybody has read the slot
                sweep.load(r, j + slots.ring, slot)

        return sums.leaves()

    empty = Lanes.empty(sweep.t.lanes, sweep.layout).leaves()
    return Lanes(*lax.fori_loop(jnp.int32(0), sweep.count, tile, empty))


@dataclasses.dataclass(frozen=True)
class _Turn:
    """A block's turn at a row."""

    row: Array
    after: Array  # its next row
    number: Array  # rows before
    streamed: Array  # tiles that are streamed again in sweep 2


def _second_sweep(o: Operands, sweep: Sweep, slots: _Slots, turn: _Turn, target: Target, c: Coefficients) -> None:
    """dlogits, backwards through the streamed tiles, so that the second reads follow their first reads closely, then
    through the held tiles."""
    ring, streamed = slots.ring, turn.streamed

    def order(q: Array) -> Array:
        return jnp.where(q < streamed, sweep.count - 1 - q, q - streamed)

    def refill(q: Array) -> None:
        j = order(q)
        slot = slots.at(j)
        again = q < streamed - ring
        pl.when(again)(lambda: sweep.load(turn.row, j - ring, slot))
        another = jnp.logical_and(jnp.logical_not(again), turn.after < o.shape.rows)
        pl.when(another)(lambda: sweep.load(turn.after, slot, slot))

    def tile(q: Array) -> None:
        j = order(q)
        slot = slots.at(j)
        if ring:

            @pl.when(jnp.logical_and(q >= ring, q < streamed))
            def _() -> None:
                sweep.wait(j, slot)
                sweep.hide_padding(j, slot)

        to = sweep.free_out(slot, turn.number * sweep.count + q)
        lax.cond(c.nonzero != 0, lambda: sweep.emit(j, slot, c, to), lambda: sweep.clear(to))
        sweep.put(j, to, target.hide, c.at_target)
        plgpu.commit_smem()
        sweep.store(o.out, turn.row, j, to)
        _refill_behind(o.tiles, slots.lag, q, refill)

    _loop(sweep.count, tile)
    _drain(slots.lag, sweep.count, refill)
