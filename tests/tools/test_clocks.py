"""The clocks, with a clock that stands still unless something works."""

from __future__ import annotations

from typing import Any

import pytest

from logitless.lab.tools import timing


class Machine:
    """Dispatching a call takes 1 ms; the work of each takes 10 ms, which only a wait lets pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self.queued, self.calls = 0.0, 0, 0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timing.jax, "block_until_ready", self.wait)

    def f(self, x: int) -> int:
        self.calls += 1
        self.queued += 1
        self.now += 1e-3
        return x + self.calls

    def wait(self, out: Any) -> Any:
        assert isinstance(out, int)
        self.now += 10e-3 * self.queued
        self.queued = 0
        return out


def test_the_wait_is_timed_and_not_the_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    assert timing.wall_times(machine.f, 1, repeats=3) == pytest.approx([11.0, 11.0, 11.0])
    assert timing.back_to_back(machine.f, 1, repeats=4) == pytest.approx(11.0) and machine.queued == 0


def test_back_to_back_has_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device works while the host dispatches: only the longer of the two counts."""
    machine = Machine(monkeypatch)
    monkeypatch.setattr(timing.jax, "block_until_ready", lambda out: setattr(machine, "now", max(machine.now, 0.040)))
    assert timing.back_to_back(machine.f, 1, repeats=4) == pytest.approx(10.0)


def test_a_turn_warms_up_and_has_every_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    found = timing.turn(machine.f, 1, repeats=2, warmup=3)
    assert machine.calls == 3 + 2 + 2
    assert found == dict(wall_ms=pytest.approx([11.0, 11.0]), back_to_back_ms=pytest.approx(11.0))
    monkeypatch.setattr(timing.jax, "default_backend", lambda: "gpu")
    profile = dict(device_ms=[9.0, 9.5], kernels=[["a", 9.5]])
    monkeypatch.setattr(timing, "profile", lambda f, *args, repeats: profile if (args, repeats) == ((1,), 2) else {})
    again = timing.turn(machine.f, 1, repeats=2, warmup=0)
    assert {k: again[k] for k in profile} == profile and set(again) == {*found, *profile}


@pytest.mark.parametrize("repeats", [1, 2])
def test_device_time_is_the_sum_of_the_kernels(monkeypatch: pytest.MonkeyPatch, repeats: int) -> None:
    from jax.experimental.mosaic.gpu import profiler

    runs = [[("rows", 1.0), ("gemm", 1.0), ("gemm", 2.0)], [("rows", 1.5), ("gemm", 1.5), ("gemm", 2.0)]][:repeats]

    def measure(f: Any, *, aggregate: bool, iterations: int) -> Any:
        assert not aggregate and iterations == repeats
        return lambda *args: (None, runs[0] if iterations == 1 else runs)

    monkeypatch.setattr(profiler, "measure", measure)
    found = timing.profile(lambda: None, repeats=repeats)
    assert found["device_ms"] == [4.0, 5.0][:repeats]
    assert found["kernels"][0] == ["gemm", 2, 3.0 if repeats == 1 else 3.5] and found["kernels"][1][0] == "rows"
    monkeypatch.setattr(profiler, "measure", lambda *a, **k: lambda *args: (None, None))
    assert timing.profile(lambda: None, repeats=2) == {}

    def confused(*args: Any) -> Any:
        raise RuntimeError("The number of kernel launches is not divisible by the number of iterations")

    monkeypatch.setattr(profiler, "measure", lambda *a, **k: confused)
    assert timing.profile(lambda: None, repeats=2) == {}


def test_a_summary_names_its_quantiles() -> None:
    found = timing.summary([5.0, 1.0, 4.0, 2.0, 3.0, 6.0, 7.0, 8.0, 9.0, 10.0, 21.0])
    assert [found[k] for k in ("median_ms", "min_ms", "p10_ms", "p90_ms", "max_ms")] == [6.0, 1.0, 2.0, 10.0, 21.0]
    assert found["mean_ms"] == pytest.approx(76 / 11) and found["repeats"] == 11
