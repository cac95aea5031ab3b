"""Forward sweep of the fused head on TPU: token statistics, and the expected head row, with no logits in HBM.

For a tile of tokens the vocabulary is swept tile by tile; with ``x = h W^T + bias`` and ``z = k u = transform(x)``, in
VMEM only, the columns other than the target are carried as :class:`logitless.stats.RowSums` relative to a running
maximum ``m`` (:func:`_absorb`), and, when the direction is wanted, so is

    E[n, :] = sum_{v != y} exp(k (u_v - m)) slope_v W_v       slope = dz/dx, taken in here only if a softcap varies it

with the exponentials rounded to the head's dtype before the matmul, as dlogits are. This is flash attention with
queries ``h`` and keys and values ``W``. With and without the direction the statistics come from the same instructions
on the same tiles: they are bit-identical.

For a sparse backward (``sparse.py``) the sweep also gives, per token tile, the maximum over its tokens of

    z_v - b        b = max(floor, logsumexp of the columns seen so far), floor known beforehand: the target's logit

for every column v (at a token's own target its other tokens count). ``b`` is at most the logsumexp of the row, so no
column is missed; a column swept before the row's leading one may look more probable than it is. Tokens that do not
count have an infinite floor. Two more operations an element, ``4 V`` bytes written per token tile.

Cost: one matmul (``2 N H V`` FLOP) for statistics, two with the direction. HBM bytes: W once per token tile
(``ceil(N / tokens) V H b``), ``N H b`` of hidden states, ``4 N H`` written for ``E``.

Tails are static: the last vocabulary step works on ``vocab_size mod tile`` columns rounded up to whole lanes; only the
columns within that last lane group are masked. Nothing is padded in HBM.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from logitless import compat
from logitless.head.pallas_tpu.kept import Kept, block_of_step
from logitless.head.pallas_tpu.operands import (
    LOG_ZERO,
    Launch,
    Operands,
    add_head_rows,
    clear_dead,
    clear_outside,
    column_ids,
    compiler_params,
    head_tile,
    outer_bytes,
    over_vocabulary,
    raw_logits,
    sweep_blocks,
)
from logitless.head.pallas_tpu.tiles import LANES, SUBLANES, Part, Spec, fill_rows, over_parts, zero_rows
from logitless.pytree import register
from logitless.stats import NEG_INF, RowSums
from logitless.transform import LogitTransform, factor, slope, swept, times

LOW = -1e30
"""Start of the running maximum: finite, so that no difference of two maxima is ``inf - inf``."""

SUMS = 8
"""Columns of the output of per-token sums: m, S, A, Q, u_y, x_y, and two unused."""


@register
@dataclasses.dataclass(frozen=True)
class _Out:
    """What the sweep writes: shapes, block specs, references, then arrays."""

    sums: Any  # [N, SUMS]
    expected: Any = None  # [N, H]: E; with LoRA [N, H + R] (``lora.py``)
    high: Any = None  # [N, H], in the place of E: its upper half, in the hidden states' dtype
    rest: Any = None  # [N, H]: what that leaves of E
    maxima: Any = None  # [token tiles, 1, vocab_size]
    kept: Any = None  # [V, room] or [room, V], in HBM: exponentials of the first tokens
    tops: Any = None  # [N, vocabulary tiles]: the maximum that each tile's exponentials are relative to


def _absorb(sums: RowSums, u: Array, is_target: Array, k: Array | None) -> tuple[RowSums, Array, Array, Array]:
    """``sums [T, 1]`` with the columns of ``u [T, C]`` taken in; also ``exp(s)``, the factor on what was there, and
    ``s = k (u - m)``, ``-inf`` at the target.

    The same sums as ``merge(sums, row_sums(u, is_target, k), k)``, relative to the new maximum at once, so that the
    exponentials serve the expected head row too.
    """
    others = jnp.where(is_target, NEG_INF, u)
    m = jnp.maximum(sums.maximum, jnp.max(others, axis=1, keepdims=True))
    shifted = times(k, others - m)
    e = jnp.exp(shifted)
    step = times(k, sums.maximum - m)
    a = jnp.exp(step)

    def total(x: Array) -> Array:
        return jnp.sum(x, axis=1, keepdims=True)

    absorbed = RowSums(
        maximum=m,
        total=a * sums.total + total(e),
        centred=a * (sums.centred + step * sums.total) + total(e * jnp.maximum(shifted, LOG_ZERO)),
        squares=a * a * sums.squares + total(e * e),
        target=sums.target,
    )
    return absorbed, e, a, shifted


def upper_half(x: Array) -> Array:
    """float32 numbers rounded to those of bfloat16, by their bits: no compiler takes ``x - upper_half(x)`` for zero."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type((bits + 0x8000) & -0x10000, jnp.float32)


def _kernel(spec: Spec, n_live: Any, refs: Operands, out: _Out, acc: RowSums, *scratch: Any) -> None:
    """One (token tile, vocabulary tile) step; scratch carries the sums (``acc.target`` the target's raw logit), the
    output block ``E``. If that leaves in halves, scratch carries it, and steps behind the last tile of the vocabulary
    write a part of the tokens each."""
    i, j = pl.program_id(0), pl.program_id(1)
    live = spec.live(i, n_live)
    expected = scratch[0] if scratch else out.expected

    def transform_of(rows: Any) -> LogitTransform:
        return spec.transform(refs.scalars, None if refs.temperature is None else refs.temperature[rows, :])

    @pl.when(live & (j == 0))
    def _() -> None:
        acc.maximum[...] = jnp.full_like(acc.maximum, LOW)
        for ref in jax.tree.leaves((acc.total, acc.centred, acc.squares, acc.target)):
            ref[...] = jnp.zeros_like(ref)
        if expected is not None:
            zero_rows(expected)

    dead = spec.dead_rows(i, n_live)
    if out.maxima is not None and dead is not None:

        @pl.when(live & (j == 0) & dead[0])
        def _() -> None:  # a column's maximum is over all rows of the block, and a dead one may hold NaN
            clear_dead(refs.h, 0, dead[1])
            if refs.low is not None:
                clear_dead(refs.low, 0, dead[1])

    def step(width: int, masked: bool) -> None:
        if masked and expected is not None:
            clear_outside(spec, refs, width)
        if out.maxima is not None:
            out.maxima[0, :, :width] = jnp.full((1, width), NEG_INF, jnp.float32)
        work = spec.tiles.vocab * refs.h.shape[1] * (1 if expected is None else 2)
        unit = LANES if spec.kept else SUBLANES  # what is kept of a [V, H] head has tokens along the lanes
        over_parts(spec.tiles.tokens, work, unit, lambda part: rows_of(part.rows, width, masked))

    def rows_of(rows: Any, width: int, masked: bool) -> None:
        transform = transform_of(rows)
        k = factor(transform)
        w = head_tile(spec, refs.weight, width)
        x = raw_logits(spec, refs, w, rows)
        u = swept(x, transform)
        column = column_ids(x)
        if masked:
            u = jnp.where(column < spec.tail, u, NEG_INF)
        is_target = column == refs.targets[rows, :] - j * spec.tiles.vocab
        sums, e, a, shifted = _absorb(jax.tree.map(lambda ref: ref[rows, :], acc), u, is_target, k)
        acc.maximum[rows, :], acc.total[rows, :] = sums.maximum, sums.total
        acc.centred[rows, :], acc.squares[rows, :] = sums.centred, sums.squares
        acc.target[rows, :] += jnp.sum(jnp.where(is_target, x, 0.0), axis=1, keepdims=True)
        if out.maxima is not None:
            top = times(k, sums.maximum)
            bound = jnp.maximum(refs.floor[rows, :], top + jnp.log(sums.total))
            found = jnp.max(shifted + (top - bound), axis=0, keepdims=True)
            out.maxima[0, :, :width] = jnp.maximum(out.maxima[0, :, :width], found)
        if expected is None:
            return
        if spec.has_softcap:
            # Columns at -inf have no weight; their slope may be 0 * inf.
            bend = slope(x, transform)
            assert bend is not None
            e = jnp.where(e > 0, e * bend, 0.0)
        e = e.astype(w.dtype)
        add_head_rows(spec, refs, expected, rows, a, e, w)
        if spec.kept:
            pl.when(i < spec.kept_steps)(lambda: keep(e, rows, width))
            tile = lax.broadcasted_iota(jnp.int32, (rows.size, out.tops.shape[1]), 1)
            out.tops[rows, :] = jnp.where(tile == j, sums.maximum, out.tops[rows, :])

    def keep(e: Array, rows: Any, width: int) -> None:
        if spec.layout == "vh":
            out.kept[:width, rows] = e.T
        else:
            out.kept[rows, :width] = e

    over_vocabulary(spec, live & (j < spec.vocab_steps) if scratch else live, step)

    @pl.when(live & (j == spec.vocab_steps - 1))
    def _() -> None:
        s = jax.tree.map(lambda ref: ref[...], acc)
        m, x_y = jnp.where(s.maximum > LOW, s.maximum, NEG_INF), s.target
        for i, value in enumerate((m, s.total, s.centred, s.squares, swept(x_y, transform_of(slice(None))), x_y)):
            out.sums[:, i : i + 1] = value

    if scratch:
        block, size = i * spec.leaving + j - spec.vocab_steps, out.high.shape[0]

        @pl.when(live & (j >= spec.vocab_steps) & (block * size < spec.n))
        def _() -> None:
            first = (j - spec.vocab_steps) * size

            def of(part: Part) -> Array:
                return expected[pl.ds(first + part.first, part.size), :]

            fill_rows(out.high, lambda part: upper_half(of(part)).astype(out.high.dtype))
            fill_rows(out.rest, lambda part: (of(part) - upper_half(of(part))).astype(out.rest.dtype))


def _block_of_half(spec: Spec, width: int) -> pl.BlockSpec:
    """A part of a token tile's rows of E on their way out. Until they are written the first part's place is held, and
    behind the last token the last part's."""
    size, last = spec.tiles.tokens // spec.leaving, pl.cdiv(spec.n * spec.leaving, spec.tiles.tokens) - 1

    def at(i: Any, j: Any, n_live: Any) -> tuple[Any, Any]:
        return jnp.minimum(i * spec.leaving + jnp.maximum(j - spec.vocab_steps, 0), last), 0

    return pl.BlockSpec((size, width), at)


def forward_sweep(
    k: Launch, direction: bool, room: int = 0, halves: bool = False
) -> tuple[RowSums, Array, Array | tuple[Array, Array] | None, Array | None, Kept | None]:
    """``(sums [N], raw target logit [N], E [N, H] or None, maxima [token tiles, vocab_size] or None, exponentials or
    None)``, E ``[N, H + R]`` with LoRA; what belongs to dead tiles is not written. A ``floor`` among the operands asks
    for the maxima, a direction with ``spec.kept`` tokens for exponentials, with room for ``room`` tokens. With
    ``halves`` E is two arrays if hidden states have 16 bits, its upper half and what that leaves."""
    halves = halves and k.operands.h.dtype != jnp.float32
    spec, x = k.spec, k.operands
    (n, width), tokens, passes = x.h.shape, spec.tiles.tokens, spec.token_steps
    width += k.rank
    if halves:
        spec = dataclasses.replace(spec, leaving=max(tokens // LANES, 1))
        k = dataclasses.replace(k, spec=spec)

    # Dead tiles keep their own output block: on a chip with two cores another core may hold the last live one.
    def own(i: Any, j: Any, n_live: Any) -> tuple[Any, Any]:
        return i, 0

    blocks = _Out(pl.BlockSpec((tokens, SUMS), own))
    shapes = _Out(jax.ShapeDtypeStruct((n, SUMS), jnp.float32))
    moved = passes * (x.weight.nbytes + outer_bytes(k)) + x.h.nbytes
    if direction and halves:
        half, block = compat.hbm_output((n, width), x.h.dtype, spec.interpret), _block_of_half(spec, width)
        blocks = dataclasses.replace(blocks, high=block, rest=block)
        shapes = dataclasses.replace(shapes, high=half, rest=half)
    elif direction:
        block = pl.BlockSpec((tokens, width), own, pipeline_mode=pl.Buffered(1))
        blocks = dataclasses.replace(blocks, expected=block)
        shapes = dataclasses.replace(shapes, expected=compat.hbm_output((n, width), jnp.float32, spec.interpret))
    moved += 4 * n * width * direction
    if x.floor is not None:
        block = pl.BlockSpec((1, 1, spec.tiles.vocab), lambda i, j, n_live: (i, 0, j))
        blocks = dataclasses.replace(blocks, maxima=block)
        shape = jax.ShapeDtypeStruct((passes, 1, spec.vocab_size), jnp.float32)
        shapes = dataclasses.replace(shapes, maxima=shape)
        moved += 4 * passes * spec.vocab_size
    if direction and spec.kept:
        plane = (spec.vocab, room) if spec.layout == "vh" else (room, spec.vocab)
        item = x.weight.dtype
        tops = pl.BlockSpec((tokens, spec.vocab_steps), own)
        blocks = dataclasses.replace(blocks, kept=block_of_step(spec), tops=tops)
        shapes = dataclasses.replace(
            shapes,
            kept=compat.hbm_output(plane, item, spec.interpret),
            tops=jax.ShapeDtypeStruct((n, spec.vocab_steps), jnp.float32),
        )
        moved += spec.kept * spec.vocab * item.itemsize
    scratch: Any = RowSums(*[pltpu.VMEM((tokens, 1), jnp.float32)] * 5)  # type: ignore[arg-type]
    what = "direction" if direction else "stats" if x.floor is None else "maxima"
    out = pl.pallas_call(
        functools.partial(_kernel, spec),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(passes, spec.vocab_steps + spec.leaving),
            in_specs=[sweep_blocks(k)],
            out_specs=blocks,
            scratch_shapes=[scratch, *[pltpu.VMEM((tokens, width), jnp.float32)] * halves],
        ),
        out_shape=shapes,
        compiler_params=compiler_params(spec),
        cost_estimate=pl.CostEstimate(
            flops=(2 if direction else 1) * 2 * n * width * spec.vocab_size,
            transcendentals=n * spec.vocab_size,
            bytes_accessed=moved,
        ),
        name=f"head_{what}_t{tokens}_v{spec.tiles.vocab}",
        interpret=spec.interpret,
    )(k.n_live, x)
    sums = out.sums
    maxima = None if out.maxima is None else out.maxima[:, 0]
    kept = None if out.kept is None else Kept(out.kept, out.tops[: spec.kept], sums[: spec.kept, 5], spec.tiles.vocab)
    expected = (out.high, out.rest) if halves else out.expected
    return RowSums(*(sums[:, k] for k in range(5))), sums[:, 5], expected, maxima, kept
