"""A training task: model, tokenizer, problems and reward from a configuration, behind a single object."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from logitless.train import architectures, data, model
from logitless.train.config import ConfigError, TrainConfig
from logitless.train.data import Problem
from logitless.train.hub import by_name
from logitless.train.model import ModelConfig, Params
from logitless.train.reward import format_reward, load_reward, score
from logitless.train.rollout import Completions
from logitless.train.tokenizer import TextTokenizer, load_tokenizer
from logitless.train.weights import load_model, open_model

_INIT = 0  # what the seed's key is folded with


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Token ids padded on the left, on the host."""

    tokens: np.ndarray  # int32 [N, P]
    valid: np.ndarray  # bool [N, P]

    def repeat(self, times: int) -> Prompts:
        """Each prompt ``times`` times, side by side."""
        return Prompts(np.repeat(self.tokens, times, axis=0), np.repeat(self.valid, times, axis=0))


def pad_left(rows: Sequence[Sequence[int]], width: int, pad_id: int) -> Prompts:
    """Rows of at most ``width`` ids as an array, padded on the left."""
    tokens = np.full((len(rows), width), pad_id, np.int32)
    valid = np.zeros((len(rows), width), bool)
    for i, ids in enumerate(rows):
        tokens[i, width - len(ids) :] = ids
        valid[i, width - len(ids) :] = True
    return Prompts(tokens, valid)


@dataclasses.dataclass
class Task:
    """See the module. Without a tokenizer (``rollout.kind: random``) there is only a model."""

    config: TrainConfig
    model: ModelConfig
    load_params: Callable[[], Params]
    tokenizer: TextTokenizer | None
    train: list[Problem]
    held_out: list[Problem]

    def __post_init__(self) -> None:
        self.eos_ids = () if self.tokenizer is None else self.tokenizer.stop_ids
        self.pad_id = 0 if self.tokenizer is None else self.tokenizer.pad_id
        self._reward = load_reward(self.config.reward.kind)

    def problems(self, seed: int, step: int, count: int) -> list[Problem]:
        """The problems of a step (from 1)."""
        return data.batch(self.train, seed, step - 1, count)

    def ids(self, problem: Problem) -> list[int]:
        """A problem's prompt as ids."""
        assert self.tokenizer is not None
        d = self.config.data
        return self.tokenizer.encode_prompt(problem.prompt, chat=d.form == "chat", system=d.system or None)

    def encode(self, problems: Sequence[Problem]) -> Prompts:
        """Prompts of ``rollout.max_prompt_tokens`` columns."""
        return pad_left([self.ids(p) for p in problems], self.config.rollout.max_prompt_tokens, self.pad_id)

    def decode(self, completions: Completions) -> list[str]:
        """The text of each completion."""
        assert self.tokenizer is not None
        pairs = zip(np.asarray(completions.tokens), np.asarray(completions.mask), strict=True)
        return [self.tokenizer.decode(row[live].tolist()) for row, live in pairs]

    def rewards(self, texts: Sequence[str], problems: Sequence[Problem]) -> tuple[np.ndarray, dict[str, float]]:
        """The reward per completion, and the mean per reward part."""
        r = self.config.reward
        scored = (score(r.kind, self._reward, t, p, r.timeout_s) for t, p in zip(texts, problems, strict=True))
        main = np.fromiter(scored, np.float32, len(texts))
        total, parts = r.weight * main, {"answer": float(main.mean())}
        if r.format_weight:
            form = np.array([format_reward(t, p) for t, p in zip(texts, problems, strict=True)], np.float32)
            total, parts["format"] = total + r.format_weight * form, float(form.mean())
        return total.astype(np.float32), parts


def build_task(config: TrainConfig) -> Task:
    """The task of a configuration, with all that can be wrong about it found: names, files, lengths."""
    tokenizer: TextTokenizer | None = None
    train: list[Problem] = []
    held_out: list[Problem] = []
    m = config.model
    if config.rollout.kind == "sample":
        source = m.tokenizer or m.weights or "char"
        tokenizer = load_tokenizer(source, m.cache_dir or None)
        train, held_out = (_problems(config, split) for split in data.SPLITS)
        held_out = held_out[: config.eval.problems]
    shape, load = _model(config, tokenizer)
    task = Task(config, shape, load, tokenizer, train, held_out)
    _check_lengths(task)
    return task


def _model(config: TrainConfig, tokenizer: TextTokenizer | None) -> tuple[ModelConfig, Callable[[], Params]]:
    m = config.model
    dtype = jnp.dtype(m.master_dtype)
    if m.weights:
        # Not read before they are asked for, and nobody keeps them here: what is trained is a run's largest part.
        with open_model(m.weights, m.cache_dir or None) as file:
            shape = file.config
        load: Callable[[], Params] = lambda: load_model(m.weights, dtype, m.cache_dir or None)[1]  # noqa: E731
    else:
        own = tokenizer.vocab_size if tokenizer is not None and m.architecture == "tiny" else None
        shape = architectures.preset(m.architecture, own)
        key = jax.random.fold_in(jax.random.key(config.seed), _INIT)
        load = partial(jax.jit(model.init, static_argnums=(0, 2)), shape, key, dtype)
    if tokenizer is not None and tokenizer.vocab_size > shape.vocab_size:
        raise ConfigError(
            f"model.tokenizer: has {tokenizer.vocab_size} tokens, the model's vocabulary only {shape.vocab_size}"
        )
    length = config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens
    if length > shape.max_position:
        raise ConfigError(
            f"rollout: max_prompt_tokens + max_completion_tokens = {length}, but the model has {shape.max_position} "
            "positions"
        )
    return shape, load


def _problems(config: TrainConfig, split: str) -> list[Problem]:
    d = config.data
    extra: dict[str, Any] = {"instruction": d.instruction} if d.instruction else {}
    if d.kind == "arithmetic":
        return data.arithmetic(d.limit, split, seed=config.seed, form=d.form, **extra)
    if d.kind == "reasoning_gym":
        return data.reasoning_gym(d.task, split, seed=config.seed, **extra)
    folder = Path(d.path) if d.path else by_name("gsm8k", config.model.cache_dir or None)
    if not d.path and not folder.is_dir():
        raise ConfigError(
            f"data.path: empty, and there is no GSM8K in {folder}; give a JSONL file, or a folder with train.jsonl and "
            "test.jsonl (`python scripts/fetch.py gsm8k` in a checkout fetches it)"
        )
    return data.gsm8k(folder, split, **extra)


def _check_lengths(task: Task) -> None:
    """A prompt is never cut: one that does not fit is refused before the first step."""
    room = task.config.rollout.max_prompt_tokens
    problems = [*task.train, *task.held_out]
    lengths = [len(task.ids(p)) for p in problems]
    if lengths and max(lengths) > room:
        longest = problems[lengths.index(max(lengths))]
        raise ConfigError(
            f"rollout.max_prompt_tokens: {room}, but {sum(n > room for n in lengths)} of {len(lengths)} prompts are "
            f"longer; the longest has {max(lengths)} tokens: {longest.prompt[:60]!r}"
        )
