"""Logits-level statistics and gradients of the plain-JAX backends against float64."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flat_calls
from interpreted import by_numpy
from logitless import grpo_loss, logprobs, oracle
from logitless.core.options import Options
from logitless.core.stats import LogitTransform, StatCotangents, empty_sums, finish, merge, row_sums
from logitless.logits import chunked
from logitless.objectives.objective import Objective
from numerics import (
    BACKENDS,
    EPS,
    EXTRAS,
    FAMILIES,
    REAL_VOCABULARIES,
    STATS,
    Rows,
    assert_contract,
    assert_same_bits,
    collapsed,
    cotangents,
    errors,
    f64,
    logits_problem,
    ordinary,
    plain_stats,
    run_logits,
    shifted,
    three,
    truth_of,
    with_gradient,
)

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
N, V = 40, 211


def check(
    x: jax.Array, y: np.ndarray, options: dict[str, Any], floor_ulp: float = 4, backends: tuple[str, ...] = BACKENDS
) -> None:
    """Statistics and dlogits of the backends under the contract."""
    targets, g = jnp.asarray(y, jnp.int32), cotangents(np.random.default_rng(1), y.shape)
    traced = {k: v for k, v in options.items() if k != "vocab_size"}
    run = functools.partial(run_logits, vocab_size=options.get("vocab_size"), x=x, y=targets, g=g, options=traced)
    plain, dx_plain = run("plain")
    truth = oracle.token_stats(x, y, **truth_of(options))
    d_truth = oracle.token_stats_vjp(x, y, *g, **truth_of(options))
    for backend in backends:
        fast, dx = run(backend)
        for name, a, b in zip(STATS, fast, plain, strict=True):
            assert_contract(f"{backend} {name}", a, b, getattr(truth, name), floor_ulp)
        assert dx.dtype == x.dtype
        assert_contract(f"{backend} dlogits", dx, dx_plain, d_truth, floor_ulp)


@functools.cache
def compiled(backend: str) -> Any:
    """``logprobs``, compiled once for all tests."""
    return jax.jit(functools.partial(logprobs, options=Options(backend=backend)))


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_contract_on_every_family(family: str, dtype: str) -> None:
    rows = FAMILIES[family](np.random.default_rng(0), N, V)
    check(jnp.asarray(rows.logits, DTYPES[dtype]), rows.targets, {})


RNG = np.random.default_rng(7)
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "temperature per token": {"temperature": RNG.uniform(0.3, 2.0, N).astype(np.float32)},
    "softcap": {"softcap": 4.0},
    "scale": {"scale": 0.25},
    "padding": {"vocab_size": V - 30},
    "mask": {"mask": RNG.random(N) < 0.4},
    "everything": {
        "temperature": RNG.uniform(0.3, 2.0, N).astype(np.float32),
        "softcap": 5.0,
        "scale": 0.5,
        "vocab_size": V - 30,
        "mask": RNG.random(N) < 0.6,
    },
}


@pytest.mark.parametrize(
    "options, dtype",
    [
        *(("temperature", "f32"), ("padding", "f32"), ("mask", "f32")),
        *(pytest.param("everything", d, marks=pytest.mark.quick) for d in ("f32", "bf16")),
        *(pytest.param(o, "bf16", marks=pytest.mark.slow) for o in ("temperature", "padding", "mask")),
        *(
            pytest.param(o, d, marks=pytest.mark.slow)
            for o in ("temperature per token", "softcap", "scale")
            for d in ("f32", "bf16")
        ),
    ],
)
def test_contract_with_options(options: str, dtype: str) -> None:
    chosen = OPTIONS[options]
    rows = ordinary(np.random.default_rng(2), N, V)
    if "vocab_size" in chosen:
        rows.logits[:, chosen["vocab_size"] :] = np.nan  # what stands in a padded column is never read
        rows = Rows(rows.logits, rows.targets % chosen["vocab_size"])
    if "mask" in chosen:
        dead = ~chosen["mask"]
        rows.logits[dead] = np.nan
        rows.targets[dead] = -100
        rows.logits[np.flatnonzero(dead)[0]] = np.inf
    # tanh, its slope and the temperature add a few roundings of their own
    check(jnp.asarray(rows.logits, DTYPES[dtype]), rows.targets, chosen, floor_ulp=8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_collapsed_rows_keep_their_relative_precision(backend: str) -> None:
    """log_softmax gives exactly 0 here; the truth is -exp(-margin), down to margins of 80 nats."""
    rows = collapsed(np.random.default_rng(3), 61, 301)
    x, y = jnp.asarray(rows.logits, jnp.float32), jnp.asarray(rows.targets, jnp.int32)
    assert float(jnp.max(jnp.abs(plain_stats(x, y)[0]))) == 0.0
    g = (np.ones(61, np.float32), np.ones(61, np.float32), np.zeros(61, np.float32))
    fast, (dx,) = with_gradient(lambda x: three(flat_calls.logprobs(x, y, backend=backend)), x, g=g)
    truth = oracle.token_stats(x, y)
    assert truth.logp.min() > -3e-9 and truth.logp.max() < 0
    for name, value in zip(STATS, fast, strict=True):
        np.testing.assert_allclose(f64(value), getattr(truth, name), rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(f64(dx), oracle.token_stats_vjp(x, y, *g), rtol=2e-5, atol=1e-37)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_collapse_onto_another_column(backend: str) -> None:
    """The target is hopeless: logp is about -margin, and its gradient is one-hot minus one-hot."""
    x = jnp.zeros((4, 64)).at[:, 5].set(jnp.array([20.0, 60.0, 200.0, 1e4]))
    y = jnp.zeros(4, jnp.int32)
    stats, (dx,) = with_gradient(lambda x: flat_calls.logprobs(x, y, backend=backend).logp, x, g=jnp.ones(4))
    np.testing.assert_allclose(f64(stats), oracle.token_stats(x, y).logp, rtol=2e-7)
    np.testing.assert_allclose(f64(dx), oracle.token_stats_vjp(x, y, np.ones(4)), rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("backend", BACKENDS)
def test_common_offset_costs_nothing(backend: str) -> None:
    """Rows that are shifted exactly (multiples of 1/512 stay representable) have the same logp and entropy."""
    rng = np.random.default_rng(4)
    x = jnp.asarray(np.round(rng.standard_normal((16, 97)) * 512) / 512, jnp.float32)
    y = jnp.asarray(rng.integers(0, 97, 16), jnp.int32)
    here, there = (compiled(backend)(x + c, y) for c in (0.0, 8192.0))
    for name in ("logp", "entropy", "log_sum_p2", "max_logp", "is_top1"):
        np.testing.assert_allclose(f64(getattr(there, name)), f64(getattr(here, name)), rtol=4 * EPS, err_msg=name)


@pytest.mark.optimized
@pytest.mark.parametrize("temperature", [0.7, 0.9])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_temperature_costs_no_more_than_a_division(backend: str, temperature: float) -> None:
    """Logits of about 200, and no floor: a product with a rounded ``1 / temperature`` is up to twice as far off. The
    bits are the same whether the compiler knows the temperature or not."""
    rng, t = np.random.default_rng(4), np.float32(temperature)
    x, y = jnp.asarray(200 * rng.standard_normal((2000, 16)), jnp.float32), jnp.asarray(rng.integers(0, 16, 2000))

    def f(t: Any, x: jax.Array) -> Any:
        return three(flat_calls.logprobs(x, y, temperature=t, backend=backend))

    got = jax.jit(f)(t, x)
    assert_same_bits(got, jax.jit(functools.partial(f, t))(x))
    plain, truth = jax.jit(lambda t, x: plain_stats(x, y, temperature=t))(t, x), oracle.token_stats(x, y, temperature=t)
    for name, a, b in zip(STATS, got, plain, strict=True):
        assert_contract(name, a, b, getattr(truth, name), floor_ulp=0)


@pytest.mark.parametrize("spread", [0.0, 1e-3])
@pytest.mark.parametrize("vocab", [211, 1000, pytest.param(50257, marks=pytest.mark.slow)])  # slow: large arrays
def test_the_entropys_gradient_of_even_rows(vocab: int, spread: float) -> None:
    """It is all cancellation, ``log p + entropy`` of logits that are nearly the same: with no floor."""
    rng, one = np.random.default_rng(5), np.ones(32, np.float32)
    x = jnp.asarray(1.7 + spread * rng.standard_normal((32, vocab)), jnp.float32)
    y, zero = rng.integers(0, vocab, 32), np.zeros(32, np.float32)
    run = functools.partial(run_logits, vocab_size=None, x=x, y=jnp.asarray(y), g=(zero, one, zero), options={})
    truth, (_, plain) = oracle.token_stats_vjp(x, y, zero, one, zero), run("plain")
    for backend in BACKENDS:
        assert_contract(f"{backend} dlogits", run(backend)[1], plain, truth, floor_ulp=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_extras(family: str, backend: str) -> None:
    rows = FAMILIES[family](np.random.default_rng(5), N, V)
    x, y = jnp.asarray(rows.logits, jnp.float32), jnp.asarray(rows.targets, jnp.int32)
    stats, truth = compiled(backend)(x, y), oracle.token_stats(x, y)
    np.testing.assert_array_equal(stats.is_top1, truth.is_top1)
    np.testing.assert_array_equal(f64(stats.max_logit), truth.max_logit)
    np.testing.assert_allclose(f64(stats.log_sum_p2), truth.log_sum_p2, rtol=1e-5, atol=3e-6)
    np.testing.assert_allclose(f64(stats.max_logp), truth.max_logit - truth.lse, rtol=1e-5, atol=3e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_extras_have_no_gradient(backend: str) -> None:
    x, y = jnp.asarray(ordinary(np.random.default_rng(0), 4, 9).logits, jnp.float32), jnp.arange(4)

    def f(x: jax.Array) -> jax.Array:
        s = flat_calls.logprobs(x, y, backend=backend)
        return sum(jnp.sum(getattr(s, name)) for name in EXTRAS)

    assert not np.any(by_numpy(jax.grad(f), x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_targets_outside_the_vocabulary_are_nan_where_live(backend: str) -> None:
    x = jnp.zeros((2, 3, 8))
    y = jnp.array([[0, 8, -1], [7, -100, 3]])
    mask = jnp.array([[1, 1, 1], [1, 0, 1]])
    stats = compiled(backend)(x, y, mask=mask)
    bad = np.array([[0, 1, 1], [0, 0, 0]], bool)
    for name in (*STATS, *EXTRAS):
        np.testing.assert_array_equal(np.isnan(getattr(stats, name)), bad, err_msg=name)
        assert getattr(stats, name)[1, 1] == 0
    assert not np.any(np.asarray(stats.is_top1)[bad])
    # A padded column is no target either.
    assert np.isnan(flat_calls.logprobs(x, jnp.full((2, 3), 7), vocab_size=7, backend=backend).logp).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_in_one_column_is_in_every_statistic_of_its_row(backend: str) -> None:
    """Not the target's column, and among finite ones: it must not pass for a row without other columns."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, V)).astype(np.float32)
    x[1, 7] = np.nan
    g = cotangents(rng, (3,))
    stats, dx = run_logits(backend, None, jnp.asarray(x), jnp.asarray([2, 3, 5]), g, {})
    for name, value in zip(STATS, stats, strict=True):
        np.testing.assert_array_equal(np.isnan(value), [False, True, False], err_msg=name)
    np.testing.assert_array_equal(np.isnan(dx), np.repeat([[False], [True], [False]], V, axis=1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_all_dead_batch(dtype: str, backend: str) -> None:
    x, y = jnp.full((3, 4, 17), jnp.nan, DTYPES[dtype]), jnp.full((3, 4), -100)

    def f(x: jax.Array) -> Any:
        s = flat_calls.logprobs(x, y, mask=jnp.zeros((3, 4)), backend=backend)
        return jnp.sum(s.logp + s.entropy + s.lse), s

    (value, stats), dx = by_numpy(jax.value_and_grad(f, has_aux=True), x)
    assert float(value) == 0 and not np.any(f64(dx))
    assert all(not np.any(f64(leaf)) for leaf in jax.tree.leaves(stats))
    loss, dx = by_numpy(
        jax.value_and_grad(
            lambda x: flat_calls.grpo_loss(x, y, advantages=jnp.ones(3), mask=jnp.zeros((3, 4)), backend=backend)[0]
        ),
        x,
    )
    assert float(loss) == 0 and not np.any(f64(dx))


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_forward_is_the_same_to_the_bit_with_and_without_gradient(dtype: str) -> None:
    rng = np.random.default_rng(6)
    rows = ordinary(rng, 48, 1031)
    x = jnp.asarray(rows.logits, DTYPES[dtype]).reshape(3, 16, -1)
    y, mask = jnp.asarray(rows.targets, jnp.int32).reshape(3, 16), jnp.asarray(rng.random((3, 16)) < 0.7)
    old = jnp.asarray(rng.standard_normal((3, 16)) - 5, jnp.float32)
    a = jnp.asarray([1.0, -0.5, 0.0])

    def stats(x: jax.Array) -> Any:
        s = flat_calls.logprobs(x, y, mask=mask, temperature=0.8, backend="chunked")
        return jnp.sum(jnp.where(mask, s.logp**2 + s.entropy + s.lse, 0.0)), s

    def loss(x: jax.Array) -> Any:
        o = Objective(temperature=0.8, entropy_coef=0.1)
        return flat_calls.grpo_loss(x, y, advantages=a, old_logp=old, mask=mask, objective=o, backend="chunked")

    for f in (stats, loss):
        value, aux = jax.jit(f)(x)
        (value_too, aux_too), _ = jax.jit(jax.value_and_grad(f, has_aux=True))(x)
        assert_same_bits((value, aux), (value_too, aux_too), f.__name__)


@pytest.mark.optimized
def test_on_policy_ratio_is_exactly_one() -> None:
    """old_logp from logprobs, then the loss on the same logits, with its gradient."""
    rows = ordinary(np.random.default_rng(8), 48, 1031)
    x, y = jnp.asarray(rows.logits, jnp.bfloat16).reshape(3, 16, -1), jnp.asarray(rows.targets).reshape(3, 16)
    old = jax.jit(logprobs)(x, y).logp
    loss = functools.partial(grpo_loss, targets=y, advantages=jnp.asarray([1.0, -0.5, 0.25]), old_logp=old)
    (_, metrics), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
    assert float(metrics["ratio_min"].sum) == float(metrics["ratio_max"].sum) == 1.0


@pytest.mark.optimized
def test_chunk_size_matters_a_few_ulp_at_most() -> None:
    """Rows are independent and no matmul is involved, but a compiler may vectorise a shorter chunk differently."""
    rng = np.random.default_rng(9)
    rows = ordinary(rng, 50, 333)
    x, y = jnp.asarray(rows.logits, jnp.float32), jnp.asarray(rows.targets, jnp.int32)
    t = LogitTransform(jnp.asarray(rng.uniform(0.5, 2, 50), jnp.float32), None, None)
    g = jax.tree.map(jnp.asarray, StatCotangents(*cotangents(rng, (50,))))

    @functools.partial(jax.jit, static_argnums=0)
    def run(chunk: int) -> Any:
        p = logits_problem(x, y, t, 333, chunk=chunk)
        stats = chunked.token_stats(p)
        return stats, chunked.dlogits(p, stats, g)

    stats_whole, dx_whole = run(50)
    for chunk in (1, 7):
        stats, dx = run(chunk)
        for name in (*STATS, *EXTRAS, "is_top1"):
            a, b = f64(getattr(stats, name)), f64(getattr(stats_whole, name))
            np.testing.assert_allclose(a, b, rtol=4 * EPS, atol=4 * EPS, err_msg=f"{name} at chunk {chunk}")
        np.testing.assert_allclose(f64(dx), f64(dx_whole), rtol=1e-5, atol=1e-6, err_msg=f"dlogits at chunk {chunk}")


@functools.partial(jax.jit, static_argnums=0)
def merged(cuts: tuple[int, ...], z: jax.Array, is_target: jax.Array) -> Any:
    """Statistics by way of the sums of the ranges between ``cuts``."""
    total = empty_sums(z.shape[:1])
    for lo, hi in zip((0, *cuts), (*cuts, z.shape[1]), strict=True):
        total = merge(total, row_sums(z[:, lo:hi], is_target[:, lo:hi]))
    return finish(total)


@jax.jit
def unsplit(z: jax.Array, is_target: jax.Array) -> Any:
    return finish(row_sums(z, is_target))


@pytest.mark.parametrize("cuts", [(3,), (1, 2, 60), (30, 31, 32)])
@pytest.mark.parametrize("family", FAMILIES)
def test_sums_over_column_ranges_merge(family: str, cuts: tuple[int, ...]) -> None:
    """What tiles and shards carry: any split of the columns gives the statistics of the whole row."""
    rows = FAMILIES[family](np.random.default_rng(10), 24, 64)
    z = jnp.asarray(rows.logits, jnp.float32)
    is_target = jnp.arange(64)[None, :] == jnp.asarray(rows.targets)[:, None]
    got, whole = merged(cuts, z, is_target), unsplit(z, is_target)
    truth = oracle.token_stats(z, rows.targets)
    for name in STATS:
        assert_contract(name, getattr(got, name), getattr(whole, name), getattr(truth, name), floor_ulp=8)


@REAL_VOCABULARIES
def test_real_vocabularies(vocab: int, dtype: str) -> None:
    rows = ordinary(np.random.default_rng(12), 6, vocab)
    check(jnp.asarray(rows.logits, DTYPES[dtype]), rows.targets, {}, floor_ulp=8, backends=("chunked",))


def test_many_tokens() -> None:
    n = 70_000
    rows = ordinary(np.random.default_rng(13), n, 9)
    check(jnp.asarray(rows.logits, jnp.float32), rows.targets, {}, floor_ulp=8, backends=("chunked",))


@pytest.mark.quick
def test_token_loss_and_general_way_agree() -> None:
    """grpo_loss takes statistics and dlogits in one pass; policy_loss over logprobs goes through the general VJP."""
    from logitless import policy_loss

    rng = np.random.default_rng(14)
    rows = ordinary(rng, 48, 211)
    rows.logits[np.arange(0, 48, 2), rows.targets[::2]] += 12.0  # half of the targets lead
    x = jnp.asarray(rows.logits, jnp.float32).reshape(3, 16, -1)
    y, mask = jnp.asarray(rows.targets).reshape(3, 16), jnp.asarray(rng.random((3, 16)) < 0.7)
    old = jax.jit(logprobs)(x, y).logp + np.asarray(0.3 * rng.standard_normal((3, 16)), np.float32)
    a = jnp.asarray([1.0, -0.5, 0.25])
    o = Objective(temperature=0.8, entropy_coef=0.1, beta=0.04)
    common = {"advantages": a, "old_logp": old, "ref_logp": old - 0.1, "mask": mask, "objective": o}

    def one_pass(x: jax.Array) -> jax.Array:
        return flat_calls.grpo_loss(x, y, backend="chunked", **common)[0]

    def general(x: jax.Array) -> jax.Array:
        return policy_loss(flat_calls.logprobs(x, y, mask=mask, temperature=0.8, backend="chunked"), **common)[0]

    (v1, d1), (v2, d2) = (jax.jit(jax.value_and_grad(f))(x) for f in (one_pass, general))
    loss, truth = oracle.grpo_loss(
        x, y, objective=o.replace(temperature=np.float32(0.8)), **{k: v for k, v in common.items() if k != "objective"}
    )
    np.testing.assert_allclose([float(v1), float(v2)], loss, rtol=2e-6)
    assert_contract("one pass", d1, d2, truth)
    assert_contract("general", d2, d1, truth)


@pytest.mark.parametrize(("level", "most"), [("token", 1), ("sequence", 2)])
def test_exponentials_on_a_cpu(level: str, most: int) -> None:
    """They are most of the time: one a logit where the gradient follows from the row, one more where it comes later."""
    x, y = jnp.zeros((2, 3, 211)), jnp.zeros((2, 3), jnp.int32)

    def loss(x: jax.Array) -> jax.Array:
        return flat_calls.grpo_loss(x, y, advantages=jnp.ones(2), objective=Objective(level=level), backend="chunked")[
            0
        ]

    assert len(re.findall(r"f32\[6,211\] = exp ", str(jax.make_jaxpr(jax.grad(loss))(x)))) == most


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_statistics_property(data: st.DataObject) -> None:
    """Any shape, mask, dtype and kind of row."""
    n, v = data.draw(st.sampled_from([(2, 1), (5, 17)]))
    dtype = data.draw(st.sampled_from(["f32", "bf16"]))
    kinds = data.draw(
        st.lists(st.sampled_from(["flat", "wide", "up", "down", "holes", "lead"]), min_size=n, max_size=n)
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    z, y = rng.standard_normal((n, v)), rng.integers(0, v, n)
    for i, kind in enumerate(kinds):
        if kind == "wide":
            z[i] = rng.uniform(-1e4, 1e4, v)
        elif kind in ("up", "down"):
            z[i] += 1e4 if kind == "up" else -1e4
        elif kind == "holes":
            z[i, (rng.random(v) < 0.5) & (np.arange(v) != y[i])] = -np.inf
        elif kind == "lead":
            z[i, y[i]] += rng.uniform(20, 80)
    x = jnp.asarray(z, DTYPES[dtype])
    truth = oracle.token_stats(x, y, mask=mask)
    for backend in BACKENDS:
        got = compiled(backend)(x, jnp.asarray(y), mask=jnp.asarray(mask))
        np.testing.assert_array_equal(got.is_top1, truth.is_top1)
        np.testing.assert_array_equal(f64(got.max_logit), truth.max_logit)
        np.testing.assert_allclose(f64(got.lse), truth.lse, rtol=4 * EPS, atol=1e-6)
        np.testing.assert_allclose(f64(got.logp), truth.logp, rtol=1e-5, atol=1e-37)
        # absolute: a row that collapsed onto a column other than its target loses the last of its entropy
        np.testing.assert_allclose(f64(got.entropy), truth.entropy, rtol=1e-5, atol=1e-6)


def test_shifted_rows_do_need_the_care() -> None:
    """The guard of the guard: the obvious formula fails the contract that the tests above hold the backends to."""
    rows = shifted(1e4)(np.random.default_rng(0), N, V)
    x, y = jnp.asarray(rows.logits, jnp.float32), jnp.asarray(rows.targets)
    naive = jnp.take_along_axis(x, y[:, None], 1)[:, 0] - jax.nn.logsumexp(x, axis=-1)
    with pytest.raises(AssertionError, match="max error"):
        assert_contract("naive", naive, plain_stats(x, y)[0], oracle.token_stats(x, y).logp)
    assert errors(naive, oracle.token_stats(x, y).logp)[0] > 1e-4
