"""Rows of dW that its sweep puts in place, and dH of few tokens along the way, in Pallas' interpreter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless.core.stats import LogitTransform, StatCotangents
from logitless.head.pallas_tpu import kernels
from logitless.head.pallas_tpu.hard_rows import Ready, blank_rows, hard_sweep, parts_of, room_for
from logitless.head.pallas_tpu.tiles import MIB, Tiles
from numerics import f64, head_case, head_problem

WIDTH, TILE = 128, 128


@pytest.mark.parametrize(
    ("vocab", "real", "slots", "columns"),
    [
        (656, 600, 256, "scattered"),  # padded columns, a ragged end
        # all at the vocabulary's end: where the rows themselves stand
        pytest.param(640, 640, 384, "last", marks=pytest.mark.slow),
        # an array of their own; a whole tile of them in parts
        pytest.param(655, 655, 384, "dense", marks=pytest.mark.slow),
    ],
)
def test_rows_in_place_and_the_others_exact(vocab: int, real: int, slots: int, columns: str) -> None:
    rng = np.random.default_rng(0)
    n, n_live = 200, 150
    case = head_case(1, (n,), WIDTH, vocab, jnp.bfloat16, lead=2.0)
    y = case.targets % real
    chosen = {
        "scattered": np.sort(rng.permutation(real)[:150]),
        "last": np.arange(real - 300, real),
        "dense": np.sort(np.concatenate([np.arange(130, 330), rng.permutation(100)[:20]])),
    }[columns]
    count = len(chosen)
    index = np.concatenate([vocab + np.arange(slots - count), chosen]).astype(np.int32)
    own = np.asarray(jnp.asarray(rng.standard_normal((count, WIDTH)), jnp.bfloat16))
    hidden, head = case.hidden.copy(), case.lm_head.copy()
    hidden[n_live:] = np.nan
    head[real:] = np.nan  # padding
    bias = np.where(np.arange(vocab) < real, rng.standard_normal(vocab), np.nan).astype(np.float32)
    weights = rng.standard_normal(n).astype(np.float32) * (np.arange(n) % 3 != 1)
    size = room_for(vocab, slots)
    assert size == (vocab if vocab % 16 == 0 else slots) and slots % parts_of(slots) == 0

    @jax.jit
    def run(h: Any, w: Any, y: Any, g: Any, own: Any, index: Any, n_live: Any) -> Any:
        p = head_problem(h, w, y, bias=bias, transform=LogitTransform(), vocab_size=real, interpret=True)
        stats = kernels.token_stats(p, n_live)
        rows = blank_rows(size, WIDTH, jnp.bfloat16, True).at[size - count :].set(own)
        known = Ready(rows, index, jnp.int32(count))
        cotangents = StatCotangents(g, jnp.zeros_like(g), jnp.zeros_like(g))
        tiles = Tiles(128, TILE, 32 * MIB)
        both = hard_sweep(p, n_live, stats, cotangents, known, tiles, hidden=n)
        if columns != "scattered":
            return both, both.head.weight
        return both, hard_sweep(p, n_live, stats, cotangents, known, tiles).head.weight

    both, alone = run(hidden, head, y, weights, own, index, n_live)
    z = f64(case.hidden) @ f64(case.lm_head)[:real].T + f64(bias)[:real]
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    dx = (np.eye(real)[y] - p) * np.where(np.arange(n) < n_live, weights, 0)[:, None]
    dx[:, chosen] = 0
    dw, dh = np.zeros((vocab, WIDTH)), dx @ f64(case.lm_head)[:real]
    dw[:real] = dx.T @ f64(case.hidden)
    dw[chosen] = f64(own)
    np.testing.assert_array_equal(f64(both.head.weight), f64(alone))
    np.testing.assert_array_equal(f64(both.head.weight)[chosen], f64(own))
    assert np.linalg.norm(f64(both.head.weight) - dw) <= 4e-3 * np.linalg.norm(dw)
    assert np.linalg.norm(f64(both.hidden) - dh) <= 4e-3 * np.linalg.norm(dh)
    dbias = f64(both.head.bias)
    assert not dbias[chosen].any() and not dbias[real:].any()
    assert np.linalg.norm(dbias[:real] - dx.sum(0)) <= 1e-5 * np.linalg.norm(dx.sum(0))
    assert not f64(both.hidden)[n_live:].any() and not f64(both.hidden)[weights == 0].any()

    none, same = run(np.full_like(hidden, np.nan), head, y, weights, own, index, 0)  # no token counts
    dw[:] = 0
    dw[chosen] = f64(own)
    np.testing.assert_array_equal(f64(none.head.weight), dw)
    np.testing.assert_array_equal(f64(same), dw)
    assert not f64(none.hidden).any()
