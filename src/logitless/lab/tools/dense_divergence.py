"""Dense distillation in plain JAX, to be compared with: the whole logits of student and teacher, and their divergence.

    naive    two log_softmax and a sum, differentiated by JAX
    strong   keeps both logits, rounds dlogits to the operands' dtype: four matmuls

``p`` is the student's softmax, ``q`` the teacher's, ``m = (1 - mix) p + mix q``; the teacher is a constant.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from logitless.lab.tools.baselines import keeping_logits, matmul

if TYPE_CHECKING:
    from logitless.objectives.distillation import Distillation


def _log_softmax(logits: Array) -> Array:
    z = logits.astype(jnp.float32)
    return z - jax.nn.logsumexp(z, axis=-1, keepdims=True)


def _log_mixture(log_p: Array, log_q: Array, mix: float) -> Array:
    return jnp.logaddexp(log_p + jnp.log1p(-mix), log_q + jnp.log(mix))


def values(kind: str, mix: float, x: Array, t: Array) -> Array:
    """The divergence of each row of the logits ``x [N, V]`` and ``t [N, V]``."""
    log_p, log_q = _log_softmax(x), _log_softmax(t)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    if kind == "forward_kl":
        return jnp.sum(q * (log_q - log_p), -1)
    if kind == "reverse_kl":
        return jnp.sum(p * (log_p - log_q), -1)
    log_m = _log_mixture(log_p, log_q, mix)
    return mix * jnp.sum(q * (log_q - log_m), -1) + (1 - mix) * jnp.sum(p * (log_p - log_m), -1)


def dlogits(kind: str, mix: float, x: Array, g: Array, t: Array) -> Array:
    """The gradient of the divergences of a student's logits, in closed form, times ``g [N]``."""
    log_p, log_q = _log_softmax(x), _log_softmax(t)
    p = jnp.exp(log_p)
    if kind == "forward_kl":
        return g[:, None] * (p - jnp.exp(log_q))
    d = log_p - (log_q if kind == "reverse_kl" else _log_mixture(log_p, log_q, mix))
    dz = p * (d - jnp.sum(p * d, -1, keepdims=True))
    return g[:, None] * (dz if kind == "reverse_kl" else (1 - mix) * dz)


def loss(
    form: str, h: Array, w: Array, th: Array, tw: Array, mask: Array, *, distillation: Distillation, logits_dtype: Any
) -> Array:
    """The loss from ``h [B, T, H]``, ``w [V, H]``, ``th [B, T, H2]`` and ``tw [V, H2]`` by one of the two forms.

    It is the mean over live tokens, at temperature one and without a hard part."""
    kind, mix = distillation.divergence, 0.5 if distillation.mix is None else float(distillation.mix)
    dtype, h = jnp.dtype(logits_dtype), h.reshape(-1, h.shape[-1])
    t = jax.lax.stop_gradient(matmul(th.reshape(-1, th.shape[-1]), tw, dtype))
    value = functools.partial(values, kind, mix)
    if form == "naive":
        found = value(matmul(h, w, dtype), t)
    else:
        found = keeping_logits(value, functools.partial(dlogits, kind, mix))(h, w, dtype, (t,))
    return jnp.sum(jnp.where(mask, found.reshape(mask.shape), 0.0)) / jnp.maximum(jnp.sum(mask), 1)
