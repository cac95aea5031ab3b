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

from logitless.api import linear_grpo_loss, linear_logprobs
from logitless.core.options import Head, Options
from logitless.core.shapes import Bool
from logitless.core.stats import TokenStats
from logitless.lab.tools.baselines import naive_head_logp
from logitless.objectives.inputs import divided
from logitless.objectives.loss import Metrics
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


def _naive(config: TrainConfig, objective: Objective, hidden: Array, head: Array, targets: Array) -> Array:
    """The naive form's log-probabilities: no temperature of the logits, but one of the log-probabilities."""
    dtype = jnp.dtype(config.train.loss.logits_dtype)
    return divided(naive_head_logp(hidden, head, targets, dtype), objective.temperature)


def make_head_logp(config: TrainConfig, objective: Objective) -> Callable[..., Array]:
    """``logp(hidden, head, targets, mask, support)``: ``[B, C]``, 0 where the mask is."""
    naive = loss_backend(config) == NAIVE
    library: dict[str, Any] = {} if naive else dict(sharding=loss_sharding(config), options=head_options(config))

    def logp(
        hidden: Array, head: Array, targets: Array, mask: Bool[Array, "B C"], support: Array | None = None
    ) -> Array:
        if naive:
            return jnp.where(mask, _naive(config, objective, hidden, head, targets), 0.0)
        given = dict(support=support, mask=mask, objective=objective, **library)
        return linear_logprobs(hidden, Head(head, layout="vh"), targets, **given).logp

    return logp


def make_head_loss(config: TrainConfig, objective: Objective) -> Callable[..., tuple[Array, Metrics]]:
    """``loss(hidden, head, targets, **arrays)`` with the arrays of :func:`logitless.linear_grpo_loss`."""
    naive = loss_backend(config) == NAIVE
    sparse = config.train.loss.sparse_backward
    library: dict[str, Any] = {}
    if not naive:
        library = dict(sharding=loss_sharding(config), options=head_options(config, sparse_backward=sparse))

    def loss(hidden: Array, head: Array, targets: Array, **arrays: Any) -> tuple[Array, Metrics]:
        if not naive:
            weight = Head(head, layout="vh")
            return linear_grpo_loss(hidden, weight, targets, objective=objective, **library, **arrays)
        logp = _naive(config, objective, hidden, head, targets)
        none, no = jnp.zeros_like(logp), jnp.zeros(logp.shape, bool)
        stats = TokenStats(logp, none, none, none, none, no, none, none)
        value, metrics = policy_loss(stats, objective=objective, **arrays)
        return value, {k: v for k, v in metrics.items() if k not in NOT_MEASURED}

    return loss
