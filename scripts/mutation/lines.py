"""Which tests execute which line: a map made once, kept in a file, and carried over to source that has moved."""

from __future__ import annotations

import difflib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

TOOL = 4
"""The number under which this module asks for events of sys.monitoring."""


class Recorder:
    """A plugin of pytest that notes lines and seconds of every test that passes.

    A line that runs while a module's fixtures are made counts for every test of the file. A line that runs when a
    function is traced counts for the first test that traces it; other tests of the file may depend on it.
    """

    def __init__(self, source: Path) -> None:
        self.source, self.seconds, self.failed = str(source) + "/", {}, []  # type: ignore[var-annotated]
        self.lines: dict[str, dict[str, int]] = {"": {}}
        self.into = self.lines[""]
        monitoring = sys.monitoring
        monitoring.use_tool_id(TOOL, "mutation")
        monitoring.register_callback(TOOL, monitoring.events.LINE, self.on_line)
        monitoring.set_events(TOOL, monitoring.events.LINE)

    def on_line(self, code: CodeType, line: int) -> Any:
        if code.co_filename.startswith(self.source):
            name = code.co_filename[len(self.source) :]
            self.into[name] = self.into.get(name, 0) | 1 << line
        return sys.monitoring.DISABLE

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Any:
        self.into = self.lines[""]
        sys.monitoring.restart_events()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        self.into = self.lines.setdefault(item.nodeid, {})
        sys.monitoring.restart_events()
        start = time.process_time()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = round(time.process_time() - start, 2)
            self.into = self.lines[""]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def found(self) -> dict[str, Any]:
        tests = {t: s for t, s in self.seconds.items() if t not in self.failed}
        lines = {t: {f: hex(bits) for f, bits in x.items()} for t, x in self.lines.items() if t in tests or not t}
        return dict(seconds=tests, failed=self.failed, lines=lines)


def _moved(before: str, now: str) -> dict[int, list[int]]:
    """Lines of a text and where they are now; a changed line takes the place of the one before it, too."""
    where: dict[int, list[int]] = {}
    matcher = difflib.SequenceMatcher(None, before.splitlines(), now.splitlines(), autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            for i in range(b - a):
                where.setdefault(a + i + 1, []).append(c + i + 1)
        else:
            for i in range(a, b) if b > a else [max(a - 1, 0)]:
                where.setdefault(i + 1, []).extend(range(c + 1, d + 1))
    return where


class Map:
    """Lines of the library and the tests that execute them, by file of tests."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self.root = path, root
        kept = json.loads(path.read_text()) if path.exists() else dict(source={}, files={})
        self.source: dict[str, str] = kept["source"]
        self.files: dict[str, Any] = kept["files"]

    def update(self, tests: list[str], record: Callable[[str], dict[str, Any]]) -> None:
        """Carries the map over to the source as it is, and records the files of tests that are new or have changed."""
        source = self.root / "src" / "logitless"
        now = {str(p.relative_to(source)): p.read_text() for p in sorted(source.rglob("*.py"))}
        moved = {f: _moved(t, now[f]) for f, t in self.source.items() if f in now and t != now[f]}
        for found in self.files.values():
            for lines in found["lines"].values():
                for file in moved.keys() & lines.keys():
                    bits = int(lines[file], 16)
                    there = [j for i, to in moved[file].items() if bits >> i & 1 for j in to]
                    lines[file] = hex(sum(1 << j for j in set(there)))
        self.source = now
        self.files = {f: found for f, found in self.files.items() if f in tests}
        for file in tests:
            text = (self.root / file).read_text()
            if self.files.get(file, {}).get("text") != text:
                self.files[file] = dict(record(file), text=text)
                for failed in self.files[file]["failed"]:
                    print(f"  fails as it is, and is left out: {failed}", flush=True)
            self.path.write_text(json.dumps(dict(source=self.source, files=self.files)))

    def tests(self, file: str, line: int, imported: bool) -> list[list[str]]:
        """Tests that execute a line, first those that are near and quick; then the others of their files. What runs
        when a module is ``imported`` is executed by all that execute any line of it."""
        sure, others = [], []
        bits = -1 if imported else 1 << line
        for name, found in self.files.items():

            def executes(test: str, lines: dict[str, dict[str, str]] = found["lines"]) -> bool:
                return bool(int(lines.get(test, {}).get(file, "0"), 16) & bits)

            by_all = executes("")
            direct = [t for t in found["seconds"] if by_all or executes(t)]
            sure += [self._rank(file, name, t, found["seconds"][t]) for t in direct]
            if direct:
                rest = found["seconds"].keys() - direct
                others += [self._rank(file, name, t, found["seconds"][t]) for t in rest]
        return [self._in_turns(sure), self._in_turns(others)]

    @staticmethod
    def _rank(file: str, tests: str, test: str, seconds: float) -> tuple[float, str]:
        """Seconds, a quarter of them for a file of tests that is named like the module or its folder."""
        near = Path(file).stem in Path(tests).stem or Path(file).parent.name == Path(tests).parent.name
        return (seconds + 0.005) * (0.25 if near else 1.0), test

    @staticmethod
    def _in_turns(ranked: list[tuple[float, str]]) -> list[str]:
        """Cases of one test are much alike: what the second and the third cost counts more."""
        nth: dict[str, int] = {}
        keyed = []
        for rank, test in sorted(ranked):
            function = test.partition("[")[0]
            nth[function] = nth.get(function, 0) + 1
            keyed.append((rank * min(3.0 ** nth[function], 100.0), test))
        return [test for _, test in sorted(keyed)]
