"""Objectives from other libraries' settings: every key is mapped, refused by name, or ignored with a warning."""

from __future__ import annotations

import dataclasses
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from logitless import Objective
from logitless.settings import from_trl, from_tunix, from_verl

TIS = {"truncated_importance_sampling_type": "seq-mask-tis", "truncated_importance_sampling_ratio_min": 0.9,
       "truncated_importance_sampling_ratio": 1.1}  # fmt: skip
TRL, LIGER, VERL, TUNIX = Objective.from_trl, Objective.from_liger, Objective.from_verl, Objective.from_tunix
ROWS: dict[str, Any] = {"count_rows": "non_empty", "clip_metrics": "liger"}
CLIPPED: dict[str, Any] = {"dual_clip": 3.0, "log_ratio_clamp": 20.0, **ROWS}
VLLM = {"use_vllm": True}

MAPPED: list[tuple[Callable[..., Objective], dict[str, Any], Objective]] = [
    # -- TRL
    (TRL, {}, Objective(aggregation="dapo")),
    (TRL, {"loss_type": "grpo", "beta": 0.04}, Objective(beta=0.04, kl_bias_correction=True)),
    (TRL, {"loss_type": "bnpo", "epsilon": 0.1}, Objective(aggregation="bnpo", eps_low=0.1, eps_high=0.1)),
    (TRL, {"loss_type": "dr_grpo", "max_completion_length": 100, "delta": 4.0, "epsilon_high": 0.3},
     Objective(aggregation="dr_grpo", max_length=100, delta=4.0, eps_high=0.3)),
    (TRL, {"loss_type": "luspo", "importance_sampling_level": "sequence", "temperature": 0.9},
     Objective(aggregation="luspo", level="sequence", temperature=0.9)),
    (TRL, {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.1, "use_bias_correction_kl": False},
     Objective(policy="cispo", aggregation="dapo", eps_high=5.0, beta=0.1)),
    (TRL, {"loss_type": "sapo", "sapo_temperature_pos": 0.9, "sapo_temperature_neg": 2.0},
     Objective(policy="sapo", tau_pos=0.9, tau_neg=2.0)),
    (TRL,
     {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_pos": 2.0, "vespo_k_neg": 4.0, "vespo_lambda_neg": 5.0},
     Objective(policy="vespo", aggregation="dapo", vespo_k_pos=1, vespo_lambda_pos=2, vespo_k_neg=4,
         vespo_lambda_neg=5)),
    (TRL, {"top_entropy_quantile": 0.2, "entropy_coef": 0.01, "off_policy_mask_threshold": 0.5},
     Objective(aggregation="dapo", top_entropy=0.2, entropy_coef=0.01, off_policy_threshold=0.5)),
    (TRL, VLLM, Objective(aggregation="dapo", correction="sequence", correction_mode="mask", correction_max=3.0)),
    (
        TRL,
        {
            **VLLM,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_min": 0.5,
            "vllm_importance_sampling_cap": 2.5,
        },
        Objective(aggregation="dapo", correction="token", correction_min=0.5, correction_max=2.5),
    ),
    (TRL, {**VLLM, "vllm_importance_sampling_correction": False}, Objective(aggregation="dapo")),
    # -- Liger
    (LIGER, {}, Objective(aggregation="dapo", beta=0.04, clip_metrics="liger")),
    (LIGER, {"loss_type": "grpo", "epsilon_low": 0.1, "epsilon_high": 0.3, "beta": 0.0, "delta": 2.0},
     Objective(eps_low=0.1, eps_high=0.3, delta=2.0, clip_metrics="liger")),
    # -- veRL
    (VERL, {}, Objective(aggregation="bnpo", **CLIPPED)),
    (VERL, {"use_kl_loss": True, "kl_loss_coef": 0.01, "clip_ratio_high": 0.28, "entropy_coeff": 0.001},
     Objective.preset("verl", beta=0.01, eps_high=0.28, entropy_coef=0.001, cispo_bound="raw")),
    (VERL, {"loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean", "use_kl_loss": True, "kl_loss_type": "mse"},
     Objective(level="sequence_token", sequence_log_ratio_max=10.0, beta=0.001, kl="k2", count_rows="non_empty",
         clip_metrics="liger")),
    (VERL, {"policy_loss": {"loss_mode": "cispo", "clip_cov_ratio": 0.1}, "clip_ratio_low": None, "clip_ratio": 0.3},
     Objective.preset("verl", policy="cispo", eps_low=0.3, kl_log_ratio_clamp=None, kl_clamp=None)),
    (VERL, {"loss_mode": "sapo", "tau_neg": 2.0}, Objective(policy="sapo", tau_neg=2.0, log_ratio_clamp=20.0, **ROWS)),
    (VERL, {"loss_mode": "geo_mean"}, Objective(policy="gmpo", clip_metrics="liger")),
    (VERL, {"loss_mode": "gpg", "loss_agg_mode": "seq-mean-token-sum"},
     Objective(policy="reinforce", aggregation="luspo", **ROWS)),
    (VERL, {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 64, "temperature": 0.7},
     Objective(aggregation="dr_grpo", max_length=64, dual_clip=3.0, log_ratio_clamp=20.0, count_rows="non_empty",
         clip_metrics="liger", temperature=0.7)),
    (VERL, {"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 4.0}},
     Objective(aggregation="bnpo", **CLIPPED, correction="token", correction_max=4.0)),
    # -- Tunix
    (TUNIX, {}, Objective.preset("tunix")),
    (TUNIX, {"loss_algo": "gspo-token", "epsilon": 0.1, "epsilon_high": 0.3, "epsilon_c": 3.0, "temperature": 0.9},
     Objective.preset("tunix", level="sequence_token", eps_low=0.1, eps_high=0.3, dual_clip=3.0, temperature=0.9)),
    (TUNIX, {"kl_loss_mode": "low_var_kl", "kl_clamp_value": 100.0, "loss_agg_mode": "token-mean", "temperature": 0},
     Objective.preset("tunix", kl="k3", kl_clamp=100.0, aggregation="bnpo")),
    (TUNIX, {"loss_agg_mode": "sequence-mean-token-scale", "max_length": 32, "beta": None, "sampler_is": "token"},
     Objective.preset("tunix", kl="k3", beta=None, aggregation="dr_grpo", max_length=32, correction="token",
         correction_max=2.0)),
    (TUNIX, {"beta": None, **TIS, "force_on_policy_ratio": True},
     Objective.preset("tunix", beta=None, kl="k3", correction="geometric_mask", correction_mode="mask",
         correction_min=0.9, correction_max=1.1)),
    (TUNIX, {"loss_agg_mode": "sequence-mean-token-sum-norm", "kl_loss_mode": "mse_kl"},
     Objective.preset("tunix", aggregation="luspo", kl="k2")),
]  # fmt: skip


@pytest.mark.parametrize(("make", "settings", "want"), MAPPED, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_settings_are_mapped(make: Callable[..., Objective], settings: dict[str, Any], want: Objective) -> None:
    """As keywords, and as a mapping; without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make(**settings) == want
        ours = {k: v for k, v in settings.items() if k == "max_length"}
        assert make({k: v for k, v in settings.items() if k not in ours}, **ours) == want


REFUSED: list[tuple[Callable[..., Objective], dict[str, Any], type[Exception], str]] = [
    (TRL, {"loss_type": "ppo"}, ValueError, "loss_type='ppo' is not known; expected one of 'grpo'"),
    (TRL, {"importance_sampling_level": "seq"}, ValueError, "importance_sampling_level='seq' is not known"),
    (TRL, {"use_adaptive_entropy": True}, ValueError, "between steps"),
    (TRL, {"eps_low": 0.1}, TypeError, "TRL has no setting 'eps_low'"),
    (TRL, {"epsilon_hi": 0.1}, TypeError, "Did you mean 'epsilon_high'?"),
    (TRL, {"num_generations": 8}, TypeError, "num_generations does not concern the loss"),
    (TRL, {"loss_type": "dr_grpo", "max_completion_length": None}, ValueError, "divides by max_completion_length"),
    (TRL, {**VLLM, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
     ValueError, "neither of its bounds"),
    (TRL, {**VLLM, "loss_type": "vespo"}, ValueError, "'token_truncate' or 'token_mask'"),
    (LIGER, {"vllm_is_ratio": 1.0}, TypeError, "pass it to the loss as token_weights="),
    (LIGER, {"num_items_in_batch": 8}, TypeError, "pass it to the loss as denominator="),
    (LIGER, {"chunk_size": 8}, TypeError, "chunk_size does not concern the loss"),
    (LIGER, {"use_ref_model": False}, ValueError, "beta=0.04 asks for a KL term"),
    (LIGER, {"loss_type": "cispo", "importance_sampling_level": "sequence"}, ValueError,
     "Liger refuses loss_type='cispo' at the sequence level"),
    (VERL, {"loss_mode": "kl_cov"}, ValueError, "loss_mode='kl_cov' has no counterpart here"),
    (VERL, {"loss_agg_mode": "token-sum"}, ValueError, "denominator=1.0"),
    (VERL, {"loss_agg_mode": "seq-mean-token-sum-norm"}, ValueError, "give it as max_length=T"),
    (VERL, {"use_kl_loss": True, "kl_loss_type": "abs"}, ValueError, "kl_loss_type='abs' is not known"),
    (VERL, {"entropy_coeff": 0.1, "loss_agg_mode": "seq-mean-token-sum"}, ValueError,
     "is averaged by loss_agg_mode='seq-mean-token-sum'"),
    (VERL, {"loss_mode": "sapo", "use_kl_loss": True}, ValueError, "both have one aggregation"),
    (VERL, {"rollout_correction": {"rollout_rs": "token_k1"}}, ValueError, "rollout_rs='token_k1' rejects"),
    (VERL, {"rollout_correction": {"bypass_mode": True}}, ValueError, "as old_logp instead"),
    (VERL, {"rollout_correction": {"rollout_is": "geo"}}, ValueError, "rollout_is='geo' is not known"),
    (VERL, {"ppo_epochs": 2}, TypeError, "ppo_epochs does not concern the loss"),
    (TUNIX, {"loss_algo": "gspo"}, ValueError, "loss_algo='gspo' is not known"),
    (TUNIX, {"policy_loss_fn": "ppo"}, ValueError, "policy_loss_fn='ppo' has no counterpart"),
    (TUNIX, {"loss_agg_mode": "sequence-mean-token-scale"}, ValueError, "give it as max_length=T"),
    (TUNIX, {"kl_loss_mode": "k3"}, ValueError, "kl_loss_mode='k3' is not known; expected one of 'kl'"),
    (TUNIX, {"sampler_is": "sequence"}, ValueError, "sampler_is='sequence' is not known"),
    (TUNIX, TIS, ValueError, "needs force_on_policy_ratio=True"),
    (TUNIX, TIS | {"truncated_importance_sampling_ratio": None}, ValueError, "needs both of its ratio bounds"),
    (TUNIX, TIS | {"truncated_importance_sampling_type": "tis"}, ValueError, "expected one of 'seq-mask-tis'"),
    (TUNIX, {"seq_logprob_error_threshold": 2.0, "loss_agg_mode": "sequence-mean-token-sum-norm"}, ValueError,
     "which Tunix refuses"),
    (TUNIX, {"overlong_loss_masking": True}, ValueError, "leave them out"),
    (TUNIX, {"num_iterations": 2}, TypeError, "num_iterations does not concern the loss"),
    (TUNIX, {"config": "grpo"}, TypeError, "the config is the string 'grpo'"),
    (TUNIX, {"config": NotImplemented}, TypeError, "NotImplementedType has none of the settings of Tunix's loss"),
    (TRL, {"config": {"loss_typ": "grpo"}}, ValueError, "loss_typ='grpo' is not a setting of TRL"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "settings", "error", "message"), REFUSED, ids=lambda v: str(v) if isinstance(v, dict) else ""
)
def test_what_has_no_meaning_here_is_refused_by_name(
    make: Callable[..., Objective], settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        make(**settings)
    assert message in str(raised.value) and str(raised.value).startswith("Objective.from_")


IGNORED: list[tuple[Callable[..., Objective], dict[str, Any], list[str]]] = [
    (TRL, {"loss_type": "cispo", "delta": 4.0, "epsilon": 0.1, "epsilon_high": 5.0}, ["delta", "epsilon"]),
    (TRL, {"loss_type": "sapo", "epsilon": 0.2, "epsilon_high": 0.3}, ["epsilon", "epsilon_high"]),
    (TRL, {"loss_type": "vespo", "delta": 3.0, "sapo_temperature_pos": 2.0}, ["delta", "sapo_temperature_pos"]),
    (TRL, {"vespo_k_pos": 2.5}, ["vespo_k_pos"]),
    (TRL, {"use_bias_correction_kl": True}, ["use_bias_correction_kl"]),
    (TRL, {"vllm_importance_sampling_clip_max": 2.0}, ["vllm_importance_sampling_clip_max"]),
    (LIGER, {"loss_type": "cispo", "delta": 2.0}, ["delta"]),
    (VERL, {"clip_ratio": 0.3}, ["clip_ratio"]),
    (VERL, {"loss_mode": "gspo", "clip_ratio_c": 4.0, "tau_pos": 2.0}, ["clip_ratio_c", "tau_pos"]),
    (VERL, {"kl_loss_coef": 0.1, "kl_loss_type": "k1"}, ["kl_loss_coef", "kl_loss_type"]),
    (VERL, {"loss_mode": "sapo", "loss_agg_mode": "token-mean"}, ["loss_agg_mode"]),
    (VERL, {"loss_scale_factor": 8}, ["loss_scale_factor"]),
    (TUNIX, {"beta": 0.0, "kl_loss_mode": "mse_kl"}, ["kl_loss_mode"]),
    (TUNIX, {"sampler_is_threshold": 3.0}, ["sampler_is_threshold"]),
]


@pytest.mark.parametrize(("make", "settings", "names"), IGNORED, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_what_the_library_ignores_is_ignored_with_a_warning(
    make: Callable[..., Objective], settings: dict[str, Any], names: list[str]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = make(**settings)
    messages = [str(w.message) for w in caught]
    assert len(messages) == len(names)
    for name in names:
        assert sum(f" ignores {name}={settings[name]!r} " in text for text in messages) == 1, messages
    assert all(w.filename == __file__ for w in caught)  # it points at the caller
    assert got == make(**{k: v for k, v in settings.items() if k not in names})


@dataclasses.dataclass
class GRPOConfig:
    """As a trainer's config is: settings of the loss among others."""

    loss_type: str = "dapo"
    epsilon: float = 0.2
    beta: float = 0.0
    delta: float | None = None
    num_generations: int = 8
    learning_rate: float = 1e-6
    a_new_setting: float = 1.0


def test_a_config_object_may_hold_other_settings_and_keywords_override_it() -> None:
    assert Objective.from_trl(GRPOConfig()) == Objective.from_trl()
    config = GRPOConfig(loss_type="grpo", beta=0.1, learning_rate=1.0)
    assert Objective.from_trl(config) == Objective.from_trl(loss_type="grpo", beta=0.1)
    assert Objective.from_trl(config, beta=0.2, temperature=0.9) == Objective.from_trl(
        loss_type="grpo", beta=0.2, temperature=0.9
    )
    with pytest.raises(ValueError, match=r"a_new_setting=2.0 is not a setting of TRL that is known here"):
        Objective.from_trl(GRPOConfig(a_new_setting=2.0))
    with pytest.warns(UserWarning, match=r"TRL ignores delta=2.0 with loss_type='cispo'"):
        Objective.from_trl(GRPOConfig(loss_type="cispo", delta=2.0))
    fused = types.SimpleNamespace(beta=0.0, loss_type="bnpo", epsilon_low=0.1, compiled=True)
    assert Objective.from_liger(fused) == Objective.from_liger(beta=0.0, loss_type="bnpo", epsilon_low=0.1)


def test_fields_of_a_base_class_of_another_package_are_not_the_librarys() -> None:
    """TRL's config is a TrainingArguments of transformers, with a hundred settings that are not about the loss."""
    base = dataclasses.make_dataclass("TrainingArguments", [("warmup", float, 0.1)])
    config = dataclasses.make_dataclass("GRPOConfig", [("beta", float, 0.0)], bases=(base,))
    base.__module__, config.__module__ = "transformers.arguments", "trl.config"  # from 3.12 on a namespace's is lost
    assert Objective.from_trl(config(warmup=9.0, beta=0.5)).beta == 0.5  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "library",
    [from_trl.TRL, from_trl.LIGER, from_verl.ACTOR, from_verl.POLICY_LOSS, from_tunix.TUNIX],
    ids=lambda v: v.call,
)
def test_a_setting_is_of_the_loss_or_not(library: Any) -> None:
    assert not set(library.loss) & set(library.other)
