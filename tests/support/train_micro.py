"""A model of a few thousand parameters and a reward without a task, for tests of the trainer; no tests here."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from conftest import CHILD_ENVIRONMENT
from hub_folder import save_safetensors
from logitless.train import loop, turns
from logitless.train.compiled_functions import Program
from logitless.train.config import TrainConfig, load
from logitless.train.folder import _flat
from logitless.train.model import ModelConfig, Params, init
from logitless.train.task import Task, build_task
from logitless.train.trainer import Trainer
from logitless.train.update import Policy, State

MICRO = ModelConfig(16, 16, 32, 1, 2, 1, 8, max_position=4096)


@functools.cache
def micro_params(seed: int) -> Params:
    """Random weights, by one program in place of one for every array."""
    return jax.jit(init, static_argnums=0)(MICRO, jax.random.key(seed))


# Sevens are rewarded. KILL_AT=<step>:<signal> ends the process in the middle of that step.
REWARD = """
import os

calls = 0

def sevens(completion, problem):
    global calls
    calls += 1
    step, _, number = os.environ.get("KILL_AT", "0:0").partition(":")
    if (calls - 1) // 8 + int(os.environ.get("FIRST_STEP", "1")) == int(step) and (calls - 1) % 8 == 3:
        os.kill(os.getpid(), int(number))
    return completion.count("7") / 3
"""


def micro_settings(folder: Path) -> list[str]:
    """Overrides for a run of 8 completions a step whose weights and reward live in ``folder``."""
    if not (folder / "weights").exists():
        save_safetensors(folder / "weights", MICRO, micro_params(0))
        (folder / "sevens.py").write_text(REWARD)
    return [
        f"model.weights={folder / 'weights'}",
        "model.tokenizer=char",
        f"reward.kind={folder / 'sevens.py'}:sevens",
        "warm_start.steps=0",
        "train.prompts_per_step=2",
        "train.group_size=4",
        "train.inner_epochs=1",
        "train.kl_report=false",
        "train.learning_rate=1e-2",
        "train.warmup_steps=0",
        "train.steps=6",
        "eval.every=0",
        "checkpoint.every=2",
    ]


_KEPT: dict[str, dict[str, Any]] = {}
_NO_PART_OF_A_PROGRAM = (
    "name", "run_dir", "seed", "samples", "checkpoint", "eval.every", "ab", "wandb", "warm_start", "reward",
    "rollout.record", "rollout.replay", "train.steps", "train.max_skipped",
)  # fmt: skip


class Kept(Trainer):
    """A trainer with the programs of the first one whose settings compile to the same: most of a short run's time."""

    def __init__(self, config: TrainConfig, task: Task):
        super().__init__(config, task)
        assert config.train.schedule == "constant"  # else the steps are a part of the update
        settings = _flat(dataclasses.asdict(config)).items()
        key = repr([item for item in settings if not item[0].startswith(_NO_PART_OF_A_PROGRAM)])
        vars(self).update(_KEPT.setdefault(key, {k: v for k, v in vars(self).items() if isinstance(v, Program)}))


@pytest.fixture
def kept_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process keep their programs for other runs in it."""
    for module in (loop, turns):
        monkeypatch.setattr(module, "Trainer", Kept)


def trainer_of(settings: list[str], make: type[Trainer] = Kept) -> tuple[Trainer, State, Policy]:
    """A trainer with its state and frozen part at step 0."""
    config = load(None, settings)
    task = build_task(config)
    trainer = make(config, task)
    return trainer, *trainer.initial(task.load_params())


@pytest.fixture(scope="session")
def micro(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of the micro run."""
    return micro_settings(tmp_path_factory.mktemp("micro"))


def logitless(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    env = {**os.environ, **CHILD_ENVIRONMENT, **environment}
    command = [sys.executable, "-m", "logitless", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)
