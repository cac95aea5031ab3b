"""Rows of logits: which tokens' rows a sweep visits, and the plain-JAX passes over them.

RL batches are mostly dead weight: prompts and padding are masked, groups without advantage have no gradient. A
:class:`Sweep` visits chunks of gathered *live* tokens only; its trip count is traced, so neither shapes nor
compilations depend on the number of live tokens. For the rows ``x [C, V]`` of a chunk, and at the logits level:

    sums(x, p)               -> RowSums        over the columns that are here
    statistics(x, p)         -> TokenStats     one pass (a maximum, then sums, where XLA does not fuse them)
    dx(x, p, stats, g)       -> [C, V]         one pass: reads x, writes dx, over x where it has its dtype

``p`` is the problem for these rows, at either level: targets, transform and vocabulary. On a CPU the passes that reduce
take a slice of columns at a time (``tiles.column_tile``), or rows that the cache holds (``cached_...``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from logitless.core.chunk_size import column_tile
from logitless.core.divergences import (
    PairSums,
    ShardOfPair,
    dominating,
    empty_pair_sums,
    finish_pair,
    log_probabilities,
    merge_pairs,
    pair_dz,
    pair_sums,
    rounded_alike,
    teacher_stats,
)
from logitless.core.problem import Given, Linear, Loss, Problem, Teacher
from logitless.core.pytree import register, static
from logitless.core.stats import (
    NEG_INF,
    LogitTransform,
    RowSums,
    StatCotangents,
    TokenStats,
    dz_at_target,
    dz_line,
    empty_sums,
    exponentials,
    factor,
    finish,
    log_probability,
    merge,
    pull_back,
    row_sums,
    sums_of,
    swept,
    times,
    valid_targets,
    where_rows,
)

Rows = Problem[Linear] | Problem[Given]
T = TypeVar("T")

_SPLIT_REST_FROM = 1024
"""Chunks of at least this many tokens have their rest cut smaller; below it a quarter is too thin for a matmul."""


# -- passes over the rows of a chunk -----------------------------------------------------------------------------------


def column_ids(width: int) -> Array:
    """``[1, V]`` column numbers, to compare with ``targets[:, None]`` (no gather, no scatter)."""
    return jnp.arange(width, dtype=jnp.int32)[None, :]


def swept_columns(x: Array, transform: LogitTransform, vocab_size: int, ids: Array) -> Array:
    """``u`` in float32 from the raw logits of the columns ``ids``; padded columns at ``-inf``."""
    return jnp.where(ids < vocab_size, swept(x, transform), NEG_INF)


def over_columns(width: int, tile: int | None, step: Callable[[Array | int, int, T], T], carry: T) -> T:
    """``step(first column, number of columns, carry)`` over slices of the vocabulary; all at once without a tile."""
    if tile is None or tile >= width:
        return step(0, width, carry)
    whole = width // tile
    carry = lax.fori_loop(0, whole, lambda i, c: step(i * tile, tile, c), carry)
    return step(whole * tile, width % tile, carry) if width % tile else carry


def in_parts(make: Callable[[Array | int, int, Array], Array], size: int, out: Array) -> Array:
    """``out [N, ...]`` with its rows made ``size`` at a time, the last ones fewer: ``make(first, count, so_far)
    [count, ...]``, of anything that ``so_far`` still holds in their place."""

    def put(first: Array | int, count: int, so_far: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(so_far, make(first, count, so_far), first, 0)

    return over_columns(out.shape[0], size, put, out)


def rows_in_parts(x: Array, at: Array, size: int, keep: Array | None = None) -> Array:
    """Rows ``at [K]`` of ``x``, zeros where ``keep [K]``, if given, is false; ``size`` at a time if they are twice as
    many."""
    # Not before they are known: an array of zeros would be there from the program's start.
    at, nothing = lax.optimization_barrier((at, jnp.zeros((), x.dtype)))

    def some(first: Array | int, count: int, _: Array | None = None) -> Array:
        def cut(a: Array) -> Array:
            return a if count == at.size else lax.dynamic_slice_in_dim(a, first, count)

        rows = x.at[cut(at)].get(mode="promise_in_bounds")
        return rows if keep is None else jnp.where(cut(keep)[:, None], rows, nothing)

    whole = at.size < 2 * size
    return some(0, at.size) if whole else in_parts(some, size, jnp.broadcast_to(nothing, (at.size, x.shape[1])))


def as_wide_as(t: Array, width: int) -> Array:
    """``t [C, W]`` cut or padded with zeros to ``width`` columns."""
    if t.shape[-1] >= width:
        return t[..., :width]
    return jnp.pad(t, ((0, 0),) * (t.ndim - 1) + ((0, width - t.shape[-1]),))


def columns(x: Array, start: Array | int, size: int) -> Array:
    """A slice of the last dimension."""
    return x if size == x.shape[-1] else lax.dynamic_slice_in_dim(x, start, size, axis=x.ndim - 1)


def sums(x: Array, p: Rows) -> RowSums:
    """Sums over the columns of the rows ``x [C, V]``."""
    transform, vocab_size = p.transform.column(), p.call.vocab_size
    k, k_column = factor(p.transform), factor(transform)

    def step(start: Array | int, size: int, so_far: RowSums) -> RowSums:
        ids = start + column_ids(size)
        u = swept_columns(columns(x, start, size), transform, vocab_size, ids)
        return merge(so_far, row_sums(u, ids == p.targets[:, None], k_column), k)

    return over_columns(x.shape[-1], column_tile(), step, empty_sums(p.targets.shape))


def statistics(x: Array, p: Rows) -> TokenStats:
    """Statistics of the rows ``x [C, V]``; every row is live. With a teacher, also the pair's statistics."""
    stats = finish(sums(x, p), valid_targets(p.targets, p.call.vocab_size), p.transform)
    if p.teacher is None:
        return stats
    teacher = rounded_alike(stats, teacher_statistics(p))
    found = sums_of_pair(x, p, stats, teacher)
    return finish_pair(p.teacher.divergence, stats, teacher, found, p.teacher.mix)


# -- rows of two distributions: the teacher of a chunk holds its logits, as wide as the policy's -----------------------


def teacher_logits(p: Rows) -> Array:
    """The teacher's raw logits ``[C, V]``."""
    assert p.teacher is not None and isinstance(p.teacher.source, Given)
    return p.teacher.source.logits


def teacher_rows(p: Rows) -> Problem[Given]:
    """The teacher's rows as a problem of their own. The targets are the policy's, so that equal rows are swept by equal
    arithmetic."""
    assert p.teacher is not None
    return Problem(Given(teacher_logits(p)), p.targets, p.teacher.transform, p.live, call=p.call)


def teacher_statistics(p: Rows) -> TokenStats:
    """Statistics of the teacher's rows."""
    rows = teacher_rows(p)
    # An invalid target is the policy's fault, and makes its own statistics NaN.
    return finish(sums(rows.logits, rows), True, rows.transform)


@dataclasses.dataclass(frozen=True)
class _Pair:
    """A slice of the columns of both distributions."""

    log_p: Array
    log_q: Array
    apart: Array  # a column that dominates the student's row


def _pair(
    x: Array, p: Rows, stats: TokenStats, teacher: TokenStats, start: Array | int, size: int, shard: bool = False
) -> _Pair:
    """Columns ``start`` on of the rows; ``stats`` and ``teacher`` are ``[C, 1]``."""
    assert p.teacher is not None
    ids, own, other = start + column_ids(size), p.transform.column(), p.teacher.transform.column()
    u = swept_columns(columns(x, start, size), own, p.call.vocab_size, ids)
    t = swept_columns(columns(teacher_logits(p), start, size), other, p.call.vocab_size, ids)
    log_p, log_q = (log_probabilities(z, factor(f), s) for z, f, s in ((u, own, stats), (t, other, teacher)))
    return _Pair(log_p, log_q, dominating(log_p, stats, shard))


def sums_of_pair(x: Array, p: Rows, stats: TokenStats, teacher: TokenStats, shard: bool = False) -> PairSums:
    """Sums of the divergence over the columns of the rows ``x [C, V]``, from the statistics of both sides."""
    assert p.teacher is not None
    stats, teacher = jax.tree.map(lambda a: a[:, None], (stats, teacher))

    def step(start: Array | int, size: int, so_far: PairSums) -> PairSums:
        assert p.teacher is not None
        at = _pair(x, p, stats, teacher, start, size, shard)
        return merge_pairs(so_far, pair_sums(p.teacher.divergence, at.log_p, at.log_q, at.apart, p.teacher.mix))

    return over_columns(x.shape[-1], column_tile(), step, empty_pair_sums(p.targets.shape))


def shard_of_pair(x: Array, p: Rows) -> ShardOfPair:
    """Sums over the local columns for both distributions, in one pass over both logits."""
    rows = teacher_rows(p)
    here = valid_targets(p.targets, p.call.vocab_size)

    def alone(s: RowSums, t: LogitTransform) -> TokenStats:
        return finish(dataclasses.replace(s, target=jnp.where(here, s.target, NEG_INF)), True, t)

    own, other = sums(x, p), sums(rows.logits, rows)
    stats, teacher = lax.optimization_barrier((alone(own, p.transform), alone(other, rows.transform)))
    teacher = rounded_alike(stats, teacher)
    return ShardOfPair(own, other, stats, teacher, sums_of_pair(x, p, stats, teacher, shard=True))


def _dz_of_pair(x: Array, p: Rows, stats: TokenStats, start: Array | int, size: int) -> Array:
    """The divergence's gradient at a slice of columns of the rows; ``stats`` are ``[C, 1]``."""
    assert p.teacher is not None
    at = _pair(x, p, stats, teacher_stats(stats), start, size)
    return pair_dz(p.teacher.divergence, at.log_p, at.log_q, at.apart, stats, p.teacher.mix)


@register
@dataclasses.dataclass(frozen=True)
class Exponentials:
    """Exponentials of rows that fit a CPU's cache: computed once, for the sums and for dx (``stats.exponentials``)."""

    maximum: Array  # [C]
    shifted: Array  # s [C, V]
    e: Array  # [C, V]


def cached_sums(x: Array, p: Rows) -> tuple[RowSums, Exponentials]:
    """:func:`sums` of rows that fit a cache, and the exponentials behind the sums.

    XLA's CPU compiler reduces a stored array at cache speed, but an array computed inside the reduction five times
    slower: operands of reductions are stored first, and the target's logit is looked up.
    """
    transform, vocab_size, ids = p.transform.column(), p.call.vocab_size, column_ids(x.shape[-1])
    u = swept_columns(x, transform, vocab_size, ids)
    found = Exponentials(*lax.optimization_barrier(exponentials(u, ids == p.targets[:, None], factor(transform))))
    here = valid_targets(p.targets, x.shape[-1])  # it may be another shard's
    at = jnp.where(here, p.targets, 0)[:, None]
    own = swept_columns(jnp.take_along_axis(x, at, axis=1), transform, vocab_size, at)[:, 0]
    target = jnp.where(here, own, 0.0)
    return sums_of(found.maximum, found.shifted, found.e, target), found


def cached_statistics(x: Array, p: Rows) -> tuple[TokenStats, Exponentials]:
    """:func:`statistics` of rows that a cache holds, and the exponentials for :func:`cached_dx`."""
    sums, found = cached_sums(x, p)
    stats = finish(sums, valid_targets(p.targets, p.call.vocab_size), p.transform)
    return lax.optimization_barrier(stats), found


def cached_dx(x: Array, p: Rows, stats: TokenStats, g: StatCotangents, known: Exponentials) -> Array:
    """:func:`dx` in the dtype of ``x``, without another exponential."""
    transform = p.transform.column()
    # A row with no other finite column has no s; the peak keeps a and b finite where 0 could be 88 above it.
    centre = jnp.where(known.maximum > NEG_INF, known.maximum, stats.peak)
    (a, b), at_target, moves = _row_terms(centre[:, None], p, stats, g)
    others = jnp.where(moves, known.e * (a - b * known.shifted), 0.0)
    d = jnp.where(column_ids(x.shape[-1]) == p.targets[:, None], at_target, others)
    return pull_back(d, x, transform).astype(x.dtype)


def _row_terms(
    centre: Array, p: Rows, stats: TokenStats, g: StatCotangents
) -> tuple[tuple[Array, Array], Array, Array]:
    """``((a, b) of stats.dz_line, dz at the target, whether the row has a gradient)``, each ``[C, 1]``.

    Computed once: in the loop over columns XLA would compute what belongs to a row for every one of them.
    """
    stats, g = jax.tree.map(lambda a: a[:, None], (stats, g))
    k = factor(p.transform.column())
    return lax.optimization_barrier((dz_line(centre, stats, g, k), dz_at_target(stats, g), g.any_nonzero()))


def probabilities(x: Array, p: Rows, stats: TokenStats, ids: Array) -> Array:
    """``p_v`` of the rows ``x [C, W]``, whose columns are ``ids``; 0 in padded columns."""
    t = p.transform.column()
    u, s = swept_columns(x, t, p.call.vocab_size, ids), jax.tree.map(lambda a: a[:, None], stats)
    return jnp.exp(log_probability(u, factor(t), s))


@register
@dataclasses.dataclass(frozen=True)
class Line:
    """What a row of dlogits is made of, ``[C, 1]`` each: ``exp(s) (a - b s)`` with ``s = k (u - centre)``
    (``stats.dz_line``), and the target's own value."""

    centre: Array
    a: Array
    b: Array
    at_target: Array
    moves: Array  # whether the row has a gradient


def dx(
    x: Array, p: Rows, stats: TokenStats, g: StatCotangents, dtype: DTypeLike, tile: int | None = None,
    line: Line | None = None,
) -> Array:  # fmt: skip
    """The cotangent of the rows ``x [C, V]``, computed in float32 and rounded to ``dtype``; zero rows where ``g`` is.
    ``line`` takes the place of the line that follows from ``stats`` and ``g``.

    No reduction: every compiler emits a single loop, without temporaries. With a ``tile`` it takes so many columns at a
    time and, with the dtype of ``x``, is written over ``x`` whatever the compiler thinks of that.
    """
    transform = p.transform.column()
    k, vocab_size = factor(transform), p.call.vocab_size
    if line is None:
        peak = stats.peak[:, None]
        (a, b), at_target, moves = _row_terms(peak, p, stats, g)
        line = Line(peak, a, b, at_target, moves)
    as_columns = jax.tree.map(lambda s: s[:, None], stats)

    def step(start: Array | int, size: int, out: Array) -> Array:
        ids = start + column_ids(size)
        part = columns(out if dtype == x.dtype else x, start, size)
        difference = times(k, swept_columns(part, transform, vocab_size, ids) - line.centre)
        e = jnp.exp(difference)
        others = jnp.where((e == 0) | ~line.moves, 0.0, e * (line.a - line.b * difference))  # no 0 * inf
        d = jnp.where(ids == p.targets[:, None], line.at_target, others)
        if g.divergence is not None:
            g_divergence = g.divergence[:, None]
            of_pair = g_divergence * _dz_of_pair(out if dtype == x.dtype else x, p, as_columns, start, size)
            d = d + jnp.where(g_divergence != 0, of_pair, 0.0)
        d = pull_back(d, part, transform).astype(dtype)
        return d if size == x.shape[-1] else lax.dynamic_update_slice_in_dim(out, d, start, axis=1)

    return over_columns(x.shape[-1], tile, step, x if dtype == x.dtype else jnp.zeros(x.shape, dtype))


# -- which tokens a sweep visits ---------------------------------------------------------------------------------------


@register
@dataclasses.dataclass(frozen=True)
class Visit:
    """A chunk of tokens: the rows to read, and where to write (``n``, dropped, for the padding of the last chunk)."""

    read: Array
    write: Array

    def take(self, x: Array) -> Array:
        """The chunk's rows of ``x [N, ...]``."""
        return x.at[self.read].get(mode="promise_in_bounds")

    def put(self, out: Array, value: Array) -> Array:
        """``out [N, ...]`` with the chunk's rows replaced."""
        return out.at[self.write].set(value.astype(out.dtype), mode="drop", unique_indices=False)

    def inside(self, n: int) -> Array:
        """Flags for the real rows in the chunk."""
        return self.write < n

    def hidden(self, p: Problem) -> Array:
        """The chunk's hidden states; zeros as the padding of the last chunk, since a dead token may hold NaN."""
        return jnp.where(self.inside(p.n)[:, None], self.take(p.h), jnp.zeros((), p.h.dtype))

    def problem(self, p: Problem, h: Array | None = None) -> Problem:
        """The chunk's own problem, with hidden states ``h`` if they are there already. ``live`` flags the real rows."""
        part = dataclasses.replace(p.with_hidden(p.targets), live=None, teacher=None).rows(self.take)
        part = part.with_hidden(self.hidden(p) if h is None else h)
        return dataclasses.replace(part, live=self.inside(p.n))

    def teacher(self, p: Problem) -> Teacher:
        """The chunk's own teacher, whose source is :class:`Linear`; zeros as the padding of the last chunk."""
        assert p.teacher is not None
        teacher = p.teacher.rows(self.take)
        assert isinstance(teacher.source, Linear)
        hidden = jnp.where(self.inside(p.n)[:, None], teacher.source.hidden, jnp.zeros((), teacher.source.dtype))
        return dataclasses.replace(teacher, source=Linear(hidden, teacher.source.head))

    def loss(self, loss: Loss, n: int) -> Loss:
        """The chunk's own loss; the padding of the last chunk is masked out."""
        part = loss.rows(self.take)
        inputs = dataclasses.replace(part.inputs, mask=part.inputs.mask & self.inside(n))
        return dataclasses.replace(part, inputs=inputs)

    def known(self, out: TokenStats, g: StatCotangents, n: int) -> tuple[TokenStats, StatCotangents]:
        """The chunk's own statistics and cotangents, the latter zero in the padding."""
        inside = self.inside(n)
        return jax.tree.map(self.take, out), jax.tree.map(lambda a: where_rows(inside, self.take(a)), g)

    def put_all(self, out: T, values: T) -> T:
        """:meth:`put` for the arrays of two trees."""
        return jax.tree.map(self.put, out, values)


@register
@dataclasses.dataclass(frozen=True)
class Sweep:
    """``count`` tokens of ``order`` (``None``: as they stand) from position ``start`` on, in chunks.

    The remainder after the whole chunks takes another chunk, or a few quarter chunks if less than half a chunk is left,
    so the cost follows the number of tokens, not the next multiple of the chunk. With ``rest_at_once`` the remainder is
    a single chunk of one, two or three quarters, for short sweeps dominated by the cost per chunk.
    """

    order: Array | None
    start: Array | int
    count: Array | int
    limit: Array | int  # tokens from ``start`` on that may fill up the last chunk; at least ``count``
    n: int = static(0)
    chunk: int = static(0)
    rest_at_once: bool = static(False)

    @property
    def small(self) -> int:
        """Size of the chunks that the rest is cut into."""
        return self.chunk // 4 if self.chunk >= _SPLIT_REST_FROM else self.chunk

    def trips(self) -> tuple[Array | int, Array | int]:
        """Number of whole chunks, and of small chunks."""
        if self.small == self.chunk:
            return _ceil(self.count, self.chunk), 0
        rest = self.count % self.chunk
        one_more = rest > (3 * self.small if self.rest_at_once else self.chunk // 2)
        whole = self.count // self.chunk + one_more
        return whole, jnp.where(one_more, 0, _ceil(rest, self.small))

    def visit(self, position: Array | int, size: int) -> Visit:
        """``size`` tokens from the sweep's own ``position`` on."""
        at = position + jnp.arange(size, dtype=jnp.int32)
        inside = jnp.minimum(self.start + at, self.n - 1)
        rows = inside if self.order is None else self.order.at[inside].get(mode="promise_in_bounds")
        return Visit(read=rows, write=jnp.where(at < self.limit, rows, self.n))

    def covered(self) -> Array | int:
        """Positions that the chunks reach."""
        whole, few = self.trips()
        return whole * self.chunk + few * self.small

    def run(self, body: Callable[[Visit, T], T], carry: T) -> T:
        """``body`` over all chunks. The trip counts are traced: no shape depends on how many tokens there are."""
        whole, few = self.trips()
        carry = lax.fori_loop(0, whole, lambda i, c: body(self.visit(i * self.chunk, self.chunk), c), carry)
        if self.small == self.chunk:
            return carry
        done = whole * self.chunk
        if self.rest_at_once:
            for quarters in (1, 2, 3):
                size = quarters * self.small
                once = jnp.asarray(few == quarters, jnp.int32)
                carry = lax.fori_loop(0, once, lambda _, c, size=size: body(self.visit(done, size), c), carry)
            return carry
        return lax.fori_loop(0, few, lambda i, c: body(self.visit(done + i * self.small, self.small), c), carry)


def _ceil(count: Array | int, chunk: int) -> Array | int:
    return (count + (chunk - 1)) // chunk


def live_sweep(live: Array, chunk: int, rest_at_once: bool = False) -> Sweep:
    """The tokens where ``live [N]`` is true, in their own order."""
    order = jnp.argsort(~live, stable=True).astype(jnp.int32)
    count = jnp.sum(live, dtype=jnp.int32)
    return Sweep(order, 0, count, count, n=live.shape[0], chunk=chunk, rest_at_once=rest_at_once)


def sweep_over(n: int, live: Array | None, chunk: int) -> Sweep:
    """Every token, or tokens with ``live [n]``."""
    return Sweep(None, 0, n, n, n=n, chunk=chunk) if live is None else live_sweep(live, chunk)


def split_sweep(live: Array, active: Array, chunk: int) -> tuple[Sweep, Sweep]:
    """``(live tokens that are also active, and as many others as fill its last chunk; the other live tokens)``."""
    rank = jnp.where(live & active, 0, jnp.where(live, 1, 2))
    order = jnp.argsort(rank, stable=True).astype(jnp.int32)
    n, count = live.shape[0], jnp.sum(live, dtype=jnp.int32)
    first = Sweep(order, 0, jnp.sum(live & active, dtype=jnp.int32), count, n=n, chunk=chunk)
    left = jnp.maximum(count - first.covered(), 0)
    return first, Sweep(order, first.covered(), left, left, n=n, chunk=chunk)


@dataclasses.dataclass(frozen=True)
class Front:
    """Tokens gathered to the front: their order (``None``: as they stand) and how many count."""

    order: Array | None
    count: Array | None

    def take(self, x: Array) -> Array:
        return x if self.order is None else x.at[self.order].get(mode="promise_in_bounds", unique_indices=True)

    def put_back(self, x: Array) -> Array:
        if self.order is None:
            return x
        return jnp.zeros_like(x).at[self.order].set(x, mode="promise_in_bounds", unique_indices=True)

    def problem(self, p: Problem) -> Problem:
        """The problem with its tokens in this order; :attr:`count` tokens count."""
        return dataclasses.replace(p, live=None).rows(self.take)


def places_by_rank(*classes: Array) -> Array:
    """``[N]`` int32: position of each token in a stable sort by ``classes [N]``; every token belongs to a class."""
    place, before = jnp.zeros(classes[0].shape, jnp.int32), jnp.int32(0)
    for own in classes:
        rank = jnp.cumsum(own.astype(jnp.int32))
        place = jnp.where(own, before + rank - 1, place)
        before = before + jnp.sum(own, dtype=jnp.int32)
    return place


def inverse(order: Array) -> Array:
    """``[N]`` int32: the inverse permutation, from an order to places or from places to an order."""
    ids = jnp.arange(order.size, dtype=jnp.int32)
    # Apart: libtpu 0.0.50 ends in a failed check where a scatter's places and values have one source.
    order, ids = lax.optimization_barrier((order, ids))
    return jnp.zeros_like(ids).at[order].set(ids, mode="promise_in_bounds", unique_indices=True)


def order_by_rank(*classes: Array) -> Array:
    """``[N]`` int32: the tokens in the order of :func:`places_by_rank`. As a stable sort, by ranks and a scatter: a
    TPU's sort of 8,192 numbers is a tenth of a megabyte of code for each of its operands."""
    return inverse(places_by_rank(*classes))


def front(chosen: Array | None, by_sort: bool = True) -> Front:
    """The tokens where ``chosen`` is true first, each side in its own order. Not ``by_sort``: :func:`order_by_rank`."""
    if chosen is None:
        return Front(None, None)
    order = jnp.argsort(~chosen, stable=True) if by_sort else order_by_rank(chosen, ~chosen)
    return Front(order, jnp.sum(chosen, dtype=jnp.int32))
