"""Whether the arms of an A/B agree, and which test says so.

1. **Replay** (:mod:`logitless.train.replay`): the arms update on the same completions. Where it is on, it decides.
2. **Free runs.** Each arm samples for itself, and two runs of *one* loss drift apart too. ``ab.control`` holds an arm's
   distance from the baseline, root mean square over ten block means of a curve, against ``ab.control_factor`` times
   that of a second baseline. (5 is the 1 % point of a ratio of standard deviations of three independent stretches each:
   neighbouring blocks drift together.) ``ab.seeds`` makes a paired t-test over seeds. Differences below
   ``ab.reward_tolerance``, or ``ab.kl_tolerance`` of the baseline's mean KL, do not count in either.
3. Without either the difference of free runs is reported and not judged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from logitless.train.config import ConfigError, TrainConfig

BLOCKS = 10
CURVES = {"reward": "train/reward", "kl": "train/kl", "kl_k1": "train/kl_k1"}
"""Prefix of the agreement's keys -> the metric."""

Records = list[dict[str, Any]]


def steps_of(records: Records) -> Records:
    """Records of training steps: without the evaluation before the first."""
    return [r for r in records if "train/loss" in r]


def ratios(baseline: dict[str, Any], other: dict[str, Any]) -> dict[str, float | None]:
    """Another arm's summary over the baseline's; a time that was not measured alone is not in it."""

    def ratio(key: str) -> float | None:
        a, b = baseline.get(key), other.get(key)
        return b / a if a and b else None

    return {
        "step_time": ratio("time/train/step_avg_last10_s"),
        "update_time": ratio("time/update_s/last10"),
        "temporaries": ratio("memory/update_temporaries_bytes"),
        "device_peak": ratio("memory/device_peak_bytes"),
    }


def same_completions(
    config: TrainConfig, free: Records, first: str, replays: dict[str, Records], peaks: dict[str, int | None]
) -> dict[str, Any]:
    """Time and memory of every arm on the baseline's completions; ``replays`` are the arms' records, ``first`` is the
    baseline.

    ``update``   seconds
    ``step``     seconds: the rollout of the baseline's free run, and the rest of the replay's step
    ``peak``     bytes of the arm's free run, where the device counts them; an update's program has the shape of the
                 fullest batch, whatever the completions are

    Each has a ``mean`` and a ``ratio`` to the baseline, times also an ``interval`` of the ratio at ``ab.confidence``.
    Steps are compared in pairs, without the first step; the interval's sample is one log-ratio a step.
    """
    drawn = {r["step"]: sum(r.get(f"time/{p}_s") or 0.0 for p in ("rollout", "sync", "reward")) for r in free}
    measured: dict[str, dict[str, list[float]]] = {}
    for name, records in replays.items():
        timed = steps_of(records)[1:]
        measured[name] = {
            "update": [r["time/update_s"] for r in timed],
            "step": [drawn[r["step"]] + r["time/train/step_s"] - r.get("time/rollout_s", 0.0) for r in timed],
        }
        if peak := peaks.get(name):
            measured[name]["peak"] = [float(peak)]
    return {
        name: {key: _against(config, measured[first].get(key, []), found) for key, found in of_arm.items()}
        for name, of_arm in measured.items()
    }


def _against(config: TrainConfig, base: list[float], arm: list[float]) -> dict[str, Any]:
    """Mean of the arm's values; and its ratio to the baseline's, value by value, with an interval."""
    logs = [math.log(y / x) for x, y in zip(base, arm, strict=True) if x > 0 and y > 0]
    out: dict[str, Any] = {"mean": fmean(arm) if arm else None, "ratio": None, "interval": None}
    if logs:
        out["ratio"] = math.exp(fmean(logs))
    if len(logs) > 1:
        centre, _, half = _interval(logs, config.ab.confidence)
        out["interval"] = [math.exp(centre - half), math.exp(centre + half)]
    return out


def block_means(values: Sequence[float]) -> list[float]:
    """Means of up to ten consecutive blocks."""
    n = min(BLOCKS, len(values))
    edges = [round(i * len(values) / n) for i in range(n + 1)]
    return [fmean(values[i:j]) for i, j in itertools.pairwise(edges)]


def _differences(a: Records, b: Records, key: str) -> list[float] | None:
    """Differences by step; ``None`` if only one run has measured ``key``."""
    pairs = [(x.get(key), y.get(key)) for x, y in zip(steps_of(a), steps_of(b), strict=False)]
    if not pairs:
        raise ConfigError("ab: the arms have no step in common to compare")
    if any((x is None) != (y is None) for x, y in pairs):
        return None
    return [y - x for x, y in pairs if x is not None and y is not None]


def _distance(differences: list[float]) -> float:
    means = block_means(differences)
    return math.sqrt(sum(m * m for m in means) / len(means))


def free_runs(config: TrainConfig, a: Records, b: Records, control: Records | None = None) -> dict[str, Any]:
    """Differences between two free runs, and whether a second baseline, if given, drifts as far."""
    out: dict[str, Any] = {}
    for name, key in CURVES.items():
        found = _differences(a, b, key)
        if found == []:
            continue
        out[f"{name}_difference"] = None if found is None else fmean(found)
        out[f"{name}_distance"] = None if found is None else _distance(found)
        if control is not None:
            spread = _differences(a, control, key) or [0.0]
            reach = config.ab.control_factor * _distance(spread)
            limit = max(reach, _tolerance(config, name, [a]))
            out[f"{name}_control_distance"], out[f"{name}_limit"] = _distance(spread), limit
            out[f"{name}_agree"] = found is not None and _distance(found) <= limit
    return out


def _interval(values: Sequence[float], confidence: float) -> tuple[float, float, float]:
    """Mean of the values, standard error, and half of the confidence interval (t-distribution)."""
    from scipy.special import stdtrit

    n, centre = len(values), fmean(values)
    error = math.sqrt(sum((v - centre) ** 2 for v in values) / (n - 1) / n)
    return centre, error, float(stdtrit(n - 1, 0.5 + confidence / 2)) * error


def over_seeds(config: TrainConfig, pairs: Sequence[tuple[Records, Records]]) -> dict[str, Any]:
    """The paired t-test over seeds; ``pairs`` are (baseline, arm) of each seed."""
    n = len(pairs)
    out: dict[str, Any] = {}
    for name, key in CURVES.items():
        found = [_differences(a, b, key) for a, b in pairs]
        if all(f == [] for f in found):
            continue
        means = [fmean(f) for f in found if f]
        if len(means) < n:  # measured in one run and not in the other
            out[f"{name}_difference"], out[f"{name}_agree"] = None, False
            continue
        centre, error, half = _interval(means, config.ab.confidence)
        limit = max(half, _tolerance(config, name, [a for a, _ in pairs]))
        out |= {f"{name}_difference": centre, f"{name}_standard_error": error, f"{name}_limit": limit}
        out[f"{name}_agree"] = abs(centre) <= limit
    return out


def _tolerance(config: TrainConfig, name: str, baselines: Sequence[Records]) -> float:
    if name == "reward":
        return config.ab.reward_tolerance
    known = [r[CURVES[name]] for a in baselines for r in steps_of(a) if r.get(CURVES[name]) is not None]
    # Before the first update the KL is rounding; a share of next to nothing would be no tolerance.
    return config.ab.kl_tolerance * max(abs(fmean(known)) if known else 0.0, 1e-4)


def agreement(
    config: TrainConfig,
    a: Records,
    b: Records,
    *,
    replay: dict[str, Any] | None = None,
    approximate: str | None = None,
    control: Records | None = None,
    seeds: Sequence[tuple[Records, Records]] = (),
) -> dict[str, Any]:
    """All that is known of an arm against the baseline, with the test that decided.

    ``replay`` is :func:`logitless.train.replay.judge`'s result; ``approximate`` says why the arm's gradients are not
    the baseline's by design, so that a replay judges its forward alone.
    """
    free = over_seeds(config, seeds) if len(seeds) > 1 else free_runs(config, a, b, control)
    judged = [free[k] for k in (f"{name}_agree" for name in CURVES) if k in free]
    free_agree = all(judged) if judged else None
    said = None if replay is None else replay["agree"]
    by_replay = said is False or (said is True and approximate is None)
    decided = "replay" if by_replay else ("seeds" if len(seeds) > 1 else "control") if judged else "nothing"
    agree = said if by_replay else free_agree
    idle = replay is not None and said is None
    split = next(
        (
            x["step"]
            for x, y in zip(steps_of(a), steps_of(b), strict=False)
            if x["rollout/tokens_crc32"] != y["rollout/tokens_crc32"]
        ),
        None,
    )
    return {
        "agree": agree,
        "decided_by": decided,
        "verdict": _verdict(agree, decided, "no step of the replay had a gradient" if idle else approximate),
        "test": _test(config, decided, replay, len(seeds), approximate),
        "first_difference": split,
        **_flat_replay(replay),
        "free_agree": free_agree,
        **free,
    }


def _verdict(agree: bool | None, decided: str, reason: str | None) -> str:
    if agree is None:
        why = f"{reason}, and a" if reason else "a"
        return f"cannot be judged: {why} difference of free runs needs ab.control or ab.seeds to be held against"
    return f"{'agrees' if agree else 'DISAGREES'}, by {decided}"


def _test(config: TrainConfig, decided: str, replay: dict[str, Any] | None, seeds: int, approximate: str | None) -> str:
    c = config.ab
    parts = []
    if replay is not None:
        what = "log-probabilities of step 1" if approximate else f"{replay['steps']} steps"
        parts.append(
            f"replay: {what} on the baseline's completions within {c.replay_factor:g} times what a second baseline "
            "with another micro-batch split gives, and rounding"
            + (f" (the rest is not judged: {approximate})" if approximate else "")
        )
    tolerance = f"{c.reward_tolerance:g} of reward, {c.kl_tolerance:g} of the KL"
    if decided == "seeds" or seeds > 1:
        parts.append(
            f"free runs: mean difference over {seeds} seeds within its {c.confidence:g} interval or {tolerance}"
        )
    elif c.control:
        parts.append(f"free runs: curves within {c.control_factor:g} times a second baseline's distance or {tolerance}")
    else:
        parts.append("free runs: reported, not judged")
    return "; ".join(parts)


def _flat_replay(replay: dict[str, Any] | None) -> dict[str, Any]:
    if replay is None:
        return {"replay_agree": None}
    out = {"replay_agree": replay["agree"], "replay_steps": replay["steps"], "replay_first": replay["first"]}
    for key, row in replay["worst"].items():
        out |= {f"replay_{key}_{k}": row[k] for k in ("step", "deviation", "control", "limit")}
    return out


def agreements(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Agreement with the baseline of every other arm, by its name; of both forms that ``ab.json`` has."""
    found = result["agreement"]
    return {list(result["arms"])[1]: found} if "agree" in found else found


def disagreeing(result: dict[str, Any]) -> list[str]:
    """Arms that were judged and do not agree with the baseline."""
    return [name for name, a in agreements(result).items() if a["agree"] is False]
