"""The policy loss over ``[B, T]`` statistics and its gradient, sequence by sequence and token by token.

A sequence is a row, or with ``segment_ids`` all the tokens of a row that carry the same id. Only valid tokens are ever
read, so nothing at a masked position can matter. For a sequence with ``n`` valid tokens:

    r_t = logp_t - old_t                    old = stop_gradient(logp) when none is given; within +-log_ratio_clamp
    w_t = r_t                               level "token"
    w_t = sum_s r_s / n                     level "sequence", derivative 1/n by every token's logp
    w_t = sum_s r_s / n                     level "sequence_token", derivative 1 by the token's own logp
    L   = sum_t (weight_t l_t + beta KL_t)  l and KL: logitless.oracle.policy_terms

where ``weight`` is the product of off-policy mask, top-entropy mask, importance weight and given token weight, all
constants. The loss is the sum over sequences of ``factor * L`` (aggregation) minus the entropy bonus.

One NaN among the numbers of a valid token, and the loss is NaN. The exception is ``rollout``: a NaN there is a value
that nobody has, and counts as ``rollout = old`` in the importance weight and as ``rollout = logp`` in the mask.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from logitless.oracle import policy_terms as terms
from logitless.oracle.policy_terms import (
    LOG_WEIGHT_MAX,
    LOG_WEIGHT_MIN,
    Term,
    clamp,
    exp,
    number,
    number_or_none,
    within,
)
from logitless.oracle.token_stats import Bools, Floats, to_float64

if TYPE_CHECKING:
    from logitless.objectives.objective import Objective

Position = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class _Sequence:
    """The valid tokens of one sequence, as plain floats in order."""

    logp: list[float]
    old: list[float]
    given_old: list[float] | None  # None: on-policy
    ref: list[float] | None
    rollout: list[float] | None
    advantages: list[float]
    kept_by_entropy: list[bool]
    token_weights: list[float] | None
    one_weight: bool  # the token weights are one number of the whole sequence


def _sequences(valid: Bools, segment_ids: ArrayLike | None) -> list[list[Position]]:
    """Positions of the valid tokens of each sequence: every row, or every segment that has a valid token."""
    if segment_ids is None:
        return [[(b, t) for t in range(valid.shape[1]) if valid[b, t]] for b in range(valid.shape[0])]
    ids = np.asarray(segment_ids)
    segments: dict[tuple[int, int], list[Position]] = {}
    for b, t in np.argwhere(valid).tolist():
        segments.setdefault((b, int(ids[b, t])), []).append((b, t))
    return list(segments.values())


def _agreeing(valid: Bools, segment_ids: ArrayLike | None, logp: Floats, rollout: Floats | None, o: Objective) -> Bools:
    """Valid tokens of sequences whose mean ``exp(|logp - rollout|)`` is at most ``sequence_error_max``."""
    most = number_or_none(o.sequence_error_max)
    if most is None:
        return valid
    if rollout is None:
        raise ValueError("sequence_error_max needs rollout_logp.")
    kept = valid.copy()
    for positions in _sequences(valid, segment_ids):
        errors = [1.0 if np.isnan(rollout[p]) else exp(abs(logp[p] - rollout[p])) for p in positions]
        if positions and sum(errors) / len(positions) > most:
            for p in positions:
                kept[p] = False
    return kept


def _correction_weights(s: _Sequence, o: Objective) -> list[float]:
    """Train/rollout weights: ``exp`` of ``old - rollout`` per token, summed, or averaged; truncated or masked.
    ``geometric_mask`` keeps the tokens' own weights where the average lies inside the bounds."""
    if o.correction is None:
        return [1.0] * len(s.logp)
    if s.rollout is None:
        raise ValueError(f"correction={o.correction!r} needs rollout_logp.")
    deltas = [0.0 if np.isnan(rollout) else old - rollout for old, rollout in zip(s.old, s.rollout, strict=True)]
    own = [exp(delta) for delta in deltas]
    if o.correction == "sequence":
        deltas = [sum(deltas)] * len(deltas)
    elif o.correction in ("geometric", "geometric_mask"):
        deltas = [sum(deltas) / len(deltas)] * len(deltas)
    low, high = number_or_none(o.correction_min), number_or_none(o.correction_max)
    weights = []
    for delta, of_token in zip(deltas, own, strict=True):
        weight = exp(delta)
        bounded = clamp(weight, low, high)
        outside = bounded < weight or bounded > weight
        kept = of_token if o.correction == "geometric_mask" else bounded
        weights.append(0.0 if o.correction_mode == "mask" and outside else kept)
    return weights


def _kept_off_policy(s: _Sequence, o: Objective) -> list[bool]:
    """Keep where ``A >= 0`` or ``mean_t (rollout - stop_gradient(logp)) <= threshold``.

    ``old`` stands for a ``rollout`` that is not there (or not asked for); on-policy there is no drift to judge.
    """
    threshold = number_or_none(o.off_policy_threshold)
    behaviour = s.rollout if s.rollout is not None and o.off_policy_from == "rollout" else s.given_old
    if threshold is None or behaviour is None:
        return [True] * len(s.logp)
    drift = sum(0.0 if np.isnan(b) else b - logp for b, logp in zip(behaviour, s.logp, strict=True)) / len(s.logp)
    return [advantage >= 0 or drift <= threshold for advantage in s.advantages]


def _vespo_log_weight(s: _Sequence, ratios: list[float], correction: list[float], o: Objective) -> float:
    """``clip(sum_t clip(r_t, -20, 20) + log IS, log 1e-8, 20)``; ``log IS`` is a sum over tokens or one term."""
    total = sum(clamp(r, -LOG_WEIGHT_MAX, LOG_WEIGHT_MAX) for r in ratios)
    folded_in = [] if o.correction is None else [(correction, o.correction == "sequence")]
    if s.token_weights is not None:
        folded_in.append((s.token_weights, s.one_weight))
    for weights, one_weight in folded_in:
        with np.errstate(divide="ignore"):
            logs = [clamp(float(np.log(weight)), LOG_WEIGHT_MIN, LOG_WEIGHT_MAX) for weight in weights]
        total += logs[0] if one_weight else sum(logs)
    return clamp(total, LOG_WEIGHT_MIN, LOG_WEIGHT_MAX)


def _sequence_loss(s: _Sequence, o: Objective) -> tuple[float, list[float]]:
    """``sum_t (weight_t l_t + beta KL_t)`` for a sequence, and the gradient by each token's logp."""
    n = len(s.logp)
    bound, most = number_or_none(o.log_ratio_clamp), number_or_none(o.sequence_log_ratio_max)
    unbounded = [logp - old for logp, old in zip(s.logp, s.old, strict=True)]
    ratios = unbounded if bound is None else [clamp(r, -bound, bound) for r in unbounded]
    moves = [1.0 if bound is None else within(r, -bound, bound) for r in unbounded]  # dr/dlogp
    log_ratios = ratios
    if o.level != "token":
        mean = sum(ratios) / n
        log_ratios = [clamp(mean, None, most)] * n
    correction = _correction_weights(s, o)
    kept_off_policy = _kept_off_policy(s, o)
    vespo_log_weight = _vespo_log_weight(s, ratios, correction, o) if o.policy == "vespo" else 0.0
    gmpo_logs = [terms.gmpo_log_ratio(r, a, o) for r, a in zip(ratios, s.advantages, strict=True)]
    gmpo_mean = sum(q for q, _ in gmpo_logs) / n

    def policy_term(t: int) -> Term:
        w, logp, advantage = log_ratios[t], s.logp[t], s.advantages[t]
        if advantage == 0:
            return Term(0.0)  # also where the ratio is infinite
        if o.policy == "clip":
            return terms.clip_term(w, advantage, o)
        if o.policy == "cispo":
            return terms.cispo_term(w, logp, advantage, o)
        if o.policy in ("dppo_tv", "dppo_kl"):
            return terms.dppo_term(w, logp, s.old[t], advantage, o)
        if o.policy == "sapo":
            return terms.sapo_term(w, advantage, o)
        if o.policy == "vespo":
            return terms.vespo_term(vespo_log_weight, logp, advantage, o)
        if o.policy == "gmpo":
            return terms.gmpo_term(gmpo_mean, advantage)
        return terms.reinforce_term(logp, advantage)

    total = 0.0
    d_logp = [0.0] * n
    d_log_ratio = [0.0] * n
    d_gmpo_mean = 0.0
    for t in range(n):
        weight = float(kept_off_policy[t] and s.kept_by_entropy[t])
        if o.policy != "vespo":  # which has the importance weight inside
            weight *= correction[t] * (1.0 if s.token_weights is None else s.token_weights[t])
        if weight != 0:  # a dropped token is dropped even where its loss is infinite
            term = policy_term(t)
            total += weight * term.value
            d_logp[t] += weight * term.d_logp
            if o.policy == "gmpo":
                d_gmpo_mean += weight * term.d_ratio
            else:
                d_log_ratio[t] += weight * term.d_ratio
        if o.beta is not None:
            if s.ref is None:
                raise ValueError("beta needs ref_logp.")
            beta, kl = number(o.beta), terms.kl_term(log_ratios[t], s.logp[t], s.ref[t], o)
            total += beta * kl.value
            d_logp[t] += beta * kl.d_logp
            d_log_ratio[t] += beta * kl.d_ratio

    for t in range(n):
        if o.level == "token":
            d_logp[t] += d_log_ratio[t] * moves[t]
        elif within(mean, None, most):
            d_logp[t] += sum(d_log_ratio) / n * moves[t] if o.level == "sequence" else d_log_ratio[t]
        d_logp[t] += d_gmpo_mean * gmpo_logs[t][1] * moves[t] / n
    return total, d_logp


def _factor(o: Objective, tokens: int, num_sequences: int, num_tokens: int, denominator: float | None) -> float:
    """What multiplies the summed loss of a sequence with this many valid ``tokens``.

    The batch's own counts are at least 1; a given denominator is used as it is.
    """
    if denominator is None:
        if o.aggregation in ("bnpo", "dapo"):
            denominator = max(num_tokens, 1.0)
        else:
            denominator = max(num_sequences, 1) * (number(o.max_length) if o.aggregation == "dr_grpo" else 1.0)
    per_sequence = tokens if o.aggregation == "grpo" else 1
    return 1.0 / (per_sequence * denominator)


def policy_loss_grad(
    logp: ArrayLike,
    entropy: ArrayLike | None,
    *,
    objective: Objective,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    old_logp: ArrayLike | None = None,
    ref_logp: ArrayLike | None = None,
    rollout_logp: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    denominator: ArrayLike | None = None,
    entropy_denominator: ArrayLike | None = None,
    token_weights: ArrayLike | None = None,
) -> tuple[float, Floats, Floats]:
    """``(loss, dloss/dlogp, dloss/dentropy)`` of ``[B, T]`` statistics.

    ``advantages`` are ``[B]`` or ``[B, T]`` (``[B, T]`` with ``segment_ids``). ``entropy`` may be ``None`` where the
    objective does not use it. ``denominator`` replaces the aggregation's own, ``entropy_denominator`` the bonus's.
    ``token_weights`` are ``[B, T]``, or ``[B]`` or ``[B, 1]`` for one number a sequence.
    """
    o, lp = objective, to_float64(logp)
    valid = np.ones(lp.shape, dtype=bool) if mask is None else np.broadcast_to(np.asarray(mask) != 0, lp.shape)
    adv = to_float64(advantages)
    if adv.ndim == 1 and segment_ids is not None:
        raise ValueError("advantages [B] have no meaning for packed rows; give [B, T] with segment_ids.")
    adv = np.broadcast_to(adv[:, None] if adv.ndim == 1 else adv, lp.shape)
    if entropy is None and (o.top_entropy is not None or o.entropy_coef is not None):
        raise ValueError("top_entropy and entropy_coef need entropy.")
    ent = np.zeros(lp.shape) if entropy is None else to_float64(entropy)

    old = lp if old_logp is None else to_float64(old_logp)
    ref = None if ref_logp is None else to_float64(ref_logp)
    rollout = None if rollout_logp is None else to_float64(rollout_logp)
    given = None if token_weights is None else to_float64(token_weights)
    one_weight = given is not None and given.size < lp.size
    if given is not None:
        given = np.broadcast_to(given[:, None] if given.ndim == 1 else given, lp.shape)

    unknown = np.isnan(lp) | np.isnan(adv) | np.isnan(old)
    if o.top_entropy is not None or o.entropy_coef is not None:
        unknown |= np.isnan(ent)
    if o.beta is not None and ref is not None:
        unknown |= np.isnan(ref)
    if given is not None:
        unknown |= np.isnan(given)
    unknown &= valid
    valid = _agreeing(valid, segment_ids, lp, rollout, o)

    kept_by_entropy = valid.copy()
    if o.top_entropy is not None and valid.any():
        threshold = np.quantile(ent[valid], 1.0 - number(o.top_entropy))
        kept_by_entropy &= ent >= threshold

    sequences = _sequences(valid, segment_ids)
    counted = [s for s in sequences if s or o.count_rows == "all"]
    loss, dlogp, dentropy = 0.0, np.zeros(lp.shape), np.zeros(lp.shape)
    for positions in sequences:
        if not positions:
            continue

        def gather(array: Floats, at: list[Position] = positions) -> list[float]:
            return [float(array[p]) for p in at]

        sequence_loss, gradient = _sequence_loss(
            _Sequence(
                logp=gather(lp),
                old=gather(old),
                given_old=None if old_logp is None else gather(old),
                ref=None if ref is None else gather(ref),
                rollout=None if rollout is None else gather(rollout),
                advantages=gather(adv),
                kept_by_entropy=[bool(kept_by_entropy[p]) for p in positions],
                token_weights=None if given is None else gather(given),
                one_weight=one_weight,
            ),
            o,
        )
        factor = _factor(o, len(positions), len(counted), int(valid.sum()), number_or_none(denominator))
        loss += factor * sequence_loss
        for position, g in zip(positions, gradient, strict=True):
            dlogp[position] = factor * g

    if o.entropy_coef is not None:
        kept = int(kept_by_entropy.sum())
        count = float(max(kept, 1)) if entropy_denominator is None else number(entropy_denominator)
        if kept:
            scale = number(o.entropy_coef) / count
            loss -= scale * float(ent[kept_by_entropy].sum())
            dentropy[kept_by_entropy] = -scale
    if unknown.any():
        loss, dlogp[unknown], dentropy[unknown] = np.nan, np.nan, np.nan
    return float(loss), dlogp, dentropy


def policy_loss(logp: ArrayLike, entropy: ArrayLike | None, **inputs: Any) -> float:
    """The loss alone; the arguments are those of :func:`policy_loss_grad`."""
    return policy_loss_grad(logp, entropy, **inputs)[0]
