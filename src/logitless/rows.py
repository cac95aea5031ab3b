"""Plain-JAX passes over rows of logits ``x [C, V]``: what stands between the head's matmuls, and the logits level.

    sums(x, p)               -> RowSums        over the columns that are here
    statistics(x, p)         -> TokenStats     one pass (a maximum, then sums, where XLA does not fuse them)
    dx(x, p, stats, g)       -> [C, V]         one pass: reads x, writes dx, over x where it has its dtype

``p`` is the problem of these rows, of either level: its targets, transform and vocabulary. On a CPU the passes take a
slice of columns at a time (``tiles.column_tile``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.problem import LogitsProblem, Problem
from logitless.stats import (
    NEG_INF,
    RowSums,
    StatCotangents,
    TokenStats,
    dz,
    empty_sums,
    finish,
    merge,
    row_sums,
    valid_targets,
)
from logitless.tiles import column_tile
from logitless.transform import LogitTransform, forward, pull_back

Rows = Problem | LogitsProblem


def column_ids(width: int) -> Array:
    """``[1, V]`` column numbers, to compare with ``targets[:, None]`` (no gather, no scatter)."""
    return jnp.arange(width, dtype=jnp.int32)[None, :]


def transformed(x: Array, transform: LogitTransform, vocab_size: int, ids: Array) -> Array:
    """``z`` in float32 from the raw logits of the columns ``ids``; padded columns at ``-inf``."""
    return jnp.where(ids < vocab_size, forward(x, transform), NEG_INF)


def over_columns(width: int, tile: int | None, step: Callable[[Array | int, int, Any], Any], carry: Any) -> Any:
    """``step(first column, number of columns, carry)`` over slices of the vocabulary; all at once without a tile."""
    if tile is None or tile >= width:
        return step(0, width, carry)
    whole = width // tile
    carry = lax.fori_loop(0, whole, lambda i, c: step(i * tile, tile, c), carry)
    return step(whole * tile, width % tile, carry) if width % tile else carry


def columns(x: Array, start: Array | int, size: int) -> Array:
    """A slice of the last dimension."""
    return x if size == x.shape[-1] else lax.dynamic_slice_in_dim(x, start, size, axis=x.ndim - 1)


def sums(x: Array, p: Rows) -> RowSums:
    """Sums over the columns of the rows ``x [C, V]``."""
    transform, vocab_size = p.transform.column(), p.call.vocab_size

    def step(start: Array | int, size: int, so_far: RowSums) -> RowSums:
        ids = start + column_ids(size)
        z = transformed(columns(x, start, size), transform, vocab_size, ids)
        return merge(so_far, row_sums(z, ids == p.targets[:, None]))

    return over_columns(x.shape[-1], column_tile(), step, empty_sums(p.targets.shape))


def statistics(x: Array, p: Rows) -> TokenStats:
    """Statistics of the rows ``x [C, V]``, every one of them live."""
    return finish(sums(x, p), valid_targets(p.targets, p.call.vocab_size))


def dx(x: Array, p: Rows, stats: TokenStats, g: StatCotangents, dtype: Any) -> Array:
    """The cotangent of the rows ``x [C, V]``, computed in float32 and rounded to ``dtype``; zero rows where ``g`` is.

    In slices, and with the dtype of ``x``, it is written over ``x``.
    """
    transform = p.transform.column()
    stats, g = jax.tree.map(lambda a: a[:, None], (stats, g))

    def step(start: Array | int, size: int, out: Array) -> Array:
        ids = start + column_ids(size)
        part = columns(out if dtype == x.dtype else x, start, size)
        z = transformed(part, transform, p.call.vocab_size, ids)
        d = pull_back(dz(z, ids == p.targets[:, None], stats, g), part, transform).astype(dtype)
        return d if size == x.shape[-1] else lax.dynamic_update_slice_in_dim(out, d, start, axis=1)

    return over_columns(x.shape[-1], column_tile(), step, x if dtype == x.dtype else jnp.zeros(x.shape, dtype))
