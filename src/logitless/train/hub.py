"""Where a model is: a path, a hub id (``Qwen/Qwen2.5-0.5B-Instruct``), or a name that scripts/fetch.py has fetched.

A hub id comes out of huggingface_hub's cache or from the hub itself. ``id@revision`` takes another branch, tag or
commit than ``main``, and ``id/file.gguf`` one file of a repository. Only configuration, tokenizer and weights are
fetched; no code of a repository is, and none ever runs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from logitless.lab.tools.compiled import user_cache
from logitless.train.files import in_a_line, package

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:/(?P<file>{_PART}\.gguf))?(?:@(?P<revision>[A-Za-z0-9._/-]+))?")
WANTED = ("config.json", "generation_config.json", "tokenizer*", "chat_template*", "*.safetensors*")
"""Files to fetch from a repository's top folder, for :mod:`logitless.train.weights` and the tokenizer."""


class FetchError(RuntimeError):
    """There is no model by that name or path; the message says what to do."""


def _not_there(source: str, why: str) -> FetchError:
    return FetchError(f"no model at {source}: no such folder or file here, and as a hub id: {why}")


def by_name(name: str, cache_dir: str | Path | None = None) -> Path:
    """The folder that scripts/fetch.py makes for ``name``."""
    return Path(cache_dir if cache_dir is not None else user_cache()) / name


def local_source(source: str | Path, cache_dir: str | Path | None = None) -> Path:
    """A model's path: an existing ``source`` itself, a fetched model with this name, or a download from the hub."""
    path = Path(source).expanduser()
    if path.is_file() and path.suffix != ".gguf":
        raise FetchError(f"{source}: is a file; expected a folder of a hub's model, or a .gguf file.")
    if path.exists():
        return path
    if (fetched := _fetched(str(source), cache_dir)) is not None:
        return fetched
    if not is_id(str(source)):
        raise FetchError(
            f"no model at {source}: expected a hub folder, a .gguf file, or a hub id such as Qwen/Qwen2.5-0.5B. "
            f"Without a hub, `python scripts/fetch.py` in a checkout puts some models into {by_name('', cache_dir)}."
        )
    return download(str(source))


def missing(source: str | Path, cache_dir: str | Path | None = None) -> bool:
    """Whether :func:`local_source` would have to download it first."""
    here = Path(source).expanduser().exists() or _fetched(str(source), cache_dir) is not None
    return not here and is_id(str(source)) and cached(str(source)) is None


def _fetched(name: str, cache_dir: str | Path | None) -> Path | None:
    return next(by_name(name, cache_dir).glob("*.gguf"), None) if re.fullmatch(_PART, name) else None


def is_id(source: str) -> bool:
    """Whether ``source`` is of the form that hub ids have; a path that exists is meant as a path."""
    return _ID.fullmatch(source) is not None


def cached(source: str) -> Path | None:
    """Path in the cache if complete, without asking the hub; otherwise ``None``."""
    try:
        return _get(source, here=True)
    except Exception:  # the client has many kinds for "not there"
        return None


def download(source: str) -> Path:
    """The folder or file for a hub id, from the cache if complete."""
    client(source)
    if (there := cached(source)) is not None:
        return there
    try:
        found = _get(source, here=False)
    except Exception as error:
        raise _not_there(
            source,
            f"not in the hub's cache, and the hub did not give it ({in_a_line(error)}). "
            "Go online; for a gated model set HF_TOKEN; or set HF_HOME to a cache that has it, or give a folder that "
            "holds config.json and *.safetensors.",
        ) from None
    if found is None:
        raise _not_there(source, "the repository holds no config.json with *.safetensors; name a file of it instead.")
    return found


def client(source: str) -> Any:
    """huggingface_hub; if missing, an error names the extra."""
    advice = "pip install 'logitless[hub]'; or give a folder that holds config.json and *.safetensors"
    return package("huggingface_hub", _not_there(source, f"a hub id needs huggingface_hub: {advice}"))


def _get(source: str, *, here: bool) -> Path | None:
    from logitless.train.weights import missing_shards

    match = _ID.fullmatch(source)
    assert match is not None
    where = dict(repo_id=match["repo"], revision=match["revision"], local_files_only=here)
    if match["file"]:
        return Path(client(source).hf_hub_download(filename=match["file"], **where))
    folder = Path(client(source).snapshot_download(allow_patterns=list(WANTED), **where))
    # A cached snapshot may hold a tokenizer alone, or some of several shards.
    return folder if (folder / "config.json").exists() and not missing_shards(folder) else None
