"""Where the arrays of a run live: one mesh with the axes ``data``, ``fsdp`` and ``tensor``.

    batch rows         ("data", "fsdp")
    weights [.., a, b] a over "fsdp", b over "tensor" (embedding and head: vocabulary over "tensor", width over "fsdp")
    vectors            replicated

The layout of a weight is a matter of memory, never of results. Everything runs under ``jax.jit``, which moves what must
move; the loss is told of the mesh, because its kernels cannot be partitioned from outside, and so is the model, whose
activations are rows everywhere (:func:`logitless.train.model.hidden_states`, ``layout``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from logitless.lab.tools.command_config import ConfigError
from logitless.mesh.sharding import Sharding

if TYPE_CHECKING:
    from logitless.train.config import TrainConfig

AXES = ("data", "fsdp", "tensor")
ROWS = P(("data", "fsdp"))


def devices_needed(config: TrainConfig) -> int:
    """How many devices the mesh has."""
    return config.mesh.data * config.mesh.fsdp * config.mesh.tensor


def loss_sharding(config: TrainConfig) -> Sharding | None:
    """How the arrays of the loss calls lie; ``None`` on one device."""
    if devices_needed(config) == 1:
        return None
    return Sharding(make_mesh(config), tokens=ROWS, head=P("tensor", "fsdp"))


def rows_layout(config: TrainConfig) -> NamedSharding | None:
    """How arrays whose first axis is the rows of a gradient lie; ``None`` on one device."""
    return None if devices_needed(config) == 1 else NamedSharding(make_mesh(config), ROWS)


def make_mesh(config: TrainConfig) -> Mesh:
    """The mesh of the configuration over the first devices there are."""
    needed = devices_needed(config)
    devices = jax.devices()
    if len(devices) < needed:
        raise ConfigError(
            f"mesh: {config.mesh.data} x {config.mesh.fsdp} x {config.mesh.tensor} asks for {needed} devices, "
            f"but there are {len(devices)}"
        )
    shape = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    return Mesh(np.asarray(devices[:needed]).reshape(shape), AXES)


def weight_spec(path: Any, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The layout of one weight; an axis that does not divide is left whole."""
    name = str(getattr(path[-1], "key", ""))
    if len(shape) < 2 or name.endswith(("norm", "bias")):
        return P()
    last = ("tensor", "fsdp") if name in ("embed", "lm_head") else ("fsdp", "tensor")
    axes = [axis if shape[i - 2] % mesh.shape[axis] == 0 else None for i, axis in enumerate(last)]
    return P(*[None] * (len(shape) - 2), *axes)


def place_weights(tree: Any, mesh: Mesh | None, put: Callable[..., Any] = jax.device_put) -> Any:
    """Weights laid out over the mesh (``None``: on the default device)."""
    if mesh is None:
        return put(tree)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: put(x, NamedSharding(mesh, weight_spec(path, x.shape, mesh))), tree
    )


def keep_layout(tree: Any, mesh: Mesh | None) -> Any:
    """Weights (or moments) computed under ``jit``, in the layout of :func:`place_weights`."""
    return tree if mesh is None else place_weights(tree, mesh, jax.lax.with_sharding_constraint)


def place_rows(tree: Any, mesh: Mesh | None) -> Any:
    """Arrays whose first axis is rows, spread over the mesh where it divides them (a few prompts may be fewer)."""
    if mesh is None:
        return jax.device_put(tree)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P() if len(x) % shards else ROWS)), tree)


def place_micro_batches(tree: Any, mesh: Mesh | None) -> Any:
    """Arrays ``[slices, rows, slots]``, their rows spread over the mesh; all else on every device."""
    if mesh is None:
        return jax.device_put(tree)
    rows = NamedSharding(mesh, P(None, *ROWS))
    return jax.tree.map(lambda x: jax.device_put(x, rows if np.ndim(x) == 3 else NamedSharding(mesh, P())), tree)
