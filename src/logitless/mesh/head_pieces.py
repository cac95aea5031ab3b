"""A head of the TPU kernels over a mesh, a part of the vocabulary at a time: dW leaves in parts, W arrives in parts.

The kernel rounds dW to the parameter's dtype as it writes it; a sum over devices needs it in float32, which is twice
the head beside the head and dW itself, or in the parameter's dtype, which is once the head: no compiler sums in place.
So a large one leaves its device in parts: rows of dW depend on no other rows, and each part is made, reduced, rounded
and put into place before the next is made.

With FSDP over F devices on the vocabulary a part is a run of *every* device's own columns, so that the reduce-scatter
of a part gives each device what belongs to it:

    columns of the whole head   | device 0: part 0, part 1, ... | device 1: part 0, part 1, ... | ...
    part k of dW                | part k of 0 | part k of 1 | ...  -> reduce-scatter ->  part k of one's own columns

and the whole head is never there: a part is gathered when it is swept (:class:`Arriving`), once in the forward pass and
once in the backward pass. What a sweep gives is a sum over columns, so parts are merged as tiles of one sweep are. The
backward pass for a part makes the part's dW, and its summand of dH unless the forward pass left a direction:

    forward    for each part: all-gather; sums of its columns, merged        residual: d logp / d hidden, float32
    backward   for each part: all-gather; dW (and dH), reduce-scatter

Costs two gathers of the head's bytes instead of one, and needs ``[V, H] / parts`` instead of ``[V, H]``. dW equals the
whole dW bit by bit; statistics differ from a single sweep by the order of a sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.core.backend import Backend, Divisible
from logitless.core.problem import Gradients, HeadArrays, HeadGrads, Linear, Problem, Source, Wanted
from logitless.core.shapes import PyTree
from logitless.core.stats import (
    NEG_INF,
    StatCotangents,
    TokenStats,
    empty_sums,
    finish,
    masked_stats,
    merge,
    times,
    valid_targets,
)
from logitless.core.stats import factor as factor_of
from logitless.mesh.collectives import gather_head, own_targets, reduce_grads, zeros
from logitless.mesh.sharding import Placement

MOST_BYTES = 512 << 20
"""Upper bound for float32 dW on a device at a time; for a sum in the parameter's 16 bits, bound for a part plus its
sum."""


def parts_of_dw(place: Placement, p: Problem[Source], want: Wanted) -> int:
    """In how many parts a backend with ``head_in_parts`` hands on dW from a device that has the whole head; 1 where dW
    is small, not summed over devices, or not made by one sweep over the vocabulary."""
    if not isinstance(p.policy, Linear) or not want.weight or not place.token_axes:
        return 1
    head = p.policy.head
    if p.call.vocab_size < head.vocab * place.count(place.vocab):  # a part would not be a run of real columns
        return 1
    if head.lora_a is not None:  # a part of dW would need the whole of dlow
        return 1
    return number(head.weight.size, head.vocab // place.count(place.vocab_gathered))


def arriving(own: Backend, place: Placement, p: Any) -> int:
    """In how many parts the head is gathered, of a device's own problem before that; 1: whole.

    An ``[H, V]`` head is gathered whole: a part of it would not be a run of the array. The same holds for a head that
    is also vocabulary-parallel, or cut along the hidden dimension.
    """
    if not isinstance(p.policy, Linear) or not own.head_in_parts:
        return 1
    if p.head.layout != "vh" or p.head.lora_a is not None or place.vocab or place.hidden_gathered:
        return 1
    shards = place.count(place.vocab_gathered)
    if shards == 1 or p.call.vocab_size < p.head.vocab * shards:
        return 1
    return number(p.head.weight.size * shards, p.head.vocab)


def number(size: int, columns: int) -> int:
    """Parts of a head of ``size`` numbers, of which a device has ``columns`` columns for itself."""
    parts = 1
    while 4 * size // parts > MOST_BYTES and columns % (2 * parts) == 0:
        parts *= 2
    return parts


# -- the head arrives in parts -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Arriving:
    """``own`` on a device of FSDP over the vocabulary, whose head is gathered a part at a time. Problems are flat, and
    have the device's own part of the head."""

    own: Divisible
    place: Placement
    parts: int

    def _part(self, p: Problem, k: Array | int) -> Problem:
        """The problem with part ``k`` of every device's columns; targets elsewhere are -1."""
        columns = p.head.vocab
        size = columns // self.parts

        def cut(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, k * size, size, axis=0)

        bias = None if p.head.bias is None else cut(p.head.bias)
        head = gather_head(self.place, dataclasses.replace(p.head, weight=cut(p.head.weight), bias=bias))
        y, column = p.targets, p.targets % columns
        y = jnp.where((y >= 0) & (column // size == k), y // columns * size + column % size, -1)
        return dataclasses.replace(p.with_head(head), targets=y).calling(vocab_size=head.vocab)

    def forward(self, p: Problem, want: Wanted | None) -> tuple[TokenStats, PyTree]:
        """``(statistics, d logp / d hidden or None)``, one matmul per live token. A barrier keeps the statistics' bits
        the same with and without a gradient."""
        factor = factor_of(p.transform)

        def swept(k: Array | int) -> PyTree:
            q = self._part(p, k)
            sums, (x_y, expected) = self.own.sums(q, want)
            if expected is None:
                return sums, x_y, None, None
            rows = q.head.weight.at[jnp.maximum(q.targets, 0)].get(mode="promise_in_bounds")
            return sums, x_y, expected, jnp.where((q.targets >= 0)[:, None], rows, jnp.zeros((), rows.dtype))

        def add(k: Array, before: PyTree) -> PyTree:
            sums, x_y, expected, rows = before
            more, more_x, more_expected, more_rows = swept(k)
            both = merge(sums, more, factor)
            if expected is not None:
                old, new = (_moved(s.maximum, both.maximum, factor)[:, None] for s in (sums, more))
                expected, rows = old * expected + new * more_expected, rows + more_rows
            return both, x_y + more_x, expected, rows

        like = jax.eval_shape(swept, jnp.int32(0))
        start = (empty_sums((p.n,)), *zeros(like[1:]))
        # Every device goes round as often: the collectives in this loop meet.
        sums, x_y, expected, rows = lax.fori_loop(0, self.parts, add, start)
        stats = finish(sums, valid_targets(p.targets, p.call.vocab_size), p.transform)
        stats = lax.optimization_barrier(masked_stats(stats, p.live))
        if rows is None:
            return stats, None
        # The target's head rows stand in for the head: a token's own is its target there.
        at = jnp.where(valid_targets(p.targets, p.call.vocab_size), jnp.arange(p.n, dtype=jnp.int32), -1)
        last = dataclasses.replace(p.with_head(HeadArrays(rows)), targets=at).calling(vocab_size=p.n)
        return stats, self.own.shard_residual(last, stats, sums, (x_y, expected), lambda x: x)

    def backward(
        self, p: Problem, want: Wanted, out: TokenStats, g: StatCotangents, residual: PyTree, only_logp: bool
    ) -> Gradients:
        """dH from the direction if that is enough, else from the sweeps that make dW; the head's gradients reduced."""
        dh = None
        if want.hidden and only_logp and residual is not None:
            alone = Wanted(hidden=True, weight=False)
            dh = self.own.backward(p, alone, out, g, residual, True).hidden
        swept = dataclasses.replace(want, hidden=want.hidden and dh is None)
        if not swept:
            return Gradients(dh, HeadGrads(None, None))
        q = p.calling(partial_hidden=True)

        def made(k: Array | int) -> Gradients:
            found = self.own.backward(self._part(q, k), swept, out, g, None, False)
            return Gradients(found.hidden, reduce_grads(self.place, found.head, p.head))

        found = _each_part(self.parts, p.head.vocab, 0, made)
        hidden = dh if found.hidden is None else found.hidden.astype(p.h.dtype)
        return Gradients(hidden, found.head)


def _moved(before: Array, after: Array, k: Array | None) -> Array:
    """What makes sums relative to the maximum ``before`` relative to ``after``; ``k`` is the transform's factor."""
    return jnp.where(before > NEG_INF, jnp.exp(times(k, before - after)), 0.0)


def _each_part(parts: int, columns: int, axis: int, made: Callable[[Array], Any]) -> Gradients:
    """``made(k)`` for every part: dH summed, the head's gradients put into their place among ``columns``."""
    size = columns // parts

    def body(k: Array, total: Gradients) -> Gradients:
        own = made(k)
        at = HeadGrads(axis, 0)  # type: ignore[arg-type]
        head = jax.tree.map(
            lambda a, b, d: None if a is None else lax.dynamic_update_slice_in_dim(a, b, k * size, d),
            total.head, own.head, at, is_leaf=lambda x: x is None,
        )  # fmt: skip
        return Gradients(None if own.hidden is None else total.hidden + own.hidden, head)

    def whole(x: PyTree, axis: int) -> PyTree:
        return None if x is None else jnp.zeros((*x.shape[:axis], columns, *x.shape[axis + 1 :]), x.dtype)

    like = jax.eval_shape(made, jnp.int32(0))
    start = Gradients(zeros(like.hidden), HeadGrads(whole(like.head.weight, axis), whole(like.head.bias, 0)))
    # Every device goes round as often: the collectives in this loop meet.
    return lax.fori_loop(0, parts, body, start)


# -- dW leaves in parts ------------------------------------------------------------------------------------------------


def reduced_grads(
    own: Backend,
    place: Placement,
    p: Problem,
    want: Wanted,
    known: tuple[TokenStats, StatCotangents],
    parts: int,
    like: HeadArrays,
) -> HeadGrads:
    """The gradients of weight and bias, reduced over devices, from ``known`` statistics and cotangents; ``like`` is the
    head before it was gathered."""
    head, shards = p.head, place.count(place.vocab_gathered)
    targets = own_targets(place, p.targets, head.vocab) if place.vocab else p.targets
    columns, axis = head.vocab // shards, head.axis
    size = columns // parts

    def part(x: Array, axis: int, k: Array) -> Array:
        """Part ``k`` of every shard's columns."""
        apart = x.reshape(*x.shape[:axis], shards, columns, *x.shape[axis + 1 :])
        taken = lax.dynamic_slice_in_dim(apart, k * size, size, axis=axis + 1)
        return taken.reshape(*x.shape[:axis], shards * size, *x.shape[axis + 1 :])

    shard, column = targets // columns, targets % columns
    alone = dataclasses.replace(want, hidden=False)

    def reduced(k: Array) -> HeadGrads:
        y = jnp.where((targets >= 0) & (column // size == k), shard * size + column % size, -1)
        bias = None if head.bias is None else part(head.bias, 0, k)
        piece = HeadArrays(part(head.weight, axis, k), bias, layout=head.layout)
        q = dataclasses.replace(p.with_head(piece), targets=y).calling(vocab_size=shards * size)
        return reduce_grads(place, own.backward(q, alone, *known, None, False).head, like)

    return _each_part(parts, columns, axis, lambda k: Gradients(None, reduced(k))).head
