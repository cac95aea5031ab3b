"""The GSM8K runs as text and curves, from what ``logitless ab`` returned: ``train_gsm8k_learn.json``, and
``train_gsm8k_same.json`` where the times on the same completions are of another record.

Nothing is written while that file is not there, and nothing into a page without the marks that say where.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from logitless.lab.bench.charts import Lines, Series, to_svg
from logitless.lab.bench.report_views import tone_of
from logitless.train.ab_text import same_completions, verdict
from logitless.train.compare import agreements
from logitless.train.config import load

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FILE, SAME = "train_gsm8k_learn.json", "train_gsm8k_same.json"
BEGIN, END = f"<!-- from {FILE}: begin -->\n", f"<!-- from {FILE}: end -->\n"
SHIPPED = ROOT / "configs" / "train" / "qwen2.5-1.5b-gsm8k.yaml"
PAGE, PLOTS = ROOT / "docs" / "training.md", ROOT / "docs" / "plots"
BLOCK = 5
"""Steps that a point of the curves is the mean of."""

Record = dict[str, Any]
LEARNED = (
    ("sampled reward, first 10 steps", "train/reward_first10", 1, ".3f"),
    ("sampled reward, last 10 steps", "train/reward_last10", 1, ".3f"),
    ("held-out answers right, before", "held_out/first", 0.01, ".1f %"),
    ("held-out answers right, at the end", "held_out/last", 0.01, ".1f %"),
)
FREE_TIMES = (
    ("step, mean of all after the first (s)", "mean/time/train/step_s", 1, ".2f"),
    ("of it: rollout (s)", "mean/time/rollout_s", 1, ".2f"),
    ("of it: update (s)", "mean/time/update_s", 1, ".2f"),
    ("update, per token with a gradient (µs)", "update_s_per_token", 1e-6, ".1f"),
    ("device peak (GiB)", "memory/device_peak_bytes", 2**30, ".1f"),
    ("update's temporaries, the compiler's plan (GiB)", "memory/update_temporaries_bytes", 2**30, ".1f"),
)
"""Label, key of :func:`numbers`, unit and format of the tables' rows."""


def read(name: str) -> Any:
    """A record of benchmarks/results, or ``None``."""
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def markdown(columns: list[str], rows: list[list[str]]) -> list[str]:
    """A table, and an empty line."""
    return [
        f"| {' | '.join(columns).lstrip()} |",
        "|---" * len(columns) + "|",
        *(f"| {' | '.join(r)} |" for r in rows),
        "",
    ]


def arms_of(result: Record) -> dict[str, Record]:
    """The arms, and the control where the record has one."""
    return {**result["arms"], **({"control": result["control"]} if result.get("control") else {})}


def numbers(arm: Record) -> Record:
    """The summary of an arm, the share of held-out problems that greedy answers solve, and times of all steps but the
    first. An update has as many tokens as its own completions give a gradient: seconds a token compare, seconds do not.
    """
    evaluated = [r for r in arm["metrics"] if "eval/reward" in r]
    scores = [r.get("eval/answer", r["eval/reward"]) for r in evaluated]
    held_out = {"held_out/first": scores[0], "held_out/last": scores[-1]} if scores else {}
    steps = [r for r in arm["metrics"] if "time/update_s" in r][1:]
    clocks = ("time/train/step_s", "time/rollout_s", "time/update_s")
    means = {f"mean/{key}": statistics.fmean(r[key] for r in steps) for key in clocks if steps and key in steps[0]}
    if steps and "train/zero_gradient_tokens" in steps[0]:
        live = [r["throughput/update_tokens_per_s"] * r["time/update_s"] for r in steps]
        tokens = sum(n * (1 - r["train/zero_gradient_tokens"]) for n, r in zip(live, steps, strict=True))
        means["update_s_per_token"] = sum(r["time/update_s"] for r in steps) / tokens
    return {**arm["summary"], **held_out, **means}


def table(arms: dict[str, Record], rows: Sequence[tuple[str, str, float, str]]) -> list[str]:
    """One column for each arm's numbers; rows that no arm has are left out."""
    cells = []
    for label, key, unit, form in rows:
        values = [n.get(key) for n in arms.values()]
        if any(v is not None for v in values):
            spec, space, suffix = form.partition(" ")
            cells.append([label, *("" if v is None else format(v / unit, spec) + space + suffix for v in values)])
    return markdown(["", *(f"{name} ({n['loss_backend']})" for name, n in arms.items())], cells)


def _numbers(result: Record, rows: Sequence[tuple[str, str, float, str]]) -> str:
    return "\n".join(table({name: numbers(arm) for name, arm in arms_of(result).items()}, rows)).rstrip()


def _same(result: Record) -> str:
    """Time and memory of all arms on the baseline's completions, where they were replayed."""
    if not (found := result.get("same_completions")):
        return ""
    order = list(dict.fromkeys([*result["arms"], *found]))
    rows = [[label, *(cells.get(n, "") for n in order)] for label, cells in same_completions(found).items()]
    first, c = next(iter(result["arms"])), result["config"]
    said = (
        f"The same completions in all arms, in turns: {c['ab']['replay_steps']} steps of the {first} run, "
        f"micro-batches of {c['train']['microbatch']} x {c['train']['pack_length']:,} tokens. Ratio to {first} "
        f"with its {c['ab']['confidence']:.0%} interval. A step is the rollout of the {first} run and the arm's "
        f"update; the control is {first} with half the micro-batch."
    )
    return "\n".join([said, "", *markdown(["", *order], rows)]).rstrip()


def ratios() -> list[tuple[float, float, float]]:
    """Every ratio on the same completions that has an interval, with its ends."""
    found = ((read(SAME) or read(FILE) or {}).get("same_completions") or {}).values()
    return [(row["ratio"], *row["interval"]) for arm in found for row in arm.values() if row["interval"]]


def _replayed(result: Record) -> str:
    """What the replay said, with the control's own distance."""
    lines = []
    for name, a in agreements(result).items():
        if a.get("replay_grad_norm_deviation") is not None:
            worst = (a[f"replay_grad_norm_{key}"] for key in ("deviation", "control", "limit"))
            said = "{:.1e}, the control's {:.1e}, limit {:.1e}".format(*worst)
            lines.append(f"- {name}: {a['verdict']}. Gradient norm, at the step nearest to its limit: {said}.")
    return "\n".join(lines)


def _appendix(result: Record) -> str:
    """Times of the free runs."""
    said = (
        "Times of the free runs cannot be compared: every arm samples for itself, so that lengths differ, as does the "
        "number of tokens with a gradient, and the runs came one after the other."
    )
    return f"{said}\n\n{_numbers(result, FREE_TIMES)}"


def verdicts(result: Record) -> list[str]:
    """What the test said of each arm, and of all."""
    first = next(iter(result["arms"]))
    each = [f"- {name} against {first}: {a['verdict']}." for name, a in agreements(result).items()]
    return [*each, f"- In all: {verdict(result)}."]


def curve(name: str, title: str, key: str, unit: str, result: Record) -> Lines | None:
    """A metric of every arm, as means of :data:`BLOCK` steps at the middle of each block."""
    series: list[Series] = []
    for arm, run in arms_of(result).items():
        steps = [(r["step"], r[key]) for r in run["metrics"] if r.get(key) is not None and r["step"] > 0]
        blocks = [steps[j : j + BLOCK] for j in range(0, len(steps), BLOCK)]
        points = tuple((sum(s for s, _ in b) / len(b), sum(v for _, v in b) / len(b)) for b in blocks)
        if points:
            series.append(Series(arm, points, tone_of(arm, (s.tone for s in series))))
    note = f"means of {BLOCK} steps" if series else ""
    return Lines(name, title, "step", unit, tuple(series), note=note) if series else None


def plots(result: Record) -> dict[str, str]:
    """Images by file name."""
    chart = curve("gsm8k-reward", "Sampled reward on GSM8K, Qwen2.5-1.5B", "train/reward", "mean reward", result)
    return {} if chart is None else {f"{chart.name}.svg": to_svg(chart, alone=True) + "\n"}


def _setting(result: Record) -> str:
    c, first = result["config"], next(iter(result["arms"].values()))
    steps = max(len([r for r in arm["metrics"] if "train/loss" in r]) for arm in result["arms"].values())
    t, r, where = c["train"], c["rollout"], first["summary"]["environment"]
    return (
        f"{where['device']}, jax {where['jax']}; {steps} steps of {t['prompts_per_step']} x {t['group_size']} "
        f"completions of at most {r['max_completion_tokens']} tokens, micro-batches of {t['microbatch']} x "
        f"{t['pack_length']:,} tokens; greedy answers to {c['eval']['problems']} held-out problems."
    )


def unlike_shipped(result: Record) -> list[str]:
    """``key=value`` of what the recorded run had set otherwise than the configuration that is shipped now; where
    weights, data and runs lie is for every machine to say. A key that came later had its default."""

    def leaves(tree: Record, before: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in tree.items():
            if isinstance(value, dict) and value:
                yield from leaves(value, f"{before}{key}.")
            else:
                yield before + key, value

    shipped, default = (dict(leaves(dataclasses.asdict(load(path)))) for path in (SHIPPED, None))
    had = {**default, **dict(leaves(result["config"]))}
    elsewhere = ("run_dir", "model.weights", "data.path")
    changed = {key: had[key] for key in shipped if key in had and had[key] != shipped[key] and key not in elsewhere}
    return [f"{key}={json.dumps(value)}" for key, value in changed.items()]


def section(result: Record, plots_at: str) -> str:
    """Setting, curves, table and verdict, with images at ``plots_at``."""
    images = [f"![{name.removesuffix('.svg')}]({plots_at}/{name})" for name in plots(result)]
    verdict_of_all = "\n".join(verdicts(result))
    same = read(SAME) or result
    text = [_setting(result), *images, _numbers(result, LEARNED), verdict_of_all]
    text += [_same(same), _replayed(same), _appendix(same)]
    return "\n\n".join(part for part in [*text, *_sample(result)] if part) + "\n"


def _sample(result: Record) -> list[str]:
    """One held-out problem, before and after, where the record has samples."""
    arm, rows = next(reversed((result.get("samples") or {"": []}).items()))
    if len(rows) < 2:
        return []
    before, after = rows[0], rows[-1]

    def quoted(text: str) -> str:
        return "\n".join(f"    {line}".rstrip() for line in text.strip().splitlines())

    return [
        f"A held-out problem, whose answer is {before['answer']}:",
        quoted(before["prompt"]),
        f"{arm}, step {before['step']}, reward {before['reward']:g}:",
        quoted(before["completion"]),
        f"Step {after['step']}, reward {after['reward']:g}:",
        quoted(after["completion"]),
    ]


def filled(text: str, content: str) -> str:
    """A page with the part between its marks made anew; one without marks as it is."""
    if BEGIN not in text or END not in text:
        return text
    return text.split(BEGIN)[0] + BEGIN + content + END + text.split(END, 1)[1]


def benchmark_tables() -> list[str]:
    """The section of docs/benchmarks.md."""
    result = read(FILE)
    if result is None:
        return []
    command = "    python benchmarks/train_gsm8k.py learn --out benchmarks/results --work runs/gsm8k --resume"
    return [
        "## Training, Qwen2.5-1.5B on GSM8K",
        "",
        f"`benchmarks/results/{FILE}`:",
        "",
        " ".join([command, *unlike_shipped(result)]),
        "",
        *_same_command(command),
        "[Training](training.md) has its curves, table and verdict.",
        "",
        *_update(),
        *_long(),
        *_largest(),
        *_start_up(),
    ]


def _same_command(command: str) -> list[str]:
    """How the record of the same completions was made."""
    if (same := read(SAME)) is None:
        return []
    settings = " ".join([command, *unlike_shipped(same)])
    return [f"`benchmarks/results/{SAME}`. {same['note']}", "", settings, ""]


def _update() -> list[str]:
    """Padded and packed updates of the same completions."""
    result = read("train_gsm8k_update.json")
    if result is None:
        return []
    seconds, error = result["median"], result["gradient_error"]
    return [
        f"The update phase on {len(result['seconds']['packed'])} recorded steps, in turns: "
        f"{seconds['packed']:.3f} s packed, {seconds['padded']:.3f} s padded, "
        f"{result['ratio']:.3f} of it (aimed at 0.45). From the gradients of the same step in float32 those of packed "
        f"rows are {error['packed']:.4f} of the norm away, of padded rows {error['padded']:.4f}: bfloat16's rounding.",
        "",
        "    python benchmarks/train_gsm8k.py update --out benchmarks/results --rollouts runs/gsm8k/dense --steps 12",
        "",
    ]  # fmt: skip


def _long() -> list[str]:
    """Updates of long rows, each arm with the most that fit."""
    result = read("train_gsm8k_long.json")
    if result is None:
        return []
    rows = [
        [
            arm,
            str(count),
            f"{count * result['tokens']:,}",
            f"{statistics.median(result['seconds'][arm]):.2f}",
            f"{result['tokens_per_s'][arm]:,.0f}",
        ]
        for arm, count in result["rows"].items()
    ]
    ratio, sizes = result["ratio"], " ".join(f"{arm}={rows}" for arm, rows in result["asked"].items())
    return [
        f"Updates of {result['tokens']:,}-token completions without packing, all rows in one gradient, each arm at a "
        "size that fits; the arms took turns in one process (random weights of the same shapes, with a tied head):",
        "",
        *markdown(["arm", "rows", "completion tokens a gradient", "update, s", "tokens a second"], rows),
        *(f"{name} rows did not fit." for name in result["failed"]),
        f"The fused loss takes {ratio['rows']:.1f} times the rows (aimed at 3) at {ratio['tokens_per_s']:.3f} of the "
        "tokens a second (aimed at 1.15).",
        "",
        f"    python benchmarks/train_gsm8k.py long --out benchmarks/results --rows {sizes}",
        "",
    ]  # fmt: skip


SIZES = {
    ("dense", "context"): "--start 5632",
    ("fused", "context"): "--between 32448 32448",
    ("dense", "batch"): "--between 160 168",
    ("fused", "batch"): "--between 672 712",
}
"""Arm and what was enlarged, with the sizes that its bisection began from."""


def _largest() -> list[str]:
    """The largest batch and context of both arms: by plan, and by the runs that there are."""
    found = read("train_gsm8k_sizes.json")
    if found is None:
        return []
    limit = f"{found['limit_bytes'] / 2**30:.1f} GiB"
    out = [
        "The largest sizes without packing and micro-batches, one gradient of all rows. *By plan*: the compiler's plan "
        f"of two sizes each and a straight line to {limit}, the peak of the longest dense context. *Ran*: found "
        "by bisection, until the next size is 8 rows, 128 tokens or a sixteenth away; each size is two steps of the "
        "arm with random weights, in a process of its own that may take 95 % of the device.",
        "",
    ]
    units = {"context": "completion tokens of 16 rows", "batch": "rows of 512 completion tokens"}
    said, ran, rows = [], {}, []
    for arm, what in SIZES:
        row, run = found["sizes"][f"{arm} {what}"], read(f"train_gsm8k_largest_{arm}_{what}.json")
        planned = f"{row['fits']:,}"
        if row["by_plan"] >= row["fits"] + 128:
            planned += f", the model's last position ({row['by_plan']:,} by memory)"
        cells = ["", "", ""]
        if run:
            ran[arm, what] = run["fits"]
            peak = next(t["peak_bytes"] for t in run["tried"] if t["size"] == run["fits"])
            too_large = f"{run['fails']:,}" if run["fails"] else "the model ends there"
            cells = [f"{run['fits']:,}", f"{peak / 2**30:.1f}", too_large]
            if row["fits"] > run["fits"]:
                said.append(f"{row['fits']:,} {units[what]} ({arm}) fit by plan and did not run.")
        rows.append([f"{arm}, {units[what]}", planned, *cells])
    if len(ran) == len(SIZES):
        context, batch = (ran["fused", what] / ran["dense", what] for what in units)
        said.append(f"The fused loss has room for {context:.1f} times the context and {batch:.1f} times the batch.")
    commands = [
        f"    python benchmarks/train_gsm8k.py largest --out benchmarks/results --what {what} --arm {arm} {begin}"
        for (arm, what), begin in SIZES.items()
    ]
    sizes = f"    python benchmarks/train_gsm8k.py sizes --out benchmarks/results --memory {found['limit_bytes']}"
    out += markdown(["", "by plan", "ran", "its peak, GiB", "did not fit"], rows)
    return [*out, *([" ".join(said), ""] if said else []), sizes, *commands, ""]


def _start_up() -> list[str]:
    """Seconds before step 1."""
    result = read("startup.json")
    if result is None:
        return []
    where, size = result["environment"], result["file_bytes"] / 1e9
    out = [
        "## Start-up",
        "",
        f"Seconds before step 1 of the same run, with a GGUF file of {size:.1f} GB: {where['device']}, "
        f"{result['cores']} cores, jax {where['jax']}. Loading and compiling go side by side.",
        "",
        "    python benchmarks/startup.py --weights FILE.gguf data.path=GSM8K_FOLDER",
        "",
    ]
    parts = {"imports": "imports_s", "device": "device_s", "data, tokenizer": "task_s", "loading": "load_s"}
    parts |= {"compiling": "compile_s"}
    rows = [
        [
            name,
            f"{bar['value']:.1f}",
            f"{bar['at_most']:.0f}",
            *(f"{result['runs'][name][k]:.1f}" for k in parts.values()),
        ]
        for name, bar in result["bars"].items()
    ]
    return [*out, *markdown(["", "in all", "at most", *parts], rows)]


def readme_part() -> str:
    """What README.md shows: the curve and the table."""
    result = read(FILE)
    if result is None:
        return ""
    image = "![sampled reward](docs/plots/gsm8k-reward.svg)"
    same = _same(read(SAME) or result)
    parts = [_setting(result), image, _numbers(result, LEARNED), verdicts(result)[-1][2:], same]
    return "\n\n".join(part for part in parts if part) + "\n"


def files() -> dict[Path, str]:
    """The files that follow from the record, with what they should hold: docs/training.md and its plots."""
    result = read(FILE)
    if result is None:
        return {}
    page = filled(PAGE.read_text(), section(result, "plots"))
    return {PAGE: page, **{PLOTS / name: svg for name, svg in plots(result).items()}}
