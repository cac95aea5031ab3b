"""Sharded calls beyond the layouts of test_sharding.py: logits, statistics, other ways onto a mesh, a fuzz."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flat_calls
import logitless
from interpreted import by_numpy
from logitless import Objective, Sharding
from logitless.mesh import head_pieces as parts
from test_sharding import OBJECTIVES, SEQUENCE, SHAPE, TOKEN, alone, assert_same, batch, collectives, loss, run
from test_sharding import mesh_of as mesh

MESH: dict[str, int] = {"data": 2, "seq": 2, "tensor": 2}


def head_results(data: dict[str, Any], objective: Objective, **options: Any) -> Any:
    f = jax.value_and_grad(functools.partial(loss, objective=objective, **options), argnums=(0, 1), has_aux=True)
    rest = {k: v for k, v in data.items() if k not in ("hidden", "lm_head")}
    return run(f, data["hidden"], data["lm_head"], rest)[0]


@functools.cache
def logits_results(backend: str, level: str, sharding: Sharding | None = None) -> Any:
    """``((loss, metrics), dlogits)`` of a ragged batch whose padded columns would dominate every softmax."""
    columns = 50
    data = batch(columns=columns)
    rng = np.random.default_rng(3)
    x = (3 * rng.normal(size=(*SHAPE, 64))).astype(np.float32)
    x[..., columns:] = 1e3
    x[~data["mask"]] = np.nan
    del data["hidden"], data["lm_head"]
    if OBJECTIVES[level].beta is None:
        del data["ref_logp"]

    def f(x: Any) -> Any:
        return flat_calls.grpo_loss(
            x, objective=OBJECTIVES[level], vocab_size=columns, backend=backend, interpret=backend == "pallas_tpu",
            sharding=sharding, **data,
        )  # fmt: skip

    f = jax.value_and_grad(f, has_aux=True)
    return by_numpy(f, x) if sharding is None else run(f, x)[0]


@pytest.mark.parametrize(
    "backend, level, vocab",  # what is made of a backend's statistics is the same code for all of them
    [
        *(("chunked", "token", "tensor"), ("chunked", "sequence", None), ("pallas_tpu", "token", "tensor")),
        *(pytest.param(b, "token", None, marks=pytest.mark.slow) for b in ("chunked", "pallas_tpu", "reference")),
        pytest.param("chunked", "sequence", "tensor", marks=pytest.mark.slow),
        pytest.param("reference", "token", "tensor", marks=pytest.mark.slow),
    ],
)
def test_logits(backend: str, level: str, vocab: str | None) -> None:
    tokens = P("data", "seq") if vocab else P("data", ("seq", "tensor"))
    sharding = Sharding(mesh(MESH, explicit=vocab is None), tokens=tokens, vocab=vocab)
    assert_same(logits_results(backend, level, sharding), logits_results("chunked", level))  # one device


def test_statistics_and_every_cotangent() -> None:
    """linear_logprobs: all statistics, and gradients of logp, entropy and lse together, vocabulary-parallel."""
    data = batch()
    rng = np.random.default_rng(5)
    weights = rng.normal(size=(3, *SHAPE)).astype(np.float32)
    bias = rng.normal(size=64).astype(np.float32)
    options = {"mask": data["mask"], "temperature": rng.uniform(0.5, 2.0, SHAPE).astype(np.float32), "softcap": 5.0}
    options["head_layout"] = "hv"  # whose vocabulary here is smaller than the width
    sharding = Sharding(mesh(MESH), tokens=P("data", "seq"), head=P(None, "tensor"))

    def f(h: Any, w: Any, bias: Any, **more: Any) -> Any:
        s = flat_calls.linear_logprobs(h, w, data["targets"], bias=bias, **options, **more)
        return jnp.sum(weights[0] * s.logp + weights[1] * s.entropy + weights[2] * s.lse), s

    args = (data["hidden"], data["lm_head"].T.copy(), bias)
    got = run(jax.value_and_grad(functools.partial(f, sharding=sharding), (0, 1, 2), has_aux=True), *args)[0]
    assert_same(got, by_numpy(jax.value_and_grad(f, (0, 1, 2), has_aux=True), *args))


def test_lora_and_frozen_head() -> None:
    data, rng = batch(), np.random.default_rng(7)
    a, b = (rng.normal(size=s).astype(np.float32) / 8 for s in ((64, 4), (4, 128)))
    sharding = Sharding(mesh(MESH), tokens=P("data", "seq"), head=P("tensor", "data"))

    def f(h: Any, a: Any, b: Any, **more: Any) -> Any:
        s = flat_calls.linear_logprobs(h, data["lm_head"], data["targets"], mask=data["mask"], lora=(a, b), **more)
        return jnp.sum(s.logp * data["advantages"])

    got = run(jax.value_and_grad(functools.partial(f, sharding=sharding), (0, 1, 2)), data["hidden"], a, b)[0]
    assert_same(got, by_numpy(jax.value_and_grad(f, (0, 1, 2)), data["hidden"], a, b))


def test_bfloat16_sums_leave_devices_in_float32() -> None:
    """dW of eight devices is summed in float32 and rounded once; dH of eight shards of the vocabulary as well."""
    data = batch()
    data = dict(data, hidden=data["hidden"].astype(jnp.bfloat16), lm_head=data["lm_head"].astype(jnp.bfloat16))
    exact = alone(data, TOKEN)
    rest = {k: v for k, v in data.items() if k not in ("hidden", "lm_head")}
    by_tokens = Sharding(mesh({"data": 8}), tokens=P(None, "data"))
    for spec in (by_tokens, Sharding(mesh({"tensor": 8}), head=P("tensor", None))):
        f = jax.value_and_grad(functools.partial(loss, objective=TOKEN, sharding=spec), argnums=(0, 1), has_aux=True)
        assert_large_sums_are_float32(f, data["hidden"], data["lm_head"], rest)
        got = run(f, data["hidden"], data["lm_head"], rest)[0]
        assert got[1][0].dtype == got[1][1].dtype == jnp.bfloat16
        assert_same(got[1], exact[1], rtol=2.0**-8)


def assert_large_sums_are_float32(f: Any, *arguments: Any) -> None:
    traced = str(jax.make_jaxpr(f)(*arguments))
    large = [line for line in traced.splitlines() if "psum" in line and ("64,128]" in line or "32,128]" in line)]
    assert large and all("f32[" in line for line in large), large


def test_bfloat16_sums_of_a_recompute_leave_devices_in_float32() -> None:
    """The same where the gradients come after the loss; only traced."""
    data = batch()
    rest = {k: v for k, v in data.items() if k not in ("hidden", "lm_head")}
    h, w = (data[k].astype(jnp.bfloat16) for k in ("hidden", "lm_head"))
    spec = Sharding(mesh({"data": 8}), tokens=P(None, "data"))
    gradients = jax.grad(functools.partial(loss, objective=OBJECTIVES["sequence"], sharding=spec), (0, 1), has_aux=True)
    assert_large_sums_are_float32(gradients, h, w, rest)


def test_ambient_mesh() -> None:
    data = batch()
    with jax.set_mesh(mesh({"data": 4, "seq": 2}, explicit=True)):
        got = head_results(data, SEQUENCE, sharding=Sharding(tokens=P("data", "seq")))
    assert_same(got, alone(data, SEQUENCE))


@pytest.mark.parametrize("backend", ["chunked", pytest.param("reference", marks=pytest.mark.slow)])
def test_plain_jit_over_sharded_arguments(backend: str) -> None:
    """Without the keyword the compiler partitions plain JAX."""
    data = batch()
    m = mesh({"data": 4, "tensor": 2})
    placed = dict(data, hidden=jax.device_put(data["hidden"], NamedSharding(m, P("data"))))
    placed["lm_head"] = jax.device_put(data["lm_head"], NamedSharding(m, P("tensor", None)))
    assert_same(head_results(placed, TOKEN, backend=backend), alone(data, TOKEN, backend=backend))


@pytest.mark.parametrize("backend", ["chunked", pytest.param("pallas_tpu", marks=pytest.mark.slow)])
def test_inside_a_users_own_shard_map(backend: str) -> None:
    """Arrays are local there: no keyword, an explicit denominator, and the user's own reductions."""
    data = batch()
    options = {"backend": backend, "interpret": backend == "pallas_tpu"}
    tokens = float(data["mask"].sum())

    def local(h: Any, w: Any, rest: Any) -> Any:
        f = functools.partial(loss, objective=TOKEN, denominator=tokens, **options)
        (value, metrics), (dh, dw) = jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(h, w, rest)
        gathered = jax.tree.map(lambda x: jax.lax.all_gather(x, "data"), metrics)
        parts = [jax.tree.map(lambda x, i=i: x[i], gathered) for i in range(4)]
        return jax.lax.psum((value, dw), "data"), dh, logitless.reduce_metrics(parts)

    rest = {k: v for k, v in data.items() if k not in ("hidden", "lm_head")}
    sharded = jax.shard_map(
        local, mesh=mesh({"data": 4}), in_specs=(P("data"), P(), P("data")),
        out_specs=(P(), P("data"), P()), check_vma=False,
    )  # fmt: skip
    (value, dw), dh, metrics = run(sharded, data["hidden"], data["lm_head"], rest)[0]
    assert_same(((value, metrics), (dh, dw)), alone(data, TOKEN))


def test_live_tokens_of_devices_differ_and_nothing_recompiles() -> None:
    data = batch()
    spec = Sharding(mesh({"data": 4, "tensor": 2}), tokens=P("data"), head=P("tensor", None))
    count = 0

    def f(h: Any, w: Any, rest: Any) -> Any:
        nonlocal count
        count += 1
        return loss(h, w, rest, TOKEN, sharding=spec, chunk_size=2)

    compiled = jax.jit(f)
    for live in ([0, 0, 0, 0], [8, 0, 0, 1], [1, 8, 3, 5]):  # live tokens of each device
        mask = np.arange(8)[None, :] < np.array(live)[:, None]
        rest = {k: v for k, v in data.items() if k not in ("hidden", "lm_head")}
        h = np.where(mask[..., None], np.nan_to_num(data["hidden"]), np.nan)
        value, metrics = jax.device_get(compiled(h, data["lm_head"], dict(rest, mask=mask)))
        assert np.isfinite(value) and metrics["live_token_share"].sum == sum(live)
    assert count == 1


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2, 3, 4))])
def test_fuzz_over_meshes_and_specs(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    sizes = [(8,), (2, 4), (4, 2), (2, 2, 2)][rng.integers(4)]
    names = list(rng.permutation(["a", "b", "c"]))[: len(sizes)]
    axes = dict(zip(names, map(int, sizes), strict=True))
    roles = [rng.choice(["tokens", "vocab"]) for _ in names]  # each axis cuts tokens or is vocabulary-parallel
    where: dict[str, list[list[str]]] = {"tokens": [[], []], "head": [[], []]}
    for name, role in zip(names, roles, strict=True):
        if role == "vocab":
            where["head"][0].insert(0, name)
            continue
        rows = _product(axes, where["tokens"][0]) * axes[name] <= SHAPE[0]
        where["tokens"][0 if rows and rng.random() < 0.5 else 1].append(name)
        if rng.random() < 0.6:
            where["head"][rng.integers(2)].append(name)

    def spec(entries: list[list[str]]) -> P:
        return P(*(tuple(e) if e else None for e in entries))

    hv = bool(rng.integers(2))
    sharding = Sharding(
        mesh(axes, explicit=bool(rng.integers(2))),
        tokens=spec(where["tokens"]),
        head=spec(where["head"][::-1] if hv else where["head"]),
    )
    columns = int(rng.integers(20, 65))
    data = batch(seed, columns=columns)
    if hv:
        data["lm_head"] = data["lm_head"].T.copy()
    objective = [TOKEN, SEQUENCE, Objective(policy="cispo", eps_high=1.3, entropy_coef=0.1)][rng.integers(3)]
    options: dict[str, Any] = {"vocab_size": columns, "chunk_size": int(rng.integers(1, 9))}
    if rng.random() < 0.3:
        options["softcap"] = 4.0
    if hv:
        options["head_layout"] = "hv"  # whose vocabulary here is smaller than the width
    assert_same(head_results(data, objective, sharding=sharding, **options), alone(data, objective, **options))


def _product(axes: dict[str, int], names: list[str]) -> int:
    return int(np.prod([axes[n] for n in names], initial=1))


def _kernel_program(data: dict[str, Any], objective: Objective, sharding: Sharding, sums: str = "float32") -> Any:
    """Gradients of hidden states, head and bias by the kernels."""
    rest = {k: v for k, v in data.items() if k not in ("hidden", "lm_head")}
    options = {"backend": "pallas_tpu", "interpret": True, "sharding": sharding, "head_grad_dtype": sums}

    def f(h: Any, w: Any, bias: Any) -> Any:
        return loss(h, w, rest, objective, bias=bias, **options)[0]

    bias = np.linspace(-1, 1, 64, dtype=np.float32)
    return run(jax.grad(f, (0, 1, 2)), data["hidden"], data["lm_head"], bias)


def _bfloat16(data: dict[str, Any]) -> dict[str, Any]:
    return dict(data, hidden=data["hidden"].astype(jnp.bfloat16), lm_head=data["lm_head"].astype(jnp.bfloat16))


def _largest(program: str, gathers: bool) -> int:
    return max(n for kind, n in collectives(program) if (kind == "all-gather") == gathers)


def test_parts_of_a_head() -> None:
    """The fewest, a power of two, that are at most 512 MiB in float32 and divide a device's columns."""
    assert parts.number(151936 * 4096, 151936) == 8
    assert parts.number(151936 * 4096, 151936 // 64) == 2 and parts.number(32768 * 1024, 32768) == 1


@pytest.mark.parametrize("dtype", ["float32", pytest.param("param", marks=pytest.mark.slow)])
def test_dw_in_parts_has_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    data, where = _bfloat16(batch()), Sharding(mesh({"data": 4, "tensor": 2}), tokens=P("data"), head=P("tensor", None))
    whole, program = _kernel_program(data, TOKEN, where, dtype)
    monkeypatch.setattr(parts, "MOST_BYTES", 4 * 32 * 128 // 2)  # two parts
    cut, cut_program = _kernel_program(data, TOKEN, where, dtype)
    for a, b in zip(cut, whole, strict=True):
        np.testing.assert_array_equal(a, b)
    assert 2 * _largest(cut_program, False) == _largest(program, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective",
    [
        pytest.param(TOKEN, id="token"),
        pytest.param(dataclasses.replace(TOKEN, entropy_coef=0.1, temperature=0.7), id="entropy"),
    ],
)
def test_a_head_that_is_gathered_in_parts(monkeypatch: pytest.MonkeyPatch, objective: Objective) -> None:
    """The gradients of a head that is gathered whole, up to the order of the statistics' sums; half of it at a time."""
    data = _bfloat16(batch())
    where = Sharding(mesh({"data": 2, "fsdp": 4}), tokens=P("data", "fsdp"), head=P("fsdp", None))
    whole, program = _kernel_program(data, objective, where)
    monkeypatch.setattr(parts, "MOST_BYTES", 4 * 32 * 128)  # two parts
    cut, cut_program = _kernel_program(data, objective, where)
    for a, b in zip(cut, whole, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 2.0**-9 * np.linalg.norm(b)
    for gathers in (True, False):
        assert 2 * _largest(cut_program, gathers) == _largest(program, gathers)
