"""The sparse backward on a Hopper GPU by slabs of columns: loops of XLA's matmuls, for what does not go at once.

    slabs      of the K active columns: logits again, the mass that each row keeps, dx, dH, dW       3 M K / V
    hard rows  those that leave out more than the tolerance: a few of them in groups through all columns of the head as
               it lies there; where they are many, by slabs of the *other* columns, for all tokens     3 M each

A row of dW in an active column is summed in float32 over all tokens of a call and written once, in its own dtype. A
policy that is not sparse costs four matmuls here: statistics, logits again, dH and dW.

    bytes      dH in float32; a slab of the head, its logits, dx and dW
    loops      slabs; groups of hard rows. The former's trip count is known to the device alone, where they are of the
               active columns
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.head import columns as columns_of
from logitless.head.columns import Rule, chunk_rule
from logitless.head.linear import add_dhead, dhidden, raw_logits
from logitless.head.mosaic_gpu import hard
from logitless.head.mosaic_gpu.limits import visit_of
from logitless.head.mosaic_gpu.screen import Screened
from logitless.head.order import Ordered, some
from logitless.head.slabs import Known, in_their_place, mass_beside, mean_row, misses, once, slab_dx, without
from logitless.problem import Gradients, Head, HeadGrads, Problem, Wanted
from logitless.pytree import register
from logitless.rows import live_sweep, probabilities

_GROUP, _GROUPS = 128, 8
"""Hard rows that go through all columns at a time, for each visit's worth of tokens: as many as cost no more than
reading the head does. And the most such groups: each rounds what it adds to dW outside the active columns."""


def slab_rule(vocab: int, backward: int = 2) -> Rule:
    """The sizes of a slab's buffers, and what columns and hard rows cost here: logits of both are made again. Three
    quarters of the ordinary slab, since it meets more tokens than a chunk has."""
    rule = chunk_rule(vocab, backward)
    slab = 3 * rule.slab // 4 if rule.slab % 1024 == 0 else rule.slab
    return dataclasses.replace(rule, per_column=1 + rule.per_column, slab=slab, most=rule.most // slab * slab)


def rule_of(p: Problem, want: Wanted) -> Rule:
    return slab_rule(p.head.vocab, want.matmuls)


def group_rows(p: Any) -> int:
    """Hard rows of a group."""
    return min(_GROUP * -(-p.n // visit_of(p)), p.call.chunk)


@register
@dataclasses.dataclass(frozen=True)
class _Sums:
    """What a slab adds to: dH in float32, the gradients of its own part of the head, and the mass that rows keep."""

    hidden: Array | None
    part: HeadGrads
    kept: Array


def over_slabs(
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


def gradients(
    f: Ordered, want: Wanted, known: Known, found: Screened, head: HeadGrads, leave: int
) -> tuple[Gradients, Array, Array]:
    """``(gradients, mass left out [N], hard rows that are left to others [N])`` in the order of ``f``, those of the
    head added to ``head``: loops over slabs of columns. Up to ``leave`` hard rows are left; without that they go in
    groups, or where they are many by slabs, too."""
    p, rule, c = f.p, rule_of(f.p, want), found.columns
    moving = known.g.any_nonzero()
    hidden = jnp.zeros(p.h.shape, jnp.float32) if want.hidden else None
    nothing = jnp.zeros((p.n,), jnp.float32)
    start = Gradients(hidden, head), nothing
    total, kept = over_slabs(f, rule, known, c.index, rule.slabs(c.count), start)
    left_out = jnp.where(moving, mass_beside(kept), 0.0)
    is_hard = moving & misses(p.tolerance, known.stats, known.g, p.call.vocab_size)(left_out)

    rest = live_sweep(is_hard, group_rows(p))
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
        return over_slabs(f, rule, left, others, slabs, (total, nothing))[0]

    total = once(many, all_others, total)
    dh = None
    if total.hidden is not None:
        easy = without(known.g, is_hard | ~moving)
        dh = total.hidden + in_their_place(mean_row(rule, p), left_out, easy, p.transform)
        dh = dh.astype(p.h.dtype)
    return Gradients(dh, total.head), left_out, is_hard & ~many if leave else jnp.zeros_like(is_hard)
