"""Result files of every command, read back: JSON (one record, a list, a suite) or JSON lines."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from logitless._version import __version__

Record = dict[str, Any]


KINDS = ("bench", "plan", "tpu_compile", "tpu_cycles", "ab")
"""Kinds that a record's own ``kind`` tells."""


class RecordError(Exception):
    """A result file that cannot be used; the message names it."""


def append(path: Path, record: Record) -> None:
    """Write a record as the last line of a file, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def provenance() -> dict[str, str]:
    """By which command, when, and from which code a result was made; ``commit`` where the code is a checkout's."""
    here = Path(__file__).parent
    try:
        asked = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=10"]
        commit = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    return dict(
        command=" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
        commit=commit,
        python=platform.python_version(),
    )


def kind_of(record: Any) -> str | None:
    """``gradcheck``, ``bench``, one of :data:`KINDS`, ``train`` (a step), ``record`` (any other script's) or None."""
    if not isinstance(record, dict):
        return None
    kind = record.get("kind")
    if kind in KINDS:
        return str(kind)
    if "gates" in record and "config/name" in record:
        return "gradcheck"
    if kind is None and all(isinstance(record.get(key), dict) for key in ("arms", "config")):
        return "bench"  # from before these had a kind
    said = any(isinstance(record.get(key), dict) for key in ("environment", "versions"))
    if said or any(isinstance(record.get(key), str) for key in ("what", "device")):
        return "record"  # from a script, or a run's summary: numbers with their source
    if any(isinstance(k, str) and k.startswith(("train/", "time/train/")) for k in record):
        return "train"
    return None


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict) and isinstance(value.get("records"), list):
        yield from _flat(value["records"])
    else:
        yield value


def read(path: Path) -> list[Record]:
    """The records of one file, in order; refused by name if it is missing, broken, or of no known kind."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise RecordError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: not readable ({error})") from None
    try:
        found = list(_flat(json.loads(text)))
    except RecursionError:
        raise RecordError(f"{path}: its values are nested too deep") from None
    except ValueError:  # no JSON, or numbers of thousands of digits
        found = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    found += _flat(json.loads(line))
                except (ValueError, RecursionError) as error:
                    raise RecordError(f"{path}: line {number} is not JSON ({error})") from None
    known = [r for r in found if kind_of(r) is not None]
    if not known:
        keys = ", ".join(list(found[0])[:5]) if found and isinstance(found[0], dict) else ""
        said = f" (its first record has the keys {keys})" if keys else ""
        raise RecordError(f"{path}: not a result of gradcheck, bench, plan, tpu, train or ab{said}")
    return known


def files_in(paths: Iterable[Path], left: list[Path] | None = None) -> list[Path]:
    """Files as given; for a folder, its result files of a known kind (``*.json``, ``*.jsonl``), and all other files
    into ``left``."""
    out: list[Path] = []
    for path in paths:
        if not path.is_dir():
            out.append(path)
            continue
        inside = []
        arms = {p.parent for p in path.rglob("ab.json")}  # contains the metrics of all arms
        for candidate in sorted([*path.rglob("*.json"), *path.rglob("*.jsonl")]):
            if candidate.name != "ab.json" and arms.intersection(candidate.parents):
                continue
            try:
                read(candidate)
            except RecordError:  # a run's folder also holds its configuration and samples
                if left is not None:
                    left.append(candidate)
                continue
            inside.append(candidate)
        if not inside:
            raise RecordError(f"{path}: no results of gradcheck, bench, plan, tpu, train or ab in this folder")
        out += inside
    return out
