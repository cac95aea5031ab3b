"""The plan's numbers are those of the compiler: on a CPU, over a mesh, and for TPUs ahead of time."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flat_calls
import logitless
from ahead_of_time import answer_of, needs_libtpu
from logitless import Objective, Sharding
from logitless.lab.tpu import aot

B, T, H, V = 2, 64, 128, 1024


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def said(compiled: Any) -> tuple[int, int, int]:
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes, m.output_size_in_bytes, m.temp_size_in_bytes


def of_plan(p: logitless.lab.plan.plan.Plan) -> tuple[int, int, int]:
    assert p.compiled and "compiled for" in p.source
    return p.arguments, p.outputs, p.temporaries


CASES: dict[str, dict[str, Any]] = {  # where a formula was up to half or twice of it
    "chunked": {},
    "dense, entropy bonus": dict(backend="reference", objective=Objective(entropy_coef=0.1)),
    "dense, no gradient": dict(backend="reference", gradients=()),
    "reference head": dict(ref_hidden=struct(B, T, H), ref_lm_head=struct(V, H)),
    "lora": dict(lora=(struct(V, 4), struct(4, H)), gradients=("hidden", "lora")),
    "sparse": dict(sparse_backward=2.0**-8, active_columns=0.1, hard_rows=0.1),
}


@pytest.mark.parametrize(
    "name", [pytest.param(k, marks=pytest.mark.slow if k in ("sparse", "lora") else ()) for k in CASES]
)
def test_the_plan_of_a_loss_is_what_the_compiler_says(name: str) -> None:
    options = dict(CASES[name])
    moving = {"hidden": struct(B, T, H), "lm_head": struct(V, H)} | {k: v for k, v in options.items() if k == "lora"}
    p = flat_calls.plan(logitless.linear_grpo_loss, **moving | options)
    gradients = options.pop("gradients", None)
    fixed = {k: options.pop(k) for k in [*options] if k.startswith("ref_")}
    fixed |= {k: moving.pop(k) for k in [*moving] if gradients is not None and k not in gradients}
    static = {k: v for k, v in options.items() if k not in ("lora", "active_columns", "hard_rows")}

    def loss(moving: Any, fixed: Any, targets: Any, advantages: Any) -> Any:
        return flat_calls.linear_grpo_loss(**moving, **fixed, targets=targets, advantages=advantages, **static)

    f = jax.value_and_grad(loss, has_aux=True) if moving else loss
    got = jax.jit(f).lower(moving, fixed, struct(B, T, dtype=jnp.int32), struct(B)).compile()
    assert of_plan(p) == said(got)
    assert p.peak == p.arguments + p.outputs + p.temporaries


def test_the_plan_of_statistics_and_of_logits() -> None:
    y, g = struct(B, T, dtype=jnp.int32), struct(B, T)

    def pullback(h: Any, w: Any, y: Any, g: Any) -> Any:
        def weighted(h: Any, w: Any) -> Any:
            out = logitless.linear_logprobs(h, w, y)
            return jnp.sum(out.logp * g), out

        return jax.value_and_grad(weighted, argnums=(0, 1), has_aux=True)(h, w)

    got = jax.jit(pullback).lower(struct(B, T, H), struct(V, H), y, g).compile()
    p = logitless.plan(logitless.linear_logprobs, struct(B, T, H), struct(V, H), chip="CPU")
    assert of_plan(p) == said(got)
    assert of_plan(logitless.plan(struct(B, T, H), struct(V, H), objective=None)) == of_plan(p)  # the older form

    def loss(x: Any, y: Any, a: Any) -> Any:
        return logitless.grpo_loss(x, y, advantages=a)

    got = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(struct(B, T, V), y, struct(B)).compile()
    assert of_plan(logitless.plan(logitless.grpo_loss, np.zeros((B, T, V), np.float32))) == said(got)


def test_the_plan_over_a_mesh_is_that_of_one_device() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    sharding = Sharding(mesh, tokens=P("data"), head=P("tensor"))
    shapes = struct(B, T, H), struct(V, H)
    p = logitless.plan(logitless.linear_grpo_loss, *shapes, sharding=sharding)

    def loss(h: Any, w: Any, y: Any, a: Any) -> Any:
        return logitless.linear_grpo_loss(h, w, y, advantages=a, sharding=sharding)

    specs = P("data"), P("tensor"), P("data"), P("data")
    given = *shapes, struct(B, T, dtype=jnp.int32), struct(B)
    placed = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s))
        for x, s in zip(given, specs, strict=True)
    ]
    got = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)).lower(*placed).compile()
    assert of_plan(p) == said(got) and p.devices == 4
    assert {c["kind"] for c in p.collectives} >= {"all-reduce"}
    too_large = Sharding(jax.sharding.AbstractMesh((64,), ("data",)), tokens=P("data"))
    rows = struct(64, 4, H)
    assert "the mesh has 64 devices" in logitless.plan(rows, shapes[1], sharding=too_large, chip="cpu").source
    with pytest.raises(RuntimeError, match=r"compile=True, but .* the mesh has 64 devices, and there are 8 here"):
        logitless.plan(rows, shapes[1], sharding=too_large, chip="cpu", compile=True)


def of_tpus() -> dict[str, Any]:
    """What plan says of a v6e, of four, and of a program that does not fit; and the first by hand."""
    bf16 = jnp.bfloat16
    h, w = struct(4, 256, 256, dtype=bf16), struct(4096, 256, dtype=bf16)

    def loss(h: Any, w: Any, y: Any, a: Any) -> Any:
        return logitless.linear_grpo_loss(h, w, y, advantages=a)

    f = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    by_hand = aot.compile_for("v6e:2x2", f, h, w, struct(4, 256, dtype=jnp.int32), struct(4))
    fsdp = Sharding(jax.sharding.AbstractMesh((4,), ("fsdp",)), tokens=P("fsdp"), head=P("fsdp"))
    plans = dict(
        one=logitless.plan(h, w, chip="v6e"),
        four=logitless.plan(h, w, chip="v6e", sharding=fsdp),
        large=logitless.plan(logitless.grpo_loss, struct(1, 100_000, 151_936, dtype=bf16), chip="v6e"),
    )
    return {k: p.record() for k, p in plans.items()} | {"by_hand": by_hand.peak_bytes}


@needs_libtpu
@pytest.mark.slow
def test_tpu_programs_are_compiled_on_any_machine() -> None:
    found = answer_of(__file__)
    assert found["one"]["compiled"] and found["one"]["backend"] == "pallas_tpu"
    assert found["one"]["peak"] == found["by_hand"]
    assert found["four"]["compiled"] and found["four"]["arguments"] < 0.3 * found["one"]["arguments"]
    assert {"all-gather", "reduce-scatter"} <= {c["kind"] for c in found["four"]["collectives"]}
    assert not found["large"]["compiled"] and found["large"]["fits"] is False
    assert "the compiler refuses: RESOURCE_EXHAUSTED" in found["large"]["source"]


@pytest.mark.parametrize(
    ("generation", "count", "name"),
    [
        ("v6e", 1, "v6e:2x2"),
        ("v6e", 8, "v6e:2x4"),
        ("v5e", 9, "v5e:4x4"),
        ("v5p", 4, "v5p:2x2x1"),
        ("v5p", 9, "v5p:2x2x4"),
    ],
)
def test_the_smallest_slice_of_a_size(generation: str, count: int, name: str) -> None:
    assert aot.slice_for(generation, count) == name


def test_without_libtpu_a_tpu_plan_is_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    p = logitless.plan(struct(B, T, H, dtype=jnp.bfloat16), struct(V, H, dtype=jnp.bfloat16), chip="v6e")
    assert not p.compiled and "estimate, since libtpu" in p.source


if __name__ == "__main__":
    print(json.dumps(of_tpus()))
