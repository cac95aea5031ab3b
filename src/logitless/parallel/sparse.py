"""The sparse backward over a mesh: ``parallel/head.py`` with a tolerance, and a report of all devices.

Where every device has the whole vocabulary, each does with its own tokens what one device does, on the gathered head;
its chunks, columns and hard rows are its own, and dW is summed over devices as without the option.

A vocabulary-parallel head has its active columns on each shard for itself (``sparse_vocabulary.py``).

    collectives more than without it     forward                                              backward
    tokens sharded                       all-reduce of four numbers, and the metrics' scalars none
    vocabulary-parallel                  the same, and all-reduce [3, N]                      none
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from logitless import derivatives
from logitless.head import chunked, sparse, sparse_recompute, vjp
from logitless.head.operator import Head
from logitless.head.sparse_recompute import ChunkColumns
from logitless.head.sparse_report import SparseReport, blank_report
from logitless.objectives.inputs import LossInputs
from logitless.objectives.loss import total_loss
from logitless.objectives.objective import Objective
from logitless.parallel import collectives, vocabulary
from logitless.parallel import head as parallel_head
from logitless.parallel.head import ShardedHead
from logitless.parallel.sparse_vocabulary import Found, shard_columns, shard_gradients
from logitless.parallel.spec import Placement
from logitless.parallel.tokens import flat, on_devices, token_specs, unflat
from logitless.stats import TokenStats
from logitless.transform import LogitTransform

# -- reports ---------------------------------------------------------------------------------------------------------


def _report_specs(p: Placement) -> SparseReport:
    tokens, number = p.token_spec, PartitionSpec()
    return SparseReport(tokens, tokens, tokens, number, number, number, number)  # type: ignore[arg-type]


def _blank(p: Placement, shape: tuple[int, ...]) -> SparseReport:
    """The report of a call without a gradient."""
    report = blank_report(1)
    of_tokens = {k: jnp.zeros(shape, getattr(report, k).dtype) for k in ("left_out", "rows", "hard")}
    if p.vocab:
        of_tokens["hard"] = jnp.zeros(shape, jnp.float32)
    return dataclasses.replace(report, **of_tokens)


def _of_all_devices(p: Placement, r: SparseReport, shape: tuple[int, ...]) -> SparseReport:
    """A device's report with the counts of all devices, and its tokens in their own ``shape``.

    A chunk of a vocabulary shard counts as one; its columns count by the number of shards, so that their share of the
    vocabulary is that of the shard's own columns.
    """
    axes, shards = (*p.token_axes, *p.vocab), p.count(p.vocab)
    counts = jnp.stack([r.chunks.astype(jnp.float32), r.dense_chunks, shards * r.active, shards * r.width])
    chunks, dense, active, width = lax.psum(counts, axes) if axes else counts
    left_out, rows, hard = unflat((r.left_out, r.rows, r.hard), shape)
    return SparseReport(
        left_out,
        rows,
        hard,
        chunks=chunks.astype(jnp.int32),
        dense_chunks=dense.astype(jnp.int32),
        active=active,
        width=width,
    )


# -- by recompute ----------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def stats(
    c: ShardedHead, h: Array, head: Head, targets: Array, t: LogitTransform, live: Array | None, tolerance: Array
) -> tuple[TokenStats, SparseReport]:
    """:func:`logitless.parallel.head.stats`; the report is empty unless a gradient is taken."""
    p = c.placement

    def local(h: Array, head: Head, *rest: Any) -> TokenStats:
        whole, (targets, t, live) = collectives.gather_head(p, head), flat(p, rest)
        if p.vocab:
            found, _ = vocabulary.statistics(c, flat(p, h), whole, targets, t, live, direction=False)
        else:
            found = chunked.token_stats(c.call.sweep, flat(p, h), whole, targets, t, live)
        return unflat(found, rest[0].shape)

    rest = (targets, t, live)
    specs = (p.token_spec, collectives.head_specs(p, head), *token_specs(p, rest))
    return on_devices(p, local, specs, p.token_spec)(h, head, *rest), _blank(p, targets.shape)


def _found_specs(p: Placement) -> Found:
    """Each device's own columns lie one after the other; the masses are the tokens'."""
    own = PartitionSpec((*p.token_axes, *p.vocab) or None)
    return Found(ChunkColumns(own, own, own), p.token_spec if p.vocab else None)  # type: ignore[arg-type]


def _stats_fwd(
    c: ShardedHead, h: Any, head: Any, targets: Any, t: Any, live: Any, tolerance: Any
) -> tuple[tuple[TokenStats, SparseReport], Any]:
    vjp.refuse(c.call, head, t, sparse_backward=tolerance)
    want, p = vjp.wanted(h, head), c.placement
    h, head, targets, t, live, tolerance = derivatives.values((h, head, targets, t, live, tolerance))

    def local(h: Array, head: Head, tolerance: Array, *rest: Any) -> Any:
        whole, shape = collectives.gather_head(p, head), rest[0].shape
        args = (flat(p, h), whole, *flat(p, rest), tolerance)
        if p.vocab:
            out, found, report = shard_columns(c, want, *args)
            found = dataclasses.replace(found, total=unflat(found.total, shape))
        else:
            out, kept, report = sparse_recompute.stats_and_columns(c.call.sweep, want, *args)
            found = Found(kept, None)
        report = _of_all_devices(p, report, shape)
        return unflat(out, shape), report, found, whole if p.gathers else None

    args = (targets, t, live)
    specs = (p.token_spec, collectives.head_specs(p, head), PartitionSpec(), *token_specs(p, args))
    whole_specs = collectives.head_specs(p, head, gathered=True) if p.gathers else None
    out_specs = (p.token_spec, _report_specs(p), _found_specs(p), whole_specs)
    out, report, found, whole = on_devices(p, local, specs, out_specs)(h, head, tolerance, *args)
    return (out, report), (derivatives.Static(want), (h, head, targets, t, live, tolerance), whole, out, found)


def _stats_bwd(c: ShardedHead, saved: Any, ct: tuple[TokenStats, SparseReport]) -> tuple[Any, ...]:
    wants, (h, head, targets, t, live, tolerance), whole, out, found = saved
    want, p, like = wants.value, c.placement, head

    def local(h: Array, head: Head, tolerance: Array, found: Found, *rest: Any) -> Any:
        rows, (targets, t, live, out, g) = flat(p, h), flat(p, rest)
        if p.vocab:
            own = dataclasses.replace(found, total=flat(p, found.total))
            dh, grads = shard_gradients(c, want, rows, head, targets, t, live, out, g, own, tolerance)
        else:
            sweep = dataclasses.replace(c.call.sweep, partial_head=True)
            dh, grads = sparse_recompute.gradients(
                sweep, want, rows, head, targets, t, live, out, g, found.kept, tolerance
            )
        return None if dh is None else dh.reshape(h.shape), collectives.reduce_grads(p, grads, like)

    args = (targets, t, live, out, derivatives.stat_cotangents(ct[0]))
    head_specs = collectives.head_specs(p, head, gathered=True)
    specs = (p.token_spec, head_specs, PartitionSpec(), _found_specs(p), *token_specs(p, args))
    run = on_devices(p, local, specs, (p.token_spec, parallel_head.grad_specs(p, head, want)))
    dh, grads = run(h, head if whole is None else whole, tolerance, found, *args)
    return dh, vjp.as_head(head, grads), None, None, None, None


stats.defvjp(_stats_fwd, _stats_bwd, symbolic_zeros=True)


# -- grad in forward -------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_loss(
    c: ShardedHead,
    h: Array,
    head: Head,
    targets: Array,
    t: LogitTransform,
    objective: Objective,
    inputs: LossInputs,
    tolerance: Array,
) -> tuple[Array, TokenStats, SparseReport]:
    """:func:`logitless.parallel.head.token_loss`; the report is empty unless a gradient is taken."""
    loss, out = parallel_head.token_loss(c, h, head, targets, t, objective, inputs)
    return loss, out, _blank(c.placement, targets.shape)


def _token_loss_fwd(
    c: ShardedHead, h: Any, head: Any, targets: Any, t: Any, objective: Any, inputs: Any, tolerance: Any
) -> tuple[tuple[Array, TokenStats, SparseReport], Any]:
    vjp.refuse(c.call, head, t, objective=objective, **{"the loss's inputs": inputs, "sparse_backward": tolerance})
    want, p = vjp.wanted(h, head), c.placement
    h, head, targets, t, objective, inputs, tolerance = derivatives.values(
        (h, head, targets, t, objective, inputs, tolerance)
    )
    sweep = dataclasses.replace(c.call.sweep, partial_head=True)

    def local(h: Array, head: Head, objective: Objective, *rest: Any) -> Any:
        targets, t, inputs, tolerance = rest
        whole = collectives.gather_head(p, head)
        found, dh, grads, report = sparse.stats_and_gradients(
            sweep, want, flat(p, h), whole, flat(p, targets), flat(p, t), objective, flat(p, inputs), tolerance
        )
        dh = None if dh is None else dh.reshape(h.shape)
        report = _of_all_devices(p, report, targets.shape)
        return unflat(found, targets.shape), dh, collectives.reduce_grads(p, grads, head), report

    args = (h, head, objective, targets, t, inputs, tolerance)
    out_specs = (p.token_spec, p.token_spec, parallel_head.grad_specs(p, head, want), _report_specs(p))
    out, dh, grads, report = on_devices(p, local, parallel_head.loss_specs(p, *args), out_specs)(*args)
    return (total_loss(objective, out.logp, out.entropy, inputs), out, report), (dh, vjp.as_head(head, grads))


def _token_loss_bwd(c: ShardedHead, saved: Any, ct: tuple[Any, TokenStats, SparseReport]) -> tuple[Any, ...]:
    return *derivatives.scaled(saved, ct[0]), None, None, None, None, None


token_loss.defvjp(_token_loss_fwd, _token_loss_bwd, symbolic_zeros=True)
