"""The sparse backward against float64: its error, its tolerance for every row, and what it says about itself.

Compiling is what costs time here, so inputs of one shape share one compiled function: tolerances are traced, and every
kind of logits comes as arrays of the same shapes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
from interpreted import by_numpy
from logitless import Objective, explain, linear_grpo_loss, linear_logprobs, metric_values, oracle
from logitless.core import backend as core_backend
from logitless.core.options import Options
from logitless.core.problem import Call, HeadArrays, HeadGrads, Linear, Problem, Wanted
from logitless.core.stats import LogitTransform, StatCotangents
from logitless.head.chunked import Chunked
from logitless.head.sparse import active_columns as columns
from logitless.head.sparse import gather
from logitless.head.sparse.backend import Sparse
from loss_cases import token_stats
from numerics import HeadCase as Case
from numerics import HeadStatics, assert_same_bits, cotangents, f64, head_truth, run_head, three
from sparse_cases import (
    CHUNK,
    SHAPE,
    TOLERANCE,
    VOCAB,
    WIDTH,
    N,
    adversarial,
    assert_as_good,
    calibrated,
    collapsed,
    flat,
    gradients_and_report,
    logp_cotangents,
    loss_inputs,
    probabilities,
    row_norms,
    truth_of,
)

OBJECTIVES = {
    "clip": Objective(aggregation="dapo"),
    "entropy bonus": Objective(aggregation="dapo", entropy_coef=0.02),
    "gspo": Objective(level="sequence", eps_low=0.2, eps_high=0.2),
}
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
optimized = pytest.mark.optimized  # sparse and dense chunks are compared to the bit, in functions that tests share


# -- runs ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    kind: str = "clip"
    chunk: int = CHUNK
    logits_dtype: str = "float32"


TRACED: list[Run] = []


def traced_grpo(c: Run, h: Any, w: Any, y: Any, rest: Any, tolerance: Any) -> Any:
    """``(loss, metrics, report, (dh, dw))``; ``tolerance=None`` is off."""
    TRACED.append(c)
    return gradients_and_report(
        h, w, y, rest, OBJECTIVES[c.kind], chunk_size=c.chunk, logits_dtype=c.logits_dtype, backend="chunked",
        sparse_backward="off" if tolerance is None else tolerance,
    )  # fmt: skip


grpo = jax.jit(traced_grpo, static_argnums=0)


def run(case: Case, rest: Any, tolerance: float | None = TOLERANCE, c: Run = Run()) -> Any:  # noqa: B008
    return grpo(c, *case.parameters(), jnp.asarray(case.targets), rest, tolerance and jnp.float32(tolerance))


def interpreted(case: Case, rest: Any, tolerance: float | None, c: Run) -> Any:
    """The same of a program that one test runs, once."""
    given = (*case.parameters(), case.targets, rest, tolerance and np.float32(tolerance))
    return by_numpy(functools.partial(traced_grpo, c), *given)


def active_sets(p: np.ndarray, y: np.ndarray, tolerance: float) -> list[np.ndarray]:
    """By the definition, for every candidate threshold: columns above it in some row, and all targets."""
    best = p.max(0)
    best[y] = 1.0
    return [best > tolerance * e for e in columns.chunk_rule(VOCAB).thresholds]


# -- error -----------------------------------------------------------------------------------------------------------


@optimized
@pytest.mark.parametrize("dtype", [pytest.param("f32", marks=pytest.mark.slow), "bf16"])
def test_auto_is_as_good_as_the_ordinary_path(dtype: str) -> None:
    case = calibrated(DTYPES[dtype])
    rest = loss_inputs(case)
    value, _, report, grads = run(case, rest, columns.auto_tolerance(DTYPES[dtype]))
    off_value, _, none, off = run(case, rest, None)
    assert none is None
    assert_same_bits(value, off_value)
    for name, got, ordinary, truth in zip(
        ("dh", "dw"), grads, off, truth_of(case, rest, OBJECTIVES["clip"]), strict=True
    ):
        assert got.dtype == DTYPES[dtype]
        assert_as_good(name, got, ordinary, truth)
    # half an ulp of bfloat16 leaves columns out, half an ulp of float32 does not
    assert int(report.dense_chunks) == (0 if dtype == "bf16" else report.chunks)
    if dtype == "f32":
        assert_same_bits(grads, off)


def test_dead_and_idle_tokens_in_bf16_logits() -> None:
    """Another chunk size, the last one not full; dead rows hold NaN, a third of the advantages are zero."""
    chunk = 40
    case = calibrated(jnp.bfloat16, seed=3)
    rest = loss_inputs(case)
    dead, idle = np.arange(N) % 7 == 3, np.arange(N) % 3 == 1
    rest["mask"] = ~dead.reshape(SHAPE)
    rest["advantages"] = np.where(idle.reshape(SHAPE), 0, rest["advantages"])
    hidden = np.array(case.hidden)
    hidden[~rest["mask"]] = np.nan
    case = Case(hidden, case.lm_head, case.targets)
    c = Run(chunk=chunk, logits_dtype="bfloat16")
    _, metrics, report, (dh, dw) = interpreted(case, rest, TOLERANCE, c)
    _, _, _, off = interpreted(case, rest, None, c)
    truth = truth_of(case, rest, OBJECTIVES["clip"])
    assert int(report.dense_chunks) < int(report.chunks) == -(-int((~dead & ~idle).sum()) // chunk)
    np.testing.assert_array_equal(np.asarray(report.rows), ~dead & ~idle)
    assert not np.asarray(report.left_out)[dead | idle].any()
    assert not f64(dh).reshape(N, -1)[dead | idle].any()
    assert_as_good("dh", dh, off[0], truth[0])
    assert_as_good("dw", dw, off[1], truth[1])
    values = metric_values(metrics)
    assert 0 < values["left_out_mass"] <= values["left_out_mass_max"] <= TOLERANCE
    assert values["active_columns"] <= values["backward_columns"] < 1


@optimized
def test_reported_mass_and_gradients_are_those_of_the_definition() -> None:
    """One chunk's worth of live tokens: its active set, its left-out masses and both gradients, in float64."""
    case = calibrated(jnp.float32)
    live = np.arange(N) % (N // CHUNK) == 1
    rest = dict(loss_inputs(case), mask=live.reshape(SHAPE))
    _, metrics, report, (dh, dw) = run(case, rest)
    assert int(report.chunks) == 1 and int(report.dense_chunks) == 0
    p, y = probabilities(case), case.targets.reshape(-1)
    (inactive,) = [~s for s in active_sets(p[live], y[live], TOLERANCE) if s.sum() == int(report.active)]
    mass = np.where(live, p[:, inactive].sum(1), 0.0)
    hard = mass > TOLERANCE
    assert 0 < hard.sum() < CHUNK // 2 and abs(mass / TOLERANCE - 1).min() > 1e-4  # and no row on the edge
    np.testing.assert_array_equal(np.asarray(report.hard), hard)
    np.testing.assert_allclose(np.asarray(report.left_out), np.where(hard, 0, mass), rtol=2e-4, atol=1e-9)
    values = metric_values(metrics)
    assert values["left_out_mass"] == pytest.approx(np.where(hard, 0, mass)[live].mean(), rel=1e-4)
    assert values["left_out_mass_max"] == pytest.approx(np.where(hard, 0, mass).max(), rel=1e-4)
    assert values["hard_rows"] == pytest.approx(hard[live].mean())
    assert values["active_columns"] == pytest.approx(1 - inactive.mean())

    g = logp_cotangents(case, rest, OBJECTIVES["clip"])
    dx = -g[:, None] * p  # zero in masked rows: their cotangent is
    dx[np.arange(N), y] += g
    lacking = np.where(~hard[:, None] & inactive[None], dx, 0.0)
    h, w = f64(case.hidden).reshape(N, -1), f64(case.lm_head)
    slab = columns.slab_width(VOCAB)
    mean = w[:: VOCAB // slab][:slab].mean(0)
    expected = (dx - lacking) @ w + lacking.sum(1, keepdims=True) * mean
    np.testing.assert_allclose(f64(dh).reshape(N, -1), expected, atol=2e-5 * np.abs(expected).max())
    np.testing.assert_allclose(f64(dw), (dx - lacking).T @ h, atol=2e-5 * np.abs(dx.T @ h).max())
    # the bound of docs/sparse-backward.md, and what the mean row is good for
    error = row_norms(expected - dx @ w)
    assert (error <= np.abs(g) * np.where(hard, 0, mass) * row_norms(w - mean).max() * (1 + 1e-9)).all()
    assert np.linalg.norm(error) < 0.5 * np.linalg.norm(lacking @ w)
    assert np.linalg.norm(lacking.T @ h) <= (np.abs(g) * np.where(hard, 0, mass) * row_norms(h)).sum()


# -- the tolerance ---------------------------------------------------------------------------------------------------


@optimized
@pytest.mark.parametrize("tolerance", [2.0**-8, 2.0**-5])
def test_adversarial_rows_stay_within_the_tolerance(tolerance: float) -> None:
    """Mass spread just under the thresholds, over many columns."""
    case = adversarial(jnp.float32)
    rest = loss_inputs(case)
    _, _, report, (dh, dw) = run(case, rest, tolerance)
    p, y, hard = probabilities(case), case.targets.reshape(-1), np.asarray(report.hard)
    assert not np.asarray(report.left_out)[hard].any()
    assert (np.asarray(report.left_out) <= tolerance).all()
    if tolerance == TOLERANCE:  # the naive rule would miss it by far in most rows
        naive = [np.where(s, 0, p).sum(1).max() for s in active_sets(p, y, tolerance)]
        assert naive[0] > 30 * tolerance
    # Whatever was left out, by the gradients themselves: no row of dH is further from the truth than its mass allows.
    truth = truth_of(case, rest, OBJECTIVES["clip"])
    g = np.abs(logp_cotangents(case, rest, OBJECTIVES["clip"]))
    error = row_norms(f64(dh) - truth[0]).reshape(-1)
    largest = 2.0  # ||W_v - c|| of unit vectors
    assert (error <= g * largest * tolerance + 1e-6 * g).all()
    assert (error[hard] <= 2e-5 * g[hard]).all()
    assert row_norms(f64(dw) - truth[1]).max() < (g * tolerance * row_norms(case.hidden).reshape(-1)).sum()


def test_a_saturated_softcap_stays_within_its_bound() -> None:
    """Left-out logits that are all at the softcap have no gradient at all, while the mean row is taken with the slope
    at zero: what it adds is within the bound of docs/sparse-backward.md for a softcap, and beyond the other one."""
    softcap, scale, temperature, rows = np.float32(7.5), 1.25, 0.9, 16
    w = np.zeros((VOCAB, WIDTH), np.float32)
    w[:, 0], w[:rows] = 1.0, np.eye(rows, WIDTH, 1)  # nearly all of them the same
    y = np.arange(N) % rows
    h = np.zeros((N, WIDTH), np.float32)
    h[:, 0], h[np.arange(N), 1 + y] = -60.0, 8.0
    options = dict(softcap=softcap, scale=scale, temperature=temperature)

    def logp(h: Any, w: Any) -> Any:
        return jnp.sum(flat_calls.linear_logprobs(h, w, y, chunk_size=CHUNK, sparse_backward=TOLERANCE, **options).logp)

    dh, dw = by_numpy(jax.grad(logp, (0, 1)), h, w)
    one, zero = np.ones(N), np.zeros(N)
    truth, *_ = oracle.linear_token_stats_vjp(h, w, y, one, zero, zero, **options)
    z = softcap * np.tanh(scale * (f64(h) @ f64(w).T) / softcap) / temperature
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    mass, k, c = p[:, rows:].sum(1), scale / temperature, f64(w)[:: VOCAB // columns.slab_width(VOCAB)].mean(0)
    assert not np.asarray(dw)[rows:].any() and 1e-4 < mass.max() < TOLERANCE  # they were left out
    error, apart = row_norms(f64(dh) - truth), row_norms(f64(w)[rows:] - c).max()
    floor = 1e-6 * row_norms(truth)
    assert (error <= k * mass * max(apart, np.linalg.norm(c)) + floor).all()
    assert (error > 20 * k * mass * apart).all()  # so much for the bound without a softcap


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_entropy_cotangents_weigh_the_tail(share: float) -> None:
    """A row is hard if what it leaves out, relative to its cotangents, can exceed the tolerance: an entropy's gradient
    in columns of mass u is larger than u, and largest where u is spread evenly."""
    columns, mass = (a.reshape(-1) for a in np.meshgrid([1, 30, 1000, VOCAB - 1], 2.0 ** np.linspace(-18, -5, 40)))
    log_p = np.log(mass / columns)
    entropy = -(1 - mass) * np.log1p(-mass) - mass * log_p
    lacks = mass * ((1 - share) + share * np.abs(log_p + entropy))
    one = jnp.ones(mass.shape, jnp.float32)
    stats = token_stats(0 * one, entropy)
    g = StatCotangents((share - 1) * one, share * one, 0 * one)
    miss = np.asarray(gather.misses(jnp.float32(TOLERANCE), stats, g, VOCAB)(jnp.asarray(mass, jnp.float32)))
    assert miss[lacks > TOLERANCE].all()
    assert not miss[mass * 40 < TOLERANCE].any()
    if share == 0:
        np.testing.assert_array_equal(miss, mass > TOLERANCE)
    else:
        assert (miss & (mass < TOLERANCE)).any()


@optimized
def test_flat_logits_go_dense_and_keep_their_bits() -> None:
    for dtype in DTYPES.values():
        case = flat(dtype)
        rest = loss_inputs(case)
        _, metrics, report, grads = run(case, rest)
        _, _, _, off = run(case, rest, None)
        values = metric_values(metrics)
        assert values["dense_chunks"] == values["backward_columns"] == 1
        assert values["left_out_mass_max"] == values["hard_rows"] == 0
        assert int(report.active) == 0
        assert_same_bits(grads, off)


@optimized
def test_collapsed_rows() -> None:
    """Nearly everything is one column: the narrowest backward there is, and hopeless targets are always active."""
    for dtype in DTYPES.values():
        case = collapsed(dtype)
        rest = loss_inputs(case)
        _, metrics, _, grads = run(case, rest)
        _, _, _, off = run(case, rest, None)
        values = metric_values(metrics)
        assert values["dense_chunks"] == values["hard_rows"] == 0
        assert values["active_columns"] == pytest.approx(17 / VOCAB)
        assert values["left_out_mass_max"] < 1e-8
        for got, ordinary, truth in zip(grads, off, truth_of(case, rest, OBJECTIVES["clip"]), strict=True):
            assert_as_good("collapsed", got, ordinary, truth)


@optimized
def test_traced_tolerance_and_sharper_data_compile_once() -> None:
    case = calibrated(jnp.float32)
    rest = loss_inputs(case)
    run(case, rest, 2.0**-8)
    before = len(TRACED)
    assert before
    widths = [float(run(case, rest, t)[1]["backward_columns"].sum) for t in (2.0**-4, 2.0**-8, 2.0**-24)]
    assert widths[0] < widths[1] < widths[2]
    run(flat(jnp.float32), rest)
    run(collapsed(jnp.float32), rest)
    assert len(TRACED) == before


# -- objectives and options --------------------------------------------------------------------------------------------


def test_logprobs_with_every_option() -> None:
    """Random cotangents on logp, entropy and lse at once, with all that changes logits; padding holds garbage."""
    rng, layout = np.random.default_rng(2), "hv"
    case = calibrated(jnp.bfloat16, seed=7)
    real = VOCAB - 300
    targets, head = np.where(case.targets >= real, 5, case.targets), np.array(case.lm_head)
    head[real:] = 100
    bias = np.asarray(jnp.asarray(0.3 * rng.standard_normal(VOCAB), jnp.bfloat16)).copy()
    bias[real:] = np.nan
    mask = rng.random(SHAPE) < 0.8
    hidden = np.array(case.hidden)
    hidden[~mask] = np.nan
    options = dict(
        temperature=rng.uniform(0.7, 1.1, SHAPE).astype(np.float32), softcap=50.0, scale=1.1, mask=mask, bias=bias
    )
    case, g = Case(hidden, head, targets), cotangents(rng, SHAPE)
    g = (g[0], 0.1 * g[1], g[2])
    primals = (*case.parameters(layout), jnp.asarray(bias))
    kept: list[Any] = []

    def noted(*args: Any) -> Any:
        out = real_stats(*args)
        kept.append(out[1])
        return out

    def call(h: Any, w: Any, bias: Any) -> Any:
        stats = flat_calls.linear_logprobs(
            h, w, jnp.asarray(targets), head_layout=layout, vocab_size=real, chunk_size=CHUNK, backend="chunked",
            sparse_backward="auto", **{**options, "bias": bias},
        )  # fmt: skip
        return three(stats), kept[-1]

    def gradients(*primals: Any) -> Any:
        with mock.patch.object(core_backend, "stats", noted):
            _, pull, report = jax.vjp(call, *primals, has_aux=True)
        return pull(g), report

    real_stats = core_backend.stats
    got, report = by_numpy(gradients, *primals)
    assert int(report.dense_chunks) == 0 < int(report.chunks)
    traced = {k: v for k, v in options.items() if k != "bias"}
    _, plain = run_head(HeadStatics("plain", layout, CHUNK, real), primals, jnp.asarray(targets), g, traced)
    _, truth = head_truth(case, g, bias=bias, layout=layout, vocab_size=real, **traced)
    for name, a, b, t in zip(("dh", "dw", "dbias"), got, plain, truth, strict=True):
        if name == "dw":
            a, b, t = a.T, b.T, t.T
        if name == "dbias":
            a, b, t = f64(a)[None], f64(b)[None], t[None]
        assert_as_good(name, a, b, t)


@pytest.mark.parametrize("kind, layout", [("entropy bonus", "hv"), pytest.param("gspo", "vh", marks=pytest.mark.slow)])
def test_lora_over_a_frozen_head(kind: str, layout: str) -> None:
    """Under an entropy bonus (gradients in the forward pass) and a coupled objective (by recompute)."""
    case = calibrated(jnp.bfloat16, seed=11)
    rest = loss_inputs(case)
    rest["mask"] = np.arange(N).reshape(SHAPE) % 9 != 2
    if kind == "gspo":
        rest["advantages"] = rest["advantages"][:, 0]
    rng = np.random.default_rng(3)
    h, w = case.parameters(layout)
    a = jnp.asarray(0.1 * rng.standard_normal((w.shape[0], 4)), jnp.bfloat16)
    b = jnp.asarray(0.1 * rng.standard_normal((4, w.shape[1])), jnp.bfloat16)

    def gradients(mode: str) -> Any:
        def loss(h: Any, a: Any, b: Any) -> Any:
            return flat_calls.linear_grpo_loss(
                h, w, jnp.asarray(case.targets), objective=OBJECTIVES[kind], lora=(a, b), lora_scale=0.5,
                sparse_backward=mode, chunk_size=CHUNK, head_layout=layout, backend="chunked", **rest,
            )  # fmt: skip

        return by_numpy(jax.value_and_grad(loss, (0, 1, 2), has_aux=True), h, a, b)

    ((value, metrics), got), ((off_value, _), ordinary) = gradients("auto"), gradients("off")
    np.testing.assert_allclose(value, off_value, rtol=1e-6)
    assert metric_values(metrics)["dense_chunks"] < 0.5 and metric_values(metrics)["left_out_mass"] > 1e-5
    full = f64(w) + 0.5 * f64(a) @ f64(b)
    _, dh, dw, _ = oracle.linear_grpo_loss(
        case.hidden, full, case.targets, objective=OBJECTIVES[kind], head_layout=layout, **rest
    )
    truth = (dh, 0.5 * dw @ f64(b).T, 0.5 * f64(a).T @ dw)
    for name, x, y, t in zip(("dh", "da", "db"), got, ordinary, truth, strict=True):
        assert_as_good(f"{layout} {name}", x, y, t)


# -- the argument ------------------------------------------------------------------------------------------------------


def small(**options: Any) -> Any:
    h, w = jnp.ones((1, 4, 8)), jnp.ones((16, 8))
    return flat_calls.linear_grpo_loss(h, w, jnp.zeros((1, 4), int), advantages=jnp.ones(1), **options)


@pytest.mark.parametrize(
    "value, error",
    [(True, TypeError), (None, TypeError), (np.full(2, 0.1), TypeError), ("on", ValueError), (0, ValueError),
     (2.0, ValueError), (float("nan"), ValueError)],
)  # fmt: skip
def test_bad_values_are_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"linear_grpo_loss: sparse_backward.*expected 'off', 'auto' or a probability mass"):
        small(sparse_backward=value)
    with pytest.raises(error, match="linear_logprobs: sparse_backward"):
        linear_logprobs(jnp.ones((4, 8)), jnp.ones((16, 8)), jnp.zeros(4, int), options=Options(sparse_backward=value))


def test_the_dense_backend_says_that_it_has_none() -> None:
    with pytest.raises(NotImplementedError, match=r"linear_grpo_loss.*reference.*no sparse backward"):
        small(sparse_backward="auto", backend="reference")


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_off_is_the_plain_call(kind: str) -> None:
    """The same operations on the same values: the same bits."""
    h, w, y = jnp.ones((2, 64, 8)), jnp.ones((512, 8)), jnp.zeros((2, 64), int)

    def program(**options: Any) -> str:
        def loss(h: Any, w: Any) -> Any:
            return flat_calls.linear_grpo_loss(
                h, w, y, advantages=jnp.ones(2), objective=OBJECTIVES[kind], chunk_size=32, **options
            )

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True)).lower(h, w).as_text()

    plain = program()
    assert program(sparse_backward="off") == plain
    assert program(sparse_backward="auto") != plain


def test_explain_says_what_it_does() -> None:
    h = jax.ShapeDtypeStruct((1, 4096, 64), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((151936, 64), jnp.bfloat16)
    off = explain(linear_grpo_loss, h, w)
    auto = explain(linear_grpo_loss, h, w, options=Options(sparse_backward="auto"))
    assert "sparse" not in str(off) and "2^-8" in auto.way
    assert "1 + 2 K/V" in auto.matmuls and auto.tiles["slab"] == 4096
    by_recompute = explain(linear_logprobs, h, w, options=Options(sparse_backward=1e-3))
    assert "1 + 3 K/V" in by_recompute.matmuls and "0.001" in by_recompute.way
    with pytest.raises(NotImplementedError, match=r"reference.*no sparse backward"):
        explain(linear_grpo_loss, h, w, options=Options(sparse_backward="auto", backend="reference"))
    with pytest.raises(ValueError, match="sparse_backward='on'"):
        explain(linear_grpo_loss, h, w, options=Options(sparse_backward="on"))


def test_the_only_shard_of_a_vocabulary_finds_the_columns_of_a_whole() -> None:
    """From known statistics, its logits made again; which rows are hard is left to the caller."""
    case = calibrated(jnp.float32)
    h, w = case.parameters()
    own, want = Sparse(Chunked()), Wanted(hidden=True, weight=True)

    @jax.jit
    def both(h: Any, w: Any, y: Any) -> Any:
        linear = Linear(h.reshape(-1, WIDTH), HeadArrays(w, None, layout="vh"))
        call = dataclasses.replace(Call("test", VOCAB), chunk=CHUNK)
        p = Problem(linear, y.reshape(-1), LogitTransform(), tolerance=jnp.float32(TOLERANCE), call=call)
        out, _, whole = own.forward(p, want)
        return whole, own.shard_columns(p, want, out, p.tolerance)

    whole, (shard, report) = both(h, w, jnp.asarray(case.targets))
    assert whole.count.any() and not report.hard.any()
    np.testing.assert_array_equal(shard.count, whole.count)
    np.testing.assert_array_equal(shard.index, whole.index)
    np.testing.assert_allclose(shard.left_out, whole.left_out, atol=1e-6)


@pytest.mark.parametrize("by_element", [False, True])
def test_columns_of_a_head_by_column(by_element: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken and put back, as a CPU and as a GPU compiles it: in any order, and none beyond the vocabulary."""
    monkeypatch.setattr(gather, "_by_element", lambda: by_element)
    rng, vocab = np.random.default_rng(0), 50
    w = jnp.asarray(rng.normal(size=(8, vocab)), jnp.float32)
    index = jnp.asarray([7, 49, 0, vocab, 2 * vocab, 21], jnp.int32)
    inside = np.asarray(index) < vocab

    @jax.jit
    def run(w: Any, index: Any) -> Any:
        part = gather.head_columns(HeadArrays(w, None, layout="hv"), index, ascending=False)
        own = HeadGrads(part.weight + 1, None)
        put = gather.put_head_columns(HeadGrads(w, None), index, own, "hv", add=False, ascending=False)
        return part.weight, put.weight

    part, put = (np.asarray(x) for x in run(w, index))
    assert (part[:, ~inside] == 0).all()
    np.testing.assert_array_equal(part[:, inside], w[:, index[inside]])
    want = np.array(w)
    want[:, index[inside]] += 1
    np.testing.assert_array_equal(put, want)
