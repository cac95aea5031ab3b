"""Charts and tables of training runs: the course of each metric, whether the arms of an A/B agree, and their memory."""

from __future__ import annotations

import math

from logitless.lab.bench.charts import Bar, Bars, Chart, Lines, Series
from logitless.lab.bench.report_charts import Section, Table, cell, own_tone, slug, tone_of
from logitless.lab.tools.result_files import Record

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

GIB = 2**30


def _is_time(key: str) -> bool:
    return key.startswith("time/")


def _curves(arms: dict[str, list[Record]], name: str, times: bool = True) -> list[Chart]:
    """The course of each metric; without ``times`` not of those that only a run alone can tell."""
    out: list[Chart] = []
    for what, keys, unit in CURVES:
        if not times and any(map(_is_time, keys)):
            continue
        series: list[Series] = []
        for i, (arm, steps) in enumerate(arms.items()):
            points = []
            for position, step in enumerate(steps):
                value = next((step[k] for k in keys if k in step), None)
                if isinstance(value, (int, float)) and math.isfinite(value):
                    points.append((float(step.get("step", position)), float(value)))
            if points:
                series.append(Series(arm, tuple(points), own_tone(arm, i, series)))
        if series:
            title = f"{what[0].upper()}{what[1:]} by step: {name}"
            out.append(Lines(slug(title), title, "step", unit, tuple(series)))
    return out


def training(records: list[tuple[str, Record]]) -> Section:
    """Curves of A/B runs and of single runs, with the agreement of the arms."""
    s = Section(
        "Training",
        "An arm is one training run with a loss of its own; the first is the baseline. Arms of an A/B start from the "
        "same seed and see the same problems. KL: how far the policy is from the one it started as.",
    )
    single: dict[str, list[Record]] = {}
    for name, r in records:
        if r.get("kind") != "ab":
            single.setdefault(name, []).append(r)
            continue
        alone = not (r.get("config") or {}).get("ab", {}).get("parallel", False)
        if not alone:
            s.text += f" The arms of {name} ran at the same time: nothing is said about their speed."
        runs = {**r["arms"], **({"control": r["control"]} if isinstance(r.get("control"), dict) else {})}
        s.charts += _curves({arm: a.get("metrics", []) for arm, a in runs.items()}, name, alone)
        keys = dict.fromkeys(
            k
            for a in runs.values()
            for k, v in a.get("summary", {}).items()
            if isinstance(v, (int, float, str)) and (alone or not _is_time(k))
        )
        rows = [(k, *(cell(a.get("summary", {}).get(k)) for a in runs.values())) for k in keys]
        if rows:
            s.tables.append(Table(f"{name}: summary", ("", *runs), tuple(rows)))
        s.tables += _agreement_tables(name, r)
    for name, steps in single.items():
        s.charts += _curves({"run": steps}, name)
    return s


def _agreement_tables(name: str, record: Record) -> list[Table]:
    """One column of numbers for each arm that was compared with the first; of two arms, one without a name."""
    found = record.get("agreement", {})
    by_arm = found if found and all(isinstance(v, dict) for v in found.values()) else {"": found}
    keys = dict.fromkeys(k for a in by_arm.values() for k, v in a.items() if not isinstance(v, (dict, list)))
    rows = [(k, *(cell(a.get(k)) for a in by_arm.values())) for k in keys]
    title = f"{name}: agreement of the arms" if "" in by_arm else f"{name}: agreement with {next(iter(record['arms']))}"
    return [Table(title, ("", *(arm or "value" for arm in by_arm)), tuple(rows))] if rows else []


def memory(records: list[Record]) -> Section:
    """Peaks of the arms of a run, and the largest batch or context of each."""
    s = Section(
        "Training memory",
        "What the allocator held at most in a few steps of each arm, the sizes that fit by the compiler's plan, and "
        "those that were tried.",
    )
    for r in records:
        where = r["environment"]["device"]
        if r["kind"] == "train_peak":
            title = f"Peak of a training run: {r['config']['name']}, {where}"
            bars = [
                Bar(n, (("peak", a["peak_bytes"] / GIB),), tone_of(n, i)) for i, (n, a) in enumerate(r["arms"].items())
            ]
            s.charts.append(Bars(slug(title), title, "GiB", tuple(bars)))
            rows = [
                (n, _gib(a["peak_bytes"]), f"{r['ratios'][n]:.2f}", _gib(a["planned"]["update"]["temporaries"]))
                for n, a in r["arms"].items()
            ]
            first = next(iter(r["arms"]))
            columns = ("arm", "peak, GiB", f"of {first}", "temporaries of the update, by plan, GiB")
            s.tables.append(Table(title, columns, tuple(rows)))
        elif r["kind"] == "train_sizes":
            rows = [(n, cell(a["fits"]), cell(a["by_plan"]), _points(a["points"])) for n, a in r["sizes"].items()]
            title = f"Largest sizes by plan, {_gib(r['limit_bytes'])} GiB of {where}"
            s.tables.append(Table(title, ("arm and size", "fits", "by memory alone", "planned"), tuple(rows)))
        else:
            rows = [
                (cell(t["size"]), "yes" if t["fits"] else "no", _gib(t.get("peak_bytes")), t.get("error", ""))
                for t in sorted(r["tried"], key=lambda t: t["size"])
            ]
            end = f"{r['fails']:,} did not fit" if r["fails"] else "the model has no room for more"
            title = f"Largest {r['what']} of {r['arm']} that ran on {where}: {r['fits']:,}; {end}"
            s.tables.append(Table(title, (r["what"], "fits", "peak, GiB", "error"), tuple(rows)))
    return s


def _gib(value: int | None) -> str:
    return "" if value is None else f"{value / GIB:.1f}"


def _points(points: list[tuple[int, int]]) -> str:
    return ", ".join(f"{size:,}: {_gib(held)} GiB" for size, held in points)
