"""Gather rows of an array in HBM, one copy per row, and transform each row on the way.

XLA's gather of a thousand rows of 4096 makes the same copies, but is 3,900 instruction words on a v6e, a quarter of a
megabyte, in every place of a program that has one, and what is made of the rows is thousands of words more. Here it is
a loop over the rows of a tile, whose copies run while the tile before is worked on: 550 to 750 words, and 46 cycles a
row for 57 (estimates).

Two rows of 16 bits stand side by side in words of 32: both are copied, and the right half is taken.

Which gathers come here: ``kernels.gather``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from logitless.core import compat
from logitless.core.compat import Index, Ref
from logitless.head.pallas_tpu.tiles import (
    LANES,
    LEAST_LIMIT,
    SLACK,
    SUBLANES,
    VMEM_SHARE,
    Part,
    fill_rows,
    whole_lanes,
)

_MOST = 24
"""Upper bound of VMEM bytes per element of a tile: two buffers of rows, the rows of ``beside``, and the output."""
_TURNED = 8
"""Numbers of a row that the kernel can be given, rows of a tile."""
_FEW = 8
"""Number of tiles up to which XLA may keep the result in VMEM."""
_UNROLL = 4
"""Copies that are begun in a turn of the loop: a fifth faster than one."""

Made = Callable[[Array, Callable[[int], Array], list[Array]], Array]
"""``(rows [R, H] float32, k -> the k-th number of each [R, 1], [what stands beside them [R, H]]) -> [R, H]``."""


def _rows(x: Array, number: Callable[[int], Array], beside: list[Array]) -> Array:
    return x


def _rows_or_zeros(x: Array, number: Callable[[int], Array], beside: list[Array]) -> Array:
    return jnp.where(number(0) > 0, x, 0.0)


def _kernel(
    made: Made, rows_of: tuple[Ref, Ref], numbers: Sequence[Ref], x: Ref, beside: Sequence[Ref], out: Ref, *scratch: Ref
) -> None:
    (now, following), (turned, buffer, arrived) = rows_of, scratch
    i, slot, tokens = pl.program_id(0), lax.rem(pl.program_id(0), 2), out.shape[0]
    along = buffer.shape[1] // tokens  # rows of a copy

    def copy(row: Index, k: Index, to: Index) -> Any:
        first = pl.multiple_of(lax.div(row, along) * along, along)
        place = pl.ds(pl.multiple_of(k * along, along), along)
        return pltpu.make_async_copy(x.at[pl.ds(first, along), :], buffer.at[to, place, :], arrived.at[to])

    def fetch(rows: Ref, to: Index) -> None:
        lax.fori_loop(0, tokens, lambda k, _: copy(rows[0, 0, k], k, to).start(), None, unroll=_UNROLL)

    pl.when(i == 0)(lambda: fetch(now, slot))
    pl.when(i + 1 < pl.num_programs(0))(lambda: fetch(following, 1 - slot))
    line = lax.broadcasted_iota(jnp.int32, (_TURNED, tokens), 0)
    lines = jnp.zeros((_TURNED, tokens), jnp.float32)
    for n, ref in enumerate(numbers):
        lines = jnp.where(line == n, ref[...].astype(jnp.float32), lines)
    turned[...] = lines.T
    # Wait for all copies: a wait counts bytes.
    pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], arrived.at[slot]).wait()

    def value(part: Part) -> Array:
        def number(k: int) -> Array:
            return turned[part.rows, k : k + 1]

        rows = buffer[slot, pl.ds(pl.multiple_of(part.first * along, along), part.size * along), :]
        if along > 1:
            words = pltpu.bitcast(rows, jnp.int32)
            words = jnp.where(number(0) > 0, words & -0x10000, words << 16)
            rows = lax.bitcast_convert_type(words, jnp.float32)
        return made(rows, lambda k: number(1 + k), [ref[part.rows, :] for ref in beside]).astype(out.dtype)

    fill_rows(out, value, SUBLANES)


def served(x: Array) -> bool:
    """Whether rows of ``x [V, H]`` can be copied: they are not too wide, and those of 16 bits come in pairs."""
    pairs = x.dtype == jnp.float32 or (x.dtype == jnp.bfloat16 and x.shape[0] % 2 == 0)
    return pairs and _MOST * LANES * x.shape[1] <= VMEM_SHARE * compat.tpu_vmem_bytes()


def made_of_rows(
    x: Array,
    at: Array,
    interpret: object,
    made: Made = _rows,
    numbers: Sequence[Array] = (),
    beside: Sequence[Array] = (),
    dtype: DTypeLike | None = None,
) -> Array:
    """``[K, H]`` in ``dtype`` (default: of ``x``): ``made`` applied to the rows ``at [K]`` of ``x [V, H]``, with
    ``numbers [K]`` and ``beside [K, H]`` per row; overwrites the first ``beside`` if the dtypes match.
    """
    (count,), width, dtype = at.shape, x.shape[1], jnp.dtype(x.dtype if dtype is None else dtype)
    tokens, along = LANES, 1 if x.dtype == jnp.float32 else 2
    steps, padded = pl.cdiv(count, tokens), whole_lanes(count)
    index = jnp.pad(at.astype(jnp.int32), (0, padded - count))
    scalars = index.reshape(steps, 1, tokens)
    # Apart: XLA would lay out each row number as an array with a single row, in eight times the code.
    rows = [jnp.pad(a, (0, padded - count))[None, :] for a in lax.optimization_barrier(list(numbers))]
    # The interpreter has no room for the end of a ragged block in an array that it is given.
    in_place = bool(beside) and beside[0].dtype == dtype and not (interpret and count % tokens)

    # Few rows may stay in VMEM until they are used.
    shape: jax.ShapeDtypeStruct | pl.MemoryRef = jax.ShapeDtypeStruct((count, width), dtype)
    shape = shape if steps <= _FEW else compat.hbm_output((count, width), dtype, interpret)

    def own(ahead: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (1, 1, tokens), lambda i: (jnp.minimum(i + ahead, steps - 1), 0, 0), memory_space=pltpu.SMEM
        )

    limit = max(int(SLACK * _MOST * tokens * width), LEAST_LIMIT)
    block = pl.BlockSpec((tokens, width), lambda i: (i, 0))
    line = pl.BlockSpec((1, tokens), lambda i: (0, i))
    return pl.pallas_call(
        functools.partial(_kernel, made),
        grid=(steps,),
        in_specs=[[own(0), own(1)], [line] * (1 + len(rows)), pl.BlockSpec(memory_space=pl.ANY), [block] * len(beside)],
        out_specs=block,
        scratch_shapes=[
            pltpu.VMEM((tokens, _TURNED), jnp.float32),
            pltpu.VMEM((2, along * tokens, width), x.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        out_shape=shape,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=limit),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=count * width * (along + 1 + len(beside)) * x.dtype.itemsize
        ),
        input_output_aliases={4 + len(rows): 0} if in_place else {},
        name=f"head_rows_t{tokens}",
        interpret=interpret,
    )(
        [scalars, scalars],
        [(index % along)[None, :], *rows],
        compat.in_hbm(x, interpret),
        [compat.in_hbm(a, interpret) for a in beside],
    )


def rows_at(x: Array, at: Array, interpret: object, keep: Array | None = None) -> Array:
    """Rows ``at [K]`` of ``x [V, H]``; zeros where ``keep [K]``, if given, is false."""
    if keep is None:
        return made_of_rows(x, at, interpret)
    return made_of_rows(x, at, interpret, _rows_or_zeros, [keep.astype(jnp.float32)])
