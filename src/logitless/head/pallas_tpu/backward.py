"""Backward of the fused head on TPU by recompute: dH from per-token cotangents, with no logits in HBM.

With the statistics saved, a column's dlogit needs only its own logit and the two numbers of
:func:`logitless.stats.dz_line`, which belong to the token and are computed once, in :func:`coefficients`:

    s_v = k (u_v - peak)        dz_v = exp(s_v) (a - b s_v),  v != y        dz_y = at_target        (z = k u)

then ``dx = dz * slope`` (folded into a, b and at_target unless a softcap makes it vary over columns), rounded to the
operands' dtype. Two matmuls (``4 N H V`` FLOP):

    dhidden   grid (token tile, vocabulary tile):  dH [tokens, H] += dx W, carried in its float32 output block.
              HBM: W once per token tile, hidden states once, 4 N H written.

dW's sweep: ``dhead.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from logitless import compat
from logitless.head.pallas_tpu.operands import (
    LOG_ZERO,
    Launch,
    Operands,
    clear_outside,
    column_ids,
    compiler_params,
    dot,
    head_tile,
    over_vocabulary,
    raw_logits,
    sweep_blocks,
)
from logitless.head.pallas_tpu.tiles import Spec
from logitless.problem import Problem
from logitless.stats import StatCotangents, TokenStats, dz, dz_line
from logitless.transform import factor, pull_back, swept, times

ROWS = 8
"""Per-token numbers of a backward kernel: centre, a, b, at_target, temperature, of a kept token its dx at the target
(``AT_TARGET``), and two unused."""

AT_TARGET = 5


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


def cotangent_of_logits(spec: Spec, x: Array, token: Callable[[int], Array], is_target: Array, scalars: Any) -> Array:
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
        d = cotangent_of_logits(spec, x, lambda k: refs.token[:, k : k + 1], is_target, refs.scalars)
        if masked:
            d = jnp.where(column < spec.tail, d, 0.0)
        out_ref[...] += dot(d.astype(w.dtype), w, (1, spec.axis))

    over_vocabulary(spec, live, step)


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
