"""The sparse backward on one GPU, on data of a trained policy's kind: check, then time, in one process.

    python benchmarks/gpu_sparse.py --out results.json [--shape 8192,4096,151936]... [--only substring] [--peers DIR]

Hidden states and heads come from ``logitless.bench.realistic``, targets from their own softmax; "flat" cases have the
flat random logits of gpu_head.py. Baselines are dense, the strong and the naive form of ``logitless.tools.baselines``;
"exact" is the fused head without the sparse backward. ``--peers`` is a folder with the unpacked wheels of liger_kernel
and cut_cross_entropy, for the PyTorch peers on the same arrays (gpu_head_peers.py). Times are device times (CUPTI),
medians, with the host's clock beside them (loops whose length depends on the data wait for the host); memory is the
compiler's. The exit code is 1 if one of the project's bars is missed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the peers share the device's memory

import jax
import jax.numpy as jnp
import numpy as np

import logitless
from logitless import Objective, oracle
from logitless.bench import realistic
from logitless.head.sparse_report import SPARSE_METRICS
from logitless.tools import baselines, shapes, timing

CLIP = Objective(aggregation="dapo")
GSPO = Objective(level="sequence", eps_low=3e-4, eps_high=4e-4)
ROWS, RL_ROWS = 8, 32
DTYPES = {"bf16": "bfloat16", "f32": "float32"}
SHAPES = ["8192,4096,151936", "16384,1536,151936"]
BOTH = (0, 1)


def ours(objective: Objective = CLIP, **options: Any) -> Callable[..., Any]:
    def loss(h: jax.Array, w: jax.Array, rest: dict) -> Any:
        return logitless.linear_grpo_loss(h, w, objective=objective, **rest, **options)

    return jax.jit(jax.value_and_grad(loss, argnums=BOTH, has_aux=True))


def theirs(kind: str, logits_dtype: str) -> Callable[..., Any]:
    def loss(h: jax.Array, w: jax.Array, rest: dict) -> Any:
        return baselines.head_loss(kind, h, w, objective=CLIP, logits_dtype=logits_dtype, **rest)

    return jax.jit(jax.value_and_grad(loss, argnums=BOTH))


def cases(backend: str | None, tolerance: Any) -> dict[str, tuple[Callable[..., Any], str]]:
    """name -> (jitted function, which batch)."""
    out: dict[str, tuple[Callable[..., Any], str]] = {}
    for short, dtype in DTYPES.items():
        common = dict(logits_dtype=dtype, backend=backend)
        own = "param" if short == "bf16" else "float32"
        out[f"strong/{short}"] = theirs("strong", dtype), "real"
        out[f"naive/{short}"] = theirs("naive", dtype), "real"
        out[f"exact/{short}/dw_{own}"] = ours(head_grad_dtype=own, **common), "real"
        for grad in ("param", "float32"):
            options = dict(head_grad_dtype=grad, sparse_backward=tolerance, **common)
            out[f"sparse/{short}/dw_{grad}"] = ours(**options), "real"
        for name, mode in (("exact", "off"), ("sparse", tolerance)):
            options = dict(head_grad_dtype=own, sparse_backward=mode, **common)
            out[f"{name}_flat/{short}"] = ours(**options), "flat"
        if short == "bf16":
            for name, mode in (("exact", "off"), ("sparse", tolerance)):
                options = dict(head_grad_dtype=own, sparse_backward=mode, **common)
                out[f"{name}_rl/{short}"] = ours(**options), "rl"
                out[f"{name}_gspo/{short}"] = ours(GSPO, **options), "real"
    return out


def on_policy(h: jax.Array, w: jax.Array, rest: dict[str, Any], seed: int = 3) -> dict[str, Any]:
    """``rest`` with ``old_logp`` a little off the policy's own."""
    logp = jax.jit(lambda h, w, y: logitless.linear_logprobs(h, w, y).logp)(h, w, rest["targets"])
    noise = 0.05 * np.random.default_rng(seed).standard_normal(logp.shape).astype(np.float32)
    return {k: jnp.asarray(v) for k, v in {**rest, "old_logp": logp + noise}.items()}


def batches(tokens: int, hidden: int, vocab: int, wanted: set[str]) -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    """name -> (hidden, head, the rest)."""
    rng = np.random.default_rng(2)
    out: dict[str, Any] = {}
    start = time.perf_counter()
    states, head = realistic.realistic_head(tokens, hidden, vocab)
    h, w = jnp.asarray(states), jnp.asarray(head)
    y = realistic.sample_targets(h, w)
    print(f"calibrated inputs made in {time.perf_counter() - start:.0f} s", flush=True)
    shape = (ROWS, tokens // ROWS)
    if "real" in wanted:
        rest = dict(targets=y.reshape(shape), advantages=rng.standard_normal(shape).astype(np.float32))
        out["real"] = h.reshape(*shape, -1), w, on_policy(h.reshape(*shape, -1), w, rest)
    if "rl" in wanted:
        shape_rl = (RL_ROWS, tokens // RL_ROWS)
        rest = shapes.rl_batch(tokens, vocab, rng, RL_ROWS) | dict(targets=y.reshape(shape_rl))
        out["rl"] = h.reshape(*shape_rl, -1), w, on_policy(h.reshape(*shape_rl, -1), w, rest)
    if "flat" in wanted:
        key = jax.random.split(jax.random.key(0), 2)
        flat_w = 3.0 / hidden**0.5 * jax.random.normal(key[0], (vocab, hidden), jnp.bfloat16)
        flat_h = jax.random.normal(key[1], (*shape, hidden), jnp.bfloat16)
        rest = dict(targets=y.reshape(shape), advantages=rng.standard_normal(shape).astype(np.float32))
        out["flat"] = flat_h, flat_w.astype(jnp.bfloat16), on_policy(flat_h, flat_w.astype(jnp.bfloat16), rest)
    return out


def check(backend: str | None, tolerance: Any) -> dict[str, float]:
    """Errors against float64 at a small shape: relative Frobenius norms, and the worst row of dH against its own error
    on the exact path."""
    tokens, hidden, vocab = 256, 256, 16384
    states, head = realistic.realistic_head(tokens, hidden, vocab)
    h, w = jnp.asarray(states).reshape(ROWS, -1, hidden), jnp.asarray(head)
    y = realistic.sample_targets(jnp.asarray(states), w).reshape(ROWS, -1)
    rest = dict(targets=y, advantages=jnp.asarray(np.random.default_rng(0).standard_normal(y.shape), jnp.float32))
    _, dh, dw, _ = oracle.linear_grpo_loss(
        np.asarray(h), head, objective=CLIP, head_layout="vh", **{k: np.asarray(v) for k, v in rest.items()}
    )
    errors: dict[str, float] = {}
    for short, dtype in DTYPES.items():
        rows = {}
        for name, mode in (("exact", "off"), ("sparse", tolerance)):
            f = ours(logits_dtype=dtype, backend=backend, sparse_backward=mode, chunk_size=128)
            (_, metrics), grads = f(h, w, rest)
            for label, g, truth in zip(("dh", "dw"), grads, (dh, dw), strict=True):
                off = np.asarray(g, np.float64) - truth
                errors[f"{name}/{short}/{label}"] = float(np.linalg.norm(off) / np.linalg.norm(truth))
                if label == "dh":
                    rows[name] = np.linalg.norm(off, axis=-1)
            if name == "sparse":
                errors[f"sparse/{short}/left_out_max"] = float(metrics["left_out_mass_max"].sum)
        errors[f"sparse/{short}/worst row of dh, relative to exact"] = float(
            np.max(rows["sparse"] / np.maximum(rows["exact"], 1e-12))
        )
        errors[f"sparse/{short}/largest row error of dh, relative to exact"] = float(
            rows["sparse"].max() / rows["exact"].max()
        )
    return errors


def gates(rows: dict[str, Any], shape: str) -> dict[str, dict[str, Any]]:
    """The project's bars at a shape."""

    def ratio(what: str, a: str, b: str, limit: float) -> dict[str, Any] | None:
        try:
            value = rows[a][what] / rows[b][what]
        except KeyError:
            return None
        return dict(value=round(value, 4), limit=limit, ok=value <= limit)

    ms, temp = "median_ms", "temporaries"
    wide = shape.startswith("8192,4096")
    table = {
        "bf16: time / strong": (ms, "sparse/bf16/dw_param", "strong/bf16", 0.52 if wide else 0.55),
        "f32 logits: time / strong": (ms, "sparse/f32/dw_float32", "strong/f32", 0.55),
        "f32 logits: time / naive": (ms, "sparse/f32/dw_float32", "naive/f32", 0.30),
        "bf16: memory / exact": (temp, "sparse/bf16/dw_param", "exact/bf16/dw_param", 1.0),
        "f32 logits: memory / exact": (temp, "sparse/f32/dw_float32", "exact/f32/dw_float32", 1.0),
        "flat, bf16: time / exact": (ms, "sparse_flat/bf16", "exact_flat/bf16", 1.03),
        "flat, f32 logits: time / exact": (ms, "sparse_flat/f32", "exact_flat/f32", 1.03),
        "RL batch, bf16: time / strong": (ms, "sparse_rl/bf16", "strong/bf16", 0.25),
    }
    return {name: g for name, row in table.items() if (g := ratio(*row)) is not None}


def run_shape(
    shape: str, only: list[str], backend: str | None, repeats: int, tolerance: Any, peers: str | None
) -> dict:
    """Every case at one shape."""
    chosen = {n: c for n, c in cases(backend, tolerance).items() if not only or any(s in n for s in only)}
    data = batches(*(int(x) for x in shape.split(",")), {batch for _, batch in chosen.values()} | {"real"})
    rows: dict[str, Any] = {}
    # One program compiles while the next is traced. Not two at a time: each would disturb the other's autotuning.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        programs = {name: pool.submit(f.lower(*data[batch]).compile) for name, (f, batch) in chosen.items()}
    for name, (_, batch) in chosen.items():
        args = data[batch]
        try:
            f = programs[name].result()
            row: dict[str, Any] = dict(timing.compiled_memory(f))
            if not name.startswith(("strong", "naive")):
                values = logitless.metric_values(f(*args)[0][1])
                row.update({k: values[k] for k in (*SPARSE_METRICS, "entropy") if k in values})
            row.update(timing.summary(timing.device_times(f, *args, repeats=repeats)))
            row["wall_ms"] = statistics.median(timing.wall_times(f, *args, repeats=repeats))
            found = " ".join(f"{k} {row[k]:.3g}" for k in SPARSE_METRICS if k in row)
            print(
                f"{name:24s} {row['median_ms']:9.3f} ms (wall {row['wall_ms']:.2f})  "
                f"temp {row['temporaries'] / 2**20:7.0f} MiB  {found}",
                flush=True,
            )
        except Exception as error:
            row = dict(error=f"{type(error).__name__}: {error}"[:2000])
            traceback.print_exc()
        rows[name] = row
    if peers:
        rows.update(run_peers(peers, data["real"], repeats))
    return rows


def run_peers(folder: str, batch: tuple[Any, Any, dict[str, Any]], repeats: int) -> dict[str, Any]:
    """The PyTorch peers on the same arrays; their advantages are those of the first token of each row."""
    sys.path.insert(0, str(Path(__file__).parent))
    for name in ("liger_kernel", "cut_cross_entropy"):
        sys.path.insert(0, str(Path(folder) / name))
    import gpu_head_peers
    import torch

    h, w, rest = batch

    def tensor(x: Any) -> Any:
        if x.dtype == jnp.bfloat16:
            return torch.from_numpy(np.asarray(x).view(np.int16)).cuda().view(torch.bfloat16)
        return torch.from_numpy(np.asarray(x)).cuda()

    b = dict(
        h=tensor(h).requires_grad_(),
        w=tensor(w).requires_grad_(),
        y=tensor(rest["targets"]).long(),
        a=tensor(rest["advantages"])[:, 0].contiguous(),
        old=tensor(rest["old_logp"]),
    )
    compiled = torch.compile(gpu_head_peers.dense)
    makers: dict[str, Callable[[], Any]] = {
        "peer/torch.compile": lambda: lambda: compiled(b),
        "peer/liger": lambda: gpu_head_peers.liger(b),
        "peer/cut_cross_entropy": lambda: gpu_head_peers.cce(b),
    }
    rows: dict[str, Any] = {}
    for name, make in makers.items():
        try:
            rows[name] = gpu_head_peers.measure(make(), b, repeats)
            print(f"{name:24s} {rows[name]['median_ms']:9.3f} ms", flush=True)
        except Exception as error:
            traceback.print_exc()
            rows[name] = dict(error=f"{type(error).__name__}: {error}"[:500])
        torch.cuda.empty_cache()
    return rows


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", required=True)
    p.add_argument("--shape", action="append", default=[], help="tokens,hidden,vocab; may be given several times")
    p.add_argument("--only", default="", help="comma-separated parts of case names")
    p.add_argument("--backend", default=None)
    p.add_argument("--repeats", type=int, default=8)
    p.add_argument("--tolerance", default="auto", help="auto, or a number")
    p.add_argument("--peers", default=None, help="folder of the peers' unpacked wheels")
    p.add_argument("--skip-check", action="store_true", help="do not compare with float64 first")
    args = p.parse_args()
    tolerance = args.tolerance if args.tolerance == "auto" else float(args.tolerance)
    errors = {} if args.skip_check else check(args.backend, tolerance)
    result: dict[str, Any] = dict(environment=timing.environment(), tolerance=tolerance, errors=errors, shapes={})
    for name, value in errors.items():
        print(f"{name:56s} {value:.2e}", flush=True)
    missed = 0
    for shape in args.shape or SHAPES:
        print(f"--- {shape}", flush=True)
        only = [s for s in args.only.split(",") if s]
        rows = run_shape(shape, only, args.backend, args.repeats, tolerance, args.peers)
        result["shapes"][shape] = dict(cases=rows, gates=gates(rows, shape))
        for name, gate in result["shapes"][shape]["gates"].items():
            missed += not gate["ok"]
            print(f"{'PASS' if gate['ok'] else 'FAIL'} {name:36s} {gate['value']:.3f} (<= {gate['limit']})", flush=True)
        Path(args.out).write_text(json.dumps(result, indent=1))
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
