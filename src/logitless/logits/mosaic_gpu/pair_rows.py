"""Kernels over the rows of two distributions on a Hopper GPU, a student's and its teacher's.

    statistics   sums of both in one pass; both logits are read once
    dlogits      the student's gradient, from statistics and cotangents; both are read once, dlogits written once

A block is one warpgroup. Each block owns a part of a row (a quarter of a long row) and streams tiles of both logits
through a ring of slots in shared memory; several blocks share a multiprocessor: while a block waits, another block
computes. Blocks do not meet: the parts of a row are merged by plain JAX, as what belongs to a row is computed there.
Per element of ``statistics`` two exponentials and about 35 operations, of ``dlogits`` one or two and about 15. No
matmuls.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from logitless.core.compat import Ref, gpu_interpreter, gpu_load
from logitless.core.divergences import HALF, is_dominated
from logitless.core.peaked_sums import LOW, PeakedSums, difference, joined, merged, statistics_of
from logitless.core.problem import Given, Problem, Source
from logitless.core.row_passes import swept_columns, teacher_logits
from logitless.core.shapes import PyTree
from logitless.core.stats import (
    NEG_INF,
    LogitTransform,
    StatCotangents,
    TokenStats,
    dz_at_target,
    dz_line,
    factor,
    pull_back,
    swept,
    times,
    valid_targets,
)
from logitless.logits.mosaic_gpu.layout import Destination, select

Refs = Sequence[Ref]
_COLUMNS = 1024
_LANES = 512
_SLOTS = 4
_OUT = 2
_PART = 40960
"""Columns of a part of a row, at most: its block lives for some 30 microseconds."""
_FIELDS = tuple(f.name for f in dataclasses.fields(PeakedSums))


def not_served_because(p: Problem[Source], dtype: DTypeLike) -> str | None:
    """Why these kernels do not serve rows of logits of a ``dtype`` (arrays or shapes), or ``None``."""
    assert p.teacher is not None
    if p.teacher.divergence == "jsd":
        return "JSD needs both logsumexps first"
    item = jnp.dtype(dtype).itemsize
    if item not in (2, 4) or p.policy.width % (128 // item):
        return f"rows of {p.policy.width} {jnp.dtype(dtype).name} logits are no whole 128-byte lines"
    return None


@dataclasses.dataclass(frozen=True)
class _Part:
    """A block's part of a row: tiles and offsets."""

    row: Array
    first: Array  # its first tile
    count: Array
    width: int  # columns of a row

    @staticmethod
    def own(width: int) -> tuple[_Part, Array]:
        """This block's part, and the part's number in the row."""
        tiles, parts = _cut(width)
        most = -(-tiles // parts)
        block = lax.axis_index("block")
        row, part = lax.div(block, jnp.int32(parts)), lax.rem(block, jnp.int32(parts))
        return _Part(row, part * most, jnp.minimum(most, tiles - part * most), width), part

    def copying(self, j: Array, copy: Callable[[Array, int], None]) -> None:
        """``copy(first column, columns)`` of tile ``j``; the row's last tile may be narrower."""
        tile, tiles = self.first + j, -(-self.width // _COLUMNS)
        last = self.width - (tiles - 1) * _COLUMNS
        here = jnp.where(tile == tiles - 1, last, _COLUMNS)
        select(here, sorted({_COLUMNS, last} if tiles > 1 else {last}), lambda n: copy(tile * _COLUMNS, n))

    def columns(self, j: Array, piece: int, layout: Any) -> Array:
        """Column numbers of a piece of tile ``j``."""
        ids = plgpu.broadcasted_iota(jnp.int32, (_LANES,), 0, layout=layout)
        return ids + ((self.first + j) * _COLUMNS + piece * _LANES)


def _cut(width: int) -> tuple[int, int]:
    """``(tiles of a row, parts of a row)``."""
    tiles = -(-width // _COLUMNS)
    parts = -(-width // _PART)
    return tiles, -(-tiles // -(-tiles // parts))


@dataclasses.dataclass(frozen=True)
class _Pair:
    """A block's references to both arrays of logits, and the transforms of its row; the policy's first."""

    refs: tuple[Ref, Ref]
    transforms: tuple[LogitTransform, LogitTransform]
    part: _Part

    @property
    def layout(self) -> Any:
        """The layout of a piece of a tile."""
        vec = min(_LANES // 128, *(8 // min(jnp.dtype(ref.dtype).itemsize, 4) * 2 for ref in self.refs))
        return plgpu.Layout.WG_STRIDED((_LANES,), vec_size=vec)

    def factors(self) -> tuple[Array | None, Array | None]:
        """The last factor of either logit."""
        return factor(self.transforms[0]), factor(self.transforms[1])


def _stream(refs: Refs, slots: Refs, full: Ref, part: _Part, body: Callable[..., PyTree], carry: PyTree) -> PyTree:
    """``body(tile, slot, carry)`` over a block's tiles of ``refs`` ``[rows, width]``, copied into ``slots``."""

    def load(j: Array) -> None:
        slot = lax.rem(j, jnp.int32(_SLOTS))

        def copy(start: Array, n: int) -> None:
            for ref, to in zip(refs, slots, strict=True):
                plgpu.copy_gmem_to_smem(
                    ref.at[part.row, pl.ds(start, n)], to.at[slot, pl.ds(0, n)], full.at[slot],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )  # fmt: skip

        part.copying(j, copy)

    def tile(j: Array, carry: PyTree) -> PyTree:
        slot = lax.rem(j, jnp.int32(_SLOTS))
        plgpu.barrier_wait(full.at[slot])
        carry = body(j, slot, carry)
        plgpu.commit_smem()  # everybody has read the slot
        pl.when(j + _SLOTS < part.count)(lambda: load(j + _SLOTS))
        return carry

    lax.fori_loop(jnp.int32(0), jnp.minimum(part.count, _SLOTS), lambda j, _: load(j), None)
    return lax.fori_loop(jnp.int32(0), part.count, tile, carry)


def _numbers(t: LogitTransform) -> tuple[list[Array], Callable[[Sequence[Ref], Array], LogitTransform]]:
    """A transform's arrays, and how a kernel has it back for a row from references to them."""
    there = {f.name: getattr(t, f.name) for f in dataclasses.fields(t) if getattr(t, f.name) is not None}

    def of_row(refs: Refs, row: Array) -> LogitTransform:
        return LogitTransform(**{
            name: ref[row if ref.shape[0] > 1 else 0] for name, ref in zip(there, refs, strict=True)
        })  # fmt: skip

    return [jnp.asarray(x, jnp.float32).reshape(-1) for x in there.values()], of_row


def _launch(
    p: Problem[Given],
    body: Callable[..., None],
    given: Sequence[Array],
    out: Sequence[jax.ShapeDtypeStruct],
    dtype: DTypeLike | None,
    over: Array | None = None,
) -> list[Array]:
    """The outputs of ``body(pair, given, outputs, slots, part's number)``, run in a block for every part of every row;
    or the array that is written ``over``, which may be the logits."""
    x, t = p.logits, teacher_logits(p)
    rows, width = x.shape
    assert p.teacher is not None
    (own, own_at), (other, other_at) = _numbers(p.transform), _numbers(p.teacher.transform)
    inputs, interpret = [t, *own, *other, *given], p.call.interpret
    first = [x] if over is None or over is x else [x, over]

    def kernel(x: Ref, *refs: Ref) -> None:
        larger, refs = (refs[:1], refs[1:]) if len(first) > 1 else ((), refs)
        ins, outs = refs[: len(inputs)], larger or refs[len(inputs) : len(inputs) + len(out)]
        t, own_refs, other_refs = ins[0], ins[1 : 1 + len(own)], ins[1 + len(own) : 1 + len(own) + len(other)]
        part, number = _Part.own(width)
        pair = _Pair((x, t), (own_at(own_refs, part.row), other_at(other_refs, part.row)), part)
        body(pair, ins[1 + len(own) + len(other) :], outs, refs[len(inputs) + len(out) :], number)

    launch = plgpu.kernel(
        kernel,
        out_type=tuple(out),
        scratch_types=[
            plgpu.SMEM((_SLOTS, _COLUMNS), x.dtype), plgpu.SMEM((_SLOTS, _COLUMNS), t.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=_SLOTS),
            *([] if dtype is None else [plgpu.SMEM((_OUT, _COLUMNS), dtype)]),
        ],
        grid=(rows * _cut(width)[1],),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            approx_math=x.dtype.itemsize < 4 and p.transform.softcap is None and p.teacher.transform.softcap is None,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=gpu_interpreter() if interpret is True else (interpret or None),
    )  # fmt: skip
    if over is not None:
        ref = jax.new_ref(over)
        launch(*first[:-1], ref, *inputs)
        return [jax.freeze(ref)]
    return list(launch(x, *inputs))


def _piece(buf: Ref, slot: Array, piece: int, layout: Any) -> Array:
    return gpu_load(buf.at[slot, pl.ds(piece * _LANES, _LANES)], layout)


# -- statistics ------------------------------------------------------------------------------------------------------


def _sums(pair: _Pair, given: Refs, outs: Refs, scratch: Refs, number: Array, vocab: int) -> None:
    (k, k_o), layout, part = pair.factors(), pair.layout, pair.part
    *slots, full = scratch

    def tile(j: Array, slot: Array, carry: PyTree) -> PyTree:
        a, b = PeakedSums(*carry[: len(_FIELDS)]), PeakedSums(*carry[len(_FIELDS) :])
        for piece in range(_COLUMNS // _LANES):
            inside = part.columns(j, piece, layout) < vocab
            u, v = (swept(_piece(buf, slot, piece, layout), tr) for buf, tr in zip(slots, pair.transforms, strict=True))
            u, v = jnp.where(inside, u, NEG_INF), jnp.where(inside, v, NEG_INF)
            a, b = joined(a, u, v, k, k_o), joined(b, v, u, k_o, k)
        return (*jax.tree.leaves(a), *jax.tree.leaves(b))

    def full_of(value: float) -> Array:
        return plgpu.layout_cast(jnp.full((_LANES,), value, jnp.float32), layout)

    none = jax.tree.leaves(PeakedSums.none(full_of(0.0), full_of(LOW)))
    found = _stream(pair.refs, slots, full, part, tile, (*none, *none))
    ids = plgpu.broadcasted_iota(jnp.int32, (_LANES,), 0, layout=layout)
    a, b = PeakedSums(*found[: len(_FIELDS)]), PeakedSums(*found[len(_FIELDS) :])
    values = jax.tree.leaves((merged(a, k, k_o, ids), merged(b, k_o, k, ids)))
    for out, value in zip(outs, values, strict=True):
        out[part.row, number] = value


def statistics(x: Array, p: Problem[Source]) -> TokenStats:
    """Statistics of the student's rows ``x [C, V]`` and of the pair."""
    p = p.with_logits(x)
    assert p.teacher is not None
    vocab, parts = p.call.vocab_size, _cut(x.shape[1])[1]
    out = [jax.ShapeDtypeStruct((x.shape[0], parts), jnp.float32)] * (2 * len(_FIELDS))
    found = _launch(p, functools.partial(_sums, vocab=vocab), [], out, None)
    valid = valid_targets(p.targets, vocab)
    at = jnp.where(valid, p.targets, 0)[:, None]
    own = swept_columns(jnp.take_along_axis(x, at, axis=1), p.transform.column(), vocab, at)[:, 0]
    found, own = lax.optimization_barrier((found, own))  # the same arithmetic in every program
    k, k_o = factor(p.transform.column()), factor(p.teacher.transform.column())
    ids = jnp.arange(parts, dtype=jnp.int32)
    student = merged(PeakedSums(*found[: len(_FIELDS)]), k, k_o, ids)
    teacher = merged(PeakedSums(*found[len(_FIELDS) :]), k_o, k, ids)
    return statistics_of(student, teacher, own, valid, p)


# -- dlogits ---------------------------------------------------------------------------------------------------------


def _row_numbers(p: Problem[Given], s: TokenStats, g: StatCotangents) -> list[Array]:
    """What ``_dx`` needs of a row, ``[C]`` each."""
    assert p.teacher is not None and s.pair is not None and g.divergence is not None
    k = factor(p.transform)
    a, b = dz_line(s.peak, s, g, k)
    moves = g.any_nonzero()
    shift = s.max_logp - s.pair.teacher_max_logp
    other = jnp.exp(-shift) if p.teacher.divergence == "forward_kl" else shift - s.pair.mean
    half = (HALF - s.max_logp) / (1.0 if k is None else k)  # where a probability is one half, from the peak on
    cut = jnp.where(is_dominated(s), s.peak + half, jnp.inf)
    floats = [s.peak, a, b, dz_at_target(s, g), jnp.where(moves, 1.0, 0.0), s.pair.teacher_peak]
    floats += [g.divergence * jnp.exp(s.max_logp), other, cut, g.divergence * s.pair.at_peak]
    return [jnp.where(valid_targets(p.targets, p.call.vocab_size), p.targets, -1).astype(jnp.int32), *floats]


def _dx(pair: _Pair, given: Refs, outs: Refs, scratch: Refs, number: Array, p: Problem[Given]) -> None:
    part, layout, transforms = pair.part, pair.layout, pair.transforms
    first, *given = given
    label, peak, a, b, at_target, moves, teacher_peak, own, other, cut, at_peak = (ref[part.row] for ref in given)
    k, k_o = pair.factors()
    *slots, full, buf = scratch
    assert p.teacher is not None
    to_all, forward = outs[0] if outs else pair.refs[0], p.teacher.divergence == "forward_kl"

    def tile(j: Array, slot: Array, carry: None) -> None:
        to = lax.rem(j, jnp.int32(_OUT))
        plgpu.wait_smem_to_gmem(_OUT - 1, wait_read_only=True)
        for piece in range(_COLUMNS // _LANES):
            ids = part.columns(j, piece, layout)
            inside = ids < p.call.vocab_size
            raw = _piece(slots[0], slot, piece, layout)
            u = swept(raw, transforms[0])
            v = swept(_piece(slots[1], slot, piece, layout), transforms[1])
            e = jnp.exp(times(k, u - peak))
            s = jnp.where(e == 0, 0.0, times(k, u - peak))  # 0 * inf must not appear
            d = jnp.where(ids == label, at_target, e * (a - b * s))
            if forward:  # the one product that is subtracted is by 1 for equal rows: exactly 0, also if contracted
                apart = own * (e - other * jnp.exp(times(k_o, v - teacher_peak)))
            else:
                off = jnp.where(e == 0, 0.0, difference(u - peak, v - teacher_peak, k, k_o))
                apart = own * e * (off + other)
            d = d + jnp.where(u > cut, at_peak, apart)
            d = jnp.where(jnp.logical_and(inside, moves != 0), pull_back(d, raw, transforms[0]), 0.0)
            buf[to, pl.ds(piece * _LANES, _LANES)] = d.astype(buf.dtype)
        plgpu.commit_smem()

        def copy(start: Array, n: int) -> None:
            plgpu.copy_smem_to_gmem(buf.at[to, pl.ds(0, n)], to_all.at[part.row + first[0], pl.ds(start, n)])

        part.copying(j, copy)

    _stream(pair.refs, slots, full, part, tile, None)
    plgpu.wait_smem_to_gmem(0)


def dlogits(
    x: Array,
    p: Problem[Source],
    stats: TokenStats,
    g: StatCotangents,
    dtype: DTypeLike,
    into: Destination | None = None,
) -> Array:
    """Gradient ``[C, V]`` for the student's rows ``x`` in ``dtype``; overwrites ``x`` if the dtypes match. With
    ``into`` the larger array that the gradient was written into, of that dtype."""
    p, dtype = p.with_logits(x), jnp.dtype(dtype)
    over = into.array if into is not None else x if dtype == x.dtype else None
    out = [jax.ShapeDtypeStruct(x.shape, dtype)] if over is None else []
    first = jnp.zeros((1,), jnp.int32) if into is None else into.first.astype(jnp.int32).reshape(1)
    return _launch(p, functools.partial(_dx, p=p), [first, *_row_numbers(p, stats, g)], out, dtype, over)[0]
