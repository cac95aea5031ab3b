"""Where the rows of a Mosaic GPU kernel lie in memory, how they are cut into tiles, and which shapes are served.

Bulk copies move whole 16-byte words that start at multiples of 16 bytes: ``unit`` logits each. If the width of a row is
a multiple of the unit, every row starts at such a word. If not (a *ragged* width: 151643, 50257), row ``r`` starts
``shift = r * width mod unit`` logits behind one, and two neighbouring rows share a word. Then a row is swept from that
word on: place ``i`` of tile ``k`` holds column ``k C + i - shift``, the places before column 0 and behind the last
column hold a neighbour's logits and are ignored, and

    loads   move every word that holds a logit of the row (the neighbour may be overwriting its own part meanwhile:
            nobody looks at it)
    stores  move the words that hold nothing but this row; the up to ``2 unit - 2`` entries in shared words are stored
            one by one, each by its own row

So that addresses stay within 31 bits, a ragged array is viewed as ``[rows / group, group width]``, ``group`` being the
rows after which a row starts at a word again (8 for an odd number of 16-bit logits), or as one flat row where the
number of rows is no multiple of the group. All views are free: the memory is contiguous.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from logitless.core.compat import mosaic_gpu_reason
from logitless.core.pytree import register

Number = Array | int

_DTYPES = ("float32", "bfloat16", "float16")
_SHARED_BYTES = 216 * 1024  # of the 227 KiB a Hopper block may have; the rest holds barriers and reductions
_BARRIERS = 32  # a Mosaic barrier array holds at most this many
_INT32 = 2**31 - 1
_WARPGROUPS = 4  # 512 threads with 128 registers each: no kernel spills in a loop
_TILE_BYTES = 8192
_LANES = 512
_OUT = 2  # slots for dlogits of another dtype than the logits': one is written while the other is copied out
_BLOCKS = 132  # streaming multiprocessors of an H100 or H200


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Shape of the work; see ``row_sweep.py``. ``ring`` of the ``slots`` are reused while sweep 1 runs; dlogits leave
    from ``out`` slots of their own, or, if that is 0, from those of their logits."""

    warpgroups: int
    columns: int
    slots: int
    ring: int
    lag: int
    lanes: int
    blocks: int
    out: int = 0


@register
@dataclasses.dataclass(frozen=True)
class Destination:
    """Rows ``first, first + 1, ...`` of ``array [M, V]``, in which dlogits are to be written; V is not ragged."""

    array: Array
    first: Array


@dataclasses.dataclass(frozen=True)
class Shape:
    """The problem: ``rows x width`` logits, ``unit`` of them in 16 bytes, whose first ``vocab`` columns count."""

    rows: int
    width: int
    vocab: int
    unit: int

    @property
    def ragged(self) -> bool:
        return self.width % self.unit != 0

    @property
    def group(self) -> int:
        """Rows per line of the view; 0 if everything is a flat line."""
        group = self.unit // math.gcd(self.width, self.unit)
        return group if self.rows % group == 0 else 0

    @property
    def view(self) -> tuple[int, ...]:
        """The shape under which the kernel sees the logits."""
        return (self.rows // self.group, self.group * self.width) if self.group else (self.rows * self.width,)

    @property
    def remainder(self) -> int:
        """Logits behind the array's last whole word, which no bulk copy brings."""
        return self.rows * self.width % self.unit

    def place(self, row: Number, column: Number) -> tuple[Number, ...]:
        """Index of an entry in the view."""
        if not self.ragged:
            return row, column
        if not self.group:
            return (row * self.width + column,)
        group = jnp.int32(self.group)
        row = jnp.asarray(row, jnp.int32)
        return lax.div(row, group), lax.rem(row, group) * self.width + column

    def shift(self, row: Number) -> Number:
        """Places before a row's first logit in its first word."""
        if not self.ragged:
            return 0
        if isinstance(row, int):
            return row * self.width % self.unit
        return lax.rem(row * (self.width % self.unit), jnp.int32(self.unit))

    def loaded_end(self, row: Number, shift: Number) -> Number:
        """The place behind the last word that a row's bulk copies bring."""
        if not self.ragged:
            return self.width
        end = self._down(shift + (self.width + self.unit - 1))
        return end if not self.remainder else end - self.unit * jnp.where(row == self.rows - 1, 1, 0)

    def stored_end(self, shift: Number) -> Number:
        """The place behind the last word that holds only this row."""
        return self._down(shift + self.width) if self.ragged else self.width

    def _down(self, place: Number) -> Number:
        """The start of a place's word."""
        if isinstance(place, int):
            return place // self.unit * self.unit
        return lax.div(place, jnp.int32(self.unit)) * self.unit

    def loaded_ends(self) -> tuple[int, ...]:
        """The values that :meth:`loaded_end` takes."""
        words = self.width // self.unit
        if not self.ragged:
            return (self.width,)
        return tuple(self.unit * w for w in range(words + (0 if self.remainder else 1), words + 3))

    def stored_ends(self) -> tuple[int, ...]:
        """The values that :meth:`stored_end` takes."""
        words = self.width // self.unit
        return (self.unit * words, self.unit * (words + 1)) if self.ragged else (self.width,)

    def tiles(self, t: Tiles) -> int:
        """Tiles of a row, the same for every shift."""
        return -(-self.loaded_ends()[-1] // t.columns)

    def last(self, t: Tiles) -> int:
        """The first place of a row's last tile."""
        return (self.tiles(t) - 1) * t.columns

    def suits(self, t: Tiles) -> bool:
        """Whether the last tile holds at least one whole word of every row, loaded and stored."""
        return min(*self.loaded_ends(), *self.stored_ends()) > self.last(t)


def select(value: Number, options: Sequence[int], body: Callable[[int], None]) -> None:
    """``body(value)`` with a static argument: a branch for each of the ``options``."""
    first, *rest = options
    if not rest:
        body(first)
    else:
        lax.cond(value == first, lambda: body(first), lambda: select(value, rest, body))


def row_index(place: tuple[Number, ...], size: Any) -> tuple[Any, ...]:
    """The index of a run that starts at ``place``; ``size`` makes a slice of a start."""
    return (*place[:-1], size(place[-1]))


# -- the rule for tiles, and the shapes that it serves -----------------------------------------------------------------


def rounds(v: int, dtype: DTypeLike, out: DTypeLike | None) -> bool:
    """Whether the kernels themselves write dlogits in ``out``, another dtype than that of the logits.

    16 bits of float32, where rows of both start at multiples of 16 bytes: a ragged row would be cut at other columns
    when it is written than when it is read. Elsewhere dlogits are written in the dtype of the logits and converted.
    """
    out = jnp.dtype(out)
    narrower = jnp.dtype(dtype) == jnp.float32 and out.name in _DTYPES and out.itemsize == 2
    return narrower and v % (16 // out.itemsize) == 0


def tiles_for(n: int, v: int, dtype: DTypeLike, out: DTypeLike | None = None) -> Tiles:
    """The rule: four warpgroups, 8 KiB tiles, a ring of three slots, as many slots as shared memory holds.

    On an H200 at (4096, 151936) bfloat16 that takes 1.03 times a plain copy; two warpgroups 1.22, 6 KiB tiles 1.07
    (docs/benchmarks.md). Vocabularies of fewer than eight tiles get smaller ones, down to ``_LANES`` columns, so that
    each warpgroup has two: one is swept while the other is copied. ``out`` is the dtype of dlogits that the kernel
    rounds.
    """
    itemsize = jnp.dtype(dtype).itemsize
    columns = max(_TILE_BYTES // itemsize, _LANES)
    while columns > _LANES and -(-v // columns) < 2 * _WARPGROUPS:
        columns //= 2
    return fitted(Tiles(_WARPGROUPS, columns, _BARRIERS, 3, 1, _LANES, _BLOCKS), n, v, itemsize, out)


def fitted(t: Tiles, n: int, v: int, itemsize: int, out: DTypeLike | None = None) -> Tiles:
    """``t`` with slots and ring cut down to shared memory, to the barrier limit and to the tiles there are.

    Tiles of ragged rows grow by ``lanes`` where the last one would hold less than a word of some row. With the dtype
    ``out`` of rounded dlogits, these have slots of their own.
    """
    shape = Shape(n, v, v, 16 // itemsize)
    while not shape.suits(t):
        t = dataclasses.replace(t, columns=t.columns + t.lanes)
    tiles = shape.tiles(t)
    t = dataclasses.replace(t, warpgroups=min(t.warpgroups, tiles), out=0 if out is None else _OUT)
    room = _SHARED_BYTES - (t.warpgroups - 1) * 16 * t.lanes
    if out is not None:
        room -= t.warpgroups * t.out * t.columns * jnp.dtype(out).itemsize
    slots = min(t.slots, room // (t.warpgroups * t.columns * itemsize), _BARRIERS // t.warpgroups)
    slots = max(min(slots, -(-tiles // t.warpgroups)), 1)
    ring = min(t.ring, (slots + 1) // 2)
    return dataclasses.replace(t, slots=slots, ring=ring, blocks=min(t.blocks, n))


def check(n: int, v: int, dtype: DTypeLike, platform: str = "gpu", interpret: bool = False) -> None:
    """Raise ``NotImplementedError`` with the reason where these kernels cannot run."""
    name = jnp.dtype(dtype).name
    why = mosaic_gpu_reason()
    if why is not None:
        raise NotImplementedError(f"mosaic_gpu: {why}")
    if name not in _DTYPES:
        raise NotImplementedError(f"mosaic_gpu: logits are {name}; it takes {', '.join(_DTYPES)}")
    if platform not in ("gpu", "cuda") and not interpret:
        raise NotImplementedError(f"mosaic_gpu: it runs on a Hopper GPU, not on {platform}")
    if n < 1 or v < 1:
        raise NotImplementedError(f"mosaic_gpu: logits [{n}, {v}] are empty")
    shape = Shape(n, v, v, 16 // jnp.dtype(dtype).itemsize)
    if shape.ragged and v < 4 * shape.unit:
        raise NotImplementedError(f"mosaic_gpu: rows of {v} {name} logits are shorter than the 64 bytes it needs")
    if not shape.group and n * v > _INT32:
        raise NotImplementedError(
            f"mosaic_gpu: {n} rows of {v} {name} logits are more than 2^31 logits whose rows start between multiples "
            f"of 16 bytes (a vocabulary, or a number of rows, that is a multiple of {shape.unit} would do)"
        )


def describe(n: int, v: int, dtype: DTypeLike) -> dict[str, object]:
    """Tiles and bytes moved, for ``explain``."""
    t = tiles_for(n, v, dtype)
    itemsize = jnp.dtype(dtype).itemsize
    size = n * v * itemsize
    per_group = -(-Shape(n, v, v, 16 // itemsize).tiles(t) // t.warpgroups)
    return {
        "columns": t.columns,
        "warpgroups": t.warpgroups,
        "slots": t.slots,
        "blocks": t.blocks,
        "hbm_bytes": 2 * size,
        "l2_bytes": size * max(per_group - t.slots, 0) // per_group,
    }
