"""Where completions come from: a sampler from outside, draws anew for groups without a spread, overlong shaping."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.lab import cli
from logitless.train import loop, recorded
from logitless.train.config import ConfigError, load
from logitless.train.reward import overlong_penalty
from logitless.train.rollout import Sampling
from logitless.train.sampler import Sample, SamplerError, sampled
from logitless.train.task import pad_left
from train_micro import compile_cache, micro, trainer_of  # noqa: F401

pytestmark = pytest.mark.usefixtures("compile_cache")

# A sampler that draws uniformly from the ten digits with the request's seed, and knows the odds.
FAKE = """
import math
import numpy as np
from logitless.train.sampler import Sample

class Fake:
    def __init__(self, config):
        self.config, self.synced = config, []

    def sync(self, params, model, step):
        self.synced.append((step, float(params["norm"].sum()), model.vocab_size))

    def sample(self, request):
        rng = np.random.default_rng(request.seed)
        out = []
        for _ in range(len(request.prompts) * request.group_size):
            n = int(rng.integers(1, request.max_new + 1))
            tokens = rng.integers(0, 10, n).tolist()
            logp = [math.log(0.1)] * n
            logp[0] = None if n > 1 else logp[0]   # not every engine knows all of them
            out.append(Sample(tokens, logp))
        return out
"""


def test_a_sampler_from_outside(tmp_path: Path, micro: list[str]) -> None:
    (tmp_path / "fake.py").write_text(FAKE)
    corrected = "train.objective={aggregation: dapo, correction: token, correction_max: 3.0}"
    own = [f"rollout.sampler={tmp_path / 'fake.py'}:Fake", corrected, "checkpoint.every=2", "train.steps=4"]
    folder = tmp_path / "run"
    loop.run(load(None, [*micro, *own, f"run_dir={folder}"]), say=lambda _: None)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 4 and len({r["rollout/tokens_crc32"] for r in records}) == 4
    assert any(r["train/grad_norm"] > 0 for r in records) and "time/sync_s" in records[0]
    assert all(0 < r["train/rollout_missing"] < 1 and r["train/correction_weight"] > 0 for r in records)
    # A run that was cut off draws the same again.
    loop.run(load(None, [*micro, *own, f"run_dir={tmp_path / 'cut'}", "train.steps=2"]), say=lambda _: None)
    loop.run(load(None, [*micro, *own, f"run_dir={tmp_path / 'cut'}"]), resume=True, say=lambda _: None)
    again = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert [r["train/loss"] for r in again] == [r["train/loss"] for r in records]


def test_the_sampler_gets_the_weights_of_its_step(tmp_path: Path, micro: list[str]) -> None:
    (tmp_path / "fake.py").write_text(FAKE)
    trainer, state, frozen = trainer_of([*micro, f"rollout.sampler={tmp_path / 'fake.py'}:Fake"])
    for step in (1, 2):
        state, _, rolled = trainer.step(state, frozen, step)
    (first, before, vocab), (second, after, _) = trainer.sampler.synced  # type: ignore[union-attr]
    assert (first, second, vocab) == (1, 2, 16) and before != after
    lengths = np.asarray(rolled.completions.mask).sum(axis=1)
    assert np.isnan(rolled.completions.logp[lengths > 1, 0]).all()


class Returns:
    def __init__(self, samples: list[Sample]):
        self.samples = samples

    def sync(self, *_: Any) -> None: ...

    def sample(self, request: Any) -> list[Sample]:
        return self.samples


@pytest.mark.parametrize(
    "bad, message",
    [
        ([], "0 completions, expected 2"),
        ([Sample([1], [0.0]), Sample([1, 2, 3, 4], [0.0] * 4)], "completion 1 has 4 tokens, expected 1 to 3"),
        ([Sample([1], [0.0]), Sample([], [])], "completion 1 has 0 tokens"),
        ([Sample([1, 2], [0.0]), Sample([1], [0.0])], "completion 0 has 2 tokens and 1 log-probabilities"),
        ([Sample([16], [0.0]), Sample([1], [0.0])], r"completion 0 has ids outside \[0, 16\)"),
        ([Sample([9, 1], [0.0, 0.0]), Sample([1], [0.0])], "completion 0 goes on after an end token"),
        ([Sample([1], [0.0]), Sample([8, 9], [0.0, 0.0])], "completion 1 goes on after an end token"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(bad: list[Sample], message: str) -> None:
    prompts, sampling = pad_left([[1, 2], [3]], 4, 0), Sampling(3, 1.0, 1.0, 1, (9, 8), 0)
    with pytest.raises(SamplerError, match=message):
        sampled(Returns(bad), prompts, sampling, 0, vocab=16)


def test_a_sampler_that_is_none_is_refused(tmp_path: Path, micro: list[str]) -> None:
    (tmp_path / "none.py").write_text("def make(config):\n    return object()\n")
    for spec, message in {
        f"{tmp_path / 'none.py'}:make": "made a object without sync and sample",
        f"{tmp_path / 'none.py'}:mak": "has no function 'mak'",
        "vllm": "expected 'package.module:function'",
        "no_such_module:make": "importing no_such_module failed",
    }.items():
        with pytest.raises(ConfigError, match=rf"rollout\.sampler: .*{message}"):
            trainer_of([*micro, f"rollout.sampler={spec}"])


def test_groups_without_a_spread_are_drawn_again(tmp_path: Path, micro: list[str]) -> None:
    """Rewards are those of the problem's answer: some groups are equal throughout, in every draw."""
    reward = "def score(text, problem):\n    return float(len(text) % 2) if int(problem.answer) % 2 else 1.0\n"
    (tmp_path / "odd.py").write_text(reward)
    settings = [*micro, "train.prompts_per_step=4", f"reward.kind={tmp_path / 'odd.py'}:score"]
    plain, state, frozen = trainer_of(settings)
    eager, *_ = trainer_of([*settings, "rollout.redraw=6"])
    eager.rollout_program = plain.rollout_program  # compiled once
    improved = 0
    for step in (1, 2, 3):
        first, more = (t.rollouts(state, frozen, step) for t in (plain, eager))
        groups, better = (r.rewards.reshape(-1, 4) for r in (first, more))
        had, has = (g.min(axis=1) != g.max(axis=1) for g in (groups, better))
        assert (has >= had).all()
        np.testing.assert_array_equal(better[had], groups[had])  # a good group keeps its place
        notes = more.notes
        assert notes["rollout/groups_replaced"] == (has & ~had).sum() and 1 <= notes["rollout/draws"] <= 7
        assert notes["reward/first_draw"] == pytest.approx(first.rewards.mean())
        again = eager.rollouts(state, frozen, step)
        np.testing.assert_array_equal(again.completions.tokens, more.completions.tokens)
        # Prompts, completions and texts moved together with the rewards.
        for i in np.flatnonzero(np.repeat(has & ~had, 4)):
            assert more.rewards[i] == float(len(more.texts[i]) % 2)
            assert more.texts[i] == eager.task.decode(more.completions)[i]
        improved += int((has & ~had).sum())
    assert improved > 0


def test_overlong_completions_lose_what_is_asked(tmp_path: Path, micro: list[str]) -> None:
    lengths = np.array([1, 80, 81, 90, 100, 101, 500])
    assert overlong_penalty(lengths, 100, 20, 0.5).tolist() == pytest.approx([0, 0, -0.025, -0.25, -0.5, -0.5, -0.5])
    plain, state, frozen = trainer_of(micro)
    shaped, *_ = trainer_of([*micro, "reward.overlong_buffer=2", "reward.overlong_penalty=0.5"])
    shaped.rollout_program = plain.rollout_program
    a, b = (t.rollouts(state, frozen, 1) for t in (plain, shaped))
    n = np.asarray(b.completions.mask).sum(axis=1)
    np.testing.assert_allclose(b.rewards, a.rewards + overlong_penalty(n, 3, 2, 0.5))
    assert b.parts["overlong"] == pytest.approx(np.mean(b.rewards - a.rewards)) and b.parts["overlong"] < 0
    with pytest.raises(ConfigError, match=r"rollout.redraw: 2 has no effect with rollout.kind random"):
        load(None, ["rollout.kind=random", "warm_start.steps=0", "rollout.redraw=2"])


def _arrays(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], object]:
    """A recorded step with what ``change`` makes of its arrays."""

    def damage(file: Path) -> None:
        arrays = dict(np.load(file))
        change(arrays)
        np.savez(file, **arrays)

    return damage


def _altered(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[data.index(b"rewards.npy") + 180] ^= 1  # in the array itself
    file.write_bytes(data)


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda f: f.write_bytes(f.read_bytes()[:-40]), "not readable as a recorded step"),
    "empty": (lambda f: f.write_bytes(b""), "not readable as a recorded step"),
    "one byte": (_altered, "not readable as a recorded step"),
    "no rewards": (_arrays(lambda a: a.pop("rewards")), "rewards"),
    "fewer rewards": (_arrays(lambda a: a.update(rewards=a["rewards"][1:])), r"rewards is float32\[7\]"),
    "a reward of NaN": (_arrays(lambda a: a.update(rewards=a["rewards"] * np.nan)), "rewards has a number"),
    "texts": (_arrays(lambda a: a.update(rewards=a["rewards"].astype(str))), "rewards is <U"),
    "one axis": (_arrays(lambda a: a.update(mask=a["mask"][0])), r"mask is bool\[3\]"),
    "no token": (_arrays(lambda a: a.update(mask=a["mask"] & False)), "mask has a completion without a token"),
    "parts": (_arrays(lambda a: a.update(parts=np.array("[1"))), "parts is not a JSON object"),
    "parts a list": (_arrays(lambda a: a.update(parts=np.array("[1]"))), "parts is not a JSON object"),
    "vocabulary": (_arrays(lambda a: a.update(completion=a["completion"] + 16)), "token ids from .* expected 0 to 15"),
    "negative": (_arrays(lambda a: a.update(prompt=a["prompt"] - 17)), "token ids from -1"),
    "fewer rows": (
        _arrays(lambda a: a.update({k: x[:4] for k, x in a.items() if x.ndim})),
        "prompts and completions of",
    ),
    "wider": (
        _arrays(
            lambda a: a.update(prompt=np.repeat(a["prompt"], 2, 1), prompt_valid=np.repeat(a["prompt_valid"], 2, 1))
        ),
        "the configuration of the run",
    ),
}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory, micro: list[str]) -> Path:
    """A run of one step with its completions on record."""
    folder = tmp_path_factory.mktemp("recording")
    trainer, state, frozen = trainer_of(micro)
    recorded.save_rollouts(folder, 1, trainer.rollouts(state, frozen, 1))
    return folder


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_recording_is_refused_by_its_file(recording: Path, tmp_path: Path, how: str) -> None:
    file = tmp_path / "rollouts" / "step_00000001.npz"
    file.parent.mkdir()
    file.write_bytes((recording / "rollouts" / "step_00000001.npz").read_bytes())

    def read() -> None:
        recorded.load_rollouts(tmp_path, 1, 8, (6, 3), 16)

    read()
    damage, message = DAMAGED[how]
    damage(file)
    with pytest.raises(ConfigError, match=message) as error:
        read()
    assert str(file) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.long
def test_a_replay_of_a_damaged_recording_exits_with_2(
    recording: Path, tmp_path: Path, micro: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As does one with other settings than those of the recording."""
    settings = [*micro, f"rollout.replay={recording}", "checkpoint.every=0"]
    for other in ("train.prompts_per_step=4", "rollout.max_completion_tokens=4", "rollout.max_prompt_tokens=7"):
        assert cli.main(["train", *settings, other, f"run_dir={tmp_path / 'other'}"]) == 2
        said = capsys.readouterr().err
        assert "step_00000001.npz has prompts and completions of" in said and "Traceback" not in said
        (tmp_path / "other" / "config.yaml").unlink()
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_00000001.npz").write_bytes(b"PK")
    settings = [*micro, f"rollout.replay={tmp_path}", f"run_dir={tmp_path / 'run'}"]
    assert cli.main(["train", *settings]) == 2
    said = capsys.readouterr().err
    assert "step_00000001.npz: not readable as a recorded step" in said and "Traceback" not in said
