"""How the tests run: devices, compiler, hypothesis, order."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import hypothesis
import jax
import pytest

ON_CPU = os.environ.get("JAX_PLATFORMS") == "cpu"

# Eight CPU devices, for the sharded tests; what runs on one of them gives the same bits in the same time.
DEVICES = 8
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", DEVICES)

# Most of the suite's time is XLA compiling. Programs are kept: for the other worker of this run, for processes
# that a test starts, and for the next run. The key is the program with its compiler and options, so nothing is stale.
OWN_FOLDER = Path(__file__).parents[1] / ".jax_cache"
COMPILED = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", OWN_FOLDER))
jax.config.update("jax_compilation_cache_dir", str(COMPILED))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
CHILD_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": str(DEVICES),  # a part of a compiled program's key
    "JAX_COMPILATION_CACHE_DIR": str(COMPILED),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(ON_CPU)),
}
"""For a process that a test starts to compile as the tests do, and to find what they have compiled. Not for compiling
for a TPU, nor for measurements."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compiled programs leave the repository's folder after a week."""
    if not hasattr(session.config, "workerinput"):
        for program in OWN_FOLDER.glob("*"):
            if time.time() - program.stat().st_mtime > 7 * 24 * 3600:
                program.unlink(missing_ok=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests run first, so that no worker ends alone with one of them."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no garbage collection has to look at it again. What tracing makes goes by
    itself, nearly all of it: looking every 700 objects for cycles would be 4 % of a run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """On a CPU, programs are compiled without LLVM's optimisations, in two thirds of the time.

    The maths is the same, its order of additions and its fused multiply-adds are not: what compares bits, or counts
    ulps, or measures, is marked ``optimized`` and is compiled as users compile it.
    """
    jax.config.update("jax_disable_most_optimizations", ON_CPU and item.get_closest_marker("optimized") is None)


# No deadline, since a first call compiles; derandomised, so that a run repeats.
hypothesis.settings.register_profile("logitless", deadline=None, derandomize=True)
hypothesis.settings.load_profile("logitless")
