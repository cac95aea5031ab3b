"""The collectives of a compiled TPU program, from its text: kind, bytes, dtype, and how often each is carried out.

The compiler writes a reduce-scatter as a fusion, ``all-reduce-scatter``, of an all-reduce and a slice, and a collective
in a loop once: a loop's trips are read from its condition.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_BITS = {"pred": 8, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s16": 16, "u16": 16, "f64": 64, "s64": 64, "u64": 64}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPERATION = re.compile(r"\b([a-z][a-z\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|body|true_computation|false_computation|called_computations)=\{?%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    operation: str
    rest: str  # operands and attributes

    @property
    def arguments(self) -> str:
        """The text up to the parenthesis that closes."""
        depth, end = 1, 0
        while depth and end < len(self.rest):
            depth += (self.rest[end] == "(") - (self.rest[end] == ")")
            end += 1
        return self.rest[:end]

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.arguments)


def _arrays(shape: str) -> list[tuple[int, str]]:
    """``(bytes, dtype)`` for every array in ``bf16[8,128]{1,0}`` or in a tuple of arrays."""
    found = []
    for kind, dims in _ARRAY.findall(shape):
        count = 1
        for d in filter(None, dims.split(",")):
            count *= int(d)
        found.append((count * _BITS.get(kind, 32) // 8, kind))
    return found


def _parsed(hlo: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Instructions of every computation, and the entry's name."""
    computations: dict[str, list[_Instruction]] = {}
    entry = current = ""
    for line in hlo.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            current = head.group(2)
            computations[current] = []
            entry = current if head.group(1) else entry
            continue
        found = _INSTRUCTION.match(line)
        if not found or not current:
            continue
        operation = _OPERATION.search(found.group(2))
        if operation:
            text = found.group(2)
            shape, rest = text[: operation.start()], text[operation.end() :]
            computations[current].append(_Instruction(found.group(1), shape, operation.group(1), rest))
    return computations, entry


def _trips(condition: list[_Instruction]) -> int:
    """Trip count for a loop from zero to a constant; 1 if it depends on data."""
    constants = {i.name: re.match(r"(-?\d+)\)", i.rest) for i in condition if i.operation == "constant"}
    for i in condition:
        if i.operation == "compare" and "direction=LT" in i.rest:
            known = [c for c in (constants.get(name) for name in i.operands) if c is not None]
            if known:
                return int(known[0].group(1))
    return 1


def collectives_of(hlo: str) -> list[dict[str, Any]]:
    """Every collective of a program, in textual order.

    ``bytes`` is the size of the whole array once: after a gather, before a scatter; ``dtype`` what is summed or moved;
    ``times`` the trips of the loops around it, as far as they are constants.
    """
    computations, entry = _parsed(hlo)
    found: list[dict[str, Any]] = []

    def visit(name: str, times: int, scatters: bool) -> None:
        here = computations.get(name, [])
        shapes = {i.name: i.shape for i in here}
        for i in here:
            kind = i.operation.removesuffix("-start")
            if kind in KINDS:
                given = _arrays(i.arguments) + [a for o in i.operands for a in _arrays(shapes.get(o, ""))]
                sizes = [size for size, _ in given + _arrays(i.shape)]
                dtype = max(given, default=(0, ""))[1] or max(_arrays(i.shape), default=(0, ""))[1]
                scattered = scatters and kind == "all-reduce"
                found.append(
                    dict(
                        kind="reduce-scatter" if scattered else kind, bytes=max(sizes, default=0), dtype=dtype,
                        times=times,
                    )
                )  # fmt: skip
            inner = times
            if i.operation == "while":
                condition = re.search(r"condition=%?([\w.\-]+)", i.rest)
                inner *= _trips(computations.get(condition.group(1), [])) if condition else 1
            called = list(_CALLED.findall(i.rest))
            for branches in _BRANCHES.findall(i.rest):
                called += re.findall(r"%([\w.\-]+)", branches)
            for c in called:
                visit(c, inner, scatters or "all-reduce-scatter" in i.name or "all-reduce-scatter" in c)

    visit(entry, 1, False)
    return found
