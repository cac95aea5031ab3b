"""Completions from the policy: batched sampling with a key-value cache (decode.py), in one jitted loop.

    logits_t = hidden_t @ lm_head.T                       float32, in the head's compute dtype
    p_t      = softmax(logits_t / temperature)
    token_t ~ p_t, cut to its top-p nucleus and normalised anew where top_p < 1

The recorded log-probability is ``log p_t[token_t]``: at the sampling temperature, over the whole vocabulary, before the
nucleus is cut. For an objective with ``temperature_on="logp"`` it is ``log softmax(logits_t)[token_t] / temperature``.
Either is the number that the trainer computes for the same token; under greedy decoding (temperature 0) it is the one
at temperature 1.

With ``top_k`` a token is drawn from the ``top_k`` likeliest ids, cut to the nucleus of their own softmax. The ids that
are kept are recorded as the token's ``support``, and the log-probability is over them: the losses take both, so that an
importance ratio is not biased by the mass that was cut.

Prompts are padded on the left, so that all rows continue in the same slot. Noise belongs to a row and a position: the
amount of padding, the rows beside it and the number of rows sampled at a time change nothing about a row's completion.
A row is done after an end token; the loop stops when all are. Later slots hold ``pad_id`` and are masked.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core.pytree import register
from logitless.core.shapes import Bool, Float, Int
from logitless.core.top_k import largest
from logitless.train.decode import STAGES, DecodeState, decode_step, make_decoder, run_stages, spread_cache
from logitless.train.lora import LoRA
from logitless.train.model import ModelConfig, Params, in_compute_dtype, lm_head, model_pass, positions_of


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How completions are sampled; static."""

    max_new: int
    temperature: float
    top_p: float
    group_size: int
    eos_ids: tuple[int, ...]
    pad_id: int
    temperature_on: str = "logits"
    """What the recorded log-probability is: the objective's ``temperature_on``."""
    top_k: int = 0
    """Ids that a token is drawn from at most, and that are kept of each; 0: all, none."""
    stages: int = STAGES
    """At most; each is a copy of all layers to compile, and another one where rows make room (not with one stage)."""


@register
@dataclasses.dataclass(frozen=True)
class Completions:
    """What was sampled: rows ``[N * group_size]``, the completions of one prompt side by side."""

    tokens: Int[Array, "B C"]
    mask: Bool[Array, "B C"]
    """True up to and including the end token."""
    logp: Float[Array, "B C"]
    """Log-probability of each token at sampling time; 0 if masked."""
    support: Int[Array, "B C K"] | None = None
    """Ids that each token was drawn from, -1 for none; log-probabilities are over them."""


def nucleus(logp: Float[Array, "B V"], top_p: float) -> Float[Array, "B V"]:
    """``logp`` with everything outside the smallest set of tokens that holds ``top_p`` of the mass at ``-inf``."""
    ordered = jnp.sort(logp, axis=-1, descending=True)
    before = jnp.cumsum(jnp.exp(ordered), axis=-1) - jnp.exp(ordered)  # mass of the tokens above
    least = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logp >= least, logp, -jnp.inf)


def sample(logits: Float[Array, "B V"], keys: Array, s: Sampling) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """A sampled token per row, with its log-probability; ``keys`` has a key per row."""
    if s.temperature == 0:
        return best_with_logp(logits, logits)
    z = logits / s.temperature
    noise = jax.vmap(lambda key: jax.random.gumbel(key, z.shape[1:], z.dtype))(keys)
    kept = z if s.top_p == 1 else nucleus(jax.nn.log_softmax(z, axis=-1), s.top_p)
    if s.temperature_on == "logits":
        return best_with_logp(z, kept + noise)
    token, logp = best_with_logp(logits, kept + noise)
    return token, logp / s.temperature


def sample_of_top_k(
    logits: Float[Array, "B V"], keys: Array, s: Sampling
) -> tuple[Int[Array, "B"], Float[Array, "B"], Int[Array, "B K"]]:
    """:func:`sample` from the ``top_k`` likeliest ids and the nucleus among them, and the ids that were kept."""
    ids = largest(logits, s.top_k)
    x = jnp.take_along_axis(logits, ids, axis=-1)
    p = jax.nn.softmax(x / s.temperature, axis=-1)
    kept = jnp.cumsum(p, axis=-1) - p < s.top_p  # mass of the ids above; the likeliest one is always kept
    z = jnp.where(kept, x / s.temperature, -jnp.inf)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, z.shape[1:], z.dtype))(keys)
    if s.temperature_on == "logits":
        at, logp = best_with_logp(z, z + noise)
    else:
        at, logp = best_with_logp(jnp.where(kept, x, -jnp.inf), z + noise)
        logp = logp / s.temperature
    return jnp.take_along_axis(ids, at[:, None], axis=-1)[:, 0], logp, jnp.where(kept, ids, -1)


def best_with_logp(z: Float[Array, "B V"], score: Float[Array, "B V"]) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """``argmax score`` and its ``log_softmax(z)``; with Gumbel noise in ``score``, a sample of ``softmax(z)``.

    Three reductions of the logits and no array of their size: the two maxima are one read, the sum is a second. (One
    read for all three, a maximum carried with its sum, was slower on a CPU, and its sum a hundred times less exact.)
    """
    token = jnp.argmax(score, axis=-1).astype(jnp.int32)
    largest = jnp.max(z, axis=-1)
    total = jnp.sum(jnp.exp(z - largest[:, None]), axis=-1)
    own = jnp.take_along_axis(z, token[:, None], axis=-1)[:, 0]
    return token, (own - largest) - jnp.log(total)


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

    def logits_of(hidden: Float[Array, "B H"]) -> Float[Array, "B V"]:
        return jnp.matmul(hidden, head.T, preferred_element_type=jnp.float32)

    def draw(state: DecodeState, logits: Array) -> DecodeState:
        """The next token of each row, written down."""
        (out, keys), i = state.own, state.step
        now, support = jax.vmap(lambda k: jax.random.fold_in(k, i))(keys), out.support
        if support is None:
            token, logp = sample(logits, now, s)
        else:
            token, logp, kept = sample_of_top_k(logits, now, s)
            support = support.at[:, i].set(jnp.where(state.done[:, None], -1, kept))
        token = jnp.where(state.done, s.pad_id, token)
        ended = jnp.zeros_like(state.done)
        for eos in s.eos_ids:
            ended = ended | (token == eos)
        out = Completions(
            tokens=out.tokens.at[:, i].set(token),
            mask=out.mask.at[:, i].set(~state.done),
            logp=out.logp.at[:, i].set(jnp.where(state.done, 0.0, logp)),
            support=support,
        )
        return dataclasses.replace(
            state, step=i + 1, done=state.done | ended, token=token, position=state.position + 1, own=(out, keys)
        )

    # The prompt is read once and its keys and values are shared out to the group.
    prompt = model_pass(
        config, prompts, positions_of(prompt_valid), prompt_valid, lora=lora, compute_dtype=compute_dtype
    )
    hidden, cache = prompt.hidden_and_cache(params, lora)
    out = Completions(
        tokens=jnp.full((rows, s.max_new), s.pad_id, jnp.int32),
        mask=jnp.zeros((rows, s.max_new), bool),
        logp=jnp.zeros((rows, s.max_new), jnp.float32),
        support=jnp.full((rows, s.max_new, s.top_k), -1, jnp.int32) if s.top_k else None,
    )
    state = DecodeState(
        step=jnp.int32(0),
        done=jnp.zeros(rows, bool),
        token=jnp.zeros(rows, jnp.int32),
        position=jnp.repeat(jnp.sum(prompt_valid, axis=1, dtype=jnp.int32), s.group_size) - 1,
        valid=jnp.repeat(prompt.valid, s.group_size, axis=0),
        caches=spread_cache(cache, s.group_size),
        own=(out, row_keys),
    )
    state = draw(state, jnp.repeat(logits_of(hidden[:, -1]), s.group_size, axis=0))
    if s.max_new == 1:
        return state.own[0]
    decoder = make_decoder(params, lora, config, compute_dtype)

    def advance(state: DecodeState) -> DecodeState:
        hidden, state = decode_step(decoder, state, width + state.step - 1)
        return draw(state, logits_of(hidden))

    return run_stages(state, width + s.max_new - 1, s.max_new, advance, s.stages).own[0]
