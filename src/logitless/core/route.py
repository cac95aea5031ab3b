"""Which way a call goes: one decision, which the call obeys, ``explain`` prints and ``plan`` prices.

    backend    the one that was named, or the best that can run here; if asked for its sparse backward, where that
               supports the call; over a mesh
    way        gradients in the forward pass, or later from the cotangents that arrive, and why
    chunk      tokens per chunk

Everything follows from shapes and static choices: every process of a multi-host run decides the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from logitless.core import chunk_size as tiles
from logitless.core import registry
from logitless.core.backend import Backend, Cost, Split, Way
from logitless.core.problem import Call, Given, Linear, Loss, Problem, Source, Wanted
from logitless.core.registry import ANYWHERE, DENSE, KERNELS, RUNS_ON, Level
from logitless.objectives.checks import did_you_mean, shown


@dataclasses.dataclass(frozen=True)
class Route:
    """How a call is carried out; what :func:`logitless.explain` prints."""

    call: str
    runs: Backend
    static: Call
    way_taken: Way
    because: str
    placement: Any = None
    cost: Cost | None = None
    reference: Route | None = None  # for the reference's log-probabilities, if the call computes them
    exact_because: str | None = None  # why a call with sparse_backward= takes the exact path; None: it need not

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
        own, why = self.described.way, self.exact_because
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
    def tiles(self) -> dict[str, Any]:
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


def decide(p: Problem[Source], loss: Loss | None, place: Any = None, describe: bool = False) -> Route:
    """The route of a problem whose tokens still have their own dimensions (arrays or shapes).

    ``place`` is the ``mesh.spec.Placement`` of a call over a mesh; ``describe`` fills in the route's cost.
    """
    own = _on_one_device(p, place)
    from_hidden = isinstance(own.policy, Linear)
    level: Level = "head" if from_hidden else "logits"
    columns_apart = place is not None and bool(place.vocab)
    chunk = _chunk(own) if from_hidden else 0
    own = own.calling(chunk=chunk, logp_only=loss is None or loss.objective.entropy_coef is None)
    if columns_apart and p.more_ids is not None:
        raise NotImplementedError(
            f"{p.call.name}: {p.more_ids} over a vocabulary that is cut over devices is not there yet. Shard the "
            "tokens, and the head over their axes (FSDP)."
        )
    chosen, because = _choose(own, level, columns_apart)
    reason = None if loss is None else _later_because(loss, p, columns_apart)
    late = loss is None or reason is not None
    runs, exact_because = _first_that_supports(own, level, chosen, place, late)
    in_forward = not late and runs.in_forward
    keeps = getattr(runs, "tokens_kept", None)
    if keeps is not None and place is None and not in_forward:
        own = own.calling(kept=keeps(own))
    way = Way(
        loss=loss is not None,
        in_forward=in_forward,
        reason=reason,
        entropy=loss is not None and loss.objective.entropy_coef is not None,
        mass=p.call.mass if exact_because is None else None,
        shards=1 if place is None else place.count(place.vocab),
    )
    cost = runs.describe(own, way) if describe else None
    if place is not None and runs.name != DENSE:
        from logitless.mesh.over_mesh import OverMesh

        runs = OverMesh(runs, place)
    if exact_because is not None:
        from logitless.head.dense_report import WithDenseReport

        runs = WithDenseReport(runs)
    return Route(p.call.name, runs, own.call, way, because, place, cost, exact_because=exact_because)


def _on_one_device(p: Problem[Source], place: Any) -> Problem[Source]:
    """The shapes of what a device works on: flat tokens, and over a mesh its own part."""
    if place is not None:
        return place.one_device(p)
    rank = p.targets.ndim

    def flat(x: Any) -> Any:
        return jax.ShapeDtypeStruct((p.n, *x.shape[rank:]), x.dtype)

    def local(source: Source) -> Source:
        return Linear(flat(source.hidden), source.head) if isinstance(source, Linear) else Given(flat(source.logits))

    return dataclasses.replace(p.over_sources(local), targets=flat(p.targets))


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


def _chunk(p: Any) -> int:
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


def _first_that_supports(p: Any, level: Level, name: str, place: Any, late: bool) -> tuple[Backend, str | None]:
    """``(backend, why it is not the sparse backward that was asked for)``: the first of a name that supports a call."""
    exact = registry.backend_of(level, name)
    if p.call.mass is None:
        return exact, None
    if p.more_ids is not None:
        return exact, f"a call with {p.more_ids} has none"
    split, why = _split(p, exact, place, late), None
    for sparse in registry.sparse_backends(name):
        why = sparse.supports(p, split)
        if why is None:
            return sparse, None
    return exact, why


def _split(p: Problem, exact: Backend, place: Any, late: bool) -> Split:
    """What a mesh and a loss do to a call whose exact backend is ``exact``."""
    if place is None:
        return Split(late)
    from logitless.mesh import head_pieces

    gathered = bool(place.vocab_gathered or place.hidden_gathered)
    return Split(
        late, place.count(place.vocab), gathered, head_pieces.count(exact, place, p, Wanted(hidden=True, weight=True))
    )


def _choose(p: Problem[Source], level: Level, columns_apart: bool) -> tuple[str, str]:
    """``(name of a backend, why)``. A named backend that cannot run raises; the default is the best one that can."""
    name, named, here, sparse = p.call.name, p.call.backend, tiles.platform(), p.call.mass is not None
    if sparse and named == DENSE:
        *others, last = (repr(k) for k in registry.SPARSE)
        raise NotImplementedError(
            f"{name}: backend={DENSE!r} has no sparse backward, it is the dense baseline. "
            f"Use backend=None, {', '.join(others)} or {last}, or sparse_backward='off'."
        )

    def refusal(kernel: str) -> str | None:
        needs = RUNS_ON[kernel]
        if p.teacher is not None and named is None:
            return f"{name}: the kernels of backend={kernel!r} for two distributions have to be asked for by its name"
        if p.more_ids is not None:
            return f"{name}: backend={kernel!r} has no kernel for {p.more_ids}, more than one id for each token"
        if here != needs and not p.call.interpret:
            device = f"the default device here is a {here.upper()}"
            return f"{name}: backend={kernel!r} runs on a {needs.upper()}, but {device}"
        try:
            registry.backend_of(level, kernel).check(p, columns_apart)
        except NotImplementedError as error:
            return f"{name}: backend={kernel!r} cannot serve this call: {str(error).rstrip('.')}"
        except ImportError as error:
            return f"{name}: backend={kernel!r} cannot be loaded ({error}); pip install 'logitless[{needs}]'"
        return None

    if named is not None:
        _known(name, named, level)
        why = refusal(named) if named in RUNS_ON else None
        if why is not None:
            raise NotImplementedError(f"{why}. Use backend=None for the best one here, or {ANYWHERE!r}.")
        return named, "named in the call"
    chosen, because = KERNELS.get(here, ANYWHERE), f"the default on a {here.upper()}"
    why = refusal(chosen) if chosen != ANYWHERE else None
    if why is not None:
        chosen, because = ANYWHERE, why
    return chosen, because


def _known(call: str, backend: str, level: Level) -> None:
    """An unknown backend is refused, with the name that may have been meant."""
    known = tuple(registry.BACKENDS[level])
    if backend not in known:
        hint = did_you_mean(backend, known)
        raise ValueError(f"{call}: backend={backend!r} is not known; expected None or one of {', '.join(known)}.{hint}")
