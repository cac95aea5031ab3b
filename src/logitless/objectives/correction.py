"""Train/rollout correction: importance weights and masks for samples that an inference engine drew.

With ``delta = old - rollout`` (0 where masked) the weight is ``exp(delta)`` per token, ``exp(sum delta)`` per sequence
or ``exp(mean delta)`` geometrically, then truncated to ``[min, max]`` or zeroed outside. ``geometric_mask`` weighs by
token, and zeroes sequences whose geometric weight lies outside. Nothing here carries a gradient.

A NaN in ``rollout`` is a value that the sampler did not give, and means "no correction for this token": its log weight
is 0, here and in the off-policy mask. Any other NaN stays NaN: comparisons are written to keep NaN.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core import validation
from logitless.core.promotion import own_promotion
from logitless.objectives.aggregate import Sequences
from logitless.objectives.objective import Objective
from logitless.objectives.policy_terms import clip

_VESPO_LOG_MIN = math.log(1e-8)
_VESPO_LOG_MAX = 20.0


def correction_weight(objective: Objective, old: Array, rollout: Array, sequences: Sequences) -> Array:
    """The train/rollout weight of every token."""
    delta = jax.lax.stop_gradient(jnp.where(sequences.mask & ~jnp.isnan(rollout), old - rollout, 0.0))
    of_token = jnp.exp(delta)
    if objective.correction == "sequence":
        delta = sequences.total(delta)
    elif objective.correction in ("geometric", "geometric_mask"):
        delta = sequences.mean(delta)
    weight = jnp.exp(delta)
    low, high = objective.correction_min, objective.correction_max
    if objective.correction_mode == "truncate":
        return clip(weight, low, high)
    inside = jnp.ones_like(weight, bool)
    if low is not None:
        inside &= ~(weight < low)
    if high is not None:
        inside &= ~(weight > high)
    return jnp.where(inside, of_token if objective.correction == "geometric_mask" else weight, 0.0)


def vespo_log_weight(weight: Array, sequences: Sequences, per_token: bool) -> Array:
    """VESPO folds the weight into its sequence ratio: the (clipped) sum of logs over valid tokens, or the one log of
    a weight that belongs to the sequence as a whole (``per_token=False``).

    TRL sums over all positions, masked or not; a masked position has weight one there unless one lies outside the
    bounds, and counts for nothing here.
    """
    logs = clip(jnp.log(weight), _VESPO_LOG_MIN, _VESPO_LOG_MAX)
    return sequences.total(logs) if per_token else logs


def off_policy_keep(
    objective: Objective, logp: Array, rollout: Array | None, old: Array | None, advantage: Array, sequences: Sequences
) -> Array:
    """Sequences that drifted too far with a negative advantage are dropped (``False``).

    The drift is from the policy that drew them: ``rollout``, or ``old`` where that is not given or not asked for.
    Without either the current policy drew them, and nothing is dropped.
    """
    sampler = old if rollout is None or objective.off_policy_from == "old" else rollout
    if sampler is None:
        return jnp.ones(logp.shape, bool)
    drift = sequences.mean(jnp.where(jnp.isnan(sampler), 0.0, sampler - jax.lax.stop_gradient(logp)))
    assert objective.off_policy_threshold is not None
    return (advantage >= 0) | ~(drift > objective.off_policy_threshold)


def sequences_agree(objective: Objective, logp: Array, rollout: Array, sequences: Sequences) -> Array:
    """Sequences whose mean ``exp(|logp - rollout|)`` is at most ``sequence_error_max``; a NaN keeps its sequence."""
    assert objective.sequence_error_max is not None
    apart = jnp.abs(jnp.where(jnp.isnan(rollout), 0.0, jax.lax.stop_gradient(logp) - rollout))
    return ~(sequences.mean(jnp.exp(apart)) > objective.sequence_error_max)


@own_promotion
def entropy_denominator(objective: Objective, mask: Array, entropy: Array | None = None) -> Array:
    """What ``entropy_denominator=`` has to be where a batch is split: the number of tokens that the entropy bonus acts
    on. Valid tokens; with ``top_entropy``, the valid tokens kept by ``entropy``.

    With ``top_entropy`` every part of a batch takes its own quantile, so the counts of the parts are added up.

    >>> import jax.numpy as jnp
    >>> from logitless import Objective, entropy_denominator
    >>> mask, entropy = jnp.array([[1, 1, 1, 1, 0]]), jnp.array([[0.1, 0.9, 0.5, 0.7, 9.0]])
    >>> float(entropy_denominator(Objective(entropy_coef=0.1), mask))
    4.0
    >>> float(entropy_denominator(Objective(entropy_coef=0.1, top_entropy=0.5), mask, entropy))
    2.0
    """
    live = validation.zero_or_one("entropy_denominator", mask, jnp.asarray(mask))
    if objective.top_entropy is not None:
        if entropy is None:
            raise ValueError(
                f"entropy_denominator: objective.top_entropy={objective.top_entropy} keeps tokens by their entropy; "
                "give it (statistics.entropy)."
            )
        live = top_entropy_keep(objective, jnp.where(live, jnp.asarray(entropy, jnp.float32), 0.0), live)
    return jnp.maximum(jnp.sum(live, dtype=jnp.float32), 1.0)


def top_entropy_keep(objective: Objective, entropy: Array, mask: Array) -> Array:
    """Tokens whose entropy is at or above the ``1 - top_entropy`` quantile of the valid ones.

    The quantile often is a token's own entropy, and a compiler may compute that twice with different roundings. So the
    comparison is made on the sorted values, where they were taken from, and its outcome sent back to the tokens.
    A live token whose entropy is NaN is kept; the quantile is that of the others.
    """
    assert objective.top_entropy is not None
    known = mask & ~jnp.isnan(entropy)
    flat = jnp.where(known, jax.lax.stop_gradient(entropy), jnp.inf).reshape(-1)
    ordered, origin = jax.lax.sort((flat, jnp.arange(flat.size)), num_keys=1)
    valid = jnp.sum(known)
    position = (1.0 - jnp.asarray(objective.top_entropy)) * jnp.maximum(valid - 1, 0)
    below = jnp.floor(position)
    low, high = (ordered[i.astype(jnp.int32)] for i in (below, jnp.ceil(position)))
    threshold = jnp.where(low < high, low + (position - below) * (high - low), low)  # exactly low between equals
    kept = (ordered >= threshold) & (jnp.arange(flat.size) < valid)
    return jnp.zeros(flat.shape, bool).at[origin].set(kept).reshape(mask.shape) | (mask & jnp.isnan(entropy))
