"""The default call against strong dense on one H200: live tokens, sequence-level objectives, sparse backward.

    python benchmarks/h200_live.py --out benchmarks/results/h200_live.json

One process. For each seed of the data all arms run in turn, back to back (one wait at the end of several calls), twice;
an arm's number is the median over the seeds of its faster turn, as milliseconds and in units of strong dense with
bfloat16 logits. The live arms are one program with other masks: ``above_share`` is what each takes above its share of
the time of all tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import logitless
from logitless.lab.bench import realistic
from logitless.lab.bench.case_arrays import policy_statistics
from logitless.lab.tools import baselines, shapes, timing

LIVE = (1 / 4, 2108 / 8192, 0.4, 4000 / 8192, 0.6, 5000 / 8192, 0.75, 1 / 16, 1 / 8, 7 / 8)
"""Shares of the tokens that are live; 2,108 and 4,000 of 8,192 are just beyond one chunk and just below two."""
GSPO = logitless.Objective(level="sequence", aggregation="grpo")
CLIP = logitless.Objective(aggregation="dapo")


def call(objective: Any, **options: Any) -> Callable[..., Any]:
    """Loss and gradients by the library."""

    def run(h: Any, w: Any, rest: Any) -> Any:
        def loss(h: Any, w: Any) -> Any:
            given = dict(objective=objective, options=logitless.Options(**options), **rest)
            return logitless.linear_grpo_loss(h, w, **given)[0]

        return jax.value_and_grad(loss, (0, 1))(h, w)

    return run


def dense(dtype: str) -> Callable[..., Any]:
    """Loss and gradients by the strongest dense form."""

    def run(h: Any, w: Any, rest: Any) -> Any:
        def loss(h: Any, w: Any) -> Any:
            return baselines.head_loss("strong", h, w, objective=CLIP, logits_dtype=dtype, **rest)

        return jax.value_and_grad(loss, (0, 1))(h, w)

    return run


def programs(budget: int) -> dict[str, Callable[..., Any]]:
    """By the name of an arm; ``budget`` bytes hold the logits of all tokens and their dlogits, as strong dense does."""
    return {
        "strong": dense("bfloat16"),
        "strong/f32": dense("float32"),
        "default": call(CLIP),
        "default, GSPO": call(GSPO),
        "default, GSPO, with memory": call(GSPO, memory_budget=budget),
        "sparse": call(CLIP, sparse_backward="auto"),
        "sparse, GSPO": call(GSPO, sparse_backward="auto"),
    }


def host_data(kind: str, n: int, width: int, vocab: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states and a head: logits of a spread of 3 (``flat``), or of a trained policy's kind."""
    if kind == "flat":
        made = shapes.host_arrays("head", n, width, vocab, jnp.bfloat16, np.random.default_rng(seed), 1)
        return made[0].reshape(n, width), made[1]
    return realistic.realistic_head(n, width, vocab, seed, jnp.bfloat16, realistic.POLICIES[kind])


def on_device(kind: str, made: tuple[np.ndarray, np.ndarray], rows: int, seed: int) -> tuple[Any, Any, dict[str, Any]]:
    """Arrays of a call in which every token is live; targets and old log-probabilities are the policy's own."""
    (n, width), rng = made[0].shape, np.random.default_rng(seed)
    h, w = (jax.device_put(x) for x in made)
    if kind == "flat":
        y = jnp.asarray(rng.integers(0, len(w), n, dtype=np.int32))
    else:
        y = realistic.sample_targets(h, w, seed, chunk=min(n, 256))
    old = policy_statistics((h, w), y, chunk=256)[0] + 0.05 * rng.standard_normal(n).astype(np.float32)
    shape = rows, n // rows
    rest = dict(
        targets=y.reshape(shape),
        mask=jnp.ones(shape, bool),
        advantages=jnp.asarray(rng.standard_normal(rows), jnp.float32),
        old_logp=jnp.asarray(old.reshape(shape)),
    )
    return h.reshape(*shape, width), w, rest


def with_live(rest: dict[str, Any], share: float, seed: int) -> dict[str, Any]:
    """The batch with exactly this share of its tokens live, at random places."""
    n = rest["targets"].size
    mask = np.zeros(n, bool)
    mask[np.random.default_rng(seed).permutation(n)[: round(share * n)]] = True
    return dict(rest, mask=jnp.asarray(mask.reshape(rest["targets"].shape)))


ARMS = {
    "flat": ("strong", "strong/f32", "default", "default, GSPO", "default, GSPO, with memory", "sparse"),
    "on_policy": ("strong", "default", "sparse", "sparse, GSPO"),
    "realistic": ("strong", "sparse"),
}


def measured(f: Any, args: Any, repeats: int) -> float:
    jax.block_until_ready(f(*args))
    return timing.back_to_back(f, *args, repeats=repeats)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--tokens", type=int, default=8192)
    cli.add_argument("--hidden", type=int, default=4096)
    cli.add_argument("--vocab", type=int, default=151936)
    cli.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    cli.add_argument("--repeats", type=int, default=4)
    cli.add_argument("--wait-for", help="a file that is there when the device is free to be timed")
    cli.add_argument("--only", nargs="+", help="some of the programs")
    cli.add_argument("--kinds", nargs="+", default=list(ARMS))
    cli.add_argument("--out", default="")
    c = cli.parse_args()
    sizes, rows, start = (c.tokens, c.hidden, c.vocab), 8, time.perf_counter()

    def say(*words: Any) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s]", *words, flush=True)

    with ThreadPoolExecutor(6) as pool:
        made = {(k, s): pool.submit(host_data, k, *sizes, s) for s in c.seeds for k in c.kinds}
        some = with_live(on_device("flat", host_data("flat", 64, c.hidden, c.vocab, 0), rows, 0)[2], 1.0, 0)
        like = jax.ShapeDtypeStruct((rows, c.tokens // rows, c.hidden), jnp.bfloat16)
        head = jax.ShapeDtypeStruct((c.vocab, c.hidden), jnp.bfloat16)
        shape = (rows, c.tokens // rows)
        rest = {k: jax.ShapeDtypeStruct(shape if v.ndim == 2 else v.shape, v.dtype) for k, v in some.items()}
        compiled: dict[str, Any] = {}
        first: dict[str, Any] = {}
        for name, f in programs(round(1.06 * c.tokens * c.vocab * 6)).items():
            if c.only and name not in c.only:
                continue
            try:
                compiled[name], first[name] = timing.compile_in_steps(jax.jit(f), like, head, rest)
                first[name]["temporaries"] = timing.compiled_memory(compiled[name])["temporaries"]
                say(name, first[name])
            except Exception as error:  # the other arms count
                say(name, "does not compile:", repr(error)[:400])
        record: dict[str, Any] = dict(
            kind="h200_live", **timing.environment(), shape=sizes, seeds=c.seeds, compile=first, ms={}
        )
        while c.wait_for and not Path(c.wait_for).exists():
            time.sleep(0.5)
        say("timing")
        for seed in c.seeds:
            for kind in c.kinds:
                h, w, batch = on_device(kind, made.pop((kind, seed)).result(), rows, seed)
                arms = {a: (compiled[a], (h, w, batch)) for a in ARMS[kind] if a in compiled}
                if kind == "flat" and "default" in compiled:
                    live = {f"default, {round(s * c.tokens)} live": (compiled["default"], s) for s in LIVE}
                    arms |= {k: (f, (h, w, with_live(batch, s, seed))) for k, (f, s) in live.items()}
                turns = [{k: measured(f, args, c.repeats) for k, (f, args) in arms.items()} for _ in range(2)]
                for k in arms:
                    record["ms"].setdefault(f"{kind}: {k}", []).append(round(min(t[k] for t in turns), 4))
                if seed == c.seeds[0] and jax.default_backend() == "gpu":
                    record["kernels"] = {
                        k: timing.profile(f, *a, repeats=2).get("kernels") for k, (f, a) in arms.items()
                    }
                say(seed, kind, {k: v[-1] for k, v in record["ms"].items() if k.startswith(kind)})
                del h, w, batch, arms
                if c.out:
                    finish(record, c)


def finish(record: dict[str, Any], c: Any) -> None:
    """Writes the record with the ratios so far."""
    ms = record["ms"]
    record["of_strong"] = {
        k: [round(a / b, 4) for a, b in zip(v, ms[f"{k.split(':')[0]}: strong"], strict=False)]
        for k, v in ms.items()
        if f"{k.split(':')[0]}: strong" in ms
    }
    shares = {f"flat: default, {round(s * c.tokens)} live": round(s * c.tokens) / c.tokens for s in LIVE}
    record["above_share"] = {
        k: round(statistics.median(a / b for a, b in zip(ms[k], ms["flat: default"], strict=False)) - share, 4)
        for k, share in shares.items()
        if k in ms
    }
    with open(c.out, "w") as file:
        json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
