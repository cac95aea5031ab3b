"""The float64 oracle: token statistics, losses and their gradients in plain NumPy.

Written from the formulas (docs/losses.md) and sharing no code with the backends or with ``logitless.objectives``, so
that agreement between the two means something. Gradients are hand-derived; there is no autodiff here. Every input,
bfloat16 included, is taken at its exact value and computed with in float64. A Python ``0.9`` is the float64 0.9: pass
``numpy.float32(0.9)`` where a float32 computation is to be judged to its last bit.
"""

from logitless.oracle.advantages import group_advantages, optimal_token_advantages
from logitless.oracle.distillation_loss import distillation_loss
from logitless.oracle.divergences import divergence, divergence_vjp, sparse_divergence, sparse_divergence_vjp
from logitless.oracle.end_to_end import grpo_loss, linear_grpo_loss
from logitless.oracle.linear import linear_token_stats, linear_token_stats_vjp
from logitless.oracle.losses import policy_loss, policy_loss_grad
from logitless.oracle.rows import linear_rows, logits_rows
from logitless.oracle.selected_tokens import (
    selected_logprobs,
    selected_logprobs_vjp,
    support_token_stats,
    support_token_stats_vjp,
    top_k,
)
from logitless.oracle.token_stats import TokenStats, token_stats, token_stats_vjp

__all__ = [
    "TokenStats",
    "distillation_loss",
    "divergence",
    "divergence_vjp",
    "group_advantages",
    "grpo_loss",
    "linear_grpo_loss",
    "linear_rows",
    "linear_token_stats",
    "linear_token_stats_vjp",
    "logits_rows",
    "optimal_token_advantages",
    "policy_loss",
    "policy_loss_grad",
    "selected_logprobs",
    "selected_logprobs_vjp",
    "sparse_divergence",
    "sparse_divergence_vjp",
    "support_token_stats",
    "support_token_stats_vjp",
    "token_stats",
    "token_stats_vjp",
    "top_k",
]
