"""Custom gradients over the TPU's head kernels.

    forward    statistics, and with a gradient of the hidden states D = d logp/d hidden from the same sweep (2 matmuls)
    backward   dH = g_logp D, a multiply, whatever the objective;  dW by its own sweep (2 matmuls)

Cotangents of entropy or lse (an entropy bonus, a user's loss) need dH by a sweep of its own. Live tokens are gathered
to the front for the forward sweep, tokens with a nonzero cotangent for dW's; the kernels skip what lies behind them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from logitless import derivatives
from logitless.head import pallas_tpu
from logitless.head.operator import Head
from logitless.head.sweep import front
from logitless.stats import StatCotangents, TokenStats
from logitless.transform import LogitTransform


@dataclasses.dataclass(frozen=True)
class TpuCall:
    """Static choices of a call."""

    name: str
    vocab_size: int
    logits_dtype: Any
    logp_only: bool  # only logp's cotangent is expected: carry D in the forward sweep
    interpret: bool = False

    def options(self, head: Head, t: LogitTransform, n_live: Array | None) -> dict[str, Any]:
        """Keyword arguments that every kernel takes."""
        return dict(
            layout=head.layout,
            bias=head.bias,
            transform=t,
            vocab_size=self.vocab_size,
            n_live=n_live,
            logits_dtype=self.logits_dtype,
            interpret=self.interpret,
        )


def forward_sweep(
    c: TpuCall, h: Array, head: Head, targets: Array, t: LogitTransform, live: Array | None, direction: bool
) -> tuple[TokenStats, Array | None]:
    f = front(live)
    args = (f.take(h), head.weight, f.take(targets))
    options = c.options(head, f.transform(t), f.count)
    if not direction:
        return jax.tree.map(f.put_back, pallas_tpu.token_stats(*args, **options)), None
    stats, d = pallas_tpu.token_stats_and_direction(*args, **options)
    return jax.tree.map(f.put_back, stats), f.put_back(d)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def stats(c: TpuCall, h: Array, head: Head, targets: Array, t: LogitTransform, live: Array | None) -> TokenStats:
    """Statistics of ``h [N, H]``; differentiable with respect to the hidden states, the head and its bias."""
    return forward_sweep(c, h, head, targets, t, live, False)[0]


def _stats_fwd(c: TpuCall, h: Any, head: Any, targets: Any, t: Any, live: Any) -> tuple[TokenStats, Any]:
    derivatives.refuse(c.name, **{"temperature, softcap or scale": t})
    wants = (derivatives.wanted(h), derivatives.wanted(head.weight), derivatives.wanted(head.bias))
    h, head, targets, t, live = args = derivatives.values((h, head, targets, t, live))
    out, direction = forward_sweep(c, h, head, targets, t, live, wants[0] and c.logp_only)
    return out, (derivatives.Static(wants), args, out, direction)


def gradients(
    c: TpuCall,
    wants: tuple[bool, bool, bool],
    h: Array,
    head: Head,
    targets: Array,
    t: LogitTransform,
    live: Array | None,
    out: TokenStats,
    g: StatCotangents,
    direction: Array | None,
    weight_dtype: Any = None,
) -> tuple[Array | None, Array | None, Array | None]:
    """``(dH float32, dW in weight_dtype or its own, dbias float32)``, those that are wanted (hidden, weight, bias).

    ``direction`` is given where only logp has a cotangent.
    """
    want_hidden, want_weight, want_bias = wants
    if live is not None:
        g = jax.tree.map(lambda x: jnp.where(live, x, 0.0), g)

    dh = dweight = dbias = None
    if want_hidden and direction is not None:
        dh = jnp.where((g.logp != 0)[:, None], g.logp[:, None] * direction, 0.0)
    f = front(g.any_nonzero())
    if (want_hidden and dh is None) or want_weight or want_bias:
        args = (f.take(h), head.weight, f.take(targets), jax.tree.map(f.take, out), jax.tree.map(f.take, g))
        options = c.options(head, f.transform(t), f.count)
        if want_hidden and dh is None:
            dh = f.put_back(pallas_tpu.dhidden(*args, **options))
        if want_weight or want_bias:
            dweight, dbias = pallas_tpu.dhead(*args, **options, out_dtype=weight_dtype)
    return dh, dweight if want_weight else None, dbias if want_bias else None


def _stats_bwd(c: TpuCall, saved: Any, ct: TokenStats) -> tuple[Any, ...]:
    wants, (h, head, targets, t, live), out, direction = saved
    only_logp = isinstance(ct.entropy, SymbolicZero) and isinstance(ct.lse, SymbolicZero)
    g = derivatives.stat_cotangents(ct)
    dh, dweight, dbias = gradients(c, wants.value, h, head, targets, t, live, out, g, direction if only_logp else None)
    d_head = Head(
        weight=dweight,  # type: ignore[arg-type]
        bias=None if dbias is None else dbias.astype(head.bias.dtype),
        lora_scale=None,  # type: ignore[arg-type]
        layout=head.layout,
    )
    return None if dh is None else dh.astype(h.dtype), d_head, None, None, None


stats.defvjp(_stats_fwd, _stats_bwd, symbolic_zeros=True)
