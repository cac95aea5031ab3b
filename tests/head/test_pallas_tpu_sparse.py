"""The sparse backward on TPU, in Pallas' interpreter: column maxima, tolerance and gradients against float64.

Interpreted kernels compile slowly, so inputs of one shape share one compiled function. Chunks and tiles are cut small,
so that every loop has several turns and a ragged end.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import flat_calls
from ahead_of_time import ROOT, answer_of, needs_libtpu
from interpreted import in_numpy
from logitless import Objective, Sharding, metric_values, oracle
from logitless.core.stats import LogitTransform
from logitless.head.pallas_tpu import column_choice, kernels
from logitless.head.pallas_tpu import sparse as slabs
from logitless.head.pallas_tpu import tiles as tiling
from logitless.head.pallas_tpu.column_choice import column_rule
from logitless.head.pallas_tpu.tiles import MIB, Tiles
from numerics import HeadCase as Case
from numerics import (
    HeadStatics,
    assert_same_bits,
    cotangents,
    f64,
    head_case,
    head_problem,
    head_truth,
    run_head,
    three,
)
from sparse_cases import (
    TOLERANCE,
    VOCAB,
    WIDTH,
    assert_as_good,
    calibrated,
    collapsed,
    flat,
    from_groups,
    gradients_and_report,
    logp_cotangents,
    loss_inputs,
    probabilities,
    row_norms,
    truth_of,
)

N = 192
SHAPE = (8, N // 8)
TILE = 2048  # of the vocabulary, in the forward sweep at this shape
DAPO = Objective(aggregation="dapo")


@pytest.fixture(autouse=True, scope="module")
def small_steps() -> Iterator[None]:
    with (
        mock.patch.object(column_choice, "FEW", 64),
        mock.patch.multiple(slabs, CHUNK=128, GROUP=128, HARD_TOKENS=128),
    ):
        yield


# -- the forward sweep -------------------------------------------------------------------------------------------------


def test_maxima_are_bounds_and_statistics_keep_their_bits() -> None:
    """Ragged tokens and vocabulary, tokens that do not count, dead ones that hold NaN."""
    judge_maxima(515, 300, 128, [128, 256, 300])


@pytest.mark.optimized
def test_maxima_of_several_blocks_in_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block of a tile waits for the next one, and the last of all is a narrow tile's only one."""
    monkeypatch.setattr(tiling, "BLOCK", 256)
    monkeypatch.setattr(tiling, "PIECE", 128)
    judge_maxima(1000, 940, 384, [256, 384, 640, 768, 940])


def judge_maxima(vocab: int, real: int, tile: int, ends: list[int]) -> None:
    """``ends`` of the blocks of columns after which the bound is taken."""
    n, n_live = 200, 130
    case = head_case(3, (n,), WIDTH, vocab, jnp.bfloat16, lead=3.0)
    y = case.targets % real
    live = np.arange(n) < n_live
    counts = live & (np.arange(n) % 5 != 2)
    hidden = case.hidden.copy()
    hidden[~live] = np.nan
    tiles = Tiles(128, tile, 32 * MIB)
    z = f64(case.hidden) @ f64(case.lm_head)[:real].T / f64(np.float32(0.8))
    z_y = z[np.arange(n), y]
    floor = np.where(counts, z_y, np.inf).astype(np.float32)

    @jax.jit
    def run(h: Any, w: Any, y: Any, floor: Any, n_live: Any) -> Any:
        transform = LogitTransform(temperature=jnp.float32(0.8))
        p = head_problem(h, w, y, transform=transform, vocab_size=real, interpret=True)
        clean = jnp.where(jnp.arange(n)[:, None] < n_live, h, jnp.zeros((), h.dtype))
        plain = kernels.token_stats(p, n_live, tiles)
        some = kernels.token_stats_and_maxima(p, n_live, floor, tiles)
        # All live, 56 of them beyond the array.
        return plain, some, kernels.token_stats_and_maxima(p.with_hidden(clean), None, floor, tiles)

    plain, (stats, maxima), (whole, same) = run(hidden, case.lm_head, y, floor, n_live)
    assert_same_bits(stats, plain)
    assert_same_bits(jax.tree.map(lambda a: a[:n_live], whole), jax.tree.map(lambda a: a[:n_live], plain))
    np.testing.assert_array_equal(np.asarray(maxima), np.asarray(same))
    others = np.where(np.arange(real)[None] == y[:, None], -np.inf, z)
    expected = np.full(real, -np.inf)
    for start, end in itertools.pairwise([0, *ends]):
        bound = np.maximum(z_y, np.log(np.exp(others[:, :end] - 50).sum(1)) + 50)
        expected[start:end] = (others - bound[:, None])[counts, start:end].max(0)
    np.testing.assert_allclose(np.asarray(maxima), expected, rtol=0, atol=2e-5)
    lse = np.log(np.exp(z - 50).sum(1)) + 50
    assert (np.asarray(maxima) >= (others - lse[:, None])[counts].max(0) - 2e-5).all()


# -- a loss ------------------------------------------------------------------------------------------------------------


def bf16(kind: Any, **options: Any) -> Case:
    """A kind of :mod:`sparse_cases`, of as many tokens as there are here."""
    return kind(jnp.bfloat16, n=N, **options)


def adversarial(share: float = 0.2) -> Case:
    """A ``share`` of the rows has mass spread over columns that all stay under a candidate threshold."""
    sizes = np.array([1] * 8 + [VOCAB // 32] * 28)
    sizes = np.append(sizes, VOCAB - sizes.sum())
    rng = np.random.default_rng(1)
    levels = np.full((N, len(sizes)), -40.0)
    levels[:, :8] = np.where(np.arange(N)[:, None] % 8 == np.arange(8), 0.0, -40.0)
    for t in np.flatnonzero(np.arange(N) % 10 < 10 * share):
        some = rng.choice(np.arange(8, 36), rng.integers(1, 5), replace=False)
        levels[t, some] = np.log(0.9 * TOLERANCE * column_rule(VOCAB).thresholds[t % 2])
    return from_groups(levels, sizes, np.arange(N) % 8, jnp.bfloat16)


TRACED: list[str] = []


@functools.cache
def grpo(backend: str) -> Any:
    """The exact path that the kernels are compared with is interpreted."""
    f = functools.partial(traced_grpo, backend)
    return jax.jit(f) if backend == "pallas_tpu" else in_numpy(f)


def traced_grpo(backend: str, h: Any, w: Any, y: Any, rest: Any, tolerance: Any) -> Any:
    """``(loss, metrics, report, (dh, dw))``; ``tolerance=None`` is off."""
    TRACED.append(backend)
    return gradients_and_report(
        h, w, y, rest, DAPO, backend=backend, interpret=backend == "pallas_tpu", chunk_size=64,
        sparse_backward="off" if tolerance is None else tolerance,
    )  # fmt: skip


def run(case: Case, rest: Any, tolerance: float | None = TOLERANCE, backend: str = "pallas_tpu") -> Any:
    return grpo(backend)(*case.parameters(), jnp.asarray(case.targets), rest, tolerance and jnp.float32(tolerance))


def cheapest(maxima: np.ndarray, p: np.ndarray, columns: Any = slice(None), tolerance: float = TOLERANCE) -> int:
    """How many columns the threshold has that costs least, judged by the rows of ``p`` in some ``columns``."""
    rule, share = column_rule(VOCAB), VOCAB / p[:, columns].shape[1]
    levels = [maxima > np.log(tolerance * e) for e in rule.thresholds]
    left_out = [share * (p * ~level)[:, columns].sum(1) + slabs.MASS_ERROR for level in levels]
    costs = [rule.cost(k.mean(), (mass > tolerance).mean()) for k, mass in zip(levels, left_out, strict=True)]
    counts = [int(level.sum()) for level in levels]
    return min((c, k) for c, k in zip(costs, counts, strict=True) if k <= rule.most)[1]


@pytest.mark.long
def test_calibrated_rows_as_good_as_the_ordinary_path_and_by_the_definition() -> None:
    """Errors, the active set and the masses left out, in float64; dead rows hold NaN, a third have no advantage."""
    case = bf16(calibrated)
    rest = loss_inputs(case)
    dead, idle = np.arange(N) % 7 == 3, np.arange(N) % 3 == 1
    rest["mask"] = ~dead.reshape(SHAPE)
    rest["advantages"] = np.where(idle.reshape(SHAPE), 0, rest["advantages"])
    counts = ~dead & ~idle
    hidden = np.array(case.hidden)
    hidden[~rest["mask"]] = np.nan
    clean, case = case, Case(hidden, case.lm_head, case.targets)

    value, metrics, report, grads = run(case, rest)
    off_value, _, none, exact = run(case, rest, None)
    _, _, _, ordinary = run(case, rest, None, "chunked")
    assert none is None
    np.testing.assert_allclose(value, off_value, rtol=3e-7)  # the same statistics, summed in another order
    for name, got, off, kernel, truth in zip(
        ("dh", "dw"), grads, ordinary, exact, truth_of(case, rest, DAPO), strict=True
    ):
        assert got.dtype == jnp.bfloat16
        assert_as_good(name, got, off, truth)
        assert (f64(got) != f64(kernel)).any()

    p, y = probabilities(clean), case.targets.reshape(-1)
    z = np.log(p)
    others = np.where(np.arange(VOCAB)[None] == y[:, None], 0.0, p)
    bound = np.stack([others[:, : s + TILE].sum(1) for s in range(0, VOCAB, TILE)], 1)
    floor = np.log(p[np.arange(N), y]) - rest["old_logp"].reshape(-1)  # what the logsumexp, here 0, is expected to be
    bound = np.maximum(np.log(bound), floor[:, None])[:, np.arange(VOCAB) // TILE]
    best = (z - bound)[counts].max(0)
    best[y[counts]] = np.inf
    edges = np.log(TOLERANCE * np.array(column_rule(VOCAB).thresholds))
    few = np.asarray(column_choice.evenly_spaced(N, jnp.asarray(counts)))
    assert int(report.active) == cheapest(best, p[few]), "another threshold costs less"
    (inactive,) = [best <= e for e in edges if (best > e).sum() == int(report.active)]
    assert np.abs(best[:, None] - edges).min() > 1e-6  # no column on an edge
    mass = np.where(counts, p[:, inactive].sum(1), 0.0)
    edge = TOLERANCE - slabs.MASS_ERROR
    hard = mass > edge
    assert 0 < hard.sum() < N // 3 and np.abs(mass / edge - 1).min() > 1e-3  # and no row
    np.testing.assert_array_equal(np.asarray(report.rows), counts)
    np.testing.assert_array_equal(np.asarray(report.hard), hard)
    np.testing.assert_allclose(np.asarray(report.left_out), np.where(hard, 0, mass), rtol=1e-3, atol=3e-6)
    assert not f64(grads[0]).reshape(N, -1)[dead | idle].any()
    g = logp_cotangents(clean, rest, DAPO)
    dx = -g[:, None] * p
    dx[np.arange(N), y] += g
    dx[np.ix_(~hard, inactive)] = 0  # what easy rows leave out, and nothing else
    mean = f64(clean.lm_head)[:: VOCAB // column_rule(VOCAB).slab].mean(0)  # stands for what easy rows leave out
    part = -(g * np.where(hard, 0, mass))[:, None] * mean
    rest_of_dh = f64(grads[0]).reshape(N, -1) - dx @ f64(clean.lm_head)
    assert abs(np.sum(rest_of_dh * part) / np.sum(part * part) - 1) < 0.2
    expected = dx.T @ f64(clean.hidden).reshape(N, -1)
    assert np.linalg.norm(f64(grads[1]) - expected) <= 1.1 * np.linalg.norm(
        f64(exact[1]) - truth_of(case, rest, DAPO)[1]
    )
    values = metric_values(metrics)
    assert values["dense_chunks"] == 0 and values["active_columns"] <= values["backward_columns"] < 0.25
    assert 0 < values["left_out_mass"] <= values["left_out_mass_max"] <= TOLERANCE
    assert values["hard_rows"] == pytest.approx(hard[counts].mean())


@pytest.mark.parametrize(("size", "count"), [(1000, 230), (655, 384), (640, 1), (640, 0)])
def test_positions_in_order_without_a_sort(size: int, count: int) -> None:
    active = np.zeros(size, bool)
    active[np.random.default_rng(count).permutation(size)[:count]] = True
    first, last = (np.asarray(column_choice.positions(jnp.asarray(active), 384, 128, end)) for end in (False, True))
    unused = size + np.arange(384)
    np.testing.assert_array_equal(first, np.concatenate([np.flatnonzero(active), unused[count:]]))
    np.testing.assert_array_equal(last, np.concatenate([unused[: 384 - count], np.flatnonzero(active)]))


@pytest.mark.slow  # 12 seconds; many hard rows take them, too
def test_flat_rows_and_small_tolerances_take_the_exact_kernels() -> None:
    """And neither other data nor another tolerance compiles anew."""
    traced = []
    for case, tolerance in ((bf16(flat), TOLERANCE), (bf16(calibrated), 2.0**-13)):
        rest = loss_inputs(case)
        _, metrics, report, grads = run(case, rest, tolerance)
        _, _, _, off = run(case, rest, None)
        traced.append(len(TRACED))
        assert_same_bits(grads, off)
        values = metric_values(metrics)
        assert values["dense_chunks"] == values["backward_columns"] == 1
        assert values["left_out_mass_max"] == values["hard_rows"] == 0 == int(report.active)
    assert traced[0] == traced[1] > 0


def test_collapsed_rows() -> None:
    """Nearly everything is one column; hopeless targets are active all the same. Few tokens are live. The others hold
    NaN or are flat: they choose nothing, and are not looked at."""
    case = bf16(collapsed)
    rest = loss_inputs(case)
    live = np.arange(N) % 11 == 0
    rest["mask"] = live.reshape(SHAPE)
    held = np.where(np.arange(N) % 19 == 1, np.nan, 0.0).astype(jnp.bfloat16).reshape(*SHAPE, 1)
    case = dataclasses.replace(case, hidden=np.where(rest["mask"][..., None], case.hidden, held))
    _, metrics, _, grads = run(case, rest)
    _, _, _, ordinary = run(case, rest, None, "chunked")
    values = metric_values(metrics)
    assert values["dense_chunks"] == values["hard_rows"] == 0
    columns = np.union1d(case.targets.reshape(-1)[live], (np.arange(N) % 16)[live])  # a hopeless target, and the leader
    assert 100 in columns and values["active_columns"] == pytest.approx(len(columns) / VOCAB)
    assert values["left_out_mass_max"] < 1e-5
    for got, off, truth in zip(grads, ordinary, truth_of(case, rest, DAPO), strict=True):
        assert_as_good("collapsed", got, off, truth)


def test_adversarial_rows_stay_within_the_tolerance() -> None:
    """Mass spread just under the thresholds: a rule on single probabilities would leave out half of a row."""
    case = adversarial()
    rest = loss_inputs(case)
    _, _, report, (dh, dw) = run(case, rest)
    hard, left_out = np.asarray(report.hard), np.asarray(report.left_out)
    assert hard.any() and not hard.all() and int(report.dense_chunks) == 0
    assert (left_out <= TOLERANCE).all() and not left_out[hard].any()
    truth = truth_of(case, rest, DAPO)
    g = np.abs(logp_cotangents(case, rest, DAPO))
    error, size = row_norms(f64(dh) - truth[0]).reshape(-1), row_norms(truth[0]).reshape(-1)
    largest = 2.0  # ||W_v - c|| of unit vectors
    assert (error <= g * largest * TOLERANCE + 2.0**-7 * size).all()  # and what bfloat16 rounds
    assert (error[hard] <= 2.0**-7 * size[hard]).all()
    norms = row_norms(case.hidden).reshape(-1)
    assert row_norms(f64(dw) - truth[1]).max() < (g * TOLERANCE * norms).sum() + 2.0**-7 * np.abs(truth[1]).max()


def test_many_hard_rows_take_the_exact_kernels() -> None:
    """More than a group of them, in the program that has served the others."""
    case = adversarial(0.7)
    rest = loss_inputs(case)
    _, metrics, report, grads = run(case, rest)
    _, _, _, ordinary = run(case, rest, None, "chunked")
    assert int(report.dense_chunks) == 0 and slabs.GROUP < int(np.sum(report.hard)) < N
    assert metric_values(metrics)["left_out_mass_max"] <= TOLERANCE
    for name, got, off, truth in zip(("dh", "dw"), grads, ordinary, truth_of(case, rest, DAPO), strict=True):
        assert_as_good(name, got, off, truth)


def test_a_sample_of_the_columns_judges_as_all_do() -> None:
    """Flat rows are surely hard, a trained policy's are not; the logsumexp is near."""
    rule = column_rule(VOCAB)
    for case, bound in ((bf16(calibrated), 0.2), (bf16(flat), 0.95)):
        p = head_problem(
            *(jnp.asarray(x.reshape(-1, *x.shape[2:])) for x in (case.hidden,)), jnp.asarray(case.lm_head),
            jnp.asarray(case.targets).reshape(-1), transform=LogitTransform(),
        )  # fmt: skip
        p = dataclasses.replace(p, tolerance=jnp.float32(TOLERANCE))
        whole = column_choice.few_rows(p, None, None)
        with mock.patch.object(column_choice, "SAMPLE", 1024):
            some = column_choice.few_rows(p, None, None)
            hard = np.asarray(column_choice.surely_hard(rule, some))
        assert some.x.shape[1] == 1024 and some.share == 4 and whole.share == 1
        np.testing.assert_array_equal(some.x, whole.x[:, some.columns])
        true = np.log(np.sum(np.exp(f64(whole.x)), axis=1))
        np.testing.assert_allclose(whole.lse, true, rtol=1e-5)
        assert np.median(np.abs(np.asarray(some.lse) - true)) < 0.2
        assert hard.mean() <= bound if bound < 0.5 else hard.mean() >= bound
        if bound < 0.5:
            rows, y, everything = probabilities(case), case.targets.reshape(-1), jnp.ones(N, bool)
            maxima = np.log(np.where(np.arange(VOCAB)[None] == y[:, None], 0, rows).max(0))
            stats = kernels.token_stats(dataclasses.replace(some.p, call=dataclasses.replace(p.call, interpret=True)))
            own = np.where(np.isin(np.arange(VOCAB), y), np.inf, maxima)
            for tolerance in (2.0**-6, 2.0**-8, 2.0**-10):
                q = dataclasses.replace(p, tolerance=jnp.float32(tolerance))
                with mock.patch.object(column_choice, "SAMPLE", 1024):
                    found = column_choice.choose_columns(
                        rule, q, jnp.asarray(maxima, jnp.float32), everything, some, stats, None
                    )
                want = cheapest(own, rows[np.asarray(some.at)], np.asarray(some.columns), tolerance)
                assert int(found.count) == want, tolerance


# -- any cotangents ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_logprobs_with_every_option() -> None:
    """Random cotangents of logp, entropy and lse at once, with all that changes logits; padding holds garbage."""
    rng = np.random.default_rng(2)
    case = bf16(calibrated, seed=7)
    real = VOCAB - 300
    targets, head = np.where(case.targets >= real, 5, case.targets), np.array(case.lm_head)
    head[real:] = 100
    bias = np.asarray(jnp.asarray(0.3 * rng.standard_normal(VOCAB), jnp.bfloat16)).copy()
    bias[real:] = np.nan
    mask = rng.random(SHAPE) < 0.8
    hidden = np.array(case.hidden)
    hidden[~mask] = np.nan
    options = dict(temperature=rng.uniform(0.7, 1.1, SHAPE).astype(np.float32), softcap=50.0, scale=1.1, mask=mask)
    case, g = Case(hidden, head, targets), cotangents(rng, SHAPE)
    g = (g[0], 0.1 * g[1], g[2])
    primals = (*case.parameters(), jnp.asarray(bias))
    call = dict(vocab_size=real, backend="pallas_tpu", interpret=True, **options)
    kept: list[Any] = []

    def noted(*args: Any, **more: Any) -> Any:
        out = real_gradients(*args, **more)
        kept.append(out[-1])
        return out

    @jax.jit
    def gradients(*primals: Any) -> Any:
        def stats(h: Any, w: Any, bias: Any) -> Any:
            return three(
                flat_calls.linear_logprobs(h, w, jnp.asarray(targets), bias=bias, sparse_backward="auto", **call)
            )

        with mock.patch.object(slabs, "gradients", noted):
            out, pull = jax.vjp(stats, *primals)
            return out, pull(g), kept[-1]

    real_gradients = slabs.gradients
    values, got, report = gradients(*primals)
    assert int(report.dense_chunks) == 0 and 0 < int(report.hard.sum()) < mask.sum() // 2
    _, plain = run_head(HeadStatics("plain", "vh", None, real), primals, jnp.asarray(targets), g, options)
    truth, grads = head_truth(case, g, bias=bias, layout="vh", vocab_size=real, **options)
    np.testing.assert_allclose(values[0], truth.logp, rtol=1e-5, atol=1e-5)
    for name, a, b, t in zip(("dh", "dw", "dbias"), got, plain, grads, strict=True):
        if name == "dbias":
            a, b, t = f64(a)[None], f64(b)[None], t[None]
        assert_as_good(name, a, b, t)


def frozen_head(case: Case, rest: Any) -> Any:
    """The gradient by the hidden states alone, traced."""

    def loss(h: Any, w: Any) -> Any:
        return flat_calls.linear_grpo_loss(
            h, w, jnp.asarray(case.targets), objective=DAPO, backend="pallas_tpu", interpret=True,
            sparse_backward="auto", **rest,
        )  # fmt: skip

    return jax.jit(jax.grad(loss, has_aux=True)).trace(*case.parameters())


def test_a_frozen_head_has_no_gradient_of_its_own() -> None:
    case = bf16(calibrated)
    program = str(frozen_head(case, loss_inputs(case)).jaxpr)
    assert "head_more" in program and "head_hard" not in program and "head_dhead" not in program


@pytest.mark.slow  # both are as near to float64 as the ordinary path, by tests of their own
def test_what_chunked_leaves_out_is_near() -> None:
    case = bf16(calibrated)
    rest = loss_inputs(case)
    runs = [run(case, rest, t, b)[3] for t, b in ((TOLERANCE, "pallas_tpu"), (TOLERANCE, "chunked"), (None, "chunked"))]
    for name, got, other, off, truth in zip(("dh", "dw"), *runs, truth_of(case, rest, DAPO), strict=True):
        assert np.linalg.norm(f64(got) - f64(other)) <= 2.5 * np.linalg.norm(f64(off) - truth), name


@pytest.mark.slow  # the numbers are those of dh with the head's gradient beside it
def test_the_gradient_over_a_frozen_head() -> None:
    case = bf16(calibrated)
    rest = loss_inputs(case)
    got, metrics = frozen_head(case, rest).lower().compile()(*case.parameters())
    _, _, _, (ordinary, _) = run(case, rest, None, "chunked")
    assert_as_good("dh", got, ordinary, truth_of(case, rest, DAPO)[0])
    assert metric_values(metrics)["dense_chunks"] == 0


@pytest.mark.slow
def test_a_bias_that_is_trained_over_a_frozen_head() -> None:
    """Its gradient in the active columns is the slabs' alone, hard rows or not, summed in float32; in the others it
    lacks no more than what easy rows leave out."""
    case = bf16(calibrated)
    rest, bias = loss_inputs(case), jnp.zeros((VOCAB,), jnp.float32)

    def run(backend: str, sparse: Any) -> Any:
        def loss(h: Any, bias: Any) -> Any:
            return flat_calls.linear_grpo_loss(
                h, case.parameters()[1], jnp.asarray(case.targets), objective=DAPO, bias=bias, backend=backend,
                interpret=backend == "pallas_tpu", chunk_size=64, sparse_backward=sparse, **rest,
            )  # fmt: skip

        f = jax.grad(loss, (0, 1), has_aux=True)
        return (jax.jit if backend == "pallas_tpu" else in_numpy)(f)(case.parameters()[0], bias)

    (dh, dbias), metrics = run("pallas_tpu", TOLERANCE)
    (dh_off, dbias_off), _ = run("chunked", "off")
    values = metric_values(metrics)
    assert values["dense_chunks"] == 0 < values["hard_rows"] < 0.5
    _, true_h, _, true_bias = oracle.linear_grpo_loss(
        case.hidden, case.lm_head, case.targets, objective=DAPO, head_layout="vh", bias=np.zeros(VOCAB), **rest
    )
    assert_as_good("dh", dh, dh_off, true_h)
    active = np.unique(case.targets)  # some of them: the targets always are
    assert_as_good("dbias", f64(dbias)[None, active], f64(dbias_off)[None, active], true_bias[None, active])
    left_out = values["left_out_mass_max"] * np.abs(logp_cotangents(case, rest, DAPO)).sum()
    assert 0 < np.abs(f64(dbias) - true_bias).sum() <= left_out + 1e-5 * np.abs(true_bias).sum()


# -- over a mesh -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True], ids=["in forward", "late"])
def test_tokens_over_a_mesh(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device does with its own tokens what one device does, to the bit; dW is their sum.

    One slab holds all columns that a set may have: an interpreted kernel starts when all devices start one, so
    devices that take two slabs and three would wait for each other for ever.
    """
    slab = 1024
    monkeypatch.setattr(column_choice, "slab_width", lambda vocab: slab)
    case = bf16(calibrated)
    rest = loss_inputs(case)
    where = Sharding(Mesh(np.array(jax.devices()[:4]), ("data",)), tokens=PartitionSpec("data"))
    # A sequence-level ratio couples tokens: gradients come later, from the cotangents that arrive.
    objective = Objective(level="sequence", eps_low=9.0, eps_high=9.0) if late else DAPO

    @functools.partial(jax.jit, static_argnums=(4,))
    def f(h: Any, w: Any, y: Any, rest: Any, sharding: Sharding | None) -> Any:
        def loss(h: Any, w: Any) -> Any:
            return flat_calls.linear_grpo_loss(
                h, w, y, objective=objective, backend="pallas_tpu", interpret=True, sparse_backward="auto",
                sharding=sharding, denominator=32.0, **rest,
            )  # fmt: skip

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(h, w)

    h, w = case.parameters()
    (value, metrics), (dh, dw) = f(h, w, jnp.asarray(case.targets), rest, where)
    values = metric_values(metrics)
    assert values["dense_chunks"] == 0 and values["backward_columns"] == slab / VOCAB
    assert 0 < values["left_out_mass_max"] <= TOLERANCE and 0 < values["hard_rows"] < 0.5
    total, rows, weight = 0.0, [], np.zeros(w.shape)
    for k in range(0, 8, 2):
        part = slice(k, k + 2)
        own = {name: x[part] for name, x in rest.items()}
        (one, _), (dh_own, dw_own) = f(h[part], w, jnp.asarray(case.targets)[part], own, None)
        total, weight = total + float(one), weight + f64(dw_own)
        rows.append(f64(dh_own))
    np.testing.assert_allclose(float(value), total, rtol=1e-5)
    np.testing.assert_array_equal(f64(dh), np.concatenate(rows))
    assert dw.dtype == jnp.bfloat16
    assert np.linalg.norm(f64(dw) - weight) <= 2.0**-8 * np.linalg.norm(weight)  # roundings of the parts and the sum


def test_explain_says_what_it_does() -> None:
    h, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 8192, 4096), (151936, 4096)))
    call = dict(backend="pallas_tpu", interpret=True, sparse_backward="auto")
    route = flat_calls.explain(flat_calls.linear_grpo_loss, h, w, **call)
    assert "2^-8" in route.way and "1 + 3 K/V" in route.matmuls
    assert route.tiles["slab"] == column_rule(151936).slab == 1024
    assert "1 + 4 K/V" in flat_calls.explain(flat_calls.linear_logprobs, h, w, **call).matmuls


# -- ahead of time -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_libtpu
def test_compiles_for_v6e_without_logits() -> None:
    """The whole loss and its gradients at T=8192, H=4096, V=151936."""
    got = answer_of(ROOT / "benchmarks" / "tpu_sparse_estimate.py", "--compile", "auto")
    assert not got["logits_in_program"]
    # Beyond inputs and outputs: hidden states in order, dH in float32, a slab; no rows of dW.
    assert got["peak_bytes"] <= got["argument_bytes"] + got["output_bytes"] + 0.4e9, got


def test_recorded_estimate() -> None:
    """What benchmarks/tpu_sparse_estimate.py wrote: it compiled, it fits, and it is called an estimate."""
    record = json.loads((ROOT / "benchmarks" / "results" / "tpu_v6e_sparse_estimate.json").read_text())
    assert record["what"].startswith("ESTIMATE")
    assert not record["compiled"]["sparse"]["logits_in_program"]
    compiled = record["compiled"]["sparse"]
    assert compiled["peak_bytes"] <= compiled["argument_bytes"] + compiled["output_bytes"] + 0.4e9
    own, others = record["estimated_ms"]["a policy's own completions"], record["estimated_ms"]["others' text"]
    assert own["ratio"] <= 0.45 and others["ratio"] <= 0.5
