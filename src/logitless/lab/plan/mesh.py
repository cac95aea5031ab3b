"""A mesh with the axes ``data``, ``fsdp`` and ``tensor``, and the plan of a step on it.

data     each device has its own tokens and the whole head
fsdp     tokens and head are both split
tensor   the vocabulary is split, tokens are not
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from logitless.lab.plan.plan import Plan, plan
from logitless.mesh.sharding import Sharding

AXES = ("data", "fsdp", "tensor")
"""Outermost first."""


def parse_mesh(text: str) -> dict[str, int]:
    """``data=8,fsdp=4,tensor=2`` as numbers; axes that are not named have size 1."""
    axes = dict.fromkeys(AXES, 1)
    seen = set()
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in axes:
            raise ValueError(f"mesh {text!r}: {name!r} is not an axis; expected data=N,fsdp=N,tensor=N.")
        if name in seen:
            raise ValueError(f"mesh {text!r}: {name} is given twice.")
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"mesh {text!r}: {name}={size}, expected a positive number.")
        axes[name] = int(size)
        seen.add(name)
    return axes


def plan_mesh(
    width: int,
    vocab: int,
    tokens: int,
    axes: dict[str, int],
    *,
    chip: str | None = None,
    dtype: Any = "bfloat16",
    **options: Any,
) -> Plan:
    """A single device's part of a step over ``tokens`` tokens in total on a mesh; ``options`` are arguments of
    :func:`logitless.plan`.

    >>> from logitless.lab.plan.mesh import parse_mesh, plan_mesh
    >>> p = plan_mesh(1024, 32768, 8 * 2048, parse_mesh("fsdp=8"), chip="h100", compile=False)
    >>> p.route.placement.mesh.size, p.backend
    (8, 'mosaic_gpu')
    """
    rows, shards = axes["data"] * axes["fsdp"], axes["tensor"] * axes["fsdp"]
    if tokens % rows:
        raise ValueError(f"plan: {tokens} tokens do not split over data x fsdp = {rows} chips.")
    if vocab % shards:
        raise ValueError(
            f"plan: a vocabulary of {vocab} does not split over tensor x fsdp = {shards} chips; pad the head to "
            f"{-(-vocab // shards) * shards} rows and say Head(lm_head, vocab_size={vocab}) in the call."
        )
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    sharding = Sharding(mesh, tokens=P(("data", "fsdp")), head=P(("tensor", "fsdp")))
    hidden = jax.ShapeDtypeStruct((rows, tokens // rows, width), dtype)
    lm_head = jax.ShapeDtypeStruct((vocab, width), dtype)
    if math.prod(axes.values()) == 1:
        return plan(hidden, lm_head, head_layout="vh", chip=chip, **options)
    return plan(hidden, lm_head, head_layout="vh", chip=chip, sharding=sharding, **options)
