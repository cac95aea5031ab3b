"""From the head's raw product to the logits the softmax sees.

Order, everywhere: bias, scale, softcap, temperature. With ``x`` the raw logit (bias included),

    capped = softcap * tanh(scale * x / softcap)      (or scale * x without a softcap)
    z      = capped / temperature

in float32, whatever the dtype of ``x``; the temperature divides after the upcast. The slope
``dz/dx = scale * (1 - (capped / softcap)^2) / temperature`` carries a cotangent of ``z`` back to ``x``.

Kernels use :func:`forward` and :func:`slope` too, so the maths stands here alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from logitless.pytree import register


@register
@dataclasses.dataclass(frozen=True)
class LogitTransform:
    """Scale, softcap and temperature; every number is a traced leaf, ``None`` means "not there".

    ``temperature`` is a scalar or has one value per token (the shape of the targets).
    """

    temperature: Array | float | None = None
    softcap: Array | float | None = None
    scale: Array | float | None = None

    @property
    def per_token(self) -> bool:
        """Whether every token has a temperature of its own."""
        return self.temperature is not None and jnp.ndim(self.temperature) > 0

    def rows(self, take: Callable[[Array], Array]) -> LogitTransform:
        """The transform of other tokens: ``take`` on a per-token temperature."""
        return dataclasses.replace(self, temperature=take(jnp.asarray(self.temperature))) if self.per_token else self

    def column(self) -> LogitTransform:
        """The transform with a per-token temperature ``[N]`` turned into ``[N, 1]``, for ``[N, V]`` rows."""
        return self.rows(lambda t: t[:, None])


def forward(x: Array, transform: LogitTransform) -> Array:
    """``z`` in float32 from the raw logits ``x``; broadcasts against ``transform.temperature``."""
    z = x.astype(jnp.float32)
    if transform.scale is not None:
        z = z * jnp.asarray(transform.scale, jnp.float32)
    if transform.softcap is not None:
        cap = jnp.asarray(transform.softcap, jnp.float32)
        z = cap * jnp.tanh(z / cap)
    if transform.temperature is not None:
        z = z / jnp.asarray(transform.temperature, jnp.float32)
    return z


def slope(x: Array, transform: LogitTransform) -> Array | None:
    """``dz/dx`` at the raw logits ``x``, or ``None`` where it is one everywhere."""
    d: Array | None = None
    if transform.scale is not None:
        d = jnp.asarray(transform.scale, jnp.float32)
    if transform.softcap is not None:
        cap = jnp.asarray(transform.softcap, jnp.float32)
        scaled = x.astype(jnp.float32) * (1.0 if d is None else d)
        bend = 1.0 - jnp.square(jnp.tanh(scaled / cap))
        d = bend if d is None else d * bend
    if transform.temperature is not None:
        inverse = 1.0 / jnp.asarray(transform.temperature, jnp.float32)
        d = inverse if d is None else d * inverse
    return d


def pull_back(dz: Array, x: Array, transform: LogitTransform) -> Array:
    """The cotangent of ``x`` from that of ``z``; exactly zero where ``dz`` is, even at infinite ``x``."""
    d = slope(x, transform)
    return dz if d is None else jnp.where(dz == 0, 0.0, dz * d)


def transform_of(temperature: object, softcap: object, scale: object) -> LogitTransform:
    """A :class:`LogitTransform` from user arguments; a Python ``1.0`` temperature or scale drops out."""

    def neutral(value: object) -> bool:
        return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and value == 1)

    return LogitTransform(
        temperature=None if neutral(temperature) else jax.numpy.asarray(temperature, jnp.float32),
        softcap=None if softcap is None else jax.numpy.asarray(softcap, jnp.float32),
        scale=None if neutral(scale) else jax.numpy.asarray(scale, jnp.float32),
    )
