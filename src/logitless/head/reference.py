"""Dense plain JAX for the head: logits ``[N, V]`` by one matmul, statistics by JAX's own differentiation.

The baseline of every A/B. Three matmuls; ``[N, V]`` logits and dlogits live in memory. As in ordinary bf16 training
the cotangent of the logits is rounded to the operands' dtype before the two backward matmuls.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from logitless.head.operator import Head, add_dhead, dhidden, in_parameter_dtypes, raw_logits, zero_grads
from logitless.logits import reference as logits_reference
from logitless.stats import TokenStats
from logitless.transform import LogitTransform


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dense_logits(h: Array, head: Head, logits_dtype: jnp.dtype) -> Array:
    """All logits ``[N, V]``; its VJP rounds dlogits and accumulates in float32."""
    x = raw_logits(h, head, logits_dtype)
    # XLA would drop a rounding that is followed by an upcast, and with it the meaning of bfloat16 logits.
    return x if logits_dtype == jnp.float32 else jax.lax.optimization_barrier(x)


def _forward(h: Array, head: Head, logits_dtype: jnp.dtype) -> tuple[Array, tuple[Array, Head]]:
    return dense_logits(h, head, logits_dtype), (h, head)


def _dscale(dx: Array, h: Array, head: Head) -> Array:
    """Cotangent of ``lora_scale``: ``<dx, h B^T A^T> = <h B^T, dx A>``, two matmuls of rank r."""
    like = jnp.asarray(head.lora_scale)
    if head.lora_a is None or head.lora_b is None:
        return jnp.zeros_like(like)
    inner, outer = (head.lora_b.T, head.lora_a) if head.layout == "vh" else (head.lora_a, head.lora_b.T)
    low, back = (jnp.matmul(x, m, preferred_element_type=jnp.float32) for x, m in ((h, inner), (dx, outer)))
    return jnp.sum(low * back).astype(like.dtype)


def _backward(logits_dtype: jnp.dtype, saved: tuple[Array, Head], dx: Array) -> tuple[Array, Head]:
    h, head = saved
    dx = dx.astype(h.dtype)
    grads = in_parameter_dtypes(add_dhead(zero_grads(head, True, True, True), dx, h, head), head)
    d_head = Head(
        weight=grads.weight,  # type: ignore[arg-type]
        bias=grads.bias,
        lora_a=grads.lora_a,
        lora_b=grads.lora_b,
        lora_scale=_dscale(dx, h, head),
        layout=head.layout,
    )
    return dhidden(dx, head).astype(h.dtype), d_head


dense_logits.defvjp(_forward, _backward)


def token_stats(
    h: Array,
    head: Head,
    targets: Array,
    transform: LogitTransform,
    vocab_size: int,
    live: Array | None,
    logits_dtype: jnp.dtype,
) -> TokenStats:
    """Statistics of flattened tokens ``h [N, H]``."""
    if live is not None:
        h = jnp.where(live[:, None], h, jnp.zeros((), h.dtype))
    return logits_reference.token_stats(dense_logits(h, head, logits_dtype), targets, transform, vocab_size, live)
