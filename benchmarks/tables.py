"""Writes docs/benchmarks.md, the tables of README.md and docs/index.md, and the GSM8K part of docs/training.md with its
plots, from benchmarks/results: ``python benchmarks/tables.py``."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
from logitless.lab.bench import ratios
from logitless.lab.bench.charts import Bar, Bars, Lines, Series, to_svg
from logitless.lab.bench.report_views import tone_of
from logitless.train import ab_text
from logitless.train.compare import agreements

DOCS = harness.ROOT / "docs"
PAGE, HOME, TRAINING, PLOTS = DOCS / "benchmarks.md", DOCS / "index.md", DOCS / "training.md", DOCS / "plots"
TUNIX = DOCS / "tunix.md"
README = harness.ROOT / "README.md"
BEGIN, END = "<!-- from the suites: begin -->\n", "<!-- end -->\n"
LEARN, SAME = "train_gsm8k_learn.json", "train_gsm8k_same.json"
LEARN_BEGIN, LEARN_END = f"<!-- from {LEARN}: begin -->\n", f"<!-- from {LEARN}: end -->\n"
LIVE_VERSIONS = "before", "after"
Record = dict[str, Any]
README_ROWS = (
    ("an RL batch of Qwen2.5-7B, {live:.0f} % of {tokens:,} tokens live", "h200", "qwen2.5-7b, RL batch", "default"),
    ("8,192 tokens, all live", "live", "", "default"),
    (
        'the same with `sparse_backward="auto"`, a trained policy', "gpu-sparse", "sparse 8192x4096x151936, on-policy",
        "default, sparse backward",
    ),
    ("131,072 tokens of Qwen2.5-1.5B, all live", "h200", "qwen2.5-1.5b, 128k context", "default"),
)  # fmt: skip
"""What README.md shows: label, suite, case and arm; each beside the strongest dense form of float32 logits."""
SUITES = {
    "h200": "H200: the suite",
    "gpu-head": "H200: fused head",
    "gpu-sparse": "H200: sparse backward",
    "gpu-logits": "H200: given logits",
    "gpu-distill": "H200: distillation",
    "cpu": "CPU: the suite",
}
HOW = """\
Written by `python benchmarks/tables.py` from the files under benchmarks/results; each section names the command that
makes its file. `logitless report benchmarks/results` shows every number of every file as tables and charts.

How to read a suite: arms of a case alternate in one process. A ratio compares paired rounds with the dense form of
the same logits dtype, with a 95 % interval; "none" marks an interval within 0.9 and 1.1 around one, "cannot tell" a
wider interval around one. Milliseconds are medians by the device's clock, by the host's on a CPU. MiB are the
compiler's plan for temporaries, without inputs and outputs. A file's `note` names the commits and calls where its cases
come from several.

| arm | |
|---|---|
| `naive` | `log_softmax` over all logits and a gather, differentiated by JAX |
| `strong`, `strong/f32` | strongest dense form: keeps logits, gradient written by hand; `/f32`: float32 logits |
| `packed/f32` | `strong/f32` over packed rows, without prompts and padding |
| `default` | the call without options |
| `kernel` | the call with the options of its case, mostly bfloat16 logits and dW |

Compare ratios, not milliseconds: a call takes longer or shorter beside other arms. In the RL batch `default` and
`default, to packed` are the same call, once in turn with `strong/f32` and once with `packed/f32`."""


def mib(n: float) -> str:
    return f"{n / 2**20:,.0f}"


def ratio_text(r: dict[str, Any]) -> str:
    """A ratio as a claim: with its interval, and the verdict where one is inside."""
    if r["low"] is None:
        return f"{r['ratio']:.3f}"
    said = ratios.verdict(r["low"], r["high"])
    word = {ratios.NONE: ", none", ratios.UNSURE: f", {ratios.UNSURE}"}.get(said, "")
    return f"{r['ratio']:.3f} [{r['low']:.3f}, {r['high']:.3f}]{word}"


def first_ratio(row: dict[str, Any]) -> tuple[str, str]:
    """The ratio by the main clock as a claim, and the arm that it is to; both empty where there is none."""
    found = next(iter(row.get("ratios", {}).items()), None)
    return ("", "") if found is None else (ratio_text(next(iter(found[1].values()))), found[0])


def file_of(suite: str) -> str:
    """The record of a suite."""
    return f"{suite.replace('-', '_')}_suite.json"


def suite_records(suite: str) -> list[dict[str, Any]]:
    """The cases of a suite that are shown; none where there is no file."""
    return harness.read(file_of(suite)).get("records", [])


def suite_tables() -> list[str]:
    out: list[str] = []
    for suite, title in SUITES.items():
        records = suite_records(suite)
        rows = [(r, arm, row) for r in records for arm, row in r.get("arms", {}).items()]
        where = next((row["environment"] for _, _, row in rows if "error" not in row), None)
        if where is None:
            continue
        out += [f"## {title}", "", f"{where['device']}, jax {where['jax']}{_when(records)}.", ""]
        peers = " --peers" if any(arm.startswith("peer: ") for _, arm, _ in rows) else ""
        out += [f"    logitless bench --suite {suite}{peers} --out benchmarks/results/{file_of(suite)}", ""]
        out += [*_ratio_table(rows), *_gates(records), *_checks(records)]
    return out


def _when(records: list[dict[str, Any]]) -> str:
    """The days on which the cases were measured, as the end of a sentence."""
    days = sorted({r["made"]["date"].split()[0] for r in records if r.get("made")})
    return "".join([", measured ", " to ".join(dict.fromkeys([days[0], days[-1]]))]) if days else ""


def _ratio_table(rows: list[Any]) -> list[str]:
    cells, last = [], ""
    for r, arm, row in rows:
        name = "" if r["name"] == last else r["name"]
        last = r["name"]
        if "error" in row:
            cells.append([name, arm, row["error"][:90], "", "", ""])
            continue
        plan, ms = row["mem/compiler"], row["median_ms"]
        memory = mib(plan["temporaries"]) if plan else ""
        cells.append([name, arm, *first_ratio(row), f"{ms:.{2 if ms < 10 else 1}f}", memory])
    return harness.table(["case", "arm", "ratio", "to", "ms", "MiB"], cells)


def _state(gate: dict[str, Any]) -> str:
    return gate.get("state", "met" if gate["ok"] else "missed")


def _gates(records: list[dict[str, Any]]) -> list[str]:
    """The bars of a suite."""
    cells = []
    for r in records:
        for name, gate in r.get("gates", {}).items() if "arms" in r else ():
            value = "" if gate["value"] is None else f"{gate['value']:.3g}"
            if gate.get("low") is not None:
                value += f" [{gate['low']:.3g}, {gate['high']:.3g}]"
            shown = _state(gate) if gate["ok"] else f"**{_state(gate)}**"
            cells.append([r["name"], name, value, f"{gate['limit']:.3g}", shown])
    return harness.table(["case", "bar", "reached", "limit", ""], cells) if cells else []


def _checks(records: list[dict[str, Any]]) -> list[str]:
    """How many comparisons with the dense form and float64 there were, and which of them failed."""
    gates = {f"{r['config/name']}: {k}": g for r in records if "arms" not in r for k, g in r.get("gates", {}).items()}
    if not gates:
        return []
    missed = [f"**{name}** {g['value']:.3g} of {g['limit']:.3g}" for name, g in gates.items() if _state(g) != "met"]
    said = f"missed: {', '.join(missed)}" if missed else "all met"
    return [
        f"Loss and gradients against the dense form and float64, before anything is timed: {len(gates)} bars, {said}.",
        "",
    ]


def sharded_tables() -> list[str]:
    result = harness.read("tpu_sharded.json")
    if not result:
        return []
    cells = [
        [slice_name, layout, name, mib(row["peak_bytes"]), sent(row)]
        for slice_name, layouts in result["slices"].items()
        for layout, programs in layouts.items()
        for name, row in programs.items()
        if isinstance(row, dict) and "peak_bytes" in row
    ]
    return [
        "## Many chips, ahead of time",
        "",
        f"{result['what']}. {result['tokens_per_chip']} tokens a chip, H={result['hidden']}, V={result['vocab']}. "
        "Collectives: bytes of whole arrays, in the dtype that is summed or moved, all trips of a loop counted.",
        "",
        f"    {result['command']}",
        "",
        *harness.table(["slice", "layout", "program", "peak MiB a chip", "collectives, MiB"], cells),
    ]


def sent(row: dict[str, Any]) -> str:
    """A program's collectives by kind and dtype; those below a MiB are left out."""
    found: dict[str, int] = {}
    for c in row.get("collectives", ()):
        what = f"{c['kind']} {c['dtype']}"
        found[what] = found.get(what, 0) + c["bytes"] * c["times"]
    return ", ".join(f"{k} {mib(v)}" for k, v in found.items() if v >= 1 << 20) or "-"


def recorded_ratios() -> list[tuple[float, float, float]]:
    """Every ratio of every suite, by every clock, every bar that has an interval, and those of GSM8K's replays."""
    same = harness.read(SAME).get("same_completions", {}).values()
    found = [(row["ratio"], *row["interval"]) for arm in same for row in arm.values() if row["interval"]]
    for suite in SUITES:
        for r in suite_records(suite):
            told = [
                c for arm in r.get("arms", {}).values() for by in arm.get("ratios", {}).values() for c in by.values()
            ]
            told += [{**g, "ratio": g["value"]} for g in r.get("gates", {}).values()]
            found += [(c["ratio"], c["low"], c["high"]) for c in told if c.get("low") is not None]
    return found + list(live_ratios().values())


def live_ratios() -> dict[str, tuple[float, float, float]]:
    """Times of ``h200_live.py`` over those of the strong dense form in float32: the median, least and largest seed; of
    an arm that the newest version did not run, those of the version before."""
    found = {}
    for version in LIVE_VERSIONS:
        ms = harness.read("h200_live.json").get(version, {}).get("ms", {})
        for name, times in ms.items():
            x = sorted(a / b for a, b in zip(times, ms["flat: strong/f32"], strict=True))
            found[name.removeprefix("flat: ")] = (x[len(x) // 2], x[0], x[-1])
    return found


def live_tables() -> list[str]:
    """The arms of ``h200_live.py`` that have every token live or a given number, and those of a policy's own tokens."""
    record, cells = harness.read("h200_live.json"), []
    for name, (ratio, low, high) in live_ratios().items():
        key = name if ": " in name else f"flat: {name}"
        version = next(v for v in reversed(LIVE_VERSIONS) if key in record[v]["ms"])
        arm = re.sub(r", \d+ live$", "", name.split(": ")[-1])
        ms = statistics.median(record[version]["ms"][key])
        memory = mib(record[version]["compile"][arm]["temporaries"])
        cells.append([name, f"{ratio:.3f} [{low:.3f}, {high:.3f}]", f"{ms:.{2 if ms < 10 else 1}f}", memory, version])
    if not record:
        return []
    tokens, hidden, vocab = record["after"]["shape"]
    return [
        "## H200: live tokens",
        "",
        f"{record['after']['device']}, jax {record['after']['jax']}. T={tokens} H={hidden} V={vocab}, bfloat16 weights."
        " Ratios are to `strong/f32`, back to back: the median, least and largest of three seeds. `after` is the newer "
        "version, whose row kernel writes a chunk's dx in place; `before` is the version that copied it. The suite's "
        "case of this shape is of an earlier version, which planned more memory.",
        "",
        f"    {record['command']}",
        "",
        *harness.table(["arm", "ratio", "ms", "MiB", "version"], cells),
    ]


def readme_table() -> str:
    """What the README and the home page show: one number a cell."""
    cells = []
    for label, suite, case, arm in README_ROWS:
        if suite == "live":
            ratio, _, _ = live_ratios()[arm]
            compiled = harness.read("h200_live.json")["after"]["compile"]
            both = (mib(compiled[name]["temporaries"]) for name in ("strong/f32", arm))
            cells.append([label, f"{ratio:.2f}", *both])
            continue
        (record,) = (r for r in suite_records(suite) if r.get("name") == case)
        row, tokens = record["arms"][arm], record["config"]["tokens"]
        dense = record["arms"].get("strong/f32") or record["arms"]["strong"]
        (ratio,) = [r["device_ms"]["ratio"] for to, r in row["ratios"].items() if to == "strong/f32"] or [None]
        cells.append([
            label.format(live=100 * row["live_tokens"] / tokens, tokens=tokens),
            "-" if ratio is None else f"{ratio:.2f}",
            dense["error"] if "error" in dense else mib(dense["mem/compiler"]["temporaries"]),
            mib(row["mem/compiler"]["temporaries"]),
        ])  # fmt: skip
    return "\n".join(harness.table(["loss and gradients", "time / dense", "dense, MiB", "**logitless**, MiB"], cells))


def with_table(page: Path) -> str:
    """A page with the README's table made anew."""
    return harness.between(page.read_text(), BEGIN, END, readme_table())


# The GSM8K runs.


def learned(result: Record) -> str:
    """Sampled rewards and held-out answers of every arm."""
    arms = arms_of(result)
    scores = {
        name: [r.get("eval/answer", r["eval/reward"]) for r in arm["metrics"] if "eval/reward" in r]
        for name, arm in arms.items()
    }
    rows = [
        [f"sampled reward, {label}", *(f"{arm['summary'][f'train/reward_{key}']:.3f}" for arm in arms.values())]
        for label, key in (("first 10 steps", "first10"), ("last 10 steps", "last10"))
    ]
    rows += [
        [f"held-out answers right, {label}", *(f"{100 * found[at]:.1f} %" for found in scores.values())]
        for label, at in (("before", 0), ("at the end", -1))
    ]
    names = [f"{name} ({arm['summary']['loss_backend']})" for name, arm in arms.items()]
    return "\n".join(harness.table(["", *names], rows)).rstrip()


def arms_of(result: Record) -> dict[str, Record]:
    """The arms, and the control where the record has one."""
    return {**result["arms"], **({"control": result["control"]} if result.get("control") else {})}


def same(result: Record) -> str:
    """Time and memory of all arms on the baseline's completions."""
    found, c, first = result["same_completions"], result["config"], next(iter(result["arms"]))
    order = list(dict.fromkeys([*result["arms"], *found]))
    rows = [[label, *(cells.get(n, "") for n in order)] for label, cells in ab_text.same_completions(found).items()]
    said = (
        f"The same completions in all arms, in turns: {c['ab']['replay_steps']} steps of the {first} run, "
        f"micro-batches of {c['train']['microbatch']} x {c['train']['pack_length']:,} tokens. Ratio to {first} "
        f"with its {c['ab']['confidence']:.0%} interval. A step is the rollout of the {first} run and the arm's "
        f"update; the control is {first} with half the micro-batch."
    )
    return "\n".join([said, "", *harness.table(["", *order], rows)]).rstrip()


def replayed(result: Record) -> str:
    """What the replay said, with the control's own distance."""
    lines = []
    for name, a in agreements(result).items():
        if a.get("replay_grad_norm_deviation") is not None:
            worst = (a[f"replay_grad_norm_{key}"] for key in ("deviation", "control", "limit"))
            said = "{:.1e}, the control's {:.1e}, limit {:.1e}".format(*worst)
            lines.append(f"- {name}: {a['verdict']}. Gradient norm, at the step nearest to its limit: {said}.")
    return "\n".join(lines)


def reward_curve(result: Record, block: int = 5) -> Lines:
    """The sampled reward of every arm, as means of ``block`` steps at the middle of each block."""
    series: list[Series] = []
    for arm, run in arms_of(result).items():
        steps = [(r["step"], r["train/reward"]) for r in run["metrics"] if r["step"] > 0 and "train/reward" in r]
        blocks = [steps[j : j + block] for j in range(0, len(steps), block)]
        points = tuple((sum(s for s, _ in b) / len(b), sum(v for _, v in b) / len(b)) for b in blocks)
        series.append(Series(arm, points, tone_of(arm, [s.tone for s in series])))
    title = "Sampled reward on GSM8K, Qwen2.5-1.5B"
    return Lines("gsm8k-reward", title, "step", "mean reward", tuple(series), note=f"means of {block} steps")


def setting(result: Record) -> str:
    c, first = result["config"], next(iter(result["arms"].values()))
    steps = max(len([r for r in arm["metrics"] if "train/loss" in r]) for arm in result["arms"].values())
    t, r, where = c["train"], c["rollout"], first["summary"]["environment"]
    return (
        f"{where['device']}, jax {where['jax']}; {steps} steps of {t['prompts_per_step']} x {t['group_size']} "
        f"completions of at most {r['max_completion_tokens']} tokens, micro-batches of {t['microbatch']} x "
        f"{t['pack_length']:,} tokens; greedy answers to {c['eval']['problems']} held-out problems."
    )


def gsm8k(plots_at: str, whole: bool) -> str:
    """Setting, curve, tables and verdicts; of the verdicts the last alone unless ``whole``."""
    result, times = harness.read(LEARN), harness.read(SAME)
    first = next(iter(result["arms"]))
    said = [f"{name} against {first}: {a['verdict']}." for name, a in agreements(result).items()]
    said.append(f"In all: {ab_text.verdict(result)}.")
    verdicts = "\n".join(f"- {line}" for line in said) if whole else said[-1]
    image = f"![sampled reward]({plots_at}/gsm8k-reward.svg)"
    parts = [setting(result), image, learned(result), verdicts, same(times), replayed(times) if whole else ""]
    return "\n\n".join(filter(None, parts)) + "\n"


def render() -> str:
    tables = [suite_tables(), live_tables(), sharded_tables()]
    return "\n".join(["# Benchmarks", "", HOW, "", *(line for table in tables for line in table)]).rstrip() + "\n"


def tunix_table() -> str:
    """Temporaries of Tunix' steps, in docs/tunix.md."""
    ways = "stock", "install()", "logitless"
    rows = [
        [name, *(f"{found[k]:,.0f}" if k in found else "-" for k in ways)]
        for name, found in harness.read("tunix_memory.json")["temporaries_mib"].items()
    ]
    return "\n".join(harness.table(["MiB", "stock", "`install()`", '`policy_loss_fn="logitless"`'], rows))


def largest() -> Bars:
    """The largest completions, and the most of them, that one gradient of Qwen2.5-1.5B had room for."""
    bars = []
    for what, label in (("context", "16 rows of {:,}"), ("batch", "{:,} rows of 512")):
        for arm, name, tone in (("dense", "dense", "a"), ("fused", "logitless", "ours")):
            size = harness.read(f"train_gsm8k_largest_{arm}_{what}.json")["fits"]
            tokens = (16 if what == "context" else 512) * size
            bars.append(Bar(f"{name}: {label.format(size)} tokens", (("tokens", tokens),), tone))
    return Bars("largest-on-one-h200", "What fits one H200", "tokens", tuple(bars))


def files() -> Iterator[tuple[Path, str]]:
    """Everything that follows from the records, with what it should hold."""
    yield PAGE, render()
    yield HOME, with_table(HOME)
    yield README, harness.between(with_table(README), LEARN_BEGIN, LEARN_END, gsm8k("docs/plots", False))
    yield TUNIX, harness.between(TUNIX.read_text(), "<!-- memory: begin -->\n", "<!-- memory: end -->", tunix_table())
    yield TRAINING, harness.between(TRAINING.read_text(), LEARN_BEGIN, LEARN_END, gsm8k("plots", True))
    for chart in (largest(), reward_curve(harness.read(LEARN))):
        yield PLOTS / f"{chart.name}.svg", to_svg(chart, alone=True) + "\n"


if __name__ == "__main__":
    for path, content in files():
        path.write_text(content)
