"""Between arrays over the token dimensions ``[B, T, ...]`` and the flat rows ``[N, ...]`` that the backends take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from logitless.parallel.spec import Placement


def token_specs(p: Placement, tree: Any) -> Any:
    """The PartitionSpec of each leaf: that of the tokens, or replicated for a number."""
    return jax.tree.map(lambda x: p.token_spec if jnp.ndim(x) else PartitionSpec(), tree)


def flat(p: Placement, tree: Any) -> Any:
    """A device's own arrays with their token dimensions flattened; numbers stay."""
    rank = len(p.tokens)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[rank:]) if jnp.ndim(x) else x, tree)


def unflat(tree: Any, shape: tuple[int, ...]) -> Any:
    """Flat arrays with the token dimensions ``shape`` again."""
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), tree)


def on_devices(p: Placement, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """``f`` on each device's own part.

    Replication is not checked: what the collectives leave equal on all devices of an axis is known to us, not to JAX,
    which cannot see through kernels.
    """
    return jax.shard_map(f, mesh=p.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
