"""Rows with one legal token, as under a grammar: all other logits are ``-inf``, and the only one may be far below zero.

Nothing is left to choose: the log-probability and the entropy are zero, and so are their gradients.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
from logitless import Objective, oracle
from logitless.core.compat import mosaic_gpu_reason
from numerics import STATS, cotangents, f64, three

INTERPRETED = {"reference": {}, "chunked": {}, "pallas_tpu": {"interpret": True}, "mosaic_gpu": {"interpret": True}}
hopper = pytest.mark.skipif(mosaic_gpu_reason() is not None, reason=str(mosaic_gpu_reason()))
KERNELS = [  # slow: 15 to 45 seconds each in the interpreters
    pytest.param("pallas_tpu", marks=pytest.mark.slow),
    pytest.param("mosaic_gpu", marks=[pytest.mark.slow, hopper]),
]
BACKENDS = pytest.mark.parametrize("backend", ["reference", "chunked", *KERNELS])
EACH = np.array([1.0, 0.7, 1.0, 2.0], np.float32)
V = 128
OBJECTIVE = Objective(entropy_coef=0.125, aggregation="dapo")


def check(call: Any, loss: Any, primals: tuple[np.ndarray, ...], truth: Any, pulled: Any, of_loss: Any) -> None:
    """Statistics, their pullback and a loss with an entropy bonus, with and without a gradient, against float64."""
    g = cotangents(np.random.default_rng(1), (4,))

    @jax.jit
    def run(*primals: Any) -> Any:
        out, pull = jax.vjp(call, *primals)
        return (
            call(*primals),
            out,
            pull(tuple(map(jnp.asarray, g))),
            loss(*primals),
            jax.value_and_grad(loss, every)(*primals),
        )

    every = tuple(range(len(primals)))
    without, stats, d, value, (same, d_loss) = run(*primals)
    for name, a, b in zip(STATS, without, stats, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(f64(a), getattr(truth, name), rtol=1e-5, atol=1e-6, err_msg=name)
    assert np.isfinite(value) and value == same
    for got, want in ((d, pulled(g)), (d_loss, of_loss)):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(f64(a), b, rtol=1e-5, atol=1e-5 * max(1, np.abs(b).max()))


@BACKENDS
@pytest.mark.parametrize("vocab_size", [None, 1])
def test_logits(vocab_size: int | None, backend: str) -> None:
    """Also with padding in the place of what is illegal."""
    x = np.full((4, V), -np.inf, np.float32)
    y = np.array([0 if vocab_size else 5, 0, 0, 0])
    x[0, y[0]], x[1, 0], x[2], x[3, 0] = -200, -90, np.random.default_rng(0).standard_normal(V), 300
    options = dict(INTERPRETED[backend], vocab_size=vocab_size, backend=backend)

    def call(x: jax.Array) -> Any:
        return three(flat_calls.logprobs(x, jnp.asarray(y), temperature=EACH, **options))

    def loss(x: jax.Array) -> jax.Array:
        given = dict(advantages=jnp.ones(1), objective=OBJECTIVE.replace(temperature=EACH[None]), **options)
        return flat_calls.grpo_loss(x[None], jnp.asarray(y)[None], **given)[0]

    known = dict(temperature=EACH, vocab_size=vocab_size)
    of_loss = oracle.grpo_loss(
        x[None],
        y[None],
        advantages=np.ones(1),
        objective=OBJECTIVE.replace(temperature=EACH[None]),
        vocab_size=vocab_size,
    )[1]
    check(
        call, loss, (x,), oracle.token_stats(x, y, **known), lambda g: [oracle.token_stats_vjp(x, y, *g, **known)],
        of_loss,
    )  # fmt: skip


@BACKENDS
def test_the_head(backend: str) -> None:
    """What is illegal is so by the bias."""
    rng = np.random.default_rng(0)
    h, w = (rng.standard_normal(s).astype(np.float32) for s in ((4, 128), (V, 128)))
    h[:, 0], w[5, 0], y = 1.0, -200.0, np.full(4, 5)
    bias = np.where(np.arange(V) == 5, 0.0, -np.inf).astype(np.float32)
    options = dict(INTERPRETED[backend], backend=backend, head_layout="vh", bias=bias)

    def call(h: jax.Array, w: jax.Array) -> Any:
        return three(flat_calls.linear_logprobs(h, w, jnp.asarray(y), temperature=0.7, **options))

    def loss(h: jax.Array, w: jax.Array) -> jax.Array:
        given = dict(advantages=jnp.ones(1), objective=OBJECTIVE.replace(temperature=0.7), **options)
        return flat_calls.linear_grpo_loss(h[None], w, jnp.asarray(y)[None], **given)[0]

    known = dict(head_layout="vh", bias=bias, temperature=np.float32(0.7))
    truth = oracle.linear_token_stats(h, w, y, **known)
    check(call, loss, (h, w), truth, lambda g: oracle.linear_token_stats_vjp(h, w, y, *g, **known)[:2], (0 * h, 0 * w))
