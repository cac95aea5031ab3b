"""Completions from the policy: batched sampling with a key-value cache, in one jitted loop.

    logits_t = hidden_t @ lm_head.T                       float32, in the head's compute dtype
    p_t      = softmax(logits_t / temperature)
    token_t ~ p_t, cut to its top-p nucleus and normalised anew where top_p < 1

The recorded log-probability is ``log p_t[token_t]``: at the sampling temperature, over the whole vocabulary, before the
nucleus is cut. It is the number that the trainer computes for the same token; under greedy decoding (temperature 0) it
is the one at temperature 1.

Prompts are padded on the left, so that all rows continue in the same slot. Noise belongs to a row and a position: the
amount of padding, the rows beside it and the number of rows sampled at a time change nothing about a row's completion.
A row is done after an end token; the loop stops when all are. Its slots after that hold ``pad_id`` and are masked.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from logitless.pytree import register
from logitless.train.lora import LoRA
from logitless.train.model import KVCache, ModelConfig, Params, empty_cache, hidden_states, lm_head, positions_of


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How completions are sampled; static."""

    max_new: int
    temperature: float
    top_p: float
    group_size: int
    eos_ids: tuple[int, ...]
    pad_id: int


@register
@dataclasses.dataclass(frozen=True)
class Completions:
    """What was sampled: rows ``[N * group_size]``, the completions of one prompt side by side."""

    tokens: Int[Array, "B C"]
    mask: Bool[Array, "B C"]
    """True up to and including the end token."""
    logp: Float[Array, "B C"]
    """Log-probability of each token when it was sampled; 0 where masked."""


def nucleus(logp: Float[Array, "B V"], top_p: float) -> Float[Array, "B V"]:
    """``logp`` with everything outside the smallest set of tokens that holds ``top_p`` of the mass at ``-inf``."""
    ordered = jnp.sort(logp, axis=-1, descending=True)
    before = jnp.cumsum(jnp.exp(ordered), axis=-1) - jnp.exp(ordered)  # mass of the tokens above
    least = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logp >= least, logp, -jnp.inf)


def sample(logits: Float[Array, "B V"], keys: Array, s: Sampling) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """One token a row and its recorded log-probability; ``keys`` are one a row."""
    greedy = s.temperature == 0
    logp = jax.nn.log_softmax(logits if greedy else logits / s.temperature, axis=-1)
    if greedy:
        token = jnp.argmax(logits, axis=-1)
    else:
        choices = logp if s.top_p == 1 else nucleus(logp, s.top_p)
        token = jax.vmap(jax.random.categorical)(keys, choices)
    return token.astype(jnp.int32), jnp.take_along_axis(logp, token[:, None], axis=-1)[:, 0]


def in_compute_dtype(params: Params, dtype: Any) -> Params:
    """Weights cast once for many steps; the norms stay as they are, for the model computes with them in float32."""

    def cast(path: Any, x: Array) -> Array:
        return x if str(path[-1].key).endswith("norm") else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def generate(
    params: Params,
    lora: LoRA | None,
    prompts: Int[Array, "N P"],
    prompt_valid: Bool[Array, "N P"],
    key: Array,
    first_row: Int[Array, ""] | int = 0,
    *,
    config: ModelConfig,
    sampling: Sampling,
    compute_dtype: Any = jnp.float32,
) -> Completions:
    """Sample ``group_size`` completions of each left-padded prompt; row ``i`` uses the noise of ``first_row + i``."""
    s = sampling
    params = in_compute_dtype(params, compute_dtype)
    head = lm_head(params, config)
    rows, width = prompts.shape[0] * s.group_size, prompts.shape[1]
    row_keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(first_row + jnp.arange(rows))

    def forward(tokens: Array, positions: Array, valid: Array, cache: KVCache) -> tuple[Array, KVCache]:
        hidden, cache_ = hidden_states(
            params, config, tokens, positions, valid, cache=cache, lora=lora, compute_dtype=compute_dtype
        )
        assert cache_ is not None
        return jnp.matmul(hidden[:, -1], head.T, preferred_element_type=jnp.float32), cache_

    def draw(i: Array | int, logits: Array, done: Array) -> tuple[Array, Array, Array, Array]:
        token, logp = sample(logits, jax.vmap(lambda k: jax.random.fold_in(k, i))(row_keys), s)
        token = jnp.where(done, s.pad_id, token)
        ended = jnp.zeros_like(done)
        for eos in s.eos_ids:
            ended = ended | (token == eos)
        return token, jnp.where(done, 0.0, logp), ~done, done | ended

    # The prompt is read once and its keys and values are shared out to the group.
    cache = empty_cache(config, prompts.shape[0], width + s.max_new - 1, compute_dtype)
    logits, cache = forward(prompts, positions_of(prompt_valid), prompt_valid, cache)
    logits = jnp.repeat(logits, s.group_size, axis=0)
    cache = KVCache(
        k=jnp.repeat(cache.k, s.group_size, axis=1),
        v=jnp.repeat(cache.v, s.group_size, axis=1),
        valid=jnp.repeat(cache.valid, s.group_size, axis=0),
        length=cache.length,
    )
    lengths = jnp.repeat(jnp.sum(prompt_valid, axis=1, dtype=jnp.int32), s.group_size)

    token, logp, live, done = draw(0, logits, jnp.zeros(rows, bool))
    out = Completions(
        tokens=jnp.full((rows, s.max_new), s.pad_id, jnp.int32).at[:, 0].set(token),
        mask=jnp.zeros((rows, s.max_new), bool).at[:, 0].set(live),
        logp=jnp.zeros((rows, s.max_new), jnp.float32).at[:, 0].set(logp),
    )

    def more(state: tuple[Any, ...]) -> Array:
        i, done, *_ = state
        return (i < s.max_new) & ~jnp.all(done)

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        i, done, token, cache, out = state
        logits, cache = forward(token[:, None], (lengths + i - 1)[:, None], ~done[:, None], cache)
        token, logp, live, done = draw(i, logits, done)
        out = Completions(
            tokens=out.tokens.at[:, i].set(token),
            mask=out.mask.at[:, i].set(live),
            logp=out.logp.at[:, i].set(logp),
        )
        return i + 1, done, token, cache, out

    return jax.lax.while_loop(more, step, (jnp.int32(1), done, token, cache, out))[-1]
