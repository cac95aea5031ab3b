"""Small helpers around ``jax.custom_vjp(symbolic_zeros=True)``: what is asked for, and what is not differentiable."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from logitless.stats import StatCotangents, TokenStats


def _is_primal(x: Any) -> bool:
    return isinstance(x, CustomVJPPrimal)


def values(tree: Any) -> Any:
    """The values inside a tree of ``CustomVJPPrimal``."""
    return jax.tree.map(lambda p: p.value, tree, is_leaf=_is_primal)


def wanted(tree: Any) -> bool:
    """Whether a gradient is asked for with respect to anything in the tree."""
    return any(p.perturbed for p in jax.tree.leaves(tree, is_leaf=_is_primal) if _is_primal(p))


def refuse(call: str, **constants: Any) -> None:
    """Raise if a gradient is asked for with respect to an argument that this call holds constant."""
    for name, tree in constants.items():
        if wanted(tree):
            raise ValueError(
                f"{call}: a gradient with respect to {name} was asked for, but it is a constant of this backend; "
                f"wrap it in jax.lax.stop_gradient, or use backend='reference', which differentiates everything."
            )


def instantiate(ct: Any) -> Array:
    """A cotangent as a JAX array, symbolic zeros and NumPy arrays included."""
    return jnp.zeros(ct.shape, jnp.float32) if isinstance(ct, SymbolicZero) else jnp.asarray(ct)


def scaled(gradients: Any, ct: Any) -> Any:
    """Gradients that the forward pass took, times the loss's cotangent ``ct``, each in its own dtype.

    This folds away where the cotangent is the constant one, as it is under ``value_and_grad``.
    """
    g = instantiate(ct)
    return jax.tree.map(lambda d: (d.astype(jnp.float32) * g).astype(d.dtype), gradients)


def stat_cotangents(ct: TokenStats) -> StatCotangents:
    """The three cotangents that count; those of the other statistics are zero by contract."""
    return StatCotangents(*(instantiate(c).astype(jnp.float32) for c in (ct.logp, ct.entropy, ct.lse)))


def only_three_differentiable(stats: TokenStats) -> TokenStats:
    """Statistics whose extras carry no gradient."""
    stop = jax.lax.stop_gradient
    extras = (stats.max_logit, stats.log_sum_p2, stats.is_top1, stats.max_logp)
    return TokenStats(stats.logp, stats.entropy, stats.lse, *map(stop, extras))


@dataclasses.dataclass(frozen=True)
class Static:
    """A hashable value among the residuals of a custom_vjp: a pytree without leaves."""

    value: Any


jax.tree_util.register_pytree_node(Static, lambda s: ((), s.value), lambda value, _: Static(value))
