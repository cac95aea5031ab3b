"""The planted faults of ``make mutants``: every one of them still names a place that exists and tests that exist."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "mutants"))

from mutation import lists  # noqa: E402


def test_every_mutant_can_be_planted_and_names_its_tests() -> None:
    mutants = [m for group in lists().values() for m in group]
    assert len(mutants) > 40
    for mutant in mutants:
        changed = mutant.applied(ROOT)  # raises where the text is not there, or stands there twice
        assert changed != mutant.path(ROOT).read_text(), mutant
        compile(changed, mutant.file, "exec")
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert (ROOT / file).exists(), (mutant, test)
            assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), (mutant, test)
    assert len({str(m) for m in mutants}) == len(mutants)
