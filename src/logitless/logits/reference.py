"""Dense plain JAX over logits ``[N, V]``, differentiated by JAX: the baseline that every other backend is held to.

Float32 copies of the logits may live in memory; nothing here is hand-derived but the statistics' formulas.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from logitless.backend import Cost, Way
from logitless.problem import LogitsProblem, Loss
from logitless.rows import column_ids, transformed, valid_targets
from logitless.stats import NEG_INF, TokenStats, masked_stats


def token_stats(p: LogitsProblem) -> TokenStats:
    """Statistics ``[N]`` of flattened tokens: ``logits [N, V]`` in any float dtype, ``targets [N]`` int32."""
    x, zero = p.logits, jnp.zeros((), p.logits.dtype)
    if p.live is not None:
        # A NaN in a dead row must reach neither the statistics nor, through 0 * NaN, a gradient.
        x = jnp.where(p.live[:, None], x, zero)
    ids, vocab_size = column_ids(x.shape[-1]), p.call.vocab_size
    if vocab_size < x.shape[-1]:
        # Nor a NaN in a padded column, through the slope of the softcap.
        x = jnp.where(ids < vocab_size, x, zero)
    z = transformed(x, p.transform.column(), vocab_size, ids)
    stats = leading_stats(z, ids == p.targets[:, None])
    valid = valid_targets(p.targets, vocab_size)
    known = stats.map(lambda s: s if s.dtype == jnp.bool_ else jnp.where(valid, s, jnp.nan))
    return masked_stats(dataclasses.replace(known, is_top1=stats.is_top1 & valid), p.live)


def leading_stats(z: Array, is_target: Array) -> TokenStats:
    """Statistics of rows ``z [N, V]``, relative to each row's leading column ``j``, which no sum contains.

        R = sum_{v != j} exp(z_v - z_j)      lse = z_j + log1p(R)
        entropy = log1p(R) + sum_{v != j} exp(z_v - z_j) (z_j - z_v) / (1 + R)

    Every term is as small as what it stands for, so that what JAX makes of it keeps its digits in collapsed rows too,
    where ``log(1 + R)`` is 0 and the leading column's gradient would be lost.
    """
    is_top = column_ids(z.shape[-1]) == jax.lax.stop_gradient(jnp.argmax(z, axis=-1))[:, None]
    top = jnp.sum(jnp.where(is_top, z, 0.0), axis=-1)
    shifted = jnp.where(is_top, NEG_INF, z - top[:, None])
    e = jnp.exp(shifted)
    finite = jnp.where(e > 0, shifted, 0.0)  # so that neither the value nor the gradient has 0 * -inf
    rest = jnp.sum(e, axis=-1)
    log_total = jnp.log1p(rest)
    lead = jnp.sum(jnp.where(is_target & ~is_top, z - top[:, None], 0.0), axis=-1)
    logp = lead - log_total
    return TokenStats(
        logp=logp,
        entropy=log_total - jnp.sum(e * finite, axis=-1) / (1.0 + rest),
        lse=top + log_total,
        max_logit=top,
        log_sum_p2=jnp.log1p(jnp.sum(e * e, axis=-1)) - 2.0 * log_total,
        is_top1=lead >= 0,
        max_logp=-log_total,
    )


@dataclasses.dataclass(frozen=True)
class Reference:
    """The dense backend; JAX differentiates :meth:`statistics`, so it has no passes of its own."""

    name: ClassVar[str] = "reference"
    kernels: ClassVar[str | None] = None
    in_forward: ClassVar[bool] = False

    def check(self, p: Any, columns_apart: bool) -> None:
        """It serves everything."""

    def describe(self, p: Any, way: Way) -> Cost:
        """What XLA makes of it is not known; ``p`` has arrays or shapes."""
        size = p.n * p.logits.shape[-1] * p.logits.dtype.itemsize
        moved = f"up to XLA; at least {3 * size:,} B"
        return Cost("dense plain JAX, differentiated by JAX", "0", moved, counts=(0, 0, 0))

    def statistics(self, p: LogitsProblem, loss: Loss | None = None) -> tuple[TokenStats, None]:
        """Statistics of flattened tokens."""
        return token_stats(p if loss is None else dataclasses.replace(p, live=loss.inputs.mask)), None
