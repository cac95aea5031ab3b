"""A closed estimate of a call's memory and work, for a device whose compiler is not at hand.

Inputs and gradients are exact. In addition the estimate counts large buffers, and no buffers added by XLA:

    dense                logits [T, V] and dlogits (on a TPU in one buffer, where the dtype is the same)
    chunks of C tokens   logits [C, V] (of both models with a teacher) and dlogits; the float32 sum of dW, whose output
                         lends its memory to a chunk
    a Hopper screen      one bit for each token and column, the hidden states once more
    TPU kernels          arrays [T, H]: accumulators, hidden states in order, targets' rows
    over a mesh          the gathered head, dW before it is reduced
    a call from logits   nothing, but dense ones their dlogits

tests/plan/test_estimate.py holds the peak to within 10 % of what compilers of GPUs and TPUs have said. It does not hold
for a CPU, nor for the dense loss with an entropy bonus, which may take twice as much. The time is a roofline: FLOPs
over the chip's rate, or bytes over its bandwidth.
"""

from __future__ import annotations

import dataclasses
import math

from logitless.core.chunk_size import MIB, column_tile, platform
from logitless.core.problem import Layout
from logitless.core.route import Route
from logitless.lab.plan.chips import Chip, roofline_seconds
from logitless.mesh import head_pieces


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A head call on a single device: element counts, and bytes per element (``item``, ``logit``, and ``sum_item`` for
    dW during summation)."""

    tokens: int
    live: int
    width: int
    vocab: int
    rank: int
    item: int
    logit: int
    sum_item: int
    wants: tuple[str, ...]
    masked: bool
    rows: int = 1  # devices with different tokens
    gathered: int = 1  # devices that the head is gathered over
    teacher: int = 0  # width of a second model's hidden states; 0: there is none
    layout: Layout = "vh"

    @property
    def head(self) -> int:
        return self.vocab * self.width * self.item

    @property
    def sources(self) -> int:
        """How many models have logits."""
        return 1 + (self.teacher > 0)

    @property
    def teacher_bytes(self) -> int:
        """Bytes of the second model's head and hidden states, read once per matmul."""
        return (self.vocab + self.tokens) * self.teacher * self.item

    @property
    def hidden(self) -> int:
        return self.tokens * self.width * self.item

    @property
    def dw(self) -> int:
        """Bytes for dW during summation."""
        return self.vocab * self.width * self.sum_item if "lm_head" in self.wants else 0

    @property
    def wide(self) -> int:
        """How many of dH and dW are asked for."""
        return ("hidden" in self.wants) + ("lm_head" in self.wants)


@dataclasses.dataclass(frozen=True)
class Work:
    """Matmuls ``[live tokens, H] x [H, V]``, their FLOPs, memory traffic and bytes beside inputs and outputs."""

    matmuls: float
    flops: int
    moved: int
    temporaries: int

    def __add__(self, other: Work) -> Work:
        """One after the other."""
        most = max(self.temporaries, other.temporaries)
        return Work(self.matmuls + other.matmuls, self.flops + other.flops, self.moved + other.moved, most)

    def seconds(self, chip: Chip | None) -> float | None:
        """Roofline time: a lower bound for this number of matmuls."""
        return roofline_seconds(chip, self.flops, self.moved) if chip is not None and chip.flops else None


@dataclasses.dataclass(frozen=True)
class Shares:
    """What is assumed of the policy with a sparse backward, by the names of the metrics that a run reports."""

    active_columns: float  # 1 is a flat policy, which goes dense
    hard_rows: float


CALIBRATED, CALIBRATED_TOLERANCE = Shares(active_columns=0.05, hard_rows=0.06), 2.0**-8
"""About what a policy calibrated to Qwen2.5-Coder-1.5B on GSM8K has at this tolerance, that of ``"auto"`` in bfloat16
(benchmarks/results/gpu_h200_sparse.json)."""


def shares_of(tolerance: float | None, active_columns: float | None, hard_rows: float | None) -> Shares | None:
    """The shares that were given, else the calibrated ones at their tolerance; ``None`` without a sparse backward."""
    given = {"active_columns": active_columns, "hard_rows": hard_rows}
    for name, value in given.items():
        if value is not None and tolerance is None:
            raise ValueError(f"plan: {name}={value!r} is for a sparse backward; give sparse_backward='auto' with it.")
        if value is not None and (isinstance(value, bool) or not 0 <= value <= 1):
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
    return Shares(**dataclasses.asdict(CALIBRATED) | {k: v for k, v in given.items() if v is not None})


def dense(s: Sizes) -> Work:
    """The dense loss in its strong form: every token, masked or not; with a teacher, both models' logits are kept."""
    matmuls, plane = 1 + s.wide, s.tokens * s.vocab
    passes = 2 * s.logit * s.sources + ((s.logit * s.sources + s.item * matmuls) if s.wants else 0)
    held = s.logit * s.sources + (s.item if s.wants and not (platform() == "tpu" and s.logit == s.item) else 0)
    flops = 2 * s.tokens * s.vocab * ((s.width + s.rank) * matmuls + s.teacher)
    moved = plane * passes + matmuls * (s.head + s.hidden) + s.teacher_bytes
    return Work(matmuls + s.sources - 1, flops, moved, plane * held)


def fused(s: Sizes, route: Route, shares: Shares | None) -> Work:
    """The way that a route takes."""
    if route.dense:
        return dense(s)
    cost, later = route.described, not route.in_forward
    on_tpu, screened = cost.stored == "nothing", cost.stored == "bits"
    matmuls: float = _matmuls(s, on_tpu, later, route)
    if shares is not None and s.wide:
        # A share of the columns for all tokens, whose logits are made again where none are kept, and once more for late
        # cotangents; all columns for hard rows. A shard of the vocabulary finds its columns in a second sweep.
        matmuls += screened and not later and not cost.exact_if_flat  # if flat: no logits were kept
        of_columns = (later + (on_tpu or screened) + s.wide) * shares.active_columns
        first = 2 if route.way_taken.shards > 1 else s.sources
        sparse = first + of_columns + (s.sources + s.wide) * shares.hard_rows
        matmuls = min(matmuls, sparse) if shares.active_columns <= 0.25 else matmuls
    no_logits = on_tpu or screened or (cost.fused_statistics and not s.wants)
    sweeps = -(-s.live // (cost.sweep or s.tokens))  # each matmul reads the head once for a tile of tokens
    once = no_logits or cost.stored == "dx" or bool(cost.columns)  # dW is written once
    moved = round(matmuls * (sweeps * s.head + s.live * s.width * s.item)) + 2 * s.dw * (1 if once else sweeps)
    if not no_logits:  # logits written and read, dlogits written and read by each matmul
        again = 2 if later and s.wants and not route.static.kept else 1
        moved += s.live * s.vocab * (2 * s.logit * again * s.sources + s.item * (1 + s.wide) * bool(s.wants))
    beside = _of_tpu_kernels(s, route) if on_tpu else _of_chunks(s, route)
    flops = 2 * s.live * (s.width + s.rank) * s.vocab * matmuls
    if s.teacher:  # number of matmuls with the teacher's width
        counts = cost.counts  # without a gradient each model's logits are made equally often
        theirs = (2 if counts is None else counts[2]) // 2 + bool(later and s.wants)
        flops += 2 * s.live * s.vocab * (s.teacher - s.width - s.rank) * theirs
        moved += sweeps * theirs * (s.vocab * (s.teacher - s.width) * s.item)
    return Work(matmuls, round(flops), moved, beside + _of_mesh(s, route))


def _matmuls(s: Sizes, on_tpu: bool, later: bool, route: Route) -> float:
    """Metrics of an exact backward, from the route's counts; a sparse backward reports its own."""
    if not s.wants:
        return s.sources
    more = (s.sources - 1) * (1 + later)
    counted = (4, 2, 1) if on_tpu else (3 + later + more, 2 + later + more, 1)
    both, frozen, _ = route.described.counts or counted
    if not on_tpu:
        return both - 2 + s.wide
    moves = "hidden" in s.wants or "lora" in s.wants  # dW's sweep makes logits again; LoRA's outer factor needs it, too
    found = (frozen if moves else 1) + (both - frozen if "lm_head" in s.wants else "lora" in s.wants)
    return int(found) if found == int(found) else found


def _of_chunks(s: Sizes, route: Route) -> int:
    cost = route.described
    if cost.fused_statistics and not s.wants:
        return s.hidden * s.masked + 8 * MIB
    if cost.stored == "bits" and not cost.exact_if_flat:
        return s.tokens * s.vocab // 8 + s.hidden
    if cost.columns:  # x, t and dx of a slab, dH, and where tokens are in several chunks a slab of dW
        dw = 4 * cost.columns * s.width * (cost.sweep < s.tokens)
        slab = cost.sweep * cost.columns * (2 * s.logit + s.item * bool(s.wants))
        return slab + (4 * s.tokens * s.width + dw) * bool(s.wants) + 2 * s.hidden * s.masked
    chunk, kept = cost.sweep, route.static.kept * s.vocab * s.logit if s.wants else 0
    logits = chunk * s.vocab * s.logit * s.sources
    if cost.stored == "dx" and s.wants:
        return _of_stored_dx(s, chunk, logits, kept)
    dlogits = chunk * s.vocab * s.item if s.wants and s.item != s.logit else 0
    lora, small = 8 * chunk * s.vocab * bool(s.rank), chunk * s.width * s.item * (1 + s.wide)
    dw = s.dw if s.sum_item != s.item else 0
    tile = column_tile()
    if tile is not None:  # XLA's CPU compiler fuses less: passes over tiles of columns have buffers
        return kept + logits + dlogits + lora + dw + small + 4 * min(tile, s.vocab) * (2 * chunk + s.width)
    small += 32 * MIB if platform() == "gpu" else 0  # XLA's workspace for cuBLAS
    lent = max((b for b in (logits, dlogits) if b <= s.head), default=0) if dw else 0
    return kept + max(logits + max(dlogits, small), lora + small) + dw - lent


def _of_stored_dx(s: Sizes, chunk: int, logits: int, kept: int) -> int:
    """Dlogits of all tokens, or with a frozen head of a few; those of a chunk or, later, dH in parts."""
    rows = s.tokens if "lm_head" in s.wants else min(s.tokens, 2048)
    dx = rows * s.vocab * s.item
    later = s.hidden + 2 * 4 * s.tokens * s.width  # hidden states in order, dH in parts
    if kept:
        return kept + dx * (s.item != s.logit) + later
    return dx + max(logits + chunk * s.vocab * s.item * (s.item != s.logit), later)


def _of_tpu_kernels(s: Sizes, route: Route) -> int:
    """As libtpu 0.0.50 places them; with LoRA the larger of two times, the sweep over tokens and that over columns."""
    wants_hidden, wants_head, carries = "hidden" in s.wants, "lm_head" in s.wants, not route.way_taken.entropy
    if s.rank:
        lanes, plane = -(-s.rank // 128) * 128, s.tokens * s.width
        first = s.tokens * (s.width + lanes) * (8 + s.item * (not carries)) if s.wants else 0
        last = 4 * s.vocab * lanes + plane * (4 + 2 * s.item if carries else s.item)
        both = max(first, last) if wants_head or "lora" in s.wants else first
        return s.item * s.vocab * lanes + both + 4 * plane * (s.masked and carries)
    if wants_hidden and not carries:
        return (8 + s.item) * s.tokens * s.width
    arrays = 3 if s.masked and wants_hidden else int(s.masked or bool(s.wants))
    arrays += 3 * (wants_hidden and s.layout == "hv")
    arrays += route.way_taken.mass is not None and bool(s.wants)
    kept = route.static.kept * s.vocab * s.item if wants_head and route.static.kept > s.width else 0
    return arrays * s.hidden + kept


def _of_mesh(s: Sizes, route: Route) -> int:
    """TPU kernels have a large head and its dW in parts; a shard of the vocabulary has the direction and its sum."""
    if route.described.stored != "nothing":
        return s.head * (1 + bool(s.dw)) if s.gathered > 1 else 0
    n = 1 if s.rank else head_pieces.number(s.vocab * s.width, s.vocab // s.gathered)
    direction = route.way_taken.shards > 1 or (n > 1 and s.gathered > 1)
    rows = s.tokens * s.width * (8 + s.item) if direction else 0
    return (s.head // n if s.gathered > 1 else 0) + max(s.dw // n if s.rows > 1 else 0, rows)
