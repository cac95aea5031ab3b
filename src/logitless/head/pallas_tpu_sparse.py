"""The sparse backward on TPU: columns out of the forward sweep, gradients over one set of columns for all tokens.

With M one matmul over all tokens and columns, and K active columns:

    look       logits of 128 rows, all columns: are nearly all rows flat? Then the exact kernels, as without all this.
    forward    statistics and column maxima by one sweep (M), no logits in HBM (``pallas_tpu_forward.py``)
    columns    the threshold on the maxima that costs least, judged by those 128 rows (``pallas_tpu_sparse_columns.py``)
    backward   slab by slab of the K columns: x, dx, dh, a slab of dW, and the mass that each row keeps (3 M K / V)
    hard rows  those that leave out more than the tolerance: dH and dW by the exact kernels (4 matmuls each)

One set for all tokens, where ``sparse.py`` has one per chunk. XLA's TPU compiler carries out a scatter into dW by
streaming all of dW (43 cycles a row of ``[V, 4096]`` float32, touched or not: 3.7 ms a scatter at V = 151936, an
estimate), so a sum over chunks with columns of their own would cost more than it saves. With one set

    dW[v] = active:    the sum over all tokens, hard ones too, in float32, rounded once, put into place by one scatter
            inactive:  the sum over the hard rows, by the exact kernel, rounded once
    dH[t] = hard:      the exact kernel's;    else:  the sum over the active columns, and the mean row's part

so nothing is added twice and no float32 dW exists. On 8192 tokens of ``bench.realistic`` (V = 151936) columns and hard
rows cost 0.52 M after the forward sweep (benchmarks/tpu_sparse_estimate.py); sets of 2048 tokens each, from exact
probabilities, would cost 15 % less.

The mass left out is ``1 - sum of p over the active columns``, good to ``MASS_ERROR``: rows count as hard that much
earlier, and below ``LEAST_TOLERANCE`` all goes through the exact kernels.

Bytes beside those of the exact kernels: ``[K limit, H]`` of dW's rows, a slab of the head, of x, dx and dW, ``[N, H]``
float32 of dH, ``[128, V]`` float32 of the look.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.head import chunked, pallas_tpu, sparse
from logitless.head import sparse_columns as columns_of
from logitless.head.operator import Head, HeadGrads, add_dhead, dhidden, raw_logits
from logitless.head.pallas_tpu_sparse_columns import MASS_ERROR, Active, in_full_precision
from logitless.head.pallas_tpu_tiles import LANES, Tiles
from logitless.head.sparse_columns import ColumnPasses
from logitless.head.sparse_report import SparseReport
from logitless.head.sweep import front, live_sweep
from logitless.logits.reference import transformed
from logitless.pytree import register
from logitless.stats import StatCotangents, TokenStats
from logitless.transform import LogitTransform

CHUNK = 2048
"""Tokens of a backward step."""

HARD_TILES = {"dhidden": 384, "dhead": 256}
"""Token tiles of the exact kernels for hard rows: a few per cent of the tokens should not be rounded up to 1024. At
H = 4096 dhead is 6 % slower per token than with a tile of 1024, dhidden no slower than with 512 (estimates)."""


def check(head: Any, logits_dtype: Any) -> None:
    """Raise ``NotImplementedError`` with the reason if the sparse backward cannot serve the arguments."""
    if head.layout != "vh":
        raise NotImplementedError(
            "its sparse backward gathers rows of a [V, H] head; the columns of an [H, V] head would be gathered one "
            "element at a time (give the head as [V, H], or sparse_backward='off')"
        )
    if jnp.dtype(logits_dtype) != jnp.float32:
        raise NotImplementedError(
            f"its sparse backward needs logits_dtype='float32', not {jnp.dtype(logits_dtype).name!r}: the mass left "
            "out is one minus the mass kept, and no logits are stored, so that narrower ones would save nothing"
        )


@register
@dataclasses.dataclass(frozen=True)
class Slabs:
    """What the backward steps over the active columns give; tokens in the order of their sweep."""

    kept: Array  # [tokens] float32: mass of the active columns
    dh: Array | None  # [tokens, H] float32
    weight: Array | None  # [most, H]: rows of dW
    bias: Array | None  # [most] float32


@dataclasses.dataclass(frozen=True)
class Moving:
    """The tokens with a gradient, gathered to the front of whole chunks; zeros behind them."""

    h: Array
    targets: Array
    transform: LogitTransform
    stats: TokenStats
    g: StatCotangents
    count: Array
    chunk: int


def over_slabs(p: ColumnPasses, wants: tuple[bool, bool, bool], head: Head, m: Moving, active: Active) -> Slabs:
    """Masses, dH and rows of dW and dbias, those that are wanted (hidden, weight, bias)."""
    size, width = m.h.shape
    t = m.transform
    per_token = t.temperature is not None and jnp.ndim(t.temperature) > 0

    def slab(i: Array, carry: Slabs) -> Slabs:
        index = lax.dynamic_slice_in_dim(active.index, i * p.slab, p.slab)
        part = columns_of.head_columns(head, index)

        def chunk(k: Array, inner: tuple[Array, Array | None, HeadGrads]) -> tuple[Array, Array | None, HeadGrads]:
            kept, dh, grads = inner

            def cut(a: Array) -> Array:
                return lax.dynamic_slice_in_dim(a, k * m.chunk, m.chunk)

            def add(whole: Array, own: Array) -> Array:
                return lax.dynamic_update_slice_in_dim(whole, cut(whole) + own, k * m.chunk, 0)

            h, y, s, g = cut(m.h), cut(m.targets), jax.tree.map(cut, m.stats), jax.tree.map(cut, m.g)
            own_t = dataclasses.replace(t, temperature=cut(jnp.asarray(t.temperature))) if per_token else t
            # Kept: XLA would make the logits once for the masses and once for dx.
            x = lax.optimization_barrier(raw_logits(h, part, jnp.dtype(jnp.float32)))
            z = transformed(x, own_t.column(), p.vocab_size, index[None, :])
            kept = add(kept, jnp.sum(jnp.exp((z - s.max_logit[:, None]) + s.max_logp[:, None]), axis=1))
            if any(wants):
                dx = sparse.slab_dx(p, x, index, y, own_t, s, g, h.dtype)
                dh = None if dh is None else add(dh, dhidden(dx, part))
                grads = add_dhead(grads, dx, h, part)
            return kept, dh, grads

        zero = HeadGrads(
            jnp.zeros((p.slab, width), jnp.float32) if wants[1] else None,
            jnp.zeros((p.slab,), jnp.float32) if wants[2] else None,
            None,
            None,
        )
        chunks = (m.count + (m.chunk - 1)) // m.chunk
        kept, dh, grads = lax.fori_loop(0, chunks, chunk, (carry.kept, carry.dh, zero))

        def put(whole: Array | None, own: Array | None) -> Array | None:
            if whole is None or own is None:
                return None
            return lax.dynamic_update_slice_in_dim(whole, own.astype(whole.dtype), i * p.slab, 0)

        return Slabs(kept, dh, put(carry.weight, grads.weight), put(carry.bias, grads.bias))

    start = Slabs(
        jnp.zeros((size,), jnp.float32),
        jnp.zeros((size, width), jnp.float32) if wants[0] else None,
        jnp.zeros((p.most, width), head.weight.dtype) if wants[1] else None,
        jnp.zeros((p.most,), jnp.float32) if wants[2] else None,
    )
    with in_full_precision(m.h.dtype):
        return lax.fori_loop(0, p.slabs(active.count), slab, start)


def gradients(
    options: dict[str, Any],
    p: ColumnPasses,
    wants: tuple[bool, bool, bool],
    h: Array,
    head: Head,
    targets: Array,
    t: LogitTransform,
    moving: Array,
    stats: TokenStats,
    g: StatCotangents | None,
    active: Active,
    tolerance: Array,
) -> tuple[Array | None, Array | None, Array | None, SparseReport]:
    """``(dH, dW, dbias float32, report)`` of the tokens ``moving [N]`` for cotangents ``g``; those gradients that are
    wanted (hidden, weight, bias). Without cotangents, the report that they would have if all were of ``logp``.

    ``options``: static ``vocab_size``, ``logits_dtype`` and ``interpret`` of the exact kernels.
    """
    n = h.shape[0]
    size = min(n, CHUNK)
    visit = live_sweep(moving, size).visit(0, -(-n // size) * size)
    inside = visit.inside(n)
    zero = jnp.zeros(inside.shape, jnp.float32)
    own_g = StatCotangents(zero, zero, zero)
    if g is not None:
        own_g = jax.tree.map(lambda a: jnp.where(inside, visit.take(a), 0.0), g)
    m = Moving(
        chunked.chunk_hidden(visit, h), visit.take(targets), chunked.chunk_transform(t, visit),
        jax.tree.map(visit.take, stats), own_g, jnp.sum(moving, dtype=jnp.int32), size,
    )  # fmt: skip
    slabs = over_slabs(p, wants, head, m, active)
    own_mass = jnp.where(inside, jnp.maximum(1.0 - slabs.kept, 0.0), 0.0)
    mass = visit.put(jnp.zeros((n,), jnp.float32), own_mass)
    hard = moving & sparse.misses(tolerance, stats, g, p.vocab_size)(mass + MASS_ERROR)
    sparse_hard = hard & ~active.dense
    report = SparseReport(
        left_out=jnp.where(hard | ~moving, 0.0, mass),
        rows=moving,
        hard=sparse_hard,
        chunks=jnp.int32(1),
        dense_chunks=active.dense.astype(jnp.int32),
        active=active.count.astype(jnp.float32),
        width=jnp.where(active.dense, head.vocab, p.slabs(active.count) * p.slab).astype(jnp.float32),
    )
    if g is None or not any(wants):
        return None, None, None, report

    f = front(hard)
    rows = (f.take(h), head.weight, f.take(targets), jax.tree.map(f.take, stats), jax.tree.map(f.take, g))
    kernel = dict(options, layout=head.layout, bias=head.bias, transform=f.transform(t), n_live=f.count)
    dh = dweight = dbias = None
    if slabs.dh is not None:
        easy = sparse.without(own_g, jnp.where(inside, visit.take(hard), True))
        with in_full_precision(h.dtype):
            common = sparse.mean_row(p, head)
        own = slabs.dh + sparse.in_their_place(common, own_mass, easy, m.transform)
        dh = visit.put(jnp.zeros(h.shape, h.dtype), own)
        exact = pallas_tpu.dhidden(*rows, **kernel, tiles=_hard_tiles("dhidden", h, head))
        assert f.order is not None and f.count is not None
        at = jnp.where(jnp.arange(n) < f.count, f.order, n)
        dh = dh.at[at].set(exact.astype(h.dtype), mode="drop")
    if wants[1] or wants[2]:
        dweight, dbias = pallas_tpu.dhead(*rows, **kernel, tiles=_hard_tiles("dhead", h, head))

        def put(whole: Array, own: Array) -> Array:
            return whole.at[active.index].set(own, mode="drop", unique_indices=True, indices_are_sorted=True)

        dweight = None if slabs.weight is None else put(dweight, slabs.weight)
        dbias = None if slabs.bias is None or dbias is None else put(dbias, slabs.bias)
    return dh, dweight, dbias, report


def _hard_tiles(kernel: Any, h: Array, head: Head) -> Tiles:
    tiles = pallas_tpu.tiles_of(kernel, h, head.weight, head.layout)
    return dataclasses.replace(tiles, tokens=min(tiles.tokens, HARD_TILES[kernel])) if tiles.tokens > LANES else tiles
