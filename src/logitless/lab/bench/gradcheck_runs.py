"""A gradcheck's inputs, and the same loss (or statistics) and gradients three ways: backend, reference, float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from logitless import oracle
from logitless.api import grpo_loss, linear_grpo_loss, linear_logprobs, logprobs
from logitless.core.options import Head, Options
from logitless.core.registry import KERNELS
from logitless.lab.bench import divergence_runs, model_inputs, realistic, synthetic_inputs
from logitless.lab.bench.gradcheck_config import DTYPES, GradcheckConfig, axes_of
from logitless.lab.plan.mesh import AXES
from logitless.mesh.sharding import Sharding
from logitless.objectives.loss import metric_values
from logitless.objectives.objective import Objective

STATISTICS = ("logp", "entropy", "lse")
OF_A_PAIR = ("divergence", "entropy", "logp")
"""Statistics to compare: for a single distribution, and for a student with a teacher."""


@dataclasses.dataclass(frozen=True)
class Found:
    """Result of a run; ``loss`` is the weighted sum of the statistics if those are requested."""

    loss: float
    grads: list[np.ndarray]
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    statistics: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    loss_alone: float | None = None  # without a gradient


def transform_of(c: GradcheckConfig) -> dict[str, Any]:
    """Softcap, scale and padding of the vocabulary, as the calls take them."""
    return dict(softcap=c.softcap or None, scale=c.scale or None, vocab_size=c.vocab_size or None)


def cotangents(c: GradcheckConfig, mask: np.ndarray) -> dict[str, np.ndarray]:
    """Random weights of each statistic of each live token, for ``call: logprobs``."""
    rng = np.random.default_rng(c.seed + 1)
    names = STATISTICS if c.divergence == "off" else OF_A_PAIR
    return {k: (rng.standard_normal(mask.shape) * mask).astype(np.float32) for k in names}


def _sharding(c: GradcheckConfig) -> Sharding:
    """Rows over data and fsdp; the vocabulary over tensor, and that part of the head over fsdp."""
    mesh = jax.make_mesh(tuple(axes_of(c).values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    if c.level == "logits":
        return Sharding(mesh, tokens=P(("data", "fsdp")), vocab="tensor")
    return Sharding(mesh, tokens=P(("data", "fsdp")), head=P(("tensor", "fsdp")))


def arrays(c: GradcheckConfig, objective: Objective) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """``(differentiable arrays, the rest)``, on the host."""
    rng = np.random.default_rng(c.seed)
    rest = synthetic_inputs.token_inputs(c.batch, c.tokens, max(c.vocab_size or c.vocab, 1), rng)
    dtype = DTYPES[c.dtype]
    hidden = None
    if c.inputs == "model":
        found = model_inputs.hidden_and_head(c.model, c.layers, c.vocab, c.batch, c.tokens, c.seed)
        hidden, rest["targets"] = found[:2], found[2]
    if c.level == "logits":
        z = (
            synthetic_inputs.logits(c.inputs, rest["targets"], c.vocab, rng)
            if hidden is None
            else hidden[0] @ hidden[1].T
        )
        z = z * np.float32(c.spread / 3.0) if c.inputs == "ordinary" else z
        x: tuple[np.ndarray, ...] = (z.astype(dtype),)
        logp = oracle.token_stats(x[0], rest["targets"], temperature=c.temperature, **transform_of(c)).logp
    else:
        if c.inputs == "realistic":
            states, head = realistic.realistic_head(c.batch * c.tokens, c.hidden, c.vocab, c.seed, dtype)
            rest["targets"] = np.asarray(
                realistic.sample_targets(jnp.asarray(states), jnp.asarray(head), c.seed)
            ).reshape(c.batch, c.tokens)
            hidden = states.reshape(c.batch, c.tokens, -1), head
        made = hidden or synthetic_inputs.hidden_and_head(c.inputs, rest["targets"], c.hidden, c.vocab, rng)
        x = tuple(a.astype(dtype) for a in made)
        options: dict[str, Any] = dict(temperature=c.temperature, head_layout="vh", **transform_of(c))
        logp = oracle.linear_token_stats(x[0], x[1], rest["targets"], **options).logp
    noise = rng.standard_normal(rest["targets"].shape)
    if c.divergence != "off":
        return x, rest | divergence_runs.teacher(c, x, rng)
    rest["old_logp"] = (logp + c.old_logp_noise_scale * noise).astype(np.float32)
    if objective.beta is not None:
        rest["ref_logp"] = (logp + 0.1 * rng.standard_normal(noise.shape)).astype(np.float32)
    if objective.correction is not None:
        rest["rollout_logp"] = (rest["old_logp"] + 0.05 * rng.standard_normal(noise.shape)).astype(np.float32)
    return x, rest


def statistics_loss(stats: Any, weights: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The statistics in ``weights``, weighted and summed, and beside the sum as they are."""
    values = {k: getattr(stats, k) for k in weights}
    total = functools.reduce(jnp.add, (jnp.sum(values[k] * w) for k, w in weights.items()))
    return total, values


def by_backend(
    c: GradcheckConfig, backend: str, objective: Objective, x: tuple[np.ndarray, ...], rest: dict[str, Any]
) -> Found:
    """The library's own, through ``jax.value_and_grad``."""
    kernel = backend in KERNELS.values()
    options: dict[str, Any] = dict(backend=None if backend == "auto" else backend, interpret=c.interpret and kernel)
    arguments: dict[str, Any] = {}
    if c.mesh and backend != "reference":
        arguments["sharding"] = _sharding(c)
    donate = c.donate and kernel and c.level == "logits"
    weights = cotangents(c, rest["mask"])
    teacher = c.divergence != "off"
    if c.level == "logits":
        arguments |= transform_of(c)
        options |= dict(bwd_impl=c.bwd_impl, donate_logits=donate)
    else:
        options |= dict(logits_dtype=c.logits_dtype)
        if backend != "reference":
            options |= dict(head_grad_dtype=c.head_grad_dtype, chunk_size=c.chunk_size or None)
            options |= dict(memory_budget=c.memory_budget) if c.memory_budget else {}
            options |= dict(sparse_backward=c.sparse_backward) if c.sparse_backward != "off" else {}

    # All arrays are arguments: other inputs of the same shape are the same program.
    def loss(arrays: list[Any], rest: dict[str, jax.Array], weights: dict[str, jax.Array]) -> Any:
        if c.level == "head":
            arrays = [arrays[0], Head(arrays[1], layout="vh", **transform_of(c)), *arrays[2:]]
        how = dict(arguments, options=Options(**options))
        if teacher:
            out = divergence_runs.call(c, arrays, rest, how)
            return out if c.call == "loss" else statistics_loss(out, weights)
        if c.call == "logprobs":
            how["temperature"] = c.temperature
            call: Callable[..., Any] = logprobs if c.level == "logits" else linear_logprobs
            return statistics_loss(call(*arrays, rest["targets"], mask=rest["mask"], **how), weights)
        whole: Callable[..., Any] = grpo_loss if c.level == "logits" else linear_grpo_loss
        return whole(*arrays, objective=objective, **rest, **how)

    given = jax.tree.map(jnp.asarray, (list(x), rest, weights))
    alone = float(jax.jit(loss)(*given)[0]) if c.same_without_gradient else None
    step = jax.value_and_grad(loss, has_aux=True)
    (value, aux), grads = jax.jit(step, donate_argnums=(0,) if donate else ())(*given)
    found = Found(float(value), [np.asarray(g, np.float64) for g in grads], loss_alone=alone)
    if c.call == "logprobs":
        return dataclasses.replace(found, statistics={k: np.asarray(v, np.float64) for k, v in aux.items()})
    return dataclasses.replace(found, metrics=metric_values(aux))


def by_oracle(c: GradcheckConfig, objective: Objective, x: tuple[np.ndarray, ...], rest: dict[str, Any]) -> Found:
    """The truth, in float64."""
    layout: dict[str, Any] = {} if c.level == "logits" else dict(head_layout="vh")
    if c.divergence != "off":
        total, moved, values = divergence_runs.by_oracle(c, x, rest, cotangents(c, rest["mask"]))
        return Found(total, moved, statistics=values)
    if c.call == "loss":
        whole: Callable[..., Any] = oracle.grpo_loss if c.level == "logits" else oracle.linear_grpo_loss
        loss, *grads = whole(*x, objective=objective, **rest, **layout, **transform_of(c))
        return Found(loss, grads[: len(x)])
    options = dict(temperature=c.temperature, mask=rest["mask"], **layout, **transform_of(c))
    weights = cotangents(c, rest["mask"])
    logits = c.level == "logits"
    statistics: Callable[..., Any] = oracle.token_stats if logits else oracle.linear_token_stats
    vjp: Callable[..., Any] = oracle.token_stats_vjp if logits else oracle.linear_token_stats_vjp
    stats = statistics(*x, rest["targets"], **options)
    found = vjp(*x, rest["targets"], *weights.values(), **options)
    grads = [found] if logits else list(found[:2])
    values = {k: np.asarray(getattr(stats, k)) for k in STATISTICS}
    return Found(float(sum(np.sum(values[k] * w) for k, w in weights.items())), grads, statistics=values)
