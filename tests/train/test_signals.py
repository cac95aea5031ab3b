"""Signals and closed pipes, in processes of their own where they end one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from logitless.lab import signals


def test_a_closed_pipe_is_no_traceback() -> None:
    command = [sys.executable, "-m", "logitless", "configs"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    os.close(writer)
    assert done.returncode == 141 and done.stderr == ""


def stop_me() -> None:
    """A SIGTERM, heard before the next line."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)


def test_a_signal_waits_for_what_is_held_and_a_second_one_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with signals.heard("test"):
        with signals.held("step") as hold:
            stop_me()
            assert hold.received == signal.SIGTERM
            assert capsys.readouterr().err == "stopping after this step; again to stop now\n"
            with pytest.raises(signals.Stop):
                stop_me()
        with pytest.raises(signals.Stop, match="stopped by SIGTERM"):
            stop_me()
    with signals.held("step") as hold:  # without a command around it: in a notebook
        stop_me()
    assert hold.received == signal.SIGTERM and signal.getsignal(signal.SIGTERM) == before


STUCK = """
import hashlib, sys
from logitless.lab import exits
def work():
    print("working", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes in C, as a compilation is
    return 0
sys.exit(exits.run("train", work))
"""


def test_a_process_that_is_deep_in_c_ends_within_seconds() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "working\n"
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143 and error == "logitless train: stopped by SIGTERM\n"
    assert time.monotonic() - start < signals.GRACE + 20
