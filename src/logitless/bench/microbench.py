"""``logitless bench``: the same loss with and without the kernels, each arm in a fresh process, verified before timed.

For each arm: device time (median, mean, p10, p90, spread), achieved TFLOP/s and GB/s, the ratio to the roofline, and
the allocator's peak where the device has one as well as the compiler's plan, both split into inputs, outputs and
temporaries. ``rounds`` runs the arms in turn, so that a drift of the machine hits all of them.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from logitless.bench import gradcheck
from logitless.head.sparse_report import SPARSE_METRICS
from logitless.planning.chips import chip_of_kind, roofline_seconds
from logitless.tools import child, records, timing
from logitless.tools.child import OUT_OF_MEMORY
from logitless.tools.config import ConfigError, sparse_backward_of
from logitless.tools.shapes import MODELS

NO_LIMIT = 1e9  # a number, since JSON has no infinity
BASELINES = {"logits": ("naive", "strong", "gather"), "head": ("naive", "strong", "checkpointed")}


@dataclasses.dataclass
class Kernel:
    """The A/B switch."""

    enabled: bool = True
    backend: str = ""  # empty: the best one here
    bwd_impl: str = "pallas"  # pallas | jax (logits level)
    sparse_backward: Any = "off"  # off | auto | a mass (head level): an arm of its own beside the exact one


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
    inputs: str = "flat"  # flat | realistic (head level): the hidden states and head of a trained policy's kind
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
    if c.inputs not in ("flat", "realistic"):
        raise ConfigError(f"inputs: {c.inputs!r}, expected flat or realistic")
    c.kernel.sparse_backward = sparse_backward_of("kernel.sparse_backward", c.kernel.sparse_backward)
    if c.level == "logits" and (c.inputs == "realistic" or c.kernel.sparse_backward != "off"):
        raise ConfigError("level: logits, but inputs=realistic and kernel.sparse_backward are for level=head")
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
        if c.kernel.sparse_backward != "off":
            out[f"{name}, sparse backward"] = {**out[name], "sparse_backward": c.kernel.sparse_backward}
    return out


def _verify(c: BenchConfig) -> dict[str, Any]:
    """The kernel's arms at a small shape against the reference and float64, each in a fresh process."""
    exact = _gradcheck(c)
    if c.kernel.sparse_backward == "off":
        return exact
    # A mass of one's own is no part of the contract: then only the mass itself is a gate, beside the loss.
    auto = c.kernel.sparse_backward == "auto"
    limits = {} if auto else dict(contract=NO_LIMIT, max_rel_diff_grad=NO_LIMIT)
    options = dict(inputs="realistic", sparse_backward=c.kernel.sparse_backward, tokens=64, vocab=4096, **limits)
    sparse = _gradcheck(c, **options)
    gates = {**exact["gates"], **{f"sparse: {k}": v for k, v in sparse["gates"].items()}}
    errors = [v["error"] for v in (exact, sparse) if "error" in v]
    return dict(passed=exact["passed"] and sparse["passed"], gates=gates, **({"error": errors[0]} if errors else {}))


def _gradcheck(c: BenchConfig, **options: Any) -> dict[str, Any]:
    small = gradcheck.GradcheckConfig(
        name=f"verify {c.name}",
        level=c.level,
        backend=c.kernel.backend or "auto",
        bwd_impl=c.kernel.bwd_impl,
        objective=dict(c.objective),
        dtype=c.dtype,
        logits_dtype=c.logits_dtype,
        **{"batch": 2, "tokens": 24, "hidden": 128, "vocab": 1024, **options},
    )
    found = child.ask("logitless.bench.arm", dict(gradcheck=dataclasses.asdict(small)), c.timeout_s)
    if "error" in found:
        return dict(passed=False, gates={}, error=found["error"])
    return dict(passed=found["passed"], gates=found["gates"])


def _run_arm(c: BenchConfig, arm: dict[str, Any]) -> dict[str, Any]:
    """The arm's measurements. Where compiling had taken more memory than the loss needs (a GPU's autotuner tries its
    candidates on the device), the compiled program runs again in a process that compiles nothing, for the peak alone.
    """
    job = {**dataclasses.asdict(c), "arm": arm}
    with tempfile.TemporaryDirectory(prefix="logitless-bench-") as cache:
        kept = {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        found = child.ask("logitless.bench.arm", job, c.timeout_s, kept)
        if (found.get("device") or {}).get("from_compile"):
            again = child.ask("logitless.bench.arm", {**job, "peak_only": True}, c.timeout_s, kept)
            found["device"] = again.get("device") or found["device"]
    return found


def least_work(c: BenchConfig, live: int) -> tuple[float, float]:
    """``(FLOPs, bytes)`` that no exact loss with gradients can do without; the same for every arm.

    Head: three matmuls over live tokens; hidden states and head read, their gradients written. Logits: read and
    dlogits written.
    """
    item = 4 if c.dtype == "float32" else 2
    if c.level == "logits":
        return 0.0, 2.0 * c.tokens * c.vocab * item
    return 6.0 * live * c.hidden * c.vocab, 2.0 * (c.tokens + c.vocab) * c.hidden * item


def _summarise(c: BenchConfig, parts: list[dict[str, Any]]) -> dict[str, Any]:
    bad = [p for p in parts if "error" in p]
    if bad:
        return bad[0]
    times = [t for p in parts for t in p["times_ms"]]
    row: dict[str, Any] = timing.summary(times)
    row["bench/step_s_mean"] = row["mean_ms"] / 1e3
    seconds = row["median_ms"] / 1e3
    first = parts[0]
    flops, moved = least_work(c, first["live"])
    row["live_tokens"] = first["live"]
    row["tflops"] = flops / seconds / 1e12
    row["gb_per_s"] = moved / seconds / 1e9
    chip = chip_of_kind(first["environment"]["device"])
    row["roofline_ms"] = row["roofline_ratio"] = None
    if chip is not None and c.dtype == "bfloat16":  # the table's FLOP/s are those of bfloat16
        row["roofline_ms"] = roofline_seconds(chip, flops, moved) * 1e3
        row["roofline_ratio"] = row["median_ms"] / row["roofline_ms"]
    row["mem/compiler"] = first["compiler"]
    row["mem/device"] = first["device"]
    row["mem/peak_bytes_in_use_max"] = max(((p["device"] or {}).get("peak", 0)) for p in parts) or None
    row.update({k: v for k, v in first.items() if k in SPARSE_METRICS})
    row["loss"], row["grad_norms"], row["environment"] = first["loss"], first["grad_norms"], first["environment"]
    return row


Verified = dict[tuple[Any, ...], dict[str, Any]]
"""Verifications of a suite, so that no two cases repeat the same one."""


def run(
    c: BenchConfig, say: Callable[[str], None] = lambda _: None, verified: Verified | None = None
) -> dict[str, Any]:
    """All arms of one configuration; ``passed`` is false if the verification fails, the arms' losses disagree, or an
    arm failed for another reason than memory."""
    check(c)
    record: dict[str, Any] = dict(kind="bench", name=c.name, config=dataclasses.asdict(c), arms={})
    if c.verify and c.kernel.enabled:
        verified = {} if verified is None else verified
        sparse = c.kernel.sparse_backward
        key = (c.level, c.kernel.backend, c.kernel.bwd_impl, c.dtype, c.logits_dtype, repr(c.objective), sparse)
        if key not in verified:
            say("verifying at a small shape")
            verified[key] = _verify(c)
        record["verify"] = verified[key]
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
    agree = spread <= tolerance * max(1.0, *(abs(v) for v in losses), 1.0)
    ran = all(row.get("error", OUT_OF_MEMORY).startswith(OUT_OF_MEMORY) for row in record["arms"].values())
    record["passed"] = record.get("verify", {"passed": True})["passed"] and agree and ran
    return record


def table(record: dict[str, Any]) -> str:
    """The arms of a record as text."""
    lines = [f"{record['name']}: {record['config']['tokens']} tokens, vocabulary {record['config']['vocab']}"]
    for name, row in record["arms"].items():
        if "error" in row:
            lines.append(f"  {name:24s} {row['error']}")
            continue
        memory = row["mem/compiler"]
        roofline = f"  {row['roofline_ratio']:.2f}x roofline" if row.get("roofline_ratio") else ""
        lines.append(
            f"  {name:24s} {row['median_ms']:10.2f} ms  [{row['p10_ms']:.2f}, {row['p90_ms']:.2f}]"
            f"  temporaries {memory['temporaries'] / 2**20:9.1f} MiB{roofline}"
        )
    return "\n".join(lines)


def compare(a: Path, b: Path) -> str:
    """Ratios of two result files (JSON lines, or a suite's JSON), arm by arm: B over A."""

    def read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
        try:
            found = [r for r in records.read(path) if records.kind_of(r) == "bench"]
        except records.RecordError as error:
            raise ConfigError(str(error)) from None
        if not found:
            raise ConfigError(f"{path}: no benchmark results in it")
        return {(r["name"], arm): row for r in found for arm, row in r["arms"].items()}

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
