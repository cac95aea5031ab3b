"""What a sparse backward gathers: tokens in an order of their own, columns of the logits and of the head; and the
backward over gathered columns, slab by slab.

    in_order        tokens with a gradient, then the other live ones: a matmul reads and writes whole blocks of rows,
                    and no loop gathers any. One gather of ``[N, H]`` before the matmuls, and one of dH afterwards
    head_columns    the part of the head that makes the logits of some columns
    misses          which rows may not leave a mass out
    slab_dx         dx of a slab's columns, from its logits
    add_slabs       dH and the head's gradients of a chunk: dx, dh and dW over K columns (2 M K / V, and M K / V where
                    the logits are made again)
    in_their_place  what stands for the columns left out: their mass times a mean row of the head
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from logitless.core.chunk_size import platform
from logitless.core.problem import Gradients, HeadArrays, HeadGrads, Layout, Problem
from logitless.core.row_passes import Visit, inverse, places_by_rank, swept_columns
from logitless.core.shapes import PyTree
from logitless.core.stats import LogitTransform, StatCotangents, TokenStats, dz, factor, pull_back
from logitless.head.linear import add_dhead, dhidden, dx_dtype
from logitless.head.sparse.active_columns import Rule

# -- tokens ------------------------------------------------------------------------------------------------------------


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


# -- columns of the logits and of the head -----------------------------------------------------------------------------


def _by_element() -> bool:
    """XLA's GPU compiler brings the gathered dimension to the front, which would transpose the whole array; with an
    index for every dimension there is nothing to bring. Its CPU compiler loops over the indices: few is better."""
    return platform() != "cpu"


def take_logits(x: Array, index: Array) -> Array:
    """``x[:, index]``; for indices beyond the array anything finite may stand there: their dx is zero in any case."""
    index = jnp.minimum(index, x.shape[1] - 1)
    if not _by_element() or x.size >= 2**31:
        return x.at[:, index].get(mode="promise_in_bounds", indices_are_sorted=True)
    # One index for an element: with two the compiler writes out the pairs.
    at = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None] * x.shape[1] + index[None, :]
    return x.reshape(-1).at[at].get(mode="promise_in_bounds")


def _at(x: Array, index: Array, axis: int) -> Any:
    """``x`` at ``index`` along dimension ``axis``; ``x`` itself is not copied."""
    if axis == 0:
        return x.at[index]
    if not _by_element():
        return x.at[:, index]
    return x.at[jnp.arange(x.shape[0], dtype=jnp.int32)[:, None], index[None, :]]


def head_columns(head: HeadArrays, index: Array, ascending: bool = True) -> HeadArrays:
    """The part of the head that makes the logits of the columns ``index``; zeros for indices beyond it."""
    a, b = head.lora_a, head.lora_b

    def take(x: Array, axis: int = 0) -> Array:
        if axis == 1 and _by_element():  # to look whether each pair of indices is inside, XLA would write them out
            columns = _at(x, jnp.minimum(index, x.shape[1] - 1), 1).get(mode="promise_in_bounds")
            return jnp.where(index < x.shape[1], columns, jnp.zeros((), x.dtype))
        place = _at(x, index, axis)
        return place.get(mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=ascending)

    return dataclasses.replace(
        head,
        weight=take(head.weight, head.axis),
        bias=None if head.bias is None else take(head.bias),
        lora_a=take(a) if a is not None and head.axis == 0 else a,
        lora_b=take(b, 1) if b is not None and head.axis == 1 else b,
    )


def no_head_columns(total: HeadGrads, part: HeadArrays, dtype: DTypeLike | None = None) -> HeadGrads:
    """Zeros for the cotangents of the gathered head ``part``, those that ``total`` has; what is not gathered (LoRA's
    inner factor) is ``total``'s own. Zeros in ``dtype``, or in the dtype of ``total``."""
    by_row = part.layout == "vh"

    def blank(whole: Array | None, like: Array | None) -> Array | None:
        return None if whole is None or like is None else jnp.zeros(like.shape, dtype or whole.dtype)

    return HeadGrads(
        blank(total.weight, part.weight),
        blank(total.bias, part.bias),
        blank(total.lora_a, part.lora_a) if by_row else total.lora_a,
        total.lora_b if by_row else blank(total.lora_b, part.lora_b),
    )


def put_head_columns(
    total: HeadGrads, index: Array, own: HeadGrads, layout: Layout, add: bool = True, ascending: bool = True
) -> HeadGrads:
    """``total`` with the cotangents ``own`` of a gathered head, added or written at the gathered columns."""
    by_row = layout == "vh"

    def put(whole: Array | None, new: Array | None, axis: int) -> Array | None:
        if whole is None or new is None:
            return None
        new = new.astype(whole.dtype)
        if axis == 1 and not add and _by_element():
            # Every element of the whole looks for its own: pairs of indices would take four times the memory of
            # the columns, and as long.
            at = jnp.arange(index.size, dtype=jnp.int32)
            own = jnp.full((whole.shape[1],), -1, jnp.int32).at[index].set(at, mode="drop", unique_indices=True)
            return jnp.where(own >= 0, _at(new, own, 1).get(mode="clip"), whole)
        place = _at(whole, index, axis)
        return (place.add if add else place.set)(new, mode="drop", unique_indices=True, indices_are_sorted=ascending)

    return HeadGrads(
        weight=put(total.weight, own.weight, 0 if by_row else 1),
        bias=put(total.bias, own.bias, 0),
        lora_a=put(total.lora_a, own.lora_a, 0) if by_row else own.lora_a,
        lora_b=own.lora_b if by_row else put(total.lora_b, own.lora_b, 1),
    )


# -- what rows may leave out -------------------------------------------------------------------------------------------


def misses(
    tolerance: Array | None, stats: TokenStats, g: StatCotangents | None, vocab_size: int
) -> Callable[..., Array]:
    """Which rows may not leave a mass out (``misses(mass, every)``: which of each ``every``-th row); NaN may not.

    An entropy cotangent magnifies the tail: its part of dz is at most ``|g_lse - g_logp| u + |g_entropy| s`` with
    ``s = sum p |log p + H| <= u (log(N / u) + H)`` over N columns of mass u. Both count relative to the sum of the
    cotangents' magnitudes; without cotangents (``None``, not known yet) the mass itself counts.
    """
    assert tolerance is not None  # of a problem with a sparse backward
    limit = jnp.broadcast_to(tolerance, stats.logp.shape)
    if g is None:
        return lambda mass, every=1: ~(mass <= limit[::every])
    size = jnp.abs(g.logp) + jnp.abs(g.entropy) + jnp.abs(g.lse)
    share = jnp.abs(g.entropy) / jnp.where(size > 0, size, 1.0)

    def miss(mass: Array, every: int = 1) -> Array:
        part = share[::every]
        # A difference of logarithms: the quotient overflows for the tiny masses of a collapsed policy.
        log_mass = jnp.log(jnp.maximum(mass, jnp.finfo(jnp.float32).tiny))
        spread = jnp.log(jnp.float32(vocab_size)) - log_mass + stats.entropy[::every]
        weight = jnp.maximum(1.0, (1.0 - part) + part * spread)
        return ~(mass * weight <= limit[::every])

    return miss


def without(g: StatCotangents, rows: Array) -> StatCotangents:
    """Cotangents that are zero in ``rows``."""
    return jax.tree.map(lambda a: jnp.where(rows, 0.0, a), g)


@dataclasses.dataclass(frozen=True)
class Known:
    """A chunk's statistics and cotangents."""

    stats: TokenStats
    g: StatCotangents


def mass_beside(kept: Array) -> Array:
    """``[N]``: mass of each row outside the kept columns; NaN where the row is."""
    return jnp.where(kept > 1.0, 0.0, 1.0 - kept)


# -- the backward over gathered columns --------------------------------------------------------------------------------


def slab_dx(x: Array, index: Array, p: Problem, known: Known, bias: bool = False) -> Array:
    """dx of the gathered columns ``index``, in a dtype that is wide enough for the gradient of the ``bias`` if that is
    wanted; zero in unused slots, which lie beyond the vocabulary."""
    t = p.transform.column()
    u = swept_columns(x, t, p.call.vocab_size, index[None, :])
    stats, g = jax.tree.map(lambda v: v[:, None], (known.stats, known.g))
    d = dz(u, index[None, :] == p.targets[:, None], stats, g, factor(t))
    return pull_back(d, x, t).astype(dx_dtype(p.call.logits_dtype, p.h.dtype, bias))


def mean_row(rule: Rule, p: Problem) -> Array:
    """``[1, H]`` float32: the mean of a slab's worth of head rows, evenly spaced over the vocabulary."""
    size = min(rule.slab, p.call.vocab_size)
    index = jnp.arange(size, dtype=jnp.int32) * (p.call.vocab_size // size)
    part = head_columns(p.head, index)
    if part.lora_a is not None:
        return dhidden(jnp.ones((1, size), p.head.weight.dtype), part) / size
    return jnp.mean(part.weight.astype(jnp.float32), axis=p.head.axis)[None, :]


def in_their_place(c: Array, mass: Array, g: StatCotangents, t: LogitTransform) -> Array:
    """``[C, H]`` float32: dH of a mass in columns whose head rows are all ``c [1, H]`` and whose logits are far from
    the softcap; without the entropy's part, which depends on how the mass is spread."""
    t = t.column()
    dz_sum = jnp.where(g.any_nonzero(), (g.lse - g.logp) * mass, 0.0)[:, None]
    return pull_back(dz_sum, jnp.zeros_like(dz_sum), t) * c


def add_slabs(
    rule: Rule,
    trips: Array,
    index: Array,
    logits: Callable[[Array, HeadArrays], Array],
    p: Problem,
    known: Known,
    start: Gradients,
) -> Gradients:
    """``start`` plus a chunk's dH (float32) and its part of the head's gradients, over ``trips`` slabs of the columns
    ``index``; ``logits(columns, their part of the head)`` are a slab's."""

    def slab(i: Array, total: Gradients) -> Gradients:
        own = lax.dynamic_slice_in_dim(index, i * rule.slab, rule.slab)
        part = head_columns(p.head, own)
        dx = slab_dx(logits(own, part), own, p, known, total.head.bias is not None)
        dh = None if total.hidden is None else total.hidden + dhidden(dx.astype(p.h.dtype), part)
        grads = add_dhead(no_head_columns(total.head, part), dx, p.h, part)
        return Gradients(dh, put_head_columns(total.head, own, grads, part.layout))

    return lax.fori_loop(0, trips, slab, start)


def once(when: Array, body: Callable[[PyTree], PyTree], carry: PyTree) -> PyTree:
    """``body(carry)`` if ``when``, else ``carry``, in place."""
    return lax.fori_loop(0, when.astype(jnp.int32), lambda _, state: body(state), carry)
