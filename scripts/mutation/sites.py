"""Where a small fault can be planted: every operator, constant, condition and keyword argument of some source text."""

from __future__ import annotations

import ast
import copy
import dataclasses
from collections.abc import Iterator

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
TWINS = (
    ("float32", "bfloat16"),
    ("minimum", "maximum"),
    ("min", "max"),
    ("any", "all"),
    ("argmin", "argmax"),
    ("logical_and", "logical_or"),
    ("zeros_like", "ones_like"),
    ("zeros", "ones"),
    ("floor", "ceil"),
    ("sum", "max"),
    ("exp", "expm1"),
    ("log", "log1p"),
)
"""Names that stand for each other; of float32, sum, exp and log only the first becomes the second."""
ONE_WAY = ("bfloat16", "expm1", "log1p")
OTHER_NAME = {a: b for a, b in TWINS} | {b: a for a, b in reversed(TWINS) if b not in ONE_WAY}
UNCALLED = ("stop_gradient", "astype", "tuple", "sorted", "abs", "checkpoint")
"""Functions whose call becomes its argument."""


@dataclasses.dataclass(frozen=True)
class Site:
    """One fault: an expression of a file, by its place, and what stands there instead."""

    file: str  # below src/logitless
    place: str  # the function or class around it
    line: int
    old: str
    new: str
    span: tuple[int, int, int, int]  # first and last line, and their columns in bytes

    @property
    def name(self) -> str:
        """The same as long as the expression and the function around it have not changed."""
        return f"{self.file}:{self.place}: {self.old} -> {self.new}"

    @property
    def imported(self) -> bool:
        """Whether it stands outside of every function, or is a class's own line."""
        return not any(name.lstrip("_")[:1].islower() for name in self.place.split("."))

    def applied(self, text: str) -> str:
        """``text`` with the fault in it, and every other line where it was."""
        first, last, start, end = self.span
        lines = [x.encode() for x in text.splitlines(keepends=True)]
        new = f"({self.new}" + "\n" * (last - first) + ")"
        lines[first - 1 : last] = [lines[first - 1][:start] + new.encode() + lines[last - 1][end:]]
        return b"".join(lines).decode()


def _number(value: object) -> list[object]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1] if value != 1 else [0, 2]
    if isinstance(value, float):
        return [value + 1.0] if value != 1.0 else [0.0, 2.0]
    return []


def _of_call(node: ast.Call) -> Iterator[ast.expr]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in UNCALLED and node.args:
        yield node.func.value if name == "astype" and isinstance(node.func, ast.Attribute) else node.args[0]
    if name == "where" and len(node.args) == 3:
        yield from node.args[1:]
    for i, keyword in enumerate(node.keywords):
        if keyword.arg not in (None, "frozen"):  # that a dataclass is frozen is a guard for who writes the next line
            less = copy.copy(node)
            less.keywords = node.keywords[:i] + node.keywords[i + 1 :]
            yield less


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def variants(node: ast.AST) -> Iterator[ast.expr]:
    """What may stand in the place of an expression."""
    match node:
        case ast.Compare(left, [op], right):
            for other in COMPARISONS[type(op)]:
                yield ast.Compare(left, [other()], right)
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC and not (_is_text(left) or _is_text(right)):
            yield ast.BinOp(left, ARITHMETIC[type(op)](), right)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            yield from values[:1] if len(values) == 2 else [ast.BoolOp(op, values[:-1])]
        case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
            yield operand
        case ast.Constant(value):
            yield from (ast.Constant(other) for other in _number(value))
        case ast.Attribute(value, name) if name in OTHER_NAME:
            yield ast.Attribute(value, OTHER_NAME[name])
        case ast.Name(name, ast.Load()) if name in OTHER_NAME:
            yield ast.Name(OTHER_NAME[name])
        case ast.IfExp(_, body, orelse):
            yield from (body, orelse)
        case ast.Call():
            yield from _of_call(node)


def _visit(node: ast.AST, place: str) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """``(place, expression, variant)`` of everything that runs: no annotations, no texts of errors."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
        return
    inner = place
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        inner = f"{place}.{node.name}".strip(".")
    if isinstance(node, ast.If):
        refuses = all(isinstance(x, ast.Raise) for x in node.body)
        yield from ((place, node.test, ast.Constant(value)) for value in ((False,) if refuses else (True, False)))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield place, node.value, ast.Constant(None)
    if isinstance(node, ast.expr):
        yield from ((place, node, other) for other in variants(node))
    for field, child in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_comment", "type_params"):
            continue
        for item in child if isinstance(child, list) else [child]:
            if isinstance(item, ast.AST):
                yield from _visit(item, inner)


def sites(file: str, text: str) -> list[Site]:
    """Every place of a file with every variant of it."""
    found: dict[tuple[object, ...], Site] = {}
    for place, node, other in _visit(ast.parse(text), ""):
        old, new = ast.unparse(node), ast.unparse(ast.fix_missing_locations(other))
        span = (node.lineno, node.end_lineno or node.lineno, node.col_offset, node.end_col_offset or 0)
        if old != new:
            found.setdefault((span, new), Site(file, place, node.lineno, old, new, span))
    return list(found.values())


def compiles(site: Site, text: str) -> bool:
    """Whether the file with the fault is still Python: a name that is assigned to has no variants, for one."""
    try:
        ast.parse(site.applied(text))
    except SyntaxError:
        return False
    return True
