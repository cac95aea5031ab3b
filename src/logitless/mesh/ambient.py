"""Place a public call on its mesh, and refuse sharded arrays without a declared mesh.

:func:`over_mesh` runs a call with ``sharding=`` under its mesh, so that backends and tiles are those of the mesh's
devices, and with every axis left to the compiler: meshes of JAX's explicit-sharding mode (the default of
``jax.make_mesh``) are turned automatic for the length of the call, and results get their explicit type back.

A kernel is one opaque operation to the compiler. Under ``jit`` over several devices it would be run whole on each of
them, on gathered arguments: :func:`refuse_replication` raises where that can be seen while tracing, and
:func:`on_one_device` when the program is lowered.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from logitless.core import compat
from logitless.core.backend import Backend
from logitless.core.options import Arguments
from logitless.core.shapes import PyTree
from logitless.mesh.sharding import Sharding, mesh_of
from logitless.objectives.loss import LossAux

_ADVICE = "Pass sharding=logitless.Sharding(mesh, tokens=..., head=...), or call it inside your own shard_map."


def over_mesh(name: str, run: Callable[[Arguments], PyTree], given: Arguments, with_stats: bool = False) -> PyTree:
    """``run(given)``, the public call ``name`` with ``sharding=`` among its arguments, under its mesh.

    ``with_stats``: also return the statistics of a loss call.
    """
    sharding = given["sharding"]
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"{name}: sharding is {type(sharding).__name__}, expected logitless.Sharding(mesh, tokens=..., head=...)."
        )
    mesh = mesh_of(name, sharding)
    # By name from here on: under the abstract mesh below, a mesh of `with mesh:` would not be found with its devices.
    given = dict(given, sharding=dataclasses.replace(sharding, mesh=mesh))
    _refuse_elsewhere(name, mesh, given)
    if all(t == AxisType.Auto for t in mesh.axis_types):
        with under(mesh):
            return run(given)
    leaves, tree = jax.tree.flatten(given)
    arrays = [x for x in leaves if isinstance(x, jax.Array)]

    def automatic(arrays: list[jax.Array]) -> PyTree:
        found = iter(arrays)
        return run(jax.tree.unflatten(tree, [next(found) if isinstance(x, jax.Array) else x for x in leaves]))

    # Results have one value per token, or are a loss and its metrics. Include the mesh's devices in the name if they
    # are known: without jit, a result that was computed on one device alone is laid out by it.
    def lies(spec: PartitionSpec) -> PyTree:
        return NamedSharding(mesh, spec) if isinstance(mesh, Mesh) else spec

    tokens = lies(sharding.tokens)
    out: PyTree = lies(PartitionSpec()) if "advantages" in given else tokens
    if with_stats:
        out = (out, LossAux(out, tokens))
    with under(mesh):
        return jax.sharding.auto_axes(automatic, out_sharding=out)(arrays)


def _refuse_elsewhere(call: str, mesh: Mesh | AbstractMesh, given: Arguments) -> None:
    """Raise for arrays that cannot get onto the mesh; what ``jit`` traces has no place yet, and is left to it."""
    arrays = [(name, x) for name, value in given.items() for x in jax.tree.leaves(value) if isinstance(x, jax.Array)]
    placed = [(name, x) for name, x in arrays if not isinstance(x, jax.core.Tracer)]
    if isinstance(mesh, AbstractMesh):
        if len(placed) == len(arrays) and not any(isinstance(x.sharding, NamedSharding) for _, x in placed):
            raise ValueError(
                f"{call}: sharding.mesh is an AbstractMesh, which has no devices, and no array lies on a mesh that has "
                "them. Give Sharding(mesh=...) a jax.sharding.Mesh, or call it under jax.jit with arrays of the mesh."
            )
        return
    devices = set(mesh.devices.flat)
    for name, x in placed:
        if x.committed and x.sharding.device_set != devices:
            raise ValueError(
                f"{call}: {name} lies on {_named(x.sharding.device_set)}, and the mesh of sharding= has "
                f"{_named(devices)}. Put it on the mesh: jax.device_put({name}, NamedSharding(mesh, P(...)))."
            )
    ambient = jax.sharding.get_abstract_mesh()
    if ambient.empty and any(t != AxisType.Auto for t in mesh.axis_types):
        for name, x in arrays:
            if compat.differentiated_without_jit(x):
                raise ValueError(
                    f"{call}: a gradient by {name} without jit, over a mesh with explicit axes that is not the "
                    "ambient one: JAX would send the gradient back on one device. Use jax.jit(jax.grad(...)), or call "
                    "it under jax.set_mesh(mesh)."
                )


def _named(devices: set[jax.Device]) -> str:
    """Devices in words."""
    shown = ", ".join(str(d.id) for d in sorted(devices, key=lambda d: d.id)[:8])
    return f"{len(devices)} device{'s' * (len(devices) > 1)} ({shown}{', ...' * (len(devices) > 8)})"


def under(mesh: Mesh | AbstractMesh) -> AbstractContextManager[object]:
    """The context in which a call's backend and tiles are chosen: its mesh as the ambient one, if it is not."""
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    if jax.sharding.get_abstract_mesh() == abstract:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(abstract)


def refuse_replication(call: str, backend: Backend, arrays: Iterable[tuple[str, object]]) -> None:
    """Raise where a call without ``sharding=`` would run a kernel once per device on the whole arrays.

    ``arrays`` are named ones. Arrays of an explicit-sharding mesh are refused for every backend.
    """
    for name, x in arrays:
        if compat.varying_axes(x):
            raise ValueError(
                f"{call}: {name} varies over the axes {sorted(compat.varying_axes(x))} of a shard_map with "
                "check_vma=True, whose types kernels and loops do not carry. Use jax.shard_map(..., check_vma=False), "
                "and sum the head's gradient over these axes yourself."
            )
    ambient = jax.sharding.get_abstract_mesh()
    if not ambient.empty and set(ambient.manual_axes) == set(ambient.axis_names):
        return  # inside a shard_map: arrays are one device's own
    for name, x in arrays:
        spec = getattr(getattr(jax.typeof(x), "sharding", None), "spec", ())
        if any(s is not None for s in spec):
            raise ValueError(f"{call}: {name} has the explicit sharding {spec}. {_ADVICE}")
    if backend.kernels is None:
        return  # plain JAX: the compiler partitions it
    known = ((name, x) for name, x in arrays if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer))
    counts = ((name, len(x.sharding.device_set)) for name, x in known)
    why = next((f"{name} lies on {count} devices" for name, count in counts if count > 1), None)
    if why is None and not ambient.empty and ambient.size > 1:
        why = f"the ambient mesh has {ambient.size} devices"
    if why is not None:
        raise ValueError(
            f"{call}: {why}, and the kernels of backend={backend.name!r} are not partitioned by the compiler: each "
            f"device would run them on the whole arrays. {_ADVICE}"
        )


def on_one_device(call: str, backend: Backend, targets: jax.Array) -> jax.Array:
    """``targets`` as they are; lowering fails where a kernel backend's program is partitioned over several devices.

    Arguments that lie on several devices are not seen while ``jit`` traces. (Mosaic itself refuses on TPUs only.)
    """
    if backend.kernels is None:
        return targets
    return _one_device.bind(targets, call=call, backend=backend.name)


_one_device = Primitive("logitless_one_device")
_one_device.def_impl(lambda x, **_: x)
_one_device.def_abstract_eval(lambda x, **_: x)
batching.primitive_batchers[_one_device] = lambda args, dims, **kw: (_one_device.bind(*args, **kw), dims[0])


def _lower_one_device(ctx: mlir.LoweringRuleContext, x: Any, *, call: str, backend: str) -> list[Any]:
    devices = compat.partitioned_over(ctx)
    if devices > 1:
        raise ValueError(
            f"{call}: the program is compiled for {devices} devices, and the kernels of backend={backend!r} are not "
            f"partitioned by the compiler: each device would run them on the whole arrays. {_ADVICE}"
        )
    return [x]


mlir.register_lowering(_one_device, _lower_one_device)
