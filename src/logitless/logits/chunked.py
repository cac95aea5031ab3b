"""Plain JAX over logits ``[N, V]``, a chunk of rows at a time, with hand-written gradients.

    pass 1   z -> RowSums -> TokenStats                     reads the logits once or twice (max, then sums)
    pass 2   dlogits = pull_back(dz(z, stats, cotangents))  reads the logits, writes dlogits in their dtype

No matmul. A GPU's compiler fuses each pass and needs nothing beside input and output. On a CPU pass 1 takes chunks of
rows that its cache holds, in three ``[chunk, V]`` float32 buffers; :func:`stats_and_dlogits` does both passes on such a
chunk, with one exponential for both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.core import id_passes, row_passes
from logitless.core.backend import Cost, PlainJax, Way
from logitless.core.chunk_size import platform, row_chunk
from logitless.core.divergences import PairSums, ShardOfPair
from logitless.core.problem import Given, Loss, Problem
from logitless.core.shapes import PyTree
from logitless.core.stats import RowSums, StatCotangents, TokenStats, empty_sums, masked_stats, where_rows
from logitless.objectives.token_program import TokenProgram, token_program


def rows_per_chunk(p: Problem[Given]) -> int:
    """As the call says, or by the rule."""
    return p.call.chunk or row_chunk(p.n, p.logits.shape[-1])


def _over_chunks(f: Callable[..., PyTree], p: Problem[Given], outputs: PyTree, *rowwise: PyTree) -> PyTree:
    """``f(part of p, *parts of rowwise)`` on chunks of rows, written into arrays like ``outputs``.

    The last chunk is moved back to end with the rows, so a few rows may be computed twice, to the same values.
    """
    n, chunk = p.n, rows_per_chunk(p)
    if chunk >= n:
        return f(p, *rowwise)

    def body(i: Array, out: PyTree) -> PyTree:
        start = jnp.minimum(i * chunk, n - chunk)

        def take(a: Array) -> Array:
            return lax.dynamic_slice_in_dim(a, start, chunk)

        found = f(p.rows(take), *jax.tree.map(take, rowwise))
        return jax.tree.map(lambda o, v: lax.dynamic_update_slice_in_dim(o, v.astype(o.dtype), start, 0), out, found)

    return lax.fori_loop(0, -(-n // chunk), body, outputs)


def token_sums(p: Problem[Given]) -> RowSums:
    """Sums over the columns that are here, for a shard of the vocabulary; those of a dead token mean nothing."""

    def chunk(part: Problem[Given]) -> RowSums:
        return (
            row_passes.cached_sums(part.logits, part)[0] if platform() == "cpu" else row_passes.sums(part.logits, part)
        )

    return _over_chunks(chunk, p, empty_sums((p.n,)))


def _statistics(p: Problem[Given]) -> tuple[TokenStats, row_passes.Exponentials | None]:
    """Statistics of a chunk, and exponentials that a CPU reuses for the gradient."""
    if platform() == "cpu" and p.teacher is None and p.ids is None and p.support is None:
        return row_passes.cached_statistics(p.logits, p)
    # Statistics are the same to the bit whether or not a gradient is taken: keep the two passes apart.
    return lax.optimization_barrier(id_passes.statistics(p.logits, p)), None


def token_stats(p: Problem[Given]) -> TokenStats:
    """Statistics ``[N]``; zeros where a token is not live."""
    return masked_stats(_over_chunks(lambda part: _statistics(part)[0], p, p.blank_stats()), p.live)


def live_cotangents(p: Problem[Given], g: StatCotangents) -> StatCotangents:
    """``g`` with zeros where a token is not live."""
    live = p.live
    return g if live is None else jax.tree.map(lambda c: where_rows(live, c), g)


def dlogits(p: Problem[Given], stats: TokenStats, g: StatCotangents) -> Array:
    """Cotangent of ``logits [N, V]`` in their dtype, from the statistics and their cotangents: a single loop over
    everything, without temporaries."""
    return id_passes.dx(p.logits, p, stats, live_cotangents(p, g), p.logits.dtype)


def cotangents_of(program: TokenProgram, columns: tuple[Array, ...], stats: TokenStats) -> StatCotangents:
    """The objective's cotangents for tokens with these ``columns``."""
    g_logp, g_entropy = program.run(program.scalars, columns, stats.logp, stats.entropy)
    return StatCotangents(g_logp, g_entropy, jnp.zeros_like(g_logp))


def stats_and_dlogits(p: Problem[Given], program: TokenProgram) -> tuple[TokenStats, Array]:
    """Statistics, and the dlogits of an uncoupled objective with a unit cotangent of the loss."""

    def chunk(part: Problem[Given], columns: tuple[Array, ...]) -> tuple[TokenStats, Array]:
        stats, known = _statistics(part)
        stats = masked_stats(stats, part.live)
        g = cotangents_of(program, columns, stats)
        if known is None:
            return stats, id_passes.dx(part.logits, part, stats, g, part.logits.dtype)
        return stats, row_passes.cached_dx(part.logits, part, stats, g, known)

    return _over_chunks(chunk, p, (p.blank_stats(), jnp.zeros_like(p.logits)), program.columns)


def bytes_moved(p: Problem[Given], reads: int) -> str:
    """In words, for ``explain``; ``p`` has arrays or shapes."""
    size = p.n * p.logits.shape[-1] * p.logits.dtype.itemsize
    return f"logits read {reads}x ({reads * size:,} B), dlogits written once ({size:,} B)"


@dataclasses.dataclass(frozen=True)
class Chunked(PlainJax[Problem[Given]]):
    """What ``Backend`` asks for, out of four passes over the logits, which are methods for kernels to take over."""

    name: ClassVar[str] = "chunked"
    in_forward: ClassVar[bool] = True

    # Passes.

    token_stats = staticmethod(token_stats)
    token_sums = staticmethod(token_sums)
    dlogits = staticmethod(dlogits)
    stats_and_dlogits = staticmethod(stats_and_dlogits)

    # The protocol.

    def tiles(self, p: Problem[Given]) -> dict[str, object]:
        """How the logits are cut up; ``p`` has arrays or shapes."""
        return {"rows": rows_per_chunk(p)}

    def describe(self, p: Problem[Given], way: Way) -> Cost:
        """No matmuls. Kernels read logits once if statistics and dlogits come from a single pass."""
        if not way.loss:
            words = "statistics; dlogits later from the cotangents that arrive"
        elif way.in_forward:
            words = "statistics and dlogits in one pass (each token's gradient follows from its own statistics)"
        else:
            words = f"statistics, then dlogits from cotangents ({way.reason})"
        reads = 1 if way.in_forward and self.kernels is not None else 2
        return Cost(words, "0", bytes_moved(p, reads), self.tiles(p), counts=(0, 0, 0))

    def statistics(self, p: Problem[Given], loss: Loss | None = None) -> tuple[TokenStats, None]:
        return self.token_stats(p.counting(loss)), None

    def forward(self, p: Problem[Given], want: bool) -> tuple[TokenStats, None, None]:
        return self.token_stats(p), None, None

    def backward(
        self, p: Problem[Given], want: bool, out: TokenStats, g: StatCotangents, residual: None, only_logp: bool
    ) -> Array:
        """dlogits by the backend's own pass, or by plain JAX where the call asks for that."""
        return dlogits(p, out, g) if p.call.bwd_impl == "jax" else self.dlogits(p, out, g)

    def gradients_in_forward(self, p: Problem[Given], want: bool, loss: Loss) -> tuple[TokenStats, None, Array]:
        out, d = self.stats_and_dlogits(p.counting(loss), token_program(loss.objective, loss.inputs))
        return out, None, d

    # A shard of the vocabulary.

    def sums(self, p: Problem[Given], want: bool | None) -> tuple[RowSums, None]:
        return self.token_sums(p), None

    def shard_of_pair(self, p: Problem[Given]) -> ShardOfPair:
        return row_passes.shard_of_pair(p.logits, p)

    def pair_sums(self, p: Problem[Given], stats: TokenStats, teacher: TokenStats) -> PairSums:
        return row_passes.sums_of_pair(p.logits, p, stats, teacher)
