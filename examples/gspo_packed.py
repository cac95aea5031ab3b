"""GSPO over packed rows: several sequences share a row, and nothing is spent on padding.

    python examples/gspo_packed.py

Sampling is that of grpo_optax.py. For the updates `logitless.pack` puts prompts and completions, without their padding,
into fewer rows, and with them all arrays of the loss: advantages are spread from one a sequence to its tokens. The
model keeps sequences apart (positions start anew, attention stays inside a segment), and the loss takes one ratio a
segment, wherever that lies in a row.
"""

from __future__ import annotations

from typing import Any

import jax
import optax
import toy
from grpo_optax import EPOCHS, OPTIMIZER, hidden_states, init, rollout
from jax import Array

import logitless

ROWS, LENGTH = 16, 36  # 64 sequences of up to 10 tokens, each in a slot less than it has tokens
OBJECTIVE = logitless.Objective.gspo(eps_low=0.1, eps_high=0.15, beta=0.01, entropy_coef=0.02)


def packed(batch: dict[str, Array]) -> logitless.Packed:
    """The batch of a rollout in packed rows of always the same shape."""
    predicting = slice(toy.PROMPT - 1, -1)  # the places that predict the completion
    prompt, completion = batch["ids"][:, : toy.PROMPT], batch["ids"][:, toy.PROMPT :]
    return logitless.pack(
        prompt,
        prompt != toy.PAD,
        completion,
        batch["mask"][:, predicting],
        length=LENGTH,
        rows=ROWS,
        advantages=batch["advantages"],
        old_logp=batch["old_logp"][:, predicting],
        ref_logp=batch["ref_logp"][:, predicting],
    )


def loss_of(params: Any, rows: logitless.Packed) -> tuple[Array, Any]:
    """GSPO's loss and metrics."""
    hidden = hidden_states(params, rows.tokens, rows.segment_ids)
    return logitless.linear_grpo_loss(hidden, params["embed"], rows.targets, objective=OBJECTIVE, **rows.loss_arrays())


@jax.jit
def update(params: Any, state: Any, rows: logitless.Packed) -> tuple[Any, Any, Any]:
    """One update; ``(params, optimiser's state, metrics)``."""
    gradients, metrics = jax.grad(loss_of, has_aux=True)(params, rows)
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
        rows = packed(batch)
        for _ in range(EPOCHS):
            params, state, _ = update(params, state, rows)
        rewards.append(float(reward))
        toy.say(step, rewards)
    print(f"{rows.fill():.2f} of the packed rows hold a token")
    return rewards


if __name__ == "__main__":
    main()
