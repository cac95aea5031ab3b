"""Estimated v6e time of the fused head's TPU kernels, without a TPU: benchmarks/results/tpu_v6e_head_estimate.json.

    python benchmarks/tpu_head_estimate.py                        (half an hour, up to 9 GB; needs libtpu)
    python benchmarks/tpu_head_estimate.py dhead:vh compile ...   (some of it; the rest of the record is kept)

T=8192 H=4096 V=151936, and the two other shapes of ``SHAPES``, bfloat16.

Method. The simulator of the compiler (``logitless.lab.tpu.cycles``) runs a few grid steps of each kernel, with the
tiles that the full shape gets. Cycles are linear in the steps from two on (a loop of one step is compiled differently):

    forward   per step    = cycles(3 vocabulary tiles) - cycles(2)                           of one token tile
              per tile    = cycles(2) - 2 per step                         exposed fetch of h, the writing of E
    dhead     per step    = cycles(1 vocabulary tile, 3 token tiles) - cycles(1, 2)
              per tile    = cycles(2, 2) - cycles(1, 2) - 2 per step                                 W and dW
    total     = outer tiles (inner steps * per step + per tile)
    time      = max(total / 1.75 GHz, HBM bytes / 1.64 TB/s)            the simulator's DMAs are too fast

with inner steps counted in fractions of a tile for the static vocabulary tail. What XLA does around the kernels, and
what dW's sweep finds in order first (``order``), is simulated at one token tile and scaled by tokens. Of a [H, V]
head only dhead is simulated. ``kept`` behind the layout: exponentials of all tokens are kept (``memory_budget=``);
the simulator takes no branch on what it reads, so that ``kept.has_gradient`` is replaced by a constant. ``dense`` is
the strong dense form, plain XLA, with logits of the dtype behind it: cycles per column at 1024 tokens, and the bytes
that the compiler counts at the full shape. ``compile`` compiles the whole programs and records their HBM beside the
times.
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

V = 151936
SHAPES = {"": (8192, 4096), "H=1536": (8192, 1536), "H=896": (32768, 896)}
"""Tokens and hidden size, by what a case is called after ``@``."""
BUDGETS = {"none kept": None, "kept in dW's place": 1 << 24, "all kept": 1 << 34}
V6E_VMEM = 128 * MIB
TILE = 1024
"""Tokens of a tile: exponentials are kept of whole ones."""
RESULT = Path(__file__).parent / "results" / "tpu_v6e_head_estimate.json"
HERE = str(Path(__file__).resolve())


def program(
    kernel: str, layout: str, n: int, swept: int, columns: int, tiles: list[int], hidden: int, kept: int = 0
) -> tuple[Any, tuple[Any, ...]]:
    """``(f, args)`` for one kernel over ``n`` tokens and ``swept`` of ``columns`` vocabulary columns;
    exponentials of ``kept`` tokens are kept."""
    if kernel == "dense":
        return loss_program.program("dense", "head", n, hidden, columns, logits_dtype=layout)
    t = Tiles(*tiles)
    call = Call("estimate", columns if kernel == "dhead" else swept)

    def f(h: Any, w: Any, y: Any, row: Any) -> Any:
        p = Problem(Linear(h, HeadArrays(w, layout=layout)), y, LogitTransform(), call=call)  # type: ignore[arg-type]
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
        exponentials = jnp.zeros((columns, n) if layout == "vh" else (n, columns), h.dtype) + row[0].astype(h.dtype)
        tops = jnp.zeros((n, -(-columns // BLOCK))) + row[:, None]
        found = Kept(exponentials, tops, row, BLOCK)
        return kernels.dhead_of_kept(p, None, stats, StatCotangents(row, 0 * row, 0 * row), found, t)

    shape = (columns, hidden) if layout == "vh" else (hidden, columns)
    return f, (
        jax.ShapeDtypeStruct((n, hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        jax.ShapeDtypeStruct((n,), jnp.int32),
        jax.ShapeDtypeStruct((n,), jnp.float32),
    )


def dense_estimate(case: str) -> dict[str, Any]:
    """Estimated time of the strong dense form at a full shape, and its HBM."""
    what, _, shape = case.partition("@")
    dtype, (n, hidden), few = what.split(":")[1], SHAPES[shape], 1024

    def cycles_of(vocab: int) -> int:
        sizes = {"n": few, "swept": vocab, "columns": vocab, "tiles": [], "hidden": hidden}
        arguments = {"kernel": "dense", "layout": dtype, **sizes}
        return sum(cycles.simulate(f"{HERE}:program", arguments, partial=True).values())

    per_column = (cycles_of(8192) - cycles_of(4096)) / 4096
    f, args = loss_program.program("dense", "head", n, hidden, V, logits_dtype=dtype)
    done = aot.compile_for(cycles.V6E.topology, f, *args)
    moved = done.executable.cost_analysis()["bytes accessed"]
    found = {"cycles_per_column_of_1024_tokens": per_column, "peak_bytes": done.peak_bytes}
    return {**row(case, n / few * V * per_column, moved, 3), **found}


def row(case: str, total: float, moved: float, matmuls: int) -> dict[str, Any]:
    """A case of the record, from its cycles, its bytes and its matmuls."""
    n, hidden = SHAPES[case.partition("@")[2]]
    seconds = cycles.seconds(cycles.V6E, total, moved)
    return {
        "case": case, "tokens": n, "hidden": hidden, "libtpu": aot.versions()["libtpu"], "hbm_bytes": moved,
        "matmuls": matmuls, "estimated_ms": round(1e3 * seconds, 2),
        "share_of_918_tflops": round(matmuls * 2 * n * hidden * V / seconds / 918e12, 3),
    }  # fmt: skip


def kernel_cycles(**arguments: Any) -> tuple[int, int]:
    """``(cycles of the sweep, of everything else)``."""
    found = cycles.simulate(f"{HERE}:program", arguments, partial=True)
    own = [name for name in found if name.startswith("head_") and not name.startswith("head_rows")]
    assert own or arguments["kernel"] == "order", f"no profile of the kernel in {found}"
    inside = sum(found[name] for name in own)
    return inside, sum(found.values()) - inside


def estimate(case: str, so_far: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Estimated time of one kernel at a full shape."""
    if case.startswith("dense"):
        return dense_estimate(case)
    what, _, shape = case.partition("@")
    kernel, layout, *rest = what.split(":")
    kept, (n, hidden) = rest == ["kept"], SHAPES[shape]
    t = choose("dhead" if kernel == "dhead" else "forward", n, (V, hidden), 2, layout, V6E_VMEM, kept)
    base: dict[str, Any] = {
        "kernel": kernel, "layout": layout, "tiles": [t.tokens, t.vocab, t.vmem_limit], "hidden": hidden,
    }  # fmt: skip
    if kernel == "dhead":

        def run(vocab_tiles: int, token_tiles: int) -> int:
            v, tokens = vocab_tiles * t.vocab, token_tiles * t.tokens
            return kernel_cycles(**base, n=tokens, swept=v, columns=v, kept=tokens * kept)[0]

        few = run(1, 2)
        per_step = float(run(1, 3) - few)
        plain = so_far.get(case.replace(":kept", "")) if kept else None
        per_tile = plain["cycles_per_tile"] if plain else run(2, 2) - few - 2 * per_step
        outer, inner = V / t.vocab, n / t.tokens
        moved = outer * n * hidden * 2 * (1 if layout == "vh" else 2) + (1 if kept else 2) * V * hidden * 2
        outside = kernel_cycles(**dict(base, kernel="order"), n=TILE, swept=V, columns=V)[1] * n / TILE
    else:
        # The simulator wants an array of exponentials of whole token tiles, and there is room for `hidden` of them.
        some = 2 if kept and hidden > t.tokens and hidden % t.tokens else 1
        runs = {
            k: kernel_cycles(
                **base, n=some * t.tokens, swept=k * t.vocab, columns=24 * t.vocab, kept=some * t.tokens * kept
            )
            for k in (2, 3)
        }
        per_step = (runs[3][0] - runs[2][0]) / some
        per_tile = runs[2][0] / some - 2 * per_step
        outer, inner = n / t.tokens, V / t.vocab
        outside = runs[3][1] / some * outer
        moved = outer * V * hidden * 2 + n * hidden * 2 + (4 * n * hidden if kernel.endswith("direction") else 0)
    moved += n * V * 2 if kept else 0
    total = outer * (inner * per_step + per_tile) + outside
    matmuls = 1 if kernel == "token_stats" or (kernel == "dhead" and kept) else 2
    found = {"token_tile": t.tokens, "vocab_tile": t.vocab, "cycles_per_step": per_step, "cycles_per_tile": per_tile}
    return {**row(case, total, moved, matmuls), **found, "cycles_outside_kernel": outside}


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of whole calls, from those of kernels."""
    total: dict[str, float] = {}
    for shape, (n, hidden) in SHAPES.items():
        for layout in ("vh", "hv"):

            def ms(kernel: str, kept: int, at: str = f":{layout}", shape: str = shape, n: int = n) -> float | None:
                """With ``kept`` tokens; ``None`` where a part was not estimated."""
                found = [rows.get(f"{kernel}{at}{k}@{shape}".rstrip("@")) for k in ("", ":kept")]
                if kernel != "dhead" and found[1] is None:
                    found[1] = found[0]
                shares = (1 - kept / n, kept / n)
                if any(r is None for r, share in zip(found, shares, strict=True) if share):
                    return None
                return sum(r["estimated_ms"] * share for r, share in zip(found, shares, strict=True) if r is not None)

            name = f"{layout}, {shape}".rstrip(", ")
            for dtype in ("bfloat16", "float32") if layout == "vh" else ():
                strong = rows.get(f"dense:{dtype}@{shape}".rstrip("@"))
                if strong is not None:
                    total[f"strong dense form, {dtype} logits, {name}"] = strong["estimated_ms"]
            place = hidden // TILE * TILE
            for words, kept in (("", 0), (f", {place} tokens kept in dW's place", place), (", all tokens kept", n)):
                if words and not kept:
                    continue
                forward, backward = ms("token_stats_and_direction", kept), ms("dhead", kept)
                if forward is not None and not kept:
                    total[f"frozen head: loss and dH, {name}"] = round(forward, 2)
                if forward is not None and backward is not None:
                    total[f"loss, dH and dW, {name}{words}"] = round(forward + backward, 2)
    return total


def compiled(shape: str, budget: int | None) -> dict[str, Any]:
    """HBM of a whole program, loss, dH and dW, from a process of its own."""
    n, hidden = SHAPES[shape]
    arguments = dict(form="fused", level="head", n=n, hidden=hidden, vocab=V, memory_budget=budget)
    command = ["-m", "logitless.lab.tpu.loss_program", cycles.V6E.topology, json.dumps(arguments)]
    return {**child.last_line(command, aot.ENVIRONMENT), "libtpu": aot.versions()["libtpu"]}


BOTH, DENSE = ("token_stats_and_direction:vh", "dhead:vh"), ("dense:bfloat16", "dense:float32", "compile")
KEPT = tuple(f"{case}:kept" for case in BOTH)
EVERYWHERE = ("token_stats:vh", *BOTH, *DENSE)
CASES = [*EVERYWHERE, *KEPT, "dhead:hv", *(f"{case}@H=1536" for case in (*EVERYWHERE, *KEPT))]
CASES += [f"{case}@H=896" for case in EVERYWHERE]


def main() -> None:
    """Write the record; only the cases that are named on the command line, if any are."""
    old = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    rows = {r["case"]: r for r in old.get("kernels", []) if "case" in r}
    programs = old.get("compiled", {})
    for case in sys.argv[1:] or CASES:
        if case.startswith("compile"):
            shape = case.partition("@")[2]
            for name, budget in BUDGETS.items():
                programs[f"{name}, {shape}".rstrip(", ")] = compiled(shape, budget)
        else:
            rows[case] = estimate(case, rows)
            print(json.dumps(rows[case]), flush=True)
        record = {
            "what": "ESTIMATE by the compiler's cycle simulator, not a measurement",
            "method": "benchmarks/tpu_head_estimate.py",
            "chip": "v6e, one chip",
            "shape": {"tokens": SHAPES[""][0], "hidden": SHAPES[""][1], "vocab": V, "dtype": "bfloat16"},
            "versions": aot.versions(),
            "commit": result_files.provenance()["commit"] or None,
            "estimated_ms": summary(rows),
            "compiled": programs,
            "kernels": list(rows.values()),
        }
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
