"""Which charts and tables a set of records makes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from logitless.lab.bench.charts import TONES, Bar, Bars, Chart, Lines, Series, number
from logitless.lab.tools.result_files import Record

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
    folded: list[Table] = dataclasses.field(default_factory=list)
    """Tables that are open only when asked for."""


def slug(text: str) -> str:
    """A name for files and anchors."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


_OURS = ("kernel", "default", "chunked", "fused", "logitless", "pallas_tpu", "mosaic_gpu", "sparse")
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
    if arm.startswith(_OURS) and not arm.endswith("(other tree)"):
        return "ours"
    return _THEIRS.get(arm, TONES[1 + position % (len(TONES) - 1)])


def own_tone(arm: str, position: int, taken: Iterable[Series]) -> str:
    """The arm's colour, or another one where a line of this chart has it already."""
    used, tone = {s.tone for s in taken}, tone_of(arm, position)
    return next((t for t in (tone, *TONES) if t not in used), tone)


def without_empty_columns(table: Table) -> Table:
    """The table less the columns that have nothing in any row."""
    keep = [i for i in range(len(table.columns)) if any(row[i] for row in table.rows)]
    rows = tuple(tuple(row[i] for i in keep) for row in table.rows)
    return Table(table.title, tuple(table.columns[i] for i in keep), rows)


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


ROWS = 200
"""Of a record that is shown as it is."""


def others(records: list[tuple[Path, Record]]) -> Section:
    """Records of other scripts, each as a table of what is in it."""
    s = Section("Other records", "Results of scripts that make no chart here: what is in each file, as it is.")
    for path, record in records:
        rows = list(_leaves(record, ""))
        more = [("", f"and {len(rows) - ROWS:,} more, in the file")] if len(rows) > ROWS else []
        s.folded.append(Table(path.name, ("what", "value"), tuple(rows[:ROWS] + more)))
    return s


def _leaves(value: Any, at: str) -> Iterable[tuple[str, str]]:
    """``(where, what)`` of every value; a long list of numbers by its range."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{at}: {key}" if at else str(key))
    elif isinstance(value, list) and value and all(isinstance(v, (int, float)) for v in value):
        few = len(value) <= 6
        yield (
            at,
            ", ".join(map(cell, value)) if few else f"{len(value)} values, {cell(min(value))} to {cell(max(value))}",
        )
    elif isinstance(value, list):
        for i, inner in enumerate(value, 1):
            yield from _leaves(inner, f"{at} {i}")
    else:
        yield at, cell(value)


def cell(value: Any) -> str:
    """A value in a table: a count as a whole number, a measurement with its first digits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else number(value)


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
