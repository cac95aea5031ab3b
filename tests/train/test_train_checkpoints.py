"""What a run leaves on disk, and how it goes on after a kill, a signal, a NaN or a full disk."""

from __future__ import annotations

import errno
import json
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from logitless.lab import cli
from logitless.train import checkpoints, folder, loop, trainer
from logitless.train.config import load
from train_micro import kept_programs, logitless, micro  # noqa: F401

pytestmark = pytest.mark.usefixtures("kept_programs")

TREE = {"w": jnp.arange(6.0).reshape(2, 3), "deep": {"n": jnp.int32(3), "b": jnp.ones((4,), jnp.bfloat16)}}


def test_a_tree_comes_back_to_the_bit_and_old_ones_go(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        tree = {**TREE, "w": TREE["w"] + step}
        checkpoints.save(tmp_path, step, tree, {"skipped_in_a_row": step}, keep=2)
    assert checkpoints.steps_in(tmp_path) == [4, 6]
    found = checkpoints.restore(tmp_path, TREE, pytest.fail)
    assert found is not None
    step, tree, notes = found
    assert step == 6 and notes["skipped_in_a_row"] == 6
    np.testing.assert_array_equal(tree["w"], TREE["w"] + 6)
    assert tree["deep"]["b"].dtype == jnp.bfloat16 and int(tree["deep"]["n"]) == 3


def _about(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Replace what the header says under ``about`` by what ``change`` makes of it."""

    def damage(file: Path) -> None:
        about = checkpoints.read_about(file)
        changed = change(about)
        arrays = load_file(file)
        save_file(arrays, file, metadata={"about": json.dumps(about if changed is None else changed)})

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "bits": lambda f: f.write_bytes(f.read_bytes()[:-8] + bytes(b ^ 0xFF for b in f.read_bytes()[-8:])),
    "cut": lambda f: f.write_bytes(f.read_bytes()[:-1]),
    "empty": lambda f: f.write_bytes(b""),
    "no metadata": lambda f: save_file(load_file(f), f),
    "a list": _about(lambda about: [about]),
    "checksums a number": _about(lambda about: about.update(crc32=3)),
    "checksum": _about(lambda about: about["crc32"].update({"['w']": 3})),
    "no checksum": _about(lambda about: about["crc32"].pop("['w']") and None),
    "no notes": _about(lambda about: about.pop("skipped") and None),
    "notes": _about(lambda about: about.update(skipped="3")),
    "another step": _about(lambda about: about.update(step=5)),
    "a folder": lambda f: (f.unlink(), f.mkdir()),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_an_unreadable_checkpoint_is_named_and_the_one_before_it_taken(tmp_path: Path, how: str) -> None:
    for step in (2, 4):
        checkpoints.save(tmp_path, step, TREE, {"skipped": 3}, keep=2)
    last = checkpoints.step_file(tmp_path, 4)
    DAMAGES[how](last)
    said: list[str] = []
    found = checkpoints.restore(tmp_path, TREE, said.append, counts=["skipped"])
    assert found is not None and found[0] == 2 and found[2]["skipped"] == 3
    assert any("WARNING" in s and str(last) in s for s in said) and any("going back" in s for s in said)
    assert all("\n" not in s for s in said)
    assert checkpoints.steps_in(tmp_path) == [2]  # out of the way, but not deleted
    assert (tmp_path / "unreadable_step_00000004.safetensors").exists()
    DAMAGES[how](checkpoints.step_file(tmp_path, 2))
    with pytest.raises(checkpoints.CheckpointError, match=r"none of the checkpoints of steps \[2\] can be read"):
        checkpoints.restore(tmp_path, TREE, said.append, counts=["skipped"])


def test_folders_that_are_no_checkpoints_are_named_and_left_alone(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 2, TREE, {}, keep=2)
    strangers = [
        tmp_path / name for name in ("step_\N{SUPERSCRIPT TWO}", "step_7", "step_00000007.bak", "step_-0000001")
    ]
    for stranger in strangers:
        stranger.mkdir()
    said: list[str] = []
    found = checkpoints.restore(tmp_path, TREE, said.append)
    assert found is not None and found[0] == 2 and checkpoints.steps_in(tmp_path) == [2]
    assert len(said) == 4 and all(f.exists() and any(str(f) in s for s in said) for f in strangers)


def test_another_model_is_refused_by_the_array_that_differs(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 2, TREE, {}, keep=2)
    other = {**TREE, "w": jnp.zeros((2, 4))}
    with pytest.raises(checkpoints.CheckpointError, match=r"\['w'\] is float32\[2, 3\], expected float32\[2, 4\]"):
        checkpoints.load_tree(checkpoints.step_file(tmp_path, 2), other)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_what_is_not_finite_is_never_written(tmp_path: Path, bad: float) -> None:
    checkpoints.save(tmp_path, 2, TREE, {}, keep=1)
    with pytest.raises(checkpoints.CheckpointError, match="NaN or infinity"):
        checkpoints.save(tmp_path, 4, {**TREE, "w": TREE["w"].at[0, 0].set(bad)}, {}, keep=1)
    assert checkpoints.steps_in(tmp_path) == [2]


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.save(tmp_path, 2, TREE, {}, keep=1)
    right = checkpoints._write

    def full(folder: Path, arrays: Any, notes: Any) -> None:
        right(folder, arrays, notes)  # all but the last byte
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "_write", full)
    with pytest.raises(checkpoints.CheckpointError, match=r"No space left on device.*untouched.*--resume"):
        checkpoints.save(tmp_path, 4, TREE, {}, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000002.safetensors"]
    assert checkpoints.restore(tmp_path, TREE, pytest.fail) is not None


def test_what_a_kill_left_half_written_is_ignored(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 2, TREE, {}, keep=2)
    (tmp_path / "step_00000004.safetensors.new").write_bytes(b"half")
    found = checkpoints.restore(tmp_path, TREE, pytest.fail)
    assert found is not None and found[0] == 2
    checkpoints.save(tmp_path, 4, TREE, {}, keep=2)
    assert checkpoints.steps_in(tmp_path) == [2, 4] and len(list(tmp_path.iterdir())) == 2


def _numbers(folder: Path) -> list[dict[str, Any]]:
    """The run's records without what comes from a clock."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith(loop.CLOCK_PREFIXES)} for r in records]


@pytest.mark.long
def test_killed_and_resumed_is_the_same_run(
    tmp_path: Path, micro: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """kill -9 in step 5 (4 is saved), SIGTERM in step 5, and nothing saved at all: each goes on to the same bits."""
    whole, broken, unsaved = tmp_path / "whole", tmp_path / "broken", tmp_path / "unsaved"
    killed = logitless("train", *micro, f"run_dir={broken}", KILL_AT=f"5:{int(signal.SIGKILL)}")
    assert killed.returncode == -signal.SIGKILL
    assert checkpoints.steps_in(broken / "checkpoints") == [2, 4]
    shutil.copytree(broken, unsaved)
    shutil.rmtree(unsaved / "checkpoints")

    def train(folder: Path, *options: str) -> tuple[int, str]:
        """What nobody kills needs no process of its own."""
        code = cli.main(["train", *options, *micro, f"run_dir={folder}"])
        return code, capsys.readouterr().err

    assert train(whole)[0] == 0
    code, said = train(unsaved, "--resume")
    assert code == 0 and "no checkpoint" in said
    with monkeypatch.context() as patch:
        patch.setenv("KILL_AT", f"5:{int(signal.SIGTERM)}")
        patch.setenv("FIRST_STEP", "5")
        code, said = train(broken, "--resume")
    assert code == 143 and "resumed after step 4" in said
    assert "step 5 is saved" in said and "Traceback" not in said
    assert checkpoints.steps_in(broken / "checkpoints") == [4, 5]
    code, said = train(broken, "--resume")
    assert code == 0 and "resumed after step 5" in said
    numbers = _numbers(whole)
    assert [r["step"] for r in numbers] == [1, 2, 3, 4, 5, 6]
    assert len({r["train/loss"] for r in numbers}) > 3  # something happened
    assert _numbers(broken) == numbers == _numbers(unsaved)
    assert json.loads((broken / "summary.json").read_text())["steps"] == 6

    assert cli.main(["train", "--resume", str(broken)]) == 0
    assert "the run is complete" in capsys.readouterr().err
    code, said = train(whole)
    assert code == 2 and "holds a run already" in said


def _nan_from(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = trainer.group_advantages, []

    def poisoned(rewards: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        out = right(rewards, *args, **kwargs)
        return out * jnp.nan if first <= len(calls) < first + 2 else out

    monkeypatch.setattr(trainer, "group_advantages", poisoned)


def test_nan_steps_are_skipped_reported_and_end_the_run_when_they_persist(
    tmp_path: Path,
    micro: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _nan_from(2, monkeypatch)  # steps 2 and 3 of both runs below
    said: list[str] = []
    loop.run(load(None, [*micro, f"run_dir={tmp_path / 'a'}", "train.steps=4", "checkpoint.every=1"]), say=said.append)
    records = _numbers(tmp_path / "a")
    assert [r["train/skipped"] for r in records] == [0, 1, 1, 0]
    assert [r["train/loss"] is None for r in records] == [False, True, True, False]
    assert sum("not finite" in s for s in said) == 2

    def state(step: int) -> dict[str, Any]:
        file = checkpoints.step_file(tmp_path / "a" / "checkpoints", step)
        return checkpoints.read_about(file)["crc32"] if file.exists() else {}

    assert state(3) and state(3) != state(4)

    monkeypatch.undo()
    _nan_from(2, monkeypatch)
    settings = [*micro, f"run_dir={tmp_path / 'b'}", "train.max_skipped=2", "checkpoint.every=1"]
    assert cli.main(["train", *settings]) == 3
    assert "2 steps in a row" in capsys.readouterr().err
    # Step 1 was saved; step 2 was skipped, so its checkpoint holds the weights of step 1.
    first, second = (checkpoints.step_file(tmp_path / "b" / "checkpoints", s) for s in (1, 2))
    assert checkpoints.read_about(first)["crc32"] == checkpoints.read_about(second)["crc32"]


def test_a_full_disk_ends_the_run_with_3(
    tmp_path: Path,
    micro: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "_write", full)
    assert cli.main(["train", *micro, f"run_dir={tmp_path / 'run'}"]) == 3
    assert "No space left on device" in capsys.readouterr().err


def test_a_full_disk_is_one_error_and_nothing_else_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The system refuses to write more than 50 kB to a file, as a full disk does in the middle of one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(checkpoints.CheckpointError, match=r"could not be written .*too large.*--resume") as error:
            checkpoints.save(tmp_path, 1, {f"w{i}": np.ones((200, 300)) for i in range(8)}, {}, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "") and not caplog.records


LINES = [json.dumps({"step": i}).encode() for i in range(1, 7)]


@pytest.mark.parametrize(
    "bad", [b'{"step": 3, "tr', b"\xff\xfe", b"[3]", b"3", b'{"loss": 1}', b'{"step": "3"}', b"[" * 9999]
)
def test_a_line_that_is_no_record_costs_no_other(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    before = b"\n".join([*LINES[:2], bad, b"", *LINES[3:], b'{"step": 7, "cut o'])
    path.write_bytes(before)
    said: list[str] = []
    folder.keep_records(path, 5, said.append)
    assert path.read_bytes() == b"".join(line + b"\n" for line in [*LINES[:2], *LINES[3:5]])
    assert len(said) == 1 and f"{path}: line 3 of 8" in said[0] and "\n" not in said[0]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == before
    folder.keep_records(path, 4, said.append)
    assert [r["step"] for r in folder.read_records(path)] == [1, 2, 4] and len(said) == 1


def test_what_a_damaged_run_left_is_gone_on_with(
    tmp_path: Path, micro: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a complete run of 2 steps: an empty summary is made again, and a bad line costs one record."""
    run = tmp_path / "run"
    settings = [*micro, "train.steps=2", "checkpoint.every=1", f"run_dir={run}"]
    assert cli.main(["train", *settings]) == 0
    metrics = run / "metrics.jsonl"
    first, second = metrics.read_bytes().splitlines()
    metrics.write_bytes(b"\n".join([first, b"\xff", second.replace(b'"train/reward"', b'"train/rewarc"'), b""]))
    (run / "summary.json").write_text("")
    capsys.readouterr()
    assert cli.main(["train", "--resume", str(run)]) == 0
    said = capsys.readouterr().err
    assert "summary.json cannot be read" in said and "metrics.jsonl: line 2 of 3" in said and "Traceback" not in said
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["train/reward_last10"] == json.loads(first)["train/reward"]
    for step in (1, 2):
        _about(lambda about: [about])(checkpoints.step_file(run / "checkpoints", step))
    assert cli.main(["train", "--resume", str(run)]) == 3
    said = capsys.readouterr().err
    assert "none of the checkpoints of steps [1, 2] can be read" in said and "Traceback" not in said
