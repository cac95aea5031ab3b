"""What the report shows of records: tiles, charts and tables, as data. A record without what it needs raises here."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from logitless.lab.bench import ratios
from logitless.lab.bench.charts import TONES, Bar, Bars, Chart, Lines, Series, is_number, number
from logitless.lab.bench.text_table import not_alone
from logitless.lab.tools.child import OUT_OF_MEMORY
from logitless.lab.tools.result_files import Record, kind_of

MIB = 2**20
Found = Sequence[tuple[Path, Record]]
Points = dict[str, list[tuple[float, float]]]


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows by column name, without columns and rows that hold nothing but a name."""

    title: str
    data: Sequence[dict[str, Any]]

    @property
    def columns(self) -> list[str]:
        names = dict.fromkeys(k for row in self.data for k in row)
        return [k for k in names if any(cell(row.get(k)) for row in self.data)]

    @property
    def rows(self) -> list[list[str]]:
        cells = [[cell(row.get(k)) for k in self.columns] for row in self.data]
        return [row for row in cells if len(row) == 1 or any(row[1:])]


@dataclasses.dataclass
class Section:
    """A heading with charts and tables under it; ``folded`` tables are open only when asked for."""

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
    """A value in a table: a count as a whole number, a measurement with its first digits, a switch as yes or no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else number(value)


def mib(size: float | None) -> str:
    return "" if size is None else f"{size / MIB:,.1f}"


_OURS = ("kernel", "default", "chunked", "fused", "logitless", "pallas_tpu", "mosaic_gpu", "sparse")


_KNOWN = {"strong": "a", "naive": "b", "strong/f32": "c", "naive/f32": "d"}
"""Colours that dense forms have on every chart."""


def tone_of(arm: str, taken: Iterable[str] = ()) -> str:
    """The colour of an arm: the accent for ours, that of a dense form, else the next one that is not taken."""
    ours = arm.startswith(_OURS) and not arm.endswith("(other tree)")
    wanted = (TONES[0], *TONES[:0:-1]) if ours else (_KNOWN.get(arm.partition(" (")[0], TONES[1]), *TONES[1:])
    used = set(taken)
    return next((t for t in wanted if t not in used), TONES[-1])


def _lines(points: Points) -> tuple[Series, ...]:
    """A line for each arm with points, in different colours."""
    lines: list[Series] = []
    for arm, found in points.items():
        if found:
            lines.append(Series(arm, tuple(found), tone_of(arm, (s.tone for s in lines))))
    return tuple(lines)


def _bars(arms: dict[str, Record], value: Callable[[Record], dict[str, float] | None]) -> tuple[Bar, ...]:
    """A bar per arm; a failed arm shows its error instead."""
    bars: list[Bar] = []
    for arm, row in arms.items():
        parts = None if "error" in row else value(row)
        tone = "ours" if tone_of(arm) == "ours" else tone_of(arm, (b.tone for b in bars))
        bars.append(Bar(arm, tuple((parts or {}).items()), tone, "" if parts else row.get("error", "no plan")[:44]))
    return tuple(bars)


def _interval(r: Record) -> str:
    return "" if r.get("low") is None or r.get("high") is None else f"{r['low']:.3f} to {r['high']:.3f}"


# Benchmarks.

TERMS = (
    "An arm is one program over the case's inputs. naive: log_softmax over all logits, and a gather. strong: the "
    "strongest dense form we know, which keeps its logits. default: the library's call without options. kernel: with "
    "the case's options. Temporaries: memory beyond inputs and outputs."
)
CLOCKS = {"device_ms": "device", "wall_ms": "a call", "back_to_back_ms": "back to back"}
_GAUGES = {True: "the device's peak", False: "the compiler's plan"}


def bench(of: Found) -> Section:
    """Ratios, time and memory of each case, and their course along live tokens and context length."""
    records = [r for _, r in of]
    arms = [(r, arm, row) for r in records for arm, row in r["arms"].items()]
    busy = [r["name"] for r in records if not_alone(r)]
    others = [f"The machine had other work during {'; '.join(busy)}: their times are not of this program alone."]
    s = Section("Benchmarks", " ".join([_how(records), *(others if busy else []), TERMS]))
    s.tables = [
        Table("Ratios", [
            {"case": r["name"], "arm": arm, "to": other, "clock": CLOCKS.get(clock, clock),
             "ratio": f"{x['ratio']:.3f}", "95 % interval": _interval(x),
             "verdict": ratios.verdict(x.get("low"), x.get("high"))}
            for r, arm, row in arms for other, found in (row.get("ratios") or {}).items() for clock, x in found.items()
        ]),
        Table("Bars", [
            {"case": r["name"], "bar": name, "reached": "" if g.get("value") is None else f"{g['value']:.3f}",
             "95 % interval": _interval(g), "limit": f"{g['limit']:g}",
             "verdict": {"met": "PASS", "missed": "FAIL"}.get(g["state"], g["state"])}
            for r in records for name, g in (r.get("gates") or {}).items()
        ]),
        Table("All cases", [{"case": r["name"], "arm": arm, **_numbers(row)} for r, arm, row in arms]),
    ]  # fmt: skip
    note = "Masked tokens (prompts, padding) cost a dense loss as much as live ones."
    s.charts = [
        *_along(records, "live", "Cost against live tokens", "share of tokens that are live", "ms", note),
        *_along(records, "tokens", "Temporaries against tokens", "tokens", "MiB", "By the compiler's plan."),
    ]
    for r in records:
        if any("error" not in row for row in r["arms"].values()):
            s.charts += _charts_of(r)
    return s


def _how(records: list[Record]) -> str:
    """What was done, as far as the records say so themselves."""
    in_turn = all(any("ratios" in row for row in r["arms"].values()) for r in records)
    left = [r["name"] for r in records if not (r.get("verify") or {}).get("passed")]
    drifts = "Some cases are from before arms took turns: a machine's drift is in their differences."
    turns = "The arms of a case took turns." if in_turn else drifts
    checked = "Every case was verified at a small shape before it was timed."
    return f"{turns} {checked if not left else 'Not verified: ' + ', '.join(left) + '.'}"


def _numbers(row: Record) -> dict[str, Any]:
    if "error" in row:
        return {"median ms": row["error"][:80]}
    plan, device = row.get("mem/compiler") or {}, row.get("mem/device") or {}
    return {
        "median ms": number(row["median_ms"]), "p10 to p90": f"{number(row['p10_ms'])} to {number(row['p90_ms'])}",
        "ms a call": row.get("wall_ms"), "ms back to back": row.get("back_to_back_ms"),
        "temporaries MiB, plan": mib(plan.get("temporaries")),
        "temporaries MiB, device": mib(device.get("temporaries")) + "+" * bool(device.get("from_compile")),
        "TFLOP/s": row.get("tflops") or None, "GB/s": row.get("gb_per_s") or None,
        "x roofline": f"{row['roofline_ratio']:.2f}" if row.get("roofline_ratio") else "",
    }  # fmt: skip


def _charts_of(record: Record) -> list[Chart]:
    """Time and memory of a case."""
    c, name, rows = record["config"], record["name"], record["arms"].values()
    hidden = f", hidden {c['hidden']:,}" if c["level"] == "head" and c.get("hidden") else ""
    shape = f"{c['tokens']:,} tokens, vocabulary {c['vocab']:,}{hidden}, {c['dtype']}"
    checked = record.get("verify") or {}
    said = {True: "verified before it was timed", False: "did NOT verify", None: "not verified"}[checked.get("passed")]
    roofline = next((row["roofline_ms"] for row in rows if row.get("roofline_ms")), None)
    seen = _seen(row for row in rows if "error" not in row)

    def parts(row: Record) -> dict[str, float] | None:
        m = row.get("mem/device" if seen else "mem/compiler")
        inputs = (m or {}).get("inputs") or (m or {}).get("arguments") or 0
        return m and {"inputs": inputs / MIB, "outputs": m["outputs"] / MIB, "temporaries": m["temporaries"] / MIB}

    time = _bars(record["arms"], lambda row: {"median": row["median_ms"]})
    memory = _bars(record["arms"], parts)
    least = next((sum(v for _, v in b.parts[:2]) for b in reversed(memory) if b.parts), None)
    notes = "; ".join(filter(None, [shape, said, not_alone(record)])), f"{shape}; {_GAUGES[seen]}"
    return [
        Bars(f"time-{slug(name)}", f"Time: {name}", "ms", time, roofline, "roofline", notes[0]),
        Bars(f"memory-{slug(name)}", f"Memory: {name}", "MiB", memory, least, "inputs and outputs", notes[1]),
    ]


def _seen(rows: Iterable[Record]) -> bool:
    """Whether every peak is the device's own, and not unknown or an autotuner's."""
    return all(row.get("mem/device") and not row["mem/device"].get("from_compile") for row in rows)


_HOW_MEASURED = ("name", "out", "rounds", "repeats", "warmup", "verify", "timeout_s", "baselines", "peaks")


def _along(records: list[Record], key: str, title: str, x: str, unit: str, note: str) -> Iterator[Lines]:
    """A chart for each group of cases that differ in ``key`` alone, if a line in it has two points."""

    def value(row: Record) -> float | None:
        return row["median_ms"] if unit == "ms" else (row.get("mem/compiler") or {}).get("temporaries", math.nan) / MIB

    groups: dict[str, list[Record]] = {}
    for r in records:
        drop = {key, *_HOW_MEASURED, *(["hidden"] if r["config"]["level"] != "head" else [])}
        groups.setdefault(repr(sorted((k, repr(v)) for k, v in r["config"].items() if k not in drop)), []).append(r)
    for group in groups.values():
        points: Points = {}
        full: dict[str, list[str]] = {}
        ordered = sorted(group, key=lambda r: r["config"][key])
        for arm in dict.fromkeys(arm for r in ordered for arm in r["arms"]):
            rows = [(r["config"][key], r["arms"].get(arm, {"error": ""})) for r in ordered]
            told = [(at, value(row)) for at, row in rows if "error" not in row]
            points[arm] = [(at, y) for at, y in told if y is not None and is_number(y)]
            full[arm] = [f"{at:,}" for at, row in rows if row.get("error", "").startswith(OUT_OF_MEMORY)]
        shown = {a + (f" ({OUT_OF_MEMORY} at {', '.join(full[a])})" if full[a] else ""): p for a, p in points.items()}
        if any(len({at for at, _ in p}) > 1 for p in shown.values()):
            named = f"{title}: {group[0]['name']}"
            yield Lines(slug(named), named, x, unit, _lines(shown), note=note)


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
SUMMARY = (
    ("steps", "steps", 1, ",.0f"), ("parameters", "parameters", 1, ",.0f"),
    ("compiling (s)", "time/compile_s", 1, ".1f"), ("in all (s)", "time/total_s", 1, ".0f"),
)  # fmt: skip
"""Rows of the summary, in addition to the table of ``logitless ab``."""
AGREEMENT = {
    "agree": "agree", "decided_by": "decided by", "test": "test", "loss_difference": "loss, largest difference",
    "largest_difference": "largest difference", "loss_tolerance": "limit of the loss",
    "first_difference": "other tokens from step", "reward_difference": "reward, mean difference",
    "reward_limit": "limit of the reward", "kl_difference": "KL, mean difference", "kl_limit": "limit of the KL",
    "first_grad_norm_ratio": "first gradient's norm, ratio",
}  # fmt: skip
FREE_TIMES = "Every arm samples other completions of other lengths: not to be compared."
AGREES: dict[bool | None, str] = {True: "yes", False: "NO", None: "cannot be judged"}


def _curves(arms: dict[str, list[Record]], name: str, times: bool = True) -> Iterator[Chart]:
    """The course of each metric; without ``times`` not of those that only a run alone can tell."""
    for what, keys, unit in CURVES:
        points: Points = {}
        for arm, steps in arms.items() if times or not keys[0].startswith("time/") else ():
            values = [next((step[k] for k in keys if k in step), None) for step in steps]
            at = [i if step.get("step") is None else step["step"] for i, step in enumerate(steps)]
            points[arm] = [(x, y) for x, y in zip(at, values, strict=True) if y is not None and is_number(y)]
        if series := _lines(points):
            title = f"{what[0].upper()}{what[1:]} by step: {name}"
            yield Lines(slug(title), title, "step", unit, series)


def training(found: Found) -> Section:
    """Curves of A/B runs and of single runs, with the agreement of the arms."""
    from logitless.train import ab_text

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
        same = r.get("same_completions")
        s.charts += _curves({arm: a.get("metrics") or [] for arm, a in runs.items()}, name, alone and not same)
        if same:
            cells = [{"": label, **by_arm} for label, by_arm in ab_text.same_completions(same).items()]
            s.tables.append(Table(f"{name}: the same completions in all arms (ratio to the first, interval)", cells))
        told = {arm: {k: v for k, v in (a.get("summary") or {}).items() if is_number(v)} for arm, a in runs.items()}
        rows: list[Record] = []
        times: list[Record] = []
        for label, key, unit, form in (*SUMMARY, *ab_text.told(told)):
            row = {"": label, **{arm: format(a[key] / unit, form) for arm, a in told.items() if key in a}}
            (times if key.startswith("time/") else rows).append(row)
        if same and alone:
            s.folded.append(Table(f"{name}: times of the free runs. {FREE_TIMES}", times))
        elif alone:
            rows += times
        judged = {arm: a | {"agree": AGREES[_agrees(a)]} for arm, a in _agreements(r).items() if a}
        agreed = [{"": label, **{arm: a.get(key) for arm, a in judged.items()}} for key, label in AGREEMENT.items()]
        title = "agreement of the arms" if "result" in judged else f"agreement with {next(iter(r['arms']), '')}"
        s.tables += [Table(f"{name}: summary", rows), Table(f"{name}: {title}", agreed)]
    for name, steps in single.items():
        s.charts += _curves({"run": steps}, name)
    return s


def _agreements(record: Record) -> dict[str, Record]:
    """What was said of each arm that was compared with the first; of two arms, under ``result``."""
    found = record.get("agreement") or {}
    return found if found and all(isinstance(v, dict) for v in found.values()) else {"result": found}


def _agrees(agreement: Record) -> bool | None:
    said = agreement.get("agree")
    return said if isinstance(said, bool) else None


# Plans, compilers, checks, and what other scripts recorded.

_FORMS = {"fused": "", "dense": "dense_"}
_PLANNED = (
    ("TFLOP", "flops", 1e-12, ".2f"),
    ("peak MiB", "peak", 1 / MIB, ",.0f"),
    ("temporaries MiB", "temporaries", 1 / MIB, ",.0f"),
    ("roofline ms", "seconds", 1e3, ".2f"),
)


def plans(found: Found) -> Section:
    """Memory against context length, fused and dense; memory on meshes."""
    s = Section("Plans", "From shapes, compilers and public chip numbers; nothing ran.")
    meshes: list[Bar] = []
    for _, r in found:
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
        p, longest = r["plan"], r.get("longest_context") or {}
        values = [(what, [p.get(b + key) for b in _FORMS.values()], by, form) for what, key, by, form in _PLANNED]
        rows = [
            {"": "backend", "fused": p["backend"], "dense": "dense"},
            {"": "matmuls", "fused": p["matmuls"], "dense": 3},
            *(
                {"": what, **{k: format(v * by, form) for k, v in zip(_FORMS, pair, strict=True)}}
                for what, pair, by, form in values
                if None not in pair
            ),
            {"": "longest context", **{k: longest.get(k) for k in _FORMS}},
        ]
        s.tables.append(Table(f"{name}{where}, {c['tokens']:,} tokens", rows))
    if meshes:
        s.charts.append(Bars("mesh-peak", "Peak memory on each chip of a mesh", "MiB", tuple(meshes)))
    return s


def tpu(found: Found) -> Section:
    """What the TPU compiler said."""
    s = Section("TPU compiler", "Compiled or simulated by libtpu on a machine without a TPU. Cycles are estimates.")
    for _, r in found:
        c = r["config"]
        at = f"{r['topology']}, {c['level']}, {c['n']:,} tokens, vocabulary {c['vocab']:,}"
        if r["kind"] == "tpu_cycles":
            cycles = sorted((r.get("operations") or {}).items(), key=lambda kv: -kv[1])
            s.tables.append(Table(f"ESTIMATE: {at}", [{"operation": k, "cycles": v} for k, v in cycles]))
        else:
            bars = _bars(r["programs"], lambda row: {"peak": row["peak"] / MIB})
            s.charts.append(Bars(slug(f"tpu {at}"), f"Peak HBM per chip: {at}", "MiB", bars))
    return s


def gradchecks(found: Found) -> Section:
    """Every gate's value, relative to its limit."""
    s = Section("Gradient checks", "A gate's value in units of its limit: below 1 it is met.")
    bars, rows = [], []
    for name, gate, g in ((r["config/name"], gate, g) for _, r in found for gate, g in r["gates"].items()):
        share = g["value"] / g["limit"] if g["limit"] else math.inf
        parts = (("value / limit", share),) if is_number(share) else ()
        tone = "good" if g["ok"] and parts else "bad"
        bars.append(Bar(f"{name}: {gate}", parts, tone, "" if parts else f"{g['value']:g}"))
        rows.append({"check": name, "gate": gate, "value": f"{g['value']:.3g}", "limit": f"{g['limit']:g}",
                     "verdict": "PASS" if g["ok"] else "FAIL"})  # fmt: skip
    s.charts.append(Bars("gradcheck-gates", "Gates", "x limit", tuple(bars), 1.0, "limit"))
    s.tables.append(Table("Gates", rows))
    return s


ROWS_SHOWN = 200
"""Maximum number of rows for a record without its own view."""
UNITS = {"_bytes": ("MiB", 1 / MIB), "_ms": ("ms", 1), "_s": ("s", 1)}
"""How a key ends that has a unit, with the unit that is shown and what it is multiplied by."""


def others(found: Found) -> Section:
    """Records of other scripts, each as a generic table."""
    s = Section("Other records", "Results of scripts that make no chart here: what is in each file.")
    for path, record in found:
        rows = [{"what": at, "value": value} for at, value in _leaves(record, (), 1, "") if value]
        more = [{"what": f"and {len(rows) - ROWS_SHOWN:,} more", "value": "in the file"}] * (len(rows) > ROWS_SHOWN)
        s.folded.append(Table(path.name, rows[:ROWS_SHOWN] + more))
    return s


def _leaves(value: Any, at: tuple[str, ...], by: float, unit: str) -> Iterator[tuple[str, str]]:
    """``(where, what)`` of every value, in words; a long list of numbers by its range."""
    if isinstance(value, dict):
        for key, inner in value.items():
            end = next((e for e in UNITS if str(key).endswith(e)), "")
            own, times = UNITS.get(end, (unit, by))
            words = str(key).removesuffix(end).replace("_", " ").replace("/", ", ")
            yield from _leaves(inner, (*at, words), times, own)
        return
    where = ": ".join(at) + (f" ({unit})" if unit else "")
    if isinstance(value, list) and value and all(is_number(v) for v in value):
        told = [cell(v if by == 1 else v * by) for v in value]
        low, high = (told[value.index(end(value))] for end in (min, max))
        yield where, f"{len(told)} values, {low} to {high}" if len(told) > 6 else ", ".join(told)
    elif isinstance(value, list):
        for i, inner in enumerate(value, 1):
            yield from _leaves(inner, (*at[:-1], f"{at[-1] if at else ''} {i}".strip()), by, unit)
    else:
        yield where, cell(value * by if by != 1 and is_number(value) else value)


def sections(found: Found) -> list[Section]:
    """What the records make, in the page's order."""
    views: tuple[tuple[Callable[[Found], Section], tuple[str, ...]], ...] = (
        (bench, ("bench",)), (training, ("ab", "train")), (plans, ("plan",)), (tpu, ("tpu_compile", "tpu_cycles")),
        (gradchecks, ("gradcheck",)), (others, ("record",)),
    )  # fmt: skip
    chosen = ((view, [(path, r) for path, r in found if kind_of(r) in kinds]) for view, kinds in views)
    return [view(records) for view, records in chosen if records]


# The verdict on top of the page.

_ARMS = {"default": "the call without options", "kernel": "the call with its options", "naive": "log_softmax"}


def tiles(records: list[Record]) -> list[Tile]:
    """At most three; what the records do not tell has none."""
    return [*_agreement(records), *_compared(records)]


def _agreement(records: list[Record]) -> Iterator[Tile]:
    """The sharpest test there is: A/B runs, else gradient checks, else what benchmarks verified themselves."""
    question = "Do they agree?"
    gates = [g["ok"] for r in records if kind_of(r) == "gradcheck" for g in r["gates"].values()]
    checks = [r["verify"]["passed"] for r in records if kind_of(r) == "bench" and r.get("verify")]
    if judged := [a for r in records if r.get("kind") == "ab" for a in _agreements(r).values()]:
        # Priority: an arm that disagrees, then an arm without verdict.
        first = min(judged, key=lambda a: (False, None, True).index(_agrees(a)))
        yield Tile(question, AGREES[_agrees(first)], str(first.get("test", "A/B training")), _agrees(first))
    elif passed := gates or checks:
        met = f"{sum(gates)} of {len(gates)} gates of gradient checks met"
        said = met if gates else f"{len(checks)} benchmarks, verified before they were timed"
        yield Tile(question, AGREES[all(passed)], said, all(passed))


def _compared(records: list[Record]) -> list[Tile]:
    """Time and memory of the first case with a ratio: of the call without options, or else with them."""

    def named(arm: str) -> str:
        about = _ARMS.get(arm) or ("the best dense form" if arm.startswith("strong") else "")
        return f"{arm} ({about})" if about else arm

    for r in records:
        for name in ("default", "kernel") if kind_of(r) == "bench" else ():
            row = r["arms"].get(name, {})
            for other, clocks in (row.get("ratios") or {}).items():
                if clocks and "error" not in r["arms"].get(other, {"error": ""}):
                    what = f"{r['name']}: {named(name)} / {named(other)}"
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
