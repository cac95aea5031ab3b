"""Ids of each token on one H200: K log-probabilities, the likeliest ids, a softmax over a support.

    python benchmarks/h200_more_ids.py --out benchmarks/results/h200_more_ids.json

One process. For each seed of the data all arms run in turn, back to back (one wait at the end of several calls), twice;
an arm's number is its faster turn. Ratios are of medians over the seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import harness
import logitless as L
from logitless.lab.tools import timing

RATIOS = {
    "forward, 64 ids": ("forward", 1.15),
    "forward, 64 ids, bfloat16 logits": ("forward", 1.15),
    "gradients, 64 ids": ("gradients", 1.10),
    "gradients, 64 ids, bfloat16 logits": ("gradients", 1.10),
    "top 64": ("matmul", 1.5),
    "top 64, bfloat16 logits": ("matmul", 1.5),
    "loss, support of 64": ("loss", None),
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
        "forward, 64 ids": of_ids(),
        "forward, 64 ids, bfloat16 logits": of_ids(**bf16),
        "gradients": gradients(logp()),
        "gradients, 64 ids": gradients(of_ids()),
        "gradients, 64 ids, bfloat16 logits": gradients(of_ids(**bf16)),
        "top 64": lambda h, w, y, ids, g: L.linear_top_k(h, w, 64),
        "top 64, bfloat16 logits": lambda h, w, y, ids, g: L.linear_top_k(h, w, 64, options=L.Options(**bf16)),
        "loss": loss(False),
        "loss, support of 64": loss(True),
    }


def data(c: Any, seed: int) -> tuple[Array, ...]:
    """Hidden states, head, targets, ids (half of them likely ones) and cotangents."""
    keys = jax.random.split(jax.random.key(seed), 5)
    h = jax.random.normal(keys[0], (c.tokens, c.hidden), jnp.bfloat16)
    w = jax.random.normal(keys[1], (c.vocab, c.hidden), jnp.bfloat16) * (3 / c.hidden**0.5)
    ids = jax.random.randint(keys[2], (c.tokens, 64), 0, c.vocab, jnp.int32)
    ids = ids.at[:, :32].set(jax.jit(lambda h, w: L.linear_top_k(h, w, 32).ids)(h, w))
    y = jax.random.randint(keys[3], (c.tokens,), 0, c.vocab, jnp.int32)
    return h, w, y, ids, jax.random.normal(keys[4], (c.tokens, 64))


def main() -> None:
    defaults: dict[str, Any] = dict(tokens=8192, hidden=4096, vocab=151936, repeats=4)
    c = harness.options(__doc__, **defaults, seeds=[11, 12, 13], out="").parse_args()
    shape = c.tokens, c.hidden, c.vocab
    args = data(c, c.seeds[0])
    compiled, found = harness.compiled(arms(), args)
    shape: tuple[int, ...] = (c.tokens, c.hidden, c.vocab)
    ms: dict[str, list[float]] = {}
    for seed in c.seeds:
        args = data(c, seed)
        for name, took in harness.faster_of_two({k: (f, args) for k, f in compiled.items()}, c.repeats).items():
            ms.setdefault(name, []).append(took)
        harness.say(seed, {k: v[-1] for k, v in ms.items()})
    record: dict[str, Any] = dict(kind="h200_more_ids", **timing.environment(), shape=shape, seeds=c.seeds)
    record |= dict(compile=found, ms=ms, ratios=ratios(ms))
    harness.say(record["ratios"])
    if c.out:
        harness.write(c.out, record)


def ratios(ms: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Each arm of :data:`RATIOS` over the one it is compared with: of medians over the seeds, beside its bar."""
    median = {k: statistics.median(v) for k, v in ms.items()}
    known = {k: v for k, v in RATIOS.items() if k in median and v[0] in median}
    return {k: dict(of=of, ratio=round(median[k] / median[of], 4), bar=bar) for k, (of, bar) in known.items()}


if __name__ == "__main__":
    main()
