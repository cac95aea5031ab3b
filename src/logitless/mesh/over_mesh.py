"""A backend over a mesh: ``shard_map`` around each pass of another backend, at both levels and for every layout.

``custom_vjp`` stands outside (``core/backend.py``), ``shard_map`` inside both passes. A device gathers the head over
FSDP axes, flattens its own tokens, does what one device does (``vocab_parallel.py`` where it has a part of the columns
only), and reduces the head's gradients. The residual contains the gathered head, so a call gathers once; the TPU
kernels gather a large head in parts, in both passes (``head_pieces.py``).

    collectives              forward                             backward
    tokens, head replicated  none                                all-reduce dW
    tokens, head FSDP        all-gather W                        reduce-scatter dW
    the same, in parts       all-gather W                        all-gather W, reduce-scatter dW
    vocabulary-parallel      all-reduce [N] (max), [4, N] (sum)  all-reduce dH; dW over the axes of the tokens, if any
    sparse backward          the report's four numbers more (vocabulary-parallel: [3, N] too)

With gradients in the forward pass, the forward pass does everything. A residual over a mesh is each device's own, laid
one after the other along its first axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from logitless.core.backend import Around, Backend
from logitless.core.problem import (
    Given,
    Gradients,
    HeadArrays,
    HeadGrads,
    Linear,
    Loss,
    Problem,
    Source,
    Wanted,
    flat_tokens,
)
from logitless.core.pytree import with_leaves
from logitless.core.shapes import PyTree
from logitless.core.stats import StatCotangents, TokenStats
from logitless.mesh import collectives, head_pieces
from logitless.mesh.sharding import Placement
from logitless.mesh.vocab_parallel import shard_of

S = TypeVar("S", bound=Source)

# -- where the arrays are --------------------------------------------------------------------------------------------


def _of_tokens(place: Placement, tree: PyTree) -> PyTree:
    """The PartitionSpec of each leaf: that of the tokens, or replicated for a number."""
    return jax.tree.map(lambda x: place.token_spec if jnp.ndim(x) else PartitionSpec(), tree)


def _logits_spec(place: Placement) -> PartitionSpec:
    """Of the logits and dlogits."""
    return PartitionSpec(*place.token_spec, place.vocab or None)


def _specs(place: Placement, p: Problem[Source]) -> PyTree:
    """A problem's PartitionSpecs, in its structure."""

    def spec(x: PyTree) -> PyTree:
        if isinstance(x, HeadArrays):
            return place.head_specs(x)
        if isinstance(x, Given):
            return Given(_logits_spec(place))  # type: ignore[arg-type]
        return place.token_spec if jnp.ndim(x) else PartitionSpec()

    return jax.tree.map(spec, p, is_leaf=lambda x: isinstance(x, (HeadArrays, Given)))


def _loss_specs(place: Placement, loss: Loss | None) -> PyTree:
    if loss is None:
        return None
    return Loss(jax.tree.map(lambda _: PartitionSpec(), loss.objective), _of_tokens(place, loss.inputs))


def _gradient_specs(place: Placement, p: Problem[Source], want: Wanted | bool) -> PyTree:
    """The PartitionSpec of each gradient that is asked for."""
    if isinstance(p.policy, Given):
        return _logits_spec(place)
    assert isinstance(want, Wanted)
    specs = place.head_specs(p.policy.head)
    asked = dict(weight=want.weight, bias=want.bias, lora_a=want.lora, lora_b=want.lora)
    head = HeadGrads(**{name: getattr(specs, name) if wanted else None for name, wanted in asked.items()})
    return Gradients(place.token_spec, head)  # type: ignore[arg-type]


def placed(place: Placement, p: Problem[Source]) -> Problem[Source]:
    """The problem's arrays where the placement has them, for a computation that the compiler partitions."""

    def at(x: Array, where: PartitionSpec) -> Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(place.mesh, where))

    def source_at(source: Source) -> Source:
        if isinstance(source, Given):
            return Given(at(source.logits, _logits_spec(place)))
        head = jax.tree.map(at, source.head, place.head_specs(source.head))
        return Linear(at(source.hidden, place.token_spec), head)

    return p.over_sources(source_at)


# -- one device's part -----------------------------------------------------------------------------------------------


def _gathered(place: Placement, p: Problem[S]) -> Problem[S]:
    """A device's own problem, flat, its head gathered."""
    return _flat(place, p.over_sources(lambda source: _gathered_source(place, source)))


def _gathered_source(place: Placement, source: Source) -> Source:
    """A source with its head gathered."""
    if isinstance(source, Given):
        return source
    return Linear(source.hidden, collectives.gather_head(place, source.head))


def _flat(place: Placement, p: Problem[S]) -> Problem[S]:
    """A device's local problem, flattened, with an unchanged head."""
    flat = p.flat(len(place.tokens))
    if isinstance(p.policy, Given):
        return flat
    # What a device has is a part of a sum over the axes of the tokens (LoRA's inner factor also over the vocabulary's).
    summed = bool(place.token_axes) or (bool(place.vocab) and p.policy.head.lora_a is not None)
    return flat.calling(partial_hidden=bool(place.vocab), partial_head=summed)


def _unflat(tree: PyTree, shape: tuple[int, ...]) -> PyTree:
    """Flat arrays with the token dimensions ``shape`` again."""
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), tree)


def _of_all_devices(place: Placement, report: PyTree, shape: tuple[int, ...], blank: bool = False) -> PyTree:
    """A device's report with the counts of all devices (a ``blank`` one has none), and its tokens in their own
    ``shape``.

    A chunk of a vocabulary shard counts as one chunk; its columns are multiplied by the number of shards, so the
    reported share is the share within the shard.
    """
    if report is None:
        return None
    tokens = _unflat({k: getattr(report, k) for k in ("left_out", "rows", "hard")}, shape)
    if blank:
        return dataclasses.replace(report, **tokens)
    axes, shards = (*place.token_axes, *place.vocab), place.count(place.vocab)
    numbers = (report.chunks.astype(jnp.float32), report.dense_chunks, shards * report.active, shards * report.width)
    counts = jnp.stack([jnp.asarray(x, jnp.float32) for x in numbers])
    chunks, dense, active, width = lax.psum(counts, axes) if axes else counts
    counted = dict(chunks=chunks.astype(jnp.int32), dense_chunks=dense.astype(jnp.int32), active=active, width=width)
    return dataclasses.replace(report, **tokens, **counted)


# -- the backend -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OverMesh(Around[Problem[Source], Wanted | bool]):
    """``own`` on every device of a placement."""

    place: Placement

    @property
    def device(self) -> Backend:
        """The backend for a device's local part."""
        return shard_of(self.own, self.place) if self.place.vocab else self.own

    def _arriving(self, p: Problem[Source]) -> head_pieces.Arriving | None:
        """What a device does whose head is gathered in parts, from its own problem."""
        number = head_pieces.arriving(self.own, self.place, p)
        return None if number == 1 else head_pieces.Arriving(self.own, self.place, number)  # type: ignore[arg-type]

    def _run(self, local: Callable[..., PyTree], given: PyTree, specs: PyTree, out_specs: PyTree) -> PyTree:
        """``local`` on each device's own part of what is ``given``.

        Replication is not checked: what the collectives leave equal on all devices of an axis is known to us, not to
        JAX, which cannot see through kernels.
        """
        run = jax.shard_map(local, mesh=self.place.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        return run(*given)

    def _report_specs(self, p: Problem[Source]) -> PyTree:
        """Specs for the report, if present."""
        if isinstance(p.policy, Given) or p.tolerance is None:
            return None
        from logitless.head.sparse.active_columns import SparseReport

        tokens, number = self.place.token_spec, PartitionSpec()
        return SparseReport(tokens, tokens, tokens, number, number, number, number)  # type: ignore[arg-type]

    @property
    def _own_spec(self) -> PartitionSpec:
        """Spec for per-device values: concatenated along the first axis."""
        return PartitionSpec((*self.place.token_axes, *self.place.vocab) or None)

    def statistics(self, p: Problem[Source], loss: Loss | None = None) -> tuple[TokenStats, object]:
        place, rank = self.place, len(self.place.tokens)

        def local(p: Problem[Source], loss: Loss | None) -> PyTree:
            shape = p.targets.shape
            own = None if loss is None else Loss(loss.objective, flat_tokens(loss.inputs, rank))
            arriving = self._arriving(p)
            if arriving is not None:
                return _unflat(arriving.forward(_flat(place, cast(Problem[Linear], p)), None)[0], shape), None
            out, report = self.device.statistics(_gathered(place, p), own)
            return _unflat(out, shape), _of_all_devices(place, report, shape, blank=True)

        specs = (_specs(place, p), _loss_specs(place, loss))
        return self._run(local, (p, loss), specs, (place.token_spec, self._report_specs(p)))

    def forward(self, p: Problem[Source], want: Any) -> tuple[TokenStats, object, PyTree]:
        place = self.place

        def local(p: Any) -> PyTree:
            shape, arriving = p.targets.shape, self._arriving(p)
            if arriving is not None:
                out, residual = arriving.forward(_flat(place, p), want)
                return _unflat(out, shape), None, (residual, None)
            own = _gathered(place, p)
            out, report, residual = self.device.forward(own, want)
            gathers = place.vocab_gathered or place.hidden_gathered
            whole = with_leaves(own.head, lora_scale=None) if gathers else None
            kept = jax.tree.map(lambda x: x if x.ndim else x[None], (residual, whole))
            return _unflat(out, shape), _of_all_devices(place, report, shape), kept

        out_specs = (place.token_spec, self._report_specs(p), self._own_spec)
        return self._run(local, (p,), (_specs(place, p),), out_specs)

    def backward(
        self, p: Problem[Source], want: Any, out: TokenStats, g: StatCotangents, residual: PyTree, only_logp: bool
    ) -> PyTree:
        place, rank = self.place, len(self.place.tokens)

        def local(p: Any, out: TokenStats, g: StatCotangents, kept: PyTree) -> PyTree:
            residual, whole = kept
            out, g = flat_tokens((out, g), rank)
            arriving = self._arriving(p)
            if arriving is not None:
                found = arriving.backward(_flat(place, p), want, out, g, residual, only_logp)
                return dataclasses.replace(found, hidden=_unflat(found.hidden, p.targets.shape))
            own = _gathered(place, p) if whole is None else _with_head(place, p, whole)
            if isinstance(p.policy, Given):
                return self.device.backward(own, want, out, g, residual, only_logp).reshape(p.logits.shape)
            apart = head_pieces.parts_of_dw(place, own, want) if self.own.head_in_parts else 1
            now = want if apart == 1 else dataclasses.replace(want, weight=False, bias=False)
            found = self.device.backward(own, now, out, g, residual, only_logp)
            if apart == 1:
                head = collectives.reduce_grads(place, found.head, p.head)
            else:
                head = head_pieces.reduced_grads(self.own, place, own, want, (out, g), apart, p.head)
            return Gradients(_unflat(found.hidden, p.targets.shape), head)

        specs = (_specs(place, p), place.token_spec, place.token_spec, self._own_spec)
        return self._run(local, (p, out, g, residual), specs, _gradient_specs(place, p, want))

    def gradients_in_forward(self, p: Problem[Source], want: Any, loss: Loss) -> tuple[TokenStats, object, PyTree]:
        place, rank = self.place, len(self.place.tokens)

        def local(p: Any, loss: Loss) -> PyTree:
            own, shape = _gathered(place, p), p.targets.shape
            flat = Loss(loss.objective, flat_tokens(loss.inputs, rank))
            out, report, found = self.device.gradients_in_forward(own, want, flat)
            out, report = _unflat(out, shape), _of_all_devices(place, report, shape)
            if isinstance(p.policy, Given):
                return out, report, found.reshape(p.logits.shape)
            hidden = _unflat(found.hidden, shape)
            return out, report, Gradients(hidden, collectives.reduce_grads(place, found.head, p.head))

        specs = (_specs(place, p), _loss_specs(place, loss))
        out_specs = (place.token_spec, self._report_specs(p), _gradient_specs(place, p, want))
        return self._run(local, (p, loss), specs, out_specs)


def _with_head(place: Placement, p: Problem, whole: HeadArrays) -> Problem:
    """A device's own problem, flat, with the head that the forward pass gathered."""
    kept = dataclasses.replace(whole, lora_scale=p.head.lora_scale)
    nothing = dataclasses.replace(place, vocab_gathered=(), hidden_gathered=())
    p = p.with_head(kept)
    if p.teacher is not None:
        source = _gathered_source(place, p.teacher.source)
        p = dataclasses.replace(p, teacher=dataclasses.replace(p.teacher, source=source))
    return _gathered(nothing, p)
