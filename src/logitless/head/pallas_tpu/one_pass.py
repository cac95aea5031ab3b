"""The sparse backward on TPU in one pass over the vocabulary and one over dW.

Columns come out of the forward sweep, gradients go over one set of columns for all tokens, as in ``sparse.py``, which
serves where this does not (:func:`not_in_one_pass_because`): there a look at all columns, tokens gathered for every
sweep, dH and dW of the hard rows by two exact kernels, and a scatter of dW's rows are passes of their own.

With M one matmul over all tokens and columns, and K active columns:

    look       logits of 128 rows in 8192 columns: are nearly all rows flat? Then the exact kernels, as without this.
    forward    statistics and column maxima by one sweep (M), no logits in HBM (``forward.py``)
    columns    the threshold on the maxima that costs least, judged by those 128 rows (``look.py``)
    backward   slab by slab of the K columns: x, dx, dh, a slab of dW, and the mass that each row keeps (3 M K / V)
    hard rows  those that leave out more than the tolerance: the *other* columns, too, while dW is written (3 matmuls
               each, 4 if they are many)

One set for all tokens, where ``head/sparse/backend.py`` has one per chunk. XLA's TPU compiler carries out a scatter
into dW by streaming all of dW (43 cycles a row of ``[V, 4096]`` float32, touched or not: 3.7 ms a scatter at V =
151936, an estimate), so a sum over chunks with columns of their own would cost more than it saves. With one set

    dW[v] = active:    the sum over all tokens, hard ones too, in float32, rounded once, put into place by the sweep
                       that makes the others (``ready.py``)
            inactive:  the sum over the hard rows, rounded once
    dH[t] = the sum over the active columns, and     hard: over the others;     else: the mean row's part

so nothing is added twice and no float32 dW exists. Until that sweep the rows of the active columns stand in dW's own
place. On 8192 tokens of ``bench.realistic`` (V = 151936, a policy's own completions) columns and hard rows cost 0.15 M
after the forward sweep (benchmarks/tpu_sparse_estimate.py).

Uncoupled objectives have their gradients in the forward pass, where the cotangents follow from the statistics:
1 + 3 K/V matmuls a token, 3 or 4 a hard row, and the exact kernels (4) if the look shows flat logits. Other cotangents
come later: 1 + K/V in the forward pass (the report's masses), 3 K/V in the backward pass, 3 or 4 a hard row, which is
every row if the logits are flat.

The mass left out is ``1 - sum of p over the active columns``, good to ``MASS_ERROR``: rows count as hard that much
earlier, and below ``LEAST_TOLERANCE`` all goes through the exact kernels.

Over a mesh that shards tokens each device has its own columns and hard rows, and its dW is summed with the others' in
float32, whole: which of its rows are zero differs between devices.

Bytes beside inputs and outputs: dH in float32, ``[N + GROUP, H]``, and a slab of the head (x, dx and the slab's dW are
in VMEM); where V is no multiple of 16 also ``[K limit, H]`` of dW's rows. Hidden states in the order of
``head/sparse/token_order.py`` stand where dH will.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.core.backend import Cost, Way
from logitless.core.problem import Gradients, Loss, Problem, Wanted
from logitless.core.stats import StatCotangents, TokenStats
from logitless.head.pallas_tpu import kernels, look, ordered_slabs
from logitless.head.pallas_tpu.look import choose_columns, few_rows
from logitless.head.pallas_tpu.operands import interpreter
from logitless.head.pallas_tpu.sparse import TpuSparse, all_dense, live_cotangents, without_mesh_axis
from logitless.head.pallas_tpu.sparse_columns import Active, no_columns, tpu_rule
from logitless.head.sparse.active_columns import HARD_ROW_COST, Rule, most_columns, slab_width
from logitless.head.sparse.backend import in_words
from logitless.head.sparse.column_gather import Known, without
from logitless.head.sparse.report import SparseReport
from logitless.head.sparse.token_order import Ordered, in_order


def not_in_one_pass_because(p: Any) -> str | None:
    """Why the other form serves a problem (arrays or shapes); ``None`` where this one does."""
    if p.head.layout != "vh":
        return "an [H, V] head has its rows in no place of their own"
    if p.head.lora_a is not None:
        return "with LoRA a column has two rows"
    if jnp.dtype(p.call.logits_dtype) != jnp.float32:
        return f"logits are rounded to {jnp.dtype(p.call.logits_dtype).name}"
    return None


def one_pass_rule(vocab: int, backward: int = 2) -> Rule:
    """As :func:`tpu_rule`, in slabs of half the width; a hard row costs three matmuls (or two)."""
    slab = min(slab_width(vocab), 1024)
    per_hard_row = (1 + backward) * HARD_ROW_COST
    rule = tpu_rule(vocab, backward)
    return dataclasses.replace(rule, slab=slab, most=most_columns(vocab, slab), per_hard_row=per_hard_row)


@dataclasses.dataclass(frozen=True)
class OnePassSparse(TpuSparse):
    """A backend around the exact one; as :class:`TpuSparse`, whose residual is of the same type."""

    def describe(self, p: Any, way: Way) -> Cost:
        cost, why = super().describe(p, way), not_in_one_pass_because(p)
        if way.shards > 1:
            return cost
        if why is not None:
            return dataclasses.replace(cost, way=f"{cost.way}; dW's active rows by a scatter: {why}")
        rule, late = one_pass_rule(p.head.vocab), not way.in_forward
        words = (
            "statistics and column maxima by one sweep, then the backward over the K active columns of all tokens, "
            f"which leave at most {in_words(way.mass)} of a row's mass out (rows that would leave out more: the other "
            f"columns as well, while dW is written); exact kernels where a few rows show flat logits, or "
            f"K > {rule.most:,}"
        )
        matmuls = f"1 + {4 if late else 3} K/V, 3 or 4 a hard row, {5 if late else 4} if flat (1 without a gradient)"
        tiles = {**cost.tiles, "slab": rule.slab, "chunk": ordered_slabs.chunk_of(p), "group": ordered_slabs.GROUP}
        return dataclasses.replace(cost, way=words, matmuls=matmuls, tiles=tiles)

    def forward(self, p: Problem, want: Wanted) -> tuple[TokenStats, SparseReport, Active]:
        """The residual are the active columns."""
        if not_in_one_pass_because(p) is not None:
            return super().forward(p, want)
        rule = _rule(p, want)
        counts = jnp.ones(p.targets.shape, bool) if p.live is None else p.live
        few = few_rows(p, p.live, None)

        def dense() -> tuple[TokenStats, SparseReport, Active]:
            none = no_columns(rule, p.head.vocab)
            return self.own.statistics(p)[0], all_dense(p.head, counts), none

        def sparse() -> tuple[TokenStats, SparseReport, Active]:
            f = _in_order(p, counts)
            stats, maxima = _statistics_and_maxima(f, None)
            out = jax.tree.map(f.put_back, stats)
            active = choose_columns(rule, p, maxima, counts, few, _some(out, few.at), None)
            zero = jnp.zeros((f.p.n,), jnp.float32)
            known, moving = Known(stats, StatCotangents(zero, zero, zero)), jnp.arange(f.p.n) < f.count
            _, report = ordered_slabs.gradients(rule, Wanted(False, False), f, known, moving, active)
            return out, report, active

        return lax.cond(look.exact_is_cheaper(rule, few), dense, sparse)

    def backward(
        self, p: Problem, want: Wanted, out: TokenStats, g: StatCotangents, residual: Active, only_logp: bool
    ) -> Gradients:
        if not_in_one_pass_because(p) is not None:
            return super().backward(p, want, out, g, residual, only_logp)
        g = g if p.live is None else without(g, ~p.live)
        f = _in_order(p, g.any_nonzero())
        known = Known(*jax.tree.map(f.take, (out, g)))
        return ordered_slabs.gradients(
            _rule(p, want), want, f, known, known.g.any_nonzero(), without_mesh_axis(residual)
        )[0]

    def gradients_in_forward(self, p: Problem, want: Wanted, loss: Loss) -> tuple[TokenStats, SparseReport, Gradients]:
        if not_in_one_pass_because(p) is not None:
            return super().gradients_in_forward(p, want, loss)
        rule, counts = _rule(p, want), loss.may_move()
        counts = counts if p.live is None else counts & p.live
        before = loss.inputs.old if loss.inputs.old is not None else loss.inputs.rollout
        few = few_rows(p, counts, before)

        def sparse() -> tuple[TokenStats, SparseReport, Gradients]:
            f = _in_order(p, counts)
            stats, maxima = _statistics_and_maxima(f, before)
            out = jax.tree.map(f.put_back, stats)
            g = live_cotangents(p, loss, out)
            active = choose_columns(rule, p, maxima, counts, few, _some(out, few.at), _some(g, few.at))
            known = Known(stats, jax.tree.map(f.take, g))
            grads, report = ordered_slabs.gradients(rule, want, f, known, known.g.any_nonzero(), active)
            return out, report, grads

        return lax.cond(look.exact_is_cheaper(rule, few), lambda: self._exact(p, want, loss), sparse)


def _in_order(p: Problem, first: Array) -> Ordered:
    """Tokens where ``first [N]`` is true first, in whole chunks."""
    interpret = interpreter(p.call.interpret)
    return in_order(
        p, first, ordered_slabs.chunk_of(p), lambda h, order, keep: kernels.gather(h, order, interpret, keep)
    )


def _some(tree: Any, at: Array) -> Any:
    """The rows ``at`` of a tree of ``[N]``."""
    return jax.tree.map(lambda x: x.at[at].get(mode="promise_in_bounds"), tree)


def _statistics_and_maxima(f: Ordered, before: Array | None) -> tuple[TokenStats, Array]:
    """Statistics of the live tokens, in the order of ``f``, and the column maxima of those that come first; ``before``,
    in the order of the call, is known of the targets' log-probabilities."""
    counts = jnp.arange(f.p.n) < f.count
    floor = look.lse_floor(f.p, counts, None if before is None else f.take(before))
    return kernels.token_stats_and_maxima(f.p, f.live, floor)


def _rule(p: Problem, want: Wanted) -> Rule:
    """The sweep that makes dW makes dbias, too."""
    return one_pass_rule(p.head.vocab, max(int(want.hidden) + int(want.weight or want.bias), 1))
