"""Tables of the suites of ``logitless bench``, as they are recorded now and as they were before arms took turns; and
whether a commit left their programs as they were."""

from __future__ import annotations

from typing import Any

from tables_before import mib, read

SUITES = {
    "h200": "The suite on one H200",
    "gpu-head": "Every arm of the fused head on one H200",
    "gpu-sparse": "Every arm of the sparse backward on one H200",
    "gpu-logits": "Every arm over given logits on one H200",
    "cpu": "The suite on a CPU",
}
CLOCKS = {"device_ms": "device", "wall_ms": "a call", "back_to_back_ms": "back to back"}


def suite_tables() -> list[str]:
    out: list[str] = []
    for suite, title in SUITES.items():
        result = read(f"{suite.replace('-', '_')}_suite.json")
        if result is None:
            continue
        cases = [r for r in result["records"] if "arms" in r]
        rows = [(r, arm, row) for r in cases for arm, row in r["arms"].items()]
        new = any("ratios" in row for _, _, row in rows)
        where = next((row["environment"] for _, _, row in rows if "error" not in row), {"device": "", "jax": ""})
        out += [f"## {title}", ""]
        said = f"{where['device']}, jax {where['jax']}, {result['seconds']:.0f} s in all."
        out += [f"{said} {text}" if i == 0 else text for i, text in enumerate(_in_turn() if new else _one_by_one())]
        out += [result["note"]] if "note" in result else []
        file = f"benchmarks/results/{suite.replace('-', '_')}_suite.json"
        out += ["", f"    logitless bench --suite {suite} --out {file}", ""]
        out += _ratio_table(rows) if new else _median_table(rows)
        out += _suite_gates(result["records"])
    return out


def _in_turn() -> list[str]:
    return [
        "The arms of a case took turns in one process;",
        "a ratio is that of paired rounds, with its 95 % interval, to the dense form of the same logits dtype.",
        "Times are medians by the device's clock, of one call with the wait for it, and of calls dispatched back to",
        "back. `default` is the call without options. Temporaries: the compiler's plan, and the device's peak less",
        "inputs and outputs in a process that compiled nothing (+: an upper bound). The roofline is that of three",
        "matmuls over live tokens, or of one read and one write of the logits.",
    ]


def _one_by_one() -> list[str]:
    return [
        "Each arm in a fresh process,",
        "inputs made on the host; `naive` and `strong` are dense. Temporaries on the device are its allocator's",
        "peak less inputs and outputs (an upper bound, marked +, where autotuning had reached that peak before).",
        "The roofline is that of three matmuls over live tokens, or of one read and one write of the logits.",
        "Recorded before arms took turns: two rows of this table differ by what the machine did in between, too.",
    ]


def _memory(row: dict[str, Any]) -> str:
    device = row["mem/device"]
    seen = "" if not device else mib(device["temporaries"]) + ("+" if device["from_compile"] else "")
    plan = "" if not row["mem/compiler"] else mib(row["mem/compiler"]["temporaries"])
    return f"{plan} | {seen}"


def _ratio_table(rows: list[Any]) -> list[str]:
    clocks = [k for k in CLOCKS if any(k in row for _, _, row in rows)]
    names = " | ".join(f"ms, {CLOCKS[k]}" for k in clocks)
    out = [f"| case | arm | ratio | to | {names} | MiB: plan | seen | x roofline |", "|---" * (7 + len(clocks)) + "|"]
    for r, arm, row in rows:
        if "error" in row:
            out.append(f"| {r['name']} | {arm} | {row['error'][:90]} |" + " |" * (4 + len(clocks)))
            continue
        times = " | ".join(f"{row[k]:.2f}" if k in row else "" for k in clocks)
        roofline = "" if not row["roofline_ratio"] else f"{row['roofline_ratio']:.2f}"
        first = next(iter(row["ratios"].items()), None)
        ratio, to = ("", "") if first is None else (ratio_text(next(iter(first[1].values()))), first[0])
        out.append(f"| {r['name']} | {arm} | {ratio} | {to} | {times} | {_memory(row)} | {roofline} |")
    return [*out, ""]


def ratio_text(r: dict[str, Any]) -> str:
    """A ratio as a claim: with its interval, and called none where one is inside."""
    if r["low"] is None:
        return f"{r['ratio']:.3f}"
    said = f"{r['ratio']:.3f} [{r['low']:.3f}, {r['high']:.3f}]"
    return f"{said}, none" if r["verdict"] == "no difference" else said


def _median_table(rows: list[Any]) -> list[str]:
    out = [
        "| case | arm | ms | p10 to p90 | temporaries MiB: compiler | device | TFLOP/s | GB/s | x roofline |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r, arm, row in rows:
        if "error" in row:
            out.append(f"| {r['name']} | {arm} | {row['error'][:90]} | | | | | | |")
            continue
        ratio = "" if not row["roofline_ratio"] else f"{row['roofline_ratio']:.2f}"
        out.append(
            f"| {r['name']} | {arm} | {row['median_ms']:.2f} | {row['p10_ms']:.2f} to {row['p90_ms']:.2f} | "
            f"{_memory(row)} | {row['tflops']:.1f} | {row['gb_per_s']:,.0f} | {ratio} |"
        )
    return [*out, ""]


def _suite_gates(records: list[dict[str, Any]]) -> list[str]:
    """The bars of a suite, and its checks against float64."""
    found = [
        (r.get("name", r.get("config/name")), name, gate) for r in records for name, gate in r.get("gates", {}).items()
    ]
    if not found:
        return []
    out = ["| case | bar | reached | limit | |", "|---|---|---|---|---|"]
    for case, name, gate in found:
        value = "" if gate["value"] is None else f"{gate['value']:.3g}"
        if gate.get("low") is not None:
            value += f" [{gate['low']:.3g}, {gate['high']:.3g}]"
        state = gate.get("state", "met" if gate["ok"] else "missed")
        state = f"**{state}**" if not gate["ok"] else state
        out.append(f"| {case} | {name} | {value} | {gate['limit']:.3g} | {state} |")
    return [*out, ""]


def same_tables() -> list[str]:
    """The programs of two commits, compiled without a device, with a row for each that is not the same."""
    result = read("same_programs.json")
    if result is None:
        return []
    a, b, cases = result["before"]["commit"], result["after"]["commit"], result["cases"]
    equal, different = ([c for c in cases if c.get("equal", False) is wanted] for wanted in (True, False))
    free = sum(c["same"] == "graph" for c in equal)
    moved = sum(not c["order"] for c in equal)
    order = f"order (but for {moved})" if moved else "order"
    seen, found = _as_on_the_device(cases)
    out = [
        "## Programs before and after the redesign",
        "",
        f"Compiled for an H200 on a machine without one (jax {result['versions']['jax']}, nothing tuned, matmuls by "
        f"cuBLAS), {len(equal)} of {len(cases)} programs over the head and over given logits are the same at {b[:7]} "
        f'("{result["after"]["subject"].split(":")[0]}") as at {a[:7]}, the commit before: instructions, data flow, '
        f"{order}, kernels and planned memory. In {free} of them values have other places in a loop's state or among "
        "a computation's arguments, which costs nothing; the others differ in names alone. No time was measured "
        f"for this. The planned peak is what the device's own compiler planned in {seen} of {found} arms that "
        "h200_redesign.json and h200_suite.json have.",
        "",
        f"    python benchmarks/same_programs.py --before {b[:7]}~1 --after {b[:7]} "
        "--out benchmarks/results/same_programs.json",
        "",
    ]
    if different:
        out += ["| differs | instructions | steps | temporaries MiB | only before | only after |", "|---" * 6 + "|"]
        out += [*map(_different, different), ""]
    return out


def _as_on_the_device(cases: list[dict[str, Any]]) -> tuple[int, int]:
    """Of how many recorded arms the peak is planned to the byte as on the device, and of how many that is known."""
    plans = {name: c["peak"][1] for c in cases if "peak" in c for name in c["names"]}
    known = [
        row["mem/compiler"]["peak"] == plans[name]
        for file in ("h200_redesign.json", "h200_suite.json")
        for r in (read(file) or {"records": []})["records"]
        for arm, row in r.get("arms", {}).items()
        if (name := f"{r['name']}: {arm}") in plans and row.get("mem/compiler")
    ]
    return sum(known), len(known)


def _different(c: dict[str, Any]) -> str:
    if "errors" in c:
        return f"| {c['names'][0]} | does not compile | | | | |"
    counts = [" and ".join(f"{n:,}" for n in c[key]) for key in ("instructions", "steps")]
    only = ["; ".join(c.get(f"only_{side}", ())) for side in ("before", "after")]
    return f"| {c['names'][0]} | {' | '.join([*counts, ' and '.join(map(mib, c['temporaries'])), *only])} |"
