"""KL divergences over slabs of columns (``head/column_slabs.py``), the form of ``chunked`` on a TPU, in plain JAX on a
CPU: against float64, with several chunks of tokens and slabs, and a ragged end of both."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import logitless as L
from ahead_of_time import ROOT, answer_of, needs_libtpu
from logitless import oracle
from logitless.core import chunk_size
from logitless.head import column_slabs
from numerics import f64

KINDS = ("reverse_kl", "forward_kl")
N, H, H2, V = 150, 16, 24, 211


@pytest.fixture(autouse=True)
def as_on_a_tpu() -> Iterator[None]:
    """Two chunks of 128 tokens, the second one filled up; four slabs of columns, the last one narrow."""
    with (
        mock.patch.object(chunk_size, "platform", return_value="tpu"),
        mock.patch.multiple(column_slabs, TOKENS=128, LIVE_TOKENS=128, COLUMNS=64, LIVE_COLUMNS=64),
    ):
        yield


def states(seed: int, width: int, vocab: int = V, spread: float = 2.0, n: int = N) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    h = spread * rng.standard_normal((n, width)) / np.sqrt(width)
    return h.astype(np.float32), rng.standard_normal((vocab, width)).astype(np.float32)


def assert_near(got: Any, want: np.ndarray, label: str, bound: float = 5e-6) -> None:
    assert np.abs(f64(got) - want).max() <= bound * np.abs(want).max(), label


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["vh", "hv"])
@pytest.mark.parametrize("spread", [2.0, 12.0], ids=["ordinary", "peaked"])
def test_values_and_gradients(kind: Any, layout: Any, spread: float) -> None:
    """Cotangents of all four statistics, a temperature per token, padding columns, a bias, more ids on the teacher's
    side, and with a softcap on both; dead tokens hold NaN and nothing reaches anything."""
    (h, w), (th, tw) = states(0, H, spread=spread), states(1, H2, vocab=V + 5, spread=spread)
    rng = np.random.default_rng(2)
    real = V - 8
    y, t = rng.integers(0, real, N), rng.uniform(0.5, 2.0, N).astype(np.float32)
    bias, mask = rng.standard_normal(V).astype(np.float32), rng.random(N) < 0.7
    g = (rng.standard_normal((4, N)) * mask).astype(np.float32)
    h[~mask], th[~mask], bias[real:] = np.nan, np.nan, np.nan
    more = dict(softcap=20.0, scale=0.9) if layout == "hv" else {}
    flip = (lambda x: x.T) if layout == "hv" else (lambda x: x)

    @jax.jit
    def run(h: Any, w: Any, bias: Any, g: Any) -> Any:
        def ours(h: Any, w: Any, bias: Any) -> Any:
            head = L.Head(w, bias=bias, layout=layout, vocab_size=real, **more)
            teacher = L.Head(flip(jnp.asarray(tw)), layout=layout, **more)
            s = L.linear_divergence(h, head, th, teacher, divergence=kind, temperature=t, targets=y, mask=mask)
            return (s.divergence, s.entropy, s.logp, s.lse), s

        values, pull, stats = jax.vjp(ours, h, w, bias, has_aux=True)
        return values, pull(tuple(g)), stats

    values, got, stats = run(h, flip(jnp.asarray(w)), bias, g)
    clean = [np.where(mask[:, None], x, 0.0) for x in (h, th)]
    student = oracle.linear_rows(clean[0], w, bias=np.where(np.isnan(bias), 0, bias), vocab_size=real, **more)
    teacher = oracle.linear_rows(clean[1], tw, vocab_size=real, **more)
    about = dict(divergence=kind, temperature=t, targets=y, mask=mask)
    truth = oracle.divergence(student, teacher, **about)
    made = oracle.divergence_vjp(student, teacher, f64(g[0]), None, f64(g[1]), f64(g[2]), **about)
    lse = oracle.linear_token_stats_vjp(
        clean[0], w, y, None, None, f64(g[3]), temperature=t, bias=np.where(np.isnan(bias), 0, bias),
        vocab_size=real, mask=mask, **more,
    )  # fmt: skip
    np.testing.assert_allclose(values[0], truth.divergence, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values[1], truth.entropy, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(values[2], truth.logp, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(stats.teacher_entropy, truth.teacher_entropy, rtol=2e-5, atol=2e-6)
    assert not np.any(f64(values)[:, ~mask]) and not np.any(f64(got[0])[~mask])
    own = (got[0], flip(got[1]), got[2])
    for label, ours_, a, b in zip(("dH", "dW", "dbias"), own, made, lse, strict=False):
        assert_near(ours_, f64(a) + f64(b), label)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rows_are_exactly_zero(kind: Any) -> None:
    """Also where the row is peaked, or several columns share its largest logit."""
    h, w = states(3, H, spread=10.0)
    w[40:44] = w[100:104] = w[7]
    head = L.Head(jnp.asarray(w), bias=jnp.zeros(V), softcap=20.0, scale=0.7, vocab_size=V - 3)

    @jax.jit
    def run(h: Any, head: L.Head) -> Any:
        def total(h: Any, head: L.Head) -> Any:
            s = L.linear_divergence(h, head, h, head, divergence=kind)
            return jnp.sum(s.divergence), s.divergence

        return jax.grad(total, (0, 1), has_aux=True)(h, head)

    (dh, dhead), values = run(jnp.asarray(h), head)
    for x in (values, dh, dhead.weight, dhead.bias):
        assert not np.any(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lead", [10.0, 20.0, 25.0, 30.0])
def test_gradient_rows_at_a_peak(kind: Any, lead: float) -> None:
    """Rows whose largest logit leads all others by ``lead`` nats on both sides, in the same column, in another one and
    in two: behind a head of ones and zeros each row of dH is a row of dlogits, right to 1e-5 of its own size."""
    rng = np.random.default_rng(4)
    x, t = rng.standard_normal((2, 9, 200)).astype(np.float32)
    x[:, 7] = lead + 4
    t[:3, 7] = lead + 4.5
    t[3:6, 130] = lead + 4.5  # another peak than the student's
    x[6:, 130], t[6:, 130], t[6:, 7] = x[6:, 7], lead + 4.5, lead + 4.25  # two columns share the student's
    eye = L.Head(jnp.eye(200, dtype=jnp.float32), layout="vh")

    @jax.jit
    def run(x: Any) -> Any:
        value, pull = jax.vjp(lambda x: L.linear_divergence(x, eye, t, eye, divergence=kind).divergence, x)
        return value, pull(jnp.ones(9))[0]

    value, got = run(jnp.asarray(x))
    rows = oracle.logits_rows(x), oracle.logits_rows(t)
    truth = oracle.divergence(*rows, divergence=kind).divergence
    want = oracle.divergence_vjp(*rows, np.ones(9), divergence=kind).inputs
    # Two columns of one half each: what float32 keeps of log p - log q, as over whole rows.
    np.testing.assert_allclose(value, truth, rtol=1e-5, atol=2e-7)
    bound = np.where(np.arange(9) < 6, 1e-5, 1e-4)
    assert (np.linalg.norm(f64(got) - want, axis=1) <= bound * np.linalg.norm(want, axis=1)).all()


def test_a_loss_with_a_frozen_head_and_only_its_bias() -> None:
    """``linear_distillation_loss`` with a mask: what is not asked for is not made, the rest is as it was."""
    shape = (3, N // 3)
    (h, w), (th, tw) = states(8, H), states(9, H2)
    h, th = h.reshape(*shape, H), th.reshape(*shape, H2)
    mask = np.random.default_rng(10).random(shape) < 0.6
    h[~mask], th[~mask] = np.nan, np.nan
    bias = np.random.default_rng(11).standard_normal(V).astype(np.float32)

    def loss(h: Any, w: Any, bias: Any) -> Any:
        return L.linear_distillation_loss(h, L.Head(w, bias=bias), th, tw, mask=mask)[0]

    args = (jnp.asarray(h), jnp.asarray(w), jnp.asarray(bias))
    student, teacher = oracle.linear_rows(h, w, bias=bias), oracle.linear_rows(th, tw)
    truth, want = oracle.distillation_loss(student, teacher, objective=L.Distillation(), mask=mask)
    value, everything = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*args)
    np.testing.assert_allclose(value, truth, rtol=1e-5)
    for label, a, b in zip(("dH", "dW", "dbias"), everything, want, strict=True):
        assert_near(a, f64(b), label)
    for wrt in (0, 2):
        np.testing.assert_array_equal(jax.jit(jax.grad(loss, wrt))(*args), everything[wrt])


@pytest.mark.parametrize("head", [None, PartitionSpec("x", None)], ids=["tokens", "FSDP"])
def test_over_a_mesh(head: PartitionSpec | None) -> None:
    """Every device sweeps its own tokens, over a gathered head or its own; dW is summed over devices."""
    (h, w), (th, tw) = states(8, H, vocab=212, n=320), states(9, H2, vocab=212, n=320)
    h, th, mask = h.reshape(4, 80, H), th.reshape(4, 80, H2), np.random.default_rng(1).random((4, 80)) < 0.7
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    over = L.Sharding(mesh, tokens=PartitionSpec("x"), **({} if head is None else dict(head=head)))

    @functools.partial(jax.jit, static_argnums=2)
    def run(h: Any, w: Any, sharding: L.Sharding | None) -> Any:
        def loss(h: Any, w: Any) -> Any:
            return L.linear_distillation_loss(h, L.Head(w), th, L.Head(tw), mask=mask, sharding=sharding)[0]

        return jax.value_and_grad(loss, (0, 1))(h, w)

    assert "slabs" in L.explain(L.linear_distillation_loss, h, L.Head(w), th, L.Head(tw), sharding=over).way
    for got, want in zip(jax.tree.leaves(run(h, w, over)), jax.tree.leaves(run(h, w, None)), strict=True):
        assert_near(got, f64(want), "over a mesh", 2e-6)


def test_sixteen_bits_are_as_good_as_whole_rows() -> None:
    """bfloat16 models: errors at most 1.5 times those of the chunks that hold whole rows."""
    (h, w), (th, tw) = states(5, H), states(6, H2)
    given = [np.asarray(x, jnp.bfloat16) for x in (h, w, th, tw)]

    def gradients(h: Any, w: Any, th: Any, tw: Any) -> Any:
        return jax.grad(lambda h, w: jnp.sum(L.linear_divergence(h, w, th, tw).divergence), (0, 1))(h, w)

    slabs = jax.jit(gradients)(*given)
    with mock.patch.object(chunk_size, "platform", return_value="cpu"):
        rows = jax.jit(lambda *x: gradients(*x))(*given)
    sides = oracle.linear_rows(f64(given[0]), f64(given[1])), oracle.linear_rows(f64(given[2]), f64(given[3]))
    truth = oracle.divergence_vjp(*sides, np.ones(N), divergence="reverse_kl")
    for got, plain, want in zip(slabs, rows, truth, strict=False):
        assert got.dtype == jnp.bfloat16
        assert np.linalg.norm(f64(got) - want) <= 1.5 * np.linalg.norm(f64(plain) - want)


def test_explain_says_what_serves_a_call() -> None:
    h, w = jax.ShapeDtypeStruct((1, 64, H), jnp.float32), jax.ShapeDtypeStruct((V, H), jnp.float32)
    route = L.explain(L.linear_distillation_loss, h, w, h, w)
    assert route.described.counts == (6, 5, 2) and route.tiles["slab"] == 64 and "slabs" in route.way
    jsd = L.explain(L.linear_distillation_loss, h, w, h, w, distillation=L.Distillation(divergence="jsd"))
    assert jsd.described.counts == (4, 3, 2) and "slabs of columns: JSD needs both logsumexps first" in jsd.way
    lora = L.Head(w, lora=(jax.ShapeDtypeStruct((V, 2), jnp.float32), jax.ShapeDtypeStruct((2, H), jnp.float32)))
    assert "slabs of columns: a head has LoRA" in L.explain(L.linear_distillation_loss, h, lora, h, w).way
    rows = L.explain(L.linear_distillation_loss, h, w, h, w, options=L.Options(chunk_size=16))
    assert rows.tiles["chunk"] == 16 and "slabs of columns: chunk_size= cuts tokens" in rows.way
    with mock.patch.object(column_slabs, "COLUMNS", 1024):
        cut, less = (L.explain(L.linear_distillation_loss, h, w, h, w, options=L.Options(memory_budget=b))
                     for b in (110_000, 90_000))  # fmt: skip
    assert cut.tiles["slab"] == 128 and "more than memory_budget=90,000" in less.way
    with mock.patch.object(chunk_size, "platform", return_value="gpu"):
        assert L.explain(L.linear_divergence, h, w, h, w, options=L.Options(backend="chunked")).tiles["chunk"]


# -- ahead of time -----------------------------------------------------------------------------------------------------


def within_its_memory(record: dict[str, Any]) -> bool:
    return record["beside_bytes"] <= 0.4e9 and record["rows_of_logits"] == 0


@pytest.mark.slow
@needs_libtpu
def test_compiles_for_v6e_without_logits() -> None:
    """The reverse KL with dH and dW at T=8192, H=4096, V=151936."""
    assert within_its_memory(answer_of(__file__))


def test_recorded_estimate() -> None:
    """What benchmarks/tpu_distill.py wrote: no more time than chunks of whole rows, in a quarter of their memory."""
    programs = json.loads((ROOT / "benchmarks" / "results" / "tpu_distill.json").read_text())["programs"]
    slabs, rows = programs["slabs, default"], programs["chunked, 1024"]
    assert within_its_memory(slabs) and slabs["beside_bytes"] <= rows["beside_bytes"] / 4
    assert slabs["estimated_ms"] <= 1.05 * rows["estimated_ms"]
    assert slabs["estimated_ms"] <= 0.6 * programs["chunked, 256"]["estimated_ms"]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import tpu_distill

    print(json.dumps(tpu_distill.slabs()))
