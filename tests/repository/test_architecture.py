"""The shape of the code: layers, custom gradients, signatures, what an import costs, and docs/architecture.md."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import logitless
from loading import loaded
from logitless import head
from logitless.core.registry import BACKENDS

ROOT = Path(__file__).parents[2]
SOURCE = Path(logitless.__file__).parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
CALLS = (logitless.logprobs, logitless.grpo_loss, logitless.linear_logprobs, logitless.linear_grpo_loss)


def module_of(file: Path) -> str:
    """``head.chunked`` of ``.../logitless/head/chunked.py``; a package is its ``__init__``."""
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


FILES = {module_of(f): f for f in sorted(SOURCE.rglob("*.py"))}
TREES = {name: ast.parse(f.read_text()) for name, f in FILES.items()}


def block(name: str) -> str:
    """What stands between two markers of the page."""
    (found,) = re.findall(rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", PAGE, re.DOTALL)
    return found


LAYERS = [re.split(r" {3,}", line)[0].split() for line in reversed(block("layers").strip("`\n").splitlines())]
"""From the lowest to the highest: the modules and packages of each line."""
RANK = {unit: i for i, line in enumerate(LAYERS) for unit in line}
KNOW_EACH_OTHER = ({"objectives", "core.validation"}, {"objectives", "settings"})


def unit_of(module: str) -> str:
    """The module or package of the page's list that a module belongs to."""
    while module not in RANK and "." in module:
        module = module.rpartition(".")[0]
    return module


def imports(module: str) -> Iterator[tuple[str, int]]:
    """``(module of this package, line)`` of each import, those inside functions included."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{module}:{node.lineno}: imports are absolute here"
            names = [f"{node.module}.{a.name}" for a in node.names]
        else:
            continue
        for name in names:
            package, _, inner = name.partition(".")
            if package == "logitless":
                while inner and inner not in FILES:  # a name inside a module
                    inner = inner.rpartition(".")[0]
                yield inner or "__init__", node.lineno


def test_every_module_has_a_layer() -> None:
    assert {unit_of(m) for m in FILES} == set(RANK)
    assert sum(map(len, LAYERS)) == len(RANK), "a name stands in two lines of docs/architecture.md"


def test_no_import_goes_up() -> None:
    upward = [
        f"{module}:{line} imports {target}"
        for module in FILES
        for target, line in imports(module)
        for source, to in [(unit_of(module), unit_of(target))]
        if source != to and RANK[to] >= RANK[source] and {source, to} not in KNOW_EACH_OTHER
    ]
    assert not upward, "against the layers of docs/architecture.md:\n" + "\n".join(upward)


def test_what_is_for_one_platform_stays_in_its_folder() -> None:
    """Of the files below the route, those of another platform, or of none, do not know a platform's files."""
    below = [m for m in FILES if RANK[unit_of(m)] <= RANK["core.route"]]
    for module in below:
        for target, line in imports(module):
            for platform in {"pallas_tpu", "mosaic_gpu"} & set(target.split(".")):
                assert platform in module.split("."), f"{module}:{line} imports {target}"


def test_two_custom_gradients_serve_every_backend() -> None:
    found: dict[str, int] = {}
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if "custom_vjp" in (getattr(node, "attr", None), getattr(node, "id", None)):
                found[module] = found.get(module, 0) + 1
    assert found == {"core.backend": 2, "head.reference": 1, "lab.tools.baselines": 1}


def test_backends_are_named_in_the_registry() -> None:
    names = "|".join(sorted({name for level in BACKENDS.values() for name in level}))
    quoted = [
        f"{module}:{number}: {line.strip()}"
        for module, file in FILES.items()
        if unit_of(module) not in ("core.registry", "head", "logits", "lab.bench", "train", "lab.demo")
        for number, line in enumerate(file.read_text().splitlines(), 1)
        for _ in re.findall(rf"""(["'])({names})\1""", line)
    ]
    assert len(quoted) <= 8, "\n".join(quoted)


_IMPORT = """
import json, sys, time
import jax, jax.numpy
before, begin = set(sys.modules), time.process_time()
import logitless
seconds, loaded = time.process_time() - begin, sorted(set(sys.modules) - before)
print(json.dumps(dict(seconds=seconds, loaded=loaded, names=dir(logitless), oracle=logitless.oracle.__name__)))
"""
ALLOWED = 0.15  # seconds of CPU beyond jax's own import


@pytest.fixture(scope="module")
def fresh() -> list[dict[str, Any]]:
    """What ``import logitless`` does in a fresh process; three times, or until one of them was quick."""
    environment = dict(os.environ, PYTHONPATH=str(SOURCE.parent), JAX_PLATFORMS="cpu")
    runs: list[dict[str, Any]] = []
    while len(runs) < 3 and not any(r["seconds"] <= ALLOWED for r in runs):
        done = subprocess.run([sys.executable, "-c", _IMPORT], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout))
    return runs


def test_dir_is_what_users_may_use(fresh: list[dict[str, Any]]) -> None:
    assert fresh[0]["names"] == sorted(logitless.__all__)
    assert fresh[0]["oracle"] == "logitless.oracle"


def test_import_loads_what_a_training_step_needs(fresh: list[dict[str, Any]]) -> None:
    loaded = fresh[0]["loaded"]
    assert "logitless.api" in loaded
    assert not [m for m in loaded if "pallas" in m or "mosaic" in m]
    own = {unit_of(m.partition(".")[2]) for m in loaded if m.startswith("logitless.")}
    late = {"oracle", "core.explanation", "lab.plan", "lab.tools", "lab.tpu", "lab.bench", "train", "lab.cli"}
    assert late <= set(RANK) and not own & late


def test_import_is_quick(fresh: list[dict[str, Any]]) -> None:
    """By CPU time, so that a busy machine does not count; three times what it may take, for a slower one."""
    assert min(r["seconds"] for r in fresh) <= 3 * ALLOWED


@pytest.mark.parametrize("call", CALLS, ids=lambda c: c.__name__)
def test_help_names_every_argument(call: Callable[..., Any]) -> None:
    signature, doc = inspect.signature(call), inspect.getdoc(call)
    assert doc is not None
    (section,) = re.findall(r"^Args:\n((?:  .*\n)+)", doc, re.MULTILINE)
    described = [n for names in re.findall(r"^  (\w+(?:, \w+)*): ", section, re.MULTILINE) for n in names.split(", ")]
    assert sorted(described) == sorted(signature.parameters)


def test_help_shows_a_short_default_objective() -> None:
    assert " = Objective()," in str(inspect.signature(logitless.linear_grpo_loss))


@pytest.fixture(scope="module")
def walk() -> Any:
    return loaded(ROOT / "scripts" / "walk.py")


def test_the_walk_is_as_short_as_the_page_says(walk: Any) -> None:
    counts = {call: int(n) for call, n in re.findall(r"^\| ([\w, ]+) \| (\d+) \|", block("walk"), re.MULTILINE)}
    assert set(counts) == set(walk.CALLS)
    table = walk.table()
    if set(walk.calls()) == set(walk.CALLS):  # or this jax is too old for some of them
        assert block("walk") == table + "\n", "put the output of `python scripts/walk.py` into docs/architecture.md"
    assert set(table.splitlines()) <= set(block("walk").splitlines())
    in_words = "{}, {}, {}, {}, {} and {}".format(*counts.values())
    assert in_words in PAGE, f"docs/architecture.md speaks of other counts than {in_words}"


def test_costs_are_those_of_the_table_of_contents() -> None:
    assert head.__doc__ is not None
    (lines,) = re.findall(r"^    (backend .*?)\n\n", head.__doc__, re.MULTILINE | re.DOTALL)
    title, *rows = (re.split(r" {2,}", line.strip()) for line in lines.splitlines())
    expected = ["| " + " | ".join(cells) + " |" for cells in (title, ["---"] * len(title), *rows)]
    expected[1] = expected[1].replace(" ", "")
    assert block("costs").splitlines() == expected


def test_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`((?:tests/|docs/|benchmarks/)?[\w/]+\.(?:py|md))`", PAGE))
    assert len(named) > 40
    missing = [f for f in named if not any((place / f).exists() for place in (SOURCE, ROOT))]
    assert not missing
