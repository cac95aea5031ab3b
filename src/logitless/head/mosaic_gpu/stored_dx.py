"""The exact gradients on a Hopper GPU with the dx of all tokens in memory: one matmul for dH and one for dW.

With M one ``N x H x V`` matmul over the N tokens that have a gradient:

    for C tokens    logits x [C, V] by a matmul (M C / N); the row kernel reads x and writes dx into its rows of
                    ``dx [N, V]``
    at the end      dH = dx W (M) and dW = dx^T h (M), by kernels that take N from the device
                    (``kernels/dynamic_matmul.py``)

The other form (``head/chunked.py``) adds each chunk's dW to a float32 accumulator: 5 GB of traffic a chunk at H = 4096,
V = 151936, one more pass to fill it with zeros and one to round it. Here dW is summed in the matmul's own registers,
rounded once and written once. So chunks may be small, and the time goes with N: the two large matmuls do whole tiles
of 128 tokens, and of the last chunk the logits' matmul does no more.

With memory for the logits of all tokens as well, cotangents that arrive later take three matmuls, too: the forward pass
keeps the logits, and the row kernel makes dx of them all at once.

    bytes    2 N V for dx, in place of the accumulator's 4 H V; C V logits and dx of a chunk; h in order
    exact    no less than the accumulator: a product is summed in float32, and rounded once
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.core.backend import Cost, Split, Way, refusal
from logitless.core.chunk_size import whole_chunks
from logitless.core.problem import Gradients, HeadGrads, Linear, Loss, Problem, Wanted
from logitless.core.row_passes import Sweep, Visit, split_sweep
from logitless.core.stats import StatCotangents, TokenStats
from logitless.head.chunked import problem_of
from logitless.head.linear import dx_dtype, raw_logits
from logitless.head.mosaic_gpu.backend import MosaicGpu
from logitless.head.mosaic_gpu.kernels import dynamic_matmul, stats_matmul
from logitless.head.mosaic_gpu.kernels.schedule import TILE_K, check
from logitless.logits.mosaic_gpu.layout import Destination

T = TypeVar("T")
Body = Callable[[Visit, Array, Array, T], T]

CHUNK = 512
"""Tokens whose logits are in memory at a time: enough for the matmul, whose other side is the vocabulary."""

_TILE = 128
"""Tokens that the last chunk's matmul is cut to a multiple of."""

_FROZEN = 2048
"""Tokens whose dx is kept at a time where the head is frozen: dH of so many fills the GPU."""


def not_stored_because(p: Problem[Linear]) -> str | None:
    """Why the dx of all tokens is not kept (arrays or shapes); ``None`` where it is."""
    (n, width), vocab = p.h.shape, p.head.vocab
    why = refusal(check, p)
    if why is not None:
        return why
    if p.head.lora_a is not None:
        return "the head has LoRA"
    if p.more_ids is not None:
        return f"it has no {p.more_ids}"
    if width % TILE_K or vocab % TILE_K:
        return f"H = {width} and V = {vocab} are not both multiples of {TILE_K}"
    needs, room = bytes_of(p), _room(p)
    if needs > room:
        return f"the dx of {n} tokens and a chunk's logits take {needs:,} bytes, more than {room:,}"
    return None


def bytes_of(p: Problem[Linear]) -> int:
    """What this form takes beside inputs and outputs: dx, and a chunk's logits and dx or, afterwards, h in order and
    dH in parts."""
    (n, width), vocab, item = p.h.shape, p.head.vocab, jnp.dtype(p.call.logits_dtype).itemsize
    own, chunk = jnp.dtype(p.h.dtype).itemsize, chunk_of(p)
    rows, item = whole_chunks(n, chunk), item * p.stages
    return own * rows * vocab + max((item + own) * chunk * vocab, (own + 2 * 4) * rows * width)


def _room(p: Problem[Linear]) -> int:
    """What it may take: the budget, or as much as the other form would."""
    if p.call.memory_budget is not None:
        return p.call.memory_budget
    (_, width), vocab, item = p.h.shape, p.head.vocab, jnp.dtype(p.call.logits_dtype).itemsize
    accumulator = 4 * width * vocab if p.call.sum_head_grad_in == "float32" else 0
    return accumulator + item * p.stages * max(p.call.chunk, chunk_of(p)) * vocab + 4 * p.n * width


def logits_fit(p: Problem[Linear]) -> bool:
    """Whether the budget holds logits for all tokens in addition to dx; with equal dtypes dx overwrites the logits."""
    if p.call.memory_budget is None or p.teacher is not None:
        return False
    own, item, chunk, vocab = jnp.dtype(p.h.dtype), jnp.dtype(p.call.logits_dtype), chunk_of(p), p.head.vocab
    rows = whole_chunks(p.n, chunk)
    later = rows * (own.itemsize * vocab * (own != item) + (own.itemsize + 2 * 4) * p.h.shape[1])  # dx, h, dH in parts
    return item.itemsize * rows * vocab + max(item.itemsize * chunk * vocab, later) <= p.call.memory_budget


def chunk_of(p: Problem[Linear]) -> int:
    """Tokens per chunk, a multiple of 8 for the copies of the matmuls."""
    return -(-min(p.call.chunk, CHUNK, p.n) // 8) * 8


def _covered(chunks: Sweep) -> Array | int:
    """Tokens that the matmuls of all chunks reach: of the last chunk they do whole tiles."""
    size = chunks.chunk
    tile = min(_TILE, size)
    whole, rest = chunks.count // size, chunks.count % size
    return whole * size + jnp.minimum((rest + (tile - 1)) // tile * tile, size)


def _over_chunks(chunks: Sweep, p: Problem, body: Body[T], carry: T) -> T:
    """``body(visit, first position, logits, carry)`` over all chunks, at least one."""
    whole, rest = chunks.count // chunks.chunk, chunks.count % chunks.chunk

    def step(i: Array | int, logits: Callable[[Array], Array], c: T) -> T:
        position = jnp.asarray(i * chunks.chunk, jnp.int32)
        visit = chunks.visit(position, chunks.chunk)
        return body(visit, position, logits(visit.hidden(p)), c)

    def all_rows(h: Array) -> Array:
        return raw_logits(h, p.head, p.call.logits_dtype)

    carry = lax.fori_loop(0, whole, lambda i, c: step(i, all_rows, c), carry)
    # A loop of one turn or none: a conditional would copy the carry.
    last = jnp.asarray((rest > 0) | (chunks.count == 0), jnp.int32)
    return lax.fori_loop(0, last, lambda _, c: step(whole, lambda h: _first_logits(h, rest, p), c), carry)


def _first_logits(h: Array, count: Array | int, p: Problem) -> Array:
    """``[C, V]`` logits of the first ``count`` of ``h [C, H]`` in whole tiles; zeros behind them."""

    def of(size: int) -> Callable[[], Array]:
        return lambda: jnp.pad(raw_logits(h[:size], p.head, p.call.logits_dtype), ((0, len(h) - size), (0, 0)))

    sizes = [*range(_TILE, len(h), _TILE), len(h)]
    return lax.switch((jnp.maximum(count, 1) - 1) // _TILE, [of(size) for size in sizes])


def _split(p: Problem, live: Array, moving: Array) -> tuple[Sweep, Sweep]:
    """``(live tokens that move, and as many others as fill their last tile; the other live tokens)``."""
    first, _ = split_sweep(live, moving, chunk_of(p))
    done = _covered(first)
    left = jnp.maximum(first.limit - done, 0)
    rest = dataclasses.replace(first, start=done, count=left, limit=left)
    return dataclasses.replace(first, limit=jnp.minimum(first.limit, done)), rest


def _live(p: Problem) -> Sweep:
    """All live tokens."""
    live = jnp.ones((p.n,), bool) if p.live is None else p.live
    return _split(p, live, live)[0]


def _dtype(p: Problem, want: Wanted) -> jnp.dtype:
    """Of a chunk's dx: wide enough for the bias' gradient."""
    return dx_dtype(p.call.logits_dtype, p.h.dtype, want.bias)


def _gradients(
    p: Problem,
    want: Wanted,
    moving: Sweep,
    dx_of: Callable[[Visit, Array, T, Destination | None], tuple[T, Array]],
    carry: T,
) -> tuple[T, Gradients]:
    """``(carry, gradients)``: ``dx_of(visit, logits, carry, into)`` for all chunks, then the matmuls over their dx.

    The row kernel writes dx into its rows, unless the bias' gradient needs a chunk's dx before it is rounded."""
    whole = whole_chunks(p.n, moving.chunk)
    size = whole if want.weight else min(_round_size(moving.chunk), whole)
    rounds = -(-whole // size)
    hidden = _empty((rounds * size, p.h.shape[1]), _hidden_dtype(p)) if want.hidden else None
    bias = jnp.zeros((p.head.vocab,), jnp.float32) if want.bias else None
    dx = _empty((size, p.head.vocab), p.h.dtype)

    def some(first: Array | int, state: tuple[T, Gradients, Array]) -> tuple[T, Gradients, Array]:
        """The tokens from position ``first`` on, as many as ``dx`` has rows."""
        carry, total, dx = state
        own = dataclasses.replace(
            moving,
            start=first,
            count=jnp.clip(moving.count - first, 0, size),
            limit=jnp.clip(moving.limit - first, 0, size),
        )

        def body(visit: Visit, at: Array, x: Array, c: tuple[T, Array | None, Array]) -> tuple[T, Array | None, Array]:
            carry, bias, dx = c
            if bias is None:
                carry, dx = dx_of(visit, x, carry, Destination(dx, at))
                return carry, bias, dx
            carry, more = dx_of(visit, x, carry, None)
            bias = bias + jnp.sum(more, axis=0, dtype=jnp.float32)
            return carry, bias, lax.dynamic_update_slice(dx, more.astype(dx.dtype), (at, 0))

        carry, bias, dx = _over_chunks(own, p, body, (carry, total.head.bias, dx))
        count = jnp.maximum(own.count, 1)  # at least one row, of zeros: dW is written in any case
        hidden, weight = total.hidden, total.head.weight
        if hidden is not None:
            mine = _dhidden(p, dx, count)
            hidden = mine if rounds == 1 else lax.dynamic_update_slice(hidden, mine, (first, 0))
        if want.weight:
            weight = _dweight(p, dx, _in_order(p, own, size), count)
        return carry, Gradients(hidden, HeadGrads(weight, bias)), dx

    start = carry, Gradients(hidden, HeadGrads(None, bias)), dx
    if rounds == 1:
        carry, total, _ = some(0, start)
    else:
        trips = (moving.count + (size - 1)) // size
        carry, total, _ = lax.fori_loop(0, trips, lambda i, s: some(i * size, s), start)
    return carry, _finished(p, moving, total)


def _empty(shape: tuple[int, int], dtype: jnp.dtype) -> Array:
    """An array of anything, on the ambient mesh as what is put into it."""
    mesh = jax.sharding.get_abstract_mesh()
    where: dict[str, Any] = {} if mesh.empty else dict(out_sharding=jax.sharding.PartitionSpec(None, None))
    return lax.empty(shape, dtype, **where)


def _round_size(chunk: int) -> int:
    """Tokens of a round with a frozen head, in whole chunks."""
    return max(_FROZEN // chunk, 1) * chunk


def _hidden_dtype(p: Problem) -> jnp.dtype:
    return jnp.dtype(jnp.float32) if p.call.partial_hidden else p.h.dtype


def _in_order(p: Problem, chunks: Sweep, size: int) -> Array:
    """``[size, H]``: hidden states of the tokens; zeros behind them, where a dead token may hold NaN."""
    at = jnp.arange(size, dtype=jnp.int32)
    h = chunks.visit(0, size).take(p.h)
    return jnp.where((at < chunks.count)[:, None], h, jnp.zeros((), p.h.dtype))


def _dhidden(p: Problem, dx: Array, count: Array) -> Array:
    """``dx W`` for the first ``count`` rows, followed by zeros. Its depth is the vocabulary and its tiles are few: in
    whole ones some blocks would have one more than others, and be an eighth of the matmul late."""
    live = count, p.h.shape[1], p.head.vocab
    how = dict(right_deep=p.head.axis == 0, more=len(dx) // _TILE, interpret=p.call.interpret)
    return dynamic_matmul.in_parts(dx, p.head.weight, len(dx), live, **how).astype(_hidden_dtype(p))


def _dweight(p: Problem, dx: Array, h: Array, count: Array) -> Array:
    """dW, of the first ``count`` rows."""
    pair, extent = (dx, h), (p.head.vocab, h.shape[1])
    if p.head.axis == 1:
        pair, extent = pair[::-1], extent[::-1]
    wide = p.call.partial_head and p.call.sum_head_grad_in == "float32"
    how = dict(left_deep=True, right_deep=True, wide=wide, interpret=p.call.interpret)
    return dynamic_matmul.product(*pair, (*extent, count), **how)


def _finished(p: Problem, moving: Sweep, total: Gradients) -> Gradients:
    """In the order and the dtypes of the call."""
    hidden, bias = total.hidden, total.head.bias
    if hidden is not None:
        place = jnp.full((p.n,), len(hidden), jnp.int32)
        at = jnp.arange(p.n, dtype=jnp.int32)
        place = place.at[moving.order].set(jnp.where(at < moving.count, at, len(hidden)), unique_indices=True)
        hidden = hidden.at[place].get(mode="fill", fill_value=0)
    if bias is not None and not p.call.partial_head:
        assert p.head.bias is not None
        bias = bias.astype(p.head.bias.dtype)
    return Gradients(hidden, HeadGrads(total.head.weight, bias))


@dataclasses.dataclass(frozen=True)
class StoredDx(MosaicGpu):
    """See the module."""

    def supports(self, p: Problem[Linear], split: Split) -> str | None:
        return super().supports(p, split) or not_stored_because(p)

    def describe(self, p: Problem[Linear], way: Way) -> Cost:
        cost = super().describe(p, way)
        chunk, moved = chunk_of(p), f"{cost.bytes_moved}; dx of all tokens in memory, dW written once"
        tiles = cost.tiles | {"chunk": chunk, "dx_rows": p.n}
        return dataclasses.replace(cost, bytes_moved=moved, tiles=tiles, sweep=chunk, stored="dx")

    def tokens_kept(self, p: Problem) -> int:
        return p.n if logits_fit(p) else super().tokens_kept(p)

    def _over(self, p: Problem, chunks: Sweep, out: TokenStats) -> TokenStats:
        """``out`` with the statistics of the tokens in ``chunks``."""
        rows = jax.jit(self.row_statistics)  # called twice, lowered once

        def body(visit: Visit, _: Array, x: Array, out: TokenStats) -> TokenStats:
            return visit.put_all(out, rows(x, problem_of(visit, p)))

        return _over_chunks(chunks, p, body, out)

    def token_statistics(self, p: Problem) -> TokenStats:
        """By the fused matmul where it can serve; else equal bit by bit to those with kept logits."""
        if not p.call.kept and stats_matmul.not_served_because(p) is None:
            return super().token_statistics(p)
        return self._over(p, _live(p), p.blank_stats())

    def statistics(self, p: Problem, loss: Loss | None = None) -> tuple[TokenStats, None]:
        if loss is None:
            return self.token_statistics(p), None
        out = p.blank_stats()
        for chunks in _split(p, loss.inputs.mask, loss.may_move()):
            out = self._over(p, chunks, out)
        return out, None

    def gradients_in_forward(self, p: Problem, want: Wanted, loss: Loss) -> tuple[TokenStats, None, Gradients]:
        moving, rest = _split(p, loss.inputs.mask, loss.may_move())
        rows = jax.jit(self.row_statistics_and_dx, static_argnums=3)

        def dx_of(visit: Visit, x: Array, out: TokenStats, into: Destination | None) -> tuple[TokenStats, Array]:
            own = visit.loss(loss, p.n)
            stats, dx = rows(x, problem_of(visit, p).counting(own), own, _dtype(p, want), into)
            return visit.put_all(out, stats), dx

        out, total = _gradients(p, want, moving, dx_of, p.blank_stats())
        return self._over(p, rest, out), None, total

    def forward(self, p: Problem, want: Wanted) -> tuple[TokenStats, None, Array | None]:
        """The residual is the logits ``[whole chunks, V]``, those of live tokens first, if they are kept."""
        if not p.call.kept:
            return self.token_statistics(p), None, None
        rows, chunks = jax.jit(self.row_statistics), _live(p)

        def body(visit: Visit, at: Array, x: Array, c: tuple[TokenStats, Array]) -> tuple[TokenStats, Array]:
            out, kept = c
            stats = rows(x, visit.problem(p))
            return visit.put_all(out, stats), lax.dynamic_update_slice(kept, x, (at, 0))

        size = whole_chunks(p.n, chunks.chunk)
        kept = _empty((size, p.head.vocab), jnp.dtype(p.call.logits_dtype))
        out, logits = _over_chunks(chunks, p, body, (p.blank_stats(), kept))
        return out, None, logits

    def backward(
        self, p: Problem, want: Wanted, out: TokenStats, g: StatCotangents, residual: Array | None, only_logp: bool
    ) -> Gradients:
        """From kept logits (two matmuls per live token), or by recompute: tokens whose cotangents are all zero are not
        visited."""
        if residual is not None:
            return self._from_logits(p, want, out, g, residual)
        moves = g.any_nonzero() if p.live is None else g.any_nonzero() & p.live
        moving, _ = _split(p, moves, moves)
        rows = jax.jit(self.row_dx, static_argnums=4)

        def dx_of(visit: Visit, x: Array, nothing: tuple[()], into: Destination | None) -> tuple[tuple[()], Array]:
            return nothing, rows(x, problem_of(visit, p), *visit.known(out, g, p.n), _dtype(p, want), into)

        return _gradients(p, want, moving, dx_of, ())[1]

    def _from_logits(self, p: Problem, want: Wanted, out: TokenStats, g: StatCotangents, logits: Array) -> Gradients:
        chunks, size = _live(p), len(logits)
        visit = chunks.visit(0, size)
        dx = self.row_dx(logits, visit.problem(p), *visit.known(out, g, p.n), _dtype(p, want))
        bias = jnp.sum(dx, axis=0, dtype=jnp.float32) if want.bias else None
        dx, count = dx.astype(p.h.dtype), jnp.maximum(chunks.count, 1)
        hidden = _dhidden(p, dx, count) if want.hidden else None
        weight = _dweight(p, dx, _in_order(p, chunks, size), count) if want.weight else None
        return _finished(p, chunks, Gradients(hidden, HeadGrads(weight, bias)))


def exact_form(p: Problem) -> MosaicGpu:
    """The backend that serves a call of one device without a sparse backward."""
    return StoredDx() if not_stored_because(p) is None else MosaicGpu()
