"""A vocabulary-parallel head: each device has a run of the vocabulary's columns, and neither they nor logits move.

    forward    sums over the device's own columns (``stats.RowSums``), merged over devices: five numbers a token
    backward   logits of its own columns again, dx from the *global* statistics; dH summed over devices, dW is its own

The direction ``d logp/d hidden`` of the TPU kernels is a sum over columns as well: each device scales its own part by
the global statistics, and the parts are summed in the forward pass instead of dH in the backward pass.

dH is summed over devices in float32: rounded parts would add up their roundings, and the target's part and the others'
may cancel.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.head import chunked
from logitless.head.chunked import SweepConfig, Wanted
from logitless.head.operator import Head, HeadGrads
from logitless.head.sweep import front
from logitless.logits.reference import masked_stats, valid_targets
from logitless.parallel.collectives import by_columns, merge_sums, own_targets, zeros
from logitless.stats import NEG_INF, RowSums, StatCotangents, TokenStats, finish
from logitless.transform import LogitTransform

if TYPE_CHECKING:
    from logitless.parallel.head import ShardedHead


def statistics(
    c: ShardedHead, h: Array, head: Head, targets: Array, t: LogitTransform, live: Array | None, direction: bool
) -> tuple[TokenStats, Array | None]:
    """Statistics of flat tokens over the vocabulary of all devices, and d logp/d hidden if asked for."""
    vocab_size = c.call.sweep.vocab_size
    own = own_targets(c.placement, targets, head.vocab)
    if c.backend == "pallas_tpu":
        return _tpu_statistics(c, h, head, targets, own, t, live, direction)

    def sums(columns: int) -> RowSums:
        return chunked.token_sums(with_columns(c.call.sweep, columns), h, head, own, t, live)

    local = by_columns(c.placement, vocab_size, head.vocab, sums, no_columns)
    return finished(c.placement.vocab, local, targets, vocab_size, live), None


def no_columns(shapes: RowSums) -> RowSums:
    """The sums over no columns at all."""
    return dataclasses.replace(zeros(shapes), maximum=jnp.full(shapes.maximum.shape, NEG_INF, jnp.float32))


def finished(axes: tuple[str, ...], local: RowSums, targets: Array, vocab_size: int, live: Array | None) -> TokenStats:
    """Statistics from each device's own sums; a barrier keeps their bits the same with and without a gradient."""
    stats = finish(merge_sums(axes, local), valid_targets(targets, vocab_size))
    return lax.optimization_barrier(masked_stats(stats, live))


def with_columns(sweep: SweepConfig, columns: int) -> SweepConfig:
    return dataclasses.replace(sweep, rows=dataclasses.replace(sweep.rows, vocab_size=columns))


def _tpu_statistics(
    c: ShardedHead,
    h: Array,
    head: Head,
    targets: Array,
    own: Array,
    t: LogitTransform,
    live: Array | None,
    direction: bool,
) -> tuple[TokenStats, Array | None]:
    from logitless.head import pallas_tpu

    p, call = c.placement, c.tpu_call()
    f = front(live)
    args = (f.take(h), head.weight, f.take(own))

    def options(columns: int) -> dict[str, Any]:
        return dataclasses.replace(call, vocab_size=columns).options(head, f.transform(t), f.count)

    def sums(columns: int) -> tuple[RowSums, Array, Array | None]:
        return pallas_tpu.token_sums(*args, **options(columns), direction=direction)

    def none(shapes: Any) -> Any:
        return no_columns(shapes[0]), *zeros(shapes[1:])

    local, x_y, expected = by_columns(p, call.vocab_size, head.vocab, sums, none)
    alive = None if live is None else f.take(live)
    stats = finished(p.vocab, local, f.take(targets), call.vocab_size, alive)
    d = None
    if direction:
        d = pallas_tpu.token_direction(
            *args[1:], stats, local, x_y, expected, layout=head.layout, transform=f.transform(t), n_live=f.count,
            interpret=call.interpret, here=args[2] >= 0,
        )  # fmt: skip
        d = f.put_back(lax.psum(d, p.vocab))
    return jax.tree.map(f.put_back, stats), d


def gradients(
    c: ShardedHead,
    want: Wanted,
    h: Array,
    head: Head,
    targets: Array,
    t: LogitTransform,
    live: Array | None,
    out: TokenStats,
    g: StatCotangents,
    direction: Array | None,
) -> tuple[Array | None, HeadGrads]:
    """dH, summed over devices, and the gradients of a device's own columns."""
    p, sweep = c.placement, c.call.sweep
    own = own_targets(p, targets, head.vocab)
    dh = None
    if direction is not None and want.hidden:  # it is that of all columns already
        live_g = g.logp if live is None else jnp.where(live, g.logp, 0.0)
        dh = jnp.where((live_g != 0)[:, None], live_g[:, None] * direction, 0.0)
        want = dataclasses.replace(want, hidden=False)

    def local(columns: int) -> tuple[Array | None, HeadGrads]:
        if c.backend != "pallas_tpu":
            partial = dataclasses.replace(with_columns(sweep, columns), partial_hidden=True, partial_head=True)
            return chunked.gradients(partial, want, h, head, own, t, live, out, g)
        from logitless.head import pallas_tpu_vjp

        call = dataclasses.replace(c.tpu_call(), vocab_size=columns)
        wants = (want.hidden, want.weight, want.bias)
        dh, dweight, dbias = pallas_tpu_vjp.gradients(call, wants, h, head, own, t, live, out, g, None, c.weight_dtype)
        return dh, HeadGrads(dweight, dbias, None, None)

    partial, grads = by_columns(p, sweep.vocab_size, head.vocab, local, zeros)
    if partial is not None:
        dh = lax.psum(partial, p.vocab)
    return None if dh is None else dh.astype(h.dtype), grads
