"""The fused head's kernels on TPU, each over a problem: statistics, the direction of dH, dH and dW.

The problem's tokens stand as they are swept, live ones first (``n_live``, traced, or ``None``: all; later token tiles
are skipped and fetch nothing):

    token_stats                one matmul      statistics
    token_stats_and_maxima     one matmul      bit-identical statistics, and columns' largest probabilities
    token_stats_and_terms      two matmuls     bit-identical statistics, and the terms for d logp / d hidden
    token_stats_and_direction  two matmuls     the same, and d logp / d hidden itself
    dhidden                    two matmuls     dH for any cotangents of logp, entropy and lse
    dhead                      two matmuls     dW in the final dtype, dbias; one for tokens with kept exponentials
                               one matmul      for a frozen weight: dbias, or LoRA's outer factor (lora.py)

An objective of ``logp`` alone costs four matmuls for loss, dH and dW, three for tokens whose exponentials the forward
sweep keeps (``kept_exponentials.py``): with ``p`` the softmax, ``y`` the target and ``E`` the sweep's accumulator,
relative to a maximum,

    D = d logp / d h = own W_y - others E        own = -expm1(logp) slope_y        others = p(maximum) slope
    dH = g_logp D

``g`` is known after the loss, so that a term ``[N, H]`` has to wait for it. In float32 it would be twice as large as
dH, and the compiler gives temporaries no memory that an output will need. A sweep over 16-bit hidden states therefore
stores ``E`` as two arrays in their dtype, ``E = high + rest`` to 2^-17 (:class:`Terms`), and dH overwrites the first
array, some tokens at a time: temporaries are ``rest`` and the target rows of some tokens. Sums over devices, and terms
for LoRA, are computed immediately from ``E`` in float32.

Sweeps, tiles and bytes: ``forward.py``, ``dweight.py``, ``dhidden.py``, ``tiles.py``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from logitless.core.problem import Problem
from logitless.core.pytree import register
from logitless.core.row_passes import Front, in_parts, rows_in_parts
from logitless.core.stats import (
    RowSums,
    StatCotangents,
    TokenStats,
    dz_at_target,
    factor,
    finish,
    log_probability,
    masked_stats,
    slope,
    valid_targets,
)
from logitless.head.pallas_tpu import gather_rows, lora
from logitless.head.pallas_tpu.dhidden import dhidden_sweep
from logitless.head.pallas_tpu.dweight import AT_TARGET, HeadSums, coefficients, dhead_sweep
from logitless.head.pallas_tpu.forward import forward_sweep
from logitless.head.pallas_tpu.gather_columns import columns_at
from logitless.head.pallas_tpu.kept_exponentials import Kept, factors, has_spare, room_for, schedule
from logitless.head.pallas_tpu.operands import FLOOR, Launch, interpreter, prepare
from logitless.head.pallas_tpu.tiles import LANES, Tiles, whole_lanes

Count = Array | int | None

Both = tuple[Array, Array | None]
"""A cotangent of the hidden states ``[N, H]`` float32, LoRA's part in it, and of their low-rank image ``[N, r]`` before
LoRA's scale (``lora.py``); ``None`` without LoRA."""

PART = 1024
"""Rows or numbers that XLA gathers at a time. A gather of twice as many is one for the chip's sparse core, a program of
half a megabyte whatever it does there, and the compiler lets what that writes share memory with nothing else."""

LEAST = LANES
"""From this number of rows on, a kernel gathers rows: XLA's has less code for fewer only."""


def _finished(k: Launch, p: Problem, sums: RowSums) -> TokenStats:
    """Statistics; NaN where a live token's target is outside the vocabulary, zeros for dead tokens."""
    return masked_stats(finish(sums, valid_targets(p.targets, p.call.vocab_size), p.transform), k.live)


def token_sums(
    p: Problem, n_live: Count = None, direction: bool = False, tiles: Tiles | None = None
) -> tuple[RowSums, Array, Array | None]:
    """``(sums [N], raw target logit [N], E [N, H], with LoRA [N, H + R], or None)`` over the head's columns, which may
    be a shard of the vocabulary; targets that are another shard's are -1. What belongs to dead tokens means nothing."""
    sums, x_y, expected, _, _ = forward_sweep(prepare("forward", p, n_live, tiles), direction)
    assert not isinstance(expected, tuple)
    return sums, x_y, expected


def token_stats(p: Problem, n_live: Count = None, tiles: Tiles | None = None) -> TokenStats:
    """Statistics ``[N]``, zero from ``n_live`` on. One matmul, no logits in HBM."""
    k = prepare("forward", p, n_live, tiles)
    return _finished(k, p, forward_sweep(k, False)[0])


def token_stats_and_maxima(
    p: Problem, n_live: Count, floor: Array, tiles: Tiles | None = None
) -> tuple[TokenStats, Array]:
    """``(statistics [N], maxima [vocab_size] float32)``: for every column an upper bound of its largest log-probability
    over the tokens whose ``floor [N]``, a lower bound of their logsumexp, is finite and whose target it is not. The
    statistics are those of :func:`token_stats` to the bit. One matmul."""
    k = prepare("forward", p, n_live, tiles)
    tokens = k.spec.tiles.tokens
    # Rows of the last block beyond the array must not count, whatever would stand there.
    token = k.operands.token.at[FLOOR].set(jnp.inf).at[FLOOR, : p.n].set(jnp.where(k.live, floor, jnp.inf))
    token = jnp.pad(token, ((0, 0), (0, -token.shape[1] % k.spec.lanes)), constant_values=jnp.inf)
    sums, _, _, maxima, _ = forward_sweep(k.reading(token=token), False, maxima=True)
    assert maxima is not None
    written = jnp.arange(maxima.shape[0]) * tokens < k.n_live[0]
    return _finished(k, p, sums), jnp.max(jnp.where(written[:, None], maxima, -jnp.inf), axis=0)


def token_stats_and_terms(
    p: Problem, n_live: Count = None, tiles: Tiles | None = None, keep: int = 0
) -> tuple[TokenStats, Terms, Kept | None]:
    """``(statistics [N], d logp / d hidden in its terms, exponentials)``, of dead tokens zeros, anything and nothing.
    Two matmuls. ``keep``: of so many tokens, the first, exponentials are kept for :func:`dhead`; whole token tiles."""
    k = prepare("forward", p, n_live, tiles, kept=keep, spare=keep > 0 and has_spare(p, keep))
    sums, x_y, expected, _, kept = forward_sweep(k, True, room_for(p, keep) if keep else 0, halves=True)
    high, rest = expected if isinstance(expected, tuple) else (expected, None)
    assert high is not None
    stats = _finished(k, p, sums)
    return stats, Terms(high, rest, *factors_of(p, stats, sums, x_y), columns_of(p)), kept


def token_stats_and_direction(
    p: Problem, n_live: Count = None, tiles: Tiles | None = None, keep: int = 0
) -> tuple[TokenStats, Both, Kept | None]:
    """``(statistics [N], d logp / d hidden, exponentials)``, the first two zero from ``n_live`` on. Two matmuls.
    ``keep`` as for :func:`token_stats_and_terms`; not with LoRA."""
    if not p.head.rank:
        stats, terms, kept = token_stats_and_terms(p, n_live, tiles, keep)
        live = jnp.arange(p.n) < (p.n if n_live is None else n_live)
        return stats, (terms.times(p, live.astype(jnp.float32), jnp.dtype(jnp.float32)), None), kept
    k = prepare("forward", p, n_live, tiles)
    sums, x_y, expected, _, _ = forward_sweep(k, True)
    stats = _finished(k, p, sums)
    assert expected is not None and not isinstance(expected, tuple)
    return stats, token_direction(p, n_live, stats, sums, x_y, expected), None


@register
@dataclasses.dataclass(frozen=True)
class Terms:
    """``d logp / d hidden`` of the swept tokens, not made yet."""

    high: Array  # [N, H]: E, or its upper half, in the hidden states' dtype
    rest: Array | None  # [N, H]: E - high, in the same 16-bit dtype
    own: Array  # [N] float32: what the target's row is multiplied by
    others: Array  # [N] float32: what E is multiplied by
    targets: Array  # [N] int32, each a column of the head

    def times(self, p: Problem, g: Array, dtype: DTypeLike) -> Array:
        """``g D [N, H]``, exactly zero where ``g [N]`` is; written over ``high`` if that has its dtype."""
        n, out = self.high.shape[0], self.high
        rest = [] if self.rest is None else [self.rest]
        if p.head.layout == "vh" and _by_copies(p.head.weight, n):
            numbers, interpret = (g, self.own, self.others), interpreter(p.call.interpret)
            return gather_rows.made_of_rows(
                p.head.weight, self.targets, interpret, _times, numbers, [out, *rest], dtype
            )
        # Columns of an [H, V] head are found by one sweep over the head, for any number of tokens.
        size = PART if p.head.layout == "vh" and dtype == out.dtype and n >= 2 * PART else n

        def made(first: Array | int, count: int, high: Array) -> Array:
            def cut(x: Array) -> Array:
                return lax.dynamic_slice_in_dim(x, first, count) if count < n else x

            w = head_rows(p, p.head.weight, cut(self.targets)).astype(jnp.float32)
            numbers = [cut(x)[:, None] for x in (g, self.own, self.others)]
            return _times(w, numbers.__getitem__, [cut(x) for x in (high, *rest)]).astype(dtype)

        return made(0, n, out) if size == n else in_parts(made, size, out)


def _times(w: Array, number: Callable[[int], Array], halves: list[Array]) -> Array:
    """``g D`` of some tokens: their targets' rows, ``g``, ``own`` and ``others`` as columns, and ``E``."""
    scale, e = number(0), functools.reduce(jnp.add, (half.astype(jnp.float32) for half in halves))
    return jnp.where(scale != 0, (scale * number(1)) * w - (scale * number(2)) * e, 0.0)


def hidden_in_order(f: Front, p: Problem) -> Problem:
    """The problem with the hidden states of ``f``, otherwise unchanged."""
    return p if f.order is None else p.with_hidden(gather(p.h, f.order, interpreter(p.call.interpret)))


def in_order(f: Front, p: Problem) -> Problem:
    """The problem with the tokens of ``f``."""
    h = hidden_in_order(f, p).h
    return dataclasses.replace(p.with_hidden(p.targets), live=None).rows(f.take).with_hidden(h)


def _coefficients(
    k: Launch, p: Problem, stats: TokenStats, g: StatCotangents, padded: int, order: Array | None
) -> Array:
    """``[padded, ROWS]``: numbers per token, in the ``order`` of the hidden states, tokens with a cotangent first;
    ``None``: no reordering. Gathered as a single table, which the kernel reads directly."""
    if order is None:
        return coefficients(p, k.live, stats, g, padded).T
    order = jnp.concatenate([order.astype(jnp.int32), jnp.arange(p.n, padded, dtype=jnp.int32)])
    return rows_in_parts(coefficients(p, jnp.ones((p.n,), bool), stats, g, padded).T, order, PART)


def factors_of(
    p: Problem, stats: TokenStats, sums: RowSums, x_y: Array, here: Array | None = None
) -> tuple[Array, Array]:
    """``(own [N], others [N])``; ``here [N]``: the target is one of the head's columns."""
    one, zero = jnp.ones_like(x_y), jnp.zeros_like(x_y)
    own = dz_at_target(stats, StatCotangents(one, zero, zero))
    # The accumulator is relative to the largest other logit: scale it by that column's probability.
    others = jnp.exp(log_probability(sums.maximum, factor(p.transform), stats))
    bend = slope(x_y, p.transform)
    if bend is not None:
        own = own * bend
        others = others if p.transform.softcap is not None else others * bend  # a softcap's slope is already in it
    return own if here is None else jnp.where(here, own, 0.0), others


def columns_of(p: Problem) -> Array:
    """Targets ``[N]`` as columns of the head, whatever stood there."""
    return jnp.clip(p.targets.astype(jnp.int32), 0, p.head.vocab - 1)


def token_direction(
    p: Problem, n_live: Count, stats: TokenStats, sums: RowSums, x_y: Array, expected: Array, here: Array | None = None
) -> Both:
    """``d logp / d hidden``, or a shard's part; ``here [N]``: whether the target is a local column.

    ``stats`` are those of the whole vocabulary, ``sums``, ``x_y`` and ``expected`` (float32) what the sweep gave.
    """
    own, others = factors_of(p, stats, sums, x_y, here)
    y = columns_of(p)

    def direction(x: Array, e: Array) -> Array:
        d = own[:, None] * head_rows(p, x, y).astype(jnp.float32)[:, : e.shape[1]] - others[:, None] * e
        return d if n_live is None else jnp.where((jnp.arange(p.n) < n_live)[:, None], d, 0.0)

    if not p.head.rank:
        return direction(p.head.weight, expected), None
    of_weight, of_low = lora.parts_of(p, expected)
    low = direction(lora.wide_outer(p.head), of_low)
    return lora.joined(p, direction(p.head.weight, of_weight), low), low


def _by_copies(x: Array, count: int) -> bool:
    return count >= LEAST and gather_rows.served(x)


def gather(x: Array, at: Array, interpret: object, keep: Array | None = None) -> Array:
    """Rows ``at [K]`` of ``x [V, H]``, zeros where ``keep [K]`` is false: by a kernel, or by XLA in parts."""
    if _by_copies(x, at.size):
        return gather_rows.rows_at(x, at, interpret, keep)
    return rows_in_parts(x, at, PART, keep)


def head_rows(p: Problem, x: Array, y: Array) -> Array:
    """``[N, width]``: what ``x``, of the head's layout, has at the columns ``y [N]`` of the vocabulary."""
    if p.head.layout == "vh":
        return gather(x, y, interpreter(p.call.interpret))
    return columns_at(x, y, interpreter(p.call.interpret))


def dhidden(
    p: Problem,
    n_live: Count,
    stats: TokenStats,
    g: StatCotangents,
    tiles: Tiles | None = None,
    order: Array | None = None,
) -> Both:
    """dH for cotangents ``g [N]``; exactly zero for dead tokens and where ``g`` is. Two matmuls. ``order``: that of
    ``p.h`` and of dH, all else in the call's; it begins with the ``n_live`` tokens that have a cotangent."""
    k = prepare("dhidden", p, n_live, tiles)
    out = dhidden_sweep(k.reading(token=_coefficients(k, p, stats, g, whole_lanes(p.n), order).T))
    out = jnp.where((k.live if order is not None else k.live & g.any_nonzero())[:, None], out, 0.0)
    if not p.head.rank:
        return out, None
    dh, low = lora.parts_of(p, out)
    return lora.joined(p, dh, low), low


def dhead(
    p: Problem,
    n_live: Count,
    stats: TokenStats,
    g: StatCotangents,
    tiles: Tiles | None = None,
    weight: bool = True,
    order: Array | None = None,
) -> HeadSums:
    """dW in the layout of the head, if ``weight``; dbias ``[V]`` float32, and the cotangent of LoRA's outer factor,
    float32, where these are there. Two matmuls, one without dW. ``order``: as in :func:`dhidden`.

    Accumulated in float32 and rounded once. Dead tokens may hold anything; a token before ``n_live`` whose cotangents
    are zero adds zero, provided that its hidden state is finite.
    """
    k = prepare("dhead", p, n_live, tiles)
    k = k.reading(token=_coefficients(k, p, stats, g, k.spec.token_steps * k.spec.tiles.tokens, order))
    return _dhead(k if weight else k.reading(h_t=None), p, weight)


def dhead_of_kept(
    p: Problem, n_live: Count, stats: TokenStats, g: StatCotangents, kept: Kept, tiles: Tiles | None = None
) -> HeadSums:
    """:func:`dhead` with ``kept`` exponentials for the first tokens, in the order of the keeping sweep: one matmul less
    for these. The entropy has no cotangent. Dead tokens among the kept hold numbers."""
    count = kept.x_y.shape[0]
    k = prepare("dhead", p, p.n if n_live is None else n_live, tiles, kept=count, kept_tile=kept.tile)
    token = _coefficients(k, p, stats, g, k.spec.token_steps * k.spec.tiles.tokens, None)
    f, own = factors(p, kept, stats, g)
    token = token.at[:count, AT_TARGET].set(own)
    k = k.reading(kept=kept.exponentials, factors=f.T[:, None] if p.head.layout == "vh" else f)
    k = k.reading(weight=None) if count == p.n else k
    k = dataclasses.replace(k, n_live=schedule(k, g.any_nonzero()))
    return _dhead(k.reading(token=token), p, True)


def _dhead(k: Launch, p: Problem, weight: bool) -> HeadSums:
    found = dhead_sweep(k, p.dweight_dtype, weight)
    return found if found.outer is None else dataclasses.replace(found, outer=lora.douter(p, found.outer))
