"""Exponentials that the TPU's forward sweep keeps for dW, in the interpreter: the same contract as without them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import logitless
from logitless.core import compat
from logitless.core.problem import Wanted
from logitless.core.stats import LogitTransform, StatCotangents
from logitless.head.pallas_tpu import kernels
from logitless.head.pallas_tpu import tiles as tiling
from logitless.head.pallas_tpu.backend import PallasTpu
from logitless.head.pallas_tpu.tiles import MIB, Tiles
from logitless.lab.plan.chips import as_if_on, chip_of
from numerics import (
    HeadStatics,
    assert_contract,
    assert_same_bits,
    cotangents,
    head_case,
    head_problem,
    head_truth,
    run_head,
)

SMALL = Tiles(tokens=128, vocab=128, vmem_limit=32 * MIB)
WIDE = Tiles(tokens=128, vocab=256, vmem_limit=32 * MIB)


@dataclasses.dataclass(frozen=True)
class Case:
    """``keep`` of ``n`` tokens, the first ``live`` of which count."""

    layout: str
    keep: int
    n: int = 256
    live: int | None = None
    dtype: str = "bfloat16"
    vocab_size: int = 384
    every: bool = False  # bias, softcap, a temperature per token
    lead: float = 0.0


@functools.partial(jax.jit, static_argnums=0)
def run(c: Case, h: Any, w: Any, y: Any, g: Any, transform: LogitTransform, bias: Any) -> dict[str, Any]:
    p = head_problem(
        h, w, y, layout=c.layout, bias=bias, transform=transform, vocab_size=c.vocab_size,
        logits_dtype=jnp.dtype("float32"), interpret=True,
    )  # fmt: skip
    n_live = None if c.live is None else jnp.int32(c.live)
    plain, direction, nothing = kernels.token_stats_and_direction(p, n_live, WIDE)
    stats, same, kept = kernels.token_stats_and_direction(p, n_live, WIDE, keep=c.keep)
    assert nothing is None and kept is not None
    zero = jnp.zeros_like(g)
    g = g if n_live is None else jnp.where(jnp.arange(c.n) < n_live, g, 0.0)
    if c.live is not None:  # among the kept, dead tokens have to be numbers
        p = p.with_hidden(jnp.where((jnp.arange(c.n) < n_live)[:, None], p.h, jnp.zeros((), p.h.dtype)))
    live = None if n_live is None else jnp.maximum(n_live, c.keep)
    head = kernels.dhead_of_kept(p, live, stats, StatCotangents(g, zero, zero), kept, SMALL)
    return {"stats": (plain, direction), "again": (stats, same), "dw": head.weight, "db": head.bias}


CASES = {
    "some, in dW's place": Case("vh", 128, n=300),
    "all, in an array of their own": Case("vh", 256),
    "[H, V], some, padding": Case("hv", 128, n=300, vocab_size=261),
    "[H, V], every option": Case("hv", 128, every=True, live=200, vocab_size=300),
    "every option, dead among the kept": Case("vh", 128, n=300, live=100, every=True, vocab_size=261),
    "float32": Case("vh", 128, dtype="float32", n=200),
    "peaked": Case("vh", 256, lead=50.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_contract(name: str) -> None:
    judge(CASES[name], idle_tile=name.startswith("all"))


def test_several_blocks_in_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block's exponentials are relative to a maximum of its own."""
    monkeypatch.setattr(tiling, "BLOCK", 128)
    judge(Case("vh", 128, n=140, lead=6.0))  # no other case has them, or its program would serve


def judge(c: Case, idle_tile: bool = False) -> None:
    case = head_case(0, (c.n,), 128, 384, c.dtype, lead=c.lead)
    rng = np.random.default_rng(1)
    live = np.arange(c.n) < (c.n if c.live is None else c.live)
    hidden = case.hidden.copy()
    hidden[~live] = np.nan
    case = dataclasses.replace(case, hidden=hidden, targets=case.targets % c.vocab_size)
    g = np.where(live, cotangents(rng, (c.n,))[0], 0).astype(np.float32)
    g[:3] = 0
    g[150:] *= 0 if idle_tile else 1  # a kept tile without a gradient
    options: dict[str, Any] = {"vocab_size": c.vocab_size}
    bias = None
    if c.every:
        bias = rng.standard_normal(384).astype(np.float32)
        options.update(softcap=5.0, temperature=rng.uniform(0.5, 1.5, c.n).astype(np.float32))
    h, w = case.parameters(c.layout)
    y = jnp.asarray(case.targets)
    numbers = [None if options.get(k) is None else jnp.asarray(options[k]) for k in ("temperature", "softcap")]
    out = run(c, h, w, y, jnp.asarray(g), LogitTransform(*numbers), None if bias is None else jnp.asarray(bias))
    assert_same_bits(out["again"], out["stats"])
    traced = {k: v for k, v in options.items() if k != "vocab_size"} | {"mask": live}
    only = (g, np.zeros_like(g), np.zeros_like(g))
    primals = (h, w) if bias is None else (h, w, jnp.asarray(bias))
    _, (_, dw, *db) = run_head(HeadStatics("plain", c.layout, None, c.vocab_size, "float32"), primals, y, only, traced)
    _, (_, true_dw, true_db) = head_truth(case, only, bias=bias, layout=c.layout, mask=live, **options)
    assert out["dw"].dtype == w.dtype
    assert_contract("dW", out["dw"], dw, true_dw)
    if bias is not None:
        floor = 2.0**-12 / 2.0**-23  # summed from exponentials of 16 bits, where the ordinary path sums float32
        assert_contract("dbias", out["db"], db[0], true_db, floor_ulp=floor)


def test_masked_tokens_and_other_cotangents() -> None:
    """Live tokens are swept first, and the same ones are kept; with a cotangent of the entropy nothing kept is used."""
    n, width = 256, 256
    case = head_case(3, (n,), width, 256, "bfloat16")
    rng = np.random.default_rng(4)
    live = rng.random(n) < 0.6
    hidden = case.hidden.copy()
    hidden[~live] = np.nan
    case = dataclasses.replace(case, hidden=hidden)
    h, w = case.parameters("vh")
    y, want, backend = jnp.asarray(case.targets), Wanted(hidden=True, weight=True), PallasTpu()
    g = tuple(np.where(live, x, 0).astype(np.float32) for x in cotangents(rng, (n,)))

    alone = (g[0], np.zeros_like(g[0]), np.zeros_like(g[0]))

    @jax.jit
    def gradients(h: Any, w: Any) -> Any:
        p = head_problem(h, w, y, transform=LogitTransform(), interpret=True)
        p = dataclasses.replace(p, live=jnp.asarray(live)).calling(kept=256)
        out, _, residual = backend.forward(p, want)
        assert residual is not None and residual.kept is not None
        both = (StatCotangents(*map(jnp.asarray, of)) for of in (alone, g))
        found = [backend.backward(p, want, out, of, residual, k == 0) for k, of in enumerate(both)]
        return [(f.hidden, f.head.weight) for f in found]

    plain = HeadStatics("plain", "vh", None, None, "float32")
    for (dh, dw), of in zip(gradients(h, w), (alone, g), strict=True):
        _, (plain_dh, plain_dw) = run_head(plain, (h, w), y, of, {"mask": live})
        _, (true_dh, true_dw, _) = head_truth(case, of, layout="vh", mask=live)
        assert_contract("dH", dh, plain_dh, true_dh)
        assert_contract("dW", dw, plain_dw, true_dw)


def shapes(n: int, width: int, vocab: int, dtype: str = "bfloat16") -> Any:
    h, w = jax.ShapeDtypeStruct((n, width), dtype), jax.ShapeDtypeStruct((vocab, width), dtype)
    return h, w, jax.ShapeDtypeStruct((n,), jnp.int32)


@pytest.mark.parametrize(
    ("n", "width", "vocab", "budget", "kept"),
    [
        (8192, 4096, 151936, None, 0),
        (8192, 4096, 151936, 1 << 28, 4096),  # as many as dW has columns: they cost nothing
        (8192, 4096, 151936, 2 * 6144 * 151936, 6144),
        (8192, 4096, 151936, 3 << 30, 8192),
        (2048, 4096, 151936, 1 << 28, 2048),
        (8192, 4096, 50257, 1 << 28, 0),  # no whole lanes
        (32768, 896, 151936, 1 << 32, 13312),
        (32768, 768, 151936, 1 << 32, 0),  # narrower than what pays
        (100, 4096, 151936, 1 << 28, 0),
    ],
)
def test_how_many_are_kept(n: int, width: int, vocab: int, budget: int | None, kept: int) -> None:
    h, w, y = shapes(n, width, vocab)
    with as_if_on(chip_of("v6e")):
        route = logitless.explain(logitless.linear_logprobs, h, w, y, options=logitless.Options(memory_budget=budget))
    assert route.backend == "pallas_tpu" and route.static.kept == kept
    assert route.described.counts == (4 - kept / n, 2, 1)
    assert ("are kept" in route.way) == (kept > 0 or budget is not None)


def test_plan_prices_what_is_kept() -> None:
    h, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 1024, 4096), (151936, 4096)))
    options: dict[str, Any] = dict(chip="v6e", compile=False)
    none, free, all_kept = (logitless.plan(h, w, memory_budget=b, **options) for b in (None, 1 << 28, 3 << 30))
    assert (none.matmuls, free.matmuls, all_kept.matmuls) == (4, 3.5, 3.0)
    assert free.temporaries == none.temporaries and all_kept.temporaries - free.temporaries == 2 * 8192 * 151936
    frozen, bonus = (
        logitless.plan(h, w, memory_budget=3 << 30, **options, **k)
        for k in ({"gradients": ("hidden",)}, {"objective": logitless.Objective(entropy_coef=0.1)})
    )
    assert (frozen.matmuls, bonus.matmuls) == (2, 5)


def test_two_cores_do_not_write_over_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two cores share the grid, the second keeps nothing here: what it holds is not to take the first one's
    place. The interpreter runs both cores, one after the other."""
    case = head_case(5, (512,), 128, 384, "bfloat16")
    h, w = case.parameters("vh")
    y = jnp.asarray(case.targets)

    def kept(cores: int) -> Any:
        monkeypatch.setattr(compat, "tpu_cores", lambda: cores)
        interpret = pltpu.InterpretParams(num_cores_or_threads=cores, uninitialized_memory="nan")
        p = head_problem(h, w, y, transform=LogitTransform(), interpret=interpret)
        found = jax.jit(lambda: kernels.token_stats_and_terms(p, None, SMALL, keep=128)[2])()
        assert found is not None and found.exponentials.shape == (384, 128 if cores == 1 else 128 + 512)
        return found.exponentials[:, :128]

    assert_same_bits(kept(2), kept(1))
