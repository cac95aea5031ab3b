"""The suite on every supported jax: an environment each, the tests in it, one JSON file: ``make matrix``.

python scripts/matrix.py                                # all of it; about as many times `make tests` as there are rows
python scripts/matrix.py --only 0.11 -- tests/lab/test_cli.py # one jax, some tests
"""

from __future__ import annotations

import argparse
import datetime
import glob
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from install import install
from record_green import counts

ROOT = Path(__file__).resolve().parents[1]
MATRIX = (("3.11", "0.10"), ("3.12", "0.11"), ("3.12", "0.12"), ("3.13", "0.12"))
"""Python and jax; jax 0.11 and later need Python 3.12."""
EVERYTHING = ("-n", "2", "--dist", "worksteal", "-m", "not slow and not gpu")
VERSIONS = """
import importlib.metadata as m, json, platform
names = ("jax", "jaxlib", "libtpu", "numpy", "optax", "flax", "equinox")
print(json.dumps(dict(python=platform.python_version(), **{n: m.version(n) for n in names})))
"""


def interpreter(version: str) -> str:
    """A Python of that version: on the PATH, or one of pyenv's."""
    found = [
        shutil.which(f"python{version}"),
        *sorted(glob.glob(f"{Path.home()}/.pyenv/versions/{version}*/bin/python")),
    ]
    for path in filter(None, found):
        check = f"import sys, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
        if subprocess.run([path, "-c", check], capture_output=True).returncode == 0:
            return path
    sys.exit(f"matrix: Python {version} is not here; put python{version} on the PATH, or leave it out with --only")


def environment(folder: Path, python: str, jax: str) -> Path:
    """The Python of an environment with the checkout and that jax; made anew if there is none."""
    own = folder / f"python{python}-jax{jax}"
    if not (own / ".installed").exists():
        install(interpreter(python), own, ["-e", f"{ROOT}[dev,tpu]", f"jax=={jax}.*"])
        (own / ".installed").touch()
    return own / "bin" / "python"


def row(folder: Path, python: str, jax: str, tests: list[str]) -> dict[str, Any]:
    """The suite in one environment."""
    own = environment(folder, python, jax)
    versions = json.loads(subprocess.check_output([own, "-c", VERSIONS], text=True))
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.xml"
        begin = time.perf_counter()
        done = subprocess.run([own, "-m", "pytest", f"--junitxml={report}", *tests], cwd=ROOT, env=env)
        seconds = time.perf_counter() - begin
        found = counts(report) if report.exists() else {}
    return dict(**versions, **found, exit_code=done.returncode, seconds=round(seconds, 1))


def main() -> int:
    """Every row; 1 if one is not green."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", action="append", default=[], metavar="JAX", help="0.10, 0.11 or 0.12; may be repeated"
    )
    parser.add_argument(
        "--envs", type=Path, default=ROOT / ".matrix", help="folder of the environments, which are kept"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "matrix.json")
    parser.add_argument("tests", nargs="*", help="arguments of pytest (default: the suite of `make tests`)")
    args = parser.parse_args()
    if unknown := set(args.only) - {jax for _, jax in MATRIX}:
        parser.error(f"--only {', '.join(unknown)}, expected {', '.join(jax for _, jax in MATRIX)}")
    tests = args.tests or list(EVERYTHING)
    rows = [row(args.envs, python, jax, tests) for python, jax in MATRIX if not args.only or jax in args.only]
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    record = dict(
        what="the tests on every supported jax",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=git.stdout.strip(),
        command=f"pytest {' '.join(tests)}",
        machine=dict(system=platform.system(), processor=platform.machine(), cores=os.cpu_count()),
        rows=rows,
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    for r in rows:
        print(
            f"Python {r['python']}, jax {r['jax']}: "
            + ", ".join(f"{r.get(k)} {k}" for k in ("passed", "failed", "skipped"))
        )
    print(args.out)
    return int(any(r["exit_code"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
