"""Estimated v6e time of the fused head's TPU kernels, without a TPU: benchmarks/results/tpu_v6e_head_estimate.json.

    python benchmarks/tpu_head_estimate.py                        (half an hour, up to 9 GB; needs libtpu)
    python benchmarks/tpu_head_estimate.py dhead:vh compile ...   (some of it; the rest of the record is kept)

T=8192 H=4096 V=151936, bfloat16, a ``[V, H]`` head.

Method. The simulator of the compiler (``logitless.lab.tpu.cycles``) runs a few grid steps of each kernel, with the
tiles that the full shape gets. Cycles are linear in the steps from two on (a loop of one step is compiled differently):

    forward   per step    = cycles(3 vocabulary tiles) - cycles(2)                           of one token tile
              per tile    = cycles(2) - 2 per step                         exposed fetch of h, the writing of E
    dhead     per step    = cycles(1 vocabulary tile, 3 token tiles) - cycles(1, 2)
              per tile    = cycles(2, 2) - cycles(1, 2) - 2 per step                                 W and dW
    total     = outer tiles (inner steps * per step + per tile)
    time      = max(total / 1.75 GHz, HBM bytes / 1.64 TB/s)            the simulator's DMAs are too fast

with inner steps counted in fractions of a tile for the static vocabulary tail. What XLA does around the kernels, and
what dW's sweep finds in order first (``order``), is simulated at one token tile and scaled by tokens. ``kept`` behind
the layout: exponentials of all tokens are kept (``memory_budget=``); the simulator takes no branch on what it reads,
so that ``kept.has_gradient`` is replaced by a constant. ``dense`` is the strong dense form, plain XLA, with logits of
the dtype behind it: cycles per column at 1024 tokens, and the bytes that the compiler counts at the full shape.
``compile`` compiles the whole programs and records their HBM beside the times.
An estimate, 5 to 35 % optimistic where it could be compared with published times; never a measurement.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import harness
from logitless.core.problem import Call, HeadArrays, Linear, Problem
from logitless.core.row_passes import rows_in_parts
from logitless.core.stats import LogitTransform, StatCotangents, TokenStats
from logitless.head.pallas_tpu import kept_exponentials as kept_module
from logitless.head.pallas_tpu import kernels
from logitless.head.pallas_tpu.backend import front
from logitless.head.pallas_tpu.dweight import coefficients
from logitless.head.pallas_tpu.kept_exponentials import Kept
from logitless.head.pallas_tpu.tiles import BLOCK, MIB, Tiles, choose
from logitless.lab.tools import child, result_files
from logitless.lab.tpu import aot, cycles, loss_program

N, H, V = 8192, 4096, 151936
BUDGETS = {"none kept": None, "kept in dW's place": 1 << 24, "all kept": 1 << 34}
V6E_VMEM = 128 * MIB
TILE = 1024
"""Tokens of a tile: exponentials are kept of whole ones."""
RESULT = "tpu_v6e_head_estimate.json"
HERE = str(Path(__file__).resolve())


def program(
    kernel: str, layout: str, n: int, swept: int, columns: int, tiles: list[int], kept: int = 0
) -> tuple[Any, tuple[Any, ...]]:
    """``(f, args)`` for one kernel over ``n`` tokens and ``swept`` of ``columns`` vocabulary columns;
    exponentials of ``kept`` tokens are kept."""
    if kernel == "dense":
        return loss_program.program("dense", "head", n, H, columns, logits_dtype=layout)
    t = Tiles(*tiles)
    call = Call("estimate", columns if kernel == "dhead" else swept)

    def f(h: Any, w: Any, y: Any, row: Any) -> Any:
        p = Problem(Linear(h, HeadArrays(w)), y, LogitTransform(), call=call)
        if kernel == "token_stats":
            return kernels.token_stats(p, tiles=t)
        if kernel == "token_stats_and_direction":
            stats, terms, exponentials = kernels.token_stats_and_terms(p, tiles=t, keep=kept)
            return stats, terms.times(p, row, h.dtype), exponentials
        stats = TokenStats(**{f.name: row for f in dataclasses.fields(TokenStats)})
        if kernel == "order":
            first = front(row != 0)
            assert first.order is not None
            table = coefficients(p, row != 0, stats, StatCotangents(row, row, row), n).T
            return kernels.hidden_in_order(first, p).h, rows_in_parts(table, first.order, kernels.PART)
        if not kept:
            return kernels.dhead(p, None, stats, StatCotangents(row, row, row), tiles=t)
        kept_module.has_gradient = lambda *_: True  # type: ignore[assignment]  # the simulator does not know what is read
        exponentials = jnp.zeros((columns, n), h.dtype) + row[0].astype(h.dtype)
        tops = jnp.zeros((n, -(-columns // BLOCK))) + row[:, None]
        found = Kept(exponentials, tops, row, BLOCK)
        return kernels.dhead_of_kept(p, None, stats, StatCotangents(row, 0 * row, 0 * row), found, t)

    return f, (
        jax.ShapeDtypeStruct((n, H), jnp.bfloat16),
        jax.ShapeDtypeStruct((columns, H), jnp.bfloat16),
        jax.ShapeDtypeStruct((n,), jnp.int32),
        jax.ShapeDtypeStruct((n,), jnp.float32),
    )


def dense_estimate(case: str) -> dict[str, Any]:
    """Estimated time of the strong dense form at the full shape, and its HBM."""
    dtype, few = case.split(":")[1], 1024

    def cycles_of(vocab: int) -> int:
        arguments = {"kernel": "dense", "layout": dtype, "n": few, "swept": vocab, "columns": vocab, "tiles": []}
        return sum(cycles.simulate(f"{HERE}:program", arguments, partial=True).values())

    per_column = (cycles_of(8192) - cycles_of(4096)) / 4096
    f, args = loss_program.program("dense", "head", N, H, V, logits_dtype=dtype)
    done = aot.compile_for(cycles.TOPOLOGY, f, *args)
    moved = done.executable.cost_analysis()["bytes accessed"]
    found = {"cycles_per_column_of_1024_tokens": per_column, "peak_bytes": done.peak_bytes}
    return {**row(case, N / few * V * per_column, moved, 3), **found}


def row(case: str, total: float, moved: float, matmuls: int) -> dict[str, Any]:
    """A case of the record, from its cycles, its bytes and its matmuls."""
    seconds = cycles.seconds(total, moved)
    return {
        "case": case, "libtpu": aot.versions()["libtpu"], "hbm_bytes": moved, "matmuls": matmuls,
        "estimated_ms": round(1e3 * seconds, 2),
        "share_of_918_tflops": round(matmuls * 2 * N * H * V / seconds / 918e12, 3),
    }  # fmt: skip


def kernel_cycles(**arguments: Any) -> tuple[int, int]:
    """``(cycles of the sweep, of everything else)``."""
    found = cycles.simulate(f"{HERE}:program", arguments, partial=True)
    own = [name for name in found if name.startswith("head_") and not name.startswith("head_rows")]
    assert own or arguments["kernel"] == "order", f"no profile of the kernel in {found}"
    inside = sum(found[name] for name in own)
    return inside, sum(found.values()) - inside


def estimate(case: str, so_far: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Estimated time of one kernel at the full shape."""
    if case.startswith("dense"):
        return dense_estimate(case)
    kernel, layout, *rest = case.split(":")
    kept = rest == ["kept"]
    t = choose("dhead" if kernel == "dhead" else "forward", N, (V, H), 2, layout, V6E_VMEM, kept)
    base: dict[str, Any] = {"kernel": kernel, "layout": layout, "tiles": [t.tokens, t.vocab, t.vmem_limit]}
    if kernel == "dhead":

        def run(vocab_tiles: int, token_tiles: int) -> int:
            v, tokens = vocab_tiles * t.vocab, token_tiles * t.tokens
            return kernel_cycles(**base, n=tokens, swept=v, columns=v, kept=tokens * kept)[0]

        few = run(1, 2)
        per_step = float(run(1, 3) - few)
        plain = so_far.get(case.replace(":kept", "")) if kept else None
        per_tile = plain["cycles_per_tile"] if plain else run(2, 2) - few - 2 * per_step
        outer, inner = V / t.vocab, N / t.tokens
        moved = outer * N * H * 2 + (1 if kept else 2) * V * H * 2
        outside = kernel_cycles(**dict(base, kernel="order"), n=TILE, swept=V, columns=V)[1] * N / TILE
    else:
        # The simulator wants an array of exponentials of whole token tiles, and there is room for H of them.
        some = 2 if kept and t.tokens < H and H % t.tokens else 1
        n = some * t.tokens
        runs = {k: kernel_cycles(**base, n=n, swept=k * t.vocab, columns=24 * t.vocab, kept=n * kept) for k in (2, 3)}
        per_step = (runs[3][0] - runs[2][0]) / some
        per_tile = runs[2][0] / some - 2 * per_step
        outer, inner = N / t.tokens, V / t.vocab
        outside = runs[3][1] / some * outer
        moved = outer * V * H * 2 + N * H * 2 + (4 * N * H if kernel.endswith("direction") else 0)
    moved += N * V * 2 if kept else 0
    total = outer * (inner * per_step + per_tile) + outside
    matmuls = 1 if kernel == "token_stats" or (kernel == "dhead" and kept) else 2
    found = {"token_tile": t.tokens, "vocab_tile": t.vocab, "cycles_per_step": per_step, "cycles_per_tile": per_tile}
    return {**row(case, total, moved, matmuls), **found, "cycles_outside_kernel": outside}


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of whole calls, from those of kernels; tokens whose exponentials are kept count for their share."""
    ms = {case: found["estimated_ms"] for case, found in rows.items()}
    total = {
        f"strong dense form, {d} logits, vh": ms[f"dense:{d}"] for d in ("bfloat16", "float32") if f"dense:{d}" in ms
    }
    if set(BOTH) <= set(ms):
        total["frozen head: loss and dH, vh"] = round(ms[BOTH[0]], 2)
    for words, kept in (("", 0), (f", {H} tokens kept in dW's place", H), (", all tokens kept", N)):
        if set(BOTH) | set(KEPT if kept else ()) <= set(ms):
            parts = (
                ms[a] * (1 - kept / N) + (ms[b] * kept / N if kept else 0) for a, b in zip(BOTH, KEPT, strict=True)
            )
            total[f"loss, dH and dW, vh{words}"] = round(sum(parts), 2)
    return total


def compiled(**options: Any) -> dict[str, Any]:
    """HBM of a whole program, loss, dH and dW, from a process of its own."""
    arguments = dict(form="fused", level="head", n=N, hidden=H, vocab=V, **options)
    command = ["-m", "logitless.lab.tpu.loss_program", cycles.TOPOLOGY, json.dumps(arguments)]
    return {**child.last_line(command, aot.ENVIRONMENT), "libtpu": aot.versions()["libtpu"]}


BOTH = ("token_stats_and_direction:vh", "dhead:vh")
KEPT = tuple(f"{case}:kept" for case in BOTH)
CASES = ("token_stats:vh", *BOTH, "dense:bfloat16", "dense:float32", "compile", *KEPT)


def main() -> None:
    """Write the record; only the cases that are named on the command line, if any are."""
    old = harness.read(RESULT)
    rows = {r["case"]: r for r in old.get("kernels", []) if r["case"] in CASES}
    programs = old.get("compiled", {})
    for case in sys.argv[1:] or CASES:
        if case == "compile":
            programs = {name: compiled(memory_budget=budget) for name, budget in BUDGETS.items()}
        else:
            rows[case] = estimate(case, rows)
            harness.say(rows[case])
        harness.write(RESULT, {
            "what": "ESTIMATE by the compiler's cycle simulator, not a measurement",
            "method": "benchmarks/tpu_head_estimate.py",
            "chip": "v6e, one chip",
            "shape": {"tokens": N, "hidden": H, "vocab": V, "dtype": "bfloat16"},
            "versions": aot.versions(),
            "commit": result_files.provenance()["commit"] or None,
            "estimated_ms": summary(rows),
            "compiled": programs,
            "kernels": list(rows.values()),
        })  # fmt: skip


if __name__ == "__main__":
    main()
