"""Loaders against mutated files: an error of the file, never a traceback, a hang or a heap of memory."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from hub_folder import save_safetensors, save_tokenizer
from logitless.train import checkpoints, recorded
from logitless.train.bounds import memory_limit, time_limit
from logitless.train.checkpoints import CheckpointError
from logitless.train.collect import random_rollouts
from logitless.train.command import describe
from logitless.train.config import ConfigError, TrainConfig, as_yaml, load
from logitless.train.data import DataError, gsm8k
from logitless.train.folder import keep_records, read_records, read_summary
from logitless.train.gguf import GGUF_NAMES
from logitless.train.model import ModelError, init
from logitless.train.run_records import run_numbers
from logitless.train.tokenizer import load_tokenizer, render
from logitless.train.weights import load_model
from train_micro import MICRO

GIB = 1 << 30
PIECES = [*b'{ " -1 null ../ 1e999 {{ %} *'.split(), b"[" * 50, b"9" * 30, b"\x00", b"\xff", b"\n"]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, cut, doubled or replaced by something that formats care about."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        width = rng.choice([0, 1, 1, 4, 16, len(out) // 3])
        new = rng.choice([rng.choice(PIECES), bytes(rng.randrange(256) for _ in range(rng.randint(1, 8))), b""])
        out[at : at + width] = rng.choice([new, new, bytes(out[at : at + width]) * 2])
    return bytes(out)


def write_gguf(path: Path, params: Any) -> None:
    """The micro model with a tokenizer of four words, as GGUF."""
    gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed")
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["<eos>", "a", "b", "ab"])
    writer.add_token_types([3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    for ours, theirs in GGUF_NAMES.top.items():
        if ours in params:
            writer.add_tensor(theirs, np.asarray(params[ours]))
    for ours in GGUF_NAMES.layer:
        tensor = params["layers"].get(ours)
        shape = {"q_bias": 16, "k_bias": 8, "v_bias": 8}.get(ours)
        data = np.zeros(shape, np.float32) if tensor is None else np.ascontiguousarray(np.asarray(tensor)[0].T)
        writer.add_tensor(GGUF_NAMES.of_layer(ours, 0), data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def use_tokenizer(source: Path) -> None:
    """Load a tokenizer and do with it what a run does."""
    tokenizer = load_tokenizer(source)
    tokenizer.encode("ab")
    tokenizer.decode([*tokenizer.encode_prompt("a b", chat=True, system=None), tokenizer.eos_id, tokenizer.pad_id])


def own_targets(run: Path) -> dict[str, tuple[Path, Callable[[], Any]]]:
    """The same of a run's own files. Two of them are read as far as they go: what is named counts as refused."""
    tree = {"w": jax.numpy.arange(6.0).reshape(2, 3), "n": jax.numpy.int32(3)}
    checkpoints.save(run, 1, tree, {"skipped_in_a_row": 0}, 1)
    kept = checkpoints.step_file(run, 1)
    rolled = random_rollouts(
        load(None, ["rollout.kind=random", "warm_start.steps=0", "train.prompts_per_step=2"]), 9, 1
    )
    rolled.trainer_logp, rolled.parts = np.zeros(rolled.completions.mask.shape, np.float32), {"answer": 0.5}
    recorded.save_rollouts(run, 1, rolled)
    numbers: dict[str, Any] = {
        "train/loss": 1.5,
        "train/reward": None,
        "train/losses": [1.5],
        "train/grad_norms": [None],
    }
    recorded.save_trace(run, 1, rolled, numbers, jax.numpy.ones(5))
    lines = [json.dumps({"step": i, **numbers, "time/train/step_avg_last10_s": 0.5}) + "\n" for i in (1, 2, 3)]
    metrics, summary = run / "metrics.jsonl", run / "summary.json"
    metrics.write_text("".join(lines))
    summary.write_text(json.dumps({"name": "a", "steps": 3, "train/reward_first10": 0.5, "eval/last": None}, indent=1))

    def read_metrics() -> None:
        said: list[str] = []
        keep_records(metrics, 3, said.append)
        json.dumps(run_numbers(read_records(metrics)))
        if said:
            raise ConfigError(said[0])

    def read_finished() -> None:
        if (found := read_summary(run)) is None:
            raise ConfigError("not readable")
        describe(found, run)

    rows, widths = len(rolled.rewards), (6, 3)
    return {
        "checkpoint": (kept, lambda: checkpoints.restore(run, tree, str, ["skipped_in_a_row"])),
        "rollouts": (run / "rollouts/step_00000001.npz", lambda: recorded.load_rollouts(run, 1, rows, widths, 9)),
        "trace": (run / "trace/step_00000001.npz", lambda: recorded.load_traces(run)),
        "metrics": (metrics, read_metrics),
        "summary": (summary, read_finished),
    }


def targets(folder: Path) -> dict[str, tuple[Path, Callable[[], Any]]]:
    """By name: the file that is mutated, and what reads it."""
    params = init(MICRO, jax.random.key(0))
    write_gguf(folder / "model.gguf", params)
    save_safetensors(folder / "one", MICRO, params)
    save_safetensors(folder / "shards", MICRO, params, shard_bytes=2000)
    (folder / "words").mkdir()
    save_tokenizer(folder / "words")
    (folder / "words" / "generation_config.json").write_text('{"eos_token_id": [0, 1]}')
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
        "gguf": (folder / "model.gguf", lambda: load_model(folder / "model.gguf")),
        "gguf tokenizer": (folder / "model.gguf", lambda: use_tokenizer(folder / "model.gguf")),
        "tokenizer": (folder / "words" / "tokenizer.json", lambda: use_tokenizer(folder / "words")),
        "tokenizer_config": (folder / "words" / "tokenizer_config.json", lambda: use_tokenizer(folder / "words")),
        "generation_config": (folder / "words" / "generation_config.json", lambda: use_tokenizer(folder / "words")),
        "problems": (problems, lambda: gsm8k(problems)),
        "yaml": (config, lambda: load(config)),
        "template": (template, lambda: render(template.read_bytes().decode(errors="replace"), chat, True, {})),
        **own_targets(folder / "run"),
    }


def fuzz(folder: Path, count: int) -> dict[str, int]:
    """``count`` mutations of each file; how many were refused."""
    refused = {}
    for name, (file, read) in targets(folder).items():
        whole, rng, n = file.read_bytes(), random.Random(name), 0
        read()
        # The header and what describes the tensors: the numbers after it may be any.
        head = whole[: {"safetensors": 2048, "gguf": 3000, "gguf tokenizer": 3000}.get(name, len(whole))]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for i in range(count):
            bad = mutated(head, rng) + whole[len(head) :]
            file.unlink()  # not written over: JAX may still read from the bytes that were mapped before
            file.write_bytes(bad)
            try:
                with time_limit(30.0), memory_limit(GIB):
                    read()
            except (ModelError, DataError, ConfigError, CheckpointError):
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
    assert len(refused) == 16 and all(n > 0 for n in refused.values()), refused
