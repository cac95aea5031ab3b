"""Columns of a ``[H, V]`` head on TPU, without a transposed copy of it: ``W[:, y]^T [N, H]``.

XLA's gather along the minor dimension either copies the whole head into the other layout first or reads it one strided
column at a time. Tokens are sorted by target here: a chunk needs a short run of vocabulary blocks:

    out[:, chunk] = sum over the run of  W[:, block] @ (row of block == target of token)

which is exact: every product is a number of the head times one or zero. Steps (chunk, block) are laid out by XLA
(:func:`_schedule`) and prefetched as scalars; there are at most ``V / COLUMNS + N / TOKENS`` of them, so the head is
read about once. A matmul costs ``2 H V TOKENS`` FLOP, about 1 % of a sweep; HBM bytes: the head, and ``3 N H
b``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from logitless.core import compat
from logitless.core.compat import Ref
from logitless.head.pallas_tpu.operands import dot
from logitless.head.pallas_tpu.tiles import LANES, MIB

TOKENS = 128
COLUMNS = 512


def _schedule(y: Array, blocks: int, columns: int) -> tuple[Array, Array, Array]:
    """``(chunk, block, how many steps count [1])`` of every step, for sorted targets ``y [chunks, TOKENS]``."""
    chunks = y.shape[0]
    low, high = y[:, 0] // columns, y[:, -1] // columns
    ends = jnp.cumsum(high - low + 1)
    step = jnp.arange(blocks + chunks, dtype=jnp.int32)
    chunk = jnp.minimum(jnp.searchsorted(ends, step, side="right"), chunks - 1).astype(jnp.int32)
    begin = ends - (high - low + 1)
    block = jnp.minimum(low[chunk] + step - begin[chunk], high[chunk])  # steps after the last repeat it: no new fetch
    return chunk, block.astype(jnp.int32), ends[-1:].astype(jnp.int32)


def _kernel(size: tuple[int, int], chunk: Ref, block: Ref, count: Ref, y_ref: Ref, w_ref: Ref, out_ref: Ref) -> None:
    """``size``: columns of the head, and of a block."""
    s, (vocab, columns) = pl.program_id(0), size

    @pl.when((s == 0) | (chunk[s] != chunk[jnp.maximum(s - 1, 0)]))
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(s < count[0])
    def _() -> None:
        if vocab % columns:

            @pl.when(block[s] == vocab // columns)
            def _() -> None:  # what lies beyond the array is not ours, and 0 * NaN is NaN
                inside = jax.lax.broadcasted_iota(jnp.int32, w_ref.shape, 1) < vocab % columns
                w_ref[...] = jnp.where(inside, w_ref[...], jnp.zeros((), w_ref.dtype))

        w = w_ref[...]
        row = jax.lax.broadcasted_iota(jnp.int32, (columns, TOKENS), 0)
        chosen = jnp.where(row == y_ref[0] - block[s] * columns, 1.0, 0.0).astype(w.dtype)
        out_ref[...] += dot(w, chosen, (1, 0)).astype(out_ref.dtype)  # only a single term in the sum is nonzero


def columns_at(lm_head: Array, targets: Array, interpret: object) -> Array:
    """``lm_head[:, targets].T``: ``[N, H]`` from ``[H, V]``, for targets within ``[0, V)``."""
    order = jnp.argsort(targets)
    found = _columns_in_order(lm_head, targets[order], interpret)
    return found.at[jnp.argsort(order)].get(mode="promise_in_bounds", unique_indices=True)


def _block(vocab: int) -> int:
    """Number of columns in a block of the head."""
    return vocab if vocab <= LANES else min(COLUMNS, vocab // LANES * LANES)


def _in_chunks(y: Array) -> Array:
    """``[chunks, TOKENS]``: ascending columns ``y [N]``, padded with the last column."""
    more = -y.shape[0] % TOKENS
    return jnp.concatenate([y, jnp.broadcast_to(y[-1:], (more,))]).reshape(-1, TOKENS)


def _columns_in_order(lm_head: Array, index: Array, interpret: object) -> Array:
    """:func:`columns_at` of columns that ascend."""
    width, vocab = lm_head.shape
    n, columns, y = index.shape[0], _block(vocab), _in_chunks(index)
    chunks, blocks = y.shape[0], pl.cdiv(vocab, columns)
    item = lm_head.dtype.itemsize
    need = 2 * width * (columns + TOKENS) * item + 2 * width * TOKENS * 4 + 4 * columns * TOKENS * 4
    out = pl.pallas_call(
        functools.partial(_kernel, (vocab, columns)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(blocks + chunks,),
            in_specs=[
                pl.BlockSpec((1, 1, TOKENS), lambda s, chunk, block, count: (chunk[s], 0, 0)),
                pl.BlockSpec((width, columns), lambda s, chunk, block, count: (0, block[s])),
            ],
            out_specs=pl.BlockSpec((width, TOKENS), lambda s, chunk, block, count: (0, chunk[s])),
        ),
        out_shape=compat.hbm_output((width, chunks * TOKENS), lm_head.dtype, interpret),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=max(2 * need, 16 * MIB)
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * width * (vocab + n) * TOKENS,
            transcendentals=0,
            bytes_accessed=lm_head.nbytes + 3 * n * width * item,
        ),
        name=f"head_columns_t{TOKENS}_v{columns}",
        interpret=interpret,
    )(*_schedule(y, blocks, columns), y[:, None, :], compat.in_hbm(lm_head, interpret))
    return out.T[:n]
