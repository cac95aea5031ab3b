"""The decoder of Qwen2/Qwen2.5 and of Llama (SmolLM2), as plain functions over a dictionary of arrays.

    x = embed[tokens]
    for each layer:   x = x + attention(rms_norm(x)) W_o         grouped-query, causal, rotary positions
                      h = rms_norm(x);  x = x + (silu(h W_gate) * (h W_up)) W_down
    hidden = rms_norm(x)                                          and logits = hidden @ lm_head.T, built by nobody here

The two families differ in the biases of q, k and v alone (``attention_bias``). The weights of all layers are stacked on
a leading axis and the layers are a ``lax.scan``, so that compile time does not grow with depth. Weights are kept in
their own ("master") dtype and cast to ``compute_dtype`` one layer at a time; norms, rotations and softmax are float32.

Float32 matmuls follow ``jax_default_matmul_precision``: the accelerators' default is less than float32.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core.shapes import Bool, Float, Int
from logitless.train.attention import causal_attention

if TYPE_CHECKING:
    from logitless.train.lora import LoRA

Params = dict[str, Any]
"""``{"embed": [V, H], "layers": {name: [L, ...]}, "norm": [H]}``, and ``"lm_head": [V, H]`` unless tied."""


FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
"""Maps that read the same input."""

MOST_LAYERS = 10_000  # a file that says more is broken, and a list of its tensors' names would fill the memory


class ModelError(ValueError):
    """A model that cannot be built, read or run as asked; the message is for the person who asked."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of a model; hashable, as a static argument for ``jax.jit``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    """Biases of q, k and v: True for Qwen2, False for Llama."""
    max_position: int = 32_768

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ModelError(f"ModelConfig: {field.name} is {value!r}, expected a positive integer.")
            if field.type == "float" and not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise ModelError(f"ModelConfig: {field.name} is {value!r}, expected a positive number.")
        if self.num_layers > MOST_LAYERS:
            raise ModelError(f"ModelConfig: num_layers is {self.num_layers}, expected at most {MOST_LAYERS}.")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"ModelConfig: {self.num_heads} heads over {self.num_kv_heads} key-value heads, expected a multiple."
            )
        if self.head_dim % 2:
            raise ModelError(f"ModelConfig: head_dim is {self.head_dim}, expected an even number (rotary pairs).")


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape per array of a layer; maps are ``[in, out]`` and apply as ``x @ w``."""
    h, f = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    biases = {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)} if config.attention_bias else {}
    return {
        "attention_norm": (h,),
        "q": (h, q),
        "k": (h, kv),
        "v": (h, kv),
        "o": (q, h),
        "mlp_norm": (h,),
        "gate": (h, f),
        "up": (h, f),
        "down": (f, h),
        **biases,
    }


def param_shapes(config: ModelConfig) -> Params:
    """Shapes of the whole tree, with the layer axis."""
    shapes: Params = {
        "embed": (config.vocab_size, config.hidden_size),
        "layers": {name: (config.num_layers, *shape) for name, shape in layer_shapes(config).items()},
        "norm": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (config.vocab_size, config.hidden_size)
    return shapes


def init(config: ModelConfig, key: Array, dtype: Any = jnp.float32) -> Params:
    """Random weights: normal with variance 1/fan-in, norms 1, biases 0.

    The maps that write to the residual stream are smaller by ``sqrt(2 L)``: its variance does not grow with depth.
    """

    def leaf(path: Any, shape: tuple[int, ...], key: Array) -> Array:
        name = path[-1].key
        if name.endswith("norm"):
            return jnp.ones(shape, dtype)
        if name.endswith("bias"):
            return jnp.zeros(shape, dtype)
        fan_in = config.hidden_size if name in ("embed", "lm_head") else shape[-2]
        std = fan_in**-0.5 / (math.sqrt(2 * config.num_layers) if name in ("o", "down") else 1.0)
        return jax.random.normal(key, shape, dtype) * jnp.asarray(std, dtype)

    shapes = param_shapes(config)
    leaves, tree = jax.tree_util.tree_flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.tree_util.tree_unflatten(tree, list(jax.random.split(key, len(leaves))))
    return jax.tree_util.tree_map_with_path(leaf, shapes, keys, is_leaf=lambda x: isinstance(x, tuple))


def positions_of(valid: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Position of each token, counting real tokens only (0 at left padding)."""
    return jnp.maximum(jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0)


def hidden_states(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    *,
    lora: LoRA | None = None,
    remat: bool = False,
    **options: Any,
) -> Float[Array, "B T H"]:
    """Hidden states after the final norm; ``options`` are those of :func:`model_pass`. ``remat`` recomputes each layer
    in the backward pass and keeps its input alone."""
    return model_pass(config, tokens, positions, valid, lora=lora, **options).hidden(params, lora, remat)


@dataclasses.dataclass(frozen=True)
class Parts:
    """A pass of the model, cut where its layers begin and end: ``x = embedded(..)``, ``x = layer(x, ..)`` for each,
    ``hidden = finished(x, ..)``."""

    tokens: Int[Array, "B T"]
    """As they are embedded."""
    valid: Bool[Array, "B T"]
    """Flags for real tokens, in the same order."""
    embedded: Callable[[Array], Array]
    """``x`` from the embedding ``[V, H]``."""
    read_layer: Callable[[Array, Params], tuple[Array, tuple[Array, Array]]]
    """``x`` after a layer, whose weights are one of :func:`stacked_layers`; and the layer's keys and values."""
    finished: Callable[[Array, Array], Array]
    """Hidden states from ``x`` and the final norm's weights."""

    def layer(self, x: Array, weights: Params) -> Array:
        """``x`` after a layer."""
        return self.read_layer(x, weights)[0]

    def hidden_and_cache(self, params: Params, lora: LoRA | None) -> tuple[Array, tuple[Array, Array]]:
        """The hidden states, and the keys and values ``[L, B, T, KV, hd]`` of all layers, in the order of ``valid``."""
        x, cache = jax.lax.scan(self.read_layer, self.embedded(params["embed"]), stacked_layers(params, lora))
        return self.finished(x, params["norm"]), cache

    def hidden(self, params: Params, lora: LoRA | None, remat: bool) -> Array:
        """The hidden states."""
        layer = jax.checkpoint(self.layer) if remat else self.layer
        stacked = stacked_layers(params, lora)
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), self.embedded(params["embed"]), stacked)
        return self.finished(x, params["norm"])

    def then(self, last: Callable[[Array], Array]) -> Parts:
        """These parts, followed by a function of the hidden states."""
        return dataclasses.replace(self, finished=lambda x, norm: last(self.finished(x, norm)))


def model_pass(
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    *,
    sees: Bool[Array, "B T T"] | None = None,
    lora: LoRA | None = None,
    compute_dtype: Any = jnp.float32,
    attention: str = "auto",
    layout: jax.sharding.Sharding | None = None,
) -> Parts:
    """The parts of a pass in ``compute_dtype``; of ``lora`` only the scale is read.

    A token sees itself and the valid tokens before it; its rotation is by ``positions``. ``valid`` is False at padding,
    at any position: no real token depends on padding, and results at padding mean nothing. The real tokens of each row
    are moved to its front for the time being. Causality then hides the padding by itself, and no ``[B, T, T]`` mask
    exists.

    Packed rows say for themselves which of the tokens before it a token ``sees``
    (:meth:`logitless.Packed.attention_mask`).

    ``attention``: ``"cudnn"`` (flash attention; GPU, bfloat16 or float16), ``"xla"``, or ``"auto"``: cudnn where it can
    serve. ``layout``: how the states ``[B, T, H]`` between the layers lie on a mesh, and so do their gradients. Over a
    mesh it must be said: left to choose, XLA's partitioner has been seen to give other gradients (data x fsdp x tensor,
    one row a device).
    """
    # A padding id means nothing and must not be able to hurt; a real one outside the vocabulary shows as NaN.
    tokens = jnp.where(valid, tokens, 0)
    front: Any = None
    if sees is None:
        front = jnp.argsort(~valid, axis=1, stable=True)
        tokens, positions, valid = (jnp.take_along_axis(x, front, axis=1) for x in (tokens, positions, valid))
    rotation = rotary(config, positions)

    def laid_out(x: Array) -> Array:
        return x if layout is None else jax.lax.with_sharding_constraint(x, layout)

    def layer(x: Array, weights: Params) -> tuple[Array, tuple[Array, Array]]:
        base, adapters = (in_compute_dtype(weights[name], compute_dtype) for name in ("base", "lora"))
        cache: Any = None

        def attend(q: Array, k: Array, v: Array) -> Array:
            nonlocal cache
            cache = k, v
            return causal_attention(q, k, v, sees, attention)

        return laid_out(decoder_layer(config, base, laid_out(x), rotation, attend, adapters, lora)), cache

    def finished(x: Array, norm: Array) -> Array:
        x = rms_norm(x, norm, config.rms_norm_eps)
        return x if front is None else jnp.take_along_axis(x, jnp.argsort(front, axis=1)[..., None], axis=1)

    def embedded(embed: Array) -> Array:
        x = embed.at[tokens].get(mode="fill", wrap_negative_indices=False, fill_value=jnp.nan)
        return x.astype(compute_dtype)

    return Parts(tokens, valid, embedded, layer, finished)


def stacked_layers(params: Params, lora: LoRA | None) -> Params:
    """What a scan over the layers takes: their weights and adapters."""
    return {"base": params["layers"], "lora": {} if lora is None else lora.layers}


def in_compute_dtype(weights: Params, dtype: Any) -> Params:
    """Weights (or adapters) cast; the norms stay as they are, for the model computes with them in float32."""

    def cast(path: Any, x: Array) -> Array:
        return x if str(path[-1].key).endswith("norm") else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, weights)


def decoder_layer(
    config: ModelConfig,
    weights: Params,
    x: Float[Array, "B T H"],
    rotation: tuple[Array, Array],
    attend: Callable[[Array, Array, Array], Array],
    adapters: Params,
    lora: LoRA | None,
) -> Float[Array, "B T H"]:
    """``x`` after one layer, whose weights are in ``x``'s dtype; ``attend(q, k, v)`` is the only place where tokens
    meet. Maps that read the same input may be one matrix (``qkv``, ``gate_up``: :func:`fused_layer`)."""

    def project(name: str, h: Array) -> list[Array]:
        names = FUSED.get(name, (name,))
        if name not in weights:
            return [project(n, h)[0] for n in names]
        y = h @ weights[name]
        if f"{name}_bias" in weights:
            y = y + weights[f"{name}_bias"]
        widths = [layer_shapes(config)[n][1] for n in names]
        parts = jnp.split(y, list(itertools.accumulate(widths))[:-1], axis=-1)
        if lora is not None:
            for i, n in enumerate(names):
                if n in adapters:
                    low = (h @ adapters[n]["a"]) @ adapters[n]["b"]
                    parts[i] = parts[i] + low * jnp.asarray(lora.scale, low.dtype)
        return parts

    def heads(y: Array) -> Array:
        return y.reshape(*y.shape[:2], -1, config.head_dim)

    h = rms_norm(x, weights["attention_norm"], config.rms_norm_eps)
    q, k, v = map(heads, project("qkv", h))
    mixed = attend(_rotate(q, rotation), _rotate(k, rotation), v)
    x = x + project("o", mixed.reshape(*mixed.shape[:2], -1))[0]
    h = rms_norm(x, weights["mlp_norm"], config.rms_norm_eps)
    gate, up = project("gate_up", h)
    return x + project("down", jax.nn.silu(gate) * up)[0]


def fused_layer(weights: Params) -> Params:
    """A layer's weights with the maps that read the same input side by side: one matmul for three, and for two."""
    out = {k: v for k, v in weights.items() if not any(k.removesuffix("_bias") in names for names in FUSED.values())}
    for fused, names in FUSED.items():
        for suffix in ("", "_bias"):
            parts = [weights[n + suffix] for n in names if n + suffix in weights]
            if parts:
                out[fused + suffix] = jnp.concatenate(parts, axis=-1)
    return out


def lm_head(params: Params, config: ModelConfig) -> Float[Array, "V H"]:
    """The output head in the master dtype: the embedding where it is tied."""
    return params["embed"] if config.tie_word_embeddings else params["lm_head"]


def num_params(params: Params) -> int:
    """How many numbers the tree holds."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """``x / rms(x) * weight`` in float32, in ``x``'s dtype again."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float32)).astype(x.dtype)


def rotary(config: ModelConfig, positions: Array) -> tuple[Array, Array]:
    """Cosine and sine ``[B, T, 1, hd/2]`` of the rotary angles, float32."""
    frequencies = config.rope_theta ** -(jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]


def _rotate(x: Array, rotation: tuple[Array, Array]) -> Array:
    """Rotate the pairs ``(i, i + hd/2)`` of each head, as the hub's weights are laid out."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
