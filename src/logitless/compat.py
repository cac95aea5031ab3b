"""What differs between jax 0.10, 0.11 and 0.12, and between the places a kernel is traced for."""

from __future__ import annotations

import inspect
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

_LEAST_VMEM = 64 << 20


def tpu_vmem_bytes() -> int:
    """VMEM of one core of the TPU that is traced for; the smallest one in use (v5p, 64 MiB) where there is no TPU."""
    try:
        return pltpu.get_tpu_info().vmem_capacity_bytes
    except Exception:  # the interpreter on a CPU: jax raises different errors in different versions
        return _LEAST_VMEM


def mosaic_gpu_reason() -> str | None:
    """Why this jax cannot run the Mosaic GPU kernels, or ``None``: they need the warpgroup semantics of 0.11."""
    version = tuple(int(x) for x in jax.__version__.split(".")[:2])
    return None if version >= (0, 11) else f"it needs jax 0.11 or newer, this is {jax.__version__}"


def gpu_load(ref: Any, layout: Any) -> Any:
    """A whole (sub-)reference in registers with a given layout; jax 0.11 wants an index beside the reference."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    takes_index = "idx" in inspect.signature(plgpu.load).parameters
    return plgpu.load(ref, (), layout=layout) if takes_index else plgpu.load(ref, layout=layout)
