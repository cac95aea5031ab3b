"""Loaders against mutated files: an error of the file, never a traceback, a hang or a heap of memory."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from logitless.train.bounds import memory_limit, time_limit
from logitless.train.config import ConfigError, TrainConfig, as_yaml, load
from logitless.train.data import DataError, gsm8k
from logitless.train.model import ModelError, init
from logitless.train.tokenizer import load_tokenizer, render
from logitless.train.weights import load_model, save_safetensors
from train_micro import MICRO

GIB = 1 << 30
PIECES = [
    b"{",
    b"[" * 50,
    b'"',
    b"\x00",
    b"\xff",
    b"-1",
    b"9" * 30,
    b"null",
    b"../",
    b"1e999",
    b"{{",
    b"%}",
    b"*",
    b"\n",
]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, cut, doubled or replaced by something that formats care about."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        width = rng.choice([0, 1, 1, 4, 16, len(out) // 3])
        new = rng.choice([rng.choice(PIECES), bytes(rng.randrange(256) for _ in range(rng.randint(1, 8))), b""])
        out[at : at + width] = rng.choice([new, new, bytes(out[at : at + width]) * 2])
    return bytes(out)


def write_tokenizer(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<eos>": 0, "a": 1, "b": 2, "ab": 3}
    folder.mkdir(exist_ok=True)
    built = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[("a", "b")]))
    built.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 1]}')


def targets(folder: Path) -> dict[str, tuple[Path, Callable[[], Any]]]:
    """By name: the file that is mutated, and what reads it."""
    params = init(MICRO, jax.random.key(0))
    save_safetensors(folder / "one", MICRO, params)
    save_safetensors(folder / "shards", MICRO, params, shard_bytes=2000)
    write_tokenizer(folder / "words")
    problems, config, template = folder / "problems.jsonl", folder / "config.yaml", folder / "template.jinja"
    problems.write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": "2+2?", "answer": "#### 4"}\n')
    config.write_text(as_yaml(TrainConfig()))
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] | trim }}{% endfor %}"
        "{% if add_generation_prompt and 3 * 4 > 2 ** 3 %}{{ 'x' * 3 }}{% endif %}{{ range(5) | join(',') }}"
    )
    chat = [{"role": "user", "content": "hi"}]
    return {
        "config.json": (folder / "one" / "config.json", lambda: load_model(folder / "one")),
        "safetensors": (folder / "one" / "model.safetensors", lambda: load_model(folder / "one")),
        "index": (folder / "shards" / "model.safetensors.index.json", lambda: load_model(folder / "shards")),
        "tokenizer": (folder / "words" / "tokenizer.json", lambda: load_tokenizer(folder / "words")),
        "tokenizer_config": (folder / "words" / "tokenizer_config.json", lambda: load_tokenizer(folder / "words")),
        "generation_config": (folder / "words" / "generation_config.json", lambda: load_tokenizer(folder / "words")),
        "problems": (problems, lambda: gsm8k(problems)),
        "yaml": (config, lambda: load(config)),
        "template": (template, lambda: render(template.read_bytes().decode(errors="replace"), chat, True, {})),
    }


def fuzz(folder: Path, count: int) -> dict[str, int]:
    """``count`` mutations of each file; how many were refused."""
    refused = {}
    for name, (file, read) in targets(folder).items():
        whole, rng, n = file.read_bytes(), random.Random(name), 0
        read()
        head = whole[:2048] if name == "safetensors" else whole  # its header: the numbers after it may be any
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for i in range(count):
            bad = mutated(head, rng) + whole[len(head) :]
            file.write_bytes(bad)
            try:
                with time_limit(30.0), memory_limit(GIB):
                    read()
            except (ModelError, DataError, ConfigError):
                n += 1
            except BaseException as error:
                raise AssertionError(f"{name}, mutation {i}: {type(error).__name__}: {error}: {bad[:300]!r}") from error
        file.write_bytes(whole)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        assert grown < GIB, (name, grown)
        refused[name] = n
    return refused


@pytest.mark.parametrize("count", [15, pytest.param(1200, marks=pytest.mark.slow)])
def test_mutated_files_are_read_or_refused(tmp_path: Path, count: int) -> None:
    refused = fuzz(tmp_path, count)
    assert len(refused) == 9 and all(n > 0 for n in refused.values()), refused
