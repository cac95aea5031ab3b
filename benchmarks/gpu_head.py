"""The fused head on one GPU: check, then time, against the naive and the strong dense baselines, in one run.

    python benchmarks/gpu_head.py --out results.json [--shape 8192,4096,151936]... [--only substring]

Inputs are made on the host. Times are device times (CUPTI), medians; memory is the compiler's. The exit code is 1 if
one of the project's bars is missed.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import logitless
from logitless import Objective, oracle
from logitless.tools import baselines, timing

GSPO = Objective(level="sequence", eps_low=3e-4, eps_high=4e-4)
CLIP = Objective(aggregation="dapo")
ROWS = 8
DTYPES = {"bf16": "bfloat16", "f32": "float32"}
SHAPES = ["8192,4096,151936", "16384,1536,151936", "8192,2304,256000"]


def token_arrays(tokens: int, vocab: int, *, live: float = 1.0, moving: float = 1.0, seed: int = 0) -> dict:
    """Targets, mask and loss inputs ``[8, tokens / 8]``: ``live`` of the tokens unmasked, ``moving`` with advantage."""
    rng = np.random.default_rng(seed)
    shape = (ROWS, tokens // ROWS)
    advantages = rng.standard_normal(shape, np.float32)
    advantages[rng.random(shape) >= moving] = 0.0
    return dict(
        targets=rng.integers(0, vocab, shape, dtype=np.int32),
        advantages=advantages,
        mask=rng.random(shape) < live,
        old_logp=(-12.0 + 0.3 * rng.standard_normal(shape)).astype(np.float32),
    )


def head_arrays(tokens: int, hidden: int, vocab: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states and a head whose logits have a spread of about 3, bfloat16, made on the host."""
    rng = np.random.default_rng(seed)
    head = np.empty((vocab, hidden), jnp.bfloat16)
    scale = np.float32(3.0 / hidden**0.5)
    starts = range(0, vocab, 4096)

    def fill(job: tuple[int, np.random.Generator]) -> None:  # in slices: the host need not hold it all in float32
        i, own = job
        part = own.standard_normal((min(4096, vocab - i), hidden), np.float32)
        head[i : i + 4096] = (part * scale).astype(jnp.bfloat16)

    with ThreadPoolExecutor() as pool:
        list(pool.map(fill, zip(starts, rng.spawn(len(starts)), strict=True)))
    return rng.standard_normal((ROWS, tokens // ROWS, hidden), np.float32).astype(jnp.bfloat16), head


def ours(objective: Objective, wrt: tuple[int, ...] | None, **options: Any) -> Callable[..., Any]:
    def loss(h: jax.Array, w: jax.Array, rest: dict) -> Any:
        return logitless.linear_grpo_loss(h, w, objective=objective, **rest, **options)

    return jax.jit(loss if wrt is None else jax.value_and_grad(loss, argnums=wrt, has_aux=True))


def logprobs(**options: Any) -> Callable[..., Any]:
    """Log-probabilities of an old or reference policy: no gradient, no loss."""

    def forward(h: jax.Array, w: jax.Array, rest: dict) -> Any:
        return logitless.linear_logprobs(h, w, rest["targets"], mask=rest["mask"], **options)

    return jax.jit(forward)


def theirs(kind: str, objective: Objective, wrt: tuple[int, ...] | None, logits_dtype: str) -> Callable[..., Any]:
    def loss(h: jax.Array, w: jax.Array, rest: dict) -> Any:
        return baselines.head_loss(kind, h, w, objective=objective, logits_dtype=logits_dtype, **rest)

    return jax.jit(loss if wrt is None else jax.value_and_grad(loss, argnums=wrt))


BOTH, HIDDEN = (0, 1), (0,)


def cases(backend: str | None) -> dict[str, tuple[Callable[..., Any], dict]]:
    """name -> (jitted function, batch options)."""
    out: dict[str, tuple[Callable[..., Any], dict]] = {}
    for short, dtype in DTYPES.items():
        options = dict(logits_dtype=dtype, head_grad_dtype="param", backend=backend)
        summed = dict(options, head_grad_dtype="float32")
        out[f"naive/{short}"] = theirs("naive", CLIP, BOTH, dtype), {}
        out[f"strong/{short}"] = theirs("strong", CLIP, BOTH, dtype), {}
        out[f"strong_forward/{short}"] = theirs("strong", CLIP, None, dtype), {}
        out[f"ours/{short}/dw_float32"] = ours(CLIP, BOTH, **summed), {}
        out[f"ours_forward/{short}"] = ours(CLIP, None, **options), {}
        out[f"ours_logprobs/{short}"] = logprobs(**options), {}
        out[f"ours_gspo/{short}"] = ours(GSPO, BOTH, **options), {}
        if dtype == "bfloat16":
            out["checkpointed/bf16"] = theirs("checkpointed", CLIP, BOTH, dtype), {}
            out["strong_frozen/bf16"] = theirs("strong", CLIP, HIDDEN, dtype), {}
            out["ours/bf16/dw_param"] = ours(CLIP, BOTH, **options), {}
            out["ours_frozen/bf16"] = ours(CLIP, HIDDEN, **options), {}
            out["ours_live50/bf16"] = ours(CLIP, BOTH, **options), dict(live=0.5)
            out["ours_live25/bf16"] = ours(CLIP, BOTH, **options), dict(live=0.25)
            out["ours_moving50/bf16"] = ours(CLIP, BOTH, **options), dict(moving=0.5)
    return out


def check(backend: str | None) -> dict[str, float]:
    """Relative Frobenius errors against float64 at a small shape, of the library and of the strong baseline."""
    hidden, head = head_arrays(64, 256, 1024)
    rest = token_arrays(64, 1024, live=0.8)
    rest["old_logp"] = np.full_like(rest["old_logp"], -8.0)
    _, dh, dw, _ = oracle.linear_grpo_loss(hidden, head, objective=CLIP, head_layout="vh", **rest)
    errors = {}

    def error(name: str, grads: Any, truths: Any = (dh, dw)) -> None:
        for label, g, truth in zip(("dh", "dw"), grads, truths, strict=True):
            g = np.asarray(g, np.float64)
            errors[f"{name}/{label}"] = float(np.linalg.norm(g - truth) / np.linalg.norm(truth))

    h, w = jnp.asarray(hidden), jnp.asarray(head)
    for short, dtype in DTYPES.items():
        error(f"strong/{short}", theirs("strong", CLIP, BOTH, dtype)(h, w, rest)[1])
        for grad in ("param", "float32"):
            f = ours(CLIP, BOTH, logits_dtype=dtype, head_grad_dtype=grad, backend=backend, chunk_size=24)
            error(f"ours/{short}/dw_{grad}", f(h, w, rest)[1])
        f = ours(GSPO, BOTH, logits_dtype=dtype, backend=backend, chunk_size=24)
        _, gspo_dh, gspo_dw, _ = oracle.linear_grpo_loss(hidden, head, objective=GSPO, head_layout="vh", **rest)
        error(f"ours_gspo/{short}", f(h, w, rest)[1], (gspo_dh, gspo_dw))
        truth = oracle.linear_token_stats(hidden.reshape(64, -1), head, rest["targets"].reshape(-1), head_layout="vh")
        for name in ("logp", "entropy"):
            got = np.asarray(getattr(logprobs(logits_dtype=dtype, backend=backend)(h, w, rest), name), np.float64)
            want = np.where(rest["mask"], getattr(truth, name).reshape(rest["mask"].shape), 0.0)
            errors[f"ours_logprobs/{short}/{name}"] = float(np.abs(got - want).max())
    return errors


def gates(cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The project's bars at a shape: each a ratio of two cases and its limit."""

    def ratio(what: str, a: str, b: str, limit: float) -> dict[str, Any] | None:
        try:
            value = cases[a][what] / cases[b][what]
        except KeyError:
            return None
        return dict(value=round(value, 4), limit=limit, ok=value <= limit)

    ms, temp = "median_ms", "temporaries"
    table = {
        "bf16, dW in param dtype: time / strong": (ms, "ours/bf16/dw_param", "strong/bf16", 1.00),
        "bf16, dW in param dtype: time / naive": (ms, "ours/bf16/dw_param", "naive/bf16", 0.95),
        "bf16, dW in param dtype: memory / strong": (temp, "ours/bf16/dw_param", "strong/bf16", 0.16),
        "bf16, dW in float32: time / strong": (ms, "ours/bf16/dw_float32", "strong/bf16", 1.04),
        "bf16, dW in float32: memory / strong": (temp, "ours/bf16/dw_float32", "strong/bf16", 0.53),
        "f32 logits: time / strong": (ms, "ours/f32/dw_float32", "strong/f32", 1.03),
        "f32 logits: time / naive": (ms, "ours/f32/dw_float32", "naive/f32", 0.55),
        "f32 logits: memory / strong": (temp, "ours/f32/dw_float32", "strong/f32", 0.43),
        "50 % live: time / strong": (ms, "ours_live50/bf16", "strong/bf16", 0.55),
        "25 % live: time / strong": (ms, "ours_live25/bf16", "strong/bf16", 0.29),
        "half zero cotangents: time / without": (ms, "ours_moving50/bf16", "ours/bf16/dw_param", 0.72),
        "frozen head: time / strong frozen": (ms, "ours_frozen/bf16", "strong_frozen/bf16", 1.00),
        "frozen head: memory / strong frozen": (temp, "ours_frozen/bf16", "strong_frozen/bf16", 0.16),
        "GSPO: time / strong": (ms, "ours_gspo/bf16", "strong/bf16", 1.40),
        "GSPO: memory / strong": (temp, "ours_gspo/bf16", "strong/bf16", 0.40),
        "forward only: time / strong": (ms, "ours_forward/bf16", "strong_forward/bf16", 1.00),
        "forward only: memory / strong": (temp, "ours_forward/bf16", "strong_forward/bf16", 0.30),
        "forward only, f32 logits: time / strong": (ms, "ours_logprobs/f32", "strong_forward/f32", 1.00),
        "forward only, f32 logits: memory / strong": (temp, "ours_logprobs/f32", "strong_forward/f32", 0.30),
    }
    return {name: g for name, row in table.items() if (g := ratio(*row)) is not None}


def run_shape(shape: str, only: list[str], backend: str | None, repeats: int) -> dict[str, Any]:
    """Every case at one shape."""
    tokens, hidden, vocab = (int(x) for x in shape.split(","))
    h, w = (jnp.asarray(x) for x in head_arrays(tokens, hidden, vocab))
    rows: dict[str, Any] = {}
    for name, (f, options) in cases(backend).items():
        if only and not any(s in name for s in only):
            continue
        rest = {k: jnp.asarray(v) for k, v in token_arrays(tokens, vocab, **options).items()}
        try:
            row: dict[str, Any] = dict(timing.compiled_memory(f.lower(h, w, rest).compile()))
            row.update(timing.summary(timing.device_times(f, h, w, rest, repeats=repeats)))
            print(f"{name:28s} {row['median_ms']:9.3f} ms  temp {row['temporaries'] / 2**20:9.0f} MiB", flush=True)
        except Exception as error:
            row = dict(error=f"{type(error).__name__}: {error}"[:2000])
            traceback.print_exc()
        rows[name] = row
    return rows


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", required=True)
    p.add_argument("--shape", action="append", default=[], help="tokens,hidden,vocab; may be given several times")
    p.add_argument("--only", default="", help="comma-separated parts of case names")
    p.add_argument("--backend", default=None)
    p.add_argument("--repeats", type=int, default=8)
    p.add_argument("--skip-check", action="store_true", help="do not compare with float64 first")
    args = p.parse_args()
    errors = {} if args.skip_check else check(args.backend)
    result: dict[str, Any] = dict(environment=timing.environment(), errors=errors, shapes={})
    for name, value in result["errors"].items():
        print(f"error {name:32s} {value:.2e}", flush=True)
    missed = 0
    for shape in args.shape or SHAPES:
        print(f"--- {shape}", flush=True)
        rows = run_shape(shape, [s for s in args.only.split(",") if s], args.backend, args.repeats)
        result["shapes"][shape] = dict(cases=rows, gates=gates(rows))
        for name, gate in result["shapes"][shape]["gates"].items():
            missed += not gate["ok"]
            print(f"{'PASS' if gate['ok'] else 'FAIL'} {name:44s} {gate['value']:.3f} (<= {gate['limit']})", flush=True)
        with open(args.out, "w") as file:
            json.dump(result, file, indent=1)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
