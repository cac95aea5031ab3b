"""The head-level public calls: :func:`linear_logprobs` and :func:`linear_grpo_loss`."""

from __future__ import annotations

from typing import Any, Literal

import jax
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from logitless import validation
from logitless.derivatives import only_three_differentiable
from logitless.head import reference, sparse_report, sparse_vjp, vjp
from logitless.head.arguments import checked, tolerance_of
from logitless.head.operator import Head, Layout
from logitless.head.sparse_report import SparseReport
from logitless.head.vjp import HeadCall
from logitless.objectives.api import flat_inputs, loss_inputs, loss_of_stats, metrics_of, statistics_temperature
from logitless.objectives.metrics import Metrics
from logitless.objectives.objective import Objective
from logitless.parallel import context
from logitless.parallel import head as parallel_head
from logitless.parallel import sparse as parallel_sparse
from logitless.parallel.spec import Sharding
from logitless.stats import TokenStats
from logitless.transform import LogitTransform

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
    c, chosen, h, head, y, live, t = checked(
        "linear_logprobs", hidden, lm_head, targets, mask, bias, lora, lora_scale, head_layout, temperature, softcap,
        scale, vocab_size, logits_dtype, head_grad_dtype, chunk_size, memory_budget, backend, interpret, validate,
        sparse_backward=sparse_backward, sharding=sharding,
    )  # fmt: skip
    tolerance = tolerance_of("linear_logprobs", sparse_backward, h.dtype)
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
    c, chosen, h, head, y, _, t = checked(
        name, hidden, lm_head, targets, mask, bias, lora, lora_scale, head_layout, statistics_temperature(objective),
        softcap, scale, vocab_size, logits_dtype, head_grad_dtype, chunk_size, memory_budget, backend, interpret,
        validate, rank=3, sparse_backward=sparse_backward, sharding=sharding,
    )  # fmt: skip
    tolerance = tolerance_of(name, sparse_backward, h.dtype)
    objective, inputs = loss_inputs(
        name, objective, np.shape(targets), mask, advantages, old_logp, ref_logp, rollout_logp, segment_ids,
        denominator, entropy_denominator,
    )  # fmt: skip
    columns_apart = c.placement is not None and bool(c.placement.vocab)
    live = None if mask is None else inputs.mask.reshape(y.shape)
    statistics_first = chosen == "reference" or (chosen == "pallas_tpu" and tolerance is None)
    if inputs.sequences is not None or statistics_first or columns_apart:
        flat, report = _stats(c, chosen, h, head, y, t, live, objective.entropy_coef is None, tolerance)
        loss, metrics = loss_of_stats(objective, flat.map(lambda s: s.reshape(np.shape(targets))), inputs)
        return loss, _with_report(metrics, report, head)
    report = None
    if c.placement is not None:
        sharded = parallel_head.ShardedHead(c, chosen)
        if tolerance is None:
            loss, flat = parallel_head.token_loss(sharded, h, head, y, t, objective, inputs)
        else:
            loss, flat, report = parallel_sparse.token_loss(sharded, h, head, y, t, objective, inputs, tolerance)
    elif chosen == "pallas_tpu" and tolerance is not None:
        from logitless.head import pallas_tpu_sparse_vjp

        call = c.tpu_call(objective.entropy_coef is None)
        loss, flat, report = pallas_tpu_sparse_vjp.token_loss(
            call, h, head, y, t, live, objective, flat_inputs(inputs), tolerance
        )
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
        sharded = parallel_head.ShardedHead(c, chosen, logp_only)
        if tolerance is not None:
            return parallel_sparse.stats(sharded, h, head, y, t, live, tolerance)
        return parallel_head.stats(sharded, h, head, y, t, live), None
    if chosen == "reference":
        return reference.token_stats(h, head, y, t, c.sweep.vocab_size, live, c.sweep.logits_dtype), None
    if chosen == "pallas_tpu":
        from logitless.head import pallas_tpu_sparse_vjp, pallas_tpu_vjp

        if tolerance is not None:
            return pallas_tpu_sparse_vjp.stats(c.tpu_call(logp_only), h, head, y, t, live, tolerance)
        return pallas_tpu_vjp.stats(c.tpu_call(logp_only), h, head, y, t, live), None
    if tolerance is not None:
        return sparse_vjp.stats(c, h, head, y, t, live, tolerance)
    return vjp.stats(c, h, head, y, t, live), None


def _with_report(metrics: Metrics, report: SparseReport | None, head: Head) -> Metrics:
    return metrics if report is None else metrics | sparse_report.report_metrics(report, head.vocab)
