"""The float64 oracle against arithmetic done by hand, against 60-digit decimals, and against finite differences."""

from __future__ import annotations

import decimal
import itertools
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from logitless.objectives.objective import Objective
from logitless.oracle import (
    grpo_loss,
    linear_grpo_loss,
    linear_token_stats,
    linear_token_stats_vjp,
    policy_loss,
    policy_loss_grad,
    token_stats,
    token_stats_vjp,
)

pytestmark = pytest.mark.quick

NAN, INF = math.nan, math.inf
FLOAT_STATS = ("logp", "entropy", "lse", "max_logit", "log_sum_p2")


def central_difference(f: Callable[[np.ndarray], float], x: np.ndarray, h: float = 1e-6) -> np.ndarray:
    """``df/dx``, one element at a time."""
    gradient = np.zeros(x.shape)
    for i in np.ndindex(x.shape):
        step = np.zeros(x.shape)
        step[i] = h
        gradient[i] = (f(x + step) - f(x - step)) / (2 * h)
    return gradient


# -- token statistics -----------------------------------------------------------------------------------------------


def test_stats_of_a_two_column_row_by_hand() -> None:
    stats = token_stats(np.log([[3.0, 1.0]]), [0])
    assert stats.logp[0] == pytest.approx(math.log(0.75), rel=1e-15)
    assert stats.entropy[0] == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25), rel=1e-15)
    assert stats.lse[0] == pytest.approx(math.log(4.0), rel=1e-15)
    assert stats.max_logit[0] == math.log(3.0)
    assert stats.log_sum_p2[0] == pytest.approx(math.log(0.625), rel=1e-15)
    assert stats.is_top1[0]


def test_transform_order_is_scale_softcap_temperature() -> None:
    x = np.array([1.0, -2.0])
    z = 3.0 * np.tanh(2.0 * x / 3.0) / 0.5
    stats = token_stats(x, 1, scale=2.0, softcap=3.0, temperature=0.5)
    assert stats.max_logit == pytest.approx(z[0], rel=1e-15)
    assert stats.logp == pytest.approx(-math.log1p(math.exp(z[0] - z[1])), rel=1e-14)
    assert not stats.is_top1


def decimal_stats(row: list[float], target: int) -> dict[str, float]:
    """The definitions, without any care for cancellation, in 60 digits."""
    with decimal.localcontext() as context:
        context.prec = 60
        z = [Decimal(v) for v in row]
        lse = sum((v.exp() for v in z), Decimal(0)).ln()
        p = [(v - lse).exp() for v in z]
        return {
            "logp": float(z[target] - lse),
            "entropy": float(sum((q * (lse - v) for q, v in zip(p, z, strict=True)), Decimal(0))),
            "lse": float(lse),
            "max_logit": float(max(z)),
            "log_sum_p2": float(sum((q * q for q in p), Decimal(0)).ln()),
        }


@pytest.mark.parametrize("target", [0, 1, 4])
@pytest.mark.parametrize(
    "row",
    [
        [0.3, -1.2, 2.5, 0.0, 1.1],
        [25.0, 0.5, -0.5, 0.25, 0.0],  # collapsed onto column 0, 24 nats ahead
        [60.0, 0.5, -0.5, 0.25, 0.0],  # 1 - p is far below the float64 rounding of 1
        [-1.0e4, -1.0e4 - 3.0, -1.0e4 + 2.0, -1.0e4, -1.0e4],
        [1.0e4, 1.0e4 - 45.0, 1.0e4 - 50.0, 1.0e4 - 46.0, 0.0],
        [2.0, 2.0, 2.0, 2.0, 2.0],
    ],
)
def test_stats_against_decimals(row: list[float], target: int) -> None:
    stats, truth = token_stats(np.array(row), target), decimal_stats(row, target)
    for name in FLOAT_STATS:
        assert float(getattr(stats, name)) == pytest.approx(truth[name], rel=2e-13, abs=0.0), name


def test_gradient_of_a_collapsed_row_keeps_its_digits() -> None:
    x = np.array([40.0, 0.0, 0.0, 0.0])
    rest = 3.0 * math.exp(-40.0) / (1.0 + 3.0 * math.exp(-40.0))
    dlogp = token_stats_vjp(x, 0, 1.0)
    np.testing.assert_allclose(dlogp, [rest, -rest / 3, -rest / 3, -rest / 3], rtol=1e-14)
    # H = log1p(R) + 40 rest, so that -p_v (log p_v + H) = 40 p_v up to terms of order rest^2; the row sums to 0
    dentropy = token_stats_vjp(x, 0, None, 1.0)
    np.testing.assert_allclose(dentropy, 40.0 * rest * np.array([-1.0, 1 / 3, 1 / 3, 1 / 3]), rtol=1e-13)


STAT_OPTIONS: list[dict[str, Any]] = [
    {}, {"temperature": 0.7}, {"temperature": np.array([0.5, 1.3, 2.0])}, {"softcap": 2.0}, {"scale": -0.6},
    {"scale": 1.7, "softcap": 3.0, "temperature": np.array([0.5, 1.3, 2.0]), "vocab_size": 5},
]  # fmt: skip


@pytest.mark.parametrize("which", ["logp", "entropy", "lse"])
@pytest.mark.parametrize("options", STAT_OPTIONS)
def test_stats_vjp_by_finite_differences(which: str, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    x, y, g = 2.0 * rng.normal(size=(3, 6)), np.array([1, 0, 4]), rng.normal(size=3)
    cotangents = {"g_logp": None, "g_entropy": None, "g_lse": None, f"g_{which}": g}
    dx = token_stats_vjp(x, y, **cotangents, **options)
    expected = central_difference(lambda v: float(g @ getattr(token_stats(v, y, **options), which)), x)
    np.testing.assert_allclose(dx, expected, rtol=1e-7, atol=1e-8)


def test_stats_vjp_is_linear_in_the_cotangents() -> None:
    rng = np.random.default_rng(1)
    x, y, (a, b, c) = rng.normal(size=(2, 3, 7)), rng.integers(0, 7, (2, 3)), rng.normal(size=(3, 2, 3))
    options = STAT_OPTIONS[3]
    parts = [token_stats_vjp(x, y, *g, **options) for g in ((a, None, None), (None, b, None), (None, None, c))]
    np.testing.assert_allclose(token_stats_vjp(x, y, a, b, c, **options), sum(parts), rtol=1e-12, atol=1e-15)


def test_minus_infinity_and_padded_columns_are_absent_columns() -> None:
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(4, 5)), np.array([0, 1, 2, 0])
    g = rng.normal(size=(3, 4))
    small, dsmall = token_stats(x[:, :3], y), token_stats_vjp(x[:, :3], y, *g)
    holes = x.copy()
    holes[:, 3:] = -INF
    padded = x.copy()
    padded[:, 3:] = [NAN, INF]
    for logits, options in ((holes, {}), (padded, {"vocab_size": 3})):
        stats, dx = token_stats(logits, y, **options), token_stats_vjp(logits, y, *g, **options)
        for name in (*FLOAT_STATS, "is_top1"):
            np.testing.assert_array_equal(getattr(stats, name), getattr(small, name))
        np.testing.assert_array_equal(dx[:, :3], dsmall)
        assert not dx[:, 3:].any()


def test_minus_infinity_at_the_target_and_everywhere() -> None:
    at_target = token_stats([-INF, 1.0, 1.0], 0)
    assert at_target.logp == -INF and not at_target.is_top1
    assert at_target.entropy == pytest.approx(math.log(2.0))
    np.testing.assert_allclose(token_stats_vjp([-INF, 1.0, 1.0], 0, 1.0), [1.0, -0.5, -0.5])
    nowhere = token_stats([-INF, -INF], 0)
    assert nowhere.logp == -INF and nowhere.lse == -INF and nowhere.entropy == 0.0
    single = token_stats([5.0], 0)  # a vocabulary of one: certainty
    assert single.logp == single.entropy == single.log_sum_p2 == 0.0 and single.lse == 5.0


def test_bad_targets_are_nan_and_masked_tokens_are_zero() -> None:
    x = np.zeros((5, 4))
    x[4] = NAN
    y, mask = np.array([4, -100, 3, 1, -100]), np.array([1, 1, 1, 1, 0])
    stats = token_stats(x, y, mask=mask, vocab_size=3)
    for name in FLOAT_STATS:
        assert np.isnan(getattr(stats, name)[:3]).all() and np.isfinite(getattr(stats, name)[3])
        assert getattr(stats, name)[4] == 0.0
    np.testing.assert_array_equal(stats.is_top1, [False, False, False, True, False])
    dx = token_stats_vjp(x, y, [1.0, 0.0, 0.0, 1.0, NAN], mask=mask, vocab_size=3)
    assert np.isnan(dx[0, :3]).all()
    np.testing.assert_array_equal(dx[[1, 2, 4]], 0.0)
    np.testing.assert_allclose(dx[3], [-1 / 3, 2 / 3, -1 / 3, 0.0])


# -- the head -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_layout", ["vh", "hv"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_stats_and_vjp(head_layout: str, with_bias: bool) -> None:
    rng = np.random.default_rng(3)
    h, w = rng.normal(size=(2, 3, 4)), rng.normal(size=(7, 4))
    bias = rng.normal(size=7) if with_bias else None
    y, mask = rng.integers(0, 6, (2, 3)), np.array([[1, 1, 0], [0, 1, 1]])
    h_nan = np.where(mask[..., None] == 1, h, NAN)
    g = rng.normal(size=(3, 2, 3))
    options: dict[str, Any] = {"temperature": 0.8, "softcap": 4.0, "scale": 1.2, "vocab_size": 6, "mask": mask}
    head = w if head_layout == "vh" else w.T

    def weighted(h_: np.ndarray, head_: np.ndarray, bias_: np.ndarray | None) -> float:
        s = linear_token_stats(h_, head_, y, bias=bias_, head_layout=head_layout, **options)
        return float(np.sum(g[0] * s.logp + g[1] * s.entropy + g[2] * s.lse))

    logits = h @ w.T + (0.0 if bias is None else bias)
    stats = linear_token_stats(h_nan, head, y, bias=bias, head_layout=head_layout, **options)
    expected = token_stats(logits, y, **options)
    for name in (*FLOAT_STATS, "is_top1"):
        np.testing.assert_allclose(getattr(stats, name), getattr(expected, name), rtol=1e-13, atol=1e-15)

    dh, dhead, dbias = linear_token_stats_vjp(h_nan, head, y, *g, bias=bias, head_layout=head_layout, **options)
    np.testing.assert_allclose(dh, central_difference(lambda v: weighted(v, head, bias), h), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(dhead, central_difference(lambda v: weighted(h, v, bias), head), rtol=1e-6, atol=1e-8)
    if bias is None:
        assert dbias is None
        return
    np.testing.assert_allclose(dbias, central_difference(lambda v: weighted(h, head, v), bias), rtol=1e-6, atol=1e-8)


def test_bfloat16_inputs_are_upcast_exactly() -> None:
    rng = np.random.default_rng(4)
    h, w = (rng.normal(size=s).astype(ml_dtypes.bfloat16) for s in ((3, 4), (5, 4)))
    y = np.array([0, 3, 4])
    h64, w64 = h.astype(np.float64), w.astype(np.float64)
    np.testing.assert_array_equal(linear_token_stats(h, w, y).logp, linear_token_stats(h64, w64, y).logp)
    both = (linear_token_stats_vjp(*arrays, y, 1.0)[:2] for arrays in ((h, w), (h64, w64)))
    for got, want in zip(*both, strict=True):
        assert got.dtype == np.float64
        np.testing.assert_array_equal(got, want)


# -- policy losses by hand ------------------------------------------------------------------------------------------


def one_token(objective: Objective, ratio: float, advantage: float, logp: float = -1.5, **inputs: Any) -> Any:
    """``(loss, dlogp)`` of a single token whose importance ratio is ``ratio``."""
    loss, dlogp, _ = policy_loss_grad(
        [[logp]], None, objective=objective, advantages=[[advantage]], old_logp=[[logp - math.log(ratio)]], **inputs
    )
    return loss, float(dlogp[0, 0])


CLIP = Objective(eps_low=0.2, eps_high=0.3)
POLICY_BY_HAND: list[tuple[Objective, float, float, float, float]] = [
    # objective, ratio, advantage, loss, dloss/dlogp (at logp = -1.5)
    (CLIP, 1.1, 2.0, -2.2, -2.2),
    (CLIP, 1.5, 2.0, -2.6, 0.0),
    (CLIP, 1.5, -2.0, 3.0, 3.0),
    (CLIP, 0.5, 2.0, -1.0, -1.0),
    (CLIP, 0.5, -2.0, 1.6, 0.0),
    (CLIP.replace(delta=2.0), 5.0, -1.0, 2.0, 0.0),
    (CLIP.replace(delta=2.0), 1.5, -1.0, 1.5, 1.5),
    (CLIP.replace(delta=1.1), 1.2, -1.0, 1.2, 1.2),  # c2, formed before the cap, is the smaller side
    (CLIP.replace(delta=1.1), 1.2, 1.0, -1.1, 0.0),
    (CLIP.replace(dual_clip=3.0), 10.0, -1.0, 3.0, 0.0),
    (CLIP.replace(dual_clip=3.0), 2.5, -1.0, 2.5, 2.5),
    (CLIP.replace(dual_clip=3.0), 10.0, 1.0, -1.3, 0.0),
    (Objective(policy="cispo", eps_high=5.0), 6.0, 2.0, 15.0, -10.0),
    (Objective(policy="cispo", eps_high=5.0), 0.5, 2.0, 1.5, -1.0),
    (CLIP.replace(policy="cispo", cispo_bound="interval"), 6.0, 2.0, 3.9, -2.6),
    (CLIP.replace(policy="cispo", cispo_bound="interval"), 0.5, -2.0, -2.4, 1.6),
    (Objective(policy="sapo"), 1.0, 2.0, -4.0, -2.0),  # sigmoid(0) = 1/2, slope 1/4
    (Objective(policy="sapo", tau_neg=0.5), 1.0, -2.0, 8.0, 2.0),
    (Objective(policy="sapo"), 2.0, 1.0, -4 / (1 + math.exp(-1)), -8 * math.exp(-1) / (1 + math.exp(-1)) ** 2),
    (Objective(policy="vespo"), 1.0, 2.0, 3.0, -2.0),  # phi = exp(lam - lam) = 1
    (Objective(policy="vespo"), 2.0, 1.0, 1.5 * 4 * math.exp(-3), -4 * math.exp(-3)),  # exp(3 + 2 log 2 - 3 * 2)
    (Objective(policy="vespo"), 2.0, -1.0, -1.5 * 8 * math.exp(-2), 8 * math.exp(-2)),  # exp(2 + 3 log 2 - 2 * 2)
    (Objective(policy="gmpo", eps_low=0.2, eps_high=0.4), math.exp(0.5), 2.0, -2 * math.exp(0.4), 0.0),
    (Objective(policy="gmpo", eps_low=0.2, eps_high=0.4), math.exp(-0.5), 2.0, -2 * math.exp(-0.5),
     -2 * math.exp(-0.5)),
    (Objective(policy="gmpo", eps_low=0.2, eps_high=0.4), math.exp(-0.5), -2.0, 2 * math.exp(-0.2), 0.0),
    (Objective(policy="gmpo", eps_low=0.2, eps_high=0.4), math.exp(0.5), -2.0, 2 * math.exp(0.5), 2 * math.exp(0.5)),
    (Objective(policy="reinforce"), 7.0, 2.0, 3.0, -2.0),
]  # fmt: skip


@pytest.mark.parametrize(("objective", "ratio", "advantage", "loss", "gradient"), POLICY_BY_HAND)
def test_policy_by_hand(objective: Objective, ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert one_token(objective, ratio, advantage) == pytest.approx((loss, gradient), rel=1e-13)


@pytest.mark.parametrize(
    ("kl", "value", "slope"),
    [
        ("k1", -math.log(2), 1.0),
        ("k2", math.log(2) ** 2 / 2, -math.log(2)),
        ("k3", 1 - math.log(2), -1.0),
        ("k3+", 1 - math.log(2), -math.log(2)),
    ],
)
def test_kl_by_hand(kl: str, value: float, slope: float) -> None:
    """``ref`` is twice as likely as the policy, the importance ratio is 3, and the advantage is zero."""
    o, ref = Objective(beta=0.5, kl=kl), [[-1.5 + math.log(2)]]
    assert one_token(o, 3.0, 0.0, ref_logp=ref) == pytest.approx((0.5 * value, 0.5 * slope), rel=1e-13)
    corrected = o.replace(kl_bias_correction=True, delta=2.0)  # the raw ratio, not the capped one
    expected = (0.5 * 3 * value, 0.5 * 3 * (slope + value))
    assert one_token(corrected, 3.0, 0.0, ref_logp=ref) == pytest.approx(expected, rel=1e-13)
    if kl == "k3":
        assert expected[1] == pytest.approx(0.5 * 3 * -math.log(2))  # beta c1 (logp - ref)


def test_kl_clamps() -> None:
    log_ratio, estimator = Objective(beta=1.0, kl_log_ratio_clamp=2.0), Objective(beta=1.0, kl_clamp=3.0)
    assert one_token(log_ratio, 1.0, 0.0, ref_logp=[[1.5]]) == pytest.approx((math.exp(2) - 3, 0.0))  # d = 3
    assert one_token(log_ratio, 1.0, 0.0, ref_logp=[[0.5]]) == pytest.approx((math.exp(2) - 3, 1 - math.exp(2)))
    assert one_token(estimator, 1.0, 0.0, ref_logp=[[1.5]]) == pytest.approx((3.0, 0.0))
    # The gradient of k3+ is that of k2 whatever the clamp: veRL clamps the value alone.
    assert one_token(estimator.replace(kl="k3+"), 1.0, 0.0, ref_logp=[[1.5]]) == pytest.approx((3.0, -3.0))
    assert one_token(estimator.replace(kl="k1"), 1.0, 0.0, ref_logp=[[-5.5]]) == pytest.approx((3.0, 0.0))


def test_ties_and_bounds_pass_the_gradient_in_full() -> None:
    for advantage in (1.0, -1.0):
        assert one_token(Objective(eps_low=0.0, eps_high=0.0), 1.0, advantage) == (-advantage, -advantage)
        assert one_token(Objective(delta=1.0), 1.0, advantage) == (-advantage, -advantage)
        assert one_token(Objective(policy="gmpo", eps_low=0.0, eps_high=0.0), 1.0, advantage)[1] == -advantage
    # logp = 0 makes the ratio exactly 2, as are the bounds
    assert one_token(Objective(eps_high=1.0), 2.0, 1.0, logp=0.0) == (-2.0, -2.0)
    assert one_token(Objective(eps_high=1.0), 2.0 * (1 + 1e-12), 1.0, logp=0.0) == (-2.0, 0.0)
    assert one_token(Objective(delta=2.0), 2.0, -1.0, logp=0.0) == (2.0, 2.0)
    assert one_token(Objective(dual_clip=2.0), 2.0, -1.0, logp=0.0) == (2.0, 2.0)


def test_zero_advantage_is_exactly_zero_even_where_the_ratio_overflows() -> None:
    for policy in ("clip", "cispo", "sapo", "vespo", "gmpo", "reinforce"):
        loss, dlogp, _ = policy_loss_grad(
            [[0.0, -1.0]], None, objective=Objective(policy=policy), advantages=[0.0], old_logp=[[-5000.0, -1.0]]
        )
        assert loss == 0.0 and not dlogp.any()
    loss, dlogp, _ = policy_loss_grad(
        [[0.0]], None, objective=Objective(policy="sapo"), advantages=[1.0], old_logp=[[-5000.0]]
    )
    assert loss == -4.0 and dlogp[0, 0] == 0.0


LOGP = np.array([[-1.0, -2.0, -0.5], [-0.1, -3.0, -9.0]])
MASK = np.array([[1, 1, 1], [1, 1, 0]])
RATIOS = np.array([[1.1, 1.5, 0.5], [0.5, 1.5, 77.0]])
BATCH: dict[str, Any] = {"advantages": [2.0, -1.0], "mask": MASK, "old_logp": LOGP - np.log(RATIOS)}
# With eps 0.2 / 0.3 and advantages 2 and -1 the token losses are
#   -2.2  -2.6  -1.0       sum -5.8
#    0.8   1.5    .        sum  2.3
AGGREGATION_BY_HAND: list[tuple[dict[str, Any], float | None, float]] = [
    ({"aggregation": "grpo"}, None, (-5.8 / 3 + 2.3 / 2) / 2), ({"aggregation": "grpo"}, 5.0, (-5.8 / 3 + 2.3 / 2) / 5),
    ({"aggregation": "bnpo"}, None, -3.5 / 5), ({"aggregation": "dapo"}, None, -3.5 / 5),
    ({"aggregation": "dapo"}, 20.0, -3.5 / 20), ({"aggregation": "dapo"}, 0.25, -3.5 / 0.25),
    ({"aggregation": "bnpo"}, 0.25, -3.5 / 0.25), ({"aggregation": "dr_grpo", "max_length": 10.0}, None, -3.5 / 20),
    ({"aggregation": "dr_grpo", "max_length": 10.0}, 7.0, -3.5 / 7), ({"aggregation": "luspo"}, None, -3.5 / 2),
    ({"aggregation": "luspo"}, 3.5, -1.0),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "denominator", "loss"), AGGREGATION_BY_HAND)
def test_aggregation_by_hand(fields: dict[str, Any], denominator: float | None, loss: float) -> None:
    got = policy_loss(LOGP, None, objective=CLIP.replace(**fields), denominator=denominator, **BATCH)
    assert got == pytest.approx(loss, rel=1e-13)


def test_packed_rows_count_segments_and_accept_scattered_ids() -> None:
    """Segments of row 0: tokens 0 and 2 (one segment, not adjacent) and token 1; of row 1: tokens 0 and 1."""
    inputs = {**BATCH, "advantages": [[2.0] * 3, [-1.0] * 3], "segment_ids": np.array([[4, 0, 4], [4, 4, 9]])}
    got = policy_loss(LOGP, None, objective=CLIP, **inputs)
    assert got == pytest.approx(((-2.2 - 1.0) / 2 - 2.6 + 2.3 / 2) / 3, rel=1e-13)
    # Sequence ratios: sqrt(1.1 * 0.5) = 0.7416 (A = 2: -1.4832), 1.5 (clipped: -2.6), sqrt(0.75) = 0.8660 (0.8660)
    got = policy_loss(LOGP, None, objective=CLIP.replace(level="sequence", aggregation="luspo"), **inputs)
    assert got == pytest.approx((2 * -2 * math.sqrt(0.55) - 2.6 + 2 * math.sqrt(0.75)) / 3, rel=1e-13)
    with pytest.raises(ValueError, match="segment_ids"):
        policy_loss(LOGP, None, objective=CLIP, **{**inputs, "advantages": [2.0, -1.0]})


ROLLOUT_RATIOS = np.array([[2.0, 0.5, 8.0], [3.0, 0.1, 1.0]])  # old / rollout
LOSSES = np.array([[-2.2, -2.6, -1.0], [0.8, 1.5, 0.0]])


@pytest.mark.parametrize(
    ("fields", "weights"),
    [
        ({"correction": "token", "correction_max": 4.0}, [[2.0, 0.5, 4.0], [3.0, 0.1, 0]]),
        ({"correction": "token", "correction_min": 0.3, "correction_max": None}, [[2.0, 0.5, 8.0], [3.0, 0.3, 0]]),
        (
            {"correction": "token", "correction_min": 0.3, "correction_max": 4.0, "correction_mode": "mask"},
            [[2.0, 0.5, 0.0], [3.0, 0.0, 0]],
        ),
        ({"correction": "sequence", "correction_max": 5.0}, [[5.0] * 3, [0.3, 0.3, 0]]),
        ({"correction": "geometric", "correction_max": 5.0}, [[2.0] * 3, [math.sqrt(0.3), math.sqrt(0.3), 0]]),
    ],
)
def test_correction_by_hand(fields: dict[str, Any], weights: list[list[float]]) -> None:
    rollout = BATCH["old_logp"] - np.log(ROLLOUT_RATIOS)
    o = CLIP.replace(aggregation="luspo", **fields)
    got = policy_loss(LOGP, None, objective=o, rollout_logp=rollout, **BATCH)
    assert got == pytest.approx(float((LOSSES * weights).sum()) / 2, rel=1e-13)


def test_nan_rollout_has_weight_one_and_on_policy_uses_logp_as_old() -> None:
    o = Objective(policy="reinforce", correction="token", correction_max=10.0, aggregation="luspo")
    loss, dlogp, _ = policy_loss_grad(
        [[-1.0, -2.0]], None, objective=o, advantages=[1.0], rollout_logp=[[NAN, -2.0 - math.log(3.0)]]
    )
    assert loss == pytest.approx(1.0 + 3 * 2.0) and dlogp[0] == pytest.approx([-1.0, -3.0])


@pytest.mark.parametrize(
    ("fields", "log_weight"),
    [
        ({"correction": "token", "correction_max": 3.0}, math.log(1.5) + math.log(0.5) + math.log(3.0)),
        ({"correction": "sequence", "correction_max": 3.0}, math.log(1.5) + math.log(2.0)),
        (
            {"correction": "token", "correction_max": 3.0, "correction_mode": "mask"},
            math.log(1e-8),  # a weight of zero: 0.4 - 0.7 - 18.4, and the sum is clipped again
        ),
    ],
)
def test_vespo_folds_the_weight_in_once(fields: dict[str, Any], log_weight: float) -> None:
    """Ratios 3 and 0.5, old / rollout 0.5 and 4."""
    logp = np.array([[-1.0, -2.0]])
    old = logp - np.log([[3.0, 0.5]])
    inputs: dict[str, Any] = {"advantages": [2.0], "old_logp": old, "rollout_logp": old - np.log([[0.5, 4.0]])}
    o = Objective(policy="vespo", aggregation="luspo", **fields)
    loss, dlogp, _ = policy_loss_grad(logp, None, objective=o, **inputs)
    phi = math.exp(3 + 2 * log_weight - 3 * math.exp(log_weight))
    assert loss == pytest.approx(6.0 * phi, rel=1e-12)
    assert dlogp[0] == pytest.approx([-2.0 * phi] * 2, rel=1e-12)


def test_off_policy_mask_keeps_the_kl() -> None:
    """Mean drift ``rollout - logp`` is 0.5 in both rows; only the negative advantage is dropped."""
    logp, rollout = np.array([[-1.0, -2.0]] * 2), np.array([[-1.0, -1.0], [-0.5, -1.5]])
    o = Objective(policy="reinforce", aggregation="luspo", off_policy_threshold=0.4, beta=1.0, kl="k1")
    inputs: dict[str, Any] = {"objective": o, "advantages": [1.0, -1.0], "ref_logp": logp - 0.25}
    loss, dlogp, _ = policy_loss_grad(logp, None, rollout_logp=rollout, **inputs)
    assert loss == pytest.approx((3.0 + 4 * 0.25) / 2)
    np.testing.assert_allclose(dlogp, [[0.0, 0.0], [0.5, 0.5]])
    assert policy_loss(logp, None, old_logp=rollout, **inputs) == loss  # old stands in for the rollout
    inputs["objective"] = o.replace(off_policy_threshold=0.5)
    assert policy_loss(logp, None, rollout_logp=rollout, **inputs) == pytest.approx((3.0 - 3.0 + 4 * 0.25) / 2)


def test_top_entropy_and_entropy_bonus_by_hand() -> None:
    """Valid entropies 1, 2, 3, 4, 9; with rho = 0.3 the 0.7 quantile is 3 + 0.8, which 4 and 9 reach."""
    entropy = np.array([[1.0, 9.0, 3.0], [4.0, 2.0, 100.0]])
    o = CLIP.replace(aggregation="luspo", top_entropy=0.3, entropy_coef=0.1)
    loss, dlogp, dentropy = policy_loss_grad(LOGP, entropy, objective=o, **BATCH)
    assert loss == pytest.approx((-2.6 + 0.8) / 2 - 0.1 * 13.0 / 2)
    assert not dlogp.any()  # both kept tokens are clipped
    np.testing.assert_allclose(dentropy, [[0, -0.05, 0], [-0.05, 0, 0]])
    loss = policy_loss(LOGP, entropy, objective=o, entropy_denominator=10.0, **BATCH)
    assert loss == pytest.approx((-2.6 + 0.8) / 2 - 0.1 * 13.0 / 10)
    loss = policy_loss(LOGP, entropy, objective=o.replace(top_entropy=None), **BATCH)
    assert loss == pytest.approx(-3.5 / 2 - 0.1 * 19.0 / 5)
    at_quantile = policy_loss(LOGP, entropy, objective=o.replace(top_entropy=0.5), **BATCH)  # 3 itself is kept
    assert at_quantile == pytest.approx((-2.6 - 1.0 + 0.8) / 2 - 0.1 * 16.0 / 3)


def test_a_dropped_token_is_dropped_even_where_its_loss_is_infinite() -> None:
    o = Objective(correction="token", correction_mode="mask", correction_max=2.0, aggregation="luspo")
    logp, old = [[0.0, -1.0]], np.array([[-5000.0, -1.0]])
    inputs: dict[str, Any] = {"advantages": [-1.0], "old_logp": old}
    assert policy_loss(logp, None, objective=o, rollout_logp=old, **inputs) == INF
    loss, dlogp, _ = policy_loss_grad(logp, None, objective=o, rollout_logp=old - [[1.0, 0.0]], **inputs)
    assert loss == 1.0
    np.testing.assert_array_equal(dlogp, [[0.0, 1.0]])


def test_statistics_are_divided_already() -> None:
    o = Objective(policy="reinforce", temperature_on="logp", temperature=0.5, aggregation="luspo", entropy_coef=1.0)
    loss, dlogp, _ = policy_loss_grad([[-1.0, -2.0]], [[0.5, 0.5]], objective=o, advantages=[1.0])
    assert loss == pytest.approx(3.0 - 0.5)
    np.testing.assert_allclose(dlogp, [[-1.0, -1.0]])


def test_missing_inputs_are_named() -> None:
    for o, name in (
        (Objective(beta=0.1), "ref_logp"),
        (Objective(correction="token"), "rollout_logp"),
        (Objective(entropy_coef=0.1), "entropy"),
    ):
        with pytest.raises(ValueError, match=name):
            policy_loss(LOGP, None, objective=o, advantages=[1.0, 1.0])


# -- policy gradients by finite differences -------------------------------------------------------------------------

KL = {"beta": 0.3, "kl_log_ratio_clamp": 1.0, "kl_clamp": 0.9}
OPTION_SETS: list[dict[str, Any]] = [
    {},
    {**KL, "kl": "k3", "entropy_coef": 0.2, "aggregation": "bnpo"},
    {**KL, "kl": "k2", "kl_bias_correction": True, "aggregation": "luspo"},
    {"correction": "token", "correction_min": 0.5, "top_entropy": 0.4, "entropy_coef": 0.1, "aggregation": "dapo"},
    {"correction": "sequence", "correction_mode": "mask", "correction_max": 3.0, "off_policy_threshold": 0.0,
     "aggregation": "dr_grpo", "max_length": 9.0, "beta": 0.1, "kl": "k1", "kl_bias_correction": True},
]  # fmt: skip
POLICIES: list[dict[str, Any]] = [
    {"policy": "clip"}, {"policy": "clip", "delta": 1.4, "dual_clip": 1.3}, {"policy": "clip", "level": "sequence"},
    {"policy": "clip", "level": "sequence", "delta": 1.2, "eps_low": 0.05, "eps_high": 0.1}, {"policy": "sapo"},
    {"policy": "sapo", "level": "sequence"}, {"policy": "gmpo"}, {"policy": "reinforce"},
]  # fmt: skip
CONSTANT_WEIGHT_POLICIES: list[dict[str, Any]] = [
    {"policy": "cispo", "eps_high": 1.2},
    {"policy": "cispo", "eps_high": 1.2, "level": "sequence"},
    {"policy": "cispo", "cispo_bound": "interval"},
    {"policy": "vespo"},
    {"policy": "vespo", "level": "sequence"},
]


def random_batch(packed: bool) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """``(logp, entropy, other inputs)`` of three rows, one of them empty, in which some tokens of each kind occur."""
    rng = np.random.default_rng(7)
    shape = (3, 6)
    logp, entropy = -rng.exponential(size=shape), rng.exponential(size=shape)
    mask = np.array([[1, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 1, 1]])
    inputs: dict[str, Any] = {
        "advantages": rng.normal(size=shape) if packed else np.array([-1.2, 0.7, 0.9]),
        "mask": mask,
        "old_logp": logp - 0.4 * rng.normal(size=shape),
        "ref_logp": logp + 0.9 * rng.normal(size=shape),
        "rollout_logp": logp - 0.5 * rng.normal(size=shape),
    }
    if packed:
        inputs["segment_ids"] = np.array([[1, 2, 2, 1, 2, 3], [1] * 6, [0, 0, 5, 5, 5, 0]])
    return logp, entropy, inputs


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("policy", "options"), list(itertools.product(POLICIES, OPTION_SETS)))
def test_policy_gradient_by_finite_differences(policy: dict[str, Any], options: dict[str, Any], packed: bool) -> None:
    o = Objective(**policy, **options)
    logp, entropy, inputs = random_batch(packed)
    loss, dlogp, dentropy = policy_loss_grad(logp, entropy, objective=o, **inputs)
    assert loss == policy_loss(logp, entropy, objective=o, **inputs) != 0.0
    expected = central_difference(lambda v: policy_loss(v, entropy, objective=o, **inputs), logp)
    np.testing.assert_allclose(dlogp, expected, rtol=1e-6, atol=1e-8)
    expected = central_difference(lambda v: policy_loss(logp, v, objective=o, **inputs), entropy)
    np.testing.assert_allclose(dentropy, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("policy", "options"), list(itertools.product(CONSTANT_WEIGHT_POLICIES, OPTION_SETS)))
def test_constant_weight_gradient_by_finite_differences(
    policy: dict[str, Any], options: dict[str, Any], packed: bool
) -> None:
    """Moving old and rollout along with logp leaves every stop-gradient weight as it is.

    It also hides the ratio of a bias-corrected KL, whose part is added from a clip objective with zero advantages.
    """
    bare = Objective(**policy, **{**options, "beta": None, "kl_bias_correction": False})
    logp, entropy, inputs = random_batch(packed)
    _, dlogp, _ = policy_loss_grad(logp, entropy, objective=bare, **inputs)

    def moved(v: np.ndarray) -> float:
        along = {name: inputs[name] + (v - logp) for name in ("old_logp", "rollout_logp")}
        return policy_loss(v, entropy, objective=bare, **{**inputs, **along})

    np.testing.assert_allclose(dlogp, central_difference(moved, logp), rtol=1e-6, atol=1e-8)

    full = Objective(**policy, **options)
    if full.beta is not None:
        loss, dfull, _ = policy_loss_grad(logp, entropy, objective=full, **inputs)
        kl_only = Objective(level=full.level, **options)
        kl_inputs = {**inputs, "advantages": np.zeros(logp.shape)}
        kl_loss, dkl, _ = policy_loss_grad(logp, entropy, objective=kl_only, **kl_inputs)
        bonus = policy_loss(logp, entropy, objective=kl_only.replace(beta=None), **kl_inputs)
        assert loss == pytest.approx(policy_loss(logp, entropy, objective=bare, **inputs) + kl_loss - bonus, rel=1e-12)
        np.testing.assert_allclose(dfull, dlogp + dkl, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", OPTION_SETS[:3])
def test_sequence_token_is_a_token_ratio_with_the_value_of_the_sequence(options: dict[str, Any]) -> None:
    """The same as level "token" with an old log-probability that makes every ratio the sequence's."""
    logp, entropy, inputs = random_batch(packed=False)
    mask = inputs["mask"]
    mean = (mask * (logp - inputs["old_logp"])).sum(1) / np.maximum(mask.sum(1), 1)
    o = Objective(level="sequence_token", eps_low=0.05, **options)
    got = policy_loss_grad(logp, entropy, objective=o, **inputs)
    as_token = {**inputs, "old_logp": logp - mean[:, None]}
    want = policy_loss_grad(logp, entropy, objective=o.replace(level="token"), **as_token)
    value = policy_loss(logp, entropy, objective=o.replace(level="sequence"), **inputs)
    assert got[0] == pytest.approx(want[0], rel=1e-12) and got[0] == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-12)
    assert np.any(got[1] != 0)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_without_old_the_ratio_is_one_and_its_gradient_remains(level: str) -> None:
    logp, entropy, inputs = random_batch(packed=False)
    inputs = {**inputs, "old_logp": None}
    o = Objective(level=level)
    loss, dlogp, _ = policy_loss_grad(logp, entropy, objective=o, **inputs)
    assert loss == pytest.approx((1.2 - 0.9) / 3)
    np.testing.assert_allclose(dlogp, inputs["mask"] * np.array([1.2, 0.0, -0.9])[:, None] / 5 / 3)
    explicit = policy_loss_grad(logp, entropy, objective=o, **{**inputs, "old_logp": logp})
    assert loss == explicit[0]
    np.testing.assert_array_equal(dlogp, explicit[1])


# -- what must never happen -----------------------------------------------------------------------------------------

EVERYTHING: dict[str, Any] = dict(
    beta=0.1, entropy_coef=0.1, top_entropy=0.5, correction="token", off_policy_threshold=0.1
)
ALL_POLICIES = [*POLICIES, *CONSTANT_WEIGHT_POLICIES, {"policy": "clip", "level": "sequence_token"}]


@pytest.mark.parametrize("policy", ALL_POLICIES)
@pytest.mark.parametrize("packed", [False, True])
def test_masked_positions_change_nothing(policy: dict[str, Any], packed: bool) -> None:
    o = Objective(**policy, **EVERYTHING)
    logp, entropy, inputs = random_batch(packed)
    dead = inputs["mask"] == 0
    clean = policy_loss_grad(logp, entropy, objective=o, **inputs)
    for junk in (NAN, INF, -INF):
        dirty = {name: np.where(dead, junk, inputs[name]) for name in ("old_logp", "ref_logp", "rollout_logp")}
        if packed:
            dirty["advantages"] = np.where(dead, junk, inputs["advantages"])
        got = policy_loss_grad(
            np.where(dead, junk, logp), np.where(dead, junk, entropy), objective=o, **{**inputs, **dirty}
        )
        assert got[0] == clean[0]
        for a, b in zip(got[1:], clean[1:], strict=True):
            np.testing.assert_array_equal(a, b)
            assert not a[dead].any()


@pytest.mark.parametrize("policy", ALL_POLICIES)
@pytest.mark.parametrize("aggregation", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
@pytest.mark.parametrize("packed", [False, True])
def test_an_all_masked_batch_has_loss_zero(policy: dict[str, Any], aggregation: str, packed: bool) -> None:
    o = Objective(**policy, **EVERYTHING, aggregation=aggregation, max_length=8.0 if aggregation == "dr_grpo" else None)
    logp, entropy, inputs = random_batch(packed)
    inputs["mask"] = np.zeros(logp.shape)
    for denominator in (None, 0.0):
        loss, dlogp, dentropy = policy_loss_grad(
            np.full(logp.shape, NAN), entropy, objective=o, denominator=denominator, **inputs
        )
        assert loss == 0.0 and not dlogp.any() and not dentropy.any()


# -- end to end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature_on", ["logits", "logp"])
def test_end_to_end_gradients_by_finite_differences(temperature_on: str) -> None:
    rng = np.random.default_rng(11)
    h, w, bias = rng.normal(size=(2, 3, 3)), rng.normal(size=(5, 3)), rng.normal(size=5)
    y, mask = np.array([[0, 4, 2], [3, 1, -100]]), np.array([[1, 1, 1], [1, 1, 0]])
    o = Objective(level="sequence", beta=0.2, entropy_coef=0.3, temperature=0.7, temperature_on=temperature_on)
    stats = linear_token_stats(h, w, y, bias=bias, mask=mask, temperature=0.7)
    inputs: dict[str, Any] = {"objective": o, "advantages": [1.0, -0.5], "mask": mask, "softcap": 5.0}
    inputs |= {name: stats.logp + k * rng.normal(size=y.shape) for name, k in (("old_logp", 0.1), ("ref_logp", 0.3))}
    logits = h @ w.T + bias
    loss, dlogits = grpo_loss(logits, y, **inputs)
    expected = central_difference(lambda v: grpo_loss(v, y, **inputs)[0], logits)
    np.testing.assert_allclose(dlogits, expected, rtol=1e-6, atol=1e-8)

    linear_loss, dh, dw, db = linear_grpo_loss(h, w, y, bias=bias, **inputs)
    assert linear_loss == pytest.approx(loss, rel=1e-13)
    np.testing.assert_allclose(dh, dlogits @ w, rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(dw, np.einsum("btv,bth->vh", dlogits, h), rtol=1e-11, atol=1e-14)
    assert db is not None
    np.testing.assert_allclose(db, dlogits.sum((0, 1)), rtol=1e-11, atol=1e-14)
    assert linear_grpo_loss(h, w.T, y, head_layout="hv", **inputs)[3] is None


def test_temperature_on_logits_and_on_logp_by_hand() -> None:
    """Logits (log 3, 0): log 3/4 at temperature 1, log 9/10 at temperature 1/2."""
    logits, o = np.log([[[3.0, 1.0]]]), Objective(policy="reinforce", temperature=0.5)
    loss, _ = grpo_loss(logits, [[0]], objective=o, advantages=[1.0])
    assert loss == pytest.approx(-math.log(0.9), rel=1e-13)
    loss, _ = grpo_loss(logits, [[0]], objective=o.replace(temperature_on="logp"), advantages=[1.0])
    assert loss == pytest.approx(-2 * math.log(0.75), rel=1e-13)


def test_jax_numbers_in_the_objective_are_accepted() -> None:
    jnp = pytest.importorskip("jax.numpy")
    o = Objective(eps_low=jnp.float32(0.25), beta=jnp.asarray(0.5), temperature=jnp.float32(0.5))
    plain = Objective(eps_low=0.25, beta=0.5, temperature=0.5)
    logits, ref = np.array([[[0.0, 1.0], [2.0, -1.0]]]), [[-1.0, -1.0]]
    got, want = (grpo_loss(logits, [[0, 1]], objective=x, advantages=[1.0], ref_logp=ref) for x in (o, plain))
    assert got[0] == want[0]
    np.testing.assert_array_equal(got[1], want[1])
