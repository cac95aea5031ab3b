"""What a sparse backward would cost for an assumed policy; the run's own metrics say what the policy is really like.

A share s of the columns goes through the backward matmuls (whole slabs of them), a share r of the rows is hard and goes
through all columns, b is the number of gradients. In matmuls for each live token:

    grad in forward        1 + b s + (1 + b) r          statistics and columns from logits that are in memory
    by recompute           1 + (1 + b) s + (1 + b) r    logits of the active columns are made again
    a vocabulary's shard   2 + (1 + b) s + (1 + b) r    the columns need all shards' statistics first: a second sweep
    Hopper's screen        1 + (1 + b) s' + (1 + b) r   no logits in memory; a tile of tokens meets a part s' of the
                                                        columns, or all and s more if cotangents are late; with a
                                                        memory budget, dense where a policy is flat
    TPU kernels            1 + (1 + b) s + 2 b r        one set of columns for all tokens; s more if cotangents are late
    dense                  as without it                too many columns or hard rows: the rule of
    head/sparse/active_columns.py

The logits are read by three passes (statistics, column maxima, mass left out) where the exact path has one or two.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from logitless.core.chunk_size import column_tile, platform
from logitless.core.registry import KERNELS
from logitless.core.route import Route
from logitless.head.sparse.active_columns import Rule, chunk_rule, most_columns
from logitless.head.sparse.backend import hard_chunk
from logitless.lab.plan.work import GEMM_WORKSPACE, Way, Work


@dataclasses.dataclass(frozen=True)
class Shares:
    """What a plan assumes of the policy, by the names of the metrics that a run reports."""

    active_columns: float
    """Share of the vocabulary that carries a chunk's gradient; 1 is a flat policy, which goes dense."""
    hard_rows: float
    """Share of the tokens that would leave out more than the tolerance, and go through all columns."""

    def in_words(self) -> str:
        return (
            f"for a policy with active_columns {self.active_columns:g} and hard_rows {self.hard_rows:g}, which are "
            "assumed: it all depends on them, and the metrics of these names say a run's true ones"
        )


CALIBRATED = Shares(active_columns=0.05, hard_rows=0.06)
"""About what the calibrated policy (``lab/bench/realistic.py``: Qwen2.5-Coder-1.5B on GSM8K, V=151936) has at a
tolerance of 2^-8: 0.035 to 0.062 and 0.051 to 0.067 in chunks of 2048 tokens
(benchmarks/results/gpu_h200_sparse.json)."""

CALIBRATED_TOLERANCE = 2.0**-8
"""Where :data:`CALIBRATED` holds: ``"auto"`` with bfloat16 operands."""

_INDEX_ARRAYS = 4
"""``[V]`` arrays of four bytes from which a chunk's columns are found: maxima, levels, ranks, slots."""
_TOKENS_PER_READ = 2048
"""Tokens that share a read of the head in that matmul: a group of tiles whose hidden states stay in L2."""
_SCREEN_SUMS = 8 << 20
"""About what the partial sums of the matmul with the screen take."""
_PARTS = 132 * 128 * 256 * 4
"""Of a deep product in parts: a float32 tile for each block of a Hopper GPU."""
_MET = 0.36
"""Of the active columns, those that a tile of tokens meets, on average: 0.35 on a policy's own completions and 0.38 on
others' text (benchmarks/results/gpu_sparse_suite.json)."""
_CPU_PASS_TILES = 6
"""Float32 ``[chunk, column tile]`` arrays of the widest of those passes, as XLA's CPU compiler has it."""


def shares_of(tolerance: float | None, active_columns: Any, hard_rows: Any) -> Shares | None:
    """The shares that were given, else those of the calibrated policy, which hold at its tolerance only; ``None``
    without a sparse backward, where they mean nothing."""
    given = {"active_columns": active_columns, "hard_rows": hard_rows}
    for name, value in given.items():
        if value is not None and tolerance is None:
            raise ValueError(
                f"plan: {name}={value!r} is about the sparse backward; give sparse_backward='auto' with it."
            )
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value <= 1):
            raise ValueError(f"plan: {name}={value!r}, expected a share from 0 to 1, as the metric {name} has it.")
    if tolerance is None:
        return None
    missing = [name for name, value in given.items() if value is None]
    if missing and not math.isclose(tolerance, CALIBRATED_TOLERANCE):
        raise ValueError(
            f"plan: sparse_backward leaves out at most {tolerance:.3g} of a row's mass here, and the calibrated shares "
            f"are for {CALIBRATED_TOLERANCE:.3g} ('auto' with bfloat16); give {' and '.join(missing)} as a run's "
            "metrics have them (active_columns=1 if every chunk goes dense)."
        )
    return Shares(
        CALIBRATED.active_columns if active_columns is None else float(active_columns),
        CALIBRATED.hard_rows if hard_rows is None else float(hard_rows),
    )


def backward_columns(vocab: int, slab: int, shares: Shares, gradients: int) -> int:
    """Columns that the backward matmuls take: whole slabs, and all of them where a chunk of such a policy is dense."""
    rule: Rule = dataclasses.replace(chunk_rule(vocab, gradients), slab=slab, most=most_columns(vocab, slab))
    active = math.ceil(shares.active_columns * vocab)
    if active > rule.most or rule.cost(active / vocab, shares.hard_rows) >= rule.dense:
        return vocab
    return -(-active // slab) * slab


def way(w: Work, shares: Shares, exact: Way, route: Route, shard: bool) -> Way:
    """The way of ``exact`` with a sparse backward; ``shard``: the head is a part of the vocabulary."""
    slab = route.tiles["slab"]
    columns = backward_columns(w.vocab, slab, shares, w.gradients)
    met: float = columns
    if route.backend == KERNELS["tpu"]:
        own = _tpu_way(w, shares, columns, exact, route, shard)
    elif "visit" in route.tiles:
        met = _met(w, shares, columns, route)
        own = _screened_way(w, shares, columns, met, exact, route)
    else:
        own = _chunked_way(w, shares, columns, exact, route, shard)
    tiles = {**exact.tiles, "slab": slab, "backward_columns": round(met / w.vocab, 4)}  # the metric: 1 is dense
    return dataclasses.replace(own, tiles=tiles, narrow=exact.narrow * own.matmuls / exact.matmuls)


def _chunked_way(w: Work, shares: Shares, columns: int, exact: Way, route: Route, shard: bool) -> Way:
    """In plain JAX."""
    chunk, slab, by_recompute = min(route.tiles["chunk"], w.tokens), route.tiles["slab"], not route.in_forward
    b, plane = w.gradients, w.live * w.vocab
    temporaries = _temporaries(w, exact, chunk, slab)
    whole, again = 2 if shard else 1, 1 if by_recompute else 0
    look = 3 * plane * w.logit  # statistics, column maxima and left-out mass each read the logits
    if columns == w.vocab:
        # As exact. In one pass a glance at a few rows of each chunk shows it; by recompute the columns are looked for.
        extra = look if by_recompute else 0
        return Way(exact.matmuls, exact.moved + extra, exact.passes + extra, temporaries)
    chunks, hard = -(-w.live // chunk), shares.hard_rows * w.live
    # The head's rows are gathered, and those of dW summed and added where they belong.
    gathered = chunks * columns * w.width * (2 * w.item + (3 * w.sum_item if w.wants_head else 0))
    hard_plane = hard * w.vocab * (w.logit + w.item)
    passes = look + _slab_passes(w, columns, slab) + gathered + hard_plane
    dw_sum = 2 * w.vocab * w.width * w.sum_item if w.wants_head else 0
    by_matmuls = (
        whole * plane * w.logit  # logits written
        + b * (w.live * columns + hard * w.vocab) * w.item  # dlogits read
        + chunks * (whole * w.head + (again + w.wants_hidden) * columns * w.width * w.item)
        + math.ceil(hard / hard_chunk(chunk)) * ((1 + w.wants_hidden) * w.head + dw_sum)
        + (whole + b) * w.live * w.width * w.item
    )
    return Way(
        matmuls=whole + (again + b) * columns / w.vocab + (1 + b) * shares.hard_rows,
        moved=round(passes + by_matmuls),
        passes=round(passes),
        temporaries=temporaries,
    )


def _met(w: Work, shares: Shares, columns: int, route: Route) -> float:
    """Columns that a tile of tokens meets by Hopper's screen: a part of the active ones, where all goes at once."""
    active, hard = shares.active_columns * w.vocab, shares.hard_rows * w.live
    most = route.tiles.get("columns_at_once", 0), route.tiles.get("hard_at_once", 0)
    at_once = route.in_forward and active < most[0] and hard <= most[1] and columns < w.vocab
    return _MET * active if at_once else columns


def _screened_way(w: Work, shares: Shares, columns: int, met: float, exact: Way, route: Route) -> Way:
    """By Hopper's screen (``head/mosaic_gpu/sparse.py``): bits in place of logits, one set of columns."""
    slab, most_columns, most_hard, group = (
        route.tiles[k] for k in ("slab", "columns_at_once", "hard_at_once", "hard_group")
    )
    late, b = not route.in_forward, w.gradients
    bits, dw = w.tokens * w.vocab // 8, w.head * w.wants_head
    part = most_columns * w.width * w.item
    # A group's dx, h, and dH in float32 and in parts, one for each block of the GPU.
    hard = group * (w.vocab * w.item + w.width * w.item) + _PARTS * w.wants_hidden
    rows = w.rows + most_hard * w.width * w.item  # tokens, and hard ones once more
    in_dw = w.wants_head and not route.tiles["dx_apart"]
    dx = 0 if in_dw else (w.tokens + most_hard) * most_columns * w.item
    # Outputs lend their memory before they are written: that of dW to the bits, and to dx. dH is in float32 at first;
    # what does not go at once takes no more: half of that, and what the sum so far lacks.
    temporaries = [
        max(w.rows + bits - dw, 0) + _SCREEN_SUMS,
        part + (1 + w.wants_hidden) * rows + dx + _INDEX_ARRAYS * 4 * w.vocab,
        part * w.wants_head + dx + hard + _SCREEN_SUMS,
    ]
    if late:  # a slab of the head, its logits and their exponentials
        temporaries.append(w.rows + slab * (route.tiles["visit"] * 8 + w.width * w.item) + _SCREEN_SUMS)
    if "chunk_if_flat" in route.tiles:
        temporaries.append(exact.temporaries)
        if columns == w.vocab:
            return dataclasses.replace(exact, temporaries=max(temporaries))
    if columns == w.vocab:  # four matmuls: nothing was kept of the first
        passes = 3 * bits + _slab_passes(w, columns, slab)
        return Way(2 + b, passes + 4 * w.head + 2 * dw, passes, max(temporaries))
    groups = math.ceil(shares.hard_rows * w.live / group)
    gathered = columns * w.width * w.item * (2 + 2 * w.wants_head)
    hard_plane = shares.hard_rows * w.live * w.vocab * (w.logit + w.item)
    seen = 4 * bits + _slab_passes(w, round(met), slab) + gathered + round(hard_plane) + dw
    reads = w.rows + -(-w.live // _TOKENS_PER_READ) * w.head
    by_matmuls = reads + groups * ((1 + w.wants_hidden) * w.head + 2 * dw)
    return Way(
        matmuls=1 + (1 + late + b) * met / w.vocab + (1 + b) * shares.hard_rows,
        moved=seen + by_matmuls,
        passes=seen,
        temporaries=max(temporaries),
    )


def _tpu_way(w: Work, shares: Shares, columns: int, exact: Way, route: Route, shard: bool) -> Way:
    """By the TPU's kernels (``head/pallas_tpu/sparse.py``): no logits in memory but those of a slab; the columns of a
    ``shard`` are found by a second sweep.

    Bytes of the sweeps are taken from ``exact``, whose are two.
    """
    chunk, slab = min(route.tiles["chunk"], w.tokens), route.tiles["slab"]
    late = shard or not route.in_forward  # cotangents are not known when the columns are found
    whole = 2 if shard else 1
    b = w.gradients
    most = most_columns(w.vocab, slab)
    # dH in float32 and dW of the active columns; a slab's buffers stand where the sweeps' have stood.
    kept = 4 * w.tokens * w.width * w.wants_hidden + most * w.width * w.item * w.wants_head
    # The exact kernels: dH, or what stands beside it for LoRA, two matmuls; dW two, LoRA's outer factor alone one.
    per_hard_row = 2 * (w.wants_hidden or w.wants_lora) + (2 if w.wants_head else w.wants_lora)
    if "group" in route.tiles:  # in one pass (``one_pass.py``): dW of the active columns stands in dW's own place
        beside = most * w.width * w.item if w.wants_head and w.vocab % 16 else 0
        # dH in float32, with a group of hard rows; hidden states in order stand where dH will. A slab of the head; its
        # logits, dlogits and float32 dW are in VMEM.
        hidden = 4 * (w.tokens + route.tiles["group"]) * w.width if w.wants_hidden else w.rows
        kept = hidden + beside + slab * w.width * w.item
        per_hard_row = 1 + b
    temporaries = max(exact.temporaries, kept + _INDEX_ARRAYS * 4 * w.vocab)
    if columns == w.vocab:
        return Way(exact.matmuls + late, exact.moved, exact.passes, temporaries)
    gathered = columns * w.width * 2 * w.item + (2 * w.head if w.wants_head else 0)  # dW is put into place at once
    passes = _slab_passes(w, columns, slab) + gathered
    reads = -(-w.live // chunk) * (1 + w.wants_hidden) * columns * w.width * w.item
    return Way(
        matmuls=whole + (1 + late + b) * columns / w.vocab + per_hard_row * shares.hard_rows,
        moved=round(passes + reads + exact.moved * (0.5 * whole + shares.hard_rows)),
        passes=round(passes),
        temporaries=temporaries,
    )


def _slab_passes(w: Work, columns: int, slab: int) -> int:
    """Logits and dlogits of the slabs; ``[tokens, H]`` of dH in float32 once for each slab."""
    taken = w.live * columns * (w.logit + w.item)
    return taken + (8 * w.live * w.width * (columns // slab) if w.wants_hidden else 0)


def _temporaries(w: Work, exact: Way, chunk: int, slab: int) -> int:
    """Buffers of a slab of columns beside those of a chunk. The largest use counts, so a slab's may cost nothing."""
    rows, logits = chunk * w.width * w.item, chunk * w.vocab * w.logit
    tile = column_tile()
    if tile is not None:
        passes = _CPU_PASS_TILES * 4 * chunk * min(tile, w.vocab)
        return max(exact.temporaries, logits + _INDEX_ARRAYS * 4 * w.vocab + rows + passes)
    slabs = (GEMM_WORKSPACE if platform() == "gpu" else 0) + _INDEX_ARRAYS * 4 * w.vocab + rows
    slabs += slab * w.width * w.item + chunk * slab * (w.logit + w.item)  # of the head, of the logits and dlogits
    slabs += 4 * chunk * w.width if w.wants_hidden else 0  # [C, H] in float32
    dlogits = chunk * w.vocab * w.item if w.item != w.logit else 0
    sums = w.vocab * w.width * w.sum_item if w.wants_head and w.sum_item != w.item else 0
    # As without it, a buffer of the chunk shares the memory of dW's output, if dW is summed elsewhere.
    shared = max((x for x in (logits, dlogits) if x <= w.head), default=0) if sums else 0
    return max(exact.temporaries, sums + logits + max(dlogits + rows if dlogits else 0, slabs) - shared)
