"""What a backend offers, and what it says about a call: the types between ``route``, ``vjp`` and the backends.

A backend is a small frozen object without arrays. ``registry`` lists them in order; those around a backend
(:class:`Around`) are in ``head/sparse/backend.py``, ``head/mosaic_gpu/sparse.py``, ``head/pallas_tpu/sparse.py``,
``head/dense_report.py`` and ``mesh/over_mesh.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, ParamSpec, Protocol, TypeVar

from jaxtyping import PyTree

from logitless.core.divergences import PairSums, ShardOfPair
from logitless.core.problem import Loss, Take
from logitless.core.stats import RowSums, StatCotangents, TokenStats
from logitless.core.top_k import TopK

P = TypeVar("P", contravariant=True)  # the problems that a backend serves: Problem[Linear], Problem[Given] or both
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


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a call costs on one device, in words and numbers."""

    way: str
    matmuls: str
    bytes_moved: str
    tiles: dict[str, Any] = dataclasses.field(default_factory=dict)
    counts: Counts | None = None
    """``None`` where it depends on the data (a sparse backward)."""
    fused_statistics: bool = False
    """Statistics without a gradient never hold logits."""


class Backend(Protocol[P]):
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

    def forward(self, p: P, want: Any) -> tuple[TokenStats, object, PyTree]:
        """``(statistics, report, residual)``: statistics equal to :meth:`statistics` bit by bit, and the residual for
        :meth:`backward`."""

    def backward(self, p: P, want: Any, out: TokenStats, g: StatCotangents, residual: PyTree, only_logp: bool) -> Any:
        """The gradients that are wanted, for cotangents ``g``; ``only_logp``: those of entropy and lse are zero."""

    def gradients_in_forward(self, p: P, want: Any, loss: Loss) -> tuple[TokenStats, object, PyTree]:
        """``(statistics, report, gradients)`` of an uncoupled objective, for a unit cotangent of the loss."""


class Ranking(Backend[P], Protocol[P]):
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


class PlainJax:
    """What backends without kernels have in common; see :class:`Backend` and :class:`Divisible`."""

    kernels: ClassVar[str | None] = None
    head_in_parts: ClassVar[bool] = False

    def supports(self, p: Any, split: Split) -> str | None:
        """They serve everything."""
        return None

    def tokens_kept(self, p: Any) -> int:
        return 0

    def shard_residual(self, p: object, stats: TokenStats, sums: RowSums, part: None, total: Take) -> None:
        """Nothing of the forward pass is kept."""


class Divisible(Backend[P], Protocol[P]):
    """A backend that can serve a shard of the vocabulary (``mesh/vocab_parallel.py``)."""

    def sums(self, p: P, want: Any) -> tuple[RowSums, PyTree]:
        """``(sums, part)`` over the local columns: the contribution of a vocabulary shard, and the input of
        :meth:`shard_residual`."""

    def shard_of_pair(self, p: P) -> ShardOfPair:
        """Sums and statistics of both distributions over the columns that are here, in one sweep."""

    def pair_sums(self, p: P, stats: TokenStats, teacher: TokenStats) -> PairSums:
        """Sums of the divergence over the columns that are here, from the statistics over all columns."""

    def shard_residual(self, p: P, stats: TokenStats, sums: RowSums, part: PyTree, total: Take) -> PyTree:
        """The residual of a shard, once the statistics of all shards are known; ``total`` sums an array over them."""


@dataclasses.dataclass(frozen=True)
class Around:
    """A backend around ``own``, which has everything that is not said otherwise."""

    own: Backend

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

    def supports(self, p: Any, split: Split) -> str | None:
        return self.own.supports(p, split)

    def tokens_kept(self, p: Any) -> int:
        return self.own.tokens_kept(p)

    def describe(self, p: Any, way: Way) -> Cost:
        return self.own.describe(p, way)
