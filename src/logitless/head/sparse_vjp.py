"""Custom gradients of the sparse backward; those of ``vjp.py`` with a tolerance, and a report beside the results."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import Array

from logitless import derivatives
from logitless.head import chunked, sparse, sparse_recompute
from logitless.head.operator import Head
from logitless.head.sparse_report import SparseReport, blank_report
from logitless.head.vjp import HeadCall, as_head, refuse, wanted
from logitless.objectives.inputs import LossInputs
from logitless.objectives.loss import total_loss
from logitless.objectives.objective import Objective
from logitless.stats import TokenStats
from logitless.transform import LogitTransform


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def stats(
    c: HeadCall, h: Array, head: Head, targets: Array, t: LogitTransform, live: Array | None, tolerance: Array
) -> tuple[TokenStats, SparseReport]:
    """:func:`logitless.head.vjp.stats`; the report is empty unless a gradient is taken."""
    return chunked.token_stats(c.sweep, h, head, targets, t, live), blank_report(h.shape[0])


def _stats_fwd(
    c: HeadCall, h: Any, head: Any, targets: Any, t: Any, live: Any, tolerance: Any
) -> tuple[tuple[TokenStats, SparseReport], Any]:
    refuse(c, head, t, sparse_backward=tolerance)
    want = wanted(h, head)
    args = derivatives.values((h, head, targets, t, live, tolerance))
    out, kept, report = sparse_recompute.stats_and_columns(c.sweep, want, *args)
    return (out, report), (derivatives.Static(want), args, out, kept)


def _stats_bwd(c: HeadCall, saved: Any, ct: tuple[TokenStats, SparseReport]) -> tuple[Any, ...]:
    want, (h, head, targets, t, live, tolerance), out, kept = saved
    g = derivatives.stat_cotangents(ct[0])
    dh, grads = sparse_recompute.gradients(c.sweep, want.value, h, head, targets, t, live, out, g, kept, tolerance)
    return dh, as_head(head, grads), None, None, None, None


stats.defvjp(_stats_fwd, _stats_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_loss(
    c: HeadCall,
    h: Array,
    head: Head,
    targets: Array,
    t: LogitTransform,
    objective: Objective,
    inputs: LossInputs,
    tolerance: Array,
) -> tuple[Array, TokenStats, SparseReport]:
    """:func:`logitless.head.vjp.token_loss`; the report is empty unless a gradient is taken."""
    out = chunked.stats_in_gradient_order(c.sweep, h, head, targets, t, objective, inputs)
    return total_loss(objective, out.logp, out.entropy, inputs), out, blank_report(h.shape[0])


def _token_loss_fwd(
    c: HeadCall, h: Any, head: Any, targets: Any, t: Any, objective: Any, inputs: Any, tolerance: Any
) -> tuple[tuple[Array, TokenStats, SparseReport], Any]:
    refuse(c, head, t, objective=objective, **{"the loss's inputs": inputs, "sparse_backward": tolerance})
    want = wanted(h, head)
    h, head, targets, t, objective, inputs, tolerance = derivatives.values(
        (h, head, targets, t, objective, inputs, tolerance)
    )
    out, dh, grads, report = sparse.stats_and_gradients(
        c.sweep, want, h, head, targets, t, objective, inputs, tolerance
    )
    return (total_loss(objective, out.logp, out.entropy, inputs), out, report), (dh, as_head(head, grads))


def _token_loss_bwd(c: HeadCall, saved: Any, ct: tuple[Any, TokenStats, SparseReport]) -> tuple[Any, ...]:
    return *derivatives.scaled(saved, ct[0]), None, None, None, None, None


token_loss.defvjp(_token_loss_fwd, _token_loss_bwd, symbolic_zeros=True)
