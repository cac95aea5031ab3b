"""Dense plain JAX for the head: logits ``[N, V]`` by one matmul, statistics by JAX's own differentiation.

The baseline of every A/B. Three matmuls; ``[N, V]`` logits and dlogits live in memory. As in ordinary bf16 training
the cotangent of the logits is rounded to the operands' dtype before the two backward matmuls; the bias' is summed
before that.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core.backend import Cost, Way
from logitless.core.problem import Given, HeadArrays, Linear, Loss, Problem, Wanted
from logitless.core.promotion import own_promotion
from logitless.core.row_passes import as_wide_as
from logitless.core.stats import TokenStats
from logitless.core.top_k import TopK, masked_top_k, top_of_rows
from logitless.head.linear import add_dhead, dhidden, dot, in_parameter_dtypes, raw_logits, zero_grads
from logitless.logits import reference as logits_reference


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dense_logits(h: Array, head: HeadArrays, logits_dtype: jnp.dtype) -> Array:
    """All logits ``[N, V]``; its VJP rounds dlogits and accumulates in float32."""
    return _logits(h, head, logits_dtype)


def _logits(h: Array, head: HeadArrays, logits_dtype: jnp.dtype) -> Array:
    """:func:`dense_logits`, differentiated by JAX: what the VJP itself calls, for derivatives of it in both modes."""
    x = raw_logits(h, head, logits_dtype)
    # XLA would drop a rounding that is followed by an upcast, and with it the meaning of bfloat16 logits.
    return x if logits_dtype == jnp.float32 else jax.lax.optimization_barrier(x)


@own_promotion
def _forward(h: Array, head: HeadArrays, logits_dtype: jnp.dtype) -> tuple[Array, tuple[Array, HeadArrays]]:
    return _logits(h, head, logits_dtype), (h, head)


def _dscale(dx: Array, h: Array, head: HeadArrays) -> Array:
    """Cotangent of ``lora_scale``: ``<dx, h B^T A^T> = <h B^T, dx A>``, two matmuls of rank r."""
    like = jnp.asarray(head.lora_scale)
    if head.lora_a is None or head.lora_b is None:
        return jnp.zeros_like(like)
    inner, outer = (head.lora_b.T, head.lora_a) if head.layout == "vh" else (head.lora_a, head.lora_b.T)
    low, back = (dot(x, m, (1, 0)) for x, m in ((h, inner), (dx, outer)))
    return jnp.sum(low * back).astype(like.dtype)


@own_promotion
def _backward(logits_dtype: jnp.dtype, saved: tuple[Array, HeadArrays], dx: Array) -> tuple[Array, HeadArrays]:
    h, head = saved
    everything = Wanted(True, True, True, True)
    grads = in_parameter_dtypes(add_dhead(zero_grads(head, everything), dx, h, head), head)
    d_head = grads.as_head(head.layout, _dscale(dx, h, head))
    return dhidden(dx.astype(h.dtype), head).astype(h.dtype), d_head


dense_logits.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class Reference(logits_reference.Reference):
    """The dense reference from hidden states, by the logits' reference."""

    def describe(self, p: Any, way: Way) -> Cost:
        v, item = p.head.vocab, jnp.dtype(p.call.logits_dtype).itemsize
        words = f"dense: [{p.n}, {v}] logits and dlogits in memory"
        moved = f"logits and dlogits {2 * p.n * v * item:,} B, each written and read"
        return Cost(words, "3 (1 without a gradient)", moved, counts=(3, 3, 1))

    def top_k(self, p: Problem) -> TopK:
        """The likeliest ids, from all logits at once."""
        x = raw_logits(p.h, p.head, p.call.logits_dtype)
        return masked_top_k(top_of_rows(x, p, p.call.top_k), p.live)

    def statistics(self, p: Problem, loss: Loss | None = None) -> tuple[TokenStats, None]:  # type: ignore[override]
        """Statistics of flattened tokens ``h [N, H]``."""
        h = p.h if p.live is None else jnp.where(p.live[:, None], p.h, jnp.zeros((), p.h.dtype))
        logits = dense_logits(h, p.head, p.call.logits_dtype)
        rows = p.with_logits(logits)
        if p.teacher is not None:
            assert isinstance(p.teacher.source, Linear)
            t = dense_logits(p.teacher.source.hidden, p.teacher.source.head, p.call.logits_dtype)
            rows = dataclasses.replace(
                rows, teacher=dataclasses.replace(p.teacher, source=Given(as_wide_as(t, p.head.vocab)))
            )
        return logits_reference.token_stats(rows), None
