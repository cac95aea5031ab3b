"""Completions: the nucleus and the top k, a sampler from outside, draws anew, overlong shaping, recorded ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless.lab import cli
from logitless.train import loop, recorded
from logitless.train.config import ConfigError, load
from logitless.train.reward import overlong_penalty
from logitless.train.rollout import Sampling, nucleus, sample, sample_of_top_k
from logitless.train.sampler import Request, Sample, SamplerError, sampled
from logitless.train.task import Prompts, pad_left
from train_micro import kept_programs, micro, trainer_of  # noqa: F401

pytestmark = pytest.mark.usefixtures("kept_programs")

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
    a, b = (t.rollouts(state, frozen, 1) for t in (plain, shaped))
    n = np.asarray(b.completions.mask).sum(axis=1)
    np.testing.assert_allclose(b.rewards, a.rewards + overlong_penalty(n, 3, 2, 0.5))
    assert b.parts["overlong"] == pytest.approx(np.mean(b.rewards - a.rewards)) and b.parts["overlong"] < 0


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
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_00000001.npz").write_bytes(b"PK")
    settings = [*micro, f"rollout.replay={tmp_path}", f"run_dir={tmp_path / 'run'}"]
    assert cli.main(["train", *settings]) == 2
    said = capsys.readouterr().err
    assert "step_00000001.npz: not readable as a recorded step" in said and "Traceback" not in said


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


@pytest.mark.parametrize("top_p, want", [(1.0, [0.5, 0.3, 0.15, 0.05]), (0.6, [0.625, 0.375, 0.0, 0.0])])
def test_tokens_are_drawn_as_often_as_they_are_probable(top_p: float, want: list[float]) -> None:
    """At temperature 2 of logits that are twice as large."""
    n = 20_000
    z = 2 * jnp.tile(jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05])), (n, 1))
    s = Sampling(max_new=1, temperature=2.0, top_p=top_p, group_size=1, eos_ids=(), pad_id=0)
    token, _ = jax.jit(lambda z: sample(z, jax.random.split(jax.random.key(0), n), s))(z)
    np.testing.assert_allclose(np.bincount(token, minlength=4) / n, want, atol=0.012)


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


def settings(**options: Any) -> Sampling:
    given = dict(max_new=1, temperature=0.7, top_p=0.8, group_size=1, eos_ids=(), pad_id=0, top_k=5)
    return Sampling(**{**given, **options})


@pytest.mark.parametrize("on", ["logits", "logp"])
def test_tokens_are_drawn_from_the_support_that_is_kept(on: str) -> None:
    """The nucleus of the five likeliest ids, the log-probability over it, and the frequencies that it says."""
    logits = np.random.default_rng(0).standard_normal(40).astype(np.float32) * 2
    rows = 4000
    keys = jax.random.split(jax.random.key(1), rows)
    s = settings(temperature_on=on)
    token, logp, support = jax.jit(lambda z, k: sample_of_top_k(z, k, s))(jnp.tile(logits, (rows, 1)), keys)
    order = np.argsort(-logits)[:5]
    p = np.exp(logits[order] / 0.7)
    p /= p.sum()
    kept = int(np.sum(np.cumsum(p) - p < 0.8))
    assert 1 < kept < 5
    assert support[0].tolist() == [*order[:kept].tolist(), *[-1] * (5 - kept)]
    assert set(np.unique(token)) == set(order[:kept].tolist())
    share = p[:kept] / p[:kept].sum()
    found = np.array([np.mean(np.asarray(token) == i) for i in order[:kept]])
    assert np.abs(found - share).max() < 4 * np.sqrt(0.25 / rows)
    if on == "logits":
        want = dict(zip(order[:kept].tolist(), np.log(share), strict=True))
    else:
        q = np.exp(logits[order[:kept]])
        want = dict(zip(order[:kept].tolist(), np.log(q / q.sum()) / 0.7, strict=True))
    np.testing.assert_allclose(logp, [want[int(t)] for t in token], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("packing", [[], ["train.packing=shared", "train.microbatch=2"]], ids=["padded", "packed"])
def test_the_on_policy_ratio_is_one(micro: list[str], packing: list[str]) -> None:
    """At top_p = 0.8 the sampler's log-probability is the trainer's to 1e-5, and the first ratio is exactly one."""
    cut = ["rollout.top_p=0.8", "rollout.top_k=6", "rollout.temperature=0.9", "train.inner_epochs=2", *packing]
    corrected = "train.objective={aggregation: dapo, correction: token, correction_max: 3.0}"
    trainer, state, frozen = trainer_of([*micro, *cut, corrected])
    state, record, rolled = trainer.step(state, frozen, 1)
    support, mask = np.asarray(rolled.completions.support), np.asarray(rolled.completions.mask)
    assert support.shape == (*mask.shape, 6) and (support[~mask] == -1).all()
    assert (support == rolled.completions.tokens[..., None]).any(-1)[mask].all()
    assert ((support >= 0).sum(-1)[mask] < 6).any() and (np.asarray(rolled.completions.logp)[mask] <= 0).all()
    assert record["rollout/logp_gap_max"] < 1e-5
    assert abs(record["train/correction_weight"] - 1) < 1e-5
    assert record["train/ratio_first"] == 1.0 and np.isfinite(record["train/loss"])


def test_without_top_k_nothing_is_kept(micro: list[str]) -> None:
    trainer, state, frozen = trainer_of([*micro, "rollout.top_p=0.8"])
    assert trainer.step(state, frozen, 1)[2].completions.support is None


def test_a_sampler_hands_its_support_over() -> None:
    prompts, s = pad_left([[1, 2], [3]], 4, 0), settings(max_new=3, top_k=2)
    good = [Sample([1, 2], [0.0, -1.0], [[1], [2, 5]]), Sample([3], [-2.0])]
    found = sampled(Returns(good), prompts, s, 0, vocab=16)
    assert np.asarray(found.support)[0].tolist() == [[1, -1], [2, 5], [-1, -1]]
    assert (np.asarray(found.support)[1] == -1).all()
    for support, message in {
        ((1, 2, 3),): "token 0: its support has 3 ids, expected at most 2",
        ((2,),): "token 0: its support lacks the token 1, or has ids outside",
        ((1,), (2,)): "token 1: its support has no token",
    }.items():
        bad = [Sample([1], [0.0], [list(x) for x in support]), Sample([3], [0.0])]
        with pytest.raises(SamplerError, match=message):
            sampled(Returns(bad), prompts, s, 0, vocab=16)


@pytest.mark.parametrize("other", ["rollout.record=1", "rollout.kind=random", "train.loss.backend=naive"])
def test_what_cannot_keep_a_support_is_refused(micro: list[str], other: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.top_k: 4 keeps the ids of every token"):
        load(None, [*micro, "rollout.top_k=4", other])
