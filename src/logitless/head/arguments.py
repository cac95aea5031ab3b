"""Checks of the head-level calls' arguments, before anything compiles: errors say what was given and expected."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from logitless import backends, validation
from logitless.head import sparse
from logitless.head.chunked import SweepConfig
from logitless.head.operator import Head, Layout
from logitless.head.rows import RowPasses
from logitless.head.vjp import HeadCall
from logitless.parallel import context, spec
from logitless.parallel import head as parallel_head
from logitless.parallel.spec import Placement, Sharding
from logitless.tiles import column_tile, head_chunk
from logitless.transform import LogitTransform, transform_of


def tolerance_of(name: str, given: Any, dtype: Any) -> Array | None:
    """The mass a row may leave out; ``None`` for an exact backward pass."""
    expected = "expected 'off', 'auto' or a probability mass between 0 and 1, such as 2**-8"
    if isinstance(given, str):
        if given not in ("off", "auto"):
            raise ValueError(f"{name}: sparse_backward={given!r}, {expected}.")
        return None if given == "off" else jnp.float32(sparse.auto_tolerance(dtype))
    if given is None or isinstance(given, bool) or jnp.ndim(given) != 0:
        raise TypeError(f"{name}: sparse_backward is {type(given).__name__}, {expected}.")
    if not isinstance(given, jax.core.Tracer) and not 0 < float(given) < 1:
        raise ValueError(f"{name}: sparse_backward={float(given)}, {expected}.")
    return jnp.asarray(given, jnp.float32)


def layout_of(name: str, shape: tuple[int, ...], width: int, given: str | None) -> Layout:
    """Which dimension of the head is the vocabulary."""
    if given is not None and given not in ("vh", "hv"):
        raise ValueError(f"{name}: head_layout={given!r}, expected 'vh' ([V, H]) or 'hv' ([H, V]).")
    if len(shape) != 2:
        raise ValueError(f"{name}: lm_head has shape {shape}, expected [V, H] or [H, V].")
    fits = [k for k, d in (("vh", 1), ("hv", 0)) if shape[d] == width]
    if not fits or (given is not None and given not in fits):
        raise ValueError(
            f"{name}: lm_head has shape {shape}{'' if given is None else f' with head_layout={given!r}'}, which does "
            f"not match hidden's width H = {width}; expected [V, {width}] ('vh') or [{width}, V] ('hv')."
        )
    if given is None and len(fits) == 2:
        raise ValueError(
            f"{name}: lm_head has shape {shape} and hidden's width is {width}: both layouts fit. "
            "Say head_layout='vh' ([V, H]) or 'hv' ([H, V])."
        )
    return given or fits[0]  # type: ignore[return-value]


def _lora(name: str, lora: Any, scale: Any, weight: Array) -> tuple[Array | None, Array | None, Any]:
    if lora is None:
        return None, None, 1.0
    if not isinstance(lora, (tuple, list)) or len(lora) != 2:
        raise TypeError(f"{name}: lora is {type(lora).__name__}, expected a pair (A, B).")
    a, b = (validation.float_array(name, f"lora[{i}]", x) for i, x in enumerate(lora))
    rank = a.shape[-1] if a.ndim == 2 else -1
    if a.ndim != 2 or b.ndim != 2 or (a.shape[0], b.shape[1]) != weight.shape or b.shape[0] != rank:
        raise ValueError(
            f"{name}: lora has shapes {a.shape} and {b.shape}, expected ({weight.shape[0]}, r) and "
            f"(r, {weight.shape[1]}), so that A @ B has the shape of lm_head, {weight.shape}."
        )
    for i, x in enumerate((a, b)):
        if x.dtype != weight.dtype:
            raise TypeError(f"{name}: lora[{i}] has dtype {x.dtype}, lm_head {weight.dtype}; cast one of them.")
    return a, b, validation.scalar(name, "lora_scale", scale, positive=False)


def checked(
    name: str,
    hidden: Any,
    lm_head: Any,
    targets: Any,
    mask: Any,
    bias: Any,
    lora: Any,
    lora_scale: Any,
    head_layout: str | None,
    temperature: Any,
    softcap: Any,
    scale: Any,
    vocab_size: int | None,
    logits_dtype: Any,
    head_grad_dtype: str,
    chunk_size: int | None,
    memory_budget: int | None,
    backend: str | None,
    interpret: bool,
    validate: bool,
    rank: int | None = None,
    sparse_backward: Any = "off",
    sharding: Sharding | None = None,
) -> tuple[HeadCall, str, Array, Head, Array, Array | None, LogitTransform]:
    """Checked arguments, flattened unless they lie on a mesh."""
    hidden = validation.float_array(name, "hidden", hidden)
    weight = validation.float_array(name, "lm_head", lm_head)
    if hidden.ndim < 2 or (rank is not None and hidden.ndim != rank):
        expected = "[B, T, H]" if rank else "[..., H] with at least one token dimension"
        raise ValueError(f"{name}: hidden has shape {hidden.shape}, expected {expected}.")
    validation.not_empty(name, "hidden", hidden)
    layout = layout_of(name, weight.shape, hidden.shape[-1], head_layout)
    validation.not_empty(name, "lm_head", weight)
    if weight.dtype != hidden.dtype:
        raise TypeError(
            f"{name}: hidden is {hidden.dtype} and lm_head {weight.dtype}; cast one of them, so that it is you who "
            "decides in which precision the head's matmul runs."
        )
    shape = hidden.shape[:-1]
    y = validation.target_array(name, targets, shape, "hidden without its last dimension")
    live = validation.mask_array(name, mask, shape)
    lora_a, lora_b, lora_scale = _lora(name, lora, lora_scale, weight)
    head = Head(weight, None, lora_a, lora_b, lora_scale, layout=layout)
    if bias is not None:
        bias = validation.float_array(name, "bias", bias)
        validation.same_shape(name, "bias", bias, (head.vocab,), "the vocabulary")
        head = Head(weight, bias, lora_a, lora_b, lora_scale, layout=layout)
    columns = validation.vocabulary(name, vocab_size, head.vocab, "lm_head")
    temperature = validation.scalar_or_per_token(name, "temperature", temperature, shape)
    softcap, scale = (validation.scalar(name, k, v) for k, v in (("softcap", softcap), ("scale", scale)))
    if validate:
        validation.validate_targets(targets, columns, mask)
    dtype = logits_dtype_of(name, logits_dtype)
    if head_grad_dtype not in ("float32", "param"):
        raise ValueError(f"{name}: head_grad_dtype={head_grad_dtype!r}, expected 'float32' or 'param'.")
    placement = None if sharding is None else spec.resolve(name, sharding, shape, weight.shape, layout)
    if placement is None:
        own_hidden, own_head = jax.ShapeDtypeStruct((y.size, hidden.shape[-1]), hidden.dtype), head
    else:
        own_hidden, own_head = spec.one_device(placement, hidden, head)
    chunk = chunk_of(name, chunk_size, memory_budget, own_hidden.shape[0], own_head.vocab, dtype.itemsize)
    chosen, _ = choose(name, backend, own_hidden, own_head, chunk, dtype, interpret, sparse_backward, placement)
    rows = RowPasses(columns, column_tile(), "mosaic_gpu" if chosen == "mosaic_gpu" else "xla", interpret)
    c = HeadCall(name, SweepConfig(chunk, dtype, head_grad_dtype, rows), placement)
    t = transform_of(temperature, softcap, scale)
    if placement is not None and chosen != "reference":
        return c, chosen, hidden, head, y, live, t
    if placement is None:
        context.refuse_replication(name, chosen, (("hidden", hidden), ("lm_head", weight)))
        y = context.on_one_device(name, chosen, y)
    else:  # dense: the compiler partitions it, from where the arrays are
        hidden, head = parallel_head.placed(placement, hidden, head)
        c = dataclasses.replace(c, placement=None)
    flat_live = None if live is None else live.reshape(-1)
    return c, chosen, hidden.reshape(y.size, -1), head, y.reshape(-1), flat_live, t.per_token(shape)


def logits_dtype_of(name: str, given: Any) -> jnp.dtype:
    try:
        dtype = jnp.dtype(given)
    except TypeError:
        dtype = None
    if dtype not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(f"{name}: logits_dtype={given!r}, expected 'float32' or 'bfloat16'.")
    return dtype


def chunk_of(name: str, chunk_size: Any, memory_budget: Any, n: int, vocab: int, itemsize: int) -> int:
    if chunk_size is not None and memory_budget is not None:
        raise ValueError(f"{name}: give chunk_size or memory_budget, not both.")
    for label, value in (("chunk_size", chunk_size), ("memory_budget", memory_budget)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name}: {label}={value!r}, expected a positive Python int.")
    if chunk_size is not None:
        return min(chunk_size, n)
    try:
        return head_chunk(n, vocab, memory_budget=memory_budget, logits_bytes=itemsize)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def choose(
    name: str,
    backend: str | None,
    h: Any,
    head: Any,
    chunk: int,
    dtype: Any,
    interpret: bool,
    sparse_backward: Any = "off",
    placement: Placement | None = None,
) -> tuple[str, str]:
    """``(backend, why)`` for hidden states ``h [N, H]`` and a :class:`Head`; arrays or shapes."""
    sparse_wanted = not (isinstance(sparse_backward, str) and sparse_backward == "off")
    if sparse_wanted and backend == "reference":
        raise NotImplementedError(
            f"{name}: backend='reference' has no sparse backward, it is the dense baseline. "
            "Use backend=None, 'chunked', 'mosaic_gpu' or 'pallas_tpu', or sparse_backward='off'."
        )

    def check(kernel: str) -> None:
        if kernel == "pallas_tpu":
            from logitless.head import pallas_tpu, pallas_tpu_sparse

            if head.lora_a is not None:
                raise NotImplementedError("it has no LoRA yet")
            if sparse_wanted and placement is not None:
                raise NotImplementedError("its sparse backward does not work with sharding= yet")
            pallas_tpu.check(h, head.weight, layout=head.layout, bias=head.bias, logits_dtype=dtype)
            if sparse_wanted:
                pallas_tpu_sparse.check(head, dtype)
        else:
            from logitless.logits import mosaic_gpu

            if placement is not None and placement.vocab:
                raise NotImplementedError("it has no vocabulary-parallel form yet")
            mosaic_gpu.check(chunk, head.vocab, dtype)

    return backends.choose(name, backend, backends.HEAD_BACKENDS, check, interpret)
