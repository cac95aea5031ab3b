"""The Hopper kernels in Pallas' GPU interpreter, against float64."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
from interpreted import by_numpy
from logitless import Objective, logprobs
from logitless.core.compat import mosaic_gpu_reason
from logitless.core.stats import LogitTransform, StatCotangents
from logitless.logits.mosaic_gpu import backend as mosaic_gpu
from logitless.logits.mosaic_gpu import scalars as scalar
from logitless.logits.mosaic_gpu.layout import Shape, Tiles
from logitless.objectives.token_program import TokenProgram
from numerics import assert_same_bits, f64, logits_problem

needs_interpreter = pytest.mark.skipif(mosaic_gpu_reason() is not None, reason=str(mosaic_gpu_reason()))

STREAMED = Tiles(warpgroups=2, columns=256, slots=2, ring=1, lag=1, lanes=128, blocks=2)  # a row does not fit
HELD = Tiles(warpgroups=1, columns=128, slots=16, ring=8, lag=2, lanes=128, blocks=2)  # it does
ULP = {d: float(jnp.finfo(d).eps) / 2 for d in (jnp.bfloat16, jnp.float16)}  # relative, of rounding once
UNEVEN = Tiles(warpgroups=2, columns=128, slots=3, ring=2, lag=1, lanes=128, blocks=2)  # more slots in than out


def batch(n, v, vocab, dtype, seed=0, spread=3.0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, v)) * spread
    y = rng.integers(0, vocab, n).astype(np.int32)
    y[0] = vocab - 1
    x[0, vocab - 1] = 60.0  # a target that leads by more than float32 can see in z_y - lse
    g = [rng.normal(size=n).astype(np.float32) for _ in range(3)]
    return jnp.asarray(x.astype(dtype)), y, g


def exact(x, y, vocab, g, t):
    """Statistics and dlogits in float64."""
    x = f64(x)
    temperature = np.asarray(1.0 if t.temperature is None else t.temperature, np.float64).reshape(-1, 1)
    scale = 1.0 if t.scale is None else float(t.scale)
    bent = x * scale if t.softcap is None else float(t.softcap) * np.tanh(x * scale / float(t.softcap))
    slope = scale * (1.0 if t.softcap is None else 1 - (bent / float(t.softcap)) ** 2) / temperature
    z = bent / temperature
    z[:, vocab:] = -np.inf
    rows, y = np.arange(len(y)), np.asarray(y)
    others = z.copy()
    others[rows, y] = -np.inf
    rest = np.log(np.exp(others - others.max(1, keepdims=True)).sum(1)) + others.max(1)
    lse = np.logaddexp(rest, z[rows, y])
    lp = z - lse[:, None]
    lp[rows, y] = -np.logaddexp(0.0, rest - z[rows, y])
    p = np.exp(lp)
    plogp = np.where(p > 0, p * np.where(p > 0, lp, 0.0), 0.0)
    entropy = -plogp.sum(1)
    g_logp, g_entropy, g_lse = (np.asarray(v, np.float64)[:, None] for v in g)
    one = -p
    one[rows, y] = -np.expm1(lp[rows, y])
    d = (g_logp * one - g_entropy * (plogp + p * entropy[:, None]) + g_lse * p) * slope
    stats = dict(logp=lp[rows, y], entropy=entropy, lse=lse, max_logit=z.max(1), log_sum_p2=np.log((p * p).sum(1)))
    return stats, d


def assert_stats(got, want, rows):
    for name, value in want.items():
        np.testing.assert_allclose(
            np.asarray(getattr(got, name))[rows], value[rows], rtol=2e-6, atol=2e-6, err_msg=name
        )
    # relative, also where log p is as small as exp(-40)
    np.testing.assert_allclose(np.asarray(got.logp)[rows], want["logp"][rows], rtol=2e-5)


def assert_close(d, want, dtype):
    unit = 1e-6 if dtype == jnp.float32 else 4e-3
    np.testing.assert_allclose(f64(d), want, rtol=unit, atol=unit * np.abs(want).max())


@needs_interpreter
def test_statistics_with_padding_dead_rows_and_a_bad_target():
    n, v, vocab = 4, 1240, 1237
    x, y, g = batch(n, v, vocab, jnp.float32)
    y[3] = v + 5
    live = jnp.asarray([True, False, True, True])
    got = mosaic_gpu.token_stats(logits_problem(x, y, LogitTransform(), vocab, live, interpret=True), STREAMED)
    want, _ = exact(x[:3], y[:3], vocab, [v[:3] for v in g], LogitTransform())
    got = jax.tree.map(np.asarray, got)
    assert_stats(got.map(lambda s: s[:3]), want, [0, 2])
    assert all(float(leaf[1]) == 0 for leaf in jax.tree.leaves(got))
    assert all(np.isnan(getattr(got, f)[3]) for f in ("logp", "entropy", "lse", "max_logit", "log_sum_p2", "max_logp"))
    assert bool(got.is_top1[0]) and not bool(got.is_top1[3])


@needs_interpreter
@pytest.mark.parametrize(("v", "donate"), [pytest.param(1032, False, marks=pytest.mark.slow), (1037, True)])
def test_dlogits_from_random_cotangents(v, donate):
    n, dtype = 3, jnp.bfloat16
    t = LogitTransform(temperature=jnp.asarray([0.7, 1.0, 1.4], jnp.float32))
    x, y, g = batch(n, v, v, dtype)
    for c in g:
        c[1] = 0.0
    _, want = exact(x, y, v, g, t)
    p = logits_problem(x, y, t, v, interpret=True, donate=donate)
    stats = jax.jit(logprobs)(x, y, temperature=t.temperature)
    d = mosaic_gpu.dlogits(p, stats, StatCotangents(*g), STREAMED)
    assert_close(d, want, dtype)
    assert not f64(d)[1].any()


def program(g):
    """Cotangents that depend on the statistics and use what Mosaic GPU has no rules for."""

    def run(s, c, logp, entropy):
        return s[0] * c[0] * jnp.exp(0.1 * logp), c[1] * jnp.log1p(entropy)

    return TokenProgram((jnp.float32(0.7),), (g[0], g[1]), run)


@needs_interpreter
@pytest.mark.parametrize(
    ("n", "v", "vocab", "dtype", "tiles", "transform", "dead"),
    [
        pytest.param(3, 1240, 1237, jnp.float32, STREAMED, {}, True, marks=pytest.mark.slow),
        pytest.param(3, 640, 640, jnp.float32, HELD, {"temperature": 0.8}, False, marks=pytest.mark.slow),
        # rows that start between 16-byte words: a multiple of 8 of them, and one row too few for whole words
        (8, 1237, 1230, jnp.bfloat16, STREAMED, {}, True),
        pytest.param(
            *(3, 523, 523, jnp.float16, STREAMED, {"temperature": 0.8, "softcap": 9.0, "scale": 0.9}, False),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_statistics_and_dlogits_in_one_pass(n, v, vocab, dtype, tiles, transform, dead):
    t = LogitTransform(**{k: jnp.float32(value) for k, value in transform.items()})
    x, y, g = batch(n, v, vocab, dtype)
    live = jnp.asarray(np.arange(n) != 1) if dead else None
    p, objective = logits_problem(x, y, t, vocab, live, interpret=True), program(g)
    stats, d = mosaic_gpu.stats_and_dlogits(p, objective, tiles)
    jax.block_until_ready(d)
    want, _ = exact(x, y, vocab, g, t)
    logp, entropy = (jnp.asarray(want[k], jnp.float32) for k in ("logp", "entropy"))
    run = objective.run(objective.scalars, objective.columns, logp, entropy)
    rows = [r for r in range(n) if not dead or r != 1]
    _, want_d = exact(x, y, vocab, [*run, jnp.zeros(n)], t)
    assert_stats(stats, want, rows)
    assert_close(f64(d)[rows], want_d[rows], dtype)
    if dead:
        assert not f64(d)[1].any() and not any(np.asarray(leaf)[1] for leaf in jax.tree.leaves(stats))
    alone = mosaic_gpu.token_stats(p, tiles)
    for a, b in zip(jax.tree.leaves(stats), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))  # the same bits with and without a gradient


@needs_interpreter
@pytest.mark.parametrize(
    ("v", "dtype", "tiles", "transform"),
    [
        (1032, jnp.bfloat16, UNEVEN, {"temperature": 0.8}),
        pytest.param(640, jnp.float16, HELD, {"softcap": 9.0}, marks=pytest.mark.slow),
    ],
)
def test_rounded_dlogits_of_float32_logits(v, dtype, tiles, transform):
    """A kernel writes what rounding its float32 dlogits gives; padded columns, dead rows and the target, too. The one
    for dlogits alone is held to float64."""
    n, vocab = 5, v - 3
    t = LogitTransform(**{k: jnp.float32(value) for k, value in transform.items()})
    x, y, g = batch(n, v, vocab, jnp.float32)
    p, objective = logits_problem(x, y, t, vocab, jnp.asarray(np.arange(n) != 1), interpret=True), program(g)
    assert mosaic_gpu.rounds(v, jnp.float32, dtype) and not mosaic_gpu.rounds(v - 4, jnp.float32, dtype)
    stats, d = mosaic_gpu.stats_and_dlogits(p, objective, tiles)
    same, rounded = mosaic_gpu.stats_and_dlogits(p, objective, tiles, dtype)
    assert rounded.dtype == dtype and np.abs(d).max() > 0.01 and not f64(rounded)[1].any()
    np.testing.assert_array_equal(f64(rounded), f64(np.asarray(d).astype(dtype)))
    assert_same_bits(same, stats)
    for c in g:
        c[2] = 0.0
    cotangents = StatCotangents(*map(jnp.asarray, g))
    rounded = mosaic_gpu.dlogits(p, stats, cotangents, tiles, dtype)
    _, want = exact(x, y, vocab, g, t)
    assert rounded.dtype == dtype
    np.testing.assert_allclose(f64(rounded)[3:], want[3:], rtol=2 * ULP[dtype], atol=1e-6 * np.abs(want).max())
    assert not f64(rounded)[1:3].any() and f64(rounded)[3].any()


@needs_interpreter
@pytest.mark.parametrize("in_mesh", [False, True])
def test_rounded_dlogits_lower_for_cuda(in_mesh: bool):
    """Under ``jax.set_mesh`` too, where an array of one number would be a `reshard` that no kernel lowers."""
    n, v = 4096, 151936
    x, y = jax.ShapeDtypeStruct((n, v), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.int32)
    g = [jax.ShapeDtypeStruct((n,), jnp.float32)] * 3

    def both(x, y, *g):
        p = logits_problem(x, y, LogitTransform(), v, interpret=False, donate=True)
        return mosaic_gpu.stats_and_dlogits(p, program(g), dtype=jnp.bfloat16)

    def gradient(x, y, stats, *g):
        p = logits_problem(x, y, LogitTransform(), v, interpret=False, donate=True)
        return mosaic_gpu.dlogits(p, stats, StatCotangents(*g), dtype=jnp.bfloat16)

    stats, d = jax.eval_shape(both, x, y, *g)
    assert d.dtype == jnp.bfloat16
    for f, arguments in ((both, (x, y, *g)), (gradient, (x, y, stats, *g))):
        with jax.set_mesh(jax.make_mesh((1,), ("data",))) if in_mesh else contextlib.nullcontext():
            lowered = jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu" in lowered and f"tensor<{n}x{v}xbf16>" in lowered
        assert not [line for line in lowered.splitlines() if "stablehlo.convert" in line and f"{n}x{v}" in line]


@pytest.mark.parametrize("name", ["exp", "expm1", "log", "log1p"])
def test_scalar_functions_to_a_few_units_in_the_last_place(name):
    rng = np.random.default_rng(0)
    size = np.float32(10.0 ** rng.uniform(-30, 30, 20000))
    x = {
        "exp": np.float32(rng.uniform(-87, 88, 20000)),
        "expm1": np.concatenate([np.float32(rng.uniform(-20, 20, 20000)), -np.minimum(size, 1), np.minimum(size, 1)]),
        "log": np.concatenate([size, np.float32(1 + rng.uniform(-0.1, 0.1, 20000))]),
        "log1p": size,
    }[name]
    got = np.asarray(jax.jit(getattr(scalar, name))(x), np.float64)
    want = getattr(np, name)(x.astype(np.float64))
    assert np.max(np.abs(got - want) / np.spacing(np.abs(want).astype(np.float32))) < 4


@needs_interpreter
def test_public_logits_call():
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(1, 4, 523)) * 3, jnp.bfloat16)
    y = jnp.asarray(rng.integers(0, 523, (1, 4)), jnp.int32)
    old_logp = by_numpy(logprobs, x, y).logp - np.float32(0.05)
    given = dict(
        advantages=jnp.asarray([0.7]), mask=jnp.asarray([[1, 1, 0, 1]]), old_logp=old_logp,
        objective=Objective(entropy_coef=0.1),
    )  # fmt: skip

    def run(**options):
        return jax.value_and_grad(lambda x: flat_calls.grpo_loss(x, y, **given, **options)[0])

    loss, d = jax.jit(run(backend="mosaic_gpu", interpret=True))(x)
    want, want_d = by_numpy(run(backend="chunked"), x)
    np.testing.assert_allclose(float(loss), float(want), rtol=1e-6)
    assert_close(d, np.asarray(want_d.astype(jnp.float32)), jnp.bfloat16)


@needs_interpreter
def test_public_head_call():
    rng = np.random.default_rng(4)
    h = jnp.asarray(rng.normal(size=(1, 4, 16)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(523, 16)), jnp.float32)
    y = jnp.asarray(rng.integers(0, 523, (1, 4)), jnp.int32)

    def run(**options):
        def loss(h, w):
            return flat_calls.linear_grpo_loss(h, w, y, advantages=jnp.asarray([0.7]), **options)[0]

        return jax.value_and_grad(loss, (0, 1))

    loss, d = jax.jit(run(backend="mosaic_gpu", interpret=True))(h, w)
    want, want_d = by_numpy(run(backend="chunked"), h, w)
    np.testing.assert_allclose(float(loss), float(want), rtol=1e-6)
    for a, b in zip(d, want_d, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6 * float(jnp.abs(b).max()))


@needs_interpreter
def test_tiles_fit_every_width():
    for itemsize, dtype in ((2, jnp.bfloat16), (4, jnp.float32)):
        for n, v in ((1, 64), (7, 4095), (4096, 151643), (4096, 151936), (5, 16 * 4096 + 1), (3, 32785), (3, 32768)):
            t, shape = mosaic_gpu.tiles_for(n, v, dtype), Shape(n, v, v, 16 // itemsize)
            assert shape.suits(t) and t.columns % t.lanes == 0
            assert t.warpgroups * (t.slots * t.columns * itemsize + 16 * t.lanes) <= 227 * 1024
            assert t.warpgroups * t.slots <= 32 and t.ring <= t.slots
    t = mosaic_gpu.tiles_for(4096, 151936, jnp.bfloat16)
    assert (t.warpgroups, t.columns, t.slots, t.ring, t.lag) == (4, 4096, 6, 3, 1)
    t = mosaic_gpu.tiles_for(4096, 151936, jnp.float32, jnp.bfloat16)
    assert (t.warpgroups, t.columns, t.slots, t.ring, t.out) == (4, 2048, 5, 3, 2)
    assert t.warpgroups * (t.slots * 4 + t.out * 2) * t.columns + 3 * 16 * t.lanes <= 216 * 1024


@needs_interpreter
def test_what_it_refuses_and_what_it_tells():
    mosaic_gpu.check(4096, 151936, jnp.bfloat16)
    mosaic_gpu.check(4096, 151643, jnp.bfloat16)
    mosaic_gpu.check(16384, 151643, jnp.bfloat16)  # more than 2^31 logits
    with pytest.raises(NotImplementedError, match="number of rows, that is a multiple of 8"):
        mosaic_gpu.check(16385, 151643, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="64 bytes"):
        mosaic_gpu.check(16, 31, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="float64"):
        mosaic_gpu.check(4096, 151936, "float64")
    with pytest.raises(NotImplementedError, match="cpu"):
        mosaic_gpu.check(4096, 151936, jnp.bfloat16, platform="cpu")
    told = mosaic_gpu.describe(4096, 151936, jnp.bfloat16)
    assert told["hbm_bytes"] == 2 * 2 * 4096 * 151936 and 0 < told["l2_bytes"] < told["hbm_bytes"] / 4
