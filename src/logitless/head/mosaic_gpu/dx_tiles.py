"""Layout of dx in the sparse backward on a Hopper GPU: each tile of 128 tokens and 256 columns has a slot.

A slot is 128 rows of an array ``[rows, 256]``, which may be any memory that is free, dW's own before it is written. The
tiles of a row are adjacent, ``across`` slots; dx with few columns needs little memory, at any offset, and a single
kernel serves every size. Whoever reads or writes dx asks for a piece that lies within a tile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from logitless.core.compat import Index
from logitless.head.mosaic_gpu.kernels.schedule import Tiles

TOKENS, COLUMNS = Tiles().tokens, Tiles().columns
"""Of a tile."""


@dataclasses.dataclass(frozen=True)
class Slots:
    """dx, or room for it."""

    array: Any  # [rows, 256], or a reference to it
    first: Index  # the slot of the first tile
    across: Any  # slots per row of tiles

    def at(self, row: Index, rows: int, column: Index, columns: int) -> Any:
        """A kernel's reference to so many rows and columns from there on."""
        slot = self.first + lax.div(row, jnp.int32(TOKENS)) * self.across + lax.div(column, jnp.int32(COLUMNS))
        inside = lax.rem(row, jnp.int32(TOKENS)), lax.rem(column, jnp.int32(COLUMNS))
        return self.array.at[pl.ds(slot * TOKENS + inside[0], rows), pl.ds(inside[1], columns)]

    def numbers(self) -> tuple[Index, Index]:
        return self.first, self.across

    def of(self, array: Array) -> Slots:
        """The same places of another array."""
        return dataclasses.replace(self, array=array)

    def tiles(self, rows: int, columns: int) -> Array:
        """``[row tiles, column tiles, 128, 256]``; undefined in missing columns."""
        row, column = jnp.arange(rows, dtype=jnp.int32)[:, None], jnp.arange(columns, dtype=jnp.int32)
        slot = self.first + row * self.across + jnp.minimum(column, self.across - 1)
        at = slot[:, :, None] * TOKENS + jnp.arange(TOKENS, dtype=jnp.int32)
        return self.array.at[at].get(mode="clip")


def count(size: int) -> int:
    """How many slots so many numbers have room for."""
    return size // (TOKENS * COLUMNS)


def tile_count(size: Any, tile: int) -> Any:
    """Number of tiles for ``size`` tokens or columns."""
    return (size + (tile - 1)) // tile
