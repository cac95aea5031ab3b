"""docs/conformance.md from the record of a run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "conformance.json"

HEADER = """# Conformance: their code, our numbers

`make conformance` installs the peers into a folder of its own (`.venv-conformance`), runs *their* loss and ours on
the same batches, and writes this page from what it found (`benchmarks/results/conformance.json`). TRL's is the
trainer's own `_compute_loss`, Liger's the chunked loss from hidden states with the reference head in the same call,
veRL's its `ppo_loss`. Ours is made from the same settings, by `Objective.from_trl`, `from_liger` and `from_verl`
alone. Tunix' stock loss is compared by the tests of its integration.

Each row below is one set of settings over several batches: full rows, rows of 6, 3, 1 and 5 tokens, rows with holes,
an empty row, and a batch with nothing in it. Losses, gradients by every token's log-probability and entropy (for
Liger by hidden states, head and bias) and the metrics that the peer logs have to agree. *float64* is the largest
difference between the peer in float64 and the oracle, relative to the largest entry (of a loss near zero: to the size
of its terms); *float32* that between the peer and the library. Allowed are 1e-9 (2e-7 with an adaptive entropy, whose
coefficient is float32 here; 5e-8 for veRL, which adds 1e-8 to the length of a row) and 2e-5. TRL's
`clip_ratio/low_min` and `high_max` are compared at the
sequence level, the only one at which this library has them.

Distillation losses come from `Distillation.from_trl` and `from_liger`, and ours is the oracle in both columns:
*float32* stands for a peer that computes in float32 (TRL's `ChunkedDivergenceFunction`, Liger's
`LigerFusedLinearJSDLoss`).
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
    for peer, rows in itertools.groupby(record["agreements"], key=lambda r: r["peer"]):
        rows = list(rows)
        metrics = sorted({m for r in rows for m in r["metrics"]})
        lines += ["", f"## {peer}: {len(rows)} settings, {sum(r['batches'] for r in rows)} batches", ""]
        lines += [f"Metrics compared as well: {', '.join(f'`{m}`' for m in metrics)}.", ""] if metrics else []
        lines += ["| settings | batches | float64 | float32 |", "|---|---|---|---|"]
        for r in rows:
            lines.append(f"| {r['settings']} | {r['batches']} | {_number(r['float64'])} | {_number(r['float32'])} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page of the record in the repository."""
    return render(json.loads(RESULTS.read_text()))
