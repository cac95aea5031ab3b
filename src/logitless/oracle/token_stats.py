"""Token statistics of given logits, and their vector-Jacobian product, in float64.

With ``x`` a token's raw logits, ``y`` its target:

    capped = softcap * tanh(scale * x / softcap)    (scale * x without a softcap)
    z      = capped / temperature
    lse    = logsumexp_v z_v        logp = log p_y        entropy = -sum_v p_v log p_v        with log p_v = z_v - lse

The plain difference ``z_v - lse`` loses its digits where one column holds almost all the mass. With ``top`` the largest
column and ``R = sum_{u != top} exp(z_u - z_top)``,

    log p_v = (z_v - z_top) - log1p(R)

adds two numbers that are both <= 0, so every log-probability keeps full relative precision even in collapsed rows.

Gradients:

    d logp / d z_v    = 1[v=y] - p_v            (at the target: -expm1(logp))
    d entropy / d z_v = -p_v (log p_v + entropy)
    d lse / d z_v     = p_v
    d z_v / d x_v     = scale / temperature / cosh(scale * x_v / softcap)^2     (no cosh without a softcap)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

_BLOCK_ELEMENTS = 1 << 22
"""Rows are taken in blocks of about this many logits, so that a large vocabulary does not exhaust the memory."""


@dataclasses.dataclass(frozen=True)
class TokenStats:
    """The fields of ``logitless.core.stats.TokenStats`` as NumPy arrays, all with the shape of the targets."""

    logp: Floats
    entropy: Floats
    lse: Floats
    max_logit: Floats
    log_sum_p2: Floats
    is_top1: Bools


@dataclasses.dataclass(frozen=True)
class Softmax:
    """A softmax over the rows of ``z [N, V]``."""

    log_p: Floats  # [N, V]
    lse: Floats  # [N]
    max_logit: Floats  # [N]
    log_sum_p2: Floats  # [N]
    entropy: Floats  # [N]


def to_float64(x: ArrayLike) -> Floats:
    """``x`` (NumPy, bfloat16 or jax array) as float64, exactly."""
    return np.asarray(x).astype(np.float64)


def per_token(value: ArrayLike | None, shape: tuple[int, ...], default: float) -> Floats:
    """A scalar or per-token argument as a flat float64 array with one value per token."""
    value = default if value is None else value
    return np.broadcast_to(to_float64(value), shape).reshape(-1)


def live_tokens(mask: ArrayLike | None, shape: tuple[int, ...]) -> Bools:
    """The mask as a flat bool array; without one every token is live."""
    if mask is None:
        return np.ones(int(np.prod(shape)), dtype=bool)
    return (np.broadcast_to(np.asarray(mask), shape) != 0).reshape(-1)


def row_blocks(selected: Bools, width: int) -> Iterator[Ints]:
    """Indices of the selected rows, in blocks whose ``[rows, width]`` arrays stay small."""
    indices = np.flatnonzero(selected)
    step = max(1, _BLOCK_ELEMENTS // max(width, 1))
    for start in range(0, len(indices), step):
        yield indices[start : start + step]


def transformed(x: Floats, temperature: Floats, softcap: ArrayLike | None, scale: ArrayLike | None) -> Floats:
    """``z [N, V]`` from raw logits ``x [N, V]``; ``temperature [N]``."""
    z = x if scale is None else float(np.asarray(scale)) * x
    if softcap is not None:
        cap = float(np.asarray(softcap))
        z = cap * np.tanh(z / cap)
    return z / temperature[:, None]


def slope_of_rows(x: Floats, temperature: Floats, softcap: ArrayLike | None, scale: ArrayLike | None) -> Floats:
    """``dz/dx [N, V]``."""
    factor = 1.0 if scale is None else float(np.asarray(scale))
    slope = np.full_like(x, factor)
    if softcap is not None:
        # 1 / cosh^2 rather than 1 - tanh^2, which cancels where the cap is nearly reached.
        slope = slope / np.cosh(factor * x / float(np.asarray(softcap))) ** 2
    return slope / temperature[:, None]


def softmax_of_rows(z: Floats) -> Softmax:
    """Log-probabilities and row statistics of ``z [N, V]``; ``-inf`` columns have probability 0.

    A row that is ``-inf`` throughout is no distribution: its log-probabilities and ``lse`` are ``-inf``, its entropy 0.
    """
    rows = np.arange(len(z))
    top = np.argmax(z, axis=1)
    z_top = z[rows, top]
    shifted = z - np.where(z_top == -np.inf, 0.0, z_top)[:, None]
    e = np.exp(shifted)
    e[rows, top] = 0.0  # what is left are the columns other than the top one
    log_normaliser = np.log1p(e.sum(axis=1))
    log_p = shifted - log_normaliser[:, None]
    p = np.exp(log_p)
    log_sum_p2 = np.log1p((e * e).sum(axis=1)) - 2.0 * log_normaliser
    return Softmax(
        log_p=log_p,
        lse=z_top + log_normaliser,
        max_logit=z_top,
        log_sum_p2=np.where(z_top == -np.inf, -np.inf, log_sum_p2),
        entropy=np.where(p == 0.0, 0.0, -p * log_p).sum(axis=1),  # 0 * log 0 = 0
    )


def no_stats(tokens: int) -> dict[str, NDArray[Any]]:
    """The fields of :class:`TokenStats`, zeros, flat."""
    names = [field.name for field in dataclasses.fields(TokenStats)]
    return {name: np.zeros(tokens, dtype=bool if name == "is_top1" else np.float64) for name in names}


def token_stats(
    logits: ArrayLike,
    targets: ArrayLike,
    *,
    temperature: ArrayLike | None = 1.0,
    softcap: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    vocab_size: int | None = None,
    mask: ArrayLike | None = None,
) -> TokenStats:
    """Statistics of ``logits [..., V]`` at ``targets [...]``.

    Columns from ``vocab_size`` on are never read. Tokens where ``mask`` is false are never read either and have zeros
    (``is_top1`` false). A live token whose target is outside ``[0, vocab_size)`` has NaN (``is_top1`` false).
    ``temperature`` is a scalar or has one value per token. A logit of ``-inf`` has probability 0, except under a
    softcap, whose formula makes it ``-softcap``.
    """
    raw, y = np.asarray(logits), np.asarray(targets).astype(np.int64)
    columns = raw.shape[-1] if vocab_size is None else int(vocab_size)
    x, flat_y = raw.reshape(-1, raw.shape[-1]), y.reshape(-1)
    tau = per_token(temperature, y.shape, 1.0)

    fields = no_stats(flat_y.size)
    for i in row_blocks(live_tokens(mask, y.shape), columns):
        known = (flat_y[i] >= 0) & (flat_y[i] < columns)
        column = np.where(known, flat_y[i], 0)
        # -inf logits and NaN rows are legitimate inputs: their intermediate NaN and overflow need no warning.
        with np.errstate(all="ignore"):
            z = transformed(to_float64(x[i, :columns]), tau[i], softcap, scale)
            soft = softmax_of_rows(z)
        row = np.arange(len(i))
        fields["logp"][i] = np.where(known, soft.log_p[row, column], np.nan)
        for name in ("entropy", "lse", "max_logit", "log_sum_p2"):
            fields[name][i] = np.where(known, getattr(soft, name), np.nan)
        fields["is_top1"][i] = known & (z[row, column] >= soft.max_logit)
    return TokenStats(**{name: values.reshape(y.shape) for name, values in fields.items()})


def token_stats_vjp(
    logits: ArrayLike,
    targets: ArrayLike,
    g_logp: ArrayLike | None,
    g_entropy: ArrayLike | None = None,
    g_lse: ArrayLike | None = None,
    *,
    temperature: ArrayLike | None = 1.0,
    softcap: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    vocab_size: int | None = None,
    mask: ArrayLike | None = None,
) -> Floats:
    """``dlogits = sum_s g_s d stat_s / d logits`` for the cotangents of logp, entropy and lse (``None`` is zero).

    Rows that are masked, or whose cotangents are all zero, are exactly zero whatever stands in them. Live rows with a
    nonzero cotangent and a target outside ``[0, vocab_size)`` are NaN in the columns below ``vocab_size``.
    """
    raw, y = np.asarray(logits), np.asarray(targets).astype(np.int64)
    columns = raw.shape[-1] if vocab_size is None else int(vocab_size)
    x, flat_y = raw.reshape(-1, raw.shape[-1]), y.reshape(-1)
    tau = per_token(temperature, y.shape, 1.0)
    gl, gh, gz = (per_token(g, y.shape, 0.0) for g in (g_logp, g_entropy, g_lse))

    dx = np.zeros(x.shape)
    live = live_tokens(mask, y.shape)
    for i in row_blocks(live & ((gl != 0) | (gh != 0) | (gz != 0)), columns):
        known = (flat_y[i] >= 0) & (flat_y[i] < columns)
        row, column = np.arange(len(i)), np.where(known, flat_y[i], 0)
        with np.errstate(all="ignore"):
            block = to_float64(x[i, :columns])
            soft = softmax_of_rows(transformed(block, tau[i], softcap, scale))
            p = np.exp(soft.log_p)
            d_entropy = np.where(p == 0.0, 0.0, -p * (soft.log_p + soft.entropy[:, None]))
            dz = -gl[i, None] * p + gh[i, None] * d_entropy + gz[i, None] * p
            at_target = -gl[i] * np.expm1(soft.log_p[row, column])  # 1 - p without cancellation
            dz[row, column] = at_target + gh[i] * d_entropy[row, column] + gz[i] * p[row, column]
            dz[~known] = np.nan
            dx[i, :columns] = dz * slope_of_rows(block, tau[i], softcap, scale)
    return dx.reshape(raw.shape)
