"""Arms in turn, ratios with their intervals, gates, and what is done where there is no room; all with known times."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from bench_fakes import prepared, scripted, turn
from logitless.lab.bench import microbench, ratios, text_table
from logitless.lab.bench.case import Arm, BenchConfig, arms, reference_of, twin
from logitless.lab.tools.command_config import ConfigError

CASE = dict(tokens=16, rows=2, hidden=16, vocab=64, dtype="float32", verify=False)


def test_arms_take_turns_and_every_round_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"strong": [10.0, 20.0, 40.0], "default": [5.0, 11.0, 18.0]}
    left = {k: iter(v) for k, v in times.items()}

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        if job["do"] == "prepare":
            return prepared()
        t = next(left[job["name"]])
        return turn(t, t + 1, t + 100, back_to_back=t / 2)

    asked = scripted(monkeypatch, answer)
    record = microbench.run(BenchConfig(**CASE, baselines=["strong"], rounds=3))
    assert [j["name"] for j in asked if j["do"] == "turn"] == ["strong", "default"] * 3
    assert [j["do"] for j in asked].count("open") == 1  # one process for all of them
    row = record["arms"]["default"]
    assert row["rounds"] == {"wall_ms": [6.0, 12.0, 19.0], "back_to_back_ms": [2.5, 5.5, 9.0]}  # medians of a turn
    assert row["repeats"] == 9 and row["max_ms"] == 118.0 and row["min_ms"] == 5.0
    assert row["median_ms"] == 18.0 and row["wall_ms"] == 12.0 and row["back_to_back_ms"] == 5.5
    d = np.log([6 / 11, 12 / 21, 19 / 41])
    wide = 4.303 * np.std(d, ddof=1) / math.sqrt(3)
    found = row["ratios"]["strong"]["wall_ms"]
    assert [found[k] for k in ("ratio", "low", "high")] == pytest.approx(
        list(np.exp([d.mean(), d.mean() - wide, d.mean() + wide]))
    )
    assert found["verdict"] == "faster" and "strong" not in record["arms"]["strong"]["ratios"]
    assert row["ratios"]["strong"]["back_to_back_ms"]["ratio"] == pytest.approx(
        np.exp(np.mean(np.log([5 / 10, 11 / 20, 18 / 40])))
    )
    text = text_table.table(record)
    assert f"of strong: {found['ratio']:.3f}x [{found['low']:.3f}, {found['high']:.3f}]" in text


def test_the_devices_clock_comes_first_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(job: dict[str, Any]) -> dict[str, Any]:
        if job["do"] == "prepare":
            return prepared()
        fast = job["name"] == "default"
        return turn(9.0, device_ms=[2.0 if fast else 4.0], kernels=[["gemm", 1.5], ["rows", 0.5]])

    scripted(monkeypatch, answer)
    record = microbench.run(BenchConfig(**CASE, baselines=["strong"], rounds=2))
    row = record["arms"]["default"]
    assert row["clock"] == "device_ms" and row["median_ms"] == 2.0 and row["wall_ms"] == 9.0
    assert list(row["ratios"]["strong"]) == ["device_ms", "wall_ms", "back_to_back_ms"]
    assert row["ratios"]["strong"]["device_ms"]["ratio"] == pytest.approx(0.5)
    assert row["ratios"]["strong"]["wall_ms"]["verdict"] == "no difference"
    assert row["kernels"] == [["gemm", 1.5], ["rows", 0.5]] and "wall 9.00" in text_table.table(record)


@pytest.mark.parametrize(
    "a, b, verdict, said",
    [
        ([1.0, 1.01, 0.99, 1.0], [2.0, 2.0, 2.0, 2.0], "faster", "0.500x [0.494, 0.507]"),
        ([2.0, 2.02, 1.98, 2.0], [1.0, 1.0, 1.0, 1.0], "slower", "2.000x [1.974, 2.026]"),
        ([1.0, 1.2, 0.8, 1.0], [1.0, 1.0, 1.0, 1.0], "cannot tell", "0.990x [0.760, 1.289] cannot tell"),
        ([1.0, 1.02, 0.98, 1.0], [1.0, 1.0, 1.0, 1.0], "no difference", "no difference"),
        ([1.0], [2.0], "one round: no interval", "0.500x (one round)"),
    ],
)
def test_the_verdict_follows_from_the_interval(a: list[float], b: list[float], verdict: str, said: str) -> None:
    found = ratios.ratio(a, b)
    assert found["verdict"] == verdict and said in ratios.shown(found)


def test_a_clock_that_failed_in_one_round_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = iter([dict(device_ms=[2.0]), {}])

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        return prepared() if job["do"] == "prepare" else turn(9.0, **next(devices))

    scripted(monkeypatch, answer)
    row = microbench.run(BenchConfig(**CASE, baselines=[], rounds=2))["arms"]["default"]
    assert row["clock"] == "wall_ms" and set(row["rounds"]) == {"wall_ms", "back_to_back_ms"}


def test_a_busy_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, lambda job: turn(1.0) if job["do"] == "turn" else prepared())
    for load, said in ((0.2, False), (6.3, True)):
        monkeypatch.setattr(microbench.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        text = text_table.table(microbench.run(BenchConfig(**CASE, rounds=1)))
        assert ("not alone: 6.3 cores were busy" in text) == said


def test_pairs_and_not_means_are_compared() -> None:
    """A machine that gets slower by a third hits both: the ratio of each round is what it was."""
    drift = np.linspace(1.0, 1.33, 6)
    found = ratios.ratio(list(0.97 * drift), list(drift))
    assert found["verdict"] == "faster" and found["high"] - found["low"] < 1e-9


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    a, b = np.exp(0.05 * rng.standard_normal((2, 2000, 6)))
    hits = [r["low"] <= 0.9 <= r["high"] for x, y in zip(0.9 * a, b, strict=True) for r in [ratios.ratio(x, y)]]
    assert np.mean(hits) == pytest.approx(0.95, abs=0.015)
    assert np.all(np.diff(ratios.T_95) < 0) and ratios.T_95[-1] > 1.96 and len(ratios.T_95) == 30


def row(ms: list[float], temporaries: int = 100, **more: Any) -> dict[str, Any]:
    return {"rounds": {"wall_ms": ms}, "mem/compiler": {"temporaries": temporaries}, **more}


@pytest.mark.parametrize(
    "what, limit, state, value",
    [
        ("time", 0.6, "met", 0.5),
        ("time", 0.5, "undecided", 0.5),  # the limit is inside the interval
        ("time", 0.4, "missed", 0.5),
        ("memory", 0.25, "met", 0.25),
        ("memory", 0.2, "missed", 0.25),
        ("mib", 1.0, "met", 1.0),
        ("mib", 0.9, "missed", 1.0),
        ("rows", 1.0, "met", 0.8),
        ("rows", 0.7, "missed", 0.8),
    ],
)
def test_gates(what: str, limit: float, state: str, value: float) -> None:
    a = row([1.0, 1.01, 0.99], 2**20, rows=dict(norm=1.2e-3, max=1e-4))
    b = row([2.0, 2.0, 2.0], 2**22, rows=dict(norm=1e-3, max=1e-3))
    found = ratios.gate(what, a, b, limit)
    assert found["state"] == state and found["ok"] == (state != "missed")
    assert found["value"] == pytest.approx(value, rel=1e-2)


def test_a_gate_whose_arm_failed_is_not_met() -> None:
    good, bad = row([1.0, 1.01, 0.99], 2**20), dict(error="out of memory")
    for a, b in ((good, bad), (bad, good)):
        found = ratios.gate("time", a, b, 10.0)
        assert found["state"] == "not measured" and found["value"] is None and not found["ok"]


def test_a_missed_gate_fails_the_run_and_one_without_its_arm_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(job: dict[str, Any]) -> dict[str, Any]:
        if job["do"] == "prepare":
            return dict(error="not here: No module named 'torch'") if job["arm"]["kind"] == "peer" else prepared()
        return turn(2.0 if job["name"] == "default" else 1.0)

    scripted(monkeypatch, answer)
    gates = {"good": ("time", "default", "strong", 2.5), "liger": ("time", "default", "peer: liger", 0.1)}
    c = BenchConfig(**CASE, baselines=["strong"], gates=gates, rounds=2)
    found = microbench.run(c, how=microbench.How(peers=""))
    assert found["passed"] and list(found["gates"]) == ["good"]
    assert found["arms"]["peer: liger"]["error"].startswith("not here")
    c.gates["bad"] = ("time", "default", "strong", 1.5)
    found = microbench.run(c)
    assert found["gates"]["bad"]["state"] == "missed" and not found["passed"]
    assert "missed       bad" in text_table.table(found)


@pytest.mark.parametrize("loss, passed", [(1.00005, True), (1.2, False), (math.nan, False)])
def test_arms_whose_losses_disagree_do_not_pass(monkeypatch: pytest.MonkeyPatch, loss: float, passed: bool) -> None:
    def answer(job: dict[str, Any]) -> dict[str, Any]:
        return turn(1.0) if job["do"] == "turn" else prepared(loss if job["name"] == "default" else 1.0)

    scripted(monkeypatch, answer)
    record = microbench.run(BenchConfig(**CASE, rounds=1))
    assert record["passed"] == passed
    if not math.isnan(loss):
        assert record["loss_spread"] == pytest.approx(loss - 1)


def test_an_arm_over_another_batch_has_a_loss_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(job: dict[str, Any]) -> dict[str, Any]:
        return turn(1.0) if job["do"] == "turn" else prepared(5.0 if "live" in job["name"] else 1.0)

    scripted(monkeypatch, answer)
    few = {"half live": dict(of="default", batch=dict(live=0.5), against="strong")}
    record = microbench.run(BenchConfig(**CASE, arms=few, rounds=1))
    assert record["passed"] and "strong" in record["arms"]["half live"]["ratios"]


def test_an_arm_without_room_gets_a_process_of_its_own_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the shared process ``naive`` finds no memory; alone it does. Then processes take turns, not arms."""
    shared: dict[int, set[str]] = {}

    def answer(job: dict[str, Any]) -> Any:
        if job["do"] == "turn":
            return turn(1.0)
        there = shared.setdefault(job["worker"], set())
        if job["name"] == "naive" and there:
            return dict(error="out of memory")
        there.add(job["name"])
        return prepared()

    asked = scripted(monkeypatch, answer)
    record = microbench.run(BenchConfig(**CASE, baselines=["strong", "naive"], rounds=2))
    assert record["passed"] and all("error" not in r for r in record["arms"].values())
    took = [(j["worker"], j["name"]) for j in asked if j["do"] == "turn"]
    assert [name for _, name in took] == ["strong", "naive", "default"] * 2
    alone = {w for w, name in took if name == "naive"}
    assert len(alone) == 2 and not alone & {w for w, name in took if name != "naive"}
    live: set[int] = set()
    for job in asked:  # at no time are two processes open
        if job["do"] in ("open", "close"):
            live ^= {job["worker"]}
        assert len(live) <= 1


def test_what_can_never_fit_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(job: dict[str, Any]) -> Any:
        if job["do"] == "turn":
            return turn(1.0)
        return dict(error="out of memory", needs=200, limit=100) if job["name"] == "naive" else prepared()

    asked = scripted(monkeypatch, answer)
    record = microbench.run(BenchConfig(**CASE, rounds=1))
    assert [j["do"] for j in asked].count("open") == 1
    assert record["arms"]["naive"] == {"error": "out of memory"} and record["passed"]
    assert "out of memory" in text_table.table(record) and "median_ms" in record["arms"]["default"]


def test_a_process_that_is_killed_takes_only_its_arm_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(job: dict[str, Any]) -> Any:
        if job.get("name") == "naive":
            return None  # the system ends it, and with it what else it had compiled
        return turn(1.0) if job["do"] == "turn" else prepared()

    scripted(monkeypatch, answer)
    record = microbench.run(BenchConfig(**CASE, baselines=["strong", "naive"], rounds=2))
    assert record["arms"]["naive"] == {"error": "out of memory (killed)"} and record["passed"]
    assert len(record["arms"]["strong"]["rounds"]["wall_ms"]) == 2


def test_an_arm_that_fails_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, lambda job: dict(error="ValueError: boom") if job["do"] == "prepare" else turn(1.0))
    record = microbench.run(BenchConfig(**CASE, rounds=1))
    assert not record["passed"] and "boom" in text_table.table(record) and "not verified" in text_table.table(record)


def test_the_devices_peak_is_asked_of_a_process_that_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = dict(peak=90, inputs=40, outputs=20, temporaries=30, from_compile=False)

    def answer(job: dict[str, Any]) -> Any:
        if job["do"] == "peak":
            return dict(device=seen) if job["arm"]["kind"] == "library" else dict(error="out of memory")
        return turn(1.0) if job["do"] == "turn" else prepared(has_peaks=True)

    asked = scripted(monkeypatch, answer)
    record = microbench.run(BenchConfig(**CASE, baselines=["strong"], rounds=1))
    opened = [j for j in asked if j["do"] == "open"]
    caches = {j["environment"]["JAX_COMPILATION_CACHE_DIR"] for j in opened}
    assert len(opened) == 3 and len(caches) == 1  # the timing's, and one for each arm with the same cache
    assert record["arms"]["default"]["mem/device"] == seen
    assert record["arms"]["default"]["mem/peak_bytes_in_use_max"] == 90
    assert record["arms"]["strong"]["mem/device"] is None
    assert "seen 0.0 MiB" in text_table.table(record) and "plan 0.0 MiB" in text_table.table(record)
    microbench.run(BenchConfig(**CASE, baselines=["strong"], rounds=1, peaks=False))
    assert [j["do"] for j in asked].count("peak") == 2


def test_another_trees_library_takes_turns_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(job: dict[str, Any]) -> Any:
        return turn(speeds.get(job["name"], 1.0)) if job["do"] == "turn" else prepared()

    speeds = {"default (other tree)": 3.0}
    asked = scripted(monkeypatch, answer)
    c = BenchConfig(**CASE, baselines=["strong"], rounds=2)
    record = microbench.run(c, how=microbench.How(against="/elsewhere/src"))
    assert record["against"] == "/elsewhere/src" and twin("default") == "default (other tree)"
    by_worker = {(j["worker"], j["name"]) for j in asked if j["do"] == "turn"}
    assert by_worker == {(1, "strong"), (1, "default"), (2, "default (other tree)")}
    opened = {j["worker"]: j for j in asked if j["do"] == "open"}
    assert opened[2]["source"] == "/elsewhere/src" and not opened[1]["source"]
    assert all(o["environment"]["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false" for o in opened.values())
    order = [j["name"] for j in asked if j["do"] == "turn"]
    assert order == ["strong", "default", "default (other tree)"] * 2
    assert record["arms"]["default"]["ratios"]["default (other tree)"]["wall_ms"]["ratio"] == pytest.approx(1 / 3)
    assert {k: g["state"] for k, g in record["gates"].items()} == {
        "default: time / other tree": "met", "default: memory / other tree": "met"
    }  # fmt: skip
    speeds.update({"default (other tree)": 0.97})
    slower = microbench.run(c, how=microbench.How(against="/elsewhere/src"))
    assert slower["gates"]["default: time / other tree"]["state"] == "missed" and not slower["passed"]


def test_only_some_arms_and_what_they_are_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, lambda job: turn(1.0) if job["do"] == "turn" else prepared())
    c = BenchConfig(**{**CASE, "dtype": "bfloat16"}, logits_dtype="bfloat16", rounds=1)
    assert list(microbench.run(c, how=microbench.How(only=("kernel",)))["arms"]) == ["strong", "kernel"]
    assert list(microbench.run(c, how=microbench.How(only=("default",)))["arms"]) == ["strong/f32", "default"]
    assert list(microbench.run(c, how=microbench.How(only=("ker",)))["arms"]) == ["strong", "kernel"]
    c.arms = {"kernel, frozen": dict(of="kernel", frozen_head=True)}
    assert "kernel, frozen" not in microbench.run(c, how=microbench.How(only=("kernel",)))["arms"]  # that name is one's
    with pytest.raises(ConfigError, match=r"--arms best: expected .* of naive, strong"):
        microbench.run(c, how=microbench.How(only=("best",)))


def test_like_is_compared_with_like() -> None:
    c = BenchConfig(dtype="bfloat16", logits_dtype="bfloat16", head_grad_dtype="param")
    found = arms(c)
    assert list(found) == ["naive", "strong", "strong/f32", "default", "kernel"]
    assert found["default"].options == {} and found["default"].logits_dtype == "float32"
    assert found["kernel"].options == dict(logits_dtype="bfloat16", head_grad_dtype="param")
    references = {name: reference_of(name, found) for name in found}
    assert references == {
        "naive": "strong", "strong": None, "strong/f32": None, "default": "strong/f32", "kernel": "strong"
    }  # fmt: skip
    plain = arms(BenchConfig(logits_dtype="float32"))
    assert list(plain) == ["naive", "strong", "default"]  # no option is set: the default is all there is
    assert reference_of("default", {"default": Arm("library")}) is None
