"""The task of the examples: count on. What every GRPO loop has besides its loss: prompts, a sampler, a reward.

The vocabulary is a padding token, an end token and six letters in a circle. A prompt is one to four letters in order;
the completion should go on from there, and its reward is the share of its six places with the right letter. A random
policy scores about 0.08: one in eight, and it often ends too soon.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

PAD, END, LETTERS = 0, 1, 6
VOCAB = 2 + LETTERS
PROMPT, NEW = 4, 6  # places for the prompt (padded on its left) and for the completion
WIDTH = PROMPT + NEW
PROMPTS, GROUP = 8, 8  # prompts in a step, completions of each


def prompts(key: Array) -> Array:
    """``[B, T]`` ids whose completions are still empty; the completions of one prompt are consecutive rows."""
    first, length = jax.random.split(key)
    start = jax.random.randint(first, (PROMPTS, 1), 0, LETTERS)
    length = jax.random.randint(length, (PROMPTS, 1), 1, PROMPT + 1)
    place = jnp.arange(PROMPT)
    ids = jnp.where(place >= PROMPT - length, (start + place) % LETTERS + 2, PAD)
    return jnp.pad(jnp.repeat(ids, GROUP, axis=0), ((0, 0), (0, NEW)))


def sample(next_logits: Callable[[Array, Array], Array], ids: Array, key: Array) -> tuple[Array, Array]:
    """``(ids, sampled)``: completions by ``next_logits(ids, t) -> [B, V]``, up to their end, and where they are."""

    def one(t: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        ids, sampled = state
        new = jax.random.categorical(jax.random.fold_in(key, t), next_logits(ids, t - 1))
        going = (t == PROMPT) | (sampled[:, t - 1] & (ids[:, t - 1] > END))  # padding ends it, too
        return ids.at[:, t].set(jnp.where(going, new, PAD)), sampled.at[:, t].set(going)

    return jax.lax.fori_loop(PROMPT, WIDTH, one, (ids, jnp.zeros(ids.shape, bool)))


def reward(ids: Array, sampled: Array) -> Array:
    """``[B]``: the share of a completion's places that go on from the prompt's last letter."""
    right = (ids[:, PROMPT - 1, None] - 2 + jnp.arange(1, NEW + 1)) % LETTERS + 2
    return jnp.mean((ids[:, PROMPT:] == right) & sampled[:, PROMPT:], axis=1)


def say(step: int, rewards: list[float], every: int = 20) -> None:
    """A line now and then."""
    if (step + 1) % every == 0:
        print(f"step {step + 1:4d}  reward {sum(rewards[-every:]) / every:.3f}", flush=True)
