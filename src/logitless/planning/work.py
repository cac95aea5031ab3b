"""The numbers that a plan's bytes and FLOPs are made of, and what one way of doing the work comes to."""

from __future__ import annotations

import dataclasses
from typing import Any

from logitless.tiles import MIB

GEMM_WORKSPACE = 32 * MIB
"""What XLA sets aside for cuBLAS on a Hopper GPU."""


@dataclasses.dataclass(frozen=True)
class Work:
    """A head call: its shapes, the sizes of its elements, and what is asked for."""

    tokens: int
    live: int
    width: int
    vocab: int
    item: int  # bytes of a hidden state
    logit: int  # bytes of a logit
    wants_hidden: bool
    wants_head: bool
    sum_item: int  # bytes of an element of dW while it is summed over chunks
    masked: bool

    @property
    def head(self) -> int:
        """Bytes of the head."""
        return self.vocab * self.width * self.item

    @property
    def rows(self) -> int:
        """Bytes of the hidden states."""
        return self.tokens * self.width * self.item

    @property
    def gradients(self) -> int:
        """How many of dH and dW are asked for."""
        return self.wants_hidden + self.wants_head


@dataclasses.dataclass(frozen=True)
class Way:
    """What a way of doing it costs.

    ``matmuls`` are whole ``[tokens, H] x [H, V]`` ones for each live token; ``moved`` is all traffic to and from device
    memory, ``passes`` the part of it that no matmul hides: passes over logits that stand between two of them, gathers.
    """

    matmuls: float
    moved: int
    passes: int
    temporaries: int
    tiles: dict[str, Any]
