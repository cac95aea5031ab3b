"""A vocabulary-parallel problem on a single device: the device has a run of columns, and neither columns nor logits
move.

    forward    sums over the device's own columns (``stats.RowSums``), merged over devices: five numbers a token
    backward   logits of its own columns again, dx from the *global* statistics; dH summed over devices, dW is its own

At the logits level dlogits follow from the global statistics without another collective.

The direction ``d logp/d hidden`` of the TPU kernels is a sum over columns as well: each device scales its own part by
the global statistics, and the parts are summed in the forward pass instead of dH in the backward pass.

dH is summed over devices in float32: rounded parts would add up their roundings, and the target's part and the others'
may cancel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.core.backend import Around, Backend, Divisible
from logitless.core.divergences import ShardOfPair, finish_pair, log_mass, of_all_columns, rounded_alike
from logitless.core.problem import Given, Gradients, Linear, Loss, Problem, Source, Teacher, Wanted
from logitless.core.shapes import PyTree
from logitless.core.stats import (
    NEG_INF,
    RowSums,
    StatCotangents,
    TokenStats,
    factor,
    finish,
    masked_stats,
    valid_targets,
)
from logitless.mesh.collectives import by_columns, merge_sums, own_targets, zeros
from logitless.mesh.sharding import Placement

P = TypeVar("P", bound=Problem[Linear] | Problem[Given])
W = TypeVar("W", bound=Wanted | bool)


def shard_of(own: Backend, place: Placement) -> Backend:
    """What a device of a vocabulary-parallel placement does, by ``own``."""
    if isinstance(own, Around):  # a sparse backward
        from logitless.mesh.vocab_parallel_sparse import SparseShard

        return SparseShard(own, place)  # type: ignore[arg-type, return-value]
    return VocabularyShard(own, place)  # type: ignore[arg-type, return-value]


def width_of(p: Problem[Source]) -> int:
    """Columns that a device has, padding included."""
    return p.policy.width


def no_columns(shapes: RowSums) -> RowSums:
    """The sums over no columns at all."""
    return dataclasses.replace(zeros(shapes), maximum=jnp.full(shapes.maximum.shape, NEG_INF, jnp.float32))


def no_pair(shapes: ShardOfPair) -> ShardOfPair:
    """What no columns at all say of two distributions."""
    blank = zeros(shapes)
    nothing = jnp.full(shapes.sums.maximum.shape, NEG_INF, jnp.float32)
    return ShardOfPair(
        no_columns(shapes.sums),
        no_columns(shapes.teacher_sums),
        dataclasses.replace(blank.own, peak=nothing),
        dataclasses.replace(blank.teacher, peak=nothing),
        blank.pair,
    )


@dataclasses.dataclass(frozen=True)
class VocabularyShard(Generic[P, W]):
    """``own`` on a device's columns, with the collectives between its passes."""

    own: Divisible[P, W]
    place: Placement

    def shard(self, p: P) -> P:
        """The problem with targets as local columns; -1 for targets on other devices."""
        return dataclasses.replace(p, targets=own_targets(self.place, p.targets, width_of(p)))

    def by_columns(self, p: P, f: Callable[..., PyTree], empty: Callable[[PyTree], PyTree] = zeros) -> PyTree:
        """``f`` applied to the problem with the number of real columns on this device."""
        place, call = self.place, p.call
        return by_columns(place, call.vocab_size, width_of(p), lambda k: f(p.calling(vocab_size=k)), empty)

    def statistics(self, p: P, loss: Loss | None = None) -> tuple[TokenStats, object]:
        return self.forward(p, None)[0], None

    def forward(self, p: P, want: W | None) -> tuple[TokenStats, object, PyTree]:
        """Statistics over the vocabulary of all devices. A barrier keeps their bits the same with and without a
        gradient."""
        mine = self.shard(p)
        if p.teacher is not None and p.teacher.divergence != "jsd":
            stats = self._with_teacher_at_once(p, mine, p.teacher)
            return lax.optimization_barrier(masked_stats(stats, p.live)), None, None

        def none(shapes: PyTree) -> PyTree:
            return no_columns(shapes[0]), zeros(shapes[1])

        local, part = self.by_columns(mine, lambda q: self.own.sums(q, want), none)
        k = factor(p.transform)
        stats = finish(merge_sums(self.place.vocab, local, k), valid_targets(p.targets, p.call.vocab_size), p.transform)
        if p.teacher is not None:
            stats = self._with_teacher(mine, p.teacher, stats)
        stats = lax.optimization_barrier(masked_stats(stats, p.live))
        mine = dataclasses.replace(mine, call=dataclasses.replace(mine.call, vocab_size=width_of(p)))
        residual = self.own.shard_residual(mine, stats, local, part, lambda x: lax.psum(x, self.place.vocab))
        return stats, None, residual

    def _with_teacher_at_once(self, p: P, mine: P, teacher: Teacher) -> TokenStats:
        """The statistics with those of a KL: one sweep over both heads, the shards' own softmaxes put together."""
        axes, k, other_k = self.place.vocab, factor(p.transform), factor(teacher.transform)
        found = self.by_columns(mine, self.own.shard_of_pair, no_pair)
        stats = finish(merge_sums(axes, found.sums, k), valid_targets(p.targets, p.call.vocab_size), p.transform)
        other = rounded_alike(stats, finish(merge_sums(axes, found.teacher_sums, other_k), True, teacher.transform))
        masses = log_mass(found.own, stats, k), log_mass(found.teacher, other, other_k)
        pair = of_all_columns(teacher.divergence, found, stats, *masses)
        pair = jax.tree.map(lambda x: lax.psum(x, axes), pair)
        return finish_pair(teacher.divergence, stats, other, pair, None)

    def _with_teacher(self, mine: P, teacher: Teacher, stats: TokenStats) -> TokenStats:
        """The statistics with those of a JSD, whose mixture needs both sides' sums over all columns: a sweep for the
        teacher's sums, and one over both heads."""
        axes = self.place.vocab
        rows = Problem(teacher.source, mine.targets, teacher.transform, mine.live, call=mine.call)
        sums = self.by_columns(cast(P, rows), lambda q: self.own.sums(q, None)[0], no_columns)
        other = finish(merge_sums(axes, sums, factor(teacher.transform)), True, teacher.transform)
        other = rounded_alike(stats, other)
        pair = self.by_columns(mine, lambda q: self.own.pair_sums(q, stats, other))
        pair = jax.tree.map(lambda x: lax.psum(x, axes), pair)
        return finish_pair(teacher.divergence, stats, other, pair, teacher.mix)

    def backward(self, p: Any, want: Any, out: TokenStats, g: StatCotangents, residual: PyTree, only_logp: bool) -> Any:
        """Gradients of a device's own columns; dH, complete."""
        mine = self.shard(p)
        if isinstance(p.policy, Given):
            return self.by_columns(mine, lambda q: self.own.backward(q, want, out, g, None, only_logp))
        hidden: Array | None = None
        if residual is not None and only_logp and want.hidden:  # already summed over all columns
            alone = dataclasses.replace(want, weight=False, bias=False, lora=False)
            hidden = self.own.backward(mine, alone, out, g, residual, True).hidden
            want = dataclasses.replace(want, hidden=False)
        rest = residual if only_logp else None  # a device's own part of it serves LoRA's inner factor
        found = self.by_columns(mine, lambda q: self.own.backward(q, want, out, g, rest, only_logp))
        if found.hidden is not None:
            hidden = lax.psum(found.hidden, self.place.vocab)
        return Gradients(None if hidden is None else hidden.astype(p.h.dtype), found.head)
