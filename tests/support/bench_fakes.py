"""Workers of a benchmark without processes: the real handlers in this process, or arms whose times are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from logitless.lab.bench import arm, turns
from logitless.lab.tools import child

ENVIRONMENT = dict(jax="0", jaxlib="0", device="testchip", platform="cpu")
MEMORY = dict(arguments=4000, outputs=2000, temporaries=1000, aliased=0, peak=7000)


class InThisProcess:
    """A worker that answers as a real one, here; ``asked`` has every job."""

    def __init__(self, asked: list[dict[str, Any]]):
        self.handlers, self.asked = arm.handlers(), asked

    def ask(self, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self.asked.append(dict(job))
        return json.loads(json.dumps(child.answer(self.handlers, json.loads(json.dumps(job)))))

    def close(self) -> None:
        pass

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(turns, "open_worker", lambda *a, **k: InThisProcess(asked))
    return asked


class Scripted(InThisProcess):
    """A worker whose answers a function makes from the job; ``worker`` numbers it, and ``None`` is a process that
    dies."""

    def __init__(self, asked: list[dict[str, Any]], number: int, answer: Callable[[dict[str, Any]], Any]):
        self.asked, self.number, self.answer = asked, number, answer

    def ask(self, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        job = dict(json.loads(json.dumps(job)), worker=self.number)
        self.asked.append(job)
        found = self.answer(job)
        return dict(error="out of memory (killed)", gone=True) if found is None else found

    def close(self) -> None:
        self.asked.append(dict(do="close", worker=self.number))


def scripted(monkeypatch: pytest.MonkeyPatch, answer: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
    """Every worker answers by ``answer``; returns the jobs of all of them, in order."""
    asked: list[dict[str, Any]] = []
    count = [0]

    def open_worker(source: str = "", peers: str | None = None, environment: Any = None) -> Scripted:
        count[0] += 1
        asked.append(dict(do="open", worker=count[0], source=source, peers=peers, environment=environment))
        return Scripted(asked, count[0], answer)

    monkeypatch.setattr(turns, "open_worker", open_worker)
    return asked


def prepared(loss: float = 1.0, **more: Any) -> dict[str, Any]:
    """What a worker says of an arm that it compiled."""
    return dict(environment=ENVIRONMENT, compiler=MEMORY, has_peaks=False, live=16, loss=loss, grad_norms=[1.0]) | more


def turn(*wall: float, back_to_back: float = 0.5, **more: Any) -> dict[str, Any]:
    return dict(wall_ms=list(wall), back_to_back_ms=back_to_back) | more
