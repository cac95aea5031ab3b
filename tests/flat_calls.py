"""The public calls with every choice as a keyword: fields of ``Head`` and ``Options`` beside the arrays of the call.

A test's case is then one dictionary. ``lm_head`` takes ``bias``, ``lora``, ``lora_scale``, ``head_layout``, ``scale``,
``softcap`` and ``vocab_size``; ``ref_lm_head`` takes ``ref_bias``; ``options`` takes the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import logitless
from logitless.core.options import grouped


def by_name(call: Callable[..., Any], args: tuple[Any, ...], flat: dict[str, Any]) -> dict[str, Any]:
    """The arguments as ``call`` takes them, by name."""
    flat = dict(zip(inspect.signature(call).parameters, args, strict=False)) | flat
    bias = flat.pop("ref_bias", None)
    if call in (logitless.logprobs, logitless.grpo_loss):
        return grouped(flat)
    given = grouped(flat)
    return given if bias is None else given | {"ref_lm_head": logitless.Head(given["ref_lm_head"], bias=bias)}


def flat(call: Callable[..., Any]) -> Callable[..., Any]:
    """A public call, or ``with_stats`` of one, with flat keywords."""
    return lambda *args, **kwargs: call(**by_name(call, args, kwargs))


def explain(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``logitless.explain`` with flat keywords."""
    return logitless.explain(call, **by_name(call, args, kwargs))


def plan(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``logitless.plan`` with flat keywords."""
    return logitless.plan(call, **by_name(call, args, kwargs))


logprobs = flat(logitless.logprobs)
grpo_loss = flat(logitless.grpo_loss)
linear_logprobs = flat(logitless.linear_logprobs)
linear_grpo_loss = flat(logitless.linear_grpo_loss)
