"""A step's completions with what they earned: drawn from the policy by the trainer, or by a sampler from outside; or
random tokens in place of a task, for measuring time and memory (``rollout.kind: random``).

Dynamic sampling (DAPO, https://arxiv.org/abs/2503.14476): a group whose rewards are all equal teaches nothing. With
``rollout.redraw = n`` up to ``n`` further batches of problems are drawn, and their groups with a spread take the places
of those without, in order. What is drawn is a function of state, seed and step: a resumed run draws the same.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from logitless.core.pytree import tree_of
from logitless.train.config import TrainConfig
from logitless.train.lora import merge
from logitless.train.reward import overlong_penalty
from logitless.train.rollout import Completions
from logitless.train.run_records import Rollouts
from logitless.train.sampler import sampled
from logitless.train.task import Prompts
from logitless.train.update import Policy, State, whole_policy

if TYPE_CHECKING:
    from logitless.train.trainer import Trainer

_ROLLOUT = 1  # what the seed's key is folded with
_OTHER_PROBLEMS = 1_000_003  # what the seed of the problems moves by at every further draw


def collect(t: Trainer, state: State, frozen: Policy, step: int) -> Rollouts:
    """All draws of a step, merged."""
    params, lora = whole_policy(state.trained, frozen)
    if t.sampler is not None:
        with t.timed("sync"):
            t.sampler.sync(params if lora is None else merge(params, lora), t.task.model, step)
    rolled = _draw(t, params, lora, step, 0)
    if not t.config.rollout.redraw:
        return rolled
    size, first = t.config.train.group_size, float(rolled.rewards.mean())
    draws, replaced = 1, 0
    while draws <= t.config.rollout.redraw and not _spread(rolled, size).all():
        more = _draw(t, params, lora, step, draws)
        draws += 1
        places, good = np.flatnonzero(~_spread(rolled, size)), np.flatnonzero(_spread(more, size))
        count = min(len(places), len(good))
        rolled = _replace_groups(rolled, more, places[:count], good[:count], size)
        replaced += count
    rolled.notes = {"rollout/draws": draws, "rollout/groups_replaced": replaced, "reward/first_draw": first}
    return rolled


def _spread(rolled: Rollouts, group_size: int) -> np.ndarray:
    """Groups whose rewards differ."""
    groups = rolled.rewards.reshape(-1, group_size)
    return groups.min(axis=1) != groups.max(axis=1)


def _replace_groups(
    rolled: Rollouts, more: Rollouts, places: np.ndarray, good: np.ndarray, group_size: int
) -> Rollouts:
    """``rolled`` with the groups ``good`` of ``more`` at ``places``."""
    offsets = np.arange(group_size)
    to, of = ((g[:, None] * group_size + offsets).reshape(-1) for g in (places, good))

    def put(x: Any, y: Any) -> np.ndarray:
        out = np.array(x)
        out[to] = np.asarray(y)[of]
        return out

    texts = list(rolled.texts)
    for i, j in zip(to, of, strict=True):
        texts[i] = more.texts[j]
    prompts = dataclasses.replace(
        rolled.prompts,
        tokens=put(rolled.prompts.tokens, more.prompts.tokens),
        valid=put(rolled.prompts.valid, more.prompts.valid),
    )
    completions = jax.tree.map(put, rolled.completions, more.completions)
    rewards = put(rolled.rewards, more.rewards)
    # Parts of the reward are means over a draw: keep the first draw's means.
    return Rollouts(prompts, completions, rewards, rolled.parts, texts)


def _draw(t: Trainer, params: Any, lora: Any, step: int, attempt: int) -> Rollouts:
    """A batch of problems with completions."""
    c, task = t.config, t.task
    problems = task.problems(c.seed + attempt * _OTHER_PROBLEMS, step, c.train.prompts_per_step)
    prompts = task.encode(problems)
    with t.timed("rollout"):
        if t.sampler is not None:
            seed = int(np.random.default_rng([c.seed, step, attempt]).integers(2**31))
            completions = sampled(t.sampler, prompts, t.sampling, seed, task.model.vocab_size)
        else:
            completions = _from_the_policy(t, params, lora, prompts, step, attempt)
    with t.timed("reward"):
        texts = task.decode(completions)
        rewards, parts = task.rewards(texts, [p for p in problems for _ in range(c.train.group_size)])
        if c.reward.overlong_buffer:
            lengths = np.asarray(completions.mask).sum(axis=1)
            limit = c.rollout.max_completion_tokens
            penalty = overlong_penalty(lengths, limit, c.reward.overlong_buffer, c.reward.overlong_penalty)
            rewards, parts = rewards + penalty, {**parts, "overlong": float(penalty.mean())}
    return Rollouts(prompts.repeat(c.train.group_size), completions, rewards, parts, texts)


def _from_the_policy(t: Trainer, params: Any, lora: Any, prompts: Prompts, step: int, attempt: int) -> Completions:
    c = t.config
    key = jax.random.fold_in(jax.random.fold_in(t.key, _ROLLOUT), step)
    if attempt:
        key = jax.random.fold_in(key, attempt)
    size = c.train.group_size
    at_once = (c.rollout.rows or c.train.prompts_per_step * size) // size
    return t.completions(t.rollout_program, params, lora, prompts, key, at_once, size)


def random_rollouts(config: TrainConfig, vocab: int, step: int) -> Rollouts:
    """A step's completions with RL's statistics (``lab.tools.shapes.rl_batch``), a function of seed and step alone:
    lognormal lengths, equal rewards in every third group."""
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
