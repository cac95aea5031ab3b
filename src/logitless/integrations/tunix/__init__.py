"""Tunix without logits: ``logitless.integrations.tunix.install()``, one line in front of a Tunix run (docs/tunix.md).

    interface.py      replaced functions of Tunix, and a check for their known form
    tunix_model.py    a Tunix model as hidden states and a head, LoRA included
    maxtext_model.py  a MaxText model behind its adapter, likewise
    policy_head.py    a head, for both kinds of models
    placement.py      the mesh, and the layout of tokens and head
    logps.py          replaces ``tunix.rl.common.compute_per_token_logps``
    sft_losses.py     replaces the losses for fine-tuning, DPO and ORPO
    tunix_loss.py     ``policy_loss_fn="logitless"``: the fused loss, with Tunix' own metrics
    distillation.py   a strategy for ``DistillationTrainer``; imports Tunix

Importing this imports neither Tunix nor Flax; :func:`install` and :func:`register` do.
"""

from __future__ import annotations

from logitless.integrations.tunix.interface import Installation, TunixChanged, install, register, uninstall

__all__ = ["Installation", "TunixChanged", "install", "register", "uninstall"]
