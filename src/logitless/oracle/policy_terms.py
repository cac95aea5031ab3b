"""One token's policy loss and KL, each with its derivatives, on plain floats.

``w`` is the token's log importance ratio at the objective's level and ``c1 = exp(w)``; how ``w`` depends on the
log-probabilities of the sequence is the caller's business (:mod:`logitless.oracle.losses`), so a term answers with
its derivatives by ``w`` and by the token's own ``logp`` separately.

At every bound, and where the two sides of a ``min`` are equal, the derivative of the unclipped side is taken in full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from logitless.objectives.objective import Objective

LOG_WEIGHT_MIN = float(np.log(1e-8))
LOG_WEIGHT_MAX = 20.0


class Term(NamedTuple):
    """A value with its partial derivatives by the log ratio ``w`` and by the token's own ``logp``."""

    value: float
    d_ratio: float = 0.0
    d_logp: float = 0.0


def number(value: object) -> float:
    """An objective's number (float, NumPy or jax scalar) as a float."""
    return float(np.asarray(value))


def number_or_none(value: object) -> float | None:
    """The same for a number whose absence means something."""
    return None if value is None else number(value)


def exp(x: float) -> float:
    """``e^x``; overflow gives infinity instead of an exception."""
    with np.errstate(over="ignore"):
        return float(np.exp(x))


def clamp(x: float, low: float | None, high: float | None) -> float:
    """``x`` within ``[low, high]``; ``None`` is no bound, NaN stays NaN."""
    if low is not None and x < low:
        return low
    if high is not None and x > high:
        return high
    return x


def within(x: float, low: float | None, high: float | None) -> float:
    """The derivative of :func:`clamp`: 1 at and inside the bounds, 0 outside."""
    return float((low is None or x >= low) and (high is None or x <= high))


def clip_term(w: float, advantage: float, o: Objective) -> Term:
    """``c2 = clip(c1, 1-eps_low, 1+eps_high)``, then ``c1 <- min(c1, delta)``; ``l = -min(c1 A, c2 A)``.

    Dual clip: where ``A < 0``, ``l <- min(l, -c A)``. With ``dc1/dw = c1``, the derivative is ``-A c1`` unless the
    selected side is clipped.
    """
    ratio = exp(w)
    low, high, delta = 1.0 - number(o.eps_low), 1.0 + number(o.eps_high), number_or_none(o.delta)
    capped, clipped = clamp(ratio, None, delta), clamp(ratio, low, high)
    if capped * advantage <= clipped * advantage:
        value, passes = -capped * advantage, within(ratio, None, delta)
    else:
        value, passes = -clipped * advantage, within(ratio, low, high)
    d_ratio = -advantage * ratio if passes else 0.0
    dual = number_or_none(o.dual_clip)
    if dual is not None and advantage < 0 and value > -dual * advantage:
        return Term(-dual * advantage)
    return Term(value, d_ratio)


def cispo_term(w: float, logp: float, advantage: float, o: Objective) -> Term:
    """``l = -stop_gradient(coef) A logp``; ``coef = min(c1, eps_high)``, or ``c1`` within the interval."""
    ratio, eps_low, eps_high = exp(w), number(o.eps_low), number(o.eps_high)
    if o.cispo_bound == "raw":
        coef = clamp(ratio, None, eps_high)
    else:
        coef = clamp(ratio, 1.0 - eps_low, 1.0 + eps_high)
    return Term(-coef * advantage * logp, d_logp=-coef * advantage)


def dppo_term(w: float, logp: float, old: float, advantage: float, o: Objective) -> Term:
    """``l = -stop_gradient(min(c1, delta)) A logp``; nothing where the token's probability ``p`` has left the trust
    region around the old one ``q``: ``p - q``, or ``KL(Bernoulli(q) || Bernoulli(p))`` as veRL has it, with 1e-8."""
    p, q = exp(logp), exp(old)
    bound = number(o.eps_high) if advantage > 0 else number(o.eps_low)
    away = p - q if advantage > 0 else q - p
    if o.policy == "dppo_kl":
        rest_p, rest_q = max(1.0 - p, 0.0), max(1.0 - q, 0.0)
        kl = (q * (old - logp) if q > 0 else 0.0) + rest_q * float(np.log((rest_q + 1e-8) / (rest_p + 1e-8)))
        outside = kl > bound and away > 0
    else:
        outside = away > bound
    if outside:
        return Term(0.0)
    weight = clamp(exp(w), None, number_or_none(o.delta))
    return Term(-weight * advantage * logp, d_logp=-weight * advantage)


def sapo_term(w: float, advantage: float, o: Objective) -> Term:
    """``l = -A sigmoid(tau (c1 - 1)) 4 / tau``; ``dl/dw = -4 A sigmoid (1 - sigmoid) c1``."""
    ratio = exp(w)
    tau = number(o.tau_pos) if advantage > 0 else number(o.tau_neg)
    gate = 1.0 / (1.0 + exp(-tau * (ratio - 1.0)))
    rest = 1.0 / (1.0 + exp(tau * (ratio - 1.0)))  # 1 - gate without cancellation
    # An overflowing ratio has a gate of exactly 1, whose slope is 0: not 0 * inf.
    slope = 0.0 if rest == 0.0 else gate * rest * ratio
    return Term(-advantage * gate * 4.0 / tau, d_ratio=-4.0 * advantage * slope)


def vespo_term(log_weight: float, logp: float, advantage: float, o: Objective) -> Term:
    """``l = -stop_gradient(phi) A logp``, ``phi = exp(lam + k logw - lam exp(logw))`` with ``logw`` of the sequence."""
    if advantage >= 0:
        k, lam = number(o.vespo_k_pos), number(o.vespo_lambda_pos)
    else:
        k, lam = number(o.vespo_k_neg), number(o.vespo_lambda_neg)
    phi = exp(lam + k * log_weight - lam * exp(log_weight))
    if phi == np.inf:
        phi = 0.0
    return Term(-phi * advantage * logp, d_logp=-phi * advantage)


def gmpo_log_ratio(r: float, advantage: float, o: Objective) -> tuple[float, float]:
    """``q = min(r, c) if A > 0 else max(r, c)`` with ``c = clip(r, -eps_low, eps_high)``; returns ``q, dq/dr``.

    So ``r`` is bounded on one side only: above for ``A > 0``, below otherwise.
    """
    low = None if advantage > 0 else -number(o.eps_low)
    high = number(o.eps_high) if advantage > 0 else None
    return clamp(r, low, high), within(r, low, high)


def gmpo_term(mean_q: float, advantage: float) -> Term:
    """``l = -A exp(mean q)``; ``d_ratio`` is the derivative by ``mean q``."""
    value = -advantage * exp(mean_q)
    return Term(value, d_ratio=value)


def reinforce_term(logp: float, advantage: float) -> Term:
    """``l = -A logp``."""
    return Term(-advantage * logp, d_logp=-advantage)


def kl_term(w: float, logp: float, ref: float, o: Objective) -> Term:
    """The KL estimator of ``d = ref - logp``, times ``c1`` with the bias correction.

        k1 = -d            dk1/dd = -1
        k2 = d^2 / 2       dk2/dd = d
        k3 = e^d - d - 1   dk3/dd = e^d - 1
        k3+                the value of k3, the derivative of k2

    First ``d`` is clamped, then the estimator; a clamp passes no derivative outside its bounds, but leaves that of k3+
    alone: it is ``d`` before any clamp. ``dd/dlogp = -1``.
    """
    bound, cap = number_or_none(o.kl_log_ratio_clamp), number_or_none(o.kl_clamp)
    raw = ref - logp
    d = raw if bound is None else clamp(raw, -bound, bound)
    inside = 1.0 if bound is None else within(raw, -bound, bound)
    with np.errstate(over="ignore", invalid="ignore"):
        expm1 = float(np.expm1(d))
    value, slope = {
        "k1": (-d, -1.0),
        "k2": (0.5 * d * d, d),
        "k3": (expm1 - d, expm1),
        "k3+": (expm1 - d, raw),
    }[o.kl]
    if cap is not None:
        inside *= within(value, -cap, cap)
        value = clamp(value, -cap, cap)
    d_logp = -slope if inside or o.kl == "k3+" else 0.0
    if not o.kl_bias_correction:
        return Term(value, d_logp=d_logp)
    ratio = exp(w)
    return Term(ratio * value, d_ratio=ratio * value, d_logp=ratio * d_logp)
