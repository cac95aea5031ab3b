"""What calls of the head promise beyond numbers: dtypes of sums, padding, masks, budgets, what is not computed."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
import logitless
from interpreted import by_numpy
from logitless import Objective
from logitless.core.problem import HeadArrays
from logitless.head.sparse import gather
from logitless.head.sparse.active_columns import Columns, Rule, chunk_report
from loss_cases import token_stats
from sparse_cases import CHUNK, TOLERANCE, calibrated, gradients_and_report, loss_inputs


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_softcap_hides_nan_in_masked_rows_from_the_gradient(backend: str) -> None:
    """The slope at NaN is NaN, and 0 * NaN is not 0."""
    x = jnp.where(jnp.array([[False], [True]]), jnp.nan, jnp.arange(16.0).reshape(2, 8))
    y, mask = jnp.array([1, 2]), jnp.array([True, False])

    def total(x: jax.Array) -> jax.Array:
        stats = flat_calls.logprobs(x, y, mask=mask, softcap=5.0, backend=backend)
        return jnp.sum(stats.logp + stats.entropy)

    d = by_numpy(jax.grad(total), x)
    assert np.isfinite(d[0]).all() and np.abs(d[0]).max() > 0
    np.testing.assert_array_equal(d[1], 0)


def test_a_tolerance_counts_before_cotangents_are_known() -> None:
    zero = jnp.zeros((3,), jnp.float32)
    miss = gather.misses(jnp.float32(2.0**-8), token_stats(zero, np.zeros(3)), None, 64)
    assert miss(jnp.array([2.0**-9, 2.0**-7, jnp.nan])).tolist() == [False, True, True]


def test_the_objective_gives_log_probabilities_their_temperature() -> None:
    """One temperature for the ratio's two sides; a second one is refused."""
    x, y, o = jnp.arange(8.0).reshape(1, 8), jnp.array([3]), Objective(temperature=0.7)
    got = by_numpy(lambda x: logitless.logprobs(x, y, objective=o).logp, x)
    np.testing.assert_array_equal(got, by_numpy(lambda x: logitless.logprobs(x, y, temperature=0.7).logp, x))
    of_head = by_numpy(
        lambda w: logitless.linear_logprobs(x, logitless.Head(w, layout="vh"), y, objective=o).logp, jnp.eye(8)
    )
    np.testing.assert_allclose(of_head, got, rtol=1e-6)
    with pytest.raises(ValueError, match="temperature and objective were both given"):
        logitless.logprobs(x, y, objective=o, temperature=0.9)


@pytest.mark.parametrize("level", ["head", "logits"])
def test_a_losss_cotangent_is_applied_in_float32(level: str) -> None:
    """A third is no bfloat16 number: the gradient is rounded once, after the product with it."""
    rng, y = np.random.default_rng(0), jnp.array([[1, 5, 2, 7, 0, 3]])
    h, w, x = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((1, 6, 8), (16, 8), (1, 6, 16)))
    common = dict(targets=y, advantages=jnp.array([1.0]), backend="chunked")

    def loss(*arrays: jax.Array) -> jax.Array:
        call = flat_calls.linear_grpo_loss if level == "head" else flat_calls.grpo_loss
        return call(*arrays, **common)[0]

    def pulled(g: jax.Array, *arrays: jax.Array) -> Any:
        return jax.vjp(loss, *arrays)[1](g)

    arrays = (h, w) if level == "head" else (x,)
    unit, third = (by_numpy(pulled, np.float32(g), *arrays) for g in (1, 1 / 3))
    for a, b in zip(unit, third, strict=True):
        assert b.dtype == jnp.bfloat16 and np.any(b)
        np.testing.assert_array_equal(b, (a.astype(np.float32) * np.float32(1 / 3)).astype(jnp.bfloat16))


@pytest.mark.parametrize("call", ["statistics", "loss"])
def test_dlogits_by_plain_jax_where_that_is_asked_for(call: str) -> None:
    """One kernel, that of the statistics, and none for dlogits that cotangents wait for."""
    x, y = jnp.zeros((1, 8, 256)), jnp.zeros((1, 8), jnp.int32)

    def kernels(bwd_impl: str) -> int:
        def total(x: jax.Array) -> jax.Array:
            options = dict(bwd_impl=bwd_impl, backend="pallas_tpu", interpret=True)
            if call == "statistics":
                return jnp.sum(flat_calls.logprobs(x, y, **options).logp)
            o = Objective(level="sequence")
            return flat_calls.grpo_loss(x, y, advantages=jnp.ones(1), objective=o, **options)[0]

        return str(jax.make_jaxpr(jax.grad(total))(x)).count("pallas_call[")

    assert (kernels("jax"), kernels("pallas")) == (1, 2)


def test_rows_without_a_gradient_leave_nothing_out() -> None:
    """Of a sparse backward's report: neither masked tokens nor those without advantage count, though some of their mass
    lies beside the active columns."""
    case = calibrated(jnp.float32)
    rest = loss_inputs(case)
    rest["mask"][:, ::3], rest["advantages"][1::2] = False, 0
    moving = rest["mask"] & (rest["advantages"] != 0)
    options = dict(objective=Objective(), backend="chunked", chunk_size=CHUNK, sparse_backward=TOLERANCE)
    f = functools.partial(gradients_and_report, **options)
    _, metrics, report, _ = by_numpy(f, *case.parameters(), case.targets, rest)
    left_out = report.left_out.reshape(moving.shape)
    assert left_out[moving].max() > 0
    np.testing.assert_array_equal(left_out[~moving], 0)
    mass, rows = metrics["left_out_mass"].sum, metrics["left_out_mass"].count
    np.testing.assert_allclose(mass / rows, left_out[moving].mean(), rtol=1e-6)


def test_the_references_arrays_are_constants_in_both_modes() -> None:
    """Nothing of the reference is differentiated, which forward mode could not be, through a hand-written gradient."""
    rng = np.random.default_rng(0)
    h, w, ref_h, ref_w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((1, 3, 4), (8, 4)) * 2)
    rest = dict(advantages=jnp.ones(1), objective=Objective(beta=0.1), head_layout="vh", backend="chunked")

    def loss(ref_h: jax.Array, ref_w: jax.Array) -> jax.Array:
        given = dict(ref_hidden=ref_h, ref_lm_head=ref_w, **rest)
        return flat_calls.linear_grpo_loss(h, w, jnp.zeros((1, 3), jnp.int32), **given)[0]

    arrays = ref_h, ref_w
    assert by_numpy(lambda *x: jax.jvp(loss, x, x)[1], *arrays) == 0
    assert not any(np.any(d) for d in by_numpy(jax.grad(loss, (0, 1)), *arrays))


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_a_memory_budget_is_for_logits_and_dlogits(dtype: str, size: int) -> None:
    """For exactly 12 tokens' rows of both; with a byte less, for fewer."""
    h, w, y = jnp.zeros((2, 24, 8), jnp.bfloat16), jnp.zeros((64, 8), jnp.bfloat16), jnp.zeros((2, 24), jnp.int32)

    def chunk(budget: int) -> int:
        options = dict(advantages=jnp.ones(2), memory_budget=budget, logits_dtype=dtype, backend="chunked")
        return flat_calls.explain(logitless.linear_grpo_loss, h, w, y, **options).tiles["chunk"]

    both = 2 * 64 * size * 12
    assert chunk(both) == 12 > chunk(both - 1)


@pytest.mark.parametrize("dense, left, width", [(False, [0.125, 0.0, 0.0, 0.5], 256.0), (True, [0.0] * 4, 300.0)])
def test_hard_rows_and_dense_chunks_leave_nothing_out(dense: bool, left: list[float], width: float) -> None:
    """The second row has no gradient, and nothing was looked for; the third went dense."""
    rule = Rule((1.0,), per_column=2.0, per_hard_row=3.0, dense=3.0, slab=128, most=256)
    left_out = jnp.array([0.125, 0.0, 0.25, 0.5])
    found = Columns(jnp.arange(256), jnp.int32(0 if dense else 129), jnp.bool_(dense), left_out)
    rows, hard = jnp.array([True, False, True, True]), jnp.array([False, False, True, False])
    report = chunk_report(rule, HeadArrays(jnp.zeros((300, 4)), None, None, None, 1.0, "vh"), found, rows, hard)
    assert report.left_out.tolist() == left
    assert (int(report.chunks), int(report.dense_chunks), float(report.width)) == (1, int(dense), width)
    metrics = report.metrics(300)
    assert {x.dtype for x in jax.tree.leaves(metrics)} == {np.dtype(np.float32)}
    assert float(metrics["left_out_mass"].sum) == sum(left) and float(metrics["left_out_mass"].count) == 3
