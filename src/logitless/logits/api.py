"""The logits-level public calls: :func:`logprobs` and :func:`grpo_loss`."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from logitless import backends, validation
from logitless.backends import Route
from logitless.derivatives import only_three_differentiable
from logitless.logits import reference, vjp
from logitless.logits.vjp import LogitsCall
from logitless.objectives.api import flat_inputs, loss_inputs, loss_of_stats, metrics_of, statistics_temperature
from logitless.objectives.metrics import Metrics
from logitless.objectives.objective import Objective
from logitless.parallel import context, spec
from logitless.parallel import logits as parallel_logits
from logitless.parallel.spec import Placement, Sharding
from logitless.stats import TokenStats
from logitless.tiles import row_chunk
from logitless.transform import transform_of

BwdImpl = Literal["pallas", "jax"]


@context.over_mesh(gives_tokens=True)
def logprobs(
    logits: Float[Array, "*tokens V"],
    targets: Int[Array, "*tokens"],
    *,
    mask: Array | None = None,
    temperature: Float[Array, "*#tokens"] | float = 1.0,
    softcap: float | None = None,
    scale: float | None = None,
    vocab_size: int | None = None,
    backend: str | None = None,
    bwd_impl: BwdImpl = "pallas",
    donate_logits: bool = False,
    sharding: Sharding | None = None,
    interpret: bool = False,
    validate: bool = False,
) -> TokenStats:
    """Log-probability of each target, entropy and logsumexp, with their exact gradients.

    Args:
      logits: any float dtype; statistics are float32.
      targets: token ids. A live id outside ``[0, V)`` gives NaN statistics; ``validate=True`` finds it on the host.
      mask: tokens where it is 0 have zero statistics and no gradient, whatever stands there.
      temperature: a number, or one per token; divides the logits after scale and softcap.
      softcap: ``softcap * tanh(x / softcap)`` before the temperature.
      scale: factor of the raw logits.
      vocab_size: columns at or beyond it are padding: no probability, zero gradient.
      backend: ``reference``, ``chunked``, ``pallas_tpu``, ``mosaic_gpu``, or ``None`` for the best one here.
      bwd_impl: gradient by the backend's own kernel (``pallas``) or by plain JAX (``jax``).
      donate_logits: dlogits may overwrite the logits (kernel backends); donate them to ``jit`` as well.
      sharding: how the arrays lie on a mesh of several devices (docs/sharding.md).
      interpret: run a kernel backend in Pallas' interpreter, on any platform, slowly.
      validate: check the targets on the host first.

    >>> import jax.numpy as jnp, logitless
    >>> stats = logitless.logprobs(jnp.zeros((1, 2, 4)), jnp.array([[0, 3]]))
    >>> [round(float(x), 4) for x in stats.logp[0]]
    [-1.3863, -1.3863]
    """
    c, x, y, live, t = _checked(
        "logprobs", logits, targets, mask, temperature, softcap, scale, vocab_size, backend, bwd_impl, donate_logits,
        interpret, validate, sharding=sharding,
    )  # fmt: skip
    flat = _stats(c, x, y, t, live)
    return only_three_differentiable(flat.map(lambda s: s.reshape(np.shape(targets))))


@context.over_mesh(gives_tokens=False)
def grpo_loss(
    logits: Float[Array, "B T V"],
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
    softcap: float | None = None,
    scale: float | None = None,
    vocab_size: int | None = None,
    backend: str | None = None,
    bwd_impl: BwdImpl = "pallas",
    donate_logits: bool = False,
    sharding: Sharding | None = None,
    interpret: bool = False,
    validate: bool = False,
) -> tuple[Array, Metrics]:
    """A GRPO-family loss over logits, differentiable with respect to them.

    ``advantages``, ``old_logp``, ``ref_logp`` and ``rollout_logp`` are constants. The temperature is the objective's.
    ``denominator`` replaces the batch's own count when it is a part of a larger one (:mod:`logitless.objectives`).
    The other arguments are those of :func:`logprobs`.

    >>> import jax, jax.numpy as jnp, logitless
    >>> logits, targets = jnp.zeros((1, 2, 4)), jnp.array([[0, 3]])
    >>> loss, metrics = logitless.grpo_loss(logits, targets, advantages=jnp.array([1.0]))
    >>> float(loss), logitless.metric_values(metrics)["ratio"]
    (-1.0, 1.0)
    """
    name = "grpo_loss"
    objective = validation.objective_of(name, objective)
    c, x, y, _, t = _checked(
        name, logits, targets, mask, statistics_temperature(objective), softcap, scale, vocab_size, backend, bwd_impl,
        donate_logits, interpret, validate, rank=3, sharding=sharding,
    )  # fmt: skip
    objective, inputs = loss_inputs(
        name, objective, np.shape(targets), mask, advantages, old_logp, ref_logp, rollout_logp, segment_ids,
        denominator, entropy_denominator,
    )  # fmt: skip
    columns_apart = c.placement is not None and bool(c.placement.vocab)
    if inputs.sequences is not None or c.backend == "reference" or columns_apart:
        flat = _stats(c, x, y, t, inputs.mask.reshape(y.shape))
        return loss_of_stats(objective, flat.map(lambda s: s.reshape(np.shape(targets))), inputs)
    if c.placement is not None:
        loss, flat = parallel_logits.token_loss(c, x, y, t, objective, inputs)
    else:
        loss, flat = vjp.token_loss(c, x, y, t, objective, flat_inputs(inputs))
    flat = jax.lax.stop_gradient(flat)
    return loss, metrics_of(objective, flat.map(lambda s: s.reshape(np.shape(targets))), inputs)


def _stats(c: LogitsCall, x: Array, y: Array, t: Any, live: Array | None) -> TokenStats:
    if c.placement is not None:
        return parallel_logits.stats(c, x, y, t, live)
    if c.backend == "reference":
        return reference.token_stats(x, y, t, c.vocab_size, live)
    return vjp.stats(c, x, y, t, live)


def _checked(
    name: str,
    logits: Any,
    targets: Any,
    mask: Any,
    temperature: Any,
    softcap: Any,
    scale: Any,
    vocab_size: int | None,
    backend: str | None,
    bwd_impl: str,
    donate_logits: bool,
    interpret: bool,
    validate: bool,
    rank: int | None = None,
    sharding: Sharding | None = None,
) -> tuple[LogitsCall, Array, Array, Array | None, Any]:
    """Checked arguments, flattened unless they lie on a mesh."""
    logits = validation.float_array(name, "logits", logits)
    if logits.ndim < 2 or (rank is not None and logits.ndim != rank):
        expected = "[B, T, V]" if rank else "[..., V] with at least one token dimension"
        raise ValueError(f"{name}: logits has shape {logits.shape}, expected {expected}.")
    validation.not_empty(name, "logits", logits)
    shape = logits.shape[:-1]
    y = validation.target_array(name, targets, shape, "logits without the vocabulary")
    live = validation.mask_array(name, mask, shape)
    columns = validation.vocabulary(name, vocab_size, logits.shape[-1], "logits")
    temperature = validation.scalar_or_per_token(name, "temperature", temperature, shape)
    softcap, scale = (validation.scalar(name, k, v) for k, v in (("softcap", softcap), ("scale", scale)))
    if bwd_impl not in ("pallas", "jax"):
        raise ValueError(f"{name}: bwd_impl={bwd_impl!r}, expected 'pallas' or 'jax'.")
    if validate:
        validation.validate_targets(targets, columns, mask)
    n, v = logits.size // logits.shape[-1], logits.shape[-1]
    placement = None if sharding is None else spec.resolve(name, sharding, shape, vocab=v)
    if placement is not None:
        n, v = n // placement.count(placement.token_axes), placement.local_vocab(v)
    chosen, _ = choose(name, backend, n, v, logits.dtype, interpret, placement)
    if donate_logits and chosen in ("reference", "chunked"):
        raise ValueError(f"{name}: donate_logits=True is for the kernel backends; {chosen!r} leaves buffers to XLA.")
    c = LogitsCall(name, chosen, columns, donate_logits, bwd_impl, interpret, placement=placement)
    t = transform_of(temperature, softcap, scale)
    if placement is not None and chosen != "reference":
        return c, logits, y, live, t
    if placement is None:
        context.refuse_replication(name, chosen, (("logits", logits),))
        y = context.on_one_device(name, chosen, y)
    else:  # dense: the compiler partitions it, from where the logits are
        logits = parallel_logits.placed(placement, logits)
        c = dataclasses.replace(c, placement=None)
    x = logits.reshape(-1, logits.shape[-1])
    return c, x, y.reshape(-1), None if live is None else live.reshape(-1), t.per_token(shape)


def choose(
    name: str,
    backend: str | None,
    n: int,
    v: int,
    dtype: Any,
    interpret: bool,
    placement: Placement | None = None,
) -> tuple[str, str]:
    """``(backend, why)`` for logits ``[n, v]``, those of one device."""

    def check(kernel: str) -> None:
        if kernel == "mosaic_gpu" and placement is not None and placement.vocab:
            raise NotImplementedError("it has no vocabulary-parallel form yet")
        LogitsCall(name, kernel, v).module().check(n, v, dtype)

    return backends.choose(name, backend, backends.LOGITS_BACKENDS, check, interpret)


def route(
    name: str,
    logits: Any,
    objective: Objective | None,
    backend: str | None,
    interpret: bool,
    sharding: Sharding | None = None,
) -> Route:
    """What a call would do, from shapes alone; over a mesh, what each device would."""
    v = logits.shape[-1]
    n = 1
    for d in logits.shape[:-1]:
        n *= d
    placement = None
    if sharding is not None:
        placement = spec.resolve(name, sharding, tuple(logits.shape[:-1]), vocab=v)
        n, v = n // placement.count(placement.token_axes), placement.local_vocab(v)
    dtype = jnp.dtype(logits.dtype)
    chosen, because = choose(name, backend, n, v, dtype, interpret, placement)
    size = n * v * dtype.itemsize
    why = None if objective is None else objective.coupling()
    if objective is not None and placement is not None and placement.vocab:
        why = why or "a device has a part of the vocabulary only"
    if chosen == "reference":
        way = "dense plain JAX, differentiated by JAX"
    elif objective is None:
        way = "statistics; dlogits later from the cotangents that arrive"
    elif why is None:
        way = "statistics and dlogits in one pass (each token's gradient follows from its own statistics)"
    else:
        way = f"statistics, then dlogits from cotangents ({why})"
    tiles: dict[str, Any] = {}
    if chosen in ("pallas_tpu", "mosaic_gpu"):
        tiles = dict(LogitsCall(name, chosen, v).module().describe(n, v, dtype))
    elif chosen == "chunked":
        tiles = {"rows": row_chunk(n, v)}
    one_pass = objective is not None and why is None and chosen in ("pallas_tpu", "mosaic_gpu")
    if one_pass and chosen == "pallas_tpu" and tiles.get("tiles", 1) > 1:
        # A row too wide for VMEM is swept tile by tile: once for its statistics, once more for its dlogits.
        one_pass = False
        way = f"statistics, then dlogits: a row of {v} columns does not fit VMEM at once"
    reads = 1 if one_pass else 2
    moved = f"logits read {reads}x ({reads * size:,} B), dlogits written once ({size:,} B)"
    if chosen == "reference":
        moved = f"up to XLA; at least {3 * size:,} B"
    return Route(name, chosen, way, "0", moved, tiles, because)
