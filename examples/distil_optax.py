"""On-policy distillation: a small student learns a teacher's policy on its own completions.

    python examples/distil_optax.py

The teacher is a policy that GRPO has trained (`grpo_optax.py`). The student has half of its width. A step samples
completions of the *student*, runs both models over them, and takes the reverse KL of the two distributions at every
sampled position, over the whole vocabulary. No reward is needed; it is printed to show what the student has learnt.
"""

from __future__ import annotations

from typing import Any

import grpo_optax
import jax
import optax
import toy
from grpo_optax import hidden_states
from jax import Array

import logitless

WIDTH = grpo_optax.HIDDEN // 2
DISTILLATION = logitless.Distillation(divergence="reverse_kl")
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def train_teacher(steps: int, key: Array) -> dict[str, Any]:
    """A policy after `steps` steps of GRPO."""
    start, *keys = jax.random.split(key, steps + 1)
    reference = params = grpo_optax.init(start)
    state = grpo_optax.OPTIMIZER.init(params)
    for k in keys:
        batch, _ = grpo_optax.rollout(params, reference, k)
        for _ in range(grpo_optax.EPOCHS):
            params, state, _ = grpo_optax.update(params, state, batch)
    return params


@jax.jit
def step(student: Any, state: Any, teacher: Any, key: Array) -> tuple[Any, Any, Array, Any]:
    """One update on the student's own completions; ``(student, optimiser's state, mean reward, metrics)``."""
    ask, answer = jax.random.split(key)

    def next_logits(ids: Array, t: Array) -> Array:
        return hidden_states(student, ids)[:, t] @ student["embed"].T

    ids, sampled = toy.sample(next_logits, toy.prompts(ask), answer)
    targets, mask = logitless.next_tokens(ids, sampled)

    def loss(student: Any) -> Any:
        return logitless.linear_distillation_loss(
            hidden_states(student, ids), student["embed"],
            hidden_states(teacher, ids), teacher["embed"],
            targets, mask=mask, distillation=DISTILLATION,
        )  # fmt: skip

    gradients, metrics = jax.grad(loss, has_aux=True)(student)
    changes, state = OPTIMIZER.update(gradients, state, student)
    return optax.apply_updates(student, changes), state, toy.reward(ids, sampled).mean(), metrics


def main(steps: int = 100, teacher_steps: int = 100, seed: int = 0) -> list[float]:
    """The mean reward of the student's completions at each step."""
    first, second, *keys = jax.random.split(jax.random.key(seed), steps + 2)
    teacher, student = train_teacher(teacher_steps, first), grpo_optax.init(second, WIDTH)
    state = OPTIMIZER.init(student)
    rewards: list[float] = []
    for i, key in enumerate(keys):
        student, state, reward, metrics = step(student, state, teacher, key)
        rewards.append(float(reward))
        toy.say(i, rewards)
        if i in (0, steps - 1):
            print({k: round(v, 4) for k, v in logitless.metric_values(metrics).items()})
    return rewards


if __name__ == "__main__":
    main()
