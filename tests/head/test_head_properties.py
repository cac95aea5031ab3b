"""What calls of the head promise beyond numbers: dtypes of sums, padding, masks, budgets, what is not computed."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logitless
from conftest import token_stats
from interpreted import by_numpy, in_numpy
from logitless import Objective
from logitless.core.chunk_size import head_chunk
from logitless.core.problem import Head
from logitless.core.row_passes import live_sweep
from logitless.head.sparse import column_gather
from logitless.head.sparse.active_columns import Columns, Rule
from logitless.head.sparse.report import chunk_report
from matmuls import matmul_flops

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


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_bias_has_its_gradient_in_float32(backend: str) -> None:
    """A sum over tokens of bfloat16 numbers keeps the digits of float32: it is not rounded to bfloat16."""
    rng = np.random.default_rng(0)
    h, w = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((1, 64, 8), (16, 8)))
    y = jnp.asarray(rng.integers(0, 16, (1, 64)))

    def loss(bias: jax.Array) -> jax.Array:
        stats = logitless.linear_logprobs(h, w, y, bias=bias, head_layout="vh", backend=backend)
        return jnp.sum(stats.logp)

    got = by_numpy(jax.grad(loss), jnp.zeros(16, jnp.float32))
    assert got.dtype == np.float32
    assert np.mean(got == got.astype(jnp.bfloat16)) < 0.5


def test_the_cotangent_of_a_loss_is_applied_in_float32() -> None:
    """A third of a loss has a third of its gradient, rounded once; bfloat16 has no third."""
    rng = np.random.default_rng(0)
    h, w = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((2, 8, 8), (16, 8)))
    y = jnp.asarray(rng.integers(0, 16, (2, 8)))

    def loss(h: jax.Array, w: jax.Array, times: jax.Array) -> jax.Array:
        advantages = jnp.array([1.0, -0.5])
        return (
            times
            * logitless.linear_grpo_loss(
                h,
                w,
                y,
                advantages=advantages,
                objective=Objective(aggregation="dapo"),
                head_layout="vh",
                backend="chunked",
            )[0]
        )

    gradient = in_numpy(jax.grad(loss, (0, 1)))
    whole, third = (gradient(h, w, jnp.float32(times)) for times in (1.0, 1 / 3))
    for one, part in zip(whole, third, strict=True):
        want = (one.astype(np.float32) * np.float32(1 / 3)).astype(one.dtype)
        np.testing.assert_array_equal(part.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("logits_bytes", [2, 4])
def test_a_memory_budget_holds_logits_and_their_gradient(logits_bytes: int) -> None:
    row = 100 * logits_bytes
    assert head_chunk(20, 100, memory_budget=2 * row * 10, logits_bytes=logits_bytes) == 10
    assert head_chunk(20, 100, memory_budget=2 * row, logits_bytes=logits_bytes) == 1
    with pytest.raises(ValueError, match=f"memory_budget={2 * row - 1} bytes is less than one token's row"):
        head_chunk(20, 100, memory_budget=2 * row - 1, logits_bytes=logits_bytes)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_reference_that_is_the_policy_has_no_gradient_and_costs_one_matmul(backend: str) -> None:
    """The same arrays as policy and as reference: only the policy's use of them is differentiated."""
    rng = np.random.default_rng(0)
    h, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((1, 4, 8), (16, 8)))
    y = jnp.asarray(rng.integers(0, 16, (1, 4)))

    def loss(h: jax.Array, w: jax.Array, frozen: bool) -> jax.Array:
        ref = jax.lax.stop_gradient((h, w)) if frozen else (h, w)
        return logitless.linear_grpo_loss(
            h, w, y, advantages=jnp.array([1.0]), objective=Objective(beta=0.1), head_layout="vh", backend=backend,
            ref_hidden=ref[0], ref_lm_head=ref[1],
        )[0]  # fmt: skip

    frozen, not_frozen = (jax.grad(functools.partial(loss, frozen=f), (0, 1)) for f in (True, False))
    for a, b in zip(by_numpy(frozen, h, w), by_numpy(not_frozen, h, w), strict=True):
        np.testing.assert_array_equal(a, b)
    assert matmul_flops(not_frozen, h, w) == matmul_flops(frozen, h, w) == 4 * 2 * 4 * 8 * 16


@pytest.mark.parametrize("way, kernels", [("pallas", 2), ("jax", 1)])
def test_the_backward_of_logits_is_a_kernel_unless_plain_jax_is_asked_for(way: Any, kernels: int) -> None:
    def total(x: jax.Array) -> jax.Array:
        stats = logitless.logprobs(x, jnp.zeros(8, int), backend="pallas_tpu", bwd_impl=way, interpret=True)
        return jnp.sum(stats.logp)

    assert str(jax.make_jaxpr(jax.grad(total))(jnp.ones((8, 128)))).count("pallas_call[") == kernels


@pytest.mark.parametrize("dense, left, width", [(False, [0.125, 0.0, 0.0, 0.5], 256.0), (True, [0.0] * 4, 300.0)])
def test_only_rows_with_a_gradient_leave_something_out(dense: bool, left: list[float], width: float) -> None:
    """A row without a gradient, a hard row and a row of a dense chunk lack nothing."""
    rule = Rule((1.0,), per_column=2.0, per_hard_row=3.0, dense=3.0, slab=128, most=256)
    left_out = jnp.array([0.125, 0.25, 0.25, 0.5])
    found = Columns(jnp.arange(256), jnp.int32(0 if dense else 129), jnp.bool_(dense), left_out)
    rows, hard = jnp.array([True, False, True, True]), jnp.array([False, False, True, False])
    report = chunk_report(rule, Head(jnp.zeros((300, 4)), None, None, None, 1.0, "vh"), found, rows, hard)
    assert report.left_out.tolist() == left
    assert (int(report.chunks), int(report.dense_chunks), float(report.width)) == (1, int(dense), width)
    metrics = report.metrics(300)
    assert float(metrics["left_out_mass"].sum) == sum(left) and float(metrics["left_out_mass"].count) == 3
