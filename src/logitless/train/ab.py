"""``logitless ab``: the same training with two or more losses, each in a fresh process, and whether they agree.

All arms have the same seed, warm start and problems, and the same noise for their sampling; only keys of ``train.loss``
differ. Without ``ab.arms`` there are two, ``baseline`` and ``kernel``, which differ in ``train.loss.backend`` alone.
Every arm runs freely; with ``ab.replay`` all arms and a control also update on the completions that the baseline
sampled. :mod:`logitless.train.compare` has the tests.

The result, ``<run_dir>/ab.json``::

    {"kind": "ab", "name": ..., "config": {...}, "parallel": bool,
     "arms": {name: {"metrics": [one record a step, as in metrics.jsonl], "summary": {as in summary.json}}},
     "control": the same of the second baseline, with ab.control,
     "ratios": {"step_time": kernel / baseline, "update_time": ..., "temporaries": ..., "device_peak": ... or null},
     "agreement": {"agree": true, false or null (not judged), "decided_by": "replay", "control", "seeds" or "nothing",
                   "verdict": text, "test": text, "first_difference": first step with other tokens or null,
                   "replay_agree": ..., "replay_loss_deviation": ..., the rest of compare.agreement},
     "replay": {arm: the deviations of all steps, as of replay.judge},
     "same_completions": {arm: update, step and peak on the baseline's completions, as of compare.same_completions}}

With ``ab.arms``, the first arm is the baseline, and ``ratios`` and ``agreement`` hold one such mapping for each of the
others, by its name. Arms that ran at the same time (``ab.parallel``) have no times in this file: none is a measurement.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from logitless.lab.signals import Hold, Stop, held
from logitless.lab.tools.compiled import folder_of_programs
from logitless.lab.tools.progress import EVERY_S, Progress, Say, duration, of_step
from logitless.train import recorded
from logitless.train import replay as replay_test
from logitless.train.ab_plan import CONTROL, Plan, arms_of, plan_of
from logitless.train.ab_text import curve, table, verdict
from logitless.train.compare import agreement, agreements, disagreeing, ratios, same_completions
from logitless.train.config import ConfigError, TrainConfig, as_yaml, load, save
from logitless.train.files import replace
from logitless.train.folder import check_same, finished, locked, read_records, read_summary, run_folder
from logitless.train.loop import say_to_stderr, steps_of

__all__ = [
    "ArmFailed", "agreement", "agreements", "arms_of", "curve", "disagreeing", "ratios", "run", "table",
    "verdict",
]  # fmt: skip

CLOCKS = ("time/", "throughput/")
"""Metrics without meaning if another arm ran in parallel."""


class ArmFailed(RuntimeError):
    """An arm did not finish; ``code`` is its exit code, and ``stopped`` whether it can be continued."""

    def __init__(self, name: str, code: int, detail: str, stopped: bool = False):
        self.code = code if code > 0 else 3
        self.stopped = stopped or self.code > 128
        super().__init__(f"arm {name} ended with exit code {code}{detail}")


def run(config: TrainConfig, *, resume: bool = False, say: Say = say_to_stderr) -> dict[str, Any]:
    """Run all arms, compare them with the first, and write ``ab.json``."""
    folder, plan = run_folder(config), plan_of(config)
    with locked(folder):
        if (folder / "ab.json").exists() and not resume:
            raise ConfigError(
                f"run_dir: {folder} holds an A/B already; choose another run_dir, or continue with --resume"
            )
        if (folder / "ab.yaml").exists():
            check_same(load(folder / "ab.yaml"), config, folder)
        replace(folder / "ab.yaml", as_yaml(config))
        every = [*plan.free.values(), *plan.replays.values()]
        with Progress(sum(map(_steps_expected, every)), say=say) as progress:
            rest = dict(plan.free)
            base = {} if config.ab.parallel else {name: rest.pop(name) for name in [next(iter(plan.arms))]}
            for arms in (base, plan.replays, rest) if base else (rest, plan.replays):  # the sharp test before the rest
                replays = arms is plan.replays
                told = (lambda text: say(f"replay: {text}")) if replays else say
                _run_arms(arms, resume, replays and config.ab.turns, told, progress)
        result: dict[str, Any] = {
            "kind": "ab",
            "name": config.name,
            "config": dataclasses.asdict(config),
            "parallel": config.ab.parallel,
            "arms": {name: _outcome(arm) for name, arm in plan.arms.items()},
        }
        if config.ab.control:
            result["control"] = _outcome(plan.free[CONTROL])
        result |= comparison(config, plan, result["arms"])
        replace(folder / "ab.json", json.dumps(result) + "\n")
    return result


def _outcome(arm: TrainConfig) -> dict[str, Any]:
    """Metrics and summary of a run; without times if another arm ran in parallel."""
    folder = Path(arm.run_dir)
    metrics, summary = read_records(folder / "metrics.jsonl"), json.loads((folder / "summary.json").read_text())

    def own(values: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in values.items() if not (arm.ab.parallel and k.startswith(CLOCKS))}

    return {"metrics": [own(r) for r in metrics], "summary": own(summary)}


def comparison(config: TrainConfig, plan: Plan, done: dict[str, Any]) -> dict[str, Any]:
    """``ratios`` and ``agreement`` of every arm with the first; of the two default arms, without a name before them."""
    first, *others = plan.arms
    replays: dict[str, Any] = {}
    approximate = {n: replay_test.approximate(plan.arms[first].train.loss, plan.arms[n].train.loss) for n in others}

    def traces(name: str) -> list[recorded.Trace]:
        return recorded.load_traces(Path((plan.replays.get(name) or plan.arms[name]).run_dir))

    if config.ab.replay:
        base, control = traces(first), traces(CONTROL)
        for name in others:
            loss = plan.arms[name].train.loss
            forward = approximate[name] is not None
            if forward and loss.logits_dtype != plan.arms[first].train.loss.logits_dtype:
                continue
            replays[name] = replay_test.judge(config, base, control, traces(name), forward_only=forward)

    def free(name: str) -> list[dict[str, Any]]:
        return read_records(Path(plan.free[name].run_dir) / "metrics.jsonl")

    suffixes = ["", *(f".seed{i}" for i in range(1, config.ab.seeds))]
    agree = {
        name: agreement(
            config,
            done[first]["metrics"],
            done[name]["metrics"],
            replay=replays.get(name),
            approximate=approximate[name],
            control=free(CONTROL) if config.ab.control else None,
            seeds=[(free(first + s), free(name + s)) for s in suffixes] if config.ab.seeds > 1 else (),
        )
        for name in others
    }
    by_arm = {name: ratios(done[first]["summary"], done[name]["summary"]) for name in others}
    out: dict[str, Any] = {"ratios": by_arm, "agreement": agree}
    if not config.ab.arms:
        out = {"ratios": by_arm["kernel"], "agreement": agree["kernel"]}
    if config.ab.replay and first in plan.replays:
        records = {name: read_records(Path(arm.run_dir) / "metrics.jsonl") for name, arm in plan.replays.items()}
        summaries = {name: read_summary(Path(arm.run_dir)) or {} for name, arm in plan.free.items()}
        peaks = {name: summary.get("memory/device_peak_bytes") for name, summary in summaries.items()}
        out["same_completions"] = same_completions(config, done[first]["metrics"], first, records, peaks)
    return {**out, "replay": replays}


def _start(arms: dict[str, TrainConfig], resume: bool) -> subprocess.Popen[bytes]:
    """A process for an arm, or for the replays of several in turn; its log is the first one's."""
    name, arm = next(iter(arms.items()))
    files = [Path(arm.run_dir).parent / f"{name}.yaml" for name in arms]
    files[0].parent.mkdir(parents=True, exist_ok=True)
    for one, file in zip(arms.values(), files, strict=True):
        save(one, file)
    if len(arms) > 1:
        for one in arms.values():  # records of a stopped replay do not belong to this replay
            (Path(one.run_dir) / "metrics.jsonl").unlink(missing_ok=True)
        module = ["logitless.train.turns", *map(str, files)]
    else:
        # After an interrupted A/B an arm may have no folder yet: such an arm starts from the beginning.
        again = ["--resume"] if resume and (Path(arm.run_dir) / "config.yaml").exists() else []
        module = ["logitless", "train", "--config", str(files[0]), *again]
    # A replay has its arm's programs: a process compiles them, and later processes read the cache.
    compiled = {
        "JAX_COMPILATION_CACHE_DIR": str(folder_of_programs() or Path(arm.warm_start.cache).absolute() / "compiled")
    }
    # JAX alone takes three quarters of a GPU's memory.
    limits = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    command, environment = [sys.executable, "-m", *module], {**compiled, **limits, **os.environ}
    # In a separate session: a Ctrl-C reaches the child once, through this process.
    with _log(arm, name).open("ab") as log:  # this process shows progress for all arms
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def _log(arm: TrainConfig, name: str) -> Path:
    """What the arm's process says."""
    return Path(arm.run_dir).parent / f"{name}.log"


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _steps_expected(arm: TrainConfig) -> int:
    """Before a replay has anything to replay."""
    steps = arm.train.steps
    return min(steps, arm.ab.replay_steps or steps) if arm.rollout.replay else steps


def _course(arm: TrainConfig) -> tuple[int, dict[str, Any]]:
    """How many steps the arm's run has recorded, and the last of them."""
    path = Path(arm.run_dir) / "metrics.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    steps = [line for line in lines if b'"train/loss"' in line and line.endswith(b"}")]
    return len(steps), json.loads(steps[-1]) if steps else {}


def _run_arms(arms: dict[str, TrainConfig], resume: bool, turns: bool, say: Say, progress: Progress) -> None:
    """Run the arms one after another, in parallel, or alternating; stop all arms after a failure or a signal."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    before = progress.done  # by the arms of an earlier call, and by those that were complete
    try:
        with held("step of each arm") as hold:
            for some in [arms] if turns else [{name: arm} for name, arm in arms.items()]:
                for name, arm in some.items():
                    loss = arm.train.loss
                    sparse = "" if loss.sparse_backward == "off" else f", sparse_backward={loss.sparse_backward}"
                    say(f"arm {name}: train.loss.backend={loss.backend}{sparse}")
                if resume and all(finished(arm, steps_of(arm)) for arm in some.values()):
                    say(f"arm {', '.join(some)}: complete already")
                    before += sum(map(_steps_expected, some.values()))
                    continue
                started |= dict.fromkeys(some, _start(some, resume))
                if not arm.ab.parallel:
                    _wait(arms, started, hold, say, progress, before)
                elif arm.warm_start.steps:  # the first arm makes the warm start, the others find it
                    cache = Path(arm.warm_start.cache) / "warm_start.safetensors"
                    while started[name].poll() is None and not cache.exists() and hold.received is None:
                        time.sleep(0.2)
            _wait(arms, started, hold, say, progress, before)
    finally:
        for process in set(started.values()):
            if process.poll() is None:
                process.terminate()
                process.wait()


def _show(arms: dict[str, TrainConfig], running: list[str], progress: Progress, done: int) -> str:
    """Update the bar, with a line for each running arm."""
    said, left = [], 0.0
    for name in running:
        arm, log = arms[name], _log(arms[name], name)
        count, last = _course(arm)
        if not last:
            said.append(f"{name}: {_last_words(log) or 'starting'}")
            continue
        said.append(f"{name} {count}/{_steps_expected(arm)}  {of_step(last)}")
        left = max(left, (_steps_expected(arm) - count) * last["time/train/step_avg_last10_s"])
    text = ", ".join(said)
    progress.at(done, text)
    return text + (f"  about {duration(left)} left" if left else "")


def _wait(
    arms: dict[str, TrainConfig],
    started: dict[str, subprocess.Popen[bytes]],
    hold: Hold,
    say: Say,
    progress: Progress,
    before: int,
) -> None:
    """Wait until all arms have ended, or an arm has failed. A signal is passed on once, and what they save waited
    for."""
    begin = last = shown = time.monotonic()
    passed_on = False
    while True:
        codes = {name: process.poll() for name, process in started.items()}
        running = [name for name, code in codes.items() if code is None]
        if hold.received is not None and not passed_on:
            passed_on = True
            for process in {started[name] for name in running}:
                process.send_signal(hold.received)
        failed = [name for name, code in codes.items() if code]
        if failed and not (passed_on and running):
            log = _log(arms[failed[0]], failed[0])
            said = _last_words(log).removesuffix("; continue with --resume")  # which is advice for the arm alone
            raise ArmFailed(failed[0], codes[failed[0]] or 0, f": {said} (all it said: {log})")
        if not running:
            break
        limit = min(arms[name].ab.timeout_s for name in running)
        if time.monotonic() - begin > limit:
            raise ArmFailed(running[0], 3, f": stopped after ab.timeout_s = {limit}", stopped=True)
        if time.monotonic() - shown > 1:
            shown = time.monotonic()
            text = _show(arms, running, progress, before + sum(_course(arms[name])[0] for name in started))
            if not progress.has_bar and shown - last > EVERY_S:
                last = shown
                say(text)
        time.sleep(0.2)
    progress.at(before + sum(_course(arms[name])[0] for name in started))
    if hold.received is not None:
        raise Stop(hold.received)
