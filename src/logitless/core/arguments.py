"""From a user's arguments to a problem, a loss and a route: every check, before anything compiles.

:func:`bind` serves all four calls. Errors say what was given and what was expected.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from logitless.core import validation
from logitless.core.divergences import DIVERGENCES
from logitless.core.options import HEAD_NAMES, OPTIONS, Arguments, Head, Options, SparseBackward
from logitless.core.problem import Call, Given, HeadArrays, Layout, Linear, Loss, Problem, Source, Teacher
from logitless.core.route import Route, decide
from logitless.core.stats import LogitTransform, TokenStats, transform_of
from logitless.core.top_k import TopK
from logitless.core.top_teacher import TopTeacher
from logitless.objectives.checks import did_you_mean, mixture, shown
from logitless.objectives.distillation import Distillation
from logitless.objectives.inputs import logp_temperature, loss_inputs, statistics_temperature
from logitless.objectives.objective import Objective

_LOSS_ARRAYS = (
    "advantages", "old_logp", "ref_logp", "rollout_logp", "segment_ids", "denominator", "entropy_denominator",
    "token_weights",
)  # fmt: skip
_CHOICES: tuple[tuple[tuple[str, ...], tuple[type, ...], str], ...] = (
    (("backend", "head_layout", "bwd_impl", "head_grad_dtype"), (str,), "a name"),
    (("donate_logits", "validate"), (bool, int, np.bool_), "True or False"),
)
_REFERENCE = ("ref_hidden", "ref_lm_head")


_NO_POLICY = dict.fromkeys(("old_logp", "ref_logp", "rollout_logp", "token_weights", "entropy_denominator"))
"""Arguments of a GRPO loss that a distillation loss does not have."""
_ONE_LEVEL = {
    "hidden": ("bwd_impl", "donate_logits"),
    "logits": ("chunk_size", "memory_budget", "logits_dtype", "head_grad_dtype", "sparse_backward"),
}
"""Options that a call from hidden states, or from logits, does not have."""


def head_by_name(head: Head | Array) -> dict[str, object]:
    """The fields of a head by the names of a call's arguments."""
    whole = head if isinstance(head, Head) else Head(head)
    return {argument: getattr(whole, field) for field, argument in HEAD_NAMES.items()}


def by_name(name: str, given: Arguments) -> Arguments:
    """The arguments of the public call ``name`` with its ``options`` and its ``lm_head`` laid open."""
    if "options" not in given:
        return given  # open already
    options, rest = given["options"], {k: v for k, v in given.items() if k != "options"}
    if not isinstance(options, Options):
        raise TypeError(f"{name}: options is {type(options).__name__}, expected logitless.Options(...).")
    level, other = ("hidden", "logits") if "hidden" in given else ("logits", "hidden")
    for field in _ONE_LEVEL[level]:
        value = getattr(options, field)
        if isinstance(value, jax.Array) or value != OPTIONS[field]:
            what = "hidden states" if other == "hidden" else "logits"
            raise ValueError(f"{name}: Options.{field} is for calls from {what}, not from {level}; leave it out.")
    own = {f: getattr(options, f) for f in OPTIONS if f not in _ONE_LEVEL[level]}
    return rest | own | (head_by_name(given["lm_head"]) if level == "hidden" else {})


@dataclasses.dataclass(frozen=True)
class Bound:
    """A checked call: problem (flat, or over a mesh), loss over ``[B, T]``, and route."""

    p: Any
    loss: Loss | None
    route: Route
    shape: tuple[int, ...]  # of the tokens
    logp_temperature: Array | None  # what divides the statistics' log-probabilities
    top_teacher: TopTeacher | None = None  # known at a few ids; its divergence is taken of the statistics


def bind(name: str, given: Arguments, describe: bool = False) -> Bound:
    """The arguments of the public call ``name``, by their names."""
    is_loss = "advantages" in given
    objective = given.get("objective")
    if objective is not None or is_loss:
        objective = validation.objective_of(name, objective)
        given = dict(given, temperature=_temperature(name, given.get("temperature"), objective))
    for keys, kinds, expected in _CHOICES:
        for key in keys:
            if not isinstance(given.get(key), (*kinds, type(None))):
                raise TypeError(f"{name}: {key} is {shown(given[key])}, expected {expected}.")
    problem = _head_problem if "hidden" in given else _logits_problem
    p = problem(name, given, is_loss)
    p = p.calling(top_k=given.get("k", 0))
    top = None
    if given.get("teacher") is not None:
        top = _top_teacher(name, given, p)
        p = dataclasses.replace(p, ids=top.top.ids)
    elif given.get("divergence") is not None:
        p = dataclasses.replace(p, teacher=_teacher(name, given, p, is_loss))
    if top is None:
        ids, support = _more_ids(name, given, p)
        p = dataclasses.replace(p, ids=ids, support=support)
    shape = p.targets.shape
    divisor = None if objective is None else logp_temperature(name, objective, shape, p.live)
    loss = None
    if is_loss:
        assert objective is not None
        loss = Loss(*loss_inputs(name, objective, shape, given))
        live = None if given["mask"] is None and "hidden" in given else loss.inputs.mask
        p = dataclasses.replace(p, live=live)
    place = None
    if given["sharding"] is not None:
        from logitless.mesh.sharding import resolve

        place = resolve(name, given["sharding"], p)
    route = decide(p, loss, place, describe)
    if p.call.donate and route.runs.kernels is None:
        raise ValueError(
            f"{name}: donate_logits=True is for the kernel backends; {route.backend!r} leaves buffers to XLA."
        )
    return Bound(_placed(p, loss, route), loss, route, shape, divisor, top)


def bind_top_k(name: str, given: Arguments) -> Bound:
    """The arguments of ``linear_top_k``, by their names."""
    k, hidden = given["k"], validation.as_array(name, "hidden", given["hidden"])
    if not isinstance(k, (int, np.integer)) or isinstance(k, bool):
        raise TypeError(f"{name}: k is {shown(k)}, expected a Python int (it is static).")
    b = bind(name, given | dict(k=int(k), targets=jnp.zeros(hidden.shape[:-1], jnp.int32), validate=False))
    if not 0 < k <= b.p.call.vocab_size:
        raise ValueError(f"{name}: k={k}, expected 1 to {b.p.call.vocab_size}, the size of the vocabulary.")
    return b


def _teacher(name: str, given: Arguments, p: Problem[Source], is_loss: bool) -> Teacher:
    """The second distribution of a call, which has to cover the policy's vocabulary."""
    kind, mix, whose = given["divergence"], given["mix"], f"{name}, the teacher"
    if kind not in DIVERGENCES:
        options = ", ".join(map(repr, DIVERGENCES))
        hint = did_you_mean(kind, DIVERGENCES)
        raise ValueError(f"{name}: divergence={shown(kind)} is not known; expected one of {options}.{hint}")
    mixture(name, kind, mix)
    mix = 0.5 if mix is None else validation.scalar(name, "mix", mix)
    own = {k: v for k, v in given.items() if k not in ("divergence", "mix")} | dict(targets=p.targets, mask=None)
    own |= dict(validate=False, sparse_backward="off")
    level, width = ("hidden", "H") if "hidden" in given else ("logits", "V")
    array = validation.as_array(whose, level, given[f"teacher_{level}"])
    if array.shape[:-1] != p.targets.shape:
        tokens = ", ".join(map(str, p.targets.shape))
        raise ValueError(
            f"{whose}: {level} has shape {array.shape}, expected ({tokens}, {width}): the policy's tokens."
        )
    teacher: Problem[Source]
    if level == "hidden":
        own |= dict(head_by_name(given["teacher_lm_head"]), hidden=given["teacher_hidden"])
        teacher, what = _head_problem(whose, own, is_loss), "Head(lm_head, vocab_size={})"
    else:
        own |= dict(logits=given["teacher_logits"], softcap=None, scale=None, vocab_size=None)
        teacher, what = _logits_problem(whose, own, is_loss), "vocab_size={}"
    columns = teacher.call.vocab_size
    if columns < p.call.vocab_size:
        raise ValueError(
            f"{name}: the teacher has {columns} token ids and the policy {p.call.vocab_size}. If the first {columns} "
            f"mean the same, say {what.format(columns)} for the policy: its other columns are then padding."
        )
    source, transform = jax.lax.stop_gradient((teacher.policy, teacher.transform))
    return Teacher(source, transform, jnp.asarray(mix, jnp.float32) if kind == "jsd" else None, kind)


def _more_ids(name: str, given: Arguments, p: Problem[Source]) -> tuple[Array | None, Array | None]:
    """``(ids, support)`` of a call's tokens; at most one is given."""
    asked = {k: given.get(k) for k in ("ids", "support")}
    present = [k for k, v in asked.items() if v is not None]
    if not present:
        return None, None
    if len(present) == 2:
        raise ValueError(f"{name}: ids and support were both given; ask for one after the other.")
    if p.teacher is not None:
        raise NotImplementedError(f"{name}: {present[0]} beside a second distribution is not there yet.")
    (what,) = present
    array = validation.id_array(name, what, asked[what], p.targets.shape)
    if given["validate"]:
        needed = given["targets"] if what == "support" else None
        validation.validate_ids(name, what, asked[what], p.call.vocab_size, given["mask"], needed)
    return (array, None) if what == "ids" else (None, array)


def _top_teacher(name: str, given: Arguments, p: Problem[Source]) -> TopTeacher:
    """A teacher that is given by ids and log-probabilities of each token."""
    top, kind, mix, shape = given["teacher"], given["divergence"], given["mix"], p.targets.shape
    if not isinstance(top, TopK):
        raise TypeError(f"{name}: teacher is {type(top).__name__}, expected logitless.TopK(ids, logp).")
    if any(given.get(k) is not None for k in ("teacher_hidden", "teacher_lm_head")):
        raise ValueError(f"{name}: teacher and teacher_hidden were both given; leave one of them out.")
    ids = validation.id_array(name, "teacher.ids", top.ids, shape)
    logp = validation.token_array(name, "teacher.logp", top.logp, ids.shape, "teacher.ids")
    rest = top.log_rest
    if rest is not None:
        rest = validation.token_array(name, "teacher.log_rest", rest, shape, "teacher.ids without its last dimension")
    if given["validate"]:
        validation.validate_ids(name, "teacher.ids", top.ids, p.call.vocab_size, given["mask"])
    logp, rest = jax.lax.stop_gradient((logp.astype(jnp.float32), None if rest is None else rest.astype(jnp.float32)))
    share = jnp.asarray(0.5 if mix is None else mix, jnp.float32) if kind == "jsd" else None
    return TopTeacher(TopK(ids, logp, None, rest), share, kind, given["outside"])


def distillation_calls(name: str, given: Arguments) -> tuple[Arguments, Arguments | None]:
    """The arguments of a distillation loss, rewritten for a loss call with a divergence, and for a second call if the
    hard part has another temperature."""
    d, targets = given["distillation"], given["targets"]
    if not isinstance(d, Distillation):
        raise TypeError(f"{name}: distillation is {type(d).__name__}, expected logitless.Distillation.")
    if d.hard_weight is not None and targets is None:
        raise ValueError(f"{name}: distillation.hard_weight={shown(d.hard_weight)} needs targets, the token ids.")
    if given["teacher"] is None and (given["teacher_hidden"] is None or given["teacher_lm_head"] is None):
        raise ValueError(f"{name}: give teacher_hidden and teacher_lm_head, or teacher, a logitless.TopK.")
    if given["teacher"] is None and d.outside != "tail":
        raise ValueError(f"{name}: distillation.outside={d.outside!r} is for teacher=, ids and log-probabilities.")
    if d.overlap and (given["teacher"] is None or given["sharding"] is not None):
        raise NotImplementedError(f"{name}: distillation.overlap is for teacher=, ids of each token, on one device.")
    soft, hard = d.objectives()
    weights = jnp.full(jnp.shape(given["hidden"])[:-1], 0.0 if d.hard_weight is None else d.hard_weight, jnp.float32)
    rest = {k: v for k, v in given.items() if k != "distillation"} | _NO_POLICY
    call = rest | dict(objective=soft, divergence=soft.divergence, mix=soft.mix, advantages=weights, outside=d.outside)
    if hard is None:
        return call, None
    apart = {k: v for k, v in rest.items() if not k.startswith("teacher")} | dict(objective=hard, advantages=weights)
    return call | dict(advantages=jnp.zeros_like(weights)), apart


def reference_call(name: str, given: Arguments) -> tuple[tuple[str, Arguments] | None, Arguments]:
    """``(call, given)``: the call of ``linear_logprobs`` that gives the reference's log-probabilities, where a loss was
    given the reference's hidden states and head, as :func:`bind` takes it; and the loss's arguments without them."""
    asked = {k: given.get(k) for k in _REFERENCE}
    rest = {k: v for k, v in given.items() if k not in _REFERENCE}
    if all(v is None for v in asked.values()):
        return None, rest
    for missing in ("ref_hidden", "ref_lm_head"):
        if asked[missing] is None:
            present = ", ".join(k for k, v in asked.items() if v is not None)
            raise ValueError(
                f"{name}: {present} without {missing}: the reference's log-probabilities need both ref_hidden and "
                "ref_lm_head (lm_head itself, if the head is frozen)."
            )
    if given["ref_logp"] is not None:
        raise ValueError(f"{name}: ref_logp and ref_hidden were both given; leave one of them out.")
    o = given["objective"]
    if o.kl == "full" and o.beta is not None:
        head = _reference_head(name, asked["ref_lm_head"], given)
        teacher = dict(teacher_hidden=asked["ref_hidden"], teacher_lm_head=head)
        return None, rest | teacher | dict(divergence=o.divergence, mix=o.mix)
    hidden = validation.float_array(name, "ref_hidden", asked["ref_hidden"])
    hidden, head = jax.lax.stop_gradient((hidden, _reference_head(name, asked["ref_lm_head"], given)))
    call = {**rest, "hidden": hidden, "temperature": 1.0, **head_by_name(head)}
    call |= dict(validate=False, sparse_backward="off", head_grad_dtype="float32")
    return (f"{name}, the reference", {k: v for k, v in call.items() if k not in _LOSS_ARRAYS}), rest


def _reference_head(name: str, head: object, given: Arguments) -> Head:
    """The reference's head; an array has the policy's layout, scale, softcap and vocabulary size."""
    if isinstance(head, Head):
        return head
    weight = validation.float_array(name, "ref_lm_head", head)
    return Head(weight, **{k: given[HEAD_NAMES[k]] for k in ("layout", "scale", "softcap", "vocab_size")})


def with_reference(given: Arguments, logp: Array) -> Arguments:
    """The arguments of a loss with its reference's log-probabilities."""
    return dict(given, ref_logp=jax.lax.stop_gradient(logp))


def _temperature(name: str, given: object, objective: Objective) -> Array | float | None:
    """The temperature that divides the logits: the objective's, which a second one must not contradict."""
    if given is not None and not (isinstance(given, (int, float)) and given == 1):
        raise ValueError(
            f"{name}: temperature and objective were both given; the objective has a temperature of its own "
            "(Objective(temperature=...)), leave temperature out."
        )
    return statistics_temperature(objective)


def _placed(p: Problem[Source], loss: Loss | None, route: Route) -> Problem[Source]:
    """The problem as the route's backend takes it: with the route's choices, flat unless it runs over a mesh."""
    p = dataclasses.replace(p, call=route.static)
    if route.placement is not None and not route.dense:
        return p
    if route.placement is not None:  # dense: the compiler partitions it, from where the arrays are
        from logitless.mesh.over_mesh import placed

        p = placed(route.placement, p)
    else:
        p = _on_one_device(p, loss, route)
    return p.flat(p.targets.ndim)


def _on_one_device(p: Any, loss: Loss | None, route: Route) -> Problem[Source]:
    """``p`` as it is. Raises, now or when the program is lowered, where a kernel would run whole on every device."""
    linear = isinstance(p.policy, Linear)
    arrays = (("hidden", p.h), ("lm_head", p.head.weight)) if linear else (("logits", p.logits),)
    explicit = any(any(getattr(getattr(jax.typeof(x), "sharding", None), "spec", ())) for _, x in arrays)
    if route.runs.kernels is None and not explicit and jax.sharding.get_abstract_mesh().empty:
        return p
    from logitless.mesh import ambient

    rest = [("targets", p.targets), ("mask", p.live)]
    rest += [] if loss is None else [("the loss's arrays", x) for x in jax.tree.leaves(loss.inputs)]
    ambient.refuse_replication(p.call.name, route.runs, [*arrays, *(x for x in rest if x[1] is not None)])
    return dataclasses.replace(p, targets=ambient.on_one_device(p.call.name, route.runs, p.targets))


# -- problems --------------------------------------------------------------------------------------------------------


def _token_shape(name: str, what: str, x: Array, width: str, is_loss: bool) -> tuple[int, ...]:
    """The token dimensions of ``x [*tokens, width]``."""
    if x.ndim < 2 or (is_loss and x.ndim != 3):
        expected = f"[B, T, {width}]" if is_loss else f"[..., {width}] with at least one token dimension"
        raise ValueError(f"{name}: {what} has shape {x.shape}, expected {expected}.")
    validation.not_empty(name, what, x)
    return x.shape[:-1]


def _transform(name: str, given: Arguments, shape: tuple[int, ...]) -> LogitTransform:
    temperature = validation.scalar_or_per_token(name, "temperature", given.get("temperature"), shape)
    softcap, scale = (validation.scalar(name, k, given[k]) for k in ("softcap", "scale"))
    return transform_of(temperature, softcap, scale)


def _targets(name: str, given: Arguments, shape: tuple[int, ...], shape_of: str) -> Array:
    """The target ids; zeros where a call that can do without them has none."""
    if given["targets"] is None and (given.get("divergence") is not None or given.get("ids") is not None):
        return jnp.zeros(shape, jnp.int32)
    return validation.target_array(name, given["targets"], shape, shape_of)


def _columns(name: str, given: Arguments, width: int, of: str) -> int:
    """The number of real columns; the targets are checked against it, if asked for."""
    columns = validation.vocabulary(name, given["vocab_size"], width, of)
    if given["validate"] and given["targets"] is not None:
        validation.validate_targets(given["targets"], columns, given["mask"])
    return columns


def _asked(given: Arguments) -> Arguments:
    """Options that a :class:`Call` has by the same names, as far as the call's level has them."""
    return {k: given[k] for k in ("backend", "chunk_size", "memory_budget", "interpret") if k in given}


def _head_problem(name: str, given: Arguments, is_loss: bool) -> Problem:
    hidden = validation.float_array(name, "hidden", given["hidden"])
    weight = validation.float_array(name, "lm_head", given["lm_head"])
    shape = _token_shape(name, "hidden", hidden, "H", is_loss)
    layout = layout_of(name, weight.shape, hidden.shape[-1], given["head_layout"])
    validation.not_empty(name, "lm_head", weight)
    if weight.dtype != hidden.dtype:
        raise TypeError(
            f"{name}: hidden is {hidden.dtype} and lm_head {weight.dtype}; cast one of them, so that it is you who "
            "decides in which precision the head's matmul runs."
        )
    targets = _targets(name, given, shape, "hidden without its last dimension")
    live = validation.mask_array(name, given["mask"], shape)
    head = HeadArrays(weight, None, *_lora(name, given["lora"], given["lora_scale"], weight), layout=layout)
    if given["bias"] is not None:
        bias = validation.float_array(name, "bias", given["bias"])
        validation.same_shape(name, "bias", bias, (head.vocab,), "the vocabulary")
        head = dataclasses.replace(head, bias=bias)
    columns = _columns(name, given, head.vocab, "lm_head")
    transform = _transform(name, given, shape)
    if given["head_grad_dtype"] not in ("float32", "param"):
        raise ValueError(f"{name}: head_grad_dtype={shown(given['head_grad_dtype'])}, expected 'float32' or 'param'.")
    tolerance, mass = tolerance_of(name, given["sparse_backward"], hidden.dtype)
    dtype, sum_in = logits_dtype_of(name, given["logits_dtype"]), given["head_grad_dtype"]
    call = Call(name, columns, mass=mass, logits_dtype=dtype, sum_head_grad_in=sum_in, **_asked(given))
    return Problem(Linear(hidden, head), targets, transform, live, tolerance, call=call)


def _logits_problem(name: str, given: Arguments, is_loss: bool) -> Problem[Given]:
    logits = validation.float_array(name, "logits", given["logits"])
    shape = _token_shape(name, "logits", logits, "V", is_loss)
    targets = _targets(name, given, shape, "logits without the vocabulary")
    live = validation.mask_array(name, given["mask"], shape)
    columns = _columns(name, given, logits.shape[-1], "logits")
    transform = _transform(name, given, shape)
    if given["bwd_impl"] not in ("pallas", "jax"):
        raise ValueError(f"{name}: bwd_impl={shown(given['bwd_impl'])}, expected 'pallas' or 'jax'.")
    call = Call(name, columns, donate=given["donate_logits"], bwd_impl=given["bwd_impl"], **_asked(given))
    return Problem(Given(logits), targets, transform, live, call=call)


# -- single arguments ------------------------------------------------------------------------------------------------


def tolerance_of(name: str, given: SparseBackward, dtype: DTypeLike) -> tuple[Array | None, float | None]:
    """``(tolerance, mass)``: what a row may leave out, as an array and as a number (NaN if it is traced); ``None`` for
    an exact backward pass."""
    expected = "expected 'off', 'auto' or a probability mass between 0 and 1, such as 2**-8"
    if isinstance(given, str):
        if given not in ("off", "auto"):
            raise ValueError(f"{name}: sparse_backward={shown(given)}, {expected}.")
        if given == "off":
            return None, None
        from logitless.head.sparse.active_columns import auto_tolerance

        given = auto_tolerance(dtype)
    if isinstance(given, (bool, dict, list, tuple, TokenStats, type(None))) or jnp.ndim(given) != 0:
        raise TypeError(f"{name}: sparse_backward is {type(given).__name__}, {expected}.")
    mass = math.nan if isinstance(given, jax.core.Tracer) else float(given)  # always the same NaN: it is compared
    if not isinstance(given, jax.core.Tracer) and not 0 < mass < 1:
        raise ValueError(f"{name}: sparse_backward={mass}, {expected}.")
    return jnp.asarray(given, jnp.float32), mass


def layout_of(name: str, shape: tuple[int, ...], width: int, given: str | None) -> Layout:
    """Which dimension of the head is the vocabulary."""
    if given is not None and given not in ("vh", "hv"):
        raise ValueError(f"{name}: Head.layout={shown(given)}, expected 'vh' ([V, H]) or 'hv' ([H, V]).")
    if len(shape) != 2:
        raise ValueError(f"{name}: lm_head has shape {shape}, expected [V, H] or [H, V].")
    sides: tuple[tuple[Layout, int], ...] = ("vh", 1), ("hv", 0)
    fits = [k for k, d in sides if shape[d] == width]
    if not fits or (given is not None and given not in fits):
        raise ValueError(
            f"{name}: lm_head has shape {shape}{'' if given is None else f' with Head.layout={given!r}'}, which does "
            f"not match hidden's width H = {width}; expected [V, {width}] ('vh') or [{width}, V] ('hv')."
        )
    if given is None and len(fits) == 2:
        raise ValueError(
            f"{name}: lm_head has shape {shape} and hidden's width is {width}: both layouts fit. "
            "Say logitless.Head(lm_head, layout='vh') ([V, H]) or layout='hv' ([H, V])."
        )
    if given is None and fits == ["hv"] and shape[1] < width:
        raise ValueError(
            f"{name}: lm_head has shape {shape} and hidden's width is {width}, which is a vocabulary of {shape[1]} and "
            "fewer columns than hidden states have. Is hidden the logits? They go into grpo_loss or logprobs, which "
            "take no lm_head. If they are hidden states, say logitless.Head(lm_head, layout='hv')."
        )
    return next(k for k in fits if given in (None, k))


def _lora(name: str, lora: object, scale: object, weight: Array) -> tuple[Array | None, Array | None, Array | float]:
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


def logits_dtype_of(name: str, given: Any) -> jnp.dtype:
    """The dtype that the head's logits are rounded to."""
    try:
        dtype = None if getattr(given, "shape", None) else jnp.dtype(given)
    except (TypeError, ValueError):
        dtype = None
    if dtype not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(f"{name}: logits_dtype={shown(given)}, expected 'float32' or 'bfloat16'.")
    return dtype
