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
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.backend import Backend
from logitless.mesh.collectives import own_targets, reduce_grads
from logitless.mesh.spec import Placement
from logitless.problem import Head, HeadGrads, Problem, Wanted

MOST_BYTES = 512 << 20
"""Of float32 dW on a device at a time."""


def count(own: Backend, place: Placement, p: Problem, want: Wanted) -> int:
    """In how many parts dW leaves a device; 1 where it is small, not summed in float32, or not made by one sweep over
    the vocabulary."""
    head, call = p.head, p.call
    padded = call.vocab_size < head.vocab * place.count(place.vocab)  # a part would not be a run of real columns
    summed = bool(place.token_axes) and call.sum_head_grad_in == "float32"
    if not getattr(own, "head_in_parts", False) or not want.weight or not summed or padded:
        return 1
    columns, parts = head.vocab // place.count(place.vocab_gathered), 1
    while 4 * head.weight.size // parts > MOST_BYTES and columns % (2 * parts) == 0:
        parts *= 2
    return parts


def reduced_grads(
    own: Backend, place: Placement, p: Problem, want: Wanted, known: tuple[Any, Any], parts: int, like: Head
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
        piece = Head(part(head.weight, axis, k), bias, layout=head.layout)
        q = dataclasses.replace(p, head=piece, targets=y).calling(vocab_size=shards * size)
        return reduce_grads(place, own.backward(q, alone, *known, None, False).head, like)

    def body(k: Array, total: HeadGrads) -> HeadGrads:
        at = HeadGrads(axis, 0)  # type: ignore[arg-type]
        return jax.tree.map(
            lambda a, b, d: None if a is None else lax.dynamic_update_slice_in_dim(a, b, k * size, d),
            total, reduced(k), at, is_leaf=lambda x: x is None,
        )  # fmt: skip

    like_part = jax.eval_shape(reduced, jnp.int32(0))
    start = HeadGrads(
        weight=jnp.zeros(_with_size(like_part.weight, axis, columns), like_part.weight.dtype),
        bias=None if like_part.bias is None else jnp.zeros((columns,), like_part.bias.dtype),
    )
    # Every device goes round as often: the collectives in this loop meet.
    return lax.fori_loop(0, parts, body, start)


def _with_size(x: Any, axis: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:axis], size, *x.shape[axis + 1 :])
