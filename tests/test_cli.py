"""The ``logitless`` command."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import logitless
from logitless.lab.cli import main

ROOT = Path(__file__).parent.parent


def test_the_command_is_installed_under_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["logitless"].split(":")
    monkeypatch.setattr(sys, "argv", ["logitless", "configs"])
    assert getattr(importlib.import_module(module), function)() == 0 == main(["configs"])
    said = capsys.readouterr().out
    assert said and said[: len(said) // 2] == said[len(said) // 2 :]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"logitless {logitless.__version__}"
    assert logitless.__version__.count(".") == 2


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    asked = capsys.readouterr().out
    assert "usage: logitless" in asked and "demo" in asked and "--version" in asked
    assert main([]) == 0  # no command: the same help
    assert capsys.readouterr().out == asked


def test_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--quick", "--tokens", "64", "--hidden", "16", "--vocab", "128"]) == 0
    out = capsys.readouterr().out
    for word in ("linear_grpo_loss: backend chunked", "reference", "chunked", "MiB", "ratio", "the two agree"):
        assert word in out


def test_demo_where_hidden_is_as_wide_as_the_vocabulary(capsys: pytest.CaptureFixture[str]) -> None:
    """The head's shape alone does not tell its layout then."""
    assert main(["demo", "--quick", "--tokens", "8", "--hidden", "8", "--vocab", "8"]) == 0
    assert "the two agree" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-command"], "no-such-command"),
        (["--no-such-option"], "--no-such-option"),
        (["demo", "--tokens", "many"], "--tokens"),
        (["demo", "--tokens", "0"], "--tokens 0, expected at least 8"),
        (["demo", "--vocab", "-3"], "--vocab -3, expected at least 8"),
        (["demo", "--hidden", "2"], "--hidden 2, expected at least 8"),
        (["demo", "--seed", "-1"], "--seed -1, expected at least 0"),
    ],
)
def test_bad_usage_exits_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(arguments)
    except SystemExit as stop:  # argparse's own way
        code = stop.code  # type: ignore[assignment]
    captured = capsys.readouterr()
    assert code == 2
    assert message in captured.err and not captured.out


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["demo", "--tokens", "1"], 2)])
def test_python_m_logitless(arguments: list[str], code: int) -> None:
    done = subprocess.run([sys.executable, "-m", "logitless", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    assert (f"logitless {logitless.__version__}" in done.stdout) == (code == 0)
    assert "Traceback" not in done.stderr
