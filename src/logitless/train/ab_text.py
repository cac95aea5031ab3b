"""The result of an A/B as text for a terminal: a table, the verdict with the test that decided, and the curves."""

from __future__ import annotations

from typing import Any

from logitless.train.compare import CURVES, agreements, steps_of
from logitless.train.replay import QUANTITIES

ROWS = (
    ("sampled reward, first 10 steps", "train/reward_first10", 1, ".3f"),
    ("sampled reward, last 10 steps", "train/reward_last10", 1, ".3f"),
    ("held-out reward at the end", "eval/last", 1, ".3f"),
    ("KL, last 10 steps", "train/kl_last10", 1, ".4f"),
    ("left-out mass, last 10 steps", "train/left_out_mass_last10", 1, ".1e"),
    ("left-out mass of a token, largest", "train/left_out_mass_max", 1, ".1e"),
    ("step, mean of the last 10 (s)", "time/train/step_avg_last10_s", 1, ".3f"),
    ("update phase, last 10 (s)", "time/update_s/last10", 1, ".3f"),
    ("update's temporaries (MiB)", "memory/update_temporaries_bytes", 2**20, ",.1f"),
    ("device peak (MiB)", "memory/device_peak_bytes", 2**20, ",.1f"),
)
"""Label, key of the summary, unit and format of the table's rows."""

SAME = (
    ("update (s)", "update", 1, ".3f"), ("step (s)", "step", 1, ".3f"), ("device peak (GiB)", "peak", 2**30, ".1f"),
)  # fmt: skip
"""The same of ``same_completions``."""


def told(summaries: dict[str, dict[str, Any]]) -> list[tuple[str, str, float, str]]:
    """The rows that some arm has. Memory that all arms share within 1 % is the model's and not the loss's: no row."""

    def says(key: str) -> bool:
        values = [s[key] for s in summaries.values() if s.get(key) is not None]
        alike = key.startswith("memory/") and len(values) > 1 and max(values) < 1.01 * min(values)
        return bool(values) and not alike

    return [row for row in ROWS if says(row[1])]


def table(result: dict[str, Any]) -> str:
    """The comparison as text."""
    summaries = {name: arm["summary"] for name, arm in result["arms"].items()}
    first, *others = summaries
    heads = [f"{name} ({s['loss_backend']})" for name, s in summaries.items()]
    marks = ["ratio"] if len(others) == 1 else [f"{name}/{first}" for name in others]
    widths = [max(len(h) + 2, 14) for h in heads]
    lines = [f"{result['name']:36s}" + "".join(f"{h:>{w}s}" for h, w in zip(heads, widths, strict=True))]
    lines[0] += "".join(f"{m:>{len(m) + 2}s}" for m in marks)
    for label, key, unit, form in told(summaries):
        if key.startswith("time/") and "same_completions" in result:
            continue  # of completions that differ from arm to arm
        values = [s.get(key) for s in summaries.values()]
        cells = ["-" if v is None else format(v / unit, form) for v in values]
        shares = [f"{v / values[0]:.3f}" if v and values[0] else "" for v in values[1:]]
        line = f"{label:36s}" + "".join(f"{c:>{w}s}" for c, w in zip(cells, widths, strict=True))
        lines.append((line + "".join(f"{x:>{len(m) + 2}s}" for x, m in zip(shares, marks, strict=True))).rstrip())
    if "same_completions" in result:
        lines.append(f"on the completions of {first} (ratio to {first}, interval):")
        for label, by_arm in same_completions(result["same_completions"]).items():
            lines += [f"  {label:18s}{arm:12s}{cell}" for arm, cell in by_arm.items() if cell]
    if result.get("parallel"):
        lines.append("times: not compared, for the arms ran at the same time (ab.parallel)")
    for name, a in agreements(result).items():
        lines += _agreement_lines(a, f"{name} against {first}: ")
    lines += [f"{name} against {first}: {a['verdict']}" for name, a in agreements(result).items()]
    lines.append(verdict(result))
    return "\n".join(lines)


def same_completions(found: dict[str, Any]) -> dict[str, dict[str, str]]:
    """A row of cells by arm for each quantity: the mean, and the ratio to the baseline with its interval."""

    def cell(row: dict[str, Any] | None, unit: float, form: str) -> str:
        mean, ratio, interval = ((row or {}).get(k) for k in ("mean", "ratio", "interval"))
        if mean is None or ratio is None:
            return ""
        between = f" [{', '.join(f'{x:.3f}' for x in interval)}]" if interval else ""
        return format(mean / unit, form) + ("" if ratio == 1.0 else f" ({ratio:.3f}{between})")

    rows = {
        label: {arm: cell(measured.get(key), unit, form) for arm, measured in found.items()}
        for label, key, unit, form in SAME
    }
    return {label: cells for label, cells in rows.items() if any(cells.values())}


def verdict(result: dict[str, Any]) -> str:
    """The verdict in a line: agreement, and the deciding tests."""
    found = agreements(result).values()
    by = " and ".join(sorted({a["decided_by"] for a in found if a["agree"] is not None}))
    if any(a["agree"] is False for a in found):
        return f"THE ARMS DISAGREE (decided by {by})"
    if all(a["agree"] for a in found):
        return f"the arms agree (decided by {by})"
    return "NOT JUDGED: see above" + (f" (what could be judged agrees, by {by})" if by else "")


def _agreement_lines(a: dict[str, Any], heading: str) -> list[str]:
    def within(agree: bool) -> str:
        return "within" if agree else "ABOVE"

    lines = [f"{heading}test: {a['test']}"]
    if "replay_steps" in a:
        lines.append(f"  replay, {a['replay_steps']} steps; the largest deviation from the baseline for its limit:")
        for key in QUANTITIES:
            step, deviation, control, limit = (
                a[f"replay_{key}_{k}"] for k in ("step", "deviation", "control", "limit")
            )
            if deviation is None:
                lines.append(f"    {key:10s} not finite in one of the two, step {step}")
                continue
            near = "not finite" if control is None else f"{control:.1e}"
            lines.append(
                f"    {key:10s} {deviation:.1e}, second baseline {near} (step {step}: "
                f"{within(deviation <= limit)} {limit:.1e})"
            )
    split = a["first_difference"]
    lines.append(
        "  free runs: " + ("the same tokens throughout" if split is None else f"other tokens from step {split} on")
    )
    for name in CURVES:
        if f"{name}_difference" in a:
            lines.append("    " + _curve_line(a, name))
    return lines


def _curve_line(a: dict[str, Any], name: str) -> str:
    difference = a[f"{name}_difference"]
    if difference is None:
        return f"{name:10s} measured in one of the two alone"
    text = f"{name:10s} mean difference {difference:+.4f}"
    if f"{name}_standard_error" in a:
        text += f" +- {a[f'{name}_standard_error']:.4f} over seeds"
    if f"{name}_distance" in a:
        text += f", distance {a[f'{name}_distance']:.4f}"
    if f"{name}_control_distance" in a:
        text += f", second baseline's {a[f'{name}_control_distance']:.4f}"
    if f"{name}_limit" not in a:
        return text + " (not judged)"
    return text + f" ({'within' if a[f'{name}_agree'] else 'ABOVE'} {a[f'{name}_limit']:.4f})"


def curve(result: dict[str, Any], width: int = 10) -> str:
    """Curves of reward, and, if recorded, KL and left-out mass: means over ``width`` steps."""
    lines = []
    for label, key, form in (
        ("sampled reward", "train/reward", "7.3f"),
        ("KL", "train/kl", "9.4f"),
        ("left-out mass", "train/left_out_mass", "9.1e"),
    ):
        curves = {n: [r.get(key) for r in steps_of(arm["metrics"])] for n, arm in result["arms"].items()}
        curves = {n: values for n, values in curves.items() if any(v is not None for v in values)}
        if curves:
            lines.append(f"{label}, mean of every {width} steps:")
        for name, values in curves.items():
            blocks = [[v for v in values[i : i + width] if v is not None] for i in range(0, len(values), width)]
            cells = (format(sum(b) / len(b), form) if b else "-".rjust(int(form.split(".")[0])) for b in blocks)
            lines.append(f"  {name:10s}" + "".join(cells))
    return "\n".join(lines)
