"""The sharp test of an A/B: do two losses make the same of the same completions, step by step?

All arms update on the completions sampled by the baseline, so no sampled token separates two runs. What is left is
rounding, and how far rounding alone drives two runs apart is measured too: a *control*, the baseline with another
micro-batch split, which is the same mathematics. For step ``t`` and for each of

    loss        the largest difference of the losses of the step's updates
    grad_norm   the same of the gradient's norms, before the clip
    logp        root mean square, over the live tokens, of the log-probabilities before the updates
    weights     root mean square, over a sample of the weights, after them

the deviation ``d`` of an arm from the baseline must be within

    limit_t = factor * max over s <= t of d_s(control)  +  ULPS * eps * scale_t  +  [t > 1] DECISIONS / n_t * reach_t

1. ``factor`` is ``ab.replay_factor``: two runs of the same loss are about as far from each other as any other two.
2. ``eps`` is that of the dtype in which the quantity is computed (of loss and norm, which are float32 means over the
   live tokens: divided by the root of ``n_t``, at least float32's), ``scale_t`` its own size in the baseline (at least
   1 for loss and log-probabilities, at least the run's mean for the norm). A control that happens to differ in no bit
   does not make a last digit a difference.
3. A clip is a decision: a ratio within rounding distance of its bound is clipped in one run and not in the other, and
then one of ``n_t`` live tokens has a gradient or none. ``reach_t`` is the scale; for weights, the distance travelled.
Before the first update all ratios are 1: no such allowance in step 1.

A loss that is wrong shows in step 1, where nothing but rounding is allowed for: in float32 a gradient 2 % too large is
thousands of times over its limit there.

A sparse backward leaves a little out of the gradients, and another precision of the head rounds elsewhere: such an arm
is *approximate by design*. Deviations are recorded; the verdict is on the forward pass, the log-probabilities of step
1, if the logits have the baseline's precision.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from logitless.train.config import ConfigError, Loss, TrainConfig
from logitless.train.recorded import Trace
from logitless.train.run_records import json_number

QUANTITIES = ("loss", "grad_norm", "logp", "weights")
ULPS = 8.0
DECISIONS = 4.0


def control_of(config: TrainConfig) -> TrainConfig:
    """The same training with another rounding: the gradient is summed over smaller micro-batches."""
    t = config.train
    rows = t.microbatch or t.prompts_per_step * t.group_size // t.minibatches
    shards = config.mesh.data * config.mesh.fsdp
    smaller = [n for n in range(rows // 2, 0, -1) if rows % n == 0 and n % shards == 0]
    if not smaller or config.train.objective.get("top_entropy") is not None:
        raise ConfigError(
            "ab.replay and ab.control need a second baseline with another micro-batch split, and "
            + ("top_entropy takes none" if smaller else f"{rows} rows over {shards} devices have none")
            + "; set ab.replay=false (and ab.control=false, or ab.seeds)"
        )
    tail = t.microbatch_tail if t.microbatch_tail and smaller[0] % t.microbatch_tail == 0 else 0
    return dataclasses.replace(config, train=dataclasses.replace(t, microbatch=smaller[0], microbatch_tail=tail))


def approximate(baseline: Loss, arm: Loss) -> str | None:
    """Why an arm's gradients differ from the baseline's by more than rounding, by design; ``None`` if they do not."""
    if baseline.sparse_backward != arm.sparse_backward:
        return "a sparse backward leaves a little out of the gradients"
    for key in ("logits_dtype", "head_grad_dtype"):
        if getattr(baseline, key) != getattr(arm, key):
            return f"{key} is {getattr(arm, key)} and the baseline's {getattr(baseline, key)}"
    return None


def _resolution(config: TrainConfig, tokens: int) -> dict[str, float]:
    """Spacing of the numbers around 1 in the dtype of each quantity; rounding averages out in means."""
    single = float(jnp.finfo(jnp.float32).eps)
    dtypes = {config.model.compute_dtype, config.train.loss.logits_dtype}
    computed = float(jnp.finfo(jnp.bfloat16).eps) if "bfloat16" in dtypes else single
    mean = max(computed / max(tokens, 1) ** 0.5, single)
    weights = float(jnp.finfo(config.model.master_dtype).eps)
    return {"loss": mean, "grad_norm": mean, "logp": computed, "weights": weights}


def deviations(a: Trace, b: Trace) -> dict[str, float]:
    """Distance between ``b`` and ``a`` in a step; infinite if only one is finite, or if shapes differ."""
    return {
        "loss": _largest(a.losses, b.losses),
        "grad_norm": _largest(a.grad_norms, b.grad_norms),
        "logp": _rms(a.logp, b.logp),
        "weights": _rms(a.weights, b.weights),
    }


def _differences(a: np.ndarray, b: np.ndarray) -> np.ndarray | None:
    if a.shape != b.shape or np.any(np.isfinite(a) != np.isfinite(b)):
        return None
    known = np.isfinite(a)
    return a[known].astype(np.float64) - b[known].astype(np.float64)


def _largest(a: np.ndarray, b: np.ndarray) -> float:
    d = _differences(a, b)
    return float("inf") if d is None else float(np.max(np.abs(d), initial=0.0))


def _rms(a: np.ndarray, b: np.ndarray) -> float:
    d = _differences(a, b)
    return float("inf") if d is None else float(np.sqrt(np.mean(d**2))) if d.size else 0.0


def _scales(baseline: Sequence[Trace]) -> list[dict[str, float]]:
    def size(x: np.ndarray) -> float:
        known = x[np.isfinite(x)].astype(np.float64)
        return float(np.sqrt(np.mean(known**2))) if known.size else 0.0

    mean_norm = float(np.mean([size(t.grad_norms) for t in baseline]))
    return [
        {
            "loss": max(1.0, size(t.losses)),
            "grad_norm": max(size(t.grad_norms), mean_norm),
            "logp": max(1.0, size(t.logp)),
            "weights": size(t.weights),
        }
        for t in baseline
    ]


def _ways(baseline: Sequence[Trace]) -> list[float]:
    """How far the weights have come since the first step, step by step."""
    moves = [_rms(a.weights, b.weights) for a, b in itertools.pairwise(baseline)]
    return list(itertools.accumulate(moves, initial=0.0))


def judge(
    config: TrainConfig,
    baseline: Sequence[Trace],
    control: Sequence[Trace],
    arm: Sequence[Trace],
    *,
    forward_only: bool = False,
) -> dict[str, Any]:
    """The test of the module's docstring; ``forward_only`` judges no more than the log-probabilities of step 1.

    ``agree``, which is ``None`` where no step had a gradient, for then nothing of a backward was seen; ``steps``;
    ``worst``: of each quantity the step where the arm is nearest to its limit, or furthest over it, with deviation,
    control's deviation and limit; ``first``: the first step over a limit; ``course``: the deviations of all steps, for
    a chart.
    """
    if not len(baseline) == len(control) == len(arm) or not baseline:
        raise ConfigError(
            f"ab: the replays do not cover the same steps: baseline {len(baseline)}, control {len(control)}, arm "
            f"{len(arm)}; continue with --resume"
        )
    scales, ways = _scales(baseline), _ways(baseline)
    tokens = [t.logp.size for t in baseline]
    trained = any(np.any(t.grad_norms > 0) for t in baseline)
    eps = [_resolution(config, n) for n in tokens]
    of_control = [deviations(a, c) for a, c in zip(baseline, control, strict=True)]
    of_arm = [deviations(a, x) for a, x in zip(baseline, arm, strict=True)]
    worst: dict[str, dict[str, Any]] = {}
    overs: list[int] = []
    for key in QUANTITIES:
        reach = 0.0
        rows = []
        for step, (x, c, scale) in enumerate(zip(of_arm, of_control, scales, strict=True), 1):
            reach = max(reach, c[key] if np.isfinite(c[key]) else 0.0)
            limit = config.ab.replay_factor * reach + ULPS * eps[step - 1][key] * scale[key]
            if step > 1:
                way = ways[step - 1] if key == "weights" else scale[key]
                limit += DECISIONS / max(tokens[step - 1], 1) * way
            rows.append({"step": step, "deviation": x[key], "control": c[key], "limit": limit, "scale": scale[key]})
        worst[key] = max(rows, key=lambda r: r["deviation"] / r["limit"] if r["limit"] else np.inf)
        judged = rows[: 1 if key == "logp" else 0] if forward_only else rows
        overs += [int(r["step"]) for r in judged if r["deviation"] > r["limit"]]
    return {
        "agree": False if overs else True if forward_only or trained else None,
        "steps": len(baseline),
        "factor": config.ab.replay_factor,
        "first": min(overs, default=None),
        "worst": json_number(worst),
        "course": {
            key: json_number({"arm": [d[key] for d in of_arm], "control": [d[key] for d in of_control]})
            for key in QUANTITIES
        },
    }
