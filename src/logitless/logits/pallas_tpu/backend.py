"""Logits-level kernels for TPUs: what is launched on which problem.

    token_stats        statistics                                          reads the logits once
    dlogits            gradient from given cotangents                      reads them once, writes dlogits once
    stats_and_dlogits  statistics, an objective's cotangents, and dlogits  reads them once, writes dlogits once

No matmuls. Whole rows are held in VMEM up to a vocabulary of about 280,000 (``tiles.py``); beyond that
``stats_and_dlogits`` is ``token_stats`` over vocabulary tiles, whose ``RowSums`` are merged, and then ``dlogits``: two
reads. Besides the logits about 1 KiB a token moves: what a row needs (target, live, temperature, the objective's
columns) is packed into one int32 array, since a TPU stores even ``[N, 1]`` as ``[N, 128]``.

The maths is in ``core/stats.py``, the kernels in ``kernels.py``. Ragged N and V are masked in
the kernels; nothing is padded in HBM but the int32 targets.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from logitless.core import stats as S
from logitless.core.backend import Cost, Split, Way, refusal
from logitless.core.compat import Ref
from logitless.core.problem import Given, Problem
from logitless.core.stats import RowSums, StatCotangents, TokenStats, factor
from logitless.logits.chunked import Chunked, bytes_moved, cotangents_of, live_cotangents
from logitless.logits.pallas_tpu import kernels
from logitless.logits.pallas_tpu.kernels import DEAD, INVALID, Block, Numbers
from logitless.logits.pallas_tpu.rows import LOWEST, STAT_COLUMNS, STAT_FIELDS
from logitless.logits.pallas_tpu.tiles import LANES, Tiles, check, describe, tiles_for, vmem_limit
from logitless.objectives.token_program import TokenProgram

# -- launcher --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel: body, inputs in addition to the problem's, and outputs."""

    name: str
    body: Callable[[Block], None]
    scalars: dict[str, Array] = dataclasses.field(default_factory=dict)
    columns: dict[str, Array] = dataclasses.field(default_factory=dict)  # each [N]
    writes_stats: bool = False
    writes_logits: bool = False


def _launch(p: Problem[Given], k: Kernel, tiles: Tiles | None) -> dict[str, Array]:
    """Run a kernel over the blocks of ``logits [N, V]``; returns the written ``stats [N, 8]`` and ``out [N, V]``."""
    n, v = p.logits.shape
    check(n, v, p.logits.dtype)
    t = tiles or tiles_for(n, v, p.logits.dtype)
    interpret, vocab_size = p.call.interpret, p.call.vocab_size
    scalars, columns = dict(k.scalars), dict(k.columns)
    for key in ("temperature", "softcap", "scale"):
        value = getattr(p.transform, key)
        if value is not None:
            (columns if jnp.ndim(value) else scalars)[key] = jnp.asarray(value, jnp.float32)
    y = p.targets.astype(jnp.int32)
    y = jnp.where((y >= 0) & (y < vocab_size), y, INVALID)
    y = y if p.live is None else jnp.where(p.live, y, DEAD)
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
    # By the names of a Block's fields.
    outputs: dict[str, tuple[pl.BlockSpec, jax.ShapeDtypeStruct]] = {}
    if k.writes_stats:
        spec = pl.BlockSpec((t.rows, STAT_COLUMNS), by_row)
        outputs["stats"] = (spec, jax.ShapeDtypeStruct((n, STAT_COLUMNS), jnp.float32))
    if k.writes_logits:
        spec = pl.BlockSpec((t.rows, t.width), by_block)
        outputs["out"] = (spec, jax.ShapeDtypeStruct((n, v), p.logits.dtype))
    scratch: dict[str, pl.MemoryRef] = {"u": pltpu.VMEM((t.group, t.width), jnp.float32)}
    if k.writes_stats and t.tiles > 1:
        scratch["sums"] = pltpu.VMEM((t.rows, STAT_COLUMNS), jnp.float32)

    def kernel(scalar_ref: Ref, places: Ref, column_ref: Ref, x: Ref, *rest: Ref) -> None:
        refs = dict(zip((*outputs, *scratch), rest, strict=True))
        k.body(Block(t, vocab_size, names, scalar_ref, places, column_ref, x, **refs))

    # The interpreter cannot alias blocks that reach past the array; there donation changes nothing anyway.
    aliased = p.call.donate and k.writes_logits and not (interpret and (n % t.rows or v % t.width))
    size = n * v * p.logits.dtype.itemsize
    outs = pl.pallas_call(
        kernel,
        grid=(-(-n // t.rows), t.tiles),
        in_specs=in_specs,
        out_specs=[spec for spec, _ in outputs.values()],
        out_shape=[shape for _, shape in outputs.values()],
        scratch_shapes=list(scratch.values()),
        input_output_aliases={3: len(outputs) - 1} if aliased else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit(t, p.logits.dtype)
        ),
        cost_estimate=pl.CostEstimate(
            flops=20 * n * v, transcendentals=2 * n * v, bytes_accessed=size * (1 + k.writes_logits) + 1024 * n
        ),
        interpret=pltpu.InterpretParams() if interpret is True else interpret,
        name=f"logitless_{k.name}_r{t.rows}_c{t.width}",
    )(numbers, _places(y, t), packed, p.logits)
    return dict(zip(outputs, outs, strict=True))


def _places(labels: Array, t: Tiles) -> Array:
    """``[blocks, 1, rows + groups]`` int32: where each row's 128 columns with the target start; 1 for a dead group."""
    padded = jnp.pad(labels, (0, -labels.shape[0] % t.rows), constant_values=DEAD).reshape(-1, t.groups, t.group)
    starts = jnp.maximum(padded, 0) // LANES * LANES
    dead = jnp.max(padded, axis=2) == DEAD
    return jnp.concatenate([starts.reshape(-1, t.rows), dead.astype(jnp.int32)], axis=1)[:, None, :]


def _unpacked(columns: Array) -> TokenStats:
    return S.stats_of_columns([columns[:, i] for i in range(len(STAT_FIELDS))])


# -- public functions ------------------------------------------------------------------------------------------------


def supports(n: int, v: int, dtype: DTypeLike) -> bool:
    """Whether :func:`check` passes."""
    try:
        check(n, v, dtype)
    except NotImplementedError:
        return False
    return True


def token_stats(p: Problem[Given], tiles: Tiles | None = None) -> TokenStats:
    """Statistics ``[N]``; see ``logitless.logits`` for the contract.

    ``p.call.interpret``: ``True`` or a ``pltpu.InterpretParams``. ``tiles`` replaces the rule's choice.
    """
    return _unpacked(_launch(p, Kernel("token_stats", kernels.stats_body, writes_stats=True), tiles)["stats"])


def token_sums(p: Problem[Given], tiles: Tiles | None = None) -> RowSums:
    """Sums over the columns that are here, for a shard of the vocabulary; targets that are another shard's are -1."""
    body = functools.partial(kernels.stats_body, finished=False)
    out = _launch(p, Kernel("token_sums", body, writes_stats=True), tiles)["stats"]
    return RowSums(*(out[:, i] for i in range(len(dataclasses.fields(RowSums)))))


def dlogits(p: Problem[Given], stats: TokenStats, g: StatCotangents, tiles: Tiles | None = None) -> Array:
    """``[N, V]`` in the dtype of the logits; with ``p.call.donate`` it takes their place."""
    g = live_cotangents(p, g)
    moves = g.any_nonzero()
    # Per-row numbers are plain JAX. A row that does not move gets a centre at which nothing overflows.
    centre = jnp.where(moves, stats.peak, -LOWEST)
    a, b = S.dz_line(centre, stats, g, factor(p.transform))
    at_target = S.dz(stats.peak, jnp.full(moves.shape, True), stats, g)
    columns = {"centre": centre, "a": a, "b": b, "at_target": at_target, "moves": moves.astype(jnp.float32)}
    return _launch(p, Kernel("dlogits", kernels.dlogits_body, columns=columns, writes_logits=True), tiles)["out"]


def stats_and_dlogits(p: Problem[Given], program: TokenProgram, tiles: Tiles | None = None) -> tuple[TokenStats, Array]:
    """Statistics, and the dlogits of the objective in ``program``, whose cotangents are taken inside the kernel."""
    n, v = p.logits.shape
    check(n, v, p.logits.dtype)
    t = tiles or tiles_for(n, v, p.logits.dtype)
    if t.tiles > 1:
        out = token_stats(p, t)
        return out, dlogits(p, out, cotangents_of(program, program.columns, out), t)

    def named(values: Sequence[Array]) -> dict[str, Array]:
        return {f"program{i}": value for i, value in enumerate(values)}

    body = functools.partial(kernels.fused_body, run=program.run)
    both = Kernel("stats_and_dlogits", body, named(program.scalars), named(program.columns), True, True)
    written = _launch(p, both, t)
    return _unpacked(written["stats"]), written["out"]


@dataclasses.dataclass(frozen=True)
class PallasTpu(Chunked):
    """The four passes by kernels."""

    name: ClassVar[str] = "pallas_tpu"
    kernels: ClassVar[str | None] = "tpu"

    def supports(self, p: Problem[Given], split: Split) -> str | None:
        if p.teacher is not None:
            return "it has no kernel for a second distribution"
        return refusal(check, p.n, p.logits.shape[-1], p.logits.dtype)

    def tiles(self, p: Problem[Given]) -> dict[str, object]:
        return describe(p.n, p.logits.shape[-1], p.logits.dtype)

    def describe(self, p: Problem[Given], way: Way) -> Cost:
        cost = super().describe(p, way)
        if not way.in_forward or cost.tiles["tiles"] == 1:
            return cost
        # A row too wide for VMEM is swept tile by tile: once for its statistics, once more for its dlogits.
        words = f"statistics, then dlogits: a row of {p.logits.shape[-1]} columns does not fit VMEM at once"
        return dataclasses.replace(cost, way=words, bytes_moved=bytes_moved(p, 2))

    token_stats = staticmethod(token_stats)
    token_sums = staticmethod(token_sums)
    dlogits = staticmethod(dlogits)
    stats_and_dlogits = staticmethod(stats_and_dlogits)
