"""The head of a model that Tunix trains, and the error for one that is not served."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core.options import Head
from logitless.core.problem import Layout


class Identity:
    """Stands in for a head, and remembers the dtype that came to it: some models return float32 in any case."""

    dtype: Peer = None

    def __call__(self, x: Array) -> Array:
        self.dtype = x.dtype
        return x


Peer = Any
"""An object of Tunix, Flax or MaxText, which are optional: no type of theirs can be named here."""


@dataclasses.dataclass(frozen=True)
class PolicyHead:
    """A model's head with the logit transform."""

    weight: Array
    layout: Layout
    dtype: Peer  # of the head's matmul; None: the dtype of the operand
    identity: Identity  # in the place of the head
    lora: tuple[Array, Array] | None
    lora_scale: float
    softcap: float | None
    axes: tuple[Peer, ...]  # mesh axes of the weight's dimensions
    batch_axes: Peer  # mesh axes for the batch dimension
    scale: float | None = None

    def arguments(self, hidden: Array) -> dict[str, Peer]:
        """For ``linear_logprobs`` and ``linear_grpo_loss``, in the precision of the model's own head."""
        dtype = jnp.result_type(self.identity.dtype, self.weight) if self.dtype is None else self.dtype
        weight, hidden = self.weight.astype(dtype), hidden.astype(dtype)
        lora = None if self.lora is None else (self.lora[0].astype(dtype), self.lora[1].astype(dtype))
        head = Head(weight, lora=lora, lora_scale=self.lora_scale, layout=self.layout)
        return {"hidden": hidden, "lm_head": head.replace(scale=self.scale, softcap=self.softcap)}


def refuse(model: Peer, why: str) -> NotImplementedError:
    """An error that names the model."""
    return NotImplementedError(f"logitless.integrations.tunix: {type(model).__module__}.{type(model).__name__}: {why}")


def array_of(model: Peer, path: str, parameter: Peer) -> Array:
    """The array of a parameter; a quantised one is refused."""
    value = parameter.get_value() if hasattr(parameter, "get_value") else getattr(parameter, "value", parameter)
    if hasattr(parameter, "how") or not isinstance(value, jax.Array) or not jnp.issubdtype(value.dtype, jnp.floating):
        kind = type(parameter if hasattr(parameter, "how") else value)
        raise refuse(
            model,
            f"{path} is quantised ({kind.__module__}.{kind.__name__}); a quantised head is not served. Leave the head "
            "out of the quantisation rules.",
        )
    return value
