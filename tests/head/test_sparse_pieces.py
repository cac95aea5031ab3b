"""Pieces of the sparse backward in plain JAX: order of tokens, a guess, columns of a head, the cheapest set."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless.core.problem import Call, HeadArrays, HeadGrads, Linear, Problem
from logitless.core.row_passes import Visit, front, rows_in_parts
from logitless.core.stats import LogitTransform, StatCotangents
from logitless.head import linear
from logitless.head.sparse import active_columns, gather
from logitless.head.sparse.active_columns import Rule, expected_lse, target_logits
from logitless.head.sparse.gather import Ordered, in_order, in_their_place, mass_beside, mean_row, some

N, H, V = 11, 4, 9


def problem(layout: Any = "vh", live: np.ndarray | None = None, **transform: Any) -> Problem:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(V, H) if layout == "vh" else (H, V))
    head = HeadArrays(jnp.asarray(w, jnp.float32), jnp.asarray(rng.normal(size=V), jnp.float32), layout=layout)
    h, targets = rng.normal(size=(N, H)).astype(np.float32), rng.integers(0, V, N)
    return Problem(
        Linear(jnp.asarray(h), head), jnp.asarray(targets), LogitTransform(**transform),
        live=None if live is None else jnp.asarray(live), call=Call("test", V - 1),
    )  # fmt: skip


LIVE = np.array([1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1], bool)
FIRST = np.array([0, 1, 1, 0, 0, 0, 1, 0, 1, 0, 1], bool)
"""Of these the second is dead, and so not among the first."""
ORDER = [2, 6, 8, 10, 0, 3, 5, 7, 1, 4, 9]


def ordered(by: np.ndarray | None = None, live: np.ndarray | None = LIVE, **transform: Any) -> Ordered:
    p = problem(live=live, **transform)
    return in_order(p, jnp.asarray(FIRST), 4, by=None if by is None else jnp.asarray(by, jnp.float32))


def test_tokens_with_a_gradient_then_the_live_then_the_dead() -> None:
    f = ordered(temperature=jnp.arange(1.0, N + 1))
    assert f.order.tolist() == [*ORDER, 9] and (int(f.count), int(f.live)) == (4, 8)  # filled up to whole fours
    assert np.asarray(f.order)[np.asarray(f.place)].tolist() == list(range(N))
    assert f.p.n == 12 and f.p.live is None and f.given.n == N
    np.testing.assert_array_equal(f.p.targets, f.given.targets[f.order])
    np.testing.assert_array_equal(f.p.transform.temperature, 1 + f.order)
    hidden = np.where(np.arange(12)[:, None] < 8, f.given.h[f.order], 0)
    np.testing.assert_array_equal(f.p.h, hidden)
    np.testing.assert_array_equal(f.hidden_of(jnp.array([7, 0, 8, 11])), hidden[[7, 0, 8, 11]])
    assert f.take(jnp.arange(1, N + 1)).tolist() == [*(1 + i for i in ORDER[:8]), 0, 0, 0, 0]
    back = f.put_back(f.order)  # what stands for each token goes back to it
    assert back.tolist() == list(range(N))


def test_without_dead_tokens_every_one_is_live() -> None:
    f = ordered(live=None)
    assert int(f.live) == N and int(f.count) == 5 and f.order.tolist()[:5] == [1, 2, 6, 8, 10]


def test_the_first_by_what_is_known_of_them() -> None:
    """A NaN is what is least known; tokens that are not among the first stay as they stand."""
    by = np.array([0, -9, -1.0, -7, 0, -8, -3.0, 0, np.nan, 0, -0.5])
    assert ordered(by).order.tolist()[:N] == [8, 6, 2, 10, 0, 3, 5, 7, 1, 4, 9]
    assert ordered(np.zeros(N)).order.tolist()[:N] == ORDER


def test_a_visit_in_the_order_is_one_in_the_call() -> None:
    f = ordered()
    visit = f.in_call(Visit(jnp.array([0, 8, 10, 11, 3]), jnp.array([0, 8, 10, 11, 12])))
    assert visit.read.tolist() == [2, 1, 9, 9, 10] and visit.write.tolist() == [2, 1, 9, N, N]


def test_some_tokens_of_a_problem_and_of_a_tree() -> None:
    p = problem(live=LIVE)
    part = some(p, 3, 4)
    assert part.targets.tolist() == p.targets.tolist()[3:7] and part.live.tolist() == LIVE.tolist()[3:7]
    tree = some({"a": jnp.arange(N), "whole": jnp.arange(4)}, 5, 4)
    assert tree["a"].tolist() == [5, 6, 7, 8] and tree["whole"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("layout", ["vh", "hv"])
def test_the_target_s_logit_and_what_the_logsumexp_may_be(layout: Any) -> None:
    """Zero for a target outside the vocabulary, which its padding is, too; before a NaN is as if nothing were known."""
    p = problem(layout, temperature=0.5, softcap=3.0)
    targets = np.array([0, 7, 8, -1, 5, 4, 3, 2, 1, 0, 100])
    p = dataclasses.replace(p, targets=jnp.asarray(targets))
    w = np.asarray(p.head.weight if layout == "vh" else p.head.weight.T)
    inside = (targets >= 0) & (targets < V - 1)
    at = np.where(inside, targets, 0)
    x = np.sum(np.asarray(p.h) * w[at], axis=1) + np.asarray(p.head.bias)[at]
    want = np.where(inside, 3 * np.tanh(x / 3) / 0.5, 0)
    np.testing.assert_allclose(target_logits(p), want, rtol=1e-5, atol=1e-6)
    gathered = target_logits(p, lambda x, at: x[at]) if layout == "vh" else target_logits(p)
    np.testing.assert_allclose(gathered, want, rtol=1e-5, atol=1e-6)
    before = np.where(np.arange(N) == 4, np.nan, -2.0)
    np.testing.assert_allclose(expected_lse(p, None), want, rtol=1e-5, atol=1e-6)
    known = np.where(np.arange(N) == 4, want, want + 2)
    np.testing.assert_allclose(expected_lse(p, jnp.asarray(before)), known, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by_element", [False, True])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("layout", ["vh", "hv"])
def test_columns_are_taken_and_put_back_in_every_array(
    layout: Any, add: bool, by_element: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weight, bias and LoRA's outer factor; its inner one has no columns. None beyond the vocabulary."""
    monkeypatch.setattr(gather, "_by_element", lambda: by_element)
    rng = np.random.default_rng(1)

    def array(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    vh = layout == "vh"
    head = HeadArrays(
        array(V, H) if vh else array(H, V), array(V), array(V, 2) if vh else array(H, 2),
        array(2, H) if vh else array(2, V), layout=layout,
    )  # fmt: skip
    index = np.array([1, 4, 8, V, V + 1])
    part = gather.head_columns(head, jnp.asarray(index))

    def columns(x: Any, axis: int) -> np.ndarray:
        x = np.moveaxis(np.asarray(x), axis, 0)
        return np.moveaxis(np.concatenate([x[index[:3]], np.zeros((2, *x.shape[1:]), x.dtype)]), 0, axis)

    axis = 0 if vh else 1
    np.testing.assert_array_equal(part.weight, columns(head.weight, axis))
    np.testing.assert_array_equal(part.bias, columns(head.bias, 0))
    np.testing.assert_array_equal(part.lora_a, columns(head.lora_a, 0) if vh else head.lora_a)
    np.testing.assert_array_equal(part.lora_b, head.lora_b if vh else columns(head.lora_b, 1))

    whole = HeadGrads(head.weight, head.bias, head.lora_a, head.lora_b)
    own = HeadGrads(part.weight + 1, part.bias + 1, part.lora_a + 1, part.lora_b + 1)  # type: ignore[operator]
    put = gather.put_head_columns(whole, jnp.asarray(index), own, layout, add=add)

    def expected(x: Any, axis: int) -> np.ndarray:
        x = np.moveaxis(np.array(x), axis, 0)
        x[index[:3]] = x[index[:3]] * (2 if add else 1) + 1
        return np.moveaxis(x, 0, axis)

    np.testing.assert_allclose(put.weight, expected(head.weight, axis), rtol=1e-6)
    np.testing.assert_allclose(put.bias, expected(head.bias, 0), rtol=1e-6)
    np.testing.assert_allclose(put.lora_a, expected(head.lora_a, 0) if vh else own.lora_a, rtol=1e-6)
    np.testing.assert_allclose(put.lora_b, own.lora_b if vh else expected(head.lora_b, 1), rtol=1e-6)

    none = gather.no_head_columns(whole, part)
    assert not none.weight.any() and none.weight.shape == part.weight.shape and none.bias.shape == (5,)
    inner, outer = (none.lora_b, none.lora_a) if vh else (none.lora_a, none.lora_b)
    assert not outer.any() and inner is (head.lora_b if vh else head.lora_a)
    frozen = gather.no_head_columns(HeadGrads(None, head.bias), part, jnp.bfloat16)
    assert frozen.weight is None and frozen.lora_a is None and frozen.bias.dtype == jnp.bfloat16

    logits = array(6, V)
    taken = gather.take_logits(logits, jnp.asarray(index))
    np.testing.assert_array_equal(taken[:, :3], logits[:, index[:3]])
    assert np.isfinite(taken).all() and taken.shape == (6, 5)


@pytest.mark.parametrize("active, size", [([0, 3, 4], 5), ([], 3), (list(range(130)), 130), ([127, 128, 129], 3)])
def test_positions_of_what_is_active(active: list[int], size: int) -> None:
    there = np.isin(np.arange(130), active)
    want = [*active, *range(130, 130 + size - len(active))]
    assert active_columns.compacted(jnp.asarray(there), size).tolist() == want


def test_the_cheapest_set_of_columns() -> None:
    """By shares of columns and of hard rows; a set that is too large for its buffer is not one."""
    rule = Rule((1.0, 0.25, 0.0625), per_column=2.0, per_hard_row=3.0, dense=3.0, slab=128, most=512)
    level, counts = rule.levels(jnp.log(jnp.array([0.5, 0.02, 0.01, 0.004, 0.001, jnp.nan])), jnp.float32(0.01))
    assert level.tolist() == [0, 0, 1, 1, 2, 0] and counts.tolist() == [3, 5, 6]
    assert [int(rule.slabs(jnp.int32(n))) for n in (0, 1, 128, 129)] == [0, 1, 1, 2]

    def cheapest(counts: list[int], hard: list[float]) -> tuple[int, bool]:
        best, dense = rule.cheapest(jnp.array(counts), jnp.array(hard), 1000)
        return int(best), bool(dense)

    assert cheapest([100, 200, 300], [0.5, 0.1, 0.1]) == (1, False)  # 1.7, 0.7, 0.9
    assert cheapest([100, 200, 512], [1.0, 0.9, 0.0]) == (2, False)  # 3.2, 3.1, 1.024
    assert cheapest([100, 200, 513], [0.8, 1.0, 0.0]) == (0, False)  # 2.6, 3.4, too many
    assert cheapest([100, 200, 513], [1.0, 1.0, 0.0]) == (0, True)  # 3.2, 3.4, too many


def test_the_mass_beside_what_is_kept_is_never_negative() -> None:
    np.testing.assert_array_equal(mass_beside(jnp.array([0.25, 1.0, 1.5, jnp.nan])), [0.75, 0.0, 0.0, np.nan])


@pytest.mark.parametrize("layout", ["vh", "hv"])
@pytest.mark.parametrize("lora", [False, True])
def test_a_mean_row_of_the_head(layout: Any, lora: bool) -> None:
    """Of eight columns only each second is looked at, where a slab has four; the padding behind them is not."""
    rng, vh = np.random.default_rng(2), layout == "vh"
    w, a, b = (rng.normal(size=s).astype(np.float32) for s in ((V, H), (V, 2), (2, H)))
    outer, inner = (jnp.asarray(x if vh else x.T) for x in (a, b))
    pair = (outer, inner) if vh else (inner, outer)
    head = HeadArrays(jnp.asarray(w if vh else w.T), None, *(pair if lora else (None, None)), 0.5, layout)
    p = problem(layout).with_head(head)
    rule = Rule((1.0,), per_column=2.0, per_hard_row=3.0, dense=3.0, slab=4, most=8)
    whole = w + 0.5 * (a @ b) if lora else w
    np.testing.assert_allclose(mean_row(rule, p), whole[[0, 2, 4, 6]].mean(axis=0, keepdims=True), atol=1e-6)


def test_what_is_left_out_stands_in_the_mean_row_s_place() -> None:
    """``(g_lse - g_logp)`` times the mass, at the slope of a logit of zero; the entropy has no part, zero is zero."""
    g = StatCotangents(*(jnp.array(x) for x in ([1.0, 2.0, 0.0], [0.0, 5.0, 0.0], [0.5, 0.0, 0.0])))
    c, mass = jnp.array([[1.0, -2.0]]), jnp.array([0.25, 0.5, jnp.nan])
    got = in_their_place(c, mass, g, LogitTransform(temperature=0.5, scale=3.0, softcap=7.0))
    np.testing.assert_allclose(got, [[-0.75, 1.5], [-6.0, 12.0], [0.0, 0.0]], rtol=1e-6)


@pytest.mark.parametrize("place, dtype, shape, matmul", [
    ("gpu", jnp.bfloat16, (3, 5), True), ("gpu", jnp.float32, (3, 5), False), ("gpu", jnp.bfloat16, (5,), False),
    ("cpu", jnp.bfloat16, (3, 5), False),
])  # fmt: skip
def test_zeros_of_16_bits_are_a_matmul_on_a_gpu(
    place: str, dtype: Any, shape: tuple[int, ...], matmul: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "platform", lambda: place)
    jaxpr = jax.make_jaxpr(lambda: linear._zeros(shape, dtype))()
    assert ("dot_general" in str(jaxpr)) == matmul
    zeros = linear._zeros(shape, dtype)
    assert zeros.shape == shape and zeros.dtype == dtype and not zeros.any()


@pytest.mark.parametrize("size, parts", [(2, True), (3, True), (4, False), (7, False)])
@pytest.mark.parametrize("some_are_kept", [False, True])
def test_rows_are_gathered_in_parts_where_they_are_many(size: int, parts: bool, some_are_kept: bool) -> None:
    x, at = jnp.arange(20.0).reshape(10, 2), jnp.array([9, 0, 3, 3, 8, 1, 2])
    keep = jnp.arange(7) % 3 != 1 if some_are_kept else None
    want = np.asarray(x)[np.asarray(at)] * (1 if keep is None else np.asarray(keep)[:, None])
    np.testing.assert_array_equal(rows_in_parts(x, at, size, keep), want)
    jaxpr = str(jax.make_jaxpr(lambda: rows_in_parts(x, at, size, keep))())
    assert ("while" in jaxpr or "scan" in jaxpr) == parts


@pytest.mark.parametrize("by_sort", [False, True])
def test_the_chosen_tokens_first(by_sort: bool) -> None:
    chosen = jnp.array([False, True, True, False, True])
    first = front(chosen, by_sort)
    assert first.order.tolist() == [1, 2, 4, 0, 3] and int(first.count) == 3
    assert first.take(jnp.array([10, 11, 12, 13, 14])).tolist() == [11, 12, 14, 10, 13]
    assert first.take(jnp.arange(10).reshape(5, 2)).tolist() == [[2, 3], [4, 5], [8, 9], [0, 1], [6, 7]]
    every = front(None)
    assert every.order is every.count is None and every.take(chosen) is chosen
