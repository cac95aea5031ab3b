"""A run's folder: whose it is, what may go on in it, and files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from logitless.train.config import ConfigError, TrainConfig, as_yaml, load

try:
    import fcntl
except ImportError:  # not on Windows: there, nothing keeps a second run away
    fcntl = None  # type: ignore[assignment]

FREE_ON_RESUME = ("run_dir", "checkpoint", "samples", "ab", "wandb_mode", "wandb_project", "eval", "warm_start.cache")
"""Keys that may change between a run and its continuation."""
LOCK = ".lock"

Say = Callable[[str], None]


def run_folder(config: TrainConfig) -> Path:
    """Where the run lives."""
    return Path(config.run_dir or f"runs/{config.name}")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep the folder, made where there is none, to this process. The system gives it back when the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    except OSError as error:
        raise ConfigError(f"run_dir: {folder} cannot be written ({error.strerror or error})") from None
    with file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip() or "another process"
                raise ConfigError(
                    f"run_dir: {folder} is in use by {owner}; wait for it to end, or choose another run_dir"
                ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def check_folder(config: TrainConfig, resume: bool, say: Say) -> Path:
    """The run's folder, refused where it holds another run than the one to go on with."""
    folder = run_folder(config)
    earlier = folder / "config.yaml"
    if earlier.exists():
        if not resume:
            raise ConfigError(
                f"run_dir: {folder} holds a run already; continue it with --resume, or choose another run_dir"
            )
        check_same(load(earlier), config, folder)
    elif resume:
        say(f"--resume: no run in {folder} yet, starting one")
    return folder


def finished(config: TrainConfig, steps: int) -> bool:
    """Whether the run's folder holds all ``steps`` of this run: another run's folder is refused."""
    folder = run_folder(config)
    if not (folder / "config.yaml").exists() or not (folder / "summary.json").exists():
        return False
    check_same(load(folder / "config.yaml"), config, folder)
    done = [r for r in read_records(folder / "metrics.jsonl") if "train/loss" in r]
    return len(done) == steps == json.loads((folder / "summary.json").read_text())["steps"]


def open_folder(config: TrainConfig, folder: Path) -> None:
    """Write the resolved configuration into the run's folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace(folder / "config.yaml", as_yaml(config))
    except OSError as error:
        raise ConfigError(f"run_dir: {folder} cannot be written ({error})") from None


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat


def check_same(before: TrainConfig, now: TrainConfig, folder: Path) -> None:
    """A continuation has the configuration of its run; else its metrics would be those of neither.

    It may have more steps, where the learning rate does not depend on how many there are.
    """
    free: tuple[str, ...] = FREE_ON_RESUME
    if before.train.schedule == "constant" and now.train.steps > before.train.steps:
        free = (*free, "train.steps")
    a, b = (_flat(dataclasses.asdict(c)) for c in (before, now))
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) != b.get(key) and not any(key == f or key.startswith(f + ".") for f in free):
            why = ""
            if key == "train.steps" and now.train.steps > before.train.steps:
                why = f" and its {before.train.schedule} schedule ends there"
            raise ConfigError(
                f"{key}: {b.get(key)!r}, but the run in {folder} has {a.get(key)!r}{why}; "
                f"continue it with --resume {folder}, or start another run_dir"
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


def keep_records(path: Path, last_step: int) -> None:
    """Drop the records of steps after ``last_step``."""
    if path.exists():
        kept = [r for r in read_records(path) if r["step"] <= last_step]
        replace(path, "".join(json.dumps(r) + "\n" for r in kept))


def replace(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one, whole."""
    beside = path.with_name(path.name + ".new")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
