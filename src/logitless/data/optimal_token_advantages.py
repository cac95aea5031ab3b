"""Advantages per token, relative to the optimal token baseline."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core import validation
from logitless.core.promotion import own_promotion
from logitless.core.shapes import Float
from logitless.core.stats import TokenStats
from logitless.data.group_advantages import checked_groups

_EPS = 1e-8


@own_promotion
def optimal_token_advantages(
    rewards: Float[Array, "B"],
    stats: TokenStats,
    mask: Array,
    group_size: int,
    *,
    token_weights: Float[Array, "B T"] | None = None,
    zero_tail: bool = False,
) -> Float[Array, "B T"]:
    """``r - b_t`` per token with the optimal token baseline (OTB) of groups of ``group_size`` consecutive completions.

    ``b_t = sum_i r_i W_it / (sum_i W_it + 1e-8)`` over the completions of the group that are live in column ``t``. The
    energy ``W_it`` is the sum of ``1 - 2 p + sum_v p_v^2`` over the live tokens of completion ``i`` up to ``t``: the
    squared norm of the gradient of ``logp`` by the logits. ``stats`` (``logp`` and ``log_sum_p2``) are those of the
    policy that drew the tokens, as from :func:`logitless.linear_logprobs`. ``token_weights``, importance ratios of the
    tokens, enter squared. Completions begin in one column; masked tokens have advantages of 0.

    Groups with a single row have no baseline. Where one completion is longer than all others of its group, the tail has
    itself as the baseline, and advantages of 0; with ``zero_tail=True`` the tail has no baseline (veRL's
    ``handle_zero_tail``).

    >>> import jax.numpy as jnp
    >>> from logitless import TokenStats, optimal_token_advantages
    >>> stats = TokenStats(logp=jnp.log(jnp.full((2, 2), 0.5)), log_sum_p2=jnp.log(jnp.full((2, 2), 0.5)))
    >>> optimal_token_advantages(jnp.array([1.0, 0.0]), stats, jnp.ones((2, 2)), group_size=2).round(4).tolist()
    [[0.5, 0.5], [-0.5, -0.5]]
    """
    name = "optimal_token_advantages"
    r = checked_groups(name, rewards, group_size)
    if not isinstance(stats, TokenStats) or stats.log_sum_p2 is None:
        raise TypeError(f"{name}: expected stats to be TokenStats with log_sum_p2, as linear_logprobs returns them.")
    if jnp.ndim(stats.logp) != 2 or jnp.shape(stats.logp)[0] != rewards.size:
        raise ValueError(f"{name}: stats.logp has shape {jnp.shape(stats.logp)}, expected [{rewards.size}, T].")
    shape = jnp.shape(stats.logp)
    arrays = {"stats.log_sum_p2": stats.log_sum_p2, "token_weights": token_weights}
    for key, array in arrays.items():
        if array is not None:
            validation.token_array(name, key, array, shape, "stats.logp")
    live = validation.as_array(name, "mask", mask)
    validation.same_shape(name, "mask", live, shape, "stats.logp")
    live = validation.zero_or_one(name, mask, live)

    logp = jnp.where(live, stats.logp, 0.0).astype(jnp.float32)
    # sum p^2 without the token's own, as a factor: the difference would cancel where p is close to 1.
    squares = stats.log_sum_p2.astype(jnp.float32)
    others = -jnp.exp(squares) * jnp.expm1(jnp.minimum(2.0 * logp - squares, 0.0))
    energy = jnp.square(jnp.expm1(logp)) + others
    if token_weights is not None:
        energy = energy * jnp.square(token_weights)
    groups = (*r.shape, shape[1])
    inside = live.reshape(groups)
    energy = jnp.where(inside, jnp.cumsum(jnp.where(live, energy, 0.0), axis=1).reshape(groups), 0.0)
    # Rewards relative to the first: those of a group are often equal, and their differences then exact.
    shifted = (r - r[:, :1])[..., None]
    total = jnp.sum(energy, axis=1, keepdims=True)
    advantages = shifted * total - jnp.sum(energy * shifted, axis=1, keepdims=True) + _EPS * r[..., None]
    advantages = advantages / (total + _EPS)
    if group_size == 1:
        advantages = jnp.broadcast_to(r[..., None], groups)
    elif zero_tail:
        alone = jnp.sum(inside, axis=1, keepdims=True) == 1
        advantages = jnp.where(alone, r[..., None], advantages)
    return jax.lax.stop_gradient(jnp.where(inside, advantages, 0.0).reshape(shape))
