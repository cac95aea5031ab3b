"""The two calls at the head, as ``train.loss`` says: the library's, or the form that most trainers have (``naive``).

``naive`` keeps float32 ``[B, C, V]`` log-probabilities and differentiates through a gather; it is there to be compared
with. Its statistics are the log-probabilities alone: no entropy and no top-1 rate in the metrics, and objectives that
need more are refused by :mod:`logitless.train.config_check`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool

from logitless.api import linear_grpo_loss, linear_logprobs
from logitless.core.options import Head, Options
from logitless.core.stats import TokenStats
from logitless.lab.tools.baselines import naive_head_logp
from logitless.objectives.inputs import divided
from logitless.objectives.metrics import Metrics
from logitless.objectives.objective import Objective
from logitless.objectives.policy_loss import policy_loss
from logitless.train.config import NAIVE, TrainConfig, loss_backend
from logitless.train.train_mesh import loss_sharding

NOT_MEASURED = ("entropy", "is_top1")
"""Metrics that the naive form does not have."""


def head_options(config: TrainConfig, **more: Any) -> Options:
    """How both of the library's calls are to be carried out; ``more`` are other options."""
    loss = config.train.loss
    return Options(
        backend=loss_backend(config),
        logits_dtype=loss.logits_dtype,
        head_grad_dtype=loss.head_grad_dtype,
        chunk_size=loss.chunk_size or None,
        memory_budget=loss.memory_budget or None,
        **more,
    )


def _naive_logp(objective: Objective, hidden: Array, head: Array, targets: Array, dtype: Any) -> Array:
    """What the naive form has for the objective: no temperature of the logits, but one of the log-probabilities."""
    return divided(naive_head_logp(hidden, head, targets, dtype), objective.temperature)


def make_head_logp(config: TrainConfig, objective: Objective) -> Callable[..., Array]:
    """``logp(hidden, head, targets, mask)``: ``[B, C]``, 0 where the mask is."""
    logits_dtype = jnp.dtype(config.train.loss.logits_dtype)
    if loss_backend(config) == NAIVE:

        def naive(hidden: Array, head: Array, targets: Array, mask: Bool[Array, "B C"]) -> Array:
            return jnp.where(mask, _naive_logp(objective, hidden, head, targets, logits_dtype), 0.0)

        return naive

    options, sharding = head_options(config), loss_sharding(config)

    def library(hidden: Array, head: Array, targets: Array, mask: Bool[Array, "B C"]) -> Array:
        weight = Head(head, layout="vh")
        return linear_logprobs(
            hidden, weight, targets, mask=mask, objective=objective, sharding=sharding, options=options
        ).logp

    return library


def make_head_loss(config: TrainConfig, objective: Objective) -> Callable[..., tuple[Array, Metrics]]:
    """``loss(hidden, head, targets, **arrays)`` with the arrays of :func:`logitless.linear_grpo_loss`."""
    if loss_backend(config) == NAIVE:
        logits_dtype = jnp.dtype(config.train.loss.logits_dtype)

        def naive(hidden: Array, head: Array, targets: Array, **arrays: Any) -> tuple[Array, Metrics]:
            logp = _naive_logp(objective, hidden, head, targets, logits_dtype)
            none, no = jnp.zeros_like(logp), jnp.zeros(logp.shape, bool)
            loss, metrics = policy_loss(
                TokenStats(logp, none, none, none, none, no, none, none), objective=objective, **arrays
            )
            return loss, {k: v for k, v in metrics.items() if k not in NOT_MEASURED}

        return naive

    options = head_options(config, sparse_backward=config.train.loss.sparse_backward)
    sharding = loss_sharding(config)

    def library(hidden: Array, head: Array, targets: Array, **arrays: Any) -> tuple[Array, Metrics]:
        weight = Head(head, layout="vh")
        return linear_grpo_loss(
            hidden, weight, targets, objective=objective, sharding=sharding, options=options, **arrays
        )

    return library
