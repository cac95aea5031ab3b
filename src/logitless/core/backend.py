"""What a backend offers, what it says about a call, and the two custom gradients that run it, at both levels, on one
device or many.

    stats        statistics now, gradients later from whatever cotangents arrive
    token_loss   uncoupled objectives: loss and gradients out of one pass (``Backend.gradients_in_forward``)

Both ask ``custom_vjp`` which gradients are wanted: one that is not asked for costs nothing. JAX differentiates the
dense reference, without either.

A backend is a small frozen object without arrays. ``registry`` lists them in order; those around a backend
(:class:`Around`) are in ``head/sparse/backend.py``, ``head/mosaic_gpu/sparse.py``, ``head/pallas_tpu/sparse.py``,
``head/dense_report.py`` and ``mesh/over_mesh.py``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, Generic, Literal, ParamSpec, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.typing import ArrayLike

from logitless.core.divergences import PairSums, ShardOfPair
from logitless.core.problem import Loss, Problem, Source, Take, Wanted, perturbed
from logitless.core.promotion import own_promotion
from logitless.core.pytree import register, static
from logitless.core.shapes import PyTree
from logitless.core.stats import RowSums, StatCotangents, TokenStats
from logitless.core.top_k import TopK

P = TypeVar("P", contravariant=True)  # the problems that a backend serves: Problem[Linear], Problem[Given] or both
W = TypeVar("W", contravariant=True)  # what their ``wanted()`` gives: Wanted or bool
Q = ParamSpec("Q")


@dataclasses.dataclass(frozen=True)
class Way:
    """How a call goes through a backend; what :meth:`Backend.describe` puts into words."""

    loss: bool  # a loss call, not one for statistics
    in_forward: bool  # loss and gradients in a single pass
    reason: str | None  # why not, if not
    entropy: bool = False  # the entropy has a gradient
    mass: float | None = None  # of a sparse backward: what a row may leave out; NaN if it is traced
    shards: int = 1  # of the vocabulary


@dataclasses.dataclass(frozen=True)
class Split:
    """How a mesh and a loss split a call, as far as the choice of a backend depends on it."""

    late: bool = False  # cotangents arrive after the forward pass
    vocabulary: int = 1  # shards of the vocabulary
    head_gathered: bool = False  # FSDP: each device gathers the head
    summed: bool = False  # gradients are parts of a sum over devices
    dw_parts: int = 1  # ``head_in_parts``: dW is summed over devices in so many parts, one after the other


Counts = tuple[float, int, int]
"""Matmuls per token that has a gradient: with both gradients, with a frozen head, without any gradient."""


Stored = Literal["logits", "dx", "bits", "nothing"]
"""What memory holds of a row of the vocabulary: the logits of a chunk of tokens, also the dx of all tokens, a bit for
each token and column, or nothing."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a call costs on one device, in words and numbers."""

    way: str
    matmuls: str
    bytes_moved: str
    tiles: dict[str, object] = dataclasses.field(default_factory=dict)
    """Chunks and tiles by name, for a reader."""
    counts: Counts | None = None
    """``None`` where it depends on the data (a sparse backward)."""
    fused_statistics: bool = False
    """Statistics without a gradient never hold logits."""
    sweep: int = 0
    """Tokens for which each matmul reads the head once; 0: all."""
    columns: int = 0
    """Of a slab whose logits are in memory; 0: whole rows."""
    stored: Stored = "logits"
    exact_if_flat: bool = False
    """Of a sparse backward without logits: where the policy is flat, the exact backend serves the call."""


class Backend(Protocol[P, W]):
    """How a problem (``Problem``, from hidden states or from logits) is worked on. Hashable: it is a static argument.

    Gradients are ``Gradients`` at the head level and an array of dlogits at the logits level. A ``report`` says what a
    sparse backward left out; ``None`` elsewhere. ``want`` is what the problem's ``wanted()`` gives.
    """

    @property
    def name(self) -> str: ...

    @property
    def kernels(self) -> str | None:
        """The platform whose kernels it needs; ``None`` for plain JAX."""

    @property
    def in_forward(self) -> bool:
        """Whether :meth:`gradients_in_forward` costs less than :meth:`forward` and :meth:`backward`."""

    @property
    def head_in_parts(self) -> bool:
        """Whether dW leaves in its final dtype: over a mesh, a part at a time (``mesh/head_pieces.py``)."""

    def supports(self, p: P, split: Split) -> str | None:
        """Why it cannot serve a call (one device's shapes); ``None`` if it can."""

    def tokens_kept(self, p: P) -> int:
        """Tokens whose logits (on TPU exponentials) the forward pass keeps for cotangents that arrive later."""

    def describe(self, p: P, way: Way) -> Cost:
        """Cost of a call, from the shapes on one device."""

    def statistics(self, p: P, loss: Loss | None = None) -> tuple[TokenStats, object]:
        """``(statistics, report)`` where no gradient is wanted; with ``loss``, to the bit those that
        :meth:`gradients_in_forward` gives."""

    def forward(self, p: P, want: W) -> tuple[TokenStats, object, PyTree]:
        """``(statistics, report, residual)``: statistics equal to :meth:`statistics` bit by bit, and the residual for
        :meth:`backward`."""

    def backward(self, p: P, want: W, out: TokenStats, g: StatCotangents, residual: PyTree, only_logp: bool) -> PyTree:
        """The gradients that are wanted, for cotangents ``g``; ``only_logp``: those of entropy and lse are zero."""

    def gradients_in_forward(self, p: P, want: W, loss: Loss) -> tuple[TokenStats, object, PyTree]:
        """``(statistics, report, gradients)`` of an uncoupled objective, for a unit cotangent of the loss."""


class Ranking(Backend[P, W], Protocol[P, W]):
    """A backend that finds the likeliest ids."""

    def top_k(self, p: P) -> TopK:
        """The likeliest ids of each token, as many as ``Call.top_k``."""


def refusal(check: Callable[Q, object], *args: Q.args, **kwargs: Q.kwargs) -> str | None:
    """What ``check`` refuses by ``NotImplementedError``; ``None`` if nothing."""
    try:
        check(*args, **kwargs)
    except NotImplementedError as error:
        return str(error)
    return None


class PlainJax(Generic[P]):
    """What backends without kernels have in common; see :class:`Backend` and :class:`Divisible`."""

    kernels: ClassVar[str | None] = None
    head_in_parts: ClassVar[bool] = False

    def supports(self, p: P, split: Split) -> str | None:
        """They serve everything."""
        return None

    def tokens_kept(self, p: P) -> int:
        return 0

    def shard_residual(self, p: object, stats: TokenStats, sums: RowSums, part: None, total: Take) -> None:
        """Nothing of the forward pass is kept."""


class Divisible(Backend[P, W], Protocol[P, W]):
    """A backend that can serve a shard of the vocabulary (``mesh/vocab_parallel.py``)."""

    def sums(self, p: P, want: W | None) -> tuple[RowSums, PyTree]:
        """``(sums, part)`` over the local columns: the contribution of a vocabulary shard, and the input of
        :meth:`shard_residual`."""

    def shard_of_pair(self, p: P) -> ShardOfPair:
        """Sums and statistics of both distributions over the columns that are here, in one sweep."""

    def pair_sums(self, p: P, stats: TokenStats, teacher: TokenStats) -> PairSums:
        """Sums of the divergence over the columns that are here, from the statistics over all columns."""

    def shard_residual(self, p: P, stats: TokenStats, sums: RowSums, part: PyTree, total: Take) -> PyTree:
        """The residual of a shard, once the statistics of all shards are known; ``total`` sums an array over them."""


@dataclasses.dataclass(frozen=True)
class Around(Generic[P, W]):
    """A backend around ``own``, which has everything that is not said otherwise."""

    own: Backend[P, W]

    @property
    def name(self) -> str:
        return self.own.name

    @property
    def kernels(self) -> str | None:
        return self.own.kernels

    @property
    def in_forward(self) -> bool:
        return self.own.in_forward

    @property
    def head_in_parts(self) -> bool:
        return self.own.head_in_parts

    def supports(self, p: P, split: Split) -> str | None:
        return self.own.supports(p, split)

    def tokens_kept(self, p: P) -> int:
        return self.own.tokens_kept(p)

    def describe(self, p: P, way: Way) -> Cost:
        return self.own.describe(p, way)


# -- the custom gradients ----------------------------------------------------------------------------------------------


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
def _token_loss_bwd(
    backend: Backend, gradients: PyTree, ct: tuple[ArrayLike | SymbolicZero, TokenStats, object]
) -> tuple[PyTree, None]:
    # Keep each gradient's dtype. XLA folds the multiplication away for the constant cotangent 1, as under
    # ``value_and_grad``.
    g = _instantiate(ct[0])
    return jax.tree.map(lambda d: (d.astype(jnp.float32) * g).astype(d.dtype), gradients), None


token_loss.defvjp(_token_loss_fwd, _token_loss_bwd, symbolic_zeros=True)
