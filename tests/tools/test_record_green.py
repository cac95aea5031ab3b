"""scripts/record_green.py: what is recorded of a check that has passed, and that the make targets ask for it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
REPORT = '<testsuites><testsuite tests="{}" failures="{}" errors="0" skipped="2"/></testsuites>'


@pytest.fixture
def green(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a record of its own and a git that answers."""
    spec = importlib.util.spec_from_file_location("record_green", ROOT / "scripts" / "record_green.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    said = {"rev-parse": "0123456789abcdef", "status": "", "rev-list": "7"}
    monkeypatch.setattr(module, "RECORD", tmp_path / "checks.json")
    monkeypatch.setattr(module, "_git", lambda command, *_: said[command])
    return module


def test_a_green_check_is_recorded_with_commit_and_counts(green: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT.format(12, 0))
    green.record("dist", None)
    green.record("test-slow", tmp_path / "report.xml")
    assert list(green.read()) == ["test-slow", "dist"]
    found = green.read()["test-slow"]
    assert found.pop("date").endswith("UTC")
    assert found == dict(commit="0123456789abcdef", changed=False, passed=10, failed=0, skipped=2)
    lines = green.table().splitlines()
    assert re.fullmatch(r"test-slow +green .* on 0123456789 \(7 commits ago\), 10 passed, 2 skipped", lines[0])
    assert len(lines) == len(green.CHECKS) and lines[1].split(maxsplit=1) == ["test-tunix", "never recorded"]


@pytest.mark.parametrize(("tests", "failures"), [(12, 1), (2, 0)])
def test_what_failed_or_ran_nothing_is_not_recorded(
    green: ModuleType, tmp_path: Path, tests: int, failures: int
) -> None:
    (tmp_path / "report.xml").write_text(REPORT.format(tests, failures))
    with pytest.raises(SystemExit, match="nothing is recorded"):
        green.record("test-slow", tmp_path / "report.xml")
    assert green.read() == {}


def test_every_check_is_recorded_by_its_make_target(green: ModuleType) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert set(re.findall(r"^\t\$\(GREEN\) (\S+)", makefile, re.MULTILINE)) == set(green.CHECKS)
    for name in green.CHECKS:
        rule = re.search(rf"^{name}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
        assert rule is not None and rule[1].splitlines()[-1].startswith(f"\t$(GREEN) {name}"), name
