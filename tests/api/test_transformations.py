"""jit, grad, vmap over a leading axis, jax.checkpoint and scan: both levels, both plain-JAX backends.

The plain loop is compiled; what a transformation makes of a call is a program, which is interpreted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
from interpreted import by_numpy, in_numpy
from logitless import linear_logprobs, logprobs
from logitless.core.options import Head, Options
from logitless.objectives.objective import Objective
from numerics import f64, head_case, ordinary

B, T, V, H = 3, 8, 37, 12
LEVELS = ("logits", "head")


def inputs(level: str, groups: int = 2) -> tuple[Any, dict[str, jax.Array]]:
    """``(parameters, batch)`` with a leading axis of ``groups`` on everything but the head."""
    rng = np.random.default_rng(0)
    batch = {
        "targets": rng.integers(0, V, (groups, B, T)),
        "mask": rng.random((groups, B, T)) < 0.6,
        "advantages": rng.standard_normal((groups, B)).astype(np.float32),
        "old_logp": (rng.standard_normal((groups, B, T)) * 0.2 - 4).astype(np.float32),
    }
    batch = jax.tree.map(jnp.asarray, batch)
    if level == "logits":
        return jnp.asarray(ordinary(rng, groups * B * T, V).logits, jnp.float32).reshape(groups, B, T, V), batch
    case = head_case(1, (groups, B, T), H, V)
    return case.parameters(), dict(batch, targets=jnp.asarray(case.targets))


def loss_of(level: str, backend: str, kind: str) -> Callable[[Any, dict[str, jax.Array]], jax.Array]:
    """A scalar of one group: an uncoupled loss, a coupled one, or all three statistics."""
    o = Objective(level="sequence") if kind == "sequence" else Objective(entropy_coef=0.01)

    def f(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        if kind == "statistics":
            y, mask = batch["targets"], batch["mask"]
            if level == "logits":
                s = flat_calls.logprobs(params, y, mask=mask, temperature=0.9, backend=backend)
            else:
                s = flat_calls.linear_logprobs(*params, y, mask=mask, temperature=0.9, backend=backend, chunk_size=5)
            return jnp.sum(jnp.where(mask, s.logp**2 + jnp.sin(s.entropy) - 0.3 * s.lse, 0.0))
        if level == "logits":
            return flat_calls.grpo_loss(params, objective=o, backend=backend, **batch)[0]
        return flat_calls.linear_grpo_loss(*params, objective=o, backend=backend, chunk_size=5, **batch)[0]

    return f


def group(level: str, params: Any, batch: Any, i: int) -> tuple[Any, Any]:
    one = params[i] if level == "logits" else (params[0][i], params[1])
    return one, {k: v[i] for k, v in batch.items()}


def close(a: Any, b: Any) -> None:
    """Up to the order of sums, whose terms are as large as the largest entry."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(f64(x), f64(y), rtol=2e-5, atol=2e-6 * max(1.0, np.abs(f64(y)).max()))


@pytest.mark.parametrize(
    "level, kind, backend",
    [
        *(("logits", "token", "chunked"), ("head", "token", "chunked"), ("head", "statistics", "chunked")),
        pytest.param("logits", "statistics", "chunked", marks=pytest.mark.slow),
        *(
            pytest.param(level, *c, marks=pytest.mark.slow)
            for level in LEVELS
            for c in (("sequence", "chunked"), ("statistics", "reference"))
        ),
    ],
)
def test_transformations_agree_with_a_plain_loop(level: str, kind: str, backend: str) -> None:
    params, batch = inputs(level)
    f = loss_of(level, backend, kind)
    vg = jax.value_and_grad(f)
    expected = [jax.jit(vg)(*group(level, params, batch, i)) for i in range(2)]
    total = sum(v for v, _ in expected)
    if level == "logits":
        summed: Any = jnp.stack([g for _, g in expected])
        axes: Any = 0
    else:
        summed = (jnp.stack([g[0] for _, g in expected]), sum(g[1] for _, g in expected))
        axes = (0, None)

    # vmap of the gradient; the logits' statistics take it as their loss does, and the gradient of a vmap the other way
    if backend == "chunked" and (level, kind) in (("head", "token"), ("head", "statistics"), ("logits", "token")):
        values, grads = in_numpy(jax.vmap(vg, in_axes=(axes, 0)))(params, batch)
        close(values, jnp.stack([v for v, _ in expected]))
        each = jnp.stack([g if level == "logits" else g[1] for _, g in expected])
        close(grads if level == "logits" else grads[1], each)

    if (level, kind) != ("logits", "token"):  # the gradient of a vmap
        close(
            in_numpy(jax.value_and_grad(lambda p: jnp.sum(jax.vmap(f, in_axes=(axes, 0))(p, batch))))(params),
            (total, summed),
        )

    # rematerialised, and as the body of a scan over micro-batches; each by itself for one of the losses
    body = jax.checkpoint(f)
    if kind == "token":
        close(in_numpy(jax.value_and_grad(body))(*group(level, params, batch, 0)), expected[0])
        body = f

    def scanned(params: Any) -> jax.Array:
        rows = params if level == "logits" else params[0]

        def step(carry: jax.Array, xs: Any) -> tuple[jax.Array, None]:
            x, b = xs
            return carry + body(x if level == "logits" else (x, params[1]), b), None

        return jax.lax.scan(step, jnp.zeros(()), (rows, batch))[0]

    close(in_numpy(jax.value_and_grad(scanned))(params), (total, summed))


@pytest.mark.parametrize("level", LEVELS)
def test_extra_leading_dimensions(level: str) -> None:
    """Statistics take any number of token dimensions."""
    params, batch = inputs(level)
    y = batch["targets"]
    if level == "logits":
        call = jax.jit(logprobs)
        many, one = call(params, y), call(params.reshape(-1, V), y.reshape(-1))
    else:
        h, w = params
        call = jax.jit(linear_logprobs)
        many, one = call(h, w, y), call(h.reshape(-1, H), w, y.reshape(-1))
    assert many.logp.shape == y.shape
    close(many.logp.reshape(-1), one.logp)


def perturbed(level: str, backend: str, name: str) -> Callable[[jax.Array], jax.Array]:
    params, batch = group(level, *inputs(level), 0)

    def f(value: jax.Array) -> jax.Array:
        options = {"mask": batch["mask"], "backend": backend, name: value}
        call = (lambda **k: flat_calls.logprobs(params, batch["targets"], **k)) if level == "logits" else (
            lambda **k: flat_calls.linear_logprobs(*params, batch["targets"], chunk_size=5, **k)
        )  # fmt: skip
        stats = call(**options)
        return jnp.sum(stats.logp + stats.entropy)

    return f


@pytest.mark.parametrize("name", ["temperature", "softcap", "scale"])
@pytest.mark.parametrize("level", LEVELS)
def test_gradient_by_a_constant_is_refused_by_name_or_right(level: str, name: str) -> None:
    at = jnp.asarray(1.7)
    for transformation in (lambda f: f, jax.jit, jax.checkpoint):
        with pytest.raises(ValueError, match=rf"gradient with respect to .*{name}"):
            jax.grad(transformation(perturbed(level, "chunked", name)))(at)
    f = perturbed(level, "reference", name)
    value = in_numpy(f)
    slope = (value(at + 1e-2) - value(at - 1e-2)) / 2e-2
    np.testing.assert_allclose(float(by_numpy(jax.grad(f), at)), float(slope), rtol=2e-2)
    # stop_gradient makes it a constant
    constant = jax.grad(lambda t: perturbed(level, "chunked", name)(jax.lax.stop_gradient(t)))
    assert float(by_numpy(constant, at)) == 0


@pytest.mark.parametrize("level", LEVELS)
def test_gradient_by_an_objectives_number_is_refused(level: str) -> None:
    params, batch = group(level, *inputs(level), 0)

    def f(beta: jax.Array, backend: str) -> jax.Array:
        o, common = Objective(beta=beta), {**batch, "ref_logp": batch["old_logp"], "backend": backend}
        if level == "logits":
            return flat_calls.grpo_loss(params, objective=o, **common)[0]
        return flat_calls.linear_grpo_loss(*params, objective=o, **common)[0]

    with pytest.raises(ValueError, match="gradient with respect to objective"):
        jax.grad(f)(jnp.asarray(0.1), "chunked")
    assert float(jax.jit(jax.grad(f), static_argnums=1)(jnp.asarray(0.1), "reference")) > 0


def test_lora_scale_is_a_constant_of_chunked() -> None:
    h, w = head_case(1, (4,), H, V).parameters()
    y, pair = jnp.arange(4), (jnp.ones((V, 2)), jnp.ones((2, H)))

    @functools.partial(jax.jit, static_argnums=1)
    def f(scale: jax.Array, backend: str) -> jax.Array:
        return jnp.sum(flat_calls.linear_logprobs(h, Head(w, lora=pair, lora_scale=scale), y, backend=backend).logp)

    with pytest.raises(ValueError, match="gradient with respect to lora_scale"):
        jax.grad(f)(jnp.asarray(0.5), "chunked")
    at = jnp.asarray(0.5)
    slope = (f(at + 1e-2, "reference") - f(at - 1e-2, "reference")) / 2e-2
    np.testing.assert_allclose(float(jax.grad(f)(at, "reference")), float(slope), rtol=2e-2, atol=1e-2)


def test_a_sparse_tolerance_is_a_constant() -> None:
    h, w = head_case(1, (4,), H, V).parameters()

    def f(tolerance: jax.Array) -> jax.Array:
        options = Options(backend="chunked", sparse_backward=tolerance)
        return jnp.sum(linear_logprobs(h, w, jnp.arange(4), options=options).logp)

    with pytest.raises(ValueError, match="gradient with respect to sparse_backward"):
        jax.grad(f)(jnp.asarray(0.1))
