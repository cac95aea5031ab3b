"""The numbers that a plan's bytes and FLOPs are made of, and what one way of doing the work comes to."""

from __future__ import annotations

import dataclasses
from typing import Any

from logitless.core.chunk_size import MIB

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
    rank: int = 0  # of LoRA on the head
    wants_lora: bool = False

    @property
    def head(self) -> int:
        """Bytes of the head."""
        return self.vocab * self.width * self.item

    @property
    def rows(self) -> int:
        """Bytes of the hidden states."""
        return self.tokens * self.width * self.item

    @property
    def factors(self) -> int:
        """Bytes of LoRA's two factors."""
        return (self.vocab + self.width) * self.rank * self.item

    @property
    def gradients(self) -> int:
        """How many of dH and dW are asked for: the wide matmuls of a backward pass."""
        return self.wants_hidden + self.wants_head

    @property
    def backward(self) -> bool:
        """Whether any gradient is asked for."""
        return self.gradients > 0 or self.wants_lora

    def narrow(self, sweeps: int) -> float:
        """LoRA's own matmuls, as parts of a wide one for each token, where logits are made ``sweeps`` times.

        ``low = h B^T`` and ``low A^T`` with the logits; behind them ``dx A``, ``(dx A) B`` for dH, ``dx^T low`` and
        ``(dx A)^T h`` for the factors.
        """
        over_vocabulary = sweeps + self.backward + self.wants_lora
        over_hidden = sweeps + self.wants_hidden + self.wants_lora
        return self.rank * (over_vocabulary / self.width + over_hidden / self.vocab)


@dataclasses.dataclass(frozen=True)
class Way:
    """What a way of doing it costs.

    ``matmuls`` are whole ``[tokens, H] x [H, V]`` ones for each live token; ``moved`` is all traffic to and from device
    memory, ``passes`` the part of it that no matmul hides: passes over logits that stand between two of them, gathers.
    ``narrow`` is what LoRA's matmuls add to the FLOPs, in the same unit.
    """

    matmuls: float
    moved: int
    passes: int
    temporaries: int
    tiles: dict[str, Any] = dataclasses.field(default_factory=dict)
    narrow: float = 0.0
