"""The matmul that the Hopper head kernels share: a ring of tiles in shared memory, filled by one warpgroup and
multiplied by two, over the tiles that a schedule gives each block.

Block = two computing warpgroups and one that copies. A task of a block is a *run*: one tile of tokens times a range of
vocabulary tiles. For each vocabulary tile the copying warpgroup streams ``h [2 M, 64]`` and ``W [C, 64]`` through the
ring, the others multiply (wgmma, float32 accumulators); ``x [M, C]`` in their registers is for a kernel's own epilogue.

    HBM       h once per group of token tiles, W once per *group* (blocks that share a vocabulary tile run at the same
              time, and L2 serves all but the first)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from logitless.compat import gpu_interpreter, gpu_load
from logitless.head.mosaic_gpu.epilogue import LOW
from logitless.head.mosaic_gpu.limits import TILE_K
from logitless.head.mosaic_gpu.schedule import COMPUTE, Schedule, Tiles

SWIZZLE = 128  # bytes: one atom is TILE_K 16-bit numbers


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The static side: tiles, operands (or their shapes), the head's layout."""

    tiles: Tiles
    h: Any  # [N, H]
    weight: Any  # [V, H] or [H, V]
    vh: bool
    interpret: Any

    @property
    def k_tiles(self) -> int:
        """Steps along the hidden size."""
        return -(-self.h.shape[1] // TILE_K)

    def scratch(self) -> list[Any]:
        """What :meth:`of` takes apart again: two rings, and their barriers."""
        t = self.tiles
        shape = (t.columns, TILE_K) if self.vh else (TILE_K, t.columns)
        barriers = [
            plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
            plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=t.stages),
        ]
        rings = [self._ring((t.tokens, TILE_K), self.h), self._ring(shape, self.weight)]
        return [*rings, *barriers, *([plgpu.Barrier()] if t.stagger else [])]

    def _in_whole_tiles(self, operand: Any) -> bool:
        rows, columns = operand.shape
        return bool(self.interpret) or (rows % 8 == 0 and columns % TILE_K == 0)

    def _ring(self, shape: tuple[int, int], operand: Any) -> Any:
        """Slots of the ring, as the matmul reads them and, where it must differ, as the copies write them."""
        t, swizzle = self.tiles, plgpu.SwizzleTransform(SWIZZLE)  # type: ignore[abstract, unused-ignore]
        tiles = plgpu.TilingTransform((8, TILE_K))  # type: ignore[abstract, unused-ignore]
        tiled = plgpu.SMEM((t.stages, *shape), operand.dtype, transforms=(tiles, swizzle))
        if self._in_whole_tiles(operand):
            return tiled
        # Tiled copies need whole tiles. Tiles one swizzle atom wide lie in memory like plain rows, which may be ragged.
        assert shape[1] == TILE_K
        return plgpu.RefUnion(tiled, plgpu.SMEM((t.stages, *shape), operand.dtype, transforms=(swizzle,)))

    def of(self, h: Any, w: Any, tasks: Any, scratch: Any) -> Running:
        """The kernel's side, from its references: the operands, the schedule's table and :meth:`scratch`."""
        h_ring, w_ring, full, free, *ahead = scratch

        def views(ring: Any, operand: Any) -> tuple[Any, Any]:
            return (ring, ring) if self._in_whole_tiles(operand) else (ring[0], ring[1])

        rings = *views(h_ring, self.h), *views(w_ring, self.weight)
        return Running(self, h, w, tasks, *rings, full, free, ahead[0] if ahead else None)

    def run(
        self, kernel: Callable[..., None], inputs: list[Any], out_type: Any, scratch: list[Any], softcap: Any
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
    h: Any  # [N, H]
    w: Any  # [V, H] or [H, V]
    tasks: Any  # int32 [5, blocks, groups]: the schedule
    h_read: Any  # the ring as the matmul reads it
    h_written: Any  # and as the copies write it
    w_read: Any
    w_written: Any
    full: Any
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

    def steps(self, per_tile: Any, per_task: Any, carry: Any) -> Any:
        """``per_tile(token_tile, vocab_tile, c)`` for all tiles of this block, and ``per_task(token_tile, slot, c)``
        after each run; both warp-group roles walk the same way."""
        block = lax.axis_index("block")

        def group(j: Array, c: Any) -> Any:
            token, count, first, last, slot = (self.tasks[i, block, j] for i in range(5))

            def run(i: Array, c: Any) -> Any:
                def step(v: Array, c: Any) -> Any:
                    return per_tile(token + i, v, c)

                return per_task(token + i, slot, lax.fori_loop(first, last, step, c))

            return lax.fori_loop(0, count, run, c)

        return lax.fori_loop(0, self.tasks.shape[2], group, carry)

    def _copy(self) -> None:
        """The copying warpgroup: fills slots of the ring in the order in which the others use them."""
        t, vh = self.static.tiles, self.static.vh

        def step(tile: Array, v: Array, k: Array, n: Array) -> Array:
            slot = lax.rem(n, jnp.int32(t.stages))
            pl.when(n >= t.stages)(lambda: plgpu.barrier_wait(self.free.at[slot]))
            depth, columns = pl.ds(k * TILE_K, TILE_K), pl.ds(v * t.columns, t.columns)
            # What hangs over the end of an array is filled with zeros.
            rows = pl.ds(tile * t.tokens, t.tokens)
            plgpu.copy_gmem_to_smem(self.h.at[rows, depth], self.h_written.at[slot], self.full.at[slot])
            w = self.w.at[columns, depth] if vh else self.w.at[depth, columns]
            plgpu.copy_gmem_to_smem(w, self.w_written.at[slot], self.full.at[slot])
            return n + 1

        def per_tile(tile: Array, v: Array, n: Array) -> Array:
            return lax.fori_loop(0, self.static.k_tiles, lambda k, n: step(tile, v, k, n), n)

        n = self.steps(per_tile, lambda tile, slot, n: n, jnp.int32(0))

        def drain(i: int) -> None:
            pl.when(n >= i)(lambda: plgpu.barrier_wait(self.free.at[lax.rem(n - i, jnp.int32(t.stages))]))

        for i in range(t.stages, 0, -1):  # every phase of a barrier is waited for
            drain(i)

    def product(self, n: Array) -> Array:
        """``x [M, C]`` of a warpgroup's rows and the next vocabulary tile; ``n`` steps were done before."""
        t, wg = self.static.tiles, lax.axis_index("wg")
        if self.ahead is not None:
            is_second = jnp.logical_and(n == 0, wg == 1)
            pl.when(is_second)(lambda: plgpu.barrier_wait(self.ahead))
        return pl.run_scoped(lambda acc: self._multiply(acc, n, wg), plgpu.ACC((t.rows, t.columns), jnp.float32))

    def _multiply(self, acc: Any, n: Array, wg: Array) -> Array:
        t, k_tiles = self.static.tiles, self.static.k_tiles
        mine = pl.ds(wg * t.rows, t.rows)

        def issue(n: Array) -> Array:
            slot = lax.rem(n, jnp.int32(t.stages))
            plgpu.barrier_wait(self.full.at[slot])
            w = self.w_read.at[slot]
            plgpu.wgmma(acc, self.h_read.at[slot, mine], w.transpose((1, 0)) if self.static.vh else w)
            return slot

        def step(_: Array, c: tuple[Array, Array]) -> tuple[Array, Array]:
            n, before = c
            slot = issue(n)
            plgpu.wgmma_wait(t.delay)
            plgpu.barrier_arrive(self.free.at[before if t.delay else slot])
            if self.ahead is not None:
                is_time = jnp.logical_and(n == t.stagger, wg == 0)
                pl.when(is_time)(lambda: plgpu.barrier_arrive(self.ahead))
            return n + 1, slot

        if t.delay:
            slot = issue(n)
            n, slot = lax.fori_loop(1, k_tiles, step, (n + 1, slot))
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.free.at[slot])
        else:
            n, _ = lax.fori_loop(0, k_tiles, step, (n, jnp.int32(0)))
        return acc[...]

    def rows_of(self, tile: Array) -> Any:
        """A warpgroup's rows of an array over the tokens."""
        t = self.static.tiles
        return pl.ds(tile * t.tokens + lax.axis_index("wg") * t.rows, t.rows)

    def load_rows(self, ref: Any, tile: Array) -> Array:
        """``[M]`` numbers of a warpgroup's rows."""
        return gpu_load(ref.at[self.rows_of(tile)], plgpu.Layout.WGMMA.reduce(1), optimized=False)

    def load_columns(self, ref: Any, first: Array, count: int) -> Array:
        """``[M, count]``: numbers of the columns from ``first`` on, along the rows."""
        numbers = gpu_load(ref.at[pl.ds(first, count)], plgpu.Layout.WGMMA.reduce(0), optimized=False)
        return lax.broadcast_in_dim(numbers, (self.static.tiles.rows, count), (1,))


def table(plan: Schedule) -> Array:
    """The schedule as the kernels read it: int32 ``[5, blocks, groups]``."""
    parts = (plan.token, plan.count, plan.first, plan.last, plan.slot)
    return jnp.stack([jnp.asarray(x, jnp.int32) for x in parts])


def token_rows(x: Array, tokens: int, fill: Any) -> Array:
    """``x [..., N]`` filled up to ``tokens``."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, tokens - x.shape[-1])], constant_values=fill)


def whole_bias(bias: Array, columns: int) -> Array:
    """A bias over whole vocabulary tiles in float32, without infinities: ``-inf`` would make ``0 * -inf``."""
    column = jnp.maximum(bias.astype(jnp.float32)[:columns], LOW)
    return jnp.pad(column, (0, columns - column.shape[0]))
