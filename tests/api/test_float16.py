"""float16 and a loss scale: the scale has to act before dlogits are rounded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
from interpreted import by_numpy
from logitless import Objective


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("level", ["head", "logits"])
def test_a_loss_scale_saves_small_gradients(backend: str, level: str) -> None:
    """With a denominator of 2e6 the gradients of a unit loss are below float16's smallest numbers; times 2^15 they are
    not."""
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.standard_normal((1, 32, 16)), jnp.float16)
    w = jnp.asarray(rng.standard_normal((64, 16)), jnp.float16)
    y = jnp.asarray(rng.integers(0, 64, (1, 32)), jnp.int32)
    rest = dict(advantages=jnp.array([1.0]), objective=Objective(aggregation="dapo"), denominator=2e6)

    def scaled(x: jax.Array, w: jax.Array, scale: float, backend: str) -> jax.Array:
        if level == "head":
            loss, _ = flat_calls.linear_grpo_loss(x, w, y, backend=backend, head_layout="vh", **rest)
        else:
            loss, _ = flat_calls.grpo_loss((x @ w.T).astype(x.dtype), y, backend=backend, **rest)
        return loss * scale

    def gradient(x: jax.Array, w: jax.Array, scale: float, backend: str) -> np.ndarray:
        return by_numpy(jax.grad(lambda x, w: scaled(x, w, scale, backend)), x, w)

    got = gradient(h, w, 2.0**15, backend)
    wide = gradient(h.astype(jnp.float32), w.astype(jnp.float32), 2.0**15, "reference")
    error = np.linalg.norm(np.asarray(got, np.float64) - np.asarray(wide)) / np.linalg.norm(np.asarray(wide))
    assert error < 0.02
