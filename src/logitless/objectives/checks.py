"""What an :class:`~logitless.Objective` refuses, and what it says to people who come from other libraries."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from logitless.objectives.objective import Objective

ALGORITHMS: dict[str, str] = {
    "grpo": "Objective.grpo()",
    "dapo": "Objective.dapo()",
    "bnpo": "Objective(aggregation='bnpo')",
    "dr_grpo": "Objective.dr_grpo(max_length)",
    "drgrpo": "Objective.dr_grpo(max_length)",
    "gspo": "Objective.gspo()",
    "gspo-token": "Objective.gspo(level='sequence_token')",
    "gspo_token": "Objective.gspo(level='sequence_token')",
    "cispo": "Objective.cispo()",
    "luspo": "Objective(level='sequence', aggregation='luspo')",
    "sapo": "Objective(policy='sapo')",
    "vespo": "Objective(policy='vespo', aggregation='dapo')",
    "gmpo": "Objective(policy='gmpo')",
    "gpg": "Objective(policy='reinforce')",
    "ppo": "Objective() (policy='clip')",
}
"""Names of whole objectives, and how to write them."""

THEIR_NAMES: dict[str, str] = {
    "loss_type": "It is TRL's and Liger's: Objective.from_trl(loss_type=...) takes it; here policy, level and "
    "aggregation say it.",
    "loss_agg_mode": "It is veRL's and Tunix': here aggregation, which takes their values.",
    "loss_algo": "It is Tunix': Objective.from_tunix(loss_algo=...) takes it; here level says it.",
    "loss_mode": "It is veRL's: Objective.from_verl(...) takes its config; here policy and level say it.",
    "importance_sampling_level": "Here: level.",
    "epsilon": "Here: eps_low, and eps_high for the upper side.",
    "epsilon_low": "Here: eps_low.",
    "epsilon_high": "Here: eps_high.",
    "epsilon_c": "Here: dual_clip.",
    "clip_eps": "Here: eps_low, and eps_high for the upper side.",
    "clip_ratio": "Here: eps_low, and eps_high for the upper side.",
    "clip_ratio_low": "Here: eps_low.",
    "clip_ratio_high": "Here: eps_high.",
    "clip_ratio_c": "Here: dual_clip.",
    "kl_coef": "Here: beta.",
    "kl_loss_coef": "Here: beta.",
    "kl_loss_type": "Here: kl, one of 'k1', 'k2', 'k3', 'k3+'.",
    "kl_loss_mode": "Here: kl, one of 'k1', 'k2', 'k3', 'k3+'.",
    "kl_clamp_value": "Here: kl_clamp.",
    "use_bias_correction_kl": "Here: kl_bias_correction.",
    "top_entropy_quantile": "Here: top_entropy.",
    "off_policy_mask_threshold": "Here: off_policy_threshold.",
    "entropy_coeff": "Here: entropy_coef.",
    "max_completion_length": "Here: max_length, with aggregation='dr_grpo'.",
}
"""Field names of other libraries, and ours."""


def did_you_mean(value: object, allowed: tuple[Any, ...]) -> str:
    close = difflib.get_close_matches(str(value), [str(a) for a in allowed], n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def choice(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        options = ", ".join(repr(a) for a in allowed)
        hint = did_you_mean(value, allowed)
        if name == "policy" and str(value).casefold() in ALGORITHMS:
            hint = f" {value!r} is a whole objective: {ALGORITHMS[str(value).casefold()]}."
        raise ValueError(f"Objective: {name}={value!r} is not known; expected one of {options}.{hint}")


def names(given: dict[str, Any], cls: type) -> None:
    """Every name is a field of ``cls``, the Objective."""
    fields = tuple(f.name for f in dataclasses.fields(cls))
    for name in given:
        if name in fields:
            continue
        hint = f" {THEIR_NAMES[name]}" if name in THEIR_NAMES else did_you_mean(name, fields)
        raise TypeError(f"Objective has no field {name!r}.{hint} Fields: {', '.join(fields)}.")


def whole_objective(name: str, presets: Collection[str]) -> str:
    """How to get the objective that ``name`` is the name of, as code; or a general hint."""
    key = name.casefold()
    if key in presets:
        return f"use Objective.preset({key!r})"
    if key in ALGORITHMS:
        return f"use {ALGORITHMS[key]}"
    return f"use Objective(...), or Objective.preset(name) with one of {', '.join(presets)}"


_NONNEGATIVE = (
    "eps_low", "eps_high", "log_ratio_clamp", "kl_log_ratio_clamp", "kl_clamp", "correction_min", "correction_max",
    "delta",
)  # fmt: skip
_POSITIVE = ("dual_clip", "tau_pos", "tau_neg", "max_length", "temperature")


def numbers(o: Objective) -> None:
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


def combination(o: Objective) -> None:
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
    if o.sequence_log_ratio_max is not None and o.level == "token":
        refuse("sequence_log_ratio_max bounds the ratio of a sequence and would be ignored with level='token'.")
    low, high = o.correction_min, o.correction_max
    if isinstance(low, float) and isinstance(high, float) and low > high:
        refuse(f"correction_min={low} lies above correction_max={high}.")
    if o.correction_mode == "mask" and o.correction is None:
        refuse("correction_mode='mask' has no effect without correction='token', 'sequence' or 'geometric'.")
    if o.correction_mode == "mask" and low is None and high is None:
        refuse("correction_mode='mask' has no effect without correction_min or correction_max.")
