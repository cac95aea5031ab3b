"""A closed estimate of a call's memory and work, for a device whose compiler is not at hand.

Inputs and gradients are counted exactly. Beside them the estimate counts what is large:

    dense                  logits [T, V], and dlogits (their own buffer but on a TPU, where the dtype is the same)
    chunks of C tokens     logits [C, V] and dlogits; with LoRA or an entropy bonus on a CPU more of them; the float32
                           sum of dW, whose output lends its memory to a chunk
    a Hopper screen        one bit for each token and column, the hidden states once more
    TPU kernels            one to five arrays [T, H]: accumulators, hidden states in order, targets' rows
    over a mesh            the head gathered over FSDP axes, and dW before it is reduced

What XLA adds for itself (workspaces, passes, copies) is not counted. tests/plan/test_estimate.py holds the peak to
within 10 % of what compilers have said of GPUs and TPUs, and the time is a roofline: FLOPs over the chip's rate, or
bytes over its bandwidth.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from logitless.core.chunk_size import MIB, column_tile, platform
from logitless.core.registry import KERNELS
from logitless.core.route import Route
from logitless.mesh import head_pieces

GEMM_WORKSPACE = 32 * MIB
"""What XLA sets aside for cuBLAS on a Hopper GPU."""


@dataclasses.dataclass(frozen=True)
class Shares:
    """What a plan assumes of the policy, by the names of the metrics that a run reports."""

    active_columns: float
    """Share of the vocabulary that carries a chunk's gradient; 1 is a flat policy, which goes dense."""
    hard_rows: float
    """Share of the tokens that would leave out more than the tolerance, and go through all columns."""

    def in_words(self) -> str:
        return (
            f"for a policy with active_columns {self.active_columns:g} and hard_rows {self.hard_rows:g}, which are "
            "assumed: the metrics of these names say a run's true ones"
        )


CALIBRATED = Shares(active_columns=0.05, hard_rows=0.06)
"""About what the calibrated policy (``lab/bench/realistic.py``: Qwen2.5-Coder-1.5B on GSM8K, V=151936) has at a
tolerance of 2^-8: 0.035 to 0.062 and 0.051 to 0.067 in chunks of 2048 tokens
(benchmarks/results/gpu_h200_sparse.json)."""

CALIBRATED_TOLERANCE = 2.0**-8
"""Where :data:`CALIBRATED` holds: ``"auto"`` with bfloat16 operands."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One device's part of a head-level call, in elements, and the bytes of an element."""

    tokens: int
    live: int
    width: int
    vocab: int
    rank: int  # of LoRA on the head
    item: int  # bytes of a hidden state
    logit: int  # bytes of a logit
    sum_item: int  # bytes of an element of dW while it is summed
    wants: tuple[str, ...]  # whose gradients are asked for
    masked: bool
    gathered: int  # devices that the head is gathered over
    summed: bool  # dW, over devices

    @property
    def head(self) -> int:
        return self.vocab * self.width * self.item

    @property
    def rows(self) -> int:
        return self.tokens * self.width * self.item

    @property
    def gradients(self) -> int:
        """How many of dH and dW are asked for: the wide matmuls of a backward pass."""
        return ("hidden" in self.wants) + ("lm_head" in self.wants)


@dataclasses.dataclass(frozen=True)
class Work:
    """Matmuls ``[live tokens, H] x [H, V]``, their FLOPs, bytes to and from device memory, bytes beside in- and outputs."""

    matmuls: float
    flops: int
    moved: int
    temporaries: int


def _work(s: Sizes, matmuls: float, tokens: int, moved: int, temporaries: int) -> Work:
    return Work(matmuls, round(2 * tokens * (s.width + s.rank) * s.vocab * matmuls), moved, temporaries)


def dense(s: Sizes, entropy: bool) -> Work:
    """The dense loss in its strong form: every token, masked or not."""
    matmuls, plane = 1 + s.gradients, s.tokens * s.vocab
    in_place = platform() == "tpu" and s.logit == s.item
    passes = 2 * s.logit + ((s.logit + s.item * matmuls) if s.wants else 0)
    held = s.logit + (s.item if s.wants and not in_place else 0)
    return _work(s, matmuls, s.tokens, plane * passes + matmuls * (s.head + s.rows), plane * held)


def fused(s: Sizes, route: Route, shares: Shares | None) -> Work:
    """The way that a route takes."""
    if route.dense:
        return dense(s, route.way_taken.entropy)
    on_tpu, screened = route.backend == KERNELS["tpu"], "columns_at_once" in route.tiles
    matmuls = _matmuls(s, route)
    if shares is not None and s.gradients:
        matmuls = _sparse_matmuls(s, route, shares, later=not route.in_forward, again=on_tpu or screened, exact=matmuls)
    no_logits = on_tpu or screened or (route.fused_statistics and not s.wants)
    tile = route.tiles["chunk"] if "chunk" in route.tiles else int(next(iter(route.tiles.values())).split("x")[0])
    # A matmul reads the head for each of its tiles, and the hidden states; one of dW goes over its sum.
    dw = 2 * s.vocab * s.width * s.sum_item if "lm_head" in s.wants else 0
    sweeps = -(-s.live // tile)
    moved = round(matmuls * (sweeps * s.head + s.live * s.width * s.item)) + (dw if no_logits else sweeps * dw)
    if not no_logits:  # logits written and read, dlogits written and read by each matmul
        plane = 2 * s.logit * (1 if route.in_forward or not s.wants else 2) + (
            s.item * (1 + s.gradients) if s.wants else 0
        )
        moved += s.live * s.vocab * plane
    return _work(s, matmuls, s.live, moved, _temporaries(s, route, screened) + _of_mesh(s, route))


def _matmuls(s: Sizes, route: Route) -> float:
    """Those of an exact backward, from the route's own counts."""
    if route.described.counts is None:  # a sparse backward's: those of the exact one
        both: float = 4 if not route.in_forward or route.backend == KERNELS["tpu"] else 3
        frozen = 2 if route.backend == KERNELS["tpu"] else both - 1
    else:
        both, frozen, _ = route.described.counts
    if not s.wants:
        return 1
    if route.backend == KERNELS["tpu"]:  # dW's sweep makes logits again; LoRA's factor needs that sweep, too
        moves = "hidden" in s.wants or "lora" in s.wants
        last = both - frozen if "lm_head" in s.wants else float("lora" in s.wants)
        return (frozen if moves else 1) + last
    return both - 2 + s.gradients


def _sparse_matmuls(s: Sizes, route: Route, shares: Shares, *, later: bool, again: bool, exact: float) -> float:
    """A share of the columns for all tokens, all columns for the hard rows; the exact way where that is no less.

    Logits of the active columns are made ``again`` where none are kept, and once more for cotangents that come later.
    A shard of the vocabulary finds its columns in a second sweep.
    """
    b, sweeps = s.gradients, 2 if route.way_taken.shards > 1 else 1
    found = sweeps + (later + again + b) * shares.active_columns + (1 + b) * shares.hard_rows
    return found if shares.active_columns <= 0.25 and found < exact else exact


def _temporaries(s: Sizes, route: Route, screened: bool) -> int:
    wants_hidden, wants_head = "hidden" in s.wants, "lm_head" in s.wants
    if route.backend == KERNELS["tpu"]:
        return _of_tpu_kernels(s, route, wants_hidden, wants_head)
    if route.fused_statistics and not s.wants:
        return s.rows * s.masked + 8 * MIB
    if screened and "chunk_if_flat" not in route.tiles:
        return s.tokens * s.vocab // 8 + s.rows
    chunk = route.tiles["chunk"]
    logits = chunk * s.vocab * s.logit
    dlogits = chunk * s.vocab * s.item if s.wants and s.item != s.logit else 0
    lora = 8 * chunk * s.vocab if s.rank else 0
    small = chunk * s.width * s.item * (1 + s.gradients)
    dw = s.vocab * s.width * s.sum_item if wants_head and s.sum_item != s.item else 0
    if column_tile() is not None:  # XLA's CPU compiler fuses less: passes over tiles of columns have buffers
        tile = min(column_tile() or 0, s.vocab)
        return logits + dlogits + lora + dw + small + 4 * tile * (2 * chunk + s.width)
    small += GEMM_WORKSPACE if platform() == "gpu" else 0
    lent = max((b for b in (logits, dlogits) if b <= s.head), default=0) if dw else 0
    return max(logits + max(dlogits, small), lora + small) + dw - lent


def _of_tpu_kernels(s: Sizes, route: Route, wants_hidden: bool, wants_head: bool) -> int:
    """Arrays ``[T, H]`` beside in- and outputs, as libtpu 0.0.50 places them."""
    kept = route.static.kept * s.vocab * s.item if wants_head and route.static.kept > s.width else 0
    sparse = s.rows if route.way_taken.mass is not None and s.wants else 0
    if s.rank:
        lanes, carries = -(-s.rank // 128) * 128, not route.way_taken.entropy
        outer, last = s.vocab * lanes, wants_head or "lora" in s.wants
        first = s.tokens * (s.width + lanes) * (8 + s.item * (not carries))
        last = 4 * outer + s.tokens * s.width * ((4 + 2 * s.item) if carries else s.item) if last else 0
        return s.item * outer + max(first if s.wants else 0, last) + 4 * s.tokens * s.width * (s.masked and carries)
    if route.way_taken.entropy and wants_hidden:
        return (8 + s.item) * s.tokens * s.width
    arrays = 3 if s.masked and wants_hidden else int(s.masked or bool(s.wants))
    arrays += 3 if wants_hidden and route.tiles["layout"] == "hv" else 0
    return arrays * s.rows + kept + sparse


def _of_mesh(s: Sizes, route: Route) -> int:
    """The head gathered over FSDP axes, and dW before it is reduced; TPU kernels have both in parts, if they are large.

    A shard of the vocabulary has the direction and its sum over devices in float32, and the targets' rows.
    """
    dw = s.vocab * s.width * s.sum_item if "lm_head" in s.wants else 0
    if route.backend != KERNELS["tpu"]:
        return s.head * (1 + ("lm_head" in s.wants)) if s.gathered > 1 else 0
    n = 1 if s.rank else head_pieces.number(s.vocab * s.width, s.vocab // s.gathered)
    head = s.head // n if s.gathered > 1 else 0
    rows = s.tokens * s.width * (8 + s.item) if route.way_taken.shards > 1 or (n > 1 and s.gathered > 1) else 0
    return head + max(dw // n if s.summed else 0, rows)


def shares_of(tolerance: float | None, active_columns: Any, hard_rows: Any) -> Shares | None:
    """The shares that were given, else those of the calibrated policy, which hold at its tolerance only; ``None``
    without a sparse backward, where they mean nothing."""
    given = {"active_columns": active_columns, "hard_rows": hard_rows}
    for name, value in given.items():
        if value is not None and tolerance is None:
            raise ValueError(
                f"plan: {name}={value!r} is about the sparse backward; give sparse_backward='auto' with it."
            )
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value <= 1):
            raise ValueError(f"plan: {name}={value!r}, expected a share from 0 to 1, as the metric {name} has it.")
    if tolerance is None:
        return None
    missing = [name for name, value in given.items() if value is None]
    if missing and not math.isclose(tolerance, CALIBRATED_TOLERANCE):
        raise ValueError(
            f"plan: sparse_backward leaves out at most {tolerance:.3g} of a row's mass here, and the calibrated shares "
            f"are for {CALIBRATED_TOLERANCE:.3g} ('auto' with bfloat16); give {' and '.join(missing)} as a run's "
            "metrics have them (active_columns=1 if every chunk goes dense)."
        )
    return Shares(
        CALIBRATED.active_columns if active_columns is None else float(active_columns),
        CALIBRATED.hard_rows if hard_rows is None else float(hard_rows),
    )
