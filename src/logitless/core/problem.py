"""What a call works on, from the public function down to the kernels: arrays as leaves, static choices beside them.

    Problem   where logits come from, targets, transform, mask   -> statistics, gradients of the source
    Source    Linear (hidden states and a head) or Given (logits)
    Teacher   a second, constant source for the same tokens
    Loss      an objective and its per-token constants           -> loss, cotangents of the statistics
    Call      the static choices of one call

On one device tokens are flat, ``[N]``. Over a mesh they keep their dimensions, ``[*tokens]``, until each device
flattens its own part. A chunk of a problem is a problem (:meth:`Problem.rows`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Literal, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import CustomVJPPrimal

from logitless.core.divergences import Divergence
from logitless.core.pytree import register, static, tree_of, with_leaves
from logitless.core.shapes import PyTree
from logitless.core.stats import LogitTransform, StatCotangents, TokenStats, blank_stats
from logitless.objectives.inputs import LossInputs
from logitless.objectives.loss import contributions, cotangents, may_have_gradient
from logitless.objectives.objective import Objective

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    S = TypeVar("S", bound="Source", default="Linear", covariant=True)
else:
    from typing import TypeVar

    S = TypeVar("S")

Layout = Literal["vh", "hv"]
Take = Callable[[Array], Array]


@dataclasses.dataclass(frozen=True)
class Call:
    """Static choices of a call: the user's options, resolved by the route."""

    name: str  # of the public call, for messages
    vocab_size: int  # real columns; those beyond are padding
    backend: str | None = None  # that was named
    chunk_size: int | None = None  # that was asked for
    memory_budget: int | None = None  # bytes for arrays as wide as the vocabulary
    chunk: int = 0  # tokens per chunk, as decided
    kept: int = 0  # tokens whose logits (on TPU exponentials) a forward sweep keeps for the backward pass, as decided
    mass: float | None = None  # what a row may leave out of a sparse backward; NaN if it is traced
    logits_dtype: jnp.dtype = jnp.dtype(jnp.float32)
    sum_head_grad_in: str = "float32"  # or "param"
    logp_only: bool = True  # no gradient of entropy or lse is expected
    interpret: Any = False
    donate: bool = False  # dlogits may take the place of the logits
    bwd_impl: str = "pallas"  # dlogits by the backend's kernel, or by plain JAX ("jax")
    top_k: int = 0  # ids of each token that linear_top_k is asked for
    partial_hidden: bool = False  # dH is a part of a sum over devices: leave it in float32
    partial_head: bool = False  # the same for the head's gradients: keep the dtype of their sum


@register
@dataclasses.dataclass(frozen=True)
class HeadArrays:
    """The head's arrays. ``None`` means "not there"."""

    weight: Array
    bias: Array | None = None
    lora_a: Array | None = None
    lora_b: Array | None = None
    lora_scale: Array | float = 1.0
    layout: Layout = static("vh")

    @property
    def axis(self) -> int:
        """The dimension of ``weight`` along which the vocabulary runs."""
        return 0 if self.layout == "vh" else 1

    @property
    def rank(self) -> int:
        """LoRA's rank; 0 without LoRA."""
        return 0 if self.lora_a is None else self.lora_a.shape[1]

    @property
    def vocab(self) -> int:
        """Number of columns of the logits, padding included."""
        return self.weight.shape[self.axis]


@register
@dataclasses.dataclass(frozen=True)
class HeadGrads:
    """Cotangents of a head's arrays; ``None`` where none is wanted."""

    weight: Array | None
    bias: Array | None
    lora_a: Array | None = None
    lora_b: Array | None = None

    def as_head(self, layout: Layout, lora_scale: Array | None) -> HeadArrays:
        """In the structure of the head."""
        return tree_of(HeadArrays, self.weight, self.bias, self.lora_a, self.lora_b, lora_scale, layout)


@register
@dataclasses.dataclass(frozen=True)
class Gradients:
    """What the backward pass of a :class:`Problem` gives."""

    hidden: Array | None
    head: HeadGrads


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which gradients are asked for."""

    hidden: bool
    weight: bool
    bias: bool = False
    lora: bool = False

    @property
    def matmuls(self) -> int:
        """Matmuls of the backward pass, without recomputed logits."""
        return int(self.hidden) + int(self.weight or self.lora)

    def __bool__(self) -> bool:
        return self.hidden or self.weight or self.bias or self.lora


def perturbed(tree: PyTree) -> bool:
    """Whether a gradient is asked for with respect to anything in a tree of ``CustomVJPPrimal``."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
    return any(p.perturbed for p in leaves if isinstance(p, CustomVJPPrimal))


@register
@dataclasses.dataclass(frozen=True)
class Linear:
    """Rows of logits from hidden states and a head; their gradient goes back to both."""

    hidden: Array  # [*tokens, H]
    head: HeadArrays

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the arrays that a gradient goes back to."""
        return self.hidden.dtype

    @property
    def width(self) -> int:
        """Number of columns that are here, padding included."""
        return self.head.vocab

    def rows(self, take: Take) -> Linear:
        """The rows of other tokens."""
        return Linear(take(self.hidden), self.head)

    def wanted(self) -> Wanted:
        """Gradients that ``custom_vjp`` asks for, read from a source of ``CustomVJPPrimal``."""
        h = self.head
        return Wanted(perturbed(self.hidden), perturbed(h.weight), perturbed(h.bias), perturbed((h.lora_a, h.lora_b)))

    def cotangent(self, g: Gradients) -> Linear:
        """Cotangents in the structure of the source; ``None`` (zero) where none was computed."""
        return tree_of(Linear, g.hidden, g.head.as_head(self.head.layout, None))


@register
@dataclasses.dataclass(frozen=True)
class Given:
    """Given rows of logits; their gradient is dlogits."""

    logits: Array  # [*tokens, V]

    @property
    def dtype(self) -> jnp.dtype:
        """See :attr:`Linear.dtype`."""
        return self.logits.dtype

    @property
    def width(self) -> int:
        """See :attr:`Linear.width`."""
        return self.logits.shape[-1]

    def rows(self, take: Take) -> Given:
        """See :meth:`Linear.rows`."""
        return Given(take(self.logits))

    def wanted(self) -> bool:
        """Whether ``custom_vjp`` asks for dlogits."""
        return perturbed(self.logits)

    def cotangent(self, dlogits: Array) -> Given:
        """See :meth:`Linear.cotangent`."""
        return Given(dlogits)


Source = Linear | Given
"""A source makes rows of logits and receives their gradient."""


@register
@dataclasses.dataclass(frozen=True)
class Teacher:
    """A second distribution for every token, over the policy's vocabulary: a constant. And the divergence from it."""

    source: Source
    transform: LogitTransform
    mix: Array | None = None  # of jsd
    divergence: Divergence = static("reverse_kl")

    def rows(self, take: Take) -> Teacher:
        """The rows of other tokens."""
        return dataclasses.replace(self, source=self.source.rows(take), transform=self.transform.rows(take))


@register
@dataclasses.dataclass(frozen=True)
class Problem(Generic[S]):
    """The tokens of a call, the source of their logits, and the work to do."""

    policy: S
    targets: Array
    transform: LogitTransform
    live: Array | None = None
    tolerance: Array | None = None  # mass that a row's gradient may leave out; None: exact
    teacher: Teacher | None = None
    ids: Array | None = None  # [*tokens, K], whose log-probabilities are asked for; -1: none
    support: Array | None = None  # [*tokens, K], ids that the softmax is over; a row of -1: the whole vocabulary
    call: Call = static(kw_only=True)

    @property
    def n(self) -> int:
        """Number of tokens."""
        return self.targets.size

    @property
    def h(self: Problem[Linear]) -> Array:
        """Hidden states of the policy."""
        return self.policy.hidden

    @property
    def head(self: Problem[Linear]) -> HeadArrays:
        """The policy's head."""
        return self.policy.head

    @property
    def logits(self: Problem[Given]) -> Array:
        """Logits of the policy."""
        return self.policy.logits

    @property
    def dweight_dtype(self: Problem[Linear]) -> jnp.dtype:
        """dtype of dW: the parameter's dtype, but float32 for a part of a sum over devices."""
        whole = self.call.partial_head and self.call.sum_head_grad_in == "float32"
        return jnp.dtype(jnp.float32) if whole else self.head.weight.dtype

    def with_hidden(self: Problem[Linear], hidden: Array) -> Problem[Linear]:
        """The same tokens with other hidden states of the policy."""
        return dataclasses.replace(self, policy=Linear(hidden, self.head))

    def with_head(self: Problem[Linear], head: HeadArrays) -> Problem[Linear]:
        """The same tokens under another head of the policy."""
        return dataclasses.replace(self, policy=Linear(self.h, head))

    def with_logits(self, logits: Array) -> Problem[Given]:
        """The same tokens, the policy's logits given."""
        return tree_of(dataclasses.replace, self, policy=Given(logits))

    def over_sources(self, f: Callable[[Source], Source]) -> Problem[S]:
        """The same call with ``f`` of every source of logits."""
        teacher = self.teacher
        if teacher is not None:
            teacher = dataclasses.replace(teacher, source=f(teacher.source))
        return with_leaves(self, policy=f(self.policy), teacher=teacher)

    def calling(self, **choices: Any) -> Self:
        """The same with other static choices."""
        return dataclasses.replace(self, call=dataclasses.replace(self.call, **choices))

    def rows(self, take: Take) -> Problem[S]:
        """The same call for other tokens: ``take`` on every array with one row per token."""
        return with_leaves(
            self,
            policy=self.policy.rows(take),
            targets=take(self.targets),
            transform=self.transform.rows(take),
            live=None if self.live is None else take(self.live),
            teacher=None if self.teacher is None else self.teacher.rows(take),
            ids=None if self.ids is None else take(self.ids),
            support=None if self.support is None else take(self.support),
        )

    @property
    def more_ids(self) -> str | None:
        """Name of the argument with further ids per token; ``None`` if absent."""
        if self.call.top_k:
            return "linear_top_k"
        return "ids=" if self.ids is not None else "support=" if self.support is not None else None

    @property
    def stages(self) -> int:
        """Number of sources: matmuls per row of logits."""
        return 1 if self.teacher is None else 2

    def blank_stats(self) -> TokenStats:
        """Statistics for unvisited tokens, structured as in this call."""
        return blank_stats(self.n, self.teacher is not None, 0 if self.ids is None else self.ids.shape[-1])

    def flat(self, rank: int) -> Problem[S]:
        """The same call with the ``rank`` dimensions of its tokens flattened."""
        return self.rows(lambda x: x.reshape(-1, *x.shape[rank:]))

    def counting(self, loss: Loss | None) -> Problem[S]:
        """The problem with the loss's counting tokens, if there is a loss."""
        return self if loss is None else dataclasses.replace(self, live=loss.inputs.mask)

    def wanted(self) -> Wanted | bool:
        """Gradients that ``custom_vjp`` asks for, read from a problem of ``CustomVJPPrimal``."""
        return self.policy.wanted()

    def constants(self) -> dict[str, PyTree]:
        """What carries no gradient, by the names that users know."""
        own: dict[str, PyTree] = {"temperature, softcap or scale": self.transform}
        if isinstance(self.policy, Linear):
            own |= dict(lora_scale=self.policy.head.lora_scale, sparse_backward=self.tolerance)
        return own | {"the teacher": self.teacher}

    def cotangent(self, g: PyTree) -> Problem[S]:
        """Cotangents in the structure of the problem; ``None`` (zero) where none was computed."""
        return tree_of(Problem, self.policy.cotangent(g), None, None, call=self.call)


@register
@dataclasses.dataclass(frozen=True)
class Loss:
    """An objective over statistics, and its per-token constants."""

    objective: Objective
    inputs: LossInputs

    def rows(self, take: Take) -> Loss:
        """The constants of other tokens; for uncoupled objectives."""
        inputs = jax.tree.map(lambda a: take(a) if jnp.ndim(a) else jnp.asarray(a), self.inputs)
        return Loss(self.objective, inputs)

    def total(self, s: TokenStats) -> Array:
        """The loss, behind a barrier: its sum is the same to the bit with and without a gradient around it."""
        logp, entropy, divergence = jax.lax.optimization_barrier((s.logp, s.entropy, s.divergence))
        return jnp.sum(contributions(self.objective, logp, entropy, self.inputs, divergence))

    def cotangents(self, s: TokenStats) -> StatCotangents:
        """Cotangents of the statistics, for a unit cotangent of the loss."""
        g_logp, g_entropy, g_divergence = cotangents(self.objective, s.logp, s.entropy, self.inputs, s.divergence)
        return StatCotangents(g_logp, g_entropy, jnp.zeros_like(g_logp), g_divergence)

    def may_move(self) -> Array:
        """Tokens whose cotangents can be nonzero, as far as it is known before their statistics are."""
        return may_have_gradient(self.objective, self.inputs)


def flat_tokens(tree: PyTree, rank: int) -> PyTree:
    """Arrays with their first ``rank`` dimensions, those of the tokens, flattened; numbers stay."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[rank:]) if jnp.ndim(x) else x, tree)
