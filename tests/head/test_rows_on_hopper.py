"""The row kernels on a Hopper GPU, from logits and from hidden states, against float64: random shapes, transforms,
masks and cotangents. ``LOGITLESS_SEED`` changes all of them.

    python -m pytest -m gpu tests/head/test_rows_on_hopper.py
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logitless as L
from logitless import oracle
from numerics import f64

SEED = int(os.environ.get("LOGITLESS_SEED", "0"))
ON_A_GPU = jax.default_backend() in ("gpu", "cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_A_GPU, reason="no Hopper GPU here")]
ROUNDING = {"float32": 4e-6, "bfloat16": 4e-3, "float16": 1e-3}
"""Of the largest number: of dlogits, or of a row of the sum that dH is."""
KINDS = ("forward_kl", "reverse_kl", "jsd")


def drawn(case: int) -> tuple[np.random.Generator, dict[str, Any]]:
    """A generator, and the transform, mask and targets' shape that a case has."""
    rng = np.random.default_rng((SEED, case))
    n, v = int(rng.integers(1, 90)), int(rng.choice([130, 1000, 8192, 32001, 50257, 50304]))
    given: dict[str, Any] = dict(n=n, v=v, vocab_size=v - int(rng.choice([0, 0, 3, 37])))
    given["temperature"] = [1.0, 0.7, rng.uniform(0.5, 1.5, n).astype(np.float32)][case % 3]
    given["softcap"], given["scale"] = [(None, None), (30.0, 0.8), (None, 1.2)][int(rng.integers(0, 3))]
    given["mask"] = rng.random(n) < (1.0 if case % 4 == 0 else 0.7)
    given["y"] = rng.integers(0, given["vocab_size"], n)
    return rng, given


def assert_near(label: str, got: Any, want: np.ndarray, unit: float) -> None:
    """Errors below ``unit`` of the largest entry."""
    got = f64(got)
    assert np.isfinite(got).all(), label
    assert np.abs(got - want).max() <= unit * np.abs(want).max() + 1e-30, label


@pytest.mark.parametrize("case", range(12))
def test_logits(case: int) -> None:
    """Statistics, and dlogits of random cotangents of all three; every fourth case over the logits."""
    rng, c = drawn(case)
    dtype = ("bfloat16", "float32", "float16")[case % 3]
    x = jnp.asarray(rng.standard_normal((c["n"], c["v"])) * rng.choice([3.0, 12.0]), dtype)
    g = [jnp.asarray(rng.standard_normal(c["n"]), jnp.float32) for _ in range(3)]
    how = {k: c[k] for k in ("temperature", "softcap", "scale", "vocab_size")}

    @jax.jit
    def run(x: Any, g: Any) -> Any:
        def stats(x: Any) -> Any:
            s = L.logprobs(x, c["y"], mask=c["mask"], options=L.Options(backend="mosaic_gpu"), **how)
            return s.logp, s.entropy, s.lse

        values, pull = jax.vjp(stats, x)
        return values, pull(tuple(g))[0]

    values, d = run(x, g)
    truth = oracle.token_stats(f64(x), c["y"], mask=c["mask"], **how)
    for name, value in zip(("logp", "entropy", "lse"), values, strict=True):
        want = getattr(truth, name)
        np.testing.assert_allclose(f64(value), want, rtol=2e-5, atol=4e-6 * max(np.abs(want).max(), 1), err_msg=name)
    assert_near(
        "dlogits", d, oracle.token_stats_vjp(f64(x), c["y"], *map(f64, g), mask=c["mask"], **how), ROUNDING[dtype]
    )


@pytest.mark.parametrize("case", range(9))
def test_head(case: int) -> None:
    """A loss in one pass (with its entropy bonus) and statistics with later cotangents, from hidden states."""
    rng, c = drawn(100 + case)
    n, width, dtype, logits = c["n"], 64 * int(rng.integers(1, 4)), *(
        [("bfloat16", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")][case % 3])  # fmt: skip
    h = jnp.asarray(rng.standard_normal((1, n, width)), dtype)
    w = jnp.asarray(3 * rng.standard_normal((c["v"], width)) / np.sqrt(width), dtype)
    how = {k: c[k] for k in ("softcap", "scale", "vocab_size")}
    y, mask = c["y"][None], c["mask"][None]
    o = L.Objective(aggregation="dapo", entropy_coef=0.02, temperature=np.reshape(c["temperature"], (-1, n))
                    if np.ndim(c["temperature"]) else c["temperature"])  # fmt: skip
    given = dict(advantages=jnp.asarray(rng.standard_normal(1), jnp.float32), mask=jnp.asarray(mask))

    def loss(h: Any, w: Any) -> Any:
        options = L.Options(backend="mosaic_gpu", logits_dtype=logits, chunk_size=int(rng.choice([16, 64, 128])))
        return L.linear_grpo_loss(h, L.Head(w, **how), y, objective=o, options=options, **given)[0]

    value, (dh, dw) = jax.jit(jax.value_and_grad(loss, (0, 1)))(h, w)
    true, *want = oracle.linear_grpo_loss(
        f64(h), f64(w), y, objective=o, advantages=f64(given["advantages"]), mask=mask, **how
    )
    unit = ROUNDING["bfloat16"] if "bfloat16" in (dtype, logits) else 1e-5
    np.testing.assert_allclose(float(value), true, rtol=2e-2 if logits == "bfloat16" else 1e-4, atol=2e-6)
    for label, got, exact in (("dH", dh, want[0]), ("dW", dw, want[1])):
        size = np.linalg.norm(exact)
        assert np.linalg.norm(f64(got) - exact) <= (20 if logits == "bfloat16" else 4) * unit * size + 1e-30, label


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lead", [0.0, 15.0, 25.0])
def test_divergence(kind: str, lead: float) -> None:
    """Value and dlogits of a row whose peak leads by ``lead`` nats: within 1e-5 of the row itself."""
    rng = np.random.default_rng((SEED, 200))
    x, t = rng.standard_normal((2, 16, 4096)).astype(np.float32)
    x[:, 7], t[:, 7] = lead + 4, lead + 4.5
    more = dict(mix=0.3) if kind == "jsd" else {}

    @jax.jit
    def run(x: Any) -> Any:
        value, pull = jax.vjp(lambda x: L.divergence(x, t, divergence=kind, **more).divergence, x)
        return value, pull(jnp.ones(16))[0]

    value, d = run(jnp.asarray(x))
    rows = oracle.logits_rows(x), oracle.logits_rows(t)
    np.testing.assert_allclose(value, oracle.divergence(*rows, divergence=kind, **more).divergence, rtol=1e-5)
    want = oracle.divergence_vjp(*rows, np.ones(16), divergence=kind, **more).inputs
    assert (np.linalg.norm(f64(d) - want, axis=1) / np.linalg.norm(want, axis=1)).max() <= 1e-5


@pytest.mark.parametrize("backend", [None, "mosaic_gpu"])
@pytest.mark.parametrize("case", range(12))
def test_divergence_of_heads(case: int, backend: str | None) -> None:
    """Divergence, statistics and gradients of random cotangents; transforms of their own, other widths on the teacher's
    side, more token ids on either side, and masks with NaN behind them. The row kernels serve whole lines of logits and
    no JSD."""
    rng = np.random.default_rng((SEED, 400 + case))
    kernels = backend == "mosaic_gpu"
    n, v = int(rng.integers(1, 300)), int(rng.choice([128, 1024, 8192, 50304, 151936, *([] if kernels else [8200])]))
    kind, dtype = KINDS[case % (2 if kernels else 3)], ["float32", "bfloat16"][case // 3 % 2]
    more = dict(mix=0.3) if kind == "jsd" else {}
    sides = []
    for width, vocab in ((64, v), (128, v + int(rng.choice([0, 64])))):
        h = 3 * rng.standard_normal((n, width)) / np.sqrt(width)
        how = dict(
            zip(("softcap", "scale"), [(None, None), (30.0, 0.8), (None, 1.2)][int(rng.integers(0, 3))], strict=True)
        )
        w = jnp.asarray(rng.choice([1.0, 3.0]) * rng.standard_normal((vocab, width)), dtype)
        sides.append((jnp.asarray(h, dtype), w, how | dict(vocab_size=v - int(rng.choice([0, 5])))))
    (h, w, how), (th, tw, t_how) = sides
    t_how["vocab_size"] = how["vocab_size"]
    y, mask = rng.integers(0, how["vocab_size"], n), rng.random(n) < 0.8
    tau = rng.uniform(0.5, 1.5, n).astype(np.float32) if case % 2 else 1.0
    g = rng.standard_normal((4, n)).astype(np.float32)
    dead = jnp.asarray(~mask)[:, None]
    options = L.Options(backend=backend, chunk_size=int(rng.choice([64, 128, 1024])))

    @jax.jit
    def run(h: Any, w: Any) -> Any:
        def stats(h: Any, w: Any) -> Any:
            s = L.linear_divergence(
                jnp.where(dead, jnp.nan, h), L.Head(w, layout="vh", **how),
                jnp.where(dead, jnp.nan, th), L.Head(tw, layout="vh", **t_how),
                divergence=kind, targets=y, mask=mask, temperature=tau, options=options, **more,
            )  # fmt: skip
            return (s.divergence, s.entropy, s.logp, s.lse), s.teacher_entropy

        values, pull, more_values = jax.vjp(stats, h, w, has_aux=True)
        return values, more_values, pull(tuple(jnp.asarray(x) for x in g))

    values, teacher_entropy, (dh, dw) = run(h, w)
    rows = oracle.linear_rows(f64(h), f64(w), **how), oracle.linear_rows(f64(th), f64(tw), **t_how)
    about = dict(divergence=kind, temperature=tau, targets=y, mask=mask, **more)
    truth = oracle.divergence(*rows, **about)
    wanted = (truth.divergence, truth.entropy, truth.logp)
    for label, a, b in zip(("divergence", "entropy", "logp"), values, wanted, strict=False):
        np.testing.assert_allclose(f64(a), b, rtol=3e-5, atol=1e-5 * max(np.abs(b).max(), 1), err_msg=label)
    np.testing.assert_allclose(f64(teacher_entropy), truth.teacher_entropy, rtol=3e-5, atol=1e-5)
    made = oracle.divergence_vjp(*rows, f64(g[0]), None, f64(g[1]), f64(g[2]), **about)
    rest = oracle.linear_token_stats_vjp(f64(h), f64(w), y, None, None, f64(g[3]), temperature=tau, mask=mask, **how)
    unit = 1e-5 if dtype == "float32" else 1.6e-2
    for label, got, a, b in (("dH", dh, made.inputs, rest[0]), ("dW", dw, made.head, rest[1])):
        want = f64(a) + f64(b)
        assert np.linalg.norm(f64(got) - want) <= unit * np.linalg.norm(want), label


@pytest.mark.parametrize("kind, backend", [*((k, None) for k in KINDS), *((k, "mosaic_gpu") for k in KINDS[:2])])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_student_that_is_its_teacher(kind: str, backend: str | None, dtype: str) -> None:
    """Divergence and gradients are exactly zero."""
    rng = np.random.default_rng((SEED, 300))
    h, w = (
        jnp.asarray(3 * rng.standard_normal((1, 70, 128)), dtype),
        jnp.asarray(rng.standard_normal((8192, 128)), dtype),
    )
    more = dict(mix=0.3) if kind == "jsd" else {}

    @jax.jit
    def run(h: Any, w: Any) -> Any:
        def total(h: Any, w: Any) -> Any:
            options = L.Options(backend=backend, chunk_size=32)
            s = L.linear_divergence(h, w, h, w, divergence=kind, temperature=0.7, options=options, **more)
            return jnp.sum(s.divergence), s.divergence

        return jax.grad(total, (0, 1), has_aux=True)(h, w)

    (dh, dw), value = run(h, w)
    for x in (value, dh, dw):
        assert not np.any(f64(x))
