"""Custom gradients over the head-level backends, and the choice between the three ways (docs/maths.md).

:func:`stats` is the general form, by recompute; :func:`token_loss` is grad in forward, for uncoupled objectives. Both
ask ``custom_vjp`` which gradients are wanted: without one for the head there is no dW matmul.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax import Array

from logitless import derivatives
from logitless.head import chunked, forward
from logitless.head.chunked import SweepConfig, Wanted
from logitless.head.operator import Head, HeadGrads
from logitless.objectives.inputs import LossInputs
from logitless.objectives.loss import total_loss
from logitless.objectives.objective import Objective
from logitless.stats import TokenStats
from logitless.transform import LogitTransform


@dataclasses.dataclass(frozen=True)
class HeadCall:
    """Static choices of a head-level call."""

    name: str
    sweep: SweepConfig
    placement: Any = None  # parallel.spec.Placement of a call over a mesh

    def tpu_call(self, logp_only: bool) -> Any:
        """The same for ``pallas_tpu``; ``logp_only``: no gradient of entropy or lse is expected."""
        from logitless.head.pallas_tpu_vjp import TpuCall

        sweep = self.sweep
        return TpuCall(self.name, sweep.vocab_size, sweep.logits_dtype, logp_only, sweep.rows.interpret)


def wanted(h: Any, head: Head) -> Wanted:
    return Wanted(
        hidden=derivatives.wanted(h),
        weight=derivatives.wanted(head.weight),
        bias=derivatives.wanted(head.bias),
        lora=derivatives.wanted((head.lora_a, head.lora_b)),
    )


def refuse(c: HeadCall, head: Head, t: Any, **more: Any) -> None:
    transform = {"temperature, softcap or scale": t}
    derivatives.refuse(c.name, **transform, lora_scale=head.lora_scale, **more)


def as_head(head: Head, grads: HeadGrads) -> Head:
    """Cotangents in the structure of the head; ``None`` (zero) where none was computed."""
    return Head(
        weight=grads.weight,  # type: ignore[arg-type]
        bias=grads.bias,
        lora_a=grads.lora_a,
        lora_b=grads.lora_b,
        lora_scale=None,  # type: ignore[arg-type]
        layout=head.layout,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def stats(c: HeadCall, h: Array, head: Head, targets: Array, t: LogitTransform, live: Array | None) -> TokenStats:
    """Statistics of ``h [N, H]``; differentiable with respect to the hidden states and the head's arrays."""
    return forward.token_stats(c.sweep, h, head, targets, t, live)


def _stats_fwd(c: HeadCall, h: Any, head: Any, targets: Any, t: Any, live: Any) -> tuple[TokenStats, Any]:
    refuse(c, head, t)
    want = derivatives.Static(wanted(h, head))
    args = derivatives.values((h, head, targets, t, live))
    out = forward.token_stats(c.sweep, *args)
    return out, (want, args, out)


def _stats_bwd(c: HeadCall, saved: Any, ct: TokenStats) -> tuple[Any, ...]:
    want, (h, head, targets, t, live), out = saved
    g = derivatives.stat_cotangents(ct)
    dh, grads = chunked.gradients(c.sweep, want.value, h, head, targets, t, live, out, g)
    return dh, as_head(head, grads), None, None, None


stats.defvjp(_stats_fwd, _stats_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_loss(
    c: HeadCall, h: Array, head: Head, targets: Array, t: LogitTransform, objective: Objective, inputs: LossInputs
) -> tuple[Array, TokenStats]:
    """``(loss, statistics)`` of an uncoupled objective; see :func:`logitless.logits.vjp.token_loss`."""
    out = chunked.stats_in_gradient_order(c.sweep, h, head, targets, t, objective, inputs)
    return total_loss(objective, out.logp, out.entropy, inputs), out


def _token_loss_fwd(
    c: HeadCall, h: Any, head: Any, targets: Any, t: Any, objective: Any, inputs: Any
) -> tuple[tuple[Array, TokenStats], Any]:
    refuse(c, head, t, objective=objective, **{"the loss's inputs": inputs})
    want = wanted(h, head)
    h, head, targets, t, objective, inputs = derivatives.values((h, head, targets, t, objective, inputs))
    out, dh, grads = chunked.stats_and_gradients(c.sweep, want, h, head, targets, t, objective, inputs)
    return (total_loss(objective, out.logp, out.entropy, inputs), out), (dh, as_head(head, grads))


def _token_loss_bwd(c: HeadCall, saved: Any, ct: tuple[Any, TokenStats]) -> tuple[Any, ...]:
    return *derivatives.scaled(saved, ct[0]), None, None, None, None


token_loss.defvjp(_token_loss_fwd, _token_loss_bwd, symbolic_zeros=True)
