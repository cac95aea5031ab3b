"""veRL's ``ActorConfig`` (0.9) with its ``policy_loss``, and the algorithm's ``rollout_correction`` as a keyword.

| setting | here |
|---|---|
| ``policy_loss.loss_mode`` vanilla | ``policy="clip"`` with ``dual_clip`` |
| gspo | ``level="sequence_token"``, its log-ratio at most 10 |
| cispo, sapo, geo_mean, gpg | ``policy`` cispo (interval), sapo, gmpo, reinforce |
| dppo_tv, dppo_kl | ``policy`` of that name, its ratio at most ``clip_ratio_c`` (3 in ``ActorConfig``) |
| dro with ``dro_beta`` | ``policy`` reinforce, ``beta``, ``kl`` k2; give the old log-probabilities as ``ref_logp`` |
| clip_cov, kl_cov, bypass_mode | refused |
| ``clip_ratio_low``, ``clip_ratio_high`` (``clip_ratio`` where they are None), ``clip_ratio_c`` | ``eps_low``, ``eps_high``, ``dual_clip`` |
| ``loss_agg_mode``, ``loss_scale_factor`` | ``aggregation``, ``max_length`` (None: the width T of the arrays, which you give) |
| ``use_kl_loss``, ``kl_loss_coef``, ``kl_loss_type`` | ``beta``, ``kl``, the clamps of k3 |
| ``entropy_coeff`` | ``entropy_coef`` |
| ``rollout_correction``: ``rollout_is``, ``rollout_is_threshold`` | ``correction``, ``correction_max`` |
"""  # noqa: E501

from __future__ import annotations

from logitless.objectives.objective import Number, Objective
from logitless.settings.reader import Fields, Library, Settings, read

CALL = "Objective.from_verl"
ACTOR = Library(
    "veRL",
    CALL,
    loss={
        "policy_loss": None,
        "loss_mode": "vanilla",
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "clip_ratio_c": 3.0,
        "loss_agg_mode": "token-mean",
        "loss_scale_factor": None,
        "entropy_coeff": 0.0,
        "tau_pos": 1.0,
        "tau_neg": 1.05,
        "dro_beta": None,
        "use_kl_loss": False,
        "kl_loss_coef": 0.001,
        "kl_loss_type": "low_var_kl",
        "temperature": 1.0,
        "rollout_correction": None,
    },
    other=frozenset(
        """strategy ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu
        ppo_infer_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu ppo_infer_max_token_len_per_gpu
        freeze_vision_tower calculate_entropy calculate_sum_pi_squared use_prefix_grouper use_torch_compile
        ppo_epochs shuffle data_loader_seed checkpoint optim use_fused_kernels profiler engine rollout_n
        model_config global_batch_info qat profile pad_to_length entropy_from_logits_chunk_size grad_clip
        ulysses_sequence_parallel_size entropy_from_logits_with_chunking entropy_checkpointing fsdp_config megatron
        load_weight sum_pi_squared_checkpointing use_remove_padding use_rollout_log_probs veomni torchtitan
        router_replay mtp _target_""".split()  # noqa: SIM905
    ),
)
POLICY_LOSS = Library(
    "veRL",
    CALL,
    loss={"loss_mode": "vanilla", "dro_beta": None},
    other=frozenset(  # options for refused loss modes
        {"clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "_target_"}
        | {"rollout_correction"}
    ),
)
ROLLOUT_CORRECTION = Library(
    "veRL",
    CALL,
    loss={
        "rollout_is": "sequence",
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": False,
        "rollout_rs": None,
        "bypass_mode": False,
    },
    other=frozenset({"rollout_rs_threshold", "loss_type", "_target_"}),
)
MODES: dict[str, dict[str, object]] = {
    "vanilla": {"policy": "clip", "log_ratio_clamp": 20.0},
    "gspo": {"policy": "clip", "level": "sequence_token", "sequence_log_ratio_max": 10.0},
    "cispo": {"policy": "cispo", "cispo_bound": "interval", "log_ratio_clamp": 20.0},
    "sapo": {"policy": "sapo", "log_ratio_clamp": 20.0},
    "geo_mean": {"policy": "gmpo"},
    "gpg": {"policy": "reinforce"},
    "dppo_tv": {"policy": "dppo_tv", "log_ratio_clamp": 20.0},
    "dppo_kl": {"policy": "dppo_kl", "log_ratio_clamp": 20.0},
    "dro": {"policy": "reinforce", "kl": "k2"},
}
_AGGREGATIONS = {
    "token-mean": "bnpo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
_K3 = {"kl_log_ratio_clamp": 20.0, "kl_clamp": 10.0}
_KLS: dict[str, dict[str, object]] = {
    "kl": {"kl": "k1"},
    "mse": {"kl": "k2"},
    "mse+": {"kl": "k2"},
    "low_var_kl": {"kl": "k3", **_K3},
    "low_var_kl+": {"kl": "k3+", **_K3},
}
_KLS |= {"k1": _KLS["kl"], "k2": _KLS["mse"], "k2+": _KLS["mse+"], "k3": _KLS["low_var_kl"], "k3+": _KLS["low_var_kl+"]}


def from_verl(config: object = None, *, max_length: Number | None = None, **given: object) -> Objective:
    """See :meth:`logitless.Objective.from_verl`."""
    s = read(ACTOR, config, given)
    nested = read(POLICY_LOSS, s["policy_loss"], {})
    mode = nested["loss_mode"] if "loss_mode" in nested.said and "loss_mode" not in s.said else s["loss_mode"]
    if mode not in MODES:
        s.refuse(f"loss_mode={mode!r} has no counterpart here; expected one of {', '.join(map(repr, MODES))}.")
    here = f"with loss_mode={mode!r}"
    fields: Fields = {**MODES[mode], "clip_metrics": "liger", "count_rows": "non_empty"}
    fields["temperature"] = None if s["temperature"] == 1 else s["temperature"]
    if mode in ("sapo", "gpg", "dro"):
        s.ignored(["clip_ratio", "clip_ratio_low", "clip_ratio_high"], here)
    else:
        low, high = (s[k] if s[k] is not None else s["clip_ratio"] for k in ("clip_ratio_low", "clip_ratio_high"))
        fields.update(eps_low=low, eps_high=high)
        if s["clip_ratio_low"] is not None and s["clip_ratio_high"] is not None:
            s.ignored(["clip_ratio"], "where clip_ratio_low and clip_ratio_high are not None (they are 0.2 by default)")
    if mode == "vanilla":
        fields["dual_clip"] = s["clip_ratio_c"]
    elif mode in ("dppo_tv", "dppo_kl"):
        fields["delta"] = s["clip_ratio_c"]
    else:
        s.ignored(["clip_ratio_c"], here)
    if mode == "sapo":
        fields.update(tau_pos=s["tau_pos"], tau_neg=s["tau_neg"])
    else:
        s.ignored(["tau_pos", "tau_neg"], here)
    fields.update(_aggregation(s, mode, max_length), **_terms(s, mode))
    if mode == "dro":
        fields["beta"] = _dro_beta(s, nested)
    else:
        s.ignored(["dro_beta"], here)
    return Objective(**fields, **_correction(s, mode))


def _dro_beta(s: Settings, nested: Settings) -> Number:
    """The factor of DRO's ``(logp - old)^2 / 2``, the k2 estimate of the KL to the old policy."""
    beta = nested["dro_beta"] if s["dro_beta"] is None else s["dro_beta"]
    if beta is None:
        s.refuse("loss_mode='dro' needs dro_beta, the factor of its quadratic term.")
    if s["use_kl_loss"]:
        s.refuse("loss_mode='dro' with use_kl_loss=True has two penalties, and an objective has one; use one of them.")
    if s["rollout_correction"] is not None:
        s.refuse("loss_mode='dro' with rollout_correction has no counterpart here: its penalty would have no weight.")
    return beta


def _aggregation(s: Settings, mode: str, max_length: Number | None) -> Fields:
    if mode in ("sapo", "geo_mean"):
        s.ignored(["loss_agg_mode", "loss_scale_factor"], f"in the policy loss with loss_mode={mode!r}")
        return {"aggregation": "grpo", "count_rows": "all" if mode == "geo_mean" else "non_empty"}
    return aggregation(s, max_length)


def aggregation(s: Settings, max_length: Number | None) -> Fields:
    """``loss_agg_mode`` and ``loss_scale_factor``, which veRL's policy and distillation losses share."""
    if s["loss_agg_mode"] == "token-sum":
        s.refuse("loss_agg_mode='token-sum' is a sum: use 'token-mean', and denominator=1.0 in the call of the loss.")
    ours = s.choice("loss_agg_mode", _AGGREGATIONS)
    if ours != "dr_grpo":
        s.ignored(["loss_scale_factor"], f"with loss_agg_mode={s['loss_agg_mode']!r}")
        return {"aggregation": ours}
    length = max_length if s["loss_scale_factor"] is None else s["loss_scale_factor"]
    if length is None:
        s.refuse(
            "loss_agg_mode='seq-mean-token-sum-norm' without loss_scale_factor divides by the width T of the arrays; "
            "give it as max_length=T."
        )
    return {"aggregation": ours, "max_length": length}


def _terms(s: Settings, mode: str) -> Fields:
    """The KL and the entropy bonus, which veRL aggregates by ``loss_agg_mode`` whatever the policy loss does."""
    out: Fields = {}
    apart = mode in ("sapo", "geo_mean") and s["loss_agg_mode"] != "seq-mean-token-mean"
    if s["use_kl_loss"]:
        if apart:
            s.refuse(
                f"loss_mode={mode!r} is a mean over sequences and its KL by loss_agg_mode={s['loss_agg_mode']!r}; here "
                "both have one aggregation: use loss_agg_mode='seq-mean-token-mean'."
            )
        out.update(beta=s["kl_loss_coef"], **s.choice("kl_loss_type", _KLS))
    else:
        s.ignored(["kl_loss_coef", "kl_loss_type"], "without use_kl_loss=True")
    if s["entropy_coeff"] != 0:
        if s["loss_agg_mode"] != "token-mean":
            s.refuse(
                f"entropy_coeff={s['entropy_coeff']} is averaged by loss_agg_mode={s['loss_agg_mode']!r} in veRL, and "
                "over tokens here: use loss_agg_mode='token-mean', or entropy_coeff=0."
            )
        out["entropy_coef"] = s["entropy_coeff"]
    return out


def _correction(s: Settings, mode: str) -> Fields:
    """``algorithm.rollout_correction``; it asks for ``rollout_logp``. Weights that are there already go in as
    ``token_weights``, and need no correction."""
    if s["rollout_correction"] is None:
        return {}
    c = read(ROLLOUT_CORRECTION, s["rollout_correction"], {})
    if c["bypass_mode"]:
        s.refuse("rollout_correction.bypass_mode=True: give the rollout's log-probabilities as old_logp instead.")
    if c["rollout_rs"] is not None:
        s.refuse(f"rollout_rs={c['rollout_rs']!r} rejects tokens: put its outcome into the mask of the call.")
    if c["rollout_is_batch_normalize"]:
        s.refuse("rollout_is_batch_normalize=True: compute the weights, and pass them to the loss as token_weights=.")
    if c["rollout_is"] is None:
        return {}
    if mode == "geo_mean":
        s.refuse("loss_mode='geo_mean' averages the weights of a sequence: pass them to the loss as token_weights=.")
    kind = c.choice("rollout_is", {"token": "token", "sequence": "sequence"})
    return {"correction": kind, "correction_max": float(c["rollout_is_threshold"])}
