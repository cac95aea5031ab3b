"""The head on a Hopper GPU: ``chunked`` with the row kernel between the matmuls, and statistics by a fused matmul.

    chunked    one matmul per live token, ``[chunk, V]`` logits; the row kernel reads them once and writes dx over them,
               or, 16-bit dx of float32 logits, beside them
    pair       with a teacher: two matmuls, then the row kernels for two distributions (forward and reverse KL)
    fused      statistics alone, one matmul per live token: no logits, a few MiB of partial sums
    ids        the row kernel sums what is outside the ids (without a softcap); the rest is ``chunked``

The fused matmul adds up in another order than the platform's, which recomputes the logits for the gradient. For float32
logits that is worth about 1e-6 of a log-probability. Rounded to bfloat16, a sum next to the middle of two numbers goes
either way, and statistics and gradients would come from different logits: there the chunked sweep serves both.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jax import Array, lax
from jax.typing import DTypeLike

from logitless.core import id_passes, row_passes
from logitless.core.backend import Cost, Split, Way, refusal
from logitless.core.problem import Given, Linear, Loss, Problem
from logitless.core.row_passes import Rows, front
from logitless.core.stats import RowSums, StatCotangents, TokenStats, sums_of_stats
from logitless.head.chunked import Chunked
from logitless.head.mosaic_gpu.kernels import stats_matmul
from logitless.logits.mosaic_gpu import backend as row_kernel
from logitless.logits.mosaic_gpu import layout, pair_rows
from logitless.logits.mosaic_gpu.layout import Destination
from logitless.objectives.token_program import token_program


def _rows(x: Array, p: Rows, live: Array | None) -> Problem[Given]:
    """The chunk's rows for the row kernel, which may write over them."""
    rows = Problem(Given(lax.optimization_barrier(x)), p.targets, p.transform, live, call=p.call)
    return rows.calling(donate=True)


def _sums_outside(x: Array, p: Rows) -> RowSums:
    """Sums of rows whose targets are ``-inf``, by the row kernel: one read, where XLA's two reductions take two."""
    return sums_of_stats(row_kernel.token_stats(_rows(x, p, None)))


@dataclasses.dataclass(frozen=True)
class MosaicGpu(Chunked):
    """See the module."""

    name: ClassVar[str] = "mosaic_gpu"
    kernels: ClassVar[str | None] = "gpu"
    in_place: ClassVar[bool] = True

    def supports(self, p: Problem[Linear], split: Split) -> str | None:
        if split.vocabulary > 1:
            return "it has no vocabulary-parallel form yet"
        if p.teacher is not None and (why := pair_rows.not_served_because(p, p.call.logits_dtype)) is not None:
            return why
        return refusal(layout.check, p.call.chunk, p.head.vocab, p.call.logits_dtype)

    def describe(self, p: Problem[Linear], way: Way) -> Cost:
        cost = super().describe(p, way)
        if way.in_forward or p.call.kept or stats_matmul.not_served_because(p) is not None:
            return cost
        moved = f"{cost.bytes_moved}; the statistics by a fused matmul: no logits"
        return dataclasses.replace(cost, bytes_moved=moved, fused_statistics=True)

    def row_statistics(self, x: Array, p: Problem) -> TokenStats:
        if p.ids is not None:
            # Behind a softcap the rows are tanh of the logits, which XLA fuses with its own passes.
            sums_of = _sums_outside if p.transform.softcap is None else row_passes.sums
            return lax.optimization_barrier(id_passes.statistics(lax.optimization_barrier(x), p, sums_of))
        if p.teacher is None:
            return row_kernel.token_stats(_rows(x, p, p.live))
        return lax.optimization_barrier(pair_rows.statistics(x, p))

    def row_statistics_and_dx(
        self, x: Array, p: Problem, loss: Loss, dtype: DTypeLike, into: Destination | None = None
    ) -> tuple[TokenStats, Array]:
        """dx may go ``into`` a larger array, which is then returned."""
        if p.teacher is not None:
            stats = self.row_statistics(x, p)
            return stats, self.row_dx(x, p, stats, loss.cotangents(stats), dtype, into)
        program = token_program(loss.objective, loss.inputs)
        return row_kernel.stats_and_dlogits(_rows(x, p, p.live), program, dtype=dtype, into=into)

    def row_dx(
        self,
        x: Array,
        p: Problem,
        stats: TokenStats,
        g: StatCotangents,
        dtype: DTypeLike,
        into: Destination | None = None,
    ) -> Array:
        if p.ids is not None:
            return super().row_dx(x, p, stats, g, dtype)
        if p.teacher is None:
            return row_kernel.dlogits(_rows(x, p, None), stats, g, dtype=dtype, into=into)
        return pair_rows.dlogits(x, p, stats, g, dtype, into)

    def token_statistics(self, p: Problem) -> TokenStats:
        """By the fused matmul where it can serve, else from logits by the matmul that the gradient has."""
        if p.call.kept or stats_matmul.not_served_because(p) is not None:
            return super().token_statistics(p)
        f = front(p.live)
        return jax.tree.map(f.put_back, stats_matmul.token_stats(f.problem(p), f.count))
