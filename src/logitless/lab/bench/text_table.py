"""A benchmark's record as text."""

from __future__ import annotations

from typing import Any

from logitless.lab.bench import ratios
from logitless.lab.tools.text import wrapped

SMALL = 64 * 2**20
"""Bytes of all logits in float32 below which neither time nor memory says what the library is for."""


def table(record: dict[str, Any]) -> str:
    """The arms of a record as text: time, memory, ratio with its interval, the host's clocks."""
    c = record["config"]
    lines = [f"{record['name']}: {c['tokens']:,} tokens, vocabulary {c['vocab']:,}"]
    for name, row in record["arms"].items():
        if "error" in row:
            lines.append(wrapped([f"  {name:28s}", *row["error"].split()], 6, " "))
            continue
        said = [f"  {name:28s} {row['median_ms']:10.2f} ms"]
        memory = {"plan": row.get("mem/compiler"), "seen": row.get("mem/device")}
        said += [f"{k} {m['temporaries'] / 2**20:,.1f} MiB" for k, m in memory.items() if m]
        said += [f"of {other}: {ratios.shown(next(iter(x.values())))}" for other, x in row.get("ratios", {}).items()]
        if row.get("clock") == "device_ms":
            said.append(f"wall {row['wall_ms']:.2f}")
        if "back_to_back_ms" in row:
            said.append(f"back to back {row['back_to_back_ms']:.2f}")
        lines.append(wrapped(said, 6))
    for name, gate in record.get("gates", {}).items():
        value = "" if gate["value"] is None else f"{gate['value']:.3f}"
        inside = f" [{gate['low']:.3f}, {gate['high']:.3f}]" if gate.get("low") is not None else ""
        lines.append(wrapped([f"  {gate['state']:12s} {name}", f"{value}{inside} (<= {gate['limit']:g})"], 15))
    if busy := not_alone(record):
        lines.append(f"  {busy}, and the intervals show it")
    if "verify" not in record:
        lines.append("  not verified")
    if (logits := 4 * c["tokens"] * c["vocab"]) < SMALL:
        lines.append(f"  too small a shape to show what the library is for: {logits / 2**20:.1f} MiB of logits")
        lines.append("  (one that is not: logitless bench --config cpu_head)")
    return "\n".join(lines)


def not_alone(record: dict[str, Any]) -> str:
    """That a CPU's cores had other work as the benchmark began; empty if they had none, or a device did the work."""
    on_cpu = any((row.get("environment") or {}).get("platform") == "cpu" for row in record["arms"].values())
    busy = record.get("busy") or 0
    return f"not alone: {busy:g} cores were busy before the start" if on_cpu and busy >= 1 else ""
