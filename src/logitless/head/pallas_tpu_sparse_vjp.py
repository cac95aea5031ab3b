"""Custom gradients of the sparse backward on TPU; those of ``sparse_vjp.py`` over ``pallas_tpu_sparse.py``.

token_loss   uncoupled objectives: gradients in the forward pass, where the cotangents follow from the statistics
             1 + 3 K/V matmuls a token, 4 a hard row; exact kernels (4) if a look at a few rows shows flat logits
stats        any cotangents, later: 1 + K/V in the forward pass (the report's masses), 3 K/V in the backward pass,
             4 a hard row, which is every row if the logits are flat
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless import derivatives
from logitless.head import pallas_tpu, pallas_tpu_sparse, pallas_tpu_vjp
from logitless.head import pallas_tpu_sparse_columns as columns_of
from logitless.head.operator import Head
from logitless.head.pallas_tpu_sparse_columns import Active, Few, choose_columns, column_passes, few_rows
from logitless.head.pallas_tpu_vjp import TpuCall
from logitless.head.sparse_columns import ColumnPasses
from logitless.head.sparse_report import SparseReport, blank_report
from logitless.head.sweep import front
from logitless.objectives.inputs import LossInputs
from logitless.objectives.loss import cotangents, may_have_gradient, total_loss
from logitless.objectives.objective import Objective
from logitless.stats import StatCotangents, TokenStats
from logitless.transform import LogitTransform

Wants = tuple[bool, bool, bool]  # gradients of the hidden states, the head, its bias


def _wants(h: Any, head: Head) -> Wants:
    return derivatives.wanted(h), derivatives.wanted(head.weight), derivatives.wanted(head.bias)


def _backward(wants: Wants) -> int:
    """Matmuls of the backward pass, without those that recompute logits."""
    return max(int(wants[0]) + int(wants[1] or wants[2]), 1)


def _options(c: TpuCall) -> dict[str, Any]:
    return dict(vocab_size=c.vocab_size, logits_dtype=c.logits_dtype, interpret=c.interpret)


def _as_head(head: Head, dweight: Array | None, dbias: Array | None) -> Head:
    return Head(
        weight=dweight,  # type: ignore[arg-type]
        bias=None if dbias is None or head.bias is None else dbias.astype(head.bias.dtype),
        lora_scale=None,  # type: ignore[arg-type]
        layout=head.layout,
    )


def _sweep_with_maxima(
    c: TpuCall, h: Array, head: Head, targets: Array, t: LogitTransform, live: Array | None, counts: Array
) -> tuple[TokenStats, Array]:
    """Statistics of the live tokens, and the column maxima of those that ``counts``."""
    floor = columns_of.lse_floor(h, head, targets, t, counts, c.vocab_size)
    f = front(live)
    stats, maxima = pallas_tpu.token_stats_and_maxima(
        f.take(h), head.weight, f.take(targets), f.take(floor), **c.options(head, f.transform(t), f.count)
    )
    return jax.tree.map(f.put_back, stats), maxima


def _all_dense(head: Head, moving: Array) -> SparseReport:
    """The report of a backward pass by the exact kernels."""
    zero, one = jnp.float32(0), jnp.int32(1)
    nothing = jnp.zeros(moving.shape, jnp.float32)
    return SparseReport(nothing, moving, jnp.zeros_like(moving), one, one, zero, jnp.float32(head.vocab))


# -- any cotangents ----------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def stats(
    c: TpuCall, h: Array, head: Head, targets: Array, t: LogitTransform, live: Array | None, tolerance: Array
) -> tuple[TokenStats, SparseReport]:
    """:func:`logitless.head.pallas_tpu_vjp.stats`; the report is empty unless a gradient is taken."""
    return pallas_tpu_vjp.forward_sweep(c, h, head, targets, t, live, False)[0], blank_report(h.shape[0])


def _stats_fwd(
    c: TpuCall, h: Any, head: Any, targets: Any, t: Any, live: Any, tolerance: Any
) -> tuple[tuple[TokenStats, SparseReport], Any]:
    derivatives.refuse(c.name, **{"temperature, softcap or scale": t, "sparse_backward": tolerance})
    wants = _wants(h, head)
    h, head, targets, t, live, tolerance = args = derivatives.values((h, head, targets, t, live, tolerance))
    p = column_passes(c.vocab_size, head)
    counts = jnp.ones(targets.shape, bool) if live is None else live
    few = few_rows(p, h, head, targets, t, live)

    def dense() -> tuple[TokenStats, Active, SparseReport]:
        out, _ = pallas_tpu_vjp.forward_sweep(c, h, head, targets, t, live, False)
        return out, columns_of.no_columns(p, head.vocab), _all_dense(head, counts)

    def sparse() -> tuple[TokenStats, Active, SparseReport]:
        out, maxima = _sweep_with_maxima(c, h, head, targets, t, live, counts)
        active = choose_columns(p, head, maxima, targets, counts, few, None, tolerance, _backward(wants))
        *_, report = pallas_tpu_sparse.gradients(
            _options(c), p, (False,) * 3, h, head, targets, t, counts, out, None, active, tolerance
        )
        return out, active, report

    flat = columns_of.exact_is_cheaper(p, few, tolerance, _backward(wants))
    out, active, report = lax.cond(flat, dense, sparse)
    return (out, report), (derivatives.Static(wants), args, out, active)


def _stats_bwd(c: TpuCall, saved: Any, ct: tuple[TokenStats, SparseReport]) -> tuple[Any, ...]:
    wants, (h, head, targets, t, live, tolerance), out, active = saved
    g = derivatives.stat_cotangents(ct[0])
    moving = g.any_nonzero() if live is None else g.any_nonzero() & live
    dh, dweight, dbias, _ = pallas_tpu_sparse.gradients(
        _options(c), column_passes(c.vocab_size, head), wants.value, h, head, targets, t, moving, out, g, active,
        tolerance,
    )  # fmt: skip
    return dh, _as_head(head, dweight, dbias), None, None, None, None


stats.defvjp(_stats_fwd, _stats_bwd, symbolic_zeros=True)


# -- uncoupled objectives ----------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_loss(
    c: TpuCall,
    h: Array,
    head: Head,
    targets: Array,
    t: LogitTransform,
    live: Array | None,
    objective: Objective,
    inputs: LossInputs,
    tolerance: Array,
) -> tuple[Array, TokenStats, SparseReport]:
    """``(loss, statistics, report)``; the report is empty unless a gradient is taken. ``live`` is the inputs' mask, or
    ``None`` where every token is live."""
    out, _ = pallas_tpu_vjp.forward_sweep(c, h, head, targets, t, live, False)
    return total_loss(objective, out.logp, out.entropy, inputs), out, blank_report(h.shape[0])


def _token_loss_fwd(
    c: TpuCall, h: Any, head: Any, targets: Any, t: Any, live: Any, objective: Any, inputs: Any, tolerance: Any
) -> tuple[tuple[Array, TokenStats, SparseReport], Any]:
    constants = {"temperature, softcap or scale": t, "objective": objective, "the loss's inputs": inputs}
    derivatives.refuse(c.name, **constants, sparse_backward=tolerance)
    wants = _wants(h, head)
    h, head, targets, t, live, objective, inputs, tolerance = derivatives.values(
        (h, head, targets, t, live, objective, inputs, tolerance)
    )
    p = column_passes(c.vocab_size, head)
    counts = may_have_gradient(objective, inputs)
    few = few_rows(p, h, head, targets, t, counts)

    def cotangents_of(out: TokenStats) -> StatCotangents:
        g_logp, g_entropy = cotangents(objective, out.logp, out.entropy, inputs)
        g = StatCotangents(g_logp, g_entropy, jnp.zeros_like(g_logp))
        return g if live is None else jax.tree.map(lambda x: jnp.where(live, x, 0.0), g)

    def exact() -> tuple[TokenStats, Any, SparseReport]:
        out, direction = pallas_tpu_vjp.forward_sweep(c, h, head, targets, t, live, wants[0] and c.logp_only)
        g = cotangents_of(out)
        dh, *rest = pallas_tpu_vjp.gradients(c, wants, h, head, targets, t, live, out, g, direction)
        return out, (None if dh is None else dh.astype(h.dtype), *rest), _all_dense(head, g.any_nonzero())

    def sparse() -> tuple[TokenStats, Any, SparseReport]:
        return _sparse_loss_gradients(c, p, wants, h, head, targets, t, live, counts, few, cotangents_of, tolerance)

    flat = columns_of.exact_is_cheaper(p, few, tolerance, _backward(wants))
    out, (dh, dweight, dbias), report = lax.cond(flat, exact, sparse)
    loss = total_loss(objective, out.logp, out.entropy, inputs)
    return (loss, out, report), (dh, _as_head(head, dweight, dbias))


def _sparse_loss_gradients(
    c: TpuCall,
    p: ColumnPasses,
    wants: Wants,
    h: Array,
    head: Head,
    targets: Array,
    t: LogitTransform,
    live: Array | None,
    counts: Array,
    few: Few,
    cotangents_of: Any,
    tolerance: Array,
) -> tuple[TokenStats, Any, SparseReport]:
    out, maxima = _sweep_with_maxima(c, h, head, targets, t, live, counts)
    g = cotangents_of(out)
    few_g = jax.tree.map(lambda x: x[few.at], g)
    active = choose_columns(p, head, maxima, targets, counts, few, few_g, tolerance, _backward(wants))
    dh, dweight, dbias, report = pallas_tpu_sparse.gradients(
        _options(c), p, wants, h, head, targets, t, g.any_nonzero(), out, g, active, tolerance
    )
    return out, (dh, dweight, dbias), report


def _token_loss_bwd(c: TpuCall, saved: Any, ct: tuple[Any, TokenStats, SparseReport]) -> tuple[Any, ...]:
    return *derivatives.scaled(saved, ct[0]), None, None, None, None, None, None


token_loss.defvjp(_token_loss_fwd, _token_loss_bwd, symbolic_zeros=True)
