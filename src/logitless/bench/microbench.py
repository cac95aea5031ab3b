"""``logitless bench``: the same loss with and without the kernels, each arm in a fresh process, verified before timed.

For each arm: device time (median, mean, p10, p90, spread), achieved TFLOP/s and GB/s, the allocator's peak where the
device has one, and the compiler's plan split into arguments, outputs and temporaries. ``rounds`` runs the arms in turn,
so that a drift of the machine hits all of them.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from logitless.bench import gradcheck, timing
from logitless.bench.config import ConfigError
from logitless.bench.shapes import MODELS

BASELINES = {"logits": ("naive", "strong", "gather"), "head": ("naive", "strong", "checkpointed")}


@dataclasses.dataclass
class Kernel:
    """The A/B switch."""

    enabled: bool = True
    backend: str = ""  # empty: the best one here
    bwd_impl: str = "pallas"  # pallas | jax (logits level)


@dataclasses.dataclass
class BenchConfig:
    """Keys of a benchmark configuration."""

    name: str = "bench"
    level: str = "head"  # logits | head
    kernel: Kernel = dataclasses.field(default_factory=Kernel)
    baselines: list[str] = dataclasses.field(default_factory=lambda: ["naive", "strong"])
    model: str = ""  # a name of the shape table, in place of hidden and vocab
    tokens: int = 1024
    hidden: int = 256
    vocab: int = 32000
    rows: int = 8
    batch_kind: str = "uniform"  # uniform | rl
    live: float = 1.0
    dtype: str = "bfloat16"
    logits_dtype: str = "float32"
    head_grad_dtype: str = "float32"
    objective: dict[str, Any] = dataclasses.field(default_factory=lambda: {"aggregation": "dapo"})
    seed: int = 0
    verify: bool = True
    warmup: int = 2
    repeats: int = 5
    rounds: int = 1
    timeout_s: int = 600
    out: str = "runs/bench.jsonl"
    wandb_mode: str = "disabled"
    wandb_project: str = "logitless"


def check(c: BenchConfig) -> None:
    """Refuse by name what cannot be run."""
    if c.level not in BASELINES:
        raise ConfigError(f"level: {c.level!r}, expected logits or head")
    for b in c.baselines:
        if b not in BASELINES[c.level]:
            raise ConfigError(f"baselines: {b!r}, expected some of {', '.join(BASELINES[c.level])}")
    if c.model:
        if c.model not in MODELS:
            raise ConfigError(f"model: {c.model!r}, expected one of {', '.join(MODELS)}")
        c.hidden, c.vocab = MODELS[c.model].hidden, MODELS[c.model].vocab
    if c.batch_kind not in ("uniform", "rl"):
        raise ConfigError(f"batch_kind: {c.batch_kind!r}, expected uniform or rl")
    if c.tokens % c.rows:
        raise ConfigError(f"tokens: {c.tokens} do not split into {c.rows} rows")
    if not c.kernel.enabled and not c.baselines:
        raise ConfigError("kernel.enabled is false and there are no baselines: nothing to run")


def arms(c: BenchConfig) -> dict[str, dict[str, Any]]:
    """The arms by name."""
    out: dict[str, dict[str, Any]] = {b: dict(kernel=False, baseline=b) for b in c.baselines}
    if c.kernel.enabled:
        name = "kernel" if c.kernel.bwd_impl == "pallas" else "kernel (jax backward)"
        out[name] = dict(kernel=True, backend=c.kernel.backend, bwd_impl=c.kernel.bwd_impl)
    return out


def _verify(c: BenchConfig) -> dict[str, Any]:
    """The kernel arm at a small shape against the reference and float64; see ``gradcheck``."""
    small = gradcheck.GradcheckConfig(
        name=f"verify {c.name}",
        level=c.level,
        backend=c.kernel.backend or "chunked",
        bwd_impl=c.kernel.bwd_impl,
        objective=dict(c.objective),
        dtype=c.dtype,
        logits_dtype=c.logits_dtype,
        batch=2,
        tokens=24,
        hidden=128,
        vocab=1024,
    )
    record = gradcheck.run(small)
    return dict(passed=record["passed"], gates=record["gates"])


def _run_arm(c: BenchConfig, arm: dict[str, Any]) -> dict[str, Any]:
    job = json.dumps({**dataclasses.asdict(c), "arm": arm})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "logitless.bench.arm", job],
            capture_output=True,
            text=True,
            timeout=c.timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return dict(error=f"stopped after {c.timeout_s} s")
    lines = done.stdout.strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        # Killed by the system, most often for memory.
        tail = done.stderr.strip().splitlines()[-3:]
        what = (
            "out of memory (killed)" if done.returncode in (-9, 137) else f"exit {done.returncode}: {' | '.join(tail)}"
        )
        return dict(error=what)


def _matmuls(c: BenchConfig) -> int:
    """Matmuls of an exact dense gradient; what TFLOP/s are counted against, for every arm."""
    return 3 if c.level == "head" else 0


def _summarise(c: BenchConfig, parts: list[dict[str, Any]]) -> dict[str, Any]:
    bad = [p for p in parts if "error" in p]
    if bad:
        return bad[0]
    times = [t for p in parts for t in p["times_ms"]]
    row: dict[str, Any] = timing.summary(times)
    row["bench/step_s_mean"] = row["mean_ms"] / 1e3
    seconds = row["median_ms"] / 1e3
    first = parts[0]
    row["tflops"] = 2 * _matmuls(c) * first["live"] * c.hidden * c.vocab / seconds / 1e12
    if c.level == "logits":
        item = 4 if c.dtype == "float32" else 2
        row["gb_per_s"] = 2 * c.tokens * c.vocab * item / seconds / 1e9
    row["mem/compiler"] = first["compiler"]
    row["mem/peak_bytes_in_use_max"] = max((p["peak_bytes_in_use"] or 0) for p in parts) or None
    row["loss"], row["grad_norms"], row["environment"] = first["loss"], first["grad_norms"], first["environment"]
    return row


def run(c: BenchConfig, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """All arms of one configuration; ``passed`` is false if the verification fails or the arms' losses disagree."""
    check(c)
    record: dict[str, Any] = dict(name=c.name, config=dataclasses.asdict(c), arms={})
    if c.verify and c.kernel.enabled:
        say("verifying at a small shape")
        record["verify"] = _verify(c)
    parts: dict[str, list[dict[str, Any]]] = {name: [] for name in arms(c)}
    for i in range(c.rounds):
        for name, arm in arms(c).items():
            say(f"round {i + 1}/{c.rounds}: {name}")
            parts[name].append(_run_arm(c, arm))
    record["arms"] = {name: _summarise(c, p) for name, p in parts.items()}
    good = {k: v for k, v in record["arms"].items() if "error" not in v}
    losses = [v["loss"] for v in good.values()]
    spread = max(losses) - min(losses) if losses else 0.0
    record["loss_spread"] = spread
    tolerance = 2e-2 if c.dtype != "float32" or c.logits_dtype != "float32" else 1e-4
    record["passed"] = record.get("verify", {"passed": True})["passed"] and spread <= tolerance * max(
        1.0, *(abs(v) for v in losses), 1.0
    )
    return record


def table(record: dict[str, Any]) -> str:
    """The arms of a record as text."""
    lines = [f"{record['name']}: {record['config']['tokens']} tokens, vocabulary {record['config']['vocab']}"]
    for name, row in record["arms"].items():
        if "error" in row:
            lines.append(f"  {name:24s} {row['error']}")
            continue
        memory = row["mem/compiler"]
        lines.append(
            f"  {name:24s} {row['median_ms']:10.2f} ms  [{row['p10_ms']:.2f}, {row['p90_ms']:.2f}]"
            f"  temporaries {memory['temporaries'] / 2**20:9.1f} MiB"
        )
    return "\n".join(lines)


def compare(a: Path, b: Path) -> str:
    """Ratios of two result files (JSON lines), arm by arm: B over A."""

    def read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
        try:
            records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
            return {(r["name"], arm): row for r in records for arm, row in r["arms"].items()}
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file") from None
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: not a benchmark result ({error})") from None

    left, right = read(a), read(b)
    lines = [f"{'case':44s}{'time B/A':>10s}{'temporaries B/A':>18s}"]
    for key in left:
        if key not in right:
            lines.append(f"{' / '.join(key):44s}   only in A")
            continue
        x, y = left[key], right[key]
        if "error" in x or "error" in y:
            lines.append(f"{' / '.join(key):44s}   {x.get('error', 'ok')} -> {y.get('error', 'ok')}")
            continue
        ratio = y["median_ms"] / x["median_ms"]
        ta, tb = x["mem/compiler"]["temporaries"], y["mem/compiler"]["temporaries"]
        memory = f"{tb / ta:.3f}" if ta else "-"
        lines.append(f"{' / '.join(key):44s}{ratio:10.3f}{memory:>18s}")
    lines += [f"{' / '.join(key):44s}   only in B" for key in right if key not in left]
    return "\n".join(lines)
