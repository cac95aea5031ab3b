"""Run the conformance tests, record what they found, and write the page.

    python tests/conformance benchmarks/results/conformance.json docs/conformance.md    (make conformance)

Exits with pytest's code, and writes nothing unless every test that ran has passed and every peer was there.
"""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import conformance_page

HERE = Path(__file__).parent
PACKAGES = ("trl", "liger-kernel", "verl", "torch", "transformers", "jax", "numpy")


class Recorder:
    """A pytest plugin that keeps what the tests recorded."""

    def __init__(self) -> None:
        self.found: dict[str, list[dict[str, Any]]] = {"agreement": [], "disagreement": []}
        self.outcomes: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome == "skipped":
            self.outcomes[report.outcome] += 1
        if report.when == "call":
            for name, value in report.user_properties:
                self.found[name].append(value)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome == "skipped":  # a module whose peer is not installed
            self.outcomes["skipped"] += 1


def main(results: str, page: str, *options: str) -> int:
    recorder = Recorder()
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-W", "ignore", *options, str(HERE)], plugins=[recorder])
    if code or recorder.outcomes["skipped"]:
        print(f"conformance: nothing is recorded: {dict(recorder.outcomes)}", file=sys.stderr)
        return int(code) or 1
    record = {
        "what": "losses and gradients of TRL, Liger-Kernel and veRL beside ours, largest relative differences",
        "command": "make conformance",
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "tests": dict(recorder.outcomes),
        "agreements": recorder.found["agreement"],
        "disagreements": recorder.found["disagreement"],
    }
    Path(results).write_text(json.dumps(record, indent=1) + "\n")
    Path(page).write_text(conformance_page.render(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
