"""Estimated v6e time and compiled HBM of the sparse backward, without a TPU.

    python benchmarks/tpu_sparse_estimate.py                            (half an hour on two cores; needs libtpu)
    python benchmarks/tpu_sparse_estimate.py columns|compile|maxima|gather|slab|hard   (some; others are kept)

T=8192, H=4096, V=151936, bfloat16, loss, dH and dW of a token-level objective.

columns     How many columns are active and how many rows hard on 8192 tokens of ``bench.realistic`` (true logits of a
            1026-wide head on the host), by the forward sweep's own rule: bounds and the running logsumexp over
            vocabulary tiles, thresholds and costs of ``head/pallas_tpu/sparse.py``. All rows choose the
            threshold here, where the program lets 128 of them choose, by a sample of the columns (whose judgement is
            recorded beside it). For a policy's own completions, with log-probabilities of the rollout 0.05 nats off
            and without any, and for others' text.
compile     The whole program by libtpu, sparse and exact: peak HBM, and whether there are logits in it.
simulate    Cycles of its parts by the compiler's simulator (``logitless.lab.tpu.cycles``), at small sizes, scaled:
              forward     per step and per token tile, with column maxima (as benchmarks/tpu_head_estimate.py)
              slab        one backward step of 2048 tokens x 1024 columns, times the number of such steps
              gather      per row of a [V, H] array
              hard rows   the sweep that writes dW and makes dH of the hard rows, per vocabulary tile

The estimate adds these up, each at least its bytes / 1.64 TB/s:

    look + forward + gathers of rows + (slabs: gathers and steps) + hard rows and dW + passes over [N, H]

"look" (128 rows of logits in a sample of the columns) and the passes over [N, H] are bytes only. Sorts of V and of N
numbers, gathers and scatters of N numbers, loops' own time and the choice of the threshold are left out: the simulator
does not get through a sort. Nor does it see the parts of a tile's ready rows beyond the first: added by count.
An estimate, 5 to 35 % optimistic where it could be compared with published times; never a measurement.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import harness
from logitless.core.problem import Call, HeadArrays, Linear, Problem, Wanted
from logitless.core.stats import LogitTransform, StatCotangents, TokenStats
from logitless.head.pallas_tpu import kernels
from logitless.head.pallas_tpu.column_choice import FEW, SAMPLE, Active, column_rule, sampled
from logitless.head.pallas_tpu.hard_rows import PART, Ready, hard_sweep
from logitless.head.pallas_tpu.sparse import CHUNK, GROUP, HARD_TOKENS, over_slabs
from logitless.head.pallas_tpu.tiles import Tiles, choose
from logitless.head.sparse.gather import Known
from logitless.lab.bench import realistic
from logitless.lab.tpu import aot, cycles
from tpu_head_estimate import V6E_VMEM, H, N, V, compiled

HERE = Path(__file__).resolve()
RESULT, EXACT = "tpu_v6e_sparse_estimate.json", "tpu_v6e_head_estimate.json"
TOLERANCE = 2.0**-8
STEP = (2048, 1024)  # tokens and columns of the simulated backward step
HARD_STEPS = (1, 3)  # token tiles that the hard rows of the cases below take
RULE = column_rule(V)
CASES = {
    "a policy's own completions, rollout log-probabilities known": ("on_policy", 0.05),
    "a policy's own completions": ("on_policy", None),
    "others' text": ("realistic", None),
}
"""Policies of ``bench.realistic``, and how far off a log-probability is that is known beforehand."""


# -- columns -----------------------------------------------------------------------------------------------------------


def columns(policy: str) -> dict[str, Any]:
    """Active columns and hard rows for every threshold, and the cheapest: of each case with this policy."""
    width, rows = 1026, 128
    tile = choose("forward", N, (V, H), 2, "vh", V6E_VMEM).vocab
    h, w = realistic.realistic_head(N, width, V, 0, np.float32, realistic.POLICIES[policy])
    y = np.asarray(realistic.sample_targets(jnp.asarray(h), jnp.asarray(w), 0, chunk=rows))
    starts = np.arange(0, V, tile)
    head = np.ascontiguousarray(w.T)
    cases = {name: off for name, (p, off) in CASES.items() if p == policy}
    drift = np.random.default_rng(0).standard_normal(N).astype(np.float32)
    best = {name: np.full(V, -np.inf, np.float32) for name in cases}
    lse = np.zeros(N, np.float32)
    for i in range(0, N, rows):
        own = slice(i, i + rows)
        x = h[own] @ head
        top = x.max(1, keepdims=True)
        sums = np.cumsum(np.add.reduceat(np.exp(x - top), starts, axis=1), 1)
        lse[own] = top[:, 0] + np.log(sums[:, -1])
        for name, off in cases.items():
            floor = x[np.arange(rows), y[own]] if off is None else lse[own] + off * drift[own]
            bound = np.maximum(top + np.log(np.maximum(sums, 1e-30)), floor[:, None])
            for j, start in enumerate(starts):
                part = slice(start, start + tile)
                best[name][part] = np.maximum(best[name][part], (x[:, part] - bound[:, j : j + 1]).max(0))
    edges = np.log(TOLERANCE * np.array(RULE.thresholds))
    for b in best.values():
        b[y] = np.inf
    inactive = np.concatenate([(b[:, None] <= edges).astype(np.float32) for b in best.values()], 1)
    begin, size = sampled(V)
    some = (begin[:, None] + np.arange(size)).reshape(-1)
    mass, judged = [], []
    for i in range(0, N, rows):
        p = np.exp(h[i : i + rows] @ head - lse[i : i + rows, None])
        mass.append(p @ inactive)
        judged.append(p[:, some] @ inactive[some] * (V / some.size))
    few = np.arange(FEW) * N // FEW
    out = {}
    for k, name in enumerate(cases):
        own = slice(k * len(edges), (k + 1) * len(edges))
        active, hard = V - inactive[:, own].sum(0), (np.concatenate(mass)[:, own] > TOLERANCE).mean(0)
        guessed = (np.concatenate(judged)[few][:, own] > TOLERANCE).mean(0)
        cost = RULE.cost(active / V, hard)
        j = int(np.argmin(np.where(active <= RULE.most, cost, np.inf)))
        out[name] = {
            "tokens": N,
            "generator": policy,
            "generator_width": width,
            "known_log_probabilities_off_by": cases[name],
            "tolerance": TOLERANCE,
            "thresholds": [float(TOLERANCE * e) for e in RULE.thresholds],
            "active_columns": [int(a) for a in active],
            "hard_rows": [round(float(r), 4) for r in hard],
            "hard_rows_by_the_sample": [round(float(r), 4) for r in guessed],
            "matmuls_after_the_forward_sweep": [round(float(c), 3) for c in cost],
            "chosen": {"active_columns": int(active[j]), "hard_rows": round(float(hard[j]), 4)},
        }
    return out


# -- simulate ----------------------------------------------------------------------------------------------------------


def program(kind: str, **sizes: Any) -> tuple[Any, ...]:
    """``(f, args[, donated])`` of one simulated part."""
    s = jax.ShapeDtypeStruct
    if kind == "gather":

        def gather(w: Any, index: Any) -> Any:
            return kernels.gather(w, index, False)

        return gather, (s((sizes["rows"], H), jnp.bfloat16), s((sizes["k"],), jnp.int32))

    n, vocab = sizes["n"], sizes["vocab"]
    rows_of = (s((n, H), jnp.bfloat16), s((vocab, H), jnp.bfloat16), s((n,), jnp.int32), s((n,), jnp.float32))

    def problem(h: Any, w: Any, y: Any) -> Problem:
        return Problem(Linear(h, HeadArrays(w)), y, LogitTransform(), call=Call("estimate", sizes.get("swept", vocab)))

    if kind == "slab":

        def slab(h: Any, w: Any, y: Any, row: Any, index: Any, count: Any) -> Any:
            rule = dataclasses.replace(column_rule(vocab), slab=STEP[1], most=STEP[1])
            active = Active(index, count, jnp.asarray(False))
            return over_slabs(
                rule, Wanted(True, True), problem(h, w, y), Known(_stats(row), _g(row)), count, STEP[0], active
            )

        return slab, (*rows_of, s((STEP[1],), jnp.int32), s((), jnp.int32))
    tiles = Tiles(*sizes["tiles"])

    def kernel(h: Any, w: Any, y: Any, row: Any) -> Any:
        p = problem(h, w, y)
        return kernels.token_stats_and_maxima(p, None, row, tiles)

    def around(h: Any, w: Any, y: Any, row: Any, rows: Any) -> Any:
        p = problem(h, w, y)
        known = Ready(rows, jnp.arange(2 * PART, dtype=jnp.int32), jnp.int32(2 * PART))
        return hard_sweep(p, None, _stats(row), _g(row), known, tiles, hidden=n)

    if kind == "hard":
        return around, (*rows_of, s((vocab, H), jnp.bfloat16)), (4,)
    return kernel, rows_of


def _stats(row: Any) -> TokenStats:
    return TokenStats(**{f.name: row for f in dataclasses.fields(TokenStats)})


def _g(row: Any) -> StatCotangents:
    return StatCotangents(row, jnp.zeros_like(row), jnp.zeros_like(row))


def _cycles(**arguments: Any) -> dict[str, int]:
    cycles.TIMEOUT_S = 1800
    return cycles.simulate(f"{HERE}:program", arguments, partial=True)


def _kernel_cycles(**arguments: Any) -> int:
    return sum(c for name, c in _cycles(**arguments).items() if name.startswith("head_"))


def forward_cycles() -> dict[str, Any]:
    """Of the forward sweep, per step and per token tile."""
    t = choose("forward", N, (V, H), 2, "vh", V6E_VMEM)
    tiles = [t.tokens, t.vocab, t.vmem_limit]
    few, more = (_kernel_cycles(kind="maxima", n=t.tokens, vocab=24 * t.vocab, swept=k * t.vocab, tiles=tiles)
                 for k in (2, 4))  # fmt: skip
    per_step = (more - few) / 2
    return {"per_step": per_step, "per_tile": few - 2 * per_step, "tiles": tiles[:2]}


def gather_cycles() -> dict[str, Any]:
    """Of a row, where as many are gathered at a time as in the program, out of an array that is larger than VMEM, or
    the gather would be made there."""
    k = kernels.PART
    return {"per_row_moved": sum(_cycles(kind="gather", rows=40960, k=k).values()) / k}


def slab_cycles() -> dict[str, Any]:
    """Of a backward step, one of two so that it is one of a loop as in the program, without the gather of its head
    rows; and of rounding a slab's rows of dW into their place."""
    parts = _cycles(kind="slab", n=2 * STEP[0], vocab=8192)
    outside = sum(c for name, c in parts.items() if name.startswith(("head_rows", "broadcast")))
    rounding = sum(c for name, c in parts.items() if name.startswith("convert_dynamic-update-slice"))
    step = sum(parts.values()) - outside - rounding
    return {"per_step": step, "per_slab": rounding, "tokens": STEP[0], "columns": STEP[1]}


def hard_cycles() -> dict[str, Any]:
    """Of a vocabulary tile of the sweep that writes dW, by its token tiles."""
    t = choose("dhead", N, (V, H), 2, "vh", V6E_VMEM)
    tiles = [HARD_TOKENS, t.vocab, t.vmem_limit]
    out = {}
    for steps in HARD_STEPS:
        # The simulator does not get through eight tiles of several steps.
        size = 4 if steps == 1 else 2
        few, more = (
            _kernel_cycles(kind="hard", n=steps * tiles[0], vocab=k * t.vocab, tiles=tiles) for k in (size, 2 * size)
        )
        out[str(steps)] = (more - few) / size
    return {"per_tile": out, "tiles": tiles[:2]}


SIMULATED: dict[str, Callable[[], dict[str, Any]]] = {
    "maxima": forward_cycles,
    "gather": gather_cycles,
    "slab": slab_cycles,
    "hard": hard_cycles,
}


# -- the estimate ------------------------------------------------------------------------------------------------------


def estimate(sim: dict[str, Any], active: int, hard_rows: float) -> dict[str, Any]:
    """Milliseconds of the parts at the full shape."""

    def ms(total: float, moved: float) -> float:
        return 1e3 * cycles.seconds(total, moved)

    head, rows = 2 * V * H, N * H
    slab, chunk = RULE.slab, CHUNK
    slabs, chunks = math.ceil(active / slab), math.ceil(N / chunk)
    hard = math.ceil(hard_rows * N)
    if hard > GROUP:
        raise SystemExit(f"{hard} hard rows are more than a group of {GROUP}: these would take the exact kernels")

    def forward() -> float:
        f = sim["maxima"]
        tokens, vocab = f["tiles"]
        return ms(N / tokens * (V / vocab * f["per_step"] + f["per_tile"]), N / tokens * head + 2 * rows)

    def gathers(moved: int, of_an_element: int = 4 + 2) -> float:  # rows of 16 bits are copied in pairs
        return ms(moved * sim["gather"]["per_row_moved"], moved * H * of_an_element)

    step = sim["slab"]["per_step"] * (chunk / sim["slab"]["tokens"]) * (slab / sim["slab"]["columns"])
    # h and W twice each, and dH read and written; x, dx and dW's slab stay in VMEM (the compiled program says so)
    step_bytes = 4 * chunk * H + 4 * slab * H + 8 * chunk * H
    sweep = sim["hard"]
    tokens, vocab = sweep["tiles"]
    tiles, steps = V / vocab, math.ceil(hard / tokens)
    # A part beyond the first where a tile's rows straddle one: a matmul as deep as a part, read and added.
    more_parts = active / PART * (2 * vocab * PART * H / 524_288 + 3 * vocab * H / 1024)
    parts = {
        "look": ms(0, 3 * 2 * SAMPLE * H + 8 * 4 * FEW * SAMPLE),
        "forward": forward(),
        "gathers of hidden states and of the targets' rows": gathers(2 * N),
        "slabs: gathers": gathers(slabs * slab),
        "slabs: steps": ms(slabs * (chunks * step + sim["slab"]["per_slab"]), slabs * chunks * step_bytes),
        "hard rows, and dW written": ms(
            tiles * sweep["per_tile"][str(steps)] + more_parts,
            2 * head + 2 * active * H + tiles * (steps if steps > 1 else 0) * tokens * H * 2,
        ),
        # dH out of float32; of the hard rows hidden states, and of a group what the active columns gave.
        "gathers of dH and of the hard rows": gathers(N, 4 + 2) + gathers(steps * tokens) + gathers(GROUP, 4 + 4),
        # Hidden states met by the targets' rows, dH in float32, with a group more, begun at zero.
        "passes over [N, H]": ms(0, 2 * rows + 4 * (rows + GROUP * H)),
    }
    return {
        "parts_ms": {k: round(v, 2) for k, v in parts.items()},
        "sparse_ms": round(sum(parts.values()), 1),
    }


def estimates(record: dict[str, Any]) -> dict[str, Any]:
    """The estimate of each case, from what is recorded."""
    exact = harness.read(EXACT)["estimated_ms"]["loss, dH and dW, vh"]
    out: dict[str, Any] = {"exact": exact}
    for name, found in record["columns"].items():
        ms = estimate(record["cycles"], found["chosen"]["active_columns"], found["chosen"]["hard_rows"])
        out[name] = {
            "sparse": ms["sparse_ms"], "ratio": round(ms["sparse_ms"] / exact, 3), "parts": ms["parts_ms"],
        }  # fmt: skip
    return out


def main() -> None:
    """Write the record, all of it or the parts named on the command line."""
    if sys.argv[1:2] == ["--compile"]:
        print("\n" + json.dumps(compiled(sparse_backward=sys.argv[2])))
        return
    record = {
        "what": "ESTIMATE by the compiler's cycle simulator and by bytes, not a measurement",
        "method": "benchmarks/tpu_sparse_estimate.py",
        "chip": "v6e, one chip",
        "shape": {"tokens": N, "hidden": H, "vocab": V, "dtype": "bfloat16"},
    } | harness.read(RESULT)
    for part in sys.argv[1:] or ["columns", "compile", *SIMULATED]:
        if part == "columns":
            policies = dict.fromkeys(p for p, _ in CASES.values())
            record["columns"] = {name: row for policy in policies for name, row in columns(policy).items()}
        elif part == "compile":
            record["compiled"] = {
                name: compiled(sparse_backward=m) for name, m in (("exact", "off"), ("sparse", "auto"))
            }
        else:
            found = {**SIMULATED[part](), "libtpu": aot.versions()["libtpu"]}
            record["cycles"] = {**record.get("cycles", {}), part: found}
        harness.say(f"{part}: done")
        if set(SIMULATED) <= set(record.get("cycles", {})) and "columns" in record:
            record["estimated_ms"] = estimates(record)
        harness.write(RESULT, record | {"versions": aot.versions()})  # of this run; what was compiled has its own


if __name__ == "__main__":
    main()
