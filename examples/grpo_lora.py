"""LoRA: the weights are frozen, and low-rank maps beside them learn, one of them on the head.

    python examples/grpo_lora.py

Only the maps have gradients and optimiser state. With a frozen head the loss makes two matmuls where it otherwise makes
three, and no gradient of the size of the head; the head's own map goes in as `lora=(A, B)`, unmerged. The reference
policy is the same weights without the maps: there is no second copy.
"""

from __future__ import annotations

from typing import Any

import grpo_optax
import jax
import jax.numpy as jnp
import optax
import toy
from grpo_optax import EPOCHS, OBJECTIVE, hidden_states
from jax import Array

import logitless

RANK, SCALE = 8, 2.0
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def init_maps(key: Array, frozen: dict[str, Any]) -> dict[str, Any]:
    """``(A, B)`` for each matrix of the layers and for the head; ``A @ B`` is zero at first."""

    def pair(key: Array, matrix: Array) -> tuple[Array, Array]:
        rows, columns = matrix.shape
        return jax.random.normal(key, (rows, RANK)) / rows**0.5, jnp.zeros((RANK, columns))

    matrices = dict(layers=frozen["layers"], head=frozen["embed"])
    leaves, tree = jax.tree.flatten(matrices)
    return tree.unflatten(pair(k, m) for k, m in zip(jax.random.split(key, len(leaves)), leaves, strict=True))


def merged(frozen: dict[str, Any], maps: dict[str, Any]) -> dict[str, Any]:
    """The model's parameters with the maps of its layers added; embedding and head stay as they are."""
    layers = [{k: w + SCALE * maps["layers"][i][k][0] @ maps["layers"][i][k][1] for k, w in layer.items()}
              for i, layer in enumerate(frozen["layers"])]  # fmt: skip
    return dict(frozen, layers=layers)


@jax.jit
def rollout(maps: dict[str, Any], frozen: dict[str, Any], key: Array) -> tuple[dict[str, Array], Array]:
    """A step's batch, and its mean reward."""
    ask, answer = jax.random.split(key)
    params, (a, b) = merged(frozen, maps), maps["head"]

    def next_logits(ids: Array, t: Array) -> Array:
        hidden = hidden_states(params, ids)[:, t]
        return hidden @ frozen["embed"].T + SCALE * (hidden @ b.T) @ a.T

    ids, sampled = toy.sample(next_logits, toy.prompts(ask), answer)
    rewards = toy.reward(ids, sampled)
    targets, mask = logitless.next_tokens(ids, sampled)
    rest = dict(mask=mask, objective=OBJECTIVE)
    adapted = logitless.Head(frozen["embed"], lora=maps["head"], lora_scale=SCALE)
    batch = dict(
        ids=ids,
        targets=targets,
        mask=mask,
        advantages=logitless.group_advantages(rewards, toy.GROUP),
        old_logp=logitless.linear_logprobs(hidden_states(params, ids), adapted, targets, **rest).logp,
        ref_logp=logitless.linear_logprobs(hidden_states(frozen, ids), frozen["embed"], targets, **rest).logp,
    )
    return batch, rewards.mean()


@jax.jit
def update(maps: Any, state: Any, frozen: Any, batch: dict[str, Array]) -> tuple[Any, Any, Any]:
    """One update of the maps; ``(maps, optimiser's state, metrics)``."""
    rest = dict(batch)
    ids = rest.pop("ids")

    def loss(maps: Any) -> Any:
        hidden = hidden_states(merged(frozen, maps), ids)
        return logitless.linear_grpo_loss(
            hidden, logitless.Head(frozen["embed"], lora=maps["head"], lora_scale=SCALE), objective=OBJECTIVE, **rest
        )

    gradients, metrics = jax.grad(loss, has_aux=True)(maps)
    changes, state = OPTIMIZER.update(gradients, state, maps)
    return optax.apply_updates(maps, changes), state, metrics


def main(steps: int = 100, seed: int = 0) -> list[float]:
    """The mean reward of each step."""
    weights, beside, *keys = jax.random.split(jax.random.key(seed), steps + 2)
    frozen = grpo_optax.init(weights)
    maps = init_maps(beside, frozen)
    state = OPTIMIZER.init(maps)
    rewards: list[float] = []
    for step, key in enumerate(keys):
        batch, reward = rollout(maps, frozen, key)
        for _ in range(EPOCHS):
            maps, state, _ = update(maps, state, frozen, batch)
        rewards.append(float(reward))
        toy.say(step, rewards)
    return rewards


if __name__ == "__main__":
    main()
