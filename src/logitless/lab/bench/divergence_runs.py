"""The part of a gradcheck that has a teacher: its arrays, the library's call, and the same in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from logitless import oracle
from logitless.api import divergence, linear_distillation_loss, linear_divergence
from logitless.core.options import Head
from logitless.lab.bench import synthetic_inputs
from logitless.lab.bench.gradcheck_config import GradcheckConfig
from logitless.objectives.distillation import Distillation


def distillation_of(c: GradcheckConfig) -> Distillation:
    """The loss that is checked with ``call: loss``."""
    temperature = None if c.temperature == 1.0 else c.temperature
    kind: Any = c.divergence
    return Distillation(divergence=kind, mix=c.mix if kind == "jsd" else None, temperature=temperature)


def teacher(c: GradcheckConfig, x: tuple[np.ndarray, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The teacher's logits, or hidden states ``[B, T, H2]`` and head ``[V, H2]``: rows of the student's kind, half of
    them with the same peaks, half of them with others."""
    shape = x[0].shape[:2]
    peaks = rng.integers(0, c.vocab, shape)
    if c.level == "logits":
        own = np.where(rng.random(shape) < 0.5, np.argmax(x[0].astype(np.float32), -1), peaks)
        return dict(teacher_logits=synthetic_inputs.logits(c.inputs, own, c.vocab, rng).astype(x[0].dtype))
    width, dtype = c.teacher or c.hidden, x[0].dtype
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


def call(c: GradcheckConfig, x: list[Any], rest: dict[str, Any], how: dict[str, Any]) -> Any:
    """``(loss, metrics)``, or with ``call: logprobs`` the statistics of both; ``x`` are logits, or hidden states and a
    :class:`~logitless.Head`."""
    mask, targets = rest["mask"], rest["targets"]
    if c.call == "logprobs":
        kind: Any = c.divergence
        own: dict[str, Any] = dict(divergence=kind, mix=c.mix if kind == "jsd" else None, temperature=c.temperature)
        own |= dict(mask=mask, targets=targets, **how)
        if c.level == "logits":
            return divergence(x[0], rest["teacher_logits"], **own)
    head = Head(rest["teacher_lm_head"], layout="vh")
    if c.call == "logprobs":
        return linear_divergence(x[0], x[1], rest["teacher_hidden"], head, **own)
    settings = distillation_of(c)
    return linear_distillation_loss(
        x[0], x[1], rest["teacher_hidden"], head, targets, mask=mask, distillation=settings, **how
    )


def by_oracle(
    c: GradcheckConfig, x: tuple[np.ndarray, ...], rest: dict[str, Any], weights: dict[str, np.ndarray]
) -> tuple[float, list[np.ndarray], dict[str, np.ndarray]]:
    """``(loss, gradients, statistics)`` in float64; the loss is the weighted sum of the statistics where they are asked
    for."""
    how: dict[str, Any] = dict(softcap=c.softcap or None, scale=c.scale or None, vocab_size=c.vocab_size or None)
    if c.level == "logits":
        rows = oracle.logits_rows(x[0], **how), oracle.logits_rows(rest["teacher_logits"])
    else:
        own = oracle.linear_rows(*x, head_layout="vh", **how)
        rows = own, oracle.linear_rows(rest["teacher_hidden"], rest["teacher_lm_head"], head_layout="vh")
    if c.call == "loss":
        settings = distillation_of(c)
        loss, made = oracle.distillation_loss(*rows, objective=settings, targets=rest["targets"], mask=rest["mask"])
        assert made.head is not None
        return loss, [made.inputs, made.head], {}
    kind: Any = c.divergence
    about: dict[str, Any] = dict(divergence=kind, mix=c.mix, temperature=c.temperature)
    about |= dict(mask=rest["mask"], targets=rest["targets"])
    found = oracle.divergence(*rows, **about)
    g = weights["divergence"], None, weights["entropy"], weights["logp"]
    made = oracle.divergence_vjp(*rows, *g, **about)
    values = {k: np.asarray(getattr(found, k)) for k in weights}
    grads = [made.inputs] if made.head is None else [made.inputs, made.head]
    return float(sum(np.sum(values[k] * w) for k, w in weights.items())), grads, values
