"""Compiled programs as text: their instructions, and the collectives of a TPU program: kind, bytes, dtype, and how
often each is carried out.

The compiler writes a reduce-scatter as a fusion, ``all-reduce-scatter``, of an all-reduce and a slice, and a collective
in a loop once: a loop's trips are read from its condition.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_BITS = {"pred": 8, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s16": 16, "u16": 16, "f64": 64, "s64": 64, "u64": 64}

NAME = re.compile(r"%([\w.\-]+)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPERATION = re.compile(r"\b([a-z][a-z\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_CALLS = "condition|body|calls|to_apply|branch_computations|called_computations|true_computation|false_computation"
_CALLED = re.compile(rf"\b({_CALLS})=(\{{[^}}]*\}}|%[\w.\-]+)")
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}]')


@dataclasses.dataclass(eq=False)
class Instruction:
    """An instruction ``name = shape opcode(inside)settings`` of the HLO computation ``home``."""

    name: str
    home: str
    root: bool
    shape: str
    opcode: str
    inside: str
    settings: str

    @property
    def operands(self) -> list[str]:
        return NAME.findall(self.inside)

    @property
    def called(self) -> list[tuple[str, str]]:
        """``(how, computation)`` for every called computation."""
        return [(how, name) for how, names in _CALLED.findall(self.settings) for name in NAME.findall(names)]


def _end(text: str, start: int) -> int:
    """Behind the bracket that closes the one at ``start``; brackets in strings do not count."""
    depth = 0
    for found in _BRACKETS.finditer(text, start):
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.end()
    return len(text)


def instructions(hlo: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """The instructions of every computation by their names, in order, and the entry's name."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry = home = ""
    for line in hlo.splitlines():
        if head := _COMPUTATION.match(line):
            home = head[2]
            computations[home] = {}
            entry = home if head[1] else entry
        elif (found := _INSTRUCTION.match(line)) and home:
            root, name, text = found.groups()
            shape = _end(text, 0) if text[0] == "(" else 0
            if operation := _OPERATION.search(text, shape):
                end = _end(text, operation.end() - 1)
                parts = text[: operation.start()].strip(), operation[1], text[operation.end() : end - 1], text[end:]
                computations[home][name] = Instruction(name, home, bool(root), *parts)
    return computations, entry


def _arrays(shape: str) -> list[tuple[int, str]]:
    """``(bytes, dtype)`` for every array in ``bf16[8,128]{1,0}`` or in a tuple of arrays."""
    sizes = ((kind, math.prod(int(d) for d in dims.split(",") if d)) for kind, dims in _ARRAY.findall(shape))
    return [(count * _BITS.get(kind, 32) // 8, kind) for kind, count in sizes]


def _trips(condition: dict[str, Instruction]) -> int:
    """Trip count for a loop from zero to a constant; 1 if it depends on data."""
    for i in condition.values():
        if i.opcode == "compare" and "direction=LT" in i.settings:
            named = (condition[name] for name in i.operands if name in condition)
            known = [c.inside for c in named if c.opcode == "constant" and re.fullmatch(r"-?\d+", c.inside)]
            if known:
                return int(known[0])
    return 1


def collectives_of(hlo: str) -> list[dict[str, Any]]:
    """Every collective of a program, in textual order.

    ``bytes`` is the size of the whole array once: after a gather, before a scatter; ``dtype`` what is summed or moved;
    ``times`` the trips of the loops around it, as far as they are constants.
    """
    computations, entry = instructions(hlo)
    found: list[dict[str, Any]] = []

    def visit(name: str, times: int, scatters: bool) -> None:
        here = computations.get(name, {})
        for i in here.values():
            kind = i.opcode.removesuffix("-start")
            if kind in KINDS:
                given = _arrays(i.inside) + [a for o in i.operands if o in here for a in _arrays(here[o].shape)]
                sizes = [size for size, _ in given + _arrays(i.shape)]
                dtype = max(given, default=(0, ""))[1] or max(_arrays(i.shape), default=(0, ""))[1]
                kind = "reduce-scatter" if scatters and kind == "all-reduce" else kind
                found.append(dict(kind=kind, bytes=max(sizes, default=0), dtype=dtype, times=times))
            called = dict.fromkeys(i.called)
            conditions = [other for how, other in called if how == "condition"]
            inner = times * (_trips(computations.get(conditions[0], {})) if conditions else 1)
            for how, other in called:
                if how not in ("condition", "to_apply"):
                    visit(other, inner, scatters or any("all-reduce-scatter" in n for n in (i.name, other)))

    visit(entry, 1, False)
    return found
