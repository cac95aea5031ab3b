"""The bars on size, types and shape: ``python scripts/bars.py`` prints each measure beside what it may be and its goal.

``--lower`` writes today's measures into scripts/bars.json where they are lower than what stands there (lines in steps
of 500); tests/repository/test_bars.py holds the tree to that file. A new file counts from ``git add`` on.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_suffix(".json")
Function = ast.FunctionDef | ast.AsyncFunctionDef
PUBLIC = {
    *(f"api.{name}" for name in ("logprobs", "grpo_loss", "linear_logprobs", "linear_grpo_loss")),
    *("api.divergence", "api.linear_divergence", "api.linear_distillation_loss"),
    *("lab.plan.plan.plan", "objectives.policy_loss.policy_loss"),
    *("data.rows_with_gradient.rows_with_gradient", "data.packing.pack"),
}
"""Public calls, whose parameters are their users' choices."""
GOALS = {
    "lines of src": 27_000,
    "lines of src without lab and train": 17_500,
    "lines of tests": 22_000,
    "lines of benchmarks": 3_500,
    "functions with 8 or more parameters": 15,
    "functions over 80 lines": 0,
    "functions with more than 25 locals": 0,
    "percent of annotations with Any": 3.0,
    "type: ignore": 25,
    "walk: chunked": 16,
    "walk: pallas_tpu": 22,
    "walk: pallas_tpu, sparse": 28,
    "walk: mosaic_gpu, sparse": 28,
}


def files(folder: str) -> list[Path]:
    """The Python files of a folder that git knows and that are there."""
    listed = subprocess.run(["git", "ls-files", f"{folder}/*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists()]


def module_of(file: Path) -> str:
    """``head.chunked`` of ``src/logitless/head/chunked.py``."""
    return ".".join(file.relative_to(ROOT / "src" / "logitless").with_suffix("").parts)


def lines(found: list[Path]) -> int:
    return sum(len(f.read_text().splitlines()) for f in found)


def functions(trees: dict[str, ast.Module]) -> Iterator[tuple[str, Function]]:
    """``(name, function)`` of every function, those inside others included."""
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield f"{module}.{node.name}", node


def parameters(f: Function) -> int:
    """Number of parameters, without ``self``."""
    a = f.args
    named = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs) if x.arg not in ("self", "cls")]
    return len(named) + (a.vararg is not None) + (a.kwarg is not None)


def length(f: Function) -> int:
    """Number of lines, without decorators."""
    return (f.end_lineno or f.lineno) - f.lineno + 1


def local_names(f: Function) -> set[str]:
    """Names that a function itself binds, without its parameters: those of inner functions and comprehensions do not
    count, the inner functions' own names do."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function | ast.ClassDef):
                found.add(child.name)
            elif isinstance(child, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
                continue
            else:
                if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                    found.add(child.id)
                visit(child)

    for statement in f.body:
        visit(ast.Module([statement], []))
    return found


def annotations(tree: ast.Module) -> Iterator[ast.expr]:
    """Annotations of parameters, results and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, Function) and node.returns is not None:
            yield node.returns


def has_any(annotation: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(annotation))


def lists() -> dict[str, list[str]]:
    """The functions behind three of the measures, by name."""
    every = {module_of(f): ast.parse(f.read_text()) for f in files("src/logitless")}
    ours = {name: tree for name, tree in every.items() if name.split(".")[0] != "oracle"}
    return {
        "functions with 8 or more parameters": [
            name for name, f in functions(ours) if parameters(f) >= 8 and name not in PUBLIC
        ],
        "functions over 80 lines": [name for name, f in functions(ours) if length(f) > 80],
        "functions with more than 25 locals": [name for name, f in functions(ours) if len(local_names(f)) > 25],
    }


def measures() -> dict[str, float]:
    """Today's numbers, but for the walks."""
    src = files("src")
    core = [f for f in src if not {"lab", "train"} & set(f.relative_to(ROOT).parts)]
    told = [has_any(a) for f in core for a in annotations(ast.parse(f.read_text()))]
    return {
        "lines of src": lines(src),
        "lines of src without lab and train": lines(core),
        "lines of tests": lines(files("tests")),
        "lines of benchmarks": lines(files("benchmarks")),
        **{name: len(found) for name, found in lists().items()},
        "percent of annotations with Any": round(100 * sum(told) / len(told), 1),
        "type: ignore": sum(f.read_text().count("# type: ignore") for f in src),
    }


def walks() -> dict[str, float]:
    """The files that each call of walk.py runs through, by number."""
    spec = importlib.util.spec_from_file_location("walk", Path(__file__).with_name("walk.py"))
    assert spec is not None and spec.loader is not None
    walk: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(walk)
    return {f"walk: {call}": len(walk.files_of(call)) for call in walk.calls()}


def main() -> None:
    recorded, now = json.loads(FILE.read_text()), measures() | walks()
    print(f"{'':40s} {'now':>8s} {'at most':>8s} {'goal':>8s}")
    for name, value in now.items():
        print(f"{name:40s} {value:8g} {recorded.get(name, ''):>8} {GOALS.get(name, ''):>8}")
    for name, found in lists().items():
        print(f"\n{name}: {', '.join(found)}")
    if "--lower" in sys.argv[1:]:
        rounded = {k: 500 * math.ceil(v / 500) if k.startswith("lines") else v for k, v in now.items()}
        lower = {k: min(v, recorded.get(k, v)) for k, v in rounded.items()}
        FILE.write_text(json.dumps(lower, indent=1) + "\n")


if __name__ == "__main__":
    main()
