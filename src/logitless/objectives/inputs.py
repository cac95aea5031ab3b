"""The per-token constants of a loss: everything that does not depend on the current policy.

:func:`prepare` turns a user's arrays into :class:`LossInputs`, once per call, whatever the backend. After it, every
array is float32 ``[B, T]``, masked positions hold harmless values (so that a NaN or an inf there can reach nothing),
and what remains is arithmetic on the policy's statistics (``logitless.objectives.loss``).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from logitless.objectives.aggregate import default_denominator, token_weights
from logitless.objectives.correction import correction_weight, vespo_log_weight
from logitless.objectives.objective import Objective
from logitless.objectives.sequences import Sequences, sequences_of
from logitless.pytree import register


@register
@dataclasses.dataclass(frozen=True)
class LossInputs:
    """Per-token constants. The first group is elementwise, so it can be cut into chunks or tiles of tokens; the
    second is there only for objectives whose tokens are coupled (:meth:`Objective.coupling`)."""

    mask: Array  # bool
    advantage: Array
    weight: Array  # the token's share of the aggregated loss; 0 where masked
    old: Array | None  # None: on-policy, the current log-probability without gradient
    ref: Array | None
    correction: Array | None  # train/rollout importance weight; None where it needs the current policy, or is absent
    entropy_weight: Array | None  # mask / number of valid tokens
    logp_temperature: Array | float | None  # objective.temperature where it divides the log-probability

    rollout: Array | None = None
    sequences: Sequences | None = None
    vespo_log_weight: Array | None = None
    entropy_denominator: Array | None = None


def prepare(
    objective: Objective,
    mask: Array,
    advantages: Array,
    old_logp: Array | None,
    ref_logp: Array | None,
    rollout_logp: Array | None,
    segment_ids: Array | None,
    denominator: Array | float | None,
    entropy_denominator: Array | float | None,
) -> LossInputs:
    """Loss constants from checked user arrays; ``mask`` is bool ``[B, T]``."""
    sequences = sequences_of(mask, segment_ids)

    def clean(x: Array | None) -> Array | None:
        return None if x is None else jnp.where(mask, x.astype(jnp.float32), 0.0)

    if advantages.ndim == 1:
        advantages = jnp.broadcast_to(advantages[:, None], mask.shape)
    advantage = clean(advantages)
    assert advantage is not None
    old, ref, rollout = clean(old_logp), clean(ref_logp), clean(rollout_logp)

    if denominator is None:
        denominator = default_denominator(objective, sequences)
    weight = token_weights(objective, sequences, jnp.asarray(denominator, jnp.float32))

    correction = log_weight = None
    if objective.correction is not None and old is not None and rollout is not None:
        correction = correction_weight(objective, old, rollout, sequences)
        if objective.policy == "vespo":
            log_weight, correction = vespo_log_weight(objective, correction, sequences), None

    entropy_weight = None
    if objective.entropy_coef is not None and objective.top_entropy is None:
        valid = entropy_denominator
        if valid is None:
            valid = jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)
        entropy_weight = jnp.where(mask, 1.0 / jnp.asarray(valid, jnp.float32), 0.0)

    coupled = objective.coupling(old_known=old is not None) is not None
    on_logp = objective.temperature_on == "logp"
    return LossInputs(
        mask=mask,
        advantage=advantage,
        weight=weight,
        old=old,
        ref=ref,
        correction=correction,
        entropy_weight=entropy_weight,
        logp_temperature=objective.temperature if on_logp else None,
        rollout=rollout if coupled else None,
        sequences=sequences if coupled else None,
        vespo_log_weight=log_weight,
        entropy_denominator=None if entropy_denominator is None else jnp.asarray(entropy_denominator, jnp.float32),
    )
