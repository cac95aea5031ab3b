"""``logitless bench --suite NAME``: the lot, into one JSON file.

The file is rewritten after every case, so a stopped suite keeps its finished cases. A case that runs out of memory is
recorded and ends nothing. No case needs a configuration file.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from logitless.lab.bench import gpu_suites, microbench, turns
from logitless.lab.bench.case import BenchConfig, Kernel
from logitless.lab.bench.gpu_suites import BF16, Case
from logitless.lab.bench.gradcheck_config import GradcheckConfig
from logitless.lab.tools.command_config import ConfigError
from logitless.train.files import replace

F32: dict[str, Any] = dict(dtype="bfloat16", logits_dtype="float32", head_grad_dtype="param")
LINEAR: dict[str, Any] = dict(level="head", tokens=8192, rows=8, hidden=4096, vocab=151936)
LOGITS: dict[str, Any] = dict(level="logits", tokens=4096, rows=1, vocab=151936, dtype="bfloat16")
SMALL: dict[str, Any] = dict(
    level="head", tokens=512, rows=4, hidden=64, vocab=32768, dtype="float32", repeats=2, rounds=5
)
PACKED: dict[str, Any] = dict(batch_kind="uniform", tokens=9065, rows=1, moving=0.67)
"""The live tokens of the RL batch (seed 0) without prompts and padding, as a packed dense loss would have them."""
LONG: dict[str, Any] = dict(level="head", rows=1, model="qwen2.5-1.5b", baselines=["strong"], **F32)


def suites() -> dict[str, list[Case]]:
    """The cases of each suite: ``h200`` and ``gpu-*`` are for one H200, ``cpu`` for two cores and three minutes."""
    case = BenchConfig
    return {
        "cpu": [
            case("head", **SMALL),
            case("head, 3/4 masked", **{**SMALL, "live": 0.25}, baselines=["strong"]),
            case("head, 4x the tokens", **{**SMALL, "tokens": 2048}, baselines=["strong"]),
            case("head, RL batch", **{**SMALL, "rows": 16}, batch_kind="rl", baselines=["strong"]),
            case("distillation", **SMALL, teacher=96, distillation=dict(divergence="reverse_kl")),
            case("logits", level="logits", tokens=256, rows=4, vocab=8192, dtype="float32", rounds=5),
        ],
        "h200": [
            case("logits T=4096 V=151936", **LOGITS),
            case("logits T=4096 V=151936, jaxbwd", **LOGITS, baselines=[], kernel=Kernel(bwd_impl="jax")),
            case("T=8192 H=4096 V=151936", **LINEAR, **BF16),
            case("T=8192 H=4096 V=151936, f32logits", **LINEAR, **F32),
            case("T=8192 H=4096 V=151936, half live", **LINEAR, **BF16, live=0.5, baselines=["strong"]),
            case("T=8192 H=4096 V=151936, a quarter", **LINEAR, **BF16, live=0.25, baselines=["strong"]),
            case("T=8192 H=4096 V=151936, sparse", **LINEAR, **BF16, inputs="realistic",
                 baselines=["strong"], kernel=Kernel(sparse_backward="auto")),
            case("qwen2.5-7b, RL batch", level="head", model="qwen2.5-7b", tokens=24576, rows=24, batch_kind="rl",
                 baselines=["strong", "strong/f32"], arms={
                     "packed/f32": dict(of="strong/f32", batch=PACKED),
                     "default, to packed": dict(of="default", against="packed/f32"),
                 }, **BF16),
            case("qwen2.5-1.5b, 32k context", tokens=32768, **LONG),
            case("qwen2.5-1.5b, 128k context", tokens=131072, **LONG),
        ],
        "gpu-head": gpu_suites.gpu_head(),
        "gpu-sparse": gpu_suites.gpu_sparse(),
        "gpu-distill": gpu_suites.gpu_distill(),
        "gpu-logits": gpu_suites.gpu_logits(),
    }  # fmt: skip


NUMBERS = ("rounds", "repeats", "warmup", "timeout_s", "seed", "check_rows")
SWITCHES = ("verify", "peaks")
TEXTS = ("states",)


def overridden(case: Case, overrides: Sequence[str]) -> Case:
    """The case with ``rounds=3``, ``peaks=true``, ... for all of a suite; read without omegaconf."""
    case = copy.deepcopy(case)
    for item in overrides:
        key, sign, text = item.partition("=")
        known = (*NUMBERS, *SWITCHES, *TEXTS)
        if not sign or key not in known:
            raise ConfigError(f"{item!r}: with --suite, expected one of {', '.join(known)} as key=value")
        if key in SWITCHES and text not in ("true", "false"):
            raise ConfigError(f"{item!r}: expected true or false")
        if key in NUMBERS and not text.isdigit():
            raise ConfigError(f"{item!r}: expected a whole number")
        if key in TEXTS:
            if getattr(case, "inputs", "") == "real":
                setattr(case, key, text)
        elif hasattr(case, key):
            setattr(case, key, text == "true" if key in SWITCHES else int(text))
    return case


def chosen(name: str, only: str, overrides: Sequence[str] = ()) -> list[Case]:
    """The cases of a suite whose names contain ``only``, or a text from its comma-separated list."""
    known = suites()
    if name not in known:
        raise ConfigError(f"suite {name!r} is not known; expected one of {', '.join(known)}")
    texts = [only] if any(only in c.name for c in known[name]) else only.split(",")  # names may have commas
    cases = [overridden(c, overrides) for c in known[name] if any(text in c.name for text in texts)]
    real = [c for c in cases if isinstance(c, BenchConfig) and c.inputs == "real" and not c.states]
    if real == cases and cases:
        raise ConfigError(f"{cases[0].name}: give states=FILE.npz, a model's own states, head and targets")
    cases = [c for c in cases if c not in real]
    if not cases:
        raise ConfigError(
            f"suite {name!r} has no case with {only!r} in its name: {', '.join(c.name for c in known[name])}"
        )
    return cases


def stages(name: str, only: str, overrides: Sequence[str], how: microbench.How) -> int:
    """How many parts of the work :func:`run` names, at most."""
    cases = chosen(name, only, overrides)
    return sum(1 + (0 if isinstance(c, GradcheckConfig) else microbench.stages(c, how)) for c in cases)


def run(
    name: str,
    out: Path,
    say: Callable[[str], None],
    show: Callable[[dict[str, Any]], None],
    only: str = "",
    overrides: Sequence[str] = (),
    how: microbench.How | None = None,
) -> dict[str, Any]:
    """Run a suite's cases and write ``out``."""
    cases = chosen(name, only, overrides)
    result: dict[str, Any] = dict(kind="bench_suite", suite=name, passed=True, records=[])
    how = how or microbench.How()
    start = time.monotonic()
    replace(out, json.dumps(result, indent=1) + "\n")  # an unwritable file costs no benchmark
    for i, c in enumerate(cases, 1):
        say(f"case {i}/{len(cases)}: {c.name} ({time.monotonic() - start:.0f} s so far)")
        try:
            record = _check(c) if isinstance(c, GradcheckConfig) else microbench.run(c, say, how)
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
        replace(out, json.dumps(result, indent=1) + "\n")
        show(record)
    return result


def _check(c: GradcheckConfig) -> dict[str, Any]:
    """A suite's gradcheck, in a separate process: this process stays off the device."""
    with turns.open_worker() as worker:
        found = worker.ask(dict(do="gradcheck", config=dataclasses.asdict(c)), c.timeout_s)
    if "error" in found:
        raise ConfigError(found["error"])
    return found
