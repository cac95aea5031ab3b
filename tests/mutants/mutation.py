"""One planted fault: which text of which file is replaced by what, and the tests of which at least one must fail."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault. ``old`` stands exactly once in ``src/logitless/<file>``. ``survives`` says why nothing can fail on it;
    a mutant that has no such reason and passes its tests is a gap in them."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str = ""

    def path(self, root: Path) -> Path:
        return root / "src" / "logitless" / self.file

    def applied(self, root: Path) -> str:
        """The file's text with the fault in it."""
        text = self.path(root).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: {self.old!r} stands {text.count(self.old)} times, expected once.")
        return text.replace(self.old, self.new)

    def __str__(self) -> str:
        return f"{self.file}: {' '.join(self.old.split())!r} -> {' '.join(self.new.split())!r}"


def lists() -> dict[str, tuple[Mutant, ...]]:
    """The mutants of every ``mutants_*.py`` beside this file, by name."""
    sys.path.insert(0, str(HERE))
    try:
        found = sorted(HERE.glob("mutants_*.py"))
        return {f.stem.removeprefix("mutants_"): tuple(importlib.import_module(f.stem).MUTANTS) for f in found}
    finally:
        sys.path.remove(str(HERE))
