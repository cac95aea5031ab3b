"""Which way a call goes, before it goes there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from logitless.backends import Route
from logitless.head import api as head_api
from logitless.head import route as head_route
from logitless.logits import api as logits_api
from logitless.objectives.objective import Objective
from logitless.parallel import context


def explain(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Route:
    """The backend, way, tiles, bytes moved and matmul count of a call; nothing is computed.

    Takes one of the four public calls and the arguments it would get; arrays may be ``jax.ShapeDtypeStruct``. Print
    the result, or read its fields.

    >>> import jax, jax.numpy as jnp, logitless
    >>> h = jax.ShapeDtypeStruct((1, 8192, 4096), jnp.bfloat16)
    >>> w = jax.ShapeDtypeStruct((151936, 4096), jnp.bfloat16)
    >>> route = logitless.explain(logitless.linear_grpo_loss, h, w, objective=logitless.Objective())
    >>> route.way
    "grad in forward: a token's cotangent follows from its own statistics"
    """
    name = getattr(call, "__name__", str(call))
    loss = name in ("grpo_loss", "linear_grpo_loss")
    objective = kwargs.get("objective", Objective()) if loss else None
    backend, sharding = kwargs.get("backend"), kwargs.get("sharding")
    if call in (logits_api.logprobs, logits_api.grpo_loss):
        (logits,) = _positional(name, ("logits",), args, kwargs)
        with context.under(name, sharding):
            return logits_api.route(name, logits, objective, backend, kwargs.get("interpret", False), sharding)
    if call in (head_api.linear_logprobs, head_api.linear_grpo_loss):
        hidden, lm_head = _positional(name, ("hidden", "lm_head"), args, kwargs)
        with context.under(name, sharding):
            return head_route.route(
                name,
                hidden,
                lm_head,
                objective,
                backend,
                kwargs.get("chunk_size"),
                kwargs.get("memory_budget"),
                kwargs.get("logits_dtype", "float32"),
                kwargs.get("interpret", False),
                kwargs.get("head_layout"),
                sharding,
                kwargs.get("sparse_backward", "off"),
            )
    raise TypeError(
        f"explain: {name!r} is not one of logprobs, grpo_loss, linear_logprobs, linear_grpo_loss; "
        "pass the function itself, then its arguments."
    )


def _positional(call: str, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    found = [args[i] if i < len(args) else kwargs.get(n) for i, n in enumerate(names)]
    for n, value in zip(names, found, strict=True):
        if not hasattr(value, "shape"):
            raise TypeError(f"explain({call}): {n} is {type(value).__name__}, expected an array or ShapeDtypeStruct.")
    return found
