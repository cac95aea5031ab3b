"""``logitless ab``: the same training twice, with two losses, each in a fresh process, and whether they agree.

Both arms have the same seed, warm start and problems, and the same noise for their sampling; ``train.loss.backend`` is
the only line that differs. Rounding differs too, though, and the first sampled token that it flips makes two runs of
one. So two tests are made, and both must hold:

1. While both arms have sampled the same tokens (``rollout/tokens_crc32``), up to ``ab.loss_steps`` steps: every loss of
   a step (each inner update) differs by at most ``tolerance * max(1, |loss|)``.
2. Over all steps, the mean difference D of the two rewards is within ``ab.reward_sigmas`` standard errors of zero, or
   within ``ab.reward_tolerance``. The standard error is that of ten block means, for neighbouring steps are not
   independent. With random rollouts the rewards are drawn, not earned: this test then says nothing, and the first one
   runs over all ``loss_steps``.

The result, ``<run_dir>/ab.json``::

    {"kind": "ab", "name": ..., "config": {...},
     "arms": {name: {"metrics": [one record a step, as in metrics.jsonl], "summary": {as in summary.json}}},
     "ratios": {"step_time": kernel / baseline, "update_time": ..., "temporaries": ..., "device_peak": ... or null},
     "agreement": {"agree": bool, "losses_agree": bool, "rewards_agree": bool, "loss_steps": n, "loss_difference": max,
                   "loss_tolerance": ..., "reward_difference": D, "reward_standard_error": ...,
                   "reward_limit": ..., "first_difference": first step with other tokens or null, "test": text}}
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from logitless.bench.config import ConfigError
from logitless.train.config import TrainConfig, save
from logitless.train.config_check import check
from logitless.train.loop import Say, read_records, run_folder, say_to_stderr

BLOCKS = 10


class ArmFailed(RuntimeError):
    """An arm did not finish; ``code`` is its exit code."""

    def __init__(self, name: str, code: int, detail: str):
        self.code = code if code > 0 else 3
        super().__init__(f"arm {name} ended with exit code {code}{detail}")


def arms_of(config: TrainConfig) -> dict[str, TrainConfig]:
    """The two configurations: they differ in the loss's backend and in where they are kept."""
    folder = run_folder(config)
    kernel = config.ab.kernel or config.train.loss.backend
    backends = {"baseline": config.ab.baseline, "kernel": kernel}
    if config.kernel.enabled is not None:
        raise ConfigError("kernel.enabled: an A/B sets the backend of both arms; use ab.baseline and ab.kernel")
    if backends["baseline"] == backends["kernel"]:
        raise ConfigError(f"ab.kernel: both arms would use {kernel!r}; set ab.kernel or train.loss.backend")
    out = {}
    for name, backend in backends.items():
        loss = dataclasses.replace(config.train.loss, backend=backend)
        arm = dataclasses.replace(
            config,
            run_dir=str(folder / name),
            train=dataclasses.replace(config.train, loss=loss),
            warm_start=dataclasses.replace(config.warm_start, cache=config.warm_start.cache or str(folder)),
        )
        check(arm)
        out[name] = arm
    return out


def run(config: TrainConfig, *, resume: bool = False, say: Say = say_to_stderr) -> dict[str, Any]:
    """Run both arms, compare them, and write ``ab.json``."""
    folder = run_folder(config)
    arms = arms_of(config)
    if (folder / "ab.json").exists() and not resume:
        raise ConfigError(f"run_dir: {folder} holds an A/B already; choose another run_dir, or continue with --resume")
    _run_arms(arms, resume, config.ab.parallel, say)
    result: dict[str, Any] = {"kind": "ab", "name": config.name, "config": dataclasses.asdict(config), "arms": {}}
    for name, arm in arms.items():
        own = Path(arm.run_dir)
        result["arms"][name] = {
            "metrics": read_records(own / "metrics.jsonl"),
            "summary": json.loads((own / "summary.json").read_text()),
        }
    result["ratios"] = ratios(*(a["summary"] for a in result["arms"].values()))
    result["agreement"] = agreement(config, *(a["metrics"] for a in result["arms"].values()))
    (folder / "ab.json").write_text(json.dumps(result) + "\n")
    return result


def _start(name: str, arm: TrainConfig, resume: bool) -> subprocess.Popen[bytes]:
    folder = Path(arm.run_dir)
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.parent / f"{name}.yaml"
    save(arm, file)
    # An A/B that was cut short may have one arm without a folder: that one simply starts.
    again = ["--resume"] if resume and (folder / "config.yaml").exists() else []
    command = [sys.executable, "-m", "logitless", "train", "--config", str(file), *again]
    if not arm.ab.parallel:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)
    with (folder.parent / f"{name}.log").open("ab") as log:  # two progress bars on one terminal are none
        return subprocess.Popen(command, stdout=log, stderr=log)


def _run_arms(arms: dict[str, TrainConfig], resume: bool, parallel: bool, say: Say) -> None:
    """Run the arms one after the other, or side by side; stop them all where one fails or a signal asks for it."""
    started: dict[str, subprocess.Popen[bytes]] = {}

    def stop(number: int, _: Any) -> None:
        for process in started.values():
            process.send_signal(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        for name, arm in arms.items():
            say(f"arm {name}: train.loss.backend={arm.train.loss.backend}")
            started[name] = _start(name, arm, resume)
            if not parallel:
                _wait(name, started[name], arm)
            elif arm.warm_start.steps:  # the first arm makes the warm start, the others find it
                while started[name].poll() is None and not (Path(arm.warm_start.cache) / "warm_start").exists():
                    time.sleep(0.2)
        _watch(arms, started, say)
        for name, process in started.items():
            _wait(name, process, arms[name])
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in started.values():
            if process.poll() is None:
                process.terminate()
                process.wait()


def _watch(arms: dict[str, TrainConfig], started: dict[str, subprocess.Popen[bytes]], say: Say) -> None:
    """Say how far parallel arms are, until one of them ends."""
    begin = last = time.monotonic()
    while all(p.poll() is None for p in started.values()) and time.monotonic() - begin < min(
        a.ab.timeout_s for a in arms.values()
    ):
        time.sleep(0.2)
        if time.monotonic() - last > 20:
            last = time.monotonic()
            steps = {n: len(_steps(read_records(Path(a.run_dir) / "metrics.jsonl"))) for n, a in arms.items()}
            say(", ".join(f"{n} {done}/{arms[n].train.steps}" for n, done in steps.items()) + " steps")


def _wait(name: str, process: subprocess.Popen[bytes], arm: TrainConfig) -> None:
    seconds, log = arm.ab.timeout_s, Path(arm.run_dir).parent / f"{name}.log"
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise ArmFailed(name, 3, f": stopped after ab.timeout_s = {seconds}; continue with --resume") from None
    if code:
        raise ArmFailed(name, code, f", see {log}" if log.exists() else ", see its message above")


def ratios(baseline: dict[str, Any], kernel: dict[str, Any]) -> dict[str, float | None]:
    """Kernel over baseline."""

    def ratio(key: str) -> float | None:
        a, b = baseline.get(key), kernel.get(key)
        return b / a if a and b else None

    return {
        "step_time": ratio("time/train/step_avg_last10_s"),
        "update_time": ratio("time/update_s/last10"),
        "temporaries": ratio("memory/update_temporaries_bytes"),
        "device_peak": ratio("memory/device_peak_bytes"),
    }


def agreement(config: TrainConfig, a: list[dict[str, Any]], b: list[dict[str, Any]]) -> dict[str, Any]:
    """Both tests of the module's docstring, on the records of the two arms."""
    pairs = list(zip(_steps(a), _steps(b), strict=False))
    if not pairs:
        raise ConfigError("ab: the arms have no step in common to compare")
    c = config.ab
    low = "bfloat16" in (config.model.compute_dtype, config.train.loss.logits_dtype)
    tolerance = c.loss_tolerance or (2e-2 if low else 1e-4)
    split = next((x["step"] for x, y in pairs if x["rollout/tokens_crc32"] != y["rollout/tokens_crc32"]), None)
    same = [(x, y) for x, y in pairs[: c.loss_steps] if split is None or x["step"] < split]
    losses = [_loss_difference(x["train/losses"], y["train/losses"]) for x, y in same]
    differences = [y["train/reward"] - x["train/reward"] for x, y in pairs]
    mean, error = block_mean(differences)
    limit = max(c.reward_tolerance, c.reward_sigmas * error)
    losses_agree = bool(losses) and max(losses) <= tolerance
    rewards_agree = abs(mean) <= limit
    return {
        "agree": losses_agree and rewards_agree,
        "losses_agree": losses_agree,
        "rewards_agree": rewards_agree,
        "loss_steps": len(losses),
        "loss_difference": max(losses, default=None),
        "loss_tolerance": tolerance,
        "reward_difference": mean,
        "reward_standard_error": error,
        "reward_limit": limit,
        "first_difference": split,
        "test": (
            f"losses of the first {len(losses)} steps (those with the same tokens, at most {c.loss_steps}) within "
            f"{tolerance:g} x max(1, |loss|); mean reward difference over {len(pairs)} steps within "
            f"max({c.reward_tolerance:g}, {c.reward_sigmas:g} standard errors of {BLOCKS} block means)"
        ),
    }


def _steps(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in records if "train/loss" in r]


def _loss_difference(a: list[float | None], b: list[float | None]) -> float:
    """The largest relative difference of a step's losses; one that is missing in one arm alone is infinite."""
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        if x is None or y is None:
            worst = worst if x is y else math.inf
        else:
            worst = max(worst, abs(x - y) / max(1.0, abs(x)))
    return worst


def block_mean(values: list[float]) -> tuple[float, float]:
    """Mean, and its standard error from the means of up to ten consecutive blocks."""
    n = min(BLOCKS, len(values))
    edges = [round(i * len(values) / n) for i in range(n + 1)]
    means = [sum(values[i:j]) / (j - i) for i, j in itertools.pairwise(edges)]
    overall = sum(values) / len(values)
    if n < 2:
        return overall, 0.0
    centre = sum(means) / n
    return overall, math.sqrt(sum((m - centre) ** 2 for m in means) / (n - 1) / n)


def table(result: dict[str, Any]) -> str:
    """The comparison as text."""
    rows = (
        ("sampled reward, first 10 steps", "train/reward_first10", 1, ".3f"),
        ("sampled reward, last 10 steps", "train/reward_last10", 1, ".3f"),
        ("held-out reward at the end", "eval/last", 1, ".3f"),
        ("step, mean of the last 10 (s)", "time/train/step_avg_last10_s", 1, ".3f"),
        ("update phase, last 10 (s)", "time/update_s/last10", 1, ".3f"),
        ("update's temporaries (MiB)", "memory/update_temporaries_bytes", 2**20, ",.1f"),
        ("device peak (MiB)", "memory/device_peak_bytes", 2**20, ",.1f"),
    )
    summaries = {name: arm["summary"] for name, arm in result["arms"].items()}
    heads = [f"{name} ({s['loss_backend']})" for name, s in summaries.items()]
    lines = [f"{result['name']:32s}" + "".join(f"{h:>24s}" for h in heads) + f"{'ratio':>9s}"]
    for label, key, unit, form in rows:
        values = [s.get(key) for s in summaries.values()]
        if all(v is None for v in values):
            continue
        cells = "".join(f"{'-' if v is None else format(v / unit, form):>24s}" for v in values)
        both = all(values)
        lines.append(f"{label:32s}{cells}" + (f"{values[1] / values[0]:9.3f}" if both else ""))
    a = result["agreement"]
    lines.append(f"test: {a['test']}")
    if a["loss_steps"]:
        lines.append(
            f"  losses: largest difference {a['loss_difference']:.1e} "
            f"({'within' if a['losses_agree'] else 'ABOVE'} {a['loss_tolerance']:g})"
        )
    else:
        lines.append("  losses: the arms sampled different tokens from the first step on: NOT COMPARABLE")
    lines.append(
        f"  rewards: mean difference {a['reward_difference']:+.4f} "
        f"({'within' if a['rewards_agree'] else 'ABOVE'} {a['reward_limit']:.4f})"
        + ("" if a["first_difference"] is None else f"; rounding flips a token at step {a['first_difference']}")
    )
    lines.append("the arms agree" if a["agree"] else "THE ARMS DISAGREE")
    return "\n".join(lines)


def curve(result: dict[str, Any], width: int = 10) -> str:
    """Both reward curves as text: the mean of every ``width`` steps."""
    lines = [f"sampled reward, mean of every {width} steps:"]
    for name, arm in result["arms"].items():
        rewards = [r["train/reward"] for r in _steps(arm["metrics"])]
        blocks = [rewards[i : i + width] for i in range(0, len(rewards), width)]
        lines.append(f"  {name:10s}" + "".join(f"{sum(b) / len(b):7.3f}" for b in blocks))
    return "\n".join(lines)
