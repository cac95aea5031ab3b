"""The two values that a public call takes beside its arrays: :class:`Head` says what the head is, :class:`Options` how
the call is carried out. ``core/arguments.py`` lays both open, one entry for each field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
from jax import Array
from jax.typing import DTypeLike

from logitless.core.problem import Layout
from logitless.core.shapes import Float

SparseBackward = Literal["off", "auto"] | float | Array
Arguments = dict[str, Any]
"""Arguments of a public call by name, as the user gave them: their types are not known before they are checked."""
Number = Array | float | None


@dataclasses.dataclass(frozen=True)
class Head:
    """A language model's head: what turns hidden states into logits, for a policy or a reference.

    A pytree with its arrays as leaves: it can be differentiated, donated and sharded like other parameters. A bare
    array instead of a ``Head`` means ``Head(weight)`` with default fields.

    Args:
      weight: ``[V, H]`` (a tied embedding) or ``[H, V]``, of the dtype of the hidden states; neither is copied.
      bias: ``[V]``, added to the logits.
      lora: ``(A, B)`` with ``A @ B`` of the shape of ``weight``; the head is then ``weight + lora_scale * A @ B``.
      lora_scale: see ``lora``.
      layout: ``"vh"`` or ``"hv"``; needed only where the shape does not tell.
      scale: factor of the raw logits.
      softcap: ``softcap * tanh(x / softcap)`` after the scale and before the temperature.
      vocab_size: columns at or beyond it are padding: no probability, zero gradient.

    >>> import jax.numpy as jnp, logitless
    >>> head = logitless.Head(jnp.zeros((4, 3)), bias=jnp.zeros(4), softcap=30.0)
    >>> stats = logitless.linear_logprobs(jnp.ones((1, 2, 3)), head, jnp.array([[0, 3]]))
    >>> [round(float(x), 4) for x in stats.logp[0]]
    [-1.3863, -1.3863]
    """

    weight: Float[Array, "V H"] | Float[Array, "H V"]
    bias: Float[Array, "V"] | None = None
    lora: tuple[Array, Array] | None = None
    lora_scale: Array | float = 1.0
    layout: Layout | None = None
    scale: Number = None
    softcap: Number = None
    vocab_size: int | None = None

    def replace(self, **changes: object) -> Head:
        """The same head with some fields changed."""
        given: Arguments = changes
        return dataclasses.replace(self, **given)


@dataclasses.dataclass(frozen=True)
class Options:
    """How a call is carried out; what it computes does not depend on it, but for precision.

    Args:
      backend: ``reference`` (dense), ``chunked``, ``mosaic_gpu``, ``pallas_tpu``, or ``None`` for the best one here.
      chunk_size: tokens per chunk of a call from hidden states; ``None`` lets the library choose.
      memory_budget: bytes for arrays as wide as the vocabulary (logits, dlogits, exponentials), in place of
        ``chunk_size``; more memory buys time on every backend. Not counted are arrays of the size of the hidden states
        and the sum of the head's gradient (``head_grad_dtype``). A chunk's logits and dlogits fit in the budget. A
        budget that also holds the logits of all tokens keeps them for cotangents that arrive later (sequence-level
        objectives, ``linear_logprobs``): three matmuls, not four. Hopper's sparse backward spends it on a policy that
        is not sparse, by the exact path. The TPU kernels have no chunks and keep exponentials for the gradient of the
        head: a matmul less for each token that fits.
      logits_dtype: ``float32``, or ``bfloat16`` to round the logits as bf16-logits training does.
      head_grad_dtype: dtype for sums of the head's gradient over chunks: ``float32``, or the parameter's dtype
        (``"param"``), smaller and less exact. The gradient is returned in the parameter's dtype.
      sparse_backward: ``"off"``; or the probability mass that a token's gradient may leave out, for a backward pass
        over the vocabulary columns that matter (``"auto"``: 2^-8 for bfloat16, half an ulp of other dtypes). It holds
        for every token: those that would leave out more go through all columns, and so does everything where that is
        cheaper (docs/sparse-backward.md).
      bwd_impl: of a call from logits: gradient by the backend's own kernel (``pallas``) or by plain JAX (``jax``).
      donate_logits: of a call from logits: dlogits may overwrite the logits (kernel backends); donate them to ``jit``
        as well.
      interpret: run a kernel backend in Pallas' interpreter, on any platform, slowly.
      validate: check the targets on the host first.

    >>> import logitless
    >>> logitless.Options(backend="chunked", chunk_size=512).backend
    'chunked'
    """

    backend: str | None = None
    chunk_size: int | None = None
    memory_budget: int | None = None
    logits_dtype: DTypeLike = "float32"
    head_grad_dtype: str = "float32"
    sparse_backward: SparseBackward = "off"
    bwd_impl: str = "pallas"
    donate_logits: bool = False
    interpret: bool = False
    validate: bool = False


_NAMES = dict(weight="lm_head", layout="head_layout")
HEAD_NAMES = {f.name: _NAMES.get(f.name, f.name) for f in dataclasses.fields(Head)}
"""Fields of :class:`Head`, and the name of each among a call's arguments."""
OPTIONS = {f.name: f.default for f in dataclasses.fields(Options)}


def grouped(flat: Mapping[str, object]) -> Arguments:
    """Arguments of a public call by name, from one flat table with fields of :class:`Head` and :class:`Options` among
    the arrays, as in a configuration file. A ``Head`` in the table is kept unchanged."""
    options: Arguments = {k: v for k, v in flat.items() if k in OPTIONS}
    rest: Arguments = {k: v for k, v in flat.items() if k not in OPTIONS}
    if options:
        rest["options"] = Options(**options)
    if "lm_head" in rest and not isinstance(rest["lm_head"], Head):
        head = {field: rest.pop(name) for field, name in HEAD_NAMES.items() if name in rest}
        rest["lm_head"] = Head(**head) if len(head) > 1 else head["weight"]
    return rest


def _flatten(head: Head) -> tuple[list[tuple[object, object]], tuple[tuple[str, ...], tuple[tuple[str, object], ...]]]:
    """Arrays are leaves; numbers, strings and what is not there are structure."""
    fields = {f: getattr(head, f) for f in HEAD_NAMES}
    fixed = {f: x for f, x in fields.items() if x is None or isinstance(x, (int, float, str))}
    leaves = [(jax.tree_util.GetAttrKey(f), x) for f, x in fields.items() if f not in fixed]
    return leaves, (tuple(f for f in fields if f not in fixed), tuple(fixed.items()))


def _unflatten(structure: tuple[tuple[str, ...], tuple[tuple[str, object], ...]], leaves: Iterable[object]) -> Head:
    names, fixed = structure
    fields: Arguments = dict(zip(names, leaves, strict=True))
    return Head(**fields | dict(fixed))


jax.tree_util.register_pytree_with_keys(Head, _flatten, _unflatten)
