"""Advantages of groups: by hand, of library and oracle alike, and against float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import logitless
from interpreted import by_numpy
from logitless import oracle

BATCH_STD = math.sqrt((0.125**2 + 1.875**2 + 2 * 0.875**2) / 3)
LENGTHS = np.array([2, 1, 1, 0, 0, 0])
BY_HAND: list[tuple[list[float], int, dict[str, Any], list[float]]] = [
    ([1, 3, 0.25, 0.25], 2, {}, [-1 / (math.sqrt(2) + 1e-4), 1 / (math.sqrt(2) + 1e-4), 0, 0]),
    ([1, 3, 0.25, 0.25], 2, {"scale": "none"}, [-1, 1, 0, 0]),
    ([1, 3, 0.25, 0.25], 2, {"scale": "batch", "eps": 1e-6}, [-1 / (BATCH_STD + 1e-6), 1 / (BATCH_STD + 1e-6), 0, 0]),
    # One reward, or one a group: nothing to compare it with.
    ([3], 1, {"scale": "batch"}, [3 / 1.0001]),
    ([3, -1], 1, {}, [3 / 1.0001, -1 / 1.0001]),
    # Equal rewards, also without an eps.
    ([0.1, 0.1, 0.1, 1, 2, 3], 3, {"eps": 0.0}, [0, 0, 0, -1, 0, 1]),
    ([0.1] * 4, 2, {"eps": 0.0, "scale": "batch"}, [0] * 4),
    # Each less the mean of the others: a pair is twice as far apart; the standard deviation of 1, 0, 2 is 1.
    ([1, 0, 2, 0.3, 0.3, 0.3], 3, {"scale": "none", "baseline": "leave_one_out"}, [0, -1.5, 1.5, 0, 0, 0]),
    ([1, 0], 2, {"scale": "none", "baseline": "leave_one_out"}, [1, -1]),
    ([1, 5], 1, {"scale": "none", "baseline": "leave_one_out"}, [1, 5]),
    ([1, 0, 2], 3, {"eps": 0.0, "baseline": "leave_one_out"}, [0, -1.5, 1.5]),
    # OPO: rewards 1, 0, 2 of 2, 1 and 1 tokens have the baseline (2 + 0 + 2) / 4; veRL's for one reward is 0.
    ([1, 0, 2, 3, 3, 3], 3, {"scale": "none", "baseline": "by_length", "lengths": LENGTHS}, [0, -1, 1, 0, 0, 0]),
    ([0.1] * 4, 2, {"scale": "none", "baseline": "by_length", "lengths": np.array([3, 7, 1, 2])}, [0] * 4),
    ([1, 5], 1, {"scale": "none", "baseline": "by_length", "lengths": np.array([4, 2])}, [1, 5]),
    # veRL's grpo_passk: only the best completion counts, by its lead; over the group's deviation if scaled.
    ([1, 0, 3, 2, 2, 0], 3, {"scale": "none", "baseline": "second_best"}, [0, 0, 2, 0, 0, 0]),
    ([1, 0, 3, 2, 2, 0], 3, {"eps": 1e-6, "baseline": "second_best"}, [0, 0, 2 / (math.sqrt(7 / 3) + 1e-6), 0, 0, 0]),
    # REINFORCE++: rewards 1, 0 of 3 tokens and 1 have mean 3/4 and variance 1/4 over tokens; a baseline shifts them.
    *(
        ([1, 0], 2, {"scale": "tokens", "baseline": baseline, "lengths": np.array([3, 1])},
         [0.25 / math.sqrt(0.25 + 1e-8), -0.75 / math.sqrt(0.25 + 1e-8)])
        for baseline in ("none", "mean")
    ),
    ([0.1, 0.1], 1, {"scale": "tokens", "baseline": "none", "lengths": np.array([3, 1])}, [0, 0]),
]  # fmt: skip


@pytest.mark.parametrize(("rewards", "size", "options", "want"), BY_HAND)
def test_by_hand(rewards: list[float], size: int, options: dict[str, Any], want: list[float]) -> None:
    """A zero is zero to the bit."""
    ours = by_numpy(lambda r: logitless.group_advantages(r, size, **options), np.float32(rewards))
    np.testing.assert_allclose(ours, want, rtol=1e-6)
    np.testing.assert_allclose(oracle.group_advantages(np.float32(rewards), size, **options), want, rtol=1e-12)


SCALES, BASELINES = ("group", "batch", "none", "tokens"), ("none", "mean", "leave_one_out", "by_length", "second_best")


@pytest.mark.parametrize(("scale", "baseline"), list(itertools.product(SCALES, BASELINES)))
def test_every_scale_and_baseline_against_float64(scale: Any, baseline: Any) -> None:
    rewards, lengths = np.random.default_rng(0).normal(size=12).astype(np.float32), np.arange(1, 13)
    given = {"lengths": lengths} if scale == "tokens" or baseline == "by_length" else {}
    for size, eps in itertools.product((1, 2, 3, 4, 12), (1e-4, 1e-6)):
        if size == 1 and baseline == "second_best":
            continue
        own: dict[str, Any] = dict(given, scale=scale, baseline=baseline, eps=eps)
        got = by_numpy(lambda r, n=size, own=own: logitless.group_advantages(r, n, **own), rewards)
        assert got.shape == (12,) and got.dtype == np.float32
        np.testing.assert_allclose(got, oracle.group_advantages(rewards, size, **own), rtol=1e-5, atol=2e-6)
    assert oracle.group_advantages(rewards.reshape(2, 6), 6, scale="none").shape == (2, 6)
    with pytest.raises(ValueError, match="groups of 5"):
        oracle.group_advantages(rewards, 5)


def test_a_baseline_by_length_weighs_rewards_by_tokens() -> None:
    """With equal lengths it is the mean."""
    rewards, tokens = np.random.default_rng(0).random(12).astype(np.float32), np.arange(1, 13)
    r, w = rewards.reshape(3, 4).astype(np.float64), tokens.reshape(3, 4)
    want = (r - (r * w).sum(1, keepdims=True) / w.sum(1, keepdims=True)).reshape(-1)
    own: dict[str, Any] = {"scale": "none", "baseline": "by_length"}
    for advantages in (logitless.group_advantages, oracle.group_advantages):
        np.testing.assert_allclose(advantages(rewards, 4, lengths=tokens, **own), want, atol=1e-6)
        equal = advantages(rewards, 4, lengths=np.full(12, 5), **own)
        np.testing.assert_allclose(equal, advantages(rewards, 4, scale="none"), atol=1e-6)


def test_a_group_of_equal_rewards_has_no_advantage() -> None:
    """0.1 three times has a float32 mean that is not 0.1; eps would magnify what is left over."""
    rewards = np.repeat(np.float32([0.1, 0.7, 1e6 + 0.3, -3.3]), 7)
    for scale in ("group", "none", "batch"):
        got = logitless.group_advantages(rewards, 7, scale=scale, eps=1e-6)  # type: ignore[arg-type]
        np.testing.assert_array_equal(got, 0.0)


@pytest.mark.parametrize("group_size", [1, 2, 3, 6])
@pytest.mark.parametrize("peaked", [1.0, 40.0])
def test_optimal_token_advantages(group_size: int, peaked: float) -> None:
    """Against float64 with ragged masks, NaN where masked, tails and peaked distributions."""
    rng = np.random.default_rng(group_size)
    logits = peaked * rng.normal(size=(6, 9, 7))
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    targets = np.where(rng.random((6, 9)) < 0.7, p.argmax(-1), rng.integers(0, 7, (6, 9)))
    logp = np.log(np.take_along_axis(p, targets[..., None], -1)[..., 0])
    rewards, weights = rng.normal(size=6).astype(np.float32), rng.random((6, 9)).astype(np.float32)
    mask = np.arange(9) < rng.integers(0, 10, (6, 1))
    hidden = [np.where(mask, x, np.nan).astype(np.float32) for x in (logp, np.log((p * p).sum(-1)))]
    stats = logitless.TokenStats(logp=jnp.asarray(hidden[0]), log_sum_p2=jnp.asarray(hidden[1]))
    exact = [np.where(mask, x.astype(np.float64), 0.0) for x in hidden]  # the rounded inputs
    cases: list[dict[str, Any]] = [{}, {"token_weights": weights}, {"zero_tail": True}]
    for given in cases:
        got = by_numpy(lambda s, g=given: logitless.optimal_token_advantages(rewards, s, mask, group_size, **g), stats)
        want = oracle.optimal_token_advantages(rewards, exact[0], np.exp(exact[1]), mask, group_size, **given)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_an_optimal_token_baseline_by_hand() -> None:
    """p 0.5 of two has energy 0.5 a token, 1 none: W = 0.5, 1 against 0.5, 0.5, and b_2 = (1 + 0) / 1.5."""
    p = np.array([[0.5, 0.5, 0.5], [0.5, 1.0, 1.0]])
    s2 = p**2 + (1 - p) ** 2
    stats = logitless.TokenStats(logp=jnp.log(jnp.float32(p)), log_sum_p2=jnp.log(jnp.float32(s2)))
    rewards, mask = np.float32([1, 0]), np.array([[1, 1, 1], [1, 1, 0]])
    want = np.array([[1 / 2, 1 / 3, 0], [-1 / 2, -2 / 3, 0]])
    np.testing.assert_allclose(logitless.optimal_token_advantages(rewards, stats, mask, 2), want, atol=1e-6)
    np.testing.assert_allclose(oracle.optimal_token_advantages(rewards, np.log(p), s2, mask, 2), want, atol=1e-7)
    narrow = stats.log_sum_p2.astype(jnp.bfloat16)
    got, same = (
        logitless.optimal_token_advantages(rewards, logitless.TokenStats(logp=stats.logp, log_sum_p2=s), mask, 2)
        for s in (narrow, narrow.astype(jnp.float32))
    )
    np.testing.assert_array_equal(got, same)
    tail = logitless.optimal_token_advantages(rewards, stats, mask, 2, zero_tail=True)
    np.testing.assert_allclose(tail, want + np.array([[0, 0, 1], [0, 0, 0]]), atol=1e-6)
    with pytest.raises(TypeError, match="expected stats to be TokenStats with log_sum_p2"):
        logitless.optimal_token_advantages(rewards, logitless.TokenStats(logp=stats.logp), mask, 2)
    with pytest.raises(ValueError, match=r"stats.logp has shape \(2, 3\), expected \[4, T\]"):
        logitless.optimal_token_advantages(np.float32([1, 0, 1, 0]), stats, mask, 2)
    with pytest.raises(ValueError, match="optimal_token_advantages: 2 rewards do not split into groups of 4"):
        logitless.optimal_token_advantages(rewards, stats, mask, 4)
