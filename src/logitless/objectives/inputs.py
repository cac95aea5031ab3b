"""The per-token constants of a loss: everything that does not depend on the current policy.

:func:`prepare` turns a user's arrays into :class:`LossInputs`, once per call, whatever the backend. After it, every
array is float32 ``[B, T]``, masked positions hold harmless values (so that a NaN or an inf there can reach nothing),
and what remains is arithmetic on the policy's statistics (``logitless.objectives.loss``). A NaN at a live position is
kept in the token's ``weight``, so that no mask, bound or zero can hide it from the loss.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core import validation
from logitless.core.pytree import register, static
from logitless.core.validation import LossArrays
from logitless.objectives.aggregate import Sequences, aggregation_weights, default_denominator, sequences_of
from logitless.objectives.correction import correction_weight, vespo_log_weight
from logitless.objectives.objective import Objective


@register
@dataclasses.dataclass(frozen=True)
class Counted:
    """What the metrics count by."""

    sequences: Sequences
    denominator: Array  # of the aggregation, as given or counted
    own_denominator: Array  # the batch's count: 0 if nothing is counted
    rollout_missing: Array | None  # number of live tokens without a rollout log-probability
    one_advantage: bool = static(False)  # [B]: a row's tokens share it


@register
@dataclasses.dataclass(frozen=True)
class LossInputs:
    """Per-token constants. The first group is elementwise, so it can be cut into chunks or tiles of tokens; the
    second is there only for objectives whose tokens are coupled (:meth:`Objective.coupling`)."""

    mask: Array  # bool
    advantage: Array
    weight: Array  # the token's share of the aggregated loss; 0 where masked, NaN where an input of the token is
    old: Array | None  # None: on-policy, the current log-probability without gradient
    ref: Array | None
    correction: Array | None  # train/rollout importance weight times the given token weights, as far as both are known
    entropy_weight: Array | None  # mask / number of valid tokens
    logp_temperature: Array | None = None  # divisor for a sweep's log-probabilities, which are not divided yet

    rollout: Array | None = None
    sequences: Sequences | None = None
    vespo_log_weight: Array | None = None
    entropy_denominator: Array | None = None
    denominator: Array | None = None  # as given, where the loss counts for itself what it keeps

    counted: Counted | None = None  # what only the metrics read

    def for_sweep(self) -> LossInputs:
        """Without what only the metrics read."""
        return dataclasses.replace(self, counted=None)


def prepare(objective: Objective, mask: Array, arrays: LossArrays) -> LossInputs:
    """Loss constants from checked user arrays; ``mask`` is bool ``[B, T]``. All are constants: no gradient flows."""
    given = jax.lax.stop_gradient(arrays)
    sequences = sequences_of(mask, given.segment_ids)

    def clean(x: Array | None) -> Array | None:
        return None if x is None else jnp.where(mask, x.astype(jnp.float32), 0.0)

    advantage = clean(_per_token(given.advantages, mask.shape))
    assert advantage is not None
    old, ref, rollout = clean(given.old_logp), clean(given.ref_logp), clean(given.rollout_logp)
    weights = None if given.token_weights is None else clean(_per_token(given.token_weights, mask.shape))

    own = default_denominator(objective, sequences)
    total = own if given.denominator is None else jnp.asarray(given.denominator, jnp.float32)
    weight = aggregation_weights(objective, sequences, total)
    for x in (advantage, old, weights, None if objective.beta is None else ref):
        if x is not None:
            weight = jnp.where(jnp.isnan(x), jnp.nan, weight)

    correction = log_weight = None
    if objective.correction is not None and old is not None and rollout is not None:
        correction = correction_weight(objective, old, rollout, sequences)
    if objective.policy == "vespo":
        log_weight, correction = (
            _vespo_log_weights(objective, correction, weights, given.token_weights, sequences),
            None,
        )
    elif weights is not None:
        correction = weights if correction is None else correction * weights

    entropy_weight, valid = None, given.entropy_denominator
    entropy_denominator = None if valid is None else jnp.asarray(valid, jnp.float32)
    if objective.entropy_coef is not None and objective.top_entropy is None:
        if valid is None:
            valid = jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)
        entropy_weight = jnp.where(mask, 1.0 / jnp.asarray(valid, jnp.float32), 0.0)

    coupled = objective.coupling(old_known=old is not None) is not None
    over_rows = objective.aggregation in ("grpo", "dr_grpo", "luspo") and sequences.index is None
    counts_empty = over_rows and objective.count_rows == "all"  # rows without a token, by the aggregation
    return LossInputs(
        mask=mask,
        advantage=advantage,
        weight=weight,
        old=old,
        ref=ref,
        correction=correction,
        entropy_weight=entropy_weight,
        rollout=rollout if coupled else None,
        sequences=sequences if coupled else None,
        vespo_log_weight=log_weight,
        entropy_denominator=entropy_denominator,
        denominator=total if objective.sequence_error_max is not None and given.denominator is not None else None,
        counted=Counted(
            sequences=sequences,
            denominator=total,
            own_denominator=own if counts_empty else jnp.where(jnp.any(mask), own, 0.0),
            rollout_missing=None if rollout is None else jnp.sum(jnp.isnan(rollout), dtype=jnp.float32),
            one_advantage=given.advantages.ndim == 1,
        ),
    )


def only_kept(objective: Objective, x: LossInputs, keep: Array) -> LossInputs:
    """Without the sequences where ``keep [B, T]`` is false: their tokens weigh nothing, and nothing counts them. The
    mask stays, since a NaN of theirs is one of the loss."""
    assert x.sequences is not None
    sequences = dataclasses.replace(x.sequences, mask=x.mask & keep)
    total = default_denominator(objective, sequences) if x.denominator is None else x.denominator
    weight = jnp.where(jnp.isnan(x.weight), jnp.nan, aggregation_weights(objective, sequences, total))
    entropy_weight = x.entropy_weight
    if entropy_weight is not None:
        count = x.entropy_denominator
        if count is None:
            count = jnp.maximum(jnp.sum(sequences.mask, dtype=jnp.float32), 1.0)
        entropy_weight = jnp.where(sequences.mask, 1.0 / count, 0.0)
    return dataclasses.replace(x, weight=weight, entropy_weight=entropy_weight)


def _per_token(x: Array, shape: tuple[int, ...]) -> Array:
    """``[B]``, ``[B, 1]`` or ``[B, T]`` as ``[B, T]``."""
    return jnp.broadcast_to(x[:, None] if x.ndim == 1 else x, shape)


def _vespo_log_weights(
    objective: Objective, correction: Array | None, given: Array | None, as_given: Array | None, sequences: Sequences
) -> Array | None:
    """Both weights as VESPO takes them in; one number a row (``[B]``, ``[B, 1]``) is the weight of the sequence."""
    logs = []
    if correction is not None:
        logs.append(vespo_log_weight(correction, sequences, per_token=objective.correction != "sequence"))
    if given is not None:
        assert as_given is not None
        logs.append(vespo_log_weight(given, sequences, per_token=as_given.shape == sequences.mask.shape))
    return sum(logs[1:], logs[0]) if logs else None


class UnusedArgumentWarning(UserWarning):
    """An array of a loss call changes neither the loss nor its gradient, since the objective does not read it."""


def _reads_old(o: Objective) -> bool:
    weighs = o.correction is not None or o.off_policy_threshold is not None
    return o.policy != "reinforce" or weighs or (o.beta is not None and o.kl_bias_correction)


def _reads_ref_logp(o: Objective) -> bool:
    return o.beta is not None and o.kl != "full"


def _reads_rollout(o: Objective) -> bool:
    drift = o.off_policy_threshold is not None and o.off_policy_from == "rollout"
    return o.correction is not None or drift or o.sequence_error_max is not None


def _reads_sequences(o: Objective) -> bool:
    of_policy = o.level != "token" or o.policy in ("vespo", "gmpo")
    drops = o.off_policy_threshold is not None or o.sequence_error_max is not None
    return of_policy or drops or o.aggregation not in ("bnpo", "dapo") or o.correction not in (None, "token")


_NO_KL = (
    "without a KL term from log-probabilities only the metrics kl_k1 and kl_k3 read it. Set Objective(beta=...), where "
    "0.0 only measures"
)
READ_WHEN: dict[str, tuple[Callable[[Objective], bool], str]] = {
    "old_logp": (_reads_old, "policy='reinforce' has no ratio. Set another policy, such as Objective(policy='clip')"),
    "ref_logp": (_reads_ref_logp, _NO_KL),
    "ref_hidden": (lambda o: o.beta is not None, _NO_KL),
    "rollout_logp": (_reads_rollout, "there is no train/rollout correction. Set Objective(correction='token')"),
    "segment_ids": (
        _reads_sequences,
        "every token counts alike, whatever its sequence. Set a field that is of sequences, such as "
        "Objective(level='sequence')",
    ),
    "entropy_denominator": (
        lambda o: o.entropy_coef is not None,
        "there is no entropy bonus. Set Objective(entropy_coef=...)",
    ),
}
"""Arrays of a loss call that some objectives ignore: condition for use, and message otherwise."""


def warn_unused(call: str, objective: Objective, given: Mapping[str, object]) -> None:
    """Warn by name of arrays in ``given`` that change neither the loss nor its gradient, at the line of the call.

    Calls from inside this package do not warn.
    """
    unused = [k for k, (read, _) in READ_WHEN.items() if given.get(k) is not None and not read(objective)]
    level = _callers_level() if unused else None
    if level is None:
        return
    for name in unused:
        why = READ_WHEN[name][1]
        warnings.warn(
            f"{call}: {name} changes neither the loss nor its gradient: {why}, or leave {name} out.",
            UnusedArgumentWarning,
            stacklevel=level,
        )


_ENTRIES = {
    f"logitless.{m}"
    for m in (
        "api",
        "core.loss_stats",
        "core.promotion",
        "core.validation",
        "objectives.policy_loss",
        "objectives.inputs",
    )
}
"""Modules of this package between a user's call and :func:`warn_unused`."""


def _callers_level() -> int | None:
    """For :func:`warn_unused`, the ``stacklevel`` of the line with the public call; ``None`` inside this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        if module not in _ENTRIES and package != "jax":
            return None if package == "logitless" else level
        level, frame = level + 1, frame.f_back
    return level


def statistics_temperature(objective: Objective) -> Array | float | None:
    """The temperature that divides the logits."""
    return None if objective.temperature_on == "logp" else objective.temperature


def logp_temperature(call: str, objective: Objective, shape: tuple[int, ...], live: Array | None) -> Array | None:
    """The temperature that divides the log-probabilities, checked; 1 for tokens that are not live."""
    if objective.temperature_on == "logits" or objective.temperature is None:
        return None
    given = validation.scalar_or_per_token(call, "objective.temperature", objective.temperature, shape)
    temperature = jnp.asarray(given, jnp.float32)
    return temperature if live is None or temperature.ndim == 0 else jnp.where(live, temperature, 1.0)


def divided(logp: Array, temperature: Array | float | None) -> Array:
    """``logp / temperature``, with the same bits in every program: an on-policy ratio is exactly 1.

    A product with the reciprocal, which is what XLA makes of a division by a constant anyway. The select keeps a
    compiler from contracting the product with the difference that follows.
    """
    if temperature is None:
        return logp
    product = logp * (1.0 / jnp.asarray(temperature, jnp.float32))
    return jnp.where(jnp.isnan(logp), logp, product)


def loss_inputs(
    call: str, objective: Objective, shape: tuple[int, ...], given: Mapping[str, object]
) -> tuple[Objective, LossInputs]:
    """Check the mask and the arrays of a loss call, by their names among ``given``, and prepare the constants of the
    loss."""
    # Whatever precision a number of the objective came in, the loss is float32.
    objective = jax.tree.map(lambda v: v if isinstance(v, float) else jnp.asarray(v, jnp.float32), objective)
    live = validation.mask_array(call, given.get("mask"), shape)
    arrays = validation.loss_arrays(call, objective, shape, given)
    live = jnp.ones(shape, bool) if live is None else live
    beta = objective.beta
    if beta is None or arrays.ref_logp is not None or objective.kl == "full":
        return objective, prepare(objective, live, arrays)
    # Without a reference beta is zero, or a traced number: if that turns out to be another one, the loss is NaN.
    objective = objective.replace(beta=None)
    inputs = prepare(objective, live, arrays)
    if not isinstance(beta, float):
        inputs = dataclasses.replace(inputs, weight=jnp.where(live & (beta != 0), jnp.nan, inputs.weight))
    return objective, inputs
