"""What a head-level loss will need, from shapes alone: bytes, FLOPs, tiles, matmuls. Nothing is compiled or run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from logitless import compat
from logitless.backends import Route
from logitless.head import route as head_route
from logitless.objectives.objective import Objective
from logitless.planning.chips import Chip, as_if_on, chip_of, roofline_seconds
from logitless.tiles import MIB, column_tile, platform

_GEMM_WORKSPACE = 32 * MIB
"""What XLA sets aside for cuBLAS on a Hopper GPU."""
_FUSED_ROWS, _FUSED_SUMS = 128, 8 * MIB
"""Tokens of a tile of the Hopper matmul with the statistics in its epilogue, and about what its partial sums take."""


@dataclasses.dataclass(frozen=True)
class HeadPlan:
    """A prediction. Bytes are those of one device; ``flops`` counts matmuls only, two per multiply-add.

    ``moved`` is the traffic to and from device memory that the way implies, ``dense_*`` the same for the dense loss in
    its strong form. ``chunk`` is ``None`` where no chunk of logits is ever in memory. Times need a chip.
    """

    backend: str
    way: str
    chunk: int | None
    tiles: dict[str, Any]
    matmuls: int
    flops: int
    moved: int
    arguments: int
    outputs: int
    temporaries: int
    dense_flops: int
    dense_moved: int
    dense_temporaries: int
    chip: Chip | None = None

    @property
    def peak(self) -> int:
        """Arguments, outputs and temporaries together."""
        return self.arguments + self.outputs + self.temporaries

    @property
    def dense_peak(self) -> int:
        """The same for the dense loss (strong form) with these logits."""
        return self.arguments + self.outputs + self.dense_temporaries

    @property
    def seconds(self) -> float | None:
        """The roofline's time on the chip: no kernel can take less for this way of doing it."""
        return None if self.chip is None else roofline_seconds(self.chip, self.flops, self.moved)

    @property
    def dense_seconds(self) -> float | None:
        """The roofline's time of the dense loss, which takes every token, masked or not."""
        return None if self.chip is None else roofline_seconds(self.chip, self.dense_flops, self.dense_moved)

    def __str__(self) -> str:
        cut = "no logits in memory" if self.chunk is None else f"chunks of {self.chunk} tokens"
        tiles = ", ".join(f"{k} {v}" for k, v in self.tiles.items() if k not in ("chunk", "layout"))
        lines = [
            f"{self.backend}, {cut}, {self.matmuls} matmuls ({self.way})",
            *([f"  tiles {tiles}"] if tiles else []),
            f"  {self.flops / 1e12:.2f} TFLOP, {self.moved / 1e9:.1f} GB of memory traffic",
            f"  peak {self.peak / MIB:,.0f} MiB = arguments {self.arguments / MIB:,.0f} + outputs "
            f"{self.outputs / MIB:,.0f} + temporaries {self.temporaries / MIB:,.0f}",
            f"  dense: peak {self.dense_peak / MIB:,.0f} MiB, temporaries {self.dense_temporaries / MIB:,.0f}, "
            f"{self.dense_flops / 1e12:.2f} TFLOP",
        ]
        if self.chip is not None and self.seconds is not None and self.dense_seconds is not None:
            bound = "compute" if self.flops / self.chip.flops >= self.moved / self.chip.hbm else "memory"
            lines.append(
                f"  {self.chip.name} roofline {self.seconds * 1e3:.2f} ms ({bound}), dense "
                f"{self.dense_seconds * 1e3:.2f} ms; memory {self.peak / self.chip.hbm_bytes:.1%} of "
                f"{self.chip.hbm_bytes / 1e9:.0f} GB, dense {self.dense_peak / self.chip.hbm_bytes:.1%}"
            )
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """Everything as JSON."""
        out = dataclasses.asdict(self)
        out.update(chip=None if self.chip is None else self.chip.name, peak=self.peak, dense_peak=self.dense_peak)
        return dict(out, seconds=self.seconds, dense_seconds=self.dense_seconds)


@dataclasses.dataclass(frozen=True)
class _Work:
    """The numbers that bytes and FLOPs are made of."""

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
        return self.vocab * self.width * self.item

    @property
    def rows(self) -> int:
        return self.tokens * self.width * self.item

    @property
    def gradients(self) -> int:
        return self.wants_hidden + self.wants_head


def plan(
    hidden: Any,
    lm_head: Any,
    *,
    objective: Objective | None = Objective(),  # noqa: B008  (frozen)
    gradients: tuple[str, ...] = ("hidden", "lm_head"),
    live_tokens: int | None = None,
    logits_dtype: Any = "float32",
    head_grad_dtype: str = "float32",
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    head_layout: str | None = None,
    chip: str | None = None,
) -> HeadPlan:
    """Predict the memory and the work of :func:`logitless.linear_grpo_loss` (``objective=None``: of
    :func:`logitless.linear_logprobs`) before anything runs.

    ``hidden`` and ``lm_head`` are arrays or ``jax.ShapeDtypeStruct``; ``gradients`` names those that will be asked
    for; ``live_tokens`` is the number of unmasked tokens (all, if not given). ``chip`` (``v5e``, ``v5p``, ``v6e``,
    ``a100``, ``h100``, ``h200``, ``b200``) plans for that accelerator, wherever this runs, and gives a roofline time.
    The peak agrees with the compiler's within 5 % for float32 on CPU, and for bfloat16 on Hopper GPUs and TPUs (where
    the compiler of jax 0.10 needs less: it lets more arrays share their memory).

    >>> import jax, jax.numpy as jnp, logitless
    >>> h = jax.ShapeDtypeStruct((8, 1024, 4096), jnp.bfloat16)
    >>> w = jax.ShapeDtypeStruct((151936, 4096), jnp.bfloat16)
    >>> p = logitless.plan(h, w, chip="v6e")
    >>> p.backend, p.matmuls, round(p.flops / 1e12, 1), round(p.seconds * 1e3, 1)
    ('pallas_tpu', 4, 40.8, 44.4)
    """
    for name in gradients:
        if name not in ("hidden", "lm_head"):
            raise ValueError(f"plan: gradients has {name!r}, expected 'hidden' and 'lm_head'.")
    where = None if chip is None else chip_of(chip)
    if where is not None and backend is None and not where.kernels:
        backend = "chunked"
    tokens = math.prod(hidden.shape[:-1])
    width = hidden.shape[-1]
    if live_tokens is not None and not 0 <= live_tokens <= tokens:
        raise ValueError(f"plan: live_tokens={live_tokens}, expected 0 to {tokens}, the number of tokens.")
    item = jnp.dtype(hidden.dtype).itemsize
    with as_if_on(where):
        route = head_route.route(
            "plan", hidden, lm_head, objective, backend, chunk_size, memory_budget, logits_dtype, False, head_layout
        )
        work = _Work(
            tokens=tokens,
            live=tokens if live_tokens is None else live_tokens,
            width=width,
            vocab=lm_head.shape[0 if head_layout == "vh" or lm_head.shape[1] == width else 1],
            item=item,
            logit=jnp.dtype(logits_dtype).itemsize,
            wants_hidden="hidden" in gradients,
            wants_head="lm_head" in gradients,
            sum_item=item if head_grad_dtype == "param" else 4,
            masked=live_tokens is not None,
        )
        matmuls, moved, temporaries, tiles = _way(work, route, objective, lm_head)
        dense_temporaries = _dense_temporaries(work)
    per_token = 4 * tokens  # targets; the loss's own [B, T] arrays are as small
    one = 2 * width * work.vocab
    dense_matmuls = 1 + work.gradients
    return HeadPlan(
        backend=route.backend,
        way=route.way,
        chunk=route.tiles.get("chunk", None if route.backend == "pallas_tpu" else tokens),
        tiles=tiles,
        matmuls=matmuls,
        flops=one * work.live * matmuls,
        moved=moved,
        arguments=work.rows + work.head + 3 * per_token,
        outputs=work.wants_hidden * work.rows + work.wants_head * work.head,
        temporaries=temporaries,
        dense_flops=one * tokens * dense_matmuls,
        dense_moved=_dense_traffic(work),
        dense_temporaries=dense_temporaries,
        chip=where,
    )


def longest_context(
    width: int, vocab: int, *, chip: str, dtype: Any = "bfloat16", reserved: float = 0.0, **options: Any
) -> tuple[int, int]:
    """``(fused, dense)``: the most tokens, in multiples of 128, whose loss and gradients fit into what ``reserved``
    bytes (weights, optimiser state, activations) leave of a chip's memory. Zero where not even 128 do."""
    room = chip_of(chip).hbm_bytes - reserved
    lm_head = jax.ShapeDtypeStruct((vocab, width), dtype)

    def fits(blocks: int, peak: str) -> bool:
        hidden = jax.ShapeDtypeStruct((1, 128 * blocks, width), dtype)
        return getattr(plan(hidden, lm_head, chip=chip, head_layout="vh", **options), peak) <= room

    found = []
    for peak in ("peak", "dense_peak"):
        low, high = 0, 1 << 24
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle, peak) else (low, middle)
        found.append(128 * low)
    return found[0], found[1]


def _way(w: _Work, route: Route, objective: Objective | None, lm_head: Any) -> tuple[int, int, int, dict[str, Any]]:
    """``(matmuls, bytes moved, temporaries, tiles)`` of the way a call takes."""
    if route.backend == "reference":
        return 1 + w.gradients, _dense_traffic(w), _dense_temporaries(w), {}
    if route.backend == "pallas_tpu":
        return _tpu_way(w, route, objective, lm_head)
    in_forward = objective is not None and objective.coupling() is None
    again = 0 if in_forward or not w.gradients else 1
    matmuls = 1 + w.gradients + again
    chunk = route.tiles["chunk"]
    sweeps = -(-w.live // chunk)
    # Logits written and read (once more if made again), dlogits written and read by each gradient's matmul; the head
    # read by each matmul and the sum of dW read and written, for each chunk.
    plane = w.live * w.vocab * (2 * w.logit * (1 + again) + (w.item * (1 + w.gradients) if w.gradients else 0))
    dw_sum = 2 * w.vocab * w.width * w.sum_item if w.wants_head else 0
    reads = matmuls - w.wants_head
    if not w.gradients and route.fused_statistics:  # statistics alone, no logits in memory
        moved = -(-w.live // _FUSED_ROWS) * w.head + w.rows
        return 1, moved, w.masked * w.rows + _FUSED_SUMS, {}
    moved = plane + sweeps * (reads * w.head + dw_sum) + matmuls * w.live * w.width * w.item
    return matmuls, moved, _chunk_temporaries(w, chunk), {"chunk": chunk}


def _tpu_way(w: _Work, route: Route, objective: Objective | None, lm_head: Any) -> tuple[int, int, int, dict[str, Any]]:
    """The kernels that run, of which ``pallas_tpu.describe`` knows tiles and bytes."""
    from logitless.head import pallas_tpu

    flat = jax.ShapeDtypeStruct((max(w.live, 1), w.width), "bfloat16" if w.item == 2 else "float32")
    about = pallas_tpu.describe(flat, lm_head, layout=route.tiles["layout"])
    carries = w.wants_hidden and (objective is None or objective.entropy_coef is None)
    used = ["token_stats_and_direction" if carries else "token_stats"]
    used += ["dhidden"] * (w.wants_hidden and not carries) + ["dhead"] * w.wants_head
    tiles = {k: f"{about[k]['token_tile']}x{about[k]['vocab_tile']}" for k in used}
    return (
        sum(about[k]["matmuls"] for k in used),
        sum(about[k]["hbm_bytes"] for k in used),
        _tpu_temporaries(w, carries),
        tiles,
    )


def _tpu_temporaries(w: _Work, carries: bool) -> int:
    """Arrays ``[tokens, H]`` beside inputs and outputs, as libtpu 0.0.48 places them.

    The float32 accumulator (once more where a mask puts its rows back into their places), and the hidden states
    gathered for the sweep of dW; an entropy bonus has dH in float32 as well.
    """
    per_element = w.item if w.masked or w.wants_head else 0
    if w.wants_hidden:
        per_element = 4 * (1 + w.masked) + w.item * w.wants_head if carries else 8 + w.item
    return w.tokens * w.width * per_element


def _dense_temporaries(w: _Work) -> int:
    """Logits and dlogits; the TPU's compiler writes dlogits of the same dtype in the logits' place."""
    in_place = platform() == "tpu" and w.logit == w.item
    return w.tokens * w.vocab * (w.logit + (w.item if w.gradients and not in_place else 0))


def _dense_traffic(w: _Work) -> int:
    """Logits written, read for the statistics and again for dlogits, which are written and read by each matmul."""
    plane = w.tokens * w.vocab * (2 * w.logit + ((w.logit + w.item * (1 + w.gradients)) if w.gradients else 0))
    return plane + (1 + w.gradients) * (w.head + w.rows)


def _chunk_temporaries(w: _Work, chunk: int) -> int:
    """Buffers of one chunk, and the accumulator of dW where it is not the output itself."""
    logits = chunk * w.vocab * w.logit
    dlogits = chunk * w.vocab * w.item if w.gradients and w.item != w.logit else 0
    rows = chunk * w.width * w.item
    tile = column_tile()
    if tile is not None:  # CPU: passes over slices of columns, dW summed in slices
        tile = min(tile, w.vocab)
        tiled = logits + dlogits + 2 * chunk * tile * 4 + rows + (tile * w.width * 4 if w.wants_head else 0)
        copied = 2 * logits + rows if w.wants_head and compat.cpu_copies_logits_for_dw() else 0
        return max(tiled, copied)
    small = rows * (1 + w.gradients) + (_GEMM_WORKSPACE if platform() == "gpu" else 0)
    work = logits + max(dlogits + rows * w.wants_head, small) if dlogits else logits + small
    if not w.wants_head or w.sum_item == w.item:
        return work
    # The float32 sum of dW; the output's own buffer is free until the end and takes the largest buffer that fits.
    output = w.vocab * w.width * w.item
    reused = max((b for b in (logits, dlogits) if b <= output), default=0)
    return w.vocab * w.width * w.sum_item + work - reused
