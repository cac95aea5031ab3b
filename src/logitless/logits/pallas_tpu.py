"""Logits-level kernels for TPUs (Pallas Mosaic).

    token_stats        statistics                                          reads the logits once
    dlogits            gradient from given cotangents                      reads them once, writes dlogits once
    stats_and_dlogits  statistics, an objective's cotangents, and dlogits  reads them once, writes dlogits once

No matmuls. Whole rows are held in VMEM up to a vocabulary of about 280,000 (``pallas_tpu_tiles.py``); beyond that
``stats_and_dlogits`` is ``token_stats`` over vocabulary tiles, whose ``RowSums`` are merged, and then ``dlogits``: two
reads. Besides the logits about 1 KiB a token moves: what a row needs (target, live, temperature, the objective's
columns) is packed into one int32 array, since a TPU stores even ``[N, 1]`` as ``[N, 128]``.

The maths is in ``stats.py`` and ``transform.py``, the kernels in ``pallas_tpu_kernels.py``. Ragged N and V are
masked in the kernels; nothing is padded in HBM but the int32 targets.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from logitless import stats as S
from logitless.logits import pallas_tpu_kernels as kernels
from logitless.logits.pallas_tpu_kernels import DEAD, INVALID, Block, Numbers
from logitless.logits.pallas_tpu_rows import LOWEST, STAT_COLUMNS, STAT_FIELDS
from logitless.logits.pallas_tpu_tiles import LANES, Tiles, check, describe, tiles_for, vmem_limit
from logitless.objectives.token_program import TokenProgram
from logitless.stats import RowSums, StatCotangents, TokenStats
from logitless.transform import LogitTransform

__all__ = ["check", "describe", "dlogits", "stats_and_dlogits", "supports", "tiles_for", "token_stats", "token_sums"]


# -- launcher --------------------------------------------------------------------------------------------------------


def _launch(
    name: str,
    body: Callable[..., None],
    logits: Array,
    targets: Array,
    transform: LogitTransform,
    vocab_size: int,
    live: Array | None,
    *,
    scalars: dict[str, Array],
    columns: dict[str, Array],
    tiles: Tiles,
    writes_stats: bool,
    writes_logits: bool,
    donate: bool,
    interpret: Any,
) -> tuple[Array | None, Array | None]:
    """Run ``body`` over the blocks of ``logits [N, V]``; ``(statistics [N, 8], dlogits [N, V])``, or ``None``."""
    n, v = logits.shape
    check(n, v, logits.dtype)
    t = tiles
    blocks = -(-n // t.rows)
    for key in ("temperature", "softcap", "scale"):
        value = getattr(transform, key)
        if value is not None:
            (columns if jnp.ndim(value) else scalars)[key] = jnp.asarray(value, jnp.float32)
    y = targets.astype(jnp.int32)
    y = jnp.where((y >= 0) & (y < vocab_size), y, INVALID)
    y = y if live is None else jnp.where(live, y, DEAD)
    bits = [jax.lax.bitcast_convert_type(c.astype(jnp.float32), jnp.int32) for c in columns.values()]
    packed = jnp.stack([y, *bits], axis=1)
    numbers = jnp.stack([jnp.float32(0), *(jnp.asarray(s, jnp.float32) for s in scalars.values())])
    names = Numbers(("", *scalars), ("label", *columns))

    by_row = lambda i, j: (i, 0)  # noqa: E731
    by_block = lambda i, j: (i, j)  # noqa: E731
    in_specs = [
        pl.BlockSpec(memory_space=pltpu.SMEM),
        pl.BlockSpec((1, 1, t.rows + t.groups), lambda i, j: (i, 0, 0), memory_space=pltpu.SMEM),
        pl.BlockSpec((t.rows, packed.shape[1]), by_row),
        pl.BlockSpec((t.rows, t.width), by_block),
    ]
    out_specs, out_shapes = [], []
    if writes_stats:
        out_specs.append(pl.BlockSpec((t.rows, STAT_COLUMNS), by_row))
        out_shapes.append(jax.ShapeDtypeStruct((n, STAT_COLUMNS), jnp.float32))
    if writes_logits:
        out_specs.append(pl.BlockSpec((t.rows, t.width), by_block))
        out_shapes.append(jax.ShapeDtypeStruct((n, v), logits.dtype))
    several = writes_stats and t.tiles > 1
    scratch = [pltpu.VMEM((t.group, t.width), jnp.float32)]
    scratch += [pltpu.VMEM((t.rows, STAT_COLUMNS), jnp.float32)] if several else []

    def kernel(scalar_ref: Any, places: Any, column_ref: Any, x: Any, *rest: Any) -> None:
        outputs, (z, *sums) = rest[: len(out_shapes)], rest[len(out_shapes) :]
        block = Block(t, vocab_size, names, scalar_ref, places, column_ref, x, z)
        body(block, *outputs, *((*sums, None)[:1] if writes_stats and not writes_logits else ()))

    # The interpreter cannot alias blocks that reach past the array; there donation changes nothing anyway.
    aliased = donate and writes_logits and not (interpret and (n % t.rows or v % t.width))
    size = n * v * logits.dtype.itemsize
    outs = pl.pallas_call(
        kernel,
        grid=(blocks, t.tiles),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shapes,
        scratch_shapes=scratch,
        input_output_aliases={3: len(out_shapes) - 1} if aliased else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit(t, logits.dtype)
        ),
        cost_estimate=pl.CostEstimate(
            flops=20 * n * v, transcendentals=2 * n * v, bytes_accessed=size * (1 + writes_logits) + 1024 * n
        ),
        interpret=pltpu.InterpretParams() if interpret is True else interpret,
        name=f"logitless_{name}_r{t.rows}_c{t.width}",
    )(numbers, _places(y, t), packed, logits)
    return (outs[0] if writes_stats else None), (outs[-1] if writes_logits else None)


def _places(labels: Array, t: Tiles) -> Array:
    """``[blocks, 1, rows + groups]`` int32: where each row's 128 columns with the target start; 1 for a dead group."""
    padded = jnp.pad(labels, (0, -labels.shape[0] % t.rows), constant_values=DEAD).reshape(-1, t.groups, t.group)
    starts = jnp.maximum(padded, 0) // LANES * LANES
    dead = jnp.max(padded, axis=2) == DEAD
    return jnp.concatenate([starts.reshape(-1, t.rows), dead.astype(jnp.int32)], axis=1)[:, None, :]


def _unpacked(columns: Array) -> TokenStats:
    fields = {name: columns[:, i] for i, name in enumerate(STAT_FIELDS)}
    return TokenStats(**dict(fields, is_top1=fields["is_top1"] > 0))


# -- public functions ------------------------------------------------------------------------------------------------


def supports(n: int, v: int, dtype: Any) -> bool:
    """Whether :func:`check` passes."""
    try:
        check(n, v, dtype)
    except NotImplementedError:
        return False
    return True


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
    """Statistics ``[N]`` of ``logits [N, V]`` at ``targets [N]`` int32; see ``logitless.logits`` for the contract.

    ``interpret``: ``True`` or a ``pltpu.InterpretParams``. ``tiles`` replaces the rule's choice.
    """
    n, v = logits.shape
    check(n, v, logits.dtype)
    out, _ = _launch(
        "token_stats", kernels.stats_body, logits, targets, transform, vocab_size, live, scalars={}, columns={},
        tiles=tiles or tiles_for(n, v, logits.dtype), writes_stats=True, writes_logits=False, donate=False,
        interpret=interpret,
    )  # fmt: skip
    assert out is not None
    return _unpacked(out)


def token_sums(
    logits: Array,
    targets: Array,
    transform: LogitTransform,
    vocab_size: int,
    live: Array | None,
    *,
    tiles: Tiles | None = None,
    interpret: Any = False,
) -> RowSums:
    """Sums over the columns that are here, for a shard of the vocabulary; targets that are another shard's are -1."""
    n, v = logits.shape
    body = functools.partial(kernels.stats_body, finished=False)
    out, _ = _launch(
        "token_sums", body, logits, targets, transform, vocab_size, live, scalars={}, columns={},
        tiles=tiles or tiles_for(n, v, logits.dtype), writes_stats=True, writes_logits=False, donate=False,
        interpret=interpret,
    )  # fmt: skip
    assert out is not None
    return RowSums(*(out[:, i] for i in range(len(dataclasses.fields(RowSums)))))


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
    """``[N, V]`` in the dtype of the logits; with ``donate`` it takes their place."""
    n, v = logits.shape
    check(n, v, logits.dtype)
    if live is not None:
        g = jax.tree.map(lambda c: jnp.where(live, c, 0.0), g)
    moves = g.any_nonzero()
    # Per-row numbers are plain JAX. A row that does not move gets a centre at which nothing overflows.
    centre = jnp.where(moves, stats.max_logit, -LOWEST)
    a, b = S.dz_line(centre, stats.entropy, stats.max_logit, stats.max_logp, g)
    at_target = S.dz(
        stats.max_logit, jnp.full(moves.shape, True), stats.logp, stats.entropy, stats.max_logit, stats.max_logp, g
    )
    columns = {"centre": centre, "a": a, "b": b, "at_target": at_target, "moves": moves.astype(jnp.float32)}
    _, out = _launch(
        "dlogits", kernels.dlogits_body, logits, targets, transform, vocab_size, live, scalars={}, columns=columns,
        tiles=tiles or tiles_for(n, v, logits.dtype), writes_stats=False, writes_logits=True, donate=donate,
        interpret=interpret,
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
    """Statistics, and the dlogits of the objective in ``program``, whose cotangents are taken inside the kernel."""
    n, v = logits.shape
    check(n, v, logits.dtype)
    t = tiles or tiles_for(n, v, logits.dtype)
    if t.tiles > 1:
        out = token_stats(logits, targets, transform, vocab_size, live, tiles=t, interpret=interpret)
        g_logp, g_entropy = program.run(program.scalars, program.columns, out.logp, out.entropy)
        g = StatCotangents(g_logp, g_entropy, jnp.zeros_like(g_logp))
        d = dlogits(logits, targets, transform, vocab_size, live, out, g, donate=donate, tiles=t, interpret=interpret)
        return out, d

    def named(values: Sequence[Array]) -> dict[str, Array]:
        return {f"program{i}": value for i, value in enumerate(values)}

    def body(block: Block, stats: Any, out: Any) -> None:
        kernels.fused_body(block, stats, out, run=program.run)

    found, written = _launch(
        "stats_and_dlogits", body, logits, targets, transform, vocab_size, live, scalars=named(program.scalars),
        columns=named(program.columns), tiles=t, writes_stats=True, writes_logits=True, donate=donate,
        interpret=interpret,
    )  # fmt: skip
    assert found is not None and written is not None
    return _unpacked(found), written
