"""Custom gradients of the head-level calls over a mesh: ``custom_vjp`` outside, ``shard_map`` inside both passes.

:func:`stats` serves every layout. Its forward pass gathers the head over FSDP axes and keeps it for the backward pass,
so that there is one gather a call; a vocabulary-parallel head is never gathered (``vocabulary.py``).
:func:`token_loss` is grad in forward, for uncoupled objectives where every device has the whole vocabulary: one
``shard_map`` gathers the head, takes loss and gradients chunk by chunk and reduces dW.

    collectives              forward                             backward
    tokens, head replicated  none                                all-reduce dW
    tokens, head FSDP        all-gather W                        reduce-scatter dW
    vocabulary-parallel      all-reduce [N] (max), [4, N] (sum)  all-reduce dH; dW over the axes of the tokens, if any
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

from logitless import derivatives
from logitless.head import chunked, forward, vjp
from logitless.head.chunked import Wanted
from logitless.head.operator import Head, HeadGrads
from logitless.head.vjp import HeadCall
from logitless.objectives.inputs import LossInputs
from logitless.objectives.loss import total_loss
from logitless.objectives.objective import Objective
from logitless.parallel import collectives, parts, vocabulary
from logitless.parallel.spec import Placement
from logitless.parallel.tokens import flat, on_devices, token_specs, unflat
from logitless.stats import StatCotangents, TokenStats
from logitless.transform import LogitTransform


@dataclasses.dataclass(frozen=True)
class ShardedHead:
    """Static choices of a call: those of one device, and where the arrays are."""

    call: HeadCall
    backend: str
    logp_only: bool = True  # no gradient of entropy or lse is expected

    @property
    def name(self) -> str:
        return self.call.name

    @property
    def placement(self) -> Placement:
        return self.call.placement

    @property
    def weight_dtype(self) -> Any:
        """In which dW leaves a device: ``None`` is the parameter's own."""
        summed = bool(self.placement.token_axes) and self.call.sweep.sum_head_grad_in == "float32"
        return jnp.float32 if summed else None

    def tpu_call(self) -> Any:
        return self.call.tpu_call(self.logp_only)


def placed(p: Placement, h: Array, head: Head) -> tuple[Array, Head]:
    """Hidden states and head where the placement has them, for a computation that the compiler partitions."""

    def at(x: Array, where: PartitionSpec) -> Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(p.mesh, where))

    return at(h, p.token_spec), jax.tree.map(at, head, collectives.head_specs(p, head))


def _statistics(
    c: ShardedHead, h: Array, head: Head, targets: Array, t: LogitTransform, live: Array | None, direction: bool
) -> tuple[TokenStats, Array | None]:
    """Flat statistics of a device's tokens over the whole vocabulary, and d logp/d hidden if asked for."""
    if c.placement.vocab:
        return vocabulary.statistics(c, h, head, targets, t, live, direction)
    if c.backend == "pallas_tpu":
        from logitless.head import pallas_tpu_vjp

        return pallas_tpu_vjp.forward_sweep(c.tpu_call(), h, head, targets, t, live, direction)
    return forward.token_stats(c.call.sweep, h, head, targets, t, live), None


def _gradients(
    c: ShardedHead,
    want: Wanted,
    h: Array,
    head: Head,
    targets: Array,
    t: LogitTransform,
    live: Array | None,
    out: TokenStats,
    g: StatCotangents,
    direction: Array | None,
) -> tuple[Array | None, HeadGrads]:
    """Flat dH, complete, and a device's own part of the head's gradients."""
    if c.placement.vocab:
        return vocabulary.gradients(c, want, h, head, targets, t, live, out, g, direction)
    if c.backend == "pallas_tpu":
        from logitless.head import pallas_tpu_vjp

        dh, dweight, dbias = pallas_tpu_vjp.gradients(
            c.tpu_call(), (want.hidden, want.weight, want.bias), h, head, targets, t, live, out, g, direction,
            c.weight_dtype,
        )  # fmt: skip
        return None if dh is None else dh.astype(h.dtype), HeadGrads(dweight, dbias, None, None)
    sweep = dataclasses.replace(c.call.sweep, partial_head=True)
    return chunked.gradients(sweep, want, h, head, targets, t, live, out, g)


def _forward(
    c: ShardedHead,
    h: Array,
    head: Head,
    targets: Array,
    t: LogitTransform,
    live: Array | None,
    direction: bool,
    keep: bool,
) -> tuple[TokenStats, Array | None, Head | None]:
    """``(statistics, d logp/d hidden, the gathered head)``; the latter two if asked for."""
    p = c.placement

    def local(h: Array, head: Head, targets: Array, t: LogitTransform, live: Array | None) -> Any:
        head = collectives.gather_head(p, head)
        found = _statistics(c, flat(p, h), head, flat(p, targets), flat(p, t), flat(p, live), direction)
        return *unflat(found, targets.shape), head if keep else None

    args = (targets, t, live)
    specs = (p.token_spec, collectives.head_specs(p, head), *token_specs(p, args))
    out_specs = (p.token_spec, p.token_spec, collectives.head_specs(p, head, gathered=True) if keep else None)
    return on_devices(p, local, specs, out_specs)(h, head, *args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def stats(c: ShardedHead, h: Array, head: Head, targets: Array, t: LogitTransform, live: Array | None) -> TokenStats:
    """Statistics of ``h [*tokens, H]``; differentiable with respect to the hidden states and the head's arrays."""
    return _forward(c, h, head, targets, t, live, False, False)[0]


def _stats_fwd(c: ShardedHead, h: Any, head: Any, targets: Any, t: Any, live: Any) -> tuple[TokenStats, Any]:
    vjp.refuse(c.call, head, t)
    want = vjp.wanted(h, head)
    h, head, targets, t, live = derivatives.values((h, head, targets, t, live))
    direction = c.backend == "pallas_tpu" and c.logp_only and want.hidden
    out, d, whole = _forward(c, h, head, targets, t, live, direction, c.placement.gathers)
    return out, (derivatives.Static(want), (h, head, targets, t, live), whole, out, d)


def _stats_bwd(c: ShardedHead, saved: Any, ct: TokenStats) -> tuple[Any, ...]:
    wants, (h, head, targets, t, live), whole, out, direction = saved
    want, p = wants.value, c.placement
    if not (isinstance(ct.entropy, SymbolicZero) and isinstance(ct.lse, SymbolicZero)):
        direction = None
    g = derivatives.stat_cotangents(ct)
    like = head

    def local(h: Array, head: Head, *rest: Any) -> Any:
        targets, t, live, out, g, direction = flat(p, rest)
        rows, apart = flat(p, h), parts.count(c, head, want)
        now = want if apart == 1 else dataclasses.replace(want, weight=False, bias=False)
        dh, grads = _gradients(c, now, rows, head, targets, t, live, out, g, direction)
        if apart == 1:
            grads = collectives.reduce_grads(p, grads, like)
        else:
            grads = parts.reduced_grads(c, apart, want, rows, head, targets, t, live, out, g, like)
        return None if dh is None else dh.reshape(h.shape), grads

    args = (targets, t, live, out, g, direction)
    head_specs = collectives.head_specs(p, head, gathered=True)
    out_specs = (p.token_spec, grad_specs(p, head, want))
    run = on_devices(p, local, (p.token_spec, head_specs, *token_specs(p, args)), out_specs)
    dh, grads = run(h, head if whole is None else whole, *args)
    return dh, vjp.as_head(head, grads), None, None, None


stats.defvjp(_stats_fwd, _stats_bwd, symbolic_zeros=True)


def grad_specs(p: Placement, head: Head, want: Wanted) -> HeadGrads:
    """The PartitionSpec of each gradient that is asked for."""
    specs = collectives.head_specs(p, head)
    return HeadGrads(
        weight=specs.weight if want.weight else None,
        bias=specs.bias if want.bias else None,
        lora_a=specs.lora_a if want.lora else None,
        lora_b=specs.lora_b if want.lora else None,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_loss(
    c: ShardedHead, h: Array, head: Head, targets: Array, t: LogitTransform, objective: Objective, inputs: LossInputs
) -> tuple[Array, TokenStats]:
    """``(loss, statistics)`` of an uncoupled objective over ``h [*tokens, H]``; see
    :func:`logitless.head.vjp.token_loss`."""
    p = c.placement

    def local(h: Array, head: Head, objective: Objective, *rest: Any) -> TokenStats:
        targets, t, inputs = rest
        head = collectives.gather_head(p, head)
        found = chunked.stats_in_gradient_order(
            c.call.sweep, flat(p, h), head, flat(p, targets), flat(p, t), objective, flat(p, inputs)
        )
        return unflat(found, targets.shape)

    args = (h, head, objective, targets, t, inputs)
    out = on_devices(p, local, loss_specs(p, *args), p.token_spec)(*args)
    return total_loss(objective, out.logp, out.entropy, inputs), out


def loss_specs(p: Placement, h: Any, head: Any, objective: Any, *rest: Any) -> Any:
    numbers = jax.tree.map(lambda _: PartitionSpec(), objective)
    return p.token_spec, collectives.head_specs(p, head), numbers, *token_specs(p, rest)


def _token_loss_fwd(
    c: ShardedHead, h: Any, head: Any, targets: Any, t: Any, objective: Any, inputs: Any
) -> tuple[tuple[Array, TokenStats], Any]:
    vjp.refuse(c.call, head, t, objective=objective, **{"the loss's inputs": inputs})
    want, p = vjp.wanted(h, head), c.placement
    h, head, targets, t, objective, inputs = derivatives.values((h, head, targets, t, objective, inputs))
    sweep = dataclasses.replace(c.call.sweep, partial_head=True)

    def local(h: Array, head: Head, objective: Objective, *rest: Any) -> Any:
        targets, t, inputs = rest
        whole = collectives.gather_head(p, head)
        found, dh, grads = chunked.stats_and_gradients(
            sweep, want, flat(p, h), whole, flat(p, targets), flat(p, t), objective, flat(p, inputs)
        )
        dh = None if dh is None else dh.reshape(h.shape)
        return unflat(found, targets.shape), dh, collectives.reduce_grads(p, grads, head)

    args = (h, head, objective, targets, t, inputs)
    out_specs = (p.token_spec, p.token_spec, grad_specs(p, head, want))
    out, dh, grads = on_devices(p, local, loss_specs(p, *args), out_specs)(*args)
    return (total_loss(objective, out.logp, out.entropy, inputs), out), (dh, vjp.as_head(head, grads))


def _token_loss_bwd(c: ShardedHead, saved: Any, ct: tuple[Any, TokenStats]) -> tuple[Any, ...]:
    return *derivatives.scaled(saved, ct[0]), None, None, None, None


token_loss.defvjp(_token_loss_fwd, _token_loss_bwd, symbolic_zeros=True)
