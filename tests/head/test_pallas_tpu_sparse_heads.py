"""The sparse backward on TPU for every kind of head, in the interpreter: ``[H, V]``, LoRA, rounded logits, shards."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from interpreted import in_numpy
from logitless import Sharding, explain, linear_grpo_loss, metric_values, oracle
from logitless.core.transform import LogitTransform
from logitless.head.pallas_tpu import kernels, sparse_shard
from logitless.head.pallas_tpu.columns_at import put_columns
from logitless.head.pallas_tpu.gathered import MASS_ERROR, least_logits
from logitless.head.pallas_tpu.sparse_columns import tpu_rule
from numerics import assert_same_bits, f64, head_problem
from test_pallas_tpu_sparse import (
    DAPO,
    TOLERANCE,
    VOCAB,
    N,
    calibrated,
    loss_inputs,
    probabilities,
    run,
    truth_of,
)
from test_sparse_backward import assert_as_good

SCALE = np.float32(0.5)

KINDS = {
    "[H, V], LoRA and the head": dict(layout="hv", lora=True, frozen=False, logits_dtype="float32"),
    "LoRA over a frozen head, bfloat16 logits": dict(layout="vh", lora=True, frozen=True, logits_dtype="bfloat16"),
    "[H, V], bfloat16 logits": dict(layout="hv", lora=False, frozen=False, logits_dtype="bfloat16"),
}
FIRST = next(iter(KINDS))


@pytest.mark.parametrize("kind", [k if k == FIRST else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_as_good_as_the_ordinary_path(kind: str) -> None:
    """Sharp rows with dead ones among them, which hold NaN; some rows are hard, and no chunk is dense."""
    layout, lora, frozen, logits_dtype = KINDS[kind].values()
    case = calibrated()
    rest = loss_inputs(case)
    rest["mask"] = (np.arange(rest["mask"].size) % 7 != 3).reshape(rest["mask"].shape)
    h, w = case.parameters(str(layout))
    h = jnp.where(rest["mask"][..., None], h, jnp.nan)
    trained: dict[str, Any] = {"h": h} if frozen else {"h": h, "w": w}
    rng = np.random.default_rng(3)
    if lora:
        size = float(jnp.std(w.astype(jnp.float32)))
        trained["a"] = jnp.asarray(0.2 * size * rng.standard_normal((w.shape[0], 3)), w.dtype)
        trained["b"] = jnp.asarray(0.2 * rng.standard_normal((3, w.shape[1])), w.dtype)

    def gradients(backend: str, sparse: Any) -> Any:
        @(jax.jit if backend == "pallas_tpu" else in_numpy)
        def run(trained: Any) -> Any:
            def loss(t: Any) -> Any:
                return linear_grpo_loss(
                    t["h"], t.get("w", w), jnp.asarray(case.targets), objective=DAPO, backend=backend, chunk_size=64,
                    interpret=backend == "pallas_tpu", head_layout=layout, logits_dtype=logits_dtype,
                    sparse_backward=sparse, lora=(t["a"], t["b"]) if lora else None, lora_scale=SCALE, **rest,
                )  # fmt: skip

            return jax.grad(loss, has_aux=True)(trained)

        return run(trained)

    got, metrics = gradients("pallas_tpu", TOLERANCE)
    ordinary, _ = gradients("chunked", "off")
    values = metric_values(metrics)
    assert values["dense_chunks"] == 0 and 0 < values["backward_columns"] < 0.25
    assert 0 < values["left_out_mass_max"] <= TOLERANCE and 0 < values["hard_rows"] < 0.5

    merged = f64(w) + (float(SCALE) * f64(trained["a"]) @ f64(trained["b"]) if lora else 0.0)
    hidden = np.where(rest["mask"][..., None], f64(case.hidden), 0.0)
    _, dh, dw, *_ = oracle.linear_grpo_loss(hidden, merged, case.targets, objective=DAPO, head_layout=layout, **rest)
    truth = {"h": dh, "w": dw}
    if lora:
        scaled = float(SCALE) * dw
        truth |= {"a": scaled @ f64(trained["b"]).T, "b": f64(trained["a"]).T @ scaled}
    for name, value in got.items():
        assert value.dtype == trained[name].dtype and np.isfinite(f64(value)).all()
        assert_as_good(f"d{name}", value, ordinary[name], truth[name])
    assert not f64(got["h"])[~rest["mask"]].any()


def test_logits_made_again_are_never_taken_too_large() -> None:
    """Near the middle between two bfloat16 neighbours a tiny error rounds to the other one, 0.125 away at 30."""
    rng = np.random.default_rng(0)
    low = np.asarray(jnp.asarray(rng.uniform(-40, 40, 4000), jnp.bfloat16)).astype(np.float64)
    up = np.asarray(jnp.nextafter(jnp.asarray(low, jnp.bfloat16), jnp.inf)).astype(np.float64)
    x = ((low + up) / 2 + rng.uniform(-1, 1, 4000) * MASS_ERROR).astype(np.float32)
    again = (x + 0.99 * rng.uniform(-1, 1, 4000) * MASS_ERROR).astype(np.float32)
    h, w = jnp.zeros((1, 128), jnp.bfloat16), jnp.zeros((256, 128), jnp.bfloat16)
    for dtype, slack in ((jnp.bfloat16, 0.0), (jnp.float32, MASS_ERROR)):
        p = head_problem(h, w, jnp.zeros(1, int), transform=None, logits_dtype=jnp.dtype(dtype))  # type: ignore[arg-type]
        swept, least = f64(jnp.asarray(x).astype(dtype)), f64(least_logits(p, jnp.asarray(again)))
        assert (least <= swept + slack).all()
    assert (f64(jnp.asarray(again).astype(jnp.bfloat16)) > f64(jnp.asarray(x).astype(jnp.bfloat16))).any()


def test_columns_are_put_into_place() -> None:
    """Blocks of every width, a run of blocks without a column, the last column, and slots beyond the vocabulary."""
    rng = np.random.default_rng(1)
    for vocab, index in ((1024, [0, 5, 511, 512, 1023]), (128, [3, 127]), (1280, list(range(700, 900)))):
        count = 256
        at = np.concatenate([index, vocab + np.arange(count - len(index))]).astype(np.int32)
        whole = jnp.asarray(rng.standard_normal((128, vocab)), jnp.bfloat16)
        new = jnp.asarray(rng.standard_normal((count, 128)), jnp.bfloat16)
        got = jax.jit(put_columns, static_argnums=3)(whole, jnp.asarray(at), new, pltpu.InterpretParams())
        assert_same_bits(got, whole.at[:, jnp.asarray(index)].set(new[: len(index)].T))


# -- shards of the vocabulary ------------------------------------------------------------------------------------------


def test_what_a_shard_leaves_out_by_the_definition() -> None:
    """Half of the columns on one device, with the statistics of all: its columns and masses in float64."""
    case, half = calibrated(), VOCAB // 2
    h, w = (x.reshape(-1, x.shape[-1]) for x in case.parameters())
    y = jnp.asarray(case.targets.reshape(-1))
    live = jnp.arange(N) % 7 != 3
    share = jnp.float32(TOLERANCE / 2)

    @jax.jit
    def found(h: Any, w: Any) -> Any:
        t = LogitTransform()
        out = kernels.token_stats(head_problem(h, w, y, transform=t, interpret=True))
        p = head_problem(h, w[:half], jnp.where(y < half, y, 2**31 - 1), transform=t, interpret=True)
        p = dataclasses.replace(p, live=live, tolerance=jnp.float32(TOLERANCE))
        return sparse_shard.find(tpu_rule(half), p, out, share)

    columns, report = found(jnp.where(live[:, None], h, 0), w)
    count, index = int(columns.active.count), np.asarray(columns.active.index)
    assert not columns.active.dense and 0 < count < half // 4 and (index[count:] >= half).all()
    p, counts = probabilities(case), np.asarray(live)
    own = np.isin(np.arange(VOCAB), index[:count])
    targets = np.asarray(y)[counts]
    assert own[targets[targets < half]].all()
    left = p[:, :half][:, ~own[:half]].sum(1)
    kept = p[:, :half][:, own[:half]].sum(1)
    got = np.asarray(columns.left_out)
    assert (got[counts] >= left[counts] - 2e-6).all(), "more is left out than it says"
    np.testing.assert_allclose(got[counts], (left + MASS_ERROR * kept)[counts], rtol=1e-3, atol=3e-6)
    assert not got[~counts].any()
    np.testing.assert_array_equal(np.asarray(report.left_out), got)
    # The bound is the logsumexp itself: the set is that of the probabilities, without a column too many.
    best = np.where(np.arange(VOCAB)[None] == np.asarray(y)[:, None], 0.0, p)[counts].max(0)[:half]
    best[targets[targets < half]] = np.inf
    edges = TOLERANCE * np.array(tpu_rule(half).thresholds)
    assert any(((best > e) == own[:half]).all() for e in edges)


@pytest.mark.slow
def test_vocabulary_parallel() -> None:
    """Two shards: as good as the ordinary path, every row within the tolerance over both."""
    case = calibrated()
    rest = loss_inputs(case)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    where = Sharding(mesh, tokens=PartitionSpec(), head=PartitionSpec("tensor", None))
    a, b = jnp.zeros((VOCAB, 2), jnp.bfloat16), jnp.ones((2, case.hidden.shape[-1]), jnp.bfloat16)

    @jax.jit
    def f(h: Any, w: Any, a: Any) -> Any:
        def loss(h: Any, w: Any, a: Any) -> Any:
            return linear_grpo_loss(
                h, w, jnp.asarray(case.targets), objective=DAPO, backend="pallas_tpu", interpret=True, lora=(a, b),
                sparse_backward=TOLERANCE, sharding=where, **rest,
            )  # fmt: skip

        return jax.grad(loss, (0, 1, 2), has_aux=True)(h, w, a)

    (*grads, da), metrics = f(*case.parameters(), a)
    values = metric_values(metrics)
    assert values["dense_chunks"] == 0 and 0 < values["backward_columns"] < 0.25
    assert 0 < values["left_out_mass_max"] <= TOLERANCE and 0 < values["hard_rows"] < 0.5
    _, _, _, ordinary = run(case, rest, None, "chunked")
    truth = truth_of(case, rest)
    for name, got, off, known in zip(("dh", "dw"), grads, ordinary, truth, strict=True):
        assert_as_good(name, got, off, known)
    known = truth[1] @ f64(b).T
    assert np.linalg.norm(f64(da) - known) <= 2.0**-6 * np.linalg.norm(known)


def test_explain_says_what_a_shard_costs() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    where = Sharding(mesh, tokens=PartitionSpec(), head=PartitionSpec("tensor", None))
    h, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 64, 128), (VOCAB, 128)))
    route = explain(
        linear_grpo_loss, h, w, backend="pallas_tpu", interpret=True, sparse_backward="auto", sharding=where
    )
    assert route.backend == "pallas_tpu" and "sum over shards" in route.way and route.matmuls.startswith("2 + 4 K/V")
