"""Losses from logits, or from hidden states and the head, with the gradients of all of them, in float64.

Statistics, policy loss, then the chain rule: ``dlogits = dlogp d logp/d logits + dentropy d entropy/d logits``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from logitless.oracle.linear import linear_token_stats, linear_token_stats_vjp
from logitless.oracle.losses import policy_loss_grad
from logitless.oracle.rows import HeadLayout
from logitless.oracle.token_stats import Floats, token_stats, token_stats_vjp

if TYPE_CHECKING:
    from logitless.objectives.objective import Objective


def _temperature(o: Objective) -> ArrayLike:
    """The temperature of the logits: the objective's, unless that one divides the log-probability instead."""
    return 1.0 if o.temperature is None or o.temperature_on == "logp" else o.temperature


def _divisor(o: Objective) -> Floats:
    """Divisor for log-probabilities: the objective's temperature, if it acts on logp."""
    return np.asarray(1.0 if o.temperature is None or o.temperature_on == "logits" else o.temperature, np.float64)


def grpo_loss(
    logits: ArrayLike,
    targets: ArrayLike,
    *,
    objective: Objective,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    softcap: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    vocab_size: int | None = None,
    **loss_inputs: Any,
) -> tuple[float, Floats]:
    """``(loss, dlogits)`` of ``logits [B, T, V]``.

    ``loss_inputs`` are the other arguments of :func:`logitless.oracle.policy_loss`: ``old_logp``, ``ref_logp``,
    ``rollout_logp``, ``token_weights``, ``segment_ids``, ``denominator``, ``entropy_denominator``.
    """
    options: dict[str, Any] = {
        "temperature": _temperature(objective),
        "softcap": softcap,
        "scale": scale,
        "vocab_size": vocab_size,
        "mask": mask,
    }
    stats, divisor = token_stats(logits, targets, **options), _divisor(objective)
    loss, dlogp, dentropy = policy_loss_grad(
        stats.logp / divisor, stats.entropy, objective=objective, advantages=advantages, mask=mask, **loss_inputs
    )
    return loss, token_stats_vjp(logits, targets, dlogp / divisor, dentropy, None, **options)


def linear_grpo_loss(
    hidden: ArrayLike,
    lm_head: ArrayLike,
    targets: ArrayLike,
    *,
    objective: Objective,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    softcap: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    vocab_size: int | None = None,
    head_layout: HeadLayout = "vh",
    ref_hidden: ArrayLike | None = None,
    ref_lm_head: ArrayLike | None = None,
    ref_bias: ArrayLike | None = None,
    **loss_inputs: Any,
) -> tuple[float, Floats, Floats, Floats | None]:
    """``(loss, dhidden, dlm_head, dbias)`` of ``hidden [B, T, H]``; ``loss_inputs`` as in :func:`grpo_loss`.

    ``ref_hidden`` and ``ref_lm_head`` are what ``ref_logp`` is made of, by the same transform.
    """
    options: dict[str, Any] = {
        "bias": bias,
        "temperature": _temperature(objective),
        "softcap": softcap,
        "scale": scale,
        "vocab_size": vocab_size,
        "mask": mask,
        "head_layout": head_layout,
    }
    divisor = _divisor(objective)
    if ref_hidden is not None:
        assert ref_lm_head is not None
        reference = linear_token_stats(ref_hidden, ref_lm_head, targets, **dict(options, bias=ref_bias)).logp
        loss_inputs["ref_logp"] = reference / divisor
    stats = linear_token_stats(hidden, lm_head, targets, **options)
    loss, dlogp, dentropy = policy_loss_grad(
        stats.logp / divisor, stats.entropy, objective=objective, advantages=advantages, mask=mask, **loss_inputs
    )
    return loss, *linear_token_stats_vjp(hidden, lm_head, targets, dlogp / divisor, dentropy, None, **options)
