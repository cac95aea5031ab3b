"""A run: folder, records, stopping and resuming.

    <run_dir>/config.yaml     the resolved configuration
    <run_dir>/metrics.jsonl   one record a step (docs/training.md explains every key)
    <run_dir>/samples.jsonl   some completions of each evaluation
    <run_dir>/checkpoints/    see checkpoints.py
    <run_dir>/summary.json    written at the end
    <run_dir>/rollouts/, trace/   with rollout.record: see recorded.py

A step depends on the state, the seed and its number alone. A resumed run drops the records of steps after its
checkpoint and computes them again: all that does not come from a clock is the same to the bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from logitless.lab.signals import held
from logitless.lab.tools import timing
from logitless.lab.tools.progress import Progress, Say, of_step
from logitless.lab.tools.tracking import Tracker
from logitless.train import checkpoints, hub, recorded
from logitless.train.compiled_functions import device_peak_bytes
from logitless.train.config import ConfigError, TrainConfig
from logitless.train.files import replace
from logitless.train.folder import (
    check_folder,
    keep_records,
    locked,
    open_folder,
    read_records,
    read_summary,
    run_folder,
)
from logitless.train.model import num_params
from logitless.train.run_records import Rollouts, run_numbers
from logitless.train.task import build_task
from logitless.train.trainer import Trainer
from logitless.train.update import Policy, State
from logitless.train.warm_start import check_warm_start, warm_start

CLOCK_PREFIXES = ("time/", "throughput/", "memory/")
"""Metrics that differ from run to run."""


class TrainingFailed(RuntimeError):
    """The run cannot go on."""


class Stopped(Exception):
    """A signal asked the run to stop; its state is saved."""

    def __init__(self, number: int, saved: int):
        self.number, self.saved = number, saved
        super().__init__(f"stopped by {signal.Signals(number).name}")


def say_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(config: TrainConfig, *, resume: bool = False, say: Say = say_to_stderr) -> dict[str, Any]:
    """Train as configured and return the summary, which is also in ``summary.json``."""
    with locked(run_folder(config)):
        folder = check_folder(config, resume, say)
        with Progress(steps_of(config), say=say) as progress:
            return _run(config, resume, folder, progress, say)


def steps_of(config: TrainConfig) -> int:
    """How many steps the run has: a replay ends with what was recorded."""
    if not config.rollout.replay:
        return config.train.steps
    recorded_steps = recorded.steps_in(Path(config.rollout.replay))
    if not recorded_steps:
        raise ConfigError(f"rollout.replay: {config.rollout.replay} has no recorded rollouts (rollout.record)")
    return min(config.train.steps, recorded_steps)


def _run(config: TrainConfig, resume: bool, folder: Path, progress: Progress, say: Say) -> dict[str, Any]:
    begin = time.perf_counter()
    steps, weights, cache = progress.total, config.model.weights, config.model.cache_dir or None
    if weights and hub.missing(weights, cache):
        progress.announce(f"fetching {weights}")
        hub.local_source(weights, cache)
    if weights:
        progress.announce(f"loading {weights}")
    task = build_task(config)
    trainer = Trainer(config, task)
    open_folder(config, folder)
    if config.warm_start.steps:
        check_warm_start(config, task, folder)
    # Compiling needs shapes alone and begins beside the loading, unless there may be nothing left to do.
    finished = read_summary(folder, say) if resume else None
    early = finished is None or finished["steps"] < steps
    with ThreadPoolExecutor(1) as pool:
        compiling = time.perf_counter()
        compiled = pool.submit(trainer.compile, *trainer.like()) if early else None
        params = task.load_params()
        if config.warm_start.steps:
            progress.phase("warm start")
            params = warm_start(config, task, params, folder, say)
        parameters = num_params(params)
        state, frozen = trainer.initial(params)
        del params
        start, skipped_in_a_row = 0, 0
        saved = folder / "checkpoints"
        if resume:
            found = checkpoints.restore(saved, state, say, counts=("skipped_in_a_row",))
            if found is None:
                say(f"--resume: no checkpoint in {saved}, starting from step 0")
            else:
                start, state, notes = found
                skipped_in_a_row = notes["skipped_in_a_row"]
                say(f"resumed after step {start}")
                if start >= steps and finished is not None:
                    say("the run is complete")
                    return finished
        progress.at(start)
        progress.announce("compiling")
        if compiled is None:
            compiling = time.perf_counter()
            trainer.compile(state, frozen)
        else:
            compiled.result()
    compile_s = time.perf_counter() - compiling
    for name in ("metrics.jsonl", "samples.jsonl"):
        keep_records(folder / name, start if start else -1, say)
    loop = Run(config, trainer, folder, say, steps)
    loop.skipped_in_a_row, loop.last_saved = skipped_in_a_row, start or None
    loop.go(state, frozen, start, progress)
    return loop.finish(parameters, compile_s, time.perf_counter() - begin)


class Run:
    """A run's steps in the current process, and the files written."""

    def __init__(self, config: TrainConfig, trainer: Trainer, folder: Path, say: Say, steps: int):
        self.config, self.trainer, self.folder, self.say, self.steps = config, trainer, folder, say, steps
        mode, project, settings = config.wandb_mode, config.wandb_project, dataclasses.asdict(config)
        self.tracker = Tracker(folder / "metrics.jsonl", mode=mode, project=project, name=config.name, config=settings)
        self.recent: deque[float] = deque(maxlen=10)
        self.skipped_in_a_row = 0
        self.last_saved: int | None = None
        self.checkpoint_times: list[float] = []

    def go(self, state: State, frozen: Policy, start: int, progress: Progress) -> None:
        if start == 0 and self._evaluates(0):
            progress.phase("evaluating")
            numbers, evaluated = self.trainer.evaluate(state, frozen)
            self._write_samples(evaluated, 0)
            self.tracker.log({"step": 0, **numbers})
        for step in range(start + 1, self.steps + 1):
            # A step that can be saved is finished and saved when a signal comes; else there is nothing to wait for.
            with held("step") if self.config.checkpoint.every else contextlib.nullcontext() as hold:
                state = self.step(state, frozen, step, progress)
                stop = hold is not None and hold.received is not None
                every = self.config.checkpoint.every
                if every and (stop or step == self.steps or step % every == 0):
                    self._save(step, state)
            if hold is not None and hold.received is not None and step < self.steps and self.last_saved is not None:
                raise Stopped(hold.received, self.last_saved)

    def step(self, state: State, frozen: Policy, step: int, progress: Progress) -> State:
        """Run a step and record it."""
        state, record, rolled = self.trainer.step(state, frozen, step)
        self._count_skipped(record, step)
        self.recent.append(record["time/train/step_s"])
        record["time/train/step_avg_last10_s"] = sum(self.recent) / len(self.recent)
        record["memory/device_peak_bytes"] = device_peak_bytes()
        numbers: dict[str, Any] = {}
        evaluated: Rollouts | None = None
        if self._evaluates(step):
            progress.phase("evaluating")
            numbers, evaluated = self.trainer.evaluate(state, frozen)
        try:
            self._trace(state, rolled, record, step)
            if evaluated is not None:
                self._write_samples(evaluated, step)
            self.tracker.log({**record, **numbers})
        except OSError as error:  # a full disk, most often
            raise TrainingFailed(
                f"{self.folder}: step {step} could not be recorded ({error.strerror or error}); "
                + (f"the checkpoint of step {self.last_saved} is whole" if self.last_saved else "nothing is saved yet")
                + "; make room and continue with --resume"
            ) from error
        progress.step(of_step(record), record["time/train/step_avg_last10_s"])
        return state

    def _evaluates(self, step: int) -> bool:
        every = self.config.eval.every
        if not every or self.config.rollout.kind == "random":
            return False
        return step % every == 0 or step == self.steps

    def _trace(self, state: State, rolled: Rollouts, record: dict[str, Any], step: int) -> None:
        """Keep what another loss can be compared by (recorded.py), where the run is asked for it."""
        if not self.trainer.traced(step):
            return
        if not self.config.rollout.replay:
            recorded.save_rollouts(self.folder, step, rolled)
        recorded.save_trace(self.folder, step, rolled, record, self.trainer.sample_weights(state.trained))

    def _write_samples(self, rolled: Rollouts, step: int) -> None:
        lines = []
        for i, problem in enumerate(self.trainer.task.held_out[: self.config.samples]):
            row = dict(step=step, prompt=problem.prompt, answer=problem.answer, completion=rolled.texts[i])
            lines.append(json.dumps({**row, "reward": float(rolled.rewards[i])}) + "\n")
        with (self.folder / "samples.jsonl").open("a") as file:
            file.write("".join(lines))

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

    def finish(self, parameters: int, compile_s: float, seconds: float) -> dict[str, Any]:
        """Write and return what the run came to; over all its records, those before a resume included."""
        self.tracker.close()
        numbers = run_numbers(read_records(self.folder / "metrics.jsonl"))
        t, times = self.trainer, self.checkpoint_times
        programs = (t.update_program, t.score_program, t.rollout_program, t.eval_program)
        summary = {
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
        replace(self.folder / "summary.json", json.dumps(summary, indent=1) + "\n")
        return summary
