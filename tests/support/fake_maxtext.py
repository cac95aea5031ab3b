"""A model with the shape of MaxText's behind its Tunix adapter (MaxText #5301): what ``maxtext_model`` reads, and
``apply_output_head`` as MaxText's main branch of August 2026 has it. The body is one causal layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


@dataclasses.dataclass(frozen=True)
class Config:
    """MaxText's settings that its output head reads."""

    vocab_size: int = 96
    emb_dim: int = 32
    dtype: Any = jnp.float32
    logits_via_embedding: bool = False
    normalize_embedding_logits: bool = False
    final_logits_soft_cap: float = 0.0
    logits_dot_in_fp32: bool = False
    cast_logits_to_fp32: bool = True
    shard_mode: str = "auto"
    parameter_memory_host_offload: bool = False


class Norm(nnx.Module):
    def __init__(self, config: Config) -> None:
        self.scale, self.dtype = nnx.Param(jnp.linspace(0.5, 1.5, config.emb_dim)), config.dtype

    def __call__(self, x: Array, out_sharding: Any = None) -> Array:
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        return (x * self.scale[...]).astype(self.dtype)


class Kernel(nnx.Module):
    def __init__(self, shape: tuple[int, int], dtype: Any, name: str, key: int) -> None:
        setattr(self, name, nnx.Param(jax.random.normal(jax.random.key(key), shape) / shape[-1] ** 0.5))
        self.dtype = dtype

    def __call__(self, y: Array, out_sharding: Any = None) -> Array:
        return y.astype(self.dtype) @ self.kernel[...].astype(self.dtype)


class Decoder(nnx.Module):
    def __init__(self, config: Config) -> None:
        size = (config.emb_dim, config.emb_dim)
        self.config, self.decoder_norm = config, Norm(config)
        self.layer = Kernel(size, config.dtype, "kernel", 1)
        if not config.logits_via_embedding:
            dtype = jnp.float32 if config.logits_dot_in_fp32 else config.dtype
            self.logits_dense = Kernel((config.emb_dim, config.vocab_size), dtype, "kernel", 2)

    def __call__(self, x: Array) -> Array:
        """The mean of all tokens so far, through a layer: a causal body."""
        seen = jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1)[:, None]
        return x + 3.0 * jnp.tanh(self.layer(seen))

    def apply_output_head(self, shared_embedding: Kernel, y: Array) -> Array:
        cfg, y = self.config, self.decoder_norm(y)
        if cfg.logits_via_embedding:
            table = shared_embedding.embedding[...].astype(jnp.bfloat16)
            attend = jnp.float32 if cfg.logits_dot_in_fp32 else cfg.dtype
            logits = jnp.dot(y, table.T, preferred_element_type=attend)
            logits = logits / jnp.sqrt(y.shape[-1]) if cfg.normalize_embedding_logits else logits
            if cfg.final_logits_soft_cap:
                logits = jnp.tanh(logits / cfg.final_logits_soft_cap) * cfg.final_logits_soft_cap
        else:
            logits = self.logits_dense(y)
        return logits.astype(jnp.float32) if cfg.cast_logits_to_fp32 else logits


class Transformer(nnx.Module):
    def __init__(self, config: Config) -> None:
        self.config, self.decoder = config, Decoder(config)
        size = 8.0 if config.logits_via_embedding and not config.normalize_embedding_logits else 1.0
        self.token_embedder = Kernel((config.vocab_size, config.emb_dim), config.dtype, "embedding", 3)
        self.token_embedder.embedding.set_value(size * self.token_embedder.embedding[...])

    def __call__(self, tokens: Array, skip_lm_head: bool = False) -> Array:
        y = self.decoder(self.token_embedder.embedding[...][tokens].astype(self.config.dtype))
        return y if skip_lm_head else self.decoder.apply_output_head(self.token_embedder, y)


class ReleasedAdapter(nnx.Module):
    """The adapter of MaxText 0.2.5."""

    def __init__(self, base: Transformer) -> None:
        self.base = base

    def __call__(
        self, input_tokens: Array, positions: Any, cache: Any, attention_mask: Any, decoder_segment_ids: Any = None
    ) -> tuple[Array, None]:
        return self.base(input_tokens), None


class Adapter(ReleasedAdapter):
    """The adapter of #5301."""

    def __call__(
        self,
        input_tokens: Array,
        positions: Any,
        cache: Any,
        attention_mask: Any,
        decoder_segment_ids: Any = None,
        output_hidden_states: bool = False,
        skip_lm_head: bool = False,
    ) -> tuple[Array, None]:
        return self.base(input_tokens, skip_lm_head), None

    def compute_final_logits(self, hidden_states: Array) -> Array:
        return self.base.decoder.apply_output_head(self.base.token_embedder, hidden_states)


HEADS: dict[str, dict[str, Any]] = {
    "logits_dense": {},
    "logits_dense in float32": {"logits_dot_in_fp32": True},
    "tied": {"logits_via_embedding": True},
    "tied, scaled, capped": {
        "logits_via_embedding": True,
        "normalize_embedding_logits": True,
        "final_logits_soft_cap": 2.0,
    },
}


def adapter(name: str = "logits_dense", **settings: Any) -> Adapter:
    return Adapter(Transformer(Config(**HEADS[name], **settings)))
