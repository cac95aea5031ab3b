"""Each setting of the trainer does what its name says. Fakes stand in where nothing need be compiled."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless.objectives.loss import Metric
from logitless.train import folder as folders
from logitless.train import loop, trainer
from logitless.train.collect import random_rollouts
from logitless.train.compare import ratios
from logitless.train.config import load
from logitless.train.data import Problem
from logitless.train.rollout import Completions
from logitless.train.run_records import Rollouts
from logitless.train.task import Prompts, Task
from logitless.train.tokenizer import CharTokenizer
from logitless.train.trainer import Trainer
from logitless.train.update import Batch, Policy, State, learning_rate, make_optimizer
from logitless.train.warm_start import examples
from train_micro import MICRO, kept_programs, micro, micro_params, trainer_of  # noqa: F401

pytestmark = pytest.mark.usefixtures("kept_programs")


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


def test_a_phase_s_times_add_up_without_what_was_compiled() -> None:
    compiled = iter([0.0, 0.0, 1.0, 1.0, 1.0, 1001.0])
    trainer: Any = SimpleNamespace(times={}, _compile_seconds=lambda: next(compiled))
    for _ in range(2):
        with Trainer.timed(trainer, "update"):
            time.sleep(0.02)
    assert 0.04 <= trainer.times["update"] < 0.5
    with Trainer.timed(trainer, "update"):  # it compiled for a thousand seconds, which are another number
        pass
    assert trainer.times["update"] < -900


def test_a_supervised_batch_has_right_and_wrong_sums() -> None:
    """Wrong answers are sums that the limit allows: from 0 to twice the largest number."""
    c = load(None, ["data.limit=6", "warm_start.wrong_fraction=0.25", "warm_start.batch=400"])
    problems = [Problem("1+2=", "3"), Problem("2+2=", "4")]
    task = Task(c, MICRO, None, CharTokenizer(), problems, [])  # type: ignore[arg-type]
    batch = examples(c, task, 0)
    answers = [int(task.tokenizer.decode(row)) for row in np.asarray(batch.completion)]  # type: ignore[union-attr]
    rights = np.where(np.asarray(batch.prompt)[:, -4] == 1, 3, 4)
    wrong = np.array(answers)[answers != rights]
    assert 0.17 < len(wrong) / 400 < 0.33 and set(wrong) | {3, 4} == set(range(11))
    assert (np.asarray(batch.mask).sum(axis=1) == [len(str(a)) + 1 for a in answers]).all()
    ends = np.asarray(batch.completion)[np.arange(400), np.asarray(batch.mask).sum(axis=1) - 1]
    assert (ends == task.tokenizer.eos_id).all()  # type: ignore[union-attr]
    again, other = examples(c, task, 0), examples(c, task, 1)
    assert (np.asarray(again.completion) == batch.completion).all()
    assert (np.asarray(other.completion) != batch.completion).any()


def test_random_rollouts_look_like_those_of_a_step() -> None:
    c = load(
        None, ["rollout.kind=random", "warm_start.steps=0", "rollout.max_completion_tokens=50", "train.group_size=4"]
    )
    got = random_rollouts(c, 100, 1)
    lengths = np.asarray(got.completions.mask).sum(axis=1)
    assert got.prompts.valid.all() and got.prompts.tokens.shape == (256, 6) and got.prompts.tokens.max() >= 90
    assert lengths.min() >= 1 and lengths.max() <= 50 and 15 < np.median(lengths) < 26
    assert (np.asarray(got.completions.tokens)[~np.asarray(got.completions.mask)] == 0).all()
    short = random_rollouts(load(None, ["rollout.kind=random", "warm_start.steps=0"]), 100, 1).completions.mask
    assert set(np.asarray(short).sum(axis=1)) == {1, 2, 3}
    groups = got.rewards.reshape(-1, 4)
    assert (groups[2::3] == 1).all() and 0.3 < groups[0::3].mean() < 0.7 and 0.3 < groups[1::3].mean() < 0.7
    np.testing.assert_array_equal(got.prompts.tokens[0], got.prompts.tokens[3])
    again, other = (random_rollouts(c, 100, step) for step in (1, 2))
    np.testing.assert_array_equal(again.completions.tokens, got.completions.tokens)
    np.testing.assert_array_equal(again.rewards, got.rewards)
    assert np.any(other.completions.tokens != got.completions.tokens)


def test_rewards_are_of_as_many_texts_as_problems() -> None:
    with pytest.raises(ValueError, match="zip"):
        Task(load(None), None, None, None, [], []).rewards(["1", "2"], [Problem("1+1=", "2")])  # type: ignore[arg-type]


def test_a_reward_is_the_weighted_sum_of_its_parts() -> None:
    problems = [Problem("1+1=", "2"), Problem("1+1=", "2"), Problem("1+1=", "2")]
    texts = ["#### 2", "2", "#### 3"]
    task = Task(load(None, ["reward.weight=2.0", "reward.format_weight=0.5"]), None, None, None, [], [])  # type: ignore[arg-type]
    total, parts = task.rewards(texts, problems)
    assert total.tolist() == [2.5, 2.0, 0.5] and total.dtype == np.float32
    assert parts == {"answer": pytest.approx(2 / 3), "format": pytest.approx(2 / 3)}
    plain, only = Task(load(None), None, None, None, [], []).rewards(texts, problems)  # type: ignore[arg-type]
    assert plain.tolist() == [1.0, 1.0, 0.0] and only == {"answer": pytest.approx(2 / 3)}
