"""The sparse backward of the head on a Hopper GPU without logits: columns out of the forward matmul's own epilogue.

With M one ``N x H x V`` matmul over the live tokens and K active columns for all of them (``screen.py``):

    screen     statistics, and a bit for each token and column                     M, no logits
    slabs      for the K columns, a slab at a time: logits again, the mass that each row keeps, dx, dH, dW    3 M K / V
    hard rows  those that leave out more than the tolerance: the *other* columns, too                         3 M each

A row of dW in an active column is summed in float32 over all tokens and written once, in its own dtype: there is no
float32 dW. Hard rows go through all columns of the head as it lies there, a group at a time, with zeros in the active
ones (they add zero to what is written); where they are many, by slabs of the other columns, for all tokens. So a policy
that is not sparse costs four matmuls, where the exact path, which keeps logits, takes three; with a memory budget,
which is room for such logits, that path serves it from the start (``screen.looks_flat``). What the easy rows leave
out of dH is replaced by its mass times a mean row of the head, as in ``head/sparse.py``, which serves where this cannot
(:func:`not_screened_because`). That is by loops, for what does not fit ``at_once.py``, as most calls do.

    order      tokens with a gradient first, so that every matmul reads and writes whole blocks of rows
    bytes      the bits of ``screen.py``; h in that order; dH in float32; a slab of the head, its logits, dx and dW; the
               logits and dx of a group of hard rows
    loops      slabs; groups of hard rows. Their trip counts are known to the device alone
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.backend import Cost, Way
from logitless.head import columns as columns_of
from logitless.head.chunked import finished
from logitless.head.columns import Columns, Rule, chunk_rule
from logitless.head.linear import add_dhead, dhidden, raw_logits, zero_grads
from logitless.head.mosaic_gpu import at_once, blocks, hard, matmul, screen
from logitless.head.mosaic_gpu.backend import not_fused_because
from logitless.head.mosaic_gpu.blocks import Spans
from logitless.head.mosaic_gpu.limits import visit_of
from logitless.head.mosaic_gpu.schedule import tiles_for
from logitless.head.order import Ordered, in_order, some
from logitless.head.report import SparseReport, blank_report, chunk_report
from logitless.head.slabs import Known, in_their_place, mass_beside, mean_row, misses, once, slab_dx, without
from logitless.head.sparse import Sparse, in_words
from logitless.problem import Gradients, Head, HeadGrads, Loss, Problem, Wanted
from logitless.pytree import register
from logitless.rows import live_sweep, probabilities
from logitless.stats import StatCotangents, TokenStats

_LEAST_TOLERANCE = 2.0**-12
"""What a row leaves out is ``1 - `` what it keeps, good to 1e-7: far below the tolerances it is compared with."""

_GROUP, _GROUPS = 128, 8
"""Hard rows that go through all columns at a time, for each visit's worth of tokens: as many as cost no more than
reading the head does. And the most such groups: each rounds what it adds to dW outside the active columns."""


def slab_rule(vocab: int, backward: int = 2) -> Rule:
    """The sizes of a slab's buffers, and what columns and hard rows cost here: logits of both are made again. Three
    eighths of the ordinary slab, since it meets four times the tokens of a chunk."""
    rule = chunk_rule(vocab, backward)
    slab = 3 * rule.slab // 8 if rule.slab % 1024 == 0 else rule.slab
    return dataclasses.replace(rule, per_column=1 + rule.per_column, slab=slab, most=rule.most // slab * slab)


def _rule(p: Problem, want: Wanted) -> Rule:
    return slab_rule(p.head.vocab, want.matmuls)


def _group(p: Any) -> int:
    """Hard rows of a group."""
    return min(_GROUP * -(-p.n // visit_of(p)), p.call.chunk)


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
    spans: Spans  # of the active columns; none where it is dense
    apart: Array  # how many rows have so little mass in any column that they will be hard, as far as can be seen


@dataclasses.dataclass(frozen=True)
class ScreenedSparse(Sparse):
    """A backend around :class:`MosaicGpu`."""

    def describe(self, p: Any, way: Way) -> Cost:
        cost, why = super().describe(p, way), not_screened_because(p)
        if why is not None:
            return dataclasses.replace(cost, way=f"{cost.way}; logits are stored: {why}")
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
        tiles = {"chunk": p.call.chunk, "slab": rule.slab}
        tiles |= {"visit": visit_of(p), "group": _group(p)}
        held = at_once.room(p, rule)
        if held is not None:
            tiles |= {"columns_at_once": held.columns, "hard_at_once": held.hard, "hard_group": hard.group_size(p.n)}
        if p.call.memory_budget is not None and way.in_forward:
            words += "; the exact path, in its chunks, where most targets are unlikely"
            tiles["chunk_if_flat"] = p.call.chunk
        moved = f"a bit for each token and column ({p.n * p.head.vocab // 8:,} B), W once and its active rows"
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
        moving = loss.inputs.mask & loss.may_move()

        def sparse() -> tuple[TokenStats, SparseReport, Gradients]:
            return self._in_forward(p, want, loss, before, moving)

        def exact() -> tuple[TokenStats, SparseReport, Gradients]:
            out, _, total = self.own.gradients_in_forward(p, want, loss)
            g, nothing = loss.cotangents(out), jnp.zeros((p.n,), jnp.float32)
            none = Columns(jnp.zeros((0,), jnp.int32), jnp.int32(0), jnp.asarray(True), nothing)
            return out, _report(p, want, out, g, none, g.any_nonzero()), total

        if p.call.memory_budget is None:  # no room for the logits that the exact path keeps
            return sparse()
        return lax.cond(screen.looks_flat(p, moving, before), exact, sparse)

    def _in_forward(
        self, p: Problem, want: Wanted, loss: Loss, before: Array | None, moving: Array
    ) -> tuple[TokenStats, SparseReport, Gradients]:
        f = in_order(p, moving, visit_of(p), by=before)
        stats, found = _screen(f, want, before)
        # Apart: XLA would compute the loss, its sums and what is gathered from it in one block of threads.
        out = lax.optimization_barrier(jax.tree.map(f.put_back, stats))
        g = lax.optimization_barrier(loss.cotangents(out))
        total, left_out, width = _gradients(f, want, Known(stats, jax.tree.map(f.take, g)), found)
        # Metrics last: they would stand between the one question to the host and the first matmul after it.
        out, g, left_out, width, total = lax.optimization_barrier((out, g, left_out, width, total))
        columns = dataclasses.replace(found.columns, left_out=left_out)
        return out, _report(p, want, out, g, columns, g.any_nonzero(), width), total

    def forward(self, p: Problem, want: Wanted) -> tuple[TokenStats, SparseReport, Any]:
        """Statistics and columns by one matmul, and what each row leaves out (K / V of one more)."""
        if not_screened_because(p) is not None:
            return super().forward(p, want)
        live = jnp.ones((p.n,), bool) if p.live is None else p.live
        f = in_order(p, live, visit_of(p))
        stats, found = _screen(f, want, None)
        out = jax.tree.map(f.put_back, stats)
        nothing = Gradients(None, HeadGrads(None, None)), jnp.zeros((f.p.n,), jnp.float32)
        unmoved = Known(stats, StatCotangents(*(jnp.zeros((f.p.n,), jnp.float32),) * 3))
        rule, c = _rule(p, want), found.columns
        _, kept = _over_slabs(f, rule, unmoved, c.index, rule.slabs(c.count), nothing)
        columns = dataclasses.replace(c, left_out=jnp.where(live, f.put_back(mass_beside(kept)), 0.0))
        spans = found.spans.everywhere()  # the tokens' order will be another, and what they leave out has been told
        return out, _report(p, want, out, None, columns, live), Screened(columns, spans, found.apart)

    def backward(
        self, p: Problem, want: Wanted, out: TokenStats, g: StatCotangents, residual: Any, only_logp: bool
    ) -> Gradients:
        """Gradients for given cotangents, over the columns that the forward pass found."""
        if not_screened_because(p) is not None:
            return super().backward(p, want, out, g, residual, only_logp)
        if p.live is not None:
            g = without(g, ~p.live)
        f = in_order(p, g.any_nonzero(), visit_of(p))
        return _gradients(f, want, Known(*jax.tree.map(f.take, (out, g))), residual)[0]


def _screen(f: Ordered, want: Wanted, before: Array | None) -> tuple[TokenStats, Screened]:
    """``(statistics of the live tokens, columns of those that come first)``, both in the order of ``f``: one matmul, no
    logits. ``before [N]``, in the order of the call, is known of the targets' log-probabilities."""
    p, rule = f.p, _rule(f.p, want)
    rows = jnp.arange(p.n) < f.count
    numbers = screen.screen_of(p, rows, None if before is None else f.take(before))
    stats, words = matmul.screened_stats(p, numbers, f.live)
    assert words is not None
    finite = rows & jnp.isfinite(stats.max_logp)  # a row that is not has NaN gradients, through all columns
    tile = tiles_for(p.n, p.h.shape[1], p.call.vocab_size).columns
    spans, apart = screen.active_columns(rule, words, finite, p, tile)
    assert p.tolerance is not None
    flat = finite & (stats.max_logp < jnp.log(p.tolerance * screen.threshold(rows)))  # none could have passed
    apart = apart + jnp.sum(flat, dtype=jnp.int32)
    count = jnp.sum(spans.active, dtype=jnp.int32)
    dense = count > rule.most
    spans = spans.only(~dense)
    nothing = jnp.zeros((p.n,), jnp.float32)
    columns = Columns(blocks.in_order(spans, rule.most), jnp.where(dense, 0, count), dense, nothing)
    return stats, Screened(columns, spans, apart)


@register
@dataclasses.dataclass(frozen=True)
class _Sums:
    """What a slab adds to: dH in float32, the gradients of its own part of the head, and the mass that rows keep."""

    hidden: Array | None
    part: HeadGrads
    kept: Array


def _over_slabs(
    f: Ordered, rule: Rule, known: Known, index: Array, trips: Array | int, start: tuple[Gradients, Array]
) -> tuple[Gradients, Array]:
    """``start`` (gradients, kept mass ``[N]``) plus what the tokens that come first have in ``trips`` slabs of the
    columns ``index``, none of which has a row of dW yet."""
    p, visit = f.p, visit_of(f.p)
    wanted = bool(jax.tree.leaves(start[0]))

    def columns(i: Array) -> tuple[Array, Head]:
        own = lax.dynamic_slice_in_dim(index, i * rule.slab, rule.slab)
        return own, columns_of.head_columns(p.head, own, ascending=False)

    def add(begin: Array | int, size: int, own: Array, part: Head, c: _Sums) -> _Sums:
        """``c``, whose rows are those of a visit, with what these tokens have in a slab."""
        q, at = some(p, begin, size), Known(*some((known.stats, known.g), begin, size))
        x = raw_logits(q.h, part, p.call.logits_dtype)
        kept = c.kept + jnp.sum(probabilities(x, q, at.stats, own[None, :]), axis=1)
        if not wanted:
            return dataclasses.replace(c, kept=kept)
        dx = slab_dx(x, own, q, at)
        dh = None if c.hidden is None else c.hidden + dhidden(dx, part)
        return _Sums(dh, add_dhead(c.part, dx, q.h, part), kept)

    def put(head: HeadGrads, own: Array, part: HeadGrads) -> HeadGrads:
        return columns_of.put_head_columns(head, own, part, p.head.layout, ascending=False) if wanted else head

    def one_visit(i: Array, carry: tuple[Gradients, Array]) -> tuple[Gradients, Array]:
        """A slab for all tokens: dW needs no sum over visits."""
        total, kept = carry
        own, part = columns(i)
        c = add(0, p.n, own, part, _Sums(total.hidden, columns_of.no_head_columns(total.head, part), kept))
        return Gradients(c.hidden, put(total.head, own, c.part)), c.kept

    def by_visits(i: Array, carry: tuple[Gradients, Array]) -> tuple[Gradients, Array]:
        """A slab over several visits; its part of dW is their sum, in float32."""
        total, kept = carry
        own, part = columns(i)

        def body(j: Array, c: _Sums) -> _Sums:
            begin = j * visit
            rows = dataclasses.replace(c, hidden=some(c.hidden, begin, visit), kept=some(c.kept, begin, visit))
            new = add(begin, visit, own, part, rows)
            return _Sums(_put(c.hidden, new.hidden, begin), new.part, _put(c.kept, new.kept, begin))

        blank = columns_of.no_head_columns(total.head, part, jnp.float32)
        c = lax.fori_loop(0, (f.count + (visit - 1)) // visit, body, _Sums(total.hidden, blank, kept))
        return Gradients(c.hidden, put(total.head, own, c.part)), c.kept

    return lax.fori_loop(0, trips, by_visits if p.n > visit else one_visit, start)


def _put(whole: Any, rows: Any, begin: Array | int) -> Any:
    """``whole`` with some of its rows replaced."""
    return None if whole is None else lax.dynamic_update_slice_in_dim(whole, rows, begin, 0)


def _gradients(f: Ordered, want: Wanted, known: Known, found: Screened) -> tuple[Gradients, Array, Array]:
    """``(gradients, mass left out [N], columns that a token met)``, in the order of the call: the active columns for
    every row, the others for hard rows. ``known`` is in the order of ``f``."""
    p, rule = f.p, _rule(f.p, want)
    held = at_once.room(p, rule)

    def by_slabs(f: Ordered, known: Known, head: HeadGrads) -> tuple[Gradients, Array, Array]:
        leave = 0 if held is None or not hard.can_add(p.head) else held.hard // 2
        return _by_slabs(f, want, known, found, head, leave)

    if held is not None:
        total, left_out, width = at_once.gradients(f, want, known, found, rule, held, by_slabs)
    else:
        total, left_out, _ = by_slabs(f, known, zero_grads(p.head, want, p.head.weight.dtype))
        total = Gradients(None if total.hidden is None else f.put_back(total.hidden), total.head)
        width = found.columns.count
    return finished(p, total), f.put_back(left_out), width


def _by_slabs(
    f: Ordered, want: Wanted, known: Known, found: Screened, head: HeadGrads, leave: int
) -> tuple[Gradients, Array, Array]:
    """``(gradients, mass left out [N], hard rows that are left to others [N])`` in the order of ``f``, those of the
    head added to ``head``: loops over slabs of columns. Up to ``leave`` hard rows are left; without that they go in
    groups, or where they are many by slabs, too."""
    p, rule, c = f.p, _rule(f.p, want), found.columns
    moving = known.g.any_nonzero()
    hidden = jnp.zeros(p.h.shape, jnp.float32) if want.hidden else None
    nothing = jnp.zeros((p.n,), jnp.float32)
    start = Gradients(hidden, head), nothing
    total, kept = _over_slabs(f, rule, known, c.index, rule.slabs(c.count), start)
    left_out = jnp.where(moving, mass_beside(kept), 0.0)
    is_hard = moving & misses(p.tolerance, known.stats, known.g, p.call.vocab_size)(left_out)

    rest = live_sweep(is_hard, _group(p))
    many = jnp.asarray(rest.count > (leave or _GROUPS * rest.chunk))
    if not leave:
        few = dataclasses.replace(rest, count=jnp.where(many, 0, rest.count))
        total = few.run(lambda visit, total: hard.add_few(f, visit, known, found.spans.active, total), total)
    slabs = -(-p.head.vocab // rule.slab)
    order = jnp.argsort(found.spans.active, stable=True).astype(jnp.int32)  # the others first
    at = jnp.arange(slabs * rule.slab, dtype=jnp.int32)
    others = jnp.where(at < p.head.vocab - c.count, jnp.pad(order, (0, at.size - order.size)), p.head.vocab + at)
    left = Known(known.stats, without(known.g, ~is_hard))

    def all_others(total: Gradients) -> Gradients:
        # As many turns as there are slabs, used or not: a loop whose length the compiler knows asks the host nothing.
        return _over_slabs(f, rule, left, others, slabs, (total, nothing))[0]

    total = once(many, all_others, total)
    dh = None
    if total.hidden is not None:
        easy = without(known.g, is_hard | ~moving)
        dh = total.hidden + in_their_place(mean_row(rule, p), left_out, easy, p.transform)
        dh = dh.astype(p.h.dtype)
    return Gradients(dh, total.head), left_out, is_hard & ~many if leave else jnp.zeros_like(is_hard)


def _report(
    p: Problem,
    want: Wanted,
    out: TokenStats,
    g: StatCotangents | None,
    c: Columns,
    rows: Array,
    width: Array | None = None,
) -> SparseReport:
    """All in the order of the call. ``width``: columns that a token met; of the active ones all, unless it is said."""
    hard = rows & misses(p.tolerance, out, g, p.call.vocab_size)(c.left_out) & ~c.dense
    report = chunk_report(_rule(p, want), p.head, c, rows, hard)
    met = jnp.where(c.dense, p.head.vocab, c.count if width is None else width)
    return dataclasses.replace(report, width=met.astype(jnp.float32))
