"""Token statistics of ``logits = hidden @ lm_head + bias``, and their gradients, in float64.

``lm_head`` is ``[V, H]`` (``head_layout="vh"``) or ``[H, V]`` (``"hv"``). With ``dx [N, V]`` the gradient of the raw
logits (:func:`logitless.oracle.token_stats_vjp`) and the head written as ``W [V, H]``:

    dhidden = dx @ W        dW = dx^T @ hidden        dbias = sum_n dx

Inputs are upcast exactly, products and sums are float64. Masked tokens enter no product, so NaN in their hidden state
does not reach the head's gradient.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from logitless.oracle.rows import HeadLayout, linear_rows
from logitless.oracle.token_stats import Floats, Ints, TokenStats, no_stats, per_token, token_stats, token_stats_vjp


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
    y, rows = (
        np.asarray(targets).astype(np.int64),
        linear_rows(
            hidden, lm_head, bias=bias, head_layout=head_layout, scale=scale, softcap=softcap, vocab_size=vocab_size
        ),
    )
    flat_y, tau, fields = y.reshape(-1), rows.temperatures(temperature), no_stats(y.size)
    for i in rows.blocks(rows.live(mask)):
        stats = token_stats(rows.raw(i), flat_y[i], temperature=tau[i], softcap=softcap, scale=scale)
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
    flat_y, rows = (
        np.asarray(targets).astype(np.int64).reshape(-1),
        linear_rows(
            hidden, lm_head, bias=bias, head_layout=head_layout, scale=scale, softcap=softcap, vocab_size=vocab_size
        ),
    )
    tau = rows.temperatures(temperature)
    gl, gh, gz = (per_token(g, rows.shape, 0.0) for g in (g_logp, g_entropy, g_lse))

    def dz(i: Ints) -> Floats:
        return token_stats_vjp(rows.transformed(i, tau[i]), flat_y[i], gl[i], gh[i], gz[i])

    found = rows.pull_back(temperature, rows.live(mask) & ((gl != 0) | (gh != 0) | (gz != 0)), dz)
    assert found.head is not None
    return found.inputs, found.head, found.bias
