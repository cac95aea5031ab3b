"""GRPO with Tunix, logits-free by one line: a small Qwen2 learns to answer with one word.

    pip install -e '.[tunix]'
    python examples/tunix_grpo.py            # the line is there
    python examples/tunix_grpo.py --stock    # and here it is not: the same rewards

The model is random and small, so that it runs on a CPU in a minute or two. With a real one, nothing else changes.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen2 import model as qwen2
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

import logitless.integrations.tunix

WORDS = [
    "<pad>",
    "<end>",
    "<begin>",
    "say",
    "a",
    "word",
    "please",
    "yes",
    "no",
    "maybe",
    "never",
    "always",
    "often",
    "red",
    "green",
    "blue",
    "one",
    "two",
    "three",
    "four",
]


class Tokenizer:
    """A word is a token."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [WORDS.index(w) for w in text.split()]

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(WORDS[int(i)] for i in ids)

    def pad_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return 1

    def bos_id(self) -> int:
        return 2


def model() -> qwen2.Qwen2:
    config = qwen2.ModelConfig(
        num_layers=2, vocab_size=len(WORDS), embed_dim=32, hidden_dim=64, num_heads=2, head_dim=16, num_kv_heads=1,
        rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=False, dtype=jnp.float32, param_dtype=jnp.float32,
    )  # fmt: skip
    return qwen2.Qwen2(config, rngs=nnx.Rngs(params=0))


def main(steps: int = 20, stock: bool = False) -> list[float]:
    """Trains, and returns the mean reward of each step."""
    if not stock:
        logitless.integrations.tunix.install()  # the line

    rewards: list[float] = []

    def says_blue(prompts: Any, completions: list[str], **_: Any) -> list[float]:
        scores = [c.split().count("blue") / max(len(c.split()), 1) for c in completions]
        rewards.append(float(np.mean(scores)))
        return scores

    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    cluster = rl_cluster.RLCluster(
        actor=model(),
        reference=model(),
        tokenizer=Tokenizer(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine="vanilla",
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(3e-3), eval_every_n_steps=10_000, max_steps=2 * steps
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=8, max_prompt_length=8, kv_cache_size=32, temperature=1.0
            ),
        ),
    )
    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=8, num_iterations=2, beta=0.01),
        reward_fns=says_blue,
    )
    prompts = ["say a word please", "please say one", "say yes"]
    learner.train([{"prompts": np.array([prompts[i % 3], prompts[(i + 1) % 3]])} for i in range(steps)])
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stock", action="store_true", help="without logitless")
    given = parser.parse_args()
    for step, reward in enumerate(main(given.steps, given.stock)):
        print(f"step {step:3d}  reward {reward:.3f}")
