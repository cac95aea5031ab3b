"""A model of a few thousand parameters and a reward without a task, for tests of the trainer; no tests here."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from conftest import CHILD_ENVIRONMENT, COMPILED
from hub_folder import save_safetensors
from logitless.train.config import load
from logitless.train.model import ModelConfig, Params, init
from logitless.train.task import build_task
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


def trainer_of(settings: list[str]) -> tuple[Trainer, State, Policy]:
    """A trainer with its state and frozen part at step 0."""
    config = load(None, settings)
    task = build_task(config)
    trainer = Trainer(config, task)
    return trainer, *trainer.initial(task.load_params())


@pytest.fixture(scope="session")
def micro(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of the micro run."""
    return micro_settings(tmp_path_factory.mktemp("micro"))


@pytest.fixture(scope="session")
def compile_cache() -> Path:
    """The folder of compiled programs: runs of the same shape, here and in processes of their own, compile once."""
    return COMPILED


def logitless(cache: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    env = {**os.environ, **CHILD_ENVIRONMENT, "JAX_COMPILATION_CACHE_DIR": str(cache), **environment}
    command = [sys.executable, "-m", "logitless", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)
