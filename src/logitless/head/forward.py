"""Forward statistics: by the Hopper matmul with a logsumexp epilogue where it can serve, else a chunk at a time.

    fused      one matmul per live token, no logits in memory, a few MiB of partial sums
    chunked    one matmul per live token, ``[chunk, V]`` logits

The fused matmul adds up in another order than the platform's, which recomputes the logits for the gradient. For float32
logits that is worth about 1e-6 of a log-probability. Rounded to bfloat16, a sum next to the middle of two numbers goes
either way, and statistics and gradients would come from different logits: there the chunked sweep serves both.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from logitless.head import chunked
from logitless.head.chunked import SweepConfig
from logitless.head.operator import Head
from logitless.head.sweep import front
from logitless.stats import TokenStats
from logitless.transform import LogitTransform


def not_fused_because(c: SweepConfig, h: Any, head: Any) -> str | None:
    """Why the fused matmul does not serve a call (arrays or shapes), or ``None`` where it does."""
    if c.rows.kernel != "mosaic_gpu":
        return "it is a kernel of the mosaic_gpu backend"
    if jnp.dtype(c.logits_dtype) != jnp.float32:
        return "rounded logits must be the same in both passes"
    if head.lora_a is not None:
        return "it has no LoRA"
    from logitless.head import mosaic_gpu

    try:
        mosaic_gpu.check(
            h.shape[0], h.shape[1], head.vocab, h.dtype, head.weight.dtype, head.layout, interpret=c.rows.interpret
        )
    except NotImplementedError as error:
        return str(error)
    return None


def token_stats(
    c: SweepConfig, h: Array, head: Head, targets: Array, transform: LogitTransform, live: Array | None
) -> TokenStats:
    """Statistics of flattened tokens ``h [N, H]``; zeros where ``live`` is false."""
    if not_fused_because(c, h, head) is not None:
        return chunked.token_stats(c, h, head, targets, transform, live)
    from logitless.head import mosaic_gpu

    f = front(live)
    out = mosaic_gpu.token_stats(
        f.take(h), head.weight, f.take(targets), layout=head.layout, transform=f.transform(transform),
        vocab_size=c.vocab_size, bias=head.bias, n_live=f.count, interpret=c.rows.interpret,
    )  # fmt: skip
    return jax.tree.map(f.put_back, out)
