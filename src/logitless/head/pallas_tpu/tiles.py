"""What a fused-head TPU kernel is specialised to, first of all its tiles: a deterministic rule from shapes, dtype,
layout and the chip's VMEM.

A grid step works on a tile of tokens and a tile of the vocabulary, over the whole hidden size, against a float32
accumulator of hidden-size rows. The rule starts from ``FIRST`` and halves the longer side, tokens in a tie, until
:func:`need` fits into ``VMEM_SHARE`` of the chip's VMEM. 1024 tokens already read the head only N / 1024 times, a
quarter of the time that the matmuls take; a wide vocabulary tile touches the running sums and the accumulator less
often (at H = 4096, against 1024: statistics 5 % faster, with the direction 1 %; estimates).

At H = 4096 in bfloat16 that is 1024 x 2048 on v5e and v6e with 128 MiB (dhead: 1024 x 1024, for [H, V] 512 x 1024),
and with 64 MiB (v5p) 512 x 1024 (dhead: 512 x 512).

The vocabulary tile fixes the order of every sum over the vocabulary, so it depends on H, V, dtype and chip, not on the
number of tokens: statistics of a token are the same bits whatever it is batched with.

Loops over parts of a tile (:func:`over_parts`) keep a kernel's program small. A matmul on whole tiles is compiled into
straight-line code, an instruction word a cycle: 7 MB for the forward sweep with tiles of 1024 x 2048 at H = 4096, and
the compiler's time goes with it. The rows of a tile (tokens in a sweep over the vocabulary, columns of a ``[V, H]``
head in dW's) do not know of each other, so that a loop does the same work with the code of one part. Every turn fills
and drains the matrix unit, 300 to 400 cycles on a v6e (the simulator's estimate), so a turn has ``WORK`` to do, about
8,000 cycles; small hidden sizes need no loop. A part shorter than the matrix unit is wide would halve its speed: each
tile of the other operand is loaded for the part alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from logitless.core.compat import Index, Ref
from logitless.core.stats import LogitTransform

Kernel = Literal["forward", "dhidden", "dhead"]

MIB = 1 << 20
LANES = 128
FIRST = {"forward": (1024, 2048), "dhidden": (1024, 2048), "dhead": (1024, 1024)}
"""Tokens and columns."""
LEAST_LIMIT = 16 * MIB
"""What every chip grants without being asked."""
VMEM_SHARE, VMEM_MOST, SLACK = 0.85, 0.88, 1.1
"""Tiles are chosen to need 0.85 of a core's VMEM at most; the compiler is granted 1.1 times the need, and at most 0.88
of the VMEM: its spilled registers (18 MiB were seen) and small operands do not count against the grant."""
FLOAT32_SHARE = 0.85
"""Share for float32: full-precision matmuls spill more."""
SUBLANES = 16
"""Rows of which references are cut: a tile's of 16-bit elements in VMEM."""
LEAST = 256
"""Rows of a part, at least: as many as the matrix unit of a v6e is wide."""
WORK = 1 << 31
"""Multiplications of a part, at least."""
TURN = 512
"""Approximate upper bound of rows per part in the forward sweep: a part holds logits of two blocks, and 1,024 rows may
leave no VMEM for registers (seen at a hidden size of 2304)."""
BLOCK = 1024
"""Columns of a vocabulary tile whose exponentials are relative to one maximum in the forward sweep."""
PIECE = 256
"""Columns of a matmul of that sweep: as many as the matrix unit of a v6e is wide."""
DEPTH = 512
"""Columns per matmul of exponentials with head rows: at 1,024 columns sums of four products wait in VMEM, and a turn of
256 rows keeps the matrix unit 90 % busy instead of 99 %."""
_FILLED = 64
"""Rows at a time of what is written without a matmul."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes of a grid step: rows of hidden states, and vocabulary columns."""

    tokens: int
    vocab: int
    vmem_limit: int
    """Bytes to ask of the compiler: hardly more than the need, since it is taken from everything else."""


def need(
    kernel: Kernel, tokens: int, vocab: int, hidden: int, itemsize: int, layout: str, keeping: bool = False
) -> int:
    """VMEM bytes of a kernel's blocks, scratch and temporaries; compilers settled for 0.88 to 1.04 of it.

    ``keeping``: exponentials leave the forward sweep, or enter that of dW, in a double-buffered block
    (``kept_exponentials.py``).
    """
    h, w = tokens * hidden * itemsize, vocab * hidden * itemsize
    plane = tokens * vocab * (4 + 4 + itemsize)  # logits, a temporary, rounded probabilities or dlogits
    rows = tokens * LANES * 4 * 10  # per-token columns occupy whole lanes
    plane += 2 * tokens * vocab * itemsize if keeping else 0
    if itemsize == 4:
        plane += 2 * h + 3 * w + plane // 2  # a float32 matmul works on bfloat16 parts of its operands
    if kernel == "dhead":
        # Double-buffered hidden states (and their transpose), W and dW; the accumulator and what is added to it.
        return (2 if layout == "vh" else 4) * h + 4 * w + 2 * vocab * hidden * 4 + plane + rows
    # Hidden states once, W double-buffered, the accumulator and what is added to it.
    return h + 2 * w + 2 * tokens * hidden * 4 + plane + rows


def whole_lanes(size: int) -> int:
    """``size`` rounded up to whole lanes."""
    return -(-size // LANES) * LANES


def _fit(size: int, tile: int) -> int:
    """``tile`` for an axis of ``size``: whole lanes, or the whole axis where it is shorter than that."""
    return size if size <= LANES else min(tile, size // LANES * LANES)


def choose(
    kernel: Kernel, n: int, head: tuple[int, int], itemsize: int, layout: str, vmem: int, keeping: bool = False
) -> Tiles:
    """Tiles for ``n`` tokens and a head of ``(columns, hidden size)``. The vocabulary tile is the same for every ``n``,
    and with and without ``keeping``."""
    (tokens, columns), (vocab, hidden) = FIRST[kernel], head
    budget = int(vmem * VMEM_SHARE * (1.0 if itemsize == 2 else FLOAT32_SHARE))
    while need(kernel, tokens, columns, hidden, itemsize, layout) > budget:
        if tokens == columns == LANES:
            least = need(kernel, tokens, columns, hidden, itemsize, layout)
            raise NotImplementedError(
                f"pallas_tpu: with a hidden size of {hidden} and {itemsize}-byte elements the {kernel} kernel needs "
                f"{least / MIB:.0f} MiB of VMEM at its smallest tile; this chip offers {budget / MIB:.0f}."
            )
        if columns > tokens:
            columns //= 2
        else:
            tokens //= 2
    while keeping and tokens > LANES and need(kernel, tokens, columns, hidden, itemsize, layout, True) > budget:
        tokens //= 2
    limit = min(int(SLACK * need(kernel, tokens, columns, hidden, itemsize, layout, keeping)), int(VMEM_MOST * vmem))
    return Tiles(_fit(n, tokens), _fit(vocab, columns), max(limit, LEAST_LIMIT))


@dataclasses.dataclass(frozen=True)
class Spec:
    """Static facts that the kernels are specialised to."""

    layout: str  # "vh" | "hv"
    n: int  # tokens
    vocab: int  # columns of the head, padding included
    vocab_size: int
    tiles: Tiles
    logits_dtype: Any
    has_temperature: bool
    per_token_temperature: bool
    has_softcap: bool
    has_scale: bool
    all_live: bool  # the number of live tokens is not a traced one: no step is conditional on it
    interpret: Any
    leaving: int = 0  # of the forward sweep: steps behind the vocabulary's in which a token tile's E leaves in halves
    kept: int = 0  # tokens, whole tiles of them, whose exponentials the forward sweep keeps for dW's
    spare: bool = False  # of the forward sweep: the array of exponentials has a token tile more than are kept
    kept_tile: int = 0  # for dW: columns per tile in the keeping sweep

    @property
    def axis(self) -> int:
        """The dimension of the head along which the vocabulary runs."""
        return 0 if self.layout == "vh" else 1

    @property
    def lanes(self) -> int:
        """A token tile along the lanes, whole ones."""
        return whole_lanes(self.tiles.tokens)

    @property
    def token_steps(self) -> int:
        """Token tiles, dead ones included."""
        return pl.cdiv(self.n, self.tiles.tokens)

    @property
    def block(self) -> int:
        """Vocabulary columns per shared maximum."""
        return blocks_of(self.tiles.vocab)[0].stop

    @property
    def kept_steps(self) -> int:
        """Token tiles whose exponentials are kept."""
        return self.kept // self.tiles.tokens

    @property
    def vocab_steps(self) -> int:
        """Steps of a sweep over the columns below ``vocab_size``."""
        return pl.cdiv(self.vocab_size, self.tiles.vocab)

    @property
    def tail(self) -> int:
        """Columns of the last step, between 1 and the tile."""
        return self.vocab_size - (self.vocab_steps - 1) * self.tiles.vocab

    @property
    def tail_width(self) -> int:
        """``tail`` in whole lanes."""
        return min(pl.cdiv(self.tail, LANES) * LANES, self.tiles.vocab)

    def waiting(self, width: int) -> slice:
        """The last block of the first ``width`` columns of a tile."""
        return blocks_of(width)[-1]

    def live(self, tile: Index, n_live: Ref) -> Array | bool:
        """Whether a token tile has a live token."""
        return True if self.all_live else tile * self.tiles.tokens < n_live[0]

    def dead_rows(self, tile: Index, n_live: Ref) -> tuple[Array | bool, Index] | None:
        """``(whether a token tile has rows that do not count, how many rows do)``; ``None`` where no tile has any."""
        if self.all_live and self.n % self.tiles.tokens == 0:
            return None
        count = self.n if self.all_live else n_live[0]
        return (tile + 1) * self.tiles.tokens > count, count - tile * self.tiles.tokens

    def readable(self, tile: Index, n_live: Ref) -> Index:
        """The token tile to read at ``tile``: a dead tile repeats the last live tile and fetches nothing."""
        if self.all_live:
            return tile
        return jnp.minimum(tile, jnp.maximum(tiles_of_live(n_live[0], self.tiles.tokens) - 1, 0))

    def transform(self, scalars: Ref, temperature: Array | None) -> LogitTransform:
        """The transform inside a kernel: scalars from SMEM, a per-token temperature as a column or row."""
        t = temperature if self.per_token_temperature else scalars[0] if self.has_temperature else None
        return LogitTransform(
            temperature=t,
            softcap=scalars[1] if self.has_softcap else None,
            scale=scalars[2] if self.has_scale else None,
        )


# -- inside a kernel ---------------------------------------------------------------------------------------------------


def tiles_of_live(count: Array, size: int) -> Array:
    """Number of tiles of ``size`` tokens that hold the first ``count``, int32 under ``jax_enable_x64`` too."""
    return lax.div(count + np.int32(size - 1), np.int32(size))


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows of a tile."""

    first: Index
    size: int

    @property
    def rows(self) -> pl.Slice:
        """Their place, as an index of a reference."""
        return pl.ds(self.first, self.size)


def _cut(first: int, end: int, size: int) -> list[slice]:
    """``first`` to ``end`` in slices of ``size``, the last one shorter."""
    return [slice(at, min(at + size, end)) for at in range(first, end, size)]


def blocks_of(width: int) -> list[slice]:
    """The first ``width`` columns of a tile in blocks, each with exponentials relative to one maximum."""
    return _cut(0, width, BLOCK)


def pieces_of(block: slice) -> list[slice]:
    """A block, split into matmul-sized pieces."""
    return _cut(block.start, block.stop, PIECE)


def depths_of(block: slice) -> list[slice]:
    """A block in parts, each of one matmul into the accumulator of hidden-size rows."""
    return _cut(block.start, block.stop, DEPTH)


def parts_of(rows: int, unit: int, least: int) -> int:
    """Into how many equal parts ``rows`` are cut: as many as leave ``least`` rows each, and whole ``unit``."""
    return next(n for n in range(max(rows // least, 1), 0, -1) if n == 1 or rows % (n * unit) == 0)


def over_parts(rows: int, work: int, unit: int, body: Callable[[Part], None], most: int | None = None) -> None:
    """``body`` for each part of ``rows``, of ``work`` multiplications each; a part is of whole ``unit``, or all, and
    has hardly more rows than ``most``."""
    least = max(LEAST, -(-WORK // work))
    _loop(rows, parts_of(rows, unit, least if most is None else min(least, most)), body)


def over_lanes(size: int, body: Callable[[Part], None]) -> None:
    """``body`` for each whole group of lanes."""
    _loop(size, size // LANES, body)


def turn_around(rows: Ref, columns: Ref) -> None:
    """``[ROWS, whole lanes]`` to ``[whole lanes, ROWS]``."""

    def turn(part: Part) -> None:
        columns[part.rows, :] = rows[:, part.rows].T

    over_lanes(columns.shape[0], turn)


def fill_rows(ref: Ref, value: Callable[[Part], Array], least: int = _FILLED) -> None:
    """Write all rows of a two-dimensional reference, a part of about ``least`` rows at a time."""

    def fill(part: Part) -> None:
        ref[part.rows, :] = value(part)

    _loop(ref.shape[0], parts_of(ref.shape[0], SUBLANES, least), fill)


def zero_rows(ref: Ref) -> None:
    """Zeros in a two-dimensional reference."""
    fill_rows(ref, lambda part: jnp.zeros((part.size, ref.shape[1]), ref.dtype))


def _loop(rows: int, parts: int, body: Callable[[Part], None]) -> None:
    size = rows // parts
    if parts == 1:
        body(Part(0, rows))
    else:
        lax.fori_loop(0, parts, lambda t, _: body(Part(pl.multiple_of(t * size, size), size)), None)
