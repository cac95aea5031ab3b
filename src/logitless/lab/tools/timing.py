"""Clocks of a compiled function, and its memory by the compiler's plan.

Three clocks answer different questions. ``device``: kernels alone, by the GPU's profiler (CUPTI), if available.
``wall``: the host's clock around a call and the wait for its result. ``back_to_back``: the host's clock around several
calls, dispatched without waiting, divided by their number. A trainer sees ``back_to_back``, because it does not wait
for its loss.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

CLOCKS = ("device_ms", "wall_ms", "back_to_back_ms")
MOST_KERNELS = 12
BACK_TO_BACK = 4
"""Calls that are dispatched back to back on an accelerator, for each that is timed alone: the first one's way to the
device and the wait for the last one are no part of what a trainer sees, and with three calls they were 5 % of it."""


def turn(f: Callable[..., Any], *args: Any, repeats: int, warmup: int) -> dict[str, Any]:
    """A turn of an arm: milliseconds per call by every available clock (``back_to_back_ms`` is a single number), and on
    a GPU the kernels of a call."""
    for _ in range(warmup):
        jax.block_until_ready(f(*args))
    out: dict[str, Any] = dict(wall_ms=wall_times(f, *args, repeats=repeats))
    in_a_row = repeats if jax.default_backend() == "cpu" else BACK_TO_BACK * repeats
    out["back_to_back_ms"] = back_to_back(f, *args, repeats=in_a_row)
    if jax.default_backend() in ("gpu", "cuda"):
        out |= profile(f, *args, repeats=repeats)
    return out


def profile(f: Callable[..., Any], *args: Any, repeats: int) -> dict[str, Any]:
    """By CUPTI: ``device_ms`` per call, and the longest ``kernels`` of the last call, as ``[name, launches, ms]``;
    empty if CUPTI reports nothing or cannot separate two calls."""
    from jax.experimental.mosaic.gpu import profiler

    try:
        runs: Any = profiler.measure(f, aggregate=False, iterations=repeats)(*args)[1]
    except RuntimeError:
        return {}
    if runs is None:
        return {}
    runs = [runs] if repeats == 1 else runs
    own: dict[str, list[float]] = {}
    for name, ms in runs[-1]:
        own.setdefault(name[:60], []).append(float(ms))
    longest = sorted(own.items(), key=lambda kv: -sum(kv[1]))[:MOST_KERNELS]
    return dict(
        device_ms=[float(sum(ms for _, ms in run)) for run in runs],
        kernels=[[name, len(times), round(sum(times), 4)] for name, times in longest],
    )


def wall_times(f: Callable[..., Any], *args: Any, repeats: int = 10) -> list[float]:
    """Milliseconds of each of ``repeats`` blocking calls, by the host's clock."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append((time.perf_counter() - start) * 1e3)
    return times


def back_to_back(f: Callable[..., Any], *args: Any, repeats: int = 10) -> float:
    """Milliseconds a call when ``repeats`` of them are dispatched without waiting, with one wait at the end."""
    start = time.perf_counter()
    out = None
    for _ in range(repeats):
        out = f(*args)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) * 1e3 / repeats


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


def compile_in_steps(f: Any, *args: Any) -> tuple[Any, dict[str, float]]:
    """A jitted function compiled for ``args``, and the seconds of tracing, lowering and compiling."""
    times = [time.perf_counter()]
    traced = f.trace(*args)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())
    return compiled, {
        k: round(b - a, 3) for k, a, b in zip(("trace", "lower", "compile"), times, times[1:], strict=False)
    }


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
