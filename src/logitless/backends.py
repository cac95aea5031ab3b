"""Which backend serves a call: the one that was named, or the best that can run here."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

from logitless.tiles import platform

LOGITS_BACKENDS = ("reference", "chunked", "pallas_tpu", "mosaic_gpu")
HEAD_BACKENDS = LOGITS_BACKENDS


@dataclasses.dataclass(frozen=True)
class Route:
    """How a call is carried out; what :func:`logitless.explain` prints."""

    call: str
    backend: str
    way: str
    matmuls: str
    bytes_moved: str
    tiles: dict[str, Any]
    because: str
    fused_statistics: bool = False
    """Statistics without a gradient never hold logits."""

    def __str__(self) -> str:
        tiles = ", ".join(f"{k}={v}" for k, v in self.tiles.items()) or "none"
        return (
            f"{self.call}: backend {self.backend} ({self.because})\n"
            f"  way      {self.way}\n"
            f"  matmuls  {self.matmuls}\n"
            f"  bytes    {self.bytes_moved}\n"
            f"  tiles    {tiles}"
        )


def named(call: str, backend: str, known: tuple[str, ...]) -> str:
    """``backend`` if it exists; an unknown name is refused."""
    if backend not in known:
        close = difflib.get_close_matches(str(backend), known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{call}: backend={backend!r} is not known; expected None or one of {', '.join(known)}.{hint}")
    return backend


KERNELS = {"tpu": "pallas_tpu", "gpu": "mosaic_gpu"}
"""The kernel backend of a platform."""


def choose(
    call: str,
    backend: str | None,
    known: tuple[str, ...],
    check: Callable[[str], None],
    interpret: bool,
) -> tuple[str, str]:
    """``(backend, why)``. A named backend that cannot run raises; the default is the best one that can.

    ``check(kernel backend)`` raises ``NotImplementedError`` with the reason where its kernels cannot serve.
    """
    here = platform()

    def refusal(kernel: str) -> str | None:
        if KERNELS.get(here) != kernel and not interpret:
            (needs,) = (k.upper() for k, v in KERNELS.items() if v == kernel)
            return f"{call}: backend={kernel!r} runs on a {needs}, but the default device here is a {here.upper()}"
        try:
            check(kernel)
        except NotImplementedError as error:
            return f"{call}: backend={kernel!r} cannot serve this call: {error}"
        except ImportError as error:
            extra = "gpu" if kernel == "mosaic_gpu" else "tpu"
            return f"{call}: backend={kernel!r} cannot be loaded ({error}); pip install 'logitless[{extra}]'"
        return None

    if backend is not None:
        named(call, backend, known)
        why = refusal(backend) if backend in KERNELS.values() else None
        if why is not None:
            raise NotImplementedError(f"{why}. Use backend=None for the best one here, or 'chunked'.")
        return backend, "named in the call"
    kernel = KERNELS.get(here)
    if kernel is None or kernel not in known:
        return "chunked", f"the default on a {here.upper()}"
    why = refusal(kernel)
    return (kernel, f"the default on a {here.upper()}") if why is None else ("chunked", why)
