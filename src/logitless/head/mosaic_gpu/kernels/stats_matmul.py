"""Forward statistics of the head on a Hopper GPU: one matmul whose logits never leave the registers.

``pipeline.py`` has the matmul. A warpgroup holds ``x [M, C]`` float32 with the columns of a row spread over four
threads; the epilogue turns it into sums per row. Per element: a maximum, a difference, a product, a power and three
multiply-adds; per row and tile four exchanges between its threads. Operations are as wide as the tile: the time that a
kernel takes to compile grows faster than their number.

    m = max u    t = k (u - m)    e = 2^t    S = sum e    A = sum e t    Q = sum e^2

``u`` and ``k`` are those of ``logitless.core.stats``, ``k`` times log2(e). The columns that take no part (the
target, those beyond the vocabulary) are masked only in the tiles that hold one. At the end of a run its ``RowSums`` are
written, and :func:`merged` adds up a row's runs.

    matmuls   one, N x H x V (only tokens before ``n_live``)
    HBM       what the matmul reads; 20 bytes per token and run written
    memory    [5, runs, N] float32: 5 MiB at N = 8192; no logits

With a ``screen`` (``column_screen.py``) the epilogue also compares every logit with a number of its row and writes the
result as a bit: N V / 8 bytes more, 148 MiB at N = 8192 and V = 151936.

Its gradient is by recompute (``backend.py``): with float32 logits the order in which a sum was made is worth 1e-6.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from logitless.core import stats as st
from logitless.core.backend import refusal
from logitless.core.compat import Ref
from logitless.core.problem import Linear, Problem
from logitless.core.stats import NEG_INF, LogitTransform, RowSums, TokenStats, masked_stats, valid_targets
from logitless.head.mosaic_gpu.kernels import pipeline
from logitless.head.mosaic_gpu.kernels.pipeline import LOG2E, LOW, Pipeline, Running, across, token_rows, whole_bias
from logitless.head.mosaic_gpu.kernels.schedule import COMPUTE, TILE_K, Runs, Tiles, check, schedule, tiles_for

LANES = 8  # columns of the smallest accumulator tile: the bits of a row are as many words
PIECE = 32  # columns whose bits are made at a time: fewer are more operations to compile, more take more shifts
FIELDS = 5  # maximum, total, centred, squares, target: stats.RowSums


# -- the epilogue ----------------------------------------------------------------------------------------------------


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
    k = st.factor(transform.rows(lambda t: jnp.pad(t, (0, padded - t.shape[0]), constant_values=1.0)))
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


# -- the kernel ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Refs:
    """References of the kernel beside the matmul's: global memory, then shared memory."""

    special: Ref  # int32 [token tiles * 2, vocab tiles]: a masked column lies in the tile
    targets: Ref  # int32 [padded N]
    transform: LogitTransform  # of references: [padded N] or [1]
    bias: Ref | None  # [padded V]
    screen: Any  # float32 [padded N]
    out: Ref  # float32 [5, slots, padded N]
    words: Ref | None  # int32 [vocab tiles, padded N, 8]
    sums: Ref  # [2, 5, M]: the way out
    bits: Ref | None  # int32 [2, M, 8]: staging for the words


def _compute(m: Running, refs: _Refs, vocab_size: int, logits_dtype: DTypeLike) -> None:
    """A computing warpgroup: half of the block's rows."""
    wg, t = lax.axis_index("wg"), m.static.tiles
    per_row = plgpu.Layout.WGMMA.reduce(1)
    temperature: Any = refs.transform.temperature
    numbers = dataclasses.replace(refs.transform, temperature=None)
    numbers = jax.tree.map(lambda ref: ref[0], numbers)

    def factor(tile: Array) -> Array:
        each = temperature is not None and temperature.shape[0] > 1
        t = None if temperature is None else m.load_rows(temperature, tile) if each else temperature[0]
        return st.times(st.factor(dataclasses.replace(numbers, temperature=t)), jnp.float32(LOG2E))

    def screened(u: Array, tile: Array, v: Array) -> None:
        word = above(u, m.load_rows(refs.screen, tile))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        refs.bits[wg] = word  # type: ignore[index]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.bits.at[wg], refs.words.at[v, m.rows_of(tile)])  # type: ignore[union-attr]

    def per_tile(tile: Array, v: Array, part: Array, c: tuple[Array, ...]) -> tuple[Array, ...]:
        n, *leaves = c
        special = refs.special[tile * COMPUTE + wg, v]
        x, n = m.product(n, part)
        if refs.bias is not None:
            x = x + m.load_columns(refs.bias, v * t.columns, t.columns)
        if logits_dtype != jnp.float32:
            x = x.astype(logits_dtype).astype(jnp.float32)
        u = st.swept(x, numbers)
        nothing = plgpu.layout_cast(jnp.zeros((t.rows,), jnp.float32), per_row)
        u, found = lax.cond(
            special != 0,
            lambda u: masked(u, v * t.columns, m.load_rows(refs.targets, tile), vocab_size),
            lambda u: (u, nothing),
            u,
        )
        if refs.screen is not None:
            screened(u, tile, v)
        sums = accumulate(Sums(*leaves), u, found, factor(tile))
        return n, *sums.leaves()

    def per_run(tile: Array, slot: Array, c: tuple[Array, ...]) -> tuple[Array, ...]:
        n, *leaves = c
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for f, x in enumerate(leaves):
            refs.sums[wg, f] = x
        plgpu.commit_smem()
        for f in range(FIELDS):
            plgpu.copy_smem_to_gmem(refs.sums.at[wg, f], refs.out.at[f, slot, m.rows_of(tile)])
        return n, *Sums.empty(t.rows).leaves()

    m.walk.runs(per_tile, per_run, (jnp.int32(0), *Sums.empty(t.rows).leaves()))
    plgpu.wait_smem_to_gmem(0)


def _tiles_with_masked_columns(p: Problem, t: Tiles, token_tiles: int, vocab_tiles: int) -> Array:
    """int32 ``[token tiles * 2, vocab tiles]``, per warpgroup: 1 for the tiles of its targets, and for a partial last
    tile."""
    row, targets = jnp.arange(p.n) // t.rows, p.targets
    special = jnp.zeros((token_tiles * COMPUTE, vocab_tiles), jnp.int32)
    special = special.at[row, jnp.where(targets < 0, vocab_tiles, targets // t.columns)].set(1, mode="drop")
    return special.at[:, -1].set(1) if p.call.vocab_size % t.columns else special


def _partial_sums(
    p: Problem, n_live: Array | int | None, t: Tiles, screen: Array | None
) -> tuple[Array, Array, Array | None]:
    """``(sums [5, slots, padded N], parts [token tiles], words)``; of a token tile ``parts`` slots are written, the
    first. ``words [vocab tiles, padded N, 8]`` are the bits of ``screen [N]``; those of dead token tiles are not
    written."""
    (n, h), vocab_size = p.h.shape, p.call.vocab_size
    transform, bias = p.transform, p.head.bias
    token_tiles, vocab_tiles = -(-n // t.tokens), -(-vocab_size // t.columns)
    padded = token_tiles * t.tokens
    t = dataclasses.replace(t, stagger=min(t.stagger, t.stages - 1, -(-h // TILE_K) - 1))
    line = Pipeline(t, p.h, p.head.weight, False, p.head.layout == "hv", p.call.interpret)
    live = n if n_live is None else n_live
    plan = schedule(t, token_tiles, vocab_tiles, (live + t.tokens - 1) // t.tokens)
    special = _tiles_with_masked_columns(p, t, token_tiles, vocab_tiles)
    numbers = {k: jnp.asarray(x, jnp.float32) for k, x in dataclasses.asdict(transform).items() if x is not None}
    given = [x.reshape(1) if x.ndim == 0 else token_rows(x, padded, 1.0) for x in numbers.values()]
    if bias is not None:
        given.append(whole_bias(bias, vocab_tiles * t.columns))
    if screen is not None:
        given.append(token_rows(screen, padded, jnp.inf))
    targets = token_rows(p.targets.astype(jnp.int32), padded, -1)
    inputs = [p.h, p.head.weight, pipeline.table(plan), special, targets, *given]
    own = [plgpu.SMEM((COMPUTE, FIELDS, t.rows), jnp.float32)]
    if screen is not None:
        own.append(plgpu.SMEM((COMPUTE, t.rows, LANES), jnp.int32))

    def kernel(*refs: Any) -> None:
        (h, w, tasks, special, y, *more), rest = refs[: len(inputs)], list(refs[len(inputs) :])
        fields = iter(more)
        moved = LogitTransform(**{k: next(fields) for k in numbers})
        biased = None if bias is None else next(fields)
        out, words = rest.pop(0), None if screen is None else rest.pop(0)
        sums, bits = rest.pop(0), None if screen is None else rest.pop(0)
        r = _Refs(special, y, moved, biased, next(fields, None), out, words, sums, bits)
        m = line.of(h, w, Runs(tasks), rest)
        m.roles(lambda: _compute(m, r, vocab_size, jnp.dtype(p.call.logits_dtype)))

    sums_type = jax.ShapeDtypeStruct((FIELDS, t.runs(token_tiles, vocab_tiles) + 1, padded), jnp.float32)
    words_type = jax.ShapeDtypeStruct((vocab_tiles, padded, LANES), jnp.int32)
    out_type = sums_type if screen is None else (sums_type, words_type)
    out = line.run(kernel, inputs, out_type, [*own, *line.scratch()], transform.softcap)
    sums, words = (out, None) if screen is None else out
    return sums, jnp.asarray(plan.parts), words


def not_served_because(p: Problem[Linear]) -> str | None:
    """Why this matmul does not serve a problem (arrays or shapes), or ``None`` where it does."""
    if jnp.dtype(p.call.logits_dtype) != jnp.float32:
        return "rounded logits must be the same in both passes"
    if p.head.lora_a is not None:
        return "it has no LoRA"
    if p.teacher is not None:
        return "it has no second distribution"
    if p.ids is not None:
        return "it cannot leave the columns of given ids out of its sums"
    return refusal(check, p)


def token_stats(p: Problem, n_live: Array | int | None = None, tiles: Tiles | None = None) -> TokenStats:
    """Statistics of ``p.h [N, H]`` under the head, each ``[N]``: one matmul, no logits.

    Tokens from ``n_live`` on (traced) are not computed and have zeros. With a 16-bit ``logits_dtype`` the raw logits,
    bias included, are rounded to it. The transform's temperature is a scalar or ``[N]``.
    """
    return screened_stats(p, None, n_live, tiles)[0]


def screened_stats(
    p: Problem, screen: Array | None, n_live: Array | int | None = None, tiles: Tiles | None = None
) -> tuple[TokenStats, Array | None]:
    """:func:`token_stats`, to the bit, and which columns pass each row's ``screen [N]``: those whose swept logit (as
    ``py`` has it, before the temperature) is above it, the row's own target never.

    int32 ``[vocab tiles, N, 8]``: :func:`bit_of` says which bit is which column. From ``n_live`` on none is set.
    """
    (n, h), vocab_size = p.h.shape, p.call.vocab_size
    check(p)
    t = tiles_for(n, h, vocab_size) if tiles is None else tiles
    sums, parts, words = _partial_sums(p, n_live, t, screen)
    whole = jax.tree.map(lambda x: x[:n], merged(sums, parts, t.tokens, p.transform))
    out = st.finish(whole, valid_targets(p.targets, vocab_size), p.transform)
    if words is not None:
        words = words[:, :n]
    if n_live is None:
        return out, words
    live = jnp.arange(n) < n_live
    return masked_stats(out, live), None if words is None else jnp.where(live[:, None], words, 0)
