"""Objectives as defined by the peers (docs/losses.md lists the disagreements)."""

from __future__ import annotations

from typing import Any

from logitless.objectives import checks
from logitless.objectives.objective import Objective

PRESETS: dict[str, dict[str, Any]] = {
    # TRL 1.16: dapo aggregation, no KL by default; with one, k3 times the ratio.
    "trl": dict(eps_low=0.2, eps_high=0.2, aggregation="dapo", kl="k3", kl_bias_correction=True),
    # Liger-Kernel 0.8.5: KL on by default and without bias correction; eps_high 0.4, temperature 0.9 (Triton entry).
    "liger": dict(
        eps_low=0.2, eps_high=0.4, aggregation="grpo", beta=0.04, kl="k3", temperature=0.9, clip_metrics="liger"
    ),
    # veRL 0.9: dual clip 3, token mean, cispo as an interval, clamped k3 and log-ratios.
    "verl": dict(
        eps_low=0.2,
        eps_high=0.2,
        aggregation="bnpo",
        count_rows="non_empty",
        dual_clip=3.0,
        cispo_bound="interval",
        kl="k3",
        kl_log_ratio_clamp=20.0,
        kl_clamp=10.0,
        log_ratio_clamp=20.0,
        clip_metrics="liger",
    ),
    # Tunix 0.1.7: sequence mean of token means over rows that are not empty, k1 with beta 0.04, clamped log-ratios.
    "tunix": dict(
        eps_low=0.2,
        eps_high=0.2,
        aggregation="grpo",
        count_rows="non_empty",
        beta=0.04,
        kl="k1",
        log_ratio_clamp=20.0,
        clip_metrics="liger",
    ),
    # The earlier JAX work: the temperature divides log_softmax(x)[y]; no KL; sum over the valid-token count.
    "mllm-jax": dict(eps_low=0.2, eps_high=0.2, aggregation="dapo", temperature_on="logp", clip_metrics="liger"),
}

GROUP_STD_EPS: dict[str, float] = {"trl": 1e-4, "liger": 1e-4, "verl": 1e-6, "tunix": 1e-6, "mllm-jax": 1e-4}
"""What each peer adds to the standard deviation in :func:`logitless.group_advantages`."""


def preset(name: str, **overrides: Any) -> Objective:
    """The peer's objective, with ``overrides``; see :meth:`logitless.Objective.preset`."""
    if name not in PRESETS:
        key = str(name).casefold()
        if key in checks.ALGORITHMS:
            hint = f" {name!r} is an algorithm and not a library: use {checks.ALGORITHMS[key]}."
        else:
            hint = checks.did_you_mean(key, tuple(PRESETS))
        raise ValueError(f"Objective.preset: {name!r} is not known; expected one of {', '.join(PRESETS)}.{hint}")
    checks.names(overrides, Objective)
    fields = dict(PRESETS[name])
    if overrides.get("policy", "clip") != "clip":
        fields.pop("dual_clip", None)  # belongs to the clip policy only
    if overrides.get("level") == "sequence_token" and name in ("verl", "tunix"):
        fields["sequence_log_ratio_max"] = 10.0
    if name == "verl" and (overrides.get("level") == "sequence_token" or overrides.get("policy") == "gmpo"):
        fields.pop("log_ratio_clamp")  # its GSPO and GMPO do not clamp the token's
    fields.update(overrides)
    if name == "liger" and fields.get("level", "token") != "token" and fields.get("policy", "clip") != "clip":
        raise ValueError(
            f"Objective.preset('liger'): Liger refuses policy={fields['policy']!r} at level={fields['level']!r}; "
            "TRL computes it: use preset 'trl'."
        )
    return Objective(**fields)
