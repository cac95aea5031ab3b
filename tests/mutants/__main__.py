"""Plant faults one at a time in a copy of the tree, run the tests that guard the place, and list what they miss.

    python tests/mutants                  all of them (make mutants)
    python tests/mutants objectives       those of tests/mutants/mutants_objectives.py
    python tests/mutants objectives kl    of these, the ones whose file or text contains "kl"

Exits with 1 if a mutant survives without a reason, or is killed although a reason says that it cannot be.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutation import ROOT, Mutant, lists

COPIED = ("src", "tests", "pyproject.toml", "docs", "README.md", "configs")


def killed(mutant: Mutant, tree: Path) -> bool:
    """Whether one of the mutant's tests fails on it. A run that does not even collect is an error of the list."""
    path = mutant.path(tree)
    original = path.read_text()
    path.write_text(mutant.applied(tree))
    try:
        environment = dict(os.environ, PYTHONPATH=str(tree / "src"), JAX_PLATFORMS="cpu")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
        run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    finally:
        path.write_text(original)
    if run.returncode not in (0, 1):
        raise RuntimeError(f"{mutant}: pytest ended with {run.returncode}.\n{run.stdout[-3000:]}{run.stderr[-1000:]}")
    return run.returncode == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = lists()
    parser.add_argument("list", nargs="?", choices=sorted(known), help="one list only")
    parser.add_argument("containing", nargs="?", default="", help="only mutants whose file or text contains this")
    arguments = parser.parse_args()
    chosen = known[arguments.list] if arguments.list else tuple(m for ms in known.values() for m in ms)
    chosen = tuple(m for m in chosen if arguments.containing in str(m))
    survivors, surprises = [], []
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, tree / name)
        for i, mutant in enumerate(chosen, start=1):
            start = time.monotonic()
            dead = killed(mutant, tree)
            print(
                f"{i:3}/{len(chosen)} {'killed  ' if dead else 'SURVIVED'} {time.monotonic() - start:4.0f} s  {mutant}"
            )
            sys.stdout.flush()
            if not dead:
                survivors.append(mutant)
            if dead == bool(mutant.survives):
                surprises.append(mutant)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed")
    for mutant in survivors:
        print(f"  survived: {mutant}: {mutant.survives or 'NO REASON GIVEN'}")
    for mutant in surprises:
        if mutant.survives:
            print(f"  killed, though it was said to survive: {mutant}: {mutant.survives}")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
