"""The oracle's log-probabilities at given ids, softmax over a support, and likeliest ids."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from logitless import oracle
from logitless.oracle import linear_rows, logits_rows
from test_oracle import central_difference

NAN, INF = math.nan, math.inf
OPTIONS: dict[str, Any] = {"scale": 1.4, "softcap": 4.0, "vocab_size": 6}
TAU = np.array([[0.7, 1.0], [1.5, 2.0]])
IDS = np.array([[[0, 5, 2], [3, -1, 1]], [[-1, -1, -1], [4, 3, 2]]])


def model(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, 2, 3)), rng.normal(size=(7, 3)), rng.normal(size=7)


def test_one_id_is_token_stats() -> None:
    h, w, b = model()
    y = np.array([[0, 5], [2, 3]])
    found = oracle.selected_logprobs(linear_rows(h, w, bias=b, **OPTIONS), y[..., None], temperature=TAU)
    own = oracle.linear_token_stats(h, w, y, bias=b, temperature=TAU, **OPTIONS)
    np.testing.assert_allclose(found.logp[..., 0], own.logp, rtol=1e-13)
    np.testing.assert_allclose(found.lse, own.lse, rtol=1e-13)
    np.testing.assert_allclose(found.mass, np.exp(own.logp), rtol=1e-13)


def test_an_id_of_minus_one_is_none() -> None:
    h, w, b = model()
    rows = linear_rows(h, w, bias=b)
    found, every = oracle.selected_logprobs(rows, IDS), oracle.selected_logprobs(rows, np.tile(np.arange(7), (2, 2, 1)))
    assert found.logp[0, 1, 1] == 0 and not found.logp[1, 0].any() and found.mass[1, 0] == 0
    assert found.mass[0, 1] == pytest.approx(np.exp(every.logp[0, 1, [3, 1]]).sum(), rel=1e-14)
    np.testing.assert_allclose(every.mass, 1.0, rtol=1e-14)


def test_gradients_for_any_cotangents_by_finite_differences() -> None:
    h, w, b = model()
    rng = np.random.default_rng(1)
    gl, gz, gm = rng.normal(size=IDS.shape), rng.normal(size=(2, 2)), rng.normal(size=(2, 2))
    mask = np.array([[1, 1], [1, 0]])

    def total(h: np.ndarray, w: np.ndarray, b: np.ndarray) -> float:
        rows = linear_rows(h, w, bias=b, **OPTIONS)
        found = oracle.selected_logprobs(rows, IDS, temperature=TAU, mask=mask)
        return float((gl * found.logp).sum() + (gz * found.lse).sum() + (gm * found.mass).sum())

    rows = linear_rows(h, w, bias=b, **OPTIONS)
    made = oracle.selected_logprobs_vjp(rows, IDS, gl, gz, gm, temperature=TAU, mask=mask)
    np.testing.assert_allclose(made.inputs, central_difference(lambda x: total(x, w, b), h), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(made.head, central_difference(lambda x: total(h, x, b), w), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(made.bias, central_difference(lambda x: total(h, w, x), b), rtol=1e-6, atol=1e-9)
    assert not made.inputs[1, 1].any() and made.head is not None and not made.head[6].any()


def test_a_collapsed_row_keeps_its_digits() -> None:
    """The gradient of ``logp`` at the peak is ``1 - p``, and that of the mass around it ``p (1 - mass)``."""
    rows = logits_rows(np.array([[40.0, 0.0, 0.0, 0.0]]))
    rest = 3 * math.exp(-40.0) / (1 + 3 * math.exp(-40.0))
    gradient = oracle.selected_logprobs_vjp(rows, [[0]], [[1.0]]).inputs
    np.testing.assert_allclose(gradient, [[rest, -rest / 3, -rest / 3, -rest / 3]], rtol=1e-13)
    by_mass = oracle.selected_logprobs_vjp(rows, [[0, 1]], None, None, [1.0]).inputs
    other = rest / 3
    np.testing.assert_allclose(by_mass, [[2 * other, 2 * other**2, -other, -other]], rtol=1e-12)


def test_ids_that_are_refused_or_unknown() -> None:
    rows = logits_rows(np.zeros((2, 4)))
    with pytest.raises(ValueError, match="ids has 3 twice for token 1"):
        oracle.selected_logprobs(rows, [[0, 1], [3, 3]])
    with pytest.raises(ValueError, match="ids has -100"):
        oracle.selected_logprobs(rows, [[0, 1], [3, -100]])
    with pytest.raises(ValueError, match=r"ids \[3, 1\] are not"):
        oracle.selected_logprobs(rows, [[0], [1], [2]])
    found = oracle.selected_logprobs(rows, [[0, 1], [3, 4]])
    assert np.isfinite(found.logp[0]).all()
    assert np.isnan(found.logp[1]).all() and np.isnan(found.lse[1]) and np.isnan(found.mass[1])
    gradient = oracle.selected_logprobs_vjp(rows, [[0, 1], [3, 4]], np.ones((2, 2))).inputs
    assert np.isfinite(gradient[0]).all() and np.isnan(gradient[1]).all()


# -- a softmax over a support ----------------------------------------------------------------------------------------


def test_a_support_is_the_softmax_of_its_columns() -> None:
    z = np.random.default_rng(2).normal(size=(3, 6))
    support, y = np.array([[4, 0, 2], [5, 1, -1], [-1, -1, -1]]), np.array([0, 5, 3])
    found = oracle.support_token_stats(logits_rows(z), y, support)
    for token, (columns, at) in enumerate((([4, 0, 2], 1), ([5, 1], 0), (list(range(6)), 3))):
        own = oracle.token_stats(z[token, columns], at)
        for name in ("logp", "entropy", "lse", "max_logit", "log_sum_p2", "is_top1"):
            assert getattr(found, name)[token] == pytest.approx(getattr(own, name), rel=1e-13), name


def test_gradients_over_a_support_by_finite_differences() -> None:
    h, w, b = model()
    support, y = IDS, np.array([[5, 3], [0, 2]])
    rng = np.random.default_rng(3)
    g = rng.normal(size=(3, 2, 2))

    def total(h: np.ndarray, w: np.ndarray, b: np.ndarray) -> float:
        found = oracle.support_token_stats(linear_rows(h, w, bias=b, **OPTIONS), y, support, temperature=TAU)
        return float((g[0] * found.logp).sum() + (g[1] * found.entropy).sum() + (g[2] * found.lse).sum())

    rows = linear_rows(h, w, bias=b, **OPTIONS)
    made = oracle.support_token_stats_vjp(rows, y, support, *g, temperature=TAU)
    np.testing.assert_allclose(made.inputs, central_difference(lambda x: total(x, w, b), h), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(made.head, central_difference(lambda x: total(h, x, b), w), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(made.bias, central_difference(lambda x: total(h, w, x), b), rtol=1e-6, atol=1e-9)


def test_a_support_keeps_the_ratio_unbiased() -> None:
    """The sampler's log-probability after its cut is the trainer's over the kept ids, and not over all."""
    z = np.random.default_rng(4).normal(size=(1, 50)) * 2
    rows, order = logits_rows(z), np.argsort(-z[0])
    p = np.exp(z[0] - np.log(np.exp(z[0]).sum()))
    kept = order[: int(np.searchsorted(np.cumsum(p[order]), 0.8)) + 1]
    mass, y = p[kept].sum(), [kept[1]]
    sampled = math.log(p[kept[1]] / mass)
    assert oracle.support_token_stats(rows, y, [kept]).logp[0] == pytest.approx(sampled, rel=1e-13)
    assert np.exp(oracle.token_stats(z, y).logp[0] - sampled) == pytest.approx(mass, rel=1e-12) != 1


def test_a_target_outside_its_support_is_nan() -> None:
    rows = logits_rows(np.zeros((3, 4)))
    support = [[0, 1], [0, 1], [0, 4]]
    found = oracle.support_token_stats(rows, [1, 2, 0], support)
    assert found.logp[0] == pytest.approx(-math.log(2.0)) and np.isnan(found.logp[1:]).all()
    gradient = oracle.support_token_stats_vjp(rows, [1, 2, 0], support, np.ones(3)).inputs
    np.testing.assert_allclose(gradient[0], [-0.5, 0.5, 0, 0])
    assert np.isnan(gradient[1:]).all()
    masked = oracle.support_token_stats(rows, [1, 2, 0], support, mask=[1, 0, 0])
    assert masked.logp[1] == masked.logp[2] == 0


# -- the likeliest ids -----------------------------------------------------------------------------------------------


def test_top_k_in_order_and_ties_by_the_smaller_id() -> None:
    found = oracle.top_k(logits_rows([[1.0, 3.0, 2.0, 3.0, 0.0], [0.0] * 5]), 3)
    assert found.ids.tolist() == [[1, 3, 2], [0, 1, 2]]
    assert oracle.top_k(logits_rows(np.arange(200) % 2), 80).ids.tolist() == list(range(1, 161, 2))
    np.testing.assert_allclose(found.logp[1], -math.log(5.0), rtol=1e-14)
    np.testing.assert_allclose(found.lse[1], math.log(5.0), rtol=1e-14)


def test_top_k_is_of_the_transformed_logits_below_vocab_size() -> None:
    rows = logits_rows([[1.0, 3.0, 2.0, -9.0]], scale=-1.0, vocab_size=3)
    assert oracle.top_k(rows, 3).ids.tolist() == [[0, 2, 1]]
    with pytest.raises(ValueError, match=r"k=4 does not lie in \[1, 3\]"):
        oracle.top_k(rows, 4)
    masked = oracle.top_k(logits_rows([[1.0, 2.0], [NAN, NAN]]), 1, mask=[1, 0])
    assert masked.ids.tolist() == [[1], [0]] and masked.logp[1, 0] == masked.lse[1] == 0
