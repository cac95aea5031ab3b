"""What the scripts of this folder share: options, words with a time, records, pages, and arms that take turns."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from logitless.lab.tools import timing

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
STARTED = time.perf_counter()
Program = Callable[..., Any]


def options(about: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with an option for each default: ``tokens=8192`` is ``--tokens``; a list takes several values."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in defaults.items():
        kind: dict[str, Any] = dict(type=type(value))
        if isinstance(value, list):
            kind = dict(type=type(value[0]), nargs="+")
        parser.add_argument(f"--{name.replace('_', '-')}", default=value, **kind)
    return parser


def say(*words: Any) -> None:
    """Print with the seconds since the start."""
    print(f"[{time.perf_counter() - STARTED:6.1f} s]", *words, flush=True)


def _place(path: str | Path) -> Path:
    """A name is that of a file in benchmarks/results; what has a folder is a path."""
    return Path(path) if len(Path(path).parts) > 1 else RESULTS / path


def wait_for(path: str) -> None:
    """Everything is compiled: wait for the file, if one is named, that is there when the device is free to be timed."""
    say("timing")
    while path and not Path(path).exists():
        time.sleep(0.5)


def read(path: str | Path) -> dict[str, Any]:
    """The record of a file; empty if there is none."""
    path = _place(path)
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: str | Path, record: Mapping[str, Any]) -> None:
    """Write a record whole: a reader never finds a part of it."""
    path = _place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(path)


def between(text: str, begin: str, end: str, content: str) -> str:
    """A page with the part between two marks replaced."""
    before, _, rest = text.partition(begin)
    return before + begin + content + end + rest.partition(end)[2]


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table, and an empty one."""
    lines = [f"| {' | '.join(columns).lstrip()} |", "|---" * len(columns) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def compiled(arms: Mapping[str, Program], args: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """``(programs, seconds and temporaries)``; an arm that does not compile is said and left out."""
    programs: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, f in arms.items():
        try:
            programs[name], seconds = timing.compile_in_steps(jax.jit(f), *args)
        except Exception as error:  # the other arms count
            say(name, "does not compile:", repr(error)[:400])
            continue
        found[name] = {**seconds, "temporaries": timing.compiled_memory(programs[name])["temporaries"]}
        say(name, found[name])
    return programs, found


def back_to_back(f: Program, args: tuple[Any, ...], repeats: int) -> float:
    """Milliseconds a call, of several calls with one wait at the end, after one that warms up."""
    jax.block_until_ready(f(*args))
    return timing.back_to_back(f, *args, repeats=repeats)


def faster_of_two(arms: Mapping[str, tuple[Program, tuple[Any, ...]]], repeats: int) -> dict[str, float]:
    """Milliseconds of each arm, ``(program, arguments)``, back to back: all in turn, twice, and the faster turn."""
    turns = [{name: back_to_back(f, args, repeats) for name, (f, args) in arms.items()} for _ in range(2)]
    return {name: round(min(turn[name] for turn in turns), 4) for name in arms}


def alternated(arms: Mapping[str, Callable[[], Any]], rounds: int, repeats: int = 1) -> dict[str, list[float]]:
    """Milliseconds of each arm in each round, the best of ``repeats``, in alternating order; one round warms up."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(rounds + 1):
        for name in list(arms)[:: 1 if i % 2 else -1]:
            ms = min(timing.wall_times(arms[name], repeats=repeats))
            found[name] += [round(ms, 3)] if i else []
    return found
