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
    return raw_logits(h, head, logits_dtype)


def _forward(h: Array, head: Head, logits_dtype: jnp.dtype) -> tuple[Array, tuple[Array, Head]]:
    return raw_logits(h, head, logits_dtype), (h, head)


def _backward(logits_dtype: jnp.dtype, saved: tuple[Array, Head], dx: Array) -> tuple[Array, Head]:
    h, head = saved
    dx = dx.astype(h.dtype)
    grads = in_parameter_dtypes(add_dhead(zero_grads(head, True, True, True), dx, h, head), head)
    d_head = Head(
        weight=grads.weight,  # type: ignore[arg-type]
        bias=grads.bias,
        lora_a=grads.lora_a,
        lora_b=grads.lora_b,
        lora_scale=jnp.zeros_like(jnp.asarray(head.lora_scale)),
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
