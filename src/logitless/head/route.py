"""Which way a head-level call goes, from shapes alone; what :func:`logitless.explain` prints."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from logitless.backends import Route
from logitless.head import forward, sparse
from logitless.head.arguments import choose, chunk_of, layout_of, logits_dtype_of, tolerance_of
from logitless.head.chunked import SweepConfig
from logitless.head.operator import Head, Layout
from logitless.head.rows import RowPasses
from logitless.objectives.objective import Objective
from logitless.parallel import spec
from logitless.parallel.spec import Sharding


def route(
    name: str,
    hidden: Any,
    lm_head: Any,
    objective: Objective | None,
    backend: str | None,
    chunk_size: int | None,
    memory_budget: int | None,
    logits_dtype: Any,
    interpret: bool,
    head_layout: str | None = None,
    sharding: Sharding | None = None,
    sparse_backward: Any = "off",
) -> Route:
    """What a call would do, from shapes alone; over a mesh, what each device would."""
    width = hidden.shape[-1]
    n = 1
    for d in hidden.shape[:-1]:
        n *= d
    layout = layout_of(name, tuple(lm_head.shape), width, head_layout)
    placement = None
    if sharding is not None:
        placement = spec.resolve(name, sharding, tuple(hidden.shape[:-1]), tuple(lm_head.shape), layout)
        flat, own = spec.one_device(placement, hidden, Head(lm_head, layout=layout))
        n, lm_head = flat.shape[0], own.weight
    vocab = lm_head.shape[0 if layout == "vh" else 1]
    dtype = logits_dtype_of(name, logits_dtype)
    chunk = chunk_of(name, chunk_size, memory_budget, n, vocab, dtype.itemsize)
    flat = jax.ShapeDtypeStruct((n, width), hidden.dtype)
    chosen, because = choose(
        name, backend, flat, Head(lm_head, layout=layout), chunk, dtype, interpret, sparse_backward, placement
    )
    tolerance = tolerance_of(name, sparse_backward, hidden.dtype)
    head_bytes = vocab * width * jnp.dtype(lm_head.dtype).itemsize
    if chosen == "reference":
        way, matmuls = f"dense: [{n}, {vocab}] logits and dlogits in memory", "3 (1 without a gradient)"
        moved = f"logits and dlogits {2 * n * vocab * dtype.itemsize:,} B, each written and read"
        return Route(name, chosen, way, matmuls, moved, {}, because)
    if chosen == "pallas_tpu":
        return _tpu_route(name, flat, lm_head, layout, objective, because, tolerance)
    sweeps = -(-n // chunk)
    coupled = None if objective is None else objective.coupling()
    if placement is not None and placement.vocab:
        coupled = coupled or "a device has a part of the vocabulary only"
    if objective is not None and coupled is None:
        way = "grad in forward: a token's cotangent follows from its own statistics"
        matmuls = "3 (2 with a frozen head, 1 without a gradient) per live token; 1 where no gradient is possible"
    else:
        reason = "cotangents arrive later" if objective is None else coupled
        way = f"by recompute: {reason}"
        matmuls = "4 (3 with a frozen head, 1 without a gradient) per live token; 1 where the cotangent is zero"
    moved = (
        f"head read {sweeps}x per matmul ({head_bytes:,} B each), logits chunk {chunk * vocab * dtype.itemsize:,} B "
        f"at a time; at most {sweeps} chunks, fewer with dead tokens"
    )
    by_recompute = objective is None or coupled is not None
    rows = RowPasses(vocab, None, "mosaic_gpu" if chosen == "mosaic_gpu" else "xla", interpret)
    sweep = SweepConfig(chunk, dtype, "float32", rows)
    fused = by_recompute and forward.not_fused_because(sweep, flat, Head(lm_head, layout=layout)) is None
    if fused:
        moved += "; the statistics by a fused matmul: no logits"
    tiles: dict[str, Any] = {"chunk": chunk, "layout": layout}
    if tolerance is not None:
        shards = 1 if placement is None else placement.count(placement.vocab)
        way, matmuls, tiles["slab"] = _sparse_way(way, by_recompute, tolerance, vocab, shards)
    return Route(name, chosen, way, matmuls, moved, tiles, because, fused)


def _mass(tolerance: Array) -> str:
    """The tolerance in words."""
    if isinstance(tolerance, jax.core.Tracer):
        return "the given mass"
    mass = float(tolerance)
    return f"2^{round(math.log2(mass))}" if math.log2(mass).is_integer() else f"{mass:.3g}"


def _sparse_way(way: str, by_recompute: bool, tolerance: Array, vocab: int, shards: int) -> tuple[str, str, int]:
    """``(way, matmuls, slab)`` with a sparse backward; how much it saves depends on the data. ``vocab`` columns are on
    each of ``shards`` vocabulary shards."""
    slab = sparse.columns_of.slab_width(vocab)
    most = sparse.columns_of.most_columns(vocab, slab)
    left_out = _mass(tolerance)
    way += (
        f"; backward over the K active columns of a chunk, which leave at most {left_out} of a row's mass out (rows "
        f"that would leave out more: all columns, as a group); dense chunks where K > {most:,}"
    )
    if shards > 1:
        way += (
            "; what a row leaves out is the sum over shards, and where that is too much it takes all columns of those "
            f"that leave out more than 1/{shards} of what it may"
        )
        matmuls = (
            "2 + 3 K/V per live token (statistics of all shards first, columns by a second sweep), 4 to 5 in dense "
            "chunks, 5 a hard row; one less of the K/V and of the rest with a frozen head, 1 without a gradient"
        )
        return way, matmuls, slab
    matmuls = (
        f"1 + {3 if by_recompute else 2} K/V per live token, {4 if by_recompute else 3} in dense chunks, 4 a hard row; "
        "one less of the K/V and of the rest with a frozen head, 1 without a gradient"
    )
    return way, matmuls, slab


def _tpu_sparse_way(
    h: Any, head: Head, objective: Objective | None, tolerance: Array
) -> tuple[str, str, dict[str, int]]:
    """``(way, matmuls, tiles)`` of the sparse backward on TPU; how much it saves depends on the data."""
    from logitless.head import pallas_tpu_sparse, pallas_tpu_sparse_columns

    p = pallas_tpu_sparse_columns.column_passes(head.vocab, head)
    later = objective is None or objective.coupling() is not None
    way = (
        "statistics and column maxima by one sweep, then the backward over the K active columns of all tokens, which "
        f"leave at most {_mass(tolerance)} of a row's mass out (rows that would leave out more: dH and dW by the exact "
        f"kernels); exact kernels where a few rows show flat logits, or K > {p.most:,}"
    )
    matmuls = f"1 + {4 if later else 3} K/V, 4 a hard row, {5 if later else 4} if flat (1 without a gradient)"
    return way, matmuls, {"slab": p.slab, "chunk": min(h.shape[0], pallas_tpu_sparse.CHUNK)}


def _tpu_route(
    name: str, h: Any, lm_head: Any, layout: Layout, objective: Objective | None, because: str, tolerance: Array | None
) -> Route:
    from logitless.head import pallas_tpu

    about = pallas_tpu.describe(h, lm_head, layout=layout)
    entropy = objective is not None and objective.entropy_coef is not None
    used: tuple[str, ...]
    if entropy:
        way = "statistics, then dH and dW by sweeps of their own (an entropy bonus has a gradient too)"
        used, matmuls = ("token_stats", "dhidden", "dhead"), "5 (3 with a frozen head, 1 without a gradient)"
    else:
        way = "flash: the forward sweep carries d logp/d hidden, dW has a sweep of its own"
        used, matmuls = ("token_stats_and_direction", "dhead"), "4 (2 with a frozen head, 1 without a gradient)"
    more: dict[str, int] = {}
    if tolerance is not None:
        way, matmuls, more = _tpu_sparse_way(h, Head(lm_head, layout=layout), objective, tolerance)
        used = ("token_stats", "dhidden", "dhead")
    moved = ", ".join(f"{k} {about[k]['hbm_bytes']:,} B" for k in used)
    if tolerance is not None:
        moved += " at most (dhidden and dhead by the hard rows)"
    tiles = {k: f"{about[k]['token_tile']}x{about[k]['vocab_tile']}" for k in used}
    return Route(name, "pallas_tpu", way, matmuls, moved, {**tiles, **more, "layout": layout}, because)
