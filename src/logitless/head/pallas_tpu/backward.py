"""Backward of the fused head on TPU by recompute: dH and dW from per-token cotangents, with no logits in HBM.

With the statistics saved, a column's dlogit needs only its own logit and the two numbers of
:func:`logitless.stats.dz_line`, which belong to the token and are computed once, in :func:`coefficients`:

    s_v = k (u_v - peak)        dz_v = exp(s_v) (a - b s_v),  v != y        dz_y = at_target        (z = k u)

then ``dx = dz * slope`` (folded into a, b and at_target unless a softcap makes it vary over columns), rounded to the
operands' dtype. Two matmuls (``4 N H V`` FLOP) each:

    dhidden   grid (token tile, vocabulary tile):  dH [tokens, H] += dx W, carried in its float32 output block.
              HBM: W once per token tile, hidden states once, 4 N H written.
    dhead     grid (vocabulary tile, token tile):  dW [vocab, H] += dx^T h, carried in float32 and written once in its
              final dtype. HBM: hidden states once per vocabulary tile, W once, dW once.

``dhead`` never transposes on the chip: for ``[V, H]`` the logits are computed as ``x^T = W h^T`` with tokens along the
lanes, for ``[H, V]`` a transposed copy of the hidden states (``N H``, not of the head) is streamed beside them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from logitless import compat
from logitless.head.pallas_tpu.operands import (
    LOG_ZERO,
    Launch,
    Operands,
    clear_dead,
    clear_outside,
    column_ids,
    compiler_params,
    dot,
    head_tile,
    over_vocabulary,
    raw_logits,
    rounded,
    sweep_blocks,
)
from logitless.head.pallas_tpu.tiles import LANES, Spec
from logitless.problem import HeadGrads, Problem
from logitless.stats import StatCotangents, TokenStats, dz, dz_line
from logitless.transform import factor, pull_back, swept, times

ROWS = 8
"""Per-token numbers of a backward kernel: centre, a, b, at_target, temperature, and three unused."""


def coefficients(p: Problem, live: Array, stats: TokenStats, g: StatCotangents, padded: int) -> Array:
    """``[ROWS, padded]`` float32; a token that is dead (not ``live [N]``) or has no cotangent gets an infinite centre
    and zeros: exp(s) and dz are 0."""
    n, t = p.n, p.transform
    moves = g.any_nonzero() & live
    zero, target = jnp.zeros((n,), jnp.float32), jnp.ones((n,), bool)
    k = factor(t)
    values = [*dz_line(stats.peak, stats, g, k), dz(zero, target, stats, g, k)]
    if t.softcap is None:  # the slope is k
        values = [times(k, v) for v in values]
    rows = [jnp.where(moves, v, other) for v, other in zip([stats.peak, *values], _NOTHING, strict=False)]
    temperature = 1.0 if t.temperature is None else t.temperature
    rows.append(jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (n,)))
    rows = [jnp.pad(v, (0, padded - n), constant_values=other) for v, other in zip(rows, _NOTHING, strict=True)]
    return jnp.stack(rows + [jnp.zeros((padded,), jnp.float32)] * (ROWS - len(rows)))


_NOTHING = (jnp.inf, 0.0, 0.0, 0.0, 1.0)
"""The numbers of a token without a gradient."""


def _dx(spec: Spec, x: Array, token: Callable[[int], Array], is_target: Array, scalars: Any) -> Array:
    """Unrounded cotangent of the raw logits ``x``; ``token(k)`` broadcasts the token's ``k``-th number against it."""
    transform = spec.transform(scalars, token(4) if spec.per_token_temperature else None)
    s = jnp.maximum(times(factor(transform), swept(x, transform) - token(0)), LOG_ZERO)
    d = jnp.where(is_target, token(3), jnp.exp(s) * (token(1) - token(2) * s))
    return pull_back(d, x, transform) if spec.has_softcap else d


def _dhidden_kernel(spec: Spec, n_live: Any, refs: Operands, out_ref: Any) -> None:
    i, j = pl.program_id(0), pl.program_id(1)
    live = spec.live(i, n_live)

    @pl.when(live & (j == 0))
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    def step(width: int, masked: bool) -> None:
        if masked:
            clear_outside(spec, refs.weight, width)
        w = head_tile(spec, refs.weight, width)
        x = raw_logits(spec, refs, w)
        column = column_ids(x)
        is_target = column == refs.targets[...] - j * spec.tiles.vocab
        d = _dx(spec, x, lambda k: refs.token[:, k : k + 1], is_target, refs.scalars)
        if masked:
            d = jnp.where(column < spec.tail, d, 0.0)
        out_ref[...] += dot(d.astype(w.dtype), w, (1, spec.axis))

    over_vocabulary(spec, live, step)


def _dhead_kernel(spec: Spec, n_live: Any, refs: Operands, out: HeadGrads, scratch: HeadGrads) -> None:
    vh = spec.layout == "vh"
    acc: Any = out.weight if scratch.weight is None else scratch.weight  # a float32 dW is its own accumulator
    dbias: Any = scratch.bias
    j, i = pl.program_id(0), pl.program_id(1)
    vocab, axis = spec.tiles.vocab, spec.axis  # along which the vocabulary runs in the tile of logits

    @pl.when(i == 0)
    def _() -> None:
        for ref in jax.tree.leaves((acc, dbias)):
            ref[...] = jnp.zeros_like(ref)

    live, dead = spec.live(i, n_live), spec.dead_rows(i, n_live)
    if dead is not None:

        @pl.when(live & dead[0])
        def _() -> None:
            clear_dead(refs.h, 0, dead[1])
            if not vh:
                clear_dead(refs.h_t, 1, dead[1])

    def step(masked: bool) -> None:
        h, w = refs.h[...], refs.weight[...]
        x = dot(w, h, (1, 1)) if vh else dot(h, w, (1, 0))
        if refs.bias is not None:
            # A bias stands along the lanes in HBM ([V, 1] would be stored 128 times larger).
            x = x + (jnp.broadcast_to(refs.bias[...], (8, vocab)).T[:, :1] if vh else refs.bias[...])
        x = rounded(spec, x)
        column = column_ids(x, axis)
        is_target = column == refs.targets[...] - j * vocab
        token = (lambda k: refs.token[k : k + 1, :]) if vh else (lambda k: refs.token[:, k : k + 1])
        d = _dx(spec, x, token, is_target, refs.scalars)
        if masked:
            d = jnp.where(column < spec.vocab_size - j * vocab, d, 0.0)
        if dbias is not None:
            dbias[...] += jnp.sum(d, axis=1 - axis, keepdims=True)
        d = d.astype(h.dtype)
        acc[...] += dot(d, h, (1, 0)) if vh else dot(refs.h_t[...], d, (1, 0))

    # Columns beyond the array's end produce rows of dW that are never written, so only padding columns need a mask.
    whole = spec.vocab_size // vocab if spec.vocab_size < spec.vocab else pl.cdiv(spec.vocab, vocab)
    if whole > 0:
        pl.when(live & (j < whole))(functools.partial(step, False))
    if spec.vocab_size < spec.vocab and spec.vocab_size % vocab:
        pl.when(live & (j == whole))(functools.partial(step, True))

    @pl.when(i == pl.num_programs(1) - 1)
    def _() -> None:
        written: Any = out
        if scratch.weight is not None:
            written.weight[...] = acc[...].astype(written.weight.dtype)
        if dbias is not None:
            total = dbias[...]
            written.bias[...] = jnp.broadcast_to(total, (vocab, LANES)).T[:1, :] if vh else total


def dhidden_sweep(k: Launch) -> Array:
    """dH ``[N, H]`` float32; rows of dead tiles are not written."""
    spec, x = k.spec, k.operands
    (n, width), tokens, passes = x.h.shape, spec.tiles.tokens, spec.token_steps
    return pl.pallas_call(
        functools.partial(_dhidden_kernel, spec),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(passes, spec.vocab_steps),
            in_specs=[sweep_blocks(k, ROWS)],
            out_specs=pl.BlockSpec((tokens, width), lambda i, j, n_live: (i, 0), pipeline_mode=pl.Buffered(1)),
        ),
        out_shape=compat.hbm_output((n, width), jnp.float32, spec.interpret),
        compiler_params=compiler_params(spec),
        cost_estimate=pl.CostEstimate(
            flops=4 * n * width * spec.vocab_size,
            transcendentals=n * spec.vocab_size,
            bytes_accessed=passes * x.weight.nbytes + x.h.nbytes + 4 * n * width,
        ),
        name=f"head_dhidden_t{tokens}_v{spec.tiles.vocab}",
        interpret=spec.interpret,
    )(k.n_live, x)


def _dhead_blocks(k: Launch) -> Operands:
    """Block specs for a grid (vocabulary tile, token tile)."""
    spec, width = k.spec, k.operands.h.shape[1]
    tokens, vocab = spec.tiles.tokens, spec.tiles.vocab

    def rows(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((tokens, size), lambda j, i, n_live: (spec.readable(i, n_live), 0))

    def lanes(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((size, tokens), lambda j, i, n_live: (0, spec.readable(i, n_live)))

    per_token, vocab_row = lanes if spec.layout == "vh" else rows, lambda j, i, n_live: (0, j)
    head = pl.BlockSpec((vocab, width), lambda j, i, n_live: (j, 0))
    return k.operands.blocks(
        scalars=pl.BlockSpec(memory_space=pltpu.SMEM),
        h=rows(width),
        weight=head if spec.layout == "vh" else pl.BlockSpec((width, vocab), vocab_row),
        targets=per_token(1),
        bias=pl.BlockSpec((1, vocab), vocab_row),
        token=per_token(ROWS),
        h_t=lanes(width),
    )


def dhead_sweep(k: Launch, out_dtype: Any) -> tuple[Array, Array | None]:
    """``(dW in the head's shape and out_dtype, dbias [V] float32 or None)``; ``k`` as for :func:`dhidden_sweep`, with
    coefficients of whole token tiles."""
    spec, x, vh = k.spec, k.operands, k.spec.layout == "vh"
    (n, width), tokens, vocab = x.h.shape, spec.tiles.tokens, spec.tiles.vocab
    passes = pl.cdiv(spec.vocab, vocab)
    moved = passes * x.h.nbytes * (1 if vh else 2) + x.weight.nbytes
    moved += x.weight.size * jnp.dtype(out_dtype).itemsize
    if vh:  # tokens along the lanes
        k = k.reading(targets=x.targets.reshape(1, n), token=x.token.T)
    blocks, tile = _dhead_blocks(k), (vocab, width) if vh else (width, vocab)
    has_bias, own_accumulator = x.bias is not None, out_dtype != jnp.float32
    shapes: Any = HeadGrads(
        compat.hbm_output(x.weight.shape, out_dtype, spec.interpret),
        jax.ShapeDtypeStruct((1, spec.vocab), jnp.float32) if has_bias else None,  # type: ignore[arg-type]
    )
    scratch: Any = HeadGrads(
        pltpu.VMEM(tile, jnp.float32) if own_accumulator else None,  # type: ignore[arg-type]
        pltpu.VMEM((vocab, 1) if vh else (1, vocab), jnp.float32) if has_bias else None,  # type: ignore[arg-type]
    )
    out = pl.pallas_call(
        functools.partial(_dhead_kernel, spec),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(passes, spec.token_steps),
            in_specs=[blocks],
            out_specs=HeadGrads(blocks.weight, blocks.bias),
            scratch_shapes=[scratch],
        ),
        out_shape=shapes,
        compiler_params=compiler_params(spec),
        cost_estimate=pl.CostEstimate(
            flops=4 * n * width * spec.vocab_size, transcendentals=n * spec.vocab_size, bytes_accessed=moved
        ),
        name=f"head_dhead_t{tokens}_v{vocab}",
        interpret=spec.interpret,
    )(k.n_live, k.operands)
    return out.weight, None if out.bias is None else out.bias[0]
