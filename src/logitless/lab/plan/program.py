"""Compile the real program of a call, possibly for an absent device, and read the compiler's memory report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from logitless import api
from logitless.core.options import Head
from logitless.core.problem import HeadArrays, Layout
from logitless.lab.plan.chips import CPU, Chip
from logitless.lab.tpu import aot
from logitless.mesh.sharding import Placement, automatic

Shapes = dict[str, Any]
"""Trees of ``jax.ShapeDtypeStruct`` by the names of a call's arguments."""


def arrays_of(given: dict[str, Any]) -> Shapes:
    """The arguments that are arrays, as shapes with the dtypes that ``jit`` gives them."""

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=getattr(x, "sharding", None) if _abstract(x) else None)

    found = {k: v for k, v in given.items() if any(hasattr(x, "shape") for x in jax.tree.leaves(v))}
    return {k: jax.tree.map(shape_of, v) for k, v in found.items()}


def _abstract(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def specs_of(arrays: Shapes, given: dict[str, Any], place: Placement) -> dict[str, Any]:
    """How each array lies on the mesh: tokens as the tokens do, a head's arrays as the head does."""
    tokens = arrays["targets"].shape

    def like_tokens(x: Any) -> PartitionSpec:
        axes = zip(place.tokens, tokens, x.shape, strict=False)
        return PartitionSpec(*(a or None if size == n else None for a, n, size in axes))

    def head_at(head: Head, width: int) -> Head:
        layout: Layout = head.layout or ("vh" if head.weight.shape[1] == width else "hv")
        a, b = head.lora or (None, None)
        at = place.head_specs(HeadArrays(head.weight, head.bias, a, b, layout=layout))
        return head.replace(weight=at.weight, bias=at.bias, lora=None if head.lora is None else (at.lora_a, at.lora_b))

    specs = {k: jax.tree.map(like_tokens, v) for k, v in arrays.items()}
    if "logits" in arrays:
        specs["logits"] = PartitionSpec(*specs["logits"], place.vocab or None)
    if "lm_head" in arrays:
        own = Head(arrays["lm_head"], arrays.get("bias"), arrays.get("lora"), layout=given["head_layout"])
        at = head_at(own, arrays["hidden"].shape[-1])
        specs |= {"lm_head": at.weight, "bias": at.bias, "lora": at.lora}
    for model in ("ref", "teacher"):
        if (name := f"{model}_lm_head") in arrays:
            whole, layout = isinstance(arrays[name], Head), given["head_layout"] if model == "ref" else None
            own = arrays[name] if whole else Head(arrays[name], layout=layout)
            at = head_at(own, arrays[f"{model}_hidden"].shape[-1])
            specs[name] = at if whole else at.weight
    if "teacher_logits" in arrays:
        specs["teacher_logits"] = specs["logits"]
    return {k: specs[k] for k in arrays}


def on_mesh(arrays: Shapes, specs: dict[str, Any] | None, mesh: Any) -> Shapes:
    """The arrays with their shardings, where they are over a mesh."""
    if specs is None:
        return arrays

    def placed(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return {k: jax.tree.map(placed, v, specs[k]) for k, v in arrays.items()}


def bytes_of(arrays: Any) -> int:
    """Bytes on one device."""

    def size(x: Any) -> int:
        return math.prod(x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)) * x.dtype.itemsize

    return sum(size(x) for x in jax.tree.leaves(arrays))


def devices_for(chip: Chip | None, count: int) -> tuple[Sequence[Any], str]:
    """``(devices, "")`` to compile for, or ``([], why)`` where that compiler is not at hand."""
    found: Sequence[Any] = jax.devices()
    if chip is not None and found[0].device_kind != chip.device_kind:
        if chip.platform == "tpu" and aot.missing() is None:
            found = aot.topology(aot.slice_for(chip.name, count)).devices
        elif chip is CPU:
            found = jax.devices("cpu")
        else:
            return (
                [],
                aot.missing() or f"a program for {chip.name} is compiled where that GPU is, and there is none here",
            )
    if len(found) < count:
        return [], f"the mesh has {count} devices, and there are {len(found)} here"
    return found[:count], ""


def compiled(
    call: Callable[..., Any], given: dict[str, Any], wanted: tuple[str, ...], devices: Sequence[Any], place: Any
) -> aot.Compiled:
    """The call with the gradients that are ``wanted``, compiled for ``devices``.

    A call for statistics is differentiated through its log-probabilities, or its divergences, with given cotangents.
    """
    arrays = arrays_of(given)
    mesh: Mesh | None = None
    if place is not None:
        sharding = given["sharding"]
        there = place.mesh
        own: Any = automatic(Mesh(np.array(devices).reshape(there.axis_sizes), there.axis_names))
        mesh = own
        given = dict(given, sharding=dataclasses.replace(sharding, mesh=mesh))
        arrays = on_mesh(arrays, specs_of(arrays, given, place), mesh)
    elif devices[0] not in jax.devices()[:1]:
        mesh = Mesh(np.array(devices), ("chip",))
    static = {k: v for k, v in given.items() if k not in arrays}
    cotangent = jax.ShapeDtypeStruct(given["targets"].shape, jnp.float32, sharding=arrays["targets"].sharding)

    def value(moving: Any, fixed: Any, g_logp: jax.Array) -> tuple[jax.Array, Any]:
        out = api.run(call.__name__, {**moving, **fixed, **static})
        if "advantages" in given:
            return out
        return jnp.sum((out.logp if out.divergence is None else out.divergence) * g_logp), out

    def statistics(moving: Any, fixed: Any) -> Any:
        return api.run(call.__name__, {**moving, **fixed, **static})

    moving = {k: arrays.pop(k) for k in wanted}
    donate = (0,) if given.get("donate_logits") else ()
    if not wanted:
        return aot.compile_for(mesh, statistics, moving, arrays)
    return aot.compile_for(mesh, jax.value_and_grad(value, has_aux=True), moving, arrays, cotangent, donate=donate)
