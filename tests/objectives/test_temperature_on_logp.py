"""``temperature_on="logp"``: statistics and loss divide the log-probability of temperature one alike."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
import logitless
from interpreted import by_numpy
from logitless import Objective, oracle
from loss_cases import every_pair, without_metrics

B, T, H, V = 3, 5, 6, 17
OBJECTIVES = {
    "in forward": Objective.preset("mllm-jax", beta=0.1),
    "later": Objective.gspo(temperature_on="logp", beta=0.1, entropy_coef=0.1),
}
CALLS = {"logits": ("grpo_loss", "logprobs"), "head": ("linear_grpo_loss", "linear_logprobs")}


@functools.cache
def batch() -> dict[str, Any]:
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    mask = np.arange(T) < np.array([[5], [3], [4]])
    hidden, head = 2.0 * normal(B, T, H), normal(V, H)
    logits = hidden @ head.T
    targets = rng.integers(0, V, (B, T))
    logp = oracle.token_stats(logits, targets).logp
    temperatures = rng.uniform(0.5, 2.0, (B, T)).astype(np.float32)
    return {
        "logits": (logits,),
        "head": (hidden, head),
        "targets": targets,
        "arrays": {"advantages": np.float32([1.0, -0.5, 2.0]), "mask": mask},
        "old": {"old_logp": (logp / 0.7 + 0.1 * normal(B, T)).astype(np.float32)},
        "ref": {"ref_logp": (logp / 0.7 + 0.3 * normal(B, T)).astype(np.float32)},
        "temperatures": {
            "a number": 0.7,
            "per token": np.where(mask, temperatures, np.nan).astype(np.float32),  # of a masked token: anything
        },
    }


@pytest.mark.optimized
@pytest.mark.parametrize("kind, way, level", every_pair(["a number", "traced", "per token"], OBJECTIVES, CALLS))
def test_on_policy_the_ratio_is_one_to_the_bit(level: str, way: str, kind: str) -> None:
    """``old_logp`` is that of ``logprobs(..., objective=o)``, compiled apart."""
    d, (loss_name, stats_name) = batch(), CALLS[level]
    temperature: Any = d["temperatures"]["a number" if kind == "traced" else kind]
    o = OBJECTIVES[way].replace(temperature=jnp.asarray(temperature) if kind == "per token" else temperature)
    arrays = {**d["arrays"], **d["ref"]}

    def statistics(objective: Objective, x: Any) -> Any:
        call = getattr(flat_calls, stats_name)
        return call(*x, d["targets"], mask=d["arrays"]["mask"], objective=objective, backend="chunked")

    def loss(objective: Objective, x: Any, old: Any) -> Any:
        call = flat_calls.flat(logitless.with_stats(getattr(logitless, loss_name)))
        return call(*x, d["targets"], **arrays, old_logp=old, objective=objective, backend="chunked")

    run, run_loss = (jax.jit(f) for f in (statistics, loss))
    if kind != "traced":
        run, run_loss = (jax.jit(functools.partial(f, o)) for f in (statistics, loss))
    given = (o,) if kind == "traced" else ()
    x = d[level]
    old = run(*given, x).logp
    (_, (metrics, stats)) = run_loss(*given, x, old)
    assert float(metrics["ratio_min"].sum) == float(metrics["ratio_max"].sum) == 1.0
    np.testing.assert_array_equal(stats.logp, old)
    want = oracle.token_stats(d["logits"][0], d["targets"]).logp / temperature
    np.testing.assert_allclose(old, np.where(d["arrays"]["mask"], want, 0.0), rtol=2e-6)


@pytest.mark.parametrize("level", list(CALLS))
@pytest.mark.parametrize("way", list(OBJECTIVES))
@pytest.mark.parametrize("kind", ["a number", "per token"])
def test_loss_and_gradient_are_those_of_float64(level: str, way: str, kind: str) -> None:
    d = batch()
    temperature = d["temperatures"][kind]
    live = d["arrays"]["mask"]
    own = temperature if kind == "a number" else jnp.asarray(temperature)
    truth = temperature if kind == "a number" else np.where(live, temperature, 1.0)
    o = OBJECTIVES[way].replace(temperature=own)
    arrays = {**d["arrays"], **d["ref"], **d["old"]}
    f = getattr(flat_calls, CALLS[level][0])
    number = tuple(range(len(d[level])))
    with without_metrics():
        loss, gradients = by_numpy(
            jax.value_and_grad(lambda *x: f(*x, d["targets"], **arrays, objective=o)[0], number), *d[level]
        )
    want, *exact = getattr(oracle, CALLS[level][0])(
        *d[level], d["targets"], **arrays, objective=o.replace(temperature=jnp.asarray(truth))
    )
    assert float(loss) == pytest.approx(want, rel=1e-5)
    for got, g in zip(gradients, exact, strict=False):
        np.testing.assert_allclose(got, g, rtol=1e-4, atol=1e-5 * np.abs(g).max())


@pytest.mark.parametrize("level", list(CALLS))
def test_statistics_divide_logp_alone_and_their_gradient(level: str) -> None:
    d = batch()
    call = functools.partial(getattr(flat_calls, CALLS[level][1]), targets=d["targets"], mask=d["arrays"]["mask"])
    o = Objective(temperature=0.5, temperature_on="logp")

    def total(x: Any, **options: Any) -> Any:
        stats = call(*x, **options)
        return jnp.sum(stats.logp), stats

    (plain, divided) = (
        by_numpy(jax.value_and_grad(functools.partial(total, **options), has_aux=True), d[level])
        for options in ({}, {"objective": o})
    )
    for field in ("entropy", "lse", "max_logit", "max_logp", "is_top1"):
        np.testing.assert_array_equal(getattr(plain[0][1], field), getattr(divided[0][1], field), err_msg=field)
    np.testing.assert_array_equal(2.0 * plain[0][1].logp, divided[0][1].logp)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(2.0 * a, b, rtol=1e-6, atol=1e-7), plain[1], divided[1])


def test_policy_loss_takes_them_as_they_are() -> None:
    """``policy_loss(logprobs(..., objective=o), objective=o)`` is the loss of the one call."""
    d = batch()
    o, arrays = OBJECTIVES["in forward"].replace(temperature=0.7), {**d["arrays"], **d["ref"], **d["old"]}

    def in_two(x: Any) -> Any:
        stats = logitless.logprobs(x, d["targets"], mask=arrays["mask"], objective=o)
        return logitless.policy_loss(stats, objective=o, **arrays)

    def in_one(x: Any) -> Any:
        return flat_calls.grpo_loss(x, d["targets"], objective=o, **arrays)

    two, one = (by_numpy(f, *d["logits"]) for f in (in_two, in_one))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), two, one)


def test_a_reference_head_divides_as_the_policy_does() -> None:
    d = batch()
    hidden, head = d["head"]
    o = Objective(beta=1.0, kl="k1", temperature_on="logp", temperature=0.7)
    same = {"ref_hidden": hidden, "ref_lm_head": head}
    _, metrics = by_numpy(
        lambda h, w: flat_calls.linear_grpo_loss(h, w, d["targets"], objective=o, **d["arrays"], **same), hidden, head
    )
    assert abs(float(metrics["kl_k1"].sum)) < 1e-5
