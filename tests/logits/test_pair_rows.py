"""The Hopper kernels for two distributions in Pallas' GPU interpreter, against float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logitless as L
from interpreted import by_numpy
from logitless import oracle
from logitless.core.compat import mosaic_gpu_reason
from logitless.core.divergences import Divergence
from logitless.core.peaked_sums import LOW, PeakedSums, joined, merged
from logitless.core.problem import Call, Given, Problem, Teacher
from logitless.core.stats import LogitTransform, StatCotangents
from logitless.logits.mosaic_gpu import pair_rows
from numerics import f64

N, V, VOCAB = 4, 1344, 1340
TARGETS = np.asarray([7, 3, 7, 1000], np.int32)
pytestmark = pytest.mark.skipif(mosaic_gpu_reason() is not None, reason=str(mosaic_gpu_reason()))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six tiles in three parts of a row, the last tile narrower."""
    for name, value in dict(_COLUMNS=256, _LANES=128, _PART=600, _SLOTS=2).items():
        monkeypatch.setattr(pair_rows, name, value)


def rows(lead: float, dtype: str) -> tuple[jax.Array, jax.Array]:
    """A peak that leads by about ``lead`` nats: the teacher's is the same in the first two rows."""
    x, t = 2 * np.random.default_rng(0).standard_normal((2, N, V))
    x[:, 7] += lead
    t[:2, 7] += lead + 0.5
    t[2:, 9] += lead
    return jnp.asarray(x, dtype), jnp.asarray(t, dtype)


def problem(x: Any, t: Any, kind: Divergence, transform: LogitTransform) -> Problem[Given]:
    teacher = Teacher(Given(t), transform, None, kind)
    call = Call("a test", VOCAB, interpret=True)
    return Problem(Given(x), jnp.asarray(TARGETS), transform, None, teacher=teacher, call=call)


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "lead", "dtype", "numbers"),
    [
        ("reverse_kl", 25.0, "float32", {}),
        ("forward_kl", 25.0, "float32", {}),
        ("reverse_kl", 3.0, "bfloat16", {"temperature": 1.3}),
        slow("forward_kl", 3.0, "bfloat16", {"temperature": 1.3}),
        slow("reverse_kl", 10.0, "float32", {"temperature": 0.7, "softcap": 30.0, "scale": 0.9}),
        slow("forward_kl", 10.0, "float32", {"temperature": 0.7, "softcap": 30.0, "scale": 0.9}),
    ],
)
def test_values_and_gradients(kind: Divergence, lead: float, dtype: str, numbers: dict[str, float]) -> None:
    """Rows of dlogits within 1e-6 of their own size at a peak of 25 nats (bent logits 5e-6), for the divergence alone
    and for random cotangents of all statistics."""
    x, t = rows(lead, dtype)
    p = problem(x, t, kind, LogitTransform(**{k: jnp.float32(v) for k, v in numbers.items()}))
    s = pair_rows.statistics(x, p)
    bends = {k: v for k, v in numbers.items() if k != "temperature"}
    both = [oracle.logits_rows(f64(z), vocab_size=VOCAB, **bends) for z in (x, t)]
    about = dict(divergence=kind, temperature=numbers.get("temperature", 1.0), targets=TARGETS)
    truth = oracle.divergence(*both, **about)
    for name in ("divergence", "entropy", "teacher_entropy", "logp"):
        np.testing.assert_allclose(getattr(s, name), getattr(truth, name), rtol=4e-6, atol=1e-6 * (lead < 20))
    rng = np.random.default_rng(1)
    alone = StatCotangents(*[jnp.zeros(N)] * 3, jnp.ones(N))
    mixed = StatCotangents(*[jnp.asarray(rng.standard_normal(N), jnp.float32) for _ in range(4)])
    for g in (alone, mixed):
        d = f64(pair_rows.dlogits(x, p, s, g, dtype))
        want = oracle.divergence_vjp(*both, f64(g.divergence), None, f64(g.entropy), f64(g.logp), **about).inputs
        want = want + oracle.token_stats_vjp(
            f64(x), TARGETS, None, None, f64(g.lse), temperature=about["temperature"], vocab_size=VOCAB, **bends
        )
        error = np.linalg.norm(d - want, axis=1) / np.linalg.norm(want, axis=1)
        assert error.max() <= (4e-3 if dtype == "bfloat16" else 5e-6 if bends else 1e-6)
        assert not d[:, VOCAB:].any()


@pytest.mark.parametrize("kind", ["reverse_kl", slow("forward_kl")])
def test_equal_rows_are_exactly_zero(kind: Divergence) -> None:
    """With a factor, whose products a compiler may contract; and a NaN row that moves nothing stays zero."""
    x, _ = rows(3.0, "float32")
    x = x.at[3, 5].set(jnp.nan)
    p = problem(x, x, kind, LogitTransform(scale=jnp.float32(1.7)))
    s = pair_rows.statistics(x, p)
    assert not np.any(s.divergence[:3]) and np.isnan(s.divergence[3]) and np.isnan(s.logp[3])
    g = StatCotangents(*[jnp.zeros(N)] * 3, jnp.asarray([1.0, -2.0, 0.5, 0.0]))
    assert not np.any(pair_rows.dlogits(x, p, s, g, jnp.bfloat16).astype(jnp.float32))


def test_sums_in_any_order() -> None:
    """Columns joined one by one into lanes, then merged: as one sum in float64. ``-inf`` takes no part, a tie of the
    largest logit leaves out one of the two."""
    rng = np.random.default_rng(2)
    u, o = (3 * rng.standard_normal((2, 40, 16))).astype(np.float32)
    u[3, 2:5], u[0, :] = -np.inf, -np.inf
    u[7, 1] = u[9, 8] = 12.0
    k, k_o = jnp.float32(1.3), jnp.float32(0.8)
    lanes = PeakedSums.none(jnp.zeros(16), jnp.full(16, LOW))
    for row in zip(u, o, strict=True):
        lanes = joined(lanes, *map(jnp.asarray, row), k, k_o)
    got = merged(lanes, k, k_o, jnp.arange(16))
    flat, other = f64(u).ravel(), f64(o).ravel()
    first = 7 * 16 + 1
    assert float(got.peak) == 12.0 and float(got.other) in (np.float32(other[first]), np.float32(other[9 * 16 + 8]))
    s = f64(k) * (flat - 12.0)
    e = np.exp(s)
    s = np.where(e > 0, s, 0.0)
    apart = np.where(e > 0, s - f64(k_o) * (other - float(got.other)), 0.0)
    for name, value in dict(
        rest=e.sum() - 1, centred=(e * s).sum(), squares=(e * e).sum() - 1, cross=(e * apart).sum()
    ).items():
        np.testing.assert_allclose(float(getattr(got, name)), value, rtol=2e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl"])
def test_public_call(kind: Divergence) -> None:
    """A distillation loss of heads whose width no kernel's matmul has."""
    rng = np.random.default_rng(3)
    h, th = (jnp.asarray(rng.standard_normal((1, 5, width)), jnp.float32) for width in (8, 16))
    w, tw = (jnp.asarray(rng.standard_normal((512, width)), jnp.float32) for width in (8, 16))
    mask = jnp.asarray([[1, 1, 0, 1, 1]])

    def run(**options: Any) -> Any:
        def loss(h: Any, w: Any) -> Any:
            d = L.Distillation(divergence=kind, temperature=1.5)
            options_ = L.Options(chunk_size=3, **options)
            return L.linear_distillation_loss(h, w, th, tw, mask=mask, distillation=d, options=options_)[0]

        return jax.value_and_grad(loss, (0, 1))

    loss, d = jax.jit(run(backend="mosaic_gpu", interpret=True))(h, w)
    want, want_d = by_numpy(run(backend="chunked"), h, w)
    np.testing.assert_allclose(float(loss), float(want), rtol=2e-6)
    for a, b in zip(d, want_d, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6 * float(jnp.abs(b).max()))


def test_what_is_not_served() -> None:
    x, t = rows(0.0, "float32")
    p = problem(x, t, "jsd", LogitTransform())
    assert "logsumexps" in str(pair_rows.not_served_because(p, "float32"))
    p = problem(x[:, :1343], t[:, :1343], "reverse_kl", LogitTransform())
    assert "128-byte lines" in str(pair_rows.not_served_because(p, "float32"))
