"""The arms of a case in turn: A B C, A B C, ... with every process but the one whose turn it is standing still.

All arms of this checkout share a process; another checkout's library and PyTorch have a process each. An arm that does
not fit there, although the device has room, gets a separate process. From then on every process is closed before the
next process runs, and reopened in the next round with programs from the compilation cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from logitless.lab.bench.case import Arm
from logitless.lab.tools.child import OUT_OF_MEMORY, SOURCE, Worker

SCRIPT = str(Path(__file__).with_name("worker.py"))
Say = Callable[[str], None]


def open_worker(source: str = "", peers: str | None = None, environment: dict[str, str] | None = None) -> Worker:
    """A worker with the library of ``source`` (this tree's if empty); ``peers`` is where PyTorch's libraries are."""
    more = {} if peers is None else dict(LOGITLESS_PEERS=peers)
    command = [SCRIPT, source or SOURCE, *([] if peers is None else ["peers"])]
    return Worker(command, {**(environment or {}), **more})


def _no_room(found: dict[str, Any]) -> bool:
    return str(found.get("error", "")).startswith(OUT_OF_MEMORY)


class Turns:
    """The processes of one case."""

    def __init__(self, case: dict[str, Any], arms: dict[str, Arm], peers: str | None, environment: dict[str, str]):
        self.case, self.arms, self.peers = case, arms, peers
        self.apart: set[str] = set()
        self._open: dict[Any, tuple[Any, set[str]]] = {}
        groups = {self._group(name) for name in arms}
        # Several processes share a device: none may preallocate most of its memory.
        self.environment = dict(environment, **({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if len(groups) > 1 else {}))

    def _group(self, name: str) -> Any:
        arm = self.arms[name]
        return arm.source, arm.kind == "peer", name if name in self.apart else ""

    def _ask(self, name: str, do: str) -> dict[str, Any]:
        """Ask the arm's process, which is opened and told of the arm where it has to be."""
        group, arm = self._group(name), self.arms[name]
        if self.apart:
            self.close(keep=group)
        if group not in self._open:
            peers = self.peers or "" if arm.kind == "peer" else None
            self._open[group] = open_worker(arm.source, peers, self.environment), set()
        worker, ready = self._open[group]
        found: dict[str, Any] = {}
        if name not in ready:
            job = dict(do="prepare", case=self.case, name=name, arm=dataclasses.asdict(arm))
            found = worker.ask(job, self.case["timeout_s"])
            if "error" not in found:
                ready.add(name)
        if "error" not in found and do == "turn":
            found = worker.ask(dict(do="turn", case=self.case, name=name), self.case["timeout_s"])
        if found.get("gone"):
            worker.close()
            del self._open[group]
        return found

    def prepare(self, name: str) -> dict[str, Any]:
        """Compile and run the arm once; one that finds no room is tried alone, unless that is hopeless."""
        found = self._ask(name, "prepare")
        hopeless = found.get("needs", 0) > found.get("limit", float("inf"))
        if not _no_room(found) or hopeless or len(self.arms) == 1:
            return found
        self.close()
        self.apart.add(name)
        found = self._ask(name, "prepare")
        if "error" in found:
            self.close()
            self.apart.discard(name)
        return found

    def turn(self, name: str) -> dict[str, Any]:
        """One turn's times."""
        return self._ask(name, "turn")

    def close(self, keep: Any = None) -> None:
        """End the processes, but for one."""
        for group in [g for g in self._open if g != keep]:
            self._open.pop(group)[0].close()


def measure(turns: Turns, rounds: int, say: Say) -> dict[str, dict[str, Any]]:
    """Prepare every arm, then measure ``rounds`` of turns: each arm's result with ``turns``, or with ``error``."""
    found: dict[str, dict[str, Any]] = {}
    try:
        for name in turns.arms:
            say(f"compiling {name}")
            found[name] = {**turns.prepare(name), "turns": []}
        for i in range(rounds):
            say(f"round {i + 1}/{rounds}" + (", a process for each arm" if turns.apart else ""))
            for name, row in found.items():
                if "error" in row:
                    continue
                part = turns.turn(name)
                if "error" in part:
                    row["error"] = part["error"]
                else:
                    row["turns"].append(part)
    finally:
        turns.close()
    return found
