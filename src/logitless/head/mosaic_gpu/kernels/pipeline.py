"""The matmul that the Hopper head kernels share: a ring of tiles in shared memory, filled by one warpgroup and
multiplied by two, over the tiles that a walk (``schedule.py``) gives each block.

Block = two computing warpgroups and one copying warpgroup. For each tile the copying warpgroup streams ``left [2 M,
64]`` and ``right [C, 64]`` through the ring, the others multiply (wgmma, float32 accumulators); ``x [M, C]`` in their
registers is for a kernel's own epilogue. Either operand may be stored depth-first, and one operand in slots
(``schedule.Slots``).

    HBM       the left one once per group of row tiles, the right one once per *group* (blocks that share a column tile
              run at the same time, and L2 serves all but the first)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import ArrayLike, DTypeLike

from logitless.core.compat import Index, Ref, gpu_interpreter, gpu_load
from logitless.head.mosaic_gpu.kernels.schedule import COMPUTE, TILE_K, Schedule, Slots, Tiles

LOG2E = 1.4426950408889634
LOW = -1e30  # stands for -inf: differences stay finite, and 2^(k (LOW - m)) is 0
SWIZZLE = 128  # bytes: one atom is TILE_K 16-bit numbers
PIECE = 2 * SWIZZLE
"""Bytes of a row that leave at a time. One piece is on its way, not two of half the size: the time is the same, and
there is half as much to compile. For more, shared memory has no room."""


def atoms(dtype: DTypeLike) -> tuple[Any, Any]:
    """How tiles lie in shared memory: as the matrix unit reads them."""
    atom = SWIZZLE // jnp.dtype(dtype).itemsize
    tiles = plgpu.TilingTransform((8, atom))  # type: ignore[abstract, unused-ignore]
    return tiles, plgpu.SwizzleTransform(SWIZZLE)  # type: ignore[abstract, unused-ignore]


def way_out(t: Tiles, dtype: DTypeLike, narrow: bool = False) -> Any:
    """Shared memory for a piece of each warpgroup; ``narrow``: of half the size, one atom."""
    columns = (SWIZZLE if narrow else PIECE) // jnp.dtype(dtype).itemsize
    return plgpu.SMEM((COMPUTE, t.rows, columns), dtype, transforms=atoms(dtype))


def in_whole_tiles(shape: tuple[int, ...]) -> bool:
    """Whether a tiled copy can serve this array of 16-bit numbers."""
    return shape[0] % 8 == 0 and shape[1] % TILE_K == 0


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The static side: tiles, operands (or shapes), and flags for depth-first operands."""

    tiles: Tiles
    left: Any  # [rows, depth], or [depth, rows]; or an array of slots
    right: Any  # [columns, depth], or [depth, columns]; or an array of slots
    left_deep: bool
    right_deep: bool
    interpret: object

    @property
    def steps(self) -> int:
        """Along the depth, where the left operand is not in slots."""
        return -(-self.left.shape[0 if self.left_deep else 1] // TILE_K)

    def scratch(self) -> list[Any]:
        """What :meth:`of` takes apart again: two rings, and their barriers."""
        t = self.tiles
        barriers = [
            plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
            plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=t.stages),
        ]
        rings = [self._ring(t.tokens, self.left, self.left_deep), self._ring(t.columns, self.right, self.right_deep)]
        return [*rings, *barriers, *([plgpu.Barrier()] if t.stagger else [])]

    def _in_whole_tiles(self, operand: Any) -> bool:
        return bool(self.interpret) or in_whole_tiles(operand.shape)

    def _ring(self, size: int, operand: Any, deep: bool) -> Any:
        """Slots of the ring, as seen by the matmul and, if different, by the copies."""
        t, shape = self.tiles, (TILE_K, size) if deep else (size, TILE_K)
        tiled = plgpu.SMEM((t.stages, *shape), operand.dtype, transforms=atoms(operand.dtype))
        if self._in_whole_tiles(operand):
            return tiled
        # Tiled copies need whole tiles. Tiles one swizzle atom wide lie in memory like plain rows, which may be ragged.
        assert shape[1] == TILE_K
        return plgpu.RefUnion(tiled, plgpu.SMEM((t.stages, *shape), operand.dtype, transforms=atoms(operand.dtype)[1:]))

    def of(self, left: Any, right: Any, walk: Any, scratch: Any) -> Running:
        """The kernel's side, from its references: the operands, a block's walk and :meth:`scratch`."""
        left_ring, right_ring, full, free, *ahead = scratch

        def views(ring: Any, operand: Any) -> tuple[Any, Any]:
            return (ring, ring) if self._in_whole_tiles(operand) else (ring[0], ring[1])

        rings = *views(left_ring, self.left), *views(right_ring, self.right)
        return Running(self, left, right, walk, *rings, full, free, ahead[0] if ahead else None)

    def run(
        self, kernel: Callable[..., None], inputs: list[Any], out_type: Any, scratch: list[Any], softcap: Any = None
    ) -> Any:
        """The kernel on all blocks, in three warpgroups. A power is one instruction (2^-22); a tanh that is good to
        2^-11 would not do, so softcaps take the library's functions."""
        return plgpu.kernel(
            kernel,
            out_type=out_type,
            scratch_types=scratch,
            grid=(self.tiles.blocks,),
            grid_names=("block",),
            num_threads=COMPUTE + 1,
            thread_name="wg",
            compiler_params=plgpu.CompilerParams(
                approx_math=softcap is None,
                unsafe_no_auto_barriers=True,
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            ),
            interpret=gpu_interpreter() if self.interpret is True else (self.interpret or None),
        )(*inputs)


@dataclasses.dataclass(frozen=True)
class Running:
    """The kernel's side: references to global memory, then to shared memory and barriers."""

    static: Pipeline
    left: Any
    right: Any
    walk: Any  # of schedule.py
    left_read: Ref  # the ring as the matmul reads it
    left_written: Ref  # and as the copies write it
    right_read: Ref
    right_written: Ref
    full: Any  # barriers
    free: Any
    ahead: Any  # or None

    def roles(self, compute: Callable[[], None]) -> None:
        """``compute()`` in two warpgroups, the copies in the third."""

        @pl.when(lax.axis_index("wg") < COMPUTE)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")
            compute()

        @pl.when(lax.axis_index("wg") == COMPUTE)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")
            self._copy()

    def depth(self, part: Array) -> tuple[Index, Index]:
        """The steps that a part of the depth has."""
        return self.walk.depth(part, self.static.steps)

    def _copy(self) -> None:
        """The copying warpgroup: fills slots of the ring in the order in which the others use them."""
        s, t = self.static, self.static.tiles

        def of(operand: Any, deep: bool, k: Array, tile: Array, size: int) -> Any:
            # What hangs over the end of an array is filled with zeros.
            depth, across = (k * TILE_K, TILE_K), (tile * size, size)
            rows, columns = (depth, across) if deep else (across, depth)
            if isinstance(operand, Slots):
                return operand.at(*rows, *columns)
            return operand.at[pl.ds(*rows), pl.ds(*columns)]

        def step(row: Array, column: Array, k: Array, n: Array) -> Array:
            slot = lax.rem(n, jnp.int32(t.stages))
            pl.when(n >= t.stages)(lambda: plgpu.barrier_wait(self.free.at[slot]))
            left = of(self.left, s.left_deep, k, row, t.tokens)
            plgpu.copy_gmem_to_smem(left, self.left_written.at[slot], self.full.at[slot])
            right = of(self.right, s.right_deep, k, column, t.columns)
            plgpu.copy_gmem_to_smem(right, self.right_written.at[slot], self.full.at[slot])
            return n + 1

        def per_tile(row: Array, column: Array, part: Array, n: Array) -> Array:
            return lax.fori_loop(*self.depth(part), lambda k, n: step(row, column, self.walk.at(part, k), n), n)

        n = self.walk.tiles(per_tile, jnp.int32(0))

        def drain(i: int) -> None:
            pl.when(n >= i)(lambda: plgpu.barrier_wait(self.free.at[lax.rem(n - i, jnp.int32(t.stages))]))

        for i in range(t.stages, 0, -1):  # every phase of a barrier is waited for
            drain(i)

    def product(self, n: Array, part: Array) -> tuple[Array, Array]:
        """``(x [M, C] of a warpgroup's rows in the next tile, steps done)``; ``n`` steps were done before."""
        t, wg = self.static.tiles, lax.axis_index("wg")
        if self.ahead is not None:
            is_second = jnp.logical_and(n == 0, wg == 1)
            pl.when(is_second)(lambda: plgpu.barrier_wait(self.ahead))
        first, last = self.depth(part)
        accumulator = plgpu.ACC((t.rows, t.columns), jnp.float32)
        x = pl.run_scoped(lambda acc: self._multiply(acc, n, last - first, wg), accumulator)
        return x, n + (last - first)

    def _multiply(self, acc: Any, n: Array, steps: Index, wg: Array) -> Array:
        """Of at least one step."""
        s, t = self.static, self.static.tiles
        mine = pl.ds(wg * t.rows, t.rows)

        def issue(n: Array) -> Array:
            slot = lax.rem(n, jnp.int32(t.stages))
            plgpu.barrier_wait(self.full.at[slot])
            left = self.left_read.at[slot, :, mine].transpose((1, 0)) if s.left_deep else self.left_read.at[slot, mine]
            right = self.right_read.at[slot]
            plgpu.wgmma(acc, left, right if s.right_deep else right.transpose((1, 0)))
            return slot

        def step(i: Array, c: tuple[Array, Array]) -> tuple[Array, Array]:
            n, before = c
            slot = issue(n)
            plgpu.wgmma_wait(t.delay)
            if t.delay:  # and not the first step apart: that would be all matrix instructions once more to compile
                pl.when(i > 0)(lambda: plgpu.barrier_arrive(self.free.at[before]))
            else:
                plgpu.barrier_arrive(self.free.at[slot])
            if self.ahead is not None:
                is_time = jnp.logical_and(n == t.stagger, wg == 0)
                pl.when(is_time)(lambda: plgpu.barrier_arrive(self.ahead))
            return n + 1, slot

        _, slot = lax.fori_loop(0, steps, step, (n, jnp.int32(0)))
        if t.delay:
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.free.at[slot])
        return acc[...]

    def leave(self, way_out: Ref, x: Array, out: Any) -> None:
        """A piece of a tile to ``out``, by ``way_out`` (:func:`way_out`); nobody waits for it to arrive."""
        own = way_out.at[lax.axis_index("wg")]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        own[...] = x.astype(way_out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own, out)

    def first_row(self, tile: Array) -> Array:
        """First row of a warpgroup within a tile."""
        t = self.static.tiles
        return tile * t.tokens + lax.axis_index("wg") * t.rows

    def rows_of(self, tile: Array) -> pl.Slice:
        """A warpgroup's rows of an array over the tokens."""
        return pl.ds(self.first_row(tile), self.static.tiles.rows)

    def load_rows(self, ref: Ref, tile: Array) -> Array:
        """``[M]`` numbers of a warpgroup's rows."""
        return gpu_load(ref.at[self.rows_of(tile)], plgpu.Layout.WGMMA.reduce(1), optimized=False)

    def load_columns(self, ref: Ref, first: Array, count: int) -> Array:
        """``[M, count]``: numbers of the columns from ``first`` on, along the rows."""
        numbers = gpu_load(ref.at[pl.ds(first, count)], plgpu.Layout.WGMMA.reduce(0), optimized=False)
        return lax.broadcast_in_dim(numbers, (self.static.tiles.rows, count), (1,))


def table(plan: Schedule) -> Array:
    """The schedule as the kernels read it: int32 ``[5, blocks, groups]``."""
    parts = (plan.token, plan.count, plan.first, plan.last, plan.slot)
    return jnp.stack([jnp.asarray(x, jnp.int32) for x in parts])


def token_rows(x: Array, tokens: int, fill: ArrayLike) -> Array:
    """``x [..., N]`` filled up to ``tokens``."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, tokens - x.shape[-1])], constant_values=fill)


def whole_bias(bias: Array, columns: int) -> Array:
    """A bias over whole vocabulary tiles in float32, without infinities: ``-inf`` would make ``0 * -inf``."""
    column = jnp.maximum(bias.astype(jnp.float32)[:columns], LOW)
    return jnp.pad(column, (0, columns - column.shape[0]))


def across(row: Array, columns: int) -> Array:
    """``row [M]`` along the columns of ``[M, columns]``."""
    return lax.broadcast_in_dim(row, (row.shape[0], columns), (0,))
