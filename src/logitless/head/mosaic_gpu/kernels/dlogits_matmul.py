"""dx of some tokens and columns on a Hopper GPU, from hidden states and known statistics: one matmul, no logits.

``pipeline.py`` has the matmul. With numbers of a row alone (``stats.dz_line``),

    t = k (u - peak)       e = 2^t       dx = e (a - b t), and at the row's target a number of its own

``k`` and ``b`` in units of ln 2; all but ``k`` times the slope of the raw logits, which is ``1 - u^2`` more under a
softcap. The epilogue computes that, rounds it once and writes it through shared memory, 128 columns at a time (64 under
a softcap), into the tile's slot (``schedule.Slots``). Columns that do not count, and rows without a cotangent, are
written as zeros; a row that is NaN is so in all of them. The mass that a row has in the columns that count is summed
beside it, in float32. Which tiles of tokens and columns are visited only the device may know (``schedule.Visits``);
slots of the others are left as they are.

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
from jax.typing import DTypeLike

from logitless.core import stats as st
from logitless.core.compat import Ref
from logitless.core.problem import HeadArrays, Linear, Problem
from logitless.core.pytree import register
from logitless.core.row_passes import Visit
from logitless.core.stats import LogitTransform, dz_at_target, dz_line
from logitless.head.mosaic_gpu.kernels import pipeline
from logitless.head.mosaic_gpu.kernels.pipeline import LOG2E, LOW, Pipeline, Running, across, token_rows, whole_bias
from logitless.head.mosaic_gpu.kernels.schedule import COMPUTE, Listed, Slots, Tiles, Visits, tiles_for
from logitless.head.sparse.gather import Known

_ROW_NUMBERS = 6
_NONE = -(2.0**14)
"""Exponent for a probability of 0. Finite, and no larger than that: it is multiplied by a number of the row."""


@register
@dataclasses.dataclass(frozen=True)
class Rows:
    """What dx takes of each token, made once for all calls: float32 ``[7, N]``. Peak, k, a, b and the target's own, all
    zero in rows whose dx is zero whatever their logits are; the target; the largest probability."""

    numbers: Array

    @property
    def targets(self) -> Array:
        return self.numbers[5].astype(jnp.int32)

    def of(self, visit: Visit, n: int) -> Rows:
        """The rows of a visit to some of the ``n`` tokens; zeros in the padding."""
        some = self.numbers.at[:, visit.read].get(mode="promise_in_bounds")
        return Rows(jnp.where(visit.inside(n), some, 0.0))

    def at(self, target: Array) -> Array:
        """float32 ``[6, N]`` for the kernel: with the targets' columns there, or -1."""
        return jnp.concatenate([self.numbers[:5], target.astype(jnp.float32)[None]])


def rows_of(p: Problem, known: Known) -> Rows:
    s, g, t = known.stats, known.g, p.transform
    one, k = jnp.ones((p.n,), jnp.float32), st.factor(t)
    slope = st.times(st.factor(dataclasses.replace(t, softcap=None)), one)
    a, b = dz_line(s.peak, s, g, k)
    own = slope * dz_at_target(s, g)
    numbers = jnp.stack([s.peak, st.times(k, one) * LOG2E, slope * a, slope * b * (1.0 / LOG2E), own])
    beside = jnp.stack([p.targets.astype(jnp.float32), jnp.exp(s.max_logp)])  # ids are exact below 2^24
    return Rows(jnp.concatenate([jnp.where(g.any_nonzero(), numbers, 0.0), beside]))


@dataclasses.dataclass(frozen=True)
class _Refs:
    """References of the kernel beside the matmul's: global memory, then shared memory."""

    rows: Ref  # float32 [6, padded N]: Rows.at
    columns: Ref  # float32 [padded K]: a column's number if it counts, else -2
    transform: LogitTransform  # of references [1]; no temperature
    bias: Ref | None  # float32 [padded K]
    out: Slots
    mass: Ref  # float32 [column tiles, padded N]
    piece: Ref  # the way out
    sums: Ref  # float32 [2, the bytes of a warpgroup's piece]: M values, in the memory of the piece


def _compute(m: Running, refs: _Refs) -> None:
    """A computing warpgroup: half of the block's rows."""
    wg, t = lax.axis_index("wg"), m.static.tiles
    numbers = jax.tree.map(lambda ref: ref[0], refs.transform)
    width = refs.piece.shape[-1]
    # As many columns at a time as there are registers for: fewer and wider operations compile faster.
    span = t.columns if numbers.softcap is None else width

    def per_tile(tile: Array, v: Array, part: Array, n: Array) -> Array:
        rows = [m.load_rows(refs.rows.at[i], tile) for i in range(_ROW_NUMBERS)]
        # One comparison for columns that do not count and for rows that do not move: those have no column.
        rows.append(jnp.where(rows[1] == 0.0, jnp.full_like(rows[1], -LOW), jnp.zeros_like(rows[1])))
        x, n = m.product(n, part)
        if refs.bias is not None:
            x = x + m.load_columns(refs.bias, v * t.columns, t.columns)
        peak, k, a, b, at_target, target, least = (across(r, span) for r in rows)
        mass = plgpu.layout_cast(jnp.zeros((t.rows,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        for begin in range(0, t.columns, span):
            own = st.swept(x if span == t.columns else x[:, begin : begin + span], numbers)
            column = m.load_columns(refs.columns, v * t.columns + begin, span)
            none = jnp.full_like(own, _NONE)
            power = jnp.where(column >= least, jnp.maximum((own - peak) * k, none), none)
            e = jnp.exp2(power)
            mass = mass + jnp.sum(e, axis=1)
            d = jnp.where(column == target, at_target, e * (a - b * power))
            if numbers.softcap is not None:
                d = d * jnp.where(column >= least, 1.0 - own * own, jnp.zeros_like(own))
            for i in range(span // width):
                place = refs.out.at(m.first_row(tile), t.rows, v * t.columns + begin + i * width, width)
                m.leave(refs.piece, d[:, i * width : (i + 1) * width], place)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        mine = pl.ds(0, t.rows)
        refs.sums[wg, mine] = mass
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.sums.at[wg, mine], refs.mass.at[v, m.rows_of(tile)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # before a piece takes the place of the sums
        return n

    m.walk.tiles(per_tile, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class Region:
    """Where dx is computed."""

    part: HeadArrays  # of the head: K columns
    counts: Array  # [K] bool; dx is zero in the other columns
    visits: Visits  # tiles of tokens and columns


def columns_dx(p: Problem, place: Slots, h: Array, rows: Rows, target: Array, region: Region) -> tuple[Array, Array]:
    """``(dx in the operands' dtype, in the array of place; mass that each row has [N])`` of the tokens of ``rows``,
    whose hidden states are the first of ``h``, in the columns of a region. ``p`` holds the values shared by all tokens.

    ``target [N]``: the column of each row's target in the region's part, -1 where that is none which counts. Only
    visited tiles are computed: the mass is that of the columns that a row's tile visits. However many tokens they are,
    it is one kernel for all calls with the same ``h``, part and array.
    """
    part, visits = region.part, region.visits
    n = target.size
    transform = dataclasses.replace(p.transform, temperature=None)  # the rows have it
    fixed = Problem(Linear(h, p.head), jnp.zeros((len(h),), jnp.int32), transform, call=p.call)
    listed = visits.listed(tiles_of(fixed, part).group, place.numbers())
    numbers = jnp.pad(rows.at(target), ((0, 0), (0, len(h) - n)))
    dx, mass = _columns_dx(fixed, numbers, region.counts, part, visits.tiles, listed, place.array)
    return dx, mass[:n] * rows.numbers[6]


def columns_dx_of(p: Problem, place: Slots, h: Array, rows: Rows, index: Array, region: Region) -> tuple[Array, Array]:
    """:func:`columns_dx` for a region of the head's columns ``index [K]``; columns beyond the head must not count."""
    at = jnp.arange(index.size, dtype=jnp.int32)
    where = jnp.full((p.head.vocab,), -1, jnp.int32).at[index].set(at, mode="drop", unique_indices=True)
    target = where.at[rows.targets].get(mode="fill", fill_value=-1)
    return columns_dx(p, place, h, rows, target, region)


def tiles_of(p: Problem, part: HeadArrays) -> Tiles:
    n, width = p.h.shape
    return dataclasses.replace(tiles_for(n, width, part.vocab), stagger=0)


def ways_out(t: Tiles, dtype: DTypeLike, narrow: bool) -> tuple[Any, Any]:
    """Shared memory for a piece of dx and for sums, one in the place of the other. Both have equal sizes in bytes, so a
    warpgroup's sums stay within its piece."""
    piece = pipeline.way_out(t, dtype, narrow)
    numbers = t.rows * piece.shape[-1] * jnp.dtype(dtype).itemsize // 4
    return piece, plgpu.SMEM((COMPUTE, numbers), jnp.float32)


# A separate function: called for equal shapes in several branches, it is lowered once.
@functools.partial(jax.jit, static_argnames=("tiles",))
def _columns_dx(
    p: Problem,
    rows: Array,
    counts: Array,
    part: HeadArrays,
    visited: Array,
    listed: Array,
    into: Array,
    tiles: Tiles | None = None,
) -> tuple[Array, Array]:
    """:func:`columns_dx` from :meth:`Rows.at`, the mass relative to the row's largest probability; ``listed`` are the
    tiles that are ``visited``."""
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
        token_rows(jnp.where(counts, jnp.arange(columns, dtype=jnp.float32), -2.0), whole, -2.0),
        *given,
    ]
    own = ways_out(t, p.h.dtype, narrow=p.transform.softcap is not None)
    # Never used at the same time, and shared memory has no 1024 bytes left over.
    scratch = [*(own if p.call.interpret else [plgpu.RefUnion(*own)]), *line.scratch()]

    def kernel(*refs: Any) -> None:
        (h, w, tiles_of_all, numbers_of_rows, numbers_of_columns, *more) = refs[: len(inputs)]
        rest = refs[len(inputs) :]
        fields = iter(more)
        moved = LogitTransform(**{k: next(fields) for k in numbers})
        out, mass, *ring = rest
        way_out, sums = (ring.pop(0), ring.pop(0)) if p.call.interpret else ring.pop(0)
        walk = Listed(tiles_of_all, column_tiles, t)
        place = Slots(out, *walk.slots())
        r = _Refs(numbers_of_rows, numbers_of_columns, moved, next(fields, None), place, mass, way_out, sums)
        m = line.of(h, w, walk, ring)
        m.roles(lambda: _compute(m, r))

    mass_type = jax.ShapeDtypeStruct((column_tiles, padded), jnp.float32)
    place = jax.new_ref(into)
    mass = line.run(kernel, [*inputs, place], mass_type, scratch, p.transform.softcap)
    mass = jnp.sum(jnp.where(jnp.repeat(visited.T, t.tokens, axis=1), mass, 0.0), axis=0)[:n]
    return jax.freeze(place), mass
