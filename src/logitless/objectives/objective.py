"""The :class:`Objective`: which GRPO-family loss, with which numbers."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, Literal, get_args

import numpy as np
from jax import Array

from logitless.pytree import register, static

Policy = Literal["clip", "cispo", "sapo", "vespo", "gmpo", "reinforce"]
Level = Literal["token", "sequence", "sequence_token"]
Aggregation = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]
KLEstimator = Literal["k1", "k2", "k3", "k3+"]
Correction = Literal["token", "sequence", "geometric"]
CorrectionMode = Literal["truncate", "mask"]
CispoBound = Literal["raw", "interval"]
ClipMetrics = Literal["trl", "liger"]
TemperatureOn = Literal["logits", "logp"]
Number = float | Array

AGGREGATION_ALIASES: dict[str, Aggregation] = {
    "seq-mean-token-mean": "grpo",
    "token-mean": "bnpo",
    "seq-mean-token-sum-norm": "dr_grpo",
    "seq-mean-token-sum": "luspo",
    "sapo": "grpo",
    "cispo": "dapo",
    "vespo": "dapo",
}
"""Names used by veRL and Tunix, and by TRL's loss types, for the aggregations here."""

_CHOICES: dict[str, tuple[Any, ...]] = {
    "policy": get_args(Policy),
    "level": get_args(Level),
    "aggregation": get_args(Aggregation),
    "kl": get_args(KLEstimator),
    "kl_bias_correction": (False, True),
    "correction": (None, *get_args(Correction)),
    "correction_mode": get_args(CorrectionMode),
    "cispo_bound": get_args(CispoBound),
    "clip_metrics": get_args(ClipMetrics),
    "temperature_on": get_args(TemperatureOn),
}


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """A GRPO-family objective. Frozen, hashable by structure, and a pytree.

    Choices (strings and booleans) are static; numbers are leaves, so changing one never recompiles. A number that is
    ``None`` means that its term does not exist, which is part of the structure.

    >>> from logitless import Objective
    >>> o = Objective(eps_low=0.2, eps_high=0.28, aggregation="dapo")
    >>> o.replace(beta=0.04).beta
    0.04
    >>> Objective(policy="clpi")
    Traceback (most recent call last):
    ValueError: Objective: policy='clpi' is not known; expected one of 'clip', 'cispo', 'sapo', 'vespo', 'gmpo', \
'reinforce'. Did you mean 'clip'?
    """

    # -- choices (static) -------------------------------------------------------------------------------------------
    policy: Policy = static("clip")
    """Per-token policy loss."""
    level: Level = static("token")
    """Importance ratio per token, per sequence (GSPO), or the sequence's value with a token's gradient."""
    aggregation: Aggregation = static("grpo")
    """How token losses become one number; veRL's and Tunix' names are accepted and mapped."""
    kl: KLEstimator = static("k3")
    """KL estimator, used when ``beta`` is a number."""
    kl_bias_correction: bool = static(False)
    """Multiply the KL by the raw importance ratio (TRL's default)."""
    correction: Correction | None = static(None)
    """Train/rollout importance weight: per token, per sequence (product) or geometric mean of the sequence."""
    correction_mode: CorrectionMode = static("truncate")
    """Weights outside ``[correction_min, correction_max]``: truncated to the bound, or set to zero."""
    cispo_bound: CispoBound = static("raw")
    """``raw``: ``min(ratio, eps_high)`` (TRL, Liger); ``interval``: ``clip(ratio, 1-eps_low, 1+eps_high)`` (veRL)."""
    clip_metrics: ClipMetrics = static("trl")
    """Clip fractions after ``delta`` and per sequence at sequence level (trl), or before it and per token (liger)."""
    temperature_on: TemperatureOn = static("logits")
    """Temperature divides the logits, or (``mllm-jax``) the log-probability at temperature one."""

    # -- numbers (traced) -------------------------------------------------------------------------------------------
    eps_low: Number = 0.2
    """Lower clip distance."""
    eps_high: Number = 0.2
    """Upper clip distance; for ``cispo`` with a raw bound, the bound itself."""
    delta: Number | None = None
    """Upper bound of the unclipped ratio (two-sided GRPO)."""
    dual_clip: Number | None = None
    """Dual-clip constant ``c``: where the advantage is negative the loss is at most ``-c * A``."""
    tau_pos: Number = 1.0
    """SAPO temperature for positive advantages."""
    tau_neg: Number = 1.05
    """SAPO temperature for the others."""
    vespo_k_pos: Number = 2.0
    vespo_lambda_pos: Number = 3.0
    vespo_k_neg: Number = 3.0
    vespo_lambda_neg: Number = 2.0
    beta: Number | None = None
    """KL coefficient; a number asks for ``ref_logp``."""
    kl_log_ratio_clamp: Number | None = None
    """Clamp ``ref - logp`` to plus or minus this before the estimator."""
    kl_clamp: Number | None = None
    """Clamp the estimator to plus or minus this."""
    correction_min: Number | None = None
    correction_max: Number | None = 2.0
    off_policy_threshold: Number | None = None
    """Drop sequences with negative advantage whose mean ``rollout - logp`` exceeds this."""
    top_entropy: Number | None = None
    """Keep the policy loss of this fraction of highest-entropy tokens only."""
    entropy_coef: Number | None = None
    """Entropy bonus."""
    max_length: Number | None = None
    """``L_max`` of ``dr_grpo``."""
    temperature: Number | None = None
    """Sampling temperature of the policy; a scalar or one value per token. ``None`` is one."""

    def __post_init__(self) -> None:
        if isinstance(self.aggregation, str) and self.aggregation in AGGREGATION_ALIASES:
            object.__setattr__(self, "aggregation", AGGREGATION_ALIASES[self.aggregation])
        for name, allowed in _CHOICES.items():
            _check_choice(name, getattr(self, name), allowed)
        _check_numbers(self)
        _check_combination(self)

    def replace(self, **changes: Any) -> Objective:
        """A copy with some fields changed, checked again."""
        _check_names(changes)
        return dataclasses.replace(self, **changes)

    @staticmethod
    def preset(name: str, **overrides: Any) -> Objective:
        """A peer's objective by name: ``trl``, ``liger``, ``verl``, ``tunix`` or ``mllm-jax``.

        >>> from logitless import Objective
        >>> Objective.preset("trl", beta=0.04).kl_bias_correction
        True
        """
        from logitless.objectives.presets import preset

        return preset(name, **overrides)

    def coupling(self, old_known: bool = True) -> str | None:
        """Why a token's loss needs other tokens' statistics, or ``None`` where it does not; ``old_known``: the call has
        ``old_logp``.

        ``None`` means that the loss is a sum of functions of each token's own statistics, so its gradient is known
        as soon as the token's logits are (three matmuls instead of four, see docs/maths.md).
        """
        if self.policy in ("vespo", "gmpo"):
            return f"policy={self.policy!r} weighs a token by its whole sequence"
        if self.level != "token":
            return f"level={self.level!r} uses one ratio for the whole sequence"
        if self.off_policy_threshold is not None:
            return "off_policy_threshold averages over the sequence"
        if self.top_entropy is not None:
            return "top_entropy takes a quantile over the batch"
        if self.correction is not None and not old_known:
            return "correction without old_logp weighs by the current log-probabilities"
        return None


def _did_you_mean(value: object, allowed: tuple[Any, ...]) -> str:
    close = difflib.get_close_matches(str(value), [str(a) for a in allowed], n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _check_choice(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        options = ", ".join(repr(a) for a in allowed)
        raise ValueError(
            f"Objective: {name}={value!r} is not known; expected one of {options}.{_did_you_mean(value, allowed)}"
        )


def _check_names(given: dict[str, Any]) -> None:
    names = tuple(f.name for f in dataclasses.fields(Objective))
    for name in given:
        if name not in names:
            raise TypeError(f"Objective has no field {name!r}.{_did_you_mean(name, names)} Fields: {', '.join(names)}.")


_NONNEGATIVE = ("eps_low", "eps_high", "kl_log_ratio_clamp", "kl_clamp", "correction_min", "correction_max", "delta")
_POSITIVE = ("dual_clip", "tau_pos", "tau_neg", "max_length", "temperature")


def _check_numbers(o: Objective) -> None:
    """Range checks of plain numbers, which become floats (an int leaf has another type than a float one, so it would
    compile anew); arrays and tracers are taken as they are."""
    for f in dataclasses.fields(o):
        if f.metadata.get("static"):
            continue
        value = getattr(o, f.name)
        if value is None:
            if f.default is not None and f.name not in ("correction_max",):
                raise ValueError(f"Objective: {f.name}=None, expected a number (its default is {f.default}).")
            continue
        if isinstance(value, (str, bool, list, tuple, dict)):
            raise TypeError(f"Objective: {f.name}={value!r} is a {type(value).__name__}, expected a number.")
        if not isinstance(value, (int, float, np.integer, np.floating)):
            continue
        value = float(value)
        object.__setattr__(o, f.name, value)
        if value != value:
            raise ValueError(f"Objective: {f.name} is NaN.")
        if f.name in _NONNEGATIVE and value < 0:
            raise ValueError(f"Objective: {f.name}={value}, expected a number >= 0.")
        if f.name in _POSITIVE and value <= 0:
            raise ValueError(f"Objective: {f.name}={value}, expected a number > 0.")
    if isinstance(o.top_entropy, (int, float)) and not 0 < o.top_entropy <= 1:
        raise ValueError(f"Objective: top_entropy={o.top_entropy}, expected a fraction in (0, 1].")
    if isinstance(o.dual_clip, (int, float)) and o.dual_clip <= 1:
        raise ValueError(f"Objective: dual_clip={o.dual_clip}, expected a constant above 1 (3 is usual).")


def _check_combination(o: Objective) -> None:
    """Combinations that make no sense are refused by name."""

    def refuse(why: str) -> None:
        raise ValueError(f"Objective: {why}")

    if o.policy == "gmpo" and o.level != "token":
        refuse(f"policy='gmpo' has its own sequence mean, so level must be 'token', not {o.level!r}.")
    if o.level == "sequence_token" and o.policy != "clip":
        refuse(f"level='sequence_token' (gspo-token) is defined for policy='clip', not {o.policy!r}.")
    if o.policy == "reinforce" and o.level != "token":
        refuse(f"policy='reinforce' uses no ratio, so level={o.level!r} has no meaning.")
    for name in ("delta", "dual_clip"):
        if getattr(o, name) is not None and o.policy != "clip":
            refuse(f"{name} belongs to policy='clip' and would be ignored with policy={o.policy!r}.")
    if o.aggregation == "dr_grpo" and o.max_length is None:
        refuse("aggregation='dr_grpo' divides by batch * max_length; give max_length (L_max, the completion budget).")
    if o.aggregation != "dr_grpo" and o.max_length is not None:
        refuse(f"max_length belongs to aggregation='dr_grpo' and would be ignored with {o.aggregation!r}.")
    if o.correction == "geometric" and o.policy == "vespo":
        refuse("policy='vespo' folds the importance weight in as a sum of logs; correction='geometric' is not defined.")
    if o.correction is not None and o.correction_min is None and o.correction_max is None:
        refuse("correction needs correction_min, correction_max or both.")
    low, high = o.correction_min, o.correction_max
    if isinstance(low, float) and isinstance(high, float) and low > high:
        refuse(f"correction_min={low} lies above correction_max={high}.")
    if o.correction_mode == "mask" and o.correction is None:
        refuse("correction_mode='mask' has no effect without correction='token', 'sequence' or 'geometric'.")
