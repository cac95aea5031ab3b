"""How the suite itself is put together."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_file_names_are_unique() -> None:
    """Test files of different folders are imported under their bare names."""
    names = [f.name for f in TESTS.glob("**/*.py") if f.name != "__main__.py"]  # which is run, never imported
    assert sorted(names) == sorted(set(names))
