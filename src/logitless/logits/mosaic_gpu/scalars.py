"""The per-row scalar maths of ``stats`` and of an objective, run inside a Mosaic GPU kernel.

A row's statistics and cotangents are a few hundred scalar operations between two sweeps over the row. They are the
functions of ``core/stats.py`` and ``objectives/``, not copies: :func:`run` traces them to a jaxpr and replays it in the
kernel. Two things differ from a plain call. Mosaic GPU has no rule for ``log1p``, ``expm1`` and a few other
primitives; and the kernel is compiled with approximate ``exp2``/``log2`` (the sweeps need one instruction each), which
is not good enough for a log-probability. So the transcendental primitives are replaced by float32 formulas over
``+ - * /``, ``exp2`` and ``log2``, good to about one unit in the last place, whatever the compiler does with these two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from logitless.core.shapes import PyTree

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
# ln 2 in two parts; the first has 9 bits, so that n * _LN2_HIGH is exact for every exponent n.
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4
# exp(r) = 1 + r + r^2 P(r) on |r| <= ln(2)/2, relative error 2^-27 (the classical single-precision coefficients).
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def _exp_reduced(r: Array) -> Array:
    """``exp(r) - 1`` for ``|r| <= ln(2)/2``."""
    p = _EXP[0] * r + _EXP[1]  # no `full_like`, which a kernel does not lower under `jax.set_mesh`
    for c in _EXP[2:]:
        p = p * r + c
    return p * r * r + r


def _power_of_two(n: Array) -> Array:
    """``2^n`` exactly, for an int32 ``|n| <= 126`` (``exp2`` is not exact on every platform)."""
    magnitude = jnp.where(n < 0, -n, n)
    up = down = jnp.float32(1.0)
    for bit in range(7):
        is_set = lax.bitwise_and(magnitude, jnp.int32(1 << bit)) != 0
        up = up * jnp.where(is_set, jnp.float32(2.0 ** min(2**bit, 127)), jnp.float32(1.0))
        down = down * jnp.where(is_set, jnp.float32(2.0 ** -(2**bit)), jnp.float32(1.0))
    return jnp.where(n < 0, down, up)


def _nearest(x: Array) -> Array:
    """The nearest int32 (the conversion itself truncates)."""
    return (x + jnp.where(x < 0.0, -0.5, 0.5)).astype(jnp.int32)


def exp(x: Array) -> Array:
    """``exp(x)``; 0 below -104, infinite above 89, NaN stays NaN."""
    bounded = jnp.where(x > -104.0, jnp.where(x < 89.0, x, 89.0), -104.0)
    n = _nearest(bounded * LOG2E)
    nf = n.astype(jnp.float32)
    r = (bounded - nf * _LN2_HIGH) - nf * _LN2_LOW
    half = lax.shift_right_arithmetic(n, jnp.int32(1))  # two factors: 2^128 is no float
    y = (1.0 + _exp_reduced(r)) * _power_of_two(half) * _power_of_two(n - half)
    y = jnp.where(x >= 89.0, jnp.inf, jnp.where(x <= -104.0, 0.0, y))
    return jnp.where(x == x, y, x)


def expm1(x: Array) -> Array:
    """``exp(x) - 1`` without the loss of digits near 0."""
    small = jnp.where(x > -0.3465, x < 0.3465, False)
    near = _exp_reduced(jnp.where(small, x, 0.0))
    return jnp.where(small, near, exp(x) - 1.0)


def _log1p_near(x: Array) -> Array:
    """``log(1 + x) = 2 atanh(x / (2 + x))``, for x in [-0.35, 1.05]; accurate relative to the result."""
    s = x / (2.0 + x)
    square = s * s
    p = 1.0 / 15.0 * square + 1.0 / 13.0
    for k in (11.0, 9.0, 7.0, 5.0, 3.0):
        p = p * square + 1.0 / k
    return 2.0 * (s + s * square * p)


def log(x: Array) -> Array:
    """``log(x) = n ln 2 + log(x / 2^n)``; the hardware's ``log2`` only has to find the integer ``n``."""
    ordinary = jnp.where(x > 1e-37, x < 1e38, False)
    v = jnp.where(ordinary, x, 1.0)
    n = _nearest(jnp.log2(v))
    nf = n.astype(jnp.float32)
    y = nf * _LN2_HIGH + (nf * _LN2_LOW + _log1p_near(v * _power_of_two(-n) - 1.0))
    edge = jnp.where(x > 0.0, jnp.where(x < jnp.inf, jnp.log2(x) * LN2, jnp.inf), -jnp.inf)
    edge = jnp.where(x < 0.0, jnp.nan, edge)
    return jnp.where(ordinary, y, jnp.where(x == x, edge, x))


def log1p(x: Array) -> Array:
    """``log(1 + x)`` without the loss of digits near 0."""
    near = jnp.where(x > -0.33, x < 1.01, False)
    return jnp.where(near, _log1p_near(jnp.where(near, x, 0.0)), log(1.0 + x))


def _tanh(x: Array) -> Array:
    e = expm1(-2.0 * jnp.abs(x))
    y = -e / (2.0 + e)
    return jnp.where(x < 0, -y, y)


_REPLACED: dict[str, Callable[..., Array]] = {
    "exp": lambda x, **_: exp(x),
    "expm1": lambda x, **_: expm1(x),
    "log": lambda x, **_: log(x),
    "log1p": lambda x, **_: log1p(x),
    "logistic": lambda x, **_: 1.0 / (1.0 + exp(-x)),
    "tanh": lambda x, **_: _tanh(x),
    "is_finite": lambda x: jnp.abs(x) < jnp.inf,
    "add_any": lambda x, y: x + y,
    "copy": lambda x, **_: x,
    "copy_p": lambda x, **_: x,
    "stop_gradient": lambda x, **_: x,
    "not": lambda x: lax.bitwise_xor(x, True) if x.dtype == jnp.bool_ else lax.bitwise_not(x),
}


_SHAPES = ("broadcast_in_dim", "reshape", "squeeze", "reduce_sum")


def _call(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr | None:
    """The jaxpr that an equation only wraps (jit, custom derivatives, ...), or ``None``."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(key)
        if inner is not None and eqn.primitive.name not in ("scan", "while", "cond"):
            return inner
    return None


def _replay(jaxpr: Jaxpr, consts: Sequence[Array], args: Sequence[Array]) -> list[Array]:
    env: dict[Var, Array] = {}

    def read(v: Var | Literal) -> Array:
        return v.val if isinstance(v, Literal) else env[v]

    env.update(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        vals = [read(v) for v in eqn.invars]
        name = eqn.primitive.name
        inner = _call(eqn)
        if inner is not None:
            closed = isinstance(inner, ClosedJaxpr)
            outs = _replay(inner.jaxpr if closed else inner, inner.consts if closed else (), vals)
        elif name in _REPLACED:
            outs = [_REPLACED[name](*vals, **eqn.params)]
        elif (
            name in ("broadcast_in_dim", "reshape", "squeeze", "reduce_sum")
            and getattr(eqn.invars[0].aval, "shape", None) == ()
        ):
            outs = [vals[0]]  # scalars stay scalars
        else:
            out = eqn.primitive.bind(*vals, **eqn.params)
            outs = list(out) if eqn.primitive.multiple_results else [out]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def run(f: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """``f(*args)`` for float32/bool scalars ``args`` (a pytree), replayed with the primitives above."""
    flat, tree = jax.tree.flatten(args)
    flat = [jnp.asarray(a) for a in flat]
    shapes = [jax.ShapeDtypeStruct((), a.dtype) for a in flat]
    closed, out = jax.make_jaxpr(lambda *leaves: f(*jax.tree.unflatten(tree, leaves)), return_shape=True)(*shapes)
    return jax.tree.unflatten(jax.tree.structure(out), _replay(closed.jaxpr, closed.consts, flat))
