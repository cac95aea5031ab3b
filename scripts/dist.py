"""Builds wheel and sdist into dist/, installs each into an empty environment, and tries it there: ``make dist``.

What is tried is what a user does first: ``pip install logitless`` from an index and the README's example, which is to
take less than a minute; import, the command line, the configurations that come with the package, a
loss with its gradients, and the examples (from the sdist, which carries them). Nothing of the checkout is on the path.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from venv import EnvBuilder

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | {"JAX_PLATFORMS": "cpu"}

IMPORTS = """
import pathlib, sys, logitless
where = pathlib.Path(logitless.__file__)
assert "site-packages" in where.parts, where
assert (where.parent / "py.typed").exists()
for name in logitless.__all__:
    getattr(logitless, name)
print("logitless", logitless.__version__, "with jax", __import__("jax").__version__)
"""

LOSS = """
import jax, jax.numpy as jnp, logitless
h, w, y = jnp.ones((2, 4, 8)), jnp.zeros((16, 8)), jnp.zeros((2, 4), int)
loss = lambda h, w: logitless.linear_grpo_loss(h, w, y, advantages=jnp.array([1.0, -1.0]))[0]
value, grads = jax.value_and_grad(loss, (0, 1))(h, w)
assert bool(jnp.isfinite(value)) and all(bool(jnp.isfinite(g).all()) for g in grads)
"""

MINUTE = 60.0
"""Seconds of a processor for an empty environment, ``pip install logitless`` and the README's example."""
EXAMPLES = ("grpo_optax", "grpo_nnx", "grpo_linen", "grpo_equinox", "gspo_packed", "grpo_lora")


def run(*command: str | Path, cwd: Path) -> None:
    """A command that has to succeed; its output is shown if it does not."""
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"dist: {' '.join(map(str, command))} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")


def build(out: Path) -> tuple[Path, Path]:
    """``(wheel, sdist)``, alone in ``out``."""
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "hatchling", "build", "-d", out, cwd=ROOT)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def installed(folder: Path, what: str) -> Path:
    """The Python of an empty environment with ``what`` in it."""
    run(sys.executable, ROOT / "scripts" / "install.py", folder, what, cwd=folder.parent)
    return folder / "bin" / "python"


def try_index(wheel: Path, folder: Path) -> tuple[float, float]:
    """Seconds, and those of a processor, that a newcomer waits: ``pip install logitless`` from an index that has the
    wheel, and the README's code."""
    (project := folder / "index" / "logitless").mkdir(parents=True)
    shutil.copy(wheel, project)
    (project / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    begin, spent = time.perf_counter(), _children_s()
    EnvBuilder(with_pip=True).create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    index = f"--extra-index-url={project.parent.as_uri()}"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", index, "logitless", cwd=folder)
    run(python, "-c", example, cwd=folder)
    return time.perf_counter() - begin, _children_s() - spent


def _children_s() -> float:
    """Processor seconds of commands that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def try_core(python: Path, folder: Path) -> None:
    """Without any extra: the library, and the commands that need none."""
    command = python.with_name("logitless")
    run(python, "-W", "error::DeprecationWarning:logitless", "-c", IMPORTS, cwd=folder)
    run(python, "-c", LOSS, cwd=folder)
    run(command, "--version", cwd=folder)
    run(command, "configs", cwd=folder)
    run(command, "plan", "--model", "qwen2.5-7b", "--chip", "v6e", cwd=folder)
    run(command, "demo", "--quick", "--tokens", "64", "--hidden", "16", "--vocab", "128", cwd=folder)


def try_extras(python: Path, folder: Path, sdist: Path) -> None:
    """With ``tools`` and ``examples``: a configuration by its name, and two steps of each example."""
    run(python.with_name("logitless"), "gradcheck", "--config", "head_chunked", cwd=folder)
    with tarfile.open(sdist) as tar:
        tar.extractall(folder, filter="data")
    (examples,) = folder.glob("logitless-*/examples")
    for name in EXAMPLES:
        run(python, "-c", f"import {name}; assert len({name}.main(2)) == 2", cwd=examples)


def main() -> None:
    """Build, install, try."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of wheel and sdist (default dist)")
    out = parser.parse_args().out
    begin = time.perf_counter()
    wheel, sdist = build(out)
    for file, extras in ((wheel, ""), (sdist, ""), (wheel, "[tools,examples]")):
        with tempfile.TemporaryDirectory(prefix="logitless-dist-") as name:
            folder = Path(name)
            python = installed(folder / "venv", f"{file}{extras}")
            try_extras(python, folder, sdist) if extras else try_core(python, folder)
        print(f"{file.name}{extras}: installed and tried, {time.perf_counter() - begin:.0f} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="logitless-dist-") as name:
        seconds, busy = try_index(wheel, Path(name))
    print(f"pip install logitless and the README's example: {seconds:.0f} s, {busy:.0f} s of a processor", flush=True)
    if busy > MINUTE:
        sys.exit(f"dist: a newcomer waits for more than {MINUTE:.0f} s.")


if __name__ == "__main__":
    main()
