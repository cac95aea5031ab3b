"""A look at 128 rows in a sample of the columns: is a sparse backward worth it, and at which threshold?

As in ``sparse_columns.py``, with two differences. Bounds begin at what the logsumexp is expected to be, where the
sampler or an earlier pass has said how probable the target was (``head/sparse/lse_guess.py``). And the few rows' logits
are those of ``SAMPLE`` columns, in blocks evenly spaced over the vocabulary, each standing for V / SAMPLE: all columns
would be one more pass over the head (0.8 ms of a v6e at V = 151936, H = 4096). What they judge is a matter of cost;
what a row leaves out is then computed for all rows. On 8192 tokens of ``bench.realistic`` the share of hard rows comes
out within 0.8 % of all rows of what all columns say (benchmarks/results/tpu_v6e_sparse_estimate.json).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from logitless.core import row_passes
from logitless.core.problem import Head, Problem
from logitless.core.row_passes import in_parts, swept_columns
from logitless.core.stats import NEG_INF, StatCotangents, TokenStats, valid_targets
from logitless.core.transform import factor, times
from logitless.head.linear import raw_logits
from logitless.head.pallas_tpu import kernels
from logitless.head.pallas_tpu.operands import interpreter
from logitless.head.pallas_tpu.sparse_columns import (
    MASS_ERROR,
    Active,
    costs_no_less,
    evenly_spaced,
    hard_whatever_is_kept,
    positions,
)
from logitless.head.pallas_tpu.tiles import LANES
from logitless.head.sparse.active_columns import Rule
from logitless.head.sparse.column_gather import misses
from logitless.head.sparse.lse_guess import expected_lse, target_logits
from logitless.head.sparse.token_order import some

SAMPLE = 8192
"""Columns that the few rows are looked at in."""


@dataclasses.dataclass(frozen=True)
class Few:
    """Some of the rows that count, and their logits in some columns."""

    at: Array  # [FEW] int32: which rows
    p: Problem  # theirs
    x: Array  # [FEW, S] float32: raw logits
    columns: Array  # [S] int32: of these columns
    lse: Array  # [FEW]: the logsumexp, as far as these columns tell

    @property
    def share(self) -> float:
        """Columns of the vocabulary for which each of these stands."""
        return self.p.call.vocab_size / self.columns.size


def sampled(vocab_size: int) -> tuple[np.ndarray, int]:
    """``(where blocks of columns start, columns of a block)``: evenly spaced; one block of all columns in a small
    vocabulary."""
    if vocab_size <= SAMPLE:
        return np.zeros(1, np.int32), vocab_size
    blocks = max(SAMPLE // LANES, 1)
    return np.linspace(0, vocab_size // LANES - 1, blocks).astype(np.int32) * LANES, LANES


def _blocks(x: Array | None, vocab_size: int, axis: int) -> Array | None:
    """The sampled part of ``x``: a loop over slices, where a gather would take a row at a time."""
    if x is None:
        return None
    starts, size = sampled(vocab_size)
    if starts.size == 1:
        return lax.slice_in_dim(x, 0, size, axis=axis)
    at, shape = jnp.asarray(starts), list(x.shape)
    shape[axis] = starts.size * size

    def copy(k: Array, out: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(out, lax.dynamic_slice_in_dim(x, at[k], size, axis), k * size, axis)

    return lax.fori_loop(0, starts.size, copy, jnp.zeros(shape, x.dtype))


def _some_columns(head: Head, vocab_size: int) -> Head:
    """The part of the head that makes the sampled columns' logits."""
    weight = _blocks(head.weight, vocab_size, head.axis)
    assert weight is not None
    by_row = head.layout == "vh"
    return dataclasses.replace(
        head,
        weight=weight,
        bias=_blocks(head.bias, vocab_size, 0),
        lora_a=_blocks(head.lora_a, vocab_size, 0) if by_row else head.lora_a,
        lora_b=head.lora_b if by_row else _blocks(head.lora_b, vocab_size, 1),
    )


def few_rows(p: Problem, counts: Array | None, before: Array | None) -> Few:
    """Rows evenly spaced over those where ``counts [N]`` is true; ``before``: see :func:`expected_lse`."""
    at, vocab_size = evenly_spaced(p.n, counts), p.call.vocab_size
    few = p.rows(lambda a: a[at] if a.ndim == 1 else kernels.gather(a, at, interpreter(p.call.interpret)))
    rows_of = functools.partial(kernels.head_rows, p)
    starts, size = sampled(vocab_size)
    ids = jnp.asarray((starts[:, None] + np.arange(size)).reshape(-1), jnp.int32)
    x = raw_logits(few.h, _some_columns(few.head, vocab_size), jnp.dtype(jnp.float32))
    t = few.transform.column()
    z = times(factor(t), swept_columns(x, t, vocab_size, ids[None, :]))
    others = jnp.where(ids[None, :] == few.targets[:, None], NEG_INF, z)
    # The target counts once, whether it is among these columns or not.
    lse = jnp.logaddexp(jax.nn.logsumexp(others, axis=1) + np.log(vocab_size / ids.size), target_logits(few, rows_of))
    if before is not None:
        lse = jnp.maximum(lse, expected_lse(few, before[at], rows_of))
    return Few(at, few, x, ids, lse)


def surely_hard(rule: Rule, few: Few) -> Array:
    """``[FEW]``: see :func:`hard_whatever_is_kept`; as far as the sampled columns tell."""
    t = few.p.transform.column()
    z = times(factor(t), swept_columns(few.x, t, few.p.call.vocab_size, few.columns[None, :]))
    return hard_whatever_is_kept(rule, few.p, jnp.exp(z - few.lse[:, None]), few.share)


def exact_is_cheaper(rule: Rule, few: Few) -> Array:
    """As far as the few rows tell."""
    return costs_no_less(rule, few.p, surely_hard(rule, few))


def lse_floor(p: Problem, counts: Array, before: Array | None) -> Array:
    """``[N]``: what the sweep may take the logsumexp to be at least; infinite for tokens that do not count. The
    targets' rows of the head are gathered ``kernels.PART`` at a time."""

    def guess(first: Array, count: int, _: Array) -> Array:
        return expected_lse(some(p, first, count), some(before, first, count), functools.partial(kernels.head_rows, p))

    floor = in_parts(guess, kernels.PART, jnp.zeros((p.n,), jnp.float32))
    return jnp.where(counts & valid_targets(p.targets, p.call.vocab_size) & (floor < jnp.inf), floor, jnp.inf)


def choose_columns(
    rule: Rule, p: Problem, maxima: Array, counts: Array, few: Few, stats: TokenStats, g: StatCotangents | None
) -> Active:
    """The active columns: those whose ``maxima [vocab_size]`` are above the threshold that costs least, and the
    targets of the tokens where ``counts [N]`` is true. ``stats`` and ``g`` are those of the few rows; ``g`` is ``None``
    where cotangents are not known yet."""
    assert p.tolerance is not None
    vocab_size, width = p.call.vocab_size, max(p.head.vocab, rule.most)
    maxima = jnp.pad(maxima, (0, width - maxima.size), constant_values=-jnp.inf)
    own = jnp.where(counts & valid_targets(p.targets, vocab_size), p.targets, width)
    level, number = rule.levels(maxima.at[own].set(jnp.inf, mode="drop"), p.tolerance)
    miss = misses(p.tolerance, stats, g, vocab_size)
    moves = jnp.ones(few.at.shape, bool) if g is None else g.any_nonzero()
    probability = row_passes.probabilities(few.x, few.p, stats, few.columns[None, :])
    some = _blocks(level[:vocab_size], vocab_size, 0)
    assert some is not None
    beyond = (some[:, None] > jnp.arange(len(rule.thresholds))[None, :]).astype(jnp.float32)
    mass = few.share * jnp.matmul(probability, beyond, precision=lax.Precision.HIGHEST).T
    hard = jnp.stack([jnp.sum(moves & miss(m + MASS_ERROR)) for m in mass]) / jnp.maximum(jnp.sum(moves), 1)
    best, dense = rule.cheapest(number, hard, vocab_size)
    index = positions((level <= best) & ~dense, rule.most, rule.slab, last=True)
    return Active(index, jnp.where(dense, 0, number[best]), dense)
