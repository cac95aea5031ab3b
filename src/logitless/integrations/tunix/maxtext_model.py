"""A MaxText model behind its ``TunixMaxTextAdapter`` as hidden states and a head.

Written for the adapter of MaxText #5301, which no release has yet: with ``skip_lm_head=True`` it returns the hidden
states *before* the final norm, and its ``compute_final_logits`` makes logits of them (``decoder.apply_output_head``):

    y = decoder_norm(hidden)
    logits_dense(y)                                            in float32 with logits_dot_in_fp32, else in dtype
    y . embedding^T, / sqrt(emb_dim), cap * tanh(. / cap)      the embedding rounded to bfloat16, with
                                                               logits_via_embedding

The norm is applied here, and the rest is a :class:`PolicyHead`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable

import jax.numpy as jnp

from logitless.integrations.tunix.policy_head import Identity, Peer, PolicyHead, array_of, refuse

Body = Callable[..., tuple[Peer, Peer]]


def is_adapter(model: object) -> bool:
    """Whether the model's class, or a base class, belongs to MaxText."""
    cls = getattr(type(model), "_unquantized_type", type(model))
    return any("maxtext" in c.__module__.lower() for c in cls.__mro__)


def split_adapter(adapter: Peer) -> tuple[Body, PolicyHead]:
    """``(body, head)``: the adapter up to its final norm, called as the adapter is, and the head behind it."""
    _check(adapter)
    model = adapter.base
    head = _head(adapter, model, model.config)

    def body(*args: Peer, **options: Peer) -> tuple[Peer, Peer]:
        hidden, rest = adapter(*args, **options, skip_lm_head=True)
        return head.identity(model.decoder.decoder_norm(hidden)), rest

    return body, head


def _check(adapter: Peer) -> None:
    """Raise unless the adapter has the interface, and a head of plain arrays."""
    takes = inspect.signature(type(adapter).__call__).parameters
    if "skip_lm_head" not in takes or not callable(getattr(adapter, "compute_final_logits", None)):
        raise refuse(
            adapter,
            "this release of MaxText's adapter returns logits alone: its call takes no skip_lm_head=, which came with "
            "MaxText #5301. Take a MaxText that has it, use Tunix' own losses with this one (uninstall()), or a loop "
            "of your own (docs/maxtext.md).",
        )
    decoder, settings = adapter.base.decoder, adapter.base.config
    if not hasattr(decoder, "decoder_norm"):
        raise refuse(adapter, "its decoder is a Linen module without decoder_norm; set pure_nnx_decoder=True.")
    if "explicit" in str(settings.shard_mode).lower():
        raise refuse(adapter, f"shard_mode={settings.shard_mode} is not served; use shard_mode='auto'.")
    if settings.parameter_memory_host_offload:
        raise refuse(adapter, "parameter_memory_host_offload=True keeps the head on the host, which is not served.")


def _head(adapter: Peer, model: Peer, settings: Peer) -> PolicyHead:
    tied = settings.logits_via_embedding
    owner, name = (model.token_embedder, "embedding") if tied else (model.decoder.logits_dense, "kernel")
    path = "token_embedder.embedding" if tied else "decoder.logits_dense.kernel"
    if getattr(owner, f"{name}_lora_a", None) is not None:
        raise refuse(adapter, f"LoRA on {path} is not served; leave it out of the LoRA's module_path.")
    head = PolicyHead(
        weight=array_of(adapter, path, getattr(owner, name)),
        layout="vh" if tied else "hv",
        dtype=jnp.float32 if settings.logits_dot_in_fp32 and not tied else settings.dtype,
        identity=Identity(),
        lora=None,
        lora_scale=1.0,
        softcap=settings.final_logits_soft_cap or None if tied else None,
        axes=(),  # MaxText names logical axes
        batch_axes=("data", "fsdp"),
    )
    if not tied:
        return head
    scale = 1 / math.sqrt(settings.emb_dim) if settings.normalize_embedding_logits else None
    return dataclasses.replace(head, weight=head.weight.astype(jnp.bfloat16), scale=scale)
