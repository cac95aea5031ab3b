"""Faults that were planted in the core and that no other test saw: each has its own here."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logitless
from conftest import token_stats
from interpreted import by_numpy
from logitless import Objective
from logitless.core.row_passes import live_sweep
from logitless.head.sparse import column_gather

OBJECTIVES = {"in forward": Objective(aggregation="dapo"), "later": Objective(level="sequence")}


@pytest.mark.parametrize("way", OBJECTIVES)
def test_the_padding_of_a_ragged_last_chunk_adds_nothing(way: str) -> None:
    """Five tokens in chunks of four: what fills the second chunk up has a bias's gradient too, if it is let."""
    rng = np.random.default_rng(0)
    h, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((1, 5, 8), (16, 8)))
    bias, y = jnp.asarray(rng.standard_normal(16), jnp.float32), jnp.asarray(rng.integers(0, 16, (1, 5)))

    def dbias(**options: Any) -> jax.Array:
        def loss(bias: jax.Array) -> jax.Array:
            return logitless.linear_grpo_loss(
                h, w, y, advantages=jnp.array([1.0]), objective=OBJECTIVES[way], bias=bias, head_layout="vh", **options
            )[0]

        return by_numpy(jax.grad(loss), bias)

    np.testing.assert_allclose(dbias(backend="chunked", chunk_size=4), dbias(backend="reference"), atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_softcap_hides_nan_in_masked_rows_from_the_gradient(backend: str) -> None:
    """The slope at NaN is NaN, and 0 * NaN is not 0."""
    x = jnp.where(jnp.array([[False], [True]]), jnp.nan, jnp.arange(16.0).reshape(2, 8))
    y, mask = jnp.array([1, 2]), jnp.array([True, False])

    def total(x: jax.Array) -> jax.Array:
        stats = logitless.logprobs(x, y, mask=mask, softcap=5.0, backend=backend)
        return jnp.sum(stats.logp + stats.entropy)

    d = by_numpy(jax.grad(total), x)
    assert np.isfinite(d[0]).all() and np.abs(d[0]).max() > 0
    np.testing.assert_array_equal(d[1], 0)


@pytest.mark.parametrize("chunk", [1024, 2048])
def test_what_is_left_after_the_whole_chunks_is_at_most_two_quarters(chunk: int) -> None:
    """A forward pass that keeps something for every chunk has room for so many."""
    for count in (1, chunk // 4, chunk // 4 + 1, chunk // 2, chunk // 2 + 1, chunk - 1, chunk, chunk + chunk // 2):
        whole, few = live_sweep(jnp.arange(4 * chunk) < count, chunk).trips()
        assert int(few) <= 2 and int(whole) + int(few) <= count // chunk + 2
        assert int(whole) * chunk + int(few) * (chunk // 4) >= count


def test_a_tolerance_counts_before_cotangents_are_known() -> None:
    zero = jnp.zeros((3,), jnp.float32)
    miss = column_gather.misses(jnp.float32(2.0**-8), token_stats(zero, np.zeros(3)), None, 64)
    assert miss(jnp.array([2.0**-9, 2.0**-7, jnp.nan])).tolist() == [False, True, True]


def test_a_live_target_outside_the_vocabulary_is_named() -> None:
    """-100 that was not masked: NaN in the loss, and ``validate=True`` says where it stands."""
    h, w, y = jnp.ones((1, 3, 4)), jnp.ones((8, 4)), jnp.array([[1, -100, 2]])
    for backend in ("reference", "chunked"):
        call = functools.partial(logitless.linear_grpo_loss, advantages=jnp.array([1.0]), backend=backend)
        assert np.isnan(by_numpy(lambda *a, f=call: f(*a)[0], h, w, y))
    with pytest.raises(ValueError, match=r"-100 at \(0, 1\)"):
        logitless.linear_grpo_loss(h, w, y, advantages=jnp.array([1.0]), validate=True)


def test_the_objective_gives_log_probabilities_their_temperature() -> None:
    """One temperature for the ratio's two sides; a second one is refused."""
    x, y, o = jnp.arange(8.0).reshape(1, 8), jnp.array([3]), Objective(temperature=0.7)
    got = by_numpy(lambda x: logitless.logprobs(x, y, objective=o).logp, x)
    np.testing.assert_array_equal(got, by_numpy(lambda x: logitless.logprobs(x, y, temperature=0.7).logp, x))
    of_head = by_numpy(lambda w: logitless.linear_logprobs(x, w, y, objective=o, head_layout="vh").logp, jnp.eye(8))
    np.testing.assert_allclose(of_head, got, rtol=1e-6)
    with pytest.raises(ValueError, match="temperature and objective were both given"):
        logitless.logprobs(x, y, objective=o, temperature=0.9)
