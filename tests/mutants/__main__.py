"""Plant faults one at a time in a copy of the tree, run the tests that guard the place, and list what they miss.

    python tests/mutants                  all of them (make mutants)
    python tests/mutants objectives       those of tests/mutants/mutants_objectives.py
    python tests/mutants objectives kl    of these, the ones whose file or text contains "kl"

All of them run in one process, which imports the mutated library anew each time and keeps JAX and what it has
compiled: a second or two each. ``--isolated`` gives each a process of its own.

Exits with 1 if a mutant survives without a reason, or is killed although a reason says that it cannot be.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mutation import ROOT, Mutant, lists

COPIED = ("src", "tests", "pyproject.toml", "docs", "README.md", "configs")
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider")


def run_here(mutant: Mutant, tree: Path) -> tuple[int, str]:
    """``(pytest's exit code, its output)`` in this process, with nothing of the library or the tests imported yet."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(str(tree)) or name.partition(".")[0] == "logitless":
            del sys.modules[name]
    importlib.invalidate_caches()
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pytest.main([*OPTIONS, *mutant.tests])
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = lists()
    parser.add_argument("list", nargs="?", choices=sorted(known), help="one list only")
    parser.add_argument("containing", nargs="?", default="", help="only mutants whose file or text contains this")
    parser.add_argument("--isolated", action="store_true", help="one process each")
    arguments = parser.parse_args()
    chosen = known[arguments.list] if arguments.list else tuple(m for ms in known.values() for m in ms)
    chosen = tuple(m for m in chosen if arguments.containing in str(m))
    survivors, surprises = [], []
    sound: set[tuple[str, ...]] = set()  # tests that were seen to pass on the tree as it is
    # The tests' conftest asks JAX for eight devices, which a process can do only once.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.dont_write_bytecode = True  # two mutants of one file may have one size and one time
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        tree = Path(folder).resolve()
        copy_tree(tree)
        os.chdir(tree)
        sys.path.insert(0, str(tree / "src"))
        for i, mutant in enumerate(chosen, start=1):
            if mutant.tests not in sound:
                if killed(None, mutant, tree, arguments.isolated):
                    raise RuntimeError(f"{mutant}: its tests fail on the tree as it is: {' '.join(mutant.tests)}")
                sound.add(mutant.tests)
            start = time.monotonic()
            dead = killed(mutant, mutant, tree, arguments.isolated)
            took = time.monotonic() - start
            print(f"{i:3}/{len(chosen)} {'killed  ' if dead else 'SURVIVED'} {took:4.0f} s  {mutant}", flush=True)
            if not dead:
                survivors.append(mutant)
            if dead == bool(mutant.survives):
                surprises.append(mutant)
        os.chdir(ROOT)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed")
    for mutant in survivors:
        print(f"  survived: {mutant}: {mutant.survives or 'NO REASON GIVEN'}")
    for mutant in surprises:
        if mutant.survives:
            print(f"  killed, though it was said to survive: {mutant}: {mutant.survives}")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
