"""Compile for TPUs ahead of time, on a machine without one.

libtpu holds the real compiler: it refuses what a TPU would refuse and reports HBM per chip to the byte. libtpu reads
its settings from the environment at load time, so :func:`topology` sets them before the first load.

    compiled = compile_for("v6e:2x4", f, jax.ShapeDtypeStruct((4096, 151936), jnp.bfloat16))
    compiled.peak_bytes
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # do not ask a cloud host which TPU it is
    "TPU_ACCELERATOR_TYPE": "v6e-8",  # any; the topology's name decides what is compiled for
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a second process would abort on a lock file
}


CHIPS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")
"""Names of generations known to the compiler, as written before the colon of a slice."""


class TpuCompilerMissing(RuntimeError):
    """libtpu is not installed."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """An executable, and its memory on a single device in bytes, as the compiler reports."""

    executable: Any
    peak_bytes: int
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    alias_bytes: int
    seconds: float

    @functools.cached_property
    def text(self) -> str:
        """The optimised HLO."""
        return self.executable.as_text()

    @property
    def kernels(self) -> int:
        """Number of Mosaic kernels in the program."""
        return self.text.count('custom_call_target="tpu_custom_call"')

    def record(self) -> dict[str, Any]:
        """The numbers as JSON."""
        names = ("peak_bytes", "argument_bytes", "output_bytes", "temporary_bytes", "alias_bytes", "kernels")
        code = self.executable.memory_analysis().generated_code_size_in_bytes
        return {k: getattr(self, k) for k in names} | dict(code_bytes=code, seconds=round(self.seconds, 1))


def missing() -> str | None:
    """Why nothing can be compiled for a TPU here, or ``None``."""
    if importlib.util.find_spec("libtpu") is None:
        return "libtpu, the TPU compiler, is not installed: pip install 'logitless[tpu]'"
    return None


def versions() -> dict[str, str]:
    """Versions of jax and of the TPU compiler, for the record."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}


def topology(name: str = "v6e:2x4") -> topologies.TopologyDescription:
    """The chips of a slice, such as ``v6e:2x4``, ``v5e:2x4`` or ``v5p:2x2x1``."""
    why = missing()
    if why is not None:
        raise TpuCompilerMissing(why)
    for key, value in ENVIRONMENT.items():
        if key != "JAX_PLATFORMS":  # JAX has read the variable; setting the variable here would affect child processes
            os.environ.setdefault(key, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=name)


def slice_for(generation: str, count: int) -> str:
    """The name of the smallest slice of a generation with ``count`` chips: ``v6e:4x4`` for 9 to 16 of them."""
    sides = [2, 2] if generation in ("v2", "v3", "v5e", "v6e") else [2, 2, 1]
    while int(np.prod(sides)) < count:
        sides[-1 - sides[::-1].index(min(sides))] *= 2
    return f"{generation}:{'x'.join(map(str, sides))}"


def mesh(name: str = "v6e:2x4", shape: Sequence[int] = (1,), axes: Sequence[str] = ("chip",)) -> Mesh:
    """A mesh over the first chips of a slice."""
    chips = topology(name).devices[: int(np.prod(shape))]
    return Mesh(np.array(chips).reshape(tuple(shape)), tuple(axes))


def compile_for(
    where: str | Mesh | None, f: Callable[..., Any], *args: Any, donate: Sequence[int] = (), spec: Any = None
) -> Compiled:
    """Compile ``jit(f)`` for a slice's first chip, for a mesh, or (``None``) for JAX's default device.

    ``args`` are trees of ``jax.ShapeDtypeStruct``; those without a sharding get ``spec`` (replicated by default).
    """
    chips = mesh(where) if isinstance(where, str) else where
    start = time.perf_counter()
    if chips is None:
        lowered = jax.jit(f, donate_argnums=tuple(donate)).lower(*args)
    else:
        sharding = NamedSharding(chips, PartitionSpec() if spec is None else spec)

        def placed(x: Any) -> Any:
            return x if x.sharding is not None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        # Under the mesh, so that Pallas asks these chips for their kind and not the host's CPU.
        with jax.set_mesh(chips):
            lowered = jax.jit(f, donate_argnums=tuple(donate)).lower(*jax.tree.map(placed, args))
    executable = lowered.compile()
    m: Any = executable.memory_analysis()
    given, made, aliased = m.argument_size_in_bytes, m.output_size_in_bytes, m.alias_size_in_bytes
    on_tpu = (jax.default_backend() if chips is None else chips.devices.flat[0].platform) == "tpu"
    return Compiled(
        executable=executable,
        # XLA's CPU and GPU compilers leave the temporaries out of the peak that they report.
        peak_bytes=m.peak_memory_in_bytes if on_tpu else given + made + m.temp_size_in_bytes - aliased,
        argument_bytes=given,
        output_bytes=made,
        temporary_bytes=m.temp_size_in_bytes,
        alias_bytes=aliased,
        seconds=time.perf_counter() - start,
    )
