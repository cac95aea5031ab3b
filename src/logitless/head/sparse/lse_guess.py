"""What is known of a row's logsumexp before its logits are: the guess by which a screen for columns begins.

    lse_t >= z_ty                                       the target's logit, one dot product a token
    lse_t ~= z_ty - (its log-probability before)        where the sampler or an earlier pass has given that

A guess that is too low lets more columns through, one that is too high fewer. What each row then leaves out is computed
from the logits of the columns that are kept, so a bad guess costs time, never truth.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from logitless.core.problem import Problem
from logitless.core.stats import forward

Gather = Callable[[Array, Array], Array]
"""``(x [V, H], at [K]) -> [K, H]``."""


def target_logits(p: Problem, gather: Gather | None = None) -> Array:
    """Target logits ``z [N]``: one dot product per token. Zero for a target outside the vocabulary. ``gather``: that of
    a ``[V, H]`` head's rows, if not XLA's."""
    inside = (p.targets >= 0) & (p.targets < p.call.vocab_size)
    at = jnp.where(inside, p.targets, 0)
    if gather is not None and p.head.axis == 0:
        w = gather(p.head.weight, at)
    else:
        w = p.head.weight.at[at].get() if p.head.axis == 0 else p.head.weight.at[:, at].get().T
    x = jnp.sum(p.h.astype(jnp.float32) * w.astype(jnp.float32), axis=1)
    if p.head.bias is not None:
        x = x + p.head.bias.astype(jnp.float32).at[at].get()
    return jnp.where(inside, forward(x, p.transform), 0.0)


def expected_lse(p: Problem, before: Array | None, gather: Gather | None = None) -> Array:
    """``[N]``: what the logsumexp may be; ``before [N]`` are log-probabilities of the targets by an earlier pass, or by
    the sampler (NaN where one is missing). ``gather``: see :func:`target_logits`."""
    target = target_logits(p, gather)
    return target if before is None else target - jnp.where(jnp.isnan(before), 0.0, before)
