"""The sparse backward on TPU where a device has a part of the vocabulary (``mesh/vocab_parallel_sparse.py``).

    forward    statistics of all shards first; then the shard's columns by a second sweep, whose bound is the logsumexp
               of all shards and so exact (M), and the mass that each row keeps in them (M K / V)
    backward   x, dx, dh and dW over the shard's columns (3 M K / V), hard rows by the exact kernels

What a shard leaves out of a row is the mass of its columns, known from the second sweep's sums, minus the mass kept:

    sum over the shard of p - sum over its active columns of p

The error of the second sum is a part of it (``MASS_ERROR``), so it adds up to that of one device over all shards. A
shard without sharp rows of its own, as a few of them show, is dense: all its rows go through the exact kernels.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from logitless.core.problem import Gradients, Problem, Wanted
from logitless.core.pytree import register
from logitless.core.stats import RowSums, TokenStats, log_probability, valid_targets
from logitless.core.transform import factor
from logitless.head.pallas_tpu import kernels, slabs, sparse_columns
from logitless.head.pallas_tpu.backend import front
from logitless.head.pallas_tpu.gathered import MASS_ERROR
from logitless.head.pallas_tpu.sparse_columns import Active, choose_columns, few_rows
from logitless.head.sparse.active_columns import Rule
from logitless.head.sparse.column_gather import Known
from logitless.head.sparse.report import SparseReport


@register
@dataclasses.dataclass(frozen=True)
class ShardColumns:
    """The active columns of a shard, and what they leave out of each row."""

    active: Active
    left_out: Array  # [N] float32; infinite where the shard is dense


def find(rule: Rule, p: Problem, out: TokenStats, share: Array) -> tuple[ShardColumns, SparseReport]:
    """The columns of a shard, from the statistics ``out`` of all of them; ``share`` is what a row may leave out here if
    nobody knows what it leaves out elsewhere. Which rows are hard is not decided here: the report has none, and all of
    the masses."""
    counts = jnp.ones(p.targets.shape, bool) if p.live is None else p.live
    few = few_rows(p, p.live, out)

    def dense() -> tuple[Active, Array]:
        return sparse_columns.no_columns(rule, p.head.vocab), jnp.zeros(p.targets.shape, jnp.float32)

    def sparse() -> tuple[Active, Array]:
        f = front(p.live)
        floor = jnp.where(counts & jnp.isfinite(out.lse), out.lse, jnp.inf)
        sums, maxima = kernels.token_sums_and_maxima(f.problem(p), f.count, f.take(floor))
        active = choose_columns(rule, p, maxima, counts, few, None, share)
        kept = slabs.sweep(rule, Wanted(False, False), p, counts, out, None, active).kept
        whole = _mass(p, jax.tree.map(f.put_back, sums), out)
        return active, jnp.where(counts, jnp.maximum(whole - (1.0 - MASS_ERROR) * kept, 0.0), 0.0)

    active, mass = lax.cond(sparse_columns.exact_is_cheaper(rule, few), dense, sparse)
    mass = jnp.where(active.dense, 0.0, mass)
    report = slabs.report_of(rule, p, counts, active, mass, jnp.zeros_like(counts))
    return ShardColumns(active, jnp.where(active.dense, jnp.inf, mass)), report


def _mass(p: Problem, sums: RowSums, out: TokenStats) -> Array:
    """``[N]``: the mass of a shard's columns."""
    others = sums.total * jnp.exp(log_probability(sums.maximum, factor(p.transform), out))
    return others + jnp.where(valid_targets(p.targets, p.call.vocab_size), jnp.exp(out.logp), 0.0)


def gradients(rule: Rule, want: Wanted, p: Problem, known: Known, found: ShardColumns, hard: Array) -> Gradients:
    """The gradients of a shard where it is known which rows are ``hard [N]``: those go through all of its columns."""
    moving = known.g.any_nonzero() if p.live is None else known.g.any_nonzero() & p.live
    swept = slabs.sweep(rule, want, p, moving & ~found.active.dense, known.stats, known.g, found.active)
    mass = jnp.where(moving & jnp.isfinite(found.left_out), found.left_out, 0.0)
    return slabs.assembled(rule, want, p, known, found.active, swept, mass, hard & moving)
