"""Per-token policy losses over the importance ratio ``c1 = exp(w)`` and the advantage ``A``.

    clip       -min(c1 A, clip(c1, 1-eps_low, 1+eps_high) A)      with delta: c1 <- min(c1, delta) in the first term
               dual clip: where A < 0 at most -c A
    cispo      -sg(bounded c1) A logp
    sapo       -A sigmoid(tau (c1 - 1)) 4 / tau                   tau by the sign of A
    vespo      -sg(phi) A logp, phi = exp(lam + k s - lam exp(s)), s the clipped log-ratio of the sequence
    gmpo       -A exp(mean_t q), q = r clipped in log space
    reinforce  -A logp

Where ``A`` is zero the policy loss is zero, and so is its gradient, whatever the ratio. The log-ratio is clamped first
where the objective says so (``log_ratio_clamp``, ``sequence_log_ratio_max``).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from logitless.objectives import ties
from logitless.objectives.aggregate import Sequences
from logitless.objectives.objective import Objective


def log_ratio(objective: Objective, logp: Array, old: Array | None, sequences: Sequences | None) -> tuple[Array, Array]:
    """``(r, w)``: the token's log-ratio, and the one the objective uses (the sequence's for GSPO)."""
    frozen = jax.lax.stop_gradient(logp)
    r = logp - (frozen if old is None else old)
    if objective.log_ratio_clamp is not None:
        r = ties.clip(r, -jnp.asarray(objective.log_ratio_clamp), objective.log_ratio_clamp)
    if objective.level == "token":
        return r, r
    assert sequences is not None
    w = sequences.mean(r)
    if objective.level == "sequence_token":
        w = (logp - frozen) + jax.lax.stop_gradient(w)
    return r, w if objective.sequence_log_ratio_max is None else ties.clip(w, None, objective.sequence_log_ratio_max)


def clip_loss(o: Objective, w: Array, advantage: Array) -> Array:
    c1 = ties.exp(w)
    c2 = ties.clip(c1, 1.0 - jnp.asarray(o.eps_low), 1.0 + jnp.asarray(o.eps_high))
    if o.delta is not None:
        c1 = ties.clip(c1, None, o.delta)
    loss = -ties.minimum(c1 * advantage, c2 * advantage)
    if o.dual_clip is not None:
        loss = jnp.where(advantage < 0, ties.minimum(loss, -o.dual_clip * advantage), loss)
    return loss


def cispo_weight(o: Objective, w: Array) -> Array:
    """The stop-gradient ratio of CISPO, bounded as TRL (raw) or veRL (interval) do."""
    c1 = jnp.exp(jax.lax.stop_gradient(w))
    if o.cispo_bound == "raw":
        return jnp.minimum(c1, o.eps_high)
    return jnp.clip(c1, 1.0 - jnp.asarray(o.eps_low), 1.0 + jnp.asarray(o.eps_high))


def sapo_loss(o: Objective, w: Array, advantage: Array) -> Array:
    tau = jnp.where(advantage > 0, o.tau_pos, o.tau_neg)
    return -advantage * jax.nn.sigmoid(tau * (ties.exp(w) - 1.0)) * (4.0 / tau)


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


def gmpo_loss(o: Objective, r: Array, advantage: Array, sequences: Sequences) -> Array:
    clipped = ties.clip(r, -jnp.asarray(o.eps_low), o.eps_high)
    q = jnp.where(advantage > 0, ties.minimum(r, clipped), ties.maximum(r, clipped))
    return -advantage * ties.exp(sequences.mean(q))


def policy_term(
    o: Objective,
    logp: Array,
    r: Array,
    w: Array,
    advantage: Array,
    sequences: Sequences | None,
    log_correction: Array | None,
) -> Array:
    """The per-token policy loss, before masks, weights and KL."""
    moves = advantage != 0
    # Without an advantage the ratio does not matter: keep an infinite one from making 0 * inf.
    safe_w = jnp.where(moves, w, 0.0)
    if o.policy == "clip":
        loss = clip_loss(o, safe_w, advantage)
    elif o.policy == "cispo":
        loss = -cispo_weight(o, safe_w) * advantage * logp
    elif o.policy == "sapo":
        loss = sapo_loss(o, safe_w, advantage)
    elif o.policy == "vespo":
        assert sequences is not None
        loss = -vespo_weight(o, r, advantage, sequences, log_correction) * advantage * logp
    elif o.policy == "gmpo":
        assert sequences is not None
        loss = gmpo_loss(o, r, advantage, sequences)
    else:
        loss = -advantage * logp
    return jnp.where(moves, loss, 0.0)
