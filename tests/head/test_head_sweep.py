"""The live-token sweep: dead tokens cost no work, nothing recompiles, and a frozen head has no dW matmul."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flat_calls
from interpreted import by_numpy, in_numpy
from logitless.core.row_passes import Sweep, Visit, front, live_sweep, order_by_rank, split_sweep, sweep_over
from logitless.head import chunked
from logitless.objectives.objective import Objective
from numerics import assert_same_bits, f64, head_case

SHAPE, WIDTH, VOCAB, CHUNK = (4, 16), 24, 211, 8


def visited(sweep: Sweep) -> tuple[list[int], list[int]]:
    """``(rows written, in order; rows read)`` by a sweep, by walking it."""
    written: list[int] = []
    read: list[int] = []
    whole, few = (int(x) for x in sweep.trips())
    positions = [(i * sweep.chunk, sweep.chunk) for i in range(whole)]
    positions += [(whole * sweep.chunk + i * sweep.small, sweep.small) for i in range(few)]
    for position, size in positions:
        visit = sweep.visit(jnp.asarray(position), size)
        written += [int(r) for r in np.asarray(visit.write) if r < sweep.n]
        read += [int(r) for r in np.asarray(visit.read)]
    return written, read


@settings(max_examples=40, deadline=None)
@given(live=st.lists(st.booleans(), min_size=13, max_size=13), chunk=st.sampled_from([1, 4, 13]), data=st.data())
def test_sweeps_visit_each_live_token_once(live: list[bool], chunk: int, data: st.DataObject) -> None:
    alive = np.array(live)
    expected = np.flatnonzero(alive).tolist()
    sweep = live_sweep(jnp.asarray(alive), chunk)
    assert tuple(int(x) for x in sweep.trips()) == (-(-len(expected) // chunk), 0)
    written, read = visited(sweep)
    assert written == expected
    assert all(0 <= r < 13 for r in read)

    active = np.array(data.draw(st.lists(st.booleans(), min_size=13, max_size=13)))
    gradient, rest = split_sweep(jnp.asarray(alive), jnp.asarray(active), chunk)
    first, second = visited(gradient)[0], visited(rest)[0]
    assert sorted(first + second) == expected
    moving = np.flatnonzero(alive & active).tolist()
    assert first[: len(moving)] == moving and len(first) - len(moving) < chunk

    assert visited(sweep_over(13, None, chunk))[0] == list(range(13))


@pytest.mark.parametrize("count", [0, 1, 256, 257, 512, 513, 1023, 1024, 1025, 1536, 1537, 2048])
def test_the_rest_of_large_chunks_is_cut_smaller(count: int) -> None:
    """A forward pass that keeps something for every chunk has room for two quarters after the whole ones."""
    live = jnp.arange(2048) >= 2048 - count
    sweep = live_sweep(live, 1024)
    assert visited(sweep)[0] == list(range(2048 - count, 2048))
    whole, few = (int(x) for x in sweep.trips())
    cost = whole * sweep.chunk + few * sweep.small
    assert cost == int(sweep.covered()) and few <= 2
    assert count <= cost < count + sweep.chunk // 2, "work follows the tokens, not the next multiple of the chunk"


@pytest.mark.parametrize("count", [0, 1, 256, 257, 512, 513, 768, 769, 1024, 1100, 2048])
def test_the_rest_at_once_is_one_chunk_of_quarters(count: int) -> None:
    sweep = live_sweep(jnp.arange(2048) >= 2048 - count, 1024, rest_at_once=True)

    def body(visit: Visit, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        seen, chunks, cost = carry
        return seen.at[visit.write].add(1, mode="drop"), chunks + 1, cost + visit.read.size

    start = (jnp.zeros(2048, jnp.int32), jnp.int32(0), jnp.int32(0))
    seen, chunks, cost = jax.jit(lambda sweep: sweep.run(body, start))(sweep)
    np.testing.assert_array_equal(np.flatnonzero(seen), np.arange(2048 - count, 2048))
    assert int(seen.max()) <= 1 and int(chunks) == -(-count // 1024)
    assert int(cost) == int(sweep.covered()) == -(-count // 256) * 256


@pytest.mark.parametrize("kinds", [(), (0,), (1,), (0, 1), (1, 2), (0, 1, 2)])
def test_order_by_rank_is_a_stable_sort(kinds: tuple[int, ...]) -> None:
    kind = np.random.default_rng(0).choice(kinds, 77) if kinds else np.zeros(0, int)
    order = order_by_rank(*(jnp.asarray(kind == k) for k in range(3)))
    np.testing.assert_array_equal(order, np.argsort(kind, stable=True))
    chosen = jnp.asarray(kind == 0)
    by_sort, by_rank = front(chosen), front(chosen, by_sort=False)
    np.testing.assert_array_equal(by_rank.order, by_sort.order)
    assert by_rank.count == by_sort.count == np.sum(kind == 0)


def test_large_chunks_give_the_same_loss_and_gradients() -> None:
    rng = np.random.default_rng(0)
    h, w = rng.standard_normal((2, 900, 8), np.float32), rng.standard_normal((40, 8), np.float32)
    y, mask = rng.integers(0, 40, (2, 900)), rng.random((2, 900)) < 0.7
    a = rng.standard_normal((2, 900)).astype(np.float32) * (rng.random((2, 900)) < 0.6)

    def grads(chunk: int) -> Any:
        def loss(h: jax.Array, w: jax.Array) -> Any:
            return flat_calls.linear_grpo_loss(h, w, y, advantages=a, mask=mask, chunk_size=chunk)

        return by_numpy(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), h, w)

    (value, _), (dh, dw) = grads(1024)
    (value_small, _), (dh_small, dw_small) = grads(64)
    np.testing.assert_allclose(value, value_small, rtol=1e-6)
    np.testing.assert_allclose(dh, dh_small, rtol=2e-6, atol=1e-9)
    np.testing.assert_allclose(dw, dw_small, atol=1e-7)


# -- work that is not there is not done ---------------------------------------------------------------------------


class Counter:
    """Calls of the sweep's matmuls while a compiled program runs, not while it is traced."""

    def __init__(self) -> None:
        self.logits = self.backward = 0

    def reset(self) -> None:
        jax.effects_barrier()
        self.logits = self.backward = 0

    def read(self) -> tuple[int, int]:
        jax.effects_barrier()
        return self.logits, self.backward


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """Counts executions of ``raw_logits`` and ``dhidden`` in the chunked backend, through callbacks in the loops."""
    count = Counter()
    raw, back = chunked.raw_logits, chunked.dhidden

    def count_logits() -> None:
        count.logits += 1

    def count_backward() -> None:
        count.backward += 1

    def raw_logits(*args: Any) -> jax.Array:
        jax.debug.callback(count_logits)
        return raw(*args)

    def dhidden(*args: Any) -> jax.Array:
        jax.debug.callback(count_backward)
        return back(*args)

    monkeypatch.setattr(chunked, "raw_logits", raw_logits)
    monkeypatch.setattr(chunked, "dhidden", dhidden)
    yield count
    jax.clear_caches()


def masks(seed: int = 0) -> list[np.ndarray]:
    """Masks with 0, 1, one chunk's worth, ragged and all tokens live."""
    rng = np.random.default_rng(seed)
    n = SHAPE[0] * SHAPE[1]
    out = [np.arange(n) < k for k in (0, 1, CHUNK, CHUNK + 1, n)] + [rng.random(n) < 0.4]
    return [rng.permutation(m).reshape(SHAPE) for m in out]


def arrays(dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array, jax.Array]:
    case = head_case(0, SHAPE, WIDTH, VOCAB, dtype)
    return *case.parameters(), jnp.asarray(case.targets)


def test_matmuls_executed_follow_the_live_tokens_and_nothing_recompiles(counter: Counter) -> None:
    h, w, y = arrays()
    a = jnp.asarray([1.0, 0.0, -1.0, 0.5])
    traced: list[str] = []

    @functools.partial(jax.jit, static_argnums=3)
    def gradients(h: jax.Array, w: jax.Array, mask: jax.Array, level: Any) -> Any:
        traced.append(level)
        given = dict(advantages=a, mask=mask, objective=Objective(level=level), chunk_size=CHUNK, backend="chunked")
        return jax.value_and_grad(lambda h, w: flat_calls.linear_grpo_loss(h, w, y, **given)[0], (0, 1))(h, w)

    for mask in masks():
        live, moving = int(mask.sum()), int((mask & (np.asarray(a) != 0)[:, None]).sum())
        chunks, moving_chunks = -(-live // CHUNK), -(-moving // CHUNK)
        counter.reset()
        jax.block_until_ready(gradients(h, w, jnp.asarray(mask), "token"))
        assert counter.read() == (chunks, moving_chunks), f"grad in forward, {live} live, {moving} moving"
        counter.reset()
        jax.block_until_ready(gradients(h, w, jnp.asarray(mask), "sequence"))
        assert counter.read() == (chunks + moving_chunks, moving_chunks), f"recompute, {live} live, {moving} moving"
    assert traced == ["token", "sequence"]


def test_forward_only_statistics_take_one_matmul_per_live_chunk(counter: Counter) -> None:
    h, w, y = arrays()
    traced: list[str] = []

    @jax.jit
    def f(h: jax.Array, w: jax.Array, y: jax.Array, mask: jax.Array) -> Any:
        traced.append("statistics")
        return flat_calls.linear_logprobs(h, w, y, mask=mask, chunk_size=CHUNK, backend="chunked")

    for mask in masks(1):
        counter.reset()
        jax.block_until_ready(f(h, w, y, mask=jnp.asarray(mask)))
        assert counter.read() == (-(-int(mask.sum()) // CHUNK), 0)
    assert traced == ["statistics"]


def test_tokens_without_a_cotangent_are_not_visited_again(counter: Counter) -> None:
    """A user's loss over the statistics that leaves most tokens out."""
    h, w, y = arrays()

    @jax.jit
    def gradient(h: jax.Array, share: jax.Array) -> jax.Array:
        def f(h: jax.Array) -> jax.Array:
            return jnp.sum(share * flat_calls.linear_logprobs(h, w, y, chunk_size=CHUNK, backend="chunked").logp)

        return jax.grad(f)(h)

    for share in masks(2):
        counter.reset()
        dh = jax.block_until_ready(gradient(h, jnp.asarray(share, jnp.float32)))
        visits = -(-int(share.sum()) // CHUNK)
        assert counter.read() == (SHAPE[0] * SHAPE[1] // CHUNK + visits, visits)
        assert not np.any(f64(dh)[~share]) and np.all(np.any(f64(dh)[share], axis=-1))


@pytest.mark.parametrize("way", ["token", "sequence"])
def test_the_sweep_gives_what_the_tokens_give_alone(way: str) -> None:
    """Dead tokens, in any place and holding anything, change no bit of the live ones' statistics, nor of dW."""
    h, w, y = arrays()
    a, o = jnp.asarray([1.0, 0.5, -1.0, 2.0]), Objective(level=way)  # type: ignore[arg-type]
    mask = jnp.asarray(masks(3)[-1])

    @in_numpy
    def run(h: jax.Array, y: jax.Array) -> Any:
        def f(h: jax.Array, w: jax.Array) -> Any:
            options = {"mask": mask, "objective": o, "chunk_size": CHUNK, "backend": "chunked"}
            return flat_calls.linear_grpo_loss(h, w, y, advantages=a, **options)

        return jax.value_and_grad(f, (0, 1), has_aux=True)(h, w)

    clean = run(h, y)
    dirty = run(jnp.where(mask[..., None], h, jnp.nan), jnp.where(mask, y, -100))
    assert_same_bits(clean, dirty)


# -- which matmuls are in the program ------------------------------------------------------------------------------


def dots(jaxpr: Any) -> list[tuple[int, ...]]:
    """Output shapes of every matmul in a jaxpr, loops and calls included."""
    out: list[tuple[int, ...]] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            out.append(tuple(eqn.outvars[0].aval.shape))
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    out += dots(inner)
    return out


LOGITS, DH, DW, DW_HV = (CHUNK, VOCAB), (CHUNK, WIDTH), (VOCAB, WIDTH), (WIDTH, VOCAB)


def program(argnums: Any, level: str, layout: str = "vh", lora: bool = False) -> list[tuple[int, ...]]:
    h, w, y = arrays()
    w = w if layout == "vh" else w.T
    pair = (jnp.ones((w.shape[0], 3)), jnp.ones((3, w.shape[1])))

    def f(h: jax.Array, w: jax.Array, pair: Any) -> jax.Array:
        options = {"objective": Objective(level=level), "chunk_size": CHUNK, "backend": "chunked"}  # type: ignore[arg-type]
        return flat_calls.linear_grpo_loss(h, w, y, advantages=jnp.ones(4), lora=pair if lora else None, **options)[0]

    call = f if argnums is None else jax.grad(f, argnums)
    return sorted(dots(jax.make_jaxpr(call)(h, w, pair).jaxpr))


def test_matmuls_in_the_program() -> None:
    """Token level: the second loop takes the live tokens that cannot have a gradient, hence one more matmul there."""
    token, sequence = "token", "sequence"
    assert program(None, token) == [LOGITS, LOGITS]
    assert program((0, 1), token) == sorted([LOGITS, DH, DW, LOGITS])
    assert program(0, token) == sorted([LOGITS, DH, LOGITS])
    assert program(1, token) == sorted([LOGITS, DW, LOGITS])
    assert program((0, 1), sequence) == sorted([LOGITS, LOGITS, DH, DW])
    assert program(0, sequence) == sorted([LOGITS, LOGITS, DH])
    assert program((0, 1), token, "hv") == sorted([LOGITS, DH, DW_HV, LOGITS])
    assert program(0, token, "hv") == sorted([LOGITS, DH, LOGITS])


@pytest.mark.parametrize("layout", ["vh", "hv"])
def test_lora_has_no_dw(layout: str) -> None:
    found = program((0, 2), "token", layout, lora=True)
    assert DW not in found and DW_HV not in found
    assert (VOCAB, 3) in found or (3, VOCAB) in found  # the gradient of the factor on the vocabulary's side
    with_weight = program((0, 1, 2), "token", layout, lora=True)
    assert (DW if layout == "vh" else DW_HV) in with_weight
