"""Custom gradients over the logits-level backends.

:func:`stats` is the general form: statistics now, dlogits later from whatever cotangents arrive. :func:`token_loss` is
for uncoupled objectives: the statistics and the dlogits of a unit loss come out of one pass over the logits.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax import Array

from logitless import derivatives
from logitless.logits import chunked
from logitless.objectives.inputs import LossInputs
from logitless.objectives.loss import total_loss
from logitless.objectives.objective import Objective
from logitless.objectives.token_program import token_program
from logitless.stats import StatCotangents, TokenStats
from logitless.transform import LogitTransform


@dataclasses.dataclass(frozen=True)
class LogitsCall:
    """Static choices of a logits-level call."""

    name: str
    backend: str
    vocab_size: int
    donate: bool = False
    bwd_impl: str = "pallas"
    interpret: bool = False
    chunk: int | None = None
    placement: Any = None  # parallel.spec.Placement of a call over a mesh

    def module(self) -> Any:
        """The backend's module."""
        if self.backend == "pallas_tpu":
            from logitless.logits import pallas_tpu

            return pallas_tpu
        if self.backend == "mosaic_gpu":
            from logitless.logits import mosaic_gpu

            return mosaic_gpu
        return chunked

    def options(self, writes: bool) -> dict[str, Any]:
        """Keyword arguments of the backend's functions."""
        if self.backend == "chunked":
            return {"chunk": self.chunk}
        return {"interpret": self.interpret, "donate": self.donate} if writes else {"interpret": self.interpret}


def token_statistics(c: LogitsCall, logits: Array, targets: Array, t: LogitTransform, live: Array | None) -> TokenStats:
    """Statistics by the call's backend, without a gradient of their own."""
    return c.module().token_stats(logits, targets, t, c.vocab_size, live, **c.options(writes=False))


def dlogits(
    c: LogitsCall,
    logits: Array,
    targets: Array,
    t: LogitTransform,
    live: Array | None,
    s: TokenStats,
    g: StatCotangents,
) -> Array:
    """dlogits by the call's backend."""
    if c.bwd_impl == "jax":
        return chunked.dlogits(logits, targets, t, c.vocab_size, live, s, g, chunk=c.chunk)
    return c.module().dlogits(logits, targets, t, c.vocab_size, live, s, g, **c.options(writes=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def stats(c: LogitsCall, logits: Array, targets: Array, t: LogitTransform, live: Array | None) -> TokenStats:
    """Statistics of ``logits [N, V]``; differentiable with respect to the logits."""
    return token_statistics(c, logits, targets, t, live)


def _stats_fwd(c: LogitsCall, logits: Any, targets: Any, t: Any, live: Any) -> tuple[TokenStats, Any]:
    derivatives.refuse(c.name, **{"temperature, softcap or scale": t})
    args = derivatives.values((logits, targets, t, live))
    out = token_statistics(c, *args)
    return out, (args, out)


def _stats_bwd(c: LogitsCall, saved: Any, ct: TokenStats) -> tuple[Any, ...]:
    (logits, targets, t, live), out = saved
    return dlogits(c, logits, targets, t, live, out, derivatives.stat_cotangents(ct)), None, None, None


stats.defvjp(_stats_fwd, _stats_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_loss(
    c: LogitsCall, logits: Array, targets: Array, t: LogitTransform, objective: Objective, inputs: LossInputs
) -> tuple[Array, TokenStats]:
    """``(loss, statistics)`` of an uncoupled objective; the loss is differentiable with respect to the logits.

    The statistics are for metrics: a cotangent that reaches them is an error of the caller, so wrap them in
    ``stop_gradient``.
    """
    out = token_statistics(c, logits, targets, t, inputs.mask)
    return total_loss(objective, out.logp, out.entropy, inputs), out


def _token_loss_fwd(
    c: LogitsCall, logits: Any, targets: Any, t: Any, objective: Any, inputs: Any
) -> tuple[tuple[Array, TokenStats], Any]:
    derivatives.refuse(
        c.name, **{"temperature, softcap or scale": t}, objective=objective, **{"the loss's inputs": inputs}
    )
    needed = derivatives.wanted(logits)
    logits, targets, t, objective, inputs = derivatives.values((logits, targets, t, objective, inputs))
    if not needed:
        out = token_statistics(c, logits, targets, t, inputs.mask)
        return (total_loss(objective, out.logp, out.entropy, inputs), out), None
    program = token_program(objective, inputs)
    out, d = c.module().stats_and_dlogits(
        logits, targets, t, c.vocab_size, inputs.mask, program, **c.options(writes=True)
    )
    return (total_loss(objective, out.logp, out.entropy, inputs), out), d


def _token_loss_bwd(c: LogitsCall, d: Any, ct: tuple[Any, TokenStats]) -> tuple[Any, ...]:
    return derivatives.scaled(d, ct[0]), None, None, None, None


token_loss.defvjp(_token_loss_fwd, _token_loss_bwd, symbolic_zeros=True)
