"""The fused LM head on TPU: statistics, the direction of dH, dH and dW from hidden states, with no logits in HBM.

Over flattened tokens, live ones first (``n_live``, traced; later token tiles are skipped and fetch nothing):

    token_stats                one matmul      statistics
    token_stats_and_direction  two matmuls     statistics, bit-identical to those, and d logp / d hidden
    dhidden                    two matmuls     dH for any cotangents of logp, entropy and lse
    dhead                      two matmuls     dW in its final dtype, dbias

An objective of ``logp`` alone costs four matmuls for loss, dH and dW: with ``p`` the softmax and ``y`` the target,

    D = d logp / d h = -expm1(logp) slope_y W_y - sum_{v != y} p_v slope_v W_v          dH = g_logp D

``D`` is float32: it is the sweep's own accumulator, scaled. Rounding it to bfloat16 would round dH twice and saves
nothing at the peak, since it dies before dW is made.

Sweeps, tiles and bytes: ``pallas_tpu_forward.py``, ``pallas_tpu_backward.py``, ``pallas_tpu_tiles.py``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from logitless import compat
from logitless.head.operator import Layout
from logitless.head.pallas_tpu_backward import coefficients, dhead_sweep, dhidden_sweep
from logitless.head.pallas_tpu_columns import columns_at
from logitless.head.pallas_tpu_forward import forward_sweep
from logitless.head.pallas_tpu_tiles import LANES, Kernel, Spec, Tiles, choose
from logitless.stats import RowSums, StatCotangents, TokenStats, dz, finish
from logitless.transform import LogitTransform, slope


def check(hidden: Any, lm_head: Any, *, layout: Layout, bias: Any = None, logits_dtype: Any = jnp.float32) -> None:
    """Raise ``NotImplementedError`` with the reason if these kernels cannot serve the arguments (shapes, dtypes)."""
    n, width = hidden.shape
    if hidden.dtype != lm_head.dtype or hidden.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(
            f"pallas_tpu: hidden states ({hidden.dtype}) and lm_head ({lm_head.dtype}) must both be bfloat16 or both "
            f"float32: a kernel does not cast the head."
        )
    if jnp.dtype(logits_dtype) not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"pallas_tpu: logits_dtype {logits_dtype} is neither float32 nor bfloat16.")
    if width % LANES:
        raise NotImplementedError(f"pallas_tpu: the hidden size {width} is not a multiple of {LANES}.")
    if lm_head.shape[1 if layout == "vh" else 0] != width:
        raise NotImplementedError(f"pallas_tpu: lm_head {lm_head.shape} is not {layout} for a hidden size of {width}.")
    if bias is not None and bias.shape != (lm_head.shape[0 if layout == "vh" else 1],):
        raise NotImplementedError(f"pallas_tpu: bias {bias.shape} does not match lm_head {lm_head.shape} ({layout}).")
    if n == 0:
        raise NotImplementedError("pallas_tpu: there are no tokens.")
    for kernel in ("forward", "dhidden", "dhead"):
        _tiles(kernel, hidden, lm_head, layout)  # type: ignore[arg-type]


def describe(hidden: Any, lm_head: Any, *, layout: Layout) -> dict[str, Any]:
    """Tiles, matmuls and HBM bytes of each kernel at these shapes, for ``explain()``."""
    n, width = hidden.shape
    item = jnp.dtype(hidden.dtype).itemsize
    vocab = lm_head.shape[0 if layout == "vh" else 1]
    head, rows = vocab * width * item, n * width * item
    out: dict[str, Any] = {}
    for kernel in ("forward", "dhidden", "dhead"):
        t = _tiles(kernel, hidden, lm_head, layout)  # type: ignore[arg-type]
        if kernel == "dhead":
            moved = pl.cdiv(vocab, t.vocab) * rows * (1 if layout == "vh" else 2) + 2 * head
        else:
            moved = pl.cdiv(n, t.tokens) * head + rows + 4 * n * width
        out[kernel] = {
            "token_tile": t.tokens,
            "vocab_tile": t.vocab,
            "matmuls": 2,
            "flops": 4 * n * width * vocab,
            "hbm_bytes": moved,
        }
    stats = dict(out["forward"], matmuls=1, flops=2 * n * width * vocab)
    stats["hbm_bytes"] -= 4 * n * width
    return {
        "token_stats": stats,
        "token_stats_and_direction": out["forward"],
        **{k: out[k] for k in ("dhidden", "dhead")},
    }


def _tiles(kernel: Kernel, hidden: Any, lm_head: Any, layout: Layout) -> Tiles:
    n, width = hidden.shape
    vocab = lm_head.shape[0 if layout == "vh" else 1]
    return choose(kernel, n, width, vocab, jnp.dtype(hidden.dtype).itemsize, layout, compat.tpu_vmem_bytes())


@dataclasses.dataclass(frozen=True)
class _Call:
    """A kernel's static spec and its small operands."""

    spec: Spec
    targets: Array  # [N] int32
    bias: Array | None  # [V] float32
    temperature: Array | None  # [N] float32, if per token
    scalars: Array  # [3] float32: temperature, softcap, scale
    n_live: Array  # [1] int32
    live: Array  # [N] bool
    transform: LogitTransform


def _prepare(
    kernel: Kernel,
    hidden: Array,
    lm_head: Array,
    targets: Array,
    layout: Layout,
    bias: Array | None,
    transform: LogitTransform,
    vocab_size: int | None,
    n_live: Array | int | None,
    logits_dtype: Any,
    interpret: Any,
    tiles: Tiles | None,
) -> _Call:
    check(hidden, lm_head, layout=layout, bias=bias, logits_dtype=logits_dtype)
    n, vocab = hidden.shape[0], lm_head.shape[0 if layout == "vh" else 1]
    t = transform.temperature
    per_token = t is not None and jnp.ndim(t) > 0
    spec = Spec(
        layout=layout,
        vocab=vocab,
        vocab_size=vocab if vocab_size is None else vocab_size,
        tiles=tiles or _tiles(kernel, hidden, lm_head, layout),
        logits_dtype=jnp.dtype(logits_dtype),
        has_bias=bias is not None,
        has_temperature=t is not None,
        per_token_temperature=per_token,
        has_softcap=transform.softcap is not None,
        has_scale=transform.scale is not None,
        all_live=n_live is None,
        interpret=pltpu.InterpretParams() if interpret is True else interpret,
    )
    numbers = (None if per_token else t, transform.softcap, transform.scale)
    count = jnp.asarray(n if n_live is None else n_live, jnp.int32).reshape(())
    return _Call(
        spec=spec,
        targets=targets.astype(jnp.int32),
        bias=None if bias is None else bias.astype(jnp.float32),
        temperature=jnp.asarray(t, jnp.float32).reshape(n) if per_token else None,
        scalars=jnp.stack([jnp.asarray(1.0 if v is None else v, jnp.float32).reshape(()) for v in numbers]),
        n_live=count[None],
        live=jnp.arange(n) < count,
        transform=transform,
    )


def _statistics(call: _Call, sums: RowSums) -> TokenStats:
    """Finished statistics; NaN where a live token's target is outside the vocabulary, zeros for dead tokens."""
    valid = (call.targets >= 0) & (call.targets < call.spec.vocab_size)
    return finish(sums, valid).map(lambda x: jnp.where(call.live, x, jnp.zeros((), x.dtype)))


def token_stats(
    hidden: Array,
    lm_head: Array,
    targets: Array,
    *,
    layout: Layout,
    bias: Array | None = None,
    transform: LogitTransform,
    vocab_size: int | None = None,
    n_live: Array | int | None = None,
    logits_dtype: Any = jnp.float32,
    interpret: Any = False,
    tiles: Tiles | None = None,
) -> TokenStats:
    """Statistics ``[N]`` of ``hidden [N, H]``, zero from ``n_live`` on. One matmul, no logits in HBM."""
    call = _prepare(
        "forward", hidden, lm_head, targets, layout, bias, transform, vocab_size, n_live, logits_dtype, interpret, tiles
    )
    sums, _, _ = forward_sweep(
        call.spec, hidden, lm_head, call.targets, call.bias, call.temperature, call.scalars, call.n_live, False
    )
    return _statistics(call, sums)


def token_stats_and_direction(
    hidden: Array,
    lm_head: Array,
    targets: Array,
    *,
    layout: Layout,
    bias: Array | None = None,
    transform: LogitTransform,
    vocab_size: int | None = None,
    n_live: Array | int | None = None,
    logits_dtype: Any = jnp.float32,
    interpret: Any = False,
    tiles: Tiles | None = None,
) -> tuple[TokenStats, Array]:
    """``(statistics [N], d logp / d hidden [N, H] float32)``, zero from ``n_live`` on. Two matmuls."""
    call = _prepare(
        "forward", hidden, lm_head, targets, layout, bias, transform, vocab_size, n_live, logits_dtype, interpret, tiles
    )
    sums, x_y, expected = forward_sweep(
        call.spec, hidden, lm_head, call.targets, call.bias, call.temperature, call.scalars, call.n_live, True
    )
    assert expected is not None
    stats = _statistics(call, sums)
    one, zero = jnp.ones_like(x_y), jnp.zeros_like(x_y)
    g = StatCotangents(one, zero, zero)
    own = dz(zero, one > 0, stats.logp, stats.entropy, stats.max_logit, stats.max_logp, g)
    # The accumulator is relative to the largest other logit: scale it by that column's probability.
    others = jnp.exp((sums.maximum - stats.max_logit) + stats.max_logp)
    bend = slope(x_y, transform)
    if bend is not None:
        own = own * bend
        others = others if transform.softcap is not None else others * bend  # a softcap's slope is already in it
    y = jnp.clip(call.targets, 0, call.spec.vocab_size - 1)
    if layout == "vh":
        w_y = lm_head.at[y].get(mode="promise_in_bounds")
    else:
        w_y = columns_at(lm_head, y, call.spec.interpret)
    direction = own[:, None] * w_y.astype(jnp.float32) - others[:, None] * expected
    return stats, jnp.where(call.live[:, None], direction, 0.0)


def dhidden(
    hidden: Array,
    lm_head: Array,
    targets: Array,
    stats: TokenStats,
    g: StatCotangents,
    *,
    layout: Layout,
    bias: Array | None = None,
    transform: LogitTransform,
    vocab_size: int | None = None,
    n_live: Array | int | None = None,
    logits_dtype: Any = jnp.float32,
    interpret: Any = False,
    tiles: Tiles | None = None,
) -> Array:
    """dH ``[N, H]`` float32 for cotangents ``g [N]``; exactly zero for dead tokens and where ``g`` is. Two matmuls."""
    call = _prepare(
        "dhidden", hidden, lm_head, targets, layout, bias, transform, vocab_size, n_live, logits_dtype, interpret, tiles
    )
    token = coefficients(stats, g, transform, call.n_live[0], hidden.shape[0])
    out = dhidden_sweep(call.spec, hidden, lm_head, call.targets, call.bias, token, call.scalars, call.n_live)
    return jnp.where((call.live & g.any_nonzero())[:, None], out, 0.0)


def dhead(
    hidden: Array,
    lm_head: Array,
    targets: Array,
    stats: TokenStats,
    g: StatCotangents,
    *,
    layout: Layout,
    bias: Array | None = None,
    transform: LogitTransform,
    vocab_size: int | None = None,
    n_live: Array | int | None = None,
    logits_dtype: Any = jnp.float32,
    out_dtype: Any = None,
    interpret: Any = False,
    tiles: Tiles | None = None,
) -> tuple[Array, Array | None]:
    """``(dW in the layout of lm_head, dbias [V] float32 or None)``; ``out_dtype`` is lm_head's by default. Two matmuls.

    Accumulated in float32 and rounded once. Dead tokens may hold anything; a token before ``n_live`` whose cotangents
    are zero adds zero, provided that its hidden state is finite.
    """
    call = _prepare(
        "dhead", hidden, lm_head, targets, layout, bias, transform, vocab_size, n_live, logits_dtype, interpret, tiles
    )
    n, tile = hidden.shape[0], call.spec.tiles.tokens
    token = coefficients(stats, g, transform, call.n_live[0], pl.cdiv(n, tile) * tile)
    return dhead_sweep(
        call.spec,
        hidden,
        lm_head,
        call.targets,
        call.bias,
        token,
        call.scalars,
        call.n_live,
        jnp.dtype(lm_head.dtype if out_dtype is None else out_dtype),
        bias is not None,
    )
