"""Backward of the fused head on TPU by recompute: dH and dW from per-token cotangents, with no logits in HBM.

With the statistics saved, a column's dlogit needs only its own logit (:func:`logitless.stats.dz`, rearranged so that
what belongs to the token is computed once, in :func:`coefficients`):

    log p_v = (z_v - max_logit) + max_logp        dz_v = p_v (c0 + c1 log p_v),  v != y        dz_y = at_target
    c0 = g_lse - g_logp - g_entropy * entropy        c1 = -g_entropy

then ``dx = dz * slope`` (folded into c0, c1 and at_target unless a softcap makes it vary over columns), rounded to the
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
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from logitless import compat
from logitless.head.pallas_tpu_forward import (
    LOG_ZERO,
    clear_dead,
    clear_outside,
    dot,
    head_tile,
    raw_logits,
    sweep_inputs,
)
from logitless.head.pallas_tpu_tiles import LANES, Spec
from logitless.stats import StatCotangents, TokenStats, dz
from logitless.transform import LogitTransform, forward, pull_back, slope

ROWS = 8
"""Per-token numbers of a backward kernel: max_logit, max_logp, c0, c1, at_target, temperature, and two unused."""


def coefficients(stats: TokenStats, g: StatCotangents, transform: LogitTransform, n_live: Array, padded: int) -> Array:
    """``[ROWS, padded]`` float32; a token that is dead or has no cotangent gets ``max_logp = -inf``: p and dz are 0."""
    n = stats.lse.shape[0]
    live = g.any_nonzero() & (jnp.arange(n) < n_live)
    zero, target = jnp.zeros((n,), jnp.float32), jnp.ones((n,), bool)
    at_target = dz(zero, target, stats.logp, stats.entropy, stats.max_logit, stats.max_logp, g)
    values = [g.lse - g.logp - g.entropy * stats.entropy, -g.entropy, at_target]
    if transform.softcap is None:
        factor = slope(zero, transform)
        values = values if factor is None else [v * factor for v in values]
    rows = [stats.max_logit, stats.max_logp, *values]
    neutral = [0.0, -jnp.inf, 0.0, 0.0, 0.0, 1.0]
    rows = [jnp.where(live, r, other) for r, other in zip(rows, neutral, strict=False)]
    t = 1.0 if transform.temperature is None else transform.temperature
    rows.append(jnp.broadcast_to(jnp.asarray(t, jnp.float32), (n,)))
    rows = [jnp.pad(r, (0, padded - n), constant_values=other) for r, other in zip(rows, neutral, strict=True)]
    return jnp.stack(rows + [jnp.zeros((padded,), jnp.float32)] * (ROWS - len(rows)))


def _dx(spec: Spec, x: Array, token: Any, is_target: Array, scalars: Any) -> Array:
    """Unrounded cotangent of the raw logits ``x``; ``token(k)`` broadcasts the token's ``k``-th number against it."""
    transform = spec.transform(scalars, token(5) if spec.per_token_temperature else None)
    log_p = jnp.maximum((forward(x, transform) - token(0)) + token(1), LOG_ZERO)
    d = jnp.where(is_target, token(4), jnp.exp(log_p) * (token(2) + token(3) * log_p))
    return pull_back(d, x, transform) if spec.has_softcap else d


def _dhidden_kernel(
    spec: Spec, n_live: Any, scalars: Any, h_ref: Any, w_ref: Any, y_ref: Any, token_ref: Any, *rest: Any
) -> None:
    b_ref = rest[0] if spec.has_bias else None
    out_ref = rest[-1]
    i, j = pl.program_id(0), pl.program_id(1)
    live = spec.live(i, n_live)

    @pl.when(live & (j == 0))
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    def step(width: int, masked: bool) -> None:
        if masked:
            clear_outside(spec, w_ref, width)
        w = head_tile(spec, w_ref, width)
        x = raw_logits(spec, h_ref[...], w, None if b_ref is None else b_ref[:, :width])
        column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        is_target = column == y_ref[...] - j * spec.tiles.vocab
        d = _dx(spec, x, lambda k: token_ref[:, k : k + 1], is_target, scalars)
        if masked:
            d = jnp.where(column < spec.tail, d, 0.0)
        out_ref[...] += dot(d.astype(w.dtype), w, (1, 0 if spec.layout == "vh" else 1))

    last = spec.vocab_steps - 1
    if spec.tail == spec.tiles.vocab:
        pl.when(live)(functools.partial(step, spec.tiles.vocab, False))
    else:
        if last > 0:
            pl.when(live & (j < last))(functools.partial(step, spec.tiles.vocab, False))
        pl.when(live & (j == last))(functools.partial(step, spec.tail_width, spec.tail % LANES != 0))


def _dhead_kernel(spec: Spec, n: int, want_bias: bool, n_live: Any, scalars: Any, h_ref: Any, *rest: Any) -> None:
    refs = list(rest)
    vh = spec.layout == "vh"
    ht_ref = None if vh else refs.pop(0)
    w_ref, y_ref, token_ref = refs.pop(0), refs.pop(0), refs.pop(0)
    b_ref = refs.pop(0) if spec.has_bias else None
    dw_ref = refs.pop(0)
    db_ref = refs.pop(0) if want_bias else None
    sum_ref = refs.pop() if want_bias else None
    acc_ref = refs.pop() if refs else dw_ref  # a float32 dW is its own accumulator
    j, i = pl.program_id(0), pl.program_id(1)
    tokens, vocab = spec.tiles.tokens, spec.tiles.vocab
    axis = 0 if vh else 1  # along which the vocabulary runs in the tile of logits

    @pl.when(i == 0)
    def _() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)
        if sum_ref is not None:
            sum_ref[...] = jnp.zeros_like(sum_ref)

    live = spec.live(i, n_live)
    if not (spec.all_live and n % tokens == 0):
        count = n if spec.all_live else n_live[0]

        @pl.when(live & ((i + 1) * tokens > count))
        def _() -> None:
            clear_dead(h_ref, 0, count - i * tokens)
            if ht_ref is not None:
                clear_dead(ht_ref, 1, count - i * tokens)

    def step(masked: bool) -> None:
        h, w = h_ref[...], w_ref[...]
        x = dot(w, h, (1, 1)) if vh else dot(h, w, (1, 0))
        if b_ref is not None:
            # A bias stands along the lanes in HBM ([V, 1] would be stored 128 times larger).
            x = x + (jnp.broadcast_to(b_ref[...], (8, vocab)).T[:, :1] if vh else b_ref[...])
        if spec.logits_dtype != jnp.float32:
            x = x.astype(spec.logits_dtype).astype(jnp.float32)
        column = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
        is_target = column == y_ref[...] - j * vocab
        token = (lambda k: token_ref[k : k + 1, :]) if vh else (lambda k: token_ref[:, k : k + 1])
        d = _dx(spec, x, token, is_target, scalars)
        if masked:
            d = jnp.where(column < spec.vocab_size - j * vocab, d, 0.0)
        if sum_ref is not None:
            sum_ref[...] += jnp.sum(d, axis=1 - axis, keepdims=True)
        d = d.astype(h.dtype)
        acc_ref[...] += dot(d, h, (1, 0)) if vh else dot(ht_ref[...], d, (1, 0))  # type: ignore[index]

    # Columns beyond the array's end produce rows of dW that are never written, so only padding columns need a mask.
    whole = spec.vocab_size // vocab if spec.vocab_size < spec.vocab else pl.cdiv(spec.vocab, vocab)
    if whole > 0:
        pl.when(live & (j < whole))(functools.partial(step, False))
    if spec.vocab_size < spec.vocab and spec.vocab_size % vocab:
        pl.when(live & (j == whole))(functools.partial(step, True))

    @pl.when(i == pl.num_programs(1) - 1)
    def _() -> None:
        if acc_ref is not dw_ref:
            dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)
        if db_ref is not None:
            total = sum_ref[...]  # type: ignore[index]
            db_ref[...] = jnp.broadcast_to(total, (vocab, LANES)).T[:1, :] if vh else total


def dhidden_sweep(
    spec: Spec,
    hidden: Array,
    lm_head: Array,
    targets: Array,
    bias: Array | None,
    token: Array,
    scalars: Array,
    n_live: Array,
) -> Array:
    """dH ``[N, H]`` float32; rows of dead tiles are not written. ``token [ROWS, N]`` from :func:`coefficients`."""
    n, width = hidden.shape
    tokens = spec.tiles.tokens
    specs = sweep_inputs(spec, width)
    large = [(name, compat.in_hbm(x, spec.interpret)) for name, x in (("hidden", hidden), ("head", lm_head))]
    operands: list[tuple[str, Array]] = [("scalars", scalars), *large]
    operands += [("token", targets[:, None]), ("sums", token.T)]
    if bias is not None:
        operands.append(("bias", bias[None, :]))
    passes = pl.cdiv(n, tokens)
    return pl.pallas_call(
        functools.partial(_dhidden_kernel, spec),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(passes, spec.vocab_steps),
            in_specs=[specs[name] for name, _ in operands],
            out_specs=pl.BlockSpec((tokens, width), lambda i, j, n_live: (i, 0), pipeline_mode=pl.Buffered(1)),
        ),
        out_shape=compat.hbm_output((n, width), jnp.float32, spec.interpret),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=spec.tiles.vmem_limit
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * n * width * spec.vocab_size,
            transcendentals=n * spec.vocab_size,
            bytes_accessed=passes * lm_head.nbytes + hidden.nbytes + 4 * n * width,
        ),
        name=f"head_dhidden_t{tokens}_v{spec.tiles.vocab}",
        interpret=spec.interpret,
    )(n_live, *(x for _, x in operands))


def dhead_sweep(
    spec: Spec,
    hidden: Array,
    lm_head: Array,
    targets: Array,
    bias: Array | None,
    token: Array,
    scalars: Array,
    n_live: Array,
    out_dtype: Any,
    want_bias: bool,
) -> tuple[Array, Array | None]:
    """``(dW in the shape of lm_head and out_dtype, dbias [V] float32 or None)``; ``token [ROWS, padded N]``."""
    n, width = hidden.shape
    vh = spec.layout == "vh"
    tokens, vocab = spec.tiles.tokens, spec.tiles.vocab

    def tile(i: Any, n_live: Any) -> Any:
        return spec.readable(i, n_live)

    rows = pl.BlockSpec((tokens, width), lambda j, i, n_live: (tile(i, n_live), 0))
    lanes = pl.BlockSpec((width, tokens), lambda j, i, n_live: (0, tile(i, n_live)))
    vocab_row = pl.BlockSpec((1, vocab), lambda j, i, n_live: (0, j))
    if vh:
        head = pl.BlockSpec((vocab, width), lambda j, i, n_live: (j, 0))
        per_token = [pl.BlockSpec((k, tokens), lambda j, i, n_live: (0, tile(i, n_live))) for k in (1, ROWS)]
    else:
        head = pl.BlockSpec((width, vocab), lambda j, i, n_live: (0, j))
        per_token = [pl.BlockSpec((tokens, k), lambda j, i, n_live: (tile(i, n_live), 0)) for k in (1, ROWS)]
    operands = [(pl.BlockSpec(memory_space=pltpu.SMEM), scalars), (rows, compat.in_hbm(hidden, spec.interpret))]
    if not vh:
        operands.append((lanes, compat.in_hbm(hidden.T, spec.interpret)))
    operands.append((head, compat.in_hbm(lm_head, spec.interpret)))
    operands += [(per_token[0], targets[None, :] if vh else targets[:, None]), (per_token[1], token if vh else token.T)]
    if bias is not None:
        operands.append((vocab_row, bias[None, :]))
    out_specs, out_shape, scratch = [head], [compat.hbm_output(lm_head.shape, out_dtype, spec.interpret)], []
    if out_dtype != jnp.float32:
        scratch.append(pltpu.VMEM((vocab, width) if vh else (width, vocab), jnp.float32))
    if want_bias:
        out_specs.append(vocab_row)
        out_shape.append(jax.ShapeDtypeStruct((1, spec.vocab), jnp.float32))
        scratch.append(pltpu.VMEM((vocab, 1) if vh else (1, vocab), jnp.float32))
    passes = pl.cdiv(spec.vocab, vocab)
    streams = (1 if vh else 2) * passes
    out = pl.pallas_call(
        functools.partial(_dhead_kernel, spec, n, want_bias),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(passes, pl.cdiv(n, tokens)),
            in_specs=[s for s, _ in operands],
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=spec.tiles.vmem_limit
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * n * width * spec.vocab_size,
            transcendentals=n * spec.vocab_size,
            bytes_accessed=streams * hidden.nbytes + lm_head.nbytes + lm_head.size * jnp.dtype(out_dtype).itemsize,
        ),
        name=f"head_dhead_t{tokens}_v{vocab}",
        interpret=spec.interpret,
    )(n_live, *(x for _, x in operands))
    return out[0], out[1][0] if want_bias else None
