"""Who computes what in the Hopper head kernel: tiles, and an equal share of them for every block of the GPU.

A deterministic rule from shapes; only the number of live token tiles is traced.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

COMPUTE = 2
"""Warpgroups of a block that multiply."""

_BLOCKS = 132  # streaming multiprocessors of an H100 or H200
_L2_BYTES = 20 << 20  # of hidden states that a group of token tiles may keep in L2


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Static sizes. A block's tile is ``2 rows x columns``; ``group`` token tiles sweep the vocabulary together."""

    rows: int = 64  # of a warpgroup
    columns: int = 256
    stages: int = 4  # of the ring
    group: int = 16
    blocks: int = _BLOCKS
    delay: int = 1  # wgmmas in flight when the step before releases its slot
    stagger: int = 0  # steps by which the second warpgroup starts later, so that epilogues meet matmuls

    @property
    def tokens(self) -> int:
        return COMPUTE * self.rows

    def runs(self, token_tiles: int, vocab_tiles: int) -> int:
        """The most runs a row is cut into, of equal length; one shorter one may follow."""
        return min(4 * (self.blocks // min(self.group, token_tiles)), self.blocks, vocab_tiles)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Who computes what: int32 ``[blocks, groups]``, and ``parts [token_tiles]``, the runs of a token tile.

    In each group a block takes ``count`` token tiles from ``token`` on, over the vocabulary tiles ``[first, last)``,
    and writes their sums as part ``slot``.
    """

    token: Any
    count: Any
    first: Any
    last: Any
    slot: Any
    parts: Any


def schedule(t: Tiles, token_tiles: int, vocab_tiles: int, live: Array | int) -> Schedule:
    """Equal work for every block, for ``live`` token tiles (traced).

    Groups of about ``t.group`` token tiles follow one another. In a group of ``g``, block ``b`` takes token tile
    ``b % g`` and run ``b // g`` of ``R = blocks // g``: the ``g`` blocks that share a run read the same ``W`` tiles at
    the same time. The ``E`` blocks left over take what the runs leave of the vocabulary, a tail as long as a run when
    summed over the token tiles a left-over block has.
    """
    xp: Any = np if isinstance(live, int) else jnp  # eager jnp would compile each operation
    groups = -(-token_tiles // t.group)
    live = xp.asarray(live, xp.int32)
    used = xp.maximum((live + t.group - 1) // t.group, 1)
    j, tile = xp.arange(groups, dtype=xp.int32), xp.arange(token_tiles, dtype=xp.int32)
    begin = xp.minimum(j * live // used, live)
    size = xp.where(j < used, xp.minimum((j + 1) * live // used, live) - begin, 0)
    g = xp.maximum(size, 1)
    runs = xp.minimum(t.blocks // g, t.runs(token_tiles, vocab_tiles))
    extra = xp.minimum(t.blocks - g * runs, g)
    each = xp.where(extra > 0, (g + extra - 1) // xp.maximum(extra, 1), 0)  # token tiles of a left-over block
    tail = xp.where(extra > 0, (vocab_tiles + runs * each // 2) // (1 + runs * each), 0)
    b = xp.arange(t.blocks, dtype=xp.int32)[:, None]
    run, e, rest = b // g, b - g * runs, vocab_tiles - tail
    main = run < runs
    count = xp.where(main, 1, xp.maximum(xp.minimum(each, g - e * each), 0))
    return Schedule(
        token=begin + xp.where(main, b % g, e * each),
        count=xp.where((size > 0) & (main | (tail > 0)), count, 0),
        first=xp.where(main, run * rest // runs, rest),
        last=xp.where(main, (run + 1) * rest // runs, vocab_tiles),
        slot=xp.where(main, run, runs),
        parts=(runs + (tail > 0))[xp.sum(tile[:, None] >= (begin + size)[:-1], axis=1)],
    )


def rounds(t: Tiles, token_tiles: int, vocab_tiles: int) -> int:
    """Tiles of the busiest block: what the time is proportional to."""
    s = schedule(t, token_tiles, vocab_tiles, token_tiles)
    return int((s.count * (s.last - s.first)).sum(1).max())


def tiles_for(n: int, h: int, vocab_size: int, itemsize: int = 2) -> Tiles:
    """The rule: 128 x 256 tiles, and the largest group whose hidden states stay in L2 that keeps the blocks busy."""
    t = Tiles()
    token_tiles, vocab_tiles = -(-n // t.tokens), -(-vocab_size // t.columns)
    t = dataclasses.replace(t, blocks=min(t.blocks, token_tiles * vocab_tiles))
    most = min(max(_L2_BYTES // (t.tokens * h * itemsize), 1), token_tiles, 32)
    most = -(-token_tiles // -(-token_tiles // most))  # groups are of equal size
    choices = [dataclasses.replace(t, group=g) for g in sorted({most, *(g for g in (1, 2, 4, 8, 16, 32) if g < most)})]
    cost = {c: rounds(c, token_tiles, vocab_tiles) for c in choices}
    return max((c for c in choices if cost[c] <= 1.01 * min(cost.values())), key=lambda c: c.group)


def tile_by_tile(t: Tiles, token_tiles: int, vocab_tiles: int) -> Schedule:
    """Every block takes a tile a round, for products of few columns, which runs would cut into unequal shares: a round
    is ``t.group`` token tiles times as many vocabulary tiles as there are blocks for. A tile's slot is its vocabulary
    tile's number."""
    group = min(t.group, token_tiles)
    tiles = [
        (token, v)
        for first in range(0, token_tiles, group)
        for v in range(vocab_tiles)
        for token in range(first, min(first + group, token_tiles))
    ]
    over = -len(tiles) % t.blocks
    token, v = np.array(tiles + [(0, 0)] * over, np.int32).reshape(-1, t.blocks, 2).transpose(2, 1, 0)
    count = np.ones_like(v)
    count[t.blocks - over :, -1] = 0
    return Schedule(token, count, v, v + 1, v, np.full((token_tiles,), vocab_tiles, np.int32))
