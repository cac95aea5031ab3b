"""Backward of the fused head on TPU: dlogits of a tile from per-token cotangents, and dW and dbias from them, with no
logits in HBM. dH: ``dhidden.py``.

With the statistics saved, a column's dlogit needs only its own logit and the two numbers of
:func:`logitless.core.stats.dz_line`, which belong to the token and are computed once, in :func:`coefficients`:

    s_v = k (u_v - peak)        dz_v = exp(s_v) (a - b s_v),  v != y        dz_y = at_target        (z = k u)

then ``dx = dz * slope`` (folded into a, b and at_target unless a softcap makes it vary over columns), rounded to the
operands' dtype. Two matmuls (``4 N H V`` FLOP):

    dhead     grid (vocabulary tile, token tile):  dW [vocab, H] += dx^T h, carried in float32 and written once in its
              final dtype. HBM: hidden states once per vocabulary tile, W once, dW once.

Tokens whose exponentials the forward sweep kept (``kept_exponentials.py``) stand first and take one matmul: ``dx`` is a
multiply. Their exponentials are read once; where these have dW's shape, dW is written over them, a vocabulary tile
after its last read.

Nothing is transposed here: for ``[V, H]`` the logits are computed as ``x^T = W h^T`` with tokens along the lanes, for
``[H, V]`` a transposed copy of the hidden states (``N H``, not of the head) is streamed beside them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from logitless.core import compat
from logitless.core.compat import Index, Ref
from logitless.core.problem import Problem
from logitless.core.pytree import register
from logitless.core.stats import StatCotangents, TokenStats, dz_at_target, dz_line, factor, pull_back, swept, times
from logitless.head.pallas_tpu import kept_exponentials as kept_tokens
from logitless.head.pallas_tpu.operands import (
    LOG_ZERO,
    ROWS,
    Launch,
    Operands,
    clear_dead,
    column_ids,
    compiler_params,
    dot,
    outer_bytes,
    rounded,
)
from logitless.head.pallas_tpu.tiles import LANES, Part, Spec, fill_rows, over_parts, zero_rows

AT_TARGET, TARGET = 5, 6
"""Among the numbers of a token that a backward kernel is given: centre, a, b, at_target, temperature, of a kept token
its dx at the target, its target, and one unused."""


def coefficients(p: Problem, live: Array, stats: TokenStats, g: StatCotangents, padded: int) -> Array:
    """``[ROWS, padded]`` float32; a token that is dead (not ``live [N]``) or has no cotangent gets an infinite centre
    and zeros: exp(s) and dz are 0."""
    n, t = p.n, p.transform
    moves = g.any_nonzero() & live
    k = factor(t)
    values = [*dz_line(stats.peak, stats, g, k), dz_at_target(stats, g)]
    if t.softcap is None:  # the slope is k
        values = [times(k, v) for v in values]
    rows = [jnp.where(moves, v, other) for v, other in zip([stats.peak, *values], _NOTHING, strict=False)]
    temperature, zero = 1.0 if t.temperature is None else t.temperature, jnp.zeros((n,), jnp.float32)
    rows += [jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (n,)), zero, p.targets.astype(jnp.float32), zero]
    rows = [jnp.pad(v, (0, padded - n), constant_values=other) for v, other in zip(rows, _NOTHING, strict=True)]
    # Apart: XLA would lay out each row number as an array with a single row, in eight times the code.
    return jnp.stack(lax.optimization_barrier(rows))


_NOTHING = (jnp.inf, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
"""The numbers of a token without a gradient."""


def cotangent_of_logits(spec: Spec, x: Array, token: Callable[[int], Array], is_target: Array, scalars: Ref) -> Array:
    """Unrounded cotangent of the raw logits ``x``; ``token(k)`` broadcasts the token's ``k``-th number against it."""
    transform = spec.transform(scalars, token(4) if spec.per_token_temperature else None)
    s = jnp.maximum(times(factor(transform), swept(x, transform) - token(0)), LOG_ZERO)
    d = jnp.where(is_target, token(3), jnp.exp(s) * (token(1) - token(2) * s))
    return pull_back(d, x, transform) if spec.has_softcap else d


@register
@dataclasses.dataclass(frozen=True)
class HeadSums:
    """What the sweep of dW makes, and its accumulators: shapes, block specs, references, then arrays."""

    weight: Any  # [V, H] or [H, V]; None where the weight is frozen
    bias: Any  # [1, V] float32
    outer: Any = None  # [V, R] or [R, V] float32: of LoRA's outer factor, without its scale


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Vocabulary tile ``j`` in a step: cotangents of the logits of some columns."""

    spec: Spec
    refs: Operands
    j: Index

    def at(self, part: Part) -> tuple[slice | pl.Slice, slice | pl.Slice]:
        """The part's columns of the vocabulary in what has the head's layout."""
        return (part.rows, slice(None)) if self.spec.layout == "vh" else (slice(None), part.rows)

    def token(self, k: int) -> Array:
        """The ``k``-th number of each token, as it meets the logits."""
        return self.refs.token[k : k + 1, :] if self.spec.layout == "vh" else self.refs.token[:, k : k + 1]

    def is_target(self, x: Array, part: Part) -> Array:
        column, target = column_ids(x, self.spec.axis), self.token(TARGET).astype(jnp.int32)
        return column == target - (self.j * self.spec.tiles.vocab + part.first)

    def cotangent(self, part: Part) -> Array:
        """Unrounded, with logits that are made again."""
        refs, vh = self.refs, self.spec.layout == "vh"
        h, w = refs.h[...], refs.weight[self.at(part)]
        x = dot(w, h, (1, 1)) if vh else dot(h, w, (1, 0))
        if refs.low is not None:
            low, outer = refs.low[...], refs.outer[self.at(part)]
            x = x + refs.scalars[3] * (dot(outer, low, (1, 1)) if vh else dot(low, outer, (1, 0)))
        if refs.bias is not None:
            # A bias stands along the lanes in HBM ([V, 1] would be stored 128 times larger).
            bias = refs.bias[:, part.rows]
            x = x + (jnp.broadcast_to(bias, (8, part.size)).T[:, :1] if vh else bias)
        x = rounded(self.spec, x)
        return cotangent_of_logits(self.spec, x, self.token, self.is_target(x, part), refs.scalars)

    def kept_cotangent(self, part: Part) -> Array:
        """Unrounded, from exponentials that were kept."""
        if self.spec.layout == "vh":
            f = self.refs.factors[0]
        else:
            mine = column_ids(self.refs.factors) == self.j * self.spec.tiles.vocab // self.spec.kept_tile
            f = jnp.sum(jnp.where(mine, self.refs.factors[...], 0.0), axis=1, keepdims=True)
        e = self.refs.kept[self.at(part)].astype(jnp.float32)
        # A token without a gradient may have nothing in its place, or anything.
        return jnp.where(self.is_target(e, part), self.token(AT_TARGET), jnp.where(f != 0, e * f, 0.0))


def _dhead_kernel(spec: Spec, n_live: Ref, refs: Operands, out: HeadSums, scratch: HeadSums) -> None:
    vh, vocab, axis = spec.layout == "vh", spec.tiles.vocab, spec.axis  # along which the vocabulary runs in the logits
    acc: Any = out.weight if scratch.weight is None else scratch.weight  # a float32 dW is its own accumulator
    dbias: Any = scratch.bias
    j, i = pl.program_id(0), pl.program_id(1)
    tile = _Tile(spec, refs, j)

    @pl.when(i == 0)
    def _() -> None:
        for ref in jax.tree.leaves((acc, dbias, out.outer)):
            zero_rows(ref)

    live, dead = spec.live(i, n_live), spec.dead_rows(i, n_live)
    if spec.kept:
        live = live & (i >= spec.kept_steps)
    if dead is not None:

        @pl.when(live & dead[0])
        def _() -> None:
            for ref, axis in ((refs.h, 0), (refs.low, 0), (refs.h_t, 1), (refs.low_t, 1)):
                if ref is not None:
                    clear_dead(ref, axis, dead[1])

    def add(cotangents: Callable[[Part], Array], masked: bool, part: Part) -> None:
        d = cotangents(part)
        if masked:
            d = jnp.where(column_ids(d, axis) < spec.vocab_size - (j * vocab + part.first), d, 0.0)
        if dbias is not None:
            dbias[tile.at(part)] += jnp.sum(d, axis=1 - axis, keepdims=True)
        h = refs.h[...]
        d = d.astype(h.dtype)
        if acc is not None:
            acc[tile.at(part)] += dot(d, h, (1, 0)) if vh else dot(refs.h_t[...], d, (1, 0))
        if out.outer is not None:
            out.outer[tile.at(part)] += dot(d, refs.low[...], (1, 0)) if vh else dot(refs.low_t[...], d, (1, 0))

    def step(again: bool, masked: bool) -> None:
        work = ((acc is not None) + again) * spec.tiles.tokens * refs.h.shape[1]
        if not again:
            work //= 2  # there is one matmul, and a turn's filling and draining weighs twice as much
        way = tile.cotangent if again else tile.kept_cotangent
        over_parts(vocab, work, LANES, functools.partial(add, way, masked))

    # Columns beyond the array's end produce rows of dW that are never written, so only padding columns need a mask.
    whole = spec.vocab_size // vocab if spec.vocab_size < spec.vocab else pl.cdiv(spec.vocab, vocab)
    ways = [] if refs.weight is None else [(live, True)]
    if spec.kept:
        moves = kept_tokens.has_gradient(n_live, jnp.minimum(i, spec.kept_steps - 1), spec.kept_steps)
        ways.append(((i < spec.kept_steps) & moves, False))
    for taken, again in ways:
        if whole > 0:
            pl.when(taken & (j < whole))(functools.partial(step, again, False))
        if spec.vocab_size < spec.vocab and spec.vocab_size % vocab:
            pl.when(taken & (j == whole))(functools.partial(step, again, True))

    @pl.when(i == pl.num_programs(1) - 1)
    def _() -> None:
        if scratch.weight is not None:
            fill_rows(out.weight, lambda part: acc[part.rows, :].astype(out.weight.dtype))
        if dbias is not None:
            total = dbias[...]
            out.bias[...] = jnp.broadcast_to(total, (vocab, LANES)).T[:1, :] if vh else total


def _weight_block(spec: Spec, width: int) -> pl.BlockSpec:
    """A vocabulary tile of the head, or of dW."""
    if spec.layout == "vh":
        return pl.BlockSpec((spec.tiles.vocab, width), lambda j, i, n_live: (j, 0))
    return pl.BlockSpec((width, spec.tiles.vocab), lambda j, i, n_live: (0, j))


def _dhead_blocks(k: Launch) -> Operands:
    """Block specs for a grid (vocabulary tile, token tile)."""
    spec, width = k.spec, k.operands.h.shape[1]
    tokens, vocab = spec.tiles.tokens, spec.tiles.vocab

    def at(i: Index, n_live: Ref) -> Index:
        """The token tile to read; a step without a tile repeats the previous step's tile."""
        own = spec.readable(i, n_live)
        return jnp.where(i < spec.kept_steps, kept_at(i, n_live), own) if spec.kept else own

    def kept_at(i: Index, n_live: Ref) -> Array:
        return n_live[1 + jnp.minimum(i, spec.kept_steps - 1)]

    def rows(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((tokens, size), lambda j, i, n_live: (at(i, n_live), 0))

    def lanes(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((size, tokens), lambda j, i, n_live: (0, at(i, n_live)))

    tiles = pl.cdiv(spec.vocab_size, max(spec.kept_tile, 1))  # tiles in the sweep that kept exponentials
    if spec.layout == "vh":
        kept = pl.BlockSpec((vocab, tokens), lambda j, i, n_live: (j, kept_at(i, n_live)))
        ratio, last = max(spec.kept_tile // vocab, 1), tiles - 1  # padding may fill whole tiles
        factors = pl.BlockSpec(
            (1, 1, tokens), lambda j, i, n_live: (jnp.minimum(j // ratio, last), 0, kept_at(i, n_live))
        )
    else:
        kept = pl.BlockSpec((tokens, vocab), lambda j, i, n_live: (kept_at(i, n_live), j))
        factors = pl.BlockSpec((tokens, tiles), lambda j, i, n_live: (kept_at(i, n_live), 0))
    per_token, vocab_row = lanes if spec.layout == "vh" else rows, lambda j, i, n_live: (0, j)
    return k.operands.blocks(
        scalars=pl.BlockSpec(memory_space=pltpu.SMEM),
        h=rows(width),
        weight=_weight_block(spec, width),
        bias=pl.BlockSpec((1, vocab), vocab_row),
        token=per_token(ROWS),
        h_t=lanes(width),
        kept=kept,
        factors=factors,
        low=rows(k.rank),
        low_t=lanes(k.rank),
        outer=_weight_block(spec, k.rank),
    )


def dhead_sweep(k: Launch, out_dtype: DTypeLike, has_weight: bool = True) -> HeadSums:
    """dW in the head's shape and ``out_dtype`` if ``has_weight``, dbias ``[V]`` float32 if there is a bias, that of
    LoRA's outer factor in whole lanes; ``k`` as for :func:`dhidden_sweep`, with coefficients of whole token tiles."""
    spec, x, vh = k.spec, k.operands, k.spec.layout == "vh"
    (n, width), tokens, vocab = x.h.shape, spec.tiles.tokens, spec.tiles.vocab
    passes, again = pl.cdiv(spec.vocab, vocab), n - spec.kept
    shape = (spec.vocab, width) if vh else (width, spec.vocab)
    moved = passes * x.h.nbytes * (1 if vh or not has_weight else 2) + (x.weight.nbytes if again else 0)
    moved += spec.vocab * width * jnp.dtype(out_dtype).itemsize * has_weight + 3 * outer_bytes(k)
    in_place: dict[int, int] = {}
    if spec.kept:
        moved += spec.kept * spec.vocab * x.kept.dtype.itemsize
        if x.kept.shape == shape and x.kept.dtype == out_dtype:
            leaves = jax.tree.leaves(k.operands)
            in_place = {1 + next(i for i, leaf in enumerate(leaves) if leaf is x.kept): 0}
    if vh:  # tokens along the lanes
        k = k.reading(token=x.token.T)
    blocks, tile = _dhead_blocks(k), (vocab, width) if vh else (width, vocab)
    has_bias, own_accumulator = x.bias is not None, has_weight and out_dtype != jnp.float32
    shapes = HeadSums(
        compat.hbm_output(shape, out_dtype, spec.interpret) if has_weight else None,
        jax.ShapeDtypeStruct((1, spec.vocab), jnp.float32) if has_bias else None,
        None if x.outer is None else jax.ShapeDtypeStruct(x.outer.shape, jnp.float32),
    )
    scratch: Any = HeadSums(
        pltpu.VMEM(tile, jnp.float32) if own_accumulator else None,
        pltpu.VMEM((vocab, 1) if vh else (1, vocab), jnp.float32) if has_bias else None,
    )
    out_blocks = HeadSums(_weight_block(spec, width) if has_weight else None, blocks.bias, blocks.outer)
    out = pl.pallas_call(
        functools.partial(_dhead_kernel, spec),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(passes, spec.token_steps),
            in_specs=[blocks],
            out_specs=out_blocks,
            scratch_shapes=[scratch],
        ),
        out_shape=shapes,
        compiler_params=compiler_params(spec),
        cost_estimate=pl.CostEstimate(
            flops=2 * (n * (width * has_weight + k.rank) + again * (width + k.rank)) * spec.vocab_size,
            transcendentals=again * spec.vocab_size,
            bytes_accessed=moved,
        ),
        input_output_aliases=in_place,
        name=f"head_dhead_t{tokens}_v{vocab}",
        interpret=spec.interpret,
    )(k.n_live, k.operands)
    return dataclasses.replace(out, bias=None if out.bias is None else out.bias[0])
