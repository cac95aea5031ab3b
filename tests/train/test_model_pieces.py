"""Pieces of the model, of sampling and of the loop: the form of attention, noise, times, the supervised start."""

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

from logitless.train import attention
from logitless.train.ab import _show, _steps_expected
from logitless.train.command import describe
from logitless.train.compare import disagreeing, free_runs, over_seeds
from logitless.train.config import ConfigError, TrainConfig, load
from logitless.train.data import DataError, Problem, gsm8k
from logitless.train.model import model_pass
from logitless.train.random_rollouts import random_rollouts
from logitless.train.rollout import Sampling, sample
from logitless.train.task import Task
from logitless.train.tokenizer import CharTokenizer
from logitless.train.trainer import Trainer
from logitless.train.warm_start import examples
from train_micro import MICRO, micro_params


def config(*overrides: str) -> TrainConfig:
    return load(None, list(overrides))


@pytest.mark.parametrize("length, blocks", [(63, 0), (256, 0), (257, 0), (320, 2), (509, 0), (510, 2), (512, 2)])
def test_long_rows_attend_in_blocks_of_queries(length: int, blocks: int) -> None:
    """In the fewest equal ones of at most 256; in one where blocks would be shorter than 64."""
    shape = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
    jaxpr = jax.make_jaxpr(attention.causal_attention)(shape, shape, shape)
    assert [e.params["length"] for e in jaxpr.eqns if e.primitive.name == "scan"] == [blocks] * bool(blocks)


@pytest.mark.parametrize(
    "dtype, width, version, served",
    [
        (jnp.bfloat16, 128, "cuda 13", True),
        (jnp.float16, 64, "cuda 13", True),
        (jnp.float32, 128, "cuda 13", False),
        (jnp.bfloat16, 136, "cuda 13", False),
        (jnp.bfloat16, 100, "cuda 13", False),
        (jnp.bfloat16, 128, "rocm 7", False),
    ],
)
def test_cudnn_serves_small_heads_of_16_bits(
    dtype: Any, width: int, version: str, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = jax.ShapeDtypeStruct((1, 4, 2, width), dtype)
    assert not attention._cudnn_serves(q)  # type: ignore[arg-type]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.extend.backend, "get_backend", lambda: SimpleNamespace(platform_version=version))
    assert attention._cudnn_serves(q) == served  # type: ignore[arg-type]


@pytest.mark.parametrize("top_p, want", [(1.0, [0.5, 0.3, 0.15, 0.05]), (0.6, [0.625, 0.375, 0.0, 0.0])])
def test_tokens_are_drawn_as_often_as_they_are_probable(top_p: float, want: list[float]) -> None:
    """At temperature 2 of logits that are twice as large."""
    n = 20_000
    z = 2 * jnp.tile(jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05])), (n, 1))
    s = Sampling(max_new=1, temperature=2.0, top_p=top_p, group_size=1, eos_ids=(), pad_id=0)
    token, _ = jax.jit(lambda z: sample(z, jax.random.split(jax.random.key(0), n), s))(z)
    np.testing.assert_allclose(np.bincount(token, minlength=4) / n, want, atol=0.012)


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
    c = config("data.limit=6", "warm_start.wrong_fraction=0.25", "warm_start.batch=400")
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
    c = config("rollout.kind=random", "warm_start.steps=0", "rollout.max_completion_tokens=50", "train.group_size=4")
    got = random_rollouts(c, 100, 1)
    lengths = np.asarray(got.completions.mask).sum(axis=1)
    assert got.prompts.valid.all() and got.prompts.tokens.shape == (256, 6) and got.prompts.tokens.max() >= 90
    assert lengths.min() >= 1 and lengths.max() <= 50 and 15 < np.median(lengths) < 26
    assert (np.asarray(got.completions.tokens)[~np.asarray(got.completions.mask)] == 0).all()
    short = random_rollouts(config("rollout.kind=random", "warm_start.steps=0"), 100, 1).completions.mask
    assert set(np.asarray(short).sum(axis=1)) == {1, 2, 3}
    groups = got.rewards.reshape(-1, 4)
    assert (groups[2::3] == 1).all() and 0.3 < groups[0::3].mean() < 0.7 and 0.3 < groups[1::3].mean() < 0.7
    np.testing.assert_array_equal(got.prompts.tokens[0], got.prompts.tokens[3])
    again, other = (random_rollouts(c, 100, step) for step in (1, 2))
    np.testing.assert_array_equal(again.completions.tokens, got.completions.tokens)
    np.testing.assert_array_equal(again.rewards, got.rewards)
    assert np.any(other.completions.tokens != got.completions.tokens)


@pytest.mark.parametrize(
    "overrides, steps",
    [
        (["train.steps=9"], 9),
        (["train.steps=9", "ab.replay_steps=4"], 9),
        (["train.steps=9", "rollout.replay=x"], 9),
        (["train.steps=9", "rollout.replay=x", "ab.replay_steps=4"], 4),
        (["train.steps=9", "rollout.replay=x", "ab.replay_steps=12"], 9),
    ],
)
def test_steps_that_an_arm_is_expected_to_take(overrides: list[str], steps: int) -> None:
    assert _steps_expected(config(*overrides)) == steps


def test_arms_that_disagree_are_named() -> None:
    def of(*verdicts: bool | None) -> dict[str, Any]:
        names = [f"arm{i}" for i in range(len(verdicts))]
        agreement = {n: {"agree": v} for n, v in zip(names, verdicts, strict=True)}
        return {"arms": dict.fromkeys(["baseline", *names]), "agreement": agreement}

    assert disagreeing(of(True, False, None)) == ["arm1"]
    two = {"arms": dict.fromkeys(["baseline", "kernel"]), "agreement": {"agree": False}}
    assert disagreeing(two) == ["kernel"]


def test_a_kl_of_nothing_has_next_to_no_tolerance() -> None:
    """A share of next to nothing would be none at all; a share of one would hide everything."""

    def run(kl: float) -> list[dict[str, Any]]:
        return [{"train/loss": 0.0, "train/kl": kl} for _ in range(4)]

    c = config("ab.kl_tolerance=0.5", "ab.control=true")
    limits = [free_runs(c, run(kl), run(kl), run(kl))["kl_limit"] for kl in (0.0, 1e-6, 2.0, -2.0)]
    assert limits == [5e-5, 5e-5, 1.0, 1.0]


def test_a_split_has_one_of_two_names() -> None:
    with pytest.raises(DataError, match="split is 'training', expected one of train, test"):
        gsm8k("nowhere", "training")
    with pytest.raises(ValueError, match="zip"):
        Task(config(), None, None, None, [], []).rewards(["1", "2"], [Problem("1+1=", "2")])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"train.steps: 0"):
        config("train.steps=0")


@pytest.mark.parametrize("remat", [False, True])
def test_layers_are_computed_again_where_that_is_asked_for(remat: bool) -> None:
    ids = jnp.ones((1, 3), int)
    parts = model_pass(MICRO, ids, jnp.arange(3)[None], ids > 0)
    jaxpr = jax.make_jaxpr(lambda p: parts.hidden(p, None, remat))(micro_params(0))
    assert ("remat" in str(jaxpr) or "checkpoint" in str(jaxpr)) == remat


def test_a_curve_that_no_seed_has_measured_is_not_judged() -> None:
    pairs = [([{"train/loss": 0.0, "train/reward": i}],) * 2 for i in (0.25, 0.5)]
    found = over_seeds(config("ab.seeds=2"), pairs)
    assert found["reward_agree"] and not any(key.startswith("kl") for key in found)


def test_the_line_of_the_arms_that_run(tmp_path: Path) -> None:
    """The slowest says what is left; one without a step says its last words."""
    arms = {name: config(f"run_dir={tmp_path / name}", "train.steps=10") for name in ("a", "b", "c", "d")}
    for name, done, pace in (("a", 4, 2.0), ("b", 8, 60.0)):
        (tmp_path / name).mkdir()
        record = {"train/loss": 0.5, "train/reward": 0.25, "time/train/step_avg_last10_s": pace}
        (tmp_path / name / "metrics.jsonl").write_text((json.dumps(record) + "\n") * done + '{"train/loss": 3')
    (tmp_path / "c.log").write_text("one\n loading \n\n")
    at: list[tuple[int, str]] = []
    progress: Any = SimpleNamespace(at=lambda done, text: at.append((done, text)))
    a, b = (f"reward 0.250  loss 0.5000  {pace} s/step" for pace in ("2.00", "60.00"))
    assert _show(arms, ["a", "b", "c", "d"], progress, 7) == f"{at[0][1]}  about 2 min left"
    assert at == [(7, f"a 4/10  {a}, b 8/10  {b}, c: loading, d: starting")]
    assert _show(arms, ["a"], progress, 0).endswith("about 12 s left")
    assert _show(arms, ["d"], progress, 0) == "d: starting"


def test_a_summary_for_the_terminal() -> None:
    known = {"train/reward_first10": 0.25, "train/reward_last10": 0.5, "eval/first": None, "eval/last": 1}
    summary = {"name": "tiny", "steps": 7, "time/train/step_avg_last10_s": 1.5, **known}
    assert describe(summary, "runs/tiny").splitlines() == [
        "tiny: 7 steps, 1.500 s a step",
        "  sampled reward: first 10 steps 0.250, last 10 0.500",
        "  held-out reward - -> 1.000",
        "  records in runs/tiny",
    ]
