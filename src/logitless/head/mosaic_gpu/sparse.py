"""The sparse backward of the head on a Hopper GPU without logits: columns out of the forward matmul's own epilogue.

With M one ``N x H x V`` matmul over the live tokens and K active columns for all of them (``screen.py``):

    screen     statistics, and a bit for each token and column                     M, no logits
    slabs      for the K columns, a slab at a time: logits again, the mass that each row keeps, dx, dH, dW    3 M K / V
    hard rows  those that leave out more than the tolerance: the *other* columns, in the same way             3 M each

So a row of dW is summed in float32 over all tokens and written once, in its own dtype: there is no float32 dW. What the
easy rows leave out of dH is replaced by its mass times a mean row of the head, as in ``head/sparse.py``, which serves
where this cannot (:func:`not_screened_because`).

    bytes      the bits of ``screen.py``; dH in float32; a slab of the head, its logits, dx and dW
    loops      slabs x chunks of tokens, twice; their trip counts are known to the device alone
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.backend import Cost, Way
from logitless.head import columns as columns_of
from logitless.head.chunked import finished
from logitless.head.columns import Columns, Rule, chunk_rule
from logitless.head.linear import add_dhead, dhidden, raw_logits, zero_grads
from logitless.head.mosaic_gpu import matmul, screen
from logitless.head.mosaic_gpu.backend import MosaicGpu, not_fused_because
from logitless.head.mosaic_gpu.schedule import tiles_for
from logitless.head.report import SparseReport, blank_report, chunk_report
from logitless.head.slabs import Known, in_their_place, mean_row, misses, slab_dx, without
from logitless.head.sparse import Sparse, hard_chunk, in_words
from logitless.problem import Gradients, HeadGrads, Loss, Problem, Wanted
from logitless.pytree import register
from logitless.rows import Sweep, Visit, front, live_sweep, probabilities
from logitless.stats import StatCotangents, TokenStats

_LEAST_TOLERANCE = 2.0**-12
"""What a row leaves out is ``1 - `` what it keeps, good to 1e-7: far below the tolerances it is compared with."""


def _rule(p: Problem, want: Wanted) -> Rule:
    """The sizes of a chunk's buffers, and what columns and hard rows cost here: logits of both are made again."""
    rule = chunk_rule(p.head.vocab, want.matmuls)
    return dataclasses.replace(rule, per_column=1 + rule.per_column)


def not_screened_because(p: Any) -> str | None:
    """Why the form with stored logits serves a problem (arrays or shapes); ``None`` where this one does."""
    if p.call.mass is not None and p.call.mass < _LEAST_TOLERANCE:
        return f"a tolerance of {in_words(p.call.mass)} is less than one minus the kept mass can be judged by"
    if p.call.partial_hidden or p.call.partial_head:
        return "its gradients are parts of a sum over devices"
    return not_fused_because(p)


@register
@dataclasses.dataclass(frozen=True)
class Screened:
    """What the forward pass found, for the backward pass."""

    columns: Columns  # of all tokens
    active: Array  # [V] bool; none where it is dense


@dataclasses.dataclass(frozen=True)
class MosaicGpuScreen(MosaicGpu):
    """``mosaic_gpu``, by the name under which its sparse backward is the one of this module."""

    name: ClassVar[str] = "mosaic_gpu_screen"


@dataclasses.dataclass(frozen=True)
class ScreenedSparse(Sparse):
    """A backend around :class:`MosaicGpu`."""

    def describe(self, p: Any, way: Way) -> Cost:
        cost, why = super().describe(p, way), not_screened_because(p)
        if why is not None:
            return dataclasses.replace(cost, way=f"{cost.way}; logits are stored: {why}")
        rule = chunk_rule(p.head.vocab)
        words = (
            f"columns by a screen inside the forward matmul, no logits; backward over the K active columns of all "
            f"tokens, which leave at most {in_words(way.mass)} of a row's mass out (rows that would leave out more: "
            f"the other columns as well); all columns where K > {rule.most:,}"
        )
        late = "" if way.in_forward else ", and K/V more for what rows leave out"
        matmuls = (
            f"1 + 3 K/V per live token{late}, 4 a hard row; one less of the K/V and of the rest with a frozen head, "
            "1 without a gradient"
        )
        moved = f"a bit for each token and column ({p.n * p.head.vocab // 8:,} B), W once and its active rows"
        tiles = {**matmul.describe(p.n, p.h.shape[1], p.head.vocab, p.call.vocab_size), "slab": rule.slab}
        return dataclasses.replace(
            cost, way=words, matmuls=matmuls, bytes_moved=moved, tiles=tiles, counts=None, fused_statistics=True
        )

    def statistics(self, p: Problem, loss: Loss | None = None) -> tuple[TokenStats, SparseReport]:
        if not_screened_because(p) is not None:
            return super().statistics(p, loss)
        return self.own.token_statistics(p), blank_report(p.n)

    def gradients_in_forward(self, p: Problem, want: Wanted, loss: Loss) -> tuple[TokenStats, SparseReport, Gradients]:
        """Statistics and columns by one matmul, then the gradients of an uncoupled objective over the columns."""
        if not_screened_because(p) is not None:
            return super().gradients_in_forward(p, want, loss)
        before = loss.inputs.old if loss.inputs.old is not None else loss.inputs.rollout
        out, found = _screen(p, want, loss.inputs.mask & loss.may_move(), before)
        g = loss.cotangents(out)
        total, left_out = _gradients(p, want, Known(out, g), found)
        found = dataclasses.replace(found, columns=dataclasses.replace(found.columns, left_out=left_out))
        return out, _report(p, want, out, g, found), total

    def forward(self, p: Problem, want: Wanted) -> tuple[TokenStats, SparseReport, Any]:
        """Statistics and columns by one matmul, and what each row leaves out (K / V of one more)."""
        if not_screened_because(p) is not None:
            return super().forward(p, want)
        live = jnp.ones((p.n,), bool) if p.live is None else p.live
        out, found = _screen(p, want, live, None)
        rule, nothing = _rule(p, want), Gradients(None, HeadGrads(None, None))
        start = (nothing, jnp.zeros((p.n,), jnp.float32))
        unmoved = Known(out, StatCotangents(*(jnp.zeros((p.n,), jnp.float32),) * 3))
        trips = rule.slabs(found.columns.count)
        _, kept = _over_slabs(p, rule, live_sweep(live, p.call.chunk), unmoved, found.columns.index, trips, start)
        columns = dataclasses.replace(found.columns, left_out=jnp.where(live, _rest(kept), 0.0))
        found = dataclasses.replace(found, columns=columns)
        return out, _report(p, want, out, None, found, live), found

    def backward(
        self, p: Problem, want: Wanted, out: TokenStats, g: StatCotangents, residual: Any, only_logp: bool
    ) -> Gradients:
        """Gradients for given cotangents, over the columns that the forward pass found."""
        if not_screened_because(p) is not None:
            return super().backward(p, want, out, g, residual, only_logp)
        if p.live is not None:
            g = without(g, ~p.live)
        return _gradients(p, want, Known(out, g), residual)[0]


def _rest(kept: Array) -> Array:
    """``[N]``: the mass of a row beside what it keeps; NaN where the row is."""
    return jnp.where(kept > 1.0, 0.0, 1.0 - kept)


def _screen(p: Problem, want: Wanted, rows: Array, before: Array | None) -> tuple[TokenStats, Screened]:
    """``(statistics of the live tokens, columns of those of ``rows [N]``)``: one matmul, no logits."""
    rule = _rule(p, want)
    f = front(p.live)
    q, numbers = f.problem(p), screen.screen_of(p, rows, before)
    stats, words = matmul.screened_stats(q, f.take(numbers), f.count)
    assert words is not None
    out = jax.tree.map(f.put_back, stats)
    finite = rows & jnp.isfinite(out.max_logp)  # a row that is not has NaN gradients, through all columns
    tile = tiles_for(p.n, p.h.shape[1], p.call.vocab_size).columns
    active = screen.active_columns(rule, words, f.take(finite), q, tile)
    count = jnp.sum(active, dtype=jnp.int32)
    dense = count > rule.most
    active = active & ~dense
    index = columns_of.compacted(active, rule.most)
    nothing = jnp.zeros((p.n,), jnp.float32)
    return out, Screened(Columns(index, jnp.where(dense, 0, count), dense, nothing), active)


def _over_slabs(
    p: Problem, rule: Rule, sweep: Sweep, known: Known, index: Array, trips: Array, start: tuple[Gradients, Array]
) -> tuple[Gradients, Array]:
    """``start`` (gradients, kept mass ``[N]``) plus what the tokens of ``sweep`` have in ``trips`` slabs of the columns
    ``index``, none of which has a row of dW yet."""

    def slab(i: Array, carry: tuple[Gradients, Array]) -> tuple[Gradients, Array]:
        total, kept = carry
        own = lax.dynamic_slice_in_dim(index, i * rule.slab, rule.slab)
        part = columns_of.head_columns(p.head, own)

        def chunk(visit: Visit, c: Any) -> Any:
            dh, dpart, kept = c
            q = visit.problem(p)
            at = Known(*visit.known(known.stats, known.g, p.n))
            x = raw_logits(q.h, part, p.call.logits_dtype)
            mass = jnp.sum(probabilities(x, q, at.stats, own[None, :]), axis=1)
            kept = visit.put(kept, visit.take(kept) + mass)
            if dh is not None or any(v is not None for v in jax.tree.leaves(dpart)):
                dx = slab_dx(x, own, q, at)
                dh = None if dh is None else visit.put(dh, visit.take(dh) + dhidden(dx, part))
                dpart = add_dhead(dpart, dx, q.h, part)
            return dh, dpart, kept

        blank = columns_of.no_head_columns(total.head, part, jnp.float32)
        dh, dpart, kept = sweep.run(chunk, (total.hidden, blank, kept))
        return Gradients(dh, columns_of.put_head_columns(total.head, own, dpart, part.layout)), kept

    return lax.fori_loop(0, trips, slab, start)


def _gradients(p: Problem, want: Wanted, known: Known, found: Screened) -> tuple[Gradients, Array]:
    """``(gradients, mass left out [N])``: the active columns for every row, the others for hard rows."""
    rule, c = _rule(p, want), found.columns
    moving = known.g.any_nonzero()
    hidden = jnp.zeros(p.h.shape, jnp.float32) if want.hidden else None
    start = Gradients(hidden, zero_grads(p.head, want, p.head.weight.dtype))
    sweep = live_sweep(moving, p.call.chunk)
    nothing = jnp.zeros((p.n,), jnp.float32)
    total, kept = _over_slabs(p, rule, sweep, known, c.index, rule.slabs(c.count), (start, nothing))
    left_out = jnp.where(moving, _rest(kept), 0.0)
    hard = moving & misses(p.tolerance, known.stats, known.g, p.call.vocab_size)(left_out)

    others = columns_of.compacted(~found.active, -(-p.head.vocab // rule.slab) * rule.slab)
    trips = jnp.where(jnp.any(hard), rule.slabs(p.head.vocab - c.count), 0)
    rest = live_sweep(hard, hard_chunk(p.call.chunk), rest_at_once=True)
    total, _ = _over_slabs(p, rule, rest, known, others, trips, (total, nothing))
    if total.hidden is not None:
        easy = without(known.g, hard | ~moving)
        dh = total.hidden + in_their_place(mean_row(rule, p), left_out, easy, p.transform)
        total = Gradients(dh.astype(p.h.dtype), total.head)
    return finished(p, total), left_out


def _report(
    p: Problem, want: Wanted, out: TokenStats, g: StatCotangents | None, found: Screened, rows: Array | None = None
) -> SparseReport:
    rule = _rule(p, want)
    if rows is None:
        assert g is not None
        rows = g.any_nonzero()
    c = found.columns
    hard = rows & misses(p.tolerance, out, g, p.call.vocab_size)(c.left_out) & ~c.dense
    return chunk_report(rule, p.head, c, rows, hard)
