"""What a user says about a mesh (:class:`Sharding`), and what follows from it for one call (:class:`Placement`).

Every mesh axis does one of three things for the loss:

    shards tokens                          each device has its own tokens; dW is summed over the axis
    shards the vocabulary, not tokens      vocabulary-parallel: each device has its own columns of the head
    shards both, or the hidden dimension   FSDP: the head is gathered over it, dW is reduce-scattered

An axis that does neither would repeat the same work on each device; list such an axis in ``replicated``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from logitless.core.problem import Given, HeadArrays, HeadGrads, Layout, Linear, Problem, Source
from logitless.core.pytree import with_leaves

Axes = tuple[str, ...]
Kinds = tuple[str | None, ...]

_KINDS: dict[Layout, dict[str, Kinds]] = {
    "vh": {"weight": ("v", "h"), "bias": ("v",), "lora_a": ("v", None), "lora_b": (None, "h")},
    "hv": {"weight": ("h", "v"), "bias": ("v",), "lora_a": ("h", None), "lora_b": (None, "v")},
}
"""Vocabulary and hidden dimension for each of a head's arrays."""


def each_array(f: Callable[..., object], layout: Layout, *heads: HeadArrays | HeadGrads) -> dict[str, Any]:
    """``f(arrays with this name, kinds of their dimensions)`` for each array of heads or gradients; ``None`` if any is
    ``None``."""
    found = {name: ([getattr(head, name) for head in heads], kinds) for name, kinds in _KINDS[layout].items()}
    return {name: None if any(x is None for x in xs) else f(*xs, kinds) for name, (xs, kinds) in found.items()}


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How the arrays of a call lie on a mesh.

    Args:
      mesh: a ``jax.sharding.Mesh``; ``None`` takes the ambient one (``jax.set_mesh``, or the older ``with mesh:``).
      tokens: mesh axes of the token dimensions, ``P("data")`` or ``P(("data", "fsdp"), "seq")`` for ``[B, T]``. It
        holds for every array with one value per token, hidden states and logits included.
      head: mesh axes of ``lm_head``, in its own order of dimensions. An axis on the vocabulary that does not shard
        tokens makes the head vocabulary-parallel; any other axis is FSDP: gathered once, dW reduce-scattered. Bias
        and LoRA factors follow.
      vocab: mesh axes of the last dimension of the logits, for ``logprobs`` and ``grpo_loss``.
      replicated: mesh axes over which the same work may be repeated.

    >>> from jax.sharding import PartitionSpec as P
    >>> import logitless
    >>> tuple(logitless.Sharding(tokens=P("data"), head=P("tensor", None)).head)
    ('tensor', None)
    """

    mesh: Mesh | AbstractMesh | None = None
    tokens: PartitionSpec = PartitionSpec()
    head: PartitionSpec = PartitionSpec()
    vocab: str | Axes | None = None
    replicated: str | Axes = ()

    def __post_init__(self) -> None:
        if self.mesh is not None and not isinstance(self.mesh, (Mesh, AbstractMesh)):
            raise TypeError(f"Sharding: mesh is {type(self.mesh).__name__}, expected a jax.sharding.Mesh or None.")
        for name in ("tokens", "head"):
            given = getattr(self, name)
            if not isinstance(given, PartitionSpec):
                raise TypeError(
                    f"Sharding: {name} is {given!r}, expected a jax.sharding.PartitionSpec, such as P('data')."
                )
            for entry in given:
                _axes(name, entry)
        object.__setattr__(self, "vocab", None if self.vocab is None else _axes("vocab", self.vocab))
        object.__setattr__(self, "replicated", _axes("replicated", self.replicated))


def _axes(name: str, entry: object) -> Axes:
    """An entry of a PartitionSpec as a tuple of names."""
    if entry is None:
        return ()
    found = (entry,) if isinstance(entry, str) else entry
    if not isinstance(found, (tuple, list)) or not all(isinstance(a, str) for a in found):
        raise TypeError(f"Sharding: {name} has the entry {entry!r}, expected an axis name, a tuple of them or None.")
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Placement:
    """A call's mesh axes, resolved and checked. Static and hashable; axes of size one are left out."""

    mesh: Mesh | AbstractMesh
    tokens: tuple[Axes, ...]  # of each token dimension
    vocab: Axes  # vocabulary-parallel
    vocab_gathered: Axes
    hidden_gathered: Axes
    sizes: tuple[tuple[str, int], ...]

    @property
    def token_axes(self) -> Axes:
        """Axes whose devices have different tokens."""
        return tuple(a for dimension in self.tokens for a in dimension)

    @property
    def token_spec(self) -> PartitionSpec:
        """Spec for arrays with a value, or a row, per token."""
        return PartitionSpec(*(axes or None for axes in self.tokens))

    def count(self, axes: Axes) -> int:
        """Number of devices along the axes."""
        return math.prod(dict(self.sizes)[a] for a in axes)

    def gathered_over(self, kind: str | None) -> Axes:
        """FSDP axes of a dimension: ``"v"``, ``"h"``, or ``None`` for one that is never cut."""
        return {"v": self.vocab_gathered, "h": self.hidden_gathered}.get(kind or "", ())

    def head_specs(self, head: HeadArrays) -> HeadArrays:
        """Specs for the head's arrays before gathering, structured like the head."""

        def spec(_: object, kinds: Kinds) -> PartitionSpec:
            return PartitionSpec(*(((self.vocab if k == "v" else ()) + self.gathered_over(k)) or None for k in kinds))

        specs = each_array(spec, head.layout, head)
        return HeadArrays(**specs, lora_scale=PartitionSpec(), layout=head.layout)  # type: ignore[arg-type]

    def one_device(self, p: Problem[Source]) -> Problem[Source]:
        """The shapes of what a device works on: flat tokens, the head once it is gathered."""
        tokens, parts = p.targets.size // self.count(self.token_axes), self.count(self.vocab)

        def local(x: Array, kinds: Kinds) -> jax.ShapeDtypeStruct:
            shape = tuple(n // parts if kind == "v" else n for n, kind in zip(x.shape, kinds, strict=True))
            return jax.ShapeDtypeStruct(shape, x.dtype)

        def part(source: Source) -> Source:
            if isinstance(source, Given):
                return Given(jax.ShapeDtypeStruct((tokens, source.width // parts), source.dtype))  # type: ignore[arg-type]
            head = HeadArrays(**each_array(local, source.head.layout, source.head), layout=source.head.layout)
            return Linear(jax.ShapeDtypeStruct((tokens, source.hidden.shape[-1]), source.dtype), head)  # type: ignore[arg-type]

        targets = jax.ShapeDtypeStruct((tokens,), p.targets.dtype)
        return with_leaves(p.over_sources(part), targets=targets)


def automatic(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The mesh with every axis left to the compiler, which is how the loss maths is partitioned."""
    if all(t == AxisType.Auto for t in mesh.axis_types):
        return mesh
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return mesh.update_axis_types(dict(zip(mesh.axis_names, types, strict=True)))


def mesh_of(call: str, sharding: Sharding) -> Mesh | AbstractMesh:
    """The given mesh, or the ambient mesh; with devices if JAX exposes them (outside ``jit``)."""
    ambient = jax.sharding.get_abstract_mesh()
    if not ambient.empty and ambient.manual_axes:
        raise ValueError(
            f"{call}: sharding= was given inside a shard_map (manual axes {', '.join(ambient.manual_axes)}), where "
            "arrays are already one device's own. Leave it out, and reduce gradients and metrics yourself."
        )
    if sharding.mesh is not None:
        return sharding.mesh
    from logitless.core import compat  # here: the module loads Pallas, and `import logitless` must not

    mesh = compat.ambient_mesh()
    if mesh.empty:
        raise ValueError(
            f"{call}: sharding= names no mesh and there is no ambient one. Give Sharding(mesh=...), or call it under "
            "jax.set_mesh(mesh) or in `with mesh:`."
        )
    return mesh


@dataclasses.dataclass(frozen=True)
class _Request:
    """A sharding that a call asks for, to be checked against its shapes."""

    call: str
    sharding: Sharding
    sizes: dict[str, int]  # of the mesh's axes

    def known(self, name: str, entries: Iterable[object]) -> tuple[Axes, ...]:
        """The axes per entry, without axes of size one; checks that each exists and appears once."""
        found = tuple(_axes(name, e) for e in entries)
        flat = [a for axes in found for a in axes]
        for a in flat:
            if a not in self.sizes:
                raise ValueError(
                    f"{self.call}: sharding.{name} names the axis {a!r}; the mesh has "
                    f"{', '.join(map(repr, self.sizes))}."
                )
            if flat.count(a) > 1:
                raise ValueError(f"{self.call}: sharding.{name} uses the axis {a!r} twice; an axis cuts one dimension.")
        return tuple(tuple(a for a in axes if self.sizes[a] > 1) for axes in found)

    def of(self, name: str, entries: Iterable[object], rank: int) -> tuple[Axes, ...]:
        """:meth:`known` of each of ``rank`` dimensions."""
        axes = self.known(name, entries)
        return axes + ((),) * (rank - len(axes))

    def divides(self, what: str, size: int, axes: Axes, hint: str) -> None:
        """Refuse a dimension that the devices along ``axes`` cannot share."""
        parts = math.prod(self.sizes[a] for a in axes)
        if size % parts:
            raise ValueError(
                f"{self.call}: {what} of size {size} is sharded over {_show(axes)}, {parts} devices, and does not "
                f"divide by them; {hint}."
            )


def resolve(call: str, sharding: Sharding, p: Problem[Source]) -> Placement:
    """Check a sharding against the shapes of a call."""
    mesh, tokens = mesh_of(call, sharding), p.targets.shape
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    asked = _Request(call, sharding, sizes)
    if len(sharding.tokens) > len(tokens):
        raise ValueError(
            f"{call}: sharding.tokens={sharding.tokens} has {len(sharding.tokens)} entries, but there are "
            f"{len(tokens)} token dimensions {tokens}."
        )
    token_axes = asked.of("tokens", sharding.tokens, len(tokens))
    for d, (size, axes) in enumerate(zip(tokens, token_axes, strict=True)):
        asked.divides(f"token dimension {d}", size, axes, "pad the batch, with mask=0, or take fewer devices")
    flat_tokens = {a for axes in token_axes for a in axes}
    if isinstance(p.policy, Linear):
        parallel, gathered, hidden = _head_axes(asked, p, p.policy.head, flat_tokens)
    else:
        parallel, gathered, hidden = _logits_axes(asked, p.policy.width, flat_tokens), (), ()
    (repeated,) = asked.known("replicated", [sharding.replicated])
    idle = [a for a, n in sizes.items() if n > 1 and a not in flat_tokens | set(parallel) | set(repeated)]
    if idle:
        raise ValueError(
            f"{call}: the mesh axis {idle[0]!r} ({sizes[idle[0]]} devices) shards neither tokens nor the vocabulary: "
            f"each of its devices would do the same work. Put it into sharding.tokens or on the vocabulary, or allow "
            f"it: Sharding(..., replicated={idle[0]!r})."
        )
    return Placement(automatic(mesh), token_axes, parallel, gathered, hidden, tuple(sizes.items()))


def _head_axes(asked: _Request, p: Problem[Source], head: HeadArrays, tokens: set[str]) -> tuple[Axes, Axes, Axes]:
    """``(vocabulary-parallel, FSDP on the vocabulary, FSDP on the hidden dimension)`` of a head and a teacher's."""
    call, sharding, shape = asked.call, asked.sharding, head.weight.shape
    (named_vocab,) = asked.known("vocab", [sharding.vocab])
    if len(sharding.head) > 2:
        raise ValueError(f"{call}: sharding.head={sharding.head} has {len(sharding.head)} entries, lm_head has 2.")
    axes = asked.of("head", sharding.head, 2)
    over_vocab, hidden = axes[head.axis], axes[1 - head.axis]
    parallel = tuple(a for a in over_vocab if a not in tokens)
    gathered = tuple(a for a in over_vocab if a in tokens)
    if over_vocab != parallel + gathered:
        raise ValueError(
            f"{call}: sharding.head={sharding.head} cuts the vocabulary over {_show(over_vocab)}, where "
            f"{_show(gathered)} also shard tokens and are gathered: what is left on a device would not be a run of "
            f"columns. Name the vocabulary-parallel axes first: {_show(parallel + gathered)}."
        )
    hint = "pad lm_head's vocabulary and say Head(lm_head, vocab_size=)"
    asked.divides("lm_head's vocabulary", head.vocab, over_vocab, hint)
    asked.divides("lm_head's hidden dimension", shape[1 - head.axis], hidden, "shard it over fewer devices")
    if p.teacher is not None and isinstance(p.teacher.source, Linear):
        other = p.teacher.source.head
        if parallel and other.vocab != head.vocab:
            raise ValueError(
                f"{call}: the vocabulary is parallel over {_show(parallel)}, and the teacher's head has "
                f"{other.vocab} columns where lm_head has {head.vocab}: a device needs the same columns of both. Pad "
                "the shorter one, and say vocab_size= in its Head."
            )
        asked.divides("the teacher's vocabulary", other.vocab, over_vocab, "pad it and say vocab_size= in its Head")
        width = other.weight.shape[1 - other.axis]
        asked.divides("the teacher's hidden dimension", width, hidden, "shard it over fewer devices")
    if sharding.vocab is not None and named_vocab != parallel:
        raise ValueError(
            f"{call}: sharding.vocab={sharding.vocab!r}, but sharding.head={sharding.head} makes the vocabulary "
            f"parallel over {_show(parallel)}; leave vocab out, it is for logits."
        )
    return parallel, gathered, hidden


def _logits_axes(asked: _Request, width: int, tokens: set[str]) -> Axes:
    """Axes on the vocabulary of logits."""
    (parallel,) = asked.known("vocab", [asked.sharding.vocab])
    both = [a for a in parallel if a in tokens]
    if both:
        raise ValueError(
            f"{asked.call}: the axis {both[0]!r} is in sharding.tokens and in sharding.vocab; an axis cuts one "
            "dimension."
        )
    asked.divides("the logits' vocabulary", width, parallel, "pad the vocabulary and say vocab_size=")
    return parallel


def _show(axes: Iterable[str]) -> str:
    return "(" + ", ".join(repr(a) for a in axes) + ")"
