"""The dense reference keeps the entropy's gradient where a row has collapsed, as the contract asks of every backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logitless
from logitless import oracle


@pytest.mark.parametrize("target", [3, 5, 7])  # the leading column, the second one, one of the rest
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_collapsed_rows_keep_the_entropys_gradient(backend: str, target: int) -> None:
    x = np.zeros((2, 64), np.float32)
    x[:, 3], x[:, 5] = 40, 10
    y = np.full(2, target)

    def entropy(x: jax.Array) -> jax.Array:
        return jnp.sum(logitless.logprobs(x, jnp.asarray(y), backend=backend).entropy)

    zero, one = np.zeros(2), np.ones(2)
    truth = oracle.token_stats_vjp(x.astype(np.float64), y, zero, one)
    for f in (jax.grad(entropy), jax.jacfwd(entropy) if backend == "reference" else jax.grad(entropy)):
        d = np.asarray(f(jnp.asarray(x)), np.float64)
        np.testing.assert_allclose(d, truth, rtol=1e-5, atol=1e-6 * np.abs(truth).max())
