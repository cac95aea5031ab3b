"""Commands behave: one line and the right exit code, nothing lost, no work before its output is known to fit."""

from __future__ import annotations

import errno
import os
import signal
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from logitless.lab import cli, exits, shipped_configs, signals
from logitless.lab.tools import progress
from logitless.train import ab, checkpoints, loop
from logitless.train import command as train_cli
from logitless.train import folder as folders
from logitless.train.config import ConfigError, load
from train_micro import logitless, micro  # noqa: F401

ROOT = Path(__file__).parents[2]


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "resume", "config", "overrides"),
    [
        (["run_dir=x", "--resume", "train.steps=2"], "", None, ["run_dir=x", "train.steps=2"]),
        (["--resume", "run_dir=x", "seed=1"], "", None, ["run_dir=x", "seed=1"]),
        (["--resume", "runs/a", "seed=1"], "runs/a", None, ["seed=1"]),
        (["seed=1", "--config", "tiny", "seed=2"], None, "tiny", ["seed=1", "seed=2"]),
        (["seed=1", "--resume"], "", None, ["seed=1"]),
    ],
)
def test_overrides_stand_on_both_sides_of_flags(arguments: Any, resume: Any, config: Any, overrides: Any) -> None:
    for command in ("train", "ab"):
        args = cli.parse([command, *arguments])
        assert (args.resume, args.config, args.overrides) == (resume, config, overrides)


@pytest.mark.parametrize("arguments", [["train", "seed=1", "--stepz", "3"], ["demo", "seed=1"], ["configs", "x"]])
def test_what_is_not_known_is_still_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2 and arguments[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["train", "tiny"], "did you mean --config tiny?"),
        (["ab", "seed=1", "my/own.yaml"], "did you mean --config my/own.yaml?"),
        (["gradcheck", "head_chunked"], "did you mean --config head_chunked?"),
        (["bench", "cpu_head_small"], "did you mean --config cpu_head_small?"),
        (["train", "tinny"], "expected key=value"),
        (["train", "--config", "tinny"], "no such configuration file"),
    ],
)
def test_a_configuration_in_the_wrong_place(arguments: Any, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert meant in capsys.readouterr().err


def test_configurations_go_by_name_and_into_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["configs"]) == 0
    printed = capsys.readouterr().out
    for kind in shipped_configs.KINDS:
        files = {p.stem: p for p in (ROOT / "configs" / kind).glob("*.yaml")}
        assert shipped_configs.names(kind) == files and len(files) > 4
        assert all(f"  {name} " in printed or f"  {name}\n" in printed for name in files)
    assert load(shipped_configs.find("train", "smollm2-135m-arithmetic")).name == "smollm2-135m-arithmetic"
    # A file of that name in the current folder is meant first.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").write_text("seed: 7\n")
    assert load(shipped_configs.find("train", "tiny")).seed == 7
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert build["force-include"]["configs"] == "logitless/configs"


def test_resume_takes_a_folder_and_its_configuration(tmp_path: Path) -> None:
    run = tmp_path / "a b"  # with a blank in it
    folders.open_folder(load(None, ["seed=3", "run_dir=elsewhere"]), run)
    args = cli.parse(["train", "--resume", str(run), "train.steps=200"])
    config = train_cli._config(args, "config.yaml")
    assert (config.seed, config.run_dir, config.train.steps) == (3, str(run), 200)


def test_a_folder_without_a_run_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--resume", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no run to continue (no config.yaml)" in capsys.readouterr().err
    (tmp_path / "ab.yaml").write_text("")
    assert cli.main(["train", "--resume", str(tmp_path / "no_such")]) == 2
    assert cli.main(["train", "--resume", str(tmp_path)]) == 2
    assert "logitless ab" in capsys.readouterr().err
    assert cli.main(["ab", "--resume", str(tmp_path), "--config", "tiny"]) == 2
    assert "leave out --config" in capsys.readouterr().err


# -- outputs ----------------------------------------------------------------------------------------------------------


def test_outputs_are_checked_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_work(*_: Any, **__: Any) -> Any:
        raise AssertionError("work was done")

    benches = ("bench.gradcheck.run", "bench.microbench.run", "bench.suites.run", "bench.report.write")
    for name in (*benches, "plan.command.run", "tpu.command.run"):
        monkeypatch.setattr(f"logitless.lab.{name}", no_work)
    monkeypatch.setattr(loop, "build_task", no_work)
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    file.write_text("")
    for arguments in (
        ["gradcheck", f"out={folder}"],
        ["bench", f"out={folder}"],
        ["bench", "--suite", "cpu", "--out", str(folder)],
        ["report", str(file), "--out", str(folder)],
        ["plan", "--model", "qwen2.5-7b", "--chip", "v6e", "--out", str(folder)],
        ["gradcheck", f"out={file}/x.jsonl"],
        ["train", f"run_dir={file}"],
        ["train", f"run_dir={file}/run"],
        ["ab", "ab.kernel=chunked", f"run_dir={file}"],
        ["demo", "--out", str(file / "demo")],
    ):
        assert cli.main(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert error.startswith(f"logitless {arguments[0]}: ") and error.count("\n") == 1, error
        assert str(folder) in error or str(file) in error
    exits.check_file(tmp_path / "new" / "x.json")
    assert not list((tmp_path / "new").iterdir())  # tried, and left as it was
    file.write_text("kept")
    exits.check_file(file)
    assert file.read_text() == "kept"


# -- endings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 3, "No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "a/b"), 2, "a/b: Permission denied"),
        (signals.Stop(signal.SIGTERM), 143, "stopped by SIGTERM"),
        (KeyboardInterrupt(), 130, "stopped by SIGINT"),
    ],
)
def test_every_command_ends_in_one_line(
    raised: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def command(*_: Any) -> int:
        raise raised

    for name in ("_report", "_bench", "_gradcheck", "_demo", "_configs"):
        monkeypatch.setattr(cli, name, command)
    for arguments in (["report", "x"], ["bench"], ["gradcheck"], ["demo"], ["configs"]):
        assert cli.main(arguments) == code
        assert capsys.readouterr().err == f"logitless {arguments[0]}: {said}\n"
    assert signal.getsignal(signal.SIGTERM) == before  # and the handlers are gone


def test_what_is_not_the_users_fault_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_configs", lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["configs"])


# -- nothing lost -----------------------------------------------------------------------------------------------------


def test_a_run_has_its_folder_to_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ab.yaml").write_text("seed: 5\n")
    with pytest.raises(ConfigError, match=r"seed: 0, but the run in .* has 5"):
        ab.run(load(None, ["ab.kernel=chunked", f"run_dir={tmp_path}"]), resume=True, say=print)
    assert (tmp_path / "ab.yaml").read_text() == "seed: 5\n"  # another one's configuration is not written over
    with folders.locked(tmp_path):
        for arguments in (["train"], ["train", "--resume"], ["ab", "ab.kernel=chunked"], ["ab", "--resume"]):
            assert cli.main([*arguments, f"run_dir={tmp_path}"]) == 2
            assert f"{tmp_path} is in use by process {os.getpid()} on " in capsys.readouterr().err
    (tmp_path / folders.LOCK).write_text("process 1 on a machine that is gone\n")
    with folders.locked(tmp_path):  # nobody holds it
        assert str(os.getpid()) in (tmp_path / folders.LOCK).read_text()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_kill_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    folders.open_folder(load(None, ["seed=1"]), tmp_path)

    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(ConfigError, match="No space left"):
        folders.open_folder(load(None, ["seed=2"]), tmp_path)
    monkeypatch.undo()
    assert load(tmp_path / "config.yaml").seed == 1


def test_a_checkpoint_is_on_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax.numpy as jnp

    calls: list[tuple[str, str]] = []
    sync, rename = os.fsync, os.replace

    def spy_sync(handle: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))
        sync(handle)

    def spy_rename(a: Any, b: Any) -> None:
        calls.append(("rename", str(a)))
        rename(a, b)

    monkeypatch.setattr(os, "fsync", spy_sync)
    monkeypatch.setattr(os, "replace", spy_rename)
    checkpoints.save(tmp_path, 2, {"w": jnp.ones(3)}, {}, keep=1)
    beside = str(tmp_path / "step_00000002.safetensors.new")
    assert calls == [("fsync", beside), ("rename", beside), ("fsync", str(tmp_path))]


def test_a_full_disk_while_recording_is_exit_code_3_with_the_checkpoint_named(tmp_path: Path) -> None:
    record = {"train/skipped": 0, "time/train/step_s": 1.0, "train/loss": 0.0, "train/reward": 0.0}
    fake = SimpleNamespace(step=lambda *_: (None, dict(record), None), traced=lambda _: False)

    class Full:
        def log(self, _: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    said: list[str] = []
    steps = loop.Run(load(None, ["eval.every=0"]), fake, tmp_path, said.append, 3)  # type: ignore[arg-type]
    steps.tracker, steps.last_saved = Full(), 2  # type: ignore[assignment]
    with pytest.raises(loop.TrainingFailed, match=r"step 1 could not be recorded \(No space left.*step 2 is whole"):
        steps.go(None, None, 0, progress.Progress(3, 0, said.append))  # type: ignore[arg-type]


FULL = """
import errno, os
from logitless.lab.tools import tracking

calls = 0

def sevens(completion, problem):
    global calls
    calls += 1
    if calls > 8 * 4 and "FULL" in os.environ:  # in step 5 the disk is full
        def fail(*_):
            raise OSError(errno.ENOSPC, "No space left on device")
        tracking.Tracker.log = fail
    return completion.count("7") / 3
"""


@pytest.mark.slow
def test_a_full_disk_in_a_real_run_loses_nothing(micro: list[str], tmp_path: Path) -> None:
    (tmp_path / "full.py").write_text(FULL)
    given = [*micro, f"reward.kind={tmp_path / 'full.py'}:sevens"]
    whole = logitless("train", *given, f"run_dir={tmp_path / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    run = tmp_path / "run"
    full = logitless("train", *given, f"run_dir={run}", FULL="1")
    assert full.returncode == 3 and "Traceback" not in full.stderr
    assert "step 5 could not be recorded (No space left on device); the checkpoint of step 4 is whole" in full.stderr
    again = logitless("train", "--resume", str(run))
    assert again.returncode == 0 and "resumed after step 4" in again.stderr

    def rewards(folder: Path) -> list[Any]:
        return [(r["step"], r["train/reward"], r["train/loss"]) for r in folders.read_records(folder / "metrics.jsonl")]

    assert rewards(run) == rewards(tmp_path / "whole") and len(rewards(run)) == 6


# -- progress ---------------------------------------------------------------------------------------------------------


def test_without_a_terminal_there_is_a_line_every_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"train/loss": -0.5, "train/reward": 0.25, "time/train/step_avg_last10_s": 30.0}
    said: list[str] = []
    bar = progress.Progress(10, 2, said.append)
    bar.step(progress.of_step(record), 30.0)
    bar.phase("evaluating")
    assert said == []  # not so soon
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    bar.step(progress.of_step(record), 30.0)
    bar.announce("evaluating")
    bar.step(progress.of_step({**record, "train/loss": None}), 30.0)
    assert said[0] == "step 4/10  reward 0.250  loss -0.5000  30.00 s/step  about 3 min left"
    assert said[1] == "evaluating" and "step 5/10  reward 0.250  loss skipped" in said[2]
    assert [progress.duration(s) for s in (5, 100, 9000)] == ["5 s", "2 min", "2.5 h"]
