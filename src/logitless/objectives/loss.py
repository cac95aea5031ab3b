"""The loss over per-token statistics, written once and used by every backend, and its metrics.

    l_t  = policy term (policy_terms.py), times the off-policy mask, the top-entropy mask and the correction weight
    l_t += beta * KL_t, and nothing of sequences beyond ``sequence_error_max``
    loss = sum_t weight_t l_t - entropy_coef * sum_t k_t entropy_t / max(sum k, 1)

A live token whose statistics are NaN makes the loss NaN, and its own gradient, whatever would have dropped the token.

:func:`contributions` gives the terms of that sum per token. For an uncoupled objective it is elementwise, so a backend
may call it on any chunk of tokens, and take the cotangents of that chunk's statistics with ``jax.vjp``.

Metrics are ``(sum, count)`` pairs, so that they reduce over devices and micro-batches without bias.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from logitless.core.pytree import register
from logitless.core.stats import TokenStats
from logitless.objectives.correction import (
    correction_weight,
    off_policy_keep,
    sequences_agree,
    top_entropy_keep,
    vespo_log_weight,
)
from logitless.objectives.inputs import LossInputs, divided, only_kept
from logitless.objectives.objective import Objective
from logitless.objectives.policy_terms import (
    exp,
    kl_estimate,
    log_ratio,
    outside_trust_region,
    policy_term,
    vespo_weight,
)


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
    agree: Array | None = None
    if o.sequence_error_max is not None:
        assert x.rollout is not None and x.sequences is not None
        agree = sequences_agree(o, logp, x.rollout, x.sequences)
        x = only_kept(o, x, agree)

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
    keep = agree
    if o.off_policy_threshold is not None:
        assert x.sequences is not None
        near = off_policy_keep(o, logp, x.rollout, x.old, x.advantage, x.sequences)
        keep = near if keep is None else keep & near
    high_entropy = None
    if o.top_entropy is not None:
        high_entropy = top_entropy_keep(o, entropy, x.mask if agree is None else x.mask & agree)
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

    if agree is not None:
        loss = jnp.where(agree, loss, 0.0)  # the KL as well
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


# -- metrics -----------------------------------------------------------------------------------------------------------


class Metric(NamedTuple):
    """A sum and the number of things summed. For names that end in ``_min`` or ``_max``, the extreme value and the
    number of things looked at."""

    sum: Array
    count: Array  # type: ignore[assignment]  # hides tuple.count, which nobody needs here


Metrics = dict[str, Metric]

PARITY = {"": (0.999, 1.002), "_1pct": (0.99, 1.01), "_5pct": (0.95, 1.05)}
"""Intervals of the ratio that ``parity_metrics`` counts, by the ending of the metric's name."""


OF_A_SPARSE_BACKWARD = (
    "left_out_mass", "left_out_mass_max", "hard_rows", "active_columns", "backward_columns", "dense_chunks"
)  # fmt: skip
"""Names of metrics added by a sparse backward."""


class LossAux(NamedTuple):
    """What a loss call has beside the loss, of :func:`logitless.with_stats`."""

    metrics: Metrics
    stats: TokenStats


def reduce_metrics(parts: Sequence[Mapping[str, Metric]]) -> Metrics:
    """A single set of metrics, reduced over devices or micro-batches.

    A part may be a stack of sets, as ``lax.scan`` and ``jax.vmap`` return them: each array has a leading axis, and the
    result is that over all entries of the stack.

    >>> import jax.numpy as jnp
    >>> from logitless import Metric, reduce_metrics, metric_values
    >>> a = {"entropy": Metric(jnp.float32(6.0), jnp.float32(2.0))}
    >>> b = {"entropy": Metric(jnp.float32(0.0), jnp.float32(1.0))}
    >>> metric_values(reduce_metrics([a, b]))["entropy"]
    2.0
    >>> stacked = {"entropy": Metric(jnp.array([6.0, 0.0]), jnp.array([2.0, 1.0]))}
    >>> metric_values(reduce_metrics([stacked]))["entropy"], metric_values(stacked)["entropy"]
    (2.0, 2.0)
    """
    if not parts:
        raise ValueError("reduce_metrics: nothing to reduce; expected at least one set of metrics.")
    names = parts[0].keys()
    for p in parts[1:]:
        if p.keys() != names:
            raise ValueError(f"reduce_metrics: the sets differ in {sorted(set(names) ^ set(p.keys()))}.")
    out: Metrics = {}
    for name in names:
        sums = jnp.concatenate([jnp.ravel(p[name].sum) for p in parts])
        counts = jnp.concatenate([jnp.ravel(p[name].count) for p in parts])
        if name.endswith("_min"):
            total = jnp.min(sums)
        elif name.endswith("_max"):
            total = jnp.max(sums)
        else:
            total = jnp.sum(sums)
        out[name] = Metric(total, jnp.sum(counts))
    return out


def metric_values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Plain numbers for a log: means, extremes, and the effective sample size as a fraction (``ess``).

    A metric of which nothing was counted is 0: a batch that is masked throughout has no NaN to log. Metrics stacked by
    ``lax.scan`` are reduced over all entries (:func:`reduce_metrics`).
    """
    values: dict[str, float] = {}
    if any(np.ndim(m.sum) for m in metrics.values()):
        metrics = reduce_metrics([metrics])
    for name, (total, count) in metrics.items():
        n = float(count)
        if n == 0:
            values[name] = 0.0
        else:
            values[name] = float(total) if name.endswith(("_min", "_max")) else float(total) / n
    if {"ratio", "ratio_min", "ratio_max"} <= values.keys():
        values["ratio"] = _between(values["ratio_min"], values["ratio"], values["ratio_max"])
    if "ratio" in values and "ratio_squared" in values:
        squared = values["ratio_squared"]
        values["ess"] = 0.0 if squared == 0 else values["ratio"] ** 2 / squared
    return values


def _between(low: float, mean: float, high: float) -> float:
    """``mean``, a float32 sum divided by its count, clamped to ``[low, high]`` against rounding. A mean that lies
    further outside is an error, and stays visible."""
    nearest = min(max(mean, low), high)
    return nearest if abs(mean - nearest) <= 1e-6 * abs(mean) else mean


def loss_metrics(o: Objective, stats: TokenStats, x: LossInputs, terms: TokenTerms) -> Metrics:
    """All metrics of a loss call; none carries a gradient."""
    stats, x, terms = jax.lax.stop_gradient((stats, x, terms))
    mask, counted = x.mask, x.counted
    assert counted is not None
    tokens = jnp.sum(mask, dtype=jnp.float32)

    def over_tokens(value: Array) -> Metric:
        return Metric(jnp.sum(jnp.where(mask, value, 0.0), dtype=jnp.float32), tokens)

    ratio = jnp.exp(terms.log_ratio)
    out: Metrics = {
        "logp": over_tokens(stats.logp),
        "ratio": over_tokens(ratio),
        "ratio_squared": over_tokens(ratio * ratio),
        "ratio_min": Metric(jnp.min(jnp.where(mask, ratio, jnp.inf)), tokens),
        "ratio_max": Metric(jnp.max(jnp.where(mask, ratio, -jnp.inf)), tokens),
        "live_token_share": Metric(tokens, jnp.float32(mask.size)),
    }
    for name in ("entropy", "is_top1", "teacher_entropy"):  # not all statistics have them
        if getattr(stats, name) is not None:
            out[name] = over_tokens(getattr(stats, name))
    out.update(_clip_fractions(o, stats.logp, ratio, x))
    if o.parity_metrics:
        out.update(_parity(stats, x))
    if x.ref is not None:
        out["kl_k1"] = over_tokens(kl_estimate("k1", stats.logp, x.ref))
        out["kl_k3"] = over_tokens(kl_estimate("k3", stats.logp, x.ref))
    if terms.kl is not None:
        out["kl_loss"] = over_tokens(terms.kl)
    if terms.vespo_phi is not None:
        out["vespo_phi"] = _sequence_mean(o, terms.vespo_phi, x, of_nothing=1.0)
    if o.entropy_coef is not None:
        # Over this batch's own count, whatever denominator the loss was given: so parts reduce to the whole.
        policy = jnp.sum(terms.policy) * counted.denominator
        out["policy_loss"] = Metric(policy, counted.own_denominator)
        acted_on = mask if terms.high_entropy is None else terms.high_entropy
        total = jnp.sum(jnp.where(acted_on, stats.entropy, 0.0))
        out["bonus_entropy"] = Metric(total, jnp.sum(acted_on, dtype=jnp.float32))
        out["entropy_coef"] = Metric(o.entropy_coef * tokens, tokens)  # as a mean over tokens: parts add up
    if counted.rollout_missing is not None:
        out["rollout_missing"] = Metric(counted.rollout_missing, tokens)
    if terms.correction is not None:
        out["correction_weight"] = over_tokens(terms.correction)
    if terms.keep is not None:
        out["kept_tokens"] = over_tokens(terms.keep)
    moves = [g != 0 for g in cotangents(o, stats.logp, _entropy(stats), x, stats.divergence) if g is not None]
    out["zero_gradient_tokens"] = over_tokens(~functools.reduce(jnp.logical_or, moves))
    return out


def _clip_fractions(o: Objective, logp: Array, ratio: Array, x: LossInputs) -> Metrics:
    """Fractions of tokens (or, ``clip_metrics='trl'`` at sequence level, of sequences) that the clip holds back."""
    if o.policy not in ("clip", "cispo", "gmpo", "dppo_tv", "dppo_kl"):
        return {}
    a, mask = x.advantage, x.mask
    raw = ratio
    if o.delta is not None and o.clip_metrics == "trl":
        ratio = jnp.minimum(ratio, o.delta)
    if o.policy == "cispo":
        upper = jnp.asarray(o.eps_high) if o.cispo_bound == "raw" else 1.0 + jnp.asarray(o.eps_high)
        # The raw bound has no lower side.
        low = jnp.zeros_like(mask) if o.cispo_bound == "raw" else (ratio < 1.0 - jnp.asarray(o.eps_low)) & (a < 0)
        high = (ratio > upper) & (a > 0)
    elif o.policy in ("dppo_tv", "dppo_kl"):
        outside = outside_trust_region(o, logp, x.old, a)
        low, high = outside & (a < 0), outside & (a > 0)
    elif o.policy == "gmpo":
        low = (jnp.log(ratio) < -jnp.asarray(o.eps_low)) & (a < 0)
        high = (jnp.log(ratio) > o.eps_high) & (a > 0)
    else:
        low = (ratio < 1.0 - jnp.asarray(o.eps_low)) & (a < 0)
        high = (ratio > 1.0 + jnp.asarray(o.eps_high)) & (a > 0)
    by_sequence = o.level != "token" and o.clip_metrics == "trl"

    def fraction(hit: Array) -> Metric:
        if by_sequence:
            return _sequence_mean(o, hit, x)
        return Metric(jnp.sum(hit & mask, dtype=jnp.float32), jnp.sum(mask, dtype=jnp.float32))

    out = {
        "clip_fraction_low": fraction(low),
        "clip_fraction_high": fraction(high),
        "clip_fraction": fraction(low | high),
    }
    if o.dual_clip is not None:
        out["clip_fraction_dual"] = fraction((a < 0) & (raw > o.dual_clip))
    if by_sequence and o.policy == "clip":
        assert x.counted is not None
        rows = x.counted.sequences
        # As a sequence, a row without a token has a ratio, of one. At the token level a mean of every row would cost
        # collectives for sharded tokens: no extremes.
        counts = mask | (~jnp.any(mask, axis=1, keepdims=True) if _whole_rows(o, x) else False)
        number = jnp.sum(jnp.any(counts, axis=1), dtype=jnp.float32)
        low_mean, high_mean = (rows.mean(hit.astype(jnp.float32)) for hit in (low, high))
        out["clip_fraction_low_min"] = Metric(jnp.min(jnp.where(counts, low_mean, jnp.inf)), number)
        out["clip_fraction_high_max"] = Metric(jnp.max(jnp.where(counts, high_mean, -jnp.inf)), number)
    return out


def _parity(stats: TokenStats, x: LossInputs) -> Metrics:
    """Shares of tokens, and of sequences by the geometric mean of their tokens, whose ratio ``exp(logp - old)`` lies
    within each interval. A NaN lies in none."""
    assert x.counted is not None
    sequences = x.counted.sequences
    log_ratio = stats.logp - (stats.logp if x.old is None else x.old)
    per_token = (jnp.exp(log_ratio), x.mask.astype(jnp.float32))
    per_sequence = (jnp.exp(sequences.mean(log_ratio)), jnp.where(x.mask, 1.0 / sequences.lengths(), 0.0))
    out: Metrics = {}
    for of, (ratio, share) in (("tokens", per_token), ("sequences", per_sequence)):
        for ending, (low, high) in PARITY.items():
            within = x.mask & (ratio >= low) & (ratio <= high)
            out[f"parity_{of}{ending}"] = Metric(jnp.sum(jnp.where(within, share, 0.0)), jnp.sum(share))
    return out


def _whole_rows(o: Objective, x: LossInputs) -> bool:
    """Whether a sequence's value is constant over its row: not with packed rows, nor with an advantage per token."""
    assert x.counted is not None
    return x.counted.sequences.index is None and x.counted.one_advantage


def _sequence_mean(o: Objective, value: Array, x: LossInputs, of_nothing: float = 0.0) -> Metric:
    """The mean over sequences of what is the same for all their tokens.

    TRL's mean: every row counts, rows without a token with ``of_nothing``, the value at a ratio of one. If advantages
    differ within a row, the mean is over tokens. Otherwise over sequences that have a token.
    """
    assert x.counted is not None
    sequences, mask = x.counted.sequences, x.mask
    per_token = sequences.index is None and not x.counted.one_advantage and o.clip_metrics == "trl"
    share = jnp.where(mask, 1.0 if per_token else 1.0 / sequences.lengths(), 0.0)
    total, count = jnp.sum(jnp.where(mask, value, 0.0) * share), jnp.sum(share)
    if _whole_rows(o, x) and o.clip_metrics == "trl":
        rows = jnp.float32(mask.shape[0])
        total, count = total + of_nothing * (rows - count), rows
    return Metric(total, count)


def _entropy(stats: TokenStats) -> Array:
    """The entropy; zeros where a user's statistics lack it and the objective does not read it."""
    return jnp.zeros_like(stats.logp) if stats.entropy is None else stats.entropy


def metrics_of(objective: Objective, stats: TokenStats, inputs: LossInputs) -> Metrics:
    """The metrics of a loss whose statistics are known."""
    return loss_metrics(objective, stats, inputs, _terms(objective, stats, inputs))


def _terms(objective: Objective, stats: TokenStats, inputs: LossInputs) -> TokenTerms:
    return token_terms(objective, stats.logp, _entropy(stats), inputs, stats.divergence)


def loss_of_stats(objective: Objective, stats: TokenStats, inputs: LossInputs) -> tuple[Array, Metrics]:
    """Loss and metrics, differentiable through the statistics."""
    terms = _terms(objective, stats, inputs)
    return jnp.sum(terms.contribution), loss_metrics(objective, stats, inputs, terms)
