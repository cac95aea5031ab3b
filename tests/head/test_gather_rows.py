"""Rows gathered by a kernel that copies them, in Pallas' interpreter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from logitless.core.row_passes import rows_in_parts
from logitless.head.pallas_tpu import gather_rows, kernels
from numerics import assert_same_bits

WIDTH = 256


def _case(dtype: Any, rows: int, count: int) -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.key(0), (rows, WIDTH)).astype(dtype)
    x = x.at[rows - 1].set(jnp.nan)  # a row, and its neighbour in a word, may hold anything
    return x, jax.random.randint(jax.random.key(1), (count,), 0, rows).at[0].set(rows - 1).at[-1].set(rows - 2)


@pytest.mark.parametrize(
    ("dtype", "rows", "count"),
    [
        (jnp.bfloat16, 64, 300),  # three tiles, the last of which ends early
        (jnp.bfloat16, 63, 300),  # no whole pairs: by XLA
        (jnp.float32, 63, 257),
        (jnp.bfloat16, 64, 100),  # few: by XLA
    ],
)
@pytest.mark.parametrize("some", [False, True])
def test_gather(dtype: Any, rows: int, count: int, some: bool) -> None:
    x, at = _case(dtype, rows, count)
    assert gather_rows.served(x) == (dtype == jnp.float32 or rows % 2 == 0)
    keep = jnp.arange(count) % 3 != 0 if some else None  # the first row, of NaN, is left out
    expected = x[at] if keep is None else jnp.where(keep[:, None], x[at], jnp.zeros((), dtype))
    assert_same_bits(kernels.gather(x, at, pltpu.InterpretParams(), keep), expected)


@pytest.mark.parametrize(
    "dtype, count",
    [
        *((jnp.bfloat16, 256), (jnp.bfloat16, 300), (jnp.float32, 300)),
        pytest.param(jnp.float32, 256, marks=pytest.mark.slow),  # in place as in bfloat16
    ],
)
def test_made_of_rows(dtype: Any, count: int) -> None:
    """Numbers, and what stands beside the rows, reach each row; in place (whole tiles) and not; in another dtype."""
    x, at = _case(dtype, 64, count)
    a, b = (jnp.round(8 * jax.random.normal(jax.random.key(k), (count,))) for k in (2, 3))
    beside = [jax.random.normal(jax.random.key(k), (count, WIDTH)).astype(dtype) for k in (4, 5)]

    def made(rows: Any, number: Any, beside: Any) -> Any:
        return (
            jnp.where(number(0) > 0, rows, number(1))
            + beside[0].astype(jnp.float32)
            - 2.0 * beside[1].astype(jnp.float32)
        )

    f32 = x[at].astype(jnp.float32)
    expected = made(f32, [a[:, None], b[:, None]].__getitem__, beside)
    for out in (jnp.dtype(dtype), jnp.dtype(jnp.float32)):
        found = gather_rows.made_of_rows(x, at, pltpu.InterpretParams(), made, (a, b), beside, out)
        assert found.dtype == out
        assert_same_bits(found, expected.astype(out))


def test_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What XLA gathers a part at a time, the last one shorter."""
    monkeypatch.setattr(kernels, "PART", 64)
    x, at = _case(jnp.bfloat16, 63, 300)
    keep = jnp.arange(300) < 200
    found = kernels.gather(x, at, pltpu.InterpretParams(), keep)
    assert_same_bits(found, jnp.where(keep[:, None], x[at], jnp.zeros((), x.dtype)))
    numbers = jnp.asarray(np.random.default_rng(0).standard_normal((63, 8)), jnp.float32)
    assert_same_bits(rows_in_parts(numbers, at, 64), numbers[at])
