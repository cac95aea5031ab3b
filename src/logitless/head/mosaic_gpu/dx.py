"""dx of some tokens and columns on a Hopper GPU, from hidden states and known statistics: one matmul, no logits.

The matmul is that of ``pipeline.py``. With numbers of a row alone (``stats.dz_line``),

    t = k (u - peak)       e = 2^t       dx = e (a - b t), and at the row's target a number of its own

``k`` and ``b`` in units of ln 2; all but ``k`` times the slope of the raw logits, which is ``1 - u^2`` more under a
softcap. The epilogue computes that, rounds it once and writes it through shared memory, 64 columns at a time. Columns
that do not count, and rows without a cotangent, are written as zeros. The mass that a row has in the columns that count
is summed beside it, in float32. Which tiles of tokens and columns are visited only the device may know (``blocks.py``);
the others are left as they are.

    matmuls   one, N x H x K of those
    HBM       what the matmul reads; 2 N K bytes of dx written, and 4 bytes per token and 256 columns
    memory    no logits, no float32 dx
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from logitless import transform as tr
from logitless.head.mosaic_gpu import epilogue, pipeline
from logitless.head.mosaic_gpu.blocks import Visits, all_of
from logitless.head.mosaic_gpu.epilogue import LOG2E, LOW
from logitless.head.mosaic_gpu.limits import TILE_K
from logitless.head.mosaic_gpu.pipeline import Pipeline, Running, token_rows, whole_bias
from logitless.head.mosaic_gpu.schedule import COMPUTE, Listed, Tiles, tiles_for
from logitless.head.slabs import Known
from logitless.problem import Head, Problem
from logitless.stats import dz_at_target, dz_line
from logitless.transform import LogitTransform

_ROW_NUMBERS = 5


def row_numbers(p: Problem, known: Known) -> Array:
    """float32 ``[5, N]``: peak, k, a, the target's own, b; zeros in rows whose dx is zero whatever their logits are."""
    s, g, t = known.stats, known.g, p.transform
    one, k = jnp.ones((p.n,), jnp.float32), tr.factor(t)
    slope = tr.times(tr.factor(dataclasses.replace(t, softcap=None)), one)
    a, b = dz_line(s.peak, s, g, k)
    at_target = dz_at_target(s, g)
    numbers = jnp.stack([s.peak, tr.times(k, one) * LOG2E, slope * a, slope * at_target, slope * b * (1.0 / LOG2E)])
    return jnp.where(g.any_nonzero(), numbers, 0.0)


@dataclasses.dataclass(frozen=True)
class _Refs:
    """References of the kernel beside the matmul's: global memory, then shared memory."""

    rows: Any  # float32 [5, padded N]: row_numbers
    target: Any  # int32 [padded N]: a column, or -1
    weight: Any  # float32 [padded K]: 1 where a column counts, 0 where it does not
    transform: LogitTransform  # of references [1]; no temperature
    bias: Any | None  # float32 [padded K]
    out: Any  # [padded N or more, padded K or more]
    mass: Any  # float32 [column tiles, padded N]
    piece: Any  # the way out
    sums: Any  # float32 [2, the bytes of a warpgroup's pieces]: M of them, in the pieces' place


def _compute(m: Running, refs: _Refs) -> None:
    """A computing warpgroup: its half of the block's rows."""
    wg, t = lax.axis_index("wg"), m.static.tiles
    numbers = jax.tree.map(lambda ref: ref[0], refs.transform)
    width = refs.piece.shape[-1]
    # As many columns at a time as there are registers for: fewer and wider operations compile faster.
    span = t.columns if numbers.softcap is None else width

    def per_tile(tile: Array, v: Array, part: Array, n: Array) -> Array:
        rows = [m.load_rows(refs.rows.at[i], tile) for i in range(_ROW_NUMBERS)]
        target = m.load_rows(refs.target, tile) - v * t.columns
        x, n = m.product(n, part)
        if refs.bias is not None:
            x = x + m.load_columns(refs.bias, v * t.columns, t.columns)
        column = plgpu.broadcasted_iota(jnp.int32, (t.rows, span), 1, layout=plgpu.Layout.WGMMA)
        peak, k, a, at_target, b = (epilogue.across(r, span) for r in rows)
        mass = plgpu.layout_cast(jnp.zeros((t.rows,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        for begin in range(0, t.columns, span):
            own = tr.swept(x if span == t.columns else x[:, begin : begin + span], numbers)
            counts = m.load_columns(refs.weight, v * t.columns + begin, span)
            low = jnp.full_like(own, LOW)  # finite: 0 * -inf must not appear
            power = jnp.where(counts > 0.0, jnp.maximum((own - peak) * k, low), low)
            e = jnp.exp2(power)
            mass = mass + jnp.sum(e, axis=1)
            d = e * (a - b * power)
            d = jnp.where(column == epilogue.across(target - begin, span), at_target, d)
            if numbers.softcap is not None:
                d = d * (1.0 - own * own)
            zero = jnp.zeros_like(d)
            d = jnp.where(k == 0.0, zero, jnp.where(counts > 0.0, d, zero))  # whatever the row's numbers are
            for i in range(span // width):
                first = v * t.columns + begin + i * width
                place = refs.out.at[m.rows_of(m.walk.place(tile)), pl.ds(first, width)]
                m.leave(refs.piece, begin // width + i, d[:, i * width : (i + 1) * width], place)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        mine = pl.ds(0, t.rows)
        refs.sums[wg, mine] = mass
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.sums.at[wg, mine], refs.mass.at[v, m.rows_of(tile)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # before a piece takes the place of the sums
        return n

    m.walk.tiles(per_tile, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def columns_dx(
    p: Problem,
    known: Known,
    part: Head,
    target: Array,
    counts: Array,
    visits: Visits | None = None,
    shape: tuple[int, int] | None = None,
) -> tuple[Array, Array]:
    """``(dx [N, K] in the operands' dtype, mass that each row has [N])`` of the tokens of ``p`` in the columns of
    ``part`` that ``counts [K]`` (bool); zero in the others.

    ``target [N]``: the column of each row's target in ``part``, -1 where that is none which counts. With ``visits`` no
    other tiles are computed: dx holds anything there, and the mass is that of the columns that a row's tile visits.
    With a ``shape`` dx stands at the beginning of an array of that shape.
    """
    visits = all_of(p.n, part.vocab, p.n, part.vocab) if visits is None else visits
    numbers = row_numbers(p, known), target, counts
    dx, mass = _columns_dx(p, *numbers, part, visits.tiles, visits.listed(tiles_of(p, part).group), None, shape)
    return dx, mass * jnp.exp(known.stats.max_logp)


def columns_dx_into(
    place: Array,
    behind: Array | int,
    h: Array,
    some: tuple[Problem, Known, Array],
    part: Head,
    counts: Array,
    visits: Visits,
) -> tuple[Array, Array]:
    """:func:`columns_dx` of ``some`` tokens (a problem, what is known of it, its targets) whose hidden states are the
    first of ``h``, written into the array ``place`` from row tile ``behind`` on. ``(dx, mass)``.

    However many they are, it is one kernel for all calls with the same ``h`` and ``part``.
    """
    p, known, target = some
    rest = h.shape[0] - p.n
    rows, target = jnp.pad(row_numbers(p, known), ((0, 0), (0, rest))), jnp.pad(target, (0, rest), constant_values=-1)
    transform = dataclasses.replace(p.transform, temperature=None)  # row numbers have it
    fixed = Problem(h, p.head, target, transform, call=p.call)
    listed = visits.listed(tiles_of(fixed, part).group, behind)
    dx, mass = _columns_dx(fixed, rows, target, counts, part, visits.tiles, listed, place, None)
    return dx, mass[: p.n] * jnp.exp(known.stats.max_logp)


def tiles_of(p: Problem, part: Head) -> Tiles:
    n, width = p.h.shape
    return dataclasses.replace(tiles_for(n, width, part.vocab), stagger=0)


# A function of its own: one that is called for the same shapes in several branches is lowered once.
@functools.partial(jax.jit, static_argnames=("shape", "tiles"))
def _columns_dx(
    p: Problem,
    rows: Array,
    target: Array,
    counts: Array,
    part: Head,
    visited: Array,
    listed: Array,
    into: Array | None = None,
    shape: tuple[int, int] | None = None,
    tiles: Tiles | None = None,
) -> tuple[Array, Array]:
    """:func:`columns_dx` from :func:`row_numbers`, the mass relative to the row's largest probability; ``listed`` are
    the tiles that are ``visited``."""
    n, columns = p.n, part.vocab
    t = tiles_of(p, part) if tiles is None else tiles
    token_tiles, column_tiles = -(-n // t.tokens), -(-columns // t.columns)
    padded, whole = token_tiles * t.tokens, column_tiles * t.columns
    line = Pipeline(t, p.h, part.weight, False, part.layout == "hv", p.call.interpret)
    fixed = dataclasses.replace(p.transform, temperature=None)
    numbers = {k: jnp.asarray(x, jnp.float32) for k, x in dataclasses.asdict(fixed).items() if x is not None}
    given = [x.reshape(1) for x in numbers.values()]
    if part.bias is not None:
        given.append(whole_bias(part.bias, whole))
    inputs = [
        p.h,
        part.weight,
        listed,
        token_rows(rows, padded, 0.0),
        token_rows(target.astype(jnp.int32), padded, -1),
        token_rows(counts.astype(jnp.float32), whole, 0.0),
        *given,
    ]
    pieces = pipeline.way_out(t, p.h.dtype)
    own = [pieces, plgpu.SMEM((COMPUTE, pipeline.SLOTS * t.rows * pipeline.SWIZZLE // 4), jnp.float32)]  # half each
    # Never used at the same time, and shared memory has no 1024 bytes left over.
    scratch = [*(own if p.call.interpret else [plgpu.RefUnion(*own)]), *line.scratch()]

    def kernel(*refs: Any) -> None:
        (h, w, tiles_of_all, numbers_of_rows, y, weight, *more), rest = refs[: len(inputs)], refs[len(inputs) :]
        fields = iter(more)
        moved = LogitTransform(**{k: next(fields) for k in numbers})
        out, mass, *ring = rest
        way_out, sums = (ring.pop(0), ring.pop(0)) if p.call.interpret else ring.pop(0)
        r = _Refs(numbers_of_rows, y, weight, moved, next(fields, None), out, mass, way_out, sums)
        m = line.of(h, w, Listed(tiles_of_all, column_tiles, t), ring)
        m.roles(lambda: _compute(m, r))

    mass_type = jax.ShapeDtypeStruct((column_tiles, padded), jnp.float32)
    if into is None:
        # What hangs over the end is cut off, in whole tiles of shared memory.
        whole_tiles = (padded, -(-columns // TILE_K) * TILE_K)
        dx_type = jax.ShapeDtypeStruct(whole_tiles if shape is None else shape, p.h.dtype)
        dx, mass = line.run(kernel, inputs, (dx_type, mass_type), scratch, p.transform.softcap)
    else:
        place = jax.new_ref(into)
        mass = line.run(kernel, [*inputs, place], mass_type, scratch, p.transform.softcap)
        dx = jax.freeze(place)
    mass = jnp.sum(jnp.where(jnp.repeat(visited.T, t.tokens, axis=1), mass, 0.0), axis=0)[:n]
    return dx[:n, :columns] if into is None and shape is None else dx, mass
