"""Plant faults one at a time in a copy of the tree, run the tests that guard the place, and list what they miss.

    python tests/mutants                  all of them (make mutants)
    python tests/mutants objectives       those of tests/mutants/mutants_objectives.py
    python tests/mutants objectives kl    of these, the ones whose file or text contains "kl"
    python tests/mutants --seconds 500    as many as that time allows; call it again to go on
    python tests/mutants --record FILE    what was found is kept in FILE (tests/mutants/record.json)

All of them run in one process, which imports the mutated library anew each time and keeps JAX and what it has
compiled: a second or two each, most of which is compiling what the fault changed. ``--isolated`` gives each a process
of its own. A result that is in the record already, of the same files, is not looked for again.

Exits with 1 if a mutant survives without a reason, is killed although a reason says that it cannot be, or has tests
that fail without it; with 3 if the time was over first.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from mutation import ROOT, Mutant, lists

COPIED = ("src", "tests", "benchmarks", "pyproject.toml", "docs", "README.md", "configs")
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider")
RECORD = ROOT / "tests" / "mutants" / "record.json"
PATIENCE = 240
"""Seconds after which a fault is taken to have made a test run on for ever, which is a failure of it."""


def _too_long(*_: Any) -> None:
    raise TimeoutError("the test did not end")


def run_here(mutant: Mutant, tree: Path) -> tuple[int, str]:
    """``(pytest's exit code, its output)`` in this process, with nothing of the library or the tests imported yet."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(str(tree)) or name.partition(".")[0] == "logitless":
            del sys.modules[name]
    importlib.invalidate_caches()
    output = io.StringIO()
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(PATIENCE)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = pytest.main([*OPTIONS, *mutant.tests])
    finally:
        signal.alarm(0)
    return int(code), output.getvalue()


def run_isolated(mutant: Mutant, tree: Path) -> tuple[int, str]:
    """The same in a process of its own."""
    environment = dict(os.environ, PYTHONPATH=str(tree / "src"))
    command = [sys.executable, "-m", "pytest", *OPTIONS, *mutant.tests]
    run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    return run.returncode, run.stdout + run.stderr


def killed(mutant: Mutant | None, tests: Mutant, tree: Path, isolated: bool) -> bool:
    """Whether one of the tests fails with the mutant planted (``None``: on the tree as it is)."""
    path = tests.path(tree)
    original = path.read_text()
    if mutant is not None:
        path.write_text(mutant.applied(tree))
    try:
        code, output = (run_isolated if isolated else run_here)(tests, tree)
    finally:
        path.write_text(original)
    if code == 2 and mutant is not None and "Error" in output:
        return True  # the tests cannot even be collected
    if code not in (0, 1):
        raise RuntimeError(f"{tests}: pytest ended with {code}.\n{output[-3000:]}")
    return code == 1


def copy_tree(tree: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, tree / name)


def fingerprint(mutant: Mutant) -> str:
    """Of the mutated file and the tests: a result holds as long as neither changes."""
    text = hashlib.sha256(mutant.applied(ROOT).encode())
    for test in mutant.tests:
        text.update(test.encode() + (ROOT / test.partition("::")[0]).read_bytes())
    return text.hexdigest()[:16]


def run_all(chosen: list[Mutant], found: dict[str, Any], seconds: float, isolated: bool, save: Any) -> bool:
    """Results of the chosen mutants into ``found``; whether the time sufficed. One whose tests fail on the tree as it
    is has no result."""
    sound: dict[tuple[str, ...], bool] = {}  # whether tests pass on the tree as it is
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        tree = Path(folder).resolve()
        copy_tree(tree)
        os.chdir(tree)
        sys.path.insert(0, str(tree / "src"))
        for i, mutant in enumerate(chosen, start=1):
            if str(mutant) in found:
                continue
            if time.monotonic() - begin > seconds:
                os.chdir(ROOT)
                return False
            if mutant.tests not in sound:
                sound[mutant.tests] = not killed(None, mutant, tree, isolated)
            if not sound[mutant.tests]:
                print(
                    f"{i:3}/{len(chosen)} NOT RUN, its tests fail as it is: {mutant}: {' '.join(mutant.tests)}",
                    flush=True,
                )
                continue
            start = time.monotonic()
            dead = killed(mutant, mutant, tree, isolated)
            took = time.monotonic() - start
            print(f"{i:3}/{len(chosen)} {'killed  ' if dead else 'SURVIVED'} {took:4.0f} s  {mutant}", flush=True)
            found[str(mutant)] = dict(
                killed=dead, seconds=round(took, 1), reason=mutant.survives, of=fingerprint(mutant)
            )
            save()
        os.chdir(ROOT)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = lists()
    parser.add_argument("list", nargs="?", choices=sorted(known), help="one list only")
    parser.add_argument("containing", nargs="?", default="", help="only mutants whose file or text contains this")
    parser.add_argument("--isolated", action="store_true", help="one process each")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other mutant after this time")
    parser.add_argument("--record", type=Path, default=RECORD, help="where results are kept")
    parser.add_argument("--anew", action="store_true", help="look for results that are in the record, too")
    arguments = parser.parse_args()
    every = [m for ms in known.values() for m in ms]
    chosen = [m for m in (known[arguments.list] if arguments.list else every) if arguments.containing in str(m)]
    record = arguments.record.resolve()
    found: dict[str, Any] = json.loads(record.read_text())["mutants"] if record.exists() else {}
    # What is no mutant any more is forgotten, and so is what was found with another file or other tests.
    found = {str(m): r for m in every if (r := found.get(str(m))) is not None and r["of"] == fingerprint(m)}
    for mutant in chosen if arguments.anew else ():
        found.pop(str(mutant), None)

    def save() -> None:
        dead = sum(r["killed"] for r in found.values())
        numbers = dict(planted=len(every), run=len(found), killed=dead, survived=len(found) - dead)
        survivors = {k: r["reason"] for k, r in found.items() if not r["killed"]}
        record.write_text(json.dumps(dict(**numbers, survivors=survivors, mutants=found), indent=1) + "\n")

    # The tests' conftest asks JAX for eight devices, which a process can do only once.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))  # what a fault leaves as it was
    sys.dont_write_bytecode = True  # two mutants of one file may have one size and one time
    done = run_all(chosen, found, arguments.seconds, arguments.isolated, save)
    save()
    results = [(m, found[str(m)]) for m in chosen if str(m) in found]
    survivors = [m for m, r in results if not r["killed"]]
    print(f"{len(results) - len(survivors)} of {len(results)} killed")
    for mutant in survivors:
        print(f"  survived: {mutant}: {mutant.survives or 'NO REASON GIVEN'}")
    surprises = [m for m, r in results if r["killed"] == bool(m.survives)]
    for mutant in surprises:
        if mutant.survives:
            print(f"  killed, though it was said to survive: {mutant}: {mutant.survives}")
    left = len(chosen) - len(results)
    if left:
        print(f"{left} are left; the same command goes on with them" if not done else f"{left} could not be run")
    return 1 if surprises or (done and left) else 0 if done else 3


if __name__ == "__main__":
    sys.exit(main())
