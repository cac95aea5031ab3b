"""Ids of each token over eight devices: tokens sharded, the head replicated or gathered; a cut one is refused."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import logitless as L
from interpreted import by_numpy
from test_sharding import run

SHAPE, H, V, K = (8, 4), 16, 64, 5


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, V, SHAPE).astype(np.int32)
    ids = (y[..., None] + np.arange(K)).astype(np.int32) % V
    ids[0, 0, 2:], ids[1, 1] = -1, -1
    return rng.standard_normal((*SHAPE, H)).astype(np.float32), rng.standard_normal((V, H)).astype(np.float32), y, ids


def sharding(kind: Any, head: P, tokens: P | None = None) -> L.Sharding:
    return L.Sharding(
        jax.make_mesh((8,), ("data",), axis_types=(kind,)), tokens=P("data") if tokens is None else tokens, head=head
    )


@pytest.mark.parametrize(
    "kind, head",
    [
        (AxisType.Explicit, P()),
        (AxisType.Auto, P("data", None)),
        # The kind of the axes and what lies on them are no matter of each other.
        pytest.param(AxisType.Auto, P(), marks=pytest.mark.slow),
        pytest.param(AxisType.Explicit, P("data", None), marks=pytest.mark.slow),
    ],
)
def test_the_numbers_are_those_of_one_device(kind: Any, head: P) -> None:
    h, w, y, ids = arrays()
    top = L.TopK(ids, np.log(np.full(ids.shape, 0.1, np.float32)))  # type: ignore[arg-type]
    mask = np.arange(SHAPE[1]) < np.arange(SHAPE[0])[:, None] % 4 + 1

    def selected(h: Any, w: Any, **where: Any) -> Any:
        s = L.linear_logprobs(h, w, y, ids=ids, mask=mask, **where)
        assert s.selected is not None
        return jax.numpy.sum(jax.numpy.sin(s.selected.logp)) + jax.numpy.sum(s.selected.mass * s.lse)

    def supported(h: Any, w: Any, **where: Any) -> Any:
        return L.linear_grpo_loss(h, w, y, advantages=np.ones(8, np.float32), mask=mask, support=ids, **where)[0]

    def distilled(h: Any, w: Any, **where: Any) -> Any:
        return L.linear_distillation_loss(h, w, teacher=top, mask=mask, **where)[0]

    for f in (selected, supported, distilled):
        want, own = by_numpy(jax.value_and_grad(f, argnums=(0, 1)), h, w)
        over_devices = jax.value_and_grad(functools.partial(f, sharding=sharding(kind, head)), argnums=(0, 1))
        value, grads = run(over_devices, h, w)[0]
        np.testing.assert_allclose(value, want, rtol=1e-5)
        for a, b in zip(grads, own, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_cut_vocabulary_is_refused_by_name() -> None:
    h, w, y, ids = arrays()
    with pytest.raises(NotImplementedError, match="ids= over a vocabulary that is cut over devices"):
        L.linear_logprobs(h, w, y, ids=ids, sharding=sharding(AxisType.Auto, P("data", None), P()))
