"""The shift of a causal model: position ``t`` predicts token ``t + 1``."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from logitless.core import validation
from logitless.core.promotion import own_promotion
from logitless.core.shapes import Bool, Int


@own_promotion
def next_tokens(
    ids: Int[Array, "B T"], completion_mask: Array | None = None, *, segment_ids: Int[Array, "B T"] | None = None
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """``(targets, mask)`` for the hidden states or logits of a causal model that has read ``ids``.

    ``hidden[:, t]`` predicts ``ids[:, t + 1]``, so ``targets[:, t] = ids[:, t + 1]``, and a position counts if the
    token that it *predicts* does. The last position predicts nothing: it is masked, and its target is 0.

    Args:
      ids: prompt and completion, as the model read them.
      completion_mask: 1 where a token was sampled (and is no padding); ``None`` for all.
      segment_ids: of packed rows; the last position of a segment predicts nothing.

    Per-token arrays that a sampler recorded at the tokens themselves (``rollout_logp``) need the same shift:
    ``jnp.roll(x, -1, axis=1)``, whose last column is masked.

    >>> import jax.numpy as jnp, logitless
    >>> ids = jnp.array([[5, 6, 7, 8]])              # two tokens of the prompt, two sampled ones
    >>> targets, mask = logitless.next_tokens(ids, jnp.array([[0, 0, 1, 1]]))
    >>> targets.tolist(), mask.astype(int).tolist()
    ([[6, 7, 8, 0]], [[0, 1, 1, 0]])
    """
    name = "next_tokens"
    ids = validation.int32_ids(name, "ids", ids)
    if ids.ndim != 2:
        raise ValueError(f"{name}: ids has shape {ids.shape}, expected integer ids [B, T].")
    live = validation.mask_array(name, completion_mask, ids.shape)
    live = jnp.ones(ids.shape, bool) if live is None else live
    within = jnp.arange(ids.shape[1]) < ids.shape[1] - 1
    if segment_ids is not None:
        segment_ids = validation.segment_array(name, segment_ids, ids.shape)
        within = within & (segment_ids == jnp.roll(segment_ids, -1, axis=1))
    return jnp.pad(ids[:, 1:], ((0, 0), (0, 1))), jnp.roll(live, -1, axis=1) & within
