"""Inputs of one shape on which sparse backwards are tried, from a trained policy's kind to the most hostile, and how
their gradients are judged."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import flat_calls
from logitless import Objective, oracle
from logitless.head.sparse import active_columns
from logitless.head.sparse.active_columns import SparseReport
from logitless.lab.bench import realistic
from numerics import EPS, f64
from numerics import HeadCase as Case

N, WIDTH, VOCAB, CHUNK = 256, 128, 4096, 64
SHAPE = (8, N // 8)
TOLERANCE = 2.0**-8


def calibrated(dtype: Any, seed: int = 0, n: int = N) -> Case:
    h, w = realistic.realistic_head(n, WIDTH, VOCAB, seed, dtype)
    y = realistic.sample_targets(jnp.asarray(h), jnp.asarray(w), seed)
    return Case(h.reshape(8, -1, WIDTH), w, np.asarray(y).reshape(8, -1))


def leaning(dtype: Any) -> Case:
    """:func:`calibrated`, with much in common to all rows of the head: a softmax does not see it, and the gradient of a
    row that leaves columns out without another in their place does."""
    case = calibrated(dtype)
    common = np.full((WIDTH,), 16.0 / WIDTH**0.5)
    return dataclasses.replace(case, lm_head=(np.asarray(case.lm_head, np.float64) + common).astype(dtype))


def flat(dtype: Any, n: int = N) -> Case:
    rng = np.random.default_rng(0)
    h, w = rng.standard_normal((8, n // 8, WIDTH)), rng.standard_normal((VOCAB, WIDTH)) / 8
    return Case(np.asarray(h, dtype), np.asarray(w, dtype), rng.integers(0, VOCAB, (8, n // 8)))


def from_groups(levels: np.ndarray, sizes: np.ndarray, targets: np.ndarray, dtype: Any) -> Case:
    """Logits ``levels [n, G]``, the g-th of them in ``sizes[g]`` columns: head rows are unit vectors."""
    w = np.zeros((VOCAB, WIDTH))
    w[np.arange(VOCAB), np.repeat(np.arange(len(sizes)), sizes)] = 1
    h = np.zeros((len(levels), WIDTH))
    h[:, : len(sizes)] = levels
    return Case(np.asarray(h.reshape(8, -1, WIDTH), dtype), np.asarray(w, dtype), targets.reshape(8, -1))


def collapsed(dtype: Any, n: int = N) -> Case:
    """The target has all of the mass but e^-20 to e^-80; in some rows the target is another, hopeless column."""
    sizes = np.array([1] * 16 + [VOCAB - 16])
    rows = np.arange(n)
    levels = np.zeros((n, 17))
    levels[rows, rows % 16] = np.log(VOCAB) + np.linspace(20, 80, n)
    return from_groups(levels, sizes, np.where(rows % 5, rows % 16, 100), dtype)


def adversarial(dtype: Any) -> Case:
    """Every row spreads its mass over columns that stay just under some candidate threshold: over none to half of the
    vocabulary, so that a rule on single probabilities leaves out up to a quarter of a row."""
    sizes = np.array([1] * 8 + [VOCAB // 32] * 28)
    sizes = np.append(sizes, VOCAB - sizes.sum())
    rng = np.random.default_rng(1)
    levels = np.full((N, len(sizes)), -40.0)
    for t in range(N):
        levels[t, t % 8] = 0.0
        spread = rng.choice(np.arange(8, 36), rng.integers(0, 17), replace=False)
        threshold = TOLERANCE * active_columns.chunk_rule(VOCAB).thresholds[t % 3]
        levels[t, spread] = np.log(0.999 * threshold)
        rest = 1 - np.exp(levels[t, spread]).sum() * (VOCAB // 32)
        levels[t] -= np.where(np.arange(len(sizes)) == t % 8, -np.log(rest), 0)
    return from_groups(levels, sizes, np.arange(N) % 8, dtype)


def loss_inputs(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    """What the loss needs, slightly off-policy; every token is live."""
    rng = np.random.default_rng(seed)
    old = oracle.linear_token_stats(case.hidden, case.lm_head, case.targets).logp
    shape = case.targets.shape
    return dict(
        advantages=rng.standard_normal(shape).astype(np.float32),
        mask=np.ones(shape, bool),
        old_logp=(old + 0.02 * rng.standard_normal(shape)).astype(np.float32),
    )


def gradients_and_report(h: Any, w: Any, y: Any, rest: Any, objective: Objective, **options: Any) -> Any:
    """``(loss, metrics, report, (dh, dw))``; the report comes by the metrics."""
    real_metrics = SparseReport.metrics

    def with_report(report: Any, vocab: int) -> Any:
        return {**real_metrics(report, vocab), "report": report}

    def loss(h: Any, w: Any) -> Any:
        return flat_calls.linear_grpo_loss(h, w, y, objective=objective, **options, **rest)

    with mock.patch.object(SparseReport, "metrics", with_report):
        (value, metrics), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(h, w)
    return value, metrics, metrics.pop("report", None), grads


def truth_of(case: Case, rest: Any, objective: Objective) -> tuple[np.ndarray, np.ndarray]:
    """``(dh, dw)`` in float64."""
    hidden = np.where(rest["mask"][..., None], f64(case.hidden), 0.0)
    return oracle.linear_grpo_loss(hidden, case.lm_head, case.targets, objective=objective, head_layout="vh", **rest)[
        1:3
    ]


def logp_cotangents(case: Case, rest: Any, objective: Objective) -> np.ndarray:
    """Of every token's log-probability, in float64."""
    s = oracle.linear_token_stats(case.hidden, case.lm_head, case.targets)
    return oracle.policy_loss_grad(s.logp, s.entropy, objective=objective, **rest)[1].reshape(-1)


def row_norms(x: Any, axis: int = -1) -> np.ndarray:
    return np.linalg.norm(f64(x), axis=axis)


def assert_as_good(label: str, got: Any, ordinary: Any, truth: Any) -> None:
    """In norm, and in the largest error of a row, at most 1.5 times the ordinary path's own."""
    new, old = row_norms(f64(got) - truth), row_norms(f64(ordinary) - truth)
    floor = 8 * EPS * row_norms(truth)
    assert np.linalg.norm(new) <= 1.5 * np.linalg.norm(old) + np.linalg.norm(floor), f"{label}: norm"
    assert new.max() <= 1.5 * old.max() + floor.max(), f"{label}: largest row error"


def probabilities(case: Case) -> np.ndarray:
    x = f64(case.hidden).reshape(-1, WIDTH) @ f64(case.lm_head).T
    x -= x.max(1, keepdims=True)
    return np.exp(x) / np.exp(x).sum(1, keepdims=True)
