"""What the pages show runs, what they link to exists, and what is generated is current."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import logitless
from loading import loaded

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("**/*.md"))


def snippets(page: Path) -> list[str]:
    """The blocks of Python on a page, without their indentation."""
    found = re.findall(r"^( *)```python\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [re.sub(f"^{indent}", "", code, flags=re.MULTILINE) for indent, code in found]


def taken_for_granted() -> dict[str, Any]:
    """Arrays that a page may use without making them: those of the README's example."""
    key = jax.random.key(0)
    return dict(
        hidden=jax.random.normal(key, (4, 8, 16)),
        lm_head=jax.random.normal(key, (64, 16)),
        targets=jax.random.randint(key, (4, 8), 0, 64),
        mask=jnp.arange(8) >= jnp.array([[1], [2], [3], [4]]),
        advantages=jnp.array([1.0, -1.0, 0.5, -0.5]),
        logitless=logitless,
    )


def test_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(code.splitlines()) <= 20
    exec(compile(code, "README.md", "exec"), {})
    assert "entropy" in capsys.readouterr().out


@pytest.mark.parametrize("page", [p for p in PAGES if snippets(p)], ids=lambda p: p.stem)
def test_snippets_of_a_page_run(page: Path) -> None:
    """In order, one after the other, as a reader would type them; up to one that needs what is not installed."""
    names = taken_for_granted()
    for number, code in enumerate(snippets(page)):
        try:
            exec(compile(code, f"{page.name}, block {number + 1}", "exec"), names)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith(("logitless", "jax")):
                raise  # broken, not optional
            pytest.skip(f"block {number + 1} needs {error.name}")


def test_the_site_is_built_without_a_warning_and_has_the_api(tmp_path: Path) -> None:
    """Every page is in the navigation, every link and anchor exists (mkdocs.yml asks for it)."""
    for package in ("material", "mkdocstrings"):
        pytest.importorskip(package, reason=f"{package} comes with logitless[site]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]  # --quiet would hide warnings from --strict
    done = subprocess.run(
        [*command, "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    page = (tmp_path / "api.html").read_text()
    methods = ("preset", "from_trl", "from_liger", "from_verl", "from_tunix", "replace", "grpo", "dapo", "gspo")
    for name in (*PUBLIC, *(f"Objective.{m}" for m in methods), "oracle.policy_loss_grad", "Objective.eps_low"):
        assert f'id="logitless.{name}"' in page, f"{name} is not on the page"
    assert "Returns:" in page and "clip fractions, ratio, KL" in page
    assert '<span class="o">&gt;&gt;&gt;</span>' in page or '<span class="gp">&gt;&gt;&gt; </span>' in page
    assert ":func:" not in page and "<blockquote" not in page


PUBLIC = sorted(set(logitless.__all__) - {"__version__", "oracle"})


def test_the_api_page_names_every_public_name_once() -> None:
    """The calls that people write every day come first; the oracle has its own part."""
    named = re.findall(r"^::: logitless\.(\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted([*PUBLIC, "oracle"])
    main = ["linear_grpo_loss", "grpo_loss", "linear_logprobs", "logprobs", "linear_distillation_loss"]
    assert named[:5] == main
    listed = re.findall(r"^ +- (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(logitless.oracle.__all__)


def test_settings_in_the_table_of_names_are_known_to_the_readers() -> None:
    """Of libraries whose configs we read. Names of arrays, and of advantages, are no settings of the loss."""
    text = (ROOT / "docs" / "losses.md").read_text()
    (table,) = re.findall(r"^\| here \| TRL, Liger .*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    readers = {1: "trl", 2: "verl", 4: "tunix"}
    sources = {i: (ROOT / f"src/logitless/settings/from_{n}.py").read_text() for i, n in readers.items()}
    checked = 0
    for line in table.splitlines():
        cells = line.strip("|").split("|")
        if "in the call" in cells[0] or "advantages" in cells[0]:
            continue
        for column, source in sources.items():
            for name in re.findall(r"`([a-z_]+)\*?`", cells[column]):
                assert name in source, f"docs/losses.md names {name!r}, which {readers[column]}.py does not know"
                checked += 1
    assert checked > 30


def test_links_in_the_docs_exist() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def pages_of_the_site() -> list[Path]:
    """The pages in the navigation of mkdocs.yml: for users. The others are for people who change the code."""
    named = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    return [ROOT / "docs" / name for name in named]


def test_the_site_is_small_enough_to_read() -> None:
    pages = pages_of_the_site()
    assert len(pages) <= 24
    assert sum(len(page.read_text().split()) for page in pages) <= 35_000
    left_out = {page.name for page in PAGES} - {page.name for page in pages}
    assert left_out == {"architecture.md", "logbook.md", "release.md"}


def test_every_picture_is_on_a_page() -> None:
    text = "".join(page.read_text() for page in [ROOT / "README.md", *PAGES])
    for picture in (ROOT / "docs").glob("p*/*.svg"):
        assert f"{picture.parent.name}/{picture.name}" in text, f"{picture.name} is on no page"


def test_the_picture_of_divergences_is_what_its_script_draws() -> None:
    script = loaded(ROOT / "scripts" / "divergence_picture.py")
    assert script.OUT.read_text() == script.svg(), "run `python scripts/divergence_picture.py`"


def test_conformance_page_is_what_the_record_says() -> None:
    page = loaded(ROOT / "tests" / "conformance" / "conformance_page.py").page()
    assert (ROOT / "docs" / "conformance.md").read_text() == page, "run `make conformance`"


@pytest.fixture(scope="module")
def tables() -> Any:
    return loaded(ROOT / "benchmarks" / "tables.py")


def test_pages_and_pictures_from_records_are_current(tables: Any) -> None:
    for path, content in tables.files():
        # Of a drawing what it says in words: its lines are matplotlib's, and differ with its version.
        found, made = (re.findall("<desc.*?</desc>", text) or [text] for text in (path.read_text(), content))
        assert found == made, f"{path.name}: run `python benchmarks/tables.py`"


RATIO = re.compile(r"(\d+\.\d+) \[(\d+(?:\.\d+)?), (\d+(?:\.\d+)?)\]")


@pytest.mark.parametrize("page", ["README.md", "docs/sparse-backward.md", "docs/performance.md", "docs/training.md"])
def test_a_ratio_with_its_interval_is_one_of_the_records(page: str, tables: Any) -> None:
    """To the digits that the page gives: a record that is replaced leaves no old number behind."""
    recorded = tables.recorded_ratios()

    def is_recorded(told: tuple[str, ...]) -> bool:
        halves = [0.5 * 10.0 ** -len(x.partition(".")[2]) + 1e-9 for x in told]
        return any(
            all(abs(a - float(b)) <= half for a, b, half in zip(found, told, halves, strict=True)) for found in recorded
        )

    told = RATIO.findall((ROOT / page).read_text())
    assert told
    for ratio in told:
        assert is_recorded(ratio), f"{page}: no record has {ratio[0]} [{ratio[1]}, {ratio[2]}]"


def test_maxtext_page_has_the_record() -> None:
    page = (ROOT / "docs" / "maxtext.md").read_text()
    record = json.loads((ROOT / "benchmarks" / "results" / "maxtext.json").read_text())
    for found in record["comparisons"]:
        numbers = [found[k] for k in ("loss", "our loss", "gradients", "gradients without the norm")]
        loss, ours, gradients, without = numbers
        assert f"| {loss:.7f}, {ours:.7f} | {gradients:.1e} | {without:.1f} |" in page, found["head"]
        assert abs(loss - ours) < 1e-6 and gradients < 1e-5 < 0.1 < without
    assert all(f"{name} {record['versions'][key]}" in page for name, key in (("MaxText", "maxtext"), ("jax", "jax")))
    for name, arms in record["memory"]["temporaries_mib"].items():
        row = name.replace("logits_dense", "`logits_dense`")
        assert f"| {row} | " + " | ".join(f"{x:,.0f}" for x in arms.values()) + " |" in page
