"""A loss call whose per-token statistics come out beside its metrics: :func:`with_stats`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec

from jax import Array

from logitless import api
from logitless.core.validation import check_arguments
from logitless.objectives.loss import LossAux, Metrics

P = ParamSpec("P")

_LOSSES: tuple[Callable[..., object], ...] = (api.grpo_loss, api.linear_grpo_loss)


def with_stats(call: Callable[P, tuple[Array, Metrics]]) -> Callable[P, tuple[Array, LossAux]]:
    """:func:`grpo_loss` or :func:`linear_grpo_loss`, to be called the same way, with its statistics: ``(loss, aux)``.

    ``aux`` is a pair ``(metrics, stats)``: the metrics of the loss, and the :class:`TokenStats` ``[B, T]`` that it was
    computed from, as :func:`linear_logprobs` gives them. They come out of the loss's own pass over the vocabulary: no
    matmul is added, and nothing of the size of the logits. As the metrics, they carry no gradient.

    >>> import jax, jax.numpy as jnp, logitless
    >>> h, w, y = jnp.ones((1, 2, 3)), jnp.zeros((4, 3)), jnp.array([[0, 3]])
    >>> def loss(h, w):
    ...     return logitless.with_stats(logitless.linear_grpo_loss)(h, w, y, advantages=jnp.array([1.0]))
    >>> (value, (metrics, stats)), dh = jax.value_and_grad(loss, has_aux=True)(h, w)
    >>> [round(float(x), 4) for x in stats.logp[0]]
    [-1.3863, -1.3863]
    """
    if call not in _LOSSES:
        raise TypeError(
            f"with_stats: {getattr(call, '__name__', call)!r} is not a loss call; expected logitless.grpo_loss or "
            "logitless.linear_grpo_loss itself, and the arguments in the call that follows."
        )
    signature = inspect.signature(call)

    @functools.wraps(call)
    def loss_and_stats(*args: P.args, **kwargs: P.kwargs) -> tuple[Array, LossAux]:
        check_arguments(call.__name__, signature, args, kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return api.run(call.__name__, dict(given.arguments), with_stats=True)

    return loss_and_stats
