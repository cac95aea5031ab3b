"""Packed rows and shifted targets number by number, and what they promise at their edges."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logitless
from interpreted import by_numpy
from logitless import next_tokens, pack, unpack

PROMPT = np.array([[0, 5, 6, 7], [0, 5, 6, 7], [0, 0, 0, 8]])
COMPLETION = np.array([[1, 2], [3, 0], [9, 0]])
BATCH: dict[str, Any] = dict(
    prompt=PROMPT, prompt_mask=PROMPT > 0, completion=COMPLETION, completion_mask=COMPLETION > 0
)
WHOLE = dict(
    tokens=[[5, 6, 7, 1, 5, 6, 7, 8]], targets=[[6, 7, 1, 2, 6, 7, 3, 9]], positions=[[0, 1, 2, 3, 0, 1, 2, 0]],
    segment_ids=[[1, 1, 1, 1, 2, 2, 2, 3]], slots=[[2, 3], [6, -1], [7, -1]], mask=[[0, 0, 1, 1, 0, 0, 1, 1]],
    advantages=[[0, 0, 1, 1, 0, 0, 2, 3]],
)  # fmt: skip
SHARED = dict(
    tokens=[[5, 6, 7, 1, 7, 8, 0, 0]], targets=[[6, 7, 1, 2, 3, 9, 0, 0]], positions=[[0, 1, 2, 3, 2, 0, 0, 0]],
    segment_ids=[[1, 1, 2, 2, 3, 4, 0, 0]], prefix_ids=[[1, 1, 1, 1, 1, 4, 0, 0]], slots=[[2, 3], [4, -1], [5, -1]],
    mask=[[0, 0, 1, 1, 1, 1, 0, 0]], advantages=[[0, 0, 1, 1, 2, 3, 0, 0]],
)  # fmt: skip


@pytest.mark.parametrize("share, want", [(False, WHOLE), (True, SHARED)])
def test_a_packed_row_by_hand(share: bool, want: dict[str, Any]) -> None:
    packed = pack(**BATCH, length=8, share_prompts=share, advantages=np.float32([1, 2, 3]))
    for name, numbers in want.items():
        got = packed.arrays[name] if name == "advantages" else getattr(packed, name)
        np.testing.assert_array_equal(got, numbers, err_msg=name)
    assert (packed.prefix_ids is None) == (not share)
    assert packed.fill() == (0.75 if share else 1.0)
    assert packed.tokens.dtype == packed.slots.dtype == np.int32 and packed.arrays["advantages"].dtype == np.float32
    seen = np.asarray(packed.attention_mask())[0]
    if share:  # the second completion's first slot sees the prompt and itself
        assert np.flatnonzero(seen[4]).tolist() == [0, 1, 4] and np.flatnonzero(seen[7]).tolist() == [6, 7]
    else:
        assert np.flatnonzero(seen[6]).tolist() == [4, 5, 6]


@pytest.mark.parametrize("length, rows", [(4, 4), (7, 4), (8, 2), (11, 2), (12, 2), (16, 1)])
def test_a_row_is_filled_to_its_last_slot(length: int, rows: int) -> None:
    """Four sequences of four slots."""
    ids = np.ones((4, 2), int)
    packed = pack(ids, ids > 0, np.ones((4, 3), int), np.ones((4, 3)), length=length)
    assert packed.tokens.shape == (rows, length) and int((packed.segment_ids > 0).sum()) == 16


@pytest.mark.parametrize("trailing", [(), (3,), (2, 3)])
def test_the_way_back_takes_any_number_of_dimensions(trailing: tuple[int, ...]) -> None:
    packed = pack(**BATCH, length=8)
    x = 1.0 + jnp.arange(8 * int(np.prod(trailing))).reshape(1, 8, *trailing)
    got = np.asarray(unpack(packed, x))
    assert got.shape == (3, 2, *trailing)
    for (i, j), slot in np.ndenumerate(packed.slots):
        np.testing.assert_array_equal(got[i, j], x[0, slot] if slot >= 0 else np.zeros(trailing))


@pytest.mark.parametrize("name", ["advantages", "token_weights"])
@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 2)])
def test_numbers_of_a_sequence_are_those_of_its_tokens(name: str, shape: tuple[int, ...]) -> None:
    array: Any = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    packed = pack(**BATCH, length=8, **{name: array})
    per_token = np.broadcast_to(array[:, None] if array.ndim == 1 else array, (3, 2))
    np.testing.assert_array_equal(unpack(packed, packed.arrays[name]), np.where(COMPLETION > 0, per_token, 0))


@pytest.mark.parametrize("name", ["old_logp", "ref_logp", "rollout_logp"])
@pytest.mark.parametrize("shape", [(3,), (3, 1), (2, 3)])
def test_log_probabilities_are_of_tokens(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"pack: {name} has shape .*, expected \(3, 2\)"):
        pack(**BATCH, length=8, **{name: np.zeros(shape, np.float32)})


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="pack: prompt has 2 rows and completion 3"):
        pack(**{**BATCH, "prompt": PROMPT[:2], "prompt_mask": PROMPT[:2] > 0}, length=8)
    with pytest.raises(ValueError, match=r"pack: completion is float64\[3, 2\], expected integer ids"):
        pack(**{**BATCH, "completion": COMPLETION * 1.0}, length=8)
    with pytest.raises(TypeError, match="pack: old_logp has dtype int64, expected a float dtype"):
        pack(**BATCH, length=8, old_logp=COMPLETION)
    for length in (0, True):
        with pytest.raises(ValueError, match="expected a positive Python int"):
            pack(**BATCH, length=length)


@pytest.mark.parametrize("segments", [None, [[1, 1, 1, 1]]])
def test_the_last_position_predicts_nothing(segments: Any) -> None:
    """Not even where the first token counts, to which a shift by one comes back."""
    targets, mask = next_tokens(np.array([[5, 6, 7, 8]]), segment_ids=None if segments is None else np.array(segments))
    assert targets.tolist() == [[6, 7, 8, 0]] and mask.tolist() == [[True, True, True, False]]


def test_every_counted_position_predicts_the_token_after_it() -> None:
    rng = np.random.default_rng(0)
    ids, live = rng.integers(0, 50, (3, 9)), rng.integers(0, 2, (3, 9))
    targets, mask = next_tokens(ids, live)
    np.testing.assert_array_equal(targets[:, :8], ids[:, 1:])
    np.testing.assert_array_equal(mask[:, :8], live[:, 1:] != 0)
    assert not mask[:, 8].any()


def test_a_loss_with_it_is_that_of_the_sampled_tokens() -> None:
    """By hand, from full log-softmaxes of a model's own logits."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 7, (2, 5))
    logits = jnp.asarray(rng.standard_normal((2, 5, 7)), jnp.float32)
    completion = np.array([[0, 0, 1, 1, 0], [0, 1, 1, 1, 1]])
    targets, mask = next_tokens(ids, completion)
    logp = by_numpy(lambda x: logitless.logprobs(x, targets, mask=mask).logp, logits)
    plain = np.asarray(jax.nn.log_softmax(logits))
    expected = sum(plain[b, t - 1, ids[b, t]] for b in range(2) for t in range(5) if completion[b, t])
    np.testing.assert_allclose(logp.sum(), expected, rtol=1e-6)


def test_segments_do_not_predict_each_other() -> None:
    ids, segments = np.arange(6)[None], np.array([[0, 0, 0, 1, 1, 1]])
    _, mask = next_tokens(ids, segment_ids=segments)
    assert mask.astype(int).tolist() == [[1, 1, 0, 1, 1, 0]]


def test_what_is_no_batch_of_ids_is_refused() -> None:
    with pytest.raises(ValueError, match=r"next_tokens: ids has shape \(3,\), expected integer ids \[B, T\]"):
        next_tokens(np.zeros((3,), np.int32))
    with pytest.raises(TypeError, match="next_tokens: ids has dtype float32, expected an integer dtype"):
        next_tokens(np.zeros((2, 3), np.float32))
