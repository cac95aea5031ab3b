"""dW of the TPU kernels over a mesh, a part of the vocabulary at a time.

The kernel rounds dW to the parameter's dtype as it writes it; a sum over devices needs it in float32, which is twice the
head beside the head and dW itself. So a large one leaves its device in parts: rows of dW depend on no other rows, and
each part is made, reduced and rounded before the next is made, while the wire may still be busy with it.

With FSDP over F devices on the vocabulary a part is a run of *every* device's own columns, so that the reduce-scatter of
a part gives each device what belongs to it:

    columns of the whole head   | device 0: part 0, part 1, ... | device 1: part 0, part 1, ... | ...
    part k of dW                | part k of 0 | part k of 1 | ...  -> reduce-scatter ->  part k of one's own columns

The numbers are those of the whole, to the bit.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array, lax

from logitless.head.chunked import Wanted
from logitless.head.operator import Head, HeadGrads
from logitless.parallel.collectives import own_targets, reduce_grads
from logitless.stats import StatCotangents, TokenStats
from logitless.transform import LogitTransform

if TYPE_CHECKING:
    from logitless.parallel.head import ShardedHead

MOST_BYTES = 1 << 30
"""Of float32 dW on a device at a time."""


def count(c: ShardedHead, head: Head, want: Wanted) -> int:
    """In how many parts dW leaves a device; 1 where it is small, not summed in float32, or not the TPU kernels'."""
    p = c.placement
    padded = c.call.sweep.vocab_size < head.vocab * p.count(p.vocab)  # a part would not be a run of real columns
    if c.backend != "pallas_tpu" or not want.weight or c.weight_dtype != jnp.float32 or padded:
        return 1
    own, parts = head.vocab // p.count(p.vocab_gathered), 1
    while 4 * head.weight.size // parts > MOST_BYTES and own % (2 * parts) == 0:
        parts *= 2
    return parts


def reduced_grads(
    c: ShardedHead,
    parts: int,
    want: Wanted,
    h: Array,
    head: Head,
    targets: Array,
    t: LogitTransform,
    live: Array | None,
    out: TokenStats,
    g: StatCotangents,
    like: Head,
) -> HeadGrads:
    """The gradients of weight and bias, reduced over devices; ``like`` is the head before it was gathered."""
    from logitless.head import pallas_tpu_vjp

    p, shards = c.placement, c.placement.count(c.placement.vocab_gathered)
    if p.vocab:
        targets = own_targets(p, targets, head.vocab)
    own = head.vocab // shards
    size = own // parts
    axis = 0 if head.layout == "vh" else 1

    def part(x: Array, axis: int, k: int) -> Array:
        """Part ``k`` of every shard's columns."""
        apart = x.reshape(*x.shape[:axis], shards, own, *x.shape[axis + 1 :])
        taken = lax.slice_in_dim(apart, k * size, (k + 1) * size, axis=axis + 1)
        return taken.reshape(*x.shape[:axis], shards * size, *x.shape[axis + 1 :])

    call = dataclasses.replace(c.tpu_call(), vocab_size=shards * size)
    shard, column = targets // own, targets % own
    found: list[HeadGrads] = []
    for k in range(parts):
        mine = (targets >= 0) & (column // size == k)
        y = jnp.where(mine, shard * size + column % size, -1)
        weight = part(head.weight, axis, k)
        if found:  # not before the part before it is done: that is the point
            weight, _ = lax.optimization_barrier((weight, found[-1]))
        piece = Head(weight, None if head.bias is None else part(head.bias, 0, k), layout=head.layout)
        _, dweight, dbias = pallas_tpu_vjp.gradients(
            call, (False, want.weight, want.bias), h, piece, y, t, live, out, g, None, c.weight_dtype
        )
        found.append(reduce_grads(p, HeadGrads(dweight, dbias, None, None), like))
    bias = jnp.concatenate([f.bias for f in found]) if want.bias else None  # type: ignore[misc]
    return HeadGrads(jnp.concatenate([f.weight for f in found], axis), bias, None, None)  # type: ignore[misc]
