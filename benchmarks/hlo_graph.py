"""Optimised HLO as a graph, and whether two programs are the same one.

Names, numbers and the places of values in a loop's state, in a branch's arguments or among a fusion's operands cost
nothing and are left out. What remains is compared by colour refinement: an instruction's colour is made of its kind,
shape and settings, the colours of what it reads, and those of the computations it calls, over and over, until no two
that are told apart later are the same now.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from typing import Any

from logitless.lab.tpu.hlo import NAME, Instruction, instructions

IDLE = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all")
"""Instructions that no time is spent on."""


def digest(*parts: str) -> str:
    """A short hash."""
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def label(i: Instruction) -> str:
    """What an instruction is, without names and without its place in a tuple."""
    shape = i.shape
    if shape[0] == "(":
        shape = " ".join(sorted(re.findall(r"\w+\[[^\]]*\](?:\{[^}]*\})?", shape)))
    settings = "" if i.opcode == "get-tuple-element" else NAME.sub("%", i.settings)
    return f"{shape} {i.opcode} {i.inside if i.opcode == 'constant' else ''}{settings}"


def number(i: Instruction) -> int:
    """Which parameter, or which part of a tuple."""
    if i.opcode == "parameter":
        return int(i.inside)
    return int(i.settings.split("index=")[1].split(",")[0])


class Graph:
    """A program, from the text of its optimised HLO."""

    def __init__(self, hlo: str) -> None:
        self.computations, self.entry = instructions(re.sub(r"/\*index=\d+\*/", "", hlo))
        self.all = [i for inside in self.computations.values() for i in inside.values()]
        self.label = {i: label(i) for i in self.all}
        self.colour = {i: digest(text) for i, text in self.label.items()}
        self.roots = {i.home: i for i in self.all if i.root}
        self.callers: dict[str, list[tuple[Instruction, int]]] = {}
        for i in self.all:
            branches = [name for how, name in i.called if how.startswith(("branch", "true", "false"))]
            for _, name in i.called:
                at = branches.index(name) + 1 if name in branches else 0
                self.callers.setdefault(name, []).append((i, at))

    def operand(self, i: Instruction, n: int) -> Instruction:
        return self.computations[i.home][i.operands[n]]

    def refine(self) -> None:
        """One round: every colour anew from its neighbours'."""
        whole = {
            name: digest(self.colour[self.roots[name]], *sorted(self.colour[i] for i in inside.values()))
            for name, inside in self.computations.items()
        }
        self.colour = {i: digest(self.label[i], *self._parts(i, whole)) for i in self.all}

    def _parts(self, i: Instruction, whole: dict[str, str]) -> list[str]:
        if i.opcode == "get-tuple-element":
            return self._element(self.operand(i, 0), number(i))
        if i.opcode == "parameter":
            return self._parameter(i)
        parts = [self.colour[self.operand(i, n)] for n in range(len(i.operands))]
        free = i.opcode == "fusion" or (i.opcode == "tuple" and i is not self.roots[self.entry])
        return [*(sorted(parts) if free else parts), *(whole[name] for _, name in i.called)]

    def _parameter(self, i: Instruction) -> list[str]:
        """What a computation is called with; a loop's state is told by its parts alone."""
        parts = [str(number(i))] if i.home == self.entry else []
        for caller, branch in self.callers.get(i.home, []):
            if caller.opcode in ("fusion", "call"):
                parts.append(self.colour[self.operand(caller, number(i))])
            elif caller.opcode == "conditional":
                parts.append(self.colour[self.operand(caller, branch)])
            elif caller.opcode != "while":
                parts.append(str(number(i)))  # of a sum, a sort, ...
        return sorted(parts)

    def _element(self, i: Instruction, n: int) -> list[str]:
        """The ``n``-th part of the tuple ``i``, by where it comes from and not by ``n``, wherever that is known."""
        if i.opcode == "tuple":
            return [self.colour[self.operand(i, n)]]
        if i.opcode == "while":
            return [
                "state",
                *self._element(self.operand(i, 0), n),
                *self._element(self.roots[dict(i.called)["body"]], n),
            ]
        if i.opcode == "conditional":
            return ["branch", *(part for _, name in i.called for part in self._element(self.roots[name], n))]
        if i.opcode == "fusion" and (root := self.roots[i.called[0][1]]).opcode == "tuple":
            return [self.colour[i], self.colour[self.operand(root, n)]]
        if i.opcode == "parameter":
            callers = self.callers.get(i.home, [])
            if callers and all(caller.opcode == "while" for caller, _ in callers):
                return [part for caller, _ in callers for part in self._element(caller, n)]
            if callers and all(caller.opcode == "conditional" for caller, _ in callers):
                return [part for caller, at in callers for part in self._element(self.operand(caller, at), n)]
        return [str(n), self.colour[i]]

    def steps(self, name: str = "") -> list[Instruction]:
        """What is run, in the order of the schedule, with loops and branches where they begin."""
        out: list[Instruction] = []
        for i in self.computations[name or self.entry].values():
            if i.opcode not in IDLE:
                out.append(i)
                if i.opcode in ("while", "conditional", "call"):
                    out += [step for _, inner in i.called for step in self.steps(inner)]
        return out


def _renumbered(hlo: str) -> str:
    """The text with names by their order."""
    names: dict[str, str] = {}
    body = hlo.split("\n", 1)[1]
    body = re.sub(r"^((?:ENTRY )?%[\w.\-]+) \(.*\{$", r"\1 {", body, flags=re.MULTILINE)
    return NAME.sub(lambda found: names.setdefault(found[1], f"%{len(names)}"), body)


def compare(before: str, after: str) -> dict[str, Any]:
    """``same``: "text" (all but names), "graph" (all but free places) or "no", with what only one has; ``order``
    says whether what is run is run in the same order (of "no": by kind, shape and settings alone). Counts are before
    and after."""
    a, b = Graph(before), Graph(after)
    labels = [Counter(g.label.values()) for g in (a, b)]
    told = 0
    while (now := len({*a.colour.values(), *b.colour.values()})) > told:
        told = now
        a.refine()
        b.refine()
    graph = Counter(a.colour.values()) == Counter(b.colour.values())
    text = _renumbered(before) == _renumbered(after)
    only = [[f"{n} x {label[:200]}" for label, n in (x - y).items()] for x, y in (labels, labels[::-1])]
    run = [[(g.colour if graph else g.label)[i] for i in g.steps()] for g in (a, b)]
    return dict(
        same="text" if text else "graph" if graph else "no",
        order=run[0] == run[1],
        instructions=[len(g.all) for g in (a, b)],
        steps=[len(r) for r in run],
        **({} if graph else dict(only_before=only[0], only_after=only[1])),
    )
