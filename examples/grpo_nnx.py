"""GRPO with Flax NNX: the model stays an ordinary module, and the loss takes its hidden states and its embedding.

    pip install -e '.[examples]'
    python examples/grpo_nnx.py

The loop is that of grpo_optax.py: shift, prompt mask, old log-probabilities, two updates on the same completions, KL
to the initial policy, a tied head.
"""

from __future__ import annotations

from typing import Any

import jax
import optax
import toy
from flax import nnx
from jax import Array

import logitless

HIDDEN, HEADS, EPOCHS = 32, 2, 2
OBJECTIVE = logitless.Objective.grpo(eps_high=0.28, beta=0.01, entropy_coef=0.02)


class Policy(nnx.Module):
    """A causal transformer that ends before its head: calling it gives hidden states ``[B, T, H]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        small = jax.nn.initializers.normal(HIDDEN**-0.5)
        self.embed = nnx.Embed(toy.VOCAB, HIDDEN, embedding_init=small, rngs=rngs)
        self.place = nnx.Embed(toy.WIDTH, HIDDEN, embedding_init=small, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(HIDDEN, rngs=rngs) for _ in range(3)])
        self.attention = nnx.MultiHeadAttention(HEADS, HIDDEN, decode=False, rngs=rngs)
        self.up = nnx.Linear(HIDDEN, 4 * HIDDEN, rngs=rngs)
        self.down = nnx.Linear(4 * HIDDEN, HIDDEN, rngs=rngs)

    def __call__(self, ids: Array) -> Array:
        x = self.embed(ids) + self.place.embedding[...][: ids.shape[1]]
        x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(ids))
        x = x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))
        return self.norms[2](x)

    def head(self) -> Array:
        """The tied head, ``[V, H]``."""
        return self.embed.embedding[...]


def logps(policy: Policy, ids: Array, targets: Array, mask: Array) -> Array:
    """``[B, T]`` log-probabilities: of the policy before its updates, and of the reference."""
    return logitless.linear_logprobs(policy(ids), policy.head(), targets, mask=mask, objective=OBJECTIVE).logp


@nnx.jit
def rollout(policy: Policy, reference: Policy, key: Array) -> tuple[dict[str, Array], Array]:
    """A step's batch, and its mean reward."""
    ask, answer = jax.random.split(key)
    ids, sampled = toy.sample(lambda ids, t: policy(ids)[:, t] @ policy.head().T, toy.prompts(ask), answer)
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


@nnx.jit
def update(policy: Policy, optimizer: nnx.Optimizer, batch: dict[str, Array]) -> Any:
    """One update, in place; its metrics."""
    rest = dict(batch)
    ids = rest.pop("ids")

    def loss(policy: Policy) -> Any:
        return logitless.linear_grpo_loss(policy(ids), policy.head(), objective=OBJECTIVE, **rest)

    gradients, metrics = nnx.grad(loss, has_aux=True)(policy)
    optimizer.update(policy, gradients)
    return metrics


def main(steps: int = 100, seed: int = 0) -> list[float]:
    """The mean reward of each step."""
    policy, reference = Policy(nnx.Rngs(seed)), Policy(nnx.Rngs(seed))  # the same weights twice
    optimizer = nnx.Optimizer(policy, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3)), wrt=nnx.Param)
    rewards: list[float] = []
    for step, key in enumerate(jax.random.split(jax.random.key(seed), steps)):
        batch, reward = rollout(policy, reference, key)
        for _ in range(EPOCHS):
            update(policy, optimizer, batch)
        rewards.append(float(reward))
        toy.say(step, rewards)
    return rewards


if __name__ == "__main__":
    main()
