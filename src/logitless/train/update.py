"""The policy update: loss, gradients summed over micro-batches, and one optimiser step, as one jitted function.

    hidden = model(prompt + completion)                only the positions that predict completion tokens go on
    loss   = sum over micro-batches of linear_grpo_loss(..., denominator = the whole update's)
    theta  = AdamW(clip(d loss / d theta))             unchanged where the loss or the gradient is not finite

Every micro-batch is divided by the counts of the whole update, so the split changes nothing. On the first update after
a rollout ``old_logp`` is ``None``: the ratio is the policy over itself, 1 to the bit. Later ones compare with the
log-probabilities that :func:`make_score` gave before the first update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from logitless.core.pytree import register, with_leaves
from logitless.core.shapes import Bool, Float, Int
from logitless.objectives.aggregate import default_denominator, sequences_of
from logitless.objectives.correction import entropy_denominator
from logitless.objectives.loss import Metrics, reduce_metrics
from logitless.objectives.objective import Objective
from logitless.train import train_mesh
from logitless.train.backward import add_gradients
from logitless.train.config import TrainConfig, needs_rollout
from logitless.train.head_calls import make_head_logp, make_head_loss
from logitless.train.lora import LoRA
from logitless.train.model import ModelConfig, Params, Parts, lm_head, model_pass, positions_of


@register
@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of one update. Prompts are padded on the left to ``P`` columns, completions on the right to ``C``."""

    prompt: Int[Array, "B P"]
    prompt_valid: Bool[Array, "B P"]
    completion: Int[Array, "B C"]
    mask: Bool[Array, "B C"]
    advantages: Float[Array, "B"]
    rollout_logp: Float[Array, "B C"] | None = None
    old_logp: Float[Array, "B C"] | None = None
    ref_logp: Float[Array, "B C"] | None = None
    support: Int[Array, "B C K"] | None = None

    @property
    def targets(self) -> Int[Array, "B C"]:
        return self.completion

    def loss_arrays(self) -> dict[str, Array | None]:
        """The arguments that a loss takes by name."""
        names = ("advantages", "mask", "old_logp", "ref_logp", "rollout_logp", "support")
        return {k: getattr(self, k) for k in names}

    def rows(self, start: int, count: int) -> Batch:
        """``count`` rows from ``start`` on."""
        return jax.tree.map(lambda x: x[start : start + count], self)

    def with_logp(self, **logp: Array | np.ndarray | None) -> Batch:
        """A copy with other log-probabilities."""
        return with_leaves(self, **logp)


@register
@dataclasses.dataclass(frozen=True)
class Policy:
    """The weights, split into what is trained and what is not: with LoRA, the low-rank maps and the base."""

    params: Params | None
    lora: LoRA | None


@register
@dataclasses.dataclass(frozen=True)
class State:
    """What an update changes, and all that a checkpoint must hold."""

    trained: Policy
    optimizer: Any


def whole_policy(trained: Policy, frozen: Policy) -> tuple[Params, LoRA | None]:
    """Base weights and LoRA of the policy."""
    params = trained.params if trained.params is not None else frozen.params
    assert params is not None
    return params, trained.lora


def learning_rate(config: TrainConfig) -> Callable[[Any], Any]:
    """The rate of the n-th optimiser update: it is the training step that counts, not the updates inside one."""
    t = config.train
    inner = t.inner_epochs * t.minibatches
    decays = {
        "constant": lambda x: 1.0,
        "linear": lambda x: 1.0 - x,
        "cosine": lambda x: 0.5 * (1.0 + jnp.cos(jnp.pi * x)),
    }

    def rate(count: Any) -> Any:
        step = count // inner
        warm = jnp.minimum((step + 1) / max(t.warmup_steps, 1), 1.0)
        progress = jnp.clip((step - t.warmup_steps) / max(t.steps - t.warmup_steps, 1), 0.0, 1.0)
        return t.learning_rate * warm * decays[t.schedule](progress)

    return rate


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW behind a clip of the gradient's global norm; its moments are in the master weights' dtype."""
    t = config.train
    return optax.chain(
        optax.clip_by_global_norm(t.clip_norm),
        optax.adamw(learning_rate(config), b1=t.adam_b1, b2=t.adam_b2, eps=t.adam_eps, weight_decay=t.weight_decay),
    )


def completion_parts(
    lora: LoRA | None,
    model: ModelConfig,
    batch: Batch,
    compute_dtype: Any,
    layout: jax.sharding.Sharding | None = None,
) -> Parts:
    """Hidden states that predict the completion's tokens: those of the last prompt token and of all but the last."""
    tokens = jnp.concatenate([batch.prompt, batch.completion[:, :-1]], axis=1)
    valid = jnp.concatenate([batch.prompt_valid, batch.mask[:, :-1]], axis=1)
    parts = model_pass(model, tokens, positions_of(valid), valid, lora=lora, compute_dtype=compute_dtype, layout=layout)
    return parts.then(lambda hidden: hidden[:, batch.prompt.shape[1] - 1 :])


def whole_batch_counts(objective: Objective, mask: Bool[Array, "B C"]) -> dict[str, Array]:
    """Denominators of an update, whatever micro-batches it is cut into.

    With ``top_entropy`` or ``sequence_error_max`` an update is one micro-batch (config_check.py), whose loss counts
    what it keeps.
    """
    if objective.sequence_error_max is not None:
        return {}
    counts = {"denominator": default_denominator(objective, sequences_of(mask, None))}
    if objective.entropy_coef is not None and objective.top_entropy is None:
        counts["entropy_denominator"] = entropy_denominator(objective, mask)
    return counts


def apply_gradients(
    optimizer: optax.GradientTransformation, state: State, loss: Array, grads: Policy, metrics: Metrics
) -> tuple[State, dict[str, Any]]:
    """An optimiser step, skipped if loss or gradient is not finite; returns metrics."""
    norm = optax.global_norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    steps, moments = optimizer.update(grads, state.optimizer, state.trained)
    new = State(optax.apply_updates(state.trained, steps), moments)
    state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
    return state, dict(loss=loss, grad_norm=norm, finite=finite, metrics=metrics)


def _micro_batches(config: TrainConfig, batch: Batch) -> tuple[int, Batch]:
    """``(n, batch)`` with the rows as ``[n, rows / n, ...]``."""
    rows = batch.mask.shape[0]
    n = rows // (config.train.microbatch or rows)
    return n, jax.tree.map(lambda x: x.reshape(n, rows // n, *x.shape[1:]), batch)


def make_part_logp(
    config: TrainConfig, model: ModelConfig, objective: Objective, parts_of: Callable[..., Parts]
) -> Callable[..., Array]:
    """``logp(params, lora, part)`` of one micro-batch, padded or packed: ``parts_of`` is the model's pass over it."""
    head_logp = make_head_logp(config, objective)
    dtype, layout = jnp.dtype(config.model.compute_dtype), train_mesh.rows_layout(config)

    def logp_of(params: Params, lora: LoRA | None, part: Any) -> Array:
        hidden = parts_of(lora, model, part, dtype, layout).hidden(params, lora, remat=False)
        support = part.loss_arrays().get("support")
        return head_logp(hidden, lm_head(params, model).astype(dtype), part.targets, part.mask, support)

    return logp_of


def make_part_loss(
    config: TrainConfig, model: ModelConfig, objective: Objective, parts_of: Callable[..., Parts]
) -> tuple[Callable[..., tuple[Array, Metrics]], Callable[..., tuple[Array, Metrics, Policy]]]:
    """For a micro-batch, like :func:`make_part_logp`: ``loss(trained, frozen, part, counts)`` with metrics, and
    ``add(total, trained, frozen, part, counts)``, which adds gradients to ``total``."""
    head_loss = make_head_loss(config, objective)
    dtype, layout = jnp.dtype(config.model.compute_dtype), train_mesh.rows_layout(config)

    def on_top(part: Any, counts: dict[str, Any]) -> Callable[[Array, Array], tuple[Array, Metrics]]:
        arrays = {**part.loss_arrays(), **counts}
        return lambda hidden, head: head_loss(hidden, head.astype(dtype), part.targets, **arrays)

    def loss_of(trained: Policy, frozen: Policy, part: Any, counts: dict[str, Any]) -> tuple[Array, Metrics]:
        params, lora = whole_policy(trained, frozen)
        hidden = parts_of(lora, model, part, dtype, layout).hidden(params, lora, config.model.remat)
        return on_top(part, counts)(hidden, lm_head(params, model))

    def add(
        total: Policy, trained: Policy, frozen: Policy, part: Any, counts: dict[str, Any]
    ) -> tuple[Array, Metrics, Policy]:
        if not config.model.remat:  # what the layers keep for their backward pass is kept by differentiating the scan
            (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(trained, frozen, part, counts)
            return loss, metrics, jax.tree.map(jnp.add, total, grads)
        params, lora = whole_policy(trained, frozen)
        parts = parts_of(lora, model, part, dtype, layout)
        sums = (total.params, total.lora)
        loss, metrics, sums = add_gradients(sums, params, lora, model, parts, on_top(part, counts))
        return loss, metrics, Policy(*sums)

    return loss_of, add


def make_score(config: TrainConfig, model: ModelConfig, objective: Objective) -> Callable[..., Array]:
    """``score(params, lora, batch)``: log-probabilities ``[B, C]`` of the completions, as the loss computes them."""
    logp_of = make_part_logp(config, model, objective, completion_parts)

    def score(params: Params, lora: LoRA | None, batch: Batch) -> Array:
        n, parts = _micro_batches(config, batch)
        if n == 1:
            return logp_of(params, lora, batch)
        return jax.lax.map(lambda part: logp_of(params, lora, part), parts).reshape(batch.mask.shape)

    return score


def make_update(
    config: TrainConfig, model: ModelConfig, objective: Objective, optimizer: optax.GradientTransformation
) -> Callable[..., tuple[State, dict[str, Any]]]:
    """``update(state, frozen, batch)`` gives the new state, and loss, gradient norm, metrics and ``finite``."""
    _, add = make_part_loss(config, model, objective, completion_parts)

    def update(state: State, frozen: Policy, batch: Batch) -> tuple[State, dict[str, Any]]:
        counts = whole_batch_counts(objective, batch.mask)
        if not needs_rollout(objective):
            batch = batch.with_logp(rollout_logp=None)
        n, parts = _micro_batches(config, batch)
        zero = jax.tree.map(jnp.zeros_like, state.trained)
        if n == 1:
            loss, metrics, grads = add(zero, state.trained, frozen, batch, counts)
        else:

            def one(total: tuple[Array, Policy], part: Batch) -> tuple[tuple[Array, Policy], Metrics]:
                loss, metrics, grads = add(total[1], state.trained, frozen, part, counts)
                return (total[0] + loss, grads), metrics

            (loss, grads), stacked = jax.lax.scan(one, (jnp.float32(0.0), zero), parts)
            metrics = reduce_metrics([jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(n)])
        return apply_gradients(optimizer, state, loss, grads, metrics)

    return update
