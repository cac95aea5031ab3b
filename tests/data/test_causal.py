"""The shift: a position's target is the next token, and it counts if that token does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logitless
from interpreted import by_numpy


def test_every_counted_position_predicts_the_token_after_it() -> None:
    rng = np.random.default_rng(0)
    ids, live = rng.integers(0, 50, (3, 9)), rng.integers(0, 2, (3, 9))
    targets, mask = logitless.next_tokens(ids, live)
    for b in range(3):
        for t in range(8):
            assert targets[b, t] == ids[b, t + 1]
            assert bool(mask[b, t]) == bool(live[b, t + 1])
        assert not mask[b, 8]


def test_a_loss_with_it_is_that_of_the_sampled_tokens() -> None:
    """By hand, from full log-softmaxes of a model's own logits."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 7, (2, 5))
    logits = jnp.asarray(rng.standard_normal((2, 5, 7)), jnp.float32)
    completion = np.array([[0, 0, 1, 1, 0], [0, 1, 1, 1, 1]])
    targets, mask = logitless.next_tokens(ids, completion)
    logp = by_numpy(lambda x: logitless.logprobs(x, targets, mask=mask).logp, logits)
    plain = np.asarray(jax.nn.log_softmax(logits))
    expected = sum(plain[b, t - 1, ids[b, t]] for b in range(2) for t in range(5) if completion[b, t])
    np.testing.assert_allclose(logp.sum(), expected, rtol=1e-6)


def test_segments_do_not_predict_each_other() -> None:
    ids, segments = np.arange(6)[None], np.array([[0, 0, 0, 1, 1, 1]])
    _, mask = logitless.next_tokens(ids, segment_ids=segments)
    assert mask.astype(int).tolist() == [[1, 1, 0, 1, 1, 0]]


def test_what_is_no_batch_of_ids_is_refused() -> None:
    with pytest.raises(ValueError, match=r"next_tokens: ids has shape \(3,\), expected integer ids \[B, T\]"):
        logitless.next_tokens(np.zeros((3,), np.int32))
    with pytest.raises(TypeError, match="next_tokens: ids has dtype float32, expected an integer dtype"):
        logitless.next_tokens(np.zeros((2, 3), np.float32))
