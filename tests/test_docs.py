"""The README's example runs, and the API reference is what the docstrings say."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from logitless import docs

ROOT = Path(__file__).parent.parent


def test_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(code.splitlines()) <= 20
    exec(compile(code, "README.md", "exec"), {})
    assert "entropy" in capsys.readouterr().out


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="signatures print differently in later Python versions")
def test_api_reference_is_current() -> None:
    assert (ROOT / "docs" / "api.md").read_text() == docs.render(), "run `make docs`"


def test_links_in_the_docs_exist() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_benchmark_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None and spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert (ROOT / "docs" / "benchmarks.md").read_text() == tables.render(), "run `python benchmarks/tables.py`"
    assert tables.README.read_text() == tables.readme(), "run `python benchmarks/tables.py`"
