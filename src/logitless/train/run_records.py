"""A step's completions with rewards, the step's record, and the summary over all records."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import numpy as np

from logitless.objectives.loss import metric_values
from logitless.train.rollout import Completions
from logitless.train.task import Prompts

NAMES = {"kl_k3": "kl"}
"""Metrics of the loss that have another name in the record."""
LAST_TEN = (
    "train/kl",
    "train/kl_k1",
    "train/left_out_mass",
    "train/hard_rows",
    "train/backward_columns",
    "train/dense_chunks",
)
"""Metrics whose mean over the last ten steps is in the summary, where the run has them."""


@dataclasses.dataclass
class Rollouts:
    """A step's completions with what they earned; on the host."""

    prompts: Prompts
    completions: Completions
    rewards: np.ndarray  # [B]
    parts: dict[str, float]  # mean of each reward part
    texts: list[str]
    trainer_logp: np.ndarray | None = None  # [B, C], before the step's updates; only where the run is traced
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)  # numbers about the draw, for the record


def step_record(
    rolled: Rollouts, updates: list[dict[str, Any]], group_size: int, eos_ids: tuple[int, ...]
) -> dict[str, Any]:
    """The step's numbers that do not depend on the clock: the same bits after a resume (docs/training.md)."""
    done = rolled.completions
    tokens, mask = np.asarray(done.tokens), np.asarray(done.mask)
    groups = rolled.rewards.reshape(-1, group_size)
    first, last = (metric_values(u["metrics"]) for u in (updates[0], updates[-1]))
    record: dict[str, Any] = {
        "train/loss": float(np.mean([u["loss"] for u in updates])),
        "train/losses": [float(u["loss"]) for u in updates],
        "train/grad_norm": float(np.mean([u["grad_norm"] for u in updates])),
        "train/grad_norms": [float(u["grad_norm"]) for u in updates],
        "train/skipped": sum(not u["finite"] for u in updates),
        "train/reward": float(rolled.rewards.mean()),
        "train/ratio_first": first["ratio"],
        **{f"train/{NAMES.get(k, k)}": v for k, v in last.items() if k != "ratio_squared"},
        "reward/std": float(rolled.rewards.std()),
        "reward/mixed_groups": float((groups.min(axis=1) != groups.max(axis=1)).mean()),
        **{f"reward/{name}": value for name, value in rolled.parts.items()},
        "rollout/length_mean": float(mask.sum(axis=1).mean()),
        "rollout/truncated": float((~ended(tokens, mask, eos_ids)).mean()),
        "rollout/tokens_crc32": zlib.crc32(np.ascontiguousarray(tokens).tobytes()),
    }
    return json_number(record)


def run_numbers(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What a run's records come to: its first and last ten steps, and its phases' times over the last ten."""
    steps = [r for r in records if "train/loss" in r]
    last = steps[-10:]

    def known(key: str, of: list[dict[str, Any]]) -> list[float]:
        """The numbers under ``key``, without those that are ``null`` or that a damaged file made something else."""
        values = (r.get(key) for r in of)
        return [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]

    def mean(key: str, of: list[dict[str, Any]]) -> float | None:
        values = known(key, of)
        return sum(values) / len(values) if values else None

    left_out, evals = known("train/left_out_mass_max", steps), known("eval/reward", records)
    phases = {k for r in last for k in r if k.startswith("time/") and not k.startswith("time/train/")}
    return {
        "steps": len(steps),
        "train/reward_first10": mean("train/reward", steps[:10]),
        "train/reward_last10": mean("train/reward", last),
        "eval/first": evals[0] if evals else None,
        "eval/last": evals[-1] if evals else None,
        "train/skipped": sum(known("train/skipped", steps)),
        **{f"{k}_last10": mean(k, last) for k in LAST_TEN if any(k in r for r in last)},
        **({"train/left_out_mass_max": max(left_out)} if left_out else {}),
        **{f"{k}/last10": mean(k, last) for k in sorted(phases)},
        "time/train/step_avg_last10_s": mean("time/train/step_avg_last10_s", steps[-1:]),
    }


def ended(tokens: np.ndarray, mask: np.ndarray, eos_ids: tuple[int, ...]) -> np.ndarray:
    """Rows whose last live token is an end token."""
    last = np.maximum(mask.sum(axis=1) - 1, 0)
    return np.isin(np.take_along_axis(tokens, last[:, None], axis=1)[:, 0], eos_ids)


def json_number(value: Any) -> Any:
    """``value``, and what is in it, with ``None`` for NaN and infinity, which JSON has not."""
    if isinstance(value, dict):
        return {k: json_number(v) for k, v in value.items()}
    if isinstance(value, list):
        return [json_number(v) for v in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
