"""Hub ids: out of a cache, through the client, and what is said where neither has the model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from hub_folder import save_safetensors
from logitless.train import hub
from logitless.train.hub import FetchError, local_source
from logitless.train.model import init
from logitless.train.weights import load_model
from train_micro import MICRO

ID = "someone/micro-model"


def cache_of(home: Path, shard_bytes: int = 1 << 30) -> Path:
    """huggingface_hub's own layout of a cache, with one model in it; its snapshot's folder."""
    repo, commit = home / "hub" / "models--someone--micro-model", "0123456789abcdef0123456789abcdef01234567"
    snapshot = repo / "snapshots" / commit
    save_safetensors(snapshot, MICRO, init(MICRO, jax.random.key(0)), shard_bytes=shard_bytes)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    return snapshot


def test_a_hub_id_comes_out_of_the_cache_of_the_real_client(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="hub ids need huggingface_hub: pip install 'logitless[hub]'")
    snapshot = cache_of(tmp_path)
    script = (
        "import sys; from logitless.train import hub\n"
        f"print(hub.local_source({ID!r}), hub.missing({ID!r}), hub.missing('someone/else'))\n"
        "try: hub.local_source('someone/else')\n"
        "except hub.FetchError as error: print(error)\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    found, refused = done.stdout.splitlines()
    assert found == f"{snapshot} False True", done.stderr
    assert refused.startswith("no model at someone/else: no such folder or file here, and as a hub id: ")
    assert "set HF_HOME to a cache that has it, or give a folder" in refused


class FakeHub:
    """A client whose hub has one model, and whose cache has what was asked for before."""

    def __init__(self, snapshot: Path):
        self.snapshot, self.asked, self.cached = snapshot, [], False

    def snapshot_download(self, repo_id: str, local_files_only: bool, **rest: Any) -> str:
        self.asked.append((repo_id, local_files_only, rest["revision"]))
        if local_files_only and not self.cached:
            raise FileNotFoundError("not cached")
        if repo_id != ID:
            raise ConnectionError("no route\nto host")
        assert "*.safetensors*" in rest["allow_patterns"]
        self.cached = True
        return str(self.snapshot)

    def hf_hub_download(self, filename: str, **rest: Any) -> str:
        return str(self.snapshot / filename)


def test_a_hub_id_is_fetched_once_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(cache_of(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)  # type: ignore[arg-type]
    assert hub.missing(ID)
    config, params = load_model(f"{ID}@v2")
    assert config.vocab_size == MICRO.vocab_size and (ID, False, "v2") in fake.asked
    np.testing.assert_array_equal(params["embed"], init(MICRO, jax.random.key(0))["embed"])
    fake.asked.clear()
    local_source(ID)
    assert fake.asked == [(ID, True, None)]  # the cache does
    assert local_source(f"{ID}/a.gguf") == fake.snapshot / "a.gguf"
    with pytest.raises(FetchError, match=r"no/such: .* \(ConnectionError: no route to host\)\. Go online; for a gated"):
        local_source("no/such")


def test_a_cache_with_half_a_model_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = cache_of(tmp_path, shard_bytes=2000)
    monkeypatch.setitem(sys.modules, "huggingface_hub", FakeHub(snapshot))  # type: ignore[arg-type]
    assert local_source(ID) == snapshot
    sorted(snapshot.glob("*.safetensors"))[-1].unlink()
    with pytest.raises(FetchError, match=r"holds no config\.json with"):
        local_source(ID)
    (snapshot / "config.json").unlink()
    assert hub.cached(ID) is None


def test_without_the_client_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # type: ignore[arg-type]
    with pytest.raises(FetchError, match=r"a hub id needs huggingface_hub: pip install 'logitless\[hub\]'"):
        local_source("Qwen/Qwen2.5-0.5B-Instruct")
    monkeypatch.chdir(tmp_path)
    Path("some").mkdir()
    Path("some/folder").mkdir()
    assert local_source("some/folder") == Path("some/folder")  # what is here is meant first


@pytest.mark.parametrize("text", ["nope", "/a/b", "a/b/c", "../b", "a//b", "a/b c", "~/x", "./a/b", "a/b.gguf/c"])
def test_what_is_no_hub_id(text: str) -> None:
    assert not hub.is_id(text)
