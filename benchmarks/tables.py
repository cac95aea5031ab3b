"""Writes docs/benchmarks.md, the tables of README.md, and the GSM8K part of docs/training.md with its plots, from
benchmarks/results: ``python benchmarks/tables.py``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # also where this file is imported from elsewhere

import tables_gsm8k
from tables_before import RESULTS, ROOT, head_tables, logits_tables, mib, read, sparse_tables
from tables_suites import ratio_text, same_tables, suite_tables

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
        f"{result['what']}. {result['tokens_per_chip']} tokens a chip, H={result['hidden']}, V={result['vocab']}. "
        "Collectives: bytes of whole arrays, in the dtype that is summed or moved, all trips of a loop counted.",
        "",
        f"    {result['command']}",
        "",
        "| slice | layout | program | peak MiB a chip | collectives, MiB | libtpu |",
        "|---|---|---|---|---|---|",
    ]
    for slice_name, layouts in result["slices"].items():
        for layout, programs in layouts.items():
            for name, row in programs.items():
                if isinstance(row, dict) and "peak_bytes" in row:
                    cells = [slice_name, layout, name, mib(row["peak_bytes"]), sent(row), row["versions"]["libtpu"]]
                    out.append(f"| {' | '.join(cells)} |")
    return [*out, ""]


def sent(row: dict[str, Any]) -> str:
    """A program's collectives by kind and dtype; those below a MiB are left out."""
    found: dict[str, int] = {}
    for c in row.get("collectives", ()):
        what = f"{c['kind']} {c['dtype']}"
        found[what] = found.get(what, 0) + c["bytes"] * c["times"]
    return ", ".join(f"{k} {mib(v)}" for k, v in found.items() if v >= 1 << 20) or "-"


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


def readme() -> str:
    """README.md with its table made anew."""
    arms = {
        "naive": "dense, log_softmax",
        "strong": "dense, strongest form",
        "default": "**logitless**, no options",
        "kernel": "**logitless**",
    }
    records = {r["name"]: r["arms"] for r in read("h200_suite.json")["records"]}
    arms = {k: v for k, v in arms.items() if any(k in records[name] for name in README_CASES)}

    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return ""
        if "error" in row:
            return row["error"]
        ms, memory = row["median_ms"], row["mem/compiler"]["temporaries"] / 2**20
        said = f"{ms:.{2 if ms < 10 else 1}f} ms, {memory:,.{1 if memory < 100 else 0}f} MiB"
        first = next(iter(row.get("ratios", {}).items()), None)
        return said if first is None else f"{ratio_text(next(iter(first[1].values())))} of {first[0]}; {said}"

    lines = [f"| | {' | '.join(arms.values())} |", "|---" * (len(arms) + 1) + "|"]
    for name, title in README_CASES.items():
        lines.append(f"| {title} | {' | '.join(cell(records[name].get(arm)) for arm in arms)} |")
    text = README.read_text()
    before, after = text.split(BEGIN)[0], text.split(END, 1)[1]
    return tables_gsm8k.filled(before + BEGIN + "\n".join(lines) + "\n" + END + after, tables_gsm8k.readme_part())


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
                *same_tables(),
                *logits_tables(),
                *head_tables(),
                *sparse_tables(),
                *training_tables(),
                *tables_gsm8k.benchmark_tables(),
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
    for path, content in tables_gsm8k.files().items():
        path.write_text(content)
