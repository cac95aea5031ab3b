"""``rollout.top_k``: the sampler keeps the ids that it drew from, and log-probabilities and losses are over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless.train.config import ConfigError, load
from logitless.train.config_check import check
from logitless.train.rollout import Sampling, sample_of_top_k
from logitless.train.sampler import Sample, SamplerError, sampled
from logitless.train.task import pad_left
from test_train_draws import Returns
from train_micro import compile_cache, micro, trainer_of  # noqa: F401

pytestmark = pytest.mark.usefixtures("compile_cache")


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


@pytest.mark.parametrize(
    "other",
    ["rollout.record=1", "rollout.kind=random", "train.loss.backend=naive"],
)
def test_what_cannot_keep_a_support_is_refused(tmp_path: Path, micro: list[str], other: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.top_k: 4 keeps the ids of every token"):
        check(load(None, [*micro, "rollout.top_k=4", other]))
