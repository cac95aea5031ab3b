"""Metrics: ``(sum, count)`` pairs that add up over micro-batches, and what each of them counts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
import logitless
from interpreted import by_numpy
from logitless import Metric, Objective, metric_values, reduce_metrics
from loss_cases import POLICY_LEVELS, evaluate, evaluate_each, half, metrics_of, objective_of, random_batch, token_stats

EVERY_METRIC = {
    "beta": 0.1,
    "correction": "token",
    "off_policy_threshold": 0.1,
    "entropy_coef": 0.01,
    "parity_metrics": True,
}


def pair(metric: Metric) -> tuple[float, float]:
    return float(metric.sum), float(metric.count)


def test_every_metric_by_hand() -> None:
    """Two rows of six, ratios and advantages chosen; the last token of row 1 is masked and holds NaN."""
    ratio = np.array([[0.5, 0.7, 1.0, 1.1, 1.5, 4.0], [0.5, 0.7, 1.0, 1.5, 4.0, 9.0]])
    logp = np.full((2, 6), -1.0)
    mask = np.ones((2, 6), bool)
    mask[1, 5] = False
    logp[1, 5] = np.nan
    entropy = np.where(mask, np.arange(12).reshape(2, 6), np.nan)
    ref = np.full((2, 6), -1.5)
    rollout = np.where(mask, -1.0 - np.log(ratio), np.nan)
    got = metrics_of(
        Objective(eps_low=0.2, eps_high=0.28, dual_clip=3.0, beta=0.1, correction="token", correction_max=1.25),
        logp,
        entropy,
        advantages=np.float32([1.0, -1.0]),
        mask=mask,
        old_logp=(-1.0 - np.log(ratio)).astype(np.float32),
        ref_logp=ref.astype(np.float32),
        rollout_logp=(rollout - np.log(1.2)).astype(np.float32),
    )
    live = ratio[mask]
    want: dict[str, tuple[float, float]] = {
        "entropy": (np.arange(11).sum(), 11),
        "logp": (-11.0, 11),
        "is_top1": (0.0, 11),
        "ratio": (live.sum(), 11),
        "ratio_squared": ((live**2).sum(), 11),
        "ratio_min": (0.5, 11),
        "ratio_max": (4.0, 11),
        "live_token_share": (11, 12),
        "clip_fraction_low": (2, 11),  # row 1: 0.5 and 0.7
        "clip_fraction_high": (2, 11),  # row 0: 1.5 and 4.0
        "clip_fraction": (4, 11),
        "clip_fraction_dual": (1, 11),  # row 1: 4.0
        "kl_loss": (11 * (np.exp(-0.5) + 0.5 - 1), 11),  # k3, as the loss has it
        "kl_k1": (11 * 0.5, 11),
        "kl_k3": (11 * (np.exp(-0.5) + 0.5 - 1), 11),
        "correction_weight": (11 * 1.2, 11),
        "rollout_missing": (0, 11),
        "zero_gradient_tokens": (0, 11),  # the KL moves every token
    }
    assert set(got) == set(want)
    for name, value in want.items():
        assert pair(got[name]) == pytest.approx(value, rel=1e-5, abs=1e-6), name
    values = metric_values(got)
    assert values["ess"] == pytest.approx(live.mean() ** 2 / (live**2).mean(), rel=1e-5)
    assert values["ratio_max"] == 4.0 and values["live_token_share"] == pytest.approx(11 / 12)
    assert values["kl_k1"] == pytest.approx(0.5)


def test_zero_gradient_tokens_counts_clipped_dropped_and_unrewarded_tokens() -> None:
    logp = np.full((2, 6), -1.0, np.float32)
    ratio = np.array([[1.0, 2.0, 2.0, 0.5, 0.5, 1.0]] * 2)
    advantages = np.array([[1.0, 1.0, -1.0, 1.0, -1.0, 0.0], [0.0] * 6], np.float32)
    inputs = {"advantages": advantages, "old_logp": (logp - np.log(ratio)).astype(np.float32)}
    got = metrics_of(Objective(), logp, logp, **inputs)
    assert pair(got["zero_gradient_tokens"]) == (3 + 6, 12)  # held at 1.2, held at 0.8, A = 0; and the row of zeros
    got = metrics_of(Objective(entropy_coef=0.1), logp, logp, **inputs)
    assert pair(got["zero_gradient_tokens"]) == (0, 12)


def test_clip_fractions_of_cispo_and_gmpo() -> None:
    logp = np.full((2, 6), -1.0, np.float32)
    ratio = np.array([[0.5, 0.9, 1.0, 1.1, 2.0, 6.0]] * 2)
    inputs = {"advantages": np.float32([1.0, -1.0]), "old_logp": (logp - np.log(ratio)).astype(np.float32)}

    def fractions(**fields: Any) -> tuple[float, float]:
        got = metrics_of(Objective(**fields), logp, logp, **inputs)
        return float(got["clip_fraction_low"].sum), float(got["clip_fraction_high"].sum)

    assert fractions(policy="cispo", eps_high=5.0) == (0, 1)  # the raw bound has no lower side
    assert fractions(policy="cispo", cispo_bound="interval", eps_high=0.5) == (1, 2)
    assert fractions(policy="gmpo", eps_low=0.05, eps_high=0.5) == (2, 2)  # log 0.5, log 0.9; log 2, log 6
    assert "clip_fraction_low" not in metrics_of(Objective(policy="sapo"), logp, logp, **inputs)


def test_parity_of_trainer_and_sampler() -> None:
    """By hand: ratios of each token, and of each sequence by its geometric mean; segments are sequences."""
    ratio = np.array([[1.0, 1.0015, 0.9985, 1.04], [1.03, 0.97, 1.0, 0.5], [1.2, 1.0, 1.0, 1.0]])
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    logp = np.full((3, 4), -2.0, np.float32)
    inputs = {"advantages": np.ones((3, 4), np.float32), "mask": mask, "old_logp": np.float32(logp - np.log(ratio))}
    objective = Objective(parity_metrics=True)
    got = {k: pair(v) for k, v in metrics_of(objective, logp, logp, **inputs).items() if k.startswith("parity")}
    expected = {
        "parity_tokens": (2, 5), "parity_tokens_1pct": (3, 5), "parity_tokens_5pct": (5, 5),
        "parity_sequences": (2, 2), "parity_sequences_1pct": (2, 2), "parity_sequences_5pct": (2, 2),
    }  # fmt: skip
    assert got.keys() == expected.keys() and all(got[k] == pytest.approx(expected[k]) for k in expected)
    segments = np.array([[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 0]])
    packed = metrics_of(objective, logp, logp, **inputs, segment_ids=segments)
    assert pair(packed["parity_sequences"]) == pytest.approx((1, 4))  # 1.00075; not 0.9985, 1.03, 0.97
    assert pair(packed["parity_sequences_1pct"]) == pytest.approx((2, 4))
    nan = metrics_of(objective, np.where(mask, np.nan, logp), logp, **inputs)
    assert pair(nan["parity_tokens_5pct"]) == (0, 5) and pair(nan["parity_sequences_5pct"]) == (0, 2)
    on_policy = metrics_of(objective, logp, logp, **{**inputs, "old_logp": None})
    assert pair(on_policy["parity_tokens"]) == (5, 5)
    assert not any(k.startswith("parity") for k in metrics_of(Objective(), logp, logp, **inputs))


@pytest.mark.parametrize(
    ("policy", "level", "clip_metrics"),
    half((*pl, m) for i, pl in enumerate(POLICY_LEVELS) for m in ("trl", "liger")[:: 1 if i % 2 else -1]),
)
def test_metrics_of_micro_batches_reduce_to_those_of_the_batch(policy: str, level: str, clip_metrics: str) -> None:
    o = objective_of(policy, level, **EVERY_METRIC, clip_metrics=clip_metrics)
    logp, entropy, inputs = random_batch(3)
    whole = metrics_of(o, logp, entropy, **inputs)
    parts = [
        metrics_of(o, logp[rows], entropy[rows], **{k: v[rows] for k, v in inputs.items()})
        for rows in (slice(0, 2), slice(2, 4))
    ]
    reduced = reduce_metrics(parts)
    assert set(reduced) == set(whole)
    assert metric_values(reduced)["entropy_coef"] == pytest.approx(0.01)
    for name in reduced:
        assert pair(reduced[name]) == pytest.approx(pair(whole[name]), rel=1e-5), name


def test_a_micro_batch_with_nothing_in_it_changes_no_metric() -> None:
    o = objective_of("clip", "sequence", "bnpo", **EVERY_METRIC, clip_metrics="liger")
    logp, entropy, inputs = random_batch(3)
    whole = metrics_of(o, logp, entropy, **inputs)
    nothing = metrics_of(o, np.full_like(logp, np.nan), entropy, **{**inputs, "mask": np.zeros((4, 6))})
    assert metric_values(whole)["entropy_coef"] == pytest.approx(0.01)
    assert set(metric_values(nothing).values()) == {0.0}  # nothing was counted, and no NaN to log
    assert all(
        not np.isnan(float(m.sum)) and float(m.count) == 0 for k, m in nothing.items() if k != "live_token_share"
    )
    reduced = reduce_metrics([nothing, whole])
    for name in whole:
        if name != "live_token_share":
            assert pair(reduced[name]) == pair(whole[name]), name
    assert pair(reduced["live_token_share"]) == (inputs["mask"].sum(), 48)


def test_sequence_level_metrics_as_trl_logs_them() -> None:
    """Four rows, the last of them empty, sequence ratios 1.5, 1.1, 0.5 and none. Per sequence every row counts, the
    empty one with a ratio of one; with advantages that differ within a row, tokens count."""
    mask = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]])
    ratio = np.array([1.5, 1.1, 0.5, 1.0])[:, None]
    logp = np.full((4, 3), -1.0, np.float32)
    old = (logp - np.log(ratio)).astype(np.float32)

    def of(o: Objective, advantages: Any) -> dict[str, tuple[float, float]]:
        metrics = metrics_of(o, logp, logp, advantages=np.float32(advantages), mask=mask, old_logp=old)
        return {k: pair(v) for k, v in metrics.items() if "clip" in k or k == "vespo_phi"}

    rows, trl = [1.0, 1.0, -1.0, -1.0], Objective(level="sequence")
    assert of(trl, rows) == {
        "clip_fraction_low": pytest.approx((1, 4)),
        "clip_fraction_high": pytest.approx((1, 4)),
        "clip_fraction": pytest.approx((2, 4)),
        "clip_fraction_low_min": (0, 4),
        "clip_fraction_high_max": (1, 4),
    }
    tokens = [[1.0, 0.0, 1.0], [1.0] * 3, [-1.0] * 3, [-1.0] * 3]
    got = of(trl, tokens)
    assert (got["clip_fraction_low"], got["clip_fraction_high"]) == ((1, 6), (2, 6))
    assert got["clip_fraction_high_max"] == pytest.approx((2 / 3, 3)) and got["clip_fraction_low_min"] == (0, 3)
    got = of(trl.replace(clip_metrics="liger"), rows)
    assert (got["clip_fraction_low"], got["clip_fraction_high"]) == ((1, 6), (3, 6)) and len(got) == 3
    # At the token level a mean of every row would cost collectives where tokens are sharded: there are none.
    assert "clip_fraction_low_min" not in of(Objective(), rows)
    # phi = exp(lam + k s - lam exp(s)) with s the sum of log-ratios; 1 for the empty row.
    s = np.log(ratio[:3, 0]) * [3, 2, 1]
    k, lam = np.array([2, 2, 3]), np.array([3, 3, 2])
    phi = np.exp(lam + k * s - lam * np.exp(s))
    vespo = Objective(policy="vespo")
    assert of(vespo, rows)["vespo_phi"] == pytest.approx((phi.sum() + 1, 4), rel=1e-5)
    assert of(vespo.replace(clip_metrics="liger"), rows)["vespo_phi"] == pytest.approx((phi.sum(), 3), rel=1e-5)
    by_token = [[1.0] * 3, [1.0] * 3, [-1.0] * 3, [-1.0] * 3]
    assert of(vespo, by_token)["vespo_phi"] == pytest.approx(((phi * [3, 2, 1]).sum(), 6), rel=1e-5)


def test_the_kl_of_the_loss_policy_loss_and_coefficient() -> None:
    """One token of ratio 2 with d = 1: k1 = -1, weighted by the ratio -2, clamped to 0.5 before that: -1."""
    inputs = {"advantages": np.float32([0.5]), "old_logp": np.float32([[-1.5 - np.log(2.0)]])}
    inputs |= {"ref_logp": np.float32([[-0.5]]), "mask": np.ones((1, 1)), "denominator": 4.0}
    o = Objective(beta=0.1, kl="k1", kl_bias_correction=True, entropy_coef=0.25, eps_high=5.0)
    got = evaluate(o, [[-1.5]], [[3.0]], **inputs)
    assert pair(got.metrics["kl_loss"]) == pytest.approx((-2.0, 1))
    assert pair(got.metrics["policy_loss"]) == pytest.approx((-2 * 0.5 - 0.2, 1))  # over one sequence, not over four
    assert float(got.loss) == pytest.approx((-2 * 0.5 - 0.2) / 4 - 0.25 * 3.0)
    assert pair(got.metrics["entropy_coef"]) == (0.25, 1)
    got = evaluate(o.replace(kl_clamp=0.5), [[-1.5]], [[3.0]], **inputs)
    assert pair(got.metrics["kl_loss"]) == pytest.approx((-1.0, 1))


def test_metrics_carry_no_gradient() -> None:
    logp, entropy, inputs = random_batch(4)
    o = objective_of("clip", **EVERY_METRIC)

    def total(lp: jax.Array, h: jax.Array) -> jax.Array:
        metrics = logitless.policy_loss(token_stats(lp, h), objective=o, **inputs)[1]
        return sum(m.sum for m in metrics.values())

    for gradient in by_numpy(jax.grad(total, (0, 1)), logp, entropy):
        assert not gradient.any()


def test_metrics_of_a_full_loss_agree_between_backends() -> None:
    rng = np.random.default_rng(0)
    hidden, head = (rng.normal(size=s).astype(np.float32) for s in ((4, 6, 3), (9, 3)))
    targets = rng.integers(0, 9, (4, 6))
    _, _, inputs = random_batch(5)
    o = objective_of("clip", beta=0.1, entropy_coef=0.01)
    results = {
        backend: by_numpy(
            functools.partial(flat_calls.linear_grpo_loss, objective=o, backend=backend, **inputs),
            hidden,
            head,
            targets,
        )[1]
        for backend in ("reference", "chunked")
    }
    assert set(results["reference"]) == set(results["chunked"])
    for name, metric in results["reference"].items():
        assert pair(results["chunked"][name]) == pytest.approx(pair(metric), rel=1e-5), name
    top = np.einsum("bth,vh->btv", hidden.astype(np.float64), head.astype(np.float64)).argmax(-1) == targets
    assert float(results["chunked"]["is_top1"].sum) == (top & inputs["mask"]).sum()


def test_reduce_metrics_takes_extremes_and_refuses_different_sets() -> None:
    a = {"ratio_min": Metric(jnp.float32(0.5), jnp.float32(1)), "ratio_max": Metric(jnp.float32(0.5), jnp.float32(1))}
    b = {"ratio_min": Metric(jnp.float32(2.0), jnp.float32(3)), "ratio_max": Metric(jnp.float32(2.0), jnp.float32(3))}
    reduced = reduce_metrics([a, b])
    assert pair(reduced["ratio_min"]) == (0.5, 4) and pair(reduced["ratio_max"]) == (2.0, 4)
    assert metric_values(reduced) == {"ratio_min": 0.5, "ratio_max": 2.0}
    with pytest.raises(ValueError, match=r"the sets differ in \['entropy'\]"):
        reduce_metrics([a, {**b, "entropy": a["ratio_min"]}])
    with pytest.raises(ValueError, match="nothing to reduce"):
        reduce_metrics([])


def test_metrics_that_a_scan_stacked_reduce_to_those_of_the_batch() -> None:
    """Over the leading axis, alone or beside a set that is not stacked; sums add up, extremes stay extremes."""
    logp, entropy, inputs = random_batch(3, shape=(8, 6))
    o = objective_of("clip", **EVERY_METRIC, aggregation="bnpo")

    def micro(rows: slice | None) -> Any:
        return metrics_of(o, logp[rows], entropy[rows], **{k: v[rows] for k, v in inputs.items()})

    parts = [micro(slice(i, i + 2)) for i in range(0, 8, 2)]
    stacked = jax.lax.scan(lambda c, x: (c, x), 0, jax.tree.map(lambda *x: jnp.stack(x), *parts))[1]
    rest = jax.tree.map(lambda x: x[1:], stacked)
    whole = metric_values(micro(slice(None)))
    for got in (stacked, reduce_metrics([stacked]), reduce_metrics([parts[0], rest])):
        assert metric_values(got) == pytest.approx(whole, rel=1e-5)
    assert np.ndim(reduce_metrics([stacked])["ratio_min"].count) == 0


def test_a_mean_ratio_lies_between_the_smallest_and_the_largest() -> None:
    """At the sequence level every token of a sequence has one ratio: the mean is that ratio, and a float32 sum of it is
    not always its multiple."""
    batches = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        logp = -rng.exponential(size=(1, 37)).astype(np.float32)
        old = (logp + 0.3 * rng.normal(size=(1, 37))).astype(np.float32)
        batches.append((logp, logp, {"advantages": np.ones(1, np.float32), "old_logp": old}))
    outside = 0
    for got in evaluate_each(Objective(level="sequence"), batches):
        values = metric_values(got.metrics)
        assert values["ratio_min"] <= values["ratio"] <= values["ratio_max"]
        mean = float(got.metrics["ratio"].sum) / 37
        assert values["ratio"] == pytest.approx(mean, rel=1e-6)
        outside += not values["ratio_min"] <= mean <= values["ratio_max"]
    assert outside  # there was something to do


def test_a_mean_ratio_that_is_wrong_is_not_hidden() -> None:
    one = jnp.float32(1.0)
    metrics = {
        "ratio": Metric(2.99 * one, 3 * one),
        "ratio_min": Metric(one, 3 * one),
        "ratio_max": Metric(one, 3 * one),
    }
    assert metric_values(metrics)["ratio"] == pytest.approx(2.99 / 3)
