"""One token at a time: the decoder with caches that are written in place and read as far as they are filled.

A step of ``B`` rows reads every weight once, and of each layer's cache ``k, v [B, KV, S, hd]`` what is filled:

    bytes = weights + 2 L B KV hd * filled slots      at 128 rows of Qwen2.5-1.5B, bfloat16: 3.1 GB + 3.7 MB a slot

The rest of a step is small: each layer has its own buffers, carried through the loop and written in one slot without
copies, weights with a common input are a single matrix, and attention covers whole buffers without an inner loop.
Layers are unrolled: compile time grows with depth.

Stages. Slots come in at most ``STAGES`` parts: when a part is full, the buffers are copied into longer buffers and the
next loop begins, so attention reads only slots that are filled or about to be. (A slice of a longer buffer has as few
bytes, but XLA then copies the whole buffer in every step.) Finished rows make room: when a quarter of the rows is left,
in any stage, these rows continue alone in buffers with all slots. Every stage, and the few rows' loop, is a copy of all
layers to compile; the layer itself is traced once for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core.pytree import register, with_leaves
from logitless.core.shapes import Bool, Float, Int
from logitless.train.lora import LoRA
from logitless.train.model import (
    ModelConfig,
    Params,
    decoder_layer,
    fused_layer,
    in_compute_dtype,
    rms_norm,
    rotary,
)

STAGES = 3
LEAST_STAGE = 128
"""Slots; shorter caches are read whole."""
SHRINK = 4
"""Rows go on in a batch this many times smaller as soon as it can hold all that are left ..."""
LEAST_SHRUNK = 16
"""... and has at least so many rows."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Weights laid out for decoding. ``layers`` are those of each layer, fused and cast."""

    config: ModelConfig
    embed: Float[Array, "V H"]
    norm: Float[Array, "H"]
    layers: list[Params]
    adapters: list[Params]
    lora: LoRA | None
    dtype: Any


def make_decoder(params: Params, lora: LoRA | None, config: ModelConfig, dtype: Any) -> Decoder:
    """A decoder with the layers' weights split by layer, in ``dtype``."""

    def layer(tree: Any, i: int) -> Any:
        return in_compute_dtype(jax.tree.map(lambda x: x[i], tree), dtype)

    count = range(config.num_layers)
    return Decoder(
        config=config,
        embed=params["embed"],
        norm=params["norm"],
        layers=[fused_layer(layer(params["layers"], i)) for i in count],
        adapters=[{} if lora is None else layer(lora.layers, i) for i in count],
        lora=lora,
        dtype=dtype,
    )


@register
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Rows that are being decoded; the first axis of all arrays but ``step`` is rows."""

    step: Int[Array, ""]
    """Tokens drawn so far."""
    done: Bool[Array, "B"]
    token: Int[Array, "B"]
    """Drawn last; not yet read by the model."""
    position: Int[Array, "B"]
    """Of that token."""
    valid: Bool[Array, "B S"]
    caches: list[tuple[Float[Array, "B KV S hd"], Float[Array, "B KV S hd"]]]
    own: Any
    """Per-row data of the caller."""

    def grown(self, slots: int) -> DecodeState:
        """With room for ``slots`` tokens."""
        more = slots - self.valid.shape[1]

        def pad(x: Array) -> Array:
            return jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, 0)))

        valid = jnp.pad(self.valid, ((0, 0), (0, more)))
        return dataclasses.replace(self, valid=valid, caches=[(pad(k), pad(v)) for k, v in self.caches])

    def rows(self, take: Int[Array, "R"]) -> DecodeState:
        """Some of the rows."""
        bare = with_leaves(self, step=None)
        return dataclasses.replace(jax.tree.map(lambda x: x[take], bare), step=self.step)

    def with_rows(self, take: Int[Array, "R"], some: DecodeState) -> DecodeState:
        """The state with the rows ``take`` replaced from ``some``."""
        whole, part = (with_leaves(s, step=None) for s in (self, some))
        return dataclasses.replace(jax.tree.map(lambda x, y: x.at[take].set(y), whole, part), step=some.step)


def spread_cache(cache: tuple[Array, Array], group_size: int) -> list[tuple[Array, Array]]:
    """A prompt's keys and values ``[L, B, P, KV, hd]`` for each completion of its group, by layer."""
    k, v = (jnp.repeat(jnp.swapaxes(x, 2, 3), group_size, axis=1) for x in cache)
    return list(zip(k, v, strict=True))


def decode_step(d: Decoder, s: DecodeState, slot: Array) -> tuple[Float[Array, "B H"], DecodeState]:
    """Read each row's token, at ``slot``; its hidden state after the final norm."""
    c = d.config
    rotation = rotary(c, s.position[:, None])
    valid = jax.lax.dynamic_update_slice(s.valid, ~s.done[:, None], (0, slot))
    caches = list(s.caches)
    # A row that is done reads padding, which must not be able to hurt.
    x = d.embed.at[jnp.where(s.done, 0, s.token)].get(mode="fill", wrap_negative_indices=False, fill_value=jnp.nan)
    x = x[:, None].astype(d.dtype)
    scaled = None if d.lora is None else dataclasses.replace(d.lora, layers={})
    for i, weights in enumerate(d.layers):
        x, caches[i] = _decode_layer(c, weights, x, rotation, slot, caches[i], valid, d.adapters[i], scaled)
    hidden = rms_norm(x, d.norm, c.rms_norm_eps)[:, 0]
    return hidden, dataclasses.replace(s, valid=valid, caches=caches)


@partial(jax.jit, static_argnums=0)  # traced once for all layers of a step; the compiler inlines the function
def _decode_layer(
    config: ModelConfig,
    weights: Params,
    x: Float[Array, "B 1 H"],
    rotation: tuple[Array, Array],
    slot: Array,
    cache: tuple[Array, Array],
    valid: Bool[Array, "B S"],
    adapters: Params,
    lora: LoRA | None,
) -> tuple[Float[Array, "B 1 H"], tuple[Array, Array]]:
    """``x`` after a layer, and the layer's cache with this token stored."""

    def attend(q: Array, k: Array, v: Array) -> Array:
        nonlocal cache
        old_k, old_v = cache
        cache = _written(old_k, k, slot), _written(old_v, v, slot)
        return _attention(q, *cache, valid)

    x = decoder_layer(config, weights, x, rotation, attend, adapters, lora)
    return x, cache


def _written(cache: Float[Array, "B KV S hd"], new: Float[Array, "B 1 KV hd"], slot: Array) -> Array:
    return jax.lax.dynamic_update_slice(cache, jnp.swapaxes(new, 1, 2).astype(cache.dtype), (0, 0, slot, 0))


def _attention(q: Array, k: Array, v: Array, valid: Bool[Array, "B S"]) -> Float[Array, "B 1 N hd"]:
    """One query a row over the slots of ``k, v [B, KV, S, hd]``; scores and softmax in float32."""
    rows, _, n, width = q.shape
    grouped = q.reshape(rows, k.shape[1], -1, width)
    scores = jnp.einsum("bkgd,bksd->bkgs", grouped, k, preferred_element_type=jnp.float32) * width**-0.5
    weights = jax.nn.softmax(jnp.where(valid[:, None, None], scores, jnp.finfo(jnp.float32).min), axis=-1)
    return jnp.einsum("bkgs,bksd->bkgd", weights.astype(v.dtype), v).reshape(rows, 1, n, width)


def stages(width: int, slots: int, most: int = STAGES) -> list[int]:
    """Slots of the buffers of each stage, at ``most`` so many, when ``width`` of ``slots`` are filled at first."""
    part = max(-(-(slots - width) // most), LEAST_STAGE)
    return [*range(width + part, slots, part), slots]


def run_stages(
    state: DecodeState, slots: int, last: int, advance: Callable[[DecodeState], DecodeState], most: int = STAGES
) -> DecodeState:
    """``advance(state)`` until ``last`` tokens are drawn or all rows are done; ``state`` holds the prompt's slots."""
    rows, width = state.valid.shape
    parts = stages(width, slots, most)
    # One stage is a small program, or few slots: not worth a second copy of the layers for few rows either.
    small = rows // SHRINK if rows // SHRINK >= LEAST_SHRUNK and len(parts) > 1 else 0

    def run(s: DecodeState, filled: int, least: int) -> DecodeState:
        def more(s: DecodeState) -> Array:
            return (s.step < last) & (width + s.step <= filled) & (jnp.sum(~s.done) > least)

        return jax.lax.while_loop(more, advance, s)

    for filled in parts:
        state = run(state.grown(filled), filled, small)
    if not small:
        return state
    left = jnp.argsort(state.done, stable=True)[:small]
    return state.with_rows(left, run(state.rows(left), slots, 0))
