"""What a sparse backward left out of each row, and how wide it was."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core.problem import HeadArrays
from logitless.core.pytree import register
from logitless.core.row_passes import Visit
from logitless.head.sparse.active_columns import Columns, Rule
from logitless.objectives.loss import Metric, Metrics


@register
@dataclasses.dataclass(frozen=True)
class SparseReport:
    """What a sparse backward left out, and how wide it was. Zeros where no gradient was taken."""

    left_out: Array  # [N] float32: mass, or share, that each row's gradient lacks; 0 in rows that went dense
    rows: Array  # [N] bool: rows that have a gradient
    hard: Array  # [N]: rows of sparse chunks that went dense; bool, or over vocabulary shards their share, float32
    chunks: Array  # () int32
    dense_chunks: Array  # () int32
    active: Array  # () float32: active columns, summed over the sparse chunks
    width: Array  # () float32: columns that the backward matmuls took, summed over all chunks

    def metrics(self, vocab: int) -> Metrics:
        """The probability mass that the backward pass left out of each row, and how many columns it took.

        With a teacher it is the share of the row's gradient (``dx_columns.py``).

        ``left_out_mass`` (mean, ``_max``) and ``hard_rows`` are over the tokens with a gradient; ``active_columns`` is
        the share of the vocabulary that was active in the sparse chunks, ``backward_columns`` the share that the
        backward matmuls took in all chunks (whole slabs, or what a tile of tokens met; 1 in dense ones),
        ``dense_chunks`` the share of dense chunks.
        """
        r = jax.lax.stop_gradient(self)
        rows, chunks = jnp.sum(r.rows, dtype=jnp.float32), r.chunks.astype(jnp.float32)
        dense = r.dense_chunks.astype(jnp.float32)
        return {
            "left_out_mass": Metric(jnp.sum(r.left_out), rows),
            "left_out_mass_max": Metric(jnp.max(r.left_out), rows),
            "hard_rows": Metric(jnp.sum(r.hard, dtype=jnp.float32), rows),
            "active_columns": Metric(r.active / vocab, chunks - dense),
            "backward_columns": Metric(r.width / vocab, chunks),
            "dense_chunks": Metric(dense, chunks),
        }


def blank_report(tokens: int | tuple[int, ...]) -> SparseReport:
    """Nothing has happened."""
    no, zero = jnp.zeros(tokens, bool), jnp.float32(0)
    return SparseReport(jnp.zeros(tokens, jnp.float32), no, no, jnp.int32(0), jnp.int32(0), zero, zero)


def dense_report(head: HeadArrays, rows: Array) -> SparseReport:
    """The report of an exact backward pass of the tokens ``rows``: one dense chunk."""
    blank = blank_report(rows.shape)
    one, width = jnp.int32(1), jnp.float32(head.vocab)
    return dataclasses.replace(blank, rows=rows, chunks=one, dense_chunks=one, width=width)


def chunk_report(rule: Rule, head: HeadArrays, found: Columns, rows: Array, hard: Array) -> SparseReport:
    width = jnp.where(found.dense, head.vocab, rule.slabs(found.count) * rule.slab)
    return SparseReport(
        left_out=jnp.where(hard | found.dense, 0.0, found.left_out),
        rows=rows,
        hard=hard,
        chunks=jnp.int32(1),
        dense_chunks=found.dense.astype(jnp.int32),
        active=found.count.astype(jnp.float32),
        width=width.astype(jnp.float32),
    )


def noted(visit: Visit, report: SparseReport, part: SparseReport) -> SparseReport:
    """``report`` with a chunk's report added: rows at their places, counts summed."""

    def note(whole: Array, own: Array) -> Array:
        return visit.put(whole, own) if whole.ndim else whole + own

    return jax.tree.map(note, report, part)
