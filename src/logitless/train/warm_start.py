"""A supervised start for random weights on the built-in sums, on answers of which a part is wrong on purpose.

The result answers in the right form and is right now and then: a policy that a reward can improve. It depends on the
configuration and the seed alone, and is kept, so that both arms of an A/B and every resume start from the same bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from logitless.api import linear_logprobs
from logitless.core.options import Head, Options
from logitless.core.pytree import tree_of
from logitless.lab.exits import check_folder
from logitless.train import checkpoints
from logitless.train.config import ConfigError, TrainConfig
from logitless.train.model import Params, lm_head
from logitless.train.task import Task
from logitless.train.update import Batch, completion_parts

_STREAM = 7  # keeps this use of the seed apart from the others


def check_warm_start(config: TrainConfig, task: Task, folder: Path) -> None:
    """Find errors early, before the programs of the run are compiled."""
    cache = _cache(config, folder)
    if not cache.exists():  # a read-only cache may be in a read-only folder
        check_folder(cache.parent)
    examples(config, task, 0)


def warm_start(config: TrainConfig, task: Task, params: Params, folder: Path, say: Any) -> Params:
    """The weights after the supervised steps, from the cache if present."""
    cache = _cache(config, folder)
    digest = _digest(config)
    if cache.exists():
        try:
            found, notes = checkpoints.load_tree(cache, params)
            if notes["digest"] == digest:
                return found
            say(f"warm start: {cache} is of another configuration, computing it again")
        except checkpoints.CheckpointError as error:
            say(f"WARNING: warm start unreadable, computing it again: {error}")
    check_folder(cache.parent)
    w = config.warm_start
    say(f"warm start: {w.steps} supervised steps")
    params, loss = _train(config, task, params)
    if not np.isfinite(loss):
        raise ConfigError(f"warm_start.learning_rate: {w.learning_rate} gave a loss of {loss}; lower it")
    checkpoints.save_tree(cache, params, {"digest": digest, "loss": loss})
    return params


def _cache(config: TrainConfig, folder: Path) -> Path:
    return Path(config.warm_start.cache or folder) / "warm_start.safetensors"


def _digest(config: TrainConfig) -> str:
    """All that the result depends on."""
    parts: dict[str, Any] = {k: dataclasses.asdict(getattr(config, k)) for k in ("model", "data", "warm_start")}
    parts["warm_start"].pop("cache")
    parts["rollout"] = [config.rollout.max_prompt_tokens, config.rollout.max_completion_tokens]
    return hashlib.sha256(json.dumps([config.seed, parts], sort_keys=True).encode()).hexdigest()


def examples(config: TrainConfig, task: Task, step: int) -> Batch:
    """A supervised batch: problems with their answers, ``wrong_fraction`` of them replaced by another sum."""
    w, width = config.warm_start, config.rollout.max_completion_tokens
    assert task.tokenizer is not None
    rng = np.random.default_rng((config.seed, _STREAM, step))
    problems = [task.train[i] for i in rng.integers(0, len(task.train), w.batch)]
    wrong = rng.random(w.batch) < w.wrong_fraction
    others = rng.integers(0, 2 * config.data.limit - 1, w.batch)
    completion = np.full((w.batch, width), task.pad_id, np.int32)
    mask = np.zeros((w.batch, width), bool)
    for i, problem in enumerate(problems):
        answer = str(others[i]) if wrong[i] else problem.answer
        ids = [*task.tokenizer.encode(answer), task.tokenizer.eos_id]
        if len(ids) > width:
            raise ConfigError(f"rollout.max_completion_tokens: {width}, but the answer {answer!r} needs {len(ids)}")
        completion[i, : len(ids)], mask[i, : len(ids)] = ids, True
    prompts = task.encode(problems)
    return tree_of(Batch, prompts.tokens, prompts.valid, completion, mask, np.zeros(w.batch, np.float32))


def _train(config: TrainConfig, task: Task, params: Params) -> tuple[Params, float]:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(config.warm_start.learning_rate))
    dtype = jnp.dtype(config.model.compute_dtype)

    def loss_of(params: Params, batch: Batch) -> jax.Array:
        hidden = completion_parts(None, task.model, batch, dtype).hidden(params, None, remat=False)
        head = lm_head(params, task.model).astype(dtype)
        # The same dense call in both arms of an A/B: they must start from the same bits.
        stats = linear_logprobs(
            hidden, Head(head, layout="vh"), batch.completion, mask=batch.mask, options=Options(backend="reference")
        )
        return -jnp.sum(stats.logp) / jnp.sum(batch.mask)

    def step(params: Params, moments: Any, batch: Batch) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    jitted = jax.jit(step, donate_argnums=(0, 1))
    params = jax.tree.map(jnp.copy, params)
    moments = jax.jit(optimizer.init)(params)
    loss = jnp.float32(0.0)
    for i in range(config.warm_start.steps or 0):
        params, moments, loss = jitted(params, moments, examples(config, task, i))
    return params, float(loss)
