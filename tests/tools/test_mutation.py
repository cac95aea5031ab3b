"""``make mutants``: where faults are planted, the lines they are looked up by, and the list of equivalent ones."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "scripts" / "mutation"
pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is Python 3.12's")


@pytest.fixture(scope="module")
def tool() -> Any:
    sys.path.insert(0, str(TOOL))
    try:
        return {name: importlib.import_module(name) for name in ("sites", "lines")}
    finally:
        sys.path.remove(str(TOOL))


SOURCE = '''
@dataclass(frozen=True)
class A:
    b: int = 3

    def c(self, x):
        """No fault in here: 1 < 2."""
        if x is None:
            raise ValueError(f"{x + 1}, expected 2")
        return x if (x <
                     4 and not y) else g(x, key=True)
'''
FAULTS = [
    (2, "True -> False"),
    (4, "3 -> 4"),
    (8, "x is None -> False"),
    (8, "x is None -> x is not None"),
    (10, "x if x < 4 and (not y) else g(x, key=True) -> x"),
    (10, "x if x < 4 and (not y) else g(x, key=True) -> g(x, key=True)"),
    (10, "x < 4 and (not y) -> x < 4 or not y"),
    (10, "x < 4 and (not y) -> x < 4"),
    (10, "x < 4 -> x <= 4"),
    (10, "x < 4 -> x >= 4"),
    (11, "4 -> 5"),
    (11, "not y -> y"),
    (11, "g(x, key=True) -> g(x)"),
    (11, "True -> False"),
]


def test_faults_are_planted_in_what_runs_and_every_other_line_stays(tool: Any) -> None:
    found = tool["sites"].sites("a.py", SOURCE)
    assert sorted((s.line, f"{s.old} -> {s.new}") for s in found) == sorted(FAULTS)
    for site in found:
        changed = site.applied(SOURCE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))
        assert len(changed.splitlines()) == len(SOURCE.splitlines())
        assert changed.splitlines()[: site.line - 1] == SOURCE.splitlines()[: site.line - 1]
    assert {s.name for s in found if s.imported} == {"a.py:A: True -> False", "a.py:A: 3 -> 4"}


def test_lines_are_found_again_where_they_have_moved(tool: Any) -> None:
    before, now = "a\nb\nc\nd\n", "new\na\nB\nc\nmore\nd\n"
    where = tool["lines"]._moved(before, now)
    assert where[2] == [3] and where[4] == [6] and 2 in where[1] and 4 in where[3]


def test_equivalent_faults_exist_and_say_why(tool: Any) -> None:
    names: set[str] = set()
    entries = json.loads((TOOL / "equivalent.json").read_text())
    for file in {e["fault"].partition(":")[0] for e in entries}:
        names |= {s.name for s in tool["sites"].sites(file, (ROOT / "src" / "logitless" / file).read_text())}
    for entry in entries:
        assert entry["fault"] in names, f"{entry['fault']} is no fault any more"
        assert len(entry["reason"]) > 10
