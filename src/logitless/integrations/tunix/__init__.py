"""Tunix without logits: ``logitless.integrations.tunix.install()``, one line in front of a Tunix run (docs/tunix.md).

    interface.py      what is replaced in Tunix, and the check that it is what it was
    tunix_model.py    a Tunix model as hidden states and a head, LoRA included
    maxtext_model.py  a MaxText model behind its adapter, the same way
    policy_head.py    what a head is for both
    placement.py      the mesh, and how tokens and head lie on it
    logps.py          in the place of ``tunix.rl.common.compute_per_token_logps``
    sft_losses.py     in the place of the losses of fine-tuning, DPO and ORPO
    tunix_loss.py     ``policy_loss_fn="logitless"``: the fused loss, with Tunix' own metrics
    distillation.py   a strategy for ``DistillationTrainer``; imports Tunix

Importing this imports neither Tunix nor Flax; :func:`install` and :func:`register` do.
"""

from __future__ import annotations

from logitless.integrations.tunix.interface import Installation, TunixChanged, install, register, uninstall

__all__ = ["Installation", "TunixChanged", "install", "register", "uninstall"]
