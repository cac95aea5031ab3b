"""What is packed, and that what is said about packages is so."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import logitless
from loading import loaded

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_wheel_has_the_package_its_types_and_its_configurations(tmp_path: Path) -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling comes with logitless[dev]")
    (path,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path))
    inside = set(zipfile.ZipFile(path).namelist())
    package = ROOT / "src" / "logitless"
    files = [f for f in package.glob("**/*") if f.suffix in (".py", ".html")]
    source = {f"logitless/{f.relative_to(package)}" for f in files}
    assert {".py", ".html"} == {f.suffix for f in files}
    configs = {f"logitless/{f.relative_to(ROOT)}" for f in (ROOT / "configs").glob("**/*.yaml")}
    command = "logitless_command.py"
    assert configs and source | configs | {"logitless/py.typed", command} <= inside
    ours = ("logitless/", f"logitless-{logitless.__version__}.dist-info/", command)
    assert not {f for f in inside if not f.startswith(ours)}


MODULE, _, FUNCTION = PROJECT["scripts"]["logitless"].partition(":")
COMMAND = f"import sys; from {MODULE} import {FUNCTION}; sys.exit({FUNCTION}())"


@pytest.mark.parametrize(
    ("package", "arguments", "code"),
    [("logitless", ["-c", COMMAND], 130), ("jax", ["-m", "logitless", "configs"], -signal.SIGINT)],
    ids=["command", "module"],
)
def test_a_signal_during_the_import_is_one_line(tmp_path: Path, package: str, arguments: list[str], code: int) -> None:
    """jax takes seconds to import; here a package takes for ever."""
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(
        # A shell's background job, as which tests may run, begins with SIGINT ignored.
        "import os, signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, "logitless: stopped by SIGINT\n")


@pytest.mark.slow
def test_wheel_and_sdist_work_in_an_empty_environment(tmp_path: Path) -> None:
    """What ``make dist`` does. It asks the package index for what the packages need."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/dist.py", "--out", tmp_path / "dist"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_extras_that_the_docs_name_exist() -> None:
    extras = set(PROJECT["optional-dependencies"])
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md"), *(ROOT / "src").glob("**/*.py")]
    for page in pages:
        for named in re.findall(r"(?:logitless|'\.|\"\.)\[([a-z0-9,-]+)\]", page.read_text()):
            assert set(named.split(",")) <= extras, f"{page.name} names logitless[{named}]"


def test_every_supported_python_is_in_the_matrix_and_on_the_install_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")  # which import each other
    named = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if c.startswith("Programming Language :: Python")}
    assert named == {python for python, _ in loaded(ROOT / "scripts" / "matrix.py").MATRIX}
    page = (ROOT / "docs" / "install.md").read_text()
    rows = "".join(re.findall(r"^\| (3\.[\d., ]+) \|", page, re.MULTILINE))
    assert all(python in rows for python in named)


def test_the_gpu_extra_brings_a_jax_with_the_kernels() -> None:
    """``compat.mosaic_gpu_reason`` asks for 0.11."""
    for extra in ("gpu", "gpu-cuda12"):
        (jax,) = (need for need in PROJECT["optional-dependencies"][extra] if need.startswith("jax"))
        assert re.fullmatch(r"jax\[cuda1[23]\]>=0\.11,<0\.13", jax)


def test_uv_installs_from_where_pip_would() -> None:
    """Variables go before files, and what is set for uv before both; nothing else of pip's is passed on."""
    install = loaded(ROOT / "scripts/install.py")
    listed = r"""
global.cert='/a/b.pem'
global.extra-index-url='\nfile:///one\nfile:///two'
global.index-url='file:///global'
global.timeout='60'
:env:.find-links='/wheels /more'
:env:.index-url='file:///variable'
"""
    told = {
        "UV_DEFAULT_INDEX": "file:///variable",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INDEX": "file:///one file:///two",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": "/a/b.pem",
    }
    assert install.uv_environment(listed, {}) == told
    own = {"SSL_CERT_FILE": "/own.pem", "HOME": "/home"}
    assert install.uv_environment(listed, own) == told | own
    assert install.uv_environment("", own) == own


def test_versions_agree() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {logitless.__version__}\n" in citation
