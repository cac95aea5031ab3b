"""Where the tokens and the head of a Tunix model lie on the mesh that Tunix runs under."""

from __future__ import annotations

import math
from collections.abc import Iterable

import jax
from jax.sharding import PartitionSpec

from logitless import Sharding
from logitless.core import compat
from logitless.integrations.tunix.policy_head import Peer, PolicyHead


def sharding_of(head: PolicyHead, batch: int) -> Sharding | None:
    """The ``sharding=`` of a call for ``batch`` rows; ``None`` on one device.

    The axes come from the model's annotations. An axis that does not divide its dimension is left out, as Tunix leaves
    out a batch that does not divide: the compiler then gathers over it, and each of its devices does the same work.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        return None  # inside a shard_map: arrays are one device's own
    mesh = compat.ambient_mesh()
    if mesh.empty or mesh.size == 1:
        return None
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    tokens = _dividing(head.batch_axes, batch, sizes)
    entries: list[tuple[str, ...]] = []
    for size, axes in zip(head.weight.shape, (*head.axes, None, None), strict=False):
        entries.append(_dividing(axes, size, sizes, used=[a for e in entries for a in e]))
    vocabulary = 0 if head.layout == "vh" else 1
    parallel = tuple(a for a in entries[vocabulary] if a not in tokens)
    gathered = tuple(a for a in entries[vocabulary] if a in tokens)
    if entries[vocabulary] != parallel + gathered:
        entries[vocabulary] = parallel  # parts of the vocabulary have to be runs of columns
    working = {*tokens, *parallel}
    return Sharding(
        mesh,
        tokens=PartitionSpec(tokens or None),
        head=PartitionSpec(*(e or None for e in entries)),
        replicated=tuple(a for a, n in sizes.items() if n > 1 and a not in working),
    )


def _dividing(axes: Peer, size: int, sizes: dict[str, int], used: Iterable[str] = ()) -> tuple[str, ...]:
    """The axes that the mesh has and that together divide ``size``."""
    named = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    kept: tuple[str, ...] = ()
    for a in named:
        if a in sizes and a not in used and size % math.prod(sizes[k] for k in (*kept, a)) == 0:
            kept += (a,)
    return kept
