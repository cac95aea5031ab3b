"""GSPO over packed rows: several sequences share a row, and nothing is spent on padding.

    python examples/gspo_packed.py

Sampling is that of grpo_optax.py. For the update, sequences without their padding are packed into fewer rows. The model
needs to know where a sequence begins (positions start anew, attention stays inside); the loss needs `segment_ids`, and
advantages that were spread from one a sequence to one a token. GSPO's ratio is then that of a sequence, wherever it
lies in a row.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import toy
from grpo_optax import EPOCHS, OPTIMIZER, hidden_states, init, rollout
from jax import Array

import logitless

ROWS, WIDTH = 16, 40  # what 64 sequences of 2 to 10 tokens fit into
OBJECTIVE = logitless.Objective.gspo(eps_low=0.1, eps_high=0.15, beta=0.01, entropy_coef=0.02)


def pack(lengths: np.ndarray, rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """``(sequence, place)``, both ``[rows, width]``: which sequence lies at a position, and which of its tokens.

    The longest first, each into the first row that has room for it. Where nothing lies, ``sequence`` is -1.
    """
    sequence, place = np.full((rows, width), -1), np.zeros((rows, width), int)
    used = np.zeros(rows, int)
    for i in np.argsort(-lengths, kind="stable"):
        n = lengths[i]
        (room,) = np.nonzero(used + n <= width)
        if not room.size:
            raise ValueError(
                f"{lengths.sum()} tokens in sequences of up to {lengths.max()} do not fit {rows} x {width}"
            )
        row, start = room[0], used[room[0]]
        sequence[row, start : start + n], place[row, start : start + n] = i, np.arange(n)
        used[row] += n
    return sequence, place


def packed(batch: dict[str, Array]) -> dict[str, Array]:
    """The batch of a rollout in packed rows: every array of it is ``[rows, width]``."""
    batch = {k: np.asarray(v) for k, v in batch.items()}
    sampled = np.roll(batch["mask"], 1, axis=1)  # the mask is on the position before a sampled token
    first = (batch["ids"] != toy.PAD).argmax(axis=1)  # of the prompt, which is padded on its left
    end = toy.WIDTH - sampled[:, ::-1].argmax(axis=1)
    sequence, place = pack(end - first, ROWS, WIDTH)

    def take(x: np.ndarray) -> Array:
        return jnp.asarray(np.where(sequence < 0, 0, x[sequence, first[sequence] + place]))

    segment_ids = jnp.asarray(sequence)
    ids = take(batch["ids"])
    targets, mask = logitless.next_tokens(ids, take(sampled), segment_ids=segment_ids)
    return dict(
        ids=ids,
        segment_ids=segment_ids,
        targets=targets,
        mask=mask,
        advantages=jnp.where(segment_ids < 0, 0.0, batch["advantages"][sequence]),  # [B], spread over the tokens
        old_logp=take(batch["old_logp"]),
        ref_logp=take(batch["ref_logp"]),
    )


def loss_of(params: Any, batch: dict[str, Array]) -> tuple[Array, Any]:
    """GSPO's loss and metrics; the same function for packed rows and for padded ones."""
    rest = dict(batch)
    hidden = hidden_states(params, rest.pop("ids"), rest.get("segment_ids"))
    return logitless.linear_grpo_loss(hidden, params["embed"], objective=OBJECTIVE, **rest)


@jax.jit
def update(params: Any, state: Any, batch: dict[str, Array]) -> tuple[Any, Any, Any]:
    """One update; ``(params, optimiser's state, metrics)``."""
    gradients, metrics = jax.grad(loss_of, has_aux=True)(params, batch)
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
        batch = packed(batch)
        for _ in range(EPOCHS):
            params, state, _ = update(params, state, batch)
        rewards.append(float(reward))
        toy.say(step, rewards)
    return rewards


if __name__ == "__main__":
    main()
