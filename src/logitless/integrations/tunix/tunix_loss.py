"""``GRPOConfig(policy_loss_fn="logitless")``: Tunix' GRPO loss as one fused call.

The loss is :func:`logitless.linear_grpo_loss` with the objective that the config says
(:meth:`logitless.Objective.from_tunix`), three matmuls a token in place of four where it is uncoupled. Its metrics are
Tunix' own: its loss function is run over the statistics that come out of the call, without a gradient.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from logitless.api import linear_grpo_loss
from logitless.core.loss_stats import with_stats
from logitless.core.stats import TokenStats
from logitless.integrations.tunix.interface import Interface, modules
from logitless.integrations.tunix.logps import TokenEntropy, entropy_from_logits, predictions
from logitless.integrations.tunix.policy_head import Peer
from logitless.objectives.aggregate import sequences_of
from logitless.objectives.objective import Objective


def policy_loss(interface: Interface) -> Callable[..., Peer]:
    """A loss for Tunix' registry."""

    def logitless_loss_fn(
        model: Peer, train_example: Peer, algo_config: Peer, pad_id: int, eos_id: int, **kwargs: Peer
    ) -> Peer:
        """GRPO's loss, as ``tunix.rl.algo_core.grpo_loss_fn`` computes it, from hidden states."""
        loss, stats = _loss(interface, model, train_example, algo_config, pad_id, eos_id)
        theirs = _over_statistics(interface, stats)(model, train_example, algo_config, pad_id, eos_id, **kwargs)
        theirs = jax.lax.stop_gradient(theirs)
        if interface == "0.1.7":
            return loss, theirs[1]
        primary = dataclasses.replace(theirs.primary_loss, unreduced_sum=loss)
        return dataclasses.replace(theirs, primary_loss=primary)

    return logitless_loss_fn


def _loss(
    interface: Interface, model: Peer, example: Peer, algo_config: Peer, pad_id: int, eos_id: int
) -> tuple[Array, TokenStats]:
    """The loss (0.1.8: its sum before it is divided), and statistics as wide as the example's arrays."""
    from flax import nnx

    graphdef, state = nnx.split(model)
    segments = getattr(example, "segment_ids", None)
    p = predictions(
        graphdef, state, example.prompt_ids, example.completion_ids, pad_id, eos_id, segment_ids=segments,
        segment_positions=getattr(example, "segment_positions", None),
    )  # fmt: skip

    def tokens(x: Peer) -> Peer:
        """Without a packed row's first token, which has nothing before it."""
        return x[:, 1:] if p.packed and x is not None and x.ndim == 2 else x

    width = example.completion_mask.shape[-1]
    objective = Objective.from_tunix(algo_config, max_length=float(width), **_DONE_HERE)
    if objective.correction == "geometric_mask":
        raise ValueError("logitless: the fused loss does not serve truncated_importance_sampling_type.")
    objective = objective.replace(correction=None, correction_max=2.0)  # sampler weights come with the example
    denominator = None
    if interface == "0.1.8":  # the trainer divides, by the denominator of Tunix' own loss
        denominator = float(width) if objective.aggregation == "dr_grpo" else 1.0
    on_policy = getattr(algo_config, "force_on_policy_ratio", False)
    loss, aux = with_stats(linear_grpo_loss)(
        **p.arguments(),
        advantages=tokens(jnp.asarray(example.advantages, jnp.float32)),
        mask=tokens(_trained(example, algo_config, segments)),
        old_logp=None if on_policy else tokens(example.old_per_token_logps),
        ref_logp=None if objective.beta is None else tokens(example.ref_per_token_logps),
        rollout_logp=None if objective.sequence_error_max is None else tokens(example.rollout_per_token_logps),
        token_weights=tokens(getattr(example, "sampler_is_weights", None)),
        segment_ids=tokens(segments) if interface == "0.1.8" else None,  # 0.1.7 averages over whole rows
        objective=objective,
        denominator=denominator,
    )
    stats = aux.stats
    return loss, stats.map(lambda s: jnp.pad(s, ((0, 0), (1, 0)))) if p.packed else stats


_DONE_HERE = {"overlong_loss_masking": False}
"""Settings about the batch, not about the loss."""


def _trained(example: Peer, algo_config: Peer, segments: Array | None) -> Array:
    """``completion_mask`` without truncated sequences, where the config says so; in packed rows one token of a sequence
    is enough."""
    mask = example.completion_mask
    if not getattr(algo_config, "overlong_loss_masking", False):
        return mask
    overlong = getattr(example, "overlong", None)
    if overlong is None:
        raise ValueError("logitless: overlong_loss_masking needs the example's overlong, the rollout's verdict.")
    overlong = jnp.asarray(overlong, jnp.float32)
    per_token = jnp.broadcast_to(overlong.reshape(len(mask), -1), mask.shape)
    return jnp.where(sequences_of(mask != 0, segments).total(per_token) > 0, 0, mask)


def _over_statistics(interface: Interface, stats: TokenStats) -> Callable[..., Peer]:
    """Tunix' loss function over statistics that are there: the same code, with other functions under two names.

    Nothing is replaced in Tunix' modules, which other threads may be using.
    """
    common, core, _ = modules()
    old = interface == "0.1.7"

    class Common:
        """``tunix.rl.common``, but for one function."""

        def __getattr__(self, name: str) -> Peer:
            return getattr(common, name)

        @staticmethod
        def compute_per_token_logps(*_: Peer, **__: Peer) -> Peer:
            return stats.logp, TokenEntropy(stats.entropy) if old else stats.entropy

    stock = core.grpo_loss_fn
    names = dict(stock.__globals__, common=Common())
    if old:
        names["compute_entropy_from_logits"] = entropy_from_logits(core.compute_entropy_from_logits)
    return types.FunctionType(stock.__code__, names, stock.__name__, stock.__defaults__, stock.__closure__)
