"""What the Hopper head kernel does with a tile of raw logits while it is still in the accumulator's registers.

A warpgroup holds ``acc [M, tile_n]`` float32 with the columns of a row spread over four threads. Sums are carried per
row. Per element: a maximum, a difference, a product, a power and three multiply-adds; per row and tile four exchanges
between its threads. Operations are as wide as the tile: the time that a kernel takes to compile grows faster than
their number.

    m = max u    t = k (u - m)    e = 2^t    S = sum e    A = sum e t    Q = sum e^2

``u`` and ``k`` are those of ``logitless.core.stats``, ``k`` times log2(e). The columns that take no part (the
target, those beyond the vocabulary) are masked only in the tiles that hold one, which the caller knows.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from logitless.core import stats as st
from logitless.core import stats as tr
from logitless.core.stats import NEG_INF, LogitTransform, RowSums

LANES = 8  # columns of the smallest accumulator tile: the bits of a row are as many words
PIECE = 32  # columns whose bits are made at a time: fewer are more operations to compile, more take more shifts
LOG2E = 1.4426950408889634
LOW = -1e30  # stands for -inf: differences stay finite, and 2^(k (LOW - m)) is 0
FIELDS = 5  # maximum, total, centred, squares, target: stats.RowSums


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums for a run of tiles, ``[M]`` float32 each: the swept maximum, S, A in units of ln 2, Q, and the target's
    ``u`` (0 if not seen). A row of which nothing was seen has the maximum ``LOW``."""

    m: Array
    total: Array
    centred: Array
    squares: Array
    target: Array

    @staticmethod
    def empty(rows: int) -> Sums:
        def full(value: float) -> Array:
            return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))

        zero = full(0.0)
        return Sums(full(LOW), zero, zero, zero, zero)

    def leaves(self) -> tuple[Array, ...]:
        return (self.m, self.total, self.centred, self.squares, self.target)


def across(row: Array, columns: int) -> Array:
    """``row [M]`` along the columns of ``[M, columns]``."""
    return lax.broadcast_in_dim(row, (row.shape[0], columns), (0,))


def masked(u: Array, first: Array, target: Array, vocab_size: int) -> tuple[Array, Array]:
    """``u [M, C]``, columns ``first, first + 1, ...``, with ``LOW`` where one takes no part; the targets' ``u [M]``.

    ``target [M]`` are columns; one outside the vocabulary is found nowhere.
    """
    rows, columns = u.shape
    column = plgpu.broadcasted_iota(jnp.int32, (rows, columns), 1, layout=plgpu.Layout.WGMMA)
    is_target = column == across(target - first, columns)
    found = jnp.sum(jnp.where(is_target, u, jnp.zeros_like(u)), axis=1)
    low = jnp.full_like(u, LOW)
    return jnp.where(column < vocab_size - first, jnp.where(is_target, low, u), low), found


def accumulate(sums: Sums, u: Array, found: Array, k: Array) -> Sums:
    """``sums`` with the columns of ``u [M, C]`` added; ``k`` is ``[M]`` or a number."""
    columns = u.shape[1]
    m = jnp.maximum(sums.m, jnp.max(u, axis=1))
    step = (sums.m - m) * k
    a = jnp.exp2(step)
    # Not u k - m k: a product rounded at |m| = 1e4 would be wrong by 1e-3.
    t = (u - across(m, columns)) * (across(k, columns) if k.ndim else k)
    e = jnp.exp2(t)
    return Sums(
        m,
        a * sums.total + jnp.sum(e, axis=1),
        a * (sums.centred + step * sums.total) + jnp.sum(e * t, axis=1),
        a * a * sums.squares + jnp.sum(e * e, axis=1),
        sums.target + found,
    )


def above(u: Array, screen: Array) -> Array:
    """int32 ``[M, 8]``: for each lane a bit per column, set where ``u > screen [M]``; :func:`bit_of` says which.

    The sign of a difference, shifted in: per element a subtraction and a shift, and no exchange between threads.
    """
    width = min(PIECE, u.shape[1])
    parts = [u[:, i : i + width] for i in range(0, u.shape[1], width)]
    limit, word = across(screen, width), None
    for x in parts:
        passes = lax.bitcast_convert_type(limit - x, jnp.int32)
        bit = lax.shift_right_logical(passes, jnp.full_like(passes, 31))
        word = bit if word is None else lax.shift_left(word, jnp.full_like(word, 1)) | bit
    assert word is not None
    while word.shape[1] > LANES:  # one half onto the other
        half = word.shape[1] // 2
        first, second = word[:, :half], word[:, half:]
        # A lane has so many columns of a half, each with a bit for every piece.
        word = lax.shift_left(first, jnp.full_like(first, half // LANES * len(parts))) | second
    return word


def bit_of(column: Array, columns: int) -> Array:
    """The bit in :func:`above` for a column, in tiles with this many columns."""
    width = min(PIECE, columns)
    parts = columns // width
    return columns // LANES - 1 - (column % width // LANES * parts + column // width)


def merged(sums: Array, parts: Array, tokens: int, transform: LogitTransform) -> RowSums:
    """``stats.RowSums [padded N]`` from what the kernel wrote: ``[5, slots, padded N]``, of :class:`Sums`.

    Only the first ``parts [token tiles]`` slots of a tile of ``tokens`` tokens are read.
    """
    slots, padded = sums.shape[1:]
    k = tr.factor(transform.rows(lambda t: jnp.pad(t, (0, padded - t.shape[0]), constant_values=1.0)))
    m, total, centred, squares, target = sums
    written = jnp.arange(slots)[:, None] < jnp.broadcast_to(parts[:, None], (parts.size, tokens)).reshape(padded)
    seen = written & ~(m <= LOW)  # a NaN is seen

    def kept(x: Array, otherwise: float) -> Array:
        return jnp.where(seen, x, otherwise)

    whole = RowSums(
        maximum=kept(m, NEG_INF),
        total=kept(total, 0.0),
        centred=kept(centred * (1.0 / LOG2E), 0.0),
        squares=kept(squares, 0.0),
        target=jnp.where(written, target, 0.0),
    )
    whole = st.rescale(whole, jnp.max(whole.maximum, axis=0), k)
    x = jnp.stack([whole.total, whole.centred, whole.squares, whole.target])
    while slots > 1:  # pairwise, and so in one order: the same bits in every program
        half = slots // 2
        x = jnp.concatenate([x[:, :half] + x[:, half : 2 * half], x[:, 2 * half :]], axis=1)
        slots -= half
    return RowSums(whole.maximum, *x[:, 0])
