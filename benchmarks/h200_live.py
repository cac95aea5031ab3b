"""The default call against strong dense on one H200: live tokens, sequence-level objectives, sparse backward.

    python benchmarks/h200_live.py --out benchmarks/results/h200_live.json

One process. For each seed of the data all arms run in turn, back to back (one wait at the end of several calls), twice;
an arm's number is the median over the seeds of its faster turn, as milliseconds and in units of strong dense with
bfloat16 logits. The live arms are one program with other masks: ``above_share`` is what each takes above its share of
the time of all tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np

import harness
from logitless.lab.bench import arm_program, case_arrays
from logitless.lab.bench.case import Arm, BenchConfig
from logitless.lab.tools import timing

LIVE = (1 / 4, 2108 / 8192, 0.4, 4000 / 8192, 0.6, 5000 / 8192, 0.75, 1 / 16, 1 / 8, 7 / 8)
"""Shares of the tokens that are live; 2,108 and 4,000 of 8,192 are just beyond one chunk and just below two."""


def programs(budget: int) -> dict[str, Arm]:
    """By the name of an arm; ``budget`` bytes hold the logits of all tokens and their dlogits, as strong dense does."""
    gspo = dict(level="sequence", aggregation="grpo")
    library = functools.partial(Arm, "library")
    return {
        "strong": Arm("baseline", "strong", logits_dtype="bfloat16"),
        "strong/f32": Arm("baseline", "strong"),
        "default": library(),
        "default, GSPO": library(objective=gspo),
        "default, GSPO, with memory": library(objective=gspo, options=dict(memory_budget=budget)),
        "sparse": library(options=dict(sparse_backward="auto")),
        "sparse, GSPO": library(objective=gspo, options=dict(sparse_backward="auto")),
    }


def case_of(c: Any, kind: str, seed: int) -> dict[str, Any]:
    """A batch in which every token is live: logits of a spread of 3 (``flat``), or of a trained policy's kind, with
    targets and old log-probabilities of its own."""
    sizes = dict(tokens=c.tokens, hidden=c.hidden, vocab=c.vocab, rows=8)
    return dataclasses.asdict(BenchConfig(inputs=kind, seed=seed, **sizes))


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


def main() -> None:
    defaults: dict[str, Any] = dict(tokens=8192, hidden=4096, vocab=151936, seeds=[11, 12, 13], repeats=4)
    c = harness.options(__doc__, **defaults, wait_for="", out="").parse_args()
    shape = c.tokens, c.hidden, c.vocab
    record: dict[str, Any] = dict(kind="h200_live", **timing.environment(), shape=shape, seeds=c.seeds, ms={})
    cases = {(seed, kind): case_of(c, kind, seed) for seed, kind in itertools.product(c.seeds, ARMS)}
    with ThreadPoolExecutor(6) as pool:
        made = {key: pool.submit(case_arrays.Data().of, case, {}) for key, case in cases.items()}
        first = next(iter(cases))
        arms = programs(round(1.06 * c.tokens * c.vocab * 6))
        every = {name: arm_program.program(cases[first], arm) for name, arm in arms.items()}
        compiled, record["compile"] = harness.compiled(every, made[first].result())
    harness.wait_for(c.wait_for)
    for seed, kind in cases:
        given = made.pop((seed, kind)).result()
        timed = {a: (compiled[a], given) for a in ARMS[kind] if a in compiled}
        if kind == "flat" and "default" in compiled:
            for share in LIVE:
                some = given[0], with_live(given[1], share, seed)
                timed[f"default, {round(share * c.tokens)} live"] = compiled["default"], some
        for name, ms in harness.faster_of_two(timed, c.repeats).items():
            record["ms"].setdefault(f"{kind}: {name}", []).append(ms)
        harness.say(seed, kind, {k: v[-1] for k, v in record["ms"].items() if k.startswith(kind)})
        del given, timed
        if c.out:
            harness.write(c.out, with_ratios(record, c.tokens))


def with_ratios(record: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The record with the ratios so far."""
    ms = record["ms"]
    dense = {k: ms.get(f"{k.split(':')[0]}: strong", ()) for k in ms}
    ratios = {k: [round(a / b, 4) for a, b in zip(v, dense[k], strict=False)] for k, v in ms.items()}
    above = {}
    for n in (round(share * tokens) for share in LIVE):
        if (name := f"flat: default, {n} live") in ms:
            paired = zip(ms[name], ms["flat: default"], strict=True)
            above[name] = round(statistics.median(a / b for a, b in paired) - n / tokens, 4)
    return {**record, "of_strong": ratios, "above_share": above}


if __name__ == "__main__":
    main()
