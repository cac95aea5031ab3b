"""A KL divergence between two heads in plain JAX, a slab of columns at a time: ``[C, S]`` logits of C tokens and S
columns.

With M one ``N x H x V`` matmul over the N tokens that count:

    statistics   per slab: x = h W_S^T and t = th T_S^T (2 M), sums of both (``core/peaked_sums.py``), merged over slabs
    gradients    per slab: x and t again (2 M), dx, dW_S = dx^T h (M), dH += dx W_S (M)

``head/chunked.py`` holds whole rows instead, and takes four matmuls for these six. But it adds every chunk's dW to the
whole of dW, ``4 H V`` bytes or more a chunk: here a slab of dW is written once, in its final dtype. On a v6e at T=8192,
H=4096, V=151936 slabs take 124 ms and 0.28 GB, chunks of 1,024 rows 127 ms and 1.56 GB, of 256 rows 247 ms and 0.32 GB
(the compiler's estimates, benchmarks/tpu_distill.py).

Both KLs follow from sums that merge in any order. The mixture of a JSD needs both logsumexps first: ``chunked``.

Bytes beside inputs and outputs: x, t and dx of C tokens and S columns, dH in float32, where tokens are in more than one
chunk a float32 slab of dW, and with a mask both hidden states in the order of the sweep.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.core.backend import Cost, PlainJax, Split, Way
from logitless.core.chunk_size import equal_part
from logitless.core.peaked_sums import LOW, PeakedSums, difference, merged, statistics_of
from logitless.core.problem import Given, Gradients, HeadArrays, HeadGrads, Linear, Loss, Problem, Source, Wanted
from logitless.core.pytree import register
from logitless.core.row_passes import Front, column_ids, dx, front, over_columns, teacher_logits
from logitless.core.stats import (
    LogitTransform,
    StatCotangents,
    TokenStats,
    factor,
    masked_stats,
    swept,
    times,
    valid_targets,
)
from logitless.head.linear import add_dhead, dhidden, dx_dtype, raw_logits

T = TypeVar("T")

TOKENS, COLUMNS = 8192, 4096
"""Tokens of a chunk and columns of a slab, at most."""

LIVE_TOKENS, LIVE_COLUMNS = 4096, 2048
"""The same where a mask says which tokens are live: a chunk without any is not visited, and hidden states in order take
memory of their own."""


def tiles_of(p: Problem[Linear]) -> tuple[int, int]:
    """``(tokens of a chunk, columns of a slab)``. A budget cuts the slab."""
    most, slab = (TOKENS, COLUMNS) if p.live is None else (LIVE_TOKENS, LIVE_COLUMNS)
    chunk = equal_part(p.n, min(most, p.n))
    chunk = min(-(-chunk // 128) * 128, p.n)
    while p.call.memory_budget is not None and slab > 128 and bytes_of(p, chunk, slab) > p.call.memory_budget:
        slab //= 2
    return chunk, slab


def bytes_of(p: Problem[Linear], chunk: int, slab: int) -> int:
    """Beside inputs and outputs."""
    width, logit, own = p.h.shape[1], jnp.dtype(p.call.logits_dtype).itemsize, jnp.dtype(p.h.dtype).itemsize
    assert p.teacher is not None and isinstance(p.teacher.source, Linear)
    in_order = 0 if p.live is None else p.n * (width + p.teacher.source.hidden.shape[1]) * own
    return (2 * logit + own) * chunk * slab + 4 * p.n * width + (4 * slab * width if chunk < p.n else 0) + in_order


def some_columns(head: HeadArrays, start: Array | int, size: int) -> HeadArrays:
    """The part of the head, which has no LoRA, that makes the logits of ``size`` columns from ``start`` on."""

    def cut(x: Array, axis: int) -> Array:
        return lax.dynamic_slice_in_dim(x, start, size, axis)

    bias = None if head.bias is None else cut(head.bias, 0)
    return dataclasses.replace(head, weight=cut(head.weight, head.axis), bias=bias)


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """The tokens of a sweep, those that count first, filled up to whole chunks."""

    p: Problem[Linear]
    order: Front
    given: int  # tokens of the call
    chunk: int

    @staticmethod
    def of(p: Problem[Linear], chosen: Array | None) -> _Tokens:
        """The ``chosen`` tokens, or all. Other tokens get zeros for hidden states, since a dead token may hold NaN."""
        order, chunk = front(chosen, by_sort=False), tiles_of(p)[0]
        more = -p.n % chunk

        def filled(x: Array) -> Array:
            x = order.take(x)
            return jnp.pad(x, ((0, more), *((0, 0),) * (x.ndim - 1)), mode="edge") if more else x

        q = dataclasses.replace(p, live=None).rows(filled)
        if order.count is not None:
            counts = jnp.arange(q.n)[:, None] < order.count

            def cleared(s: Source) -> Source:
                assert isinstance(s, Linear)
                return Linear(jnp.where(counts, s.hidden, jnp.zeros((), s.dtype)), s.head)

            q = q.over_sources(cleared)
        return _Tokens(q, order, p.n, chunk)

    def take(self, x: Array) -> Array:
        """``x [tokens of the call]`` in this order; zeros behind the call's own."""
        return jnp.pad(self.order.take(x), (0, self.p.n - self.given))

    def put_back(self, x: Array) -> Array:
        """``x [tokens, ...]`` in the order of the call."""
        return self.order.put_back(x[: self.given])

    def cut(self, first: Array, x: Array) -> Array:
        """A chunk of ``x [tokens, ...]``."""
        return lax.dynamic_slice_in_dim(x, first, self.chunk)

    def over(self, body: Callable[[Problem[Linear], Array, T], T], carry: T) -> T:
        """``body(chunk, its first token, carry)`` for the chunks that have a token that counts."""
        count = self.given if self.order.count is None else self.order.count

        def step(i: Array | int, carry: T) -> T:
            first = jnp.asarray(i * self.chunk, jnp.int32)
            return body(self.p.rows(functools.partial(self.cut, first)), first, carry)

        if self.chunk == self.p.n:
            return step(0, carry)
        return lax.fori_loop(0, (count + (self.chunk - 1)) // self.chunk, step, carry)


def _of_slab(part: Problem[Linear], start: Array | int, size: int) -> tuple[Problem[Linear], Array]:
    """A chunk's problem over ``size`` columns from ``start`` on, as if those were all, and the policy's logits."""

    def logits(source: Linear) -> Array:
        return raw_logits(source.hidden, some_columns(source.head, start, size), part.call.logits_dtype)

    assert part.teacher is not None and isinstance(part.teacher.source, Linear)
    teacher = dataclasses.replace(part.teacher, source=Given(logits(part.teacher.source)))
    local = dataclasses.replace(part, targets=part.targets - start, teacher=teacher).calling(vocab_size=size)
    return local.with_head(some_columns(part.head, start, size)), logits(part.policy)


# -- statistics --------------------------------------------------------------------------------------------------------


@register
@dataclasses.dataclass(frozen=True)
class _Sums:
    """What the sweep for statistics carries, ``[tokens]`` each."""

    student: PeakedSums
    teacher: PeakedSums
    own: Array  # u at the target


def _peaked(u: Array, v: Array, k: Array | None, k_o: Array | None) -> PeakedSums:
    """Sums over the columns of ``u [C, S]`` in one pass behind the maxima; ``v [C, S]`` are the other distribution's.

    Columns may share the largest ``u``: the column with the largest ``v`` leads. What is not ``cross`` is 0, or one
    apart from 1, at a leading column; ``cross`` is summed relative to the largest ``v`` and moved to the leader's
    afterwards: both steps give exactly 0 for equal rows, and neither loses a small ``rest`` beside a large peak.
    """

    def total(x: Array, where: Array) -> Array:
        return jnp.sum(jnp.where(where, x, 0.0), axis=1, keepdims=True)

    peak, top = jnp.max(u, axis=1, keepdims=True), jnp.max(v, axis=1, keepdims=True)
    leads, follows = u >= peak, ~(u >= peak)  # NaN follows, and stays
    s, t = times(k, u - peak), times(k_o, v - top)
    e, apart = jnp.exp(s), difference(u - peak, v - top, k, k_o)
    other = jnp.max(jnp.where(leads, v, LOW), axis=1, keepdims=True)
    more = total(jnp.ones_like(u), leads) - 1.0
    rest, own = total(e, follows) + more, times(k_o, other - top)
    cross = total(e * apart, follows) + (own - total(t, leads))
    found = (peak, other, rest, total(e * s, follows), total(e * e, follows) + more, cross + own * rest)
    return PeakedSums(*(x[:, 0] for x in found))


def _sums_of(x: Array, p: Problem[Linear]) -> _Sums:
    """The sums over all columns of ``x [C, S]`` and of the teacher's logits."""
    assert p.teacher is not None

    def columns(x: Array, t: LogitTransform) -> Array:
        u = jnp.maximum(swept(x, t), LOW)
        # The same bits for the maximum and for the sums: behind a tanh not every loop rounds alike.
        return u if t.softcap is None else lax.optimization_barrier(u)

    own, other = p.transform.column(), p.teacher.transform.column()
    u, v, k, k_o = columns(x, own), columns(teacher_logits(p), other), factor(own), factor(other)
    at_target = jnp.sum(jnp.where(column_ids(x.shape[1]) == p.targets[:, None], u, 0.0), axis=1)
    return _Sums(_peaked(u, v, k, k_o), _peaked(v, u, k_o, k), at_target)


def _joined(a: _Sums, b: _Sums, p: Problem[Linear]) -> _Sums:
    assert p.teacher is not None
    k, k_o = factor(p.transform.column()), factor(p.teacher.transform.column())
    both = jax.tree.map(lambda *x: jnp.stack(x, axis=-1), (a.student, a.teacher), (b.student, b.teacher))
    ids = jnp.arange(2, dtype=jnp.int32)
    return _Sums(merged(both[0], k, k_o, ids), merged(both[1], k_o, k, ids), a.own + b.own)


def _statistics(p: Problem[Linear]) -> TokenStats:
    """Two matmuls for the tokens that are live."""
    tokens = _Tokens.of(p, p.live)
    q, zero = tokens.p, jnp.zeros((tokens.p.n,), jnp.float32)

    def slab(start: Array | int, size: int, sums: _Sums) -> _Sums:
        def chunk(part: Problem[Linear], first: Array, sums: _Sums) -> _Sums:
            local, x = _of_slab(part, start, size)
            so_far = jax.tree.map(functools.partial(tokens.cut, first), sums)
            found = _joined(so_far, _sums_of(x, local), part)
            return jax.tree.map(lambda whole, own: lax.dynamic_update_slice(whole, own, (first,)), sums, found)

        return tokens.over(chunk, sums)

    none = PeakedSums.none(zero, jnp.full_like(zero, LOW))
    sums = over_columns(p.call.vocab_size, tiles_of(p)[1], slab, _Sums(none, none, zero))
    valid = valid_targets(q.targets, p.call.vocab_size)
    stats = statistics_of(sums.student, sums.teacher, sums.own, valid, q)
    return masked_stats(jax.tree.map(tokens.put_back, stats), p.live)


# -- gradients ---------------------------------------------------------------------------------------------------------


def _gradients(p: Problem[Linear], want: Wanted, out: TokenStats, g: StatCotangents) -> Gradients:
    """Four matmuls for the tokens that have a gradient; without a mask for all tokens."""
    tokens = _Tokens.of(p, None if p.live is None else p.live & g.any_nonzero())
    out, g = jax.tree.map(tokens.take, (out, g))
    width, head = p.h.shape[1], p.head

    def zeros(like: Array | None, wanted: bool, dtype: jnp.dtype) -> Array | None:
        return jnp.zeros(like.shape, dtype) if wanted and like is not None else None

    def slab(start: Array | int, size: int, total: Gradients) -> Gradients:
        def chunk(part: Problem[Linear], first: Array, total: Gradients) -> Gradients:
            local, x = _of_slab(part, start, size)
            stats, own_g = jax.tree.map(functools.partial(tokens.cut, first), (out, g))
            d = dx(x, local, stats, own_g, dx_dtype(x.dtype, p.h.dtype, want.bias))
            dh = total.hidden
            if dh is not None:
                mine = tokens.cut(first, dh) + dhidden(d.astype(p.h.dtype), local.head)
                dh = lax.dynamic_update_slice_in_dim(dh, mine, first, 0)
            return Gradients(dh, add_dhead(total.head, d, part.h, local.head))

        def put(whole: Array | None, own: Array | None, axis: int) -> Array | None:
            if whole is None or own is None:
                return None
            return lax.dynamic_update_slice_in_dim(whole, own.astype(whole.dtype), start, axis)

        part, f32 = some_columns(head, start, size), jnp.dtype(jnp.float32)
        own = HeadGrads(zeros(part.weight, want.weight, f32), zeros(part.bias, want.bias, f32))
        found = tokens.over(chunk, Gradients(total.hidden, own))
        weight = put(total.head.weight, found.head.weight, head.axis)
        return Gradients(found.hidden, HeadGrads(weight, put(total.head.bias, found.head.bias, 0)))

    start = Gradients(
        jnp.zeros((tokens.p.n, width), jnp.float32) if want.hidden else None,
        HeadGrads(
            zeros(head.weight, want.weight, p.dweight_dtype), zeros(head.bias, want.bias, jnp.dtype(jnp.float32))
        ),
    )
    total = over_columns(p.call.vocab_size, tiles_of(p)[1], slab, start)
    hidden, bias = total.hidden, total.head.bias
    if hidden is not None:
        hidden = tokens.put_back(hidden if p.call.partial_hidden else hidden.astype(p.h.dtype))
    if bias is not None and head.bias is not None and not p.call.partial_head:
        bias = bias.astype(head.bias.dtype)
    return Gradients(hidden, HeadGrads(total.head.weight, bias))


# -- the backend -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ColumnSlabs(PlainJax):
    """See the module."""

    name: ClassVar[str] = "chunked"
    in_forward: ClassVar[bool] = False

    def supports(self, p: Problem[Linear], split: Split) -> str | None:
        """Why whole rows of a chunk serve a call instead."""
        if p.teacher is None:
            return "there is no teacher"
        if not isinstance(p.teacher.source, Linear):
            return "the teacher's logits are given"
        if p.teacher.divergence == "jsd":
            return "JSD needs both logsumexps first"
        if p.more_ids is not None:
            return f"they have no {p.more_ids}"
        if p.call.chunk_size is not None:
            return "chunk_size= cuts tokens, and asks for whole rows of them"
        budget, least = p.call.memory_budget, bytes_of(p, *tiles_of(p))
        if budget is not None and least > budget:
            return f"dH in float32 and a narrow slab take {least:,} bytes, more than memory_budget={budget:,}"
        if split.vocabulary > 1:
            return "a device has a part of the vocabulary only"
        if p.head.lora_a is not None or p.teacher.source.head.lora_a is not None:
            return "a head has LoRA"
        return None

    def describe(self, p: Problem[Linear], way: Way) -> Cost:
        chunk, slab = tiles_of(p)
        words = f"statistics of both heads over slabs of {slab} columns, then gradients over the same slabs"
        matmuls = "6 (5 with a frozen head, 2 without a gradient) per live token; 2 where the cotangent is zero"
        moved = f"dW written once, a slab at a time; {bytes_of(p, chunk, slab):,} B beside inputs and outputs"
        tiles: dict[str, object] = {"chunk": chunk, "slab": slab, "layout": p.head.layout}
        return Cost(words, matmuls, moved, tiles, (6, 5, 2), sweep=chunk, columns=slab)

    def statistics(self, p: Problem[Linear], loss: Loss | None = None) -> tuple[TokenStats, None]:
        return _statistics(p.counting(loss)), None

    def forward(self, p: Problem[Linear], want: Wanted) -> tuple[TokenStats, None, None]:
        return _statistics(p), None, None

    def backward(
        self, p: Problem[Linear], want: Wanted, out: TokenStats, g: StatCotangents, residual: None, only_logp: bool
    ) -> Gradients:
        return _gradients(p, want, out, g)

    def gradients_in_forward(self, p: Problem[Linear], want: Wanted, loss: Loss) -> tuple[TokenStats, None, Gradients]:
        p = p.counting(loss)
        out = _statistics(p)
        return out, None, _gradients(p, want, out, loss.cotangents(out))
