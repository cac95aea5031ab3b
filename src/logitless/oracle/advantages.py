"""Group-relative advantages in float64."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from logitless.oracle.token_stats import Floats, to_float64

AdvantageScale = Literal["group", "batch", "tokens", "none"]
AdvantageBaseline = Literal["mean", "leave_one_out", "by_length", "second_best", "none"]


def group_advantages(
    rewards: ArrayLike,
    group_size: int,
    *,
    scale: AdvantageScale = "group",
    eps: float = 1e-4,
    baseline: AdvantageBaseline = "mean",
    lengths: ArrayLike | None = None,
) -> Floats:
    """``A = (r - mean) / (std + eps)`` with the mean of each run of ``group_size`` rewards.

    ``std`` (with ``n - 1`` in its denominator) is that of the group, or of the whole batch for ``scale="batch"``;
    ``scale="none"`` divides by nothing. A group with a single reward has mean 0 and standard deviation 1. A group of
    equal rewards has advantages of exactly 0. With ``baseline="leave_one_out"`` the mean is over the group's other
    rewards; with ``"by_length"`` the mean is ``sum(length * r) / sum(length)``, 0 for a single reward. With
    ``"second_best"`` the first of the largest rewards has the difference to the second largest, and the others 0. With
    ``"none"`` nothing is subtracted. ``scale="tokens"`` writes the differences out per token, and takes each one's
    distance to the mean of all tokens over ``sqrt(var + eps^2)``. The result has the shape of ``rewards``.
    """
    if scale not in ("group", "batch", "tokens", "none"):
        raise ValueError(f"scale={scale!r} is not known; expected 'group', 'batch', 'tokens' or 'none'.")
    r = to_float64(rewards)
    if r.size % group_size:
        raise ValueError(f"{r.size} rewards do not divide into groups of {group_size}.")
    advantages = np.zeros((r.size // group_size, group_size))
    tokens = np.ones(r.shape) if lengths is None else to_float64(lengths)
    for g, (group, weights) in enumerate(zip(r.reshape(-1, group_size), tokens.reshape(-1, group_size), strict=True)):
        mean = 0.0 if group_size == 1 else group.mean()
        if group_size > 1 and np.all(group == group[0]):
            mean = group[0]  # the rounding of the mean would leave a difference, which eps then magnifies
        elif group_size > 1 and baseline == "by_length":
            mean = (weights * group).sum() / max(weights.sum(), 1.0)
        members = r.reshape(-1) if scale == "batch" else group
        std = 1.0 if members.size == 1 else members.std(ddof=1)
        for i, reward in enumerate(group):
            if baseline == "leave_one_out" and group_size > 1:
                others = np.delete(group, i)
                mean = others[0] if np.all(others == others[0]) else others.mean()
            if baseline == "second_best":
                mean = np.sort(group)[-2] if i == int(np.argmax(group)) else reward
            if baseline == "none":
                mean = 0.0
            if reward != mean:
                plain = scale in ("none", "tokens")
                advantages[g, i] = reward - mean if plain else (reward - mean) / (std + eps)
    if scale == "tokens":
        per_token = np.repeat(advantages.reshape(-1), tokens.reshape(-1).astype(int))
        spread = np.sqrt(per_token.var(ddof=1) + eps**2)
        advantages = np.where(advantages == per_token.mean(), 0.0, (advantages - per_token.mean()) / spread)
    return advantages.reshape(r.shape)


def optimal_token_advantages(
    rewards: ArrayLike,
    logp: ArrayLike,
    sum_p2: ArrayLike,
    mask: ArrayLike,
    group_size: int,
    *,
    token_weights: ArrayLike | None = None,
    zero_tail: bool = False,
) -> Floats:
    """``r - b_t`` per live token: ``b_t`` is the mean of the group's rewards in column ``t``, weighted with each
    completion's energy up to there, the sum of ``(1 - 2 p + sum_v p_v^2) weight^2``. ``sum_p2 [B, T]`` is ``sum_v
    p_v^2``. A group of one has no baseline, nor, with ``zero_tail``, has a completion that alone is live."""
    r, live = to_float64(rewards), np.asarray(mask) > 0
    p, squares = np.exp(to_float64(logp)), to_float64(sum_p2)
    weights = np.ones(p.shape) if token_weights is None else to_float64(token_weights)
    energy = np.cumsum(np.where(live, ((1 - p) ** 2 + np.maximum(squares - p**2, 0.0)) * weights**2, 0.0), axis=1)
    advantages = np.zeros(p.shape)
    for row, t in np.argwhere(live):
        first = row - row % group_size
        members = [i for i in range(first, first + group_size) if live[i, t]]
        baseline = sum(r[i] * energy[i, t] for i in members) / (sum(energy[i, t] for i in members) + 1e-8)
        if group_size == 1 or (zero_tail and members == [row]):
            baseline = 0.0
        advantages[row, t] = r[row] - baseline
    return advantages
