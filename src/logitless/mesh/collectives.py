"""What a device does with its own part inside ``shard_map``: gather a head, merge sums, reduce gradients.

    gather_head     FSDP: all-gather the head's arrays over the FSDP axes
    reduce_grads    reduce-scatter over the FSDP axes, all-reduce over all other token axes
    merge_sums      vocabulary-parallel: an all-reduce (max) of [N] and an all-reduce (sum) of [4, N]
    by_columns      vocabulary-parallel with padding: shards with fewer real columns than others, or none

No collective stands in a loop or in a branch: devices may have different numbers of live tokens, and of chunks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.core.problem import HeadArrays, HeadGrads
from logitless.core.stats import RowSums, rescale
from logitless.mesh.sharding import Kinds, Placement, each_array

T = TypeVar("T")


def gather_head(place: Placement, head: HeadArrays) -> HeadArrays:
    """The head, gathered over its FSDP axes; only the local part for a vocabulary-parallel head."""

    def whole(x: Array, kinds: Kinds) -> Array:
        for d, kind in enumerate(kinds):
            axes = place.gathered_over(kind)
            if axes:
                x = lax.all_gather(x, axes, axis=d, tiled=True)
        return x

    return dataclasses.replace(head, **each_array(whole, head.layout, head))


def reduce_grads(place: Placement, grads: HeadGrads, head: HeadArrays) -> HeadGrads:
    """A device's gradients of the gathered head, summed over devices in their own dtype, each device keeping its part
    of the head; then rounded to the parameters' dtypes."""

    def reduced(g: Array, like: Array, kinds: Kinds) -> Array:
        left = set(place.token_axes) if "v" in kinds else {*place.token_axes, *place.vocab}
        for d, kind in enumerate(kinds):
            axes = place.gathered_over(kind)
            if axes and left.issuperset(axes):
                g = lax.psum_scatter(g, axes, scatter_dimension=d, tiled=True)
                left.difference_update(axes)
                continue
            for axis in axes:
                if axis in left:
                    g = lax.psum_scatter(g, axis, scatter_dimension=d, tiled=True)
                    left.discard(axis)
                else:  # its devices have the same tokens, hence the same gradient
                    size = g.shape[d] // place.count((axis,))
                    g = lax.dynamic_slice_in_dim(g, lax.axis_index(axis) * size, size, axis=d)
        rest = tuple(a for a in (*place.token_axes, *place.vocab) if a in left)
        return (lax.psum(g, rest) if rest else g).astype(like.dtype)

    return HeadGrads(**each_array(reduced, head.layout, grads, head))


def merge_sums(axes: tuple[str, ...], sums: RowSums, k: Array | None) -> RowSums:
    """The sums over all shards' columns: :func:`logitless.core.stats.merge` over mesh axes."""
    m = lax.pmax(sums.maximum, axes)
    own = rescale(sums, m, k)
    total = lax.psum(jnp.stack([own.total, own.centred, own.squares, own.target]), axes)
    return RowSums(m, *total)


def own_targets(place: Placement, targets: Array, width: int) -> Array:
    """Targets as local columns in a shard of ``width`` columns; -1 for targets on other shards."""
    local = targets - lax.axis_index(place.vocab).astype(jnp.int32) * width
    return jnp.where((local >= 0) & (local < width), local, -1)


def by_columns(place: Placement, vocab_size: int, width: int, f: Callable[[int], T], empty: Callable[[T], T]) -> T:
    """``f(number of real columns on this device)``, where ``width`` columns are on each and padding is at the end.

    The number is static in ``f``: where devices differ in it, each takes its own branch of a conditional. ``empty``
    makes of a result that of a device without any real column.
    """
    counts = [min(max(vocab_size - k * width, 0), width) for k in range(place.count(place.vocab))]
    kinds = sorted(set(counts))
    if len(kinds) == 1:
        return f(kinds[0])
    # Without a column there is nothing to do, but Pallas' TPU interpreter waits for every device to start a kernel.
    # Elsewhere the compiler drops what is thrown away here.
    branches = [functools.partial(lambda k: f(k) if k else empty(f(1)), k) for k in kinds]
    index = jnp.asarray([kinds.index(k) for k in counts], jnp.int32)[lax.axis_index(place.vocab)]
    return lax.switch(index, branches)


def zeros(shapes: T) -> T:
    """Zeros in these shapes."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
