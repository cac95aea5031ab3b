"""Writes docs/benchmarks.md, the tables of README.md, and the GSM8K part of docs/training.md with its plots, from
benchmarks/results: ``python benchmarks/tables.py``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # also where this file is imported from elsewhere

import tables_gsm8k
from tables_gsm8k import RESULTS, ROOT, markdown, read

from logitless.lab.bench import ratios

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
README_ARMS = {
    "naive": "dense, log_softmax",
    "strong": "dense, strongest form",
    "default": "**logitless**, no options",
    "kernel": "**logitless**",
}
SUITES = {
    "h200": "The suite on one H200",
    "gpu-head": "Every arm of the fused head on one H200",
    "gpu-sparse": "Every arm of the sparse backward on one H200",
    "gpu-logits": "Every arm over given logits on one H200",
    "cpu": "The suite on a CPU",
}
CLOCKS = {"device_ms": "device", "wall_ms": "a call", "back_to_back_ms": "back to back"}
IN_TURN = """The arms of a case took turns in one process;
a ratio is that of paired rounds, with its 95 % interval, to the dense form of the same logits dtype.
Times are medians by the device's clock, of one call with the wait for it, and of calls dispatched back to
back. `default` is the call without options. Temporaries: the compiler's plan, and the device's peak less
inputs and outputs in a process that compiled nothing (+: an upper bound). The roofline is that of three
matmuls over live tokens, or of one read and one write of the logits."""
TRAINED = {
    "random": "Training, Qwen2.5-1.5B shape, random weights",
    "smollm2_arithmetic": "Training, SmolLM2-135M-Instruct on sums below 100",
    "abc": "Training, the same with three losses: dense, fused exact, fused sparse",
}
TRAINED_ROWS = (
    ("steps", "steps", 1, ".4g"),
    ("sampled reward, first 10 steps", "train/reward_first10", 1, ".4g"),
    ("sampled reward, last 10 steps", "train/reward_last10", 1, ".4g"),
    ("held-out reward at the end", "eval/last", 1, ".4g"),
    ("step, mean of the last 10 (s)", "time/train/step_avg_last10_s", 1, ".4g"),
    ("update phase, last 10 (s)", "time/update_s/last10", 1, ".4g"),
    ("device peak (GiB)", "memory/device_peak_bytes", 2**30, ".4g"),
    ("KL, last 10 steps", "train/kl_last10", 1, ".4g"),
    ("left-out mass, last 10 steps", "train/left_out_mass_last10", 1, ".4g"),
    ("left-out mass of a token, largest", "train/left_out_mass_max", 1, ".4g"),
)


def mib(n: float) -> str:
    return f"{n / 2**20:,.0f}"


def ratio_text(r: dict[str, Any]) -> str:
    """A ratio as a claim: with its interval, and the verdict where one is inside."""
    if r["low"] is None:
        return f"{r['ratio']:.3f}"
    said = ratios.verdict(r["low"], r["high"])
    word = {ratios.NONE: ", none", ratios.UNSURE: f", {ratios.UNSURE}"}.get(said, "")
    return f"{r['ratio']:.3f} [{r['low']:.3f}, {r['high']:.3f}]{word}"


def first_ratio(row: dict[str, Any]) -> tuple[str, str]:
    """The ratio by the main clock as a claim, and the arm that it is to; both empty where there is none."""
    found = next(iter(row.get("ratios", {}).items()), None)
    return ("", "") if found is None else (ratio_text(next(iter(found[1].values()))), found[0])


def suite_tables() -> list[str]:
    out: list[str] = []
    for suite, title in SUITES.items():
        file = f"{suite.replace('-', '_')}_suite.json"
        result = read(file)
        if result is None:
            continue
        rows = [(r, arm, row) for r in result["records"] for arm, row in r.get("arms", {}).items()]
        where = next((row["environment"] for _, _, row in rows if "error" not in row), {"device": "", "jax": ""})
        said = f"{where['device']}, jax {where['jax']}, {result['seconds']:.0f} s in all. {IN_TURN}"
        out += [f"## {title}", "", *said.split("\n"), *([result["note"]] if "note" in result else []), ""]
        out += [f"    logitless bench --suite {suite} --out benchmarks/results/{file}", ""]
        out += [*_ratio_table(rows), *_gates(result["records"])]
    return out


def _ratio_table(rows: list[Any]) -> list[str]:
    clocks = [k for k in CLOCKS if any(k in row for _, _, row in rows)]
    times = [f"ms, {CLOCKS[k]}" for k in clocks]
    cells = []
    for r, arm, row in rows:
        if "error" in row:
            cells.append([r["name"], arm, row["error"][:90], *[""] * (4 + len(clocks))])
            continue
        plan, device, roofline = row["mem/compiler"], row["mem/device"], row["roofline_ratio"]
        seen = "" if not device else mib(device["temporaries"]) + ("+" if device["from_compile"] else "")
        cells.append([
            r["name"], arm, *first_ratio(row), *(f"{row[k]:.2f}" if k in row else "" for k in clocks),
            mib(plan["temporaries"]) if plan else "", seen, f"{roofline:.2f}" if roofline else "",
        ])  # fmt: skip
    return markdown(["case", "arm", "ratio", "to", *times, "MiB: plan", "seen", "x roofline"], cells)


def _gates(records: list[dict[str, Any]]) -> list[str]:
    """The bars of a suite, and its checks against float64."""
    cells = []
    for r in records:
        for name, gate in r.get("gates", {}).items():
            value = "" if gate["value"] is None else f"{gate['value']:.3g}"
            if gate.get("low") is not None:
                value += f" [{gate['low']:.3g}, {gate['high']:.3g}]"
            state = gate.get("state", "met" if gate["ok"] else "missed")
            shown = state if gate["ok"] else f"**{state}**"
            cells.append([r.get("name", r.get("config/name")), name, value, f"{gate['limit']:.3g}", shown])
    return markdown(["case", "bar", "reached", "limit", ""], cells) if cells else []


def training_tables() -> list[str]:
    out: list[str] = []
    for case, title in TRAINED.items():
        result = read(f"train_h200_{case}.json")
        if result is None:
            continue
        arms, agreement = result["arms"], result["agreement"]
        tests = [agreement["test"]] if "test" in agreement else [f"{k}: {own['test']}" for k, own in agreement.items()]
        out += [f"## {title}", "", f"`benchmarks/results/train_h200_{case}.json`; {'; '.join(tests)}.", ""]
        out += [f"    python benchmarks/train_h200.py {case.split('_')[-1]} --out results", ""]
        out += tables_gsm8k.table({name: a["summary"] for name, a in arms.items()}, TRAINED_ROWS)
    return out


def sharded_tables() -> list[str]:
    result = read("tpu_sharded.json")
    if result is None:
        return []
    cells = [
        [slice_name, layout, name, mib(row["peak_bytes"]), sent(row), row["versions"]["libtpu"]]
        for slice_name, layouts in result["slices"].items()
        for layout, programs in layouts.items()
        for name, row in programs.items()
        if isinstance(row, dict) and "peak_bytes" in row
    ]
    return [
        "## Many chips, ahead of time",
        "",
        f"{result['what']}. {result['tokens_per_chip']} tokens a chip, H={result['hidden']}, V={result['vocab']}. "
        "Collectives: bytes of whole arrays, in the dtype that is summed or moved, all trips of a loop counted.",
        "",
        f"    {result['command']}",
        "",
        *markdown(["slice", "layout", "program", "peak MiB a chip", "collectives, MiB", "libtpu"], cells),
    ]


def sent(row: dict[str, Any]) -> str:
    """A program's collectives by kind and dtype; those below a MiB are left out."""
    found: dict[str, int] = {}
    for c in row.get("collectives", ()):
        what = f"{c['kind']} {c['dtype']}"
        found[what] = found.get(what, 0) + c["bytes"] * c["times"]
    return ", ".join(f"{k} {mib(v)}" for k, v in found.items() if v >= 1 << 20) or "-"


def other_files(page: str) -> list[str]:
    """The records that the page does not name."""
    files = [p.name for p in sorted(RESULTS.iterdir()) if p.name not in page]
    listed = [f"- `{name}`" + (f": {what}" if (what := _what(name)) else "") for name in files]
    head = (
        "`logitless report benchmarks/results` shows every record as charts and tables. Files that are not named above:"
    )
    return ["## Other records", "", head, "", *listed, ""] if files else []


def _what(name: str) -> str:
    result = read(name) if name.endswith(".json") else {}
    return str(result.get("what", "")) if len(result.get("what", "")) > 20 else ""


def readme() -> str:
    """README.md with its table made anew."""
    records = {r["name"]: r["arms"] for r in read("h200_suite.json")["records"]}
    arms = {k: v for k, v in README_ARMS.items() if any(k in records[name] for name in README_CASES)}

    def cell(row: dict[str, Any] | None) -> str:
        if row is None or "error" in row:
            return "" if row is None else row["error"]
        ms, memory = row["median_ms"], row["mem/compiler"]["temporaries"] / 2**20
        said = f"{ms:.{2 if ms < 10 else 1}f} ms, {memory:,.{1 if memory < 100 else 0}f} MiB"
        ratio, to = first_ratio(row)
        return f"{ratio} of {to}; {said}" if to else said

    cells = [[title, *(cell(records[name].get(arm)) for arm in arms)] for name, title in README_CASES.items()]
    text = README.read_text()
    before, after = text.split(BEGIN)[0], text.split(END, 1)[1]
    table = "\n".join(markdown(["", *arms.values()], cells))
    return tables_gsm8k.filled(before + BEGIN + table + END + after, tables_gsm8k.readme_part())


def render() -> str:
    head = [
        "# Benchmarks",
        "",
        "Written by `python benchmarks/tables.py` from the JSON files under benchmarks/results; each table names the",
        "command that made its file.",
        "",
    ]
    tables = [suite_tables(), training_tables(), tables_gsm8k.benchmark_tables(), sharded_tables()]
    page = "\n".join([*head, *(line for table in tables for line in table)])
    return "\n".join([page, *other_files(page)]).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
    README.write_text(readme())
    for path, content in tables_gsm8k.files().items():
        path.write_text(content)
