"""Random batches of statistics, and a loss of them with its gradients and metrics; no tests here."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interpreted import by_numpy
from logitless import Objective, TokenStats, policy_loss
from logitless.core.stats import STAT_FIELDS

POLICY_LEVELS = [
    ("clip", "token"),
    ("clip", "sequence"),
    ("clip", "sequence_token"),
    ("cispo", "token"),
    ("cispo", "sequence"),
    ("sapo", "token"),
    ("sapo", "sequence"),
    ("vespo", "token"),
    ("vespo", "sequence"),
    ("gmpo", "token"),
    ("reinforce", "token"),
    ("dppo_tv", "token"),
    ("dppo_kl", "token"),
]
"""Every legal policy and level."""
AGGREGATIONS = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]
EVERYTHING: dict[str, Any] = dict(
    beta=0.1, kl_bias_correction=True, correction="sequence", off_policy_threshold=0.3, top_entropy=0.75,
    entropy_coef=0.02,
)  # fmt: skip
"""A KL term, a correction, both ways to drop tokens and an entropy bonus, for any policy and level."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A loss with its gradients and metrics, on the host. Metrics are made when they are read: operation by operation
    they are more than half of the time of a small loss."""

    loss: np.ndarray
    dlogp: np.ndarray
    dentropy: np.ndarray
    make_metrics: Callable[[], dict[str, Any]]

    @functools.cached_property
    def metrics(self) -> dict[str, Any]:
        return self.make_metrics()


def objective_of(policy: str, level: str = "token", aggregation: str = "grpo", **fields: Any) -> Objective:
    """An Objective with the numbers its policy and aggregation need to do something on ``random_batch``."""
    if aggregation == "dr_grpo":
        fields.setdefault("max_length", 7.0)
    if policy.startswith("dppo"):
        fields = {"eps_low": 0.3, "eps_high": 0.05 if policy == "dppo_tv" else 0.01, "delta": 1.3, **fields}
    if policy == "cispo":
        fields.setdefault("eps_high", 1.3 if fields.get("cispo_bound", "raw") == "raw" else 0.3)
    return Objective(policy=policy, level=level, aggregation=aggregation, **fields)


def random_batch(
    seed: int = 0, *, layout: str = "rows", shape: tuple[int, int] = (4, 6)
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """``(logp, entropy, loss inputs)``, float32, with holes in the mask and (``rows``, 4 or more) an empty row.

    ``layout``: ``rows`` with advantages ``[B]``, ``tokens`` with ``[B, T]``, ``packed`` with contiguous segments, and
    ``scattered`` with segments whose tokens are not adjacent.
    """
    rng = np.random.default_rng(seed)

    def normal(scale: float) -> np.ndarray:
        return (scale * rng.normal(size=shape)).astype(np.float32)

    logp = -rng.exponential(size=shape).astype(np.float32)
    entropy = rng.exponential(size=shape).astype(np.float32)
    mask = rng.random(shape) < 0.8
    mask[0, 0] = True
    if shape[0] > 3:
        mask[2] = False
    advantages = normal(1.0)
    inputs: dict[str, Any] = {
        "advantages": advantages[:, 0] if layout == "rows" else advantages,
        "mask": mask,
        "old_logp": logp - normal(0.4),
        "ref_logp": logp + normal(0.9),
        "rollout_logp": logp - normal(0.5),
    }
    if layout == "packed":
        inputs["segment_ids"] = np.cumsum(rng.random(shape) < 0.4, axis=1).astype(np.int32)
    elif layout == "scattered":
        inputs["segment_ids"] = rng.integers(-1, 3, shape).astype(np.int32)
    return logp, entropy, inputs


def token_stats(logp: Any, entropy: Any) -> TokenStats:
    """Statistics as ``logprobs`` would return them; the fields that no loss reads are filled in."""
    logp, entropy = jnp.asarray(logp, jnp.float32), jnp.asarray(entropy, jnp.float32)
    unread = dict.fromkeys(STAT_FIELDS, jnp.zeros_like(logp))
    return TokenStats(**dict(unread, logp=logp, entropy=entropy, is_top1=jnp.zeros(logp.shape, bool)))


def _with_gradients(objective: Objective, logp: jax.Array, entropy: jax.Array, inputs: dict[str, Any]) -> Any:
    def loss(lp: jax.Array, h: jax.Array) -> Any:
        return policy_loss(token_stats(lp, h), objective=objective, **inputs)

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(logp, entropy)


def without_metrics() -> AbstractContextManager[Any]:
    """Losses have none."""
    return mock.patch("logitless.objectives.loss.loss_metrics", return_value={})


def metrics_of(objective: Objective, logp: Any, entropy: Any, **inputs: Any) -> dict[str, Any]:
    """Those of ``logitless.policy_loss``."""
    statistics = np.asarray(logp, np.float32), np.asarray(entropy, np.float32)
    return by_numpy(lambda lp, h: policy_loss(token_stats(lp, h), objective=objective, **inputs)[1], *statistics)


def evaluate(objective: Objective, logp: Any, entropy: Any, **inputs: Any) -> Evaluation:
    """``logitless.policy_loss`` and its gradients by ``logp`` and ``entropy``."""
    statistics = np.asarray(logp, np.float32), np.asarray(entropy, np.float32)
    with without_metrics():
        (value, _), gradients = by_numpy(lambda lp, h: _with_gradients(objective, lp, h, inputs), *statistics)
    return Evaluation(value, *gradients, functools.partial(metrics_of, objective, *statistics, **inputs))


def half(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Every other case by default, every value of a parameter among them; the others only repeat: ``slow``."""
    return [pytest.param(*case, marks=pytest.mark.slow if i % 2 else ()) for i, case in enumerate(cases)]


def every_pair(*values: Iterable[Any]) -> list[Any]:
    """The product of three choices or more, in which half of the cases have every pair of values; the others only
    repeat: ``slow``."""
    product = itertools.product(*map(enumerate, values))
    cases = (zip(*case, strict=True) for case in product)
    return [pytest.param(*case, marks=pytest.mark.slow if sum(at) % 2 else ()) for at, case in cases]


SIDE_BY_SIDE = 4
"""Always as many, for operations are compiled once for each shape."""


def evaluate_all(cases: list[tuple[Objective, Any, Any, dict[str, Any]]], *, metrics: bool = False) -> list[Evaluation]:
    """:func:`evaluate` for cases ``(objective, logp, entropy, inputs)``.

    Those that differ in numbers alone, not in a choice, a shape or in what is given, run side by side in the time of
    one: the objective's numbers are leaves, too.
    """
    alike: dict[Any, list[int]] = {}
    flat = [jax.tree.flatten(jax.tree.map(np.asarray, case)) for case in cases]
    for i, (leaves, structure) in enumerate(flat):
        alike.setdefault((structure, tuple(x.shape for x in leaves)), []).append(i)
    out: dict[int, Evaluation] = {}
    for (structure, _), members in alike.items():
        if len(members) == 1:
            objective, logp, entropy, inputs = cases[members[0]]
            out[members[0]] = evaluate(objective, logp, entropy, **inputs)
            continue
        for start in range(0, len(members), SIDE_BY_SIDE):
            some = (members[start : start + SIDE_BY_SIDE] + SIDE_BY_SIDE * members[-1:])[:SIDE_BY_SIDE]
            stacked = [np.stack(same) for same in zip(*(flat[i][0] for i in some), strict=True)]
            floats = [x.astype(np.float32) if x.dtype == np.float64 else x for x in stacked]
            with nullcontext() if metrics else without_metrics():
                given = jax.tree.unflatten(structure, floats)
                (value, found), (dlogp, dentropy) = by_numpy(jax.vmap(_with_gradients), *given)
            host = (value, dlogp, dentropy, found)
            for place, i in enumerate(some):
                value, dlogp, dentropy, found = jax.tree.map(lambda x, j=place: x[j], host)
                out[i] = Evaluation(value, dlogp, dentropy, lambda m=found: m)
    return [out[i] for i in range(len(cases))]


def evaluate_each(objective: Objective, batches: list[tuple[Any, Any, dict[str, Any]]]) -> list[Evaluation]:
    """:func:`evaluate` for batches ``(logp, entropy, inputs)`` of one shape, side by side, metrics included."""
    return evaluate_all([(objective, *batch) for batch in batches], metrics=True)
