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

from logitless import api, oracle
from logitless.core.options import Head, Options
from logitless.core.registry import KERNELS
from logitless.lab.bench import model_inputs, realistic, synthetic_inputs
from logitless.lab.bench.gradcheck_config import DTYPES, GradcheckConfig, axes_of
from logitless.lab.plan.mesh import AXES
from logitless.mesh.sharding import Sharding
from logitless.objectives.distillation import Distillation
from logitless.objectives.loss import metric_values
from logitless.objectives.objective import Objective

Arrays = tuple[np.ndarray, ...]
Call = Callable[..., Any]


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


def distillation_of(c: GradcheckConfig) -> Distillation:
    """The loss that is checked with a teacher and ``call: loss``."""
    kind: Any = c.divergence
    temperature = None if c.temperature == 1.0 else c.temperature
    return Distillation(divergence=kind, mix=c.mix if kind == "jsd" else None, temperature=temperature)


def weights_of(c: GradcheckConfig, mask: np.ndarray) -> dict[str, np.ndarray]:
    """Random weights for the statistics compared under ``call: logprobs``, per live token: a single distribution, or a
    student with its teacher."""
    rng = np.random.default_rng(c.seed + 1)
    names = ("logp", "entropy", "lse") if c.divergence == "off" else ("divergence", "entropy", "logp")
    return {k: (rng.standard_normal(mask.shape) * mask).astype(np.float32) for k in names}


def _sharding(c: GradcheckConfig) -> Sharding:
    """Rows over data and fsdp; the vocabulary over tensor, and that part of the head over fsdp."""
    mesh = jax.make_mesh(tuple(axes_of(c).values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    if c.level == "logits":
        return Sharding(mesh, tokens=P(("data", "fsdp")), vocab="tensor")
    return Sharding(mesh, tokens=P(("data", "fsdp")), head=P(("tensor", "fsdp")))


# Inputs.


def arrays(c: GradcheckConfig, objective: Objective) -> tuple[Arrays, dict[str, Any]]:
    """``(differentiable arrays, the rest)``, on the host."""
    rng = np.random.default_rng(c.seed)
    rest = synthetic_inputs.token_inputs(c.batch, c.tokens, max(c.vocab_size or c.vocab, 1), rng)
    x = tuple(a.astype(DTYPES[c.dtype]) for a in _policy(c, rest, rng))
    how: dict[str, Any] = dict(temperature=c.temperature, **transform_of(c))
    if c.level == "logits":
        logp = oracle.token_stats(x[0], rest["targets"], **how).logp
    else:
        logp = oracle.linear_token_stats(x[0], x[1], rest["targets"], head_layout="vh", **how).logp
    noise = rng.standard_normal(rest["targets"].shape)
    if c.divergence != "off":
        return x, rest | _teacher(c, x, rng)
    rest["old_logp"] = (logp + c.old_logp_noise_scale * noise).astype(np.float32)
    if objective.beta is not None:
        rest["ref_logp"] = (logp + 0.1 * rng.standard_normal(noise.shape)).astype(np.float32)
    if objective.correction is not None:
        rest["rollout_logp"] = (rest["old_logp"] + 0.05 * rng.standard_normal(noise.shape)).astype(np.float32)
    return x, rest


def _policy(c: GradcheckConfig, rest: dict[str, Any], rng: np.random.Generator) -> Arrays:
    """``(logits,)``, or hidden states and head; targets go into ``rest`` where the policy draws its own."""
    if c.inputs == "model":
        sizes = c.layers, c.vocab, c.batch, c.tokens
        *made, rest["targets"] = model_inputs.hidden_and_head(c.model, *sizes, c.seed)
        return (made[0] @ made[1].T,) if c.level == "logits" else tuple(made)
    if c.level == "logits":
        z = synthetic_inputs.logits(c.inputs, rest["targets"], c.vocab, rng)
        return (z * np.float32(c.spread / 3.0) if c.inputs == "ordinary" else z,)
    if c.inputs == "realistic":
        h, w = realistic.realistic_head(c.batch * c.tokens, c.hidden, c.vocab, c.seed, DTYPES[c.dtype])
        drawn = realistic.sample_targets(jnp.asarray(h), jnp.asarray(w), c.seed)
        rest["targets"] = np.asarray(drawn).reshape(c.batch, c.tokens)
        return h.reshape(c.batch, c.tokens, -1), w
    return synthetic_inputs.hidden_and_head(c.inputs, rest["targets"], c.hidden, c.vocab, rng)


def _teacher(c: GradcheckConfig, x: Arrays, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The teacher's logits, or hidden states ``[B, T, H2]`` and head ``[V, H2]``: rows of the student's kind, half of
    them with the same peaks, half of them with others."""
    shape, dtype = x[0].shape[:2], x[0].dtype
    peaks = rng.integers(0, c.vocab, shape)
    if c.level == "logits":
        own = np.where(rng.random(shape) < 0.5, np.argmax(x[0].astype(np.float32), -1), peaks)
        return dict(teacher_logits=synthetic_inputs.logits(c.inputs, own, c.vocab, rng).astype(dtype))
    width = c.teacher or c.hidden
    if c.inputs == "realistic" and width == c.hidden:
        size = np.linalg.norm(x[0].astype(np.float32), axis=-1, keepdims=True) / np.sqrt(width)
        moved = x[0].astype(np.float32) + 0.2 * size * rng.standard_normal(x[0].shape, np.float32)
        return dict(teacher_hidden=moved.astype(dtype), teacher_lm_head=x[1].copy())
    kind = "ordinary" if c.inputs == "realistic" else c.inputs
    if kind == "peaked":
        same = np.argmax(x[0].astype(np.float32) @ x[1].astype(np.float32).T, -1)
        peaks = np.where(rng.random(shape) < 0.5, same, peaks)
    h, w = synthetic_inputs.hidden_and_head(kind, peaks, width, c.vocab, rng)
    return dict(teacher_hidden=h.astype(dtype), teacher_lm_head=w.astype(dtype))


# The library's calls.


def _called(c: GradcheckConfig, objective: Objective, x: list[Any], rest: dict[str, Any], how: dict[str, Any]) -> Any:
    """``(loss, metrics)``, or the statistics; ``x`` are logits, or hidden states and a :class:`~logitless.Head`."""
    if c.divergence == "off":
        if c.call == "loss":
            calls: dict[str, Call] = dict(logits=api.grpo_loss, head=api.linear_grpo_loss)
            return calls[c.level](*x, objective=objective, **rest, **how)
        calls = dict(logits=api.logprobs, head=api.linear_logprobs)
        return calls[c.level](*x, rest["targets"], mask=rest["mask"], temperature=c.temperature, **how)
    if c.level == "logits":
        theirs: tuple[Any, ...] = (rest["teacher_logits"],)
    else:
        theirs = rest["teacher_hidden"], Head(rest["teacher_lm_head"], layout="vh")
    given = dict(mask=rest["mask"], targets=rest["targets"], **how)
    if c.call == "loss":
        return api.linear_distillation_loss(*x, *theirs, distillation=distillation_of(c), **given)
    calls = dict(logits=api.divergence, head=api.linear_divergence)
    mix = c.mix if c.divergence == "jsd" else None
    return calls[c.level](*x, *theirs, divergence=c.divergence, mix=mix, temperature=c.temperature, **given)


def _options(c: GradcheckConfig, backend: str) -> tuple[dict[str, Any], bool]:
    """Fields of ``Options``, and whether the logits are given away."""
    kernel = backend in KERNELS.values()
    options: dict[str, Any] = dict(backend=None if backend == "auto" else backend, interpret=c.interpret and kernel)
    if c.level == "logits":
        donate = c.donate and kernel
        return options | dict(bwd_impl=c.bwd_impl, donate_logits=donate), donate
    options |= dict(logits_dtype=c.logits_dtype)
    if backend != "reference":
        options |= dict(head_grad_dtype=c.head_grad_dtype, chunk_size=c.chunk_size or None)
        options |= dict(memory_budget=c.memory_budget) if c.memory_budget else {}
        options |= dict(sparse_backward=c.sparse_backward) if c.sparse_backward != "off" else {}
    return options, False


def by_backend(c: GradcheckConfig, backend: str, objective: Objective, x: Arrays, rest: dict[str, Any]) -> Found:
    """The library's own, through ``jax.value_and_grad``."""
    options, donate = _options(c, backend)
    how: dict[str, Any] = dict(options=Options(**options))
    how |= dict(sharding=_sharding(c)) if c.mesh and backend != "reference" else {}
    how |= transform_of(c) if c.level == "logits" else {}

    # All arrays are arguments: other inputs of the same shape are the same program.
    def loss(arrays: list[Any], rest: dict[str, jax.Array], weights: dict[str, jax.Array]) -> Any:
        if c.level == "head":
            arrays = [arrays[0], Head(arrays[1], layout="vh", **transform_of(c))]
        out = _called(c, objective, arrays, rest, how)
        if c.call == "loss":
            return out
        values = {k: getattr(out, k) for k in weights}
        return functools.reduce(jnp.add, (jnp.sum(values[k] * w) for k, w in weights.items())), values

    given = jax.tree.map(jnp.asarray, (list(x), rest, weights_of(c, rest["mask"])))
    alone = float(jax.jit(loss)(*given)[0]) if c.same_without_gradient else None
    step = jax.value_and_grad(loss, has_aux=True)
    (value, aux), grads = jax.jit(step, donate_argnums=(0,) if donate else ())(*given)
    found = Found(float(value), [np.asarray(g, np.float64) for g in grads], loss_alone=alone)
    if c.call == "logprobs":
        return dataclasses.replace(found, statistics={k: np.asarray(v, np.float64) for k, v in aux.items()})
    return dataclasses.replace(found, metrics=metric_values(aux))


# The truth, in float64.


def by_oracle(c: GradcheckConfig, objective: Objective, x: Arrays, rest: dict[str, Any]) -> Found:
    """The same by the oracle; the loss is the weighted sum of the statistics where they are asked for."""
    logits, weights = c.level == "logits", weights_of(c, rest["mask"])
    how: dict[str, Any] = transform_of(c) | ({} if logits else dict(head_layout="vh"))
    if c.divergence != "off":
        return _pair_by_oracle(c, x, rest, weights, how)
    if c.call == "loss":
        whole: Call = oracle.grpo_loss if logits else oracle.linear_grpo_loss
        loss, *grads = whole(*x, objective=objective, **rest, **how)
        return Found(loss, grads[: len(x)])
    how |= dict(temperature=c.temperature, mask=rest["mask"])
    statistics: Call = oracle.token_stats if logits else oracle.linear_token_stats
    vjp: Call = oracle.token_stats_vjp if logits else oracle.linear_token_stats_vjp
    stats = statistics(*x, rest["targets"], **how)
    found = vjp(*x, rest["targets"], *weights.values(), **how)
    return _weighted(stats, weights, [found] if logits else list(found[:2]))


def _pair_by_oracle(
    c: GradcheckConfig, x: Arrays, rest: dict[str, Any], weights: dict[str, np.ndarray], how: dict[str, Any]
) -> Found:
    """:func:`by_oracle` with a teacher."""
    if c.level == "logits":
        rows = oracle.logits_rows(x[0], **how), oracle.logits_rows(rest["teacher_logits"])
    else:
        theirs = oracle.linear_rows(rest["teacher_hidden"], rest["teacher_lm_head"], head_layout="vh")
        rows = oracle.linear_rows(*x, **how), theirs
    given: dict[str, Any] = dict(mask=rest["mask"], targets=rest["targets"])
    if c.call == "loss":
        loss, made = oracle.distillation_loss(*rows, objective=distillation_of(c), **given)
        return Found(loss, [g for g in (made.inputs, made.head) if g is not None])
    kind: Any = c.divergence
    given |= dict(divergence=kind, mix=c.mix, temperature=c.temperature)
    made = oracle.divergence_vjp(*rows, weights["divergence"], None, weights["entropy"], weights["logp"], **given)
    found = oracle.divergence(*rows, **given)
    return _weighted(found, weights, [g for g in (made.inputs, made.head) if g is not None])


def _weighted(stats: Any, weights: dict[str, np.ndarray], grads: list[np.ndarray]) -> Found:
    values = {k: np.asarray(getattr(stats, k)) for k in weights}
    return Found(float(sum(np.sum(values[k] * w) for k, w in weights.items())), grads, statistics=values)
