"""What plan, bench and train share imports none of them."""

import ast
from pathlib import Path

import logitless

ROOT = Path(logitless.__file__).parent
ABOVE = ("lab.bench", "lab.plan", "lab.tpu", "lab.cli", "lab.demo", "train", "plan", "integrations")


def imported(path: Path) -> set[str]:
    """Names of everything that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{a.name}" for a in node.names)
    return found


def upward(folder: Path) -> list[str]:
    return [
        f"{path.name}: {name}"
        for path in folder.rglob("*.py")
        for name in imported(path)
        if name.startswith(tuple(f"logitless.{above}" for above in ABOVE))
    ]


def test_tools_import_nothing_from_above(tmp_path: Path) -> None:
    assert upward(ROOT / "lab" / "tools") == []
    (tmp_path / "x.py").write_text("def f():\n    from logitless.lab import bench\n    import logitless.train.ab\n")
    assert len(upward(tmp_path)) == 2  # the check sees what it is to find, also inside a function
