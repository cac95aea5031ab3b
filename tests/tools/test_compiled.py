"""Compiled programs are kept by default, where they can be, and not where a user says so."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from logitless.lab.tools import compiled


@pytest.fixture(autouse=True)
def no_cache_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before, least = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("LOGITLESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOGITLESS_COMPILE_CACHE", raising=False)
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


def test_on_by_default_in_the_users_cache(tmp_path: Path) -> None:
    compiled.keep()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "cache" / "compiled")
    assert (tmp_path / "cache" / "compiled").is_dir()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == compiled.LEAST_SECONDS


def test_turned_off_or_there_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGITLESS_COMPILE_CACHE", "off")
    compiled.keep()
    assert jax.config.jax_compilation_cache_dir is None and compiled.folder_of_programs() is None
    monkeypatch.delenv("LOGITLESS_COMPILE_CACHE")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    compiled.keep()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")


def test_a_folder_that_cannot_be_had_is_said_and_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cache").write_text("a file")
    compiled.keep()
    assert jax.config.jax_compilation_cache_dir is None
    assert capsys.readouterr().err.startswith("compiled programs are not kept: ")


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    for name, age in (("old", 9000), ("older", 99000), ("new", 10)):
        (tmp_path / name).write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    compiled._make_room(tmp_path, 250)
    assert {p.name for p in tmp_path.iterdir()} == {"old", "new"}
    compiled._make_room(tmp_path, 0)
    assert {p.name for p in tmp_path.iterdir()} == {"new"}  # another process may be about to read it
