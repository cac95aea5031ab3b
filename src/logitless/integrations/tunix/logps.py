"""In the place of ``tunix.rl.common.compute_per_token_logps``: the same numbers without logits.

Padding behind a completion is not computed, its log-probabilities are 0. Tunix multiplies padding by 0 in any case; but
if the pad token is also the end token, the first pad token of a row may be a real end token, and is computed.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from logitless.api import linear_logprobs
from logitless.core.pytree import register
from logitless.core.stats import TokenStats
from logitless.integrations.tunix.interface import modules
from logitless.integrations.tunix.placement import sharding_of
from logitless.integrations.tunix.policy_head import Peer, PolicyHead
from logitless.integrations.tunix.tunix_model import split

_STATIC = ("pad_id", "eos_id", "stop_gradient", "temperature", "return_logits", "return_entropy", "chunk_size")
"""Static arguments of ``compute_per_token_logps``."""


@register
@dataclasses.dataclass(frozen=True)
class TokenEntropy:
    """Per-token entropies, passed in place of logits in Tunix 0.1.7."""

    entropy: Array


def entropy_from_logits(stock: Callable[[Peer], Array]) -> Callable[[Peer], Array]:
    """``algo_core.compute_entropy_from_logits``, extended to accept computed entropies."""

    @functools.wraps(stock)
    def compute_entropy_from_logits(logits: Peer) -> Array:
        return logits.entropy if isinstance(logits, TokenEntropy) else stock(logits)

    return compute_entropy_from_logits


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Inputs for a head: hidden states, following tokens, and the mask."""

    head: PolicyHead
    hidden: Array  # [B, T, H]
    targets: Array  # [B, T]
    packed: bool  # T is one less than the width of the packed row

    def arguments(self) -> dict[str, Peer]:
        """Of ``linear_logprobs`` and ``linear_grpo_loss``."""
        found = self.head.arguments(self.hidden)
        return dict(found, targets=self.targets, sharding=sharding_of(self.head, self.targets.shape[0]))


def predictions(
    graphdef: Peer,
    state: Peer,
    prompt_tokens: Array,
    completion_tokens: Array,
    pad_id: int,
    eos_id: int,
    images: Array | None = None,
    segment_ids: Array | None = None,
    segment_positions: Array | None = None,
) -> Predictions:
    """Run a model up to its head, with Tunix' arguments."""
    from flax import nnx

    common, _, _ = modules()
    model = nnx.merge(graphdef, state)  # a copy: its head is taken out
    body, head = split(model)
    tokens, positions, attention_mask, not_padding = common.process_ids(
        prompt_tokens, completion_tokens, pad_id, eos_id, segment_ids, segment_positions
    )
    options: dict[str, Peer] = {"positions": positions, "cache": None, "attention_mask": attention_mask}
    parameters = inspect.signature(type(model).__call__).parameters
    if "segment_ids" in parameters:
        options["segment_ids"] = not_padding if segment_ids is None else segment_ids
    elif segment_ids is not None:
        raise NotImplementedError(
            f"logitless.integrations.tunix: {type(model).__name__} takes no segment_ids; packed rows need them."
        )
    if images is not None:
        options["images"] = images
    hidden, _ = body(tokens, **options)
    packed = segment_ids is not None
    keep = tokens.shape[1] - 1 if packed else completion_tokens.shape[1]
    return Predictions(head, hidden[:, -keep - 1 : -1], tokens[:, -keep:], packed)


def worth_computing(targets: Array, pad_id: int) -> Array:
    """All but the padding at the end of a row, whose first token may be an end token: bool ``[B, T]``."""
    real = (targets != pad_id).astype(jnp.int32)
    here_or_later = jnp.flip(jax.lax.cummax(jnp.flip(real, 1), axis=1), 1) > 0
    before = jnp.pad(here_or_later[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return here_or_later | before


def _statistics(temperature: float, pad_id: int, **what: Peer) -> TokenStats:
    p = predictions(pad_id=pad_id, **what)
    mask = worth_computing(p.targets, pad_id)
    stats = linear_logprobs(**p.arguments(), mask=mask, temperature=1.0 if temperature == 0 else temperature)
    # A packed row's first token has nothing before it.
    return stats.map(lambda s: jnp.pad(s, ((0, 0), (1, 0)))) if p.packed else stats


def per_token_logps(stock: Callable[..., Peer]) -> Callable[..., Peer]:
    """``tunix.rl.common.compute_per_token_logps`` for both interfaces, with equal signature and defaults."""
    signature = inspect.signature(stock)

    @functools.partial(jax.jit, static_argnames=[name for name in signature.parameters if name in _STATIC])
    @functools.wraps(stock)
    def compute_per_token_logps(*args: Peer, **kwargs: Peer) -> Peer:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        what = given.arguments
        what.pop("chunk_size", None)  # nothing to choose here: memory does not depend on it
        constant, as_logits, entropy = (
            what.pop(k, False) for k in ("stop_gradient", "return_logits", "return_entropy")
        )
        stats = _statistics(**what)
        stats = jax.lax.stop_gradient(stats) if constant else stats
        beside = TokenEntropy(stats.entropy) if as_logits else stats.entropy
        return (stats.logp, beside) if as_logits or entropy else stats.logp

    return compute_per_token_logps
