"""The route of a call, without running the call."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from jax import Array

from logitless import api
from logitless.core.arguments import bind, by_name, distillation_calls, reference_call, with_reference
from logitless.core.options import Arguments, Head
from logitless.core.promotion import own_promotion
from logitless.core.route import Route
from logitless.core.validation import check_arguments

CALLS = (
    api.logprobs, api.grpo_loss, api.divergence,
    api.linear_logprobs, api.linear_grpo_loss, api.linear_divergence, api.linear_distillation_loss,
)  # fmt: skip


def explain(call: Callable[..., object], *args: object, **kwargs: object) -> Route:
    """The backend, way, tiles, bytes moved and matmul count of a call; nothing is computed.

    Takes one of the public calls and the arguments it would get; arrays may be ``jax.ShapeDtypeStruct``, and
    ``targets`` and ``advantages`` may be left out. ``explain`` binds arguments as the call does: pass ``old_logp``,
    ``lora`` and every other argument of the call. Print the result, or read its fields.

    >>> import jax, jax.numpy as jnp, logitless
    >>> h = jax.ShapeDtypeStruct((1, 8192, 4096), jnp.bfloat16)
    >>> w = jax.ShapeDtypeStruct((151936, 4096), jnp.bfloat16)
    >>> route = logitless.explain(logitless.linear_grpo_loss, h, w, objective=logitless.Objective())
    >>> route.way
    "grad in forward: a token's cotangent follows from its own statistics"
    """
    name = getattr(call, "__name__", str(call))
    if call not in CALLS:
        known = ", ".join(c.__name__ for c in CALLS)
        raise TypeError(f"explain: {name!r} is not one of {known}; pass the function itself, then its arguments.")
    return route_of(name, call_arguments(call, args, kwargs))


@own_promotion
def route_of(name: str, given: Arguments) -> Route:
    """The described route of the public call ``name``; arrays among ``given`` may be shapes."""
    found: list[Route] = []
    leaves, tree = jax.tree.flatten(given)
    shapes = [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]

    def trace(arrays: list[Array]) -> None:
        given_now = iter(arrays)
        leaves_now = [next(given_now) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
        found.append(_described(name, jax.tree.unflatten(tree, leaves_now)))

    where: AbstractContextManager[object] = contextlib.nullcontext()
    if given["sharding"] is not None:
        from logitless.mesh import ambient, sharding

        where = ambient.under(sharding.mesh_of(name, given["sharding"]))
    with where:  # shapes become tracers: every check runs that does not read values, and nothing is computed
        jax.eval_shape(trace, shapes)
    return found[0]


def _described(name: str, given: Arguments) -> Route:
    """The route of a call, including its reference's route if the call computes a reference."""
    if "distillation" in given:
        given = by_name(name, distillation_calls(name, given)[0])
    reference, given = reference_call(name, given)
    if reference is None:
        return bind(name, given, describe=True).route
    first = bind(*reference, describe=True)
    route = bind(name, with_reference(given, jnp.zeros(first.shape)), describe=True).route
    return dataclasses.replace(route, reference=first.route)


def call_arguments(
    call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object], who: str = "explain"
) -> dict[str, object]:
    """Every argument of a call by its name; what the route does not depend on may be missing."""
    signature = inspect.signature(call)
    check_arguments(f"{who}({call.__name__})", signature, args, kwargs, partial=True)
    bound = signature.bind_partial(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    first = next(iter(signature.parameters))
    for name in (first, "lm_head"):
        given_one = given.get(name)
        shown = given_one.weight if isinstance(given_one, Head) else given_one
        if name in signature.parameters and not hasattr(shown, "shape"):
            what = type(given_one).__name__
            raise TypeError(f"{who}({call.__name__}): {name} is {what}, expected an array or ShapeDtypeStruct.")
    tokens = tuple(given[first].shape[:-1])
    if given.get("targets") is None and given.get("ids") is None:
        given["targets"] = jax.ShapeDtypeStruct(tokens, jnp.int32)
    if "advantages" in signature.parameters:
        given.setdefault("advantages", jax.ShapeDtypeStruct(tokens[:1], jnp.float32))
        given |= _missing(given, tokens)
    given["options"] = dataclasses.replace(given["options"], validate=False)
    if "distillation" in given:
        return given
    return by_name(call.__name__, given)


def _missing(given: Arguments, tokens: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    """Stand-ins for arrays that the objective asks for and that do not change the route."""
    objective, shape = given["objective"], jax.ShapeDtypeStruct(tokens, jnp.float32)
    missing = {}
    beta = getattr(objective, "beta", None)
    estimated = beta is not None and getattr(objective, "kl", None) != "full"
    if estimated and given["ref_logp"] is None and given.get("ref_hidden") is None:
        missing["ref_logp"] = shape
    asks = (
        getattr(objective, k, None) is not None for k in ("correction", "off_policy_threshold", "sequence_error_max")
    )
    if any(asks) and given["rollout_logp"] is None:
        missing["rollout_logp"] = shape
    return missing
