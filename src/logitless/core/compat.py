"""What differs between jax 0.10, 0.11 and 0.12, and between the places a kernel is traced for."""

from __future__ import annotations

import inspect
import math
from types import ModuleType
from typing import Any

import jax
from jax import Array, Ref
from jax._src.mesh import thread_resources
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

Index = Array | int
"""A number that may be traced: a row, a column, a count."""
_LEAST_VMEM = 64 << 20


def tpu_vmem_bytes() -> int:
    """VMEM bytes per core of the TPU being traced for; without a TPU, the smallest VMEM in use (v5p, 64 MiB)."""
    try:
        return pltpu.get_tpu_info().vmem_capacity_bytes
    except Exception:  # the interpreter on a CPU: jax raises different errors in different versions
        return _LEAST_VMEM


def tpu_generation() -> int | None:
    """The generation (4 for v4) of the TPU that is traced for; ``None`` where there is no TPU."""
    try:
        return pltpu.get_tpu_info().generation
    except Exception:  # as above
        return None


def tpu_cores() -> int:
    """Number of TPU cores that share a kernel's grid; 1 without a TPU."""
    try:
        return pltpu.get_tpu_info().num_cores
    except Exception:  # as above
        return 1


def in_hbm(x: Array, interpret: object) -> Array:
    """``x`` kept in HBM: XLA likes to move a small operand into VMEM, beside a kernel that has asked for most of it."""
    return x if interpret else pltpu.with_memory_space_constraint(x, pltpu.HBM)


def hbm_output(shape: tuple[int, ...], dtype: DTypeLike, interpret: object) -> jax.ShapeDtypeStruct | pl.MemoryRef:
    """The struct of a kernel's output that stays in HBM; see :func:`in_hbm`."""
    return jax.ShapeDtypeStruct(shape, dtype) if interpret else pltpu.HBM(shape, dtype)


def mosaic_gpu_reason() -> str | None:
    """Why this jax cannot run the Mosaic GPU kernels, or ``None``: they need the warpgroup semantics of 0.11."""
    version = tuple(int(x) for x in jax.__version__.split(".")[:2])
    return None if version >= (0, 11) else f"it needs jax 0.11 or newer, this is {jax.__version__}"


def _pallas_gpu() -> ModuleType:
    """The module of Mosaic GPU; its names and signatures differ between versions of jax."""
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def gpu_load(ref: Ref, layout: Any, optimized: bool = True) -> Array:
    """A whole (sub-)reference in registers with a given layout; the first jax 0.11 wants an index beside the reference.

    Loads from global memory into the layout of an accumulator are not ``optimized``.
    """
    plgpu = _pallas_gpu()
    index = inspect.signature(plgpu.load).parameters.get("idx")
    if index is not None and index.default is inspect.Parameter.empty:
        return plgpu.load(ref, (), layout=layout, optimized=optimized)
    return plgpu.load(ref, layout=layout, optimized=optimized)


def gpu_interpreter() -> object:
    """Pallas' interpreter of Mosaic GPU kernels, which jax 0.10 does not have."""
    return _pallas_gpu().InterpretGPUParams()


def varying_axes(x: object) -> frozenset[str]:
    """Axes of the enclosing ``shard_map`` over which ``x`` is typed as varying; none with ``check_vma=False``."""
    return getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", frozenset())


def differentiated_without_jit(x: object) -> bool:
    """Whether ``x`` is inside ``jax.grad`` or its like and has a value, which nothing has that ``jit`` traces."""
    return isinstance(x, jax.core.Tracer) and x.to_concrete_value() is not None


def ambient_mesh() -> Mesh | AbstractMesh:
    """The ambient mesh: from ``jax.set_mesh``, with devices outside ``jit``, or from the older ``with mesh:``; or an
    empty mesh.

    JAX tells about the older context in no public way that does not warn.
    """
    ambient = jax.sharding.get_abstract_mesh()
    if ambient.empty:
        return thread_resources.env.physical_mesh
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # inside jit only the abstract mesh is known, and enough
        return ambient


def partitioned_over(lowering: mlir.LoweringRuleContext) -> int:
    """Over how many devices the compiler partitions a program being lowered; 1 for one device's part of a shard_map."""
    where = lowering.module_context.axis_context
    manual, mesh = getattr(where, "manual_axes", None), getattr(where, "mesh", None)
    if manual is None or mesh is None:
        return getattr(where, "num_devices", None) or 1
    return math.prod(n for a, n in mesh.shape.items() if a not in manual and a not in mesh.manual_axes)
