"""An entropy coefficient that follows the entropy: up while the policy is too sure of itself, down while it is not."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

from logitless.core.pytree import register
from logitless.objectives.loss import Metric
from logitless.objectives.objective import Number


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveEntropy:
    """The state of an adaptive entropy bonus, as TRL has it: numbers, a pytree, and one pure update a step.

    The coefficient of a step was settled by the steps before it: ``applied`` is ``coef`` if the last entropy was at or
    below ``target``, and 0 if it was above (and in the first step, when none was measured yet). After each step
    ``coef`` moves by ``step`` within ``[low, high]``.

    >>> from logitless import AdaptiveEntropy, Objective
    >>> control = AdaptiveEntropy(coef=0.01, target=0.5, step=0.001)
    >>> float(control.applied)
    0.0
    >>> control = control.update(0.3)  # or metrics["bonus_entropy"] of the loss
    >>> objective = Objective().replace(entropy_coef=control.applied)
    >>> round(float(objective.entropy_coef), 4)
    0.011
    """

    coef: Number
    target: Number
    step: Number
    """How far the coefficient moves in one update (TRL: ``entropy_coef_delta``)."""
    low: Number = 0.0
    high: Number = 1.0
    last: Number = math.inf
    """The entropy of the last step; infinite before the first."""

    @staticmethod
    def from_trl(config: object = None, **settings: object) -> AdaptiveEntropy:
        """From a ``GRPOConfig``, or keywords under its names. Use it with ``Objective.from_trl(config,
        use_adaptive_entropy=False, entropy_coef=0.0)``.

        >>> from logitless import AdaptiveEntropy
        >>> AdaptiveEntropy.from_trl(entropy_coef=0.01, entropy_target=0.4).target
        0.4
        """
        from logitless.settings.from_trl import ADAPTIVE_ENTROPY as names
        from logitless.settings.reader import read

        s = read(names, None if config is None else {k: getattr(config, k) for k in names.loss}, settings)
        return AdaptiveEntropy(
            coef=s["entropy_coef"],
            target=s["entropy_target"],
            step=s["entropy_coef_delta"],
            low=s["entropy_coef_min"],
            high=s["entropy_coef_max"],
        )

    @property
    def applied(self) -> Array:
        """The coefficient of the coming step: ``objective.replace(entropy_coef=control.applied)``."""
        return jnp.where(jnp.asarray(self.last) <= self.target, self.coef, 0.0)

    def update(self, entropy: Metric | Array | float) -> AdaptiveEntropy:
        """The state after a step whose mean entropy this was: a number, or the metric ``bonus_entropy`` reduced over
        its micro-batches and devices. A step without a token counts as one of entropy 0, as it does in TRL."""
        if isinstance(entropy, tuple):
            entropy = entropy[0] / jnp.maximum(entropy[1], 1.0)
        entropy = jnp.asarray(entropy, jnp.float32)
        up, down = jnp.minimum(self.coef + self.step, self.high), jnp.maximum(self.coef - self.step, self.low)
        return dataclasses.replace(self, coef=jnp.where(entropy <= self.target, up, down), last=entropy)
