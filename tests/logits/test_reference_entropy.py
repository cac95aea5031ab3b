"""The dense reference keeps the entropy's gradient where a row has collapsed, as the contract asks of every backend."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logitless
from logitless import oracle


@functools.cache
def gradients(backend: str) -> Any:
    """Of the entropies' sum, by both modes where there are two; compiled once for all targets."""

    def entropy(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(logitless.logprobs(x, y, backend=backend).entropy)

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
