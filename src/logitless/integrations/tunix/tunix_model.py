"""A Tunix model as hidden states and a head.

A model computes its logits with ``lm_head`` (``[H, V]``) or with its embedding (``[V, H]``). :func:`take_head` copies
the model, and replaces the copy's head by the identity: the copy then returns final hidden states instead of logits,
under any name, and everything inside the model's call still happens (Qwix intercepts operations inside the call for
LoRA).

LoRA on the head itself is read from Qwix' parameters (``w_lora_a``, ``w_lora_b``) and rules (``alpha``, ``rank``).
"""

from __future__ import annotations

import functools
import inspect
import re

from jax import Array

from logitless.integrations.tunix.maxtext_model import Body, is_adapter, split_adapter
from logitless.integrations.tunix.policy_head import Identity, Peer, PolicyHead, array_of, refuse

FAMILIES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "gemma": "Gemma", "gemma3": "Gemma3", "llama3": "Llama3"}
"""Modules ``tunix.models.<family>.model`` and their classes; gemma2 is a ``Gemma``."""
_SERVED = "qwen2, qwen3, gemma, gemma2, gemma3 and llama3"
_SPEC_NAMES = ("out_sharding", "sharding", "sharding_names")
"""Where releases of Flax keep a parameter's mesh axes."""


def without_head(model: object) -> tuple[Body, PolicyHead]:
    """``(body, head)``: called as a copy of the model, ``body`` returns hidden states in the place of logits."""
    from flax import nnx

    return split(nnx.merge(*nnx.split(model)))


def split(copy: Peer) -> tuple[Body, PolicyHead]:
    """:func:`without_head` of a copy that is thrown away afterwards."""
    if is_adapter(copy):
        return split_adapter(copy)
    head = take_head(copy)
    return copy, head


def take_head(model: Peer) -> PolicyHead:
    """The head of ``model``, a throw-away copy, which from now on returns hidden states in the place of logits."""
    _known(model)
    tied = not hasattr(model, "lm_head")
    owner, name = (model.embedder, "input_embedding") if tied else (model.lm_head, "w")
    parameter = getattr(owner, name)
    weight = array_of(model, f"{'embedder' if tied else 'lm_head'}.{name}", parameter)
    if not tied and getattr(owner, "einsum_str", None) != "BTD,DV->BTV":
        raise refuse(model, f"lm_head computes {getattr(owner, 'einsum_str', None)!r}, expected 'BTD,DV->BTV'.")
    lora, scale = _lora(model, owner, name, "embedder" if tied else "lm_head")
    activations = getattr(getattr(getattr(model, "config", None), "shd_config", None), "act_btd", None)
    head = PolicyHead(
        weight=weight,
        layout="vh" if tied else "hv",
        dtype=getattr(owner, "dtype", None),
        identity=Identity(),
        lora=lora,
        lora_scale=scale,
        softcap=getattr(model, "final_logits_softcap", None),
        axes=_axes(parameter),
        batch_axes=activations[0] if activations else "fsdp",
    )
    if tied:
        object.__setattr__(model.embedder, "decode", head.identity)
    else:
        object.__setattr__(model, "lm_head", head.identity)
    if head.softcap is not None:
        object.__setattr__(model, "final_logits_softcap", None)
    return head


def _known(model: object) -> None:
    """Raise unless the model's own call is one of a family that was tried."""
    cls = getattr(type(model), "_unquantized_type", type(model))  # Qwix makes a class of the same name
    for base in cls.__mro__:
        family = re.fullmatch(r"tunix\.models\.(\w+)\.model", base.__module__)
        if family is None or FAMILIES.get(family.group(1)) != base.__name__:
            continue
        changed = [n for n in ("__call__", "compute_final_logits") if getattr(cls, n, None) != getattr(base, n, None)]
        if changed:
            raise refuse(model, f"it has a {changed[0]} of its own, not that of {base.__name__}.")
        return
    raise refuse(model, f"this model is not known here; {_SERVED} are. Use it with Tunix' own losses (uninstall()).")


def _axes(parameter: Peer) -> tuple[Peer, ...]:
    """The mesh axes for a parameter's dimensions, from Flax metadata."""
    found = parameter.get_metadata()
    for name in _SPEC_NAMES:
        spec = found.get(name)
        if spec is not None:
            return tuple(getattr(spec, "spec", spec))
    return ()


# -- LoRA ------------------------------------------------------------------------------------------------------------


def _lora(model: object, owner: object, name: str, path: str) -> tuple[tuple[Array, Array] | None, float]:
    """``((A, B), alpha / rank)`` of Qwix' LoRA on the head."""
    provider = _provider(type(model).__call__) if hasattr(type(model), "_unquantized_type") else None
    rule = None if provider is None else _rule(provider, path, "dot_general" if path == "embedder" else "einsum")
    for what in ("weight_qtype", "act_qtype"):
        kind = getattr(rule, what, None)
        if kind is not None:
            raise refuse(model, f"{path} is quantised ({what}={kind!r}); a quantised head is not served.")
    a, b = getattr(owner, f"{name}_lora_a", None), getattr(owner, f"{name}_lora_b", None)
    if a is None and b is None:
        return None, 1.0
    if path == "embedder":
        raise refuse(model, "LoRA on a tied embedding is not served; leave 'embedder' out of the LoRA's module_path.")
    if rule is None or not hasattr(rule, "alpha"):
        raise refuse(model, f"LoRA on {path} was found, but not the rule of Qwix that says its alpha.")
    if rule.dropout:
        raise refuse(model, f"LoRA on {path} has dropout={rule.dropout}, which is not served.")
    factors = (array_of(model, f"{path}.{name}_lora_a", a), array_of(model, f"{path}.{name}_lora_b", b))
    return factors, rule.alpha / rule.rank


def _rule(provider: Peer, path: str, operation: str) -> Peer:
    """The first rule for a module and an operation, which is how Qwix chooses."""
    for rule in provider._rules:
        if re.fullmatch(rule.module_path, path) and (not rule.op_names or operation in rule.op_names):
            return rule
    return None


def _provider(call: object) -> Peer:
    """Qwix' provider: it is in the closure of the call that Qwix gives a model, and nowhere else."""
    to_see, seen = [call], set()
    while to_see:
        x = to_see.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if hasattr(x, "_rules") and hasattr(x, "get_intercept_map"):
            return x
        if isinstance(x, functools.partial):
            to_see += [x.func, *x.args, *x.keywords.values()]
        elif inspect.ismethod(x):
            to_see.append(x.__self__)
        elif inspect.isfunction(x):
            to_see += [c.cell_contents for c in x.__closure__ or ()]
        elif isinstance(x, (list, tuple)):
            to_see += x
    return None
