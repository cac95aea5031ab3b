"""From a user's arrays to a loss and its metrics, given statistics: what all loss calls share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from logitless import validation
from logitless.objectives.inputs import LossInputs, prepare
from logitless.objectives.loss import token_terms
from logitless.objectives.metrics import Metrics, loss_metrics
from logitless.objectives.objective import Objective
from logitless.stats import TokenStats


def statistics_temperature(objective: Objective) -> Any:
    """The temperature that divides the logits."""
    return None if objective.temperature_on == "logp" else objective.temperature


def loss_inputs(
    call: str,
    objective: Objective,
    shape: tuple[int, ...],
    mask: Any,
    advantages: Any,
    old_logp: Any,
    ref_logp: Any,
    rollout_logp: Any,
    segment_ids: Any,
    denominator: Any,
    entropy_denominator: Any,
    token_weights: Any = None,
) -> tuple[Objective, LossInputs]:
    """Check everything, and prepare the constants of the loss. All of them are constants: they carry no gradient."""
    # Whatever precision a number of the objective came in, the loss is float32.
    objective = jax.tree.map(lambda v: v if isinstance(v, float) else jnp.asarray(v, jnp.float32), objective)
    live = validation.mask_array(call, mask, shape)
    arrays = validation.loss_arrays(
        call,
        objective,
        shape,
        advantages=advantages,
        old_logp=old_logp,
        ref_logp=ref_logp,
        rollout_logp=rollout_logp,
        segment_ids=segment_ids,
        denominator=denominator,
        entropy_denominator=entropy_denominator,
        token_weights=token_weights,
    )
    if objective.temperature_on == "logp":
        validation.scalar_or_per_token(call, "objective.temperature", objective.temperature, shape)
    live = jnp.ones(shape, bool) if live is None else live
    beta = objective.beta
    if beta is None or ref_logp is not None:
        return objective, prepare(objective, live, **jax.lax.stop_gradient(arrays))
    # Without a reference beta is zero, or a traced number: if that turns out to be another one, the loss is NaN.
    objective = objective.replace(beta=None)
    inputs = prepare(objective, live, **jax.lax.stop_gradient(arrays))
    if not isinstance(beta, float):
        inputs = dataclasses.replace(inputs, weight=jnp.where(live & (beta != 0), jnp.nan, inputs.weight))
    return objective, inputs


def metrics_of(objective: Objective, stats: TokenStats, inputs: LossInputs) -> Metrics:
    """The metrics of a loss whose statistics are known."""
    return loss_metrics(objective, stats, inputs, token_terms(objective, stats.logp, stats.entropy, inputs))


def loss_of_stats(objective: Objective, stats: TokenStats, inputs: LossInputs) -> tuple[Array, Metrics]:
    """Loss and metrics, differentiable through the statistics."""
    terms = token_terms(objective, stats.logp, stats.entropy, inputs)
    return jnp.sum(terms.contribution), loss_metrics(objective, stats, inputs, terms)


def policy_loss(
    stats: TokenStats,
    *,
    advantages: Float[Array, "B"] | Float[Array, "B T"],
    mask: Array | None = None,
    old_logp: Float[Array, "B T"] | None = None,
    ref_logp: Float[Array, "B T"] | None = None,
    rollout_logp: Float[Array, "B T"] | None = None,
    token_weights: Float[Array, "B T"] | Float[Array, "B 1"] | Float[Array, "B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    objective: Objective = Objective(),  # noqa: B008  (frozen)
    denominator: Array | float | None = None,
    entropy_denominator: Array | float | None = None,
) -> tuple[Array, Metrics]:
    """The loss over statistics that are already there, for users who compute or combine them on their own.

    ``token_weights`` multiply each token's policy term, as a correction weight does (``vespo`` folds them in): an
    importance ratio that was computed before, per token, or ``[B]`` or ``[B, 1]`` for one a sequence.

    >>> import jax.numpy as jnp, logitless
    >>> stats = logitless.logprobs(jnp.zeros((1, 2, 4)), jnp.array([[0, 3]]))
    >>> loss, metrics = logitless.policy_loss(stats, advantages=jnp.array([2.0]))
    >>> float(loss)
    -2.0
    """
    name = "policy_loss"
    objective = validation.objective_of(name, objective)
    if not isinstance(stats, TokenStats):
        raise TypeError(f"{name}: stats is {type(stats).__name__}, expected TokenStats (from logprobs).")
    if jnp.ndim(stats.logp) != 2:
        raise ValueError(f"{name}: stats.logp has shape {jnp.shape(stats.logp)}, expected [B, T].")
    validation.not_empty(name, "stats.logp", stats.logp)
    for field in ("logp", "entropy"):
        validation.token_array(name, f"stats.{field}", getattr(stats, field), stats.logp.shape, "stats.logp")
    objective, inputs = loss_inputs(
        name, objective, stats.logp.shape, mask, advantages, old_logp, ref_logp, rollout_logp, segment_ids,
        denominator, entropy_denominator, token_weights,
    )  # fmt: skip
    return loss_of_stats(objective, stats, inputs)
