"""Logits-level kernels for Hopper GPUs (Pallas Mosaic GPU).

    token_stats        statistics; the logits are read once
    dlogits            gradient from given cotangents; one read, one write
    stats_and_dlogits  statistics, an objective's cotangents, and dlogits; one read of HBM, one write

The maths is in ``stats.py`` and ``transform.py``; ``mosaic_gpu_layout.py`` says where rows lie in memory,
``mosaic_gpu_tiles.py`` how one is worked on, ``mosaic_gpu_kernels.py`` holds the kernels, and this file chooses tiles
and launches. Rows whose ``live`` is false
are not read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from logitless.compat import gpu_interpreter, mosaic_gpu_reason
from logitless.logits import mosaic_gpu_kernels as kernels
from logitless.logits.mosaic_gpu_kernels import STAT_FIELDS, Operands, Shared
from logitless.logits.mosaic_gpu_layout import Shape, Tiles
from logitless.objectives.token_program import TokenProgram
from logitless.stats import StatCotangents, TokenStats
from logitless.transform import LogitTransform

_DTYPES = ("float32", "bfloat16", "float16")
_SHARED_BYTES = 216 * 1024  # of the 227 KiB a Hopper block may have; the rest holds barriers and reductions
_BARRIERS = 32  # a Mosaic barrier array holds at most this many
_INT32 = 2**31 - 1
_WARPGROUPS = 4  # 512 threads of 128 registers: no kernel spills in its loops
_TILE_BYTES = 8192
_LANES = 512
_BLOCKS = 132  # streaming multiprocessors of an H100 or H200


def tiles_for(n: int, v: int, dtype: Any) -> Tiles:
    """The rule: four warpgroups, 8 KiB tiles, a ring of three slots, as many slots as shared memory holds.

    On an H200 at (4096, 151936) bfloat16 that takes 1.03 times a plain copy; two warpgroups 1.22, 6 KiB tiles 1.07
    (docs/benchmarks.md). Vocabularies of fewer than eight tiles get smaller ones, down to ``_LANES`` columns, so that
    each warpgroup has two: one is swept while the other is copied.
    """
    itemsize = jnp.dtype(dtype).itemsize
    columns = max(_TILE_BYTES // itemsize, _LANES)
    while columns > _LANES and -(-v // columns) < 2 * _WARPGROUPS:
        columns //= 2
    return fitted(Tiles(_WARPGROUPS, columns, _BARRIERS, 3, 1, _LANES, _BLOCKS), n, v, itemsize)


def fitted(t: Tiles, n: int, v: int, itemsize: int) -> Tiles:
    """``t`` with slots and ring cut down to shared memory, to the barrier limit and to the tiles there are.

    Tiles of ragged rows grow by ``lanes`` where the last one would hold less than a word of some row.
    """
    shape = Shape(n, v, v, 16 // itemsize)
    while not shape.suits(t):
        t = dataclasses.replace(t, columns=t.columns + t.lanes)
    tiles = shape.tiles(t)
    t = dataclasses.replace(t, warpgroups=min(t.warpgroups, tiles))
    room = _SHARED_BYTES - (t.warpgroups - 1) * 16 * t.lanes
    slots = min(t.slots, room // (t.warpgroups * t.columns * itemsize), _BARRIERS // t.warpgroups)
    slots = max(min(slots, -(-tiles // t.warpgroups)), 1)
    ring = max(min(t.ring, slots // 2), 1)
    return dataclasses.replace(t, slots=slots, ring=ring, blocks=min(t.blocks, n))


def check(n: int, v: int, dtype: Any, platform: str = "gpu", interpret: bool = False) -> None:
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


def describe(n: int, v: int, dtype: Any) -> dict[str, Any]:
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


def _launch(
    body: Callable[..., None],
    logits: Array,
    targets: Array,
    transform: LogitTransform,
    vocab_size: int,
    live: Array | None,
    extra: Sequence[Array],
    *,
    tiles: Tiles | None,
    writes_stats: bool,
    writes_logits: bool,
    donate: bool,
    interpret: Any,
) -> tuple[list[Array], Array | None]:
    """Run ``body(operands, shared, shape, tiles, *extra_refs)``; returns ``(statistics, dlogits)``."""
    n, v = logits.shape
    if tiles is None:
        tiles = tiles_for(n, v, logits.dtype)
        if interpret:  # a warpgroup that waits holds one of the host's threads there, and there may be only two
            tiles = dataclasses.replace(tiles, warpgroups=min(tiles.warpgroups, 2))
    tiles = fitted(tiles, n, v, logits.dtype.itemsize)
    shape = Shape(n, v, vocab_size, 16 // logits.dtype.itemsize)
    viewed = logits.reshape(shape.view)
    numbers = {k: x for k, x in dataclasses.asdict(transform).items() if x is not None}
    given = [jnp.asarray(x, jnp.float32).reshape(-1) for x in numbers.values()]
    flags = [] if live is None else [live.astype(jnp.int32)]
    inputs = [targets.astype(jnp.int32), *flags, *given, *extra]
    outputs = [jax.ShapeDtypeStruct((n,), jnp.float32)] * (len(STAT_FIELDS) if writes_stats else 0)
    if writes_logits and not donate:
        outputs.append(jax.ShapeDtypeStruct(shape.view, logits.dtype))

    def kernel(x: Any, *refs: Any) -> None:
        refs_in, rest = refs[: len(inputs)], refs[len(inputs) :]
        refs_out, refs_scratch = rest[: len(outputs)], rest[len(outputs) :]
        at = iter(refs_in)
        y = next(at)
        flag = next(at) if flags else None
        moved = LogitTransform(**{k: next(at) for k in numbers})
        more = list(at)
        out = None
        if writes_logits:
            out = x if donate else refs_out[-1]
        stats = tuple(refs_out[: len(STAT_FIELDS)]) if writes_stats else ()
        body(Operands(x, y, flag, moved, out, stats), Shared(*refs_scratch), shape, tiles, *more)

    launch = plgpu.kernel(
        kernel,
        out_type=tuple(outputs),
        scratch_types=kernels.scratch(tiles, logits.dtype, writes_stats),
        grid=(tiles.blocks,),
        grid_names=("block",),
        num_threads=tiles.warpgroups if tiles.warpgroups > 1 else None,
        thread_name="wg" if tiles.warpgroups > 1 else None,
        compiler_params=plgpu.CompilerParams(
            # See mosaic_gpu_tiles.Power. The approximate tanh is good to 2^-11 only: a softcap takes the library's.
            approx_math=logits.dtype.itemsize < 4 and transform.softcap is None,
            # The kernels place their own barriers: a slot is read and written by the same threads.
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=gpu_interpreter() if interpret is True else (interpret or None),
    )
    if donate and writes_logits:
        ref = jax.new_ref(viewed)
        results = launch(ref, *inputs)
        return list(results or ()), jax.freeze(ref).reshape(n, v)
    results = list(launch(viewed, *inputs))
    return (results[:-1], results[-1].reshape(n, v)) if writes_logits else (results, None)


def _as_stats(values: Sequence[Array]) -> TokenStats:
    fields = dict(zip(STAT_FIELDS, values, strict=True))
    return TokenStats(**{**fields, "is_top1": fields["is_top1"] > 0})


def token_stats(
    logits: Array,
    targets: Array,
    transform: LogitTransform,
    vocab_size: int,
    live: Array | None,
    *,
    tiles: Tiles | None = None,
    interpret: Any = False,
) -> TokenStats:
    """Statistics of ``logits [N, V]``, each ``[N]``; see ``reference.token_stats`` for the contract."""
    values, _ = _launch(
        kernels.statistics, logits, targets, transform, vocab_size, live, (),
        tiles=tiles, writes_stats=True, writes_logits=False, donate=False, interpret=interpret,
    )  # fmt: skip
    return _as_stats(values)


def dlogits(
    logits: Array,
    targets: Array,
    transform: LogitTransform,
    vocab_size: int,
    live: Array | None,
    stats: TokenStats,
    g: StatCotangents,
    *,
    donate: bool = False,
    tiles: Tiles | None = None,
    interpret: Any = False,
) -> Array:
    """``[N, V]`` gradient in the dtype of the logits; rows whose cotangents are all zero are not read either."""
    wanted = g.any_nonzero() if live is None else live & g.any_nonzero()
    known = [getattr(stats, f).astype(jnp.float32) for f in STAT_FIELDS]

    def body(o: Operands, sm: Shared, shape: Shape, t: Tiles, *refs: Any) -> None:
        o = dataclasses.replace(o, stats=tuple(refs[: len(STAT_FIELDS)]))
        kernels.gradient(o, sm, shape, t, refs[len(STAT_FIELDS) :])

    _, out = _launch(
        body, logits, targets, transform, vocab_size, wanted, [*known, g.logp, g.entropy, g.lse],
        tiles=tiles, writes_stats=False, writes_logits=True, donate=donate, interpret=interpret,
    )  # fmt: skip
    assert out is not None
    return out


def stats_and_dlogits(
    logits: Array,
    targets: Array,
    transform: LogitTransform,
    vocab_size: int,
    live: Array | None,
    program: TokenProgram,
    *,
    donate: bool = False,
    tiles: Tiles | None = None,
    interpret: Any = False,
) -> tuple[TokenStats, Array]:
    """``(statistics, dlogits)`` of an uncoupled objective, whose cotangents are computed in the kernel."""
    count = len(program.scalars)

    def body(o: Operands, sm: Shared, shape: Shape, t: Tiles, *refs: Any) -> None:
        kernels.both(o, sm, shape, t, refs[:count], refs[count:], program.run)

    extra = [*(s.reshape(1) for s in program.scalars), *program.columns]
    values, out = _launch(
        body, logits, targets, transform, vocab_size, live, extra,
        tiles=tiles, writes_stats=True, writes_logits=True, donate=donate, interpret=interpret,
    )  # fmt: skip
    assert out is not None
    return _as_stats(values), out
