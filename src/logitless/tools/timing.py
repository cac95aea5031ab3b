"""Device time and the compiler's memory of a jitted function."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


def device_times(f: Callable[..., Any], *args: Any, repeats: int = 10, warmup: int = 2) -> list[float]:
    """Milliseconds of each of ``repeats`` calls: by the GPU's own profiler (CUPTI) where there is one, by the host's
    clock around a blocking call elsewhere."""
    for _ in range(warmup):
        jax.block_until_ready(f(*args))
    if jax.default_backend() in ("gpu", "cuda"):
        from jax.experimental.mosaic.gpu import profiler

        measured = profiler.measure(f, iterations=repeats)(*args)[1]
        if measured is not None:
            return [float(m) for m in (measured if isinstance(measured, (list, tuple)) else [measured])]
    return wall_times(f, *args, repeats=repeats)


def wall_times(f: Callable[..., Any], *args: Any, repeats: int = 10) -> list[float]:
    """Milliseconds of each of ``repeats`` blocking calls, by the host's clock."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append((time.perf_counter() - start) * 1e3)
    return times


def summary(times: list[float]) -> dict[str, float]:
    """Median, mean and spread of a list of milliseconds."""
    ordered = sorted(times)
    last = len(ordered) - 1
    return dict(
        median_ms=statistics.median(ordered),
        mean_ms=statistics.fmean(ordered),
        min_ms=ordered[0],
        p10_ms=ordered[round(0.1 * last)],
        p90_ms=ordered[round(0.9 * last)],
        max_ms=ordered[-1],
        repeats=len(ordered),
    )


def compiled_memory(compiled: Any) -> dict[str, int]:
    """What the compiler plans to allocate, in bytes."""
    m = compiled.memory_analysis()
    return dict(
        arguments=m.argument_size_in_bytes,
        outputs=m.output_size_in_bytes,
        temporaries=m.temp_size_in_bytes,
        aliased=m.alias_size_in_bytes,
        peak=getattr(m, "peak_memory_in_bytes", 0),
    )


def environment() -> dict[str, str]:
    """What the numbers depend on."""
    import jaxlib

    device = jax.devices()[0]
    return dict(
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        device=device.device_kind,
        platform=device.platform,
    )
