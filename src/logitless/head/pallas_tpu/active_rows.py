"""Rows of dW for active columns: computed before the sweep of the hard rows, which stores them.

A sparse backward has the rows of the active columns from its slabs (``sparse_backward.py``). XLA's scatter would stream
all of dW once more to put them in place; the sweep of the hard rows (``hard_rows.py``) writes every tile of it in any
case. A tile therefore starts from its ready rows instead of zeros, and adds nothing to them:

    one_hot rows            one_hot[v, s] = (slot s holds column v): a matmul of 2 vocab PART H FLOP a tile, and exact

Slots follow the order of their columns, so a tile's rows are adjacent: they are copied ``PART`` at a time, while the
previous tile is computed.

Storage: the end of an array with dW's shape and dtype, which dW overwrites. Slot ``s`` of ``S`` holds row ``V - S + s``
of the array, and the active columns fill the last slots. A waiting row never precedes its final
row: for the c-th of K columns at v, ``v <= V - K + c``. A tile is read before it is written, and whatever is written
before that lies in front of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from logitless.core import compat
from logitless.core.compat import Index, Ref
from logitless.core.pytree import register
from logitless.head.pallas_tpu.operands import dot
from logitless.head.pallas_tpu.tiles import LANES, Part, fill_rows, over_parts, tiles_of_live

PART = 256
"""Slots at a time: as deep as a matrix unit."""

TURNS = 4
"""How much shorter the turns of a loop over parts of a tile are than those of the exact sweeps (``tiles.WORK``): a tile
of few tokens has less to do."""

_ALIGNED = 16
"""Rows of a bfloat16 array from one place where a copy may begin to the next."""


@register
@dataclasses.dataclass(frozen=True)
class Ready:
    """Rows of dW."""

    rows: Array  # [V or slots, H], in the dtype of dW; slot s is row `size - slots + s`
    index: Array  # [slots] int32: their columns, ascending at the end; beyond the vocabulary in unused slots
    count: Array  # () int32: number of used slots, counted from the end


def room_for(vocab: int, slots: int) -> int:
    """Rows of the array that ``slots`` rows of dW are collected in: dW's own, if copies may begin at their places."""
    return vocab if vocab % _ALIGNED == 0 else slots


def blank_rows(rows: int, width: int, dtype: DTypeLike, interpret: object) -> Array:
    """``[rows, width]`` in HBM that nobody has written to; NaN in the interpreter: an uninitialised read is visible."""
    if interpret:
        return jnp.full((rows, width), jnp.nan, dtype)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    shape = compat.hbm_output((rows, width), dtype, interpret)
    return pl.pallas_call(lambda out: None, out_specs=anywhere, out_shape=shape, name="head_blank")()


def parts_of(slots: int) -> int:
    """Slots that are copied at a time."""
    return PART if slots % PART == 0 else LANES


def schedule(ready: Ready, n_live: Array, tiles: int, tile: int) -> Array:
    """``[how many tokens count, the first slot of every tile of the vocabulary, and the last one's end]``."""
    slots = ready.index.size
    below, part = jnp.arange(1, tiles, dtype=jnp.int32) * tile, parts_of(slots)

    def count(k: Array, before: Array) -> Array:
        own = lax.dynamic_slice_in_dim(ready.index, k * part, part)
        used = k * part + jnp.arange(part) >= slots - ready.count
        return before + jnp.sum((own[None, :] < below[:, None]) & used[None, :], axis=1, dtype=jnp.int32)

    begin = (slots - ready.count) // part
    before = lax.fori_loop(begin, slots // part, count, jnp.zeros(below.shape, jnp.int32))
    first = (slots - ready.count).astype(jnp.int32)
    ends = jnp.full((1,), slots, jnp.int32)
    return jnp.concatenate([n_live, first[None], first + before, ends])


def slots_by_part(ready: Ready) -> Array:
    """``[parts, 1, slots of a part]``."""
    part = parts_of(ready.index.size)
    return ready.index.reshape(-1, 1, part)


def scratch(vocab: int, slots: Array, width: int, dtype: DTypeLike) -> list[Any]:
    """Two buffers of rows on their way in, their semaphores, and which columns of the tile are ready."""
    return [
        pltpu.VMEM((2, slots.shape[2], width), dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.VMEM((vocab, 1), jnp.float32),
    ]


@dataclasses.dataclass(frozen=True)
class Placing:
    """The ready rows of the tile at hand, inside a kernel; its grid is (vocabulary tile, token tile)."""

    vocab: int  # columns of a tile
    n_live: Ref  # what :func:`schedule` gave
    rows: Ref  # in HBM
    slots: Ref  # in VMEM
    buffer: Ref
    arrived: Ref
    is_ready: Ref  # [vocab, 1]

    def _span(self) -> tuple[Array, Array, Array]:
        """``(the first part that the tile has rows in, its first slot, its end)``."""
        j = pl.program_id(0)
        return self._first_part(j), self.n_live[1 + j], self.n_live[2 + j]

    def _first_part(self, tile: Index) -> Array:
        parts, _, part = self.slots.shape
        return jnp.minimum(self.n_live[1 + tile] // part, parts - 1)

    def _copy(self, k: Index, to: Index) -> Any:
        parts, _, part = self.slots.shape
        at = pl.multiple_of(self.rows.shape[0] - parts * part + k * part, _ALIGNED)
        return pltpu.make_async_copy(self.rows.at[pl.ds(at, part)], self.buffer.at[to], self.arrived.at[to])

    def _one_hot(self, k: Index, own: Part) -> Array:
        """``[columns of the part, slots of a part]`` bool."""
        part, (_, first, end) = self.slots.shape[2], self._span()
        slot = k * part + lax.broadcasted_iota(jnp.int32, (1, part), 1)
        column = jnp.where((slot >= first) & (slot < end), self.slots[k], -1)  # slots of other tiles match nothing
        own_first = pl.program_id(0) * self.vocab + own.first
        return lax.broadcasted_iota(jnp.int32, (own.size, part), 0) == column - own_first

    def _clear(self, k: Index) -> None:
        """Zeros for the rows of a part that are others', which may be anything."""
        at, (_, first, end) = pl.program_id(0) % 2, self._span()
        rows = self.buffer.at[at]

        def own(part: Part) -> Array:
            slot = k * self.slots.shape[2] + part.first + lax.broadcasted_iota(jnp.int32, (part.size, 1), 0)
            return jnp.where((slot >= first) & (slot < end), rows[part.rows, :], jnp.zeros((), rows.dtype))

        fill_rows(rows, own)

    def _placed(self, k: Index, own: Part) -> Array:
        rows = self.buffer[pl.program_id(0) % 2]
        return dot(self._one_hot(k, own).astype(jnp.float32).astype(rows.dtype), rows, (1, 0))

    def _over_more_parts(self, body: Callable[[Array], None]) -> None:
        here, _, end = self._span()
        lax.fori_loop(here + 1, tiles_of_live(end, self.slots.shape[2]), lambda k, _: body(k), None)

    def _over_columns(self, body: Callable[[Part], None]) -> None:
        over_parts(self.vocab, self.buffer.shape[1] * TURNS * self.slots.shape[2], LANES, body)

    def begin(self) -> None:
        """Before a tile's first step: its first rows are on their way, the next tile's as well."""
        j = pl.program_id(0)
        pl.when(j == 0)(lambda: self._copy(self._first_part(0), 0).start())
        pl.when(j + 1 < pl.num_programs(0))(lambda: self._copy(self._first_part(j + 1), (j + 1) % 2).start())

        def find(k: Index, own: Part) -> Array:
            return jnp.sum(jnp.where(self._one_hot(k, own), 1.0, 0.0), axis=1, keepdims=True)

        def begun(own: Part) -> None:
            self.is_ready[own.rows, :] = find(self._span()[0], own)

        def more(k: Index) -> None:
            def add(own: Part) -> None:
                self.is_ready[own.rows, :] += find(k, own)

            self._over_columns(add)

        self._over_columns(begun)
        self._over_more_parts(more)

    def arrive(self) -> None:
        """Wait for the rows of the tile's first part."""
        here = self._span()[0]
        self._copy(here, pl.program_id(0) % 2).wait()
        self._clear(here)

    def first(self, own: Part) -> Array:
        """``[columns of the part, H]`` float32: the rows that have arrived in their places, zeros elsewhere."""
        return self._placed(self._span()[0], own)

    def put_more(self, out: Ref) -> None:
        """The rows of further parts over the zeros in ``out [vocab, H]``."""
        at = pl.program_id(0) % 2

        def put(k: Index) -> None:
            self._copy(k, at).start()
            self._copy(k, at).wait()
            self._clear(k)

            def add(own: Part) -> None:
                out[own.rows, :] += self._placed(k, own).astype(out.dtype)

            self._over_columns(add)

        self._over_more_parts(put)
