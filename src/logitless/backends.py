"""Which backend serves a call: the one that was named, or the best that can run here."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from logitless.tiles import platform

LOGITS_BACKENDS = ("reference", "chunked", "pallas_tpu", "mosaic_gpu")
HEAD_BACKENDS = ("reference", "chunked")


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


def wrong_platform(call: str, backend: str, needs: str) -> str | None:
    """Why a kernel backend cannot run on this platform, or ``None``."""
    here = platform()
    if here == needs:
        return None
    return f"{call}: backend={backend!r} runs on a {needs.upper()}, but the default device here is a {here.upper()}"
