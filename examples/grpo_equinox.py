"""GRPO with Equinox: a module that is a pytree, filtered gradients, and the loss over its hidden states.

    pip install -e '.[examples]'
    python examples/grpo_equinox.py

The loop is that of grpo_optax.py: shift, prompt mask, old log-probabilities, two updates on the same completions, KL
to the initial policy, a tied head.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import toy
from jax import Array

import logitless

HIDDEN, HEADS, EPOCHS = 32, 2, 2
OBJECTIVE = logitless.Objective.grpo(eps_high=0.28, beta=0.01, entropy_coef=0.02)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3))


class Policy(eqx.Module):
    """A causal transformer that ends before its head: ``[B, T]`` ids to hidden states ``[B, T, H]``."""

    embed: Array  # [V, H], the tied head
    place: Array
    norms: tuple[eqx.nn.RMSNorm, ...]
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: Array) -> None:
        embed, place, attention, up, down = jax.random.split(key, 5)
        self.embed = jax.random.normal(embed, (toy.VOCAB, HIDDEN)) / HIDDEN**0.5
        self.place = jax.random.normal(place, (toy.WIDTH, HIDDEN)) / HIDDEN**0.5
        self.norms = tuple(eqx.nn.RMSNorm(HIDDEN) for _ in range(3))
        self.attention = eqx.nn.MultiheadAttention(HEADS, HIDDEN, key=attention)
        self.up = eqx.nn.Linear(HIDDEN, 4 * HIDDEN, key=up)
        self.down = eqx.nn.Linear(4 * HIDDEN, HIDDEN, key=down)

    def __call__(self, ids: Array) -> Array:
        return jax.vmap(self.one)(ids)

    def one(self, ids: Array) -> Array:
        """One sequence: ``[T]`` ids to ``[T, H]``."""
        before, between, after = (jax.vmap(norm) for norm in self.norms)
        visible = jnp.tril(jnp.ones((ids.size, ids.size), bool))
        x = self.embed[ids] + self.place[: ids.size]
        y = before(x)
        x = x + self.attention(y, y, y, mask=visible)
        x = x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(between(x))))
        return after(x)


def logps(policy: Policy, ids: Array, targets: Array, mask: Array) -> Array:
    """``[B, T]`` log-probabilities: of the policy before its updates, and of the reference."""
    return logitless.linear_logprobs(policy(ids), policy.embed, targets, mask=mask, objective=OBJECTIVE).logp


@eqx.filter_jit
def rollout(policy: Policy, reference: Policy, key: Array) -> tuple[dict[str, Array], Array]:
    """A step's batch, and its mean reward."""
    ask, answer = jax.random.split(key)
    ids, sampled = toy.sample(lambda ids, t: policy(ids)[:, t] @ policy.embed.T, toy.prompts(ask), answer)
    rewards = toy.reward(ids, sampled)
    targets, mask = logitless.next_tokens(ids, sampled)  # hidden[:, t] predicts ids[:, t + 1]; prompts are masked
    batch = dict(
        ids=ids,
        targets=targets,
        mask=mask,
        advantages=logitless.group_advantages(rewards, toy.GROUP),
        old_logp=logps(policy, ids, targets, mask),
        ref_logp=logps(reference, ids, targets, mask),
    )
    return batch, rewards.mean()


@eqx.filter_jit
def update(policy: Policy, state: Any, batch: dict[str, Array]) -> tuple[Policy, Any, Any]:
    """One update; ``(policy, optimiser's state, metrics)``."""
    rest = dict(batch)
    ids = rest.pop("ids")

    def loss(policy: Policy) -> Any:
        return logitless.linear_grpo_loss(policy(ids), policy.embed, objective=OBJECTIVE, **rest)

    gradients, metrics = eqx.filter_grad(loss, has_aux=True)(policy)
    changes, state = OPTIMIZER.update(gradients, state)
    return eqx.apply_updates(policy, changes), state, metrics


def main(steps: int = 100, seed: int = 0) -> list[float]:
    """The mean reward of each step."""
    start, *keys = jax.random.split(jax.random.key(seed), steps + 1)
    policy = reference = Policy(start)
    state = OPTIMIZER.init(eqx.filter(policy, eqx.is_inexact_array))
    rewards: list[float] = []
    for step, key in enumerate(keys):
        batch, reward = rollout(policy, reference, key)
        for _ in range(EPOCHS):
            policy, state, _ = update(policy, state, batch)
        rewards.append(float(reward))
        toy.say(step, rewards)
    return rewards


if __name__ == "__main__":
    main()
