"""The sparse backward of calls with a teacher: its error, its bound, what it reports, and where it is exact."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import logitless as L
from interpreted import by_numpy
from logitless.core.problem import Call, HeadArrays, Linear, Problem
from logitless.core.stats import LogitTransform
from logitless.head.sparse import dx_columns
from logitless.head.sparse.active_columns import chunk_rule
from logitless.lab.bench import realistic
from numerics import f64

N, H, V = 128, 64, 16384
KINDS = ("reverse_kl", "forward_kl", "jsd")


@functools.cache
def states(move: float = 0.3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(hidden, head, the teacher's hidden)`` float32 of a trained policy's kind; the teacher's states are the
    student's, moved by a part of their size."""
    h, w = realistic.realistic_head(N, H, V, 0, np.float32, realistic.POLICIES["on_policy"])
    noise = np.random.default_rng(1).standard_normal(h.shape, np.float32)
    return h, w, h + move * np.linalg.norm(h, axis=1, keepdims=True) / np.sqrt(H) * noise


def step(sparse: Any, kind: str, h: Any, head: Any, th: Any, tw: Any, mask: Any = None, **more: Any) -> Any:
    """``((loss, metrics), (dH, dhead))``; two chunks."""

    def loss(h: Any, head: Any) -> Any:
        d = L.Distillation(divergence=kind)  # type: ignore[arg-type]
        options = L.Options(sparse_backward=sparse, chunk_size=64)
        return L.linear_distillation_loss(
            h[None], head, th[None], tw, mask=mask, distillation=d, options=options, **more
        )

    f = jax.value_and_grad(loss, (0, 1), has_aux=True)
    return jax.jit(f)(h, head) if "sharding" in more else by_numpy(f, h, head)


def error(got: Any, want: Any) -> float:
    return float(np.linalg.norm(f64(got) - f64(want)) / np.linalg.norm(f64(want)))


@pytest.mark.parametrize("kind", KINDS)
def test_within_the_contract(kind: str) -> None:
    """bfloat16: no further from the exact gradient than 1.5 times the exact path's own rounding; fewer columns."""
    h, w, th = (jnp.asarray(x, jnp.bfloat16) for x in states())
    wide = [x.astype(jnp.float32) for x in (h, w, th)]
    _, truth = step("off", kind, *wide, wide[1])
    (exact, _), ordinary = step("off", kind, h, w, th, w)
    (value, metrics), got = step("auto", kind, h, w, th, w)
    logged = L.metric_values(metrics)
    assert value == exact
    assert logged["dense_chunks"] == 0 and logged["active_columns"] < 0.25 and logged["hard_rows"] < 0.5
    assert 0 < logged["left_out_mass_max"] <= 2**-8
    for name, a, b, c in zip(("dH", "dW"), got, ordinary, truth, strict=True):
        assert error(a, c) <= 1.5 * error(b, c), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_of_a_row(kind: str) -> None:
    """Under an identity head dH is dlogits: in each row the sum of what is missing, and of the mean row in its place,
    is at most twice the tolerance of the row's scale."""
    tolerance, vocab = 2**-5, 512
    rng = np.random.default_rng(2)
    x = rng.standard_normal((N, vocab)).astype(np.float32)
    x[:, :30] += 7.5  # columns that carry most of every row
    x[:40, 3] += 30  # rows that one column dominates on both sides
    t = (x + rng.standard_normal(x.shape)).astype(np.float32)
    eye = L.Head(jnp.eye(vocab), layout="vh")
    run = functools.partial(step, kind=kind, h=x, head=eye, th=t, tw=eye)
    _, (exact, _) = run("off")
    (_, metrics), (got, _) = run(tolerance)
    logged = L.metric_values(metrics)
    assert logged["dense_chunks"] == 0 and 0 < logged["left_out_mass_max"] <= tolerance
    size = np.abs(f64(exact)).sum(1).reshape(2, -1)
    whole = np.sqrt((size**2).mean(1, keepdims=True))
    scale = np.maximum(size, 4 * whole).reshape(-1)
    missing = np.abs(f64(got) - f64(exact)).sum(1)
    assert missing.max() > 0.1 * tolerance * scale.max() and np.all(missing <= 2.001 * tolerance * scale)


def test_the_share_that_a_row_leaves_out() -> None:
    """Relative to the row's own gradient in the first row; in the others to four root mean squares of the rows with a
    gradient, which is more. The last row counts nowhere."""
    n, vocab = 40, 2048
    dx = 1e-6 * np.random.default_rng(7).standard_normal((n, vocab)).astype(np.float32)
    dx[:, 5:40] += np.float32(0.1)
    dx[0], dx[4], dx[-1] = 30 * dx[0], dx[4] / 100, 1000 * dx[-1]
    rows = np.arange(n) < n - 1
    source = Linear(jnp.zeros((n, 4)), HeadArrays(jnp.zeros((vocab, 4)), layout="vh"))
    targets, tolerance, call = jnp.zeros(n, jnp.int32), jnp.float32(2.0**-8), Call("test", vocab)
    p = Problem(source, targets, LogitTransform(), tolerance=tolerance, call=call)
    found = by_numpy(lambda dx: dx_columns.find(chunk_rule(vocab), dx, p, jnp.asarray(rows)), dx)
    active = np.asarray(found.columns.index)[: int(found.columns.count)]
    assert 0 < len(active) < vocab and not found.columns.dense
    inside = np.isin(np.arange(vocab), active)
    own = np.abs(f64(dx)).sum(1)
    scale = np.maximum(own, 4 * np.sqrt((own[rows] ** 2).mean()))
    assert scale[0] == own[0] and (scale[1:-1] > own[1:-1]).all()
    want = np.where(rows, np.abs(f64(dx))[:, ~inside].sum(1) / scale, 0.0)
    np.testing.assert_allclose(found.columns.left_out, want, rtol=1e-5)
    np.testing.assert_allclose(found.residue, f64(dx)[:, ~inside].sum(1), rtol=1e-4, atol=1e-9)


def test_flat_rows_and_equal_models_are_exact() -> None:
    """A flat student takes all columns, with the bits of the exact path; equal models have no gradient at all."""
    rng = np.random.default_rng(3)
    h, w, th = (rng.standard_normal(s).astype(np.float32) for s in ((N, H), (V, H), (N, H)))
    w *= 0.02
    (_, metrics), got = step("auto", "reverse_kl", h, w, th, w)
    _, want = step("off", "reverse_kl", h, w, th, w)
    assert L.metric_values(metrics)["dense_chunks"] == 1
    assert all(error(a, b) < 1e-6 for a, b in zip(got, want, strict=True))
    h, w, _ = states()
    (value, _), got = step("auto", "reverse_kl", h, w, h, w)
    assert value == 0 and not any(np.any(g) for g in got)


def test_dead_and_unknown_rows() -> None:
    """NaN in masked rows of both models reaches nothing; in a live row of the teacher it makes loss and its row NaN."""
    h, w, th = (x.copy() for x in states())
    mask = np.arange(N)[None] % 3 != 0
    h[~mask[0]], th[~mask[0]] = np.nan, np.nan
    (value, metrics), (dh, dw) = step(2.0**-8, "reverse_kl", h, w, th, w, mask)
    assert np.isfinite(value) and np.isfinite(dw).all() and not np.any(dh[~mask[0]])
    assert L.metric_values(metrics)["dense_chunks"] < 1
    th[1] = np.nan
    (value, _), (dh, _) = step(2.0**-8, "reverse_kl", h, w, th, w, mask)
    assert np.isnan(value) and np.isnan(dh[1]).any() and np.isfinite(dh[2]).all()


def test_the_head_can_have_everything() -> None:
    """Bias, padding, softcap, the [H, V] layout and a frozen head."""
    h, w, th = states()
    bias = (0.1 * np.random.default_rng(4).standard_normal(V)).astype(np.float32)
    student = L.Head(jnp.asarray(w.T.copy()), bias=jnp.asarray(bias), layout="hv", vocab_size=V - 9, softcap=40.0)
    teacher = L.Head(jnp.asarray(w), vocab_size=V)
    _, want = step("off", "jsd", h, student, th, teacher)
    (_, metrics), got = step(2.0**-8, "jsd", h, student, th, teacher)
    assert L.metric_values(metrics)["dense_chunks"] < 1
    assert error(got[0], want[0]) < 2**-7 and error(got[1].weight, want[1].weight) < 2**-7
    assert error(got[1].bias, want[1].bias) < 2**-7

    def frozen(sparse: Any) -> Any:
        d, o = L.Distillation(), L.Options(sparse_backward=sparse, chunk_size=64)
        f = lambda h: L.linear_distillation_loss(h[None], student, th[None], teacher, distillation=d, options=o)[0]  # noqa: E731
        return by_numpy(jax.grad(f), h)

    assert error(frozen(2.0**-8), frozen("off")) < 2**-7


def test_policy_and_exact_kl_together() -> None:
    """A GRPO loss with ``kl="full"`` and an entropy bonus: one row of dlogits from all three."""
    h, w, th = states()
    rng = np.random.default_rng(5)
    y, a = rng.integers(0, V, (1, N)), rng.standard_normal((1, N)).astype(np.float32)
    o = L.Objective(beta=0.5, kl="full", entropy_coef=0.01)

    def grads(sparse: Any) -> Any:
        options = L.Options(sparse_backward=sparse, chunk_size=64)

        def loss(h: Any, w: Any) -> Any:
            return L.linear_grpo_loss(
                h[None], w, y, advantages=a, ref_hidden=th[None], ref_lm_head=states()[1], objective=o, options=options
            )

        return by_numpy(jax.grad(loss, (0, 1), has_aux=True), h, w)

    (got, metrics), (want, _) = grads(2.0**-10), grads("off")
    assert L.metric_values(metrics)["left_out_mass_max"] <= 2**-10
    assert all(error(a, b) < 2**-8 for a, b in zip(got, want, strict=True))


def test_over_devices_and_where_it_is_exact() -> None:
    """Data parallel as on one device; calls that it does not serve say why, and take the exact path."""
    h, w, th = states()
    mesh = jax.make_mesh((4,), ("data",))
    sharding = L.Sharding(mesh, tokens=P(None, "data"))
    (value, _), want = step("off", "forward_kl", h, w, th, w)
    (same, metrics), over = step(2.0**-8, "forward_kl", h, w, th, w, sharding=sharding)
    logged = L.metric_values(metrics)
    assert abs(value - same) < 1e-6 and logged["dense_chunks"] < 1 and 0 < logged["left_out_mass_max"] <= 2**-8
    assert all(error(a, b) < 2**-7 for a, b in zip(over, want, strict=True))

    hidden, head = jax.ShapeDtypeStruct((1, N, H), jnp.float32), jax.ShapeDtypeStruct((V, H), jnp.float32)
    auto = L.Options(sparse_backward="auto")
    served = L.explain(L.linear_distillation_loss, hidden, head, hidden, head, options=auto)
    assert served.exact_because is None and served.matmuls.startswith("2 + 2 K/V per live token")
    late = "gradients come out of the forward pass"
    assert late in (L.explain(L.linear_divergence, hidden, head, hidden, head, options=auto).exact_because or "")
    cut = L.Sharding(jax.make_mesh((4,), ("tensor",)), head=P("tensor", None))
    of = L.explain(L.linear_distillation_loss, hidden, head, hidden, head, options=auto, sharding=cut)
    assert late in (of.exact_because or "")


def test_around_the_row_kernels_of_hopper() -> None:
    """``mosaic_gpu`` makes dlogits by its kernels for two distributions, interpreted here; the columns are the same."""
    h, w, th = (jnp.asarray(x, jnp.bfloat16) for x in states())
    h, teacher, th = h[:16], w, th[:16]

    def grads(backend: str) -> Any:
        options = L.Options(backend=backend, interpret=backend != "chunked", sparse_backward="auto", chunk_size=16)

        def loss(h: Any, w: Any) -> Any:
            return L.linear_distillation_loss(h[None], w, th[None], teacher, options=options)

        return by_numpy(jax.value_and_grad(loss, (0, 1), has_aux=True), h, w)

    ((value, _), want), ((same, metrics), got) = grads("chunked"), grads("mosaic_gpu")
    assert abs(value - same) < 1e-6 and 0 < L.metric_values(metrics)["left_out_mass_max"] <= 2**-8
    assert all(error(a, b) < 1e-3 for a, b in zip(got, want, strict=True))
