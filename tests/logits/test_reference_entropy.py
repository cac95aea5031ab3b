"""The dense reference keeps the entropy's gradient where a row has collapsed, as the contract asks of every backend.

Its second derivatives are those of the float64 oracle's gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
import logitless
from interpreted import by_numpy
from logitless import Objective, oracle
from numerics import cotangents, f64, three


@functools.cache
def gradients(backend: str) -> Any:
    """Of the entropies' sum, by both modes where there are two; compiled once for all targets."""

    def entropy(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(flat_calls.logprobs(x, y, backend=backend).entropy)

    modes = (jax.grad, jax.jacfwd) if backend == "reference" else (jax.grad,)
    return jax.jit(lambda x, y: [mode(entropy)(x, y) for mode in modes])


@pytest.mark.parametrize("target", [3, 5, 7])  # the leading column, the second one, one of the rest
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_collapsed_rows_keep_the_entropys_gradient(backend: str, target: int) -> None:
    x = np.zeros((2, 64), np.float32)
    x[:, 3], x[:, 5] = 40, 10
    y = np.full(2, target)
    zero, one = np.zeros(2), np.ones(2)
    truth = oracle.token_stats_vjp(x.astype(np.float64), y, zero, one)
    for d in gradients(backend)(x, y):
        np.testing.assert_allclose(np.asarray(d, np.float64), truth, rtol=1e-5, atol=1e-6 * np.abs(truth).max())


STEP = 1e-5
MODES: dict[str, Callable[..., Any]] = {
    "grad of grad": lambda f, x, v: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) * v))(x),
    "jvp of grad": lambda f, x, v: jax.jvp(jax.grad(f), (x,), (v,))[1],
}
EACH_MODE = pytest.mark.parametrize("mode", MODES)


def rows(missing: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """A leading target, a uniform row, columns that are ``-inf``, and a target far behind."""
    x = 2 * np.random.default_rng(0).standard_normal((4, 7)).astype(np.float32)
    x[0, 0], x[1], x[3, 3] = 8, 0.5, -4
    if missing:
        x[2, 4:] = -np.inf
    return x, np.arange(4)


def along(gradient: Callable[[np.ndarray], np.ndarray], x: np.ndarray, v: np.ndarray) -> np.ndarray:
    """A Hessian times ``v``, of float64 gradients."""
    x, v = f64(x), f64(v)
    return (gradient(x + STEP * v) - gradient(x - STEP * v)) / (2 * STEP)


@EACH_MODE
@pytest.mark.parametrize("temperature", [None, np.float32(0.7)])
def test_second_derivatives_of_statistics(temperature: Any, mode: str) -> None:
    (x, y), rng = rows(), np.random.default_rng(1)
    v, g = rng.standard_normal(x.shape).astype(np.float32), cotangents(rng, (4,))

    def total(x: jax.Array) -> jax.Array:
        stats = three(flat_calls.logprobs(x, jnp.asarray(y), temperature=temperature, backend="reference"))
        return sum(jnp.sum(s * c) for s, c in zip(stats, g, strict=True))

    got = by_numpy(lambda x, v: MODES[mode](total, x, v), x, v)
    truth = along(lambda x: oracle.token_stats_vjp(x, y, *g, temperature=temperature), x, v)
    np.testing.assert_allclose(f64(got), truth, rtol=1e-4, atol=2e-6)


def test_second_derivatives_of_the_entropy_by_the_chunked_backend() -> None:
    """By one reverse mode over another, where every logit is finite; a tie with the target among them."""
    (x, y), rng = rows(missing=False), np.random.default_rng(1)
    v, g = rng.standard_normal(x.shape).astype(np.float32), rng.standard_normal(4).astype(np.float32)

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(flat_calls.logprobs(x, jnp.asarray(y), temperature=0.7, backend="chunked").entropy * g)

    got = by_numpy(lambda x, v: MODES["grad of grad"](total, x, v), x, v)
    t, zero = np.float32(0.7), np.zeros(4)
    truth = along(lambda x: oracle.token_stats_vjp(x, y, zero, g, temperature=t), x, v)
    np.testing.assert_allclose(f64(got), truth, rtol=1e-4, atol=2e-6)


def test_second_derivative_by_the_temperature() -> None:
    x, y = rows()

    def total(t: jax.Array) -> jax.Array:
        return jnp.sum(flat_calls.logprobs(x, jnp.asarray(y), temperature=t, backend="reference").entropy)

    first, second = (by_numpy(d, np.float32(0.75)) for d in (jax.grad(total), jax.grad(jax.grad(total))))
    below, at, above = (oracle.token_stats(x, y, temperature=0.75 + d).entropy.sum() for d in (-1e-4, 0, 1e-4))
    np.testing.assert_allclose(first, (above - below) / 2e-4, rtol=1e-4)
    np.testing.assert_allclose(second, (above - 2 * at + below) / 1e-8, rtol=1e-4)


@EACH_MODE
def test_second_derivatives_of_a_loss_with_an_entropy_bonus(mode: str) -> None:
    (x, y), rng = rows(missing=False), np.random.default_rng(2)
    x, y, v = x[None], y[None], rng.standard_normal((1, *x.shape)).astype(np.float32)
    old = (oracle.token_stats(x, y).logp + 0.05 * rng.standard_normal((1, 4))).astype(np.float32)
    given = dict(advantages=np.ones(1, np.float32), old_logp=old, objective=Objective(entropy_coef=0.5))

    def loss(x: jax.Array) -> jax.Array:
        return flat_calls.grpo_loss(x, jnp.asarray(y), backend="reference", **given)[0]

    got = by_numpy(lambda x, v: MODES[mode](loss, x, v), x, v)
    np.testing.assert_allclose(
        f64(got), along(lambda x: oracle.grpo_loss(x, y, **given)[1], x, v), rtol=1e-4, atol=1e-6
    )


@EACH_MODE
def test_second_derivatives_of_the_head(mode: str) -> None:
    """By the hidden states and the head together: their mixed derivatives, too."""
    rng = np.random.default_rng(3)
    y, (h, w, dh, dw) = np.arange(4), (rng.standard_normal(s).astype(np.float32) for s in ((4, 5), (7, 5)) * 2)
    g = cotangents(rng, (4,))

    def total(x: jax.Array) -> jax.Array:
        h, w = x[:20].reshape(4, 5), x[20:].reshape(7, 5)
        stats = three(
            flat_calls.linear_logprobs(h, logitless.Head(w, layout="vh"), jnp.asarray(y), backend="reference")
        )
        return sum(jnp.sum(s * c) for s, c in zip(stats, g, strict=True))

    def gradient(x: np.ndarray) -> np.ndarray:
        h, w = x[:20].reshape(4, 5), x[20:].reshape(7, 5)
        found = oracle.linear_token_stats_vjp(h, w, y, *g, head_layout="vh")
        return np.concatenate([np.ravel(d) for d in found[:2]])

    x, v = (np.concatenate([a.ravel(), b.ravel()]) for a, b in ((h, w), (dh, dw)))
    got = by_numpy(lambda x, v: MODES[mode](total, x, v), x, v)
    np.testing.assert_allclose(f64(got), along(gradient, x, v), rtol=1e-4, atol=1e-5)
