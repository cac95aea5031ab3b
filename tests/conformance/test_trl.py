"""TRL's trainer loss and ours from the same settings: loss, gradients and logged metrics."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="TRL is not installed (make conformance)")

import peer_trl
from logitless import (
    AdaptiveEntropy,
    Objective,
    dapo_denominator,
    entropy_denominator,
    group_advantages,
    loss_denominator,
    reduce_metrics,
)
from loss_cases import evaluate
from peer_batches import MASKS, Agreement, Batch, batch, by_library, by_oracle, disagreement

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
KLS: dict[str, dict[str, Any]] = {
    "no KL": {},
    "KL": {"beta": 0.1, "use_bias_correction_kl": False},
    "weighted KL": {"beta": 0.1},
}
METRICS = {
    "kl": "kl_loss",
    "entropy": "entropy",
    "policy_loss": "policy_loss",
    "entropy_coef": "entropy_coef",
    "clip_ratio/low_mean": "clip_fraction_low",
    "clip_ratio/high_mean": "clip_fraction_high",
    "clip_ratio/region_mean": "clip_fraction",
    "clip_ratio/low_min": "clip_fraction_low_min",
    "clip_ratio/high_max": "clip_fraction_high_max",
    "cispo_clip_ratio": "clip_fraction_high",
    "vespo/phi_seq_mean": "vespo_phi",
}
"""What TRL logs of its loss, and our name for it."""
ALL_MASKS = tuple(MASKS)


def base(loss_type: str, **settings: Any) -> dict[str, Any]:
    """Settings with which a loss type clips something."""
    if loss_type == "cispo":
        settings.setdefault("epsilon_high", 1.2)
    if loss_type == "sapo":  # the default, 1.05, is rounded to float32 in TRL, whatever the dtype of the rest
        settings.setdefault("sapo_temperature_neg", 1.0625)
    return dict(loss_type=loss_type, max_completion_length=9, **settings)


def compare(record: Any, settings: dict[str, Any], batches: list[Batch], label: str | None = None, **more: Any) -> None:
    config = peer_trl.config(**settings)
    objective, made = Objective.from_trl(config), peer_trl.trainer(config)
    shown = label or ", ".join(f"{k}={v!r}" for k, v in settings.items() if k != "max_completion_length")
    agreement = Agreement(record, "TRL", shown)
    for b in batches:
        agreement.check(objective, b, peer_trl.loss(made, b), METRICS, **more)
    agreement.done()


@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_level_and_kl_under_every_mask(
    loss_type: str, level: str, kl: str, record_property: Any
) -> None:
    settings = base(loss_type, importance_sampling_level=level, **KLS[kl])
    compare(record_property, settings, [batch(mask) for mask in ALL_MASKS])


OPTIONS: dict[str, dict[str, Any]] = {
    "a higher upper clip": {"epsilon": 0.1, "epsilon_high": 0.28},
    "delta": {"delta": 1.5},
    "delta below the clip": {"delta": 1.1},
    "top entropy": {"top_entropy_quantile": 0.3},
    "an entropy bonus": {"entropy_coef": 0.05},
    "an entropy bonus on the top entropies": {"entropy_coef": 0.05, "top_entropy_quantile": 0.5},
    "the off-policy mask": {"off_policy_mask_threshold": 0.1},
    "everything": {"beta": 0.1, "entropy_coef": 0.05, "top_entropy_quantile": 0.5, "off_policy_mask_threshold": 0.1},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("loss_type", "level"), [("grpo", "token"), ("dapo", "sequence"), ("vespo", "token")])
def test_options(loss_type: str, level: str, option: str, record_property: Any) -> None:
    settings = base(loss_type, importance_sampling_level=level, **OPTIONS[option])
    if loss_type == "vespo" and {"delta", "epsilon"} & set(settings):
        with pytest.warns(UserWarning, match="TRL ignores"):
            compare(record_property, settings, [batch(mask) for mask in ALL_MASKS])
    else:
        compare(record_property, settings, [batch(mask) for mask in ALL_MASKS])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_advantages_per_token(loss_type: str, level: str, record_property: Any) -> None:
    settings = base(loss_type, importance_sampling_level=level, off_policy_mask_threshold=0.1)
    batches = [batch(mask, per_token=True) for mask in ALL_MASKS]
    compare(record_property, settings, batches, f"loss_type={loss_type!r}, {level} level, advantages [B, T]")


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy(loss_type: str, record_property: Any) -> None:
    """Without old log-probabilities every ratio is one; the off-policy mask then drops nothing."""
    settings = base(loss_type, beta=0.1, off_policy_mask_threshold=0.1)
    compare(
        record_property,
        settings,
        [batch(mask).replace(old=None) for mask in ALL_MASKS],
        f"loss_type={loss_type!r}, on-policy",
    )


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradient_accumulation(loss_type: str, record_property: Any) -> None:
    """Half of a batch as one of two micro-batches, with an entropy bonus: both denominators are given."""
    settings = base(loss_type, entropy_coef=0.05, top_entropy_quantile=0.5, gradient_accumulation_steps=2)
    config = peer_trl.config(**settings, steps_per_generation=4)
    objective, made = Objective.from_trl(config), peer_trl.trainer(config)
    agreement = Agreement(record_property, "TRL", f"loss_type={loss_type!r}, gradient_accumulation_steps=2")
    for mask in ALL_MASKS:
        b, items = batch(mask), 40
        if objective.aggregation == "dapo":
            denominator = float(dapo_denominator(items, accumulation=2, steps_per_generation=4))
        else:
            denominator = 2 * float(loss_denominator(objective, b.mask))
        kept = entropy_denominator(objective, b.mask, b.entropy)
        theirs = peer_trl.loss(made, b, items=items)
        agreement.check(objective, b, theirs, denominator=denominator, entropy_denominator=2 * float(kept))
    agreement.done()


CORRECTIONS = [
    (mode, bounds)
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    for bounds in ((None, 3.0), (0.5, 1.5), (None, None))
    if bounds != (None, None) or mode.endswith("mask")
]


def test_both_refuse_to_truncate_without_a_bound() -> None:
    settings = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None}
    with pytest.raises(ValueError, match="At least one of"):
        peer_trl.config(loss_type="grpo", use_vllm=True, **settings)
    with pytest.raises(ValueError, match="neither of its bounds is given"):
        Objective.from_trl(loss_type="grpo", use_vllm=True, **settings)


@pytest.mark.parametrize(("mode", "bounds"), CORRECTIONS)
def test_train_rollout_correction(mode: str, bounds: tuple[float | None, float | None], record_property: Any) -> None:
    """The weights are TRL's own, out of its scoring of a generation; ours follow from ``rollout_logp``."""
    names = [f"vllm_importance_sampling_{x}" for x in ("mode", "clip_min", "clip_max")]
    settings = dict(zip(names, (mode, *bounds), strict=True), use_vllm=True, beta=0.1, off_policy_mask_threshold=0.05)
    if mode.startswith("token"):
        loss_types = ("grpo", "dapo", "vespo")
    else:
        loss_types = ("grpo", "dapo")
    for loss_type in loss_types:
        config = peer_trl.config(**base(loss_type, **settings))
        objective, made = Objective.from_trl(config), peer_trl.trainer(config)
        label = f"loss_type={loss_type!r}, {mode}, bounds {bounds[0]} and {bounds[1]}"
        agreement = Agreement(record_property, "TRL", label)
        for mask in ("full", "ragged"):
            b = batch(mask)
            weights = peer_trl.scored(made, b)["importance_sampling_ratio"]
            theirs = peer_trl.loss(made, b, weights=weights)
            agreement.check(objective, b, theirs, METRICS, rollout_logp=b.rollout)
            plain = objective.replace(correction=None, correction_mode="truncate", off_policy_from="old")
            given = made.off_policy_mask_threshold
            made.off_policy_mask_threshold = None  # here the weights alone, as an array of the caller
            theirs = peer_trl.loss(made, b, weights=weights)
            made.off_policy_mask_threshold = given
            shape = weights[:, 0] if weights.shape[1] == 1 else weights
            agreement.check(plain.replace(off_policy_threshold=None), b, theirs, METRICS, token_weights=shape)
        agreement.done()


def test_adaptive_entropy(record_property: Any) -> None:
    """Twelve optimizer steps of two micro-batches: coefficient, bonus and loss as TRL's controller has them."""
    numbers = {"entropy_coef": 0.02, "entropy_coef_delta": 0.015, "entropy_coef_max": 0.05, "entropy_target": 1.7}
    settings = base("grpo", top_entropy_quantile=0.5, gradient_accumulation_steps=2, **numbers)
    config = peer_trl.config(**settings, use_adaptive_entropy=True)
    made, control = peer_trl.trainer(config), AdaptiveEntropy.from_trl(config)
    objective = Objective.from_trl(config, use_adaptive_entropy=False)
    label = "use_adaptive_entropy=True, twelve steps of two micro-batches"
    agreement = Agreement(record_property, "TRL", label, tolerance=2e-7)  # our coefficient is float32
    applied = []
    for step in range(12):
        parts = []
        o = objective.replace(entropy_coef=control.applied)
        applied.append(float(control.applied))
        for part in range(2):
            b = batch(("ragged", "holes")[part], seed=100 * step + part)
            made.accelerator.gradient_state._set_sync_gradients(part == 1)
            theirs = peer_trl.loss(made, b)
            kept = 2 * float(entropy_denominator(o, b.mask, b.entropy))
            count = 2 * float(loss_denominator(o, b.mask))
            agreement.check(o, b, theirs, denominator=count, entropy_denominator=kept)
            inputs = dict(advantages=np.float32(b.advantages), mask=b.mask, old_logp=np.float32(b.old))
            parts.append(evaluate(o, b.logp, b.entropy, **inputs).metrics)
        control = control.update(reduce_metrics(parts)["bonus_entropy"])
        assert float(control.coef) == pytest.approx(made.entropy_coef, rel=1e-6)
        assert float(control.last) == pytest.approx(made._last_world_entropy, rel=1e-6)
    assert len(set(applied)) > 2 and 0.0 in applied  # it moved, and was switched off
    agreement.done()


def test_group_advantages(record_property: Any) -> None:
    made = peer_trl.trainer(peer_trl.config())
    theirs = peer_trl.scored(made, batch())["advantages"]  # of the rewards 0, 1, 2, 3 in groups of two
    ours = np.asarray(group_advantages(np.arange(4, dtype=np.float32), 2))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    record_property(
        "agreement",
        {
            "peer": "TRL",
            "settings": "group_advantages(scale='group')",
            "batches": 1,
            "float64": None,
            "float32": float(np.abs(ours - theirs).max()),
            "metrics": [],
        },
    )


def test_disagreement_metrics_of_nothing(record_property: Any) -> None:
    config = peer_trl.config(**base("grpo", entropy_coef=0.05))
    b = batch("nothing")
    theirs = peer_trl.loss(peer_trl.trainer(config), b).metrics["entropy_coef"]
    ours = by_library(Objective.from_trl(config), b).metrics["entropy_coef"]
    assert ours == 0 and theirs == pytest.approx(0.05)
    disagreement(
        record_property,
        "TRL",
        "the entropy's coefficient, logged of a batch without a token",
        ours,
        theirs,
        "here nothing is counted in such a batch, so that it changes no mean over micro-batches",
    )


def test_disagreement_vespo_counts_masked_weights(record_property: Any) -> None:
    """TRL sums the logarithm of the weight over padding too, where a bound below one makes it another than zero."""
    settings = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 0.8}
    config = peer_trl.config(**base("vespo", **settings), use_vllm=True)
    objective, made, b = Objective.from_trl(config), peer_trl.trainer(config), batch("ragged")
    theirs = peer_trl.loss(made, b, weights=peer_trl.scored(made, b)["importance_sampling_ratio"])
    ours = by_oracle(objective, b, rollout_logp=b.rollout)
    disagreement(
        record_property, "TRL", "vespo with weights truncated at 0.8, rows of 6, 3, 1 and 5 of 6 tokens",
        ours.loss, theirs.loss, "TRL sums the logarithm of the weight over padding as well, here over valid tokens",
    )  # fmt: skip


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gradient_at_both_bounds(level: str, record_property: Any) -> None:
    """With epsilon 0 on-policy every ratio lies on both bounds; the gradient passes in full."""
    settings = base("grpo", epsilon=0.0, importance_sampling_level=level)
    label = f"loss_type='grpo', {level} level, epsilon=0, on-policy"
    compare(record_property, settings, [batch(mask).replace(old=None) for mask in ALL_MASKS], label)


def test_settings_are_compared_under_masks_that_differ() -> None:
    """The batch tells masks apart: the same settings give five different losses."""
    made = peer_trl.trainer(peer_trl.config(**base("grpo", beta=0.1)))
    losses = [peer_trl.loss(made, batch(mask)).loss for mask in ALL_MASKS]
    assert losses[ALL_MASKS.index("nothing")] == 0
    assert all(abs(a - b) > 1e-3 for a, b in itertools.combinations(losses, 2))
