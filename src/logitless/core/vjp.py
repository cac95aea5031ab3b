"""The two custom gradients that serve every backend, at both levels, on one device or many.

    stats        statistics now, gradients later from whatever cotangents arrive
    token_loss   uncoupled objectives: loss and gradients out of one pass (``Backend.gradients_in_forward``)

Both ask ``custom_vjp`` which gradients are wanted: one that is not asked for costs nothing. A backend implements
:class:`logitless.core.backend.Backend`. JAX differentiates the dense reference, without either.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.typing import ArrayLike
from jaxtyping import PyTree

from logitless.core.backend import Backend
from logitless.core.problem import Loss, Problem, Source, Wanted, perturbed
from logitless.core.promotion import own_promotion
from logitless.core.pytree import register, static
from logitless.core.stats import StatCotangents, TokenStats


@register
@dataclasses.dataclass(frozen=True)
class Static:
    """A hashable value among the residuals of a custom_vjp: a pytree without leaves."""

    value: Wanted | bool = static()


def _values(tree: PyTree) -> PyTree:
    """The values inside a tree of ``CustomVJPPrimal``."""
    return jax.tree.map(lambda p: p.value, tree, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))


def _refuse(call: str, constants: dict[str, PyTree]) -> None:
    """Raise if a gradient is asked for with respect to an argument that this call holds constant."""
    for name, tree in constants.items():
        if perturbed(tree):
            raise ValueError(
                f"{call}: a gradient with respect to {name} was asked for, but it is a constant of this backend; "
                f"wrap it in jax.lax.stop_gradient, or use backend='reference', which differentiates everything."
            )


def _instantiate(ct: ArrayLike | SymbolicZero) -> Array:
    """A cotangent as a JAX array, symbolic zeros and NumPy arrays included."""
    return jnp.zeros(ct.shape, jnp.float32) if isinstance(ct, SymbolicZero) else jnp.asarray(ct)


def only_three_differentiable(stats: TokenStats) -> TokenStats:
    """Statistics with ``stop_gradient`` on the extras; :func:`stats` lists the differentiable fields."""
    constant, selected = jax.lax.stop_gradient(stats), stats.selected
    if selected is not None:
        rest = jax.lax.stop_gradient((selected.rest_peak, selected.rest_total))
        selected = dataclasses.replace(selected, rest_peak=rest[0], rest_total=rest[1])
    own = {k: getattr(stats, k) for k in ("logp", "entropy", "lse", "divergence")}
    return dataclasses.replace(constant, **own, selected=selected)


# -- statistics now, gradients later ---------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def stats(backend: Backend, p: Problem[Source]) -> tuple[TokenStats, object]:
    """``(statistics, report)``; differentiable with respect to what the problem says. The report is empty unless a
    gradient is taken."""
    return backend.statistics(p)


@own_promotion
def _stats_fwd(backend: Backend, p: Problem[Source]) -> tuple[tuple[TokenStats, object], PyTree]:
    _refuse(p.call.name, p.constants())
    want, p = p.wanted(), _values(p)
    out, report, residual = backend.forward(p, want)
    return (out, report), (Static(want), p, out, residual)


@own_promotion
def _stats_bwd(backend: Backend, saved: PyTree, ct: tuple[TokenStats, object]) -> tuple[PyTree]:
    want, p, out, residual = saved
    of = ct[0]
    is_zero = lambda x: isinstance(x, SymbolicZero)  # noqa: E731
    # Cotangents that count; all others are zero by contract.
    wanted = StatCotangents(of.logp, of.entropy, of.lse, of.divergence, of.selected)
    others = jax.tree.leaves((of.entropy, of.lse, of.divergence, of.selected), is_leaf=is_zero)
    only_logp = all(map(is_zero, others))
    g = jax.tree.map(lambda c: _instantiate(c).astype(jnp.float32), wanted, is_leaf=is_zero)
    return (p.cotangent(backend.backward(p, want.value, out, g, residual, only_logp)),)


stats.defvjp(_stats_fwd, _stats_bwd, symbolic_zeros=True)


# -- uncoupled objectives --------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_loss(backend: Backend, p: Problem[Source], loss: Loss) -> tuple[Array, TokenStats, object]:
    """``(loss, statistics, report)`` of an uncoupled objective; the loss is differentiable as :func:`stats` is.

    The statistics are for metrics: the caller must wrap them in ``stop_gradient``, and a cotangent for them is an
    error.
    """
    out, report = backend.statistics(p, loss)
    return loss.total(out), out, report


@own_promotion
def _token_loss_fwd(backend: Backend, p: Problem[Source], loss: Loss) -> tuple[PyTree, PyTree]:
    _refuse(p.call.name, dict(p.constants(), objective=loss.objective, **{"the loss's inputs": loss.inputs}))
    want = p.wanted()
    p, loss = _values((p, loss))
    if not want:
        return token_loss(backend, p, loss), None
    out, report, gradients = backend.gradients_in_forward(p, want, loss)
    return (loss.total(out), out, report), p.cotangent(gradients)


@own_promotion
def _token_loss_bwd(backend: Backend, gradients: PyTree, ct: tuple[Any, TokenStats, object]) -> tuple[PyTree, None]:
    # Keep each gradient's dtype. XLA folds the multiplication away for the constant cotangent 1, as under
    # ``value_and_grad``.
    g = _instantiate(ct[0])
    return jax.tree.map(lambda d: (d.astype(jnp.float32) * g).astype(d.dtype), gradients), None


token_loss.defvjp(_token_loss_fwd, _token_loss_bwd, symbolic_zeros=True)
