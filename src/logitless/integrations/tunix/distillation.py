"""A distillation strategy for ``tunix.distillation.DistillationTrainer``, in the place of its ``LogitStrategy``: the
same loss without the logits of student and teacher. Nothing in Tunix is replaced for it.

Tunix' strategy makes at least seven ``[B, T, V]`` arrays: the logits of both models, their softmaxes in float32, their
labels as one-hot vectors and the gradient of the logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from tunix.distillation.strategies import base_strategy

from logitless import Distillation, Head, Sharding, linear_distillation_loss, linear_logprobs
from logitless.core.pytree import register, static
from logitless.core.shapes import Bool, Float, Int, PyTree
from logitless.integrations.tunix.interface import same_parameters
from logitless.integrations.tunix.placement import sharding_of
from logitless.integrations.tunix.policy_head import Peer
from logitless.integrations.tunix.tunix_model import without_head
from logitless.objectives.loss import Metric

_STRATEGY = {
    "__init__": "self student_forward_fn teacher_forward_fn labels_fn",
    "get_train_loss": "self student_model teacher_output inputs",
    "get_eval_loss": "self student_model inputs",
    "compute_loss": "self student_output teacher_output labels",
    "compute_eval_loss": "self student_output labels",
}
"""Methods of Tunix' ``BaseStrategy`` and their parameters."""


@register
@dataclasses.dataclass(frozen=True)
class Output:
    """What a model's forward function returns here: final hidden states and the head that makes logits of them."""

    hidden: Float[Array, "B T H"]
    lm_head: Head
    sharding: Sharding | None = static(None)


class DistillationStrategy(base_strategy.BaseStrategy):
    """Distillation over the whole vocabulary from hidden states, without ``[B, T, V]`` logits of either model.

    The forward functions are those of ``LogitStrategy``: each calls the model and cuts the logits along the tokens. It
    is run on a copy of the model that returns hidden states where the model returns logits, so it may cut and reorder
    tokens, and must not compute with what the model returns.

    Args:
      student_forward_fn, teacher_forward_fn: ``(model, **inputs)`` to ``[B, T, V]`` logits.
      labels_fn: ``(**inputs)`` to token ids ``[B, T]``, or to ``(ids, mask)``. Tokens that the mask leaves out have no
        loss and do not count. ``LogitStrategy`` takes one-hot labels and divides by all positions, padding included;
        ids alone do the same.
      distillation: the loss; unless given, that of ``LogitStrategy`` with ``settings``.
      settings: ``temperature``, ``alpha`` as ``LogitStrategy`` takes them.
    """

    def __init__(
        self,
        student_forward_fn: Callable[..., Peer],
        teacher_forward_fn: Callable[..., Peer],
        labels_fn: Callable[..., PyTree],
        distillation: Distillation | None = None,
        **settings: object,
    ) -> None:
        base = base_strategy.BaseStrategy
        for name, parameters in _STRATEGY.items():
            same_parameters(f"tunix.distillation BaseStrategy.{name}", getattr(base, name, None), parameters)
        if distillation is not None and settings:
            given = ", ".join(settings)
            raise TypeError(f"DistillationStrategy: distillation= and {given} were both given; leave one of them out.")
        self.distillation = Distillation.from_tunix(**settings) if distillation is None else distillation
        super().__init__(_without_logits(student_forward_fn), _without_logits(teacher_forward_fn), labels_fn)

    def compute_loss(
        self, student_output: Output, teacher_output: Output, labels: object
    ) -> tuple[Array, dict[str, Array]]:
        """The loss, and the metrics that ``LogitStrategy`` has; with ``alpha=1`` no hard loss is computed."""
        targets, mask = _targets(labels)
        s, t, d = student_output, teacher_output, self.distillation
        loss, found = linear_distillation_loss(
            s.hidden, s.lm_head, t.hidden, t.lm_head, targets, mask=mask, distillation=d, sharding=s.sharding
        )
        divergence = _mean(found["divergence"])
        squared = d.temperature**2 if d.temperature_squared and d.temperature is not None else 1.0
        metrics = {"distill/soft_loss": squared * divergence, "distill/kl_div": divergence}
        if "hard_loss" in found:
            metrics["distill/hard_loss"] = _mean(found["hard_loss"])
        metrics["distill/teacher_loss"] = _cross_entropy(t, targets, mask)
        return loss, metrics

    def compute_eval_loss(self, student_output: Output, labels: object) -> tuple[Array, dict[str, Array]]:
        """The student's cross entropy with the labels."""
        return _cross_entropy(student_output, *_targets(labels)), {}


def _without_logits(forward: Callable[..., Peer]) -> Callable[..., Output]:
    """``forward``, run on a model without a head."""

    def hidden_and_head(model: object, **inputs: object) -> Output:
        body, head = without_head(model)
        call = head.arguments(forward(body, **inputs))
        hidden, width = call["hidden"], head.weight.shape[1 if head.layout == "vh" else 0]
        if hidden.ndim != 3 or hidden.shape[-1] != width:
            raise ValueError(
                f"DistillationStrategy: the forward function returned an array of shape {hidden.shape} where the model "
                f"returns hidden states [B, T, {width}]; it may cut tokens and nothing else."
            )
        return Output(hidden, call["lm_head"], sharding_of(head, hidden.shape[0]))

    return hidden_and_head


def _targets(labels: object) -> tuple[Int[Array, "B T"], Bool[Array, "B T"] | None]:
    """Token ids and the mask out of what ``labels_fn`` has returned."""
    targets, mask = labels if isinstance(labels, tuple) else (labels, None)
    if targets.ndim != 2 or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(
            f"DistillationStrategy: labels_fn returned labels of shape {targets.shape} and dtype {targets.dtype}; "
            "expected token ids [B, T], or (ids, mask). One-hot labels [B, T, V] are what this strategy saves: return "
            "the ids that they are made of, and the mask beside them."
        )
    return targets, None if mask is None else mask != 0


def _cross_entropy(output: Output, targets: Array, mask: Array | None) -> Array:
    """The mean of ``-logp`` over live tokens, at temperature one."""
    logp = linear_logprobs(output.hidden, output.lm_head, targets, mask=mask, sharding=output.sharding).logp
    count = logp.size if mask is None else jnp.maximum(jnp.sum(mask), 1)
    return -jnp.sum(logp) / count


def _mean(metric: Metric) -> Array:
    return metric.sum / jnp.maximum(metric.count, 1)
