"""``linear_top_k`` against float64: ids, log-probabilities, the mass that is left, ties, memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logitless as L
from interpreted import by_numpy
from logitless import oracle
from logitless.core.problem import Call, Given, Problem
from logitless.core.stats import LogitTransform
from logitless.core.top_k import largest, top_of_rows
from loss_cases import every_pair
from numerics import BACKENDS, assert_contract, transformed, truth_of

N, H, V = 13, 16, 3001
HEADS: dict[str, dict[str, Any]] = {"plain": {}, "transformed": dict(vocab_size=V - 9, softcap=30.0, scale=1.5)}


def options(backend: str) -> L.Options:
    return L.Options(backend=backend, chunk_size=5 if backend == "chunked" else None)


def states(spread: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states and head; wide logits are sums of quarters' products, which float32 has exactly, ties included."""
    rng = np.random.default_rng(seed)
    h = spread * rng.standard_normal((N, H)) / np.sqrt(H)
    w = rng.standard_normal((V, H))
    h, w = (h, w) if spread < 1 else (np.round(4 * h) / 4, np.round(4 * w) / 4)
    return h.astype(np.float32), w.astype(np.float32)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("spread", [0.01, 3.0, 60.0], ids=["flat", "ordinary", "peaked"])
@pytest.mark.parametrize("k", [1, 7, 64, 256])
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_float64(backend: str, k: int, spread: float, head: str) -> None:
    """Values place by place: near-ties of float64 may have the other order in float32."""
    if spread == 60.0 and head == "transformed":
        spread = 12.0  # the softcap
    h, w = states(spread)
    mask, t = np.arange(N) % 4 != 1, np.linspace(0.5, 2.0, N, dtype="f4")
    clean, h = h.copy(), np.where(mask[:, None], h, np.nan).astype(np.float32)
    head_ = L.Head(w, **HEADS[head])
    top = by_numpy(lambda h: L.linear_top_k(h, head_, k, mask=mask, temperature=t, options=options(backend)), h)
    truth = oracle.top_k(oracle.linear_rows(h, w, **truth_of(HEADS[head])), k, temperature=t, mask=mask)

    def dense(h: Any) -> dict[str, Any]:
        z = transformed(h @ w.T, dict(HEADS[head], temperature=t))
        lp = jax.nn.log_softmax(z)
        logp, ids = jax.lax.top_k(lp, k)
        inside = jnp.zeros(z.shape, bool).at[jnp.arange(N)[:, None], ids].set(True)
        rest = jax.nn.logsumexp(jnp.where(inside, -jnp.inf, lp), axis=1)
        return {"logp": logp, "lse": jax.nn.logsumexp(z, axis=1), "log_rest": rest}

    for name, base in by_numpy(dense, clean).items():
        masked = np.where(mask.reshape(-1, *(1,) * (base.ndim - 1)), base, 0.0)
        # Behind a softcap of 30 at a temperature of 0.5 a rounding of the tanh is worth 60 of a number's.
        assert_contract(name, getattr(top, name), masked, getattr(truth, name), floor_ulp=4 if head == "plain" else 30)
    if spread > 1 and head == "plain":
        np.testing.assert_array_equal(top.ids, truth.ids)
    gaps = np.diff(truth.logp, axis=1, prepend=np.inf, append=-np.inf)
    apart = (np.abs(gaps[:, :-1]) > 1e-4) & (np.abs(gaps[:, 1:]) > 1e-4)
    apart[:, -1] = False  # the next one is not known
    np.testing.assert_array_equal(np.asarray(top.ids)[apart], truth.ids[apart])
    found = np.sort(np.asarray(top.ids)[mask], axis=1)
    assert (np.diff(found, axis=1) > 0).all() and found.max() < HEADS[head].get("vocab_size", V)
    assert not np.asarray(top.ids)[~mask].any()


@pytest.mark.parametrize(
    "width, k, dtype", every_pair([40, 1100, 2049, 5000, 40001], [1, 5, 33], [jnp.float32, jnp.bfloat16])
)
def test_ties_go_to_the_smaller_id(width: int, k: int, dtype: Any) -> None:
    """Few values over many columns, among them rows of one value, of -inf, and with fewer finite columns than k."""
    rng = np.random.default_rng(width + k)
    x = rng.integers(0, 5, (6, width)).astype(np.float32)
    x[1], x[2] = 1.0, -np.inf
    x[3] = -np.inf
    x[3, rng.permutation(width)[:3]] = 2.0
    x[4] = rng.standard_normal(width).astype(dtype)
    want = np.argsort(-x.astype(np.float64), axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(jax.jit(largest, static_argnums=1)(jnp.asarray(x, dtype), k), want)


def rows(x: Any) -> Problem[Given]:
    return Problem(Given(x), jnp.zeros(len(x), jnp.int32), LogitTransform(), call=Call("test", x.shape[1]))


def test_a_nan_reaches_every_log_probability_of_its_row() -> None:
    """Wherever it stands: in the column of a chosen group or in another."""
    x = np.random.default_rng(0).standard_normal((4, 5000)).astype(np.float32)
    for i, column in enumerate((int(np.argmax(x[0])), int(np.argmin(x[1])), 4999)):
        x[i, column] = np.nan
    top = by_numpy(lambda x: top_of_rows(x, rows(x), 7), x)
    assert np.isnan(top.logp[:3]).all() and np.isnan(top.lse[:3]).all() and np.isfinite(top.logp[3]).all()


def test_equal_logits_at_the_edge_are_left_in_the_rest() -> None:
    h, w = np.ones((1, 1), np.float32), np.zeros((50, 1), np.float32)
    w[3] = 1.0
    top, truth = L.linear_top_k(h, w, 4), oracle.top_k(oracle.linear_rows(h, w), 4)
    assert top.ids.tolist() == [[3, 0, 1, 2]]
    np.testing.assert_allclose(top.log_rest, truth.log_rest, rtol=1e-6)
    everything = L.linear_top_k(h, w, 50)
    assert np.isneginf(everything.log_rest).all()


def test_it_gives_what_linear_logprobs_says_of_its_ids() -> None:
    h, w = states(3.0)
    top = by_numpy(lambda h: L.linear_top_k(h, w, 8), h)
    stats = by_numpy(lambda h: L.linear_logprobs(h, w, ids=top.ids), h)
    for name in ("logp", "log_rest"):
        np.testing.assert_allclose(getattr(top, name), getattr(stats.selected, name), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(top.lse, stats.lse, rtol=1e-6)


def test_no_gradient_no_logits_and_refusals() -> None:
    h, w = states(3.0)
    gradient = by_numpy(jax.grad(lambda h: jnp.sum(L.linear_top_k(h, w, 4).logp) + jnp.sum(h)), h)
    np.testing.assert_array_equal(gradient, 1.0)
    n, width, v, chunk = 512, 32, 8192, 32
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((n, width), (v, width))]
    f = jax.jit(lambda h, w: L.linear_top_k(h, w, 16, options=L.Options(backend="chunked", chunk_size=chunk)))
    memory = f.lower(*shapes).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 5 * 4 * chunk * v < 4 * n * v / 3
    with pytest.raises(ValueError, match=rf"k={V + 1}, expected 1 to {V}"):
        L.linear_top_k(h, w, V + 1)
    with pytest.raises(TypeError, match=r"k is 2\.0, expected a Python int"):
        L.linear_top_k(h, w, 2.0)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="backend='pallas_tpu' has no kernel for linear_top_k"):
        L.linear_top_k(h, w, 2, options=L.Options(backend="pallas_tpu", interpret=True))
