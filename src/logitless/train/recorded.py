"""Record the steps of a run for a replay with another loss, and read the records back.

    <run_dir>/rollouts/step_00000001.npz   prompts, completions and rewards, for another run (rollout.replay)
    <run_dir>/trace/step_00000001.npz      losses and norms of the updates, log-probabilities of the tokens before them,
                                           weights after them

The weights are sampled, every n-th number of each array with n odd: a distance over the sample matches a distance over
all weights to about a percent, at 64 KiB per step.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from logitless.core.pytree import tree_of
from logitless.train.config import ConfigError
from logitless.train.files import in_a_line, replaced
from logitless.train.rollout import Completions
from logitless.train.run_records import Rollouts
from logitless.train.task import Prompts

SAMPLE = 2**14
"""Weights in a trace, about."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """Results of a step that may differ between two losses."""

    losses: np.ndarray
    """Of each update; NaN if not finite."""
    grad_norms: np.ndarray
    logp: np.ndarray
    """Of the live completion tokens, before the step's updates."""
    weights: np.ndarray
    """Sample of the trained weights after the step's updates."""


def sample_weights(trained: Any) -> Array:
    """About ``SAMPLE`` of the numbers in a tree of weights, float32 ``[n]``; the same ones for the same shapes."""
    leaves = jax.tree.leaves(trained)
    # An odd stride walks through all columns of a matrix whose width is a power of two.
    stride = max(sum(x.size for x in leaves) // SAMPLE, 1) | 1
    return jnp.concatenate([x.reshape(-1)[::stride].astype(jnp.float32) for x in leaves])


def _file(folder: Path, kind: str, step: int) -> Path:
    return folder / kind / f"step_{step:08d}.npz"


def _write(file: Path, **arrays: Any) -> None:
    with replaced(file) as beside, beside.open("wb") as out:
        np.savez(out, **arrays)


_ROLLOUTS = dict(prompt="iNP", prompt_valid="bNP", completion="iNC", mask="bNC", logp="fNC", rewards="fN", parts="U")
_TRACE = dict(losses="fE", grad_norms="fE", logp="fT", weights="fW")
"""Arrays of a file by name: the kind of their numbers, and their axes."""


def _read(file: Path, layout: dict[str, str]) -> dict[str, np.ndarray]:
    """The arrays of a file, with kinds and axes from ``layout``."""
    try:
        with np.load(file, allow_pickle=False) as found:
            arrays = {name: found[name] for name in layout}
    except Exception as error:  # whatever damaged bytes make of the reader
        raise ConfigError(f"{file}: not readable as a recorded step ({in_a_line(error)})") from None
    sizes: dict[str, int] = {}
    for name, x in arrays.items():
        kind, axes = layout[name][0], layout[name][1:]
        fits = x.ndim == len(axes) and all(sizes.setdefault(a, n) == n for a, n in zip(axes, x.shape, strict=True))
        if x.dtype.kind != kind or not fits:
            raise ConfigError(f"{file}: {name} is {x.dtype}{[*x.shape]}, which is not what a step records")
    return arrays


def steps_in(folder: Path, kind: str = "rollouts") -> int:
    """Steps whose rollouts (or ``trace``) are in the run's folder, counted from the first."""
    return next(n for n in itertools.count() if not _file(folder, kind, n + 1).exists())


def save_rollouts(folder: Path, step: int, rolled: Rollouts) -> None:
    """Keep a step's completions."""
    done = rolled.completions
    _write(
        _file(folder, "rollouts", step),
        prompt=rolled.prompts.tokens,
        prompt_valid=rolled.prompts.valid,
        completion=done.tokens,
        mask=done.mask,
        logp=done.logp,
        rewards=rolled.rewards,
        parts=np.array(json.dumps(rolled.parts)),
    )


def load_rollouts(folder: Path, step: int, rows: int, widths: tuple[int, int], vocab: int) -> Rollouts:
    """A step's completions from another run; ``rows``, the ``widths`` of prompt and completion and the vocabulary
    must be this run's."""
    found = read_rollouts(folder, step)
    given = np.shape(found.prompts.tokens), np.shape(found.completions.tokens)
    expected = (rows, widths[0]), (rows, widths[1])
    if given != expected:
        raise ConfigError(
            f"rollout.replay: {_file(folder, 'rollouts', step)} has prompts and completions of {given[0]} and "
            f"{given[1]} tokens, expected {expected[0]} and {expected[1]}; replay with the configuration of the run "
            "that recorded them"
        )
    for tokens in (found.prompts.tokens, np.asarray(found.completions.tokens)):
        if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= vocab:
            raise ConfigError(
                f"rollout.replay: {_file(folder, 'rollouts', step)} has token ids from {tokens.min()} to "
                f"{tokens.max()}, expected 0 to {vocab - 1}; replay with the model of the run that recorded them"
            )
    return found


def read_rollouts(folder: Path, step: int) -> Rollouts:
    """A step's completions, with any shape."""
    file = _file(folder, "rollouts", step)
    found = _read(file, _ROLLOUTS)
    if not np.isfinite(found["rewards"]).all():
        raise ConfigError(f"{file}: rewards has a number that is not finite")
    if not found["mask"].any(axis=1).all():
        raise ConfigError(f"{file}: mask has a completion without a token")
    try:
        parts = {str(name): float(value) for name, value in json.loads(str(found["parts"])).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{file}: parts is not a JSON object of numbers") from None
    return Rollouts(
        Prompts(found["prompt"], found["prompt_valid"]),
        tree_of(Completions, found["completion"], found["mask"], found["logp"]),
        found["rewards"],
        parts,
        [],
    )


def save_trace(folder: Path, step: int, rolled: Rollouts, record: dict[str, Any], weights: Array) -> None:
    """Keep what a step did; ``rolled.trainer_logp`` must have been measured."""
    assert rolled.trainer_logp is not None
    losses, norms = (
        np.array([np.nan if v is None else v for v in record[k]], np.float64)
        for k in ("train/losses", "train/grad_norms")
    )
    live = np.asarray(rolled.trainer_logp)[np.asarray(rolled.completions.mask)]
    _write(_file(folder, "trace", step), losses=losses, grad_norms=norms, logp=live, weights=np.asarray(weights))


def load_traces(folder: Path) -> list[Trace]:
    """The steps of a run from its first on, as far as they were traced."""
    steps = range(1, steps_in(folder, "trace") + 1)
    return [Trace(**_read(_file(folder, "trace", step), _TRACE)) for step in steps]
