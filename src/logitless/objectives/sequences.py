"""Sums over sequences, whether a sequence is a row or a packed segment of one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from logitless.pytree import register


@register
@dataclasses.dataclass(frozen=True)
class Sequences:
    """Which tokens belong together. ``mask`` is bool ``[B, T]``; ``index`` numbers the segments, or is ``None``."""

    mask: Array
    index: Array | None

    def total(self, x: Array) -> Array:
        """For every token, the sum of ``x [B, T]`` over the valid tokens of its own sequence (``[B, T]``)."""
        x = jnp.where(self.mask, x, 0.0)
        if self.index is None:
            return jnp.broadcast_to(jnp.sum(x, axis=1, keepdims=True), x.shape)
        flat = self.index.reshape(-1)
        sums = jax.ops.segment_sum(x.reshape(-1), flat, num_segments=flat.size)
        return sums[flat].reshape(x.shape)

    def lengths(self) -> Array:
        """``max(n_b, 1)`` for every token (float32 ``[B, T]``)."""
        return jnp.maximum(self.total(jnp.ones(self.mask.shape, jnp.float32)), 1.0)

    def mean(self, x: Array) -> Array:
        """For every token, the mean of ``x`` over the valid tokens of its own sequence."""
        return self.total(x) / self.lengths()

    def count(self, non_empty: bool = False) -> Array:
        """Number of sequences: rows, or packed segments that have at least one valid token (at least 1).

        ``non_empty``: of the rows, too, only those that have one.
        """
        if self.index is None:
            if not non_empty:
                return jnp.float32(self.mask.shape[0])
            return jnp.maximum(jnp.sum(jnp.any(self.mask, axis=1), dtype=jnp.float32), 1.0)
        share = jnp.where(self.mask, 1.0 / self.lengths(), 0.0)  # each segment's tokens add up to one
        return jnp.maximum(jnp.round(jnp.sum(share)), 1.0)


def sequences_of(mask: Array, segment_ids: Array | None) -> Sequences:
    """Group tokens by row, or by (row, segment id). Equal ids in one row are one segment, contiguous or not."""
    if segment_ids is None:
        return Sequences(mask, None)
    rows, width = segment_ids.shape
    order = jnp.argsort(segment_ids, axis=1, stable=True)
    ordered = jnp.take_along_axis(segment_ids, order, axis=1)
    starts = jnp.concatenate([jnp.zeros((rows, 1), bool), ordered[:, 1:] != ordered[:, :-1]], axis=1)
    rank = jnp.cumsum(starts, axis=1)
    index = jnp.zeros_like(rank).at[jnp.arange(rows)[:, None], order].set(rank)
    return Sequences(mask, index + width * jnp.arange(rows)[:, None])
