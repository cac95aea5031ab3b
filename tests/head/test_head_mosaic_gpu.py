"""The Hopper head kernel (one matmul, no logits) in Pallas' GPU interpreter, its schedule, and its lowering."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logitless
from interpreted import by_numpy
from logitless import oracle
from logitless.core.backend import Way
from logitless.core.compat import mosaic_gpu_reason
from logitless.core.problem import HeadArrays
from logitless.core.stats import LogitTransform, finish
from logitless.head.chunked import Chunked
from logitless.head.mosaic_gpu import backend
from logitless.head.mosaic_gpu.kernels import stats_matmul
from logitless.head.mosaic_gpu.kernels.pipeline import LOG2E, LOW
from logitless.head.mosaic_gpu.kernels.schedule import COMPUTE, Tiles, rounds, schedule, tiles_for
from logitless.head.mosaic_gpu.kernels.schedule import check as check_shapes
from logitless.head.mosaic_gpu.kernels.stats_matmul import FIELDS as SUMS
from logitless.head.mosaic_gpu.kernels.stats_matmul import merged
from numerics import f64, head_problem

needs_mosaic = pytest.mark.skipif(mosaic_gpu_reason() is not None, reason=str(mosaic_gpu_reason()))

SMALL = Tiles(rows=64, columns=64, stages=2, group=2, blocks=3, delay=1)
FIELDS = ("logp", "entropy", "lse", "max_logit", "log_sum_p2")


def batch(n, h, v, vocab, seed=0, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(n, h)).astype(dtype))
    head = jnp.asarray((rng.normal(size=(v, h)) * 3 / h**0.5).astype(dtype))
    return hidden, head, jnp.asarray(rng.integers(0, vocab, n).astype(np.int32))


def truth(hidden, head, targets, transform, **options):
    numbers = {k: np.asarray(x) for k, x in dataclasses.asdict(transform).items() if x is not None}
    return oracle.linear_token_stats(
        f64(hidden), f64(head), np.asarray(targets),
        head_layout="vh", **numbers, **options,
    )  # fmt: skip


def assert_stats(got, want, rows=slice(None), tolerance=4e-6):
    for name in FIELDS:
        np.testing.assert_allclose(
            np.asarray(getattr(got, name))[rows], np.asarray(getattr(want, name))[rows], rtol=tolerance,
            atol=tolerance, err_msg=name,
        )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(got.is_top1)[rows], np.asarray(want.is_top1)[rows])


CASES = {
    "one_tile": (dict(n=64, h=64, v=64), SMALL, {}),
    "ragged": (dict(n=300, h=72, v=333, vocab=330), SMALL, {}),
    "temperature": (dict(n=130, h=64, v=200), SMALL, dict(temperature=np.linspace(0.5, 2, 130, dtype=np.float32))),
    "bent": (
        dict(n=130, h=128, v=200), dataclasses.replace(SMALL, delay=0), dict(temperature=0.7, softcap=5.0, scale=-1.5),
    ),
    "staggered": (dict(n=130, h=256, v=200), dataclasses.replace(SMALL, stages=3, stagger=2), {}),
}  # fmt: skip


token_stats = jax.jit(stats_matmul.token_stats, static_argnames="tiles")  # one program in place of a hundred operations


@needs_mosaic
@pytest.mark.parametrize(
    "name",
    ["ragged", "bent", "staggered", *(pytest.param(n, marks=pytest.mark.slow) for n in ("one_tile", "temperature"))],
)
def test_statistics(name):
    size, tiles, numbers = CASES[name]
    size = {"vocab": size["v"], **size}
    hidden, head, y = batch(**size)
    t = LogitTransform(**{k: jnp.asarray(x, jnp.float32) for k, x in numbers.items()})
    p = head_problem(hidden, head, y, transform=t, vocab_size=size["vocab"], interpret=True)
    got = token_stats(p, tiles=tiles)
    assert_stats(got, truth(hidden, head, y, t, vocab_size=size["vocab"]))


@needs_mosaic
def test_live_tokens_bad_targets_bias_and_the_other_layout():
    n, v, live = 300, 192, 140
    hidden, head, y = batch(n, 64, v, v)
    y = y.at[1].set(v).at[2].set(-1)
    hidden = hidden.at[live:].set(jnp.nan)
    bias = jnp.asarray(np.random.default_rng(1).normal(size=v), jnp.float32).at[7].set(-jnp.inf)
    y = y.at[0].set(8)
    p = head_problem(hidden, head.T, y, layout="hv", bias=bias, transform=LogitTransform(), interpret=True)
    got = jax.jit(lambda k: stats_matmul.token_stats(p, k, SMALL))(jnp.int32(live))
    y_safe = jnp.where((y < 0) | (y >= v) | (y == 7), 0, y)
    want = truth(hidden[:live], head, y_safe[:live], LogitTransform(), bias=np.asarray(bias))
    rows = np.flatnonzero(np.asarray((y_safe == y)[:live]))
    assert_stats(got, want, rows)
    assert np.isnan(np.asarray(got.logp)[1:3]).all() and not np.asarray(got.is_top1)[1:3].any()
    for name in FIELDS:
        assert (np.asarray(getattr(got, name))[live:] == 0).all()


@needs_mosaic
def test_rounded_logits():
    hidden, head, y = batch(64, 64, 128, 128)
    p = head_problem(hidden, head, y, transform=LogitTransform(), logits_dtype="bfloat16", interpret=True)
    got = token_stats(p, tiles=SMALL)
    x = np.asarray(hidden.astype(jnp.float32)) @ np.asarray(head.astype(jnp.float32)).T
    want = oracle.token_stats(np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)), np.asarray(y))
    # A sum that lies next to the middle of two bfloat16 numbers may be rounded either way.
    close = np.isclose(np.asarray(got.logp), want.logp, rtol=1e-5)
    assert close.mean() > 0.95
    assert_stats(got, want, np.flatnonzero(close), tolerance=5e-3)


def test_the_merge_of_runs():
    rng = np.random.default_rng(0)
    n, v, tokens, slots = 8, 60, 4, 5
    parts = np.asarray([3, 5])
    z = (rng.normal(size=(n, v)) * 4).astype(np.float32)
    y = rng.integers(0, v, n)
    temperature = np.linspace(0.5, 1.5, n).astype(np.float32)
    sums = np.full((5, slots, n), np.nan, np.float32)  # what was not written must not be read
    for i in range(n):
        for s, columns in enumerate(np.array_split(np.arange(v), parts[i // tokens])):
            if s == 0 and i == 0:  # a run that saw only the target
                y[i], columns = 0, columns[:1]
            elif s == 1 and i == 0:
                columns = np.arange(1, columns[-1] + 1)
            others = columns[columns != y[i]]
            m = z[i, others].max() if len(others) else LOW
            t = (z[i, others] - m) * (LOG2E / temperature[i])
            e = 2.0**t
            target = z[i, y[i]] if y[i] in columns else 0.0
            sums[:, s, i] = m, e.sum() if len(others) else 3.0, (e * t).sum(), (e * e).sum(), target

    @jax.jit
    def stats(sums, parts, temperature):
        t = LogitTransform(temperature=temperature)
        return finish(merged(sums, parts, tokens, t), transform=t)

    got = stats(sums, parts, temperature)
    assert_stats(got, oracle.token_stats(z, y, temperature=temperature))


def test_the_schedule_covers_every_tile_once():
    rng = np.random.default_rng(0)
    for _ in range(40):
        blocks, token_tiles, vocab_tiles = (int(rng.integers(1, k)) for k in (20, 30, 40))
        live = int(rng.integers(0, token_tiles + 1))
        t = Tiles(group=min(int(rng.integers(1, 9)), token_tiles, blocks), blocks=blocks)
        s = schedule(t, token_tiles, vocab_tiles, live)
        token, count, first, last, slot, parts = (getattr(s, f.name) for f in dataclasses.fields(s))
        seen = np.zeros((token_tiles, vocab_tiles), int)
        slots = [[] for _ in range(token_tiles)]
        for at in np.ndindex(token.shape):
            for tile in range(token[at], token[at] + count[at]):
                seen[tile, first[at] : last[at]] += 1
                slots[tile].append(slot[at])
        assert (seen[:live] == 1).all() and not seen[live:].any()
        for tile in range(live):
            assert sorted(slots[tile]) == list(range(parts[tile]))
            assert parts[tile] <= t.runs(token_tiles, vocab_tiles) + 1


def test_the_schedule_is_the_same_when_traced():
    t = Tiles(group=4, blocks=13)
    traced = jax.jit(lambda live: dataclasses.astuple(schedule(t, 11, 20, live)))
    for live in (0, 1, 5, 11):
        for a, b in zip(traced(live), dataclasses.astuple(schedule(t, 11, 20, live)), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "shape", [(8192, 4096, 151936), (16384, 1536, 151936), (8192, 2304, 256000), (4096, 4096, 151936)]
)
def test_the_rule_keeps_all_blocks_busy_and_needs_little_memory(shape):
    n, h, v = shape
    t = tiles_for(n, h, v)
    token_tiles, vocab_tiles = -(-n // t.tokens), -(-v // t.columns)
    assert token_tiles * vocab_tiles / (t.blocks * rounds(t, token_tiles, vocab_tiles)) > 0.99
    sums = 4 * SUMS * (t.runs(token_tiles, vocab_tiles) + 1) * n
    assert sums + 4 * token_tiles * COMPUTE * vocab_tiles < 8 << 20
    assert -(-token_tiles // t.group) <= 5  # reads of the head


def test_refusals():
    def check(n=128, h=64, v=128, dtype=jnp.bfloat16, head_dtype=None, layout="vh", platform="gpu"):
        weight = jax.ShapeDtypeStruct((v, h) if layout == "vh" else (h, v), head_dtype or dtype)
        hidden, y = jax.ShapeDtypeStruct((n, h), dtype), jax.ShapeDtypeStruct((n,), jnp.int32)
        check_shapes(head_problem(hidden, weight, y, layout=layout, transform=LogitTransform()), platform)

    why = mosaic_gpu_reason()
    if why is not None:
        with pytest.raises(NotImplementedError, match=r"jax 0\.11"):
            check()
        return
    check()
    check(v=151643)
    check(layout="hv")
    for options, message in [
        (dict(dtype=jnp.float32), "float32"),
        (dict(head_dtype=jnp.float16), "same for both"),
        (dict(platform="tpu"), "Hopper"),
        (dict(h=60), "hidden size is 60"),
        (dict(v=72, layout="hv"), "multiple of 64"),
        (dict(n=0), "empty"),
    ]:
        with pytest.raises(NotImplementedError, match=message):
            check(**options)


@needs_mosaic
@pytest.mark.parametrize("ragged", [False, True])
def test_it_lowers_for_cuda(ragged):
    n, h, v = (200, 136, 1003) if ragged else (256, 128, 1024)
    hidden, head = jax.ShapeDtypeStruct((n, h), jnp.bfloat16), jax.ShapeDtypeStruct((v, h), jnp.bfloat16)
    y, t = jax.ShapeDtypeStruct((n,), jnp.int32), LogitTransform(jax.ShapeDtypeStruct((n,), jnp.float32))
    p = head_problem(hidden, head, y, transform=t)
    lowered = jax.jit(stats_matmul.token_stats).trace(p).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@needs_mosaic
def test_behind_the_public_call_with_and_without_a_gradient():
    n, h, v = 96, 64, 320
    hidden, head, y = batch(n, h, v, v)
    hidden, y = hidden.reshape(2, 48, h), y.reshape(2, 48)
    mask = np.random.default_rng(2).random((2, 48)) < 0.6
    weight = np.random.default_rng(3).normal(size=(2, 2, 48))

    def f(hidden, head, backend):
        s = logitless.linear_logprobs(
            hidden, head, y, mask=mask, options=logitless.Options(backend=backend, interpret=backend == "mosaic_gpu")
        )
        return jnp.sum(weight[0] * s.logp + weight[1] * s.entropy), s

    call = functools.partial(f, backend="mosaic_gpu")
    assert (
        "no logits"
        in logitless.explain(
            logitless.linear_logprobs, hidden, head, options=logitless.Options(backend="mosaic_gpu", interpret=True)
        ).bytes_moved
    )
    alone = jax.jit(lambda *a: call(*a)[1])(hidden, head)
    (_, beside), (dh, dw) = jax.jit(jax.value_and_grad(call, argnums=(0, 1), has_aux=True))(hidden, head)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(alone, name), getattr(beside, name), err_msg=name)
    exact = jax.value_and_grad(functools.partial(f, backend="chunked"), argnums=(0, 1), has_aux=True)
    (_, want), (dh_want, dw_want) = by_numpy(exact, hidden, head)
    assert_stats(alone, want)
    for got, truth_ in ((dh, dh_want), (dw, dw_want)):
        got, truth_ = (np.asarray(a, np.float32) for a in (got, truth_))
        assert np.linalg.norm(got - truth_) <= 1e-3 * np.linalg.norm(truth_)


@needs_mosaic
@pytest.mark.parametrize(
    "options",
    [dict(logits_dtype=jnp.bfloat16), dict(backend="chunked"), dict(lora=True), dict(dtype=jnp.float32)],
)
def test_where_the_chunked_sweep_serves_instead(options):
    def problem(dtype=jnp.bfloat16, lora=False, **choices):
        s = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
        factors = (s((128, 4)), s((4, 64))) if lora else (None, None)
        y, t = jax.ShapeDtypeStruct((32,), jnp.int32), LogitTransform()
        p = head_problem(s((32, 64)), s((128, 64)), y, transform=t, interpret=True, **choices)
        return p.with_head(HeadArrays(p.head.weight, None, *factors))

    def fused(p):
        runs = Chunked() if p.call.backend == "chunked" else backend.MosaicGpu()
        return runs.describe(p.calling(chunk=32), Way(loss=False, in_forward=False, reason=None)).fused_statistics

    p = problem(**options)
    assert options.get("backend") or stats_matmul.not_served_because(p) is not None
    assert not fused(p)
    assert stats_matmul.not_served_because(problem()) is None and fused(problem())


@needs_mosaic
def test_plan_knows_that_statistics_alone_hold_no_logits():
    hidden, head = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 8192, 4096), (151936, 4096)))
    options = dict(objective=None, gradients=(), chip="h200")
    fused = logitless.plan(hidden, head, **options)
    assert fused.flops == 2 * 8192 * 4096 * 151936 and fused.temporaries < 2**27
    assert logitless.plan(hidden, head, logits_dtype="bfloat16", **options).temporaries > 2**27
