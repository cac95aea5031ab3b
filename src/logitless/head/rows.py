"""The passes over a chunk's logits ``x [C, V]`` between the head's matmuls: by plain JAX, or by the row kernel.

    statistics(x)                        -> TokenStats
    statistics_and_dx(x, objective)      -> TokenStats, dx            (grad in forward)
    dx_from(x, statistics, cotangents)   -> dx                        (by recompute)

``dx`` comes in the dtype of the matmuls' operands. On a Hopper GPU the row kernel reads ``x`` once and writes dx
over it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from logitless.logits.chunked import rows_dlogits, rows_stats, rows_sums
from logitless.objectives.inputs import LossInputs
from logitless.objectives.loss import cotangents
from logitless.objectives.objective import Objective
from logitless.objectives.token_program import token_program
from logitless.stats import RowSums, StatCotangents, TokenStats
from logitless.transform import LogitTransform


@dataclasses.dataclass(frozen=True)
class RowPasses:
    """Static choices of the passes."""

    vocab_size: int
    tile: int | None = None  # columns that plain-JAX passes take at a time
    kernel: str = "xla"  # or "mosaic_gpu"
    interpret: bool = False

    @property
    def in_place(self) -> bool:
        """Whether dx is made in the place, and so in the dtype, of ``x``; another dtype is a copy of it."""
        return self.kernel == "mosaic_gpu"

    def _kernel(self) -> Any:
        from logitless.logits import mosaic_gpu

        return mosaic_gpu

    def statistics(self, x: Array, targets: Array, t: LogitTransform, inside: Array) -> TokenStats:
        """Statistics of the chunk's rows; ``inside`` marks those that count.

        The barriers cut them off from what stands around them, so that they compile to the same arithmetic, and give
        the same bits, with and without a gradient.
        """
        x = lax.optimization_barrier(x)
        if self.kernel == "mosaic_gpu":
            return self._kernel().token_stats(x, targets, t, self.vocab_size, inside, interpret=self.interpret)
        return lax.optimization_barrier(rows_stats(x, targets, t, self.vocab_size, self.tile))

    def sums(self, x: Array, targets: Array, t: LogitTransform) -> RowSums:
        """Sums over the columns that are here, for a shard of the vocabulary; barriers as in :meth:`statistics`."""
        assert self.kernel == "xla", "the row kernel gives finished statistics"
        x = lax.optimization_barrier(x)
        return lax.optimization_barrier(rows_sums(x, targets, t, self.vocab_size, self.tile))

    def statistics_and_dx(
        self, x: Array, targets: Array, t: LogitTransform, objective: Objective, own: LossInputs, dtype: Any
    ) -> tuple[TokenStats, Array]:
        """Statistics, and the dx of an uncoupled objective over the chunk's own inputs."""
        if self.kernel == "mosaic_gpu":
            stats, dx = self._kernel().stats_and_dlogits(
                lax.optimization_barrier(x), targets, t, self.vocab_size, own.mask, token_program(objective, own),
                donate=True, interpret=self.interpret,
            )  # fmt: skip
            return stats, dx.astype(dtype)
        x = lax.optimization_barrier(x)
        stats = self.statistics(x, targets, t, own.mask)
        g_logp, g_entropy = cotangents(objective, stats.logp, stats.entropy, own)
        g = StatCotangents(g_logp, g_entropy, jnp.zeros_like(g_logp))
        return stats, rows_dlogits(x, targets, t, self.vocab_size, stats, g, dtype, self.tile)

    def dx_from(
        self, x: Array, targets: Array, t: LogitTransform, stats: TokenStats, g: StatCotangents, dtype: Any
    ) -> Array:
        """dx from known statistics and cotangents; zero rows where the cotangents are."""
        x = lax.optimization_barrier(x)
        if self.kernel == "mosaic_gpu":
            dx = self._kernel().dlogits(
                x, targets, t, self.vocab_size, None, stats, g, donate=True, interpret=self.interpret
            )
            return dx.astype(dtype)
        return rows_dlogits(x, targets, t, self.vocab_size, stats, g, dtype, self.tile)
