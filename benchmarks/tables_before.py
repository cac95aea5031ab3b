"""Tables of result files from before arms took turns: one median for each case, of one program after the other.

The scripts that made them are suites of ``logitless bench`` now, which the tables name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEFORE = (
    "Recorded before arms took turns: medians of programs that ran one after the other, which a machine's state moves",
    "by up to 10 %. The suite that measures this now:",
    "",
)


def read(name: str) -> Any:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def mib(n: float) -> str:
    return f"{n / 2**20:,.0f}"


def case_value(row: dict[str, Any]) -> str:
    return f"{row['median_ms']:.2f} | {mib(row['temporaries'])}" if "error" not in row else "failed |"


def gate_rows(gates: dict[str, Any]) -> list[str]:
    out = ["| bar | reached | limit | |", "|---|---|---|---|"]
    for name, gate in gates.items():
        met = "met" if gate["ok"] else "**missed**"
        out.append(f"| {name} | {gate['value']:.3f} | {gate['limit']:.3g} | {met} |")
    return [*out, ""]


def logits_tables() -> list[str]:
    result = read("gpu_h200_logits.json")
    if result is None:
        return []
    e = result["environment"]
    out = [
        "## Logits level on one GPU",
        "",
        f"{e.get('device', 'NVIDIA H200')}, jax {e.get('jax', '0.11.2')}. Loss and dlogits through "
        "`jax.value_and_grad(grpo_loss)`, bfloat16; at the true shapes, device time, median.",
        "",
        *BEFORE,
        "    logitless bench --suite gpu-logits --peers DIR --out results.json",
        "    python benchmarks/gpu_logits_tiles.py --out tiles.json",
        "",
    ]
    for job in ("main", "shapes", "liger", "tiles"):
        if job not in result:
            continue
        out += [f"### {job}", "", "| case | ms | temporaries MiB |", "|---|---|---|"]
        for name, row in result[job]["cases"].items():
            if "ms" in row:
                extra = row.get("temporaries_mib", row.get("extra_mib", ""))
                out.append(f"| {name} | {row['ms']:.3f} | {extra} |")
            elif "error" in row:
                out.append(f"| {name} | {row['error'][:90]} | |")
        out.append("")
    return [*out, *gate_rows({g["name"]: {**g, "ok": g["pass"]} for g in result["gates"]})]


def head_tables() -> list[str]:
    out = [
        "## The fused head on one GPU",
        "",
        "Loss, dH and dW, bfloat16 inputs, flat random logits. Device time (CUPTI), median; temporaries are the",
        "compiler's (`memory_analysis`). `strong` is a dense custom_vjp that keeps its logits and rounds dlogits;",
        "`naive` is log_softmax and a gather; `checkpointed` is chunks under `jax.checkpoint`. The peers in PyTorch",
        "ran on the same machine right after (CUDA events, their own inputs of the same distribution).",
        "",
        *BEFORE,
        "    logitless bench --suite gpu-head --peers DIR --out results.json",
        "",
    ]
    peers = read("gpu_h200_head_peers.json") or {"shapes": {}, "torch": ""}
    for file in ("gpu_h200_head.json", "gpu_h200_head_more_shapes.json"):
        result = read(file)
        if result is None:
            continue
        e = result["environment"]
        out += [f"`benchmarks/results/{file}`: {e['device']}, jax {e['jax']}; {result['note']}.", ""]
        for shape, part in result["shapes"].items():
            tokens, hidden, vocab = shape.split(",")
            out += [f"### T={tokens} H={hidden} V={vocab} ({file})", ""]
            out += ["| case | ms | temporaries MiB |", "|---|---|---|"]
            out += [f"| {name} | {case_value(row)} |" for name, row in part["cases"].items()]
            for name, row in peers["shapes"].get(shape, {}).items():
                out.append(f"| {name} (torch {peers['torch']}) | {case_value(row)} |")
            out += ["", *gate_rows(part["gates"])]
    forward = read("gpu_h200_head_forward.json")
    if forward is not None:
        out += [
            "### Forward statistics by one matmul without logits",
            "",
            "    python benchmarks/gpu_head_forward.py --out results.json",
            "",
            "| case | ms | temporaries MiB |",
            "|---|---|---|",
        ]
        for name, row in forward["rule"]["times"].items():
            out.append(f"| {name} | {row['ms']:.2f} | {row['temporaries_mib']:.1f} |")
        out.append("")
    return out


def sparse_tables() -> list[str]:
    result = read("gpu_h200_sparse.json")
    if result is None:
        return []
    e = result["environment"]
    out = [
        "## The sparse backward on one GPU",
        "",
        f"{e['device']}, jax {e['jax']}; inputs of a trained policy's kind (`logitless.lab.bench.realistic`),",
        'tolerance "auto". `exact` is the fused head without it, `flat` flat random logits, `rl` a real RL batch.',
        f"Note: {result['note']}",
        "",
        *BEFORE,
        "    logitless bench --suite gpu-sparse --peers DIR --out results.json",
        "",
    ]
    for shape, run in result["shapes"].items():
        tokens, hidden, vocab = shape.split(",")
        out += [f"### Sparse, T={tokens} H={hidden} V={vocab}", ""]
        out += ["| case | ms | by the host's clock | temporaries MiB |", "|---|---|---|---|"]
        for name, row in run["cases"].items():
            wall = f"{row['wall_ms']:.2f}" if "wall_ms" in row else ""
            out.append(f"| {name} | {row['median_ms']:.2f} | {wall} | {mib(row['temporaries'])} |")
        out += ["", *gate_rows(run["gates"])]
    out += ["Errors against float64 at 256 tokens, V=16384 (relative Frobenius norms):", "", "| | |", "|---|---|"]
    return [*out, *(f"| {name} | {value:.2e} |" for name, value in result["errors"].items()), ""]
