"""Jitted functions with explicit compilation, to record compile time and memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from logitless.lab.tools.timing import compiled_memory

_lowering = threading.Lock()
"""Python traces a single program at a time: programs take turns, and the compiler gets the first
program early."""


class Program:
    """A function that is compiled ahead of its first call with each kind of arguments (structure, shapes, dtypes)."""

    def __init__(self, name: str, function: Callable[..., Any], donate: tuple[int, ...] = ()):
        self.name = name
        self.compile_s = 0.0
        self.memory: list[dict[str, int]] = []
        self._jitted = jax.jit(function, donate_argnums=donate)
        self._compiled: dict[Any, Any] = {}

    def compile(self, *args: Any) -> Any:
        """Compile for arguments like these (arrays or ``jax.ShapeDtypeStruct``), unless already compiled."""
        leaves, tree = jax.tree.flatten(args)
        kind = (tree, tuple((tuple(x.shape), str(x.dtype)) for x in leaves))
        if kind not in self._compiled:
            with _lowering:
                start = time.perf_counter()
                lowered = self._jitted.lower(*args)
            self._compiled[kind] = lowered.compile()
            self.compile_s += time.perf_counter() - start
            self.memory.append(compiled_memory(self._compiled[kind]))
        return self._compiled[kind]

    def __call__(self, *args: Any) -> Any:
        return self.compile(*args)(*args)

    def peak_memory(self) -> dict[str, int] | None:
        """What the compiler planned for the kind of arguments that needs the most."""
        return max(self.memory, key=lambda m: m["temporaries"] + m["arguments"], default=None)


def device_peak_bytes() -> int | None:
    """The most that the first device's allocator has held since the process began; ``None`` on a CPU."""
    stats = jax.devices()[0].memory_stats()
    return None if not stats else stats.get("peak_bytes_in_use")
