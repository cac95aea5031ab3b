"""The sparse backward on TPU: columns out of the forward sweep, gradients over one set of columns for all tokens.

With M one matmul over all tokens and columns, and K active columns:

    look       logits of 128 rows, all columns: are nearly all rows flat? Then the exact kernels, as without all this.
    forward    statistics and column maxima by one sweep (M), no logits in HBM (``forward.py``)
    columns    the threshold on the maxima that costs least, judged by those 128 rows (``sparse_columns.py``)
    backward   slab by slab of the K columns: x, dx, dh, a slab of dW, and the mass that each row keeps (3 M K / V)
    hard rows  those that leave out more than the tolerance: dH and dW by the exact kernels (4 matmuls each)

One set for all tokens, where ``head/sparse/backend.py`` has one per chunk. XLA's TPU compiler carries out a scatter
into dW by streaming all of dW (43 cycles a row of ``[V, 4096]`` float32, touched or not: 3.7 ms a scatter at V =
151936, an estimate), so a sum over chunks with columns of their own would cost more than it saves. With one set

    dW[v] = active:    the sum over all tokens, hard ones too, in float32, rounded once, put into place by one scatter
            inactive:  the sum over the hard rows, by the exact kernel, rounded once
    dH[t] = hard:      the exact kernel's;    else:  the sum over the active columns, and the mean row's part

so nothing is added twice and no float32 dW exists. On 8192 tokens of ``bench.realistic`` (V = 151936) columns and hard
rows cost 0.52 M after the forward sweep (benchmarks/tpu_sparse_estimate.py); sets of 2048 tokens each, from exact
probabilities, would cost 15 % less.

Uncoupled objectives have their gradients in the forward pass, where the cotangents follow from the statistics:
1 + 3 K/V matmuls a token, 4 a hard row, and the exact kernels (4) if the look shows flat logits. Other cotangents come
later: 1 + K/V in the forward pass (the report's masses), 3 K/V in the backward pass, 4 a hard row, which is every row
if the logits are flat.

The mass left out is ``1 - sum of p over the active columns``, good to ``MASS_ERROR``: rows count as hard that much
earlier, and below ``LEAST_TOLERANCE`` all goes through the exact kernels. With bfloat16 logits, which may round to a
neighbour when they are made again, the sum is taken at the lower one (``gathered.least_logits``).

Both layouts of the head: gathered columns are rows ``[K, H]`` in either (``gathered.py``). LoRA's outer factor is
gathered and put back with them, dlow (``lora.py``) treated as dH is.

Over a mesh that shards tokens each device has its own columns and hard rows, and its dW is summed with the others' in
float32, whole: which of its rows are zero differs between devices. Where a device has a part of the vocabulary:
``sparse_shard.py``.

Bytes beside those of the exact kernels: ``[K limit, H]`` of dW's rows, a slab of the head, of x, dx and dW, ``[N, H]``
float32 of dH, ``[128, V]`` float32 of the look.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.core.backend import Cost, Way
from logitless.core.problem import Gradients, Head, Loss, Problem, Wanted
from logitless.core.stats import StatCotangents, TokenStats
from logitless.head.pallas_tpu import kernels, slabs, sparse_columns, sparse_shard
from logitless.head.pallas_tpu.backend import PallasTpu, cost_of, front
from logitless.head.pallas_tpu.sparse_columns import Active, choose_columns, few_rows, tpu_rule
from logitless.head.pallas_tpu.sparse_shard import ShardColumns
from logitless.head.sparse.active_columns import Rule
from logitless.head.sparse.backend import in_words
from logitless.head.sparse.column_gather import Known, without
from logitless.head.sparse.report import SparseReport, blank_report


@dataclasses.dataclass(frozen=True)
class TpuSparse:
    """A backend around the exact one: the same statistics, a sparse backward. ``p.live`` is the loss's mask, or
    ``None`` where every token is live."""

    own: PallasTpu

    name: ClassVar[str] = PallasTpu.name
    kernels: ClassVar[str | None] = PallasTpu.kernels
    in_forward: ClassVar[bool] = True

    def check(self, p: Problem, columns_apart: bool) -> None:
        """What the kernels serve."""
        self.own.check(p, columns_apart)

    def describe(self, p: Problem, way: Way) -> Cost:
        """How much it saves depends on the data."""
        rule, late = tpu_rule(p.head.vocab), not way.in_forward
        words = (
            "statistics and column maxima by one sweep, then the backward over the K active columns of all tokens, "
            f"which leave at most {in_words(way.mass)} of a row's mass out (rows that would leave out more: dH and dW "
            f"by the exact kernels); exact kernels where a few rows show flat logits, or K > {rule.most:,}"
        )
        matmuls = f"1 + {4 if late else 3} K/V, 4 a hard row, {5 if late else 4} if flat (1 without a gradient)"
        if way.shards > 1:
            words += (
                "; what a row leaves out is the sum over shards, and where that is too much it takes all columns of "
                f"those that leave out more than 1/{way.shards} of what it may"
            )
            matmuls = (
                "2 + 4 K/V (statistics of all shards first, columns by a second sweep), 4 a hard row, 5 if flat "
                "(1 without a gradient)"
            )
        exact = cost_of(p, ("token_stats", "dhidden", "dhead"))
        return dataclasses.replace(
            exact,
            way=words,
            matmuls=matmuls,
            bytes_moved=f"{exact.bytes_moved} at most (dhidden and dhead by the hard rows)",
            tiles={**exact.tiles, "slab": rule.slab, "chunk": min(p.n, slabs.CHUNK)},
        )

    def statistics(self, p: Problem, loss: Loss | None = None) -> tuple[TokenStats, SparseReport]:
        """Those of the exact backend."""
        return self.own.statistics(p)[0], blank_report(p.n)

    def forward(self, p: Problem, want: Wanted) -> tuple[TokenStats, SparseReport, Active]:
        """The residual are the active columns."""
        rule = _rule(p, want)
        counts = jnp.ones(p.targets.shape, bool) if p.live is None else p.live
        few = few_rows(p, p.live)

        def dense() -> tuple[TokenStats, SparseReport, Active]:
            none = sparse_columns.no_columns(rule, p.head.vocab)
            return self.own.statistics(p)[0], all_dense(p.head, counts), none

        def sparse() -> tuple[TokenStats, SparseReport, Active]:
            out, maxima = self._statistics_and_maxima(p, counts)
            active = choose_columns(rule, p, maxima, counts, few, None)
            _, report = slabs.gradients(rule, Wanted(False, False), p, counts, out, None, active)
            return out, report, active

        return lax.cond(sparse_columns.exact_is_cheaper(rule, few), dense, sparse)

    def backward(
        self, p: Problem, want: Wanted, out: TokenStats, g: StatCotangents, residual: Active, only_logp: bool
    ) -> Gradients:
        moving = g.any_nonzero() if p.live is None else g.any_nonzero() & p.live
        return slabs.gradients(_rule(p, want), want, p, moving, out, g, without_mesh_axis(residual))[0]

    def gradients_in_forward(self, p: Problem, want: Wanted, loss: Loss) -> tuple[TokenStats, SparseReport, Gradients]:
        rule, counts = _rule(p, want), loss.may_move()
        few = few_rows(p, counts)

        def sparse() -> tuple[TokenStats, SparseReport, Gradients]:
            out, maxima = self._statistics_and_maxima(p, counts)
            g = live_cotangents(p, loss, out)
            active = choose_columns(rule, p, maxima, counts, few, jax.tree.map(lambda x: x[few.at], g))
            grads, report = slabs.gradients(rule, want, p, g.any_nonzero(), out, g, active)
            return out, report, grads

        return lax.cond(sparse_columns.exact_is_cheaper(rule, few), lambda: self._exact(p, want, loss), sparse)

    def _exact(self, p: Problem, want: Wanted, loss: Loss) -> tuple[TokenStats, SparseReport, Gradients]:
        """All of it by the exact kernels."""
        out, _, direction = self.own.forward(p, want)
        g = live_cotangents(p, loss, out)
        grads = self.own.backward(p, want, out, g, direction, p.call.logp_only)
        return out, all_dense(p.head, g.any_nonzero()), grads

    # A shard of the vocabulary.

    def shard_columns(
        self, p: Problem, want: Wanted, out: TokenStats, share: Array
    ) -> tuple[ShardColumns, SparseReport]:
        """See :func:`sparse_shard.find`."""
        return sparse_shard.find(_rule(p, want), p, out, share)

    def gradients_beside(self, p: Problem, want: Wanted, known: Known, kept: ShardColumns, hard: Array) -> Gradients:
        """See :func:`sparse_shard.gradients`."""
        active = without_mesh_axis(kept.active)
        return sparse_shard.gradients(_rule(p, want), want, p, known, ShardColumns(active, kept.left_out), hard)

    def _statistics_and_maxima(self, p: Problem, counts: Array) -> tuple[TokenStats, Array]:
        """Statistics of the live tokens, and the column maxima of those that ``counts``."""
        f = front(p.live)
        floor = f.take(sparse_columns.lse_floor(p, counts))
        stats, maxima = kernels.token_stats_and_maxima(f.problem(p), f.count, floor)
        return jax.tree.map(f.put_back, stats), maxima


def live_cotangents(p: Problem, loss: Loss, out: TokenStats) -> StatCotangents:
    """Of the live tokens; zero elsewhere."""
    g = loss.cotangents(out)
    return g if p.live is None else without(g, ~p.live)


def without_mesh_axis(active: Active) -> Active:
    """A residual over a mesh has a first dimension throughout."""
    return dataclasses.replace(active, count=active.count.reshape(()), dense=active.dense.reshape(()))


def _rule(p: Problem, want: Wanted) -> Rule:
    """The exact kernel that makes dW makes dbias, too."""
    dh, dw = want.hidden or want.lora, want.weight or want.bias or want.lora
    return tpu_rule(p.head.vocab, max(int(dh) + int(dw), 1))


def all_dense(head: Head, moving: Array) -> SparseReport:
    """The report of a backward pass by the exact kernels."""
    zero, one = jnp.float32(0), jnp.int32(1)
    nothing = jnp.zeros(moving.shape, jnp.float32)
    return SparseReport(nothing, moving, jnp.zeros_like(moving), one, one, zero, jnp.float32(head.vocab))
