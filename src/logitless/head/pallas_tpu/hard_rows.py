"""The TPU sweep of a sparse backward's hard rows: it writes dW, merges the rows of the active columns, makes dH.

    grid (vocabulary tile, token tile):   x^T = W h^T, dx as in ``dweight.py``, zero in the columns that are ready
                                          dW [vocab, H]  = ready rows + dx^T h      written once, in its final dtype
                                          dH [hidden, H] += dx W                    float32, in VMEM for the whole sweep

for a ``[V, H]`` head. Three matmuls (``6 N H V`` FLOP) for the tokens whose dH is made, which must fit into VMEM
(:func:`rows_beside`), two for the others. HBM: W once, dW once, hidden states once per vocabulary tile if they are more
than one token tile. Where the tokens that count fit into one, dW has no accumulator to go through: how many token tiles
there are is known on the device alone, and the grid has as many.

Without dW it is a sweep for dH alone, over all columns: two matmuls, W once.

Loops over parts of the tile (``tiles.py``), over columns of the vocabulary for dx and dW, then over columns of dH, keep
its program at a quarter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from logitless.core import compat
from logitless.core.compat import Index, Ref
from logitless.core.problem import Gradients, HeadGrads, Problem
from logitless.core.pytree import register, tree_of
from logitless.core.stats import StatCotangents, TokenStats
from logitless.head.pallas_tpu import active_rows
from logitless.head.pallas_tpu.active_rows import TURNS, Placing, Ready
from logitless.head.pallas_tpu.dweight import ROWS, TARGET, coefficients, cotangent_of_logits
from logitless.head.pallas_tpu.operands import clear_dead, column_ids, dot, prepare, rounded
from logitless.head.pallas_tpu.tiles import (
    FIRST,
    LANES,
    Part,
    Spec,
    Tiles,
    choose,
    need,
    over_parts,
    tiles_of_live,
    zero_rows,
)


@register
@dataclasses.dataclass(frozen=True)
class _Read:
    """What the kernel reads: arrays, block specs, references. Numbers per token stand in a row."""

    scalars: Any  # [3] float32, in SMEM: temperature, softcap, scale
    h: Any  # [N, H]
    weight: Any  # [V, H]
    bias: Any  # [1, V] float32 or None
    token: Any  # [ROWS, N] float32: each token's coefficients
    rows: Any  # [V or slots, H]: ready
    slots: Any  # [parts, 1, slots of a part] int32: their columns


@register
@dataclasses.dataclass(frozen=True)
class _Scratch:
    """What the kernel keeps in VMEM."""

    weight: Any = None  # [vocab, H] float32: dW, if summed over several steps
    bias: Any = None  # [vocab, 1] float32
    d: Any = None  # [vocab, tokens]: the step's dlogits, for dW
    transposed: Any = None  # [tokens, vocab]: the same, for dH
    buffer: Any = None  # of active_rows.py, with the next two
    arrived: Any = None
    is_ready: Any = None


def rows_beside(p: Problem, tokens: int) -> int:
    """Rows of dH, in whole token tiles of ``tokens``, that fit into VMEM during dW's sweep: they use the space of the
    larger token tile in the ordinary dW sweep."""
    width, item = p.h.shape[1], jnp.dtype(p.h.dtype).itemsize
    full = choose("dhead", FIRST["dhead"][0], (p.head.vocab, width), item, "vh", compat.tpu_vmem_bytes())
    large, small = (need("dhead", n, full.vocab, width, item, "vh") for n in (max(full.tokens, tokens), tokens))
    return (large - small) // (4 * width) // tokens * tokens


def _cotangent(spec: Spec, refs: _Read, scratch: _Scratch, end: Array, j: Index, part: Part) -> Array:
    """dx for a part of vocabulary tile ``j``, unrounded; zero in ready columns, and from ``end`` (the first padded
    column) on."""
    x = dot(refs.weight[part.rows, :], refs.h[...], (1, 1))
    if refs.bias is not None:
        # A bias stands along the lanes in HBM ([V, 1] would be stored 128 times larger).
        x = x + jnp.broadcast_to(refs.bias[:, part.rows], (8, part.size)).T[:, :1]
    x = rounded(spec, x)
    column = part.first + column_ids(x, 0)
    is_target = column == refs.token[TARGET : TARGET + 1, :].astype(jnp.int32) - j * spec.tiles.vocab
    d = cotangent_of_logits(spec, x, lambda k: refs.token[k : k + 1, :], is_target, refs.scalars)
    counts = column < end
    if scratch.is_ready is not None:
        counts = counts & (scratch.is_ready[part.rows, :] == 0)
    return jnp.where(counts, d, 0.0)


def _kernel(spec: Spec, n_live: Ref, refs: _Read, out: Gradients, scratch: _Scratch) -> None:
    vocab, tokens, width = spec.tiles.vocab, spec.tiles.tokens, refs.h.shape[1]
    j, i = pl.program_id(0), pl.program_id(1)
    end = spec.vocab_size - j * vocab  # real columns in the tile
    dw: Any = out.head.weight
    dh: Any = out.hidden
    dbias_out: Any = out.head.bias
    acc, dbias = dw if scratch.weight is None else scratch.weight, scratch.bias  # a float32 dW is its own accumulator
    placing: Any = None
    if refs.rows is not None:
        placing = Placing(vocab, n_live, refs.rows, refs.slots, scratch.buffer, scratch.arrived, scratch.is_ready)

    @pl.when(i == 0)
    def _() -> None:
        if placing is not None:
            placing.begin()
        if dbias is not None:
            dbias[...] = jnp.zeros_like(dbias)

    if dh is not None:
        pl.when((i == 0) & (j == 0))(lambda: zero_rows(dh))

        @pl.when((i == 0) & (end < vocab))
        def _() -> None:  # dH is a sum over the rows of this block, and 0 * NaN is NaN
            clear_dead(refs.weight, 0, end)

    taken, dead = spec.live(i, n_live) | (i == 0), spec.dead_rows(i, n_live)  # the first step puts rows in place
    if dead is not None:
        pl.when(taken & dead[0])(lambda: clear_dead(refs.h, 0, dead[1]))

    def cotangent(part: Part) -> None:
        d = _cotangent(spec, refs, scratch, end, j, part)
        if dbias is not None:
            dbias[part.rows, :] += jnp.sum(d, axis=1, keepdims=True)
        d = d.astype(refs.h.dtype)
        if scratch.d is not None:
            scratch.d[part.rows, :] = d
        if scratch.transposed is not None:
            scratch.transposed[:, part.rows] = d.T

    def hidden(part: Part) -> None:  # some of its columns
        rows = pl.ds(pl.multiple_of(i * tokens, tokens), tokens)
        dh[rows, part.rows] += dot(scratch.transposed[...], refs.weight[:, part.rows], (1, 0))

    def only(part: Part) -> None:
        """dW where the tile has one step: nothing to carry."""
        own = dot(scratch.d[part.rows, :], refs.h[...], (1, 0))
        dw[part.rows, :] = (own + placing.first(part)).astype(dw.dtype)

    def add(part: Part) -> None:
        own = dot(scratch.d[part.rows, :], refs.h[...], (1, 0))
        acc[part.rows, :] = jnp.where(i == 0, 0.0, acc[part.rows, :]) + own

    def put(part: Part) -> None:
        dw[part.rows, :] = (acc[part.rows, :] + placing.first(part)).astype(dw.dtype)

    def over_columns(body: Callable[[Part], None]) -> None:
        over_parts(vocab, TURNS * tokens * width, LANES, body)

    pl.when(taken)(lambda: over_columns(cotangent))
    if dh is not None:
        made = taken & (i * tokens < dh.shape[0])
        pl.when(made)(lambda: over_parts(width, TURNS * tokens * vocab, LANES, hidden))
    if placing is not None:
        last, alone = i == pl.num_programs(1) - 1, pl.num_programs(1) == 1
        if spec.token_steps > 1:
            pl.when(taken & ~alone)(lambda: over_columns(add))
        pl.when(last)(placing.arrive)  # as late as can be: they come behind the next tile of the head
        pl.when(alone)(lambda: over_columns(only))
        if spec.token_steps > 1:
            pl.when(last & ~alone)(lambda: over_columns(put))
        pl.when(last)(lambda: placing.put_more(dw))
    if dbias is not None:

        @pl.when(i == pl.num_programs(1) - 1)
        def _() -> None:
            dbias_out[...] = jnp.broadcast_to(dbias[...], (vocab, LANES)).T[:1, :]


def _blocks(spec: Spec, width: int, x: _Read) -> _Read:
    tokens, vocab = spec.tiles.tokens, spec.tiles.vocab

    def lanes(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((size, tokens), lambda j, i, n_live: (0, spec.readable(i, n_live)))

    return _Read(
        scalars=pl.BlockSpec(memory_space=pltpu.SMEM),
        h=pl.BlockSpec((tokens, width), lambda j, i, n_live: (spec.readable(i, n_live), 0)),
        weight=pl.BlockSpec((vocab, width), lambda j, i, n_live: (j, 0)),
        bias=None if x.bias is None else pl.BlockSpec((1, vocab), lambda j, i, n_live: (0, j)),
        token=lanes(ROWS),
        rows=None if x.rows is None else pl.BlockSpec(memory_space=pl.ANY),
        slots=None if x.slots is None else pl.BlockSpec(memory_space=pltpu.VMEM),
    )


def _buffers(spec: Spec, read: _Read, rows: Array | None, hidden: int) -> tuple[Any, Any, Any]:
    """``(shapes, block specs, scratch)``: dW and dbias with ``rows`` that are ready, dH of ``hidden`` tokens."""
    (tokens, vocab), width, item = (spec.tiles.tokens, spec.tiles.vocab), read.h.shape[1], read.h.dtype
    shapes: Any = HeadGrads(None, None)
    blocks: Any = HeadGrads(None, None)
    scratch: dict[str, Any] = {}
    dh: tuple[Any, Any] = None, None
    if hidden:
        size = pl.cdiv(hidden, tokens) * tokens, width
        once = pl.BlockSpec(size, lambda j, i, n_live: (0, 0), pipeline_mode=pl.Buffered(1))
        dh = jax.ShapeDtypeStruct(size, jnp.float32), once
        scratch["transposed"] = pltpu.VMEM((tokens, vocab), item)
    if rows is not None:
        own, has_bias = _blocks(spec, width, read), read.bias is not None
        dbias = jax.ShapeDtypeStruct((1, spec.vocab), jnp.float32) if has_bias else None
        shapes = tree_of(HeadGrads, compat.hbm_output((spec.vocab, width), rows.dtype, spec.interpret), dbias)
        blocks = HeadGrads(own.weight, own.bias)
        buffer, arrived, is_ready = active_rows.scratch(vocab, read.slots, width, rows.dtype)
        # A float32 dW is its own accumulator; a tile that takes a single step needs none.
        carried = spec.token_steps > 1 and rows.dtype != jnp.float32
        scratch |= dict(
            weight=pltpu.VMEM((vocab, width), jnp.float32) if carried else None,
            bias=pltpu.VMEM((vocab, 1), jnp.float32) if has_bias else None,
            d=pltpu.VMEM((vocab, tokens), item), buffer=buffer, arrived=arrived, is_ready=is_ready,
        )  # fmt: skip
    return Gradients(dh[0], shapes), Gradients(dh[1], blocks), _Scratch(**scratch)


def hard_sweep(
    p: Problem,
    n_live: Array | int | None,
    stats: TokenStats,
    g: StatCotangents,
    known: Ready | None,
    tiles: Tiles,
    hidden: int = 0,
) -> Gradients:
    """dW of a ``[V, H]`` head in the dtype of its ``known`` rows, which are put in their places; the other rows, and
    dbias ``[V]`` float32 outside of those columns, are what the exact kernels make of the first ``n_live`` tokens
    (``None``: of all). With dH ``[hidden, H]`` float32 of the first ``hidden`` tokens over the same other columns.
    Without ``known`` rows that dH alone, over all columns."""
    k = prepare("dhead", p, n_live, tiles)
    spec, x, tokens, (n, width) = k.spec, k.operands, k.spec.tiles.tokens, p.h.shape
    passes, times = pl.cdiv(spec.vocab, spec.tiles.vocab), 1 + (known is not None)
    steps: Index = (
        spec.token_steps if spec.all_live else jnp.clip(tiles_of_live(k.n_live[0], tokens), 1, spec.token_steps)
    )
    read = _Read(
        scalars=x.scalars,
        h=x.h,
        weight=x.weight,
        bias=x.bias,
        token=coefficients(p, k.live, stats, g, spec.token_steps * tokens),
        rows=None if known is None else compat.in_hbm(known.rows, spec.interpret),
        slots=None if known is None else active_rows.slots_by_part(known),
    )
    shapes, blocks, scratch = _buffers(spec, read, None if known is None else known.rows, hidden)
    count, in_place = k.n_live, {}
    if known is not None:
        count = active_rows.schedule(known, k.n_live, passes, spec.tiles.vocab)
        # The interpreter has no room for the end of a ragged block in an array that it is given.
        if known.rows.shape[0] == spec.vocab and not (spec.interpret and spec.vocab % spec.tiles.vocab):
            at = next(i for i, leaf in enumerate(jax.tree.leaves(read)) if leaf is read.rows)
            in_place = {1 + at: int(hidden > 0)}  # of the outputs dH comes first
    out = pl.pallas_call(
        functools.partial(_kernel, spec),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(passes, steps),
            in_specs=[_blocks(spec, width, read)],
            out_specs=blocks,
            scratch_shapes=[scratch],
        ),
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=tiles.vmem_limit
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * (n * times + hidden) * width * spec.vocab_size,
            transcendentals=n * spec.vocab_size,
            bytes_accessed=x.weight.nbytes * times + passes * x.h.nbytes,
        ),
        input_output_aliases=in_place,
        name=f"head_{'hard' if known is not None else 'more'}_t{tokens}_v{spec.tiles.vocab}",
        interpret=spec.interpret,
    )(count, read)
    dh, bias = out.hidden, out.head.bias
    if dh is not None:
        dh = jnp.where((k.live & g.any_nonzero())[:hidden, None], dh[:hidden], 0.0)
    return Gradients(dh, HeadGrads(out.head.weight, None if bias is None else bias[0]))
