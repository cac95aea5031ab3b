"""What a fused-head TPU kernel is specialised to, first of all its tiles: a deterministic rule from shapes, dtype,
layout and the chip's VMEM.

A grid step works on a tile of tokens and a tile of the vocabulary, over the whole hidden size, against a float32
accumulator of hidden-size rows. The rule starts from ``FIRST`` and halves the longer side, tokens in a tie, until
:func:`need` fits into ``VMEM_SHARE`` of the chip's VMEM. 1024 tokens already read the head only N / 1024 times, a
quarter of the time that the matmuls take; a wide vocabulary tile touches the running sums and the accumulator less
often (at H = 4096, against 1024: statistics 5 % faster, with the direction 1 %; estimates).

At H = 4096 in bfloat16 that is 1024 x 2048 on v5e and v6e with 128 MiB (dhead: 1024 x 1024, for [H, V] 512 x 1024),
and with 64 MiB (v5p) 512 x 1024 (dhead: 512 x 512).

The vocabulary tile fixes the order of every sum over the vocabulary, so it depends on H, V, dtype and chip, not on the
number of tokens: statistics of a token are the same bits whatever it is batched with.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from logitless.transform import LogitTransform

Kernel = Literal["forward", "dhidden", "dhead"]

MIB = 1 << 20
LANES = 128
FIRST = {"forward": (1024, 2048), "dhidden": (1024, 2048), "dhead": (1024, 1024)}
"""Tokens and columns."""
LEAST_LIMIT = 16 * MIB
"""What every chip grants without being asked."""
VMEM_SHARE, VMEM_MOST, SLACK = 0.85, 0.88, 1.1
"""Tiles are chosen to need 0.85 of a core's VMEM at most; the compiler is granted 1.1 times the need, and at most 0.88
of the VMEM: its spilled registers (18 MiB were seen) and small operands do not count against the grant."""
FLOAT32_SHARE = 0.85
"""Of that, for float32: full-precision matmuls spill more."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Rows of hidden states and columns of the vocabulary that one grid step works on."""

    tokens: int
    vocab: int
    vmem_limit: int
    """Bytes to ask of the compiler: hardly more than the need, since it is taken from everything else."""


def need(
    kernel: Kernel, tokens: int, vocab: int, hidden: int, itemsize: int, layout: str, keeping: bool = False
) -> int:
    """VMEM bytes of a kernel's blocks, scratch and temporaries; compilers settled for 0.88 to 1.04 of it.

    ``keeping``: exponentials leave the forward sweep, or enter that of dW, through two buffers (``kept.py``).
    """
    h, w = tokens * hidden * itemsize, vocab * hidden * itemsize
    plane = tokens * vocab * (4 + 4 + itemsize)  # logits, a temporary, rounded probabilities or dlogits
    rows = tokens * LANES * 4 * 10  # per-token columns occupy whole lanes
    plane += 2 * tokens * vocab * itemsize if keeping else 0
    if itemsize == 4:
        plane += 2 * h + 3 * w + plane // 2  # a float32 matmul works on bfloat16 parts of its operands
    if kernel == "dhead":
        # Double-buffered hidden states (and their transpose), W and dW; the accumulator and what is added to it.
        return (2 if layout == "vh" else 4) * h + 4 * w + 2 * vocab * hidden * 4 + plane + rows
    # Hidden states once, W double-buffered, the accumulator and what is added to it.
    return h + 2 * w + 2 * tokens * hidden * 4 + plane + rows


def whole_lanes(size: int) -> int:
    """``size`` rounded up to whole lanes."""
    return -(-size // LANES) * LANES


def _fit(size: int, tile: int) -> int:
    """``tile`` for an axis of ``size``: whole lanes, or the whole axis where it is shorter than that."""
    return size if size <= LANES else min(tile, size // LANES * LANES)


def choose(
    kernel: Kernel, n: int, hidden: int, vocab: int, itemsize: int, layout: str, vmem: int, keeping: bool = False
) -> Tiles:
    """Tiles for ``n`` tokens. The vocabulary tile is the same for every ``n``, and with and without ``keeping``."""
    tokens, columns = FIRST[kernel]
    budget = int(vmem * VMEM_SHARE * (1.0 if itemsize == 2 else FLOAT32_SHARE))
    while need(kernel, tokens, columns, hidden, itemsize, layout) > budget:
        if tokens == columns == LANES:
            least = need(kernel, tokens, columns, hidden, itemsize, layout)
            raise NotImplementedError(
                f"pallas_tpu: with a hidden size of {hidden} and {itemsize}-byte elements the {kernel} kernel needs "
                f"{least / MIB:.0f} MiB of VMEM at its smallest tile; this chip offers {budget / MIB:.0f}."
            )
        if columns > tokens:
            columns //= 2
        else:
            tokens //= 2
    while keeping and tokens > LANES and need(kernel, tokens, columns, hidden, itemsize, layout, True) > budget:
        tokens //= 2
    limit = min(int(SLACK * need(kernel, tokens, columns, hidden, itemsize, layout, keeping)), int(VMEM_MOST * vmem))
    return Tiles(_fit(n, tokens), _fit(vocab, columns), max(limit, LEAST_LIMIT))


@dataclasses.dataclass(frozen=True)
class Spec:
    """Static facts that the kernels are specialised to."""

    layout: str  # "vh" | "hv"
    n: int  # tokens
    vocab: int  # columns of the head, padding included
    vocab_size: int
    tiles: Tiles
    logits_dtype: Any
    has_temperature: bool
    per_token_temperature: bool
    has_softcap: bool
    has_scale: bool
    all_live: bool  # the number of live tokens is not a traced one: no step is conditional on it
    interpret: Any
    kept: int = 0  # tokens, whole tiles of them, whose exponentials the forward sweep keeps for dW's
    kept_tile: int = 0  # of dW's: columns of a tile of the sweep that kept them

    @property
    def axis(self) -> int:
        """The dimension of the head along which the vocabulary runs."""
        return 0 if self.layout == "vh" else 1

    @property
    def token_steps(self) -> int:
        """Token tiles, dead ones included."""
        return pl.cdiv(self.n, self.tiles.tokens)

    @property
    def kept_steps(self) -> int:
        """Token tiles whose exponentials are kept."""
        return self.kept // self.tiles.tokens

    @property
    def vocab_steps(self) -> int:
        """Steps of a sweep over the columns below ``vocab_size``."""
        return pl.cdiv(self.vocab_size, self.tiles.vocab)

    @property
    def tail(self) -> int:
        """Columns of the last step, between 1 and the tile."""
        return self.vocab_size - (self.vocab_steps - 1) * self.tiles.vocab

    @property
    def tail_width(self) -> int:
        """``tail`` in whole lanes."""
        return min(pl.cdiv(self.tail, LANES) * LANES, self.tiles.vocab)

    def live(self, tile: Any, n_live: Any) -> Any:
        """Whether a token tile has a live token."""
        return True if self.all_live else tile * self.tiles.tokens < n_live[0]

    def dead_rows(self, tile: Any, n_live: Any) -> tuple[Any, Any] | None:
        """``(whether a token tile has rows that do not count, how many rows do)``; ``None`` where no tile has any."""
        if self.all_live and self.n % self.tiles.tokens == 0:
            return None
        count = self.n if self.all_live else n_live[0]
        return (tile + 1) * self.tiles.tokens > count, count - tile * self.tiles.tokens

    def readable(self, tile: Any, n_live: Any) -> Any:
        """The token tile to read at ``tile``: dead ones repeat the last live one, so that nothing is fetched."""
        if self.all_live:
            return tile
        return jnp.minimum(tile, jnp.maximum(pl.cdiv(n_live[0], self.tiles.tokens) - 1, 0))

    def transform(self, scalars: Any, temperature: Array | None) -> LogitTransform:
        """The transform inside a kernel: scalars from SMEM, a per-token temperature as a column or row."""
        t = temperature if self.per_token_temperature else scalars[0] if self.has_temperature else None
        return LogitTransform(
            temperature=t,
            softcap=scalars[1] if self.has_softcap else None,
            scale=scalars[2] if self.has_scale else None,
        )
