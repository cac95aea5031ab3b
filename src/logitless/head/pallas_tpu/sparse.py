"""The sparse backward on TPU as a backend around the exact one: one pass over the vocabulary and one over dW.

Columns come out of the forward sweep; gradients go over one set of columns for all tokens. With M one matmul over all
tokens and columns, and K active columns:

    look       logits of 128 rows in 8192 columns: are nearly all rows flat? Then the exact kernels, as without this.
    forward    statistics and column maxima by one sweep (M), no logits in HBM (``forward.py``)
    columns    the threshold on the maxima that costs least, judged by those 128 rows (``column_choice.py``)
    backward   slab by slab of the K columns: x, dx, dh, a slab of dW, and the mass that each row keeps (3 M K / V)
    hard rows  those that leave out more than the tolerance: the *other* columns, too, while dW is written (3 matmuls
               each, 4 if they are many)

All tokens share one set; ``head/sparse/backend.py`` has a set per chunk. XLA's TPU compiler carries out a scatter into
dW by streaming all of dW (43 cycles a row of ``[V, 4096]`` float32, touched or not: 3.7 ms a scatter at V = 151936, an
estimate), so a sum over chunks with columns of their own would cost more than it saves. With one set

    dW[v] = active:    the sum over all tokens, hard ones too, in float32, rounded once, put into place by the sweep
                       that makes the others (``active_rows.py``)
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

Over a mesh each device has its own columns and hard rows, and its dW is summed with the others' in float32, whole:
which of its rows are zero differs between devices. Calls that this backend does not serve, and why:
:meth:`SparsePallasTpu.supports`.

Bytes beside inputs and outputs: dH in float32, ``[N + GROUP, H]``, and a slab of the head (x, dx and the slab's dW are
in VMEM); where V is no multiple of 16 also ``[K limit, H]`` of dW's rows. Hidden states in the order of
``head/sparse/gather.py`` stand where dH will.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.core.backend import Around, Cost, Split, Way
from logitless.core.problem import Gradients, Loss, Problem, Wanted
from logitless.core.shapes import PyTree
from logitless.core.stats import StatCotangents, TokenStats
from logitless.head.pallas_tpu import column_choice, kernels, sparse_backward
from logitless.head.pallas_tpu.backend import PallasTpu, cost_of, live_cotangents
from logitless.head.pallas_tpu.column_choice import Active, choose_columns, column_rule, few_rows, no_columns
from logitless.head.pallas_tpu.operands import interpreter
from logitless.head.sparse.active_columns import Rule, SparseReport, blank_report, dense_report, in_words
from logitless.head.sparse.gather import Known, Ordered, in_order, without


@dataclasses.dataclass(frozen=True)
class SparsePallasTpu(Around[Problem, Wanted]):
    """A backend around the exact one: the same statistics, a sparse backward. ``p.live`` is the loss's mask, or
    ``None`` where every token is live."""

    own: PallasTpu

    in_forward: ClassVar[bool] = True
    head_in_parts: ClassVar[bool] = False

    def supports(self, p: Problem, split: Split) -> str | None:
        """Why the exact kernels serve a call instead; ``None`` where this backend does."""
        if p.head.layout != "vh":
            return "the sparse backward of the TPU kernels works on rows of a [V, H] head, and this one is [H, V]"
        if p.head.lora_a is not None:
            return "the sparse backward of the TPU kernels does not serve LoRA on the head"
        if jnp.dtype(p.call.logits_dtype) != jnp.float32:
            rounded = jnp.dtype(p.call.logits_dtype).name
            return f"the sparse backward of the TPU kernels needs float32 logits, and logits_dtype is {rounded}"
        if p.call.mass is not None and p.call.mass < column_choice.LEAST_TOLERANCE:
            least = in_words(column_choice.LEAST_TOLERANCE)
            return f"a row may leave out {in_words(p.call.mass)}, and masses are known well enough from {least} on"
        if jax.config.jax_enable_x64:
            return "jax_enable_x64 is on, and the sparse backward of the TPU kernels counts in 32 bits"
        if split.vocabulary > 1:
            return "the vocabulary is sharded, and the sparse backward of the TPU kernels needs all columns on a device"
        if split.head_gathered:
            return "under FSDP the sparse backward of the TPU kernels would need more memory than the exact kernels"
        if split.dw_parts > 1:
            return (
                "the sparse backward of the TPU kernels would sum the head's gradient over devices whole, in float32, "
                f"where the exact kernels sum {split.dw_parts} parts one after the other"
            )
        return self.own.supports(p, split)

    def describe(self, p: Problem, way: Way) -> Cost:
        """How much it saves depends on the data."""
        rule, late, exact = column_rule(p.head.vocab), not way.in_forward, cost_of(p, ("token_stats", "dhead"))
        words = (
            "statistics and column maxima by one sweep, then the backward over the K active columns of all tokens, "
            f"which leave at most {in_words(way.mass)} of a row's mass out (rows that would leave out more: the other "
            f"columns as well, while dW is written); exact kernels where a few rows show flat logits, or "
            f"K > {rule.most:,}"
        )
        tiles = {"slab": rule.slab, "chunk": sparse_backward.chunk_of(p), "group": sparse_backward.GROUP}
        return dataclasses.replace(
            exact,
            way=words,
            matmuls=f"1 + {4 if late else 3} K/V, 3 or 4 a hard row, {5 if late else 4} if flat (1 without a gradient)",
            bytes_moved=f"{exact.bytes_moved} at most (dhead by the hard rows)",
            tiles={**exact.tiles, **tiles},
            sweep=sparse_backward.chunk_of(p),
        )

    def statistics(self, p: Problem, loss: Loss | None = None) -> tuple[TokenStats, SparseReport]:
        """Those of the exact backend."""
        return self.own.statistics(p)[0], blank_report(p.n)

    def forward(self, p: Problem, want: Wanted) -> tuple[TokenStats, SparseReport, Active]:
        """The residual are the active columns."""
        rule = _rule(p, want)
        counts = jnp.ones(p.targets.shape, bool) if p.live is None else p.live
        few = few_rows(p, p.live, None)

        def dense() -> tuple[TokenStats, SparseReport, Active]:
            none = no_columns(rule, p.head.vocab)
            return self.own.statistics(p)[0], dense_report(p.head, counts), none

        def sparse() -> tuple[TokenStats, SparseReport, Active]:
            f = _in_order(p, counts)
            stats, maxima = _statistics_and_maxima(f, None)
            out = jax.tree.map(f.put_back, stats)
            active = choose_columns(rule, p, maxima, counts, few, _some(out, few.at), None)
            zero = jnp.zeros((f.p.n,), jnp.float32)
            known, moving = Known(stats, StatCotangents(zero, zero, zero)), jnp.arange(f.p.n) < f.count
            _, report = sparse_backward.gradients(rule, Wanted(False, False), f, known, moving, active)
            return out, report, active

        return lax.cond(column_choice.exact_is_cheaper(rule, few), dense, sparse)

    def backward(
        self, p: Problem, want: Wanted, out: TokenStats, g: StatCotangents, residual: Active, only_logp: bool
    ) -> Gradients:
        g = g if p.live is None else without(g, ~p.live)
        f = _in_order(p, g.any_nonzero())
        known = Known(*jax.tree.map(f.take, (out, g)))
        return sparse_backward.gradients(
            _rule(p, want), want, f, known, known.g.any_nonzero(), _without_mesh_axis(residual)
        )[0]

    def gradients_in_forward(self, p: Problem, want: Wanted, loss: Loss) -> tuple[TokenStats, SparseReport, Gradients]:
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
            grads, report = sparse_backward.gradients(rule, want, f, known, known.g.any_nonzero(), active)
            return out, report, grads

        return lax.cond(column_choice.exact_is_cheaper(rule, few), lambda: self._exact(p, want, loss), sparse)

    def _exact(self, p: Problem, want: Wanted, loss: Loss) -> tuple[TokenStats, SparseReport, Gradients]:
        """The whole call by the exact kernels."""
        out, _, grads = self.own.gradients_in_forward(p, want, loss)
        return out, dense_report(p.head, live_cotangents(p, loss, out).any_nonzero()), grads


def _without_mesh_axis(active: Active) -> Active:
    """A residual over a mesh has a first dimension throughout."""
    return dataclasses.replace(active, count=active.count.reshape(()), dense=active.dense.reshape(()))


def _in_order(p: Problem, first: Array) -> Ordered:
    """Tokens where ``first [N]`` is true first, in whole chunks."""
    interpret = interpreter(p.call.interpret)
    return in_order(
        p, first, sparse_backward.chunk_of(p), lambda h, order, keep: kernels.gather(h, order, interpret, keep)
    )


def _some(tree: PyTree, at: Array) -> PyTree:
    """The rows ``at`` of a tree of ``[N]``."""
    return jax.tree.map(lambda x: x.at[at].get(mode="promise_in_bounds"), tree)


def _statistics_and_maxima(f: Ordered, before: Array | None) -> tuple[TokenStats, Array]:
    """Statistics of the live tokens, in the order of ``f``, and the column maxima of those that come first; ``before``,
    in the order of the call, is known of the targets' log-probabilities."""
    counts = jnp.arange(f.p.n) < f.count
    floor = column_choice.lse_floor(f.p, counts, None if before is None else f.take(before))
    return kernels.token_stats_and_maxima(f.p, f.live, floor)


def _rule(p: Problem, want: Wanted) -> Rule:
    """The sweep that makes dW makes dbias, too."""
    return column_rule(p.head.vocab, max(int(want.hidden) + int(want.weight or want.bias), 1))
