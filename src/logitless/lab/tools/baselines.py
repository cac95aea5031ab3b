"""What a JAX user writes today, to be compared with: the naive form, and the strongest dense form we know.

All of them compute the loss through the same objective code, from a log-probability of their own and nothing else (no
entropy, no metrics), so they do less than the library's calls do.

    naive    log_softmax, then take_along_axis: keeps a float32 [N, V] log_softmax, and its gradient is a scatter
    strong   logits level: logsumexp minus the target by a one-hot compare, which XLA fuses into reductions
             head level: a custom_vjp that keeps the logits and rounds dlogits to the operands' dtype
    checkpointed   head level: token chunks under jax.checkpoint, as EasyDeL's and others' chunked log-probs are
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

if TYPE_CHECKING:
    from logitless.objectives.objective import Objective


def _loss(logp: Array, objective: Objective, arrays: dict[str, Any]) -> Array:
    # Here and not above: a benchmark of another tree's library takes the names of the baselines only.
    from logitless.objectives.inputs import loss_inputs
    from logitless.objectives.loss import contributions

    objective, inputs = loss_inputs("baseline", objective, logp.shape, arrays)
    return jnp.sum(contributions(objective, logp, jnp.zeros_like(logp), inputs))


def naive_logp(logits: Array, targets: Array) -> Array:
    """``log_softmax`` and a gather."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]


def strong_logp(logits: Array, targets: Array) -> Array:
    """``logsumexp`` and a one-hot reduction."""
    z = logits.astype(jnp.float32)
    hit = lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1) == targets[..., None]
    return jnp.sum(jnp.where(hit, z, 0.0), axis=-1) - jax.nn.logsumexp(z, axis=-1)


def gather_logp(logits: Array, targets: Array) -> Array:
    """``logsumexp`` and a gather of the target's logit."""
    z = logits.astype(jnp.float32)
    target = jnp.take_along_axis(z, targets[..., None], axis=-1)[..., 0]
    return target - jax.nn.logsumexp(z, axis=-1)


LOGITS_BASELINES = {"naive": naive_logp, "strong": strong_logp, "gather": gather_logp}


def logits_loss(kind: str, logits: Array, targets: Array, *, objective: Objective, **arrays: Any) -> Array:
    """The loss over logits ``[B, T, V]`` by one of :data:`LOGITS_BASELINES`."""
    return _loss(LOGITS_BASELINES[kind](logits, targets), objective, arrays)


def matmul(h: Array, w: Array, dtype: Any) -> Array:
    """Logits ``[..., V]`` of ``h [..., H]`` and ``w [V, H]``."""
    return lax.dot_general(h, w, (((h.ndim - 1,), (1,)), ((), ())), preferred_element_type=dtype)


def naive_head_logp(h: Array, w: Array, targets: Array, dtype: Any) -> Array:
    """Log-probabilities ``[...]`` from ``h [..., H]`` and ``w [V, H]`` by way of all logits, as most trainers do it."""
    return naive_logp(matmul(h, w, dtype), targets)


def keeping_logits(value: Callable[..., Array], dlogits: Callable[..., Array]) -> Callable[..., Array]:
    """``f(h [N, H], w [V, H], dtype, rest) -> [N]``: ``value(logits, *rest)``, with logits kept for the backward pass,
    where ``dlogits(logits, g, *rest)`` are rounded to the operands' dtype. ``rest`` has no gradient."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
    def f(h: Array, w: Array, dtype: Any, rest: tuple[Array, ...]) -> Array:
        return value(matmul(h, w, dtype), *rest)

    def forward(h: Array, w: Array, dtype: Any, rest: tuple[Array, ...]) -> tuple[Array, Any]:
        z = matmul(h, w, dtype)
        return value(z, *rest), (h, w, z, rest)

    def backward(dtype: Any, saved: Any, g: Array) -> tuple[Array, Array, None]:
        h, w, z, rest = saved
        d = dlogits(z, g, *rest).astype(h.dtype)
        dh = lax.dot_general(d, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32).astype(h.dtype)
        dw = lax.dot_general(d, h, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32).astype(w.dtype)
        return dh, dw, None

    f.defvjp(forward, backward)
    return f


def _dlogits(logits: Array, g: Array, targets: Array) -> Array:
    """``g (onehot - softmax)``, of :func:`strong_logp`."""
    z = logits.astype(jnp.float32)
    lse = jax.nn.logsumexp(z, axis=-1)
    hit = lax.broadcasted_iota(jnp.int32, z.shape, 1) == targets[:, None]
    return g[:, None] * (jnp.where(hit, 1.0, 0.0) - jnp.exp(z - lse[:, None]))


_STRONG = keeping_logits(strong_logp, _dlogits)


def strong_head_logp(h: Array, w: Array, targets: Array, dtype: Any) -> Array:
    """Log-probabilities ``[N]`` from ``h [N, H]`` and ``w [V, H]``, logits kept for the backward pass."""
    return _STRONG(h, w, dtype, (targets,))


def checkpointed_head_logp(h: Array, w: Array, targets: Array, dtype: Any, chunk: int = 1024) -> Array:
    """What the JAX trainers that chunk do: ``lax.map`` over token chunks, each rematerialised in the backward pass."""

    @jax.checkpoint
    def part(x: tuple[Array, Array]) -> Array:
        return naive_head_logp(x[0], w, x[1], dtype)

    n = h.shape[0]
    chunk = min(chunk, n)
    parts = lax.map(part, (h.reshape(n // chunk, chunk, -1), targets.reshape(n // chunk, chunk)))
    return parts.reshape(n)


_HEAD: dict[str, Callable[..., Array]] = {
    "naive": naive_head_logp,
    "strong": strong_head_logp,
    "checkpointed": checkpointed_head_logp,
}
HEAD_BASELINES = tuple(_HEAD)


def head_loss(
    kind: str, h: Array, w: Array, targets: Array, *, objective: Objective, logits_dtype: Any, **arrays: Any
) -> Array:
    """The loss from ``h [B, T, H]`` and ``w [V, H]``, dense, by one of :data:`HEAD_BASELINES`."""
    logp = _HEAD[kind](h.reshape(-1, h.shape[-1]), w, targets.reshape(-1), jnp.dtype(logits_dtype))
    return _loss(logp.reshape(targets.shape), objective, arrays)
