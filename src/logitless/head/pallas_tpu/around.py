"""dW around rows of it that are ready, on TPU, and dH of few tokens along the way: the hard rows of a sparse backward.

    grid (vocabulary tile, token tile):   x^T = W h^T, dx as in ``backward.py``, zero in the columns that are ready
                                          dW [vocab, H]  = ready rows + dx^T h      written once, in its final dtype
                                          dH [N, H]     += dx W                     float32, in VMEM for the whole sweep

for a ``[V, H]`` head. Three matmuls (``6 N H V`` FLOP), two without dH, which all tokens must fit into VMEM for
(:func:`rows_beside`). HBM: W once, dW once, hidden states once per vocabulary tile if they are more than one token
tile. Where a tile takes a single step, dW has no accumulator to go through.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from logitless import compat
from logitless.head.pallas_tpu import ready
from logitless.head.pallas_tpu.backward import ROWS, coefficients, cotangent_of_logits
from logitless.head.pallas_tpu.operands import clear_dead, column_ids, dot, prepare, rounded
from logitless.head.pallas_tpu.ready import Placing, Ready
from logitless.head.pallas_tpu.tiles import FIRST, LANES, Spec, Tiles, choose, need
from logitless.problem import Gradients, HeadGrads, Problem
from logitless.pytree import register
from logitless.stats import StatCotangents, TokenStats


@register
@dataclasses.dataclass(frozen=True)
class _Read:
    """What the kernel reads: arrays, block specs, references. Numbers per token stand in a row."""

    scalars: Any  # [3] float32, in SMEM: temperature, softcap, scale
    h: Any  # [N, H]
    weight: Any  # [V, H]
    targets: Any  # [1, N] int32
    bias: Any  # [1, V] float32 or None
    token: Any  # [ROWS, N] float32: each token's coefficients
    rows: Any  # [V or slots, H]: ready
    slots: Any  # [parts, 1, slots of a part] int32: their columns


def rows_beside(p: Problem, tokens: int) -> int:
    """Rows of dH, whole token tiles of ``tokens``, that fit into VMEM beside dW's sweep with such tiles: in the place
    of the larger token tile that dW's ordinary sweep has."""
    width, item = p.h.shape[1], jnp.dtype(p.h.dtype).itemsize
    full = choose("dhead", FIRST["dhead"][0], width, p.head.vocab, item, "vh", compat.tpu_vmem_bytes())
    large, small = (need("dhead", n, full.vocab, width, item, "vh") for n in (max(full.tokens, tokens), tokens))
    return (large - small) // (4 * width) // tokens * tokens


def _kernel(
    spec: Spec, n_live: Any, refs: _Read, out: Gradients, acc: HeadGrads, buffer: Any, arrived: Any, is_ready: Any
) -> None:
    vocab, tokens = spec.tiles.vocab, spec.tiles.tokens
    j, i = pl.program_id(0), pl.program_id(1)
    placing = Placing(vocab, n_live, refs.rows, refs.slots, buffer, arrived, is_ready)
    written: Any = out.head
    dw: Any = written.weight if acc.weight is None else acc.weight
    dbias: Any = acc.bias
    dh: Any = out.hidden
    end = spec.vocab_size - j * vocab  # of the columns that count, in this tile

    @pl.when(i == 0)
    def _() -> None:
        placing.begin()
        if dbias is not None:
            dbias[...] = jnp.zeros_like(dbias)

    if dh is not None:

        @pl.when((i == 0) & (j == 0))
        def _() -> None:
            dh[...] = jnp.zeros_like(dh)

        @pl.when((i == 0) & (end < vocab))
        def _() -> None:  # dH is a sum over the rows of this block, and 0 * NaN is NaN
            clear_dead(refs.weight, 0, end)

    taken, dead = spec.live(i, n_live) | (i == 0), spec.dead_rows(i, n_live)  # the first step puts rows in place
    if dead is not None:
        pl.when(taken & dead[0])(lambda: clear_dead(refs.h, 0, dead[1]))

    def step(first: bool) -> None:
        h, w = refs.h[...], refs.weight[...]
        x = dot(w, h, (1, 1))
        if refs.bias is not None:
            # A bias stands along the lanes in HBM ([V, 1] would be stored 128 times larger).
            x = x + jnp.broadcast_to(refs.bias[...], (8, vocab)).T[:, :1]
        x = rounded(spec, x)
        column = column_ids(x, 0)
        is_target = column == refs.targets[...] - j * vocab
        d = cotangent_of_logits(spec, x, lambda k: refs.token[k : k + 1, :], is_target, refs.scalars)
        d = jnp.where((column < end) & (is_ready[...] == 0), d, 0.0)
        if dbias is not None:
            dbias[...] += jnp.sum(d, axis=1, keepdims=True)
        d = d.astype(h.dtype)
        own = dot(d, h, (1, 0))
        if first:
            dw[...] = (own + placing.first()).astype(dw.dtype)
            placing.put_more(dw)
        else:
            dw[...] += own
        if dh is not None:
            rows = pl.ds(pl.multiple_of(i * tokens, tokens), tokens)
            dh[rows, :] += dot(d.T, w, (1, 0))

    pl.when(i == 0)(lambda: step(True))
    if spec.token_steps > 1:
        pl.when((i > 0) & taken)(lambda: step(False))

    @pl.when(i == pl.num_programs(1) - 1)
    def _() -> None:
        if acc.weight is not None:
            written.weight[...] = dw[...].astype(written.weight.dtype)
        if dbias is not None:
            written.bias[...] = jnp.broadcast_to(dbias[...], (vocab, LANES)).T[:1, :]


def _blocks(spec: Spec, width: int, has_bias: bool) -> _Read:
    tokens, vocab = spec.tiles.tokens, spec.tiles.vocab

    def lanes(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((size, tokens), lambda j, i, n_live: (0, spec.readable(i, n_live)))

    return _Read(
        scalars=pl.BlockSpec(memory_space=pltpu.SMEM),
        h=pl.BlockSpec((tokens, width), lambda j, i, n_live: (spec.readable(i, n_live), 0)),
        weight=pl.BlockSpec((vocab, width), lambda j, i, n_live: (j, 0)),
        targets=lanes(1),
        bias=pl.BlockSpec((1, vocab), lambda j, i, n_live: (0, j)) if has_bias else None,
        token=lanes(ROWS),
        rows=pl.BlockSpec(memory_space=pl.ANY),
        slots=pl.BlockSpec(memory_space=pltpu.VMEM),
    )


def dhead_around(
    p: Problem,
    n_live: Array | int | None,
    stats: TokenStats,
    g: StatCotangents,
    known: Ready,
    tiles: Tiles,
    with_hidden: bool = False,
) -> Gradients:
    """dW of a ``[V, H]`` head in the dtype of its ``known`` rows, which are put in their places; the other rows, and
    dbias ``[V]`` float32 outside of those columns, are what the exact kernels make of the first ``n_live`` tokens
    (``None``: of all). With dH ``[N, H]`` float32 over the same other columns if that is asked for."""
    k = prepare("dhead", p, n_live, tiles)
    spec, x = k.spec, k.operands
    (n, width), vocab, dtype = p.h.shape, spec.tiles.vocab, known.rows.dtype
    passes, padded = pl.cdiv(spec.vocab, vocab), spec.token_steps * spec.tiles.tokens
    slots = ready.slots_by_part(known)
    read = _Read(
        scalars=x.scalars,
        h=x.h,
        weight=x.weight,
        targets=x.targets.reshape(1, n),
        bias=x.bias,
        token=coefficients(p, k.live, stats, g, padded),
        rows=compat.in_hbm(known.rows, spec.interpret),
        slots=slots,
    )
    has_bias, blocks = x.bias is not None, _blocks(spec, width, x.bias is not None)
    weight, once = pl.BlockSpec((vocab, width), lambda j, i, n_live: (j, 0)), pl.Buffered(1)
    whole = pl.BlockSpec((padded, width), lambda j, i, n_live: (0, 0), pipeline_mode=once) if with_hidden else None
    shape = jax.ShapeDtypeStruct((padded, width), jnp.float32) if with_hidden else None
    bias = jax.ShapeDtypeStruct((1, spec.vocab), jnp.float32) if has_bias else None
    shapes: Any = Gradients(shape, HeadGrads(compat.hbm_output((spec.vocab, width), dtype, spec.interpret), bias))  # type: ignore[arg-type]
    # A float32 dW is its own accumulator; so is one whose tiles take a single step.
    own = spec.token_steps > 1 and dtype != jnp.float32
    scratch: Any = HeadGrads(
        pltpu.VMEM((vocab, width), jnp.float32) if own else None,  # type: ignore[arg-type]
        pltpu.VMEM((vocab, 1), jnp.float32) if has_bias else None,  # type: ignore[arg-type]
    )
    # The interpreter has no room for the end of a ragged block in an array that it is given.
    in_place = known.rows.shape[0] == spec.vocab and not (spec.interpret and spec.vocab % vocab)
    at = next(i for i, leaf in enumerate(jax.tree.leaves(read)) if leaf is read.rows)
    item = jnp.dtype(dtype).itemsize
    out = pl.pallas_call(
        functools.partial(_kernel, spec),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(passes, spec.token_steps),
            in_specs=[blocks],
            out_specs=Gradients(whole, HeadGrads(weight, blocks.bias)),  # type: ignore[arg-type]
            scratch_shapes=[scratch, *ready.scratch(vocab, slots, width, dtype)],
        ),
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=tiles.vmem_limit
        ),
        cost_estimate=pl.CostEstimate(
            flops=(6 if with_hidden else 4) * n * width * spec.vocab_size,
            transcendentals=n * spec.vocab_size,
            bytes_accessed=x.weight.nbytes + spec.vocab * width * item + passes * x.h.nbytes,
        ),
        input_output_aliases={1 + at: int(with_hidden)} if in_place else {},  # of the outputs dH comes first
        name=f"head_{'hard' if with_hidden else 'around'}_t{spec.tiles.tokens}_v{vocab}",
        interpret=spec.interpret,
    )(ready.schedule(known, k.n_live, passes, vocab), read)
    hidden = None
    if out.hidden is not None:
        hidden = jnp.where((k.live & g.any_nonzero())[:, None], out.hidden[:n], 0.0)
    return Gradients(hidden, HeadGrads(out.head.weight, None if out.head.bias is None else out.head.bias[0]))
