"""The sparse backward of the head on a Hopper GPU without logits: columns out of the forward matmul's own epilogue.

With M one ``N x H x V`` matmul over the live tokens and K active columns for all of them:

    screen     statistics, and a bit for each token and column (``column_screen.py``)                  M, no logits
    backward   over the K columns, and for hard rows over all others (``sparse_backward.py``)
                                                                                           3 M K / V, and 3 M a hard row

There is no float32 dW. A policy that is not sparse costs four matmuls, where the exact path, which keeps logits, takes
three; with a memory budget, which is room for such logits, that path serves it from the start (``screen.looks_flat``).
A mean row of the head, times the left-out mass, replaces the missing part of dH for easy rows, as in
``head/sparse/backend.py``, which serves the calls that :meth:`ScreenedSparse.supports` refuses.

    order      tokens with a gradient first, so that every matmul reads and writes whole blocks of rows
    bytes      the bits of ``column_screen.py``; h in that order; then those of the two ways
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.core.backend import Around, Cost, Split, Way
from logitless.core.problem import Gradients, Linear, Loss, Problem, Wanted
from logitless.core.row_passes import probabilities
from logitless.core.shapes import PyTree
from logitless.core.stats import StatCotangents, TokenStats
from logitless.head.linear import in_parameter_dtypes, raw_logits
from logitless.head.mosaic_gpu import column_screen, dweight_buffer, sparse_backward
from logitless.head.mosaic_gpu.backend import MosaicGpu
from logitless.head.mosaic_gpu.column_screen import Screened, slab_rule
from logitless.head.mosaic_gpu.kernels import stats_matmul
from logitless.head.mosaic_gpu.stored_dx import exact_form
from logitless.head.sparse.active_columns import (
    Columns,
    Rule,
    SparseReport,
    blank_report,
    chunk_report,
    dense_report,
    in_words,
)
from logitless.head.sparse.gather import Known, Ordered, head_columns, in_order, mass_beside, misses, some, without

_LEAST_TOLERANCE = 2.0**-12
"""What a row leaves out is ``1 - `` what it keeps, good to 1e-7: far below the tolerances it is compared with."""


def not_screened_because(p: Problem[Linear]) -> str | None:
    """Why this form does not serve a problem (arrays or shapes); ``None`` where it does."""
    if p.call.mass is not None and p.call.mass < _LEAST_TOLERANCE:
        return f"a tolerance of {in_words(p.call.mass)} is less than one minus the kept mass can be judged by"
    return stats_matmul.not_served_because(p) or dweight_buffer.not_served_because(p)


def rule_of(p: Problem, want: Wanted) -> Rule:
    return slab_rule(p.head.vocab, want.matmuls)


def visit_of(p: Problem[Linear]) -> int:
    """Tokens per visit of a slab of columns: about four chunks, since no full chunk of logits is in memory here.

    All tokens rounded up to a multiple of 8, which tiled copies need, or equal parts in multiples of 128: a call is
    filled up to whole visits, and a group of hard rows, in multiples of 8, is never more than these.
    """
    most = _whole(4 * p.call.chunk, 128)
    if p.n <= most:
        return _whole(p.n, 8)
    return _whole(-(-p.n // -(-p.n // most)), 128)


def _whole(count: int, unit: int) -> int:
    """``count`` rounded up to a multiple of ``unit``."""
    return -(-int(count) // unit) * unit


@dataclasses.dataclass(frozen=True)
class ScreenedSparse(Around[Problem, Wanted]):
    """A backend around :class:`MosaicGpu`."""

    own: MosaicGpu

    def supports(self, p: Problem[Linear], split: Split) -> str | None:
        if split.summed:
            return "its gradients are parts of a sum over devices"
        return not_screened_because(p)  # the row kernels serve whatever the screen does

    def describe(self, p: Problem[Linear], way: Way) -> Cost:
        rule = slab_rule(p.head.vocab)
        words = (
            f"columns by a screen inside the forward matmul, no logits; backward over the K active columns of all "
            f"tokens, which leave at most {in_words(way.mass)} of a row's mass out (rows that would leave out more: "
            f"the other columns as well); all columns where K > {rule.most:,}"
        )
        late = "" if way.in_forward else ", and K/V more for what rows leave out"
        met = "K', those of the K columns that its tile of tokens met," if way.in_forward else "K"
        matmuls = (
            f"1 and 3/V times {met} per live token{late}, 4 a hard row; one less of the 3 and of the rest with a "
            "frozen head, 1 without a gradient"
        )
        sizes = dweight_buffer.sizes_of(p, rule)
        tiles: dict[str, object] = {"chunk": p.call.chunk, "slab": rule.slab, "visit": visit_of(p)}
        tiles |= {
            "columns_at_once": sizes.columns,
            "hard_at_once": sizes.hard,
            "hard_group": dweight_buffer.group_size(p.n),
        }
        tiles["dx_apart"] = int(not sizes.in_dw)  # or in the place of dW
        exact_if_flat = p.call.memory_budget is not None and way.in_forward
        if exact_if_flat:
            words += "; the exact path, in its chunks, where most targets are unlikely"
            tiles["chunk_if_flat"] = p.call.chunk
        moved = f"a bit for each token and column ({p.n * p.head.vocab // 8:,} B), W once and its active rows"
        return Cost(
            words, matmuls, moved, tiles, fused_statistics=True, sweep=p.call.chunk, stored="bits",
            exact_if_flat=exact_if_flat,
        )  # fmt: skip

    def statistics(self, p: Problem, loss: Loss | None = None) -> tuple[TokenStats, SparseReport]:
        return self.own.token_statistics(p), blank_report(p.n)

    def gradients_in_forward(self, p: Problem, want: Wanted, loss: Loss) -> tuple[TokenStats, SparseReport, Gradients]:
        """Statistics and columns by one matmul, then the gradients of an uncoupled objective over the columns."""
        before = loss.inputs.old if loss.inputs.old is not None else loss.inputs.rollout
        moving = loss.inputs.mask & loss.may_move()

        def sparse() -> tuple[TokenStats, SparseReport, Gradients]:
            return self._in_forward(p, want, loss, before, moving)

        def exact() -> tuple[TokenStats, SparseReport, Gradients]:
            out, _, total = exact_form(p).gradients_in_forward(p, want, loss)
            return out, dense_report(p.head, loss.cotangents(out).any_nonzero()), total

        if p.call.memory_budget is None:  # no room for the logits that the exact path keeps
            return sparse()
        return lax.cond(column_screen.looks_flat(p, moving, before), exact, sparse)

    def _in_forward(
        self, p: Problem, want: Wanted, loss: Loss, before: Array | None, moving: Array
    ) -> tuple[TokenStats, SparseReport, Gradients]:
        f = in_order(p, moving, visit_of(p), by=before)
        stats, found = column_screen.screened(f, rule_of(p, want), before)
        # Apart: XLA would otherwise fuse the loss, its sums and gathers into a single thread block.
        out = lax.optimization_barrier(jax.tree.map(f.put_back, stats))
        g = lax.optimization_barrier(loss.cotangents(out))
        total, columns, width = _gradients(f, want, Known(stats, jax.tree.map(f.take, g)), found)
        # Metrics last: earlier they would delay the first matmul after the host synchronisation.
        out, g, columns, width, total = lax.optimization_barrier((out, g, columns, width, total))
        return out, _report(p, want, out, g, columns, g.any_nonzero(), width), total

    def forward(self, p: Problem, want: Wanted) -> tuple[TokenStats, SparseReport, PyTree]:
        """Statistics and columns from one matmul, and each row's left-out mass (K / V of another matmul)."""
        live = jnp.ones((p.n,), bool) if p.live is None else p.live
        f = in_order(p, live, visit_of(p))
        stats, found = column_screen.screened(f, rule_of(p, want), None)
        out = jax.tree.map(f.put_back, stats)
        kept = _kept_mass(f, rule_of(p, want), stats, found.columns)
        columns = dataclasses.replace(found.columns, left_out=jnp.where(live, f.put_back(mass_beside(kept)), 0.0))
        spans = found.spans.everywhere()  # the tokens' order will be another, and what they leave out has been told
        return out, _report(p, want, out, None, columns, live), Screened(columns, spans)

    def backward(
        self, p: Problem, want: Wanted, out: TokenStats, g: StatCotangents, residual: PyTree, only_logp: bool
    ) -> Gradients:
        """Gradients for given cotangents, over the columns that the forward pass found."""
        if p.live is not None:
            g = without(g, ~p.live)
        f = in_order(p, g.any_nonzero(), visit_of(p))
        return _gradients(f, want, Known(*jax.tree.map(f.take, (out, g))), residual)[0]


def _kept_mass(f: Ordered, rule: Rule, stats: TokenStats, c: Columns) -> Array:
    """``[N]``: the mass that each row has in the active columns, by slabs of them, for the tokens that come first."""
    p, visit = f.p, visit_of(f.p)

    def slab(i: Array, kept: Array) -> Array:
        own = lax.dynamic_slice_in_dim(c.index, i * rule.slab, rule.slab)
        part = head_columns(p.head, own, ascending=False)

        def add(j: Array | int, kept: Array) -> Array:
            q, at = some(p, j * visit, visit), some(stats, j * visit, visit)
            mass = jnp.sum(probabilities(raw_logits(q.h, part, p.call.logits_dtype), q, at, own[None, :]), axis=1)
            return lax.dynamic_update_slice(kept, some(kept, j * visit, visit) + mass, (j * visit,))

        return add(0, kept) if p.n == visit else lax.fori_loop(0, (f.count + (visit - 1)) // visit, add, kept)

    return lax.fori_loop(0, rule.slabs(c.count), slab, jnp.zeros((p.n,), jnp.float32))


def _gradients(f: Ordered, want: Wanted, known: Known, found: Screened) -> tuple[Gradients, Columns, Array]:
    """``(gradients, columns with the mass that each token leaves out, columns that a token met)``, in the order of the
    call: the active columns for every row, the others for hard rows. ``known`` is in the order of ``f``."""
    rule = rule_of(f.p, want)
    task = sparse_backward.Task(f, want, known, found, rule, dweight_buffer.sizes_of(f.p, rule))
    total, left_out, width, dense = sparse_backward.gradients(task)
    columns = dataclasses.replace(found.columns, left_out=f.put_back(left_out), dense=dense)
    return Gradients(total.hidden, in_parameter_dtypes(total.head, f.p.head)), columns, width


def _report(
    p: Problem,
    want: Wanted,
    out: TokenStats,
    g: StatCotangents | None,
    c: Columns,
    rows: Array,
    width: Array | None = None,
) -> SparseReport:
    """Everything is in the order of the call. ``width``: columns met by a token; by default all active columns."""
    hard = rows & misses(p.tolerance, out, g, p.call.vocab_size)(c.left_out) & ~c.dense
    report = chunk_report(rule_of(p, want), p.head, c, rows, hard)
    met = jnp.where(c.dense, p.head.vocab, c.count if width is None else width)
    return dataclasses.replace(report, width=met.astype(jnp.float32))
