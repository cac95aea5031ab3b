"""Sums over a part of the vocabulary: merged with those of the other part they are the whole's statistics."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from interpreted import by_numpy
from logitless.core.problem import Call, Given, Problem
from logitless.core.stats import STAT_FIELDS, LogitTransform, factor, finish, merge
from logitless.logits import chunked


@pytest.mark.parametrize("place", ["cpu", "gpu"])
@pytest.mark.parametrize("chunk", [0, 2, 5])
@pytest.mark.parametrize("temperature", [None, 0.5])
def test_two_parts_are_the_whole(place: str, chunk: int, temperature: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "platform", lambda: place)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(5, 9)).astype(np.float32) * 3, rng.integers(0, 9, 5)
    transform = LogitTransform(temperature=None if temperature is None else jnp.float32(temperature))

    def sums(x: Any, first: int, last: int) -> Any:
        call = Call("test", last - first, chunk=chunk)
        return chunked.token_sums(Problem(Given(x[:, first:last]), jnp.asarray(y - first), transform, call=call))

    k = factor(transform)
    for cut in (1, 4, 8):
        stats = by_numpy(lambda x, c=cut: finish(merge(sums(x, 0, c), sums(x, c, 9), k), True, transform), x)
        z = x.astype(np.float64) / (temperature or 1.0)
        logp = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
        want = {
            "logp": logp[np.arange(5), y],
            "entropy": -(np.exp(logp) * logp).sum(axis=1),
            "lse": np.log(np.exp(z).sum(axis=1)),
            "max_logit": z.max(axis=1),
            "log_sum_p2": np.log((np.exp(logp) ** 2).sum(axis=1)),
            "max_logp": logp.max(axis=1),
            "is_top1": z.argmax(axis=1) == y,
        }
        for name, numbers in want.items():
            np.testing.assert_allclose(getattr(stats, name), numbers, rtol=2e-5, atol=1e-6, err_msg=name)
    assert {*STAT_FIELDS} == {*want, "peak"}
