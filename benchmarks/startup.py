"""Seconds before step 1: a GGUF is read and dequantised, and a run's programs are compiled, first and again.

    python benchmarks/startup.py --layers 28          # the shape of Qwen2.5-1.5B, in a made-up file of about 1.1 GB

Every measurement is a process of its own: loading with one thread and with all, then loading and compiling with an
empty compilation cache, and once more with the cache that this left. Bars, on a machine with a GPU: 60 s, then 25 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

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


def child(path: str, threads: int, compiles: bool) -> dict[str, float]:
    """Load, and compile a run's programs where that is asked for."""
    import jax

    from logitless.train import weights
    from logitless.train.config import load
    from logitless.train.task import build_task
    from logitless.train.trainer import Trainer

    if threads:
        weights.cores = lambda: threads
        from logitless.train import gguf

        gguf.cores = weights.cores
    settings = [
        f"model.weights={path}", "model.master_dtype=bfloat16", "model.compute_dtype=bfloat16", "rollout.kind=random",
        "rollout.max_prompt_tokens=64", "rollout.max_completion_tokens=256", "train.prompts_per_step=4",
        "train.group_size=4", "model.lora.rank=8", "train.inner_epochs=1", "train.kl_report=false",
    ]  # fmt: skip
    config = load(None, settings)
    jax.block_until_ready(jax.numpy.zeros(1))  # the device's own start is not ours
    begin, cpu = time.perf_counter(), time.process_time()
    task = build_task(config)
    params = jax.block_until_ready(task.load_params())
    loaded, cpu_loaded = time.perf_counter(), time.process_time()
    out = {"load_s": loaded - begin, "load_cpu_s": cpu_loaded - cpu}
    if compiles:
        trainer = Trainer(config, task)
        trainer.compile(*trainer.initial(params))
        out |= {"compile_s": time.perf_counter() - loaded, "compile_cpu_s": time.process_time() - cpu_loaded}
    return out


def measure(path: Path, cache: Path, threads: int, compiles: bool) -> dict[str, float]:
    """The same in a process of its own."""
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    command = [sys.executable, __file__, "--child", json.dumps([str(path), threads, compiles])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--layers", type=int, default=28)
    p.add_argument("--vocab", type=int, default=VOCAB)
    p.add_argument("--load-only", action="store_true")
    p.add_argument("--out", type=Path, default=None, help="write the numbers to this file")
    p.add_argument("--child", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        print(json.dumps(child(*json.loads(args.child))))
        return
    with tempfile.TemporaryDirectory(prefix="logitless-startup-") as folder:
        path, cache = Path(folder, "made-up.gguf"), Path(folder, "compiled")
        write_gguf(path, args.layers, args.vocab)
        found: dict[str, object] = {"layers": args.layers, "vocab": args.vocab, "file_bytes": path.stat().st_size}
        found["one thread"] = measure(path, cache, 1, False)
        found["all threads"] = measure(path, cache, 0, False)
        if not args.load_only:
            found["first start"] = measure(path, cache, 0, True)
            found["second start"] = measure(path, cache, 0, True)
    print(json.dumps(found, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
