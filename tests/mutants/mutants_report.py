"""Faults in what a reader sees: cells, columns, curves, verdicts."""

from __future__ import annotations

from mutation import Mutant

CELLS = "tests/bench/test_report_cells.py"
PAGE = "tests/bench/test_report.py"


def m(file: str, old: str, new: str, *tests: str, survives: str = "") -> Mutant:
    return Mutant(f"bench/{file}.py", old, new, tests or (CELLS,), survives)


MUTANTS = [
    m("report_charts", '"PASS" if g["ok"] else "FAIL"))', '"PASS"))'),
    m("report_charts", '"good" if g["ok"] else "bad"))', '"good"))'),
    m("report_charts", "share = value / limit if limit", "share = limit / value if limit"),
    m("report_bench", '{"met": "PASS", "missed": "FAIL"}', '{"met": "PASS", "missed": "PASS"}'),
    m(
        "report_bench",
        "{number(row['p10_ms'])} to {number(row['p90_ms'])}",
        "{number(row['p90_ms'])} to {number(row['p10_ms'])}",
    ),
    m(
        "report_bench",
        'shown(row.get("tflops")),\n                    shown(row.get("gb_per_s"))',
        'shown(row.get("gb_per_s")),\n                    shown(row.get("tflops"))',
    ),
    m(
        "report_bench",
        'shown(row.get("wall_ms")),\n                    shown(row.get("back_to_back_ms"))',
        'shown(row.get("back_to_back_ms")),\n                    shown(row.get("wall_ms"))',
    ),
    m("report_bench", '("outputs", memory["outputs"])', '("outputs", memory["temporaries"])'),
    m("report_bench", '("temporaries", memory["temporaries"])', '("temporaries", memory["outputs"])'),
    m("report_bench", 'memory = row["mem/device"] if seen else', 'memory = row["mem/compiler"] if seen else'),
    m(
        "report_bench",
        'seen = all(peak and not peak.get("from_compile") for peak in peaks)',
        "seen = all(peak for peak in peaks)",
    ),
    m(
        "report_bench",
        'if "verify" not in record:\n        return "not verified"',
        'if "verify" not in record:\n        return "verified before it was timed"',
    ),
    m(
        "report_bench",
        '"verified before it was timed" if record["verify"]["passed"] else',
        '"verified before it was timed" if record["verify"] else',
    ),
    m("report_bench", '(r["name"], arm, other, clocks[clock]', '(r["name"], other, arm, clocks[clock]'),
    m("report_bench", "f\"{x['low']:.3f} to {x['high']:.3f}\"", "f\"{x['high']:.3f} to {x['low']:.3f}\""),
    m("report_bench", '("median", row["median_ms"])', '("median", row["mean_ms"])'),
    m("report_charts", '("dense", "dense_peak", "a")', '("dense", "peak", "a")'),
    m(
        "report_charts",
        '("fused", "peak", "ours"), ("dense", "dense_peak", "a")',
        '("fused", "dense_peak", "ours"), ("dense", "peak", "a")',
    ),
    m(
        "report_charts",
        "f\"{p['temporaries'] / MIB:,.0f}\", f\"{p['dense_temporaries']",
        "f\"{p['outputs'] / MIB:,.0f}\", f\"{p['dense_temporaries']",
    ),
    m(
        "report_charts",
        "f\"{longest['fused']:,}\", f\"{longest['dense']:,}\"",
        "f\"{longest['dense']:,}\", f\"{longest['fused']:,}\"",
    ),
    m(
        "report_charts",
        "f\"{p['peak'] / MIB:,.0f}\", f\"{p['dense_peak']",
        "f\"{p['dense_peak'] / MIB:,.0f}\", f\"{p['dense_peak']",
    ),
    m("report_training", '("KL", ("train/kl", "kl")', '("KL", ("train/kl_k1", "kl")'),
    m("report_training", '(float(step.get("step", position)), float(value))', "(float(position), float(value))"),
    m(
        "report_training",
        '(k, *(cell(a.get("summary", {}).get(k)) for a in runs.values()))',
        '(k, *(cell(a.get("summary", {}).get(k)) for a in reversed(runs.values())))',
    ),
    m("report_training", 'alone = not (r.get("config") or {}).get("ab", {}).get("parallel", False)', "alone = True"),
    m("report_tiles", '"yes" if all(verdicts) else "NO"', '"yes"'),
    m("report_tiles", "if None in verdicts:", "if False:"),
    m("report_tiles", 'if r["low"] <= 1 <= r["high"]:', "if False:"),
    m("report_tiles", 'r["ratio"] < 1)', 'r["ratio"] > 1)'),
    m("report_tiles", 'f"{a / b:.2f}x", basis', 'f"{b / a:.2f}x", basis'),
]
