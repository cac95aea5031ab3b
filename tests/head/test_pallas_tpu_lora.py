"""LoRA on the head in the TPU kernels, in the interpreter: dH, dA and dB (and dW) against the float64 oracle of the
merged head, and no worse than the same low-rank product in plain JAX."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flat_calls
import logitless
from logitless import Sharding, oracle
from numerics import STATS, assert_contract, cotangents, dense, f64, head_case, plain_stats, three, with_gradient

SCALE = np.float32(-0.5)
"""A power of two: plain JAX rounds ``SCALE * dx``, all of ours ``dx``, and the contract is not about that."""


@dataclasses.dataclass(frozen=True)
class Case:
    """``n`` tokens, every third of which is dead if ``masked``; ``every``: bias, softcap, a temperature per token and
    padding. A coupled call has cotangents of all three statistics (dH by a sweep), the others of ``logp`` alone."""

    layout: str
    dtype: str = "bfloat16"
    rank: int = 5
    frozen: bool = True
    coupled: bool = False
    masked: bool = False
    every: bool = False
    n: int = 40


CASES = {
    "the head frozen": Case("vh"),
    "[H, V], all trained, every option, dead tokens": Case("hv", frozen=False, coupled=True, masked=True, every=True),
    "all trained, every option, dead tokens": Case("vh", frozen=False, masked=True, every=True),
    "[H, V], the head frozen, one token": Case("hv", n=1),
    "all cotangents": Case("vh", coupled=True),
    "float32, more than 128 ranks": Case("vh", "float32", rank=130, frozen=False),
    "[H, V], float32, dead tokens": Case("hv", "float32", masked=True),
}
FEW = ("[H, V], all trained, every option, dead tokens",)


def inputs(c: Case) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """``(what is trained, the other arguments, targets)``."""
    vocab, real = 300, 261 if c.every else 300
    case = head_case(4, (c.n,), 128, vocab, c.dtype)
    rng = np.random.default_rng(5)
    h, w = case.parameters(c.layout)
    trained = {
        "h": h,
        "a": jnp.asarray(0.3 * rng.standard_normal((w.shape[0], c.rank)) / np.sqrt(c.rank), w.dtype),
        "b": jnp.asarray(0.3 * rng.standard_normal((c.rank, w.shape[1])), w.dtype),
    }
    rest: dict[str, Any] = {}
    if c.every:
        trained["bias"] = jnp.asarray(rng.standard_normal(vocab).astype(np.float32))
        temperature = jnp.asarray(rng.uniform(0.5, 1.5, c.n).astype(np.float32))
        rest = dict(temperature=temperature, softcap=8.0, vocab_size=real)
    if c.masked:
        rest["mask"] = jnp.arange(c.n) % 3 != 1
        trained["h"] = jnp.where(rest["mask"][:, None], h, jnp.nan)  # dead tokens may hold anything
    (rest if c.frozen else trained)["w"] = w
    return trained, rest, jnp.asarray(case.targets % real)


@pytest.mark.parametrize("name", [k if k in FEW else pytest.param(k, marks=pytest.mark.slow) for k in CASES])
def test_contract(name: str) -> None:
    c = CASES[name]
    trained, rest, y = inputs(c)
    g = cotangents(np.random.default_rng(6), (c.n,))[: 3 if c.coupled else 1]
    options = {k: v for k, v in rest.items() if k != "w"}

    def fused(trained: dict[str, Any]) -> Any:
        t = {**rest, **trained}
        s = flat_calls.linear_logprobs(
            t["h"], t["w"], y, lora=(t["a"], t["b"]), lora_scale=SCALE, bias=t.get("bias"), head_layout=c.layout,
            backend="pallas_tpu", interpret=True, **options,
        )  # fmt: skip
        return three(s)[: len(g)]

    def plain(trained: dict[str, Any]) -> Any:
        t = {**rest, **trained}
        down, up = (t["b"], t["a"]) if c.layout == "vh" else (t["a"], t["b"])
        h = t["h"] if "mask" not in t else jnp.where(t["mask"][:, None], t["h"], jnp.zeros((), t["h"].dtype))
        low = dense(h, down, None, c.layout).astype(h.dtype)
        x = dense(h, t["w"], t.get("bias"), c.layout) + SCALE * dense(low, up, None, c.layout)
        return plain_stats(x, y, **options)[: len(g)]

    out, (found,) = with_gradient(fused, trained, g=g)
    plain_out, (expected,) = with_gradient(plain, trained, g=g)
    t = {**rest, **trained}
    merged = f64(t["w"]) + float(SCALE) * f64(t["a"]) @ f64(t["b"])
    same = dict(options, bias=t.get("bias"), head_layout=c.layout)
    known = oracle.linear_token_stats(t["h"], merged, y, **same)
    every = [np.asarray(x) for x in g] + [np.zeros(c.n)] * (3 - len(g))
    dh, dw, db = oracle.linear_token_stats_vjp(t["h"], merged, y, *every, **same)
    truth = {
        "h": dh,
        "w": dw,
        "bias": db,
        "a": float(SCALE) * dw @ f64(t["b"]).T,
        "b": float(SCALE) * f64(t["a"]).T @ dw,
    }
    for stat, u, v in zip(STATS, out, plain_out, strict=False):
        assert_contract(stat, u, v, getattr(known, stat), 8)
    for key, value in found.items():
        assert value.dtype == trained[key].dtype
        assert_contract(f"d{key}", value, expected[key], truth[key], 8)


@pytest.mark.parametrize(
    "tokens, head", [pytest.param(P("x"), P("x", None), marks=pytest.mark.slow), (P(), P("x", None))]
)
def test_over_a_mesh(tokens: P, head: P) -> None:
    """Vocabulary-parallel, each device has its own part of dlow: dB must count it once. FSDP: gathered factors."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rng = np.random.default_rng(7)
    h, w = (jnp.asarray(rng.standard_normal(s) / 8, jnp.float32) for s in ((2, 4, 128), (300, 128)))
    a, b = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((300, 3), (3, 128)))
    y, mask = jnp.asarray(rng.integers(0, 300, (2, 4))), jnp.asarray([[True] * 4, [True, False, True, False]])

    def f(h: Any, w: Any, a: Any, b: Any, sharding: Any = None) -> Any:
        h = jnp.where(mask[..., None], h, jnp.nan)
        return logitless.linear_grpo_loss(
            h,
            logitless.Head(w, lora=(a, b), lora_scale=0.5),
            y,
            advantages=jnp.asarray([1.0, -0.5]),
            mask=mask,
            sharding=sharding,
            options=logitless.Options(backend="pallas_tpu", interpret=True),
        )[0]

    sharding = Sharding(mesh, tokens=tokens, head=head)
    got, expected = (
        jax.jit(jax.value_and_grad(lambda *x, s=s: f(*x, sharding=s), (0, 1, 2, 3)))(h, w, a, b)
        for s in (sharding, None)
    )
    for u, v in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(u, v, rtol=0, atol=2e-5 * max(float(jnp.abs(v).max()), 0.1))
        assert float(jnp.abs(v).max()) > 0 or v.ndim == 0


def test_explain_prices_it() -> None:
    h, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 1024, 4096), (151936, 4096)))
    lora = tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((151936, 16), (16, 4096)))
    given = dict(backend="pallas_tpu", interpret=True)
    with_lora, without = (logitless.explain(flat_calls.linear_grpo_loss, h, w, lora=x, **given) for x in (lora, None))
    assert with_lora.matmuls == "4 (3 with LoRA trained and the head frozen, 2 with both frozen, 1 without a gradient)"
    assert "no merged head" in with_lora.way and "LoRA" not in without.way
    assert with_lora.described.counts == without.described.counts
    # The factors' bytes, in whole lanes: the outer one is read with every tile of the head.
    assert with_lora.bytes_moved != without.bytes_moved
