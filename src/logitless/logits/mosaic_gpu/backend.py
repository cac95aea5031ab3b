"""Logits-level kernels for Hopper GPUs: what is launched on which problem.

    token_stats        statistics; the logits are read once
    dlogits            gradient from given cotangents; one read, one write
    stats_and_dlogits  statistics, an objective's cotangents, and dlogits; one read of HBM, one write

dlogits have the dtype of the logits, or a requested dtype: the kernels round float32 to 16 bits while writing
(``layout.rounds``); any other conversion takes a separate pass. They are written over the logits, into an array of
their own, or into some rows of a larger array (:class:`Destination`).

The maths is in ``core/stats.py``; ``layout.py`` says where rows lie in memory and chooses tiles, ``row_sweep.py`` how a
row is worked on, ``kernels.py`` holds the kernels, and this file launches them. Rows whose ``live`` is false are not
read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from logitless.core.backend import Split, refusal
from logitless.core.compat import Ref, gpu_interpreter
from logitless.core.problem import Given, Problem
from logitless.core.stats import STAT_FIELDS, LogitTransform, StatCotangents, TokenStats, stats_of_columns
from logitless.logits.chunked import Chunked
from logitless.logits.mosaic_gpu import kernels
from logitless.logits.mosaic_gpu.kernels import Operands, Shared
from logitless.logits.mosaic_gpu.layout import Destination, Shape, Tiles, check, describe, fitted, rounds, tiles_for
from logitless.objectives.token_program import TokenProgram


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel: body, inputs in addition to the problem's arrays, and outputs."""

    body: Callable[[Operands, Shared], None]
    given: Sequence[Array] = ()  # [N] or [1] each
    writes_stats: bool = False
    dlogits: DTypeLike | None = None  # dtype of written dlogits; ``None`` if the kernel writes none
    into: Destination | None = None  # where they are written; the result is then the larger array


def _tiles(p: Problem[Given], tiles: Tiles | None, rounded: DTypeLike | None) -> Tiles:
    n, v = p.logits.shape
    if tiles is None:
        tiles = tiles_for(n, v, p.logits.dtype, rounded)
        if p.call.interpret:  # a waiting warpgroup blocks a host thread, and the host may have only two
            tiles = dataclasses.replace(tiles, warpgroups=min(tiles.warpgroups, 2))
    return fitted(tiles, n, v, p.logits.dtype.itemsize, rounded)


def _semantics(shape: Shape) -> plgpu.LoweringSemantics:
    """Lane semantics, which lower a kernel in a third of the time, since no layouts have to be inferred, where rows are
    whole 128-byte lines: they copy nothing else."""
    whole_lines = shape.width % (8 * shape.unit) == 0
    return plgpu.LoweringSemantics.Lane if whole_lines else plgpu.LoweringSemantics.Warpgroup


def _launch(p: Problem[Given], k: Kernel, tiles: Tiles | None) -> tuple[list[Array], Array | None]:
    """Run a kernel over ``logits [N, V]``; ``(statistics, dlogits)``, empty and ``None`` where it writes none."""
    n, v = p.logits.shape
    dtype, interpret = p.logits.dtype, p.call.interpret
    rounded = None if k.dlogits in (None, dtype) else k.dlogits
    in_place = p.call.donate and k.dlogits is not None and rounded is None and k.into is None
    t, shape = _tiles(p, tiles, rounded), Shape(n, v, p.call.vocab_size, 16 // dtype.itemsize)
    viewed = p.logits.reshape(shape.view)
    numbers = {key: x for key, x in dataclasses.asdict(p.transform).items() if x is not None}
    transform = [jnp.asarray(x, jnp.float32).reshape(-1) for x in numbers.values()]
    flags = [] if p.live is None else [p.live.astype(jnp.int32)]
    first = [] if k.into is None else [k.into.first.astype(jnp.int32).reshape(1)]
    inputs = [*first, p.targets.astype(jnp.int32), *flags, *transform, *k.given]
    outputs = [jax.ShapeDtypeStruct((n,), jnp.float32)] * (len(STAT_FIELDS) if k.writes_stats else 0)
    if k.dlogits is not None and not in_place and k.into is None:
        outputs.append(jax.ShapeDtypeStruct(shape.view, k.dlogits))
    large = None if k.into is None else jax.new_ref(k.into.array)
    assert large is None or (not shape.ragged and large.dtype == k.dlogits)

    def kernel(x: Ref, *refs: Any) -> None:
        *larger, refs = (refs[0], refs[1:]) if large is not None else (refs,)
        refs_in, rest = refs[: len(inputs)], refs[len(inputs) :]
        refs_out, refs_scratch = rest[: len(outputs)], rest[len(outputs) :]
        at = iter(refs_in)
        row = next(at)[0] if first else None
        out = None if k.dlogits is None else x if in_place else larger[0] if larger else refs_out[-1]
        operands = Operands(
            shape=shape,
            tiles=t,
            x=x,
            targets=next(at),
            live=next(at) if flags else None,
            transform=LogitTransform(**{key: next(at) for key in numbers}),
            out=out,
            first=row,
            stats=tuple(refs_out[: len(STAT_FIELDS)]) if k.writes_stats else (),
            given=tuple(at),
        )
        k.body(operands, Shared(*refs_scratch))

    launch = plgpu.kernel(
        kernel,
        out_type=tuple(outputs),
        scratch_types=kernels.scratch(t, dtype, k.writes_stats, rounded),
        grid=(t.blocks,),
        grid_names=("block",),
        num_threads=t.warpgroups if t.warpgroups > 1 else None,
        thread_name="wg" if t.warpgroups > 1 else None,
        compiler_params=plgpu.CompilerParams(
            # See tiles.Power. The approximate tanh is good to 2^-11 only: a softcap takes the library's.
            approx_math=dtype.itemsize < 4 and p.transform.softcap is None,
            # The kernels place their own barriers: a slot is read and written by the same threads.
            unsafe_no_auto_barriers=True,
            lowering_semantics=_semantics(shape),
        ),
        interpret=gpu_interpreter() if interpret is True else (interpret or None),
    )
    if in_place:
        ref = jax.new_ref(viewed)
        results = launch(ref, *inputs)
        return list(results or ()), jax.freeze(ref).reshape(n, v)
    if large is not None:
        results = launch(viewed, large, *inputs)
        return list(results or ()), jax.freeze(large)
    results = list(launch(viewed, *inputs))
    return (results, None) if k.dlogits is None else (results[:-1], results[-1].reshape(n, v))


def token_stats(p: Problem[Given], tiles: Tiles | None = None) -> TokenStats:
    """Statistics of ``logits [N, V]``, each ``[N]``; see ``logitless.logits`` for the contract."""
    values, _ = _launch(p, Kernel(kernels.statistics, writes_stats=True), tiles)
    return stats_of_columns(values)


def _written(p: Problem[Given], dtype: DTypeLike | None) -> jnp.dtype:
    """The dtype in which a kernel writes dlogits that are wanted in ``dtype`` (``None``: in that of the logits)."""
    own = p.logits.dtype
    return jnp.dtype(dtype) if dtype is not None and rounds(p.logits.shape[-1], own, dtype) else own


def dlogits(
    p: Problem[Given],
    stats: TokenStats,
    g: StatCotangents,
    tiles: Tiles | None = None,
    dtype: DTypeLike | None = None,
    into: Destination | None = None,
) -> Array:
    """``[N, V]`` gradient in ``dtype`` (``None``: in that of the logits), or the array ``into`` with it; rows whose
    cotangents are all zero are not read either."""
    moving = g.any_nonzero() if p.live is None else p.live & g.any_nonzero()
    known = [getattr(stats, f).astype(jnp.float32) for f in STAT_FIELDS]

    def body(o: Operands, sm: Shared) -> None:
        count = len(STAT_FIELDS)
        kernels.gradient(dataclasses.replace(o, stats=o.given[:count], given=o.given[count:]), sm)

    kernel = Kernel(body, [*known, g.logp, g.entropy, g.lse], dlogits=_written(p, dtype), into=into)
    _, out = _launch(dataclasses.replace(p, live=moving), kernel, tiles)
    assert out is not None
    return out.astype(dtype or out.dtype)


def stats_and_dlogits(
    p: Problem[Given],
    program: TokenProgram,
    tiles: Tiles | None = None,
    dtype: DTypeLike | None = None,
    into: Destination | None = None,
) -> tuple[TokenStats, Array]:
    """``(statistics, dlogits)`` of an uncoupled objective, whose cotangents are computed in the kernel; ``dtype`` and
    ``into`` as for :func:`dlogits`."""
    body = functools.partial(kernels.both, count=len(program.scalars), run=program.run)
    given = [*(s.reshape(1) for s in program.scalars), *program.columns]
    values, out = _launch(p, Kernel(body, given, writes_stats=True, dlogits=_written(p, dtype), into=into), tiles)
    assert out is not None
    return stats_of_columns(values), out.astype(dtype or out.dtype)


@dataclasses.dataclass(frozen=True)
class MosaicGpu(Chunked):
    """The passes by kernels; a shard of the vocabulary it does not have."""

    name: ClassVar[str] = "mosaic_gpu"
    kernels: ClassVar[str | None] = "gpu"

    def supports(self, p: Problem[Given], split: Split) -> str | None:
        if split.vocabulary > 1:
            return "it has no vocabulary-parallel form yet"
        if p.teacher is not None:
            return "it has no kernel for a second distribution"
        return refusal(check, p.n, p.logits.shape[-1], p.logits.dtype)

    def tiles(self, p: Problem[Given]) -> dict[str, object]:
        return describe(p.n, p.logits.shape[-1], p.logits.dtype)

    token_stats = staticmethod(token_stats)
    dlogits = staticmethod(dlogits)
    stats_and_dlogits = staticmethod(stats_and_dlogits)
