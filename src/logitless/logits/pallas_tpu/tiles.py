"""How logits ``[N, V]`` are cut into blocks for the TPU kernels: a rule of V, N, the dtype and the chip's VMEM.

A block is ``rows x width``. Rows come in groups of one native tile (16 rows of bfloat16, 8 of float32); the kernels
work on one group at a time, with its ``width`` columns as float32 in a VMEM scratch. Where two input blocks, two output
blocks and the scratch fit :func:`budget`, the block is as wide as the vocabulary (up to 280,000 columns of bfloat16,
with the 16 MiB of v4 up to 65,536), a row is read from HBM once, and small vocabularies get several groups a block.
Otherwise the width is at most ``NARROW`` and rows are swept twice. All chips from v5e on get the same blocks.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from logitless.core import compat

LANES = 128

VMEM_BUDGET = 52 << 20
"""Most bytes of VMEM for blocks and scratch: v5p and v7x have 64 MiB, v5e and v6e 128."""

VMEM_SLACK = 4 << 20
"""Added to the blocks' own bytes for the compiler's spills and the per-row columns."""

NARROW = 65536
"""Columns of a block where a whole row does not fit."""

BLOCK_BYTES = 2 << 20
"""Small vocabularies get groups until a block has this size: a grid step costs about 0.35 microseconds."""

MAX_GROUPS = 16

_GROUP = {"float32": 8, "bfloat16": 16}


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A block's shape. Columns past V, in the last tile, are read as garbage and masked; they are never written."""

    group: int  # rows that are worked on together
    groups: int  # groups in a block
    width: int  # columns per block, a multiple of 128
    tiles: int  # blocks across the vocabulary

    @property
    def rows(self) -> int:
        return self.group * self.groups


def check(n: int, v: int, dtype: DTypeLike) -> None:
    """Raise ``NotImplementedError`` with the reason where these kernels cannot run."""
    name = jnp.dtype(dtype).name
    if name not in _GROUP:
        why = "Mosaic lowers no float16" if name == "float16" else f"it takes {' and '.join(_GROUP)}"
        raise NotImplementedError(f"pallas_tpu: logits are {name}; {why}")
    if n < 1 or v < 1:
        raise NotImplementedError(f"pallas_tpu: logits [{n}, {v}] are empty")


def budget() -> int:
    """Bytes of VMEM for blocks and scratch on the chip that is traced for."""
    return min(VMEM_BUDGET, compat.tpu_vmem_bytes() - VMEM_SLACK)


def tiles_for(n: int, v: int, dtype: DTypeLike, *, width: int | None = None) -> Tiles:
    """The rule; ``width`` (a multiple of 128) forces narrower blocks."""
    group, itemsize = _GROUP[jnp.dtype(dtype).name], jnp.dtype(dtype).itemsize
    full = -(-v // LANES) * LANES
    if width is None:
        width = full
        if _vmem(Tiles(group, 1, full, 1), itemsize) > budget():
            width = NARROW
            while _vmem(Tiles(group, 1, width, 1), itemsize) > budget():
                width //= 2
    width = min(width, full)
    fit = min(BLOCK_BYTES // (group * width * itemsize), -(-n // group), MAX_GROUPS)
    return Tiles(group, max(fit, 1), width, -(-full // width))


def _vmem(t: Tiles, itemsize: int) -> int:
    """Two blocks in, two out, and one group in float32."""
    return 4 * t.rows * t.width * itemsize + 4 * t.group * t.width


def vmem_limit(t: Tiles, dtype: DTypeLike) -> int:
    """What the compiler is allowed: just above the need, since too large a limit crowds out other buffers."""
    return _vmem(t, jnp.dtype(dtype).itemsize) + VMEM_SLACK


def describe(n: int, v: int, dtype: DTypeLike) -> dict[str, object]:
    """Tiles and bytes moved by ``stats_and_dlogits``, for ``explain``."""
    t = tiles_for(n, v, dtype)
    size = n * v * jnp.dtype(dtype).itemsize
    return {
        "rows": t.rows,
        "columns": t.width,
        "tiles": t.tiles,
        "vmem_bytes": vmem_limit(t, dtype),
        "hbm_bytes": (2 if t.tiles == 1 else 3) * size,
    }
