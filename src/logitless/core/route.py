"""Which way a call goes: one decision, which the call obeys, ``explain`` prints and ``plan`` prices.

    backend    the first of ``registry.CANDIDATES`` that supports the call: of those with the name that was given, or of
               those that run here; over a mesh
    way        gradients in the forward pass, or later from the cotangents that arrive, and why
    chunk      tokens per chunk

Everything follows from shapes and static choices: every process of a multi-host run decides the same.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core import chunk_size as tiles
from logitless.core import registry
from logitless.core.backend import Backend, Cost, Split, Way
from logitless.core.problem import Call, Given, Linear, Loss, Problem, Source, Wanted
from logitless.core.pytree import tree_of, with_leaves
from logitless.core.registry import ANYWHERE, BACKENDS, CANDIDATES, DENSE, RUNS_ON, Candidate, Level
from logitless.objectives.checks import did_you_mean, shown

if TYPE_CHECKING:
    from logitless.mesh.sharding import Placement


@dataclasses.dataclass(frozen=True)
class Route:
    """How a call is carried out; what :func:`logitless.explain` prints."""

    call: str
    runs: Backend
    static: Call
    way_taken: Way
    because: str
    placement: Placement | None = None
    cost: Cost | None = None
    reference: Route | None = None  # for the reference's log-probabilities, if the call computes them
    exact_because: str | None = None  # why a call with sparse_backward= takes the exact path; None: it need not
    without: tuple[str, ...] = ()  # why other forms of this backend do not serve the call

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self.runs.name

    @property
    def in_forward(self) -> bool:
        """Whether a single pass yields loss and gradients."""
        return self.way_taken.in_forward

    @property
    def dense(self) -> bool:
        """Whether the backend is the dense reference, which JAX differentiates."""
        return self.backend == DENSE

    @property
    def described(self) -> Cost:
        """The cost, of a route that was asked to describe itself."""
        assert self.cost is not None
        return self.cost

    @property
    def way(self) -> str:
        """The way in words."""
        own = "; no ".join((self.described.way, *self.without))
        why = self.exact_because
        return own if why is None else f"{own}; exact, and not by a sparse backward: {why}"

    @property
    def matmuls(self) -> str:
        """Matmuls per token, in words."""
        own = self.described.matmuls
        return own if self.reference is None else f"{own}; and 1 per live token for the reference"

    @property
    def bytes_moved(self) -> str:
        """Memory traffic, in words."""
        own = self.described.bytes_moved
        return own if self.reference is None else f"{own}; and those of the reference's statistics"

    @property
    def tiles(self) -> dict[str, object]:
        """Chunks and tiles by name."""
        return self.described.tiles

    @property
    def fused_statistics(self) -> bool:
        """Statistics without a gradient never hold logits."""
        return self.described.fused_statistics

    def __str__(self) -> str:
        shown = ", ".join(f"{k}={v}" for k, v in self.tiles.items()) or "none"
        text = (
            f"{self.call}: backend {self.backend} ({self.because})\n"
            f"  way      {self.way}\n"
            f"  matmuls  {self.matmuls}\n"
            f"  bytes    {self.bytes_moved}\n"
            f"  tiles    {shown}"
        )
        if self.reference is None:
            return text
        return f"{text}\n  first    {self.reference.backend}: log-probabilities of the reference, no gradient"


def decide(p: Problem[Source], loss: Loss | None, place: Placement | None = None, describe: bool = False) -> Route:
    """The route of a problem whose tokens still have their own dimensions (arrays or shapes).

    ``place`` is that of a call over a mesh; ``describe`` fills in the route's cost.
    """
    own = _on_one_device(p, place)
    from_hidden = isinstance(own.policy, Linear)
    level: Level = "head" if from_hidden else "logits"
    columns_apart = place is not None and bool(place.vocab)
    chunk = _chunk(cast(Problem[Linear], own)) if from_hidden else 0
    own = own.calling(chunk=chunk, logp_only=loss is None or loss.objective.entropy_coef is None)
    if columns_apart and p.more_ids is not None:
        raise NotImplementedError(
            f"{p.call.name}: {p.more_ids} over a vocabulary that is cut over devices is not there yet. Shard the "
            "tokens, and the head over their axes (FSDP)."
        )
    reason = None if loss is None else _later_because(loss, p, columns_apart)
    late = loss is None or reason is not None
    found = _first_that_supports(own, level, _split(own, place, late))
    runs = found.backend
    in_forward = not late and runs.in_forward
    if place is None and not in_forward:
        own = own.calling(kept=runs.tokens_kept(own))
    way = Way(
        loss=loss is not None,
        in_forward=in_forward,
        reason=reason,
        entropy=loss is not None and loss.objective.entropy_coef is not None,
        mass=p.call.mass if found.exact_because is None else None,
        shards=1 if place is None else place.count(place.vocab),
    )
    cost = runs.describe(own, way) if describe else None
    if place is not None and runs.name != DENSE:
        from logitless.mesh.over_mesh import OverMesh

        runs = OverMesh(runs, place)
    if found.exact_because is not None:
        from logitless.head.dense_report import WithDenseReport

        runs = WithDenseReport(runs)
    return Route(
        p.call.name, runs, own.call, way, found.because, place, cost,
        exact_because=found.exact_because, without=found.without,
    )  # fmt: skip


def _on_one_device(p: Problem[Source], place: Placement | None) -> Problem[Source]:
    """The shapes of what a device works on: flat tokens, and over a mesh its own part."""
    if place is not None:
        return place.one_device(p)
    rank = p.targets.ndim

    def flat(x: Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((p.n, *x.shape[rank:]), x.dtype)

    def local(source: Source) -> Source:
        if isinstance(source, Linear):
            return tree_of(Linear, flat(source.hidden), source.head)
        return tree_of(Given, flat(source.logits))

    return with_leaves(p.over_sources(local), targets=flat(p.targets))


def _later_because(loss: Loss, p: Problem[Source], columns_apart: bool) -> str | None:
    """Why a token's cotangents do not follow from its own statistics; ``None`` if they do."""
    coupled = loss.objective.coupling(old_known=loss.inputs.old is not None)
    if coupled is not None:
        return coupled
    if p.ids is not None:
        return "the divergence is of log-probabilities at given ids"
    if columns_apart:
        return "a device has a part of the vocabulary only"
    if p.policy.dtype == jnp.float16:
        return "in float16 a loss scale has to act before dlogits are rounded"
    return None


def _chunk(p: Problem[Linear]) -> int:
    """Tokens per chunk of the head's sweep."""
    name, asked = p.call.name, p.call
    if asked.chunk_size is not None and asked.memory_budget is not None:
        raise ValueError(f"{name}: give chunk_size or memory_budget, not both.")
    for label, value in (("chunk_size", asked.chunk_size), ("memory_budget", asked.memory_budget)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name}: {label}={shown(value)}, expected a positive Python int.")
    if asked.chunk_size is not None:
        return min(asked.chunk_size, p.n)
    try:
        item, weight = jnp.dtype(p.call.logits_dtype).itemsize, p.head.weight
        return tiles.head_chunk(
            p.n, p.head.vocab, memory_budget=asked.memory_budget, logits_bytes=item * p.stages,
            head_bytes=weight.size * weight.dtype.itemsize,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


# -- the backend -----------------------------------------------------------------------------------------------------


def _split(p: Problem[Source], place: Placement | None, late: bool) -> Split:
    """What a mesh and a loss do to a call."""
    if place is None:
        return Split(late)
    from logitless.mesh import head_pieces

    return Split(
        late,
        vocabulary=place.count(place.vocab),
        head_gathered=bool(place.vocab_gathered or place.hidden_gathered),
        summed=bool(place.token_axes or place.vocab),
        dw_parts=head_pieces.parts_of_dw(place, p, Wanted(hidden=True, weight=True)),
    )


@dataclasses.dataclass(frozen=True)
class _Found:
    """The candidate that serves a call, and why earlier candidates do not."""

    backend: Backend
    because: str
    exact_because: str | None
    without: tuple[str, ...]


def _first_that_supports(p: Problem[Source], level: Level, split: Split) -> _Found:
    """The first candidate that supports a call. A named backend that cannot run raises."""
    call, named, here, sparse = p.call.name, p.call.backend, tiles.platform(), p.call.mass is not None
    if named is not None and named not in BACKENDS[level]:
        known, hint = ", ".join(BACKENDS[level]), did_you_mean(named, BACKENDS[level])
        raise ValueError(f"{call}: backend={named!r} is not known; expected None or one of {known}.{hint}")
    candidates = CANDIDATES[level, sparse]
    if sparse and named == DENSE:
        *others, last = map(repr, sorted({c.name for c in candidates}))
        raise NotImplementedError(
            f"{call}: backend={DENSE!r} has no sparse backward, it is the dense baseline. "
            f"Use backend=None, {', '.join(others)} or {last}, or sparse_backward='off'."
        )
    passed: list[tuple[Candidate, str]] = []
    for c in candidates:
        if c.name != named and (named is not None or RUNS_ON.get(c.name, here) != here):
            continue
        if c.teacher_on is not None and (p.teacher is None or c.teacher_on != here):
            continue
        why = _refusal(c, p, split, here)
        if why is None:
            break
        passed.append((c, why))
    else:
        raise NotImplementedError(f"{passed[-1][1]}. Use backend=None for the best one here, or {ANYWHERE!r}.")
    others = [why for other, why in passed if other.name != c.name]
    because = "named in the call" if named is not None else (f"the default on a {here.upper()}", *others)[-1]
    refused = [why for other, why in passed if other.name == c.name and other.around is not None]
    exact_because = refused[-1] if sparse and c.around is None else None
    same_kind = [(o, why) for o, why in passed if o.name == c.name and (o.around is None) == (c.around is None)]
    return _Found(registry.load(c), because, exact_because, tuple(f"{o.form}: {why}" for o, why in same_kind if o.form))


def _refusal(c: Candidate, p: Problem[Source], split: Split, here: str) -> str | None:
    """Why a candidate cannot serve a call; ``None`` if it can."""
    who, needs = f"{p.call.name}: backend={c.name!r}", RUNS_ON.get(c.name)
    if needs is not None:
        if p.more_ids is not None and not (c.ids and p.ids is not None):
            return f"{who} has no kernel for {p.more_ids}, more than one id for each token"
        if here != needs and not p.call.interpret:
            return f"{who} runs on a {needs.upper()}, but the default device here is a {here.upper()}"
    if c.around is not None and p.more_ids is not None:
        return f"a call with {p.more_ids} has none"
    try:
        why = registry.load(c).supports(p, split)
    except ImportError as error:
        return f"{who} cannot be loaded ({error}); pip install 'logitless[{needs}]'"
    if why is None or c.around is not None or c.form is not None:
        return why
    return f"{who} cannot serve this call: {why.rstrip('.')}"
