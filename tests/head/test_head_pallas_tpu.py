"""Fused-head TPU kernels in the TPU interpreter, judged by the float64 oracle and by plain dense JAX (numerics.py)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from logitless.core.backend import Split
from logitless.core.problem import Problem, Wanted
from logitless.core.row_passes import front
from logitless.core.stats import LogitTransform, StatCotangents, TokenStats, factor, finish, masked_stats, merge
from logitless.head.pallas_tpu import backend, forward, kernels
from logitless.head.pallas_tpu import tiles as tiling
from logitless.head.pallas_tpu.backend import PallasTpu
from logitless.head.pallas_tpu.gather_columns import columns_at
from logitless.head.pallas_tpu.tiles import MIB, Tiles, choose
from numerics import (
    STATS,
    HeadStatics,
    assert_contract,
    assert_same_bits,
    cotangents,
    f64,
    head_case,
    head_problem,
    head_truth,
    run_head,
)

SMALL = Tiles(tokens=128, vocab=128, vmem_limit=32 * MIB)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; ``tokens`` and ``vocab`` are ragged against the tiles unless a test says otherwise."""

    n: int = 40
    vocab: int = 300
    dtype: str = "bfloat16"
    layout: str = "vh"
    bias: bool = False
    temperature: float | str | None = None  # a number, or "token"
    softcap: float | None = None
    scale: float | None = None
    vocab_size: int | None = None
    n_live: int | None = None
    logits_dtype: str = "float32"
    lead: float = 0.0
    tiles: Tiles | None = None

    def inputs(self) -> Inputs:
        case = head_case(0, (self.n,), 128, self.vocab, self.dtype, lead=self.lead)
        rng = np.random.default_rng(1)
        live = np.arange(self.n) < (self.n if self.n_live is None else self.n_live)
        hidden, targets = case.hidden.copy(), case.targets
        hidden[~live] = np.nan  # dead tokens may hold anything
        if self.vocab_size is not None:
            targets = targets % self.vocab_size
        options: dict[str, Any] = {"softcap": self.softcap, "scale": self.scale, "vocab_size": self.vocab_size}
        options["temperature"] = self.temperature
        if self.temperature == "token":
            options["temperature"] = rng.uniform(0.5, 1.5, self.n).astype(np.float32)
        options["bias"] = rng.standard_normal(self.vocab).astype(np.float32) if self.bias else None
        g = cotangents(rng, (self.n,))
        g[0][:3], g[1][:3], g[2][:3] = 0, 0, 0  # some tokens have no cotangent at all
        return Inputs(dataclasses.replace(case, hidden=hidden, targets=targets), options, live, g)


@dataclasses.dataclass(frozen=True)
class Inputs:
    case: Any
    options: dict[str, Any]
    live: np.ndarray
    g: tuple[np.ndarray, ...]


def every_kernel(p: Problem, n_live: Any, g: StatCotangents, tiles: Tiles | None = None) -> dict[str, Any]:
    stats = kernels.token_stats(p, n_live, tiles)
    again, (direction, _), _ = kernels.token_stats_and_direction(p, n_live, tiles)
    dh, _ = kernels.dhidden(p, n_live, stats, g, tiles)
    head = kernels.dhead(p, n_live, stats, g, tiles=tiles)
    found = {"stats": stats, "again": again, "direction": direction, "dh": dh.astype(p.h.dtype)}
    return {**found, "dw": head.weight, "db": head.bias}


@dataclasses.dataclass(frozen=True)
class Statics:
    """What :func:`all_kernels` is compiled for, beside shapes: cases that differ in numbers only share a program."""

    layout: str
    vocab_size: int | None
    some_dead: bool
    logits_dtype: str
    tiles: Tiles | None
    interpret: Any


@functools.partial(jax.jit, static_argnums=0)
def all_kernels(
    c: Statics, h: Any, w: Any, y: Any, g: Any, n_live: Any, transform: LogitTransform, bias: Any
) -> dict[str, Any]:
    """Statistics by both forward kernels, the direction, dH, dW and dbias."""
    p = head_problem(
        h, w, y, layout=c.layout, bias=bias, transform=transform, vocab_size=c.vocab_size,
        logits_dtype=jnp.dtype(c.logits_dtype), interpret=c.interpret,
    )  # fmt: skip
    return every_kernel(p, n_live if c.some_dead else None, StatCotangents(*g), c.tiles)


def run(c: Case, i: Inputs, interpret: Any = None) -> dict[str, Any]:
    """Every kernel on one case."""
    h, w = i.case.parameters(c.layout)
    o = {k: None if v is None else jnp.asarray(v, jnp.float32) for k, v in i.options.items() if k != "vocab_size"}
    transform = LogitTransform(o["temperature"], o["softcap"], o["scale"])
    g = tuple(jnp.asarray(x) for x in i.g)
    statics = Statics(
        c.layout, c.vocab_size, c.n_live is not None, c.logits_dtype, c.tiles, interpret or pltpu.InterpretParams()
    )
    return all_kernels(statics, h, w, jnp.asarray(i.case.targets), g, jnp.int32(i.live.sum()), transform, o["bias"])


def judge(c: Case, i: Inputs, out: dict[str, Any], bits: bool = True) -> None:
    """The contract for statistics, dH, dW, dbias and the direction; bit-equality of the two forward kernels."""
    if bits:
        assert_same_bits(out["again"], out["stats"])
    else:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(f64(a), f64(b), rtol=1e-6), out["again"], out["stats"])
    h, w = i.case.parameters(c.layout)
    y, bias = jnp.asarray(i.case.targets), i.options["bias"]
    options = {k: v for k, v in i.options.items() if k != "bias"}
    traced = {k: v for k, v in options.items() if v is not None and k != "vocab_size"} | {"mask": i.live}
    primals = (h, w) if bias is None else (h, w, jnp.asarray(bias))
    statics = HeadStatics("plain", c.layout, None, c.vocab_size, c.logits_dtype)

    def plain(g: tuple[np.ndarray, ...]) -> Any:
        return run_head(statics, primals, y, g, traced)

    g = tuple(np.where(i.live, x, 0).astype(np.float32) for x in i.g)
    values, (dh, dw, *db) = plain(g)
    truth, (t_dh, t_dw, t_db) = head_truth(i.case, g, bias=i.options["bias"], layout=c.layout, mask=i.live, **options)
    stats: TokenStats = out["stats"]
    for name, value in zip(STATS, values, strict=True):
        assert_contract(name, getattr(stats, name), value, getattr(truth, name))
    np.testing.assert_array_equal(stats.is_top1, truth.is_top1)
    for name in ("max_logit", "log_sum_p2"):
        found, known = (np.asarray(getattr(s, name))[i.live] for s in (stats, truth))
        np.testing.assert_allclose(found, known, atol=1e-4 if c.logits_dtype == "float32" else 0.1, err_msg=name)
    assert_contract("dH", out["dh"], dh, t_dh)
    assert_contract("dW", out["dw"], dw, t_dw)
    assert out["dh"].dtype == h.dtype and out["dw"].dtype == w.dtype
    if bias is None:
        assert out["db"] is None
    else:
        assert_contract("dbias", out["db"], db[0], t_db)
    only = (g[0], np.zeros_like(g[0]), np.zeros_like(g[0]))
    _, (dh, *_) = plain(only)
    t_dh = head_truth(i.case, only, bias=i.options["bias"], layout=c.layout, mask=i.live, **options)[1][0]
    by_direction = (jnp.asarray(g[0])[:, None] * out["direction"]).astype(h.dtype)
    assert_contract("dH by direction", by_direction, dh, t_dh)


DEAD_TILES = Case(n=300, n_live=130, bias=True, tiles=SMALL, vocab_size=100, vocab=300)

CASES = {
    "bf16 vh": Case(),
    "bf16 hv": Case(layout="hv"),
    "f32 vh": Case(dtype="float32"),
    "f32 hv, every option": Case(
        dtype="float32", layout="hv", bias=True, temperature="token", softcap=5.0, scale=0.9, vocab_size=261, vocab=515
    ),
    "bf16 vh, every option": Case(bias=True, temperature="token", softcap=5.0, scale=0.9, vocab_size=261, vocab=515),
    "temperature and scale": Case(temperature=0.7, scale=1.3, vocab=256),
    "per-token temperature, bias": Case(layout="hv", temperature="token", bias=True, tiles=SMALL, lead=6.0),
    "padding fills whole tiles": Case(vocab_size=100, vocab=515, tiles=SMALL),
    "bf16 logits": Case(logits_dtype="bfloat16", bias=True),
    "bf16 logits, hv, softcap": Case(logits_dtype="bfloat16", layout="hv", softcap=8.0),
    "ragged tokens": Case(n=200, tiles=SMALL, vocab=130),
    "ragged tokens, hv": Case(n=200, tiles=SMALL, vocab=130, layout="hv", dtype="float32"),
    "dead tiles": Case(n=300, n_live=130, tiles=SMALL, vocab=130),
    "dead tiles, hv": Case(n=300, n_live=100, tiles=SMALL, vocab=130, layout="hv"),
    "one live token": dataclasses.replace(DEAD_TILES, n_live=1),
    "one token": Case(n=1, vocab=128),
    "tiny vocabulary": Case(vocab=7),
    "one token, tiny vocabulary": Case(n=1, vocab=7),
    "ragged tokens, hv, per-token temperature, bias": Case(
        n=200, tiles=SMALL, vocab=130, layout="hv", dtype="float32", temperature="token", bias=True, lead=6.0
    ),
    "dead tiles, padding fills whole tiles": DEAD_TILES,
    "peaked": Case(lead=50.0, dtype="float32"),
    "peaked bf16": Case(lead=50.0, layout="hv"),
}
DEFAULT = (
    *("f32 hv, every option", "bf16 vh, every option", "bf16 logits, hv, softcap", "one token, tiny vocabulary"),
    *("dead tiles, padding fills whole tiles", "peaked bf16"),
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in DEFAULT else [pytest.mark.slow]) for n in CASES])
def test_contract(name: str) -> None:
    c = CASES[name]
    i = c.inputs()
    judge(c, i, run(c, i))


@pytest.mark.parametrize("layout", ["vh", pytest.param("hv", marks=pytest.mark.slow)])
def test_contract_in_parts_of_a_tile(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel with loops over parts of its tiles, four of 32 tokens and two of 128 columns."""
    monkeypatch.setattr(tiling, "LEAST", 32)
    monkeypatch.setattr(tiling, "WORK", 1)
    assert [tiling.parts_of(128, 16, 32), tiling.parts_of(256, 128, 32)] == [4, 2]
    tiles = Tiles(128, 256, 33 * MIB)  # no other case has them, or its program would serve
    c = Case(n=300, n_live=200, layout=layout, bias=True, temperature="token", softcap=8.0, vocab=515, vocab_size=461)
    c = dataclasses.replace(c, tiles=tiles)
    i = c.inputs()
    # XLA's CPU compiler may compile the loops of the two forward kernels differently: an ulp, now and then.
    judge(c, i, run(c, i), bits=False)


@pytest.mark.optimized
@pytest.mark.parametrize("layout", ["vh", pytest.param("hv", marks=pytest.mark.slow)])
def test_contract_in_blocks_of_a_tile(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of two and a half blocks, each block in two pieces and two matmuls, exponentials of 32 rows at a time; the
    last tile ends within its second block."""
    monkeypatch.setattr(tiling, "BLOCK", 256)
    monkeypatch.setattr(tiling, "PIECE", 128)
    monkeypatch.setattr(tiling, "DEPTH", 128)
    monkeypatch.setattr(forward, "_AT_ONCE", 32 * 256)
    tiles = Tiles(128, 640, 34 * MIB)  # no other case has them, or its program would serve
    assert [b.stop for b in tiling.blocks_of(640)] == [256, 512, 640]
    c = Case(n=140, n_live=130, layout=layout, bias=True, temperature="token", softcap=8.0, vocab=1100, vocab_size=1070)
    c = dataclasses.replace(c, tiles=tiles)
    i = c.inputs()
    judge(c, i, run(c, i))


def test_parts_are_equal_whole_and_long_enough() -> None:
    for rows in (8, 128, 384, 640, 896, 1000, 1024):
        for unit in (16, 128):
            n = tiling.parts_of(rows, unit, 256)
            assert n == 1 or (rows % n == 0 and rows // n % unit == 0 and rows // n >= 256)
    assert [tiling.parts_of(rows, 16, 256) for rows in (640, 896, 1024)] == [2, 2, 4]


@pytest.mark.parametrize("layout", ["vh", pytest.param("hv", marks=pytest.mark.slow)])
def test_all_dead(layout: str) -> None:
    c = dataclasses.replace(DEAD_TILES, n_live=0, layout=layout)
    out = run(c, c.inputs())
    for leaf in jax.tree.leaves(out):
        np.testing.assert_array_equal(np.asarray(leaf, np.float32), 0)


@pytest.mark.parametrize("name", ["peaked bf16", pytest.param("peaked", marks=pytest.mark.slow)])
def test_collapsed_targets_keep_their_gradient(name: str) -> None:
    """At a lead of 50 nats, 1 - p_y rounds to 0 in float32; the gradient must not."""
    c = CASES[name]
    i = c.inputs()
    out = run(c, i)
    assert np.all(np.abs(np.asarray(out["direction"])).max(axis=1) > 0)
    assert np.all(np.asarray(out["stats"].logp) < 0)


def test_token_tile_does_not_change_a_bit() -> None:
    i = Case(n=256, vocab=300).inputs()
    h, w = i.case.parameters("vh")
    y, g = jnp.asarray(i.case.targets), StatCotangents(*map(jnp.asarray, i.g))

    @functools.partial(jax.jit, static_argnums=0)
    def by_token(tiles: Tiles, h: Any, w: Any, g: StatCotangents) -> Any:
        p = head_problem(h, w, y, transform=LogitTransform(), interpret=True)
        stats, (direction, _), _ = kernels.token_stats_and_direction(p, None, tiles)
        return stats, direction, kernels.dhidden(p, None, stats, g, tiles)[0]

    assert_same_bits(*(by_token(Tiles(t, 128, 32 * MIB), h, w, g) for t in (256, 128)))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_columns_at_targets_are_exact(dtype: str) -> None:
    rng = np.random.default_rng(0)
    for vocab, n in ((1200, 300), (1024, 128), (100, 5)):
        w = jnp.asarray(rng.standard_normal((128, vocab)), dtype)
        y = jnp.asarray(rng.integers(0, vocab, n).astype(np.int32)).at[0].set(vocab - 1)
        got = jax.jit(columns_at, static_argnums=2)(w, y, pltpu.InterpretParams())
        assert_same_bits(got, w[:, y].T)


def test_bad_targets_are_nan_and_stay_in_their_row() -> None:
    c = CASES["bf16 vh, every option"]
    i = c.inputs()
    i.case.targets[4], i.case.targets[5] = -1, c.vocab_size
    out = run(c, i)
    bad = np.isin(np.arange(c.n), (4, 5))
    for name in ("logp", "entropy", "lse"):
        np.testing.assert_array_equal(np.isnan(getattr(out["stats"], name)), bad)
    np.testing.assert_array_equal(np.isnan(np.asarray(out["dh"], np.float32)).any(axis=1), bad)


@pytest.mark.optimized
def test_no_races() -> None:
    c = Case(n=140, vocab=200, tiles=SMALL, n_live=139, bias=True)
    i = c.inputs()
    judge(c, i, run(c, i, pltpu.InterpretParams(detect_races=True, random_seed=3)))
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    races = interpret_pallas_call.races
    assert races is not None and not races.races_found


def plain_problem(h: Any, w: Any, **options: Any) -> Problem:
    y = jnp.zeros(h.shape[:1], jnp.int32)
    return head_problem(h, w, y, **{"transform": LogitTransform(), **options})


def test_refusals_say_why() -> None:
    h, w = jnp.zeros((8, 128), jnp.bfloat16), jnp.zeros((300, 128), jnp.bfloat16)
    assert PallasTpu().supports(plain_problem(h, w), Split()) is None
    nothing = plain_problem(h, w)
    nothing = nothing.with_head(dataclasses.replace(nothing.head, lora_a=w[:, :0], lora_b=w[:0]))
    for reason, p in (
        ("LoRA of rank 0", nothing),
        ("does not cast", plain_problem(h, w.astype(jnp.float32))),
        ("neither float32 nor bfloat16", plain_problem(h, w, logits_dtype=jnp.dtype(jnp.float16))),
        ("multiple of 128", plain_problem(h[:, :96], w[:, :96])),
        ("is not hv", plain_problem(h, w, layout="hv")),
        ("does not match lm_head", plain_problem(h, w, bias=jnp.zeros((5,)))),
        ("no tokens", plain_problem(h[:0], w)),
    ):
        assert reason in (PallasTpu().supports(p, Split()) or "")


@pytest.mark.parametrize("precision", ["highest", pytest.param("high", marks=pytest.mark.slow), "default"])
def test_kernels_lower_whatever_the_default_precision_is(precision: str) -> None:
    """A kernel that inherited ``jax_default_matmul_precision`` would not lower: bfloat16 has no other precision."""
    for dtype, layout in ((jnp.bfloat16, "vh"), (jnp.bfloat16, "hv"), (jnp.float32, "vh")):

        def program(h: Any, w: Any, g: Any, layout: str = layout) -> Any:
            return every_kernel(plain_problem(h, w, layout=layout), None, StatCotangents(g, g, g))

        shapes = ((128, 128), (256, 128) if layout == "vh" else (128, 256))
        args = (*(jax.ShapeDtypeStruct(s, dtype) for s in shapes), jax.ShapeDtypeStruct((128,), jnp.float32))
        ordinary = jax.jit(program).trace(*args)
        with jax.default_matmul_precision(precision):
            traced = jax.jit(lambda *a, program=program: program(*a)).trace(*args)
            text = traced.lower(lowering_platforms=("tpu",)).as_text()
        assert text.count("tpu_custom_call") >= 4
        assert str(traced.jaxpr) == str(ordinary.jaxpr)  # "highest" lowers, and the TPU's compiler refuses it


def test_two_shards_of_the_vocabulary_are_the_whole() -> None:
    """Sums and directions of shards, dead tokens among them, make the statistics and the residual of one device."""
    c = Case(n=24, vocab=300, temperature="token", softcap=8.0, bias=True)
    i = c.inputs()
    h, w = i.case.parameters("vh")
    live = jnp.arange(c.n) % 3 != 1
    y, bias = jnp.asarray(i.case.targets), jnp.asarray(i.options["bias"])
    t = LogitTransform(jnp.asarray(i.options["temperature"]), jnp.float32(8.0))
    want, tpu = Wanted(True, True), PallasTpu()

    @jax.jit
    def whole_and_parts(h: Any, w: Any) -> Any:
        whole = dataclasses.replace(head_problem(h, w, y, bias=bias, transform=t, interpret=True), live=live)
        parts = []
        for start, stop in ((0, 128), (128, 300)):
            own = jnp.where((y >= start) & (y < stop), y - start, -1)
            p = head_problem(h, w[start:stop], own, bias=bias[start:stop], transform=t, interpret=True)
            parts.append((dataclasses.replace(p, live=live), *tpu.sums(dataclasses.replace(p, live=live), want)))
        stats = masked_stats(finish(merge(parts[0][1], parts[1][1], factor(t)), transform=t), live)
        residuals = [tpu.shard_residual(p, stats, s, x, lambda y: y) for p, s, x in parts]
        made, report, residual = tpu.forward(whole, want)
        f = front(live)
        direction = f.put_back(residual.direction.times(whole, f.take(live.astype(jnp.float32)), jnp.float32))
        return (made, report, direction), (stats, sum(r.direction for r in residuals if r is not None))

    (expected, report, direction), (stats, total) = whole_and_parts(jnp.where(live[:, None], h, jnp.nan), w)
    assert report is None
    for name in STATS:
        np.testing.assert_allclose(getattr(stats, name), getattr(expected, name), rtol=2e-6, atol=2e-6)
    scale = float(jnp.abs(direction).max())
    np.testing.assert_allclose(total, direction, rtol=0, atol=2.0**-8 * scale)  # exponentials are rounded to bfloat16
    assert not np.asarray(total)[~np.asarray(live)].any() and scale > 0


@pytest.mark.long
def test_the_direction_leaves_in_halves_and_dh_is_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """E in two bfloat16 arrays is E to 2^-16; dH, written over the first a part at a time by XLA or by a kernel that
    copies the targets' rows, is dH made at once."""
    c = Case(n=300, vocab=300)  # token tiles of 256, which leave in two parts, and the last one in less than one
    i = c.inputs()
    h, w = i.case.parameters("vh")
    y, g = jnp.asarray(i.case.targets), jnp.asarray(i.g[0])
    live = jnp.arange(c.n) % 3 != 1
    want, tpu = Wanted(True, True), PallasTpu()
    zero = jnp.zeros_like(g)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def both(part: int, least: int, h: Any, w: Any) -> Any:
        monkeypatch.setattr(kernels, "PART", part)
        monkeypatch.setattr(kernels, "LEAST", least)
        p = head_problem(h, w, y, transform=LogitTransform(), interpret=True)
        _, terms, _ = kernels.token_stats_and_terms(p)
        _, _, expected = kernels.token_sums(p, direction=True)
        masked = dataclasses.replace(p, live=live)
        stats, _, residual = tpu.forward(masked, want)
        made = tpu.backward(masked, want, stats, StatCotangents(g, zero, zero), residual, True)
        direction = terms.times(p, jnp.ones_like(g), jnp.dtype(jnp.float32))
        return terms, expected, (terms.times(p, g, h.dtype), made.hidden, made.head.weight, direction)

    terms, expected, at_once = both(4096, 4096, h, w)
    assert terms.high.dtype == terms.rest.dtype == jnp.bfloat16
    error = np.abs(
        np.asarray(terms.high, np.float64) + np.asarray(terms.rest, np.float64) - np.asarray(expected, np.float64)
    )
    assert np.all(error <= 2.0**-16 * np.abs(expected))
    dh = f64(g)[:, None] * f64(at_once[3])
    np.testing.assert_allclose(f64(at_once[0]), dh, rtol=2.0**-7, atol=1e-5 * np.abs(dh).max())
    assert_same_bits(both(64, 4096, h, w)[2], at_once)
    assert_same_bits(both(64, 128, h, w)[2], at_once)


def test_tiles_are_deterministic_and_fit() -> None:
    for kernel in ("forward", "dhidden", "dhead"):
        for hidden in (1024, 2304, 4096, 8192, 12288):
            for vmem in (64 * MIB, 128 * MIB):
                tiles = [choose(kernel, n, (151936, hidden), 2, "hv", vmem) for n in (1, 100, 8192, 70000)]
                assert len({t.vocab for t in tiles}) == 1, "the vocabulary tile must not depend on the number of tokens"
                assert all(t.vmem_limit <= vmem for t in tiles)
    text = backend.describe(plain_problem(jnp.zeros((8, 128)), jnp.zeros((300, 128))))
    assert [text[k]["matmuls"] for k in ("token_stats", "token_stats_and_direction", "dhidden", "dhead")] == [
        1,
        2,
        2,
        2,
    ]
