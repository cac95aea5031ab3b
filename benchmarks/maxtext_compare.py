"""A MaxText model's own logits, and its hidden states with a loss that makes none: loss, gradients, and a control.

    pip install -e '.[tunix]' maxtext pathwaysutils aqtp tokamax drjax tiktoken
    python benchmarks/maxtext_compare.py    writes results/maxtext.json, from which docs/maxtext.md has its numbers

Tiny random models in float32 on a CPU. MaxText hands out hidden states where ``num_vocab_tiling`` is above 1, before
its final norm; the norm, the scale and the soft cap of its head are applied here. A tied embedding is rounded to
bfloat16, as MaxText does in any case.
"""

from __future__ import annotations

import math
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils, model_creation_utils

import harness
import logitless

B, T, V = 4, 16, 160
HEADS: dict[str, dict[str, Any]] = {
    "lm_head": {"logits_via_embedding": False},
    "tied": {"logits_via_embedding": True, "normalize_embedding_logits": False},
    "tied, scaled, capped": {
        "logits_via_embedding": True, "normalize_embedding_logits": True, "final_logits_soft_cap": 30.0,
    },
}  # fmt: skip
IDS = jax.random.randint(jax.random.key(1), (B, T), 0, V)
TARGETS, MASK = logitless.next_tokens(IDS, jnp.broadcast_to(jnp.arange(T) >= 6, (B, T)))
LOSS: dict[str, Any] = {
    "advantages": jnp.array([1.0, -0.7, 0.5, -0.2]),
    "mask": MASK,
    "objective": logitless.Objective.dapo(eps_low=0.2, eps_high=0.28, entropy_coef=0.01),
}


def made(**settings: Any) -> tuple[Any, Any, Any]:
    """``(config, mesh, model)`` of a model with the same random weights for the same shapes."""
    config = pyconfig.initialize(
        ["", str(Path(maxtext.__file__).parent / "configs" / "base.yml")],
        run_name="compare", enable_checkpointing=False, base_emb_dim=64, base_mlp_dim=128, base_num_query_heads=2,
        base_num_kv_heads=2, head_dim=32, base_num_decoder_layers=2, vocab_size=V, per_device_batch_size=B,
        max_target_length=T, dtype="float32", weight_dtype="float32", matmul_precision="highest", hardware="cpu",
        skip_jax_distributed_system=True, attention="dot_product", scan_layers=False, log_config=False, **settings,
    )  # fmt: skip
    mesh = maxtext_utils.get_mesh_from_config(config)
    return config, mesh, model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(params=0, dropout=1))


def called(model: Any) -> Any:
    """What the model returns for the batch."""
    positions, segments = jnp.broadcast_to(jnp.arange(T), (B, T)), jnp.ones((B, T), jnp.int32)
    out = model(IDS, positions, decoder_segment_ids=segments, enable_dropout=False)
    return out[0] if isinstance(out, tuple) else out


def head_of(config: Any, model: Any) -> logitless.Head:
    """The head, out of MaxText's settings."""
    if not config.logits_via_embedding:
        return logitless.Head(model.decoder.logits_dense.kernel[...], layout="hv")
    table = model.token_embedder.embedding[...]
    return logitless.Head(
        table.astype(jnp.bfloat16).astype(table.dtype),
        layout="vh",
        scale=1 / math.sqrt(config.emb_dim) if config.normalize_embedding_logits else 1.0,
        softcap=config.final_logits_soft_cap or None,
    )


def compare(name: str) -> dict[str, Any]:
    """Losses, and the largest difference of a gradient, relative to the largest number of its array."""
    config, mesh, dense = made(**HEADS[name])
    _, _, tiled = made(num_vocab_tiling=2, **HEADS[name])  # hands out hidden states

    def stock(parameters: Any, rest: Any) -> Any:
        logits = called(nnx.merge(graph, parameters, rest, copy=True))
        return logitless.grpo_loss(logits, TARGETS, options=logitless.Options(backend="reference"), **LOSS)

    def ours(parameters: Any, rest: Any, norm: bool = True) -> Any:
        model = nnx.merge(tiled_graph, parameters, rest, copy=True)
        called(model)
        (hidden,) = jax.tree.leaves(nnx.state(model.decoder, nnx.Intermediate)["hidden_states"])
        hidden = model.decoder.decoder_norm(hidden) if norm else hidden
        return logitless.linear_grpo_loss(hidden, head_of(config, model), TARGETS, **LOSS)

    graph, parameters, rest = nnx.split(dense, nnx.Param, ...)
    tiled_graph, _, tiled_rest = nnx.split(tiled, nnx.Param, ...)
    with jax.set_mesh(mesh):
        (loss, _), gradients = jax.jit(jax.value_and_grad(stock, has_aux=True))(parameters, rest)
        found: dict[str, Any] = {"head": name, "loss": round(float(loss), 7)}
        for what, norm in (("", True), (" without the norm", False)):
            step = jax.jit(jax.value_and_grad(ours, has_aux=True), static_argnums=2)
            (own, _), own_gradients = step(parameters, tiled_rest, norm)
            pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(own_gradients), strict=True)
            worst = max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs)
            found |= {f"our loss{what}": round(float(own), 7), f"gradients{what}": float(f"{worst:.2g}")}
    return found


if __name__ == "__main__":
    record = {
        "what": "a loss over a MaxText model's own logits, and over its hidden states without logits",
        "command": "python benchmarks/maxtext_compare.py",
        "versions": {name: metadata.version(name) for name in ("maxtext", "google-tunix", "jax", "flax")},
        "platform": jax.default_backend(),
        "comparisons": [compare(name) for name in HEADS],
    }
    harness.write("maxtext.json", record | {"memory": harness.read("maxtext.json")["memory"]})  # maxtext_memory.py
    harness.say(record)
