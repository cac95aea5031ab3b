"""Writes docs/benchmarks.md, and the table of README.md, from benchmarks/results: ``python benchmarks/tables.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- from h200_suite.json: begin -->\n", "<!-- end -->\n"

README_CASES = {
    "linear_bpd1_t8192_h4096_vocab151936": "8,192 tokens, H=4096, V=151936, bf16 logits",
    "linear_bpd1_t8192_h4096_vocab151936_f32logits": "the same, f32 logits",
    "linear_bpd1_t8192_h4096_vocab151936, a quarter": "the same, bf16 logits, a quarter of the tokens live",
    "qwen2.5-7b, RL batch": "Qwen2.5-7B, 24,576 tokens of an RL batch",
    "qwen2.5-1.5b, 32k context": "Qwen2.5-1.5B, 32k context, f32 logits",
    "qwen2.5-1.5b, 128k context": "Qwen2.5-1.5B, 128k context, f32 logits",
    "logits_bpd1_t4096_vocab151936": "given logits (1, 4096, 151936), bf16",
}
"""Cases of the suite that README.md shows, and what it calls them."""


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


def head_tables() -> list[str]:
    out = [
        "## The fused head on one GPU",
        "",
        "Loss, dH and dW, bfloat16 inputs, flat random logits. Device time (CUPTI), median; temporaries are the",
        "compiler's (`memory_analysis`). `strong` is a dense custom_vjp that keeps its logits and rounds dlogits;",
        "`naive` is log_softmax and a gather; `checkpointed` is chunks under `jax.checkpoint`. The peers in PyTorch",
        "ran on the same machine right after (CUDA events, their own inputs of the same distribution).",
        "",
        "    python benchmarks/gpu_head.py --out results.json",
        "    python benchmarks/gpu_head_peers.py --out peers.json --shape 8192,4096,151936 --shape ...",
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
        f"{e['device']}, jax {e['jax']}; inputs of a trained policy's kind (`logitless.bench.realistic`),",
        'tolerance "auto". `exact` is the fused head without it, `flat` flat random logits, `rl` a real RL batch.',
        f"Note: {result['note']}",
        "",
        "    python benchmarks/gpu_sparse.py --out results.json",
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


def training_tables() -> list[str]:
    out: list[str] = []
    for file, case, title in (
        ("train_h200_random.json", "random", "Training, Qwen2.5-1.5B shape, random weights"),
        ("train_h200_smollm2_arithmetic.json", "arithmetic", "Training, SmolLM2-135M-Instruct on sums below 100"),
        ("train_h200_abc.json", "abc", "Training, the same with three losses: dense, fused exact, fused sparse"),
    ):
        result = read(file)
        if result is None:
            continue
        out += [
            f"## {title}",
            "",
            f"`benchmarks/results/{file}`; {'; '.join(_tests(result))}.",
            "",
            f"    python benchmarks/train_h200.py {case} --out results",
            "",
            "| | " + " | ".join(f"{k} ({a['summary']['loss_backend']})" for k, a in result["arms"].items()) + " |",
            "|---|" + "---|" * len(result["arms"]),
        ]
        for key, label, scale in (
            ("steps", "steps", 1),
            ("train/reward_first10", "sampled reward, first 10 steps", 1),
            ("train/reward_last10", "sampled reward, last 10 steps", 1),
            ("eval/last", "held-out reward at the end", 1),
            ("time/train/step_avg_last10_s", "step, mean of the last 10 (s)", 1),
            ("time/update_s/last10", "update phase, last 10 (s)", 1),
            ("memory/device_peak_bytes", "device peak (GiB)", 2**30),
            ("train/kl_last10", "KL, last 10 steps", 1),
            ("train/left_out_mass_last10", "left-out mass, last 10 steps", 1),
            ("train/left_out_mass_max", "left-out mass of a token, largest", 1),
        ):
            values = [a["summary"].get(key) for a in result["arms"].values()]
            if any(v is not None for v in values):
                cells = ("" if v is None else f"{v / scale:.4g}" for v in values)
                out.append(f"| {label} | {' | '.join(cells)} |")
        out.append("")
    return [*out, *largest_table()]


def _tests(result: dict[str, Any]) -> list[str]:
    """What was compared; a file with more than two arms says it for each but the first."""
    agreement = result["agreement"]
    if "test" in agreement:
        return [agreement["test"]]
    return [f"{name}: {own['test']}" for name, own in agreement.items()]


def largest_table() -> list[str]:
    result = read("train_h200_largest.json")
    if result is None:
        return []
    out = [
        "## Training, how long a completion fits",
        "",
        f"{result['environment']['device']}, {result['rows']} rows of {result['prompt_tokens']} prompt tokens and",
        f"these completions; {result['config']}. {result['note']}",
        "",
        "    python benchmarks/train_h200.py largest --out results",
        "",
        "| arm | completion tokens a row | | device peak (GiB) | update (s) |",
        "|---|---|---|---|---|",
    ]
    for arm, contexts in result["arms"].items():
        for context, row in contexts.items():
            said = "fits" if row["fits"] else row["error"]
            peak, update = (row.get(k) for k in ("peak_bytes", "update_s"))
            numbers = f"{peak / 2**30:.1f} | {update:.2f}" if peak and update else " | "
            out.append(f"| {arm} | {int(context):,} | {said} | {numbers} |")
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
        "    python benchmarks/gpu_logits.py --out benchmarks/results/gpu_h200_logits.json --liger DIR",
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


def tpu_tables() -> list[str]:
    out: list[str] = []
    for name, title in (
        ("tpu_v6e_logits_estimate.json", "Logits level on a TPU v6e (estimate)"),
        ("tpu_v6e_head_estimate.json", "The fused head on a TPU v6e (estimate)"),
        ("tpu_v6e_sparse_estimate.json", "The sparse backward on a TPU v6e (estimate)"),
    ):
        result = read(name)
        if result is None:
            continue
        script = name.replace("v6e_", "").replace(".json", ".py")
        out += [f"## {title}", "", str(result.get("what", "")), "", f"    python benchmarks/{script}", ""]
        out += ["```", json.dumps({k: v for k, v in result.items() if k != "what"}, indent=1), "```", ""]
    return out


def sharded_tables() -> list[str]:
    result = read("tpu_sharded.json")
    if result is None:
        return []
    out = [
        "## Many chips, ahead of time",
        "",
        f"{result['what']}. {result['tokens_per_chip']} tokens a chip, H={result['hidden']}, V={result['vocab']}, "
        f"libtpu {result['versions']['libtpu']}.",
        "",
        f"    {result['command']}",
        "",
        "| slice | layout | program | peak MiB a chip |",
        "|---|---|---|---|",
    ]
    for slice_name, layouts in result["slices"].items():
        for layout, programs in layouts.items():
            for name, row in programs.items():
                if isinstance(row, dict) and "peak_bytes" in row:
                    out.append(f"| {slice_name} | {layout} | {name} | {mib(row['peak_bytes'])} |")
    return [*out, ""]


def cpu_tables() -> list[str]:
    path = RESULTS / "cpu_head.jsonl"
    if not path.exists():
        return []
    out = [
        "## The fused head on a CPU",
        "",
        "Two cores, float32, the host's clock.",
        "",
        "    logitless bench --config configs/bench/cpu_head_qwen2.5-0.5b.yaml out=benchmarks/results/cpu_head.jsonl",
        "",
        "| case | arm | ms | temporaries MiB |",
        "|---|---|---|---|",
    ]
    for line in path.read_text().splitlines():
        record = json.loads(line)
        for arm, row in record["arms"].items():
            memory = row["mem/compiler"]["temporaries"]
            out.append(f"| {record['name']} | {arm} | {row['median_ms']:.0f} | {memory / 2**20:,.1f} |")
    return [*out, ""]


def suite_tables() -> list[str]:
    out: list[str] = []
    for suite, title in (("h200", "The suite on one H200"), ("cpu", "The suite on a CPU")):
        result = read(f"{suite}_suite.json")
        if result is None:
            continue
        rows = [(r, arm, row) for r in result["records"] for arm, row in r["arms"].items()]
        where = next((row["environment"] for _, _, row in rows if "error" not in row), {"device": "", "jax": ""})
        out += [
            f"## {title}",
            "",
            f"{where['device']}, jax {where['jax']}, {result['seconds']:.0f} s in all. Each arm in a fresh process,",
            "inputs made on the host; `naive` and `strong` are dense. Temporaries on the device are its allocator's",
            "peak less inputs and outputs (an upper bound, marked +, where autotuning had reached that peak before).",
            "The roofline is that of three matmuls over live tokens, or of one read and one write of the logits.",
            "",
            f"    logitless bench --suite {suite} --out benchmarks/results/{suite}_suite.json",
            "",
            "| case | arm | ms | p10 to p90 | temporaries MiB: compiler | device | TFLOP/s | GB/s | x roofline |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for r, arm, row in rows:
            if "error" in row:
                out.append(f"| {r['name']} | {arm} | {row['error'][:90]} | | | | | | |")
                continue
            device = row["mem/device"]
            on_device = "" if not device else mib(device["temporaries"]) + ("+" if device["from_compile"] else "")
            ratio = "" if not row["roofline_ratio"] else f"{row['roofline_ratio']:.2f}"
            out.append(
                f"| {r['name']} | {arm} | {row['median_ms']:.2f} | {row['p10_ms']:.2f} to {row['p90_ms']:.2f} | "
                f"{mib(row['mem/compiler']['temporaries'])} | {on_device} | {row['tflops']:.1f} | "
                f"{row['gb_per_s']:,.0f} | {ratio} |"
            )
        out.append("")
    return out


def readme() -> str:
    """README.md with its table made anew."""
    arms = {"naive": "dense, log_softmax", "strong": "dense, strongest form", "kernel": "**logitless**"}
    records = {r["name"]: r["arms"] for r in read("h200_suite.json")["records"]}

    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return ""
        if "error" in row:
            return row["error"]
        ms, memory = row["median_ms"], row["mem/compiler"]["temporaries"] / 2**20
        return f"{ms:.{2 if ms < 10 else 1}f} ms, {memory:,.{1 if memory < 100 else 0}f} MiB"

    lines = [f"| | {' | '.join(arms.values())} |", "|---" * (len(arms) + 1) + "|"]
    for name, title in README_CASES.items():
        lines.append(f"| {title} | {' | '.join(cell(records[name].get(arm)) for arm in arms)} |")
    text = README.read_text()
    before, after = text.split(BEGIN)[0], text.split(END, 1)[1]
    return before + BEGIN + "\n".join(lines) + "\n" + END + after


def render() -> str:
    head = [
        "# Benchmarks",
        "",
        "Written by `python benchmarks/tables.py` from the JSON files under benchmarks/results; each table names the",
        "command that made its file.",
        "",
    ]
    return (
        "\n".join(
            [
                *head,
                *suite_tables(),
                *logits_tables(),
                *head_tables(),
                *sparse_tables(),
                *training_tables(),
                *cpu_tables(),
                *tpu_tables(),
                *sharded_tables(),
            ]
        ).rstrip()
        + "\n"
    )


if __name__ == "__main__":
    PAGE.write_text(render())
    README.write_text(readme())
