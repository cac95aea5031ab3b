"""Completions from outside: the interface for a sampler of your own (vLLM, SGLang, a server, another JAX library).

``rollout.sampler=package.module:make`` (or ``file.py:make``) names a function that takes the run's ``TrainConfig`` and
returns an object with two methods:

    sync(params, model, step)     the policy's weights, before the completions of a step are asked for
    sample(request)               one :class:`Sample` for each prompt and each of its ``group_size`` completions

Log-probabilities follow the definition of ``rollout_logp``: at the sampling temperature, over the whole vocabulary, for
every returned token; with ``rollout.top_k`` over the ids in ``support``, as vLLM and SGLang return. An engine computes
them with other kernels than the trainer does, and often in another precision; ``train.objective`` has corrections for
that (``correction``, ``off_policy_threshold``), and ``rollout/logp_gap_max`` is the largest difference. ``None`` in
place of a log-probability says that it is not known: no correction for that token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from logitless.train.config import ConfigError, TrainConfig
from logitless.train.model import ModelConfig, Params
from logitless.train.reward import RewardError, function_of
from logitless.train.rollout import Completions, Sampling

if TYPE_CHECKING:
    from logitless.train.task import Prompts


@dataclasses.dataclass(frozen=True)
class Request:
    """What a step asks for."""

    prompts: list[list[int]]
    group_size: int
    max_new: int
    temperature: float
    top_p: float
    eos_ids: tuple[int, ...]
    seed: int
    """A function of the run's seed and the step: an engine that uses it makes resumed runs repeat."""
    top_k: int = 0
    """Ids that a token may be drawn from at most, and room for them in ``Sample.support``; 0: all, none."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A completion: at most ``max_new`` tokens, possibly ending with an end token, and each token's log-probability."""

    tokens: Sequence[int]
    logp: Sequence[float | None]
    support: Sequence[Sequence[int]] | None = None
    """Ids that each token was drawn from, where the engine cut and normalised anew; an empty one: the vocabulary."""


class Sampler(Protocol):
    """See the module."""

    def sync(self, params: Params, model: ModelConfig, step: int) -> None:
        """Take over the weights (LoRA merged into them); the arrays are the trainer's and must not be kept."""

    def sample(self, request: Request) -> Sequence[Sample]:
        """``len(prompts) * group_size`` completions, grouped by prompt."""


class SamplerError(RewardError):
    """A sampler returned what cannot be trained on; it ends a run as a reward that cannot be used does."""


def load_sampler(config: TrainConfig) -> Sampler:
    """The sampler that the configuration names."""
    spec = config.rollout.sampler
    try:
        sampler = function_of("sampler", spec)(config)
    except RewardError as error:
        raise ConfigError(f"rollout.sampler: {error}") from None
    missing = [m for m in ("sync", "sample") if not callable(getattr(sampler, m, None))]
    if missing:
        raise ConfigError(f"rollout.sampler: {spec} made a {type(sampler).__name__} without {' and '.join(missing)}()")
    return sampler


def sampled(sampler: Sampler, prompts: Prompts, s: Sampling, seed: int, vocab: int) -> Completions:
    """Ask for a step's completions and lay them out; whatever is wrong with one is said with its number."""
    given = [row[live].tolist() for row, live in zip(prompts.tokens, prompts.valid, strict=True)]
    request = Request(given, s.group_size, s.max_new, s.temperature, s.top_p, s.eos_ids, seed, s.top_k)
    found = list(sampler.sample(request))
    rows = len(given) * s.group_size
    if len(found) != rows:
        raise SamplerError(
            f"rollout.sampler: {len(found)} completions, expected {rows} ({len(given)} x {s.group_size})"
        )
    tokens = np.full((rows, s.max_new), s.pad_id, np.int32)
    mask = np.zeros((rows, s.max_new), bool)
    logp = np.zeros((rows, s.max_new), np.float32)
    support = np.full((rows, s.max_new, s.top_k), -1, np.int32) if s.top_k else None
    for i, one in enumerate(found):
        drawn, n = np.asarray(one.tokens), len(one.tokens)
        _check(i, drawn, len(one.logp), s, vocab)
        tokens[i, :n], mask[i, :n] = drawn, True
        logp[i, :n] = [np.nan if x is None else x for x in one.logp]
        for t, ids in enumerate(one.support or ()):
            _check_support(i, t, drawn, ids, s.top_k, vocab)
            assert support is not None
            support[i, t, : len(ids)] = ids
    return Completions(tokens, mask, logp, support)  # type: ignore[arg-type]


def _check_support(i: int, t: int, drawn: np.ndarray, ids: Sequence[int], most: int, vocab: int) -> None:
    where = f"rollout.sampler: completion {i}, token {t}: its support"
    if t >= len(drawn):
        raise SamplerError(f"{where} has no token; expected one support a token")
    if len(ids) > most:
        raise SamplerError(f"{where} has {len(ids)} ids, expected at most {most} (rollout.top_k)")
    if len(ids) and (min(ids) < 0 or max(ids) >= vocab or int(drawn[t]) not in ids):
        raise SamplerError(f"{where} lacks the token {int(drawn[t])}, or has ids outside [0, {vocab})")


def _check(i: int, drawn: np.ndarray, log_probabilities: int, s: Sampling, vocab: int) -> None:
    n, where = len(drawn), f"rollout.sampler: completion {i}"
    if not 1 <= n <= s.max_new:
        raise SamplerError(f"{where} has {n} tokens, expected 1 to {s.max_new} (rollout.max_completion_tokens)")
    if log_probabilities != n:
        raise SamplerError(f"{where} has {n} tokens and {log_probabilities} log-probabilities, expected as many")
    if not np.issubdtype(drawn.dtype, np.integer) or drawn.min() < 0 or drawn.max() >= vocab:
        raise SamplerError(f"{where} has ids outside [0, {vocab}): {drawn.tolist()[:8]}")
    if np.isin(drawn[:-1], s.eos_ids).any():
        raise SamplerError(f"{where} goes on after an end token {s.eos_ids}; cut it there")
