"""The loss over per-token statistics: written once, used by every backend.

    l_t  = policy term (policy_terms.py), times the off-policy mask, the top-entropy mask and the correction weight
    l_t += beta * KL_t
    loss = sum_t weight_t l_t - entropy_coef * sum_t k_t entropy_t / max(sum k, 1)

A live token whose statistics are NaN makes the loss NaN, and its own gradient, whatever would have dropped the token.

:func:`contributions` gives the terms of that sum per token. For an uncoupled objective it is elementwise, so a backend
may call it on any chunk of tokens, and take the cotangents of that chunk's statistics with ``jax.vjp``.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core.pytree import register
from logitless.objectives.correction import correction_weight, off_policy_keep, top_entropy_keep, vespo_log_weight
from logitless.objectives.inputs import LossInputs, divided
from logitless.objectives.objective import Objective
from logitless.objectives.policy_terms import exp, kl_estimate, log_ratio, policy_term, vespo_weight


@register
@dataclasses.dataclass(frozen=True)
class TokenTerms:
    """Per-token pieces of a loss, for the sum and for the metrics."""

    contribution: Array
    policy: Array  # the contribution without the entropy bonus
    kl: Array | None  # as it is in the loss, before beta
    vespo_phi: Array | None
    log_ratio: Array  # w, at the objective's level
    keep: Array | None  # tokens that the off-policy and top-entropy masks kept
    high_entropy: Array | None  # of them, the top-entropy mask
    correction: Array | None


def token_terms(
    o: Objective, logp: Array, entropy: Array, x: LossInputs, divergence: Array | None = None
) -> TokenTerms:
    """Every token's part of the loss; masked tokens contribute exactly 0, with zero gradient."""
    logp = jnp.where(x.mask, logp, 0.0)
    entropy = jnp.where(x.mask, entropy, 0.0)
    logp = divided(logp, x.logp_temperature)
    r, w = log_ratio(o, logp, x.old, x.sequences)

    correction, log_correction = x.correction, x.vespo_log_weight
    if o.correction is not None and x.old is None:  # on-policy: the weight needs the current log-probability
        assert x.rollout is not None and x.sequences is not None
        own = correction_weight(o, jax.lax.stop_gradient(logp), x.rollout, x.sequences)
        if o.policy == "vespo":
            own = vespo_log_weight(own, x.sequences, per_token=o.correction != "sequence")
            log_correction = own if log_correction is None else log_correction + own
        else:
            correction = own if correction is None else correction * own

    phi = None
    if o.policy == "vespo":
        assert x.sequences is not None
        phi = vespo_weight(o, r, x.advantage, x.sequences, log_correction)
    loss = policy_term(o, logp, r, w, x, phi)
    keep: Array | None = None
    if o.off_policy_threshold is not None:
        assert x.sequences is not None
        keep = off_policy_keep(o, logp, x.rollout, x.old, x.advantage, x.sequences)
    high_entropy = None
    if o.top_entropy is not None:
        high_entropy = top_entropy_keep(o, entropy, x.mask)
        keep = high_entropy if keep is None else keep & high_entropy
    if keep is not None:
        loss = jnp.where(keep, loss, 0.0)
    if correction is not None:
        # A weight of zero drops the token, even one whose loss is infinite.
        loss = jnp.where(correction != 0, loss, 0.0) * correction
    kl = None
    if o.beta is not None and o.kl == "full":
        assert divergence is not None
        kl = jnp.where(x.mask, divergence, 0.0)
        loss = loss + o.beta * kl
    elif o.beta is not None:
        assert x.ref is not None
        kl = kl_estimate(o.kl, logp, x.ref, o.kl_log_ratio_clamp, o.kl_clamp)
        kl = kl * exp(w) if o.kl_bias_correction else kl
        loss = loss + o.beta * kl

    policy = contribution = jnp.where(x.mask, x.weight * loss, 0.0)
    if o.entropy_coef is not None:
        contribution = contribution - o.entropy_coef * _entropy_weight(x, high_entropy) * entropy
    unknown = jnp.isnan(logp)
    if o.entropy_coef is not None or o.top_entropy is not None:
        unknown |= jnp.isnan(entropy)
    # A product and not NaN itself, so that the gradient of the token is NaN as well.
    contribution = contribution + jnp.where(unknown, jnp.nan, 0.0) * jnp.where(unknown, logp, 0.0)
    return TokenTerms(contribution, policy, kl, phi, w, keep, high_entropy, correction)


def _entropy_weight(x: LossInputs, high_entropy: Array | None) -> Array:
    if high_entropy is None:
        assert x.entropy_weight is not None
        return x.entropy_weight
    count = x.entropy_denominator
    if count is None:
        count = jnp.maximum(jnp.sum(high_entropy, dtype=jnp.float32), 1.0)
    return jnp.where(high_entropy, 1.0 / count, 0.0)


def contributions(o: Objective, logp: Array, entropy: Array, x: LossInputs, divergence: Array | None = None) -> Array:
    """Every token's term of the loss; its sum is the loss."""
    return token_terms(o, logp, entropy, x, divergence).contribution


def cotangents(
    o: Objective, logp: Array, entropy: Array, x: LossInputs, divergence: Array | None = None
) -> tuple[Array, Array, Array | None]:
    """``d loss / d (logp, entropy, divergence)`` per token, by differentiating :func:`contributions`."""
    value, pull = jax.vjp(lambda lp, h, d: contributions(o, lp, h, x, d), logp, entropy, divergence)
    return pull(jnp.ones_like(value))


def may_have_gradient(o: Objective, x: LossInputs) -> Array:
    """Tokens whose cotangents can be nonzero, as far as it is known before their statistics are.

    Without a KL or entropy term a token moves only if its advantage is nonzero: whole groups of equal rewards do not.
    """
    if o.beta is not None or o.entropy_coef is not None:
        return x.mask
    moving = x.mask & (x.advantage != 0)
    return moving if x.correction is None else moving & (x.correction != 0)
