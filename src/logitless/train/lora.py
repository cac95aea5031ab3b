"""LoRA: trainable low-rank additions to the layers' linear maps, ``y = x W + scale (x A) B``.

Hu et al. 2021, https://arxiv.org/abs/2106.09685. ``B`` starts at zero, so that training starts from the model itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core.pytree import register, static
from logitless.train.config import LORA_TARGETS
from logitless.train.model import ModelConfig, Params, layer_shapes


@register
@dataclasses.dataclass(frozen=True)
class LoRA:
    """The low-rank maps of all layers: ``{name: {"a": [L, in, r], "b": [L, r, out]}}``; only these are leaves."""

    layers: dict[str, dict[str, Array]]
    scale: float = static(1.0)


def init_lora(
    config: ModelConfig,
    rank: int,
    key: Array,
    targets: Sequence[str] = LORA_TARGETS,
    alpha: float | None = None,
    dtype: Any = jnp.float32,
) -> LoRA:
    """``A`` normal with variance 1/in, ``B`` zero, ``scale = alpha / rank`` (``alpha`` is ``rank`` unless given)."""
    shapes = layer_shapes(config)
    layers = {}
    for name, name_key in zip(targets, jax.random.split(key, len(targets)), strict=True):
        fan_in, fan_out = shapes[name]
        a = jax.random.normal(name_key, (config.num_layers, fan_in, rank), dtype) * jnp.asarray(fan_in**-0.5, dtype)
        layers[name] = {"a": a, "b": jnp.zeros((config.num_layers, rank, fan_out), dtype)}
    return LoRA(layers, float(rank if alpha is None else alpha) / rank)


def merge(params: Params, lora: LoRA) -> Params:
    """Plain weights that compute what ``params`` with ``lora`` computes, in the dtype of ``params``."""
    layers = dict(params["layers"])
    for name, maps in lora.layers.items():
        a, b = maps["a"].astype(jnp.float32), maps["b"].astype(jnp.float32)
        added = lora.scale * jnp.einsum("lir,lro->lio", a, b, precision="highest")
        layers[name] = (layers[name].astype(jnp.float32) + added).astype(layers[name].dtype)
    return {**params, "layers": layers}
