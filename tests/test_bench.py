"""The bench command: arms in their own processes, verified, recorded, compared."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from logitless import cli
from logitless.bench import arm, microbench, suites
from logitless.logits import chunked
from logitless.tools import child, shapes
from logitless.tools.config import ConfigError, load

CONFIGS = Path(__file__).parent.parent / "configs" / "bench"
TINY = ["tokens=16", "rows=2", "hidden=16", "vocab=64", "repeats=2", "warmup=1", "dtype=float32"]


def test_runs_records_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.jsonl"
    assert cli.main(["bench", "--config", str(CONFIGS / "cpu_head_small.yaml"), f"out={out}", *TINY]) == 0
    record = json.loads(out.read_text())
    assert list(record["arms"]) == ["naive", "strong", "kernel"]
    for row in record["arms"].values():
        assert row["median_ms"] > 0 and row["repeats"] == 2
        assert row["bench/step_s_mean"] == pytest.approx(row["mean_ms"] / 1e3)
        assert set(row["mem/compiler"]) >= {"arguments", "outputs", "temporaries", "peak"}
        assert row["environment"]["platform"] == "cpu"
    losses = [row["loss"] for row in record["arms"].values()]
    assert max(losses) - min(losses) < 1e-5 and record["verify"]["passed"]
    capsys.readouterr()
    assert cli.main(["bench", "compare", str(out), str(out)]) == 0
    assert capsys.readouterr().out.count("1.000") >= 3


def test_logits_level_with_the_jax_backward(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    args = ["level=logits", "kernel.bwd_impl=jax", "baselines=[strong]", f"out={out}", *TINY]
    assert cli.main(["bench", *args]) == 0
    assert list(json.loads(out.read_text())["arms"]) == ["strong", "kernel (jax backward)"]


def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run jobs without a fresh process, which the tests of everything else do not need; returns what ran."""
    seen: list[str] = []

    def ask(module: str, job: dict[str, Any], timeout_s: int, environment: Any = None) -> dict[str, Any]:
        seen.append("check" if "gradcheck" in job else job["arm"].get("baseline", "kernel"))
        return json.loads(json.dumps(arm.check(job["gradcheck"]) if "gradcheck" in job else arm.run(job)))

    monkeypatch.setattr(child, "ask", ask)
    return seen


def test_a_sparse_backward_is_an_arm_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    args = ["tokens=128", "rows=4", "hidden=128", "vocab=8192", "repeats=2", "warmup=1", "baselines=[strong]"]
    sparse = ["dtype=bfloat16", "inputs=realistic", "kernel.sparse_backward=auto", "verify=false"]
    record = microbench.run(load(microbench.BenchConfig, None, [*args, *sparse]))
    assert list(record["arms"]) == ["strong", "kernel", "kernel, sparse backward"] and record["passed"]
    row = record["arms"]["kernel, sparse backward"]
    assert 0 < row["left_out_mass_max"] <= 2.0**-8 and "left_out_mass" not in record["arms"]["kernel"]
    assert record["arms"]["kernel"]["loss"] == pytest.approx(record["arms"]["strong"]["loss"], abs=1e-3)
    for bad in ("kernel.sparse_backward=often", "inputs=real"):
        with pytest.raises(ConfigError, match=bad.split("=", 1)[0]):
            microbench.run(load(microbench.BenchConfig, None, [*args, bad]))


@pytest.mark.parametrize("given, contract", [("auto", 1.5), (0.1, microbench.NO_LIMIT)])
def test_a_sparse_backward_is_verified_on_realistic_data(
    monkeypatch: pytest.MonkeyPatch, given: Any, contract: float
) -> None:
    asked = []

    def ask(module: str, job: dict[str, Any], timeout_s: int) -> dict[str, Any]:
        asked.append(job["gradcheck"])
        return dict(passed=job["gradcheck"]["sparse_backward"] == "off", gates={"g": {"ok": True}})

    monkeypatch.setattr(child, "ask", ask)
    found = microbench._verify(microbench.BenchConfig(kernel=microbench.Kernel(sparse_backward=given)))
    assert not found["passed"] and set(found["gates"]) == {"g", "sparse: g"}
    assert [job["sparse_backward"] for job in asked] == ["off", given]
    assert asked[1]["inputs"] == "realistic" and asked[1]["contract"] == contract


def test_a_kernel_that_does_not_verify_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    c = load(microbench.BenchConfig, None, [*TINY, "level=logits", "baselines=[]"])
    assert microbench.run(c)["passed"]
    right = chunked.pull_back
    monkeypatch.setattr(chunked, "pull_back", lambda *a: right(*a) * jnp.float32(1.1))
    record = microbench.run(c)
    assert not record["verify"]["passed"] and not record["passed"]


def test_an_arm_that_fails_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbench, "_run_arm", lambda c, arm: dict(error="exit 1: boom"))
    record = microbench.run(load(microbench.BenchConfig, None, [*TINY, "verify=false"]))
    assert not record["passed"] and "boom" in microbench.table(record)


def test_roofline_and_what_is_achieved(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a chip of the table: H200, one step of 50 ms at T=8192 H=4096 V=151936."""
    part = dict(
        times_ms=[49.0, 50.0, 51.0], live=8192, compiler={}, loss=1.0, grad_norms=[],
        device=dict(peak=10, inputs=4, outputs=4, temporaries=2, from_compile=False),
        environment=dict(device="NVIDIA H200", platform="gpu"),
    )  # fmt: skip
    sizes = ["tokens=8192", "hidden=4096", "vocab=151936", "dtype=bfloat16"]
    row = microbench._summarise(load(microbench.BenchConfig, None, sizes), [part])
    flops = 6 * 8192 * 4096 * 151936
    assert row["tflops"] == pytest.approx(flops / 0.05 / 1e12)
    assert row["gb_per_s"] == pytest.approx(2 * 2 * (8192 + 151936) * 4096 / 0.05 / 1e9)
    assert row["roofline_ms"] == pytest.approx(1e3 * flops / 989e12)
    assert row["roofline_ratio"] == pytest.approx(50 / row["roofline_ms"])
    assert row["mem/peak_bytes_in_use_max"] == 10 and row["mem/device"]["temporaries"] == 2
    level = load(microbench.BenchConfig, None, ["level=logits", "tokens=4096", "vocab=151936"])
    row = microbench._summarise(level, [part])
    assert row["roofline_ms"] == pytest.approx(1e3 * 2 * 2 * 4096 * 151936 / 4.8e12)
    float32 = load(microbench.BenchConfig, None, [*sizes, "dtype=float32"])
    assert microbench._summarise(float32, [part])["roofline_ms"] is None  # the table has bfloat16's speed


def test_device_memory_is_split() -> None:
    import numpy as np

    memory = arm._device_memory(1000, 700, [np.zeros(50, np.float32)], (np.zeros(25, np.float32),))
    assert memory == dict(peak=1000, inputs=200, outputs=100, temporaries=700, from_compile=False)
    assert arm._device_memory(700, 700, [], [])["from_compile"]  # type: ignore[index]
    assert arm._device_memory(None, None, [], []) is None


def test_a_suite_writes_one_file_and_survives_a_case_without_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = in_this_process(monkeypatch)
    small = dict(tokens=16, rows=2, hidden=16, vocab=64, repeats=2, warmup=1, dtype="float32")
    cases = [
        microbench.BenchConfig(name="one", baselines=["strong"], **small),
        microbench.BenchConfig(name="no room", baselines=["naive"], **small),
        microbench.BenchConfig(name="rl", batch_kind="rl", baselines=[], **small),
    ]
    monkeypatch.setattr(suites, "suites", lambda: {"x": cases})
    real = microbench._run_arm

    def starved(c: microbench.BenchConfig, arm: dict[str, Any]) -> dict[str, Any]:
        return dict(error="out of memory") if arm.get("baseline") == "naive" else real(c, arm)

    monkeypatch.setattr(microbench, "_run_arm", starved)
    out = tmp_path / "a" / "x.json"
    assert cli.main(["bench", "--suite", "x", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert [r["name"] for r in result["records"]] == ["one", "no room", "rl"] and result["passed"]
    assert result["records"][1]["arms"]["naive"] == {"error": "out of memory"}
    assert seen.count("check") == 1  # the same kernel is verified once
    progress = capsys.readouterr()
    assert "case 2/3: no room" in progress.err and "3 cases in" in progress.out
    assert cli.main(["bench", "compare", str(out), str(out)]) == 0
    assert "out of memory -> out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--suite", "tpu"], "suite 'tpu' is not known; expected one of cpu, h200"),
        (["--suite", "cpu", "seed=1"], "takes no configuration"),
        (["--suite", "cpu", "--only", "nothing"], "no case with 'nothing' in its name"),
        (["--out", "x.json"], "are for --suite"),
    ],
)
def test_bad_use_of_suites_exits_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_every_case_of_every_suite_can_be_run() -> None:
    known = suites.suites()
    assert set(known) == {"cpu", "h200"}
    for cases in known.values():
        assert len({c.name for c in cases}) == len(cases)
        for c in cases:
            microbench.check(c)
            assert c.kernel.enabled and c.tokens // c.rows > 0
        assert any(c.batch_kind == "rl" for c in cases)


def test_host_arrays_are_what_the_baselines_expect() -> None:
    import numpy as np

    (x,) = shapes.host_arrays("logits", 64, 1, 5000, np.float32, np.random.default_rng(0), 4)
    assert x.shape == (4, 16, 5000) and x.std() == pytest.approx(3.0, rel=0.05)
    h, w = shapes.host_arrays("head", 64, 256, 300, np.float32, np.random.default_rng(0), 4)
    assert (h.reshape(64, 256) @ w.T).std() == pytest.approx(3.0, rel=0.1)
    assert len(np.unique(w[:, 0])) > 290  # rows are different ones


def test_running_out_of_memory_is_recorded_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    c = load(microbench.BenchConfig, None, [*TINY, "verify=false", "baselines=[naive]"])
    real = microbench._run_arm

    def starved(c: microbench.BenchConfig, arm: dict) -> dict:
        return real(c, arm) if arm["kernel"] else dict(error="out of memory")

    monkeypatch.setattr(microbench, "_run_arm", starved)
    record = microbench.run(c)
    assert record["arms"]["naive"] == {"error": "out of memory"}
    assert record["arms"]["kernel"]["median_ms"] > 0
    assert "out of memory" in microbench.table(record)


@pytest.mark.parametrize(
    "override, message",
    [
        ("kernel.enbled=true", "Did you mean 'kernel.enabled'"),
        ("model=qwen3", "model: 'qwen3', expected one of"),
        ("baselines=[nave]", "baselines: 'nave'"),
        ("tokens=17", "17 do not split into 2 rows"),
        ("batch_kind=x", "batch_kind: 'x'"),
    ],
)
def test_bad_configuration_is_exit_code_2(override: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *TINY, override]) == 2
    assert message in capsys.readouterr().err


def test_compare_refuses_what_is_not_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    assert cli.main(["bench", "compare", str(bad), str(bad)]) == 2
    assert "not a result of" in capsys.readouterr().err
    assert cli.main(["bench", "compare", str(tmp_path / "none"), str(bad)]) == 2
    assert "no such file" in capsys.readouterr().err


def test_every_shipped_configuration_loads() -> None:
    names = {p.stem for p in CONFIGS.glob("*.yaml")}
    for level, kinds in (("logits_bpd1_t4096_vocab151936", ("baseline", "pallas", "jaxbwd")),):
        assert {f"{level}_{k}" for k in kinds} <= names
    for kind in ("baseline", "fused"):
        assert {f"linear_bpd1_t8192_h4096_vocab151936_{kind}{s}" for s in ("", "_f32logits")} <= names
    for path in CONFIGS.glob("*.yaml"):
        c = load(microbench.BenchConfig, path)
        microbench.check(c)
        assert c.name == path.stem


def test_the_rl_batch_is_mostly_dead_weight() -> None:
    import numpy as np

    b = shapes.rl_batch(12 * 512, 100, np.random.default_rng(0), 12)
    live = b["mask"].mean()
    assert 0.2 < live < 0.7
    assert not b["mask"][:, :64].any()
    assert (b["advantages"] == 0).mean() == pytest.approx(1 / 3)


@pytest.mark.parametrize("again", [dict(device=dict(peak=90, from_compile=False)), dict(error="boom")])
def test_a_peak_that_the_autotuner_reached_is_measured_without_it(monkeypatch, again):
    asked = []

    def ask(module, job, timeout_s, environment):
        asked.append((job.get("peak_only", False), environment["JAX_COMPILATION_CACHE_DIR"]))
        return again if job.get("peak_only") else dict(times_ms=[1.0], device=dict(peak=500, from_compile=True))

    monkeypatch.setattr(microbench.child, "ask", ask)
    found = microbench._run_arm(microbench.BenchConfig(), dict(kernel=True))
    assert [peak_only for peak_only, _ in asked] == [False, True] and asked[0][1] == asked[1][1]
    assert found["times_ms"] == [1.0]
    assert found["device"] == again.get("device", dict(peak=500, from_compile=True))
