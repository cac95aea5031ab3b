"""Plants small faults drawn at random, one at a time, and runs the tests that execute the line: ``make mutants``.

    python scripts/mutation                         200 faults of a new seed
    python scripts/mutation --seed 7 --n 50         the first 50 of seed 7; what is in the record is not run again
    python scripts/mutation --seconds 600           as many as that time allows; call it again with the seed to go on
    python scripts/mutation --only train packing    of files whose path contains one of these
    python scripts/mutation --again survived        those that survived, once more
    python scripts/mutation --map                   only the map of lines and tests (.mutation/map.json)

Faults are planted in a copy of the tree. A test process is forked after JAX is imported and before it has a backend, so
a fault costs what its tests cost. Tests run from the nearest and quickest on until one fails, for at most --patience
seconds of processor time: a fault that is left then has survived. Faults that change nothing observable are named in
equivalent.json with the reason. Exits with 1 if more than a tenth of the others survive, with 3 if time was over first.
"""

from __future__ import annotations

import argparse
import collections
import functools
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lines import Map, Recorder
from sites import Site, compiles, sites

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benchmarks" / "results" / "mutation.json"
EQUIVALENT = Path(__file__).with_name("equivalent.json")
COPIED = ("src", "tests", "benchmarks", "pyproject.toml", "docs", "README.md", "configs", "examples", "scripts")
CORE = "arguments backend divergences id_passes loss_stats problem route row_passes stats top_k top_teacher validation"
CHOSEN = (
    *("api.py", *(f"core/{m}.py" for m in CORE.split()), "data/*.py", "objectives/*.py", "settings/*.py"),
    *("head/*.py", "head/sparse/*.py", "logits/*.py", "train/*.py"),
)
LOGITS_TESTS = "logits_numerics reference_entropy constant_temperature token_sums"
HEAD_TESTS = (
    "head_numerics head_sweep reference_head sparse_backward head_properties sparse_pieces linear_divergence more_ids "
    "sparse_distillation top_k top_teacher"
)
TESTS = (
    *(f"{folder}/test_*.py" for folder in ("api", "core", "data", "lab", "objectives", "oracle", "train")),
    "mesh/test_sharding_errors.py",
    *(f"head/test_{name}.py" for name in HEAD_TESTS.split()),
    *(f"logits/test_{name}.py" for name in LOGITS_TESTS.split()),
    "plan/test_explain_and_plan.py",
)
LEFT_OUT = ("startup",)
"""Tests of speed."""
IMPORTED = (
    *("hypothesis", "jax.numpy", "jax.experimental.pallas.tpu", "jax.experimental.pallas.mosaic_gpu"),
    *("optax", "tokenizers", "safetensors.numpy", "rich.console", "omegaconf", "jinja2", "gguf"),
)
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu and not tunix")
HANGS = 150
"""Seconds after which one test is taken to run on for ever, which is a failure of it."""


class Chosen:
    """A plugin of pytest: these tests in this order, until the processor time is over."""

    def __init__(self, tests: list[str], seconds: float, outcome: Path) -> None:
        self.order, self.seconds, self.outcome = {t: i for i, t in enumerate(tests)}, seconds, outcome
        self.ran, self.failed, self.over = 0, "", False
        signal.signal(signal.SIGALRM, self.too_long)

    def too_long(self, *_: Any) -> None:
        raise TimeoutError("the test did not end")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda i: self.order[i.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        if time.process_time() > self.seconds:
            self.over, item.session.shouldstop = True, "time"
            return True
        signal.alarm(HANGS)
        try:
            return (yield)
        finally:
            signal.alarm(0)
            self.ran += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            late = "did not end" in str(report.longrepr)
            self.failed = f"{report.nodeid}{' (timeout)' if late else ''}"

    def pytest_unconfigure(self) -> None:
        self.outcome.write_text(json.dumps(dict(ran=self.ran, failed=self.failed, over=self.over)))


def in_child(tree: Path, arguments: list[str], plugin: Any, patience: float) -> int:
    """pytest's exit code in a forked process that has imported nothing of the library; -1 if it had to be killed."""
    child = os.fork()
    if not child:
        os.setsid()
        os.chdir(tree)
        sink = os.open(tree / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        sys.path.insert(0, str(tree / "src"))
        code = 99
        try:
            code = int(pytest.main(arguments, plugins=[plugin()]))
        finally:
            os._exit(code)
    end = time.monotonic() + patience
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def record_lines(tree: Path, file: str) -> dict[str, Any]:
    """Which lines the tests of a file execute."""
    out = tree / "lines.json"
    out.unlink(missing_ok=True)

    class Writing(Recorder):
        def pytest_unconfigure(self) -> None:
            out.write_text(json.dumps(self.found()))

    start = time.monotonic()
    code = in_child(tree, [*OPTIONS[1:], file], lambda: Writing(tree / "src" / "logitless"), 3600)
    if not out.exists():
        print(f"pytest ended with {code}: {(tree / 'output.txt').read_text()[-500:]}")
        return dict(seconds={}, failed=[file], lines={})
    found: dict[str, Any] = json.loads(out.read_text())
    print(f"  {time.monotonic() - start:4.0f} s, {len(found['seconds']):4} tests: {file}", flush=True)
    return found


def verdict_of(site: Site, order: list[list[str]], tree: Path, patience: float) -> dict[str, Any]:
    """``verdict`` (killed, timeout, survived, not executed), the test that saw it, and how many ran."""
    if not order[0]:
        return dict(verdict="not executed")
    path, outcome = tree / "src" / "logitless" / site.file, tree / "outcome.json"
    original = path.read_text()
    path.write_text(site.applied(original))
    ran, spent = 0, 0.0
    # A file of tests takes a second to import, so two files first.
    near = list(dict.fromkeys(t.partition("::")[0] for t in order[0]))[:2]
    first = [t for t in order[0] if t.partition("::")[0] in near][:8]
    rest = [first, [t for t in order[0] if t not in first], order[1]]
    try:
        for tests in filter(None, rest):
            outcome.unlink(missing_ok=True)
            files = list(dict.fromkeys(t.partition("::")[0] for t in tests))
            before = os.times()
            plugin = functools.partial(Chosen, tests, patience - spent, outcome)
            code = in_child(tree, [*OPTIONS, *files], plugin, 3 * patience + HANGS)
            spent += os.times().children_user - before.children_user
            if code < 0 or not outcome.exists():
                return dict(verdict="timeout" if code == -1 else "killed", by=f"the process ended with {code}", ran=ran)
            found = json.loads(outcome.read_text())
            ran += found["ran"]
            if found["failed"] or (code not in (0, 5) and not found["over"]):
                late = found["failed"].endswith("(timeout)")
                by = found["failed"] or (tree / "output.txt").read_text()[-300:]
                return dict(verdict="timeout" if late else "killed", by=by, ran=ran)
            if found["over"] or spent >= patience:
                break
    finally:
        path.write_text(original)
    return dict(verdict="survived", ran=ran, of=sum(map(len, order)))


def drawn(seed: int, n: int, only: list[str]) -> list[Site]:
    """``n`` faults at random, each place with each of its variants as likely as another."""
    source = ROOT / "src" / "logitless"
    texts = {str(p.relative_to(source)): p.read_text() for pattern in CHOSEN for p in sorted(source.glob(pattern))}
    every = [s for f, t in sorted(texts.items()) if any(o in f for o in only or [""]) for s in sites(f, t)]
    random.Random(seed).shuffle(every)
    out: list[Site] = []
    for site in every:
        if len(out) < n and compiles(site, texts[site.file]):
            out.append(site)
    print(f"seed {seed}: {len(out)} of {len(every)} faults", flush=True)
    return out


def package_of(file: str) -> str:
    return file.partition("/")[0] if "/" in file else "core"


def summary(mutants: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of verdicts by package and of all; equivalent ones are no survivors."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for m in mutants:
        verdict = "equivalent" if m.get("reason") else m["verdict"]
        for package in (package_of(m["file"]), "all"):
            counts[package][verdict] += 1
    every = counts["all"]
    counted = max(1, len(mutants) - every["equivalent"])
    return dict(
        survived=round((every["survived"] + every["not executed"]) / counted, 3),
        packages={k: dict(c) for k, c in sorted(counts.items())},
    )


def plant(todo: list[Site], map_: Map, tree: Path, end: float, patience: float, jobs: int) -> Iterator[dict[str, Any]]:
    """Verdicts as they come, from ``jobs`` processes with a copy of the tree each."""
    read, write = os.pipe()
    workers = []
    for job in range(jobs):
        worker = os.fork()
        workers.append(worker)
        if worker:
            continue
        own = tree if not job else Path(shutil.copytree(tree, tree.with_name(str(job))))
        os.environ["PYTHONPATH"] = str(own / "src")
        try:
            for site in todo[job::jobs]:
                if time.monotonic() > end:
                    break
                start = time.monotonic()
                found = dict(file=site.file, line=site.line, column=site.span[2], fault=site.name)
                found |= verdict_of(site, map_.tests(site.file, site.line, site.imported), own, patience)
                found["seconds"] = round(time.monotonic() - start, 1)
                os.write(write, json.dumps(found).encode() + b"\n")
        except BaseException:
            traceback.print_exc()
        finally:
            if job:
                shutil.rmtree(own)
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        for line in lines:
            yield json.loads(line)
    for worker in workers:
        os.waitpid(worker, 0)


def run(chosen: list[Site], seed: int, map_: Map, tree: Path, end: float, arguments: argparse.Namespace) -> int:
    """Verdicts of all that are not in the record, which is written after each."""
    record = arguments.record
    kept = json.loads(record.read_text()) if record.exists() else {}
    again = {"survived": ("survived", "not executed"), "all": None}.get(arguments.again, ())
    results = {
        (m["fault"], m["line"], m["column"]): m
        for m in (kept.get("mutants", []) if kept.get("seed") == seed else [])
        if again is not None and m["verdict"] not in again
    }
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    reasons = {e["fault"]: e["reason"] for e in json.loads(EQUIVALENT.read_text())}
    todo = [s for s in chosen if (s.name, s.line, s.span[2]) not in results]

    def save() -> list[dict[str, Any]]:
        found = [results[(s.name, s.line, s.span[2])] for s in chosen if (s.name, s.line, s.span[2]) in results]
        for m in found:
            m.pop("reason", None)
            if m["verdict"] in ("survived", "not executed") and m["fault"] in reasons:
                m["reason"] = reasons[m["fault"]]
        what = "small faults planted at random, and whether a test saw them (make mutants)"
        head = dict(what=what, seed=seed, commit=commit, planted=len(found), **summary(found))
        record.write_text(json.dumps(dict(**head, mutants=found), indent=1) + "\n")
        return found

    for m in plant(todo, map_, tree, end, arguments.patience, arguments.jobs):
        results[(m["fault"], m["line"], m["column"])] = m
        save()
        print(
            f"{len(results):3}/{len(chosen)} {m['verdict']:12} {m['seconds']:4.0f} s  {m['line']}: {m['fault']}",
            flush=True,
        )
    found = save()
    for package, counts in summary(found)["packages"].items():
        print(f"{package:12} {counts}")
    left, share = len(chosen) - len(found), summary(found)["survived"]
    print(f"seed {seed}: {share:.1%} of {len(found)} survived" + (f"; {left} are left" if left else ""))
    return 3 if left else int(share > 0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="of the draw; without it a new one")
    parser.add_argument("--n", type=int, default=200, help="how many faults")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other fault after this time")
    parser.add_argument("--patience", type=float, default=60, help="seconds of processor time for the tests of a fault")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", nargs="+", default=[], help="files whose path contains one of these")
    parser.add_argument("--again", choices=("survived", "all"), help="run these once more")
    parser.add_argument("--map", action="store_true", help="only bring the map up to date")
    parser.add_argument("--record", type=Path, default=RECORD)
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.randrange(10**6)
    begin = time.monotonic()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
    sys.dont_write_bytecode = True  # two faults of one file may have one size and one time
    for name in IMPORTED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutation") as folder:
        tree = Path(folder).resolve() / "0"
        tree.mkdir()
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tree / name)
        os.environ["PYTHONPATH"] = str(tree / "src")
        (ROOT / ".mutation").mkdir(exist_ok=True)
        map_ = Map(ROOT / ".mutation" / "map.json", ROOT)
        files = [p for pattern in TESTS for p in sorted((ROOT / "tests").glob(pattern))]
        names = [str(p.relative_to(ROOT)) for p in files if p.stem.removeprefix("test_") not in LEFT_OUT]
        map_.update(names, lambda file: record_lines(tree, file))
        if arguments.map:
            return 0
        chosen = drawn(seed, arguments.n, arguments.only)
        return run(chosen, seed, map_, tree, begin + arguments.seconds, arguments)


if __name__ == "__main__":
    sys.exit(main())
