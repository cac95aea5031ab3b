"""Backends by name, at each level; a module is loaded when its backend is first asked for."""

from __future__ import annotations

import functools
import importlib
from typing import Any, Literal, get_args

from logitless.core.backend import Backend, SparseBackend

Level = Literal["head", "logits"]

_PLACES = {
    "reference": "reference:Reference",
    "chunked": "chunked:Chunked",
    "pallas_tpu": "pallas_tpu.backend:PallasTpu",
    "mosaic_gpu": "mosaic_gpu.backend:MosaicGpu",
}
BACKENDS: dict[str, dict[str, str]] = {
    level: {name: f"logitless.{level}.{place}" for name, place in _PLACES.items()} for level in get_args(Level)
}
"""Module and class of each backend: the same place in the folder of either level."""

SPARSE = {
    "chunked": "logitless.head.sparse.backend:Sparse",
    "mosaic_gpu": "logitless.head.mosaic_gpu.sparse:ScreenedSparse",
    "pallas_tpu": "logitless.head.pallas_tpu.sparse:SparsePallasTpu",
}
"""The sparse backward around a head-level backend."""

KERNELS = {"tpu": "pallas_tpu", "gpu": "mosaic_gpu"}
"""The kernel backend of a platform; elsewhere, and where it cannot serve, ``ANYWHERE``."""

RUNS_ON = {name: platform for platform, name in KERNELS.items()}
"""The platform that a kernel backend needs."""

ANYWHERE, DENSE = "chunked", "reference"


def _load(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def backend_of(level: Level, name: str) -> Backend:
    """The exact backend of a name."""
    return _load(BACKENDS[level][name])()


@functools.cache
def sparse_backends(name: str) -> tuple[SparseBackend, ...]:
    """The sparse backwards around the head-level backend of a name, in the order in which ``route`` tries them before
    the exact backend."""
    return (_load(SPARSE[name])(backend_of("head", name)),)
