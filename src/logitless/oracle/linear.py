"""Token statistics of ``logits = hidden @ lm_head + bias``, and their gradients, in float64.

``lm_head`` is ``[V, H]`` (``head_layout="vh"``) or ``[H, V]`` (``"hv"``). With ``dx [N, V]`` the gradient of the raw
logits (:func:`logitless.oracle.token_stats_vjp`) and the head written as ``W [V, H]``:

    dhidden = dx @ W        dW = dx^T @ hidden        dbias = sum_n dx

Inputs are upcast exactly, products and sums are float64. Masked tokens enter no product, so NaN in their hidden state
does not reach the head's gradient.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from logitless.oracle.token_stats import (
    Floats,
    TokenStats,
    live_tokens,
    no_stats,
    per_token,
    row_blocks,
    to_float64,
    token_stats,
    token_stats_vjp,
)

HeadLayout = Literal["vh", "hv"]


def head_matrix(
    lm_head: ArrayLike, bias: ArrayLike | None, head_layout: HeadLayout, vocab_size: int | None
) -> tuple[Floats, Floats]:
    """The head as ``W [V, H]`` and its bias ``[V]`` (zeros for none), cut to the first ``vocab_size`` columns."""
    if head_layout not in ("vh", "hv"):
        raise ValueError(f"head_layout={head_layout!r} is not known; expected 'vh' or 'hv'.")
    raw = np.asarray(lm_head)
    w = to_float64((raw if head_layout == "vh" else raw.T)[:vocab_size])
    b = np.zeros(len(w)) if bias is None else to_float64(np.asarray(bias)[:vocab_size])
    return w, b


def linear_token_stats(
    hidden: ArrayLike,
    lm_head: ArrayLike,
    targets: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    temperature: ArrayLike | None = 1.0,
    softcap: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    vocab_size: int | None = None,
    mask: ArrayLike | None = None,
    head_layout: HeadLayout = "vh",
) -> TokenStats:
    """Statistics of ``hidden [..., H]`` under the head at ``targets [...]``; options as :func:`token_stats`."""
    y = np.asarray(targets).astype(np.int64)
    h, flat_y = np.asarray(hidden), y.reshape(-1)
    h = h.reshape(-1, h.shape[-1])
    w, b = head_matrix(lm_head, bias, head_layout, vocab_size)
    tau = per_token(temperature, y.shape, 1.0)

    fields = no_stats(flat_y.size)
    for i in row_blocks(live_tokens(mask, y.shape), len(w)):
        logits = to_float64(h[i]) @ w.T + b
        stats = token_stats(logits, flat_y[i], temperature=tau[i], softcap=softcap, scale=scale)
        for name, values in fields.items():
            values[i] = getattr(stats, name)
    return TokenStats(**{name: values.reshape(y.shape) for name, values in fields.items()})


def linear_token_stats_vjp(
    hidden: ArrayLike,
    lm_head: ArrayLike,
    targets: ArrayLike,
    g_logp: ArrayLike | None,
    g_entropy: ArrayLike | None = None,
    g_lse: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    temperature: ArrayLike | None = 1.0,
    softcap: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    vocab_size: int | None = None,
    mask: ArrayLike | None = None,
    head_layout: HeadLayout = "vh",
) -> tuple[Floats, Floats, Floats | None]:
    """``(dhidden, dlm_head, dbias)`` in the shapes of the inputs; ``dbias`` is ``None`` without a bias."""
    y = np.asarray(targets).astype(np.int64)
    raw_h, flat_y = np.asarray(hidden), y.reshape(-1)
    h = raw_h.reshape(-1, raw_h.shape[-1])
    w, b = head_matrix(lm_head, bias, head_layout, vocab_size)
    tau = per_token(temperature, y.shape, 1.0)
    gl, gh, gz = (per_token(g, y.shape, 0.0) for g in (g_logp, g_entropy, g_lse))

    dhidden = np.zeros(h.shape)
    columns = np.asarray(lm_head).shape[0 if head_layout == "vh" else 1]
    dw, db = np.zeros((columns, h.shape[1])), np.zeros(columns)
    live = live_tokens(mask, y.shape)
    for i in row_blocks(live & ((gl != 0) | (gh != 0) | (gz != 0)), len(w)):
        block = to_float64(h[i])
        dx = token_stats_vjp(
            block @ w.T + b, flat_y[i], gl[i], gh[i], gz[i], temperature=tau[i], softcap=softcap, scale=scale
        )
        dhidden[i] = dx @ w
        dw[: len(w)] += dx.T @ block
        db[: len(w)] += dx.sum(axis=0)
    return dhidden.reshape(raw_h.shape), dw if head_layout == "vh" else dw.T, None if bias is None else db
