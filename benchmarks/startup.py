"""Seconds before step 1 of the GSM8K run: a GGUF is read and dequantised, and the run's programs are compiled.

    python benchmarks/startup.py --weights FILE.gguf data.path=FOLDER     # the real model and data
    python benchmarks/startup.py                                          # a made-up file of the same shape, and sums

The configuration is the shipped qwen2.5-1.5b-gsm8k, with its rollout, evaluation and update programs; further arguments
are ``key=value`` overrides. Every measurement is a process of its own, from its start to the moment before step 1, with
Python's and the device's start: loading with one thread and with all, then loading and compiling with no compiled
programs kept, and once more with those that this left. Bars, on a machine with a GPU: 60 s, then 25 s.

Writes startup.json to ``--out``. Exit code 1 if a bar is missed (on a GPU: elsewhere the numbers are only recorded).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "train" / "qwen2.5-1.5b-gsm8k.yaml"
BARS = {"first start": 60.0, "second start": 25.0}
HIDDEN, INTER, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 1536, 8960, 151936, 12, 2, 128


def write_gguf(path: Path, layers: int, vocab: int) -> None:
    """Random weights in blocks of Q4_1, as real files have most of theirs, in the layout of a Qwen2 model."""
    import gguf

    rng = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType.Q4_1
    tile = gguf.quants.quantize(0.02 * rng.standard_normal((64, HIDDEN), np.float32), kind).reshape(64, -1)
    writer = gguf.GGUFWriter(str(path), "qwen2")
    for add, value in (
        (writer.add_block_count, layers),
        (writer.add_context_length, 32768),
        (writer.add_embedding_length, HIDDEN),
        (writer.add_feed_forward_length, INTER),
        (writer.add_head_count, HEADS),
        (writer.add_head_count_kv, KV_HEADS),
        (writer.add_rope_freq_base, 1e6),
        (writer.add_layer_norm_rms_eps, 1e-6),
    ):
        add(value)

    _add_tokenizer(writer, vocab)

    def matrix(name: str, rows: int, columns: int) -> None:
        blocks = np.resize(tile, (rows, tile.shape[1] * columns // HIDDEN))
        writer.add_tensor(name, blocks, raw_dtype=kind)

    def vector(name: str, size: int, value: float) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    matrix("token_embd.weight", vocab, HIDDEN)
    vector("output_norm.weight", HIDDEN, 1.0)
    for i in range(layers):
        q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        for name, rows, columns in (
            ("attn_q", q, HIDDEN),
            ("attn_k", kv, HIDDEN),
            ("attn_v", kv, HIDDEN),
            ("attn_output", HIDDEN, q),
            ("ffn_gate", INTER, HIDDEN),
            ("ffn_up", INTER, HIDDEN),
            ("ffn_down", HIDDEN, INTER),
        ):
            matrix(f"blk.{i}.{name}.weight", rows, columns)
        for name, size, value in (("attn_q", q, 0.0), ("attn_k", kv, 0.0), ("attn_v", kv, 0.0)):
            vector(f"blk.{i}.{name}.bias", size, value)
        for name in ("attn_norm", "ffn_norm"):
            vector(f"blk.{i}.{name}.weight", HIDDEN, 1.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, vocab: int) -> None:
    """As many tokens as the vocabulary has: the bytes, words that no text holds, an end and ChatML's marks."""
    from tokenizers import pre_tokenizers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fill = (f"{i:06x}" for i in range(vocab - len(alphabet) - 1 - len(special)))
    words = [*alphabet, "00", *fill, *special]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types([1] * (vocab - len(special)) + [3] * len(special))
    writer.add_token_merges(["0 0"])
    writer.add_eos_token_id(vocab - 1)
    writer.add_pad_token_id(vocab - 3)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def child(path: str, threads: int, compiles: bool, overrides: list[str], begin: float) -> dict[str, Any]:
    """Load, and compile a run's programs where that is asked for, as ``logitless train`` does; ``begin`` is when the
    process was started (seconds of the clock)."""
    import jax

    from logitless.lab.tools import compiled, timing
    from logitless.train import weights
    from logitless.train.config import load
    from logitless.train.task import build_task
    from logitless.train.trainer import Trainer

    if threads:
        weights.threads = lambda: threads
    found = {"hits": 0, "misses": 0}

    def count(event: str, **_: Any) -> None:
        for key in found:
            found[key] += event == f"/jax/compilation_cache/cache_{key}"

    jax.monitoring.register_event_listener(count)
    compiled.keep()
    config = load(CONFIG, [f"model.weights={path}", *overrides])
    spent: dict[str, float] = {}

    def add(event: str, seconds: float, **_: Any) -> None:
        name = event.rsplit("/", 1)[-1]
        spent[name] = spent.get(name, 0.0) + seconds

    jax.monitoring.register_event_duration_secs_listener(add)
    marks = [begin, time.time()]
    jax.block_until_ready(jax.numpy.zeros(1))
    marks.append(time.time())
    out: dict[str, Any] = {}
    cpu = time.process_time()
    task = build_task(config)
    marks.append(time.time())
    with ThreadPoolExecutor(1) as pool:  # as train.loop does it
        if compiles:
            trainer = Trainer(config, task)
            compiled_at = pool.submit(lambda: (trainer.compile(*trainer.like()), time.time())[1])
        params = jax.block_until_ready(task.load_params())
        loaded = time.time()
        if compiles:
            state, _ = trainer.initial(params)
            del params
            jax.block_until_ready(state)
            marks.append(max(compiled_at.result(), time.time()))
            out["compile_s"] = compiled_at.result() - marks[3]
            programs = (trainer.rollout_program, trainer.eval_program, trainer.score_program, trainer.update_program)
            out["programs_s"] = {p.name: p.compile_s for p in programs if p.memory}  # side by side
            out["compilation_cache"] = found
            out["jax_s"] = spent  # sums over all threads: tracing, lowering, the compiler, the cache
        else:
            marks.append(loaded)
    out["load_s"] = loaded - marks[3]
    out["cpu_s"] = time.process_time() - cpu
    phases = ("imports_s", "device_s", "task_s", "load_and_compile_s")
    out |= {name: after - before for name, before, after in zip(phases, marks, marks[1:], strict=False)}
    return out | {"total_s": marks[-1] - begin, "environment": timing.environment()}


def without_folders(argument: str) -> str:
    """The argument with a path in it cut to its last part: the record is for other machines."""
    key, equals, value = argument.rpartition("=")
    return key + equals + Path(value).name if "/" in value else argument


def measure(path: Path, cache: Path, threads: int, compiles: bool, overrides: list[str]) -> dict[str, Any]:
    """The same in a process of its own."""
    environment = {**os.environ, "LOGITLESS_CACHE": str(cache)}
    for name in ("JAX_COMPILATION_CACHE_DIR", "LOGITLESS_COMPILE_CACHE"):  # what is measured is the default
        environment.pop(name, None)
    given = json.dumps([str(path), threads, compiles, overrides, time.time()])
    command = [sys.executable, __file__, "--child", given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--weights", type=Path, help="a GGUF file; without one, a file of Qwen2.5-1.5B's shape is made up")
    p.add_argument("--layers", type=int, default=28, help="of the made-up file")
    p.add_argument("--vocab", type=int, default=VOCAB, help="of the made-up file")
    p.add_argument("--load-only", action="store_true", help="compile nothing")
    p.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of startup.json")
    p.add_argument("--child", help=argparse.SUPPRESS)
    p.add_argument("overrides", nargs="*", help="key=value")
    args = p.parse_intermixed_args()
    if args.child:
        print(json.dumps(child(*json.loads(args.child))))
        return 0
    overrides = args.overrides
    if not any(given.startswith(("data.path=", "data.kind=")) for given in overrides):
        overrides = ["data.kind=arithmetic", *overrides]  # nothing has to be fetched; no shape depends on it
    from logitless.lab.tools import result_files

    with tempfile.TemporaryDirectory(prefix="logitless-startup-") as folder:
        path, cache = args.weights, Path(folder, "cache")
        if path is None:
            path = Path(folder, "made-up.gguf")
            write_gguf(path, args.layers, args.vocab)
        found: dict[str, Any] = {
            "kind": "startup", **result_files.provenance(), "command": " ".join(map(without_folders, sys.argv)),
            "weights": path.name, "file_bytes": path.stat().st_size, "cores": len(os.sched_getaffinity(0)),
            "overrides": [without_folders(given) for given in overrides],
        }  # fmt: skip
        # The first process also takes the file from the disk; all others find it in memory.
        cases = {"one thread": (1, False), "all threads": (0, False)}
        if not args.load_only:
            cases |= {"first start": (0, True), "second start": (0, True)}
        found["runs"] = {name: measure(path, cache, *case, overrides) for name, case in cases.items()}
    for run in found["runs"].values():
        found["environment"] = run.pop("environment")
    found["bars"] = {
        name: {"value": found["runs"][name]["total_s"], "at_most": bar}
        for name, bar in BARS.items()
        if name in found["runs"]
    }
    print(json.dumps(found, indent=1))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "startup.json").write_text(json.dumps(found, indent=1) + "\n")
    missed = [name for name, bar in found["bars"].items() if bar["value"] > bar["at_most"]]
    return int(bool(missed) and found["environment"]["platform"] == "gpu")


if __name__ == "__main__":
    sys.exit(main())
