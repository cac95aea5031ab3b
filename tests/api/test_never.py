"""What must never happen: NaN from nothing, anything from masked positions, wrong answers from extreme rows."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
from interpreted import by_numpy, in_numpy
from logitless import Objective, oracle
from loss_cases import AGGREGATIONS, EVERYTHING, POLICY_LEVELS, evaluate, evaluate_each, objective_of, random_batch

BACKENDS = ["reference", "chunked"]
UNCOUPLED = {"beta": 0.1, "entropy_coef": 0.02}
COUPLED = {**UNCOUPLED, "level": "sequence", "top_entropy": 0.5}


# -- nothing unmasked -----------------------------------------------------------------------------------------------


# Every policy with an aggregation, every aggregation with two policies or more; the other pairs repeat these.
EMPTY = [
    pytest.param(*pl, a, marks=() if (i + j) % 5 == 0 else pytest.mark.slow)
    for i, pl in enumerate(POLICY_LEVELS)
    for j, a in enumerate(AGGREGATIONS)
]


@pytest.mark.parametrize(("policy", "level", "aggregation"), EMPTY)
def test_a_batch_with_nothing_unmasked(policy: str, level: str, aggregation: str) -> None:
    logp, _, inputs = random_batch(0, layout="packed" if aggregation == "dapo" else "rows")
    junk = np.full_like(logp, np.nan)
    inputs.update({k: junk for k in ("old_logp", "ref_logp", "rollout_logp")}, mask=np.zeros((4, 6), bool))
    inputs["advantages"] = np.full_like(inputs["advantages"], np.inf)
    o = objective_of(policy, level, aggregation, **EVERYTHING)
    # As a micro-batch of a larger batch, on its own, and in a world where every micro-batch is empty.
    denominators = [dict(denominator=np.float32(d), entropy_denominator=np.float32(d)) for d in (10.0, 0.0)]
    for got in (
        evaluate(o, junk, junk, **inputs),
        *evaluate_each(o, [(junk, junk, {**inputs, **d}) for d in denominators]),
    ):
        assert got.loss == 0.0 and not got.dlogp.any() and not got.dentropy.any()
        assert not any(np.isnan(float(x)) for m in got.metrics.values() for x in m)


def logits_batch(seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Logits, hidden states and head of one small batch, and its loss inputs."""
    rng = np.random.default_rng(seed)
    _, _, inputs = random_batch(seed)
    arrays = {
        "logits": rng.normal(size=(4, 6, 9)).astype(np.float32),
        "hidden": rng.normal(size=(4, 6, 5)).astype(np.float32),
        "lm_head": rng.normal(size=(9, 5)).astype(np.float32),
        "targets": rng.integers(0, 9, (4, 6)),
    }
    return arrays, inputs


@functools.cache
def traced_loss(call: str, backend: str, coupled: bool) -> Any:
    """A public loss and its gradients by everything it differentiates; traced once for all tests."""
    names = ("logits",) if call == "grpo_loss" else ("hidden", "lm_head")
    o = Objective(**(COUPLED if coupled else UNCOUPLED))

    def loss(differentiated: list[jax.Array], targets: jax.Array, inputs: dict[str, Any]) -> jax.Array:
        return getattr(flat_calls, call)(*differentiated, targets, objective=o, backend=backend, **inputs)[0]

    step = in_numpy(jax.value_and_grad(loss))
    return lambda arrays, inputs: step([arrays[n] for n in names], arrays["targets"], inputs)


EVERY_LOSS = pytest.mark.parametrize(
    "call, backend, coupled", [*itertools.product(("grpo_loss", "linear_grpo_loss"), BACKENDS, (False, True))]
)


@EVERY_LOSS
def test_a_loss_with_nothing_unmasked(call: str, backend: str, coupled: bool) -> None:
    arrays, inputs = logits_batch()
    arrays["targets"] = np.full((4, 6), -100)
    inputs["mask"] = np.zeros((4, 6), bool)
    inputs["old_logp"] = np.full((4, 6), np.nan, np.float32)
    value, grads = traced_loss(call, backend, coupled)(arrays, inputs)
    assert value == 0.0 and not any(g.any() for g in grads)


# -- masked positions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "level", "layout"),
    [
        pytest.param(*pl, layout, marks=() if (i + j) % 2 == 0 else pytest.mark.slow)  # a layout for each policy
        for i, pl in enumerate(POLICY_LEVELS)
        for j, layout in enumerate(("tokens", "scattered"))
    ],
)
def test_masked_positions_change_nothing(policy: str, level: str, layout: str) -> None:
    """To the bit, for junk of every kind in every input, segment ids included where no valid token carries them."""
    logp, entropy, inputs = random_batch(1, layout=layout)
    o = objective_of(policy, level, **EVERYTHING)
    dead = ~inputs["mask"]
    batches = [(logp, entropy, inputs)]
    for junk in (np.nan, np.inf, -np.inf, 1e38):
        dirty = {k: np.where(dead, np.float32(junk), v) if v.dtype == np.float32 else v for k, v in inputs.items()}
        if layout == "scattered":
            dirty["segment_ids"] = np.where(dead, 77, inputs["segment_ids"])
        batches.append((np.where(dead, junk, logp), np.where(dead, junk, entropy), dirty))
    clean, *others = evaluate_each(o, batches)
    assert dead.any() and clean.loss != 0
    for got in others:
        assert got.loss == clean.loss
        np.testing.assert_array_equal(got.dlogp, clean.dlogp)
        np.testing.assert_array_equal(got.dentropy, clean.dentropy)
        assert not got.dlogp[dead].any() and not got.dentropy[dead].any()
        for name, metric in clean.metrics.items():
            assert tuple(map(float, got.metrics[name])) == tuple(map(float, metric)), name


def test_an_infinite_advantage_of_an_empty_row_changes_nothing() -> None:
    logp, entropy, inputs = random_batch(2)
    assert not inputs["mask"][2].any()
    clean = evaluate(Objective(), logp, entropy, **inputs)
    for junk in (np.inf, np.nan):
        inputs["advantages"] = np.where(np.arange(4) == 2, np.float32(junk), inputs["advantages"])
        got = evaluate(Objective(), logp, entropy, **inputs)
        assert got.loss == clean.loss and np.array_equal(got.dlogp, clean.dlogp)


@pytest.mark.quick
@EVERY_LOSS
def test_masked_tokens_of_a_loss_change_nothing(call: str, backend: str, coupled: bool) -> None:
    """Targets of -100, NaN log-probabilities, and non-finite logits and hidden states at masked positions."""
    arrays, inputs = logits_batch()
    dead = ~inputs["mask"]
    full_loss = traced_loss(call, backend, coupled)
    clean, clean_grads = full_loss(arrays, inputs)
    for junk in (np.nan, np.inf):
        dirty = dict(arrays, targets=np.where(dead, -100, arrays["targets"]))
        for name in ("logits", "hidden"):
            dirty[name] = np.where(dead[..., None], np.float32(junk), arrays[name])
        others = {k: np.where(dead, np.float32(junk), v) if k.endswith("_logp") else v for k, v in inputs.items()}
        value, grads = full_loss(dirty, others)
        assert value == clean != 0
        for got, want in zip(grads, clean_grads, strict=True):
            np.testing.assert_array_equal(got, want)
        assert not grads[0][dead].any()


@functools.partial(jax.jit, static_argnums=0)
def statistics(backend: str, logits: Any, hidden: Any, lm_head: Any, targets: Any, mask: Any) -> Any:
    """By both levels."""
    options = {"mask": mask, "backend": backend}
    of_logits = flat_calls.logprobs(logits, targets, **options)
    return of_logits, flat_calls.linear_logprobs(hidden, lm_head, targets, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_tokens_of_the_statistics_are_zero(backend: str) -> None:
    arrays, inputs = logits_batch()
    dead = ~inputs["mask"]
    targets = np.where(dead, -100, arrays["targets"])
    logits = np.where(dead[..., None], np.float32(np.nan), arrays["logits"])
    hidden = np.where(dead[..., None], np.float32(np.nan), arrays["hidden"])
    for stats in statistics(backend, logits, hidden, arrays["lm_head"], targets, inputs["mask"]):
        for x in jax.tree.leaves(stats):
            assert not np.asarray(x)[dead].any() and np.isfinite(np.asarray(x)[~dead]).all()


# -- extreme rows ---------------------------------------------------------------------------------------------------


def extreme_rows() -> tuple[np.ndarray, np.ndarray, list[str]]:
    """``[1, T, 8]`` logits, targets and the rows' names. Columns 6 and 7 are padding, and hold the largest logits."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=6)
    inf = np.inf
    rows = {
        "ordinary": (base, 2),
        "very negative": (base - 1e4, 2),
        "very positive": (base + 1e4, 2),
        "one-hot at the target, 20 nats": (np.where(np.arange(6) == 1, 20.0, base * 0.1), 1),
        "one-hot at the target, 1e4 nats": (np.where(np.arange(6) == 1, 1e4, 0.0), 1),
        "one-hot elsewhere, 30 nats": (np.where(np.arange(6) == 3, 30.0, base), 1),
        "-inf off the target": (np.where(np.arange(6) % 2 == 1, -inf, base), 2),
        "-inf everywhere but the target": (np.where(np.arange(6) == 4, base, -inf), 4),
        "spread of 1e4": (np.linspace(-1e4, 1e4, 6), 5),
    }
    logits = np.full((1, len(rows), 8), 2e4)
    for i, (row, _) in enumerate(rows.values()):
        logits[0, i, :6] = row
    return logits.astype(np.float32), np.array([[t for _, t in rows.values()]]), list(rows)


@pytest.mark.parametrize("fields", [UNCOUPLED, COUPLED], ids=["uncoupled", "coupled"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_rows_give_finite_right_losses_and_gradients(backend: str, fields: dict[str, Any]) -> None:
    logits, targets, names = extreme_rows()
    o = Objective(**fields, aggregation="bnpo")
    stats = oracle.token_stats(logits, targets, vocab_size=6)
    inputs = {
        "advantages": np.float32([1.5]),
        "old_logp": (stats.logp - 0.1).astype(np.float32),
        "ref_logp": (stats.logp + 0.3).astype(np.float32),
    }

    def loss(x: jax.Array) -> jax.Array:
        return flat_calls.grpo_loss(x, targets, objective=o, vocab_size=6, backend=backend, **inputs)[0]

    value, dlogits = jax.jit(jax.value_and_grad(loss))(jnp.asarray(logits))
    want, want_dlogits = oracle.grpo_loss(logits, targets, objective=o, vocab_size=6, **inputs)
    assert np.isfinite(value) and np.isfinite(dlogits).all()
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert not np.asarray(dlogits)[..., 6:].any()  # padding has no gradient
    for i, name in enumerate(names):
        # old and ref were rounded to float32 at |logp| of up to 1e4 and more (half an ulp is 5e-4 there); the same
        # numbers go to both sides, but logp - old and ref - logp inherit logp's own rounding of that size.
        size = max(1.0, float(np.abs(stats.logp[0, i])))
        scale = np.abs(want_dlogits[0, i]).max()
        np.testing.assert_allclose(
            dlogits[0, i], want_dlogits[0, i], rtol=1e-5 * size, atol=2e-6 * size * scale, err_msg=name
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_collapsed_rows_keep_their_gradient(backend: str) -> None:
    """From a margin of about 15 nats on a plain float32 ``z_y - lse`` is 0 and so is its gradient; here neither is."""
    margins = np.array([15.0, 20.0, 40.0, 80.0])
    logits = np.zeros((1, 4, 2), np.float32)
    logits[0, :, 0] = margins

    def loss(x: jax.Array) -> jax.Array:
        return flat_calls.grpo_loss(x, np.zeros((1, 4), np.int32), advantages=jnp.ones(1), backend=backend)[0]

    dlogits = np.asarray(jax.jit(jax.grad(loss))(jnp.asarray(logits)))
    want = np.exp(-margins) / (1 + np.exp(-margins)) / 4  # 1 - p_y, over four tokens
    np.testing.assert_allclose(dlogits[0, :, 0], -want, rtol=1e-5)
    np.testing.assert_allclose(dlogits[0, :, 1], want, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_vocabulary_and_minus_infinity_in_the_head(backend: str) -> None:
    """Rows of the head beyond ``vocab_size``, and columns that a bias of -inf removes, do not exist."""
    arrays, inputs = logits_batch(3)
    hidden, head, targets = arrays["hidden"], arrays["lm_head"], np.minimum(arrays["targets"], 5)
    bias = np.float32([0.1, 0.2, -0.3, 0.4, 0.0, 0.5, -np.inf, 0.0, 0.0])
    padded_head = np.where(np.arange(9)[:, None] < 7, head, np.float32(1e4))
    o = Objective(**UNCOUPLED)

    def step(head: np.ndarray, bias: np.ndarray, vocab_size: int) -> Any:
        options = {"objective": o, "backend": backend, "vocab_size": vocab_size, **inputs}

        def loss(h: Any, w: Any) -> Any:
            return flat_calls.linear_grpo_loss(h, w, targets, bias=bias, **options)[0]

        return by_numpy(jax.value_and_grad(loss, (0, 1)), hidden, head)

    value, (dh, dw) = step(padded_head, bias, 7)
    want, (want_dh, want_dw) = step(head[:6], bias[:6], 6)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(dh, want_dh, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(dw[:6], want_dw, rtol=1e-4, atol=1e-6)
    assert not np.asarray(dw)[6:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_live_target_outside_the_vocabulary_is_nan_and_says_so(backend: str) -> None:
    """Documented: NaN for that token alone, never a silent number."""
    arrays, _ = logits_batch()
    targets = arrays["targets"].copy()
    targets[1, 2], targets[3, 0] = 9, -1
    bad = np.zeros((4, 6), bool)
    bad[1, 2] = bad[3, 0] = True
    every = np.ones((4, 6), bool)
    for stats in statistics(backend, arrays["logits"], arrays["hidden"], arrays["lm_head"], targets, every):
        for x in (stats.logp, stats.entropy, stats.lse):
            np.testing.assert_array_equal(np.isnan(np.asarray(x)), bad)
        assert not np.asarray(stats.is_top1)[bad].any()
