"""Random tokens and rewards in place of a task, for measuring time and memory (``rollout.kind: random``)."""

from __future__ import annotations

import numpy as np

from logitless.core.pytree import tree_of
from logitless.train.config import TrainConfig
from logitless.train.rollout import Completions
from logitless.train.run_records import Rollouts
from logitless.train.task import Prompts


def random_rollouts(config: TrainConfig, vocab: int, step: int) -> Rollouts:
    """A step's completions, a function of seed and step alone.

    Random rollouts with RL's statistics (``bench.shapes.rl_batch``): lognormal lengths, equal rewards in every third
    group.
    """
    c, rng = config, np.random.default_rng((config.seed, step))
    rows, width = c.train.prompts_per_step * c.train.group_size, c.rollout.max_completion_tokens
    prompt = rng.integers(0, vocab, (rows // c.train.group_size, c.rollout.max_prompt_tokens), dtype=np.int32)
    tokens = rng.integers(0, vocab, (rows, width), dtype=np.int32)
    lengths = np.clip(rng.lognormal(np.log(width * 0.4), 0.6, (rows, 1)).astype(int), 1, width)
    mask = np.arange(width) < lengths
    prompts = Prompts(prompt, np.ones(prompt.shape, bool)).repeat(c.train.group_size)
    k = c.rollout.top_k  # only to compile for: what is sampled has its own
    support = np.full((*mask.shape, k), -1, np.int32) if k else None
    completions = tree_of(Completions, np.where(mask, tokens, 0), mask, np.zeros(mask.shape, np.float32), support)
    rewards = rng.integers(0, 2, rows).astype(np.float32)
    rewards[np.arange(rows) // c.train.group_size % 3 == 2] = 1.0
    return Rollouts(prompts, completions, rewards, {}, [])
