"""Sequences, whether rows or packed segments of one, and from token losses to one number: ``loss = sum_t weight_t l_t``
with explicit denominators.

    grpo      mean over sequences of the mean over their tokens
    bnpo      sum / number of valid tokens here
    dapo      sum / number of valid tokens of the whole generation batch (given as ``denominator``)
    dr_grpo   sum / (number of sequences * max_length)
    luspo     mean over sequences of the sum over their tokens

The numerator's mask is the denominator's. Nothing is reduced over devices or micro-batches behind the caller's back:
``denominator`` replaces the local count (sequences for grpo and luspo, valid tokens for bnpo and dapo, sequences times
max_length for dr_grpo), so a caller who splits a batch passes the whole batch's count and adds up the parts
(:func:`loss_denominator` gives it). ``count_rows="non_empty"`` leaves rows without a valid token out of the count.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core import validation
from logitless.core.promotion import own_promotion
from logitless.core.pytree import register
from logitless.objectives.objective import Objective


@register
@dataclasses.dataclass(frozen=True)
class Sequences:
    """Which tokens belong together. ``mask`` is bool ``[B, T]``; ``index`` numbers the segments, or is ``None``."""

    mask: Array
    index: Array | None

    def total(self, x: Array) -> Array:
        """Sum of ``x [B, T]`` over the valid tokens of a token's sequence, for every token ``[B, T]``."""
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
        """Mean of ``x`` over the valid tokens of a token's sequence, for every token."""
        return self.total(x) / self.lengths()

    def count(self, non_empty: bool = False) -> Array:
        """Number of sequences: rows, or packed segments that have at least one valid token (at least 1).

        ``non_empty``: count only rows with a valid token.
        """
        if self.index is None:
            if not non_empty:
                return jnp.float32(self.mask.shape[0])
            return jnp.maximum(jnp.sum(jnp.any(self.mask, axis=1), dtype=jnp.float32), 1.0)
        share = jnp.where(self.mask, 1.0 / self.lengths(), 0.0)  # each segment's tokens add up to one
        return jnp.maximum(jnp.round(jnp.sum(share)), 1.0)


def sequences_of(mask: Array, segment_ids: Array | None) -> Sequences:
    """Group tokens by row, or by (row, segment id). Equal ids in a row form a single segment, contiguous or not."""
    if segment_ids is None:
        return Sequences(mask, None)
    rows, width = segment_ids.shape
    order = jnp.argsort(segment_ids, axis=1, stable=True)
    ordered = jnp.take_along_axis(segment_ids, order, axis=1)
    starts = jnp.concatenate([jnp.zeros((rows, 1), bool), ordered[:, 1:] != ordered[:, :-1]], axis=1)
    rank = jnp.cumsum(starts, axis=1)
    index = jnp.zeros_like(rank).at[jnp.arange(rows)[:, None], order].set(rank)
    return Sequences(mask, index + width * jnp.arange(rows)[:, None])


def default_denominator(objective: Objective, sequences: Sequences) -> Array:
    """The denominator for a batch on its own."""
    if objective.aggregation in ("bnpo", "dapo"):
        return jnp.maximum(jnp.sum(sequences.mask, dtype=jnp.float32), 1.0)
    count = sequences.count(non_empty=objective.count_rows == "non_empty")
    if objective.aggregation == "dr_grpo":
        return count * jnp.asarray(objective.max_length, jnp.float32)
    return count


@own_promotion
def loss_denominator(objective: Objective, mask: Array, segment_ids: Array | None = None) -> Array:
    """What ``denominator=`` has to be where a batch is split: the count of the whole batch's ``mask [B, T]``.

    >>> import jax.numpy as jnp
    >>> from logitless import Objective, loss_denominator
    >>> mask = jnp.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    >>> [float(loss_denominator(Objective(aggregation=a), mask)) for a in ("grpo", "bnpo")]
    [3.0, 3.0]
    >>> float(loss_denominator(Objective(count_rows="non_empty"), mask))
    2.0
    """
    live = validation.zero_or_one("loss_denominator", mask, jnp.asarray(mask))
    if segment_ids is not None:
        segment_ids = validation.segment_array("loss_denominator", segment_ids, live.shape)
    return default_denominator(objective, sequences_of(live, segment_ids))


def aggregation_weights(objective: Objective, sequences: Sequences, denominator: Array) -> Array:
    """Each token's factor in the loss, float32 ``[B, T]``, exactly 0 where masked."""
    share = 1.0 / denominator
    if objective.aggregation == "grpo":
        share = share / sequences.lengths()
    return jnp.where(sequences.mask, share, 0.0)


def dapo_denominator(
    total_tokens: Array | float, *, world_size: int = 1, accumulation: int = 1, steps_per_generation: int = 1
) -> Array:
    """TRL's ``dapo`` denominator, ``max(N, 1) / world * accumulation / steps_per_generation``.

    Liger lacks the last factor: there, leave ``accumulation`` and ``steps_per_generation`` at one.

    >>> from logitless import dapo_denominator
    >>> float(dapo_denominator(4096, world_size=8, accumulation=2, steps_per_generation=4))
    256.0
    """
    tokens = jnp.maximum(jnp.asarray(total_tokens, jnp.float32), 1.0)
    return tokens / world_size * (accumulation / steps_per_generation)
