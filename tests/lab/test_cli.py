"""The ``logitless`` command."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import logitless
import report_records
from logitless.lab.cli import main

ROOT = Path(__file__).parents[2]


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
    assert max(map(len, out.splitlines())) <= 80


def test_demo_where_hidden_is_as_wide_as_the_vocabulary(capsys: pytest.CaptureFixture[str]) -> None:
    """The head's shape alone does not tell its layout then."""
    assert main(["demo", "--quick", "--tokens", "8", "--hidden", "8", "--vocab", "8"]) == 0
    assert "the two agree" in capsys.readouterr().out


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-command"], "no-such-command"),
        (["--no-such-option"], "--no-such-option"),
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


def test_closed_standard_streams_end_in_no_traceback(tmp_path: Path) -> None:
    """As under some crons. What the command says is written as ever where a stream is open."""
    command = f"{sys.executable} -m logitless configs >&- 2>{tmp_path / 'said'}"
    assert subprocess.run(["sh", "-c", command], timeout=120, check=False).returncode == 0
    assert (tmp_path / "said").read_text() == ""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("configs", 0),
        ("", 0),
        ("plan --hidden 128 --vocab 1024 --tokens 128 --chip v6e", 0),
        ("demo --tokens 1", 2),
        ("report nowhere.json", 2),
        ("bench --suite nowhere", 2),
        ("train no.such=key", 2),
    ],
)
def test_a_command_without_standard_streams(arguments: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(arguments.split()) == code


def test_an_interrupted_demo_says_what_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo has no ``--resume``; the A/B that it runs has. Before it comes what the losses need, verified."""
    from logitless.lab.bench import microbench
    from logitless.train import ab

    def measured(c: Any, say: Any) -> dict[str, Any]:
        assert c.vocab > 100_000 and c.verify
        return report_records.bench_record("memory first")

    monkeypatch.setattr(microbench, "run", measured)

    def stopped(config: Any, **_: Any) -> None:
        raise ab.ArmFailed("baseline", 130, f": stopped in {config.run_dir}")

    monkeypatch.setattr(ab, "run", stopped)
    (tmp_path / "demo").mkdir()  # taken, so that the demo has another folder
    folder = tmp_path / "demo-2"
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 130
    out, said = capsys.readouterr()
    assert out.index("memory first") < out.index("Two-number addition")
    assert f"stopped in {folder}; `logitless ab --resume {folder}` completes its training" in said
    assert "with --resume" not in said
    assert main(["ab", f"run_dir={folder}"]) == 130
    assert capsys.readouterr().err.endswith(f"stopped in {folder}; continue with --resume\n")
