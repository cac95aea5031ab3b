"""GRPO with Flax Linen: `apply` gives hidden states, and the loss finds the tied head among the parameters.

    pip install -e '.[examples]'
    python examples/grpo_linen.py

The loop is that of grpo_optax.py: shift, prompt mask, old log-probabilities, two updates on the same completions, KL
to the initial policy, a tied head.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import toy
from flax.training.train_state import TrainState
from jax import Array

import logitless

HIDDEN, HEADS, EPOCHS = 32, 2, 2
OBJECTIVE = logitless.Objective.grpo(eps_high=0.28, beta=0.01, entropy_coef=0.02)


class Policy(nn.Module):
    """A causal transformer that ends before its head: applying it gives hidden states ``[B, T, H]``."""

    @nn.compact
    def __call__(self, ids: Array) -> Array:
        small = jax.nn.initializers.normal(HIDDEN**-0.5)
        x = nn.Embed(toy.VOCAB, HIDDEN, embedding_init=small, name="embed")(ids)
        x = x + nn.Embed(toy.WIDTH, HIDDEN, embedding_init=small, name="place")(jnp.arange(ids.shape[1]))
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.RMSNorm()(x), mask=nn.make_causal_mask(ids))
        x = x + nn.Dense(HIDDEN)(jax.nn.gelu(nn.Dense(4 * HIDDEN)(nn.RMSNorm()(x))))
        return nn.RMSNorm()(x)


POLICY = Policy()


def hidden_and_head(params: Any, ids: Array) -> tuple[Array, Array]:
    """``[B, T, H]`` hidden states, and the tied head ``[V, H]``."""
    return POLICY.apply({"params": params}, ids), params["embed"]["embedding"]


def logps(params: Any, ids: Array, targets: Array, mask: Array) -> Array:
    """``[B, T]`` log-probabilities: of the policy before its updates, and of the reference."""
    return logitless.linear_logprobs(*hidden_and_head(params, ids), targets, mask=mask, objective=OBJECTIVE).logp


@jax.jit
def rollout(params: Any, reference: Any, key: Array) -> tuple[dict[str, Array], Array]:
    """A step's batch, and its mean reward."""
    ask, answer = jax.random.split(key)

    def next_logits(ids: Array, t: Array) -> Array:
        hidden, head = hidden_and_head(params, ids)
        return hidden[:, t] @ head.T

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
def update(state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, Any]:
    """One update, and its metrics."""
    rest = dict(batch)
    ids = rest.pop("ids")

    def loss(params: Any) -> Any:
        return logitless.linear_grpo_loss(*hidden_and_head(params, ids), objective=OBJECTIVE, **rest)

    gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients), metrics


def main(steps: int = 100, seed: int = 0) -> list[float]:
    """The mean reward of each step."""
    start, *keys = jax.random.split(jax.random.key(seed), steps + 1)
    reference = POLICY.init(start, jnp.zeros((1, toy.WIDTH), jnp.int32))["params"]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3))
    state = TrainState.create(apply_fn=POLICY.apply, params=reference, tx=optimizer)
    rewards: list[float] = []
    for step, key in enumerate(keys):
        batch, reward = rollout(state.params, reference, key)
        for _ in range(EPOCHS):
            state, _ = update(state, batch)
        rewards.append(float(reward))
        toy.say(step, rewards)
    return rewards


if __name__ == "__main__":
    main()
