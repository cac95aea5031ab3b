"""The exact path of a Hopper GPU with dx in memory, in Pallas' GPU interpreter, against float64; which tokens its
chunks visit, and when it serves. On a device: tests/head/test_gpu_fuzz.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
import logitless as L
from logitless import Objective, oracle
from logitless.core.compat import mosaic_gpu_reason
from logitless.core.divergences import Divergence
from logitless.core.stats import LogitTransform
from logitless.head.mosaic_gpu import stored_dx
from logitless.head.mosaic_gpu.kernels import dynamic_matmul
from logitless.lab.plan.chips import CHIPS, as_if_on
from numerics import assert_contract, f64, head_case, head_problem

pytestmark = pytest.mark.skipif(mosaic_gpu_reason() is not None, reason=str(mosaic_gpu_reason()))

SHAPE, WIDTH, VOCAB = (3, 11), 64, 256
OBJECTIVES = {"clip": Objective(aggregation="dapo"), "gspo": Objective(level="sequence", entropy_coef=0.05)}


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four blocks, and tiles and rounds of a few tokens."""
    tiles_of = dynamic_matmul.tiles_of
    with monkeypatch.context() as patch:
        patch.setattr(dynamic_matmul, "tiles_of", lambda *s: dataclasses.replace(tiles_of(*s), blocks=4))
        patch.setattr(stored_dx, "_TILE", 8)
        patch.setattr(stored_dx, "_FROZEN", 16)
        yield


@pytest.mark.parametrize(
    ("kind", "layout", "options", "wanted"),
    [
        ("clip", "vh", dict(chunk_size=8), (0, 1)),  # two chunks, whose dx the row kernel writes into its rows
        ("clip", "vh", dict(chunk_size=16), (0, 1, 2)),  # the bias needs dx before it is rounded
        pytest.param("gspo", "vh", dict(chunk_size=16), (0, 1), marks=pytest.mark.slow),
        pytest.param("clip", "hv", dict(chunk_size=16), (0,), marks=pytest.mark.slow),  # rounds of 16 tokens
        pytest.param("gspo", "hv", dict(chunk_size=16), (0, 1, 2), marks=pytest.mark.slow),
        pytest.param("gspo", "vh", dict(memory_budget=1 << 24), (0, 1, 2), marks=pytest.mark.slow),
        pytest.param("gspo", "vh", dict(memory_budget=1 << 24, logits_dtype="bfloat16"), (1,), marks=pytest.mark.slow),
    ],
)
def test_gradients(kind: str, layout: str, options: dict[str, Any], wanted: tuple[int, ...]) -> None:
    """Hidden states, head and bias, with NaN in masked tokens and a sequence without advantage; and of a batch in which
    nothing is live they are zero."""
    rng, case = np.random.default_rng(3), head_case(1, SHAPE, WIDTH, VOCAB, jnp.bfloat16, lead=4.0)
    h, w = case.parameters(layout)
    bias = jnp.asarray(0.1 * rng.standard_normal(VOCAB), jnp.bfloat16)
    mask = rng.random(SHAPE) < 0.7
    rest = dict(
        advantages=np.array([1.0, 0.0, -0.5], np.float32),
        old_logp=(-1 + 0.1 * rng.standard_normal(SHAPE)).astype(np.float32),
    )
    hidden = jnp.asarray(np.where(mask[..., None], np.asarray(h, np.float32), np.nan), jnp.bfloat16)
    o = OBJECTIVES[kind]
    rounded = {k: v for k, v in options.items() if k == "logits_dtype"}

    def gradients(mask: Any, *arrays: Any, **where: Any) -> Any:
        def loss(*x: Any) -> Any:
            given = dict(objective=o, head_layout=layout, mask=mask, bias=x[2], **rest, **where)
            return flat_calls.linear_grpo_loss(*x[:2], jnp.asarray(case.targets), **given)[0]

        return jax.value_and_grad(loss, wanted)(*arrays)

    kernel = jax.jit(lambda *x: gradients(*x, backend="mosaic_gpu", interpret=True, **options))
    value, got = kernel(mask, hidden, w, bias)
    plain = jax.jit(lambda *x: gradients(*x, backend="reference", **rounded))(mask, h, w, bias)
    loss, *grads = oracle.linear_grpo_loss(
        case.hidden, w, case.targets, bias=np.asarray(bias), head_layout=layout, objective=o, mask=mask, **rest
    )
    np.testing.assert_allclose(value, loss, rtol=2e-2 if rounded else 2e-6, atol=1e-6)
    floor = 2.0**-8 / 2.0**-23 if rounded else 2.0**-10 / 2.0**-23  # half an ulp of the operands in either may be luck
    for i, a, b in zip(wanted, got, plain[1], strict=True):
        assert np.abs(grads[i]).max() > 0
        assert_contract(f"{kind} {layout} {i}", a, b, grads[i], floor_ulp=floor)
    value, got = kernel(np.zeros_like(mask), hidden, w, bias)
    assert value == 0 and all((f64(x) == 0).all() for x in got)


@pytest.mark.parametrize(
    ("kind", "late"),
    [("reverse_kl", False), pytest.param("forward_kl", False, marks=pytest.mark.slow),
     pytest.param("reverse_kl", True, marks=pytest.mark.slow)],
)  # fmt: skip
def test_with_a_teacher(kind: Divergence, late: bool) -> None:
    """Both heads' logits of a chunk, and the student's dx into its rows; with cotangents at once, or later."""
    rng = np.random.default_rng(5)
    (h, w), (th, tw) = (
        (jnp.asarray(rng.standard_normal((1, 21, k)), jnp.bfloat16),
         jnp.asarray(3 * rng.standard_normal((VOCAB, k)) / k**0.5, jnp.bfloat16)) for k in (64, 128)
    )  # fmt: skip
    mask, g = rng.random((1, 21)) < 0.7, rng.standard_normal((1, 21)).astype(np.float32)
    dead = jnp.asarray(~mask)[..., None]

    def run(backend: str) -> Any:
        options = L.Options(backend=backend, interpret=backend == "mosaic_gpu", chunk_size=8)

        def loss(h: Any, w: Any) -> Any:
            sides = jnp.where(dead, jnp.nan, h), w, jnp.where(dead, jnp.nan, th), tw
            if late:
                s = L.linear_divergence(*sides, divergence=kind, mask=mask, options=options)
                return jnp.sum(g * s.divergence)
            d = L.Distillation(divergence=kind, temperature=1.5)
            return L.linear_distillation_loss(*sides, mask=mask, distillation=d, options=options)[0]

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(h, w)

    with as_if_on(CHIPS["h200"]):
        found = L.explain(L.linear_distillation_loss, h, w, th, tw, distillation=L.Distillation(divergence=kind))
    assert found.backend == "mosaic_gpu" and found.tiles["dx_rows"] == 21
    (loss, got), (want, wanted) = run("mosaic_gpu"), run("chunked")
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for label, a, b in zip(("dH", "dW"), got, wanted, strict=True):
        assert np.linalg.norm(f64(a) - f64(b)) < 4e-3 * np.linalg.norm(f64(b)) and np.abs(f64(b)).max() > 0, label


def test_chunks_visit_every_token_once_and_no_tile_too_many() -> None:
    """Tokens with a gradient, and as many other live ones as fill their last tile; then the rest of these."""
    rng, n = np.random.default_rng(0), 100
    for count in (0, 1, 7, 8, 9, 31, 32, 33, 64, 99, 100):
        limit = min(count + 5, n)
        moving, others, _ = np.split(rng.permutation(n), (count, limit))
        arrays = jnp.zeros((n, 8)), jnp.zeros((16, 8)), jnp.zeros(n, jnp.int32)
        p = head_problem(*arrays, transform=LogitTransform(), chunk=32)
        moves, live = np.isin(np.arange(n), moving), np.isin(np.arange(n), [*moving, *others])
        reached = min(-(-count // 8) * 8, limit)
        first, rest = stored_dx._split(p, jnp.asarray(live), jnp.asarray(moves))
        assert stored_dx._covered(first) == -(-count // 8) * 8

        def body(visit: Any, at: Any, x: Any, seen: Any) -> Any:
            return visit.put(seen[0], seen[0][visit.read] + 1), seen[1] + 1

        order = [*sorted(moving), *sorted(others)]
        for chunks, own in ((first, order[:reached]), (rest, order[reached:])):
            start = jnp.zeros(n, jnp.int32), jnp.int32(0)
            seen, visits = stored_dx._over_chunks(chunks, p, body, start)
            assert set(np.flatnonzero(seen)) == set(own) and int(seen.max(initial=0)) <= 1
            assert visits == max(-(-int(chunks.count) // 32), 1)


def test_it_serves_where_dx_takes_no_more_than_the_sum_of_dw() -> None:
    """By default; with a budget, where that holds it. It has neither LoRA nor ragged vocabularies."""

    def why(n: int, width: int, vocab: int, **call: Any) -> str | None:
        h, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((n, width), (vocab, width)))
        y = jax.ShapeDtypeStruct((n,), jnp.int32)
        p = head_problem(h, w, y, transform=LogitTransform(), **dict(dict(chunk=2048), **call))
        return stored_dx.not_stored_because(p)

    assert why(8192, 4096, 151936) is None
    assert "more than" in str(why(16384, 1536, 151936))
    assert "more than" in str(why(8192, 4096, 151936, sum_head_grad_in="param"))
    assert why(16384, 1536, 151936, memory_budget=6 << 30) is None
    assert "more than" in str(why(8192, 4096, 151936, memory_budget=2 << 30))
    assert "multiples of 64" in str(why(1024, 4096, 151944))


def test_explain_says_what_is_kept() -> None:
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 8192, 4096), (151936, 4096))]
    found = {}
    for name, budget in (("none", None), ("all", 8 << 30)):
        with as_if_on(CHIPS["h200"]):
            call = dict(objective=OBJECTIVES["gspo"], memory_budget=budget)
            found[name] = flat_calls.explain(flat_calls.linear_grpo_loss, *shapes, **call)
    assert found["none"].tiles["dx_rows"] == 8192 and "kept" not in found["none"].tiles
    assert found["none"].matmuls.startswith("4 ") and "recompute" in found["none"].way
    assert found["all"].tiles["kept"] == 8192
    assert found["all"].matmuls.startswith("3 ") and "kept logits" in found["all"].way
