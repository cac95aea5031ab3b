"""The sparse backward on eight devices: every layout against float64, its collectives against those without it, and
what shards of the vocabulary leave out of a row together against the definition."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flat_calls
from interpreted import by_numpy
from logitless import Objective, Sharding, explain, linear_grpo_loss, metric_values, oracle
from logitless.core.options import Options
from logitless.head.sparse import active_columns
from logitless.lab.bench import realistic
from numerics import HeadCase, assert_same_bits, cotangents, f64, head_truth, three
from sparse_cases import assert_as_good, gradients_and_report
from test_sharding import Layout, collectives, run

SHAPE, HIDDEN, VOCAB, CHUNK = (8, 16), 32, 4096, 16
TOLERANCE = 2.0**-8
SMALL = 4 * 4 * 8 * 16
"""Bytes of four float32 numbers for every token: more than any collective that the option may add."""
TOKEN, GSPO = Objective(aggregation="dapo"), Objective(level="sequence", eps_low=0.2, eps_high=0.2)

LAYOUTS = {
    "data and sequence": Layout({"data": 4, "seq": 2}, P("data", "seq")),
    "fsdp on the vocabulary": Layout({"fsdp": 8}, P("fsdp"), P("fsdp", None), explicit=True),
    "data x fsdp, on the hidden dimension": Layout({"data": 2, "fsdp": 4}, P("data", "fsdp"), P(None, "fsdp")),
    "vocabulary-parallel": Layout({"tensor": 8}, P(), P("tensor", None), explicit=True),
    "data x sequence x tensor, fsdp over data": Layout(
        {"data": 2, "seq": 2, "tensor": 2}, P("data", "seq"), P(("tensor", "data"), None)
    ),
}


@functools.cache
def calibrated() -> HeadCase:
    n = SHAPE[0] * SHAPE[1]
    h, w = realistic.realistic_head(n, HIDDEN, VOCAB, 0, jnp.bfloat16)
    y = realistic.sample_targets(jnp.asarray(h), jnp.asarray(w), 0)
    return HeadCase(h.reshape(*SHAPE, HIDDEN), w, np.asarray(y).reshape(SHAPE))


def flat() -> HeadCase:
    rng = np.random.default_rng(0)
    h, w = rng.standard_normal((*SHAPE, HIDDEN)), rng.standard_normal((VOCAB, HIDDEN)) / 8
    return HeadCase(*(np.asarray(jnp.asarray(x, jnp.bfloat16)) for x in (h, w)), rng.integers(0, VOCAB, SHAPE))


def ragged(case: HeadCase) -> tuple[HeadCase, dict[str, np.ndarray]]:
    """With NaN in dead tokens, idle ones, and a sequence without any live one; and what the loss needs."""
    rng = np.random.default_rng(1)
    mask = rng.random(SHAPE) < 0.8
    mask[1] = False
    old = oracle.linear_token_stats(case.hidden, case.lm_head, case.targets).logp
    rest = {
        "advantages": np.where(rng.random(SHAPE) < 0.2, 0, rng.standard_normal(SHAPE)).astype(np.float32),
        "mask": mask,
        "old_logp": (old + 0.02 * rng.standard_normal(SHAPE)).astype(np.float32),
    }
    hidden = np.array(case.hidden)
    hidden[~mask] = np.nan
    return HeadCase(hidden, case.lm_head, case.targets), rest


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled loss with its gradients, on a layout; ``hv`` turns the head around."""

    run: Callable[..., Any]
    text: str
    layout: Layout
    hv: bool

    def __call__(self, case: HeadCase, rest: dict[str, np.ndarray]) -> tuple[Any, Any, Any, tuple[Any, Any]]:
        """``(loss, metrics, report, (dh, dw in the layout [V, H]))`` on the host."""
        value, metrics, report, (dh, dw) = jax.device_get(self.run(*_arguments(case, rest, self.layout, self.hv)))
        return value, metric_values(metrics), report, (dh, dw.T if self.hv else dw)


def _arguments(case: HeadCase, rest: dict[str, np.ndarray], layout: Layout, hv: bool) -> tuple[Any, ...]:
    h, w = case.parameters("hv" if hv else "vh")
    mesh = layout.mesh()
    tokens = jax.device_put((h, case.targets.astype(np.int32), rest), NamedSharding(mesh, layout.tokens))
    return tokens[0], jax.device_put(w, NamedSharding(mesh, _head_spec(layout, hv))), *tokens[1:]


def _head_spec(layout: Layout, hv: bool) -> P:
    return P(*reversed(layout.head)) if hv and len(layout.head) else layout.head


def program(
    layout: Layout, mode: Any, case: HeadCase, rest: Any, objective: Objective = TOKEN, hv: bool = False
) -> Program:
    options: dict[str, Any] = {"chunk_size": CHUNK, "sparse_backward": mode, "backend": "chunked"}
    options["sharding"] = Sharding(layout.mesh(), tokens=layout.tokens, head=_head_spec(layout, hv))
    f = functools.partial(gradients_and_report, objective=objective, head_layout="hv" if hv else "vh", **options)
    lowered = jax.jit(f).lower(*_arguments(case, rest, layout, hv))
    compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
    return Program(compiled, compiled.as_text(), layout, hv)


@functools.cache
def one_device(objective: Objective = TOKEN) -> tuple[Any, Any]:
    """The ordinary path on one device, and float64: ``(gradients, gradients)``."""
    case, rest = ragged(calibrated())
    h, w = case.parameters()

    def loss(h: Any, w: Any) -> Any:
        return flat_calls.linear_grpo_loss(
            h, w, case.targets, objective=objective, chunk_size=CHUNK, backend="chunked", **rest
        )[0]

    grads = by_numpy(jax.grad(loss, (0, 1)), h, w)
    hidden = np.where(rest["mask"][..., None], f64(case.hidden), 0.0)
    _, dh, dw, _ = oracle.linear_grpo_loss(
        hidden, case.lm_head, case.targets, objective=objective, head_layout="vh", **rest
    )
    return grads, (dh, dw)


def large(text: str) -> list[tuple[str, int]]:
    return sorted(c for c in collectives(text) if c[1] > SMALL)


# -- every layout ----------------------------------------------------------------------------------------------------


QUICK = "fsdp on the vocabulary"


@pytest.mark.parametrize("name", [QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS if n != QUICK)])
def test_within_the_contract_and_dense_where_flat(name: str) -> None:
    layout = LAYOUTS[name]
    hv = " x " in name
    objective = GSPO if "hidden" in name else TOKEN  # by recompute where every device has the whole vocabulary, too
    case, rest = ragged(calibrated())
    exact, sparse = (program(layout, mode, case, rest, objective, hv) for mode in ("off", "auto"))
    assert large(sparse.text) == large(exact.text)

    value, metrics, _, grads = sparse(case, rest)
    off_value, off_metrics, _, off = exact(case, rest)
    assert value == off_value and off_metrics.items() <= metrics.items()  # to the bit
    ordinary, truth = one_device(objective)
    for label, got, plain, true in zip(("dh", "dw"), grads, ordinary, truth, strict=True):
        assert got.dtype == jnp.bfloat16
        assert_as_good(label, got, plain, true)
    assert not f64(grads[0])[~rest["mask"]].any()
    assert 0 < metrics["left_out_mass"] < metrics["left_out_mass_max"] <= TOLERANCE
    assert metrics["active_columns"] <= 0.25 and metrics["dense_chunks"] < 0.5
    assert metrics["active_columns"] < metrics["backward_columns"] < 1 and 0 < metrics["hard_rows"] < 0.6

    _, metrics, _, grads = sparse(flat(), rest)
    _, _, _, off = exact(flat(), rest)
    assert metrics["dense_chunks"] == metrics["backward_columns"] == 1
    assert metrics["left_out_mass_max"] == metrics["hard_rows"] == 0
    assert_same_bits(grads, off)

    nobody = dict(rest, mask=np.zeros_like(rest["mask"]))
    _, metrics, _, grads = sparse(case, nobody)
    assert metrics["live_token_share"] == 0 and not any(f64(g).any() for g in grads)


# -- shards of the vocabulary ----------------------------------------------------------------------------------------

SHARDS = 4
TENSOR = Layout({"data": 2, "tensor": SHARDS}, P("data"), P("tensor", None))


def uneven() -> HeadCase:
    """Each shard has four columns of which one leads a row, and else only thin ones: half of a row's thin mass lies on
    the first shard, a quarter, an eighth and an eighth on the others. Head rows are unit vectors."""
    n, width = SHAPE[0] * SHAPE[1], VOCAB // SHARDS
    group = np.repeat(np.arange(SHARDS), width)
    leads = (np.arange(SHARDS)[:, None] * width + np.arange(4)).reshape(-1)
    group[leads] = SHARDS + np.arange(len(leads))
    levels = np.full((n, HIDDEN), -60.0)
    mass = 2.0 ** (-12 + 5.1 * (np.arange(n) % CHUNK + np.arange(n) / n) / CHUNK)  # each chunk has all sizes
    levels[:, :SHARDS] = np.log(mass[:, None] * np.array([4, 2, 1, 1]) / 8 / (width - 4))
    lead = np.random.default_rng(3).integers(0, len(leads), n)
    levels[np.arange(n), SHARDS + lead] = np.log1p(-mass)
    w = np.zeros((VOCAB, HIDDEN), np.float32)
    w[np.arange(VOCAB), group] = 1
    h = levels.astype(np.float32).reshape(*SHAPE, HIDDEN)
    return HeadCase(h, w, leads[lead].astype(np.int32).reshape(SHAPE))


def test_shards_leave_out_the_tolerance_together() -> None:
    """Reported masses, hard rows and both gradients are those of the definition: a row that leaves out less than the
    tolerance on all shards together is hard on none, however much of it is one shard's; any other row is hard on the
    shards that leave out more than their share."""
    case = uneven()
    n, width = SHAPE[0] * SHAPE[1], VOCAB // SHARDS
    rest = {k: v for k, v in ragged(case)[1].items() if k != "mask"}
    rest["advantages"] = np.where(rest["advantages"], rest["advantages"], 1.0)
    _, metrics, report, (dh, dw) = program(TENSOR, TOLERANCE, case, rest)(case, rest)
    assert metrics["dense_chunks"] == 0 and int(report.chunks) == SHARDS * n // CHUNK

    h, w, y = f64(case.hidden).reshape(n, -1), f64(case.lm_head), case.targets.reshape(-1)
    p = np.exp(h @ w.T)
    p /= p.sum(1, keepdims=True)
    chunk = np.arange(n) // CHUNK
    active = np.stack([np.isin(np.arange(VOCAB), y[chunk == k]) for k in range(n // CHUNK)])[chunk]  # [n, V]
    thin = np.where(active, 0.0, p).reshape(n, SHARDS, width)
    mass = thin.sum(2)
    total = mass.sum(1)
    hard = (total > TOLERANCE)[:, None] & (mass > TOLERANCE / SHARDS)
    spared = (total <= TOLERANCE) & (mass > TOLERANCE / SHARDS).any(1)
    partly = hard.any(1) & ~hard.all(1)
    assert spared.sum() > 5 and partly.sum() > 5 and abs(total / TOLERANCE - 1).min() > 1e-3
    left_out = np.where(hard, 0, mass).sum(1)
    assert left_out.max() <= TOLERANCE
    np.testing.assert_allclose(report.left_out.reshape(-1), left_out, rtol=2e-4)
    np.testing.assert_allclose(report.hard.reshape(-1), hard.mean(1))
    assert metrics["left_out_mass"] == pytest.approx(left_out.mean(), rel=1e-4)
    assert metrics["left_out_mass_max"] == pytest.approx(left_out.max(), rel=1e-4)
    assert metrics["hard_rows"] == pytest.approx(hard.mean())
    assert metrics["active_columns"] == pytest.approx(active.mean())

    s = oracle.linear_token_stats(case.hidden, case.lm_head, case.targets)
    g = oracle.policy_loss_grad(s.logp, s.entropy, objective=TOKEN, **rest)[1].reshape(-1)
    dx = -g[:, None] * p
    dx[np.arange(n), y] += g
    lacking = np.where((~hard)[:, :, None], -g[:, None, None] * thin, 0.0)
    slab = active_columns.slab_width(width)
    mean = w.reshape(SHARDS, width, -1)[:, :: width // slab][:, :slab].mean(1)  # each shard its own
    expected = (dx - lacking.reshape(n, -1)) @ w + lacking.sum(2) @ mean
    np.testing.assert_allclose(f64(dh).reshape(n, -1), expected, atol=2e-5 * np.abs(expected).max())
    np.testing.assert_allclose(f64(dw), (dx - lacking.reshape(n, -1)).T @ h, atol=2e-5 * np.abs(dx.T @ h).max())


def test_every_cotangent_of_a_frozen_padded_head() -> None:
    """linear_logprobs over [H, V]: one shard's columns end early, the last has none; padding and dead tokens hold what
    would show."""
    real, rng = 2 * VOCAB // SHARDS + 700, np.random.default_rng(5)
    case = calibrated()
    mask = rng.random(SHAPE) < 0.8
    hidden, head = np.array(case.hidden), np.array(case.lm_head)
    hidden[~mask], head[real:] = np.nan, 100
    case = HeadCase(hidden, head, np.where(case.targets >= real, 5, case.targets).astype(np.int32))
    temperature = rng.uniform(0.7, 1.1, SHAPE).astype(np.float32)
    g = cotangents(rng, SHAPE)
    g = (g[0], 0.1 * g[1], g[2])
    h, w = case.parameters("hv")
    sharding = Sharding(TENSOR.mesh(), tokens=TENSOR.tokens, head=P(None, "tensor"))

    def gradient(**options: Any) -> np.ndarray:
        def call(h: Any) -> Any:
            s = flat_calls.linear_logprobs(
                h, w, case.targets, mask=mask, temperature=temperature, vocab_size=real, chunk_size=CHUNK, **options
            )
            return three(s)

        f = lambda h, g: jax.vjp(call, h)[1](g)[0]  # noqa: E731
        return run(f, h, g)[0] if options else by_numpy(f, h, g)

    got, exact = gradient(sharding=sharding, sparse_backward="auto"), gradient()
    assert (f64(got) != f64(exact)).any()  # something was left out
    _, truth = head_truth(case, g, layout="hv", vocab_size=real, mask=mask, temperature=temperature)
    assert_as_good("dh", got, exact, truth[0])


# -- what it says ----------------------------------------------------------------------------------------------------


def test_explain() -> None:
    h, w = jax.ShapeDtypeStruct((*SHAPE, HIDDEN), jnp.bfloat16), jax.ShapeDtypeStruct((VOCAB, HIDDEN), jnp.bfloat16)
    auto = Options(sparse_backward="auto")
    tokens = explain(linear_grpo_loss, h, w, sharding=LAYOUTS["data and sequence"].sharding(), options=auto)
    assert tokens.backend == "chunked" and tokens.matmuls.startswith("1 + 2 K/V") and "2^-8" in tokens.way
    shards = explain(linear_grpo_loss, h, w, sharding=TENSOR.sharding(), options=auto)
    assert shards.matmuls.startswith("2 + 3 K/V") and f"K > {VOCAB // SHARDS // 4:,}" in shards.way


def test_the_reference_refuses_it() -> None:
    case, options = calibrated(), {"sparse_backward": "auto", "backend": "reference"}
    with pytest.raises(NotImplementedError, match="sparse backward"):
        flat_calls.linear_logprobs(case.hidden, case.lm_head, case.targets, sharding=TENSOR.sharding(), **options)
