"""A run's folder: ownership, checks before a resume, and atomic writes."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from logitless.lab.tools.progress import Say
from logitless.train.config import ConfigError, TrainConfig, as_yaml, load
from logitless.train.files import replace

# Not on Windows: there, nothing keeps a second run away.
fcntl: Any = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None

FREE_ON_RESUME = (
    "run_dir", "checkpoint", "samples", "ab", "wandb_mode", "wandb_project", "eval", "warm_start.cache",
)  # fmt: skip
"""Keys that may change between a run and its continuation."""
LOCK = ".lock"


def run_folder(config: TrainConfig) -> Path:
    """Where the run lives."""
    return Path(config.run_dir or f"runs/{config.name}")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder for the current process; create a missing folder. The system releases the
    lock when the process ends."""
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
    if not (folder / "config.yaml").exists() or (summary := read_summary(folder)) is None:
        return False
    check_same(load(folder / "config.yaml"), config, folder)
    done = [r for r in read_records(folder / "metrics.jsonl") if "train/loss" in r]
    return len(done) == steps == summary["steps"]


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
    """Refuse a resume with another configuration: the metrics would mix two runs.

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


def read_summary(folder: Path, say: Say = lambda _: None) -> dict[str, Any] | None:
    """The run's ``summary.json``; ``None`` where there is none, or none that can be read, which is named."""
    file = folder / "summary.json"
    if not file.exists():
        return None
    summary = _json_object(file.read_bytes())
    if isinstance(summary.get("name"), str) and isinstance(summary.get("steps"), int):
        return summary
    say(f"WARNING: {file} cannot be read; it is written again from the records")
    return None


def _json_object(text: bytes) -> dict[str, Any]:
    """A JSON object; empty where the text is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # not UTF-8, not JSON; nested too deep
        return {}
    return found if isinstance(found, dict) else {}


def _record(line: bytes) -> dict[str, Any] | None:
    """A parsed line of a JSON-lines file, if an object with a step number."""
    record = _json_object(line)
    return record if type(record.get("step")) is int else None


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records of a JSON-lines file, without the lines that are none (:func:`keep_records` names them)."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [record for record in map(_record, lines) if record is not None]


def keep_records(path: Path, last_step: int, say: Say) -> None:
    """Drop the records of steps after ``last_step``, and lines that are no record.

    A last line that a kill cut off goes without a word. Any other is named, and the file as it was is kept beside.
    """
    if not path.exists():
        return
    before = path.read_bytes()
    lines = before.splitlines()
    records = [_record(line) for line in lines]
    bad = [str(i) for i, record in enumerate(records[:-1], 1) if record is None and lines[i - 1].strip()]
    if bad:
        copy = path.with_name(path.name + ".damaged")
        replace(copy, before)
        say(
            f"WARNING: {path}: line {', '.join(bad)} of {len(lines)} cannot be read and is left out; "
            f"the file as it was is {copy}"
        )
    kept = [line for line, r in zip(lines, records, strict=True) if r is not None and r["step"] <= last_step]
    replace(path, b"".join(line + b"\n" for line in kept))
