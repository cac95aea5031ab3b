"""What differs between jax 0.10, 0.11 and 0.12, and between the places a kernel is traced for."""

from __future__ import annotations

from jax.experimental.pallas import tpu as pltpu

_LEAST_VMEM = 64 << 20


def tpu_vmem_bytes() -> int:
    """VMEM of one core of the TPU that is traced for; the smallest one in use (v5p, 64 MiB) where there is no TPU."""
    try:
        return pltpu.get_tpu_info().vmem_capacity_bytes
    except Exception:  # the interpreter on a CPU: jax raises different errors in different versions
        return _LEAST_VMEM
