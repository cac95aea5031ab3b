"""Log-probabilities at ids of each token (``ids=``) and a softmax over given ids (``support=``) against float64."""

from __future__ import annotations

import functools
import unittest.mock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
import logitless as L
from interpreted import by_numpy
from logitless import oracle
from logitless.core.compat import mosaic_gpu_reason
from logitless.lab.plan.chips import as_if_on, chip_of
from logitless.logits.mosaic_gpu import backend as row_kernel
from numerics import BACKENDS, FAMILIES, assert_contract, f64, transformed, truth_of, with_gradient

N, H, V, K = 13, 16, 211, 9
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "transformed": dict(scale=1.3, softcap=25.0, vocab_size=V - 7, temperature=np.linspace(0.5, 2.0, N, dtype="f4")),
}


def some_ids(rng: np.random.Generator, targets: np.ndarray, vocab: int, k: int = K) -> np.ndarray:
    """Distinct ids, the target among them in even rows, ragged by -1; none in row 2, all but one -1 in row 3."""
    ids = np.stack([rng.permutation(vocab)[:k] for _ in targets]).astype(np.int32)
    for i, y in enumerate(targets):
        there = np.flatnonzero(ids[i] == y)
        if i % 2 == 0 and not there.size:
            ids[i, i % k] = y
        elif i % 2 and there.size:
            ids[i, there] = -1
    ids[4:7, k // 2 :] = -1
    ids[2], ids[3, 1:] = -1, -1
    return ids


def case(family: str, vocab: int = V, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and targets within ``vocab``."""
    rows = FAMILIES[family](np.random.default_rng(seed), N, vocab)
    z = np.zeros((N, V), np.float32)
    z[:, :vocab] = rows.logits
    return z, rows.targets.astype(np.int32)


def plain_selected(x: Any, ids: Any, options: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """What one writes without this library: ``log_softmax``, ``take_along_axis``, sums."""
    z = transformed(x, options)
    lp = jax.nn.log_softmax(z)
    logp = jnp.where(ids < 0, 0.0, jnp.take_along_axis(lp, jnp.maximum(ids, 0), axis=1))
    inside = (
        jnp.zeros(z.shape, bool).at[jnp.arange(len(ids))[:, None], jnp.where(ids < 0, V, ids)].set(True, mode="drop")
    )
    mass = jnp.sum(jnp.where(inside, jnp.exp(lp), 0.0), axis=1)
    rest = jax.nn.logsumexp(jnp.where(inside, -jnp.inf, lp), axis=1)
    return logp, jax.nn.logsumexp(z, axis=-1), mass, rest


def drawn(family: str, options: str, seed: int) -> tuple[dict[str, Any], np.random.Generator, Any, Any, np.ndarray]:
    """``(options, generator, logits, targets, ids)`` of a case."""
    if family in ("-inf columns", "extreme") and options == "transformed":
        pytest.skip("a softcap gives -inf logits a mass, and has no slope in float32 at 1e4")
    chosen, rng = OPTIONS[options], np.random.default_rng(seed)
    columns = chosen.get("vocab_size", V)
    x, y = case(family, columns)
    return chosen, rng, x, y, some_ids(rng, y, columns)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_and_gradients_at_ids(backend: str, family: str, options: str) -> None:
    """Random cotangents of the log-probabilities, of lse, mass and ``log_rest`` at once."""
    chosen, rng, x, y, ids = drawn(family, options, seed=1)
    g = tuple(rng.standard_normal(s).astype(np.float32) for s in ((N, K), (N,), (N,), (N,)))
    g[0][2::3] = 0.0  # tokens that only the other three move

    def ours(x: Any) -> Any:
        s = flat_calls.logprobs(x, y, ids=ids, backend=backend, **chosen)
        return s.selected.logp, s.lse, s.selected.mass, s.selected.log_rest

    made, (dx,) = with_gradient(ours, x, g=g, compiled=backend == "chunked")
    base, (dbase,) = with_gradient(lambda x: plain_selected(x, ids, chosen), x, g=g, compiled=False)
    own = {k: v for k, v in truth_of(chosen).items() if k != "temperature"}
    rows, t = oracle.logits_rows(x, **own), chosen.get("temperature")
    truth = oracle.selected_logprobs(rows, ids, temperature=t)
    for name, a, b in zip(("logp", "lse", "mass", "log_rest"), made, base, strict=True):
        assert_contract(name, a, b, getattr(truth, name))
    want = oracle.selected_logprobs_vjp(rows, ids, *map(f64, g), temperature=t).inputs
    assert_contract("dlogits", dx, np.where(np.isfinite(f64(dbase)), f64(dbase), 0.0), want)


@pytest.mark.parametrize("family", ["collapsed", "peaked"])
def test_a_collapsed_row_keeps_its_digits_at_ids_too(family: str) -> None:
    """The log-probability of a leading id, the mass around it and their gradients, relative to each row."""
    x, y = case(family)
    ids = np.concatenate([y[:, None], (y[:, None] + np.arange(1, 4)) % V], axis=1)
    other = (y + 7) % V  # the leading column is not the target
    g = np.zeros((N, 4), np.float32)
    g[:, 0] = 1.0

    def ours(x: Any) -> Any:
        s = flat_calls.logprobs(x, other, ids=ids, backend="chunked")
        return s.selected.logp, s.selected.log_rest

    (logp, rest), (dx,) = with_gradient(ours, x, g=(g, np.zeros(N, np.float32)), compiled=False)
    rows = oracle.logits_rows(x)
    truth = oracle.selected_logprobs(rows, ids)
    np.testing.assert_allclose(logp[:, 0], truth.logp[:, 0], rtol=3e-5)
    np.testing.assert_allclose(rest, truth.log_rest, rtol=1e-5)
    want = oracle.selected_logprobs_vjp(rows, ids, f64(g)).inputs
    seen = np.abs(want).max(axis=1) > 1e-30
    size = np.linalg.norm(want[seen], axis=1)
    assert (np.linalg.norm(f64(dx)[seen] - want[seen], axis=1) <= 1e-4 * size).all()


def test_the_rest_has_a_gradient_beyond_the_range_of_float32() -> None:
    """All but 1e-52 of the mass lies at the ids: the gradient of ``log_rest`` outside them is a softmax of its own."""
    x = np.zeros((1, 6), np.float32)
    x[0, 2] = 120.0

    def rest(x: Any) -> Any:
        return jnp.sum(flat_calls.logprobs(x, [4], ids=np.array([[2, 0]]), backend="chunked").selected.log_rest)

    want = oracle.selected_logprobs_vjp(oracle.logits_rows(x), [[2, 0]], None, None, None, [1.0]).inputs
    np.testing.assert_allclose(by_numpy(jax.grad(rest), x), want, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_softmax_over_a_support(backend: str, family: str, options: str) -> None:
    """Values and gradients; a token without ids has the whole vocabulary."""
    chosen, rng, x, y, support = drawn(family, options, seed=2)
    for i in range(N):
        if (support[i] != -1).any() and y[i] not in support[i]:
            support[i, 0] = y[i]
    g = tuple(rng.standard_normal(N).astype(np.float32) for _ in range(3))

    def ours(x: Any) -> Any:
        s = flat_calls.logprobs(x, y, support=support, backend=backend, **chosen)
        return s.logp, s.entropy, s.lse

    def plain(x: Any) -> Any:
        z = transformed(x, chosen)
        rows, at = jnp.arange(N)[:, None], jnp.where(support < 0, V, support)
        inside = jnp.zeros(z.shape, bool).at[rows, at].set(True, mode="drop") | (support < 0).all(1)[:, None]
        z = jnp.where(inside, z, -jnp.inf)
        lp = jax.nn.log_softmax(z)
        entropy = -jnp.sum(jnp.exp(lp) * jnp.where(jnp.isfinite(lp), lp, 0.0), axis=-1)
        return jnp.take_along_axis(lp, y[:, None], axis=1)[:, 0], entropy, jax.nn.logsumexp(z, axis=-1)

    made, (dx,) = with_gradient(ours, x, g=g, compiled=backend == "chunked")
    base, (dbase,) = with_gradient(plain, x, g=g, compiled=False)
    own = {k: v for k, v in truth_of(chosen).items() if k != "temperature"}
    rows, t = oracle.logits_rows(x, **own), chosen.get("temperature")
    truth = oracle.support_token_stats(rows, y, support, temperature=t)
    for name, a, b in zip(("logp", "entropy", "lse"), made, base, strict=True):
        assert_contract(name, a, b, getattr(truth, name))
    want = oracle.support_token_stats_vjp(rows, y, support, *map(f64, g), temperature=t).inputs
    assert_contract("dlogits", dx, np.where(np.isfinite(f64(dbase)), f64(dbase), 0.0), want)
    limited = (support != -1).any(1)
    outside = np.ones((N, V), bool)
    np.put_along_axis(outside, np.maximum(support, 0), False, axis=1)
    assert not f64(dx)[outside & limited[:, None]].any()


# -- from hidden states ----------------------------------------------------------------------------------------------


def states(seed: int = 0, dtype: Any = jnp.float32) -> tuple[Any, Any, np.ndarray]:
    rng = np.random.default_rng(seed)
    h = jnp.asarray(rng.standard_normal((N, H)), dtype)
    return h, jnp.asarray(rng.standard_normal((V, H)), dtype), rng.integers(0, V, N).astype(np.int32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_from_hidden_states_with_mask_and_nan_in_dead_tokens(backend: str, dtype: Any) -> None:
    h, w, y = states(dtype=dtype)
    rng = np.random.default_rng(3)
    ids, mask = some_ids(rng, y, V), rng.random(N) < 0.7
    h = h.at[np.flatnonzero(~mask)].set(jnp.nan)
    g = tuple(rng.standard_normal(s).astype(np.float32) for s in ((N, K), (N,), (N,)))

    def ours(h: Any, w: Any) -> Any:
        s = flat_calls.linear_logprobs(
            h, w, y, ids=ids, mask=mask, backend=backend, chunk_size=4 if backend == "chunked" else None
        )
        return s.selected.logp, s.lse, s.selected.mass

    def plain(h: Any, w: Any) -> Any:
        @jax.custom_vjp
        def dense(h: Any, w: Any) -> Any:
            return jnp.dot(h, w.T, preferred_element_type=jnp.float32)

        def back(saved: Any, dx: Any) -> Any:
            h, w = saved
            dx = dx.astype(h.dtype)
            f32 = dict(preferred_element_type=jnp.float32)
            return jnp.dot(dx, w, **f32).astype(h.dtype), jnp.dot(dx.T, h, **f32).astype(w.dtype)

        dense.defvjp(lambda h, w: (dense(h, w), (h, w)), back)
        x = dense(jnp.where(mask[:, None], h, 0.0), w)
        out = plain_selected(x, ids, {})[:3]
        return tuple(jnp.where(mask.reshape(-1, *(1,) * (o.ndim - 1)), o, 0.0) for o in out)

    made, grads = with_gradient(ours, h, w, g=g, compiled=backend == "chunked")
    base, plain_grads = with_gradient(plain, h, w, g=g, compiled=False)
    rows = oracle.linear_rows(f64(h), f64(w))
    truth = oracle.selected_logprobs(rows, ids, mask=mask)
    for name, a, b in zip(("logp", "lse", "mass"), made, base, strict=True):
        assert_contract(name, a, b, getattr(truth, name))
    want = oracle.selected_logprobs_vjp(rows, ids, *map(f64, g), mask=mask)
    assert_contract("dH", grads[0], plain_grads[0], want.inputs)
    assert_contract("dW", grads[1], plain_grads[1], want.head)
    assert not f64(made[0])[~mask].any() and not f64(grads[0])[~mask].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_id_given_twice_has_its_value_twice_and_its_mass_once(backend: str) -> None:
    h, w, y = states(4)
    rng = np.random.default_rng(4)
    once = np.stack([rng.permutation(V)[:4] for _ in range(N)]).astype(np.int32)
    twice = once[:, [0, 1, 1, 2, 3, 0]]
    g = rng.standard_normal((N, 6)).astype(np.float32)

    def at(ids: Any) -> Any:
        def f(h: Any, w: Any) -> Any:
            s = flat_calls.linear_logprobs(h, w, y, ids=ids, backend=backend)
            return s.selected.logp, s.selected.mass

        return f

    m = rng.standard_normal(N).astype(np.float32)
    (logp, mass), grads = with_gradient(at(twice), h, w, g=(g, m), compiled=False)
    folded = np.stack([g[:, 0] + g[:, 5], g[:, 1] + g[:, 2], g[:, 3], g[:, 4]], axis=1)
    (own, own_mass), own_grads = with_gradient(at(once), h, w, g=(folded, m), compiled=False)
    np.testing.assert_allclose(logp, np.asarray(own)[:, [0, 1, 1, 2, 3, 0]], rtol=1e-6)
    np.testing.assert_allclose(mass, own_mass, rtol=1e-6)
    for a, b in zip(grads, own_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_other_statistics_are_those_of_the_call_without_ids() -> None:
    """Entropy and the rest, with their gradients, and the target's log-probability as that of an id."""
    h, w, y = states(5)
    rng = np.random.default_rng(5)
    ids = some_ids(rng, y, V)
    g = tuple(rng.standard_normal(N).astype(np.float32) for _ in range(3))

    def f(h: Any, w: Any, **more: Any) -> Any:
        s = flat_calls.linear_logprobs(h, w, y, backend="chunked", chunk_size=5, **more)
        return (s.logp, s.entropy, s.lse), s

    def pulled(h: Any, w: Any, **more: Any) -> Any:
        made, pull, stats = jax.vjp(lambda h, w: f(h, w, **more), h, w, has_aux=True)
        return (*made, *pull(g)), stats

    made, stats = by_numpy(lambda h, w: pulled(h, w, ids=ids), h, w)
    own, own_stats = by_numpy(pulled, h, w)
    for a, b in zip(made, own, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    for name in ("max_logit", "log_sum_p2", "is_top1", "max_logp"):
        np.testing.assert_allclose(getattr(stats, name), getattr(own_stats, name), rtol=1e-5, err_msg=name)
    at = ids == y[:, None]
    np.testing.assert_allclose(np.asarray(stats.selected.logp)[at], np.asarray(own_stats.logp)[at.any(1)], rtol=1e-5)
    without = by_numpy(lambda h: flat_calls.linear_logprobs(h, w, ids=ids, backend="chunked"), h)
    np.testing.assert_allclose(without.selected.logp, stats.selected.logp, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_that_name_no_column_make_their_token_nan(backend: str) -> None:
    h, w, y = states(6)
    ids = some_ids(np.random.default_rng(6), y, V)
    ids[0, 0], ids[1, 1] = V, -100
    s = by_numpy(lambda h: flat_calls.linear_logprobs(h, w, y, ids=ids, backend=backend), h)
    bad = np.isnan(np.stack([s.lse, s.selected.mass, *np.asarray(s.selected.logp).T]))
    assert bad[:, :2].all() and not bad[:, 2:].any()
    mask = np.arange(N) > 1
    clean = by_numpy(lambda h: flat_calls.linear_logprobs(h, w, y, ids=ids, mask=mask, backend=backend), h)
    assert np.isfinite(clean.selected.logp).all()
    with pytest.raises(ValueError, match=rf"ids has {V} at \(0, 0\), expected ids in \[0, {V}\) and -1"):
        flat_calls.linear_logprobs(h, w, y, ids=ids, backend=backend, validate=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_target_outside_its_support_is_nan_and_found(backend: str) -> None:
    h, w, y = states(7)
    support = np.stack([y, (y + 1) % V], axis=1)
    support[3, 0] = (y[3] + 2) % V
    s = by_numpy(lambda h: flat_calls.linear_logprobs(h, w, y, support=support, backend=backend), h)
    assert np.isnan(s.logp[3]) and np.isnan(s.entropy[3]) and np.isfinite(np.delete(np.asarray(s.logp), 3)).all()
    with pytest.raises(ValueError, match=rf"the target {y[3]} at \(3,\) is not in its support"):
        flat_calls.linear_logprobs(h, w, y, support=support, backend=backend, validate=True)
    mask = np.arange(N) != 3
    given = dict(support=support, mask=mask, backend=backend, validate=True)
    jax.eval_shape(lambda h: flat_calls.linear_logprobs(h, w, y, **given), h)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_over_supports_is_the_loss_of_their_statistics(backend: str) -> None:
    """Gradients in the forward pass give those of ``policy_loss`` over the statistics, whose oracle is above."""
    rng = np.random.default_rng(8)
    h = rng.standard_normal((3, 5, H)).astype(np.float32)
    w, y = rng.standard_normal((V, H)).astype(np.float32), rng.integers(0, V, (3, 5)).astype(np.int32)
    support = np.concatenate([y[..., None], (y[..., None] + np.arange(1, 6)) % V], axis=-1)
    support[0, 1] = -1
    a, mask = np.array([1.0, -0.5, 0.7], np.float32), rng.random((3, 5)) < 0.8
    rows = oracle.linear_rows(h, w)
    old = oracle.support_token_stats(rows, y, support).logp + 0.1 * rng.standard_normal((3, 5))
    o = L.Objective(entropy_coef=0.01)
    given = dict(advantages=a, mask=mask, old_logp=old.astype(np.float32), objective=o)

    def loss(h: Any, w: Any) -> Any:
        return L.linear_grpo_loss(h, w, y, support=support, options=L.Options(backend=backend), **given)[0]

    def by_statistics(h: Any, w: Any) -> Any:
        s = L.linear_logprobs(h, w, y, support=support, mask=mask, options=L.Options(backend=backend))
        return L.policy_loss(s, **given)[0]

    (value, grads), (want, own) = (by_numpy(jax.value_and_grad(f, (0, 1)), h, w) for f in (loss, by_statistics))
    np.testing.assert_allclose(value, want, rtol=1e-6)
    for x, z in zip(grads, own, strict=True):
        np.testing.assert_allclose(x, z, rtol=1e-4, atol=1e-6)


# -- by the row kernel of Hopper, in Pallas' GPU interpreter ----------------------------------------------------------

WIDE = 256
HOPPER: dict[str, dict[str, Any]] = {
    "plain": {},
    "transformed": dict(
        scale=1.3, vocab_size=WIDE - 7, temperature=np.linspace(0.5, 2.0, N, dtype="f4"),
        bias=np.linspace(-1, 1, WIDE, dtype="f4"),
    ),
    "softcap": dict(softcap=9.0, temperature=0.7),
    "rounded": dict(logits_dtype="bfloat16"),
    "lora": dict(
        lora=(jnp.full((WIDE, 2), 0.3, "bfloat16"), jnp.linspace(-1, 1, 2 * H, dtype="bfloat16").reshape(2, H))
    ),
}  # fmt: skip


@pytest.mark.skipif(mosaic_gpu_reason() is not None, reason=str(mosaic_gpu_reason()))
@pytest.mark.parametrize(  # the others change plain JAX around the kernel
    "options",
    ["transformed", "rounded", *(pytest.param(o, marks=pytest.mark.slow) for o in ("plain", "softcap", "lora"))],
)
def test_on_hopper_the_row_kernel_sums_what_is_outside_the_ids(options: str) -> None:
    """Rows of which the ids have almost all of the mass and rows of which they have none, against float64; with a
    gradient the values are the same to the bit."""
    chosen, rng = HOPPER[options], np.random.default_rng(10)
    h = jnp.asarray(3 * rng.standard_normal((N, H)) / np.sqrt(H), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((WIDE, H)), jnp.bfloat16).at[:, 0].mul(4)
    h = h.at[::2, 0].set(9.0)
    y, vocab = rng.integers(0, WIDE - 7, N).astype(np.int32), chosen.get("vocab_size", WIDE)
    own = {k: v for k, v in truth_of(chosen).items() if k in ("scale", "softcap", "vocab_size", "bias")}
    rows, t = oracle.linear_rows(f64(h), f64(w), **own), chosen.get("temperature")
    ids = some_ids(rng, y, vocab)
    ids[::2] = oracle.top_k(rows, K).ids[::2]
    g = tuple(rng.standard_normal(s).astype(np.float32) for s in ((N, K), (N,), (N,), (N,)))

    def stats(backend: str, h: Any, w: Any) -> Any:
        where = dict(backend=backend, interpret=True) if backend == "mosaic_gpu" else dict(backend=backend)
        return flat_calls.linear_logprobs(h, w, y, ids=ids, chunk_size=8, **where, **chosen)

    def ours(backend: str, h: Any, w: Any) -> Any:
        s = stats(backend, h, w)
        return s.selected.logp, s.lse, s.selected.mass, s.selected.log_rest

    kernel, near = functools.partial(ours, "mosaic_gpu"), 2e-2 if options == "rounded" else 1e-5
    with unittest.mock.patch.object(row_kernel, "token_stats", wraps=row_kernel.token_stats) as launched:
        all_fields = jax.jit(functools.partial(stats, "mosaic_gpu"))(h, w)
    assert launched.called == (options != "softcap")
    reference = by_numpy(functools.partial(stats, "reference"), h, w)
    for a, b in zip(jax.tree.leaves(all_fields), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(f64(a), f64(b), rtol=near, atol=near)
    own_fields = all_fields.selected
    alone = own_fields.logp, all_fields.lse, own_fields.mass, own_fields.log_rest
    made, grads = with_gradient(jax.jit(kernel), h, w, g=g)
    base, base_grads = with_gradient(functools.partial(ours, "reference"), h, w, g=g, compiled=False)
    for a, b in zip(alone, made, strict=True):
        np.testing.assert_array_equal(a, b)
    if options in ("rounded", "lora"):  # which the oracle does not have
        for a, b in zip(grads, base_grads, strict=True):
            np.testing.assert_allclose(f64(a), f64(b), rtol=2e-2, atol=2e-2)
        return
    truth = oracle.selected_logprobs(rows, ids, temperature=t)
    for name, a, b in zip(("logp", "lse", "mass", "log_rest"), made, base, strict=True):
        floor = 30.0 if options == "softcap" else 4.0  # XLA's and NumPy's tanh differ by more than either's error
        assert_contract(name, a, b, getattr(truth, name), floor_ulp=floor)
    want = oracle.selected_logprobs_vjp(rows, ids, *map(f64, g), temperature=t)
    assert_contract("dH", grads[0], base_grads[0], want.inputs)
    assert_contract("dW", grads[1], base_grads[1], want.head)


@pytest.mark.skipif(mosaic_gpu_reason() is not None, reason=str(mosaic_gpu_reason()))
def test_the_backend_on_a_hopper_gpu() -> None:
    h, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8192, 4096), (151936, 4096)))
    ids = jax.ShapeDtypeStruct((8192, 64), jnp.int32)
    with as_if_on(chip_of("h200")):
        said = L.explain(L.linear_logprobs, h, w, ids=ids)
        limited = L.explain(L.linear_logprobs, h, w, support=ids)
    assert said.backend == "mosaic_gpu" and not said.fused_statistics
    assert said.matmuls.startswith("4 (3 with a frozen head, 1 without a gradient)")
    assert limited.backend == "chunked" and "has no kernel for support=" in limited.because


# -- cost, and what is refused ---------------------------------------------------------------------------------------


def test_memory_grows_by_the_ids_alone() -> None:
    """No ``[N, V]`` and no ``[N, K, H]`` array, forwards and backwards."""
    n, h, v, k, chunk = 512, 64, 8192, 64, 32
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((n, h), "f4"), ((v, h), "f4"), ((n,), "i4"), ((n, k), "i4"))]

    def loss(h: Any, w: Any, y: Any, ids: Any) -> Any:
        s = L.linear_logprobs(h, w, y, ids=ids, options=L.Options(backend="chunked", chunk_size=chunk))
        return jnp.sum(jnp.sin(s.selected.logp)) + jnp.sum(s.selected.mass * s.lse)

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()
    own = compiled.memory_analysis()
    assert own is not None
    temporary, rows = own.temp_size_in_bytes, 4 * chunk * v
    assert temporary < min(4 * n * v, 4 * n * k * h) / 2
    # dW in float32, one chunk's logits in whose place the dlogits are, and a few arrays of the ids.
    assert temporary < 4 * v * h + 1.5 * rows + 10 * 4 * n * k


def test_one_matmul_forwards_and_three_backwards() -> None:
    said = L.explain(L.linear_logprobs, jnp.zeros((N, H)), jnp.zeros((V, H)), ids=jnp.zeros((N, K), jnp.int32))
    assert said.backend == "chunked" and said.matmuls.startswith("4 (3 with a frozen head, 1 without a gradient)")


def test_what_cannot_serve_refuses_by_name() -> None:
    h, w, y = states(9)
    ids = np.zeros((N, K), np.int32)
    with pytest.raises(NotImplementedError, match="backend='pallas_tpu' has no kernel for ids="):
        flat_calls.linear_logprobs(h, w, y, ids=ids, backend="pallas_tpu", interpret=True)
    with pytest.raises(NotImplementedError, match="backend='mosaic_gpu' has no kernel for support="):
        flat_calls.linear_logprobs(h, w, y, support=ids, backend="mosaic_gpu", interpret=True)
    with pytest.raises(ValueError, match="ids and support were both given"):
        L.linear_logprobs(h, w, y, ids=ids, support=ids)
    with pytest.raises(ValueError, match=rf"ids has shape \({N},\), expected \({N}, K\)"):
        L.linear_logprobs(h, w, y, ids=y)
    with pytest.raises(TypeError, match="ids has dtype float32, expected an integer dtype"):
        L.linear_logprobs(h, w, y, ids=ids.astype(np.float32))
    said = flat_calls.explain(L.linear_logprobs, h, w, y, ids=ids, sparse_backward="auto")
    assert "exact, and not by a sparse backward: a call with ids= has none" in said.way
