"""The public calls: statistics (:func:`logprobs`, :func:`divergence`) and losses (:func:`grpo_loss`), from logits or,
by the names that begin with ``linear_``, from hidden states and a head.

Each call binds its arguments (``core/arguments.py``), which decides the route (``core/route.py``), and runs the route
(:func:`run`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core import backend
from logitless.core.arguments import (
    Bound,
    bind,
    bind_top_k,
    by_name,
    distillation_calls,
    reference_call,
    with_reference,
)
from logitless.core.backend import Ranking
from logitless.core.divergences import Divergence
from logitless.core.options import Arguments, Head, Options
from logitless.core.problem import Loss, flat_tokens
from logitless.core.promotion import own_promotion
from logitless.core.shapes import Float, Int, PyTree
from logitless.core.stats import TokenStats
from logitless.core.top_k import TopK
from logitless.core.top_teacher import overlap_with
from logitless.core.validation import named_arguments, objective_of
from logitless.mesh.sharding import Sharding
from logitless.objectives.distillation import Distillation
from logitless.objectives.inputs import divided, warn_unused
from logitless.objectives.loss import OF_A_SPARSE_BACKWARD, LossAux, Metric, Metrics, loss_of_stats, metrics_of
from logitless.objectives.objective import Objective


@named_arguments
def logprobs(
    logits: Float[Array, "*tokens V"],
    targets: Int[Array, "*tokens"] | None = None,
    *,
    ids: Int[Array, "*tokens K"] | None = None,
    support: Int[Array, "*tokens K"] | None = None,
    mask: Array | None = None,
    objective: Objective | None = None,
    temperature: Float[Array, "*#tokens"] | float = 1.0,
    softcap: float | None = None,
    scale: float | None = None,
    vocab_size: int | None = None,
    sharding: Sharding | None = None,
    options: Options = Options(),  # noqa: B008  (frozen)
) -> TokenStats:
    """Log-probability of each target, entropy and logsumexp, with their exact gradients.

    ``logits[..., t, :]`` predicts ``targets[..., t]``: for a causal model the targets are the *next* tokens
    (:func:`logitless.next_tokens` shifts them).

    Args:
      logits: any float dtype; statistics are float32.
      targets: token ids. A live id outside ``[0, V)`` gives NaN statistics; ``Options(validate=True)`` finds it.
        Optional with ``ids``: ``logp`` is then for id 0.
      ids, support: further ids per token, as for :func:`linear_logprobs`.
      mask: bool, or 0 and 1 (other numbers are refused; traced numbers count as 1 unless 0); masked tokens have zero
        statistics and no gradient.
      objective: source of the temperature, to match the loss.
      temperature: a number, or one per token; divides the logits after scale and softcap.
      softcap: ``softcap * tanh(x / softcap)`` before the temperature.
      scale: factor of the raw logits.
      vocab_size: number of real columns; later columns are padding, without probability and gradient.
      sharding: how the arrays lie on a mesh of several devices (docs/sharding.md).
      options: :class:`logitless.Options` for the call.

    >>> import jax.numpy as jnp, logitless
    >>> stats = logitless.logprobs(jnp.zeros((1, 2, 4)), jnp.array([[0, 3]]))
    >>> [round(float(x), 4) for x in stats.logp[0]]
    [-1.3863, -1.3863]
    """
    return run("logprobs", locals())


@named_arguments
def grpo_loss(
    logits: Float[Array, "B T V"],
    targets: Int[Array, "B T"],
    *,
    advantages: Float[Array, "B"] | Float[Array, "B 1"] | Float[Array, "B T"],
    mask: Array | None = None,
    support: Int[Array, "B T K"] | None = None,
    old_logp: Float[Array, "B T"] | None = None,
    ref_logp: Float[Array, "B T"] | None = None,
    rollout_logp: Float[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    token_weights: Float[Array, "B"] | Float[Array, "B 1"] | Float[Array, "B T"] | None = None,
    objective: Objective = Objective(),  # noqa: B008  (frozen)
    denominator: Array | float | None = None,
    entropy_denominator: Array | float | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    vocab_size: int | None = None,
    sharding: Sharding | None = None,
    options: Options = Options(),  # noqa: B008  (frozen)
) -> tuple[Array, Metrics]:
    """A GRPO-family loss over logits, differentiable with respect to them: ``(loss, metrics)``.

    ``logits[b, t]`` predicts ``targets[b, t]``: for a causal model the targets are the *next* tokens
    (:func:`logitless.next_tokens` shifts them). The arrays of the loss are constants: no gradient flows into
    them. One that the objective does not read is warned about (:class:`logitless.UnusedArgumentWarning`).

    Args:
      logits, targets, mask: as for :func:`logprobs`; ``mask`` is 1 on completion tokens.
      advantages: one per sequence or per token (:func:`logitless.group_advantages`).
      support: ids to restrict each token's softmax to, as for :func:`linear_logprobs`; ``old_logp`` and
        ``rollout_logp`` must use the same ids.
      old_logp: log-probabilities before the update; without them the ratio is exactly 1.
      ref_logp: the reference policy's, for a KL term (``objective.beta``); without a KL term only metrics read it.
      rollout_logp: the sampler's, for the train/rollout correction (``objective.correction``).
      segment_ids: sequences of packed rows.
      token_weights: factors for the policy loss per token or sequence, such as given importance ratios.
      objective: the loss and its numbers; its temperature divides the logits.
      denominator, entropy_denominator: counts of a larger batch that contains this batch.
      softcap, scale, vocab_size, sharding, options: as for :func:`logprobs`.

    Returns:
      ``(loss, metrics)``. Metrics are ``(sum, count)`` pairs (clip fractions, ratio, KL, entropy and others, listed
      in docs/losses.md); :func:`logitless.metric_values` makes numbers.

    >>> import jax, jax.numpy as jnp, logitless
    >>> logits, targets = jnp.zeros((1, 2, 4)), jnp.array([[0, 3]])
    >>> loss, metrics = logitless.grpo_loss(logits, targets, advantages=jnp.array([1.0]))
    >>> float(loss), logitless.metric_values(metrics)["ratio"]
    (-1.0, 1.0)
    """
    return run("grpo_loss", locals())


@named_arguments
def linear_logprobs(
    hidden: Float[Array, "*tokens H"],
    lm_head: Head | Float[Array, "V H"] | Float[Array, "H V"],
    targets: Int[Array, "*tokens"] | None = None,
    *,
    ids: Int[Array, "*tokens K"] | None = None,
    support: Int[Array, "*tokens K"] | None = None,
    mask: Array | None = None,
    objective: Objective | None = None,
    temperature: Float[Array, "*#tokens"] | float = 1.0,
    sharding: Sharding | None = None,
    options: Options = Options(),  # noqa: B008  (frozen)
) -> TokenStats:
    """Log-probability of each target, entropy and logsumexp, from hidden states, without ``[B, T, V]`` logits.

    Differentiable with respect to ``hidden`` and the arrays of the head; a gradient that is not asked for costs
    nothing. Without any gradient it is one matmul. ``hidden[..., t, :]`` predicts ``targets[..., t]``: for a
    causal model the targets are the *next* tokens (:func:`logitless.next_tokens` shifts them).

    Args:
      hidden: final hidden states, bfloat16, float16 or float32.
      lm_head: ``[V, H]`` (a tied embedding) or ``[H, V]``, of the dtype of ``hidden``; neither is copied. A head with
        bias, LoRA, scale, softcap or padded columns is a :class:`logitless.Head`.
      targets: token ids. A live id outside ``[0, V)`` gives NaN statistics; ``Options(validate=True)`` finds it.
        Optional with ``ids``: ``logp`` is then for id 0.
      ids: further ids per token, -1 for none: adds ``selected.logp [..., K]``, the total ``mass`` and ``log_rest``, the
        log of the remaining mass, all differentiable, from the same matmul.
      support: ids to restrict a token's softmax to, padded with -1, such as the ids kept by top-p or top-k sampling;
        all statistics follow that softmax. A row of -1 has the whole vocabulary. A live target outside its support
        gives NaN; ``Options(validate=True)`` finds it.
      mask: bool, or 0 and 1 (other numbers are refused; traced numbers count as 1 unless 0); masked tokens have zero
        statistics, no gradient and no cost.
      objective: source of the temperature, to match the loss.
      temperature: a number, or one per token; divides the logits after scale and softcap.
      sharding: how the arrays lie on a mesh of several devices (docs/sharding.md).
      options: :class:`logitless.Options` for the call.

    >>> import jax.numpy as jnp, logitless
    >>> h, w = jnp.ones((1, 2, 3)), jnp.zeros((4, 3))
    >>> stats = logitless.linear_logprobs(h, w, jnp.array([[0, 3]]))
    >>> [round(float(x), 4) for x in stats.entropy[0]]
    [1.3863, 1.3863]
    """
    return run("linear_logprobs", locals())


@named_arguments
def linear_top_k(
    hidden: Float[Array, "*tokens H"],
    lm_head: Head | Float[Array, "V H"] | Float[Array, "H V"],
    k: int,
    *,
    mask: Array | None = None,
    temperature: Float[Array, "*#tokens"] | float = 1.0,
    options: Options = Options(),  # noqa: B008  (frozen)
) -> TopK:
    """The ``k`` likeliest ids of each token with their log-probabilities, from hidden states, without ``[B, T, V]``
    logits: one matmul. A constant: no gradient flows through it.

    Args:
      hidden, lm_head, mask, temperature, options: as for :func:`linear_logprobs`; ``Options.backend`` is
        ``reference`` or ``chunked``.
      k: a Python int, up to the size of the vocabulary.

    Returns:
      :class:`logitless.TopK`: ``ids`` and ``logp [..., k]`` in order, equal logits by the smaller id; ``lse``, and
      ``log_rest``, the log of the mass of all other ids. Pass the ids to :func:`linear_logprobs` as ``ids``.

    >>> import jax.numpy as jnp, logitless
    >>> top = logitless.linear_top_k(jnp.ones((1, 2, 3)), jnp.eye(4, 3), 2)
    >>> top.ids[0].tolist(), [round(float(x), 4) for x in top.log_rest[0]]
    ([[0, 1], [0, 1]], [-0.901, -0.901])
    """
    given = locals() | dict(targets=None, objective=None, sharding=None)
    return top_k(bind_top_k("linear_top_k", by_name("linear_top_k", given)))


@named_arguments
def linear_grpo_loss(
    hidden: Float[Array, "B T H"],
    lm_head: Head | Float[Array, "V H"] | Float[Array, "H V"],
    targets: Int[Array, "B T"],
    *,
    advantages: Float[Array, "B"] | Float[Array, "B 1"] | Float[Array, "B T"],
    mask: Array | None = None,
    support: Int[Array, "B T K"] | None = None,
    old_logp: Float[Array, "B T"] | None = None,
    ref_logp: Float[Array, "B T"] | None = None,
    ref_hidden: Float[Array, "B T H2"] | None = None,
    ref_lm_head: Head | Float[Array, "V H2"] | Float[Array, "H2 V"] | None = None,
    rollout_logp: Float[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    token_weights: Float[Array, "B"] | Float[Array, "B 1"] | Float[Array, "B T"] | None = None,
    objective: Objective = Objective(),  # noqa: B008  (frozen)
    denominator: Array | float | None = None,
    entropy_denominator: Array | float | None = None,
    sharding: Sharding | None = None,
    options: Options = Options(),  # noqa: B008  (frozen)
) -> tuple[Array, Metrics]:
    """A GRPO-family loss from hidden states and the head, without ``[B, T, V]`` logits or dlogits: ``(loss, metrics)``.

    Objectives whose tokens are uncoupled take three matmuls per token that has a gradient (two with a frozen head),
    the others four; on a TPU all take four (two with a frozen head; three with ``Options.memory_budget``), with an
    entropy bonus five. Masked tokens cost nothing. ``hidden[b, t]`` predicts ``targets[b, t]``: for a causal model the
    targets are the *next* tokens (:func:`logitless.next_tokens` shifts them). The arrays of the loss are constants: no
    gradient flows into them. One that the objective does not read is warned about
    (:class:`logitless.UnusedArgumentWarning`).

    Args:
      hidden: final hidden states, bfloat16, float16 or float32.
      lm_head: ``[V, H]`` (a tied embedding) or ``[H, V]``, of the dtype of ``hidden``; neither is copied. A head with
        bias, LoRA, scale, softcap or padded columns is a :class:`logitless.Head`.
      targets: sampled token ids. A live id outside ``[0, V)`` gives a NaN loss; ``Options(validate=True)`` finds it.
      advantages: one per sequence or per token (:func:`logitless.group_advantages`).
      mask: 1 on completion tokens, and bool or 0 and 1, as for :func:`logprobs`; prompts and padding have no loss, no
        gradient and no cost.
      support: ids to restrict each token's softmax to, as for :func:`linear_logprobs`; ``old_logp`` and
        ``rollout_logp`` must use the same ids.
      old_logp: log-probabilities before the update; without them the ratio is exactly 1.
      ref_logp: the reference policy's, for a KL term (``objective.beta``); without a KL term only metrics read it.
      ref_hidden, ref_lm_head: alternative to ``ref_logp``: the reference's log-probabilities are computed inside this
        call (one extra matmul per live token, no gradient). An array is a head with the policy's layout, scale, softcap
        and vocabulary size, without bias and LoRA; a :class:`logitless.Head` has its own.
      rollout_logp: the sampler's, for the train/rollout correction (``objective.correction``).
      segment_ids: sequences of packed rows.
      token_weights: factors for the policy loss per token or sequence, such as given importance ratios.
      objective: the loss and its numbers; its temperature divides the logits.
      denominator, entropy_denominator: counts of a larger batch that contains this batch.
      sharding, options: as for :func:`linear_logprobs`.

    Returns:
      ``(loss, metrics)``. Metrics are ``(sum, count)`` pairs (clip fractions, ratio, KL, entropy, the left-out mass of
      a sparse backward and others, listed in docs/losses.md); :func:`logitless.metric_values` makes numbers.

    >>> import jax, jax.numpy as jnp, logitless
    >>> h, w, y = jnp.ones((1, 2, 3)), jnp.zeros((4, 3)), jnp.array([[0, 3]])
    >>> def loss(h, w):
    ...     return logitless.linear_grpo_loss(h, w, y, advantages=jnp.array([1.0]))[0]
    >>> value, (dh, dw) = jax.value_and_grad(loss, argnums=(0, 1))(h, w)
    >>> float(value), dw.shape
    (-1.0, (4, 3))
    """
    return run("linear_grpo_loss", locals())


@named_arguments
def divergence(
    logits: Float[Array, "*tokens V"],
    teacher_logits: Float[Array, "*tokens V2"],
    *,
    divergence: Divergence = "reverse_kl",
    mix: Array | float | None = None,
    targets: Int[Array, "*tokens"] | None = None,
    mask: Array | None = None,
    temperature: Float[Array, "*#tokens"] | float = 1.0,
    softcap: float | None = None,
    scale: float | None = None,
    vocab_size: int | None = None,
    sharding: Sharding | None = None,
    options: Options = Options(),  # noqa: B008  (frozen)
) -> TokenStats:
    """Divergence per token of the distributions of two arrays of logits, differentiable in the first.

    Args:
      logits: the student's, any float dtype; statistics are float32.
      teacher_logits: the teacher's as its softmax takes them, at temperature 1; a constant. At least as many columns.
      divergence, mix, targets, mask, temperature: as for :func:`linear_divergence`.
      softcap, scale: of the student's logits.
      vocab_size: columns of both at or beyond it are padding: no probability, zero gradient.
      sharding, options: as for :func:`logprobs`.

    Returns:
      As :func:`linear_divergence`.

    >>> import jax.numpy as jnp, logitless
    >>> stats = logitless.divergence(jnp.array([[0.0, 0.0]]), jnp.array([[0.0, 1.0]]), divergence="forward_kl")
    >>> round(float(stats.divergence[0]), 4)
    0.1109
    """
    return run("divergence", locals())


@named_arguments
def linear_divergence(
    hidden: Float[Array, "*tokens H"],
    lm_head: Head | Float[Array, "V H"] | Float[Array, "H V"],
    teacher_hidden: Float[Array, "*tokens H2"],
    teacher_lm_head: Head | Float[Array, "V2 H2"] | Float[Array, "H2 V2"],
    *,
    divergence: Divergence = "reverse_kl",
    mix: Array | float | None = None,
    targets: Int[Array, "*tokens"] | None = None,
    mask: Array | None = None,
    temperature: Float[Array, "*#tokens"] | float = 1.0,
    sharding: Sharding | None = None,
    options: Options = Options(),  # noqa: B008  (frozen)
) -> TokenStats:
    """Divergence per token of a student's and a teacher's distribution over the whole vocabulary, from their hidden
    states, without ``[B, T, V]`` logits of either.

    With ``p`` the student's and ``q`` the teacher's softmax at ``temperature``::

        reverse_kl   KL(p || q)
        forward_kl   KL(q || p)
        jsd          mix KL(q || m) + (1 - mix) KL(p || m),  m = (1 - mix) p + mix q

    Differentiable with respect to ``hidden`` and the arrays of ``lm_head``; the teacher is a constant. Two matmuls per
    live token without a gradient. With one, six: both sides' logits are made again in the backward pass.
    :func:`linear_distillation_loss` takes four.

    Args:
      hidden, lm_head: the student's, as for :func:`linear_logprobs`.
      teacher_hidden: the teacher's final hidden states, of any width.
      teacher_lm_head: its head, an array or a :class:`logitless.Head` with its own bias, LoRA, scale and softcap. The
        teacher needs at least the student's token ids; further ids are left out of the teacher's softmax.
      divergence: one of the three above.
      mix: the teacher's weight in the ``jsd`` mixture; default one half.
      targets: token ids, for ``logp`` from the same pass; without targets ``logp`` is for id 0.
      mask: as for :func:`linear_logprobs`.
      temperature: a number, or one per token; divides both sides' logits.
      sharding, options: as for :func:`linear_logprobs`.

    Returns:
      :class:`logitless.TokenStats` of the student, with ``divergence`` and ``teacher_entropy``. ``divergence``,
      ``entropy``, ``logp`` and ``lse`` have gradients.

    >>> import jax, jax.numpy as jnp, logitless
    >>> h, w = jnp.ones((1, 2, 3)), jnp.zeros((4, 3))
    >>> stats = logitless.linear_divergence(h, w, h, w)
    >>> [float(x) for x in stats.divergence[0]]
    [0.0, 0.0]
    """
    return run("linear_divergence", locals())


@named_arguments
def linear_distillation_loss(
    hidden: Float[Array, "B T H"],
    lm_head: Head | Float[Array, "V H"] | Float[Array, "H V"],
    teacher_hidden: Float[Array, "B T H2"] | None = None,
    teacher_lm_head: Head | Float[Array, "V2 H2"] | Float[Array, "H2 V2"] | None = None,
    targets: Int[Array, "B T"] | None = None,
    *,
    teacher: TopK | None = None,
    mask: Array | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    distillation: Distillation = Distillation(),  # noqa: B008  (frozen)
    denominator: Array | float | None = None,
    sharding: Sharding | None = None,
    options: Options = Options(),  # noqa: B008  (frozen)
) -> tuple[Array, Metrics]:
    """A distillation loss over the whole vocabulary from two models' hidden states, without ``[B, T, V]`` logits of
    either: ``(loss, metrics)``.

    Four matmuls per live token, three with a frozen head. A hard part with a temperature other than one needs a softmax
    in addition: three more matmuls. Masked tokens cost nothing. A ``teacher`` that is given at K
    ids of each token takes four as well.

    Args:
      hidden, lm_head, teacher_hidden, teacher_lm_head: as for :func:`linear_divergence`.
      targets: token ids; needed for a hard part (``distillation.hard_weight``), else only for the metric ``logp``.
      teacher: a teacher's likeliest ids ``[B, T, K]``, -1 for none, with its log-probabilities over the whole
        vocabulary at the temperature of the loss, instead of its hidden states and head: a server's answer, or what
        :func:`linear_top_k` gave. ``distillation.outside`` says what becomes of all other ids; ``teacher.log_rest``
        is their mass to all digits.
      mask, segment_ids, denominator: as for :func:`linear_grpo_loss`.
      distillation: the loss and its numbers; ``Distillation.from_trl`` and its like take other libraries' names.
      sharding, options: as for :func:`linear_logprobs`.

    Returns:
      ``(loss, metrics)``. Metrics are ``(sum, count)`` pairs (``divergence`` at the loss's temperature, ``entropy``,
      ``teacher_entropy``, with targets ``logp`` and ``is_top1``, with a hard part ``hard_loss``, with a ``teacher``
      ``student_mass`` and ``teacher_mass`` of its ids and, with ``distillation.overlap``, their ``overlap`` with the
      student's likeliest, with a sparse backward what it left out of each row's gradient).

    >>> import jax, jax.numpy as jnp, logitless
    >>> h, w, t = jnp.ones((1, 2, 3)), jnp.zeros((4, 3)), jnp.eye(4, 3)
    >>> loss, metrics = logitless.linear_distillation_loss(h, w, h, t)
    >>> round(float(loss), 4), round(logitless.metric_values(metrics)["teacher_entropy"], 4)
    (0.078, 1.3235)
    """
    name, given = "linear_distillation_loss", locals()
    call, apart = distillation_calls(name, given)
    loss, metrics = run(name, call)
    kept = ("entropy", "teacher_entropy", "student_mass", "teacher_mass", "live_token_share", *OF_A_SPARSE_BACKWARD)
    out = {k: metrics[k] for k in kept if k in metrics}
    out["divergence"] = metrics["kl_loss"]
    if distillation.overlap:
        out["overlap"] = _overlap(call)
    if apart is not None:
        more, metrics = run(name, apart)
        loss = loss + more
    if targets is not None:
        out |= {k: metrics[k] for k in ("logp", "is_top1")}
    if distillation.hard_weight is not None:
        out["hard_loss"] = Metric(-metrics["logp"].sum, metrics["logp"].count)
    return loss, out


def _overlap(call: dict[str, Any]) -> Metric:
    """The metric of :attr:`Distillation.overlap`, by a call of its own."""
    teacher, mask, options = (call[k] for k in ("teacher", "mask", "options"))
    ids = jnp.asarray(teacher.ids)
    backend = options.backend if options.backend in ("reference", "chunked") else None
    options = dataclasses.replace(options, backend=backend, sparse_backward="off")
    own = linear_top_k(call["hidden"], call["lm_head"], ids.shape[-1], mask=mask, options=options)
    live = jnp.ones(ids.shape[:-1], bool) if mask is None else jnp.asarray(mask) != 0
    return overlap_with(TopK(ids, jnp.asarray(teacher.logp)), own.ids, live)


@own_promotion
def top_k(b: Bound) -> TopK:
    """What the route's backend finds, in the shape of the tokens."""
    ranking = cast(Ranking, b.route.runs)  # the route takes no other backend for a call with k
    found = ranking.top_k(jax.lax.stop_gradient(b.p))
    return jax.tree.map(lambda x: x.reshape(*b.shape, *x.shape[1:]), found)


# -- running a call --------------------------------------------------------------------------------------------------


@own_promotion
def run(name: str, given: Arguments, with_stats: bool = False) -> PyTree:
    """The public call ``name``; with ``sharding=``, under its mesh. ``with_stats``: of a loss call, ``LossAux``."""
    given = by_name(name, given)
    if "advantages" in given:
        warn_unused(name, objective_of(name, given["objective"]), given)
    if given["sharding"] is None:
        return _bind_and_run(name, given, with_stats)
    from logitless.mesh import ambient

    return ambient.over_mesh(name, lambda arguments: _bind_and_run(name, arguments, with_stats), given, with_stats)


def _bind_and_run(name: str, given: Arguments, with_stats: bool) -> PyTree:
    """The call, after a call without gradients for the log-probabilities of a reference head, if given."""
    reference, given = reference_call(name, given)
    if reference is not None:
        given = with_reference(given, _run(bind(*reference), False).logp)
    return _run(bind(name, given), with_stats)


def _run(b: Bound, with_stats: bool) -> PyTree:
    """What the route says."""
    if b.loss is None:
        stats, _ = _statistics(b)
        return backend.only_three_differentiable(stats)
    if not b.route.in_forward:
        stats, report = _statistics(b)
        top = b.top_teacher
        stats = stats if top is None else top.with_divergence(stats, b.loss.inputs.mask)
        loss, metrics = loss_of_stats(b.loss.objective, stats, b.loss.inputs)
        metrics = metrics if top is None else metrics | top.metrics(stats, b.loss.inputs.mask)
        stats = jax.lax.stop_gradient(stats)
    else:
        on_mesh = b.route.placement is not None
        inputs = dataclasses.replace(b.loss.inputs.for_sweep(), logp_temperature=b.logp_temperature)
        flat = Loss(b.loss.objective, inputs if on_mesh else flat_tokens(inputs, len(b.shape)))
        loss, stats, report = _with_gradient(backend.token_loss)(b.route.runs, b.p, flat)
        stats = _as_read(b, jax.lax.stop_gradient(stats))
        metrics = metrics_of(b.loss.objective, stats, b.loss.inputs)
    if report is not None:
        metrics = metrics | report.metrics(b.p.head.vocab)
    return loss, LossAux(metrics, stats) if with_stats else metrics


def _statistics(b: Bound) -> tuple[TokenStats, Any]:
    """Statistics as the objective reads them, differentiable, and the report of a sparse backward."""
    stats, report = b.route.runs.statistics(b.p) if b.route.dense else _with_gradient(backend.stats)(b.route.runs, b.p)
    return _as_read(b, stats), report


def _as_read(b: Bound, stats: TokenStats) -> TokenStats:
    """Statistics in the shape of the tokens, ``logp`` divided by the temperature of ``temperature_on="logp"``."""
    stats = stats.map(lambda s: s.reshape(*b.shape, *s.shape[stats.lse.ndim :]))
    return dataclasses.replace(stats, logp=divided(stats.logp, b.logp_temperature))


def _with_gradient(f: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """``f``, a custom gradient; jitted inside a ``shard_map``, since JAX runs none in one that is not jitted itself."""
    return jax.jit(f, static_argnums=0) if jax.sharding.get_abstract_mesh().manual_axes else f
