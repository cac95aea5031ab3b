"""Liger's chunked GRPO loss from hidden states and a head, in float32 on a CPU, without torch.compile."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

from peer_batches import ROWS, WIDTH, Batch

HIDDEN, VOCABULARY = 5, 11


@dataclasses.dataclass(frozen=True)
class Model:
    """Hidden states, heads and targets, of the policy and of a reference."""

    hidden: np.ndarray
    head: np.ndarray
    bias: np.ndarray
    ref_hidden: np.ndarray
    ref_head: np.ndarray
    ref_bias: np.ndarray
    targets: np.ndarray


def model(seed: int = 0) -> Model:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    hidden, head, bias = normal(ROWS, WIDTH, HIDDEN), normal(VOCABULARY, HIDDEN), normal(VOCABULARY)
    ref_hidden, ref_head = hidden + 0.3 * normal(ROWS, WIDTH, HIDDEN), head + 0.3 * normal(VOCABULARY, HIDDEN)
    targets = rng.integers(0, VOCABULARY, (ROWS, WIDTH))
    return Model(hidden, head, bias, ref_hidden, ref_head, bias + 0.1 * normal(VOCABULARY), targets)


@dataclasses.dataclass(frozen=True)
class FusedAnswer:
    """A loss with the gradients of what it was made from."""

    loss: float
    dhidden: np.ndarray
    dhead: np.ndarray
    dbias: np.ndarray
    metrics: tuple[float, ...]


def loss(
    settings: dict[str, Any], m: Model, b: Batch, weights: np.ndarray | None = None, items: int | None = None
) -> FusedAnswer:
    """The loss; the reference's log-probabilities are computed in the same call."""
    made = LigerFusedLinearGRPOLoss(compiled=False, use_ref_model=settings.get("beta", 0.04) != 0, **settings)
    leaves = [torch.tensor(x, requires_grad=True) for x in (m.hidden, m.head, m.bias)]
    hidden, head, bias = leaves

    def single(x: np.ndarray | None) -> torch.Tensor | None:
        return None if x is None else torch.tensor(x, dtype=torch.float32)

    value, metrics = made(
        hidden, head, torch.tensor(m.targets), single(b.mask), single(b.advantages), bias,
        old_per_token_logps=single(b.old), ref_input=single(m.ref_hidden), ref_weight=single(m.ref_head),
        ref_bias=single(m.ref_bias), vllm_is_ratio=single(weights), num_items_in_batch=items,
    )  # fmt: skip
    value.backward()
    gradients = (x.grad.numpy() for x in leaves)
    return FusedAnswer(value.item(), *gradients, metrics=tuple(x.item() for x in metrics))
