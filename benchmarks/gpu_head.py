"""The fused head on one GPU: check, then time, against the naive and the strong dense baselines, in one run.

    python benchmarks/gpu_head.py --out results.json [--shape 8192,4096,151936] [--only substring]

Inputs are made on the host. Times are device times (CUPTI), medians; memory is the compiler's.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import logitless
from logitless import Objective, oracle
from logitless.bench import baselines, timing

GSPO = Objective(level="sequence", eps_low=3e-4, eps_high=4e-4)
CLIP = Objective(aggregation="dapo")


def host_batch(tokens: int, hidden: int, vocab: int, *, live: float = 1.0, moving: float = 1.0, seed: int = 0) -> dict:
    """Hidden states and a head whose logits have a spread of about 3, as numpy arrays in bfloat16."""
    rng = np.random.default_rng(seed)
    rows = 8
    width = tokens // rows
    advantages = rng.standard_normal((rows, width), np.float32)
    advantages[rng.random((rows, width)) >= moving] = 0.0
    mask = rng.random((rows, width)) < live
    scale = np.float32(3.0 / hidden**0.5)
    head = np.empty((vocab, hidden), jnp.bfloat16)
    for i in range(0, vocab, 16384):  # float32 in slices: the host need not hold it all
        head[i : i + 16384] = (rng.standard_normal((min(16384, vocab - i), hidden), np.float32) * scale).astype(
            jnp.bfloat16
        )
    return dict(
        hidden=rng.standard_normal((rows, width, hidden), np.float32).astype(jnp.bfloat16),
        lm_head=head,
        targets=rng.integers(0, vocab, (rows, width), dtype=np.int32),
        advantages=advantages,
        mask=mask,
        old_logp=(-12.0 + 0.3 * rng.standard_normal((rows, width))).astype(np.float32),
    )


def ours(objective: Objective, wrt: tuple[int, ...] | None, **options: Any) -> Callable[..., Any]:
    def loss(h: jax.Array, w: jax.Array, rest: dict) -> Any:
        return logitless.linear_grpo_loss(h, w, objective=objective, **rest, **options)

    return jax.jit(loss if wrt is None else jax.value_and_grad(loss, argnums=wrt, has_aux=True))


def theirs(kind: str, objective: Objective, wrt: tuple[int, ...] | None, logits_dtype: str) -> Callable[..., Any]:
    def loss(h: jax.Array, w: jax.Array, rest: dict) -> Any:
        return baselines.head_loss(kind, h, w, objective=objective, logits_dtype=logits_dtype, **rest)

    return jax.jit(loss if wrt is None else jax.value_and_grad(loss, argnums=wrt))


BOTH, HIDDEN = (0, 1), (0,)


def cases(backend: str | None) -> dict[str, tuple[Callable[..., Any], dict]]:
    """name -> (jitted function, batch options)."""
    out: dict[str, tuple[Callable[..., Any], dict]] = {}
    for dtype in ("bfloat16", "float32"):
        short = {"bfloat16": "bf16", "float32": "f32"}[dtype]
        out[f"naive/{short}"] = theirs("naive", CLIP, BOTH, dtype), {}
        out[f"checkpointed/{short}"] = theirs("checkpointed", CLIP, BOTH, dtype), {}
        out[f"strong/{short}"] = theirs("strong", CLIP, BOTH, dtype), {}
        out[f"strong_frozen/{short}"] = theirs("strong", CLIP, HIDDEN, dtype), {}
        out[f"strong_forward/{short}"] = theirs("strong", CLIP, None, dtype), {}
        for grad in ("param", "float32"):
            options = dict(logits_dtype=dtype, head_grad_dtype=grad, backend=backend)
            tag = f"{short}/dw_{grad}"
            out[f"ours/{tag}"] = ours(CLIP, BOTH, **options), {}
        options = dict(logits_dtype=dtype, head_grad_dtype="param", backend=backend)
        out[f"ours_frozen/{short}"] = ours(CLIP, HIDDEN, **options), {}
        out[f"ours_forward/{short}"] = ours(CLIP, None, **options), {}
        out[f"ours_gspo/{short}"] = ours(GSPO, BOTH, **options), {}
        if dtype == "bfloat16":
            out["ours_live50/bf16"] = ours(CLIP, BOTH, **options), dict(live=0.5)
            out["ours_live25/bf16"] = ours(CLIP, BOTH, **options), dict(live=0.25)
            out["ours_moving50/bf16"] = ours(CLIP, BOTH, **options), dict(moving=0.5)
    return out


def check(backend: str | None) -> dict[str, float]:
    """Relative Frobenius errors against float64 at a small shape, of the library and of the strong baseline."""
    b = host_batch(64, 256, 1024, live=0.8)
    rest = {k: v for k, v in b.items() if k not in ("hidden", "lm_head")}
    _, dh, dw, _ = oracle.linear_grpo_loss(b["hidden"], b["lm_head"], objective=CLIP, head_layout="vh", **rest)
    errors = {}

    def error(name: str, grads: Any) -> None:
        for label, g, truth in zip(("dh", "dw"), grads, (dh, dw), strict=True):
            g = np.asarray(g, np.float64)
            errors[f"{name}/{label}"] = float(np.linalg.norm(g - truth) / np.linalg.norm(truth))

    h, w = jnp.asarray(b["hidden"]), jnp.asarray(b["lm_head"])
    for dtype in ("bfloat16", "float32"):
        error(f"strong/{dtype}", theirs("strong", CLIP, BOTH, dtype)(h, w, rest)[1])
        for grad in ("param", "float32"):
            f = ours(CLIP, BOTH, logits_dtype=dtype, head_grad_dtype=grad, backend=backend, chunk_size=24)
            error(f"ours/{dtype}/dw_{grad}", f(h, w, rest)[1])
    return errors


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", required=True)
    p.add_argument("--shape", default="8192,4096,151936")
    p.add_argument("--only", default="")
    p.add_argument("--backend", default=None)
    p.add_argument("--repeats", type=int, default=8)
    args = p.parse_args()
    tokens, hidden, vocab = (int(x) for x in args.shape.split(","))
    result: dict[str, Any] = dict(
        environment=timing.environment(), shape=dict(tokens=tokens, hidden=hidden, vocab=vocab), cases={}
    )
    result["errors"] = check(args.backend)
    for k, v in result["errors"].items():
        print(f"error {k:32s} {v:.2e}", flush=True)
    batches: dict[str, Any] = {}
    for name, (f, batch_options) in cases(args.backend).items():
        if args.only and not any(s in name for s in args.only.split(",")):
            continue
        key = str(batch_options)
        if key not in batches:
            b = host_batch(tokens, hidden, vocab, **batch_options)
            if batches:  # the big arrays are the same
                b["hidden"], b["lm_head"] = next(iter(batches.values()))[:2]
            batches[key] = (
                jnp.asarray(b["hidden"]),
                jnp.asarray(b["lm_head"]),
                {k: jnp.asarray(v) for k, v in b.items() if k not in ("hidden", "lm_head")},
            )
        h, w, rest = batches[key]
        try:
            compiled = f.lower(h, w, rest).compile()
            row = timing.compiled_memory(compiled)
            row.update(timing.summary(timing.device_times(f, h, w, rest, repeats=args.repeats)))
            print(f"{name:28s} {row['median_ms']:9.3f} ms  temp {row['temporaries'] / 2**20:9.0f} MiB", flush=True)
        except Exception as error:
            row = dict(error=f"{type(error).__name__}: {error}"[:2000])
            traceback.print_exc()
        result["cases"][name] = row
        with open(args.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
