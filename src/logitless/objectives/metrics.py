"""Metrics as ``(sum, count)`` pairs, so that they reduce over devices and micro-batches without bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from logitless.objectives.inputs import LossInputs
from logitless.objectives.loss import TokenTerms, cotangents, token_terms
from logitless.objectives.objective import Objective
from logitless.objectives.policy_terms import kl_estimate
from logitless.stats import TokenStats


class Metric(NamedTuple):
    """A sum and the number of things summed. For names that end in ``_min`` or ``_max``, the extreme value and the
    number of things looked at."""

    sum: Array
    count: Array  # type: ignore[assignment]  # hides tuple.count, which nobody needs here


Metrics = dict[str, Metric]


class LossAux(NamedTuple):
    """What a loss call has beside the loss, of :func:`logitless.with_stats`."""

    metrics: Metrics
    stats: TokenStats


def reduce_metrics(parts: Sequence[Mapping[str, Metric]]) -> Metrics:
    """One set of metrics from those of several devices or micro-batches.

    >>> import jax.numpy as jnp
    >>> from logitless import Metric, reduce_metrics, metric_values
    >>> a = {"entropy": Metric(jnp.float32(6.0), jnp.float32(2.0))}
    >>> b = {"entropy": Metric(jnp.float32(0.0), jnp.float32(1.0))}
    >>> metric_values(reduce_metrics([a, b]))["entropy"]
    2.0
    """
    if not parts:
        raise ValueError("reduce_metrics: nothing to reduce; expected at least one set of metrics.")
    names = parts[0].keys()
    for p in parts[1:]:
        if p.keys() != names:
            raise ValueError(f"reduce_metrics: the sets differ in {sorted(set(names) ^ set(p.keys()))}.")
    out: Metrics = {}
    for name in names:
        sums = jnp.stack([jnp.asarray(p[name].sum) for p in parts])
        counts = jnp.stack([jnp.asarray(p[name].count) for p in parts])
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

    A metric of which nothing was counted is 0: a batch that is masked throughout has no NaN to log.
    """
    values: dict[str, float] = {}
    for name, (total, count) in metrics.items():
        n = float(count)
        if n == 0:
            values[name] = 0.0
        else:
            values[name] = float(total) if name.endswith(("_min", "_max")) else float(total) / n
    if "ratio" in values and "ratio_squared" in values:
        squared = values["ratio_squared"]
        values["ess"] = 0.0 if squared == 0 else values["ratio"] ** 2 / squared
    return values


def loss_metrics(o: Objective, stats: TokenStats, x: LossInputs, terms: TokenTerms) -> Metrics:
    """All metrics of a loss call; none carries a gradient."""
    stats, x, terms = jax.lax.stop_gradient((stats, x, terms))
    mask = x.mask
    tokens = jnp.sum(mask, dtype=jnp.float32)

    def over_tokens(value: Array) -> Metric:
        return Metric(jnp.sum(jnp.where(mask, value, 0.0), dtype=jnp.float32), tokens)

    ratio = jnp.exp(terms.log_ratio)
    out: Metrics = {
        "entropy": over_tokens(stats.entropy),
        "logp": over_tokens(stats.logp),
        "is_top1": over_tokens(stats.is_top1),
        "ratio": over_tokens(ratio),
        "ratio_squared": over_tokens(ratio * ratio),
        "ratio_min": Metric(jnp.min(jnp.where(mask, ratio, jnp.inf)), tokens),
        "ratio_max": Metric(jnp.max(jnp.where(mask, ratio, -jnp.inf)), tokens),
        "live_tokens": Metric(tokens, jnp.float32(mask.size)),
    }
    out.update(_clip_fractions(o, ratio, x))
    if x.ref is not None:
        logp = stats.logp if x.logp_temperature is None else stats.logp / x.logp_temperature
        out["kl_k1"] = over_tokens(kl_estimate("k1", logp, x.ref))
        out["kl_k3"] = over_tokens(kl_estimate("k3", logp, x.ref))
    if x.rollout_missing is not None:
        out["rollout_missing"] = Metric(x.rollout_missing, tokens)
    if terms.correction is not None:
        out["correction_weight"] = over_tokens(terms.correction)
    if terms.keep is not None:
        out["kept_tokens"] = over_tokens(terms.keep)
    g_logp, g_entropy = cotangents(o, stats.logp, stats.entropy, x)
    out["zero_gradient_tokens"] = over_tokens((g_logp == 0) & (g_entropy == 0))
    return out


def _clip_fractions(o: Objective, ratio: Array, x: LossInputs) -> Metrics:
    """Fractions of tokens (or, ``clip_metrics='trl'`` at sequence level, of sequences) that the clip holds back."""
    if o.policy not in ("clip", "cispo", "gmpo"):
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
    elif o.policy == "gmpo":
        low = (jnp.log(ratio) < -jnp.asarray(o.eps_low)) & (a < 0)
        high = (jnp.log(ratio) > o.eps_high) & (a > 0)
    else:
        low = (ratio < 1.0 - jnp.asarray(o.eps_low)) & (a < 0)
        high = (ratio > 1.0 + jnp.asarray(o.eps_high)) & (a > 0)
    share = mask.astype(jnp.float32)
    if o.level != "token" and o.clip_metrics == "trl":
        assert x.sequences is not None
        share = share / x.sequences.lengths()
    count = jnp.sum(share)

    def fraction(hit: Array) -> Metric:
        return Metric(jnp.sum(jnp.where(hit, share, 0.0)), count)

    out = {"clip_fraction_low": fraction(low), "clip_fraction_high": fraction(high)}
    if o.dual_clip is not None:
        out["clip_fraction_dual"] = fraction((a < 0) & (raw > o.dual_clip))
    return out


def metrics_of(objective: Objective, stats: TokenStats, inputs: LossInputs) -> Metrics:
    """The metrics of a loss whose statistics are known."""
    return loss_metrics(objective, stats, inputs, token_terms(objective, stats.logp, stats.entropy, inputs))


def loss_of_stats(objective: Objective, stats: TokenStats, inputs: LossInputs) -> tuple[Array, Metrics]:
    """Loss and metrics, differentiable through the statistics."""
    terms = token_terms(objective, stats.logp, stats.entropy, inputs)
    return jnp.sum(terms.contribution), loss_metrics(objective, stats, inputs, terms)
