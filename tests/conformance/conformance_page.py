"""docs/conformance.md from the record of a run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "conformance.json"

HEADER = """# Conformance: their code, our numbers

`make conformance` installs TRL, Liger and veRL into a folder of its own (`.venv-conformance`), runs *their* loss and
ours on the same batches, and writes this page from the record (`benchmarks/results/conformance.json`). TRL's loss is
the trainer's own `_compute_loss`, Liger's the chunked loss from hidden states with the reference head in the same
call, veRL's the `ppo_loss`. Ours comes from the same settings by `Objective.from_trl`, `from_liger` and `from_verl`.
The tests of the Tunix integration compare Tunix' stock loss.

Batches: full rows, rows of 6, 3, 1 and 5 tokens, rows with holes, an empty row, and a batch with nothing in it.
Losses, gradients (by log-probability and entropy of every token; for Liger by hidden states, head and bias) and the
metrics that the peer logs must agree. *float64* is the largest difference between the peer in float64 and the oracle,
relative to the largest entry; *float32* the largest difference between the peer and the library. Allowed are 1e-9 and
2e-5 (2e-7 with an adaptive entropy, 5e-8 for veRL, in float64). TRL's `clip_ratio/low_min` and `high_max` are
compared at the sequence level.

Distillation losses come from `Distillation.from_trl` and `from_liger`, with the oracle in both columns: *float32*
then marks a peer that computes in float32.
"""


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.1e}" if x else "0"


def _value(x: float | None) -> str:
    return "NaN" if x is None else f"{x:.6g}"


def render(record: dict[str, Any]) -> str:
    """The page."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [HEADER, f"Recorded with Python {record['python']}, {versions}: {record['tests']['passed']} tests.", ""]
    lines += [
        "## Where the numbers differ",
        "",
        "Each of these is asserted: a test fails when the two agree again.",
        "",
    ]
    lines += ["| between | what | here, or the first | there, or the second | why |", "|---|---|---|---|---|"]
    for d in record["disagreements"]:
        lines.append(f"| {d['peer']} | {d['what']} | {_value(d['ours'])} | {_value(d['theirs'])} | {d['why']} |")
    lines += ["", "## Where they agree", "", "The record has every setting on its own; worst of all settings:", ""]
    lines += ["| peer | settings | batches | float64 | float32 | metrics compared |", "|---|---|---|---|---|---|"]
    for peer, found in itertools.groupby(record["agreements"], key=lambda r: r["peer"]):
        rows = list(found)
        worst = (max((r[k] for r in rows if r[k] is not None), default=None) for k in ("float64", "float32"))
        metrics = ", ".join(f"`{m}`" for m in sorted({m for r in rows for m in r["metrics"]}))
        cells = [peer, str(len(rows)), str(sum(r["batches"] for r in rows)), *map(_number, worst), metrics]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page of the record in the repository."""
    return render(json.loads(RESULTS.read_text()))
