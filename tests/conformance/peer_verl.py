"""veRL's own ``ppo_loss`` over given log-probabilities, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from peer_batches import Answer, Batch


def config(**settings: Any) -> ActorConfig:
    """An ``ActorConfig`` with these settings of the loss."""
    own = {"dro_beta": settings.pop("dro_beta")} if "dro_beta" in settings else {}
    mode = PolicyLossConfig(loss_mode=settings.pop("loss_mode", "vanilla"), **own)
    sizes = dict(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, use_torch_compile=False)
    return ActorConfig(**sizes, policy_loss=mode, **settings)


def loss(
    settings: ActorConfig,
    b: Batch,
    weights: np.ndarray | None = None,
    tokens: int | None = None,
    rows: int | None = None,
) -> Answer:
    """``tokens`` and ``rows`` are the counts of a larger batch."""
    count, width = b.mask.shape
    leaves = [torch.tensor(x, requires_grad=True) for x in (b.logp, b.entropy)]

    def unpadded(x: torch.Tensor) -> torch.Tensor:
        """As a model without padding gives it: a prompt of one token, whose place predicts the first of the answer."""
        return torch.cat([x, torch.zeros(count, 1, dtype=x.dtype)], 1).reshape(-1)

    advantages = b.advantages if b.advantages.ndim == 2 else np.repeat(b.advantages[:, None], width, 1)
    arrays = {
        "prompts": torch.zeros(count, 1, dtype=torch.long),
        "responses": torch.zeros(count, width, dtype=torch.long),
        "attention_mask": torch.ones(count, width + 1, dtype=torch.long),
        "response_mask": torch.tensor(b.mask),
        "old_log_probs": torch.tensor(b.logp if b.old is None else b.old),
        "advantages": torch.tensor(advantages),
        "ref_log_prob": torch.tensor(b.ref),
    }
    if weights is not None:
        arrays["rollout_is_weights"] = torch.tensor(weights)
    data = TensorDict(arrays, batch_size=[count])
    tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=rows)
    out = {"log_probs": unpadded(leaves[0])}
    if settings.entropy_coeff:
        out["entropy"] = unpadded(leaves[1])
    value, metrics = ppo_loss(settings, out, data)
    value.backward()
    gradients = (np.zeros(b.mask.shape) if x.grad is None else x.grad.numpy() for x in leaves)
    logged = {k: float(getattr(v, "values", [v])[0]) for k, v in metrics.items()}
    return Answer(float(value.detach()), *gradients, metrics=logged)
