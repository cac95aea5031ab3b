"""The sparse backward by recompute: the forward sweep finds and keeps each chunk's columns, the backward uses them.

    forward    x = h W^T (M), statistics, active columns
    backward   x, dx, dh and dW over the K columns kept (3 M K / V); hard rows and those of dense chunks: all columns

Where statistics are complete only after the sweep that makes them (a shard of the vocabulary), the columns are found by
a second one (:func:`known_columns`, one more M).

For sequence-level objectives, and cotangents that arrive later (``sparse.py`` has the rest).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.head import chunked, sparse
from logitless.head import sparse_columns as columns_of
from logitless.head.chunked import SweepConfig, Wanted
from logitless.head.operator import Head, HeadGrads, raw_logits
from logitless.head.sparse_columns import ColumnPasses, Columns
from logitless.head.sparse_report import SparseReport, blank_report, chunk_report, noted
from logitless.head.sweep import Visit, sweep_over
from logitless.logits.chunked import blank_stats
from logitless.pytree import register
from logitless.stats import StatCotangents, TokenStats
from logitless.transform import LogitTransform


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


def _nothing_kept(c: SweepConfig, p: ColumnPasses, n: int) -> ChunkColumns:
    chunks = n // c.chunk + 3  # the rest takes one whole chunk, or at most two quarters
    return ChunkColumns(
        jnp.zeros((chunks, p.most), jnp.int32), jnp.zeros((chunks,), jnp.int32), jnp.full((n,), jnp.inf, jnp.float32)
    )


def stats_and_columns(
    c: SweepConfig,
    wanted: Wanted,
    h: Array,
    head: Head,
    targets: Array,
    transform: LogitTransform,
    live: Array | None,
    tolerance: Array,
) -> tuple[TokenStats, ChunkColumns, SparseReport]:
    """Statistics, one matmul per live token, and each chunk's active columns for :func:`gradients`."""
    n = h.shape[0]
    p = sparse.column_passes(c, head)
    sweep = sweep_over(n, live, c.chunk)

    def body(visit: Visit, carry: Any) -> Any:
        out, kept, report, at = carry
        x = raw_logits(chunked.chunk_hidden(visit, h), head, c.logits_dtype)
        t, inside, y = chunked.chunk_transform(transform, visit), visit.inside(n), visit.take(targets)
        stats = c.rows.statistics(x, y, t, inside)
        every = sparse.probe_stride(visit.read.size)
        few_x, few_t, few = columns_of.every_nth((x, t, stats), every)
        flat = columns_of.surely_dense(p, few_x, few_t, few, inside[::every], tolerance)
        miss = sparse.misses(tolerance, stats, None, p.vocab_size)

        def look(_: Any) -> Columns:
            return columns_of.find(p, x, y, t, stats, inside, miss, tolerance, wanted.matmuls)

        found = sparse.once(~flat, look, columns_of.blank_columns(p, head.vocab, visit.read.size))
        kept = kept.with_chunk(at, visit, found)
        part = chunk_report(p, head, found, inside, inside & miss(found.left_out) & ~found.dense)
        return jax.tree.map(visit.put, out, stats), kept, noted(visit, report, part), at + 1

    start = (blank_stats(n), _nothing_kept(c, p, n), blank_report(n), jnp.int32(0))
    stats, kept, report, _ = sweep.run(body, start)
    return stats, kept, report


def known_columns(
    c: SweepConfig,
    wanted: Wanted,
    h: Array,
    head: Head,
    targets: Array,
    transform: LogitTransform,
    live: Array | None,
    stats: TokenStats,
    tolerance: Array,
    share: Array,
) -> tuple[ChunkColumns, SparseReport]:
    """Each chunk's active columns of a head that has a part of the vocabulary, from the statistics of the whole.

    One matmul per live token; none for chunks that a few of their rows show to be dense. ``tolerance`` is that of the
    whole vocabulary, against which columns are judged, ``share`` what a row may leave out here if nobody knows what it
    leaves out elsewhere. Which rows are hard is not decided here: the report has none, and all of the masses.
    """
    n = h.shape[0]
    p = sparse.column_passes(c, head)

    def body(visit: Visit, carry: Any) -> Any:
        kept, report, at = carry
        h_chunk, y, inside = chunked.chunk_hidden(visit, h), visit.take(targets), visit.inside(n)
        t, own = chunked.chunk_transform(transform, visit), jax.tree.map(visit.take, stats)
        every = sparse.probe_stride(visit.read.size)
        few_h, few_t, few = columns_of.every_nth((h_chunk, t, own), every)
        few_x = raw_logits(few_h, head, c.logits_dtype)
        flat = columns_of.surely_dense(p, few_x, few_t, few, inside[::every], tolerance)
        miss = sparse.misses(share, own, None, p.vocab_size)

        def look(_: Any) -> Columns:
            x = raw_logits(h_chunk, head, c.logits_dtype)
            return columns_of.find(p, x, y, t, own, inside, miss, tolerance, wanted.matmuls)

        found = sparse.once(~flat, look, columns_of.blank_columns(p, head.vocab, visit.read.size))
        part = chunk_report(p, head, found, inside, jnp.zeros_like(inside))
        return kept.with_chunk(at, visit, found), noted(visit, report, part), at + 1

    start = (_nothing_kept(c, p, n), blank_report(n), jnp.int32(0))
    kept, report, _ = sweep_over(n, live, c.chunk).run(body, start)
    return kept, report


def gradients(
    c: SweepConfig,
    wanted: Wanted,
    h: Array,
    head: Head,
    targets: Array,
    transform: LogitTransform,
    live: Array | None,
    stats: TokenStats,
    g: StatCotangents,
    kept: ChunkColumns,
    tolerance: Array,
) -> tuple[Array | None, HeadGrads]:
    """By recompute: gradients for given cotangents, over the columns that the forward sweep found."""
    hard = sparse.misses(tolerance, stats, g, c.vocab_size)(kept.left_out)
    return gradients_beside(c, wanted, h, head, targets, transform, live, stats, g, kept, hard)


def gradients_beside(
    c: SweepConfig,
    wanted: Wanted,
    h: Array,
    head: Head,
    targets: Array,
    transform: LogitTransform,
    live: Array | None,
    stats: TokenStats,
    g: StatCotangents,
    kept: ChunkColumns,
    hard: Array,
) -> tuple[Array | None, HeadGrads]:
    """:func:`gradients` where it is known which rows are ``hard [N]``: those go through all columns."""
    n = h.shape[0]
    p = sparse.column_passes(c, head)
    acc = chunked.Accumulator(c, wanted)
    moving = g.any_nonzero() if live is None else g.any_nonzero() & live
    hard = hard & moving
    easy = sparse.without(g, hard | ~moving)
    common = sparse.mean_row(p, head) if wanted.hidden else None

    def body(visit: Visit, carry: Any) -> Any:
        (dh, grads), at = carry
        h_chunk, y = chunked.chunk_hidden(visit, h), visit.take(targets)
        t, s = chunked.chunk_transform(transform, visit), jax.tree.map(visit.take, stats)
        own = jax.tree.map(lambda a: jnp.where(visit.inside(n), visit.take(a), 0.0), easy)
        trips = jnp.where(jnp.any(own.any_nonzero()), p.slabs(kept.count[at]), 0)
        start = None if common is None else sparse.in_their_place(common, visit.take(kept.left_out), own, t)
        dh_chunk, grads = sparse.add_slabs(
            p, start, trips, kept.index[at], lambda _, part: raw_logits(h_chunk, part, c.logits_dtype), y, t, s, own,
            h_chunk, head, grads,
        )  # fmt: skip
        if dh is not None and dh_chunk is not None:
            dh = visit.put(dh, dh_chunk)
        return (dh, grads), at + 1

    start = (acc.start(h, head), jnp.int32(0))
    carry, _ = sweep_over(n, live, c.chunk).run(body, start)
    few = sparse.for_hard_rows(c)
    dh, grads = chunked.add_gradients(few, wanted, h, head, targets, transform, hard, stats, g, carry)
    return dh, acc.finish(grads, head)
