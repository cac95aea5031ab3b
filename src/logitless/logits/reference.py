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


def transformed(x: Array, transform: LogitTransform, vocab_size: int) -> Array:
    """``z [N, V]`` in float32 from raw logits, padded columns at ``-inf``."""
    z = forward(x, transform.column())
    width = x.shape[-1]
    return z if vocab_size == width else jnp.where(column_ids(width) < vocab_size, z, NEG_INF)


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
    z = transformed(logits, transform, vocab_size)
    is_target = column_ids(logits.shape[-1]) == targets[:, None]
    return masked_stats(finish(row_sums(z, is_target), valid_targets(targets, vocab_size)), live)
