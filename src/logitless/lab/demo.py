"""``logitless demo``: a model learns to add twice, with the dense loss and with the chunked one, side by side.

First what each loss needs at a real vocabulary, verified and measured alone: sixteen characters make no logits to speak
of. Then both arms, from the same warm start on the same problems. They run at the same time, so no time of theirs is
compared; whether they agree is decided by a replay of the first steps (docs/training.md). Everything ends up on a
single page. ``--quick`` compares loss and gradients for a batch instead, in seconds.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import textwrap
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from logitless.api import linear_grpo_loss
from logitless.core.explanation import explain
from logitless.core.options import Head, Options
from logitless.lab.tools.text import WIDTH
from logitless.lab.tools.timing import compiled_memory, wall_times
from logitless.objectives.loss import metric_values
from logitless.objectives.objective import Objective

REPLAYED = 10
"""Steps that are replayed: a wrong loss shows in the first one."""


def _arm(backend: str, x: Any, rest: Any, objective: Objective) -> dict[str, Any]:
    def loss(x: Any, rest: dict[str, Any]) -> Any:
        head = Head(x[1], layout="vh")
        return linear_grpo_loss(x[0], head, objective=objective, options=Options(backend=backend), **rest)

    compiled = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(x, rest).compile()
    (value, metrics), grads = jax.block_until_ready(compiled(x, rest))
    ms, temporaries = wall_times(compiled, x, rest, repeats=3), compiled_memory(compiled)["temporaries"]
    return dict(loss=value, metrics=metrics, grads=grads, temp=temporaries, ms=statistics.median(ms))


def free_folder(folder: Path) -> Path:
    """``folder``, or the first of ``folder-2``, ``folder-3``, ... that does not exist."""
    candidates = (folder if i == 1 else folder.with_name(f"{folder.name}-{i}") for i in range(1, 10_000))
    return next(f for f in candidates if not f.exists())


def learn(*, folder: Path, seed: int, steps: int = 100, overrides: tuple[str, ...] = ()) -> int:
    """Memory and time of both losses at a real vocabulary, verified; the tiny run's A/B; a page; 1 if they disagree."""
    from logitless.lab.bench import case, microbench, report, text_table
    from logitless.train import ab
    from logitless.train.config import load

    begin = time.perf_counter()
    print("1. What both losses need: 512 tokens, Qwen2.5's vocabulary of 151,936.", flush=True)
    c = case.BenchConfig(
        name="loss_memory", baselines=["strong"], tokens=512, hidden=64, vocab=151936, dtype="float32", repeats=1,
        rounds=3,
    )  # fmt: skip
    measured = microbench.run(c, say=lambda text: print(f"  ... {text}", flush=True))
    print(text_table.table(measured))

    print(f"\n2. Two-number addition: {steps} GRPO steps with the dense and the chunked loss.", flush=True)
    settings = [f"seed={seed}", f"run_dir={folder}", f"train.steps={steps}", "ab.kernel=chunked", "ab.parallel=true"]
    settings += [f"ab.replay_steps={min(steps, REPLAYED)}"]
    result = ab.run(load(None, [*settings, *overrides]), say=lambda text: print(f"  {text}", flush=True))
    print(ab.table(result))
    print(ab.curve(result))
    (folder / "loss_memory.json").write_text(json.dumps(measured) + "\n")

    page = folder / "report.html"
    report.write([folder / "ab.json", folder / "loss_memory.json"], page)
    print(f"\n{time.perf_counter() - begin:.0f} s. The report: {page.absolute()}")
    return 0 if not ab.disagreeing(result) and measured["passed"] else 1


def run(*, tokens: int, hidden: int, vocab: int, seed: int) -> int:
    """The quick comparison: print it; 1 if the two disagree."""
    from logitless.lab.bench import case, case_arrays

    sizes: dict[str, Any] = dict(
        tokens=tokens // 8 * 8, hidden=hidden, vocab=vocab, rows=8, dtype="float32", batch_kind="rl"
    )
    x, rest = case_arrays.Data().of(dataclasses.asdict(case.BenchConfig(seed=seed, **sizes)), {})
    objective = Objective(eps_low=0.2, eps_high=0.28, aggregation="dapo")
    print(f"hidden {x[0].shape} float32, lm_head {x[1].shape}, tokens {rest['targets'].shape}")
    route = explain(linear_grpo_loss, x[0], Head(x[1], layout="vh"), objective=objective)
    for line in str(route).splitlines():
        print(textwrap.fill(line, WIDTH, subsequent_indent=" " * 11, break_on_hyphens=False))
    arms = {name: _arm(name, x, rest, objective) for name in ("reference", "chunked")}
    print(f"\n{'':10s}{'loss':>14s}{'|dH|':>12s}{'|dW|':>12s}{'temporaries':>16s}{'time':>11s}")
    for name, arm in arms.items():
        norms = [float(jnp.linalg.norm(g)) for g in arm["grads"]]
        print(
            f"{name:10s}{float(arm['loss']):14.8f}{norms[0]:12.4e}{norms[1]:12.4e}"
            f"{arm['temp'] / 2**20:12.1f} MiB{arm['ms']:8.1f} ms"
        )
    a, b = arms["reference"], arms["chunked"]
    worst = 0.0
    for label, p, q in zip(("dH", "dW"), a["grads"], b["grads"], strict=True):
        error = float(jnp.linalg.norm(p - q) / jnp.linalg.norm(p))
        worst = max(worst, error)
        print(f"{label}: relative difference {error:.1e}")
    values = metric_values(b["metrics"])
    print("metrics: " + ", ".join(f"{k} {values[k]:.4g}" for k in ("live_token_share", "ratio", "entropy", "ess")))
    print(f"memory: chunked needs {b['temp'] / a['temp']:.2f}x the temporaries of the dense loss")
    agree = worst < 1e-5 and abs(float(a["loss"]) - float(b["loss"])) < 1e-5
    print("the two agree" if agree else "THE TWO DISAGREE")
    return 0 if agree else 1
