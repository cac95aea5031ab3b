"""What an objective promises of every batch: NaN is seen, bounds are where the documentation has them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from logitless import Objective, loss_denominator, rows_with_gradient
from logitless.objectives import checks
from logitless.objectives.inputs import loss_inputs
from logitless.objectives.loss import may_have_gradient
from loss_cases import metrics_of


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name, beta", [("ref_logp", 0.0), ("old_logp", None)])
def test_a_row_with_a_nan_has_a_gradient(name: str, beta: float | None, bad: float) -> None:
    """Zero times NaN is no zero, so a row that is left out for its advantage of zero would hide one."""
    array = np.zeros((3, 2), np.float32)
    array[1, 1] = bad
    found = rows_with_gradient(Objective(beta=beta), np.zeros(3, np.float32), np.ones((3, 2)), **{name: array})
    infinite_ratio = name == "old_logp" and np.isinf(bad)  # an advantage of zero is none for any ratio
    assert np.asarray(found).tolist() == [False, not infinite_ratio, False]


CLAMPED = "log_ratio_clamp=20.0, "
VERL_KL = "kl_log_ratio_clamp=20.0, kl_clamp=10.0"
ROWS = "clip_metrics='liger', count_rows='non_empty', "
WRITTEN_OUT: dict[str, tuple[Objective, str]] = {
    "trl": (Objective.preset("trl"), "aggregation='dapo', kl_bias_correction=True"),
    "liger": (Objective.preset("liger"), "clip_metrics='liger', eps_high=0.4, beta=0.04, temperature=0.9"),
    "verl": (Objective.preset("verl"),
        f"aggregation='bnpo', cispo_bound='interval', {ROWS}dual_clip=3.0, {CLAMPED}{VERL_KL}"),
    "verl, gmpo": (Objective.preset("verl", policy="gmpo"),
        f"policy='gmpo', aggregation='bnpo', cispo_bound='interval', {ROWS}{VERL_KL}"),
    "verl, gspo-token": (
        Objective.preset("verl", level="sequence_token"),
        f"level='sequence_token', aggregation='bnpo', cispo_bound='interval', {ROWS}dual_clip=3.0, "
        f"sequence_log_ratio_max=10.0, {VERL_KL}",
    ),
    "tunix": (Objective.preset("tunix"), f"kl='k1', {ROWS}{CLAMPED}beta=0.04"),
    "tunix, gspo-token": (Objective.preset("tunix", level="sequence_token"),
        f"level='sequence_token', kl='k1', {ROWS}{CLAMPED}sequence_log_ratio_max=10.0, beta=0.04"),
    "mllm-jax": (Objective.preset("mllm-jax"), "aggregation='dapo', clip_metrics='liger', temperature_on='logp'"),
    "from_trl, sapo": (Objective.from_trl(loss_type="sapo"), "policy='sapo'"),
    "from_trl, vespo": (Objective.from_trl(loss_type="vespo"), "policy='vespo', aggregation='dapo'"),
    "from_trl, vllm": (
        Objective.from_trl(use_vllm=True, entropy_coef=0.1, top_entropy_quantile=0.2, beta=0.3, temperature=0.7),
        "aggregation='dapo', kl_bias_correction=True, correction='sequence', correction_mode='mask', beta=0.3, "
        "correction_max=3.0, top_entropy=0.2, entropy_coef=0.1, temperature=0.7",
    ),
    "from_verl, corrected": (
        Objective.from_verl(rollout_correction={}, temperature=0.7, entropy_coeff=0.1),
        f"aggregation='bnpo', correction='sequence', {ROWS}dual_clip=3.0, log_ratio_clamp=20.0, entropy_coef=0.1, "
        "temperature=0.7",
    ),
    "from_verl, k3": (
        Objective.from_verl(use_kl_loss=True),
        f"aggregation='bnpo', {ROWS}dual_clip=3.0, log_ratio_clamp=20.0, beta=0.001, "
        "kl_log_ratio_clamp=20.0, kl_clamp=10.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_a_library_s_objective_written_out(name: str) -> None:
    """What it sets beside the defaults, which are TRL's clip, k3 and the mean of a sequence's mean."""
    objective, written = WRITTEN_OUT[name]
    assert repr(objective) == f"Objective({written})"
    if objective.correction is not None:
        assert objective.correction_max == (3.0 if "correction_max" in written else 2.0)


def test_the_defaults_written_out() -> None:
    o = Objective()
    assert (o.policy, o.level, o.aggregation, o.kl, o.count_rows) == ("clip", "token", "grpo", "k3", "all")
    assert (o.eps_low, o.eps_high, o.tau_pos, o.tau_neg) == (0.2, 0.2, 1.0, 1.05)
    assert (o.vespo_k_pos, o.vespo_lambda_pos, o.vespo_k_neg, o.vespo_lambda_neg) == (2.0, 3.0, 3.0, 2.0)


@pytest.mark.parametrize("name", ["eps_low", "eps_high", "log_ratio_clamp", "kl_clamp", "delta"])
def test_zero_is_a_bound_and_less_is_none(name: str) -> None:
    assert getattr(Objective(**{name: 0}), name) == 0.0
    with pytest.raises(ValueError, match=f"Objective: {name}=-0.5, expected a number >= 0"):
        Objective(**{name: -0.5})


def test_bounds_of_a_dual_clip_a_quantile_and_a_correction() -> None:
    """What is refused is in ``test_refused_by_name``."""
    Objective(dual_clip=1.5, top_entropy=1.0)
    Objective(correction="token", correction_min=2.0, correction_max=2.0)
    with pytest.raises(ValueError, match=r"correction_min=2.5 lies above correction_max=2.0"):
        Objective(correction="token", correction_min=2.5, correction_max=2.0)
    for bound in (dict(correction_min=0.5, correction_max=None), dict(correction_max=2.0)):
        Objective(correction="token", correction_mode="mask", **bound)


@pytest.mark.parametrize("fields", [dict(aggregation="bnpo"), dict(), dict(count_rows="non_empty")])
@pytest.mark.parametrize("segments", [False, True])
def test_counts_are_exact_beyond_what_bfloat16_counts(fields: dict[str, Any], segments: bool) -> None:
    """1027 rows of a token each: as many tokens, rows, rows with a token, and segments."""
    ids = np.ones((1027, 1), np.int32) if segments else None
    assert float(loss_denominator(Objective(**fields), np.ones((1027, 1)), ids)) == 1027.0


def test_vespo_s_lambda_has_a_least_value_and_its_k_none() -> None:
    shapes = {f"vespo_{x}_{side}": 1e-5 for x in ("k", "lambda") for side in ("pos", "neg")}
    o = Objective.from_trl(loss_type="vespo", **shapes)
    assert (o.vespo_lambda_pos, o.vespo_lambda_neg, o.vespo_k_pos, o.vespo_k_neg) == (1e-4, 1e-4, 1e-5, 1e-5)


def test_tokens_that_a_correction_drops_are_not_looked_at() -> None:
    """Nor those without an advantage; with a KL term or an entropy bonus every live token is."""
    mask = jnp.array([[True, True, True, False]])
    zeros = jnp.zeros((1, 4))
    drops = dict(correction="token", correction_mode="mask", correction_max=2.0)

    def moving(**fields: Any) -> list[bool]:
        o = Objective(**fields)
        rollout = jnp.array([[0.0, -5.0, 0.0, 0.0]])
        _, x = loss_inputs("test", o, (1, 4), dict(
            advantages=jnp.array([[1.0, 1.0, 0.0, 1.0]]), mask=mask, old_logp=zeros, ref_logp=zeros,
            rollout_logp=rollout, segment_ids=None, denominator=None, entropy_denominator=None, token_weights=None,
        ))  # fmt: skip
        return may_have_gradient(o, x)[0].tolist()

    assert moving() == [True, True, False, False]
    assert moving(**drops) == [True, False, False, False]
    assert moving(beta=0.1, **drops) == moving(entropy_coef=0.1) == [True, True, True, False]


def test_a_packed_row_without_a_token_has_no_part_in_the_least_clip_fraction() -> None:
    """Every token of the other row is clipped from below."""
    o = Objective(level="sequence", clip_metrics="trl")
    logp, zeros = np.full((2, 3), -2.0, np.float32), np.zeros((2, 3), np.float32)
    found = metrics_of(
        o, logp, zeros, advantages=zeros - 1.0, old_logp=zeros, mask=np.array([[1, 1, 1], [0, 0, 0]]),
        segment_ids=np.ones((2, 3), np.int32),
    )  # fmt: skip
    assert tuple(found["clip_fraction_low_min"]) == (1.0, 1.0) and tuple(found["clip_fraction_low"]) == (1.0, 1.0)
    assert tuple(found["clip_fraction_high_max"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    "given, found",
    [
        ("K-1", "k1"),
        ("SEQUENCE token", "sequence_token"),
        ("st", "sequence_token"),
        ("t", None),
        ("x", None),
        ("k", None),
    ],
)
def test_a_name_is_told_by_its_letters_or_its_initials(given: str, found: str | None) -> None:
    """One letter is no name, and of two that fit neither is meant."""
    assert checks.same_name(given, ["k1", "k2", "token", "sequence_token"]) == found
    assert checks.same_name("st", ["sequence_token", "some_token"]) is None
