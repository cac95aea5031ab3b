"""Public numbers of accelerators, once, and a way to plan as if a program ran on one of them.

Per chip, as the makers publish them (Google Cloud's TPU pages, NVIDIA's data sheets; dense bfloat16, no sparsity).
``link`` is what a chip can send, in one direction, over its fast interconnect (half of the published bidirectional
figure), and ``network`` over the network between such groups: ICI within a TPU pod and the data-centre network between
pods; NVLink within a node of eight GPUs and one 400 Gbit/s port per GPU between nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax

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
    link: float
    group: int
    """Chips that the fast interconnect joins."""
    network: float
    kernels: bool = True
    """Whether a kernel backend serves it; plain JAX (``chunked``) serves all."""


CHIPS: dict[str, Chip] = {
    c.name: c
    for c in (
        Chip("v5e", "tpu", "TPU v5 lite", 1, 16 * GB, 819e9, 197e12, 200e9, 256, 3.125e9),
        Chip("v5p", "tpu", "TPU v5", 2, 95 * GB, 2765e9, 459e12, 600e9, 6144, 6.25e9),
        Chip("v6e", "tpu", "TPU v6 lite", 1, 32 * GB, 1640e9, 918e12, 400e9, 256, 12.5e9),
        Chip("a100", "gpu", "NVIDIA A100-SXM4-80GB", 108, 80 * GB, 2039e9, 312e12, 300e9, 8, 25e9, False),
        Chip("h100", "gpu", "NVIDIA H100 80GB HBM3", 132, 80 * GB, 3350e9, 989e12, 450e9, 8, 50e9),
        Chip("h200", "gpu", "NVIDIA H200", 132, 141 * GB, 4800e9, 989e12, 450e9, 8, 50e9),
        Chip("b200", "gpu", "NVIDIA B200", 148, 180 * GB, 8000e9, 2250e12, 900e9, 8, 50e9, False),
    )
}


def chip_of(name: str) -> Chip:
    """A chip by name; an unknown one is refused."""
    if name not in CHIPS:
        hint = did_you_mean(name.lower(), tuple(CHIPS))
        raise ValueError(f"chip {name!r} is not known; expected one of {', '.join(CHIPS)}.{hint}")
    return CHIPS[name]


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip that JAX calls ``device_kind``, if it is in the table."""
    return next((c for c in CHIPS.values() if c.device_kind == device_kind), None)


def as_if_on(chip: Chip | None) -> contextlib.AbstractContextManager[Any]:
    """Choose backends, chunks and tiles as they would be chosen on ``chip`` (``None``: as they are here).

    This is JAX's own ambient mesh, with a device that need not be there.
    """
    if chip is None:
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(chip.device_kind, chip.cores, chip.platform)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=device))


def roofline_seconds(chip: Chip, flops: float, moved: float) -> float:
    """The least time that ``flops`` in bfloat16 and ``moved`` bytes of HBM traffic can take."""
    return max(flops / chip.flops, moved / chip.hbm)
