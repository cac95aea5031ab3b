"""``logitless bench --suite NAME``: the lot, into one JSON file.

The file is written anew after every case, so that a suite which is stopped leaves what it had. A case that runs out of
memory is recorded and ends nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from logitless.bench import microbench
from logitless.bench.microbench import BenchConfig, Kernel
from logitless.tools.config import ConfigError

BF16 = dict(dtype="bfloat16", logits_dtype="bfloat16", head_grad_dtype="param")
F32 = dict(dtype="bfloat16", logits_dtype="float32", head_grad_dtype="param")
LINEAR = dict(level="head", tokens=8192, rows=8, hidden=4096, vocab=151936)
LOGITS = dict(level="logits", tokens=4096, rows=1, vocab=151936, dtype="bfloat16")
SMALL = dict(level="head", tokens=512, rows=4, hidden=64, vocab=32768, dtype="float32", repeats=3, warmup=1)
LONG = dict(level="head", rows=1, model="qwen2.5-1.5b", baselines=["strong"], **F32)


def _case(name: str, **fields: Any) -> BenchConfig:
    return BenchConfig(name=name, **fields)


def suites() -> dict[str, list[BenchConfig]]:
    """The cases of each suite. ``h200`` is made for one GPU and about five minutes, ``cpu`` for two cores and two."""
    return {
        "cpu": [
            _case("head", **SMALL),
            _case("head, 3/4 masked", **{**SMALL, "live": 0.25}, baselines=["strong"]),
            _case("head, 4x the tokens", **{**SMALL, "tokens": 2048}, baselines=["strong"]),
            _case("head, RL batch", **{**SMALL, "rows": 16}, batch_kind="rl", baselines=["strong"]),
            _case("logits", level="logits", tokens=256, rows=4, vocab=8192, dtype="float32", repeats=3, warmup=1),
        ],
        "h200": [
            _case("logits_bpd1_t4096_vocab151936", **LOGITS),
            _case("logits_bpd1_t4096_vocab151936_jaxbwd", **LOGITS, baselines=[], kernel=Kernel(bwd_impl="jax")),
            _case("linear_bpd1_t8192_h4096_vocab151936", **LINEAR, **BF16),
            _case("linear_bpd1_t8192_h4096_vocab151936_f32logits", **LINEAR, **F32, baselines=["strong"]),
            _case("linear_bpd1_t8192_h4096_vocab151936, half live", **LINEAR, **BF16, live=0.5, baselines=[]),
            _case("linear_bpd1_t8192_h4096_vocab151936, a quarter", **LINEAR, **BF16, live=0.25, baselines=["strong"]),
            _case("qwen2.5-7b, RL batch", level="head", model="qwen2.5-7b", tokens=24576, rows=24, batch_kind="rl",
                  baselines=["strong"], **BF16),
            _case("qwen2.5-1.5b, 32k context", tokens=32768, **LONG),
            _case("qwen2.5-1.5b, 128k context", tokens=131072, **LONG),
        ],
    }  # fmt: skip


def run(
    name: str, out: Path, say: Callable[[str], None], show: Callable[[dict[str, Any]], None], only: str = ""
) -> dict[str, Any]:
    """Run a suite's cases (those whose name has ``only`` in it) and write ``out``."""
    known = suites()
    if name not in known:
        raise ConfigError(f"suite {name!r} is not known; expected one of {', '.join(known)}")
    cases = [c for c in known[name] if only in c.name]
    if not cases:
        raise ConfigError(
            f"suite {name!r} has no case with {only!r} in its name: {', '.join(c.name for c in known[name])}"
        )
    result: dict[str, Any] = dict(kind="bench_suite", suite=name, passed=True, records=[])
    verified: microbench.Verified = {}
    start = time.monotonic()
    for i, c in enumerate(cases, 1):
        say(f"case {i}/{len(cases)}: {c.name} ({time.monotonic() - start:.0f} s so far)")
        try:
            record = microbench.run(c, say, verified)
        except ConfigError as error:
            record = dict(
                kind="bench",
                name=c.name,
                config=dataclasses.asdict(c),
                arms={"all": {"error": str(error)}},
                passed=False,
            )
        result["records"].append(record)
        result["passed"] = result["passed"] and record["passed"]
        result["seconds"] = time.monotonic() - start
        _replace(out, result)
        show(record)
    return result


def _replace(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(part, path)
