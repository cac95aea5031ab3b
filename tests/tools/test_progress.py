"""How far a command is: a bar on a real pseudo-terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench_fakes import prepared, scripted, turn
from logitless.lab import cli
from logitless.lab.tools import progress
from logitless.lab.tpu import command as tpu_command
from logitless.train import ab, loop
from logitless.train.config import load
from train_micro import micro  # noqa: F401

BAR = "\u2501"


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Standard error on a pseudo-terminal of 80 columns; what was written to it is in the list afterwards."""
    pytest.importorskip("rich")
    master, slave = os.openpty()
    written: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while block := os.read(master, 65536):
                written.append(block)

    reader = threading.Thread(target=read)
    reader.start()
    seen: list[str] = []
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with open(slave, "w") as stderr, monkeypatch.context() as m:
        m.setattr(sys, "stderr", stderr)
        yield seen
    reader.join(timeout=10)
    os.close(master)
    seen.append(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(written).decode()))


def test_a_training_run_has_a_bar(micro: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    with terminal(monkeypatch) as seen:
        loop.run(load(None, [*micro, f"run_dir={tmp_path / 'run'}", "train.steps=3", "checkpoint.every=0"]))
    (text,) = seen
    assert BAR in text and "3/3" in text and "s/step" in text and "reward" in text
    assert "loading" in text and "compiling" in text  # phases by name


FAKE_ARM = """
import json, sys, time
folder = sys.argv[1]
print("compiling", file=sys.stderr, flush=True)
time.sleep(1.0)
for step in range(1, 5):
    record = {"step": step, "train/loss": 0.5, "train/reward": 0.25, "time/train/step_avg_last10_s": 2.0}
    with open(folder + "/metrics.jsonl", "a") as file:
        file.write(json.dumps(record) + "\\n")
time.sleep(1.0)
sys.exit(int(sys.argv[2]))
"""


def fake_arms(monkeypatch: pytest.MonkeyPatch, code: int = 0) -> None:
    """Arms that write four steps and end."""

    def start(arms: dict[str, Any], resume: bool) -> subprocess.Popen[bytes]:
        ((name, arm),) = arms.items()
        Path(arm.run_dir).mkdir(parents=True, exist_ok=True)
        with ab._log(arm, name).open("ab") as log:
            return subprocess.Popen([sys.executable, "-c", FAKE_ARM, arm.run_dir, str(code)], stderr=log)

    monkeypatch.setattr(ab, "_start", start)
    monkeypatch.setattr(ab, "comparison", lambda *_: {})
    monkeypatch.setattr(ab, "_outcome", lambda *_: {})


def ab_config(folder: Path) -> Any:
    return load(None, ["ab.kernel=chunked", "ab.replay=false", "train.steps=4", f"run_dir={folder}"])


@pytest.mark.slow  # 4 seconds of processes; without a terminal it is tested, too
def test_an_ab_has_one_bar_over_all_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_arms(monkeypatch)
    with terminal(monkeypatch) as seen:
        ab.run(ab_config(tmp_path))
    (text,) = seen
    assert BAR in text and "8/8" in text  # both arms
    assert "baseline: compiling" in text and "kernel 4/4  reward 0.250  loss 0.5000  2.00 s/step" in text


def test_an_ab_without_a_terminal_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_arms(monkeypatch)
    monkeypatch.setattr(ab, "EVERY_S", 0.3)
    said: list[str] = []
    ab.run(ab_config(tmp_path), say=said.append)
    assert "baseline: compiling" in said
    assert any(line.startswith("kernel 4/4  reward 0.250  loss 0.5000") for line in said), said


def test_an_arm_that_fails_says_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_arms(monkeypatch, code=3)
    with pytest.raises(ab.ArmFailed, match=r"arm baseline ended with exit code 3: compiling \(all it said: .*\.log\)"):
        ab.run(ab_config(tmp_path), say=lambda _: None)


def test_bench_gradcheck_and_tpu_compile_have_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(job: dict[str, Any]) -> dict[str, Any]:
        return prepared() if job["do"] == "prepare" else turn(5.0)

    program = dict(peak=3, arguments=1, outputs=1, kernels=2, logits_in_program=False, collectives=[], seconds=1.0)
    scripted(monkeypatch, answer)
    monkeypatch.setattr(tpu_command, "_compile", lambda *_: program)
    monkeypatch.setattr(tpu_command.aot, "missing", lambda: None)
    shape = ["tokens=16", "rows=2", "hidden=16", "vocab=64", "dtype=float32", "verify=false", "rounds=3"]
    small = ["level=logits", "batch=1", "tokens=4", "hidden=8", "vocab=20"]
    for arguments, stages, named in (
        (["bench", *shape, "baselines=[strong]", f"out={tmp_path / 'b'}"], 5, "round 3/3"),
        (["gradcheck", *small, f"out={tmp_path / 'g'}"], 4, "float64 oracle"),
        (["tpu", "compile", "--hidden", "16", "--vocab", "64"], 2, "compiling the dense program"),
    ):
        with terminal(monkeypatch) as seen:
            assert cli.main(arguments) == 0
        (text,) = seen
        assert BAR in text and f"/{stages}" in text and named in text, (arguments, text)
        assert cli.main(arguments) == 0  # and without a terminal, a line for each
        said = capsys.readouterr().err
        assert BAR not in said and f"  ... {named}" in said, said


def test_a_phase_that_lasts_is_named_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.2)
    said: list[str] = []
    with progress.Progress(3, say=said.append) as bar:
        bar.announce("compiling")
        time.sleep(1.0)
    assert said[0] == "compiling" and said[1] == "compiling, 0 s so far" and len(said) < 7
    count = len(said)
    time.sleep(0.5)
    assert len(said) == count  # and the thread has ended


def test_steps_of_a_run_that_was_cut_are_not_counted(tmp_path: Path) -> None:
    config = load(None, [f"run_dir={tmp_path}"])
    assert ab._course(config) == (0, {})
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"step": 0, "eval/reward": 1.0}) + "\n" + json.dumps({"train/loss": 1.0}) + '\n{"train/loss": 2'
    )
    assert ab._course(config) == (1, {"train/loss": 1.0})
