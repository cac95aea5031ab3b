"""The public calls with every choice as a keyword: fields of ``Head`` and ``Options`` beside the arrays of the call.

A test's case is then one dictionary. ``lm_head`` takes ``bias``, ``lora``, ``lora_scale``, ``head_layout``, ``scale``,
``softcap`` and ``vocab_size``; ``ref_lm_head`` takes ``ref_bias`` and the policy's
layout, scale, softcap and vocabulary size; ``options`` takes the rest.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import logitless
from logitless.core.options import HEAD_NAMES, grouped

OF_THE_POLICY = ("layout", "scale", "softcap", "vocab_size")
"""Fields of the reference's head that are the policy's."""


def by_name(call: Callable[..., Any], args: tuple[Any, ...], flat: dict[str, Any]) -> dict[str, Any]:
    """The arguments as ``call`` takes them, by name."""
    flat = dict(zip(inspect.signature(call).parameters, args, strict=False)) | flat
    bias = flat.pop("ref_bias", None)
    if bias is not None and flat.get("ref_lm_head") is not None:
        policy = {k: flat[HEAD_NAMES[k]] for k in OF_THE_POLICY if HEAD_NAMES[k] in flat}
        flat["ref_lm_head"] = logitless.Head(flat["ref_lm_head"], bias=bias, **policy)
    return grouped(flat)


def flat(call: Callable[..., Any]) -> Callable[..., Any]:
    """A public call, or ``with_stats`` of one, with flat keywords."""
    return functools.wraps(call)(lambda *args, **kwargs: call(**by_name(call, args, kwargs)))


def _plain(call: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(logitless, call.__name__)


def with_stats(call: Callable[..., Any]) -> Callable[..., Any]:
    """``logitless.with_stats`` with flat keywords."""
    return flat(logitless.with_stats(_plain(call)))


def explain(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``logitless.explain`` with flat keywords."""
    return logitless.explain(_plain(call), **by_name(call, args, kwargs))


def plan(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``logitless.plan`` with flat keywords."""
    return logitless.plan(_plain(call), **by_name(call, args, kwargs))


logprobs = flat(logitless.logprobs)
grpo_loss = flat(logitless.grpo_loss)
linear_logprobs = flat(logitless.linear_logprobs)
linear_grpo_loss = flat(logitless.linear_grpo_loss)


def __getattr__(name: str) -> Any:
    """What has no choices to flatten is the library's own."""
    return getattr(logitless, name)
