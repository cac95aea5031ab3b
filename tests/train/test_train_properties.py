"""What training promises at the edges: nucleus, end tokens, penalties, recorded steps, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless.objectives.loss import Metric
from logitless.train import recorded
from logitless.train.config import ConfigError
from logitless.train.rollout import Completions, Sampling, nucleus, sample
from logitless.train.run_records import Rollouts, ended, json_number, run_numbers, step_record
from logitless.train.task import Prompts


def sampling(**options: Any) -> Sampling:
    return Sampling(**{**dict(max_new=6, temperature=1.0, top_p=1.0, group_size=1, eos_ids=(), pad_id=0), **options})


@pytest.mark.parametrize("top_p, kept", [(0.49, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 4)])
def test_a_nucleus_that_holds_the_mass_takes_no_further_token(top_p: float, kept: int) -> None:
    """Two tokens of an eighth are equal: neither is taken without the other."""
    logp = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]]))
    assert np.isfinite(nucleus(logp, top_p)).sum() == kept


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_token_of_the_nucleus_is_recorded_with_its_probability_in_the_whole_vocabulary(temperature: float) -> None:
    z = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]] * 2))
    token, logp = sample(
        z * temperature, jax.random.split(jax.random.key(0), 2), sampling(top_p=0.4, temperature=temperature)
    )
    assert token.tolist() == [0, 0]
    np.testing.assert_allclose(logp, np.log(0.5), rtol=1e-6)


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
