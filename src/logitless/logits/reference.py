"""Dense plain JAX over logits ``[N, V]``, differentiated by JAX: the baseline that every other backend is held to.

Float32 copies of the logits may live in memory; nothing here is hand-derived but the statistics' formulas.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from logitless.stats import NEG_INF, TokenStats, finish, row_sums
from logitless.transform import LogitTransform, forward


def column_ids(width: int) -> Array:
    """``[1, V]`` column numbers, to compare with ``targets[:, None]`` (no gather, no scatter)."""
    return jnp.arange(width, dtype=jnp.int32)[None, :]


def transformed(x: Array, transform: LogitTransform, vocab_size: int, ids: Array) -> Array:
    """``z`` in float32 from the raw logits of the columns ``ids``; padded columns at ``-inf``."""
    return jnp.where(ids < vocab_size, forward(x, transform), NEG_INF)


def valid_targets(targets: Array, vocab_size: int) -> Array:
    """Which targets name a column."""
    return (targets >= 0) & (targets < vocab_size)


def masked_stats(stats: TokenStats, live: Array | None) -> TokenStats:
    """Zeros where a token is not live."""
    if live is None:
        return stats
    return stats.map(lambda s: jnp.where(live, s, jnp.zeros((), s.dtype)))


def token_stats(
    logits: Array, targets: Array, transform: LogitTransform, vocab_size: int, live: Array | None
) -> TokenStats:
    """Statistics of flattened tokens.

    ``logits [N, V]`` in any float dtype, ``targets [N]`` int32, ``transform`` with a scalar or ``[N]`` temperature,
    ``live [N]`` bool or ``None`` for all. Returns ``[N]`` statistics.
    """
    if live is not None:
        # A NaN in a dead row must reach neither the statistics nor, through 0 * NaN, a gradient.
        logits = jnp.where(live[:, None], logits, jnp.zeros((), logits.dtype))
    ids = column_ids(logits.shape[-1])
    if vocab_size < logits.shape[-1]:
        # Nor a NaN in a padded column, through the slope of the softcap.
        logits = jnp.where(ids < vocab_size, logits, jnp.zeros((), logits.dtype))
    z = transformed(logits, transform.column(), vocab_size, ids)
    return masked_stats(finish(row_sums(z, ids == targets[:, None]), valid_targets(targets, vocab_size)), live)
