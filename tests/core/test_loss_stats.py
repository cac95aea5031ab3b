"""``with_stats``: a loss call's own statistics, those of ``linear_logprobs`` and ``logprobs``, at no matmul's cost."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flat_calls
import logitless
from interpreted import by_numpy
from logitless import Objective, Sharding, TokenStats
from logitless.core.stats import STAT_FIELDS
from matmuls import matmul_flops

B, T, H, V = 4, 6, 8, 32
OBJECTIVES = {"in forward": Objective(), "later": Objective.gspo(entropy_coef=0.1)}


@functools.cache
def batch() -> dict[str, Any]:
    """A row whose advantage is zero and one that is masked throughout are among them."""
    rng = np.random.default_rng(0)
    return {
        "hidden": rng.normal(size=(B, T, H)).astype(np.float32),
        "lm_head": rng.normal(size=(V, H)).astype(np.float32),
        "targets": rng.integers(0, V, (B, T)),
        "mask": np.arange(T) < np.array([6, 3, 0, 4])[:, None],
        "advantages": np.array([1.0, -0.5, 2.0, 0.0], np.float32),
    }


def loss_and_aux(hidden: Any, lm_head: Any, **options: Any) -> Any:
    data = {k: v for k, v in batch().items() if k not in ("hidden", "lm_head")}
    return flat_calls.with_stats(flat_calls.linear_grpo_loss)(hidden, lm_head, **data, **options)


@functools.cache
def on_one_device() -> Any:
    return by_numpy(loss_and_aux, batch()["hidden"], batch()["lm_head"])


def assert_same(a: TokenStats, b: TokenStats) -> None:
    for name in STAT_FIELDS:
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=2e-6, rtol=2e-6, err_msg=name)


@pytest.mark.parametrize("way", list(OBJECTIVES))
def test_statistics_are_those_of_linear_logprobs(way: str) -> None:
    d = batch()
    f = functools.partial(loss_and_aux, objective=OBJECTIVES[way])
    (loss, aux), grads = by_numpy(jax.value_and_grad(f, (0, 1), has_aux=True), d["hidden"], d["lm_head"])
    call = functools.partial(logitless.linear_logprobs, mask=d["mask"])
    assert_same(aux.stats, by_numpy(call, d["hidden"], d["lm_head"], d["targets"]))
    assert aux.stats.logp.shape == (B, T) and np.abs(aux.stats.logp[1, 3:]).max() == 0

    plain = functools.partial(logitless.linear_grpo_loss, objective=OBJECTIVES[way])
    rest = {k: v for k, v in d.items() if k not in ("hidden", "lm_head")}
    f = jax.value_and_grad(functools.partial(plain, **rest), (0, 1), has_aux=True)
    (expected, metrics), expected_grads = by_numpy(f, d["hidden"], d["lm_head"])
    for a, b in zip(jax.tree.leaves((loss, aux.metrics, grads)), jax.tree.leaves((expected, metrics, expected_grads)),
                    strict=True):  # fmt: skip
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("way", list(OBJECTIVES))
def test_statistics_cost_no_matmul(way: str) -> None:
    d = batch()

    def step(call: Any) -> Any:
        rest = {k: v for k, v in d.items() if k not in ("hidden", "lm_head")}
        f = functools.partial(call, objective=OBJECTIVES[way], **rest)
        return lambda h, w: jax.value_and_grad(f, (0, 1), has_aux=True)(h, w)

    plain, with_stats = (
        matmul_flops(step(c), d["hidden"], d["lm_head"])
        for c in (logitless.linear_grpo_loss, logitless.with_stats(logitless.linear_grpo_loss))
    )
    assert plain == with_stats > 0


@pytest.mark.parametrize("way", list(OBJECTIVES))
def test_statistics_carry_no_gradient(way: str) -> None:
    def of_stats(h: Any) -> Any:
        _, aux = loss_and_aux(h, batch()["lm_head"], objective=OBJECTIVES[way])
        return jnp.sum(aux.stats.logp) + jnp.sum(aux.stats.entropy)

    assert np.abs(by_numpy(jax.grad(of_stats), batch()["hidden"])).max() == 0


def test_statistics_from_logits() -> None:
    d = batch()
    logits = d["hidden"] @ d["lm_head"].T
    rest = {k: d[k] for k in ("targets", "mask", "advantages")}
    _, (_, stats) = by_numpy(lambda x: flat_calls.with_stats(flat_calls.grpo_loss)(x, **rest), logits)
    assert_same(stats, by_numpy(lambda x: logitless.logprobs(x, d["targets"], mask=d["mask"]), logits))


@pytest.mark.parametrize("how", ["with mesh", "set_mesh", "set_mesh, explicit", "given"])
@pytest.mark.filterwarnings("ignore:`with mesh.*:DeprecationWarning")
def test_statistics_and_mesh_over_devices(how: str) -> None:
    """However the mesh is said, the loss finds it, and statistics lie as the tokens do."""
    d = batch()
    kind = AxisType.Explicit if how.endswith("explicit") else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(kind,) * 2)
    contexts = {"with mesh": mesh, "given": contextlib.nullcontext()}
    sharding = Sharding(mesh if how == "given" else None, tokens=P("fsdp"), head=P("tp", "fsdp"))
    with contexts.get(how) or jax.set_mesh(mesh):
        f = jax.jit(functools.partial(loss_and_aux, sharding=sharding))
        loss, aux = f(d["hidden"], d["lm_head"])
    expected, alone = on_one_device()
    np.testing.assert_allclose(loss, expected, atol=1e-6)
    assert_same(aux.stats, alone.stats)
    assert aux.stats.logp.sharding.spec[0] == "fsdp"


def test_other_functions_are_refused() -> None:
    with pytest.raises(TypeError, match=r"'linear_logprobs' is not a loss call; expected logitless.grpo_loss"):
        logitless.with_stats(logitless.linear_logprobs)  # type: ignore[arg-type]
