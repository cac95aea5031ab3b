"""The :class:`Objective`: which GRPO-family loss, with which numbers."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from jax import Array

from logitless.core.pytree import register, static
from logitless.objectives import checks

Policy = Literal["clip", "cispo", "sapo", "vespo", "gmpo", "reinforce", "dppo_tv", "dppo_kl"]
Level = Literal["token", "sequence", "sequence_token"]
Aggregation = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]
KLEstimator = Literal["k1", "k2", "k3", "k3+", "full"]
Divergence = Literal["forward_kl", "reverse_kl", "jsd"]
Correction = Literal["token", "sequence", "geometric", "geometric_mask"]
CorrectionMode = Literal["truncate", "mask"]
CispoBound = Literal["raw", "interval"]
ClipMetrics = Literal["trl", "liger"]
CountRows = Literal["all", "non_empty"]
OffPolicyFrom = Literal["rollout", "old"]
TemperatureOn = Literal["logits", "logp"]
Number = float | Array

AGGREGATION_ALIASES: dict[str, Aggregation] = {
    "seq-mean-token-mean": "grpo",
    "token-mean": "bnpo",
    "seq-mean-token-sum-norm": "dr_grpo",
    "seq-mean-token-sum": "luspo",
    "sequence-mean-token-mean": "grpo",
    "sequence-mean-token-scale": "dr_grpo",
    "sequence-mean-token-sum-norm": "luspo",
    "sapo": "grpo",
    "cispo": "dapo",
    "vespo": "dapo",
}
"""Names used by veRL and Tunix, and by TRL's loss types, for the aggregations here. Tunix, whose names begin with
``sequence-mean``, counts the rows that have a valid token: add ``count_rows="non_empty"``."""

_CHOICES: dict[str, tuple[object, ...]] = {
    "policy": get_args(Policy),
    "level": get_args(Level),
    "aggregation": get_args(Aggregation),
    "kl": get_args(KLEstimator),
    "divergence": get_args(Divergence),
    "kl_bias_correction": (False, True),
    "correction": (None, *get_args(Correction)),
    "correction_mode": get_args(CorrectionMode),
    "cispo_bound": get_args(CispoBound),
    "clip_metrics": get_args(ClipMetrics),
    "parity_metrics": (False, True),
    "temperature_on": get_args(TemperatureOn),
    "count_rows": get_args(CountRows),
    "off_policy_from": get_args(OffPolicyFrom),
}


@checks.named_fields()
@register
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Objective:
    """A GRPO-family objective. Frozen, hashable by structure, and a pytree.

    Choices (strings and booleans) are static; numbers are leaves, so changing one never recompiles. ``None`` for a
    number removes its term, and changes the pytree structure.

    >>> from logitless import Objective
    >>> o = Objective(eps_low=0.2, eps_high=0.28, aggregation="dapo")
    >>> o.replace(beta=0.04)
    Objective(aggregation='dapo', eps_high=0.28, beta=0.04)
    >>> Objective(policy="clpi")
    Traceback (most recent call last):
    ValueError: Objective: policy='clpi' is not known; expected one of 'clip', 'cispo',
    'sapo', 'vespo', 'gmpo', 'reinforce', 'dppo_tv', 'dppo_kl'. Did you mean 'clip'?
    """

    # -- choices (static) -------------------------------------------------------------------------------------------
    policy: Policy = static("clip")
    """Per-token policy loss."""
    level: Level = static("token")
    """Importance ratio per token, per sequence (GSPO), or the sequence's value with a token's gradient."""
    aggregation: Aggregation = static("grpo")
    """How token losses become one number; veRL's and Tunix' names are accepted and mapped."""
    kl: KLEstimator = static("k3")
    """KL to the reference, used when ``beta`` is a number: an estimator from ``ref_logp``, or ``full``, which is the
    ``divergence`` over the whole vocabulary from ``ref_hidden`` and ``ref_lm_head``."""
    divergence: Divergence = static("reverse_kl")
    """Of ``kl="full"``: KL(policy || reference), KL(reference || policy) (``forward_kl``), or the Jensen-Shannon
    divergence with ``mix``. With a teacher as the reference it is on-policy distillation."""
    kl_bias_correction: bool = static(False)
    """Multiply the KL by the raw importance ratio (TRL's default)."""
    correction: Correction | None = static(None)
    """Train/rollout importance weight: per token, per sequence (product) or geometric mean of the sequence;
    ``geometric_mask`` weighs per token and drops sequences by their geometric mean (seq-mask-tis)."""
    correction_mode: CorrectionMode = static("truncate")
    """Weights outside ``[correction_min, correction_max]``: truncated to the bound, or set to zero."""
    cispo_bound: CispoBound = static("raw")
    """``raw``: ``min(ratio, eps_high)`` (TRL, Liger); ``interval``: ``clip(ratio, 1-eps_low, 1+eps_high)`` (veRL)."""
    clip_metrics: ClipMetrics = static("trl")
    """Clip fractions after ``delta`` and per sequence at sequence level (trl), or before it and per token (liger)."""
    parity_metrics: bool = static(False)
    """Metrics of how far the ratio is from one: shares of tokens and sequences within three intervals around it."""
    temperature_on: TemperatureOn = static("logits")
    """Temperature divides the logits, or (``mllm-jax``) ``logp`` at temperature one, in the loss and in statistics
    taken with ``objective=``; entropy and the other statistics are then those of temperature one."""
    count_rows: CountRows = static("all")
    """Rows that ``grpo``, ``dr_grpo`` and ``luspo`` divide by: all rows, or rows with a valid token (Tunix)."""
    off_policy_from: OffPolicyFrom = static("rollout")
    """The policy that ``off_policy_threshold`` measures from: the sampler's where it is given, or always ``old``."""

    # -- numbers (traced) -------------------------------------------------------------------------------------------
    eps_low: Number = 0.2
    """Lower clip distance; for ``dppo`` that of the probability, or its binary KL."""
    eps_high: Number = 0.2
    """Upper clip distance; for ``cispo`` with a raw bound, the bound itself; for ``dppo`` as ``eps_low``."""
    delta: Number | None = None
    """Upper bound of the unclipped ratio (two-sided GRPO), and of ``dppo``'s weight (veRL: 3)."""
    dual_clip: Number | None = None
    """Dual-clip constant ``c``: where the advantage is negative the loss is at most ``-c * A``."""
    log_ratio_clamp: Number | None = None
    """Clamp each token's ``logp - old`` to plus or minus this before anything else (Tunix, veRL: 20)."""
    sequence_log_ratio_max: Number | None = None
    """Upper bound of the sequence's log-ratio at the sequence levels (gspo-token of Tunix and veRL: 10)."""
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
    mix: Number | None = None
    """Weight of the reference in the mixture of ``divergence="jsd"``; ``None`` is one half."""
    kl_log_ratio_clamp: Number | None = None
    """Clamp ``ref - logp`` to plus or minus this before the estimator."""
    kl_clamp: Number | None = None
    """Clamp the estimator to plus or minus this."""
    correction_min: Number | None = None
    """Lower bound of the correction weight; ``None`` is no bound."""
    correction_max: Number | None = 2.0
    """Upper bound of the correction weight; ``None`` is no bound."""
    off_policy_threshold: Number | None = None
    """Drop sequences with negative advantage whose mean ``rollout - logp`` exceeds this (see ``off_policy_from``)."""
    sequence_error_max: Number | None = None
    """Drop sequences whose mean ``exp(|logp - rollout|)`` exceeds this, from the loss and its denominator (Tunix'
    ``seq_logprob_error_threshold``; 1 is perfect agreement)."""
    top_entropy: Number | None = None
    """Keep the policy loss only for this fraction of tokens, highest entropy first."""
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
            checks.choice(name, getattr(self, name), allowed)
        checks.numbers(self)
        checks.combination(self)

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        return checks.written(self)

    def replace(self, **changes: Any) -> Objective:
        """A copy with some fields changed, checked again."""
        checks.names(changes, Objective)
        return dataclasses.replace(self, **changes)

    @staticmethod
    def preset(name: str, **overrides: object) -> Objective:
        """A peer's objective by name: ``trl``, ``liger``, ``verl``, ``tunix`` or ``mllm-jax``.

        ``overrides`` are fields of this class; ``from_trl`` and its like take a framework's own names.

        >>> from logitless import Objective
        >>> Objective.preset("trl", beta=0.04).kl_bias_correction
        True
        """
        from logitless.objectives.presets import preset

        return preset(name, **overrides)

    @staticmethod
    def from_trl(config: object = None, **settings: object) -> Objective:
        """TRL's loss from its ``GRPOConfig``, or from keywords under TRL's names (its defaults for the rest).

        Every setting of the loss is mapped or refused by name; what TRL ignores is ignored with a warning. The
        ``dapo`` types divide by the tokens of the generation batch: :func:`logitless.dapo_denominator`. With vLLM's
        importance sampling the loss asks for ``rollout_logp``.

        >>> from logitless import Objective
        >>> Objective.from_trl(loss_type="grpo", epsilon_high=0.28, beta=0.04)
        Objective(kl_bias_correction=True, eps_high=0.28, beta=0.04)
        """
        from logitless.settings.from_trl import from_trl

        return from_trl(config, **settings)

    @staticmethod
    def from_liger(config: object = None, **settings: object) -> Objective:
        """Liger's loss from a ``LigerFusedLinearGRPOLoss``, or from its keywords."""
        from logitless.settings.from_trl import from_liger

        return from_liger(config, **settings)

    @staticmethod
    def from_verl(config: object = None, *, max_length: Number | None = None, **settings: object) -> Objective:
        """veRL's loss from an actor's config, or from keywords under its names (``loss_mode`` as well).

        ``max_length`` is the width T of the arrays, where veRL divides by it.

        >>> from logitless import Objective
        >>> Objective.from_verl(loss_mode="gspo", clip_ratio_low=3e-4, clip_ratio_high=4e-4).level
        'sequence_token'
        """
        from logitless.settings.from_verl import from_verl

        return from_verl(config, max_length=max_length, **settings)

    @staticmethod
    def from_tunix(config: object = None, *, max_length: Number | None = None, **settings: object) -> Objective:
        """Tunix' loss from an ``algo_config``, or from keywords under its names.

        ``max_length`` is the width T of the arrays, where Tunix divides by it. ``sampler_is="token"`` becomes a
        correction that asks for ``rollout_logp``; weights that are already there go in as ``token_weights=`` and need
        no correction.

        >>> from logitless import Objective
        >>> Objective.from_tunix(beta=0.0, loss_algo="gspo-token").sequence_log_ratio_max
        10.0
        """
        from logitless.settings.from_tunix import from_tunix

        return from_tunix(config, max_length=max_length, **settings)

    @staticmethod
    def grpo(**overrides: Any) -> Objective:
        """GRPO: clipped token ratios, the mean over sequences of the mean over their tokens."""
        return Objective(**{"aggregation": "grpo", **overrides})

    @staticmethod
    def dapo(**overrides: Any) -> Objective:
        """DAPO: a higher upper clip (0.28), the mean over all tokens of the generation batch (``denominator=``)."""
        return Objective(**{"aggregation": "dapo", "eps_high": 0.28, **overrides})

    @staticmethod
    def dr_grpo(max_length: Number, **overrides: Any) -> Objective:
        """Dr.GRPO: sums divided by the completion budget ``max_length``. Its advantages are not divided by a standard
        deviation: ``group_advantages(..., scale="none")``."""
        return Objective(**{"aggregation": "dr_grpo", "max_length": max_length, **overrides})

    @staticmethod
    def gspo(**overrides: Any) -> Objective:
        """GSPO: one ratio a sequence, clipped as in the paper (3e-4 and 4e-4)."""
        return Objective(**{"level": "sequence", "eps_low": 3e-4, "eps_high": 4e-4, **overrides})

    @staticmethod
    def gspo_token(**overrides: object) -> Objective:
        """GSPO-token: the value of GSPO's ratio with the gradient of each token's own, clipped as GSPO."""
        return Objective.gspo(**{"level": "sequence_token", **overrides})

    @staticmethod
    def luspo(**overrides: object) -> Objective:
        """LUSPO: one ratio a sequence, clipped as GSPO; the mean over sequences of the sum over their tokens."""
        return Objective.gspo(**{"aggregation": "luspo", **overrides})

    @staticmethod
    def cispo(**overrides: Any) -> Objective:
        """CISPO: the ratio as a constant weight of at most ``eps_high`` (5), the mean over all tokens."""
        return Objective(**{"policy": "cispo", "eps_high": 5.0, "aggregation": "dapo", **overrides})

    @staticmethod
    def sapo(**overrides: Any) -> Objective:
        """SAPO: a soft gate of the ratio, with temperatures of 1 and, where the advantage is not positive, 1.05."""
        return Objective(**{"policy": "sapo", **overrides})

    @staticmethod
    def vespo(**overrides: Any) -> Objective:
        """VESPO: a token weighs what its sequence's ratio says, the mean over all tokens."""
        return Objective(**{"policy": "vespo", "aggregation": "dapo", **overrides})

    @staticmethod
    def gmpo(**overrides: Any) -> Objective:
        """GMPO: the geometric mean of a sequence's ratios, their logs clipped to plus or minus 0.4."""
        return Objective(**{"policy": "gmpo", "eps_low": 0.4, "eps_high": 0.4, **overrides})

    @staticmethod
    def bnpo(**overrides: Any) -> Objective:
        """BNPO: clipped token ratios, the mean over all tokens of the call."""
        return Objective(**{"aggregation": "bnpo", **overrides})

    @staticmethod
    def ppo(**overrides: object) -> Objective:
        """PPO's policy loss: clipped token ratios, the mean over all tokens of the call. Advantages come from a critic,
        one per token: ``advantages [B, T]``."""
        return Objective.bnpo(**overrides)

    @staticmethod
    def reinforce(**overrides: Any) -> Objective:
        """REINFORCE: ``-A logp`` without a ratio, the mean over sequences of the mean over their tokens."""
        return Objective(**{"policy": "reinforce", **overrides})

    @staticmethod
    def rloo(**overrides: object) -> Objective:
        """RLOO: ``-A`` times the log-probability of the whole sequence, the mean over sequences. Advantages use a
        leave-one-out baseline: ``group_advantages(..., baseline="leave_one_out", scale="none")``."""
        return Objective.reinforce(**{"aggregation": "luspo", **overrides})

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
        if self.sequence_error_max is not None:
            return "sequence_error_max averages over the sequence"
        if self.top_entropy is not None:
            return "top_entropy takes a quantile over the batch"
        if self.correction is not None and not old_known:
            return "correction without old_logp weighs by the current log-probabilities"
        return None
