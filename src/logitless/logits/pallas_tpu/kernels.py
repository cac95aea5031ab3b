"""The TPU kernels' bodies: what a block of rows is given, and the three things done with it.

    stats_body     statistics, merged over vocabulary tiles
    dlogits_body   dlogits from each row's coefficients
    fused_body     statistics, the objective's cotangents, dlogits

The launcher is ``backend.py``; the sweeps over a group of rows are ``rows.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from logitless.core import stats as S
from logitless.core.compat import Index, Ref
from logitless.core.stats import LogitTransform, RowSums, StatCotangents, factor, times
from logitless.logits.pallas_tpu import rows
from logitless.logits.pallas_tpu.rows import STAT_COLUMNS, Group
from logitless.logits.pallas_tpu.tiles import LANES, Tiles

DEAD = -(1 << 30)
"""Label of a row that is not live; far from every block, whatever tile's first column is subtracted."""
INVALID = -(1 << 29)
"""Label of a live row whose target names no column."""


# -- what a kernel reads besides the logits --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Scalars (SMEM) and per-row columns (one packed int32 block), looked up by name."""

    scalars: tuple[str, ...]
    columns: tuple[str, ...]
    scalar_ref: Any = None
    column_block: Array | None = None  # [group, K] int32

    def scalar(self, name: str) -> Array:
        return self.scalar_ref[self.scalars.index(name)]

    def column(self, name: str) -> Array:
        """``[group, 1]`` float32."""
        i = self.columns.index(name)
        assert self.column_block is not None
        return jax.lax.bitcast_convert_type(self.column_block[:, i : i + 1], jnp.float32)

    def label(self) -> Array:
        assert self.column_block is not None
        return self.column_block[:, :1]

    def transform(self) -> LogitTransform:
        values: dict[str, Array] = {}
        for name in ("temperature", "softcap", "scale"):
            if name in self.columns:
                values[name] = self.column(name)
            elif name in self.scalars:
                values[name] = self.scalar(name)
        return LogitTransform(**values)


@dataclasses.dataclass(frozen=True)
class Block:
    """A kernel's view of its current block: refs, and access to a group of rows."""

    tiles: Tiles
    vocab_size: int
    numbers: Numbers
    scalars: Ref  # SMEM [S]
    places: Ref  # SMEM [1, 1, rows + groups]: see backend._places
    columns: Ref  # [rows, K] int32
    x: Ref  # [rows, width]
    u: Ref  # [group, width] float32
    stats: Any = None  # [rows, 8] float32, where the kernel writes statistics
    out: Any = None  # [rows, width], if the kernel writes dlogits
    sums: Any = None  # [rows, 8] float32, sums over previous vocabulary tiles, if there are several

    def each_group(self, body: Callable[[Group, Numbers, Array], None]) -> None:
        """``body(group, numbers, any row is live)`` for the block's groups."""
        t = self.tiles
        tile = pl.program_id(1)
        base = tile * t.width if t.tiles > 1 else 0
        limit: Index = self.vocab_size - base

        def one(i: Index, carry: int) -> int:
            first = i * t.group if isinstance(i, int) else pl.multiple_of(i * t.group, t.group)
            starts = [self.places[0, 0, first + r] for r in range(t.group)]
            if t.tiles > 1:
                starts = [jnp.clip(start - base, 0, t.width - LANES) for start in starts]
            numbers = dataclasses.replace(
                self.numbers, scalar_ref=self.scalars, column_block=self.columns[pl.ds(first, t.group), :]
            )
            group = Group(
                x=self.x,
                u=self.u,
                first=first,
                size=t.group,
                limit=limit,
                starts=[pl.multiple_of(start, LANES) for start in starts],
                label=numbers.label() - base,
                transform=numbers.transform(),
            )
            body(group, numbers, self.places[0, 0, t.rows + i] == 0)
            return carry

        if t.groups == 1:
            one(0, 0)
        else:
            jax.lax.fori_loop(0, t.groups, one, 0)


# -- kernel bodies ---------------------------------------------------------------------------------------------------


def packed(sums: RowSums, size: int) -> Array:
    """Sums ``[size, 1]`` as columns of a ``[size, 8]`` array."""
    column = jax.lax.broadcasted_iota(jnp.int32, (size, STAT_COLUMNS), 1)
    out = jnp.zeros((size, STAT_COLUMNS), jnp.float32)
    for i, field in enumerate(dataclasses.fields(RowSums)):
        out = jnp.where(column == i, getattr(sums, field.name), out)
    return out


def stats_body(block: Block, finished: bool = True) -> None:
    """Statistics, or with ``finished=False`` the underlying sums."""
    stats, sums = block.stats, block.sums
    tile, tiles = pl.program_id(1), block.tiles.tiles

    def body(group: Group, numbers: Numbers, alive: Array) -> None:
        live, valid = numbers.label() > DEAD, numbers.label() >= 0

        def store(found: RowSums) -> None:
            if finished:
                rows.store_stats(stats, group.rows, S.finish(found, valid, group.transform), live)
            else:
                stats[group.rows, :] = packed(found, group.size)

        @pl.when(alive)
        def work() -> None:
            found, _, _ = rows.group_sums(group)
            if tiles == 1:
                store(found)
                return
            so_far = sums[group.rows, :]
            old = RowSums(*(so_far[:, i : i + 1] for i in range(5)))
            empty = S.empty_sums((group.size, 1))
            old = jax.tree.map(lambda e, o: jnp.where(tile == 0, e, o), empty, old)
            merged = S.merge(old, found, factor(group.transform))
            sums[group.rows, :] = packed(merged, group.size)

            @pl.when(tile == tiles - 1)
            def last() -> None:
                store(merged)

        @pl.when(jnp.logical_not(alive))
        def skip() -> None:
            stats[group.rows, :] = jnp.zeros((group.size, STAT_COLUMNS), jnp.float32)

    block.each_group(body)


def dlogits_body(block: Block) -> None:
    """dlogits from each row's line ``exp(s) (a - b s)`` and the value at its target."""
    out = block.out

    def body(group: Group, numbers: Numbers, alive: Array) -> None:
        @pl.when(alive)
        def work() -> None:
            centre = rows.lanes(numbers.column("centre"), group.size)
            a, b = (rows.row_slope(group.transform, numbers.column(k)) for k in ("a", "b"))

            def s_of(start: Index, columns: int) -> Array:
                u = rows.swept_of(group, start, columns)
                return times(rows.step_factor(group, columns), u - rows.across(centre, columns))

            rows.gradient(group, out, s_of, a, b, numbers.column("moves") > 0)
            at = rows.at_target(group, numbers.column("at_target"), rows.raw_target(group))
            rows.at_targets(group, out, group.rows, at)

        @pl.when(jnp.logical_not(alive))
        def skip() -> None:
            rows.blank(group, out, 0)

    block.each_group(body)


def fused_body(block: Block, run: Callable[..., tuple[Array, Array]]) -> None:
    """Statistics, the objective's cotangents, dlogits."""
    stats, out = block.stats, block.out

    def body(group: Group, numbers: Numbers, alive: Array) -> None:
        live, valid = numbers.label() > DEAD, numbers.label() >= 0

        @pl.when(alive)
        def work() -> None:
            sums, centre, odd = rows.group_sums(group)
            k = factor(group.transform)
            s = S.finish(sums, valid, group.transform)
            given = [numbers.scalar(name) for name in numbers.scalars if name.startswith("program")]
            own = [numbers.column(name) for name in numbers.columns if name.startswith("program")]
            g_logp, g_entropy = run(given, own, s.logp, s.entropy)
            zero = jnp.zeros_like(s.logp)
            g = StatCotangents(jnp.where(live, g_logp, zero), jnp.where(live, g_entropy, zero), zero)
            # Where no other column has any weight the centre is LOWEST, and a, b and rest are 0.
            a, b = S.dz_line(centre, s, g, k)
            rest = sums.total * jnp.exp(S.log_probability(centre, k, s))
            at = S.dz(sums.target, jnp.full(zero.shape, True), s, g, k, rest)
            a, b = rows.row_slope(group.transform, a), rows.row_slope(group.transform, b)
            rows.gradient(group, out, lambda start, columns: group.u[:, pl.ds(start, columns)], a, b, None)

            @pl.when(odd)
            def clean() -> None:
                # exp(s) (0 - 0 s) is 0 but where the row is not finite, which then must not show.
                rows.erase(group, out, jnp.logical_not(g.any_nonzero()))

            rows.at_targets(group, out, group.rows, rows.at_target(group, at, rows.raw_target(group)))
            # Last: the simulator lets a store wait for the output DMA of the block before, which is over by now.
            rows.store_stats(stats, group.rows, s, live)

        @pl.when(jnp.logical_not(alive))
        def skip() -> None:
            stats[group.rows, :] = jnp.zeros((group.size, STAT_COLUMNS), jnp.float32)
            rows.blank(group, out, 0)

    block.each_group(body)
