"""The TPU sweep of a sparse backward's hard rows: it writes dW, merges the rows of the active columns, makes dH.

    grid (vocabulary tile, token tile):   x^T = W h^T, dx as in ``dweight.py``, zero in the columns that are ready
                                          dW [vocab, H]  = ready rows + dx^T h      written once, in its final dtype
                                          dH [hidden, H] += dx W                    float32, in VMEM for the whole sweep

for a ``[V, H]`` head. Three matmuls (``6 N H V`` FLOP) for the tokens whose dH is made, which must fit into VMEM
(:func:`rows_beside`), two for the others. HBM: W once, dW once, hidden states once per vocabulary tile if they are more
than one token tile. Where the tokens that count fit into one, dW has no accumulator to go through: how many token tiles
there are is known on the device alone, and the grid has as many.

Without dW it is a sweep for dH alone, over all columns: two matmuls, W once.

A sparse backward has the rows of the active columns from its slabs (``sparse.py``). XLA's scatter would stream all of
dW once more to put them in place; this sweep writes every tile of it in any case. A tile therefore starts from its
ready rows instead of zeros, and adds nothing to them:

    one_hot rows            one_hot[v, s] = (slot s holds column v): a matmul of 2 vocab PART H FLOP a tile, and exact

Slots follow the order of their columns, so a tile's rows are adjacent: they are copied ``PART`` at a time, while the
previous tile is computed.

Storage: the end of an array with dW's shape and dtype, which dW overwrites. Slot ``s`` of ``S`` holds row ``V - S + s``
of the array, and the active columns fill the last slots. A waiting row never precedes its final
row: for the c-th of K columns at v, ``v <= V - K + c``. A tile is read before it is written, and whatever is written
before that lies in front of it.

Loops over parts of the tile (``tiles.py``), over columns of the vocabulary for dx and dW, then over columns of dH, keep
the program at a quarter.
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
from logitless.core.problem import Gradients, HeadGrads, Problem
from logitless.core.pytree import register, tree_of
from logitless.core.stats import StatCotangents, TokenStats
from logitless.head.pallas_tpu.dweight import ROWS, TARGET, coefficients, cotangent_of_logits
from logitless.head.pallas_tpu.operands import clear_dead, column_ids, dot, prepare, rounded
from logitless.head.pallas_tpu.tiles import (
    FIRST,
    LANES,
    Part,
    Spec,
    Tiles,
    choose,
    fill_rows,
    need,
    over_parts,
    tiles_of_live,
    zero_rows,
)

PART = 256
"""Slots at a time: as deep as a matrix unit."""

TURNS = 4
"""How much shorter the turns of a loop over parts of a tile are than those of the exact sweeps (``tiles.WORK``): a tile
of few tokens has less to do."""

_ALIGNED = 16
"""Rows of a bfloat16 array from one place where a copy may begin to the next."""


@register
@dataclasses.dataclass(frozen=True)
class Ready:
    """Rows of dW."""

    rows: Array  # [V or slots, H], in the dtype of dW; slot s is row `size - slots + s`
    index: Array  # [slots] int32: their columns, ascending at the end; beyond the vocabulary in unused slots
    count: Array  # () int32: number of used slots, counted from the end


def room_for(vocab: int, slots: int) -> int:
    """Rows of the array that ``slots`` rows of dW are collected in: dW's own, if copies may begin at their places."""
    return vocab if vocab % _ALIGNED == 0 else slots


def blank_rows(rows: int, width: int, dtype: DTypeLike, interpret: object) -> Array:
    """``[rows, width]`` in HBM that nobody has written to; NaN in the interpreter: an uninitialised read is visible."""
    if interpret:
        return jnp.full((rows, width), jnp.nan, dtype)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    shape = compat.hbm_output((rows, width), dtype, interpret)
    return pl.pallas_call(lambda out: None, out_specs=anywhere, out_shape=shape, name="head_blank")()


def parts_of(slots: int) -> int:
    """Slots that are copied at a time."""
    return PART if slots % PART == 0 else LANES


def schedule(ready: Ready, n_live: Array, tiles: int, tile: int) -> Array:
    """``[how many tokens count, the first slot of every tile of the vocabulary, and the last one's end]``."""
    slots = ready.index.size
    below, part = jnp.arange(1, tiles, dtype=jnp.int32) * tile, parts_of(slots)

    def count(k: Array, before: Array) -> Array:
        own = lax.dynamic_slice_in_dim(ready.index, k * part, part)
        used = k * part + jnp.arange(part) >= slots - ready.count
        return before + jnp.sum((own[None, :] < below[:, None]) & used[None, :], axis=1, dtype=jnp.int32)

    begin = (slots - ready.count) // part
    before = lax.fori_loop(begin, slots // part, count, jnp.zeros(below.shape, jnp.int32))
    first = (slots - ready.count).astype(jnp.int32)
    ends = jnp.full((1,), slots, jnp.int32)
    return jnp.concatenate([n_live, first[None], first + before, ends])


def slots_by_part(ready: Ready) -> Array:
    """``[parts, 1, slots of a part]``."""
    part = parts_of(ready.index.size)
    return ready.index.reshape(-1, 1, part)


def _placing_scratch(vocab: int, slots: Array, width: int, dtype: DTypeLike) -> list[Any]:
    """Two buffers of rows on their way in, their semaphores, and which columns of the tile are ready."""
    return [
        pltpu.VMEM((2, slots.shape[2], width), dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.VMEM((vocab, 1), jnp.float32),
    ]


@dataclasses.dataclass(frozen=True)
class Placing:
    """The ready rows of the tile at hand, inside a kernel; its grid is (vocabulary tile, token tile)."""

    vocab: int  # columns of a tile
    n_live: Ref  # what :func:`schedule` gave
    rows: Ref  # in HBM
    slots: Ref  # in VMEM
    buffer: Ref
    arrived: Ref
    is_ready: Ref  # [vocab, 1]

    def _span(self) -> tuple[Array, Array, Array]:
        """``(the first part that the tile has rows in, its first slot, its end)``."""
        j = pl.program_id(0)
        return self._first_part(j), self.n_live[1 + j], self.n_live[2 + j]

    def _first_part(self, tile: Index) -> Array:
        parts, _, part = self.slots.shape
        return jnp.minimum(self.n_live[1 + tile] // part, parts - 1)

    def _copy(self, k: Index, to: Index) -> Any:
        parts, _, part = self.slots.shape
        at = pl.multiple_of(self.rows.shape[0] - parts * part + k * part, _ALIGNED)
        return pltpu.make_async_copy(self.rows.at[pl.ds(at, part)], self.buffer.at[to], self.arrived.at[to])

    def _one_hot(self, k: Index, own: Part) -> Array:
        """``[columns of the part, slots of a part]`` bool."""
        part, (_, first, end) = self.slots.shape[2], self._span()
        slot = k * part + lax.broadcasted_iota(jnp.int32, (1, part), 1)
        column = jnp.where((slot >= first) & (slot < end), self.slots[k], -1)  # slots of other tiles match nothing
        own_first = pl.program_id(0) * self.vocab + own.first
        return lax.broadcasted_iota(jnp.int32, (own.size, part), 0) == column - own_first

    def _clear(self, k: Index) -> None:
        """Zeros for the rows of a part that are others', which may be anything."""
        at, (_, first, end) = pl.program_id(0) % 2, self._span()
        rows = self.buffer.at[at]

        def own(part: Part) -> Array:
            slot = k * self.slots.shape[2] + part.first + lax.broadcasted_iota(jnp.int32, (part.size, 1), 0)
            return jnp.where((slot >= first) & (slot < end), rows[part.rows, :], jnp.zeros((), rows.dtype))

        fill_rows(rows, own)

    def _placed(self, k: Index, own: Part) -> Array:
        rows = self.buffer[pl.program_id(0) % 2]
        return dot(self._one_hot(k, own).astype(jnp.float32).astype(rows.dtype), rows, (1, 0))

    def _over_more_parts(self, body: Callable[[Array], None]) -> None:
        here, _, end = self._span()
        lax.fori_loop(here + 1, tiles_of_live(end, self.slots.shape[2]), lambda k, _: body(k), None)

    def _over_columns(self, body: Callable[[Part], None]) -> None:
        over_parts(self.vocab, self.buffer.shape[1] * TURNS * self.slots.shape[2], LANES, body)

    def begin(self) -> None:
        """Before a tile's first step: its first rows are on their way, the next tile's as well."""
        j = pl.program_id(0)
        pl.when(j == 0)(lambda: self._copy(self._first_part(0), 0).start())
        pl.when(j + 1 < pl.num_programs(0))(lambda: self._copy(self._first_part(j + 1), (j + 1) % 2).start())

        def find(k: Index, own: Part) -> Array:
            return jnp.sum(jnp.where(self._one_hot(k, own), 1.0, 0.0), axis=1, keepdims=True)

        def begun(own: Part) -> None:
            self.is_ready[own.rows, :] = find(self._span()[0], own)

        def more(k: Index) -> None:
            def add(own: Part) -> None:
                self.is_ready[own.rows, :] += find(k, own)

            self._over_columns(add)

        self._over_columns(begun)
        self._over_more_parts(more)

    def arrive(self) -> None:
        """Wait for the rows of the tile's first part."""
        here = self._span()[0]
        self._copy(here, pl.program_id(0) % 2).wait()
        self._clear(here)

    def first(self, own: Part) -> Array:
        """``[columns of the part, H]`` float32: the rows that have arrived in their places, zeros elsewhere."""
        return self._placed(self._span()[0], own)

    def put_more(self, out: Ref) -> None:
        """The rows of further parts over the zeros in ``out [vocab, H]``."""
        at = pl.program_id(0) % 2

        def put(k: Index) -> None:
            self._copy(k, at).start()
            self._copy(k, at).wait()
            self._clear(k)

            def add(own: Part) -> None:
                out[own.rows, :] += self._placed(k, own).astype(out.dtype)

            self._over_columns(add)

        self._over_more_parts(put)


# -- the sweep -------------------------------------------------------------------------------------------------------


@register
@dataclasses.dataclass(frozen=True)
class _Read:
    """What the kernel reads: arrays, block specs, references. Numbers per token stand in a row."""

    scalars: Any  # [3] float32, in SMEM: temperature, softcap, scale
    h: Any  # [N, H]
    weight: Any  # [V, H]
    bias: Any  # [1, V] float32 or None
    token: Any  # [ROWS, N] float32: each token's coefficients
    rows: Any  # [V or slots, H]: ready
    slots: Any  # [parts, 1, slots of a part] int32: their columns


@register
@dataclasses.dataclass(frozen=True)
class _Scratch:
    """What the kernel keeps in VMEM."""

    weight: Any = None  # [vocab, H] float32: dW, if summed over several steps
    bias: Any = None  # [vocab, 1] float32
    d: Any = None  # [vocab, tokens]: the step's dlogits, for dW
    transposed: Any = None  # [tokens, vocab]: the same, for dH
    buffer: Any = None  # of Placing, with the next two
    arrived: Any = None
    is_ready: Any = None


def rows_beside(p: Problem, tokens: int) -> int:
    """Rows of dH, in whole token tiles of ``tokens``, that fit into VMEM during dW's sweep: they use the space of the
    larger token tile in the ordinary dW sweep."""
    width, item = p.h.shape[1], jnp.dtype(p.h.dtype).itemsize
    full = choose("dhead", FIRST["dhead"][0], (p.head.vocab, width), item, "vh", compat.tpu_vmem_bytes())
    large, small = (need("dhead", n, full.vocab, width, item, "vh") for n in (max(full.tokens, tokens), tokens))
    return (large - small) // (4 * width) // tokens * tokens


def _cotangent(spec: Spec, refs: _Read, scratch: _Scratch, end: Array, j: Index, part: Part) -> Array:
    """dx for a part of vocabulary tile ``j``, unrounded; zero in ready columns, and from ``end`` (the first padded
    column) on."""
    x = dot(refs.weight[part.rows, :], refs.h[...], (1, 1))
    if refs.bias is not None:
        # A bias stands along the lanes in HBM ([V, 1] would be stored 128 times larger).
        x = x + jnp.broadcast_to(refs.bias[:, part.rows], (8, part.size)).T[:, :1]
    x = rounded(spec, x)
    column = part.first + column_ids(x, 0)
    is_target = column == refs.token[TARGET : TARGET + 1, :].astype(jnp.int32) - j * spec.tiles.vocab
    d = cotangent_of_logits(spec, x, lambda k: refs.token[k : k + 1, :], is_target, refs.scalars)
    counts = column < end
    if scratch.is_ready is not None:
        counts = counts & (scratch.is_ready[part.rows, :] == 0)
    return jnp.where(counts, d, 0.0)


def _kernel(spec: Spec, n_live: Ref, refs: _Read, out: Gradients, scratch: _Scratch) -> None:
    vocab, tokens, width = spec.tiles.vocab, spec.tiles.tokens, refs.h.shape[1]
    j, i = pl.program_id(0), pl.program_id(1)
    end = spec.vocab_size - j * vocab  # real columns in the tile
    dw: Any = out.head.weight
    dh: Any = out.hidden
    dbias_out: Any = out.head.bias
    acc, dbias = dw if scratch.weight is None else scratch.weight, scratch.bias  # a float32 dW is its own accumulator
    placing: Any = None
    if refs.rows is not None:
        placing = Placing(vocab, n_live, refs.rows, refs.slots, scratch.buffer, scratch.arrived, scratch.is_ready)

    @pl.when(i == 0)
    def _() -> None:
        if placing is not None:
            placing.begin()
        if dbias is not None:
            dbias[...] = jnp.zeros_like(dbias)

    if dh is not None:
        pl.when((i == 0) & (j == 0))(lambda: zero_rows(dh))

        @pl.when((i == 0) & (end < vocab))
        def _() -> None:  # dH is a sum over the rows of this block, and 0 * NaN is NaN
            clear_dead(refs.weight, 0, end)

    taken, dead = spec.live(i, n_live) | (i == 0), spec.dead_rows(i, n_live)  # the first step puts rows in place
    if dead is not None:
        pl.when(taken & dead[0])(lambda: clear_dead(refs.h, 0, dead[1]))

    def cotangent(part: Part) -> None:
        d = _cotangent(spec, refs, scratch, end, j, part)
        if dbias is not None:
            dbias[part.rows, :] += jnp.sum(d, axis=1, keepdims=True)
        d = d.astype(refs.h.dtype)
        if scratch.d is not None:
            scratch.d[part.rows, :] = d
        if scratch.transposed is not None:
            scratch.transposed[:, part.rows] = d.T

    def hidden(part: Part) -> None:  # some of its columns
        rows = pl.ds(pl.multiple_of(i * tokens, tokens), tokens)
        dh[rows, part.rows] += dot(scratch.transposed[...], refs.weight[:, part.rows], (1, 0))

    def only(part: Part) -> None:
        """dW where the tile has one step: nothing to carry."""
        own = dot(scratch.d[part.rows, :], refs.h[...], (1, 0))
        dw[part.rows, :] = (own + placing.first(part)).astype(dw.dtype)

    def add(part: Part) -> None:
        own = dot(scratch.d[part.rows, :], refs.h[...], (1, 0))
        acc[part.rows, :] = jnp.where(i == 0, 0.0, acc[part.rows, :]) + own

    def put(part: Part) -> None:
        dw[part.rows, :] = (acc[part.rows, :] + placing.first(part)).astype(dw.dtype)

    def over_columns(body: Callable[[Part], None]) -> None:
        over_parts(vocab, TURNS * tokens * width, LANES, body)

    pl.when(taken)(lambda: over_columns(cotangent))
    if dh is not None:
        made = taken & (i * tokens < dh.shape[0])
        pl.when(made)(lambda: over_parts(width, TURNS * tokens * vocab, LANES, hidden))
    if placing is not None:
        last, alone = i == pl.num_programs(1) - 1, pl.num_programs(1) == 1
        if spec.token_steps > 1:
            pl.when(taken & ~alone)(lambda: over_columns(add))
        pl.when(last)(placing.arrive)  # as late as can be: they come behind the next tile of the head
        pl.when(alone)(lambda: over_columns(only))
        if spec.token_steps > 1:
            pl.when(last & ~alone)(lambda: over_columns(put))
        pl.when(last)(lambda: placing.put_more(dw))
    if dbias is not None:

        @pl.when(i == pl.num_programs(1) - 1)
        def _() -> None:
            dbias_out[...] = jnp.broadcast_to(dbias[...], (vocab, LANES)).T[:1, :]


def _blocks(spec: Spec, width: int, x: _Read) -> _Read:
    tokens, vocab = spec.tiles.tokens, spec.tiles.vocab

    def lanes(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((size, tokens), lambda j, i, n_live: (0, spec.readable(i, n_live)))

    return _Read(
        scalars=pl.BlockSpec(memory_space=pltpu.SMEM),
        h=pl.BlockSpec((tokens, width), lambda j, i, n_live: (spec.readable(i, n_live), 0)),
        weight=pl.BlockSpec((vocab, width), lambda j, i, n_live: (j, 0)),
        bias=None if x.bias is None else pl.BlockSpec((1, vocab), lambda j, i, n_live: (0, j)),
        token=lanes(ROWS),
        rows=None if x.rows is None else pl.BlockSpec(memory_space=pl.ANY),
        slots=None if x.slots is None else pl.BlockSpec(memory_space=pltpu.VMEM),
    )


def _buffers(spec: Spec, read: _Read, rows: Array | None, hidden: int) -> tuple[Any, Any, Any]:
    """``(shapes, block specs, scratch)``: dW and dbias with ``rows`` that are ready, dH of ``hidden`` tokens."""
    (tokens, vocab), width, item = (spec.tiles.tokens, spec.tiles.vocab), read.h.shape[1], read.h.dtype
    shapes: Any = HeadGrads(None, None)
    blocks: Any = HeadGrads(None, None)
    scratch: dict[str, Any] = {}
    dh: tuple[Any, Any] = None, None
    if hidden:
        size = pl.cdiv(hidden, tokens) * tokens, width
        once = pl.BlockSpec(size, lambda j, i, n_live: (0, 0), pipeline_mode=pl.Buffered(1))
        dh = jax.ShapeDtypeStruct(size, jnp.float32), once
        scratch["transposed"] = pltpu.VMEM((tokens, vocab), item)
    if rows is not None:
        own, has_bias = _blocks(spec, width, read), read.bias is not None
        dbias = jax.ShapeDtypeStruct((1, spec.vocab), jnp.float32) if has_bias else None
        shapes = tree_of(HeadGrads, compat.hbm_output((spec.vocab, width), rows.dtype, spec.interpret), dbias)
        blocks = HeadGrads(own.weight, own.bias)
        buffer, arrived, is_ready = _placing_scratch(vocab, read.slots, width, rows.dtype)
        # A float32 dW is its own accumulator; a tile that takes a single step needs none.
        carried = spec.token_steps > 1 and rows.dtype != jnp.float32
        scratch |= dict(
            weight=pltpu.VMEM((vocab, width), jnp.float32) if carried else None,
            bias=pltpu.VMEM((vocab, 1), jnp.float32) if has_bias else None,
            d=pltpu.VMEM((vocab, tokens), item), buffer=buffer, arrived=arrived, is_ready=is_ready,
        )  # fmt: skip
    return Gradients(dh[0], shapes), Gradients(dh[1], blocks), _Scratch(**scratch)


def hard_sweep(
    p: Problem,
    n_live: Array | int | None,
    stats: TokenStats,
    g: StatCotangents,
    known: Ready | None,
    tiles: Tiles,
    hidden: int = 0,
) -> Gradients:
    """dW of a ``[V, H]`` head in the dtype of its ``known`` rows, which are put in their places; the other rows, and
    dbias ``[V]`` float32 outside of those columns, are what the exact kernels make of the first ``n_live`` tokens
    (``None``: of all). With dH ``[hidden, H]`` float32 of the first ``hidden`` tokens over the same other columns.
    Without ``known`` rows that dH alone, over all columns."""
    k = prepare("dhead", p, n_live, tiles)
    spec, x, tokens, (n, width) = k.spec, k.operands, k.spec.tiles.tokens, p.h.shape
    passes, times = pl.cdiv(spec.vocab, spec.tiles.vocab), 1 + (known is not None)
    steps: Index = (
        spec.token_steps if spec.all_live else jnp.clip(tiles_of_live(k.n_live[0], tokens), 1, spec.token_steps)
    )
    read = _Read(
        scalars=x.scalars,
        h=x.h,
        weight=x.weight,
        bias=x.bias,
        token=coefficients(p, k.live, stats, g, spec.token_steps * tokens),
        rows=None if known is None else compat.in_hbm(known.rows, spec.interpret),
        slots=None if known is None else slots_by_part(known),
    )
    shapes, blocks, scratch = _buffers(spec, read, None if known is None else known.rows, hidden)
    count, in_place = k.n_live, {}
    if known is not None:
        count = schedule(known, k.n_live, passes, spec.tiles.vocab)
        # The interpreter has no room for the end of a ragged block in an array that it is given.
        if known.rows.shape[0] == spec.vocab and not (spec.interpret and spec.vocab % spec.tiles.vocab):
            at = next(i for i, leaf in enumerate(jax.tree.leaves(read)) if leaf is read.rows)
            in_place = {1 + at: int(hidden > 0)}  # of the outputs dH comes first
    out = pl.pallas_call(
        functools.partial(_kernel, spec),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(passes, steps),
            in_specs=[_blocks(spec, width, read)],
            out_specs=blocks,
            scratch_shapes=[scratch],
        ),
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=tiles.vmem_limit
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * (n * times + hidden) * width * spec.vocab_size,
            transcendentals=n * spec.vocab_size,
            bytes_accessed=x.weight.nbytes * times + passes * x.h.nbytes,
        ),
        input_output_aliases=in_place,
        name=f"head_{'hard' if known is not None else 'more'}_t{tokens}_v{spec.tiles.vocab}",
        interpret=spec.interpret,
    )(count, read)
    dh, bias = out.hidden, out.head.bias
    if dh is not None:
        dh = jnp.where((k.live & g.any_nonzero())[:hidden, None], dh[:hidden], 0.0)
    return Gradients(dh, HeadGrads(out.head.weight, None if bias is None else bias[0]))
