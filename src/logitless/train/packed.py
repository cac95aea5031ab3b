"""The policy update on packed rows: micro-batches without padding, and none for sequences that teach nothing.

    rows [N, S, L]   N slices of S rows of L slots: the most that a batch could need, whatever it does need
    learning, used   how many of them hold something: traced, so that a step with fewer compiles nothing anew

A micro-batch is as many slices as make ``train.microbatch`` rows; what is left at the end goes a slice
(``train.microbatch_tail`` rows) at a time, so that a large micro-batch, which is the faster one per row, leaves little
empty. Gradients are summed over the first ``learning`` slices. The sequences that can have none (``train.skip_rows``)
are left out, or with ``train.report_skipped`` stand in the slices up to ``used``, which go forward only. All
denominators are those of the whole batch (update.py): what is left out changes no gradient.

Metrics that are known without the skipped sequences are those of the whole batch: live and zero-gradient tokens, clip
fractions. Means of the policy's statistics (entropy, log-probability, ratio, KL) are over the sequences that went
through the model: all of them with ``train.report_skipped``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from logitless.core.pytree import register, tree_of, with_leaves
from logitless.core.shapes import Bool, Int
from logitless.data.packing import Packed, pack, unpack
from logitless.data.rows_with_gradient import rows_with_gradient
from logitless.objectives.loss import Metric, Metrics, reduce_metrics
from logitless.objectives.objective import Objective
from logitless.train.config import TrainConfig, needs_rollout
from logitless.train.lora import LoRA
from logitless.train.model import ModelConfig, Params, Parts, model_pass
from logitless.train.update import (
    Batch,
    Policy,
    State,
    apply_gradients,
    make_part_logp,
    make_part_loss,
    whole_batch_counts,
)


@register
@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """One update's rows, packed; see the module."""

    rows: Packed
    """Arrays have shape ``[N, S, L]``; ``slots`` are flattened over all rows."""
    learning: Int[Array, ""]
    used: Int[Array, ""]
    mask: Bool[Array, "B C"]
    """Mask for the whole batch, including skipped sequences."""
    learned: Bool[Array, "B"]
    """Flags for sequences in the gradient."""


def slots_of(config: TrainConfig) -> int:
    """Length of a packed row."""
    r = config.rollout
    return config.train.pack_length or r.max_prompt_tokens + r.max_completion_tokens


def _slice_rows(config: TrainConfig) -> int:
    return config.train.microbatch_tail or config.train.microbatch


def _slices(config: TrainConfig, sequences: int) -> int:
    """The most slices that ``sequences`` can take, skipped ones in slices of their own; a micro-batch at least."""
    rows = max(sequences, config.train.microbatch)
    return -(-rows // _slice_rows(config)) + config.train.report_skipped


def pack_batch(config: TrainConfig, objective: Objective, batch: Batch, skip: bool) -> PackedBatch:
    """Pack a batch of host arrays; ``skip``: leave out (or only report on) what can have no gradient."""
    t = config.train
    mask: Any = np.asarray(batch.mask)
    given = {"advantages": batch.advantages, "old_logp": batch.old_logp, "ref_logp": batch.ref_logp}
    if needs_rollout(objective):
        given["rollout_logp"] = batch.rollout_logp
    arrays: dict[str, Any] = {k: np.asarray(v) for k, v in given.items() if v is not None}
    keep: Any = np.ones(len(mask), bool)
    if skip:
        keep = np.asarray(_rows_with_gradient(objective, mask=mask, **arrays))
    n, size, length = _slices(config, len(mask)), _slice_rows(config), slots_of(config)
    if batch.support is not None:
        arrays["support"] = np.asarray(batch.support)
    fill = partial(
        pack, batch.prompt, batch.prompt_valid, batch.completion, mask, length=length,
        share_prompts=t.packing == "shared", **arrays,
    )  # fmt: skip
    parts = [fill(keep=keep), *([fill(keep=~keep)] if skip and t.report_skipped else [])]
    ends = np.cumsum([-(-p.tokens.shape[0] // size) for p in parts])
    rows = _joined(parts, [0, *ends[:-1] * size], n * size)
    shaped = jax.tree.map(lambda x: x.reshape(n, size, *x.shape[1:]), _bare(rows))
    return tree_of(
        PackedBatch,
        rows=dataclasses.replace(shaped, slots=rows.slots),
        learning=np.int32(ends[0]),
        used=np.int32(ends[-1]),
        mask=mask,
        learned=keep,
    )


_rows_with_gradient = jax.jit(rows_with_gradient)


def _bare(rows: Packed) -> Packed:
    """Without ``slots``, which are no array of slots."""
    return with_leaves(rows, slots=None)


def _joined(parts: list[Packed], starts: list[int], count: int) -> Packed:
    """Packed rows one after the other, each part from its start on, in ``count`` rows."""
    length = parts[0].tokens.shape[1]

    def join(*xs: np.ndarray) -> np.ndarray:
        out = np.zeros((count, *xs[0].shape[1:]), xs[0].dtype)
        for x, start in zip(xs, starts, strict=True):
            out[start : start + len(x)] = x
        return out

    slots = np.full_like(parts[0].slots, -1)
    for part, start in zip(parts, starts, strict=True):
        slots = np.where(part.slots >= 0, part.slots + start * length, slots)
    return dataclasses.replace(jax.tree.map(join, *map(_bare, parts)), slots=slots.astype(np.int32))


def packed_parts(
    lora: LoRA | None,
    model: ModelConfig,
    rows: Packed,
    compute_dtype: Any,
    layout: jax.sharding.Sharding | None = None,
) -> Parts:
    """Hidden states of one micro-batch."""
    return model_pass(
        model, rows.tokens, rows.positions, rows.segment_ids > 0, sees=rows.attention_mask(), lora=lora,
        compute_dtype=compute_dtype, layout=layout,
    )  # fmt: skip


def _micro_batch(rows: Packed, first: Array | int, count: int) -> Packed:
    """The rows of ``count`` slices. Neighbours are the same row of different slices: a device's rows stay its own."""

    def read(x: Array) -> Array:
        part = jax.lax.dynamic_slice_in_dim(x, first, count)
        return part.swapaxes(0, 1).reshape(-1, *x.shape[2:])

    return jax.tree.map(read, _bare(rows))


def _written(slices: Array, part: Array, first: Array, count: int) -> Array:
    """``slices`` with the results of a micro-batch written in place."""
    back = part.reshape(-1, count, part.shape[-1]).swapaxes(0, 1)
    return jax.lax.dynamic_update_slice_in_dim(slices, back, first, axis=0)


def _in_micro_batches(
    config: TrainConfig, first: Array | int, last: Array, body: Callable[[Array, int, Any], Any], carry: Any
) -> Any:
    """``carry = body(slice, count, carry)`` for the slices from ``first`` to ``last``: whole micro-batches, then the
    slices that are left."""
    count = config.train.microbatch // _slice_rows(config)
    whole = (last - first) // count
    carry = jax.lax.fori_loop(0, whole, lambda i, c: body(first + i * count, count, c), carry)
    if count > 1:
        carry = jax.lax.fori_loop(first + whole * count, last, lambda i, c: body(i, 1, c), carry)
    return carry


def make_packed_score(config: TrainConfig, model: ModelConfig, objective: Objective) -> Callable[..., Array]:
    """``score(params, lora, packed)``: log-probabilities ``[B, C]`` as the packed loss computes them."""
    logp_of = make_part_logp(config, model, objective, packed_parts)

    def score(params: Params, lora: LoRA | None, batch: PackedBatch) -> Array:
        def one(i: Array, count: int, logp: Array) -> Array:
            return _written(logp, logp_of(params, lora, _micro_batch(batch.rows, i, count)), i, count)

        logp = _in_micro_batches(config, 0, batch.used, one, jnp.zeros(batch.rows.tokens.shape, jnp.float32))
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), _bare(batch.rows))
        return unpack(dataclasses.replace(rows, slots=batch.rows.slots), logp.reshape(rows.tokens.shape))

    return score


def make_packed_update(
    config: TrainConfig, model: ModelConfig, objective: Objective, optimizer: optax.GradientTransformation
) -> Callable[..., tuple[State, dict[str, Any]]]:
    """``update(state, frozen, packed)``, as :func:`logitless.train.update.make_update` on padded rows."""
    loss_of, add = make_part_loss(config, model, objective, packed_parts)

    def update(state: State, frozen: Policy, batch: PackedBatch) -> tuple[State, dict[str, Any]]:
        counts = whole_batch_counts(objective, batch.mask)

        def learn(i: Array, count: int, total: tuple[Array, Metrics, Policy]) -> tuple[Array, Metrics, Policy]:
            loss, metrics, grads = add(total[2], state.trained, frozen, _micro_batch(batch.rows, i, count), counts)
            return total[0] + loss, reduce_metrics([total[1], metrics]), grads

        def metrics_of(i: Array | int, count: int) -> Metrics:
            # A constant loss to all that asks: no gradient is taken, and the backward pass does not exist.
            return loss_of(state.trained, frozen, _micro_batch(batch.rows, i, count), counts)[1]

        nothing = {k: _nothing(k) for k in jax.eval_shape(lambda: metrics_of(0, 1))}
        zero = (jnp.float32(0.0), nothing, jax.tree.map(jnp.zeros_like, state.trained))
        loss, metrics, grads = _in_micro_batches(config, 0, batch.learning, learn, zero)
        if config.train.report_skipped:
            metrics = _in_micro_batches(
                config, batch.learning, batch.used, lambda i, n, m: reduce_metrics([m, metrics_of(i, n)]), metrics
            )
        return apply_gradients(optimizer, state, loss, grads, _of_the_whole(config, objective, batch, metrics))

    return update


def _nothing(name: str) -> Metric:
    """A metric that nothing went into."""
    extreme = {"_min": jnp.inf, "_max": -jnp.inf}.get(name[-4:], 0.0)
    return Metric(jnp.float32(extreme), jnp.float32(0.0))


def _of_the_whole(config: TrainConfig, objective: Objective, batch: PackedBatch, metrics: Metrics) -> Metrics:
    """Statistics for skipped sequences without the model: tokens are live, and nothing was clipped or moved."""
    mask, rows = batch.mask, batch.rows
    out = dict(metrics)
    if not config.train.report_skipped:
        skipped = mask & ~batch.learned[:, None]
        tokens = jnp.sum(skipped, dtype=jnp.float32)
        sequences = jnp.sum(jnp.any(skipped, axis=1), dtype=jnp.float32)
        none = out["zero_gradient_tokens"]
        out["zero_gradient_tokens"] = Metric(none.sum + tokens, none.count + tokens)
        by_sequence = objective.level != "token" and objective.clip_metrics == "trl"
        for name in (k for k in out if k.startswith("clip_fraction")):
            found, more = out[name], sequences if by_sequence else tokens
            if name.endswith(("_min", "_max")):  # over sequences: a skipped sequence is never clipped
                extreme = jnp.minimum if name.endswith("_min") else jnp.maximum
                known, more = jnp.where(sequences > 0, extreme(found.sum, 0.0), found.sum), sequences
            else:
                known = found.sum
            out[name] = Metric(known, found.count + more)
    out["live_token_share"] = Metric(jnp.sum(mask, dtype=jnp.float32), jnp.float32(mask.size))
    out["update_rows"] = Metric(jnp.sum(batch.learned, dtype=jnp.float32), jnp.float32(len(mask)))
    read = jnp.arange(rows.tokens.shape[0]) < batch.learning
    slots = jnp.sum(jnp.where(read[:, None, None], rows.segment_ids > 0, False), dtype=jnp.float32)
    out["packed_fill"] = Metric(slots, batch.learning * jnp.float32(np.prod(rows.tokens.shape[1:])))
    return out
