"""Plain JAX over logits ``[N, V]``, a chunk of rows at a time, with hand-written gradients.

    pass 1   z -> RowSums -> TokenStats                     reads the logits once or twice (max, then sums)
    pass 2   dlogits = pull_back(dz(z, stats, cotangents))  reads the logits, writes dlogits in their dtype

No matmul. Beside its input and output it needs one ``[chunk, V]`` float32 buffer at most, where XLA does not fuse it
away; :func:`stats_and_dlogits` does both passes on a chunk while it is warm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from logitless.logits.reference import column_ids, masked_stats, transformed, valid_targets
from logitless.objectives.token_program import TokenProgram
from logitless.stats import RowSums, StatCotangents, TokenStats, dz, empty_sums, finish, merge, row_sums
from logitless.tiles import column_tile, row_chunk
from logitless.transform import LogitTransform, pull_back


def over_columns(width: int, tile: int | None, step: Callable[[Array | int, int, Any], Any], carry: Any) -> Any:
    """``step(first column, number of columns, carry)`` over slices of the vocabulary; all at once without a tile."""
    if tile is None or tile >= width:
        return step(0, width, carry)
    whole = width // tile
    carry = jax.lax.fori_loop(0, whole, lambda i, c: step(i * tile, tile, c), carry)
    return step(whole * tile, width % tile, carry) if width % tile else carry


def _columns(x: Array, start: Array | int, size: int) -> Array:
    return x if size == x.shape[-1] else jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)


def rows_sums(x: Array, targets: Array, transform: LogitTransform, vocab_size: int, tile: int | None = None) -> RowSums:
    """Sums over the columns of the rows ``x [C, V]``, a slice of ``tile`` columns at a time."""
    transform = transform.column()

    def step(start: Array | int, size: int, sums: RowSums) -> RowSums:
        ids = start + column_ids(size)
        z = transformed(_columns(x, start, size), transform, vocab_size, ids)
        return merge(sums, row_sums(z, ids == targets[:, None]))

    return over_columns(x.shape[-1], tile, step, empty_sums(targets.shape))


def rows_stats(
    x: Array, targets: Array, transform: LogitTransform, vocab_size: int, tile: int | None = None
) -> TokenStats:
    """Statistics of the rows ``x [C, V]``, every one of them live, a slice of ``tile`` columns at a time."""
    return finish(rows_sums(x, targets, transform, vocab_size, tile), valid_targets(targets, vocab_size))


def rows_dlogits(
    x: Array,
    targets: Array,
    transform: LogitTransform,
    vocab_size: int,
    stats: TokenStats,
    g: StatCotangents,
    dtype: Any,
    tile: int | None = None,
) -> Array:
    """The cotangent of the rows ``x [C, V]``, computed in float32 and rounded to ``dtype``.

    With a ``tile`` and the dtype of ``x`` it is written over ``x``, slice by slice.
    """
    transform = transform.column()
    g = jax.tree.map(lambda c: c[:, None], g)
    logp, entropy, max_logit, max_logp = (
        s[:, None] for s in (stats.logp, stats.entropy, stats.max_logit, stats.max_logp)
    )

    def step(start: Array | int, size: int, out: Array) -> Array:
        ids = start + column_ids(size)
        part = _columns(out if dtype == x.dtype else x, start, size)
        z = transformed(part, transform, vocab_size, ids)
        d = dz(z, ids == targets[:, None], logp, entropy, max_logit, max_logp, g)
        d = pull_back(d, part, transform).astype(dtype)
        return d if size == x.shape[-1] else jax.lax.dynamic_update_slice_in_dim(out, d, start, axis=1)

    return over_columns(x.shape[-1], tile, step, x if dtype == x.dtype else jnp.zeros(x.shape, dtype))


def _over_chunks(f: Callable[..., Any], chunk: int, outputs: Any, *rowwise: Any) -> Any:
    """``f`` on chunks of rows of every array in ``rowwise``, written into arrays like ``outputs``.

    The last chunk is moved back to end with the rows, so a few rows may be computed twice, to the same values.
    """
    n = jax.tree.leaves(rowwise)[0].shape[0]
    if chunk >= n:
        return f(*rowwise)

    def body(i: Array, out: Any) -> Any:
        start = jnp.minimum(i * chunk, n - chunk)
        part = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, chunk), rowwise)
        return jax.tree.map(
            lambda o, v: jax.lax.dynamic_update_slice_in_dim(o, v.astype(o.dtype), start, 0), out, f(*part)
        )

    return jax.lax.fori_loop(0, -(-n // chunk), body, outputs)


def blank_stats(n: int) -> TokenStats:
    """Statistics of ``n`` tokens that nobody has visited: zeros."""
    zero = jnp.zeros((n,), jnp.float32)
    return TokenStats(zero, zero, zero, zero, zero, jnp.zeros((n,), bool), zero)


def _rowwise_transform(transform: LogitTransform, n: int) -> tuple[Array | None, Callable[[Array | None], Any]]:
    """The per-token part of the transform as a rowwise array, and a way to put it back."""
    t = transform.temperature
    if t is None or jnp.ndim(t) == 0:
        return None, lambda _: transform
    return jnp.broadcast_to(t, (n,)), lambda part: LogitTransform(part, transform.softcap, transform.scale)


def token_sums(
    logits: Array,
    targets: Array,
    transform: LogitTransform,
    vocab_size: int,
    live: Array | None,
    *,
    chunk: int | None = None,
) -> RowSums:
    """Sums over the columns that are here, for a shard of the vocabulary; those of a dead token mean nothing."""
    n, width = logits.shape
    temperature, whole = _rowwise_transform(transform, n)

    def rows(x: Array, y: Array, t: Array | None) -> RowSums:
        return rows_sums(x, y, whole(t), vocab_size, column_tile())

    return _over_chunks(rows, chunk or row_chunk(n, width), empty_sums((n,)), logits, targets, temperature)


def token_stats(
    logits: Array,
    targets: Array,
    transform: LogitTransform,
    vocab_size: int,
    live: Array | None,
    *,
    chunk: int | None = None,
) -> TokenStats:
    """See :func:`logitless.logits.reference.token_stats`."""
    n, width = logits.shape
    temperature, whole = _rowwise_transform(transform, n)

    def rows(x: Array, y: Array, t: Array | None) -> TokenStats:
        return rows_stats(x, y, whole(t), vocab_size, column_tile())

    chunk = chunk or row_chunk(n, width)
    return masked_stats(_over_chunks(rows, chunk, blank_stats(n), logits, targets, temperature), live)


def dlogits(
    logits: Array,
    targets: Array,
    transform: LogitTransform,
    vocab_size: int,
    live: Array | None,
    stats: TokenStats,
    g: StatCotangents,
    *,
    chunk: int | None = None,
) -> Array:
    """Cotangent of ``logits [N, V]`` in their dtype, from the statistics and their cotangents."""
    n, width = logits.shape
    temperature, whole = _rowwise_transform(transform, n)
    if live is not None:
        g = jax.tree.map(lambda c: jnp.where(live, c, 0.0), g)

    def rows(x: Array, y: Array, s: TokenStats, c: StatCotangents, t: Array | None) -> Array:
        return rows_dlogits(x, y, whole(t), vocab_size, s, c, logits.dtype, column_tile())

    chunk = chunk or row_chunk(n, width)
    return _over_chunks(rows, chunk, jnp.zeros_like(logits), logits, targets, stats, g, temperature)


def stats_and_dlogits(
    logits: Array,
    targets: Array,
    transform: LogitTransform,
    vocab_size: int,
    live: Array | None,
    program: TokenProgram,
    *,
    chunk: int | None = None,
) -> tuple[TokenStats, Array]:
    """Statistics, and the dlogits of an uncoupled objective with a unit cotangent of the loss."""
    n, width = logits.shape
    temperature, whole = _rowwise_transform(transform, n)

    def rows(x: Array, y: Array, alive: Array | None, columns: Any, t: Array | None) -> tuple[TokenStats, Array]:
        stats = masked_stats(rows_stats(x, y, whole(t), vocab_size, column_tile()), alive)
        # Statistics are the same to the bit whether or not a gradient is taken: keep the two passes apart.
        stats = jax.lax.optimization_barrier(stats)
        g_logp, g_entropy = program.run(program.scalars, columns, stats.logp, stats.entropy)
        g = StatCotangents(g_logp, g_entropy, jnp.zeros_like(g_logp))
        return stats, rows_dlogits(x, y, whole(t), vocab_size, stats, g, logits.dtype, column_tile())

    chunk = chunk or row_chunk(n, width)
    outputs = (blank_stats(n), jnp.zeros_like(logits))
    return _over_chunks(rows, chunk, outputs, logits, targets, live, program.columns, temperature)
