"""The fused LM head on TPU: statistics, the direction of dH, dH and dW from hidden states, with no logits in HBM.

Over flattened tokens, live ones first (``n_live``, traced; later token tiles are skipped and fetch nothing):

    token_stats                one matmul      statistics
    token_stats_and_maxima     one matmul      statistics, bit-identical to those, and columns' largest probabilities
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
        tiles_of(kernel, hidden, lm_head, layout)  # type: ignore[arg-type]


def describe(hidden: Any, lm_head: Any, *, layout: Layout) -> dict[str, Any]:
    """Tiles, matmuls and HBM bytes of each kernel at these shapes, for ``explain()``."""
    n, width = hidden.shape
    item = jnp.dtype(hidden.dtype).itemsize
    vocab = lm_head.shape[0 if layout == "vh" else 1]
    head, rows = vocab * width * item, n * width * item
    out: dict[str, Any] = {}
    for kernel in ("forward", "dhidden", "dhead"):
        t = tiles_of(kernel, hidden, lm_head, layout)  # type: ignore[arg-type]
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


def tiles_of(kernel: Kernel, hidden: Any, lm_head: Any, layout: Layout) -> Tiles:
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
        tiles=tiles or tiles_of(kernel, hidden, lm_head, layout),
        logits_dtype=jnp.dtype(logits_dtype),
        has_bias=bias is not None,
        has_temperature=t is not None,
        per_token_temperature=per_token,
        has_softcap=transform.softcap is not None,
        has_scale=transform.scale is not None,
        all_live=n_live is None,
        interpret=_interpreter(interpret),
    )
    numbers = (None if per_token else t, transform.softcap, transform.scale)
    count = _count(n, n_live)
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


def _statistics(
    sums: RowSums, lm_head: Array, targets: Array, layout: Layout, vocab_size: int | None, n_live: Array | int | None
) -> TokenStats:
    """Finished statistics; NaN where a live token's target is outside the vocabulary, zeros for dead tokens."""
    y, n = targets.astype(jnp.int32), targets.shape[0]
    vocab = lm_head.shape[0 if layout == "vh" else 1] if vocab_size is None else vocab_size
    live = jnp.arange(n) < _count(n, n_live)
    return finish(sums, (y >= 0) & (y < vocab)).map(lambda x: jnp.where(live, x, jnp.zeros((), x.dtype)))


def token_sums(
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
    direction: bool = False,
) -> tuple[RowSums, Array, Array | None]:
    """``(sums [N], raw target logit [N], E [N, H] or None)`` over the head's columns, which may be a shard of the
    vocabulary; targets that are another shard's are -1. What belongs to dead tokens means nothing."""
    call = _prepare(
        "forward", hidden, lm_head, targets, layout, bias, transform, vocab_size, n_live, logits_dtype, interpret, tiles
    )
    return forward_sweep(
        call.spec, hidden, lm_head, call.targets, call.bias, call.temperature, call.scalars, call.n_live, direction
    )[:3]


def token_direction(
    lm_head: Array,
    targets: Array,
    stats: TokenStats,
    sums: RowSums,
    x_y: Array,
    expected: Array,
    *,
    layout: Layout,
    transform: LogitTransform,
    vocab_size: int | None = None,
    n_live: Array | int | None = None,
    interpret: Any = False,
    here: Array | None = None,
) -> Array:
    """``d logp / d hidden [N, H]`` float32, or a shard's part of it; ``here [N]``: the target is one of its columns.

    ``stats`` are those of the whole vocabulary, ``sums``, ``x_y`` and ``expected`` what :func:`token_sums` gave.
    """
    n, vocab = x_y.shape[0], lm_head.shape[0 if layout == "vh" else 1]
    one, zero = jnp.ones_like(x_y), jnp.zeros_like(x_y)
    g = StatCotangents(one, zero, zero)
    own = dz(zero, one > 0, stats.logp, stats.entropy, stats.max_logit, stats.max_logp, g)
    # The accumulator is relative to the largest other logit: scale it by that column's probability.
    others = jnp.exp((sums.maximum - stats.max_logit) + stats.max_logp)
    bend = slope(x_y, transform)
    if bend is not None:
        own = own * bend
        others = others if transform.softcap is not None else others * bend  # a softcap's slope is already in it
    if here is not None:
        own = jnp.where(here, own, 0.0)
    y = jnp.clip(targets.astype(jnp.int32), 0, (vocab if vocab_size is None else vocab_size) - 1)
    if layout == "vh":
        w_y = lm_head.at[y].get(mode="promise_in_bounds")
    else:
        w_y = columns_at(lm_head, y, _interpreter(interpret))
    direction = own[:, None] * w_y.astype(jnp.float32) - others[:, None] * expected
    return jnp.where((jnp.arange(n) < _count(n, n_live))[:, None], direction, 0.0)


def _interpreter(interpret: Any) -> Any:
    return pltpu.InterpretParams() if interpret is True else interpret


def _count(n: int, n_live: Array | int | None) -> Array:
    return jnp.asarray(n if n_live is None else n_live, jnp.int32).reshape(())


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
    sums, _, _ = token_sums(
        hidden, lm_head, targets, layout=layout, bias=bias, transform=transform, vocab_size=vocab_size, n_live=n_live,
        logits_dtype=logits_dtype, interpret=interpret, tiles=tiles,
    )  # fmt: skip
    return _statistics(sums, lm_head, targets, layout, vocab_size, n_live)


def token_stats_and_maxima(
    hidden: Array,
    lm_head: Array,
    targets: Array,
    floor: Array,
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
    """``(statistics [N], maxima [vocab_size] float32)``: for every column an upper bound of its largest log-probability
    over the tokens whose ``floor [N]``, a lower bound of their logsumexp, is finite and whose target it is not. The
    statistics are those of :func:`token_stats` to the bit. One matmul."""
    call = _prepare(
        "forward", hidden, lm_head, targets, layout, bias, transform, vocab_size, n_live, logits_dtype, interpret, tiles
    )
    floor = jnp.where(call.live, floor, jnp.inf)
    sums, _, _, maxima = forward_sweep(
        call.spec, hidden, lm_head, call.targets, call.bias, call.temperature, call.scalars, call.n_live, False, floor
    )
    assert maxima is not None
    written = jnp.arange(maxima.shape[0]) * call.spec.tiles.tokens < call.n_live[0]
    best = jnp.max(jnp.where(written[:, None], maxima, -jnp.inf), axis=0)
    return _statistics(sums, lm_head, targets, layout, vocab_size, n_live), best


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
    sums, x_y, expected = token_sums(
        hidden, lm_head, targets, layout=layout, bias=bias, transform=transform, vocab_size=vocab_size, n_live=n_live,
        logits_dtype=logits_dtype, interpret=interpret, tiles=tiles, direction=True,
    )  # fmt: skip
    assert expected is not None
    stats = _statistics(sums, lm_head, targets, layout, vocab_size, n_live)
    return stats, token_direction(
        lm_head, targets, stats, sums, x_y, expected, layout=layout, transform=transform, vocab_size=vocab_size,
        n_live=n_live, interpret=interpret,
    )  # fmt: skip


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
