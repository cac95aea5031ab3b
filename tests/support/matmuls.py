"""Counts the matmul work of a JAX program by running it, loop by loop: FLOPs of every ``dot_general`` that is reached.

Trip counts and branches depend on values, so the program is interpreted on real arrays. Kernels (``pallas_call``) count
by their own cost estimate and give zeros. Of a ``shard_map`` the first device's part is run, with collectives that only
keep shapes: the count is that of one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from interpreted import Interpreter


def matmul_flops(f: Callable[..., Any], *args: Any) -> float:
    """FLOPs of the matmuls that ``f(*args)`` runs on one device."""
    closed = jax.make_jaxpr(f)(*args)
    counter = _Counter()
    counter.run(closed.jaxpr, [np.asarray(c) for c in closed.consts], [np.asarray(x) for x in jax.tree.leaves(args)])
    return counter.flops


class _Counter(Interpreter):
    def __init__(self) -> None:
        self.flops = 0.0

    def step(self, eqn: Any, args: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name == "dot_general":
            self.flops += _dot_flops(*args, params["dimension_numbers"])
        if name == "shard_map":
            return self.first_device(eqn, args)
        if name == "pallas_call":
            self.flops += params["cost_estimate"].flops
            return [np.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        if name in ("psum", "psum_invariant", "pmax", "all_gather", "reduce_scatter", "psum2"):
            return [_of_shape(a, v.aval) for a, v in zip(args, eqn.outvars, strict=True)]
        if name in ("axis_index",):
            return [np.int32(0)]
        if name in ("logitless_one_device",):
            return args
        if name in _FUNCTIONS:  # of which a count needs no last digit
            return [np.asarray(_FUNCTIONS[name](*args), eqn.outvars[0].aval.dtype)]
        return super().step(eqn, args)

    def first_device(self, eqn: Any, args: list[Any]) -> list[Any]:
        inner = eqn.params["jaxpr"]
        own = [_of_shape(a, v.aval) for a, v in zip(args, inner.invars, strict=True)]
        outs = self.run(inner, (), own)
        return [_of_shape(a, v.aval) for a, v in zip(outs, eqn.outvars, strict=True)]


_FUNCTIONS = {"exp": np.exp, "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "tanh": np.tanh}


def _of_shape(x: Any, aval: Any) -> Any:
    """The first block of an array, or copies of it, in another shape of the same rank."""
    x = np.asarray(x)
    x = np.tile(x, [max(math.ceil(n / max(m, 1)), 1) for n, m in zip(aval.shape, x.shape, strict=True)])
    return x[tuple(slice(0, n) for n in aval.shape)].astype(aval.dtype)


def _dot_flops(a: Any, b: Any, dims: Any) -> float:
    _, (_, other) = dims
    free = math.prod(n for d, n in enumerate(b.shape) if d not in dims[0][1] and d not in other)
    return 2.0 * math.prod(a.shape) * free
