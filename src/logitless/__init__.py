"""GRPO-family RL losses for JAX that never build the logits."""

from logitless._version import __version__
from logitless.explain import explain
from logitless.head.api import linear_grpo_loss, linear_logprobs
from logitless.logits.api import grpo_loss, logprobs
from logitless.objectives.advantages import group_advantages
from logitless.objectives.aggregate import dapo_denominator
from logitless.objectives.api import policy_loss
from logitless.objectives.metrics import Metric, metric_values, reduce_metrics
from logitless.objectives.objective import Objective
from logitless.parallel.spec import Sharding
from logitless.planning.head import plan
from logitless.stats import TokenStats
from logitless.validation import validate_targets

__all__ = [
    "Metric",
    "Objective",
    "Sharding",
    "TokenStats",
    "__version__",
    "dapo_denominator",
    "explain",
    "group_advantages",
    "grpo_loss",
    "linear_grpo_loss",
    "linear_logprobs",
    "logprobs",
    "metric_values",
    "plan",
    "policy_loss",
    "reduce_metrics",
    "validate_targets",
]
