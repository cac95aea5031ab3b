"""``logitless ab``: the same training with two or more losses, each in a fresh process, and whether they agree.

All arms have the same seed, warm start and problems, and the same noise for their sampling; only keys of ``train.loss``
differ. Without ``ab.arms`` there are two, ``baseline`` and ``kernel``, which differ in ``train.loss.backend`` alone.
:mod:`logitless.train.compare` has the tests.

The result, ``<run_dir>/ab.json``::

    {"kind": "ab", "name": ..., "config": {...},
     "arms": {name: {"metrics": [one record a step, as in metrics.jsonl], "summary": {as in summary.json}}},
     "ratios": {"step_time": kernel / baseline, "update_time": ..., "temporaries": ..., "device_peak": ... or null},
     "agreement": {"agree": bool, "losses_agree": bool, "rewards_agree": bool, "kl_agree": bool or null,
                   "loss_steps": n, "loss_difference": max, "loss_tolerance": ..., "reward_difference": D,
                   "reward_standard_error": ..., "reward_limit": ..., the same of "kl" and "kl_k1" where measured,
                   "first_difference": first step with other tokens or null, "test": text}}

With ``ab.arms``, the first arm is the baseline, and ``ratios`` and ``agreement`` hold one such mapping for each of the
others, by its name.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from logitless.tools.config import ConfigError
from logitless.train.compare import agreement, agreements, all_agree, block_mean, curve, ratios, steps_of, table
from logitless.train.config import Loss, TrainConfig, save
from logitless.train.config_check import check
from logitless.train.loop import Say, finished, read_records, run_folder, say_to_stderr

__all__ = [
    "ArmFailed", "agreement", "agreements", "all_agree", "arms_of", "block_mean", "curve", "ratios", "run", "table",
]  # fmt: skip


class ArmFailed(RuntimeError):
    """An arm did not finish; ``code`` is its exit code."""

    def __init__(self, name: str, code: int, detail: str):
        self.code = code if code > 0 else 3
        super().__init__(f"arm {name} ended with exit code {code}{detail}")


def arms_of(config: TrainConfig) -> dict[str, TrainConfig]:
    """The arms' configurations, the baseline first: they differ in the loss and in where they are kept."""
    folder = run_folder(config)
    if config.kernel.enabled is not None:
        raise ConfigError("kernel.enabled: an A/B sets the backend of its arms; use ab.baseline and ab.kernel")
    out: dict[str, TrainConfig] = {}
    for name, loss in _losses(config).items():
        arm = dataclasses.replace(
            config,
            run_dir=str(folder / name),
            train=dataclasses.replace(config.train, loss=loss),
            warm_start=dataclasses.replace(config.warm_start, cache=config.warm_start.cache or str(folder)),
        )
        try:
            check(arm)
        except ConfigError as error:
            raise ConfigError(f"arm {name}: {error}") from None
        twin = next((n for n, other in out.items() if other.train.loss == loss), None)
        if twin is not None:
            raise ConfigError(f"ab.arms: {twin} and {name} are the same, {loss}; each arm needs a loss of its own")
        out[name] = arm
    return out


def _losses(config: TrainConfig) -> dict[str, Loss]:
    """``train.loss`` of each arm."""
    shared = config.train.loss
    if config.ab.arms:
        return {name: _with_overrides(name, shared, own) for name, own in config.ab.arms.items()}
    kernel = config.ab.kernel or shared.backend
    if kernel == config.ab.baseline:
        raise ConfigError(f"ab.kernel: both arms would use {kernel!r}; set ab.kernel or train.loss.backend")
    # The baseline is dense: a sparse backward is the kernel's.
    baseline = dataclasses.replace(shared, backend=config.ab.baseline, sparse_backward="off")
    return {"baseline": baseline, "kernel": dataclasses.replace(shared, backend=kernel)}


def _with_overrides(name: str, shared: Loss, own: dict[str, Any]) -> Loss:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(shared), own))  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        raise ConfigError(f"ab.arms.{name}.{key}: {str(error).splitlines()[0]}") from None


def run(config: TrainConfig, *, resume: bool = False, say: Say = say_to_stderr) -> dict[str, Any]:
    """Run all arms, compare them with the first, and write ``ab.json``."""
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
    result |= comparison(config, arms, result["arms"])
    (folder / "ab.json").write_text(json.dumps(result) + "\n")
    return result


def comparison(config: TrainConfig, arms: dict[str, TrainConfig], done: dict[str, Any]) -> dict[str, Any]:
    """``ratios`` and ``agreement`` of every arm with the first; of the two default arms, without a name before them."""
    first, *others = arms
    sparse = {name: arm.train.loss.sparse_backward != "off" for name, arm in arms.items()}
    by_arm = {name: ratios(done[first]["summary"], done[name]["summary"]) for name in others}
    agree = {
        name: agreement(config, done[first]["metrics"], done[name]["metrics"], sparse=sparse[first] or sparse[name])
        for name in others
    }
    if not config.ab.arms:
        return {"ratios": by_arm["kernel"], "agreement": agree["kernel"]}
    return {"ratios": by_arm, "agreement": agree}


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
            loss = arm.train.loss
            sparse = "" if loss.sparse_backward == "off" else f", sparse_backward={loss.sparse_backward}"
            say(f"arm {name}: train.loss.backend={loss.backend}{sparse}")
            if resume and finished(arm):
                say(f"arm {name}: complete already")
                continue
            started[name] = _start(name, arm, resume)
            if not parallel:
                _wait(name, started[name], arm)
            elif arm.warm_start.steps:  # the first arm makes the warm start, the others find it
                while started[name].poll() is None and not (Path(arm.warm_start.cache) / "warm_start").exists():
                    time.sleep(0.2)
        _watch({name: arms[name] for name in started}, started, say)
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
    while (
        started
        and all(p.poll() is None for p in started.values())
        and time.monotonic() - begin < min(a.ab.timeout_s for a in arms.values())
    ):
        time.sleep(0.2)
        if time.monotonic() - last > 20:
            last = time.monotonic()
            steps = {n: len(steps_of(read_records(Path(a.run_dir) / "metrics.jsonl"))) for n, a in arms.items()}
            say(", ".join(f"{n} {done}/{arms[n].train.steps}" for n, done in steps.items()) + " steps")


def _wait(name: str, process: subprocess.Popen[bytes], arm: TrainConfig) -> None:
    seconds, log = arm.ab.timeout_s, Path(arm.run_dir).parent / f"{name}.log"
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise ArmFailed(name, 3, f": stopped after ab.timeout_s = {seconds}; continue with --resume") from None
    if code:
        raise ArmFailed(name, code, f", see {log}" if log.exists() else ", see its message above")
