"""Candidates for a call, in the order in which ``route`` tries them; a module is loaded when its backend is first asked
for."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any, Literal, get_args

from logitless.core.backend import Backend

Level = Literal["head", "logits"]

KERNELS = {"tpu": "pallas_tpu", "gpu": "mosaic_gpu"}
"""The kernel backend of a platform; elsewhere, and where it cannot serve, ``ANYWHERE``."""

RUNS_ON = {name: platform for platform, name in KERNELS.items()}
"""The platform that a kernel backend needs."""

ANYWHERE, DENSE = "chunked", "reference"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A backend that may serve a call."""

    name: str  # as users call it; a sparse backward has the name of the exact backend within
    where: str  # its module and class
    around: str | None = None  # module and class of the exact backend within a sparse backward
    form: str | None = None  # the feature that only this candidate of the name has
    ids: bool = False  # kernels that serve more than one id for each token: ids=, not support=
    teacher_on: str | None = None  # serves calls with a teacher alone, on this platform


def _exact(level: Level) -> tuple[Candidate, ...]:
    stored = Candidate("mosaic_gpu", "head.mosaic_gpu.stored_dx:StoredDx", form="stored dx of all tokens", ids=True)
    slabs = Candidate("chunked", "head.column_slabs:ColumnSlabs", form="slabs of columns", teacher_on="tpu")
    return (
        Candidate("pallas_tpu", f"{level}.pallas_tpu.backend:PallasTpu"),
        *([stored] if level == "head" else []),
        Candidate("mosaic_gpu", f"{level}.mosaic_gpu.backend:MosaicGpu", ids=level == "head"),
        *([slabs] if level == "head" else []),
        Candidate("chunked", f"{level}.chunked:Chunked"),
        Candidate("reference", f"{level}.reference:Reference"),
    )


_TPU, _, _GPU, _SLABS, _CHUNKED, _ = _exact("head")

CANDIDATES: dict[tuple[Level, bool], tuple[Candidate, ...]] = {
    ("logits", False): _exact("logits"),
    ("head", False): _exact("head"),
    ("head", True): (
        Candidate("pallas_tpu", "head.pallas_tpu.sparse:SparsePallasTpu", _TPU.where),
        _TPU,
        Candidate("mosaic_gpu", "head.mosaic_gpu.sparse:ScreenedSparse", _GPU.where, "screen in the forward matmul"),
        Candidate("mosaic_gpu", "head.sparse.backend:Sparse", _GPU.where),
        *(c for c in _exact("head") if c.name == "mosaic_gpu"),
        Candidate("chunked", "head.sparse.backend:Sparse", _CHUNKED.where),
        _SLABS,
        _CHUNKED,
    ),
}
"""By the level, and whether a sparse backward is asked for; the first that supports a call serves it."""

BACKENDS = {level: tuple(dict.fromkeys(c.name for c in CANDIDATES[level, False])) for level in get_args(Level)}
"""Names that a call may give."""


def _load(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(f"logitless.{module}"), name)


@functools.cache
def load(c: Candidate) -> Backend:
    """The candidate's backend."""
    return _load(c.where)() if c.around is None else _load(c.where)(_load(c.around)())
