"""The sparse backward of a vocabulary-parallel head: each shard has its own active columns.

    forward    statistics of all shards, as ever; then logits again, and each shard's columns from the global statistics
    decision   the mass that a row leaves out of all shards, one all-reduce of [3, N]: within the tolerance, nothing is
               hard. Else the row is hard on the shards that leave out more than tolerance / shards, and what the others
               leave out is within the tolerance together
    backward   x, dx, dH and dW over the shard's own columns, its left-out mass replaced by its own mean row

That is 2 + 3 K/V matmuls per token, where exactness takes four. The second of them is for the statistics, which a
shard has only when all have been heard: to hear them chunk by chunk, in the loop, would be a collective in a loop whose
length depends on the data. The columns are found in the forward pass, and not in the backward pass, since the report is
one of its results.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from logitless.head import sparse, sparse_recompute
from logitless.head.chunked import Wanted
from logitless.head.operator import Head, HeadGrads
from logitless.head.sparse_recompute import ChunkColumns
from logitless.head.sparse_report import SparseReport
from logitless.parallel import collectives, vocabulary
from logitless.parallel.head import ShardedHead
from logitless.parallel.spec import Placement
from logitless.pytree import register
from logitless.stats import StatCotangents, TokenStats
from logitless.transform import LogitTransform

_NO_COLUMN = jnp.iinfo(jnp.int32).max
"""A target that is another shard's: no index reaches it, not even the unused slots of a chunk's columns."""


@register
@dataclasses.dataclass(frozen=True)
class Found:
    """What the forward pass leaves for the backward pass."""

    kept: ChunkColumns  # each device's own
    total: Array | None  # [*tokens] float32: mass left out of all vocabulary shards, before any row is hard


def _own_targets(p: Placement, targets: Array, width: int) -> Array:
    own = collectives.own_targets(p, targets, width)
    return jnp.where(own < 0, _NO_COLUMN, own)


def shard_columns(
    c: ShardedHead,
    want: Wanted,
    h: Array,
    head: Head,
    targets: Array,
    t: LogitTransform,
    live: Array | None,
    tolerance: Array,
) -> tuple[TokenStats, Found, SparseReport]:
    """Statistics of flat tokens over all shards, this shard's columns, and what all shards together leave out."""
    p, sweep, shards = c.placement, c.call.sweep, c.placement.count(c.placement.vocab)
    out, _ = vocabulary.statistics(c, h, head, targets, t, live, direction=False)
    own = _own_targets(p, targets, head.vocab)
    share = tolerance / shards

    def columns(real: int) -> tuple[ChunkColumns, SparseReport]:
        part = vocabulary.with_columns(sweep, real)
        return sparse_recompute.known_columns(part, want, h, head, own, t, live, out, tolerance, share)

    kept, report = collectives.by_columns(p, sweep.vocab_size, head.vocab, columns, collectives.zeros)
    mass = report.left_out
    over = ~(mass <= share)  # NaN is over, too
    sums = jnp.stack([mass, jnp.where(over, 0.0, mass), over.astype(jnp.float32)])
    total, within, hard_on = lax.psum(sums, p.vocab)
    misses = ~(total <= tolerance)
    report = dataclasses.replace(
        report,
        left_out=jnp.where(misses, within, total),
        rows=jnp.ones_like(report.rows) if live is None else live,  # also on a shard without any column
        hard=jnp.where(misses, hard_on / shards, 0.0),  # share of the shards
    )
    return out, Found(kept, total), report


def shard_gradients(
    c: ShardedHead,
    want: Wanted,
    h: Array,
    head: Head,
    targets: Array,
    t: LogitTransform,
    live: Array | None,
    out: TokenStats,
    g: StatCotangents,
    found: Found,
    tolerance: Array,
) -> tuple[Array | None, HeadGrads]:
    """Flat dH, summed over shards, and the gradients of a shard's own columns."""
    p, sweep = c.placement, c.call.sweep
    own = _own_targets(p, targets, head.vocab)
    mass = found.kept.left_out
    shares = sparse.misses(tolerance / p.count(p.vocab), out, g, sweep.vocab_size)
    whole = sparse.misses(tolerance, out, g, sweep.vocab_size)
    hard = jnp.isinf(mass) | (whole(found.total) & shares(mass))  # infinite: a dense chunk

    def local(real: int) -> tuple[Array | None, HeadGrads]:
        part = dataclasses.replace(vocabulary.with_columns(sweep, real), partial_hidden=True, partial_head=True)
        return sparse_recompute.gradients_beside(part, want, h, head, own, t, live, out, g, found.kept, hard)

    dh, grads = collectives.by_columns(p, sweep.vocab_size, head.vocab, local, collectives.zeros)
    return None if dh is None else lax.psum(dh, p.vocab).astype(h.dtype), grads
