"""TRL's ``GRPOConfig`` (1.16) and Liger's fused GRPO loss (0.8.5), which share the names of most settings.

| setting | here |
|---|---|
| ``loss_type`` grpo, bnpo, dr_grpo, dapo, luspo | ``policy="clip"`` with that ``aggregation`` |
| ``loss_type`` cispo, sapo, vespo | that ``policy``; aggregation dapo, grpo, dapo |
| ``importance_sampling_level`` | ``level`` |
| ``epsilon``, ``epsilon_high`` (Liger: ``epsilon_low``) | ``eps_low``, ``eps_high`` |
| ``beta``, ``use_bias_correction_kl`` | ``beta`` (0: none), ``kl_bias_correction`` |
| ``max_completion_length`` | ``max_length``, with dr_grpo |
| ``top_entropy_quantile``, ``off_policy_mask_threshold`` | ``top_entropy`` (1: none), ``off_policy_threshold`` |
| ``vllm_importance_sampling_*`` with ``use_vllm`` | ``correction``, ``correction_mode``, its bounds |
| ``sapo_temperature_pos``, ``_neg`` | ``tau_pos``, ``tau_neg`` |
| ``use_adaptive_entropy`` and its numbers | refused: a state of the loop, :class:`logitless.AdaptiveEntropy` |
"""

from __future__ import annotations

from logitless.objectives.objective import Number, Objective
from logitless.settings.reader import Fields, Library, Settings, read

_SHAPES: dict[str, float] = {
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}
TRL = Library(
    "TRL",
    "Objective.from_trl",
    loss={
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "epsilon": 0.2,
        "epsilon_high": None,
        "delta": None,
        "beta": 0.0,
        "use_bias_correction_kl": True,
        "temperature": 1.0,
        "max_completion_length": 512,
        "top_entropy_quantile": 1.0,
        "entropy_coef": 0.0,
        "use_adaptive_entropy": False,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_min": None,
        "vllm_importance_sampling_clip_max": 3.0,
        "vllm_importance_sampling_cap": None,
        **_SHAPES,
    },
    other=frozenset(
        """learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32
        remove_unused_columns num_generations num_generations_eval ds3_gather_for_generation shuffle_dataset
        pad_to_multiple_of generation_batch_size steps_per_generation top_p top_k min_p generation_kwargs
        chat_template_kwargs repetition_penalty cache_implementation vllm_mode vllm_model_impl vllm_enable_sleep_mode
        vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
        vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size num_iterations
        reward_weights multi_objective_aggregation scale_rewards mask_truncated_completions sync_ref_model
        ref_model_mixup_alpha ref_model_sync_steps entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
        max_tool_calling_iterations log_completions log_multimodal num_completions_to_print log_unique_prompts
        log_completions_hub_repo use_transformers_continuous_batching transformers_continuous_batching_config
        use_transformers_paged logging_steps gradient_checkpointing bf16 use_liger_kernel
        lr_scheduler_kwargs torch_empty_cache_steps""".split()  # noqa: SIM905
    ),
)
ADAPTIVE_ENTROPY = Library(
    "TRL",
    "AdaptiveEntropy.from_trl",
    loss={
        "entropy_coef": 0.0,
        "entropy_coef_min": 0.0,
        "entropy_coef_max": 1.0,
        "entropy_coef_delta": 0.005,
        "entropy_target": 0.2,
    },
)
LIGER = Library(
    "Liger",
    "Objective.from_liger",
    loss={
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "delta": None,
        "beta": 0.04,
        "use_ref_model": True,
        "use_bias_correction_kl": False,
        "temperature": 1.0,
        "max_completion_length": None,
        **_SHAPES,
    },
    other=frozenset({"compiled", "chunk_size"}),
)
_LAMBDA_MIN = 1e-4
"""Both libraries raise VESPO's lambda to it."""
LOSS_TYPES: dict[str, tuple[str, str]] = {
    **{name: ("clip", name) for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")},
    "cispo": ("cispo", "dapo"),
    "sapo": ("sapo", "grpo"),
    "vespo": ("vespo", "dapo"),
}
_LEVELS = {"token": "token", "sequence": "sequence"}
_MODES = {f"{level}_{mode}": (level, mode) for level in ("token", "sequence") for mode in ("truncate", "mask")}


def from_trl(config: object = None, **given: object) -> Objective:
    """See :meth:`logitless.Objective.from_trl`."""
    s = read(TRL, config, given)
    if s["use_adaptive_entropy"]:
        s.refuse(
            "use_adaptive_entropy=True moves the entropy coefficient between steps, which is a state of your loop: "
            "control = AdaptiveEntropy.from_trl(config), and each step gets "
            "objective.replace(entropy_coef=control.applied), where objective = Objective.from_trl(config, "
            "use_adaptive_entropy=False)."
        )
    high = s["epsilon"] if s["epsilon_high"] is None else s["epsilon_high"]
    fields = _common(s, "epsilon", s["epsilon"], high)
    fields["clip_metrics"] = "trl"
    if s["top_entropy_quantile"] < 1:
        fields["top_entropy"] = s["top_entropy_quantile"]
    if s["entropy_coef"] != 0:
        fields["entropy_coef"] = s["entropy_coef"]
    fields["off_policy_threshold"] = s["off_policy_mask_threshold"]
    return Objective(**fields, **_vllm_correction(s))


def from_liger(config: object = None, **given: object) -> Objective:
    """See :meth:`logitless.Objective.from_liger`."""
    for name, ours in (("vllm_is_ratio", "token_weights"), ("num_items_in_batch", "denominator")):
        if name in given:
            raise TypeError(f"Objective.from_liger: {name} is an array of the call: pass it to the loss as {ours}=.")
    s = read(LIGER, config, given)
    if s["importance_sampling_level"] == "sequence" and s["loss_type"] in ("cispo", "sapo", "vespo"):
        s.refuse(f"Liger refuses loss_type={s['loss_type']!r} at the sequence level; TRL computes it: use from_trl.")
    if not s["use_ref_model"] and s["beta"] != 0:
        s.refuse(f"beta={s['beta']} asks for a KL term, but use_ref_model=False; give beta=0.")
    return Objective(**_common(s, "epsilon_low", s["epsilon_low"], s["epsilon_high"]), clip_metrics="liger")


def _common(s: Settings, low_name: str, eps_low: Number | None, eps_high: Number | None) -> Fields:
    """What both libraries say with the same names."""
    loss_type = s["loss_type"]
    policy, aggregation = s.choice("loss_type", LOSS_TYPES)
    fields: Fields = {
        "policy": policy,
        "aggregation": aggregation,
        "level": s.choice("importance_sampling_level", _LEVELS),
        "temperature": None if s["temperature"] == 1 else s["temperature"],
    }
    here = f"with loss_type={loss_type!r}"
    if policy == "clip":
        fields.update(eps_low=eps_low, eps_high=eps_high, delta=s["delta"])
    elif policy == "cispo":
        fields.update(eps_high=eps_high, cispo_bound="raw")
        s.ignored([low_name] if s["epsilon_high"] is not None else [], here)
    else:
        s.ignored([low_name, "epsilon_high"], here)
    if policy != "clip":
        s.ignored(["delta"], here)
    if policy == "sapo":
        fields.update(tau_pos=s["sapo_temperature_pos"], tau_neg=s["sapo_temperature_neg"])
    else:
        s.ignored(["sapo_temperature_pos", "sapo_temperature_neg"], here)
    vespo = [name for name in _SHAPES if name.startswith("vespo")]
    if policy == "vespo":
        fields.update({name: max(s[name], _LAMBDA_MIN) if "lambda" in name else s[name] for name in vespo})
    else:
        s.ignored(vespo, here)
    if aggregation == "dr_grpo":
        if s["max_completion_length"] is None:
            s.refuse("loss_type='dr_grpo' divides by max_completion_length; give it.")
        fields["max_length"] = s["max_completion_length"]
    if s["beta"] != 0:
        fields.update(beta=s["beta"], kl="k3", kl_bias_correction=bool(s["use_bias_correction_kl"]))
    else:
        s.ignored(["use_bias_correction_kl"], "with beta=0")
    return fields


def _vllm_correction(s: Settings) -> Fields:
    """The train/rollout correction; it asks for ``rollout_logp``, the sampler's log-probabilities."""
    names = [f"vllm_importance_sampling_{x}" for x in ("mode", "clip_min", "clip_max", "cap")]
    if not s["use_vllm"]:
        s.ignored(["vllm_importance_sampling_correction", *names], "without use_vllm=True")
        return {}
    if not s["vllm_importance_sampling_correction"]:
        s.ignored(names, "with vllm_importance_sampling_correction=False")
        return {}
    correction, mode = s.choice("vllm_importance_sampling_mode", _MODES)
    low, high = s["vllm_importance_sampling_clip_min"], s["vllm_importance_sampling_clip_max"]
    if s["vllm_importance_sampling_cap"] is not None:
        high = s["vllm_importance_sampling_cap"]
    if low is None and high is None and mode == "truncate":
        s.refuse("vllm_importance_sampling_mode truncates, but neither of its bounds is given.")
    if s["loss_type"] == "vespo" and correction == "sequence":
        s.refuse("loss_type='vespo' needs vllm_importance_sampling_mode 'token_truncate' or 'token_mask'.")
    if low is None and high is None:
        mode = "truncate"  # a mask without bounds masks nothing
    return {"correction": correction, "correction_mode": mode, "correction_min": low, "correction_max": high}
