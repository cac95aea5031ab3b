"""Independence of JAX's promotion settings, which users set for a whole program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
T = TypeVar("T")


def own_promotion(f: Callable[P, T]) -> Callable[P, T]:
    """``f``, traced under JAX's default promotion of dtypes and ranks.

    ``jax_numpy_dtype_promotion="strict"`` and ``jax_numpy_rank_promotion="raise"`` are set for a whole program, to find
    slips in its own code. Decorates the public calls, and the rules of custom gradients: JAX traces those rules later,
    outside the call.
    """

    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return f(*args, **kwargs)

    return run
