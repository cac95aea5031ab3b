"""Synthetic inputs for checks and benchmarks, made on the host.

ordinary   logits of a spread of about 3, as a freshly initialised head gives
peaked     a planted target that leads by 5 to 40 nats in most rows: what a trained policy's rows look like
extreme    |z| up to 1e4, a few -inf columns, rows shifted by thousands
"""

from __future__ import annotations

from typing import Any

import numpy as np

KINDS = ("ordinary", "peaked", "extreme")


def token_inputs(rows: int, width: int, vocab: int, rng: np.random.Generator, live: float = 0.8) -> dict[str, Any]:
    """Targets, a ragged mask and advantages."""
    lengths = np.maximum((width * np.clip(rng.normal(live, 0.15, rows), 0.05, 1.0)).astype(int), 1)
    return dict(
        targets=rng.integers(0, vocab, (rows, width), dtype=np.int32),
        mask=np.arange(width) < lengths[:, None],
        advantages=rng.standard_normal(rows).astype(np.float32),
    )


def logits(kind: str, targets: np.ndarray, vocab: int, rng: np.random.Generator) -> np.ndarray:
    """Float32 logits ``[B, T, V]`` of a kind in :data:`KINDS`."""
    x = rng.standard_normal((*targets.shape, vocab), np.float32) * np.float32(3.0)
    if kind == "peaked":
        lead = rng.uniform(5.0, 40.0, targets.shape).astype(np.float32)
        lead[rng.random(targets.shape) < 0.2] = 0.0
        np.put_along_axis(x, targets[..., None], (x.max(-1) + lead)[..., None], -1)
    if kind == "extreme":
        x *= np.exp(rng.uniform(0.0, 7.0, (*targets.shape, 1))).astype(np.float32)
        x = np.clip(x, -1e4, 1e4)
        x[..., rng.integers(0, vocab, max(vocab // 50, 1))] = -np.inf
        chosen = np.take_along_axis(x, targets[..., None], -1)
        np.put_along_axis(x, targets[..., None], np.where(np.isfinite(chosen), chosen, 0.0), -1)
    return x


def hidden_and_head(
    kind: str, targets: np.ndarray, width: int, vocab: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Float32 hidden states ``[B, T, H]`` and a head ``[V, H]`` whose logits are of that kind."""
    head = rng.standard_normal((vocab, width), np.float32) / np.float32(width**0.5)
    hidden = rng.standard_normal((*targets.shape, width), np.float32) * np.float32(3.0)
    if kind == "peaked":
        own = head[np.clip(targets, 0, vocab - 1)]
        lead = rng.uniform(5.0, 40.0, (*targets.shape, 1)).astype(np.float32)
        hidden += lead * own / np.sum(own * own, -1, keepdims=True)
    if kind == "extreme":
        hidden *= np.exp(rng.uniform(0.0, 7.0, (*targets.shape, 1))).astype(np.float32)
    return hidden, head
