"""Where dx stands in the sparse backward on a Hopper GPU: each tile of 128 tokens and 256 columns in a slot of its own.

A slot is 128 rows of an array ``[rows, 256]``, which may be any memory that is free, dW's own before it is written. The
tiles of a row of them lie side by side, ``across`` slots; so a dx of few columns takes little room, wherever it begins,
and one kernel serves dx of every size. Whoever reads or writes dx asks for a piece that lies within a tile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from logitless.head.mosaic_gpu.kernels.schedule import Tiles

TOKENS, COLUMNS = Tiles().tokens, Tiles().columns
"""Of a tile."""


@dataclasses.dataclass(frozen=True)
class Slots:
    """dx, or room for it."""

    array: Any  # [rows, 256], or a reference to it
    first: Any  # the slot of the first tile
    across: Any  # slots of a row of tiles

    def at(self, row: Any, rows: int, column: Any, columns: int) -> Any:
        """A kernel's reference to so many rows and columns from there on."""
        slot = self.first + lax.div(row, jnp.int32(TOKENS)) * self.across + lax.div(column, jnp.int32(COLUMNS))
        inside = lax.rem(row, jnp.int32(TOKENS)), lax.rem(column, jnp.int32(COLUMNS))
        return self.array.at[pl.ds(slot * TOKENS + inside[0], rows), pl.ds(inside[1], columns)]

    def numbers(self) -> tuple[Any, Any]:
        return self.first, self.across

    def of(self, array: Array) -> Slots:
        """The same places of another array."""
        return dataclasses.replace(self, array=array)

    def tiles(self, rows: int, columns: int) -> Array:
        """``[row tiles, column tiles, 128, 256]``; anything in columns that there are not."""
        row, column = jnp.arange(rows, dtype=jnp.int32)[:, None], jnp.arange(columns, dtype=jnp.int32)
        slot = self.first + row * self.across + jnp.minimum(column, self.across - 1)
        at = slot[:, :, None] * TOKENS + jnp.arange(TOKENS, dtype=jnp.int32)
        return self.array.at[at].get(mode="clip")


def count(size: int) -> int:
    """How many slots so many numbers have room for."""
    return size // (TOKENS * COLUMNS)


def tile_count(size: Any, tile: int) -> Any:
    """Tiles that so many tokens or columns take."""
    return (size + (tile - 1)) // tile
