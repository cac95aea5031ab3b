"""How the suite itself is put together."""

from __future__ import annotations

from pathlib import Path

from conftest import LONG

TESTS = Path(__file__).parents[1]


def test_tests_that_are_named_exist() -> None:
    """Names in ``LONG`` are beginnings: one that fits nothing would select nothing, silently."""
    for name in LONG:
        file, _, test = name.partition("::")
        source = (TESTS / file).read_text()
        assert f"def {test.split('[')[0]}" in source, f"{name} is not there"


def test_file_names_are_unique() -> None:
    """Test files of different folders are imported under their bare names."""
    names = [f.name for f in TESTS.glob("**/*.py") if f.name != "__main__.py"]  # which is run, never imported
    assert sorted(names) == sorted(set(names))
