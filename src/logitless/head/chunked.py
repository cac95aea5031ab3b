"""The head in plain JAX, a chunk of live tokens at a time: never more than ``[chunk, V]`` logits.

Per chunk of C tokens (M = one ``C x H x V`` matmul, 2 C H V FLOP):

    statistics        x = h W^T (M)                                   reads W once per chunk
    grad in forward   x (M), dx in place of x, dh = dx W (M), dW += dx^T h (M)      three matmuls per active token
    by recompute      statistics first; later x again (M), dx, dh (M), dW (M)       four matmuls per token
    kept logits       statistics first, x kept; later dx, dh (M), dW (M)            three matmuls per token
    frozen head       the same without dW: two and three matmuls

Grad in forward serves objectives whose tokens are uncoupled: a chunk's cotangents follow from its own statistics by
differentiating the objective on the chunk. Both visit live tokens only, and only tokens whose cotangent can be
nonzero enter the backward matmuls. dW is summed in float32 over the chunks, or in the parameter's dtype if asked.

Bytes, besides inputs and outputs: a ``[C, V]`` buffer of logits (``logits_dtype``), a buffer of dlogits (the operands'
dtype) unless XLA reuses the first, and the float32 accumulator of dW for a narrower head. With a ``memory_budget`` that
holds the logits of all tokens as well, the forward pass keeps the logits for cotangents that arrive later.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from logitless.core import id_passes, row_passes
from logitless.core.backend import Cost, PlainJax, Way
from logitless.core.chunk_size import column_tile, whole_chunks
from logitless.core.divergences import PairSums, ShardOfPair, empty_pair_sums
from logitless.core.problem import Given, Gradients, Linear, Loss, Problem, Teacher, Wanted
from logitless.core.row_passes import Sweep, Visit, as_wide_as, front, live_sweep, split_sweep, sweep_over
from logitless.core.stats import RowSums, StatCotangents, TokenStats, blank_stats, empty_sums
from logitless.core.top_k import TopK, blank_top_k, top_of_rows
from logitless.head.linear import add_dhead, dhidden, dx_dtype, in_parameter_dtypes, raw_logits, zero_grads


def logits_of(p: Problem) -> Array:
    """Logits ``x [C, V]`` for a chunk: a single matmul."""
    return raw_logits(p.h, p.head, p.call.logits_dtype)


def chunk_of(visit: Visit, p: Problem) -> tuple[Problem, Array]:
    """A chunk's own problem and its logits. The matmul comes first: a GPU's compiler that meets the small gathers
    before it keeps 32 MiB more at the peak (T=8192, H=4096)."""
    h = visit.hidden(p)
    x = raw_logits(h, p.head, p.call.logits_dtype)
    return problem_of(visit, p, h), x


def problem_of(visit: Visit, p: Problem, h: Array | None = None) -> Problem:
    """A chunk's own problem, with the teacher's logits; ``h`` if the chunk's hidden states are there already."""
    part = visit.problem(p, h)
    return part if p.teacher is None else dataclasses.replace(part, teacher=_teacher_of(visit, p))


def _teacher_of(visit: Visit, p: Problem) -> Teacher:
    """The chunk's teacher with its logits: one matmul over the policy's columns."""
    teacher = visit.teacher(p)
    assert isinstance(teacher.source, Linear)
    t = raw_logits(teacher.source.hidden, teacher.source.head, p.call.logits_dtype)
    return dataclasses.replace(teacher, source=Given(as_wide_as(t, p.head.vocab)))


def _row_statistics(x: Array, p: Problem) -> TokenStats:
    return row_passes.statistics(x, p) if p.more_ids is None else id_passes.statistics(x, p)


def _row_dx(x: Array, p: Problem, stats: TokenStats, g: StatCotangents, dtype: DTypeLike, tile: int | None) -> Array:
    passes = row_passes.dx if p.more_ids is None else id_passes.dx
    return passes(x, p, stats, g, dtype, tile)


# -- gradient buffers ------------------------------------------------------------------------------------------------


def no_gradients(p: Problem, want: Wanted) -> Gradients:
    """Accumulators for a sweep: dH in the dtype of dH, dW in its sum's dtype."""
    hidden = jnp.zeros(p.h.shape, jnp.float32 if p.call.partial_hidden else p.h.dtype) if want.hidden else None
    dtype = p.head.weight.dtype if p.call.sum_head_grad_in == "param" else jnp.float32
    return Gradients(hidden, zero_grads(p.head, want, dtype))


def dx_dtype_of(x: Array, p: Problem, total: Gradients) -> jnp.dtype:
    """The dtype in which the dx of a chunk's logits ``x`` is made, to be added to ``total``."""
    return dx_dtype(x.dtype, p.h.dtype, total.head.bias is not None)


def add_chunk(visit: Visit, total: Gradients, dx: Array, p: Problem) -> Gradients:
    """``total`` with a chunk ``p`` of tokens: its rows of dH put in their place, the head's gradients added. ``dx`` is
    rounded here if it was not."""
    tile = column_tile()
    dh = None if total.hidden is None else visit.put(total.hidden, dhidden(dx.astype(p.h.dtype), p.head, tile))
    return Gradients(dh, add_dhead(total.head, dx, p.h, p.head, tile))


def finished(p: Problem, g: Gradients) -> Gradients:
    """The gradients in the dtypes in which they leave the sweep."""
    return g if p.call.partial_head else Gradients(g.hidden, in_parameter_dtypes(g.head, p.head))


# -- the backend -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Chunked(PlainJax[Problem]):
    """Sweeps over chunks of tokens; the passes over a chunk's logits are methods, for kernels to take over."""

    name: ClassVar[str] = "chunked"
    in_forward: ClassVar[bool] = True
    in_place: ClassVar[bool] = False
    """Whether dx is made in the place, and so in the dtype, of ``x``; another dtype is a copy of it."""

    def describe(self, p: Problem, way: Way) -> Cost:
        """Three matmuls in the forward pass, four by recompute."""
        call, head = p.call, p.head
        if way.in_forward:
            words, counts = "grad in forward: a token's cotangent follows from its own statistics", (3, 2, 1)
            where = "1 where no gradient is possible"
        else:
            form, counts = ("from kept logits", (3, 2, 1)) if call.kept else ("by recompute", (4, 3, 1))
            words = f"{form}: {way.reason if way.loss else 'cotangents arrive later'}"
            where = "1 where the cotangent is zero"
        if p.teacher is not None:  # teacher logits, in every sweep that makes the policy's logits
            more, alone = (1 if way.in_forward else 2), 2
            if way.shards > 1 and p.teacher.divergence == "jsd":  # a sweep for each side's sums, one for the pair's
                more, alone = 4, 4
            counts, where = (counts[0] + more, counts[1] + more, alone), where.replace("1", str(alone), 1)
        frozen, none = f"{counts[1]} with a frozen head", f"{counts[2]} without a gradient"
        matmuls = f"{counts[0]} ({frozen}, {none}) per live token; {where}"
        sweeps, item = -(-p.n // call.chunk), jnp.dtype(call.logits_dtype).itemsize
        moved = (
            f"head read {sweeps}x per matmul ({head.weight.size * head.weight.dtype.itemsize:,} B each), logits chunk "
            f"{call.chunk * head.vocab * item:,} B at a time; at most {sweeps} chunks, fewer with dead tokens"
        )
        tiles: dict[str, object] = {"chunk": call.chunk, "layout": head.layout}
        tiles |= {"kept": call.kept} if call.kept else {}
        return Cost(words, matmuls, moved, tiles, counts, sweep=call.chunk)

    def tokens_kept(self, p: Problem) -> int:
        """Tokens whose logits the forward pass keeps for cotangents that arrive later: all or none."""
        call, vocab = p.call, p.head.vocab
        if call.memory_budget is None or p.teacher is not None or p.more_ids is not None:
            return 0
        logit, own = jnp.dtype(call.logits_dtype).itemsize, jnp.dtype(p.h.dtype).itemsize
        rows = (logit + own) * call.chunk + logit * whole_chunks(p.n, call.chunk)
        return p.n if rows * vocab <= call.memory_budget else 0

    # Passes over a chunk's logits. Barriers isolate the statistics from neighbouring operations, and compile
    # to the same arithmetic, with equal bits with and without a gradient.

    def row_statistics(self, x: Array, p: Problem) -> TokenStats:
        """Statistics of the chunk's rows; ``p.live`` marks rows that count."""
        return lax.optimization_barrier(_row_statistics(lax.optimization_barrier(x), p))

    def row_statistics_and_dx(self, x: Array, p: Problem, loss: Loss, dtype: DTypeLike) -> tuple[TokenStats, Array]:
        """Statistics, and the dx of an uncoupled objective over the chunk's own inputs."""
        x = lax.optimization_barrier(x)
        stats = self.row_statistics(x, p)
        return stats, _row_dx(x, p, stats, loss.cotangents(stats), dtype, column_tile())

    def row_dx(self, x: Array, p: Problem, stats: TokenStats, g: StatCotangents, dtype: DTypeLike) -> Array:
        """dx from known statistics and cotangents; zero rows where the cotangents are."""
        return _row_dx(lax.optimization_barrier(x), p, stats, g, dtype, column_tile())

    # Sweeps.

    def sweep_statistics(self, p: Problem, sweep: Sweep, out: TokenStats) -> TokenStats:
        """``out`` with the statistics of the tokens that ``sweep`` visits: one matmul each."""

        def body(visit: Visit, out: TokenStats) -> TokenStats:
            part, x = chunk_of(visit, p)
            return visit.put_all(out, self.row_statistics(x, part))

        return sweep.run(body, out)

    def statistics(self, p: Problem, loss: Loss | None = None) -> tuple[TokenStats, None]:
        """One matmul per live token."""
        if loss is None:
            return self.token_statistics(p), None
        out = p.blank_stats()
        for sweep in split_sweep(loss.inputs.mask, loss.may_move(), p.call.chunk):
            out = self.sweep_statistics(p, sweep, out)
        return out, None

    def top_k(self, p: Problem) -> TopK:
        """The likeliest ids: one matmul per live token."""

        def body(visit: Visit, out: TopK) -> TopK:
            part, x = chunk_of(visit, p)
            return visit.put_all(out, top_of_rows(lax.optimization_barrier(x), part, p.call.top_k))

        return sweep_over(p.n, p.live, p.call.chunk).run(body, blank_top_k(p.n, p.call.top_k))

    def token_statistics(self, p: Problem) -> TokenStats:
        """Statistics for cotangents that arrive later."""
        return self.sweep_statistics(p, sweep_over(p.n, p.live, p.call.chunk), p.blank_stats())

    def forward(self, p: Problem, want: Wanted) -> tuple[TokenStats, None, Array | None]:
        """The residual is the logits of all live tokens, first those (:func:`row_passes.front`), if they are kept."""
        if not p.call.kept:
            return self.token_statistics(p), None, None
        f = front(p.live)
        q, count = f.problem(p), p.n if f.count is None else f.count

        def body(visit: Visit, carry: tuple[TokenStats, Array]) -> tuple[TokenStats, Array]:
            part, x = chunk_of(visit, q)
            out, kept = carry
            stats = self.row_statistics(x, part)
            return visit.put_all(out, stats), lax.dynamic_update_slice(kept, x, (visit.read[0], 0))

        kept = jnp.zeros((whole_chunks(p.n, p.call.chunk), p.head.vocab), p.call.logits_dtype)
        sweep = Sweep(None, 0, count, count, n=p.n, chunk=p.call.chunk)
        out, kept = sweep.run(body, (p.blank_stats(), kept))
        return jax.tree.map(f.put_back, out), None, kept

    def backward(
        self, p: Problem, want: Wanted, out: TokenStats, g: StatCotangents, residual: Array | None, only_logp: bool
    ) -> Gradients:
        """From kept logits or by recompute; tokens whose cotangents are all zero are not visited."""
        moving = g.any_nonzero() if p.live is None else g.any_nonzero() & p.live
        if residual is None:
            sweep = live_sweep(moving, p.call.chunk)
            return finished(p, self.add_gradients(p, sweep, out, g, no_gradients(p, want)))
        f = front(p.live)
        q = f.problem(p)
        sweep = live_sweep(f.take(moving), p.call.chunk)
        out, g = jax.tree.map(f.take, (out, g))
        total = self.add_gradients(q, sweep, out, g, no_gradients(q, want), residual)
        hidden = None if total.hidden is None else f.put_back(total.hidden)
        return finished(p, Gradients(hidden, total.head))

    def add_gradients(
        self, p: Problem, sweep: Sweep, out: TokenStats, g: StatCotangents, total: Gradients, kept: Array | None = None
    ) -> Gradients:
        """``total`` with the gradients of the tokens that ``sweep`` visits: rows of dH written, the rest added. The
        logits of the tokens are ``kept [N, V]`` or made again."""

        def body(visit: Visit, total: Gradients) -> Gradients:
            part, x = chunk_of(visit, p) if kept is None else (visit.problem(p), visit.take(kept))
            dx = self.row_dx(x, part, *visit.known(out, g, p.n), dx_dtype_of(x, p, total))
            return add_chunk(visit, total, dx, part)

        return sweep.run(body, total)

    def gradients_in_forward(self, p: Problem, want: Wanted, loss: Loss) -> tuple[TokenStats, None, Gradients]:
        """Statistics, and the gradients of an uncoupled objective with a unit cotangent of the loss."""
        moving, rest = split_sweep(loss.inputs.mask, loss.may_move(), p.call.chunk)

        def body(visit: Visit, carry: tuple[TokenStats, Gradients]) -> tuple[TokenStats, Gradients]:
            out, total = carry
            part, x = chunk_of(visit, p)
            own = visit.loss(loss, p.n)
            stats, dx = self.row_statistics_and_dx(x, part.counting(own), own, dx_dtype_of(x, p, total))
            return visit.put_all(out, stats), add_chunk(visit, total, dx, part)

        out, total = moving.run(body, (p.blank_stats(), no_gradients(p, want)))
        return self.sweep_statistics(p, rest, out), None, finished(p, total)

    # A shard of the vocabulary.

    def sums(self, p: Problem, want: Wanted | None) -> tuple[RowSums, None]:
        """Sums over the head's columns: one matmul per live token."""
        p = dataclasses.replace(p, teacher=None)

        def body(visit: Visit, out: RowSums) -> RowSums:
            part, x = chunk_of(visit, p)
            x = lax.optimization_barrier(x)
            return visit.put_all(out, lax.optimization_barrier(row_passes.sums(x, part)))

        return sweep_over(p.n, p.live, p.call.chunk).run(body, empty_sums((p.n,))), None

    def shard_of_pair(self, p: Problem) -> ShardOfPair:
        """Both distributions over the columns of both heads: two matmuls per live token."""

        def body(visit: Visit, out: ShardOfPair) -> ShardOfPair:
            part, x = chunk_of(visit, p)
            found = row_passes.shard_of_pair(lax.optimization_barrier(x), part)
            return visit.put_all(out, lax.optimization_barrier(found))

        empty, blank = empty_sums((p.n,)), blank_stats(p.n)
        start = ShardOfPair(empty, empty, blank, blank, empty_pair_sums((p.n,)))
        return sweep_over(p.n, p.live, p.call.chunk).run(body, start)

    def pair_sums(self, p: Problem, stats: TokenStats, teacher: TokenStats) -> PairSums:
        """Sums of the divergence over the columns of both heads: two matmuls per live token."""

        def body(visit: Visit, out: PairSums) -> PairSums:
            part, x = chunk_of(visit, p)
            own, other = jax.tree.map(visit.take, (stats, teacher))
            return visit.put_all(out, row_passes.sums_of_pair(lax.optimization_barrier(x), part, own, other))

        return sweep_over(p.n, p.live, p.call.chunk).run(body, empty_pair_sums((p.n,)))
