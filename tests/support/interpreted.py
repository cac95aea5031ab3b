"""Runs a JAX program on the host, operation by operation, without compiling most of them.

JAX compiles every operation for every shape it meets. Here NumPy does what IEEE arithmetic determines (sums but for
their order); functions such as ``exp``, sorts, gathers and scatters are JAX's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


def by_numpy(f: Callable[..., Any], *args: Any) -> Any:
    """``f(*args)``, as arrays of NumPy."""
    return in_numpy(f)(*args)


def in_numpy(f: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of ``jax.jit(f)``: traced once for each shape, and interpreted. A program that runs once or twice is
    done in a quarter of the time."""
    traced: dict[Any, Any] = {}

    def run(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        key = structure, tuple((np.shape(x), jax.dtypes.result_type(x), np.isscalar(x)) for x in leaves)
        if key not in traced:
            traced[key] = jax.make_jaxpr(f, return_shape=True)(*args)
        closed, shape = traced[key]
        out = Interpreter().inner(closed, [_host(x) for x in leaves])
        return jax.tree.unflatten(jax.tree.structure(shape), [_host(x) for x in out])

    return run


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key)


def _host(x: Any) -> Any:
    """As an array of NumPy; keys of random numbers stay JAX's."""
    return x if _is_key(x) else np.asarray(x)


class Interpreter:
    """A program's equations in order; loops and branches by their values."""

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = {}

        def read(v: Any) -> Any:
            return np.asarray(v.val, v.aval.dtype) if hasattr(v, "val") else env[v]

        env.update(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        with np.errstate(all="ignore"):
            for eqn in jaxpr.eqns:
                outs = self.step(eqn, [read(v) for v in eqn.invars])
                env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def inner(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        if hasattr(closed, "consts"):
            return self.run(closed.jaxpr, closed.consts, args)
        return self.run(closed, (), args)

    def step(self, eqn: Any, args: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name == "while":
            return self.loop(params, args)
        if name == "scan":
            return self.scan(params, args)
        if name == "cond":
            index = min(max(int(args[0]), 0), len(params["branches"]) - 1)
            return self.inner(params["branches"][index], args[1:])
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            if key in params and name != "reduce":  # whose jaxpr adds two numbers
                return self.inner(params[key], args)
        if name in _NUMPY and not any(map(_is_key, args)):
            return [np.asarray(_NUMPY[name](params, *args), eqn.outvars[0].aval.dtype)]
        if name in _SEVERAL:
            return _SEVERAL[name](params, *args)
        if "sharding" in params:  # of the mesh's devices, which nobody is here
            params = dict(params, sharding=None)
        out = eqn.primitive.bind(*args, **params)
        # As NumPy's: an array of JAX remembers its mesh.
        return [_host(x) for x in (out if eqn.primitive.multiple_results else [out])]

    def loop(self, params: dict[str, Any], args: list[Any]) -> list[Any]:
        a, b = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body, carry = args[:a], args[a : a + b], args[a + b :]
        while np.any(going := np.asarray(self.inner(params["cond_jaxpr"], [*of_cond, *carry])[0])):
            after = self.inner(params["body_jaxpr"], [*of_body, *carry])
            if going.ndim:  # under vmap: a loop that has ended stays as it is
                after = [np.where(_beside(going, x), x, old) for x, old in zip(after, carry, strict=True)]
            carry = after
        return carry

    def scan(self, params: dict[str, Any], args: list[Any]) -> list[Any]:
        if "num_consts" in params:
            consts, carried = params["num_consts"], params["num_carry"]
        else:  # jax 0.12: flat trees of constants, carry and rows
            consts, carried = (len(part) for part in params["ft_in"].unpack()[:2])
        fixed, carry, rows = args[:consts], args[consts : consts + carried], args[consts + carried :]
        found: list[list[Any]] = []
        steps = range(params["length"])
        for i in reversed(steps) if params["reverse"] else steps:
            outs = self.inner(params["jaxpr"], [*fixed, *carry, *(x[i] for x in rows)])
            carry = outs[:carried]
            found.append(outs[carried:])
        stacked = [np.stack(column) for column in zip(*(reversed(found) if params["reverse"] else found), strict=True)]
        return [*carry, *stacked]


def _beside(which: np.ndarray, x: Any) -> np.ndarray:
    """``which`` with axes for those that ``x`` has more."""
    return which.reshape(which.shape + (1,) * (np.ndim(x) - which.ndim))


def _broadcast(params: dict[str, Any], x: Any) -> Any:
    shape, dims = params["shape"], params["broadcast_dimensions"]
    sizes = dict(zip(dims, np.shape(x), strict=True))
    return np.broadcast_to(np.reshape(x, [sizes.get(d, 1) for d in range(len(shape))]), shape)


def _dot(params: dict[str, Any], a: Any, b: Any) -> Any:
    """In float32 as the programs here ask for it, or in float64."""
    (contract_a, contract_b), (batch_a, batch_b) = params["dimension_numbers"]
    of_a, of_b = list(range(a.ndim)), list(range(a.ndim, a.ndim + b.ndim))
    for i, j in (*zip(contract_a, contract_b, strict=True), *zip(batch_a, batch_b, strict=True)):
        of_b[j] = of_a[i]
    free = [x for d, x in enumerate(of_a) if d not in (*contract_a, *batch_a)]
    free += [x for d, x in enumerate(of_b) if d not in (*contract_b, *batch_b)]
    wide = np.float64 if np.float64 in (a.dtype, b.dtype) else np.float32
    return np.einsum(a.astype(wide), of_a, b.astype(wide), of_b, [of_a[i] for i in batch_a] + free, optimize=True)


def _div(params: dict[str, Any], a: Any, b: Any) -> Any:
    if np.issubdtype(a.dtype, np.integer):  # towards zero, not downwards
        return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))
    return np.divide(a, b)


def _iota(params: dict[str, Any]) -> Any:
    shape = [-1 if d == params["dimension"] else 1 for d in range(len(params["shape"]))]
    return np.broadcast_to(np.arange(params["shape"][params["dimension"]]).reshape(shape), params["shape"])


def _starts(x: Any, sizes: Sequence[int], at: Sequence[Any]) -> tuple[slice, ...]:
    """Where a part of those sizes lies: within ``x``, as ``lax.dynamic_slice`` moves it."""
    first = [min(max(int(i), 0), whole - size) for i, whole, size in zip(at, np.shape(x), sizes, strict=True)]
    return tuple(slice(i, i + size) for i, size in zip(first, sizes, strict=True))


def _update_slice(params: dict[str, Any], x: Any, part: Any, *at: Any) -> Any:
    out = np.array(x)
    out[_starts(x, np.shape(part), at)] = part
    return out


def _cumsum(params: dict[str, Any], x: Any) -> Any:
    if params["reverse"]:
        return np.flip(np.cumsum(np.flip(x, params["axis"]), params["axis"], x.dtype), params["axis"])
    return np.cumsum(x, params["axis"], x.dtype)


def _split(params: dict[str, Any], x: Any) -> list[Any]:
    return np.split(x, np.cumsum(params["sizes"])[:-1], axis=params["axis"])


def _elementwise(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, *args: f(*args)


_NUMPY: dict[str, Callable[..., Any]] = {
    **{
        name: _elementwise(f)
        for name, f in {
            "abs": np.abs, "add": np.add, "add_any": np.add, "and": np.bitwise_and, "ceil": np.ceil, "eq": np.equal,
            "floor": np.floor, "ge": np.greater_equal, "gt": np.greater, "is_finite": np.isfinite,
            "le": np.less_equal, "lt": np.less, "max": np.maximum, "min": np.minimum, "mul": np.multiply,
            "ne": np.not_equal, "neg": np.negative, "not": np.invert, "or": np.bitwise_or, "rem": np.fmod,
            "sign": np.sign, "sqrt": np.sqrt, "square": np.square, "sub": np.subtract,
        }.items()
    },
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda params, *xs: np.concatenate(xs, axis=params["dimension"]),
    "convert_element_type": lambda params, x: np.asarray(x).astype(params["new_dtype"]),
    "copy": lambda params, x: x,
    "cumsum": _cumsum,
    "div": _div,
    "dot_general": _dot,
    "dynamic_slice": lambda params, x, *at: x[_starts(x, params["slice_sizes"], at)],
    "dynamic_update_slice": _update_slice,
    "iota": _iota,
    "reduce_and": lambda params, x: np.all(x, axis=params["axes"]),
    "reduce_max": lambda params, x: np.max(x, axis=params["axes"]),
    "reduce_min": lambda params, x: np.min(x, axis=params["axes"]),
    "reduce_or": lambda params, x: np.any(x, axis=params["axes"]),
    "reduce_sum": lambda params, x: np.sum(x, axis=params["axes"]),
    "reshape": lambda params, x: np.reshape(x, params["new_sizes"]),
    "select_n": lambda params, which, if_not, if_so: np.where(which, if_so, if_not),
    "slice": lambda params, x: x[
        tuple(map(slice, params["start_indices"], params["limit_indices"], params["strides"] or [None] * x.ndim))
    ],
    "squeeze": lambda params, x: np.squeeze(x, axis=params["dimensions"]),
    "stop_gradient": lambda params, x: x,
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
}  # fmt: skip
_SEVERAL: dict[str, Callable[..., list[Any]]] = {
    "optimization_barrier": lambda params, *args: list(args),
    "split": _split,
}
"""Those with several results."""
