"""Dense distillation in plain JAX, to be compared with: the whole logits of student and teacher, and their divergence.

    naive    two log_softmax and a sum, differentiated by JAX
    strong   a custom_vjp that keeps both logits, rounds dlogits to the operands' dtype: four matmuls

``p`` is the student's softmax, ``q`` the teacher's, ``m = (1 - mix) p + mix q``. Both forms return the divergence of
each token ``[N]``; the teacher is a constant.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from logitless.lab.tools.baselines import _matmul

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


def naive(kind: str, mix: float, h: Array, w: Array, th: Array, tw: Array, dtype: Any) -> Array:
    """By all logits and JAX's own differentiation."""
    return values(kind, mix, _matmul(h, w, dtype), jax.lax.stop_gradient(_matmul(th, tw, dtype)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 6))
def strong(kind: str, mix: float, h: Array, w: Array, th: Array, tw: Array, dtype: Any) -> Array:
    """By all logits, with the closed gradient."""
    return values(kind, mix, _matmul(h, w, dtype), _matmul(th, tw, dtype))


def _forward(kind: str, mix: float, h: Array, w: Array, th: Array, tw: Array, dtype: Any) -> tuple[Array, Any]:
    x, t = _matmul(h, w, dtype), _matmul(th, tw, dtype)
    return values(kind, mix, x, t), (h, w, th, tw, x, t)


def _backward(kind: str, mix: float, dtype: Any, saved: Any, g: Array) -> tuple[Array, Array, None, None]:
    h, w, _, _, x, t = saved
    log_p, log_q = _log_softmax(x), _log_softmax(t)
    p = jnp.exp(log_p)
    if kind == "forward_kl":
        dz = p - jnp.exp(log_q)
    else:
        d = log_p - (log_q if kind == "reverse_kl" else _log_mixture(log_p, log_q, mix))
        dz = p * (d - jnp.sum(p * d, -1, keepdims=True))
        dz = dz if kind == "reverse_kl" else (1 - mix) * dz
    dx = (g[:, None] * dz).astype(h.dtype)
    dh = jax.lax.dot_general(dx, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    dw = jax.lax.dot_general(dx, h, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return dh.astype(h.dtype), dw.astype(w.dtype), None, None


strong.defvjp(_forward, _backward)

FORMS: dict[str, Callable[..., Array]] = {"naive": naive, "strong": strong}


def loss(
    form: str, h: Array, w: Array, th: Array, tw: Array, mask: Array, *, distillation: Distillation, logits_dtype: Any
) -> Array:
    """The loss from ``h [B, T, H]``, ``w [V, H]``, ``th [B, T, H2]`` and ``tw [V, H2]`` by one of :data:`FORMS`.

    It is the mean over live tokens, at temperature one and without a hard part."""
    mix = 0.5 if distillation.mix is None else float(distillation.mix)
    flat = h.reshape(-1, h.shape[-1]), w, th.reshape(-1, th.shape[-1]), tw
    found = FORMS[form](distillation.divergence, mix, *flat, jnp.dtype(logits_dtype)).reshape(mask.shape)
    return jnp.sum(jnp.where(mask, found, 0.0)) / jnp.maximum(jnp.sum(mask), 1)
