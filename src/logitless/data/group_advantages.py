"""Group advantages from rewards."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from logitless.core import validation
from logitless.core.shapes import Float
from logitless.objectives.checks import shown


def group_advantages(
    rewards: Array,
    group_size: int,
    *,
    scale: Literal["group", "batch", "tokens", "none"] = "group",
    eps: float = 1e-4,
    baseline: Literal["mean", "leave_one_out", "by_length", "second_best", "none"] = "mean",
    lengths: Array | None = None,
) -> Array:
    """``(r - mean(group)) / (std + eps)`` for rewards ``[B]`` whose groups are ``group_size`` consecutive entries.

    The standard deviation is the unbiased one (divisor ``n - 1``), of the group or of the whole batch, or is left out
    (Dr.GRPO). ``eps`` is 1e-4 in TRL and 1e-6 in veRL. Groups of one have mean 0 and standard deviation 1 (veRL);
    groups of equal rewards have advantages of exactly 0, with ``eps=0`` too.

    ``baseline="leave_one_out"`` subtracts the mean of the *other* rewards of the group (RLOO, usually with
    ``scale="none"``); a reward that is alone has no other, and a baseline of 0. ``"by_length"`` subtracts the mean
    weighted with the completions' ``lengths [B]`` in tokens, the optimal baseline of OPO (usually with
    ``scale="none"``); of a reward that is alone it subtracts nothing. ``"second_best"`` gives the best completion of a
    group its lead over the second, and all others nothing (veRL's ``grpo_passk``, for pass@k): groups of at least two.
    ``"none"`` subtracts nothing.

    ``scale="tokens"`` whitens over all tokens of the batch: ``(a - mean) / sqrt(var + eps^2)``, with every completion
    counted ``lengths`` times. With ``baseline="none"`` the result is REINFORCE++'s (undiscounted), with ``"mean"`` that
    of REINFORCE++ with a baseline.

    >>> import jax.numpy as jnp
    >>> from logitless import group_advantages
    >>> group_advantages(jnp.array([1.0, 0.0, 1.0, 1.0]), group_size=2, scale="none").tolist()
    [0.5, -0.5, 0.0, 0.0]
    >>> rewards = jnp.array([1.0, 0.0, 2.0])
    >>> group_advantages(rewards, group_size=3, scale="none", baseline="leave_one_out").tolist()
    [0.0, -1.5, 1.5]
    >>> group_advantages(rewards, group_size=3, scale="none", baseline="second_best").tolist()
    [0.0, 0.0, 1.0]
    >>> lengths = jnp.array([2, 1, 1])
    >>> group_advantages(rewards, group_size=3, scale="none", baseline="by_length", lengths=lengths).tolist()
    [0.0, -1.0, 1.0]
    """
    r = checked_groups("group_advantages", rewards, group_size)
    if scale not in ("group", "batch", "tokens", "none"):
        raise ValueError(f"group_advantages: scale={scale!r}, expected 'group', 'batch', 'tokens' or 'none'.")
    weights = _checked_lengths(baseline, scale, lengths, r)
    if group_size == 1:
        centred, std = r, jnp.ones_like(r)
    else:
        # Relative to the first: the mean of equal rewards is then exact, and eps cannot magnify its rounding.
        shifted = r - r[:, :1]
        centred = shifted - jnp.mean(shifted, axis=1, keepdims=True)
        std = jnp.std(shifted, axis=1, keepdims=True, ddof=1)
    if scale == "batch" and r.size > 1:
        std = jnp.std(r, ddof=1)
    if baseline == "by_length" and weights is not None and group_size > 1:
        w = weights.reshape(r.shape)
        total = jnp.maximum(jnp.sum(w, axis=1, keepdims=True), 1.0)  # a group without tokens
        centred = shifted - jnp.sum(w * shifted, axis=1, keepdims=True) / total
    if baseline == "second_best":
        order = jnp.sort(r, axis=1)
        first = jnp.arange(group_size) == jnp.argmax(r, axis=1)[:, None]
        centred = jnp.where(first, (order[:, -1] - order[:, -2])[:, None], 0.0)
    if baseline == "leave_one_out" and group_size > 1:
        centred = centred * (group_size / (group_size - 1))  # r_i - mean of the others = n / (n - 1) (r_i - mean)
    if baseline == "none":
        centred = r
    if scale == "tokens" and weights is not None:
        return _whitened(centred.reshape(-1), weights, eps)
    if scale != "none":
        centred = jnp.where(centred == 0, 0.0, centred / (std + eps))
    return centred.reshape(-1)


def checked_groups(call: str, rewards: Array, group_size: int) -> Float[Array, "G N"]:
    """The rewards ``[B]`` as float32, a row for each group of ``group_size``; what does not split is refused."""
    rewards = validation.floats(call, "rewards", rewards)
    if rewards.ndim != 1:
        raise ValueError(f"{call}: rewards has shape {rewards.shape}, expected one reward a completion [B].")
    if not isinstance(group_size, (int, np.integer)) or isinstance(group_size, bool):
        raise TypeError(f"{call}: group_size is {shown(group_size)}, expected a Python int (it is static).")
    if group_size < 1 or rewards.size == 0 or rewards.size % group_size:
        raise ValueError(
            f"{call}: {rewards.size} rewards do not split into groups of {group_size}; "
            "expected a non-empty multiple of group_size."
        )
    return rewards.astype(jnp.float32).reshape(-1, group_size)


def _whitened(advantages: Array, lengths: Array, eps: float) -> Array:
    """``(a - mean) / sqrt(var + eps^2)``, the mean and the unbiased variance over tokens (veRL: eps 1e-4)."""
    shifted = advantages - advantages[0]  # the mean of equal values is then exact
    tokens = jnp.sum(lengths)
    centred = shifted - jnp.sum(lengths * shifted) / jnp.maximum(tokens, 1.0)
    variance = jnp.sum(lengths * centred**2) / jnp.maximum(tokens - 1.0, 1.0)
    return jnp.where(centred == 0, 0.0, centred / jnp.sqrt(variance + jnp.square(eps)))


def _checked_lengths(baseline: str, scale: str, lengths: Array | None, r: Float[Array, "G N"]) -> Array | None:
    """The lengths as float32, where baseline or scale take them; what does not fit the baseline is refused."""
    known = ("mean", "leave_one_out", "by_length", "second_best", "none")
    if baseline not in known:
        raise ValueError(f"group_advantages: baseline={baseline!r}, expected one of {', '.join(map(repr, known))}.")
    if baseline == "second_best" and r.shape[1] < 2:
        raise ValueError("group_advantages: baseline='second_best' needs groups of at least 2, got group_size=1.")
    if (lengths is None) == (baseline == "by_length" or scale == "tokens"):
        need = "needs lengths, tokens of each completion [B]" if lengths is None else "does not take lengths"
        which = "scale='tokens'" if scale == "tokens" else f"baseline={baseline!r}"
        raise ValueError(f"group_advantages: {which} {need}.")
    if lengths is None:
        return None
    array = validation.as_array("group_advantages", "lengths", lengths)
    validation.same_shape("group_advantages", "lengths", array, (r.size,), "rewards")
    return array.astype(jnp.float32)
