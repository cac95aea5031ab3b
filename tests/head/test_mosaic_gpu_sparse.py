"""The sparse backward without logits on Hopper: the screen's bits, columns and guesses in Pallas' GPU interpreter, and
its gradients against float64. What ran on a GPU is in benchmarks/results; ``test_it_lowers_for_cuda`` is as near as a
CPU comes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
from interpreted import in_numpy
from logitless import Objective, metric_values, oracle
from logitless.core.compat import mosaic_gpu_reason
from logitless.core.problem import Problem
from logitless.core.row_passes import probabilities as row_probabilities
from logitless.core.row_passes import statistics
from logitless.core.stats import LogitTransform, StatCotangents
from logitless.head.linear import raw_logits
from logitless.head.mosaic_gpu import backend, column_screen, dweight_buffer, sparse, sparse_backward, stored_dx
from logitless.head.mosaic_gpu.dweight_buffer import sizes_of
from logitless.head.mosaic_gpu.kernels import dlogits_matmul, dynamic_matmul, stats_matmul
from logitless.head.mosaic_gpu.kernels.dynamic_matmul import tiles_of
from logitless.head.mosaic_gpu.kernels.schedule import Slots, Tiles, Visits, all_of, tile_at, tiles_for
from logitless.head.sparse.active_columns import chunk_rule
from logitless.head.sparse.gather import Known, in_order, slab_dx
from logitless.lab.bench import realistic
from numerics import HeadCase as Case
from numerics import assert_same_bits, f64, head_problem
from sparse_cases import (
    CHUNK,
    TOLERANCE,
    VOCAB,
    WIDTH,
    adversarial,
    assert_as_good,
    calibrated,
    collapsed,
    flat,
    leaning,
    loss_inputs,
    probabilities,
)

pytestmark = pytest.mark.skipif(mosaic_gpu_reason() is not None, reason=str(mosaic_gpu_reason()))

OBJECTIVES = {
    "clip": Objective(aggregation="dapo"),
    "gspo": Objective(level="sequence", eps_low=0.2, eps_high=0.2),
}
SCREENED = dict(backend="mosaic_gpu", interpret=True)
SMALL = Tiles(rows=64, columns=64, stages=2, group=2, blocks=3, delay=1)
BLOCKS = 4


@pytest.fixture(autouse=True, scope="module")
def few_blocks() -> Iterator[None]:
    """A GPU of four blocks with several tiles each: every block costs the interpreter threads, and half of its time."""

    def tiles(*shape: int) -> Tiles:
        t = tiles_for(*shape)
        return dataclasses.replace(t, blocks=max(BLOCKS, t.group))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats_matmul, "tiles_for", tiles)
        patch.setattr(dlogits_matmul, "tiles_for", tiles)
        patch.setattr(dynamic_matmul, "tiles_of", lambda *shape: dataclasses.replace(tiles_of(*shape), blocks=BLOCKS))
        yield


# -- the kernel ------------------------------------------------------------------------------------------------------


def ragged_problem(**numbers: float) -> Any:
    rng = np.random.default_rng(0)
    n, h, v = 200, 72, 333
    hidden = jnp.asarray(rng.normal(size=(n, h)).astype(jnp.bfloat16))
    head = jnp.asarray((rng.normal(size=(v, h)) * 3 / h**0.5).astype(jnp.bfloat16))
    y = jnp.asarray(rng.integers(0, 330, n).astype(np.int32))
    t = LogitTransform(**{k: jnp.float32(x) for k, x in numbers.items()})
    return head_problem(hidden, head, y, transform=t, vocab_size=330, interpret=True)


def test_bits_are_the_comparison_of_every_logit() -> None:
    """Ragged tokens, columns and vocabulary; the target, what is dead and what lies beyond the vocabulary never pass.
    The statistics are to the bit those without a screen."""
    p, live = ragged_problem(), 150
    screens = (np.random.default_rng(1).normal(size=p.n) * 2 + 2).astype(np.float32)
    screens[7] = np.inf
    run = jax.jit(lambda p, screens: stats_matmul.screened_stats(p, screens, n_live=live, tiles=SMALL))
    stats, words = run(p, screens)
    x = f64(p.h) @ f64(p.head.weight).T
    want = x > f64(screens)[:, None]
    want[np.arange(p.n), np.asarray(p.targets)] = False
    want[:, 330:] = want[live:] = False
    got = jax.jit(jax.vmap(lambda w: column_screen.passed(w, 333, SMALL.columns), in_axes=1))(words)
    assert 0.1 < want[:live].mean() < 0.9 and not want[7].any()
    np.testing.assert_array_equal(got, want)
    assert_same_bits(stats, jax.jit(lambda p: stats_matmul.token_stats(p, n_live=live, tiles=SMALL))(p))


def shape(*s: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(s, dtype)


def for_cuda(run: Any, *args: Any) -> str:
    """What a program is lowered to; it has a kernel in it."""
    text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    return str(text)


@pytest.mark.parametrize("in_mesh", [False, True])
def test_it_lowers_for_cuda(in_mesh: bool) -> None:
    y, screens = shape(1024, dtype=jnp.int32), shape(1024, dtype=jnp.float32)
    p = head_problem(
        shape(1024, 512), shape(2048, 512), y, transform=LogitTransform(), vocab_size=2048, interpret=False
    )
    with jax.set_mesh(jax.make_mesh((1,), ("data",))) if in_mesh else contextlib.nullcontext():
        for_cuda(stats_matmul.screened_stats, p, screens)


# -- dx without logits -----------------------------------------------------------------------------------------------


def in_slots(x: Any, first: int = 0, spare: int = 0) -> Slots:
    """``x`` in slots, from the ``first`` on and with ``spare`` ones in every row of tiles; all else is NaN."""
    rows, across = -(-x.shape[0] // 128), -(-x.shape[1] // 256)
    whole = jnp.full((rows * 128, (across + spare) * 256), jnp.nan, x.dtype).at[: x.shape[0], : x.shape[1]].set(x)
    tiles = whole.reshape(rows, 128, across + spare, 256).transpose(0, 2, 1, 3).reshape(-1, 256)
    return Slots(jnp.pad(tiles, ((first * 128, 8), (0, 0)), constant_values=jnp.nan), first, across + spare)


def out_of_slots(slots: Slots, rows: int, columns: int) -> Any:
    tiles = slots.tiles(-(-rows // 128), -(-columns // 256)).transpose(0, 2, 1, 3)
    return tiles.reshape(tiles.shape[0] * 128, -1)[:rows, :columns]


DX_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one tile": (dict(n=64, h=64, v=64), {}),
    "ragged": (dict(n=300, h=72, v=333), {}),
    "temperature": (dict(n=130, h=64, v=200), dict(temperature=np.linspace(0.5, 2, 130, dtype=np.float32))),
    "[H, V], bias": (dict(n=130, h=128, v=256, layout="hv", bias=True), {}),
    "bent": (dict(n=130, h=128, v=200, bias=True), dict(temperature=0.7, softcap=5.0, scale=-1.5)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # the interpreter's, of infinite logits
@pytest.mark.parametrize("name", DX_CASES)
def test_dx_is_that_of_logits_in_memory(name: str) -> None:
    """Random cotangents of all three statistics, columns that do not count, rows that do not move (one of which has
    infinite logits) and one that is NaN; and the mass in the columns that count."""
    size, numbers = DX_CASES[name]
    size = {"layout": "vh", "bias": False, **size}
    n, v, rng = size["n"], size["v"], np.random.default_rng(3)
    h = jnp.asarray(rng.normal(size=(n, size["h"])), jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(v, size["h"])) * 3 / size["h"] ** 0.5, jnp.bfloat16)
    y = jnp.asarray(rng.integers(0, v, n), jnp.int32)
    bias = jnp.asarray(rng.normal(size=v), jnp.float32) if size["bias"] else None
    t = LogitTransform(**{k: jnp.asarray(x, jnp.float32) for k, x in numbers.items()})
    still, lost = np.arange(n) % 5 == 0, 7
    h = h.at[0].set(jnp.inf).at[lost].set(jnp.nan)
    w = w if size["layout"] == "vh" else w.T
    p = head_problem(h, w, y, layout=size["layout"], bias=bias, transform=t, vocab_size=v, interpret=True)
    counts = jnp.asarray(rng.random(v) < 0.7)
    tiles = dataclasses.replace(SMALL, columns=128)  # of two pieces each
    visited = np.ones((-(-n // tiles.tokens), -(-v // tiles.columns)), bool)
    visited[-1, -1] = visited.size < 4
    seen = np.repeat(np.repeat(visited, tiles.tokens, 0), tiles.columns, 1)[:n, :v]

    @jax.jit
    def both(p: Problem, g: StatCotangents, counts: Any) -> Any:
        x = raw_logits(p.h, p.head, jnp.float32)
        known = Known(statistics(x, p), g)
        want = jnp.where(counts, slab_dx(x, jnp.arange(v, dtype=jnp.int32), p, known), 0)
        mass = jnp.where(counts & seen, row_probabilities(x, p, known.stats, jnp.arange(v)[None]), 0).sum(1)
        target = jnp.where(counts[p.targets], p.targets, -1)
        rows, mine = dlogits_matmul.rows_of(p, known).at(target), jnp.exp(known.stats.max_logp)
        place = in_slots(jnp.full((n, v), jnp.nan, h.dtype), first=3, spare=1)
        listed = Visits(visited).listed(tiles.group, place.numbers())
        got, part = dlogits_matmul._columns_dx(p, rows, counts, p.head, visited, listed, place.array, tiles=tiles)
        got = out_of_slots(place.of(got), n, v)
        return jnp.where(seen, got, 0), part * mine, jnp.where(seen, want, 0), mass

    g = StatCotangents(*(jnp.asarray(np.where(still, 0.0, rng.normal(size=n)), jnp.float32) for _ in range(3)))
    got, mass, want, kept = (f64(x) for x in both(p, g, counts))
    assert (got[still] == 0).all() and np.isnan(want[lost]).any()
    sound = ~still & (np.arange(n) != lost)
    assert not np.isnan(got[sound]).any() and np.isnan(got[lost][np.isnan(want[lost])]).all()
    assert np.abs(want[sound]).max() > 0 and (got[:, ~np.asarray(counts)][sound] == 0).all()
    # One rounding to bfloat16 may go the other way: one ulp, at most 2^-7 of the value.
    np.testing.assert_allclose(got[sound], want[sound], rtol=2.0**-7, atol=1e-5 * np.abs(want[sound]).max())
    np.testing.assert_allclose(mass[sound], kept[sound], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("narrow", [False, True])
def test_sums_lie_in_the_piece_of_their_own_warpgroup(narrow: bool) -> None:
    """On a GPU they stand in one place, which the interpreter does not know: with fewer bytes for the sums, those of
    the second warpgroup would lie in the first one's piece."""
    piece, sums = dlogits_matmul.ways_out(Tiles(), jnp.bfloat16, narrow)
    each = [int(np.prod(x.shape[1:])) * jnp.dtype(x.dtype).itemsize for x in (piece, sums)]
    assert each[0] == each[1]


@pytest.mark.parametrize(
    ("n", "v", "layout"), [(1024, 2048, "vh"), (128, 151936, "vh"), (300, 1000, "vh"), (256, 2048, "hv")]
)
def test_dx_lowers_for_cuda(n: int, v: int, layout: str) -> None:
    w = shape(v, 512) if layout == "vh" else shape(512, v)
    y, counts = shape(n, dtype=jnp.int32), shape(v, dtype=jnp.bool_)
    p = head_problem(shape(n, 512), w, y, layout=layout, transform=LogitTransform(), interpret=False)
    visited = shape(-(-n // 128), -(-v // 256), dtype=jnp.bool_)
    tiles = math.prod(visited.shape)
    given = shape(6, n, dtype=jnp.float32), counts, visited, shape(3 + tiles, dtype=jnp.int32), shape(tiles * 128, 256)
    for_cuda(lambda p, rows, counts, *rest: dlogits_matmul._columns_dx(p, rows, counts, p.head, *rest), p, *given)


@pytest.mark.parametrize(
    ("rows", "columns", "parts"),
    [(64, 26, 1), (64, 34, 1), (13, 20, 1), (1, 594, 1), (4, 16, 2), (1187, 16, 1), (3, 2, 5)],
)
def test_every_tile_once_and_in_groups(rows: int, columns: int, parts: int) -> None:
    """By number, as the blocks count them: all of a part before the next, ``group`` row tiles for each column tile."""
    group, total = 8, rows * columns * parts
    row, column, part = (np.asarray(x) for x in tile_at(jnp.arange(total), jnp.int32(rows), jnp.int32(columns), group))
    assert len({*zip(row, column, part, strict=True)}) == total
    assert row.max() == rows - 1 and column.max() == columns - 1
    np.testing.assert_array_equal(part, np.arange(total) // (rows * columns))
    if rows % group == 0:  # what runs at the same time
        assert (column.reshape(-1, group) == column[::group, None]).all()


# -- which tiles are visited -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "live"), [(5, 7, (3, 4)), (4, 594, (1, 594)), (20, 3, (20, 2)), (3, 3, (0, 3))]
)
def test_all_tiles_are_listed_as_any_are(rows: int, columns: int, live: tuple[int, int]) -> None:
    """Without a sort: the same tiles, ``group`` rows of them for each column."""
    every = all_of(rows * 128 - 3, columns * 256 - 3, live[0] * 128 - 1, live[1] * 256 - 1)
    ours, count = np.asarray(every.listed(8, (5, 9))), live[0] * live[1]
    assert ours[:3].tolist() == [count, 5, 9]
    by_sort = np.asarray(Visits(every.tiles).listed(8, (5, 9)))
    np.testing.assert_array_equal(ours[: 3 + count], by_sort[: 3 + count])


def test_common_columns_come_first_and_rare_ones_by_their_tiles() -> None:
    first = jnp.asarray([0, 9, 3, 0, 9, 2, 2, 3], jnp.int32)
    last = jnp.asarray([8, -1, 3, 7, -1, 2, 5, 7], jnp.int32)
    order = np.asarray(column_screen.by_tiles(column_screen.Spans(first, last), 8))
    # 0 to 8, 0 to 7, 3 to 7; then those of less than five tiles: 2, 2 to 5, 3
    assert order.tolist() == [0, 3, 7, 5, 6, 2, 8 + 6, 8 + 7]


def test_a_tile_is_visited_where_a_column_of_it_is_active() -> None:
    """By the definition, over blocks of 256 columns; the first block, with the mean row, everywhere; and no block with
    columns nowhere."""
    rng, tiles, v = np.random.default_rng(6), 16, 4096
    first = rng.integers(0, tiles, v)
    last = np.where(rng.random(v) < 0.2, np.minimum(first + rng.integers(0, 3, v), tiles - 1), -1)
    spans = column_screen.Spans(jnp.asarray(first, jnp.int32), jnp.asarray(last, jnp.int32))
    index = jnp.concatenate([jnp.asarray([2 * v]), column_screen.by_tiles(spans, 1100)])
    count = int((last >= 0).sum())
    assert 700 < count < 1000
    every = all_of(tiles * 128, 1101, 14 * 128 - 5, count + 1)
    got = np.asarray(column_screen.met(spans, index, every).tiles)
    want = np.zeros((tiles, 5), bool)
    for at, column in enumerate(np.asarray(index)):
        if column < v:
            want[first[column] : last[column] + 1, at // 256] = True
    want[:, 0] = True
    want[14:] = want[:, -(-(count + 1) // 256) :] = False
    want[0] |= ~want.any(0) & (np.arange(5) * 256 <= count)
    np.testing.assert_array_equal(got, want)
    assert got.mean() < 0.6 and not got[13, 1]


# -- products whose extents the device knows --------------------------------------------------------------------------


def bf16(rng: np.random.Generator, *shape: int) -> Any:
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)


@pytest.mark.parametrize(("left_deep", "right_deep"), [(False, True), (True, True), (False, False)])
def test_a_product_is_as_large_as_the_device_says(left_deep: bool, right_deep: bool) -> None:
    """Ragged extents of a larger array whose rest is NaN; what lies beyond them is not touched."""
    rng, (r, c, d) = np.random.default_rng(0), (150, 260, 130)
    left, right = bf16(rng, r, d), bf16(rng, c, d)

    def within(x: Any, rows: int, depth: int, deep: bool) -> Any:
        """Zeros up to whole tiles of 64, and NaN beyond."""
        whole = jnp.full((rows, depth), jnp.nan, jnp.bfloat16)
        whole = whole.at[:, : -(-d // 64) * 64].set(0).at[: x.shape[0], :d].set(x)
        return whole.T if deep else whole

    arrays = within(left, 320, 256, left_deep), within(right, 320, 256, right_deep)
    into = jnp.full((320, 320), 7.0, jnp.bfloat16)

    @jax.jit
    def run(left: Any, right: Any, into: Any, *live: Any) -> Any:
        deep = dict(left_deep=left_deep, right_deep=right_deep, interpret=True)
        return dynamic_matmul.product(left, right, live, **deep), dynamic_matmul.product(
            left, right, live, into=into, **deep
        )

    want = f64(left) @ f64(right).T
    for got in run(*arrays, into, *map(jnp.int32, (r, c, d))):
        np.testing.assert_allclose(f64(got)[:r, :c], want, rtol=2.0**-8, atol=1e-3)
    assert (got[256:] == 7).all()  # beyond whole tiles
    for nothing in ((0, c, d), (r, c, 0)):
        assert (run(*arrays, into, *map(jnp.int32, nothing))[1] == 7).all()


@pytest.mark.parametrize("shape", [(320, 320), (256, 256)])
def test_a_product_is_added_if_the_device_says_so(shape: tuple[int, int]) -> None:
    """In sizes that are no whole tiles, too."""
    rng, (r, c) = np.random.default_rng(2), shape
    left, right, into = bf16(rng, 64, r), bf16(rng, 64, c), bf16(rng, r, c)

    @jax.jit
    def run(into: Any, add: Any) -> Any:
        return dynamic_matmul.product(
            left, right, (r, c, 64), left_deep=True, right_deep=True, into=into, add=add, interpret=True
        )

    want = f64(left).T @ f64(right)
    np.testing.assert_allclose(f64(run(into * jnp.nan, False)), want, rtol=2.0**-8, atol=1e-3)
    np.testing.assert_allclose(f64(run(into, True)), want + f64(into), rtol=2.0**-8, atol=1e-3)


@pytest.mark.parametrize("by_columns", [False, True])
def test_a_product_by_lists(by_columns: bool) -> None:
    """Each block of 256 columns, or rows, sums over the tiles of 128 that its list names, in the lists' own order; what
    no list names is NaN. One operand lies in slots."""
    rng, (k, n, h) = np.random.default_rng(4), (700, 512, 192)
    visited = np.array([[1, 0, 1], [1, 1, 0], [1, 0, 0], [1, 0, 1]], bool)  # [token tiles, column tiles]
    x, states = bf16(rng, n, k), bf16(rng, n, h)
    seen = np.repeat(np.repeat(visited, 128, 0), 256, 1)[:, :k]
    want = np.where(seen, f64(x), 0).T @ f64(states)
    whole = jnp.pad(jnp.where(seen, x, jnp.nan), ((0, 0), (0, 768 - k)))  # in whole tiles of the depth
    holes = in_slots(whole, first=2, spare=1)

    @jax.jit
    def run(array: Any, states: Any, visited: Any, count: Any) -> Any:
        lists = dynamic_matmul.Lists(Visits(visited).by_columns(), count, 256, 128, by_columns)
        pair, live, shape = (holes.of(array), states), (0, h, n), (k, h)
        if by_columns:
            pair, live, shape = pair[::-1], (h, 0, n), shape[::-1]
        deep = dict(left_deep=True, right_deep=True, interpret=True)
        return dynamic_matmul.product(*pair, live, lists=lists, shape=shape, **deep)

    got = f64(run(holes.array, states, visited, jnp.int32(3)))
    np.testing.assert_allclose(got.T if by_columns else got, want, rtol=2.0**-8, atol=2e-2)

    @jax.jit
    def rows(array: Any, right: Any, visited: Any, order: Any) -> Any:
        lists = dynamic_matmul.Lists(Visits(visited).by_tokens()[order], order.size, 128, 256, behind=1)
        how = dict(right_deep=True, wide=True, interpret=True)
        return dynamic_matmul.product(holes.of(array), right, (0, h, 0), lists=lists, shape=(n - 128, h), **how)

    head = bf16(rng, k, h)
    got = rows(holes.array, head, visited, jnp.asarray([3, 1]))  # tiles 0 and 2 are left out
    want, own = (np.where(seen, f64(x), 0) @ f64(head))[128:], np.arange(n - 128) // 128 != 1
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(f64(got)[own], want[own], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("count", [0, 1, 129, 300])
def test_a_deep_product_in_parts(count: int) -> None:
    """However many rows there are: the parts add up, and rows behind them are zero."""
    rng = np.random.default_rng(1)
    left, right = bf16(rng, 304, 640), bf16(rng, 640, 192)
    rows = -(-count // 128) * 128
    slots = in_slots(left.at[rows:].set(jnp.nan))

    @jax.jit
    def run(array: Any, n: Any) -> Any:
        return dynamic_matmul.in_parts(slots.of(array), right, 304, (n, 192, 640), right_deep=True, interpret=True)

    got = f64(run(slots.array, jnp.int32(count)))
    np.testing.assert_allclose(got[:count], (f64(left) @ f64(right))[:count], rtol=1e-5, atol=1e-4)
    assert got.shape == (304, 192) and (got[rows:] == 0).all()


def test_parts_of_the_depth_are_as_many_as_there_are_blocks_for() -> None:
    t = tiles_of(480, 4096, 2374)
    assert (t.blocks, tiles_of(480, 4096, 1).blocks) == (132, 4 * 16)


@pytest.mark.parametrize(("left_deep", "right_deep"), [(False, True), (True, True), (False, False)])
def test_a_product_lowers_for_cuda(left_deep: bool, right_deep: bool) -> None:
    def run(left: Any, right: Any, into: Any, n: Any) -> Any:
        deep = dict(left_deep=left_deep, right_deep=right_deep, add=n > 7 if left_deep else None)
        return dynamic_matmul.product(left, right, (n, n, n), into=into, **deep)

    assert "output_operand_alias" in for_cuda(run, *[shape(1024, 1024)] * 3, shape(dtype=jnp.int32))


# -- the screen ------------------------------------------------------------------------------------------------------


guess = jax.jit(column_screen.guess)


def flattened(case: Case, **numbers: float) -> Problem:
    t = LogitTransform(**{k: jnp.float32(x) for k, x in numbers.items()})
    h, y = case.hidden.reshape(-1, WIDTH), jnp.asarray(case.targets.reshape(-1), jnp.int32)
    arrays = jnp.asarray(h), jnp.asarray(case.lm_head), y
    return head_problem(*arrays, transform=t, vocab_size=VOCAB, interpret=True, chunk=CHUNK)


def guesses(case: Case, before: Any = None, rows: Any = True, **numbers: float) -> tuple[np.ndarray, Any]:
    p = flattened(case, **numbers)
    b = guess(p, jnp.broadcast_to(jnp.asarray(rows), p.targets.shape), before)
    s = oracle.linear_token_stats(np.asarray(p.h), case.lm_head, np.asarray(p.targets), **numbers)
    return np.asarray(b, np.float64), s


def test_a_guess_from_a_few_columns_is_at_most_the_logsumexp() -> None:
    for numbers in ({}, dict(temperature=0.7, softcap=8.0, scale=1.5)):
        b, s = guesses(calibrated(jnp.bfloat16), **numbers)
        assert (b <= s.lse + 1e-4).all()
        assert numbers or np.median(s.lse - b) < 0.5  # a few columns have most of the mass; not under a softcap


def test_guess_and_screen_by_the_definition() -> None:
    """The guess is the logsumexp over the few columns, or the target's logit; the screen, times what scales a swept
    logit, is that and the threshold, for every way to change logits."""
    case, rows = calibrated(jnp.bfloat16), jnp.arange(calibrated(jnp.bfloat16).targets.size) % 4 != 1
    x = f64(case.hidden).reshape(-1, WIDTH) @ f64(case.lm_head).T
    for numbers in ({}, dict(temperature=0.7, softcap=8.0, scale=1.5)):
        p = dataclasses.replace(flattened(case, **numbers), tolerance=jnp.float32(TOLERANCE))
        few, y = np.asarray(column_screen.few_columns(p, rows)), np.asarray(p.targets)
        assert np.isin(y[np.asarray(rows)], few).all() and len(set(few)) == len(few) == VOCAB // 8
        z = x * numbers.get("scale", 1.0)
        z = (8.0 * np.tanh(z / 8.0) if numbers else z) / numbers.get("temperature", 1.0)
        lse = np.log(np.exp(z[:, few[few < VOCAB]]).sum(1))
        want = np.maximum(np.where(rows, lse, -np.inf), z[np.arange(y.size), y])
        np.testing.assert_allclose(guess(p, rows, None), want, atol=2e-5)
        k = 8.0 / 0.7 if numbers else 1.0  # swept: tanh(x scale / softcap)
        edge = np.where(rows, (want + np.log(TOLERANCE * 2.0**-5.5 * np.sqrt(rows.sum() / 4096))) / k, np.inf)
        np.testing.assert_allclose(column_screen.screen_of(p, rows, None), edge, atol=2e-5)


def test_a_guess_from_known_log_probabilities_is_the_logsumexp() -> None:
    case = calibrated(jnp.bfloat16)
    _, s = guesses(case)
    before = jnp.asarray(s.logp, jnp.float32)
    np.testing.assert_allclose(guesses(case, before)[0], s.lse, atol=1e-4)
    b = guesses(case, before.at[3].set(jnp.nan))[0]  # a value that is missing: the target's logit
    np.testing.assert_allclose(b[3], s.lse[3] + s.logp[3], atol=1e-4)


def test_rows_that_let_everything_through_choose_no_columns() -> None:
    p, rule = ragged_problem(), chunk_rule(333)
    words = np.zeros((6, p.n, 8), np.int32)
    words[0, 0, 2] = 1  # row 0: column 8 * 7 + 2
    words[:, 1] = -1  # row 1: all of them
    rows = np.arange(p.n) < 2
    spans, apart = jax.jit(lambda words, rows: column_screen.active_columns(rule, words, rows, p, SMALL.columns))(
        words, rows
    )
    assert set(np.flatnonzero(spans.active)) == {58, *np.asarray(p.targets[:2]).tolist()}
    assert apart == 1


def test_spans_by_the_definition() -> None:
    """The first and the last tile of 128 tokens in which a column passes, or is a target."""
    p, rule, rng = ragged_problem(), chunk_rule(333), np.random.default_rng(5)
    passes = rng.random((p.n, 333)) < 0.02
    rows = np.arange(p.n) != 150
    words = np.zeros((6, p.n, 8), np.int64)
    for t, v in np.argwhere(passes):
        words[v // 64, t, v % 8] |= 1 << (7 - (v % 32 // 8 * 2 + v % 64 // 32))  # pieces of 32 columns
    run = jax.jit(lambda words, rows: column_screen.active_columns(rule, words, rows, p, SMALL.columns))
    spans, apart = run(words.astype(np.int32), rows)
    limit = next(n for n in (8, 32, 128) if (passes[rows].sum(1) > max(rule.most // n, 1)).sum() == apart)
    seen = passes & (passes.sum(1) <= max(rule.most // limit, 1))[:, None]
    seen[np.arange(p.n), np.asarray(p.targets)] = True
    tiles = np.stack([seen[:128][rows[:128]].any(0), seen[128:][rows[128:]].any(0)])
    np.testing.assert_array_equal(spans.last, np.where(tiles[1], 1, np.where(tiles[0], 0, -1)))
    np.testing.assert_array_equal(spans.first, np.where(tiles[0], 0, np.where(tiles[1], 1, 2)))
    assert tiles.any(0).mean() < 1 and (tiles[0] != tiles[1]).any()


def test_tokens_that_are_least_sure_come_first() -> None:
    """Of those with a gradient, by what is known of them; then the other live ones and the dead, as they stand."""
    p = ragged_problem()
    rng = np.random.default_rng(7)
    kind, known = rng.integers(0, 3, p.n), -rng.exponential(size=p.n)
    p = dataclasses.replace(p, live=jnp.asarray(kind < 2))
    f = in_order(p, jnp.asarray(kind == 0), 8, by=jnp.asarray(known, jnp.float32))
    order, first = np.asarray(f.order)[: p.n], int((kind == 0).sum())
    np.testing.assert_array_equal(kind[order], np.sort(kind))
    assert f.count == first
    np.testing.assert_allclose(known[order[:first]], np.sort(known[kind == 0]), rtol=2.0**-8)
    for other in (1, 2):
        np.testing.assert_array_equal(order[kind[order] == other], np.flatnonzero(kind == other))


# -- gradients -------------------------------------------------------------------------------------------------------


@functools.cache
def grpo(kind: str, exact: bool) -> Any:
    """``((loss, metrics), (dh, dw))`` by the kernels, or by the exact chunked path, which is interpreted."""

    def run(h: Any, w: Any, y: Any, rest: Any, tolerance: Any) -> Any:
        def loss(h: Any, w: Any) -> Any:
            where = dict(backend="chunked") if exact else dict(SCREENED, sparse_backward=tolerance)
            return flat_calls.linear_grpo_loss(h, w, y, objective=OBJECTIVES[kind], chunk_size=CHUNK, **where, **rest)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(h, w)

    return in_numpy(run) if exact else jax.jit(run)


CASES = {
    "calibrated": calibrated, "flat": flat, "collapsed": collapsed, "adversarial": adversarial, "leaning": leaning
}  # fmt: skip


@functools.cache
def outcome(kind: str, name: str) -> Any:
    case = CASES[name](jnp.bfloat16)
    rest = loss_inputs(case)
    rest["mask"][:, :3] = False
    arrays = (*case.parameters(), jnp.asarray(case.targets), rest, jnp.float32(TOLERANCE))
    (value, metrics), grads = grpo(kind, False)(*arrays)
    return case, rest, (value, metrics, grads), grpo(kind, True)(*arrays)[1]


@functools.cache
def truth(kind: str, name: str) -> Any:
    """``(loss, dh, dw)`` in float64."""
    case, rest, *_ = outcome(kind, name)
    given = dict(objective=OBJECTIVES[kind], head_layout="vh", **rest)
    return oracle.linear_grpo_loss(case.hidden, case.lm_head, case.targets, **given)[:3]


def assert_true(kind: str, name: str, got: Any) -> None:
    """Gradients as good as the exact path's."""
    for label, a, b, t in zip(("dh", "dw"), got, outcome(kind, name)[3], truth(kind, name)[1:], strict=True):
        assert np.linalg.norm(t) > 0
        assert_as_good(f"{name} {label}", a, b, t)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["calibrated", "flat", *(pytest.param(n, marks=pytest.mark.slow) for n in ("collapsed", "adversarial", "leaning"))],
)
@pytest.mark.parametrize("kind", ["clip", pytest.param("gspo", marks=pytest.mark.slow)])
def test_gradients_are_as_good_as_the_exact_path_s(kind: str, name: str) -> None:
    value, metrics, got = outcome(kind, name)[2]
    np.testing.assert_allclose(value, truth(kind, name)[0], rtol=1e-5, atol=1e-6)
    assert name != "calibrated" or 0 < metric_values(metrics)["hard_rows"] < 0.3
    assert_true(kind, name, got)


def clip_loss(case: Case, rest: Any, **options: Any) -> Any:
    """``loss(h, w)`` with metrics, by the kernels."""
    where = dict(SCREENED, sparse_backward=TOLERANCE, objective=OBJECTIVES["clip"], **options)
    return lambda h, w: flat_calls.linear_grpo_loss(h, w, jnp.asarray(case.targets), **where, **rest)


def gradients_again(name: str, dense: bool = False, **options: Any) -> None:
    """The gradients of :func:`outcome` by another way; ``dense``: in which all tokens go through all columns."""
    case, rest, (_, metrics, _), _ = outcome("clip", name)

    def through_all_columns(metrics: Any) -> float:
        m = metric_values(metrics)
        return float(m["hard_rows"] + m["dense_chunks"])

    got, own = jax.jit(jax.grad(clip_loss(case, rest, **options), (0, 1), has_aux=True))(*case.parameters())
    assert_true("clip", name, got)
    # Where every token meets all active columns no more are hard.
    assert 0 < through_all_columns(own) <= (1 if dense else through_all_columns(metrics))
    assert metric_values(own)["dense_chunks"] == (dense or metric_values(metrics)["dense_chunks"])


def goes_at_once() -> tuple[int, int]:
    """Active columns and hard rows of a case that goes at once as it is."""
    case, rest, (_, metrics, _), _ = outcome("clip", "calibrated")
    m = {k: float(v) for k, v in metric_values(metrics).items()}
    h, y = jnp.asarray(case.hidden.reshape(-1, WIDTH)), jnp.asarray(case.targets.reshape(-1))
    p = head_problem(h, jnp.asarray(case.lm_head), y, transform=LogitTransform(), vocab_size=VOCAB)
    columns, hard = round(m["active_columns"] * VOCAB), round(m["hard_rows"] * rest["mask"].sum())
    sizes = sizes_of(p, column_screen.slab_rule(VOCAB))
    assert columns < sizes.columns and 3 < hard < sizes.hard
    return columns, hard


def gives_nan(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may come of one of the ways."""
    way = getattr(module, name)

    def spoilt(x: Any) -> Any:
        return x * jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else x

    monkeypatch.setattr(module, name, lambda *args: jax.tree.map(spoilt, way(*args)))


def has_room(monkeypatch: pytest.MonkeyPatch, columns: int | None = None, hard: int | None = None) -> None:
    if hard is not None:
        monkeypatch.setattr(dweight_buffer, "GROUP", hard)
        monkeypatch.setattr(dweight_buffer, "GROUPS", 1)
    if columns is not None:
        way = dweight_buffer.sizes_of
        monkeypatch.setattr(
            dweight_buffer, "sizes_of", lambda p, rule: dataclasses.replace(way(p, rule), columns=columns)
        )


@pytest.mark.slow  # 18 seconds; with more room it is tested above
def test_with_just_enough_room_all_goes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns up to the mean row's, in whole tiles, hard rows up to the last; and no other way has a part in it."""
    columns, hard = goes_at_once()
    has_room(monkeypatch, columns=-(-(columns + 1) // 256) * 256, hard=hard)
    gives_nan(sparse_backward, "_in_column_chunks", monkeypatch)
    gradients_again("calibrated", chunk_size=CHUNK)


@pytest.mark.slow  # 20 seconds; one group is tested above, and what a product adds by itself
def test_hard_rows_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first writes dW, the others add to it; of the last there is a part."""
    _, hard = goes_at_once()
    size = -(-2 * hard // 5)
    assert 2 * size < hard < 3 * size
    monkeypatch.setattr(dweight_buffer, "GROUP", size)
    gives_nan(sparse_backward, "_in_column_chunks", monkeypatch)
    gradients_again("calibrated", chunk_size=CHUNK)


@pytest.mark.slow  # 18 seconds; a flat policy goes through all columns by the same loop
def test_more_columns_than_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, with dW of all of them side by side until they are moved; the few hard rows as ever. What was done
    before that was seen leaves nothing behind."""
    columns, _ = goes_at_once()
    assert columns >= 256
    has_room(monkeypatch, columns=256)
    gives_nan(sparse_backward, "_dhidden", monkeypatch)
    gradients_again("calibrated", chunk_size=CHUNK)


@pytest.mark.slow  # 20 seconds; that all tokens go through all columns is tested with a flat policy, too
def test_more_hard_rows_than_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens go through all columns."""
    _, hard = goes_at_once()
    has_room(monkeypatch, hard=hard - 1)
    gives_nan(sparse_backward, "_dhidden", monkeypatch)
    gradients_again("calibrated", dense=True, chunk_size=CHUNK)


@pytest.mark.slow  # 30 seconds; the kernels' own tests have both layouts
@pytest.mark.parametrize("at_a_time", ["at once", "in chunks"])
def test_other_heads(at_a_time: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``[H, V]`` and ``[V, H]`` with a bias, a frozen one and one alone: as near the exact path's gradients as
    ``[V, H]`` without a bias is."""
    if at_a_time == "at once":
        gives_nan(sparse_backward, "_in_column_chunks", monkeypatch)
    else:
        has_room(monkeypatch, columns=256)
        gives_nan(sparse_backward, "_dhidden", monkeypatch)
    case, rest = calibrated(jnp.bfloat16), loss_inputs(calibrated(jnp.bfloat16))
    h, w = case.parameters()
    bias = jnp.asarray(np.random.default_rng(0).normal(size=VOCAB) * 0.1, jnp.float32)
    for layout, weight, wanted in (("vh", w, (0, 1, 2)), ("hv", w.T, (0, 1, 2)), ("vh", w, (0,)), ("vh", w, (1,))):

        def run(where: dict[str, Any], layout: str = layout, weight: Any = weight, wanted: Any = wanted) -> Any:
            def loss(*x: Any) -> Any:
                y = jnp.asarray(case.targets)
                given = dict(objective=OBJECTIVES["clip"], head_layout=layout, chunk_size=CHUNK, bias=x[2])
                return flat_calls.linear_grpo_loss(*x[:2], y, **given, **where, **rest)[0]

            return jax.jit(jax.grad(loss, wanted))(h, weight, bias)

        for a, b in zip(run(dict(SCREENED, sparse_backward=TOLERANCE)), run(dict(backend="chunked")), strict=True):
            assert np.linalg.norm(f64(a) - f64(b)) < 2.0**-7 * np.linalg.norm(f64(b)), (layout, wanted)


@pytest.mark.slow  # 20 seconds; that a flat policy's gradients are right is tested above
def test_a_flat_policy_goes_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns would fit, since it has none but the targets; but most of its rows choose none, so it is dense."""
    m = {k: float(v) for k, v in metric_values(outcome("clip", "flat")[2][1]).items()}
    assert m["dense_chunks"] == 1 and m["backward_columns"] == 1 and m["hard_rows"] == 0
    gives_nan(sparse_backward, "_dhidden", monkeypatch)
    gradients_again("flat", chunk_size=CHUNK)


def test_every_column_has_one_turn_and_dx_none_of_the_finished_rows() -> None:
    """For any number of columns and tokens, as they follow one another: chunks shrink where dx stands in dW's place."""
    for n, width, vocab in ((8192, 4096, 151936), (16384, 1536, 151936), (100, 64, 8192), (640, 128, 1000)):
        arrays = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((n, width), (vocab, width)))
        y = jax.ShapeDtypeStruct((n,), jnp.int32)
        p = head_problem(*arrays, y, transform=LogitTransform(), vocab_size=vocab)
        sizes = sizes_of(p, column_screen.slab_rule(vocab))
        assert bool(sizes.in_dw) == (n != 640)
        assert sizes.holds(jnp.int32(sizes.columns - 1)) and not sizes.holds(jnp.int32(sizes.columns))  # the mean row's
        for columns in (1, 300, vocab // 3, vocab):
            plan = sparse_backward._ColumnOrder(sizes, width, bool(sizes.in_dw), jnp.int32(columns))
            begin, turns = -1 if plan.last else 0, []
            while begin < plan.end:
                first, tiles, slot = (int(x) for x in plan.turn(jnp.int32(begin)))
                turns.append((first, tiles))
                assert 0 < tiles <= sizes.across
                if sizes.in_dw:
                    assert slot >= 0 and slot + tiles * sizes.token_tiles <= sizes.in_dw
                    assert slot * 128 * 256 >= max(begin, 0) * 256 * width
                begin = 0 if begin < 0 else begin + tiles
            covered = sorted(t for first, tiles in turns for t in range(first, first + tiles))
            assert covered == list(range(-(-columns // 256))), (n, columns)
    assert len(turns) < 40


@pytest.mark.parametrize(
    ("tokens", "hard", "live"), [(5, 2, (5, 2)), (5, 2, (3, 1)), (64, 12, (61, 5)), (1, 1, (1, 0))]
)
def test_dh_of_every_tile_is_in_one_of_the_halves(tokens: int, hard: int, live: tuple[int, int]) -> None:
    """Of tokens, and of hard rows behind them; those first."""
    sizes = dweight_buffer.Sizes(256, hard * 128, tokens * 128, 0)
    count = dweight_buffer.Live(*(jnp.int32(x) for x in (live[0] * 128 - 5, 9, max(live[1] * 128 - 7, 0))))
    tiles = -(-(tokens + hard) // 2)
    listed, seen = jnp.arange(tokens + hard, dtype=jnp.int32)[:, None], []
    for begin in (0, tiles):
        lists = dweight_buffer._of_tokens(listed, count, sizes, begin, tiles)
        own = np.asarray(lists.table)[: int(lists.count), 0]
        assert lists.behind == begin and ((own >= begin) & (own < begin + tiles)).all()
        assert (np.diff((own >= tokens).astype(int)) <= 0).all()
        seen += own.tolist()
    assert sorted(seen) == [*range(live[0]), *range(tokens, tokens + live[1])]


def test_rows_side_by_side_are_spread() -> None:
    """To where they belong, a few at a time and in the same memory."""
    rng, vocab = np.random.default_rng(0), 700
    for share in (0.0, 0.1, 0.9, 1.0):
        chosen = rng.random(vocab) < share
        rows = rng.normal(size=(vocab, 8)).astype(np.float32)
        index = np.concatenate([np.flatnonzero(chosen), vocab + np.arange(vocab + 64)])
        want = np.zeros_like(rows)
        want[chosen] = rows[: chosen.sum()]
        got = jax.jit(sparse_backward._spread, static_argnums=4)(rows, index.astype(np.int32), chosen, chosen.sum(), 64)
        np.testing.assert_array_equal(got, want)


def test_a_sum_in_two_numbers_has_the_digits_of_both() -> None:
    rng = np.random.default_rng(1)
    parts = jnp.asarray(rng.normal(size=(40, 1000)), jnp.float32)

    @jax.jit
    def run(parts: Any) -> Any:
        def add(pair: Any, more: Any) -> Any:
            return sparse_backward._added(*pair, more), None

        nothing = jnp.zeros_like(parts[0], jnp.bfloat16)
        return jax.lax.scan(add, (nothing, nothing), parts)[0]

    total, lacks = run(parts)
    want = f64(parts).sum(0)
    np.testing.assert_allclose(f64(total) + f64(lacks), want, atol=2.0**-10)
    assert total.dtype == jnp.bfloat16 and np.abs(f64(total) - want).max() > 2.0**-6


@pytest.mark.parametrize("known", [True, False])
def test_a_flat_policy_is_seen_before_the_forward_matmul(known: bool) -> None:
    for name, seen in (("flat", True), ("calibrated", False), ("collapsed", False)):
        case = CASES[name](jnp.bfloat16)
        p, s = flattened(case), guesses(case)[1]
        rows = jnp.arange(p.n) % 4 != 1
        before = jnp.asarray(s.logp, jnp.float32) if known else None
        assert bool(jax.jit(column_screen.looks_flat)(p, rows, before)) is seen, name


@pytest.mark.slow  # 40 seconds, most of them the exact path's row kernel in the interpreter
def test_with_room_for_logits_a_flat_policy_takes_the_exact_path(monkeypatch: pytest.MonkeyPatch) -> None:
    gives_nan(sparse_backward, "gradients", monkeypatch)
    case, rest, *_ = outcome("clip", "flat")
    loss = clip_loss(case, rest, memory_budget=CHUNK * VOCAB * 8)
    (_, metrics), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*case.parameters())
    values = {k: float(v) for k, v in metric_values(metrics).items()}
    assert values["dense_chunks"] == values["backward_columns"] == 1 and values["left_out_mass_max"] == 0
    for a, b in zip(grads, outcome("clip", "flat")[3], strict=True):
        assert np.linalg.norm(f64(a) - f64(b)) < 2.0**-8 * np.linalg.norm(f64(b))


@pytest.mark.slow  # compiles one more interpreted program, of both ways
def test_with_room_for_logits_a_sparse_policy_stays_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome("clip", "calibrated")  # as it is

    def spoilt(way: Any) -> Any:
        def run(*args: Any) -> Any:
            out, report, total = way(*args)
            return out, report, jax.tree.map(lambda x: x * jnp.nan, total)

        return run

    for exact in (stored_dx.StoredDx, backend.MosaicGpu):
        monkeypatch.setattr(exact, "gradients_in_forward", spoilt(exact.gradients_in_forward))
    gradients_again("calibrated", memory_budget=CHUNK * VOCAB * 8)


def test_what_it_reports_is_true() -> None:
    """Of the data of a trained policy's kind: few columns, few hard rows, and what is left out is what it says."""
    case, rest, (_, metrics, _), _ = outcome("clip", "calibrated")
    m = {k: float(v) for k, v in metric_values(metrics).items()}
    assert m["dense_chunks"] == 0 and 0 < m["active_columns"] < 0.25 and m["hard_rows"] < 0.3
    assert 0 < m["left_out_mass_max"] <= TOLERANCE
    assert float(metric_values(outcome("clip", "flat")[2][1])["dense_chunks"]) == 1  # and not hard rows, one and all
    # by the definition: columns that pass the threshold by the known log-probabilities, and the targets
    p, y, live = probabilities(case), case.targets.reshape(-1), rest["mask"].reshape(-1)
    logp = np.log(p[np.arange(y.size), y])
    believed = p * np.exp(logp - f64(rest["old_logp"]).reshape(-1))[:, None] ** -1  # exp(z - (z_y - old))
    believed[np.arange(y.size), y] = 0  # a row's own target is active in any case, and not counted
    passes = (believed > TOLERANCE * float(column_screen.threshold(live)))[live]
    sets = [passes[passes.sum(1) <= chunk_rule(VOCAB).most // limit].any(0) for limit in (8, 32, 128)]
    shares = [(s | np.isin(np.arange(VOCAB), y[live])).mean() for s in sets]
    assert min(abs(s - m["active_columns"]) for s in shares) < 2e-3, shares


@pytest.mark.parametrize("vocab", [2048, 32000, 50304, 102400, 128256, 151936, 256000])
def test_dx_fits_into_the_place_of_dw(vocab: int) -> None:
    """In whole tiles, with rows for all tokens, at every width; else it has memory of its own."""
    for width in (64, 896, 1536, 2304, 3584, 4096, 5120, 8192):
        for n in (100, 8192, 16384):
            h, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((n, width), (vocab, width)))
            y = jax.ShapeDtypeStruct((n,), jnp.int32)
            p = head_problem(h, w, y, transform=LogitTransform(), vocab_size=vocab)
            sizes = sizes_of(p, column_screen.slab_rule(vocab))
            tiles = sizes.rows // 128 * sizes.across
            assert sizes.tokens >= n and sizes.rows >= sizes.tokens + sizes.hard and 0 < sizes.hard <= n + 7
            assert sizes.columns % 256 == 0 and sizes.columns * width * 2 <= max(dweight_buffer.PART, 512 * width)
            turned = jax.ShapeDtypeStruct((width, vocab), jnp.bfloat16)
            q = head_problem(h, turned, y, layout="hv", transform=LogitTransform(), vocab_size=vocab)
            assert sizes_of(q, column_screen.slab_rule(vocab)).in_dw == 0
            if sizes.in_dw:
                assert tiles <= sizes.in_dw and sizes.in_dw * 128 * 256 <= vocab * width and vocab * width % 2048 == 0
            else:
                small = vocab * width < tiles * 128 * 256 or (n / 128 + 2) * 128 / width > sizes.across
                assert small or vocab * width % 2048


@pytest.mark.parametrize("frozen", [False, True])
def test_dx_is_no_larger_than_it_must_be_without_dw(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in the place of dW, an array of its size; where there is none, in one of its own."""
    case, seen = calibrated(jnp.bfloat16), []
    way = sparse_backward._dlogits

    def noted(*args: Any) -> Any:
        seen.append(args[2].array.shape)
        return way(*args)

    has_room(monkeypatch, columns=512)
    monkeypatch.setattr(sparse_backward, "_dlogits", noted)

    loss = clip_loss(case, loss_inputs(case), chunk_size=CHUNK)
    jax.eval_shape(jax.grad(loss, 0 if frozen else (0, 1), has_aux=True), *case.parameters())
    # 256 tokens, and as many hard rows once more
    assert seen == [(512 * 2 if frozen else VOCAB * WIDTH // 256, 256)] * 2


@pytest.mark.parametrize(
    ("n", "chunk"),
    [(260, 16), (250, 64), (1, 64), (700, 48), (8200, 700), (100, 1), (100, 9), (1, 1), (129, 31), (9001, 3)],
)
def test_any_number_of_tokens_goes_at_once(n: int, chunk: int) -> None:
    """Whole visits are at least as many tokens as a group of hard rows; with a bias and an entropy bonus."""
    h, w = (jax.ShapeDtypeStruct((1, n, 128), jnp.bfloat16), jax.ShapeDtypeStruct((32768, 128), jnp.bfloat16))
    bias, o = jax.ShapeDtypeStruct((32768,), jnp.bfloat16), Objective(entropy_coef=0.1)
    y, a = jax.ShapeDtypeStruct((1, n), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.float32)

    def loss(h: Any, w: Any, bias: Any, y: Any, a: Any) -> Any:
        common = dict(advantages=a, objective=o, sparse_backward="auto", chunk_size=chunk, **SCREENED)
        return flat_calls.linear_grpo_loss(h, w, y, bias=bias, **common)[0]

    dh, dw, dbias = jax.eval_shape(jax.grad(loss, (0, 1, 2)), h, w, bias, y, a)
    assert (dh.shape, dw.shape, dbias.shape) == (h.shape, w.shape, bias.shape)


@pytest.mark.slow  # 9 seconds; test_any_number_of_tokens_goes_at_once traces the same program
@pytest.mark.parametrize("chunk", [1, 9])
def test_small_chunks_are_as_good_as_the_exact_path(chunk: int) -> None:
    """100 tokens, with a bias and an entropy bonus, against float64."""
    rng, (n, width, vocab) = np.random.default_rng(0), (100, 64, 1024)
    h, w = realistic.realistic_head(n, width, vocab, 0, jnp.bfloat16)
    y = np.asarray(realistic.sample_targets(jnp.asarray(h), jnp.asarray(w), 0)).reshape(4, 25)
    h, w, bias = h.reshape(4, 25, width), w, (0.1 * rng.normal(size=vocab)).astype(jnp.bfloat16)
    rest = dict(advantages=rng.normal(size=4).astype(np.float32), mask=rng.random((4, 25)) < 0.9)
    o = Objective(aggregation="dapo", entropy_coef=0.125)

    def gradients(where: dict[str, Any]) -> Any:
        def loss(*x: Any) -> Any:
            given = dict(objective=o, head_layout="vh", chunk_size=chunk, bias=x[2])
            return flat_calls.linear_grpo_loss(*x[:2], y, **given, **where, **rest)[0]

        return jax.jit(jax.grad(loss, (0, 1, 2)))(*map(jnp.asarray, (h, w, bias)))

    got, exact = gradients(dict(SCREENED, sparse_backward=TOLERANCE)), gradients(dict(backend="chunked"))
    truth = oracle.linear_grpo_loss(h, w, y, bias=bias, objective=o, head_layout="vh", **rest)[1:]
    for label, a, b, t in zip(("dh", "dw", "dbias"), got, exact, truth, strict=True):
        assert np.linalg.norm(t) > 0
        assert_as_good(label, a, b, t)


def test_more_padding_than_a_tile_of_columns() -> None:
    """The screen has bits for the tiles that real columns have; those of whole tiles of padding are none."""
    h, w = (jax.ShapeDtypeStruct((1, 100, 128), jnp.bfloat16), jax.ShapeDtypeStruct((2048, 128), jnp.bfloat16))
    y, a = jax.ShapeDtypeStruct((1, 100), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.float32)

    def loss(h: Any, w: Any, y: Any, a: Any) -> Any:
        common = dict(advantages=a, sparse_backward="auto", vocab_size=1500, **SCREENED)
        return flat_calls.linear_grpo_loss(h, w, y, **common)[0]

    assert jax.eval_shape(jax.grad(loss, 1), h, w, y, a).shape == w.shape
    bits = column_screen.passed(jnp.full((6, 8), -1, jnp.int32), 2048, 256)
    np.testing.assert_array_equal(bits, np.arange(2048) < 6 * 256)


def test_where_logits_are_stored() -> None:
    """Ragged widths and vocabularies; and where nothing can be added to dW there is one group of hard rows."""

    def problem(n: int, width: int, vocab: int) -> Any:
        h, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((n, width), (vocab, width)))
        y = jax.ShapeDtypeStruct((n,), jnp.int32)
        return head_problem(h, w, y, transform=LogitTransform(), vocab_size=vocab)

    def hard(vocab: int) -> int:
        return sizes_of(problem(1024, 64, vocab), column_screen.slab_rule(vocab)).hard

    assert hard(20032) == 768 and hard(20040) == 384
    assert sparse.not_screened_because(problem(1024, 64, 2048)) is None
    for width, vocab in ((72, 2048), (64, 2044)):
        assert "multiples of 64 and 8" in str(sparse.not_screened_because(problem(1024, width, vocab)))


def test_it_says_what_it_does_and_where_it_cannot() -> None:
    h, w, y = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((512, 64), jnp.bfloat16), jnp.zeros((8,), jnp.int32)
    e = flat_calls.explain(flat_calls.linear_logprobs, h, w, y, sparse_backward="auto", **SCREENED)
    assert e.backend == "mosaic_gpu" and "screen" in e.way and e.fused_statistics
    e = flat_calls.explain(
        flat_calls.linear_logprobs, h, w, y, sparse_backward="auto", logits_dtype="bfloat16", **SCREENED
    )
    assert "no screen in the forward matmul: rounded logits" in e.way
    room = dict(memory_budget=4 * 512 * 8, advantages=jnp.ones(8))
    e = flat_calls.explain(
        flat_calls.linear_grpo_loss, h[:, None], w, y[:, None], sparse_backward="auto", **room, **SCREENED
    )
    assert "exact path" in e.way and e.tiles["chunk_if_flat"] == 4
    e = flat_calls.explain(flat_calls.linear_logprobs, h, w, y, sparse_backward=2.0**-13, **SCREENED)
    assert "no screen in the forward matmul: a tolerance of" in e.way


@pytest.mark.slow  # compiles two more interpreted programs
def test_bits_do_not_depend_on_the_gradient() -> None:
    case = calibrated(jnp.bfloat16)
    h, w, y = *case.parameters(), jnp.asarray(case.targets)

    def logp(h: Any) -> Any:
        return flat_calls.linear_logprobs(h, w, y, sparse_backward=TOLERANCE, **SCREENED).logp

    assert_same_bits(jax.jit(logp)(h), jax.jit(lambda h: jax.vjp(logp, h)[0])(h))
