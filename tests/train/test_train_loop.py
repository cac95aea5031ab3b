"""Rollouts, updates and whole runs of the trainer."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import CHILD_ENVIRONMENT
from interpreted import by_numpy, in_numpy
from logitless.lab import cli
from logitless.objectives.loss import metric_values
from logitless.train import loop
from logitless.train.architectures import PRESETS
from logitless.train.config import load, objective_of
from logitless.train.rollout import Sampling, generate, nucleus
from logitless.train.run_records import ended
from logitless.train.task import build_task, pad_left
from logitless.train.trainer import Trainer
from logitless.train.update import Batch, Policy, State, make_optimizer, make_score, make_update
from logitless.train.warm_start import warm_start
from train_micro import MICRO, micro, micro_params, trainer_of  # noqa: F401

PARAMS = micro_params(1)
EOS, PAD = 14, 15
PROMPTS = [[1, 2, 3], [4], [5, 6]]


def sampled(width: int = 4, rows: Any = slice(None), first: int = 0, **options: Any) -> Any:
    """Completions of ``PROMPTS`` padded to ``width``."""
    settings: dict[str, Any] = dict(max_new=6, temperature=0.7, top_p=1.0, group_size=2, eos_ids=(EOS,), pad_id=PAD)
    prompts = pad_left(PROMPTS[rows], width, PAD)
    s = Sampling(**{**settings, **options})
    run = functools.partial(generate, config=MICRO, sampling=s)
    return by_numpy(run, PARAMS, None, prompts.tokens, prompts.valid, jax.random.key(5), first)


def batch_of(done: Any, width: int = 4, group_size: int = 2) -> Batch:
    prompts = pad_left(PROMPTS, width, PAD).repeat(group_size)
    rows = len(prompts.tokens)
    advantages = np.linspace(-1, 1, rows, dtype=np.float32)
    return Batch(prompts.tokens, prompts.valid, done.tokens, done.mask, advantages)  # type: ignore[arg-type]


SETTINGS = ["train.prompts_per_step=3", "train.group_size=2", "rollout.temperature=0.7"]


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_rollout_log_probabilities_are_the_trainers(top_p: float) -> None:
    done = sampled(top_p=top_p)
    c = load(None, SETTINGS)
    old = in_numpy(make_score(c, MICRO, objective_of(c)))(PARAMS, None, batch_of(done))
    assert bool(jnp.any(done.mask[:, 3])) and float(jnp.min(done.logp)) < -1.0
    np.testing.assert_allclose(done.logp, old, atol=1e-4, rtol=0)


def test_padding_and_neighbours_do_not_change_a_completion() -> None:
    plain = sampled()
    other = sampled(width=9, rows=slice(1, 3), first=2)
    skip = plain.tokens.shape[0] - other.tokens.shape[0]
    assert skip == 2
    np.testing.assert_array_equal(plain.tokens[skip:], other.tokens)
    np.testing.assert_array_equal(plain.mask[skip:], other.mask)
    np.testing.assert_allclose(plain.logp[skip:], other.logp, atol=1e-5)
    c = load(None, SETTINGS)
    score = in_numpy(make_score(c, MICRO, objective_of(c)))
    np.testing.assert_allclose(
        score(PARAMS, None, batch_of(plain)), score(PARAMS, None, batch_of(plain, width=9)), atol=1e-5
    )


def test_a_row_ends_at_its_end_token_and_the_loop_when_all_rows_have() -> None:
    done = sampled(max_new=6)
    tokens, mask = np.asarray(done.tokens), np.asarray(done.mask)
    for row, live in zip(tokens, mask, strict=True):
        end = np.flatnonzero(row == EOS)
        length = end[0] + 1 if len(end) else len(row)
        assert live.sum() == length and live[:length].all() and (row[length:] == PAD).all()
    # Each of several end tokens ends a row.
    other = int(next(row[0] for row in tokens if row[0] != EOS and row.tolist().count(row[0]) == 1))
    both = sampled(max_new=6, eos_ids=(EOS, other))
    for row, live, plain in zip(both.tokens, both.mask, tokens, strict=True):
        end = np.flatnonzero(np.isin(plain, (EOS, other)))
        length = end[0] + 1 if len(end) else len(plain)
        assert live.sum() == length and (row[:length] == plain[:length]).all()
    assert both.mask.sum() < mask.sum()
    found = ended(np.asarray(both.tokens), np.asarray(both.mask), (EOS, other))
    assert found[tokens[:, 0] == other].all()
    # A shorter budget cuts, and changes nothing before.
    for budget in (1, 2):
        cut = sampled(max_new=budget)
        np.testing.assert_array_equal(cut.tokens, tokens[:, :budget])
        np.testing.assert_array_equal(cut.mask, mask[:, :budget])
        np.testing.assert_allclose(cut.logp, done.logp[:, :budget], atol=1e-5)
    # Every token ends a row: 200,000 steps would take minutes, one takes none.
    short = sampled(max_new=200_000, eos_ids=tuple(range(16)))
    assert np.asarray(short.mask).sum(axis=1).tolist() == [1] * 6


def test_greedy_takes_the_best_and_the_nucleus_the_best_few() -> None:
    first = sampled(temperature=0.0, group_size=1, max_new=1)
    prompts = pad_left(PROMPTS, 4, PAD)
    c = load(None, ["train.prompts_per_step=3"])
    score = in_numpy(make_score(c, MICRO, objective_of(c)))
    every = np.stack(
        [
            score(
                PARAMS,
                None,
                Batch(prompts.tokens, prompts.valid, jnp.full((3, 1), v), jnp.ones((3, 1), bool), jnp.zeros(3)),  # type: ignore[arg-type]
            )[:, 0]
            for v in range(16)
        ]
    )
    np.testing.assert_array_equal(first.tokens[:, 0], np.argmax(every, axis=0))
    logp = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]]))
    # The token with which the mass reaches top_p is the last one that is kept.
    for top_p, count in ((0.01, 1), (0.45, 1), (0.55, 2), (0.75, 2), (0.85, 3), (0.94, 3), (0.96, 4), (0.999, 4)):
        kept = np.isfinite(nucleus(logp, top_p)).tolist()
        assert kept[0] == [i < count for i in range(4)] and kept[1] == kept[0][::-1], top_p


@functools.cache
def update_of(*overrides: str) -> tuple[Any, Any]:
    c = load(None, [*SETTINGS, *overrides])
    optimizer = make_optimizer(c)
    return in_numpy(make_update(c, MICRO, objective_of(c), optimizer)), optimizer


def updated(batch: Batch, *overrides: str) -> tuple[State, dict[str, Any]]:
    update, optimizer = update_of(*overrides)
    trained = Policy(PARAMS, None)
    return update(State(trained, optimizer.init(trained)), Policy(None, None), batch)


GRPO = "{aggregation: grpo, entropy_coef: 0.01}"


@pytest.mark.parametrize("objective", [GRPO, pytest.param("{aggregation: dapo}", marks=pytest.mark.slow)])
def test_micro_batches_add_up_to_one_batch(objective: str) -> None:
    batch = batch_of(sampled())
    batch = batch.with_logp(old_logp=sampled().logp + 0.1 * (np.arange(36).reshape(6, 6) % 5 - 2))
    one, a = updated(batch, f"train.objective={objective}")
    three, b = updated(batch, f"train.objective={objective}", "train.microbatch=2")
    assert abs(float(a["loss"])) > 1e-3
    np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)
    np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=1e-5)
    for x, y in zip(jax.tree.leaves(one.optimizer), jax.tree.leaves(three.optimizer), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-7)
    for name in a["metrics"]:
        np.testing.assert_allclose(a["metrics"][name].sum, b["metrics"][name].sum, rtol=1e-4, atol=1e-6)


BONUS = "{aggregation: dapo, entropy_coef: 0.3}"
CASES = {
    "top_entropy": ["train.objective={aggregation: grpo, entropy_coef: 0.3, top_entropy: 0.2}"],
    "whole": [f"train.objective={BONUS}"],
    "micro-batches": [f"train.objective={BONUS}", "train.microbatch=2"],
}


@pytest.mark.parametrize("case", CASES)
def test_the_entropy_bonus_is_its_coefficient_times_the_mean_on_record(case: str) -> None:
    """Of the tokens that it acts on: with ``top_entropy`` a fifth of the live ones."""
    done = sampled()
    batch = batch_of(done).with_logp(old_logp=done.logp)
    _, info = updated(batch, *CASES[case])
    values = metric_values(info["metrics"])
    assert values["bonus_entropy"] > 0.5
    expected = values["policy_loss"] - 0.3 * values["bonus_entropy"]
    np.testing.assert_allclose(info["loss"], expected, rtol=1e-5)
    live = int(done.mask.sum())
    counted = int(info["metrics"]["bonus_entropy"].count)
    assert counted < live // 3 if case == "top_entropy" else counted == live


@pytest.mark.parametrize("preset", ["trl", "mllm-jax"])
def test_what_the_policy_drew_is_on_policy(preset: str) -> None:
    """Wherever the temperature divides: the ratio is 1 to the bit, and so is the weight of a correction but for
    rounding."""
    settings = [f"train.preset={preset}", "train.objective={correction: token, correction_max: 3.0}"]
    c = load(None, [*SETTINGS, *settings])
    done = sampled(temperature_on=objective_of(c).temperature_on)
    assert np.all(done.tokens == sampled().tokens)
    batch = batch_of(done).with_logp(rollout_logp=done.logp)
    old = in_numpy(make_score(c, MICRO, objective_of(c)))(PARAMS, None, batch)
    np.testing.assert_allclose(done.logp, old, atol=1e-4)
    for given in (None, old):
        _, info = updated(batch.with_logp(old_logp=given), *settings)
        values = metric_values(info["metrics"])
        assert values["ratio_min"] == values["ratio_max"] == 1.0
        assert values["correction_weight"] == pytest.approx(1.0, abs=1e-4)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    done = sampled()
    batch = batch_of(done).with_logp(old_logp=jnp.full_like(done.logp, jnp.nan))
    state, info = updated(batch, f"train.objective={GRPO}")
    assert not bool(info["finite"])
    fresh = make_optimizer(load(None)).init(Policy(PARAMS, None))
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves((PARAMS, fresh)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_first_update_is_on_policy_to_the_bit_and_the_second_is_not(micro: list[str]) -> None:
    trainer, state, frozen = trainer_of([*micro, "train.inner_epochs=2", "train.kl_beta=0.05"])
    trainer.compile(state, frozen)
    infos: list[Any] = []
    right = trainer.update_program

    def spy(*args: Any) -> Any:
        out = right(*args)
        infos.append(out[1])
        return out

    trainer.update_program = spy  # type: ignore[assignment]
    trainer._compile_seconds = lambda: 0.0  # type: ignore[method-assign]
    state, record, _ = trainer.step(state, frozen, 1)
    first, second = (i["metrics"] for i in infos)
    assert float(first["ratio_min"].sum) == float(first["ratio_max"].sum) == 1.0 == record["train/ratio_first"]
    assert float(second["ratio_min"].sum) < 1.0 < float(second["ratio_max"].sum)
    # The reference policy is the initial one: no distance at the first update, some at the second.
    assert abs(float(first["kl_k3"].sum)) < 1e-6 < record["train/kl"]
    assert record["rollout/logp_gap_max"] < 1e-4
    # And it stays that: the policy before the second step is another one.
    trainer.step(state, frozen, 2)
    assert float(infos[2]["metrics"]["kl_k3"].sum) > 1e-5


def test_all_programs_are_compiled_before_step_1_and_evaluation_has_its_own_time(
    micro: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # 9 problems, 8 at a time: two calls of one program.
    trainer, state, frozen = trainer_of([*micro, "eval.every=1", "eval.problems=9"], Trainer)
    trainer.compile(state, frozen)
    compiled = trainer._compile_seconds()
    begin = time.perf_counter()
    record, rolled = trainer.evaluate(state, frozen)
    assert 0 < record["time/eval_s"] <= time.perf_counter() - begin
    assert len(rolled.texts) == 9
    # The only update of a step is on policy: its own log-probabilities are the old ones.
    monkeypatch.setattr(trainer, "_score", lambda *_: pytest.fail("scored"))
    trainer.step(state, frozen, 1)
    assert trainer._compile_seconds() == compiled


def test_lora_trains_the_low_rank_maps_alone(micro: list[str]) -> None:
    trainer, state, frozen = trainer_of([*micro, "model.lora.rank=2"])
    assert state.trained.params is None
    before = jax.tree.map(np.asarray, (state.trained.lora, frozen.params))
    state, record, _ = trainer.step(state, frozen, 1)
    assert record["train/grad_norm"] > 0
    changed = [np.any(a != b) for a, b in zip(jax.tree.leaves(before[0]), jax.tree.leaves(state.trained), strict=True)]
    assert any(changed)
    for a, b in zip(jax.tree.leaves(before[1]), jax.tree.leaves(frozen.params), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.long
@pytest.mark.parametrize("shape", ["one layer", pytest.param("as shipped", marks=pytest.mark.slow)])
def test_the_tiny_run_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """The shipped task with fewer completions a step: the reward rises, and what is on record is what happened.

    One layer learns the sums of numbers below five in a tenth of the work.
    """
    if shape == "one layer":
        sizes = dict(hidden_size=64, intermediate_size=128, num_layers=1, num_heads=2, num_kv_heads=2)
        monkeypatch.setitem(PRESETS, "tiny", dataclasses.replace(PRESETS["tiny"], **sizes))
        size = ["data.limit=5", "train.steps=20", "warm_start.steps=60"]
        rates = ["train.learning_rate=3e-3", "warm_start.learning_rate=3e-3"]
    else:
        size = ["train.steps=30", "warm_start.steps=150"]
        rates = ["train.learning_rate=1e-3", "warm_start.learning_rate=5e-4"]
    small = [
        *size,
        *rates,
        "train.prompts_per_step=16",
        "train.inner_epochs=1",
        "train.kl_report=false",
        "train.loss.backend=chunked",
        f"warm_start.cache={tmp_path}",
        "checkpoint.every=0",
        "eval.every=0",
        f"run_dir={tmp_path / 'run'}",
    ]
    c, said = load(None, small), []
    summary = loop.run(c, say=said.append)
    assert summary["loss_backend"] == "chunked" and sum("supervised" in s for s in said) == 1
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [r["train/reward"] for r in records]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1
    assert {r["train/skipped"] for r in records} == {0}
    last = records[-1]
    mean = np.mean([r["time/train/step_s"] for r in records[-10:]])
    assert last["time/train/step_avg_last10_s"] == pytest.approx(mean)
    for key in ("time/rollout_s", "time/reward_s", "time/score_s", "time/update_s", "train/entropy"):
        assert last[key] >= 0
    assert 0 < last["train/live_token_share"] <= 1 and summary["memory/update_temporaries_bytes"] > 0
    # Another arm of an A/B finds this one's warm start, to the bit; another configuration does not take it.
    task = build_task(c)
    like = task.load_params()
    found = [warm_start(c, task, like, tmp_path, pytest.fail) for _ in range(2)]
    for a, b in zip(*(jax.tree.leaves(f) for f in found), strict=True):
        np.testing.assert_array_equal(a, b)
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(like), strict=True))
    warm_start(load(None, [*small, "warm_start.steps=1"]), task, like, tmp_path, said.append)
    assert any("is of another configuration" in s for s in said)


@pytest.mark.long
def test_ab_runs_both_arms_in_processes_of_their_own(
    tmp_path: Path, micro: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in CHILD_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    # Random completions: the first run, and a second baseline alone.
    settings = [*micro, "train.steps=2", "checkpoint.every=0", "ab.parallel=true", "rollout.kind=random"]
    settings.append(f"run_dir={tmp_path / 'ab'}")
    code, told = cli.main(["ab", *settings]), capsys.readouterr()
    assert code == 0, told.err
    for words in ("the arms agree (decided by replay)", "baseline (reference)", "kernel (chunked)"):
        assert words in told.out
    result = json.loads((tmp_path / "ab" / "ab.json").read_text())
    assert result["kind"] == "ab" and set(result["arms"]) == {"baseline", "kernel"}
    for arm in result["arms"].values():
        assert [r["step"] for r in arm["metrics"]] == [1, 2]
        # The arms ran at the same time: no time of theirs is in the comparison.
        assert not [k for k in (*arm["summary"], *arm["metrics"][0]) if k.startswith(("time/", "throughput/"))]
    own = json.loads((tmp_path / "ab" / "kernel" / "summary.json").read_text())
    assert own["time/train/step_avg_last10_s"] > 0
    assert result["ratios"]["step_time"] is None and "times: not compared" in told.out
    assert result["agreement"]["agree"] and result["agreement"]["decided_by"] == "replay"
    assert cli.main(["ab", *settings]) == 2
    assert "holds an A/B already" in capsys.readouterr().err


def test_a_mesh_gives_the_numbers_of_one_device(micro: list[str]) -> None:
    """Two steps over data x fsdp x tensor = 2 x 2 x 2 virtual devices."""
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 (virtual) devices")
    losses = []
    for mesh in ([], ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"]):
        trainer, state, frozen = trainer_of([*micro, *mesh])
        steps = []
        for step in (1, 2):
            state, record, _ = trainer.step(state, frozen, step)
            steps.append((record["train/loss"], record["train/grad_norm"], record["train/reward"]))
        losses.append(steps)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4, atol=1e-6)
