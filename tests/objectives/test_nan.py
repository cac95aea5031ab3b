"""A NaN in a live token is a NaN in the loss, whatever would have dropped the token; a missing rollout value is not."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
from interpreted import in_numpy
from logitless import Objective, oracle
from logitless.objectives import policy_terms
from loss_cases import AGGREGATIONS, POLICY_LEVELS, evaluate, metrics_of, objective_of, random_batch

NAN = np.float32(np.nan)

# Everything that drops, bounds or replaces a token, one set for each aggregation (the sets go round with the policies).
DROPS: list[dict[str, Any]] = [
    {},
    {"correction": "token", "correction_mode": "mask", "correction_min": 0.9, "correction_max": 1.1},
    {"off_policy_threshold": -5.0, "correction": "sequence", "correction_min": 0.5},
    {"top_entropy": 0.25, "entropy_coef": 0.1},
    {"beta": 0.1, "kl_clamp": 1.0, "kl_log_ratio_clamp": 1.0, "kl_bias_correction": True, "log_ratio_clamp": 0.5},
]
CLIP_ONLY = {"delta": 1.1, "dual_clip": 1.2}


def cases(policy: str, level: str) -> list[Objective]:
    """An objective for each aggregation, each with one of the ways to lose a token."""
    shift = POLICY_LEVELS.index((policy, level))
    out = []
    for i, aggregation in enumerate(AGGREGATIONS):
        fields = dict(DROPS[(i + shift) % len(DROPS)], **(CLIP_ONLY if policy == "clip" else {}))
        out.append(objective_of(policy, level, aggregation, **fields))
    return out


@pytest.mark.parametrize(("policy", "level"), POLICY_LEVELS)
def test_a_nan_in_a_live_token_is_a_nan_in_the_loss(policy: str, level: str) -> None:
    """Its statistics are NaN, its advantage is zero or negative: nothing may hide it, in the library or the oracle."""
    logp, entropy, inputs = random_batch(1, layout="tokens")
    b, t = np.argwhere(inputs["mask"])[3]
    for i, o in enumerate(cases(policy, level)):
        bad_logp, bad_entropy, own = logp.copy(), entropy.copy(), dict(inputs)
        own["advantages"] = inputs["advantages"].copy()
        own["advantages"][b, t] = -2.0 if i % 2 else 0.0
        bad_logp[b, t] = bad_entropy[b, t] = NAN
        loss = evaluate(o, bad_logp, bad_entropy, **own).loss
        truth, dlogp, _ = oracle.policy_loss_grad(bad_logp, bad_entropy, objective=o, **own)
        assert np.isnan(float(loss)), o
        assert np.isnan(truth) and np.isnan(dlogp[b, t]), o
        assert np.isfinite(oracle.policy_loss(logp, entropy, objective=o, **own)), o  # and it was the NaN that did it


@pytest.mark.parametrize("name", ["advantages", "old_logp", "ref_logp", "token_weights"])
def test_a_nan_in_an_input_of_a_live_token_is_a_nan_in_the_loss(name: str) -> None:
    logp, entropy, inputs = random_batch(2, layout="tokens")
    inputs["token_weights"] = np.ones_like(logp)
    live, dead = (tuple(np.argwhere(inputs["mask"] == x)[0]) for x in (True, False))
    for fields in ({}, {"correction": "token", "correction_mode": "mask"}, {"level": "sequence", "top_entropy": 0.25}):
        o = Objective(beta=0.1, **fields)
        clean = evaluate(o, logp, entropy, **inputs).loss
        for where, expected in ((live, np.nan), (dead, float(clean))):
            own = {**inputs, name: inputs[name].copy()}
            own[name][where] = NAN
            np.testing.assert_array_equal(evaluate(o, logp, entropy, **own).loss, expected)
            assert np.isnan(oracle.policy_loss(logp, entropy, objective=o, **own)) == np.isnan(expected)


def test_a_reference_that_nobody_reads_changes_nothing() -> None:
    logp, entropy, inputs = random_batch(9)
    clean = evaluate(Objective(), logp, entropy, **inputs).loss
    assert evaluate(Objective(), logp, entropy, **dict(inputs, ref_logp=np.full_like(logp, NAN))).loss == clean


def test_the_gradient_of_a_nan_token_is_nan_even_where_the_token_is_dropped() -> None:
    logp, entropy, inputs = random_batch(3)
    b, t = np.argwhere(inputs["mask"])[0]
    logp[b, t] = NAN
    inputs["advantages"] = np.where(np.arange(4) == b, np.float32(0), inputs["advantages"])
    got = evaluate(Objective(), logp, entropy, **inputs)
    assert np.isnan(got.loss) and np.isnan(got.dlogp[b, t])
    assert np.isfinite(np.delete(got.dlogp.reshape(-1), b * 6 + t)).all()  # no other token was touched


def test_a_nan_entropy_that_nobody_reads_changes_nothing() -> None:
    logp, entropy, inputs = random_batch(4)
    o = Objective(beta=0.1)
    assert evaluate(o, logp, np.full_like(entropy, NAN), **inputs).loss == evaluate(o, logp, entropy, **inputs).loss


def test_a_nan_stays_in_the_quantile_and_on_the_right_side_of_every_bound() -> None:
    """The other tokens of the batch are judged as if it were not there."""
    logp, entropy, inputs = random_batch(5)
    b, t = np.argwhere(inputs["mask"])[2]
    entropy[b, t] = NAN
    got = evaluate(Objective(top_entropy=0.5), logp, entropy, **inputs)
    kept = got.metrics["kept_tokens"]
    assert np.isnan(got.loss)
    rest = dict(inputs, mask=inputs["mask"].copy())
    rest["mask"][b, t] = False
    others = metrics_of(Objective(top_entropy=0.5), logp, entropy, **rest)["kept_tokens"]
    assert float(kept.sum) == float(others.sum) + 1
    logp[b, t] = NAN
    inputs["advantages"] = np.full(4, -1.0, np.float32)
    kept = metrics_of(Objective(off_policy_threshold=-9.0), logp, entropy, **inputs)["kept_tokens"]
    assert float(kept.sum) == inputs["mask"][b].sum()  # its own sequence is not known to have drifted


def test_bounds_pass_a_nan_on_and_keep_their_tie_rules() -> None:
    x, one, nan = jnp.float32(1.0), jnp.float32(1.0), jnp.float32(jnp.nan)
    for f in (policy_terms.minimum, policy_terms.maximum):
        assert jnp.isnan(f(nan, one)) and jnp.isnan(f(one, nan)) and jnp.isnan(f(nan, nan))
        assert jax.grad(lambda a, f=f: f(a, one))(x) == 1.0 and jax.grad(lambda b, f=f: f(one, b))(x) == 0.0
    for low, high in itertools.product((None, 1.0), (None, 1.0)):
        assert jnp.isnan(policy_terms.clip(nan, low, high))
        assert jax.grad(lambda a, low=low, high=high: policy_terms.clip(a, low, high))(x) == 1.0


BACKENDS = ["reference", "chunked"]
LEVELS: dict[str, Objective] = {
    "token": Objective(beta=0.1, correction="token", correction_mode="mask", delta=1.5, dual_clip=2.0),
    "sequence": Objective(level="sequence", off_policy_threshold=-1.0, top_entropy=0.25, entropy_coef=0.01),
}


@in_numpy
def every_loss(logits: Any, hidden: Any, head: Any, targets: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Both calls on both backends at both levels, in one program; with the gradients of the uncoupled ones."""
    out: dict[str, Any] = {}
    for backend, (level, o) in itertools.product(BACKENDS, LEVELS.items()):
        options = dict(objective=o, backend=backend, **inputs)

        def of_logits(x: Any, options: dict[str, Any] = options) -> Any:
            return flat_calls.grpo_loss(x, targets, **options)[0]

        def of_head(h: Any, w: Any, options: dict[str, Any] = options) -> Any:
            return flat_calls.linear_grpo_loss(h, w, targets, chunk_size=8, **options)[0]

        out[f"grpo_loss {backend} {level}"] = jax.value_and_grad(of_logits)(logits)
        out[f"linear_grpo_loss {backend} {level}"] = jax.value_and_grad(of_head, (0, 1))(hidden, head)
    return out


def test_a_nan_or_a_bad_live_target_is_a_nan_in_every_loss() -> None:
    rng = np.random.default_rng(0)
    _, _, inputs = random_batch(6)
    logits, hidden, head = (rng.normal(size=s).astype(np.float32) for s in ((4, 6, 9), (4, 6, 5), (9, 5)))
    targets = rng.integers(0, 9, (4, 6)).astype(np.int32)
    live, dead = (tuple(np.argwhere(inputs["mask"] == x)[1]) for x in (True, False))
    inputs["advantages"] = np.where(np.arange(4) == live[0], np.float32(-1), inputs["advantages"])
    inputs["rollout_logp"][live] = -50.0  # weight outside its bounds, far off policy: dropped for two reasons
    clean = every_loss(logits, hidden, head, targets, inputs)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(clean))

    def spoilt(at: tuple[int, ...], what: str) -> dict[str, Any]:
        x, h, y = logits.copy(), hidden.copy(), targets.copy()
        if what == "nan":
            x[at], h[at] = NAN, NAN
        else:
            y[at] = int(what)
        return every_loss(x, h, head, y, inputs)

    for what in ("nan", "-100", "9"):
        for name, (loss, grads) in spoilt(live, what).items():
            assert np.isnan(loss), (name, what)
            if what == "nan":  # JAX's own gradient of the reference's statistics ignores a target that is not there
                assert np.isnan(np.asarray(jax.tree.leaves(grads)[0])[live]).any(), (name, what)
        for name, (loss, _) in spoilt(dead, what).items():
            assert loss == clean[name][0], (name, what)


@pytest.mark.parametrize("policy", ["clip", "vespo"])
@pytest.mark.parametrize("correction", ["token", "sequence", "geometric"])
def test_a_missing_rollout_value_is_no_correction_for_its_token(policy: str, correction: str) -> None:
    """It weighs one, as where rollout equals old; in the off-policy mask, as where rollout equals the current logp."""
    if (policy, correction) == ("vespo", "geometric"):
        correction = "token"
    logp, entropy, inputs = random_batch(7)
    inputs["advantages"] = -np.abs(inputs["advantages"])
    missing = inputs["mask"] & (np.arange(24).reshape(4, 6) % 3 == 0)
    gone = dict(inputs, rollout_logp=np.where(missing, NAN, inputs["rollout_logp"]))

    def both(o: Objective, stand_in: np.ndarray) -> None:
        given = dict(inputs, rollout_logp=np.where(missing, stand_in, inputs["rollout_logp"]))
        got, want = (evaluate(o, logp, entropy, **x) for x in (gone, given))
        assert got.loss == want.loss != 0 and np.array_equal(got.dlogp, want.dlogp)
        np.testing.assert_allclose(oracle.policy_loss(logp, entropy, objective=o, **gone), got.loss, rtol=1e-5)
        assert (
            float(got.metrics["rollout_missing"].sum) == missing.sum()
            and float(want.metrics["rollout_missing"].sum) == 0
        )
        assert float(got.metrics["rollout_missing"].count) == inputs["mask"].sum()

    both(objective_of(policy, correction=correction, correction_max=3.0), inputs["old_logp"])
    both(objective_of(policy, off_policy_threshold=0.05), logp)
    uncorrected = evaluate(objective_of(policy), logp, entropy, **inputs).loss
    assert uncorrected != evaluate(objective_of(policy, correction=correction), logp, entropy, **gone).loss


def test_a_nan_policy_is_not_taken_for_a_missing_rollout_value() -> None:
    """On-policy the correction is made of the current log-probability: a NaN there is no missing value."""
    logp, entropy, inputs = random_batch(8)
    logp[tuple(np.argwhere(inputs["mask"])[0])] = NAN
    inputs["old_logp"] = None
    for correction in ("token", "sequence", "geometric"):
        o = Objective(policy="reinforce", correction=correction, correction_mode="mask")
        assert np.isnan(evaluate(o, logp, entropy, **inputs).loss)
        assert np.isnan(oracle.policy_loss(logp, entropy, objective=o, **inputs))
