"""From raw logits to those of the softmax: every number by hand, and which of them drop out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless import logprobs
from logitless.core.stats import StatCotangents, dz, factor, forward, pull_back, slope, transform_of

X = np.float32([[-3.0, 0.5, 4.0], [1.0, -0.25, 2.0]])


@pytest.mark.parametrize("temperature", [None, 1.0, 2.0, 2, 0.5, np.float32([0.5, 2.0])])
@pytest.mark.parametrize("softcap", [None, 1.0, 5.0])
@pytest.mark.parametrize("scale", [None, 1, 2.0, 0.25])
def test_bias_scale_softcap_and_temperature_in_their_order(temperature: Any, softcap: Any, scale: Any) -> None:
    t = transform_of(temperature, softcap, scale).column()
    divisor = 1.0 if temperature is None else np.reshape(temperature, (-1, 1))
    scaled = X * (1.0 if scale is None else scale)
    want = (scaled if softcap is None else softcap * np.tanh(scaled / softcap)) / divisor
    np.testing.assert_allclose(forward(jnp.asarray(X), t), want, rtol=1e-6)
    d, moves = jnp.asarray(X[::-1]), jax.grad(lambda x: jnp.sum(forward(x, t) * X[::-1]))(jnp.asarray(X))
    np.testing.assert_allclose(pull_back(d, jnp.asarray(X), t), moves, rtol=1e-5, atol=1e-5)


def test_ones_of_python_drop_out_and_a_softcap_of_one_does_not() -> None:
    """A traced one cannot be looked at; a true is no number."""
    plain = transform_of(1.0, None, 1)
    assert plain.temperature is plain.scale is factor(plain) is slope(jnp.asarray(X), plain) is None
    assert transform_of(None, 1.0, None).softcap is not None
    assert transform_of(jnp.float32(1.0), None, None).temperature is not None
    assert transform_of(2, None, 3).temperature == 2 and transform_of(2, None, 3).scale == 3


@pytest.mark.parametrize("name, value, logits", [("temperature", 2.0, X / 2), ("scale", 2, X * 2), ("scale", 1, X)])
def test_a_call_divides_and_multiplies(name: str, value: float, logits: np.ndarray) -> None:
    y = jnp.array([2, 0])
    got = logprobs(jnp.asarray(X), y, **{name: value})
    want = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(got.logp, want[np.arange(2), y], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("temperature", [None, 2.0])
def test_a_row_whose_only_number_is_the_target_is_certain(temperature: float | None) -> None:
    """All others are minus infinity; and the target alone, where it is."""
    x = jnp.array([[-jnp.inf, 3.0, -jnp.inf], [-jnp.inf, 1.0, 1.0]])
    stats = logprobs(x, jnp.array([1, 0]), temperature=temperature)
    assert stats.logp.tolist() == [0.0, -np.inf] and stats.lse[0] == 3.0 / (temperature or 1.0)
    np.testing.assert_allclose(stats.entropy, [0.0, np.log(2)], rtol=1e-6)
    assert logprobs(jnp.array([[5.0]]), jnp.array([0])).logp.tolist() == [0.0]


def test_a_column_without_probability_has_no_gradient() -> None:
    """Zero times the logarithm of zero is zero: of the log-probability, the entropy and the logsumexp."""
    x, k = jnp.array([[-jnp.inf, 3.0, 1.0], [-1e9, 0.0, 2.0]]), None
    is_target = jnp.array([[False, True, False], [False, False, True]])
    stats = logprobs(x, jnp.array([1, 2]))
    column = jax.tree.map(lambda a: a[:, None], stats)
    for g in np.eye(3):
        d = dz(x, is_target, column, StatCotangents(*(jnp.full((2, 1), c) for c in g)), k)
        assert (d[:, 0] == 0).all() and np.isfinite(d).all() and (d[:, 1:] != 0).all()
