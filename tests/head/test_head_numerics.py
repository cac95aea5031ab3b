"""Head-level statistics and gradients of the plain-JAX backends against float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
from interpreted import by_numpy, in_numpy
from logitless import oracle, policy_loss
from logitless.core.options import Head
from logitless.objectives.objective import Objective
from numerics import (
    BACKENDS,
    EPS,
    REAL_VOCABULARIES,
    STATS,
    HeadCase,
    HeadStatics,
    assert_contract,
    assert_same_bits,
    cotangents,
    dense,
    errors,
    f64,
    head_case,
    head_truth,
    plain_head,
    plain_stats,
    run_head,
    three,
    with_gradient,
)

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
SHAPE, CHUNK = (3, 16), 10


def check(
    case: HeadCase,
    *,
    layout: str = "vh",
    bias: Any = None,
    floor_ulp: float = 8,
    backends: tuple[str, ...] = BACKENDS,
    chunk: int = CHUNK,
    **options: Any,
) -> None:
    """Statistics, dhidden, dlm_head (and dbias) under the contract, with random cotangents on all statistics."""
    h, w = case.parameters(layout)
    primals = (h, w) if bias is None else (h, w, jnp.asarray(bias))
    g = cotangents(np.random.default_rng(1), case.targets.shape)
    traced = {k: v for k, v in options.items() if k != "vocab_size"}

    def run(path: str) -> Any:
        statics = HeadStatics(path, layout, chunk, options.get("vocab_size"))
        return run_head(statics, primals, jnp.asarray(case.targets), g, traced)

    plain, d_plain = run("plain")
    truth, d_truth = head_truth(case, g, bias=bias, layout=layout, **options)
    for backend in backends:
        fast, d_fast = run(backend)
        for name, a, b in zip(STATS, fast, plain, strict=True):
            assert_contract(f"{backend} {name}", a, b, getattr(truth, name), floor_ulp)
        for name, p, a, b, t in zip(("dhidden", "dlm_head", "dbias"), primals, d_fast, d_plain, d_truth, strict=False):
            assert a.dtype == p.dtype
            assert_contract(f"{backend} {name}", a, b, t, floor_ulp)


CASES = {"ordinary": {}, "peaked": {"lead": 12.0}, "collapsed": {"lead": 40.0}, "extreme": {"spread": 3e3}}


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CASES)
def test_contract(kind: str, dtype: str) -> None:
    check(head_case(0, SHAPE, 32, 211, DTYPES[dtype], **CASES[kind]))


RNG = np.random.default_rng(7)
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature per token": {"temperature": RNG.uniform(0.4, 2.0, SHAPE).astype(np.float32)},
    "softcap and scale": {"softcap": 5.0, "scale": 0.5, "temperature": 0.7},
    "mask": {"mask": RNG.random(SHAPE) < 0.4},
    "everything": {
        "temperature": RNG.uniform(0.4, 2.0, SHAPE).astype(np.float32),
        "softcap": 6.0,
        "scale": 1.3,
        "vocab_size": 190,
        "mask": RNG.random(SHAPE) < 0.6,
    },
}


@pytest.mark.parametrize(
    "options, dtype, layout",
    [
        *(pytest.param("everything", *c, marks=pytest.mark.quick) for c in (("f32", "vh"), ("bf16", "hv"))),
        pytest.param("everything", "f32", "hv", marks=[pytest.mark.quick, pytest.mark.slow]),
        *(
            pytest.param(o, d, layout, marks=pytest.mark.slow)
            for o in OPTIONS
            if o != "everything"
            for d, layout in (("f32", "vh"), ("bf16", "hv"), ("f32", "hv"))
        ),
    ],
)
def test_contract_with_options(options: str, dtype: str, layout: str) -> None:
    """With a bias; NaN and -100 at masked positions, garbage in the padded columns (NaN in the bias)."""
    chosen = OPTIONS[options]
    case = head_case(3, SHAPE, 32, 211, DTYPES[dtype])
    hidden, head, targets = (np.array(a) for a in (case.hidden, case.lm_head, case.targets))
    bias = np.asarray(jnp.asarray(RNG.standard_normal(211), DTYPES[dtype])).copy()
    if "mask" in chosen:
        hidden[~chosen["mask"]] = np.nan
        targets[~chosen["mask"]] = -100
    if "vocab_size" in chosen:
        real = chosen["vocab_size"]
        targets = np.where(targets >= real, targets - real, targets)
        head[real:] = 1e4
        bias[real:] = np.nan
    check(HeadCase(hidden, head, targets), layout=layout, bias=bias, **chosen)


@pytest.mark.parametrize("backend", BACKENDS)
def test_collapsed_policies_keep_their_relative_precision(backend: str) -> None:
    """Margins of 20 to 80 nats with exactly representable logits: what the matmul gives is exact, the rest is ours."""
    n, v = 13, 32
    margins = np.arange(20.0, 85.0, 5.0)
    y = np.arange(n)
    h = np.zeros((n, v), np.float32)
    h[np.arange(n), y] = margins
    case = HeadCase(h, np.eye(v, dtype=np.float32), y)
    hidden, w = case.parameters()
    g = (np.ones(n, np.float32),) * 2 + (np.zeros(n, np.float32),)

    def call(h: jax.Array, w: jax.Array) -> Any:
        return three(flat_calls.linear_logprobs(h, Head(w, layout="vh"), jnp.asarray(y), backend=backend, chunk_size=4))

    fast, (dh, _) = with_gradient(call, hidden, w, g=g)
    truth, (dh_truth, _, _) = head_truth(case, g)
    assert truth.logp.max() > -1e-30
    for name, value in zip(STATS, fast, strict=True):
        np.testing.assert_allclose(f64(value), getattr(truth, name), rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(f64(dh), dh_truth, rtol=2e-5, atol=1e-37)


@pytest.mark.parametrize(
    "way, dtype",
    [
        *(("reference", jnp.float16), ("in forward", jnp.float16), ("later", jnp.bfloat16), ("sparse", jnp.bfloat16)),
        # No way knows which of the two dtypes it rounds to.
        *(pytest.param(way, jnp.bfloat16, marks=pytest.mark.slow) for way in ("reference", "in forward")),
        *(pytest.param(way, jnp.float16, marks=pytest.mark.slow) for way in ("later", "sparse")),
    ],
)
def test_the_gradient_of_the_bias_is_summed_before_dlogits_are_rounded(way: str, dtype: Any) -> None:
    """To float32's digits, whatever the dtype of the hidden states: here dlogits are about 1e-6, where float16 has one
    or two of its digits left, and every column's sum is of 240 of one sign. Eight columns have all of the mass, so that
    a sparse backward leaves nothing out that counts."""
    case = head_case(15, (3, 80), 16, 2048, dtype, spread=0.5)
    h, w = case.parameters()
    bias = np.where(np.arange(2048) < 8, 12.0, -12.0) + np.random.default_rng(0).uniform(-1, 1, 2048)
    bias = bias.astype(np.float32)
    y, common = np.zeros((3, 80), np.int32), dict(advantages=np.full(3, 1e-3, np.float32), head_layout="vh")
    o = Objective(aggregation="dapo", level="sequence" if way == "later" else "token")
    options: dict[str, Any] = {"backend": "reference" if way == "reference" else "chunked", "chunk_size": 64}
    options |= {"sparse_backward": 2.0**-6} if way == "sparse" else {}

    def loss(w: jax.Array, bias: jax.Array) -> jax.Array:
        return flat_calls.linear_grpo_loss(h, w, jnp.asarray(y), bias=bias, objective=o, **common, **options)[0]

    *_, truth = oracle.linear_grpo_loss(h, w, y, bias=bias, objective=o, **common)
    _, got = by_numpy(jax.grad(loss, (0, 1)), w, jnp.asarray(bias))
    np.testing.assert_allclose(f64(got), truth, rtol=1e-5, atol=1e-6 * np.abs(truth).max())


@pytest.mark.parametrize(
    "dtype, layout",
    [
        ("bf16", "vh"),
        ("f32", "vh"),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in (("f32", "hv"), ("bf16", "hv"))),
    ],
)
def test_lora(dtype: str, layout: str) -> None:
    """Gradients for hidden, A and B; the plain path is the same low-rank product, dense, differentiated by JAX."""
    case, rank, scale = head_case(4, SHAPE, 32, 211, DTYPES[dtype]), 4, np.float32(0.7)
    rng = np.random.default_rng(5)
    h, w = case.parameters(layout)
    y = jnp.asarray(case.targets)
    a = jnp.asarray(0.3 * rng.standard_normal((w.shape[0], rank)), w.dtype)
    b = jnp.asarray(0.3 * rng.standard_normal((rank, w.shape[1])), w.dtype)
    g = cotangents(rng, SHAPE)

    def plain(h: jax.Array, a: jax.Array, b: jax.Array) -> Any:
        rows = h.reshape(-1, h.shape[-1])
        down, up = (b, a) if layout == "vh" else (a, b)
        low = dense(rows, down, None, layout).astype(h.dtype)
        x = dense(rows, w, None, layout) + scale * dense(low, up, None, layout)
        return tuple(s.reshape(SHAPE) for s in plain_stats(x, y.reshape(-1)))

    plain_out, d_plain = with_gradient(plain, h, a, b, g=g)
    merged = f64(w) + float(scale) * f64(a) @ f64(b)
    truth = oracle.linear_token_stats(h, merged, y, head_layout=layout)
    dh, dw, _ = oracle.linear_token_stats_vjp(h, merged, y, *g, head_layout=layout)
    d_truth = (dh, float(scale) * dw @ f64(b).T, float(scale) * f64(a).T @ dw)
    for backend in BACKENDS:

        def call(h: jax.Array, a: jax.Array, b: jax.Array, backend: str = backend) -> Any:
            options = {"head_layout": layout, "lora": (a, b), "lora_scale": scale, "backend": backend}
            return three(flat_calls.linear_logprobs(h, w, y, chunk_size=CHUNK, **options))

        fast, d_fast = with_gradient(call, h, a, b, g=g)
        for name, u, v in zip(STATS, fast, plain_out, strict=True):
            assert_contract(f"{backend} {name}", u, v, getattr(truth, name), 8)
        for name, u, v, t in zip(("dhidden", "dA", "dB"), d_fast, d_plain, d_truth, strict=True):
            assert_contract(f"{backend} {name}", u, v, t, 8)


def test_a_single_gradient_is_that_of_all() -> None:
    """Frozen parts change nothing in the gradients of the others."""
    case = head_case(6, SHAPE, 32, 211, jnp.bfloat16)
    h, w = case.parameters()
    arguments = {"hidden": h, "lm_head": w, "bias": jnp.linspace(-1, 1, 211).astype(jnp.bfloat16)}

    def f(some: dict[str, jax.Array]) -> jax.Array:
        s = flat_calls.linear_logprobs(
            targets=jnp.asarray(case.targets), chunk_size=CHUNK, backend="chunked", **arguments | some
        )
        return jnp.sum(s.logp * 0.3 + s.entropy - 0.1 * s.lse)

    gradient = in_numpy(jax.grad(f))
    every = gradient(arguments)
    for what, value in arguments.items():
        assert_same_bits(gradient({what: value})[what], every[what], what)


@pytest.mark.parametrize(
    "dtype, backend",
    [
        ("f32", "chunked"),
        pytest.param("f32", "reference", marks=pytest.mark.slow),
        *(pytest.param("bf16", backend, marks=pytest.mark.slow) for backend in BACKENDS),
    ],
)
def test_all_dead_batch_and_one_live_token(dtype: str, backend: str) -> None:
    case = head_case(8, SHAPE, 32, 211, DTYPES[dtype])
    h, w = (np.asarray(a) for a in case.parameters())
    options: dict[str, Any] = {"backend": backend, "chunk_size": 4}

    def stats(h: jax.Array, w: jax.Array, y: jax.Array, mask: jax.Array) -> Any:
        s = flat_calls.linear_logprobs(h, w, y, mask=mask, **options)
        return jnp.sum(s.logp + s.entropy + s.lse), s

    def loss(h: jax.Array, w: jax.Array, y: jax.Array, mask: jax.Array) -> Any:
        return flat_calls.linear_grpo_loss(h, w, y, advantages=jnp.ones(3), mask=mask, **options)

    compiled = {f: jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True)) for f in (stats, loss)}
    for live in ([], [(1, 7)]):
        mask = np.zeros(SHAPE, bool)
        for at in live:
            mask[at] = True
        hidden = np.where(mask[..., None], h, np.asarray(np.nan, h.dtype))
        y = np.where(mask, case.targets, -100)
        ones = mask.astype(np.float32)
        for f, g in ((stats, (ones, ones, ones)), (loss, (-ones, 0 * ones, 0 * ones))):
            (_, aux), (dh, dw) = compiled[f](hidden, w, y, mask)
            if f is loss:
                g = (g[0] / 3, *g[1:])  # grpo: the mean of each sequence, then over the batch
            truth, (dh_truth, dw_truth, _) = head_truth(HeadCase(hidden, w, y), g, mask=mask)
            tolerance = {"rtol": 2e-2, "atol": 2e-3} if dtype == "bf16" else {"rtol": 2e-5, "atol": 2e-6}
            np.testing.assert_allclose(f64(dh), dh_truth, **tolerance)
            np.testing.assert_allclose(f64(dw), dw_truth, **tolerance)
            assert not np.any(f64(dh)[~mask])
            if f is stats:
                np.testing.assert_allclose(f64(aux.logp), truth.logp, rtol=1e-5)
                assert not np.any(f64(aux.lse)[~mask])


@functools.cache
def _batch(dtype: Any, seed: int = 9, shape: tuple[int, int] = SHAPE, vocab: int = 1031) -> tuple[Any, ...]:
    case = head_case(seed, shape, 48, vocab, dtype)
    rng = np.random.default_rng(seed)
    h, w = case.parameters()
    mask = jnp.asarray(rng.random(shape) < 0.7)
    old = oracle.linear_token_stats(h, w, case.targets).logp
    old = jnp.asarray(old + 0.2 * rng.standard_normal(shape), jnp.float32)
    a = jnp.asarray(rng.standard_normal(shape[0]), jnp.float32).at[0].set(0.0)  # a row without a gradient
    return case, h, w, jnp.asarray(case.targets), mask, old, a


OBJECTIVES = {
    "token": Objective(temperature=0.8),
    "token, KL and entropy": Objective(temperature=0.8, beta=0.04, entropy_coef=0.1),
    "sequence": Objective(level="sequence", temperature=0.8),
}


@pytest.mark.optimized
@pytest.mark.parametrize(
    "way, dtype",
    [
        ("token, KL and entropy", "f32"),
        *(
            pytest.param(*c, marks=pytest.mark.slow)
            for c in (("statistics", "f32"), ("statistics", "bf16"), ("token", "bf16"), ("sequence", "bf16"))
        ),
    ],
)
def test_forward_is_the_same_to_the_bit_with_and_without_gradient(way: str, dtype: str) -> None:
    """With dH and dW, with dH only (the same code for every loss), and without any."""
    _, h, w, y, mask, old, a = _batch(DTYPES[dtype])

    def f(h: jax.Array, w: jax.Array) -> Any:
        if way == "statistics":
            s = flat_calls.linear_logprobs(h, w, y, mask=mask, temperature=0.8, chunk_size=CHUNK, backend="chunked")
            return jnp.sum(jnp.where(mask, s.logp**2 + s.entropy + s.lse, 0.0)), s
        o = OBJECTIVES[way]
        ref = None if o.beta is None else old - 0.1
        inputs = {"advantages": a, "old_logp": old, "ref_logp": ref, "mask": mask, "objective": o}
        return flat_calls.linear_grpo_loss(h, w, y, chunk_size=CHUNK, backend="chunked", **inputs)

    without = jax.jit(f)(h, w)
    for argnums in ((0, 1),) if way == "sequence" else (0, (0, 1)):
        got, _ = jax.jit(jax.value_and_grad(f, argnums, has_aux=True))(h, w)
        assert_same_bits(without, got, f"{way} {argnums}")


@pytest.mark.optimized
@pytest.mark.parametrize("dtype, masked", [("f32", True), pytest.param("bf16", False, marks=pytest.mark.slow)])
def test_on_policy_ratio_is_exactly_one(dtype: str, masked: bool) -> None:
    """old_logp from linear_logprobs: the loss gathers its tokens in another order, and still has the same bits."""
    _, h, w, y, mask, _, a = _batch(DTYPES[dtype], shape=(4, 24))
    mask = mask if masked else None
    chunk = {"chunk_size": 16, "mask": mask}
    old = jax.jit(functools.partial(flat_calls.linear_logprobs, **chunk))(h, w, y).logp
    for o in (Objective(), Objective(level="sequence")):
        loss = functools.partial(
            flat_calls.linear_grpo_loss, targets=y, advantages=a, old_logp=old, objective=o, **chunk
        )
        (_, metrics), _ = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(h, w)
        assert float(metrics["ratio_min"].sum) == float(metrics["ratio_max"].sum) == 1.0


CHUNK_BOUND = 2e-6
"""Relative to the largest entry: the platform's matmul may block differently for another number of rows."""
GRADIENT_CHUNK_BOUND = 4e-6
"""The same for float32 gradients."""


@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_chunk_size_matters_no_more_than_the_matmul(dtype: str) -> None:
    _, h, w, y, mask, _, _ = _batch(DTYPES[dtype], shape=(2, 40))
    g = cotangents(np.random.default_rng(2), (2, 40))

    def call(h: jax.Array, w: jax.Array, chunk: int) -> Any:
        return three(flat_calls.linear_logprobs(h, w, y, mask=mask, chunk_size=chunk, backend="chunked"))

    whole, d_whole = with_gradient(functools.partial(call, chunk=80), h, w, g=g)
    for chunk in (1, 24):
        out, d = with_gradient(functools.partial(call, chunk=chunk), h, w, g=g)
        for u, v in zip(out, whole, strict=True):
            assert errors(u, f64(v))[0] <= CHUNK_BOUND * np.abs(f64(v)).max(), f"statistics at chunk {chunk}"
        # sums over tokens and over columns take another order; in bfloat16 a few results round the other way
        bound = GRADIENT_CHUNK_BOUND if h.dtype == jnp.float32 else 2 * float(jnp.finfo(h.dtype).eps)
        for u, v in zip(d, d_whole, strict=True):
            assert errors(u, f64(v))[0] <= bound * np.abs(f64(v)).max(), f"gradients at chunk {chunk}"


def test_many_tokens() -> None:
    """More tokens than int16 or a 16-bit grid can count."""
    n = 70_000
    check(head_case(10, (n,), 4, 7), chunk=2048, backends=("chunked",))


@REAL_VOCABULARIES
def test_real_vocabularies(vocab: int, dtype: str) -> None:
    """Columns are taken in tiles, with a tail, and dW with them."""
    check(head_case(11, (5,), 8, vocab, DTYPES[dtype]), chunk=2, backends=("chunked",))


# -- the ways through a loss ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [pytest.param("f32", marks=pytest.mark.quick), pytest.param("bf16", marks=pytest.mark.slow)]
)
def test_three_and_four_matmuls_agree(dtype: str) -> None:
    """Grad in forward, the general VJP by recompute, and the dense reference, each against float64."""
    _, h, w, y, mask, old, a = _batch(DTYPES[dtype], vocab=211)
    o = Objective(beta=0.04, entropy_coef=0.1, temperature=0.8)
    common = {"advantages": a, "old_logp": old, "ref_logp": old - 0.1, "mask": mask}

    def three_matmuls(h: jax.Array, w: jax.Array) -> jax.Array:
        return flat_calls.linear_grpo_loss(h, w, y, chunk_size=CHUNK, backend="chunked", objective=o, **common)[0]

    def four_matmuls(h: jax.Array, w: jax.Array) -> jax.Array:
        s = flat_calls.linear_logprobs(h, w, y, mask=mask, temperature=0.8, chunk_size=CHUNK, backend="chunked")
        return policy_loss(s, objective=o, **common)[0]

    def reference(h: jax.Array, w: jax.Array) -> jax.Array:
        return flat_calls.linear_grpo_loss(h, w, y, backend="reference", objective=o, **common)[0]

    o64 = o.replace(temperature=np.float32(0.8), beta=np.float32(0.04), entropy_coef=np.float32(0.1))
    loss, dh, dw, _ = oracle.linear_grpo_loss(h, w, y, objective=o64, **common)
    base, d_base = jax.jit(jax.value_and_grad(reference, (0, 1)))(h, w)
    for f in (three_matmuls, four_matmuls):
        value, d = jax.jit(jax.value_and_grad(f, (0, 1)))(h, w)
        np.testing.assert_allclose([float(value), float(base)], loss, rtol=5e-6)
        assert_contract(f"{f.__name__} dhidden", d[0], d_base[0], dh, 8)
        assert_contract(f"{f.__name__} dlm_head", d[1], d_base[1], dw, 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_logits(backend: str) -> None:
    """Statistics and gradients come from the same rounded logits: those of the dense path, rounded."""
    case = head_case(13, SHAPE, 32, 211, jnp.bfloat16)
    h, w = case.parameters()
    y, g = jnp.asarray(case.targets), cotangents(np.random.default_rng(2), SHAPE)
    x = jnp.einsum("bth,vh->btv", h, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16)
    truth = oracle.token_stats(x, case.targets)
    dx = oracle.token_stats_vjp(x, case.targets, *g)
    d_truth = (dx @ f64(w), np.einsum("btv,bth->vh", dx, f64(h)))

    def call(h: jax.Array, w: jax.Array) -> Any:
        return three(flat_calls.linear_logprobs(h, w, y, logits_dtype="bfloat16", backend=backend, chunk_size=CHUNK))

    out, d = with_gradient(call, h, w, g=g)
    plain, d_plain = with_gradient(lambda h, w: plain_head(h, w, y, logits_dtype=jnp.bfloat16), h, w, g=g)
    for name, u, v in zip(STATS, out, plain, strict=True):
        assert_contract(name, u, v, getattr(truth, name), 8)
    for name, u, v, t in zip(("dhidden", "dlm_head"), d, d_plain, d_truth, strict=True):
        assert_contract(name, u, v, t, 8)
    # and they are another function than that of the float32 logits
    assert errors(out[0], oracle.linear_token_stats(h, w, case.targets).logp)[0] > 1e-3


def test_dw_summed_in_the_parameters_dtype_is_worse_by_a_known_amount() -> None:
    """64 chunks of 4 tokens in bfloat16: each addition rounds. Summed in float32 dW is as good as the dense one."""
    case = head_case(14, (256,), 16, 97, jnp.bfloat16)
    h, w = case.parameters()
    y, g = jnp.asarray(case.targets), cotangents(np.random.default_rng(3), (256,))
    _, (_, truth, _) = head_truth(case, g)

    def error(**options: Any) -> float:
        def call(w: jax.Array) -> Any:
            return three(flat_calls.linear_logprobs(h, w, y, chunk_size=4, **options))

        _, (dw,) = with_gradient(call, w, g=g)
        assert dw.dtype == w.dtype
        return errors(dw, truth)[1] / float(np.linalg.norm(truth))

    f32, param = error(head_grad_dtype="float32"), error(head_grad_dtype="param")
    dense = error(backend="reference")
    print(f"relative error of dW: float32 {f32:.2e}, param {param:.2e}, dense {dense:.2e}")
    assert f32 <= 1.05 * dense + 8 * EPS
    assert 2 * f32 < param < 2e-2
