"""Writes the API reference from the docstrings: ``python -m logitless.lab.docs docs/api.md``."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import sys
import textwrap
from pathlib import Path

import logitless
from logitless import oracle


def _signature(name: str, of: inspect.Signature) -> str:
    signature = re.sub(r"""(: |-> )(['"])(.*?)\2(?=[,)]| = |$)""", r"\1\3", str(of))  # annotations are strings
    if len(name) + len(signature) <= 100:
        return name + signature
    inner, _, returns = signature[1:].rpartition(") -> ")
    parts, depth, start = [], 0, 0
    for i, ch in enumerate(inner):
        depth += ch in "([{"
        depth -= ch in ")]}"
        if ch == "," and depth == 0:
            parts.append(inner[start:i].strip())
            start = i + 1
    parts.append(inner[start:].strip())
    body = "".join(f"    {p},\n" for p in parts)
    return f"{name}(\n{body}) -> {returns}"


def _fields(cls: type) -> list[str]:
    """One line per field: its default, and the string literal that follows it in the source."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    notes: dict[str, str] = {}
    for field, after in itertools.pairwise(tree.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            notes[field.target.id] = " ".join(ast.literal_eval(after.value).split())
    lines = []
    for f in dataclasses.fields(cls):
        default = "" if f.default is dataclasses.MISSING else f" = {f.default!r}"
        kind = " (static)" if f.metadata.get("static") else ""
        note = f": {notes[f.name]}" if f.name in notes else ""
        lines.append(f"- `{f.name}{default}`{kind}{note}")
    return lines


def _methods(name: str, cls: type) -> list[str]:
    """Public methods and properties that the class itself defines, each with its signature and docstring."""
    parts = []
    for attribute, member in vars(cls).items():
        if attribute.startswith("_"):
            continue
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not inspect.isfunction(function):
            continue
        if isinstance(member, property):
            head = f"{name}.{attribute}"
        else:
            signature = inspect.signature(function)
            bound = not isinstance(member, staticmethod)
            kept = list(signature.parameters.values())[1 if bound else 0 :]
            head = _signature(f"{name}.{attribute}", signature.replace(parameters=kept))
        parts += [
            f"#### `{name}.{attribute}`",
            "",
            f"```\n{head}\n```",
            "",
            markdown(inspect.getdoc(function) or ""),
            "",
        ]
    return parts


def markdown(docstring: str) -> str:
    """A docstring as Markdown: its ``Args:`` as a list, its examples and roles as code."""
    lines: list[str] = []
    section = example = False
    for line in docstring.replace("\\\n", "").split("\n"):
        if line.startswith(">>>") and not example:
            lines.append("```pycon")
            example = True
        if example:
            if not line.strip():
                lines += ["```", ""]
                example = False
            else:
                lines.append(line)
            continue
        if re.fullmatch(r"(Args|Returns|Raises):", line):
            lines += [f"**{line.rstrip(':')}**", ""]
            section = True
            continue
        section = section and (not line.strip() or line.startswith("  "))
        if section and (item := re.match(r"  (\S.*?): (.*)", line)) and not line.startswith("   "):
            names = ", ".join(f"`{n}`" for n in item[1].split(", "))
            line = f"- {names}: {item[2]}"
        elif section and line.startswith("  "):
            line = "  " + line.strip() if line.startswith("    ") else line.strip()
        lines.append(line)
    text = "\n".join(lines) + ("\n```" if example else "")
    return re.sub(r":(?:func|class|meth|mod):`~?(?:logitless\.)?([^`]+)`", r"`\1`", text).rstrip()


def _entry(name: str, obj: object) -> str:
    text = markdown(inspect.getdoc(obj) or "")
    if inspect.isclass(obj):
        lines = [f"### class `{name}`", "", text, ""]
        if dataclasses.is_dataclass(obj):
            lines += [*_fields(obj), ""]
        elif hasattr(obj, "_fields"):  # a NamedTuple, whose annotations are forward references
            kinds = {n: getattr(a, "__forward_arg__", a) for n, a in inspect.get_annotations(obj).items()}
            lines += [*(f"- `{n}`: `{kind}`" for n, kind in kinds.items()), ""]
        return "\n".join([*lines, *_methods(name, obj)])
    return f"### `{name}`\n\n```\n{_signature(name, inspect.signature(obj))}\n```\n\n{text}\n"  # type: ignore[arg-type]


def render() -> str:
    """The whole reference as Markdown."""
    parts = [
        "# API reference",
        "",
        "Written by `make docs` from the docstrings, whose examples the tests run.",
        "",
        "## `logitless`",
        "",
    ]
    for name in logitless.__all__:
        if name not in ("__version__", "oracle"):  # the oracle has a part of its own
            parts.append(_entry(name, getattr(logitless, name)))
    parts += ["## `logitless.oracle`", "", inspect.getdoc(oracle) or "", ""]
    for name in oracle.__all__:
        parts.append(_entry(name, getattr(oracle, name)))
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render())
