"""Logits-level TPU kernels in the TPU interpreter, judged by the float64 oracle and by plain JAX (numerics.py)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from logitless import oracle
from logitless.core.problem import Given, Problem
from logitless.core.stats import LogitTransform, StatCotangents, TokenStats
from logitless.core.validation import LossArrays
from logitless.logits import chunked, reference
from logitless.logits.pallas_tpu import backend as pallas_tpu
from logitless.logits.pallas_tpu.rows import step_columns
from logitless.logits.pallas_tpu.tiles import VMEM_BUDGET, tiles_for, vmem_limit
from logitless.objectives.inputs import prepare
from logitless.objectives.objective import Objective
from logitless.objectives.token_program import TokenProgram, token_program
from numerics import EXTRAS, FAMILIES, STATS, assert_contract, assert_same_bits, f64, logits_problem

ROWS = ("ordinary", "collapsed", "extreme", "-inf columns", "shifted up", "peaked")
"""Families of logits that every case mixes, in this order, row by row."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of arguments. Row 4 has no valid target; dead rows are NaN throughout."""

    n: int
    v: int
    dtype: str = "float32"
    temperature: float | str | None = None  # a number, or "token"
    softcap: float | None = None
    scale: float | None = None
    vocab_size: int | None = None
    dead: bool = False
    width: int | None = None  # forces vocabulary tiles

    def __str__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        return "-".join(f"{k}{v}" for k, v in shown.items())

    @property
    def columns(self) -> int:
        return self.vocab_size or self.v

    def tiles(self) -> pallas_tpu.Tiles:
        return tiles_for(self.n, self.v, jnp.dtype(self.dtype), width=self.width)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the kernels take, and the oracle's options for the same."""

    x: jax.Array
    y: jax.Array
    transform: LogitTransform
    vocab_size: int
    live: jax.Array | None
    g: StatCotangents
    options: dict[str, Any]

    def problem(self, **choices: Any) -> Problem[Given]:
        return logits_problem(
            self.x, self.y, self.transform, self.vocab_size, self.live, **{"interpret": True, **choices}
        )


def inputs_of(case: Case) -> Inputs:
    rng = np.random.default_rng(case.n * 7919 + case.v)
    x = np.empty((case.n, case.v))
    y = np.empty(case.n, np.int32)
    for i, name in enumerate(ROWS):
        at = np.arange(i, case.n, len(ROWS))
        if at.size:
            rows = FAMILIES[name](rng, max(at.size, 2), case.columns)
            x[at, : case.columns], y[at] = rows.logits[: at.size], rows.targets[: at.size]
    x[:, case.columns :] = 77.0  # padding columns may hold anything
    if case.n > 6:
        y[4] = case.columns
    live = None
    if case.dead:
        live = np.arange(case.n) % 3 != 1
        x[~live] = np.nan
    temperature: Any = case.temperature
    if temperature == "token":
        temperature = rng.uniform(0.5, 2, case.n).astype(np.float32)
    numbers = {"temperature": temperature, "softcap": case.softcap, "scale": case.scale}
    numbers = {k: np.asarray(v, np.float32) for k, v in numbers.items() if v is not None}
    g = [rng.standard_normal(case.n).astype(np.float32) for _ in range(3)]
    if case.n > 6:
        for c in g:
            c[5] = 0.0
    return Inputs(
        jnp.asarray(x.astype(jnp.dtype(case.dtype))),
        jnp.asarray(y),
        LogitTransform(**{k: jnp.asarray(v) for k, v in numbers.items()}),
        case.columns,
        None if live is None else jnp.asarray(live),
        StatCotangents(*map(jnp.asarray, g)),
        dict(numbers, vocab_size=case.columns, mask=live),
    )


def given_cotangents(g: StatCotangents) -> TokenProgram:
    """An objective whose cotangents are the given ones."""
    return TokenProgram((jnp.float32(2.0),), (g.logp, g.entropy), lambda s, c, lp, h: (s[0] * c[0] / 2, c[1]))


@jax.jit
def dense(p: Problem[Given], g: StatCotangents) -> Any:
    """``(statistics, dlogits)`` by ``core/stats.py`` in plain JAX."""
    s = reference.token_stats(p)
    return s, chunked.dlogits(p, s, g)


@functools.partial(jax.jit, static_argnames="tiles")
def kernels(p: Problem[Given], g: StatCotangents, *, tiles: Any) -> Any:
    """Statistics, dlogits by them, and both in one pass for the cotangents of logp and entropy alone."""
    stats = pallas_tpu.token_stats(p, tiles)
    d = pallas_tpu.dlogits(p, stats, g, tiles)
    return stats, d, pallas_tpu.stats_and_dlogits(p, given_cotangents(g), tiles)


def check_stats(got: TokenStats, plain: TokenStats, truth: Any) -> None:
    max_logp = np.where(truth.is_top1, truth.logp, truth.max_logit - truth.lse)
    for i, family in enumerate(ROWS):
        at = slice(i, None, len(ROWS))
        for name in STATS + EXTRAS:
            wanted = max_logp if name == "max_logp" else getattr(truth, name)
            if wanted[at].size:
                assert_contract(f"{family} {name}", getattr(got, name)[at], getattr(plain, name)[at], wanted[at])
    np.testing.assert_array_equal(np.asarray(got.is_top1), truth.is_top1)


def check_dlogits(case: Case, got: Any, plain: Any, truth: np.ndarray) -> None:
    assert got.dtype == jnp.dtype(case.dtype)
    for i, family in enumerate(ROWS):
        at = (slice(i, None, len(ROWS)), slice(case.columns))
        if truth[at].size:
            assert_contract(f"{family} dlogits", got[at], plain[at], truth[at])
    np.testing.assert_array_equal(f64(got)[truth == 0], 0.0)


CASES = [
    Case(16, 4096 + 77, "bfloat16", temperature="token", vocab_size=4000, dead=True),
    Case(33, 1187, "bfloat16", temperature="token", softcap=20.0, vocab_size=1000, dead=True, width=256),
    Case(7, 300),
    Case(33, 1187, "bfloat16", dead=True),
    Case(16, 12365, temperature=0.7, softcap=30.0, scale=0.5, vocab_size=12300),  # two whole steps and a ragged rest
    Case(7, 12365),
    Case(33, 1187, temperature="token", softcap=20.0, vocab_size=1000, dead=True, width=256),  # last tile: padding
    Case(7, 300, "bfloat16", width=128),
]


@pytest.mark.parametrize("case", [*CASES[:2], *(pytest.param(c, marks=pytest.mark.slow) for c in CASES[2:])], ids=str)
def test_contract(case: Case) -> None:
    i = inputs_of(case)
    p = i.problem()
    plain, plain_d = jax.device_get(dense(p, i.g))
    truth = oracle.token_stats(f64(i.x), np.asarray(i.y), **i.options)
    got, d, (fused, fused_d) = jax.device_get(kernels(p, i.g, tiles=case.tiles()))
    check_stats(got, plain, truth)
    g = (i.g.logp, i.g.entropy, i.g.lse)
    check_dlogits(case, d, plain_d, oracle.token_stats_vjp(f64(i.x), np.asarray(i.y), *map(f64, g), **i.options))

    two = dataclasses.replace(i.g, lse=jnp.zeros_like(i.g.lse))
    assert_same_bits(fused, got, "statistics with and without dlogits: ")
    _, plain_d = jax.device_get(dense(p, two))
    check_dlogits(
        case, fused_d, plain_d, oracle.token_stats_vjp(f64(i.x), np.asarray(i.y), *map(f64, g[:2]), **i.options)
    )


@pytest.mark.parametrize("v", [1, pytest.param(127, marks=pytest.mark.slow), 128])
def test_tiny_vocabularies(v: int) -> None:
    case = Case(1, v)
    i = inputs_of(case)
    plain, plain_d = dense(i.problem(), dataclasses.replace(i.g, lse=jnp.zeros_like(i.g.lse)))
    got, d = jax.jit(lambda p, g: pallas_tpu.stats_and_dlogits(p, given_cotangents(g)))(i.problem(), i.g)
    check_stats(got, plain, oracle.token_stats(f64(i.x), np.asarray(i.y)))
    truth = oracle.token_stats_vjp(f64(i.x), np.asarray(i.y), f64(i.g.logp), f64(i.g.entropy))
    check_dlogits(case, d, plain_d, truth)


def test_nan_shows_only_where_it_counts() -> None:
    """A NaN or an infinity in a live row: NaN statistics; its dlogits are zero where its cotangents are."""
    i = inputs_of(Case(8, 300))
    x = np.array(i.x)
    x[1, 7] = x[2, 9] = np.nan
    x[3, 11] = np.inf
    moves = (np.arange(8) != 2).astype(np.float32)

    @jax.jit
    def run(x: Any, g: StatCotangents) -> Any:
        p = i.problem().with_logits(x)
        stats, d = pallas_tpu.stats_and_dlogits(p, given_cotangents(g))
        return stats, d, pallas_tpu.dlogits(p, stats, g)

    stats, d, separate = run(x, StatCotangents(moves, 0.5 * moves, 0 * moves))
    assert np.isnan(np.asarray(stats.logp)[1:4]).all()
    for rows in (np.asarray(d), np.asarray(separate)):
        assert np.isnan(rows[1]).any() and np.isnan(rows[3]).any()
        np.testing.assert_array_equal(rows[2], 0.0)
        assert np.isfinite(rows[[0, 5, 6, 7]]).all()


def test_objective_in_the_kernel() -> None:
    """A GRPO objective with KL and entropy bonus, traced into the kernel, gives what plain JAX gives."""
    i = inputs_of(Case(6, 300))
    y = jnp.minimum(i.y, 299)
    rng = np.random.default_rng(0)
    old, ref, advantages = (jnp.asarray(rng.standard_normal((1, 6)), jnp.float32) for _ in range(3))
    objective = Objective(beta=0.04, entropy_coef=0.01)
    mask = jnp.asarray([[True, True, False, True, True, True]])
    inputs = prepare(objective, mask, LossArrays(advantages, old - 3, ref - 3))
    program = token_program(objective, jax.tree.map(lambda a: a.reshape(-1), inputs))
    p = dataclasses.replace(i.problem(), targets=y, live=mask[0])
    stats, d = jax.jit(lambda: pallas_tpu.stats_and_dlogits(p, program))()
    plain_stats, plain = jax.jit(lambda: chunked.stats_and_dlogits(p, program))()
    np.testing.assert_allclose(stats.logp, plain_stats.logp, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(d, plain, rtol=2e-5, atol=1e-7)
    assert np.abs(np.asarray(d)).max() > 1e-3


@pytest.mark.parametrize("width", [None, pytest.param(128, marks=pytest.mark.slow)])
def test_no_races(width: int | None) -> None:
    """State carried over a parallel axis shows only when the grid is visited in a random order."""
    i = inputs_of(Case(9, 300, width=width))
    tiles = tiles_for(8, 300, jnp.float32, width=width)  # two blocks of rows
    params = pltpu.InterpretParams(detect_races=True, random_seed=3, num_cores_or_threads=2)
    p = i.problem(interpret=params)
    plain, _ = dense(p, i.g)
    got, d = pallas_tpu.stats_and_dlogits(p, given_cotangents(i.g), tiles)
    np.testing.assert_allclose(got.logp, plain.logp, rtol=2e-5)
    assert np.isfinite(np.asarray(d)[0]).all()
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    assert interpreter.races is not None and not interpreter.races.races_found


def test_donated_logits_give_the_same() -> None:
    i = inputs_of(Case(32, 256, "bfloat16"))  # the interpreter aliases whole blocks only

    def call(donate: bool) -> Any:
        p = i.problem(donate=donate)
        return jax.jit(lambda: pallas_tpu.stats_and_dlogits(p, given_cotangents(i.g)))()

    assert_same_bits(call(True), call(False))


def test_refusals() -> None:
    with pytest.raises(NotImplementedError, match="float16"):
        pallas_tpu.check(8, 300, jnp.float16)
    assert not pallas_tpu.supports(8, 300, jnp.float16)
    assert pallas_tpu.supports(1, 1, jnp.bfloat16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("v", [1, 128, 32000, 50257, 128256, 151643, 151936, 256000, 262144, 1 << 20])
def test_tiles(v: int, dtype: str) -> None:
    """Whole rows wherever they fit; blocks within VMEM; steps that leave little over."""
    t = tiles_for(4096, v, dtype)
    assert (t.tiles == 1) == (v <= 262144)
    assert t.tiles * t.width >= v > (t.tiles - 1) * t.width
    assert vmem_limit(t, dtype) <= VMEM_BUDGET + (4 << 20)
    step = step_columns(v)
    assert step <= 80 * 128 and (v < 128 or v - v // step * step <= 1024)
    about = pallas_tpu.describe(4096, v, dtype)
    assert about["hbm_bytes"] == (2 if t.tiles == 1 else 3) * 4096 * v * jnp.dtype(dtype).itemsize
