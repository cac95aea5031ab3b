"""Writes docs/benchmarks.md, the tables of README.md and docs/index.md, and the GSM8K part of docs/training.md with its
plots, from benchmarks/results: ``python benchmarks/tables.py``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # also where this file is imported from elsewhere

import tables_gsm8k
from tables_gsm8k import RESULTS, ROOT, markdown, read

from logitless.lab.bench import ratios
from logitless.lab.bench.charts import Bar, Bars, to_svg

PAGE = ROOT / "docs" / "benchmarks.md"
README, HOME = ROOT / "README.md", ROOT / "docs" / "index.md"
BEGIN, END = "<!-- from the suites: begin -->\n", "<!-- end -->\n"

README_ROWS = (
    ("an RL batch of Qwen2.5-7B, {live:.0f} % of {tokens:,} tokens live", "h200", "qwen2.5-7b, RL batch", "default"),
    ("8,192 tokens, all live", "live", "", "default"),
    (
        'the same with `sparse_backward="auto"`, a trained policy', "gpu-sparse", "sparse 8192x4096x151936, on-policy",
        "default, sparse backward",
    ),
    ("131,072 tokens of Qwen2.5-1.5B, all live", "h200", "qwen2.5-1.5b, 128k context", "default"),
)  # fmt: skip
"""What README.md shows: label, suite, case and arm; each beside the strongest dense form of float32 logits."""
SUITES = {
    "h200": "H200: the suite",
    "gpu-head": "H200: fused head",
    "gpu-sparse": "H200: sparse backward",
    "gpu-logits": "H200: given logits",
    "cpu": "CPU: the suite",
}
HOW = """\
Written by `python benchmarks/tables.py` from the files under benchmarks/results; each section names the command that
makes its file. `logitless report benchmarks/results` shows every number of every file as tables and charts.

How to read a suite: arms of a case alternate in one process. A ratio compares paired rounds with the dense form of
the same logits dtype, with a 95 % interval; "none" marks an interval within 0.9 and 1.1 around one, "cannot tell" a
wider interval around one. Milliseconds are medians by the device's clock, by the host's on a CPU. MiB are the
compiler's plan for temporaries, without inputs and outputs. `default` is the call without options, `kernel` the call
with the options of its case. A file's `note` names the commits and calls where its cases come from several."""
EARLIER = "the form before"
"""In the name of a case that a file keeps for comparison: measured with an earlier version, and not on the page."""
TRAINED = {
    "random": "Qwen2.5-1.5B shape, random weights",
    "smollm2_arithmetic": "SmolLM2-135M, sums",
    "abc": "SmolLM2-135M, sums, three losses",
}
TRAINED_COLUMNS = {
    "reward, first 10 steps": ("train/reward_first10", 1, ".3f"),
    "last 10": ("train/reward_last10", 1, ".3f"),
    "held-out": ("eval/last", 1, ".3f"),
    "step, s": ("time/train/step_avg_last10_s", 1, ".3f"),
    "update, s": ("time/update_s/last10", 1, ".3f"),
    "peak, GiB": ("memory/device_peak_bytes", 2**30, ".1f"),
}
"""Key of a run's summary, unit and format."""


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


def suite_records(suite: str) -> list[dict[str, Any]]:
    """The cases of a suite that are shown; none where there is no file."""
    result = read(f"{suite.replace('-', '_')}_suite.json")
    return [r for r in (result or {"records": []})["records"] if EARLIER not in r.get("name", "")]


def suite_tables() -> list[str]:
    out: list[str] = []
    for suite, title in SUITES.items():
        records = suite_records(suite)
        rows = [(r, arm, row) for r in records for arm, row in r.get("arms", {}).items()]
        where = next((row["environment"] for _, _, row in rows if "error" not in row), None)
        if where is None:
            continue
        file = f"{suite.replace('-', '_')}_suite.json"
        out += [f"## {title}", "", f"{where['device']}, jax {where['jax']}.", ""]
        out += [f"    logitless bench --suite {suite} --out benchmarks/results/{file}", ""]
        out += [*_ratio_table(rows), *_gates(records), *_checks(records)]
    return out


def case_name(name: str) -> str:
    """The name of a case with its shape as a reader would write it."""
    name = re.sub(r"^(?:linear|logits)_bpd1_t(\d+)(?:_h(\d+))?_vocab(\d+)_?", _shape, name)
    return re.sub(r"^sparse (\d+)x(\d+)x(\d+)", r"T=\1 H=\2 V=\3", name)


def _shape(found: re.Match[str]) -> str:
    tokens, hidden, vocab = found.groups()
    more = "" if found.end() == len(found.string) or found.string[found.end()] == "," else ", "
    return f"T={tokens} H={hidden} V={vocab}{more}" if hidden else f"logits T={tokens} V={vocab}{more}"


def _ratio_table(rows: list[Any]) -> list[str]:
    cells, last = [], ""
    for r, arm, row in rows:
        name = "" if r["name"] == last else case_name(r["name"])
        last = r["name"]
        if "error" in row:
            cells.append([name, arm, row["error"][:90], "", "", ""])
            continue
        plan, ms = row["mem/compiler"], row["median_ms"]
        memory = mib(plan["temporaries"]) if plan else ""
        cells.append([name, arm, *first_ratio(row), f"{ms:.{2 if ms < 10 else 1}f}", memory])
    return markdown(["case", "arm", "ratio", "to", "ms", "MiB"], cells)


def _state(gate: dict[str, Any]) -> str:
    return gate.get("state", "met" if gate["ok"] else "missed")


def _gates(records: list[dict[str, Any]]) -> list[str]:
    """The bars of a suite."""
    cells = []
    for r in records:
        for name, gate in r.get("gates", {}).items() if "arms" in r else ():
            value = "" if gate["value"] is None else f"{gate['value']:.3g}"
            if gate.get("low") is not None:
                value += f" [{gate['low']:.3g}, {gate['high']:.3g}]"
            shown = _state(gate) if gate["ok"] else f"**{_state(gate)}**"
            cells.append([case_name(r["name"]), name, value, f"{gate['limit']:.3g}", shown])
    return markdown(["case", "bar", "reached", "limit", ""], cells) if cells else []


def _checks(records: list[dict[str, Any]]) -> list[str]:
    """How many comparisons with the dense form and float64 there were, and which of them failed."""
    gates = {f"{r['config/name']}: {k}": g for r in records if "arms" not in r for k, g in r.get("gates", {}).items()}
    if not gates:
        return []
    missed = [f"**{name}** {g['value']:.3g} of {g['limit']:.3g}" for name, g in gates.items() if _state(g) != "met"]
    said = f"missed: {', '.join(missed)}" if missed else "all met"
    return [
        f"Loss and gradients against the dense form and float64, before anything is timed: {len(gates)} bars, {said}.",
        "",
    ]


def training_tables() -> list[str]:
    commands, cells = [], []
    for case, title in TRAINED.items():
        result = read(f"train_h200_{case}.json")
        if result is None:
            continue
        commands.append(f"    python benchmarks/train_h200.py {case.split('_')[-1]} --out results")
        for arm in result["arms"].values():
            found = arm["summary"]
            values = [(found.get(key), unit, form) for key, unit, form in TRAINED_COLUMNS.values()]
            cells.append([title, found["loss_backend"], *("" if v is None else format(v / u, f) for v, u, f in values)])
            if arm is not next(iter(result["arms"].values())):
                cells[-1][0] = ""
    head = ["## H200: training runs", "", "`benchmarks/results/train_h200_*.json`, one row for each arm.", ""]
    return [*head, *commands, "", *markdown(["run", "loss", *TRAINED_COLUMNS], cells)] if cells else []


def sharded_tables() -> list[str]:
    result = read("tpu_sharded.json")
    if result is None:
        return []
    cells = [
        [slice_name, layout, name, mib(row["peak_bytes"]), sent(row)]
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
        *markdown(["slice", "layout", "program", "peak MiB a chip", "collectives, MiB"], cells),
    ]


def sent(row: dict[str, Any]) -> str:
    """A program's collectives by kind and dtype; those below a MiB are left out."""
    found: dict[str, int] = {}
    for c in row.get("collectives", ()):
        what = f"{c['kind']} {c['dtype']}"
        found[what] = found.get(what, 0) + c["bytes"] * c["times"]
    return ", ".join(f"{k} {mib(v)}" for k, v in found.items() if v >= 1 << 20) or "-"


def other_files(page: str) -> list[str]:
    """The records that the page does not name: with what they say that they are, then the rest by name."""
    said = {p.name: _what(p.name) for p in sorted(RESULTS.iterdir()) if p.name not in page}
    listed = [f"- `{name}`: {what}" for name, what in said.items() if what]
    rest = ", ".join(f"`{name}`" for name, what in said.items() if not what)
    return ["## Other records", "", "Files that are not named above:", "", *listed, f"- {rest}", ""] if said else []


def _what(name: str) -> str:
    """The first clause of what a file says that it is."""
    result = read(name) if name.endswith(".json") else {}
    first = re.split(r"[:;.(] ?", str(result.get("what", "")))[0]
    return first.strip() if len(first) > 20 else ""


def recorded_ratios() -> list[tuple[float, float, float]]:
    """Every ratio of every suite, by every clock, every bar that has an interval, and those of GSM8K's replays."""
    found = tables_gsm8k.ratios()
    for suite in SUITES:
        for r in suite_records(suite):
            told = [
                c for arm in r.get("arms", {}).values() for by in arm.get("ratios", {}).values() for c in by.values()
            ]
            told += [{**g, "ratio": g["value"]} for g in r.get("gates", {}).values()]
            found += [(c["ratio"], c["low"], c["high"]) for c in told if c.get("low") is not None]
    return found + list(live_ratios().values())


def live_ratios() -> dict[str, tuple[float, float, float]]:
    """Times of ``h200_live.py`` over those of the strong dense form in float32: the median, least and largest seed."""
    record = read("h200_live.json")
    if not record:
        return {}
    ms = record["after"]["ms"]
    dense = ms["flat: strong/f32"]
    by_arm = {name: sorted(a / b for a, b in zip(x, dense, strict=True)) for name, x in ms.items()}
    return {name.removeprefix("flat: "): (x[len(x) // 2], x[0], x[-1]) for name, x in by_arm.items()}


def readme_table() -> str:
    """What the README and the home page show: one number a cell."""
    cells = []
    for label, suite, case, arm in README_ROWS:
        if suite == "live":
            ratio, _, _ = live_ratios()[arm]
            compiled = read("h200_live.json")["after"]["compile"]
            both = (mib(compiled[name]["temporaries"]) for name in ("strong/f32", arm))
            cells.append([label, f"{ratio:.2f}", *both])
            continue
        (record,) = (r for r in suite_records(suite) if r.get("name") == case)
        row, tokens = record["arms"][arm], record["config"]["tokens"]
        dense = record["arms"].get("strong/f32", record["arms"]["strong"])
        (ratio,) = [r["device_ms"]["ratio"] for to, r in row["ratios"].items() if to == "strong/f32"] or [None]
        cells.append([
            label.format(live=100 * row["live_tokens"] / tokens, tokens=tokens),
            "-" if ratio is None else f"{ratio:.2f}",
            dense["error"] if "error" in dense else mib(dense["mem/compiler"]["temporaries"]),
            mib(row["mem/compiler"]["temporaries"]),
        ])  # fmt: skip
    return "\n".join(markdown(["loss and gradients", "time / dense", "dense, MiB", "**logitless**, MiB"], cells))


def with_table(page: Path) -> str:
    """A page with the README's table made anew."""
    text = page.read_text()
    return text.split(BEGIN)[0] + BEGIN + readme_table() + END + text.split(END, 1)[1]


def render() -> str:
    head = ["# Benchmarks", "", HOW, ""]
    tables = [suite_tables(), training_tables(), tables_gsm8k.benchmark_tables(), sharded_tables()]
    page = "\n".join([*head, *(line for table in tables for line in table)])
    return "\n".join([page, *other_files(page)]).rstrip() + "\n"


def largest() -> Bars:
    """The largest completions, and the most of them, that one gradient of Qwen2.5-1.5B had room for."""
    bars = []
    for what, label in (("context", "16 rows of {:,}"), ("batch", "{:,} rows of 512")):
        for arm, name, tone in (("dense", "dense", "a"), ("fused", "logitless", "ours")):
            size = read(f"train_gsm8k_largest_{arm}_{what}.json")["fits"]
            tokens = (16 if what == "context" else 512) * size
            bars.append(Bar(f"{name}: {label.format(size)} tokens", (("tokens", tokens),), tone))
    return Bars("largest-on-one-h200", "What fits one H200", "tokens", tuple(bars))


def files() -> dict[Path, str]:
    """Everything that follows from the records, with what it should hold."""
    picture = {tables_gsm8k.PLOTS / "largest-on-one-h200.svg": to_svg(largest(), alone=True) + "\n"}
    readme = tables_gsm8k.filled(with_table(README), tables_gsm8k.readme_part())
    return {PAGE: render(), README: readme, HOME: with_table(HOME), **picture, **tables_gsm8k.files()}


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content)
