"""min, clip and exp whose gradients are what the losses mean.

At a bound, and where two branches tie, the gradient passes in full: with ``eps = 0`` on-policy every ratio sits
exactly on both bounds, and ``jnp.minimum`` and ``jnp.clip`` would halve its gradient. And where an infinite ratio
meets a zero cotangent (the branch that was not taken) the product is zero, not NaN.

A NaN on either side is the result: a bound never stands in for a number that is not known.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from logitless.objectives.objective import Number


def minimum(a: Array, b: Array) -> Array:
    """``min(a, b)``; the whole gradient goes to ``a`` where they tie."""
    return jnp.where((a <= b) | jnp.isnan(a), a, b)  # where b is NaN, neither holds


def maximum(a: Array, b: Array) -> Array:
    """``max(a, b)``; the whole gradient goes to ``a`` where they tie."""
    return jnp.where((a >= b) | jnp.isnan(a), a, b)


def clip(x: Array, low: Number | None, high: Number | None) -> Array:
    """``x`` clipped to ``[low, high]`` (``None``: no bound), with the gradient of ``x`` inside and at the bounds."""
    if high is not None:
        x = minimum(x, jnp.asarray(high, x.dtype))
    if low is not None:
        x = maximum(x, jnp.asarray(low, x.dtype))
    return x


@jax.custom_jvp
def exp(x: Array) -> Array:
    """``exp(x)``; a zero tangent stays zero where the value is infinite."""
    return jnp.exp(x)


@exp.defjvp
def _exp_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    y = jnp.exp(primals[0])
    # Linear in the tangent (so that it transposes), with a factor that is never infinite.
    return y, tangents[0] * jnp.where(jnp.isinf(y), jnp.finfo(y.dtype).max, y)
