"""Charts and tables of benchmarks: ratios with their intervals first, then time and memory of each case."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from logitless.lab.bench.charts import Bar, Bars, Lines, Series, number
from logitless.lab.bench.report_charts import MIB, Section, Table, own_tone, slug, tone_of
from logitless.lab.tools.child import OUT_OF_MEMORY
from logitless.lab.tools.result_files import Record

TERMS = (
    "An arm is one program over the case's inputs. naive: log_softmax over all logits, and a gather. strong: the "
    "strongest dense form we know, which keeps its logits. default: the library's call without options. kernel: with "
    "the case's options. Temporaries: memory beyond inputs and outputs."
)


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
        f"{_shape(record['config'])}; {_verified(record)}",
    )  # fmt: skip


def _verified(record: Record) -> str:
    """Whether the library's arms were checked before they were timed; a record that does not say so was not."""
    if "verify" not in record:
        return "not verified"
    return "verified before it was timed" if record["verify"]["passed"] else "did NOT verify"


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
        if memory is None:
            bars.append(Bar(arm, missing="no plan"))
            continue
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
    drop = {key, "name", "out", "rounds", "repeats", "warmup", "verify", "timeout_s", "baselines", "peaks"}
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
    """A line for each arm; one that ran out of memory on the way says where. None if no line has two points."""
    lines: list[Series] = []
    for i, arm in enumerate(dict.fromkeys(a for r in group for a in r["arms"])):
        found = ((r["config"][key], value(r["arms"][arm])) for r in group if arm in _good(r))
        points = tuple((x, y) for x, y in found if y is not None)
        full = [
            f"{r['config'][key]:,}" for r in group if r["arms"].get(arm, {}).get("error", "").startswith(OUT_OF_MEMORY)
        ]
        label = arm + (f" ({OUT_OF_MEMORY} at {', '.join(full)})" if full else "")
        if points:
            lines.append(Series(label, points, own_tone(arm, i, lines)))
    return tuple(lines) if any(len(line.points) > 1 for line in lines) else ()


def bench(records: list[Record]) -> Section:
    """Ratios, time and memory of each case, and their course along live tokens and context length."""
    s = Section("Benchmarks", f"{_how(records)} {TERMS}")
    ratios = _ratio_rows(records)
    if ratios:
        columns = ("case", "arm", "to", "clock", "ratio", "95 % interval", "")
        s.tables.append(Table("Ratios", columns, tuple(ratios)))
    gates = _gate_rows(records)
    if gates:
        s.tables.append(Table("Bars", ("case", "bar", "reached", "95 % interval", "limit", ""), tuple(gates)))
    for first, group in _along(records, "live"):
        series = _lines_along(group, "live", lambda row: row["median_ms"])
        title = f"Cost against live tokens: {first['name']}"
        note = "Masked tokens (prompts, padding) cost a dense loss as much as live ones."
        if series:
            s.charts.append(Lines(slug(title), title, "share of tokens that are live", "ms", series, note=note))
    for first, group in _along(records, "tokens"):
        series = _lines_along(group, "tokens", _planned)
        title = f"Temporaries against tokens: {first['name']}"
        if series:
            s.charts.append(Lines(slug(title), title, "tokens", "MiB", series, note="By the compiler's plan."))
    for r in records:
        if _good(r):
            s.charts += [_time_chart(r), _memory_chart(r)]
    s.tables.append(_all_cases(records))
    return s


def _planned(row: Record) -> float | None:
    return row["mem/compiler"]["temporaries"] / MIB if row["mem/compiler"] else None


def _how(records: list[Record]) -> str:
    """What was done, as far as the records say so themselves."""
    turns = [any("ratios" in row for row in r["arms"].values()) for r in records]
    said = "The arms of a case took turns." if all(turns) else "Some cases are from before arms took turns: one after "
    said += "" if all(turns) else "the other, so that a machine's drift is in their differences."
    checked = [r["name"] for r in records if r.get("verify", {}).get("passed")]
    if len(checked) == len(records):
        return f"{said} Every case was verified at a small shape before it was timed."
    left = [r["name"] for r in records if r["name"] not in checked]
    return f"{said} Not verified: {', '.join(left)}."


def _ratio_rows(records: list[Record]) -> list[tuple[str, ...]]:
    clocks = {"device_ms": "device", "wall_ms": "a call", "back_to_back_ms": "back to back"}
    rows: list[tuple[str, ...]] = []
    for r in records:
        for arm, row in r["arms"].items():
            for other, found in row.get("ratios", {}).items():
                for clock, x in found.items():
                    inside = "" if x["low"] is None else f"{x['low']:.3f} to {x['high']:.3f}"
                    rows.append((r["name"], arm, other, clocks[clock], f"{x['ratio']:.3f}", inside, x["verdict"]))
    return rows


def _gate_rows(records: list[Record]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for r in records:
        for name, g in r.get("gates", {}).items():
            value = "" if g["value"] is None else f"{g['value']:.3f}"
            inside = "" if g.get("low") is None else f"{g['low']:.3f} to {g['high']:.3f}"
            state = {"met": "PASS", "missed": "FAIL"}.get(g["state"], g["state"])
            rows.append((r["name"], name, value, inside, f"{g['limit']:g}", state))
    return rows


def _all_cases(records: list[Record]) -> Table:
    def shown(value: Any) -> str:
        return number(value) if value else ""

    rows = []
    for r in records:
        for arm, row in r["arms"].items():
            if "error" in row:
                rows.append((r["name"], arm, row["error"][:80], *[""] * 8))
                continue
            device, ratio = row.get("mem/device"), row.get("roofline_ratio")
            rows.append(
                (
                    r["name"],
                    arm,
                    number(row["median_ms"]),
                    f"{number(row['p10_ms'])} to {number(row['p90_ms'])}",
                    shown(row.get("wall_ms")),
                    shown(row.get("back_to_back_ms")),
                    f"{row['mem/compiler']['temporaries'] / MIB:,.1f}" if row["mem/compiler"] else "",
                    f"{device['temporaries'] / MIB:,.1f}" + ("+" if device["from_compile"] else "") if device else "",
                    shown(row.get("tflops")),
                    shown(row.get("gb_per_s")),
                    f"{ratio:.2f}" if ratio else "",
                )
            )
    columns = (
        "case", "arm", "median ms", "p10 to p90", "ms a call", "ms back to back", "temporaries MiB, plan",
        "temporaries MiB, device", "TFLOP/s", "GB/s", "x roofline",
    )  # fmt: skip
    return Table("All cases", columns, tuple(rows))
