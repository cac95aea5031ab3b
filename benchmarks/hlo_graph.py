"""Optimised HLO as a graph, and whether two programs are the same one.

Names, numbers and the places of values in a loop's state, in a branch's arguments or among a fusion's operands cost
nothing and are left out. What remains is compared by colour refinement: an instruction's colour is made of its kind,
shape and settings, the colours of what it reads, and those of the computations it calls, over and over, until no two
that are told apart later are the same now.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from typing import Any

IDLE = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all")
"""Instructions that no time is spent on."""
CALLS = ("condition", "body", "calls", "to_apply", "branch_computations", "true_computation", "false_computation")
NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(eq=False)
class Instruction:
    """One line of HLO. ``label`` is what it is without names; ``number`` that of a parameter or of a tuple's part."""

    name: str
    home: str
    root: bool
    opcode: str
    label: str
    operands: list[str]
    called: list[tuple[str, str]]
    number: int
    colour: str


def digest(*parts: str) -> str:
    """A short hash."""
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def _end(text: str, start: int) -> int:
    """Behind the bracket that closes the one at ``start``; brackets in strings do not count."""
    depth = 0
    for found in re.compile(r'"(?:[^"\\]|\\.)*"|[(){}]').finditer(text, start):
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.end()
    raise ValueError(f"no end in {text[start : start + 80]!r}")


def _instruction(root: bool, name: str, home: str, text: str) -> Instruction:
    end = _end(text, 0) if text[0] == "(" else text.index(" ")
    shape, text = text[:end], text[end + 1 :]
    opcode = text[: text.index("(")]
    end = _end(text, len(opcode))
    inside, settings = text[len(opcode) + 1 : end - 1], text[end:]
    called = [
        (key, other)
        for key in CALLS
        for found in re.findall(rf"\b{key}=(\{{[^}}]*\}}|%[\w.\-]+)", settings)
        for other in NAME.findall(found)
    ]
    number = -1
    if opcode == "parameter":
        number = int(inside)
    elif opcode == "get-tuple-element":
        number, settings = int(settings.split("index=")[1].split(",")[0]), ""
    if shape[0] == "(":
        shape = " ".join(sorted(re.findall(r"\w+\[[^\]]*\](?:\{[^}]*\})?", shape)))
    value = inside if opcode == "constant" else ""
    label = f"{shape} {opcode} {value}{NAME.sub('%', settings)}"
    operands = [] if value else NAME.findall(inside)
    return Instruction(name, home, root, opcode, label, operands, called, number, digest(label))


class Graph:
    """A program, from the text of its optimised HLO."""

    def __init__(self, hlo: str) -> None:
        self.entry, home = "", ""
        self.computations: dict[str, dict[str, Instruction]] = {}
        for line in re.sub(r"/\*index=\d+\*/", "", hlo).splitlines():
            if head := re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line):
                home = head[2]
                self.computations[home] = {}
                self.entry = home if head[1] else self.entry
            elif found := re.match(r"  (ROOT )?%([\w.\-]+) = (.*)$", line):
                self.computations[home][found[2]] = _instruction(bool(found[1]), found[2], home, found[3])
        self.all = [i for inside in self.computations.values() for i in inside.values()]
        self.roots = {i.home: i for i in self.all if i.root}
        self.callers: dict[str, list[tuple[Instruction, int]]] = {}
        for i in self.all:
            branches = [name for key, name in i.called if key.startswith(("branch", "true", "false"))]
            for _, name in i.called:
                at = branches.index(name) + 1 if name in branches else 0
                self.callers.setdefault(name, []).append((i, at))

    def operand(self, i: Instruction, n: int) -> Instruction:
        return self.computations[i.home][i.operands[n]]

    def refine(self) -> None:
        """One round: every colour anew from its neighbours'."""
        whole = {
            name: digest(self.roots[name].colour, *sorted(i.colour for i in inside.values()))
            for name, inside in self.computations.items()
        }
        colours = [digest(i.label, *self._parts(i, whole)) for i in self.all]
        for i, colour in zip(self.all, colours, strict=True):
            i.colour = colour

    def _parts(self, i: Instruction, whole: dict[str, str]) -> list[str]:
        if i.opcode == "get-tuple-element":
            return self._element(self.operand(i, 0), i.number)
        if i.opcode == "parameter":
            return self._parameter(i)
        parts = [self.operand(i, n).colour for n in range(len(i.operands))]
        free = i.opcode == "fusion" or (i.opcode == "tuple" and i is not self.roots[self.entry])
        return [*(sorted(parts) if free else parts), *(whole[name] for _, name in i.called)]

    def _parameter(self, i: Instruction) -> list[str]:
        """What a computation is called with; a loop's state is told by its parts alone."""
        parts = [str(i.number)] if i.home == self.entry else []
        for caller, branch in self.callers.get(i.home, []):
            if caller.opcode in ("fusion", "call"):
                parts.append(self.operand(caller, i.number).colour)
            elif caller.opcode == "conditional":
                parts.append(self.operand(caller, branch).colour)
            elif caller.opcode != "while":
                parts.append(str(i.number))  # of a sum, a sort, ...
        return sorted(parts)

    def _element(self, i: Instruction, n: int) -> list[str]:
        """The ``n``-th part of the tuple ``i``, by where it comes from and not by ``n``, wherever that is known."""
        if i.opcode == "tuple":
            return [self.operand(i, n).colour]
        if i.opcode == "while":
            return [
                "state",
                *self._element(self.operand(i, 0), n),
                *self._element(self.roots[dict(i.called)["body"]], n),
            ]
        if i.opcode == "conditional":
            return ["branch", *(part for _, name in i.called for part in self._element(self.roots[name], n))]
        if i.opcode == "fusion" and (root := self.roots[i.called[0][1]]).opcode == "tuple":
            return [i.colour, self.operand(root, n).colour]
        if i.opcode == "parameter":
            callers = self.callers.get(i.home, [])
            if callers and all(caller.opcode == "while" for caller, _ in callers):
                return [part for caller, _ in callers for part in self._element(caller, n)]
            if callers and all(caller.opcode == "conditional" for caller, _ in callers):
                return [part for caller, at in callers for part in self._element(self.operand(caller, at), n)]
        return [str(n), i.colour]

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
    labels = [Counter(i.label for i in g.all) for g in (a, b)]
    told = 0
    while (now := len({i.colour for g in (a, b) for i in g.all})) > told:
        told = now
        a.refine()
        b.refine()
    graph = Counter(i.colour for i in a.all) == Counter(i.colour for i in b.all)
    text = _renumbered(before) == _renumbered(after)
    only = [[f"{n} x {label[:200]}" for label, n in (x - y).items()] for x, y in (labels, labels[::-1])]
    run = [[i.colour if graph else i.label for i in g.steps()] for g in (a, b)]
    return dict(
        same="text" if text else "graph" if graph else "no",
        order=run[0] == run[1],
        instructions=[len(g.all) for g in (a, b)],
        steps=[len(r) for r in run],
        **({} if graph else dict(only_before=only[0], only_after=only[1])),
    )
