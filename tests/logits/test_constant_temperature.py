"""A temperature that the compiler knows costs no digits: at logits of 200, every backend against float64.

A known temperature is a factor that a compiler may contract with the subtraction of a row's maximum, in one pass and
not in the next; ``logitless.core.stats`` says how passes are kept from disagreeing. The inputs of the head are
small multiples of 1/8, whose products and sums are exact: what is off is off by the softmax.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
from logitless import Objective, oracle, policy_loss
from logitless.core.compat import mosaic_gpu_reason
from logitless.core.stats import LogitTransform, StatCotangents
from loss_cases import token_stats
from numerics import STATS, assert_contract, logits_problem, plain_stats, three

pytestmark = pytest.mark.optimized  # what is contracted is contracted by the optimiser

TEMPERATURE = np.float32(0.7)
N, WIDTH = 12, 128
hopper = pytest.param(
    "mosaic_gpu",
    marks=[pytest.mark.slow, pytest.mark.skipif(mosaic_gpu_reason() is not None, reason=str(mosaic_gpu_reason()))],
)
KNOWN = pytest.mark.parametrize("known", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["known", "traced"])
VOCABS = pytest.mark.parametrize("vocab", [64, *(pytest.param(v, marks=pytest.mark.slow) for v in (1000, 50257))])
EACH = np.linspace(0.5, 1.5, N, dtype=np.float32)


@functools.cache
def head(vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(hidden, lm_head, targets)`` of logits about 200; every other target leads its row."""
    rng = np.random.default_rng(vocab)
    h, w = (rng.integers(-8, 9, (n, WIDTH)) / 8 for n in (N, vocab))
    h[:, 0], w[:, 0] = 200, 1
    y = rng.integers(0, vocab, N)
    y[::2] = (h @ w.T).argmax(1)[::2]
    return h.astype(np.float32), w.astype(np.float32), y.astype(np.int32)


@functools.cache
def logits(vocab: int) -> tuple[np.ndarray, np.ndarray]:
    h, w, y = head(vocab)
    return h @ w.T, y


def compiled(f: Callable[..., Any], known: bool, temperature: Any = TEMPERATURE) -> Callable[..., Any]:
    """``f(temperature, *arrays)`` with a pullback, the temperature closed over or traced."""

    def run(t: Any, g: Any, *arrays: Any) -> Any:
        out, pull = jax.vjp(functools.partial(f, t), *arrays)
        return out, pull(g)

    return jax.jit(functools.partial(run, temperature)) if known else functools.partial(jax.jit(run), temperature)


def backend_options(backend: str) -> dict[str, Any]:
    return {"backend": backend} if backend in ("reference", "chunked") else {"backend": backend, "interpret": True}


def unit_cotangents() -> list[tuple[np.ndarray, ...]]:
    return [tuple(np.full(N, float(i == j), np.float32) for j in range(3)) for i in range(3)]


def check_statistics(backend: str, known: bool, vocab: int, temperature: Any = TEMPERATURE, **other: float) -> None:
    (x, y), options = logits(vocab), backend_options(backend)
    exact = {k: np.float32(v) for k, v in other.items()}
    fast = compiled(
        lambda t, x: three(flat_calls.logprobs(x, y, temperature=t, **options, **other)), known, temperature
    )
    plain = compiled(lambda t, x: plain_stats(x, y, temperature=t, **other), known, temperature)
    truth = oracle.token_stats(x, y, temperature=temperature, **exact)
    for name, g in zip(STATS, unit_cotangents(), strict=True):
        (out, (dx,)), (base, (base_dx,)) = fast(g, x), plain(g, x)
        for stat, a, b in zip(STATS, out, base, strict=True):
            assert_contract(stat, a, b, getattr(truth, stat))
        want = oracle.token_stats_vjp(x, y, *g, temperature=temperature, **exact)
        assert_contract(f"d {name}", dx, base_dx, want)


@VOCABS
@KNOWN
@pytest.mark.parametrize(
    "backend", [pytest.param("reference", marks=pytest.mark.slow), "chunked", "pallas_tpu", hopper]
)
def test_statistics_of_logits(backend: str, known: bool, vocab: int) -> None:
    check_statistics(backend, known, vocab)


@pytest.mark.skipif(mosaic_gpu_reason() is not None, reason=str(mosaic_gpu_reason()))
def test_rounded_dlogits_of_the_hopper_row_kernel() -> None:
    """What a head of 16-bit operands gets: statistics, and 16-bit dlogits of float32 logits."""
    from logitless.logits.mosaic_gpu import backend as mosaic_gpu

    (x, y), t = logits(64), LogitTransform(temperature=jnp.asarray(TEMPERATURE))
    p = logits_problem(jnp.asarray(x), jnp.asarray(y), t, 64, interpret=True)
    plain = compiled(lambda t, x: plain_stats(x, y, temperature=t), known=True)
    stats = mosaic_gpu.token_stats(p)
    truth = oracle.token_stats(x, y, temperature=TEMPERATURE)
    for name, base in zip(STATS, plain(unit_cotangents()[0], x)[0], strict=True):
        assert_contract(name, getattr(stats, name), base, getattr(truth, name))
    run = jax.jit(lambda *g: mosaic_gpu.dlogits(p, stats, StatCotangents(*g), dtype=jnp.bfloat16))
    for name, g in zip(STATS, unit_cotangents(), strict=True):
        base = plain(g, x)[1][0].astype(jnp.bfloat16)
        assert_contract(f"d {name}", run(*g), base, oracle.token_stats_vjp(x, y, *g, temperature=TEMPERATURE))


@pytest.mark.parametrize(
    "other", [{"scale": 0.9}, {"softcap": 300.0}, {"temperature": EACH}], ids=lambda o: next(iter(o))
)
@pytest.mark.parametrize(
    "backend", ["chunked", *(pytest.param(b, marks=pytest.mark.slow) for b in ("reference", "pallas_tpu"))]
)
def test_with_a_scale_a_softcap_a_temperature_of_each_token(backend: str, other: dict[str, Any]) -> None:
    check_statistics(backend, known=True, vocab=64, **other)


@VOCABS
@KNOWN
@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "chunked", "pallas_tpu"])
def test_statistics_of_the_head(backend: str, known: bool, vocab: int) -> None:
    h, w, y = head(vocab)
    options = backend_options(backend)
    fast = compiled(lambda t, h, w: three(flat_calls.linear_logprobs(h, w, y, temperature=t, **options)), known)
    plain = compiled(lambda t, h, w: plain_stats(h @ w.T, y, temperature=t), known)
    truth = oracle.linear_token_stats(h, w, y, temperature=TEMPERATURE)
    for name, g in zip(STATS, unit_cotangents(), strict=True):
        (out, d), (base, base_d) = fast(g, h, w), plain(g, h, w)
        for stat, a, b in zip(STATS, out, base, strict=True):
            assert_contract(stat, a, b, getattr(truth, stat))
        want = oracle.linear_token_stats_vjp(h, w, y, *g, temperature=TEMPERATURE)
        for of, a, b, c in zip(("hidden", "head"), d, base_d, want, strict=False):
            assert_contract(f"d {name} / d {of}", a, b, c)


def losses(t: Any) -> dict[str, Any]:
    """Arguments of a loss whose gradient has the entropy's in it."""
    rng = np.random.default_rng(3)
    return {
        "objective": Objective(temperature=t, entropy_coef=0.5),
        "advantages": rng.standard_normal((2, N // 2)).astype(np.float32),
    }


def two_rows(x: Any) -> Any:
    return x.reshape(2, N // 2, *x.shape[1:])


@VOCABS
@KNOWN
@pytest.mark.parametrize("backend", ["chunked", "pallas_tpu", hopper])
def test_a_loss_of_logits(backend: str, known: bool, vocab: int) -> None:
    x, y = map(two_rows, logits(vocab))
    options = backend_options(backend)

    def plain_loss(t: Any, x: Any) -> Any:
        logp, entropy, _ = plain_stats(x.reshape(N, -1), y.reshape(-1), temperature=t)
        return policy_loss(token_stats(two_rows(logp), two_rows(entropy)), **losses(t))[0]

    fast = compiled(lambda t, x: flat_calls.grpo_loss(x, y, **options, **losses(t))[0], known)
    (loss, (dx,)), (base, (base_dx,)) = fast(jnp.float32(1), x), compiled(plain_loss, known)(jnp.float32(1), x)
    value, want = oracle.grpo_loss(x, y, **losses(TEMPERATURE))
    assert_contract("loss", loss, base, value)
    assert_contract("dlogits", dx, base_dx, want)
    if known:
        without = jax.jit(lambda x: flat_calls.grpo_loss(x, y, **options, **losses(TEMPERATURE))[0])
        assert without(x) == loss  # to the bit


@VOCABS
@KNOWN
@pytest.mark.parametrize("backend", ["chunked", "pallas_tpu"])
def test_a_loss_of_the_head(backend: str, known: bool, vocab: int) -> None:
    h, w, y = head(vocab)
    h, y = two_rows(h), two_rows(y)
    options = backend_options(backend)

    def plain_loss(t: Any, h: Any, w: Any) -> Any:
        logp, entropy, _ = plain_stats((h @ w.T).reshape(N, -1), y.reshape(-1), temperature=t)
        return policy_loss(token_stats(two_rows(logp), two_rows(entropy)), **losses(t))[0]

    fast = compiled(lambda t, h, w: flat_calls.linear_grpo_loss(h, w, y, **options, **losses(t))[0], known)
    (loss, d), (base, base_d) = fast(jnp.float32(1), h, w), compiled(plain_loss, known)(jnp.float32(1), h, w)
    value, *want = oracle.linear_grpo_loss(h, w, y, **losses(TEMPERATURE))
    assert_contract("loss", loss, base, value)
    for of, a, b, c in zip(("hidden", "head"), d, base_d, want, strict=False):
        assert_contract(f"d {of}", a, b, c)
    if known:
        without = jax.jit(lambda h, w: flat_calls.linear_grpo_loss(h, w, y, **options, **losses(TEMPERATURE))[0])
        # To the bit; an interpreted kernel is the same in both programs, but XLA compiles its body into each anew.
        ulps = 1 if backend == "pallas_tpu" else 0
        assert abs(without(h, w) - loss) <= ulps * np.spacing(np.abs(np.float32(loss)))
