"""Dequantise blocks on the device: the file's bytes are transferred as stored, an eighth of the dequantised size.

    x = d q            Q4_0, Q5_0, Q8_0                      d, m: a float16 of the block
    x = d q + m        Q4_1, Q5_1
    x = (d s) q        Q6_K                                  s, t: small integers of 16 or 32 numbers of the block
    x = (d s) q - m t  Q4_K, Q5_K

Files of other kinds (Q2_K, Q3_K, IQ...) are dequantised by the ``gguf`` package, on the host (gguf.py).
All products are exact in float32 (11 bits of d, at most 7 of s, 5 of q), so that each number is rounded once, in the
sum, and is the ``gguf`` package's to the bit, whatever a compiler contracts or reorders.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core.shapes import Float, UInt8


def _half(two_bytes: UInt8[Array, "N 2"]) -> Float[Array, "N 1"]:
    return jax.lax.bitcast_convert_type(two_bytes, jnp.float16)[:, None].astype(jnp.float32)


def _signed(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.int8).astype(jnp.float32)


def _bits(x: UInt8[Array, "N B"], group: int, shifts: Sequence[int], mask: int) -> Array:
    """For each ``group`` bytes, the bits after the first shift, then after the second, ...: ``[N, numbers]``."""
    by = jnp.asarray(shifts, jnp.uint8)[:, None]
    return ((x.reshape(len(x), -1, 1, group) >> by) & jnp.uint8(mask)).reshape(len(x), -1)


def _four_bits(q: UInt8[Array, "N 16"]) -> Array:
    return _bits(q, 16, (0, 4), 15).astype(jnp.float32)


def _five_bits(high: UInt8[Array, "N 4"], q: UInt8[Array, "N 16"]) -> Array:
    top = ((high[:, :, None] >> jnp.arange(8, dtype=jnp.uint8)) & 1).reshape(len(high), -1)
    return (_bits(q, 16, (0, 4), 15) | (top << 4)).astype(jnp.float32)


def _scaled(scale: Float[Array, "N G"], q: Array) -> Float[Array, "N G W"]:
    """A scale for each group of neighbouring numbers."""
    return scale[:, :, None] * q.astype(jnp.float32).reshape(*scale.shape, -1)


def _q6_k(q: Array, h: Array, s: Array, d: Array) -> Array:
    q = _bits(q, 64, (0, 4), 15) | (_bits(h, 32, (0, 2, 4, 6), 3) << 4)
    return _scaled(d * _signed(s), q.astype(jnp.float32) - 32)


def _with_mins(d: Array, m: Array, s: UInt8[Array, "N 12"], q: Array) -> Array:
    """Scales and mins, eight of each, of six bits: four in bytes 0-3 and 4-7, the others' high bits above them."""
    a, b, low = (s[:, 4 * i : 4 * i + 4] for i in range(3))
    scales = jnp.concatenate([a & 63, (low & 15) | ((a >> 2) & 48)], axis=1).astype(jnp.float32)
    mins = jnp.concatenate([b & 63, (low >> 4) | ((b >> 2) & 48)], axis=1).astype(jnp.float32)
    return _scaled(d * scales, q) - (m * mins)[:, :, None]


def _q5_k(d: Array, m: Array, s: Array, h: Array, q: Array) -> Array:
    return _with_mins(d, m, s, _bits(q, 32, (0, 4), 15) | (_bits(h, 32, range(8), 1) << 4))


_Kind = tuple[int, Callable[[Array], Array]]
"""Bytes of a block, and what makes numbers ``[N, ...]`` of blocks ``[N, bytes]``."""


def _plain(dtype: jnp.dtype) -> _Kind:
    return dtype.itemsize, lambda b: jax.lax.bitcast_convert_type(b.reshape(len(b), -1, dtype.itemsize), dtype)


def _blocks(layout: str, numbers: Callable[..., Array]) -> _Kind:
    """Blocks of neighbouring fields, each a letter and its bytes; ``numbers`` takes them, d and m as numbers."""
    ends = list(itertools.accumulate(int(field[1:]) for field in layout.split()))

    def read(blocks: UInt8[Array, "N B"]) -> Array:
        parts = zip(layout.split(), jnp.split(blocks, ends[:-1], axis=1), strict=True)
        return numbers(*(_half(part) if field[0] in "dm" else part for field, part in parts))

    return ends[-1], read


_KINDS: dict[str, _Kind] = {
    "F32": _plain(jnp.dtype(jnp.float32)),
    "F16": _plain(jnp.dtype(jnp.float16)),
    "BF16": _plain(jnp.dtype(jnp.bfloat16)),
    "Q4_0": _blocks("d2 q16", lambda d, q: d * (_four_bits(q) - 8)),
    "Q4_1": _blocks("d2 m2 q16", lambda d, m, q: d * _four_bits(q) + m),
    "Q5_0": _blocks("d2 h4 q16", lambda d, h, q: d * (_five_bits(h, q) - 16)),
    "Q5_1": _blocks("d2 m2 h4 q16", lambda d, m, h, q: d * _five_bits(h, q) + m),
    "Q8_0": _blocks("d2 q32", lambda d, q: d * _signed(q)),
    "Q4_K": _blocks("d2 m2 s12 q128", lambda d, m, s, q: _with_mins(d, m, s, _bits(q, 32, (0, 4), 15))),
    "Q5_K": _blocks("d2 m2 s12 h32 q128", _q5_k),
    "Q6_K": _blocks("q128 h64 s16 d2", _q6_k),
}


def known(kind: str) -> bool:
    """Whether this ``gguf.GGMLQuantizationType`` is supported."""
    return kind in _KINDS


def dequantise(kind: str, data: UInt8[Array, "R B"]) -> Float[Array, "R C"]:
    """Rows of numbers in float32 (plain numbers in their own dtype) from rows of blocks."""
    block_bytes, numbers = _KINDS[kind]
    return numbers(data.reshape(-1, block_bytes)).reshape(len(data), -1)
