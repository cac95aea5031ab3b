"""The backward pass of a micro-batch, a layer at a time, into sums that are there already.

Differentiating the scan over the layers gives the gradients of all of them as new arrays, which are then added to the
sums of the micro-batches before: the gradients exist twice (twice 6.6 GiB for 1.8 billion parameters in float32). Here
the layers are gone through backwards by hand, each recomputed from its input (``model.remat``), and what comes out of
one is added to its place in the sums before the next begins:

    forward     x[0] = embed;  x[i + 1] = layer(x[i], w[i])                x is kept: L + 1 arrays [B, T, H]
    top         loss, dx, dnorm, dhead of  loss(norm(x[L]) head)
    backward    dx, dw[i] = vjp(layer at x[i], w[i])(dx);  sum[i] += dw[i]      for i = L - 1 .. 0
    embedding   sum[tokens] += dx

The operations are those of differentiation, one layer at a time; only sums of the embedding are in another order. In
float32 the gradients are the same within 1e-5 of the largest (tested), not promised to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from logitless.objectives.loss import Metrics
from logitless.train.lora import LoRA
from logitless.train.model import ModelConfig, Params, Parts, lm_head, stacked_layers


def add_gradients(
    total: tuple[Params | None, Any],
    params: Params,
    lora: LoRA | None,
    model: ModelConfig,
    parts: Parts,
    loss_of: Callable[[Array, Array], tuple[Array, Metrics]],
) -> tuple[Array, Metrics, tuple[Params | None, Any]]:
    """``(loss, metrics, total + gradients)`` of ``loss_of(hidden, head)``.

    ``total`` is ``(sums, None)`` of ``params``, or ``(None, sums)`` of ``lora``: what is trained.
    """
    sums, adapter_sums = total
    stacked = stacked_layers(params, lora)
    x, inputs = jax.lax.scan(lambda x, w: (parts.layer(x, w), x), parts.embedded(params["embed"]), stacked)

    def top(x: Array, norm: Array, head: Array) -> tuple[Array, Metrics]:
        return loss_of(parts.finished(x, norm), head)

    norm, head = params["norm"], lm_head(params, model)
    if sums is None:
        loss, back, metrics = jax.vjp(lambda x: top(x, norm, head), x, has_aux=True)
        (dx,) = back(jnp.ones_like(loss))
    else:
        loss, back, metrics = jax.vjp(top, x, norm, head, has_aux=True)
        dx, dnorm, dhead = back(jnp.ones_like(loss))
        name = "embed" if model.tie_word_embeddings else "lm_head"
        sums = {**sums, "norm": sums["norm"] + dnorm, name: sums[name] + dhead}
    trained = "base" if sums is not None else "lora"

    def layer(n: Array, carry: tuple[Array, Any]) -> tuple[Array, Any]:
        dx, layer_sums = carry
        i = model.num_layers - 1 - n
        weights = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, i, keepdims=False), stacked)
        x = jax.lax.dynamic_index_in_dim(inputs, i, keepdims=False)
        _, back = jax.vjp(lambda x, w: parts.layer(x, {**weights, trained: w}), x, weights[trained])
        dx, dw = back(dx)
        return dx, jax.tree.map(lambda s, d: s.at[i].add(d), layer_sums, dw)

    layer_sums = sums["layers"] if sums is not None else adapter_sums.layers
    dx, layer_sums = jax.lax.fori_loop(0, model.num_layers, layer, (dx, layer_sums))
    if sums is None:
        return loss, metrics, (None, type(adapter_sums)(layer_sums, adapter_sums.scale))
    embed = sums["embed"].at[parts.tokens].add(dx.astype(sums["embed"].dtype), mode="drop", wrap_negative_indices=False)
    return loss, metrics, ({**sums, "layers": layer_sums, "embed": embed}, None)
