"""Forward statistics of the head by one Hopper matmul without logits: check against float64, then time, in one run.

    python benchmarks/gpu_head_forward.py --out results.json [--budget 140] [--shape 8192,4096,151936]... [--only text]

Each variant is checked and timed in a process of its own with a time limit, so that one that hangs or faults costs only
itself. Beside it, in the same run: cuBLAS' matmul alone, jax's own Hopper matmul, and ``linear_logprobs`` as it is.
Times are device times (CUPTI), medians; memory is the compiler's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SHAPES = ["8192,4096,151936", "16384,1536,151936", "8192,2304,256000"]
# (n, h, v, vocab_size, options): aligned, ragged in every size, more tiles than blocks, and every transform.
CHECKS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "aligned": (512, 256, 2048, 2048, {}),
    "ragged": (301, 136, 5003, 5001, {}),
    "long": (2048, 128, 16000, 16000, {}),
    "groups": (1024, 128, 8192, 8192, dict(group=2)),
    "masked vocabulary": (256, 128, 4096, 4000, {}),
    "softcap": (256, 128, 4096, 4096, dict(softcap=5.0, scale=1.5)),
    "temperature per token": (264, 192, 3000, 3000, dict(temperature="each")),
    "large offset": (256, 128, 2048, 2048, dict(offset=True)),
    "bias, [H, V]": (256, 128, 4096, 4096, dict(bias=True, layout="hv")),
    "live": (1024, 128, 8192, 8192, dict(live=300)),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "rule": {},
    "stagger 2": dict(stagger=2),
    "stagger 3": dict(stagger=3),
    "delay 0": dict(delay=0),
    "delay 0, stagger 2": dict(delay=0, stagger=2),
    "group 8": dict(group=8),
    "group 32": dict(group=32),
    "128x128": dict(rows=128, columns=128),
    "128x128, stagger 2": dict(rows=128, columns=128, stagger=2),
}
FIRST = ("rule", "stagger 2", "128x128")  # those timed at every shape


def arrays(n: int, h: int, v: int, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Hidden states, a head [V, H] whose logits have a spread of about 3, targets; made on the device."""

    @jax.jit
    def make(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        a, b, c = jax.random.split(key, 3)
        w = jax.random.normal(b, (v, h), jnp.bfloat16) * jnp.bfloat16(3.0 / h**0.5)
        return jax.random.normal(a, (n, h), jnp.bfloat16), w, jax.random.randint(c, (n,), 0, v, jnp.int32)

    return make(jax.random.key(seed))


def tiles(n: int, h: int, v: int, changes: dict[str, Any]) -> Any:
    from logitless.head.mosaic_gpu.kernels.schedule import tiles_for

    rule = tiles_for(n, h, v)
    if "rows" in changes:  # a token tile is twice as large
        changes = {"group": max(rule.group * 64 // changes["rows"], 1), **changes}
    t = dataclasses.replace(rule, **changes)
    return dataclasses.replace(t, group=min(t.group, -(-n // t.tokens)))


def error(name: str, changes: dict[str, Any]) -> dict[str, float]:
    """Largest errors of the float statistics against float64, in units of max(1, |value|)."""
    from logitless import oracle
    from logitless.core.problem import Call, HeadArrays, Linear, Problem
    from logitless.core.transform import LogitTransform
    from logitless.head.mosaic_gpu.kernels import stats_matmul

    n, h, v, vocab, o = CHECKS[name]
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((n, h), np.float32), jnp.bfloat16)
    head = jnp.asarray(rng.standard_normal((v, h), np.float32) * (3.0 / h**0.5), jnp.bfloat16)
    if o.get("offset"):  # all logits near 4096, and exact (multiples of 1/4), so that only the statistics round
        hidden = jnp.round(hidden).at[:, 0].set(64.0)
        head = (jnp.round(head * 4) / 4).at[:, 0].set(64.0)
    y = jnp.asarray(rng.integers(0, vocab, n), jnp.int32)
    bias = jnp.asarray(rng.standard_normal(v, np.float32)) if o.get("bias") else None
    temperature = rng.uniform(0.5, 2.0, n).astype(np.float32) if o.get("temperature") else None
    numbers = {k: o[k] for k in ("softcap", "scale") if k in o}
    t = LogitTransform(
        temperature=None if temperature is None else jnp.asarray(temperature),
        **{k: jnp.float32(x) for k, x in numbers.items()},
    )
    layout, live = o.get("layout", "vh"), o.get("live")
    changes = {**changes, **{k: o[k] for k in ("group",) if k in o}}

    def f(hidden: jax.Array, head: jax.Array, y: jax.Array, live: Any) -> Any:
        p = Problem(Linear(hidden, HeadArrays(head, bias, layout=layout)), y, t, call=Call("benchmark", vocab))
        return stats_matmul.token_stats(p, live, tiles(n, h, vocab, changes))

    weight = head if layout == "vh" else jnp.asarray(np.asarray(head).T)
    got = jax.jit(f)(hidden, weight, y, None if live is None else jnp.int32(live))
    if temperature is not None:
        numbers["temperature"] = temperature
    want = oracle.linear_token_stats(
        np.asarray(hidden.astype(jnp.float32)), np.asarray(head.astype(jnp.float32)), np.asarray(y), vocab_size=vocab,
        bias=None if bias is None else np.asarray(bias), head_layout="vh", **numbers,
    )  # fmt: skip
    rows = slice(0, live)
    out = {}
    for field in ("logp", "entropy", "lse", "max_logit", "log_sum_p2"):
        a, b = (np.asarray(getattr(s, field), np.float64)[rows] for s in (got, want))
        gap = np.abs(a - b) / np.maximum(1.0, np.abs(b))
        out[field] = float(np.where(np.isnan(gap), np.inf, gap).max())
    if live is not None:
        out["dead"] = float(np.abs(np.asarray(got.logp)[live:]).max())
    return out


def timed(f: Callable[..., Any], *args: Any) -> dict[str, float]:
    from logitless.lab.tools import timing

    jitted = jax.jit(f)
    memory = timing.compiled_memory(jitted.lower(*args).compile())
    s = timing.summary(timing.device_times(jitted, *args, repeats=6, warmup=1))
    return dict(ms=s["median_ms"], min_ms=s["min_ms"], temporaries_mib=memory["temporaries"] / 2**20)


def ours(changes: dict[str, Any], shape: tuple[int, int, int], logits_dtype: str = "float32", **numbers: Any) -> Any:
    from logitless.core.problem import Call, HeadArrays, Linear, Problem
    from logitless.core.transform import LogitTransform
    from logitless.head.mosaic_gpu.kernels import stats_matmul

    t = LogitTransform(**{k: jnp.float32(x) for k, x in numbers.items()})
    call = Call("benchmark", shape[2], logits_dtype=jnp.dtype(logits_dtype))

    def f(hidden: jax.Array, head: jax.Array, y: jax.Array) -> Any:
        return stats_matmul.token_stats(
            Problem(Linear(hidden, HeadArrays(head)), y, t, call=call), tiles=tiles(*shape, changes)
        )

    return f


def peers(shape: tuple[int, int, int]) -> dict[str, Callable[..., Any]]:
    """cuBLAS alone, jax's Hopper matmul (its operand [H, V] is made outside), and the library as it is."""
    import logitless

    def cublas(hidden: jax.Array, head: jax.Array, y: jax.Array) -> Any:
        return jax.lax.dot_general(hidden, head, (((1,), (1,)), ((), ())))

    def current(logits_dtype: str) -> Callable[..., Any]:
        def f(hidden: jax.Array, head: jax.Array, y: jax.Array) -> Any:
            return logitless.linear_logprobs(
                hidden,
                logitless.Head(head, layout="vh"),
                y,
                options=logitless.Options(backend="mosaic_gpu", logits_dtype=logits_dtype),
            )

        return f

    return {
        "cuBLAS matmul alone (bf16 logits)": cublas,
        "linear_logprobs today, bf16": current("bfloat16"),
        "linear_logprobs today, f32": current("float32"),
    }


def jax_matmul(shape: tuple[int, int, int]) -> dict[str, float]:
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as theirs

    hidden, head, _ = arrays(*shape)
    head_t = jax.jit(jnp.transpose)(head)
    del head
    config = theirs.TuningConfig(
        tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4, grid_minor_dim=theirs.MatmulDimension.M,
        grid_tile_width=8, wg_dimension=theirs.MatmulDimension.M,
    )  # fmt: skip
    return timed(lambda a, b: theirs.matmul(a, b, None, config), hidden, head_t)


def tell(out: dict[str, Any]) -> None:
    """What is known so far, for the process that waits."""
    print("RESULT " + json.dumps(out), flush=True)


def worker(job: dict[str, Any]) -> dict[str, Any]:
    """One process: checks, then times, of one variant; or the peers at a shape."""
    if job["kind"] == "peers":
        shape, out = (job["shape"][0], job["shape"][1], job["shape"][2]), {}
        args = arrays(*shape)
        for name, f in peers(shape).items():
            try:
                out[name] = timed(f, *args)
            except Exception as e:
                out[name] = dict(error=f"{type(e).__name__}: {e}"[:300])
            tell(out)
        del args
        try:
            out["jax's Hopper matmul alone (bf16 logits)"] = jax_matmul(shape)
        except Exception as e:
            out["jax's Hopper matmul alone (bf16 logits)"] = dict(error=f"{type(e).__name__}: {e}"[:300])
        return out
    changes, out = VARIANTS[job["name"]], dict(errors={}, times={})
    for name in job["checks"]:
        try:
            out["errors"][name] = error(name, changes)
        except Exception as e:
            out["errors"][name] = dict(error=f"{type(e).__name__}: {e}"[:300])
        tell(out)
    for shape in job["shapes"]:
        args, sizes = arrays(*shape), (shape[0], shape[1], shape[2])
        cases = {"f32": ours(changes, sizes)}
        if job["name"] == "rule":
            cases["bf16"] = ours(changes, sizes, "bfloat16")
            cases["f32, temperature"] = ours(changes, sizes, temperature=0.7)
            if sizes[2] == 256000:
                cases["f32, softcap"] = ours(changes, sizes, softcap=30.0)
        for case, f in cases.items():
            key = f"{sizes[0]},{sizes[1]},{sizes[2]} {case}"
            try:
                out["times"][key] = timed(f, *args)
            except Exception as e:
                out["times"][key] = dict(error=f"{type(e).__name__}: {e}"[:300])
            tell(out)
        del args
    return out


def launch(job: dict[str, Any], seconds: float) -> dict[str, Any]:
    """``worker(job)`` in a process that is given ``seconds``."""
    started = time.monotonic()
    command = [sys.executable, __file__, "--worker", json.dumps(job)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        text, why = done.stdout, done.stderr[-1500:] if done.returncode else ""
    except subprocess.TimeoutExpired as e:
        text, why = (e.stdout or b"").decode(), f"no answer within {seconds:.0f} s"
    lines = [x for x in text.splitlines() if x.startswith("RESULT ")]
    out: dict[str, Any] = json.loads(lines[-1][7:]) if lines else {}
    if why or not lines:
        out["failed"] = why or "no result"
    out["seconds"] = round(time.monotonic() - started, 1)
    return out


def table(results: dict[str, Any]) -> None:
    for name, r in results.items():
        print(f"\n{name}  ({r.get('seconds')} s)")
        if "failed" in r:
            print("  FAILED", r["failed"].strip().splitlines()[-1:])
        for check, e in r.get("errors", {}).items():
            what = e.get("error") or "  ".join(f"{k} {v:.1e}" for k, v in e.items())
            print(f"  check {check:24s} {what}")
        for key, t in (r["times"] if "times" in r else {k: v for k, v in r.items() if isinstance(v, dict)}).items():
            what = t.get("error") or f"{t['ms']:8.3f} ms  (min {t['min_ms']:.3f})  {t['temporaries_mib']:8.1f} MiB"
            print(f"  {key:42s} {what}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--shape", action="append")
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--budget", type=float, default=140.0, help="seconds; what does not fit is left out")
    parser.add_argument("--worker")
    a = parser.parse_args()
    if a.worker:
        try:
            tell(worker(json.loads(a.worker)))
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        return
    started = time.monotonic()
    shapes = [[int(x) for x in s.split(",")] for s in (a.shape or SHAPES)]
    jobs: dict[str, dict[str, Any]] = {}
    for name in VARIANTS:
        where = shapes if name in FIRST else shapes[:1]
        jobs[name] = dict(kind="ours", name=name, shapes=where, checks=list(CHECKS) if name == "rule" else ["ragged"])
    jobs = {k: j for k, j in jobs.items() if a.only in k}
    first = [("peers " + ",".join(map(str, shapes[0])), dict(kind="peers", shape=shapes[0]))]
    rest = [("peers " + ",".join(map(str, s)), dict(kind="peers", shape=s)) for s in shapes[1:]]
    listed = list(jobs.items())
    queue = listed[:1] + first + listed[1:3] + rest + listed[3:]
    results: dict[str, Any] = {}
    for name, job in queue:
        left = a.budget - (time.monotonic() - started)
        results[name] = (
            launch(job, min(60.0 if name == "rule" else 30.0, left)) if left > 8 else dict(failed="left out: no time")
        )
        table({name: results[name]})
        if a.out:
            with open(a.out, "w") as f:
                json.dump(results, f, indent=1)


if __name__ == "__main__":
    main()
