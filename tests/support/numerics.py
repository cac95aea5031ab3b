"""What the numerics tests share: inputs, an ordinary plain-JAX path to compare with, and the contract itself.

The contract: against float64, a backend's error is at most 1.5 times that of the plain-JAX path on the same inputs,
in the max norm and in the Frobenius norm, plus ``FLOOR_ULP`` float32 ulp of the largest entry (of the norm). The floor
is float32 whatever the output's dtype, so it hides no rounding to bfloat16.

The plain-JAX path is what a trainer without this library writes: ``log_softmax`` and ``take_along_axis`` in float32;
for the head, a dense matmul with float32 accumulation whose dlogits are rounded to the operands' dtype before the two
backward matmuls.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import flat_calls
from interpreted import in_numpy
from logitless import oracle
from logitless.core.problem import Call, Given, HeadArrays, Linear, Problem
from logitless.core.stats import LogitTransform, TokenStats

FACTOR = 1.5
FLOOR_ULP = 4
EPS = float(jnp.finfo(jnp.float32).eps)
BACKENDS = ("reference", "chunked")
REAL_VOCABULARIES = pytest.mark.parametrize(
    "vocab, dtype",
    [
        (151643, "bf16"),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in ((50257, "f32"), (50257, "bf16"), (151643, "f32"))),
    ],
)
STATS = ("logp", "entropy", "lse")
EXTRAS = ("max_logit", "log_sum_p2", "max_logp")


def f64(x: Any) -> np.ndarray:
    """``x`` in float64, exactly."""
    return np.asarray(x).astype(np.float64)


# -- the contract -----------------------------------------------------------------------------------------------------


def errors(value: Any, truth: Any) -> tuple[float, float]:
    """``(max norm, Frobenius norm)`` of the error; both must be NaN, or infinite with the same sign, together."""
    value, truth = f64(value), f64(truth)
    assert value.shape == truth.shape, (value.shape, truth.shape)
    finite = np.isfinite(truth)
    np.testing.assert_array_equal(value[~finite], truth[~finite])
    d = np.abs(value[finite] - truth[finite])
    assert np.isfinite(d).all(), "not finite where the truth is"
    return (float(d.max()), float(np.linalg.norm(d))) if d.size else (0.0, 0.0)


def assert_contract(label: str, fast: Any, plain: Any, truth: Any, floor_ulp: float = FLOOR_ULP) -> None:
    """``fast`` is as good as ``plain`` is; see the module's text."""
    t = f64(truth)
    t = t[np.isfinite(t)]
    if not t.size:
        errors(fast, truth)
        return
    scales = (float(np.abs(t).max()), float(np.linalg.norm(t)))
    for norm, got, base, scale in zip(
        ("max", "Frobenius"), errors(fast, truth), errors(plain, truth), scales, strict=True
    ):
        bound = FACTOR * base + floor_ulp * EPS * scale
        assert got <= bound, f"{label}: {norm} error {got:.3e}, bound {bound:.3e} (plain {base:.3e}, scale {scale:.3e})"


def assert_same_bits(a: Any, b: Any, label: str = "") -> None:
    """Every array of two trees is equal to the bit (NaN equal to NaN)."""
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(f64(x), f64(y), err_msg=label + jax.tree_util.keystr(path))


# -- logits ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rows:
    """``logits [N, V]`` float32 and ``targets [N]``."""

    logits: np.ndarray
    targets: np.ndarray


def ordinary(rng: np.random.Generator, n: int, v: int) -> Rows:
    """Logits of a few nats, any target."""
    return Rows(3 * rng.standard_normal((n, v)), rng.integers(0, v, n))


def peaked(rng: np.random.Generator, n: int, v: int) -> Rows:
    """A target planted 5 to 15 nats above the rest."""
    rows = ordinary(rng, n, v)
    rows.logits[np.arange(n), rows.targets] = 9 + rng.uniform(5, 15, n)
    return rows


def extreme(rng: np.random.Generator, n: int, v: int) -> Rows:
    """``|z|`` up to 1e4 in a row; every other target is the largest column, the rest are hopeless."""
    z = rng.uniform(-1e4, 1e4, (n, v))
    return Rows(z, np.where(np.arange(n) % 2, z.argmax(-1), rng.integers(0, v, n)))


def shifted(offset: float) -> Callable[[np.random.Generator, int, int], Rows]:
    """Ordinary rows far from zero: their common offset must cost no digits beyond those of the input."""

    def rows(rng: np.random.Generator, n: int, v: int) -> Rows:
        return Rows(offset + rng.standard_normal((n, v)), rng.integers(0, v, n))

    return rows


def masked_columns(rng: np.random.Generator, n: int, v: int) -> Rows:
    """Half of the columns are ``-inf``; in the first row all but the target, in the second the target itself."""
    rows = ordinary(rng, n, v)
    rows.logits[rng.random((n, v)) < 0.5] = -np.inf
    rows.logits[np.arange(n), rows.targets] = rng.standard_normal(n)
    rows.logits[0] = -np.inf
    rows.logits[0, rows.targets[0]] = 2.5
    rows.logits[1, rows.targets[1]] = -np.inf
    return rows


def collapsed(rng: np.random.Generator, n: int, v: int) -> Rows:
    """The target leads the logsumexp of all others by 20 to 80 nats."""
    z, y = 0.5 * rng.standard_normal((n, v)), rng.integers(0, v, n)
    z[np.arange(n), y] = np.log(v) + np.linspace(20, 80, n)
    return Rows(z, y)


FAMILIES: dict[str, Callable[[np.random.Generator, int, int], Rows]] = {
    "ordinary": ordinary,
    "peaked": peaked,
    "extreme": extreme,
    "shifted up": shifted(1e4),
    "very negative": shifted(-1e4),
    "-inf columns": masked_columns,
    "collapsed": collapsed,
}


def transformed(x: Array, options: dict[str, Any]) -> Array:
    """Scale, softcap, temperature, float32, over the real columns only."""
    z = x[:, : options.get("vocab_size")].astype(jnp.float32)
    if options.get("scale") is not None:
        z = z * options["scale"]
    if options.get("softcap") is not None:
        z = options["softcap"] * jnp.tanh(z / options["softcap"])
    t = jnp.asarray(1.0 if options.get("temperature") is None else options["temperature"], jnp.float32)
    return z / (t.reshape(-1, 1) if t.ndim else t)


def plain_stats(x: Array, targets: Array, **options: Any) -> tuple[Array, Array, Array]:
    """``(logp, entropy, lse)`` of ``x [N, V]`` as ordinary JAX code has it, to be differentiated by JAX."""
    live = options.get("mask")
    if live is not None:
        x = jnp.where(live.reshape(-1, 1), x, jnp.zeros((), x.dtype))
    z = transformed(x, options)
    lp = jax.nn.log_softmax(z, axis=-1)
    y = jnp.clip(targets, 0, z.shape[-1] - 1)
    logp = jnp.take_along_axis(lp, y[:, None], axis=-1)[:, 0]
    entropy = -jnp.sum(jnp.exp(lp) * jnp.where(jnp.isfinite(lp), lp, 0.0), axis=-1)
    out = (logp, entropy, jax.nn.logsumexp(z, axis=-1))
    return out if live is None else tuple(jnp.where(live.reshape(-1), s, 0.0) for s in out)  # type: ignore[return-value]


def three(s: TokenStats) -> tuple[Array, Array, Array]:
    """The differentiable statistics."""
    return s.logp, s.entropy, s.lse


def cotangents(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Random cotangents of logp, entropy and lse at once."""
    return tuple(rng.standard_normal(shape).astype(np.float32) for _ in range(3))


def with_gradient(f: Callable[..., Any], *primals: Any, g: Any, compiled: bool = True) -> tuple[Any, Any]:
    """``(f(*primals), pullback of g)``, in one compiled or interpreted function."""

    def run(g: Any, *primals: Any) -> tuple[Any, Any]:
        out, pull = jax.vjp(f, *primals)
        return out, pull(g)

    return (jax.jit if compiled else in_numpy)(run)(jax.tree.map(jnp.asarray, g), *primals)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_logits(path: str, vocab_size: int | None, x: Array, y: Array, g: Any, options: dict[str, Any]) -> Any:
    """``(statistics, dlogits)`` by a backend or by the ``plain`` path; inputs are arguments, to share compilations."""

    def f(x: Array) -> Any:
        if path == "plain":
            return plain_stats(x, y, vocab_size=vocab_size, **options)
        return three(flat_calls.logprobs(x, y, vocab_size=vocab_size, backend=path, **options))

    out, pull = jax.vjp(f, x)
    return out, pull(g)[0]


def truth_of(options: dict[str, Any]) -> dict[str, Any]:
    """Options for the oracle: the float32 values that the backends see."""

    def exact(value: Any) -> Any:
        return np.float32(value) if isinstance(value, float) else value

    return {k: exact(v) for k, v in options.items()}


# -- the head ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HeadCase:
    """Inputs of a head-level call, as numpy arrays of the dtype under test; ``lm_head`` is always ``[V, H]`` here."""

    hidden: np.ndarray
    lm_head: np.ndarray
    targets: np.ndarray

    def parameters(self, layout: str = "vh") -> tuple[Array, Array]:
        """``(hidden, lm_head)`` as the call takes them."""
        w = self.lm_head if layout == "vh" else np.ascontiguousarray(self.lm_head.T)
        return jnp.asarray(self.hidden), jnp.asarray(w)


def head_case(
    seed: int = 0, shape: tuple[int, ...] = (3, 16), width: int = 32, vocab: int = 211, dtype: Any = jnp.float32, *,
    spread: float = 2.0, lead: float = 0.0,
) -> HeadCase:  # fmt: skip
    """Logits of about ``spread`` nats; targets lead by about ``lead`` nats (``hidden`` leans towards their row)."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((vocab, width)) / np.sqrt(width)
    y = rng.integers(0, vocab, shape)
    h = spread * rng.standard_normal((*shape, width)) + lead * w[y] / np.sum(w[y] ** 2, -1, keepdims=True)
    return HeadCase(h.astype(jnp.dtype(dtype)), w.astype(jnp.dtype(dtype)), y.astype(np.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def dense(h: Array, w: Array, bias: Array | None, layout: str) -> Array:
    """``[N, V]`` float32 logits; the matmuls of the backward pass take dlogits in the operands' dtype."""
    x = jnp.einsum("nh,vh->nv" if layout == "vh" else "nh,hv->nv", h, w, preferred_element_type=jnp.float32)
    return x if bias is None else x + bias.astype(jnp.float32)


def _dense_backward(layout: str, saved: tuple[Any, ...], dx: Array) -> tuple[Any, ...]:
    h, w, bias = saved
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    db = None if bias is None else jnp.sum(dx, axis=0).astype(bias.dtype)
    dx = dx.astype(h.dtype)
    dh = dot("nv,vh->nh" if layout == "vh" else "nv,hv->nh", dx, w)
    dw = dot("nv,nh->vh" if layout == "vh" else "nv,nh->hv", dx, h)
    return dh.astype(h.dtype), dw.astype(w.dtype), db


dense.defvjp(lambda h, w, bias, layout: (dense(h, w, bias, layout), (h, w, bias)), _dense_backward)


def plain_head(
    hidden: Array,
    lm_head: Array,
    targets: Array,
    *,
    bias: Array | None = None,
    layout: str = "vh",
    logits_dtype: Any = jnp.float32,
    **options: Any,
) -> tuple[Array, Array, Array]:
    """``(logp, entropy, lse)`` of the dense head, with the shape of the targets."""
    h = hidden.reshape(-1, hidden.shape[-1])
    if options.get("mask") is not None:
        h = jnp.where(options["mask"].reshape(-1, 1), h, jnp.zeros((), h.dtype))
    x = dense(h, lm_head, bias, layout)
    out = plain_stats(x.astype(logits_dtype), targets.reshape(-1), **options)
    return tuple(s.reshape(targets.shape) for s in out)  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class HeadStatics:
    """Static choices of :func:`run_head`."""

    path: str
    layout: str = "vh"
    chunk: int | None = None
    vocab_size: int | None = None
    logits_dtype: str = "float32"


@functools.partial(jax.jit, static_argnums=0)
def run_head(c: HeadStatics, primals: tuple[Array, ...], y: Array, g: Any, options: dict[str, Any]) -> Any:
    """``(statistics, gradients)`` for ``primals = (hidden, lm_head[, bias])``; see :func:`run_logits`."""

    def f(h: Array, w: Array, bias: Array | None = None) -> Any:
        common = dict(options, bias=bias, vocab_size=c.vocab_size, logits_dtype=c.logits_dtype)
        if c.path == "plain":
            return plain_head(h, w, y, layout=c.layout, **common)
        return three(
            flat_calls.linear_logprobs(h, w, y, head_layout=c.layout, backend=c.path, chunk_size=c.chunk, **common)
        )

    out, pull = jax.vjp(f, *primals)
    return out, pull(g)


def head_truth(
    case: HeadCase, g: tuple[np.ndarray, ...], *, bias: Any = None, layout: str = "vh", **options: Any
) -> tuple[oracle.TokenStats, tuple[Any, ...]]:
    """Float64 statistics, and ``(dhidden, dlm_head, dbias)`` for the cotangents ``g``."""
    w = case.lm_head if layout == "vh" else case.lm_head.T
    options = dict(truth_of(options), bias=bias, head_layout=layout)
    stats = oracle.linear_token_stats(case.hidden, w, case.targets, **options)
    return stats, oracle.linear_token_stats_vjp(case.hidden, w, case.targets, *g, **options)


def head_problem(
    h: Array, w: Array, y: Array, *, layout: str = "vh", bias: Array | None = None, transform: LogitTransform,
    vocab_size: int | None = None, **call: Any,
) -> Problem:  # fmt: skip
    """A flat problem, for what works below the public calls; ``call`` are its static choices."""
    head = HeadArrays(w, bias, layout=layout)  # type: ignore[arg-type]
    static = Call("test", head.vocab if vocab_size is None else vocab_size, **call)
    return Problem(Linear(h, head), y, transform, call=static)


# -- a problem -------------------------------------------------------------------------------------------------------


def logits_problem(
    x: Array, y: Array, transform: LogitTransform, vocab_size: int, live: Array | None = None, **choices: Any
) -> Problem[Given]:
    """What the functions of a logits-level backend take; ``choices`` are those of :class:`Call`."""
    return Problem(Given(x), y, transform, live, call=Call("test", vocab_size, **choices))
