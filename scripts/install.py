"""A virtual environment with packages in it: ``make install``.

python scripts/install.py .venv -e '.[dev,tpu]'       # the folder, then what pip would be given

uv installs in a fraction of pip's time. It does not read pip's settings, so they are handed to it: the indexes, the
folders and the certificate that pip is configured for, in its files or by its variables. Where uv cannot be had or does
not come through, pip does it alone.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

FOR_UV = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "cert": ("SSL_CERT_FILE", " "),
}
"""Settings of pip, the variables by which uv is told the same, and what uv has between several."""


def uv_environment(listed: str, environment: dict[str, str]) -> dict[str, str]:
    """``environment`` with what ``pip config list`` has listed, for uv; what is set for uv already stays.

    Of a setting that is listed twice pip takes the last: files come first, variables after them.
    """
    told = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        if (setting := key.rpartition(".")[2]) in FOR_UV:
            name, between = FOR_UV[setting]
            told[name] = between.join(ast.literal_eval(value).split())
    if "UV_INDEX" in told:
        told["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # pip's: the best version, whichever index has it
    return {**told, **environment}


def install(python: str, folder: Path, wanted: list[str]) -> None:
    """An environment of that Python in ``folder``, made anew, with what pip would be given to install."""
    subprocess.run([python, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    own = folder / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]  # that Python's, which is there, for uv alone
    silent = {"stderr": subprocess.DEVNULL}
    if subprocess.run([*pip, "--python", own, "install", "--quiet", "uv"], **silent).returncode == 0:
        listed = subprocess.run([*pip, "config", "list"], stdout=subprocess.PIPE, text=True, **silent).stdout
        uv = [folder / "bin" / "uv", "pip", "install", "--quiet", "--python", own, "pip", *wanted]
        if subprocess.run(uv, env=uv_environment(listed, dict(os.environ)), **silent).returncode == 0:
            return
    subprocess.run([own, "-m", "ensurepip"], stdout=subprocess.DEVNULL, check=True)
    subprocess.run([own, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *wanted], check=True)


if __name__ == "__main__":
    try:
        install(sys.executable, Path(sys.argv[1]), sys.argv[2:])
    except subprocess.CalledProcessError as failed:
        sys.exit(failed.returncode)
