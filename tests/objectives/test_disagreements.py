"""Where the peers disagree: each numbered case of the list in docs/losses.md, with numbers and sides."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logitless
from interpreted import by_numpy
from logitless import Objective, group_advantages, oracle
from logitless.objectives.presets import GROUP_STD_EPS
from loss_cases import evaluate, metrics_of, random_batch

pytestmark = pytest.mark.quick


def one_token(o: Objective, ratio: float, advantage: float, d: float | None = None) -> tuple[float, float]:
    """Loss and gradient of a token with logp -1.5, the given ratio and ``d = ref - logp``."""
    inputs: dict[str, Any] = {
        "advantages": np.float32([advantage]),
        "old_logp": np.float32([[-1.5 - math.log(ratio)]]),
        "ref_logp": None if d is None else np.float32([[-1.5 + d]]),
    }
    got = evaluate(o, [[-1.5]], [[1.0]], **inputs)
    return float(got.loss), float(got.dlogp[0, 0])


def test_1_luspo_sums_a_sequence_and_divides_by_nothing_but_the_batch() -> None:
    """``mean_b sum_t m l`` on lengths 6, 3, 1 of T = 6 at sequence level, without KL (TRL's side).

    The published pair for this layout is -1.6085 (TRL) against -1.8164 (a kernel that divides by L as well and whose
    chunked form counts padding); the log-probabilities and advantages behind those two figures were not available, so
    the layout is tested with numbers worked out by hand. Sequence ratios 1.1, 0.9, 1 and advantages 1, -0.5, 2 make
    the losses -1.1, 0.45 and -2 at each token of a sequence.
    """
    lengths = np.array([6, 3, 1])
    mask = np.arange(6) < lengths[:, None]
    spread = np.array([[3.0, -3.0, 2.0, -2.0, 1.0, -1.0], [1.0, -2.0, 1.0, 0, 0, 0], [0.0] * 6])  # row means of 0
    inputs = {
        "advantages": np.float32([1.0, -0.5, 2.0]),
        "mask": mask,
        "old_logp": (-1.0 - np.log([1.1, 0.9, 1.0])[:, None] - spread).astype(np.float32),
    }
    logp = np.where(mask, -1.0, np.nan)
    o = Objective.preset("trl", level="sequence", aggregation="luspo")
    got = evaluate(o, logp, logp, **inputs)
    right = (6 * -1.1 + 3 * 0.45 + 1 * -2.0) / 3
    divided_by_length = (36 * -1.1 + 9 * 0.45 + 1 * -2.0) / (3 * 6)
    padding_counted = (6 * -1.1 + 6 * 0.45 + 6 * -2.0) / 3
    assert float(got.loss) == pytest.approx(right, rel=1e-6)
    assert abs(right - divided_by_length) > 0.3 and abs(right - padding_counted) > 0.3
    # Each token carries its sequence's gradient: n_b * (-A c1) / n_b / B.
    want = np.where(mask, np.array([-1.1, 0.45, -2.0])[:, None] / 3, 0.0)
    np.testing.assert_allclose(got.dlogp, want, rtol=1e-6)


def test_2_dapo_denominator() -> None:
    trl = logitless.dapo_denominator(1200, world_size=4, accumulation=2, steps_per_generation=8)
    liger = logitless.dapo_denominator(1200, world_size=4)
    assert float(trl) == 75.0 and float(liger) == 300.0
    logp, entropy, inputs = random_batch(0)
    o = Objective.preset("trl")
    losses = [float(evaluate(o, logp, entropy, denominator=d, **inputs).loss) for d in (trl, liger, None)]
    assert losses[0] == pytest.approx(4 * losses[1], rel=1e-6)
    assert losses[2] == pytest.approx(losses[1] * 300 / inputs["mask"].sum(), rel=1e-6)  # the default is sum m


def test_3_kl_bias_correction_is_on_in_trl_and_off_in_liger() -> None:
    ratio, d, beta = 1.1, 0.7, 0.5
    k3 = math.exp(d) - d - 1
    loss, gradient = one_token(Objective.preset("trl", beta=beta), ratio, 0.0, d)
    assert loss == pytest.approx(beta * ratio * k3, rel=1e-6)
    assert gradient == pytest.approx(beta * ratio * -d, rel=1e-6)  # beta c1 (logp - ref)
    loss, gradient = one_token(Objective.preset("liger", beta=beta), ratio, 0.0, d)
    assert loss == pytest.approx(beta * k3, rel=1e-6)
    assert gradient == pytest.approx(beta * (1 - math.exp(d)), rel=1e-6)


def test_4_defaults() -> None:
    """The fields are in ``test_a_library_s_objective_written_out``."""
    trl, liger = Objective.preset("trl"), Objective.preset("liger")
    assert one_token(trl, 1.3, 1.0)[0] == pytest.approx(-1.2, rel=1e-6)
    assert one_token(liger.replace(beta=None), 1.3, 1.0)[0] == pytest.approx(-1.3, rel=1e-6)


@pytest.mark.parametrize("policy", ["cispo", "sapo", "vespo"])
def test_5_sequence_level_of_other_policies(policy: str) -> None:
    o = Objective.preset("trl", policy=policy, level="sequence", eps_high=1.3)
    logp, entropy, inputs = random_batch(1)
    got = evaluate(o, logp, entropy, **inputs)
    assert float(got.loss) == pytest.approx(oracle.policy_loss(logp, entropy, objective=o, **inputs), rel=1e-5)
    if policy != "vespo":  # whose weight is the sequence's in any case
        assert float(got.loss) != pytest.approx(float(evaluate(o.replace(level="token"), logp, entropy, **inputs).loss))
    with pytest.raises(ValueError, match=rf"Liger refuses policy='{policy}' at level='sequence'.*preset 'trl'"):
        Objective.preset("liger", policy=policy, level="sequence")
    assert Objective.preset("liger", level="sequence").level == "sequence"


def test_6_clip_metrics() -> None:
    """Rows of 5 and 1 tokens, A > 0: the long one's sequence ratio is 1.1, the short one's 1.5; token ratios differ."""
    mask = np.array([[1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0]])
    ratio = np.array([[1.1] * 6, [1.5] * 6])
    logp = np.full((2, 6), -1.0, np.float32)
    inputs = {"advantages": np.float32([1.0, 1.0]), "mask": mask, "old_logp": (logp - np.log(ratio)).astype(np.float32)}

    def high(o: Objective, **changes: np.ndarray) -> tuple[float, float]:
        metric = metrics_of(o, logp, logp, **inputs | changes)["clip_fraction_high"]
        return float(metric.sum), float(metric.count)

    trl, liger = (Objective.preset(name, beta=None) for name in ("trl", "liger"))
    liger = liger.replace(eps_high=0.2)
    assert high(trl) == high(liger) == (1, 6)
    for m in (mask, mask[::-1]):  # the clipped one is the short one, and the long one
        assert high(trl.replace(level="sequence"), mask=m) == pytest.approx((1, 2))  # per sequence
    assert high(liger.replace(level="sequence")) == (1, 6)  # token weighted
    assert high(trl.replace(delta=1.15)) == (0, 6)  # after delta, which already took the ratio below 1 + eps
    assert high(liger.replace(delta=1.15)) == (1, 6)  # before


def test_7_cispo_bound() -> None:
    """``l = -w A logp``, logp = -1.5, A = 2: ratio 3 with eps_high 5 (raw: kept) and 0.2 (interval: 1.2)."""
    for preset in ("trl", "liger"):
        o = Objective.preset(preset, policy="cispo", eps_high=5.0, beta=None)
        assert one_token(o, 3.0, 2.0) == pytest.approx((9.0, -6.0), rel=1e-6)
        assert one_token(o, 8.0, 2.0) == pytest.approx((15.0, -10.0), rel=1e-6)
        assert one_token(o, 0.25, 2.0) == pytest.approx((0.75, -0.5), rel=1e-6)  # nothing below
    o = Objective.preset("verl", policy="cispo")
    assert one_token(o, 3.0, 2.0) == pytest.approx((3.6, -2.4), rel=1e-6)
    assert one_token(o, 0.25, 2.0) == pytest.approx((2.4, -1.6), rel=1e-6)


def test_8_k3_clamps() -> None:
    clamped = Objective.preset("verl", beta=1.0)
    plain = Objective.preset("trl", beta=1.0, kl_bias_correction=False)
    for d in (3.0, 25.0):  # k3 is 16.1 and 7e10
        assert one_token(clamped, 1.0, 0.0, d) == (10.0, 0.0)
        k3 = math.exp(d) - d - 1
        assert one_token(plain, 1.0, 0.0, d) == pytest.approx((k3, 1 - math.exp(d)), rel=1e-5)
    both = [one_token(o, 1.0, 0.0, 0.5) for o in (clamped, plain)]
    assert both[0] == both[1]
    # d is clamped first: at -25 the estimator sees -20, whose k3 of 19 is then clamped as well.
    only_d = clamped.replace(kl_clamp=None)
    assert one_token(only_d, 1.0, 0.0, -25.0) == pytest.approx((19.0, 0.0), rel=1e-6)


def test_9_group_standard_deviation() -> None:
    assert (GROUP_STD_EPS["trl"], GROUP_STD_EPS["verl"]) == (1e-4, 1e-6)
    rewards = jnp.float32([0.0, 0.001])  # std 7.07e-4: eps matters
    std = 0.001 / math.sqrt(2)
    for peer in ("trl", "verl"):
        eps = GROUP_STD_EPS[peer]
        got = group_advantages(rewards, 2, eps=eps)
        np.testing.assert_allclose(got, np.array([-0.0005, 0.0005]) / (std + eps), rtol=1e-5)
    np.testing.assert_allclose(group_advantages(jnp.float32([3.0, -1.0]), 1, eps=1e-6), [3.0, -1.0], rtol=2e-6)


def test_presets_mllm_jax_divides_the_log_probability() -> None:
    """``logp = log_softmax(x)[y] / temperature``; no KL; ``sum m l / total_valid_token_count``."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, 5)).astype(np.float32)
    targets = rng.integers(0, 5, (2, 3))
    mask = np.array([[1, 1, 0], [1, 1, 1]])
    old = rng.normal(-2.0, 0.3, (2, 3)).astype(np.float32)
    advantages = np.float32([1.0, -0.5])
    o = Objective.preset("mllm-jax", temperature=0.7)
    assert o.beta is None and o.temperature_on == "logp"

    def by_hand(x: jax.Array) -> jax.Array:
        logp = jnp.take_along_axis(jax.nn.log_softmax(x), targets[..., None], -1)[..., 0] / 0.7
        ratio = jnp.exp(logp - old)
        a = advantages[:, None]
        loss = -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
        return jnp.sum(loss * mask) / 40.0

    def ours(x: jax.Array, objective: Objective = o) -> jax.Array:
        return logitless.grpo_loss(
            x, targets, advantages=advantages, mask=mask, old_logp=old, objective=objective, denominator=40.0
        )[0]

    want, got = (by_numpy(jax.value_and_grad(f), logits) for f in (by_hand, ours))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-7)
    other = by_numpy(lambda x: ours(x, o.replace(temperature_on="logits")), logits)
    assert float(other) != pytest.approx(float(got[0]), rel=1e-3)


def test_the_dual_clip_of_verl_and_not_of_tunix() -> None:
    verl, tunix = Objective.preset("verl"), Objective.preset("tunix")
    assert one_token(verl, 5.0, -2.0) == pytest.approx((6.0, 0.0), rel=1e-6)  # dual clip: 3 * 2
    assert one_token(tunix.replace(beta=None), 5.0, -2.0) == pytest.approx((10.0, 10.0), rel=1e-6)
