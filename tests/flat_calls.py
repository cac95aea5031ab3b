"""The public calls with every choice as a keyword: fields of ``Head`` and ``Options`` beside the arrays of the call.

A test's case is then one dictionary. ``lm_head`` takes ``bias``, ``lora``, ``lora_scale``, ``head_layout``, ``scale``,
``softcap`` and ``vocab_size``; ``ref_lm_head`` takes ``ref_bias``; ``options`` takes the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import logitless

OPTIONS = {f.name for f in dataclasses.fields(logitless.Options)}
HEAD = {"head_layout" if f.name == "layout" else f.name: f.name for f in dataclasses.fields(logitless.Head)}
del HEAD["weight"]


def grouped(call: Callable[..., Any], args: tuple[Any, ...], flat: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """``(args, kwargs)`` as ``call`` takes them."""
    options = {k: v for k, v in flat.items() if k in OPTIONS}
    rest = {k: v for k, v in flat.items() if k not in OPTIONS}
    if options:
        rest["options"] = logitless.Options(**options)
    if call.__name__.startswith("linear_"):
        head = {HEAD[k]: rest.pop(k) for k in list(rest) if k in HEAD}
        if head and "lm_head" in rest:
            rest["lm_head"] = logitless.Head(rest["lm_head"], **head)
        elif head:
            args = (args[0], logitless.Head(args[1], **head), *args[2:])
        if (bias := rest.pop("ref_bias", None)) is not None:
            rest["ref_lm_head"] = logitless.Head(rest["ref_lm_head"], bias=bias)
    return args, rest


def flat(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, a public call or ``with_stats`` of one, with flat keywords."""

    def called(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = grouped(call, args, kwargs)
        return call(*args, **kwargs)

    return called


def explain(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``logitless.explain`` with flat keywords."""
    args, kwargs = grouped(call, args, kwargs)
    return logitless.explain(call, *args, **kwargs)


logprobs = flat(logitless.logprobs)
grpo_loss = flat(logitless.grpo_loss)
linear_logprobs = flat(logitless.linear_logprobs)
linear_grpo_loss = flat(logitless.linear_grpo_loss)
