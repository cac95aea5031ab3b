"""Bad meshes and specs are refused by name before anything compiles, and so is a kernel that would be replicated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flat_calls
import logitless
from logitless import Sharding
from loss_cases import without_metrics
from test_sharding import mesh_of

pytestmark = pytest.mark.quick

H, W, Y = jnp.ones((4, 6, 8)), jnp.ones((20, 8)), jnp.zeros((4, 6), jnp.int32)


def mesh(explicit: bool = False, **axes: int) -> Any:
    return mesh_of(axes, explicit)


BAD = {
    "an unknown axis": (dict(data=8), dict(tokens=P("dta")), "tokens names the axis 'dta'; the mesh has 'data'"),
    "an axis twice": (dict(data=2), dict(tokens=P("data", "data")), "uses the axis 'data' twice"),
    "too many entries": (dict(data=2), dict(tokens=P("data", None, None)), "has 3 entries, but there are 2 token"),
    "tokens do not divide": (dict(data=8), dict(tokens=P("data")), "token dimension 0 of size 4 .* 8 devices"),
    "vocabulary does not divide": (
        dict(tensor=8),
        dict(head=P("tensor")),
        "vocabulary of size 20 .*say Head.lm_head, vocab_size=",
    ),
    "hidden does not divide": (
        dict(data=3), dict(tokens=P(None, "data"), head=P(None, "data")), "hidden dimension of size 8",
    ),
    "an idle axis": (dict(data=2, tensor=2), dict(tokens=P("data")), "axis 'tensor' .*replicated='tensor'"),
    "interleaved columns": (
        dict(data=2, tensor=2), dict(tokens=P("data"), head=P(("data", "tensor"))), "vocabulary-parallel axes first",
    ),
    "vocab of a head": (dict(data=2), dict(tokens=P("data"), vocab="data"), "leave vocab out"),
    "a head of three": (dict(data=2), dict(tokens=P("data"), head=P(None, None, None)), "lm_head has 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refused_by_name(name: str) -> None:
    axes, spec, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        logitless.linear_logprobs(H, W, Y, sharding=Sharding(mesh(**axes), **spec))


def test_refused_types() -> None:
    with pytest.raises(TypeError, match=r"expected logitless.Sharding"):
        logitless.linear_logprobs(H, W, Y, sharding=P("data"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected a jax.sharding.PartitionSpec"):
        Sharding(tokens="data")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mesh is str"):
        Sharding("data")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no ambient one"):
        logitless.linear_logprobs(H, W, Y, sharding=Sharding(tokens=P("data")))


def test_logits_axis_in_two_places() -> None:
    sharding = Sharding(mesh(data=2), tokens=P("data"), vocab="data")
    with pytest.raises(ValueError, match=r"in sharding.tokens and in sharding.vocab"):
        logitless.logprobs(jnp.ones((4, 6, 8)), Y, sharding=sharding)


def test_sharding_inside_a_shard_map_is_refused() -> None:
    m = mesh(data=2)

    def f(h: Any, y: Any) -> Any:
        return logitless.linear_logprobs(h, W, y, sharding=Sharding(m, tokens=P("data"))).logp

    with pytest.raises(ValueError, match="inside a shard_map"):
        jax.shard_map(f, mesh=m, in_specs=(P("data"), P("data")), out_specs=P("data"))(H, Y)


def test_a_checked_shard_map_is_refused() -> None:
    def f(h: Any, y: Any) -> Any:
        return logitless.linear_logprobs(h, W, y).logp

    with pytest.raises(ValueError, match=r"check_vma=False"):
        jax.shard_map(f, mesh=mesh(data=2), in_specs=(P("data"), P("data")), out_specs=P("data"))(H, Y)


@pytest.mark.parametrize("which", ["targets", "mask", "advantages"])
def test_a_checked_shard_map_with_any_varying_array_is_refused_by_name(which: str) -> None:
    """Not only hidden states: what JAX would say is that a loop's types differ."""
    given = {"targets": Y, "mask": jnp.ones(Y.shape, bool), "advantages": jnp.ones(Y.shape, jnp.float32)}

    def f(varying: Any) -> Any:
        own = {k: varying if k == which else v[: Y.shape[0] // 2] for k, v in given.items()}
        return flat_calls.linear_grpo_loss(H[: Y.shape[0] // 2], W, **own)[0][None]

    name = which if which != "advantages" else "the loss's arrays"
    with pytest.raises(ValueError, match=rf"{name} varies over the axes.*check_vma=False"):
        jax.shard_map(f, mesh=mesh(data=2), in_specs=P("data"), out_specs=P("data"))(given[which])


def test_an_unchecked_shard_map_works_without_jit() -> None:
    m = mesh(data=2)

    def loss(h: Any, y: Any) -> Any:
        own = logitless.linear_grpo_loss(h, W, y, advantages=jnp.ones(y.shape, jnp.float32))[0]
        return jax.lax.psum(own, "data") / 2

    f = jax.shard_map(loss, mesh=m, in_specs=(P("data"), P("data")), out_specs=P(), check_vma=False)
    with without_metrics():  # every operation is compiled
        value, gradient = jax.value_and_grad(f)(H, Y)
    alone = jax.jit(lambda h: logitless.linear_grpo_loss(h, W, Y, advantages=jnp.ones(Y.shape, jnp.float32))[0])(H)
    np.testing.assert_allclose(value, alone, rtol=1e-6)
    np.testing.assert_allclose(gradient, jax.jit(jax.grad(f))(H, Y), rtol=1e-6)


@pytest.mark.parametrize("how", ["arrays on several devices", "ambient mesh", "arguments of jit"])
def test_a_replicated_kernel_is_refused(how: str) -> None:
    h, w, y = jnp.ones((4, 4, 128)), jnp.ones((16, 128)), jnp.zeros((4, 4), jnp.int32)
    options: dict[str, Any] = {"backend": "pallas_tpu", "interpret": True}
    m = mesh(data=4)
    if how == "ambient mesh":
        with jax.set_mesh(m), pytest.raises(ValueError, match=r"ambient mesh has 4 devices.*Pass sharding="):
            jax.jit(lambda h: flat_calls.linear_logprobs(h, w, y, **options).logp)(h)
        return
    placed = jax.device_put(h, NamedSharding(m, P("data")))
    if how == "arguments of jit":  # tracing does not see them, lowering does
        with pytest.raises(ValueError, match=r"compiled for 4 devices.*Pass sharding="):
            jax.jit(lambda h: flat_calls.linear_logprobs(h, w, y, **options).logp)(placed)
        return
    with pytest.raises(ValueError, match=r"hidden lies on 4 devices.*Pass sharding="):
        flat_calls.linear_logprobs(placed, w, y, **options)
    with pytest.raises(ValueError, match=r"logits lies on 4 devices.*Pass sharding="):
        flat_calls.logprobs(placed, y, **options)


def test_explicit_sharding_without_the_keyword_is_refused() -> None:
    m = mesh(explicit=True, data=2)
    placed = jax.device_put(H, NamedSharding(m, P("data")))
    with pytest.raises(ValueError, match="explicit sharding"):
        logitless.linear_logprobs(placed, W, Y)


SPLIT: dict[str, Any] = dict(tokens=P("data"), head=P("tensor"))
ADVANTAGES = jnp.array([1.0, -1.0, 0.5, 2.0])


def test_arrays_beside_an_explicit_mesh_get_onto_it_without_jit() -> None:
    on = Sharding(mesh(explicit=True, data=2, tensor=2), **SPLIT)
    loss, metrics = logitless.linear_grpo_loss(H, W, Y, advantages=ADVANTAGES, sharding=on)
    np.testing.assert_allclose(loss, -ADVANTAGES.mean(), rtol=1e-6)
    assert loss.sharding.device_set == set(on.mesh.devices.flat) == metrics["logp"].sum.sharding.device_set


def test_a_gradient_without_jit_over_an_explicit_mesh_is_refused() -> None:
    """JAX's own words are about the lengths of device assignments."""
    on = Sharding(mesh(explicit=True, data=2, tensor=2), **SPLIT)

    def loss(h: Any) -> Any:
        return logitless.linear_grpo_loss(h, W, Y, advantages=ADVANTAGES, sharding=on)[0]

    with pytest.raises(ValueError, match=r"gradient by hidden without jit.*jax.jit\(jax.grad.*jax.set_mesh\(mesh\)"):
        jax.grad(loss)(H)
    jax.jit(jax.grad(loss)).lower(H)


def test_arrays_of_other_devices_are_refused_by_name() -> None:
    elsewhere = jax.device_put(W, jax.devices()[5])
    for explicit in (True, False):
        on = Sharding(mesh(explicit, data=2, tensor=2), **SPLIT)
        with pytest.raises(ValueError, match=r"lm_head lies on 1 device \(5\).*4 devices \(0, 1, 2, 3\).*device_put"):
            logitless.linear_logprobs(H, elsewhere, Y, sharding=on)


def test_a_mesh_without_devices_needs_arrays_that_have_them() -> None:
    m = mesh(data=2, tensor=2)
    on = Sharding(m.abstract_mesh, **SPLIT)
    with pytest.raises(ValueError, match="AbstractMesh, which has no devices"):
        logitless.linear_logprobs(H, W, Y, sharding=on)
    jax.eval_shape(lambda h: logitless.linear_logprobs(h, W, Y, sharding=on).logp, H)
