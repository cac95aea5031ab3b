"""What ``jax.checkpoint`` and ``lax.scan`` around the loss cost: benchmarks/results/remat_<platform>.json.

    python benchmarks/remat.py [--tokens 2048 --hidden 512 --vocab 32768 --rounds 9]

Arms alternate in one process: the loss with its gradients; the same under ``jax.checkpoint``; the same batch as a
``lax.scan`` over four micro-batches. docs/scan-and-remat.md shows the ratios.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import harness
import logitless
from logitless.lab.bench import ratios
from logitless.lab.tools import timing

PARTS = 4


def batch(tokens: int, hidden: int, vocab: int, dtype: Any) -> dict[str, jax.Array]:
    """``PARTS`` rows of a batch in which every token is live."""
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (PARTS, tokens // PARTS)
    return dict(
        hidden=jax.random.normal(keys[0], (*shape, hidden), dtype),
        lm_head=jax.random.normal(keys[1], (vocab, hidden), dtype) * hidden**-0.5,
        targets=jax.random.randint(keys[2], shape, 0, vocab),
        advantages=jax.random.normal(keys[3], (PARTS,)),
    )


def loss(h: jax.Array, w: jax.Array, rest: tuple[jax.Array, jax.Array], count: int) -> jax.Array:
    targets, advantages = rest
    given: dict[str, Any] = dict(advantages=advantages, denominator=count, objective=logitless.Objective.dapo())
    return logitless.linear_grpo_loss(h, w, targets, **given)[0]


def plain(h: jax.Array, w: jax.Array, *rest: jax.Array) -> Any:
    return jax.value_and_grad(lambda h, w: loss(h, w, rest, rest[0].size), (0, 1))(h, w)


def checkpointed(h: jax.Array, w: jax.Array, *rest: jax.Array, policy: Any = None) -> Any:
    inner = jax.checkpoint(lambda h, w: loss(h, w, rest, rest[0].size), policy=policy)
    return jax.value_and_grad(inner, (0, 1))(h, w)


def scanned(h: jax.Array, w: jax.Array, *rest: jax.Array) -> Any:
    def part(total: Any, row: Any) -> Any:
        h, *own = (x[None] for x in row)
        value, (dh, dw) = jax.value_and_grad(lambda h, w: loss(h, w, tuple(own), rest[0].size), (0, 1))(h, w)
        return (total[0] + value, total[1] + dw), dh[0]

    (value, dw), dh = jax.lax.scan(part, (jnp.zeros(()), jnp.zeros_like(w)), (h, *rest))
    return value, (dh, dw)


ARMS = {"plain": plain, "checkpoint": checkpointed, "scan": scanned}


def measure(tokens: int, hidden: int, vocab: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of each round, ratios to the plain call, and the compiler's temporaries."""
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    x = batch(tokens, hidden, vocab, dtype)
    programs, found = harness.compiled(ARMS, tuple(x.values()))
    calls = {name: functools.partial(program, *x.values()) for name, program in programs.items()}
    times = harness.alternated(calls, rounds, repeats=2)
    return dict(
        what="loss and gradients of one batch, under jax.checkpoint and in lax.scan; milliseconds by the host's clock",
        shape=dict(tokens=tokens, hidden=hidden, vocab=vocab, dtype=str(jnp.dtype(dtype))),
        environment=timing.environment(),
        rounds=times,
        ratios={name: ratios.ratio(times[name], times["plain"]) for name in times if name != "plain"},
        temporaries={name: row["temporaries"] for name, row in found.items()},
    )


if __name__ == "__main__":
    sizes = harness.options(__doc__, tokens=2048, hidden=512, vocab=32768, rounds=9).parse_args()
    record = measure(**vars(sizes))
    harness.say({k: record[k] for k in ("shape", "ratios", "temporaries")})
    harness.write(f"remat_{jax.default_backend()}.json", record)
