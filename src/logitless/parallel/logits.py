"""Custom gradients of the logits-level calls over a mesh: ``custom_vjp`` outside, ``shard_map`` inside both passes.

Where only tokens are sharded, each device works on its own rows and nothing crosses the wire but the loss's scalars.
Where the vocabulary is sharded too, the sums over a device's own columns are merged (five numbers a token, see
``collectives.merge_sums``), and dlogits follow from the global statistics without another collective.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from logitless import derivatives
from logitless.logits import vjp
from logitless.logits.vjp import LogitsCall
from logitless.objectives.inputs import LossInputs
from logitless.objectives.loss import total_loss
from logitless.objectives.objective import Objective
from logitless.objectives.token_program import token_program
from logitless.parallel.collectives import by_columns, own_targets, zeros
from logitless.parallel.spec import Placement
from logitless.parallel.tokens import flat, on_devices, token_specs, unflat
from logitless.parallel.vocabulary import finished, no_columns
from logitless.stats import RowSums, StatCotangents, TokenStats
from logitless.transform import LogitTransform


def logits_spec(p: Placement) -> PartitionSpec:
    """Of the logits and dlogits."""
    return PartitionSpec(*p.token_spec, p.vocab or None)


def placed(p: Placement, logits: Array) -> Array:
    """Logits where the placement has them, for a computation that the compiler partitions."""
    return jax.lax.with_sharding_constraint(logits, NamedSharding(p.mesh, logits_spec(p)))


def _statistics(c: LogitsCall, logits: Array, targets: Array, t: LogitTransform, live: Array | None) -> TokenStats:
    """Flat statistics of a device's tokens over the whole vocabulary."""
    p, width = c.placement, logits.shape[-1]
    if not p.vocab:
        return vjp.token_statistics(c, logits, targets, t, live)
    own = own_targets(p, targets, width)

    def sums(columns: int) -> RowSums:
        return c.module().token_sums(logits, own, t, columns, live, **c.options(writes=False))

    return finished(p.vocab, by_columns(p, c.vocab_size, width, sums, no_columns), targets, c.vocab_size, live)


def _dlogits(
    c: LogitsCall,
    logits: Array,
    targets: Array,
    t: LogitTransform,
    live: Array | None,
    s: TokenStats,
    g: StatCotangents,
) -> Array:
    """Flat dlogits of a device's own columns from the statistics of the whole vocabulary."""
    p, width = c.placement, logits.shape[-1]
    if not p.vocab:
        return vjp.dlogits(c, logits, targets, t, live, s, g)
    own = own_targets(p, targets, width)

    def gradient(columns: int) -> Array:
        return vjp.dlogits(dataclasses.replace(c, vocab_size=columns), logits, own, t, live, s, g)

    return by_columns(p, c.vocab_size, width, gradient, zeros)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def stats(c: LogitsCall, logits: Array, targets: Array, t: LogitTransform, live: Array | None) -> TokenStats:
    """Statistics of ``logits [*tokens, V]``; differentiable with respect to the logits."""
    p = c.placement

    def local(logits: Array, *rest: Any) -> TokenStats:
        return unflat(_statistics(c, flat(p, logits), *flat(p, rest)), rest[0].shape)

    args = (targets, t, live)
    return on_devices(p, local, (logits_spec(p), *token_specs(p, args)), p.token_spec)(logits, *args)


def _stats_fwd(c: LogitsCall, logits: Any, targets: Any, t: Any, live: Any) -> tuple[TokenStats, Any]:
    derivatives.refuse(c.name, **{"temperature, softcap or scale": t})
    args = derivatives.values((logits, targets, t, live))
    out = stats(c, *args)
    return out, (args, out)


def _stats_bwd(c: LogitsCall, saved: Any, ct: TokenStats) -> tuple[Any, ...]:
    (logits, *args), out = saved
    p = c.placement

    def local(logits: Array, *rest: Any) -> Array:
        return _dlogits(c, flat(p, logits), *flat(p, rest)).reshape(logits.shape)

    rest = (*args, out, derivatives.stat_cotangents(ct))
    run = on_devices(p, local, (logits_spec(p), *token_specs(p, rest)), logits_spec(p))
    return run(logits, *rest), None, None, None


stats.defvjp(_stats_fwd, _stats_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_loss(
    c: LogitsCall, logits: Array, targets: Array, t: LogitTransform, objective: Objective, inputs: LossInputs
) -> tuple[Array, TokenStats]:
    """``(loss, statistics)`` of an uncoupled objective where only tokens are sharded; see
    :func:`logitless.logits.vjp.token_loss`."""
    out = stats(c, logits, targets, t, inputs.mask)
    return total_loss(objective, out.logp, out.entropy, inputs), out


def _token_loss_fwd(
    c: LogitsCall, logits: Any, targets: Any, t: Any, objective: Any, inputs: Any
) -> tuple[tuple[Array, TokenStats], Any]:
    derivatives.refuse(
        c.name, **{"temperature, softcap or scale": t}, objective=objective, **{"the loss's inputs": inputs}
    )
    needed, p = derivatives.wanted(logits), c.placement
    logits, targets, t, objective, inputs = derivatives.values((logits, targets, t, objective, inputs))
    if not needed:
        return token_loss(c, logits, targets, t, objective, inputs), None

    def local(logits: Array, objective: Objective, *rest: Any) -> tuple[TokenStats, Array]:
        targets, t, inputs = flat(p, rest)
        found, d = c.module().stats_and_dlogits(
            flat(p, logits), targets, t, c.vocab_size, inputs.mask, token_program(objective, inputs),
            **c.options(writes=True),
        )  # fmt: skip
        return unflat(found, rest[0].shape), d.reshape(logits.shape)

    rest = (targets, t, inputs)
    numbers = jax.tree.map(lambda _: PartitionSpec(), objective)
    specs = (logits_spec(p), numbers, *token_specs(p, rest))
    out, d = on_devices(p, local, specs, (p.token_spec, logits_spec(p)))(logits, objective, *rest)
    return (total_loss(objective, out.logp, out.entropy, inputs), out), d


def _token_loss_bwd(c: LogitsCall, d: Any, ct: tuple[Any, TokenStats]) -> tuple[Any, ...]:
    return derivatives.scaled(d, ct[0]), None, None, None, None


token_loss.defvjp(_token_loss_fwd, _token_loss_bwd, symbolic_zeros=True)
