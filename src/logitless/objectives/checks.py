"""What an :class:`~logitless.Objective` refuses, and what it says to people who come from other libraries."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from logitless.objectives.distillation import Distillation
    from logitless.objectives.objective import Objective

T = TypeVar("T")

ALGORITHMS: dict[str, str] = {
    "grpo": "Objective.grpo()",
    "dapo": "Objective.dapo()",
    "bnpo": "Objective.bnpo()",
    "dr_grpo": "Objective.dr_grpo(max_length)",
    "drgrpo": "Objective.dr_grpo(max_length)",
    "gspo": "Objective.gspo()",
    "gspo-token": "Objective.gspo_token()",
    "gspo_token": "Objective.gspo_token()",
    "cispo": "Objective.cispo()",
    "luspo": "Objective.luspo()",
    "sapo": "Objective.sapo()",
    "vespo": "Objective.vespo()",
    "gmpo": "Objective.gmpo()",
    "gpg": "Objective.reinforce()",
    "reinforce": "Objective.reinforce()",
    "rloo": "Objective.rloo()",
    "ppo": "Objective.ppo()",
}
"""Names of whole objectives, and the matching constructor."""

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


OPTION_FIELDS = (
    "backend", "chunk_size", "memory_budget", "logits_dtype", "head_grad_dtype", "sparse_backward", "bwd_impl",
    "donate_logits", "interpret", "validate",
)  # fmt: skip
"""Fields of ``logitless.Options``, by which a call is carried out."""
HEAD_FIELDS = {
    "bias": "bias", "lora": "lora", "lora_scale": "lora_scale", "head_layout": "layout", "layout": "layout",
    "scale": "scale", "softcap": "softcap", "vocab_size": "vocab_size",
}  # fmt: skip
"""Keywords for a head, and the matching field of ``logitless.Head``."""

THEIR_ARGUMENTS: dict[str, str] = {
    "_input": "hidden",
    "hidden_states": "hidden",
    "inputs": "hidden",
    "lin_weight": "lm_head",
    "linear_weight": "lm_head",
    "weight": "lm_head",
    "selected_token_ids": "targets",
    "target_ids": "targets",
    "labels": "targets",
    "completion_ids": "targets, the tokens that follow (logitless.next_tokens)",
    "input_ids": "targets, the tokens that follow (logitless.next_tokens)",
    "attention_mask": "mask, which is 1 on completion tokens only",
    "completion_mask": "mask",
    "response_mask": "mask",
    "loss_mask": "mask",
    "ignore_index": "mask, which is 0 on those targets",
    "rewards": "advantages (logitless.group_advantages makes them of rewards)",
    "old_per_token_logps": "old_logp",
    "old_log_prob": "old_logp",
    "old_log_probs": "old_logp",
    "old_logps": "old_logp",
    "ref_per_token_logps": "ref_logp",
    "ref_log_prob": "ref_logp",
    "ref_log_probs": "ref_logp",
    "ref_logps": "ref_logp",
    "ref_input": "ref_hidden",
    "ref_weight": "ref_lm_head",
    "rollout_log_probs": "rollout_logp",
    "sampling_per_token_logps": "rollout_logp",
    "sampling_logps": "rollout_logp",
    "vllm_is_ratio": "token_weights",
    "importance_sampling_ratio": "token_weights",
    "rollout_is_weights": "token_weights",
    "sampler_is_weights": "token_weights",
    "num_items_in_batch": "denominator (logitless.dapo_denominator)",
    "logit_scale": "scale",
    "logit_softcapping": "softcap",
    "final_logit_softcapping": "softcap",
    **dict.fromkeys(
        ("logp", "logps", "log_prob", "log_probs", "per_token_logps"),
        "nothing, the call computes them; policy_loss(TokenStats(logp=...)) takes log-probabilities of your own",
    ),
}
"""Arguments of other libraries' loss calls, and ours."""


def shown(value: object) -> str:
    """``value`` as a message shows it: an array by its dtype and shape, anything long by its type."""
    shape = getattr(value, "shape", None)
    if shape:
        return f"{type(value).__name__} {getattr(value, 'dtype', '')}{list(shape)}"
    text = repr(value.item()) if isinstance(value, np.generic) else repr(value)
    return text if len(text) <= 80 else type(value).__name__


def nearest(value: object, allowed: Collection[object]) -> str | None:
    """The one of ``allowed`` that was meant: but for case and separators, by its initials, or near in spelling."""
    names = [str(a) for a in allowed]
    if (same := same_name(value, names)) is not None:
        return same
    close = difflib.get_close_matches(str(value), names, n=1) or difflib.get_close_matches(str(value).casefold(), names)
    return close[0] if close else None


def same_name(value: object, allowed: Collection[str]) -> str | None:
    """The entry of ``allowed`` equal to ``value`` up to case and separators, or by initials."""
    given = _plain(value)
    for same in (_plain, _initials):
        found = [name for name in allowed if same(name) == given]
        if len(found) == 1 and len(given) > 1:
            return found[0]
    return None


def _plain(name: object) -> str:
    return re.sub(r"[-_. ]", "", str(name).casefold())


def _initials(name: str) -> str:
    return "".join(word[:1] for word in re.split(r"[-_. ]", name.casefold()))


def did_you_mean(value: object, allowed: tuple[object, ...]) -> str:
    """A question for the end of a message, or nothing."""
    close = nearest(value, allowed)
    return f" Did you mean {close!r}?" if close else ""


def choice(name: str, value: object, allowed: tuple[object, ...], owner: str = "Objective") -> None:
    """Check that ``value`` is in ``allowed``, the choices for the field ``name``."""
    if getattr(value, "shape", None) or value not in allowed:
        options = ", ".join(repr(a) for a in allowed)
        hint = did_you_mean(value, allowed)
        other = _plain(value) not in map(_plain, allowed)
        if name in ("policy", "aggregation", "level") and isinstance(value, str) and (other or name == "policy"):
            hint = _of_other_libraries(name, value) or hint
        raise ValueError(f"{owner}: {name}={shown(value)} is not known; expected one of {options}.{hint}")


def _of_other_libraries(field: str, value: str) -> str:
    """What a name of another library, or of a whole objective, is here; nothing if it is neither."""
    from logitless.objectives.objective import AGGREGATION_ALIASES
    from logitless.settings import from_trl, from_tunix, from_verl

    key = value.casefold()
    near = nearest(key, AGGREGATION_ALIASES) if field == "aggregation" and key not in ALGORITHMS else None
    if near is not None:
        return f" Did you mean {near!r}, which is {AGGREGATION_ALIASES[near]!r} here?"
    if key in ALGORITHMS:
        return f" {value!r} is a whole objective: {ALGORITHMS[key]}."
    for known, code in (
        (from_verl.MODES, "Objective.from_verl(loss_mode={!r})"),
        (from_tunix.LEVELS, "Objective.from_tunix(loss_algo={!r})"),
        (from_trl.LOSS_TYPES, "Objective.from_trl(loss_type={!r})"),
    ):
        if key in known:
            return f" {value!r} is another library's name: {code.format(key)} takes it."
    return ""


def argument_hint(name: str, arguments: tuple[str, ...]) -> str:
    """Suggestion for a public call that was given ``name``, which is not among its ``arguments``."""
    from logitless.objectives.objective import Objective

    fields = tuple(f.name for f in dataclasses.fields(Objective))
    objective = "" if "advantages" in arguments else ", which the losses take"
    if name in fields:
        return f" It belongs to the objective{objective}: objective=Objective({name}=...)."
    here = THEIR_ARGUMENTS.get(name, name)
    if here in OPTION_FIELDS and "options" in arguments:
        return f" Here: options=logitless.Options({here}=...)."
    if here in HEAD_FIELDS and "lm_head" in arguments:
        return f" Here: logitless.Head(lm_head, {HEAD_FIELDS[here]}=...) in the place of lm_head."
    if name == "ref_bias" and "ref_lm_head" in arguments:
        return " Here: ref_lm_head=logitless.Head(ref_lm_head, bias=...)."
    if name in THEIR_ARGUMENTS:
        return f" Here: {THEIR_ARGUMENTS[name]}."
    if name in THEIR_NAMES:
        return f" It belongs to the objective{objective}: objective=Objective(...). {THEIR_NAMES[name]}"
    close = nearest(name, arguments)
    if close is None and (close := nearest(name, fields)) is not None:
        return f" Did you mean objective=Objective({close}=...)?"
    return f" Did you mean {close!r}?" if close else ""


def names(given: Mapping[str, object], cls: type, theirs: Mapping[str, str] = THEIR_NAMES) -> None:
    """Every name is a field of ``cls``; ``theirs`` says what other libraries' names are here."""
    fields = tuple(f.name for f in dataclasses.fields(cls))
    for name in given:
        if name in fields:
            continue
        hint = f" {theirs[name]}" if name in theirs else did_you_mean(name, fields)
        raise TypeError(f"{cls.__name__} has no field {name!r}.{hint} Fields: {', '.join(fields)}.")


def named_fields(theirs: Mapping[str, str] = THEIR_NAMES) -> Callable[[type[T]], type[T]]:
    """A class decorator: ``__init__`` answers a name of another library with ours (``theirs``)."""

    def decorate(cls: type[T]) -> type[T]:
        init = cls.__init__

        @functools.wraps(init)
        def named_init(self: T, *args: object, **fields: object) -> None:
            names(fields, cls, theirs)
            init(self, *args, **fields)

        of: Any = cls
        of.__init__ = named_init
        return cls

    return decorate


def written(o: Objective | Distillation) -> str:
    """``o`` as code, with only what differs from the defaults."""
    fields = []
    for f in dataclasses.fields(o):
        value = getattr(o, f.name)
        plain = value is None or isinstance(value, (str, bool, float))
        if not plain or value != f.default:
            fields.append(f"{f.name}={value!r}")
    return f"{type(o).__name__}({', '.join(fields)})"


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
    "delta", "soft_weight", "hard_weight",
)  # fmt: skip
_POSITIVE = ("dual_clip", "tau_pos", "tau_neg", "max_length", "temperature")


def numbers(o: Objective | Distillation) -> None:
    """Range checks of plain numbers, which become floats (an int leaf has another type than a float one, so it would
    compile anew); arrays and tracers are taken as they are."""
    owner = type(o).__name__
    for f in dataclasses.fields(o):
        if f.metadata.get("static"):
            continue
        value = getattr(o, f.name)
        if value is None:
            if f.default is not None and f.name not in ("correction_max",):
                raise ValueError(f"{owner}: {f.name}=None, expected a number (its default is {f.default}).")
            continue
        kind = getattr(getattr(value, "dtype", None), "kind", "")
        if isinstance(value, (str, bool, complex, list, tuple, dict)) or kind in ("b", "c"):
            raise TypeError(f"{owner}: {f.name}={shown(value)} is a {type(value).__name__}, expected a number.")
        if not isinstance(value, (int, float, np.integer, np.floating)):
            continue
        value = float(value)
        object.__setattr__(o, f.name, value)
        if value != value:
            raise ValueError(f"{owner}: {f.name} is NaN.")
        if f.name in _NONNEGATIVE and value < 0:
            raise ValueError(f"{owner}: {f.name}={value}, expected a number >= 0.")
        if f.name in _POSITIVE and value <= 0:
            raise ValueError(f"{owner}: {f.name}={value}, expected a number > 0.")


MIX_MARGIN = 1e-3
"""A ``mix`` this close to 0 or 1 is refused: JSD and its gradient tend to 0 there, and not to a KL."""


def mixture(who: str, divergence: str, mix: object) -> None:
    """``mix`` belongs to the divergence, and trains something."""
    if mix is None:
        return
    if divergence != "jsd":
        raise ValueError(
            f"{who}: mix={shown(mix)} belongs to divergence='jsd' and would be ignored with {divergence!r}; leave it "
            "out."
        )
    if not isinstance(mix, (int, float)):
        return
    if not 0 <= mix <= 1:
        raise ValueError(f"{who}: mix={mix}, expected a share of the teacher between 0 and 1.")
    if not MIX_MARGIN <= mix <= 1 - MIX_MARGIN:
        end, kl = (0, "forward_kl") if mix < 0.5 else (1, "reverse_kl")
        raise ValueError(
            f"{who}: mix={mix} lies within {MIX_MARGIN} of {end}, where JSD tends to 0 and trains nothing; say "
            f"divergence={kl!r} if that is meant."
        )


def combination(o: Objective) -> None:
    """Combinations that make no sense are refused by name."""

    def refuse(why: str) -> None:
        raise ValueError(f"Objective: {why}")

    if isinstance(o.top_entropy, (int, float)) and not 0 < o.top_entropy <= 1:
        raise ValueError(f"Objective: top_entropy={o.top_entropy}, expected a fraction in (0, 1].")
    if isinstance(o.sequence_error_max, (int, float)) and o.sequence_error_max < 1:
        raise ValueError(
            f"Objective: sequence_error_max={o.sequence_error_max}, expected 1 or more: it bounds a mean of "
            "exp(|logp - rollout|)."
        )
    of_rows = o.aggregation in ("grpo", "dr_grpo", "luspo") and o.count_rows == "all"
    if o.sequence_error_max is not None and of_rows:
        refuse(f"sequence_error_max drops sequences, and {o.aggregation!r} counts all: set count_rows='non_empty'.")
    if isinstance(o.dual_clip, (int, float)) and o.dual_clip <= 1:
        raise ValueError(f"Objective: dual_clip={o.dual_clip}, expected a constant above 1 (3 is usual).")
    if o.policy == "gmpo" and o.level != "token":
        refuse(f"policy='gmpo' has its own sequence mean, so level must be 'token', not {o.level!r}.")
    if o.level == "sequence_token" and o.policy != "clip":
        refuse(f"level='sequence_token' (gspo-token) is defined for policy='clip', not {o.policy!r}.")
    if o.policy == "reinforce" and o.level != "token":
        refuse(f"policy='reinforce' uses no ratio, so level={o.level!r} has no meaning.")
    if o.policy.startswith("dppo") and o.level != "token":
        refuse(f"policy={o.policy!r} compares probabilities of tokens, so level must be 'token', not {o.level!r}.")
    for name in ("delta", "dual_clip"):
        takes = o.policy == "clip" or (name == "delta" and o.policy.startswith("dppo"))
        if getattr(o, name) is not None and not takes:
            refuse(f"{name} belongs to policy='clip' and would be ignored with policy={o.policy!r}.")
    if o.aggregation == "dr_grpo" and o.max_length is None:
        refuse("aggregation='dr_grpo' divides by batch * max_length; give max_length (L_max, the completion budget).")
    if o.aggregation != "dr_grpo" and o.max_length is not None:
        refuse(f"max_length belongs to aggregation='dr_grpo' and would be ignored with {o.aggregation!r}.")
    if o.correction in ("geometric", "geometric_mask") and o.policy == "vespo":
        refuse(f"policy='vespo' folds the weight in as a sum of logs; correction={o.correction!r} is not defined.")
    if o.correction == "geometric_mask" and o.correction_mode != "mask":
        refuse("correction='geometric_mask' drops sequences outside of its bounds; set correction_mode='mask'.")
    if o.sequence_log_ratio_max is not None and o.level == "token":
        refuse("sequence_log_ratio_max bounds the ratio of a sequence and would be ignored with level='token'.")
    if o.kl != "full" and (o.divergence != "reverse_kl" or o.mix is not None):
        name = "mix" if o.mix is not None else "divergence"
        refuse(f"{name} belongs to kl='full', the divergence over the vocabulary, and would be ignored with {o.kl!r}.")
    if o.kl == "full":
        for name in ("kl_bias_correction", "kl_log_ratio_clamp", "kl_clamp"):
            if getattr(o, name) not in (None, False):
                refuse(f"{name} acts on an estimate from one token and has no meaning with kl='full'; leave it out.")
        if o.temperature_on == "logp":
            refuse("temperature_on='logp' has no meaning for kl='full', a divergence of whole distributions.")
        mixture("Objective", o.divergence, o.mix)
    low, high = o.correction_min, o.correction_max
    if isinstance(low, float) and isinstance(high, float) and low > high:
        refuse(f"correction_min={low} lies above correction_max={high}.")
    if o.correction_mode == "mask" and o.correction is None:
        refuse("correction_mode='mask' has no effect without correction='token', 'sequence' or 'geometric'.")
    if o.correction_mode == "mask" and low is None and high is None:
        refuse("correction_mode='mask' has no effect without correction_min or correction_max.")
