"""Which columns carry the gradient, found inside the forward matmul: a screen that no logits have to be kept for.

The fused matmul (``kernels/stats_matmul.py``) sees every logit once, before the row's logsumexp is known. With a guess
``b_t`` for it,

    z_tv > b_t + log e        the column v passes the screen of row t, at the threshold e on its probability

is a comparison with a one-bit result. The active columns are those that pass for a row with a gradient, and the
targets. A guess that is too low lets more columns pass, one that is too high fewer: what each row then leaves out is
computed from the logits of the active columns, so a bad guess costs time, never truth.

    guess       z_ty - the log-probability that the target had when it was sampled, where that is known; else
                max(z_ty, logsumexp over a few columns): the batch's targets and the lowest ids, which are the frequent
                tokens of most vocabularies. V_few / V of a matmul (2.7 % at V = 151936).
    left apart  a row that lets many columns through, by a bad guess or because it is flat, does not choose columns for
                the others; it will be a hard row. How many is many, of a few limits, is a matter of cost. Where most
                rows are left apart, the policy is not sparse, and no column is active (``sparse.py``).
    bytes       N V / 8 for the bits, written once, read once for each limit and once to count

Most active columns are rare tokens, of which only a few rows know; a few thousand common ones are active nearly
everywhere. With the columns in an order of their own (:func:`by_tiles`),

    common     active in tiles of tokens that lie far apart: first, those that are active longest in front
    rare       active in neighbouring tiles only: behind them, by the first of these tiles

a tile of tokens needs the front of the common columns and a short piece of the rare ones. So of ``tokens x K`` a
backward over blocks of 256 columns visits a third, the tiles in which both met (:func:`met`; docs/sparse-backward.md).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from logitless.core.problem import Problem
from logitless.core.pytree import register
from logitless.core.row_passes import Visit, live_sweep, swept_columns
from logitless.core.stats import TokenStats, factor, times
from logitless.head.linear import raw_logits
from logitless.head.mosaic_gpu.kernels import stats_matmul
from logitless.head.mosaic_gpu.kernels.schedule import COLUMNS, TOKENS, Visits, tiles_for
from logitless.head.mosaic_gpu.kernels.stats_matmul import LANES, bit_of
from logitless.head.sparse import active_columns as columns_of
from logitless.head.sparse.active_columns import Columns, Rule, chunk_rule, expected_lse
from logitless.head.sparse.gather import Ordered, head_columns

THRESHOLD = 2.0**-5.5
"""On a probability, relative to the tolerance: at 2^-8 columns above 9e-5 pass (docs/sparse-backward.md)."""

ENOUGH, LEAST = 4096, 64
"""Tokens that choose columns for one another, for :data:`THRESHOLD` to do; and below how many it falls no further."""

_LIMITS = (8, 32, 128)
"""A row that lets more than ``Rule.most / limit`` columns through may be left apart."""

MOST_APART = 5 / 8
"""Share of tokens that choose no columns: with more, a policy is not sparse."""

UNLIKELY = -6.0
"""Samples from a sparse policy rarely have a lower log-probability: fewer than 1 token in 100."""

_NEAR = 4
"""Tiles of tokens that are neighbours: a column that is active in no others is rare."""

_FEW = 4096
_LOW_IDS = 1024


def slab_rule(vocab: int, backward: int = 2) -> Rule:
    """What columns and hard rows cost here, since logits of both are made again. Slabs are three quarters as wide as
    ordinary slabs: they meet more tokens than a chunk has."""
    rule = chunk_rule(vocab, backward)
    slab = 3 * rule.slab // 4 if rule.slab % 1024 == 0 else rule.slab
    return dataclasses.replace(rule, per_column=1 + rule.per_column, slab=slab, most=rule.most // slab * slab)


# -- active columns, and the tiles in which they are active -----------------------------------------------------------


@register
@dataclasses.dataclass(frozen=True)
class Spans:
    """The first and the last tile of tokens in which each column is active, ``[V]`` int32; ``last`` is -1 for those
    that are not."""

    first: Array
    last: Array

    @property
    def active(self) -> Array:
        """Bool ``[V]``."""
        return self.last >= 0

    def everywhere(self) -> Spans:
        """The same columns, active in every tile."""
        return Spans(jnp.zeros_like(self.first), jnp.where(self.active, jnp.iinfo(jnp.int32).max - 1, -1))

    def only(self, which: Array | bool) -> Spans:
        """No other column is active."""
        return Spans(self.first, jnp.where(which, self.last, -1))


def by_tiles(s: Spans, size: int) -> Array:
    """int32 ``[size]``: the active columns, common ones first; then numbers beyond the vocabulary."""
    vocab = s.last.size
    end = jnp.max(s.last) + 1  # of the tiles
    common = s.last - s.first >= _NEAR
    key = jnp.where(common, end - s.last, end + 1 + s.first)
    order = jnp.argsort(jnp.where(s.active, key, jnp.iinfo(jnp.int32).max), stable=True)[:size].astype(jnp.int32)
    at = jnp.arange(size, dtype=jnp.int32)
    return jnp.where(at < jnp.sum(s.active, dtype=jnp.int32), order, vocab + at)


def met(s: Spans, index: Array, everything: Visits) -> Visits:
    """The tiles of ``everything`` with a column that is active for a token; ``index [K]`` are the columns. The
    first place belongs to no column but to the mean row of the head, which visits all tiles; and every column has a
    tile."""
    tokens, across = everything.tiles.shape
    first = s.first.at[index].get(mode="fill", fill_value=tokens)
    last = s.last.at[index].get(mode="fill", fill_value=-1)
    rest = (0, across * COLUMNS - index.size)
    first, last = jnp.pad(first, rest, constant_values=tokens), jnp.pad(last, rest, constant_values=-1)
    tile = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    tiles = jnp.any(((first <= tile) & (tile <= last)).reshape(tokens, across, COLUMNS), axis=2)
    tiles = tiles.at[:, 0].set(True)
    tiles = tiles.at[0].set(tiles[0] | ~jnp.any(tiles & everything.tiles, axis=0))
    return Visits(tiles & everything.tiles)


@register
@dataclasses.dataclass(frozen=True)
class Screened:
    """What the forward pass found, for the backward pass."""

    columns: Columns  # of all tokens
    spans: Spans  # for the active columns; empty if dense


# -- the screen ------------------------------------------------------------------------------------------------------


def few_columns(p: Problem, rows: Array) -> Array:
    """Ids of the columns whose logsumexp stands for all: the lowest, and the targets of ``rows [N]``, ascending."""
    width = p.head.vocab
    size = min(_FEW, max(width // 8, 1))
    chosen = jnp.arange(width) < min(_LOW_IDS, max(size // 2, 1))
    chosen = chosen.at[jnp.where(rows, p.targets, width)].set(True, mode="drop")
    return columns_of.compacted(chosen, size)


def _logsumexp_of_few(p: Problem, rows: Array) -> Array:
    """``[N]``: logsumexp over :func:`few_columns`, for ``rows [N]``; ``-inf`` elsewhere."""
    index = few_columns(p, rows)
    part = head_columns(p.head, index)

    def body(visit: Visit, out: Array) -> Array:
        q = visit.problem(p)
        x = raw_logits(q.h, part, jnp.float32)
        t = q.transform.column()
        z = times(factor(t), swept_columns(x, t, p.call.vocab_size, index[None, :]))
        return visit.put(out, jax.nn.logsumexp(z, axis=1))

    return live_sweep(rows, p.call.chunk).run(body, jnp.full((p.n,), -jnp.inf, jnp.float32))


def guess(p: Problem, rows: Array, before: Array | None) -> Array:
    """``b [N]``: what the logsumexp of ``rows [N]`` may be; ``before [N]`` are log-probabilities of the targets by an
    earlier pass, or by the sampler (NaN where one is missing)."""
    floor = expected_lse(p, before)
    return jnp.maximum(floor, _logsumexp_of_few(p, rows)) if before is None else floor


def looks_flat(p: Problem, rows: Array, before: Array | None) -> Array:
    """Whether most of ``rows [N]`` have targets so unlikely that their policy is hardly sparse; seen before any matmul
    over the vocabulary. Right or wrong, only time depends on it.

    By ``before [N]`` where that is known, else by what the targets have of the mass in a few columns.
    """
    if before is None:
        before = expected_lse(p, None) - _logsumexp_of_few(p, rows)
    return jnp.sum(rows & (before < UNLIKELY)) > MOST_APART * jnp.sum(rows)


def threshold(rows: Array) -> Array:
    """On a probability, relative to the tolerance, for so many of ``rows [N]``: fewer rows find fewer columns for each
    other, and would leave out more of each (docs/sparse-backward.md)."""
    count = jnp.clip(jnp.sum(rows, dtype=jnp.int32), LEAST, ENOUGH)
    return THRESHOLD * jnp.sqrt(count / ENOUGH)


def screen_of(p: Problem, rows: Array, before: Array | None) -> Array:
    """``[N]``: the number that a column's swept logit (``u`` of ``logitless.core.stats``) has to be above; infinite
    where a row has no gradient."""
    assert p.tolerance is not None
    z = guess(p, rows, before) + jnp.log(p.tolerance * threshold(rows))
    k = factor(p.transform)
    return jnp.where(rows, z if k is None else z / k, jnp.inf)


def passed(words: Array, vocab: int, tile: int) -> Array:
    """Bool ``[vocab]`` from int32 ``[vocab tiles, 8]``: a bit (``stats_matmul.bit_of``) of lane ``i`` of vocabulary
    tile ``v`` is column ``v tile + 8 j + i``. Columns behind the last tile are padding, and pass for nobody."""
    shifts = bit_of(jnp.arange(0, tile, LANES, dtype=jnp.int32), tile)[None, :, None]
    found = ((words[:, None, :] >> shifts) & 1).reshape(-1)[:vocab].astype(bool)
    return jnp.pad(found, (0, vocab - found.size))


def active_columns(rule: Rule, words: Array, rows: Array, p: Problem, tile: int) -> tuple[Spans, Array]:
    """Columns that pass (``words [vocab tiles, N, 8]``) for any row of ``rows [N]`` that chooses columns, or are a
    target, and the token tiles in which they pass. The cheapest limit on the number of columns that a row lets through.
    Also the number of rows above the limit, which choose none."""
    width = jnp.sum(lax.population_count(words), axis=(0, 2))
    tiles = -(-p.n // TOKENS)
    whole = jnp.pad(words, ((0, 0), (0, tiles * TOKENS - p.n), (0, 0)))
    token_tile = jnp.arange(p.n, dtype=jnp.int32) // TOKENS
    target = jnp.where(rows, p.targets, p.head.vocab)
    is_target = jnp.zeros((p.head.vocab,), bool).at[target].set(True, mode="drop")

    def chosen(limit: int) -> tuple[Array, Array, Array]:
        wide = width > max(rule.most // limit, 1)
        chooses = jnp.pad(rows & ~wide, (0, tiles * TOKENS - p.n))
        mine = jnp.where(chooses[None, :, None], whole, 0).reshape(len(words), tiles, TOKENS, LANES)
        by_tile = lax.reduce(mine, np.int32(0), lax.bitwise_or, (2,))
        any_row = lax.reduce(by_tile, np.int32(0), lax.bitwise_or, (1,))
        count = jnp.sum(passed(any_row, p.head.vocab, tile) | is_target, dtype=jnp.int32)
        return by_tile, count, jnp.sum(rows & wide)

    by_tile, counts, apart = (jnp.stack(x) for x in zip(*map(chosen, _LIMITS), strict=True))
    best, _ = rule.cheapest(counts, apart / jnp.maximum(jnp.sum(rows), 1), p.call.vocab_size)
    seen = jax.vmap(lambda w: passed(w, p.head.vocab, tile), in_axes=1)(by_tile[best])  # [token tiles, V]
    each = jnp.arange(tiles, dtype=jnp.int32)[:, None]
    first, last = jnp.min(jnp.where(seen, each, tiles), axis=0), jnp.max(jnp.where(seen, each, -1), axis=0)
    first, last = first.at[target].min(token_tile, mode="drop"), last.at[target].max(token_tile, mode="drop")
    return Spans(first, last), apart[best].astype(jnp.int32)


def screened(f: Ordered, rule: Rule, before: Array | None) -> tuple[TokenStats, Screened]:
    """``(statistics of the live tokens, columns of those that come first)``, both in the order of ``f``: one matmul, no
    logits. ``before [N]``, in the order of the call, is known of the targets' log-probabilities."""
    p = f.p
    rows = jnp.arange(p.n) < f.count
    numbers = screen_of(p, rows, None if before is None else f.take(before))
    stats, words = stats_matmul.screened_stats(p, numbers, f.live)
    assert words is not None
    finite = rows & jnp.isfinite(stats.max_logp)  # a row that is not has NaN gradients, through all columns
    tile = tiles_for(p.n, p.h.shape[1], p.call.vocab_size).columns
    spans, apart = active_columns(rule, words, finite, p, tile)
    assert p.tolerance is not None
    flat = finite & (stats.max_logp < jnp.log(p.tolerance * threshold(rows)))  # none could have passed
    apart = apart + jnp.sum(flat, dtype=jnp.int32)
    count = jnp.sum(spans.active, dtype=jnp.int32)
    dense = (count > rule.most) | (apart > MOST_APART * f.count)
    spans = spans.only(~dense)
    nothing = jnp.zeros((p.n,), jnp.float32)
    columns = Columns(by_tiles(spans, rule.most), jnp.where(dense, 0, count), dense, nothing)
    return stats, Screened(columns, spans)
