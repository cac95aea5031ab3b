"""Each setting of the trainer does what its name says. Fakes stand in where nothing need be compiled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless.objectives.loss import Metric
from logitless.train import folder as folders
from logitless.train import loop, trainer
from logitless.train.compare import ratios
from logitless.train.config import load
from logitless.train.rollout import Completions
from logitless.train.run_records import Rollouts
from logitless.train.task import Prompts
from logitless.train.update import Batch, Policy, State, learning_rate, make_optimizer
from train_micro import compile_cache, micro, trainer_of  # noqa: F401

pytestmark = pytest.mark.usefixtures("compile_cache")


class FakeUpdate:
    """In place of the compiled update: remembers its batches and changes nothing."""

    compile_s = 0.0

    def __init__(self) -> None:
        self.seen: list[Batch] = []

    def __call__(self, state: State, base: Policy, part: Batch) -> tuple[State, dict[str, Any]]:
        self.seen.append(part)
        one = Metric(jnp.float32(1.0), jnp.float32(1.0))
        info = dict(loss=jnp.float32(0.0), grad_norm=jnp.float32(1.0), finite=jnp.bool_(True), metrics={"ratio": one})
        return state, info


def rollouts(rewards: Any, width: int = 3) -> Rollouts:
    n = len(rewards)
    tokens = np.arange(n * width, dtype=np.int32).reshape(n, width) % 14
    done = Completions(tokens, np.ones((n, width), bool), np.zeros((n, width), np.float32))  # type: ignore[arg-type]
    prompts = Prompts(np.zeros((n, 6), np.int32), np.ones((n, 6), bool))
    return Rollouts(prompts, done, np.asarray(rewards, np.float32), {}, [])


# -- optimiser --------------------------------------------------------------------------------------------------------


def test_the_schedule_counts_steps_and_not_the_updates_inside_one() -> None:
    c = load(None, ["train.inner_epochs=3", "train.minibatches=2", "train.warmup_steps=4", "train.learning_rate=1"])
    rate = learning_rate(c)
    per_step = [[float(rate(step * 6 + i)) for i in range(6)] for step in range(6)]
    np.testing.assert_allclose(per_step, np.repeat([[0.25], [0.5], [0.75], [1.0], [1.0], [1.0]], 6, axis=1))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]), ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447])],
)
def test_schedules_begin_after_the_warm_up(schedule: str, expected: list[float]) -> None:
    settings = ["train.inner_epochs=1", "train.warmup_steps=2", "train.steps=6", "train.learning_rate=1"]
    rate = learning_rate(load(None, [*settings, f"train.schedule={schedule}"]))
    np.testing.assert_allclose([float(rate(i)) for i in range(6)], expected, rtol=1e-5)


def test_without_a_warm_up_the_first_step_has_the_whole_rate() -> None:
    assert float(learning_rate(load(None, ["train.warmup_steps=0", "train.learning_rate=0.5"]))(0)) == 0.5


def test_the_norm_is_clipped_before_the_moments() -> None:
    gradient = {"w": jnp.full(4, 10.0)}  # norm 20
    for clip, norm in ((2.0, 2.0), (50.0, 20.0)):
        optimizer = make_optimizer(load(None, [f"train.clip_norm={clip}", "train.adam_b1=0.9"]))
        _, state = optimizer.update(gradient, optimizer.init(gradient), gradient)
        moments = [x for x in jax.tree.leaves(state) if x.shape == (4,)]
        np.testing.assert_allclose(jnp.linalg.norm(moments[0]), 0.1 * norm, rtol=1e-5)


def test_weight_decay_pulls_weights_without_a_gradient() -> None:
    weights = {"w": jnp.array([2.0, -4.0])}
    for decay in (0.0, 0.1):
        settings = [f"train.weight_decay={decay}", "train.learning_rate=0.5", "train.warmup_steps=0"]
        optimizer = make_optimizer(load(None, settings))
        steps, _ = optimizer.update({"w": jnp.zeros(2)}, optimizer.init(weights), weights)
        np.testing.assert_allclose(steps["w"], -0.5 * decay * weights["w"], atol=1e-7)


# -- a step -----------------------------------------------------------------------------------------------------------


def test_every_minibatch_has_rows_of_its_own(micro: list[str]) -> None:
    made, state, frozen = trainer_of([*micro, "train.minibatches=2", "train.inner_epochs=2"])
    made.update_program = fake = FakeUpdate()  # type: ignore[assignment]
    tokens = np.arange(24, dtype=np.int32).reshape(8, 3)
    batch = Batch(tokens, tokens > -1, tokens, tokens > -1, np.arange(8.0))  # type: ignore[arg-type]
    old = np.arange(24.0).reshape(8, 3)
    made._updates(state, frozen, batch, old)
    assert [b.advantages.tolist() for b in fake.seen] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    for i, part in enumerate(fake.seen):
        rows = slice(0, 4) if i % 2 == 0 else slice(4, 8)
        np.testing.assert_array_equal(part.completion, tokens[rows])
        if i:  # the very first update is on-policy
            np.testing.assert_array_equal(part.old_logp, old[rows])
    assert fake.seen[0].old_logp is None


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("none", [0.75, -0.25, -0.25, -0.25, 0.0, 0.0, 0.0, 0.0]),
        ("group", [0.75 / 0.75, -0.25 / 0.75, -0.25 / 0.75, -0.25 / 0.75, 0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_advantages_follow_their_scale_and_eps(micro: list[str], scale: str, expected: list[float]) -> None:
    """Of the group 1, 0, 0, 0 the standard deviation is 0.5 (of a sample); with an eps of 0.25 it divides by 0.75."""
    made, state, frozen = trainer_of([*micro, f"train.advantage_scale={scale}", "train.advantage_eps=0.25"])
    made.update_program = fake = FakeUpdate()  # type: ignore[assignment]
    made.rollouts = lambda *_: rollouts([1, 0, 0, 0, 1, 1, 1, 1])  # type: ignore[method-assign]
    made.step(state, frozen, 1)
    np.testing.assert_allclose(fake.seen[0].advantages, expected, rtol=1e-5)


def test_a_step_has_noise_of_its_own(micro: list[str]) -> None:
    made, state, frozen = trainer_of(micro)
    problems = made.task.problems(0, 1, 2)
    made.task.problems = lambda *_: problems  # type: ignore[method-assign]
    one, again, two = (made.rollouts(state, frozen, step).completions.tokens for step in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert np.any(np.asarray(one) != np.asarray(two))


def test_a_ratio_is_the_other_arm_over_the_baseline() -> None:
    a = {
        "time/train/step_avg_last10_s": 4.0,
        "time/update_s/last10": 2.0,
        "memory/update_temporaries_bytes": 100,
        "memory/device_peak_bytes": 0,
    }
    b = {"time/train/step_avg_last10_s": 1.0, "time/update_s/last10": 1.0, "memory/device_peak_bytes": 7}
    expected = {"step_time": 0.25, "update_time": 0.5, "temporaries": None, "device_peak": None}
    assert ratios(a, b) == expected


# -- going on ---------------------------------------------------------------------------------------------------------


def test_a_longer_run_goes_on_after_its_checkpoint_with_its_count_of_skipped_steps(
    tmp_path: Path, micro: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, bad = trainer.group_advantages, [2, 4]
    now = {"step": 0}

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        now["step"] += 1
        out = right(*args, **kwargs)
        return out * jnp.nan if now["step"] in bad else out

    monkeypatch.setattr(trainer, "group_advantages", poisoned)
    settings = [*micro, f"run_dir={tmp_path / 'run'}", "checkpoint.every=1", "train.max_skipped=2"]
    loop.run(load(None, [*settings, "train.steps=2"]), say=print)
    # What a kill may leave: records of a step that no checkpoint has.
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (tmp_path / "run" / name).open("a") as file:
            file.write(json.dumps({"step": 3, "train/loss": 99.0}) + "\n")
    loop.run(load(None, [*settings, "train.steps=3"]), resume=True, say=print)
    records = folders.read_records(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in records] == [1, 2, 3] and records[2]["train/loss"] != 99.0
    assert [r["train/skipped"] for r in records] == [0, 1, 0]
    assert folders.read_records(tmp_path / "run" / "samples.jsonl") == []
    assert folders.load(tmp_path / "run" / "config.yaml").train.steps == 3
    # Step 4 is skipped and saved; with step 5 that makes two in a row, although each process saw one.
    loop.run(load(None, [*settings, "train.steps=4"]), resume=True, say=print)
    bad.append(5)
    with pytest.raises(loop.TrainingFailed, match="2 steps in a row"):
        loop.run(load(None, [*settings, "train.steps=5"]), resume=True, say=print)
