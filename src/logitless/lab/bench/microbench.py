"""``logitless bench``: the same loss with and without the kernels, arms in alternation, verified before timed.

Reported per arm: time by every available clock (median, p10, p90 over all calls, and a number per round), the ratio to
the dense form with an interval (:mod:`.ratios`), achieved TFLOP/s and GB/s, the ratio to the roofline, and memory: the
compiler's plan, and the device's peak in a process without compilation.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

from logitless.lab.bench import ratios, turns, verification
from logitless.lab.bench.arm_program import SPARSE_METRICS
from logitless.lab.bench.case import Arm, BenchConfig, arms, check, is_ours, reference_of, twin
from logitless.lab.bench.verification import Verified
from logitless.lab.plan.chips import chip_of_kind, roofline_seconds
from logitless.lab.tools import result_files, timing
from logitless.lab.tools.child import OUT_OF_MEMORY
from logitless.lab.tools.command_config import ConfigError

Say = Callable[[str], None]
NO_SLOWER = 1.02
"""An arm's time in units of that in another tree (``--against``)."""
NOT_HERE = "not here: "
"""Begins the error of a peer that is not installed: recorded, and no failure."""


@dataclasses.dataclass(frozen=True)
class How:
    """What a command line adds to a configuration."""

    only: tuple[str, ...] = ()  # arms with these names, or with a name part listed here, and their baselines
    against: str = ""  # another tree's src
    peers: str | None = None  # PyTorch's arms, too; a folder of unpacked wheels, or empty: as installed
    verified: Verified = dataclasses.field(default_factory=dict)  # by earlier cases


def _chosen(all_arms: dict[str, Arm], only: tuple[str, ...]) -> dict[str, Arm]:
    wanted = set(all_arms) if not only else set()
    for text in only:
        wanted |= {text} if text in all_arms else {k for k in all_arms if text in k}
    if not wanted:
        raise ConfigError(f"--arms {','.join(only)}: expected (parts of) some of {', '.join(all_arms)}")
    wanted |= {r for k in wanted if (r := reference_of(k, all_arms)) is not None}
    wanted |= {twin(k) for k in wanted if twin(k) in all_arms}
    return {k: a for k, a in all_arms.items() if k in wanted}


def stages(c: BenchConfig, how: How) -> int:
    """How many parts of the work :func:`run` names, at most: a check and a compilation of each arm, and the rounds."""
    check(c)
    chosen = _chosen(arms(c, peers=how.peers is not None, source=how.against), how.only)
    return len(chosen) + c.rounds + (sum(map(is_ours, chosen.values())) if c.verify else 0)


def run(c: BenchConfig, say: Say = lambda _: None, how: How | None = None) -> dict[str, Any]:
    """All arms of one configuration; ``passed`` is false if the verification fails, the arms' losses disagree, a gate
    is missed, or an arm failed for another reason than memory."""
    how = how or How()
    check(c)
    chosen = _chosen(arms(c, peers=how.peers is not None, source=how.against), how.only)
    record: dict[str, Any] = dict(kind="bench", name=c.name, config=dataclasses.asdict(c), arms={}, busy=_busy())
    record["made"] = result_files.provenance()
    if how.against:
        record["against"] = how.against
    if c.verify and any(is_ours(a) for a in chosen.values()):
        record["verify"] = verification.verify(c, chosen, how.verified, say)
    with tempfile.TemporaryDirectory(prefix="logitless-bench-") as cache:
        environment = {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        parts = turns.measure(turns.Turns(dataclasses.asdict(c), chosen, how.peers, environment), c.rounds, say)
        if c.peaks:
            _peaks(c, chosen, parts, environment, say)
    record["arms"] = {name: _summarise(c, part) for name, part in parts.items()}
    _compare(c, chosen, record)
    return record


def _busy() -> float:
    """How many of this machine's cores had other work in the last minute: times are then not of this program alone."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else 0.0


def _peaks(
    c: BenchConfig, chosen: dict[str, Arm], parts: dict[str, Any], environment: dict[str, str], say: Say
) -> None:
    """``device`` of each arm that ran where an allocator keeps account, by a process that compiles nothing."""
    for name, part in parts.items():
        if part.get("has_peaks") and "error" not in part:
            say(f"the device's peak of {name}")
            with turns.open_worker(chosen[name].source, environment=environment) as worker:
                job = dict(do="peak", case=dataclasses.asdict(c), arm=dataclasses.asdict(chosen[name]))
                part["device"] = worker.ask(job, c.timeout_s).get("device")


def _compare(c: BenchConfig, chosen: dict[str, Arm], record: dict[str, Any]) -> None:
    """Ratios, gates and the verdict on the case."""
    rows = record["arms"]
    good = {k: v for k, v in rows.items() if "error" not in v}
    for name, row in good.items():
        for other in (reference_of(name, chosen), twin(name)):
            if other in good:
                row["ratios"][other] = ratios.clocks(row, good[other])
    bars = {**c.gates, **{k: v for name in chosen for k, v in _no_worse(name).items() if twin(name) in chosen}}
    record["gates"] = {
        gate: ratios.gate(what, rows[a], rows[b], limit)
        for gate, (what, a, b, limit) in bars.items()
        if a in rows and b in rows and all(_may_lack(row) is not True for row in (rows[a], rows[b]))
    }
    # Only arms over the same batch and objective have the same loss to agree on.
    same = {k: v["loss"] for k, v in good.items() if "loss" in v and not (chosen[k].batch or chosen[k].objective)}
    finite = all(math.isfinite(v) for v in same.values())
    record["loss_spread"] = None if not finite else max(same.values()) - min(same.values()) if same else 0.0
    tolerance = 1e-4 if c.dtype == "float32" and {a.logits_dtype for a in chosen.values()} == {"float32"} else 2e-2
    agree = finite and record["loss_spread"] <= tolerance * max(1.0, *(abs(v) for v in same.values()), 1.0)
    ran = all(_may_lack(row) is not False for row in rows.values())
    met = all(g["ok"] for g in record["gates"].values())
    record["passed"] = record.get("verify", {"passed": True})["passed"] and agree and ran and met


def _no_worse(name: str) -> dict[str, tuple[str, str, str, float]]:
    """Bars for an arm whose twin from another checkout runs in the same case."""
    return {
        f"{name}: time / other tree": ("time", name, twin(name), NO_SLOWER),
        f"{name}: memory / other tree": ("memory", name, twin(name), 1.0),
    }


def _may_lack(row: dict[str, Any]) -> bool | None:
    """Whether a row has an error that is no failure; ``None`` if it has none."""
    return row["error"].startswith((OUT_OF_MEMORY, NOT_HERE)) if "error" in row else None


def least_work(c: BenchConfig, live: int) -> tuple[float, float]:
    """``(FLOPs, bytes)`` that no exact loss with gradients can do without; the same for every arm.

    Head: three matmuls over live tokens; hidden states and head read, their gradients written; a teacher's are one
    matmul more, and are read. Logits: read and dlogits written.
    """
    item = 4 if c.dtype == "float32" else 2
    if c.level == "logits":
        return 0.0, 2.0 * c.tokens * c.vocab * item
    teacher = 2.0 * live * c.teacher * c.vocab, 1.0 * (c.tokens + c.vocab) * c.teacher * item
    return 6.0 * live * c.hidden * c.vocab + teacher[0], 2.0 * (c.tokens + c.vocab) * c.hidden * item + teacher[1]


def _summarise(c: BenchConfig, part: dict[str, Any]) -> dict[str, Any]:
    if "error" in part:
        return dict(error=part["error"])
    took = part["turns"]
    known = [k for k in timing.CLOCKS if all(k in turn for turn in took)]
    clock = known[0]
    row: dict[str, Any] = timing.summary([t for turn in took for t in turn[clock]])
    row["clock"] = clock
    row["rounds"] = {
        k: [statistics.median(turn[k]) if isinstance(turn[k], list) else turn[k] for turn in took] for k in known
    }
    row |= {k: statistics.median(v) for k, v in row["rounds"].items()}
    row["ratios"] = {}
    row["bench/step_s_mean"] = row["mean_ms"] / 1e3
    seconds = row["median_ms"] / 1e3
    flops, moved = least_work(c, part["live"])
    row["live_tokens"] = part["live"]
    row["tflops"] = flops / seconds / 1e12
    row["gb_per_s"] = moved / seconds / 1e9
    chip = chip_of_kind(part["environment"]["device"])
    row["roofline_ms"] = row["roofline_ratio"] = None
    if chip is not None and c.dtype == "bfloat16":  # the table's FLOP/s are for bfloat16
        row["roofline_ms"] = roofline_seconds(chip, flops, moved) * 1e3
        row["roofline_ratio"] = row["median_ms"] / row["roofline_ms"]
    row["mem/compiler"] = part["compiler"]
    row["mem/device"] = part.get("device")
    row["mem/peak_bytes_in_use_max"] = (part.get("device") or {}).get("peak")
    if "kernels" in took[-1]:
        row["kernels"] = took[-1]["kernels"]
    kept = ("loss", "compile_s", "grad_norms", "rows", "entropy", "environment", *SPARSE_METRICS)
    return row | {k: part[k] for k in kept if k in part}
