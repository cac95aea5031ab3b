"""Forward sweep of the fused head on TPU: token statistics, and the expected head row, with no logits in HBM.

For a tile of tokens the vocabulary is swept tile by tile; with ``x = h W^T + bias`` and ``z = k u = transform(x)``, in
VMEM only, the columns other than the target are carried as :class:`logitless.core.stats.RowSums` relative to a running
maximum ``m`` (:func:`_absorb`), and, when the direction is wanted, so is

    E[n, :] = sum_{v != y} exp(k (u_v - m)) slope_v W_v       slope = dz/dx, taken in here only if a softcap varies it

with the exponentials rounded to the head's dtype before the matmul, as dlogits are. This is flash attention with
queries ``h`` and keys and values ``W``. With and without the direction the statistics come from the same instructions
on the same tiles: they are bit-identical.

The columns of a tile come in blocks, each relative to one maximum, and a block's logits in pieces, each of one matmul.
The compiler schedules exponentials between their producers and their consumers, and an independent matmul runs in
parallel. A block is therefore consumed while the next block's logits are computed. With the direction that is within a
tile (exponentials have to meet their columns of the head); without it the last block of a tile waits in VMEM for the
next tile's matmuls, and one more step takes in the last of all. On a v6e at H = 4096 the matrix unit is at work in 91 %
of a step's cycles for statistics, in 92 % with the direction (94 % in twice the code), where it was 81 and 88 % with a
tile's exponentials after all of its logits (the simulator's estimates).

For a sparse backward (``sparse.py``) the sweep also gives, per token tile, the maximum over its tokens of

    z_v - b        b = max(floor, logsumexp of the columns seen so far), floor known beforehand: the target's logit

for every column v (at a token's own target its other tokens count). ``b`` is at most the logsumexp of the row, so no
column is missed; a column swept before the row's leading one may look more probable than it is. Tokens that do not
count have an infinite floor. Two more operations an element, ``4 V`` bytes written per token tile.

Cost: one matmul (``2 N H V`` FLOP) for statistics, two with the direction. HBM bytes: W once per token tile
(``ceil(N / tokens) V H b``), ``N H b`` of hidden states, ``4 N H`` written for ``E``.

Tails are static: the last vocabulary step works on ``vocab_size mod tile`` columns rounded up to whole lanes; only the
columns within that last lane group are masked. Nothing is padded in HBM.
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

from logitless.core import compat
from logitless.core.compat import Index, Ref
from logitless.core.pytree import register
from logitless.core.stats import NEG_INF, LogitTransform, RowSums, factor, pull_back, swept, times
from logitless.head.pallas_tpu.kept_exponentials import Kept, block_of_step
from logitless.head.pallas_tpu.operands import (
    FLOOR,
    LOG_ZERO,
    ROWS,
    TARGET_COLUMN,
    TEMPERATURE,
    Launch,
    Operands,
    add_head_rows,
    clear_dead,
    clear_outside,
    column_ids,
    compiler_params,
    outer_bytes,
    over_vocabulary,
    raw_logits,
    sweep_blocks,
)
from logitless.head.pallas_tpu.tiles import (
    LANES,
    LEAST,
    PIECE,
    SUBLANES,
    TURN,
    Part,
    Spec,
    blocks_of,
    depths_of,
    fill_rows,
    over_lanes,
    over_parts,
    pieces_of,
    turn_around,
    zero_rows,
)

LOW = -1e30
"""Start of the running maximum: finite, so the difference of two maxima is never ``inf - inf``."""
_AT_ONCE = 16 * 1024
"""Elements whose exponentials are written down at once in a short turn, four times as many in a longer one: by the
simulator the best of 8 to 128 rows."""


@register
@dataclasses.dataclass(frozen=True)
class _Out:
    """What the sweep writes: shapes, block specs, references, then arrays."""

    sums: Any  # [ROWS, whole lanes]: m, S, A, Q, u_y, x_y, and two unused
    expected: Any = None  # [N, H]: E; with LoRA [N, H + R] (``lora.py``)
    high: Any = None  # [N, H], in the place of E: its upper half, in the hidden states' dtype
    rest: Any = None  # [N, H]: remainder of E after rounding
    maxima: Any = None  # [token tiles, 1, vocab_size]
    kept: Any = None  # [V, room] or [room, V], in HBM: exponentials of the first tokens
    tops: Any = None  # [N, vocabulary tiles]: the maximum that each tile's exponentials are relative to


def _absorb(
    sums: RowSums,
    others: list[Array],
    k: Array | None,
    beside: Callable[[int], None] | None,
    apart: Callable[[Any], Any],
) -> tuple[RowSums, Array, list[Array], list[Array]]:
    """``sums [T, 1]`` with a block's columns taken in, in pieces of ``others [T, C]``, ``-inf`` at the target; also the
    factor on what was there, and of each piece ``exp(s)`` and ``s = k (u - m)``. ``beside(n)`` is called before the
    exponentials of piece ``n``: a matmul that is made there does not wait for them. Without this, rows are stored in
    small groups, each row whole: stored in pieces, thousands of registers spill to VMEM, and spills delay the matmul.
    ``apart``: see :func:`_apart`.

    The same sums as by :func:`logitless.core.stats.merge`, relative to the new maximum at once, so that the
    exponentials serve the expected head row too.
    """
    m = functools.reduce(jnp.maximum, [jnp.max(u, axis=1, keepdims=True) for u in others], sums.maximum)
    step = times(k, sums.maximum - m)
    a = jnp.exp(step)

    def total(x: Array) -> Array:
        return jnp.sum(x, axis=1, keepdims=True)

    def taken(u: Array, m: Array, k: Array | None) -> tuple[Array, ...]:
        s = apart(times(k, u - m))
        e = apart(jnp.exp(s))
        return e, s, total(e), total(e * jnp.maximum(s, LOG_ZERO)), total(e * e)

    if beside is not None:
        found = []
        for n, u in enumerate(others):
            beside(n)
            found.append(taken(u, m, k))
    else:
        at_once = _AT_ONCE * (1 if m.shape[0] <= LEAST else 4)
        size = max(at_once // sum(u.shape[1] for u in others), SUBLANES)
        rows = [slice(first, first + size) for first in range(0, m.shape[0], size)]
        own_k = [k if k is None or k.ndim == 0 else k[at] for at in rows]  # a temperature may be each token's own
        parts = [[taken(u[at], m[at], k) for u in others] for at, k in zip(rows, own_k, strict=True)]
        found = [tuple(map(jnp.concatenate, zip(*piece, strict=True))) for piece in zip(*parts, strict=True)]
    e, s, *sums_of = (list(of_pieces) for of_pieces in zip(*found, strict=True))
    own = [functools.reduce(jnp.add, parts) for parts in sums_of]
    absorbed = RowSums(
        maximum=m,
        total=a * sums.total + own[0],
        centred=a * (sums.centred + step * sums.total) + own[1],
        squares=a * a * sums.squares + own[2],
        target=sums.target,
    )
    return absorbed, a, e, s


def upper_half(x: Array) -> Array:
    """float32 numbers rounded to those of bfloat16, by their bits: no compiler takes ``x - upper_half(x)`` for zero."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type((bits + 0x8000) & -0x10000, jnp.float32)


def _apart(spec: Spec, values: Any) -> Any:
    """The values themselves. In the interpreter, a CPU's program, what makes them is compiled apart from what they are
    for: a product is fused with a sum or is not, whatever follows, and the two kernels agree to the bit."""
    return lax.optimization_barrier(values) if spec.interpret else values


@register
@dataclasses.dataclass(frozen=True)
class _Scratch:
    """What a token tile's steps hand on."""

    sums: Any  # RowSums of [whole lanes, 1]; `target` is the target's raw logit
    token: Any  # [whole lanes, ROWS]: `Operands.token` in columns
    expected: Any = None  # [tokens, H] float32: E, if it leaves in halves
    pending: Any = None  # [tokens, a block] float32, without a direction: logits that are not in the sums yet


def _kernel(spec: Spec, n_live: Ref, refs: Operands, out: _Out, scratch: _Scratch) -> None:
    """One (token tile, vocabulary tile) step. If E leaves in halves, steps behind the last tile of the vocabulary write
    a part of the tokens each; without a direction one such step takes in the last block."""
    i, j = pl.program_id(0), pl.program_id(1)
    step = _Step(spec, refs, out, scratch, i, j, spec.live(i, n_live))
    step.begin(n_live)
    inside = step.live & (j < spec.vocab_steps) if spec.leaving else step.live
    if step.expected is None:
        over_vocabulary(spec, inside, _Statistics(step).of_tile)
        pl.when(step.live & (j == spec.vocab_steps))(_Statistics(step).flush)
    else:
        over_vocabulary(spec, inside, _Direction(step).of_tile)
    pl.when(step.live & (j == spec.vocab_steps - (step.expected is not None)))(step.write_sums)
    if scratch.expected is not None:
        block, size = i * spec.leaving + j - spec.vocab_steps, out.high.shape[0]
        pl.when(step.live & (j >= spec.vocab_steps) & (block * size < spec.n))(step.write_halves)


@dataclasses.dataclass(frozen=True)
class _Step:
    """A grid step, and what those for statistics and for the direction share."""

    spec: Spec
    refs: Operands
    out: _Out
    scratch: _Scratch
    i: Index  # the token tile
    j: Index  # the vocabulary tile
    live: Array | bool  # whether the token tile has a live token

    @property
    def expected(self) -> Any:
        """The accumulator E, or ``None``."""
        return self.out.expected if self.scratch.expected is None else self.scratch.expected

    def number(self, rows: slice | pl.Slice, k: int) -> Array:
        """The ``k``-th number of each token, ``[rows, 1]``."""
        return self.scratch.token[rows, k : k + 1]

    def transform(self, rows: slice | pl.Slice) -> LogitTransform:
        return self.spec.transform(self.refs.scalars, self.number(rows, TEMPERATURE))

    def read(self, rows: slice | pl.Slice) -> RowSums:
        return jax.tree.map(lambda ref: ref[rows, :], self.scratch.sums)

    def write(self, rows: slice | pl.Slice, sums: RowSums) -> None:
        jax.tree.map(lambda ref, value: ref.__setitem__((rows, slice(None)), value), self.scratch.sums, sums)

    def logits(self, rows: slice | pl.Slice, pieces: list[slice]) -> list[Array]:
        return [raw_logits(self.spec, self.refs, rows, piece) for piece in pieces]

    def begin(self, n_live: Ref) -> None:
        """Before a token tile's first vocabulary tile."""
        acc = self.scratch.sums

        @pl.when(self.live & (self.j == 0))
        def _() -> None:
            turn_around(self.refs.token, self.scratch.token)
            acc.maximum[...] = jnp.full_like(acc.maximum, LOW)
            for ref in jax.tree.leaves((acc.total, acc.centred, acc.squares, acc.target)):
                ref[...] = jnp.zeros_like(ref)
            if self.expected is not None:
                zero_rows(self.expected)

        dead = self.spec.dead_rows(self.i, n_live)
        if self.out.maxima is not None and dead is not None:

            @pl.when(self.live & (self.j == 0) & dead[0])
            def _() -> None:  # a column's maximum is over all rows of the block, and a dead one may hold NaN
                clear_dead(self.refs.h, 0, dead[1])
                if self.refs.low is not None:
                    clear_dead(self.refs.low, 0, dead[1])

    def take_in(
        self, rows: slice | pl.Slice, sums: RowSums, x: list[Array], first: Index, limit: Any = None, beside: Any = None
    ) -> tuple[RowSums, Array, list[Array], list[Array]]:
        """:func:`_absorb` a block of raw logits whose first column is the step's ``first``; of its columns ``limit``
        count."""
        spec, transform, others, at = self.spec, self.transform(rows), [], 0
        target = self.number(rows, TARGET_COLUMN).astype(jnp.int32) - (self.j * spec.tiles.vocab + first)
        for piece in x:
            column, u = column_ids(piece), swept(piece, transform)
            if limit is not None:
                u = jnp.where(column < limit - at, u, NEG_INF)
            is_target = column == target - at
            own = jnp.sum(jnp.where(is_target, piece, 0.0), axis=1, keepdims=True)
            sums = dataclasses.replace(sums, target=sums.target + own)
            others.append(jnp.where(is_target, NEG_INF, u))
            at += piece.shape[1]
        others, sums = _apart(spec, (others, sums))
        return _apart(spec, _absorb(sums, others, factor(transform), beside, functools.partial(_apart, spec)))

    def write_sums(self) -> None:
        """The sums of the token tile, which are complete."""

        def leave(part: Part) -> None:
            s = self.read(part.rows)
            m, x_y = jnp.where(s.maximum > LOW, s.maximum, NEG_INF), s.target
            columns, lane = jnp.zeros((part.size, LANES), jnp.float32), column_ids(jnp.zeros((part.size, LANES)))
            for n, value in enumerate((m, s.total, s.centred, s.squares, swept(x_y, self.transform(part.rows)), x_y)):
                columns = jnp.where(lane == n, value, columns)
            self.out.sums[:, part.rows] = columns.T[:ROWS, :]

        over_lanes(self.spec.lanes, leave)

    def write_halves(self) -> None:
        """A part of the token tile's rows of E, as two arrays."""
        high, rest = self.out.high, self.out.rest
        first = (self.j - self.spec.vocab_steps) * high.shape[0]

        def of(part: Part) -> Array:
            return self.expected[pl.ds(first + part.first, part.size), :]

        fill_rows(high, lambda part: upper_half(of(part)).astype(high.dtype))
        fill_rows(rest, lambda part: (of(part) - upper_half(of(part))).astype(rest.dtype))


@dataclasses.dataclass(frozen=True)
class _Direction:
    """Statistics and E: a block's exponentials meet their columns of the head beside the next block's logits."""

    step: _Step

    def of_tile(self, width: int, masked: bool) -> None:
        """The first ``width`` columns of the vocabulary tile; ``masked``: those of the tail count."""
        spec, refs = self.step.spec, self.step.refs
        if masked:
            clear_outside(spec, refs, width)
        unit = LANES if spec.kept else SUBLANES  # what is kept of a [V, H] head has tokens along the lanes
        most = TURN if width > 2 * PIECE else LANES  # a narrow tail takes little time and should take little code
        work = 2 * spec.tiles.vocab * refs.h.shape[1]
        over_parts(spec.tiles.tokens, work, unit, functools.partial(self.of_rows, blocks_of(width), masked), most)

    def of_rows(self, blocks: list[slice], masked: bool, part: Part) -> None:
        step, rows = self.step, part.rows
        sums, x = step.read(rows), step.logits(rows, pieces_of(blocks[0]))
        for n, block in enumerate(blocks):
            following = step.logits(rows, pieces_of(blocks[n + 1])) if n + 1 < len(blocks) else []
            limit = step.spec.tail - block.start if masked and n + 1 == len(blocks) else None
            sums, a, e, _ = step.take_in(rows, sums, x, block.start, limit)
            rounded = self.add(rows, block, x, a, e)
            if step.spec.kept:
                self.keep(part, n, block, rounded, sums)
            x = following
        step.write(rows, sums)

    def add(self, rows: slice | pl.Slice, block: slice, x: list[Array], a: Array, e: list[Array]) -> Array:
        """E times ``a``, plus the block's exponentials ``e`` times its columns of the head, and the exponentials as
        used."""
        step = self.step
        if step.spec.has_softcap:
            # Columns at -inf have no weight; their slope may be 0 * inf.
            e = [jnp.where(p > 0, pull_back(p, own, step.transform(rows)), 0.0) for p, own in zip(e, x, strict=True)]
        rounded = jnp.concatenate([piece.astype(step.refs.weight.dtype) for piece in e], axis=1)
        for some in depths_of(block):
            own = rounded[:, some.start - block.start : some.stop - block.start]
            before = a if some.start == block.start else None
            add_head_rows(step.spec, step.refs, step.expected, rows, before, own, some)
        return rounded

    def keep(self, part: Part, n: int, block: slice, e: Array, sums: RowSums) -> None:
        """The exponentials of the tile's ``n``-th block, and the maximum that they are relative to."""
        step, rows = self.step, part.rows
        kept, tops = step.out.kept, step.out.tops

        @pl.when(step.i < step.spec.kept_steps)
        def _() -> None:
            if step.spec.layout == "vh":
                kept[block, rows] = e.T
            else:
                kept[rows, block] = e

        at = lax.broadcasted_iota(jnp.int32, (part.size, tops.shape[1]), 1)
        is_own = at == step.j * len(blocks_of(step.spec.tiles.vocab)) + n
        tops[rows, :] = jnp.where(is_own, sums.maximum, tops[rows, :])


@dataclasses.dataclass(frozen=True)
class _Statistics:
    """Statistics alone: the pending block is consumed with the first matmuls, each other block with the next block's
    matmuls; the last block waits for the next tile."""

    step: _Step

    def of_tile(self, width: int, masked: bool) -> None:
        """The first ``width`` columns of the vocabulary tile."""
        self._over_rows(blocks_of(width), self.step.spec.tiles.vocab, flush=False)

    def flush(self) -> None:
        """The block that is still pending behind the last tile."""
        self._over_rows([slice(0, 0)], self.step.spec.tail_width, flush=True)

    def _over_rows(self, blocks: list[slice], width: int, flush: bool) -> None:
        """``width``: width of the previous tile."""
        out, spec = self.step.out, self.step.spec
        if out.maxima is not None:
            out.maxima[...] = jnp.full_like(out.maxima, NEG_INF)
        body = functools.partial(self.of_rows, blocks, spec.waiting(width), flush)
        over_parts(spec.tiles.tokens, 1, SUBLANES, body, TURN)

    def of_rows(self, blocks: list[slice], before: slice, flush: bool, part: Part) -> None:
        step, spec, rows = self.step, self.step.spec, part.rows
        sums, vocab, pending = step.read(rows), spec.tiles.vocab, step.scratch.pending
        x = [pending[rows, piece] for piece in pieces_of(slice(0, before.stop - before.start))]
        first, limit = before.start - vocab, spec.tail - before.start if flush and spec.tail % LANES else None
        for block in blocks:
            following: list[Array] = []
            pieces = pieces_of(block)

            def beside(n: int, pieces: list[slice] = pieces, count: int = len(x), out: Any = following) -> None:
                out += step.logits(rows, pieces[n * len(pieces) // count : (n + 1) * len(pieces) // count])

            found, _, _, s = step.take_in(rows, sums, x, first, limit, beside)
            # Nothing is pending at a row's first step, whatever stands there.
            sums = jax.tree.map(lambda new, old: jnp.where(step.j > 0, new, old), found, sums) if first < 0 else found
            if step.out.maxima is not None:
                self.put_maxima(rows, sums, s, 0 if flush else first - before.start + vocab)
            x, first, limit = following, block.start, None
        for place, piece in zip(pieces_of(slice(0, sum(piece.shape[1] for piece in x))), x, strict=True):
            pending[rows, place] = piece
        step.write(rows, sums)

    def put_maxima(self, rows: slice | pl.Slice, sums: RowSums, s: list[Array], at: int) -> None:
        """The block's maxima over these rows, from the step's column ``at`` on."""
        step, maxima = self.step, self.step.out.maxima
        top = times(factor(step.transform(rows)), sums.maximum)
        bound = jnp.maximum(step.number(rows, FLOOR), top + jnp.log(sums.total))
        for piece in s:
            place = slice(at, at + piece.shape[1])
            found = jnp.max(piece + (top - bound), axis=0, keepdims=True)
            maxima[0, :, place] = jnp.maximum(maxima[0, :, place], found)
            at = place.stop


def _block_of_half(spec: Spec, width: int) -> pl.BlockSpec:
    """A part of a token tile's rows of E on their way out. Until they are written the first part's place is held, and
    behind the last token the last part's."""
    size, last = spec.tiles.tokens // spec.leaving, pl.cdiv(spec.n * spec.leaving, spec.tiles.tokens) - 1

    def at(i: Index, j: Index, n_live: Ref) -> tuple[Index, Index]:
        return jnp.minimum(i * spec.leaving + jnp.maximum(j - spec.vocab_steps, 0), last), 0

    return pl.BlockSpec((size, width), at)


def _maxima_in_place(spec: Spec, found: Array) -> Array:
    """``[token tiles, vocab_size]`` from what the steps wrote: each tile the block that had waited, and its own but for
    the last; the step behind them the last of all."""
    vocab, last = spec.tiles.vocab, spec.waiting(spec.tail_width)
    first = spec.waiting(vocab)
    size = first.stop - first.start
    most = (spec.vocab_steps - 1) * vocab + last.start
    end = spec.vocab_steps * vocab
    return jnp.concatenate([found[:, size : size + most], found[:, end : end + spec.vocab_size - most]], axis=1)


def _outputs(k: Launch, direction: bool, room: int, halves: bool, maxima: bool) -> tuple[_Out, _Out, int]:
    """``(shapes, block specs, bytes written)`` of what :func:`forward_sweep` writes."""
    spec, x, tokens, passes = k.spec, k.operands, k.spec.tiles.tokens, k.spec.token_steps
    (n, width), spot = x.h.shape, compat.hbm_output
    width += k.rank

    # Dead tiles keep their own output block: on a chip with two cores another core may hold the last live one.
    def own(i: Index, j: Index, n_live: Ref) -> tuple[Index, Index]:
        return i, 0

    moved, struct = 4 * n * width * direction, jax.ShapeDtypeStruct
    shapes: dict[str, Any] = {"sums": struct((ROWS, passes * spec.lanes), jnp.float32)}
    blocks: dict[str, Any] = {"sums": pl.BlockSpec((ROWS, spec.lanes), lambda i, j, n_live: (0, i))}
    if direction and halves:
        shapes |= dict.fromkeys(("high", "rest"), spot((n, width), x.h.dtype, spec.interpret))
        blocks |= dict.fromkeys(("high", "rest"), _block_of_half(spec, width))
    elif direction:
        shapes["expected"] = spot((n, width), jnp.float32, spec.interpret)
        blocks["expected"] = pl.BlockSpec((tokens, width), own, pipeline_mode=pl.Buffered(1))
    if maxima:
        shapes["maxima"] = struct((passes, 1, (spec.vocab_steps + 1) * spec.tiles.vocab), jnp.float32)
        blocks["maxima"] = pl.BlockSpec((1, 1, spec.tiles.vocab), lambda i, j, n_live: (i, 0, j))
        moved += 4 * passes * spec.vocab_size
    if direction and spec.kept:
        plane = (spec.vocab, room) if spec.layout == "vh" else (room, spec.vocab)
        count = pl.cdiv(spec.vocab_size, spec.block)
        shapes |= dict(kept=spot(plane, x.weight.dtype, spec.interpret), tops=struct((n, count), jnp.float32))
        blocks |= dict(kept=block_of_step(spec), tops=pl.BlockSpec((tokens, count), own))
        moved += spec.kept * spec.vocab * x.weight.dtype.itemsize
    return _Out(**shapes), _Out(**blocks), moved


def forward_sweep(
    k: Launch, direction: bool, room: int = 0, halves: bool = False, maxima: bool = False
) -> tuple[RowSums, Array, Array | tuple[Array, Array] | None, Array | None, Kept | None]:
    """``(sums [N], raw target logit [N], E [N, H] or None, maxima [token tiles, vocab_size] or None, exponentials or
    None)``, E ``[N, H + R]`` with LoRA; what belongs to dead tiles is not written. ``maxima`` takes a ``FLOOR`` among
    the tokens' numbers; a direction with ``spec.kept`` tokens asks for exponentials, with room for ``room`` tokens.
    With ``halves`` E is two arrays if hidden states have 16 bits, its upper half and what that leaves."""
    x, tokens = k.operands, k.spec.tiles.tokens
    halves = direction and halves and x.h.dtype != jnp.float32
    spec = dataclasses.replace(k.spec, leaving=1 - direction if not halves else max(tokens // LANES, 1))
    k = dataclasses.replace(k, spec=spec)
    n, width = x.h.shape[0], x.h.shape[1] + k.rank
    shapes, blocks, written = _outputs(k, direction, room, halves, maxima)
    scratch: Any = _Scratch(
        RowSums(*[pltpu.VMEM((spec.lanes, 1), jnp.float32)] * 5),
        pltpu.VMEM((spec.lanes, ROWS), jnp.float32),
        pltpu.VMEM((tokens, width), jnp.float32) if halves else None,
        None if direction else pltpu.VMEM((tokens, spec.block), jnp.float32),
    )
    what = "direction" if direction else "maxima" if maxima else "stats"
    out = pl.pallas_call(
        functools.partial(_kernel, spec),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(spec.token_steps, spec.vocab_steps + spec.leaving),
            in_specs=[sweep_blocks(k)],
            out_specs=blocks,
            scratch_shapes=[scratch],
        ),
        out_shape=shapes,
        compiler_params=compiler_params(spec),
        cost_estimate=pl.CostEstimate(
            flops=(2 if direction else 1) * 2 * n * width * spec.vocab_size,
            transcendentals=n * spec.vocab_size,
            bytes_accessed=spec.token_steps * (x.weight.nbytes + outer_bytes(k)) + x.h.nbytes + written,
        ),
        name=f"head_{what}_t{tokens}_v{spec.tiles.vocab}",
        interpret=spec.interpret,
    )(k.n_live, x)
    sums = out.sums[:, :n]
    columns = None if out.maxima is None else _maxima_in_place(spec, out.maxima[:, 0])
    kept = None if out.kept is None else Kept(out.kept, out.tops[: spec.kept], sums[5, : spec.kept], spec.block)
    expected = (out.high, out.rest) if halves else out.expected
    return RowSums(*(sums[k] for k in range(5))), sums[5], expected, columns, kept
