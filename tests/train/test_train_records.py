"""What a run leaves: its folder, records and numbers, recorded steps, samples."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from logitless.objectives.loss import Metric
from logitless.train import folder, recorded
from logitless.train.command import describe
from logitless.train.config import ConfigError, TrainConfig, load, save
from logitless.train.data import Problem
from logitless.train.loop import Run, steps_of
from logitless.train.rollout import Completions
from logitless.train.run_records import Rollouts, ended, json_number, run_numbers, step_record
from logitless.train.task import Prompts


@pytest.mark.parametrize("rows, widths", [(3, (4, 5)), (2, (5, 5)), (2, (4, 6))])
def test_recorded_rollouts_are_taken_by_the_shapes_that_recorded_them_alone(
    rows: int, widths: tuple[int, int], tmp_path: Path
) -> None:
    prompts = Prompts(np.ones((2, 4), np.int32), np.ones((2, 4), bool))
    done = Completions(np.ones((2, 5), np.int32), np.ones((2, 5), bool), np.zeros((2, 5), np.float32))  # type: ignore[arg-type]
    recorded.save_rollouts(tmp_path, 1, Rollouts(prompts, done, np.array([1.0, 0.0]), {"exact": 0.5}, []))
    same = recorded.load_rollouts(tmp_path, 1, 2, (4, 5), vocab=2)
    assert same.rewards.tolist() == [1.0, 0.0] and same.parts == {"exact": 0.5}
    with pytest.raises(ConfigError, match=r"rollout.replay: .*_00000001.npz has prompts and completions of \(2, 4\)"):
        recorded.load_rollouts(tmp_path, 1, rows, widths, vocab=2)
    with pytest.raises(ConfigError, match=r"token ids from 1 to 1, expected 0 to 0"):
        recorded.load_rollouts(tmp_path, 1, 2, (4, 5), vocab=1)


def test_a_step_s_record_by_hand() -> None:
    """Two groups of two, of which the second's rewards differ; the first row ends, the second is cut, two are empty."""
    tokens = np.array([[3, 9, 0], [3, 4, 5], [9, 0, 0], [0, 9, 9]], np.int32)
    mask = np.array([[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]], bool)
    done = Completions(tokens, mask, np.zeros((4, 3), np.float32))  # type: ignore[arg-type]
    rolled = Rollouts(Prompts(tokens, mask), done, np.array([1.0, 1.0, 0.0, 2.0]), {"form": 0.25}, [])

    def update(loss: float, norm: float, ratio: float, finite: bool) -> dict[str, Any]:
        metrics = {k: Metric(np.float32(2 * ratio), np.float32(2)) for k in ("ratio", "kl_k3", "entropy")}  # type: ignore[arg-type]
        return dict(loss=np.float32(loss), grad_norm=np.float32(norm), finite=finite, metrics=metrics)

    record = step_record(rolled, [update(0.5, 2.0, 1.0, True), update(1.5, 4.0, 3.0, False)], 2, (9,))
    assert record | {"train/loss": 1.0, "train/losses": [0.5, 1.5], "train/grad_norm": 3.0} == record
    assert record | {"train/grad_norms": [2.0, 4.0], "train/skipped": 1, "train/reward": 1.0} == record
    assert record | {"train/ratio_first": 1.0, "train/ratio": 3.0, "train/kl": 3.0, "train/entropy": 3.0} == record
    assert record | {"reward/mixed_groups": 0.5, "reward/form": 0.25, "rollout/length_mean": 1.5} == record
    assert record["reward/std"] == pytest.approx(0.5**0.5) and "train/ratio_squared" not in record
    assert record["rollout/truncated"] == 0.5
    assert ended(tokens, mask, (9,)).tolist() == [True, False, True, False]
    assert ended(tokens, mask, (5, 3)).tolist() == [False, True, False, False]


def test_a_run_s_numbers_by_hand() -> None:
    """Twelve steps: the first ten are 1 to 10, the last ten 3 to 12; evaluations are no steps."""
    steps: list[dict[str, Any]] = [
        {
            "step": i,
            "train/loss": 0.0,
            "train/reward": float(i),
            "train/skipped": i % 2,
            "train/kl": None if i == 12 else 2.0 * i,
            "train/left_out_mass_max": 0.5 if i == 1 else None if i == 2 else 0.25,
            "time/update_s": float(i),
            "time/train/step_avg_last10_s": float(i),
        }
        for i in range(1, 13)
    ]
    got = run_numbers([{"eval/reward": 0.25}, *steps, {"eval/reward": 0.75}])
    want = {"steps": 12, "train/reward_first10": 5.5, "train/reward_last10": 7.5, "eval/first": 0.25, "eval/last": 0.75}
    want |= {"train/skipped": 6, "train/kl_last10": 14.0, "train/left_out_mass_max": 0.5, "time/update_s/last10": 7.5}
    assert got == want | {"time/train/step_avg_last10_s": 12.0}
    nothing = run_numbers([])
    assert nothing["steps"] == 0 and nothing["eval/first"] is nothing["train/reward_first10"] is None


def test_a_record_holds_no_number_that_json_has_not() -> None:
    assert json_number([1.0, float("nan"), [float("inf")], 3, "x"]) == [1.0, None, [None], 3, "x"]


def test_a_summary_for_the_terminal() -> None:
    known = {"train/reward_first10": 0.25, "train/reward_last10": 0.5, "eval/first": None, "eval/last": 1}
    summary = {"name": "tiny", "steps": 7, "time/train/step_avg_last10_s": 1.5, **known}
    assert describe(summary, "runs/tiny").splitlines() == [
        "tiny: 7 steps, 1.500 s a step",
        "  sampled reward: first 10 steps 0.250, last 10 0.500",
        "  held-out reward - -> 1.000",
        "  records in runs/tiny",
    ]


def config(**changes: Any) -> TrainConfig:
    return load(None, [f"{key.replace('__', '.')}={value}" for key, value in changes.items()])


@pytest.mark.parametrize("records, summary, done", [(3, 3, True), (2, 3, False), (3, 2, False), (3, None, False)])
def test_a_run_is_finished_with_all_its_records_and_its_summary(
    records: int, summary: int | None, done: bool, tmp_path: Path
) -> None:
    c = config(run_dir=tmp_path)
    assert not folder.finished(c, 3)
    save(c, tmp_path / "config.yaml")
    lines = [{"step": 0, "eval/reward": 1.0}, *({"step": i + 1, "train/loss": 0.0} for i in range(records))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary is not None:
        (tmp_path / "summary.json").write_text(json.dumps({"name": "tiny", "steps": summary}))
    assert folder.finished(c, 3) == done


@pytest.mark.parametrize(
    "before, now, refused",
    [
        ({}, {}, ""),
        ({}, {"train__steps": 200}, ""),
        ({}, {"train__steps": 50}, "train.steps: 50, but the run in"),
        ({"train__schedule": "linear"}, {"train__schedule": "linear", "train__steps": 200}, "and its linear schedule"),
        ({}, {"seed": 1}, "seed: 1, but the run in"),
        ({}, {"train__loss__chunk_size": 8}, "train.loss.chunk_size: 8, but the run in"),
        ({}, {"checkpoint__keep": 5, "eval__every": 1}, ""),
    ],
)
def test_a_run_goes_on_with_its_own_configuration(
    before: dict[str, Any], now: dict[str, Any], refused: str, tmp_path: Path
) -> None:
    if not refused:
        folder.check_same(config(**before), config(**now), tmp_path)
        return
    with pytest.raises(ConfigError, match=refused):
        folder.check_same(config(**before), config(**now), tmp_path)


def rollouts(rewards: list[float], texts: list[str] | None = None) -> Rollouts:
    n = len(rewards)
    prompts = Prompts(np.ones((n, 2), np.int32), np.ones((n, 2), bool))
    done = Completions(np.ones((n, 3), np.int32), np.arange(3) < np.arange(1, n + 1)[:, None], np.zeros((n, 3)))  # type: ignore[arg-type]
    return Rollouts(prompts, done, np.array(rewards, np.float32), {"answer": 0.5}, texts or [])


def test_a_replay_ends_with_what_was_recorded(tmp_path: Path) -> None:
    replay = config(rollout__replay=tmp_path, train__steps=3)
    with pytest.raises(ConfigError, match="has no recorded rollouts"):
        steps_of(replay)
    for step, want in ((1, 1), (2, 2), (5, 2), (4, 2), (3, 3)):
        recorded.save_rollouts(tmp_path, step, rollouts([1.0, 0.0]))
        assert steps_of(replay) == want
    assert recorded.steps_in(tmp_path) == 5
    assert steps_of(config(train__steps=7)) == 7
    found = recorded.read_rollouts(tmp_path, 4)
    assert found.rewards.tolist() == [1.0, 0.0] and found.completions.mask.tolist() == [[1, 0, 0], [1, 1, 0]]


def test_a_trace_reads_back_as_it_was_written(tmp_path: Path) -> None:
    """Log-probabilities of the live tokens alone; a loss that is not finite is NaN."""
    rolled = dataclasses.replace(rollouts([1.0, 0.0]), trainer_logp=np.arange(6.0).reshape(2, 3))
    record = {"train/losses": [0.5, None], "train/grad_norms": [2.0, 3.0]}
    assert recorded.load_traces(tmp_path) == []
    recorded.save_trace(tmp_path, 1, rolled, record, jnp.array([5.0, 7.0]))
    (trace,) = recorded.load_traces(tmp_path)
    assert trace.logp.tolist() == [0.0, 3.0, 4.0] and trace.weights.tolist() == [5.0, 7.0]
    assert trace.losses[0] == 0.5 and np.isnan(trace.losses[1]) and trace.grad_norms.tolist() == [2.0, 3.0]


def test_a_sample_of_the_weights_walks_through_every_column() -> None:
    small = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.array([9], jnp.bfloat16)}
    taken = recorded.sample_weights(small)
    assert taken.tolist() == [0, 1, 2, 3, 4, 5, 9] and taken.dtype == jnp.float32
    large = jnp.tile(jnp.arange(64.0), (1024, 1))  # 4 * 16384 numbers: every fifth one
    taken = recorded.sample_weights({"a": large})
    assert taken.shape == (-(-large.size // 5),) and len(np.unique(taken)) == 64


def loop_of(c: TrainConfig, tmp_path: Path, held_out: list[Problem] | None = None) -> Run:
    trainer: Any = SimpleNamespace(task=SimpleNamespace(held_out=held_out or []))
    return Run(c, trainer, tmp_path, print, steps=7)


@pytest.mark.parametrize(
    "changes, steps",
    [({"eval__every": 3}, [0, 3, 6, 7]), ({"eval__every": 0}, []), ({"eval__every": 8}, [0, 7])],
)
def test_evaluations_are_at_the_beginning_every_few_steps_and_at_the_end(
    changes: dict[str, Any], steps: list[int], tmp_path: Path
) -> None:
    loop = loop_of(config(**changes), tmp_path)
    assert [step for step in range(8) if loop._evaluates(step)] == steps
    random = config(rollout__kind="random", warm_start__steps=0, **changes)
    assert not any(loop_of(random, tmp_path)._evaluates(step) for step in range(8))


def test_samples_are_added_to_their_file(tmp_path: Path) -> None:
    loop = loop_of(config(samples=2), tmp_path, [Problem("1+1=", "2"), Problem("2+3=", "5"), Problem("4+4=", "8")])
    for step in (0, 3):
        loop._write_samples(rollouts([1.0, 0.5, 0.0], ["2", "6", "8"]), step)
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert lines[:2] == [
        {"step": 0, "prompt": "1+1=", "answer": "2", "completion": "2", "reward": 1.0},
        {"step": 0, "prompt": "2+3=", "answer": "5", "completion": "6", "reward": 0.5},
    ]
    assert [line["step"] for line in lines] == [0, 0, 3, 3]
