"""dW of the TPU kernels over a mesh, a part of the vocabulary at a time.

The kernel rounds dW to the parameter's dtype as it writes it; a sum over devices needs it in float32, which is twice
the head beside the head and dW itself. So a large one leaves its device in parts: rows of dW depend on no other rows,
and each part is made, reduced, rounded and put into place before the next is made.

With FSDP over F devices on the vocabulary a part is a run of *every* device's own columns, so that the reduce-scatter
of a part gives each device what belongs to it:

    columns of the whole head   | device 0: part 0, part 1, ... | device 1: part 0, part 1, ... | ...
    part k of dW                | part k of 0 | part k of 1 | ...  -> reduce-scatter ->  part k of one's own columns

The numbers are those of the whole, to the bit.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.head.chunked import Wanted
from logitless.head.operator import Head, HeadGrads
from logitless.parallel.collectives import own_targets, reduce_grads
from logitless.stats import StatCotangents, TokenStats
from logitless.transform import LogitTransform

if TYPE_CHECKING:
    from logitless.parallel.head import ShardedHead

MOST_BYTES = 512 << 20
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

    def part(x: Array, axis: int, k: Array) -> Array:
        """Part ``k`` of every shard's columns."""
        apart = x.reshape(*x.shape[:axis], shards, own, *x.shape[axis + 1 :])
        taken = lax.dynamic_slice_in_dim(apart, k * size, size, axis=axis + 1)
        return taken.reshape(*x.shape[:axis], shards * size, *x.shape[axis + 1 :])

    call = dataclasses.replace(c.tpu_call(), vocab_size=shards * size)
    shard, column = targets // own, targets % own

    def reduced(k: Array) -> HeadGrads:
        y = jnp.where((targets >= 0) & (column // size == k), shard * size + column % size, -1)
        bias = None if head.bias is None else part(head.bias, 0, k)
        piece = Head(part(head.weight, axis, k), bias, layout=head.layout)
        _, dweight, dbias = pallas_tpu_vjp.gradients(
            call, (False, want.weight, want.bias), h, piece, y, t, live, out, g, None, c.weight_dtype
        )
        return reduce_grads(p, HeadGrads(dweight, dbias, None, None), like)

    def body(k: Array, total: HeadGrads) -> HeadGrads:
        at = HeadGrads(axis, 0, None, None)  # type: ignore[arg-type]
        return jax.tree.map(
            lambda a, b, d: None if a is None else lax.dynamic_update_slice_in_dim(a, b, k * size, d),
            total, reduced(k), at, is_leaf=lambda x: x is None,
        )  # fmt: skip

    like_part = jax.eval_shape(reduced, jnp.int32(0))
    start = HeadGrads(
        weight=jnp.zeros(_with_size(like_part.weight, axis, own), like_part.weight.dtype),
        bias=None if like_part.bias is None else jnp.zeros((own,), like_part.bias.dtype),
        lora_a=None,
        lora_b=None,
    )
    # Every device goes round as often: the collectives in this loop meet.
    return lax.fori_loop(0, parts, body, start)


def _with_size(x: Any, axis: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:axis], size, *x.shape[axis + 1 :])
