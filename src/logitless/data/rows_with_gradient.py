"""Which sequences can have a gradient at all, before any of them has been through the model.

A group whose answers are all right, or all wrong, has advantages of zero: without a KL term and an entropy bonus its
rows move nothing, and a trainer that leaves them out computes the same gradient with less work.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from logitless.core import validation
from logitless.core.promotion import own_promotion
from logitless.core.shapes import Bool, Float, Int
from logitless.objectives.inputs import prepare
from logitless.objectives.objective import Objective


@own_promotion
def rows_with_gradient(
    objective: Objective,
    advantages: Float[Array, "B"] | Float[Array, "B 1"] | Float[Array, "B T"],
    mask: Array,
    *,
    old_logp: Float[Array, "B T"] | None = None,
    ref_logp: Float[Array, "B T"] | None = None,
    rollout_logp: Float[Array, "B T"] | None = None,
    token_weights: Float[Array, "B T"] | Float[Array, "B 1"] | Float[Array, "B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Bool[Array, "B"]:
    """Rows that can have a gradient: a row that is ``False`` has none, and no other row's gradient depends on it.

    The arrays are those of the loss call, ``[B, T]`` with ``mask``; those that are not known yet may be left out. A row
    is ``False`` if its gradient is zero for any policy:

    - the row has no unmasked token, or
    - the objective has no KL term, no entropy bonus and no ``top_entropy`` (a quantile over the whole batch), and each
      token has an advantage of zero, a token weight of zero, or a correction weight of
      zero (``correction_mode="mask"``, with ``old_logp`` and ``rollout_logp``; ``vespo`` folds its weights in, and they
      are never zero there).

    With ``segment_ids`` a row counts if one of its segments does. A row with a NaN in one of its arrays counts, so that
    leaving rows out hides no NaN. ``beta`` and ``entropy_coef`` may be traced: at zero their terms do not count.

    A trainer that updates on these rows alone must go on dividing by the counts of the whole batch:
    ``denominator=loss_denominator(objective, mask)``, and ``entropy_denominator`` likewise.

    >>> import jax.numpy as jnp
    >>> from logitless import Objective, group_advantages, rows_with_gradient
    >>> advantages = group_advantages(jnp.array([1.0, 0.0, 1.0, 1.0]), group_size=2)
    >>> mask = jnp.ones((4, 3))
    >>> rows_with_gradient(Objective(), advantages, mask).tolist()
    [True, True, False, False]
    >>> rows_with_gradient(Objective(beta=0.04), advantages, mask).tolist()
    [True, True, True, True]
    """
    name, given = "rows_with_gradient", locals()
    objective = validation.objective_of(name, objective)
    mask = validation.as_array(name, "mask", mask)
    if mask.ndim != 2:
        raise ValueError(f"{name}: mask has shape {mask.shape}, expected [B, T].")
    # A KL term is looked at below, and a correction without the arrays that it needs is one that is not known.
    lean = objective.replace(beta=None)
    if old_logp is None or rollout_logp is None:
        lean = lean.replace(correction=None, correction_mode="truncate")
    live = validation.zero_or_one(name, given["mask"], mask)
    arrays = validation.loss_arrays(name, lean, mask.shape, given)
    x = prepare(lean, live, arrays)
    moving = x.advantage != 0  # NaN is not zero
    if x.correction is not None:
        moving &= x.correction != 0
    moving |= jnp.isnan(x.weight)  # which holds the NaN of every other array
    if objective.top_entropy is not None:
        moving |= True
    for coefficient in (objective.beta, objective.entropy_coef):
        if coefficient is not None:
            moving |= coefficient != 0
    if x.ref is not None and objective.beta is not None:
        moving |= ~jnp.isfinite(x.ref)  # zero times infinity is no zero
    return jnp.any(live & moving, axis=1)
