"""The verdict on top of the report: do results agree, and by which test; time; memory; each with what it rests on."""

from __future__ import annotations

import dataclasses
from html import escape
from typing import Any

from logitless.lab.tools.result_files import Record, kind_of


@dataclasses.dataclass(frozen=True)
class Tile:
    """A question, its answer in a few words, and what the answer rests on; ``good`` is ``None`` if it is no verdict."""

    question: str
    answer: str
    basis: str
    good: bool | None = None


def tiles(records: list[Record]) -> list[Tile]:
    """At most three; what the records do not tell has none."""
    found = [_agreement(records), _time(records), _memory(records)]
    return [t for t in found if t is not None]


def html(found: list[Tile]) -> str:
    """The tiles as a list."""
    if not found:
        return ""
    marks = {True: " good", False: " bad", None: ""}
    items = "".join(
        f'<li class="tile{marks[t.good]}"><span>{escape(t.question)}</span><strong>{escape(t.answer)}</strong>'
        f"<span>{escape(t.basis)}</span></li>"
        for t in found
    )
    return f'<ul class="tiles" aria-label="Verdict">{items}</ul>'


def _agreement(records: list[Record]) -> Tile | None:
    """The sharpest test there is: A/B runs, else gradient checks, else what benchmarks verified themselves."""
    question = "Do they agree?"
    judged = [a for r in records if r.get("kind") == "ab" for a in _agreements(r)]
    if judged:
        verdicts = [a.get("agree") for a in judged]
        if None in verdicts:
            return Tile(question, "cannot be judged", str(judged[verdicts.index(None)].get("test", "A/B training")))
        bad = next((a for a in judged if not a["agree"]), judged[0])
        return Tile(question, "yes" if all(verdicts) else "NO", str(bad.get("test", "A/B training")), all(verdicts))
    gates = [g for r in records if kind_of(r) == "gradcheck" for g in r["gates"].values()]
    if gates:
        met = sum(bool(g["ok"]) for g in gates)
        said = f"{met} of {len(gates)} gates of gradient checks met"
        return Tile(question, "yes" if met == len(gates) else "NO", said, met == len(gates))
    checks = [r["verify"] for r in records if kind_of(r) == "bench" and "verify" in r]
    if checks:
        good = all(v["passed"] for v in checks)
        return Tile(
            question, "yes" if good else "NO", f"{len(checks)} benchmarks, verified before they were timed", good
        )
    return None


def _agreements(record: Record) -> list[dict[str, Any]]:
    found = record.get("agreement", {})
    return list(found.values()) if found and all(isinstance(v, dict) for v in found.values()) else [found]


def _compared(records: list[Record]) -> tuple[Record, str, str, dict[str, Any]] | None:
    """Of the first case that has it: the library's arm as a user gets it, or else with options, and its dense form."""
    for r in records:
        for name in ("default", "kernel") if kind_of(r) == "bench" else ():
            for other, clocks in r["arms"].get(name, {}).get("ratios", {}).items():
                return r, name, other, clocks
    return None


def _named(arm: str) -> str:
    """An arm with what it is."""
    known = {"default": "the call without options", "kernel": "the call with its options", "naive": "log_softmax"}
    about = known.get(arm) or ("the best dense form" if arm.startswith("strong") else "")
    return f"{arm} ({about})" if about else arm


def _time(records: list[Record]) -> Tile | None:
    found = _compared(records)
    if found is None:
        return None
    record, name, other, clocks = found
    r = next(iter(clocks.values()))
    said = f"{record['name']}: {_named(name)} / {_named(other)}"
    if r["low"] is None:
        return Tile("Time", f"{r['ratio']:.2f}x", f"{said}, one round")
    inside = f"{said}, 95 % interval {r['low']:.3f} to {r['high']:.3f}"
    if r["low"] <= 1 <= r["high"]:
        return Tile("Time", "no difference", inside)
    return Tile("Time", f"{r['ratio']:.2f}x", inside, r["ratio"] < 1)


def _memory(records: list[Record]) -> Tile | None:
    found = _compared(records)
    if found is None:
        return None
    record, name, other, _ = found
    rows = record["arms"][name], record["arms"][other]
    seen = all(row.get("mem/device") and not row["mem/device"]["from_compile"] for row in rows)
    gauge = "mem/device" if seen else "mem/compiler"
    a, b = (row[gauge]["temporaries"] if row[gauge] else 0 for row in rows)
    if not b:
        return None
    by = "the device" if seen else "the compiler"
    basis = f"temporaries (beyond inputs and outputs), {record['name']}: {_named(name)} / {_named(other)}, by {by}"
    return Tile("Memory", f"{a / b:.2f}x", basis + ("'s peak" if seen else "'s plan"), a < b)
