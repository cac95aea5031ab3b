"""Quantised blocks to numbers, on the device: the bytes of a file go there as they are, an eighth of what they become.

    x = d q            Q4_0, Q5_0, Q8_0                      d, m: a float16 of the block
    x = d q + m        Q4_1, Q5_1
    x = (d s) q        Q3_K, Q6_K                            s, t: small integers of 16 or 32 numbers of the block
    x = (d s) q - m t  Q2_K, Q4_K, Q5_K

All products are exact in float32 (11 bits of d, at most 7 of s, 5 of q), so that each number is rounded once, in the
sum, and is the ``gguf`` package's to the bit, whatever a compiler contracts or reorders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, UInt8

_SUPER = 256  # numbers in a block of the K types


def _split(blocks: UInt8[Array, "N B"], *widths: int) -> list[Array]:
    """Neighbouring columns, the last ones with what is left."""
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    return jnp.split(blocks, ends, axis=1)


def _half(two_bytes: UInt8[Array, "N 2"]) -> Float[Array, "N 1"]:
    return jax.lax.bitcast_convert_type(two_bytes, jnp.float16)[:, None].astype(jnp.float32)


def _signed(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.int8).astype(jnp.float32)


def _bits(x: UInt8[Array, "N B"], group: int, shifts: Sequence[int], mask: int) -> Array:
    """Of each ``group`` bytes the bits after the first shift, then those after the second, ...: ``[N, numbers]``."""
    by = jnp.asarray(shifts, jnp.uint8)[:, None]
    return ((x.reshape(len(x), -1, 1, group) >> by) & jnp.uint8(mask)).reshape(len(x), -1)


def _q4_0(b: Array) -> Array:
    d, q = _split(b, 2)
    return _half(d) * (_bits(q, 16, (0, 4), 15).astype(jnp.float32) - 8)


def _q4_1(b: Array) -> Array:
    d, m, q = _split(b, 2, 2)
    return _half(d) * _bits(q, 16, (0, 4), 15).astype(jnp.float32) + _half(m)


def _five_bits(high: UInt8[Array, "N 4"], low: UInt8[Array, "N 16"]) -> Array:
    top = ((high[:, :, None] >> jnp.arange(8, dtype=jnp.uint8)) & 1).reshape(len(high), -1)
    return (_bits(low, 16, (0, 4), 15) | (top << 4)).astype(jnp.float32)


def _q5_0(b: Array) -> Array:
    d, high, low = _split(b, 2, 4)
    return _half(d) * (_five_bits(high, low) - 16)


def _q5_1(b: Array) -> Array:
    d, m, high, low = _split(b, 2, 2, 4)
    return _half(d) * _five_bits(high, low) + _half(m)


def _q8_0(b: Array) -> Array:
    d, q = _split(b, 2)
    return _half(d) * _signed(q)


def _scaled(scale: Float[Array, "N G"], q: Array) -> Float[Array, "N G W"]:
    """A scale for each group of neighbouring numbers."""
    return scale[:, :, None] * q.astype(jnp.float32).reshape(*scale.shape, -1)


def _q2_k(b: Array) -> Array:
    scales, q, d, m = _split(b, _SUPER // 16, _SUPER // 4, 2)
    numbers = _scaled(_half(d) * (scales & 15).astype(jnp.float32), _bits(q, 32, (0, 2, 4, 6), 3))
    return numbers - (_half(m) * (scales >> 4).astype(jnp.float32))[:, :, None]


def _q3_k(b: Array) -> Array:
    high, low, scales, d = _split(b, _SUPER // 8, _SUPER // 4, 12)
    small = _bits(scales[:, :8], 8, (0, 4), 15) | (_bits(scales[:, 8:], 4, (0, 2, 4, 6), 3) << 4)
    q = _bits(low, 32, (0, 2, 4, 6), 3).astype(jnp.float32) - 4 * (1 - _bits(high, 32, range(8), 1).astype(jnp.float32))
    return _scaled(_half(d) * (small.astype(jnp.float32) - 32), q)


def _scales_and_mins(packed: UInt8[Array, "N 12"]) -> tuple[Array, Array]:
    """Eight of each, of six bits: the first four in bytes 0-3 and 4-7, the others' high bits above them."""
    a, b, low = (packed[:, 4 * i : 4 * i + 4] for i in range(3))
    scales = jnp.concatenate([a & 63, (low & 15) | ((a >> 2) & 48)], axis=1)
    mins = jnp.concatenate([b & 63, (low >> 4) | ((b >> 2) & 48)], axis=1)
    return scales.astype(jnp.float32), mins.astype(jnp.float32)


def _q4_k(b: Array) -> Array:
    d, m, packed, q = _split(b, 2, 2, 12)
    scales, mins = _scales_and_mins(packed)
    return _scaled(_half(d) * scales, _bits(q, 32, (0, 4), 15)) - (_half(m) * mins)[:, :, None]


def _q5_k(b: Array) -> Array:
    d, m, packed, high, low = _split(b, 2, 2, 12, _SUPER // 8)
    scales, mins = _scales_and_mins(packed)
    q = _bits(low, 32, (0, 4), 15) | (_bits(high, 32, range(8), 1) << 4)
    return _scaled(_half(d) * scales, q) - (_half(m) * mins)[:, :, None]


def _q6_k(b: Array) -> Array:
    low, high, scales, d = _split(b, _SUPER // 2, _SUPER // 4, _SUPER // 16)
    q = _bits(low, 64, (0, 4), 15) | (_bits(high, 32, (0, 2, 4, 6), 3) << 4)
    return _scaled(_half(d) * _signed(scales), q.astype(jnp.float32) - 32)


def _plain(dtype: jnp.dtype) -> Callable[[Array], Array]:
    return lambda b: jax.lax.bitcast_convert_type(b.reshape(len(b), -1, dtype.itemsize), dtype)


_KINDS: dict[str, tuple[int, Callable[[Array], Array]]] = {
    "F32": (4, _plain(jnp.dtype(jnp.float32))),
    "F16": (2, _plain(jnp.dtype(jnp.float16))),
    "BF16": (2, _plain(jnp.dtype(jnp.bfloat16))),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q2_K": (84, _q2_k),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
"""Bytes of a block, and what makes numbers ``[N, ...]`` of blocks ``[N, bytes]``."""


def known(kind: str) -> bool:
    """Whether blocks of this ``gguf.GGMLQuantizationType`` are dequantised here."""
    return kind in _KINDS


def dequantise(kind: str, data: UInt8[Array, "R B"]) -> Float[Array, "R C"]:
    """Rows of numbers in float32 (plain numbers in their own dtype) from rows of blocks."""
    block_bytes, numbers = _KINDS[kind]
    return numbers(data.reshape(-1, block_bytes)).reshape(len(data), -1)
