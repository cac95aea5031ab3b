"""Estimated v6e time of the logits-level TPU kernels and of plain XLA: benchmarks/results/tpu_v6e_logits_estimate.json.

    python benchmarks/tpu_logits_estimate.py        (10 minutes; needs libtpu; cases as arguments: only these)

Method. The simulator of the compiler (``logitless.lab.tpu.cycles``) runs each program at two small numbers of rows and
the full vocabulary; the slope gives the cycles of 4096 rows. Memory peaks, and the bytes that XLA says its program
moves, come from a compile at the full shape. Kernels and baselines are treated alike:

    time = max(cycles of all operations / 1.75 GHz, HBM bytes / 1.64 TB/s)        the simulator's DMAs are too fast

The baselines get the loss a good JAX programmer writes for a TPU: ``logsumexp`` and the target's logit by
``iota == label`` (a gather's gradient would be a float32 scatter), differentiated by JAX. Taking the maximum over the
whole program instead of operation by operation is in their favour. An estimate, never a measurement.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core.problem import Call, Given, Problem
from logitless.core.stats import StatCotangents, TokenStats
from logitless.core.transform import LogitTransform
from logitless.lab.tpu import aot, cycles
from logitless.logits.pallas_tpu import backend as pallas_tpu
from logitless.objectives.inputs import LossInputs
from logitless.objectives.loss import contributions
from logitless.objectives.objective import Objective
from logitless.objectives.token_program import token_program

N, V = 4096, 151936
LOGITS_BYTES = N * V * 2
RESULT = Path(__file__).parent / "results" / "tpu_v6e_logits_estimate.json"
HERE = str(Path(__file__).resolve())

CASES: dict[str, dict[str, Any]] = {
    "stats_and_dlogits": {},
    "stats_and_dlogits, entropy bonus": {"entropy": True},
    "stats_and_dlogits, temperature per token": {"temperature": True},
    "token_stats": {},
    "dlogits": {},
    "XLA one-hot": {},
    "XLA one-hot, entropy bonus": {"entropy": True},
}
ROWS = (32, 64)
"""Rows of the two simulations: two and four blocks of the kernels; the simulator's memory grows with them."""

PASSES = {"token_stats": 1}
"""Times a kernel's program moves the logits or dlogits through HBM; 2 for the rest."""


def xla_loss(x: Array, y: Array, objective: Objective, inputs: LossInputs) -> Array:
    """The objective over ``logits [n, V]`` in plain JAX."""
    z = x.astype(jnp.float32)
    hit = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1) == y[:, None]
    lse = jax.nn.logsumexp(z, axis=-1)
    logp = jnp.sum(jnp.where(hit, z, 0.0), axis=-1) - lse
    entropy = jnp.zeros_like(lse)
    if objective.entropy_coef is not None:
        log_p = z - lse[:, None]
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return jnp.sum(contributions(objective, logp, entropy, inputs))


def program(case: str, n: int, entropy: bool = False, temperature: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """``(f, arguments)`` over ``n`` rows: a clipped objective with KL to a reference."""
    objective = Objective(beta=0.04, entropy_coef=0.01 if entropy else None)

    def f(x: Array, y: Array, mask: Array, columns: tuple[Array, ...]) -> Any:
        old, ref, advantage, weight, tau = columns
        inputs = LossInputs(mask, advantage, weight, old, ref, None, weight if entropy else None, None)
        if case.startswith("XLA"):
            return jax.value_and_grad(xla_loss)(x, y, objective, inputs)
        p = Problem(Given(x), y, LogitTransform(tau if temperature else None), mask, call=Call("estimate", V))
        if case == "token_stats":
            return pallas_tpu.token_stats(p)
        if case == "dlogits":
            stats = TokenStats(old, ref, advantage, weight, old, mask, ref, old)
            return pallas_tpu.dlogits(p, stats, StatCotangents(old, ref, advantage))
        return pallas_tpu.stats_and_dlogits(p, token_program(objective, inputs))

    s = jax.ShapeDtypeStruct
    column = s((n,), jnp.float32)
    return f, (s((n, V), jnp.bfloat16), s((n,), jnp.int32), s((n,), jnp.bool_), (column,) * 5)


def estimate(case: str) -> dict[str, Any]:
    options = CASES[case]
    total = N * cycles.cycles_per_row(f"{HERE}:program", dict(options, case=case), ROWS)
    f, arguments = program(case, N, **options)
    compiled = aot.compile_for(cycles.V6E.topology, f, *arguments)
    if case.startswith("XLA"):
        moved = compiled.executable.cost_analysis()["bytes accessed"]
    else:
        moved = PASSES.get(case, 2) * LOGITS_BYTES + 1024 * N
    return {
        "program": case,
        "cycles": round(total),
        "simulated_rows": ROWS,
        "compute_ms": round(1e3 * total / cycles.V6E.clock_hz, 3),
        "hbm_bytes": int(moved),
        "hbm_ms": round(1e3 * moved / cycles.V6E.hbm_bytes_per_s, 3),
        "estimated_ms": round(1e3 * cycles.seconds(cycles.V6E, total, moved), 3),
        "peak_hbm_bytes": compiled.peak_bytes,
    }


def record(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    floor = 1e3 * 2 * LOGITS_BYTES / cycles.V6E.hbm_bytes_per_s
    time = {case: row["estimated_ms"] for case, row in rows.items()}
    ratios = {}
    for suffix in ("", ", entropy bonus"):
        ours, xla = time.get("stats_and_dlogits" + suffix), time.get("XLA one-hot" + suffix)
        if ours is not None:
            ratios["stats_and_dlogits / HBM floor" + suffix] = round(ours / floor, 3)
        if ours is not None and xla is not None:
            ratios["stats_and_dlogits / XLA one-hot" + suffix] = round(ours / xla, 3)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "what": "ESTIMATE by the compiler's cycle simulator, not a measurement",
        "method": "benchmarks/tpu_logits_estimate.py",
        "chip": "v6e, one chip",
        "shape": {"tokens": N, "vocab": V, "dtype": "bfloat16"},
        "tiles": pallas_tpu.describe(N, V, jnp.bfloat16),
        "versions": aot.versions(),
        "commit": commit or None,
        "hbm_floor_ms": round(floor, 3),
        "ratios": ratios,
        "programs": list(rows.values()),
    }


def main() -> None:
    rows = {r["program"]: r for r in json.loads(RESULT.read_text())["programs"]} if RESULT.exists() else {}
    for case in sys.argv[1:] or CASES:
        rows[case] = estimate(case)
        print(json.dumps(rows[case]), flush=True)
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(record({c: rows[c] for c in CASES if c in rows}), indent=1) + "\n")


if __name__ == "__main__":
    main()
