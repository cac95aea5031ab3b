"""A whole train step compiled for TPUs, without a TPU: benchmarks/results/tpu_train_step.json.

    python benchmarks/tpu_train_step.py                (10 minutes on two cores; needs libtpu)
    python benchmarks/tpu_train_step.py v6e:1 v5p:8    (some of the slices)

Qwen2.5-1.5B: forward (a scan over the layers, each rematerialised), loss, backward and AdamW in one program, parameters
and moments donated. Weights and moments are float32, matmuls bfloat16; 8 rows of 1024 tokens a chip. With the kernels
inside (``fused``), and with the dense loss in their place (``dense``: a custom_vjp that keeps float32 logits). On eight
chips everything is FSDP: rows over all of them, each weight cut along its first dimension that divides, the head along
its vocabulary. Peak HBM of a chip is the compiler's own figure; a program that it refuses has its words. What the
kernels ask of VMEM must leave XLA enough for everything around them: that is what this is for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import harness
from logitless import Objective, Sharding, linear_grpo_loss
from logitless.core.options import Head, Options
from logitless.lab.tools import baselines, child
from logitless.lab.tpu import aot
from logitless.train.architectures import preset
from logitless.train.model import hidden_states, lm_head, param_shapes, positions_of

HERE = Path(__file__).resolve()
RESULT = "tpu_train_step.json"
MODEL, ROWS, LENGTH = "qwen2.5-1.5b", 8, 1024
SLICES = {"v6e:1": ("v6e:2x4", 1), "v6e:8": ("v6e:2x4", 8), "v5p:1": ("v5p:2x2x2", 1), "v5p:8": ("v5p:2x2x2", 8)}
"""Name: topology and chips. ``v6e:8`` is the 2x4 slice."""
FORMS = ("fused", "dense")
AXIS = "fsdp"


def weight_spec(shape: tuple[int, ...], chips: int, stacked: bool) -> P:
    """The first dimension that divides, behind the layers' own."""
    for d in range(1 if stacked else 0, len(shape)):
        if chips > 1 and len(shape) > 1 and shape[d] % chips == 0:
            return P(*[None] * d, AXIS)
    return P()


def program(form: str, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """``(step, argument shapes)``; the first two arguments, weights and the optimiser's state, are donated."""
    config, chips = preset(MODEL), mesh.size
    optimizer = optax.adamw(1e-6)
    specs = {
        "embed": P(AXIS if chips > 1 else None, None),
        "layers": {k: weight_spec(s, chips, True) for k, s in param_shapes(config)["layers"].items()},
        "norm": P(),
    }

    def placed(spec: P, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    weights = jax.tree.map(
        lambda spec, shape: placed(spec, shape, jnp.float32), specs, param_shapes(config),
        is_leaf=lambda x: isinstance(x, P),
    )  # fmt: skip
    first, *rest = jax.eval_shape(optimizer.init, weights)
    state = (first._replace(count=placed(P(), (), first.count.dtype), mu=weights, nu=weights), *rest)
    rows = P(AXIS) if chips > 1 else P()

    def per_token(dtype: Any) -> Any:
        return placed(rows, (ROWS * chips, LENGTH), dtype)

    batch = dict(
        tokens=per_token(jnp.int32), targets=per_token(jnp.int32), mask=per_token(bool),
        old_logp=per_token(jnp.float32), advantages=placed(rows, (ROWS * chips,), jnp.float32),
    )  # fmt: skip
    sharding = Sharding(mesh, tokens=P(AXIS), head=P(AXIS, None)) if chips > 1 else None

    def loss(weights: Any, batch: Any) -> Any:
        valid = jnp.ones_like(batch["mask"])
        hidden = hidden_states(
            weights, config, batch["tokens"], positions_of(valid), valid, compute_dtype=jnp.bfloat16, remat=True,
            attention="xla",
        )  # fmt: skip
        head = lm_head(weights, config).astype(jnp.bfloat16)
        given: Any = {k: batch[k] for k in ("mask", "old_logp", "advantages")}
        given["objective"] = Objective(aggregation="dapo")
        if form == "dense":
            return baselines.head_loss("strong", hidden, head, batch["targets"], logits_dtype="float32", **given)
        given |= dict(options=Options(backend="pallas_tpu"), sharding=sharding)
        return linear_grpo_loss(hidden, Head(head, layout="vh"), batch["targets"], **given)[0]

    def kept(tree: Any) -> Any:
        return jax.tree.map(lambda x, s: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, s)), tree, specs)

    def step(weights: Any, state: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(weights, batch)
        updates, (moments, *more) = optimizer.update(kept(gradient), state, weights)
        moments = moments._replace(mu=kept(moments.mu), nu=kept(moments.nu))
        return value, kept(optax.apply_updates(weights, updates)), (moments, *more)

    return step, (weights, state, batch)


def compile_one(name: str, form: str) -> dict[str, Any]:
    """Compile one step and say what came out; the compiler's refusal is a result."""
    topology, chips = SLICES[name]
    mesh = aot.mesh(topology, (chips,), (AXIS,))
    step, args = program(form, mesh)
    try:
        done = aot.compile_for(mesh, step, *args, donate=(0, 1))
    except jax.errors.JaxRuntimeError as error:
        words = str(error).strip().splitlines()
        return {"error": next((w for w in words if "Used" in w or "xceeded" in w), words[0])[:300]}
    return done.record()


def main(names: list[str]) -> None:
    record = harness.read(RESULT)
    record |= {
        "what": (
            f"{MODEL}, forward, loss, backward and AdamW in one program (scan over layers, remat, float32 weights and "
            f"moments), {ROWS} x {LENGTH} tokens a chip: HBM of a chip by the TPU compiler, ahead of time; nothing was "
            "run"
        ),
        "versions": aot.versions(),
        "command": "python benchmarks/tpu_train_step.py",
    }
    slices = record.setdefault("slices", {})
    for name in names or SLICES:
        slices[name] = {"topology": SLICES[name][0], "chips": SLICES[name][1]}
        for form in FORMS:
            slices[name][form] = child.last_line([str(HERE), "--one", name, form], aot.ENVIRONMENT, 3000)
            harness.say(name, form, slices[name][form])
            record["slices"] = {k: slices[k] for k in SLICES if k in slices}
            harness.write(RESULT, record)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print("\n" + json.dumps(compile_one(*sys.argv[2:4])))
    else:
        main(sys.argv[1:])
