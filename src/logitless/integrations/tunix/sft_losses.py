"""In the place of ``tunix.sft.peft_trainer._default_loss_fn`` and ``tunix.rl.common.get_per_token_logps`` (DPO and
ORPO): the same numbers without logits.

Tunix' own loss of supervised fine-tuning makes the logits, their log-softmax and a one-hot of the vocabulary in
float32.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from logitless.api import linear_grpo_loss, linear_logprobs
from logitless.core.shapes import Float, Int, PyTree
from logitless.integrations.tunix.interface import Interface
from logitless.integrations.tunix.placement import sharding_of
from logitless.integrations.tunix.policy_head import Peer, PolicyHead
from logitless.integrations.tunix.tunix_model import without_head
from logitless.objectives.objective import Objective

_NLL = Objective.reinforce(aggregation="bnpo")
"""With unit advantages: the mean of ``-logp``, in three matmuls."""


def _call(head: PolicyHead, hidden: Float[Array, "B T H"], targets: Int[Array, "B T"]) -> dict[str, Peer]:
    """Arguments of a call from hidden states."""
    return dict(head.arguments(hidden), targets=targets, sharding=sharding_of(head, targets.shape[0]))


def default_loss(interface: Interface, stock: Callable[..., Peer], losses: Peer) -> Callable[..., Peer]:
    """``_default_loss_fn``; ``losses`` is ``tunix.sft.utils``, which has 0.1.8's ``LossOutput``."""

    @functools.wraps(stock)
    def _default_loss_fn(
        model: Peer,
        input_tokens: Array,
        input_mask: Array,
        positions: Array,
        attention_mask: Array,
        images: Peer = None,
    ) -> Peer:
        body, head = without_head(model)
        more = {} if images is None else {"images": images}
        hidden, _ = body(input_tokens, positions, None, attention_mask, **more)
        weights = input_mask[:, 1:]
        count = jnp.sum(weights)
        loss, _ = linear_grpo_loss(
            **_call(head, hidden[:, :-1], input_tokens[:, 1:]),
            advantages=jnp.ones(weights.shape[:1]),
            token_weights=weights.astype(jnp.float32),
            mask=weights != 0,
            objective=_NLL,
            denominator=count + 1e-8 if interface == "0.1.7" else 1.0,
        )
        if interface == "0.1.7":
            return loss
        return losses.LossOutput(primary_loss=losses.WeightedMetric(loss, count, eps=1e-8), aux_metrics={})

    return _default_loss_fn


def token_logps(stock: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """``get_per_token_logps``. Padding has a log-probability of 0: a token that does not see itself in a
    ``[B, T, T]`` attention mask, as Tunix makes it; no loss reads it."""
    from flax import nnx

    @functools.partial(nnx.jit, static_argnames=("logits_to_keep",))
    @functools.wraps(inspect.unwrap(stock))
    def get_per_token_logps(
        model: Peer, input_tokens: Array, positions: Array, attn_mask: Peer, logits_to_keep: int, images: Peer = None
    ) -> Array:
        body, head = without_head(model)
        more = {} if images is None else {"images": images}
        hidden, _ = body(input_tokens, positions=positions, attention_mask=attn_mask, cache=None, **more)
        live = None
        if attn_mask is not None and attn_mask.shape == (*input_tokens.shape, input_tokens.shape[1]):
            live = jnp.diagonal(attn_mask, axis1=1, axis2=2)[:, -logits_to_keep:] != 0
        call = _call(head, hidden[:, -logits_to_keep - 1 : -1], input_tokens[:, -logits_to_keep:])
        return linear_logprobs(**call, mask=live).logp

    return get_per_token_logps
