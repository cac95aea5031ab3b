"""What a head-level loss will need, from shapes alone: bytes, FLOPs, chunk, matmuls. Nothing is compiled or run."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from logitless.head import api
from logitless.objectives.objective import Objective
from logitless.tiles import MIB, column_tile, platform

_GEMM_WORKSPACE = 32 * MIB
"""What XLA sets aside for cuBLAS on a Hopper GPU."""


@dataclasses.dataclass(frozen=True)
class HeadPlan:
    """A prediction. Bytes are those of one device; ``flops`` counts matmuls only, two per multiply-add."""

    backend: str
    way: str
    chunk: int
    matmuls: int
    flops: int
    arguments: int
    outputs: int
    temporaries: int
    dense_temporaries: int

    @property
    def peak(self) -> int:
        """Arguments, outputs and temporaries together."""
        return self.arguments + self.outputs + self.temporaries

    @property
    def dense_peak(self) -> int:
        """The same for the dense loss (strong form) with these logits."""
        return self.arguments + self.outputs + self.dense_temporaries

    def __str__(self) -> str:
        return (
            f"{self.backend}, chunks of {self.chunk} tokens, {self.matmuls} matmuls ({self.way})\n"
            f"  {self.flops / 1e12:.2f} TFLOP\n"
            f"  peak {self.peak / MIB:,.0f} MiB = arguments {self.arguments / MIB:,.0f} + outputs "
            f"{self.outputs / MIB:,.0f} + temporaries {self.temporaries / MIB:,.0f}\n"
            f"  dense: peak {self.dense_peak / MIB:,.0f} MiB, temporaries {self.dense_temporaries / MIB:,.0f}"
        )


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
) -> HeadPlan:
    """Predict the memory and the work of :func:`logitless.linear_grpo_loss` (``objective=None``: of
    :func:`logitless.linear_logprobs`) before anything runs.

    ``hidden`` and ``lm_head`` are arrays or ``jax.ShapeDtypeStruct``; ``gradients`` names those that will be asked
    for; ``live_tokens`` is the number of unmasked tokens (all, if not given). The temporaries agree with
    ``compiled.memory_analysis()`` within 5 % of the peak for float32 on CPU and for bfloat16 on Hopper GPUs.

    >>> import jax, jax.numpy as jnp, logitless
    >>> h = jax.ShapeDtypeStruct((8, 1024, 4096), jnp.bfloat16)
    >>> w = jax.ShapeDtypeStruct((151936, 4096), jnp.bfloat16)
    >>> p = logitless.plan(h, w, logits_dtype="bfloat16", head_grad_dtype="param", chunk_size=2048)
    >>> p.matmuls, round(p.flops / 1e12, 1)
    (3, 30.6)
    """
    for name in gradients:
        if name not in ("hidden", "lm_head"):
            raise ValueError(f"plan: gradients has {name!r}, expected 'hidden' and 'lm_head'.")
    route = api.route(
        "plan", hidden, lm_head, objective, backend, chunk_size, memory_budget, logits_dtype, False, head_layout
    )
    width = hidden.shape[-1]
    tokens = 1
    for d in hidden.shape[:-1]:
        tokens *= d
    vocab = lm_head.shape[0 if head_layout == "vh" or lm_head.shape[1] == width else 1]
    live = tokens if live_tokens is None else live_tokens
    item = jnp.dtype(hidden.dtype).itemsize
    logit = jnp.dtype(logits_dtype).itemsize
    wants_hidden, wants_head = "hidden" in gradients, "lm_head" in gradients
    in_forward = objective is not None and objective.coupling() is None
    backward = wants_hidden + wants_head
    matmuls = 1 + backward + (0 if in_forward or not backward or route.backend == "reference" else 1)

    per_token = 4 * tokens  # targets; the loss's own [B, T] arrays are as small
    arguments = tokens * width * item + vocab * width * item + 3 * per_token
    outputs = wants_hidden * tokens * width * item + wants_head * vocab * width * item
    dense = tokens * vocab * (logit + (item if backward else 0))
    chunk = route.tiles.get("chunk", tokens)
    temporaries = dense
    if route.backend != "reference":
        temporaries = _temporaries(
            chunk, width, vocab, item, logit, wants_hidden, wants_head, head_grad_dtype == "param" or item == 4
        )
    return HeadPlan(
        backend=route.backend,
        way=route.way,
        chunk=chunk,
        matmuls=matmuls,
        flops=2 * live * width * vocab * matmuls,
        arguments=arguments,
        outputs=outputs,
        temporaries=temporaries,
        dense_temporaries=dense,
    )


def _temporaries(
    chunk: int, width: int, vocab: int, item: int, logit: int, hidden: bool, head: bool, sums_in_output: bool
) -> int:
    """Buffers of one chunk, and the accumulator of dW where it is not the output itself."""
    logits = chunk * vocab * logit
    dlogits = chunk * vocab * item if (hidden or head) and item != logit else 0
    rows = chunk * width * item
    tile = column_tile()
    if tile is not None:  # CPU: passes over slices of columns, dW summed in slices
        tile = min(tile, vocab)
        return logits + dlogits + 2 * chunk * tile * 4 + rows + (tile * width * 4 if head else 0)
    small = rows * (1 + hidden + head) + (_GEMM_WORKSPACE if platform() == "gpu" else 0)
    work = logits + max(dlogits + rows * head, small) if dlogits else logits + small
    if not head or sums_in_output:
        return work
    # The float32 sum of dW; the output's own buffer is free until the end and takes the largest buffer that fits.
    output = vocab * width * item
    reused = max((b for b in (logits, dlogits) if b <= output), default=0)
    return vocab * width * 4 + work - reused
