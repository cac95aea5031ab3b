"""A run: its folder, its records, and how it stops and goes on.

    <run_dir>/config.yaml     the resolved configuration
    <run_dir>/metrics.jsonl   one record a step (docs/training.md explains every key)
    <run_dir>/samples.jsonl   some completions of each evaluation
    <run_dir>/checkpoints/    see checkpoints.py
    <run_dir>/summary.json    written at the end

A step depends on the state, the seed and its number alone. A resumed run drops the records of steps after its
checkpoint and computes them again: all that does not come from a clock is the same to the bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from logitless.tools import timing
from logitless.tools.tracking import Tracker
from logitless.train import checkpoints
from logitless.train.config import ConfigError, TrainConfig, load, save
from logitless.train.model import num_params
from logitless.train.programs import device_peak_bytes
from logitless.train.progress import Progress
from logitless.train.records import Rollouts, run_numbers
from logitless.train.task import build_task
from logitless.train.trainer import Trainer
from logitless.train.update import Policy, State
from logitless.train.warm_start import warm_start

FREE_ON_RESUME = ("run_dir", "checkpoint", "samples", "ab", "wandb_mode", "wandb_project", "eval", "warm_start.cache")
"""Keys that may change between a run and its continuation."""
CLOCK_PREFIXES = ("time/", "throughput/", "memory/")
"""Metrics that differ from run to run."""

Say = Callable[[str], None]


class TrainingFailed(RuntimeError):
    """The run cannot go on."""


class Stopped(Exception):
    """A signal asked the run to stop; its state is saved."""

    def __init__(self, number: int, saved: int | None):
        self.number, self.saved = number, saved
        super().__init__(f"stopped by {signal.Signals(number).name}")


def say_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Signals:
    """Remembers SIGTERM and SIGINT until the step is over; a second SIGINT ends the process at once."""

    def __enter__(self) -> _Signals:
        self.received: int | None = None
        self._before = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):  # not the main thread: whoever started it handles signals
                self._before[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: Any) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def run_folder(config: TrainConfig) -> Path:
    """Where the run lives."""
    return Path(config.run_dir or f"runs/{config.name}")


def _check_folder(config: TrainConfig, resume: bool, say: Say) -> Path:
    """The run's folder, refused where it holds another run than the one to go on with."""
    folder = run_folder(config)
    earlier = folder / "config.yaml"
    if earlier.exists():
        if not resume:
            raise ConfigError(
                f"run_dir: {folder} holds a run already; continue it with --resume, or choose another run_dir"
            )
        _check_same(load(earlier), config, folder)
    elif resume:
        say(f"--resume: no run in {folder} yet, starting one")
    return folder


def finished(config: TrainConfig) -> bool:
    """Whether the run's folder holds all of this run: another run's folder is refused."""
    folder = run_folder(config)
    if not (folder / "config.yaml").exists() or not (folder / "summary.json").exists():
        return False
    _check_same(load(folder / "config.yaml"), config, folder)
    steps = [r for r in read_records(folder / "metrics.jsonl") if "train/loss" in r]
    return len(steps) == config.train.steps == json.loads((folder / "summary.json").read_text())["steps"]


def _open_folder(config: TrainConfig, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save(config, folder / "config.yaml")
    except OSError as error:
        raise ConfigError(f"run_dir: {folder} cannot be written ({error})") from None


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat


def _check_same(before: TrainConfig, now: TrainConfig, folder: Path) -> None:
    """A continuation has the configuration of its run; else its metrics would be those of neither."""
    a, b = (_flat(dataclasses.asdict(c)) for c in (before, now))
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) != b.get(key) and not any(key == f or key.startswith(f + ".") for f in FREE_ON_RESUME):
            raise ConfigError(
                f"{key}: {b.get(key)!r}, but the run in {folder} has {a.get(key)!r}; "
                f"resume it with --config {folder / 'config.yaml'}, or start another run_dir"
            )


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records of a JSON-lines file; a last line that a kill cut off is left out."""
    records = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return records


def _keep_records(path: Path, last_step: int) -> None:
    """Drop the records of steps after ``last_step``."""
    kept = [r for r in read_records(path) if r["step"] <= last_step]
    if path.exists():
        _replace(path, "".join(json.dumps(r) + "\n" for r in kept))


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    os.replace(beside, path)


def run(config: TrainConfig, *, resume: bool = False, say: Say = say_to_stderr) -> dict[str, Any]:
    """Train as configured and return the summary, which is also in ``summary.json``."""
    begin = time.perf_counter()
    folder = _check_folder(config, resume, say)
    task = build_task(config)
    trainer = Trainer(config, task)
    _open_folder(config, folder)
    params = task.load_params()
    if config.warm_start.steps:
        params = warm_start(config, task, params, folder, say)
    parameters = num_params(params)
    state, frozen = trainer.initial(params)
    del params
    start, skipped_in_a_row = 0, 0
    saved = folder / "checkpoints"
    if resume:
        found = checkpoints.restore(saved, state, say)
        if found is None:
            say(f"--resume: no checkpoint in {saved}, starting from step 0")
        else:
            start, state, notes = found
            skipped_in_a_row = notes["skipped_in_a_row"]
            say(f"resumed after step {start}")
            if start >= config.train.steps and (folder / "summary.json").exists():
                say("the run is complete")
                return json.loads((folder / "summary.json").read_text())
    compiling = time.perf_counter()
    trainer.compile(state, frozen)
    compile_s = time.perf_counter() - compiling
    for name in ("metrics.jsonl", "samples.jsonl"):
        _keep_records(folder / name, start if start else -1)
    tracker = Tracker(
        folder / "metrics.jsonl",
        mode=config.wandb_mode,
        project=config.wandb_project,
        name=config.name,
        config=dataclasses.asdict(config),
    )
    loop = _Loop(config, trainer, folder, tracker, say)
    loop.skipped_in_a_row = skipped_in_a_row
    with _Signals() as signals, Progress(config.train.steps, start) as progress:
        loop.go(state, frozen, start, signals, progress)
    tracker.close()
    summary = loop.summary(parameters, compile_s, time.perf_counter() - begin)
    _replace(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    return summary


class _Loop:
    """The steps of one process."""

    def __init__(self, config: TrainConfig, trainer: Trainer, folder: Path, tracker: Tracker, say: Say):
        self.config, self.trainer, self.folder, self.tracker, self.say = config, trainer, folder, tracker, say
        self.recent: deque[float] = deque(maxlen=10)
        self.skipped_in_a_row = 0
        self.last_saved: int | None = None
        self.checkpoint_times: list[float] = []

    def go(self, state: State, frozen: Policy, start: int, signals: _Signals, progress: Progress) -> None:
        c, total = self.config, self.config.train.steps
        if start == 0 and self._evaluates(0):
            self.tracker.log(self._evaluate(state, frozen, {"step": 0}))
        for step in range(start + 1, total + 1):
            state, record, _ = self.trainer.step(state, frozen, step)
            self._count_skipped(record, step)
            self.recent.append(record["time/train/step_s"])
            record["time/train/step_avg_last10_s"] = sum(self.recent) / len(self.recent)
            record["memory/device_peak_bytes"] = device_peak_bytes()
            if self._evaluates(step):
                self._evaluate(state, frozen, record)
            self.tracker.log(record)
            progress.step(record)
            stop = signals.received is not None
            if c.checkpoint.every and (stop or step == total or step % c.checkpoint.every == 0):
                self._save(step, state)
            if stop and step < total:
                assert signals.received is not None
                raise Stopped(signals.received, self.last_saved)

    def _evaluates(self, step: int) -> bool:
        every = self.config.eval.every
        if not every or self.config.rollout.kind == "random":
            return False
        return step % every == 0 or step == self.config.train.steps

    def _evaluate(self, state: State, frozen: Policy, record: dict[str, Any]) -> dict[str, Any]:
        numbers, rolled = self.trainer.evaluate(state, frozen)
        record.update(numbers)
        self._write_samples(rolled, record["step"])
        return record

    def _write_samples(self, rolled: Rollouts, step: int) -> None:
        with (self.folder / "samples.jsonl").open("a") as file:
            for i, problem in enumerate(self.trainer.task.held_out[: self.config.samples]):
                row = dict(step=step, prompt=problem.prompt, answer=problem.answer, completion=rolled.texts[i])
                file.write(json.dumps({**row, "reward": float(rolled.rewards[i])}) + "\n")

    def _count_skipped(self, record: dict[str, Any], step: int) -> None:
        if not record["train/skipped"]:
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        self.say(f"WARNING: step {step}: loss or gradient not finite; {record['train/skipped']} update(s) skipped")
        if self.skipped_in_a_row >= self.config.train.max_skipped:
            self.tracker.log(record)
            raise TrainingFailed(
                f"{self.skipped_in_a_row} steps in a row had a loss or gradient that is not finite "
                f"(train.max_skipped); the last good weights are those of step {self.last_saved}. Lower "
                "train.learning_rate, or look at the rewards and log-probabilities in metrics.jsonl"
            )

    def _save(self, step: int, state: State) -> None:
        start = time.perf_counter()
        notes = {"skipped_in_a_row": self.skipped_in_a_row}
        checkpoints.save(self.folder / "checkpoints", step, state, notes, self.config.checkpoint.keep)
        self.last_saved = step
        self.checkpoint_times.append(time.perf_counter() - start)

    def summary(self, parameters: int, compile_s: float, seconds: float) -> dict[str, Any]:
        """What the run came to; over all its records, those before a resume included."""
        numbers = run_numbers(read_records(self.folder / "metrics.jsonl"))
        t, times = self.trainer, self.checkpoint_times
        programs = (t.update_program, t.score_program, t.rollout_program, t.eval_program)
        return {
            "name": self.config.name,
            "parameters": parameters,
            **numbers,
            "time/compile_s": compile_s,
            "time/checkpoint_s": sum(times) / len(times) if times else None,
            "time/total_s": seconds,
            "memory/device_peak_bytes": device_peak_bytes(),
            "memory/update_temporaries_bytes": (t.update_program.peak_memory() or {}).get("temporaries"),
            "memory/compiler": {p.name: p.peak_memory() for p in programs},
            "loss_backend": t.backend,
            "environment": timing.environment(),
        }
