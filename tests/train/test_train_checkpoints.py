"""What a run leaves on disk, and how it goes on after a kill, a signal, a NaN or a full disk."""

from __future__ import annotations

import errno
import json
import logging
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from logitless.lab import cli
from logitless.train import checkpoints, folder, loop, trainer
from logitless.train.config import ConfigError, load
from train_micro import compile_cache, logitless, micro  # noqa: F401

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


def _damage(folder: Path) -> None:
    """Flip the bits of the largest data file."""
    file = max((p for p in (folder / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    file.write_bytes(bytes(b ^ 0xFF for b in file.read_bytes()))


@pytest.mark.parametrize("how", ["bits", "cut", "gone", "checksum"])
def test_an_unreadable_checkpoint_is_named_and_the_one_before_it_taken(tmp_path: Path, how: str) -> None:
    for step in (2, 4):
        checkpoints.save(tmp_path, step, TREE, {}, keep=2)
    last = checkpoints.step_folder(tmp_path, 4)
    if how == "bits":
        _damage(last)
    elif how == "cut":
        (last / "about.json").write_text('{"step": 4, "arr')
    elif how == "gone":
        for file in (last / "arrays").rglob("*"):
            if file.is_file():
                file.unlink()
    else:
        about = json.loads((last / "about.json").read_text())
        about["arrays"]["['w']"]["crc32"] ^= 1
        (last / "about.json").write_text(json.dumps(about))
    said: list[str] = []
    found = checkpoints.restore(tmp_path, TREE, said.append)
    assert found is not None and found[0] == 2
    assert any("WARNING" in s and str(last) in s for s in said) and any("going back" in s for s in said)
    assert checkpoints.steps_in(tmp_path) == [2]  # out of the way, but not deleted
    assert (tmp_path / "unreadable_step_00000004").exists()


def test_no_readable_checkpoint_is_an_error(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 2, TREE, {}, keep=2)
    (checkpoints.step_folder(tmp_path, 2) / "about.json").unlink()
    with pytest.raises(checkpoints.CheckpointError, match="none of the checkpoints"):
        checkpoints.restore(tmp_path, TREE, lambda _: None)


def test_another_model_is_refused_by_the_array_that_differs(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 2, TREE, {}, keep=2)
    other = {**TREE, "w": jnp.zeros((2, 4))}
    with pytest.raises(checkpoints.CheckpointError, match=r"\['w'\] is float32\[2, 3\], expected float32\[2, 4\]"):
        checkpoints.load_tree(checkpoints.step_folder(tmp_path, 2), other)


def test_nan_is_never_written(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 2, TREE, {}, keep=1)
    with pytest.raises(checkpoints.CheckpointError, match="NaN or infinity"):
        checkpoints.save(tmp_path, 4, {**TREE, "w": TREE["w"].at[0, 0].set(jnp.nan)}, {}, keep=1)
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
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000002"]
    assert checkpoints.restore(tmp_path, TREE, pytest.fail) is not None


def test_what_a_kill_left_half_written_is_ignored(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 2, TREE, {}, keep=2)
    (tmp_path / ".unfinished_step_00000004" / "arrays").mkdir(parents=True)
    found = checkpoints.restore(tmp_path, TREE, pytest.fail)
    assert found is not None and found[0] == 2
    checkpoints.save(tmp_path, 4, TREE, {}, keep=2)
    assert checkpoints.steps_in(tmp_path) == [2, 4]


def _numbers(folder: Path) -> list[dict[str, Any]]:
    """The run's records without what comes from a clock."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith(loop.CLOCK_PREFIXES)} for r in records]


def test_killed_and_resumed_is_the_same_run(
    tmp_path: Path,
    micro: list[str],  # noqa: F811
    compile_cache: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    """kill -9 in step 1 (nothing saved yet) and in step 5 (4 is saved), then SIGTERM in step 5: bit-identical."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def train(folder: Path, *options: str, **environment: str) -> Any:
        return logitless(compile_cache, "train", *options, *micro, f"run_dir={folder}", **environment)

    assert cli.main(["train", *micro, f"run_dir={whole}"]) == 0
    assert train(broken, KILL_AT=f"1:{int(signal.SIGKILL)}").returncode == -signal.SIGKILL
    done = train(broken, "--resume", KILL_AT=f"5:{int(signal.SIGKILL)}")
    assert done.returncode == -signal.SIGKILL and "no checkpoint" in done.stderr
    assert checkpoints.steps_in(broken / "checkpoints") == [2, 4]

    done = train(broken, "--resume", KILL_AT=f"5:{int(signal.SIGTERM)}", FIRST_STEP="5")
    assert done.returncode == 143 and "resumed after step 4" in done.stderr
    assert "step 5 is saved" in done.stderr and "Traceback" not in done.stderr
    assert checkpoints.steps_in(broken / "checkpoints") == [4, 5]

    # What nobody kills needs no process of its own.
    capsys.readouterr()
    assert cli.main(["train", "--resume", *micro, f"run_dir={broken}"]) == 0
    assert "resumed after step 5" in capsys.readouterr().err
    numbers = _numbers(whole)
    assert [r["step"] for r in numbers] == [1, 2, 3, 4, 5, 6]
    assert len({r["train/loss"] for r in numbers}) > 3  # something happened
    assert _numbers(broken) == numbers
    assert json.loads((broken / "summary.json").read_text())["steps"] == 6

    assert cli.main(["train", "--resume", str(broken)]) == 0
    assert "the run is complete" in capsys.readouterr().err
    assert cli.main(["train", *micro, f"run_dir={whole}"]) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_resuming_with_another_configuration_is_refused(tmp_path: Path, micro: list[str]) -> None:  # noqa: F811
    settings = [*micro, f"run_dir={tmp_path / 'run'}"]
    folder.open_folder(load(None, settings), tmp_path / "run")
    folder.check_folder(load(None, [*settings, "checkpoint.keep=5"]), True, print)
    with pytest.raises(ConfigError, match=r"train.learning_rate: 0.5, but the run in .* has 0.01"):
        folder.check_folder(load(None, [*settings, "train.learning_rate=0.5"]), True, print)


def _nan_from(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = trainer.group_advantages, []

    def poisoned(rewards: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        out = right(rewards, *args, **kwargs)
        return out * jnp.nan if first <= len(calls) < first + 2 else out

    monkeypatch.setattr(trainer, "group_advantages", poisoned)


def test_nan_steps_are_skipped_reported_and_end_the_run_when_they_persist(
    tmp_path: Path,
    micro: list[str],  # noqa: F811
    compile_cache: Path,  # noqa: F811
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
        about = checkpoints.step_folder(tmp_path / "a" / "checkpoints", step) / "about.json"
        return json.loads(about.read_text())["arrays"] if about.exists() else {}

    assert state(3) and state(3) != state(4)

    monkeypatch.undo()
    _nan_from(2, monkeypatch)
    settings = [*micro, f"run_dir={tmp_path / 'b'}", "train.max_skipped=2", "checkpoint.every=1"]
    assert cli.main(["train", *settings]) == 3
    assert "2 steps in a row" in capsys.readouterr().err
    # Step 1 was saved; step 2 was skipped, so its checkpoint holds the weights of step 1.
    first, second = (checkpoints.step_folder(tmp_path / "b" / "checkpoints", s) / "about.json" for s in (1, 2))
    assert json.loads(first.read_text())["arrays"] == json.loads(second.read_text())["arrays"]


def test_a_full_disk_ends_the_run_with_3(
    tmp_path: Path,
    micro: list[str],  # noqa: F811
    compile_cache: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "_write", full)
    assert cli.main(["train", *micro, f"run_dir={tmp_path / 'run'}"]) == 3
    assert "No space left on device" in capsys.readouterr().err


def test_a_disk_that_is_full_is_one_error_and_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Orbax logs the traceback of each of its threads besides raising what they raised."""

    class Full:
        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def save(self, *_: object) -> None:
            logging.getLogger("absl").error("a thread raised an exception", exc_info=OSError("no space left"))

        def wait_until_finished(self) -> None:
            raise ValueError("RESOURCE_EXHAUSTED: no space left")

    monkeypatch.setattr(checkpoints, "_orbax", lambda: SimpleNamespace(StandardCheckpointer=Full))
    with pytest.raises(checkpoints.CheckpointError, match=r"could not be written .*no space left.*--resume"):
        checkpoints.save(tmp_path / "checkpoints", 1, {"x": np.ones(2)}, {}, 1)
    assert not caplog.records and not logging.getLogger("absl").disabled
