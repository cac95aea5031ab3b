"""The head-level public calls: :func:`linear_logprobs` and :func:`linear_grpo_loss`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from logitless import backends, validation
from logitless.backends import Route
from logitless.derivatives import only_three_differentiable
from logitless.head import forward, reference, sparse, sparse_vjp, vjp
from logitless.head.chunked import SweepConfig
from logitless.head.operator import Head, Layout
from logitless.head.rows import RowPasses
from logitless.head.sparse import SparseReport
from logitless.head.vjp import HeadCall
from logitless.objectives.api import flat_inputs, loss_inputs, loss_of_stats, metrics_of, statistics_temperature
from logitless.objectives.metrics import Metrics
from logitless.objectives.objective import Objective
from logitless.parallel import context, spec
from logitless.parallel import head as parallel_head
from logitless.parallel.spec import Placement, Sharding
from logitless.stats import TokenStats
from logitless.tiles import column_tile, head_chunk
from logitless.transform import LogitTransform, transform_of

HeadGradDtype = Literal["float32", "param"]


@context.over_mesh(gives_tokens=True)
def linear_logprobs(
    hidden: Float[Array, "*tokens H"],
    lm_head: Float[Array, "V H"] | Float[Array, "H V"],
    targets: Int[Array, "*tokens"],
    *,
    mask: Array | None = None,
    bias: Float[Array, "V"] | None = None,
    lora: tuple[Array, Array] | None = None,
    lora_scale: float = 1.0,
    head_layout: Layout | None = None,
    temperature: Float[Array, "*#tokens"] | float = 1.0,
    softcap: float | None = None,
    scale: float | None = None,
    vocab_size: int | None = None,
    logits_dtype: Any = "float32",
    head_grad_dtype: HeadGradDtype = "float32",
    sparse_backward: Literal["off", "auto"] | float | Array = "off",
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    sharding: Sharding | None = None,
    interpret: bool = False,
    validate: bool = False,
) -> TokenStats:
    """Log-probability of each target, entropy and logsumexp, from hidden states, without ``[B, T, V]`` logits.

    Differentiable with respect to ``hidden``, ``lm_head``, ``bias`` and ``lora``; a gradient that is not asked for
    costs nothing. Without any gradient it is one matmul.

    Args:
      hidden: final hidden states, bfloat16, float16 or float32.
      lm_head: ``[V, H]`` (a tied embedding) or ``[H, V]``, of the dtype of ``hidden``; neither is copied.
      targets: token ids. A live id outside ``[0, V)`` gives NaN statistics; ``validate=True`` finds it on the host.
      mask: tokens where it is 0 have zero statistics, no gradient and no cost.
      bias: added to the logits.
      lora: ``(A, B)`` with ``A @ B`` of the shape of ``lm_head``; the head is then ``lm_head + lora_scale * A @ B``.
      head_layout: ``"vh"`` or ``"hv"``; needed only where the shape does not tell.
      temperature: a number, or one per token; divides the logits after scale and softcap.
      softcap: ``softcap * tanh(x / softcap)`` before the temperature.
      scale: factor of the raw logits.
      vocab_size: columns at or beyond it are padding: no probability, zero gradient.
      logits_dtype: ``float32``, or ``bfloat16`` to round the logits as bf16-logits training does.
      head_grad_dtype: dtype in which the head's gradient is summed over chunks: ``float32``, or that of the
        parameter (``"param"``), which is smaller and less exact. It is returned in the parameter's dtype.
      sparse_backward: ``"off"``; or the probability mass that a token's gradient may leave out, for a backward pass
        over the vocabulary columns that matter (``"auto"``: 2^-8 for bfloat16, half an ulp of other dtypes). It holds
        for every token: those that would leave out more go through all columns, and so does everything where that is
        cheaper (docs/sparse-backward.md).
      chunk_size: tokens per chunk; ``None`` lets the library choose.
      memory_budget: bytes that the chunk's logits and dlogits may take, in place of ``chunk_size``.
      backend: ``reference`` (dense), ``chunked``, ``mosaic_gpu``, ``pallas_tpu``, or ``None`` for the best one
        here.
      sharding: how the arrays lie on a mesh of several devices (docs/sharding.md).
      interpret: run a kernel backend in Pallas' interpreter, on any platform, slowly.
      validate: check the targets on the host first.

    >>> import jax.numpy as jnp, logitless
    >>> h, w = jnp.ones((1, 2, 3)), jnp.zeros((4, 3))
    >>> stats = logitless.linear_logprobs(h, w, jnp.array([[0, 3]]))
    >>> [round(float(x), 4) for x in stats.entropy[0]]
    [1.3863, 1.3863]
    """
    c, chosen, h, head, y, live, t = _checked(
        "linear_logprobs", hidden, lm_head, targets, mask, bias, lora, lora_scale, head_layout, temperature, softcap,
        scale, vocab_size, logits_dtype, head_grad_dtype, chunk_size, memory_budget, backend, interpret, validate,
        sparse_backward=sparse_backward, sharding=sharding,
    )  # fmt: skip
    tolerance = _tolerance("linear_logprobs", sparse_backward, h.dtype)
    flat, _ = _stats(c, chosen, h, head, y, t, live, tolerance=tolerance)
    return only_three_differentiable(flat.map(lambda s: s.reshape(np.shape(targets))))


@context.over_mesh(gives_tokens=False)
def linear_grpo_loss(
    hidden: Float[Array, "B T H"],
    lm_head: Float[Array, "V H"] | Float[Array, "H V"],
    targets: Int[Array, "B T"],
    *,
    advantages: Float[Array, "B"] | Float[Array, "B T"],
    mask: Array | None = None,
    old_logp: Float[Array, "B T"] | None = None,
    ref_logp: Float[Array, "B T"] | None = None,
    rollout_logp: Float[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    objective: Objective = Objective(),  # noqa: B008  (frozen)
    denominator: Array | float | None = None,
    entropy_denominator: Array | float | None = None,
    bias: Float[Array, "V"] | None = None,
    lora: tuple[Array, Array] | None = None,
    lora_scale: float = 1.0,
    head_layout: Layout | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    vocab_size: int | None = None,
    logits_dtype: Any = "float32",
    head_grad_dtype: HeadGradDtype = "float32",
    sparse_backward: Literal["off", "auto"] | float | Array = "off",
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
    sharding: Sharding | None = None,
    interpret: bool = False,
    validate: bool = False,
) -> tuple[Array, Metrics]:
    """A GRPO-family loss from hidden states and the head, without ``[B, T, V]`` logits or dlogits.

    Objectives whose tokens are uncoupled take three matmuls per token that has a gradient (two with a frozen head),
    the others four; masked tokens cost nothing. ``advantages``, ``old_logp``, ``ref_logp`` and ``rollout_logp`` are
    constants. The temperature is the objective's. The other arguments are those of :func:`linear_logprobs` and
    :func:`logitless.grpo_loss`.

    >>> import jax, jax.numpy as jnp, logitless
    >>> h, w, y = jnp.ones((1, 2, 3)), jnp.zeros((4, 3)), jnp.array([[0, 3]])
    >>> def loss(h, w):
    ...     return logitless.linear_grpo_loss(h, w, y, advantages=jnp.array([1.0]))[0]
    >>> value, (dh, dw) = jax.value_and_grad(loss, argnums=(0, 1))(h, w)
    >>> float(value), dw.shape
    (-1.0, (4, 3))
    """
    name = "linear_grpo_loss"
    objective = validation.objective_of(name, objective)
    c, chosen, h, head, y, _, t = _checked(
        name, hidden, lm_head, targets, mask, bias, lora, lora_scale, head_layout, statistics_temperature(objective),
        softcap, scale, vocab_size, logits_dtype, head_grad_dtype, chunk_size, memory_budget, backend, interpret,
        validate, rank=3, sparse_backward=sparse_backward, sharding=sharding,
    )  # fmt: skip
    tolerance = _tolerance(name, sparse_backward, h.dtype)
    objective, inputs = loss_inputs(
        name, objective, np.shape(targets), mask, advantages, old_logp, ref_logp, rollout_logp, segment_ids,
        denominator, entropy_denominator,
    )  # fmt: skip
    columns_apart = c.placement is not None and bool(c.placement.vocab)
    if inputs.sequences is not None or chosen in ("reference", "pallas_tpu") or columns_apart:
        live = None if mask is None else inputs.mask.reshape(y.shape)
        flat, report = _stats(c, chosen, h, head, y, t, live, objective.entropy_coef is None, tolerance)
        loss, metrics = loss_of_stats(objective, flat.map(lambda s: s.reshape(np.shape(targets))), inputs)
        return loss, _with_report(metrics, report, head)
    report = None
    if c.placement is not None:
        loss, flat = parallel_head.token_loss(parallel_head.ShardedHead(c, chosen), h, head, y, t, objective, inputs)
    elif tolerance is None:
        loss, flat = vjp.token_loss(c, h, head, y, t, objective, flat_inputs(inputs))
    else:
        loss, flat, report = sparse_vjp.token_loss(c, h, head, y, t, objective, flat_inputs(inputs), tolerance)
    flat = jax.lax.stop_gradient(flat)
    metrics = metrics_of(objective, flat.map(lambda s: s.reshape(np.shape(targets))), inputs)
    return loss, _with_report(metrics, report, head)


def _stats(
    c: HeadCall,
    chosen: str,
    h: Array,
    head: Head,
    y: Array,
    t: LogitTransform,
    live: Array | None,
    logp_only: bool = True,
    tolerance: Array | None = None,
) -> tuple[TokenStats, SparseReport | None]:
    """Statistics by the chosen backend; ``logp_only``: no gradient of entropy or lse is expected."""
    if c.placement is not None:
        return parallel_head.stats(parallel_head.ShardedHead(c, chosen, logp_only), h, head, y, t, live), None
    if chosen == "reference":
        return reference.token_stats(h, head, y, t, c.sweep.vocab_size, live, c.sweep.logits_dtype), None
    if chosen == "pallas_tpu":
        from logitless.head import pallas_tpu_vjp

        rows = c.sweep.rows
        call = pallas_tpu_vjp.TpuCall(c.name, rows.vocab_size, c.sweep.logits_dtype, logp_only, rows.interpret)
        return pallas_tpu_vjp.stats(call, h, head, y, t, live), None
    if tolerance is not None:
        return sparse_vjp.stats(c, h, head, y, t, live, tolerance)
    return vjp.stats(c, h, head, y, t, live), None


def _tolerance(name: str, given: Any, dtype: Any) -> Array | None:
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


def _with_report(metrics: Metrics, report: SparseReport | None, head: Head) -> Metrics:
    return metrics if report is None else metrics | sparse.report_metrics(report, head.vocab)


def _layout(name: str, shape: tuple[int, ...], width: int, given: str | None) -> Layout:
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
    return a, b, validation.scalar(name, "lora_scale", scale)


def _checked(
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
    layout = _layout(name, weight.shape, hidden.shape[-1], head_layout)
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
    dtype = _logits_dtype(name, logits_dtype)
    if head_grad_dtype not in ("float32", "param"):
        raise ValueError(f"{name}: head_grad_dtype={head_grad_dtype!r}, expected 'float32' or 'param'.")
    placement = None if sharding is None else spec.resolve(name, sharding, shape, weight.shape, layout)
    if placement is None:
        own_hidden, own_head = jax.ShapeDtypeStruct((y.size, hidden.shape[-1]), hidden.dtype), head
    else:
        own_hidden, own_head = spec.one_device(placement, hidden, head)
    chunk = _chunk(name, chunk_size, memory_budget, own_hidden.shape[0], own_head.vocab, dtype.itemsize)
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


def _logits_dtype(name: str, given: Any) -> jnp.dtype:
    try:
        dtype = jnp.dtype(given)
    except TypeError:
        dtype = None
    if dtype not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(f"{name}: logits_dtype={given!r}, expected 'float32' or 'bfloat16'.")
    return dtype


def _chunk(name: str, chunk_size: Any, memory_budget: Any, n: int, vocab: int, itemsize: int) -> int:
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
            "Use backend=None, 'chunked' or 'mosaic_gpu', or sparse_backward='off'."
        )
    if sparse_wanted and placement is not None:
        raise NotImplementedError(
            f"{name}: sparse_backward does not work with sharding= yet; leave one of them out, or call it inside your "
            "own shard_map."
        )

    def check(kernel: str) -> None:
        if kernel == "pallas_tpu":
            from logitless.head import pallas_tpu

            if sparse_wanted:
                raise NotImplementedError("it has no sparse backward yet")
            if head.lora_a is not None:
                raise NotImplementedError("it has no LoRA yet")
            pallas_tpu.check(h, head.weight, layout=head.layout, bias=head.bias, logits_dtype=dtype)
        else:
            from logitless.logits import mosaic_gpu

            if placement is not None and placement.vocab:
                raise NotImplementedError("it has no vocabulary-parallel form yet")
            mosaic_gpu.check(chunk, head.vocab, dtype)

    return backends.choose(name, backend, backends.HEAD_BACKENDS, check, interpret)


def route(
    name: str,
    hidden: Any,
    lm_head: Any,
    objective: Objective | None,
    backend: str | None,
    chunk_size: int | None,
    memory_budget: int | None,
    logits_dtype: Any,
    interpret: bool,
    head_layout: str | None = None,
    sharding: Sharding | None = None,
    sparse_backward: Any = "off",
) -> Route:
    """What a call would do, from shapes alone; over a mesh, what each device would."""
    width = hidden.shape[-1]
    n = 1
    for d in hidden.shape[:-1]:
        n *= d
    layout = _layout(name, tuple(lm_head.shape), width, head_layout)
    placement = None
    if sharding is not None:
        placement = spec.resolve(name, sharding, tuple(hidden.shape[:-1]), tuple(lm_head.shape), layout)
        flat, own = spec.one_device(placement, hidden, Head(lm_head, layout=layout))
        n, lm_head = flat.shape[0], own.weight
    vocab = lm_head.shape[0 if layout == "vh" else 1]
    dtype = _logits_dtype(name, logits_dtype)
    chunk = _chunk(name, chunk_size, memory_budget, n, vocab, dtype.itemsize)
    flat = jax.ShapeDtypeStruct((n, width), hidden.dtype)
    chosen, because = choose(
        name, backend, flat, Head(lm_head, layout=layout), chunk, dtype, interpret, sparse_backward, placement
    )
    tolerance = _tolerance(name, sparse_backward, hidden.dtype)
    head_bytes = vocab * width * jnp.dtype(lm_head.dtype).itemsize
    if chosen == "reference":
        way, matmuls = f"dense: [{n}, {vocab}] logits and dlogits in memory", "3 (1 without a gradient)"
        moved = f"logits and dlogits {2 * n * vocab * dtype.itemsize:,} B, each written and read"
        return Route(name, chosen, way, matmuls, moved, {}, because)
    if chosen == "pallas_tpu":
        return _tpu_route(name, flat, lm_head, layout, objective, because)
    sweeps = -(-n // chunk)
    coupled = None if objective is None else objective.coupling()
    if placement is not None and placement.vocab:
        coupled = coupled or "a device has a part of the vocabulary only"
    if objective is not None and coupled is None:
        way = "grad in forward: a token's cotangent follows from its own statistics"
        matmuls = "3 (2 with a frozen head, 1 without a gradient) per live token; 1 where no gradient is possible"
    else:
        reason = "cotangents arrive later" if objective is None else coupled
        way = f"by recompute: {reason}"
        matmuls = "4 (3 with a frozen head, 1 without a gradient) per live token; 1 where the cotangent is zero"
    moved = (
        f"head read {sweeps}x per matmul ({head_bytes:,} B each), logits chunk {chunk * vocab * dtype.itemsize:,} B "
        f"at a time; at most {sweeps} chunks, fewer with dead tokens"
    )
    by_recompute = objective is None or coupled is not None
    rows = RowPasses(vocab, None, "mosaic_gpu" if chosen == "mosaic_gpu" else "xla", interpret)
    sweep = SweepConfig(chunk, dtype, "float32", rows)
    if by_recompute and forward.not_fused_because(sweep, flat, Head(lm_head, layout=layout)) is None:
        moved += "; the statistics by a fused matmul: no logits"
    tiles: dict[str, Any] = {"chunk": chunk, "layout": layout}
    if tolerance is not None:
        way, matmuls, tiles["slab"] = _sparse_way(way, by_recompute, tolerance, vocab)
    return Route(name, chosen, way, matmuls, moved, tiles, because)


def _sparse_way(way: str, by_recompute: bool, tolerance: Array, vocab: int) -> tuple[str, str, int]:
    """``(way, matmuls, slab)`` with a sparse backward; how much it saves depends on the data."""
    slab = sparse.columns_of.slab_width(vocab)
    most = sparse.columns_of.most_columns(vocab, slab)
    if isinstance(tolerance, jax.core.Tracer):
        left_out = "the given mass"
    else:
        mass = float(tolerance)
        left_out = f"2^{round(math.log2(mass))}" if math.log2(mass).is_integer() else f"{mass:.3g}"
    way += (
        f"; backward over the K active columns of a chunk, which leave at most {left_out} of a row's mass out (rows "
        f"that would leave out more: all columns, as a group); dense chunks where K > {most:,}"
    )
    matmuls = (
        f"1 + {3 if by_recompute else 2} K/V per live token, {4 if by_recompute else 3} in dense chunks, 4 a hard row; "
        "one less of the K/V and of the rest with a frozen head, 1 without a gradient"
    )
    return way, matmuls, slab


def _tpu_route(name: str, h: Any, lm_head: Any, layout: Layout, objective: Objective | None, because: str) -> Route:
    from logitless.head import pallas_tpu

    about = pallas_tpu.describe(h, lm_head, layout=layout)
    entropy = objective is not None and objective.entropy_coef is not None
    used: tuple[str, ...]
    if entropy:
        way = "statistics, then dH and dW by sweeps of their own (an entropy bonus has a gradient too)"
        used, matmuls = ("token_stats", "dhidden", "dhead"), "5 (3 with a frozen head, 1 without a gradient)"
    else:
        way = "flash: the forward sweep carries d logp/d hidden, dW has a sweep of its own"
        used, matmuls = ("token_stats_and_direction", "dhead"), "4 (2 with a frozen head, 1 without a gradient)"
    moved = ", ".join(f"{k} {about[k]['hbm_bytes']:,} B" for k in used)
    tiles = {k: f"{about[k]['token_tile']}x{about[k]['vocab_tile']}" for k in used}
    return Route(name, "pallas_tpu", way, matmuls, moved, {**tiles, "layout": layout}, because)
