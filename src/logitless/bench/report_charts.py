"""Which charts and tables a set of records makes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

from logitless.bench.charts import TONES, Bar, Bars, Chart, Lines, Series, number
from logitless.tools.records import Record

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Table:
    """A table in words."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclasses.dataclass
class Section:
    """A heading with charts and tables under it."""

    title: str
    text: str
    charts: list[Chart] = dataclasses.field(default_factory=list)
    tables: list[Table] = dataclasses.field(default_factory=list)


def slug(text: str) -> str:
    """A name for files and anchors."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


_OURS = ("kernel", "chunked", "fused", "logitless", "pallas_tpu", "mosaic_gpu", "sparse")
_THEIRS = {
    "strong": "a",
    "dense": "a",
    "reference": "a",
    "baseline": "a",
    "naive": "b",
    "exact": "d",
    "checkpointed": "c",
    "gather": "c",
}


def tone_of(arm: str, position: int) -> str:
    """The colour of an arm: the accent for ours, its own for a known baseline."""
    if arm.startswith(_OURS):
        return "ours"
    return _THEIRS.get(arm, TONES[1 + position % (len(TONES) - 1)])


def _good(record: Record) -> dict[str, Record]:
    return {k: v for k, v in record["arms"].items() if "error" not in v}


def _shape(c: Record) -> str:
    at = f"{c['tokens']:,} tokens, vocabulary {c['vocab']:,}"
    return at + (f", hidden {c['hidden']:,}" if c["level"] == "head" else "") + f", {c['dtype']}"


def _time_chart(record: Record) -> Bars:
    bars = [
        Bar(arm, missing=row["error"][:48]) if "error" in row
        else Bar(arm, (("median", row["median_ms"]),), tone_of(arm, i))
        for i, (arm, row) in enumerate(record["arms"].items())
    ]  # fmt: skip
    floor = next((r["roofline_ms"] for r in _good(record).values() if r.get("roofline_ms")), None)
    return Bars(
        f"time-{slug(record['name'])}", f"Time: {record['name']}", "ms", tuple(bars), floor, "roofline",
        _shape(record["config"]),
    )  # fmt: skip


def _memory_chart(record: Record) -> Bars:
    peaks = [row.get("mem/device") for row in _good(record).values()]
    seen = all(peak and not peak.get("from_compile") for peak in peaks)  # else a peak was the autotuner's, or unknown
    gauge = "the device's peak" if seen else "the compiler's plan"
    bars, floor = [], None
    for i, (arm, row) in enumerate(record["arms"].items()):
        if "error" in row:
            bars.append(Bar(arm, missing=row["error"][:48]))
            continue
        memory = row["mem/device"] if seen else row["mem/compiler"]
        inputs = memory.get("inputs", memory.get("arguments", 0))
        parts = (("inputs", inputs), ("outputs", memory["outputs"]), ("temporaries", memory["temporaries"]))
        bars.append(Bar(arm, tuple((k, v / MIB) for k, v in parts), tone_of(arm, i)))
        floor = (inputs + memory["outputs"]) / MIB
    return Bars(
        f"memory-{slug(record['name'])}", f"Memory: {record['name']}", "MiB", tuple(bars), floor, "inputs and outputs",
        f"{_shape(record['config'])}; {gauge}",
    )  # fmt: skip


def _along(records: list[Record], key: str) -> Iterable[tuple[Record, list[Record]]]:
    """Groups of bench records that differ in ``key`` alone, in its order."""
    drop = {key, "name", "out", "rounds", "repeats", "warmup", "verify", "timeout_s", "baselines"}
    groups: dict[str, list[Record]] = {}
    for r in records:
        # At the logits level nothing depends on the hidden size.
        c = {
            k: v
            for k, v in r["config"].items()
            if k not in drop and not (k == "hidden" and r["config"]["level"] != "head")
        }
        groups.setdefault(repr(sorted(c.items(), key=lambda kv: kv[0])), []).append(r)
    for group in groups.values():
        if len({r["config"][key] for r in group}) > 1:
            yield group[0], sorted(group, key=lambda r: r["config"][key])


def _lines_along(group: list[Record], key: str, value: Any) -> tuple[Series, ...]:
    arms = dict.fromkeys(a for r in group for a in _good(r))
    lines = (
        Series(arm, tuple((r["config"][key], value(r["arms"][arm])) for r in group if arm in _good(r)), tone_of(arm, i))
        for i, arm in enumerate(arms)
    )
    return tuple(line for line in lines if len(line.points) > 1)


def bench(records: list[Record]) -> Section:
    """Time and memory of each case, and their course along live tokens and context length."""
    s = Section("Benchmarks", "Each arm ran in a process of its own, verified at a small shape before it was timed.")
    for first, group in _along(records, "live"):
        series = _lines_along(group, "live", lambda row: row["median_ms"])
        title = f"Cost against live tokens: {first['name']}"
        note = "Masked tokens (prompts, padding) cost a dense loss as much as live ones."
        if series:
            s.charts.append(Lines(slug(title), title, "share of tokens that are live", "ms", series, note=note))
    for first, group in _along(records, "tokens"):
        series = _lines_along(group, "tokens", lambda row: max(row["mem/compiler"]["temporaries"], 1) / MIB)
        title = f"Temporaries against tokens: {first['name']}"
        if series:
            s.charts.append(Lines(slug(title), title, "tokens", "MiB", series, log=True))
    for r in records:
        if _good(r):
            s.charts += [_time_chart(r), _memory_chart(r)]
    rows = []
    for r in records:
        for arm, row in r["arms"].items():
            if "error" in row:
                rows.append((r["name"], arm, row["error"][:80], "", "", "", "", ""))
                continue
            ratio, flops, speed = row.get("roofline_ratio"), row.get("tflops"), row.get("gb_per_s")
            rows.append(
                (
                    r["name"],
                    arm,
                    number(row["median_ms"]),
                    f"{number(row['p10_ms'])} to {number(row['p90_ms'])}",
                    f"{row['mem/compiler']['temporaries'] / MIB:,.1f}",
                    number(flops) if flops else "",
                    number(speed) if speed else "",
                    f"{ratio:.2f}" if ratio else "",
                )
            )
    columns = ("case", "arm", "median ms", "p10 to p90", "temporaries MiB", "TFLOP/s", "GB/s", "x roofline")
    s.tables.append(Table("All cases", columns, tuple(rows)))
    return s


def plans(records: list[Record]) -> Section:
    """Memory against context length, fused and dense; meshes."""
    s = Section("Plans", "Predictions from shapes and public chip numbers; nothing ran.")
    meshes: list[Bar] = []
    for r in records:
        c = r["config"]
        name = c.get("model") or f"H {c['hidden']}, V {c['vocab']}"
        where = f" on {c['chip']}" if c.get("chip") else ""
        if "mesh" in r:
            m = r["mesh"]
            meshes.append(Bar(f"{name}, {c['mesh']} {m['chip']}", (("efficiency", 100 * m["efficiency"]),), "ours"))
            continue
        points = r["contexts"]
        series = tuple(
            Series(label, tuple((p["tokens"], p[key] / MIB) for p in points), tone)
            for label, key, tone in (("fused", "peak", "ours"), ("dense", "dense_peak", "a"))
        )
        title = f"Memory against context length: {name}{where}"
        s.charts.append(Lines(slug(title), title, "tokens", "peak MiB", series, log=True))
        p = r["plan"]
        rows = [
            ("backend", p["backend"], "dense"),
            ("matmuls", str(p["matmuls"]), "3"),
            ("TFLOP", f"{p['flops'] / 1e12:.2f}", f"{p['dense_flops'] / 1e12:.2f}"),
            ("peak MiB", f"{p['peak'] / MIB:,.0f}", f"{p['dense_peak'] / MIB:,.0f}"),
            ("temporaries MiB", f"{p['temporaries'] / MIB:,.0f}", f"{p['dense_temporaries'] / MIB:,.0f}"),
        ]
        if p["seconds"] is not None:
            rows.append(("roofline ms", f"{p['seconds'] * 1e3:.2f}", f"{p['dense_seconds'] * 1e3:.2f}"))
        if "longest_context" in r:
            longest = r["longest_context"]
            rows.append(("longest context", f"{longest['fused']:,}", f"{longest['dense']:,}"))
        s.tables.append(Table(f"{name}{where}, {c['tokens']:,} tokens", ("", "fused", "dense"), tuple(rows)))
    if meshes:
        s.charts.append(
            Bars(
                "mesh-efficiency",
                "Predicted efficiency on meshes, nothing overlapped",
                "%",
                tuple(meshes),
                100.0,
                "all of it",
            )
        )
    return s


def tpu(records: list[Record]) -> Section:
    """What the TPU compiler said."""
    s = Section("TPU compiler", "Compiled or simulated by libtpu on a machine without a TPU. Cycles are estimates.")
    for r in records:
        c = r["config"]
        at = f"{r['topology']}, {c['level']}, {c['n']:,} tokens, vocabulary {c['vocab']:,}"
        if r["kind"] == "tpu_cycles":
            rows = tuple((k, f"{v:,}") for k, v in sorted(r.get("operations", {}).items(), key=lambda kv: -kv[1]))
            s.tables.append(Table(f"ESTIMATE: {at}", ("operation", "cycles"), rows))
            continue
        bars = [
            Bar(form, missing=row["error"][:48]) if "error" in row
            else Bar(form, (("peak", row["peak"] / MIB),), tone_of(form, 0))
            for form, row in r["programs"].items()
        ]  # fmt: skip
        s.charts.append(Bars(slug(f"tpu {at}"), f"Peak HBM per chip: {at}", "MiB", tuple(bars)))
    return s


def gradchecks(records: list[Record]) -> Section:
    """Every gate's value in units of its limit."""
    s = Section("Gradient checks", "A gate's value in units of its limit: below 1 it is met.")
    bars, rows = [], []
    for r in records:
        for gate, g in r["gates"].items():
            value, limit = float(g["value"]), float(g["limit"])
            share = value / limit if limit else math.inf
            label = f"{r['config/name']}: {gate}"
            if math.isfinite(share):
                bars.append(Bar(label, (("value / limit", share),), "good" if g["ok"] else "bad"))
            else:
                bars.append(Bar(label, missing=f"{value:g}", tone="bad"))
            rows.append((r["config/name"], gate, f"{value:.3g}", f"{limit:g}", "PASS" if g["ok"] else "FAIL"))
    s.charts.append(Bars("gradcheck-gates", "Gates", "x limit", tuple(bars), 1.0, "limit"))
    s.tables.append(Table("Gates", ("check", "gate", "value", "limit", ""), tuple(rows)))
    return s
