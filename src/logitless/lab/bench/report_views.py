"""Records, which have passed :mod:`.report_schema`, as what the report shows: verdict tiles, charts and tables."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from logitless.lab.bench import ratios
from logitless.lab.bench.charts import TONES, Bar, Bars, Chart, Lines, Series, number
from logitless.lab.bench.report_schema import is_number
from logitless.lab.bench.text_table import not_alone
from logitless.lab.tools.child import OUT_OF_MEMORY
from logitless.lab.tools.result_files import Record, kind_of

MIB = 2**20
Found = Sequence[tuple[Path, Record]]


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows by column name; numbers are written as a person would."""

    title: str
    rows: Sequence[dict[str, Any]]

    @property
    def columns(self) -> list[str]:
        """All columns but those that are empty in every row."""
        names = dict.fromkeys(k for row in self.rows for k in row)
        return [k for k in names if any(cell(row.get(k)) for row in self.rows)]

    @property
    def cells(self) -> list[list[str]]:
        return [[cell(row.get(k)) for k in self.columns] for row in self.rows]


@dataclasses.dataclass
class Section:
    """A heading with charts and tables under it; ``folded`` are open only when asked for."""

    title: str
    text: str
    charts: list[Chart] = dataclasses.field(default_factory=list)
    tables: list[Table] = dataclasses.field(default_factory=list)
    folded: list[Table] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Tile:
    """A question, its answer in a few words, and what the answer rests on; ``good`` is ``None`` if it is no verdict."""

    question: str
    answer: str
    basis: str
    good: bool | None = None


def slug(text: str) -> str:
    """A name for files and anchors."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def cell(value: Any) -> str:
    """A value in a table: a count as a whole number, a measurement with its first digits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else number(value)


_OURS = ("kernel", "default", "chunked", "fused", "logitless", "pallas_tpu", "mosaic_gpu", "sparse")


def tone_of(arm: str, taken: Iterable[str] = ()) -> str:
    """The colour of an arm: the accent for ours, the next one that is not taken for others."""
    ours = arm.startswith(_OURS) and not arm.endswith("(other tree)")
    used = set(taken)
    return next((t for t in TONES[0 if ours else 1 :] if t not in used), TONES[-1])


def _lines(points: dict[str, list[tuple[float, float]]]) -> tuple[Series, ...]:
    """A line for each arm that has points, each in a colour of its own."""
    lines: list[Series] = []
    for arm, found in points.items():
        if found:
            lines.append(Series(arm, tuple(found), tone_of(arm, (s.tone for s in lines))))
    return tuple(lines)


def _bars(arms: dict[str, Record], value: Callable[[Record], dict[str, float] | None]) -> tuple[Bar, ...]:
    """A bar for each arm; what failed has its error there."""
    bars: list[Bar] = []
    for arm, row in arms.items():
        parts = None if "error" in row else value(row)
        tone = "ours" if tone_of(arm) == "ours" else tone_of(arm, (b.tone for b in bars))
        bars.append(Bar(arm, tuple((parts or {}).items()), tone, "" if parts else row.get("error", "no plan")[:48]))
    return tuple(bars)


def _interval(r: Record) -> str:
    return "" if ratios.verdict(r.get("low"), r.get("high")) == ratios.ONE else f"{r['low']:.3f} to {r['high']:.3f}"


# Benchmarks.

TERMS = (
    "An arm is one program over the case's inputs. naive: log_softmax over all logits, and a gather. strong: the "
    "strongest dense form we know, which keeps its logits. default: the library's call without options. kernel: with "
    "the case's options. Temporaries: memory beyond inputs and outputs."
)


def bench(records: list[Record]) -> Section:
    """Ratios, time and memory of each case, and their course along live tokens and context length."""
    s = Section("Benchmarks", " ".join([_how(records), *filter(None, map(_busy, records)), TERMS]))
    clocks = {"device_ms": "device", "wall_ms": "a call", "back_to_back_ms": "back to back"}
    s.tables = [
        Table("Ratios", [
            {"case": r["name"], "arm": arm, "to": other, "clock": clocks.get(clock, clock),
             "ratio": f"{x['ratio']:.3f}", "95 % interval": _interval(x),
             "": ratios.verdict(x.get("low"), x.get("high"))}
            for r in records for arm, row in r["arms"].items() for other, found in (row.get("ratios") or {}).items()
            for clock, x in found.items()
        ]),
        Table("Bars", [
            {"case": r["name"], "bar": name, "reached": "" if g.get("value") is None else f"{g['value']:.3f}",
             "95 % interval": _interval(g), "limit": f"{g['limit']:g}",
             "": {"met": "PASS", "missed": "FAIL"}.get(g["state"], g["state"])}
            for r in records for name, g in (r.get("gates") or {}).items()
        ]),
        Table("All cases", [_case(r["name"], arm, row) for r in records for arm, row in r["arms"].items()]),
    ]  # fmt: skip
    note = "Masked tokens (prompts, padding) cost a dense loss as much as live ones."
    s.charts = [
        *_along(records, "live", "Cost against live tokens", "share of tokens that are live", "ms", note),
        *_along(records, "tokens", "Temporaries against tokens", "tokens", "MiB", "By the compiler's plan."),
    ]
    for r in records:
        if any("error" not in row for row in r["arms"].values()):
            s.charts += [_time_chart(r), _memory_chart(r)]
    return s


def _how(records: list[Record]) -> str:
    """What was done, as far as the records say so themselves."""
    in_turn = all(any("ratios" in row for row in r["arms"].values()) for r in records)
    said = "The arms of a case took turns." if in_turn else (
        "Some cases are from before arms took turns: one after the other, so that a machine's drift is in their "
        "differences."
    )  # fmt: skip
    left = [r["name"] for r in records if not (r.get("verify") or {}).get("passed")]
    checked = f"Not verified: {', '.join(left)}." if left else (
        "Every case was verified at a small shape before it was timed."
    )  # fmt: skip
    return f"{said} {checked}"


def _busy(record: Record) -> str:
    said = not_alone(record)
    return f"{record['name']} was {said}." if said else ""


def _case(name: str, arm: str, row: Record) -> dict[str, Any]:
    if "error" in row:
        return {"case": name, "arm": arm, "median ms": row["error"][:80]}
    plan, device = row.get("mem/compiler"), row.get("mem/device")
    bound = "+" if device and device.get("from_compile") else ""
    ratio = row.get("roofline_ratio")
    return {
        "case": name, "arm": arm, "median ms": number(row["median_ms"]),
        "p10 to p90": f"{number(row['p10_ms'])} to {number(row['p90_ms'])}",
        "ms a call": _float(row.get("wall_ms")), "ms back to back": _float(row.get("back_to_back_ms")),
        "temporaries MiB, plan": f"{plan['temporaries'] / MIB:,.1f}" if plan else "",
        "temporaries MiB, device": f"{device['temporaries'] / MIB:,.1f}{bound}" if device else "",
        "TFLOP/s": _float(row.get("tflops")), "GB/s": _float(row.get("gb_per_s")),
        "x roofline": f"{ratio:.2f}" if ratio else "",
    }  # fmt: skip


def _float(value: float | None) -> str:
    return number(value) if value else ""


def _shape(record: Record) -> str:
    c = record["config"]
    hidden = f", hidden {c['hidden']:,}" if c["level"] == "head" and c.get("hidden") else ""
    return f"{c['tokens']:,} tokens, vocabulary {c['vocab']:,}{hidden}, {c['dtype']}"


def _time_chart(record: Record) -> Bars:
    bars = _bars(record["arms"], lambda row: {"median": row["median_ms"]})
    floor = next((row["roofline_ms"] for row in record["arms"].values() if row.get("roofline_ms")), None)
    checked = record.get("verify")
    said = "not verified" if not checked else (
        "verified before it was timed" if checked["passed"] else "did NOT verify"
    )  # fmt: skip
    note = "; ".join(filter(None, [_shape(record), said, not_alone(record)]))
    name = record["name"]
    return Bars(f"time-{slug(name)}", f"Time: {name}", "ms", bars, floor, "roofline", note)


def _seen(rows: Iterable[Record]) -> bool:
    """Whether every peak is the device's own, and not unknown or an autotuner's."""
    return all(row.get("mem/device") and not row["mem/device"].get("from_compile") for row in rows)


def _memory_chart(record: Record) -> Bars:
    seen = _seen(row for row in record["arms"].values() if "error" not in row)
    gauge = "mem/device" if seen else "mem/compiler"

    def parts(row: Record) -> dict[str, float] | None:
        m = row.get(gauge)
        inputs = 0 if not m else m.get("inputs") or m.get("arguments") or 0
        own = None if not m else {"inputs": inputs, **{k: m[k] for k in ("outputs", "temporaries")}}
        return own and {k: v / MIB for k, v in own.items()}

    bars = _bars(record["arms"], parts)
    floor = next((sum(v for _, v in b.parts[:2]) for b in reversed(bars) if b.parts), None)
    note = f"{_shape(record)}; {_GAUGES[seen]}"
    name = record["name"]
    return Bars(f"memory-{slug(name)}", f"Memory: {name}", "MiB", bars, floor, "inputs and outputs", note)


_GAUGES = {True: "the device's peak", False: "the compiler's plan"}
_HOW_MEASURED = ("name", "out", "rounds", "repeats", "warmup", "verify", "timeout_s", "baselines", "peaks")


def _along(records: list[Record], key: str, title: str, x: str, unit: str, note: str) -> Iterable[Lines]:
    """A chart for each group of cases that differ in ``key`` alone, if a line in it has two points."""
    groups: dict[str, list[Record]] = {}
    for r in records:
        drop = {key, *_HOW_MEASURED, *(["hidden"] if r["config"]["level"] != "head" else [])}
        groups.setdefault(repr(sorted((k, repr(v)) for k, v in r["config"].items() if k not in drop)), []).append(r)
    for group in groups.values():
        points: dict[str, list[tuple[float, float]]] = {}
        for r in sorted(group, key=lambda r: r["config"][key]):
            for arm, row in r["arms"].items():
                y = None if "error" in row else row["median_ms"] if unit == "ms" else _planned(row)
                points.setdefault(arm, []).extend([] if y is None else [(r["config"][key], y)])
        full = {
            arm: [
                f"{r['config'][key]:,}" for r in group
                if r["arms"].get(arm, {}).get("error", "").startswith(OUT_OF_MEMORY)
            ]
            for arm in points
        }  # fmt: skip
        shown = {a + (f" ({OUT_OF_MEMORY} at {', '.join(full[a])})" if full[a] else ""): p for a, p in points.items()}
        if any(len({x for x, _ in p}) > 1 for p in shown.values()):
            named = f"{title}: {group[0]['name']}"
            yield Lines(slug(named), named, x, unit, _lines(shown), note=note)


def _planned(row: Record) -> float | None:
    return row["mem/compiler"]["temporaries"] / MIB if row.get("mem/compiler") else None


# Training.

CURVES = (
    ("reward", ("train/reward", "reward", "train/reward_mean"), "mean reward of the step's completions"),
    ("KL", ("train/kl", "kl"), "KL to the initial policy, k3"),
    ("KL (k1)", ("train/kl_k1",), "KL to the initial policy, k1"),
    ("update time", ("time/update_s",), "seconds"),
    ("left-out mass", ("train/left_out_mass",), "mean over the tokens with a gradient"),
    ("largest left-out mass", ("train/left_out_mass_max",), "of a token"),
    ("step time", ("time/train/step_s", "time/step_s"), "seconds"),
    ("loss", ("train/loss", "loss"), "loss"),
    ("entropy", ("train/entropy", "entropy"), "nats"),
)


def _curves(arms: dict[str, list[Record]], name: str, times: bool = True) -> list[Chart]:
    """The course of each metric; without ``times`` not of those that only a run alone can tell."""
    out: list[Chart] = []
    for what, keys, unit in CURVES:
        points: dict[str, list[tuple[float, float]]] = {}
        for arm, steps in arms.items() if times or not keys[0].startswith("time/") else ():
            values = [next((step[k] for k in keys if k in step), None) for step in steps]
            at = [i if step.get("step") is None else step["step"] for i, step in enumerate(steps)]
            points[arm] = [(x, y) for x, y in zip(at, values, strict=True) if y is not None and is_number(y)]
        if series := _lines(points):
            title = f"{what[0].upper()}{what[1:]} by step: {name}"
            out.append(Lines(slug(title), title, "step", unit, series))
    return out


def _columns(by_arm: dict[str, Record]) -> list[dict[str, Any]]:
    """A row for each key whose values are no lists or objects, with a column for each arm."""
    keys = dict.fromkeys(k for a in by_arm.values() for k, v in a.items() if isinstance(v, (int, float, str)))
    return [{"": k, **{arm: a.get(k) for arm, a in by_arm.items()}} for k in keys]


def training(found: Found) -> Section:
    """Curves of A/B runs and of single runs, with the agreement of the arms."""
    s = Section(
        "Training",
        "An arm is one training run with a loss of its own; the first is the baseline. Arms of an A/B start from the "
        "same seed and see the same problems. KL: how far the policy is from the one it started as.",
    )
    single: dict[str, list[Record]] = {}
    for path, r in found:
        name = path.parent.name if path.stem in ("ab", "metrics") else path.stem
        if r.get("kind") != "ab":
            single.setdefault(name, []).append(r)
            continue
        alone = not ((r.get("config") or {}).get("ab") or {}).get("parallel")
        if not alone:
            s.text += f" The arms of {name} ran at the same time: nothing is said about their speed."
        runs = {**r["arms"], **({"control": r["control"]} if r.get("control") else {})}
        s.charts += _curves({arm: a.get("metrics") or [] for arm, a in runs.items()}, name, alone)
        told = _columns({arm: a.get("summary") or {} for arm, a in runs.items()})
        agreed = _agreements(r)
        title = f"{name}: agreement " + ("of the arms" if "" in agreed else f"with {next(iter(r['arms']), '')}")
        s.tables += [
            Table(f"{name}: summary", [row for row in told if alone or not row[""].startswith("time/")]),
            Table(title, _columns({arm or "value": a for arm, a in agreed.items()})),
        ]
    for name, steps in single.items():
        s.charts += _curves({"run": steps}, name)
    return s


def _agreements(record: Record) -> dict[str, Record]:
    """What was said of each arm that was compared with the first; of two arms, of one without a name."""
    found = record.get("agreement") or {}
    return found if found and all(isinstance(v, dict) for v in found.values()) else {"": found}


# Plans, compilers, checks, and what other scripts recorded.


def plans(records: list[Record]) -> Section:
    """Memory against context length, fused and dense; memory on meshes."""
    s = Section("Plans", "From shapes, compilers and public chip numbers; nothing ran.")
    meshes: list[Bar] = []
    for r in records:
        c = r["config"]
        name = c.get("model") or f"H {c['hidden']}, V {c['vocab']}"
        if "mesh" in r:
            meshes.append(Bar(f"{name}, {c['mesh']} {c['chip']}", (("peak", r["mesh"]["peak"] / MIB),), "ours"))
            continue
        where = f" on {c['chip']}" if c.get("chip") else ""
        title = f"Memory against context length: {name}{where}"
        points = {k: [(p["tokens"], p[f"{b}peak"] / MIB) for p in r["contexts"]] for k, b in _FORMS.items()}
        if series := _lines(points):
            s.charts.append(Lines(slug(title), title, "tokens", "peak MiB", series, log=True))
        p, longest = r["plan"], r.get("longest_context")
        rows = [
            {"": "backend", "fused": p["backend"], "dense": "dense"},
            {"": "matmuls", "fused": p["matmuls"], "dense": 3},
            *(
                {"": what, **{k: format(p[b + key] * scale, form) for k, b in _FORMS.items()}}
                for what, key, scale, form in _PLANNED
                if p.get(key) is not None and p.get(f"dense_{key}") is not None
            ),
            *([{"": "longest context", **{k: longest.get(k) for k in _FORMS}}] if longest else []),
        ]
        s.tables.append(Table(f"{name}{where}, {c['tokens']:,} tokens", rows))
    if meshes:
        s.charts.append(Bars("mesh-peak", "Peak memory on each chip of a mesh", "MiB", tuple(meshes)))
    return s


_FORMS = {"fused": "", "dense": "dense_"}
_PLANNED = (
    ("TFLOP", "flops", 1e-12, ".2f"),
    ("peak MiB", "peak", 1 / MIB, ",.0f"),
    ("temporaries MiB", "temporaries", 1 / MIB, ",.0f"),
    ("roofline ms", "seconds", 1e3, ".2f"),
)


def tpu(records: list[Record]) -> Section:
    """What the TPU compiler said."""
    s = Section("TPU compiler", "Compiled or simulated by libtpu on a machine without a TPU. Cycles are estimates.")
    for r in records:
        c = r["config"]
        at = f"{r['topology']}, {c['level']}, {c['n']:,} tokens, vocabulary {c['vocab']:,}"
        if r["kind"] == "tpu_cycles":
            cycles = sorted((r.get("operations") or {}).items(), key=lambda kv: -kv[1])
            s.tables.append(Table(f"ESTIMATE: {at}", [{"operation": k, "cycles": v} for k, v in cycles]))
        else:
            bars = _bars(r["programs"], lambda row: {"peak": row["peak"] / MIB})
            s.charts.append(Bars(slug(f"tpu {at}"), f"Peak HBM per chip: {at}", "MiB", bars))
    return s


def gradchecks(records: list[Record]) -> Section:
    """Every gate's value in units of its limit."""
    s = Section("Gradient checks", "A gate's value in units of its limit: below 1 it is met.")
    gates = [(r["config/name"], gate, g) for r in records for gate, g in r["gates"].items()]
    bars = []
    for name, gate, g in gates:
        share = g["value"] / g["limit"] if g["limit"] else math.inf
        parts = (("value / limit", share),) if is_number(share) else ()
        tone = "good" if g["ok"] and parts else "bad"
        bars.append(Bar(f"{name}: {gate}", parts, tone, "" if parts else f"{g['value']:g}"))
    s.charts.append(Bars("gradcheck-gates", "Gates", "x limit", tuple(bars), 1.0, "limit"))
    rows = [
        {"check": name, "gate": gate, "value": f"{g['value']:.3g}", "limit": f"{g['limit']:g}",
         "": "PASS" if g["ok"] else "FAIL"}
        for name, gate, g in gates
    ]  # fmt: skip
    s.tables.append(Table("Gates", rows))
    return s


ROWS = 200
"""Of a record that is shown as it is."""


def others(found: Found) -> Section:
    """Records of other scripts, each as a table of what is in it."""
    s = Section("Other records", "Results of scripts that make no chart here: what is in each file, as it is.")
    for path, record in found:
        rows = [{"what": at, "value": value} for at, value in _leaves(record, "")]
        more = [{"what": "", "value": f"and {len(rows) - ROWS:,} more, in the file"}] if len(rows) > ROWS else []
        s.folded.append(Table(path.name, rows[:ROWS] + more))
    return s


def _leaves(value: Any, at: str) -> Iterable[tuple[str, str]]:
    """``(where, what)`` of every value; a long list of numbers by its range."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{at}: {key}" if at else str(key))
    elif isinstance(value, list) and value and all(isinstance(v, (int, float)) for v in value):
        wide = f"{len(value)} values, {cell(min(value))} to {cell(max(value))}"
        yield at, wide if len(value) > 6 else ", ".join(map(cell, value))
    elif isinstance(value, list):
        for i, inner in enumerate(value, 1):
            yield from _leaves(inner, f"{at} {i}")
    else:
        yield at, cell(value)


def sections(found: Found) -> list[Section]:
    """What the records make, in the page's order."""

    def of(*kinds: str) -> Found:
        return [(path, r) for path, r in found if kind_of(r) in kinds]

    def alone(view: Callable[[list[Record]], Section]) -> Callable[[Found], Section]:
        return lambda chosen: view([r for _, r in chosen])

    views: tuple[tuple[Callable[[Found], Section], Found], ...] = (
        (alone(bench), of("bench")),
        (training, of("ab", "train")),
        (alone(plans), of("plan")),
        (alone(tpu), of("tpu_compile", "tpu_cycles")),
        (alone(gradchecks), of("gradcheck")),
        (others, of("record")),
    )
    return [view(chosen) for view, chosen in views if chosen]


# The verdict on top of the page.


def tiles(records: list[Record]) -> list[Tile]:
    """At most three; what the records do not tell has none."""
    return [t for t in (_agreement(records), *_compared(records)) if t is not None]


def _agrees(agreement: Record) -> bool | None:
    said = agreement.get("agree")
    return said if isinstance(said, bool) else None


def _agreement(records: list[Record]) -> Tile | None:
    """The sharpest test there is: A/B runs, else gradient checks, else what benchmarks verified themselves."""
    question = "Do they agree?"
    judged = [a for r in records if r.get("kind") == "ab" for a in _agreements(r).values()]
    if judged:
        # An arm that disagrees decides, then one that cannot be judged.
        first = min(judged, key=lambda a: (False, None, True).index(_agrees(a)))
        agree = _agrees(first)
        answer = {True: "yes", False: "NO", None: "cannot be judged"}[agree]
        return Tile(question, answer, str(first.get("test", "A/B training")), agree)
    gates = [g["ok"] for r in records if kind_of(r) == "gradcheck" for g in r["gates"].values()]
    checks = [r["verify"]["passed"] for r in records if kind_of(r) == "bench" and r.get("verify")]
    if not gates and not checks:
        return None
    passed = gates or checks
    said = f"{sum(gates)} of {len(gates)} gates of gradient checks met" if gates else (
        f"{len(checks)} benchmarks, verified before they were timed"
    )  # fmt: skip
    return Tile(question, "yes" if all(passed) else "NO", said, all(passed))


_ARMS = {"default": "the call without options", "kernel": "the call with its options", "naive": "log_softmax"}


def _named(arm: str) -> str:
    """An arm with what it is."""
    about = _ARMS.get(arm) or ("the best dense form" if arm.startswith("strong") else "")
    return f"{arm} ({about})" if about else arm


def _compared(records: list[Record]) -> list[Tile]:
    """Time and memory of the first case with a ratio: of the call without options, or else with them."""
    for r in records:
        for name in ("default", "kernel") if kind_of(r) == "bench" else ():
            row = r["arms"].get(name, {})
            for other, clocks in (row.get("ratios") or {}).items():
                if clocks and "error" not in r["arms"].get(other, {"error": ""}):
                    what = f"{r['name']}: {_named(name)} / {_named(other)}"
                    return [_time(next(iter(clocks.values())), what, not_alone(r)), *_held(row, r["arms"][other], what)]
    return []


def _time(r: Record, what: str, busy: str) -> Tile:
    said = ratios.verdict(r.get("low"), r.get("high"))
    inside = "one round" if said == ratios.ONE else f"95 % interval {_interval(r)}"
    answer = said if said in (ratios.NONE, ratios.UNSURE) else f"{r['ratio']:.2f}x"
    good = {ratios.FASTER: True, ratios.SLOWER: False}.get(said)
    return Tile("Time", answer, ", ".join(filter(None, [what, inside, busy])), good)


def _held(row: Record, other: Record, what: str) -> list[Tile]:
    seen = _seen((row, other))
    a, b = ((x.get("mem/device" if seen else "mem/compiler") or {}).get("temporaries") for x in (row, other))
    if a is None or not b:
        return []
    basis = f"temporaries (beyond inputs and outputs), {what}, by {_GAUGES[seen]}"
    return [Tile("Memory", f"{a / b:.2f}x", basis, a < b)]
