"""Ids of each token on one H200: K log-probabilities, the likeliest ids, a softmax over a support.

    python benchmarks/h200_more_ids.py --out benchmarks/results/h200_more_ids.json

One process. For each seed of the data all arms run in turn, back to back (one wait at the end of several calls), twice;
an arm's number is its faster turn. Ratios are of medians over the seeds. ``pieces`` are passes over the logits of one
chunk by themselves. Small shapes are compared with float64 first: the largest error over that of ``log_softmax``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import logitless as L
from logitless import oracle
from logitless.core import id_passes, row_passes
from logitless.core.problem import Call, Given, Problem
from logitless.core.stats import LogitTransform
from logitless.core.top_k import largest, top_of_rows
from logitless.lab.tools import timing

RATIOS = {
    "forward, 64 ids": ("forward", 1.15),
    "forward, 64 ids, bfloat16 logits": ("forward", 1.15),
    "gradients, 64 ids": ("gradients", 1.10),
    "gradients, 64 ids, bfloat16 logits": ("gradients", 1.10),
    "top 64": ("matmul", 1.5),
    "top 64, bfloat16 logits": ("matmul", 1.5),
    "loss, support of 64": ("loss", None),
    "loss, support of 64, chunked": ("loss, chunked", None),
}
"""Arms, what each is compared with, and the bar."""


def arms() -> dict[str, Callable[..., Any]]:
    """By name; each takes ``h, w, y, ids, g``."""

    def logp(**o: Any) -> Callable[..., Any]:
        return lambda h, w, y, ids, g: L.linear_logprobs(h, w, y, options=L.Options(**o)).logp

    def selected(h: Array, w: Array, y: Array, ids: Array, o: dict[str, Any]) -> tuple[Array, ...]:
        s = L.linear_logprobs(h, w, y, ids=ids, options=L.Options(**o))
        assert s.selected is not None
        return s.selected.logp, s.lse, s.selected.mass

    def of_ids(**o: Any) -> Callable[..., Any]:
        return lambda h, w, y, ids, g: selected(h, w, y, ids, o)

    def gradients(f: Callable[..., Any]) -> Callable[..., Any]:
        def run(h: Array, w: Array, y: Array, ids: Array, g: Array) -> Any:
            def total(h: Array, w: Array) -> Array:
                out = f(h, w, y, ids, g)
                out = (out,) if isinstance(out, Array) else out
                return jnp.sum(out[0] * (g if out[0].ndim == 2 else g[:, 0]))

            return jax.value_and_grad(total, (0, 1))(h, w)

        return run

    def loss(supported: bool, **o: Any) -> Callable[..., Any]:
        def run(h: Array, w: Array, y: Array, ids: Array, g: Array) -> Any:
            support = ids.at[:, 0].set(y)[None] if supported else None

            def total(h: Array, w: Array) -> Array:
                given = dict(advantages=g[None, :, 0], support=support, options=L.Options(**o))
                return L.linear_grpo_loss(h[None], w, y[None], **given)[0]

            return jax.value_and_grad(total, (0, 1))(h, w)

        return run

    bf16 = dict(logits_dtype="bfloat16")
    return {
        "matmul": lambda h, w, y, ids, g: h @ w.T,
        "forward": logp(),
        "forward, chunked": logp(backend="chunked"),
        "forward, 64 ids": of_ids(),
        "forward, 64 ids, bfloat16 logits": of_ids(**bf16),
        "gradients": gradients(logp()),
        "gradients, chunked": gradients(logp(backend="chunked")),
        "gradients, 64 ids": gradients(of_ids()),
        "gradients, 64 ids, bfloat16 logits": gradients(of_ids(**bf16)),
        "top 64": lambda h, w, y, ids, g: L.linear_top_k(h, w, 64),
        "top 64, bfloat16 logits": lambda h, w, y, ids, g: L.linear_top_k(h, w, 64, options=L.Options(**bf16)),
        "top 256": lambda h, w, y, ids, g: L.linear_top_k(h, w, 256),
        "loss": loss(False),
        "loss, chunked": loss(False, backend="chunked"),
        "loss, support of 64": loss(True),
        "loss, support of 64, chunked": loss(True, backend="chunked"),
    }


def pieces() -> dict[str, Callable[..., Any]]:
    """Passes over the logits ``x [C, V]`` of one chunk; ``w`` and ``h`` for the ids' logits without them."""

    def rows(x: Array, y: Array, ids: Array | None) -> Problem[Given]:
        return Problem(Given(x), y, LogitTransform(), ids=ids, call=Call("piece", x.shape[1]))

    def of_rows(h: Array, w: Array, ids: Array) -> Array:
        return jnp.einsum("ch,ckh->ck", h, w[ids], preferred_element_type=jnp.float32)

    return {
        "statistics": lambda x, y, ids, h, w: row_passes.statistics(x, rows(x, y, None)),
        "statistics and 64 ids": lambda x, y, ids, h, w: id_passes.statistics(x, rows(x, y, ids)),
        "top 64 of a chunk": lambda x, y, ids, h, w: top_of_rows(x, rows(x, y, None), 64),
        "largest 64": lambda x, y, ids, h, w: largest(x, 64),
        "maxima of 16": lambda x, y, ids, h, w: jnp.max(x.reshape(x.shape[0], -1, 16), axis=2),
        "lax.top_k of 1024": lambda x, y, ids, h, w: lax.top_k(x[:, :1024], 64),
        "lax.top_k of 9496": lambda x, y, ids, h, w: lax.top_k(x[:, :9496], 64),
        "row_ids": lambda x, y, ids, h, w: id_passes.row_ids(ids, x.shape[1]).once,
        "rows of w": lambda x, y, ids, h, w: of_rows(h, w, ids),
    }


def correctness(n: int = 96, width: int = 128, vocab: int = 5003) -> dict[str, float]:
    """Largest errors against float64, each over that of ``log_softmax`` on the same float32 inputs."""
    rng = np.random.default_rng(0)
    h = (4 * rng.standard_normal((n, width)) / np.sqrt(width)).astype(np.float32)
    w, y = rng.standard_normal((vocab, width)).astype(np.float32), rng.integers(0, vocab, n).astype(np.int32)
    ids = np.stack([rng.permutation(vocab)[:64] for _ in y]).astype(np.int32)
    ids[::2, 0] = np.where((ids[::2] == y[::2, None]).any(1), ids[::2, 0], y[::2])
    ids[:, 50:] = np.where(rng.random((n, 14)) < 0.5, -1, ids[:, 50:])
    support = np.concatenate([y[:, None], np.where(ids == y[:, None], -1, ids)], axis=1)
    g = rng.standard_normal(ids.shape).astype(np.float32)
    rows = oracle.linear_rows(h, w)

    def plain(h: Array, w: Array) -> Array:
        x = jnp.dot(h, w.T, precision=lax.Precision.HIGHEST)
        at = jnp.take_along_axis(jax.nn.log_softmax(x), jnp.maximum(ids, 0), axis=1)
        return jnp.where(ids < 0, 0.0, at)

    def pulled(f: Callable[..., Array], g: Any) -> tuple[Any, ...]:
        out, back = jax.vjp(jax.jit(f), jnp.asarray(h), jnp.asarray(w))
        return out, *back(jnp.asarray(g))

    def error(got: Any, want: Any) -> float:
        return float(np.abs(np.asarray(got, np.float64) - want).max())

    truth, made = oracle.selected_logprobs(rows, ids).logp, oracle.selected_logprobs_vjp(rows, ids, g)
    base = pulled(plain, g)
    found: dict[str, float] = {}
    ours = pulled(lambda h, w: L.linear_logprobs(h, w, y, ids=ids).selected.logp, g)  # type: ignore[union-attr]
    for name, a, b, c in zip(("logp", "dH", "dW"), ours, base, (truth, made.inputs, made.head), strict=True):
        found[f"ids, {name}"] = error(a, c) / error(b, c)
    own = oracle.support_token_stats_vjp(rows, y, support, g[:, 0])
    ours = pulled(lambda h, w: L.linear_logprobs(h, w, y, support=support).logp, g[:, 0])
    wanted = (oracle.support_token_stats(rows, y, support).logp, own.inputs, own.head)
    for name, a, c in zip(("logp", "dH", "dW"), ours, wanted, strict=True):
        found[f"support, {name}, absolute"] = error(a, c)
    top, want = L.linear_top_k(h, w, 64), oracle.top_k(rows, 64)
    found["top 64, logp, absolute"] = error(top.logp, want.logp)
    found["top 64, log_rest, absolute"] = error(top.log_rest, want.log_rest)
    found["top 64, other ids"] = float((np.asarray(top.ids) != want.ids).sum())
    return found


def data(c: Any, seed: int) -> tuple[Array, ...]:
    """Hidden states, head, targets, ids (half of them likely ones) and cotangents."""
    keys = jax.random.split(jax.random.key(seed), 5)
    h = jax.random.normal(keys[0], (c.tokens, c.hidden), jnp.bfloat16)
    w = jax.random.normal(keys[1], (c.vocab, c.hidden), jnp.bfloat16) * (3 / c.hidden**0.5)
    ids = jax.random.randint(keys[2], (c.tokens, 64), 0, c.vocab, jnp.int32)
    ids = ids.at[:, :32].set(jax.jit(lambda h, w: L.linear_top_k(h, w, 32).ids)(h, w))
    y = jax.random.randint(keys[3], (c.tokens,), 0, c.vocab, jnp.int32)
    return h, w, y, ids, jax.random.normal(keys[4], (c.tokens, 64))


def measured(f: Any, args: Any, repeats: int) -> float:
    jax.block_until_ready(f(*args))
    return timing.back_to_back(f, *args, repeats=repeats)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__)
    for name, value in dict(tokens=8192, hidden=4096, vocab=151936, chunk=2048, repeats=4).items():
        cli.add_argument(f"--{name}", type=int, default=value)
    cli.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    cli.add_argument("--out", default="")
    c = cli.parse_args()
    start = time.perf_counter()

    def say(*words: Any) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s]", *words, flush=True)

    record: dict[str, Any] = dict(
        kind="h200_more_ids", **timing.environment(), shape=(c.tokens, c.hidden, c.vocab), seeds=c.seeds,
        temporaries={}, ms={}, pieces={}, kernels={},
    )  # fmt: skip

    def finish() -> None:
        median = {k: statistics.median(v) for k, v in record["ms"].items()}
        record["ratios"] = {
            k: dict(of=of, ratio=round(median[k] / median[of], 4), bar=bar)
            for k, (of, bar) in RATIOS.items()
            if k in median and of in median
        }
        if c.out:
            with open(c.out, "w") as file:
                json.dump(record, file, indent=1)

    try:
        record["errors"] = correctness()
    except Exception as error:  # the times count
        record["errors"] = repr(error)[:600]
    say("errors", record["errors"])
    args = data(c, c.seeds[0])
    compiled: dict[str, Any] = {}
    for name, f in arms().items():
        try:
            compiled[name] = jax.jit(f).lower(*args).compile()
            record["temporaries"][name] = timing.compiled_memory(compiled[name])["temporaries"]
            say(name, record["temporaries"][name])
        except Exception as error:  # the other arms count
            say(name, "does not compile:", repr(error)[:400])
    for seed in c.seeds:
        args = data(c, seed)
        turns = [{k: measured(f, args, c.repeats) for k, f in compiled.items()} for _ in range(2)]
        for k in compiled:
            record["ms"].setdefault(k, []).append(round(min(t[k] for t in turns), 4))
        finish()
        say(seed, {k: v[-1] for k, v in record["ms"].items()})
    for name in ("forward, 64 ids", "gradients, 64 ids", "top 64"):
        if name in compiled:
            record["kernels"][name] = timing.profile(compiled[name], *args, repeats=1).get("kernels")
            say(name, record["kernels"][name])
    h, w, y, ids, _ = (x if i == 1 else x[: c.chunk] for i, x in enumerate(args))
    x = jnp.dot(h, w.T, preferred_element_type=jnp.float32)
    for name, f in pieces().items():
        try:
            record["pieces"][name] = round(measured(jax.jit(f), (x, y, ids, h, w), c.repeats), 4)
        except Exception as error:  # the other pieces count
            record["pieces"][name] = repr(error)[:200]
        say(name, record["pieces"][name])
    finish()
    say(json.dumps(record["ratios"], indent=1))


if __name__ == "__main__":
    main()
