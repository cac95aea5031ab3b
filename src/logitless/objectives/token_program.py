"""An uncoupled objective as something a kernel can run on its own rows.

A kernel holds a token's statistics and needs its cotangents on the spot. It cannot close over arrays, so the objective
is taken apart into a flat list of scalars (eps, beta, ...), a flat list of per-token columns (mask, advantage, old
log-probability, ...) and a pure function of both. The function is :func:`logitless.objectives.loss.cotangents`, traced
into the kernel; there is no second formula.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from logitless.objectives.inputs import LossInputs
from logitless.objectives.loss import cotangents
from logitless.objectives.objective import Objective


@dataclasses.dataclass(frozen=True)
class TokenProgram:
    """``run(scalars, columns, logp, entropy) -> (g_logp, g_entropy)``, elementwise in ``columns`` and statistics.

    ``scalars`` are float32 of shape ``()``; ``columns`` are float32, one value per token, in whatever block shape the
    kernel uses (they broadcast with ``logp`` and ``entropy``).
    """

    scalars: tuple[Array, ...]
    columns: tuple[Array, ...]  # each [N] float32
    run: Callable[[Sequence[Array], Sequence[Array], Array, Array], tuple[Array, Array]]


def token_program(objective: Objective, inputs: LossInputs) -> TokenProgram:
    """Take an uncoupled objective and its flattened (``[N]``) inputs apart."""
    assert objective.coupling() is None and inputs.sequences is None
    leaves, objective_tree = jax.tree.flatten(dataclasses.replace(objective, temperature=None))
    scalars = tuple(jnp.asarray(v, jnp.float32) for v in leaves)
    parts, inputs_tree = jax.tree.flatten(inputs.for_sweep())
    size = inputs.mask.size
    # A leaf of LossInputs is a column, or (a temperature that divides logp) possibly a scalar.
    columns = tuple(jnp.broadcast_to(jnp.asarray(v, jnp.float32).reshape(-1), (size,)) for v in parts)

    def run(s: Sequence[Array], c: Sequence[Array], logp: Array, entropy: Array) -> tuple[Array, Array]:
        o = jax.tree.unflatten(objective_tree, list(s))
        x = jax.tree.unflatten(inputs_tree, list(c))
        return cotangents(o, logp, entropy, dataclasses.replace(x, mask=x.mask > 0))[:2]

    return TokenProgram(scalars, columns, run)
