"""The head's backward over the vocabulary columns that carry the gradient: about 1.3 matmuls instead of three.

A trained policy's softmax is nearly empty. Per chunk of C tokens, with M one ``C x H x V`` matmul and K active columns
(``active_columns.py``; on real policies K is about 8 % of V):

    grad in forward   x = h W^T (M), statistics, active columns; dx, dh and dW over K columns (2 M K / V)
    by recompute      the forward sweep finds and keeps the columns; later x, dx, dh, dW over them (3 M K / V)
    hard rows         those that would leave out more than the tolerance: x, dx, dh, dW, dense, as one group (3 M each)
    dense chunks      where neither pays, x is made into dx as without all this

What the columns left out would add to a row of dH, ``-g sum p_v W_v``, is replaced by ``-g u c``, with u their mass and
c a mean row of the head: head rows have much in common, so this takes away half of the error or more, for the price of
one more vector. What is left is at most ``|g| u max_v ||W_v - c||``, and ``|g| u ||h||`` in all of dW; u is known and
reported (docs/sparse-backward.md).

The K columns are taken in slabs by a loop with a traced trip count, so nothing compiles anew when the policy sharpens.
Decisions are loops of no or one trip, too: a loop updates dW in place, where a conditional would copy it.

With a teacher (a distillation loss, an exact KL) the columns are found from dx (``dx_columns.py``): 2 + 2 K/V matmuls
a token, and what is left out is bounded relative to the row's own gradient.

Where statistics are complete only after the sweep that makes them (a shard of the vocabulary), the columns are found by
a second one (:meth:`Sparse.shard_columns`, one more M).

Bytes, on top of ``chunked.py``: a slab of the head, of x, dx and dW; ``[C, H]`` float32.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.core import row_passes
from logitless.core.backend import Around, Cost, Split, Way
from logitless.core.problem import Gradients, Linear, Loss, Problem, Wanted
from logitless.core.pytree import register
from logitless.core.row_passes import Visit, live_sweep, split_sweep, sweep_over
from logitless.core.shapes import PyTree
from logitless.core.stats import StatCotangents, TokenStats, blank_stats
from logitless.head.chunked import Chunked, add_chunk, chunk_of, dx_dtype_of, finished, logits_of, no_gradients
from logitless.head.linear import raw_logits
from logitless.head.sparse import active_columns as columns_of
from logitless.head.sparse import dx_columns
from logitless.head.sparse.active_columns import (
    Columns,
    Rule,
    SparseReport,
    blank_report,
    chunk_report,
    chunk_rule,
    in_words,
    noted,
)
from logitless.head.sparse.gather import Known, add_slabs, in_their_place, mean_row, misses, once, take_logits, without

_HARD_CHUNK = 1024
"""Upper bound of tokens per chunk of hard rows: hard rows are few, and padding should stay small."""

_PROBE = 64
"""Rows of a chunk that are looked at first, to see whether the rest is worth looking at."""


def hard_chunk(chunk: int) -> int:
    """Tokens per chunk of hard rows."""
    return min(chunk, _HARD_CHUNK)


@register
@dataclasses.dataclass(frozen=True)
class ChunkColumns:
    """The columns that a forward sweep found for each of its chunks, for the backward sweep over the same chunks."""

    index: Array  # [chunks, most] int32
    count: Array  # [chunks] int32
    left_out: Array  # [N] float32; infinite in the rows of dense chunks

    def with_chunk(self, at: Array, visit: Visit, found: Columns) -> ChunkColumns:
        """The ``at``-th chunk's columns in their place."""
        mass = jnp.where(found.dense, jnp.inf, found.left_out)
        return ChunkColumns(
            lax.dynamic_update_index_in_dim(self.index, found.index, at, 0),
            lax.dynamic_update_index_in_dim(self.count, found.count, at, 0),
            visit.put(self.left_out, mass),
        )


def _nothing_kept(rule: Rule, n: int, chunk: int) -> ChunkColumns:
    chunks = n // chunk + 3  # the rest takes one whole chunk, or at most two quarters
    return ChunkColumns(
        jnp.zeros((chunks, rule.most), jnp.int32), jnp.zeros((chunks,), jnp.int32), jnp.full((n,), jnp.inf, jnp.float32)
    )


def _probe_stride(size: int) -> int:
    """Stride of the probed rows of a chunk."""
    return max(size // _PROBE, min(size, 8))


@dataclasses.dataclass(frozen=True)
class Sparse(Around[Problem, Wanted]):
    """A backend around :class:`Chunked` (or one of its kernels): the same statistics, a sparse backward."""

    own: Chunked

    def supports(self, p: Problem, split: Split) -> str | None:
        """With a teacher, losses whose gradients come out of the forward pass; else everything."""
        if p.teacher is not None and (split.late or split.vocabulary > 1):
            return "with a teacher it serves losses whose gradients come out of the forward pass"
        return self.own.supports(p, split)

    def describe(self, p: Problem[Linear], way: Way) -> Cost:
        """The saving depends on the data. ``p`` has the columns of one of ``way.shards`` shards."""
        cost, rule = self.own.describe(p, way), chunk_rule(p.head.vocab)
        what = "mass" if p.teacher is None else "gradient"
        words = (
            f"{cost.way}; backward over the K active columns of a chunk, which leave at most {in_words(way.mass)} of a "
            f"row's {what} out (rows that would leave out more: all columns, as a group); dense chunks where "
            f"K > {rule.most:,}"
        )
        late = not way.in_forward
        if p.teacher is not None:
            sources = "2 + 2 K/V per live token, 4 in dense chunks, 6 a hard row"
            matmuls = f"{sources}; one less of the K/V and of the rest with a frozen head, 2 without a gradient"
            tiles = {**cost.tiles, "slab": rule.slab}
            return dataclasses.replace(cost, way=words, matmuls=matmuls, tiles=tiles, counts=None)
        matmuls = f"1 + {3 if late else 2} K/V per live token, {4 if late else 3} in dense chunks, 4 a hard row"
        if way.shards > 1:
            words += (
                "; what a row leaves out is the sum over shards, and where that is too much it takes all columns of "
                f"those that leave out more than 1/{way.shards} of what it may"
            )
            matmuls = (
                "2 + 3 K/V per live token (statistics of all shards first, columns by a second sweep), 4 to 5 in dense "
                "chunks, 5 a hard row"
            )
        matmuls += "; one less of the K/V and of the rest with a frozen head, 1 without a gradient"
        return dataclasses.replace(
            cost, way=words, matmuls=matmuls, tiles={**cost.tiles, "slab": rule.slab}, counts=None
        )

    def statistics(self, p: Problem, loss: Loss | None = None) -> tuple[TokenStats, SparseReport]:
        """Statistics by the inner backend, in the sweep that finds columns."""
        if loss is not None:
            return Chunked.statistics(self.own, p, loss)[0], blank_report(p.n)  # by the sweep that has the gradient
        sweep = sweep_over(p.n, p.live, p.call.chunk)
        return self.own.sweep_statistics(p, sweep, p.blank_stats()), blank_report(p.n)

    # -- grad in forward ---------------------------------------------------------------------------------------------

    def gradients_in_forward(self, p: Problem, want: Wanted, loss: Loss) -> tuple[TokenStats, SparseReport, Gradients]:
        """:meth:`Chunked.gradients_in_forward` within the tolerance."""
        rule = chunk_rule(p.head.vocab, want.matmuls, p.stages)
        moving, rest = split_sweep(loss.inputs.mask, loss.may_move(), p.call.chunk)
        common = mean_row(rule, p) if want.hidden else None
        add = self._add_chunk if p.teacher is None else self._add_chunk_beside_a_teacher

        def body(visit: Visit, carry: tuple[TokenStats, Gradients, SparseReport]) -> PyTree:
            out, total, report = carry
            part, x = chunk_of(visit, p)
            own = visit.loss(loss, p.n)
            stats, total, more = add(rule, common, visit, part.counting(own), x, own, total)
            report = noted(visit, report, more)
            return visit.put_all(out, stats), total, report

        start = (p.blank_stats(), no_gradients(p, want), blank_report(p.n))
        out, total, report = moving.run(body, start)
        out = self.own.sweep_statistics(p, rest, out)
        return out, report, finished(p, self._add_hard(p, report.hard, out, loss.cotangents(out), total))

    def _add_chunk(
        self, rule: Rule, common: Array | None, visit: Visit, p: Problem, x: Array, loss: Loss, total: Gradients
    ) -> tuple[TokenStats, Gradients, SparseReport]:
        """``(statistics, total with the gradients, report)`` of a chunk ``p`` with logits ``x``, but for its hard
        rows."""

        def look(_: None) -> tuple[TokenStats, StatCotangents, Columns]:
            stats = self.own.row_statistics(x, p)
            g = loss.cotangents(stats)
            miss = misses(p.tolerance, stats, g, p.call.vocab_size)
            return stats, g, columns_of.find(rule, x, p, stats, g.any_nonzero(), miss)

        stats, g, found = once(~self._flat(rule, x, p, loss), look, _unseen(rule, p))
        miss = misses(p.tolerance, stats, g, p.call.vocab_size)
        hard = g.any_nonzero() & miss(found.left_out) & ~found.dense
        easy = Known(stats, without(g, hard))
        start = None if common is None else in_their_place(common, found.left_out, easy.g, p.transform)
        chunk = add_slabs(
            rule, rule.slabs(found.count), found.index, lambda index, _: take_logits(x, index), p,
            easy, Gradients(start, total.head),
        )  # fmt: skip
        total = _put(visit, total, chunk)
        stats, g, total = once_dense(self.own, found.dense, visit, x, p, loss, (stats, g, total))
        return stats, total, chunk_report(rule, p.head, found, g.any_nonzero(), hard)

    def _add_chunk_beside_a_teacher(
        self, rule: Rule, common: Array | None, visit: Visit, p: Problem, x: Array, loss: Loss, total: Gradients
    ) -> tuple[TokenStats, Gradients, SparseReport]:
        """The same with a teacher: dx for all columns, matmuls over the active columns (``dx_columns.py``)."""
        stats, dx = self.own.row_statistics_and_dx(x, p, loss, dx_dtype_of(x, p, total))
        rows = loss.cotangents(stats).any_nonzero()
        found = dx_columns.find(rule, dx, p, rows)
        total = _put(visit, total, dx_columns.add_columns(rule, found, dx, p, common, total))
        total = once(found.columns.dense, lambda state: add_chunk(visit, state, dx, p), total)
        return stats, total, chunk_report(rule, p.head, found.columns, rows, found.hard)

    def _flat(self, rule: Rule, x: Array, p: Problem, loss: Loss) -> Array:
        """Whether a few of the chunk's rows show that it is dense, cotangents known."""
        every = _probe_stride(p.n)
        few, x = p.rows(lambda a: a[::every]), lax.optimization_barrier(x)[::every]
        stats = row_passes.statistics(x, few)
        moving = loss.rows(lambda a: a[::every]).cotangents(stats).any_nonzero()
        return columns_of.surely_dense(rule, x, few, stats, moving)

    def _add_hard(self, p: Problem, hard: Array, out: TokenStats, g: StatCotangents, total: Gradients) -> Gradients:
        """``total`` with the rows ``hard [N]``, through all columns."""
        sweep = live_sweep(hard, hard_chunk(p.call.chunk), rest_at_once=True)
        return self.own.add_gradients(p, sweep, out, g, total)

    # -- by recompute ------------------------------------------------------------------------------------------------

    def forward(self, p: Problem, want: Wanted) -> tuple[TokenStats, SparseReport, ChunkColumns]:
        """Statistics, one matmul per live token, and each chunk's active columns for :meth:`backward`."""
        return self._sweep_for_columns(p, want, None, p.tolerance)

    def shard_columns(
        self, p: Problem, want: Wanted, out: TokenStats, share: Array
    ) -> tuple[ChunkColumns, SparseReport]:
        """Each chunk's active columns of a head that has a part of the vocabulary, from the statistics of the whole.

        One matmul per live token; none for chunks that a few of their rows show to be dense. The problem's tolerance is
        that of the whole vocabulary, against which columns are judged, ``share`` what a row may leave out here if
        nobody knows what it leaves out elsewhere. Which rows are hard is not decided here: the report has none, and all
        of the masses.
        """
        _, report, kept = self._sweep_for_columns(p, want, out, share)
        return kept, report

    def _sweep_for_columns(
        self, p: Problem, want: Wanted, known: TokenStats | None, limit: Array | None
    ) -> tuple[TokenStats, SparseReport, ChunkColumns]:
        rule = chunk_rule(p.head.vocab, want.matmuls)

        def body(visit: Visit, carry: PyTree) -> PyTree:
            out, kept, report, at = carry
            part, x = chunk_of(visit, p) if known is None else (visit.problem(p), None)
            every, live = _probe_stride(part.n), visit.inside(p.n)
            few = part.rows(lambda a: a[::every])
            if known is None:
                assert x is not None
                stats, few_x = self.own.row_statistics(x, part), x[::every]
            else:
                stats, few_x = jax.tree.map(visit.take, known), logits_of(few)
            some = jax.tree.map(lambda a: a[::every], stats)
            flat = columns_of.surely_dense(rule, few_x, few, some, live[::every])
            miss = misses(limit, stats, None, p.call.vocab_size)

            def look(_: None) -> Columns:
                return columns_of.find(rule, logits_of(part) if x is None else x, part, stats, live, miss)

            found = once(~flat, look, columns_of.blank_columns(rule, p.head.vocab, part.n))
            hard = live & miss(found.left_out) & ~found.dense
            own = chunk_report(rule, p.head, found, live, hard if known is None else jnp.zeros_like(hard))
            out = visit.put_all(out, stats) if known is None else out
            return out, kept.with_chunk(at, visit, found), noted(visit, report, own), at + 1

        out = blank_stats(p.n) if known is None else known
        start = (out, _nothing_kept(rule, p.n, p.call.chunk), blank_report(p.n), jnp.int32(0))
        out, kept, report, _ = sweep_over(p.n, p.live, p.call.chunk).run(body, start)
        return out, report, kept

    def backward(
        self, p: Problem, want: Wanted, out: TokenStats, g: StatCotangents, residual: ChunkColumns, only_logp: bool
    ) -> Gradients:
        """Gradients for given cotangents, over the columns that the forward sweep found."""
        hard = misses(p.tolerance, out, g, p.call.vocab_size)(residual.left_out)
        return self.gradients_beside(p, want, Known(out, g), residual, hard)

    def gradients_beside(self, p: Problem, want: Wanted, known: Known, kept: ChunkColumns, hard: Array) -> Gradients:
        """:meth:`backward` with known ``hard [N]`` rows, which go through all columns."""
        rule = chunk_rule(p.head.vocab, want.matmuls)
        out, g = known.stats, known.g
        moving = g.any_nonzero() if p.live is None else g.any_nonzero() & p.live
        hard = hard & moving
        easy = without(g, hard | ~moving)
        common = mean_row(rule, p) if want.hidden else None

        def body(visit: Visit, carry: PyTree) -> PyTree:
            total, at = carry
            part, own = visit.problem(p), Known(*visit.known(out, easy, p.n))
            trips = jnp.where(jnp.any(own.g.any_nonzero()), rule.slabs(kept.count[at]), 0)
            left_out = visit.take(kept.left_out)
            start = None if common is None else in_their_place(common, left_out, own.g, part.transform)
            chunk = add_slabs(
                rule, trips, kept.index[at], lambda _, some: raw_logits(part.h, some, p.call.logits_dtype), part, own,
                Gradients(start, total.head),
            )  # fmt: skip
            return _put(visit, total, chunk), at + 1

        start = (no_gradients(p, want), jnp.int32(0))
        total, _ = sweep_over(p.n, p.live, p.call.chunk).run(body, start)
        return finished(p, self._add_hard(p, hard, out, g, total))


def _unseen(rule: Rule, p: Problem) -> tuple[TokenStats, StatCotangents, Columns]:
    """What is known of a chunk before anyone has looked."""
    zero = jnp.zeros((p.n,), jnp.float32)
    blank = columns_of.blank_columns(rule, p.head.vocab, p.n)
    return blank_stats(p.n), StatCotangents(zero, zero, zero), blank


def _put(visit: Visit, total: Gradients, chunk: Gradients) -> Gradients:
    """A chunk's dH in its place; its part of the head's gradients is added already."""
    if total.hidden is None or chunk.hidden is None:
        return Gradients(total.hidden, chunk.head)
    return Gradients(visit.put(total.hidden, chunk.hidden), chunk.head)


def once_dense(
    backend: Chunked, dense: Array, visit: Visit, x: Array, p: Problem, loss: Loss, carry: PyTree
) -> tuple[TokenStats, StatCotangents, Gradients]:
    """``carry`` (statistics, cotangents, gradients), or what all columns give if the chunk is ``dense``."""

    def body(state: PyTree) -> PyTree:
        x, _, _, total = state
        dtype = x.dtype if backend.in_place else dx_dtype_of(x, p, total)
        stats, dx = backend.row_statistics_and_dx(x, p, loss, dtype)
        total = add_chunk(visit, total, dx, p)
        # What a loop hands on must not be overwritten: if x were, the kernel would write dx over a copy of it.
        return (dx if dx.dtype == x.dtype else x), stats, loss.cotangents(stats), total

    _, *rest = once(dense, body, (x, *carry))
    return tuple(rest)
