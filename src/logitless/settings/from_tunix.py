"""Tunix' ``GRPOConfig`` (0.1.7; DAPO's, DrGRPO's and the agentic learner's as well).

| setting | here |
|---|---|
| ``loss_algo`` grpo / gspo-token | ``level`` token / sequence_token |
| ``loss_agg_mode`` | ``aggregation``, over rows that have a valid token |
| ``epsilon``, ``epsilon_high``, ``epsilon_c`` | ``eps_low``, ``eps_high``, ``dual_clip`` |
| ``beta``, ``kl_loss_mode`` kl / mse_kl / low_var_kl | ``beta``, ``kl`` k1 / k2 / k3 |
| ``kl_clamp_value`` | ``kl_clamp`` |
| ``temperature`` (0 means 1) | ``temperature`` |
| ``sampler_is``, ``sampler_is_threshold`` | ``correction="token"``, ``correction_max`` |
| ``truncated_importance_sampling_type`` seq-mask-tis, with ``force_on_policy_ratio`` | ``correction="geometric_mask"``; a token without a sampler's value weighs 1 (there: 0), and no weight is clamped (there: exp(+-20)) |
| ``seq_logprob_error_threshold`` | ``sequence_error_max``, with ``rollout_logp`` (a token without a sampler's value: no error; there its sequence is dropped) |
| ``overlong_loss_masking`` | refused, since it is of the batch: leave these sequences out of the mask (the integration's fused loss does) |
| ``force_on_policy_ratio`` (after 0.1.8) | leave ``old_logp`` out: the ratio is then 1 |
| log-ratios clamped to +-20; gspo-token's at most 10 | ``log_ratio_clamp``, ``sequence_log_ratio_max`` |
"""  # noqa: E501

from __future__ import annotations

from logitless.objectives.objective import Number, Objective
from logitless.settings.reader import Fields, Library, Settings, read

TUNIX = Library(
    "Tunix",
    "Objective.from_tunix",
    loss={
        "loss_algo": "grpo",
        "loss_agg_mode": "sequence-mean-token-mean",
        "policy_loss_fn": "grpo",
        "epsilon": 0.2,
        "epsilon_high": None,
        "epsilon_c": None,
        "beta": 0.04,
        "kl_loss_mode": "kl",
        "kl_clamp_value": None,
        "temperature": 1.0,
        "sampler_is": None,
        "sampler_is_threshold": 2.0,
        "truncated_importance_sampling_type": None,
        "truncated_importance_sampling_ratio_min": None,
        "truncated_importance_sampling_ratio": None,
        "force_on_policy_ratio": False,
        "seq_logprob_error_threshold": None,
        "overlong_loss_masking": False,
    },
    other=frozenset(
        """algo_variant advantage_estimator reward_manager num_generations num_iterations force_compute_kl system_prompt
        max_concurrency off_policy_steps degenerate_group_masking use_rollout_logps max_response_length episode_timeout
        filter_statuses overlong_filter dynamic_sampling overlong_buffer
        log_sampler_trainer_agreement""".split()  # noqa: SIM905
    ),
)
LEVELS: dict[str, dict[str, object]] = {
    "grpo": {"level": "token"},
    "gspo-token": {"level": "sequence_token", "sequence_log_ratio_max": 10.0},
}
_AGGREGATIONS = {
    "token-mean": "bnpo",
    "sequence-mean-token-mean": "grpo",
    "sequence-mean-token-scale": "dr_grpo",
    "seq-mean-token-sum": "luspo",
    "sequence-mean-token-sum-norm": "luspo",
}
_KLS = {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}


def from_tunix(config: object = None, *, max_length: Number | None = None, **given: object) -> Objective:
    """See :meth:`logitless.Objective.from_tunix`."""
    s = read(TUNIX, config, given)
    if s["policy_loss_fn"] not in ("grpo", "logitless"):
        s.refuse(f"policy_loss_fn={s['policy_loss_fn']!r} has no counterpart here; expected 'grpo'.")
    fields: Fields = {
        **s.choice("loss_algo", LEVELS),
        "aggregation": s.choice("loss_agg_mode", _AGGREGATIONS),
        "count_rows": "non_empty",
        "eps_low": s["epsilon"],
        "eps_high": s["epsilon"] if s["epsilon_high"] is None else s["epsilon_high"],
        "dual_clip": s["epsilon_c"],
        "log_ratio_clamp": 20.0,
        "temperature": None if s["temperature"] in (None, 0, 1) else s["temperature"],
        "clip_metrics": "liger",
    }
    if fields["aggregation"] == "dr_grpo":
        if max_length is None:
            s.refuse(
                f"loss_agg_mode={s['loss_agg_mode']!r} divides by the width T of the arrays; give it as max_length=T."
            )
        fields["max_length"] = max_length
    if s["beta"] is not None and s["beta"] != 0:
        fields.update(beta=s["beta"], kl=s.choice("kl_loss_mode", _KLS), kl_clamp=s["kl_clamp_value"])
    else:
        s.ignored(["kl_loss_mode", "kl_clamp_value"], f"with beta={s['beta']}")
    if s["sampler_is"] is None:
        s.ignored(["sampler_is_threshold"], "without sampler_is='token'")
    else:
        fields.update(correction=s.choice("sampler_is", {"token": "token"}), correction_max=s["sampler_is_threshold"])
    if s["overlong_loss_masking"]:
        s.refuse(
            "overlong_loss_masking=True drops truncated completions from the loss and its denominator: leave them out "
            "of the mask of the call, and give overlong_loss_masking=False."
        )
    fields["sequence_error_max"] = s["seq_logprob_error_threshold"]
    if fields["sequence_error_max"] is not None and s["loss_agg_mode"] == "sequence-mean-token-sum-norm":
        s.refuse(
            "seq_logprob_error_threshold drops sequences from the denominator, which Tunix refuses with "
            "loss_agg_mode='sequence-mean-token-sum-norm'; use another one."
        )
    return Objective(**fields | _truncated(s))


def _truncated(s: Settings) -> Fields:
    """``seq-mask-tis``: per-token weights from the current policy, for sequences inside a band."""
    bounds = ["truncated_importance_sampling_ratio_min", "truncated_importance_sampling_ratio"]
    if s["truncated_importance_sampling_type"] is None:
        s.ignored(bounds, "without truncated_importance_sampling_type")
        return {}
    s.choice("truncated_importance_sampling_type", {"seq-mask-tis": None})
    if s["sampler_is"] is not None or None in [s[name] for name in bounds]:
        s.refuse("seq-mask-tis needs both of its ratio bounds, and takes the place of sampler_is.")
    if not s["force_on_policy_ratio"]:
        s.refuse(
            "seq-mask-tis weighs by the current policy, as here without old_logp: it needs force_on_policy_ratio=True."
        )
    low, high = (s[name] for name in bounds)
    return {
        "correction": "geometric_mask", "correction_mode": "mask", "correction_min": low, "correction_max": high
    }  # fmt: skip
