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
    objective, head = _objective(c, arm), c["level"] == "head"
    if c.get("distillation"):
        return _distillation(objective, arm)
    if arm.kind == "baseline":
        from logitless.lab.tools import baselines

        if not head:
            return lambda x, rest: (baselines.logits_loss(arm.form, x[0], objective=objective, **rest), {})
        dtype = arm.logits_dtype
        return lambda x, rest: (
            baselines.head_loss(arm.form, *x, objective=objective, logits_dtype=dtype, **rest),
            {},
        )

    options = logitless.Options(**arm.options)

    def loss(x: tuple[Any, ...], rest: dict[str, Any]) -> Any:
        if head:
            rest = dict(rest)
            if "teacher_hidden" in rest:  # a reference's
                rest["ref_hidden"] = rest.pop("teacher_hidden")
                rest["ref_lm_head"] = logitless.Head(rest.pop("teacher_lm_head"), layout="vh")
            value, metrics = logitless.linear_grpo_loss(
                x[0], logitless.Head(x[1], layout="vh"), objective=objective, options=options, **rest
            )
        else:
            value, metrics = logitless.grpo_loss(x[0], objective=objective, options=options, **rest)
        return value, {k: metrics[k] for k in SPARSE_METRICS if k in metrics}

    return loss


def _distillation(settings: Any, arm: Arm) -> Callable[..., Any]:
    """:func:`_loss` of a case with a teacher."""
    if arm.kind == "baseline":
        from logitless.lab.tools import dense_divergence

        def dense(x: tuple[Any, ...], rest: dict[str, Any]) -> Any:
            given = (*x, rest["teacher_hidden"], rest["teacher_lm_head"], rest["mask"])
            value = dense_divergence.loss(arm.form, *given, distillation=settings, logits_dtype=arm.logits_dtype)
            return value, {}

        return dense
    options = logitless.Options(**arm.options)

    def loss(x: tuple[Any, ...], rest: dict[str, Any]) -> Any:
        teacher = logitless.Head(rest["teacher_lm_head"], layout="vh")
        value, metrics = logitless.linear_distillation_loss(
            x[0], logitless.Head(x[1], layout="vh"), rest["teacher_hidden"], teacher, mask=rest["mask"],
            distillation=settings, options=options,
        )  # fmt: skip
        return value, {k: metrics[k] for k in SPARSE_METRICS if k in metrics}

    return loss


def _logprobs(c: dict[str, Any], arm: Arm) -> Callable[..., Any]:
    """Statistics of an old or reference policy: no gradient, no loss."""
    if arm.kind == "baseline":
        raise ValueError("call: logprobs is the library's; a baseline has call: loss")

    options = logitless.Options(**arm.options)

    def forward(x: tuple[Any, ...], rest: dict[str, Any]) -> dict[str, Any]:
        if c["level"] == "head":
            stats = logitless.linear_logprobs(
                x[0], logitless.Head(x[1], layout="vh"), rest["targets"], mask=rest["mask"], options=options
            )
        else:
            stats = logitless.logprobs(x[0], rest["targets"], mask=rest["mask"], options=options)
        return dict(stats=stats)

    return forward
