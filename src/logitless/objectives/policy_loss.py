"""The public loss over given statistics."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from logitless.core import validation
from logitless.core.promotion import own_promotion
from logitless.core.shapes import Float, Int
from logitless.core.stats import TokenStats
from logitless.objectives.inputs import loss_inputs, warn_unused
from logitless.objectives.loss import Metrics, loss_of_stats
from logitless.objectives.objective import Objective


@validation.named_arguments
@own_promotion
def policy_loss(
    stats: TokenStats,
    *,
    advantages: Float[Array, "B"] | Float[Array, "B 1"] | Float[Array, "B T"],
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

    ``stats`` need ``logp``; the entropy only where the objective reads it, the other fields never. Statistics must have
    the objective's temperature, as from ``logprobs(..., objective=objective)``.

    ``token_weights`` multiply each token's policy term, as a correction weight does (``vespo`` folds them in): an
    importance ratio that was computed before, per token, or ``[B]`` or ``[B, 1]`` for one a sequence.

    >>> import jax.numpy as jnp, logitless
    >>> stats = logitless.logprobs(jnp.zeros((1, 2, 4)), jnp.array([[0, 3]]))
    >>> loss, metrics = logitless.policy_loss(stats, advantages=jnp.array([2.0]))
    >>> float(loss)
    -2.0
    """
    name, given = "policy_loss", locals()
    objective = validation.objective_of(name, objective)
    warn_unused(name, objective, given)
    if not isinstance(stats, TokenStats):
        raise TypeError(f"{name}: stats is {type(stats).__name__}, expected TokenStats (from logprobs).")
    if jnp.ndim(stats.logp) != 2:
        raise ValueError(f"{name}: stats.logp has shape {jnp.shape(stats.logp)}, expected [B, T].")
    validation.not_empty(name, "stats.logp", stats.logp)
    reads_entropy = [k for k in ("entropy_coef", "top_entropy") if getattr(objective, k) is not None]
    if stats.entropy is None and reads_entropy:
        raise ValueError(f"{name}: objective.{reads_entropy[0]} reads the entropy, and stats.entropy is None; give it.")
    for field in ("logp", "entropy", "divergence"):
        if getattr(stats, field) is not None:
            validation.token_array(name, f"stats.{field}", getattr(stats, field), stats.logp.shape, "stats.logp")
    if stats.divergence is not None:
        given["divergence"] = "given"
    objective, inputs = loss_inputs(name, objective, stats.logp.shape, given)
    return loss_of_stats(objective, stats, inputs)
