"""The :class:`Distillation`: which divergence from a teacher, with which numbers."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax.numpy as jnp

from logitless.core.pytree import register, static
from logitless.objectives import checks
from logitless.objectives.objective import AGGREGATION_ALIASES, Aggregation, CountRows, Divergence, Number, Objective

Outside = Literal["tail", "renormalised"]
_CHOICES: dict[str, tuple[object, ...]] = {
    "divergence": get_args(Divergence),
    "outside": get_args(Outside),
    "temperature_squared": (False, True),
    "overlap": (False, True),
    "aggregation": get_args(Aggregation),
    "count_rows": get_args(CountRows),
}
_OTHER_DIVERGENCES = {
    "kl": "KL(teacher || student) is 'forward_kl', KL(student || teacher) is 'reverse_kl'.",
    "fkl": "Here: 'forward_kl'.",
    "rkl": "Here: 'reverse_kl'.",
    "gkd": "It is TRL's: Distillation.from_trl(beta=...) takes its beta.",
    "mixed": "It is NeMo's sum of two KLs; here 'forward_kl' or 'reverse_kl'.",
    "forward_kl_topk": "It is veRL's: Distillation.from_verl(...) takes its settings.",
}
_THEIR_NAMES = {
    "beta": "It is TRL's and Liger's: Distillation.from_trl(beta=...) takes it; here divergence and mix say it.",
    "alpha": "It is Tunix': Distillation.from_tunix(alpha=...) takes it; here soft_weight and hard_weight say it.",
    "distill_alpha": "It is MaxText's: soft_weight=alpha, hard_weight=1 - alpha, with temperature_squared=True.",
    "distill_temperature": "Here: temperature, with temperature_squared=True.",
    "weight_soft_loss": "Here: soft_weight.",
    "weight_hard_loss": "Here: hard_weight.",
    "kl_type": "It is NeMo's: Distillation.from_nemo(kl_type=...) takes it; here divergence says it.",
    "mixed_kl_weight": "It is NeMo's: here divergence is one of 'forward_kl', 'reverse_kl', 'jsd'.",
    "loss_mode": "It is veRL's: Distillation.from_verl(loss_mode=...) takes it; here divergence says it.",
    "distillation_loss_coef": "Here: soft_weight.",
    "kl": "Here: divergence.",
    "loss_agg_mode": "Here: aggregation, which takes the same values.",
    "max_completion_length": "Here: max_length, with aggregation='dr_grpo'.",
}
"""Field names of other libraries, and ours."""


@checks.named_fields(_THEIR_NAMES)
@register
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Distillation:
    """A distillation loss. Frozen, hashable by structure, and a pytree as :class:`~logitless.Objective` is.

    A token's loss is ``soft_weight * T^2 * divergence - hard_weight * logp``: the divergence of the student's
    distribution ``p`` from the teacher's ``q``, both at temperature ``T``, and the student's log-probability of the
    target at temperature one. ``T^2`` is there with ``temperature_squared``, the second term with a ``hard_weight``.

    >>> from logitless import Distillation
    >>> Distillation(divergence="jsd", mix=0.1, temperature=2.0)
    Distillation(divergence='jsd', mix=0.1, temperature=2.0)
    >>> Distillation(divergence="jsd", mix=1.0)
    Traceback (most recent call last):
    ValueError: Distillation: mix=1.0 lies within 0.001 of 1, where JSD tends to 0 and
    trains nothing; say divergence='reverse_kl' if that is meant.
    """

    # -- choices (static) -------------------------------------------------------------------------------------------
    divergence: Divergence = static("reverse_kl")
    """``forward_kl``: KL(q || p); ``reverse_kl``: KL(p || q); ``jsd``: ``mix KL(q || m) + (1 - mix) KL(p || m)``."""
    outside: Outside = static("tail")
    """What becomes of the other ids of a teacher that is given at its likeliest ids alone. ``tail``: all their mass
    together is one more outcome; ``renormalised``: both sides are normalised over the teacher's ids."""
    temperature_squared: bool = static(False)
    """Multiply the divergence by the square of the temperature (Tunix, MaxText; TRL, Liger and NeMo do not)."""
    overlap: bool = static(False)
    """Report the metric ``overlap`` for a ``TopK`` teacher: the share of the teacher's ids among the student's K
    likeliest ids. Costs one more matmul and a top-k of the logits."""
    aggregation: Aggregation = static("bnpo")
    """How token losses become one number; veRL's and Tunix' names are accepted and mapped."""
    count_rows: CountRows = static("all")
    """Rows that ``grpo``, ``dr_grpo`` and ``luspo`` divide by: all rows, or rows with a valid token."""

    # -- numbers (traced) -------------------------------------------------------------------------------------------
    mix: Number | None = None
    """Share of the teacher in ``jsd``'s mixture ``m = (1 - mix) p + mix q``; ``None`` is one half."""
    temperature: Number | None = None
    """Divides the logits of student and teacher in the divergence; a scalar or one value per token. ``None`` is one."""
    soft_weight: Number = 1.0
    """Weight of the divergence."""
    hard_weight: Number | None = None
    """Weight of the target's ``-logp``, which is at temperature one whatever ``temperature`` says."""
    max_length: Number | None = None
    """``L_max`` of ``dr_grpo``."""

    def __post_init__(self) -> None:
        if isinstance(self.aggregation, str) and self.aggregation in AGGREGATION_ALIASES:
            object.__setattr__(self, "aggregation", AGGREGATION_ALIASES[self.aggregation])
        if isinstance(self.divergence, str) and self.divergence.casefold() in _OTHER_DIVERGENCES:
            _refuse(f"divergence={self.divergence!r} is not known. {_OTHER_DIVERGENCES[self.divergence.casefold()]}")
        for name, allowed in _CHOICES.items():
            checks.choice(name, getattr(self, name), allowed, "Distillation")
        checks.numbers(self)
        _combination(self)

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        return checks.written(self)

    def replace(self, **changes: Any) -> Distillation:
        """A copy with some fields changed, checked again."""
        checks.names(changes, Distillation, _THEIR_NAMES)
        return dataclasses.replace(self, **changes)

    def objectives(self) -> tuple[Objective, Objective | None]:
        """The loss as objectives of one sweep each: the soft part, with a hard part at the same temperature; and the
        hard part where it has another temperature."""
        beta, t = self.soft_weight, self.temperature
        if self.temperature_squared and t is not None:
            if jnp.ndim(t):
                _refuse("temperature_squared=True takes one temperature, and it has one per token.")
            beta = beta * t * t
        hard = Objective(
            policy="reinforce", aggregation=self.aggregation, count_rows=self.count_rows, max_length=self.max_length
        )
        soft = hard.replace(kl="full", beta=beta, divergence=self.divergence, mix=self.mix, temperature=t)
        apart = self.hard_weight is not None and t is not None and not (isinstance(t, float) and t == 1)
        return soft, hard if apart else None

    @staticmethod
    def from_trl(config: object = None, **settings: object) -> Distillation:
        """TRL's loss from a ``DistillationConfig`` or a ``GKDConfig``, or from keywords of the former.

        ``GKDConfig.temperature`` is for sampling alone, and its loss is at temperature one. TRL divides by the valid
        tokens of the whole batch: pass their count to the loss as ``denominator=`` where the batch is split.

        >>> from logitless import Distillation
        >>> Distillation.from_trl(beta=0.5, temperature=2.0)
        Distillation(divergence='jsd', mix=0.5, temperature=2.0)
        """
        from logitless.settings.distillation_settings import from_trl

        return from_trl(config, **settings)

    @staticmethod
    def from_liger(config: object = None, **settings: object) -> Distillation:
        """Liger's loss from a ``LigerFusedLinearJSDLoss``, or from its keywords.

        >>> from logitless import Distillation
        >>> Distillation.from_liger(beta=0.0, weight_hard_loss=0.0, weight_soft_loss=1.0)
        Distillation(divergence='forward_kl')
        """
        from logitless.settings.distillation_settings import from_liger

        return from_liger(config, **settings)

    @staticmethod
    def from_tunix(config: object = None, **settings: object) -> Distillation:
        """Tunix' loss from a ``LogitStrategy``, or from its keywords.

        Tunix divides by all positions, padding included; here a ``mask`` leaves padding out of sum and count.

        >>> from logitless import Distillation
        >>> Distillation.from_tunix(temperature=2.0, alpha=0.75)
        Distillation(divergence='forward_kl', temperature_squared=True, temperature=2.0, soft_weight=0.75, \
hard_weight=0.25)
        """
        from logitless.settings.distillation_settings import from_tunix

        return from_tunix(config, **settings)

    @staticmethod
    def from_nemo(config: object = None, **settings: object) -> Distillation:
        """NeMo-RL's loss from its ``loss_fn`` section, or from keywords, with ``topk_logits_k`` alongside.

        NeMo-RL compares the teacher's top-k ids alone, and this loss the whole vocabulary, so ``topk_logits_k=None``
        has to say that the whole vocabulary is meant.

        >>> from logitless import Distillation
        >>> Distillation.from_nemo(kl_type="forward", topk_logits_k=None)
        Distillation(divergence='forward_kl')
        """
        from logitless.settings.distillation_settings import from_nemo

        return from_nemo(config, **settings)

    @staticmethod
    def from_verl(config: object = None, *, max_length: Number | None = None, **settings: object) -> Distillation:
        """veRL's loss from a ``DistillationLossConfig``, or from keywords, with the actor's ``loss_agg_mode``.

        veRL's only loss over more than the sampled token, ``forward_kl_topk``, drops the mass outside the teacher's
        top-k; ``topk=None`` and the clamps as ``None`` have to say that the whole vocabulary is meant. ``max_length``
        is the width T of the arrays, where veRL divides by it.

        >>> from logitless import Distillation
        >>> Distillation.from_verl(loss_mode="forward_kl_topk", topk=None, loss_max_clamp=None,
        ...                        log_prob_min_clamp=None, use_policy_gradient=False)
        Distillation(divergence='forward_kl', count_rows='non_empty')
        """
        from logitless.settings.distillation_settings import from_verl

        return from_verl(config, max_length=max_length, **settings)


def _refuse(why: str) -> None:
    raise ValueError(f"Distillation: {why}")


def _combination(o: Distillation) -> None:
    """Combinations that make no sense, or train nothing, are refused by name."""
    checks.mixture("Distillation", o.divergence, o.mix)
    if o.temperature_squared and o.temperature is None:
        _refuse("temperature_squared=True has no effect without temperature.")
    if all(w is None or (isinstance(w, float) and w == 0) for w in (o.soft_weight, o.hard_weight)):
        _refuse(f"soft_weight=0 with hard_weight={o.hard_weight} trains nothing.")
    if o.aggregation == "dr_grpo" and o.max_length is None:
        _refuse("aggregation='dr_grpo' divides by batch * max_length; give max_length (L_max, the completion budget).")
    if o.aggregation != "dr_grpo" and o.max_length is not None:
        _refuse(f"max_length belongs to aggregation='dr_grpo' and would be ignored with {o.aggregation!r}.")
