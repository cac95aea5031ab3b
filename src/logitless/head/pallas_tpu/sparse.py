"""The sparse backward on TPU as a backend around the exact one: one pass over the vocabulary and one over dW.

Columns come out of the forward sweep; gradients go over one set of columns for all tokens. With M one matmul over all
tokens and columns, and K active columns:

    look       logits of 128 rows in 8192 columns: are nearly all rows flat? Then the exact kernels, as without this.
    forward    statistics and column maxima by one sweep (M), no logits in HBM (``forward.py``)
    columns    the threshold on the maxima that costs least, judged by those 128 rows (``column_choice.py``)
    backward   slab by slab of the K columns: x, dx, dh, a slab of dW, and the mass that each row keeps (3 M K / V)
    hard rows  those that leave out more than the tolerance: the *other* columns, too, while dW is written (3 matmuls
               each, 4 if they are many)

All tokens share one set; ``head/sparse/backend.py`` has a set per chunk. XLA's TPU compiler carries out a scatter into
dW by streaming all of dW (43 cycles a row of ``[V, 4096]`` float32, touched or not: 3.7 ms a scatter at V = 151936, an
estimate), so a sum over chunks with columns of their own would cost more than it saves. With one set

    dW[v] = active:    the sum over all tokens, hard ones too, in float32, rounded once, put into place by the sweep
                       that makes the others (``hard_rows.py``)
            inactive:  the sum over the hard rows, rounded once
    dH[t] = the sum over the active columns, and     hard: over the others;     else: the mean row's part

so nothing is added twice and no float32 dW exists. Until that sweep the rows of the active columns stand in dW's own
place. On 8192 tokens of ``bench.realistic`` (V = 151936, a policy's own completions) columns and hard rows cost 0.15 M
after the forward sweep (benchmarks/tpu_sparse_estimate.py).

Uncoupled objectives have their gradients in the forward pass, where the cotangents follow from the statistics:
1 + 3 K/V matmuls a token, 3 or 4 a hard row, and the exact kernels (4) if the look shows flat logits. Other cotangents
come later: 1 + K/V in the forward pass (the report's masses), 3 K/V in the backward pass, 3 or 4 a hard row, which is
every row if the logits are flat.

The mass left out is ``1 - sum of p over the active columns``, good to ``MASS_ERROR``: rows count as hard that much
earlier, and below ``LEAST_TOLERANCE`` all goes through the exact kernels.

Over a mesh each device has its own columns and hard rows, and its dW is summed with the others' in float32, whole:
which of its rows are zero differs between devices. Calls that this backend does not serve, and why:
:meth:`SparsePallasTpu.supports`.

Bytes beside inputs and outputs: dH in float32, ``[N + GROUP, H]``, and a slab of the head (x, dx and the slab's dW are
in VMEM); where V is no multiple of 16 also ``[K limit, H]`` of dW's rows. Hidden states in the order of
``head/sparse/gather.py`` stand where dH will.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.core.backend import Around, Cost, Split, Way
from logitless.core.problem import Gradients, HeadArrays, HeadGrads, Loss, Problem, Wanted
from logitless.core.pytree import register
from logitless.core.row_passes import in_parts, probabilities
from logitless.core.shapes import PyTree
from logitless.core.stats import StatCotangents, TokenStats
from logitless.head.linear import add_dhead, dhidden, raw_logits
from logitless.head.pallas_tpu import column_choice, kernels
from logitless.head.pallas_tpu.backend import PallasTpu, cost_of, live_cotangents
from logitless.head.pallas_tpu.column_choice import (
    MASS_ERROR,
    Active,
    choose_columns,
    column_rule,
    few_rows,
    no_columns,
    positions,
)
from logitless.head.pallas_tpu.hard_rows import Ready, blank_rows, hard_sweep, room_for, rows_beside
from logitless.head.pallas_tpu.operands import interpreter, tiles_of
from logitless.head.pallas_tpu.tiles import LANES, Tiles
from logitless.head.sparse.active_columns import Rule, SparseReport, blank_report, dense_report, in_words
from logitless.head.sparse.gather import Known, Ordered, in_order, in_their_place, mean_row, misses, slab_dx, without

CHUNK = 2048
"""Tokens of a backward step, at most."""

GROUP = 1024
"""Hard rows whose dH is made along with dW, at most: it stays in VMEM meanwhile. If they fit into one token tile, dW
needs no accumulator."""


HARD_TOKENS = 256
"""Token tile of the sweep for hard rows, at most: a few per cent of the tokens should not be rounded up to 1024. At
H = 4096 it is 6 % slower per token than a tile of 1024 (an estimate)."""


def chunk_of(p: Problem) -> int:
    """Tokens per backward step: all tokens, or equal parts in multiples of 128."""
    if p.n <= CHUNK:
        return p.n
    equal = -(-p.n // -(-p.n // CHUNK))
    return min(-(-equal // LANES) * LANES, CHUNK)


@register
@dataclasses.dataclass(frozen=True)
class Slabs:
    """What the backward steps over the active columns give."""

    kept: Array  # [tokens] float32: mass of the active columns
    dh: Array | None  # [tokens, H] float32; behind them, with dW, place for a group of hard rows
    weight: Array | None  # [room, H]: rows of dW, in the last slots (``hard_rows.py``)
    bias: Array | None  # [most] float32


def over_slabs(rule: Rule, want: Wanted, p: Problem, known: Known, count: Array, chunk: int, active: Active) -> Slabs:
    """Left-out masses, and the wanted gradients (dH, active rows of dW and dbias), for the first ``count`` tokens, in a
    whole number of chunks."""
    (size, width), head = p.h.shape, p.head
    slots = rule.slabs(active.count) * rule.slab

    def slab(i: Array, carry: Slabs) -> Slabs:
        at = rule.most - slots + i * rule.slab
        index = lax.dynamic_slice_in_dim(active.index, at, rule.slab)
        columns = _columns(p, jnp.where(index < head.vocab, index, 0))  # unused slots come first

        def add(k: Array, inner: tuple[Array, Array | None, HeadGrads]) -> tuple[Array, Array | None, HeadGrads]:
            kept, dh, grads = inner

            def cut(a: Array) -> Array:
                return lax.dynamic_slice_in_dim(a, k * chunk, chunk)

            def put(whole: Array, own: Array) -> Array:
                return lax.dynamic_update_slice_in_dim(whole, cut(whole) + own, k * chunk, 0)

            part, own = p.rows(cut), Known(*jax.tree.map(cut, (known.stats, known.g)))
            # Kept: XLA would make the logits once for the masses and once for dx.
            x = lax.optimization_barrier(raw_logits(part.h, columns, jnp.dtype(jnp.float32)))
            kept = put(kept, jnp.sum(probabilities(x, part, own.stats, index[None, :]), axis=1))
            if want:
                dx = slab_dx(x, index, part, own, want.bias)
                dh = None if dh is None else put(dh, dhidden(dx.astype(p.h.dtype), columns))
                grads = add_dhead(grads, dx, part.h, columns)
            return kept, dh, grads

        zero = HeadGrads(
            jnp.zeros((rule.slab, width), jnp.float32) if want.weight else None,
            jnp.zeros((rule.slab,), jnp.float32) if want.bias else None,
        )
        chunks = (count + (chunk - 1)) // chunk
        kept, dh, grads = lax.fori_loop(0, chunks, add, (carry.kept, carry.dh, zero))

        def put(whole: Array | None, own: Array | None) -> Array | None:
            if whole is None or own is None:
                return None
            behind = whole.shape[0] - rule.most
            return lax.dynamic_update_slice_in_dim(whole, own.astype(whole.dtype), behind + at, 0)

        return Slabs(kept, dh, put(carry.weight, grads.weight), put(carry.bias, grads.bias))

    room, interpret = room_for(head.vocab, rule.most), interpreter(p.call.interpret)
    start = Slabs(
        jnp.zeros((size,), jnp.float32),
        jnp.zeros((size + group_of(p) * want.weight, width), jnp.float32) if want.hidden else None,
        blank_rows(room, width, p.dweight_dtype, interpret) if want.weight else None,
        jnp.zeros((rule.most,), jnp.float32) if want.bias else None,
    )
    return lax.fori_loop(0, rule.slabs(active.count), slab, start)


def _columns(p: Problem, index: Array) -> HeadArrays:
    """The part of the head that makes the logits of the columns ``index``."""
    bias = None if p.head.bias is None else p.head.bias.at[index].get(mode="promise_in_bounds")
    weight = kernels.gather(p.head.weight, index, interpreter(p.call.interpret))
    return dataclasses.replace(p.head, weight=weight, bias=bias)


def gradients(
    rule: Rule, want: Wanted, f: Ordered, known: Known, moving: Array, active: Active
) -> tuple[Gradients, SparseReport]:
    """The gradients that are wanted of the tokens ``moving``, which come first, and their report, in the order of the
    call; ``known`` and ``moving`` in that of ``f``. Without cotangents (all zero, nothing wanted) the report is the one
    that they would have if all were of ``logp``."""
    p, vocab_size = f.p, f.p.call.vocab_size
    assert p.tolerance is not None
    slabs = over_slabs(rule, want, p, known, f.count, chunk_of(p), active)
    mass = jnp.where(moving, jnp.maximum(1.0 - slabs.kept, 0.0), 0.0)
    hard = moving & misses(p.tolerance, known.stats, known.g if want else None, vocab_size)(mass + MASS_ERROR)
    report = SparseReport(
        left_out=f.put_back(jnp.where(hard | ~moving, 0.0, mass)),
        rows=f.put_back(moving),
        hard=f.put_back(hard & ~active.dense),
        chunks=jnp.int32(1),
        dense_chunks=active.dense.astype(jnp.int32),
        active=active.count.astype(jnp.float32),
        width=jnp.where(active.dense, p.head.vocab, rule.slabs(active.count) * rule.slab).astype(jnp.float32),
    )
    if not want:
        return Gradients(None, HeadGrads(None, None)), report
    scale = in_their_place(jnp.ones((1, 1), jnp.float32), mass, without(known.g, hard | ~moving), p.transform)
    mean = Mean(scale[:, 0], lambda: mean_row(rule, p))
    ready = None if slabs.weight is None else Ready(slabs.weight, active.index, active.count)
    total = _with_hard_rows(want, f, _hard_first(p, known, hard), slabs, mean, ready)
    bias = total.head.bias if want.bias else None  # the sweep makes dbias beside dW, asked for or not
    if bias is not None and slabs.bias is not None:
        bias = bias.at[active.index].set(slabs.bias, mode="drop", unique_indices=True)
    if bias is not None and p.head.bias is not None and not p.call.partial_head:
        bias = bias.astype(p.head.bias.dtype)
    return Gradients(total.hidden, HeadGrads(total.head.weight, bias)), report


@dataclasses.dataclass(frozen=True)
class Mean:
    """What stands for the columns that a row leaves out: the mean row of the head times ``scale [tokens]``."""

    scale: Array
    row: Callable[[], Array]


def _numbers_at(at: Array, p: Problem, own: Known) -> tuple[Problem, Known]:
    """Tokens ``at`` of a problem, with their known statistics."""

    def take(a: Array) -> Array:
        if a.ndim == 1:
            return a.at[at].get(mode="promise_in_bounds")
        return kernels.gather(a, at, interpreter(p.call.interpret))

    return p.rows(take), Known(*jax.tree.map(take, (own.stats, own.g)))


@dataclasses.dataclass(frozen=True)
class _Hard:
    """The hard rows of a problem's tokens, which stand first in ``p`` and ``known``."""

    rows: Array  # [tokens] bool
    count: Array
    order: Array  # [tokens]: where each comes from
    p: Problem
    known: Known
    tiles: Tiles


def _hard_first(p: Problem, known: Known, hard: Array) -> _Hard:
    """Hidden states of ``hard`` rows are moved to the front in place; none moves backwards."""
    tiles, size, count = _hard_tiles(p), p.n, jnp.sum(hard, dtype=jnp.int32)
    part = next(n for n in (tiles.tokens, LANES, size) if size % n == 0)
    order = jnp.minimum(positions(hard, size, chunk_of(p)), size - 1)

    def gathered(k: Array, h: Array) -> Array:
        rows = lax.dynamic_slice_in_dim(order, k * part, part)
        some = kernels.gather(h, rows, interpreter(p.call.interpret))
        return lax.dynamic_update_slice_in_dim(h, some, k * part, 0)

    q, own = _numbers_at(order, p.with_hidden(p.targets), known)
    q = q.with_hidden(lax.fori_loop(0, (count + (part - 1)) // part, gathered, p.h))
    return _Hard(hard, count, order, q, own, tiles)


def _with_hard_rows(want: Wanted, f: Ordered, hard: _Hard, slabs: Slabs, mean: Mean, ready: Ready | None) -> Gradients:
    """The gradients of all rows: slabs, hard rows, and ``mean`` for the others.

    Avoid ``lax.cond``: operands stay alive until the branch returns. The number of hard rows sets the grid of the first
    sweep and the trips of a loop. dH overwrites the hidden states of the hard rows.
    """
    p, count, tiles, own = hard.p, hard.count, hard.tiles, hard.known
    size, group, interpret = p.n, group_of(p), interpreter(p.call.interpret)
    dh, head, groups = slabs.dh, HeadGrads(None, None), 0
    if ready is not None:
        out = hard_sweep(p, count, own.stats, own.g, ready, tiles, hidden=0 if dh is None else group)
        head, groups = out.head, 1
        if dh is not None and out.hidden is not None:
            by_columns = kernels.gather(dh, hard.order[jnp.minimum(jnp.arange(group), size - 1)], interpret)
            dh = lax.dynamic_update_slice_in_dim(dh, by_columns + out.hidden, size, 0)
    elif want.bias:
        head = HeadGrads(None, kernels.dhead(p, count, own.stats, own.g, tiles=tiles, weight=False).bias)
    if dh is None:
        return Gradients(None, head)

    def more(k: Array, dh: Array) -> Array:
        """``dh`` with a further group of the hard rows, over all columns."""
        at = k * group + jnp.arange(group, dtype=jnp.int32)
        some, numbers = _numbers_at(jnp.minimum(at, size - 1), p, own)
        exact = hard_sweep(some, jnp.clip(count - k * group, 0, group), numbers.stats, numbers.g, None, tiles, group)
        row = jnp.where(at < count, hard.order[jnp.minimum(at, size - 1)], dh.shape[0])
        return dh.at[row].set(exact.hidden, mode="drop")

    dh = lax.fori_loop(groups, (count + (group - 1)) // group, more, dh)
    rank, ids = jnp.cumsum(hard.rows.astype(jnp.int32)) - 1, jnp.arange(size, dtype=jnp.int32)
    row = f.put_back(jnp.where(hard.rows & (rank < groups * group), size + rank, ids))
    return Gradients(_dh_in_call_order(f, dh, row, mean, p), head)


def _dh_in_call_order(f: Ordered, dh: Array, row: Array, mean: Mean, p: Problem) -> Array:
    """Row ``row [N]`` of ``dh`` and the mean row for each token of the call; written over ``p.h`` if that fits."""
    scale, c = f.put_back(mean.scale), mean.row()
    dtype = jnp.dtype(jnp.float32) if p.call.partial_hidden else p.h.dtype

    def made(first: Array | int, count: int, _: Array) -> Array:
        at, by = (lax.dynamic_slice_in_dim(a, first, count) for a in (row, scale))
        return (kernels.gather(dh, at, interpreter(p.call.interpret)) + by[:, None] * c).astype(dtype)

    n = f.given.n
    place = p.h if dtype == p.h.dtype and p.n == n else jnp.zeros((n, p.h.shape[1]), dtype)
    return in_parts(made, kernels.PART, place)


def group_of(p: Problem) -> int:
    """Number of hard rows whose dH is made along with dW: whole token tiles, or all tokens where those are fewer."""
    tokens = _hard_tiles(p).tokens
    return min(max(min(GROUP, rows_beside(p, tokens)) // tokens * tokens, tokens), p.n)


def _hard_tiles(p: Problem) -> Tiles:
    tiles = tiles_of("dhead", p)
    return dataclasses.replace(tiles, tokens=min(tiles.tokens, HARD_TOKENS)) if tiles.tokens > LANES else tiles


# -- the backend -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SparsePallasTpu(Around[Problem, Wanted]):
    """A backend around the exact one: the same statistics, a sparse backward. ``p.live`` is the loss's mask, or
    ``None`` where every token is live."""

    own: PallasTpu

    in_forward: ClassVar[bool] = True
    head_in_parts: ClassVar[bool] = False

    def supports(self, p: Problem, split: Split) -> str | None:
        """Why the exact kernels serve a call instead; ``None`` where this backend does."""
        if p.head.layout != "vh":
            return "the sparse backward of the TPU kernels works on rows of a [V, H] head, and this one is [H, V]"
        if p.head.lora_a is not None:
            return "the sparse backward of the TPU kernels does not serve LoRA on the head"
        if jnp.dtype(p.call.logits_dtype) != jnp.float32:
            rounded = jnp.dtype(p.call.logits_dtype).name
            return f"the sparse backward of the TPU kernels needs float32 logits, and logits_dtype is {rounded}"
        if p.call.mass is not None and p.call.mass < column_choice.LEAST_TOLERANCE:
            least = in_words(column_choice.LEAST_TOLERANCE)
            return f"a row may leave out {in_words(p.call.mass)}, and masses are known well enough from {least} on"
        if jax.config.jax_enable_x64:
            return "jax_enable_x64 is on, and the sparse backward of the TPU kernels counts in 32 bits"
        if split.vocabulary > 1:
            return "the vocabulary is sharded, and the sparse backward of the TPU kernels needs all columns on a device"
        if split.head_gathered:
            return "under FSDP the sparse backward of the TPU kernels would need more memory than the exact kernels"
        if split.dw_parts > 1:
            return (
                "the sparse backward of the TPU kernels would sum the head's gradient over devices whole, in float32, "
                f"where the exact kernels sum {split.dw_parts} parts one after the other"
            )
        return self.own.supports(p, split)

    def describe(self, p: Problem, way: Way) -> Cost:
        """How much it saves depends on the data."""
        rule, late, exact = column_rule(p.head.vocab), not way.in_forward, cost_of(p, ("token_stats", "dhead"))
        words = (
            "statistics and column maxima by one sweep, then the backward over the K active columns of all tokens, "
            f"which leave at most {in_words(way.mass)} of a row's mass out (rows that would leave out more: the other "
            f"columns as well, while dW is written); exact kernels where a few rows show flat logits, or "
            f"K > {rule.most:,}"
        )
        tiles = {"slab": rule.slab, "chunk": chunk_of(p), "group": GROUP}
        return dataclasses.replace(
            exact,
            way=words,
            matmuls=f"1 + {4 if late else 3} K/V, 3 or 4 a hard row, {5 if late else 4} if flat (1 without a gradient)",
            bytes_moved=f"{exact.bytes_moved} at most (dhead by the hard rows)",
            tiles={**exact.tiles, **tiles},
            sweep=chunk_of(p),
        )

    def statistics(self, p: Problem, loss: Loss | None = None) -> tuple[TokenStats, SparseReport]:
        """Those of the exact backend."""
        return self.own.statistics(p)[0], blank_report(p.n)

    def forward(self, p: Problem, want: Wanted) -> tuple[TokenStats, SparseReport, Active]:
        """The residual are the active columns."""
        rule = _rule(p, want)
        counts = jnp.ones(p.targets.shape, bool) if p.live is None else p.live
        few = few_rows(p, p.live, None)

        def dense() -> tuple[TokenStats, SparseReport, Active]:
            none = no_columns(rule, p.head.vocab)
            return self.own.statistics(p)[0], dense_report(p.head, counts), none

        def sparse() -> tuple[TokenStats, SparseReport, Active]:
            f = _in_order(p, counts)
            stats, maxima = _statistics_and_maxima(f, None)
            out = jax.tree.map(f.put_back, stats)
            active = choose_columns(rule, p, maxima, counts, few, _some(out, few.at), None)
            zero = jnp.zeros((f.p.n,), jnp.float32)
            known, moving = Known(stats, StatCotangents(zero, zero, zero)), jnp.arange(f.p.n) < f.count
            _, report = gradients(rule, Wanted(False, False), f, known, moving, active)
            return out, report, active

        return lax.cond(column_choice.exact_is_cheaper(rule, few), dense, sparse)

    def backward(
        self, p: Problem, want: Wanted, out: TokenStats, g: StatCotangents, residual: Active, only_logp: bool
    ) -> Gradients:
        g = g if p.live is None else without(g, ~p.live)
        f = _in_order(p, g.any_nonzero())
        known = Known(*jax.tree.map(f.take, (out, g)))
        return gradients(_rule(p, want), want, f, known, known.g.any_nonzero(), _without_mesh_axis(residual))[0]

    def gradients_in_forward(self, p: Problem, want: Wanted, loss: Loss) -> tuple[TokenStats, SparseReport, Gradients]:
        rule, counts = _rule(p, want), loss.may_move()
        counts = counts if p.live is None else counts & p.live
        before = loss.inputs.old if loss.inputs.old is not None else loss.inputs.rollout
        few = few_rows(p, counts, before)

        def sparse() -> tuple[TokenStats, SparseReport, Gradients]:
            f = _in_order(p, counts)
            stats, maxima = _statistics_and_maxima(f, before)
            out = jax.tree.map(f.put_back, stats)
            g = live_cotangents(p, loss, out)
            active = choose_columns(rule, p, maxima, counts, few, _some(out, few.at), _some(g, few.at))
            known = Known(stats, jax.tree.map(f.take, g))
            grads, report = gradients(rule, want, f, known, known.g.any_nonzero(), active)
            return out, report, grads

        return lax.cond(column_choice.exact_is_cheaper(rule, few), lambda: self._exact(p, want, loss), sparse)

    def _exact(self, p: Problem, want: Wanted, loss: Loss) -> tuple[TokenStats, SparseReport, Gradients]:
        """The whole call by the exact kernels."""
        out, _, grads = self.own.gradients_in_forward(p, want, loss)
        return out, dense_report(p.head, live_cotangents(p, loss, out).any_nonzero()), grads


def _without_mesh_axis(active: Active) -> Active:
    """A residual over a mesh has a first dimension throughout."""
    return dataclasses.replace(active, count=active.count.reshape(()), dense=active.dense.reshape(()))


def _in_order(p: Problem, first: Array) -> Ordered:
    """Tokens where ``first [N]`` is true first, in whole chunks."""
    interpret = interpreter(p.call.interpret)
    return in_order(p, first, chunk_of(p), lambda h, order, keep: kernels.gather(h, order, interpret, keep))


def _some(tree: PyTree, at: Array) -> PyTree:
    """The rows ``at`` of a tree of ``[N]``."""
    return jax.tree.map(lambda x: x.at[at].get(mode="promise_in_bounds"), tree)


def _statistics_and_maxima(f: Ordered, before: Array | None) -> tuple[TokenStats, Array]:
    """Statistics of the live tokens, in the order of ``f``, and the column maxima of those that come first; ``before``,
    in the order of the call, is known of the targets' log-probabilities."""
    counts = jnp.arange(f.p.n) < f.count
    floor = column_choice.lse_floor(f.p, counts, None if before is None else f.take(before))
    return kernels.token_stats_and_maxima(f.p, f.live, floor)


def _rule(p: Problem, want: Wanted) -> Rule:
    """The sweep that makes dW makes dbias, too."""
    return column_rule(p.head.vocab, max(int(want.hidden) + int(want.weight or want.bias), 1))
