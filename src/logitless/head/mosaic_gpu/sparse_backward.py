"""The sparse backward on a Hopper GPU: the whole data flow, in phases, over the columns that the forward pass has found
active (``column_screen.py``), for tokens ordered by need of a gradient.

With M one ``N x H x V`` matmul and K active columns (:func:`gradients`; ``dweight_buffer.DweightBuffer`` says what the
memory of dW holds in each phase):

    gather         the head's rows of the active columns, the mean row of the head in front; which tiles of tokens and
                   columns to visit
    dlogits        dx, one matmul without logits (``kernels/dlogits_matmul.py``) over the tiles in which tokens and
                   columns met, with the kept mass per row: a third of M K / V
    classify       what each row leaves out; rows that leave out too much are hard
    dlogits        of the hard rows once more, in all active columns: the same kernel, in tiles behind the tokens' tiles
    dhidden        dH, one matmul, with one column more for what the easy rows leave out (its mass times a mean row)
    column chunks  the one host synchronisation, and only for what does not fit: see below
    dweight        dW_K, one matmul, in memory of its own; the bias' gradient
    hard rows      through all columns that are not active, G rows at a time: dx [G, V] over the whole head as it lies
                   there, zero in the active columns; dH, one matmul in parts of the vocabulary, added; dW, *written* by
                   the first group, so that nobody has to write zeros, added to by the next ones. A group with no rows
                   costs its launches
    dW             dW_K in its place

Every matmul here is a kernel that takes its extents from the device (``kernels/dynamic_matmul.py``). No matmul waits
for the host or computes more than necessary. The host synchronises once, when the hard rows are known: column chunks
are a zero-or-one-trip loop over the gradients in memory, because a conditional would copy the gradients. After it, the
extents of dW_K are zero where the loop has run, and the hard rows are those that the loop has left.

Column chunks (:func:`_in_column_chunks`) serve more active columns, more hard rows, and a policy that is not sparse:
all tokens with a gradient, some columns at a time. First over the active columns. Rows that leave out more than the
tolerance are hard; if they are few, the phase for hard rows takes them. If they are many, or if the policy is not
sparse at all, all tokens go through all columns, in the order of the vocabulary. Every chunk is three matmuls:

    dx      of all tokens and the chunk's columns                                                       M c / V
    dH      in float32, added up in two numbers of its own dtype, the sum and what it lacks             M c / V
    dW      of these columns, over all tokens: summed in float32, and rounded once                      M c / V

    bytes   At T = 8192, H = 4096, V = 151936: first h in order (64 MiB; the screen's bits are in the dW buffer). Then h
            and the gathered columns of the head (64 + 68). Then these and dH in float32 (68 + 152), h and dW_K
            (76 + 68), dW_K and the dx of hard rows with their dH in parts (68 + 111 + 16). h is gathered twice, before
            and after the synchronisation, and not kept. dx has separate memory, 2 T K, with a frozen or [H, V] head.
            Column chunks: what dH lacks (64), and at a time the chunk's part of the head and h, or half of its dH, or h
            and its dW (68 + 76)
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.core.problem import Gradients, HeadArrays, HeadGrads, Problem, Wanted
from logitless.core.pytree import register
from logitless.core.shapes import PyTree
from logitless.head.mosaic_gpu import column_screen, dweight_buffer
from logitless.head.mosaic_gpu.column_screen import Screened
from logitless.head.mosaic_gpu.dweight_buffer import DweightBuffer, Hard, Live, Sizes, can_add, hard_rows
from logitless.head.mosaic_gpu.kernels.dlogits_matmul import Region, Rows, columns_dx_of, rows_of
from logitless.head.mosaic_gpu.kernels.schedule import COLUMNS, TOKENS, Slots, Visits, all_of, tile_count
from logitless.head.sparse.active_columns import Rule
from logitless.head.sparse.gather import (
    Known,
    Ordered,
    head_columns,
    in_their_place,
    mass_beside,
    mean_row,
    misses,
    once,
    put_head_columns,
    without,
)


@dataclasses.dataclass(frozen=True)
class Task:
    """What a sparse backward works on."""

    f: Ordered
    want: Wanted
    known: Known  # in the order of ``f``
    found: Screened
    rule: Rule
    sizes: Sizes

    @property
    def p(self) -> Problem:
        return self.f.p


@dataclasses.dataclass(frozen=True)
class Active:
    """The active columns, gathered."""

    index: Array  # [K] int32: their numbers; the first is the mean row's, and like those behind the last no column's
    part: HeadArrays
    live: Live  # none, if they do not fit
    visits: Visits


@register
@dataclasses.dataclass(frozen=True)
class State:
    """The gradients so far, in the order of the call."""

    hidden: Array | None
    bias: Array | None
    buffer: DweightBuffer


def gradients(task: Task) -> tuple[Gradients, Array, Array, Array]:
    """``(gradients, mass left out [N], columns that a token met, whether that was all)``; dH in the order of the call,
    the mass in that of ``task.f``."""
    p, want, sizes, c = task.p, task.want, task.sizes, task.found.columns
    fits = sizes.holds(c.count) & ~c.dense
    active = _gathered(task, Live(task.f.count, c.count + 1, jnp.int32(0)).where(fits))

    # dlogits: the memory of dW holds dx of the tokens
    buffer = DweightBuffer.for_dx(p, want, sizes)
    rows = rows_of(p, task.known)
    dx, kept = _dlogits(task, active, buffer.tokens(), p.h, rows, active.visits)

    # classify
    left_out, is_hard = _judged(task, kept)
    hard = hard_rows(is_hard, sizes.hard)
    ok = fits & (hard.count <= sizes.hard)
    active = dataclasses.replace(active, live=dataclasses.replace(active.live, hard=hard.count).where(ok))

    # dlogits of the hard rows, behind the tokens'
    dx = _dlogits_of_hard(task, active, buffer.holding(dx), hard, rows)
    both, hidden = active.live.with_hard(sizes, active.visits), None

    # dhidden
    if want.hidden:
        dx = _with_stand_ins(task, dx, left_out, is_hard)
        hidden = _dhidden(task, active, buffer.holding(dx).tokens(), hard, both)

    # column chunks, if not everything fits. First all that is small: what follows the synchronisation waits for the
    # host to prepare it
    lists, token = dweight_buffer.of_columns(active.live, both), dweight_buffer.tokens_of(task.f, sizes, hard, is_hard)
    ok, _, lists, token = lax.optimization_barrier((ok, active.live, lists, token))
    buffer = buffer.holding(dx).with_dweight(p, want)
    bias = jnp.zeros((p.head.vocab,), jnp.float32) if want.bias else None
    # So many hard rows are too many even when every token meets all active columns.
    dense = c.dense | (fits & (hard.count > 2 * sizes.hard))
    total, left_out, hard, dense = once(
        ~ok, lambda s: _in_column_chunks(task, rows, s[0], s[3]), (State(hidden, bias, buffer), left_out, hard, dense)
    )

    # dweight of the active columns; after it the memory of dW is dW's
    own = HeadGrads(None, None)
    if want.weight or want.bias:
        own = dweight_buffer.dhead(task.f, want, total.buffer.tokens(), both, lists, token, sizes)
        # What follows may not begin before: dW is written over dx.
        own, dx, hard = lax.optimization_barrier((own, total.buffer.dx, hard))
        total = dataclasses.replace(total, buffer=total.buffer.holding(dx))
        hard = dataclasses.replace(hard, count=_in_two_graphs(hard.count))
    grads = Gradients(total.hidden, HeadGrads(total.buffer.dweight(p), total.bias))

    # hard rows, in the other columns; then the active columns, where the hard rows have written zeros
    left_out, hard = lax.optimization_barrier((left_out, hard))
    grads = dweight_buffer.add_hard_rows(task.f, hard, rows, task.found.spans.active, grads, ok)
    index = jnp.where(ok, active.index, p.head.vocab + jnp.arange(sizes.columns, dtype=jnp.int32))
    grads = Gradients(grads.hidden, put_head_columns(grads.head, index, own, p.head.layout, add=False, ascending=False))
    return grads, left_out, jnp.where(ok, active.visits.columns(), c.count), dense


# -- gather ----------------------------------------------------------------------------------------------------------


def _gathered(task: Task, live: Live) -> Active:
    p, c, size = task.p, task.found.columns, task.sizes.columns
    index = jnp.concatenate([jnp.full((1,), p.head.vocab + c.index.size, jnp.int32), c.index])[:size]
    index = jnp.concatenate([index, p.head.vocab + jnp.arange(index.size, size, dtype=jnp.int32)])
    part = head_columns(p.head, index, ascending=False)
    if task.want.hidden:
        part = _with_mean(part, task.rule, p)
    return Active(index, part, live, column_screen.met(task.found.spans, index, live.visits(task.sizes)))


def _with_mean(part: HeadArrays, rule: Rule, p: Problem) -> HeadArrays:
    """The gathered head with its mean row in front of the active columns; its logits count for nothing."""
    row = mean_row(rule, p).astype(part.weight.dtype)
    row = row if p.head.axis == 0 else row.T
    weight = lax.dynamic_update_slice_in_dim(part.weight, row, 0, p.head.axis)
    return dataclasses.replace(part, weight=lax.optimization_barrier(weight))  # a single array, instead of two variants


# -- dlogits ---------------------------------------------------------------------------------------------------------


def _dlogits(task: Task, active: Active, place: Slots, h: Array, rows: Rows, visits: Visits) -> tuple[Array, Array]:
    """``(dx, the mass that rows keep)`` of some tokens, whose hidden states are the first of ``h``, in the active
    columns."""
    at = jnp.arange(active.index.size, dtype=jnp.int32)
    counts = (at > 0) & (at < active.live.columns)
    return columns_dx_of(task.p, place, h, rows, active.index, Region(active.part, counts, visits))


def _dlogits_of_hard(task: Task, active: Active, buffer: DweightBuffer, hard: Hard, rows: Rows) -> Array:
    """dx with hard rows once more, behind the tokens: in all active columns, whatever their tile has visited."""
    f, sizes, live = task.f, task.sizes, active.live
    some, own = dweight_buffer.group_of(f, hard.visit(0, sizes.hard, f.p.n), rows)
    h = lax.dynamic_update_slice(f.p.h, some, (0, 0))  # of equal shape: the same kernel serves
    visits = all_of(sizes.tokens, sizes.columns, live.hard, live.columns)
    return _dlogits(task, active, buffer.hard(), h, own, visits)[0]


# -- classify --------------------------------------------------------------------------------------------------------


def _judged(task: Task, kept: Array) -> tuple[Array, Array]:
    """``(left-out mass of each row [N], whether the row is hard [N])``, computed from the kept mass."""
    p, known = task.p, task.known
    moving = known.g.any_nonzero()
    left_out = jnp.where(moving, mass_beside(kept), 0.0)
    return left_out, moving & misses(p.tolerance, known.stats, known.g, p.call.vocab_size)(left_out)


def _stand_ins(task: Task, left_out: Array, hard: Array) -> Array:
    """``[N, 1]`` float32: what easy rows leave out, to be multiplied by a mean row of the head."""
    return in_their_place(jnp.ones((1, 1), jnp.float32), left_out, without(task.known.g, hard), task.p.transform)


# -- dhidden ---------------------------------------------------------------------------------------------------------


def _with_stand_ins(task: Task, dx: Array, left_out: Array, hard: Array) -> Array:
    """``dx`` with what easy rows leave out in the mean row's column."""
    stands = _stand_ins(task, left_out, hard)
    at = jnp.arange(task.p.n, dtype=jnp.int32)
    at = at // TOKENS * (task.sizes.across * TOKENS) + at % TOKENS
    return dx.at[at, 0].set(stands[:, 0].astype(dx.dtype), mode="promise_in_bounds", unique_indices=True)


def _dhidden(task: Task, active: Active, dx: Slots, hard: Hard, both: Visits) -> Array:
    """dH of the active columns, in the order of the call; hard rows' is that of their second place."""
    f, sizes = task.f, task.sizes
    second = sizes.tokens + jnp.arange(sizes.hard, dtype=jnp.int32)
    first = f.place
    place = first.at[f.in_call(hard.visit(0, sizes.hard, f.p.n)).write].set(second, mode="drop")
    half = dweight_buffer.dhidden(f, dx, active.part, active.live, both, sizes, place)
    hidden = jnp.zeros((), dx.array.dtype)
    for i in range(2):
        which, rows = half(i)
        hidden = jnp.where((which & (first < active.live.tokens))[:, None], rows.astype(hidden.dtype), hidden)
    return hidden


# -- column chunks ---------------------------------------------------------------------------------------------------


def _in_column_chunks(task: Task, rows: Rows, state: State, dense: Array) -> tuple[State, Array, Hard, Array]:
    """``(gradients in the memory of state, mass left out [N], hard rows that are left to others, whether all tokens
    went through all columns)``; where ``dense``, that is known from the start."""
    p, found = task.p, task.found.spans.active
    leave = task.sizes.hard if can_add(p.head) else 0

    def over(carry: tuple[Array, Array, State, Array, Array]) -> tuple[Array, Array, State, Array, Array]:
        _, everything, state, _, _ = carry
        state, lacks, kept = _over_columns(task, rows, found | everything, state)
        left_out, hard = (jnp.where(everything, jnp.zeros((), x.dtype), x) for x in _judged(task, kept))
        many = jnp.sum(hard, dtype=jnp.int32) > leave
        if state.hidden is not None:
            rest = task.f.put_back(_stand_ins(task, left_out, hard)) * mean_row(task.rule, p)
            hidden = state.hidden.astype(jnp.float32) + lacks.astype(jnp.float32) + rest
            state = dataclasses.replace(state, hidden=hidden.astype(state.hidden.dtype))
        return many, everything | many, state, left_out, hard

    nothing, nobody = jnp.zeros((p.n,), jnp.float32), jnp.zeros((p.n,), bool)
    start = jnp.asarray(True), dense, state, nothing, nobody
    _, everything, state, left_out, hard = lax.while_loop(lambda carry: carry[0], over, start)
    return state, left_out, hard_rows(hard, task.sizes.hard), everything


@dataclasses.dataclass(frozen=True)
class _ColumnOrder:
    """The order of columns, in tiles of ``COLUMNS`` adjacent columns.

    If dx shares memory with dW, finished rows of dW fill the front, and dx the remaining space behind. The remaining
    space shrinks, and the chunks shrink with it; for the last column tiles no space would be left. These tiles
    therefore come first, while all space is free, and their dW waits in a buffer.
    """

    sizes: Sizes
    width: int
    in_place: bool
    columns: Array  # how many there are

    @property
    def tiles(self) -> Array:
        return tile_count(self.columns, COLUMNS)

    @property
    def last(self) -> int:
        """Tiles that have the first turn, at most."""
        return min(dweight_buffer.last_tiles(self.sizes, self.width), self.sizes.across) if self.in_place else 0

    @property
    def end(self) -> Array:
        """Number of tiles in the regular order."""
        return jnp.maximum(self.tiles - self.last, 0)

    def turn(self, begin: Array) -> tuple[Array, Array, Array]:
        """``(first tile, count, first slot of dx)`` with the tiles before ``begin`` finished; the last tiles if
        negative."""
        slots, most = self.sizes.in_dw, jnp.int32(self.sizes.across)
        if not self.in_place:
            return begin, jnp.minimum(most, self.end - begin), jnp.int32(0)
        finished = tile_count(jnp.maximum(begin, 0) * self.width, TOKENS)  # slots
        size = jnp.minimum(jnp.minimum(most, (slots - finished) // self.sizes.token_tiles), self.end - begin)
        first, size = jnp.where(begin < 0, self.end, begin), jnp.where(begin < 0, self.tiles - self.end, size)
        return first, size, slots - size * self.sizes.token_tiles


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """Some adjacent columns of the order."""

    columns: Array  # [c] int32: their numbers; beyond the vocabulary, where there are no more
    position: Array  # [c] in the order
    there: Array  # [c] bool
    slot: Array  # first slot of dx
    tiles: Array
    count: Array  # () int32: columns of the whole order


def _over_columns(task: Task, rows: Rows, chosen: Array, state: State) -> tuple[State, PyTree, Array]:
    """``(gradients, what dH lacks, kept mass [N])`` of all tokens in the columns ``chosen [V]``; zero in others."""
    f, p, sizes, in_place = task.f, task.p, task.sizes, state.buffer.in_place
    vocab, count = p.head.vocab, jnp.sum(chosen, dtype=jnp.int32)
    order = _ColumnOrder(sizes, p.h.shape[1], in_place, count)
    index = _chosen_first(chosen, sizes.columns)
    at = jnp.arange(sizes.columns, dtype=jnp.int32)
    nowhere, token = vocab + at, dweight_buffer.tokens_of(f, sizes)

    def chunk_from(begin: Array) -> _Chunk:
        first, tiles, slot = order.turn(begin)
        position = first * COLUMNS + at
        there = (at < tiles * COLUMNS) & (position < count)
        own = jnp.where(there, lax.dynamic_slice_in_dim(index, first * COLUMNS, sizes.columns), nowhere)
        return _Chunk(own, position, there, slot, tiles, count)

    def turn(carry: PyTree) -> PyTree:
        begin, state, lacks, last, kept = carry
        chunk = chunk_from(begin)
        state, lacks, grads, mass = _chunk_gradients(task, rows, chunk, token, state, lacks)
        buffer = state.buffer
        if in_place:
            assert grads.weight is not None
            finished = jnp.where(chunk.there & (begin >= 0), chunk.position, nowhere)
            weight = _put(buffer.dx.reshape(p.head.weight.shape), finished, grads.weight)
            buffer = buffer.holding(weight.reshape(buffer.dx.shape))
            last = jnp.where(begin < 0, grads.weight[: len(last)], last)
        total = HeadGrads(buffer.weight, state.bias)
        total = put_head_columns(total, chunk.columns, grads, p.head.layout, add=False)
        begin = jnp.where(begin < 0, 0, begin + chunk.tiles)
        buffer = dataclasses.replace(buffer, weight=total.weight)
        return begin, State(state.hidden, total.bias, buffer), lacks, last, kept + mass

    hidden, weight, bias = jax.tree.map(jnp.zeros_like, (state.hidden, state.buffer.weight, state.bias))
    blank = State(hidden, bias, dataclasses.replace(state.buffer, weight=weight))
    last = jnp.zeros((order.last * COLUMNS, p.h.shape[1]), state.buffer.dx.dtype)
    kept = jnp.zeros((p.n,), jnp.float32)
    start = jnp.int32(-1 if order.last else 0), blank, blank.hidden, last, kept
    _, state, lacks, last, kept = lax.while_loop(lambda carry: carry[0] < order.end, turn, start)
    if in_place:
        weight = state.buffer.dx.reshape(p.head.weight.shape)
        position = order.end * COLUMNS + jnp.arange(len(last), dtype=jnp.int32)
        weight = _put(weight, jnp.where(position < count, position, vocab + position), last)
        weight = _spread(weight, index, chosen, count, sizes.columns)
        state = dataclasses.replace(state, buffer=state.buffer.holding(weight.reshape(state.buffer.dx.shape)))
    return state, lacks, kept


def _chosen_first(chosen: Array, more: int) -> Array:
    """int32: the columns ``chosen [V]``, ascending, then numbers beyond the vocabulary; ``more`` than V of them."""
    vocab = chosen.size
    whole = tile_count(vocab, COLUMNS) * COLUMNS + more
    ids = jnp.arange(whole, dtype=jnp.int32)
    return jnp.sort(jnp.where(jnp.pad(chosen, (0, whole - vocab)), ids, vocab + ids))


def _chunk_gradients(
    task: Task, rows: Rows, chunk: _Chunk, token: Array, state: State, lacks: PyTree
) -> tuple[State, PyTree, HeadGrads, Array]:
    """``(gradients with the chunk's dH and its dx in their memory, what dH lacks, the head's gradients in the chunk's
    columns, mass that the chunk has [N])``."""
    f, p, sizes, hidden = task.f, task.p, task.sizes, state.hidden
    part = head_columns(p.head, chunk.columns)
    # Gathered in every turn, not kept: there is no room beside dH.
    every, dx = lax.optimization_barrier((jnp.arange(p.n, dtype=jnp.int32), state.buffer.dx))
    live = Live(f.count, jnp.sum(chunk.there, dtype=jnp.int32), jnp.int32(0)).where(chunk.count > 0)
    visits = live.visits(sizes)
    counts = chunk.there & (chunk.columns < p.call.vocab_size)
    slots = state.buffer.holding(dx).chunk(chunk.slot, chunk.tiles)
    dx, mass = columns_dx_of(p, slots, f.hidden_of(every), rows, chunk.columns, Region(part, counts, visits))
    both = live.with_hard(sizes, visits)
    if hidden is not None:
        half = dweight_buffer.dhidden(f, slots.of(dx), part, live, both, sizes, f.place)

        def add(i: Array, pair: tuple[Array, Array]) -> tuple[Array, Array]:
            which, more = half(i)
            return _added(*pair, jnp.where((which & (f.place < f.count))[:, None], more, 0.0))

        (hidden, lacks), dx = lax.optimization_barrier((lax.fori_loop(0, 2, add, (hidden, lacks)), dx))
    lists = dweight_buffer.of_columns(live, both)
    grads = dweight_buffer.dhead(f, task.want, slots.of(dx), both, lists, token, sizes)
    grads, dx = lax.optimization_barrier((grads, dx))
    return State(hidden, state.bias, state.buffer.holding(dx)), lacks, grads, mass


def _added(total: Array, lacks: Array, more: Array) -> tuple[Array, Array]:
    """``total`` and ``more``, float32, in the dtype of ``total``; and what it lacks of their sum with ``lacks``."""
    whole = total.astype(jnp.float32) + lacks.astype(jnp.float32) + more
    kind = jnp.finfo(total.dtype)
    # Said so: a compiler may leave out that a number is rounded and made wide again.
    near = lax.reduce_precision(whole, kind.nexp, kind.nmant)
    return near.astype(total.dtype), (whole - near).astype(total.dtype)


def _put(whole: Array, index: Array, rows: Array) -> Array:
    """``whole`` with ``rows`` in the places ``index``, ascending; none beyond it."""
    return whole.at[index].set(rows, mode="drop", unique_indices=True, indices_are_sorted=True)


def _spread(weight: Array, index: Array, chosen: Array, count: Array, size: int) -> Array:
    """``weight [V, H]``, the first ``count`` rows of which are those of the columns ``index``, ascending, with each in
    its own place and zeros elsewhere.

    ``size`` rows at a time, the last ones first: no row moves forward, so no row is overwritten before its move."""
    vocab = len(weight)
    at = jnp.arange(size, dtype=jnp.int32)
    trips = jnp.where(count < vocab, tile_count(count, size), 0)

    def move(i: Array, weight: Array) -> Array:
        begin = (trips - 1 - i) * size
        rows = weight.at[begin + at].get(mode="clip")
        rows, weight = lax.optimization_barrier((rows, weight))
        own = jnp.where(begin + at < count, lax.dynamic_slice_in_dim(index, begin, size), vocab + at)
        return _put(weight, own, rows)

    weight = lax.fori_loop(0, trips, move, weight)
    return jnp.where(chosen[:, None], weight, jnp.zeros((), weight.dtype))


def _in_two_graphs(count: Array) -> Array:
    """``count``, which is not negative, unchanged, routed through a no-op loop.

    XLA captures everything between two loops in one CUDA graph, and the host prepares a graph as a whole before it
    starts: 0.65 ms, for which the device would wait after a synchronisation. The loop splits the graph: while the
    device works on a part, the host prepares the next part.
    """
    return lax.fori_loop(0, 2, lambda i, n: jnp.maximum(n, i - 1), count)
