"""The GSM8K part of the pages: a small made-up record, as README.md and docs/training.md show it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loading import loaded
from logitless.lab.bench import report
from logitless.train import compare
from logitless.train.config import load
from logitless.train.run_records import run_numbers

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module, with a folder of its own for records."""
    module = loaded(ROOT / "benchmarks" / "tables.py")
    monkeypatch.setattr(module.harness, "RESULTS", tmp_path)
    return module


def run_of(final: float, update_s: float, peak_gib: float, backend: str) -> dict[str, Any]:
    """20 steps from a reward of 0.5 to ``final``."""
    metrics: list[dict[str, Any]] = [{"step": 0, "eval/reward": 0.7, "eval/answer": 0.5}]
    for step in range(1, 21):
        reward = 0.5 + (final - 0.5) * step / 20
        metrics.append({
            "step": step, "train/loss": 0.1, "train/reward": reward, "train/skipped": 0, "time/update_s": update_s,
            "time/rollout_s": 1.5, "time/train/step_s": 2.0 + update_s, "time/train/step_avg_last10_s": 2.0 + update_s,
            "rollout/tokens_crc32": step,
        })  # fmt: skip
    metrics[-1] |= {"eval/reward": 1.0, "eval/answer": 0.875}
    environment = {"device": "NVIDIA H200", "jax": "0.12.0"}
    summary = {**run_numbers(metrics), "memory/device_peak_bytes": peak_gib * 2**30, "loss_backend": backend}
    return {"metrics": metrics, "summary": {**summary, "environment": environment}}


@pytest.fixture
def record() -> dict[str, Any]:
    c = load(
        None, ["ab.control=true", "ab.replay=false", "ab.arms={dense: {backend: reference}, fused: {backend: chunked}}"]
    )
    runs = {"dense": run_of(0.9, 2.0, 51.5, "reference"), "fused": run_of(0.91, 0.75, 38.25, "mosaic_gpu")}
    control = run_of(0.89, 2.0, 51.5, "reference")
    curves = [run["metrics"] for run in (*runs.values(), control)]
    agreement = compare.agreement(c, curves[0], curves[1], control=curves[2])
    return {
        "kind": "ab", "name": "gsm8k", "config": dataclasses.asdict(c), "parallel": False, "arms": runs,
        "control": control, "ratios": {"fused": {}}, "agreement": {"fused": agreement},
    }  # fmt: skip


def write(tables: ModuleType, record: dict[str, Any], **same: Any) -> None:
    found = {key: {"mean": 0.9, "ratio": 0.9, "interval": [0.875, 0.925]} for key in ("update", "step")}
    times = {**record, "same_completions": {"dense": found, "fused": found}, **same}
    for name, content in ((tables.LEARN, record), (tables.SAME, times)):
        (tables.harness.RESULTS / name).write_text(json.dumps(content))


def test_pages_and_curves_hold_what_the_records_say(tables: ModuleType, record: dict[str, Any]) -> None:
    replay = {
        f"replay_grad_norm_{key}": value for key, value in (("deviation", 2e-3), ("control", 1e-3), ("limit", 0.01))
    }
    fused = {**record["agreement"]["fused"], **replay, "verdict": "agrees, by replay"}
    write(tables, record, agreement={"fused": fused}, arms={k: run_of(0.6, 3, 42, "x") for k in record["arms"]})
    page, brief = tables.gsm8k("plots", True), tables.gsm8k("docs/plots", False)
    for line in (
        "| | dense (reference) | fused (mosaic_gpu) | control (reference) |",
        "| sampled reward, last 10 steps | 0.810 | 0.818 | 0.802 |",
        "| held-out answers right, before | 50.0 % | 50.0 % | 50.0 % |",
        "| held-out answers right, at the end | 87.5 % | 87.5 % | 87.5 % |",
    ):
        assert line in page and line in brief, line
    assert "NVIDIA H200, jax 0.12.0; 20 steps" in page and "0.900 (0.900 [0.875, 0.925])" in brief
    assert "fused against dense: " in page and "fused against dense: " not in brief
    assert "fused: agrees, by replay. Gradient norm, at the step nearest to its limit: 2.0e-03" in page
    curve = tables.reward_curve(record)
    assert [s.label for s in curve.series] == ["dense", "fused", "control"]
    assert curve.series[0].points[0] == (3.0, pytest.approx(0.5 + 0.4 * 3 / 20)) and len(curve.series[0].points) == 4


def test_the_report_has_the_control_too(tables: ModuleType, record: dict[str, Any], tmp_path: Path) -> None:
    write(tables, record)
    report.write([tmp_path / tables.LEARN], tmp_path / "page.html", plots=tmp_path / "plots")
    (svg,) = (tmp_path / "plots").glob("reward-by-step-*.svg")
    assert ">control<" in svg.read_text() and ">control</th>" in (tmp_path / "page.html").read_text()


def test_a_report_on_the_same_completions_compares_no_free_times(
    tables: ModuleType, record: dict[str, Any], tmp_path: Path
) -> None:
    write(tables, record)
    report.write([tmp_path / tables.SAME], tmp_path / "page.html", plots=tmp_path / "plots")
    html = (tmp_path / "page.html").read_text()
    assert html.index("0.900 (0.900 [0.875, 0.925])") < html.index("not to be compared") < html.index("update phase")
    assert not list((tmp_path / "plots").glob("*time-by-step*"))
