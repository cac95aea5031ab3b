"""Distillation losses under the names of TRL 1.16, Liger 0.8.5, Tunix 0.1.7, NeMo-RL and veRL 0.9.1.

| setting | here |
|---|---|
| TRL, Liger ``beta`` 0, 1, between | ``divergence`` forward_kl, reverse_kl, jsd with ``mix=beta`` |
| TRL ``DistillationConfig.temperature``, Liger and Tunix ``temperature`` | ``temperature`` |
| TRL ``GKDConfig.temperature`` | nothing: it is for sampling |
| Liger ``weight_soft_loss``, ``weight_hard_loss`` | ``soft_weight``, ``hard_weight`` |
| Tunix ``alpha`` | ``soft_weight=alpha``, ``hard_weight=1 - alpha``, forward_kl times ``temperature ** 2`` |
| Tunix ``distill_top_k``, NeMo ``topk_logits_k``, veRL ``topk`` | refused, unless it says that there is none |
| NeMo ``kl_type`` forward, reverse; mixed | ``divergence``; refused unless ``mixed_kl_weight`` is 1 or 0 |
| veRL ``loss_mode`` forward_kl_topk; kl, k1, k2, k3, ... | forward_kl; refused, for they look at the sampled token |
| veRL ``distillation_loss_coef`` with ``use_task_rewards`` | ``soft_weight`` |

The hard part has temperature one in all libraries (Liger, Tunix, MaxText).
"""

from __future__ import annotations

from collections.abc import Mapping

from logitless.objectives.distillation import Distillation
from logitless.objectives.objective import Divergence, Number
from logitless.settings.from_verl import aggregation
from logitless.settings.reader import Fields, Library, Settings, read

_TRAINER = frozenset(
    """learning_rate model_init_kwargs trust_remote_code teacher_model_name_or_path teacher_model_revision
    teacher_model_init_kwargs disable_dropout remove_unused_columns ds3_gather_for_generation shuffle_dataset
    pad_to_multiple_of top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty cache_implementation
    use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url
    vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
    vllm_max_model_length vllm_tensor_parallel_size max_tool_calling_iterations log_completions num_completions_to_print
    log_unique_prompts max_completion_length logging_steps gradient_checkpointing bf16 lr_scheduler_kwargs
    use_liger_kernel torch_empty_cache_steps router_aux_loss_coef""".split()  # noqa: SIM905
)
TRL = Library("TRL", "Distillation.from_trl", loss={"beta": 1.0, "temperature": 1.0}, other=_TRAINER)
GKD = Library(
    "TRL",
    "Distillation.from_trl",
    loss={"beta": 0.5},
    other=_TRAINER
    | frozenset(  # and the settings of supervised fine-tuning, whose loss GKD replaces
        """temperature lmbda max_new_tokens seq_kd loss_type chat_template_path dataset_text_field
        dataset_kwargs dataset_num_proc eos_token pad_token max_length packing packing_strategy
        padding_free eval_packing completion_only_loss assistant_only_loss activation_offloading
        truncation_mode""".split()  # noqa: SIM905
    ),
)
LIGER = Library(
    "Liger",
    "Distillation.from_liger",
    loss={"weight_hard_loss": 0.5, "weight_soft_loss": 0.5, "beta": 0.5, "temperature": 1.0},
    other=frozenset({"ignore_index", "compiled", "chunk_size", "return_soft_hard_loss"}),
)
TUNIX = Library(
    "Tunix",
    "Distillation.from_tunix",
    loss={"temperature": 2.0, "alpha": 0.5, "distill_top_k": 0},
    other=frozenset({"student_forward_fn", "teacher_forward_fn", "labels_fn"}),
)
NEMO = Library(
    "NeMo-RL",
    "Distillation.from_nemo",
    loss={"kl_type": "mixed", "mixed_kl_weight": 0.5, "zero_outside_topk": False, "topk_logits_k": 64},
)
VERL = Library(
    "veRL",
    "Distillation.from_verl",
    loss={
        "loss_mode": "k3",
        "topk": 128,
        "use_task_rewards": True,
        "distillation_loss_coef": 1.0,
        "loss_max_clamp": 10.0,
        "log_prob_min_clamp": -10.0,
        "use_policy_gradient": True,
        "loss_agg_mode": "token-mean",
        "loss_scale_factor": None,
    },
    other=frozenset(
        """use_chunked_topk chunked_topk_chunk_size policy_loss_mode clip_ratio clip_ratio_low clip_ratio_high
        global_batch_info loss_settings _target_""".split()  # noqa: SIM905
    ),
)
_SAMPLED = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


def _has(config: object, name: str) -> bool:
    return name in config if isinstance(config, Mapping) else hasattr(config, name)


def _only(library: Library, config: object, name: str, expected: str) -> None:
    """A config that is no mapping has the setting ``name``, by which its class is known."""
    if config is not None and not isinstance(config, Mapping) and not _has(config, name):
        raise TypeError(f"{library.call}: {type(config).__name__} has no {name!r}; expected {expected}.")


def _of_beta(s: Settings) -> Fields:
    """``divergence`` and ``mix`` of the ``beta`` that TRL and Liger share."""
    beta = s["beta"]
    if not isinstance(beta, (int, float)) or not 0 <= beta <= 1:
        s.refuse(f"beta={beta!r}, expected 0 (forward KL), 1 (reverse KL) or a number between (JSD).")
    if beta in (0, 1):
        return {"divergence": "reverse_kl" if beta else "forward_kl"}
    return {"divergence": "jsd", "mix": beta}


def _temperature(s: Settings) -> float | None:
    return None if s["temperature"] == 1 else s["temperature"]


def from_trl(config: object = None, **given: object) -> Distillation:
    """See :meth:`logitless.Distillation.from_trl`."""
    _only(TRL, config, "beta", "a DistillationConfig or a GKDConfig")
    if config is not None and _has(config, "num_generations"):
        raise TypeError(
            f"{TRL.call}: {type(config).__name__} is a config of a policy loss, where beta is the coefficient of a KL; "
            "expected a DistillationConfig or a GKDConfig. Objective.from_trl takes a GRPOConfig."
        )
    if config is not None and _has(config, "lmbda"):
        return Distillation(**_of_beta(read(GKD, config, given)))
    s = read(TRL, config, given)
    return Distillation(**_of_beta(s), temperature=_temperature(s))


def from_liger(config: object = None, **given: object) -> Distillation:
    """See :meth:`logitless.Distillation.from_liger`."""
    _only(LIGER, config, "weight_soft_loss", "a LigerFusedLinearJSDLoss")
    if "ignore_index" in given:
        raise TypeError(f"{LIGER.call}: ignore_index marks targets: give the loss a mask that is 0 there.")
    s = read(LIGER, config, given)
    hard = s["weight_hard_loss"]
    return Distillation(
        **_of_beta(s),
        temperature=_temperature(s),
        soft_weight=s["weight_soft_loss"],
        hard_weight=None if hard == 0 else hard,
    )


def from_tunix(config: object = None, **given: object) -> Distillation:
    """See :meth:`logitless.Distillation.from_tunix`."""
    _only(TUNIX, config, "alpha", "a LogitStrategy")
    s = read(TUNIX, config, given)
    alpha, temperature = s["alpha"], _temperature(s)
    if not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
        s.refuse(f"alpha={alpha!r}, expected the share of the distillation in the loss, between 0 and 1.")
    if s["distill_top_k"]:
        s.refuse(
            f"distill_top_k={s['distill_top_k']} compares the teacher's likeliest ids alone, renormalised; this loss "
            "compares the whole vocabulary: give distill_top_k=0."
        )
    return Distillation(
        divergence="forward_kl",
        temperature=temperature,
        temperature_squared=temperature is not None,
        soft_weight=alpha,
        hard_weight=None if alpha == 1 else 1 - alpha,
    )


def from_nemo(config: object = None, **given: object) -> Distillation:
    """See :meth:`logitless.Distillation.from_nemo`."""
    _only(NEMO, config, "kl_type", "the loss_fn section of a distillation's config")
    s = read(NEMO, config, given)
    if s["topk_logits_k"] is not None:
        s.refuse(
            f"topk_logits_k={s['topk_logits_k']} compares the teacher's likeliest ids alone; this loss compares the "
            "whole vocabulary: give topk_logits_k=None if that is meant."
        )
    if s["zero_outside_topk"]:
        s.refuse("zero_outside_topk=True says how ids outside the top-k count, and there are none: leave it out.")
    if s["kl_type"] != "mixed":
        s.ignored(["mixed_kl_weight"], f"with kl_type={s['kl_type']!r}")
        return Distillation(divergence=s.choice("kl_type", {"forward": "forward_kl", "reverse": "reverse_kl"}))
    if s["mixed_kl_weight"] not in (0, 1):
        s.refuse(
            f"kl_type='mixed' with mixed_kl_weight={s['mixed_kl_weight']} is a weighted sum of forward and reverse KL, "
            "which is not JSD and has no counterpart here; use kl_type='forward' or 'reverse'."
        )
    return Distillation(divergence="forward_kl" if s["mixed_kl_weight"] == 1 else "reverse_kl")


def from_verl(config: object = None, *, max_length: Number | None = None, **given: object) -> Distillation:
    """See :meth:`logitless.Distillation.from_verl`."""
    _only(VERL, config, "distillation_loss_coef", "a DistillationLossConfig")
    s = read(VERL, config, given)
    if s["loss_mode"] in _SAMPLED:
        s.refuse(
            f"loss_mode={s['loss_mode']!r} estimates the reverse KL from the sampled token, and takes the teacher's "
            "log-probability: here that is ref_logp with Objective(beta=..., kl=...). The whole vocabulary: "
            "Distillation(divergence='reverse_kl')."
        )
    modes: dict[str, Divergence] = {"forward_kl_topk": "forward_kl"}
    divergence = s.choice("loss_mode", modes)
    if s["use_policy_gradient"]:
        s.refuse("use_policy_gradient=True makes the loss a reward: give it to the loss as advantages, negative.")
    if s["topk"] is not None:
        s.refuse(
            f"topk={s['topk']} drops the mass outside the teacher's likeliest ids, so that the loss is no KL; this one "
            "compares the whole vocabulary: give topk=None if that is meant."
        )
    for name in ("loss_max_clamp", "log_prob_min_clamp"):
        if s[name] is not None:
            s.refuse(f"{name}={s[name]} has no counterpart here: give {name}=None.")
    if not s["use_task_rewards"]:
        s.ignored(["distillation_loss_coef"], "without use_task_rewards=True")
    return Distillation(
        divergence=divergence,
        soft_weight=s["distillation_loss_coef"] if s["use_task_rewards"] else 1.0,
        count_rows="non_empty",
        **aggregation(s, max_length),
    )
