"""A short run of Tunix' GRPOLearner on a small model, recorded: completions, rewards, losses, parameters."""

from __future__ import annotations

import dataclasses
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

from tunix_cases import qwen2_config, softened, with_lora

VOCABULARY = 32


class Tokenizer:
    """A number is a token."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(w) for w in text.split()]

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(str(int(i)) for i in ids)

    def pad_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return 1

    def bos_id(self) -> int:
        return 2


@dataclasses.dataclass
class Run:
    """What a run left behind."""

    rewards: list[float]
    losses: list[float]
    parameters: Any


def _model(tied: bool, lora: str | None, mesh: Any) -> Any:
    made = softened(qwen2.Qwen2(qwen2_config(VOCABULARY, tied=tied, num_kv_heads=2), rngs=nnx.Rngs(params=0)))
    made = made if lora is None else with_lora(made, lora)
    state = nnx.state(made)
    placed = jax.device_put(state, nnx.get_named_sharding(state, mesh))
    nnx.update(made, placed)
    return made


def learn(
    mesh_shape: tuple[int, int] = (1, 1),
    tied: bool = True,
    lora: str | None = None,
    steps: int = 3,
    **settings: Any,
) -> Run:
    """``steps`` batches of four prompts, two generations each, two updates a batch."""
    devices = np.array(jax.devices()[: mesh_shape[0] * mesh_shape[1]]).reshape(mesh_shape)
    mesh = jax.sharding.Mesh(devices, ("fsdp", "tp"))
    rewards: list[float] = []

    def reward(prompts: Any, completions: list[str], **_: Any) -> list[float]:
        scores = [sum(int(w) % 2 for w in c.split()) / 8 for c in completions]
        rewards.extend(scores)
        return scores

    with mesh:
        actor, reference = _model(tied, lora, mesh), _model(tied, None, mesh)
        roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
        cluster = rl_cluster.RLCluster(
            actor=actor,
            reference=reference,
            tokenizer=Tokenizer(),
            cluster_config=rl_cluster.ClusterConfig(
                role_to_mesh=dict.fromkeys(roles, mesh),
                rollout_engine="vanilla",
                offload_to_cpu=False,
                training_config=rl_cluster.RLTrainingConfig(
                    actor_optimizer=optax.sgd(0.3), eval_every_n_steps=10_000, max_steps=2 * steps
                ),
                rollout_config=RolloutConfig(
                    max_tokens_to_generate=8, max_prompt_length=4, kv_cache_size=16, temperature=0.9, seed=3
                ),
            ),
        )
        algo = GRPOConfig(**{"num_generations": 2, "num_iterations": 2, "beta": 0.04, **settings})
        learner = GRPOLearner(rl_cluster=cluster, algo_config=algo, reward_fns=reward)
        learner.train([{"prompts": np.array([f"{i + 3} {j + 5}" for j in range(4)])} for i in range(steps)])
        history = cluster.actor_trainer.metrics_logger.get_metric_history("actor", "loss", "train")
        state = nnx.state(actor, nnx.LoRAParam if lora else nnx.Param)
    return Run(rewards, [float(x) for x in history], jax.tree.map(np.asarray, nnx.to_pure_dict(state)))


def moved(a: Run, b: Run) -> float:
    """The largest difference between the parameters of two runs."""
    pairs = zip(jax.tree.leaves(a.parameters), jax.tree.leaves(b.parameters), strict=True)
    return max(float(jnp.max(jnp.abs(x - y))) for x, y in pairs)
