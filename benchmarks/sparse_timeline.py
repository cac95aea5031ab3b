"""What a call with the sparse backward does on a Hopper GPU: kernels by a timeline, beside its own forward matmul.

    python benchmarks/sparse_timeline.py [--inputs on_policy,realistic] [--calls N] [--out FILE]

``value_and_grad(linear_grpo_loss(..., sparse_backward="auto"))`` at T=8192 H=4096 V=151936, profiled for a few calls.
Of each call: from its first kernel to its last (``ms``), the sum of its kernels (``busy_ms``), the longest of them,
which is the forward matmul with its statistics and bits (``forward_ms``), and how many there are. Medians over the
calls. ``over_forward`` is ``busy_ms`` over ``forward_ms``: what all gradients cost, in matmuls. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

CASE = dict(level="head", tokens=8192, hidden=4096, vocab=151936, dtype="bfloat16", states="", seed=0)
BATCH = dict(batch_kind="uniform", rows=8, live=1.0, moving=1.0)
PAUSE = 3e6  # nanoseconds without a kernel that set two calls apart: the host waits between them


def kernels(folder: Path) -> list[tuple[float, float]]:
    """``(start, nanoseconds)`` of every kernel and copy on the device's busiest line, in order."""
    from jax.profiler import ProfileData

    (file,) = folder.glob("**/*.xplane.pb")
    lines = [line for plane in ProfileData.from_file(str(file)).planes if "GPU" in plane.name for line in plane.lines]
    events = [sorted((e.start_ns, e.duration_ns) for e in line.events) for line in lines if "Stream" in line.name]
    return max(events, key=lambda line: sum(d for _, d in line))


def calls_of(line: list[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """The kernels of each call."""
    calls: list[list[tuple[float, float]]] = [[line[0]]]
    for before, event in itertools.pairwise(line):
        if event[0] - sum(before) > PAUSE:
            calls.append([])
        calls[-1].append(event)
    return calls


def measured(inputs: str, calls: int) -> dict[str, Any]:
    import time

    import jax

    import logitless
    from logitless.lab.bench.case_arrays import Data

    x, rest = Data().of({**CASE, **BATCH, "inputs": inputs}, {})
    how: dict[str, Any] = dict(objective=logitless.Objective.dapo(), options=logitless.Options(sparse_backward="auto"))

    def loss(x: Any, rest: Any) -> Any:
        return logitless.linear_grpo_loss(x[0], logitless.Head(x[1], layout="vh"), **rest, **how)[0]

    call = jax.jit(jax.value_and_grad(loss))
    for _ in range(3):
        jax.block_until_ready(call(x, rest))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(call(x, rest))
                time.sleep(0.02)
        found = calls_of(kernels(Path(folder)))
    if len(found) != calls:
        raise SystemExit(f"{calls} calls were made, and the timeline shows {len(found)}: nothing is recorded.")

    def median(of: Any) -> float:
        return round(statistics.median(of(c) for c in found) / 1e6, 3)

    busy, forward = median(lambda c: sum(d for _, d in c)), median(lambda c: max(d for _, d in c))
    whole = median(lambda c: sum(c[-1]) - c[0][0])
    over = round(statistics.median(sum(d for _, d in c) / max(d for _, d in c) for c in found), 3)
    count = int(statistics.median(len(c) for c in found))
    return dict(inputs=inputs, ms=whole, busy_ms=busy, forward_ms=forward, over_forward=over, kernels=count)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--inputs", default="on_policy,realistic")
    p.add_argument("--calls", type=int, default=9)
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    import jax

    if jax.default_backend() != "gpu":
        print(f"sparse_timeline: this is a {jax.default_backend()}; a timeline needs a Hopper GPU.", file=sys.stderr)
        return 2
    rows = []
    for name in a.inputs.split(","):
        rows.append(measured(name, a.calls))
        print(rows[-1], flush=True)
    device = jax.devices()[0].device_kind
    record = dict(command="python benchmarks/sparse_timeline.py", device=device, jax=jax.__version__, rows=rows, **CASE)
    if a.out:
        a.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
