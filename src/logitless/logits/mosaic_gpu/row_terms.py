"""Sums of a row: per lane in sweep 1, over all lanes, and the inputs for sweep 2."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from logitless.core import stats as st
from logitless.core import stats as tr
from logitless.core.compat import gpu_load
from logitless.core.stats import NEG_INF, LogitTransform, RowSums, StatCotangents, TokenStats
from logitless.logits.mosaic_gpu import scalars as scalar

if TYPE_CHECKING:
    from logitless.logits.mosaic_gpu.tiles import Sweep

LOW = -1e30  # stands for -inf in the carries: differences stay finite


@dataclasses.dataclass(frozen=True)
class Power:
    """How a sweep exponentiates.

    For 16-bit logits ``2^t`` with ``t`` in units of ln 2: a single instruction, with a relative error of 2^-22, far
    below the 2^-9 of the following rounding. Float32 dlogits keep all their digits: ``e^t``, the accurate library
    function.
    """

    exact: bool

    @property
    def unit(self) -> float:
        return 1.0 if self.exact else scalar.LOG2E

    def __call__(self, t: Array) -> Array:
        return jnp.exp(t) if self.exact else jnp.exp2(t)


@dataclasses.dataclass(frozen=True)
class Lanes:
    """Per-lane sums, ``[lanes]`` float32: maximum ``m``, and sums of ``e``, ``e t``, ``e^2`` with ``t = k (u - m)``.

    ``u`` and ``k`` are those of ``logitless.core.stats``, ``k`` times the :class:`Power`'s unit: ``e = exp(t /
    unit)``.
    """

    m: Array
    total: Array
    centred: Array
    squares: Array

    @staticmethod
    def empty(n: int, layout: Any) -> Lanes:
        """The sums of no columns, in the layout that a loop carries."""

        def of(value: float) -> Array:
            return plgpu.layout_cast(jnp.full((n,), value, jnp.float32), layout)

        return Lanes(of(LOW), of(0.0), of(0.0), of(0.0))

    def leaves(self) -> tuple[Array, ...]:
        return (self.m, self.total, self.centred, self.squares)

    def moved(self, m: Array, k: Array, power: Power) -> Lanes:
        """The same sums relative to a larger maximum."""
        step = (self.m - m) * k
        a = power(step)
        return Lanes(m, a * self.total, a * (self.centred + step * self.total), a * a * self.squares)


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """``t = k (u - centre) + offset`` is log p in the power's unit, and ``d = p (first - second (t + shift))`` but at
    the target. The shift (the entropy) is folded into ``first`` for 16-bit logits."""

    centre: Array
    offset: Array
    first: Array
    second: Array
    shift: Array
    at_target: Array
    nonzero: Array  # float: 0 where the whole row of dlogits is exactly zero

    def leaves(self) -> tuple[Array, ...]:
        return tuple(getattr(self, f.name) for f in dataclasses.fields(self))


def coefficients(sweep: Sweep, s: TokenStats, g: StatCotangents, x_y: Array) -> Coefficients:
    """What sweep 2 needs of a row (``stats.dz`` with the per-row part taken out of the loop); ``x_y`` is the target's
    raw logit."""
    transform, power = sweep.transform, sweep.power

    def at_target(x_y: Array, s: TokenStats, g: StatCotangents, transform: LogitTransform) -> Array:
        d = st.dz(s.peak, jnp.bool_(True), s, g)
        return tr.pull_back(d, x_y, transform)

    first, second = g.lse - g.logp, g.entropy * (1.0 / power.unit)
    if not power.exact:
        first = first - g.entropy * s.entropy
    if not sweep.bent:  # the slope is the same in every column
        k = tr.factor(transform)
        first, second = tr.times(k, first), tr.times(k, second)
    nonzero = jnp.where(g.logp != 0, 1.0, jnp.where(g.entropy != 0, 1.0, jnp.where(g.lse != 0, 1.0, 0.0)))
    own = scalar.run(at_target, x_y, s, g, transform)
    return Coefficients(s.peak, s.max_logp * power.unit, first, second, s.entropy * power.unit, own, nonzero)


_EVERY_WARP = plgpu.Layout.TILED(
    plgpu.Tiling(((128,), (4,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
)
"""Lanes of a row, complete in every warp: a sum needs no other warp."""


def _in_every_warp(arrays: Sequence[Array], places: Sequence[Any]) -> list[Array]:
    """The ``arrays [lanes]`` with all lanes in every warp, by way of ``places [lanes]`` in shared memory."""
    for x, place in zip(arrays, places, strict=True):
        place[...] = x
    plgpu.commit_smem()
    return [gpu_load(place, _EVERY_WARP) for place in places]


def row_sums(parts: Sequence[Lanes], k: Array, power: Power, u_y: Array, places: Sequence[Any]) -> RowSums:
    """``stats.RowSums`` of a row from all its lanes; ``places`` are four ``[lanes]`` of shared memory to work in."""
    m = parts[0].m
    for p in parts[1:]:
        m = jnp.maximum(m, p.m)
    (every,) = _in_every_warp([m], places[:1])
    top = jnp.max(every)
    moved = [p.moved(top, k, power) for p in parts]
    total, centred, squares = moved[0].total, moved[0].centred, moved[0].squares
    for p in moved[1:]:
        total, centred, squares = total + p.total, centred + p.centred, squares + p.squares
    total, centred, squares = map(jnp.sum, _in_every_warp([total, centred, squares], places[1:]))
    seen = top > LOW
    return RowSums(
        maximum=jnp.where(seen, top, NEG_INF),
        total=jnp.where(seen, total, 0.0),
        centred=jnp.where(seen, centred * (1.0 / power.unit), 0.0),
        squares=jnp.where(seen, squares, 0.0),
        target=u_y,
    )
