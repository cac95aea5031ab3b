"""What a head-level loss will need, from shapes alone: bytes, FLOPs, tiles, matmuls. Nothing is compiled or run."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from logitless import api
from logitless.core.arguments import tolerance_of
from logitless.core.chunk_size import MIB, column_tile, platform
from logitless.core.explanation import call_arguments, route_of
from logitless.core.registry import ANYWHERE, KERNELS
from logitless.core.route import Route
from logitless.lab.plan import sparse, tpu
from logitless.lab.plan.chips import as_if_on, chip_of
from logitless.lab.plan.prediction import HeadPlan
from logitless.lab.plan.work import GEMM_WORKSPACE, Way, Work
from logitless.objectives.objective import Objective

_FUSED_ROWS, _FUSED_SUMS = 128, 8 * MIB
"""Tokens of a tile of the Hopper matmul with the statistics in its epilogue, and about what its partial sums take."""


def plan(
    hidden: Any,
    lm_head: Any,
    *,
    objective: Objective | None = Objective(),  # noqa: B008  (frozen)
    gradients: tuple[str, ...] | None = None,
    lora_rank: int | None = None,
    live_tokens: int | None = None,
    logits_dtype: Any = "float32",
    head_grad_dtype: str = "float32",
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    head_layout: str | None = None,
    chip: str | None = None,
    sparse_backward: Any = "off",
    active_columns: float | None = None,
    hard_rows: float | None = None,
    vocabulary_shard: bool = False,
    reference: bool = False,
) -> HeadPlan:
    """Predict the memory and the work of :func:`logitless.linear_grpo_loss` (``objective=None``: of
    :func:`logitless.linear_logprobs`) before anything runs.

    ``hidden`` and ``lm_head`` are arrays or ``jax.ShapeDtypeStruct``; ``lora_rank`` is that of the ``lora`` that the
    call will be given; ``gradients`` names those that will be asked for, of ``"hidden"``, ``"lm_head"`` and ``"lora"``
    (default: all that are there; a frozen head with LoRA is ``("hidden", "lora")``). ``live_tokens`` is the number of
    unmasked tokens (all, if not given). ``chip`` (``v5e``, ``v5p``, ``v6e``, ``a100``, ``h100``, ``h200``, ``b200``)
    plans for that accelerator, wherever this runs, and gives a roofline time. The peak agrees with the compiler's
    within 5 % for float32 on CPU, and for bfloat16 on Hopper GPUs and TPUs (where the compiler of jax 0.10 needs less:
    it lets more arrays share their memory).

    ``sparse_backward`` as the call would get it. What that saves depends on the policy: ``active_columns`` and
    ``hard_rows`` are the shares to assume, as the metrics of these names report them (default: those of a policy
    calibrated to Qwen2.5 on GSM8K at the tolerance of ``"auto"`` with bfloat16). The plan's ``exact`` is the one
    without it. ``vocabulary_shard``: ``lm_head`` is one device's part of the vocabulary.

    ``reference``: the call is given ``ref_hidden`` and ``ref_lm_head`` of the same shapes, and computes the reference's
    log-probabilities first.

    >>> import jax, jax.numpy as jnp, logitless
    >>> h = jax.ShapeDtypeStruct((8, 1024, 4096), jnp.bfloat16)
    >>> w = jax.ShapeDtypeStruct((151936, 4096), jnp.bfloat16)
    >>> p = logitless.plan(h, w, chip="v6e")
    >>> p.backend, p.matmuls, round(p.flops / 1e12, 1), round(p.seconds * 1e3, 1)
    ('pallas_tpu', 4, 40.8, 44.4)
    """
    gradients = asked_for(gradients, lora_rank)
    where = None if chip is None else chip_of(chip)
    without_kernels = where is not None and backend is None and not where.kernels
    if without_kernels:
        backend = ANYWHERE
    if vocabulary_shard and (platform() if where is None else where.platform) != "tpu":
        # The statistics of all shards come first, then the gradient: the way of linear_logprobs, in plain JAX.
        objective, backend = None, backend or ANYWHERE
    tokens = math.prod(hidden.shape[:-1])
    width = hidden.shape[-1]
    if live_tokens is not None and not 0 <= live_tokens <= tokens:
        raise ValueError(f"plan: live_tokens={live_tokens}, expected 0 to {tokens}, the number of tokens.")
    item = jnp.dtype(hidden.dtype).itemsize
    _, mass = tolerance_of("plan", sparse_backward, hidden.dtype)
    shares = sparse.shares_of(mass, active_columns, hard_rows)
    w = Work(
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
        rank=lora_rank or 0,
        wants_lora="lora" in gradients,
    )
    per_token = 4 * tokens  # targets; the loss's own [B, T] arrays are as small
    one = 2 * width * w.vocab

    call = api.linear_logprobs if objective is None else api.linear_grpo_loss
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (hidden, lm_head))
    options = dict(
        objective=objective,
        backend=backend,
        chunk_size=chunk_size,
        memory_budget=memory_budget,
        logits_dtype=logits_dtype,
        head_layout=head_layout,
    )
    lora = None
    if lora_rank is not None:
        sizes = (lm_head.shape[0], lora_rank), (lora_rank, lm_head.shape[1])
        lora = tuple(jax.ShapeDtypeStruct(size, lm_head.dtype) for size in sizes)

    def prediction(sparse_backward: Any, shares: sparse.Shares | None, exact: HeadPlan | None) -> HeadPlan:
        with as_if_on(where):
            given = dict(options, lora=lora, sparse_backward=sparse_backward)
            route = route_of("plan", call_arguments(call, shapes, given))
            way = _way(w, route)
            if shares is not None and w.backward:
                way = sparse.way(w, shares, way, route, vocabulary_shard)
            dense_temporaries = _dense_temporaries(w)
        return HeadPlan(
            backend=route.backend,
            way=route.way,
            chunk=None if route.backend == KERNELS["tpu"] else route.tiles.get("chunk", tokens),
            tiles=way.tiles,
            matmuls=way.matmuls,
            flops=round(one * w.live * (way.matmuls + way.narrow)),
            moved=way.moved,
            passes=way.passes,
            arguments=w.rows + w.head + w.factors + 3 * per_token,
            outputs=w.wants_hidden * w.rows + w.wants_head * w.head + w.wants_lora * w.factors,
            temporaries=way.temporaries,
            dense_flops=round(one * tokens * (1 + w.gradients + w.narrow(1))),
            dense_moved=_dense_traffic(w),
            dense_passes=_dense_passes(w),
            dense_temporaries=dense_temporaries,
            chip=where,
            shares=shares,
            exact=exact,
            because="no kernel of ours serves this chip" if without_kernels else route.because,
        )

    exact = prediction("off", None, None)
    own = exact if shares is None else prediction(mass, shares, exact)
    if not reference:
        return own
    first = plan(
        hidden, lm_head, objective=None, gradients=(), live_tokens=live_tokens, chip=chip,
        **{k: v for k, v in options.items() if k != "objective"},
    )  # fmt: skip
    return own.after(first)


def asked_for(gradients: tuple[str, ...] | None, lora_rank: Any) -> tuple[str, ...]:
    """The gradients by name; what is not there has none."""
    if lora_rank is not None and (not isinstance(lora_rank, int) or isinstance(lora_rank, bool) or lora_rank < 1):
        raise ValueError(f"plan: lora_rank={lora_rank!r}, expected a positive Python int.")
    there = ("hidden", "lm_head") if lora_rank is None else ("hidden", "lm_head", "lora")
    for name in gradients or ():
        if name == "lora" and lora_rank is None:
            raise ValueError("plan: gradients has 'lora', and lora_rank is not given.")
        if name not in there:
            raise ValueError(f"plan: gradients has {name!r}, expected 'hidden', 'lm_head' and 'lora'.")
    return there if gradients is None else gradients


def longest_context(
    width: int, vocab: int, *, chip: str, dtype: Any = "bfloat16", reserved: float = 0.0, **options: Any
) -> tuple[int, int]:
    """``(fused, dense)``: the most tokens, in multiples of 128, whose loss and gradients fit into what ``reserved``
    bytes (weights, optimiser state, activations) leave of a chip's memory. Zero where not even 128 do."""
    room = chip_of(chip).hbm_bytes - reserved
    lm_head = jax.ShapeDtypeStruct((vocab, width), dtype)

    @functools.cache
    def peaks(blocks: int) -> tuple[float, float]:
        hidden = jax.ShapeDtypeStruct((1, 128 * blocks, width), dtype)
        p = plan(hidden, lm_head, chip=chip, head_layout="vh", **options)
        return p.peak, p.dense_peak

    def most(which: int) -> int:
        """Peaks grow with the blocks, nearly in proportion: from where a line says, in growing steps, then halving."""
        start, end = 1 << 11, 1 << 12
        slope = (peaks(end)[which] - peaks(start)[which]) / (end - start)
        guess = start + int((room - peaks(start)[which]) / max(slope, 1.0))
        low, high, step = 0, 1 << 24, 1
        middle = min(max(guess, 1), high - 1)
        while high - low > 1:
            if peaks(middle)[which] <= room:
                low, away = middle, middle + step
            else:
                high, away = middle, middle - step
            middle, step = (away, 2 * step) if low < away < high else ((low + high) // 2, step)
        return 128 * low

    return most(0), most(1)


def _way(w: Work, route: Route) -> Way:
    """What the way that a call takes costs, with an exact backward."""
    if route.dense:
        dense = _dense_traffic(w), _dense_passes(w), _dense_temporaries(w)
        return Way(1 + w.gradients, *dense, {}, w.narrow(1))
    if route.backend == KERNELS["tpu"]:
        return tpu.way(w, route)
    again = 0 if route.in_forward or not w.backward else 1
    matmuls = 1 + w.gradients + again
    chunk = route.tiles["chunk"]
    sweeps = -(-w.live // chunk)
    # Logits written and read (once more if made again), dlogits written and read by each gradient's matmul; the head
    # read by each matmul and the sum of dW read and written, for each chunk.
    plane = w.live * w.vocab * (2 * w.logit * (1 + again) + (w.item * (1 + w.gradients) if w.backward else 0))
    dw_sum = 2 * w.vocab * w.width * w.sum_item if w.wants_head else 0
    reads = matmuls - w.wants_head
    if not w.backward and route.fused_statistics:  # statistics alone, no logits in memory
        moved = -(-w.live // _FUSED_ROWS) * w.head + w.rows
        return Way(1, moved, 0, w.masked * w.rows + _FUSED_SUMS, {})
    # LoRA's products are too narrow to hide what they read and write: logits are added to, dlogits read again.
    lora = w.live * w.vocab * (8 * (1 + again) + w.item * (w.backward + w.wants_lora)) if w.rank else 0
    moved = lora + plane + sweeps * (reads * w.head + dw_sum) + matmuls * w.live * w.width * w.item
    # Statistics and dlogits each read the logits, unless the row kernel does both at once or a matmul the statistics.
    looks = 1 + w.backward
    if (route.backend == KERNELS["gpu"] and w.backward and not again) or route.fused_statistics:
        looks -= 1
    passes = w.live * w.vocab * (looks * w.logit + (w.item if w.backward else 0))
    return Way(matmuls, moved, passes + lora, _chunk_temporaries(w, chunk), {"chunk": chunk}, w.narrow(1 + again))


def _dense_temporaries(w: Work) -> int:
    """Logits and dlogits; the TPU's compiler writes dlogits of the same dtype in the logits' place."""
    in_place = platform() == "tpu" and w.logit == w.item
    return w.tokens * w.vocab * (w.logit + (w.item if w.backward and not in_place else 0))


def _dense_traffic(w: Work) -> int:
    """Logits written, read for the statistics and again for dlogits, which are written and read by each matmul."""
    plane = w.tokens * w.vocab * (2 * w.logit + ((w.logit + w.item * (1 + w.gradients)) if w.backward else 0))
    return plane + (1 + w.gradients) * (w.head + w.rows)


def _dense_passes(w: Work) -> int:
    """The logits read for the statistics and again for dlogits, which are written: what no matmul of its does."""
    return w.tokens * w.vocab * ((2 * w.logit + w.item) if w.backward else w.logit)


def _chunk_temporaries(w: Work, chunk: int) -> int:
    """Buffers of one chunk, and the accumulator of dW where it is not the output itself."""
    logits = chunk * w.vocab * w.logit
    dlogits = chunk * w.vocab * w.item if w.backward and w.item != w.logit else 0
    rows = chunk * w.width * w.item
    tile = column_tile()
    if tile is not None:  # CPU: passes over slices of columns, dH and dW summed in slices
        tile = min(tile, w.vocab)
        slices = (tile * w.width * 4 if w.wants_head else 0) + (tile * w.width * w.item if w.wants_hidden else 0)
        # LoRA's logits are added to the head's, and their gradient meets two matmuls more: planes of their own.
        lora = 4 * chunk * w.vocab * (1 + w.backward) if w.rank else 0
        return logits + dlogits + lora + 2 * chunk * tile * 4 + rows + slices
    small = rows * (1 + w.gradients) + (GEMM_WORKSPACE if platform() == "gpu" else 0)
    work = logits + max(dlogits + rows * w.wants_head, small) if dlogits else logits + small
    if w.rank:  # the two products in float32, then their sum
        work = max(work, 8 * chunk * w.vocab + small)
    if not w.wants_head or w.sum_item == w.item:
        return work
    # The float32 sum of dW; the output's own buffer is free until the end and takes the largest buffer that fits.
    output = w.vocab * w.width * w.item
    reused = max((b for b in (logits, dlogits) if b <= output), default=0)
    return w.vocab * w.width * w.sum_item + work - reused
