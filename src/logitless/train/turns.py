"""The replays of an A/B in one process, a step of each arm in turn: A B C, B C A, C A B.

``logitless ab`` with ``ab.turns`` starts ``python -m logitless.train.turns FILE...``, one configuration for each arm.
All arms run on the same machine in the same minute, so that their times are compared like with like. The device holds
the weights and moments of all arms at once. No state is saved: a replay that was stopped begins anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from logitless.lab import exits
from logitless.lab.tools.progress import Progress, Say
from logitless.train.config import TrainConfig, load
from logitless.train.folder import locked, open_folder, run_folder
from logitless.train.loop import Run, say_to_stderr, steps_of
from logitless.train.model import num_params
from logitless.train.task import build_task
from logitless.train.trainer import Trainer
from logitless.train.warm_start import warm_start


def replay(arms: Sequence[TrainConfig], say: Say = say_to_stderr) -> None:
    """Run the replays ``arms``, which differ in the update alone; each leaves what a run leaves."""
    begin, steps, folders = time.perf_counter(), steps_of(arms[0]), [run_folder(c) for c in arms]
    with contextlib.ExitStack() as stack:
        for folder in folders:
            stack.enter_context(locked(folder))
        progress = stack.enter_context(Progress(steps * len(arms), say=say))
        task = build_task(arms[0])
        trainers = [Trainer(c, task) for c in arms]
        progress.announce("compiling")
        pool = stack.enter_context(ThreadPoolExecutor(len(arms)))
        compiled = [pool.submit(t.compile, *t.like()) for t in trainers]
        params = task.load_params()
        if arms[0].warm_start.steps:
            params = warm_start(arms[0], task, params, folders[0], say)
        parameters = num_params(params)
        states = [t.initial(params) for t in trainers]
        del params
        for done in compiled:
            done.result()
        compile_s, runs = time.perf_counter() - begin, []
        for config, trainer, folder in zip(arms, trainers, folders, strict=True):
            open_folder(config, folder)
            runs.append(Run(dataclasses.replace(config, wandb_mode="disabled"), trainer, folder, say, steps))
        for step in range(1, steps + 1):
            for i in ((step + k) % len(arms) for k in range(len(arms))):
                state, frozen = states[i]
                states[i] = runs[i].step(state, frozen, step, progress), frozen
        for run in runs:
            run.finish(parameters, compile_s, time.perf_counter() - begin)


def main(files: Sequence[str]) -> int:
    """Replay the configurations in ``files``."""

    def run() -> int:
        replay([load(Path(file)) for file in files])
        return 0

    return exits.run("ab", run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
