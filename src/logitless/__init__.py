"""GRPO-family RL losses for JAX that never build the logits."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.argv[:1] == ["-m"] and "logitless" in sys.orig_argv:  # `python -m logitless` imports the package first
    from logitless.lab import signals

    sys.excepthook = signals.one_line

from logitless._version import __version__
from logitless.api import (
    divergence,
    grpo_loss,
    linear_distillation_loss,
    linear_divergence,
    linear_grpo_loss,
    linear_logprobs,
    linear_top_k,
    logprobs,
)
from logitless.core.loss_stats import with_stats
from logitless.core.options import Head, Options
from logitless.core.stats import SelectedStats, TokenStats
from logitless.core.top_k import TopK
from logitless.core.validation import validate_targets
from logitless.data.group_advantages import group_advantages
from logitless.data.next_tokens import next_tokens
from logitless.data.optimal_token_advantages import optimal_token_advantages
from logitless.data.packing import Packed, pack, unpack
from logitless.data.rows_with_gradient import rows_with_gradient
from logitless.mesh.sharding import Sharding
from logitless.objectives.adaptive_entropy import AdaptiveEntropy
from logitless.objectives.aggregate import dapo_denominator, loss_denominator
from logitless.objectives.correction import entropy_denominator
from logitless.objectives.distillation import Distillation
from logitless.objectives.inputs import UnusedArgumentWarning
from logitless.objectives.loss import LossAux, Metric, metric_values, reduce_metrics
from logitless.objectives.objective import Objective
from logitless.objectives.policy_loss import policy_loss

if TYPE_CHECKING:
    from logitless import oracle
    from logitless.core.explanation import explain
    from logitless.lab.plan.plan import plan

__all__ = [
    "AdaptiveEntropy",
    "Distillation",
    "Head",
    "LossAux",
    "Metric",
    "Objective",
    "Options",
    "Packed",
    "SelectedStats",
    "Sharding",
    "TokenStats",
    "TopK",
    "UnusedArgumentWarning",
    "__version__",
    "dapo_denominator",
    "divergence",
    "entropy_denominator",
    "explain",
    "group_advantages",
    "grpo_loss",
    "linear_distillation_loss",
    "linear_divergence",
    "linear_grpo_loss",
    "linear_logprobs",
    "linear_top_k",
    "logprobs",
    "loss_denominator",
    "metric_values",
    "next_tokens",
    "optimal_token_advantages",
    "oracle",
    "pack",
    "plan",
    "policy_loss",
    "reduce_metrics",
    "rows_with_gradient",
    "unpack",
    "validate_targets",
    "with_stats",
]

_LATER = {"explain": "logitless.core.explanation", "plan": "logitless.lab.plan.plan", "oracle": "logitless.oracle"}
"""What a training step does not need is loaded when it is first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'logitless' has no attribute {name!r}")
    module = importlib.import_module(_LATER[name])
    value = module if name == "oracle" else getattr(module, name)
    globals()[name] = value  # in the place of the submodule of the same name
    return value


def __dir__() -> list[str]:
    return __all__
