"""Records of every kind whose numbers are all different, so that each can be looked for under its own name."""

from __future__ import annotations

from typing import Any

MIB = 2**20


def bench_row(k: float, **more: Any) -> dict[str, Any]:
    """A row whose every number is another one, times ``k``."""
    device = dict(peak=0, inputs=11 * k * MIB, outputs=22 * k * MIB, temporaries=44 * k * MIB, from_compile=False)
    return {
        "median_ms": 3.21 * k, "p10_ms": 2.98 * k, "p90_ms": 4.56 * k, "clock": "device_ms", "device_ms": 3.21 * k,
        "wall_ms": 5.67 * k, "back_to_back_ms": 6.78 * k, "tflops": 7.77 * k, "gb_per_s": 888.0 * k,
        "roofline_ms": 1.5, "roofline_ratio": 2.14 * k, "mem/device": device, "ratios": {},
        "mem/compiler": dict(arguments=10 * k * MIB, outputs=20 * k * MIB, temporaries=33 * k * MIB, peak=0),
        "environment": {"device": "chip", "jax": "0"}, **more,
    }  # fmt: skip


def bench_record(name: str = "case", **more: Any) -> dict[str, Any]:
    ratio = dict(ratio=0.5, low=0.45, high=0.55, verdict="faster")
    wall = dict(ratio=0.98, low=0.9, high=1.07, verdict="no difference")
    arms = {
        "strong": bench_row(1.0),
        "default": bench_row(2.0, ratios={"strong": {"device_ms": ratio, "wall_ms": wall}}),
        "naive": {"error": "out of memory"},
    }
    config = dict(name=name, level="head", tokens=64, vocab=32, hidden=8, dtype="float32", live=1.0)
    gates = {
        "time / strong": dict(value=0.81, low=0.8, high=0.82, limit=0.7, state="missed", ok=False),
        "memory / strong": dict(value=0.3, low=None, high=None, limit=0.4, state="met", ok=True),
        "time / naive": dict(value=0.9, low=0.7, high=1.1, limit=1.0, state="undecided", ok=True),
    }
    verify = dict(passed=True, gates={})
    return dict(kind="bench", name=name, config=config, arms=arms, passed=False, gates=gates, verify=verify) | more


def gradcheck_record() -> dict[str, Any]:
    gates = {"loss": dict(value=0.25, limit=0.5, ok=True), "dhidden difference": dict(value=3.0, limit=2.0, ok=False)}
    return {"config/name": "check", "gates": gates, "passed": False, "device": "chip", "jax": "0"}


def plan_record() -> dict[str, Any]:
    plan = dict(
        backend="chunked", matmuls=4, flops=5e12, dense_flops=6e12, peak=7 * MIB, dense_peak=8 * MIB,
        temporaries=9 * MIB, dense_temporaries=12 * MIB, seconds=0.013, dense_seconds=0.014,
    )  # fmt: skip
    contexts = [dict(tokens=t, peak=t * MIB, dense_peak=5 * t * MIB) for t in (16, 32)]
    config = dict(model="m", chip="c", tokens=16, hidden=1, vocab=2)
    longest = dict(fused=900, dense=100)
    return dict(kind="plan", config=config, plan=plan, contexts=contexts, longest_context=longest)


def ab_record(parallel: bool = False) -> dict[str, Any]:
    def arm(k: float) -> dict[str, Any]:
        steps = [
            {"step": 10 * (i + 1), "train/reward": k + i / 8, "train/kl": k * (i + 1) / 100,
             "train/kl_k1": -k * (i + 1), "train/loss": -k - i, "time/train/step_s": k * 7, "time/update_s": k * 5}
            for i in range(3)
        ]  # fmt: skip
        return dict(metrics=steps, summary={"eval/last": k / 4, "time/train/step_avg_last10_s": k * 7})

    return dict(
        kind="ab", config=dict(ab=dict(parallel=parallel)), arms={"reference": arm(1.0), "chunked": arm(2.0)},
        agreement={"agree": True, "largest_difference": 0.125},
    )  # fmt: skip
