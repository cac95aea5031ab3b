"""Which tokens a sweep visits, and in which order.

RL batches are mostly dead weight: prompts and padding are masked, groups without advantage have no gradient. A sweep
visits chunks of *live* tokens only, gathered from wherever they stand; its trip count is a traced number, so neither
shapes nor compilations depend on how many there are.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from logitless.pytree import register, static


@register
@dataclasses.dataclass(frozen=True)
class Visit:
    """A chunk of tokens: the rows to read, and where to write (``n``, dropped, for the padding of the last chunk)."""

    read: Array
    write: Array

    def take(self, x: Array) -> Array:
        """The chunk's rows of ``x [N, ...]``."""
        return x.at[self.read].get(mode="promise_in_bounds")

    def put(self, out: Array, value: Array) -> Array:
        """``out [N, ...]`` with the chunk's rows replaced."""
        return out.at[self.write].set(value.astype(out.dtype), mode="drop", unique_indices=False)

    def inside(self, n: int) -> Array:
        """Which rows of the chunk are real."""
        return self.write < n


@register
@dataclasses.dataclass(frozen=True)
class Sweep:
    """Chunks ``[first, last)`` of the tokens in ``order`` (``None``: as they stand)."""

    order: Array | None
    first: Array | int
    last: Array | int
    count: Array | int
    n: int = static(0)
    chunk: int = static(0)

    def visit(self, i: Array) -> Visit:
        """The ``i``-th chunk."""
        position = i * self.chunk + jnp.arange(self.chunk, dtype=jnp.int32)
        inside = jnp.minimum(position, self.n - 1)
        rows = inside if self.order is None else self.order.at[inside].get(mode="promise_in_bounds")
        return Visit(read=rows, write=jnp.where(position < self.count, rows, self.n))


def _chunks(count: Array | int, chunk: int) -> Array | int:
    return (count + (chunk - 1)) // chunk


def whole_sweep(n: int, chunk: int) -> Sweep:
    """Every token."""
    return Sweep(None, 0, _chunks(n, chunk), n, n=n, chunk=chunk)


def live_sweep(live: Array, chunk: int) -> Sweep:
    """The tokens where ``live [N]`` is true, in their own order."""
    n = live.shape[0]
    order = jnp.argsort(~live, stable=True).astype(jnp.int32)
    count = jnp.sum(live, dtype=jnp.int32)
    return Sweep(order, 0, _chunks(count, chunk), count, n=n, chunk=chunk)


def split_sweep(live: Array, active: Array, chunk: int) -> tuple[Sweep, Sweep]:
    """Live tokens, those that are also ``active`` first: ``(chunks with any active token, the other live chunks)``."""
    n = live.shape[0]
    rank = jnp.where(live & active, 0, jnp.where(live, 1, 2))
    order = jnp.argsort(rank, stable=True).astype(jnp.int32)
    count = jnp.sum(live, dtype=jnp.int32)
    middle = _chunks(jnp.sum(live & active, dtype=jnp.int32), chunk)
    last = _chunks(count, chunk)
    return (
        Sweep(order, 0, middle, count, n=n, chunk=chunk),
        Sweep(order, middle, last, count, n=n, chunk=chunk),
    )
