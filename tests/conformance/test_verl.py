"""veRL's ``ppo_loss`` and ours from the same ``ActorConfig``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (make conformance)")
pytest.importorskip("verl", reason="veRL is not installed (make conformance)")

import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_rloo_outcome_advantage

import peer_verl
from logitless import Objective, group_advantages
from logitless.objectives.presets import GROUP_STD_EPS
from peer_batches import MASKS, WIDTH, Agreement, Batch, batch, by_oracle, disagreement

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
OWN_MEAN = ("sapo", "geo_mean")
"""Policy losses that are a mean over sequences whatever ``loss_agg_mode`` says."""
EPS = 5e-8
"""veRL adds 1e-8 to the length of a row."""
LIVE_MASKS = tuple(name for name in MASKS if name != "nothing")
CLIPPED = {"actor/pg_clipfrac": "clip_fraction", "actor/pg_clipfrac_lower": "clip_fraction_dual"}


def compare(
    record: Any, settings: dict[str, Any], names: dict[str, str] | None = None, batches: Any = None, **given: Any
) -> None:
    config = peer_verl.config(**settings)
    objective = Objective.from_verl(config, max_length=WIDTH)
    agreement = Agreement(record, "veRL", ", ".join(f"{k}={v!r}" for k, v in settings.items()), tolerance=EPS)
    more: dict[str, Any] = {}
    if "weights" in given:
        more["token_weights"] = given["weights"]
    if "tokens" in given:
        length = objective.max_length if objective.aggregation == "dr_grpo" else 1
        rows = given["rows"] * length
        more["denominator"] = float(given["tokens"] if objective.aggregation == "bnpo" else rows)
        more["entropy_denominator"] = float(given["tokens"])
    for b in batches or [batch(mask) for mask in LIVE_MASKS]:
        agreement.check(objective, b, peer_verl.loss(config, b, **given), names, **more)
    agreement.done()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mode", ["vanilla", "gspo", "cispo", "gpg"])
def test_every_mode_and_aggregation(mode: str, aggregation: str, record_property: Any) -> None:
    names = CLIPPED if mode == "vanilla" else {"actor/pg_clipfrac": "clip_fraction"} if mode == "gspo" else {}
    compare(record_property, {"loss_mode": mode, "loss_agg_mode": aggregation}, names)


@pytest.mark.parametrize("mode", OWN_MEAN)
def test_modes_with_a_mean_of_their_own(mode: str, record_property: Any) -> None:
    compare(record_property, {"loss_mode": mode})


@pytest.mark.parametrize("kind", ["kl", "k1", "mse", "k2", "low_var_kl", "k3", "low_var_kl+", "k3+", "mse+"])
def test_every_kl(kind: str, record_property: Any) -> None:
    """Among others with ``d = 3``, whose k3 of 16 is clamped to 10."""
    b = batch("ragged")
    far = b.replace(ref=b.ref.copy())
    far.ref[0, :2] = far.logp[0, :2] + [3.0, -25.0]
    settings = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": kind}
    batches = [*(batch(mask) for mask in LIVE_MASKS), far]
    compare(record_property, settings, {"kl_loss": "kl_loss"}, batches)
    compare(record_property, dict(settings, loss_mode="sapo", loss_agg_mode="seq-mean-token-mean"), None, batches)


OPTIONS: list[dict[str, Any]] = [
    {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5},
    {"clip_ratio": 0.3, "clip_ratio_low": None, "clip_ratio_high": None},
    {"entropy_coeff": 0.05},
    {"loss_mode": "sapo", "tau_pos": 0.8, "tau_neg": 2.0},
    {"loss_mode": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean"},
    {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 9},
]


@pytest.mark.parametrize("settings", OPTIONS, ids=lambda o: ",".join(o))
def test_options(settings: dict[str, Any], record_property: Any) -> None:
    vanilla = "loss_mode" not in settings
    compare(record_property, settings, CLIPPED if vanilla else None)


@pytest.mark.parametrize("mode", ["vanilla", "gspo", "cispo", "gpg", "sapo"])
def test_weights_and_counts_of_a_larger_batch(mode: str, record_property: Any) -> None:
    """``rollout_is_weights`` are ``token_weights``; the global counts are ``denominator``."""
    for aggregation in AGGREGATIONS if mode != "sapo" else AGGREGATIONS[1:2]:
        settings = {"loss_mode": mode, "loss_agg_mode": aggregation}
        compare(record_property, settings, None, weights=batch().weights, tokens=40, rows=8)


def likely(mask: str) -> Batch:
    """Old log-probabilities that are some: DPPO compares probabilities."""
    b = batch(mask)
    return b.replace(old=np.minimum(b.old, -0.01))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mode", ["dppo_tv", "dppo_kl"])
def test_dppo(mode: str, aggregation: str, record_property: Any) -> None:
    """With the cap of 3 that ``ActorConfig`` has, with the paper's 20, and with one that most ratios exceed."""
    batches = [likely(mask) for mask in LIVE_MASKS]
    names = {"actor/pg_clipfrac": "clip_fraction"}
    tight = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1} if mode == "dppo_tv" else {"clip_ratio": 0.01}
    tight |= {} if mode == "dppo_tv" else {"clip_ratio_low": 0.02, "clip_ratio_high": 0.01}
    for own in ({}, {"clip_ratio_c": 20.0}, {"clip_ratio_c": 0.7, **tight}):
        compare(record_property, {"loss_mode": mode, "loss_agg_mode": aggregation, **own}, names, batches)
    dropped = peer_verl.loss(peer_verl.config(loss_mode=mode, **tight), batches[0]).metrics["actor/pg_clipfrac"]
    assert 0 < dropped < 1
    compare(record_property, {"loss_mode": mode, **tight}, None, batches[:1], weights=batch().weights)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_dro(aggregation: str, record_property: Any) -> None:
    """The quadratic penalty is a k2 estimate of the KL to the old policy, which the call has as ``ref_logp``."""
    settings = {"loss_mode": "dro", "dro_beta": 0.3, "loss_agg_mode": aggregation}
    config = peer_verl.config(**settings)
    objective = Objective.from_verl(config, max_length=WIDTH)
    text = ", ".join(f"{k}={v!r}" for k, v in settings.items())
    agreement = Agreement(record_property, "veRL", text, tolerance=EPS)
    for b in (batch(mask) for mask in LIVE_MASKS):
        agreement.check(objective, b, peer_verl.loss(config, b), None, ref_logp=b.old)
    agreement.done()


def test_log_ratios_beyond_the_clamp(record_property: Any) -> None:
    """A log-ratio of 120 is 20 there and here, and infinite without the clamp."""
    b = batch("full")
    far = b.replace(old=b.old.copy())
    far.old[:, 0] = far.logp[:, 0] - np.array([120.0, 120.0, -120.0, -120.0])
    for mode in ("vanilla", "cispo", "sapo", "gspo"):
        compare(record_property, {"loss_mode": mode}, None, [far])


def test_group_advantages(record_property: Any) -> None:
    """GRPO's with 1e-6 beside the standard deviation, and RLOO's."""
    rewards, mask = np.float32([0.0, 0.001, 5.0, 2.0]), torch.ones(4, 1)
    scores, groups = torch.tensor(rewards)[:, None], np.array([0, 0, 1, 1])
    theirs = compute_grpo_outcome_advantage(scores, mask, groups)[0].numpy()[:, 0]
    np.testing.assert_allclose(group_advantages(rewards, 2, eps=GROUP_STD_EPS["verl"]), theirs, rtol=2e-6)
    theirs_rloo = compute_rloo_outcome_advantage(scores, mask, groups)[0].numpy()[:, 0]
    ours = group_advantages(rewards, 2, scale="none", baseline="leave_one_out")
    np.testing.assert_allclose(ours, theirs_rloo, rtol=2e-6)
    disagreement(
        record_property, "TRL and veRL", "the advantage of rewards 0 and 0.001",
        float(group_advantages(rewards, 2, eps=GROUP_STD_EPS["trl"])[1]), float(theirs[1]),
        "beside the standard deviation veRL adds 1e-6, TRL 1e-4 (group_advantages(eps=...))",
    )  # fmt: skip


def test_disagreement_cispo_bound(record_property: Any) -> None:
    b = batch("ragged")
    theirs = peer_verl.loss(peer_verl.config(loss_mode="cispo"), b).loss
    trl = Objective.from_trl(loss_type="cispo", epsilon_high=0.2)
    disagreement(
        record_property, "TRL and veRL", "cispo with an upper bound of 0.2", by_oracle(trl, b).loss, theirs,
        "TRL and Liger bound the ratio by epsilon_high itself, veRL by 1 + clip_ratio_high, and below as well "
        "(cispo_bound)",
    )  # fmt: skip


def test_disagreement_k3_clamps(record_property: Any) -> None:
    b = batch("full")
    far = b.replace(ref=b.logp + 3.0)
    theirs = peer_verl.loss(peer_verl.config(use_kl_loss=True, kl_loss_coef=0.1), far).loss
    plain = Objective.from_verl(use_kl_loss=True, kl_loss_coef=0.1).replace(kl_log_ratio_clamp=None, kl_clamp=None)
    disagreement(
        record_property, "TRL and veRL", "k3 at ref - logp = 3", by_oracle(plain, far).loss, theirs,
        "veRL clamps d to +-20 and k3 to +-10 (kl_log_ratio_clamp, kl_clamp); TRL, Liger and Tunix do not",
    )  # fmt: skip


def test_disagreement_nothing_to_train_on(record_property: Any) -> None:
    """A batch without a token: NaN there, 0 here."""
    b: Batch = batch("nothing")
    assert np.isnan(peer_verl.loss(peer_verl.config(), b).loss)
    assert by_oracle(Objective.from_verl(), b).loss == 0
    why = "veRL divides by the number of tokens; here an empty batch has loss 0 and no gradient"
    record_property(
        "disagreement", {"peer": "veRL", "what": "a batch without a token", "ours": 0.0, "theirs": None, "why": why}
    )
