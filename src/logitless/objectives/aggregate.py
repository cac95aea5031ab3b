"""From token losses to one number: ``loss = sum_t weight_t * l_t`` with explicit denominators.

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

import jax.numpy as jnp
from jax import Array

from logitless.objectives.objective import Objective
from logitless.objectives.sequences import Sequences, sequences_of


def default_denominator(objective: Objective, sequences: Sequences) -> Array:
    """The denominator of a batch that stands alone."""
    if objective.aggregation in ("bnpo", "dapo"):
        return jnp.maximum(jnp.sum(sequences.mask, dtype=jnp.float32), 1.0)
    count = sequences.count(non_empty=objective.count_rows == "non_empty")
    if objective.aggregation == "dr_grpo":
        return count * jnp.asarray(objective.max_length, jnp.float32)
    return count


def loss_denominator(objective: Objective, mask: Array, segment_ids: Array | None = None) -> Array:
    """What ``denominator=`` has to be where a batch is split: the count of the whole batch's ``mask [B, T]``.

    >>> import jax.numpy as jnp
    >>> from logitless import Objective
    >>> from logitless.objectives.aggregate import loss_denominator
    >>> mask = jnp.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    >>> [float(loss_denominator(Objective(aggregation=a), mask)) for a in ("grpo", "bnpo")]
    [3.0, 3.0]
    >>> float(loss_denominator(Objective(count_rows="non_empty"), mask))
    2.0
    """
    return default_denominator(objective, sequences_of(jnp.asarray(mask) != 0, segment_ids))


def aggregation_weights(objective: Objective, sequences: Sequences, denominator: Array) -> Array:
    """Each token's factor in the loss, float32 ``[B, T]``, exactly 0 where masked."""
    share = 1.0 / denominator
    if objective.aggregation == "grpo":
        share = share / sequences.lengths()
    return jnp.where(sequences.mask, share, 0.0)


def dapo_denominator(
    total_tokens: Array | float,
    *,
    world_size: int = 1,
    accumulation: int = 1,
    steps_per_generation: int = 1,
) -> Array:
    """TRL's ``dapo`` denominator, ``max(N, 1) / world * accumulation / steps_per_generation``.

    Liger lacks the last factor: there, leave ``accumulation`` and ``steps_per_generation`` at one.

    >>> from logitless import dapo_denominator
    >>> float(dapo_denominator(4096, world_size=8, accumulation=2, steps_per_generation=4))
    256.0
    """
    tokens = jnp.maximum(jnp.asarray(total_tokens, jnp.float32), 1.0)
    return tokens / world_size * (accumulation / steps_per_generation)
