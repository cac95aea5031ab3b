"""Size, types and shape stay within scripts/bars.json, as ``python scripts/bars.py`` prints them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from loading import loaded

ROOT = Path(__file__).parents[2]
LIMITS = json.loads((ROOT / "scripts" / "bars.json").read_text())
PAGE = (ROOT / "docs" / "architecture.md").read_text()


@pytest.fixture(scope="module")
def bars() -> Any:
    return loaded(ROOT / "scripts" / "bars.py")


def test_nothing_has_grown(bars: Any) -> None:
    grown = {name: (value, LIMITS[name]) for name, value in bars.measures().items() if value > LIMITS[name]}
    assert not grown, f"(now, at most): {grown}; `python scripts/bars.py` names the functions"
    walks = {f"walk: {call}": int(n) for call, n in re.findall(r"^\| ([\w, ]+) \| (\d+) \|", PAGE, re.MULTILINE)}
    assert not {name: n for name, n in walks.items() if n > LIMITS[name]}
    assert set(bars.GOALS) <= set(LIMITS) == set(bars.measures()) | set(walks)


def test_public_calls_are_there(bars: Any) -> None:
    every = {bars.module_of(f): ast.parse(f.read_text()) for f in bars.files("src/logitless")}
    assert {name for name, _ in bars.functions(every)} >= bars.PUBLIC


def test_what_counts(bars: Any) -> None:
    (_, f), *_ = bars.functions({"m": ast.parse(SOURCE)})
    assert bars.parameters(f) == 4 and bars.length(f) == 6
    assert bars.local_names(f) == {"x", "y", "inner", "item"}
    assert sorted(bars.has_any(a) for a in bars.annotations(ast.parse(SOURCE))) == [False] * 3 + [True] * 2


SOURCE = """
def f(self, a: int, *b, c: "int" = 0, **d: dict[str, Any]) -> Any:
    x, y = [z for z in b], 1
    def inner(u: int):
        w = u
    for item in b:
        pass
"""
