"""Estimated v6e time of the fused head's TPU kernels, without a TPU: benchmarks/results/tpu_v6e_head_estimate.json.

    python benchmarks/tpu_head_estimate.py            (a few minutes; needs libtpu)

Method. The simulator of the compiler (``logitless.tpu.cycles``) runs a few grid steps of each kernel, with the tiles
that the full shape gets. Cycles are linear in the steps from two on (a loop of one step is compiled differently):

    per step    = (cycles(4 inner steps) - cycles(2 inner steps)) / 2
    per tile    = cycles(1 outer tile, 2 steps) - 2 per step              forward: exposed fetch of h, write of E
                = (cycles(4 outer tiles, 2 steps) - cycles(2, 2)) / 2 - 2 per step               dhead: W and dW
    total       = outer tiles (inner steps * per step + per tile)
    time        = max(total / 1.75 GHz, HBM bytes / 1.64 TB/s)            the simulator's DMAs are too fast

with inner steps counted in fractions of a tile for the static vocabulary tail. The XLA operations around the forward
kernel (gather of the target rows, the direction from its parts) are simulated at one token tile and scaled by tokens.
For a [H, V] head only dhead is simulated: the simulator does not get through the sort by targets. Its forward kernel
was simulated without that at the same cycles per step as [V, H] (72077 against 72120), and the column kernel beside it
reads the head once, 0.8 ms.
With ``kept`` behind the layout the forward kernel keeps the exponentials of all tokens (``memory_budget=``). dW from
kept exponentials is not estimated: the simulator takes no branch on a traced number, and sees none of its matmul.
The vocabulary is swept over part of a head that is too large for VMEM, so that it is read from HBM as in the real
program. An estimate, 5 to 35 % optimistic where it could be compared with published times; never a measurement.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from logitless.head.pallas_tpu import kernels
from logitless.head.pallas_tpu.tiles import MIB, Tiles, choose
from logitless.problem import Call, Head, Problem
from logitless.stats import StatCotangents, TokenStats
from logitless.tpu import aot, cycles
from logitless.transform import LogitTransform

N, H, V = 8192, 4096, 151936
V6E_VMEM = 128 * MIB
RESULT = Path(__file__).parent / "results" / "tpu_v6e_head_estimate.json"
HERE = str(Path(__file__).resolve())


def program(
    kernel: str, layout: str, n: int, swept: int, columns: int, tiles: list[int], kept_tile: int = 0
) -> tuple[Any, tuple[Any, ...]]:
    """``(f, args)`` for one kernel over ``n`` tokens and ``swept`` of ``columns`` vocabulary columns; with
    ``kept_tile`` all exponentials are kept."""
    t = Tiles(*tiles)
    call = Call("estimate", columns if kernel == "dhead" else swept)

    def f(h: Any, w: Any, y: Any, row: Any) -> Any:
        p = Problem(h, Head(w, layout=layout), y, LogitTransform(), call=call)  # type: ignore[arg-type]
        if kernel == "token_stats":
            return kernels.token_stats(p, tiles=t)
        if kernel == "token_stats_and_direction":
            stats, (direction, _), kept = kernels.token_stats_and_direction(p, tiles=t, keep=n if kept_tile else 0)
            return stats, (row[:, None] * direction).astype(h.dtype), kept
        stats = TokenStats(**{f.name: row for f in dataclasses.fields(TokenStats)})
        return kernels.dhead(p, None, stats, StatCotangents(row, row, row), tiles=t)

    shape = (columns, H) if layout == "vh" else (H, columns)
    return f, (
        jax.ShapeDtypeStruct((n, H), jnp.bfloat16),
        jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        jax.ShapeDtypeStruct((n,), jnp.int32),
        jax.ShapeDtypeStruct((n,), jnp.float32),
    )


def kernel_cycles(**arguments: Any) -> tuple[int, int]:
    """``(cycles of the kernel, cycles of everything else)``."""
    found = cycles.simulate(f"{HERE}:program", arguments, partial=True)
    assert any(name.startswith("head_") for name in found), f"no profile of the kernel in {found}"
    inside = sum(c for name, c in found.items() if name.startswith("head_"))
    return inside, sum(found.values()) - inside


def estimate(kernel: str, layout: str, kept: str = "") -> dict[str, Any]:
    """Estimated time of one kernel at the full shape."""
    if kept and kernel == "dhead":
        raise SystemExit(
            "dhead with kept exponentials: the simulator takes no branch on a traced number, and sees no matmul"
        )
    t = choose("dhead" if kernel == "dhead" else "forward", N, H, V, 2, layout, V6E_VMEM, bool(kept))
    base: dict[str, Any] = {"kernel": kernel, "layout": layout, "tiles": [t.tokens, t.vocab, t.vmem_limit]}
    if kept:
        base["kept_tile"] = choose("forward", N, H, V, 2, layout, V6E_VMEM, True).vocab
    outside = 0.0
    if kernel == "dhead":

        def run(vocab_tiles: int, token_tiles: int) -> int:
            v = vocab_tiles * t.vocab
            return kernel_cycles(**base, n=token_tiles * t.tokens, swept=v, columns=v)[0]

        few = run(2, 2)
        per_step = (run(2, 4) - few) / 4  # two vocabulary tiles, two more steps each
        per_tile = (run(4, 2) - few) / 2 - 2 * per_step
        outer, inner = V / t.vocab, N / t.tokens
        moved = outer * N * H * 2 * (1 if layout == "vh" else 2) + 2 * V * H * 2
    else:
        runs = {k: kernel_cycles(**base, n=t.tokens, swept=k * t.vocab, columns=24 * t.vocab) for k in (2, 4)}
        per_step = (runs[4][0] - runs[2][0]) / 2
        per_tile = runs[2][0] - 2 * per_step
        outer, inner = N / t.tokens, V / t.vocab
        outside = runs[4][1] * outer
        moved = outer * V * H * 2 + N * H * 2 + (4 * N * H if kernel.endswith("direction") else 0)
    moved += N * V * 2 if kept else 0
    total = outer * (inner * per_step + per_tile) + outside
    matmuls = 1 if kernel == "token_stats" else 2
    seconds = cycles.seconds(cycles.V6E, total, moved)
    return {
        "kernel": kernel,
        "layout": layout,
        "kept": bool(kept),
        "libtpu": aot.versions()["libtpu"],
        "token_tile": t.tokens,
        "vocab_tile": t.vocab,
        "cycles_per_step": per_step,
        "cycles_per_tile": per_tile,
        "cycles_outside_kernel": outside,
        "hbm_bytes": moved,
        "matmuls": matmuls,
        "estimated_ms": round(1e3 * seconds, 2),
        "share_of_918_tflops": round(matmuls * 2 * N * H * V / seconds / 918e12, 3),
    }


def main() -> None:
    """Write the record; cases already given on the command line (``kernel:layout``) only, if any."""
    wanted = sys.argv[1:] or [
        "token_stats:vh",
        "token_stats_and_direction:vh",
        "dhead:vh",
        "dhead:hv",
        "token_stats_and_direction:vh:kept",
    ]
    rows = (
        {f"{r['kernel']}:{r['layout']}{':kept' * r['kept']}": r for r in json.loads(RESULT.read_text())["kernels"]}
        if RESULT.exists()
        else {}
    )
    for case in wanted:
        rows[case] = estimate(*case.split(":"))
        print(json.dumps(rows[case]), flush=True)
        total = {}
        for layout in ("vh", "hv"):
            forward, backward = rows.get(f"token_stats_and_direction:{layout}"), rows.get(f"dhead:{layout}")
            if forward:
                total[f"frozen head: loss and dH, {layout}"] = forward["estimated_ms"]
            if forward and backward:
                total[f"loss, dH and dW, {layout}"] = round(forward["estimated_ms"] + backward["estimated_ms"], 2)
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        record = {
            "what": "ESTIMATE by the compiler's cycle simulator, not a measurement",
            "method": "benchmarks/tpu_head_estimate.py",
            "chip": "v6e, one chip",
            "shape": {"tokens": N, "hidden": H, "vocab": V, "dtype": "bfloat16"},
            "versions": aot.versions(),
            "commit": commit or None,
            "estimated_ms": total,
            "kernels": list(rows.values()),
        }
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
