"""What ``explain`` says of a call (backend, matmuls) is what the program of that call contains."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flat_calls
from logitless import Objective, Sharding, explain, linear_grpo_loss, linear_logprobs
from logitless.core.options import Head
from matmuls import matmul_flops

B, T, H, V, CHUNK = 2, 8, 128, 512, 4
ONE = 2 * B * T * H * V
OBJECTIVES = {
    "clip": Objective(eps_low=0.9, eps_high=9.0),
    "cispo": Objective(policy="cispo", eps_high=9.0, aggregation="dapo"),
    "entropy": Objective(eps_low=0.9, eps_high=9.0, entropy_coef=0.1),
    "gspo": Objective(level="sequence", eps_low=0.9, eps_high=9.0),
    "correction": Objective(eps_low=0.9, eps_high=9.0, correction="token", correction_max=10.0),
    None: None,
}
LAYOUTS = {None: None, "data": (P("x"), P()), "fsdp": (P("x"), P("x", None)), "vocab": (P(), P("x", None))}


def random_call(rng: np.random.Generator) -> dict[str, Any]:
    """One call of the many there are; combinations that are refused are another test's."""
    backend = str(rng.choice(["chunked", "chunked", "reference", "pallas_tpu"]))
    objective = str(rng.choice([k or "" for k in OBJECTIVES])) or None
    call = dict(
        backend=backend, objective=objective, layout=rng.choice(["", "", "data", "fsdp", "vocab"]) or None,
        lora=bool(backend != "pallas_tpu" and rng.integers(2)), bias=bool(rng.integers(2)),
        frozen=bool(rng.integers(2)), old=bool(rng.integers(2)), masked=bool(backend == "chunked" and rng.integers(2)),
        sparse=bool(backend == "chunked" and rng.integers(3) == 0), gradient=bool(rng.integers(4)),
    )  # fmt: skip
    if backend == "pallas_tpu" or call["layout"] is not None:
        call["lora"] = False if backend == "pallas_tpu" else call["lora"]
    return call


def arguments(call: dict[str, Any], rng: np.random.Generator) -> tuple[Any, dict[str, Any]]:
    """``(primals, keyword arguments)``."""
    h = jnp.asarray(rng.standard_normal((B, T, H)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((V, H)) / math.sqrt(H), jnp.float32)
    primals: dict[str, Any] = {"hidden": h, "lm_head": w}
    options: dict[str, Any] = dict(backend=call["backend"], interpret=call["backend"] == "pallas_tpu", head_layout="vh")
    if call["bias"]:
        primals["bias"] = jnp.asarray(rng.standard_normal(V), jnp.float32)
    if call["lora"]:
        a, b = rng.standard_normal((V, 1)) / 8, rng.standard_normal((1, H)) / 8
        primals["lora"] = (jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
    if call["backend"] == "chunked":
        options |= dict(chunk_size=CHUNK)
    if call["sparse"]:
        options |= dict(sparse_backward=2.0**-8)
    if call["masked"]:  # half of the tokens, on each shard of the batch as many
        options |= dict(mask=jnp.asarray(np.arange(T) < T // 2) & jnp.ones((B, 1), bool))
    objective = OBJECTIVES[call["objective"]]
    if objective is not None:
        options |= dict(objective=objective, advantages=jnp.asarray([1.0, -1.0]))
        if call["old"]:
            options |= dict(old_logp=jnp.full((B, T), -math.log(V), jnp.float32))
        if objective.correction is not None:
            options |= dict(rollout_logp=jnp.full((B, T), -math.log(V), jnp.float32))
    if call["layout"] is not None:
        mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        tokens, head = LAYOUTS[call["layout"]]
        options |= dict(sharding=Sharding(mesh, tokens=tokens, head=head))
    return primals, options


@pytest.mark.parametrize("seed", [*range(28), *(pytest.param(s, marks=pytest.mark.slow) for s in range(28, 48))])
def test_explain_says_what_the_program_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    call = random_call(rng)
    primals, options = arguments(call, rng)
    targets = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)
    public = linear_logprobs if call["objective"] is None else linear_grpo_loss
    route = flat_calls.explain(public, **primals, targets=targets, **options)
    assert route.backend == call["backend"]

    constants = {"lm_head": primals["lm_head"]} if call["frozen"] else {}
    moving = {k: v for k, v in primals.items() if k not in constants and not (call["frozen"] and k != "hidden")}
    constants |= {k: v for k, v in primals.items() if k not in moving}

    def value(moving: dict[str, Any]) -> Any:
        out = flat_calls.flat(public)(**moving, **constants, targets=targets, **options)
        return out[0] if call["objective"] else jnp.sum(out.logp)

    f = jax.grad(value) if call["gradient"] else value
    # The compiler partitions the dense reference, after this count.
    shards = 2 if call["layout"] and not route.dense else 1
    live = 0.5 if call["masked"] else 1.0
    found = matmul_flops(f, moving) / (ONE * live / shards)
    expected = expected_matmuls(route, call)
    # LoRA's factors, the probes and the mean row of a sparse backward are small matmuls beside the whole ones.
    assert expected - 0.01 <= found <= expected + 0.35, (call, str(route))


def expected_matmuls(route: Any, call: dict[str, Any]) -> float:
    """What the route says, for logits that are flat: a sparse backward then takes all columns."""
    if not call["gradient"]:
        return int(re.search(r"(\d) without a gradient", route.matmuls).group(1))  # type: ignore[union-attr]
    if call["sparse"]:
        most = re.search(r"(\d)(?: to \d)? in dense chunks", route.matmuls).group(1)  # type: ignore[union-attr]
        return int(most) - call["frozen"]
    both, frozen, _ = route.described.counts
    return frozen if call["frozen"] else both


def test_the_two_that_were_wrong() -> None:
    """A correction without ``old_logp`` is by recompute; LoRA on a TPU went through plain JAX without a word."""
    h, w = jax.ShapeDtypeStruct((B, T, H), jnp.bfloat16), jax.ShapeDtypeStruct((V, H), jnp.bfloat16)
    o = Objective(correction="token")
    logp = jax.ShapeDtypeStruct((B, T), jnp.float32)
    assert explain(linear_grpo_loss, h, w, objective=o, rollout_logp=logp).matmuls.startswith("4")
    assert explain(linear_grpo_loss, h, w, objective=o, rollout_logp=logp, old_logp=logp).matmuls.startswith("3")
    lora = (jax.ShapeDtypeStruct((V, 4), jnp.bfloat16), jax.ShapeDtypeStruct((4, H), jnp.bfloat16))
    from logitless.lab.plan.chips import as_if_on, chip_of

    with as_if_on(chip_of("v6e")):
        assert explain(linear_grpo_loss, h, w).backend == "pallas_tpu"
        route = explain(linear_grpo_loss, h, Head(w, lora=lora))
    assert route.backend == "pallas_tpu"
    assert "LoRA" in route.way and route.matmuls.startswith("4 (3 with LoRA trained and the head frozen")


def test_float16_takes_its_scale_before_rounding() -> None:
    h, w = jax.ShapeDtypeStruct((B, T, H), jnp.float16), jax.ShapeDtypeStruct((V, H), jnp.float16)
    route = explain(linear_grpo_loss, h, w)
    assert "loss scale" in route.way
    assert route.matmuls.startswith("4")
