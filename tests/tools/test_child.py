"""Processes that take questions: answers, noise on stdout, errors, ends, and too long a silence."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from logitless.lab.tools import child

SCRIPT = """
import json, os, sys, time
for line in sys.stdin:
    job = json.loads(line)
    print("a library says hello")
    if job["do"] == "die":
        sys.stderr.write("first\\nsecond\\nboom\\n"); sys.exit(3)
    if job["do"] == "kill":
        os.kill(os.getpid(), 9)
    if job["do"] == "sleep":
        time.sleep(60)
    print("\\n@answer " + json.dumps(dict(job, path=os.environ["PYTHONPATH"], own=os.environ.get("OWN"))), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    (tmp_path / "w.py").write_text(SCRIPT)
    return [str(tmp_path / "w.py")]


def test_a_worker_answers_again_and_again(script: list[str]) -> None:
    with child.Worker(script, dict(OWN="1")) as worker:
        for i in range(3):
            found = worker.ask(dict(do="echo", i=i), 30)
            assert found["i"] == i and found["own"] == "1" and child.SOURCE in found["path"]


@pytest.mark.parametrize(
    "do, message",
    [("die", "exit 3: first | second | boom"), ("kill", "out of memory (killed)"), ("sleep", "stopped after")],
)
def test_the_end_of_a_worker_is_an_answer(script: list[str], do: str, message: str) -> None:
    with child.Worker(script) as worker:
        found = worker.ask(dict(do=do), 1 if do == "sleep" else 30)
        assert message in found["error"] and found["gone"]


def test_serving(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(kind: str) -> dict[str, Any]:
        if kind == "memory":
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5 bytes")
        raise ValueError("boom")

    jobs = [dict(do="add", a=1, b=2), dict(do="fail", kind="memory"), dict(do="fail", kind="x"), dict(do="none")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(j) + "\n" for j in jobs)))
    child.serve(dict(add=lambda a, b: dict(sum=a + b), fail=fail))
    lines = [x.removeprefix(child.MARK) for x in capsys.readouterr().out.splitlines() if x.startswith(child.MARK)]
    assert [json.loads(x) for x in lines] == [
        dict(sum=3), dict(error="out of memory"), dict(error="ValueError: boom"), dict(error="KeyError: 'none'")
    ]  # fmt: skip
