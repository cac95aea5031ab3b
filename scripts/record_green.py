"""When each of the checks that take long was last green, on which commit, and with how many tests.

python scripts/record_green.py test-slow REPORT.xml     # the check has just passed (the make targets run this)
python scripts/record_green.py                          # what was green when, for docs/release.md's checklist

The record is benchmarks/results/release_checks.json. A tree with changes that are not committed is recorded as that.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "release_checks.json"
CHECKS = ("test-slow", "test-tunix", "conformance", "dist", "matrix")
WHAT = "when each of the checks that take long was last green, and on which commit"
CODE = ("src", "tests", "scripts", "configs", "examples", "pyproject.toml")
"""What a check depends on: changes elsewhere, as in its own result file, do not matter."""


def counts(report: Path) -> dict[str, int]:
    """How many tests of a JUnit file passed, failed and were skipped."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total = {k: sum(int(s.get(k, 0)) for s in suites) for k in ("tests", "failures", "errors", "skipped")}
    bad = total["failures"] + total["errors"]
    return dict(passed=total["tests"] - bad - total["skipped"], failed=bad, skipped=total["skipped"])


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def read() -> dict[str, Any]:
    """What is recorded of each check."""
    return json.loads(RECORD.read_text())["checks"] if RECORD.exists() else {}


def record(name: str, report: Path | None) -> dict[str, Any]:
    """Write that a check is green now; exits where its report says otherwise."""
    found = counts(report) if report is not None else {}
    if found and (found["failed"] or not found["passed"]):
        sys.exit(f"record_green: {name}: {found['failed']} failed and {found['passed']} passed; nothing is recorded")
    now = dict(
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        commit=_git("rev-parse", "HEAD"),
        changed=bool(_git("status", "--porcelain", "--", *CODE)),
        **found,
    )
    checks = read() | {name: now}
    whole = dict(what=WHAT, checks={k: checks[k] for k in CHECKS if k in checks})
    RECORD.write_text(json.dumps(whole, indent=1) + "\n")
    return now


def table() -> str:
    """A line for each check."""
    lines = []
    for name in CHECKS:
        found = read().get(name)
        if found is None:
            lines.append(f"{name:12s} never recorded")
            continue
        since = _git("rev-list", "--count", f"{found['commit']}..HEAD") or "?"
        tests = f", {found['passed']} passed, {found['skipped']} skipped" if "passed" in found else ""
        changed = " with changes" if found["changed"] else ""
        lines.append(
            f"{name:12s} green {found['date']} on {found['commit'][:10]}{changed} ({since} commits ago){tests}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", nargs="?", choices=CHECKS, help="the check that has just passed")
    parser.add_argument("report", nargs="?", type=Path, help="its JUnit file")
    args = parser.parse_args()
    if args.name:
        record(args.name, args.report)
    print(table())


if __name__ == "__main__":
    main()
