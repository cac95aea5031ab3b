"""The distillation loss over ``[B, T]`` tokens and its gradient, in float64.

    l_t  = soft_weight T_t^2 divergence_t - hard_weight logp_t        T_t^2 with ``temperature_squared`` alone
    loss = sum_t factor_t l_t

The divergence is at temperature ``T_t``, ``logp`` of the target at temperature one. The aggregation for policy losses
gives ``factor_t``: minus the gradient of REINFORCE with unit advantages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from logitless.objectives.objective import Objective
from logitless.oracle.divergences import divergence, divergence_vjp
from logitless.oracle.losses import policy_loss_grad
from logitless.oracle.policy_terms import number, number_or_none
from logitless.oracle.rows import Gradients, Rows
from logitless.oracle.token_stats import Floats, to_float64

if TYPE_CHECKING:
    from logitless.objectives.distillation import Distillation


def _factors(
    o: Distillation,
    shape: tuple[int, ...],
    mask: ArrayLike | None,
    segment_ids: ArrayLike | None,
    denominator: ArrayLike | None,
) -> Floats:
    """Factor of each token's loss, 0 if masked."""
    reinforce = Objective(
        policy="reinforce", aggregation=o.aggregation, count_rows=o.count_rows, max_length=o.max_length
    )
    ones = np.ones(shape)
    return -policy_loss_grad(
        ones, None, objective=reinforce, advantages=ones, mask=mask, segment_ids=segment_ids, denominator=denominator
    )[1]


def distillation_loss(
    student: Rows,
    teacher: Rows,
    *,
    objective: Distillation,
    targets: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    denominator: ArrayLike | None = None,
) -> tuple[float, Gradients]:
    """``(loss, gradients)`` by what the student's rows are made of. A ``hard_weight`` needs ``targets [B, T]``."""
    o, hard = objective, number_or_none(objective.hard_weight)
    if hard is not None and targets is None:
        raise ValueError(f"hard_weight={hard} needs targets.")
    factor = _factors(o, student.shape, mask, segment_ids, denominator)
    tau: Floats = np.broadcast_to(to_float64(1.0 if o.temperature is None else o.temperature), student.shape)
    soft: Floats = number(o.soft_weight) * (np.square(tau) if o.temperature_squared else np.ones(student.shape))
    how: dict[str, Any] = dict(
        divergence=o.divergence, mix=0.5 if o.mix is None else number(o.mix), mask=mask, targets=targets
    )
    live = factor != 0

    value = np.where(live, factor * soft * divergence(student, teacher, temperature=tau, **how).divergence, 0.0)
    made = divergence_vjp(student, teacher, factor * soft, temperature=tau, **how)
    if hard is not None:
        value -= np.where(live, factor * hard * divergence(student, teacher, **how).logp, 0.0)
        made = made.plus(divergence_vjp(student, teacher, None, g_logp=-hard * factor, **how))
    return float(value.sum()), made
