"""Pieces of a run one by one: its folder, what is recorded of it, layouts, rewards, and an outside sampler's answer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from logitless.objectives.loss import Metric
from logitless.objectives.objective import Objective
from logitless.train import attention, folder, recorded, train_mesh
from logitless.train.ab_text import curve, table
from logitless.train.config import ConfigError, TrainConfig, load, save
from logitless.train.data import Problem
from logitless.train.loop import Run, steps_of
from logitless.train.packed import _nothing, _of_the_whole
from logitless.train.reward import RewardError, load_reward
from logitless.train.rollout import Completions, Sampling
from logitless.train.run_records import Rollouts
from logitless.train.sampler import Request, Sample, sampled
from logitless.train.task import Prompts, Task


def config(**changes: Any) -> TrainConfig:
    return load(None, [f"{key.replace('__', '.')}={value}" for key, value in changes.items()])


# -- the folder ------------------------------------------------------------------------------------------------------


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


# -- what is recorded ------------------------------------------------------------------------------------------------


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
    return Run(c, trainer, tmp_path, None, print, steps=7)  # type: ignore[arg-type]


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


def test_a_curve_is_the_mean_of_every_few_steps() -> None:
    def metrics(scale: float, kl: float | None) -> list[dict[str, Any]]:
        return [{"train/loss": 0.0, "train/reward": scale * i, "train/kl": kl} for i in range(5)]

    result = {"arms": {"one": {"metrics": [{"step": 0}, *metrics(1.0, None)]}, "two": {"metrics": metrics(2.0, 0.25)}}}
    assert curve(result, width=2).splitlines() == [
        "sampled reward, mean of every 2 steps:",
        "  one         0.500  2.500  4.000",
        "  two         1.000  5.000  8.000",
        "KL, mean of every 2 steps:",
        "  two          0.2500   0.2500   0.2500",
    ]


# -- layouts, rewards, metrics of what was skipped -------------------------------------------------------------------


def test_micro_batches_lie_in_rows_over_the_mesh() -> None:
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2, 1), train_mesh.AXES)
    tree = {"slots": np.zeros((3, 4, 5)), "count": np.int32(2), "mask": np.zeros((4, 5))}
    placed = train_mesh.place_micro_batches(tree, mesh)
    specs = {k: x.sharding.spec for k, x in placed.items()}
    assert specs == {"slots": PartitionSpec(None, ("data", "fsdp")), "count": PartitionSpec(), "mask": PartitionSpec()}
    rows = train_mesh.place_rows({"a": np.zeros((8, 3)), "b": np.zeros((6, 3))}, mesh)
    assert {k: x.sharding.spec for k, x in rows.items()} == {"a": train_mesh.ROWS, "b": PartitionSpec()}
    alone = train_mesh.place_micro_batches(tree, None)
    assert all(len(x.sharding.device_set) == 1 for x in alone.values())


@pytest.mark.parametrize("name, axes", [("embed", ("tensor", "fsdp")), ("up", ("fsdp", "tensor")), ("q_bias", ())])
def test_a_weight_s_layout(name: str, axes: tuple[str, ...]) -> None:
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(1, 2, 2), train_mesh.AXES)
    path = (jax.tree_util.DictKey(name),)
    assert train_mesh.weight_spec(path, (6, 4), mesh) == PartitionSpec(*axes)
    stacked = PartitionSpec(None, *axes) if axes else PartitionSpec()
    assert train_mesh.weight_spec(path, (3, 6, 4), mesh) == stacked
    assert train_mesh.weight_spec(path, (6, 5), mesh) == (PartitionSpec(axes[0], None) if axes else PartitionSpec())
    assert train_mesh.weight_spec(path, (4,), mesh) == PartitionSpec()


def test_a_reward_is_the_weighted_sum_of_its_parts() -> None:
    problems = [Problem("1+1=", "2"), Problem("1+1=", "2"), Problem("1+1=", "2")]
    texts = ["#### 2", "2", "#### 3"]
    task = Task(config(reward__weight=2.0, reward__format_weight=0.5), None, None, None, [], [])  # type: ignore[arg-type]
    total, parts = task.rewards(texts, problems)
    assert total.tolist() == [2.5, 2.0, 0.5] and total.dtype == np.float32
    assert parts == {"answer": pytest.approx(2 / 3), "format": pytest.approx(2 / 3)}
    plain, only = Task(config(), None, None, None, [], []).rewards(texts, problems)  # type: ignore[arg-type]
    assert plain.tolist() == [1.0, 1.0, 0.0] and only == {"answer": pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    "level, metrics, more", [("token", "trl", 3), ("sequence", "trl", 2), ("sequence", "liger", 3)]
)
def test_metrics_of_skipped_sequences_are_those_of_tokens_that_nothing_happened_to(
    level: Any, metrics: Any, more: int
) -> None:
    """Two of four sequences were skipped: three tokens, unclipped, without a gradient."""
    mask = jnp.array([[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]], bool)
    rows: Any = SimpleNamespace(tokens=np.zeros((3, 1, 4)), segment_ids=jnp.array([[[1, 1, 2, 0]]] * 3))
    learned = jnp.array([False, True, False, True])
    batch: Any = SimpleNamespace(mask=mask, rows=rows, learned=learned, learning=jnp.int32(2))
    names = ("clip_fraction", "zero_gradient_tokens", "clip_fraction_min", "clip_fraction_max", "entropy")
    given = {k: Metric(jnp.float32(0.5), jnp.float32(2)) for k in names}
    c = config(train__packing="sequences", train__microbatch=64, train__skip_rows=True)
    got = jax.tree.map(float, _of_the_whole(c, Objective(level=level, clip_metrics=metrics), batch, given))
    assert got["zero_gradient_tokens"] == (3.5, 5.0) and got["entropy"] == (0.5, 2.0)
    assert got["clip_fraction"] == (0.5, 2.0 + more)
    assert got["clip_fraction_min"] == (0.0, 4.0) and got["clip_fraction_max"] == (0.5, 4.0)
    assert got["live_token_share"] == (6.0, 12.0) and got["update_rows"] == (2.0, 4.0)
    assert got["packed_fill"] == (6.0, 8.0)
    reported = dataclasses.replace(c, train=dataclasses.replace(c.train, report_skipped=True))
    same = jax.tree.map(float, _of_the_whole(reported, Objective(level=level), batch, given))
    assert all(same[k] == (0.5, 2.0) for k in names)


@pytest.mark.parametrize("name, extreme", [("x_min", np.inf), ("x_max", -np.inf), ("minimum", 0.0)])
def test_a_metric_that_nothing_went_into(name: str, extreme: float) -> None:
    assert _nothing(name).sum == extreme and _nothing(name).count == 0


@pytest.mark.parametrize("length", [6, 7])
def test_cudnn_is_handed_packed_rows_of_an_even_length(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that also names what comes later: none of it is seen."""
    rng = np.random.default_rng(length)
    q, k, v = (jnp.asarray(rng.standard_normal((2, length, n, 8)), jnp.float32) for n in (4, 2, 2))
    mask = jnp.asarray(rng.random((2, length, length)) < 0.5) | jnp.eye(length, dtype=bool)
    expected = attention.masked_attention(q, k, v, mask, "xla")
    plain = jax.nn.dot_product_attention

    def cudnn(q: jax.Array, *args: Any, implementation: str, is_causal: bool, mask: jax.Array) -> Any:
        even = 2 * ((length + 1) // 2)
        assert q.shape[1] == even and mask.shape == (2, 1, even, even) and is_causal and implementation == "cudnn"
        return plain(q, *args, mask=mask, is_causal=True)

    monkeypatch.setattr(jax.nn, "dot_product_attention", cudnn)
    np.testing.assert_allclose(attention.masked_attention(q, k, v, mask, "cudnn"), expected, atol=4e-6, rtol=0)


# -- a sampler from outside ------------------------------------------------------------------------------------------


def test_what_an_outside_sampler_is_asked_and_how_its_answer_is_laid_out() -> None:
    asked: list[Request] = []

    class Outside:
        def sample(self, request: Request) -> list[Sample]:
            asked.append(request)
            return [Sample([3, 9], [-0.5, None]), Sample([4, 5, 6], [-1.0, -2.0, -3.0]), *[Sample([9], [-0.25])] * 2]

    prompts = Prompts(np.array([[0, 1, 2], [0, 0, 7]]), np.array([[0, 1, 1], [0, 0, 1]], bool))
    s = Sampling(max_new=3, temperature=0.7, top_p=0.9, group_size=2, eos_ids=(9,), pad_id=8)
    done = sampled(Outside(), prompts, s, 11, 10)  # type: ignore[arg-type]
    assert asked == [Request([[1, 2], [7]], 2, 3, 0.7, 0.9, (9,), 11)]
    assert np.asarray(done.tokens).tolist() == [[3, 9, 8], [4, 5, 6], [9, 8, 8], [9, 8, 8]]
    assert np.asarray(done.mask).sum(axis=1).tolist() == [2, 3, 1, 1]
    np.testing.assert_array_equal(done.logp, [[-0.5, np.nan, 0], [-1, -2, -3], [-0.25, 0, 0], [-0.25, 0, 0]])


@pytest.mark.parametrize(
    "value, taken", [("1e9", True), ("-1e9", True), ("2e9", False), ("-2e9", False), ("-inf", False)]
)
def test_a_reward_of_either_sign_is_bounded(value: str, taken: bool, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"def reward(completion, problem):\n    return float('{value}')\n")
    reward = load_reward(f"{tmp_path / 'own.py'}:reward")
    if taken:
        assert reward("2", Problem("1+1=", "2")) == float(value)
        return
    with pytest.raises(RewardError, match="expected a finite number of at most"):
        reward("2", Problem("1+1=", "2"))


def test_the_table_of_two_arms() -> None:
    """A number that one arm alone has is a dash in the other; bytes are MiB; what neither has has no row."""
    test = {"agree": None, "decided_by": "nothing", "test": "t", "first_difference": 3, "verdict": "v"}
    summaries = {
        "baseline": {
            "loss_backend": "reference", "train/reward_first10": 0.25, "eval/last": 0.5, "train/kl_last10": 0.01,
            "memory/update_temporaries_bytes": 3 * 2**20, "memory/device_peak_bytes": 2**30,
            "time/update_s/last10": 0.5,
        },
        "kernel": {
            "loss_backend": "chunked", "train/reward_first10": 0.5, "train/kl_last10": 0.02,
            "memory/update_temporaries_bytes": 2**20, "memory/device_peak_bytes": 2**29, "time/update_s/last10": 0.25,
        },
    }  # fmt: skip
    result = {
        "name": "tiny",
        "parallel": True,
        "arms": {name: {"summary": summary} for name, summary in summaries.items()},
        "agreement": test,
    }
    lines = table(result).splitlines()
    assert [line.split() for line in lines[:7]] == [
        ["tiny", "baseline", "(reference)", "kernel", "(chunked)", "ratio"],
        ["sampled", "reward,", "first", "10", "steps", "0.250", "0.500", "2.000"],
        ["held-out", "reward", "at", "the", "end", "0.500", "-"],
        ["KL,", "last", "10", "steps", "0.0100", "0.0200", "2.000"],
        ["update", "phase,", "last", "10", "(s)", "0.500", "0.250", "0.500"],
        ["update's", "temporaries", "(MiB)", "3.0", "1.0", "0.333"],
        ["device", "peak", "(MiB)", "1,024.0", "512.0", "0.500"],
    ]
    assert lines[0].index("(reference)") + len("(reference)") == lines[1].index("0.250") + len("0.250")
    assert lines[7:] == [
        "times: not compared, for the arms ran at the same time (ab.parallel)",
        "kernel against baseline: test: t",
        "  free runs: other tokens from step 3 on",
        "kernel against baseline: v",
        "NOT JUDGED: see above",
    ]
