"""Distillation from a teacher that is known at a few ids of each token, against float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logitless as L
from interpreted import by_numpy
from logitless import oracle
from numerics import assert_contract, f64

B, T, H, V, K = 3, 5, 16, 211, 8
KINDS: dict[str, float | None] = {"forward_kl": None, "reverse_kl": None, "jsd": 0.3}


def case(spread: float = 2.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray, L.TopK]:
    """A student, and the ``K`` likeliest ids of another model, ragged by -1."""
    rng = np.random.default_rng(seed)
    h, other = (spread * rng.standard_normal((B, T, H)) / np.sqrt(H) for _ in range(2))
    w, tw = (rng.standard_normal((V, H)).astype(np.float32) for _ in range(2))
    top = oracle.top_k(oracle.linear_rows(other, tw), K)
    ids = top.ids.astype(np.int32)
    ids[0, 1, K // 2 :], ids[1, 2] = -1, -1
    logp, rest = top.logp.astype(np.float32), None
    if spread > 2:  # 1 - sum q is rounding: the teacher has to say what it left out
        rest = oracle.selected_logprobs(oracle.linear_rows(other, tw), ids).log_rest.astype(np.float32)
    return h.astype(np.float32), w, L.TopK(ids, logp, None, rest)  # type: ignore[arg-type]


def plain(h: Any, w: Any, top: L.TopK, kind: str, mix: float, outside: str) -> Any:
    """What one writes without this library: log_softmax, gather, the other mass as ``log1p(-sum)``."""
    lp = jax.nn.log_softmax(h @ w.T)
    there = top.ids >= 0
    p = jnp.where(there, jnp.take_along_axis(lp, jnp.maximum(top.ids, 0), axis=-1), -jnp.inf)
    q = jnp.where(there, top.logp, -jnp.inf)
    if outside == "tail":
        rest = [jnp.log1p(-jnp.sum(jnp.exp(x), -1)) for x in (p, q)]
        rest[1] = rest[1] if top.log_rest is None else top.log_rest
        p, q = (jnp.concatenate([x, r[..., None]], -1) for x, r in zip((p, q), rest, strict=True))
        there = jnp.concatenate([there, jnp.ones_like(there[..., :1])], -1)
    p, q = (jnp.where(there, x, -1e30) for x in (p, q))
    if outside != "tail":
        p, q = jax.nn.log_softmax(p), jax.nn.log_softmax(q)
    if kind == "forward_kl":
        terms = jnp.exp(q) * (q - p)
    elif kind == "reverse_kl":
        terms = jnp.exp(p) * (p - q)
    else:
        m = jnp.logaddexp(p + jnp.log1p(-mix), q + jnp.log(mix))
        terms = mix * jnp.exp(q) * (q - m) + (1 - mix) * jnp.exp(p) * (p - m)
    return jnp.where(jnp.any(top.ids >= 0, -1), jnp.sum(jnp.where(there, terms, 0.0), -1), 0.0)


def test_the_overlap_with_the_students_own_likeliest() -> None:
    """Over live tokens, of which one has no ids and one has fewer; an id that is given twice counts once."""
    h, w, top = case()
    h = h + np.float32(0.5) * np.random.default_rng(1).standard_normal(h.shape).astype(np.float32)
    mine = oracle.top_k(oracle.linear_rows(h, w), K).ids
    ids = np.array(top.ids)
    ids[..., 1::2] = np.where(ids[..., 1::2] < 0, -1, mine[..., 1::2])  # half of them are the student's own
    mask = np.random.default_rng(2).random((B, T)) < 0.7
    given = dict(teacher=L.TopK(ids, top.logp), mask=mask)
    _, plain = L.linear_distillation_loss(h, w, **given)
    assert "overlap" not in plain
    _, metrics = jax.jit(
        lambda h: L.linear_distillation_loss(h, w, distillation=L.Distillation(overlap=True), **given)
    )(h)
    unique = np.array(
        [[np.where(np.isin(np.arange(K), np.unique(r, return_index=True)[1]), r, -1) for r in b] for b in ids]
    )
    want = oracle.sparse_divergence(oracle.linear_rows(h, w), unique, top.logp).overlap
    np.testing.assert_allclose(metrics["overlap"].sum, want[mask].sum(), rtol=1e-6)
    assert float(metrics["overlap"].count) == mask.sum() and 0.3 < want[mask].mean() < 1
    with pytest.raises(NotImplementedError, match="overlap is for teacher="):
        L.linear_distillation_loss(h, w, h, w, distillation=L.Distillation(overlap=True))


@pytest.mark.parametrize("spread", [2.0, 12.0], ids=["ordinary", "peaked"])
@pytest.mark.parametrize("outside", ["tail", "renormalised"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_loss_gradients_and_metrics(backend: str, kind: str, outside: str, spread: float) -> None:
    """Masked tokens hold NaN everywhere; one live token has no ids."""
    h, w, top = case(spread)
    mask = np.random.default_rng(1).random((B, T)) < 0.8
    mask[1, 2] = True
    clean = h.copy()
    h[~mask] = np.nan
    top.logp[~mask] = np.nan  # type: ignore[index]
    d = L.Distillation(divergence=kind, outside=outside, soft_weight=0.7, mix=KINDS[kind])
    given = dict(teacher=top, mask=mask, distillation=d, options=L.Options(backend=backend))

    def loss(h: Any, w: Any) -> Any:
        return L.linear_distillation_loss(h, w, **given)

    f = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    compiled = backend == "chunked" and outside == "tail" and spread > 2  # where rounding counts most
    (value, metrics), grads = jax.jit(f)(h, w) if compiled else by_numpy(f, h, w)
    mix, share = KINDS[kind] or 0.5, 0.7 / mask.sum()
    teacher = L.TopK(top.ids, np.where(mask[..., None], top.logp, -1.0), None, top.log_rest)  # type: ignore[arg-type]

    def dense(h: Any, w: Any) -> Any:
        x = plain(h, w, teacher, kind, mix, outside)
        return share * jnp.sum(jnp.where(mask, x, 0.0))

    base, plain_grads = by_numpy(jax.value_and_grad(dense, argnums=(0, 1)), clean, w)
    rows, logp = oracle.linear_rows(clean, w), teacher.logp
    how: dict[str, Any] = dict(divergence=kind, mix=mix, outside=outside, mask=mask, teacher_log_rest=top.log_rest)
    truth = oracle.sparse_divergence(rows, top.ids, logp, **how)
    made = oracle.sparse_divergence_vjp(rows, top.ids, logp, share * mask, **how)
    assert_contract("loss", value, base, share * truth.divergence.sum())
    for name, a, b, c in zip(("dH", "dW"), grads, plain_grads, (made.inputs, made.head), strict=True):
        known = np.where(np.isfinite(f64(b)), f64(b), 0.0)
        assert_contract(name, a, known, c)
    assert not f64(grads[0])[~mask].any() and not f64(grads[0])[1, 2].any()
    found = L.metric_values(metrics)
    for name in ("student_mass", "teacher_mass"):
        np.testing.assert_allclose(found[name], getattr(truth, name).sum() / mask.sum(), rtol=1e-5)
    np.testing.assert_allclose(found["divergence"], truth.divergence.sum() / mask.sum(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_that_equals_its_teacher_has_no_distance(kind: str) -> None:
    """Nor a gradient, where the whole rest is known: the tail is that of ``linear_top_k``."""
    h, w, _ = case()
    d = L.Distillation(divergence=kind, mix=KINDS[kind])

    def loss(h: Any, top: L.TopK) -> Any:
        return L.linear_distillation_loss(h, w, teacher=top, distillation=d)[0]

    value, gradient = by_numpy(jax.value_and_grad(loss), h, by_numpy(lambda h: L.linear_top_k(h, w, K), h))
    assert 0 <= value < 1e-12 and np.abs(gradient).max() < 1e-6


def test_the_tail_is_kept_to_its_last_digits() -> None:
    """The teacher has 1e-13 outside its ids, the student 2e-9: in float32 ``1 - sum p`` would be 0 or noise."""
    h, w = np.eye(1, 4, dtype=np.float32)[None], np.zeros((6, 4), np.float32)
    w[:2, 0] = 21.0
    ids, rest = np.array([[[0, 1]]], np.int32), np.array([[np.log(1e-13)]], np.float32)
    logp = np.full((1, 1, 2), np.log(0.5), np.float32)
    d = L.Distillation(divergence="reverse_kl")

    def loss(h: Any) -> Any:
        return L.linear_distillation_loss(h, w, teacher=L.TopK(ids, logp, None, rest), distillation=d)[0]  # type: ignore[arg-type]

    how: dict[str, Any] = dict(divergence="reverse_kl", teacher_log_rest=rest)
    rows = oracle.linear_rows(h, w)
    value, gradient = by_numpy(jax.value_and_grad(loss), h)
    np.testing.assert_allclose(value, oracle.sparse_divergence(rows, ids, logp, **how).divergence.sum(), rtol=1e-4)
    want = oracle.sparse_divergence_vjp(rows, ids, logp, np.ones((1, 1)), **how).inputs
    np.testing.assert_allclose(gradient, want, rtol=1e-3)


def test_a_hard_part_and_a_temperature() -> None:
    h, w, top = case()
    y = np.random.default_rng(3).integers(0, V, (B, T)).astype(np.int32)
    d = L.Distillation(divergence="forward_kl", temperature=2.0, temperature_squared=True, hard_weight=0.25)
    value, metrics = by_numpy(lambda h: L.linear_distillation_loss(h, w, targets=y, teacher=top, distillation=d), h)
    rows = oracle.linear_rows(h, w)
    soft = oracle.sparse_divergence(rows, top.ids, top.logp, temperature=2.0).divergence.mean()
    hard = -oracle.linear_token_stats(h, w, y).logp.mean()
    np.testing.assert_allclose(value, 4 * soft + 0.25 * hard, rtol=1e-5)
    np.testing.assert_allclose(L.metric_values(metrics)["hard_loss"], hard, rtol=1e-5)


def test_what_does_not_fit_is_refused_by_name() -> None:
    h, w, top = case()
    with pytest.raises(ValueError, match="give teacher_hidden and teacher_lm_head, or teacher"):
        L.linear_distillation_loss(h, w)
    with pytest.raises(ValueError, match="teacher and teacher_hidden were both given"):
        L.linear_distillation_loss(h, w, h, w, teacher=top)
    with pytest.raises(TypeError, match="teacher is tuple, expected logitless"):
        L.linear_distillation_loss(h, w, teacher=(top.ids, top.logp))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"teacher\.logp has shape"):
        L.linear_distillation_loss(h, w, teacher=L.TopK(top.ids, top.logp[..., :3]))
    with pytest.raises(ValueError, match=r"teacher\.log_rest has shape .*, the shape of teacher\.ids without its last"):
        L.linear_distillation_loss(h, w, teacher=L.TopK(top.ids, top.logp, log_rest=top.logp))
    with pytest.raises(ValueError, match="outside='renormalised' is for teacher="):
        L.linear_distillation_loss(h, w, h, w, distillation=L.Distillation(outside="renormalised"))
    ids = np.array(top.ids)
    ids[0, 0, 0] = V
    with pytest.raises(ValueError, match=rf"teacher\.ids has {V} at \(0, 0, 0\)"):
        L.linear_distillation_loss(h, w, teacher=L.TopK(ids, top.logp), options=L.Options(validate=True))
    assert np.isnan(by_numpy(lambda h: L.linear_distillation_loss(h, w, teacher=L.TopK(ids, top.logp))[0], h))
    assert "by recompute: the divergence is of" in L.explain(L.linear_distillation_loss, h, w, teacher=top).way
