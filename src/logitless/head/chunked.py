"""The head in plain JAX, a chunk of live tokens at a time: never more than ``[chunk, V]`` logits.

Per chunk of C tokens (M = one ``C x H x V`` matmul, 2 C H V FLOP):

    statistics        x = h W^T (M)                                   reads W once per chunk
    grad in forward   x (M), dx in place of x, dh = dx W (M), dW += dx^T h (M)      three matmuls per active token
    by recompute      statistics first; later x again (M), dx, dh (M), dW (M)       four matmuls per token
    frozen head       the same without dW: two and three matmuls

Grad in forward serves objectives whose tokens are uncoupled: a chunk's cotangents follow from its own statistics by
differentiating the objective on the chunk. Both visit live tokens only, and only tokens whose cotangent can be
nonzero enter the backward matmuls. dW is summed in float32 over the chunks, or in the parameter's dtype if asked.

Bytes: beside inputs and outputs, one ``[C, V]`` buffer of logits (``logits_dtype``), one of dlogits (the operands'
dtype) where XLA cannot reuse the first, and the float32 accumulator of dW where the head's dtype is narrower.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from logitless.head.operator import (
    Head,
    HeadGrads,
    add_dhead,
    dhidden,
    in_parameter_dtypes,
    raw_logits,
    zero_grads,
)
from logitless.head.rows import RowPasses
from logitless.head.sweep import Sweep, Visit, live_sweep, split_sweep, sweep_over
from logitless.logits.chunked import blank_stats
from logitless.objectives.inputs import LossInputs
from logitless.objectives.loss import may_have_gradient
from logitless.objectives.objective import Objective
from logitless.stats import RowSums, StatCotangents, TokenStats, empty_sums
from logitless.transform import LogitTransform


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """Static choices of a sweep."""

    chunk: int
    logits_dtype: Any
    sum_head_grad_in: str  # "float32" or "param"
    rows: RowPasses
    rest_at_once: bool = False  # of the sweep for given cotangents: see sweep.Sweep
    partial_hidden: bool = False  # dH is a part of a sum over devices: leave it in float32
    partial_head: bool = False  # so are the head's gradients: leave them in the dtype they are summed in

    @property
    def vocab_size(self) -> int:
        return self.rows.vocab_size


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which gradients are asked for."""

    hidden: bool
    weight: bool
    bias: bool
    lora: bool

    @property
    def matmuls(self) -> int:
        """Matmuls of the backward pass, without those that make logits again."""
        return int(self.hidden) + int(self.weight or self.lora)


def chunk_transform(transform: LogitTransform, visit: Visit) -> LogitTransform:
    t = transform.temperature
    if t is None or jnp.ndim(t) == 0:
        return transform
    return dataclasses.replace(transform, temperature=visit.take(jnp.asarray(t)))


def chunk_inputs(inputs: LossInputs, visit: Visit, n: int) -> LossInputs:
    """The chunk's loss constants; the padding of the last chunk is masked out."""

    def take(leaf: Array) -> Array:
        return visit.take(leaf) if jnp.ndim(leaf) else jnp.asarray(leaf)

    part = jax.tree.map(take, inputs)
    return dataclasses.replace(part, mask=part.mask & visit.inside(n))


def chunk_hidden(visit: Visit, h: Array) -> Array:
    """The chunk's hidden states; zeros as the padding of the last chunk, since a dead token may hold NaN."""
    return jnp.where(visit.inside(h.shape[0])[:, None], visit.take(h), jnp.zeros((), h.dtype))


def sweep_stats(
    c: SweepConfig,
    sweep: Sweep,
    out: TokenStats,
    h: Array,
    head: Head,
    targets: Array,
    transform: LogitTransform,
) -> TokenStats:
    def body(visit: Visit, out: TokenStats) -> TokenStats:
        x = raw_logits(chunk_hidden(visit, h), head, c.logits_dtype)
        t, inside = chunk_transform(transform, visit), visit.inside(h.shape[0])
        return jax.tree.map(visit.put, out, c.rows.statistics(x, visit.take(targets), t, inside))

    return sweep.run(body, out)


def token_stats(
    c: SweepConfig, h: Array, head: Head, targets: Array, transform: LogitTransform, live: Array | None
) -> TokenStats:
    """Statistics of flattened tokens ``h [N, H]``: one matmul per live token."""
    n = h.shape[0]
    sweep = sweep_over(n, live, c.chunk)
    return sweep_stats(c, sweep, blank_stats(n), h, head, targets, transform)


def token_sums(
    c: SweepConfig, h: Array, head: Head, targets: Array, transform: LogitTransform, live: Array | None
) -> RowSums:
    """Sums over the head's columns, for a shard of the vocabulary: one matmul per live token."""
    n = h.shape[0]
    sweep = sweep_over(n, live, c.chunk)

    def body(visit: Visit, out: RowSums) -> RowSums:
        x = raw_logits(chunk_hidden(visit, h), head, c.logits_dtype)
        t = chunk_transform(transform, visit)
        return jax.tree.map(visit.put, out, c.rows.sums(x, visit.take(targets), t))

    return sweep.run(body, empty_sums((n,)))


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """Gradient buffers of a sweep and how a chunk is added to them."""

    config: SweepConfig
    wanted: Wanted

    def start(self, h: Array, head: Head) -> tuple[Array | None, HeadGrads]:
        w = self.wanted
        dtype = head.weight.dtype if self.config.sum_head_grad_in == "param" else jnp.float32
        hidden_dtype = jnp.float32 if self.config.partial_hidden else h.dtype
        dh = jnp.zeros(h.shape, hidden_dtype) if w.hidden else None
        return dh, zero_grads(head, w.weight, w.bias, w.lora, dtype)

    def finish(self, grads: HeadGrads, head: Head) -> HeadGrads:
        """The head's gradients in the dtypes they leave the sweep in."""
        return grads if self.config.partial_head else in_parameter_dtypes(grads, head)

    def add(
        self, visit: Visit, carry: tuple[Array | None, HeadGrads], dx: Array, h_chunk: Array, head: Head
    ) -> tuple[Array | None, HeadGrads]:
        dh, grads = carry
        if dh is not None:
            dh = visit.put(dh, dhidden(dx, head, self.config.rows.tile))
        return dh, add_dhead(grads, dx, h_chunk, head, self.config.rows.tile)


def stats_and_gradients(
    c: SweepConfig,
    wanted: Wanted,
    h: Array,
    head: Head,
    targets: Array,
    transform: LogitTransform,
    objective: Objective,
    inputs: LossInputs,
) -> tuple[TokenStats, Array | None, HeadGrads]:
    """Grad in forward: statistics, and the gradients of an uncoupled objective with a unit cotangent of the loss."""
    n = h.shape[0]
    gradient, rest = split_sweep(inputs.mask, may_have_gradient(objective, inputs), c.chunk)
    acc = Accumulator(c, wanted)

    def body(visit: Visit, carry: tuple[TokenStats, Any]) -> tuple[TokenStats, Any]:
        out, grads = carry
        h_chunk = chunk_hidden(visit, h)
        x = raw_logits(h_chunk, head, c.logits_dtype)
        own, t = chunk_inputs(inputs, visit, n), chunk_transform(transform, visit)
        stats, dx = c.rows.statistics_and_dx(x, visit.take(targets), t, objective, own, h.dtype)
        return jax.tree.map(visit.put, out, stats), acc.add(visit, grads, dx, h_chunk, head)

    stats, (dh, grads) = gradient.run(body, (blank_stats(n), acc.start(h, head)))
    stats = sweep_stats(c, rest, stats, h, head, targets, transform)
    return stats, dh, acc.finish(grads, head)


def stats_in_gradient_order(
    c: SweepConfig,
    h: Array,
    head: Head,
    targets: Array,
    transform: LogitTransform,
    objective: Objective,
    inputs: LossInputs,
) -> TokenStats:
    """The statistics of :func:`stats_and_gradients`, to the bit, without its gradients."""
    stats = blank_stats(h.shape[0])
    for sweep in split_sweep(inputs.mask, may_have_gradient(objective, inputs), c.chunk):
        stats = sweep_stats(c, sweep, stats, h, head, targets, transform)
    return stats


def gradients(
    c: SweepConfig,
    wanted: Wanted,
    h: Array,
    head: Head,
    targets: Array,
    transform: LogitTransform,
    live: Array | None,
    stats: TokenStats,
    g: StatCotangents,
) -> tuple[Array | None, HeadGrads]:
    """By recompute: gradients for given cotangents; tokens whose cotangents are all zero are not visited."""
    moving = g.any_nonzero() if live is None else g.any_nonzero() & live
    start = Accumulator(c, wanted).start(h, head)
    dh, grads = add_gradients(c, wanted, h, head, targets, transform, moving, stats, g, start)
    return dh, Accumulator(c, wanted).finish(grads, head)


def add_gradients(
    c: SweepConfig,
    wanted: Wanted,
    h: Array,
    head: Head,
    targets: Array,
    transform: LogitTransform,
    moving: Array,
    stats: TokenStats,
    g: StatCotangents,
    start: tuple[Array | None, HeadGrads],
) -> tuple[Array | None, HeadGrads]:
    """:func:`gradients` of the tokens ``moving [N]``: their rows of dH written into ``start``, the rest added to it."""
    n = h.shape[0]
    sweep = live_sweep(moving, c.chunk, c.rest_at_once)
    acc = Accumulator(c, wanted)

    def body(visit: Visit, carry: Any) -> Any:
        h_chunk = chunk_hidden(visit, h)
        x = raw_logits(h_chunk, head, c.logits_dtype)
        inside = visit.inside(n)
        g_chunk = jax.tree.map(lambda a: jnp.where(inside, visit.take(a), 0.0), g)
        s_chunk, t = jax.tree.map(visit.take, stats), chunk_transform(transform, visit)
        dx = c.rows.dx_from(x, visit.take(targets), t, s_chunk, g_chunk, h.dtype)
        return acc.add(visit, carry, dx, h_chunk, head)

    return sweep.run(body, start)
