"""From the head's raw product to the logits the softmax sees.

Order, everywhere: bias, scale, softcap, temperature. With ``x`` the raw logit (bias included),

    capped = softcap * tanh(scale * x / softcap)      (or scale * x without a softcap)
    z      = capped / temperature

in float32, whatever the dtype of ``x``; the temperature divides after the upcast. A softmax needs only differences of
``z``, so every pass over logits takes differences *before* the last product:

    z = k u        u = x,  k = scale / temperature,  or with a softcap
                   u = tanh(scale * x / softcap),  k = softcap / temperature
    z_v - z_w = k (u_v - u_w)

A compiler may contract ``k u_v - m`` into one multiply-add in one pass and not in the next, and then the two disagree
by the rounding of the product, which at ``|z| = 300`` is 1e-5 of every probability. Across the difference of two ``u``
there is nothing to contract: every pass sees the same ``z``. ``k`` is positive, so ``u`` has the order of ``z``.

The slope ``dz/dx = scale * (1 - (capped / softcap)^2) / temperature`` carries a cotangent of ``z`` back to ``x``.

Kernels use :func:`swept`, :func:`factor` and :func:`slope` too, so the maths stands here alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core.pytree import register


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
        """Whether the temperature is per token."""
        return self.temperature is not None and jnp.ndim(self.temperature) > 0

    def rows(self, take: Callable[[Array], Array]) -> LogitTransform:
        """The transform of other tokens: ``take`` on a per-token temperature."""
        return dataclasses.replace(self, temperature=take(jnp.asarray(self.temperature))) if self.per_token else self

    def column(self) -> LogitTransform:
        """The transform with a per-token temperature ``[N]`` turned into ``[N, 1]``, for ``[N, V]`` rows."""
        return self.rows(lambda t: t[:, None])


def swept(x: Array, transform: LogitTransform) -> Array:
    """``u`` in float32 from the raw logits ``x``: what a pass over the vocabulary compares and takes differences of."""
    u = x.astype(jnp.float32)
    if transform.softcap is None:
        return u
    # One factor: two products in a row may be reordered in one program and not in another.
    scale = jnp.asarray(1.0 if transform.scale is None else transform.scale, jnp.float32)
    return jnp.tanh(u * (scale / jnp.asarray(transform.softcap, jnp.float32)))


def factor(transform: LogitTransform) -> Array | None:
    """``k`` in ``z = k u``, a scalar or of the temperature's shape; ``None`` for a factor of one."""
    k = transform.scale if transform.softcap is None else transform.softcap
    if transform.temperature is None:
        return None if k is None else jnp.asarray(k, jnp.float32)
    return jnp.asarray(1.0 if k is None else k, jnp.float32) / jnp.asarray(transform.temperature, jnp.float32)


def times(k: Array | None, difference: Array) -> Array:
    """``k`` times a swept quantity or difference; ``k`` comes from :func:`factor`."""
    return difference if k is None else difference * k


def divided(u: Array, transform: LogitTransform) -> Array:
    """``k u`` of a few numbers per row (swept quantities or their differences), divided by the temperature.

    The product with a rounded ``k`` is off by up to half an ulp more. A compiler would make that product of a division
    by a number that it knows, so the divisor is a select; the select around the result keeps it from being contracted
    with what is added: the same bits in every program, whether the temperature is known or traced.
    """
    numerator = transform.scale if transform.softcap is None else transform.softcap
    if numerator is None and transform.temperature is None:
        return u
    gone = u == -jnp.inf
    z = jnp.where(gone, 0.0, u)
    if numerator is not None:
        z = z * jnp.asarray(numerator, jnp.float32)
    if transform.temperature is not None:
        z = z / jnp.where(gone, 1.0, jnp.asarray(transform.temperature, jnp.float32))
    return jnp.where(gone, -jnp.inf, z)


def forward(x: Array, transform: LogitTransform) -> Array:
    """``z`` in float32 from the raw logits ``x``; broadcasts against ``transform.temperature``."""
    return times(factor(transform), swept(x, transform))


def slope(x: Array, transform: LogitTransform) -> Array | None:
    """``dz/dx`` at the raw logits ``x``, or ``None`` for a constant slope of one."""
    k = factor(dataclasses.replace(transform, softcap=None))
    return k if transform.softcap is None else times(k, 1.0 - jnp.square(swept(x, transform)))


def pull_back(dz: Array, x: Array, transform: LogitTransform) -> Array:
    """The cotangent of ``x`` from that of ``z``; exactly zero where ``dz`` is, even where ``x`` or the temperature of a
    dead token is not finite."""
    d = slope(x, transform)
    if d is None:
        return dz
    if transform.softcap is None:  # a select by dz would lose the second derivative where dz is zero
        return dz * jnp.where(jnp.abs(d) < jnp.inf, d, 0.0)
    return jnp.where(dz == 0, 0.0, dz * d)


def transform_of(temperature: object, softcap: object, scale: object) -> LogitTransform:
    """A :class:`LogitTransform` from user arguments; a Python ``1.0`` temperature or scale drops out."""

    def neutral(value: object) -> bool:
        return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and value == 1)

    return LogitTransform(
        temperature=None if neutral(temperature) else jax.numpy.asarray(temperature, jnp.float32),
        softcap=None if softcap is None else jax.numpy.asarray(softcap, jnp.float32),
        scale=None if neutral(scale) else jax.numpy.asarray(scale, jnp.float32),
    )
