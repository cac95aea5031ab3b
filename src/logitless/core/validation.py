"""Checks of user input, all before anything is traced or compiled: what came, what was expected, what to do."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from logitless.core.pytree import register
from logitless.core.stats import TokenStats
from logitless.objectives.checks import argument_hint, shown, whole_objective
from logitless.objectives.objective import Objective
from logitless.objectives.presets import PRESETS

_COMPUTED_IN = (jnp.bfloat16, jnp.float16, jnp.float32)
_INT32 = np.iinfo(np.int32)
P = ParamSpec("P")
R = TypeVar("R")


def named_arguments(call: Callable[P, R]) -> Callable[P, R]:
    """The public function ``call``, which answers wrong, surplus and missing arguments with the names it knows."""
    signature = inspect.signature(call)

    @functools.wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_arguments(call.__name__, signature, args, kwargs)
        return call(*args, **kwargs)

    return checked


def check_arguments(
    call: str, signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object], partial: bool = False
) -> None:
    """Raise ``TypeError`` for arguments that ``signature`` does not bind; ``partial``: some may be missing."""
    parameters = signature.parameters
    for name in kwargs:
        if name not in parameters:
            hint, options = argument_hint(name, tuple(parameters)), f" Arguments: {', '.join(parameters)}."
            raise TypeError(f"{call}: there is no argument {name!r}.{hint or options}")
    ordered = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(ordered):
        raise TypeError(
            f"{call}: {len(args)} arguments came by position, expected at most {len(ordered)} "
            f"({', '.join(ordered)}); give the others by name."
        )
    for name in ordered[: len(args)]:
        if name in kwargs:
            raise TypeError(f"{call}: {name} came twice, by position and by name.")
    known = {*ordered[: len(args)], *kwargs}
    missing = [p for p in parameters.values() if p.default is p.empty and p.name not in known]
    if missing and not partial:
        wanted = "; ".join(f"{p.name}, {p.annotation}" for p in missing)
        raise TypeError(f"{call}: missing {wanted}.")


def as_array(call: str, name: str, value: object) -> Array:
    """``value`` as a JAX array; anything that is not array-like is refused by name."""
    if isinstance(value, TokenStats):
        raise TypeError(f"{call}: {name} is TokenStats, expected an array; pass its .logp.")
    if value is None or isinstance(value, (str, dict)):
        raise TypeError(f"{call}: {name} is {type(value).__name__}, expected an array.")
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        # JAX prints the whole value: only what it says of nested lists is short and helps.
        why = f" ({error})" if isinstance(value, (list, tuple)) and len(str(error)) <= 200 else ""
        raise TypeError(f"{call}: {name} is {type(value).__name__}, expected an array{why}.") from None


def float_array(call: str, name: str, value: object) -> Array:
    """An array of a float dtype."""
    array = as_array(call, name, value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{call}: {name} has dtype {array.dtype}, expected a float dtype (bfloat16, float16, float32).")
    if array.dtype not in _COMPUTED_IN:
        raise TypeError(
            f"{call}: {name} is {array.dtype}, which no backend computes in; cast it to float32 or bfloat16."
        )
    return array


def floats(call: str, name: str, value: object) -> Array:
    """Numbers of the loss, in a float dtype of 16 bits or more."""
    array = as_array(call, name, value)
    float_dtype(call, name, array.dtype)
    return array


def float_dtype(call: str, name: str, dtype: DTypeLike) -> None:
    """``dtype`` is a float dtype of 16 bits or more."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{call}: {name} has dtype {dtype}, expected a float dtype.")
    if jnp.finfo(dtype).bits < 16:
        raise TypeError(f"{call}: {name} is {dtype}, too coarse for the numbers of a loss; give it as float32.")


def token_array(call: str, name: str, value: object, shape: tuple[int, ...], shape_of: str) -> Array:
    """A float array with one value per token."""
    array = floats(call, name, value)
    same_shape(call, name, array, shape, shape_of)
    return array


def same_shape(call: str, name: str, array: Array, shape: tuple[int, ...], shape_of: str) -> None:
    """``array`` has the shape ``shape``, that of ``shape_of``."""
    if array.shape != shape:
        raise ValueError(f"{call}: {name} has shape {array.shape}, expected {shape}, the shape of {shape_of}.")


def target_array(call: str, targets: object, shape: tuple[int, ...], shape_of: str) -> Array:
    """Integer targets of the given shape, as int32."""
    array = int32_ids(call, "targets", targets)
    same_shape(call, "targets", array, shape, shape_of)
    return array


def id_array(call: str, name: str, value: object, shape: tuple[int, ...]) -> Array:
    """Ids ``[*tokens, K]`` of each token as int32; -1 is none, and one outside int32 becomes -2, which is invalid."""
    array = int32_ids(call, name, value, unknown=-2)
    if array.ndim != len(shape) + 1 or array.shape[:-1] != shape:
        expected = ", ".join((*map(str, shape), "K"))
        raise ValueError(
            f"{call}: {name} has shape {array.shape}, expected ({expected}): K ids for each token, -1 where there are "
            "fewer."
        )
    not_empty(call, name, array)
    return array


def validate_ids(call: str, name: str, ids: object, vocab_size: int, mask: object, targets: object = None) -> None:
    """Raise ``ValueError`` if a live token has an id that names no column, or a target outside its ids; on the host."""
    if any(isinstance(x, jax.core.Tracer) for x in (ids, mask, targets)):
        raise TypeError(f"{call}: validate=True got traced {name}; validate outside jit, where the ids are known.")
    given = np.asarray(ids)
    live = np.ones(given.shape[:-1], bool) if mask is None else np.asarray(mask) != 0
    bad = np.argwhere(live[..., None] & ((given < -1) | (given >= vocab_size)))
    if bad.size:
        where = tuple(int(i) for i in bad[0])
        raise ValueError(
            f"{call}: {name} has {int(given[where])} at {where}, expected ids in [0, {vocab_size}) and -1 for none."
        )
    if targets is None:
        return
    y = np.asarray(targets)
    outside = np.argwhere(live & (given != y[..., None]).all(-1) & (given != -1).any(-1))
    if outside.size:
        where = tuple(int(i) for i in outside[0])
        raise ValueError(
            f"{call}: the target {int(y[where])} at {where} is not in its {name}, where it has no probability "
            f"({len(outside)} such tokens). Mask it out, or leave its row of {name} at -1: the whole vocabulary."
        )


def int32_ids(call: str, name: str, value: object, unknown: int = -1) -> Array:
    """Token ids of any integer dtype as int32. An id outside int32 becomes ``unknown``: it names no column, and
    conversion alone would wrap it around to a valid id."""
    if isinstance(value, (np.ndarray, np.generic)) and np.issubdtype(value.dtype, np.integer):
        return jnp.asarray(host_int32_ids(np.asarray(value), unknown))
    array = as_array(call, name, value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{call}: {name} has dtype {array.dtype}, expected an integer dtype (token ids).")
    ids = array.astype(jnp.int32)
    if array.dtype in (jnp.uint32, jnp.uint64, jnp.int64):
        wide = array > _INT32.max
        if array.dtype == jnp.int64:
            wide |= array < _INT32.min
        ids = jnp.where(wide, jnp.int32(unknown), ids)
    return ids


def host_int32_ids(ids: np.ndarray, unknown: int = -1) -> np.ndarray:
    """:func:`int32_ids` of a NumPy array, on the host."""
    if np.can_cast(ids.dtype, np.int32):
        return ids.astype(np.int32, copy=False)
    return np.where((ids < _INT32.min) | (ids > _INT32.max), np.int32(unknown), ids.astype(np.int32))


def segment_array(call: str, segment_ids: object, shape: tuple[int, ...]) -> Array:
    """Segment ids with the targets' shape; equality of ids is preserved for all 64 bits."""
    if isinstance(segment_ids, np.ndarray) and segment_ids.dtype in (np.int64, np.uint64) and segment_ids.size:
        if segment_ids.min() < _INT32.min or segment_ids.max() > _INT32.max:  # JAX would drop an id's upper half
            segment_ids = np.unique(segment_ids, return_inverse=True)[1].reshape(segment_ids.shape)
        segment_ids = segment_ids.astype(np.int32)
    array = as_array(call, "segment_ids", segment_ids)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{call}: segment_ids has dtype {array.dtype}, expected an integer dtype.")
    same_shape(call, "segment_ids", array, shape, "targets")
    return array


def mask_array(call: str, mask: object, shape: tuple[int, ...]) -> Array | None:
    """A mask as bool; of numbers, those that can be seen are 0 or 1 (:func:`zero_or_one`)."""
    if mask is None:
        return None
    array = as_array(call, "mask", mask)
    same_shape(call, "mask", array, shape, "targets")
    return zero_or_one(call, mask, array)


def zero_or_one(call: str, mask: Any, array: Array) -> Array:
    """``array``, which is ``mask`` in JAX, as bool; values other than 0 and 1 are refused where they can be seen.

    Seen are NumPy arrays, lists, and JAX arrays outside of ``jit``: these are read on the host, unless they are bool.
    What ``jit`` traces cannot be seen; there every number but 0 counts as 1.
    """
    if array.dtype == jnp.bool_:
        return array
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{call}: mask has dtype {array.dtype}, expected bool, or numbers that are 0 or 1.")
    on_device = isinstance(mask, jax.Array)
    if not on_device or (not isinstance(mask, jax.core.Tracer) and mask.is_fully_addressable):
        _refuse_fractions(call, np.asarray(mask))
    return array != 0


def _refuse_fractions(call: str, mask: np.ndarray) -> None:
    other = np.argwhere((mask != 0) & (mask != 1))
    if len(other):
        where = tuple(int(i) for i in other[0])
        raise ValueError(
            f"{call}: mask is {mask[where]} at {where}, expected 0 or 1: it says which tokens count, and not how much. "
            "Weights of tokens are token_weights= of the losses."
        )


def not_empty(call: str, name: str, array: Array) -> None:
    """No dimension is zero."""
    if array.size == 0:
        raise ValueError(
            f"{call}: {name} has shape {array.shape}, expected no dimension of zero: an empty batch has no loss. "
            "Skip the call."
        )


def scalar_or_per_token(call: str, name: str, value: Any, shape: tuple[int, ...], *, positive: bool = True) -> Any:
    """A number (above zero, unless ``positive`` is false), a scalar array, or one value per token."""
    if value is None:
        return None
    if isinstance(value, (str, bool)):
        raise TypeError(f"{call}: {name} is {shown(value)}, expected a number or an array.")
    array = as_array(call, name, value)
    if array.dtype == jnp.bool_ or jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{call}: {name} has dtype {array.dtype}, expected real numbers.")
    if array.ndim != 0 and array.shape != shape:
        raise ValueError(f"{call}: {name} has shape {array.shape}, expected a scalar or one value per token, {shape}.")
    known = isinstance(value, (int, float, np.generic, np.ndarray)) and array.ndim == 0
    if positive and known and not value > 0:
        raise ValueError(f"{call}: {name}={value}, expected a number > 0.")
    return value if isinstance(value, (int, float)) else array


def scalar(call: str, name: str, value: object, *, positive: bool = True) -> Any:
    """A number (above zero, unless ``positive`` is false) or a scalar array, or ``None``."""
    if value is not None and not isinstance(value, str) and (shape := as_array(call, name, value).shape):
        raise ValueError(f"{call}: {name} has shape {shape}, expected a scalar.")
    return scalar_or_per_token(call, name, value, (), positive=positive)


def vocabulary(call: str, vocab_size: int | None, width: int, of: str) -> int:
    """The number of real columns."""
    if vocab_size is None:
        return width
    if not isinstance(vocab_size, (int, np.integer)) or isinstance(vocab_size, bool):
        raise TypeError(f"{call}: vocab_size is {type(vocab_size).__name__}, expected a Python int (it is static).")
    if not 0 < vocab_size <= width:
        raise ValueError(f"{call}: vocab_size={vocab_size}, expected 1 to {width}, the vocabulary dimension of {of}.")
    return int(vocab_size)


def objective_of(call: str, objective: object) -> Objective:
    """An Objective; a preset's name is a common slip."""
    if isinstance(objective, str):
        raise TypeError(f"{call}: objective={shown(objective)} is a string; {whole_objective(objective, PRESETS)}.")
    if not isinstance(objective, Objective):
        raise TypeError(f"{call}: objective is {type(objective).__name__}, expected logitless.Objective.")
    for field in dataclasses.fields(objective):
        # Checked here and not when it is made: a batch of objectives is what jax.vmap takes.
        value = getattr(objective, field.name)
        if not field.metadata.get("static") and field.name != "temperature" and value is not None and jnp.ndim(value):
            raise ValueError(f"{call}: objective.{field.name} has shape {jnp.shape(value)}, expected a scalar.")
    return objective


@register
@dataclasses.dataclass(frozen=True)
class LossArrays:
    """The arrays of a loss call, checked, by the names that users give them."""

    advantages: Array
    old_logp: Array | None = None
    ref_logp: Array | None = None
    rollout_logp: Array | None = None
    segment_ids: Array | None = None
    denominator: Array | float | None = None
    entropy_denominator: Array | float | None = None
    token_weights: Array | None = None


def loss_arrays(call: str, objective: Objective, shape: tuple[int, ...], given: Mapping[str, Any]) -> LossArrays:
    """The arrays of a loss call, by their names among ``given``, checked against the objective and the token shape
    ``[B, T]``."""
    rows = shape[0]
    a, segment_ids, token_weights = map(given.get, ("advantages", "segment_ids", "token_weights"))
    a = floats(call, "advantages", a)
    if a.shape not in ((rows,), (rows, 1), shape):
        raise ValueError(
            f"{call}: advantages has shape {a.shape}, expected [B] = ({rows},), [B, 1] = ({rows}, 1) or [B, T] = "
            f"{shape}."
        )
    if a.shape != shape:
        a = a.reshape(rows)
    if segment_ids is not None:
        segment_ids = segment_array(call, segment_ids, shape)
        if a.ndim == 1:
            raise ValueError(
                f"{call}: advantages has shape {a.shape}, but with segment_ids a row holds several sequences; "
                f"give one advantage per token, {shape}."
            )
    arrays = {
        name: None if given.get(name) is None else token_array(call, name, given[name], shape, "targets")
        for name in ("old_logp", "ref_logp", "rollout_logp")
    }
    beta = 0.0 if objective.beta is None or isinstance(objective.beta, jax.core.Tracer) else float(objective.beta)
    if objective.kl == "full" and objective.beta is not None and given.get("divergence") is None:
        raise ValueError(
            f"{call}: objective.kl='full' is a divergence over the whole vocabulary: linear_grpo_loss takes it, with "
            "ref_hidden and ref_lm_head; policy_loss takes it in stats of logitless.divergence or linear_divergence."
        )
    if arrays["ref_logp"] is None and beta != 0 and objective.kl != "full":
        raise ValueError(
            f"{call}: objective.beta={beta} asks for a KL term but ref_logp is missing; "
            "give the reference policy's log-probabilities, or beta=None."
        )
    if objective.correction is not None and arrays["rollout_logp"] is None:
        raise ValueError(
            f"{call}: objective.correction={objective.correction!r} needs rollout_logp, the sampler's logp."
        )
    if objective.sequence_error_max is not None and arrays["rollout_logp"] is None:
        raise ValueError(f"{call}: objective.sequence_error_max needs rollout_logp, the sampler's logp.")
    if token_weights is not None:
        token_weights = floats(call, "token_weights", token_weights)
        expected = (shape,) if segment_ids is not None else (shape, (rows, 1), (rows,))
        if token_weights.shape not in expected:
            one_a_row = "" if segment_ids is not None else f", [B, 1] = ({rows}, 1) or [B] = ({rows},)"
            raise ValueError(
                f"{call}: token_weights has shape {token_weights.shape}, expected [B, T] = {shape}{one_a_row}."
            )
    counts = {name: given.get(name) for name in ("denominator", "entropy_denominator")}
    for name, value in counts.items():
        scalar(call, name, value)
    return LossArrays(a, **arrays, **counts, segment_ids=segment_ids, token_weights=token_weights)


def validate_targets(targets: object, vocab_size: int, mask: object = None) -> None:
    """Raise ``ValueError`` if a live target lies outside ``[0, vocab_size)``; runs on the host.

    Inside ``jit``, where a program cannot raise, such a token has NaN statistics and the loss is NaN.

    >>> import numpy as np
    >>> from logitless import validate_targets
    >>> validate_targets(np.array([[3, -100]]), vocab_size=8, mask=np.array([[1, 0]]))
    >>> validate_targets(np.array([[3, 8]]), vocab_size=8)
    Traceback (most recent call last):
    ValueError: targets: 1 live token lies outside [0, 8): 8 at (0, 1). Mask it out or fix the ids.
    """
    if isinstance(targets, jax.core.Tracer) or isinstance(mask, jax.core.Tracer):
        raise TypeError("validate_targets: got traced arrays; call it outside jit, where the ids are known.")
    ids = np.asarray(targets)
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"validate_targets: targets has dtype {ids.dtype}, expected an integer dtype (token ids).")
    if not isinstance(vocab_size, (int, np.integer)) or isinstance(vocab_size, bool) or vocab_size < 1:
        raise ValueError(f"validate_targets: vocab_size={shown(vocab_size)}, expected a positive int.")
    live = np.ones(ids.shape, bool) if mask is None else np.asarray(mask)
    if live.dtype != np.bool_:
        _refuse_fractions("validate_targets", live)
        live = live != 0
    if live.shape != ids.shape:
        raise ValueError(f"validate_targets: mask has shape {live.shape}, expected {ids.shape}, the shape of targets.")
    bad = np.argwhere(live & ((ids < 0) | (ids >= vocab_size)))
    if bad.size:
        where = tuple(int(i) for i in bad[0])
        what, it = ("token lies", "it") if len(bad) == 1 else ("tokens lie", "them")
        more = "" if len(bad) == 1 else f" and {len(bad) - 1} more"
        raise ValueError(
            f"targets: {len(bad)} live {what} outside [0, {vocab_size}): {int(ids[where])} at {where}{more}. "
            f"Mask {it} out or fix the ids."
        )
