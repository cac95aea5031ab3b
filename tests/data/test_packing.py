"""``pack`` and ``unpack``: what packed rows make of a batch is what padded rows make of it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
from interpreted import by_numpy, in_numpy
from logitless import Objective, loss_denominator, pack, rows_with_gradient, unpack
from logitless.train.model import ModelConfig, hidden_states, init, lm_head, positions_of
from loss_cases import AGGREGATIONS, POLICY_LEVELS, evaluate, objective_of

MODEL = ModelConfig(23, 16, 24, 2, 2, 1, 8)
B, P, C, LENGTH = 8, 5, 6, 24


@functools.cache
def params() -> Any:
    return jax.jit(lambda key: jax.tree.map(lambda x: x * 1.5, init(MODEL, key)))(jax.random.key(0))


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Two prompts with four completions each; holes in a mask, an empty completion, a group without spread."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(1, 23, (2, P), dtype=np.int32)
    prompt_mask = np.arange(P) >= rng.integers(0, P - 1, (2, 1))
    completion_valid = np.arange(C) < rng.integers(1, C + 1, (B, 1))
    completion_mask = completion_valid & (rng.random((B, C)) < 0.9)
    completion_valid[2] = completion_mask[2] = False
    advantages = rng.standard_normal(B).astype(np.float32)
    advantages[4:] *= rng.random() < 0.5

    def logp() -> np.ndarray:
        return (-3 + 0.3 * rng.standard_normal((B, C))).astype(np.float32)

    return dict(
        prompt=np.repeat(prompts, 4, axis=0), prompt_mask=np.repeat(prompt_mask, 4, axis=0),
        completion=rng.integers(1, 23, (B, C), dtype=np.int32), completion_mask=completion_mask,
        completion_valid=completion_valid, advantages=advantages, old_logp=logp(), ref_logp=logp(), rollout_logp=logp(),
        token_weights=rng.random((B, C)).astype(np.float32),
    )  # fmt: skip


LOSS = ("advantages", "old_logp", "ref_logp", "rollout_logp", "token_weights")


def denominators(objective: Objective, x: dict[str, Any]) -> dict[str, Any]:
    return dict(
        denominator=loss_denominator(objective, x["completion_mask"]),
        entropy_denominator=float(x["completion_mask"].sum()),
    )


def padded_hidden(params: Any, x: dict[str, Any]) -> jax.Array:
    tokens = jnp.concatenate([x["prompt"], x["completion"][:, :-1]], axis=1)
    valid = jnp.concatenate([x["prompt_mask"], x["completion_valid"][:, :-1]], axis=1)
    hidden = hidden_states(params, MODEL, tokens, positions_of(valid), valid)
    # The state that predicts completion token j is that of the last real token before it.
    last = jnp.argmax(jnp.where(valid, jnp.arange(valid.shape[1]), -1)[:, None, :] * _before(valid.shape[1]), axis=2)
    return jnp.take_along_axis(hidden, last[..., None], axis=1)


def _before(width: int) -> np.ndarray:
    return np.arange(width)[None, None, :] < P + np.arange(C)[None, :, None]


def packed_hidden(params: Any, packed: Any) -> jax.Array:
    return hidden_states(
        params, MODEL, packed.tokens, packed.positions, packed.segment_ids > 0, sees=packed.attention_mask()
    )


@in_numpy
def both_hidden(params: Any, x: Any, packed: Any, direction: Any) -> Any:
    """Hidden states that predict completion tokens, and the weights' gradient for one direction, in both forms."""

    def padded(p: Any) -> jax.Array:
        return jnp.where(jnp.asarray(packed.slots >= 0)[..., None], padded_hidden(p, x), 0.0)

    def from_packed(p: Any) -> jax.Array:
        return unpack(packed, packed_hidden(p, packed))

    out = []
    for f in (padded, from_packed):
        hidden, pull = jax.vjp(f, params)
        out.append((hidden, pull(direction)[0]))
    return out


def close(a: Any, b: Any, bound: float = 1e-5) -> None:
    """Every array within ``bound`` of the largest entry."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=bound * float(np.abs(x).max() + 1e-30))


@pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared"])
def test_the_model_computes_the_same_of_packed_rows(shared: bool) -> None:
    for seed in range(4):
        x = batch(seed)
        packed = pack(**{k: v for k, v in x.items() if k not in LOSS}, length=LENGTH, rows=B, share_prompts=shared)
        assert packed.tokens.shape == (B, LENGTH)
        direction = np.random.default_rng(seed).standard_normal((B, C, 16)).astype(np.float32)
        (hidden, grads), (ours, our_grads) = both_hidden(params(), x, packed, direction)
        assert np.abs(hidden).max() > 0.5 and all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads["layers"]))
        close(hidden, ours)
        close(grads, our_grads)
        used = [np.unique(r[r > 0]) for r in packed.segment_ids]
        assert max(map(len, used)) > 1  # there is something to keep apart


def test_shared_prompts_save_what_the_module_says() -> None:
    prompt = np.tile(np.arange(1, 6, dtype=np.int32), (B, 1))
    done, ones = np.ones((B, C), np.int32), np.ones((B, C), bool)
    whole, shared = (
        pack(prompt, prompt > 0, done, ones, length=B * (P + C - 1), share_prompts=s) for s in (False, True)
    )
    used = [int((p.segment_ids > 0).sum()) for p in (whole, shared)]
    assert used[0] == B * (P + C - 1) and used[0] - used[1] == (B - 1) * (P - 1)


@pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared"])
@pytest.mark.parametrize(("policy", "level"), POLICY_LEVELS)
def test_every_objective_is_the_same_of_packed_rows(policy: str, level: str, shared: bool) -> None:
    """Loss and gradients by statistics, with rows left out, for all aggregations in turn."""
    for i, aggregation in enumerate(AGGREGATIONS if not shared else AGGREGATIONS[:1]):
        fields: dict[str, Any] = [{}, {"beta": 0.1}, {"entropy_coef": 0.02}, {"correction": "sequence"}, {}][i]
        o = objective_of(policy, level, aggregation, **fields)
        x = batch(i)
        rng = np.random.default_rng(i)
        logp, entropy = (-rng.exponential(size=(B, C)).astype(np.float32) for _ in range(2))
        inputs = dict({k: x[k] for k in LOSS}, mask=x["completion_mask"])
        keep = np.asarray(rows_with_gradient(o, **inputs))
        padded = evaluate(o, logp, -entropy, **inputs, **denominators(o, x))
        packed = pack(**x, length=LENGTH, rows=4, keep=keep, share_prompts=shared)

        def spread(a: np.ndarray, p: Any = packed) -> np.ndarray:
            flat = np.zeros(p.tokens.size, np.float32)
            flat[p.slots[p.slots >= 0]] = a[p.slots >= 0]
            return flat.reshape(p.tokens.shape)

        arrays = dict(packed.loss_arrays(), **denominators(o, x))
        got = evaluate(o, spread(logp), spread(-entropy), **arrays)
        np.testing.assert_allclose(got.loss, padded.loss, rtol=1e-5, atol=1e-6)
        close(padded.dlogp, unpack(packed, got.dlogp))
        close(padded.dentropy, unpack(packed, got.dentropy))
        assert np.abs(padded.dlogp).max() > 0


def whole_gradients(objective: Objective, x: dict[str, Any], packed: Any) -> list[Any]:
    """Loss and gradients of all weights, through model and head, padded and packed."""

    def padded_loss(p: Any) -> Any:
        arrays = dict({k: x[k] for k in LOSS}, mask=x["completion_mask"], **denominators(objective, x))
        hidden = padded_hidden(p, x)
        return flat_calls.linear_grpo_loss(
            hidden, lm_head(p, MODEL), x["completion"], head_layout="vh", objective=objective, **arrays
        )[0]

    def packed_loss(p: Any) -> Any:
        arrays = dict(packed.loss_arrays(), **denominators(objective, x))
        return flat_calls.linear_grpo_loss(
            packed_hidden(p, packed), lm_head(p, MODEL), packed.targets, head_layout="vh", objective=objective, **arrays
        )[0]

    return [in_numpy(jax.value_and_grad(f))(params()) for f in (padded_loss, packed_loss)]


@pytest.mark.parametrize(
    ("policy", "level"), [("clip", "token"), *(pytest.param(*p, marks=pytest.mark.slow) for p in POLICY_LEVELS[1:])]
)
def test_gradients_of_the_weights_are_the_same(policy: str, level: str) -> None:
    o = objective_of(policy, level, "dapo", beta=0.05, entropy_coef=0.01, correction="token")
    x = batch(3)
    packed = pack(**x, length=LENGTH, share_prompts=True)
    (loss, grads), (ours, our_grads) = whole_gradients(o, x, packed)
    np.testing.assert_allclose(ours, loss, rtol=1e-5)
    close(grads, our_grads)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


def test_nothing_is_cut_and_nothing_fits_by_accident() -> None:
    x = batch(1)
    longest = int((x["prompt_mask"].sum(1) + x["completion_valid"].sum(1) - 1).max())
    pack(**x, length=longest)
    with pytest.raises(ValueError, match=rf"slots \(prompt .* the longest takes {longest}\. None is cut"):
        pack(**x, length=longest - 1)
    with pytest.raises(ValueError, match=r"take \d+ rows of 24 slots, but rows=1"):
        pack(**x, length=24, rows=1)
    with pytest.raises(ValueError, match="completion_mask is set where completion_valid is not"):
        pack(**{**x, "completion_valid": x["completion_valid"] & False}, length=24)
    with pytest.raises(ValueError, match=r"old_logp has shape \(8, 5\), expected \(8, 6\)"):
        pack(**{**x, "old_logp": x["old_logp"][:, 1:]}, length=24)
    with pytest.raises(ValueError, match="sequence 0 has no prompt"):
        pack(**{**x, "prompt_mask": x["prompt_mask"] & False}, length=24)
    with pytest.raises(ValueError, match=r"length is 2\.5, expected a positive Python int"):
        pack(**x, length=2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="prompt is traced; pack on the host"):
        jax.jit(lambda p: pack(**{**x, "prompt": p}, length=24))(x["prompt"])
    with pytest.raises(ValueError, match=r"unpack: x has shape \(2, 2\)"):
        unpack(pack(**x, length=24), jnp.zeros((2, 2)))


@pytest.mark.parametrize("rows", [None, 0, 2])
def test_a_batch_without_a_sequence_to_learn_from_unpacks_to_zeros(rows: int | None) -> None:
    x = batch(0) | dict(advantages=np.zeros(B, np.float32))
    keep = np.asarray(rows_with_gradient(Objective(), x["advantages"], x["completion_mask"]))
    packed = pack(**x, length=LENGTH, rows=rows, keep=keep)
    assert packed.tokens.shape == (rows or 0, LENGTH) and packed.fill() == 0.0
    for trailing, dtype in (((), jnp.int32), ((3,), jnp.bfloat16)):
        states = jnp.ones((*packed.tokens.shape, *trailing), dtype)
        for got in (unpack(packed, states), jax.jit(unpack)(packed, states)):
            assert got.shape == (B, C, *trailing) and got.dtype == dtype and not got.any()
    grad = jax.grad(lambda x: jnp.sum(unpack(packed, x)))(jnp.ones(packed.tokens.shape))
    assert grad.shape == packed.tokens.shape and not grad.any()


def ragged(seed: int) -> dict[str, Any]:
    """Prompts padded on either side or in the middle, with neighbours that share one; ids of 0 and junk in the padding;
    completions with an end token inside, with holes, of one token, and empty."""
    rng = np.random.default_rng(seed)
    b, p, c = (int(rng.integers(1, n)) for n in (9, 6, 7))
    prompt_mask = rng.random((b, p)) < 0.7
    prompt_mask[np.arange(b), rng.integers(0, p, b)] = True
    prompt = np.where(prompt_mask, rng.integers(0, 9, (b, p)), 77)
    for i in range(1, b):
        if rng.random() < 0.5:
            prompt[i], prompt_mask[i] = prompt[i - 1], prompt_mask[i - 1]
    valid = (np.arange(c) < rng.integers(0, c + 1, (b, 1))) & (rng.random((b, c)) < 0.9)
    mask = valid & (rng.random((b, c)) < 0.8)
    completion = np.where(valid, rng.integers(0, 9, (b, c)), 88)
    dtype = str(rng.choice(["int32", "int64", "uint8", "uint16"]))
    return dict(
        prompt=prompt.astype(dtype), prompt_mask=prompt_mask.astype(str(rng.choice(["bool", "uint8", "float32"]))),
        completion=completion.astype(dtype), completion_mask=mask, completion_valid=valid,
        keep=rng.random(b) < 0.8, length=int(rng.integers(p + c - 1, 3 * (p + c))),
        advantages=rng.standard_normal(b).astype(np.float32),
        old_logp=rng.standard_normal((b, c)).astype(np.float32),
    )  # fmt: skip


@pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared"])
def test_every_token_is_predicted_from_what_stands_before_it_in_its_own_sequence(shared: bool) -> None:
    """From the packed arrays alone: what a slot attends to, in the order of its positions, is the prompt and the
    completion before the token that it predicts."""
    predicted = segments = 0
    for seed in range(40):
        x = ragged(seed)
        packed = pack(**x, share_prompts=shared)
        attention, taken = by_numpy(packed.attention_mask), set()
        wanted = x["completion_mask"] & x["keep"][:, None]
        assert packed.mask.sum() == wanted.sum() and ((packed.slots >= 0) == wanted).all()
        assert (np.sort(packed.segment_ids > 0, axis=1)[:, ::-1] == (packed.segment_ids > 0)).all()  # no holes in a row
        for b, j in np.argwhere(wanted):
            row, column = divmod(int(packed.slots[b, j]), x["length"])
            taken.add((row, column))
            before = x["completion"][b, :j][x["completion_valid"][b, :j]]
            context = np.concatenate([x["prompt"][b][x["prompt_mask"][b] != 0], before])
            seen = np.flatnonzero(attention[row, column])
            seen = seen[np.argsort(packed.positions[row, seen])]
            assert packed.positions[row, seen].tolist() == list(range(len(context)))
            assert packed.tokens[row, seen].tolist() == context.tolist()
            assert packed.targets[row, column] == x["completion"][b, j] and packed.mask[row, column]
            assert packed.arrays["advantages"][row, column] == x["advantages"][b]
            assert packed.arrays["old_logp"][row, column] == x["old_logp"][b, j]
        assert len(taken) == wanted.sum()
        read = x["completion_valid"].sum(1) * x["keep"]
        slots = np.where(read > 0, (x["prompt_mask"] != 0).sum(1) + read - 1, 0)  # an empty completion takes none
        used = int((packed.segment_ids > 0).sum())
        assert used <= slots.sum() if shared else used == slots.sum()
        predicted, segments = predicted + len(taken), segments + int(packed.segment_ids.max(initial=0) > 1)
        for array in packed.arrays.values():
            assert not array[~packed.mask].any()
        assert not packed.tokens[packed.segment_ids == 0].any() and not packed.targets[packed.segment_ids == 0].any()
        assert not any((packed.tokens == junk).any() for junk in (77, 88))  # padding is nobody's token
    assert predicted > 200 and segments > 20


def test_sequences_of_a_row_stand_in_their_own_order_the_longest_are_placed_first() -> None:
    """Lengths 2, 5, 3, 4 into rows of 7: 5 and 2, then 4 and 3, each row in the order of the batch."""
    prompt, lengths = np.array([[1], [2], [3], [4]]), np.array([2, 5, 3, 4])
    mask = np.arange(5) < lengths[:, None]
    packed = pack(prompt, prompt > 0, np.full((4, 5), 9), mask, length=7)
    starts = [[row[packed.positions[r] == 0].tolist()] for r, row in enumerate(packed.tokens)]
    assert starts == [[[1, 2]], [[3, 4]]]
    assert packed.segment_ids.tolist() == [[1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 2, 2, 2, 2]]
    assert pack(prompt, prompt > 0, np.full((4, 5), 9), mask, length=6).tokens.shape == (3, 6)
    assert unpack(packed, packed.targets).tolist() == np.where(mask, 9, 0).tolist()  # the first slot of all included


def test_a_shared_prompt_fills_a_row_to_its_last_slot() -> None:
    prompt, ones = np.array([[1, 2, 3]] * 2), np.ones((2, 2), int)
    assert [pack(prompt, prompt > 0, ones, ones, length=n, share_prompts=True).tokens.shape for n in (6, 5)] == [
        (1, 6),
        (2, 5),
    ]


def test_supports_stand_at_the_slots_that_predict_their_tokens() -> None:
    rng = np.random.default_rng(0)
    prompt, completion = rng.integers(1, 9, (5, 4)), rng.integers(1, 9, (5, 6))
    mask = np.arange(6) < np.array([6, 2, 0, 5, 3])[:, None]
    support = np.where(rng.random((5, 6, 3)) < 0.3, -1, rng.integers(0, 9, (5, 6, 3)))
    given = (prompt, np.ones_like(prompt), completion, mask)
    packed = pack(*given, length=20, share_prompts=True, support=support)
    found = unpack(packed, packed.arrays["support"])
    np.testing.assert_array_equal(found, np.where(mask[..., None], support, 0))
    assert (packed.arrays["support"][~packed.mask] == -1).all() and packed.arrays["support"].dtype == np.int32
    with pytest.raises(ValueError, match=r"support is int64\[5, 6\], expected integer ids of shape \(5, 6, K\)"):
        pack(*given, length=20, support=support[..., 0])


def test_a_row_of_a_single_slot() -> None:
    one = np.array([[7]])
    packed = pack(one, one > 0, 2 * one, one > 0, length=1)
    assert (packed.tokens.tolist(), packed.targets.tolist()) == ([[7]], [[14]])
    with pytest.raises(ValueError, match="length is 0, expected a positive Python int"):
        pack(one, one > 0, 2 * one, one > 0, length=0)
