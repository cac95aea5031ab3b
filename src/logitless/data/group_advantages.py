"""Group advantages from rewards."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from logitless.core import validation
from logitless.objectives.checks import shown


def group_advantages(
    rewards: Array,
    group_size: int,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-4,
    baseline: Literal["mean", "leave_one_out"] = "mean",
) -> Array:
    """``(r - mean(group)) / (std + eps)`` for rewards ``[B]`` whose groups are ``group_size`` consecutive entries.

    The standard deviation is the unbiased one (divisor ``n - 1``), of the group or of the whole batch, or is left out
    (Dr.GRPO). ``eps`` is 1e-4 in TRL and 1e-6 in veRL. Groups of one have mean 0 and standard deviation 1 (veRL);
    groups of equal rewards have advantages of exactly 0, with ``eps=0`` too.

    ``baseline="leave_one_out"`` subtracts the mean of the *other* rewards of the group (RLOO, usually with
    ``scale="none"``); a reward that is alone has no other, and a baseline of 0.

    >>> import jax.numpy as jnp
    >>> from logitless import group_advantages
    >>> group_advantages(jnp.array([1.0, 0.0, 1.0, 1.0]), group_size=2, scale="none").tolist()
    [0.5, -0.5, 0.0, 0.0]
    >>> rewards = jnp.array([1.0, 0.0, 2.0])
    >>> group_advantages(rewards, group_size=3, scale="none", baseline="leave_one_out").tolist()
    [0.0, -1.5, 1.5]
    """
    rewards = validation.floats("group_advantages", "rewards", rewards)
    if rewards.ndim != 1:
        raise ValueError(f"group_advantages: rewards has shape {rewards.shape}, expected one reward a completion [B].")
    if not isinstance(group_size, (int, np.integer)) or isinstance(group_size, bool):
        raise TypeError(f"group_advantages: group_size is {shown(group_size)}, expected a Python int (it is static).")
    if group_size < 1 or rewards.size == 0 or rewards.size % group_size:
        raise ValueError(
            f"group_advantages: {rewards.size} rewards do not split into groups of {group_size}; "
            "expected a non-empty multiple of group_size."
        )
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"group_advantages: scale={scale!r}, expected 'group', 'batch' or 'none'.")
    if baseline not in ("mean", "leave_one_out"):
        raise ValueError(f"group_advantages: baseline={baseline!r}, expected 'mean' or 'leave_one_out'.")
    r = rewards.astype(jnp.float32).reshape(-1, group_size)
    if group_size == 1:
        centred, std = r, jnp.ones_like(r)
    else:
        # Relative to the first: the mean of equal rewards is then exact, and eps cannot magnify its rounding.
        shifted = r - r[:, :1]
        centred = shifted - jnp.mean(shifted, axis=1, keepdims=True)
        std = jnp.std(shifted, axis=1, keepdims=True, ddof=1)
    if scale == "batch" and rewards.size > 1:
        std = jnp.std(r, ddof=1)
    if baseline == "leave_one_out" and group_size > 1:
        centred = centred * (group_size / (group_size - 1))  # r_i - mean of the others = n / (n - 1) (r_i - mean)
    if scale != "none":
        centred = jnp.where(centred == 0, 0.0, centred / (std + eps))
    return centred.reshape(-1)
