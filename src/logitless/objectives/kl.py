"""KL to the reference policy, per token, with ``d = ref - logp``.

k1 = -d      k2 = d^2 / 2      k3 = exp(d) - d - 1      k3+ = the value of k3 with the gradient of k2
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from logitless.objectives import ties
from logitless.objectives.objective import KLEstimator, Number


def kl_estimate(
    kind: KLEstimator, logp: Array, ref: Array, log_ratio_clamp: Number | None = None, clamp: Number | None = None
) -> Array:
    """The estimator's value per token; clamps pass the gradient at and inside their bounds."""
    d = ref - logp
    if log_ratio_clamp is not None:
        d = ties.clip(d, -jnp.asarray(log_ratio_clamp), log_ratio_clamp)
    if kind == "k1":
        kl = -d
    elif kind == "k2":
        kl = 0.5 * d * d
    else:
        kl = _k3(d)
        if kind == "k3+":
            k2 = 0.5 * d * d
            kl = k2 + jax.lax.stop_gradient(kl - k2)
    if clamp is not None:
        kl = ties.clip(kl, -jnp.asarray(clamp), clamp)
    return kl


def _k3(d: Array) -> Array:
    """``exp(d) - d - 1`` without cancellation: a series near 0, where training lives, and the formula elsewhere."""
    small = jnp.abs(d) < 0.5
    s = jnp.where(small, d, 0.0)
    # Up to d^9: the rest is below 0.5^8 / 10! = 1e-9 of the leading term.
    series = jnp.full_like(s, 1.0 / 362880)
    for factorial in (40320, 5040, 720, 120, 24, 6, 2):
        series = series * s + 1.0 / factorial
    return jnp.where(small, s * s * series, ties.exp(jnp.where(small, 0.0, d)) - d - 1.0)
