"""The program of an arm: ``f(x, rest)`` with the loss, its gradients, and what a sparse backward reports.

Only public names are called, so another checkout's library can replace this library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import logitless
from logitless.lab.bench.case import Arm

SPARSE_METRICS = (
    "left_out_mass", "left_out_mass_max", "hard_rows", "active_columns", "backward_columns", "dense_chunks"
)  # fmt: skip
"""Metrics of a sparse backward, by their public names: in another tree they may be declared elsewhere."""


def program(c: dict[str, Any], arm: Arm) -> jax.stages.Wrapped:
    """A jitted ``f(x, rest)`` that gives ``loss``, ``grads`` and ``metrics``; with ``call="loss"`` no gradients, with
    ``call="logprobs"`` the statistics alone; a copy reads and writes ``x`` once."""
    if arm.kind == "copy":
        return jax.jit(lambda x, rest: dict(copy=x[0] + jnp.ones((), x[0].dtype)))
    if arm.call == "logprobs":
        return jax.jit(_logprobs(c, arm))
    loss = _loss(c, arm)

    def gradients(x: tuple[Any, ...], rest: dict[str, Any]) -> dict[str, Any]:
        moved, fixed = (x[:1], x[1:]) if arm.frozen_head else (x, ())
        step = jax.value_and_grad(lambda moved: loss((*moved, *fixed), rest), has_aux=True)
        (value, metrics), grads = step(moved)
        return dict(loss=value, metrics=metrics, grads=grads)

    def alone(x: tuple[Any, ...], rest: dict[str, Any]) -> dict[str, Any]:
        value, metrics = loss(x, rest)
        return dict(loss=value, metrics=metrics)

    return jax.jit(gradients if arm.call == "gradients" else alone)


def _objective(c: dict[str, Any], arm: Arm) -> Any:
    """The objective, or the distillation's settings, of an arm."""
    if c.get("distillation"):
        return logitless.Distillation(**{**c["distillation"], **arm.objective})
    return logitless.Objective().replace(**{**c["objective"], **arm.objective})


def _loss(c: dict[str, Any], arm: Arm) -> Callable[..., Any]:
    """``loss(x, rest) -> (loss, metrics)``; only a sparse backward has metrics, so that nothing else is timed."""
    objective = _objective(c, arm)
    if arm.kind == "baseline":
        return lambda x, rest: (_dense(c, arm, objective, x, rest), {})
    options = logitless.Options(**arm.options)

    def loss(x: tuple[Any, ...], rest: dict[str, Any]) -> Any:
        given = dict(rest, options=options)
        hidden, weight = given.pop("teacher_hidden", None), given.pop("teacher_lm_head", None)
        other = None if weight is None else logitless.Head(weight, layout="vh")
        if c["level"] == "logits":
            value, metrics = logitless.grpo_loss(x[0], objective=objective, **given)
        elif c.get("distillation"):
            given = {k: given[k] for k in ("mask", "options")}
            head = logitless.Head(x[1], layout="vh")
            value, metrics = logitless.linear_distillation_loss(
                x[0], head, hidden, other, distillation=objective, **given
            )
        else:
            given |= {} if other is None else dict(ref_hidden=hidden, ref_lm_head=other)
            head = logitless.Head(x[1], layout="vh")
            value, metrics = logitless.linear_grpo_loss(x[0], head, objective=objective, **given)
        return value, {k: metrics[k] for k in SPARSE_METRICS if k in metrics}

    return loss


def _dense(c: dict[str, Any], arm: Arm, objective: Any, x: tuple[Any, ...], rest: dict[str, Any]) -> Any:
    """The loss of a dense form."""
    from logitless.lab.tools import baselines, dense_divergence

    if c["level"] == "logits":
        return baselines.logits_loss(arm.form, x[0], objective=objective, **rest)
    if c.get("distillation"):
        given = (*x, rest["teacher_hidden"], rest["teacher_lm_head"], rest["mask"])
        return dense_divergence.loss(arm.form, *given, distillation=objective, logits_dtype=arm.logits_dtype)
    return baselines.head_loss(arm.form, *x, objective=objective, logits_dtype=arm.logits_dtype, **rest)


def _logprobs(c: dict[str, Any], arm: Arm) -> Callable[..., Any]:
    """Statistics of an old or reference policy: no gradient, no loss."""
    if arm.kind == "baseline":
        raise ValueError("call: logprobs is the library's; a baseline has call: loss")
    options = logitless.Options(**arm.options)

    def forward(x: tuple[Any, ...], rest: dict[str, Any]) -> dict[str, Any]:
        given = dict(mask=rest["mask"], options=options)
        if c["level"] == "logits":
            return dict(stats=logitless.logprobs(x[0], rest["targets"], **given))
        return dict(stats=logitless.linear_logprobs(x[0], logitless.Head(x[1], layout="vh"), rest["targets"], **given))

    return forward
