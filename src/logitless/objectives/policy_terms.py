"""Per-token terms of a loss over the importance ratio ``c1 = exp(w)`` and the advantage ``A``, and the KL.

    clip       -min(c1 A, clip(c1, 1-eps_low, 1+eps_high) A)      with delta: c1 <- min(c1, delta) in the first term
               dual clip: where A < 0 at most -c A
    cispo      -sg(bounded c1) A logp
    sapo       -A sigmoid(tau (c1 - 1)) 4 / tau                   tau by the sign of A
    vespo      -sg(phi) A logp, phi = exp(lam + k s - lam exp(s)), s the clipped log-ratio of the sequence
    gmpo       -A exp(mean_t q), q = r clipped in log space
    reinforce  -A logp
    dppo       -sg(min(c1, delta)) A logp; 0 outside the trust region: p - p_old above eps_high where A > 0, below
               -eps_low elsewhere (tv); or the binary KL of p_old and p above either, on that side (kl)

    KL to the reference, d = ref - logp:
    k1 = -d      k2 = d^2 / 2      k3 = exp(d) - d - 1      k3+ = the value of k3 with the gradient of k2

Where ``A`` is zero the policy loss is zero, and so is its gradient, whatever the ratio. The log-ratio is clamped first
where the objective says so (``log_ratio_clamp``, ``sequence_log_ratio_max``).

Built from min, max, clip and exp with custom gradients. At a bound, and where two branches tie, the gradient passes in
full: with ``eps = 0`` on-policy every ratio sits exactly on both bounds, and ``jnp.minimum`` and ``jnp.clip`` would
halve its gradient. Where an infinite ratio meets a zero cotangent (the branch that was not taken) the product is zero,
not NaN. And a NaN on either side is the result: a bound never stands in for a number that is not known.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from logitless.objectives.aggregate import Sequences
from logitless.objectives.objective import KLEstimator, Number, Objective

if TYPE_CHECKING:
    from logitless.objectives.inputs import LossInputs  # which imports this module

# -- min, max, clip, exp -----------------------------------------------------------------------------------------------


def minimum(a: Array, b: Array) -> Array:
    """``min(a, b)``; the whole gradient goes to ``a`` where they tie."""
    return jnp.where((a <= b) | jnp.isnan(a), a, b)  # where b is NaN, neither holds


def maximum(a: Array, b: Array) -> Array:
    """``max(a, b)``; the whole gradient goes to ``a`` where they tie."""
    return jnp.where((a >= b) | jnp.isnan(a), a, b)


def clip(x: Array, low: Number | None, high: Number | None) -> Array:
    """``x`` clipped to ``[low, high]`` (``None``: no bound), with the gradient of ``x`` inside and at the bounds."""
    if high is not None:
        x = minimum(x, jnp.asarray(high, x.dtype))
    if low is not None:
        x = maximum(x, jnp.asarray(low, x.dtype))
    return x


@jax.custom_jvp
def exp(x: Array) -> Array:
    """``exp(x)``; a zero tangent stays zero where the value is infinite."""
    return jnp.exp(x)


@exp.defjvp
def _exp_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    y = jnp.exp(primals[0])
    # Linear in the tangent (hence transposable), with a factor that stays finite.
    return y, tangents[0] * jnp.where(jnp.isinf(y), jnp.finfo(y.dtype).max, y)


# -- the policy's term -------------------------------------------------------------------------------------------------


def log_ratio(objective: Objective, logp: Array, old: Array | None, sequences: Sequences | None) -> tuple[Array, Array]:
    """``(r, w)``: the token's log-ratio, and the one the objective uses (the sequence's for GSPO)."""
    frozen = jax.lax.stop_gradient(logp)
    r = logp - (frozen if old is None else old)
    if objective.log_ratio_clamp is not None:
        r = clip(r, -jnp.asarray(objective.log_ratio_clamp), objective.log_ratio_clamp)
    if objective.level == "token":
        return r, r
    assert sequences is not None
    w = sequences.mean(r)
    if objective.level == "sequence_token":
        w = (logp - frozen) + jax.lax.stop_gradient(w)
    return r, w if objective.sequence_log_ratio_max is None else clip(w, None, objective.sequence_log_ratio_max)


def clip_loss(o: Objective, w: Array, advantage: Array) -> Array:
    c1 = exp(w)
    c2 = clip(c1, 1.0 - jnp.asarray(o.eps_low), 1.0 + jnp.asarray(o.eps_high))
    if o.delta is not None:
        c1 = clip(c1, None, o.delta)
    loss = -minimum(c1 * advantage, c2 * advantage)
    if o.dual_clip is not None:
        loss = jnp.where(advantage < 0, minimum(loss, -o.dual_clip * advantage), loss)
    return loss


def cispo_weight(o: Objective, w: Array) -> Array:
    """The stop-gradient ratio of CISPO, bounded as TRL (raw) or veRL (interval) do."""
    c1 = jnp.exp(jax.lax.stop_gradient(w))
    if o.cispo_bound == "raw":
        return jnp.minimum(c1, o.eps_high)
    return jnp.clip(c1, 1.0 - jnp.asarray(o.eps_low), 1.0 + jnp.asarray(o.eps_high))


def vespo_weight(o: Objective, r: Array, advantage: Array, sequences: Sequences, log_correction: Array | None) -> Array:
    """``phi`` of VESPO, constant over a sequence except for the sign of the advantage."""
    total = sequences.total(jnp.clip(jax.lax.stop_gradient(r), -20.0, 20.0))
    if log_correction is not None:
        total = total + log_correction
    log_w = jnp.clip(total, math.log(1e-8), 20.0)
    k = jnp.where(advantage >= 0, o.vespo_k_pos, o.vespo_k_neg)
    lam = jnp.where(advantage >= 0, o.vespo_lambda_pos, o.vespo_lambda_neg)
    phi = jnp.exp(lam + k * log_w - lam * jnp.exp(log_w))
    return jnp.where(jnp.isinf(phi), 0.0, phi)


def outside_trust_region(o: Objective, logp: Array, old: Array | None, advantage: Array) -> Array:
    """Tokens that DPPO drops: the probability of the token itself has moved too far in the direction of ``A``."""
    logp = jax.lax.stop_gradient(logp)
    old = logp if old is None else old
    p, q = jnp.exp(logp), jnp.exp(old)
    up, high, low = advantage > 0, jnp.asarray(o.eps_high), jnp.asarray(o.eps_low)
    if o.policy == "dppo_tv":
        return jnp.where(up, p - q > high, p - q < -low)
    moved = jnp.where(q > 0, q * jnp.where(q > 0, old - logp, 0.0), 0.0)
    others_q, others_p = jnp.maximum(1.0 - q, 0.0), jnp.maximum(1.0 - p, 0.0)  # rounding may take p beyond one
    kl = moved + others_q * jnp.log((others_q + 1e-8) / (others_p + 1e-8))
    return jnp.where(up, (kl > high) & (p > q), (kl > low) & (p < q))


def dppo_loss(o: Objective, logp: Array, old: Array | None, w: Array, advantage: Array) -> Array:
    """``-sg(min(c1, delta)) A logp`` inside the trust region, and nothing outside."""
    weight = jnp.exp(jax.lax.stop_gradient(w))
    weight = weight if o.delta is None else jnp.where(weight > o.delta, o.delta, weight)
    # A select would drop a NaN: the token's own stays, whatever the region says.
    keep = ~outside_trust_region(o, logp, old, advantage) | jnp.isnan(weight)
    return jnp.where(keep, -weight * advantage * logp, 0.0)


def policy_term(o: Objective, logp: Array, r: Array, w: Array, x: LossInputs, phi: Array | None) -> Array:
    """The per-token policy loss, before masks, weights and KL; ``phi``: VESPO's weight."""
    advantage = x.advantage
    moves = advantage != 0
    # Without an advantage the ratio does not matter: keep an infinite one from making 0 * inf.
    safe_w = jnp.where(moves, w, 0.0)
    if o.policy == "clip":
        loss = clip_loss(o, safe_w, advantage)
    elif o.policy == "cispo":
        loss = -cispo_weight(o, safe_w) * advantage * logp
    elif o.policy in ("dppo_tv", "dppo_kl"):
        loss = dppo_loss(o, logp, x.old, safe_w, advantage)
    elif o.policy == "sapo":
        tau = jnp.where(advantage > 0, o.tau_pos, o.tau_neg)
        loss = -advantage * jax.nn.sigmoid(tau * (exp(safe_w) - 1.0)) * (4.0 / tau)
    elif o.policy == "vespo":
        assert phi is not None
        loss = -phi * advantage * logp
    elif o.policy == "gmpo":
        assert x.sequences is not None
        clipped = clip(r, -jnp.asarray(o.eps_low), o.eps_high)
        q = jnp.where(advantage > 0, minimum(r, clipped), maximum(r, clipped))
        loss = -advantage * exp(x.sequences.mean(q))
    else:
        loss = -advantage * logp
    return jnp.where(moves, loss, 0.0)


# -- KL to the reference -----------------------------------------------------------------------------------------------


def kl_estimate(
    kind: KLEstimator, logp: Array, ref: Array, log_ratio_clamp: Number | None = None, clamp: Number | None = None
) -> Array:
    """The estimator's value per token; clamps pass the gradient at and inside their bounds, and do not touch the
    gradient of ``k3+``, which is that of an unclamped k2 (veRL)."""
    raw = d = ref - logp
    if log_ratio_clamp is not None:
        d = clip(d, -jnp.asarray(log_ratio_clamp), log_ratio_clamp)
    if kind == "k1":
        kl = -d
    elif kind == "k2":
        kl = 0.5 * d * d
    else:
        kl = _k3(d)
    if clamp is not None:
        kl = clip(kl, -jnp.asarray(clamp), clamp)
    if kind == "k3+":
        k2 = 0.5 * raw * raw
        kl = jax.lax.stop_gradient(kl) + (k2 - jax.lax.stop_gradient(k2))
    return kl


def _k3(d: Array) -> Array:
    """``exp(d) - d - 1`` without cancellation: a series near 0, where training lives, and the formula elsewhere."""
    small = jnp.abs(d) < 0.5
    s = jnp.where(small, d, 0.0)
    # Up to d^9: the rest is below 0.5^8 / 10! = 1e-9 of the leading term.
    series = jnp.full_like(s, 1.0 / 362880)
    for factorial in (40320, 5040, 720, 120, 24, 6, 2):
        series = series * s + 1.0 / factorial
    return jnp.where(small, s * s * series, exp(jnp.where(small, 0.0, d)) - d - 1.0)
