"""Forward statistics of the head on a Hopper GPU: one matmul whose logits never leave the registers.

Block = two computing warpgroups and one that copies. A task of a block is a *run*: one tile of tokens times a range of
vocabulary tiles. For each vocabulary tile the copying warpgroup streams ``h [2 M, 64]`` and ``W [C, 64]`` through a
ring in shared memory, the others multiply (wgmma, float32 accumulators) and turn the accumulator into per-lane sums
(``epilogue.py``). At the end of a run its ``RowSums`` are written; ``stats.merge`` adds up a row's runs.

    matmuls   one, N x H x V (only tokens before ``n_live``)
    HBM       h once per group of token tiles, W once per *group* (blocks that share a vocabulary tile run at the same
              time, and L2 serves all but the first), 20 bytes per token and run written
    memory    [5, runs, N] float32: 5 MiB at N = 8192; no logits

With a ``screen`` (``screen.py``) the epilogue also compares every logit with a number of its row and writes the result
as a bit: N V / 8 bytes more, 148 MiB at N = 8192 and V = 151936.

Its gradient is by recompute (``backend.py``): with float32 logits the order in which a sum was made is worth 1e-6.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from logitless import stats as st
from logitless import transform as tr
from logitless.compat import gpu_interpreter, gpu_load
from logitless.head.mosaic_gpu import epilogue
from logitless.head.mosaic_gpu.epilogue import FIELDS, LANES, LOG2E, LOW, Lanes
from logitless.head.mosaic_gpu.limits import TILE_K, check
from logitless.head.mosaic_gpu.schedule import COMPUTE, Tiles, schedule, tiles_for
from logitless.problem import Problem
from logitless.stats import TokenStats, masked_stats, valid_targets
from logitless.transform import LogitTransform


@dataclasses.dataclass(frozen=True)
class _Refs:
    """References of the kernel: global memory, then shared memory and barriers."""

    h: Any  # [N, H]
    w: Any  # [V, H] or [H, V]
    tasks: Any  # int32 [5, blocks, groups]: the schedule
    special: Any  # int32 [token tiles * 2, vocab tiles]: a masked column lies in the tile
    targets: Any  # int32 [padded N]
    transform: LogitTransform  # of references: [padded N] or [1]
    bias: Any | None  # [padded V]
    screen: Any | None  # float32 [padded N]
    out: Any  # float32 [5, slots, padded N]
    words: Any | None  # int32 [vocab tiles, padded N, 8]
    h_read: Any  # the ring as the matmul reads it
    h_written: Any  # and as the copies write it
    w_read: Any
    w_written: Any
    sums: Any  # [2, 5, M]: the way out
    bits: Any | None  # int32 [2, M, 8]: that of the words
    full: Any
    free: Any
    ahead: Any  # or None


def _steps(refs: _Refs, t: Tiles, per_tile: Any, per_task: Any, carry: Any) -> Any:
    """``per_tile(token_tile, vocab_tile, c)`` for all tiles of this block, and ``per_task(token_tile, slot, c)`` after
    each run; both warp-group roles walk the same way."""
    block = lax.axis_index("block")

    def group(j: Array, c: Any) -> Any:
        token, count, first, last, slot = (refs.tasks[i, block, j] for i in range(5))

        def run(i: Array, c: Any) -> Any:
            def step(v: Array, c: Any) -> Any:
                return per_tile(token + i, v, c)

            return per_task(token + i, slot, lax.fori_loop(first, last, step, c))

        return lax.fori_loop(0, count, run, c)

    return lax.fori_loop(0, refs.tasks.shape[2], group, carry)


def _copy(refs: _Refs, t: Tiles, vh: bool, k_tiles: int) -> None:
    """The copying warpgroup: fills slots of the ring in the order in which the others use them."""

    def step(tile: Array, v: Array, k: Array, n: Array) -> Array:
        slot = lax.rem(n, jnp.int32(t.stages))
        pl.when(n >= t.stages)(lambda: plgpu.barrier_wait(refs.free.at[slot]))
        depth, columns = pl.ds(k * TILE_K, TILE_K), pl.ds(v * t.columns, t.columns)
        # What hangs over the end of an array is filled with zeros.
        rows = pl.ds(tile * t.tokens, t.tokens)
        plgpu.copy_gmem_to_smem(refs.h.at[rows, depth], refs.h_written.at[slot], refs.full.at[slot])
        w = refs.w.at[columns, depth] if vh else refs.w.at[depth, columns]
        plgpu.copy_gmem_to_smem(w, refs.w_written.at[slot], refs.full.at[slot])
        return n + 1

    def per_tile(tile: Array, v: Array, n: Array) -> Array:
        return lax.fori_loop(0, k_tiles, lambda k, n: step(tile, v, k, n), n)

    n = _steps(refs, t, per_tile, lambda tile, slot, n: n, jnp.int32(0))

    def drain(i: int) -> None:
        pl.when(n >= i)(lambda: plgpu.barrier_wait(refs.free.at[lax.rem(n - i, jnp.int32(t.stages))]))

    for i in range(t.stages, 0, -1):  # every phase of a barrier is waited for
        drain(i)


def _compute(refs: _Refs, t: Tiles, vh: bool, k_tiles: int, vocab_size: int, logits_dtype: Any) -> None:
    """A computing warpgroup: its half of the block's rows."""
    wg = lax.axis_index("wg")
    mine = pl.ds(wg * t.rows, t.rows)
    per_row = plgpu.Layout.WGMMA.reduce(1)
    temperature: Any = refs.transform.temperature
    numbers = dataclasses.replace(refs.transform, temperature=None)
    numbers = jax.tree.map(lambda ref: ref[0], numbers)

    def of_rows(ref: Any, tile: Array) -> Array:
        return gpu_load(ref.at[pl.ds(tile * t.tokens + wg * t.rows, t.rows)], per_row, optimized=False)

    def factor(tile: Array) -> Array:
        each = temperature is not None and temperature.shape[0] > 1
        t = None if temperature is None else of_rows(temperature, tile) if each else temperature[0]
        k = tr.times(tr.factor(dataclasses.replace(numbers, temperature=t)), jnp.float32(LOG2E))
        return epilogue.across(k, LANES) if each else k

    def multiply(acc: Any, n: Array) -> Array:
        def issue(n: Array) -> Array:
            slot = lax.rem(n, jnp.int32(t.stages))
            plgpu.barrier_wait(refs.full.at[slot])
            w = refs.w_read.at[slot]
            plgpu.wgmma(acc, refs.h_read.at[slot, mine], w.transpose((1, 0)) if vh else w)
            return slot

        def step(_: Array, c: tuple[Array, Array]) -> tuple[Array, Array]:
            n, before = c
            slot = issue(n)
            plgpu.wgmma_wait(t.delay)
            plgpu.barrier_arrive(refs.free.at[before if t.delay else slot])
            if refs.ahead is not None:
                is_time = jnp.logical_and(n == t.stagger, wg == 0)
                pl.when(is_time)(lambda: plgpu.barrier_arrive(refs.ahead))
            return n + 1, slot

        if t.delay:
            slot = issue(n)
            n, slot = lax.fori_loop(1, k_tiles, step, (n + 1, slot))
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(refs.free.at[slot])
        else:
            n, _ = lax.fori_loop(0, k_tiles, step, (n, jnp.int32(0)))
        return acc[...]

    def screened(u: Array, tile: Array, v: Array) -> None:
        word = epilogue.above(u, epilogue.across(of_rows(refs.screen, tile), LANES))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        refs.bits[wg] = word  # type: ignore[index]
        plgpu.commit_smem()
        rows = pl.ds(tile * t.tokens + wg * t.rows, t.rows)
        plgpu.copy_smem_to_gmem(refs.bits.at[wg], refs.words.at[v, rows])  # type: ignore[union-attr]

    def per_tile(tile: Array, v: Array, c: tuple[Array, ...]) -> tuple[Array, ...]:
        n, *leaves = c
        if refs.ahead is not None:
            is_second = jnp.logical_and(n == 0, wg == 1)
            pl.when(is_second)(lambda: plgpu.barrier_wait(refs.ahead))
        special = refs.special[tile * COMPUTE + wg, v]
        x = pl.run_scoped(lambda acc: multiply(acc, n), plgpu.ACC((t.rows, t.columns), jnp.float32))
        first = v * t.columns
        if refs.bias is not None:
            b = gpu_load(refs.bias.at[pl.ds(first, t.columns)], plgpu.Layout.WGMMA.reduce(0), optimized=False)
            x = x + lax.broadcast_in_dim(b, x.shape, (1,))
        if logits_dtype != jnp.float32:
            x = x.astype(logits_dtype).astype(jnp.float32)
        u = tr.swept(x, numbers)
        nothing = plgpu.layout_cast(jnp.zeros((t.rows,), jnp.float32), per_row)
        u, found = lax.cond(
            special != 0,
            lambda u: epilogue.masked(u, first, of_rows(refs.targets, tile), vocab_size),
            lambda u: (u, nothing),
            u,
        )
        if refs.screen is not None:
            screened(u, tile, v)
        sums = epilogue.accumulate(Lanes(*leaves), u, found, factor(tile))
        return n + k_tiles, *sums.leaves()

    def per_task(tile: Array, slot: Array, c: tuple[Array, ...]) -> tuple[Array, ...]:
        n, *leaves = c
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for f, x in enumerate(epilogue.row_sums(Lanes(*leaves), factor(tile))):
            refs.sums[wg, f] = x
        plgpu.commit_smem()
        rows = pl.ds(tile * t.tokens + wg * t.rows, t.rows)
        for f in range(FIELDS):
            plgpu.copy_smem_to_gmem(refs.sums.at[wg, f], refs.out.at[f, slot, rows])
        return n, *Lanes.empty(t.rows).leaves()

    _steps(refs, t, per_tile, per_task, (jnp.int32(0), *Lanes.empty(t.rows).leaves()))
    plgpu.wait_smem_to_gmem(0)


def _partial_sums(
    p: Problem, n_live: Array | int | None, t: Tiles, screen: Array | None
) -> tuple[Array, Array, Array | None]:
    """``(sums [5, slots, padded N], parts [token tiles], words)``; of a token tile ``parts`` slots are written, the
    first. ``words [vocab tiles, padded N, 8]`` are the bits of ``screen [N]``; those of dead token tiles are not
    written."""
    (n, h), vocab_size, interpret = p.h.shape, p.call.vocab_size, p.call.interpret
    vh, targets, transform, bias = p.head.layout == "vh", p.targets, p.transform, p.head.bias
    logits_dtype = jnp.dtype(p.call.logits_dtype)
    token_tiles, vocab_tiles, k_tiles = -(-n // t.tokens), -(-vocab_size // t.columns), -(-h // TILE_K)
    padded = token_tiles * t.tokens
    t = dataclasses.replace(t, stagger=min(t.stagger, t.stages - 1, k_tiles - 1))
    live = n if n_live is None else n_live
    plan = schedule(t, token_tiles, vocab_tiles, (live + t.tokens - 1) // t.tokens)
    table = jnp.stack([jnp.asarray(x, jnp.int32) for x in (plan.token, plan.count, plan.first, plan.last, plan.slot)])
    # The tiles in which some column is masked, per warpgroup: those of its targets, and a last one that hangs over.
    row = jnp.arange(n) // t.rows
    special = jnp.zeros((token_tiles * COMPUTE, vocab_tiles), jnp.int32)
    special = special.at[row, jnp.where(targets < 0, vocab_tiles, targets // t.columns)].set(1, mode="drop")
    if vocab_size % t.columns:
        special = special.at[:, -1].set(1)

    def rows(x: Array, fill: Any) -> Array:
        return jnp.pad(x, (0, padded - n), constant_values=fill)

    numbers = {k: jnp.asarray(x, jnp.float32) for k, x in dataclasses.asdict(transform).items() if x is not None}
    given = [x.reshape(1) if x.ndim == 0 else rows(x, 1.0) for x in numbers.values()]
    if bias is not None:  # -inf would make 0 * -inf
        over = vocab_tiles * t.columns
        column = jnp.maximum(bias.astype(jnp.float32)[:over], LOW)
        given.append(jnp.pad(column, (0, over - column.shape[0])))
    if screen is not None:
        given.append(rows(screen, jnp.inf))
    inputs = [p.h, p.head.weight, table, special, rows(targets.astype(jnp.int32), -1), *given]
    slots = t.runs(token_tiles, vocab_tiles) + 1

    def views(ref: Any, i: int) -> tuple[Any, Any]:
        return (ref[0], ref[1]) if isinstance(rings[i], plgpu.RefUnion) else (ref, ref)

    def kernel(*refs: Any) -> None:
        head, tail = refs[: len(inputs)], refs[len(inputs) :]
        more = iter(head[5:])
        moved = LogitTransform(**{k: next(more) for k in numbers})
        biased = None if bias is None else next(more)
        out, words, tail = (tail[0], None, tail[1:]) if screen is None else (tail[0], tail[1], tail[2:])
        h_ring, w_ring, sums, *rest = tail
        bits = None if screen is None else rest.pop(0)
        rest = rest if t.stagger else [*rest, None]
        r = _Refs(
            *head[:5], moved, biased, next(more, None), out, words, *views(h_ring, 0), *views(w_ring, 1), sums, bits,
            *rest,
        )  # type: ignore[call-arg, unused-ignore]  # fmt: skip

        @pl.when(lax.axis_index("wg") < COMPUTE)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")
            _compute(r, t, vh, k_tiles, vocab_size, logits_dtype)

        @pl.when(lax.axis_index("wg") == COMPUTE)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")
            _copy(r, t, vh, k_tiles)

    def ring(shape: tuple[int, int], operand: Array) -> Any:
        """Slots of the ring, as the matmul reads them and, where it must differ, as the copies write them."""
        tiles = plgpu.TilingTransform((8, TILE_K))  # type: ignore[abstract, unused-ignore]
        tiled = plgpu.SMEM((t.stages, *shape), operand.dtype, transforms=(tiles, swizzle))
        rows, columns = operand.shape
        if interpret or (rows % 8 == 0 and columns % TILE_K == 0):
            return tiled
        # Tiled copies need whole tiles. Tiles one swizzle atom wide lie in memory like plain rows, which may be ragged.
        assert shape[1] == TILE_K
        return plgpu.RefUnion(tiled, plgpu.SMEM((t.stages, *shape), operand.dtype, transforms=(swizzle,)))

    swizzle = plgpu.SwizzleTransform(128)  # type: ignore[abstract, unused-ignore]
    rings = ring((t.tokens, TILE_K), p.h), ring((t.columns, TILE_K) if vh else (TILE_K, t.columns), p.head.weight)
    scratch = [
        *rings,
        plgpu.SMEM((COMPUTE, FIELDS, t.rows), jnp.float32),
        *([] if screen is None else [plgpu.SMEM((COMPUTE, t.rows, LANES), jnp.int32)]),
        plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
        plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=t.stages),
    ]
    sums_type = jax.ShapeDtypeStruct((FIELDS, slots, padded), jnp.float32)
    words_type = jax.ShapeDtypeStruct((vocab_tiles, padded, LANES), jnp.int32)
    out = plgpu.kernel(
        kernel,
        out_type=sums_type if screen is None else (sums_type, words_type),
        scratch_types=scratch + ([plgpu.Barrier()] if t.stagger else []),
        grid=(t.blocks,),
        grid_names=("block",),
        num_threads=COMPUTE + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            # One instruction per power (2^-22). A tanh that is good to 2^-11 would not do: softcaps take the library's.
            approx_math=transform.softcap is None,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=gpu_interpreter() if interpret is True else (interpret or None),
    )(*inputs)
    sums, words = (out, None) if screen is None else out
    return sums, jnp.asarray(plan.parts), words


def token_stats(p: Problem, n_live: Array | int | None = None, tiles: Tiles | None = None) -> TokenStats:
    """Statistics of ``p.h [N, H]`` under the head, each ``[N]``: one matmul, no logits.

    Tokens from ``n_live`` on (traced) are not computed and have zeros. With a 16-bit ``logits_dtype`` the raw logits,
    bias included, are rounded to it. The transform's temperature is a scalar or ``[N]``.
    """
    return screened_stats(p, None, n_live, tiles)[0]


def screened_stats(
    p: Problem, screen: Array | None, n_live: Array | int | None = None, tiles: Tiles | None = None
) -> tuple[TokenStats, Array | None]:
    """:func:`token_stats`, to the bit, and which columns pass each row's ``screen [N]``: those whose swept logit (as
    ``epilogue.py`` has it, before the temperature) is above it, the row's own target never.

    int32 ``[vocab tiles, N, 8]``: :func:`logitless.head.mosaic_gpu.screen.bits` says which bit is which column. Rows
    from ``n_live`` on have none.
    """
    (n, h), vocab_size = p.h.shape, p.call.vocab_size
    check(p)
    t = tiles_for(n, h, vocab_size) if tiles is None else tiles
    sums, parts, words = _partial_sums(p, n_live, t, screen)
    whole = jax.tree.map(lambda x: x[:n], epilogue.merged(sums, parts, t.tokens, p.transform))
    out = st.finish(whole, valid_targets(p.targets, vocab_size), tr.factor(p.transform))
    if words is not None:
        words = words[:, :n]
    if n_live is None:
        return out, words
    live = jnp.arange(n) < n_live
    return masked_stats(out, live), None if words is None else jnp.where(live[:, None], words, 0)
