"""Estimated v6e time and compiled HBM of the sparse backward, without a TPU.

    python benchmarks/tpu_sparse_estimate.py                            (half an hour on two cores; needs libtpu)
    python benchmarks/tpu_sparse_estimate.py columns|compile|simulate   (one part; the others are kept)

T=8192, H=4096, V=151936, bfloat16, loss, dH and dW of a token-level objective.

columns     How many columns are active and how many rows hard on 8192 tokens of ``bench.realistic`` (true logits of a
            1026-wide head on the host), by the forward sweep's own rule: bounds from the target and the running
            logsumexp over vocabulary tiles, thresholds and costs of ``head/pallas_tpu/sparse_columns.py``. All rows
            choose the threshold here, where the program lets 128 of them choose.
compile     The whole program by libtpu, sparse and exact: peak HBM, and whether there are logits in it.
simulate    Cycles of its parts by the compiler's simulator (``logitless.tpu.cycles``), at small sizes, scaled:
              forward     per step and per token tile, with and without maxima (as benchmarks/tpu_head_estimate.py)
              slab        one backward step of 1024 tokens x 1024 columns, times the number of such steps
              gather      per row of a [V, H] head             scatter   per row of dW and per row written
              hard rows   dhidden and dhead with their small token tiles, per step and per tile

The estimate adds these up, each at least its bytes / 1.64 TB/s:

    look + forward + (slabs: gathers and steps) + hard rows + scatter + passes over [N, H]

"look" (128 rows of logits) and the passes over [N, H] are bytes only. Sorts of V and of N numbers, scatters of N
numbers and the choice of the threshold are left out: the simulator does not get through a sort. An estimate, 5 to 35 %
optimistic where it could be compared with published times; never a measurement.
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from logitless import Objective, linear_grpo_loss
from logitless.bench import realistic
from logitless.head.pallas_tpu import kernels
from logitless.head.pallas_tpu.slabs import CHUNK, HARD_TILES, Moving, over_slabs
from logitless.head.pallas_tpu.sparse_columns import FEW, Active, tpu_rule
from logitless.head.pallas_tpu.tiles import MIB, Tiles, choose
from logitless.head.slabs import Known
from logitless.problem import Call, Head, Problem, Wanted
from logitless.stats import StatCotangents, TokenStats
from logitless.tpu import aot, cycles
from logitless.transform import LogitTransform

N, H, V = 8192, 4096, 151936
V6E_VMEM = 128 * MIB
HERE = Path(__file__).resolve()
RESULT = HERE.parent / "results" / "tpu_v6e_sparse_estimate.json"
EXACT = HERE.parent / "results" / "tpu_v6e_head_estimate.json"
TOLERANCE = 2.0**-8
STEP = 1024  # tokens and columns of the simulated backward step
ROWS = {"gather": (128, 384), "scatter": (128, 384)}
RULE = tpu_rule(V)


# -- columns -----------------------------------------------------------------------------------------------------------


def columns() -> dict[str, Any]:
    """Active columns and hard rows for every threshold, and the cheapest."""
    width, rows = 1026, 128
    tile = choose("forward", N, H, V, 2, "vh", V6E_VMEM).vocab
    h, w = realistic.realistic_head(N, width, V, 0, np.float32)
    y = np.asarray(realistic.sample_targets(jnp.asarray(h), jnp.asarray(w), 0, chunk=rows))
    starts = np.arange(0, V, tile)
    head = np.ascontiguousarray(w.T)
    best, lse = np.full(V, -np.inf, np.float32), np.zeros(N, np.float32)
    for i in range(0, N, rows):
        x = h[i : i + rows] @ head
        top = x.max(1, keepdims=True)
        sums = np.cumsum(np.add.reduceat(np.exp(x - top), starts, axis=1), 1)
        lse[i : i + rows] = top[:, 0] + np.log(sums[:, -1])
        own = x[np.arange(rows), y[i : i + rows]]
        bound = np.maximum(top + np.log(np.maximum(sums, 1e-30)), own[:, None])
        for j, start in enumerate(starts):
            part = slice(start, start + tile)
            best[part] = np.maximum(best[part], (x[:, part] - bound[:, j : j + 1]).max(0))
    best[y] = np.inf
    edges = np.log(TOLERANCE * np.array(RULE.thresholds))
    inactive = (best[:, None] <= edges).astype(np.float32)
    mass = np.concatenate([np.exp(h[i : i + rows] @ head - lse[i : i + rows, None]) @ inactive
                           for i in range(0, N, rows)])  # fmt: skip
    active, hard = V - inactive.sum(0), (mass > TOLERANCE).mean(0)
    cost = RULE.cost(active / V, hard)
    k = int(np.argmin(np.where(active <= RULE.most, cost, np.inf)))
    return {
        "tokens": N,
        "generator_width": width,
        "tolerance": TOLERANCE,
        "thresholds": [float(TOLERANCE * e) for e in RULE.thresholds],
        "active_columns": [int(a) for a in active],
        "hard_rows": [round(float(r), 4) for r in hard],
        "matmuls_after_the_forward_sweep": [round(float(c), 3) for c in cost],
        "chosen": {"active_columns": int(active[k]), "hard_rows": round(float(hard[k]), 4)},
    }


# -- compile -----------------------------------------------------------------------------------------------------------


def compiled(mode: str) -> dict[str, Any]:
    """The whole program for one chip, in this process."""

    def f(h: Any, w: Any, y: Any, a: Any, old: Any) -> Any:
        def loss(h: Any, w: Any) -> Any:
            return linear_grpo_loss(
                h, w, y, advantages=a, old_logp=old, objective=Objective(aggregation="dapo"), sparse_backward=mode
            )[0]

        return jax.value_and_grad(loss, (0, 1))(h, w)

    s = jax.ShapeDtypeStruct
    args = (
        s((1, N, H), jnp.bfloat16),
        s((V, H), jnp.bfloat16),
        s((1, N), jnp.int32),
        s((1,), jnp.float32),
        s((1, N), jnp.float32),
    )
    done = aot.compile_for(cycles.V6E.topology, f, *args)
    text = done.executable.as_text()
    return {
        "peak_bytes": done.peak_bytes,
        "argument_bytes": done.argument_bytes,
        "output_bytes": done.output_bytes,
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "logits_in_program": any(f"[{shape}]" in text for shape in (f"{N},{V}", f"{V},{N}", f"1,{N},{V}")),
        "compile_s": round(done.seconds),
    }


# -- simulate ----------------------------------------------------------------------------------------------------------


def program(kind: str, **sizes: Any) -> tuple[Any, ...]:
    """``(f, args[, donated])`` of one simulated part."""
    s = jax.ShapeDtypeStruct
    if kind in ("gather", "scatter"):
        rows, k = sizes["rows"], sizes["k"]
        flags: dict[str, Any] = dict(unique_indices=True, indices_are_sorted=True)
        if kind == "gather":

            def gather(w: Any, index: Any) -> Any:
                return w.at[index].get(mode="fill", fill_value=0, **flags)

            return gather, (s((rows, H), jnp.bfloat16), s((k,), jnp.int32))

        def scatter(w: Any, index: Any, own: Any) -> Any:
            return w.at[index].set(own, mode="drop", **flags)

        return scatter, (s((rows, H), jnp.bfloat16), s((k,), jnp.int32), s((k, H), jnp.bfloat16)), (0,)

    n, vocab = sizes["n"], sizes["vocab"]
    rows_of = (s((n, H), jnp.bfloat16), s((vocab, H), jnp.bfloat16), s((n,), jnp.int32), s((n,), jnp.float32))

    def problem(h: Any, w: Any, y: Any) -> Problem:
        return Problem(h, Head(w), y, LogitTransform(), call=Call("estimate", sizes.get("swept", vocab)))

    if kind == "slab":

        def slab(h: Any, w: Any, y: Any, row: Any, index: Any, count: Any) -> Any:
            rule = dataclasses.replace(tpu_rule(vocab), slab=STEP, most=STEP)
            m = Moving(problem(h, w, y), Known(_stats(row), _g(row)), count, n)
            return over_slabs(rule, Wanted(True, True), m, Active(index, count, jnp.asarray(False)))

        return slab, (*rows_of, s((STEP,), jnp.int32), s((), jnp.int32))
    tiles = Tiles(*sizes["tiles"])

    def kernel(h: Any, w: Any, y: Any, row: Any) -> Any:
        p = problem(h, w, y)
        if kind == "maxima":
            return kernels.token_stats_and_maxima(p, None, row, tiles)
        if kind == "stats":
            return kernels.token_stats(p, tiles=tiles)
        if kind == "dhidden":
            return kernels.dhidden(p, None, _stats(row), _g(row), tiles)[0]
        return kernels.dhead(p, None, _stats(row), _g(row), tiles=tiles).weight

    return kernel, rows_of


def _stats(row: Any) -> TokenStats:
    return TokenStats(**{f.name: row for f in dataclasses.fields(TokenStats)})


def _g(row: Any) -> StatCotangents:
    return StatCotangents(row, jnp.zeros_like(row), jnp.zeros_like(row))


def _cycles(**arguments: Any) -> dict[str, int]:
    for patience in (600, 1800):
        cycles.TIMEOUT_S = patience
        try:
            return cycles.simulate(f"{HERE}:program", arguments, partial=True)
        except subprocess.TimeoutExpired:
            print(f"{arguments}: not done after {patience} s", flush=True)
    raise RuntimeError(f"the simulator does not get through {arguments}")


def _kernel_cycles(**arguments: Any) -> int:
    return sum(c for name, c in _cycles(**arguments).items() if name.startswith("head_"))


def simulated() -> dict[str, Any]:
    """Cycles of the parts."""
    t = choose("forward", N, H, V, 2, "vh", V6E_VMEM)
    out: dict[str, Any] = {}
    for kind in ("maxima", "stats"):
        few, more = (
            _kernel_cycles(kind=kind, n=t.tokens, vocab=24 * t.vocab, swept=k * t.vocab,
                           tiles=[t.tokens, t.vocab, t.vmem_limit]) for k in (2, 4)
        )  # fmt: skip
        per_step = (more - few) / 2
        out[kind] = {"per_step": per_step, "per_tile": few - 2 * per_step, "tiles": [t.tokens, t.vocab]}
        print(kind, out[kind], flush=True)
    for kind, (few, more) in ROWS.items():
        rows = 8192 if kind == "scatter" else 40960  # larger than VMEM, or a gather would be made there
        a, b = (sum(_cycles(kind=kind, rows=rows, k=k).values()) for k in (few, more))
        per_row = (b - a) / (more - few)
        out[kind] = {"per_row_moved": per_row, "per_row_of_array": (a - few * per_row) / rows}
        print(kind, out[kind], flush=True)
    parts = _cycles(kind="slab", n=STEP, vocab=8192)
    outside = sum(c for name, c in parts.items() if "gather" in name or name.startswith("broadcast"))
    out["slab"] = {"per_step": sum(parts.values()) - outside, "tokens": STEP, "columns": STEP}
    print("slab", out["slab"], parts, flush=True)
    for kind in ("dhidden", "dhead"):
        t = choose(kind, N, H, V, 2, "vh", V6E_VMEM)  # type: ignore[arg-type]
        tiles = [HARD_TILES[kind], t.vocab, t.vmem_limit]
        if kind == "dhidden":
            few, more = (_kernel_cycles(kind=kind, n=tiles[0], vocab=24 * t.vocab, swept=k * t.vocab, tiles=tiles)
                         for k in (2, 4))  # fmt: skip
            per_step = (more - few) / 2
            per_tile = few - 2 * per_step
        else:
            few, steps, outer = (_kernel_cycles(kind=kind, n=a * tiles[0], vocab=b * t.vocab, tiles=tiles)
                                 for a, b in ((2, 2), (4, 2), (2, 4)))  # fmt: skip
            per_step = (steps - few) / 4
            per_tile = (outer - few) / 2 - 2 * per_step
        out[kind] = {"per_step": per_step, "per_tile": per_tile, "tiles": tiles[:2]}
        print(kind, out[kind], flush=True)
    return out


# -- the estimate ------------------------------------------------------------------------------------------------------


def estimate(sim: dict[str, Any], active: int, hard_rows: float) -> dict[str, Any]:
    """Milliseconds of the parts at the full shape."""

    def ms(total: float, moved: float) -> float:
        return 1e3 * cycles.seconds(cycles.V6E, total, moved)

    head, rows = 2 * V * H, N * H
    slab, chunk, few = RULE.slab, CHUNK, FEW
    slabs, chunks = math.ceil(active / slab), math.ceil(N / chunk)
    hard = math.ceil(hard_rows * N)

    def forward(kind: str) -> float:
        f = sim[kind]
        tokens, vocab = f["tiles"]
        return ms(N / tokens * (V / vocab * f["per_step"] + f["per_tile"]), N / tokens * head + 2 * rows)

    step = sim["slab"]["per_step"] * (chunk / sim["slab"]["tokens"]) * (slab / sim["slab"]["columns"])
    # h, x and dx (twice each), W, and dH and dW's slab read and written
    step_bytes = 2 * chunk * H + 12 * chunk * slab + 4 * slab * H + 8 * chunk * H + 8 * slab * H
    dh, dw = sim["dhidden"], sim["dhead"]
    dh_tiles, dw_tiles = (math.ceil(hard / k["tiles"][0]) for k in (dh, dw))
    parts = {
        "look": ms(0, head + 8 * 4 * few * V),
        "forward": forward("maxima"),
        "gathers of hidden states and of the targets' rows": ms(
            3 * N * sim["gather"]["per_row_moved"], 3 * 2 * 2 * rows
        ),
        "slabs: gathers": ms(slabs * slab * sim["gather"]["per_row_moved"], slabs * slab * H * 2 * 2),
        "slabs: steps": ms(slabs * chunks * step, slabs * chunks * step_bytes),
        "hard rows: dH": ms(dh_tiles * (V / dh["tiles"][1] * dh["per_step"] + dh["per_tile"]), dh_tiles * head),
        "hard rows: dW": ms(V / dw["tiles"][1] * (dw_tiles * dw["per_step"] + dw["per_tile"]), 2 * head),
        "scatter of dW's rows": ms(
            V * sim["scatter"]["per_row_of_array"] + slabs * slab * sim["scatter"]["per_row_moved"], 2 * head
        ),
        "passes over [N, H]": ms(0, 6 * 4 * rows),
    }
    return {
        "parts_ms": {k: round(v, 2) for k, v in parts.items()},
        "sparse_ms": round(sum(parts.values()), 1),
        "forward_without_maxima_ms": round(forward("stats"), 2),
    }


def main() -> None:
    """Write the record, all of it or the parts named on the command line."""
    if sys.argv[1:2] == ["--compile"]:
        print("\n" + json.dumps(compiled(sys.argv[2])))
        return
    wanted = sys.argv[1:] or ["columns", "compile", "simulate"]
    record = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    start = time.perf_counter()
    for part in wanted:
        if part == "columns":
            record["columns"] = columns()
        elif part == "compile":
            record["compiled"] = {}
            for name, mode in (("exact", "off"), ("sparse", "auto")):
                command = [sys.executable, str(HERE), "--compile", mode]
                done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800)
                record["compiled"][name] = json.loads(done.stdout.splitlines()[-1])
        elif part == "simulate":
            record["cycles"] = simulated()
        else:
            raise SystemExit(f"{part!r}: expected columns, compile or simulate")
        print(f"{part}: done after {time.perf_counter() - start:.0f} s", flush=True)
        if "cycles" in record and "columns" in record:
            chosen = record["columns"]["chosen"]
            found = estimate(record["cycles"], chosen["active_columns"], chosen["hard_rows"])
            exact = json.loads(EXACT.read_text())["estimated_ms"]["loss, dH and dW, vh"]
            sparse = found["sparse_ms"]
            record["estimated_ms"] = {
                "sparse": sparse, "exact": exact, "ratio": round(sparse / exact, 3), "parts": found["parts_ms"],
                "forward without maxima": found["forward_without_maxima_ms"],
            }  # fmt: skip
        header = {
            "what": "ESTIMATE by the compiler's cycle simulator and by bytes, not a measurement",
            "method": "benchmarks/tpu_sparse_estimate.py",
            "chip": "v6e, one chip",
            "shape": {"tokens": N, "hidden": H, "vocab": V, "dtype": "bfloat16"},
            "versions": aot.versions(),
        }
        record = {**header, **{k: v for k, v in record.items() if k not in header}}
        RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
