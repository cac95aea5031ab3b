"""Tokens in the order in which a sparse backward without logits works on them: those with a gradient, then the other
live ones.

So every matmul reads and writes whole blocks of rows, and no loop gathers any. The order costs one gather
of ``[N, H]`` before the matmuls, and one of dH afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.core.problem import Problem
from logitless.core.row_passes import Visit, inverse, places_by_rank
from logitless.core.shapes import PyTree


@dataclasses.dataclass(frozen=True)
class Ordered:
    """A problem with its tokens in an order of their own, filled up to whole visits."""

    p: Problem
    order: Array  # [tokens of p]: index of each in the call
    place: Array  # [tokens of the call]: each token's index in this order
    count: Array  # number of leading tokens
    live: Array  # first tokens plus live tokens behind them; further h is zero, since a dead token may hold NaN
    given: Problem  # the call's own, in its order

    def take(self, x: Array) -> Array:
        """``[N]`` of the call in this order; zero behind the live tokens."""
        x = x.at[self.order].get(mode="promise_in_bounds")
        return jnp.where(jnp.arange(self.p.n) < self.live, x, jnp.zeros((), x.dtype))

    def put_back(self, x: Array) -> Array:
        """``[tokens of p, ...]`` in the order of the call."""
        return x.at[self.place].get(mode="promise_in_bounds", unique_indices=True)

    def in_call(self, visit: Visit) -> Visit:
        """A visit to tokens in this order, translated to the order of the call."""
        read = self.order.at[visit.read].get(mode="promise_in_bounds")
        # Behind the call's own tokens the last one stands again.
        inside = visit.inside(self.p.n) & (visit.read < self.given.n)
        return Visit(read, jnp.where(inside, read, self.given.n))

    def hidden_of(self, rows: Array) -> Array:
        """``[R, H]`` of the positions ``rows [R]``, from the call's own: those of ``p`` need not stand in memory. Zeros
        behind the live tokens."""
        h = self.given.h.at[self.order.at[rows].get(mode="clip")].get(mode="promise_in_bounds")
        return jnp.where((rows < self.live)[:, None], h, jnp.zeros((), h.dtype))


def some(tree: PyTree, begin: Array | int, size: int) -> PyTree:
    """``size`` tokens of a problem, or of the arrays of a tree, from ``begin`` on."""

    def cut(x: Array) -> Array:
        return x if x.shape[0] == size else lax.dynamic_slice_in_dim(x, begin, size)

    return tree.rows(cut) if isinstance(tree, Problem) else jax.tree.map(cut, tree)


def _sorted(kind: Array, by: Array) -> Array:
    """``[N]`` int32: tokens by ``kind [N]`` (0, 1 or 2), and then by about ``by [N]``, numbers up to 0, ascending.

    One number for each token, of the kind, the first bits of ``by`` and the place: to sort one array takes a third of
    the time that three take.
    """
    n = kind.size
    places = max((n - 1).bit_length(), 1)
    size = jnp.maximum(-by.astype(jnp.float32), 0.0)  # NaN stays, and is the largest
    bits = lax.shift_right_logical(lax.bitcast_convert_type(size, jnp.int32), places + 2)
    most = (1 << (29 - places)) - 1
    key = (kind.astype(jnp.int32) << 29) | ((most - jnp.clip(bits, 0, most)) << places) | jnp.arange(n, dtype=jnp.int32)
    return jnp.sort(key) & ((1 << places) - 1)


def in_order(
    p: Problem,
    first: Array,
    visit: int,
    gather: Callable[[Array, Array, Array], Array] | None = None,
    by: Array | None = None,
) -> Ordered:
    """Tokens where ``first [N]`` is true, then the other live ones, then the dead; filled up to whole visits of
    ``visit`` tokens. On a TPU hidden states are gathered by ``gather(h, order, whether a place has a live token)``. The
    first ones by ``by [N]``, ascending, where that is given; else each kind is in the call's own order."""
    live = jnp.ones((p.n,), bool) if p.live is None else p.live
    first = first & live
    if by is None:
        place = places_by_rank(first, live & ~first, ~live)
        order = inverse(place)
    else:
        order = _sorted(jnp.where(first, 0, jnp.where(live, 1, 2)), jnp.where(first, by, 0.0))
        place = inverse(order)
    order = jnp.pad(order, (0, -p.n % visit), mode="edge")
    numbers = dataclasses.replace(p.with_hidden(p.targets), live=None).rows(
        lambda a: a.at[order].get(mode="promise_in_bounds")
    )
    alive = jnp.sum(live, dtype=jnp.int32)
    keep = jnp.arange(order.size) < alive
    if gather is None:
        # Not before the order is known: an array of zeros would be there from the program's start.
        order, nothing = lax.optimization_barrier((order, jnp.zeros((), p.h.dtype)))
        h = jnp.where(keep[:, None], p.h.at[order].get(mode="promise_in_bounds"), nothing)
    else:
        h = gather(p.h, order, keep)
    return Ordered(numbers.with_hidden(h), order, place, jnp.sum(first, dtype=jnp.int32), alive, p)
