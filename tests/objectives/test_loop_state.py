"""What a training loop keeps or counts beside an objective: an adaptive entropy bonus, denominators of split batches,
statistics of its own."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interpreted import by_numpy
from logitless import (
    AdaptiveEntropy,
    Metric,
    Objective,
    TokenStats,
    entropy_denominator,
    loss_denominator,
    oracle,
    policy_loss,
    reduce_metrics,
)
from loss_cases import AGGREGATIONS, evaluate, metrics_of, objective_of, random_batch


def test_adaptive_entropy_by_hand() -> None:
    """Target 0.5, steps of 0.1 within [0, 0.25]: nothing at first, up while at or below, off and down while above."""
    control = AdaptiveEntropy(coef=0.1, target=0.5, step=0.1, high=0.25)
    seen = [(float(control.coef), float(control.applied))]
    for entropy in (0.5, 0.4, 0.3, 0.6, 0.9, 0.9, 0.9, 0.2):
        control = control.update(entropy)
        seen.append((float(control.coef), float(control.applied)))
    coefs = [0.1, 0.2, 0.25, 0.25, 0.15, 0.05, 0.0, 0.0, 0.1]
    applied = [0.0, 0.2, 0.25, 0.25, 0.0, 0.0, 0.0, 0.0, 0.1]
    np.testing.assert_allclose(seen, np.stack([coefs, applied], 1), rtol=1e-6, atol=1e-7)


def test_adaptive_entropy_is_a_pytree_that_a_step_may_carry() -> None:
    control = AdaptiveEntropy(coef=0.1, target=0.5, step=0.1)
    step = jax.jit(lambda c, e: c.update(e))
    once = step(control, Metric(jnp.float32(1.2), jnp.float32(4.0)))  # a mean of 0.3
    assert float(once.last) == pytest.approx(0.3) and float(once.coef) == pytest.approx(0.2)
    assert float(control.update(Metric(jnp.float32(0.0), jnp.float32(0.0))).last) == 0.0


def test_adaptive_entropy_from_trl() -> None:
    names = {"entropy_coef": 0.02, "entropy_coef_min": 0.01, "entropy_coef_max": 0.5, "entropy_coef_delta": 0.003}
    want = AdaptiveEntropy(coef=0.02, target=0.4, step=0.003, low=0.01, high=0.5)
    assert AdaptiveEntropy.from_trl(types.SimpleNamespace(**names, entropy_target=0.4)) == want
    assert AdaptiveEntropy.from_trl(**names, entropy_target=0.4) == want
    with pytest.raises(TypeError, match="no setting 'target'"):
        AdaptiveEntropy.from_trl(target=0.4)
    with pytest.raises(ValueError, match=r"control = AdaptiveEntropy.from_trl\(config\)"):
        Objective.from_trl(use_adaptive_entropy=True)


def test_bonus_entropy_is_that_of_the_tokens_the_bonus_acts_on() -> None:
    entropy = np.float32([[0.1, 0.9, 0.5, 0.7, 9.0]])
    inputs = {"advantages": np.float32([1.0]), "mask": np.array([[1, 1, 1, 1, 0]])}
    for top, want in ((None, (2.2, 4)), (0.5, (1.6, 2))):
        o = Objective(entropy_coef=0.1, top_entropy=top)
        metrics = metrics_of(o, -np.ones((1, 5)), entropy, **inputs)
        assert tuple(map(float, metrics["bonus_entropy"])) == pytest.approx(want)
        assert float(entropy_denominator(o, inputs["mask"], entropy)) == want[1]
    with pytest.raises(ValueError, match="keeps tokens by their entropy"):
        entropy_denominator(Objective(top_entropy=0.5), inputs["mask"])


@pytest.mark.parametrize("top_entropy", [None, 0.5])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_parts_of_a_split_batch_add_up(aggregation: str, top_entropy: float | None) -> None:
    """Two micro-batches of two rows, one of them empty, with the counts of all four."""
    o = objective_of("clip", aggregation=aggregation, beta=0.1, entropy_coef=0.3, top_entropy=top_entropy)
    logp, entropy, inputs = random_batch(2)
    parts = [slice(0, 2), slice(2, 4)]
    counts = [float(entropy_denominator(o, inputs["mask"][p], entropy[p])) for p in parts]
    given = {"denominator": float(loss_denominator(o, inputs["mask"])), "entropy_denominator": sum(counts)}
    found = [
        evaluate(o, logp[p], entropy[p], **{k: v[p] for k, v in inputs.items()}, **given) for p in parts
    ]  # fmt: skip
    if top_entropy is None:  # a quantile of the whole batch is another one than those of its parts
        whole = evaluate(o, logp, entropy, **inputs)
        np.testing.assert_allclose(sum(f.loss for f in found), whole.loss, rtol=1e-5)
        np.testing.assert_allclose(np.concatenate([f.dlogp for f in found]), whole.dlogp, rtol=1e-5, atol=1e-7)
        policy = reduce_metrics([f.metrics for f in found])["policy_loss"]
        assert tuple(map(float, policy)) == pytest.approx(tuple(map(float, whole.metrics["policy_loss"])), rel=1e-5)
    want = [
        oracle.policy_loss(logp[p], entropy[p], objective=o, **{k: v[p] for k, v in inputs.items()}, **given)
        for p in parts
    ]
    np.testing.assert_allclose([f.loss for f in found], want, rtol=1e-5)


def test_statistics_of_log_probabilities_alone() -> None:
    logp, entropy, inputs = random_batch(1)
    o = Objective(beta=0.1, off_policy_threshold=0.2)
    loss, metrics = by_numpy(lambda lp: policy_loss(TokenStats(logp=lp), objective=o, **inputs), logp)
    full = evaluate(o, logp, entropy, **inputs)
    assert float(loss) == float(full.loss)
    assert set(full.metrics) - set(metrics) == {"entropy", "is_top1"}
    for name, metric in metrics.items():
        assert tuple(map(float, metric)) == tuple(map(float, full.metrics[name])), name

    def of(lp: Any) -> Any:
        return policy_loss(TokenStats(logp=lp), objective=o, **inputs)[0]

    np.testing.assert_array_equal(by_numpy(jax.grad(of), logp), full.dlogp)
    for name in ("entropy_coef", "top_entropy"):
        with pytest.raises(ValueError, match=rf"objective\.{name} reads the entropy, and stats\.entropy is None"):
            policy_loss(TokenStats(logp=jnp.asarray(logp)), objective=Objective(**{name: 0.5}), **inputs)
