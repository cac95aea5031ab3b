"""The sparse backward of a vocabulary-parallel head: each shard has its own active columns.

    forward    statistics of all shards, as ever; then logits again, and each shard's columns from the global statistics
    decision   the mass that a row leaves out of all shards, one all-reduce of [3, N]: within the tolerance, nothing is
               hard. Else the row is hard on the shards that leave out more than tolerance / shards, and what the others
               leave out is within the tolerance together
    backward   x, dx, dH and dW over the shard's own columns, its left-out mass replaced by its own mean row

Total: 2 + 3 K/V matmuls per token; the exact path takes four. The second of them is for the statistics, which a shard
has only when all have been heard: to hear them chunk by chunk, in the loop, would be a collective in a loop whose
length depends on the data. The columns are found in the forward pass, and not in the backward pass, since the report is
one of its results.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from logitless.core.problem import Gradients, Loss, Problem, Wanted
from logitless.core.pytree import register
from logitless.core.shapes import PyTree
from logitless.core.stats import StatCotangents, TokenStats
from logitless.head.sparse.active_columns import blank_report
from logitless.head.sparse.backend import Sparse
from logitless.head.sparse.gather import Known, misses
from logitless.mesh.collectives import own_targets
from logitless.mesh.vocab_parallel import VocabularyShard, width_of

_NO_COLUMN = jnp.iinfo(jnp.int32).max
"""A target that is another shard's: no index reaches it, not even the unused slots of a chunk's columns."""


@register
@dataclasses.dataclass(frozen=True)
class Found:
    """What the forward pass leaves for the backward pass."""

    kept: PyTree  # each device's own columns, with left_out [N], infinite where a row went dense with its chunk
    total: Array  # [N] float32: mass left out of all vocabulary shards, before any row is hard


@dataclasses.dataclass(frozen=True)
class SparseShard(VocabularyShard[Problem, Wanted]):
    """:class:`VocabularyShard` around a sparse backend."""

    own: Sparse  # type: ignore[assignment]

    def shard(self, p: Problem) -> Problem:
        own = own_targets(self.place, p.targets, width_of(p))
        return dataclasses.replace(p, targets=jnp.where(own < 0, _NO_COLUMN, own))

    def _statistics(self, p: Problem) -> TokenStats:
        return VocabularyShard(self.own.own, self.place).statistics(p)[0]

    def statistics(self, p: Problem, loss: Loss | None = None) -> tuple[TokenStats, object]:
        blank = blank_report(p.n)
        return self._statistics(p), dataclasses.replace(blank, hard=jnp.zeros((p.n,), jnp.float32))

    def forward(self, p: Problem, want: Wanted | None) -> tuple[TokenStats, object, Found]:
        """Statistics of flat tokens over all shards, this shard's columns, and what all shards together leave out."""
        assert want is not None
        shards = self.place.count(self.place.vocab)
        assert p.tolerance is not None
        share = p.tolerance / shards
        out = self._statistics(p)
        kept, report = self.by_columns(self.shard(p), lambda q: self.own.shard_columns(q, want, out, share))
        mass = report.left_out
        over = ~(mass <= share)  # NaN is over, too
        sums = jnp.stack([mass, jnp.where(over, 0.0, mass), over.astype(jnp.float32)])
        total, within, hard_on = lax.psum(sums, self.place.vocab)
        miss = ~(total <= p.tolerance)
        report = dataclasses.replace(
            report,
            left_out=jnp.where(miss, within, total),
            rows=jnp.ones_like(report.rows) if p.live is None else p.live,  # also on a shard without any column
            hard=jnp.where(miss, hard_on / shards, 0.0),  # share of the shards
        )
        return out, report, Found(kept, total)

    def backward(
        self, p: Problem, want: Wanted, out: TokenStats, g: StatCotangents, residual: Found, only_logp: bool
    ) -> Gradients:
        """Flat dH, summed over shards, and the gradients of a shard's own columns."""
        assert p.tolerance is not None
        mass = residual.kept.left_out
        shares = misses(p.tolerance / self.place.count(self.place.vocab), out, g, p.call.vocab_size)
        whole = misses(p.tolerance, out, g, p.call.vocab_size)
        hard = jnp.isinf(mass) | (whole(residual.total) & shares(mass))  # infinite: a dense chunk
        known, kept = Known(out, g), residual.kept
        found = self.by_columns(self.shard(p), lambda q: self.own.gradients_beside(q, want, known, kept, hard))
        hidden = None if found.hidden is None else lax.psum(found.hidden, self.place.vocab).astype(p.h.dtype)
        return Gradients(hidden, found.head)
