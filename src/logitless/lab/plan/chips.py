"""Public numbers of accelerators, once, and a way to plan as if a program ran on one of them.

Per chip, as the makers publish them (Google Cloud's TPU pages, NVIDIA's data sheets; dense bfloat16, no sparsity).
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from logitless.objectives.checks import did_you_mean

GB = 10**9


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator. Bytes, bytes per second, FLOP per second."""

    name: str
    platform: str  # as logitless.core.chunk_size.platform names it
    device_kind: str  # as JAX names it
    cores: int
    hbm_bytes: float
    hbm: float
    flops: float
    kernels: bool = True
    """Whether a kernel backend serves it; plain JAX (``chunked``) serves all."""


CHIPS: dict[str, Chip] = {
    c.name: c
    for c in (
        Chip("v5e", "tpu", "TPU v5 lite", 1, 16 * GB, 819e9, 197e12),
        Chip("v5p", "tpu", "TPU v5", 2, 95 * GB, 2765e9, 459e12),
        Chip("v6e", "tpu", "TPU v6 lite", 1, 32 * GB, 1640e9, 918e12),
        Chip("a100", "gpu", "NVIDIA A100-SXM4-80GB", 108, 80 * GB, 2039e9, 312e12, False),
        Chip("h100", "gpu", "NVIDIA H100 80GB HBM3", 132, 80 * GB, 3350e9, 989e12),
        Chip("h200", "gpu", "NVIDIA H200", 132, 141 * GB, 4800e9, 989e12),
        Chip("b200", "gpu", "NVIDIA B200", 148, 180 * GB, 8000e9, 2250e12, False),
    )
}


CPU = Chip("cpu", "cpu", "cpu", 1, 0, 0, 0, False)
"""``chip="cpu"``: the host's own compiler, without a rate to predict a time by."""


def chip_of(name: str) -> Chip:
    """The chip of a name, in any case of letters; an unknown name is refused."""
    known = {**CHIPS, CPU.name: CPU}
    found = known.get(name.lower())
    if found is None:
        raise ValueError(
            f"chip {name!r} is not known; expected one of {', '.join(known)}.{did_you_mean(name.lower(), tuple(known))}"
        )
    return found


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip that JAX calls ``device_kind``, if it is in the table."""
    return next((c for c in CHIPS.values() if c.device_kind == device_kind), None)


def as_if_on(chip: Chip | None, like: AbstractMesh | Mesh | None = None) -> contextlib.AbstractContextManager[Any]:
    """Choose backends, chunks and tiles as they would be chosen on ``chip`` (``None``: as they are here)."""
    return contextlib.nullcontext() if chip is None else jax.sharding.use_abstract_mesh(mesh_on(chip, like))


def mesh_on(chip: Chip, like: AbstractMesh | Mesh | None = None) -> AbstractMesh:
    """A mesh of one chip, or with the axes of ``like``; devices may be absent."""
    device = jax.sharding.AbstractDevice(chip.device_kind, chip.cores, chip.platform)
    if like is None:
        return AbstractMesh((1,), ("chip",), abstract_device=device)
    types = (AxisType.Auto,) * len(like.axis_names)
    return AbstractMesh(like.axis_sizes, like.axis_names, axis_types=types, abstract_device=device)


def roofline_seconds(chip: Chip, flops: float, moved: float) -> float:
    """The least time that ``flops`` in bfloat16 and ``moved`` bytes of HBM traffic can take."""
    return max(flops / chip.flops, moved / chip.hbm)
