"""GRPO in a loop of one's own: parameters in plain dictionaries, optax, and the loss without logits.

    python examples/grpo_optax.py

A step samples completions, takes the log-probabilities of the policy and of the reference once, and then makes two
updates on the same completions (`EPOCHS`); from the second on, the ratio to the old policy is no longer 1. The head is
the embedding itself (tied): its gradient has the part of the lookup and the part of the loss, as JAX adds them up.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import toy
from jax import Array

import logitless

HIDDEN, HEADS, LAYERS = 32, 2, 1
EPOCHS = 2  # updates on the same completions
OBJECTIVE = logitless.Objective.grpo(eps_high=0.28, beta=0.01, entropy_coef=0.02)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3))


def init(key: Array, hidden: int = HIDDEN) -> dict[str, Any]:
    """A small causal transformer of this width."""

    def matrix(key: Array, *shape: int) -> Array:
        return jax.random.normal(key, shape) / shape[0] ** 0.5

    embed, place, *layers = jax.random.split(key, 2 + LAYERS)
    return {
        "embed": jax.random.normal(embed, (toy.VOCAB, hidden)) / hidden**0.5,
        "place": jax.random.normal(place, (toy.WIDTH, hidden)) / hidden**0.5,
        "layers": [
            {
                "qkv": matrix(k[0], hidden, 3 * hidden),
                "out": matrix(k[1], hidden, hidden),
                "up": matrix(k[2], hidden, 4 * hidden),
                "down": matrix(k[3], 4 * hidden, hidden),
            }
            for k in (jax.random.split(key, 4) for key in layers)
        ],
    }


def norm(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def places(segments: Array) -> Array:
    """The position of each token in its own sequence."""
    t = jnp.arange(segments.shape[1])
    begins = (segments != jnp.roll(segments, 1, axis=1)) | (t == 0)
    return t - jax.lax.cummax(jnp.where(begins, t, 0), axis=1)


def hidden_states(params: dict[str, Any], ids: Array, segments: Array | None = None) -> Array:
    """``[B, T, H]``: what the head would be multiplied with.

    ``segments``: tokens see those of their own segment only. Without it a row is one sequence, padded on either side.
    """
    segments = jnp.where(ids == toy.PAD, 0, 1) if segments is None else segments
    visible = jnp.tril(segments[:, :, None] == segments[:, None, :])[:, None]
    x = params["embed"][ids] + params["place"][places(segments)]
    for layer in params["layers"]:
        q, k, v = jnp.moveaxis((norm(x) @ layer["qkv"]).reshape(*ids.shape, 3, HEADS, -1), 2, 0)
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e9))
        x = x + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"]
    return norm(x)


def logps(params: dict[str, Any], ids: Array, targets: Array, mask: Array) -> Array:
    """``[B, T]`` log-probabilities: of the policy before its updates, and of the reference."""
    hidden = hidden_states(params, ids)
    return logitless.linear_logprobs(hidden, params["embed"], targets, mask=mask, objective=OBJECTIVE).logp


@jax.jit
def rollout(params: dict[str, Any], reference: dict[str, Any], key: Array) -> tuple[dict[str, Array], Array]:
    """A step's batch, and its mean reward."""
    ask, answer = jax.random.split(key)

    def next_logits(ids: Array, t: Array) -> Array:  # of one position: the sampler needs no more
        return hidden_states(params, ids)[:, t] @ params["embed"].T

    ids, sampled = toy.sample(next_logits, toy.prompts(ask), answer)
    rewards = toy.reward(ids, sampled)
    targets, mask = logitless.next_tokens(ids, sampled)  # hidden[:, t] predicts ids[:, t + 1]; prompts are masked
    batch = dict(
        ids=ids,
        targets=targets,
        mask=mask,
        advantages=logitless.group_advantages(rewards, toy.GROUP),
        old_logp=logps(params, ids, targets, mask),
        ref_logp=logps(reference, ids, targets, mask),
    )
    return batch, rewards.mean()


@jax.jit
def update(params: Any, state: Any, batch: dict[str, Array]) -> tuple[Any, Any, Any]:
    """One update; ``(params, optimiser's state, metrics)``."""
    rest = dict(batch)
    ids = rest.pop("ids")

    def loss(params: Any) -> Any:
        return logitless.linear_grpo_loss(hidden_states(params, ids), params["embed"], objective=OBJECTIVE, **rest)

    gradients, metrics = jax.grad(loss, has_aux=True)(params)
    changes, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, changes), state, metrics


def main(steps: int = 100, seed: int = 0) -> list[float]:
    """The mean reward of each step."""
    start, *keys = jax.random.split(jax.random.key(seed), steps + 1)
    reference = params = init(start)
    state = OPTIMIZER.init(params)
    rewards: list[float] = []
    for step, key in enumerate(keys):
        batch, reward = rollout(params, reference, key)
        for _ in range(EPOCHS):
            params, state, metrics = update(params, state, batch)
        rewards.append(float(reward))
        toy.say(step, rewards)
    print({k: round(v, 4) for k, v in logitless.metric_values(metrics).items() if k in ("kl_k3", "ratio", "entropy")})
    return rewards


if __name__ == "__main__":
    main()
